"""Finds the parameters that each array of an optimiser's state belongs to.

Optax does not record it. This module asks `init`, for shapes only, which state other parameters would have. For a form
whose joined blocks have one more element, or row, the arrays that belong to the blocks are longer along one axis. For a
tree without some of its leaves, the arrays of those leaves are missing. An array that does not change is shared: a step
count, a rate.

A difference in shape shows that an array belongs to some joined block, or to some leaf, but not to which: all blocks
grow at once and half of the leaves are missing at once, because asking about each one separately would take as many
calls as there are leaves. The path of the array identifies the block: a rule keeps a tree like the parameters, so the
keys of the block are part of the path (`_blocks_in`). A rule that lists arrays by number has no such paths; then each
leaf gets a size that no other leaf has (`_marked_arrays`). If neither method succeeds, the answer is a `Division` with
a problem, and never a guess.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

_WRAP = jtu.DictKey("the parameters")  # under which a form that is one array is shown, so that its place can be seen
_MARK = 1_000_003  # no size that a state has for another reason


@dataclasses.dataclass(frozen=True)
class _Question:
    """A rule's `init`, and the form that it is asked about."""

    init: Init
    form: Form

    def answer(self, *, longer: int = 0, without: Sequence[int] = ()) -> dict[Any, Any]:
        """Returns the arrays of a state of the changed form, by their JAX keys; a bare form is stored under `_WRAP`."""
        return self.state_of(self.form.shapes(longer=longer, without=without))

    def state_of(self, shapes: PyTree) -> dict[Any, Any]:
        """Returns the arrays of a state of these shapes, by their JAX keys."""
        wrapped = {_WRAP.key: shapes} if self.form.is_bare else shapes
        return dict(jtu.tree_flatten_with_path(jax.eval_shape(self.init, wrapped))[0])

    @functools.cached_property
    def ends(self) -> Mapping[Any, int]:
        """Where the keys of the block end in the path of an array, found by putting each leaf into one more dictionary.

        Some arrays may be missing, and all are if the rule fails on this tree, as one that uses the names of parameters
        does.
        """
        # The path of an array then shows `_WRAP` right behind the keys of its block. Without it, and this end is where
        # the keys end in the path as it is.
        deeper = jax.tree.map(lambda leaf: {_WRAP.key: leaf}, self.form.shapes())
        try:
            paths = [path for path, _ in jtu.tree_flatten_with_path(jax.eval_shape(self.init, deeper))[0]]
        except Exception:
            return {}
        at = {path: path.index(_WRAP) for path in paths if _WRAP in path}
        return {path[:end] + path[end + 1 :]: end for path, end in at.items()}

    @property
    def keys(self) -> Mapping[Any, int]:
        """The block at each path of the tree that the rule sees."""
        return {(_WRAP,): 0} if self.form.is_bare else {keys: i for i, keys in enumerate(self.form.keys)}


def divide(init: Init, form: Form, state: PyTree) -> Division:
    """Finds the owners of each array in the state of a form."""
    question = _Question(init, form)
    try:
        whole = question.answer() if form.is_bare else dict(jtu.tree_flatten_with_path(state)[0])
        found = dict.fromkeys(whole) | _joined_arrays(question, whole) | _single_arrays(question, whole)
    except Exception as error:  # a rule may want a leaf, or the names that it has masks for
        problem = str(error) if isinstance(error, UndividedError) else f"{UNDIVIDED} (init: {type(error).__name__})"
        return Division((), problem)
    return Division(tuple(found.values()))


class UndividedError(ValueError):
    """The owners of the arrays of a state cannot be found."""

    def __init__(self) -> None:
        super().__init__(UNDIVIDED)


def _joined_arrays(question: _Question, whole: Mapping[Any, Any]) -> dict[Any, Owners]:
    """Finds the arrays that grow with the joined blocks."""
    blocks = question.form.blocks
    if all(block.length is None for block in blocks):
        return {}
    longer, found = question.answer(longer=1), {}
    if longer.keys() != whole.keys():
        raise UndividedError
    # All joined blocks grow at once, by one. An array that grows by something else - a square one of all pairs of
    # elements, a factor of half the length - is no sequence of pieces, one for each parameter.
    grown = [path for path, array in whole.items() if array.shape != longer[path].shape]
    for path, (i, start, stop) in _blocks_in(question, grown).items():
        array = whole[path]
        sizes = zip(array.shape, longer[path].shape, strict=True)
        axes = [axis for axis, (size, larger) in enumerate(sizes) if size != larger]
        length = blocks[i].shape[0]
        if len(axes) != 1 or (array.shape[axes[0]], longer[path].shape[axes[0]]) != (length, length + 1):
            raise UndividedError
        found[path] = _owners(question.form, i, start, stop, path, axes[0])
    return found


