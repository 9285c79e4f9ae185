"""Warnings of accidental ties: one array at several paths that nobody tied, and tied arrays that became two.

JAX arrays are values. So an array at two paths may be one shared parameter, or an initial value that two parameters
happen to have in common. The code cannot tell for sure, but two cases are nearly always the second: an array whose
elements are all equal, such as zeros for two biases; and a list of the same node repeated, such as an ensemble. To find
these, values are read from the device once, and only if nothing declares that the two are tied.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._tree import memory
from .._tree.memory import Pair, warn
from .._tree.structure import Node, Structure, same_treedef
from .._tree.text import first_few
from .index import Index
from .where import subtreedefs


def warn_of_accidents(index: Index, leaves: Sequence[Any]) -> None:
    """Warns of ties that nobody can have meant, and of ties that a trace has broken."""
    if index.structure.is_traced:
        _warn_of_lost(index, leaves)
    else:
        _warn_of_unsaid(index, leaves)


def note_untied(structure: Structure, leaves: Iterable[int]) -> None:
    """Remembers that the user unties these leaves from those that are, or were before, the same array."""
    chosen, identical = frozenset(leaves), enumerate(structure.first)
    pairs = {*[(first, i) for i, first in identical if first != i], *memory.met("one", structure)}
    memory.note("untied", structure, [pair for pair in pairs if not chosen.isdisjoint(pair)])


# -- One array, though nobody says so ----------------------------------------------------------------------------------


def _warn_of_unsaid(index: Index, leaves: Sequence[Any]) -> None:
    structure = index.structure
    memory.note("said", structure, [(tie.source, tie.leaf) for tie in index.ties if tie.is_said and not tie.transforms])
    unsaid = [(each.source, each.leaf) for each in index.ties if not each.is_said and index.trained[each.leaf]]
    pairs = memory.unknown("said", structure, unsaid)
    if not pairs:
        return
    memory.note("said", structure, pairs)  # there is no more to say of them
    copies = _repeated(structure) if len(pairs) == len(unsaid) else []
    if copies:
        warn(_COPIES.format(len(copies), first_few([repr(node.path) for node in copies])))
    else:
        is_constant = functools.cache(lambda leaf: _is_one_number(_pieces_read(leaves[leaf])))
        pairs = [pair for pair in pairs if leaves[pair[0]].size > 1 and _is_accident(structure, pair, is_constant)]
        if pairs:
            warn(_unsaid_in_words(structure, pairs))
    if copies or pairs:
        # Where they part from now on, nobody has lost anything.
        note_untied(structure, [leaf for pair in pairs for leaf in pair])


def _repeated(structure: Structure) -> list[Node]:
    """Returns the nodes of a model that is only a list, tuple or dictionary of the same node, repeated."""
    nodes = structure.nodes
    if not nodes or nodes[0].cls not in (list, tuple, dict):
        return []
    numbers, number = list[int](), 1
    while number < len(nodes):
        numbers.append(number)
        number = nodes[number].last
    children, treedefs = [nodes[number] for number in numbers], subtreedefs(structure)
    first, *others = [(treedefs[number], _arrays_below(structure, nodes[number])) for number in numbers] or [(None, [])]
    are_all = sum(node.stop - node.start for node in children) == len(structure.specs)
    is_one = all(arrays == first[1] and same_treedef(treedef, first[0]) for treedef, arrays in others)
    return children if others and first[1] and are_all and is_one else []


def _arrays_below(structure: Structure, node: Node) -> list[tuple[tuple[str, ...], int]]:
    """Returns the parameters of a node: their paths in it, and their arrays."""
    its = [i for i in range(node.start, node.stop) if structure.is_parameter(i)]
    return [(structure.entries[i][len(node.entries) :], structure.first[i]) for i in its]


def _is_accident(structure: Structure, pair: Pair, is_constant: Callable[[int], bool]) -> bool:
    """Returns whether all elements of the array at two leaves are equal, outside of nodes that are used twice.

    A layer that is used twice has its norms and biases at two places, too. It is recognised by its weights: the two
    nodes hold the same arrays throughout, and not all of these are constant.
    """
    if not is_constant(pair[0]):
        return False
    holds = lambda node, leaf: node.start <= leaf < node.stop
    above = [[node for node in structure.nodes if holds(node, i) > holds(node, j)] for i, j in (pair, pair[::-1])]
    for one, other in ((one, other) for one in above[0] for other in above[1]):
        arrays = _arrays_below(structure, one)
        if arrays == _arrays_below(structure, other) and not all(is_constant(i) for _, i in arrays):
            return False
    return True


def _unsaid_in_words(structure: Structure, pairs: Sequence[Pair]) -> str:
    places: dict[int, list[str]] = {}
    for source, leaf in pairs:
        places.setdefault(source, [structure.paths[source]]).append(structure.paths[leaf])
    groups = [
        " and ".join([first_few([repr(path) for path in paths[:-1]]), repr(paths[-1])]) for paths in places.values()
    ]
    source, alias = next(iter(places.values()))[:2]
    return _UNSAID.format(first_few(groups), repr(source), repr(alias))


_UNSAID = (
    "{0} are one array, whose elements are all equal, so they train as one parameter. If they only start with equal "
    "values, write model = tp.untie(model), or make a separate array for each. If they are meant to be tied, declare "
    "it: tp.field(tied_to=...) in the class, tp.tie(model, {2}, to={1}), or tp.layout(model, ties={{{2}: {1}}})"
)
_COPIES = (
    "the model is the same node {0} times: {1} hold the same arrays, so they train as one. To train them separately "
    "(an ensemble, a target network), write model = tp.untie(model), or use tp.copy for each. If they are meant to be "
    "tied, hold the node once, or declare it: tp.field(tied_to=...) in a class, tp.tie(model, alias, to=path), or "
    "tp.layout(model, ties={{alias: path}})"
)


# -- Two arrays that were one ------------------------------------------------------------------------------------------


def _warn_of_lost(index: Index, leaves: Sequence[Any]) -> None:
    """Warns, once, if a traced model has two arrays in place of one that was met before.

    It does not warn of aliases whose sources are known in spite of the trace, nor of frozen ones, which have no
    gradient that could make them differ.
    """
    pairs = [pair for pair in _parted(index, any) if not memory.are_apart(leaves[i] for i in pair)]
    _warn_once("lost", index, pairs, _LOST)


def _parted(index: Index, trained: Callable[[Iterable[bool]], bool]) -> list[Pair]:
    """Returns the pairs that were one array in a model met before, and are two in this one, which nobody has untied."""
    return memory.unknown("untied", index.structure, _come_apart("one", index, trained))


def _come_apart(word: str, index: Index, trained: Callable[[Iterable[bool]], bool]) -> list[Pair]:
    """Returns the pairs that were tied in a model met before and are not in this one, of which any, or all, train."""
    # A layout may know the tie the other way round, or with a third leaf as the source of both.
    one = [index.sources.get(first, first) for first in index.structure.first]
    pairs = [(a, b) for a, b in memory.met(word, index.structure) if one[a] != one[b]]
    return [pair for pair in pairs if trained(index.trained[i] for i in pair)]


def _warn_once(word: str, index: Index, pairs: Iterable[Pair], message: str, between: str = "and") -> None:
    pairs = memory.unknown(word, index.structure, pairs)
    if pairs:
        memory.note(word, index.structure, pairs)
        warn(message.format(_pairs_in_words(index, pairs, between)))


def _pairs_in_words(index: Index, pairs: Sequence[Pair], between: str = "and") -> str:
    return first_few([f" {between} ".join([repr(index.structure.paths[i]) for i in pair]) for pair in pairs])


def warn_of_parted_ties(index: Index, leaves: Sequence[Any]) -> None:
    """Warns of ties of a concrete model that an operation has broken. Called where the layout that trains is known.

    Other functions that see the model, such as a summary, do not know that layout, and it may record the tie.
    """
    structure = index.structure
    if structure.is_traced or not index.is_due("parted"):
        return
    # Of ties that only a layout knows `warn_of_forgotten_ties` warns. Where one of the two is frozen, somebody has
    # decided that they are not one.
    given = set(map(frozenset, memory.met("given", structure)))
    pairs = [pair for pair in _parted(index, all) if frozenset(pair) not in given]
    lost = list[Pair]()
    for pair in memory.unknown("parted", structure, pairs):
        one, other = (_pieces_read(leaves[i]) for i in pair)
        # Zeros are equal without having been one: such arrays tell nothing yet.
        if one and other and not _is_one_number(one):
            memory.note("parted", structure, [pair])
            lost += [pair] if _are_equal_bits(one, other) else []
    if lost:
        paths = structure.paths
        calls = [f"tp.tie(model, {paths[other]!r}, to={paths[one]!r})" for one, other in lost]
        warn(_PARTED.format(_pairs_in_words(index, lost), first_few(calls)))


_LOST = (
    "{} were one array in an earlier model of this structure. In this model, an argument of jax.jit, vmap, scan or the "
    "like, they are two, each with a separate gradient. Make a layout outside and pass it in (known = "
    "tp.layout(model); tp.grad(loss, known)), or pass (params, rest) of tp.partition, or a Restructure of tp.ravel; or "
    "use tp.jit. If this is another model that only looks alike, pass its own layout to silence this warning"
)
_PARTED = (
    "{} were one array in an earlier model of this structure. In this model they are two, equal bit for bit, as after "
    "jax.jit, jax.tree.map, a cast or a loaded file, and each trains separately. Tie them again: model = {}; tp.jit "
    "and tp.saving keep ties. To train them separately, write model = tp.untie(model)"
)


# -- Ties that a layout was given --------------------------------------------------------------------------------------


def warn_of_forgotten_ties(index: Index) -> None:
    """Warns, once, of ties that another layout of such models was given and that training would break."""
    # Of arrays that were one, and that a trace has made two, `warn_of_accidents` warns.
    words = ["computed"] if index.structure.is_traced else ["computed", "given"]
    _warn_once("forgotten", index, [pair for word in words for pair in _come_apart(word, index, any)], _FORGOTTEN, "to")


_FORGOTTEN = (
    "a layout of such a model ties {}; without that layout they are trained separately. Pass it (known = "
    "tp.layout(model, ties=...); tp.grad(loss, known), optim.trainable(tx, known)), or pass tp.layout(model) to train "
    "them separately"
)


# -- Values ------------------------------------------------------------------------------------------------------------


def _is_one_number(values: Sequence[np.ndarray]) -> bool:
    """Returns whether all elements of an array are equal; `False` if they cannot be read."""
    first = [each[0] for each in values if each.size][:1]
    parts = [part for each in values for part in (each[:_FEW], each)]  # nearly always the first few elements tell
    return bool(values) and all(bool((part == number).all()) for part in parts for number in first)


_FEW = 1024


def _are_equal_bits(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Returns whether two arrays that are split alike are equal bit for bit."""
    ours, theirs = ([(each.dtype, each.view(np.uint8)) for each in values] for values in (one, other))
    if len(ours) != len(theirs):
        return False
    return all(a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in zip(ours, theirs, strict=True))


def _pieces_read(array: Any) -> list[np.ndarray]:
    """Returns the elements of an array that this process can read, one flat array for each piece."""
    if isinstance(array, np.ndarray):
        return [np.ascontiguousarray(array).reshape(-1)]
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or array.is_deleted():
        return []
    # Whoever forbids transfers means those of every step. The copies are of pieces, since an array keeps its own.
    with jax.transfer_guard_device_to_host("allow"):
        if array.is_fully_replicated:
            return [np.asarray(array.addressable_data(0)).reshape(-1)]
        return [np.asarray(shard.data).reshape(-1) for shard in array.addressable_shards if shard.replica_id == 0]
