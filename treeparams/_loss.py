"""What is refused in the place of a loss, of its options, and of what it returns."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._tree.text import describe


def checked_loss(f: Any, verb: str) -> Callable[..., Any]:
    """The function to differentiate; options that stand in its place are refused."""
    if not callable(f):
        raise TypeError(
            f"expected a function of the model, got {describe(f)}; name the options: "
            f"tp.{verb}(trainable=...), and write tp.{verb}(loss)(model, x)"
        )
    return f


def check_options(trainable: object, has_aux: object) -> None:
    """Refuses arguments of the loss, and of `jax.grad`, in place of options."""
    if isinstance(trainable, int) and not isinstance(trainable, bool):
        raise TypeError(f"the gradient is in the model, the first argument of the loss; got {trainable} for trainable=")
    if not isinstance(has_aux, bool):
        raise TypeError(f"has_aux must be True or False, got {describe(has_aux)}; write tp.grad(loss)(model, x)")


def check_result(of_slots: Callable[..., Any], slots: Sequence[Any], has_aux: bool, error: TypeError) -> None:
    """Raises an error that says what a loss returns, where that is the reason why it has no gradient."""
    try:
        result = jax.eval_shape(of_slots, slots)
    except Exception:
        return
    got = f"a tuple of {len(result)}" if isinstance(result, tuple) else describe(result)
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"with has_aux=True the loss is to return (value, aux), got {got}; leave it out") from error
    value = result[0] if has_aux else result
    if isinstance(value, tuple):
        remedy = "; where the rest of it is auxiliary, write has_aux=True"
    elif getattr(value, "shape", ()) != ():
        remedy = "; write jnp.mean(...) or jnp.sum(...) of it"
    else:
        remedy = ""
    if remedy or value is None or not jnp.issubdtype(getattr(value, "dtype", object), jnp.floating):
        got = got if value is result else describe(value)
        raise TypeError(f"expected the loss to return a real scalar, got {got}{remedy}") from error
