"""What `import treeparams` adds to a program that has imported JAX and Equinox.

Each import is timed in a fresh process, in turn with that of Optax for scale, and with JAX and Equinox themselves. One
before that is not timed: it writes bytecode, as an installation does.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

from ._harness import Scale, Table, Verdict, as_ratios, in_time

_CODE = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
_DEPENDENCIES, _SLACK = "jax, equinox", 1.1


def run(scale: Scale) -> Iterator[Table]:
    names = [_DEPENDENCIES, f"{_DEPENDENCIES}, treeparams", f"{_DEPENDENCIES}, optax"]
    for name in names:
        _seconds(name)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(scale.rounds):
        for name in names:
            samples[name].append(_seconds(name))
    medians = [statistics.median(samples[name]) for name in names]
    ratio = medians[1] / medians[0]
    target = Verdict(f"import of {names[1]} <= {_SLACK:g}x {_DEPENDENCIES}", ratio <= _SLACK, f"{ratio:.2f}x")
    yield Table("The import", ["", *names], [["import", *as_ratios(medians, in_time)]], [target])


def _seconds(names: str) -> float:
    command = [sys.executable, "-c", _CODE.format(names)]
    writing = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=writing).stdout)
