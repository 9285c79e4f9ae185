"""Dtypes: which are floating or complex, which one holds several, and arrays in another one."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Array = jax.Array | np.ndarray | np.number | np.bool_
"""An array with values, or a tracer; JAX has typed keys too, and NumPy scalars."""


@functools.cache
def is_inexact(dtype: Any) -> bool:  # any: the dtype of PRNG keys has no public type
    """Returns whether a dtype is floating or complex."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def is_complex(dtype: DTypeLike) -> bool:
    """Returns whether a dtype is complex."""
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def common_dtype(dtypes: Iterable[Any]) -> np.dtype:
    """Returns the dtype that holds all of these; JAX's float if there are none.

    Together with others, floats of 8 bits count as bfloat16, which holds their values; JAX has no promotion for them.
    """
    distinct = list(dict.fromkeys(map(jnp.dtype, dtypes)))
    if len(distinct) == 1:
        return distinct[0]
    wide = [jnp.bfloat16 if is_inexact(each) and each.itemsize == 1 else each for each in distinct]
    with jax.numpy_dtype_promotion("standard"):  # here dtypes are mixed on purpose
        return jnp.dtype(jnp.result_type(*wide or [float]))


def in_dtype(array: Array, dtype: Any) -> Array:
    """Returns an array in a dtype; an array that has the dtype already stays the same object."""
    return array if array.dtype == dtype else jnp.asarray(array).astype(dtype)


def widened(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype to sum and average in: at least single precision."""
    return jax.dtypes.canonicalize_dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
