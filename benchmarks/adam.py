"""One Adam update of many leaves of 8x8, and what it costs to build.

The yardstick updates the vector of `tp.ravel`. Optax updates the tree, leaf by leaf; `optax.flatten` joins the tree to
a vector within each update and cuts it again. So do `optim.trainable`, leaf by leaf, and its `form="vector"`, joined,
over the whole model. All are jitted and donate parameters and state. Each is called until it is done, and given its
gradient in the form of its parameters. The first call traces, lowers and compiles. The last table is of an update
outside of `jit`, with the new parameters, not donated, until all is there: Optax over the parameters of `tp.partition`,
the others over the model that they are from, layers of 8x8 and 8.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeparams as tp
from treeparams import optim

from ._harness import Scale, Table, sweep
from ._models import net
from ._programs import until_done
from ._steps import Loop, update_of, updated

_TP, _OPTAX, _FLATTEN = "vector", "optax, per leaf", "optax.flatten"
_TRAINABLE, _FLAT = "optim.trainable", "form='vector'"
_ADAM = optax.adam(1e-3)
_MOST = 100  # leaves that `optax.flatten` takes: of ten times as many its first call takes a quarter of a minute


def run(scale: Scale) -> Iterator[Table]:
    # All first calls are to be seen, however slow: none takes a minute.
    patient = scale._replace(patience=10_000)
    note = f"{_FLATTEN} was not run above {_MOST} leaves."
    found = sweep(_cases, patient, largest=1000)
    targets = [found.ratio_target(_TP, _OPTAX, 1 / 20, sizes=(1000,)), found.growth_target(_TP)]
    yield found.table("One Adam update", [*targets, note])
    yield found.firsts("The first call", [found.growth_target(_TP, firsts=True)], found.names)
    found = sweep(_outside_of_jit, patient, largest=1000)
    targets = [found.ratio_target(_TRAINABLE, _OPTAX, 1.1), found.ratio_target(_FLAT, _OPTAX, 0.6)]
    yield found.table("One Adam update of a model, outside of `jit`", targets)


def _tree(leaves: int) -> list[jax.Array]:
    return jax.device_put([np.full((8, 8), i / leaves, np.float32) for i in range(leaves)])


def _cases(leaves: int) -> Mapping[str, Loop]:
    tree = _tree(leaves)
    vector, _ = tp.ravel(tree)
    optimisers = {_OPTAX: _ADAM, _FLATTEN: optax.flatten(_ADAM), _TRAINABLE: optim.trainable(_ADAM)}
    optimisers[_FLAT] = optim.trainable(_ADAM, form="vector")
    if leaves > _MOST:
        del optimisers[_FLATTEN]
    return {_TP: _loop(_ADAM, vector)} | {name: _loop(each, tree) for name, each in optimisers.items()}


def _loop(optimiser: optax.GradientTransformation, params: Any) -> Loop:
    grads = jax.tree.map(jnp.ones_like, params)
    step = jax.jit(update_of(optimiser), donate_argnums=0)
    return Loop(step, (tp.copy(params), optimiser.init(params)), grads)


def _outside_of_jit(leaves: int) -> Mapping[str, Callable[[], Any]]:
    model = net(leaves, 8)
    params, _ = tp.partition(model)
    grads = jax.tree.map(jnp.ones_like, params)
    cases = {
        _OPTAX: (_ADAM, params),
        _TRAINABLE: (optim.trainable(_ADAM), model),
        _FLAT: (optim.trainable(_ADAM, form="vector"), model),
    }
    return {
        name: until_done(functools.partial(updated, tx), (grads, given, tx.init(given)))
        for name, (tx, given) in cases.items()
    }
