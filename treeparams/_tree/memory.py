"""The memory of models that the library has met, and warnings at the line of the caller. No number depends on it.

A *fact* is a word about some leaves: that they were one array, that you parted them, that a warning named them. It is
kept at each node that holds all of these leaves, by the kind of the node. So it is known of every model of that kind,
of a part of one, and of whatever holds one. One table has them all. It holds no object of a model, and it forgets the
oldest.
"""

import collections
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jaxtyping
from jax.core import Tracer

from .structure import Node, Spec, Structure

Pair = tuple[int, int]
_Shapes = tuple[tuple[int, ...] | None, ...]  # of the leaves of a node

changes = 0
"""How often this memory has changed so that more ties may count as lost."""

# By a word and the kind of a node: leaves; or, of words about ties, the shapes of all leaves, and pairs that are tied.
_facts: "collections.OrderedDict[Hashable, dict[Any, None]]" = collections.OrderedDict()
_MOST, _SHAPES = 1000, 100  # entries, and shapes of one kind
_changing = threading.Lock()  # for writing; what a reader has found does not change any more
_on_purpose: dict[int, "weakref.ref[Tracer]"] = {}  # tracers that are apart because the arrays were, by identity

_OF_ONE_MODEL = frozenset({"lost", "parted", "forgotten"})
"""Warnings that are given once for each model, where a model and what holds it are the same. Models of other shapes, or
with other parts around these leaves, are others."""


def _is_new(key: Hashable) -> bool:
    """Returns whether nobody has asked this of that key before."""
    if key in _facts:
        return False
    _set_facts(key)
    return True


def note(word: str, structure: Structure, pairs: Iterable[Pair], *, in_place_of: str = "") -> None:
    """Remembers a fact about the leaves of each pair, and forgets another one."""
    found = collections.defaultdict[tuple[Hashable, ...], set[int]](set)
    for pair in pairs:
        for key, leaves in _places(word, structure, pair, "a part", "the whole"):
            found[key] |= leaves
    for key, leaves in found.items():
        _set_facts(key, leaves)
        other = in_place_of, *key[1:]
        if not leaves.isdisjoint(_facts.get(other, ())):
            _set_facts(other, without=leaves)
            _note_change()


def unknown(word: str, structure: Structure, pairs: Iterable[Pair]) -> list[Pair]:
    """Returns the pairs of which the fact is not known."""
    places = lambda pair: _places(word, structure, pair, "the whole", "a part")
    return [pair for pair in pairs if not any(leaves <= _facts.get(key, {}).keys() for key, leaves in places(pair))]


def _places(
    word: str, structure: Structure, pair: Pair, anywhere: str, at_root: str
) -> Iterator[tuple[tuple[Hashable, ...], set[int]]]:
    """Yields the key of each node that holds a pair, and the leaves as numbered within that node.

    A warning is noted of `the whole` of the model that it names, and of each `part`. So a model is known if it is a
    part of such a model, or has a part that is the whole of one.
    """
    for number in _holding(structure, *pair):
        node, key = structure.nodes[number], (word, structure.kinds[number])
        leaves = {i - node.start for i in pair}
        if word in _OF_ONE_MODEL:
            key = *key, hash(_shapes(structure, node))
            if not number:
                yield (*key, at_root), leaves
            key = *key, anywhere
        yield key, leaves


def _set_facts(key: Hashable, facts: Iterable[Any] = (), without: Collection[Any] = ()) -> None:
    with _changing:
        kept = [each for each in _facts.get(key, ()) if each not in without]
        _facts[key] = dict.fromkeys([*kept, *facts])
        _facts.move_to_end(key)
        while len(_facts) > _MOST:
            _facts.popitem(last=False)


def _note_change() -> None:
    global changes
    changes += 1


def _holding(structure: Structure, a: int, b: int) -> list[int]:
    """Returns the nodes that hold both of two leaves, from the root to the innermost."""
    found, number, nodes = [], 0, structure.nodes
    while number < len(nodes) and nodes[number].start <= min(a, b):
        is_within = max(a, b) < nodes[number].stop
        found += [number] * is_within
        number = number + 1 if is_within else nodes[number].last
    return found


# -- Ties --------------------------------------------------------------------------------------------------------------


