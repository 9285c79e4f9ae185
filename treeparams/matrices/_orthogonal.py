"""Products of reflections and of rotations: matrices that stay orthogonal whatever their parameters are; SVD of them.

A *reflection* by a vector v is `I - 2 v v^T / (v^T v)`. A product of k of them, `H_1 H_2 ... H_k`, with the vectors as
the rows of V, is

    I - V^T T V,    where the inverse of T is triu(V V^T, 1) + diag(V V^T) / 2

(Joffrain et al. 2006, "Accumulating Householder transformations, revisited"), so that a product with a batch is two
matrix products and the inverse of a small triangle. No entry of `I - V^T T V` is ever written. Blocks of reflections
bound the triangle; a scan over them bounds the program.

A *rotation* by an angle acts on a pair of rows. Layers of them alternate between the pairs (0, 1), (2, 3), ... and (1,
2), (3, 4), ...: n layers can express every rotation of n dimensions (Clements et al. 2016, "Optimal design for
universal multiport interferometers").
"""

import abc
import dataclasses
import functools
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._forms.mesh import varying_alike
from .._tree.text import describe
from ._constrained import as_parameter, as_row, wide
from ._matrix import AbstractMatrix, Transposed, Weight, as_weight, to_dense

_as_real = functools.partial(as_parameter, is_real=True)
_BLOCK = 128  # reflections; measured at n = 1024 to 4096: half of it takes as long and three times the memory in AD


class AbstractInvertible(AbstractMatrix):
    """A matrix that has, if it is square, an inverse made of the same arrays and a determinant."""

    @abc.abstractmethod
    def inv(self) -> AbstractMatrix:
        """Returns the inverse, made of the same arrays: in one model with the original it is tied to it."""

    @abc.abstractmethod
    def slogdet(self) -> tuple[Float[Array, "*members"], Float[Array, "*members"]]:
        """Returns the sign of the determinant and the logarithm of its absolute value; for an ensemble of each."""

    def solve(self, b: Array | np.ndarray) -> Array:
        """Returns the x with `M @ x = b`; shapes as for `M @ x`."""
        return self.inv() @ b

    def logdet(self) -> Float[Array, "*members"]:
        """Returns the logarithm of the absolute determinant."""
        return self.slogdet()[1]


class AbstractOrthogonal(AbstractInvertible):
    """A square matrix whose transpose is its inverse."""

    @property
    def T(self) -> AbstractMatrix:  # noqa: N802
        return TransposedOrthogonal(self)

    def inv(self) -> AbstractMatrix:
        """Returns the transpose."""
        return self.T


class TransposedOrthogonal(Transposed, AbstractOrthogonal):
    """The transpose of an orthogonal matrix, made of its arrays; `M.T` and `M.inv()` make it."""

    matrix: Any  # an orthogonal one

    def slogdet(self) -> tuple[Array, Array]:
        return self.matrix.slogdet()


