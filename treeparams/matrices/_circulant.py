"""Matrices with equal entries along each diagonal, multiplied by fast Fourier transforms.

The product with a circulant matrix is a periodic convolution, which the Fourier transform makes a product entry by
entry: the transform of the first column holds the eigenvalues. A Toeplitz matrix is a corner of a larger circulant one.
The transforms take place in at least float32, since there are none in less and many steps would lose too much.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact

from ._invertible import AbstractInvertible, of_same_arrays, slogdet_of
from ._matrix import AbstractMatrix
from ._structured import check_vector
from ._weights import as_parameter, times, wide

# Why there is no other way for small ones: measured on two CPU cores with 256 vectors, making the matrix dense takes an
# eighth of the time of a Toeplitz product at n = 64 and half at 256, as long at 512 (gradients: at 256), ten times as
# long at 4096. What it would save is less than 0.3 ms, for a second way that rounds otherwise.


class Circulant(AbstractInvertible):
    """A circulant matrix, `scipy.linalg.circulant(column)`: the periodic convolution with its first column.

    >>> import jax.numpy as jnp
    >>> from treeparams import matrices
    >>> behind = matrices.Circulant(jnp.array([1.0, -1.0, 0.0, 0.0]))
    >>> jnp.round(behind @ jnp.array([1.0, 2.0, 4.0, 8.0]))
    Array([-7.,  1.,  2.,  4.], dtype=float32)

    A product costs `O(n log n)` operations per vector, so do the inverse and the determinant. It is fastest where n has
    small prime factors only.

    Args:
        column: the first one, shape `(n,)`, real or complex.
        inverted: whether it is the inverse of that matrix, as `inv` makes it.

    Raises:
        TypeError: the column is no floating array.
        ValueError: it has another rank.
    """

    column: Inexact[Array, " n"] = eqx.field(converter=as_parameter)
    inverted: bool = eqx.field(static=True, default=False)

    ranks = {"column": 1}

    def __check_init__(self) -> None:
        check_vector(self, "column", self.column)

    @property
    def shape(self) -> tuple[int, int]:
        n = self.column.shape[-1]
        return n, n

    def apply(self, x: Array) -> Array:
        return _convolved(self.column, x, len(self.column), self.inverted)

    def apply_transposed(self, x: Array) -> Array:
        row = jnp.roll(jnp.flip(self.column), 1)  # the first one, which is the first column of the transpose
        return _convolved(row, x, len(row), self.inverted)

    def to_dense(self) -> Array:
        if self.inverted:
            return super().to_dense()
        self._check_rank()
        i = jnp.arange(len(self.column))
        return self.column[i[:, None] - i[None, :]]  # negative indices count from the end

    def inv(self) -> "Circulant":
        return of_same_arrays(self, inverted=not self.inverted)

    def slogdet(self) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
        self._check_rank()
        column = wide(self.column)
        eigenvalues = jnp.fft.fft(column) if len(column) else column
        return slogdet_of(eigenvalues, self.inverted, self.dtype)


class Toeplitz(AbstractMatrix):
    """A Toeplitz matrix, `scipy.linalg.toeplitz(column, row)`: equal entries along each diagonal.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> weight = matrices.Toeplitz(jnp.array([1.0, 2.0, 3.0]), jnp.array([0.0, 5.0]))
    >>> weight.to_dense()
    Array([[1., 5.],
           [2., 1.],
           [3., 2.]], dtype=float32)
    >>> tp.layout(weight).paths, weight.above
    (('column', 'above'), Array([5.], dtype=float32))

    As with SciPy the first entry of the row is ignored in favour of the column's. What is kept of it, in the field
    `above`, are the others, so that no parameter is without effect. A lower triangle (a causal filter) has a row of
    zeros, to be frozen by `freeze="above"` in `tp.layout`.

    A product costs `O((m + n) log(m + n))` operations per vector.

    Args:
        column: the first one, shape `(m,)`, real or complex.
        row: the first one, shape `(n,)`.

    Raises:
        TypeError: one is no floating array.
        ValueError: one has another rank.
    """

    column: Inexact[Array, " m"]
    above: Inexact[Array, " above"]
    n: int = eqx.field(static=True, repr=False)  # with no or one column nothing is above the diagonal

    ranks = {"column": 1, "above": 1}

    def __init__(self, column: Array | np.ndarray, row: Array | np.ndarray) -> None:
        column, row = as_parameter(column), as_parameter(row)
        check_vector(self, "column", column)
        check_vector(self, "row", row)
        self.column, self.above, self.n = column, row[1:], len(row)

    @property
    def shape(self) -> tuple[int, int]:
        return self.column.shape[-1], self.n

    def apply(self, x: Array) -> Array:
        return _corner(self.column, self.above, x, self.shape[0])

    def apply_transposed(self, x: Array) -> Array:
        row = jnp.concatenate([self.column[:1].astype(x.dtype), self.above.astype(x.dtype)])
        return _corner(row, self.column[1:], x, self.n)

    def to_dense(self) -> Array:
        self._check_rank()
        m, n = self.shape
        if m == 0 or n == 0:
            return jnp.zeros((m, n), self.dtype)
        diagonals = jnp.concatenate([self.column.astype(self.dtype), jnp.flip(self.above).astype(self.dtype)])
        return diagonals[jnp.arange(m)[:, None] - jnp.arange(n)[None, :]]  # negative indices count from the end


def _convolved(kernel: Array, x: Array, size: int, inverted: bool = False) -> Array:
    """The periodic convolution of this length with both padded by zeros, or what gives x when it is so convolved."""
    if size == 0:
        return x
    dtype, x = x.dtype, wide(x)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    forward, backward = (jnp.fft.fft, jnp.fft.ifft) if is_complex else (jnp.fft.rfft, jnp.fft.irfft)
    eigenvalues = forward(kernel.astype(x.dtype), size)
    return backward(times(forward(x, size), 1 / eigenvalues if inverted else eigenvalues), size).astype(dtype)


def _corner(column: Array, above: Array, x: Array, m: int) -> Array:
    """The product with a Toeplitz matrix, the upper left corner of a circulant one."""
    n = x.shape[-1]
    if m == 0 or n == 0:
        return jnp.zeros((*x.shape[:-1], m), x.dtype)
    size = _fast_length(m + n - 1)
    gap = jnp.zeros(size - len(column) - len(above), x.dtype)
    kernel = jnp.concatenate([column.astype(x.dtype), gap, jnp.flip(above).astype(x.dtype)])
    return _convolved(kernel, x, size)[..., :m]


def _fast_length(size: int) -> int:
    """The least that is not smaller among powers of two times 1, 3, 5, 9 or 15.

    For n = 1031 a power of two alone takes twice as long, the length as it is three times.
    """
    return min(odd << (-(-size // odd) - 1).bit_length() for odd in (1, 3, 5, 9, 15))


Circulant.__module__ = Toeplitz.__module__ = "treeparams.matrices"
