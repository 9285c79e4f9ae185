"""Checks of a loss, of its options, and of the value that it returns."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._tree.text import describe


def checked_loss(f: Any, verb: str) -> Callable[..., Any]:
    """Returns the function to differentiate; raises a `TypeError` if an option was passed in its place."""
    if not callable(f):
        raise TypeError(
            f"expected a function of the model, got {describe(f)}; name the options: "
            f"tp.{verb}(trainable=...), and write tp.{verb}(loss)(model, x)"
        )
    return f


def check_options(trainable: object, has_aux: object) -> None:
    """Raises a `TypeError` if an argument of the loss or of `jax.grad` was passed in place of an option."""
    if isinstance(trainable, int) and not isinstance(trainable, bool):
        raise TypeError(
            "gradients are with respect to the model, the first argument of the loss; drop the number, got "
            f"{trainable} for trainable="
        )
    if not isinstance(has_aux, bool):
        raise TypeError(f"has_aux must be True or False, got {describe(has_aux)}; write tp.grad(loss)(model, x)")


def check_result(of_slots: Callable[..., Any], slots: Sequence[Any], has_aux: bool, error: TypeError) -> None:
    """Raises an error that describes the loss's result, if that is the reason why it has no gradient."""
    try:
        result = jax.eval_shape(of_slots, slots)
    except Exception:
        return
    got = f"a tuple of {len(result)}" if isinstance(result, tuple) else describe(result)
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"with has_aux=True the loss must return (value, aux), got {got}; drop has_aux=True") from error
    value = result[0] if has_aux else result
    if isinstance(value, tuple):
        remedy = "; if the other items are auxiliary, write has_aux=True"
    elif getattr(value, "shape", ()) != ():
        remedy = "; write jnp.mean(...) or jnp.sum(...) of it"
    else:
        remedy = ""
    if remedy or value is None or not jnp.issubdtype(getattr(value, "dtype", object), jnp.floating):
        got = got if value is result else describe(value)
        raise TypeError(f"expected the loss to return a real scalar, got {got}{remedy}") from error
