"""Derivatives of a model's output in its input, for losses that contain them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._recognise import structure_of
from .._text import count_of, describe
from ._mapped import mapped
from ._orders import ORDERS, Order, pulled, pushed


def gradient(f: Callable[..., Array], *, mode: Order | None = None) -> Callable[..., PyTree]:
    """The gradient of `f(model, x, *args)` in x, to stand in a loss.

    The gradient of that loss reaches all parameters of the model, what f captured, x and the other arguments.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> energy = lambda model, x: model["k"] * jnp.sum(x**2)
    >>> force = nested.gradient(energy)
    >>> model, x = {"k": jnp.array(2.0), "frozen": jnp.ones(1)}, jnp.array([1.0, 3.0])
    >>> force(model, x)
    Array([ 4., 12.], dtype=float32)
    >>> loss = lambda model: jnp.sum(force(model, x) ** 2)  # 4 k^2 x^2
    >>> tp.grad(loss, "k")(model)["k"]
    Array(160., dtype=float32, weak_type=True)

    The model may be a bound method of a Module or a `jax.tree_util.Partial`, which carry their parameters:
    `nested.gradient(lambda energy, x: energy(x))(net.energy, x)`. For one point; `jax.vmap(force, (None, 0))` takes
    many, or `batched_gradient` where f is only at hand for a batch. With the value: `vjp(f)(model, x, 1.0)`.

    Args:
        f: called as `f(model, x, *args)`, returns a scalar.
        mode: in which order the gradient of the loss is taken through this one, outer over inner:
            `"reverse/reverse"` (what JAX does as it is), `"forward/reverse"` (by one product with the Hessian, as Lux
            rewrites it) or `"reverse/forward"` (the gradient of one directional derivative); `None`: the one that was
            found best for this function, `"reverse/reverse"`. Values are the same. The order holds for the first
            derivative of the gradient; further ones are JAX's own of it. The others take longer to trace, each level of
            nesting several times as long, and `"reverse/forward"` needs f to be differentiable in forward mode.
            Figures: `benchmarks/RESULTS.md`, "orders".

    Returns:
        A function of `(model, x, *args)` that returns the gradient, a tree like x.

    Raises:
        ValueError: `mode` is none of these.
        TypeError: when called: x has a leaf that is not floating; f returns no real floating scalar.
    """
    order = _checked(mode) or "reverse/reverse"

    def of(model: PyTree, x: Any, *args: Any) -> Any:
        x = _floating(x, "x")
        y = jax.eval_shape(lambda x: f(model, x, *args), x)
        if getattr(y, "shape", None) != () or not jnp.issubdtype(y.dtype, jnp.floating):
            raise TypeError(f"expected f to return a real floating scalar, got {describe(y)}; {_instead(y)}")
        return pulled(f, order, model, x, jnp.ones((), y.dtype), args)

    return of


def jacobian(f: Callable[..., Array], *, mode: Order | None = None, chunk: int | None = None) -> Callable[..., Array]:
    """The Jacobian of `f(model, x, *args)` in x, to stand in a loss.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> f = lambda model, x: model["w"] @ x**2
    >>> model, x = {"w": jnp.array([[1.0, 2.0], [0.0, 1.0]])}, jnp.array([1.0, 3.0])
    >>> nested.jacobian(f)(model, x)
    Array([[ 2., 12.],
           [ 0.,  6.]], dtype=float32)
    >>> tp.grad(lambda model: jnp.trace(nested.jacobian(f)(model, x)))(model)["w"]
    Array([[2., 0.],
           [0., 6.]], dtype=float32)

    Args:
        f: called as `f(model, x, *args)` with an array x, returns an array.
        mode: outer over inner, as for `gradient`: `"reverse/forward"` takes a forward sweep per entry of x,
            `"reverse/reverse"` and `"forward/reverse"` a reverse sweep per entry of the output; `None`:
            `"reverse/forward"` where x has no more entries than the output, otherwise `"reverse/reverse"`.
        chunk: how many sweeps are done at once, which bounds the memory; `None`: all.

    Returns:
        A function of `(model, x, *args)` that returns the Jacobian, shape `(*out, *in)`.

    Raises:
        ValueError: `mode` or `chunk` is none of these.
        TypeError: when called: x or the output is no real floating array.
    """
    _checked(mode)
    if chunk is not None:
        count_of("chunk", chunk, "sweeps")

    def of(model: PyTree, x: Any, *args: Any) -> jax.Array:
        x = real_array(x)
        y = jax.eval_shape(lambda x: f(model, x, *args), x)
        check_output(y)
        order = mode or ("reverse/forward" if x.size <= math.prod(y.shape) else "reverse/reverse")
        if order == "reverse/forward":
            columns = mapped(lambda e: pushed(f, order, model, x, e, args), basis(x), chunk, "sweeps")
            return jnp.moveaxis(columns, 0, -1).reshape(*y.shape, *x.shape)
        rows = mapped(lambda e: pulled(f, order, model, x, e, args), basis(y), chunk, "sweeps")
        return rows.reshape(*y.shape, *x.shape)

    return of


def vjp(f: Callable[..., PyTree], *, mode: Order | None = None) -> Callable[..., tuple[PyTree, PyTree]]:
    """The value of `f(model, x, *args)` and the product of a cotangent with its Jacobian in x, to stand in a loss.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> f = lambda model, x: model["w"] @ x**2
    >>> model, x = {"w": jnp.array([[1.0, 2.0], [0.0, 1.0]])}, jnp.array([1.0, 3.0])
    >>> nested.vjp(f)(model, x, jnp.array([1.0, 0.0]))
    (Array([19.,  9.], dtype=float32), Array([ 2., 12.], dtype=float32))

    Args:
        f: called as `f(model, x, *args)`, returns a tree of floating arrays.
        mode: as for `gradient`; orders that are not the default call f once more for the value.

    Returns:
        A function of `(model, x, cotangent, *args)`, with the cotangent like the output of f, that returns the output
        and the product, a tree like x.

    Raises:
        ValueError: `mode` is none of these; when called: the cotangent has another structure or shape than the output.
        TypeError: when called: x or the output has a leaf that is not floating; the cotangent is complex where the
            output is real.
    """
    order = _checked(mode) or "reverse/reverse"

    def of(model: PyTree, x: Any, cotangent: Any, *args: Any) -> tuple[Any, Any]:
        x = _floating(x, "x")
        if order == "reverse/reverse":  # all in one
            y, pull = jax.vjp(lambda x: _floating(f(model, x, *args), "the output of f"), x)
            return y, pull(_like("cotangent", cotangent, y))[0]
        y = _floating(f(model, x, *args), "the output of f")
        return y, pulled(f, order, model, x, _like("cotangent", cotangent, y), args)

    return of


def jvp(f: Callable[..., PyTree], *, mode: Order | None = None) -> Callable[..., tuple[PyTree, PyTree]]:
    """The value of `f(model, x, *args)` and the product of its Jacobian in x with a tangent, to stand in a loss.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> f = lambda model, x: model["w"] @ x**2
    >>> model, x = {"w": jnp.array([[1.0, 2.0], [0.0, 1.0]])}, jnp.array([1.0, 3.0])
    >>> nested.jvp(f)(model, x, jnp.array([1.0, 0.0]))
    (Array([19.,  9.], dtype=float32), Array([2., 0.], dtype=float32))

    Args:
        f: called as `f(model, x, *args)`, returns a tree of floating arrays.
        mode: as for `gradient`; `None`: `"reverse/forward"`, which is what JAX does as it is. Orders that are not the
            default call f once more for the value.

    Returns:
        A function of `(model, x, tangent, *args)`, with the tangent like x, that returns the output and the product, a
        tree like it.

    Raises:
        ValueError: `mode` is none of these; when called: the tangent has another structure or shape than x.
        TypeError: when called: x or the output has a leaf that is not floating; the tangent is complex where x is real.
    """
    order = _checked(mode) or "reverse/forward"

    def of(model: PyTree, x: Any, tangent: Any, *args: Any) -> tuple[Any, Any]:
        x = _floating(x, "x")
        tangent = _like("tangent", tangent, x)
        if order == "reverse/forward":  # all in one
            return jax.jvp(lambda x: _floating(f(model, x, *args), "the output of f"), (x,), (tangent,))
        return _floating(f(model, x, *args), "the output of f"), pushed(f, order, model, x, tangent, args)

    return of


def real_array(x: Any) -> jax.Array:
    """An input as an array.

    Raises:
        TypeError: it is no real floating array.
    """
    if not hasattr(x, "dtype") and not isinstance(x, float):
        raise TypeError(f"expected an array for x, got {type(x).__name__}; for trees there are gradient, jvp and vjp")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected x to be real and floating, got {x.dtype}")
    return x


def check_output(y: Any) -> None:
    """Raises if an output, or its shape and dtype, is no array of real floating numbers.

    Raises:
        TypeError: it is none.
    """
    if not hasattr(y, "dtype") or not jnp.issubdtype(y.dtype, jnp.floating):
        raise TypeError(f"expected f to return a real floating array, got {describe(y)}")


def basis(of: Any) -> jax.Array:
    """One array like the given one for each of its entries, with a one there."""
    size = math.prod(of.shape)
    return jnp.eye(size, dtype=of.dtype).reshape(size, *of.shape)


def _checked(mode: Order | None) -> Order | None:
    if mode is not None and mode not in ORDERS:
        raise ValueError(f"mode must be one of {', '.join(map(repr, ORDERS))}, got {mode!r}")
    return mode


def _instead(y: Any) -> str:
    if not hasattr(y, "dtype"):
        return "use nested.vjp"
    return "use nested.jacobian" if jnp.issubdtype(y.dtype, jnp.floating) else "it has no gradient"


def _floating(tree: Any, what: str) -> Any:
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact):
            got = f"{describe(leaf)}{_at(tree, i)}"
            instead = "convert it, or pass it in *args" if what == "x" else "leave it out"
            raise TypeError(f"expected {what} to be floating, got {got}; {instead}")
    return jax.tree.map(jnp.asarray, tree)


def _like(what: str, given: Any, like: Any) -> Any:
    """A direction in the dtypes of what it is a direction of."""
    expected, got = jax.tree.structure(like), jax.tree.structure(given)
    if expected != got:
        raise ValueError(f"expected a {what} of structure {expected}, got {got}")
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(like), strict=True)
    for i, (to, leaf) in enumerate(pairs):
        if jnp.shape(to) != leaf.shape:
            raise ValueError(f"expected a {what} of shape {leaf.shape}{_at(like, i)}, got {jnp.shape(to)}")
        if jnp.iscomplexobj(to) and not jnp.iscomplexobj(leaf):
            raise TypeError(f"expected a real {what}{_at(like, i)}, got {jnp.result_type(to)}")
    return jax.tree.map(lambda to, leaf: jnp.asarray(to, leaf.dtype), given, like)


def _at(tree: Any, i: int) -> str:
    path = structure_of(tree)[2].paths[i]
    return f" at {path!r}" if path else ""
