"""Matrices whose inverse and determinant cost no more than a product."""

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact

from ._matrix import AbstractMatrix, Transposed
from ._weights import wide


class AbstractInvertible(AbstractMatrix):
    """A matrix that has, where it is square, an inverse made of the same arrays and a determinant."""

    @abc.abstractmethod
    def inv(self) -> AbstractMatrix:
        """The inverse, made of the same arrays: in one model with the original it is tied to it."""

    @abc.abstractmethod
    def slogdet(self) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
        """The sign of the determinant (its phase, where complex) and the logarithm of its absolute value."""

    @property
    def T(self) -> "AbstractInvertible":  # noqa: N802 - as of an array
        return TransposedInvertible(self)

    def solve(self, b: Array | np.ndarray) -> Array:
        """The x with `M @ x = b`; shapes as of `M @ x`."""
        return self.inv() @ b

    def logdet(self) -> Float[Array, ""]:
        """The logarithm of the absolute determinant."""
        return self.slogdet()[1]


class TransposedInvertible(Transposed, AbstractInvertible):
    """The transpose of a matrix that has an inverse; `M.T` makes it."""

    matrix: Any  # one with an inverse

    def inv(self) -> AbstractMatrix:
        return self.matrix.inv().T

    def slogdet(self) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
        return self.matrix.slogdet()


def of_same_arrays(matrix: Any, **changes: Any) -> Any:
    """The matrix with other fields. A constructor would convert arrays of NumPy, and new arrays are tied to nothing."""
    other = object.__new__(type(matrix))
    for field in dataclasses.fields(matrix):
        object.__setattr__(other, field.name, changes.get(field.name, getattr(matrix, field.name)))
    return other


def slogdet_of(
    eigenvalues: Inexact[Array, " n"], inverted: bool, dtype: Any
) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
    """What `slogdet` gives of a matrix of this dtype, or of its inverse, with these eigenvalues."""
    eigenvalues = wide(eigenvalues)
    sizes = jnp.abs(eigenvalues)
    sign = jnp.prod(eigenvalues / jnp.where(sizes == 0, 1, sizes).astype(eigenvalues.dtype))
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        sign = jnp.sign(sign.real)  # complex eigenvalues of a real matrix come in pairs
    logarithm = jnp.sum(jnp.log(sizes)).astype(jnp.finfo(dtype).dtype)
    return (sign.conj() if inverted else sign).astype(dtype), -logarithm if inverted else logarithm
