"""The Laplacian of a net's output in its 30 inputs, over a batch, and the gradient of a loss with it.

`folx` is the forward Laplacian that neural-network quantum Monte Carlo uses. Runs are five times there and back; what
counts against `folx` is whether the median of ours lies within the spread of its five.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import folx
import jax
import jax.numpy as jnp
import numpy as np

from treeparams import nested

from ._harness import Scale, Table, at_most
from ._programs import Function, built, rows, timed

_TP, _FOLX, _TRACE = "nested.input_laplacian", "folx", "trace of jax.hessian"


def run(scale: Scale) -> Iterator[Table]:
    activations = {"tanh": jnp.tanh, "gelu": jax.nn.gelu}
    for name, activation in list(activations.items())[: 1 if scale.is_smoke else None]:
        yield _table(name, activation, scale)
    yield _in_loss(scale)


def _table(name: str, activation: Callable[..., Any], scale: Scale) -> Table:
    functions = _laplacians(activation, scale)
    programs = built(functions, 0)
    want = programs[_TRACE].call(*functions[_TRACE][1])
    for each, program in programs.items():
        np.testing.assert_allclose(program.call(*functions[each][1]), want, 1e-3, 1e-4)
    times = timed(programs, functions, scale._replace(seconds=3 * scale.seconds))
    target = at_most(1.05, "run time", times, _TP, _FOLX)
    return Table(_title(name, scale), ["", *programs], rows(programs.values(), times.values()), [target])


def _in_loss(scale: Scale) -> Table:
    functions = {
        name: (jax.grad(lambda params, x, f=f: jnp.mean(f(params, x) ** 2)), arguments)
        for name, (f, arguments) in _laplacians(jnp.tanh, scale).items()
    }
    programs = built(functions, 0)
    times = timed(programs, functions, scale)
    return Table("The gradient of its mean square, tanh", ["", *programs], rows(programs.values(), times.values()))


def _title(name: str, scale: Scale) -> str:
    batch, width = _size(scale)
    return f"MLP 30-{width}x4-1, {name}, {batch} points"


def _size(scale: Scale) -> tuple[int, int]:
    return (4, 8) if scale.is_smoke else (128, 256)


def _laplacians(activation: Callable[..., Any], scale: Scale) -> dict[str, Function]:
    batch, width = _size(scale)
    mlp = eqx.nn.MLP(30, "scalar", width, 4, activation, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_inexact_array)
    arguments = (params, jax.random.normal(jax.random.key(1), (batch, 30)))
    f = lambda params, x: eqx.combine(params, static)(x)
    of_folx = lambda params, x: folx.forward_laplacian(lambda x: f(params, x))(x).laplacian
    trace = lambda params, x: jnp.trace(jax.hessian(f, 1)(params, x))
    each = {_FOLX: of_folx, _TP: nested.input_laplacian(f), _TRACE: trace}
    return {name: (jax.vmap(of, (None, 0)), arguments) for name, of in each.items()}
