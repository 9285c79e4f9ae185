"""lineax operators as matrices, matrices as lineax operators, and the check of a constructor's matrix."""

import math
import sys
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from .._tree.text import imported
from ._matrix import AbstractMatrix
from ._nodes import as_parameter


class Lineax(AbstractMatrix):
    """A lineax operator as a matrix; `from_lineax` makes it. Its arrays are the parameters."""

    operator: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.operator.out_size(), self.operator.in_size()

    def apply(self, x: Array) -> Array:
        return _each(self.operator.mv, x)

    def apply_transposed(self, x: Array) -> Array:
        return _each(self.operator.transpose().mv, x)

    def to_dense(self) -> Array:
        return self.operator.as_matrix()


def _each(f: Callable[[Array], Array], x: Array) -> Array:
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
