"""Arrays inside leaves that are not pytrees, such as a plain dataclass or a deque: JAX functions do not see them."""

import collections
import contextlib
import enum
import functools
import types
from collections.abc import Iterator, Mapping

import jax
import jax.tree_util as jtu
import numpy as np

from .._files.values import LONG
from .._tree.structure import is_array
from .._tree.text import describe
from ._contents import Contents


def lost_arrays(contents: Contents) -> Iterator[str]:
    """Yields a sentence for each leaf with arrays that would not be saved, with the line to write instead."""
    specs, seen = contents.structure.specs, set[int]()
    for i, leaf in enumerate(contents.leaves):
        is_kept = specs[i] is not None and not isinstance(leaf, np.ma.MaskedArray)
        is_bare = isinstance(leaf, _BARE) and not isinstance(leaf, LONG)
        if is_kept or is_bare or id(leaf) in seen:  # a model has many leaves, of few functions
            continue
        seen.add(id(leaf))
        why = _why_lost(leaf)
        if why is not None:
            yield f"{contents.structure.paths[i]!r} is a {why}; {_instead(leaf)}, or leave it out of the tree"


def _why_lost(leaf: object) -> str | None:
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
    for where, value in _held_by(leaf):
        with contextlib.suppress(Exception):  # of what cannot be flattened, nothing would be saved
            for path, each in jtu.tree_flatten_with_path(value)[0]:
                if (is_array(each) or _is_foreign(each)) and not isinstance(each, jax.ShapeDtypeStruct):
                    at = f"{where}{jtu.keystr(path)} ({describe(each)})"
                    return f"{kind.__qualname__} and not a pytree, so its array {at} would not be saved"
    return None


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
    if hasattr(leaf, "__wrapped__"):
        return "keep the model itself in the tree, and wrap it where it is called"
    return f"make {kind} an eqx.Module, or jax.tree_util.register_dataclass({kind})"


def _held_by(leaf: object) -> Iterator[tuple[str, object]]:
    """Yields the objects that a leaf refers to, and where: its items, its arguments, and its attributes."""
    if isinstance(leaf, functools.partial):
        yield from ((".func", leaf.func), (".args", leaf.args), (".keywords", leaf.keywords))
    if isinstance(leaf, (*_COLLECTIONS, np.ndarray)):
        yield "", leaf.tolist() if isinstance(leaf, np.ndarray) else list(leaf)
    # Attributes as they are stored, `__wrapped__` of a function among them, without running code of the class.
    with contextlib.suppress(Exception):
        yield from ((f".{name}", each) for name, each in object.__getattribute__(leaf, "__dict__").items())
    with_slots = [cls for cls in type(leaf).__mro__ if "__slots__" in vars(cls)]  # not the globals of a function
    for name, slot in [each for cls in with_slots for each in vars(cls).items()]:
        if isinstance(slot, types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # nothing is there yet
                yield f".{name}", slot.__get__(leaf)


def _is_foreign(value: object) -> bool:
    """Returns whether a value is an array that JAX does not support: of texts, of times, or of another library."""
    kind = type(value)
    if isinstance(value, np.ndarray):
        return value.dtype != object and not is_array(value)
    return hasattr(kind, "shape") and hasattr(kind, "dtype") and not isinstance(value, np.generic)


_COLLECTIONS = list, tuple, collections.deque  # of other classes than JAX's; a set has no arrays, which have no hash
_BARE = (
    *(str, bytes, int, float, complex, type, enum.Enum, np.generic, np.dtype, types.ModuleType),
    *(types.BuiltinFunctionType, types.MethodType),
)
