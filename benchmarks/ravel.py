"""From a model to its vector and back, outside of `jit`, each call until its result is there.

The yardstick is `jax.flatten_util.ravel_pytree`, or the function back that it gives. `tp.ravel` finds out anew what is
trained and what is tied; `restructure.ravel` knows.
"""

from collections.abc import Callable, Iterator, Mapping

import jax
from jax.flatten_util import ravel_pytree

import treeparams as tp

from ._harness import Scale, Table, sweep
from ._models import net

_RAVEL, _TP, _UNRAVEL, _RESTRUCTURE = "ravel_pytree", "tp.ravel", "unravel", "restructure"
_LARGEST = 1000  # where a first call of the yardstick takes its 20 seconds


def run(scale: Scale) -> Iterator[Table]:
    # The yardstick is to be there at all sizes, however long its first call takes.
    scale = scale._replace(patience=float("inf"))
    found = sweep(_to_vector, scale, _LARGEST)
    targets = [found.ratio_target(_TP, _RAVEL, 1 / 5, sizes=(_LARGEST,)), found.ratio_target(_TP, _RAVEL, 1 / 2)]
    yield found.table("From the model to a vector", targets)
    found = sweep(_to_model, scale, _LARGEST)
    yield found.table("From the vector to the model", [found.ratio_target(_RESTRUCTURE, _UNRAVEL, 1 / 2)])
    yield found.firsts("From the vector to the model, the first call", [], found.names)


def _to_vector(leaves: int) -> Mapping[str, Callable]:
    model = net(leaves)
    _, restructure = tp.ravel(model)
    compiled = jax.jit(lambda model: ravel_pytree(model)[0])
    ready = jax.block_until_ready
    return {
        _RAVEL: lambda: ready(ravel_pytree(model)[0]),
        f"{_RAVEL} in jit": lambda: ready(compiled(model)),
        _TP: lambda: ready(tp.ravel(model)[0]),
        "restructure.ravel": lambda: ready(restructure.ravel(model)),
    }


def _to_model(leaves: int) -> Mapping[str, Callable]:
    model = net(leaves)
    vector, restructure = tp.ravel(model)
    unravel = ravel_pytree(model)[1]
    return {
        _UNRAVEL: lambda: jax.block_until_ready(unravel(vector)),
        _RESTRUCTURE: lambda: jax.block_until_ready(restructure(vector)),
    }
