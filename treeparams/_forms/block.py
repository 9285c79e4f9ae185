"""One array cut into many, and many joined into one: two linear maps, each the transpose of the other.

A vector is cut into arrays of any shapes. A stack is cut into its rows: the axis that is cut is then followed by `rank`
other axes, which stay as they are and keep their placement on a mesh.

XLA has no views: every leaf that is cut out of a vector is a slice with a separate kernel, and compiling thousands of
those makes a flat model slow to compile. Here the leaves of one shape share a kernel (see `_hidden`).

Both maps are JAX primitives, because only that keeps them fast under differentiation of any order: the transpose of K
slices would be K padded additions, and that of a concatenation K slices.

A `Block` records which slots are in one array of a form, and where: in sequence in a vector, as rows of a stack, or one
array alone. It is static. It records only shapes and dtypes of slots, so that similar models share programs.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.experimental import layout
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .._tree.types import is_complex, widened
from .mesh import is_sharded, laid_as, replicated, varying_alike

_Shapes = tuple[tuple[int, ...], ...]

# A shape that stands at fewer places than this is cut at constant offsets. For a net of 10 leaves the conditional below
# saves a third of the build and costs a tenth of the run time; from some 30 leaves on it saves up to nine tenths of the
# build. There a gradient takes as long as with constant offsets, and a derivative of higher order, which has a
# conditional for each cut, 1.0 to 1.1 times as long (`benchmarks/RESULTS.md`, `derivatives`).
_FEW = 16


def cut(array: jax.Array, shapes: _Shapes, rank: int = 0) -> list[jax.Array]:
    """Cuts the axis before the last `rank` ones into arrays of these shapes, from the front; the remainder is dropped.

    Each shape ends with those axes. Axes before the one that is cut are a batch, which each piece has too.
    """
    return _cut_p.bind(array, shapes=shapes, rank=rank) if shapes else []


def join(arrays: Sequence[jax.Array], shapes: _Shapes, length: int, rank: int = 0) -> jax.Array:
    """Joins pieces (at least one) into an array of this length, filled up with zeros: the transpose of `cut`."""
    return _join_p.bind(*varying_alike(arrays), shapes=shapes, length=length, rank=rank)


# -- How it is done ----------------------------------------------------------------------------------------------------


def _lengths(shapes: _Shapes, rank: int) -> list[int]:
    return [math.prod(shape[: len(shape) - rank]) for shape in shapes]


def _split_up(array: jax.Array, *, shapes: _Shapes, rank: int) -> list[jax.Array]:
    axis = array.ndim - 1 - rank
    lengths = _lengths(shapes, rank)
    pieces = jax.lax.split(array, [*lengths, array.shape[axis] - sum(lengths)], axis=axis)
    return [_as_piece(piece, axis, shape) for piece, shape in zip(pieces, shapes, strict=False)]


def _cut_on_tpu(array: jax.Array, *, shapes: _Shapes, rank: int) -> list[jax.Array]:
    # Where rows are shorter than a tile, XLA for TPU lays a stack out with its first axis innermost, so that a loop
    # over the rows reads all of the stack for each. One copy before the loop, with the rows outermost, is less by the
    # number of rows: for a step over 50 layers of 32x32, bytes moved went from 140 to 18 times the parameters.
    pieces = zip(_split_up(array, shapes=shapes, rank=rank), shapes, strict=True)
    outermost = lambda stack: layout.with_layout_constraint(stack, layout.Layout(tuple(range(stack.ndim))))
    return [outermost(piece) if rank and len(shape) == rank + 2 else piece for piece, shape in pieces]


def _cut_at_run_time(array: jax.Array, *, shapes: _Shapes, rank: int) -> list[jax.Array]:
    axis = array.ndim - 1 - rank
    lengths = _lengths(shapes, rank)
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(i)
    often = [same for same in alike.values() if len(same) >= _FEW]
    offsets = _hidden([[starts[i] for i in same] for same in often])
    hidden = dict(zip(itertools.chain(*often), offsets, strict=True))
    before, after = [np.uint32(0)] * axis, [np.uint32(0)] * rank
    pieces = []
    for i, (shape, length, start) in enumerate(zip(shapes, lengths, starts, strict=True)):
        if i in hidden:
            sizes = (*array.shape[:axis], length, *array.shape[axis + 1 :])
            piece = jax.lax.dynamic_slice(array, [*before, hidden[i], *after], sizes)
        else:
            piece = jax.lax.slice_in_dim(array, start, start + length, axis=axis)
        pieces.append(_as_piece(piece, axis, shape))
    return pieces


def _as_piece(piece: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    # Of an array that lies over several devices JAX knows where it lies after `squeeze`, and not after any reshape.
    if len(shape) == piece.ndim - axis - 1:
        return jax.lax.squeeze(piece, [axis])
    return jax.lax.reshape(piece, piece.shape[:axis] + shape)


def _hidden(offsets: Sequence[Sequence[int]]) -> list[jax.Array]:
    """Returns the offsets of the leaves of several shapes, one shape after another, so that XLA cannot fold them."""
    # XLA compiles a kernel once for all operations that are the same up to their operands. Slices differ in their
    # offsets, unless these are operands too: results of another operation that is neither folded into a constant nor
    # fused into the kernel. On CPU a conditional is such an operation, and behind the barrier it is not known which
    # branch is taken until all that would simplify it has run. A barrier around the offsets alone is not enough:
    # scalar constants are fused, small arrays of constants too.
    #
    # A conditional copies each of its results: with one for each of 200 leaves a `jvp` took 1.6 times as long. So an
    # offset is the sum of two numbers, added within the kernel: where a run of leaves begins, and how far into the run
    # a leaf lies. Layers repeat themselves, so K leaves of a shape need some 2 sqrt(K) different numbers.
    if not offsets:
        return []
    terms = np.concatenate(list(map(_terms, offsets)), axis=1)
    numbers = np.unique(terms).tolist()
    always = jax.lax.optimization_barrier(jnp.bool_(True))
    # Unsigned, or JAX would add code for negative offsets. The other branch, never taken, has a number of its own for
    # each too: XLA would make copies of one that comes several times.
    further_by = lambda one: lambda: [np.uint32(number + one) for number in numbers]
    known = jax.lax.cond(always, further_by(0), further_by(1))
    at = dict(zip(numbers, known, strict=True))
    return [at[start] + at[further] for start, further in terms.T.tolist()]


def _terms(offsets: Sequence[int]) -> np.ndarray:
    """Returns two rows with few different numbers, whose sums are the offsets."""
    leaves, root = np.asarray(offsets), math.sqrt(len(offsets))

    def in_runs(size: int) -> np.ndarray:
        starts = np.repeat(leaves[::size], size)[: len(leaves)]
        return np.stack([starts, leaves - starts])

    # Runs are alike if each is some whole layers, and a layer may have several leaves of the shape.
    sizes = [max(round(root / several), 1) * several for several in range(1, 9)]
    return min(map(in_runs, sizes), key=lambda terms: len(np.unique(terms)))


def _one_array(*arrays: jax.Array, shapes: _Shapes, length: int, rank: int) -> jax.Array:
    # Axes before those of the shapes are a batch, so the first of a shape's own is the one that is joined. A shape
    # without an axis beside the last `rank` is one row, and gets one.
    axis = arrays[0].ndim - len(shapes[0])
    pieces = []
    for array, shape, size in zip(arrays, shapes, _lengths(shapes, rank), strict=True):
        if len(shape) == rank:
            pieces.append(jax.lax.expand_dims(array, [axis]))
        else:
            pieces.append(jax.lax.reshape(array, (*array.shape[:axis], size, *array.shape[array.ndim - rank :])))
    like = pieces[0]
    missing = length - sum(piece.shape[axis] for piece in pieces)
    if missing:
        zeros = jnp.zeros((*like.shape[:axis], missing, *like.shape[axis + 1 :]), like.dtype)
        pieces.append(laid_as(zeros, like))
    return jax.lax.concatenate(pieces, axis)


# -- As primitives -----------------------------------------------------------------------------------------------------

_cut_p = jax.extend.core.Primitive("cut")
_cut_p.multiple_results = True
_cut_compiled = jax.jit(_cut_p.bind, static_argnames=("shapes", "rank"))

_join_p = jax.extend.core.Primitive("join")
_join_p.def_impl(jax.jit(_one_array, static_argnames=("shapes", "length", "rank")))


@_cut_p.def_impl
def _cut_now(array: jax.Array, *, shapes: _Shapes, rank: int) -> list[jax.Array]:
    # With `jax.disable_jit` the compiled one would come back here.
    is_eager = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    return (_split_up if is_eager else _cut_compiled)(array, shapes=shapes, rank=rank)


@_cut_p.def_abstract_eval
def _cut_types(array: Any, *, shapes: _Shapes, rank: int) -> list[Any]:
    return [_type_like(array, 1 + rank, shape, rank) for shape in shapes]


@_join_p.def_abstract_eval
def _join_type(*arrays: Any, shapes: _Shapes, length: int, rank: int) -> Any:
    aval = _type_like(arrays[0], len(shapes[0]), (length, *shapes[0][len(shapes[0]) - rank :]), rank)
    is_padded = length > sum(_lengths(shapes, rank))
    return aval.update(weak_type=not is_padded and all(array.weak_type for array in arrays))


def _type_like(aval: Any, replaced: int, shape: tuple[int, ...], rank: int) -> Any:
    # The type of an array with other axes before the last `rank` ones, whole on each device; all others lie as before.
    batch, spec = aval.ndim - replaced, aval.sharding.spec
    spec = PartitionSpec(*spec[:batch], *[None] * (len(shape) - rank), *spec[aval.ndim - rank :])
    sharding = NamedSharding(aval.sharding.mesh, spec)
    return aval.update(shape=aval.shape[:batch] + shape, sharding=sharding, weak_type=False)


# What JAX gives a rule may be NumPy's, too.
def _transpose_cut(cotangents: Sequence[Any], array: Any, *, shapes: _Shapes, rank: int) -> list[Any]:
    length = array.aval.shape[array.aval.ndim - 1 - rank]
    # Cotangents may all be weak; a gradient has the type of what it is for.
    strong = [jax.lax.convert_element_type(each, each.dtype) for each in map(ad.instantiate_zeros, cotangents)]
    return [join(strong, shapes, length, rank)]


def _transpose_join(cotangent: Any, *arrays: Any, shapes: _Shapes, length: int, rank: int) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(array.aval) if ad.is_undefined_primal(array) else None for array in arrays]
    pieces = cut(cotangent, shapes, rank)
    return [piece if ad.is_undefined_primal(array) else None for piece, array in zip(pieces, arrays, strict=True)]


def _batch_cut(arrays: Sequence[Any], axes: Sequence[Any], **how: Any) -> tuple[list[jax.Array], list[int]]:
    pieces = cut(jnp.moveaxis(arrays[0], axes[0], 0), **how)
    return pieces, [0] * len(pieces)


def _batch_join(arrays: Sequence[Any], axes: Sequence[Any], **how: Any) -> tuple[jax.Array, int]:
    # A batch axis comes before the one that is cut, and all pieces must have it. A piece that is the same for the whole
    # batch is repeated, and lies over the devices of a mesh as the others do.
    pairs = list(zip(arrays, axes, strict=True))
    mapped = [jnp.moveaxis(array, axis, 0) for array, axis in pairs if axis is not None]
    given, size = iter(mapped), mapped[0].shape[0]
    over = next((axis for each in mapped if (axis := jax.typeof(each).sharding.spec[0])), None)

    def repeated(array: Any) -> jax.Array:
        sharding = jax.typeof(array).sharding
        split = None if over is None else NamedSharding(sharding.mesh, PartitionSpec(over, *sharding.spec))
        return jax.lax.broadcast(array, (size,), out_sharding=split)

    return join([repeated(array) if axis is None else next(given) for array, axis in pairs], **how), 0


ad.deflinear2(_cut_p, _transpose_cut)
ad.deflinear2(_join_p, _transpose_join)
batching.primitive_batchers[_cut_p] = _batch_cut
batching.primitive_batchers[_join_p] = _batch_join
mlir.register_lowering(_cut_p, mlir.lower_fun(_split_up, multiple_results=True))
# Run-time offsets are for CPUs, where they were measured. On a GPU the conditional would wait for the host.
mlir.register_lowering(_cut_p, mlir.lower_fun(_cut_at_run_time, multiple_results=True), platform="cpu")
mlir.register_lowering(_cut_p, mlir.lower_fun(_cut_on_tpu, multiple_results=True), platform="tpu")
mlir.register_lowering(_join_p, mlir.lower_fun(_one_array, multiple_results=False))


class Strip(NamedTuple):
    """A piece of an array along one axis."""

    root: Any  # the array, or a key for it
    start: int
    size: int
    shape: tuple[int, ...]  # without the axes before that axis, which are a batch
    rank: int  # the number of axes behind that axis, as in `cut`


@dataclasses.dataclass(frozen=True)
class HashedOnce:
    """A dataclass that remembers its hash, and is pickled without it: hashes differ between processes."""

    @functools.cached_property
    def _hash(self) -> int:
        fields = [field.name for field in dataclasses.fields(self) if field.compare and field.hash is not False]
        return hash(tuple([getattr(self, name) for name in fields]))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return type(self), tuple([getattr(self, field.name) for field in dataclasses.fields(self)])


@dataclasses.dataclass(frozen=True)
class Block(HashedOnce):
    """Arrays stored in sequence in one array; without a `length` it is a single array, unchanged.

    A vector and a stack differ only in `rank`. The arrays follow one another along the first axis. In a vector each
    array is flat. In a stack each array keeps its last `rank` axes, and fills one or more rows along the first axis:
    one row, if all its axes are kept.
    """

    shapes: _Shapes
    dtypes: tuple[Any, ...]  # of each; none of frozen arrays, which are as they lie in it
    dtype: Any  # of the whole
    length: int | None  # of the first axis, with the padding
    rank: int = 0  # the number of axes of a row; in a vector none is kept

    @classmethod
    def single(cls, shape: tuple[int, ...], dtype: DTypeLike) -> "Block":
        """Returns a block of one array, unchanged."""
        return cls((tuple(shape),), (dtype,), dtype, None, len(shape))

    @classmethod
    def vector(cls, arrays: Sequence[Any], dtype: DTypeLike, length: int | None = None) -> "Block":
        """Returns a block of arrays of any shapes, each flat; zeros fill it up to the length."""
        shapes = tuple([tuple(array.shape) for array in arrays])
        flat = sum(map(math.prod, shapes))
        return cls(shapes, tuple([array.dtype for array in arrays]), dtype, flat if length is None else length)

    @classmethod
    def rows(cls, arrays: Sequence[Any]) -> "Block":
        """Returns a block of arrays of one shape and dtype."""
        (shape, dtype), count = (tuple(arrays[0].shape), arrays[0].dtype), len(arrays)
        return cls((shape,) * count, (dtype,) * count, dtype, count, len(shape))

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

    __hash__ = HashedOnce.__hash__

    def join(self, arrays: Sequence[Any]) -> Any:
        """Joins the arrays into the whole array."""
        if self.length is None:
            return arrays[0]
        if not arrays:
            return jnp.zeros(self.length, self.dtype)
        arrays = [cast(array, self.dtype) for array in map(jnp.asarray, arrays)]
        arrays = _alike(arrays) if self.rank else list(map(replicated, arrays))
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
        return replicated(jnp.asarray(whole), 1 if self.rank else None)

    def some(self, whole: jax.Array, numbers: Set[int]) -> dict[int, jax.Array]:
        """Cuts out the arrays with these numbers."""
        ordered = sorted(numbers)
        return dict(zip(ordered, _cut_strips(whole, self.strips(ordered)), strict=True))

    def changed(self, whole: jax.Array, news: Mapping[int, Any], change: Callable[[jax.Array, Any], Any]) -> jax.Array:
        """Returns the whole array with `change(old, new)` at the numbers of `news`: one copy, however many change."""
        numbers = sorted(news)
        shapes = _with_gaps(self.strips(numbers), whole.shape[1:], self.shape[0])
        pieces = cut(self.gathered(whole), shapes, self.rank)
        for i, number in enumerate(numbers):
            pieces[2 * i + 1] = change(pieces[2 * i + 1], news[number])
        return laid_as(join(pieces, shapes, self.shape[0], self.rank), whole)

    def strips(self, numbers: Iterable[int], root: Any = None) -> tuple[Strip, ...]:
        """Returns where the arrays with these numbers lie in the whole array; `root` is that array, or a key for it."""
        at, shapes = self.starts, self.shapes
        return tuple([Strip(root, at[n], at[n + 1] - at[n], shapes[n], self.rank) for n in numbers])


def cast(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Casts an array to a dtype; a complex array loses its imaginary part if the dtype is real."""
    if jnp.iscomplexobj(array) and not is_complex(dtype):
        array = array.real
    return jax.lax.convert_element_type(array, dtype)


