"""Gradients added up: over the pieces of a batch, array by array, and in place.

In the first table a net of layers of 32x32 is differentiated in pieces of its batch. By hand, a scan adds to each leaf
of a sum of trees; `tp.accumulate` takes the model, or its vector. Operations, which XLA counts once for a loop, are not
shown. In the second, gradients are added that are there already: outside of `jit` array by array, in a loop or by
`jax.tree.map`, or jitted as a whole; sums are donated where it is jitted.

In the last, vectors are added that are far larger than any cache. The yardstick is NumPy in place, `np.add(sum,
gradient, out=sum)`; the others are jitted and donate the sum. Each reads two vectors and writes one. An average of
parameters is the same work for the memory. (What NumPy would need for that, two passes more, is not the yardstick.)
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treeparams as tp

from ._harness import Case, Scale, Table, Verdict, as_ratios, at_most, in_time, interleave, sweep
from ._models import Net
from ._programs import Function, Program, built, in_bytes, rows, timed
from ._steps import Loop, model

_WHOLE, _BY_HAND, _TP, _TP_VECTOR = "whole batch", "scan of trees", "tp.accumulate", "tp.accumulate, vector"
_NUMPY, _ADD, _EMA = "numpy", "sum + gradient", "tp.ema"
_VECTOR = "vector"
_WIDTH, _PIECES = 32, 8


def run(scale: Scale) -> Iterator[Table]:
    leaves, batch = (8, 2 * _PIECES) if scale.is_smoke else (200, 64 * _PIECES)
    yield _in_pieces(leaves, batch, scale)
    found = sweep(_one_by_one, scale, largest=1000)
    yield found.table("Gradients of many leaves of 8x8, added", [found.growth_target(_VECTOR)])
    yield _in_place(2**10 if scale.is_smoke else 2**26, scale)


# -- Over pieces of a batch --------------------------------------------------------------------------------------------


def _in_pieces(leaves: int, examples: int, scale: Scale) -> Table:
    net = model(leaves, _WIDTH)
    batch = jnp.sin(jnp.arange(examples * _WIDTH, dtype=jnp.float32)).reshape(examples, _WIDTH)
    vector, restructure = tp.ravel(net)
    functions: dict[str, Function] = {
        _WHOLE: (jax.value_and_grad(_loss), (net, batch)),
        _BY_HAND: (_scan_of_trees, (net, batch)),
        _TP: (tp.accumulate(_loss, pieces=_PIECES), (net, batch)),
        _TP_VECTOR: (tp.accumulate(lambda v, x: _loss(restructure(v), x), pieces=_PIECES), (vector, batch)),
    }
    programs = built(functions, 0 if scale.is_smoke else 20)
    _check_gradients({name: programs[name].call(*args) for name, (_, args) in functions.items()}, restructure)
    times = timed(programs, functions, scale)
    cells = [row for row in rows(programs.values(), times.values()) if row[0] != "operations"]
    title = f"{_PIECES} pieces of a batch of {examples}; value and gradient of a net of {leaves} leaves"
    return Table(title, ["", *programs], cells, list(_targets(programs, times)))


def _targets(programs: Mapping[str, Program], times: Mapping[str, float]) -> Iterator[Verdict]:
    found = {
        "build": {name: program.build for name, program in programs.items()},
        "run time": times,
        "temporary memory": {name: program.temporary for name, program in programs.items()},
    }
    for what, each in found.items():
        yield at_most(1.1, what, each, _TP, _BY_HAND)


def _loss(net: Net, x: jax.Array) -> jax.Array:
    return jnp.mean(net(x) ** 2)


def _scan_of_trees(net: Net, batch: jax.Array) -> tuple[jax.Array, Any]:
    def add(total: Any, piece: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(lambda old, new: old + new / _PIECES, total, jax.value_and_grad(_loss)(net, piece)), None

    start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, net)
    return jax.lax.scan(add, start, batch.reshape(_PIECES, -1, batch.shape[-1]))[0]


def _check_gradients(found: Mapping[str, Any], restructure: tp.Restructure) -> None:
    expected = restructure.ravel(found[_WHOLE][1])
    for other in (restructure.ravel(found[_BY_HAND][1]), restructure.ravel(found[_TP][1]), found[_TP_VECTOR][1]):
        assert np.allclose(expected, other, rtol=1e-4, atol=1e-6 * float(jnp.abs(expected).max()))


# -- Array by array ----------------------------------------------------------------------------------------------------


def _one_by_one(leaves: int) -> Mapping[str, Loop]:
    tree = jax.device_put([np.full((8, 8), i, np.float32) for i in range(leaves)])
    vector, _ = tp.ravel(tree)

    def in_loop(total: list[jax.Array], gradient: list[jax.Array]) -> list[jax.Array]:
        total = list(total)
        for i, each in enumerate(gradient):
            total[i] += each
        return total

    mapped = lambda total, gradient: jax.tree.map(jnp.add, total, gradient)
    return {
        _VECTOR: _waiting(jnp.add, vector),
        "vector, jitted": _waiting(jax.jit(jnp.add, donate_argnums=0), vector),
        "loop": _waiting(in_loop, tree),
        "jax.tree.map": _waiting(mapped, tree),
        "jax.tree.map, jitted": _waiting(jax.jit(mapped, donate_argnums=0), tree),
    }


def _waiting(add: Callable[[Any, Any], Any], gradient: Any) -> Loop:
    def step(total: Any, gradient: Any) -> tuple[Any, jax.Array]:
        total = jax.block_until_ready(add(total, gradient))
        return total, jax.tree.leaves(total)[-1]

    return Loop(step, jax.tree.map(jnp.zeros_like, gradient), gradient)


# -- In place ----------------------------------------------------------------------------------------------------------


def _in_place(length: int, scale: Scale) -> Table:
    total, gradient = np.zeros(length, np.float32), np.ones(length, np.float32)
    on_device = jax.device_put(gradient)
    steps = {
        _ADD: lambda total, gradient: total + gradient,
        _EMA: lambda total, gradient: tp.ema(total, gradient, decay=0.99),
    }
    cases = {_NUMPY: Case(lambda: np.add(total, gradient, out=total))}
    cases |= {name: Case(_in_turn(step, jnp.zeros(length), on_device)) for name, step in steps.items()}
    times = {name: timing.median for name, timing in interleave(cases, scale).items()}
    rates = {name: 3 * total.nbytes / seconds for name, seconds in times.items()}
    rows = [
        ["time", *as_ratios(list(times.values()), in_time)],
        ["bandwidth", *as_ratios(list(rates.values()), lambda rate: f"{in_bytes(rate)}/s")],
    ]
    target = at_most(1.25, "time", times, _EMA, _NUMPY)
    return Table(f"Vectors of {in_bytes(total.nbytes)}, in place", ["", *cases], rows, [target])


def _in_turn(step: Callable[[Any, Any], Any], total: Any, gradient: Any) -> Loop:
    # The sum is both the state and what is waited for; a loop has done with the one before it starts the next call.
    donating = jax.jit(step, donate_argnums=0)
    return Loop(lambda total, gradient: (made := donating(total, gradient), made), total, gradient)
