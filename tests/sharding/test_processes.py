"""Several processes on this machine: equal to one, told where they differ, and ended by JAX where one dies."""

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

import pytest

from treeparams.sharding._step import agree

pytestmark = pytest.mark.timeout(200)  # each process imports JAX and compiles
PROGRAMS = pathlib.Path(__file__).with_name("_process_programs")


class Group:
    """Processes that run one program together, and what they write; none is left behind."""

    def __init__(self, program, folder, count=2, started=None):
        self.program, self.folder, self.processes = program, folder, []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
        environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
        for process in range(count if started is None else started):
            command = [sys.executable, PROGRAMS, program, address, str(count), str(process), folder]
            with (folder / f"{program}{process}.err").open("wb") as err:
                self.processes.append(subprocess.Popen(command, stdout=err, stderr=err, env=environment))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self, process):
        return (self.folder / f"{self.program}{process}.err").read_text()

    def waits(self, until, limit=60):
        end = time.monotonic() + limit
        while not until() and time.monotonic() < end:
            time.sleep(0.02)
        return until()

    def found(self, limit=100):
        """What each found, once all have written it."""
        files = [self.folder / f"{self.program}{process}.json" for process in range(len(self.processes))]
        written = lambda: all(file.exists() for file in files)
        ended = lambda: all(process.poll() is not None for process in self.processes)
        self.waits(lambda: written() or ended(), limit)
        assert written(), "\n".join(map(self.said, range(len(files))))
        return [json.loads(file.read_text()) for file in files]

    def ready(self):
        assert self.waits(lambda: all((self.folder / f"ready{n}").exists() for n in range(len(self.processes))))

    def seconds_to_end(self, limit=60):
        """How long it takes until all that can end have ended."""
        start = time.monotonic()
        assert self.waits(lambda: all(process.poll() is not None for process in self.processes), limit)
        return time.monotonic() - start


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with Group("trains", tmp_path_factory.mktemp("two")) as group:
        yield group.found()


def test_two_processes_train_as_one_does(two):
    for found in two:
        assert found["errors"].keys() == {"tree", "vector", "stacks"}
        assert max(found["errors"].values()) < 1e-6, found["errors"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("width", r"^\+layers\.0\.bias  float32\[8\]"),
        ("dtype", r"^\+layers\.0\.bias  bfloat16\[16\]"),
        ("rules", r"^-layers\.0\.bias  float32\[16\]  whole.*\n(.*\n)*\+layers\.0\.bias  float32\[16\]  P\('data'\)"),
        ("rate", r"^\+.*stablehlo\.constant dense<-5\.0*e-02>"),
        ("order", r"^-devices  (\d+) (\d+)\n(.*\n)*\+devices  \2 \1$"),
        ("values", r"^\+\[0\]\['top'\]\['scale'\]  float32\[16\] values"),
    ],
)
def test_processes_that_differ_are_told_so_in_each_of_them(two, change, line):
    one, other = (found[change] for found in two)
    assert one == other
    assert "the plans, steps or values differ between the processes" in one
    assert "\n--- process 0\n+++ process 1\n" in one
    assert re.search(line, one, re.MULTILINE), one
    assert two[0]["none"] is None


def test_one_process_agrees_with_itself():
    agree("anything")


# -- What JAX does -----------------------------------------------------------------------------------------------------


def test_a_process_that_dies_or_stands_still_ends_the_others(tmp_path):
    """With a heartbeat of 5 seconds: those that live end by themselves, with a message."""
    cases = {"dies": (1, signal.SIGKILL), "first": (0, signal.SIGKILL), "stands": (1, signal.SIGSTOP)}
    with contextlib.ExitStack() as stack:
        groups = {}
        for name in cases:
            (tmp_path / name).mkdir()
            groups[name] = stack.enter_context(Group("meets", tmp_path / name))
        for name, (process, sent) in cases.items():
            groups[name].ready()
            groups[name].processes[process].send_signal(sent)
        for name, (process, _) in cases.items():
            other = groups[name].processes[1 - process]
            assert groups[name].waits(lambda other=other: other.poll() is not None, 40), name
            assert other.poll() != 0


def test_a_process_that_never_comes_ends_the_one_that_waits(tmp_path):
    with Group("meets", tmp_path, started=1) as group:
        assert group.seconds_to_end() < 30
        assert group.processes[0].poll() != 0


def test_a_sigterm_is_seen_by_all_processes_at_the_same_step(tmp_path):
    with Group("meets", tmp_path) as group:
        group.ready()
        group.processes[1].send_signal(signal.SIGTERM)
        one, other = group.found()
        assert one["at"] == other["at"] is not None
