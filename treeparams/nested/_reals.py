"""A function of a model as one of its trained parameters, all of them real; tangents; sweeps along all directions.

A complex parameter is differentiated as the pair of its real and imaginary part: only so are Hessians symmetric, and
Jacobians matrices if f is not holomorphic. Tangents and products are complex again, `re + i im` of the pair.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType
from jaxtyping import Array, Float

from .._forms.block import Block
from .._forms.form import Form
from .._forms.mesh import lay, replicated, vary, varying
from .._slots.layout import Layout, Trainable, index_of
from .._slots.parts import Parts, Rest, take_apart
from .._tree.structure import is_array
from .._tree.text import count_of, describe
from .._tree.types import PyTree, common_dtype, is_complex


class _ComplexPair(NamedTuple):
    """The real and the imaginary part of a complex array, which replace it in a tree."""

    real: Any
    imag: Any


Reals = tuple[jax.Array | _ComplexPair, ...]
"""One value for each slot, complex ones as pairs."""


def in_reals(tree: PyTree) -> PyTree:
    """Returns a tree of arrays with complex ones as pairs."""
    return jax.tree.map(lambda leaf: _ComplexPair(leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else leaf, tree)


def from_reals(tree: PyTree) -> PyTree:
    """Returns a tree of arrays with pairs as complex ones."""
    is_pair = lambda node: isinstance(node, _ComplexPair)
    return jax.tree.map(lambda node: jax.lax.complex(*node) if is_pair(node) else node, tree, is_leaf=is_pair)


def form_of_reals(layout: Layout) -> Form:
    """Returns the form of one real vector: a complex slot contributes all its real parts, then all imaginary ones."""
    index = index_of(layout)
    if not index.complex_slots:
        return Form.vector(layout)
    if "reals" not in index.forms:
        each = [slot for slot in layout.slots for _ in range(2 if is_complex(slot.dtype) else 1)]
        reals = [jax.ShapeDtypeStruct(slot.shape, jnp.finfo(slot.dtype).dtype) for slot in each]
        make = functools.partial(Block.vector, dtype=common_dtype(real.dtype for real in reals if real.size))
        index.forms["reals"] = Form.of(list(range(len(reals))), reals, layout.paths, "a vector", make)
    return index.forms["reals"]


def array_parts(model: PyTree, trainable: Trainable) -> Parts:
    """Takes the model apart, with JAX arrays in its slots."""
    parts = take_apart(model, trainable)
    return Parts(tuple(map(jnp.asarray, parts.slots)), parts.rest)


def result(f: Callable[..., Any], given: str, model: PyTree, *args: PyTree) -> Any:
    """Returns `f(model, *args)`, of which an error also says what f is given."""
    if not callable(f):
        raise TypeError(f"expected a function of the model, got {describe(f)}; write nested.hessian(loss)(model, x)")
    try:
        return f(model, *args)
    except (TypeError, ValueError) as error:
        error.add_note(f"f gets {given}; its arguments have shapes {list(map(jnp.shape, jax.tree.leaves(args)))}")
        raise


def scalar(value: Any) -> Any:
    """Returns the result of a loss, if it is one number."""
    if getattr(value, "shape", ()) != ():
        raise TypeError(f"expected f to return a scalar, got {describe(value)}; write jnp.mean(...) of it")
    return value


def of_reals(f: Callable[..., Any], parts: Parts, *args: object, given: str = "all you pass") -> Callable[[Any], Any]:
    """Returns `f(model, *args)` as a function of the slots in reals."""
    return lambda reals: result(f, given, parts.model(from_reals(reals)), *args)


# -- Tangents ----------------------------------------------------------------------------------------------------------


def _from_vector(layout: Layout, vector: jax.Array | np.ndarray) -> Reals:
    """Returns one value per slot in reals of a real vector."""
    if index_of(layout).complex_slots and jnp.iscomplexobj(vector):
        raise TypeError(
            "expected a real vector, with complex parameters as pairs of reals (nested.real_vector), "
            f"got {vector.dtype}"
        )
    cut = iter(form_of_reals(layout).cut(vector))
    return tuple(_ComplexPair(next(cut), next(cut)) if is_complex(slot.dtype) else next(cut) for slot in layout.slots)


def taken(layout: Layout, tangent: PyTree) -> Reals:
    """Returns a tangent (vector, real vector or tree) as one value per slot in reals; missing entries are zero.

    A tangent is a value of the parameters, so at a tie the slot's own entry counts, not a sum of several.
    """
    index, shape = index_of(layout), getattr(tangent, "shape", None)
    if shape == (layout.size,):
        return in_reals(tuple(Form.vector(layout).cut(tangent)))
    length = form_of_reals(layout).blocks[0].size
    if shape == (length,):
        return _from_vector(layout, tangent)
    if is_array(tangent) and not jtu.treedef_is_leaf(index.structure.treedef):
        pairs = f" (or {length}, complex ones as pairs of reals)" if index.complex_slots else ""
        raise ValueError(
            f"expected a vector of {layout.size} elements{pairs}, one per trained parameter, or a tree of the model's "
            f"structure, got an array of shape {jnp.shape(tangent)}"
        )
    return in_reals(tuple(index.gradients(tangent, "zeros", tied="first")))


def real_vector(model: PyTree, trainable: Trainable = None) -> tuple[Float[Array, " n"], Callable[[Any], Any]]:
    """Returns the trained parameters as one real vector, complex ones as pairs of reals, and the way back.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0 + 2.0j, 3.0 + 4.0j]), "b": jnp.ones(1)}
    >>> vector, restructure = nested.real_vector(model)
    >>> print(vector)
    [1. 1. 3. 2. 4.]
    >>> restructure(2 * vector)["w"]
    Array([2.+4.j, 6.+8.j], dtype=complex64)

    The columns of `parameter_jacobian` are counted by this vector. If no parameter is complex, it equals the one of
    `tp.ravel`, whose `restructure` has names too. The positions in a layout (`layout.slice`, `layout.indices`) are
    those of `tp.ravel`, so they do not fit this vector if parameters are complex.

    Args:
        model: any pytree.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        The vector, shape `(n,)`: slots in order, ties once, for a complex slot all real parts and then all imaginary
        ones; and a function from such a vector to the model, a pytree that you may pass through `jax.jit`.

    Raises:
        ValueError: as `tp.layout`.
        TypeError: as `tp.layout`.
    """
    parts = array_parts(model, trainable)
    vector = form_of_reals(parts.layout).join(jax.tree.leaves(in_reals(parts.slots)))
    return vector, jtu.Partial(_restructured, parts.rest)


def _restructured(rest: Rest[Any], vector: jax.Array | np.ndarray) -> Any:
    return rest.model(from_reals(_from_vector(rest.layout, vector)))


# -- A function at many values, all or some at a time; linear functions along each direction ---------------------------


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
    values = jax.tree.map(lambda leaf: replicated(jnp.asarray(leaf), 1), values)

    def piece(start: jax.Array) -> PyTree:
        return jax.vmap(f)(jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), values))

    def put(done: PyTree, start: Any) -> tuple[PyTree, None]:
        update = lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, start, 0)
        return jax.tree.map(update, done, piece(start)), None

    starts = np.minimum(np.arange(count) * size, length - size).astype(np.int32)
    program, shapes = jax.make_jaxpr(piece, return_shape=True)(starts[0])
    avals: list[Any] = program.out_avals  # abstract values do not declare their shapes to type checkers
    empty = [_zeros_typed((length, *aval.shape[1:]), aval) for aval in avals]
    return jax.lax.scan(put, jax.tree.unflatten(jax.tree.structure(shapes), empty), starts)[0]


def _zeros_typed(shape: tuple[int, ...], like: Any) -> jax.Array:
    """Returns zeros with the dtype of another array, placed on devices and varying over them as its type says."""
    zeros, sharding = vary(jnp.zeros(shape, like.dtype), varying(like)), getattr(like, "sharding", None)
    return lay(zeros, sharding) if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types else zeros


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


def output(y: Any, kind: str = "real floating") -> jax.Array:
    """Returns the output of f as an array, if it is one of `kind`: this, or "floating or complex"."""
    allowed = jnp.floating if kind == "real floating" else jnp.inexact
    if not isinstance(y, float) and not (hasattr(y, "dtype") and jnp.issubdtype(y.dtype, allowed)):
        raise TypeError(f"expected f to return a {kind} array, got {describe(y)}")
    return jnp.asarray(y)
