"""The arrays of a tree to store, each once, under its path; and its numbers, ties and histories in words."""

import collections
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .._files.arrays import placed
from .._files.file import bytes_of
from .._files.names import bare, is_below, name_of, split_name
from .._files.values import Recorded, histories_in, in_words, kind_in_words
from .._forms.restructure import Restructure, halves_of
from .._forms.states import Copies, Division, Entries, Owners, entries_of
from .._slots.layout import Trainable, index_of, look_up
from .._slots.ties import Alias, find_ties
from .._slots.where import declared_frozen
from .._tree.paths import join_path, quote, split_path
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

    @functools.cached_property
    def values(self) -> dict[int, list[str]]:
        """The numbers and texts in words, by leaf."""
        kinds = set(filter(kind_in_words, set(map(type, self.leaves))))  # a model has many leaves, of few types
        return {i: in_words(leaf) for i, leaf in enumerate(self.leaves) if type(leaf) in kinds}

    @functools.cached_property
    def leaf_at(self) -> dict[str, int]:
        """The leaf at each path, with and without quotes, so that you may write a key with dots where it is a name."""
        leaves = {name: i for i, name in self.names.items()}
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
    def states_in_words(self) -> dict[str, dict[str, Any]]:
        """The states of `optim.trainable` in the words of a file, by path."""
        return {path: state_in_words(state) for path, state in self.of_class(TrainableState).items()}

    def of_class(self, cls: type[T]) -> dict[str, T]:
        """Returns the nodes of a class, by path."""
        paths = [node.path for node in self.structure.nodes if issubclass(node.cls, cls)]
        tree = jtu.tree_unflatten(self.treedef, self.leaves) if paths else None
        return dict(zip(paths, nodes_of(cls, tree), strict=True))

    @functools.cached_property
    def in_states(self) -> frozenset[int]:
        """The leaves of these states."""
        nodes = [node for node in self.structure.nodes if issubclass(node.cls, TrainableState)]
        return frozenset(i for node in nodes for i in range(node.start, node.stop))

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
    places = halves_of(restructure).places
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
    copies = Copies(entries_of(run), division)
    # Most arrays of a state have the owners of another one, as Adam's two moments do, so a block is written once, and
    # each array refers to it by number. The entries before and after are a part of the array's own path: their number
    # is enough.
    blocks, owned = dict[Any, int](), dict[str, list[Any]]()
    for entries, owners in [] if copies.problem else copies.owned():
        if owners is not None:
            starts = () if owners.axis is None else tuple(owners.block.starts)
            block = tuple([numbers[path] for path in owners.paths]), starts, owners.block.has_rows
            number = blocks.setdefault(block, len(blocks))
            owned[join_path(entries)] = [number, *map(len, owners.place), owners.axis]
    return {"blocks": list(blocks), "owners": owned, "problem": copies.problem}


def recorded_in(words: Any, arrays: Mapping[str, Any], start: str = "") -> Iterator[tuple[Recorded, Copies]]:
    """Yields the histories of a state, each with its arrays and their parameters.

    Args:
        words: those of the state.
        arrays: its arrays, or others in their place, by name.
        start: the text before all names of the state.
    """
    for said in histories_in(words):
        division, at = words["divisions"][said.number], start + said.path
        owned, found, owners = dict[Entries, tuple[Entries, Owners]](), dict[Entries, Any](), list[Owners | None]()
        for path, (block, before, after, axis) in division["owners"].items():
            entries, (slots, _, has_rows) = split_path(path), division["blocks"][block]
            place, its = (entries[:before], entries[len(entries) - after :]), [words["slots"][slot] for slot in slots]
            paths, shapes = [slot[0] for slot in its], [tuple(slot[2]) for slot in its]
            owned[entries] = known = entries, Owners.of(paths, place, axis, shapes, has_rows)
            if axis is None:  # a node that only wraps one value, such as a variable of Flax, has no entry in a name
                owned.setdefault((*place[0], *split_path(paths[0]), *place[1]), known)
        for name in [name for name in arrays if is_below(name, at)]:
            named = split_name(name[len(at) + 1 :])
            entries, its = owned.get(named, (named, None))
            found[entries] = arrays[name]
            owners.append(its)
        yield said, Copies(found, Division(tuple(owners), division["problem"]))
