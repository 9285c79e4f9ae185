"""Several processes on this machine: equal to one, and told where they differ."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(200)  # each process imports JAX and compiles
PROGRAM = pathlib.Path(__file__).with_name("_process_programs")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes that run the program together found; none is left behind."""
    folder, processes = tmp_path_factory.mktemp("two"), []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = os.environ.get("XLA_FLAGS", "").replace("device_count=8", "device_count=1")
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    try:
        for process in range(2):
            command = [sys.executable, PROGRAM, address, "2", str(process), folder / f"{process}.json"]
            with (folder / f"{process}.err").open("wb") as err:
                processes.append(subprocess.Popen(command, stdout=err, stderr=err, env=environment))
        codes = [process.wait(100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join(file.read_text() for file in sorted(folder.glob("*.err")))
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(2)]


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
