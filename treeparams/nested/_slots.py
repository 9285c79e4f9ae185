"""A loss as a function of the trained parameters, one array per slot; tangents as vectors or as trees."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._index import is_complex
from .._joined import vector_of
from .._layout import Layout, index_of
from .._match import slot_gradients
from .._parts import Parts, take_apart
from .._structure import is_array


def parts_of(model: PyTree, trainable: Any, real: bool = True) -> Parts:
    """The model taken apart, with JAX arrays in its slots, which must be real for second derivatives."""
    parts = take_apart(model, trainable)
    found = next((slot for slot in parts.layout.slots if is_complex(slot.dtype)), None)
    if real and found is not None:
        raise TypeError(
            f"{found.path!r} is {found.dtype}, and second derivatives are of real parameters; freeze it, or hold its "
            "real and imaginary part as two parameters"
        )
    return Parts(tuple(map(jnp.asarray, parts.slots)), parts.rest)


def of_slots(f: Callable[..., Any], parts: Parts, *args: Any) -> Callable[[Sequence[Any]], Any]:
    """`f(model, *args)` as a function of one array per slot."""
    return lambda slots: f(parts.model(list(slots)), *args)


def is_vector(layout: Layout, tangent: Any) -> bool:
    """Whether a tangent is in the form of the vector; a tree is one of the model's structure, or of its paths."""
    return getattr(tangent, "shape", None) == (layout.size,)


def taken(layout: Layout, tangent: Any) -> tuple[jax.Array, ...]:
    """A tangent, vector or tree, as one array per slot in the slot's dtype; what a tree has not is zero.

    A tangent is a value of the parameters, so at a tie the slot's own entry counts, and not a sum of several.
    """
    if is_vector(layout, tangent):
        return tuple(vector_of(layout).cut(tangent))
    index = index_of(layout)
    if is_array(tangent) and not jtu.treedef_is_leaf(index.structure.treedef):
        raise ValueError(
            f"expected a vector of {layout.size} elements, one per trained parameter, or a tree of the model's "
            f"structure, got an array of shape {jnp.shape(tangent)}"
        )
    return tuple(slot_gradients(index, tangent, "zeros", tied="first"))


def given_back(layout: Layout, slots: Sequence[Any], tangent: Any) -> Any:
    """One array per slot in the form of a tangent: the vector, or the canonical tree."""
    if is_vector(layout, tangent):
        return vector_of(layout).join(slots)
    index = index_of(layout)
    return index.canonical(slots, index.structure.treedef)
