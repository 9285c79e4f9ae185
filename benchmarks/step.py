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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.flatten_util import ravel_pytree

import treeparams as tp

from ._harness import Scale, Table, as_ratios, in_time, there_and_back, verdict
from ._steps import WIDTH, Loop, arrays, check_losses, model, nnx_model

_JAX, _EQX, _NNX, _RAVEL = "jax.jit", "eqx.filter_jit", "nnx.jit", "ravel_pytree"
_TREE, _FLAT, _GRADIENT = "treeparams, tree", "treeparams, flat", "of it, the gradient"
_RATE, _KEPT, _BATCH = 1e-3, 0.01, 8
_IN_A_ROW = 10  # a first step after one of another library finds cold caches, and can take three times as long


class Task(NamedTuple):
    """What a step is to do: a mean squared error, its gradient, an update, maybe an average of the parameters."""

    leaves: int
    optimiser: optax.GradientTransformation
    averages: bool = False


def run(scale: Scale) -> Iterator[Table]:
    if not scale.is_smoke:
        for make in _MAKERS.values():  # what JAX loads and traces for its first program is nobody's cost
            make(Task(4, optax.adam(_RATE))).build()
    few, many = (2, 4) if scale.is_smoke else (200, 1000)
    builds, steps = _measure(Task(few, optax.adam(_RATE)), [name for name in _MAKERS if name != _RAVEL], scale)
    yield _table(f"Loss, gradient, Adam; {few} leaves", builds, steps, [_target("step", steps, _EQX, 4)])
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(_RATE))
    builds, steps = _measure(Task(many, optimiser, averages=True), list(_MAKERS), scale)
    limits = (("step", steps, _JAX, 3), ("build", builds, _JAX, 3), ("step", steps, _EQX, 8), ("step", steps, _NNX, 20))
    targets = [_target(*each) for each in limits]
    ratio = steps[_FLAT] / steps[_RAVEL]
    targets.append(verdict(f"step of {_FLAT} <= 1.1x {_RAVEL}", ratio <= 1.1, f"{ratio:.2f}x"))
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
    steps = there_and_back(loops, longer, _IN_A_ROW)
    return {name: statistics.median(seconds) for name, seconds in builds.items()}, steps


def _target(what: str, times: Mapping[str, float], of: str, factor: float) -> str:
    found = times[of] / times[_FLAT]
    return verdict(f"{what} of {_FLAT} <= 1/{factor:g} of {of}", found >= factor, f"1/{found:.2f}")


def _table(title: str, builds: Mapping[str, float], steps: Mapping[str, float], targets: list[str]) -> Table:
    rows = [
        ["trace, lower, compile", *as_ratios(list(builds.values()), in_time)],
        ["step", *as_ratios(list(steps.values()), in_time)],
    ]
    return Table(title, ["", *steps], rows, targets)


# -- One step, for each library ----------------------------------------------------------------------------------------


def _batch() -> tuple[jax.Array, jax.Array]:
    x = np.random.default_rng(1).normal(size=(_BATCH, WIDTH)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(np.roll(x, 1, axis=1))


def _error(out: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((out - y) ** 2)


def _through(layers: Any, x: jax.Array) -> jax.Array:
    for weight, bias in layers:
        x = jnp.tanh(x @ weight.T + bias)
    return x


def _with_jax(task: Task) -> Loop:
    made = iter(arrays(task.leaves))
    layers = list(zip(made, made, strict=True))
    return _jitted(task, lambda layers, x, y: _error(_through(layers, x), y), layers, optax.incremental_update)


def _with_ravel_pytree(task: Task) -> Loop:
    vector, unravel = ravel_pytree(model(task.leaves))
    return _jitted(task, lambda vector, x, y: _error(unravel(vector)(x), y), vector, optax.incremental_update)


def _with_tree(task: Task) -> Loop:
    params, rest = tp.partition(model(task.leaves))
    return _jitted(task, lambda params, rest, x, y: _error(tp.combine(params, rest)(x), y), params, _average, rest)


def _with_vector(task: Task) -> Loop:
    vector, restructure = tp.ravel(model(task.leaves))
    return _jitted(task, _error_of_vector, vector, _average, restructure)


def _error_of_vector(vector: jax.Array, restructure: tp.Restructure, x: jax.Array, y: jax.Array) -> jax.Array:
    return _error(restructure(vector)(x), y)


def _average(params: Any, average: Any, step: float) -> Any:
    return tp.ema(average, params, decay=1 - step)


def _jitted(task: Task, loss: Callable, params: Any, average_of: Callable, *context: Any) -> Loop:
    def step(state: Any, *args: Any) -> tuple[Any, jax.Array]:
        params, moments, average = state
        value, grads = jax.value_and_grad(loss)(params, *args)
        updates, moments = task.optimiser.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        return (params, moments, average_of(params, average, _KEPT) if task.averages else None), value

    state = params, task.optimiser.init(params), tp.copy(params) if task.averages else None
    return Loop(jax.jit(step, donate_argnums=0), state, *context, *_batch())


def _gradient_alone(task: Task) -> Loop:
    def step(state: Any, *args: Any) -> tuple[Any, jax.Array]:
        value, gradient = jax.value_and_grad(_error_of_vector)(state[0], *args)
        return (state[0], gradient), value

    vector, restructure = tp.ravel(model(task.leaves))
    return Loop(jax.jit(step, donate_argnums=0), (vector, jnp.zeros_like(vector)), restructure, *_batch())


def _with_equinox(task: Task) -> Loop:
    @eqx.filter_jit(donate="all-except-first")
    def step(batch: Any, state: Any) -> tuple[Any, jax.Array]:
        (x, y), (model, moments, average) = batch, state
        value, grads = eqx.filter_value_and_grad(lambda model: _error(model(x), y))(model)
        updates, moments = task.optimiser.update(grads, moments, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
        return (model, moments, optax.incremental_update(model, average, _KEPT) if task.averages else None), value

    start = model(task.leaves)
    average = tp.copy(start) if task.averages else None
    state = start, task.optimiser.init(eqx.filter(start, eqx.is_inexact_array)), average
    swapped = lambda f: lambda state, *batch: f(batch, state)
    return Loop(swapped(step), state, *_batch(), lower=swapped(step.lower))


def _with_nnx(task: Task) -> Loop:
    def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return _error(_through([(layer.weight[...], layer.bias[...]) for layer in model.layers], x), y)

    def step(model: Any, optimiser: Any, average: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, x, y)
        optimiser.update(model, grads)
        if task.averages:
            nnx.update(average, optax.incremental_update(nnx.state(model), nnx.state(average), _KEPT))
        return value

    online = nnx_model(task.leaves)
    average = nnx_model(task.leaves) if task.averages else None
    state = online, nnx.Optimizer(online, task.optimiser, wrt=nnx.Param), average
    jitted = nnx.jit(step, donate_argnums=(0, 1, 2))
    call = lambda state, *batch: (state, jitted(*state, *batch))  # it mutates what it is given
    return Loop(call, state, *_batch(), lower=lambda state, *batch: jitted.lower(*state, *batch))


_MAKERS = {
    _JAX: _with_jax,
    _EQX: _with_equinox,
    _NNX: _with_nnx,
    _RAVEL: _with_ravel_pytree,
    _TREE: _with_tree,
    _FLAT: _with_vector,
    _GRADIENT: _gradient_alone,
}
