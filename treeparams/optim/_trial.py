"""Whether a rule is the same on one vector as on the leaves in it: found by trying."""

import concurrent.futures
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax

from .._resolve import layout
from ._context import within
from ._state import extended, is_placeholder, settled, steady

# What rules look at: rank, the sizes of axes (128 is where adafactor begins to factorise), the norm of a leaf. The
# second leaf has larger gradients, so that what is relative to a leaf shows.
_SHAPES = ((128, 128), (3,))
_FACTORS = (1.0, 30.0)
# So many updates are compared, each the first of so many that is not zero: a rule may gather gradients, or warm up.
_UPDATES = 3
_CALLS = (1, 16, 512)
# Thresholds are passed at one scale or another.
_SCALES = (1e-3, 1.0, 1e3)
# Trials run in float64: where leaves are coupled, sums in another order differ by far less than this, and a small
# weight decay of some leaves by more. Some rules count in float32 whatever they are given.
_TOLERANCE = 1e-6
# Its place in JAX has changed.
_enable_x64: Any = getattr(jax, "enable_x64", getattr(jax.experimental, "enable_x64", None))


def blind(tx: Any, extra: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """The same transformation, whose `init` fails if it treats leaves apart and leaves joined differently.

    Args:
        tx: the transformation.
        extra: arguments of its `update`, beside those that the trial knows.
    """
    tx = extended(tx)
    tried = functools.cache(lambda: _try(tx, extra))

    def init(params: Any) -> Any:
        if not is_placeholder(params):
            tried()
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init, tx.update)


def _try(tx: Any, extra: Mapping[str, Any]) -> None:
    try:
        # Where init is called within jax.jit, the trial must not become part of that program. What is traced is known
        # by thread, so in a thread of its own it is not.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            joined, apart = pool.submit(_both, tx, extra).result()
    except Exception as error:
        raise ValueError(
            "optim.flat tries the transformation on two small leaves, apart and joined to one vector, and it fails "
            f"there ({type(error).__name__}: {_first_line(error)}). Use optim.trainable; if it needs further extra "
            "arguments, give flat examples of them (trial={...}); if this is inside of jit, call init outside"
        ) from error
    for shape, one, other in zip(_SHAPES, apart, joined, strict=True):
        if not _agree(one, other):
            raise ValueError(
                "the transformation looks at the shapes of leaves: on two small leaves, apart and joined to one "
                f"vector, its updates differ (of the leaf of shape {shape}, by {_difference(one, other):.1e} of the "
                "largest). Use optim.trainable for it"
            )


def _both(tx: Any, extra: Mapping[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The updates of each leaf over scales and steps, of leaves joined and apart."""
    with _enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found: Any = None
        for calls in _CALLS:
            run = jax.jit(lambda calls=calls: tuple(_trial(tx, extra, joined, calls) for joined in (True, False)))
            found = jax.device_get(run())
            if any(np.any(leaf) for leaf in jax.tree.leaves(found)):
                break
        return found


def _trial(tx: Any, extra: Mapping[str, Any], joined: bool, calls: int) -> list[jax.Array]:
    return jax.lax.map(lambda scale: _descent(tx, extra, joined, calls, scale), jnp.asarray(_SCALES))


def _descent(tx: Any, extra: Mapping[str, Any], joined: bool, calls: int, scale: jax.Array) -> list[jax.Array]:
    starts, centres, curvatures = ([jnp.asarray(each) for each in _random(seed)] for seed in range(3))

    def loss(params: Any, **_: Any) -> jax.Array:
        leaves = _apart(params) if joined else params
        terms = zip(leaves, centres, curvatures, _FACTORS, strict=True)
        return scale * sum(factor * jnp.sum(h * h * (p - c) ** 2) for p, c, h, factor in terms)

    def call(_: Any, carry: Any) -> Any:
        params, state, first = carry
        value, grad = jax.value_and_grad(loss)(params)
        known = {"value": value, "grad": grad, "value_fn": loss}
        updates, after = tx.update(grad, state, params, **(known | dict(extra)))
        params = jax.tree.map(jnp.add, params, updates)
        moved = jnp.stack([jnp.any(leaf) for leaf in jax.tree.leaves(first)]).any()
        first = jax.tree.map(lambda kept, new: jnp.where(moved, kept, new), first, updates)
        return params, steady(after, state), first

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        params, state, first = jax.lax.fori_loop(0, calls, call, (params, state, jax.tree.map(jnp.zeros_like, params)))
        return (params, state), (_apart(first) if joined else first)

    params = jnp.concatenate([start.reshape(-1) for start in starts]) if joined else starts
    with within(layout(starts), joined):
        state = settled(tx.init(params))
        masks = [node for node in jax.tree.leaves(state, is_leaf=_is_masked) if _is_masked(node)]
        if masks:
            raise ValueError(
                "it has a mask of leaves, and one vector has none; put flat into the mask, or into optim.groups"
            )
        return jax.lax.scan(step, (params, state), length=_UPDATES)[1]


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedState)


def _random(seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [factor * generator.normal(size=shape) for shape, factor in zip(_SHAPES, _FACTORS, strict=True)]


def _apart(vector: jax.Array) -> list[jax.Array]:
    sizes = [math.prod(shape) for shape in _SHAPES]
    pieces = jnp.split(vector, [sizes[0]])
    return [piece.reshape(shape) for piece, shape in zip(pieces, _SHAPES, strict=True)]


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(np.isnan(one), np.isnan(other)) and _difference(one, other) <= _TOLERANCE


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference at any scale and step, relative to the largest update there."""
    axes = tuple(range(2, one.ndim))
    largest = np.nanmax(np.abs(one), axes)
    return float(np.nanmax(np.nanmax(np.abs(one - other), axes) / np.where(largest > 0, largest, 1)))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
