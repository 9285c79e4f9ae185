"""One array of a form, and the places of slots in it: in sequence in a vector, as rows of a stack, or one array alone.

A block is static. It records only shapes and dtypes of slots, so that similar models share programs.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from .._tree.dtypes import is_complex, widened
from .mesh import alike, first_axis_whole, replicated
from .primitives import Shapes, cut, join


@dataclasses.dataclass(frozen=True)
class Block:
    """Arrays stored in sequence in one array; without a `length` it is a single array, unchanged.

    A vector and a stack differ only in `rank`. The arrays follow one another along the first axis. In a vector each
    array is flat. In a stack each array keeps its last `rank` axes, and fills one or more rows along the first axis:
    one row, if all its axes are kept.
    """

    shapes: Shapes
    dtypes: tuple[Any, ...]  # of each; none of frozen arrays, which are as they lie in it
    dtype: Any  # of the whole
    length: int | None  # of the first axis, with the padding
    rank: int = 0  # the number of axes of a row; in a vector none is kept

    @classmethod
    def single(cls, shape: tuple[int, ...], dtype: DTypeLike) -> "Block":
        """Returns a block of one array, unchanged."""
        return cls((tuple(shape),), (dtype,), dtype, None, len(shape))

    @classmethod
    def vector(
        cls, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], dtype: DTypeLike, length: int | None = None
    ) -> "Block":
        """Returns a block of arrays of any shapes, each flat; zeros fill it up to the length."""
        flat = sum(map(math.prod, shapes))
        return cls(tuple(map(tuple, shapes)), tuple(dtypes), dtype, flat if length is None else length)

    @classmethod
    def rows(cls, shape: tuple[int, ...], dtype: DTypeLike, count: int) -> "Block":
        """Returns a block of `count` arrays of one shape."""
        return cls((tuple(shape),) * count, (dtype,) * count, dtype, count, len(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        if self.length is None:
            return self.shapes[0]
        return (self.length, *self.shapes[0][len(self.shapes[0]) - self.rank :]) if self.rank else (self.length,)

    @property
    def size(self) -> int:
        """The number of elements, with the padding."""
        return math.prod(self.shape)

    @functools.cached_property
    def has_rows(self) -> bool:
        """Whether each array is one row."""
        return self.length is not None and len(set(self.shapes)) == 1 and len(self.shapes[0]) == self.rank

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where each array begins along the first axis, and where the last one ends."""
        ends = itertools.accumulate(math.prod(shape[: len(shape) - self.rank]) for shape in self.shapes)
        return [0, *ends]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shapes, self.dtypes, self.dtype, self.length, self.rank))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # Without the cached hash: hashes differ between processes.
        return Block, (self.shapes, self.dtypes, self.dtype, self.length, self.rank)

    def join(self, arrays: Sequence[Any]) -> Any:
        """Joins the arrays into the whole array."""
        if self.length is None:
            return arrays[0]
        if not arrays:
            return jnp.zeros(self.length, self.dtype)
        arrays = [cast(array, self.dtype) for array in map(jnp.asarray, arrays)]
        arrays = alike(arrays) if self.rank else list(map(replicated, arrays))
        return join(arrays, self.shapes, self.length, self.rank)

    def spread(self, numbers: Sequence[Any]) -> Any:
        """Spreads one real number per array, in at least single precision, over an array that broadcasts.

        Padding gets 1. Equal numbers must be the same object, so that neighbouring arrays share a piece.
        """
        dtype = widened(jnp.finfo(self.dtype).dtype)
        if self.length is None:
            return _real(numbers[0], dtype)
        ends = [*self.starts, self.length]
        spans = [span for span in zip([*numbers, 1.0], ends, ends[1:], strict=False) if span[1] < span[2]]
        runs = [[*run] for _, run in itertools.groupby(spans, key=lambda span: id(span[0]))]
        if len(runs) < 2:
            return _real(spans[0][0] if spans else 1.0, dtype)
        # Broadcasts that are joined anew in each step: a program has no constant as long as the vector, nor as many
        # indices, which it would have if the numbers were gathered.
        pieces = [jnp.broadcast_to(_real(run[0][0], dtype), (run[-1][2] - run[0][1],)) for run in runs]
        return jnp.concatenate(pieces).reshape(-1, *[1] * self.rank)

    def cut(self, whole: ArrayLike) -> list[Any]:
        """Cuts the whole array into the arrays, each in its dtype."""
        pieces = self.pieces(whole)
        return list(map(cast, pieces, self.dtypes)) if self.dtypes else pieces

    def pieces(self, whole: ArrayLike) -> list[Any]:
        """Cuts the whole array into the arrays, in the dtype of the whole."""
        if self.length is None:
            return [jnp.asarray(whole)]
        return cut(self.gathered(whole), self.shapes, self.rank)

    def gathered(self, whole: ArrayLike) -> jax.Array:
        """Returns the whole array, ready to be cut: rows split over devices, or all of a vector, are gathered."""
        if self.length is None:
            return jnp.asarray(whole)
        return first_axis_whole(jnp.asarray(whole)) if self.rank else replicated(jnp.asarray(whole))

    def between(self, whole: jax.Array, numbers: Sequence[int]) -> tuple[list[jax.Array], Shapes]:
        """Cuts out the arrays with these numbers, in ascending order, and the gaps before, between and after them.

        The pieces are `[gap, array, gap, array, ..., gap]`: the arrays are `pieces[1::2]`. With their shapes, which are
        returned too, the pieces can be joined again.
        """
        # The gaps are cut too, though often nobody reads them: so it is one cut, whose transpose is one join. Slices of
        # the arrays alone would have as many padded additions for their transpose.
        starts = self.starts
        spans = [(starts[n], starts[n + 1] - starts[n], self.shapes[n]) for n in numbers]
        shapes = with_gaps(spans, whole.shape[1:], self.shape[0])
        return cut(whole, shapes, self.rank), shapes


