"""A state of the old model: its histories, and the parameter and history of each name of a plan's source.

A file, or a plan's source, may name a parameter differently from its path, because a program has a dictionary of dotted
keys, or because ties have changed; so this file looks parameters up. In another program groups of parameters have other
labels, and each parameter is in one of them, so labels in the paths of arrays are ignored (`unlabelled`).
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from .._files.arrays import as_in_jax
from .._files.names import Names, head_of, is_below, name_of, split_name, with_ties
from .._files.values import histories_in, specs_in
from .._forms.states import Copies, Division, Entries, Owners, Piece, Place, entries_of
from .._slots.layout import index_of
from .._tree.paths import join_path, split_path
from .._tree.text import first_few
from ..optim._state import TrainableState
from ._contents import division_in
from ._fit import check_given
from ._movers import Movers
from ._names import names_of


def unlabelled(entries: Entries) -> Entries:
    """Returns the entries of a path with a star for each label of a group."""
    return tuple(["*" if i and entries[i - 1] == "inner_states" else entry for i, entry in enumerate(entries)])


def labelled_in(entries: Entries) -> Iterator[Entries]:
    """Yields the beginnings of a path that end with the label of a group, the innermost first."""
    for i in reversed(range(len(entries) - 1)):
        if entries[i] == "inner_states":
            yield entries[: i + 2]


def members_in(copies: Copies) -> Mapping[Entries, Set[str]]:
    """Returns the parameters in each group that keeps arrays of parameters, by the path of its state."""
    found = collections.defaultdict[Entries, set[str]](set)
    for place, path in copies.at:
        for head in labelled_in(place[0]):
            found[head].add(path)
    return dict(found)


class _Arrays(dict[Entries, Any]):
    """The names of arrays by the rest of their entries; each array is read when you access it."""

    def __init__(self, source: Names, path: str = "") -> None:
        depth = len(split_path(path))
        names = [name for name in source.specs if not path or is_below(name, path)]
        super().__init__((split_name(name)[depth:], name) for name in names)
        self._read = functools.cache(source.__getitem__)

    def __getitem__(self, entries: Entries) -> Any:
        return self._read(super().__getitem__(entries))


@dataclasses.dataclass(frozen=True, eq=False)
class Before:
    """A history of the old state, which notes the arrays that are taken from it."""

    at: Entries  # where it is in the state
    copies: Copies
    steps: int
    waits: bool
    _taken: set[Any] = dataclasses.field(default_factory=set)

    @functools.cached_property
    def _pieces(self) -> dict[tuple[Place, str], tuple[Entries, Owners, int]]:
        return {((unlabelled(place[0]), place[1]), path): found for (place, path), found in self.copies.at.items()}

    def piece(self, place: Place, path: str) -> Piece:
        """Returns the piece of a parameter at a place, whatever its group is called; a `KeyError` if there is none."""
        entries, owners, number = self._pieces[(unlabelled(place[0]), place[1]), path]
        self._taken.add((entries, path))
        return Piece(self._read(entries), owners, number)

    def shared(self, entries: Entries) -> Any:
        """Returns an array that all parameters share; a `KeyError` if there is none."""
        if entries not in self.copies.common:
            raise KeyError(entries)
        self._taken.add(entries)
        return self._read(entries)

    def _read(self, entries: Entries) -> Any:
        name = join_path((*self.at, *entries))
        return as_in_jax(name, _concrete(self.copies.arrays[entries], f" at {name!r}"))

    @functools.cached_property
    def _groups(self) -> dict[tuple[Entries, str], Entries]:
        """The path of the group of each parameter, by this path without labels and the parameter."""
        return {(unlabelled(head), path): head for head, paths in self.members.items() for path in paths}

    def same(self, entries: Entries, path: str) -> Entries:
        """Returns the path of an array with the labels that a parameter's groups have in this state."""
        heads = ((head, self._groups.get((unlabelled(head), path))) for head in labelled_in(entries))
        return next(((*its, *entries[len(head) :]) for head, its in heads if its is not None), entries)

    @functools.cached_property
    def members(self) -> Mapping[Entries, Set[str]]:
        """The parameters in each group that keeps arrays of parameters."""
        return members_in(self.copies)

    def lost(self, used: Set[str], labels: Set[str]) -> Iterator[tuple[Entries, str]]:
        """Yields the arrays that nobody has taken, of used parameters or of groups with these labels.

        With each comes the parameter that it belongs to.
        """
        for (_, path), (entries, *_) in self.copies.at.items():
            if path in used and (entries, path) not in self._taken:
                yield entries, path
        for entries in self.copies.common - self._taken if not used.isdisjoint(self.copies.shapes) else ():
            members = next((its for head in labelled_in(entries) if (its := self.members.get(head))), None)
            is_of_others = members is not None and members.isdisjoint(used)
            if not is_of_others and all(head[-1] in labels for head in labelled_in(entries)):
                yield entries, ""


class OldState(NamedTuple):
    """The histories of an old state; and the path and the history of each name of the plan's source."""

    histories: list[Before]
    of: Mapping[str, tuple[str, Before]]


