"""The base of all matrices, a node of the model in the place of an array; lineax operators as matrices and back.

There is no `__jax_array__`: with it JAX would make a matrix dense before `x @ M` ever asks the matrix.
"""

import abc
import dataclasses
import math
import numbers
import sys
from collections.abc import Callable
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Inexact

from .._tree.text import imported
from ._constrained import NotAnArray, as_parameter, is_jax_or_numpy


class AbstractMatrix(NotAnArray, eqx.Module):
    """A matrix made of parameters; subclasses define the parameters, and how a vector is multiplied.

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

    `M @ x` and `x @ M` accept arrays of JAX and of NumPy, with the shapes and the dtype that `jnp.matmul` gives. `M @
    N`, `M + N`, `2 * M` and `M.T` of matrices are matrices that hold the same arrays, so that these are tied.
    Operations that need all entries - `M[0]`, `numpy.asarray(M)`, `M * x` - raise a `TypeError` that tells you to call
    `to_dense()`.
    """

    instead = "M.to_dense()"

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Rows and columns; an ensemble made by `equinox.filter_vmap` has further axes before them."""

    @abc.abstractmethod
    def apply(self, x: Inexact[Array, "*batch columns"]) -> Inexact[Array, "*batch rows"]:
        """Returns the product with each vector along the last axis; x comes in the dtype of the result."""

    @abc.abstractmethod
    def apply_transposed(self, x: Inexact[Array, "*batch rows"]) -> Inexact[Array, "*batch columns"]:
        """Returns the same for the transpose."""

    def to_dense(self) -> Inexact[Array, "rows columns"]:
        """Returns all entries, as an array."""
        return self @ jnp.eye(self.shape[-1], dtype=self.dtype)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the product with an array of ones: `jnp.result_type` of the parameters."""
        leaves = jax.tree.leaves(self, is_leaf=lambda node: node is not self and isinstance(node, AbstractMatrix))
        dtypes = [leaf.dtype for leaf in leaves if hasattr(leaf, "dtype")]
        inexact = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
        return jnp.result_type(*inexact) if inexact else jnp.result_type(float)

    @property
    def ndim(self) -> int:
        """2, and more for an ensemble."""
        return len(self.shape)

    @property
    def T(self) -> "AbstractMatrix":  # noqa: N802 - as of an array
        """The transpose, made of the same arrays."""
        return Transposed(self)

    # -- Products

    def __matmul__(self, other: object) -> Any:
        if isinstance(other, AbstractMatrix):
            return Product(self, other)
        if not is_jax_or_numpy(other):
            return NotImplemented
        axis = -1 if np.ndim(other) == 1 else -2
        x = self._operand(other, axis)
        return jnp.moveaxis(self.apply(x).astype(x.dtype), -1, axis)

    def __rmatmul__(self, other: object) -> Any:
        if not is_jax_or_numpy(other):
            return NotImplemented
        x = self._operand(other, -1, transposed=True)
        return self.apply_transposed(x).astype(x.dtype)

    def _operand(self, x: Array | np.ndarray, axis: int, transposed: bool = False) -> Array:
        """Returns x in the dtype of the product, with the axis that is multiplied as the last."""
        x, size = jnp.asarray(x), self.shape[-2 if transposed else -1]
        # Without these two an array that JAX can broadcast would give numbers that mean nothing.
        if self.ndim != 2:
            raise ValueError(
                f"this {type(self).__name__} of shape {self.shape} is an ensemble of matrices: multiply each by "
                "jax.vmap or equinox.filter_vmap"
            )
        if x.ndim == 0 or x.shape[axis] != size:
            operation, batch = ("x @ M", f"(..., {size})") if transposed else ("M @ x", f"(..., {size}, batch)")
            raise ValueError(
                f"{operation}: M is a {type(self).__name__} of shape {self.shape}, so x must have shape ({size},) or "
                f"{batch}, got {x.shape}"
            )
        return jnp.moveaxis(x, axis, -1).astype(jnp.result_type(self.dtype, x))

    # -- Sums and multiples

    def __add__(self, other: object) -> "AbstractMatrix":
        return Sum(self, other) if isinstance(other, AbstractMatrix) else super().__add__(other)

    def __sub__(self, other: object) -> "AbstractMatrix":
        return Sum(self, -other) if isinstance(other, AbstractMatrix) else super().__sub__(other)

    def __mul__(self, other: object) -> "AbstractMatrix":
        return Scaled(self, other) if _is_scalar(other) else super().__mul__(other)

    def __truediv__(self, other: object) -> "AbstractMatrix":
        return Scaled(self, 1 / other) if _is_scalar(other) else super().__truediv__(other)

    def __neg__(self) -> "AbstractMatrix":
        return Scaled(self, -1)

    __rmul__ = __mul__

    def __pdoc__(self, **kwargs: Any) -> Any:
        """Prints the shape that it represents, then its fields: `Class(shape=(3, 3), field=f32[2,3])`."""
        import wadler_lindig as wl  # Equinox prints by it and calls this, so it is there

        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self) if field.repr]
        # There is no shape where a tree of other things has the structure of a model, such as a mask.
        docs = wl.named_objs([("shape", getattr(self, "shape", None)), *fields], **kwargs)
        name = wl.TextDoc(f"{type(self).__name__}(")
        return wl.bracketed(name, docs, wl.comma, wl.TextDoc(")"), kwargs["indent"])


