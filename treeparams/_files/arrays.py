"""Converts arrays to and from those of the format: a dtype that it lacks is stored as another one, and marked."""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from .._tree.structure import Spec
from .._tree.text import describe
from .._tree.types import Array, is_inexact
from .format import DTYPES, PACKED, WRITTEN, Packed, Stored, entries_text
from .source import PIECE

_NAMES = {name: text for text, name in WRITTEN.items()}


class Kind(NamedTuple):
    """How an array is stored."""

    dtype: str  # in the format's words
    shape: tuple[int, ...]
    itemsize: int
    mark: dict[str, str]  # its real kind, if it is stored as another one

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.itemsize


def kind_of(path: str, leaf: Array | jax.ShapeDtypeStruct) -> Kind:
    """Returns how an array will be stored."""
    if not isinstance(leaf, np.ndarray):
        if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
            raise ValueError(f"{path!r} is {describe(leaf)} without values, so it cannot be saved")
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"{path!r} lies over several processes, but a file holds whole arrays; save it with Orbax, which "
                "accepts params, stacks and states"
            )
    stored = _stored_as(leaf.dtype, tuple(leaf.shape))
    if stored is not None:
        return stored
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = jax.random.key_impl(leaf)
        if not isinstance(impl, str):
            raise ValueError(f"the key at {path!r} uses {impl}, which has no name; save its jax.random.key_data")
        return Kind("U32", (*leaf.shape, *_key_kind(impl)[1]), 4, {"key": impl})
    raise ValueError(f"{path!r} is of the dtype {leaf.dtype}, which the format cannot hold")


class Inventory(NamedTuple):
    """How arrays are stored, by name, in the order of the file, so that each is aligned."""

    kinds: dict[str, Kind]
    marks: dict[str, dict[str, str]]
    entries: str  # of the header
    size: int  # in bytes


def inventory_of(kinds: Mapping[str, Kind]) -> Inventory:
    """Orders arrays of these kinds as they will be stored."""
    ordered = {name: kinds[name] for name in sorted(kinds, key=lambda name: -kinds[name].itemsize)}
    marks = {name: kind.mark for name, kind in ordered.items() if kind.mark}
    return Inventory(ordered, marks, entries_text(ordered), sum(kind.size for kind in ordered.values()))


@functools.lru_cache(maxsize=4096)
def _stored_as(dtype: Any, shape: tuple[int, ...]) -> Kind | None:
    """Returns how an array is stored; `None` if its dtype alone does not determine that."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    name = dtype.name
    if dtype.kind == "c":
        half = np.dtype(f"float{dtype.itemsize * 4}")
        return Kind(_NAMES[half.name], (*shape, 2), half.itemsize, {"dtype": name})
    if name in _NAMES:
        return Kind(_NAMES[name], shape, dtype.itemsize, {})
    return Kind("U8", shape, 1, {"dtype": name}) if dtype.itemsize == 1 else None


def pieces_of(leaf: Array) -> Iterator[bytes | memoryview]:
    """Yields the bytes of an array in pieces that do not change any more.

    A NumPy array may change while it is written, as a replay buffer does. So each of its pieces is a copy.
    """
    if not isinstance(leaf, np.ndarray) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    if array.nbytes <= PIECE:
        yield array.tobytes()
    elif isinstance(leaf, np.ndarray) or not array.flags.c_contiguous:
        flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
        count = PIECE // array.itemsize
        for start in range(0, array.size, count):
            yield flat[start : start + count].tobytes()
    else:
        view = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


def bytes_of(leaf: Array) -> np.ndarray:
    """Returns the bytes of an array as they are stored, with dtype uint8; without a copy if possible."""
    if not isinstance(leaf, np.ndarray) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)


def decode(stored: Stored, mark: Mapping[str, str] | None, data: np.ndarray) -> Any:
    """Returns the array for bytes in a file: a NumPy array, or typed keys."""
    shape, dtype = decoded_kind(stored, mark)
    if mark and "key" in mark:
        return jax.random.wrap_key_data(jnp.asarray(data.view(np.uint32).reshape(stored[1])), impl=mark["key"])
    if isinstance(dtype, Packed):
        raise ValueError(f"it is {dtype}, which NumPy and JAX do not support; drop it in a plan, rename={{...: None}}")
    return data.view(dtype).reshape(shape)


def specs_of(arrays: Mapping[str, Stored], marks: Mapping[str, Mapping[str, str]]) -> dict[str, Spec]:
    """Returns the shapes of stored arrays, and their dtypes in JAX."""
    plain = {dtype: _in_jax(_dtype_of(dtype)) for dtype in {stored[0] for stored in arrays.values()}}
    specs = {name: _spec(shape, *plain[dtype]) for name, (dtype, shape, _, _) in arrays.items()}
    for name, mark in marks.items():
        shape, dtype = decoded_kind(arrays[name], mark)
        specs[name] = Spec(shape, *_in_jax(dtype))
    return specs


_spec = functools.lru_cache(maxsize=4096)(Spec)  # equal ones are one object, of which a file may have 100,000


def _in_jax(dtype: Any) -> tuple[Any, bool]:
    """Returns a dtype in JAX, and whether a parameter may have it."""
    if isinstance(dtype, Packed) or (not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)):
        return dtype, False
    dtype = jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))
    return dtype, is_inexact(dtype)


def decoded_kind(stored: Stored, mark: Mapping[str, str] | None) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of a stored array as it was saved; the dtype is NumPy's, one of keys, or packed."""
    its, shape, start, stop = stored
    if not mark:
        return shape, _dtype_of(its)
    if "key" in mark:
        dtype, words = _key_kind(mark["key"])
        if its != "U32" or shape[len(shape) - len(words) :] != words:
            raise ValueError(f"keys of {mark['key']} are not stored as {its} of shape {shape}")
        return shape[: len(shape) - len(words)], dtype
    dtype = np.dtype(mark["dtype"])
    marked = shape[:-1] if dtype.kind == "c" else shape
    if dtype.hasobject or dtype.name != mark["dtype"] or math.prod(marked) * dtype.itemsize != stop - start:
        raise ValueError(f"{dtype} is not stored as {its} of shape {shape}")
    return marked, dtype


