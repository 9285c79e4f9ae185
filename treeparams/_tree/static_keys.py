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

_BOTH = str, bytes, int, type(None), enum.Enum, np.dtype, np.ufunc, types.ModuleType
# Values that cannot change in place. Two of one type are equal only if no program could tell them apart.
_ATOMS = *_BOTH, type, types.FunctionType, types.BuiltinFunctionType
_SIMPLE = frozenset({str, bytes, int, bool, type(None)})  # of just these types: values that are their own keys
# Types whose instances hold no other objects.
_OF_DEVICES = jax.Device, jax.sharding.Mesh, jax.sharding.Sharding, jax.sharding.PartitionSpec
_PLAIN = *_BOTH, float, complex, np.generic, *_OF_DEVICES
_WRITTEN_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: not one of the types that are part of the interpreter

contents: dict[type, Callable[[Any], Sequence[Any]]] = {}
"""Classes of this library whose objects change only where the static values in them do, each with a function that lists
these values. Objects that are equal have equal static values, and no program could tell them apart by anything else."""


def static_key(value: object, *, strict: bool = False, bare: list[object] | None = None) -> Hashable:
    """Returns a hashable key that is equal for values that are equal in type and content.

    Containers, dataclasses and other objects are compared by content, arrays by identity. Bare `object()`s, which have
    no content, are identified by the order in which they appear in the value, so that a key equals itself after
    pickling; with `strict` they are compared by identity. To number those of several values together, pass the list
    `bare`, which collects them.
    """
    return _key_of(value, strict, [] if bare is None else bare, set())


def _key_of(value: Any, strict: bool, bare: list[object], above: set[int]) -> Hashable:
    """Returns the key of a value within those with the identities `above`."""
    kind = type(value)
    if kind in _SIMPLE:
        return kind, value
    if kind in (float, complex):
        return kind, repr(value)  # tells 0.0 from -0.0, and NaN is equal to NaN
    if isinstance(value, np.generic):
        return kind, value.dtype, value.tobytes()
    if isinstance(value, (jax.Array, np.ndarray)):
        can_change = isinstance(value, np.ndarray) and value.flags.writeable
        return _Identity(value, value.tobytes() if can_change else None)
    if isinstance(value, _ATOMS) or _is_of_jax(kind) or (kind in contents and is_settled(value)):
        return kind, value
    if kind is object:
        if strict:
            return kind, value
        if not any(each is value for each in bare):
            bare.append(value)
        return kind, next(i for i, each in enumerate(bare) if each is value)
    # A value that contains itself would be walked forever. Where it comes round again its type stands for it.
    if id(value) in above:
        return kind, "contains itself"
    above.add(id(value))
    try:
        return kind, _content_of(value, lambda part: _key_of(part, strict, bare, above))
    finally:
        above.discard(id(value))


def _content_of(value: Any, key: Callable[[Any], Hashable]) -> Hashable:
    """Returns the keys of the parts of a value; of one without parts it and the key of its attributes."""
    parts = _parts(value)
    if parts is not None:
        return (frozenset if isinstance(value, Set) else tuple)(map(key, parts))
    # Anything else: by its own `==`, where that promises not to change, and by its attributes, which do.
    try:
        state = object.__getstate__(value)
    except TypeError:  # of a type written in C
        state = None
    try:
        hash(value)
    except TypeError:
        return key(state) if state is not None else _Identity(value, copy.deepcopy(value))
    return value, key(state)


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


def found_at(module: str, name: str) -> Any:
    """Looks up a dotted name in an imported module; returns `None` if it does not exist."""
    return functools.reduce(lambda found, each: getattr(found, each, None), name.split("."), sys.modules.get(module))


@with_object
def _is_of_jax(kind: type) -> bool:
    # Compiled functions, functions with derivatives of their own, meshes, shardings, sentinels: none of them changes.
    # A Module may hold a list, so it goes by content.
    return kind.__module__.partition(".")[0] in ("jax", "jaxlib", "equinox") and not issubclass(kind, eqx.Module)


def is_settled(value: object) -> bool:
    """Returns whether a value cannot change in place, so that the same object always has the same content."""
    kind = type(value)
    if kind in (tuple, frozenset) or kind in contents:
        return all(map(is_settled, contents.get(kind, iter)(value)))
    return isinstance(value, (*_ATOMS, np.generic)) or kind in (float, complex, object) or _is_of_jax(kind)


def _parts(value: Any) -> Sequence[Any] | None:
    """Returns the values that a container, a function with bound arguments, or a pytree consists of."""
    if isinstance(value, (tuple, list, collections.deque, Set)):
        return list(value)
    if isinstance(value, Mapping):  # in their order, which decides the order of a dictionary built in a program
        return [each for pair in value.items() for each in pair]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    node = jtu.default_registry.flatten_one_level(value)
    return None if node is None else [node[1], *node[0]]


class _Identity:
    """A key of an array, or of another value that cannot be hashed: of the same object with the same content."""

    def __init__(self, value: Any, then: Any) -> None:
        self.value, self.then = value, then

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value and bool(self.then == other.then)

    def __hash__(self) -> int:
        return id(self.value)


def is_harmless(static: Any, depth: int = 4) -> bool:
    """Returns whether holding a static value keeps no array or tracer alive.

    A tree with a value that may hold one, such as a closure over an array, is not remembered but worked out at each
    call: a tracer that is kept alive is an error under `jax.checking_leaks`, and an array is memory.
    """
    kind = type(static)
    if isinstance(static, _PLAIN) or kind is object:
        return True
    # What a module holds by name lives as long as the module, whoever remembers it.
    module, name = getattr(static, "__module__", None), getattr(static, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and found_at(module, name) is static:
        return True
    if isinstance(static, (jax.Array, np.ndarray)) or depth == 0:
        return False
    if isinstance(static, types.FunctionType):
        try:
            cells = [cell.cell_contents for cell in static.__closure__ or ()]
        except ValueError:  # an empty cell, of a name that is not bound yet
            return False
        held = [static.__defaults__, static.__kwdefaults__, vars(static), *cells]
    elif kind in contents:
        held = contents[kind](static)
    elif kind.__module__.startswith("jaxlib"):
        held = [getattr(static, "__wrapped__", np.empty(0))]  # the function that `jax.jit` compiles
    else:
        held = _parts(static)
        if held is None and all(cls.__flags__ & _WRITTEN_IN_PYTHON for cls in kind.__mro__[:-1]):
            held = [object.__getstate__(static)]  # attributes and slots
    return held is not None and all(is_harmless(each, depth - 1) for each in held)
