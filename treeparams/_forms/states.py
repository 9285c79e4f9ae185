"""The state of a rule: copies of the form that it was shown, and arrays that all parameters share.

Which parameters each array of a state belongs to, Optax does not record. `Division.of` asks `init`, for shapes only,
which state it makes where each leaf is below a node that says its number, and has one more element, or row, if it joins
parameters. A rule keeps a tree like the parameters, so the node is in the path of each array that belongs to the leaf,
and a joined one is longer along an axis. All other arrays are shared, as a step count is, and must be there for the
first leaf alone, and for the last, in the same shape. If they are not, the rule may list its leaves by number. Then the
question is asked again, with a size for each leaf that no other has. If that fails, too, the answer is a `Division`
with a problem, and never a guess.

Every change to a state between steps follows from these owners. `Copies.regrouped` cuts the arrays of some states into
pieces, one for each parameter, and joins them into another state. So parameters freeze and thaw, step without the
others, wait, move to another model by name, and are placed on devices.

A piece is identified by two things: the path of its parameter, and its place, which is the entries before and after the
parameter's own in the path of the array, such as `0.mu` for Adam's first moment. So it does not matter which form
either state has: a piece may be a row in one, a span of a vector in another, and a separate array in a third.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike

from .._tree.paths import join_path, key_entries
from .._tree.types import PyTree, common_dtype
from .block import Block, HashedOnce
from .form import Form

# -- Owners ------------------------------------------------------------------------------------------------------------

Init = Callable[[PyTree], PyTree]
Entries = tuple[str, ...]
Place = tuple[Entries, Entries]
"""The entries before and after a parameter's own in the path of an array: equal for the same array of others."""

_UNDIVIDED = (
    "the state of the transformation is not kept leaf by leaf, so it cannot continue with some of the leaves: pass "
    'gradients for all of them (tp.project(model, grads, missing="zeros")), and freeze none between steps'
)

_ANY = np.dtype(bool)  # where pieces are does not depend on their dtype


class Owners(NamedTuple):
    """The parameters that an array of a state belongs to, and where each one's piece is in it."""

    paths: tuple[str, ...]
    place: Place
    axis: int | None  # along which the pieces follow one another; none: the array is of one parameter alone
    block: Block  # of the parameters along the axis, without dtypes and padding

    @classmethod
    def of(
        cls, paths: Sequence[str], place: Place, axis: int | None, shapes: Sequence[tuple[int, ...]], has_rows: bool
    ) -> "Owners":
        """Returns the parameters of these shapes, whose pieces are rows or follow one another flat."""
        pieces = [jax.ShapeDtypeStruct(shape, _ANY) for shape in shapes]
        if axis is None:
            block = Block.single(shapes[0], _ANY)
        else:
            block = Block.rows(pieces) if has_rows else Block.vector(pieces, _ANY)
        return cls(tuple(paths), place, axis, block)