@functools.cache
def _dtype_of(name: str) -> Any:
    """Returns a dtype of the format; a NumPy dtype if there is one."""
    return PACKED[name] if name in PACKED else np.dtype(DTYPES[name])


@functools.cache
def _key_kind(impl: str) -> tuple[Any, tuple[int, ...]]:
    """Returns the dtype of keys of an implementation, and the shape of one key's words."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    return key.dtype, jax.eval_shape(jax.random.key_data, key).shape


Like = tuple[str, Array, Array | jax.ShapeDtypeStruct]
"""A name, an array, and another one that lies where the array is to lie."""


def placed(name: str, array: Array, like: Array | jax.ShapeDtypeStruct) -> Array:
    """Places an array like another one: in NumPy, or on its devices with its sharding."""
    if isinstance(array, Tracer):
        return array
    if isinstance(like, np.ndarray):
        return _narrowed(name, np.asarray(array), like.dtype)
    return _in_jax_together([(name, array, like)])[0]


def placed_in_turn(arrays: Iterable[tuple[int, Like]]) -> Iterator[tuple[int, Array]]:
    """Yields each array with its key, placed as by `placed`.

    A large one is let go before the next one is read. Small ones wait for one another: JAX takes less than half the
    time for many that go to one place together.
    """
    waiting, size = dict[int, Like](), 0
    for key, each in arrays:
        if isinstance(each[1], Tracer) or isinstance(each[2], np.ndarray):
            yield key, placed(*each)
            continue
        waiting[key], size = each, size + each[1].nbytes
        del each
        if size >= PIECE:
            yield from zip(waiting, _in_jax_together(waiting.values()), strict=True)
            waiting, size = {}, 0
    yield from zip(waiting, _in_jax_together(waiting.values()), strict=True)


def _in_jax_together(arrays: Iterable[Like]) -> list[jax.Array]:
    made: list[Any] = []
    together: dict[tuple[Any, bool], list[int]] = {}
    for name, array, like in arrays:
        array, sharding = as_in_jax(name, array), getattr(like, "sharding", None)
        if isinstance(array, jax.Array) or sharding is None or isinstance(sharding, SingleDeviceSharding):
            together.setdefault((sharding, getattr(like, "committed", True)), []).append(len(made))
        else:  # each device, of this process or of another one, gets its share
            share = lambda index, array=array: np.array(np.asarray(array)[index])
            array = jax.make_array_from_callback(array.shape, sharding, share)
        made.append(array)
    for place, several in together.items():
        for i, array in zip(several, _put([made[i] for i in several], *place), strict=True):
            made[i] = array
    return made


def _put(arrays: list[Array], sharding: jax.sharding.Sharding | None, committed: bool) -> list[jax.Array]:
    # An array that is on a device only because that is the default must not be committed to it, or it could no longer
    # be used together with arrays of other devices.
    if sharding is None or committed:
        return jax.device_put(arrays, sharding)
    with jax.default_device(*sharding.device_set):
        return jax.device_put(arrays)


def as_in_jax(name: str, array: Array) -> Array:
    """Casts an array to the dtype that it has in JAX."""
    is_numpy = isinstance(array, np.ndarray)
    return _narrowed(name, array, _in_jax(array.dtype)[0]) if is_numpy else array


def _narrowed(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts an array to a dtype that may have fewer bits, as in JAX without x64; only digits may be lost."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", under="ignore"):
        new = array.astype(dtype)
    if _has_lost(array, new):
        raise ValueError(
            f"{name!r} is {array.dtype}, and has values that {dtype} cannot hold; switch on jax_enable_x64"
        )
    return new


def _has_lost(old: np.ndarray, new: np.ndarray) -> bool:
    """Returns whether a value has changed by more than rounding: to infinity, zero, or another integer."""
    if new.dtype.kind == "c":
        return any(_has_lost(part(old), part(new)) for part in (np.real, np.imag))
    if new.dtype.kind != "f":
        return bool((new != old).any())
    at = np.isinf(new) | (new == 0)  # few, so that little memory is needed
    return bool((np.isfinite(old[at]) & (old[at] != new[at])).any())


def array_spec(array: Array | jax.ShapeDtypeStruct) -> Spec:
    """Returns the shape of an array, and its dtype in JAX."""
    return Spec(tuple(array.shape), *_in_jax(array.dtype))


def in_numpy(array: Array) -> np.ndarray:
    """Returns an array in NumPy; for keys, their words."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.ascontiguousarray(array).reshape(array.shape)
