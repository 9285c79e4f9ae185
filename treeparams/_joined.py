"""The forms in which trained parameters rest beside the tree: one vector, or stacks. Each is a tree of joined arrays.

A form is static, and of slots it knows shapes and dtypes alone, so that like models share programs. Compiled programs
keep their form alive, so it must not hold a layout, which keeps static functions and what they have captured.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from ._index import is_complex
from ._layout import Layout, index_of
from ._mesh import alike, first_axis_whole, replicated
from ._paths import nearest
from ._primitives import cut, join
from ._structure import is_inexact
from ._text import count_of, describe, quoted
from ._types import PyTree

_LONGEST = 2**31 - 1  # offsets in compiled programs are 32 bits wide


@dataclasses.dataclass(frozen=True)
class Joined:
    """Arrays that lie one after another in one: in a vector, or, all of one shape, as the rows of a stack."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]  # of each; none of frozen arrays, which are as they lie in it
    dtype: Any  # of the whole
    length: int  # of the first axis, with the padding
    rank: int = 0  # the number of axes of a row; in a vector none is kept

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return (self.length, *self.shapes[0][len(self.shapes[0]) - self.rank :]) if self.rank else (self.length,)

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where each array begins, and where the last one ends."""
        ends = itertools.accumulate(math.prod(shape[: len(shape) - self.rank]) for shape in self.shapes)
        return [0, *ends]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shapes, self.dtypes, self.dtype, self.length, self.rank))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # Hashes differ between processes.
        return Joined, (self.shapes, self.dtypes, self.dtype, self.length, self.rank)

    def join(self, arrays: Sequence[Any]) -> jax.Array:
        """The whole, of one array for each."""
        if not arrays:
            return jnp.zeros(self.length, self.dtype)
        arrays = [cast(array, self.dtype) for array in map(jnp.asarray, arrays)]
        arrays = alike(arrays) if self.rank else list(map(replicated, arrays))
        return join(arrays, self.shapes, self.length, self.rank)

    def between(self, whole: jax.Array, numbers: Sequence[int]) -> tuple[list[jax.Array], tuple[tuple[int, ...], ...]]:
        """Cuts out the arrays of these numbers, in ascending order, and what is before, between and after them.

        The arrays stand at every second place. The shapes of all pieces, with which they can be joined again, follow.

        They are cut at once: the transpose of many slices, each by itself, is as many padded additions.
        """
        starts = self.starts
        spans = [(starts[n], starts[n + 1] - starts[n], self.shapes[n]) for n in numbers]
        shapes = with_gaps(spans, whole.shape[1:], self.length)
        return cut(whole, shapes, self.rank), shapes


@dataclasses.dataclass(frozen=True)
class Form:
    """A vector (a tree of one leaf) or stacks (a dictionary of them, or of groups of them)."""

    treedef: Any
    blocks: tuple[Joined, ...]  # its leaves
    members: tuple[tuple[int, ...], ...]  # the slots in each
    paths: tuple[str, ...] = dataclasses.field(compare=False)  # of the slots, for messages

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.blocks, self.members))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return Form, (self.treedef, self.blocks, self.members, self.paths)

    @property
    def is_vector(self) -> bool:
        """Whether it is a vector."""
        return self.treedef == jtu.tree_structure(0)

    @property
    def dtype(self) -> Any:
        """The dtype of a vector; of stacks none, they keep those of the slots."""
        return self.blocks[0].dtype if self.is_vector else None

    @functools.cached_property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        """The keys of each leaf: none of a vector; the key of a stack, or its group and its key."""
        tree = jtu.tree_unflatten(self.treedef, self.blocks)
        paths = jtu.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, Joined))[0]
        return tuple(tuple(entry.key for entry in path) for path, _ in paths)

    @functools.cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """The block of each slot, and its number in it."""
        return {slot: (b, n) for b, slots in enumerate(self.members) for n, slot in enumerate(slots)}

    @functools.cached_property
    def slots(self) -> list[int]:
        """The slots in it: all of a layout, but of frozen arrays those of which there are several of a shape."""
        return sorted(self.places)

    def join(self, arrays: Sequence[Any]) -> PyTree:
        """The form of one array per slot."""
        if self.is_vector or len(arrays) <= _AT_ONCE or any(isinstance(array, Tracer) for array in arrays):
            return _join(self, arrays)
        of_each = [[arrays[slot] for slot in slots] for slots in self.members]
        return jtu.tree_unflatten(self.treedef, list(map(_join_rows, self.blocks, of_each)))

    def cut(self, tree: PyTree) -> list[jax.Array]:
        """One array per slot, in its shape and dtype."""
        return self.cut_leaves(self.leaves(tree))

    def cut_leaves(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """As `cut`, of the leaves alone, which are known to be right; one array for each of `slots`."""
        few = self.is_vector or len(self.slots) <= _AT_ONCE
        pieces = _cut if few or any(isinstance(leaf, Tracer) for leaf in leaves) else _cut_rows
        found: dict[int, jax.Array] = {}
        for slots, its in zip(self.members, pieces(self.blocks, leaves), strict=True):
            found |= zip(slots, its, strict=True)
        return [found[slot] for slot in self.slots]

    def leaves(self, tree: Any) -> list[Any]:
        """The leaves of a form that is given, checked."""
        if self.is_vector:
            self._check_vector(tree)
            return [tree]
        expected = "expected stacks as of tp.stack"
        entries = jtu.tree_flatten_with_path(tree)[0]
        if not isinstance(tree, Mapping) or any(not path for path, _ in entries):
            raise TypeError(f"{expected}, a dictionary, got {describe(tree)}")
        given = {tuple(getattr(key, "key", key) for key in path): leaf for path, leaf in entries}
        if any(not isinstance(key, str) for keys in given for key in keys) or any(len(keys) > 2 for keys in given):
            raise TypeError(f"{expected}, {{key: array}}, got another tree; stacks, restructure = tp.stack(model)")
        for keys in [keys for keys in given if keys not in self.keys]:
            known = nearest(str(keys[-1]), [each[-1] for each in self.keys])
            raise ValueError(f"{expected}, got one too many, {_quote(keys)}{known}")
        for keys, block, slots in zip(self.keys, self.blocks, self.members, strict=True):
            if keys not in given:
                raise ValueError(f"{self._row_words(keys, slots)}; there is no such stack")
            leaf = given[keys]
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise TypeError(f"{self._row_words(keys, slots)}; got {describe(leaf)}")
            if tuple(leaf.shape) != block.shape:
                is_stack = leaf.ndim > len(block.shape) and tuple(leaf.shape[-len(block.shape) :]) == block.shape
                hint = "; map over several of them with jax.vmap" if is_stack else ""
                got = f"of shape {block.shape} in all; got shape {tuple(leaf.shape)}{hint}"
                raise ValueError(f"{self._row_words(keys, slots)}, {got}")
            if not is_inexact(leaf.dtype) or (is_complex(leaf.dtype) and not is_complex(block.dtype)):
                got = f"in {block.dtype} or another floating dtype; got {leaf.dtype}"
                raise TypeError(f"{self._row_words(keys, slots)}, {got}")
        return [given[keys] for keys in self.keys]

    def _row_words(self, keys: Sequence[str], slots: Sequence[int]) -> str:
        return (
            f"expected stacks as of tp.stack, in {_quote(keys)} rows of {quoted([self.paths[slot] for slot in slots])}"
        )

    def _check_vector(self, given: Any) -> None:
        (block,) = self.blocks
        expected = f"expected a vector of shape ({block.length},) and floating dtype"
        if not (hasattr(given, "shape") and hasattr(given, "dtype")):
            raise TypeError(f"{expected}, got {describe(given)}")
        if tuple(given.shape) != (block.length,):
            stack = "; map over a stack of vectors with jax.vmap" if len(given.shape) > 1 else ""
            raise ValueError(f"{expected} for {len(self.paths)} slots, got shape {tuple(given.shape)}{stack}")
        if not is_inexact(given.dtype):
            raise TypeError(f"{expected}, got {given.dtype}; convert it with vector.astype({block.dtype})")
        if is_complex(given.dtype) and not any(map(is_complex, block.dtypes)):
            raise TypeError(f"{expected}, got {given.dtype}, and no parameter is complex; take vector.real")


# Compiled as one program where it is called outside of a trace: a call per leaf would take 20 times as long. Inside of
# one, inlining leaves no trace of that.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _join(form: Form, arrays: Sequence[Any]) -> PyTree:
    of_each = [[arrays[slot] for slot in slots] for slots in form.members]
    return jtu.tree_unflatten(form.treedef, list(map(Joined.join, form.blocks, of_each)))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _cut(blocks: tuple[Joined, ...], leaves: Sequence[Any]) -> list[list[jax.Array]]:
    found = []
    for block, leaf in zip(blocks, leaves, strict=True):
        pieces = cut(whole(block, leaf), block.shapes, block.rank)
        found.append(list(map(cast, pieces, block.dtypes)) if block.dtypes else pieces)
    return found


# Outside of a trace, many rows are joined and cut some at a time. A program with a thousand operands takes seconds to
# compile, and is needed once; one for 64 rows serves all. Not so large rows, which would be held twice meanwhile.
_AT_ONCE = 64
_LARGE = 2**20  # bytes


def _join_rows(block: Joined, rows: Sequence[Any]) -> jax.Array:
    if math.prod(block.shapes[0]) * jnp.dtype(block.dtype).itemsize > _LARGE:
        return _join_block(block, rows)
    parts = [rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE)]
    stacks = [_join_block(_rows_of(block, len(part)), part) for part in parts]
    shapes = tuple(stack.shape for stack in stacks)
    return stacks[0] if len(stacks) == 1 else _join_block(dataclasses.replace(block, shapes=shapes), stacks)


def _cut_rows(blocks: tuple[Joined, ...], leaves: Sequence[Any]) -> list[list[jax.Array]]:
    found = []
    for block, leaf in zip(blocks, map(whole, blocks, leaves), strict=True):
        counts = [min(_AT_ONCE, block.length - start) for start in range(0, block.length, _AT_ONCE)]
        parts = [_some(leaf, np.uint32(i * _AT_ONCE), count) for i, count in enumerate(counts)]
        found.append([
            row for n, part in zip(counts, parts, strict=True) for row in _cut((_rows_of(block, n),), [part])[0]
        ])
    return found


_join_block = jax.jit(Joined.join, static_argnums=0)
_some = jax.jit(lambda leaf, start, count: jax.lax.dynamic_slice_in_dim(leaf, start, count), static_argnums=2)


@functools.lru_cache
def _rows_of(block: Joined, count: int) -> Joined:
    return dataclasses.replace(block, shapes=block.shapes[:count], dtypes=block.dtypes[:count], length=count)


def with_gaps(
    spans: Sequence[tuple[int, int, tuple[int, ...]]], row: tuple[int, ...], length: int
) -> tuple[tuple[int, ...], ...]:
    """The shapes of pieces at `(start, size, shape)` along an axis, ascending, with those of what is around them."""
    shapes, at = [], 0
    for start, size, shape in spans:
        shapes += [(start - at, *row), shape]
        at = start + size
    return (*shapes, (length - at, *row))


def whole(block: Joined, leaf: Any) -> jax.Array:
    """A leaf as it can be cut: over several devices its rows are first brought together on each, or all of a vector."""
    return first_axis_whole(jnp.asarray(leaf)) if block.rank else replicated(jnp.asarray(leaf))


def cast(array: jax.Array, dtype: Any) -> jax.Array:
    """The array in a dtype; of a complex one the real part, where that is real."""
    if jnp.iscomplexobj(array) and not is_complex(dtype):
        array = array.real
    return jax.lax.convert_element_type(array, dtype)


def _quote(keys: Sequence[Any]) -> str:
    return " of group ".join(map(repr, reversed(keys)))


# -- The vector --------------------------------------------------------------------------------------------------------


def vector_of(layout: Layout, dtype: Any = None, pad_to: SupportsIndex = 1) -> Form:
    """The vector of the slots of a layout."""
    dtype = layout.dtype if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    pad_to = pad_to if type(pad_to) is int and pad_to > 0 else count_of("pad_to", pad_to, "elements")
    forms = index_of(layout).forms
    if (dtype, pad_to) not in forms:
        forms[dtype, pad_to] = _vector_of(layout, dtype, pad_to)
    return forms[dtype, pad_to]


def _vector_of(layout: Layout, dtype: Any, pad_to: int) -> Form:
    slots, length = layout.slots, -(-layout.size // pad_to) * pad_to
    if length > _LONGEST:
        raise ValueError(
            f"a vector of {length:,} elements is longer than the {_LONGEST:,} that compiled programs can address; take "
            "stacks, tp.stack(model), one array for each shape"
        )
    if not is_inexact(dtype):
        raise TypeError(f"the dtype of the vector must be floating or complex, got {dtype}")
    complex_slots = [slot for slot in slots if is_complex(slot.dtype)]
    if not is_complex(dtype) and any(slot.size for slot in complex_slots):
        slot = next(slot for slot in complex_slots if slot.size)
        raise TypeError(f"{slot.path!r} is {slot.dtype}, which a vector of {dtype} cannot hold")
    if is_complex(dtype) and not complex_slots:
        raise TypeError(f"no parameter is complex, so the vector cannot be {dtype}")
    block = Joined(tuple([slot.shape for slot in slots]), tuple([slot.dtype for slot in slots]), dtype, length)
    return Form(jtu.tree_structure(0), (block,), (tuple(range(len(slots))),), layout.paths)
