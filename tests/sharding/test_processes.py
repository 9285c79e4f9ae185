"""Several processes on this machine: equal to one, told where they differ, and ended by JAX where one dies."""

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

from ..long import LONG

pytestmark = pytest.mark.timeout(200)  # each process imports JAX and compiles
PROGRAMS = pathlib.Path(__file__).with_name("_process_programs")


class Group:
    """Processes that run one program together, and what they write; none is left behind."""

    def __init__(self, program, folder, count=2, started=None):
        self.program, self.folder, self.processes = program, folder, []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        flags = os.environ.get("XLA_FLAGS", "").replace("device_count=8", "device_count=1")
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

    def found(self, what, limit=100):
        """What each found, once all have written it."""
        files = [self.folder / f"{what}{process}.json" for process in range(len(self.processes))]
        written = lambda: all(file.exists() for file in files)
        ended = lambda: all(process.poll() is not None for process in self.processes)
        self.waits(lambda: written() or ended(), limit)
        assert written(), "\n".join(map(self.said, range(len(files))))
        return [json.loads(file.read_text()) for file in files]

    def meets(self):
        """Waits until all meet each other again and again."""
        assert self.waits(lambda: all((self.folder / f"ready{n}").exists() for n in range(len(self.processes))))
        return self

    def ends(self, process):
        """Whether it ends by itself, and says that something was wrong."""
        has_ended = lambda: self.processes[process].poll() is not None
        return self.waits(has_ended, 40) and self.processes[process].poll() != 0


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    with Group("trains", tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.fixture(scope="module")
def two(group):
    return group.found("trains")


def test_two_processes_train_as_one_does(two):
    errors = two[0]["errors"]
    assert errors.keys() == {"tree", "vector", "stacks"}
    assert max(errors.values()) < 1e-6, errors
    assert two[0]["sums"] == two[1]["sums"]


DIFFERENT = {
    "width": r"^\+layers\.0\.bias  float32\[8\]",
    "dtype": r"^\+layers\.0\.bias  bfloat16\[16\]",
    "rules": r"^-layers\.0\.bias  float32\[16\]  whole.*\n(.*\n)*\+layers\.0\.bias  float32\[16\]  P\('data'\)",
    "rate": r"^\+.*stablehlo\.constant dense<-5\.0*e-02>",
    "order": r"^-devices  (\d+) (\d+)\n(.*\n)*\+devices  \2 \1$",
    "values": r"^\+\[0\]\['top'\]\['scale'\]  float32\[16\] values",
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_processes_that_differ_are_told_so_in_each_of_them(two, change):
    one, other = (found[change] for found in two)
    assert one == other
    assert "the plans, steps or values differ between the processes" in one
    assert "\n--- process 0\n+++ process 1\n" in one
    assert re.search(DIFFERENT[change], one, re.MULTILINE), one
    assert two[0]["none"] is None


def test_one_process_agrees_with_itself():
    agree("anything")


# -- What JAX does, and no code of the library: a case of each kind in each run ----------------------------------------


def test_a_sigterm_is_seen_by_all_at_the_same_step_and_one_that_stands_still_ends_the_others(group):
    """With a heartbeat of 5 seconds: those that live end by themselves, with a message."""
    group.meets().processes[1].send_signal(signal.SIGTERM)
    one, other = group.found("stops")
    assert one["at"] == other["at"] is not None
    assert [each.poll() for each in group.processes] == [None, None]
    group.processes[1].send_signal(signal.SIGSTOP)  # which to the others is as if it had died
    assert group.ends(0)


@LONG
@pytest.mark.parametrize("process", [1, 0], ids=["the last dies", "the first dies"])
def test_a_process_that_dies_ends_the_others(process, tmp_path):
    with Group("meets", tmp_path) as group:
        group.meets().processes[process].send_signal(signal.SIGKILL)
        assert group.ends(1 - process)


@LONG
def test_a_process_that_never_comes_ends_the_one_that_waits(tmp_path):
    with Group("meets", tmp_path, started=1) as group:
        assert group.ends(0)
