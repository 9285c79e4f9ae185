"""Diagonal matrices, Kronecker products, and matrices with rows and columns in another order."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Inexact, Int

from ._invertible import AbstractInvertible, of_same_arrays, slogdet_of
from ._matrix import AbstractMatrix, is_array
from ._weights import Weight, apply, apply_transposed, as_parameter, as_weight, shape_of, times, to_dense


class Diagonal(AbstractInvertible):
    """A diagonal matrix: each entry of a vector scaled by itself.

    >>> import jax.numpy as jnp
    >>> from treeparams import matrices
    >>> scale = matrices.Diagonal(jnp.array([1.0, -2.0]))
    >>> scale @ jnp.ones(2), scale.solve(jnp.ones(2))
    (Array([ 1., -2.], dtype=float32), Array([ 1. , -0.5], dtype=float32))
    >>> scale.logdet()
    Array(0.6931472, dtype=float32)

    Args:
        diagonal: shape `(n,)`, real or complex.
        inverted: whether it is the inverse of this, as `inv` makes it.

    Raises:
        TypeError: the diagonal is no floating array.
        ValueError: it has another rank.
    """

    diagonal: Inexact[Array, " n"] = eqx.field(converter=as_parameter)
    inverted: bool = eqx.field(static=True, default=False)

    ranks = {"diagonal": 1}

    def __check_init__(self) -> None:
        check_vector(self, "diagonal", self.diagonal)

    @property
    def shape(self) -> tuple[int, int]:
        n = self.diagonal.shape[-1]
        return n, n

    def apply(self, x: Array) -> Array:
        if self.inverted:
            return x / jnp.broadcast_to(self.diagonal.astype(x.dtype), x.shape)
        return times(x, self.diagonal)

    apply_transposed = apply

    def to_dense(self) -> Array:
        self._check_rank()
        return jnp.diag(1 / self.diagonal if self.inverted else self.diagonal)

    @property
    def T(self) -> "Diagonal":  # noqa: N802
        return self

    def inv(self) -> "Diagonal":
        return of_same_arrays(self, inverted=not self.inverted)

    def slogdet(self) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
        self._check_rank()
        return slogdet_of(self.diagonal, self.inverted, self.dtype)


class Kronecker(AbstractInvertible):
    """The Kronecker product of two matrices, `jnp.kron(left, right)`, of which no entry is ever written.

    >>> import jax.numpy as jnp
    >>> from treeparams import matrices
    >>> a, b = jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 1.0], [1.0, 0.0]])
    >>> weight = matrices.Kronecker(a, b)
    >>> weight @ jnp.arange(4.0), jnp.kron(a, b) @ jnp.arange(4.0)
    (Array([7., 4.], dtype=float32), Array([7., 4.], dtype=float32))

    It acts on an image, with its rows one after the other in one vector, from both sides: `left @ image @ right.T`. Of
    more factors, write `Kronecker(a, Kronecker(b, c))`.

    Args:
        left: an array or a matrix.
        right: the same.

    Raises:
        TypeError: a factor is neither.
        ValueError: it has another rank.
    """

    left: Weight = eqx.field(converter=as_weight)
    right: Weight = eqx.field(converter=as_weight)

    ranks = {"left": 2, "right": 2}

    @property
    def shape(self) -> tuple[int, int]:
        (m, n), (p, q) = shape_of(self.left), shape_of(self.right)
        return m * p, n * q

    def apply(self, x: Array) -> Array:
        return _from_both_sides(apply, self.left, self.right, shape_of(self.left), shape_of(self.right), x)

    def apply_transposed(self, x: Array) -> Array:
        (m, n), (p, q) = shape_of(self.left), shape_of(self.right)
        return _from_both_sides(apply_transposed, self.left, self.right, (n, m), (q, p), x)

    def to_dense(self) -> Array:
        self._check_rank()
        return jnp.kron(to_dense(self.left), to_dense(self.right))

    def inv(self) -> "Kronecker":
        """The inverse, made of the same arrays: in one model with the original it is tied to it.

        Raises:
            TypeError: a factor is no matrix with an `inv`.
            ValueError: one is not square.
        """
        left, right = self._invertible("an inverse")
        return Kronecker(left.inv(), right.inv())

    def slogdet(self) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
        """The sign of the determinant and the logarithm of its absolute value.

        Raises:
            TypeError: a factor is no matrix with a `slogdet`.
            ValueError: one is not square.
        """
        left, right = self._invertible("a determinant")
        (of_left, log_left), (of_right, log_right) = left.slogdet(), right.slogdet()
        n, q = left.shape[0], right.shape[0]
        return of_left**q * of_right**n, q * log_left + n * log_right

    def _invertible(self, what: str) -> tuple[Any, Any]:
        self._check_rank()
        for name in ("left", "right"):
            factor = getattr(self, name)
            if not (hasattr(factor, "inv") and hasattr(factor, "slogdet")):
                kind = "array" if is_array(factor) else type(factor).__name__
                raise TypeError(
                    f"a Kronecker product has {what} if both factors do, and its {name} one is a plain {kind}: "
                    f"make it one that has, such as matrices.SVD.from_dense({name})"
                )
            if factor.shape[0] != factor.shape[1]:
                raise ValueError(f"only square factors have {what}, and the {name} one has shape {factor.shape}")
        return self.left, self.right


class Permuted(AbstractMatrix):
    """A matrix with its rows and columns in another order, or a selection of them: `M[rows][:, columns]`.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> w = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> weight = matrices.Permuted(w, rows=jnp.array([1, 0]), columns=jnp.array([2, 0, 1]))
    >>> weight.to_dense()
    Array([[6., 4., 5.],
           [3., 1., 2.]], dtype=float32)
    >>> tp.layout(weight).paths, tp.layout({"first": w, "second": weight}).ties
    (('matrix',), {'first': ('second.matrix',)})

    The vectors are brought into order, not the matrix, which may be any and stays the parameter that it was. The
    indices are integer arrays in the model, so they are never trained, and other ones of the same length compile
    nothing anew.

    Args:
        matrix: an array or a matrix.
        rows: indices, which may repeat or be missing; negative ones count from the end. `None`: all.
        columns: the same.

    Raises:
        TypeError: indices are no integers.
        ValueError: they have another rank, or one is out of range (within a trace nothing is known of that).
    """

    matrix: Weight = eqx.field(converter=as_weight)
    rows: Int[Array, " rows"] | None = eqx.field(default=None, converter=lambda value: _as_indices(value, "rows"))
    columns: Int[Array, " columns"] | None = eqx.field(
        default=None, converter=lambda value: _as_indices(value, "columns")
    )

    ranks = {"matrix": 2, "rows": 1, "columns": 1}

    def __check_init__(self) -> None:
        m, n = shape_of(self.matrix)
        _check_range(self.rows, "rows", m)
        _check_range(self.columns, "columns", n)

    @property
    def shape(self) -> tuple[int, int]:
        m, n = shape_of(self.matrix)
        return _length(self.rows, m), _length(self.columns, n)

    def apply(self, x: Array) -> Array:
        return _taken(apply(self.matrix, _put(x, self.columns, shape_of(self.matrix)[1])), self.rows)

    def apply_transposed(self, x: Array) -> Array:
        return _taken(apply_transposed(self.matrix, _put(x, self.rows, shape_of(self.matrix)[0])), self.columns)

    def to_dense(self) -> Array:
        self._check_rank()
        dense = to_dense(self.matrix)
        dense = dense if self.rows is None else dense[self.rows]
        return dense if self.columns is None else dense[:, self.columns]


def check_vector(matrix: AbstractMatrix, name: str, value: Array) -> None:
    """Raises unless what a constructor was given for a vector is one."""
    if value.ndim != 1:
        raise ValueError(f"{type(matrix).__name__} takes a {name} of shape (n,), got shape {value.shape}")


# -- Kronecker products

Shape = tuple[int, int]


def _from_both_sides(
    product: Callable[[Weight, Array], Array], left: Weight, right: Weight, of_left: Shape, of_right: Shape, x: Array
) -> Array:
    """With x as the rows of a matrix X one after the other, those of left X right^T."""
    (m, n), (p, q) = of_left, of_right
    x = x.reshape(*x.shape[:-1], n, q)
    swapped = lambda x: jnp.swapaxes(x, -1, -2)
    # Which side comes first does not matter to the result, but to the cost: these are multiplications.
    if n * p * (q + m) <= m * q * (n + p):
        y = swapped(product(left, swapped(product(right, x))))
    else:
        y = product(right, swapped(product(left, swapped(x))))
    return y.reshape(*y.shape[:-2], m * p)


# -- Indices


def _as_indices(value: Any, name: str) -> Array | None:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        value = np.asarray(value) if value else np.zeros(0, int)
    if not is_array(value) or not jnp.issubdtype(value.dtype, jnp.integer):
        got = value.dtype.name if is_array(value) else type(value).__name__
        hint = f"; of a mask, write {name}=jnp.flatnonzero(mask)" if got == "bool" else ""
        raise TypeError(f"{name} takes an array of integers, got {got}{hint}")
    if value.ndim != 1:
        raise ValueError(f"{name} takes indices of shape (k,), got shape {value.shape}")
    return jnp.asarray(value.astype(np.int32) if value.dtype.itemsize < 4 else value)  # sizes may exceed small ones


def _check_range(indices: Array | None, name: str, size: int) -> None:
    if indices is None or isinstance(indices, Tracer):
        return
    outside = np.flatnonzero((np.asarray(indices) < -size) | (np.asarray(indices) >= size))
    if len(outside):
        at = outside[0]
        raise ValueError(f"{name}[{at}] is {int(indices[at])}, out of range for a matrix with {size} {name}")


def _length(indices: Array | None, size: int) -> int:
    return size if indices is None else indices.shape[-1]


# Along the first axis both take a tenth of the time on CPU, where the last one is scattered entry by entry; what is
# copied for that is less than the product itself. (256 vectors of 4096: 1.3 ms in place of 14, the product 44.)


def _taken(x: Array, indices: Array | None) -> Array:
    return x if indices is None else jnp.moveaxis(jnp.moveaxis(x, -1, 0)[indices], 0, -1)


def _put(x: Array, indices: Array | None, size: int) -> Array:
    """The transpose of `_taken`: what came from one place is summed there."""
    if indices is None:
        return x
    zeros = jnp.zeros((size, *x.shape[:-1]), x.dtype)
    return jnp.moveaxis(zeros.at[indices].add(jnp.moveaxis(x, -1, 0)), 0, -1)


Diagonal.__module__ = Kronecker.__module__ = Permuted.__module__ = "treeparams.matrices"
