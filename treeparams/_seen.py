"""Recognising a tree whose structure is known, in microseconds.

Scanning a tree costs Python work per node, so it is done once per kind of tree. A tree is recognised by comparisons
that run in C: its treedef, the types, shapes and dtypes of its leaves, the identity of its static values. A treedef
alone does not do: JAX compares static fields by `==`, so `2`, `2.0` and `True` are one to it (see `_exact`).
"""

import collections
import functools
import operator
import types
from typing import Any, NamedTuple

import jax
import numpy as np

from ._declare import declarations
from ._exact import exact
from ._structure import Structure, flatten, is_array, scan

# Enough for a program, small enough to let go of what a long notebook session has built and thrown away.
_TREEDEFS = 256
_PER_TREEDEF = 8

_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")


class _Seen(NamedTuple):
    """What a structure was scanned from: a tree that agrees in all of it has the same structure."""

    structure: Structure
    context: tuple[Any, ...]
    types: list[type]
    arrays: tuple[int, ...]  # the positions of array leaves
    shapes: list[tuple[int, ...]]
    dtypes: list[Any]
    distinct: int  # array objects among the array leaves
    statics: list[Any]  # holding them keeps their identity theirs
    key: Any  # of the statics, exact
    mutable: bool  # whether a static value may have other content though it is the same object

    def fits(self, context: tuple[Any, ...], types: list[type], leaves: list[Any], statics: list[Any]) -> bool:
        if self.types != types or self.context != context:
            return False
        arrays = leaves if len(self.arrays) == len(leaves) else [leaves[i] for i in self.arrays]
        return (
            list(map(_shape, arrays)) == self.shapes
            and list(map(_dtype, arrays)) == self.dtypes
            and self._same_array_objects(leaves, arrays)
            and self._same_statics(statics)
        )

    def _same_statics(self, statics: list[Any]) -> bool:
        # Trees made from one another share the objects; only a tree built afresh takes the comparison by value.
        if not self.mutable and len(statics) == len(self.statics) and all(map(operator.is_, statics, self.statics)):
            return True
        return exact(statics) == self.key

    def _same_array_objects(self, leaves: list[Any], arrays: list[Any]) -> bool:
        if len(set(map(id, arrays))) != self.distinct:
            return False
        first = self.structure.first
        return self.distinct == len(arrays) or all(leaves[i] is leaves[first[i]] for i in self.arrays)


_seen: "collections.OrderedDict[Any, list[_Seen]]" = collections.OrderedDict()


def structure_of(tree: Any) -> tuple[list[Any], Any, Structure]:
    """The leaves of a tree, its treedef, and its structure.

    The structure's own treedef may hold other static *objects* of the same type and value.

    Raises:
        ValueError: the tree is cyclic.
    """
    leaves, treedef = flatten(tree)
    context = (declarations(), jax.dtypes.canonicalize_dtype(np.float64))
    types = list(map(type, leaves))
    statics = _static_values(treedef)
    try:
        known = _seen.get(treedef, [])
    except Exception:  # static arrays, which JAX compares by an `==` that has no truth value
        return leaves, treedef, scan(tree, leaves)
    for each in known:
        if each.fits(context, types, leaves, statics):
            return leaves, treedef, each.structure
    seen = _see(tree, leaves, context, types, statics)
    if not any(map(_holds_others, statics)):
        _seen[treedef] = [seen, *known[: _PER_TREEDEF - 1]]
        while len(_seen) > _TREEDEFS:
            _seen.popitem(last=False)
    return leaves, treedef, seen.structure


def _holds_others(static: Any) -> bool:
    # A function may hold arrays or tracers, which being remembered would keep alive.
    if isinstance(static, functools.partial):
        return True
    return isinstance(static, types.MethodType) or bool(getattr(static, "__closure__", None))


def _see(tree: Any, leaves: list[Any], context: tuple[Any, ...], types: list[type], statics: list[Any]) -> _Seen:
    positions = tuple(i for i, leaf in enumerate(leaves) if is_array(leaf))
    arrays = [leaves[i] for i in positions]
    shapes, dtypes = list(map(_shape, arrays)), list(map(_dtype, arrays))
    distinct = len(set(map(id, arrays)))
    mutable = any(isinstance(value, (list, dict, set)) for value in statics)
    structure = scan(tree, leaves)
    return _Seen(structure, context, types, positions, shapes, dtypes, distinct, statics, exact(statics), mutable)


def _static_values(treedef: Any) -> list[Any]:
    values: list[Any] = []

    def visit(_: Any, data: Any) -> None:
        if type(data) in (tuple, list):
            values.extend(data)  # what is made anew at each flattening, around values that are not
        else:
            values.append(data)

    treedef.walk(visit, bool, range(treedef.num_leaves))
    return values
