"""The dense Hessian of a net of 18 leaves and 165 parameters, at one example and over a batch.

The yardstick is `eqx.filter_hessian`, which gives a tree of trees of blocks, here 324 of them, and is the program of
`jax.hessian` of the tree. Of a vector the Hessian is one matrix. "products" is the least that any of them does: a
Hessian-vector product with every row of the identity, which is given, taken in the tree and left as 18 arrays. The run
time is that of a call as users make it, of `eqx.filter_jit` for the yardstick and of `jax.jit` for the others. Over a
batch the arithmetic takes most of it: there the run time is held against the products, and less is claimed of the
build, which compiles the same products of batches in all of these ways.
"""

import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import treeparams as tp
from treeparams import nested

from ._harness import Scale, Table, at_most, medians
from ._programs import Function, built, rows, until_done

_EQX, _TP, _RAVEL = "eqx.filter_hessian", "restructure", "ravel_pytree"
_NESTED, _PRODUCTS = "nested.hessian", "products"


def run(scale: Scale) -> Iterator[Table]:
    mlp = eqx.nn.MLP(4, 1, 4, 1 if scale.is_smoke else 8, activation=jnp.tanh, key=jax.random.key(0))
    for examples in (1, 32) if not scale.is_smoke else (4,):
        yield _table(mlp, jax.random.normal(jax.random.key(1), (examples, 4)), scale)


def _table(mlp: eqx.nn.MLP, x: jax.Array, scale: Scale) -> Table:
    functions = _hessians(mlp, x)
    programs = built(functions, 0 if scale.is_smoke else 6)
    calls = {name: until_done(jax.jit(f), args) for name, (f, args) in functions.items()}
    calls[_EQX] = until_done(eqx.filter_jit(eqx.filter_hessian(_loss)), (mlp, x))
    times = medians(calls, scale)
    builds = {name: program.build for name, program in programs.items()}
    claims = {"build": (1 / 4, _EQX), "run time": (1 / 4, _EQX)}
    if len(x) > 1:  # the products alone take more than a quarter of the run time
        claims = {"build": (1 / 1.5, _EQX), "run time": (1.3, _PRODUCTS)}
    targets = [
        at_most(claims[what][0], what, found, name, claims[what][1])
        for what, found in (("build", builds), ("run time", times))
        for name in (_TP, _NESTED)
    ]
    targets.append(at_most(1.1, "run time", times, _TP, _RAVEL))
    shapes = [array.shape for array in jax.tree.leaves(functions[_EQX][1][0])]
    size = sum(map(math.prod, shapes))
    title = f"{len(shapes)} leaves, {size} parameters, {len(x)} example{'s' * (len(x) > 1)}"
    return Table(title, ["", *programs], rows(programs.values(), times.values()), targets)


def _loss(mlp: eqx.nn.MLP, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(mlp)(x) if len(x) > 1 else mlp(x[0])) ** 2)


def _hessians(mlp: eqx.nn.MLP, x: jax.Array) -> dict[str, Function]:
    params, static = eqx.partition(mlp, eqx.is_inexact_array)
    vector, restructure = tp.ravel(mlp)
    unravel = ravel_pytree(params)[1]
    identity = jax.vmap(unravel)(jnp.eye(len(vector)))

    def of_tree(params: Any, x: jax.Array) -> jax.Array:
        return _loss(eqx.combine(params, static), x)

    def products(params: Any, x: jax.Array, identity: Any) -> Any:
        gradient = jax.grad(of_tree)
        return jax.vmap(lambda row: jax.jvp(lambda params: gradient(params, x), (params,), (row,))[1])(identity)

    return {
        _EQX: (lambda params, x: eqx.filter_hessian(of_tree)(params, x), (params, x)),
        _TP: (jax.hessian(lambda vector, x, restructure: _loss(restructure(vector), x)), (vector, x, restructure)),
        _NESTED: (lambda vector, x: nested.hessian(_loss)(restructure(vector), x), (vector, x)),
        _RAVEL: (jax.hessian(lambda vector, x: of_tree(unravel(vector), x)), (vector, x)),
        _PRODUCTS: (products, (params, x, identity)),
    }
