"""Gives a state of an optimiser the histories that a file has, so that the file can be loaded into it.

The rule's `init` shows the shape of its states. The file says which histories there are, of which parameters, and
which of them train. So calls of `optim.set_trainable` before the save need not be repeated, and it does not matter
which parameters `init` trains: the parts of a state that copy the parameters are made for those of the file.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
import optax

from .._files.file import File
from .._files.values import histories_in, specs_in
from .._forms.form import Form
from .._forms.states import Copies, Division, Entries, Owners, entries_of
from .._slots.index import Index
from .._slots.layout import Layout, index_of, trained_at
from .._slots.ties import Alias
from .._tree.paths import join_path, key_entries, quote, split_path, unquote
from .._tree.structure import is_array
from .._tree.text import first_few
from .._tree.types import PyTree, is_inexact
from ..optim._groups import GroupsState
from ..optim._state import History, TrainableState, state_of
from ._contents import recorded_in, state_in_words


def with_histories(tree: PyTree, file: File) -> PyTree:
    """Returns a tree whose states have the histories that a file describes; new arrays are shapes.

    A state stays as it is if it has these histories, and if the file's is of another model.
    """
    if not file.words["states"]:
        return tree

    def with_its_own(keys: jtu.KeyPath, node: Any) -> Any:
        path = join_path(key_entries(keys))
        is_known = isinstance(node, TrainableState) and path in file.words["states"]
        return _with_histories(node, file, path) if is_known else node

    return jtu.tree_map_with_path(with_its_own, tree, is_leaf=lambda node: isinstance(node, TrainableState))


def _with_histories(state: TrainableState, file: File, path: str) -> TrainableState:
    roles, structure, specs = state.roles, index_of(state.layout).structure, file.specs
    here, there = state_in_words(state), file.words["states"][path]
    what = f"{file.source.name} does not fit the tree: the state at {path!r} has"
    form, other = _form_in_words(here), _form_in_words(there)
    if form != other:
        names = f"saving.names(path, {path!r})" if path else "saving.names(path)"
        what = f"{what} the form {other!r} in the {file.noun}, {form!r} in the tree. A plan converts it"
        raise ValueError(f"{what}:\nstate = saving.plan(model, model).state({names}, like=tx.init(model))")
    known = dict(zip(structure.paths, structure.specs, strict=True))
    together = [(specs_in(each), {history.key for history in histories_in(each)}) for each in (here, there)]
    is_whole = any(division["problem"] for division in here["divisions"] + there["divisions"])
    if together[0] == together[1] or not (is_whole or specs_in(there).items() <= known.items()):
        return state
    each = zip((*roles.running, *roles.held), (*state.runs, *state.held), roles.divisions, strict=True)
    histories = [History(trained_at(state.layout, at), run, division) for at, run, division in each]
    shown = max(histories, key=lambda history: len(history.layout.slots), default=None)
    if shown is None or is_whole:
        ours, theirs = (first_few([path for path, *_ in words["slots"]]) for words in (here, there))
        fits = f"it fits only its own parameters: {theirs} in the {file.noun}, {ours or 'none'} in the tree"
        raise ValueError(f"{what} other histories there, not kept leaf by leaf, so {fits}; begin with tx.init(model)")
    whole, start = _tied(state, there), f"{path}." if path else ""
    sides: dict[str, list[History]] = {"runs": [], "held": []}
    for said, stored in recorded_in(there, specs, start):
        layout = trained_at(whole, [structure.index[path] for path in said.parameters])
        count = jax.ShapeDtypeStruct((), np.dtype("int32"))
        sides[said.side].append(dataclasses.replace(like_history(shown, layout, stored), count=count))
    layout = trained_at(whole, [leaf for each in sides["runs"] for leaf in index_of(each.layout).positions])
    still = specs.get(f"{start}still")
    is_alike = is_array(state.still) and still is not None and state.still.shape == still.shape
    counts = state.still if is_alike else () if still is None else jax.ShapeDtypeStruct(*still[:2])
    return state_of(layout, sides["runs"], sides["held"], counts)


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


def like_history(shown: History, layout: Layout, stored: Copies) -> History:
    """Returns a history of the same rule for other parameters, with shapes for new arrays.

    Args:
        shown: a history of the rule.
        layout: the parameters of the result.
        stored: its arrays, as shapes and dtypes, and the owners of each.
    """
    like = _Like(shown, layout, stored)
    made = like.node(shown.state, ())
    return History(layout, made, Division(tuple(map(like.owners.get, entries_of(made)))))


class _Like:
    """Makes the nodes of a state for other parameters, like those of a state that is shown."""

    def __init__(self, shown: History, layout: Layout, stored: Copies) -> None:
        self._before, self._after, self._stored = shown.layout, layout, stored.arrays
        self._shown, self.owners = dict(shown.copies.owned()), dict(stored.owned())
        self._nodes = {entries[:end] for entries in stored.arrays for end in range(len(entries) + 1)}
        known = [each for each in (*self._shown.values(), *self.owners.values()) if each is not None]
        self._joined = {each.place[0] for each in known if each.axis is not None}
        self._trees = {each.place[0] for each in known} - self._joined
        self._keys, self._known_keys = _keys_in(self.owners), _keys_in(self._shown)
        owned = {path for each in self.owners.values() if each for path in each.paths}
        self._alone = {(quote(slot.key),) for slot in layout.slots if slot.path not in owned}

    def node(self, node: PyTree, at: Entries) -> PyTree:
        """Returns the node at some entries; new arrays are shapes."""
        before, after = Form.tree(self._before), Form.tree(self._after)
        # A rule of a part that trains nothing has such a copy, too, without arrays.
        empty = set[Entries]()
        if at not in self._trees and not jtu.tree_leaves(node):
            leaves = jtu.tree_flatten_with_path(node, is_leaf=lambda each: isinstance(each, optax.MaskedNode))[0]
            empty = {key_entries(keys) for keys, _ in leaves}
        if at in self._trees or (empty and empty == set(before.entries)):  # of the canonical tree
            there = dict(zip(before.entries, before.treedef.flatten_up_to(node), strict=True))
            return after.treedef.unflatten([self._one(there, entries, at) for entries in after.entries])
        if at in self._joined or (empty and empty == self._known_keys):
            return self._arrays(node, at)
        pairs, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)
        if not treedef.num_leaves or pairs[0][0] == ():
            return self._array(node, at)
        made = treedef.unflatten([self.node(child, (*at, *key_entries(keys))) for keys, child in pairs])
        return dataclasses.replace(made, groups=self._groups(made, at)) if isinstance(made, GroupsState) else made

    def _groups(self, node: GroupsState, at: Entries) -> tuple[Any, ...]:
        """Returns the groups of a node, each with the parameters or the stacks that its rule sees."""
        order, found = {path: number for number, path in enumerate(self._after.paths)}, list[Any]()
        for group in node.groups:
            head = *at, "inner_states", quote(group.name)
            its = {entries: own for entries, own in self.owners.items() if own and own.place[0][: len(head)] == head}
            paths = {path for path in group.paths if path in order or self._is_alone(split_path(path))}
            paths |= {path for own in its.values() if own.axis is None for path in own.paths}
            paths |= set(map(join_path, _keys_in(its)))
            found.append(group._replace(paths=tuple(sorted(paths, key=lambda path: (order.get(path, 0), path)))))
        return tuple(found)

    def _is_alone(self, key: Entries) -> bool:
        """Returns whether a stack is one of parameters for which the rule keeps nothing."""
        return key[-1:] in self._alone and key not in self._known_keys

    def _arrays(self, node: PyTree, at: Entries) -> PyTree:
        """Returns joined arrays: one vector, or vectors or stacks by key, in a dictionary for each group."""
        if () in self._keys:
            return self._array(next(iter(jax.tree.leaves(node)), node), at)
        groups, made = {}, dict[str, Any]()
        if isinstance(node, dict):
            has_groups = any(len(key) > 1 for key in self._known_keys)
            groups = {(quote(name),): child for name, child in node.items()} if has_groups else {(): node}
            made = {name: {} for name in node} if has_groups else {}
        there = {(*head, quote(key)): child for head, its in groups.items() for key, child in its.items()}
        rest = [key for key, child in there.items() if not jax.tree.leaves(child) and self._is_alone(key)]
        for key in (*self._keys, *rest):
            *head, last = map(unquote, key)
            its = made.setdefault(head[0], {}) if head else made
            its[last] = self._one(there, key, at)
        return made

    def _one(self, there: Mapping[Entries, PyTree], key: Entries, at: Entries) -> PyTree:
        """Returns the node below a key, like that of the state or like one beside it."""
        is_kept, node = (*at, *key) in self._nodes, there.get(key)
        if node is None:
            others = (each for each in there.values() if each is not None and bool(jax.tree.leaves(each)) is is_kept)
            # A rule of a part has a node without arrays for a parameter of another part.
            nothing = optax.MaskedNode() if "inner_states" in at and not is_kept else None
            node = next(others, nothing)
        if not key and is_kept:  # the model is one array, whose copy is at the place itself
            return self._array(node, at)
        return self.node(node, (*at, *key)) if is_kept else node

    def _array(self, leaf: Any, at: Entries) -> Any:
        """Returns an array of the state if that of the file is like it."""
        if at not in self._stored:
            return leaf
        shape, dtype, owners = self._stored[at].shape, self._stored[at].dtype, self.owners[at]
        if at in self._shown and is_array(leaf):
            # A rule that keeps other arrays is an error later: so only what the parameters change follows the file.
            start, stop = (0, 0) if owners is None or owners.axis is None else (owners.axis, owners.axis + 1)
            shape = (*leaf.shape[:start], *shape[start:stop], *leaf.shape[stop:])
            dtype = dtype if is_inexact(leaf.dtype) and is_inexact(dtype) else leaf.dtype
            if (leaf.shape, leaf.dtype) == (shape, dtype):
                return leaf
        return np.empty(shape, dtype) if isinstance(leaf, np.ndarray) else jax.ShapeDtypeStruct(shape, dtype)


def _keys_in(owners: Mapping[Entries, Owners | None]) -> set[Entries]:
    pairs = [(entries, each.place) for entries, each in owners.items() if each and each.axis is not None]
    return {entries[len(place[0]) : len(entries) - len(place[1])] for entries, place in pairs}


def _form_in_words(words: Mapping[str, Any]) -> str:
    """Returns the form of a state, as `optim.trainable` calls it."""
    # The key of a joined array tells: that of a stack has a shape, and a vector has none, or a dtype alone.
    for said in words["divisions"]:
        for name, (_, before, after, axis) in said["owners"].items():
            if axis is not None:
                entries = split_path(name)
                key = entries[before : len(entries) - after]  # none where the state of a rule is the vector itself
                return "stacks" if key and key[-1].endswith(']"') else "vector"
    return "tree"
