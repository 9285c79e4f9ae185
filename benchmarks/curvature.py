"""Products with the Hessian of a net of 10 leaves: once, many times at one model, and all of the diagonal.

The yardstick of the first table is the gradient. "by hand" is `jax.jvp` of `jax.grad` over the tree. In the second the
products of 50 directions come one after the other, as in a solver, each call jitted on its own: fresh products against
one operator, whose linearisation is counted. `optax.second_order` goes with Optax 0.2.9.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeparams as tp
from treeparams import nested

from ._harness import Scale, Table, as_ratios, in_time, there_and_back, verdict
from ._programs import Function, build, built, rows, timed

_TP, _HAND, _OPTAX = "nested.hvp", "by hand", "optax.second_order"
_GRADIENT = "gradient"


def run(scale: Scale) -> Iterator[Table]:
    width, batch = (8, 4) if scale.is_smoke else (256, 128)
    mlp = eqx.nn.MLP(8, "scalar", width, 4, jnp.tanh, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (batch, 8))
    yield _products(mlp, x, scale)
    yield _solver(mlp, x, scale)
    small = eqx.nn.MLP(8, "scalar", 4 if scale.is_smoke else 16, 2, jnp.tanh, key=jax.random.key(0))
    yield _diagonal(small, x, scale)


def _loss(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - jnp.sum(x, 1)) ** 2)


def _of_params(model: eqx.nn.MLP) -> tuple[Any, Callable[..., jax.Array]]:
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return params, lambda params, x, _=None: _loss(eqx.combine(params, static), x)


def _products(mlp: eqx.nn.MLP, x: jax.Array, scale: Scale) -> Table:
    params, loss = _of_params(mlp)
    vector, restructure = tp.ravel(mlp)
    functions: dict[str, Function] = {
        _GRADIENT: (jax.grad(loss), (params, x)),
        _TP: (lambda vector, v, x: nested.hvp(_loss, restructure(vector), v, x), (vector, vector, x)),
        "of a tree": (
            lambda params, v, x: nested.hvp(lambda params, x: loss(params, x), params, v, x),
            (params, params, x),
        ),
        _HAND: (lambda p, v, x: jax.jvp(lambda p: jax.grad(loss)(p, x), (p,), (v,))[1], (params, params, x)),
    }
    if hasattr(optax, "second_order"):
        functions[_OPTAX] = (lambda p, v, x: optax.second_order.hvp(loss, v, p, x, None), (params, vector, x))
    programs = built(functions, 0 if scale.is_smoke else 20)
    times = timed(programs, functions, scale)
    flops = programs[_TP].flops / programs[_GRADIENT].flops
    ratio = times[_TP] / times[_HAND]
    targets = [
        verdict(f"operations of {_TP} <= 4 gradients", flops <= 4, f"{flops:.2f}"),
        verdict(f"run time of {_TP} <= 1.1x {_HAND}", ratio <= 1.1, f"{ratio:.2f}x"),
    ]
    return Table(
        f"One product; {len(vector):,} parameters", ["", *programs], rows(programs.values(), times.values()), targets
    )


def _solver(mlp: eqx.nn.MLP, x: jax.Array, scale: Scale) -> Table:
    count = 3 if scale.is_smoke else 50
    layout = tp.layout(mlp)
    vector, restructure = tp.ravel(mlp)
    directions = list(jax.random.normal(jax.random.key(2), (count, layout.size)))
    fresh = jax.jit(lambda vector, v, x: nested.hvp(_loss, restructure(vector), v, x))
    linearise = jax.jit(lambda vector, x: nested.hessian_operator(_loss, restructure(vector), x))
    apply = jax.jit(lambda operator, v: operator(v))

    def by_operator() -> Any:
        operator = linearise(vector, x)
        return jax.block_until_ready([apply(operator, v) for v in directions])

    calls = {
        f"{count} fresh products": lambda: jax.block_until_ready([fresh(vector, v, x) for v in directions]),
        "one operator": by_operator,
        "of it, linearised": lambda: jax.block_until_ready(linearise(vector, x)),
    }
    times = there_and_back(calls, scale)
    first, ours, _ = times.values()
    five = lambda vector, x, vs: [nested.hessian_operator(_loss, restructure(vector), x)(v) for v in vs]
    one = build(lambda vector, v, x: nested.hvp(_loss, restructure(vector), v, x), vector, vector, x)
    flops = build(five, vector, x, directions[:5]).flops / one.flops
    targets = [
        verdict(f"{count} applications <= 0.6x {count} fresh products", ours <= 0.6 * first, f"{ours / first:.2f}x"),
        verdict("5 applications <= 4.2 products in operations", flops <= 4.2, f"{flops:.2f}"),
    ]
    return Table(
        "Many products at one model", ["", *calls], [["run time", *as_ratios(list(times.values()), in_time)]], targets
    )


def _diagonal(mlp: eqx.nn.MLP, x: jax.Array, scale: Scale) -> Table:
    params, loss = _of_params(mlp)
    vector, restructure = tp.ravel(mlp)
    functions: dict[str, Function] = {
        "nested.hessian_diagonal": (lambda v, x: nested.hessian_diagonal(_loss, restructure(v), x), (vector, x)),
        "chunk=32": (lambda v, x: nested.hessian_diagonal(_loss, restructure(v), x, chunk=32), (vector, x)),
        "of jax.hessian": (lambda v, x: jnp.diag(jax.hessian(lambda v: _loss(restructure(v), x))(v)), (vector, x)),
    }
    if hasattr(optax, "second_order"):
        functions[_OPTAX] = (lambda p, x: optax.second_order.hessian_diag(loss, p, x, None), (params, x))
    programs = built(functions, 0 if scale.is_smoke else 20)
    want, *others = (np.asarray(program.call(*functions[name][1])) for name, program in programs.items())
    for other in others:
        np.testing.assert_allclose(other, want, 1e-3, 1e-5)
    times = timed(programs, functions, scale)
    return Table(f"The diagonal; {len(vector)} parameters", ["", *programs], rows(programs.values(), times.values()))