def _is_scalar(value: object) -> TypeGuard[ArrayLike]:
    return isinstance(value, numbers.Number | np.generic) or (is_jax_or_numpy(value) and value.ndim == 0)


# -- A weight is an array, of NumPy where a model was loaded so, or a matrix

Weight = Array | np.ndarray | AbstractMatrix


def apply(weight: Weight, x: Array) -> Array:
    """Same as `AbstractMatrix.apply`, for arrays too."""
    return weight.apply(x) if isinstance(weight, AbstractMatrix) else x @ weight.swapaxes(-1, -2).astype(x.dtype)


def apply_transposed(weight: Weight, x: Array) -> Array:
    """Same as `AbstractMatrix.apply_transposed`, for arrays too."""
    return weight.apply_transposed(x) if isinstance(weight, AbstractMatrix) else x @ weight.astype(x.dtype)


def to_dense(weight: Weight) -> Array:
    """Same as `AbstractMatrix.to_dense`, for arrays too."""
    return weight.to_dense() if isinstance(weight, AbstractMatrix) else jnp.asarray(weight)


# -- Made of other matrices, which `merge` may have made arrays


class Transposed(AbstractMatrix):
    """The transpose of a matrix, made of its arrays; `M.T` makes it."""

    matrix: Weight

    @property
    def shape(self) -> tuple[int, ...]:
        *members, rows, columns = self.matrix.shape
        return *members, columns, rows

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

    def __check_init__(self) -> None:
        if self.left.shape[-1] != self.right.shape[-2]:
            raise ValueError(f"M @ N: the shapes {self.left.shape} and {self.right.shape} do not fit")

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.left.shape[:-1], self.right.shape[-1]

    def apply(self, x: Array) -> Array:
        return apply(self.left, apply(self.right, x))

    def apply_transposed(self, x: Array) -> Array:
        return apply_transposed(self.right, apply_transposed(self.left, x))


class Sum(AbstractMatrix):
    """The sum of two matrices; `M + N` makes it."""

    left: Weight
    right: Weight

    def __check_init__(self) -> None:
        if self.left.shape != self.right.shape:
            raise ValueError(f"M + N: the shapes {self.left.shape} and {self.right.shape} differ")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.left.shape

    def apply(self, x: Array) -> Array:
        return apply(self.left, x) + apply(self.right, x)

    def apply_transposed(self, x: Array) -> Array:
        return apply_transposed(self.left, x) + apply_transposed(self.right, x)


