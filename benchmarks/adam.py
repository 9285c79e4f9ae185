"""One Adam update of many leaves of 8x8, and what it costs to build.

The yardstick updates the vector of `tp.ravel`. Optax updates the tree, leaf by leaf; `optax.flatten` joins the tree to
a vector within each update and cuts it again. All are jitted and donate parameters and state. Each is called until it
is done, and given its gradient in the form of its parameters. The first call traces, lowers and compiles.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeparams as tp

from ._harness import Scale, Sweep, Table, sweep, verdict
from ._steps import Loop

_TP, _OPTAX, _FLATTEN = "vector", "optax, per leaf", "optax.flatten"


def run(scale: Scale) -> Iterator[Table]:
    # All first calls are to be seen, however slow: none takes a minute.
    found = sweep(_cases, scale._replace(patience=10_000), largest=1000)
    yield found.table("One Adam update", [_speed_target(found, _OPTAX, 20), found.growth_target(_TP)])
    yield found.firsts("The first call", [found.growth_target(_TP, firsts=True)], found.names)


def _cases(leaves: int) -> Mapping[str, Loop]:
    tree = jax.device_put([np.full((8, 8), i / leaves, np.float32) for i in range(leaves)])
    vector, _ = tp.ravel(tree)
    adam = optax.adam(1e-3)
    return {
        _TP: _loop(adam, vector),
        _OPTAX: _loop(adam, tree),
        _FLATTEN: _loop(optax.flatten(adam), tree),
    }


def _loop(optimiser: optax.GradientTransformation, params: Any) -> Loop:
    def step(state: Any, grads: Any) -> tuple[Any, jax.Array]:
        params, moments = state
        updates, moments = optimiser.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), moments[0].count

    grads = jax.tree.map(jnp.ones_like, params)
    return Loop(jax.jit(step, donate_argnums=0), (tp.copy(params), optimiser.init(params)), grads)


def _speed_target(found: Sweep, of: str, factor: float) -> str:
    ratios = found.ratios(of, _TP)
    size = max(ratios)
    return verdict(f"{_TP} <= 1/{factor:g} of {of} at {size} leaves", ratios[size] >= factor, f"1/{ratios[size]:.1f}")
