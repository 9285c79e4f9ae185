"""A batch taken in pieces, one after another: what they sum to, what each returns, and the state that they pass on."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._tree.dtypes import widened
from .._tree.types import PyTree


class Result(NamedTuple):
    """What a loss returns, taken apart."""

    value: Any  # or the sum, if there is a weight
    weight: Any  # by which the sum of all values is divided; none of a loss that is no sum
    aux: Any
    model_state: Any


Objective = Callable[[list[Any], PyTree, list[Any]], tuple[jax.Array, Result]]
"""From arrays of parameters, the state of a model and the arrays of a piece, to what is differentiated and a result."""


class Sums(NamedTuple):
    """What the pieces of a batch sum to, at least in single precision."""

    value: jax.Array
    weight: jax.Array | None
    gradients: list[jax.Array]


def cut(array: jax.Array, pieces: int) -> jax.Array:
    """The examples in pieces, along a new first axis: to piece k belongs every example whose number is k modulo them.

    So the pieces are the same over any number of devices, each of which has examples that follow one another.
    """
    return jnp.swapaxes(array.reshape(-1, pieces, *array.shape[1:]), 0, 1)


def uncut(array: jax.Array) -> jax.Array:
    """The inverse of `cut`."""
    array = jnp.swapaxes(array, 0, 1)
    return array.reshape(-1, *array.shape[2:])


def examples_of(arrays: Sequence[Any]) -> int:
    """How many examples there are in the arrays of a batch; one without axes is for all of them."""
    return next((array.shape[0] for array in arrays if array.ndim), 0)


def in_pieces(arrays: Sequence[jax.Array], pieces: int) -> list[jax.Array | None]:
    """The arrays of a batch in pieces; `None` for one that is for all pieces, which `with_scalars` puts back."""
    return [cut(array, pieces) if array.ndim else None for array in arrays]


def with_scalars(piece: Sequence[jax.Array | None], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays of a piece, with those of the batch that are for all pieces."""
    return [array if each is None else each for array, each in zip(arrays, piece, strict=True)]


def as_pieces(results: PyTree) -> PyTree:
    """The results of the only piece, with a first axis over pieces."""
    return jax.tree.map(lambda each: jnp.asarray(each)[None], results)


def over_pieces(
    objective: Objective,
    leaves: list[Any],
    model_state: PyTree,
    arrays: Sequence[jax.Array],
    pieces: int,
    lay: Callable[[list[Any]], list[Any]] = list,
) -> tuple[Sums, PyTree, PyTree]:
    """The sums over all pieces, what each returned beside its loss with a first axis over them, and the last state.

    Args:
        objective: what is differentiated, in the arrays of parameters.
        leaves: these arrays.
        model_state: the first state.
        arrays: those of the batch; one without axes is for all pieces.
        pieces: how many.
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
    """An array in a dtype to sum in, at least single precision."""
    is_float = jnp.issubdtype(array.dtype, jnp.inexact)
    return array.astype(widened(array.dtype if is_float else jnp.float32))
