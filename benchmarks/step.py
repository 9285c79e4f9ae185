"""A whole training step, called as in training: some in a row in each turn, each until all it computes is there.

A net of layers of 8x8 on a batch of 8, so that what counts is the number of leaves. Every library donates its state,
which on a CPU saves memory and a little time: `jax.jit` takes lists of arrays, the least that a tree can cost; Equinox
and Flax pass their models; `treeparams` passes an Equinox model as a tree (`tp.partition`) or as a vector (`tp.ravel`).
That all take the same steps is asserted. The last column is a part of the one before it: value and gradient without
the update, most of which is the arithmetic of the net, the same for all. Each library builds its step in turn, those
of the target twice, of which the mean counts. Two instances of one and the same vector step were seen to differ by a
third, by where they lie in memory.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

import treeparams as tp

from ._harness import Scale, Table, Verdict, as_ratios, in_time, medians
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
    few, many = (2, 4) if scale.is_smoke else (200, 1000)
    builds, steps = _measure(Task(few, optax.adam(RATE)), [name for name in _MAKERS if name != _RAVEL], scale)
    yield _table(f"Loss, gradient, Adam; {few} leaves", builds, steps, [_target("step", steps, _EQX, 4)])
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE))
    builds, steps = _measure(Task(many, optimiser, averages=True), list(_MAKERS), scale)
    limits = (("step", steps, _JAX, 3), ("build", builds, _JAX, 3), ("step", steps, _EQX, 8), ("step", steps, _NNX, 20))
    targets = [_target(*each) for each in limits]
    ratio = steps[_FLAT] / steps[_RAVEL]
    targets.append(Verdict(f"step of {_FLAT} <= 1.1x {_RAVEL}", ratio <= 1.1, f"{ratio:.2f}x"))
    title = f"Loss, gradient, clipping by global norm, Adam, average; {many} leaves"
    yield _table(title, builds, steps, targets)


def _measure(task: Task, names: Sequence[str], scale: Scale) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds to build the step and to take it."""
    builds: dict[str, list[float]] = {name: [] for name in names}
    loops = {}
    for i in range(1 if scale.is_smoke else 2):
        for name in names if i == 0 else (_JAX, _FLAT):
            loops[name] = _MAKERS[name](task)
            builds[name].append(loops[name].build())
    check_losses({name: loop for name, loop in loops.items() if name != _GRADIENT})
    longer = scale._replace(seconds=10 * scale.seconds)  # a round takes long
    steps = medians(loops, longer, IN_A_ROW)
    return {name: statistics.median(seconds) for name, seconds in builds.items()}, steps


def _target(what: str, times: Mapping[str, float], of: str, factor: float) -> str:
    found = times[of] / times[_FLAT]
    return Verdict(f"{what} of {_FLAT} <= 1/{factor:g} of {of}", found >= factor, f"1/{found:.2f}")


def _table(title: str, builds: Mapping[str, float], steps: Mapping[str, float], targets: list[str]) -> Table:
    rows = [
        ["trace, lower, compile", *as_ratios(list(builds.values()), in_time)],
        ["step", *as_ratios(list(steps.values()), in_time)],
    ]
    return Table(title, ["", *steps], rows, targets)


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