class Scaled(AbstractMatrix):
    """A multiple of a matrix; `2 * M` makes it. A factor that is an array is a parameter; a Python number is not."""

    matrix: Weight
    factor: Array | None
    number: Any = eqx.field(static=True)  # no leaf, so that a trace makes no parameter of it

    def __init__(self, matrix: Weight, factor: ArrayLike):
        self.matrix = matrix
        self.factor = jnp.asarray(factor) if is_jax_or_numpy(factor) else None
        self.number = 1 if is_jax_or_numpy(factor) else (factor.item() if isinstance(factor, np.generic) else factor)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def dtype(self) -> np.dtype:
        return jnp.result_type(self.matrix.dtype, self.number if self.factor is None else self.factor)

    def apply(self, x: Array) -> Array:
        return self._scaled(apply(self.matrix, x))

    def apply_transposed(self, x: Array) -> Array:
        return self._scaled(apply_transposed(self.matrix, x))

    def _scaled(self, y: Array) -> Array:
        return y * jnp.asarray(self.number if self.factor is None else self.factor, y.dtype).reshape(())


AbstractMatrix.__module__ = "treeparams.matrices"


# -- Operators of lineax -----------------------------------------------------------------------------------------------


class Lineax(AbstractMatrix):
    """A lineax operator as a matrix; `from_lineax` makes it. Its arrays are the parameters."""

    operator: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.operator.out_size(), self.operator.in_size()

    def apply(self, x: Array) -> Array:
        return _each_vector(self.operator.mv, x)

    def apply_transposed(self, x: Array) -> Array:
        return _each_vector(self.operator.transpose().mv, x)

    def to_dense(self) -> Array:
        return self.operator.as_matrix()


def _each_vector(f: Callable[[Array], Array], x: Array) -> Array:
    y = jax.vmap(f)(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def from_lineax(operator: Any) -> AbstractMatrix:
    """Turns a lineax operator into a matrix, to use in place of a weight.

    >>> import jax.numpy as jnp, lineax
    >>> from treeparams import matrices
    >>> weight = matrices.from_lineax(lineax.DiagonalLinearOperator(jnp.array([1.0, 2.0])))
    >>> weight @ jnp.ones(2)
    Array([1., 2.], dtype=float32)

    The arrays that the operator holds, in the field `operator`, are parameters like any others. The constructors of
    this module call this function themselves: you may pass an operator wherever they accept a matrix.

    Args:
        operator: from vectors to vectors, `(columns,)` to `(rows,)`.
    """
    if not _is_operator(operator):
        raise TypeError(f"expected a lineax operator, got {type(operator).__name__}")
    for structure, verb in ((operator.in_structure(), "takes"), (operator.out_structure(), "gives")):
        if not isinstance(structure, jax.ShapeDtypeStruct) or len(structure.shape) != 1:
            raise TypeError(f"expected an operator between vectors, but {type(operator).__name__} {verb} {structure}")
    return Lineax(operator)


def to_lineax(matrix: AbstractMatrix, tags: object = ()) -> Any:
    """Turns a matrix into a lineax operator, for the solvers of lineax.

    >>> import jax.numpy as jnp, lineax
    >>> from treeparams import matrices
    >>> weight = matrices.LowRank(jnp.eye(2), jnp.ones((2, 1)), jnp.ones((1, 2)))
    >>> operator, solver = matrices.to_lineax(weight), lineax.GMRES(1e-5, 1e-5)
    >>> lineax.linear_solve(operator, jnp.ones(2), solver).value.round(4)
    Array([0.3333, 0.3333], dtype=float32)

    Args:
        matrix: any matrix of this module.
        tags: the properties that lineax may rely on, such as `lineax.positive_semidefinite_tag`; they are not checked.
    """
    lineax = imported("lineax", "lineax", "to_lineax")
    return lineax.FunctionLinearOperator(
        lambda x: matrix @ x, jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype), tags
    )


def _is_operator(value: object) -> bool:
    """Returns whether it is a lineax operator; if lineax has not been imported, nothing is."""
    lineax = sys.modules.get("lineax")
    return lineax is not None and isinstance(value, lineax.AbstractLinearOperator)


def as_weight(value: object) -> Any:
    """Checks the matrix, array or operator given to a constructor, and returns it; for the `converter` of a field."""
    if _is_operator(value):
        return from_lineax(value)
    weight = value if isinstance(value, AbstractMatrix) else as_parameter(value)
    if weight.ndim != 2:
        raise ValueError(f"expected a matrix, got an array of shape {weight.shape}")
    return weight