def _alike(arrays: Sequence[Any]) -> list[Any]:
    """Gives arrays of one shape the same placement by type: the one that all have, or else whole on each device."""
    shardings = {jax.typeof(array).sharding for array in arrays if is_sharded(array)}
    return list(arrays if len(shardings) <= 1 and all(map(is_sharded, arrays)) else map(replicated, arrays))


def _real(number: Any, dtype: DTypeLike) -> Any:
    """Returns a number as an array of a dtype, a NumPy array if its value is known."""
    return number.astype(dtype) if isinstance(number, jax.Array) else np.asarray(number, dtype)


# Strips of one array that differ in their starts alone.
_Column = tuple[Strip, ...]


def cut_columns(columns: Iterable[_Column], read: Callable[[Any], jax.Array]) -> dict[_Column, jax.Array]:
    """Returns each column as one array with a leading axis over its strips; `read` gives the array of a root.

    All columns of an array have equally many strips, and are cut at once.
    """
    of_array: dict[tuple[Any, int], list[_Column]] = {}
    for column in dict.fromkeys(columns):
        of_array.setdefault((column[0].root, column[0].rank), []).append(column)
    found: dict[_Column, jax.Array] = {}
    for (root, rank), its in of_array.items():
        found |= zip(its, _columns_of(read(root), rank, its), strict=True)
    return found


