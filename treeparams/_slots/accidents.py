"""Accidents with ties: the memory of ties that the library has met, and its warnings.

JAX arrays are values. So an array at two paths may be one shared parameter, or an initial value that two parameters
happen to have in common; and two arrays may be two, or one that a trace, a cast or a file has made two. The code cannot
tell for sure, so it warns, and no number depends on it. Values are read from the device once, and only if nothing
declares that the two are tied.

A *fact* is a word about some leaves: that they were one array, that you parted them, that a warning named them. It is
kept at each node that holds all of these leaves, by the kind of the node. So it is known of every model of that kind,
of a part of one, and of whatever holds one. One table has them all. It holds no object of a model, and it forgets the
oldest.
"""

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._tree.structure import Node, Spec, Structure, same_treedef
from .._tree.text import first_few, warn
from .index import Index

_Pair = tuple[int, int]
_Place = tuple[tuple[Hashable, ...], set[int]]

changes = 0
"""How often a tie was met, or made, that was not known; ties that were checked before may have come apart since."""

# By a word and the kind of a node: leaves; or, of words about ties, the shapes of all leaves, and pairs that are tied.
_facts: "collections.OrderedDict[Hashable, dict[Any, None]]" = collections.OrderedDict()
_MOST, _SHAPES = 1000, 100  # entries, and shapes of one kind
_changing = threading.Lock()  # for writing; what a reader has found does not change any more
# Warnings that are given once for each model, where a model and what holds it are the same. Models of other shapes, or
# with other parts around these leaves, are others.
_OF_ONE_MODEL = ("lost", "parted", "forgotten")


# -- Facts -------------------------------------------------------------------------------------------------------------


def _note(word: str, structure: Structure, pairs: Iterable[_Pair]) -> None:
    """Remembers a fact about the leaves of each pair."""
    for pair in pairs:
        for key, leaves in _places(word, structure, pair, "a part", "the whole"):
            _set_facts(key, [*_facts.get(key, ()), *leaves])


def _unknown(word: str, structure: Structure, pairs: Iterable[_Pair]) -> list[_Pair]:
    """Returns the pairs of which the fact is not known."""
    places = lambda pair: _places(word, structure, pair, "the whole", "a part")
    return [pair for pair in pairs if not any(leaves <= _facts.get(key, {}).keys() for key, leaves in places(pair))]


def _places(word: str, structure: Structure, pair: _Pair, anywhere: str, at_root: str) -> Iterator[_Place]:
    """Yields the key of each node that holds a pair, and the leaves as numbered within that node.

    A warning is noted of `the whole` of the model that it names, and of each `part`. So a model is known if it is a
    part of such a model, or has a part that is the whole of one.
    """
    for node in _holding(structure, pair):
        key, leaves = (word, structure.kinds[node.number]), {i - node.start for i in pair}
        if word in _OF_ONE_MODEL:
            key = *key, hash(_shapes(structure, node))
            if not node.number:
                yield (*key, at_root), leaves
            key = *key, anywhere
        yield key, leaves


def _set_facts(key: Hashable, facts: Iterable[Any], *, is_change: bool = False) -> None:
    global changes
    with _changing:
        changes += is_change
        _facts[key] = dict.fromkeys(facts)
        _facts.move_to_end(key)
        while len(_facts) > _MOST:
            _facts.popitem(last=False)


def _holding(structure: Structure, pair: _Pair) -> list[Node]:
    """Returns the nodes that hold both of two leaves, from the root to the innermost."""
    found, number, nodes = list[Node](), 0, structure.nodes
    while number < len(nodes) and nodes[number].start <= min(pair):
        is_within = max(pair) < nodes[number].stop
        if is_within:
            found.append(nodes[number])
        number = number + 1 if is_within else nodes[number].last
    return found


# -- Ties that were met ------------------------------------------------------------------------------------------------


def meet(structure: Structure, leaves: Sequence[Any], *, is_call: bool = False) -> None:
    """Remembers the ties by identity of a tree, or of each argument of a call, that is met outside a trace.

    It does not if the same kind was met without ties before: the gradient of a sum has one object at two paths, and it
    has the structure of its model. `tp.tie` and layouts, which tie a model met before, record that themselves.
    """
    if structure.is_traced or any(type(leaf) is jax.ShapeDtypeStruct for leaf in leaves):
        return
    first, depth = structure.first, 2 if is_call else 0  # (function, arguments, keywords): an argument has two entries
    pairs = [(first[i], i) for i in structure.parameters if first[i] != i]
    for number, root in enumerate(structure.nodes if is_call else structure.nodes[:1]):
        if len(root.entries) == depth and not any(root.start <= a and b < root.stop for a, b in pairs):
            key = "one", structure.kind_of(number)
            _set_facts(key, _facts.get(key, ()))
    note_ties(structure, pairs, above=depth)


