"""The Hessian as a matrix over the vector, and its diagonal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._forms import vector_of
from .._layout import Layout, Trainable
from ._inputs import mapped
from ._slots import of_slots, parts_of


def hessian(
    loss: Callable[..., Array], model: PyTree, *args: Any, trainable: Trainable = None, chunk: int | None = None
) -> Float[Array, "n n"]:
    """The Hessian of a loss over the vector of the trained parameters.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> model = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
    >>> matrix = nested.hessian(lambda model: jnp.sum(model["a"] ** 2) * model["b"], model)
    >>> tp.layout(model).block(matrix, "a", "b")
    Array([[2.],
           [4.]], dtype=float32)

    Args:
        loss: called as `loss(model, *args)`, returns a scalar.
        model: any pytree.
        *args: passed on.
        trainable: as for `hvp`.
        chunk: how many columns are computed at once, which bounds the memory; `None`: all.

    Returns:
        The matrix, shape `(n, n)` with n the length of the vector; its blocks by name are `layout.block`.

    Raises:
        ValueError: `chunk` is no count; as `tp.layout`.
        TypeError: as `hvp`.
    """
    times, layout = _on_vector(loss, model, args, trainable)
    return _over_columns(times, layout, chunk)


def hessian_diagonal(
    loss: Callable[..., Array], model: PyTree, *args: Any, trainable: Trainable = None, chunk: int | None = None
) -> Float[Array, " n"]:
    """The diagonal of the Hessian over the vector, by one product for each element.

    >>> import jax, jax.numpy as jnp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0])}
    >>> loss = lambda model: jnp.sum(model["w"] ** 3) + model["w"][0] * model["w"][1]
    >>> nested.hessian_diagonal(loss, model)
    Array([ 6., 12.], dtype=float32)

    With fewer products it is estimated: the mean of `signs * operator(signs)` over random signs (Bekas, Kokiopoulou and
    Saad, 2007).

    >>> operator = nested.hessian_operator(loss, model)
    >>> signs = jax.random.rademacher(jax.random.key(0), (100, 2), float)
    >>> print(jnp.round(jnp.mean(signs * jax.vmap(operator)(signs), axis=0)))
    [ 6. 12.]

    Args:
        loss: called as `loss(model, *args)`, returns a scalar.
        model: any pytree.
        *args: passed on.
        trainable: as for `hvp`.
        chunk: how many products are computed at once, which bounds the memory; `None`: all.

    Returns:
        The diagonal, shape `(n,)`.

    Raises:
        ValueError: `chunk` is no count; as `tp.layout`.
        TypeError: as `hvp`.
    """
    times, layout = _on_vector(loss, model, args, trainable)
    return _over_columns(times, layout, chunk, diagonal=True)


def _on_vector(loss: Callable[..., Any], model: PyTree, args: Any, trainable: Any) -> tuple[Any, Layout]:
    # Differentiated in the vector and not leaf by leaf: one column is then one array, and compiles in less time.
    parts = parts_of(model, trainable)
    kind, f = vector_of(parts.layout), of_slots(loss, parts, *args)
    vector = kind.join(parts.slots)
    _, times = jax.linearize(jax.grad(lambda vector: f(kind.cut(vector))), vector)
    return times, parts.layout


def _over_columns(times: Any, layout: Layout, chunk: int | None, diagonal: bool = False) -> jax.Array:
    size, dtype = layout.size, layout.dtype
    if size == 0:
        return jnp.zeros((0,) if diagonal else (0, 0), dtype)

    def column(i: jax.Array) -> jax.Array:
        product = times(jax.nn.one_hot(i, size, dtype=dtype))
        return product[i] if diagonal else product

    return mapped(column, jnp.arange(size), chunk, "columns")
