"""Products with the Hessian; the Hessian as a matrix."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from .._slots.layout import Trainable
from .._tree.types import PyTree
from ._operator import columns, hessian_operator
from ._slots import given_back, in_reals, loss_of_reals, parts_of, taken


def hvp(f: Callable[..., Array], *, trainable: Trainable = None) -> Callable[..., PyTree]:
    """Computes the product of a loss's Hessian with a tangent, forward over reverse.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0]), "frozen": jnp.ones(1)}
    >>> loss = lambda model, x: x * jnp.sum(model["w"] ** 3) * model["frozen"][0]
    >>> product = nested.hvp(loss, trainable="w")
    >>> product(model, jnp.array([1.0, 1.0]), 2.0)
    Array([12., 24.], dtype=float32)
    >>> product(model, {"w": jnp.array([1.0, 0.0])}, 2.0)["w"]
    Array([12.,  0.], dtype=float32)

    For many products at one model, `hessian_operator` shares their common work.

    Args:
        f: called as `f(model, *args)`, returns a scalar.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        A function of `(model, tangent, *args)`. The tangent is a vector, as of `tp.ravel`, or a tree with entries at
        paths of the model, where missing entries count as zero. It is a value of the parameters: at a tie the slot's
        entry counts. For a complex parameter it is the change of the real part plus i times that of the imaginary one;
        you may also pass the real vector of `real_vector`.

        The function returns the product in the same form as the tangent, a vector or a canonical tree. It is computed
        in the parameters' own dtypes, to which the tangent is rounded, as `jax.jvp` requires: for bfloat16 parameters
        it is no more precise than bfloat16. The result has the wider of the parameters' and the tangent's dtype, so
        that a solver in float32 gets float32. For a complex parameter the product is the derivative in its real part
        plus i times that in the imaginary one, so that the Hessian of `|z|^2 / 2` is the identity. (Gradients of JAX
        and of `tp.grad` are the conjugate of that.)

    Raises:
        ValueError: when called: the tangent is a vector of another length, has an entry of another shape, or at a path
            where the model has no leaf; as `tp.layout`.
        TypeError: when called: f returns no real scalar; as `tp.layout`.
    """

    def product(model: PyTree, tangent: PyTree, *args: object) -> PyTree:
        parts = parts_of(model, trainable)
        gradient = jax.grad(loss_of_reals(f, parts, *args))
        _, change = jax.jvp(gradient, (in_reals(parts.slots),), (taken(parts.layout, tangent),))
        return given_back(parts.layout, change, tangent)

    return product


def hessian(
    f: Callable[..., Array], *, chunk: int | None = None, trainable: Trainable = None
) -> Callable[..., Float[Array, "n n"]]:
    """Computes the Hessian of a loss over the vector of the trained parameters.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> model = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
    >>> matrix = nested.hessian(lambda model: jnp.sum(model["a"] ** 2) * model["b"])(model)
    >>> tp.layout(model).block(matrix, "a", "b")
    Array([[2.],
           [4.]], dtype=float32)

    You get its diagonal alone, without the matrix, from `nested.hessian_operator(f)(model).diagonal()`.

    Args:
        f: called as `f(model, *args)`, returns a scalar.
        chunk: how many columns are computed at once, which bounds the memory; `None`: all.
        trainable: as for `hvp`.

    Returns:
        A function of `(model, *args)` that returns the matrix, shape `(n, n)` with n the length of the vector; its
        blocks by name are `layout.block`. With complex parameters it is over the vector of `real_vector`.

    Raises:
        ValueError: when called: `chunk` is no count; as `tp.layout`.
        TypeError: when called: as `hvp`.
    """
    operator = hessian_operator(f, trainable=trainable)

    def matrix(model: PyTree, *args: object) -> jax.Array:
        return columns(operator(model, *args), chunk, "columns", lambda column, _: column)

    return matrix
