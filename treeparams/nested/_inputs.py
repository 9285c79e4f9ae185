"""Derivatives of a model's output in its input, for losses that contain them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array

from .._forms.mesh import first_axis_whole, vary, varying
from .._tree.recognise import structure_of
from .._tree.text import count_of, describe
from .._tree.types import PyTree


def gradient(f: Callable[..., Array]) -> Callable[..., PyTree]:
    """The gradient of `f(model, x, *args)` in x, to stand in a loss.

    The gradient of that loss reaches all parameters of the model, arrays that f captured, x and the other arguments.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> energy = lambda model, x: model["k"] * jnp.sum(x**2)
    >>> force = nested.gradient(energy)
    >>> model, x = {"k": jnp.array(2.0), "frozen": jnp.ones(1)}, jnp.array([1.0, 3.0])
    >>> force(model, x)
    Array([ 4., 12.], dtype=float32)
    >>> loss = lambda model: jnp.sum(force(model, x) ** 2)  # 4 k^2 x^2
    >>> tp.grad(loss, "k")(model)["k"]
    Array(160., dtype=float32, weak_type=True)

    It is `jax.grad` in x, so the gradient of the loss goes in reverse over reverse; the cost of other orders is in
    the documentation, under "A derivative in a loss". The model may be a bound method of a Module or a
    `jax.tree_util.Partial`, which carry their parameters:
    `nested.gradient(lambda energy, x: energy(x))(net.energy, x)`. For one point; `jax.vmap(force, (None, 0))` takes
    many, or `batched_gradient` where f is only at hand for a batch.

    Args:
        f: called as `f(model, x, *args)`, once, returns a scalar.

    Returns:
        A function of `(model, x, *args)` that returns the gradient, a tree like x.

    Raises:
        TypeError: when called: x has a leaf that is not floating; f returns no real floating scalar.
    """

    def of(model: PyTree, x: PyTree, *args: object) -> PyTree:
        for i, leaf in enumerate(jax.tree.leaves(x)):
            if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact):
                path = structure_of(x)[2].paths[i]
                got = describe(leaf) + (f" at {path!r}" if path else "")
                raise TypeError(f"expected x to be floating, got {got}; convert it, or pass it in *args")

        def scalar(x: PyTree) -> Any:
            y = f(model, x, *args)
            is_real_array = hasattr(y, "dtype") and jnp.issubdtype(y.dtype, jnp.floating)
            if isinstance(y, float) or (is_real_array and y.shape == ()):
                return y
            instead = "use nested.jacobian" if is_real_array else "it has no gradient"
            raise TypeError(f"expected f to return a real floating scalar, got {describe(y)}; {instead}")

        return jax.grad(scalar)(jax.tree.map(jnp.asarray, x))

    return of


def jacobian(f: Callable[..., Array], *, chunk: int | None = None) -> Callable[..., Array]:
    """The Jacobian of `f(model, x, *args)` in x, to stand in a loss.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> f = lambda model, x: model["w"] @ x**2
    >>> model, x = {"w": jnp.array([[1.0, 2.0], [0.0, 1.0]])}, jnp.array([1.0, 3.0])
    >>> nested.jacobian(f)(model, x)
    Array([[ 2., 12.],
           [ 0.,  6.]], dtype=float32)
    >>> tp.grad(lambda model: jnp.trace(nested.jacobian(f)(model, x)))(model)["w"]
    Array([[2., 0.],
           [0., 6.]], dtype=float32)

    By columns, a sweep forward for each entry of x, where x has no more entries than the output; otherwise by rows, a
    sweep backward for each entry of the output.

    Args:
        f: called as `f(model, x, *args)` with an array x, once, returns an array.
        chunk: how many sweeps are done at once, which bounds the memory; `None`: all.

    Returns:
        A function of `(model, x, *args)` that returns the Jacobian, shape `(*out, *in)`.

    Raises:
        ValueError: `chunk` is no count.
        TypeError: when called: x or the output is no real floating array.
    """
    if chunk is not None:
        count_of("chunk", chunk, "sweeps")

    def of(model: PyTree, x: object, *args: object) -> jax.Array:
        x = real_array(x)
        # f is called here alone: within nested derivatives two calls at each level would be many.
        closed, out = jax.make_jaxpr(lambda x: f(model, x, *args), return_shape=True)(x)
        check_output(out)
        shape = closed.out_avals[0].shape

        def of_x(x: jax.Array) -> jax.Array:
            return jnp.asarray(jaxpr_as_fun(closed)(x)[0])

        if x.size <= math.prod(shape):
            columns = mapped(lambda column: jax.jvp(of_x, (x,), (column,))[1], basis(x), chunk, "sweeps")
            return jnp.moveaxis(columns, 0, -1).reshape(*shape, *x.shape)
        y, pull = jax.vjp(of_x, x)
        return mapped(lambda row: pull(row)[0], basis(y), chunk, "sweeps").reshape(*shape, *x.shape)

    return of


def mapped(f: Callable[[Any], PyTree], values: PyTree, chunk: int | None, noun: str) -> PyTree:
    """`f` of each of the values, a tree of arrays with one leading axis; about `chunk` of them at once, stacked."""
    length = len(jax.tree.leaves(values)[0])
    size = length if chunk is None else count_of("chunk", chunk, noun)
    if size >= length:
        return jax.vmap(f)(values)
    # `jax.lax.map(..., batch_size=size)` does this too, but fails where a result has no elements, and copies it where
    # chunks do not come out even (here the last ones overlap), or for another order of axes.
    count = -(-length // size)
    size = -(-length // count)
    values = jax.tree.map(lambda leaf: first_axis_whole(jnp.asarray(leaf)), values)

    def piece(start: jax.Array) -> PyTree:
        return jax.vmap(f)(jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), values))

    starts = np.minimum(np.arange(count) * size, length - size).astype(np.int32)
    program, shapes = jax.make_jaxpr(piece, return_shape=True)(starts[0])

    def empty(shape: jax.ShapeDtypeStruct, aval: Any) -> jax.Array:
        return vary(jnp.zeros((length, *shape.shape[1:]), shape.dtype), varying(aval))

    def put(done: PyTree, start: Any) -> tuple[PyTree, None]:
        update = lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, start, 0)
        return jax.tree.map(update, done, piece(start)), None

    leaves, treedef = jax.tree.flatten(shapes)
    return jax.lax.scan(put, treedef.unflatten(map(empty, leaves, program.out_avals)), starts)[0]


def length_of(batch: PyTree) -> int:
    """How many samples there are in a tree of arrays with one leading axis in common."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(f"expected a batch of arrays with one leading axis in common, got shapes {shapes}")
    return shapes[0][0]


def basis(like: jax.Array) -> jax.Array:
    """One array like the given one for each of its entries, with a one there."""
    unit = jnp.eye(like.size, dtype=like.dtype).reshape(like.size, *like.shape)
    return unit + jnp.zeros_like(like)[None]  # within `jax.shard_map` it varies over the devices as the given one does


def real_array(x: object) -> jax.Array:
    """An input as an array, if it is a real floating one."""
    if not hasattr(x, "dtype") and not isinstance(x, float):
        raise TypeError(f"expected an array for x, got {type(x).__name__}; for trees there is nested.gradient")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected x to be real and floating, got {x.dtype}")
    return x


def check_output(y: Any, kind: str = "real floating") -> None:
    """Refuses an output, or its shape and dtype, that is no array of `kind`: this, or "floating or complex"."""
    allowed = jnp.floating if kind == "real floating" else jnp.inexact
    if not hasattr(y, "dtype") or not jnp.issubdtype(y.dtype, allowed):
        raise TypeError(f"expected f to return a {kind} array, got {describe(y)}")
