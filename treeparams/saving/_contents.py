"""What of a tree is stored: each array once, under its path; ties and the histories of optimisers in words."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._layout import Trainable, index_of
from .._recognise import structure_of
from .._resolve import look_up
from .._structure import Spec
from .._ties import Alias, find_ties
from .._types import PyTree
from .._where import declared_frozen
from ..optim import TrainableState
from ..optim._state import nodes_of
from ._arrays import array_spec, pieces_of, placed


class Contents:
    """A tree as the arrays that are stored, those that are made of them, and what is no array.

    Attributes:
        leaves: all leaves.
        structure: of the tree.
        aliases: of each array that is not stored, what it is of one that is; by leaf.
        names: of all arrays, by leaf. A name is a path.
    """

    def __init__(self, tree: PyTree, trainable: Trainable = None) -> None:
        self.leaves, self.treedef, self.structure = structure_of(tree)
        structure = self.structure
        ties = find_ties(structure) if trainable is None else look_up(structure, trainable)[1].ties
        self.aliases = {alias.leaf: alias for alias in ties}
        arrays = [i for i, spec in enumerate(structure.specs) if spec is not None]
        for i in arrays:  # integers and keys may be one array too
            if structure.first[i] != i and not structure.is_parameter(i):
                self.aliases[i] = Alias(i, structure.first[i], ())
        self.names = {i: name_of(structure.paths[i]) for i in arrays}

    @property
    def stored(self) -> dict[str, int]:
        """The leaves that are stored, by name."""
        return {name: i for i, name in self.names.items() if i not in self.aliases}

    @property
    def ties(self) -> dict[str, tuple[str, str]]:
        """The ties in words: `{alias: (name, transforms)}`."""
        return {self.names[i]: (self.names[alias.source], str(alias)) for i, alias in self.aliases.items()}

    def spec(self, i: int) -> Spec:
        """Shape and dtype in JAX of an array."""
        return array_spec(self.leaves[i])

    def store_what_differs(self) -> None:
        """Has an alias stored by itself that is another array than its source gives, as before `tp.tie`."""
        first = self.structure.first
        for i, alias in [*self.aliases.items()]:
            have, source = self.leaves[i], self.leaves[alias.source]
            if isinstance(have, jax.ShapeDtypeStruct):
                continue
            if alias.transforms or have is not source:
                want = alias.value_from(source, self.structure.spec(alias.source))
                if not _are_same(have, want):
                    del self.aliases[i]
                    if first[i] != i and first[i] not in self.aliases:
                        self.aliases[i] = Alias(i, first[i], ())

    def leaves_with(self, values: Mapping[int, Any]) -> list[Any]:
        """The leaves with these arrays where they are stored, and what follows from them at their aliases."""
        leaves = [values.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        for i, alias in self.aliases.items():
            if alias.source in values:
                value = alias.value_from(leaves[alias.source], self.structure.spec(alias.source))
                leaves[i] = placed(self.names[i], value, self.leaves[i]) if alias.transforms else value
        return leaves

    @functools.cached_property
    def states(self) -> dict[str, TrainableState]:
        """The states of `optim.trainable` and the like, by path."""
        paths = [node.path for node in self.structure.nodes if issubclass(node.cls, TrainableState)]
        states = nodes_of(TrainableState, jtu.tree_unflatten(self.treedef, self.leaves))
        return dict(zip(paths, states, strict=True))

    @functools.cached_property
    def abstract(self) -> frozenset[int]:
        """The arrays without values."""
        return frozenset(i for i in self.names if isinstance(self.leaves[i], jax.ShapeDtypeStruct))

    @property
    def frozen(self) -> frozenset[int]:
        """The parameters that classes declare frozen."""
        return declared_frozen(self.structure)


def name_of(path: str) -> str:
    """A path as a name in the format, which has one of its own."""
    return '"__metadata__"' if path == "__metadata__" else path


def heads_of(names: Collection[str], among: Collection[str]) -> list[str]:
    """The nodes below which all of these names are, as the model in a file of several things."""
    heads = dict.fromkeys(name.partition(".")[0] for name in among)
    return [head for head in heads if names and all(f"{head}.{name}" in among for name in names)]


def state_in_words(state: TrainableState) -> dict[str, Any]:
    """The parameters that a state is of, and which of them have one history."""
    index, roles = index_of(state.layout), state.roles
    paths = index.structure.paths
    known = sorted({i for positions in (*roles.running, *roles.held) for i in positions})
    aliases = lambda i: [paths[alias.leaf] for alias in index.aliases.get(i, ()) if not alias.transforms]
    specs = {i: index.structure.spec(i) for i in known}
    slots = [[paths[i], aliases(i), list(spec.shape), str(spec.dtype)] for i, spec in specs.items()]
    names = lambda histories: [[paths[i] for i in positions] for positions in histories]
    origins = [roles.origins.index(origin) for origin in roles.origins]  # their numbers mean nothing by themselves
    return {"slots": slots, "running": names(roles.running), "held": names(roles.held), "origins": origins}


def histories_in(words: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Where in a state each history is, and its parameters, in the order of the counts."""
    sides = (("runs", words["running"]), ("held", words["held"]))
    return [(f"{side}.{i}", paths) for side, several in sides for i, paths in enumerate(several)]


def specs_in(words: Mapping[str, Any]) -> dict[str, Spec]:
    """The shapes and dtypes of the parameters that a state is said to be of."""
    return {path: Spec(tuple(shape), np.dtype(dtype), True) for path, _, shape, dtype in words["slots"]}


def _are_same(one: Any, other: Any) -> bool:
    """Whether two arrays have the same bits."""
    is_same = (one.shape, one.dtype) == (other.shape, other.dtype)
    return is_same and all(a == b for a, b in zip(pieces_of(one), pieces_of(other), strict=True))