@dataclasses.dataclass(frozen=True)
class Division(HashedOnce):
    """The owners of each array of a state, in tree order; `None` where all parameters share it."""

    owners: tuple[Owners | None, ...]
    problem: str = ""  # why that could not be told

    @classmethod
    def of(cls, init: Init, form: Form, state: PyTree) -> "Division":
        """Finds the owners of each array in the state of a form."""
        problem = ""
        for has_sizes in (False, True):
            try:
                return cls(_asked(init, form, state, has_sizes))
            except Exception as error:  # a rule may want the first leaf, or the names that it has masks for
                why = "" if isinstance(error, _UndividedError) else f" (init: {type(error).__name__})"
                problem = problem or _UNDIVIDED + why
        return cls((), problem)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All entries of paths, without those of parameters."""
        places = {owners.place for owners in self.owners if owners is not None}
        return frozenset(entry for place in places for entries in place for entry in entries)

    __hash__ = HashedOnce.__hash__


# -- Asking ------------------------------------------------------------------------------------------------------------

_MARK = 1_000_003  # no size that a state has for another reason


class Marked:
    """A node around one leaf, whose key is the number of the leaf."""

    def __init__(self, number: int, leaf: Any) -> None:
        self.number = number
        self.leaf = leaf


class _Number(NamedTuple):
    of: int


_keyed = lambda node: ([(_Number(node.number), node.leaf)], node.number)
jtu.register_pytree_with_keys(Marked, _keyed, lambda number, leaves: Marked(number, *leaves))


class _UndividedError(ValueError):
    """The owners of the arrays of a state cannot be found."""


def _asked(init: Init, form: Form, state: PyTree, has_sizes: bool) -> tuple[Owners | None, ...]:
    """Returns the owners of each array, from the state that `init` makes of marked leaves."""
    leaves = jtu.tree_leaves(form.shapes())
    marked = [_marked(form, i, leaf, has_sizes) for i, leaf in enumerate(leaves)]
    ask = lambda leaves: _shapes_in(jax.eval_shape(init, form.treedef.unflatten(leaves)))
    own, found = _shapes_in(state), ask(marked)
    if list(own) != [tuple([key for key in path if not isinstance(key, _Number)]) for path in found]:
        raise _UndividedError
    lists = _lists_in(found, len(leaves))
    owners = [_owner(form, marked, lists, *one, *other) for one, other in zip(own.items(), found.items(), strict=True)]
    shared = {path for path, owner in zip(found, owners, strict=True) if owner is None and path in own}
    # Of one leaf alone a state is made quickly; of any leaf, the first or the last answer is one without it.
    for i in {0, len(leaves) - 1} if shared and len(leaves) > 1 else ():
        alone = ask([leaf if n == i else None for n, leaf in enumerate(leaves)])
        if any(alone.get(path) != own[path] for path in shared):
            raise _UndividedError
    return tuple(owners)


def _shapes_in(state: PyTree) -> dict[Any, tuple[int, ...]]:
    """Returns the shapes of the arrays in a state by their JAX keys."""
    return {path: array.shape for path, array in jtu.tree_flatten_with_path(state)[0]}


def _marked(form: Form, i: int, leaf: Any, has_sizes: bool) -> Marked:
    """Returns a leaf below its number: one row longer if it is joined or alone, or of a size that no other has."""
    more = int(form.blocks[i].length is not None or len(form.blocks) == 1)
    first = [_MARK + i] if has_sizes else [size + more for size in leaf.shape[:1]]
    return Marked(i, jax.ShapeDtypeStruct((*first, *leaf.shape[1:]), leaf.dtype))


def _number_in(path: Sequence[Any]) -> int | None:
    """Returns where the number of a leaf is in the path of an array."""
    return next((at for at, key in enumerate(path) if isinstance(key, _Number)), None)


def _lists_in(found: Mapping[Any, Sequence[int]], count: int) -> Set[Any]:
    """Returns the paths of lists in which each array that has the size of one leaf is at the leaf's number."""
    alone = [(path, shape) for path, shape in found.items() if _number_in(path) is None]
    sized = [(path, size - _MARK) for path, shape in alone for size in shape if 0 <= size - _MARK < count]
    for at in range(min([len(path) for path, _ in sized], default=0)):
        if all(getattr(path[at], "idx", None) == i for path, i in sized):
            return {path[:at] for path, _ in sized}
    return set()