class Orthogonal(AbstractOrthogonal):
    """An orthogonal matrix: a product of Householder reflections.

    >>> import jax, jax.numpy as jnp
    >>> from treeparams import matrices
    >>> q = matrices.Orthogonal.random(4, key=jax.random.key(0), reflections=2)
    >>> q
    Orthogonal(shape=(4, 4), vectors=f32[2,4])
    >>> bool(jnp.allclose(q.T @ (q @ jnp.ones(4)), 1, atol=1e-5))
    True

    It is orthogonal whatever the vectors are, so you need not correct it after a step. A vector of zeros is the
    identity, and its gradient there is zero. Products with it, and so inverses and everything made of it, use
    `jax.lax.Precision.HIGHEST`: in TF32 or bfloat16, the default on some devices, it would be orthogonal to three
    digits only.

    Args:
        vectors: shape `(reflections, n)`, one reflection per row; the last acts first. Their lengths do not matter.
    """

    vectors: Float[Array, "reflections n"] = eqx.field(converter=_as_real)

    def __check_init__(self) -> None:
        if self.vectors.ndim != 2:
            raise ValueError(f"expected vectors of shape (reflections, n), got {self.vectors.shape}")

    @classmethod
    def random(
        cls, n: int, *, key: Array, reflections: int | None = None, dtype: DTypeLike | None = None
    ) -> "Orthogonal":
        """Makes a random one of n reflections, which is uniform over the orthogonal matrices, or of fewer."""
        reflections = n if reflections is None else reflections
        _check_sizes(n=n, reflections=reflections)
        return cls(jax.random.normal(key, (reflections, n), float if dtype is None else dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        *members, _, n = self.vectors.shape
        return *members, n, n

    def apply(self, x: Array) -> Array:
        return _reflected(self.vectors, x, transposed=False)

    def apply_transposed(self, x: Array) -> Array:
        return _reflected(self.vectors, x, transposed=True)

    def slogdet(self) -> tuple[Array, Array]:
        is_identity = _unit_scaled(wide(self.vectors), -1)[1]  # as the product sees it
        sign = jnp.prod(jnp.where(is_identity, 1, -1), axis=(-1, -2)).astype(self.dtype)
        return sign, jnp.zeros_like(sign)


class Givens(AbstractOrthogonal):
    """A rotation of n dimensions: layers of rotations of neighbouring pairs.

    >>> import jax.numpy as jnp
    >>> from treeparams import matrices
    >>> quarter = matrices.Givens(jnp.array([[jnp.pi / 2]]), 2)
    >>> jnp.round(quarter @ jnp.array([1.0, 2.0]), 3)
    Array([-2.,  1.], dtype=float32)

    Its determinant is one. Angles of zero are the identity.

    Args:
        angles: in radians, shape `(layers, n // 2)`; the last layer acts first. Layer 0, 2, ... rotates the pairs
            (0, 1), (2, 3), ..., layer 1, 3, ... the pairs (1, 2), (3, 4), ..., with (n - 1, 0) as the last where n
            is even.
        n: rows and columns.
    """

    angles: Float[Array, "layers pairs"] = eqx.field(converter=_as_real)
    n: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        if self.angles.ndim != 2 or self.angles.shape[1] != self.n // 2:
            raise ValueError(
                f"expected angles of shape (layers, {self.n // 2}) for n={self.n}, got {self.angles.shape}"
            )

    @classmethod
    def random(cls, n: int, *, key: Array, layers: int | None = None, dtype: DTypeLike | None = None) -> "Givens":
        """Makes a random one of n layers, which can express every rotation, or of fewer; the angles are uniform."""
        layers = n if layers is None else layers
        _check_sizes(n=n, layers=layers)
        dtype = float if dtype is None else dtype
        return cls(jax.random.uniform(key, (layers, n // 2), dtype, minval=-jnp.pi, maxval=jnp.pi), n)

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.angles.shape[:-2], self.n, self.n

    def apply(self, x: Array) -> Array:
        return _rotated(self.angles, x, transposed=False)

    def apply_transposed(self, x: Array) -> Array:
        return _rotated(self.angles, x, transposed=True)

    def slogdet(self) -> tuple[Array, Array]:
        return jnp.ones(self.shape[:-2], self.dtype), jnp.zeros(self.shape[:-2], self.dtype)


def _check_sizes(**sizes: int) -> None:
    """Raises an error unless all can be sizes of arrays."""
    if any(size < 0 for size in sizes.values()):
        got = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"the sizes of a random matrix must be at least 0, got {got}")


# -- Reflections

# Outside of a trace one program instead of about forty operations; inside one it is inlined.
_compiled = functools.partial(jax.jit, static_argnames="transposed", inline=True)
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@_compiled
def _reflected(vectors: Array, x: Array, transposed: bool) -> Array:
    count, n = vectors.shape
    if count == 0 or n == 0:
        return x
    dtype, x = x.dtype, wide(x)
    # Real, also where x is complex; and neither so long nor so short that a square is no number.
    vectors, _ = _unit_scaled(vectors.astype(jnp.finfo(x.dtype).dtype), -1)
    blocks = -(-count // min(_BLOCK, n))  # more than n vectors depend on each other, which a triangle takes badly
    size = -(-count // blocks)
    if blocks == 1:
        return _block_of_reflections(vectors, x, transposed).astype(dtype)
    x, vectors = varying_alike([x, vectors])  # the carry of a scan keeps its type
    stacked = jnp.pad(vectors, ((0, blocks * size - count), (0, 0))).reshape(blocks, size, n)

    def next_block(x: Array, block: Array) -> tuple[Array, None]:
        return _block_of_reflections(block, x, transposed), None

    return jax.lax.scan(next_block, x, stacked, reverse=not transposed)[0].astype(dtype)


def _unit_scaled(x: Array, axis: int) -> tuple[Array, Array]:
    """Divides vectors along an axis by their largest entry; also returns which are zero, and leaves these as they are.

    So their squares neither overflow nor vanish. Use it for functions of their directions alone: the scale has no
    influence on these, so its gradient is not needed.
    """
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis, keepdims=True, initial=0))
    is_zero = largest < float(jnp.finfo(x.dtype).tiny)  # smaller numbers are zero on most devices
    # Divided by in two steps, since the reciprocal of a large number may be taken, and be zero.
    root = jnp.sqrt(jnp.where(is_zero, 1, largest))
    return x / root / root, is_zero


def _block_of_reflections(vectors: Array, x: Array, transposed: bool) -> Array:
    gram = _matmul(vectors, vectors.T)
    squares = jnp.diagonal(gram)
    # With a one on the diagonal a vector of zeros has no effect.
    triangle = jnp.triu(gram, 1) + jnp.diag(jnp.where(squares > 0, squares / 2, 1))
    middle = _triangular_inverse(triangle).astype(x.dtype)
    vectors = vectors.astype(x.dtype)
    return x - _matmul(_matmul(_matmul(x, vectors.T), middle if transposed else middle.T), vectors)


@jax.custom_jvp
def _triangular_inverse(upper: Float[Array, "k k"]) -> Float[Array, "k k"]:
    """Returns the inverse of an upper triangle, built from blocks of one upwards.

    If A and C are inverted, the inverse of [[A, B], [0, C]] is [[A', -A' B C'], [0, C']]: as stable as substitution,
    but made of products of matrices. LAPACK's solver for a triangle takes up to 50 times as long on CPU when other
    threads run.
    """
    count = len(upper)
    size, full = 1, 1 << (count - 1).bit_length()
    upper = jnp.pad(upper, ((0, full - count), (0, full - count)))
    diagonal = jnp.diagonal(upper)
    inverses = (1 / jnp.where(diagonal == 0, 1, diagonal)).reshape(full, 1, 1)
    while size < full:
        pairs = upper.reshape(full // (2 * size), 2, size, full // (2 * size), 2, size)[:, 0, :, :, 1, :]
        corners = jnp.einsum("pipj->pij", pairs)
        first, second = inverses[0::2], inverses[1::2]
        upper_rows = jnp.concatenate([first, -_matmul(_matmul(first, corners), second)], axis=2)
        lower_rows = jnp.concatenate([jnp.zeros_like(first), second], axis=2)
        inverses = jnp.concatenate([upper_rows, lower_rows], axis=1)
        size *= 2
    return inverses[0, :count, :count]


@_triangular_inverse.defjvp
def _triangular_inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = _triangular_inverse(primals[0])
    return inverse, -_matmul(_matmul(inverse, tangents[0]), inverse)


# -- Rotations


@_compiled
def _rotated(angles: Array, x: Array, transposed: bool) -> Array:
    if angles.size == 0:
        return x
    dtype, x = x.dtype, wide(x)
    angles = angles.astype(jnp.finfo(x.dtype).dtype)
    x, angles = varying_alike([x, angles])  # the carry of a scan keeps its type
    own, other = _coefficients(-angles if transposed else angles, x.shape[-1])
    # A layer of zeros that fills up the last two is to be the identity.
    pairs = _two_by_two(own - 1) + 1, _two_by_two(other)
    # Its axes are of length one where x has batches: a mask of their shape would not be sharded as x is.
    first = (jnp.arange(x.shape[-1]) % 2 == 0).reshape((1,) * (x.ndim - 1) + (-1,))

    def two_layers(x: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        for odd in (0, 1) if transposed else (1, 0):
            is_first = jnp.roll(first, odd, axis=-1)
            partner = jnp.where(is_first, jnp.roll(x, -1, axis=-1), jnp.roll(x, 1, axis=-1))
            x = x * as_row(pair[0][odd], x) + partner * as_row(pair[1][odd], x)
        return x, None

    return jax.lax.scan(two_layers, x, pairs, reverse=not transposed)[0].astype(dtype)


def _coefficients(angles: Float[Array, "layers pairs"], n: int) -> tuple[Array, Array]:
    """Returns per layer and entry: the factor of the entry itself, and the factor of its partner; shape `(layers, n)`.

    Products with whole rows, and rolled rows, take less than half the time of slices with a stride of two.
    """
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    unpaired = ((0, 0), (0, n % 2))
    own = jnp.pad(jnp.repeat(cos, 2, axis=1), unpaired, constant_values=1)
    other = jnp.pad(jnp.stack([-sin, sin], axis=-1).reshape(len(angles), -1), unpaired)
    is_odd = jnp.broadcast_to((jnp.arange(len(angles)) % 2 == 1)[:, None], own.shape)
    own, other = (jnp.where(is_odd, jnp.roll(rows, 1, axis=1), rows) for rows in (own, other))
    return own, other


def _two_by_two(layers: Float[Array, "layers n"]) -> Float[Array, "pairs 2 n"]:
    """Pairs each layer with the next one; a last one without a partner is paired with zeros."""
    return jnp.pad(layers, ((0, -len(layers) % 2), (0, 0))).reshape(-1, 2, layers.shape[1])


Givens.__module__ = Orthogonal.__module__ = "treeparams.matrices"


# -- The singular value decomposition ----------------------------------------------------------------------------------

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
    d: Float[Array, " singular"] = eqx.field(converter=_as_real)
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
        _check_sizes(m=m, n=n)
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
        w = _as_real(to_dense(as_weight(w)))
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
