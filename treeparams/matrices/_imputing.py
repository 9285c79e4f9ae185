"""Matrices that fill in missing data, single entries of a sample or whole samples; NaN marks a missing entry.

No NaN may reach a gradient. It is not enough to select the result after the product, since the product's derivative is
zero times NaN. So every NaN is replaced before the product, and the result is selected once more after it.
"""

import abc
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Inexact

from ._lineax import as_weight
from ._matrix import AbstractMatrix, Weight, apply, apply_transposed, to_dense
from ._nodes import as_parameter, as_row, is_array


class AbstractImputing(AbstractMatrix):
    """A matrix, and the values that replace missing data in the product with it."""

    matrix: Weight = eqx.field(converter=as_weight)
    psi: Inexact[Array, " entries"] = eqx.field(converter=as_parameter)

    is_of_samples: ClassVar[bool]  # missing as a whole, so that psi has one entry per output; else one per input

    def __check_init__(self) -> None:
        size, one_per = (self.shape[0], "output") if self.is_of_samples else (self.shape[1], "input")
        if self.psi.shape != (size,):
            raise ValueError(
                f"psi of a {type(self).__name__} must have one entry per {one_per}: "
                f"expected shape ({size},) for a matrix of shape {self.shape}, got {self.psi.shape}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def apply(self, x: Array) -> Array:
        return self._imputed(x, jnp.isnan(x))

    def apply_transposed(self, x: Array) -> Array:
        spoilt = jnp.any(jnp.isnan(x), axis=-1)
        y = apply_transposed(self.matrix, jnp.where(spoilt[..., None], 0, x))
        name = type(self).__name__
        refusal = f"{{}} have NaN, but x @ M of a {name} imputes nothing: use M @ x, or x @ M.T if samples are rows"
        return _nan_where(spoilt, y, refusal)

    def to_dense(self) -> Array:
        """Returns the entries of the matrix alone, which multiply entries that are not missing."""
        return to_dense(self.matrix).astype(self.dtype)

    def matmul(self, x: Array | np.ndarray, *, missing: ArrayLike | None = None) -> Array:
        """Returns the product `M @ x`, with a mask of missing entries.

        >>> import jax.numpy as jnp
        >>> from treeparams import matrices
        >>> weight = matrices.PreImputing(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([10.0, 20.0]))
        >>> weight.matmul(jnp.array([5.0, -1.0]), missing=jnp.array([False, True]))
        Array([45., 95.], dtype=float32)

        The values of x at missing entries have no influence and get a gradient of zero. If your samples are rows, write
        `M.matmul(x.T, missing=missing.T).T`, or `jax.vmap` of this.

        Args:
            x: shape `(in,)`, `(in, batch)` or `(..., in, batch)`, an array.
            missing: bools of the shape of x; for a `PostImputing` also of whole samples, of the shape of x without the
                axis `in`. `None`: entries that are NaN are missing, as in `M @ x`. With a mask, NaN elsewhere is not
                missing.

        Raises:
            ValueError: x holds NaN that the mask does not cover, and as `M @ x`; within a trace such products are NaN.
        """
        if not is_array(x):
            raise TypeError(f"expected an array, got {type(x).__name__}")
        if missing is None:
            return self @ x
        missing, axis, shape = jnp.asarray(missing), -1 if x.ndim == 1 else -2, x.shape
        x = self._operand(x, axis)
        if missing.dtype != jnp.bool_:
            raise TypeError(f"expected a mask of bools, True where x is missing, got {missing.dtype}")
        shapes = [shape, shape[:axis] + shape[axis:][1:]] if self.is_of_samples else [shape]
        if missing.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"expected a mask of shape {expected} for x of shape {shape}, got {missing.shape}")
        missing = jnp.moveaxis(missing, axis, -1) if missing.ndim == x.ndim else missing[..., None]
        nan = jnp.isnan(x) & ~missing
        y = self._imputed(jnp.where(nan, 0, x), missing)
        refusal = f"{type(self).__name__}.matmul: {{}} have NaN where the mask says that nothing is missing"
        return jnp.moveaxis(_nan_where(jnp.any(nan, axis=-1), y, refusal), -1, axis)

    @abc.abstractmethod
    def _imputed(self, x: Inexact[Array, "*batch columns"], missing: Bool[Array, "*batch #columns"]) -> Array:
        """Returns the product with each vector along the last axis, which holds NaN only at missing entries."""


