"""apply_updates: the step. layout: what a state trains."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._index import common_dtype, is_complex
from .._layout import Layout, Trainable, trained_at
from .._match import per_slot
from .._parts import take_apart
from ._state import layout_in

M = TypeVar("M")


def apply_updates(model: M, updates: PyTree, trainable: Trainable = None) -> M:
    """The model after the step: each trained parameter plus its update, in its own dtype.

    >>> import jax.numpy as jnp
    >>> from treeparams import optim
    >>> shared = jnp.ones(2, jnp.bfloat16)
    >>> model = optim.apply_updates({"a": shared, "b": shared, "n": 3}, {"a": jnp.ones(2), "b": None, "n": None})
    >>> model["a"].dtype, model["a"] is model["b"], model["n"]
    (dtype(bfloat16), True, 3)

    **Inside `jax.jit` arrays no longer tell what is tied**: pass `optim.layout(state)`, or a `Layout` made outside, as
    `trainable`. It is needed outside too where ties were given to `tp.layout(..., ties=...)`. Ties that a class
    declares are known anyway.

    Args:
        model: any pytree.
        updates: what `update` of a transformation returned; `None` or nothing at a path is no step.
        trainable: what may move: `None` (all that has an update), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        The model, with one array at all paths of a tie, and what has no update as it was, the same object.

    Raises:
        ValueError: an update at a path that the model has not, at several paths of one tie, or of another shape; as
            `tp.layout`.
        TypeError: a complex update of a real parameter; as `tp.layout`.
    """
    parts = take_apart(model, trainable)
    if trainable is None:  # what has an update moves, also where a class declares it frozen and a layout thawed it
        parts = take_apart(model, trained_at(parts.layout, parts.index.distinct))
    steps = per_slot(parts.index, updates, None, exact_shapes=True)
    slots = zip(parts.layout.paths, parts.slots, steps, strict=True)
    return parts.model([moved(*slot) for slot in slots])


def moved(path: str, leaf: Any, step: Any) -> Any:
    """A parameter after a step, in its own dtype."""
    if step is None:
        return leaf
    if jnp.iscomplexobj(step) and not is_complex(leaf.dtype):
        raise TypeError(f"expected a real update at {path!r}, where the parameter is {leaf.dtype}, got {step.dtype}")
    leaf, step = jnp.asarray(leaf), jnp.asarray(step)
    if leaf.dtype == step.dtype and not leaf.weak_type:
        return leaf + step  # outside of jit a cast that does nothing takes as long as the sum
    dtype = common_dtype([leaf.dtype, step.dtype])
    return jax.lax.convert_element_type(leaf.astype(dtype) + step.astype(dtype), leaf.dtype)


def layout(state: PyTree) -> Layout:
    """What trains, and what is tied, as a state knows it: a `Layout` for `trainable=` in all functions of this library.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> tx = optax.chain(optim.clip_by_global_norm(1.0), optim.trainable(optax.sgd(0.1), "a"))
    >>> optim.layout(tx.init({"a": jnp.ones(2), "b": jnp.ones(2)})).paths
    ('a',)

    Args:
        state: of a chain or wrapper with `optim.trainable`, `flat`, `groups` or `accumulate` in it; the first counts.

    Returns:
        The layout.

    Raises:
        ValueError: there is none in the state.
    """
    found = layout_in(state)
    if found is None:
        raise ValueError("there is no state of optim.trainable, flat, groups or accumulate in this one")
    return found
