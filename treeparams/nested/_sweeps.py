"""A function at many values, all or some at a time; linear functions along each direction."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from .._forms.mesh import first_axis_whole, zeros_typed
from .._tree.dtypes import is_complex
from .._tree.text import count_of, describe
from .._tree.types import PyTree


def mapped(f: Callable[[Any], PyTree], values: PyTree, chunk: int | None, noun: str) -> PyTree:
    """Returns `f` of each of the values, arrays with one leading axis; about `chunk` of them at once, stacked."""
    length = len(jax.tree.leaves(values)[0])
    size = length if chunk is None else count_of("chunk", chunk, noun)
    if length == 1:  # a batch of one costs up to five times as much: XLA multiplies batches of matrices in a loop
        first = jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, [0]), values)
        return jax.tree.map(lambda leaf: jax.lax.expand_dims(leaf, [0]), f(first))
    if size >= length:
        return jax.vmap(f)(values)
    # `jax.lax.map(..., batch_size=size)` does this too, but fails where a result has no elements, and copies it where
    # chunks do not come out even (here the last ones overlap), or for another order of axes.
    count = -(-length // size)
    size = -(-length // count)
    values = jax.tree.map(lambda leaf: first_axis_whole(jnp.asarray(leaf)), values)

    def piece(start: jax.Array) -> PyTree:
        return jax.vmap(f)(jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), values))

    def put(done: PyTree, start: Any) -> tuple[PyTree, None]:
        update = lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, start, 0)
        return jax.tree.map(update, done, piece(start)), None

    starts = np.minimum(np.arange(count) * size, length - size).astype(np.int32)
    program, shapes = jax.make_jaxpr(piece, return_shape=True)(starts[0])
    avals: list[Any] = program.out_avals  # abstract values do not declare their shapes to type checkers
    empty = [zeros_typed((length, *aval.shape[1:]), aval) for aval in avals]
    return jax.lax.scan(put, jax.tree.unflatten(jax.tree.structure(shapes), empty), starts)[0]


def in_sweeps(f: Callable[[Any], jax.Array], x: jax.Array, chunk: int | None, batch: int = 0) -> jax.Array:
    """Returns the Jacobian of f at x in the fewer sweeps: forward, or backward.

    With `batch=1` it is that of each sample in itself, with the samples along the first axis: one direction then serves
    all of them at once.
    """
    # f is called only here: inside nested derivatives two calls at each level would be many. Forward it is not
    # linearised, since that keeps the results of each step of a loop.
    closed = jax.make_jaxpr(f)(x)
    aval: Any = closed.out_avals[0]
    inputs, outputs = x.shape[batch:], aval.shape[batch:]

    def of_x(x: jax.Array) -> jax.Array:
        return jnp.asarray(jaxpr_as_fun(closed)(x)[0])

    def sweeps(linear: Callable[[jax.Array], jax.Array], along: jax.Array) -> jax.Array:
        sample, everywhere = jnp.zeros(along.shape[batch:], along.dtype), jnp.zeros_like(along)
        spread = lambda direction: everywhere + jnp.expand_dims(direction, tuple(range(batch)))
        along_one, directions = lambda direction: linear(spread(direction)), basis(sample)
        # One row alone XLA copies to lay it out; but complex products in batches are loops, of one row too.
        if chunk is None and not is_complex(sample.dtype):
            return jax.vmap(along_one)(directions)
        return mapped(along_one, directions, chunk, "sweeps")

    if math.prod(inputs) <= math.prod(outputs):
        columns = sweeps(lambda direction: jax.jvp(of_x, (x,), (direction,))[1], x)
        return jnp.moveaxis(columns, 0, -1).reshape(*x.shape[:batch], *outputs, *inputs)
    y, pull = jax.vjp(of_x, x)
    rows = sweeps(lambda direction: pull(direction)[0], y)
    return jnp.moveaxis(rows, 0, batch).reshape(*y.shape, *inputs)


def basis(like: jax.Array) -> jax.Array:
    """Returns one array like the given one for each of its entries, with a one there."""
    unit = jnp.eye(like.size, dtype=like.dtype).reshape(like.size, *like.shape)
    return unit + jnp.zeros_like(like)[None]  # within `jax.shard_map` it varies over the devices as the given one does


def length_of(batch: PyTree) -> int:
    """Returns how many samples there are in a tree of arrays with one leading axis in common."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(f"expected a batch of arrays with one leading axis in common, got shapes {shapes}")
    return shapes[0][0]


def real_array(x: object) -> jax.Array:
    """Returns an input as an array, if it is a real floating one."""
    if not hasattr(x, "dtype") and not isinstance(x, float):
        raise TypeError(f"expected an array for x, got {type(x).__name__}; for trees use nested.gradient")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected x to be real and floating, got {x.dtype}")
    return x


def output(y: Any, kind: str = "real floating") -> jax.Array:
    """Returns the output of f as an array, if it is one of `kind`: this, or "floating or complex"."""
    allowed = jnp.floating if kind == "real floating" else jnp.inexact
    if not isinstance(y, float) and not (hasattr(y, "dtype") and jnp.issubdtype(y.dtype, allowed)):
        raise TypeError(f"expected f to return a {kind} array, got {describe(y)}")
    return jnp.asarray(y)
