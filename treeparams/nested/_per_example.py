"""The gradient of each example of a batch by itself, and its norm."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._forms import vector_of
from .._layout import Trainable
from .._norm import global_norm
from ._mapped import mapped
from ._slots import of_slots, parts_of


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

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model, batch = {"w": jnp.array([1.0, 2.0])}, (jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([0.0, 1.0]))
    >>> loss = lambda model, example: (example[0] @ model["w"] - example[1]) ** 2
    >>> nested.per_example_gradients(loss, model, batch, flat=True)
    Array([[2., 0.],
           [4., 4.]], dtype=float32)

    Args:
        loss: called as `loss(model, example)`, returns a scalar.
        model: any pytree.
        batch: a tree of arrays with one leading axis, the examples.
        flat: whether to return a matrix.
        trainable: as for `hvp`.
        chunk: how many examples are differentiated at once, which bounds the memory of the backward pass; `None`: all.

    Returns:
        The canonical tree of gradients with a leading axis, `None` where nothing is trained; or the matrix, shape
        `(batch, n)` with n the length of the vector.

    Raises:
        ValueError: the arrays of the batch differ in length, or one has no axis; `chunk` is no count; as `tp.layout`.
        TypeError: the loss is no real scalar; as `tp.layout`.
    """
    one, parts = _gradient(loss, model, batch, trainable)
    form = vector_of(parts.layout).join if flat else parts.canonical
    return mapped(lambda example: form(one(example)), batch, chunk, "examples")


def per_example_norms(
    loss: Callable[..., Array], model: PyTree, batch: PyTree, *, trainable: Trainable = None, chunk: int | None = 1
) -> Float[Array, " batch"]:
    """The norm of each example's gradient, without the matrix of them: at most `chunk` gradients exist at a time.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> batch = jnp.array([[3.0, 4.0], [0.0, 0.0]])
    >>> nested.per_example_norms(lambda model, x: x @ model["w"], {"w": jnp.ones(2)}, batch)
    Array([5., 0.], dtype=float32)

    Args:
        loss: called as `loss(model, example)`, returns a scalar.
        model: any pytree.
        batch: a tree of arrays with one leading axis, the examples.
        trainable: as for `hvp`.
        chunk: how many examples are differentiated at once; `None`: all.

    Returns:
        The norms, shape `(batch,)`, as `tp.global_norm` takes them: ties once, in at least float32.

    Raises:
        ValueError: as `per_example_gradients`.
        TypeError: as `per_example_gradients`.
    """
    one, _ = _gradient(loss, model, batch, trainable)
    return mapped(lambda example: global_norm(one(example)), batch, chunk, "examples")


def _gradient(loss: Callable[..., Any], model: PyTree, batch: PyTree, trainable: Any) -> Any:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(f"expected a batch of arrays with one leading axis in common, got shapes {shapes}")
    parts = parts_of(model, trainable, real=False)
    return lambda example: jax.grad(of_slots(loss, parts, example))(parts.slots), parts
