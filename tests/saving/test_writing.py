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
from treeparams._files import file as files

from .test_faults import tree_of


def names_in(folder):
    return sorted(each.name for each in folder.iterdir())


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


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "m"
    saving.save(path, tree_of(1))

    for error in (OSError(errno.ENOSPC, "full"), KeyboardInterrupt()):

        def fail(*_, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(type(error), match="full" if isinstance(error, OSError) else None):
                saving.save(path, tree_of(2))
        assert names_in(tmp_path) == ["m"]
        assert (saving.load(path, tree_of(0))["first"] == 1).all()


def test_a_file_system_without_locks_or_without_fsync_of_folders(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    fsync = os.fsync

    def no_folders(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    monkeypatch.setattr(os, "fsync", no_folders)
    saving.save(tmp_path / "m", tree_of(1))
    assert (saving.load(tmp_path / "m", tree_of(0))["first"] == 1).all()
    assert names_in(tmp_path) == ["m"]


def test_where_nothing_can_be_written(tmp_path):
    with pytest.raises(FileNotFoundError):
        saving.save(tmp_path / "none" / "m", tree_of(1))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        saving.save(tmp_path / "file" / "m", tree_of(1))
    with pytest.raises(IsADirectoryError):
        saving.save(tmp_path, tree_of(1))
    with pytest.raises(OSError, match="/proc/"):
        saving.save("/proc/m", tree_of(1))
    assert names_in(tmp_path) == ["file"]
    for read in (saving.metadata, lambda path: saving.load(path, {})):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none")
        with pytest.raises(IsADirectoryError):
            read(tmp_path)


def test_what_another_process_writes_is_left_alone(tmp_path, monkeypatch):
    path, replaced = tmp_path / "m", []
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda source, target: replaced.append(source))
        saving.save(path, tree_of(1))  # the file lies there as if the process had been killed
    unfinished = pathlib.Path(*replaced)
    other = tmp_path / (unfinished.name[:3] + "0000000" + unfinished.name[10:])  # of a file of another name
    other.write_bytes(b"")
    with open(unfinished, "rb") as file:
        files.fcntl.flock(file, files.fcntl.LOCK_EX)
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
        assert link.is_symlink()
        assert (saving.load(target, tree_of(0))["first"] == fill).all()
    assert (names_in(tmp_path), names_in(target.parent)) == (["link", "there"], ["m"])


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_others_may_read_it_as_any_new_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        saving.save(tmp_path / "m", tree_of(1))
    finally:
        os.umask(before)
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o666 & ~umask


# -- Killed ------------------------------------------------------------------------------------------------------------


def saves_that_end_early(folder):
    """In a process of its own, by test_states: saves that are killed or find the disk full, and what they leave."""
    path = pathlib.Path(folder, "m")
    found = {"killed": [], "full": []}
    fill_of = lambda: float(saving.load(path, tree_of(0))["first"][0, 0])

    def report(kind, ending):
        left = names_in(path.parent)
        found[kind].append([ending, fill_of(), len(left)])
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
            if frame.f_code.co_filename != files.__file__:
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
        line += 3
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
