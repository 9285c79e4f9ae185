"""The vector form: all trained parameters in one contiguous vector, each tie once, and the way back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, PyTree

from ._layout import Layout
from ._match import read_slots
from ._mesh import replicated
from ._partition import Rest, rest_of, split
from ._project import slot_gradients
from ._resolve import resolve
from ._structure import describe


class Restructure:
    """From a vector back to the model: `restructure(vector) -> model`.

    A pytree whose leaves are the frozen arrays, with everything else static, so that it can be closed over, passed to
    and returned from `jax.jit`, mapped, scanned and differentiated. Made by `tp.ravel`.
    """

    def __init__(self, rest: Rest, dtype: Any) -> None:
        """For this library's own use; users write `tp.ravel(model)`."""
        self.rest = rest
        self.dtype = dtype

    @property
    def layout(self) -> Layout:
        """The layout of the model: which part of the vector is what."""
        return self.rest.layout

    def __call__(self, vector: Inexact[Array, " n"] | Any) -> PyTree:
        """The model of these parameters.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> vector, restructure = tp.ravel({"w": jnp.ones((2, 2)), "b": jnp.zeros(1, jnp.bfloat16), "n": 7})
        >>> restructure(2 * vector)
        {'b': Array([0], dtype=bfloat16), 'n': 7, 'w': Array([[2., 2.],
               [2., 2.]], dtype=float32)}

        Args:
            vector: shape `(layout.size,)`, of any floating dtype; complex only if a slot is complex (a real slot then
                takes the real part). NumPy vectors are fine.

        Returns:
            The model: each parameter in its own shape and dtype, one array at all paths of a tie, frozen arrays and all
            else as they were.

        Raises:
            ValueError: another length or rank.
            TypeError: an integer vector, a complex one where no slot is complex, or no array.
        """
        _check_vector(self.layout, vector)
        slots = self.layout.slots
        pieces = jax.lax.split(jnp.asarray(vector), [slot.size for slot in slots]) if slots else []
        leaves = [_cast(piece, slot.dtype).reshape(slot.shape) for piece, slot in zip(pieces, slots, strict=True)]
        return self.rest.fixed.fill(leaves, self.rest.frozen)

    def ravel(self, model: PyTree) -> Inexact[Array, " n"]:
        """The vector of a model's values, the inverse of calling.

        Args:
            model: a tree with an array for every slot, at the same paths: the model itself, a canonical tree, another
                type. At a tie the value at the slot's own path counts. What is frozen is ignored.

        Returns:
            A vector of shape `(layout.size,)` and the dtype that `tp.ravel` gave, in a buffer of its own.

        Raises:
            ValueError: a slot is missing or has another shape; an entry stands where the model has no leaf.
            TypeError: an entry is no array, or complex where the slot is real.
        """
        return _concatenate(read_slots(self.layout, model, exact_shapes=True), self.dtype)

    def ravel_gradient(self, grads: PyTree) -> Inexact[Array, " n"]:
        """The vector of a gradient, the transpose of calling: ties are summed, what is missing is zero.

        >>> import jax, jax.numpy as jnp, treeparams as tp
        >>> shared = jnp.ones(2)
        >>> model = {"a": shared, "b": shared, "c": jnp.ones(1)}
        >>> _, restructure = tp.ravel(model)
        >>> restructure.ravel_gradient({"a": jnp.ones(2), "b": 10 * jnp.ones(2)})
        Array([11., 11.,  0.], dtype=float32)

        Args:
            grads: as for `tp.project`.

        Returns:
            A vector of shape `(layout.size,)` and the dtype that `tp.ravel` gave.

        Raises:
            ValueError: an entry has another shape than its leaf, or stands where the model has no leaf.
            TypeError: an entry is no array.
        """
        return _concatenate(slot_gradients(self.layout, grads, "zeros", self.dtype), self.dtype)

    def with_frozen(self, model: PyTree) -> "Restructure":
        """The same vector form around the frozen leaves of another model.

        Args:
            model: a model of equal structure.

        Returns:
            A `Restructure` of the same layout, whose frozen arrays, functions and numbers are those of `model`.

        Raises:
            ValueError: the model does not fit the layout.
        """
        return Restructure(rest_of(resolve(model, self.layout)), self.dtype)

    def __repr__(self) -> str:
        return f"Restructure({self.layout!r}, dtype={self.dtype})"


