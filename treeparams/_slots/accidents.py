"""Warnings of accidental ties: one array at several paths that nobody tied, and tied arrays that became two.

JAX arrays are values. So an array at two paths may be one shared parameter, or an initial value that two parameters
happen to have in common. The code cannot tell for sure, but two cases are nearly always the second: an array whose
elements are all equal, such as zeros for two biases; and a list of the same node repeated, such as an ensemble. To find
these, values are read from the device once, and only if nothing declares that the two are tied.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._tree.flattening import same_treedef
from .._tree.lost_ties import changes, given_to, note_untied, parted, said, warn_of_lost_ties
from .._tree.marks import Marks, Pair, holding
from .._tree.messages import warn
from .._tree.structure import Node, Structure
from .._tree.text import first_few
from .index import Index
from .where import subtreedefs

_looked_at = Marks()  # pairs that are one array, of which it has been seen what they are
_compared = Marks()  # pairs that are two arrays, whose values have been compared


def warn_of_accidents(index: Index, leaves: Sequence[Any]) -> None:
    """Warns of ties that nobody can have meant, and of ties that a trace has broken.

    A kind of model that is known costs nothing: the check runs again only after the library has met another tie.
    """
    structure = index.structure
    if not structure.is_traced and index.looked_at == changes():
        return
    its = tuple([(alias.source, alias.leaf) for alias in index.ties if alias.is_said and not alias.transforms])
    # Each mask, or callable, makes another index at each call.
    seen = structure.remember(("looked at", index.trained, its), lambda: [-1])
    if seen[0] != changes():
        said.add(structure, its)
        if not structure.is_traced:
            _warn_of_unsaid(index, leaves)
    if structure.is_traced:
        warn_of_lost_ties(structure, leaves, index.sources, index.trained)
    index.looked_at = seen[0] = changes()


# -- One array, though nobody says so ----------------------------------------------------------------------------------


def _warn_of_unsaid(index: Index, leaves: Sequence[Any]) -> None:
    structure = index.structure
    unsaid = [(each.source, each.leaf) for each in index.ties if not each.is_said and index.trained[each.leaf]]
    pairs = _looked_at.without(structure, said.without(structure, unsaid))
    if not pairs:
        return
    _looked_at.add(structure, pairs)
    copies = _copies(structure) if len(pairs) == len(unsaid) else []
    if copies:
        warn(_COPIES.format(len(copies), first_few([repr(node.path) for node in copies])))
    else:
        is_constant = functools.cache(lambda leaf: _is_one_number(_values(leaves[leaf])))
        pairs = [pair for pair in pairs if leaves[pair[0]].size > 1 and _is_accident(structure, pair, is_constant)]
        if pairs:
            warn(_in_words(structure, pairs))
    if copies or pairs:
        # Where they part from now on, nobody has lost anything.
        note_untied(structure, [leaf for pair in pairs for leaf in pair])


def _copies(structure: Structure) -> list[Node]:
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
    shared = set(holding(structure, *pair))
    above = [[structure.nodes[n] for n in holding(structure, i, i) if n not in shared] for i in pair]
    for one, other in ((one, other) for one in above[0] for other in above[1]):
        arrays = _arrays_below(structure, one)
        if arrays == _arrays_below(structure, other) and not all(is_constant(i) for _, i in arrays):
            return False
    return True


def _in_words(structure: Structure, pairs: Sequence[Pair]) -> str:
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


def warn_of_parted_ties(index: Index, leaves: Sequence[Any]) -> None:
    """Warns of ties of a concrete model that an operation has broken. Called where the layout that trains is known.

    Other functions that see the model, such as a summary, do not know that layout, and it may record the tie.
    """
    structure = index.structure
    seen = structure.remember(("compared", index.trained, index.ties), lambda: [-1])
    if structure.is_traced or seen[0] == changes():
        return
    seen[0] = changes()
    # Of ties that only a layout knows `warn_of_forgotten_ties` warns. Where one of the two is frozen, somebody has
    # decided that they are not one.
    given = {frozenset(pair) for *pair, _ in given_to(structure)}
    pairs = [pair for pair in parted(structure, index.sources) if all(index.trained[i] for i in pair)]
    pairs = _compared.without(structure, [pair for pair in pairs if frozenset(pair) not in given])
    lost = list[Pair]()
    for pair in pairs:
        one, other = (_values(leaves[i]) for i in pair)
        # Zeros are equal without having been one: such arrays tell nothing yet.
        if one and other and not _is_one_number(one):
            _compared.add(structure, [pair])
            lost += [pair] if _are_equal(one, other) else []
    if lost:
        paths = structure.paths
        names = [f"{paths[one]!r} and {paths[other]!r}" for one, other in lost]
        calls = [f"tp.tie(model, {paths[other]!r}, to={paths[one]!r})" for one, other in lost]
        warn(_PARTED.format(first_few(names), first_few(calls)))


_PARTED = (
    "{} were one array in an earlier model of this structure. In this model they are two, equal bit for bit, as after "
    "jax.jit, jax.tree.map, a cast or a loaded file, and each trains separately. Tie them again: model = {}; tp.jit "
    "and tp.saving keep ties. To train them separately, write model = tp.untie(model)"
)


# -- Values ------------------------------------------------------------------------------------------------------------


def _is_one_number(values: Sequence[np.ndarray]) -> bool:
    """Returns whether all elements of an array are equal; `False` if they cannot be read."""
    first = [each[0] for each in values if each.size][:1]
    parts = [part for each in values for part in (each[:_FEW], each)]  # nearly always the first few elements tell
    return bool(values) and all(bool((part == number).all()) for part in parts for number in first)


_FEW = 1024


def _are_equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Returns whether two arrays that are split alike are equal bit for bit."""
    ours, theirs = ([(each.dtype, each.view(np.uint8)) for each in values] for values in (one, other))
    if len(ours) != len(theirs):
        return False
    return all(a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in zip(ours, theirs, strict=True))


def _values(array: Any) -> list[np.ndarray]:
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
