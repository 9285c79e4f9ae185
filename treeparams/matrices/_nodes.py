"""The base of matrices and constrained arrays: nodes of a model that replace an array without being one."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeGuard

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from .._tree.flattening import same_treedef
from .._tree.types import PyTree


def refused(operation: str) -> Callable[..., Any]:
    """Makes a method, for a class body, that raises an error and says how to get an array."""

    def refuse(self: "NotAnArray", *_: object, **__: object) -> Any:
        raise TypeError(f"{operation} needs an array, which {type(self).__name__} is not: call {self.instead} first")

    return refuse


class NotAnArray:
    """A base of nodes. Operations that need an array raise an error that says how to get one."""

    instead: ClassVar[str]  # how to get one

    __array_ufunc__ = None  # so that NumPy leaves `x @ M` to us
    __array__ = refused("NumPy")
    __add__ = __radd__ = __sub__ = __rsub__ = refused("a sum")
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refused("a product entry by entry")
    __matmul__ = __rmatmul__ = refused("@")
    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = refused("arithmetic")
    __neg__ = __pos__ = __abs__ = __float__ = refused("arithmetic")
    __lt__ = __le__ = __gt__ = __ge__ = refused("a comparison")
    __getitem__ = refused("indexing")
    __iter__ = refused("iteration")


def replace(model: PyTree, cls: type | tuple[type, ...], dense: Callable[[Any], Any]) -> PyTree:
    """Returns the model with every node of a class, or of one in a tuple, replaced by `dense(node)`.

    Nodes within such nodes come first: `dense` gets a node in which they are replaced. Nodes that consist of the same
    array objects in the same way, like those of a tie, become one object.
    """
    found: dict[tuple[int, ...], list[tuple[Any, Any]]] = {}

    def visit(node: Any) -> Any:
        if not isinstance(node, cls):
            return node
        leaves, treedef = jtu.tree_flatten(node)
        same_leaves = found.setdefault(tuple(map(id, leaves)), [])
        for known, replaced in same_leaves:
            if same_treedef(known, treedef):
                return replaced
        below = jtu.tree_map(visit, node, is_leaf=lambda each: each is not node and isinstance(each, cls))
        same_leaves.append((treedef, dense(below)))
        return same_leaves[-1][1]

    return jtu.tree_map(visit, model, is_leaf=lambda node: isinstance(node, cls))


# -- The arguments of constructors


def is_array(value: object) -> TypeGuard[jax.Array | np.ndarray]:
    """Returns whether it is an array of JAX or of NumPy."""
    return isinstance(value, jax.Array | np.ndarray)


def as_parameter(value: object) -> Array:
    """Checks the floating array given to a constructor, and returns it; for the `converter` of a field."""
    if not is_array(value):
        raise TypeError(f"expected an array, got {type(value).__name__}")
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(f"a parameter must be floating or complex, got {array.dtype}: convert it with x.astype(float)")
    return array


def as_real(value: object) -> Array:
    """Checks the real array given to a constructor, and returns it; for the `converter` of a field."""
    array = as_parameter(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"expected real numbers, got {array.dtype}")
    return array


# -- Numbers


def wide(x: Array | np.ndarray) -> Array:
    """Converts to at least float32: in a narrower dtype, several steps of computation lose too many digits."""
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def least_positive(dtype: DTypeLike) -> float:
    """Returns the smallest normal number: smaller ones are zero on most devices."""
    return float(jnp.finfo(dtype).tiny)


def as_row(vector: Array, x: Array) -> Array:
    """Returns a vector in the dtype of x and with its number of axes, to meet its last one."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (x.shape[-1],))


def scaled(x: Array, axis: int) -> tuple[Array, Array]:
    """Divides vectors along an axis by their largest entry; also returns which are zero, and leaves these as they are.

    So their squares neither overflow nor vanish. Use it for functions of their directions alone: the scale has no
    influence on these, so its gradient is not needed.
    """
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis, keepdims=True, initial=0))
    is_zero = largest < least_positive(x.dtype)
    # Divided by in two steps, since the reciprocal of a large number may be taken, and be zero.
    root = jnp.sqrt(jnp.where(is_zero, 1, largest))
    return x / root / root, is_zero
