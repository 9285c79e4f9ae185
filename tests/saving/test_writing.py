"""Saves that do not end: the old file stays, or the new one is there, and nothing else lies about."""

import errno
import json
import os
import pathlib
import resource
import signal
import sys

import numpy as np
import pytest

from treeparams import saving
from treeparams._files import file as files, source as replacement

from .test_faults import tree_of


def names_in(folder):
    return sorted(each.name for each in folder.iterdir())


def fill_of(path):
    return float(saving.load(path, tree_of(0))["first"][0, 0])


def failing(error):
    def fails(*_, **__):
        raise error

    return fails


def test_all_is_on_the_disk_before_it_takes_the_place_of_the_old_file(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace

    def note_fsync(descriptor):
        of = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("fsync", of.parent if of.is_file() else of, of.stat().st_size if of.is_file() else 0))
        fsync(descriptor)

    def note_replace(source, target):
        calls.append(("replace", pathlib.Path(target).parent, os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    saving.save(tmp_path / "m", tree_of(1))
    size = (tmp_path / "m").stat().st_size
    assert calls == [("fsync", tmp_path, size), ("replace", tmp_path, size), ("fsync", tmp_path, 0)]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m"
    saving.save(path, tree_of(1))
    for call in ("fsync", "replace"):
        for error in (OSError(errno.ENOSPC, "full"), KeyboardInterrupt("full")):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, failing(error))
                with pytest.raises(type(error), match="full"):
                    saving.save(path, tree_of(2))
            assert (names_in(tmp_path), fill_of(path)) == (["m"], 1)


@pytest.mark.parametrize("can_list", [True, False])
def test_a_file_system_without_locks_without_fsync_or_without_lists(tmp_path, monkeypatch, can_list):
    opened, denied = os.open, failing(OSError(errno.EACCES, "denied"))
    monkeypatch.setattr(replacement.fcntl, "flock", failing(OSError(errno.ENOSYS, "no locks")))
    monkeypatch.setattr(os, "fsync", failing(OSError(errno.EINVAL, "no fsync")))
    if not can_list:
        monkeypatch.setattr(os, "listdir", denied)
        monkeypatch.setattr(os, "open", lambda path, *args: (denied if os.path.isdir(path) else opened)(path, *args))
    saving.save(tmp_path / "m", tree_of(1))
    monkeypatch.undo()
    assert (names_in(tmp_path), fill_of(tmp_path / "m")) == (["m"], 1)


def test_where_nothing_can_be_written_or_read(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    refused = {"none/m": FileNotFoundError, "file/m": NotADirectoryError, "": IsADirectoryError, "/proc/m": OSError}
    for path, error in refused.items():
        with pytest.raises(error):
            saving.save(tmp_path / path, tree_of(1))
    assert names_in(tmp_path) == ["file"]
    for read in (saving.metadata, lambda path: saving.load(path, {})):
        for path, error in {"none": FileNotFoundError, "": IsADirectoryError}.items():
            with pytest.raises(error):
                read(tmp_path / path)


def test_what_another_process_writes_is_left_alone(tmp_path, monkeypatch):
    path, replaced = tmp_path / "m", []
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda source, target: replaced.append(source))
        saving.save(path, tree_of(1))  # the file lies there as if the process had been killed
    unfinished = pathlib.Path(*replaced)
    other = tmp_path / (unfinished.name[:3] + "0000000" + unfinished.name[10:])  # of a file of another name
    other.write_bytes(b"")
    with open(unfinished, "rb") as file:
        replacement.fcntl.flock(file, replacement.fcntl.LOCK_EX)
        saving.save(path, tree_of(1))
        assert names_in(tmp_path) == sorted([other.name, unfinished.name, "m"])
    saving.save(path, tree_of(1))
    assert names_in(tmp_path) == sorted([other.name, "m"])


def test_a_link_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "m"
    link.symlink_to("there/m")
    for fill in (1, 2):  # of nothing yet, and of a file
        saving.save(link, tree_of(fill))
        assert (link.is_symlink(), fill_of(target)) == (True, fill)
    assert (names_in(tmp_path), names_in(target.parent)) == (["link", "there"], ["m"])


def test_others_may_read_it_as_any_new_file_and_a_replaced_one_as_before(tmp_path):
    for umask in (0o022, 0o077):
        before = os.umask(umask)
        try:
            saving.save(tmp_path / f"{umask}", tree_of(1))
        finally:
            os.umask(before)
        assert (tmp_path / f"{umask}").stat().st_mode & 0o777 == 0o666 & ~umask
    path = tmp_path / "m"
    saving.save(path, tree_of(1))
    for mode in (0o600, 0o664, 0o2750, 0o4755):
        if os.geteuid() == 0:
            os.chown(path, 1234, 5678)
        path.chmod(mode)
        before = path.stat()
        saving.save(path, tree_of(2))
        after = path.stat()
        assert after.st_ino != before.st_ino
        assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


@pytest.mark.parametrize(("mode", "want"), [(0o4755, 0o755), (0o6770, 0o700), (0o664, 0o644), (0o604, 0o604)])
def test_a_file_that_gets_another_owner_allows_no_more_than_before(tmp_path, monkeypatch, mode, want):
    path, fstat = tmp_path / "m", os.fstat
    saving.save(path, tree_of(1))
    path.chmod(mode)
    monkeypatch.setattr(os, "fchown", failing(PermissionError(errno.EPERM, "Operation not permitted")))
    other = lambda its: os.stat_result([*its[:4], its.st_uid + 1, its.st_gid + 1, *its[6:]])
    monkeypatch.setattr(os, "fstat", lambda descriptor: other(fstat(descriptor)))
    saving.save(path, tree_of(2))
    assert path.stat().st_mode & 0o7777 == want


# -- Live buffers ------------------------------------------------------------------------------------------------------

LARGE = 300_000  # more than is written at once


def test_an_array_that_changes_while_it_is_written(tmp_path, monkeypatch):
    """As another thread may change a replay buffer, at the worst moment: between the checksum and the write."""
    crc32 = files.crc32
    for live in (np.zeros(10), np.zeros(LARGE), np.zeros(2 * LARGE)[::2], np.zeros((600, 500)).T, np.zeros(())):

        def and_change(piece, value=0, live=live):
            value = crc32(piece, value)
            live[...] += 1
            return value

        with monkeypatch.context() as patch:
            patch.setattr(files, "crc32", and_change)
            saving.save(tmp_path / "m", {"live": live})
        # Each piece is of one moment; what is not contiguous is copied as a whole.
        got = saving.load(tmp_path / "m", {"live": np.zeros_like(live)})["live"]
        assert len(np.unique(got)) == (max(1, -(-live.nbytes // (1 << 20))) if live.flags.c_contiguous else 1)
        assert live.min() > got.max()


def test_nobody_else_reads_a_private_file_while_it_is_written(tmp_path, monkeypatch):
    path, modes, pieces_of = tmp_path / "m", [], files._pieces_of

    def note_mode(leaf):
        modes.extend(each.stat().st_mode & 0o777 for each in tmp_path.glob(".*.unfinished"))
        return pieces_of(leaf)

    saving.save(path, tree_of(1))
    path.chmod(0o600)
    monkeypatch.setattr(files, "_pieces_of", note_mode)
    saving.save(path, tree_of(2))
    assert set(modes) == {0o600}


# -- At one time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["replace", "flock"])
def test_a_save_within_a_save_disturbs_neither(tmp_path, monkeypatch, moment):
    """Before the file gets its name it is left alone; if it is removed before it is locked, it is made again."""
    path, module = tmp_path / "m", os if moment == "replace" else replacement.fcntl
    call = getattr(module, moment)

    def save_and_call(*args):
        monkeypatch.setattr(module, moment, call)
        saving.save(path, tree_of(2))
        call(*args)

    monkeypatch.setattr(module, moment, save_and_call)
    saving.save(path, tree_of(1))
    assert (names_in(tmp_path), fill_of(path)) == (["m"], 1)  # the last one wins


def forks_that_end(count, work):
    """Runs some work in forked processes at one moment, and adds up what each returns."""
    ready, go = os.pipe()
    results, children = os.pipe(), []
    for number in range(count):
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(ready, 1)  # ends when all are there
            os.write(results[1], work(number).to_bytes(4, "little"))
            os._exit(0)
        children.append(child)
    os.close(go)
    assert {os.waitpid(child, 0)[1] for child in children} == {0}
    return sum(int.from_bytes(os.read(results[0], 4), "little") for _ in children)


def processes_at_one_file(folder, is_long):
    """In a process of its own, by test_states: savers of one path, and readers of one open file."""
    path = pathlib.Path(folder, "shared")
    many, rounds = {f"w{i}": np.full(50 + i, i, "f") for i in range(8)}, 2000 if is_long else 20

    def errors_of_a_saver(number):
        errors = 0
        for _ in range(rounds):
            try:
                saving.save(path, tree_of(number))
            except OSError:
                errors += 1
        return errors

    def errors_of_a_reader(number):
        return sum(bool((names[f"w{i % 8}"] != i % 8).any()) for i in range(number, number + 25 * rounds))

    errors = forks_that_end(8, errors_of_a_saver)
    found = saving.load(path, tree_of(0))
    is_whole = [np.unique(found[name].real).tolist() for name in ("first", "z", "low")]
    left = names_in(path.parent)
    saving.save(path, many)
    names = saving.names(path)
    print(json.dumps({"savers": [errors, is_whole, left], "readers": forks_that_end(8, errors_of_a_reader)}))


# -- Killed ------------------------------------------------------------------------------------------------------------


def saves_that_end_early(folder, is_long):
    """In a process of its own, by test_states: saves that are killed or find the disk full, and what they leave."""
    path = pathlib.Path(folder, "m")
    found = {"killed": [], "full": []}

    def report(kind, ending):
        left = names_in(path.parent)
        found[kind].append([ending, fill_of(path), len(left)])
        saving.save(path, tree_of(1))
        assert names_in(path.parent) == ["m"]

    def in_a_fork(prepare, argument):
        child = os.fork()
        if child == 0:
            prepare(argument)
            saving.save(path, tree_of(2))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "done"

    def kill_at_line(count):
        """Has the process kill itself before the n-th line of those that write a file."""
        lines = iter(range(count))

        def trace(frame, event, _):
            if frame.f_code.co_filename not in {files.__file__, replacement.__file__}:
                return None
            if event == "line" and next(lines, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)

    def kill_at_byte(size):
        """The kernel ends it in the middle of a write."""
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    saving.save(path, tree_of(1))
    size, line, ending = path.stat().st_size, 0, ""
    while ending != "done":
        ending = in_a_fork(kill_at_line, line)
        report("killed", ending)
        line += 1 if is_long else 3
    for at in np.linspace(0, size - 1, 5).astype(int).tolist():
        report("killed", in_a_fork(kill_at_byte, at))
    for at in np.linspace(0, size - 1, 5).astype(int).tolist():
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, resource.RLIM_INFINITY))
        try:
            saving.save(path, tree_of(2))
        except OSError as error:
            ending = errno.errorcode[error.errno]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        report("full", ending)
    print(json.dumps(found))