def _columns_of(array: jax.Array, rank: int, columns: Sequence[_Column]) -> list[jax.Array]:
    # A net of three equal layers, each with a bias (b) and a weight (w), lies in a vector like this:
    #
    #     e e e | b b w w w w | b b w w w w | b b w w w w | h h h
    #     first --^   step = 6
    #
    # The three layers are one array of shape (3, 6), and their weights the columns 2 to 6 of it. That holds if each
    # piece of node n begins at `first + offset + n * step`, with one offset for each column, and if no piece reaches
    # into the next node. Pieces of other nodes may lie between: they are gaps, and cut out with the rest.
    axis = array.ndim - 1 - rank
    row = array.shape[axis + 1 :]  # inside of a `shard_map` each device has its share of a row
    shapes = [(*head.shape[: len(head.shape) - rank], *row) for head, *_ in columns]
    sizes = np.array([head.size for head, *_ in columns], int)
    starts = np.array([[strip.start for strip in column] for column in columns], int)
    nodes = starts.shape[1]
    first = starts[:, 0].min()
    step = starts[:, 1].min() - first if nodes > 1 else (starts[:, 0] + sizes).max() - first
    # Behind the last node there may be nothing left, so that its piece would end behind the array: then all pieces
    # begin earlier.
    first = min(first, array.shape[axis] - nodes * step)
    offsets = starts[:, 0] - first
    order = np.lexsort((sizes, offsets))
    reach = (offsets + sizes)[order] <= np.append(offsets[order][1:], step)
    if first >= 0 and reach.all() and (starts == starts[:, :1] + step * np.arange(nodes)).all():
        whole = Strip(None, int(first), int(nodes * step), (nodes, int(step), *row), rank)
        (rows,) = _cut_strips(array, [whole])
        parts = [Strip(None, int(offsets[j]), int(sizes[j]), shapes[j], rank) for j in order]
        found = dict(zip(order.tolist(), _cut_strips(rows, parts), strict=True))
        return [jnp.moveaxis(found[j], axis, 0) for j in range(len(columns))]
    stacks = []
    for column, shape in zip(columns, shapes, strict=True):
        strips = sorted({strip._replace(shape=shape) for strip in column}, key=lambda strip: strip.start)
        pieces = dict(zip([strip.start for strip in strips], _cut_strips(array, strips), strict=True))
        stacks.append(jnp.moveaxis(stacked([pieces[strip.start] for strip in column], len(shape)), axis, 0))
    return stacks


def stacked(arrays: Sequence[jax.Array], rank: int | None = None) -> jax.Array:
    """Stacks arrays of one shape, before their last `rank` axes; `None` means before all of them. Weak types stay."""
    shape = arrays[0].shape
    shape = shape if rank is None else shape[len(shape) - rank :]
    return join(_alike(arrays), (shape,) * len(arrays), len(arrays), len(shape))


def _cut_strips(array: jax.Array, strips: Sequence[Strip]) -> list[jax.Array]:
    """Cuts ascending strips, at least one, out of an array."""
    # The gaps before, between and after are cut too, though often nobody reads them: so it is one cut, whose transpose
    # is one join. Slices of the arrays alone would have as many padded additions for their transpose.
    rank = strips[0].rank
    axis = array.ndim - 1 - rank
    return cut(array, _with_gaps(strips, array.shape[axis + 1 :], array.shape[axis]), rank)[1::2]


def _with_gaps(strips: Iterable[Strip], row: tuple[int, ...], length: int) -> _Shapes:
    """Returns the shapes of ascending strips of an axis, with the gaps around them."""
    shapes, at = [], 0
    for _, start, size, shape, _ in strips:
        shapes += [(start - at, *row), shape]
        at = start + size
    return (*shapes, (length - at, *row))
