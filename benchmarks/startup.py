"""What `import treeparams` adds to a program that has imported JAX and Equinox.

Each import is timed in a fresh process, in turn with that of Optax for scale, and with JAX and Equinox themselves. One
before that is not timed: it writes bytecode, as an installation does.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

from ._harness import Median, Scale, Table, as_ratios, at_most, in_time

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
    medians = {name: Median(each) for name, each in samples.items()}
    target = at_most(_SLACK, "import", medians, names[1], _DEPENDENCIES)
    yield Table("The import", ["", *names], [["import", *as_ratios(list(medians.values()), in_time)]], [target])


def _seconds(names: str) -> float:
    command = [sys.executable, "-c", _CODE.format(names)]
    writing = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=writing).stdout)
