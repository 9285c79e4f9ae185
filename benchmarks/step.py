"""A whole training step, called as in training: some in a row in each turn, each until all it computes is there.

Loss, gradient, clipping by the global norm, Adam, and an average of the parameters, of a net of layers of 8x8 on a
batch of 8, so that what counts is the number of leaves; of 1000 leaves, and in stacks, see `stacks`. Every library
donates its state, which on a CPU saves memory and a little time: `jax.jit` takes lists of arrays, the least that a tree
can cost; Equinox and Flax pass their models; `treeparams` passes an Equinox model as a tree (`tp.partition`) or as a
vector (`tp.ravel`). That all take the same steps is asserted. The last column is a part of the one before it: value and
gradient without the update, most of which is the arithmetic of the net, the same for all. Each library builds its step
in turn, those of the target twice, of which the mean counts. Two instances of one and the same vector step were seen to
differ by a third, by where they lie in memory. How much less the vector takes depends on the machine too: it waits for
memory, where trees wait for Python. One machine found 1/3.8 and 1/2.9 of `jax.jit`, in an hour of slow and of fast
memory, and 1/12 and 1/7.3 of `eqx.filter_jit`.
"""

import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

import treeparams as tp

from ._harness import Scale, Table, as_ratios, at_most, in_time, medians
from ._steps import (
    IN_A_ROW,
    RATE,
    Loop,
    Task,
    arrays,
    averaged,
    by_hand,
    check_losses,
    examples,
    mean_error,
    model,
    through,
    with_equinox,
    with_nnx,
    with_tree,
)

_JAX, _EQX, _NNX, _RAVEL = "jax.jit", "eqx.filter_jit", "nnx.jit", "ravel_pytree"
_TREE, _FLAT, _GRADIENT = "treeparams, tree", "treeparams, flat", "of it, the gradient"


def run(scale: Scale) -> Iterator[Table]:
    if not scale.is_smoke:
        for make in _MAKERS.values():  # what JAX loads and traces for its first program is nobody's cost
            make(Task(4, optax.adam(RATE))).build()
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE))
    task = Task(2 if scale.is_smoke else 200, optimiser, averages=True)
    builds, steps = _measure(task, scale)
    targets = [at_most(1 / 2.75, "step", steps, _FLAT, _JAX), at_most(1 / 2, "build", builds, _FLAT, _JAX)]
    targets += [at_most(1 / 7, "step", steps, _FLAT, _EQX), at_most(1 / 20, "step", steps, _FLAT, _NNX)]
    targets.append(at_most(1.1, "step", steps, _FLAT, _RAVEL))
    cells = [
        ["trace, lower, compile", *as_ratios(list(builds.values()), in_time)],
        ["step", *as_ratios(list(steps.values()), in_time)],
    ]
    yield Table(f"{task.leaves} leaves", ["", *steps], cells, targets)


def _measure(task: Task, scale: Scale) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds to build the step and to take it."""
    builds: dict[str, list[float]] = {name: [] for name in _MAKERS}
    loops = {}
    for i in range(1 if scale.is_smoke else 2):
        for name in _MAKERS if i == 0 else (_JAX, _FLAT):
            loops[name] = _MAKERS[name](task)
            builds[name].append(loops[name].build())
    check_losses({name: loop for name, loop in loops.items() if name != _GRADIENT})
    longer = scale._replace(seconds=10 * scale.seconds)  # a round takes long
    steps = medians(loops, longer, IN_A_ROW)
    return {name: statistics.median(seconds) for name, seconds in builds.items()}, steps


# -- One step, for each library ----------------------------------------------------------------------------------------


def _with_jax(task: Task) -> Loop:
    made = iter(arrays(task.leaves))
    layers = list(zip(made, made, strict=True))
    return by_hand(task, lambda layers, x, y: mean_error(through(layers, x), y), layers, optax.incremental_update)


def _with_ravel_pytree(task: Task) -> Loop:
    vector, unravel = ravel_pytree(model(task.leaves))
    return by_hand(task, lambda vector, x, y: mean_error(unravel(vector)(x), y), vector, optax.incremental_update)


def _with_vector(task: Task) -> Loop:
    vector, restructure = tp.ravel(model(task.leaves))
    return by_hand(task, _error_of_vector, vector, averaged, restructure)


def _error_of_vector(vector: jax.Array, restructure: tp.Restructure, x: jax.Array, y: jax.Array) -> jax.Array:
    return mean_error(restructure(vector)(x), y)


def _gradient_alone(task: Task) -> Loop:
    def step(state: Any, *args: Any) -> tuple[Any, jax.Array]:
        value, gradient = jax.value_and_grad(_error_of_vector)(state[0], *args)
        return (state[0], gradient), value

    vector, restructure = tp.ravel(model(task.leaves))
    return Loop(jax.jit(step, donate_argnums=0), (vector, jnp.zeros_like(vector)), restructure, *examples())


_MAKERS = {
    _JAX: _with_jax,
    _EQX: with_equinox,
    _NNX: with_nnx,
    _RAVEL: _with_ravel_pytree,
    _TREE: with_tree,
    _FLAT: _with_vector,
    _GRADIENT: _gradient_alone,
}
