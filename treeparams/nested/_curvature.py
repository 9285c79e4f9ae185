"""Products with the Hessian; the Hessian as a matrix, and its diagonal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._slots.layout import Trainable
from .._tree.types import PyTree
from ._inputs import mapped
from ._slots import divided, given_back, in_reals, joined, of_reals, parts_of, taken


def hvp(loss: Callable[..., Array], model: PyTree, tangent: PyTree, *args: Any, trainable: Trainable = None) -> PyTree:
    """The product of a loss's Hessian with a tangent, forward over reverse.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0]), "frozen": jnp.ones(1)}
    >>> loss = lambda model, x: x * jnp.sum(model["w"] ** 3) * model["frozen"][0]
    >>> nested.hvp(loss, model, jnp.array([1.0, 1.0]), 2.0, trainable="w")
    Array([12., 24.], dtype=float32)
    >>> nested.hvp(loss, model, {"w": jnp.array([1.0, 0.0])}, 2.0, trainable="w")["w"]
    Array([12.,  0.], dtype=float32)

    For many products at one model, `hessian_operator` shares the work that they have in common.

    Args:
        loss: called as `loss(model, *args)`, returns a scalar.
        model: any pytree.
        tangent: a vector, as of `tp.ravel`, or a tree with entries at paths of the model, where missing entries count
            as zero. It is a value of the parameters: at a tie the slot's own entry counts. Of a complex parameter it is
            the change of the real part plus i times that of the imaginary one; the real vector of `real_vector` is fine
            too.
        *args: passed on.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        The product, like the tangent a vector of the layout's dtype or a canonical tree. Of a complex parameter it is
        the derivative in its real part plus i times that in the imaginary one, so that the Hessian of
        `|z|^2 / 2` is the identity. (Gradients of JAX and of `tp.grad` are the conjugate of that.)

    Raises:
        ValueError: the tangent is a vector of another length, has an entry of another shape, or where the model has no
            leaf; as `tp.layout`.
        TypeError: the loss is no real scalar; as `tp.layout`.
    """
    parts = parts_of(model, trainable)
    gradient = jax.grad(of_reals(loss, parts, *args))
    _, product = jax.jvp(gradient, (in_reals(parts.slots),), (taken(parts.layout, tangent),))
    return given_back(parts.layout, product, tangent)


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
        The matrix, shape `(n, n)` with n the length of the vector; its blocks by name are `layout.block`. With complex
        parameters it is over the vector of `real_vector`.

    Raises:
        ValueError: `chunk` is no count; as `tp.layout`.
        TypeError: as `hvp`.
    """
    return _over_columns(loss, model, args, trainable, chunk)


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
        The diagonal, shape `(n,)`, over the vector as of `hessian`.

    Raises:
        ValueError: `chunk` is no count; as `tp.layout`.
        TypeError: as `hvp`.
    """
    return _over_columns(loss, model, args, trainable, chunk, diagonal=True)


def _over_columns(
    loss: Callable[..., Any],
    model: PyTree,
    args: tuple[Any, ...],
    trainable: Trainable,
    chunk: int | None,
    diagonal: bool = False,
) -> jax.Array:
    # Differentiated in the vector and not leaf by leaf: one column is then one array, and compiles in less time.
    parts = parts_of(model, trainable)
    layout, f = parts.layout, of_reals(loss, parts, *args)
    vector = joined(layout, in_reals(parts.slots))
    _, times = jax.linearize(jax.grad(lambda vector: f(divided(layout, vector))), vector)
    size, dtype = vector.size, vector.dtype
    if size == 0:
        return jnp.zeros((0,) if diagonal else (0, 0), dtype)

    def column(i: jax.Array) -> jax.Array:
        product = times(jax.nn.one_hot(i, size, dtype=dtype))
        return product[i] if diagonal else product

    return mapped(column, jnp.arange(size), chunk, "columns")
