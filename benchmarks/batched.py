"""Jacobians of a net sample by sample, where the net is at hand for a batch or for a sample.

`nested.input_jacobian` is given the function of the batch, the `vmap`s that of a sample; "diagonal blocks" is what
one would write without either: `jax.jacrev` over the batch, of which all but the blocks on the diagonal are zero.
"""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp

from treeparams import nested

from ._harness import Scale, Table, Verdict
from ._programs import Function, build, built, rows, timed

_TP, _REVERSE, _FORWARD, _BLOCKS = "input_jacobian", "vmap(jacrev)", "vmap(jacfwd)", "diagonal blocks"


def run(scale: Scale) -> Iterator[Table]:
    for inputs, outputs in ((4, 32), (32, 4), (16, 16))[: 1 if scale.is_smoke else None]:
        yield _jacobians(inputs, outputs, scale)


def _jacobians(inputs: int, outputs: int, scale: Scale) -> Table:
    batch, width = (4, 8) if scale.is_smoke else (128, 128)
    mlp = eqx.nn.MLP(inputs, outputs, width, 3, jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_inexact_array)
    x = jax.random.normal(jax.random.key(1), (batch, inputs))
    one = lambda params, x: eqx.combine(params, static)(x)
    whole = jax.vmap(one, (None, 0))
    functions: dict[str, Function] = {
        _REVERSE: (jax.vmap(jax.jacrev(one, 1), (None, 0)), (params, x)),
        _FORWARD: (jax.vmap(jax.jacfwd(one, 1), (None, 0)), (params, x)),
        _TP: (nested.input_jacobian(whole, batched=True), (params, x)),
        _BLOCKS: (lambda params, x: jnp.einsum("ijik->ijk", jax.jacrev(whole, 1)(params, x)), (params, x)),
    }
    programs = built(functions, 0)
    times = timed(programs, functions, scale)
    sweeps = programs[_TP].flops / build(whole, params, x).flops
    targets = [
        Verdict(
            f"operations <= {min(inputs, outputs) + 2} forward passes",
            sweeps <= min(inputs, outputs) + 2,
            f"{sweeps:.1f}",
        ),
    ]
    title = f"{inputs} inputs, {outputs} outputs, {batch} samples"
    return Table(title, ["", *programs], rows(programs.values(), times.values()), targets)
