"""The dense Hessian of a net of 18 leaves and 165 parameters, on a batch of 32.

The yardstick is `eqx.filter_hessian`, which gives a tree of trees of blocks, here 324 of them. Of a vector the Hessian
is one matrix. "products" is the least that any of them does: a Hessian-vector product with every row of the identity,
which is given, taken in the tree and left as 18 arrays.
"""

import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import treeparams as tp

from ._harness import Scale, Table, verdict
from ._programs import rows
from .restructure import Function, built, timed

_EQX, _TP, _RAVEL = "eqx.filter_hessian", "restructure", "ravel_pytree"
_PRODUCTS = "products"


def run(scale: Scale) -> Iterator[Table]:
    depth, batch = (1, 4) if scale.is_smoke else (8, 32)
    mlp = eqx.nn.MLP(4, 1, 4, depth, activation=jnp.tanh, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (batch, 4))
    functions = _hessians(mlp, x)
    programs = built(functions, 0 if scale.is_smoke else 20)
    times = timed(programs, functions, scale)
    builds = {name: program.build for name, program in programs.items()}
    targets = [
        verdict(
            f"{what} of {_TP} <= 1/4 of {_EQX}",
            found[_TP] <= found[_EQX] / 4,
            f"{found[_TP] / found[_EQX]:.2f}x; {found[_TP] / found[_PRODUCTS]:.2f}x {_PRODUCTS}",
        )
        for what, found in (("build", builds), ("run time", times))
    ]
    shapes = [array.shape for array in jax.tree.leaves(functions[_EQX][1])]
    title = f"The Hessian of {len(shapes)} leaves, {sum(map(math.prod, shapes))} parameters"
    yield Table(title, ["", *programs], rows(programs.values(), times.values()), targets)


def _hessians(mlp: eqx.nn.MLP, x: jax.Array) -> dict[str, Function]:
    def loss(mlp: eqx.nn.MLP) -> jax.Array:
        return jnp.mean(jax.vmap(mlp)(x) ** 2)

    params, static = eqx.partition(mlp, eqx.is_inexact_array)
    vector, restructure = tp.ravel(mlp)
    unravel = ravel_pytree(params)[1]
    identity = jax.vmap(unravel)(jnp.eye(len(vector)))

    def products(params: Any, identity: Any) -> Any:
        gradient = jax.grad(lambda params: loss(eqx.combine(params, static)))
        return jax.vmap(lambda row: jax.jvp(gradient, (params,), (row,))[1])(identity)

    return {
        _EQX: (lambda params: eqx.filter_hessian(lambda params: loss(eqx.combine(params, static)))(params), (params,)),
        _TP: (jax.hessian(lambda vector: loss(restructure(vector))), (vector,)),
        _RAVEL: (jax.hessian(lambda vector: loss(eqx.combine(unravel(vector), static))), (vector,)),
        _PRODUCTS: (products, (params, identity)),
    }
