"""Finds the parameters that each array of an optimiser's state belongs to.

Optax does not record it. This module asks `init`, for shapes only, which state it makes where each leaf is below a node
that says its number, and has one more element, or row, if it joins parameters. A rule keeps a tree like the
parameters, so the node is in the path of each array that belongs to the leaf, and a joined one is longer along an axis.

All other arrays are shared, as a step count is, and must be there without the first leaf, too, in the same shape. If
they are not, the rule may list its leaves by number. Then the question is asked again, with a size for each leaf that
no other has. If that fails, too, the answer is a `Division` with a problem, and never a guess.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from .._tree.paths import key_entries
from .._tree.types import PyTree
from .form import Form

Init = Callable[[PyTree], PyTree]
Entries = tuple[str, ...]
Place = tuple[Entries, Entries]
"""The entries before and after a parameter's own in the path of an array: equal for the same array of others."""

UNDIVIDED = (
    "the state of the transformation is not kept leaf by leaf, so it cannot continue with some of the leaves: pass "
    'gradients for all of them (tp.project(model, grads, missing="zeros")), and freeze none between steps'
)


class Owners(NamedTuple):
    """The parameters that an array of a state belongs to, and the place of each one's piece."""

    paths: tuple[str, ...]
    place: Place
    axis: int | None  # along which the pieces follow one another; none: the array is of one parameter alone
    starts: tuple[int, ...]  # where each piece begins along the axis, and where the last one ends
    has_rows: bool  # whether each piece is one row


@dataclasses.dataclass(frozen=True)
class Division:
    """The owners of each array of a state, in tree order; `None` where all parameters share it."""

    owners: tuple[Owners | None, ...]
    problem: str = ""  # why that could not be told

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All entries of paths, without those of parameters."""
        places = {owners.place for owners in self.owners if owners is not None}
        return frozenset(entry for place in places for entries in place for entry in entries)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.owners, self.problem))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return Division, (self.owners, self.problem)  # hashes differ between processes


# -- Asking ------------------------------------------------------------------------------------------------------------

_MARK = 1_000_003  # no size that a state has for another reason


class Marked:
    """A node around one leaf, whose key is the number of the leaf."""

    def __init__(self, number: int, leaf: Any) -> None:
        self.number = number
        self.leaf = leaf


class _Number(NamedTuple):
    of: int


jtu.register_pytree_with_keys(
    Marked,
    lambda node: ([(_Number(node.number), node.leaf)], node.number),
    lambda number, leaves: Marked(number, *leaves),
)


def divide(init: Init, form: Form, state: PyTree) -> Division:
    """Finds the owners of each array in the state of a form."""
    problem = ""
    for has_sizes in (False, True):
        try:
            return Division(_asked(init, form, state, has_sizes))
        except Exception as error:  # a rule may want the first leaf, or the names that it has masks for
            why = "" if isinstance(error, UndividedError) else f" (init: {type(error).__name__})"
            problem = problem or UNDIVIDED + why
    return Division((), problem)


class UndividedError(ValueError):
    """The owners of the arrays of a state cannot be found."""


def _asked(init: Init, form: Form, state: PyTree, has_sizes: bool) -> tuple[Owners | None, ...]:
    """Returns the owners of each array, from the state that `init` makes of marked leaves."""
    leaves = jtu.tree_leaves(form.shapes())
    marked = [_marked(form, i, leaf, has_sizes) for i, leaf in enumerate(leaves)]
    ask = lambda leaves: _shapes_in(jax.eval_shape(init, form.treedef.unflatten(leaves)))
    own, found = _shapes_in(state), ask(marked)
    if list(own) != [tuple([key for key in path if not isinstance(key, _Number)]) for path in found]:
        raise UndividedError
    lists = _lists_in(found, len(leaves))
    owners = [_owner(form, marked, lists, *one, *other) for one, other in zip(own.items(), found.items(), strict=True)]
    shared = {path for path, owner in zip(found, owners, strict=True) if owner is None and path in own}
    if shared and len(leaves) > 1:
        without = ask([None, *leaves[1:]])
        if any(without.get(path) != own[path] for path in shared):
            raise UndividedError
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
            raise UndividedError
    elif start is not None:
        i, stop = path[start].idx, start + 1
    elif shape == marked_shape:
        return None
    elif form.is_bare:  # a rule that takes the one array out of its node
        i, start, stop = 0, len(path), len(path)
    else:
        raise UndividedError
    block, paths = form.blocks[i], tuple([form.paths[slot] for slot in form.members[i]])
    place = key_entries(path[:start]), key_entries(path[stop:])
    if block.length is None:
        return Owners(paths, place, None, (), False)
    if shape == marked_shape:
        return None
    # An array that grows by something else - a square one of all pairs of elements, a factor of half the length - is no
    # sequence of pieces, one for each parameter.
    for axis, size in enumerate(shape):
        if size == block.length and marked_shape == (*shape[:axis], leaves[i].leaf.shape[0], *shape[axis + 1 :]):
            return Owners(paths, place, axis, tuple(block.starts), block.has_rows)
    raise UndividedError
