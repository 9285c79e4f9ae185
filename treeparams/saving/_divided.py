"""Which arrays of an optimiser's state are of which parameters, read from their names.

In the tree form they end with the path of a parameter, or have it below `states`, where `optim.per_leaf` keeps a state
for each; in stacks they have the key of a stack; in the vector form they have its length. Of the rest, step counts and
rates, all parameters of one history have one.
"""

import collections
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._paths import quote, split_path
from .._structure import Spec
from .._text import describe
from ._contents import specs_in
from ._names import Names

Entries = tuple[str, ...]
Place = tuple[Entries, Entries]
"""What stands before and after the parameter in a name: equal for what is the same thing of other parameters."""


class Part(NamedTuple):
    """An array of a state that is of some parameters, one after another."""

    form: str  # "tree", "vector" or "stack"
    place: Place
    paths: tuple[str, ...]


class NamedHistory:
    """The state of the parameters that took their steps together, by names.

    Attributes:
        specs: the shape and dtype of each parameter, by path.
        parts: the arrays that are of single parameters, by what follows the place of the history in their names.
    """

    def __init__(self, names: Names, start: str, words: Mapping[str, Any], paths: Sequence[str]) -> None:
        known = specs_in(words)
        self.specs = {path: known[path] for path in paths}
        self._names = {split_path(name)[2:]: name for name in names.specs if name.startswith(f"{start}.")}
        self._arrays = names
        self._read: dict[str, Any] = {}
        specs = {entries: names.specs[name] for entries, name in self._names.items()}
        self.parts = _in_tree(specs, self.specs) or _in_stacks(specs, self.specs) or _in_vector(specs, self.specs)
        self._at = {(part.place, path): entries for entries, part in self.parts.items() for path in part.paths}

    def lost(self, other: "NamedHistory", used: Set[str]) -> list[str]:
        """The names of arrays, of all parameters or of used ones, for which another history has no place."""
        places = {part.place for part in other.parts.values()}
        shared = other._names.keys() - other.parts.keys()
        parts = {entries: self.parts.get(entries) for entries in self._names}
        is_lost = lambda entries, part: (
            entries not in shared if part is None else (part.place not in places and not used.isdisjoint(part.paths))
        )
        return [self._names[entries] for entries, part in parts.items() if is_lost(entries, part)]

    def shared(self, entries: Entries) -> Any:
        """An array of all parameters."""
        name = self._names.get(entries)
        if name is None or entries in self.parts:
            raise _other_rule(entries)
        return self._array(name)

    def of(self, place: Place, path: str) -> Any:
        """The array at a place of one parameter."""
        entries = self._at.get((place, path))
        if entries is None:
            raise _other_rule((*place[0], path, *place[1]))
        array, part = self._array(self._names[entries]), self.parts[entries]
        if part.form == "tree":
            return array
        row = part.paths.index(path)
        if part.form == "stack":
            return array[row]
        start = sum(math.prod(self.specs[each].shape) for each in part.paths[:row])
        shape = self.specs[path].shape
        return jnp.reshape(array[start : start + math.prod(shape)], shape)

    def _array(self, name: str) -> Any:
        if name not in self._read:
            self._read[name] = self._arrays[name]
        return self._read[name]


def _other_rule(entries: Sequence[str]) -> ValueError:
    return ValueError(
        f"the state has nothing at {'.'.join(entries)!r}, which the fresh one has: it was made by another "
        "transformation, or a parameter is now in another group"
    )


def _in_tree(specs: Mapping[Entries, Spec], slots: Mapping[str, Spec]) -> dict[Entries, Part]:
    if "" in slots:  # the model is one array, whose path is in every name
        found = {}
        for entries, spec in specs.items():
            end = entries.index("states") + 1 if "states" in entries else len(entries)
            if end < len(entries) or (spec.parameter and spec.shape == slots[""].shape):
                found[entries] = Part("tree", (entries[:end], entries[end:]), ("",))
        return found
    by_entries = {split_path(path): path for path in slots}
    lengths = {len(entries) for entries in by_entries}
    # Which parameters have a name below a node that ends with their own; how many names are below it at all, or begin
    # with one of a parameter there; and which nodes have an array of a parameter's shape.
    covered: dict[Entries, set[str]] = collections.defaultdict(set)
    below, begun, alike = collections.Counter[Entries](), collections.Counter[Entries](), set[Entries]()
    for entries, spec in specs.items():
        for start in range(len(entries) + 1):
            node, rest = entries[:start], entries[start:]
            below[node] += 1
            begun[node] += any(rest[:length] in by_entries for length in lengths)
            if rest in by_entries:
                covered[node].add(by_entries[rest])
                if spec.parameter and spec.shape == slots[by_entries[rest]].shape:
                    alike.add(node)
    # A step count may be called as a parameter is. So something has to speak for a node: an array of the right shape,
    # all of several parameters, or another node beside it with the same ones, as in a factorised state.
    whole = [node for node, its in covered.items() if len(its) == below[node] and node[-1:] != ("hyperparams",)]
    beside = collections.Counter((node[:-1], frozenset(covered[node])) for node in whole)
    trees = {
        node
        for node in whole
        if node in alike or len(covered[node]) == len(slots) > 1 or beside[node[:-1], frozenset(covered[node])] > 1
    }
    found: dict[Entries, Part] = {}
    for entries in specs:
        for start in range(len(entries) + 1):
            node, rest = entries[:start], entries[start:]
            if rest in by_entries and node in trees:
                found[entries] = Part("tree", (node, ()), (by_entries[rest],))
                break
            if start and node[-1] == "states" and begun[node] == below[node]:
                length = next(length for length in lengths if rest[:length] in by_entries)
                found[entries] = Part("tree", (node, rest[length:]), (by_entries[rest[:length]],))
                break
    return found


def _in_stacks(specs: Mapping[Entries, Spec], slots: Mapping[str, Spec]) -> dict[Entries, Part]:
    rows: dict[str, list[str]] = {}
    for path, spec in slots.items():
        rows.setdefault(quote(describe(spec)), []).append(path)
    found: dict[Entries, Part] = {}
    for entries, spec in specs.items():
        start = next((at for at, entry in enumerate(entries) if entry in rows), None)
        if start is None:
            continue
        paths = rows[entries[start]]
        # What is not kept row by row, by optim.per_leaf, has to have the shape of the stack.
        whole = (len(paths), *slots[paths[0]].shape)
        if spec.shape != (whole[:1] + spec.shape[1:] if "states" in entries[:start] else whole):
            raise _undivided(entries, spec)
        found[entries] = Part("stack", (entries[:start], entries[start + 1 :]), tuple(paths))
    return found


def _in_vector(specs: Mapping[Entries, Spec], slots: Mapping[str, Spec]) -> dict[Entries, Part]:
    size = sum(math.prod(spec.shape) for spec in slots.values())
    found: dict[Entries, Part] = {}
    for entries, spec in specs.items():
        if spec.shape == (size,):
            found[entries] = Part("vector", (entries, ()), tuple(slots))
        elif size > 1 and size in spec.shape:
            raise _undivided(entries, spec)
    return found


def _undivided(entries: Sequence[str], spec: Spec) -> ValueError:
    return ValueError(
        f"the state has {describe(spec)} at {'.'.join(entries)!r}, which is of several parameters and cannot be "
        "divided among them, as the memory of L-BFGS; begin with a fresh one"
    )
