"""The pieces of a state of the new model: those of each parameter, and those that a whole history shares."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._forms.states import Copies, Entries, Owners, Piece, Place
from .._tree.paths import join_path, quote
from .._tree.types import is_inexact
from ..optim._groups import Group
from ._before import Before, Source, labelled_in, members_in, unlabelled
from ._movers import Movers


@dataclasses.dataclass(frozen=True, eq=False)
class Moving:
    """An old state on its way into that of the new model, like a fresh one.

    Attributes:
        homes: the old history that each new parameter continues; `None` for a new one.
        groups: the groups of the fresh state.
    """

    movers: Movers
    before: Source
    fresh: Copies
    homes: dict[str, Before | None]
    groups: Sequence[Group]

    def reads(self, path: str) -> list[tuple[str, Before]]:
        """Returns the old parameters that a new one is made from, each with its history."""
        return [self.before.of[name] for name in self.movers.reads(path)]

    # -- Of each parameter

    def piece(self, place: Place, path: str) -> Piece:
        """Returns the piece for a parameter at a place in its state."""
        if self.movers.is_plain(path):
            ((old, history),) = self.reads(path)
            return history.piece(place, old)
        shape, names, fresh = self.fresh.shapes[path], self.movers.reads(path), self.fresh.piece(place, path)
        read = functools.partial(self._alone, place)
        arrays = list(map(read, names))
        specs = [self.movers.specs[name] for name in names]
        are_like = all(it.shape == spec.shape and is_inexact(it.dtype) for it, spec in zip(arrays, specs, strict=True))
        if are_like and fresh.shape_alone(shape) == shape:
            array = self.movers.move(path, read)
            dropped = self.movers.dropped(path)
            if dropped is not None:
                begun = self.begun(place, path).alone(shape)
                array = jnp.where(dropped, begun, array.astype(begun.dtype))
        elif {it.shape for it in arrays} == {fresh.shape_alone(shape)} and _are_one_number(arrays):
            array = arrays[0]
        else:
            raise ValueError(
                f"{path!r} is made of {list(names)} by {self.movers.how(path)}, but for these the state has arrays of "
                f"shapes {[it.shape for it in arrays]} at {join_path((*place[0], '*', *place[1]))!r}, which "
                "are not the parameters' shapes, and not all alike: a plan can only rename such a parameter; begin "
                "with a fresh state"
            )
        return Piece(array, Owners((path,), place, None, (), False), 0)

    @functools.cached_property
    def _alone(self) -> Callable[[Place, str], Any]:
        """A function from a place and a name to the array that an old parameter has there."""

        # Each row of a stack asks for the whole stack, one after another.
        @functools.lru_cache(maxsize=4)
        def alone(place: Place, name: str) -> Any:
            old, history = self.before.of[name]
            return history.piece(place, old).alone(history.copies.shapes[old])

        return alone

    def begun(self, place: Place, path: str) -> Piece:
        """Returns the piece that a parameter begins with."""
        piece = self.fresh.piece(place, path)
        return piece._replace(array=_with_values(piece.array, path))

    # -- Of all parameters of a history, or of those of a group

    def shared(self, home: Before | None, paths: Sequence[str], entries: Entries) -> Any:
        """Returns an array that the parameters of a history share; an array of a group is that of their old group."""
        if home is None:
            # New parameters begin with the rates that were set, as after optim.set_trainable.
            if "hyperparams" in entries and self.before.histories:
                carried = [path for path, its in self.homes.items() if its]
                found = self._in_groups(carried, entries) or self._by_name(self.before.histories[0], entries)
                if found:
                    return found[0][0].copies.shared(found[0][1])
            return _with_values(self.fresh.arrays[entries], join_path(entries))
        found = self._in_groups(paths, entries)
        if not found:
            found = self._by_name(home, entries)
            if not found and self._is_of_none(paths, entries):
                return _with_values(self.fresh.arrays[entries], join_path(entries))
        (history, its), *others = found or [(home, entries)]
        array = history.copies.shared(its)
        for history, other in others:
            if other != its and not np.array_equal(array, history.copies.shared(other), equal_nan=True):
                raise ValueError(
                    f"the state has {join_path(its)!r} and {join_path(other)!r}, which differ, but parameters of both "
                    f"groups are now in one, at {join_path(entries)!r}; begin with a fresh state"
                )
        return array

    @functools.cached_property
    def _members(self) -> Mapping[Entries, Set[str]]:
        """The new parameters in each group that keeps arrays of parameters."""
        return members_in(self.fresh)

    def _in_groups(self, paths: Collection[str], entries: Entries) -> list[tuple[Before, Entries]]:
        """Returns where the array of a group was before, by the groups that the group's parameters were in."""
        for head in labelled_in(entries):
            found: dict[tuple[int, Entries], tuple[Before, Entries]] = {}
            members = self._members.get(head, frozenset())
            for path in (path for path in paths if path in members):
                for old, history in self.reads(path):
                    its = history.same(entries, old)
                    found[id(history), its] = history, its
            if found:
                return list(found.values())
        return []

    def _by_name(self, history: Before, entries: Entries) -> list[tuple[Before, Entries]]:
        """Returns where an array was before: under the same group labels, or the only ones that no longer exist."""
        common = history.copies.common
        others = [its for its in common - self.fresh.common if unlabelled(its) == unlabelled(entries)]
        if entries in common or len(others) == 1:
            return [(history, entries if entries in common else others[0])]
        return []

    def _is_of_none(self, paths: Sequence[str], entries: Entries) -> bool:
        """Returns whether an array belongs to a group that has no parameter of a history."""
        head = next(labelled_in(entries), None)
        if head is None:
            return False
        if head in self._members:
            return self._members[head].isdisjoint(paths)
        groups = [set(group.paths) for group in self.groups if quote(group.name) == head[-1]]
        # In stacks, groups have other paths than those of parameters.
        return bool(groups) and all(its <= self.fresh.shapes.keys() and its.isdisjoint(paths) for its in groups)


def _are_one_number(arrays: Sequence[Any]) -> bool:
    """Returns whether all arrays are the same number, such as counts of parameters that took their steps together."""
    return all(array.size == 1 and bool(np.all(array == arrays[0])) for array in arrays)


def _with_values(array: Any, name: str) -> Any:
    """Returns a fresh array; raises an error if it has no values."""
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ValueError(f"like has no values at {name!r}, where they are needed: expected arrays, like=tx.init(model)")
    return array
