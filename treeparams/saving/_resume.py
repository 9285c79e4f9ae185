"""Gives a state of an optimiser the histories that a file has, so that the file can be loaded into it.

The rule's `init` shows the shape of its states. The file says which histories there are, of which parameters, and
which of them train. So calls of `optim.set_trainable` before the save need not be repeated, and it does not matter
which parameters `init` trains: the parts of a state that copy the parameters are made for those of the file.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
import optax

from .._files.names import is_below, split_name
from .._files.words import histories_in, specs_in
from .._forms.form import tree_of
from .._forms.states import Division, Entries, Owners, entries_of
from .._slots.index import Index
from .._slots.layout import Layout, index_of, trained_at
from .._slots.ties import Alias
from .._tree.paths import join_path, key_entries, split_path, unquote
from .._tree.structure import Spec, is_array
from .._tree.types import PyTree, is_inexact
from ..optim._state import Roles, TrainableState
from ._contents import division_in, state_in_words

Stored = Mapping[Entries, Spec]
"""Arrays of a file as shapes and dtypes, by the entries of their names below some node."""


def with_histories(tree: PyTree, states: Mapping[str, Any], specs: Mapping[str, Spec]) -> PyTree:
    """Returns a tree whose states have the histories that these words describe; new arrays are shapes.

    A state stays as it is if it has these histories, and if the words are of another model or of another form.
    """
    nodes, treedef = jtu.tree_flatten_with_path(tree, is_leaf=_is_state)
    if not any(_is_state(node) for _, node in nodes):
        return tree
    made = list[Any]()
    for keys, node in nodes:
        path = join_path(key_entries(keys))
        words = states.get(path) if _is_state(node) else None
        made.append(node if words is None else _with_histories(node, words, specs, path))
    return jtu.tree_unflatten(treedef, made)


def _is_state(node: object) -> bool:
    return isinstance(node, TrainableState)


def _below(specs: Mapping[str, Spec], path: str) -> Stored:
    depth = len(split_path(path))
    return {split_name(name)[depth:]: spec for name, spec in specs.items() if not path or is_below(name, path)}


def _with_histories(
    state: TrainableState, words: Mapping[str, Any], specs: Mapping[str, Spec], path: str
) -> TrainableState:
    roles, structure, here = state.roles, index_of(state.layout).structure, state_in_words(state)
    known = dict(zip(structure.paths, structure.specs, strict=True))
    if together(here) == together(words) or not specs_in(words).items() <= known.items():
        return state
    runs = zip((*state.runs, *state.held), (*roles.running, *roles.held), roles.divisions, strict=True)
    run, positions, division = max(runs, key=lambda each: len(each[1]), default=(None, (), None))
    if division is None or division.problem or form_of(here) != form_of(words):
        return state
    whole, start = _tied(state, words), f"{path}." if path else ""
    sides: dict[str, list[Any]] = {"runs": [], "held": []}
    places: dict[str, list[Any]] = {"runs": [], "held": []}
    divisions = list[Division]()
    for number, history in enumerate(histories_in(words)):
        its = _below(specs, start + history.path)
        owners = dict(zip(its, division_in(words, number, its).owners, strict=True))
        leaves = tuple([structure.index[path] for path in history.parameters])
        both = trained_at(state.layout, positions), trained_at(whole, leaves)
        made = _History(*both, dict(zip(entries_of(run), division.owners, strict=True)), its, owners).like(run, ())
        divisions.append(Division(tuple(map(owners.get, entries_of(made)))))
        sides[history.side].append(made)
        places[history.side].append(leaves)
    layout = trained_at(whole, [leaf for leaves in places["runs"] for leaf in leaves])
    counts = tuple([jax.ShapeDtypeStruct((), np.dtype("int32")) for _ in divisions])
    roles = Roles(layout, tuple(places["runs"]), tuple(places["held"]), tuple(divisions))
    still = specs.get(f"{start}still")
    return dataclasses.replace(
        state,
        runs=tuple(sides["runs"]),
        held=tuple(sides["held"]),
        counts=counts,
        roles=roles,
        still=state.still if still is None or not isinstance(state.still, tuple) else jax.ShapeDtypeStruct(*still[:2]),
    )


def _tied(state: TrainableState, words: Mapping[str, Any]) -> Layout:
    """Returns the layout of a state; of a state of shapes, which shows no ties by identity, with those of the file."""
    index, first = index_of(state.layout), next(iter(jax.tree.leaves(state.runs)), None)
    at = index.structure.index
    pairs = [(at[alias], at[path]) for alias, path in words.get("tied", {}).items() if {alias, path} <= at.keys()]
    new = [Alias(alias, source, ()) for alias, source in pairs if alias not in index.sources]
    if not new or not isinstance(first, jax.ShapeDtypeStruct):
        return state.layout
    return Layout(Index(index.structure, index.trained, tuple(sorted([*index.ties, *new], key=lambda tie: tie[1::-1]))))


@dataclasses.dataclass(frozen=True, eq=False)
class _History:
    """A history of a file, and a state of its rule for other parameters.

    Attributes:
        before, after: the parameters of that state, and of the history.
        shown: the owners of each array of that state.
        stored: the arrays of the history.
        owners: the owners of each of these.
    """

    before: Layout
    after: Layout
    shown: Mapping[Entries, Owners | None]
    stored: Stored
    owners: Mapping[Entries, Owners | None]

    @functools.cached_property
    def _nodes(self) -> set[Entries]:
        """The nodes that have arrays in the file."""
        return {entries[:end] for entries in self.stored for end in range(len(entries) + 1)}

    @functools.cached_property
    def _trees(self) -> set[Entries]:
        """The nodes that are copies of the canonical tree."""
        return {owners.place[0] for owners in self.owners.values() if owners is not None and owners.axis is None}

    @functools.cached_property
    def _blocks(self) -> dict[Entries, dict[str, None]]:
        """The nodes that are dictionaries of joined arrays, and their keys."""
        found = dict[Entries, dict[str, None]]()
        for entries, owners in self.owners.items():
            if owners is not None and owners.axis is not None:
                start, end = len(owners.place[0]), len(entries) - len(owners.place[1])
                for at in range(start, end):  # groups of stacks are dictionaries of these
                    found.setdefault(entries[:at], {})[entries[at]] = None
        return found

    def like(self, node: PyTree, at: Entries) -> PyTree:
        """Returns the node of the history at some entries, like the one of the state; new arrays are shapes."""
        if at in self._trees:
            return self._tree(node, at)
        if self.owners.get(at) is not None:  # vectors of several dtypes are a dictionary, and one vector is bare
            return self._array(next(iter(jax.tree.leaves(node)), node), at)
        pairs, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)
        if at in self._blocks:
            there = {"".join(key_entries(keys)): child for keys, child in pairs}
            children = {key: self._like_one(there, key, at) for key in sorted(self._blocks[at])}
            made = {unquote(key): child for key, child in children.items()}
            return type(node)(made) if isinstance(node, dict) else made
        if not treedef.num_leaves or pairs[0][0] == ():
            return self._array(node, at)
        return treedef.unflatten([self.like(child, (*at, *key_entries(keys))) for keys, child in pairs])

    def _tree(self, node: PyTree, at: Entries) -> PyTree:
        """Returns a copy of the canonical tree of the history's parameters."""
        before, after = tree_of(self.before), tree_of(self.after)
        there = dict(zip(before.entries, before.treedef.flatten_up_to(node), strict=True))
        nothing = optax.MaskedNode() if "inner_states" in at else None  # a parameter of another group
        made = [self._like_one(there, e, at) if (*at, *e) in self._nodes else nothing for e in after.entries]
        return after.treedef.unflatten(made)

    def _like_one(self, there: Mapping[Any, PyTree], key: Any, at: Entries) -> PyTree:
        """Returns the node below a key, like that of the state or like one beside it."""
        some = next((node for node in there.values() if jax.tree.leaves(node)), None)
        return self.like(there.get(key, some), (*at, *(key if isinstance(key, tuple) else (key,))))

    def _array(self, leaf: Any, at: Entries) -> Any:
        """Returns an array of the state if that of the file is like it; nothing if it is of other parameters."""
        spec, owners, shown = self.stored.get(at), self.owners.get(at), self.shown.get(at)
        if spec is None:
            is_ours = shown is None or not set(shown.paths).isdisjoint(self.after.paths)
            return leaf if is_ours or not is_array(leaf) else None
        shape, dtype = spec.shape, spec.dtype
        if shown is not None and owners is not None and is_array(leaf):
            # A rule that keeps other arrays is an error later: so only what the parameters change follows the file.
            shape = list(leaf.shape)
            if owners.axis is not None:
                shape[owners.axis : owners.axis + 1] = spec.shape[owners.axis : owners.axis + 1]
            dtype = spec.dtype if is_inexact(leaf.dtype) and is_inexact(spec.dtype) else leaf.dtype
        if is_array(leaf) and (leaf.shape, leaf.dtype) == (tuple(shape), dtype):
            return leaf
        return np.empty(shape, dtype) if isinstance(leaf, np.ndarray) else jax.ShapeDtypeStruct(tuple(shape), dtype)


# -- Words of two states -----------------------------------------------------------------------------------------------


def form_of(words: Mapping[str, Any]) -> str:
    """Returns the form of a state, as `optim.trainable` calls it."""
    # The key of a joined array tells: that of a stack has a shape, and a vector has none, or a dtype alone. Its pieces
    # do not, since a vector of scalars is cut into rows too.
    keys = set[Entries]()
    for said in words["divisions"]:
        for name, (_, before, after, axis) in said["owners"].items():
            if axis is not None:
                entries = split_path(name)
                keys.add(entries[before : len(entries) - after])
    if not keys:
        return "tree"
    return "stacks" if all(key and key[-1].endswith(']"') for key in keys) else "vector"


def together(words: Mapping[str, Any]) -> tuple[dict[str, Spec], set[tuple[str, ...]]]:
    """Returns the parameters of a state, and those of each history."""
    return specs_in(words), {history.key for history in histories_in(words)}