def meet(structure: Structure, is_call: bool) -> None:
    """Remembers the ties by identity of a tree, or of each argument of a call, that is met outside a trace.

    It does not if the same kind was met without ties before: the gradient of a sum has one object at two paths, and it
    has the structure of its model. `tp.tie` and layouts, which tie a model met before, record that themselves.
    """
    first, depth = structure.first, 2 if is_call else 0  # (function, arguments, keywords): an argument has two entries
    pairs = [(first[i], i) for i in structure.parameters if first[i] != i]
    for number, root in enumerate(structure.nodes if is_call else structure.nodes[:1]):
        if len(root.entries) == depth and not any(root.start <= a and b < root.stop for a, b in pairs):
            _set_facts(("one", structure.kind_of(number)))
    note_ties(structure, pairs, above=depth)


def note_ties(structure: Structure, pairs: Iterable[Pair], *, word: str = "one", above: int | None = None) -> None:
    """Remembers pairs of parameters that are one array, or that a layout was given, at each node that holds both.

    With `above`, only at nodes whose paths have at least so many entries, and of kinds not met without ties.
    """
    inside = collections.defaultdict[int, set[Pair]](set)
    for a, b in pairs:
        for number in _holding(structure, a, b):
            start = structure.nodes[number].start
            inside[number].add((a - start, b - start))
    for number, its in inside.items():
        node, key = structure.nodes[number], (word, structure.kind_of(number))
        known, fact = _facts.get(key), (_shapes(structure, node), frozenset(its))
        if above is not None and (len(node.entries) < above or known == {}):
            continue
        if fact not in (known := known or {}):
            _set_facts(key, [fact], without=list(known)[:-_SHAPES])
            _note_change()


def met(word: str, structure: Structure) -> list[Pair]:
    """Returns the pairs that were one array, or given, in models of the kind of this one, or of a node in it."""
    found = dict[Pair, None]()
    for node, kind in zip(structure.nodes, structure.kinds, strict=True) if changes else ():
        for shapes, pairs in _facts.get((word, kind), ()):
            if _are_mapped(structure.specs[node.start : node.stop], shapes):
                found |= {(a + node.start, b + node.start): None for a, b in sorted(pairs)}
    return list(found)


def _shapes(structure: Structure, node: Node) -> _Shapes:
    return tuple([spec and spec.shape for spec in structure.specs[node.start : node.stop]])


def _are_mapped(specs: Sequence[Spec | None], shapes: _Shapes) -> bool:
    """Returns whether arrays have the shapes that were met, or these without their first axes.

    Inside `vmap` and `scan`, all leaves lack the axes that are mapped, the same number of each. The kind of a node does
    not include shapes, so the node is found there too; a model that only shares paths and dtypes is excluded here.
    """
    now = [(spec.shape, shape) for spec, shape in zip(specs, shapes, strict=True) if spec is not None]
    mapped = {len(shape or ()) - len(inner) for inner, shape in now}
    return len(mapped) == 1 and all(inner == (shape or ())[min(mapped) :] for inner, shape in now)


def keep_apart(tracers: Iterable[Any]) -> None:
    """Remembers tracers that are separate as their arrays are: arguments of `tp.jit`, slots of a `Rest`, copies."""
    for each in tracers if changes else ():
        if isinstance(each, Tracer):
            # An identity serves another object when a tracer is gone, so the entry goes with it.
            key = id(each)
            _on_purpose[key] = weakref.ref(each, lambda _, key=key: _on_purpose.pop(key, None))


def are_apart(values: Iterable[Any]) -> bool:
    """Returns whether values are tracers that are separate as their arrays are."""
    return all(id(each) in _on_purpose for each in values)


# -- Warnings at the line that calls this library ----------------------------------------------------------------------

AS_ARRAY = "write jnp.asarray(number), or tp.field(converter=jnp.asarray) in its class"
# Where run-time checks of annotations are switched on, they stand between the calls of this library.
_OURS = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(jaxtyping.__file__), "<@beartype(treeparams")


def warn(message: str, about: Hashable = None) -> None:
    """Gives a warning at the line that called this library; only once for each `about`."""
    if about is not None and not _is_new(about):
        return
    frame, levels = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, levels = frame.f_back, levels + 1
    warnings.warn(message, UserWarning, stacklevel=levels)