def old_histories(movers: Movers, source: Any, fresh: Copies) -> OldState:
    """Returns the histories of a state of the plan's source; `fresh` is a fresh state of its rule."""
    if isinstance(source, TrainableState):
        histories, index = _of_state(source), index_of(source.layout)
        specs: Any = dict(zip(index.structure.paths, index.structure.specs, strict=True))
        aliases = {index.structure.paths[tie.leaf]: index.structure.paths[tie.source] for tie in index.ties}
    elif "" in (names := names_of(source)).states:
        words = names.states[""]
        histories, specs = _of_words(names, words), specs_in(words)
        aliases = {alias: path for path, also, *_ in words["slots"] for alias in also}
    elif "counts.0" in names.specs:
        histories, specs, aliases = _restored(movers, names, fresh), movers.source.specs, {}
    else:
        raise ValueError(
            "expected a state of optim.trainable, or the names of one, such as saving.names(path, 'optimiser'); got "
            f"{f'names such as {first_few(list(names)[:3])}' if names else 'no arrays'}. Of a state of plain Optax, "
            "optim.from_optax(tx, state, old_model) makes one"
        )
    at = {name_of(path): (path, history) for history in histories for path in history.copies.shapes}
    own = {name: specs[path] for name, (path, _) in at.items()}
    aliases = {name_of(alias): name_of(path) for alias, path in aliases.items() if name_of(path) in at}
    own |= {alias: own[name] for alias, name in aliases.items()}
    given = with_ties(movers.source, Names(own, lambda name: at[aliases.get(name, name)], aliases))
    check_given(given, movers.source, movers.source.specs.keys() & given.specs, movers.strict, are_wide=True)
    return OldState(histories, given)


def _of_state(state: TrainableState) -> list[Before]:
    """Returns the histories of a state."""
    roles, structure = state.roles, index_of(state.layout).structure
    sides = ("runs", state.runs, roles.running), ("held", state.held, roles.held)
    each = [(side, i, *pair) for side, *both in sides for i, pair in enumerate(zip(*both, strict=True))]
    found = list[Before]()
    for (side, i, run, leaves), division, count in zip(each, roles.divisions, state.counts, strict=True):
        shapes = {structure.paths[leaf]: structure.spec(leaf).shape for leaf in leaves}
        copies = Copies(shapes, entries_of(run), division)
        copies.check()
        found.append(Before((side, str(i)), copies, int(_concrete(count)), waits=side == "held"))
    return found


def _restored(movers: Movers, source: Names, fresh: Copies) -> list[Before]:
    """Returns the histories of a state without its class, as Orbax restores one, by the paths of its arrays."""
    specs, owned = movers.source.specs, dict(fresh.owned())
    places = {owners.place for owners in owned.values() if owners is not None}
    known = {split_name(name): name for name in specs}

    def owners_of(entries: Entries) -> Owners | None:
        for before, after in places:
            own = entries[len(before) : len(entries) - len(after)]
            if entries == (*before, *own, *after) and own in known:
                return Owners((known[own],), (before, after), None, (), False)
        return None

    heads = {split_name(name)[:2] for name in source.specs if head_of(name) in ("runs", "held")}
    counts = [source[name] for i in range(len(source.specs)) if (name := f"counts.{i}") in source.specs]
    is_joined = any(owners is not None and owners.axis is not None for owners in owned.values())
    found = list[Before]()
    for at, count in zip(sorted(heads, key=lambda at: (at[0] == "held", int(at[1]))), counts, strict=False):
        arrays = _Arrays(source, join_path(at))
        its = [owned.get(entries) if is_joined else owners_of(entries) for entries in arrays]
        paths = list(dict.fromkeys(path for owners in its if owners is not None for path in owners.paths))
        if len(counts) == 1 and not is_joined:
            paths = [name for name, spec in specs.items() if spec.parameter and (not paths or name in paths)]
        is_same = {at: array.shape for at, array in fresh.arrays.items()} == {at: arrays[at].shape for at in arrays}
        is_all = set(paths) == {name for name, spec in specs.items() if spec.parameter}
        if paths and (not is_joined or (len(counts) == 1 and is_same and is_all)):
            copies = Copies({path: specs[path].shape for path in paths}, arrays, Division(tuple(its)))
            found.append(Before(at, copies, int(_concrete(count)), waits=at[0] == "held"))
    if len(found) < len(counts):
        raise ValueError(
            "nothing tells which parameters the arrays of the state are of, since they are joined, or since there are "
            "none; restore it into the shapes of a state, jax.eval_shape(lambda: state)"
        )
    return found


def _of_words(source: Names, words: Mapping[str, Any]) -> list[Before]:
    """Returns the histories of a state of a transformation over models."""
    specs, found = specs_in(words), list[Before]()
    for number, (side, path, paths) in enumerate(histories_in(words)):
        arrays = _Arrays(source, path)
        copies = Copies({each: specs[each].shape for each in paths}, arrays, division_in(words, number, arrays))
        copies.check()
        steps = int(_concrete(source[f"counts.{number}"]))
        found.append(Before(split_path(path), copies, steps, waits=side == "held"))
    return found


def _concrete(array: Any, where: str = "") -> Any:
    """Returns an array of a state that has values."""
    if isinstance(array, Tracer):
        raise ValueError("call plan.state between steps, outside of jax.jit: its result depends on the number of steps")
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ValueError(f"the state has no values{where}, where they are needed: expected arrays")
    return array
