"""clip_by_global_norm: of what is trained, ties once, in float32."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from .._layout import Layout, Trainable, index_of
from .._match import project
from .._norm import global_norm
from .._structure import is_array
from ._context import around, given


class ClipState(NamedTuple):
    """The state of `optim.clip_by_global_norm`; both fields are there to be plotted.

    Attributes:
        norm: the global norm in the last call, before clipping; float32, or float64 of a float64 model.
        clipped: in how many calls it was not within the limit, calls with a norm that is not finite among them.
    """

    norm: Float[Array, ""]
    clipped: Int[Array, ""]


ClipState.__module__ = "treeparams.optim"


def clip_by_global_norm(
    max_norm: float | int | Array,
    trainable: Trainable = None,
    axis_name: str | Sequence[str] | None = None,
    nonfinite: Literal["propagate", "zero"] = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """Scales a gradient down to a global norm: of what is trained, ties once, right in every dtype.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> shared = jnp.ones(2)
    >>> model = {"a": shared, "b": shared, "steps": jnp.array(3)}
    >>> tx = optax.chain(optim.clip_by_global_norm(1.0), optim.trainable(optax.sgd(1.0)))
    >>> updates, state = tx.update({"a": jnp.array([1.0, 2.0]), "b": jnp.array([2.0, 2.0])}, tx.init(model), model)
    >>> updates["a"], state[0].norm, state[0].clipped
    (Array([-0.6, -0.8], dtype=float32), Array(5., dtype=float32), Array(1, dtype=int32))

    It may stand before or within `optim.trainable`. Within, it follows what trains there. Before, it has its own
    choice: give both the same `trainable`, for what a clip leaves out has no gradient after it. What is frozen is out
    of the norm and out of the result wherever it stands, so that the backward pass of a frozen trunk does not come back
    for the sake of its norm.

    **Inside `jax.jit` arrays no longer tell what is tied.** Within `optim.trainable` the clip knows; before it, pass a
    `Layout` as `trainable`.

    Args:
        max_norm: the limit, positive; it may be traced (`optax.inject_hyperparams`).
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        axis_name: one or more named axes (`jax.shard_map`, `jax.pmap`, `jax.vmap`) over which the gradient is split:
            the norm is that of all parts together. Not for gradients that are whole on each device.
        nonfinite: what happens where the norm is infinite or NaN: `"propagate"` makes the whole update NaN, so that it
            is seen; `"zero"` makes it zero. Moments still decay by such a zero: to hold all other state as well, use
            `optax.apply_if_finite`.

    Returns:
        A transformation with a `ClipState`. `update` takes a gradient in any form that `tp.project` takes and returns
        the canonical one, each leaf in its own dtype and `None` where there is no gradient. Without a model
        (`params=None`) it takes the gradient as it is.

    Raises:
        ValueError: `max_norm` is not positive; `nonfinite` is none of the two; `update`: as `tp.project`.
        TypeError: `max_norm` is a schedule; `update`: as `tp.project`.
    """
    if nonfinite not in ("propagate", "zero"):
        raise ValueError(f'nonfinite must be "propagate" or "zero", got {nonfinite!r}')
    if callable(max_norm):
        raise TypeError(
            "max_norm is a number; for a schedule write "
            "optax.inject_hyperparams(optim.clip_by_global_norm)(max_norm=...)"
        )
    if not isinstance(max_norm, Tracer) and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")

    def init(params: PyTree) -> ClipState:
        wide = any(
            jnp.finfo(jax.dtypes.canonicalize_dtype(leaf.dtype)).bits > 32
            for leaf in jax.tree.leaves(params)
            if _is_inexact(leaf)
        )
        return ClipState(jnp.zeros((), jnp.float64 if wide else jnp.float32), jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **_: Any) -> tuple[PyTree, ClipState]:
        if params is not None:
            updates = project(params, updates, _chosen(params, trainable))
        norm = global_norm(updates)
        norm = norm if axis_name is None else _over(axis_name, norm)
        limit = jnp.asarray(max_norm, norm.dtype)
        # Where the norm is within the limit, the scale is 1 exactly. It is not finite, NaN: an infinite entry among
        # finite ones would otherwise make these zero, and nobody would see it.
        scale = jnp.where(jnp.isfinite(norm), limit / jnp.maximum(norm, limit), jnp.nan)
        clipped = state.clipped + jnp.where(norm <= limit, 0, 1)
        zero = ~jnp.isfinite(norm) & (nonfinite == "zero")
        scaled = jax.tree.map(lambda leaf: _scaled(leaf, scale, zero), updates)
        return scaled, ClipState(norm.astype(state.norm.dtype), clipped.astype(state.clipped.dtype))

    return optax.GradientTransformationExtraArgs(init, update)


def _chosen(params: PyTree, trainable: Any) -> Layout:
    layout = given(params, trainable).layout
    index = index_of(layout)
    if around() is not None and len(index.positions) < len(index.structure.parameters):
        left = next(index.structure.paths[i] for i in index.structure.parameters if not index.trained[i])
        raise ValueError(
            f"this clip leaves {left!r} out, which trains in the transformation around it, and would drop its "
            "gradient; give it no `trainable` there, or clip a part of the model in optim.groups"
        )
    return layout


def _is_inexact(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _scaled(leaf: Any, scale: Any, zero: Any) -> Any:
    if not _is_inexact(leaf):
        return leaf
    leaf = jnp.asarray(leaf)
    wide = jnp.promote_types(leaf.dtype, scale.dtype)
    scaled = (jnp.asarray(leaf, wide) * scale.astype(jnp.finfo(wide).dtype)).astype(leaf.dtype)
    return jnp.where(zero, jnp.zeros((), leaf.dtype), scaled)


def _over(axis_name: Any, norm: jax.Array) -> jax.Array:
    # Scaled by the largest, so that squares neither overflow nor vanish.
    largest = jax.lax.pmax(norm, axis_name)
    safe = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return safe * jnp.sqrt(jax.lax.psum(jnp.square(norm / safe), axis_name))