def note_ties(
    structure: Structure, pairs: Sequence[_Pair], *, word: str = "one", above: int | None = None, is_said: bool = False
) -> None:
    """Remembers pairs of parameters that are one array, or that a layout was given, at each node that holds both.

    With `above`, only at nodes whose paths have at least so many entries, and of kinds not met without ties. With
    `is_said`, since you tie them, even if such a model was met without the tie, or you had untied them.
    """
    for pair in pairs if is_said else ():
        for key, leaves in _places("untied", structure, pair, "", ""):
            if not leaves.isdisjoint(_facts.get(key, ())):
                _set_facts(key, [leaf for leaf in _facts[key] if leaf not in leaves], is_change=True)
    _note("said", structure, pairs if is_said else ())
    inside = collections.defaultdict[int, set[_Pair]](set)
    for pair in pairs if not structure.is_traced else ():
        for node in _holding(structure, pair):
            inside[node.number].add((pair[0] - node.start, pair[1] - node.start))
    for node, its in [(structure.nodes[number], its) for number, its in inside.items()]:
        key = word, structure.kind_of(node.number)
        known, fact = _facts.get(key), (_shapes(structure, node), frozenset(its))
        is_new_kind = above is None or (len(node.entries) >= above and known != {})
        if is_new_kind and fact not in (known or {}):
            _set_facts(key, [*list(known or {})[-_SHAPES:], fact], is_change=True)


def note_untied(structure: Structure, leaves: Iterable[int]) -> None:
    """Remembers that you untie these leaves from those that are, or were before, the same array."""
    chosen, identical = frozenset(leaves), enumerate(structure.first)
    pairs = {*[(first, i) for i, first in identical if first != i], *_met("one", structure)}
    _note("untied", structure, [pair for pair in pairs if not chosen.isdisjoint(pair)])


def _met(word: str, structure: Structure) -> list[_Pair]:
    """Returns the pairs that were one array, or given, in models of the kind of this one, or of a node in it."""
    found = dict[_Pair, None]()
    for node, kind in zip(structure.nodes, structure.kinds, strict=True) if changes else ():
        for shapes, pairs in _facts.get((word, kind), ()):
            if _are_mapped(structure.specs[node.start : node.stop], shapes):
                found |= {(a + node.start, b + node.start): None for a, b in sorted(pairs)}
    return list(found)


def _shapes(structure: Structure, node: Node) -> tuple[tuple[int, ...] | None, ...]:
    return tuple([spec and spec.shape for spec in structure.specs[node.start : node.stop]])


def _are_mapped(specs: Sequence[Spec | None], shapes: Sequence[tuple[int, ...] | None]) -> bool:
    """Returns whether arrays have the shapes that were met, or these without their first axes.

    Inside `vmap` and `scan`, all leaves lack the axes that are mapped, the same number of each. The kind of a node does
    not include shapes, so the node is found there too; a model that only shares paths and dtypes is excluded here.
    """
    now = [(spec.shape, shape or ()) for spec, shape in zip(specs, shapes, strict=True) if spec is not None]
    mapped = {len(shape) - len(inner) for inner, shape in now}
    return len(mapped) == 1 and all(inner == shape[min(mapped) :] for inner, shape in now)


# -- Tracers that are apart --------------------------------------------------------------------------------------------

# By identity; an identity serves another object when a tracer is gone, so the entry goes with it.
_apart = weakref.WeakValueDictionary[int, Tracer]()


def keep_apart(tracers: Iterable[Any]) -> None:
    """Remembers tracers that are separate as their arrays are: arguments of `tp.jit`, slots of a `Rest`, copies."""
    if changes:
        _apart.update({id(each): each for each in tracers if isinstance(each, Tracer)})


# -- One array, though nobody says so ----------------------------------------------------------------------------------


