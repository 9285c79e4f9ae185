"""Products with the Hessian: once, and many times at one model.

The yardstick of the first table is the gradient. "by hand" is `jax.jvp` of `jax.grad` over the tree. In the second the
products of 20 directions come one after the other, as in a solver, each call jitted on its own: fresh products against
one operator, whose linearisation is counted. In operations a dense net, all of it trained, cannot come below three
quarters: six of the eight matrix products of a layer depend on the direction. `optax.second_order` goes
with Optax 0.2.9.
"""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import treeparams as tp
from treeparams import nested

from ._harness import Scale, Table, Verdict, as_ratios, at_most, in_time, medians
from ._models import Attention, Recurrent
from ._programs import Function, build, built, rows, timed

_TP, _HAND, _OPTAX = "nested.hvp", "by hand", "optax.second_order"
_GRADIENT, _FRESH, _OPERATOR = "gradient", "fresh products", "one operator"
# An application repeats all but the first pass forwards: of a net, four fifths of the operations. It reads what the
# first pass has kept, which in a net of 64 with gelu takes as long as what it saves: 0.9 to 1.02 of a fresh product.
_SLACK = 1.25


def run(scale: Scale) -> Iterator[Table]:
    width, batch = (8, 4) if scale.is_smoke else (256, 128)
    mlp = eqx.nn.MLP(8, "scalar", width, 4, jnp.tanh, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (batch, 8))
    yield _products(mlp, x, scale)
    yield _solver(scale)


def _loss(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - jnp.sum(x, 1)) ** 2)


def _products(mlp: eqx.nn.MLP, x: jax.Array, scale: Scale) -> Table:
    params, static = eqx.partition(mlp, eqx.is_inexact_array)
    loss = lambda params, x, _=None: _loss(eqx.combine(params, static), x)
    vector, restructure = tp.ravel(mlp)
    functions: dict[str, Function] = {
        _GRADIENT: (jax.grad(loss), (params, x)),
        _TP: (lambda vector, v, x: nested.hvp(_loss)(restructure(vector), v, x), (vector, vector, x)),
        "of a tree": (nested.hvp(lambda params, x: loss(params, x)), (params, params, x)),
        _HAND: (lambda p, v, x: jax.jvp(lambda p: jax.grad(loss)(p, x), (p,), (v,))[1], (params, params, x)),
    }
    if hasattr(optax, "second_order"):
        functions[_OPTAX] = (lambda p, v, x: optax.second_order.hvp(loss, v, p, x, None), (params, vector, x))
    programs = built(functions, 0)
    times = timed(programs, functions, scale)
    flops = programs[_TP].flops / programs[_GRADIENT].flops
    targets = [
        Verdict(f"operations of {_TP} <= 4 gradients", flops <= 4, f"{flops:.2f}"),
        at_most(1.15, "run time", times, _TP, _HAND),
    ]
    return Table(
        f"One product; {len(vector):,} parameters", ["", *programs], rows(programs.values(), times.values()), targets
    )


def _solver(scale: Scale) -> Table:
    count = 3 if scale.is_smoke else 20
    rows, targets = [], []
    for name, (model, x, where) in _subjects(scale).items():
        times, operations = _many(model, x, where, count, scale)
        rows.append([name, *as_ratios(list(times.values()), in_time), f"{operations:.2f}x"])
        allowed = round(_SLACK * operations, 2)
        targets.append(at_most(allowed, f"{name}: run time", times, _OPERATOR, _FRESH))
    header = ["", f"{count} {_FRESH}", _OPERATOR, "operations of 5"]
    explained = f"An operator may take {_SLACK}x as long as its operations say."
    return Table("Many products at one model", header, rows, [explained, *targets])


def _subjects(scale: Scale) -> dict[str, tuple[Any, jax.Array, Any]]:
    """Models, their inputs, and what of them is trained."""
    width, batch, steps = (8, 4, 3) if scale.is_smoke else (256, 128, 20)
    key = jax.random.key(0)
    mlp = eqx.nn.MLP(8, "scalar", width, 4, jnp.tanh, key=key)
    points = lambda *shape: jax.random.normal(jax.random.key(1), (batch, *shape))
    found = {
        "dense net": (mlp, points(8), None),
        "dense net, last layer": (mlp, points(8), "layers.4"),
        "RNN": (Recurrent(64), points(steps, 4), None),
        "attention": (Attention(32), points(steps, 32), None),
        "dense net of 64, gelu": (eqx.nn.MLP(8, "scalar", 64, 4, jax.nn.gelu, key=key), points(8), None),
    }
    return dict(list(found.items())[:2]) if scale.is_smoke else found


def _many(model: Any, x: jax.Array, where: Any, count: int, scale: Scale) -> tuple[dict[str, float], float]:
    """The times of the products, and the operations of five by the operator relative to five fresh ones."""
    layout = tp.layout(model, where)
    vector, restructure = tp.ravel(model, layout)
    directions = list(jax.random.normal(jax.random.key(2), (count, layout.size)))
    hvp = lambda restructure, vector, v, x: nested.hvp(_square, layout)(restructure(vector), v, x)
    operator = lambda restructure, vector, x: nested.hessian_operator(_square, layout)(restructure(vector), x)
    fresh, linearise, apply = jax.jit(hvp), jax.jit(operator), jax.jit(lambda operator, v: operator(v))

    def by_operator() -> Any:
        made = linearise(restructure, vector, x)
        return jax.block_until_ready([apply(made, v) for v in directions])

    calls = {
        _FRESH: lambda: jax.block_until_ready([fresh(restructure, vector, v, x) for v in directions]),
        _OPERATOR: by_operator,
    }
    times = medians(calls, scale)
    five = lambda restructure, vector, x, vs: [operator(restructure, vector, x)(v) for v in vs]
    arguments = restructure, vector
    flops = build(five, *arguments, x, (directions * 2)[:5]).flops
    return times, flops / (5 * build(hvp, *arguments, directions[0], x).flops)


def _square(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(model)(x) ** 2)
