"""Saves that do not end: the old file stays, or the new one is there. What another process does.

No array is made when this file is imported: the other process forks first.
"""

import errno
import functools
import json
import os
import pathlib
import resource
import signal
import struct
import subprocess
import sys
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving
from treeparams._files import file as files, source as replacement

from ..zoo import ramp
from .files import assert_bits, fill_of, names_in, refused, taken, tree_of

failing = lambda error: mock.Mock(side_effect=error)


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
                refused("full", saving.save, path, tree_of(2), kind=type(error))
            assert (names_in(tmp_path), fill_of(path)) == (["m"], 1)


def test_a_file_system_without_locks_without_fsync_and_without_lists(tmp_path, monkeypatch):
    opened, denied = os.open, failing(OSError(errno.EACCES, "denied"))
    monkeypatch.setattr(replacement.fcntl, "flock", failing(OSError(errno.ENOSYS, "no locks")))
    monkeypatch.setattr(os, "fsync", failing(OSError(errno.EINVAL, "no fsync")))
    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(os, "open", lambda path, *args: (denied if os.path.isdir(path) else opened)(path, *args))
    saving.save(tmp_path / "m", tree_of(1))
    monkeypatch.undo()
    assert (names_in(tmp_path), fill_of(tmp_path / "m")) == (["m"], 1)


