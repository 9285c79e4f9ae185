"""PyTree and TreeDef, for type checkers and for the checks at run time; dtypes; arrays that can be written; copies."""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

if TYPE_CHECKING:
    PyTree: TypeAlias = Any  # jaxtyping's own is unknown to pyright, and so is, then, all that is called with it
    TreeDef: TypeAlias = Any  # to pyright JAX's is a variable
else:
    from jax.tree_util import PyTreeDef as TreeDef  # noqa: F401
    from jaxtyping import PyTree as PyTree


# -- Dtypes: which are floating or complex, which one holds several, and arrays in another one -------------------------

Array = jax.Array | np.ndarray | np.number | np.bool_
"""An array with values, or a tracer; JAX has typed keys too, and NumPy scalars."""


@functools.cache
def is_inexact(dtype: Any) -> bool:  # any: the dtype of PRNG keys has no public type
    """Returns whether a dtype is floating or complex."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def is_key(array: Any) -> bool:
    """Returns whether an array holds typed PRNG keys."""
    return jnp.issubdtype(getattr(array, "dtype", float), jax.dtypes.prng_key)


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


# -- Refs: arrays that can be written, as `jax.new_ref` makes them -----------------------------------------------------


def is_ref(leaf: object) -> bool:
    """Returns whether a leaf is a ref, concrete or traced."""
    # A traced ref has the type of any tracer.
    return type(getattr(leaf, "aval", None)).__name__ == "AbstractRef"


def value_of(leaf: Any) -> Any:
    """Returns the value of a ref as it is now; any other leaf unchanged."""
    return leaf[...] if is_ref(leaf) else leaf


def copy_leaf(leaf: Any) -> Any:
    """Returns a copy of an array; any other value unchanged."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if is_ref(leaf):
        return jax.new_ref(value_of(leaf))
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
