"""Refs: arrays that can be written, as `jax.new_ref` makes them."""

from typing import Any

import jax
import jax.experimental


def is_ref(leaf: object) -> bool:
    """Returns whether a leaf is a ref, concrete or traced."""
    # A traced ref has the type of any tracer, and the class of its aval has a public name from JAX 0.7.1 on.
    return type(getattr(leaf, "aval", None)).__name__ == "AbstractRef"


def value_of(leaf: Any) -> Any:
    """Returns the value of a ref as it is now; any other leaf unchanged."""
    return leaf[...] if is_ref(leaf) else leaf


def new_ref(value: Any) -> Any:
    """Returns a ref with a buffer of its own."""
    make = getattr(jax, "new_ref", None) or vars(jax.experimental)["mutable_array"]  # before JAX 0.7.2
    return make(value)
