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
from .._files.values import histories_in, specs_in
from .._forms.form import tree_of
from .._forms.states import Division, Entries, Owners, entries_of
from .._slots.index import Index
from .._slots.layout import Layout, index_of, trained_at
from .._slots.ties import Alias
from .._tree.paths import join_path, key_entries, quote, split_path, unquote
from .._tree.structure import Spec, is_array
from .._tree.types import PyTree, is_inexact
from ..optim._groups import Group, GroupsState
from ..optim._state import Roles, TrainableState
from ._contents import division_in, state_in_words

Stored = Mapping[Entries, Any]
"""Arrays as shapes and dtypes, by the entries of their names below some node."""


def with_histories(tree: PyTree, states: Mapping[str, Any], specs: Mapping[str, Spec]) -> PyTree:
    """Returns a tree whose states have the histories that these words describe; new arrays are shapes.

    A state stays as it is if it has these histories, and if the words are of another model or of another form.
    """
    if not states:
        return tree
    nodes, treedef = jtu.tree_flatten_with_path(tree, is_leaf=_is_state)
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
        made, divided = like_history(run, division, both, its, owners)
        divisions.append(divided)
        sides[history.side].append(made)
        places[history.side].append(leaves)
    layout = trained_at(whole, [leaf for leaves in places["runs"] for leaf in leaves])
    counts = tuple([jax.ShapeDtypeStruct((), np.dtype("int32")) for _ in divisions])
    roles = Roles(layout, tuple(places["runs"]), tuple(places["held"]), tuple(divisions))
    still: Any = specs.get(f"{start}still", ())
    if still and isinstance(state.still, tuple):
        still = jax.ShapeDtypeStruct(*still[:2])
    elif still:
        still = state.still
    return dataclasses.replace(
        state,
        runs=tuple(sides["runs"]),
        held=tuple(sides["held"]),
        counts=counts,
        roles=roles,
        still=still,
    )


def _tied(state: TrainableState, words: Mapping[str, Any]) -> Layout:
    """Returns the layout of a state; of a state of shapes, which shows no ties by identity, with those of the file."""
    index, first = index_of(state.layout), next(iter(jax.tree.leaves(state.runs)), None)
    at = index.structure.index
    pairs = [(at[alias], at[path]) for alias, path in words.get("tied", {}).items() if {alias, path} <= at.keys()]
    new = [Alias(alias, source, ()) for alias, source in pairs if alias not in index.sources]
    if not new or not isinstance(first, jax.ShapeDtypeStruct):
        return state.layout
    ties = sorted([*index.ties, *new], key=lambda tie: (tie.source, tie.leaf))
    return Layout(Index(index.structure, index.trained, tuple(ties)))


def like_history(
    run: PyTree,
    division: Division,
    layouts: tuple[Layout, Layout],
    stored: Stored,
    owners: Mapping[Entries, Owners | None],
) -> tuple[PyTree, Division]:
    """Returns a state of a rule for other parameters, with shapes for new arrays, and its division.

    Args:
        run: a state of the rule.
        division: the owners of its arrays.
        layouts: of its parameters, and of the others.
        stored: the arrays that the result has.
        owners: the owners of each of these.
    """
    shown = dict(zip(entries_of(run), division.owners, strict=True))
    made = _History(*layouts, shown, stored, owners).like(run, ())
    return made, Division(tuple(map(owners.get, entries_of(made))))


