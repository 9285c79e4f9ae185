"""Moving averages of a model, and the norm of a gradient.

The yardstick is the formula in `jax.tree.map`. Averages are timed until they are done, as they are and inside one
`jax.jit`. The norm of Optax has no scaling against overflow; called as it is, it dispatches leaf by leaf, where that of
treeparams is one program. The last table is of first calls, which trace and compile.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import treeparams as tp

from ._harness import Scale, Table, sweep
from ._models import net

_HAND, _TP, _OPTAX = "by hand", "treeparams", "optax"
_DECAY = 0.99
_optax_norm = getattr(getattr(optax, "tree", None), "norm", None) or optax.global_norm  # the name is newer


def run(scale: Scale) -> Iterator[Table]:
    for title, wrap in (("`tp.ema`", lambda f: f), ("`tp.ema` inside `jax.jit`", jax.jit)):
        found = sweep(lambda leaves, wrap=wrap: _averages(leaves, wrap), scale)
        yield found.table(title, [found.growth_target(_TP)])
    found = sweep(_norms, scale)
    yield found.table("`tp.global_norm`", [found.growth_target(_TP)])
    targets = [found.growth_target(_TP, firsts=True)]
    yield found.firsts("The first call of the same", targets, [name for name in found.names if name != _OPTAX])


def _averages(leaves: int, wrap: Callable[[Callable], Callable]) -> Mapping[str, Callable]:
    average, model = net(leaves), net(leaves)

    def by_hand(average: Any, model: Any) -> Any:
        return jax.tree.map(lambda old, new: old + (1 - _DECAY) * (new - old), average, model)

    functions = {
        _HAND: wrap(by_hand),
        _TP: wrap(lambda average, model: tp.ema(average, model, decay=_DECAY)),
        _OPTAX: wrap(lambda average, model: optax.incremental_update(model, average, 1 - _DECAY)),
    }
    return {name: _until_done(f, average, model) for name, f in functions.items()}


def _norms(leaves: int) -> Mapping[str, Callable]:
    def by_hand(tree: Any) -> jax.Array:
        return jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)))

    functions = {
        f"{_HAND}, jitted": jax.jit(by_hand),
        _TP: tp.global_norm,
        _OPTAX: _optax_norm,
        f"{_OPTAX}, jitted": jax.jit(_optax_norm),
    }
    tree = net(leaves)
    return {name: _until_done(f, tree) for name, f in functions.items()}


def _until_done(f: Callable, *args: Any) -> Callable:
    return lambda: jax.block_until_ready(f(*args))