def test_where_nothing_can_be_written_or_read(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path, kind in {"file/m": NotADirectoryError, "": IsADirectoryError, "/proc/m": OSError}.items():
        refused(None, saving.save, tmp_path / path, tree_of(1), kind=kind)
    assert names_in(tmp_path) == ["file"]
    for path, kind in {"none": FileNotFoundError, "": IsADirectoryError}.items():
        refused(None, saving.load, tmp_path / path, {}, kind=kind)


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


def test_others_may_read_it_as_any_new_file_and_a_replaced_one_as_before(tmp_path, monkeypatch, request):
    path, modes, pieces_of = tmp_path / "m", [], files._pieces_of
    request.addfinalizer(functools.partial(os.umask, os.umask(0o022)))
    for umask in (0o022, 0o077):
        os.umask(umask)
        saving.save(tmp_path / f"{umask}", tree_of(1))
        assert (tmp_path / f"{umask}").stat().st_mode & 0o777 == 0o666 & ~umask

    def note_mode(leaf):
        modes.extend(each.stat().st_mode & 0o777 for each in tmp_path.glob(".*.unfinished"))
        return pieces_of(leaf)

    saving.save(path, tree_of(1))
    monkeypatch.setattr(files, "_pieces_of", note_mode)
    for mode in (0o664, 0o2750, 0o4755):
        if os.geteuid() == 0:
            os.chown(path, 1234, 5678)
        path.chmod(mode)
        before = path.stat()
        saving.save(path, tree_of(2))
        after = path.stat()
        assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert set(modes) == {0o600}  # nobody else reads it while it is written


@pytest.mark.parametrize(("mode", "want"), [(0o6770, 0o700), (0o664, 0o644), (0o604, 0o604)])
def test_a_file_that_gets_another_owner_allows_no_more_than_before(tmp_path, monkeypatch, mode, want):
    path, fstat = tmp_path / "m", os.fstat
    saving.save(path, tree_of(1))
    path.chmod(mode)
    monkeypatch.setattr(os, "fchown", failing(PermissionError(errno.EPERM, "Operation not permitted")))
    other = lambda its: os.stat_result([*its[:4], its.st_uid + 1, its.st_gid + 1, *its[6:]])
    monkeypatch.setattr(os, "fstat", lambda descriptor: other(fstat(descriptor)))
    saving.save(path, tree_of(2))
    assert path.stat().st_mode & 0o7777 == want


def test_an_array_that_changes_while_it_is_written(tmp_path, monkeypatch):
    """As another thread may change a replay buffer, at the worst moment: between the checksum and the write."""
    crc32, large = files.crc32, 300_000  # more than is written at once
    for live in (np.zeros(10), np.zeros(large), np.zeros(2 * large)[::2], np.zeros((600, 500)).T, np.zeros(())):

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


RULE = optax.sgd(optax.linear_schedule(0.1, 0.0, 20), momentum=0.9)
TXS = {form: optim.trainable(RULE, form=form) for form in ("tree", "stacks")}


@pytest.fixture(scope="module")
def other(trained, tmp_path_factory, request):
    """One process that does all this, and what it has found: starting it takes longest."""
    folders, is_long = [str(tmp_path_factory.mktemp("writing")) for _ in range(2)], request.config.getoption("--long")
    code = (
        "from tests.saving.test_writing import *\n"
        f"saves_that_end_early({folders[0]!r}, {is_long})\n"
        f"processes_at_one_file({folders[1]!r}, {is_long})\n"
        f"saving.save('{trained[0]}/after', step(saving.load('{trained[0]}/before', begun(5))))\n"
        "receive()"
    )
    arguments, root = [sys.executable, "-W", "ignore", "-c", code], pathlib.Path(__file__).parents[2]
    with subprocess.Popen(arguments, stdin=-1, stdout=-1, cwd=root, env=os.environ | {"XLA_FLAGS": ""}) as process:
        yield process, [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdin.close()


def begun(seed):
    runs = {"key": jax.random.key(seed)}
    for form, tx in TXS.items():
        shared = ramp(2, 3, start=seed)
        model = {"embed": shared, "head": shared, "bias": ramp(3, start=seed), "n": np.array(seed, np.int32)}
        runs[form] = {"model": model, "state": tx.init(model), "average": tp.Ema(model, 0.5)}
    return runs


@tp.jit
def step(runs):
    key, now = jax.random.split(runs["key"])
    noise, done = jax.random.uniform(now, (3,)), {"key": key}
    with jax.numpy_dtype_promotion("standard"):
        for form, tx in TXS.items():
            run, grads = runs[form], {"embed": jnp.cos(runs[form]["model"]["embed"]) * noise[None], "bias": noise}
            model, state = optim.step(tx, grads, run["state"], run["model"])
            model |= {"n": model["n"] + 1}
            done[form] = {"model": model, "state": state, "average": run["average"].update(model)}
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder, runs = tmp_path_factory.mktemp("states"), begun(3)
    for form, tx in TXS.items():
        run = runs[form]
        run["state"] = taken(run["state"])
        for trainable in ("bias", None):  # a part is frozen for a step, and thawed
            run["state"] = taken(optim.set_trainable(tx, run["state"], run["model"], trainable), 1)
    saving.save(folder / "before", runs)
    return folder, runs


def test_training_goes_on_in_another_process_bit_for_bit(trained, other):
    folder, runs = trained
    assert [list(map(int, runs[form]["state"].counts)) for form in TXS] == [[4, 3]] * 2
    want = step(runs)
    assert assert_bits(saving.load(folder / "after", want), want) > 20


def endings_of_forks(*works):
    """What works return in processes of their own that begin together, each a small number; or minus its signal."""
    ready, go = os.pipe()
    children = []
    for work in works:
        children.append(os.fork())
        if children[-1] == 0:
            os.close(go)
            os.read(ready, 1)  # ends when all are there
            os._exit(work())
    os.close(go)
    os.close(ready)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def error_of_a_save(path, fill):
    try:
        saving.save(path, tree_of(fill))
    except OSError as error:
        return errno.errorcode[error.errno]
    return ""


def processes_at_one_file(folder, is_long):
    path = pathlib.Path(folder, "shared")
    many, rounds = {f"w{i}": np.full(50 + i, i, "f") for i in range(8)}, 2000 if is_long else 20

    def errors_of_a_saver(number):
        return any(error_of_a_save(path, number) for _ in range(rounds))

    def errors_of_a_reader(number):
        return any((names[f"w{i % 8}"] != i % 8).any() for i in range(number, number + 25 * rounds))

    savers, readers = ([functools.partial(of, i) for i in range(8)] for of in (errors_of_a_saver, errors_of_a_reader))
    of_savers = endings_of_forks(*savers)
    found, left = saving.load(path, tree_of(0)), names_in(path.parent)
    is_whole = [np.unique(found[name].real).tolist() for name in ("first", "z", "low")]
    saving.save(path, many)
    names = saving.names(path)
    print(json.dumps([of_savers, is_whole, left, endings_of_forks(*readers)]))


def test_processes_that_save_to_one_path_or_read_from_one_file(other):
    of_savers, values, left, of_readers = other[1][1]
    assert (of_savers, left, of_readers) == ([0] * 8, ["shared"], [0] * 8)
    assert values in [[[number]] * 3 for number in range(8)]  # all of one saver


def saves_that_end_early(folder, is_long):
    path = pathlib.Path(folder, "m")
    found = {"killed": [], "full": []}

    def report(kind, ending):
        found[kind].append([ending, fill_of(path), len(names_in(path.parent))])
        saving.save(path, tree_of(1))
        assert names_in(path.parent) == ["m"]

    def save_until(count):
        """Has the process kill itself before the n-th line of those that write a file."""
        lines = iter(range(count))

        def trace(frame, event, _):
            if frame.f_code.co_filename not in {files.__file__, replacement.__file__}:
                return None
            if event == "line" and next(lines, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        return error_of_a_save(path, 2) != ""

    saving.save(path, tree_of(1))
    line, ending = 0, None
    while ending != 0:
        (ending,) = endings_of_forks(functools.partial(save_until, line))
        report("killed", ending)
        line += 1 if is_long else 4
    for at in np.linspace(0, path.stat().st_size - 1, 5).astype(int).tolist():
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, resource.RLIM_INFINITY))
        ending = error_of_a_save(path, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        report("full", ending)
    print(json.dumps(found))


def test_a_save_that_is_killed_or_finds_the_disk_full_leaves_the_old_file_or_the_new(other):
    found = other[1][0]
    assert found["full"] == [["EFBIG", 1, 1]] * 5
    *killed, done = found["killed"]
    assert (len(killed) >= 20, done) == (True, [0, 2, 1])
    endings, fills, left = zip(*killed, strict=True)
    assert (set(endings), set(fills), list(fills)) == ({-signal.SIGKILL}, {1, 2}, sorted(fills))  # the old one first
    assert set(left) == {1, 2}  # what is left of some is gone after the next save


class Net(eqx.Module):
    embed: jax.Array
    layers: list
    head: jax.Array
    mean: jax.Array = tp.field(trainable=False)


def raveled(cls):
    shared, layers = ramp(4, 3), [(jnp.zeros((3, 3), jnp.bfloat16), np.zeros(3, np.float32))]
    model = cls(shared, layers, shared, jnp.zeros(2, jnp.float32))
    return tp.ravel(model, tp.layout(model, ties={"head": "embed"}))


def receive():
    """In the other process: what it has, and then what each message makes of it."""
    jax.config.update("jax_enable_x64", True)
    (vector, restructure), version = raveled(type("Other", (Net,), {})), None
    print(json.dumps([restructure.layout.digest, jax.device_count(), str(jnp.arange(1).dtype)]), flush=True)
    while size := sys.stdin.buffer.read(8):
        message = sys.stdin.buffer.read(struct.unpack("<q", size)[0])
        try:
            vector, version = saving.loads(message, vector, restructure, version=version)
        except ValueError as error:
            print("refused:", str(error).splitlines()[0], flush=True)
        else:
            print(version, np.asarray(vector).tobytes().hex(), flush=True)


def test_two_processes_that_share_nothing_but_a_pipe(other):
    process, found = other

    def says(message):
        process.stdin.write(struct.pack("<q", len(message)) + message)
        process.stdin.flush()
        return process.stdout.readline().decode().strip()

    vector, restructure = raveled(Net)
    vector += 1
    told = np.asarray(vector).tobytes().hex()
    assert found[2] == [restructure.layout.digest, 1, "int64"]
    first = saving.dumps(vector, restructure, version=(1, 0))
    assert says(first) == f"(1, 0) {told}"
    assert says(first[:-1]).startswith("refused: the message is no message of saving.dumps, or damaged")
    change = saving.dumps(vector.at[0].set(9), restructure, version=(1, 1), since=((1, 0), vector))
    assert says(change).startswith("(1, 1) ")
    assert says(first).startswith("refused: the message has version (1, 0), and you have (1, 1)")
    assert says(saving.dumps(vector, restructure, version=(2, 0))) == f"(2, 0) {told}"
