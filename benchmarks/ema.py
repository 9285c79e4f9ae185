"""Moving averages of a model, and the norm of a gradient.

The yardstick is the formula in `jax.tree.map`. Averages are timed until they are done, as they are and inside one
`jax.jit`. Where the average is donated, the yardstick is the vector of `tp.ravel`, and the trees are lists, which
cost the least. The norm of Optax has no scaling against overflow; called as it is, it dispatches leaf by leaf, where
that of treeparams is one program. First calls trace and compile.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import treeparams as tp

from ._harness import Scale, Table, sweep
from ._models import arrays, net
from ._programs import until_done
from ._steps import Loop

_HAND, _TP, _OPTAX = "by hand", "treeparams", "optax"
_VECTOR = f"{_TP}, vector"
_DECAY = 0.99
_optax_norm = getattr(getattr(optax, "tree", None), "norm", None) or optax.global_norm  # the name is newer


def run(scale: Scale) -> Iterator[Table]:
    for title, wrap in (("`tp.ema`", lambda f: f), ("`tp.ema` inside `jax.jit`", jax.jit)):
        found = sweep(lambda leaves, wrap=wrap: _averages(leaves, wrap), scale, largest=1000)
        yield found.table(title, [found.growth_target(_TP)])
    found = sweep(_donated, scale, largest=1000)
    yield found.table("`tp.ema` inside `jax.jit`, donated, of a vector or of its tree", [found.growth_target(_VECTOR)])
    yield found.firsts("The first call of the same", [found.growth_target(_VECTOR, firsts=True)], found.names)
    found = sweep(_norms, scale, largest=1000)
    yield found.table("`tp.global_norm`", [found.growth_target(_TP)])
    targets = [found.growth_target(_TP, firsts=True)]
    yield found.firsts("The first call of the same", targets, [name for name in found.names if name != _OPTAX])


def _by_hand(average: Any, params: Any) -> Any:
    return jax.tree.map(lambda old, new: old + (1 - _DECAY) * (new - old), average, params)


def _with_tp(average: Any, params: Any) -> Any:
    return tp.ema(average, params, decay=_DECAY)


def _averages(leaves: int, wrap: Callable[[Callable], Callable]) -> Mapping[str, Callable]:
    average, model = net(leaves), net(leaves)

    functions = {
        _HAND: wrap(_by_hand),
        _TP: wrap(_with_tp),
        _OPTAX: wrap(lambda average, model: optax.incremental_update(model, average, 1 - _DECAY)),
    }
    return {name: until_done(f, (average, model)) for name, f in functions.items()}


def _donated(leaves: int) -> Mapping[str, Loop]:
    tree = arrays(leaves)
    vector, _ = tp.ravel(tree)

    return {
        _VECTOR: _loop(_with_tp, vector),
        f"{_HAND}, vector": _loop(_by_hand, vector),
        f"{_TP}, tree": _loop(_with_tp, tree),
        f"{_HAND}, tree": _loop(_by_hand, tree),
    }


def _loop(average_of: Callable[[Any, Any], Any], params: Any) -> Loop:
    donating = jax.jit(average_of, donate_argnums=0)

    def step(average: Any, params: Any) -> tuple[Any, jax.Array]:
        average = donating(average, params)
        return average, jax.tree.leaves(average)[0]

    return Loop(step, tp.copy(params), params)


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
    vector, _ = tp.ravel(tree)
    norms = {name: until_done(f, (tree,)) for name, f in functions.items()}
    return norms | {_VECTOR: until_done(tp.global_norm, (vector,))}