def warn_of_accidents(index: Index, leaves: Sequence[Any]) -> None:
    """Warns of ties that nobody can have meant; in a trace, of two arrays in place of one that was met before."""
    structure = index.structure
    if structure.is_traced:
        # Not of aliases whose sources are known in spite of the trace, nor of frozen ones, which have no gradient that
        # could make them differ.
        pairs = [pair for pair in _parted(index, any) if not all(id(leaves[i]) in _apart for i in pair)]
        _warn_once("lost", index, pairs, _LOST)
        return
    index.checked["accidents"] = changes
    _note("said", structure, [(tie.source, tie.leaf) for tie in index.ties if tie.is_said and not tie.transforms])
    unsaid = [(each.source, each.leaf) for each in index.ties if not each.is_said and index.trained[each.leaf]]
    pairs = _unknown("said", structure, unsaid)
    if not pairs:
        return
    _note("said", structure, pairs)  # there is no more to say of them
    is_constant = functools.cache(lambda leaf: _is_one_number(_values_read(leaves[leaf])))
    are_copies = pairs == unsaid and _is_one_node_repeated(structure)
    if not are_copies:
        pairs = [pair for pair in pairs if leaves[pair[0]].size > 1 and _is_accident(structure, pair, is_constant)]
    places: dict[int, list[str]] = {}
    for source, leaf in pairs:
        places.setdefault(source, [repr(structure.paths[source])]).append(repr(structure.paths[leaf]))
    if pairs:
        groups = [f"{first_few(its[:-1])} and {its[-1]}" for its in places.values()]
        reason = "in nodes that are the same throughout" if are_copies else "whose elements are all equal"
        warn(_UNSAID.format(first_few(groups), *next(iter(places.values()))[:2], reason))
        # Where they part from now on, nobody has lost anything.
        note_untied(structure, [leaf for pair in pairs for leaf in pair])


def _is_one_node_repeated(structure: Structure) -> bool:
    """Returns whether a model is only a list, tuple or dictionary of the same node, as `[net] * 4`."""
    nodes = [node for node in structure.nodes if len(node.entries) == 1]
    if len(nodes) < 2 or structure.nodes[0].cls not in (list, tuple, dict):
        return False
    # As long as the whole: there is nothing beside them. An inverse, say, holds the same arrays and is another node.
    is_all = (nodes[0].stop - nodes[0].start) * len(nodes) == len(structure.specs)
    treedefs, arrays = [structure.subtreedefs[node.number] for node in nodes], _arrays_below(structure, nodes[0])
    are_same = all(same_treedef(each, treedefs[0]) for each in treedefs)
    return is_all and are_same and all(_arrays_below(structure, node) == arrays for node in nodes)


def _arrays_below(structure: Structure, node: Node) -> list[tuple[tuple[str, ...], int]]:
    """Returns the parameters of a node: their paths in it, and their arrays."""
    its = [i for i in range(node.start, node.stop) if structure.is_parameter(i)]
    return [(structure.entries[i][len(node.entries) :], structure.first[i]) for i in its]


def _is_accident(structure: Structure, pair: _Pair, is_constant: Callable[[int], bool]) -> bool:
    """Returns whether all elements of the array at two leaves are equal, outside of nodes that are used twice.

    A layer that is used twice has its norms and biases at two places, too. It is recognised by its weights: the two
    nodes hold the same arrays throughout, and not all of these are constant.
    """
    if not is_constant(pair[0]):
        return False
    shared = len(_holding(structure, pair))
    # From the root on, the nodes above the one leaf are those above the other, as long as they hold both.
    above = [[_arrays_below(structure, node) for node in _holding(structure, (i, i))[shared:]] for i in pair]
    same = [arrays for arrays in above[0] if arrays in above[1]]
    return all(is_constant(i) for arrays in same for _, i in arrays)


_UNSAID = (
    "{0} are one array, {3}, so they train as one parameter. If they only start with equal values (biases, an "
    "ensemble, a target network), write model = tp.untie(model), or make a separate array for each. If they are meant "
    "to be tied, declare it: tp.field(tied_to=...), tp.tie(model, {2}, to={1}), or tp.layout(model, ties={{{2}: {1}}})"
)


# -- Two arrays that were one ------------------------------------------------------------------------------------------


def _parted(index: Index, trained: Callable[[Iterable[bool]], bool]) -> list[_Pair]:
    """Returns the pairs that were one array in a model met before, and are two in this one, which nobody has untied."""
    return _unknown("untied", index.structure, _come_apart("one", index, trained))


def _come_apart(word: str, index: Index, trained: Callable[[Iterable[bool]], bool]) -> list[_Pair]:
    """Returns the pairs that were tied in a model met before and are not in this one, of which any, or all, train."""
    # A layout may know the tie the other way round, or with a third leaf as the source of both.
    one, flags = [index.sources.get(first, first) for first in index.structure.first], index.trained
    return [(a, b) for a, b in _met(word, index.structure) if one[a] != one[b] and trained((flags[a], flags[b]))]


