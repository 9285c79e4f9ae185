"""Symmetric positive definite matrices, such as covariances, kept as their Cholesky factor."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float

from ._constrained import concrete
from ._invertible import AbstractInvertible
from ._orthogonal import as_real
from ._triangular import LowerTriangular
from ._weights import Weight, as_weight, to_dense, wide


class SymmetricPositive(AbstractInvertible):
    """Symmetric positive definite: `L L^T` with L lower triangular and positive on the diagonal.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> covariance = matrices.SymmetricPositive(jnp.array([[4.0, 2.0], [2.0, 2.0]]))
    >>> covariance @ jnp.ones(2), covariance.cholesky()
    (Array([6., 4.], dtype=float32), Array([[2., 0.],
           [1., 1.]], dtype=float32))
    >>> covariance.solve(jnp.array([6.0, 4.0])), jnp.exp(covariance.logdet())
    (Array([1., 1.], dtype=float32), Array(4., dtype=float32))
    >>> tp.layout(covariance).paths
    ('factor.raw',)

    It stays positive definite whatever the parameters become. A product is two with a triangle, a solution two
    substitutions, and the determinant is read from the diagonal: nothing is factorised.

    Args:
        w: shape `(n, n)`, an array or a matrix.

    Raises:
        TypeError: w is not real and floating.
        ValueError: w is not square, not symmetric (to within the square root of the dtype's precision, relative to the
            largest entry) or not positive definite.
    """

    factor: Any  # a LowerTriangular; an array in a model that is materialised

    ranks = {"factor": 2}

    def __init__(self, w: Weight | Any):
        w = as_real(to_dense(as_weight(w)))
        _check(w)
        self.factor = LowerTriangular(jnp.linalg.cholesky(wide(w)).astype(w.dtype), positive_diagonal=True)

    @property
    def shape(self) -> tuple[int, int]:
        n = self.factor.shape[-1]
        return n, n

    def apply(self, x: Array) -> Array:
        factor = self._factor(x)
        return ((wide(x) @ factor) @ factor.T).astype(x.dtype)

    def apply_transposed(self, x: Array) -> Array:
        return self.apply(x)

    def apply_inverse(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """The product of the inverse with each vector along the last axis."""
        columns = wide(x).reshape(math.prod(x.shape[:-1]), x.shape[-1]).T
        return cho_solve((self._factor(x), True), columns).T.reshape(x.shape).astype(x.dtype)

    def to_dense(self) -> Array:
        factor = wide(self.cholesky())
        return (factor @ factor.T).astype(self.dtype)

    @property
    def T(self) -> "SymmetricPositive":  # noqa: N802
        return self

    def cholesky(self) -> Float[Array, "n n"]:
        """The factor L."""
        self._check_rank()
        return jnp.asarray(self.factor)

    def inv(self) -> "_Inverse":
        return _Inverse(self)

    def slogdet(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        logarithm = 2 * jnp.sum(jnp.log(wide(jnp.diagonal(self.cholesky()))))
        return jnp.ones((), self.dtype), logarithm.astype(self.dtype)

    def _factor(self, x: Array) -> Array:
        return self.cholesky().astype(wide(x).dtype)


class _Inverse(AbstractInvertible):
    """The inverse of a `SymmetricPositive`, made of its arrays; `M.inv()` makes it."""

    matrix: SymmetricPositive

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    def apply(self, x: Array) -> Array:
        return self.matrix.apply_inverse(x)

    def apply_transposed(self, x: Array) -> Array:
        return self.matrix.apply_inverse(x)

    @property
    def T(self) -> "_Inverse":  # noqa: N802
        return self

    def inv(self) -> SymmetricPositive:
        return self.matrix

    def slogdet(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        sign, logarithm = self.matrix.slogdet()
        return sign, -logarithm


def _check(w: Array) -> None:
    if w.shape[0] != w.shape[1]:
        raise ValueError(f"SymmetricPositive takes a square matrix, got shape {w.shape}")
    entries = concrete(w)
    if entries is None or entries.size == 0:
        return
    tolerance = float(jnp.finfo(w.dtype).eps) ** 0.5 * np.max(np.abs(entries))
    difference = np.max(np.abs(entries - entries.T))
    if not difference <= tolerance:
        raise ValueError(
            f"SymmetricPositive takes a symmetric matrix, got one with entries of w - w.T of up to {difference:.3g}; "
            "to make it symmetric, write SymmetricPositive((w + w.T) / 2)"
        )
    least = np.linalg.eigvalsh(entries)[0]
    # What is positive by less than the rounding of its entries cannot be factorised.
    if not least > 0 or bool(jnp.any(jnp.isnan(jnp.linalg.cholesky(wide(w))))):
        raise ValueError(
            f"SymmetricPositive takes a positive definite matrix, got one with an eigenvalue of {least:.3g}; to make "
            "it positive, write for example SymmetricPositive(w + 1e-3 * jnp.eye(len(w)))"
        )


SymmetricPositive.__module__ = "treeparams.matrices"
