"""clip_by_global_norm: clips by the global norm of this library, as plain Optax."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from .._tree.structure import is_array
from .._tree.text import describe
from .._tree.types import PyTree
from .._walk import global_norm
from ._scaled import times
from ._state import ClipState


def clip_by_global_norm(
    max_norm: float | int | Array, *, axis_name: str | Sequence[str] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Scales gradients down to a maximum global norm, in which each parameter counts once.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> shared = jnp.array([1.0, 2.0])
    >>> model = {"a": shared, "b": shared, "steps": jnp.array(3)}
    >>> tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(1.0)))
    >>> gradients = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([2.0, 2.0])}
    >>> updates, state = tx.update(gradients, tx.init(model), model)
    >>> clip = state.clip
    >>> updates["a"], clip.norm, clip.clipped
    (Array([-0.6, -0.8], dtype=float32), Array(5., dtype=float32), Array(1, dtype=int32))

    It is plain Optax and uses `tp.global_norm` of the tree that it receives, in any mix of dtypes. Inside
    `optim.trainable` this tree has each tied parameter once and no frozen ones, so the norm needs no backward pass
    through a frozen trunk.

    **If the norm is not finite**, the whole update becomes NaN, so that you see it: scaling by an infinite norm would
    make all finite entries zero. To skip such steps and keep the state, write
    `optim.trainable(optax.apply_if_finite(tx, max_consecutive_errors=10))`. A limit of infinity changes nothing.

    Args:
        max_norm: the limit, a positive number, or an array that may be traced (`optax.inject_hyperparams`). An array at
            or below zero, as at the end of a schedule, gives zeros.
        axis_name: one or more named axes (`jax.shard_map`, `jax.vmap`) over which the gradient is split; the norm is
            then that of all pieces together. Leave it out if each device has the whole gradient.

    Returns:
        A transformation with a `ClipState`; each leaf keeps its dtype.

    Raises:
        ValueError: `max_norm` is a number that is not positive.
        TypeError: `max_norm` is a schedule.
    """
    if callable(max_norm):
        injected = "optax.inject_hyperparams(optim.clip_by_global_norm)(max_norm=...)"
        raise TypeError(f"max_norm must be a number; for a schedule write {injected}")
    if not (isinstance(max_norm, (int, float)) or is_array(max_norm)):
        raise TypeError(f"max_norm must be a number, got {describe(max_norm)}")
    if not is_array(max_norm) and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")

    def init(params: PyTree) -> ClipState:
        norm = jax.eval_shape(global_norm, [leaf for leaf in jax.tree.leaves(params) if is_array(leaf)])
        return ClipState(jnp.zeros((), norm.dtype), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: Any, params: object = None, **_: object) -> tuple[PyTree, ClipState]:
        norm = global_norm(updates)
        if axis_name is not None:
            norm = _norm_over(axis_name, norm)
        with np.errstate(over="ignore"):  # 1e39 is infinity
            limit = jnp.maximum(jnp.asarray(max_norm, norm.dtype), 0)
        is_within = norm <= limit
        # Within the limit the scale is 1 exactly. The inner `where` keeps infinity / infinity out of the gradient, too.
        is_finite = jnp.isfinite(norm)
        scale = jnp.where(is_within, 1, jnp.where(is_finite, limit / jnp.where(is_within, 1, norm), jnp.nan))
        counted = ClipState(
            norm.astype(state.norm.dtype),
            clipped=state.clipped + (is_finite & ~is_within).astype(state.clipped.dtype),
            nonfinite=state.nonfinite + (~is_finite).astype(state.nonfinite.dtype),
        )
        return jax.tree.map(lambda leaf: times(leaf, scale), updates), counted

    return optax.GradientTransformationExtraArgs(init, update)


def _norm_over(axis_name: str | Sequence[str], norm: jax.Array) -> jax.Array:
    """Returns the norm of a gradient that is split over named axes, from the norm of the piece on each device."""
    # Scaled by the largest, so that squares neither overflow nor vanish.
    largest = jax.lax.pmax(norm, axis_name)
    safe = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return safe * jnp.sqrt(jax.lax.psum(jnp.square(norm / safe), axis_name))
