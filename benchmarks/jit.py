"""What a call of a compiled function costs before the computation begins.

The yardstick is plain `jax.jit`, which takes this model since all its leaves are arrays. Timed is the call until it
returns. A scalar result reads one leaf; for a model every leaf is incremented (nnx does it in place, as is its way).
The first call traces and compiles; its growth is that of XLA, and is shown to tell what the wrappers add.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx

import treeparams as tp

from ._harness import Scale, Table, sweep
from ._models import net, nnx_net

_LIMITS = {"a scalar": 1.1, "the model": 0.8}  # by hand and with Equinox no array is looked for at two places
_JAX, _TP, _EQX, _NNX = "jax.jit", "tp.jit", "eqx.filter_jit", "nnx.jit"


def run(scale: Scale) -> Iterator[Table]:
    for title, cases in (("a scalar", _scalar), ("the model", _model)):
        found = sweep(cases, scale, largest=1000)
        targets = [found.ratio_target(_TP, _EQX, _LIMITS[title]), found.growth_target(_TP)]
        yield found.table(f"`tp.jit(f)(model)`, of which `f` returns {title}", targets)
        yield found.firsts(f"The first call, of which `f` returns {title}", [], found.names)


def _scalar(leaves: int) -> Mapping[str, Callable]:
    return _compiled(leaves, lambda model: jnp.sum(model.layers[0].weight[...]), None)


def _model(leaves: int) -> Mapping[str, Callable]:
    def increment(model: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, model)

    return _compiled(leaves, increment, lambda model: nnx.update(model, increment(nnx.state(model))))


def _compiled(leaves: int, f: Callable, nnx_f: Callable | None) -> Mapping[str, Callable]:
    model, nnx_model = net(leaves), nnx_net(leaves)
    with_jax, with_tp, with_eqx, with_nnx = jax.jit(f), tp.jit(f), eqx.filter_jit(f), nnx.jit(nnx_f or f)
    return {
        _JAX: lambda: with_jax(model),
        _TP: lambda: with_tp(model),
        _EQX: lambda: with_eqx(model),
        _NNX: lambda: with_nnx(nnx_model),
    }
