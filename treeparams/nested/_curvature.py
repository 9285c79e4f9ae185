"""Products with the Hessian and with the Gauss-Newton matrix; the Hessian as a matrix, and its diagonal."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from .._joined import vector_of
from .._layout import Layout, Trainable
from ._inputs import mapped
from ._slots import given_back, of_slots, parts_of, taken


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

    For many products at one model, `hessian_operator` shares what they have in common.

    Args:
        loss: called as `loss(model, *args)`, returns a scalar.
        model: any pytree.
        tangent: a vector, as of `tp.ravel`, or a tree with entries at paths of the model, where what is missing counts
            as zero. It is a value of the parameters: at a tie the slot's own entry counts.
        *args: passed on.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        The product, in the form of the tangent: a vector of the layout's dtype, or a canonical tree.

    Raises:
        ValueError: the tangent is a vector of another length, has an entry of another shape, or where the model has no
            leaf; as `tp.layout`.
        TypeError: a trained parameter is complex; the loss is no real scalar; as `tp.layout`.
    """
    parts = parts_of(model, trainable)
    gradient = jax.grad(of_slots(loss, parts, *args))
    _, product = jax.jvp(gradient, (parts.slots,), (taken(parts.layout, tangent),))
    return given_back(parts.layout, product, tangent)


class Operator(eqx.Module):
    """A symmetric matrix over the trained parameters, known by its products: `operator(tangent)`.

    A pytree: it may be passed to and returned from `jax.jit`, closed over, mapped and scanned. Made by
    `hessian_operator` and `ggn_operator`.

    Attributes:
        layout: of the model; the matrix is `(layout.size, layout.size)`.
        damping: what is added to the diagonal; `None`: nothing.
    """

    _linear: Any
    damping: ArrayLike | None
    layout: Layout = eqx.field(static=True)

    def __call__(self, tangent: PyTree) -> PyTree:
        """The product with a tangent, plus `damping` times the tangent: arguments, result and errors as of `hvp`.

        Args:
            tangent: as for `hvp`.
        """
        direction = taken(self.layout, tangent)
        product = self._linear(direction)
        if self.damping is not None:
            product = tuple(
                each + jnp.asarray(self.damping, each.dtype) * along
                for each, along in zip(product, direction, strict=True)
            )
        return given_back(self.layout, product, tangent)


Operator.__module__ = "treeparams.nested"


def hessian_operator(
    loss: Callable[..., Array], model: PyTree, *args: Any, damping: ArrayLike | None = None, trainable: Trainable = None
) -> Operator:
    """The Hessian of a loss as an operator, linearised once: each product costs the linear part alone.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> loss = lambda model: jnp.sum(model["a"] ** 2) * model["b"] + model["b"] ** 2
    >>> vector, restructure = tp.ravel({"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)})
    >>> @jax.jit
    ... def newton(vector):  # a damped step
    ...     model = restructure(vector)
    ...     operator = nested.hessian_operator(loss, model, damping=10.0)
    ...     gradient = restructure.ravel_gradient(tp.grad(loss)(model))
    ...     return vector - jax.scipy.sparse.linalg.cg(operator, gradient)[0]
    >>> bool(loss(restructure(newton(vector))) < loss(restructure(vector)))
    True

    Made within the compiled function, as here, it is traced with it once. One that is made outside is a program of its
    own, for which a compiled function that takes it as an argument is compiled anew.

    With lineax: `lineax.FunctionLinearOperator(operator, jax.eval_shape(lambda: vector))`.

    Args:
        loss: called as `loss(model, *args)`, returns a scalar.
        model: any pytree.
        *args: passed on.
        damping: a number or traced scalar added to the diagonal; `None`: nothing.
        trainable: as for `hvp`.

    Returns:
        An `Operator`, from vectors or trees to the same.

    Raises:
        ValueError: as `tp.layout`.
        TypeError: as `hvp`.
    """
    parts = parts_of(model, trainable)
    _, linear = jax.linearize(jax.grad(of_slots(loss, parts, *args)), parts.slots)
    return Operator(linear, damping, parts.layout)


def ggn_operator(
    model_fn: Callable[..., PyTree],
    loss: Callable[[Any], Array],
    model: PyTree,
    *args: Any,
    damping: ArrayLike | None = None,
    trainable: Trainable = None,
) -> Operator:
    """The generalised Gauss-Newton matrix `J^T H J` as an operator, linearised once.

    J is the Jacobian of the outputs in the parameters, H the exact Hessian of the loss in the outputs. Where H is
    positive semi-definite, as of squared errors and cross-entropies, so is the product, which the Hessian of a network
    is not (Schraudolph, 2002). Where the outputs are linear in the parameters, the two are equal.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model, x = {"w": jnp.array([1.0, 2.0])}, jnp.array([[1.0, 0.0], [1.0, 1.0]])
    >>> operator = nested.ggn_operator(lambda model, x: x @ model["w"], lambda y: jnp.sum(y**2), model, x)
    >>> operator(jnp.array([1.0, 0.0]))  # the first column of 2 x^T x
    Array([4., 2.], dtype=float32)

    Args:
        model_fn: called as `model_fn(model, *args)`, returns the outputs, an array or a tree of arrays.
        loss: called as `loss(outputs)`, returns a scalar.
        model: any pytree.
        *args: passed on.
        damping: as for `hessian_operator`.
        trainable: as for `hvp`.

    Returns:
        An `Operator`, from vectors or trees to the same.

    Raises:
        ValueError: as `tp.layout`.
        TypeError: as `hvp`.
    """
    parts = parts_of(model, trainable)
    outputs, forward = jax.linearize(of_slots(model_fn, parts, *args), parts.slots)
    _, curvature = jax.linearize(jax.grad(loss), outputs)
    return Operator(jtu.Partial(_between, forward, curvature), damping, parts.layout)


def _between(forward: Any, curvature: Any, direction: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """`J^T H J` times a direction, of linear functions that are pytrees."""
    (product,) = jax.linear_transpose(forward, direction)(curvature(forward(direction)))
    return product


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
        The diagonal, shape `(n,)`.

    Raises:
        ValueError: `chunk` is no count; as `tp.layout`.
        TypeError: as `hvp`.
    """
    return _over_columns(loss, model, args, trainable, chunk, diagonal=True)


def _over_columns(
    loss: Callable[..., Any], model: PyTree, args: Any, trainable: Any, chunk: int | None, diagonal: bool = False
) -> jax.Array:
    # Differentiated in the vector and not leaf by leaf: one column is then one array, and compiles in less time.
    parts = parts_of(model, trainable)
    kind, f = vector_of(parts.layout), of_slots(loss, parts, *args)
    _, times = jax.linearize(jax.grad(lambda vector: f(kind.cut(vector))), kind.join(parts.slots))
    size, dtype = parts.layout.size, parts.layout.dtype
    if size == 0:
        return jnp.zeros((0,) if diagonal else (0, 0), dtype)

    def column(i: jax.Array) -> jax.Array:
        product = times(jax.nn.one_hot(i, size, dtype=dtype))
        return product[i] if diagonal else product

    return mapped(column, jnp.arange(size), chunk, "columns")
