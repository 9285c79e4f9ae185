"""Static values compared as a compiler must: by value *and* type, arrays by identity.

`2 == 2.0 == True` in Python, so a cache keyed by static values runs the program traced for one on the other and gives
the wrong dtype. `exact` turns a value into a key for which this does not happen. The bytes of arrays are never read:
a static array is equal to itself alone, as a constant that is compiled into a program has to be.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np


def exact(value: Any) -> Any:
    """A hashable key, equal for values that are equal in type and content.

    >>> exact(2) == exact(2.0), exact([1, (2,)]) == exact([1, (2,)]), exact([1]) == exact((1,))
    (False, True, False)

    Containers go by content and order. Arrays go by identity; so do values that cannot be compared.
    """
    kind = type(value)
    if kind in (str, bytes, type(None), bool, int) or isinstance(value, type):
        return kind, value
    if kind in (float, complex):
        return kind, repr(value)  # tells 0.0 from -0.0, and NaN is equal to NaN
    if isinstance(value, (tuple, list)):
        return kind, tuple(map(exact, value))
    if isinstance(value, dict):
        return kind, tuple((exact(key), exact(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(map(exact, value))
    if isinstance(value, slice):
        return kind, exact((value.start, value.stop, value.step))
    if isinstance(value, functools.partial):
        return kind, exact(value.func), exact(value.args), exact(value.keywords)
    if isinstance(value, np.generic):
        return kind, value.dtype, value.tobytes()
    if isinstance(value, (jax.Array, np.ndarray)):
        return _Identity(value)
    leaves, treedef = jtu.tree_flatten(value)
    if jtu.treedef_is_leaf(treedef) and treedef.num_nodes == 1:
        if dataclasses.is_dataclass(value):
            fields = tuple(exact(getattr(value, each.name, None)) for each in dataclasses.fields(value))
            return kind, fields, _hashable(value)  # its own `==` may look at more than its fields
        return kind, _hashable(value)
    return kind, node_statics(treedef), tuple(map(exact, leaves))


def same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether two sequences of values are equal as `exact` has it; quick where they hold the same objects."""
    return identical(these, those) or exact(tuple(these)) == exact(tuple(those))


def identical(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


def node_statics(treedef: Any) -> tuple[Any, ...]:
    """The type, number of children and exact static value of each node of a treedef, in preorder."""
    found: list[Any] = []
    known: dict[tuple[int, ...], Any] = {}  # many nodes have the same objects as static values

    def static(value: Any) -> Any:
        if type(value) is not tuple:
            return exact(value)
        key = tuple(map(id, value))
        if key not in known:
            known[key] = exact(value)
        return known[key]

    def visit(treedef: Any) -> None:
        data = treedef.node_data()
        if data is None:
            found.append(None)
            return
        children = treedef.children()
        found.append((data[0], len(children), static(data[1])))
        for child in children:
            visit(child)

    visit(treedef)
    return tuple(found)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return _Equal(value)
    return value


class _Equal:
    """A key of what cannot be hashed, but compared."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Equal) or type(self.value) is not type(other.value):
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except Exception:  # what holds arrays may have no truth value
            return False

    def __hash__(self) -> int:
        return hash(type(self.value))


class _Identity:
    """A key that is equal to that of the same object alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