def cast(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Casts an array to a dtype; a complex array loses its imaginary part if the dtype is real."""
    if jnp.iscomplexobj(array) and not is_complex(dtype):
        array = array.real
    return jax.lax.convert_element_type(array, dtype)


def _real(number: Any, dtype: DTypeLike) -> Any:
    """Returns a number as an array of a dtype, a NumPy array if its value is known."""
    return number.astype(dtype) if isinstance(number, jax.Array) else np.asarray(number, dtype)


def with_gaps(spans: Sequence[tuple[int, int, tuple[int, ...]]], row: tuple[int, ...], length: int) -> Shapes:
    """Returns the shapes of pieces at ascending `(start, size, shape)` along an axis, with the gaps around them."""
    shapes, at = [], 0
    for start, size, shape in spans:
        shapes += [(start - at, *row), shape]
        at = start + size
    return (*shapes, (length - at, *row))


# -- Outside of a trace ------------------------------------------------------------------------------------------------
# All blocks are joined, and cut, as one program: a call per leaf would take 20 times as long. But many rows are joined
# and cut some at a time. A program with a thousand operands takes seconds to compile, and is needed once; one for 64
# rows serves all. Not so large rows, which would be held twice meanwhile.

_AT_ONCE = 64
_LARGE = 2**20  # bytes


def join_blocks(blocks: Sequence[Block], arrays: Sequence[Sequence[Any]]) -> list[Any]:
    """Joins each block from one array for each of its slots."""
    joined = [i for i, block in enumerate(blocks) if block.length is not None]
    found = [own[0] if block.length is None else None for block, own in zip(blocks, arrays, strict=True)]
    some = tuple([blocks[i] for i in joined]), [arrays[i] for i in joined]
    made = list(map(_join_rows, *some)) if _is_some_at_a_time(*some) else _join(*some)
    for i, whole in zip(joined, made, strict=True):
        found[i] = whole
    return found


def cut_blocks(blocks: Sequence[Block], leaves: Sequence[Any]) -> list[list[Any]]:
    """Cuts each block into its arrays, each in its dtype; a single array that has its dtype already is not copied."""
    joined = [i for i, block in enumerate(blocks) if block.length is not None]
    found = [[_as_it_is(block, leaf)] for block, leaf in zip(blocks, leaves, strict=True)]
    if joined:
        some = tuple([blocks[i] for i in joined]), [leaves[i] for i in joined]
        is_some_at_a_time = _is_some_at_a_time(some[0], [[leaf] for leaf in some[1]])
        made = list(map(_cut_rows, *some)) if is_some_at_a_time else _cut(*some)
        for i, arrays in zip(joined, made, strict=True):
            found[i] = arrays
    return found


def _as_it_is(block: Block, leaf: ArrayLike) -> Any:
    # A single array is not copied, nor sent through a program, where it is right already: a canonical tree has nothing
    # but these. What belongs to a joined block is only a place holder here.
    is_right = isinstance(leaf, jax.Array) and leaf.dtype == block.dtype
    return leaf if is_right or block.length is not None else cast(jnp.asarray(leaf), block.dtype)


def _is_some_at_a_time(blocks: Sequence[Block], arrays: Sequence[Sequence[Any]]) -> bool:
    count = sum(len(block.shapes) for block in blocks)
    return (
        count > _AT_ONCE
        and any(block.has_rows for block in blocks)
        and not any(isinstance(each, Tracer) for own in arrays for each in own)
    )


# Inside of a trace, inlining leaves no trace of these.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _join(blocks: tuple[Block, ...], arrays: Sequence[Sequence[Any]]) -> list[Any]:
    return list(map(Block.join, blocks, arrays))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _cut(blocks: tuple[Block, ...], leaves: Sequence[Any]) -> list[list[jax.Array]]:
    return list(map(Block.cut, blocks, leaves))


def _join_rows(block: Block, rows: Sequence[Any]) -> jax.Array:
    is_large = math.prod(block.shapes[0]) * jnp.dtype(block.dtype).itemsize > _LARGE
    if is_large or not block.has_rows:
        return _join_block(block, rows)
    batches = [rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE)]
    stacks = [_join_block(_some_rows(block, len(batch)), batch) for batch in batches]
    # The small stacks are then joined in their turn: to a block each is an array of several rows.
    shapes = tuple(stack.shape for stack in stacks)
    return stacks[0] if len(stacks) == 1 else _join_block(dataclasses.replace(block, shapes=shapes), stacks)


def _cut_rows(block: Block, leaf: ArrayLike) -> list[jax.Array]:
    if not block.has_rows:
        return _cut((block,), [leaf])[0]
    leaf, found = block.gathered(leaf), []
    for start in range(0, len(block.shapes), _AT_ONCE):
        count = min(_AT_ONCE, len(block.shapes) - start)
        # The start is an operand, so that the slices for all starts are one program.
        rows = _slice(leaf, np.uint32(start), count)
        found += _cut((_some_rows(block, count),), [rows])[0]
    return found


_join_block = jax.jit(Block.join, static_argnums=0)
_slice = jax.jit(jax.lax.dynamic_slice_in_dim, static_argnums=2)


@functools.lru_cache
def _some_rows(block: Block, count: int) -> Block:
    return dataclasses.replace(block, shapes=block.shapes[:count], dtypes=block.dtypes[:count], length=count)