def _owner(
    form: Form, leaves: Sequence[Marked], lists: Set[Any], path: Any, shape: Any, marked_path: Any, marked_shape: Any
) -> Owners | None:
    """Returns the owners of an array, from its path and shape and those that it has where leaves are marked."""
    stop = _number_in(marked_path)
    start = next((at for at in range(len(path)) if path[:at] in lists), None)
    if stop is not None:
        i = marked_path[stop].of
        start = max(stop - len(form.keys[i]), 0)
        if path[start:stop] != form.keys[i]:
            raise _UndividedError
    elif start is not None:
        i, stop = path[start].idx, start + 1
    elif shape == marked_shape:
        return None
    elif form.is_bare:  # a rule that takes the one array out of its node
        i, start, stop = 0, len(path), len(path)
    else:
        raise _UndividedError
    block, paths = form.blocks[i], tuple([form.paths[slot] for slot in form.members[i]])
    place = key_entries(path[:start]), key_entries(path[stop:])
    if block.length is None:
        return Owners.of(paths, place, None, block.shapes, False)
    if shape == marked_shape:
        return None
    # An array that grows by something else - a square one of all pairs of elements, a factor of half the length - is no
    # sequence of pieces, one for each parameter.
    for axis, size in enumerate(shape):
        if size == block.length and marked_shape == (*shape[:axis], leaves[i].leaf.shape[0], *shape[axis + 1 :]):
            return Owners.of(paths, place, axis, block.shapes, block.has_rows)
    raise _UndividedError


# -- Pieces ------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The piece of an array that belongs to one parameter; without owners, all of an array."""

    array: Any
    owners: Owners | None = None
    number: int = 0  # of the parameter among the owners

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the piece as a rule keeps it for the parameter alone."""
        whole = tuple(self.array.shape)
        if self.owners is None or self.owners.axis is None:
            return whole
        axis, block = self.owners.axis, self.owners.block
        return whole[:axis] + whole[axis + 1 :] if block.has_rows else block.shapes[self.number]

    def alone(self) -> Any:
        """Returns the piece as a rule keeps it for the parameter alone."""
        if self.owners is None or self.owners.axis is None:
            return self.array
        if not self.owners.block.has_rows and self.array.ndim > 1:
            axes = f"an array of the state has {self.array.ndim} axes, one of them the vector's"
            raise ValueError(f"{_UNDIVIDED}; {axes}")
        start, stop = self.owners.block.starts[self.number : self.number + 2]
        return _span_of(self.array, start, stop, self.owners.axis).reshape(self.shape)


def _span_of(array: ArrayLike, start: int, stop: int, axis: int) -> Any:
    """Returns a span of an array along an axis; of a NumPy array, only the span is copied to a device."""
    if isinstance(array, np.ndarray):
        return array[(slice(None),) * axis + (slice(start, stop),)]
    return jax.lax.slice_in_dim(jnp.asarray(array), start, stop, axis=axis)


@dataclasses.dataclass(frozen=True, eq=False)
class Copies:
    """A state as its arrays, by the entries of their paths, with the owners of each."""

    arrays: Mapping[Entries, Any]  # in tree order
    division: Division

    @classmethod
    def of(cls, init: Init, form: Form, state: PyTree) -> "Copies":
        """Returns the state that `init` makes of a form."""
        return cls(entries_of(state), Division.of(init, form, state))

    @property
    def problem(self) -> str:
        """Why the owners of the state are not known."""
        if not self.division.problem and len(self.arrays) != len(self.division.owners):
            return "the state was changed since its transformation made it: it has other arrays"
        return self.division.problem

    def owned(self) -> Iterator[tuple[Entries, Owners | None]]:
        """Returns the entries and owners of each array; raises a `ValueError` if the owners are not known."""
        if self.problem:
            raise ValueError(self.problem)
        return zip(self.arrays, self.division.owners, strict=True)

    @functools.cached_property
    def at(self) -> dict[tuple[Place, str], tuple[Entries, Owners, int]]:
        """Where each parameter has its piece at a place: the array, and the parameter's number among its owners."""
        owned = [(entries, its) for entries, its in self.owned() if its is not None]
        return {(its.place, path): (entries, its, n) for entries, its in owned for n, path in enumerate(its.paths)}

    def piece(self, place: Place, path: str) -> Piece:
        """Returns the piece of a parameter at a place; raises a `KeyError` if there is none."""
        entries, owners, number = self.at[place, path]
        return Piece(self.arrays[entries], owners, number)

    @functools.cached_property
    def common(self) -> frozenset[Entries]:
        """The arrays that are shared, by their entries."""
        return frozenset(entries for entries, owners in self.owned() if owners is None)

    def shared(self, entries: Entries) -> Any:
        """Returns a shared array; raises a `KeyError` if there is none."""
        if entries not in self.common:
            raise KeyError(entries)
        return self.arrays[entries]

    def regrouped(self, sources: Sequence["Copies"]) -> list[Any]:
        """Returns the arrays of a state like this fresh one; each is from the first source that has it."""
        pieces = {at: each.piece(*at) for each in reversed(sources) for at in each.at}
        shared = {entries: each.arrays[entries] for each in reversed(sources) for entries in each.common}
        return self.joined(lambda place, path: pieces[place, path], shared.__getitem__)

    def joined(self, piece: Callable[[Place, str], Piece], shared: Callable[[Entries], Any]) -> list[Any]:
        """Returns the arrays of a state like this fresh one, from the piece of each parameter and shared arrays."""
        made = []
        for entries, owners in self.owned():
            try:
                if owners is None:
                    made.append(shared(entries))
                else:
                    its = [piece(owners.place, path) for path in owners.paths]
                    made.append(_join_pieces(owners, its, self.arrays[entries].shape))
            except KeyError:
                what = f"the state has nothing at {join_path(entries)!r}, which a fresh state has"
                why = "it was made by another transformation, or a parameter is now in another group"
                raise ValueError(f"{what}: {why}") from None
        return made


