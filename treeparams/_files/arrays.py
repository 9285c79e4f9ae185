"""Arrays of JAX and NumPy: their dtypes in JAX, and copies where other arrays are."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from .._tree.structure import Spec
from .._tree.types import Array, is_inexact
from .source import PIECE

T = TypeVar("T")


def in_numpy(array: Array) -> np.ndarray:
    """Returns an array in NumPy; for keys, their words."""
    if not isinstance(array.dtype, np.dtype):
        array = jax.random.key_data(array)
    return np.ascontiguousarray(array).reshape(array.shape)


def in_jax(dtype: Any) -> tuple[Any, bool]:
    """Returns a dtype in JAX, and whether a parameter may have it."""
    if not isinstance(dtype, np.dtype):  # of keys, or packed
        return dtype, False
    dtype = jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))
    return dtype, is_inexact(dtype)


def array_spec(array: Array | jax.ShapeDtypeStruct) -> Spec:
    """Returns the shape of an array, and its dtype in JAX."""
    return Spec(tuple(array.shape), *in_jax(array.dtype))


Like = tuple[str, Array, Array | jax.ShapeDtypeStruct]
"""A name, an array, and another one that lies where the array is to lie."""


def placed(name: str, array: Array, like: Array | jax.ShapeDtypeStruct) -> Array:
    """Places an array like another one: in NumPy, or on its devices with its sharding."""
    return next(placed_in_turn([(0, (name, array, like))]))[1]


def placed_in_turn(arrays: Iterable[tuple[T, Like]]) -> Iterator[tuple[T, Array]]:
    """Yields each array with its key, placed as by `placed`.

    A large one is let go before the next one is read. Small ones wait for one another: JAX takes less than half the
    time for many that go to one place together.
    """
    waiting, size = dict[T, Like](), 0
    for key, (name, array, like) in arrays:
        if isinstance(array, Tracer) or isinstance(like, Tracer):  # which is nowhere yet
            yield key, array if isinstance(array, Tracer) else jnp.asarray(as_in_jax(name, array))
        elif isinstance(like, np.ndarray):
            # NumPy only looks at an array of JAX, which cannot be written to, and then this is a copy.
            yield key, _narrowed(name, np.require(array, requirements="W"), like.dtype)
        else:
            waiting[key], size = (name, array, like), size + array.nbytes
        del array
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
    for (sharding, committed), several in together.items():
        # An array that is on a device only because that is the default must not be committed to it, or it could no
        # longer be used together with arrays of other devices.
        arrays = [made[i] for i in several]
        if sharding is None or committed:
            arrays = jax.device_put(arrays, sharding)
        else:
            with jax.default_device(*sharding.device_set):
                arrays = jax.device_put(arrays)
        for i, array in zip(several, arrays, strict=True):
            made[i] = array
    return made


def as_in_jax(name: str, array: Array) -> Array:
    """Casts an array to the dtype that it has in JAX."""
    is_numpy = isinstance(array, np.ndarray)
    return _narrowed(name, array, in_jax(array.dtype)[0]) if is_numpy else array


def _narrowed(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts an array to a dtype that may have fewer bits, as in JAX without x64; only digits may be lost."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", under="ignore"):
        made = array.astype(dtype)
    # No value may change by more than rounding: to infinity, zero, or another integer. Complex ones are pairs here.
    old, new = (np.ravel(each).view(np.real(each).dtype) for each in (array, made))
    at = np.isinf(new) | (new == 0) if new.dtype.kind == "f" else new != old  # few, so that little memory is needed
    if (np.isfinite(old[at]) & (old[at] != new[at])).any():
        raise ValueError(f"{name!r} has values that {dtype} cannot hold; switch on jax_enable_x64")
    return made
