"""Slots to vectors and back: checks, casts, and `cut` and `join` for each of the vectors of a layout."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._cut import add_joined, cut, join
from ._layout import Layout
from ._mesh import laid_as, replicated, split
from ._pack import Vector, is_complex
from ._structure import describe


def as_vectors(layout: Layout, given: Any) -> tuple[Any, ...]:
    """The vectors of a layout, one or several, as a tuple.

    Raises:
        ValueError: another number of vectors, length or rank.
        TypeError: an integer vector, a complex one where no slot is complex, no array, or no tuple.
    """
    vectors = layout.vectors
    if layout.packing.is_single:
        _check(layout, vectors[0], given, "a vector")
        return (given,)
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"expected a tuple of {len(vectors)} vectors for {layout!r}, got {describe(given)}")
    if len(given) != len(vectors):
        raise ValueError(f"expected a tuple of {len(vectors)} vectors for {layout!r}, got one of {len(given)}")
    for number, (vector, each) in enumerate(zip(vectors, given, strict=True)):
        _check(layout, vector, each, f"as number {number} a vector")
    return tuple(given)


def as_given(layout: Layout, vectors: Sequence[Any]) -> Any:
    """The vectors in the form in which users have them: one, or a tuple."""
    return vectors[0] if layout.packing.is_single else tuple(vectors)


# Each is compiled as one program where it is called outside of a trace: a call per leaf would take 20 times as long.
# Inside of one, inlining leaves no trace of that.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def leaves_of(layout: Layout, vectors: tuple[Any, ...]) -> list[jax.Array]:
    """One array per slot, in the slot's shape and dtype."""
    pieces = pieces_of(layout, vectors)
    return [_cast(piece, slot.dtype) for piece, slot in zip(pieces, layout.slots, strict=True)]


def pieces_of(layout: Layout, vectors: tuple[Any, ...]) -> list[jax.Array]:
    """One array per slot, in the slot's shape and the vector's dtype."""
    pieces: list[Any] = [None] * len(layout.slots)
    for vector, array in zip(layout.vectors, vectors, strict=True):
        for i, piece in zip(vector.slots, cut(replicated(jnp.asarray(array)), vector.shapes), strict=True):
            pieces[i] = piece
    return pieces


def _vectors_of(layout: Layout, arrays: Sequence[Any]) -> tuple[jax.Array, ...]:
    return tuple(_joined(vector, [arrays[i] for i in vector.slots]) for vector in layout.vectors)


vectors_of = functools.partial(jax.jit, static_argnums=0, inline=True)(_vectors_of)
"""The vectors of one array per slot."""


def vectors_into(layout: Layout, arrays: Sequence[Any], buffers: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """The same in the memory of other vectors, which are gone after, and split over devices as they are."""
    return _writer(tuple(map(split, buffers)))(layout, arrays, buffers)


@functools.cache
def _writer(shardings: tuple[Any, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    def write(layout: Layout, arrays: Sequence[Any], buffers: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        return tuple(map(laid_as, _vectors_of(layout, arrays), buffers))

    # XLA reuses memory only where it knows beforehand that the result lies as what is donated.
    return jax.jit(write, static_argnums=0, donate_argnums=2, keep_unused=True, out_shardings=shardings)


def added(layout: Layout, vectors: Sequence[jax.Array], arrays: Sequence[Any], weight: float) -> tuple[jax.Array, ...]:
    """The vectors plus weighted arrays, one per slot."""
    return tuple(
        add_joined(sums, [_cast(arrays[i], sums.dtype) * weight for i in vector.slots], vector.shapes)
        if vector.slots
        else sums
        for sums, vector in zip(vectors, layout.vectors, strict=True)
    )


def _joined(vector: Vector, arrays: Sequence[Any]) -> jax.Array:
    if not arrays:
        return jnp.zeros(vector.length, vector.dtype)
    return join([_cast(replicated(jnp.asarray(array)), vector.dtype) for array in arrays], vector.shapes, vector.length)


def _cast(array: jax.Array, dtype: Any) -> jax.Array:
    if jnp.iscomplexobj(array) and not is_complex(dtype):
        array = array.real
    return jax.lax.convert_element_type(array, dtype)


def _check(layout: Layout, vector: Vector, given: Any, what: str) -> None:
    expected = f"expected {what} of shape ({vector.length},) and floating dtype"
    if not (hasattr(given, "shape") and hasattr(given, "dtype")):
        raise TypeError(f"{expected}, got {describe(given)}")
    if tuple(given.shape) != (vector.length,):
        stack = "; map over a stack of vectors with jax.vmap" if len(given.shape) > 1 else ""
        raise ValueError(f"{expected} for {layout!r}, got shape {tuple(given.shape)}{stack}")
    if not jnp.issubdtype(given.dtype, jnp.inexact):
        raise TypeError(f"{expected}, got {given.dtype}; convert it with vector.astype({vector.dtype})")
    if is_complex(given.dtype) and not any(is_complex(layout.slots[i].dtype) for i in vector.slots):
        raise TypeError(f"{expected}, got {given.dtype}, and no parameter is complex; take vector.real")