def entries_of(state: PyTree) -> dict[Entries, Any]:
    """Returns the arrays of a state by the entries of their paths."""
    return {key_entries(path): leaf for path, leaf in jtu.tree_flatten_with_path(state)[0]}


def _join_pieces(owners: Owners, pieces: Sequence[Piece], shape: tuple[int, ...]) -> Any:
    axis, has_rows = owners.axis, owners.block.has_rows
    if axis is None:
        return pieces[0].alone()
    # From an array that is joined along the same axis, pieces go over as they lie, many at once. From another form,
    # each is first brought into the shape that it has by itself.
    if all(each.owners and (each.owners.axis, each.owners.block.has_rows) == (axis, has_rows) for each in pieces):
        arrays = _runs(pieces, axis, has_rows)
    else:
        alone = [piece.alone() for piece in pieces]
        arrays = [jnp.expand_dims(each, axis) if has_rows else jnp.ravel(each) for each in alone]
    # A state of narrow leaves may have been that of a wider form: it keeps its digits.
    dtype = common_dtype([array.dtype for array in arrays])
    padding = shape[axis] - sum(array.shape[axis] for array in arrays)
    if padding:
        arrays.append(jnp.zeros((*shape[:axis], padding, *shape[axis + 1 :]), dtype))
    return arrays[0] if len(arrays) == 1 else jnp.concatenate([array.astype(dtype) for array in arrays], axis)


def _runs(pieces: Sequence[Piece], axis: int, has_rows: bool) -> list[Any]:
    """Returns the pieces along an axis, neighbouring pieces of one array as one."""
    # A slice for each piece would be a thousand operations for a thousand parameters. Most often a whole array, or a
    # long run of it, goes over: when a layer freezes, two runs are left of the vector, before it and after it.
    found = []
    for _, group in itertools.groupby(pieces, key=lambda piece: id(piece.array)):
        its = list(group)
        array, spans = its[0].array, list[tuple[int, int]]()
        for _, owners, number in its:
            start, stop = cast(Owners, owners).block.starts[number : number + 2]
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, stop))
        if spans == [(0, array.shape[axis])]:
            found.append(jnp.asarray(array))
        elif has_rows and len(spans) > 1:  # of many rows one gather, and not a slice for each
            rows = np.concatenate([np.arange(*span) for span in spans])
            found.append(jnp.take(jnp.asarray(array), rows, axis, mode="clip"))
        else:
            found += [jnp.asarray(_span_of(array, *span, axis)) for span in spans]
    return found