def _warn_once(word: str, index: Index, pairs: Iterable[_Pair], message: str, between: str = "and") -> None:
    pairs, paths = _unknown(word, index.structure, pairs), index.structure.paths
    if pairs:
        _note(word, index.structure, pairs)
        calls = first_few([f"tp.tie(model, {paths[other]!r}, to={paths[one]!r})" for one, other in pairs])
        warn(message.format(first_few([f"{paths[a]!r} {between} {paths[b]!r}" for a, b in pairs]), calls))


def warn_of_parted_ties(index: Index, leaves: Sequence[Any]) -> None:
    """Warns of ties of a concrete model that an operation has broken. Called where the layout that trains is known.

    Other functions that see the model, such as a summary, do not know that layout, and it may record the tie.
    """
    structure = index.structure
    if structure.is_traced or index.checked.get("parted") == changes:
        return
    index.checked["parted"] = changes
    # Of ties that only a layout knows `warn_of_forgotten_ties` warns. Where one of the two is frozen, somebody has
    # decided that they are not one.
    given = set(map(frozenset, _met("given", structure)))
    pairs, lost = [pair for pair in _parted(index, all) if frozenset(pair) not in given], list[_Pair]()
    for pair in _unknown("parted", structure, pairs):
        one, other = (_values_read(leaves[i]) for i in pair)
        # Zeros are equal without having been one: such arrays tell nothing yet.
        if one is None or other is None or not one.size or _is_one_number(one):
            continue
        are_alike = (one.dtype, one.size) == (other.dtype, other.size)
        if are_alike and np.array_equal(one.view(np.uint8), other.view(np.uint8)):
            lost.append(pair)
        else:
            _note("parted", structure, [pair])
    _warn_once("parted", index, lost, _PARTED)


_LOST = (
    "{0} were one array in an earlier model of this structure. In this model, an argument of jax.jit, vmap, scan or "
    "the like, they are two, each with a separate gradient. Make a layout outside and pass it in (known = "
    "tp.layout(model); tp.grad(loss, known)), or (params, rest) of tp.partition, or a Restructure of tp.ravel; or use "
    "tp.jit. If this model only looks alike, pass its own layout to silence this warning"
)
_PARTED = (
    "{0} were one array in an earlier model of this structure. In this model they are two, equal bit for bit, as after "
    "jax.jit, jax.tree.map, a cast or a loaded file, and each trains separately. Tie them again: model = {1}; tp.jit "
    "and tp.saving keep ties. To train them separately, write model = tp.untie(model)"
)


def warn_of_forgotten_ties(index: Index) -> None:
    """Warns, once, of ties that another layout of such models was given and that training would break."""
    index.checked["forgotten"] = changes
    # Of arrays that were one, and that a trace has made two, `warn_of_accidents` warns.
    words = ["computed"] if index.structure.is_traced else ["computed", "given"]
    _warn_once("forgotten", index, [pair for word in words for pair in _come_apart(word, index, any)], _FORGOTTEN, "to")


_FORGOTTEN = (
    "a layout of such a model ties {0}; without that layout they are trained separately. Pass it (known = "
    "tp.layout(model, ties=...); tp.grad(loss, known), optim.trainable(tx, known)), or pass tp.layout(model) to train "
    "them separately"
)


# -- Values ------------------------------------------------------------------------------------------------------------


def _is_one_number(values: np.ndarray | None) -> bool:
    """Returns whether all elements of an array are equal; `False` if there are none, or they cannot be read."""
    few = values[:1024] if values is not None else ()  # nearly always the first few elements tell
    return len(few) > 0 and all(bool((part == few[0]).all()) for part in (few, values))


def _values_read(array: Any) -> np.ndarray | None:
    """Returns the elements of an array that this process can read, in one dimension; `None` if it can read none."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1)
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or array.is_deleted():
        return None
    # Whoever forbids transfers means those of every step. The copies are of pieces, since an array keeps its own.
    with jax.transfer_guard_device_to_host("allow"):
        pieces = [shard.data for shard in array.addressable_shards if shard.replica_id == 0]
        pieces = [array.addressable_data(0)] if array.is_fully_replicated else pieces
        read = [np.asarray(piece).reshape(-1) for piece in pieces]
    return read[0] if len(read) == 1 else np.concatenate(read) if read else None
