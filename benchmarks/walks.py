"""A function applied to the trained leaves of a model, alone and with a gradient beside it.

The function returns its first argument, so that what is timed is the walk. Equinox's way is to partition, map and
combine, and with a gradient the map of `eqx.apply_updates`; that of nnx to split, map the state and merge. What a walk
does once, however large the model is, takes as long as ten leaves of `jax.tree.map`: more is allowed of so few.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
from flax import nnx

import treeparams as tp

from ._harness import Scale, Table, sweep
from ._models import net, nnx_net

_MAP, _TP = "jax.tree.map", "tp.maptrainable"


def run(scale: Scale) -> Iterator[Table]:
    for title, cases in (("`tp.maptrainable(f, model)`", _one), ("`tp.maptrainable(f, model, grads)`", _two)):
        found = sweep(cases, scale)
        targets = [found.ratio_target(_TP, _MAP, 2, sizes=scale.sizes[1:])]
        targets.append(found.ratio_target(_TP, _MAP, 2.75, sizes=scale.sizes[:1]))
        yield found.table(title, [*targets, found.growth_target(_TP)])


def _first(x: Any, *_: Any) -> Any:
    return x


def _one(leaves: int) -> Mapping[str, Callable]:
    model, nnx_model = net(leaves), nnx_net(leaves)

    def with_equinox() -> Any:
        params, static = eqx.partition(model, eqx.is_inexact_array)
        return eqx.combine(jax.tree.map(_first, params), static)

    def with_nnx() -> Any:
        graph, state = nnx.split(nnx_model)
        return nnx.merge(graph, jax.tree.map(_first, state))

    return {
        _MAP: lambda: jax.tree.map(_first, model),
        _TP: lambda: tp.maptrainable(_first, model),
        "equinox": with_equinox,
        "nnx": with_nnx,
    }


def _two(leaves: int) -> Mapping[str, Callable]:
    model, nnx_model = net(leaves), nnx_net(leaves)
    grads, nnx_grads = tp.partition(model)[0], nnx.state(nnx_model)

    def with_equinox() -> Any:
        def step(update: Any, param: Any) -> Any:
            return param if update is None else _first(param, update)

        return jax.tree.map(step, grads, model, is_leaf=lambda x: x is None)

    def with_nnx() -> Any:
        graph, state = nnx.split(nnx_model)
        return nnx.merge(graph, jax.tree.map(_first, state, nnx_grads))

    return {
        _MAP: lambda: jax.tree.map(_first, model, grads),
        _TP: lambda: tp.maptrainable(_first, model, grads),
        "eqx.apply_updates": with_equinox,
        "nnx": with_nnx,
    }
