"""Products with the Jacobian of a function in its input, whose own derivative is taken in a chosen order."""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer

Order = Literal["reverse/reverse", "forward/reverse", "reverse/forward"]

ORDERS: tuple[Order, ...] = ("reverse/reverse", "forward/reverse", "reverse/forward")


def pulled(f: Callable[..., Any], order: Order, model: Any, x: Any, cotangent: Any, args: tuple[Any, ...]) -> Any:
    """`J^T cotangent` for the Jacobian J of `f(model, x, *args)` in x.

    Args:
        f: called as `f(model, x, *args)`.
        order: outer over inner, in which the gradient of the product is taken, if it is.
        model: any pytree.
        x: a tree of floating arrays.
        cotangent: like the output.
        args: the others.
    """
    if order == "reverse/reverse":  # what JAX does as it is
        return _pull(_Call(f, order, True), (model, args), x, cotangent)
    return _in_order(f, order, True, model, x, cotangent, args)


def pushed(f: Callable[..., Any], order: Order, model: Any, x: Any, tangent: Any, args: tuple[Any, ...]) -> Any:
    """`J tangent` for the Jacobian J of `f(model, x, *args)` in x; arguments as of `pulled`."""
    if order == "reverse/forward":  # what JAX does as it is
        return _push(_Call(f, order, False), (model, args), x, tangent)
    return _in_order(f, order, False, model, x, tangent, args)


def _in_order(f: Any, order: Order, pulls: bool, model: Any, x: Any, direction: Any, args: tuple[Any, ...]) -> Any:
    model, x, args = _as_arrays((model, x, args))
    return _product(_Call(eqx.filter_closure_convert(f, model, x, *args), order, pulls), (model, args), x, direction)


def _as_arrays(tree: Any) -> Any:
    """A Python number that is differentiated outside of `jit` would come to the rules as itself, not as an array."""
    is_number = lambda leaf: isinstance(leaf, Tracer) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype) if is_number(leaf) else leaf, tree)


class _Call(eqx.Module):
    """The function, with what it captured among its leaves, the order, and on which side the direction is."""

    f: Any
    order: Order = eqx.field(static=True)
    pulls: bool = eqx.field(static=True)

    def __call__(self, others: Any, x: Any) -> Any:
        model, args = others
        return self.f(model, x, *args)


def _pull(call: _Call, others: Any, x: Any, cotangent: Any) -> Any:
    return jax.vjp(lambda x: call(others, x), x)[1](cotangent)[0]


def _push(call: _Call, others: Any, x: Any, tangent: Any) -> Any:
    return jax.jvp(lambda x: call(others, x), (x,), (tangent,))[1]


# -- The rule
#
# The gradient of a product with J is the gradient of `cotangent^T J tangent`, where one of the two is given with the
# product and the other comes from without. The rule is for `jvp`, so that derivatives of every kind and degree go
# through: the derivative of the product is the transpose of that gradient, as a function of what comes from without. In
# reverse mode JAX transposes it back, and what runs is the gradient in the order in which it was written.


@eqx.filter_custom_jvp
def _product(call: Any, others: Any, x: Any, direction: Any) -> Any:
    return (_pull if call.pulls else _push)(call, others, x, direction)


@_product.def_jvp
def _product_jvp(primals: Any, tangents: Any) -> Any:
    call, others, x, given = primals
    at, along, direction = primals[:3], tangents[:3], tangents[3]
    product = _product(*primals)

    def gradient(other: Any) -> Any:
        tangent, cotangent = (other, given) if call.pulls else (given, other)
        return _gradient(at, along, tangent, cotangent)

    moved = _transposed(gradient, product, along)
    return product, _plus(moved, lambda each: _product(call, others, x, each), direction, given)


def _gradient(at: Any, along: Any, tangent: Any, cotangent: Any) -> Any:
    """The gradient of `cotangent^T J tangent` in what moves."""
    order = at[0].order
    if order == "forward/reverse":
        return jax.jvp(lambda x: _slope((*at[:2], x), along, cotangent), (at[2],), (tangent,))[1]
    moving, of = _moving(at, along)

    def product(moving: Any) -> Any:
        call, others, x = of(moving)
        return _push(call, others, x, tangent) if order == "reverse/forward" else _pull(call, others, x, cotangent)

    return jax.vjp(product, moving)[1](cotangent if order == "reverse/forward" else tangent)[0]


def _slope(at: Any, along: Any, cotangent: Any) -> Any:
    """The gradient of `cotangent^T f` in what moves."""
    moving, of = _moving(at, along)

    def output(moving: Any) -> Any:
        call, others, x = of(moving)
        return call(others, x)

    return jax.vjp(output, moving)[1](cotangent)[0]


def _moving(at: Any, along: Any) -> tuple[Any, Callable[[Any], Any]]:
    """What moves, and the way from there to all."""
    moving = jax.tree.map(lambda to, leaf: None if to is None else leaf, along, at, is_leaf=_is_none)
    fixed = jax.tree.map(lambda to, leaf: leaf if to is None else None, along, at, is_leaf=_is_none)
    return moving, lambda moving: eqx.combine(moving, fixed)


def _transposed(gradient: Callable[[Any], Any], like: Any, along: Any) -> Any:
    if not jax.tree.leaves(along):
        return jax.tree.map(jnp.zeros_like, like)
    return jax.vjp(gradient, jax.tree.map(jnp.zeros_like, like))[1](along)[0]


def _plus(moved: Any, product: Callable[[Any], Any], direction: Any, like: Any) -> Any:
    """The product is linear in its own direction, so that its derivative is the product with how that moves."""
    if not jax.tree.leaves(direction):
        return moved
    filled = jax.tree.map(
        lambda to, leaf: jnp.zeros_like(leaf) if to is None else to, direction, like, is_leaf=_is_none
    )
    return jax.tree.map(jnp.add, moved, product(filled))


def _is_none(leaf: Any) -> bool:
    return leaf is None
