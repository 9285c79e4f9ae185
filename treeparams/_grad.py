"""Gradients of the trained parameters alone.

The model is split before it is differentiated, so no backward work is done for what is frozen: JAX differentiates with
respect to whole arguments, and prunes nothing that it was asked for.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax

from ._layout import Layout
from ._partition import split


def value_and_grad(
    f: Callable[..., Any], trainable: Any = None, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` of `f(model, *args, **kwargs)` in the trained parameters of the model.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> value, grads = tp.value_and_grad(lambda model, x: jnp.sum(model(x)), "layers.1")(mlp, jnp.ones(2))
    >>> grads.layers[0].weight is None, grads.layers[1].bias
    (True, Array([1.], dtype=float32))

    Frozen arrays cost no backward work and stay what they are in the program around: arguments of the `jit`, not
    constants. Integers, keys, functions and numbers in the model are no trouble. Complex parameters follow JAX:
    the gradient is the conjugate of the direction of steepest ascent, so descent steps along its conjugate.

    A step with it is `tp.maptrainable(lambda x, g: x - rate * g, model, grads)`, which sets all places of a tie; adding
    a canonical tree to the model leaf by leaf would move the first place alone.

    In a `jax.jit` or `equinox.filter_jit` whose argument is the model, pass a layout made outside as `trainable`, or
    ties are not known (see `tp.layout`). Outside of `jit` each call takes the model apart anew, about the cost of
    flattening it twice; the fast path for a loop without `jit` is to `tp.partition` once and differentiate in `params`.

    Args:
        f: a function of the model and further arguments that returns a real scalar, or `(scalar, aux)`.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        has_aux: whether `f` returns `(scalar, aux)`.

    Returns:
        A function that takes what `f` takes and returns `(value, grads)`, or `((value, aux), grads)`. `grads` is the
        canonical tree: model-shaped, the gradient at each slot's path, summed over a tie, and `None` everywhere else.
        There is a gradient at every slot, zero where `f` does not depend on it.

    Warns:
        UserWarning: nothing is trained; the gradient is `None` everywhere.
    """

    @functools.wraps(f)
    def value_and_gradient(model: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        slots, rest = split(model, trainable)
        if not slots:
            warnings.warn(nothing_trained(rest.layout), stacklevel=2)

        def of_slots(slots: tuple[Any, ...]) -> Any:
            return f(rest.fill(slots), *args, **kwargs)

        if not slots:
            return of_slots(()), rest.fixed.canonical(())
        value, grads = jax.value_and_grad(of_slots, has_aux=has_aux)(slots)
        return value, rest.fixed.canonical(grads)

    return value_and_gradient


def grad(f: Callable[..., Any], trainable: Any = None, has_aux: bool = False) -> Callable[..., Any]:
    """`jax.grad` of `f(model, *args, **kwargs)` in the trained parameters of the model.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> weight = jnp.ones(2)
    >>> tp.grad(lambda m: jnp.sum(3 * m["x"] + 13 * m["z"]))({"x": weight, "z": weight})  # one array: one gradient
    {'x': Array([16., 16.], dtype=float32), 'z': None}

    Args:
        f: as for `value_and_grad`.
        trainable: as for `value_and_grad`.
        has_aux: as for `value_and_grad`.

    Returns:
        A function that returns the canonical gradient, or `(gradient, aux)`; see `value_and_grad`.

    Warns:
        UserWarning: nothing is trained.
    """
    with_value = value_and_grad(f, trainable, has_aux)

    @functools.wraps(f)
    def gradient(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        value, grads = with_value(model, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def nothing_trained(layout: Layout) -> str:
    """Says so, and why."""
    frozen = [layout.structure.paths[i] for i in layout.structure.parameters]
    if not frozen:
        return "nothing is trained: the model has no floating or complex arrays"
    more = f" and {len(frozen) - 5} more" if len(frozen) > 5 else ""
    shown = ", ".join(map(repr, frozen[:5]))
    return f"nothing is trained: frozen are {shown}{more}; thaw them with tp.layout(model, thaw=...)"
