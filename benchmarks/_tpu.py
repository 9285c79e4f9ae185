"""Programs for TPUs that are not there: what they move and hold, compiled and never run. Needs `pip install libtpu`."""

import importlib.util
from typing import Any

from treeparams import sharding

TOPOLOGY = "v5e:2x4"
MISSING = f"Programs for TPU ({TOPOLOGY}) are left out: their compiler is not installed, pip install libtpu."


def has_compiler() -> bool:
    """Whether programs can be compiled for TPU; a table says `MISSING` where they cannot."""
    return importlib.util.find_spec("libtpu") is not None


def on_tpu(step: Any, params: Any, state: Any, *batch: Any, topology: str = TOPOLOGY) -> sharding.Ahead:
    """What a step takes of each TPU: of `sharding.make_step` or `jax.jit`, of shapes that say how they lie."""
    return sharding.ahead(step, params, state, *batch, topology=topology)
