"""Remembers ties that a trace, another operation, or a layout that is not passed on, would lose silently.

It records the ties by identity of trees that the library meets outside a trace (`meet`, `note_ties`), the tracers that
are separate because the arrays were (`keep_apart`), the ties that a layout was given (`note_given`), and pairs of
leaves that the user has tied (`said`) or untied (`note_untied`). From these it finds the pairs of a model that were one
array and no longer are (`parted`), and the ties given to models of a kind (`given_to`). It warns, once, of those that a
trace has lost (`warn_of_lost_ties`). It holds no arrays.
"""

import collections
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.core import Tracer

from .marks import Marks, holding
from .memory import Recent
from .messages import warn
from .structure import Spec, Structure
from .text import first_few

# Kinds of structure that were met with one array at several leaves: shapes, and pairs of leaves. No arrays.
_met_tied: "collections.OrderedDict[int, list[tuple[list[Any], list[tuple[int, int]]]]]" = collections.OrderedDict()
_met_apart = Recent()  # kinds that were met with an array of its own at each leaf, and not tied before
Given = tuple[int, int, bool]  # a leaf, the leaf that it is tied to, and whether by a transform
_given: "collections.OrderedDict[tuple[int, ...], dict[Given, None]]" = collections.OrderedDict()  # ties, to layouts
_on_purpose: dict[int, "weakref.ref[Tracer]"] = {}  # tracers that are apart because the arrays were, by identity
_MET = 1024  # kinds
_SHAPES = 255  # of each
_changing = threading.Lock()
_changes = 0

said = Marks()
"""Pairs that the user has tied: by a class, a layout's `ties=`, or `tp.tie`."""
_untied = Marks()  # pairs that are two because somebody has parted them
_told = Marks()  # pairs that a trace has lost, and of which there was a warning


def meet(structure: Structure, is_call: bool) -> None:
    """Remembers the ties by identity of a tree, or of each argument of a call, that is met outside a trace.

    It does not if the same kind was met without ties before: the gradient of a sum has one object at two paths, and it
    has the structure of its model. `tp.tie` and layouts, which tie a model met before, record that themselves.
    """
    first, pairs = structure.first, []
    if len(set(first)) < len(first):
        pairs = [(first[i], i) for i in structure.parameters if first[i] != i]
    # A call is (function, arguments, keywords), so each argument is a node whose path has two entries.
    for number, root in enumerate(structure.nodes if is_call else structure.nodes[:1]):
        if len(root.entries) != (2 if is_call else 0):
            continue
        kind = structure.kind_of(number)
        if kind not in _met_tied and not [a for a, b in pairs if root.start <= a and b < root.stop]:
            _met_apart.note([kind])
    if pairs:
        note_ties(structure, pairs, above=2 if is_call else 0)


def note_ties(structure: Structure, pairs: Sequence[tuple[int, int]], *, above: int | None = None) -> None:
    """Remembers that parameters of a structure are one array, outside any trace.

    A model may be part of something else, such as a state. So each node that holds both leaves of a pair is remembered,
    if its path has at least `above` entries; without `above`, even a node of a kind that was met without ties.
    """
    shapes = [spec and spec.shape for spec in structure.specs]
    inside: dict[int, list[tuple[int, int]]] = {}  # each node that holds pairs
    for a, b in map(sorted, pairs):
        for number in holding(structure, a, b):
            start = structure.nodes[number].start
            inside.setdefault(number, []).append((a - start, b - start))
    for number in sorted(inside):
        node, kind = structure.nodes[number], structure.kind_of(number)
        found = shapes[node.start : node.stop], inside[number]
        if len(node.entries) < (above or 0) or (above is not None and kind in _met_apart):
            continue
        with _changing:
            _met_apart.pop(kind, None)
            if found not in _met_tied.setdefault(kind, []):
                _met_tied[kind] = [*_met_tied[kind][-_SHAPES:], found]
                _note_change()
            while len(_met_tied) > _MET:
                _met_tied.popitem(last=False)


def keep_apart(tracers: Iterable[Any]) -> None:
    """Remembers tracers that are separate as their arrays are: arguments of `tp.jit`, slots of a `Rest`, copies."""
    if _met_tied:
        for each in tracers:
            if isinstance(each, Tracer):
                # An identity serves another object when a tracer is gone, so the entry goes with it.
                key = id(each)
                _on_purpose[key] = weakref.ref(each, lambda _, key=key: _on_purpose.pop(key, None))


