"""Jacobians of a net sample by sample, where the net is at hand for a batch or for a sample, and norms of gradients.

`nested.batched_jacobian` is given the function of the batch, the `vmap`s that of a sample; "diagonal blocks" is what
one would write without either: `jax.jacrev` over the batch, of which all but the blocks on the diagonal are zero.
"""

import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from treeparams import nested

from ._harness import Scale, Table, verdict
from ._programs import Function, build, built, rows, timed

_TP, _REVERSE, _FORWARD, _BLOCKS = "batched_jacobian", "vmap(jacrev)", "vmap(jacfwd)", "diagonal blocks"


def run(scale: Scale) -> Iterator[Table]:
    for inputs, outputs in ((4, 32), (32, 4), (16, 16))[: 1 if scale.is_smoke else None]:
        yield _jacobians(inputs, outputs, scale)
    yield _examples(scale)


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
        _TP: (lambda params, x: nested.batched_jacobian(lambda x: whole(params, x))(x), (params, x)),
        _BLOCKS: (lambda params, x: jnp.einsum("ijik->ijk", jax.jacrev(whole, 1)(params, x)), (params, x)),
    }
    programs = built(functions, 0 if scale.is_smoke else 20)
    times = timed(programs, functions, scale)
    ratio = times[_TP] / min(times[_REVERSE], times[_FORWARD])
    sweeps = programs[_TP].flops / build(whole, params, x).flops
    targets = [
        verdict(f"run time of {_TP} <= 1.1x the better vmap", ratio <= 1.1, f"{ratio:.2f}x"),
        verdict(
            f"operations <= {min(inputs, outputs) + 2} forward passes",
            sweeps <= min(inputs, outputs) + 2,
            f"{sweeps:.1f}",
        ),
    ]
    title = f"{inputs} inputs, {outputs} outputs, {batch} samples"
    return Table(title, ["", *programs], rows(programs.values(), times.values()), targets)


def _examples(scale: Scale) -> Table:
    batch, width = (4, 8) if scale.is_smoke else (128, 128)
    mlp = eqx.nn.MLP(16, "scalar", width, 3, jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_inexact_array)
    examples = (jax.random.normal(jax.random.key(1), (batch, 16)), jnp.ones(batch))

    def loss(params: Any, example: Any) -> jax.Array:
        return (eqx.combine(params, static)(example[0]) - example[1]) ** 2

    def by_hand(params: Any, examples: Any) -> jax.Array:
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, examples)
        return jnp.sqrt(sum(jnp.sum(leaf.reshape(batch, -1) ** 2, 1) for leaf in jax.tree.leaves(grads)))

    arguments = (params, examples)
    functions: dict[str, Function] = {
        "norms by vmap(grad)": (by_hand, arguments),
        "per_example_norms": (lambda params, batch: nested.per_example_norms(loss, params, batch), arguments),
        "chunk=16": (lambda params, batch: nested.per_example_norms(loss, params, batch, chunk=16), arguments),
        "chunk=None": (lambda params, batch: nested.per_example_norms(loss, params, batch, chunk=None), arguments),
    }
    programs = built(functions, 0 if scale.is_smoke else 20)
    times = timed(programs, functions, scale)
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    title = f"Norms of the gradients of {batch} examples, {size:,} parameters"
    return Table(title, ["", *programs], rows(programs.values(), times.values()))
