"""Matrices whose inverse and determinant cost no more than a product."""

import abc
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from ._matrix import AbstractMatrix
from ._weights import wide


class AbstractInvertible(AbstractMatrix):
    """A matrix that has, where it is square, an inverse made of the same arrays and a determinant."""

    @abc.abstractmethod
    def inv(self) -> AbstractMatrix:
        """The inverse, made of the same arrays: in one model with the original it is tied to it."""

    @abc.abstractmethod
    def slogdet(self) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
        """The sign of the determinant (its phase, where complex) and the logarithm of its absolute value."""

    def solve(self, b: Any) -> Array:
        """The x with `M @ x = b`; shapes as of `M @ x`."""
        return self.inv() @ b

    def logdet(self) -> Float[Array, ""]:
        """The logarithm of the absolute determinant."""
        return self.slogdet()[1]


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
