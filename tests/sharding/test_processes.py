"""Several processes on this machine: equal to one, found out where they differ, and ended where one dies."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from treeparams import sharding
from treeparams.sharding._processes.agree import agree
from treeparams.sharding._processes.interrupted import _Notice
from treeparams.sharding._processes.patience import Watch, Watched

pytestmark = pytest.mark.timeout(300)  # each process compiles for itself
PROGRAMS = pathlib.Path(__file__).with_name("_process_programs")


class Group:
    """Processes that run one program together, and what they write; none is left behind."""

    def __init__(self, program, count, folder):
        self.program, self.folder, self.processes = program, folder, []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        for process in range(count):
            command = [sys.executable, PROGRAMS, program, address, str(count), str(process), folder]
            with self.file(process, "err").open("wb") as err:
                self.processes.append(subprocess.Popen(command, stdout=err, stderr=err, env=environment))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def file(self, process, kind):
        return self.folder / f"{self.program}{process}.{kind}"

    def said(self, process):
        return self.file(process, "err").read_text()

    def statuses(self, until, limit):
        """Of all processes, as soon as this is so or the time is up."""
        end = time.monotonic() + limit
        while not until() and time.monotonic() < end:
            time.sleep(0.02)
        return [process.poll() for process in self.processes]

    def found(self, limit=60):
        """What each found, once all have written it."""
        files = [self.file(process, "json") for process in range(len(self.processes))]
        written = lambda: all(file.exists() for file in files)
        self.statuses(lambda: written() or all(process.poll() is not None for process in self.processes), limit)
        assert written(), "\n".join(map(self.said, range(len(files))))
        return [json.loads(file.read_text()) for file in files]

    def ended(self, limit):
        """The statuses at the end of all."""
        return self.statuses(lambda: all(process.poll() is not None for process in self.processes), limit)


FAULTS = {"worker": (1, signal.SIGKILL), "first": (0, signal.SIGKILL), "still": (1, signal.SIGSTOP)}


@pytest.fixture(scope="module")
def leaving(tmp_path_factory):
    """A group of which a process leaves its loop, while it lives."""
    with Group("leaves", 2, tmp_path_factory.mktemp("exits")) as group:
        yield group


@pytest.fixture(scope="module")
def faulty(leaving, tmp_path_factory):
    """Groups with a process that has died or stands still. The others take seconds to see it: they come first."""
    with contextlib.ExitStack() as stack:
        groups = {name: stack.enter_context(Group("waits", 2, tmp_path_factory.mktemp(name))) for name in FAULTS}
        for name, (process, sent) in FAULTS.items():
            groups[name].found()
            groups[name].processes[process].send_signal(sent)
        yield groups


@pytest.fixture(scope="module")
def three(faulty, tmp_path_factory):
    with Group("saves", 3, tmp_path_factory.mktemp("three")) as group:
        yield group


@pytest.fixture(scope="module")
def two(three):
    """Started when the three have saved their checkpoint."""
    three.found()
    with Group("restores", 2, three.folder) as group:
        yield group


def group(request):
    return request.getfixturevalue(request.param)


trained = pytest.fixture(group, params=["three", "two"])


def test_a_step_over_processes_equals_one_process(trained):
    errors = trained.found()[0]["errors"]
    assert set(errors) == ({"tree", "vector", "stacks"} if trained.program == "saves" else {"vector"})
    assert max(errors.values()) < 1e-6, errors


def test_a_checkpoint_goes_on_over_another_number_of_processes(three, two):
    losses, others = (group.found()[0]["losses"] for group in (three, two))
    assert len(losses) == 5
    assert losses == pytest.approx(others, abs=1e-6)
    assert len(set(losses)) == 5


def test_processes_with_different_plans_are_told_so_in_every_one_of_them(three):
    differences = three.found()
    for change, before, after in [
        ("width", r"float32\[15\]", r"float32\[6\]"),
        ("dtype", r"float32\[15\]", r"bfloat16\[15\]"),
        ("rules", "whole", r"P\('data'\)"),
    ]:
        messages = [each[change] for each in differences]
        assert len(messages) == 3
        assert len(set(messages)) == 1
        assert "the plans differ between the processes" in messages[0]
        assert "\n--- processes 0, 1\n+++ process 2\n" in messages[0]
        assert re.search(rf"^-.*layers\.0\.bias .*{before}", messages[0], re.MULTILINE), messages[0]
        assert re.search(rf"^\+.*layers\.0\.bias .*{after}", messages[0], re.MULTILINE), messages[0]


def test_processes_with_other_numbers_devices_or_values_are_told_so(two):
    one, other = two.found()
    assert one == other | {"errors": one["errors"]}
    assert not one["not asked for"]
    for change, what, line in [
        ("rate", "the programs of the update", r"^\+.*stablehlo\.constant dense<-5\.0*e-02>"),
        ("order", "the plans", r"^-devices  (\d+) (\d+)\n\+devices  \2 \1$"),
        ("types", "the plans", r"^\+mesh  'data': 2 (Auto|Explicit)$"),
        ("start", "the first values of the optimiser's state", r"learning_rate.* 0\.5$"),
        ("values", "the values of the models", r"^\+\['top'\]\['scale'\]  float32\[15\] values"),
    ]:
        assert f"{what} differ between the processes" in one[change], one[change]
        assert re.search(line, one[change], re.MULTILINE), one[change]


def test_a_sigterm_is_seen_by_all_processes_at_the_same_step(three):
    (at,) = {found["at"] for found in three.found()}
    assert at is not None


def test_processes_with_different_plans_end_each_with_the_difference(two):
    two.found()
    assert two.ended(limit=30) == [1, 1]
    for process in range(2):
        said = two.said(process)
        assert "ValueError: the plans differ between the processes" in said
        assert "\n--- process 0\n+++ process 1\n" in said


def test_an_exception_in_one_process_ends_all(three):
    three.found()
    statuses = three.ended(limit=30)
    assert 0 not in statuses
    assert None not in statuses
    assert "RuntimeError: a disk is full" in three.said(2)
    assert "This process ends with RuntimeError, in 5 s if the others do not end too." in three.said(2)


def test_a_process_that_dies_ends_the_others_and_so_does_one_that_stands_still(faulty):
    for name, (process, _) in FAULTS.items():
        other = faulty[name].processes[1 - process]
        assert faulty[name].statuses(lambda other=other: other.poll() is not None, limit=20)[1 - process], name
        said = faulty[name].said(1 - process)
        assert "Terminating process because the JAX distributed" in said or "This process ends with" in said
    stopped = faulty["still"].processes[1]
    assert stopped.poll() is None
    stopped.send_signal(signal.SIGCONT)
    assert None not in faulty["still"].ended(limit=20)
    assert stopped.returncode != 0


def ends_with_a_sentence(group):
    statuses = group.ended(limit=40)
    assert 0 not in statuses
    assert None not in statuses
    said = group.said(0) + group.said(1)  # where both wait, the end of one may be an error in the other
    waited = r"Process [01] of 2 ends: for \d s it has waited in (step [45678]|plan\.model, call 1) "
    assert re.search(waited, said), said[:2000]
    assert "sharding.initialize(patience=4)" in said


def test_a_process_that_leaves_its_loop_ends_all_with_a_sentence(leaving):
    ends_with_a_sentence(leaving)


@pytest.mark.parametrize("how", ["fewer", "skips", "model"])
def test_a_process_that_is_elsewhere_ends_all_with_a_sentence(how, request, tmp_path_factory):
    if not request.config.getoption("--long"):
        pytest.skip("one such process is in each run; all with --long")
    with Group("leaves", 2, tmp_path_factory.mktemp(how)) as group:
        ends_with_a_sentence(group)


class Unready:
    """What a device has not computed."""

    size, is_done = 1, False

    def is_ready(self):
        return self.is_done


@pytest.fixture
def watched(monkeypatch):
    """A watch that notes whom it would end, in place of ending the process."""
    ended = []
    monkeypatch.setattr(Watch, "end", lambda self, call, *times: (ended.append(call.number), self.calls.clear()))
    watch = Watch(0.2)
    watch.start()
    yield ended
    watch.stop()


def waits_for(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_who_waits_is_ended_and_who_always_takes_that_long_or_compiles_is_not(watched):
    slow = Unready()
    step = Watched(lambda value: (value,), "step")
    step(slow)
    time.sleep(0.4)  # the first call is not counted, and the next may take that much longer
    slow.is_done = True
    assert waits_for(lambda: step.rough > 0.2)
    again = Unready()
    step(again)
    time.sleep(0.3)
    again.is_done = True
    assert waits_for(lambda: step.slowest > 0.1)
    assert not watched
    step(Unready())
    assert waits_for(lambda: watched == [3])


def test_what_compiles_is_not_counted(watched):
    step = Watched(jax.jit(lambda value: (jax.lax.cond(True, jax.numpy.sin, jax.numpy.cos, value),)), "step")
    for length in (1, 1, 2):
        result = step(jax.numpy.ones(length))
    assert jax.block_until_ready(result)
    assert waits_for(lambda: not Watch.running.calls)
    assert not watched
    assert step.calls == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heartbeat": 0}, "heartbeat: expected a whole number, at least 1, got 0"),
        ({"heartbeat": 0.5}, "heartbeat: expected a whole number, at least 1, got 0.5"),
        ({"num_processes": True}, "num_processes: expected a whole number, at least 1, got True"),
        ({"num_processes": 2, "process_id": 2}, "process_id: expected 0 to 1 for 2 processes, got 2"),
        ({"patience": 0}, "patience: expected seconds, more than 0, or None to wait forever, got 0"),
        ({"process_id": -1}, "process_id: expected a whole number, at least 0, got -1"),
        (
            {"coordinator_address": "10.0.0.1"},
            "coordinator_address: expected host and port of process 0, .*'10.0.0.1'$",
        ),
    ],
)
@pytest.mark.usefixtures("without_type_checks")
def test_what_initialize_cannot_take_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        sharding.initialize(**given)


def test_one_process_agrees_with_itself():
    agree("anything", "the plans")


def test_in_one_process_a_sigterm_is_seen_by_the_next_step_and_a_second_one_ends(monkeypatch):
    monkeypatch.setattr(_Notice, "has_come", False)
    monkeypatch.setattr(_Notice, "is_awaited", False)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread, pytest.raises(ValueError, match="in the main thread"):
            thread.submit(sharding.interrupted).result()
        assert not sharding.interrupted()
        os.kill(os.getpid(), signal.SIGTERM)
        assert sharding.interrupted()
        assert sharding.interrupted()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
