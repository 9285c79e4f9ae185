"""Arrays inside leaves that are not pytrees, such as a plain dataclass or a deque: JAX functions do not see them."""

import collections
import enum
import functools
import itertools
import types
from collections.abc import Iterator, Mapping

import jax
import jax.tree_util as jtu
import numpy as np

from .._files.values import LONG
from .._tree.flattening import take
from .._tree.static_keys import with_object
from .._tree.structure import is_array, keys_of
from .._tree.text import describe
from ._contents import Contents

_DEEPEST = 8  # levels below a leaf; what lies deeper is hardly the leaf's own


def lost_arrays(contents: Contents) -> Iterator[str]:
    """Yields a sentence for each leaf with arrays that would not be saved, with the line to write instead."""
    seen: dict[int, object] = {}  # the objects by identity, held so that no other object gets the same one
    specs = contents.structure.specs
    kinds = {kind for kind in set(map(type, contents.leaves)) if not _is_bare(kind) or issubclass(kind, LONG)}
    for i, leaf in [(i, leaf) for i, leaf in enumerate(contents.leaves) if type(leaf) in kinds]:
        is_kept = specs[i] is not None and not isinstance(leaf, np.ma.MaskedArray)
        why = None if is_kept else _why_lost(leaf, seen)
        if why is not None:
            yield f"{contents.structure.paths[i]!r} is a {why}; {_instead(leaf)}, or leave it out of the tree"


def _why_lost(leaf: object, seen: dict[int, object]) -> str | None:
    """Returns the type of a leaf and the array in it that would not be saved; `None` if there is none."""
    kind = type(leaf)
    if issubclass(kind, LONG):
        return f"{kind.__qualname__}, which other machines do not have, so it would not be saved"
    if isinstance(leaf, np.ma.MaskedArray):
        return "masked array, whose mask would not be saved"
    if isinstance(leaf, Mapping):
        return "mapping and not a pytree, so none of its arrays would be saved"
    if _is_foreign(leaf):
        return f"{kind.__qualname__}, which is not a JAX array, so it would not be saved"
    found = _array_in(leaf, seen)
    if found is None:
        return None
    where, array = found
    return f"{kind.__qualname__} and not a pytree, so its array {where} ({describe(array)}) would not be saved"


def _instead(leaf: object) -> str:
    """Returns the line to write in place of a leaf so that it is saved."""
    kind = type(leaf).__qualname__
    if isinstance(leaf, LONG):
        return "write float(...) or complex(...)"
    if isinstance(leaf, np.ma.MaskedArray):
        return "write array.filled(...), or save the data and the mask separately"
    if isinstance(leaf, Mapping):
        return "write dict(...)"
    if isinstance(leaf, np.ndarray):
        return "write array.tolist()"
    if _is_foreign(leaf):
        return "write np.asarray(...)"
    if isinstance(leaf, functools.partial):
        return "write jax.tree_util.Partial(...)"
    if isinstance(leaf, _COLLECTIONS):
        return "write list(...)"
    if isinstance(leaf, types.SimpleNamespace):
        return "write vars(...)"
    return f"make {kind} an eqx.Module, or jax.tree_util.register_dataclass({kind})"


def _array_in(leaf: object, seen: dict[int, object]) -> tuple[str, object] | None:
    """Returns the first array inside a leaf that is not an array, and where it is; the nearest to the leaf."""
    level: list[tuple[str, object]] = [("", leaf)]
    for _ in range(_DEEPEST):
        below = []
        for where, value in level:
            if id(value) in seen:
                continue
            seen[id(value)] = value
            for entry, child in _held_by(value):
                if is_array(child) or _is_foreign(child):
                    return where + entry, child
                below.append((where + entry, child))
        level = below
    return None


def _held_by(value: object) -> Iterator[tuple[str, object]]:
    """Yields the objects that another one holds as a pytree, as a collection or as attributes, and where each is."""
    taken = take(value)
    if taken is not None:
        children = list(taken[0])
        keys = keys_of(type(value), children)
        pairs = zip(keys, [child for _, child in children], strict=True)
        return ((jtu.keystr((key,)), child) for key, child in pairs if not _is_bare(type(child)))
    if isinstance(value, functools.partial):
        named = [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    elif isinstance(value, (dict, types.MappingProxyType)):
        named = ((f"[{key!r}]", each) for key, each in list(value.items()))
    elif isinstance(value, np.ndarray):
        named = ((f".flat[{i}]", each) for i, each in enumerate(value.flat))
    else:
        items = list(value) if isinstance(value, _COLLECTIONS) else ()
        named = itertools.chain(((f"[{i}]", each) for i, each in enumerate(items)), _attributes_of(value))
    return ((where, each) for where, each in named if not _is_bare(type(each)))


def _attributes_of(value: object) -> Iterator[tuple[str, object]]:
    """Yields the stored attributes of an object, without running code of its class."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # there are none, or the class has a property of this name
        attributes = {}
    for name, each in list(attributes.items()):
        yield f".{name}", each
    for name, slot in _slots_of(type(value)):
        try:
            yield f".{name}", slot.__get__(value)
        except AttributeError:  # nothing is there yet
            continue


def _slots_of(kind: type) -> list[tuple[str, types.MemberDescriptorType]]:
    """Returns the attributes in `__slots__`."""
    members = [each for cls in kind.__mro__ for each in vars(cls).items()]
    return [(name, each) for name, each in members if isinstance(each, types.MemberDescriptorType)]


@with_object
def _is_bare(kind: type) -> bool:
    """Returns whether values of a type hold no arrays. Functions count as such, whatever they close over."""
    is_of_jax = kind.__module__.partition(".")[0] in ("jax", "jaxlib")
    return issubclass(kind, _BARE) or (is_of_jax and not issubclass(kind, _LOOKED_AT))


def _is_foreign(value: object) -> bool:
    """Returns whether a value is an array that JAX does not support: of texts, of times, or of another library."""
    kind = type(value)
    if isinstance(value, np.ndarray):
        return value.dtype != object and not is_array(value)
    return hasattr(kind, "shape") and hasattr(kind, "dtype")


_COLLECTIONS = list, tuple, collections.deque, set, frozenset
_LOOKED_AT = jax.Array, functools.partial, getattr(jax, "Ref", jax.Array)  # public since JAX 0.7.2
_BARE = (
    *(str, bytes, int, float, complex, type(None), type, enum.Enum, np.generic, np.dtype, np.ufunc, types.ModuleType),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, jax.ShapeDtypeStruct),
)
