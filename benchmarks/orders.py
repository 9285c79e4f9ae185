"""The gradient of a loss that contains derivatives in the input, in each order in which it can be taken.

Outer over inner: "reverse/reverse" is what JAX makes of `jax.grad` within `jax.grad`; "forward/reverse" is one product
with the Hessian, to which Lux rewrites; "reverse/forward" is the gradient of a directional derivative, which for `jvp`
and for `jacobian` by columns is what JAX does as it is. The default of the function comes first and is the yardstick.
Each loss is the mean over a batch, and its gradient is taken in all parameters.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from treeparams import nested

from ._harness import Scale, Table, as_ratios, in_time
from ._models import Attention, Recurrent
from ._programs import Program, built, in_bytes, in_millions, timed

_REVERSE, _LUX, _FORWARD = "reverse/reverse", "forward/reverse", "reverse/forward"


class Subject(NamedTuple):
    """A loss of a model and its input, for a mode."""

    model: Any
    x: jax.Array
    loss: Callable[[Any], Callable[[Any, Any], jax.Array]]


def run(scale: Scale) -> Iterator[Table]:
    small = scale.is_smoke
    scalars = _scalar_models(small)
    if small:  # building all of them takes most of a minute
        scalars = {"PINN": scalars["PINN 2-64x4-1, Burgers"]}
    yield _table("`nested.gradient`", (_REVERSE, _LUX, _FORWARD), {k: _squared(*v) for k, v in scalars.items()}, scale)
    yield _table("`nested.vjp`", (_REVERSE, _LUX, _FORWARD), {"autoencoder 32-128-32": _contractive(small)}, scale)
    yield _table("`nested.jvp`", (_FORWARD, _LUX, _REVERSE), {"sliced score matching 8-128x2-8": _score(small)}, scale)
    wide = {"MLP 4-64x2-32": _jacobian(4, 32, small), "MLP 8-64x2-8": _jacobian(8, 8, small)}
    yield _table("`nested.jacobian`, no more inputs than outputs", (_FORWARD, _LUX, _REVERSE), wide, scale)
    if small:
        return
    tall = {"MLP 32-64x2-4": _jacobian(32, 4, small)}
    yield _table("`nested.jacobian`, more inputs than outputs", (_REVERSE, _LUX, _FORWARD), tall, scale)


def _table(title: str, orders: tuple[str, ...], subjects: dict[str, Subject], scale: Scale) -> Table:
    rows: list[list[str]] = []
    for name, subject in subjects.items():
        functions = {order: (jax.grad(_closed(subject, order)), _arguments(subject)) for order in orders}
        programs = built(functions, 0 if scale.is_smoke else 20)
        times = timed(programs, functions, scale)
        rows += _rows(name, list(programs.values()), list(times.values()))
    return Table(title, ["", *orders], rows)


def _rows(name: str, programs: list[Program], times: list[float]) -> list[list[str]]:
    return [
        [f"{name}: run time", *as_ratios(times, in_time)],
        ["operations", *as_ratios([each.flops for each in programs], in_millions)],
        ["temporary memory", *as_ratios([each.temporary for each in programs], in_bytes)],
        ["trace, lower, compile", *as_ratios([each.build for each in programs], in_time)],
    ]


def _arguments(subject: Subject) -> tuple[Any, jax.Array]:
    return eqx.filter(subject.model, eqx.is_inexact_array), subject.x


def _closed(subject: Subject, order: str) -> Callable[[Any, jax.Array], jax.Array]:
    static = eqx.filter(subject.model, eqx.is_inexact_array, inverse=True)
    loss = subject.loss(order)
    each = lambda params, x: loss(eqx.combine(params, static), x)
    return lambda params, x: jnp.mean(jax.vmap(each, (None, 0))(params, x))


# -- What is differentiated


def _scalar_models(small: bool) -> dict[str, tuple[Any, jax.Array, Any]]:
    width, batch, steps = (8, 4, 3) if small else (256, 128, 20)
    points = lambda *shape: jax.random.normal(jax.random.key(1), (batch, *shape))
    mlp = lambda size, width, depth: eqx.nn.MLP(size, "scalar", width, depth, jnp.tanh, key=jax.random.key(0))
    return {
        "MLP 1-12-12-12-1": (mlp(1, 12, 3), points(1), None),
        "MLP 8-256x4-1": (mlp(8, width, 4), points(8), None),
        "RNN, 20 steps of 4, 64 wide": (Recurrent(64), points(steps, 4), None),
        "attention, 20 tokens of 32": (Attention(32), points(steps, 32), None),
        "PINN 2-64x4-1, Burgers": (mlp(2, 64, 4), points(2), _burgers),
        "Hamiltonian net 4-128x2-1": (mlp(4, 128, 2), points(4), _hamiltonian),
        "score matching 8-128x2-1": (mlp(8, 128, 2), points(8), _denoising),
    }


def _squared(model: Any, x: jax.Array, loss: Any) -> Subject:
    plain = lambda order: lambda model, x: jnp.sum(nested.gradient(_call, mode=order)(model, x) ** 2)
    return Subject(model, x, loss or plain)


def _call(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def _burgers(order: Any) -> Any:
    def residual(model: Any, x: jax.Array) -> jax.Array:
        gradient = nested.gradient(_call, mode=order)
        u_t, u_x = gradient(model, x)
        u_xx = nested.gradient(lambda model, x: gradient(model, x)[1], mode=order)(model, x)[1]
        return (u_t + model(x) * u_x - 0.01 * u_xx) ** 2

    return residual


def _hamiltonian(order: Any) -> Any:
    def error(model: Any, x: jax.Array) -> jax.Array:
        to_q, to_p = jnp.split(nested.gradient(_call, mode=order)(model, x), 2)
        return jnp.sum((to_p - x[2:]) ** 2) + jnp.sum((to_q - x[:2]) ** 2)

    return error


def _denoising(order: Any) -> Any:
    return lambda model, x: jnp.sum((nested.gradient(_call, mode=order)(model, x) + x) ** 2)


def _contractive(small: bool) -> Subject:
    width, batch = (8, 4) if small else (128, 128)
    model = eqx.nn.MLP(32, 32, width, 2, jnp.tanh, key=jax.random.key(0))

    def loss(order: Any) -> Any:
        def error(model: Any, x: jax.Array) -> jax.Array:
            y, product = nested.vjp(_call, mode=order)(model, x, jnp.sin(x))
            return jnp.sum((y - x) ** 2) + jnp.sum(product**2)

        return error

    return Subject(model, jax.random.normal(jax.random.key(1), (batch, 32)), loss)


def _score(small: bool) -> Subject:
    width, batch = (8, 4) if small else (128, 128)
    model = eqx.nn.MLP(8, 8, width, 2, jnp.tanh, key=jax.random.key(0))

    def loss(order: Any) -> Any:
        def error(model: Any, x: jax.Array) -> jax.Array:
            direction = jnp.sign(jnp.sin(100 * x))
            score, product = nested.jvp(_call, mode=order)(model, x, direction)
            return jnp.sum(score**2) / 2 + direction @ product

        return error

    return Subject(model, jax.random.normal(jax.random.key(1), (batch, 8)), loss)


def _jacobian(inputs: int, outputs: int, small: bool) -> Subject:
    model = eqx.nn.MLP(inputs, outputs, 8 if small else 64, 2, jnp.tanh, key=jax.random.key(0))
    loss = lambda order: lambda model, x: jnp.sum(nested.jacobian(_call, mode=order)(model, x) ** 2)
    return Subject(model, jax.random.normal(jax.random.key(1), (4 if small else 128, inputs)), loss)