Restructure.__module__ = "treeparams"
jtu.register_pytree_with_keys(
    Restructure,
    lambda restructure: (((jtu.GetAttrKey("rest"), restructure.rest),), restructure.dtype),
    lambda dtype, children: Restructure(next(iter(children)), dtype),
    lambda restructure: ((restructure.rest,), restructure.dtype),
)


def ravel(model: PyTree, trainable: Any = None, dtype: Any = None) -> tuple[Inexact[Array, " n"], Restructure]:
    """The trained parameters of a model as one contiguous vector, and the way back.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
    >>> vector, restructure = tp.ravel(mlp)
    >>> vector.shape, bool(restructure(vector)(jnp.ones(2)) == mlp(jnp.ones(2)))
    ((17,), True)
    >>> loss = jax.jit(lambda vector, restructure, x: restructure(vector)(x) ** 2)
    >>> jax.grad(loss)(vector, restructure, jnp.ones(2)).shape
    (17,)

    Only trained floating and complex arrays are in the vector, in tree order, each tie once, at the offsets that
    `restructure.layout` prints. Integers, keys and functions are not converted: they stay with `restructure`.

    Args:
        model: any pytree.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        dtype: the dtype of the vector; `None`: `jnp.result_type` of the slots that have elements. A narrower one loses
            digits; float32 over bfloat16 leaves keeps a master copy. Weak types do not survive.

    Returns:
        The vector, shape `(layout.size,)`, always in a buffer of its own and whole on each device, and the
        `Restructure`. Nothing trained: shape `(0,)`.

    Raises:
        ValueError: as `tp.layout`.
        TypeError: `dtype` is not floating, or real where a slot is complex; as `tp.layout`.
    """
    slots, rest = split(model, trainable)
    dtype = rest.layout.dtype if dtype is None else _check_dtype(rest.layout, dtype)
    return _concatenate(slots, dtype), Restructure(rest, dtype)


def _concatenate(arrays: Sequence[Any], dtype: Any) -> Array:
    pieces = [_cast(jnp.ravel(replicated(array)), dtype) for array in arrays]
    if len(pieces) == 1:
        return jnp.array(pieces[0], copy=True)
    return jnp.concatenate(pieces) if pieces else jnp.zeros(0, dtype)


def _cast(array: Array, dtype: Any) -> Array:
    if jnp.iscomplexobj(array) and not jnp.issubdtype(dtype, jnp.complexfloating):
        array = array.real
    return jax.lax.convert_element_type(array, dtype)


def _check_dtype(layout: Layout, dtype: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"the dtype of the vector must be floating or complex, got {dtype}")
    for slot in layout.slots:
        if _is_complex(slot.dtype) and not _is_complex(dtype):
            raise TypeError(f"{slot.path!r} is {slot.dtype}, which a vector of {dtype} cannot hold")
    if _is_complex(dtype) and not _has_complex(layout):
        raise TypeError(f"no parameter is complex, so the vector cannot be {dtype}")
    return dtype


def _check_vector(layout: Layout, vector: Any) -> None:
    expected = f"expected a vector of shape ({layout.size},) and floating dtype"
    if not (hasattr(vector, "shape") and hasattr(vector, "dtype")):
        raise TypeError(f"{expected}, got {describe(vector)}")
    if tuple(vector.shape) != (layout.size,):
        raise ValueError(f"{expected} for {layout!r}, got shape {tuple(vector.shape)}")
    if not jnp.issubdtype(vector.dtype, jnp.inexact):
        raise TypeError(f"{expected}, got {vector.dtype}; convert it with vector.astype({layout.dtype})")
    if _is_complex(vector.dtype) and not _has_complex(layout):
        raise TypeError(f"{expected}, got {vector.dtype}, and no parameter is complex; take vector.real")


def _is_complex(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def _has_complex(layout: Layout) -> bool:
    return any(_is_complex(slot.dtype) for slot in layout.slots)
