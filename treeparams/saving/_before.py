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
from .._files.names import Names, is_below, key_of, name_of, split_name
from .._files.words import histories_in, specs_in
from .._forms.states import Copies, Entries, Owners, Piece, Place
from .._tree.paths import nearest, split_path
from .._tree.text import describe, first_few
from .._tree.types import Array
from ._contents import division_in
from ._movers import Movers

_TRACED = "call plan.state between steps, outside of jax.jit: its result depends on the number of steps"


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


class Arrays(Mapping[Entries, Any]):
    """The arrays of a history by the rest of their names, each read once, when you access it."""

    def __init__(self, source: Names, path: str = "") -> None:
        depth = len(split_path(path))
        names = [name for name in source.specs if not path or is_below(name, path)]
        self._names = {split_name(name)[depth:]: name for name in names}
        self._source = source
        self._read = functools.cache(self._from_source)

    def __getitem__(self, entries: Entries) -> Any:
        return self._read(self._names[entries])

    def __iter__(self) -> Iterator[Entries]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _from_source(self, name: str) -> Any:
        array = self._source[name]
        if isinstance(array, Tracer):
            raise ValueError(_TRACED)
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(f"the state has no values at {name!r}, where they are needed: expected arrays")
        return as_in_jax(name, array)


@dataclasses.dataclass(frozen=True, eq=False)
class Before:
    """A history of the old state."""

    at: Entries  # where it is in the state
    copies: Copies
    steps: int
    waits: bool

    @functools.cached_property
    def _pieces(self) -> dict[tuple[Place, str], tuple[Entries, Owners, int]]:
        return {((unlabelled(place[0]), place[1]), path): found for (place, path), found in self.copies.at.items()}

    def piece(self, place: Place, path: str) -> Piece:
        """Returns the piece of a parameter at a place, whatever its group is called; a `KeyError` if there is none."""
        entries, owners, number = self._pieces[(unlabelled(place[0]), place[1]), path]
        return Piece(self.copies.arrays[entries], owners, number)

    @functools.cached_property
    def _groups(self) -> dict[tuple[Entries, str], Entries]:
        """The path of the group of each parameter, by this path without labels and the parameter."""
        return {(unlabelled(head), path): head for head, paths in self._members.items() for path in paths}

    def same(self, entries: Entries, path: str) -> Entries:
        """Returns the path of an array with the labels that a parameter's groups have in this state."""
        heads = ((head, self._groups.get((unlabelled(head), path))) for head in labelled_in(entries))
        return next(((*its, *entries[len(head) :]) for head, its in heads if its is not None), entries)

    @functools.cached_property
    def _members(self) -> Mapping[Entries, Set[str]]:
        return members_in(self.copies)

    def is_of_others(self, entries: Entries, paths: Set[str]) -> bool:
        """Returns whether an array belongs to a group that has none of these parameters."""
        members = [its for head in labelled_in(entries) if (its := self._members.get(head))]
        return bool(members) and members[0].isdisjoint(paths)


class Source(NamedTuple):
    """The histories of an old state; and the path and the history of each name of the plan's source."""

    histories: list[Before]
    of: dict[str, tuple[str, Before]]


def histories_before(movers: Movers, source: Names) -> Source:
    """Returns the histories of a state of the plan's source."""
    words = source.states.get("")
    if words is None:
        names = first_few(list(source)[:3])
        raise ValueError(
            "expected a state of optim.trainable, or the names of one, such as saving.names(path, 'optimiser'); got "
            f"{f'names such as {names}' if names else 'no arrays'}. Of a state of plain Optax, "
            "optim.from_optax(tx, state, old_model) makes one"
        )
    histories, aliases = _of_words(source, words), {path: also for path, also, *_ in words["slots"]}
    found, also = dict[str, tuple[str, Before]](), dict[str, tuple[str, Before]]()
    for history in histories:
        for path, shape in history.copies.shapes.items():
            names = [name for name in (name_of(path), path, key_of(path)) if name in movers.specs]
            if not names:
                raise ValueError(
                    f"the state has {path!r}, but the plan's source has no such name{nearest(path, movers.specs)}; "
                    "make the plan from the model that the state belongs to"
                )
            spec = movers.specs[names[0]]
            if spec.shape != tuple(shape):
                raise ValueError(
                    f"the state has a parameter of shape {tuple(shape)} at {path!r}, but the plan's source has "
                    f"{describe(spec)} there; make the plan from the model that the state belongs to"
                )
            found[names[0]] = path, history
            also |= dict.fromkeys(aliases.get(path, ()), (path, history))
    return Source(histories, _with_ties(movers, also | found))


def _with_ties(movers: Movers, found: dict[str, tuple[str, Before]]) -> dict[str, tuple[str, Before]]:
    """Gives each name without a history that of its tie."""
    of_roots = {movers.roots.get(name, name): its for name, its in reversed(found.items())}
    every = {name: of_roots.get(movers.roots.get(name, name)) for name in movers.specs}
    return {name: its for name, its in every.items() if its is not None} | found


def _of_words(source: Names, words: Mapping[str, Any]) -> list[Before]:
    """Returns the histories of a state of a transformation over models."""
    specs, found = specs_in(words), list[Before]()
    for number, (side, path, paths) in enumerate(histories_in(words)):
        arrays = Arrays(source, path)
        copies = Copies({each: specs[each].shape for each in paths}, arrays, division_in(words, number, arrays))
        copies.check()
        steps = _steps(source[f"counts.{number}"])
        found.append(Before(split_path(path), copies, steps, waits=side == "held"))
    return found


def _steps(count: Array | jax.ShapeDtypeStruct) -> int:
    """Returns the number of steps that a history has taken."""
    if isinstance(count, Tracer):
        raise ValueError(_TRACED)
    if isinstance(count, jax.ShapeDtypeStruct):
        raise ValueError("the state has no values: expected arrays, got jax.ShapeDtypeStructs")
    return int(count)
