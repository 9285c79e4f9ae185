"""Recognising a tree whose structure is known, in microseconds.

Scanning a tree costs Python work per node, so it is done once per kind of tree. A tree is recognised by comparisons
that run in C: its treedef, the types, shapes and dtypes of its leaves, the identity of its static values. A treedef
alone does not do: JAX compares static fields by `==`, so `2`, `2.0` and `True` are one to it (see `_exact`).
"""

import collections
import contextlib
import functools
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ._declare import declarations
from ._exact import exact, identical
from ._structure import Structure, flatten, getter, is_array, same_treedef, scan

# JAX hashes a treedef without its static values, so that models that differ in these alone share a bucket. Enough for a
# program, small enough to let go of what a long notebook session has built and thrown away.
_BUCKETS = 256
_PER_BUCKET = 64

_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")


class _Seen(NamedTuple):
    """What a structure was scanned from: a tree that agrees in all of it has the same structure."""

    structure: Structure
    treedef: Any
    context: tuple[Any, ...]
    types: list[type]
    positions: list[int]  # of array leaves
    arrays: Callable[[list[Any]], tuple[Any, ...]]  # leaves -> arrays
    shapes: list[tuple[int, ...]]
    dtypes: list[Any]
    distinct: int  # array objects among the array leaves
    statics: list[Any]  # holding them keeps their identity theirs
    key: Any  # of the statics, exact
    mutable: bool  # whether a static value may have other content though it is the same object

    def fits(self, tree: "_Unknown", by_shape: bool) -> bool:
        if self.types != tree.types or self.context != tree.context or not same_treedef(self.treedef, tree.treedef):
            return False
        leaves = tree.leaves
        arrays = self.arrays(leaves)
        return (
            (not by_shape or list(map(_shape, arrays)) == self.shapes)
            and (not by_shape or list(map(_dtype, arrays)) == self.dtypes)
            and self._same_array_objects(leaves, arrays)
            and self._same_statics(tree.statics)
        )

    def _same_statics(self, statics: list[Any]) -> bool:
        # Trees made from one another share the objects; only a tree built afresh takes the comparison by value.
        if not self.mutable and identical(statics, self.statics):
            return True
        return exact(statics) == self.key

    def _same_array_objects(self, leaves: list[Any], arrays: tuple[Any, ...]) -> bool:
        if len(set(map(id, arrays))) != self.distinct:
            return False
        first = self.structure.first
        return self.distinct == len(arrays) or all(leaves[i] is leaves[first[i]] for i in self.positions)


class _Unknown(NamedTuple):
    """What is looked at to recognise a tree."""

    leaves: list[Any]
    treedef: Any
    context: tuple[Any, ...]
    types: list[type]
    statics: list[Any]


_seen: "collections.OrderedDict[int, list[_Seen]]" = collections.OrderedDict()


def structure_of(tree: Any, *, by_shape: bool = True) -> tuple[list[Any], Any, Structure]:
    """The leaves of a tree, its treedef, and its structure.

    The structure's own treedef may hold other static *objects* of the same type and value.

    Args:
        tree: any pytree.
        by_shape: whether the shapes and dtypes of the structure must be those of the tree.

    Raises:
        ValueError: the tree is cyclic.
    """
    leaves, treedef = flatten(tree)
    context = (declarations(), jax.dtypes.canonicalize_dtype(np.float64))
    unknown = _Unknown(leaves, treedef, context, list(map(type, leaves)), _static_values(treedef))
    bucket = _seen.setdefault(hash(treedef), [])
    for i, each in enumerate(bucket):
        if each.fits(unknown, by_shape):
            if i:
                bucket.insert(0, bucket.pop(i))
            return leaves, treedef, each.structure
    seen = _see(tree, unknown)
    if not any(map(_keeps_alive, unknown.statics)):
        bucket.insert(0, seen)
        del bucket[_PER_BUCKET:]
        _seen.move_to_end(hash(treedef))
        while len(_seen) > _BUCKETS:
            _seen.popitem(last=False)
    return leaves, treedef, seen.structure


def _see(tree: Any, unknown: _Unknown) -> _Seen:
    leaves, treedef, context, types, statics = unknown
    positions = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    arrays = [leaves[i] for i in positions]
    return _Seen(
        scan(tree, leaves),
        treedef,
        context,
        types,
        positions,
        getter(positions),
        list(map(_shape, arrays)),
        list(map(_dtype, arrays)),
        len(set(map(id, arrays))),
        statics,
        exact(statics),
        any(isinstance(value, (list, dict, set)) for value in statics),
    )


def _keeps_alive(static: Any, depth: int = 4) -> bool:
    # A static function may hold arrays or tracers, which would live on in what is remembered. What cannot be seen
    # through is not remembered either; a tree with it is scanned at each call.
    if isinstance(static, _HARMLESS):
        return False
    if isinstance(static, (tuple, list)):
        return any(_keeps_alive(each, depth) for each in static)
    if isinstance(static, functools.partial):
        return _keeps_alive([static.func, *static.args, *static.keywords.values()], depth)
    if isinstance(static, types.FunctionType):
        return bool(static.__closure__) and (depth == 0 or _keeps_alive(_contents(static), depth - 1))
    return isinstance(static, (types.MethodType, jax.Array, np.ndarray)) or depth < 4


def _contents(function: types.FunctionType) -> list[Any]:
    contents = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell, of a name that is not bound yet
            contents.append(cell.cell_contents)
    return contents


# What a closure may hold without keeping an array alive.
_HARMLESS = (int, float, complex, str, bytes, type(None), type, np.generic, np.dtype, types.BuiltinFunctionType)


def _static_values(treedef: Any) -> list[Any]:
    values: list[Any] = []

    def visit(_: Any, data: Any) -> None:
        if type(data) in (tuple, list):
            values.extend(data)  # what is made anew at each flattening, around values that are not
        else:
            values.append(data)

    treedef.walk(visit, bool, range(treedef.num_leaves))
    return values
