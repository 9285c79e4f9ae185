"""Triangular and symmetric arrays: constrained arrays whose raw parameters are packed, so that each has an effect.

Packed is the lower triangle, row by row: `w[0, 0], w[1, 0], w[1, 1], w[2, 0], ...`.
"""

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._constrained import AbstractConstrained, concrete, refuse
from ._constraints import inverse_softplus, softplus
from ._nodes import as_real, least_positive, wide


class LowerTriangular(AbstractConstrained):
    """Zeros above the diagonal; with a positive diagonal it is a Cholesky factor.

    >>> import jax.numpy as jnp
    >>> from treeparams import matrices
    >>> factor = matrices.LowerTriangular(jnp.eye(3), positive_diagonal=True)
    >>> factor
    LowerTriangular(raw=f32[6], positive_diagonal=True)
    >>> matrices.materialise(factor)[0]
    Array([1., 0., 0.], dtype=float32)

    Args:
        w: square in its last two axes, zero above the diagonal.
        positive_diagonal: whether the diagonal is `softplus(raw)`, as of `Positive`, rather than `raw`.
    """

    raw: Float[Array, "... packed"]
    positive_diagonal: bool = eqx.field(static=True)

    def __init__(self, w: Array | np.ndarray, *, positive_diagonal: bool = False):
        w, self.positive_diagonal = _square(self, w), positive_diagonal
        if (entries := concrete(w)) is not None:
            refuse(self, entries, np.triu(entries, 1) == 0, "zeros above the diagonal", "LowerTriangular(jnp.tril(w))")
        if (entries := concrete(w)) is not None and positive_diagonal:
            diagonal = np.diagonal(entries, axis1=-2, axis2=-1)
            fine = (diagonal >= least_positive(w.dtype)) & (diagonal < np.inf)
            instead = "LowerTriangular(jnp.linalg.cholesky(w @ w.T), positive_diagonal=True)"
            refuse(self, diagonal, fine, "positive numbers on the diagonal", instead)
        if positive_diagonal:
            raw = inverse_softplus(wide(jnp.diagonal(w, axis1=-2, axis2=-1))).astype(w.dtype)
            w = jnp.where(jnp.eye(w.shape[-1], dtype=bool), raw[..., None, :], w)
        self.raw = _packed(w)

    def to_dense(self) -> Array:
        dense = jnp.tril(_unpacked(self.raw))
        if not self.positive_diagonal:
            return dense
        diagonal = softplus(wide(jnp.diagonal(dense, axis1=-2, axis2=-1)), least_positive(self.raw.dtype))
        is_diagonal = jnp.broadcast_to(jnp.eye(dense.shape[-1], dtype=bool), dense.shape)
        return jnp.where(is_diagonal, diagonal.astype(self.raw.dtype)[..., None, :], dense)


class Symmetric(AbstractConstrained):
    """Symmetric in its last two axes: its own transpose.

    >>> import jax.numpy as jnp
    >>> from treeparams import matrices
    >>> matrices.Symmetric(jnp.array([[1.0, 2.0], [2.0, 3.0]])).raw
    Array([1., 2., 3.], dtype=float32)
    """

    raw: Float[Array, "... packed"]

    def __init__(self, w: Array | np.ndarray):
        w = _square(self, w)
        if (entries := concrete(w)) is not None:
            difference = entries - np.swapaxes(entries, -1, -2)
            refuse(self, difference, difference == 0, "w - w.T of zeros", "Symmetric((w + w.T) / 2)")
        self.raw = _packed(w)

    def to_dense(self) -> Array:
        return _unpacked(self.raw)


def _square(node: AbstractConstrained, w: Array | np.ndarray) -> Array:
    w = as_real(w)
    if w.ndim < 2 or w.shape[-1] != w.shape[-2]:
        raise ValueError(f"{type(node).__name__} takes an array that is square in its last two axes, got {w.shape}")
    return w


def _packed(w: Float[Array, "... n n"]) -> Float[Array, "... packed"]:
    return w[..., *np.tril_indices(w.shape[-1])]


def _unpacked(raw: Float[Array | np.ndarray, "... packed"]) -> Float[Array, "... n n"]:
    """Both triangles."""
    i = jnp.arange((math.isqrt(8 * raw.shape[-1] + 1) - 1) // 2)  # there are n (n + 1) / 2 packed entries
    # A gather: as fast as a scatter of the triangle, where it is with computed indices, which are no constants of the
    # program. A scatter with constant ones of n = 1024 takes four seconds to compile.
    row, column = jnp.maximum(i[:, None], i[None]), jnp.minimum(i[:, None], i[None])
    return jnp.asarray(raw)[..., row * (row + 1) // 2 + column]


LowerTriangular.__module__ = Symmetric.__module__ = "treeparams.matrices"