def likeness(structure: Structure) -> tuple[int, ...]:
    """Returns a key that is equal for models of one class with the same paths, shapes and dtypes."""
    return hash(structure), *structure.kinds[:1]


def note_given(structure: Structure, ties: Iterable[Given]) -> None:
    """Remembers ties that a layout was given, which neither arrays nor classes show."""
    _given.setdefault(likeness(structure), {}).update(dict.fromkeys(ties))
    if len(_given) > _MET:
        _given.popitem(last=False)


def given_to(structure: Structure) -> Iterable[Given]:
    """Returns the ties that layouts of such models were given."""
    return _given.get(likeness(structure), ()) if _given else ()


def note_said(structure: Structure, pairs: Sequence[tuple[int, int]]) -> None:
    """Remembers pairs of leaves that the user ties, even if they were untied before."""
    said.add(structure, pairs)
    _untied.discard(structure, pairs)
    _note_change()


def note_untied(structure: Structure, leaves: Iterable[int]) -> None:
    """Remembers that the user unties these leaves from those that are, or were before, the same array."""
    chosen, identical = frozenset(leaves), enumerate(structure.first)
    pairs = {*[(first, i) for i, first in identical if first != i], *_met_pairs(structure)}
    _untied.add(structure, [pair for pair in pairs if not chosen.isdisjoint(pair)])


def changes() -> int:
    """Returns how often this memory has changed so that more ties may count as lost."""
    return _changes


def _note_change() -> None:
    global _changes
    _changes += 1


def parted(structure: Structure, sources: Mapping[int, int]) -> list[tuple[int, int]]:
    """Returns the pairs of leaves that were one array in a model met before and are known to be two in this one.

    Pairs that the user has untied are left out.
    """
    pairs = [pair for pair in dict.fromkeys(_met_pairs(structure)) if _are_two(structure, sources, *pair)]
    return _untied.without(structure, pairs)


def _met_pairs(structure: Structure) -> Iterator[tuple[int, int]]:
    """Yields the pairs of leaves that were one array in models of the kind of this one, or of a node in it."""
    for node, kind in zip(structure.nodes, structure.kinds, strict=True) if _met_tied else ():
        for shapes, pairs in _met_tied.get(kind, ()):
            if _are_mapped(structure.specs[node.start : node.stop], shapes):
                yield from [(a + node.start, b + node.start) for a, b in pairs]


def warn_of_lost_ties(
    structure: Structure, leaves: Sequence[Any], sources: Mapping[int, int], trained: Sequence[bool]
) -> None:
    """Warns, once, if a traced model has two arrays in place of one that was met before.

    It does not warn of aliases whose sources are known in spite of the trace, nor of frozen ones, which have no
    gradient that could make them differ.
    """
    pairs = [pair for pair in parted(structure, sources) if any(trained[i] for i in pair)]
    pairs = [pair for pair in pairs if not all(id(leaves[i]) in _on_purpose for i in pair)]
    lost = _told.without(structure, pairs)
    if lost:
        _told.add(structure, lost)
        warn(
            _LOST.format(first_few([f"{structure.paths[one]!r} and {structure.paths[other]!r}" for one, other in lost]))
        )


def _are_two(structure: Structure, sources: Mapping[int, int], a: int, b: int) -> bool:
    """Returns whether two leaves belong to different parameters."""
    one, other = structure.first[a], structure.first[b]
    return sources.get(one, one) != sources.get(other, other)


def _are_mapped(specs: Sequence[Spec | None], shapes: Sequence[tuple[int, ...] | None]) -> bool:
    """Returns whether arrays have the shapes that were met, or these without their first axes.

    Inside `vmap` and `scan`, all leaves lack the axes that are mapped, the same number of each. The kind of a node does
    not include shapes, so the node is found there too; a model that only shares paths and dtypes is excluded here.
    """
    now = [(spec.shape, shape) for spec, shape in zip(specs, shapes, strict=True) if spec is not None]
    mapped = {len(shape or ()) - len(inner) for inner, shape in now}
    return len(mapped) == 1 and all(inner == (shape or ())[min(mapped) :] for inner, shape in now)


_LOST = (
    "{} were one array in an earlier model of this structure. In this model, an argument of jax.jit, vmap, scan or the "
    "like, they are two, each with a separate gradient. Make a layout outside and pass it in (known = "
    "tp.layout(model); tp.grad(loss, known)), or pass (params, rest) of tp.partition, or a Restructure of tp.ravel; or "
    "use tp.jit. If this is another model that only looks alike, pass its own layout to silence this warning"
)
