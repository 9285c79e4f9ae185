"""Parameters at rest in stacks, one array for each shape (`tp.stack`), next to trees and vectors.

First whole steps: loss, gradient, clipping by the global norm, Adam, and an average of the parameters, of a net of
layers of 8x8 on a batch of 8. The yardstick is `jax.jit` of the model. Layers are scanned over stacks, by
`restructure.scan`; in one column the parameters rest in the model and are stacked in each step. By hand, the parameters
are one array of all weights and one of all biases, and the layers a `jax.lax.scan` over them, without this library. The
floor has the products of a linear net, forward and backward, and one pass over parameters, moments and average: no
biases, no `tanh` and no norm, which is where a scan by hand takes half as long again.

Further on the layers are not scanned, but all cut out of the stacks, as they are out of a vector. What is compiled has
a fifth more lines then: a row gets an axis where it is joined, and an index for each axis where it is cut. Large leaves
are matrices in chains of products, in a whole step with Adam. Large rows of one stack are copied where they are cut out
and joined, so nothing is claimed of them: "large ones apart" has a group for each, so that they rest in stacks of one,
which are not copied. That is not done by itself, since `restructure.scan` and `sharding` need layers to be rows of one
stack. At the end, stacks are made outside of `jit`.

Steps donate their state, and that whole ones come to the same losses is asserted. What is built within two seconds is
built three times, in turn, and the median counts.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import treeparams as tp

from ._harness import Scale, Table, Verdict, at_most, in_time, sweep
from ._models import net
from ._programs import Program, built, rows, timed
from ._steps import (
    RATE,
    Loop,
    Task,
    arrays,
    averaged,
    builds_and_steps,
    by_hand,
    examples,
    mean_error,
    measured,
    model,
    sweep_of_steps,
)

_JAX, _TREE, _VECTOR, _STACKS = "jax.jit", "tree", "vector", "stacks"
_BY_HAND, _FLOOR = "scan by hand", "floor"
_EACH_STEP, _APART, _SCANNED = "stacked in each step", "large ones apart", "stacks, scanned"
_SLACK = 1.1  # a form that takes so much is still as good


def run(scale: Scale) -> Iterator[Table]:
    yield from _whole_steps((4,) if scale.is_smoke else (1000, 10_000), scale)
    yield _cut_out(4 if scale.is_smoke else 400, scale)
    yield from _large(scale)
    found = sweep(_made, scale._replace(patience=float("inf")), largest=1000)
    yield found.table("Made outside of `jit`", [found.ratio_target("tp.stack", "ravel_pytree", 1 / 5, sizes=(1000,))])


# -- A whole step of a deep net ----------------------------------------------------------------------------------------


def _whole_steps(sizes: Sequence[int], scale: Scale) -> Iterator[Table]:
    many, most = sizes[-2:][0], sizes[-1]
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE))
    task = lambda leaves: Task(leaves, optimiser, averages=True)
    makers = lambda leaves: {name: functools.partial(make, task(leaves)) for name, make in _STEPS.items()}
    largest = {name: many for name in _STEPS if name not in (_STACKS, _BY_HAND, _FLOOR)}
    found = sweep_of_steps(makers, sizes, largest, scale, unchecked=[_FLOOR])
    builds, steps = builds_and_steps(found.timings[many])
    longest = found.timings[most][_STACKS].first
    what = f"whole step, {many} leaves:"
    targets = [
        at_most(1 / 3, f"{what} build", builds, _VECTOR, _JAX),
        at_most(1 / 20, f"{what} build", builds, _STACKS, _JAX),
        at_most(1 / 6, f"{what} build", builds, _STACKS, _VECTOR),
        found.growth_target(_STACKS, 0.2, firsts=True),
        Verdict(f"whole step, {most} leaves: build of {_STACKS} <= 3 s", longest <= 3, in_time(longest)),
    ]
    yield found.firsts("Whole step: trace, lower, compile", targets, found.names)
    targets = [
        at_most(1 / 3, f"{what} run time", steps, _VECTOR, _JAX),
        at_most(1 / 6, f"{what} run time", steps, _STACKS, _JAX),
    ]
    targets.append(at_most(1 / 1.75, f"{what} run time", steps, _STACKS, _EACH_STEP))
    targets.append(at_most(_SLACK, f"{what} run time", steps, _STACKS, _BY_HAND))
    targets.append(at_most(1.6, f"{what} run time", steps, _STACKS, _FLOOR))
    yield found.table("Whole step: run time", targets)


def _with_jax(task: Task) -> Loop:
    return by_hand(task, lambda net, x, y: mean_error(net(x), y), model(task.leaves), optax.incremental_update)


def _with_vector(task: Task) -> Loop:
    vector, restructure = tp.ravel(model(task.leaves))
    error = lambda vector, restructure, x, y: mean_error(restructure(vector)(x), y)
    return by_hand(task, error, vector, averaged, restructure)


def _with_stacks(task: Task) -> Loop:
    stacks, restructure = tp.stack(model(task.leaves))
    return by_hand(task, _scanned_error, stacks, averaged, restructure)


def _scanned_error(stacks: Any, restructure: tp.Restructure, x: jax.Array, y: jax.Array) -> jax.Array:
    layer = lambda x, layer: (jnp.tanh(x @ layer.weight.T + layer.bias), None)
    return mean_error(restructure.scan(layer, x, stacks, "layers.*")[0], y)


def _stacking(task: Task) -> Loop:
    """As `_with_stacks`, of a model that is stacked, and taken apart again, in each step."""
    on_stacks = _with_stacks(task)
    (stacks, *others), (restructure, *_) = on_stacks.state, on_stacks.args

    def step(state: Any, restructure: tp.Restructure, *args: Any) -> tuple[Any, jax.Array]:
        net, *others = state
        (stacks, *others), value = on_stacks.step((restructure.ravel(net), *others), restructure, *args)
        return (restructure(stacks), *others), value

    return Loop(jax.jit(step, donate_argnums=0), (restructure(stacks), *others), *on_stacks.args)


def _scanning(task: Task) -> Loop:
    """The same steps without this library: one array of weights, one of biases, and a scan over them."""
    made = arrays(task.leaves)
    layer = lambda x, layer: (jnp.tanh(x @ layer[0].T + layer[1]), None)
    error = lambda stacks, x, y: mean_error(jax.lax.scan(layer, x, stacks)[0], y)
    return by_hand(task, error, jax.device_put((np.stack(made[::2]), np.stack(made[1::2]))), optax.incremental_update)


def _floor(task: Task) -> Loop:
    """The least of such a step: its products, and each of its arrays read and written once."""

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        (weights, biases), *others = state
        through = lambda x, weight: (x @ weight.T, None)
        value, grads = jax.value_and_grad(lambda each: jnp.mean(jax.lax.scan(through, x, each)[0]))(weights)
        moved = [_moved(*each) for each in zip((weights, biases), (grads, biases), *others, strict=True)]
        return tuple(zip(*moved, strict=True)), value

    start = tuple(tp.stack(model(task.leaves))[0].values())
    state = tuple(tp.copy(start) for _ in range(4))
    return Loop(jax.jit(step, donate_argnums=0), state, examples()[0])


def _moved(param: jax.Array, grad: jax.Array, first: jax.Array, second: jax.Array, average: jax.Array) -> Any:
    first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
    param = param - RATE * first / (jnp.sqrt(jnp.abs(second)) + 1e-8)
    return param, first, second, 0.99 * average + 0.01 * param


_STEPS: dict[str, Callable[[Task], Loop]] = {
    _JAX: _with_jax,
    _VECTOR: _with_vector,
    _STACKS: _with_stacks,
    _EACH_STEP: _stacking,
    _BY_HAND: _scanning,
    _FLOOR: _floor,
}


# -- Layers that are not scanned ---------------------------------------------------------------------------------------


def _cut_out(leaves: int, scale: Scale) -> Table:
    whole, x = net(leaves, 16), jnp.ones((8, 16))
    loss = jax.value_and_grad(lambda form, restructure, x: jnp.sum(restructure(form)(x) ** 2))
    functions = {_VECTOR: (loss, (*tp.ravel(whole), x)), _STACKS: (loss, (*tp.stack(whole), x))}
    programs = built(functions, 0 if scale.is_smoke else 6)
    times = timed(programs, functions, scale)
    builds, what = {name: each.build for name, each in programs.items()}, f"not scanned, {leaves} leaves:"
    targets = [
        at_most(1.25, f"{what} build", builds, _STACKS, _VECTOR),
        at_most(_SLACK, f"{what} run time", times, _STACKS, _VECTOR),
    ]
    title = f"Value and gradient, not scanned: {leaves} leaves of 16x16 and 16"
    return Table(title, ["", *programs], rows(programs.values(), times.values()), targets)


# -- Large leaves ------------------------------------------------------------------------------------------------------


def _large(scale: Scale) -> Iterator[Table]:
    n, half, several = (32, 16, 2) if scale.is_smoke else (2048, 1024, 100)
    different = {"large": _chain(range(n, n + 40, 8))}
    yield _large_table(f"4 large leaves, from {n}x{n + 8} on, each of another shape", different, scale)
    if not scale.is_smoke:
        yield _large_table(f"4 large leaves of {n}x{n}", {"large": _chain([n] * 5)}, scale)
    both = {"large": _chain([half] * 7), "small": arrays(2 * several)[::2]}
    yield _large_table(f"6 large leaves of {half}x{half} and {several} of 8x8", both, scale)


def _chain(sizes: Iterable[int]) -> list[jax.Array]:
    random = np.random.default_rng(0)
    pairs = itertools.pairwise(sizes)
    return jax.device_put([random.normal(0, n**-0.5, (n, m)).astype(np.float32) for n, m in pairs])


def _large_table(title: str, chains: dict[str, list[jax.Array]], scale: Scale) -> Table:
    timings, loops = measured(_large_steps(chains), scale)
    builds, steps = builds_and_steps(timings)
    memory = {name: loop.compiled.memory_analysis().temp_size_in_bytes for name, loop in loops.items()}
    programs = [Program(loop, builds[name], loop.cost()["flops"], memory[name]) for name, loop in loops.items()]
    is_mixed = len(chains) > 1
    best = min(_TREE, _VECTOR, key=lambda name: steps[name]) if is_mixed else _TREE
    name = _APART if _APART in steps else _STACKS
    targets = [
        at_most(_SLACK, f"{title}: run time", steps, name, best),
        at_most(1.01, f"{title}: temporary memory", memory, name, _TREE),  # buffers begin at multiples of 64 bytes
    ]
    return Table(title, ["", *steps], rows(programs, steps.values()), targets)


def _large_steps(chains: dict[str, list[jax.Array]]) -> dict[str, Callable[[], Loop]]:
    task, starts = Task(0, optax.adam(RATE / 100)), {name: jnp.ones((8, len(it[0]))) for name, it in chains.items()}
    layer = lambda x, weight: (jnp.tanh(x @ weight), None)

    def maker(form: Any, restructure: Any, is_scanned: bool = False) -> Callable[[], Loop]:
        def end(form: Any, name: str) -> jax.Array:
            if is_scanned:
                return restructure.scan(layer, starts[name], form, f"{name}.*")[0]
            return functools.reduce(lambda x, weight: layer(x, weight)[0], restructure(form)[name], starts[name])

        error = lambda form, *_: sum(jnp.mean(end(form, name) ** 2) for name in chains)
        return lambda: by_hand(task, error, tp.copy(form), averaged)

    made = {
        _TREE: maker(chains, lambda chains: chains),
        _VECTOR: maker(*tp.ravel(chains)),
        _STACKS: maker(*tp.stack(chains)),
    }
    if chains["large"][0].shape != chains["large"][1].shape:
        return made
    groups = {f"{i}": f"large.{i}" for i in range(len(chains["large"]))} | {"small": "**"}
    return made | {
        _APART: maker(*tp.stack(chains, groups=groups)),
        _SCANNED: maker(*tp.stack(chains), is_scanned=True),
    }


# -- Outside of jit ----------------------------------------------------------------------------------------------------


def _made(leaves: int) -> Mapping[str, Callable]:
    model = net(leaves)
    makers = {"ravel_pytree": ravel_pytree, "tp.ravel": tp.ravel, "tp.stack": tp.stack}
    return {name: lambda make=make: jax.block_until_ready(make(model)[0]) for name, make in makers.items()}
