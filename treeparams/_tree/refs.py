"""Refs: arrays that can be written, as `jax.new_ref` makes them."""

from typing import Any


def is_ref(leaf: object) -> bool:
    """Returns whether a leaf is a ref, concrete or traced."""
    # A traced ref has the type of any tracer.
    return type(getattr(leaf, "aval", None)).__name__ == "AbstractRef"


def value_of(leaf: Any) -> Any:
    """Returns the value of a ref as it is now; any other leaf unchanged."""
    return leaf[...] if is_ref(leaf) else leaf
