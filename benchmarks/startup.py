"""What `import treeparams` adds to a program that has imported JAX and Equinox.

Each import is timed in a fresh process, in turn with that of Optax for scale.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator

from ._harness import Scale, Table, Verdict, as_ratios, in_time

_CODE = "import time, jax, equinox; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
_LIMIT = 0.15  # seconds


def run(scale: Scale) -> Iterator[Table]:
    names = ["treeparams", "optax"]
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(scale.rounds):
        for name in names:
            samples[name].append(_seconds(name))
    medians = [statistics.median(samples[name]) for name in names]
    target = Verdict(f"import of treeparams <= {_LIMIT:g} s", medians[0] <= _LIMIT, in_time(medians[0]))
    yield Table("The import", ["", *names], [["after jax and equinox", *as_ratios(medians, in_time)]], [target])


def _seconds(name: str) -> float:
    command = [sys.executable, "-c", _CODE.format(name)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
