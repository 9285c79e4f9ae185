"""Computes a batch in pieces, one after another: sums over pieces, results of each, and the state that they pass on."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._tree.dtypes import widened
from .._tree.types import PyTree


class Result(NamedTuple):
    """The value that a loss returned, taken apart."""

    value: Any  # or the sum, if there is a weight
    weight: Any  # by which the sum of all values is divided; none of a loss that is no sum
    aux: Any
    model_state: Any


Objective = Callable[[list[Any], PyTree, list[Any]], tuple[jax.Array, Result]]
"""Maps parameters, the state of a model and the arrays of a piece to the value to differentiate and a `Result`."""


class Sums(NamedTuple):
    """Sums over the pieces of a batch, at least in single precision."""

    value: jax.Array
    weight: jax.Array | None
    gradients: list[jax.Array]


def cut(array: jax.Array, pieces: int) -> jax.Array:
    """Cuts the examples into pieces along a new first axis; of n pieces, piece k has every example k modulo n.

    So the pieces are the same for any number of devices, each of which has consecutive examples.
    """
    return jnp.swapaxes(array.reshape(-1, pieces, *array.shape[1:]), 0, 1)


def uncut(array: jax.Array) -> jax.Array:
    """Inverts `cut`."""
    array = jnp.swapaxes(array, 0, 1)
    return array.reshape(-1, *array.shape[2:])


def examples_of(arrays: Sequence[Any]) -> int:
    """Returns the number of examples in the arrays of a batch; an array without axes applies to all of them."""
    return next((array.shape[0] for array in arrays if array.ndim), 0)


def in_pieces(arrays: Sequence[jax.Array], pieces: int) -> list[jax.Array | None]:
    """Cuts the arrays of a batch into pieces; `None` for arrays without axes, which `with_scalars` puts back."""
    return [cut(array, pieces) if array.ndim else None for array in arrays]


def with_scalars(piece: Sequence[jax.Array | None], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the arrays of a piece, with the arrays of the batch that have no axes."""
    return [array if each is None else each for array, each in zip(arrays, piece, strict=True)]


def as_pieces(results: PyTree) -> PyTree:
    """Adds a first axis over pieces to the results of the only piece."""
    return jax.tree.map(lambda each: jnp.asarray(each)[None], results)


def over_pieces(
    objective: Objective,
    leaves: list[Any],
    model_state: PyTree,
    arrays: Sequence[jax.Array],
    pieces: int,
    lay: Callable[[list[Any]], list[Any]] = list,
) -> tuple[Sums, PyTree, PyTree]:
    """Returns the sums over all pieces, each piece's `aux` with a first axis over the pieces, and the last state.

    Args:
        objective: the function to differentiate, in the arrays of parameters.
        leaves: the arrays of parameters.
        model_state: the first state.
        arrays: the arrays of the batch; those without axes apply to all pieces.
        pieces: the number of pieces.
        lay: lays gradients over the devices.
    """

    def of_piece(model_state: PyTree, arrays: list[Any]) -> tuple[PyTree, Sums, PyTree]:
        (value, result), gradients = jax.value_and_grad(objective, has_aux=True)(leaves, model_state, arrays)
        weight = None if result.weight is None else wide(result.weight)
        return result.model_state, Sums(wide(value), weight, lay(list(map(wide, gradients)))), result.aux

    if pieces == 1:
        model_state, sums, aux = of_piece(model_state, list(arrays))
        return sums, as_pieces(aux), model_state

    def turn(carry: tuple[PyTree, Sums], piece: list[Any]) -> tuple[tuple[PyTree, Sums], PyTree]:
        model_state, sums, aux = of_piece(carry[0], with_scalars(piece, arrays))
        return (model_state, jax.tree.map(jnp.add, carry[1], sums)), aux

    along = in_pieces(arrays, pieces)
    first = with_scalars([None if each is None else each[0] for each in along], arrays)
    _, shapes, _ = jax.eval_shape(of_piece, model_state, first)
    zeros = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes)
    zeros = zeros._replace(gradients=lay(zeros.gradients))
    (model_state, sums), aux = jax.lax.scan(turn, (model_state, zeros), along)
    return sums, aux, model_state


def wide(array: jax.Array) -> jax.Array:
    """Casts an array to a dtype to sum in, at least single precision."""
    is_float = jnp.issubdtype(array.dtype, jnp.inexact)
    return array.astype(widened(array.dtype if is_float else jnp.float32))
