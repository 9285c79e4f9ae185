"""What every matrix of this module is: a node of the model that stands where an array stood.

A layer writes `weight @ x` and does not know what `weight` is. A matrix here is an `equinox.Module` that holds the
arrays it is made of, which are trained, frozen, flattened and averaged like any others, and knows two products: with a
vector, and of its transpose with one. Everything else follows from these.

There is no `__jax_array__`: with it JAX would make a matrix dense before `x @ M` ever asks the matrix.
"""

import abc
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Inexact

from ._printing import pdoc


def _refused(operation: str) -> Callable[..., Any]:
    def refuse(self: "AbstractMatrix", *_: Any) -> Any:
        raise TypeError(f"{operation} needs all entries of a {type(self).__name__}: take M.to_dense() first")

    return refuse


class AbstractMatrix(eqx.Module):
    """A matrix made of parameters; subclasses say of which, and how a vector is multiplied.

    >>> import equinox as eqx, jax.numpy as jnp
    >>> from treeparams import matrices
    >>> class Ones(matrices.AbstractMatrix):  # all entries are one number
    ...     value: jnp.ndarray
    ...     n: int = eqx.field(static=True)
    ...
    ...     @property
    ...     def shape(self):
    ...         return self.n, self.n
    ...
    ...     def apply(self, x):
    ...         return jnp.broadcast_to(self.value * jnp.sum(x, axis=-1, keepdims=True), x.shape)
    ...
    ...     apply_transposed = apply
    >>> weight = Ones(2 * jnp.ones(()), 3)
    >>> weight @ jnp.ones(3), weight.T @ jnp.ones((3, 1)), jnp.ones((1, 3)) @ weight
    (Array([6., 6., 6.], dtype=float32), Array([[6.],
           [6.],
           [6.]], dtype=float32), Array([[6., 6., 6.]], dtype=float32))
    >>> weight
    Ones(shape=(3, 3), value=f32[], n=3)

    `M @ x` and `x @ M` take arrays of JAX and of NumPy, with the shapes and the dtype that `jnp.matmul` gives. `M @ N`,
    `M + N`, `2 * M` and `M.T` of matrices are matrices that hold the same arrays, so that these are tied. What needs
    all entries - `M[0]`, `numpy.asarray(M)`, `M * x` - raises a `TypeError` that says `to_dense()`.
    """

    __array_ufunc__ = None  # so that NumPy leaves `x @ M` to us

    ranks: ClassVar[Mapping[str, int]] = {}  # of the fields that are arrays, so that an ensemble is told from a matrix

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns; from the last axes of arrays, so that it holds for an ensemble too."""

    @abc.abstractmethod
    def apply(self, x: Inexact[Array, "*batch columns"]) -> Inexact[Array, "*batch rows"]:
        """The product with each vector along the last axis; x comes in the dtype of the result."""

    @abc.abstractmethod
    def apply_transposed(self, x: Inexact[Array, "*batch rows"]) -> Inexact[Array, "*batch columns"]:
        """The same of the transpose."""

    def to_dense(self) -> Inexact[Array, "rows columns"]:
        """All entries, as an array."""
        self._check_rank()
        identity = jnp.eye(self.shape[1], dtype=self.dtype)
        return jnp.swapaxes(self.apply(identity), -1, -2).astype(self.dtype)

    @property
    def dtype(self) -> np.dtype:
        """That of the product with an array of ones: `jnp.result_type` of the parameters."""
        leaves = jax.tree.leaves(self, is_leaf=lambda node: node is not self and isinstance(node, AbstractMatrix))
        dtypes = [leaf.dtype for leaf in leaves if hasattr(leaf, "dtype")]
        inexact = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
        return jnp.result_type(*inexact) if inexact else jnp.result_type(float)

    @property
    def ndim(self) -> int:
        """Always 2."""
        return 2

    @property
    def T(self) -> "AbstractMatrix":  # noqa: N802 - as of an array
        """The transpose, made of the same arrays."""
        return Transposed(self)

    # -- Products

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, AbstractMatrix):
            return Product(self, other)
        if not is_array(other):
            return NotImplemented
        return self._product(other, -1 if np.ndim(other) == 1 else -2, False)

    def __rmatmul__(self, other: Any) -> Any:
        return self._product(other, -1, True) if is_array(other) else NotImplemented

    def _product(self, x: Any, axis: int, transposed: bool) -> Array:
        x = jnp.asarray(x)
        self._check_rank()
        self._check_operand(x, axis, transposed)
        dtype = jnp.result_type(self.dtype, x)
        x = jnp.moveaxis(x, axis, -1).astype(dtype)
        y = self.apply_transposed(x) if transposed else self.apply(x)
        return jnp.moveaxis(y, -1, axis).astype(dtype)

    def _check_operand(self, x: Array, axis: int, transposed: bool) -> None:
        size = self.shape[0 if transposed else 1]
        if x.ndim == 0 or x.shape[axis] != size:
            operation = "x @ M" if transposed else "M @ x"
            shapes = f"({size},) or (..., {size}, batch)" if not transposed else f"({size},) or (..., {size})"
            raise ValueError(
                f"{operation}: M is a {type(self).__name__} of shape {self.shape}, so x must have shape {shapes}, "
                f"got {x.shape}"
            )

    def _check_rank(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, AbstractMatrix):
                value._check_rank()
            elif name in self.ranks and getattr(value, "ndim", self.ranks[name]) != self.ranks[name]:
                raise ValueError(
                    f"{type(self).__name__}.{name} has shape {value.shape}, but one matrix has {self.ranks[name]} axes "
                    "there. Of an ensemble, take each by jax.vmap or equinox.filter_vmap"
                )

    # -- Sums and multiples

    def __add__(self, other: Any) -> "AbstractMatrix":
        return Sum(self, other) if isinstance(other, AbstractMatrix) else _refused("M + x")(self)

    def __sub__(self, other: Any) -> "AbstractMatrix":
        return Sum(self, -other) if isinstance(other, AbstractMatrix) else _refused("M - x")(self)

    def __mul__(self, other: Any) -> "AbstractMatrix":
        return Scaled(self, other) if _is_scalar(other) else _refused("M * x")(self)

    def __truediv__(self, other: Any) -> "AbstractMatrix":
        return Scaled(self, 1 / other) if _is_scalar(other) else _refused("M / x")(self)

    def __neg__(self) -> "AbstractMatrix":
        return Scaled(self, -1)

    __rmul__ = __mul__
    __radd__ = _refused("x + M")
    __rsub__ = _refused("x - M")
    __rtruediv__ = _refused("x / M")
    __pow__ = __rpow__ = _refused("**")
    __mod__ = __rmod__ = _refused("%")
    __floordiv__ = __rfloordiv__ = _refused("//")
    __lt__ = __le__ = __gt__ = __ge__ = _refused("a comparison")
    __abs__ = _refused("abs")
    __getitem__ = _refused("indexing")
    __iter__ = _refused("iteration")
    __array__ = _refused("conversion to an array")

    # -- To look at

    __pdoc__ = pdoc


def is_array(value: Any) -> bool:
    """Whether it is an array of JAX or of NumPy."""
    return isinstance(value, jax.Array | np.ndarray)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, numbers.Number | np.generic) or (is_array(value) and value.ndim == 0)


# -- A weight is an array, of NumPy where a model was loaded so, or a matrix

Weight = Array | np.ndarray | AbstractMatrix


def apply(weight: Weight, x: Array) -> Array:
    """As `AbstractMatrix.apply`."""
    return weight.apply(x) if isinstance(weight, AbstractMatrix) else x @ weight.T.astype(x.dtype)


def apply_transposed(weight: Weight, x: Array) -> Array:
    """As `AbstractMatrix.apply_transposed`."""
    return weight.apply_transposed(x) if isinstance(weight, AbstractMatrix) else x @ weight.astype(x.dtype)


def to_dense(weight: Weight) -> Array:
    """As `AbstractMatrix.to_dense`."""
    return weight.to_dense() if isinstance(weight, AbstractMatrix) else jnp.asarray(weight)


def shape_of(weight: Weight) -> tuple[int, int]:
    """Rows and columns."""
    rows, columns = weight.shape[-2:]
    return rows, columns


# -- Made of other matrices, which `merge` may have made arrays


class Transposed(AbstractMatrix):
    """The transpose of a matrix, made of its arrays; `M.T` makes it."""

    matrix: Weight

    ranks = {"matrix": 2}

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = shape_of(self.matrix)
        return columns, rows

    def apply(self, x: Array) -> Array:
        return apply_transposed(self.matrix, x)

    def apply_transposed(self, x: Array) -> Array:
        return apply(self.matrix, x)

    def to_dense(self) -> Array:
        return jnp.swapaxes(to_dense(self.matrix), -1, -2)

    @property
    def T(self) -> Any:  # noqa: N802
        return self.matrix


class Product(AbstractMatrix):
    """The product of two matrices, one after the other; `M @ N` makes it."""

    left: Weight
    right: Weight

    ranks = {"left": 2, "right": 2}

    def __check_init__(self) -> None:
        if shape_of(self.left)[1] != shape_of(self.right)[0]:
            raise ValueError(f"M @ N: the shapes {shape_of(self.left)} and {shape_of(self.right)} do not fit")

    @property
    def shape(self) -> tuple[int, int]:
        return shape_of(self.left)[0], shape_of(self.right)[1]

    def apply(self, x: Array) -> Array:
        return apply(self.left, apply(self.right, x))

    def apply_transposed(self, x: Array) -> Array:
        return apply_transposed(self.right, apply_transposed(self.left, x))


class Sum(AbstractMatrix):
    """The sum of two matrices; `M + N` makes it."""

    left: Weight
    right: Weight

    ranks = {"left": 2, "right": 2}

    def __check_init__(self) -> None:
        if shape_of(self.left) != shape_of(self.right):
            raise ValueError(f"M + N: the shapes {shape_of(self.left)} and {shape_of(self.right)} differ")

    @property
    def shape(self) -> tuple[int, int]:
        return shape_of(self.left)

    def apply(self, x: Array) -> Array:
        return apply(self.left, x) + apply(self.right, x)

    def apply_transposed(self, x: Array) -> Array:
        return apply_transposed(self.left, x) + apply_transposed(self.right, x)

    def to_dense(self) -> Array:
        return to_dense(self.left) + to_dense(self.right)


class Scaled(AbstractMatrix):
    """A multiple of a matrix; `2 * M` makes it. An array as the factor is a parameter, a Python number is none."""

    matrix: Weight
    factor: Array | None
    number: Any = eqx.field(static=True)  # no leaf, so that a trace makes no parameter of it

    ranks = {"matrix": 2, "factor": 0}

    def __init__(self, matrix: Weight, factor: ArrayLike):
        self.matrix = matrix
        self.factor = jnp.asarray(factor) if is_array(factor) else None
        self.number = 1 if is_array(factor) else (factor.item() if isinstance(factor, np.generic) else factor)

    @property
    def shape(self) -> tuple[int, int]:
        return shape_of(self.matrix)

    @property
    def dtype(self) -> np.dtype:
        return jnp.result_type(self.matrix.dtype, self.number if self.factor is None else self.factor)

    def apply(self, x: Array) -> Array:
        return self._scaled(apply(self.matrix, x))

    def apply_transposed(self, x: Array) -> Array:
        return self._scaled(apply_transposed(self.matrix, x))

    def to_dense(self) -> Array:
        return self._scaled(to_dense(self.matrix).astype(self.dtype))

    def _scaled(self, y: Array) -> Array:
        return y * jnp.asarray(self.number if self.factor is None else self.factor, y.dtype)


AbstractMatrix.__module__ = "treeparams.matrices"
