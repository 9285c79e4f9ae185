"""A loss as a function of the trained parameters, one array per slot; tangents as vectors or as trees."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._flat import as_given, as_vectors, leaves_of, vectors_of
from .._layout import Layout
from .._pack import is_complex
from .._partition import Rest, rest_of, slots_of
from .._project import slot_gradients
from .._resolve import resolve


class Slots(NamedTuple):
    """A model taken apart into its trained parameters, one array per slot, and the rest."""

    leaves: tuple[Any, ...]
    rest: Rest

    @property
    def layout(self) -> Layout:
        """Of the model."""
        return self.rest.layout

    def function(self, f: Callable[..., Any], *args: Any) -> Callable[[Sequence[Any]], Any]:
        """`f(model, *args)` as a function of one array per slot."""
        return lambda leaves: f(self.rest.fill(list(leaves)), *args)


def slots(model: PyTree, trainable: Any, real: bool = True) -> Slots:
    """The model taken apart.

    Args:
        model: any pytree.
        trainable: as for `tp.layout`.
        real: whether trained parameters must be real.

    Raises:
        TypeError: a trained parameter is complex where second derivatives are taken; as `tp.layout`.
        ValueError: as `tp.layout`.
    """
    resolved = resolve(model, trainable)
    found = next((slot for slot in resolved.layout.slots if is_complex(slot.dtype)), None)
    if real and found is not None:
        raise TypeError(
            f"{found.path!r} is {found.dtype}, and second derivatives are of real parameters; freeze it, or hold its "
            "real and imaginary part as two parameters"
        )
    return Slots(tuple(map(jnp.asarray, slots_of(resolved))), rest_of(resolved))


def is_vector(layout: Layout, tangent: Any) -> bool:
    """Whether a tangent is in the form of the vector; a tree is one of the model's structure, or of its paths."""
    if layout.packing.is_single:
        return getattr(tangent, "shape", None) == (layout.vectors[0].length,)
    lengths = [(vector.length,) for vector in layout.vectors]
    return isinstance(tangent, (tuple, list)) and [getattr(each, "shape", None) for each in tangent] == lengths


def taken(layout: Layout, tangent: Any) -> tuple[jax.Array, ...]:
    """A tangent, vector or tree, as one array per slot in the slot's dtype; what a tree has not is zero.

    Raises:
        ValueError: an entry of another shape, or where the model has no leaf.
        TypeError: an entry is no array.
    """
    if is_vector(layout, tangent):
        return tuple(leaves_of(layout, as_vectors(layout, tangent)))
    return tuple(slot_gradients(layout, tangent, "zeros"))


def given_back(layout: Layout, leaves: Sequence[Any], tangent: Any) -> Any:
    """One array per slot in the form of a tangent: the vector, or the canonical tree."""
    if is_vector(layout, tangent):
        return as_given(layout, vectors_of(layout, leaves))
    return layout.canonical(leaves)
