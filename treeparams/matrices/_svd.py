"""A matrix kept as its singular value decomposition."""

import dataclasses
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._tree.text import describe
from ._lineax import as_weight
from ._matrix import Weight, to_dense
from ._nodes import as_real, as_row, wide
from ._orthogonal import AbstractInvertible, Givens, Orthogonal, check_sizes

Kind = Literal["householder", "givens"]


class SVD(AbstractInvertible):
    """U diag(d) V^T, with U and V products of reflections or of rotations.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> weight = matrices.SVD.random(3, 3, key=jax.random.key(0))
    >>> layer = eqx.tree_at(lambda layer: layer.weight, eqx.nn.Linear(3, 3, key=jax.random.key(1)), weight)
    >>> tp.layout(layer).paths
    ('weight.u.vectors', 'weight.d', 'weight.v.vectors', 'bias')
    >>> weight.logdet()  # of the layer's Jacobian
    Array(0., dtype=float32)
    >>> x = jnp.arange(3.0)
    >>> bool(jnp.allclose(weight.inv() @ (weight @ x), x, atol=1e-5))
    True
    >>> tp.layout([weight, weight.inv()]).ties["0.d"]
    ('1.d',)

    A product costs `4 k (m + n)` operations per vector with k reflections per factor, a dense one `2 m n`. A square SVD
    has `inv()`, `solve(b)`, `logdet()` and `slogdet()` at no further cost. Source: Pevny et al. 2020,
    "Sum-Product-Transform Networks: Exploiting Symmetries using Invertible Transformations".

    Args:
        u: `m` by `m`.
        d: shape `(min(m, n),)`, of any sign.
        v: `n` by `n`.
        inverted: whether it is V diag(1/d) U^T instead, as `inv` makes it; shape `(n, m)` then.
    """

    u: Orthogonal | Givens
    d: Float[Array, " singular"] = eqx.field(converter=as_real)
    v: Orthogonal | Givens
    inverted: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        for name, side in (("u", self.u), ("v", self.v)):
            if not isinstance(side, Orthogonal | Givens):
                raise TypeError(f"expected an Orthogonal or a Givens for {name}, got {describe(side)}; see SVD.random")
        size = min(self.u.shape[0], self.v.shape[0])
        if self.d.shape != (size,):
            raise ValueError(
                f"expected d of shape ({size},) for u of {self.u.shape} and v of {self.v.shape}, got {self.d.shape}"
            )

    @classmethod
    def random(
        cls,
        m: int,
        n: int,
        *,
        key: Array,
        reflections: int | None = None,
        kind: Kind = "householder",
        dtype: DTypeLike | None = None,
    ) -> "SVD":
        """Makes random U and V, and sets all singular values to one, so that it is orthogonal (if square) at the start.

        Args:
            m: rows.
            n: columns.
            key: of `jax.random`.
            reflections: how many per factor (with `kind="givens"`: how many layers of rotations); `None`: as many as
                express every matrix of this shape, `min(m, n)`, or m and n layers of rotations.
            kind: `"householder"` reflections or `"givens"` rotations.
            dtype: of all three factors; `None`: JAX's default.
        """
        if kind not in get_args(Kind):
            raise ValueError(f'kind must be "householder" or "givens", got {kind!r}')
        check_sizes(m=m, n=n)
        size = min(m, n)

        def factor(of: int, key: Array) -> Orthogonal | Givens:
            if kind == "givens":
                return Givens.random(of, key=key, layers=reflections, dtype=dtype)
            return Orthogonal.random(of, key=key, reflections=size if reflections is None else reflections, dtype=dtype)

        u, v = map(factor, (m, n), jax.random.split(key))
        return cls(u, jnp.ones(size, dtype), v)

    @classmethod
    def from_dense(cls, w: Weight | Any) -> "SVD":
        """Decomposes a real array or matrix: `min(m, n)` reflections per factor. Singular values may be negative."""
        w = as_real(to_dense(as_weight(w)))
        u, d, vt = jnp.linalg.svd(wide(w), full_matrices=False)
        (of_u, sign_u), (of_v, sign_v) = _reflections(u), _reflections(vt.T)
        return cls(
            Orthogonal(of_u.astype(w.dtype)), (sign_u * d * sign_v).astype(w.dtype), Orthogonal(of_v.astype(w.dtype))
        )

    @property
    def shape(self) -> tuple[int, ...]:
        m, n = self.u.shape[-1], self.v.shape[-1]
        return *self.u.shape[:-2], *((n, m) if self.inverted else (m, n))

    def apply(self, x: Array) -> Array:
        source, target = (self.u, self.v) if self.inverted else (self.v, self.u)
        size = min(self.u.shape[-1], self.v.shape[-1])
        d = self.d.astype(jnp.finfo(x.dtype).dtype)
        y = source.apply_transposed(x)[..., :size]
        y = y * as_row(1 / d if self.inverted else d, y)
        return target.apply(jnp.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, target.shape[0] - size)]))

    def apply_transposed(self, x: Array) -> Array:
        return self.T.apply(x)

    @property
    def T(self) -> "SVD":  # noqa: N802
        return self._changed(u=self.v, v=self.u)

    def inv(self) -> "SVD":
        """Returns the inverse, made of the same arrays: in one model with the original it is tied to it."""
        self._check_square("an inverse")
        return self._changed(inverted=not self.inverted)

    def slogdet(self) -> tuple[Float[Array, "*members"], Float[Array, "*members"]]:
        """Returns the sign of the determinant and the logarithm of its absolute value, as `jnp.linalg.slogdet` does."""
        self._check_square("a determinant")
        logarithm = jnp.sum(jnp.log(jnp.abs(wide(self.d))), axis=-1).astype(self.dtype)
        sign = self.u.slogdet()[0] * jnp.prod(jnp.sign(self.d), axis=-1) * self.v.slogdet()[0]
        return sign, -logarithm if self.inverted else logarithm

    def _changed(self, **changes: object) -> "SVD":
        """Returns a copy with other fields.

        The constructor would convert arrays of NumPy, and new arrays are tied to nothing.
        """
        other = object.__new__(SVD)
        for field in dataclasses.fields(self):
            object.__setattr__(other, field.name, changes.get(field.name, getattr(self, field.name)))
        return other

    def _check_square(self, noun: str) -> None:
        if self.u.shape[-1] != self.v.shape[-1]:
            raise ValueError(f"only a square matrix has {noun}, and this SVD has shape {self.shape}")


def _reflections(q: Float[Array, "n k"]) -> tuple[Float[Array, "k n"], Float[Array, " k"]]:
    """Returns vectors of reflections, and signs: the first k columns of their product, times the signs, are q."""
    n, k = q.shape
    if k == 0:
        return jnp.zeros((0, n), q.dtype), jnp.zeros(0, q.dtype)
    # LAPACK gives the vectors below the diagonal of h, whose transpose has the triangle, here diagonal, above it.
    h, tau = jnp.linalg.qr(q, mode="raw")
    vectors = jnp.triu(h, 1) + jnp.eye(k, n, dtype=q.dtype)
    # A tau of zero means that there is nothing to reflect. A vector of zeros does so too, but the product jumps there;
    # with a one only at i the reflection just flips the sign of column i.
    return vectors, jnp.where(tau == 0, -1, 1).astype(q.dtype) * jnp.sign(jnp.diagonal(h))


SVD.__module__ = "treeparams.matrices"
