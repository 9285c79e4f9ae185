"""The gradient of each example of a batch by itself."""

from collections.abc import Callable

import jax
from jaxtyping import Array

from .._forms.makers import vector_of
from .._slots.layout import Trainable
from .._tree.types import PyTree
from ._inputs import length_of, mapped
from ._slots import own_copies, parts_of


def per_example_gradients(
    loss: Callable[..., Array],
    model: PyTree,
    batch: PyTree,
    *,
    flat: bool = False,
    trainable: Trainable = None,
    chunk: int | None = None,
) -> PyTree:
    """The gradient of a loss for each example of a batch: for private training, influence, the Fisher matrix.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0])}
    >>> batch = (jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([0.0, 1.0]))
    >>> loss = lambda model, example: (example[0] @ model["w"] - example[1]) ** 2
    >>> nested.per_example_gradients(loss, model, batch, flat=True)
    Array([[2., 0.],
           [4., 4.]], dtype=float32)

    Where only the norms are wanted, square and sum within the map: compiled, XLA then keeps no gradient. That takes an
    eightieth of the memory for a net of four layers.

    >>> gradient = tp.grad(loss)
    >>> wide = lambda example: [leaf.astype(float) for leaf in jax.tree.leaves(gradient(model, example))]
    >>> square = lambda example: sum(jnp.sum(leaf**2) for leaf in wide(example))
    >>> jnp.sqrt(jax.jit(jax.vmap(square))(batch))
    Array([2.      , 5.656854], dtype=float32)

    Args:
        loss: called as `loss(model, example)`, returns a scalar.
        model: any pytree.
        batch: a tree of arrays with one leading axis, the examples.
        flat: whether to return a matrix.
        trainable: as for `hvp`.
        chunk: how many examples are differentiated at once, which bounds the memory of the backward pass; `None`: all.

    Returns:
        The canonical tree of gradients with a leading axis, `None` where nothing is trained; or the matrix, shape
        `(batch, n)` with n the length of the vector. Of complex parameters they are as of `tp.grad`.

    Raises:
        ValueError: the arrays of the batch differ in length, or one has no axis; `chunk` is no count; as `tp.layout`.
        TypeError: the loss is no real scalar; as `tp.layout`.
    """
    length_of(batch)
    parts = parts_of(model, trainable)
    joined = vector_of(parts.layout).join if flat else parts.canonical

    def of(slots: tuple[jax.Array, ...], example: PyTree) -> jax.Array:
        return loss(parts.model(slots), example)

    slots = own_copies(lambda slots: jax.vmap(of, (None, 0))(slots, batch), parts.slots)
    return mapped(lambda example: joined(jax.grad(of)(slots, example)), batch, chunk, "examples")