def _single_arrays(question: _Question, whole: Mapping[Any, Any]) -> dict[Any, Owners]:
    """Finds the arrays that are missing when single blocks are."""
    singles = [i for i, block in enumerate(question.form.blocks) if block.length is None]
    if not singles:
        return {}
    try:
        # Two questions are enough for any number of leaves. Every second leaf is left out, and then the others: an
        # array of one leaf is missing from one of the answers, and an array that is shared stands in both.
        halves = [question.answer(without=singles[start::2]) for start in (0, 1)]
        if all({half[path].shape for half in halves if path in half} == {its.shape} for path, its in whole.items()):
            missing = [path for path in whole if any(path not in half for half in halves)]
            at = _blocks_in(question, missing)
            return {path: _owners(question.form, *at[path], path, None) for path in missing}
    except Exception:  # a rule may want a leaf
        pass
    return _marked_arrays(question, whole)


def _marked_arrays(question: _Question, whole: Mapping[Any, Any]) -> dict[Any, Owners]:
    """Finds the arrays that have a size that only one block was given.

    This works for states that list arrays by number, where the arrays of other leaves are at the same paths.
    """
    form = question.form
    marked = [jax.ShapeDtypeStruct((_MARK + i,), block.dtype) for i, block in enumerate(form.blocks)]
    answer = question.state_of(jtu.tree_unflatten(form.treedef, marked))
    if answer.keys() != whole.keys():
        raise UndividedError
    marks: dict[Any, int] = {}
    for path, array in answer.items():
        found = {size - _MARK for size in array.shape if 0 <= size - _MARK < len(marked)}
        if len(found) == 1:
            marks[path] = found.pop()
        elif found or array.shape != whole[path].shape:
            raise UndividedError
    # In a plain list of arrays, the number of the leaf is an entry of the path: the one that says the right block in
    # the path of every array.
    number = next((at for at in range(min(map(len, marks), default=0)) if _numbers_at(marks, at)), None)
    if number is not None:
        return {path: _owners(form, i, number, number + 1, path, None) for path, i in marks.items()}
    places = _blocks_in(question, marks)
    if any(places[path][0] != i for path, i in marks.items()):
        raise UndividedError
    return {path: _owners(form, *places[path], path, None) for path in marks}


def _numbers_at(marks: Mapping[Any, int], at: int) -> bool:
    """Returns whether this entry of the path of each array is the number of its block."""
    return all(getattr(path[at], "idx", None) == i for path, i in marks.items())


def _blocks_in(question: _Question, paths: Iterable[Any]) -> dict[Any, tuple[int, int, int]]:
    """Finds the block whose keys are in each path, and their position.

    A path may contain several candidates: a list of parameters has positions in it, and so have the tuples of a chain.
    Of these the function chooses the last and longest keys that leave the same entries before and after them in most of
    the paths.
    """
    # For parameters `[w, b]` and a chain of two Adams, the moment of `w` in the second one is `[1][0].mu[0]`. All three
    # positions are keys of a block. With `[0]` at the end taken out, `[1][0].mu` is left, as it is for `b`; no other
    # choice has as many companions.
    found = {path: list(_candidates(path, question.keys)) for path in paths}
    if any(len(its) > 1 for its in found.values()):
        for path, its in found.items():
            found[path] = [each for each in its if each[2] == question.ends.get(path, each[2])] or its
    places = collections.Counter((path[:i], path[j:]) for path, its in found.items() for _, i, j in its)
    if not all(found.values()):
        raise UndividedError
    return {path: max(its, key=lambda at, p=path: places[p[: at[1]], p[at[2] :]]) for path, its in found.items()}


def _candidates(path: Sequence[Any], keys: Mapping[Any, int]) -> Iterator[tuple[int, int, int]]:
    # The longest keys first, and of these the last in the path, since `max` takes the first of those that count alike.
    for width in sorted(set(map(len, keys)), reverse=True):
        for start in range(len(path) - width, -1, -1):
            block = keys.get(tuple(path[start : start + width]))
            if block is not None:
                yield block, start, start + width
    if (_WRAP,) in keys and _WRAP not in path:  # a rule that takes the one array out of what it stands in
        yield 0, len(path), len(path)


def _owners(form: Form, i: int, start: int, stop: int, path: Sequence[Any], axis: int | None) -> Owners:
    """Returns the owners of an array of one block, whose keys are the entries from `start` to `stop` of its path."""
    block, paths = form.blocks[i], tuple([form.paths[slot] for slot in form.members[i]])
    before, after = map(key_entries, (path[:start], path[stop:]))
    starts = () if axis is None else tuple(block.starts)
    return Owners(paths, (before, after), axis, starts, axis is not None and block.has_rows)