class PreImputing(AbstractImputing):
    """A matrix that fills in missing entries before the product: those of input i are psi[i].

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> weight = matrices.PreImputing(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([10.0, 20.0]))
    >>> x = jnp.array([[5.0, jnp.nan], [jnp.nan, jnp.nan]])  # two samples: columns
    >>> weight @ x
    Array([[ 45.,  50.],
           [ 95., 110.]], dtype=float32)
    >>> # 1 and 2 missing, times the sum of W's column
    >>> tp.grad(lambda weight: jnp.sum(weight @ x))(weight).psi
    Array([ 4., 12.], dtype=float32)

    An entry that is NaN is missing, and a complex one if either part is NaN; integers have none. Samples are columns in
    `M @ x` and rows in `x @ M.T`; an `equinox.nn.Linear` with this as its weight, under `jax.vmap`, works unchanged. `x
    @ M` and `M.T @ x` are products with the transpose, which impute nothing: NaN there raises a `ValueError`, or makes
    the product NaN within a trace. If you have the mask separately from the data, use `matmul`.

    With psi at zero and centred inputs it starts as mean imputation does. No NaN of x reaches a gradient, of any order:
    missing entries of x get zero, and so does psi if nothing is missing.

    You may put a `LowRank` or an `SVD` inside it. It cannot be the base of a `LowRank`, whose other term would see NaN:
    that raises a `ValueError`.
    Source: Mandlik et al. 2021, "Mill.jl and JsonGrinder.jl: automated differentiable feature extraction for learning
    from raw JSON data".

    Args:
        matrix: `out` by `in`, an array or a matrix.
        psi: shape `(in,)`.
    """

    is_of_samples = False

    def _imputed(self, x: Array, missing: Array) -> Array:
        return apply(self.matrix, jnp.where(missing, as_row(self.psi, x), x))


class PostImputing(AbstractImputing):
    """A matrix whose product with a sample that is missing as a whole is psi.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> weight = matrices.PostImputing(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([10.0, 20.0]))
    >>> x = jnp.array([[5.0, jnp.nan], [6.0, jnp.nan]])  # two samples: columns
    >>> weight @ x
    Array([[17., 10.],
           [39., 20.]], dtype=float32)
    >>> tp.grad(lambda weight: jnp.sum(weight @ x))(weight).psi  # how many are missing
    Array([1., 1.], dtype=float32)

    Use it for data that are present or missing as a whole: the readings of one of several instruments, a branch of a
    record. A sample of which only some entries are missing raises a `ValueError` if the values are known, which is
    outside of `jax.jit` and `jax.vmap`; `jax.grad` alone does not hide them. This check adds one reduction to each
    product, and waits for it. Within a trace the product with such a sample is NaN, and it adds nothing to the gradient
    of the matrix or of x.

    Missing entries, the axes of samples, and gradients are as for `PreImputing`. A layer's bias is added to psi as to
    any product. Source: as for `PreImputing`.

    Args:
        matrix: `out` by `in`, an array or a matrix.
        psi: shape `(out,)`.
    """

    is_of_samples = True

    def _imputed(self, x: Array, missing: Array) -> Array:
        some, every = jnp.any(missing, axis=-1), jnp.all(missing, axis=-1)
        whole = some & every  # if there are no entries, `every` is True although nothing is missing
        y = apply(self.matrix, jnp.where(some[..., None], 0, x))
        y = jnp.where(whole[..., None], as_row(self.psi, y), y)
        refusal = "{} are missing in part, but PostImputing needs whole ones: use PreImputing for single entries"
        return _nan_where(some & ~every, y, refusal)


def _nan_where(spoilt: Bool[Array, "*batch"], y: Inexact[Array, "*batch rows"], refusal: str) -> Array:
    """Makes these samples NaN, without a gradient from them; outside of a trace raises an error if there are any."""
    if isinstance(spoilt, Tracer):
        return jnp.where(spoilt[..., None], jnp.nan, y)
    count = int(jnp.sum(spoilt))
    if count:
        raise ValueError(refusal.format(f"{count} of {spoilt.size} samples"))
    return y


PostImputing.__module__ = PreImputing.__module__ = "treeparams.matrices"