@dataclasses.dataclass(frozen=True, eq=False)
class _History:
    """A history, and a state of its rule for other parameters.

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
    def _copies(self) -> tuple[set[Entries], set[Entries]]:
        """The nodes that are copies of the canonical tree, and those in which arrays are joined."""
        known = {each for each in (*self.shown.values(), *self.owners.values()) if each is not None}
        joined = {each.place[0] for each in known if each.axis is not None}
        return {each.place[0] for each in known} - joined, joined

    @functools.cached_property
    def _keys(self) -> set[Entries]:
        """The keys of the joined arrays of the history, such as a group and a shape."""
        return _keys_in(self.owners)

    @functools.cached_property
    def _keys_of_others(self) -> set[Entries]:
        """Those of the state."""
        return _keys_in(self.shown)

    @functools.cached_property
    def _alone(self) -> set[str]:
        owned = {path for owners in self.owners.values() if owners for path in owners.paths}
        return {quote(slot.key) for slot in self.after.slots if slot.path not in owned}

    def _is_alone(self, key: Entries) -> bool:
        """Returns whether a stack is one of parameters for which the rule keeps nothing."""
        return key[-1] in self._alone and key not in self._keys_of_others

    def like(self, node: PyTree, at: Entries) -> PyTree:
        """Returns the node of the history at some entries, like the one of the state; new arrays are shapes."""
        trees, joined = self._copies
        if at in trees:
            return self._tree(node, at)
        if at in joined:
            return self._joined(node, at)
        pairs, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)
        if not treedef.num_leaves or pairs[0][0] == ():
            return self._array(node, at)
        made = treedef.unflatten([self.like(child, (*at, *key_entries(keys))) for keys, child in pairs])
        return dataclasses.replace(made, groups=self._groups(made, at)) if isinstance(made, GroupsState) else made

    def _groups(self, node: GroupsState, at: Entries) -> tuple[Group, ...]:
        """Returns the groups of a node, each with the parameters or the stacks of the history that its rule sees."""
        found = list[Group]()
        for group in node.groups:
            head = *at, "inner_states", quote(group.name)
            its = {
                entries: each for entries, each in self.owners.items() if each and each.place[0][: len(head)] == head
            }
            stacks = {join_path(key) for key in _keys_in(its)}
            stacks |= {path for path in group.paths if self._is_alone(split_path(path))}
            own = stacks.union(group.paths, *(each.paths for each in its.values()))
            paths = sorted(stacks) if self._keys_of_others else self.after.paths
            found.append(Group(group.name, tuple(filter(own.__contains__, paths))))
        return tuple(found)

    def _tree(self, node: PyTree, at: Entries) -> PyTree:
        """Returns a copy of the canonical tree of the history's parameters."""
        before, after = tree_of(self.before), tree_of(self.after)
        there = dict(zip(before.entries, before.treedef.flatten_up_to(node), strict=True))
        return after.treedef.unflatten([self._like_one(there, entries, at) for entries in after.entries])

    def _joined(self, node: PyTree, at: Entries, below: Entries = ()) -> PyTree:
        """Returns the joined arrays with these keys: one vector, or dictionaries of vectors or stacks."""
        if () in self._keys:
            return self._array(next(iter(jax.tree.leaves(node)), node), at)
        there = {quote(key): child for key, child in node.items()} if isinstance(node, dict) else {}
        has_groups = any(len(key) > len(below) + 1 for key in self._keys_of_others)
        first = {key[len(below)] for key in self._keys if key[: len(below)] == below}
        made = dict[str, Any]()
        for key in sorted(first | there.keys()):
            child = there.get(key)
            if has_groups and (key in first or type(child) is dict):
                made[unquote(key)] = self._joined(child, (*at, key), (*below, key))
            elif key in first:
                made[unquote(key)] = self._like_one(there, (key,), at)
            elif not jax.tree.leaves(child) and self._is_alone((*below, key)):
                made[unquote(key)] = child
        return type(node)(made) if isinstance(node, dict) else made

    def _like_one(self, there: Mapping[Any, PyTree], key: Any, at: Entries) -> PyTree:
        """Returns the node below a key, like that of the state or like one beside it."""
        known = {each if isinstance(each, tuple) else (each,): node for each, node in there.items()}
        is_kept = (*at, *key) in self._nodes
        others = [node for node in known.values() if bool(jax.tree.leaves(node)) is is_kept and node is not None]
        # A rule of a part has a node without arrays for a parameter of another part.
        nothing = optax.MaskedNode() if "inner_states" in at else None
        node = known[key] if known.get(key) is not None else next(iter(others), None if is_kept else nothing)
        return self.like(node, (*at, *key)) if is_kept else node

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


def _keys_in(owners: Mapping[Entries, Owners | None]) -> set[Entries]:
    pairs = [(entries, each.place) for entries, each in owners.items() if each and each.axis is not None]
    return {entries[len(place[0]) : len(entries) - len(place[1])] for entries, place in pairs}


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
