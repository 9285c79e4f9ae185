"""Compares static values as a compiler must: by type and content, arrays by identity.

`2 == 2.0 == True` in Python, so a cache keyed by static values would run the program traced for one on the other and
return the wrong dtype. And a list that has changed since is equal to itself. `static_key` turns a value into a key that
avoids both: it distinguishes types and is a snapshot of values that can change in place. The bytes of arrays are never
hashed: a static array equals only itself, as a constant that is compiled into a program must.
"""

import collections
import copy
import enum
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

T = TypeVar("T")

# Values that cannot change in place. Two of one type are equal only if no program could tell them apart.
_ATOMS = (
    *(str, bytes, int, type(None), type, enum.Enum, np.dtype, np.ufunc, types.ModuleType),
    *(types.FunctionType, types.BuiltinFunctionType),
)

SIMPLE = frozenset({str, bytes, int, bool, type(None)})
"""Types, of just these and no others, whose values are their own keys together with the type."""


contents: dict[type, Callable[[Any], Sequence[Any]]] = {}
"""Classes of this library whose objects change only where the static values in them do, each with a function that lists
these values. Objects that are equal have equal static values, and no program could tell them apart by anything else."""


def static_key(value: object, *, strict: bool = False) -> Hashable:
    """Returns a hashable key that is equal for values that are equal in type and content.

    Containers, dataclasses and other objects are compared by content, arrays by identity. Bare `object()`s, which have
    no content, are identified by the order in which they appear in the value, so that a key equals itself after
    pickling; with `strict` they are compared by identity.
    """
    return StaticKeys(strict=strict).key(value)


def identical(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Returns whether two sequences hold the same objects."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


def with_object(function: Callable[..., T]) -> Callable[..., T]:
    """Remembers the answer of a function about an object, such as a class, as long as that lives.

    `functools.cache` would keep it alive. The function may have further arguments; it is asked again if they differ
    from the last ones. The answer must not hold the object.
    """
    known: dict[int, tuple[Any, T, object]] = {}  # by identity: a `WeakKeyDictionary` takes twice the time

    @functools.wraps(function)
    def remembering(given: Any, *args: Hashable) -> T:
        key = id(given)
        found = known.get(key)
        if found is None or found[0] != args:
            at_its_end = weakref.ref(given, lambda _: known.pop(key, None))
            found = known[key] = args, function(given, *args), at_its_end
        return found[1]

    return remembering


def is_settled(value: object) -> bool:
    """Returns whether a value cannot change in place, so that the same object always has the same content."""
    kind = type(value)
    if isinstance(value, (tuple, frozenset)) and kind in (tuple, frozenset):
        return all(map(is_settled, value))
    if kind in contents:
        return all(map(is_settled, contents[kind](value)))
    return kind in SIMPLE or isinstance(value, (*_ATOMS, np.generic)) or kind in (float, complex) or _is_of_jax(kind)


class StaticKeys:
    """Keys of the values within one value, which may contain itself and may hold one object several times."""

    def __init__(self, *, strict: bool = False) -> None:
        self.bare: list[object] = []  # the bare objects that were met, in order
        self._strict = strict
        self._above: set[int] = set()  # the objects that are being looked into

    def key(self, value: object) -> Hashable:
        """Returns the key of one of the values; see `static_key`."""
        kind = type(value)
        if kind in (float, complex):
            return kind, repr(value)  # tells 0.0 from -0.0, and NaN is equal to NaN
        if isinstance(value, np.generic):
            return kind, value.dtype, value.tobytes()
        if kind in contents and is_settled(value):
            return kind, value
        if isinstance(value, _ATOMS) or _is_of_jax(kind):
            return (kind, value) if not isinstance(value, jax.Array) else _Identity(value, None)
        if isinstance(value, np.ndarray):
            return _Identity(value, value.copy() if value.flags.writeable else None)
        if kind is object:
            if self._strict:
                return kind, value
            if not any(each is value for each in self.bare):
                self.bare.append(value)
            return kind, next(i for i, each in enumerate(self.bare) if each is value)
        # A value that contains itself would be walked forever. Where it comes round again its type stands for it.
        if id(value) in self._above:
            return kind, "contains itself"
        self._above.add(id(value))
        try:
            return kind, self._content(value)
        finally:
            self._above.discard(id(value))

    def _content(self, value: object) -> Hashable:
        if isinstance(value, (tuple, list, collections.deque)):
            return tuple([(type(each), each) if type(each) in SIMPLE else self.key(each) for each in value])
        if isinstance(value, Mapping):  # in their order, which decides the order of a dictionary built in a program
            return tuple((self.key(key), self.key(value[key])) for key in value)
        if isinstance(value, Set):
            return frozenset(map(self.key, value))
        if isinstance(value, slice):
            return self.key((value.start, value.stop, value.step))
        if isinstance(value, types.MethodType):
            return self.key(value.__func__), self.key(value.__self__)
        if isinstance(value, functools.partial):
            return self.key(value.func), self.key(value.args), self.key(value.keywords)
        node = jtu.default_registry.flatten_one_level(value)
        if node is not None:
            children, data = node
            return self.key(data), tuple(map(self.key, children))
        # Anything else: by its own `==`, where that promises not to change, and by its attributes, which do.
        try:
            state = object.__getstate__(value)
        except TypeError:  # of a type written in C
            state = None
        try:
            hash(value)
        except TypeError:
            return self.key(state) if state is not None else _Snapshot(value)
        return value, self.key(state)


@with_object
def _is_of_jax(kind: type) -> bool:
    # Compiled functions, functions with derivatives of their own, meshes, shardings, sentinels: none of them changes.
    # A Module may hold a list, so it goes by content.
    return kind.__module__.partition(".")[0] in ("jax", "jaxlib", "equinox") and not issubclass(kind, eqx.Module)


def found_at(module: str, name: str) -> Any:
    """Looks up a dotted name in an imported module; returns `None` if it does not exist."""
    found = sys.modules.get(module)
    for each in name.split("."):
        found = getattr(found, each, None)
    return found


class _Snapshot:
    """The key of a value that cannot be hashed, but can be copied and compared."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.then = copy.deepcopy(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Snapshot) or type(self.value) is not type(other.value):
            return False
        try:
            return bool(self.then == other.then)
        except Exception:  # a comparison of values that hold arrays may have no truth value
            return self.value is other.value

    def __hash__(self) -> int:
        return hash(type(self.value))


class _Identity:
    """A key of an array, equal to that of the same array with the same elements."""

    def __init__(self, value: jax.Array | np.ndarray, then: np.ndarray | None) -> None:
        self.value = value
        self.then = then

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity) or self.value is not other.value:
            return False
        return self.then is other.then or self._bytes() == other._bytes()

    def _bytes(self) -> bytes | None:
        return None if self.then is None else self.then.tobytes()

    def __hash__(self) -> int:
        return id(self.value)
