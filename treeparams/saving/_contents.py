"""The arrays of a tree to store, each once, under its path; and its numbers, ties and histories in words."""

import collections
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .._files.arrays import placed
from .._files.file import bytes_of
from .._files.names import bare, name_of
from .._files.values import in_words, kind_in_words
from .._forms.restructure import Restructure, known_leaves
from .._forms.states import Division, Entries, Owners, entries_of
from .._slots.layout import Trainable, index_of, look_up
from .._slots.ties import Alias, find_ties
from .._slots.where import declared_frozen
from .._tree.paths import join_path, quote
from .._tree.structure import structure_of
from .._tree.types import PyTree, copy_leaf, value_of
from ..optim._state import TrainableState, nodes_of

T = TypeVar("T")


class Contents:
    """A tree, split into the arrays to store, arrays that follow from these, and other leaves.

    Attributes:
        leaves: all leaves, refs by their values.
        structure: the structure of the tree.
        aliases: for each array that is not stored, how it follows from one that is; by leaf.
        names: the names of all arrays, by leaf. A name is a path.
    """

    def __init__(self, tree: PyTree, trainable: Trainable = None) -> None:
        leaves, self.treedef, self.structure = structure_of(tree)
        structure = self.structure
        self._refs = {i: leaves[i] for i in structure.refs}
        self.leaves = list(map(value_of, leaves)) if self._refs else leaves
        ties = find_ties(structure) if trainable is None else look_up(structure, trainable)[1].ties
        # Identity ties trained parameters, and nothing else: any other array is written and read at its own path.
        apart = self.in_states | (self.frozen if ties and trainable is None else frozenset())
        self.aliases = {each.leaf: each for each in ties if each.is_said or apart.isdisjoint((each.leaf, each.source))}
        arrays = [i for i, spec in enumerate(structure.specs) if spec is not None]
        self.names = {i: name_of(structure.paths[i]) for i in arrays}

    @property
    def stored(self) -> dict[str, int]:
        """The leaves to store, by name."""
        return {name: i for i, name in self.names.items() if i not in self.aliases}

    @property
    def ties(self) -> dict[str, tuple[str, str]]:
        """The ties in words: `{alias: (name, transforms)}`."""
        return {self.names[i]: (self.names[alias.source], str(alias)) for i, alias in self.aliases.items()}

    @functools.cached_property
    def values(self) -> dict[int, list[str]]:
        """The numbers and texts in words, by leaf."""
        kinds = set(filter(kind_in_words, set(map(type, self.leaves))))  # a model has many leaves, of few types
        return {i: in_words(leaf) for i, leaf in enumerate(self.leaves) if type(leaf) in kinds}

    @functools.cached_property
    def leaf_at(self) -> dict[str, int]:
        """The leaf at each path, with and without quotes, so that you may write a key with dots where it is a name."""
        leaves = {name: i for i, name in self.names.items()}
        # Older files, and dictionaries, have numbers where a state of Equinox has names here.
        leaves |= {join_path(entries): i for i, entries in self.structure.numbered.items() if i in self.names}
        count = collections.Counter(map(bare, leaves))
        return {text: i for name, i in leaves.items() if count[text := bare(name)] == 1} | leaves

    @functools.cached_property
    def short_names(self) -> dict[int, str]:
        """The names that you write in `rename`, by leaf: without quotes where `rename` understands that."""
        short = {i: bare(name) for i, name in self.names.items() if '"' in name}
        is_read = {i: all(quote(entry) == entry for entry in text.split(".")) for i, text in short.items()}
        return self.names | {i: text for i, text in short.items() if self.leaf_at.get(text) == i and is_read[i]}

    def store_what_differs(self) -> None:
        """Stores an alias separately if it is another array than its source gives, as before `tp.tie`."""
        first = self.structure.first
        for i, alias in [*self.aliases.items()]:
            have, source = self.leaves[i], self.leaves[alias.source]
            if isinstance(have, (jax.ShapeDtypeStruct, Tracer)) or (have is source and not alias.transforms):
                continue
            want = alias.value_from(source, self.structure.spec(alias.source))
            is_same = (have.shape, have.dtype) == (want.shape, want.dtype)
            if is_same and np.array_equal(bytes_of(have), bytes_of(want)):
                continue
            del self.aliases[i]
            # It may still be the same array as at another path. Then that one is stored for both.
            if first[i] != i and first[i] not in self.aliases:
                self.aliases[i] = Alias(i, first[i], ())

    def leaves_with(self, values: Mapping[int, Any]) -> list[Any]:
        """Returns the leaves with these values for stored arrays, and with the arrays that follow for their aliases."""
        leaves = [values.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        for i, alias in self.aliases.items():
            if alias.source in values:
                value = alias.value_from(leaves[alias.source], self.structure.spec(alias.source))
                leaves[i] = placed(self.names[i], value, self.leaves[i]) if alias.transforms else value
                if i in self.in_states:  # of a file that has a shared array of a state once; a donated one is its own
                    leaves[i] = copy_leaf(leaves[i])
        return leaves

    def tree(self, leaves: Sequence[Any]) -> PyTree:
        """Returns the tree of these leaves. Values that differ from those of the tree's refs are written into these."""
        for i, ref in self._refs.items():
            if leaves[i] is not self.leaves[i]:
                ref[...] = leaves[i]
        return jtu.tree_unflatten(self.treedef, [self._refs.get(i, leaf) for i, leaf in enumerate(leaves)])

    @functools.cached_property
    def states(self) -> dict[str, TrainableState]:
        """The states of `optim.trainable` and similar functions, by path."""
        return self._of_class(TrainableState)

    @functools.cached_property
    def states_in_words(self) -> dict[str, dict[str, Any]]:
        """These states in the words of a file, by path."""
        return {path: state_in_words(state) for path, state in self.states.items()}

    @property
    def ways_back(self) -> dict[str, Restructure[Any]]:
        """The `Restructure`s of vectors and stacks, by path."""
        return self._of_class(Restructure)

    def _of_class(self, cls: type[T]) -> dict[str, T]:
        paths = [node.path for node in self.structure.nodes if issubclass(node.cls, cls)]
        tree = jtu.tree_unflatten(self.treedef, self.leaves) if paths else None
        return dict(zip(paths, nodes_of(cls, tree), strict=True))

    @functools.cached_property
    def in_states(self) -> frozenset[int]:
        """The leaves of these states."""
        spans = [range(node.start, node.stop) for node in self.structure.nodes if issubclass(node.cls, TrainableState)]
        return frozenset(i for span in spans for i in span)

    @functools.cached_property
    def abstract(self) -> frozenset[int]:
        """The arrays without values."""
        return frozenset(i for i in self.names if isinstance(self.leaves[i], jax.ShapeDtypeStruct))

    @functools.cached_property
    def frozen(self) -> frozenset[int]:
        """The parameters that classes declare frozen."""
        return declared_frozen(self.structure)


# -- In the words of a file --------------------------------------------------------------------------------------------


def places_in_words(restructure: Restructure[Any]) -> dict[str, Any]:
    """Returns the place and the shape of each parameter in the vector or the stacks that `restructure` opens."""
    places = known_leaves(restructure)[2]
    return {slot.path: [places[slot.path], list(slot.shape)] for slot in restructure.layout.slots}


def state_in_words(state: TrainableState, *, is_divided: bool = True) -> dict[str, Any]:
    """Returns the parameters of a state, their histories, and the parameters that each array belongs to, in words.

    These take longest, and are left out unless `is_divided`.
    """
    index, roles = index_of(state.layout), state.roles
    paths, spec = index.structure.paths, index.structure.spec
    slots = []
    for i in sorted({i for positions in (*roles.running, *roles.held) for i in positions}):
        aliases = [paths[alias.leaf] for alias in index.aliases.get(i, ()) if not alias.transforms]
        slots.append([paths[i], aliases, list(spec(i).shape), str(spec(i).dtype)])
    numbers = {path: number for number, (path, *_) in enumerate(slots)}
    pairs = zip((*state.runs, *state.held), roles.divisions, strict=True) if is_divided else ()
    return {
        "slots": slots,
        "running": [[paths[i] for i in positions] for positions in roles.running],
        "held": [[paths[i] for i in positions] for positions in roles.held],
        "tied": {paths[tie.leaf]: paths[tie.source] for tie in index.ties if not tie.transforms},  # frozen ones, too
        "divisions": [_division_in_words(run, division, numbers) for run, division in pairs],
    }


def _division_in_words(run: PyTree, division: Division, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Returns the owners of each array by its path.

    The owners are a block of parameters, the numbers of entries before and after it, and an axis. Arrays that all
    parameters share are left out.
    """
    arrays, problem = entries_of(run), division.problem
    if not problem and len(arrays) != len(division.owners):
        problem = "the state was changed since its transformation made it: it has other arrays"
    # Most arrays of a state have the owners of another one, as Adam's two moments do, so a block is written once, and
    # each array refers to it by number. The entries before and after are a part of the array's own path: their number
    # is enough.
    blocks, owned = dict[Any, int](), dict[str, list[Any]]()
    for entries, owners in [] if problem else zip(arrays, division.owners, strict=True):
        if owners is not None:
            starts = () if owners.axis is None else tuple(owners.block.starts)
            block = tuple([numbers[path] for path in owners.paths]), starts, owners.block.has_rows
            number = blocks.setdefault(block, len(blocks))
            owned[join_path(entries)] = [number, *map(len, owners.place), owners.axis]
    return {"blocks": list(blocks), "owners": owned, "problem": problem}


def division_in(words: Mapping[str, Any], number: int, arrays: Collection[Entries]) -> Division:
    """Returns the owners of each of these arrays of a history."""
    said = words["divisions"][number]

    def owners_of(entries: Entries) -> Owners | None:
        its = said["owners"].get(join_path(entries))
        if its is None:
            return None
        block, before, after, axis = its
        slots, _, has_rows = said["blocks"][block]
        place = entries[:before], entries[len(entries) - after :]
        its = [words["slots"][slot] for slot in slots]
        return Owners.of([path for path, *_ in its], place, axis, [tuple(shape) for _, _, shape, _ in its], has_rows)

    return Division(tuple(map(owners_of, arrays)), said["problem"])
