"""Positive and bounded numbers, unit vectors, probabilities: constrained arrays, entry by entry or along an axis."""

import functools
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ._constrained import AbstractConstrained, concrete, refuse
from ._nodes import as_real, least_positive, scaled, wide


class Positive(AbstractConstrained):
    """Positive numbers: `softplus(raw)`, which is `log(1 + exp(raw))`.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> scale = matrices.Positive(jnp.array([1.0, 10.0]))
    >>> matrices.materialise(scale), tp.layout({"scale": scale}).paths
    (Array([ 1., 10.], dtype=float32), ('scale.raw',))

    A step in `raw` changes a small value by a factor, as with an exponential, and a large one by a summand, so that no
    step is magnified. The value keeps a relative precision of about `1 + |log(value)|` roundings. It is never zero: the
    least one is the least normal number of the dtype.

    Args:
        w: positive, any shape.
    """

    raw: Float[Array, "..."]

    def __init__(self, w: Array | np.ndarray):
        w = as_real(w)
        least = least_positive(w.dtype)
        if (entries := concrete(w)) is not None:
            fine = (entries >= least) & (entries < np.inf)
            refuse(self, entries, fine, f"finite numbers of at least {least:.3g}", "Positive(jnp.abs(w) + 1e-6)")
        self.raw = inverse_softplus(wide(w)).astype(w.dtype)

    def to_dense(self) -> Array:
        return softplus(wide(self.raw), least_positive(self.raw.dtype)).astype(self.raw.dtype)


class Bounded(AbstractConstrained):
    """Numbers between two: `low + (high - low) * sigmoid(raw)`.

    >>> import jax.numpy as jnp
    >>> from treeparams import matrices
    >>> angle = matrices.Bounded(jnp.array([0.0, 1.0]), low=-2, high=2)
    >>> angle
    Bounded(raw=f32[2], low=-2.0, high=2.0)
    >>> jnp.round(matrices.materialise(angle), 6)
    Array([0., 1.], dtype=float32)

    The bounds themselves are the values of an infinite `raw`, so they cannot be given; by rounding they are reached,
    and never passed.

    Args:
        w: between the bounds, any shape.
        low: the lower bound, finite, no parameter.
        high: the upper one, above it.
    """

    raw: Float[Array, "..."]
    low: float = eqx.field(static=True)
    high: float = eqx.field(static=True)

    def __init__(self, w: Array | np.ndarray, low: float | int, high: float | int):
        w = as_real(w)
        self.low, self.high = float(low), float(high)
        largest = float(jnp.finfo(wide(w).dtype).max)
        if not 0 < self.high - self.low <= largest:
            raise ValueError(
                f"Bounded takes low < high, at most {largest:.3g} apart, got low={low}, high={high}; numbers with a "
                "lower bound alone are low + Positive(w - low)"
            )
        least, most = _inward(self.low, self.high, w.dtype)
        if not least < most:
            raise ValueError(f"there is at most one number of {w.dtype} between low={low} and high={high}")
        if (entries := concrete(w)) is not None:
            fine = np.minimum(entries - least, most - entries) >= least_positive(wide(w).dtype)
            instead = f"Bounded(jnp.clip(w, {low} + margin, {high} - margin), {low}, {high})"
            refuse(self, entries, fine, f"numbers between {low} and {high}", instead)
        x = wide(w)
        self.raw = (jnp.log(x - self.low) - jnp.log(self.high - x)).astype(w.dtype)

    def to_dense(self) -> Array:
        raw, span = wide(self.raw), self.high - self.low
        # From the nearer end, so that it is precise at both. A weighted mean of the ends would be so too, but not its
        # derivative, where they are far from zero.
        x = jnp.where(raw < 0, self.low + span * jax.nn.sigmoid(raw), self.high - span * jax.nn.sigmoid(-raw))
        least, most = _inward(self.low, self.high, self.raw.dtype)
        return _clamped(x, least, most).astype(self.raw.dtype)


class UnitNorm(AbstractConstrained):
    """Vectors of Euclidean length one along an axis: `raw / norm(raw)`.

    >>> import jax.numpy as jnp
    >>> from treeparams import matrices
    >>> rows = matrices.UnitNorm.normalise(jnp.array([[2.0, 2.0, 2.0, 2.0], [0.0, 3.0, 0.0, 0.0]]))
    >>> matrices.materialise(rows)
    Array([[0.5, 0.5, 0.5, 0.5],
           [0. , 1. , 0. , 0. ]], dtype=float32)

    The length of `raw` does not matter. Where `raw` is zero the value is `(1, 0, 0, ...)`, with a gradient of zero.

    Args:
        w: of length one along the axis, to within the square root of the dtype's precision.
        axis: of the vectors. It is kept counted from the end, so that it is the same one in an ensemble.
    """

    raw: Float[Array, "..."]
    axis: int = eqx.field(static=True)

    def __init__(self, w: Array | np.ndarray, axis: int = -1):
        w = as_real(w)
        self.raw = jnp.array(w, w.dtype)  # a copy, or the raw parameters of two nodes of one value would be tied
        self.axis = _from_the_end(axis, self.raw.shape)
        if (entries := concrete(self.raw)) is not None:
            norms = np.linalg.norm(entries, axis=self.axis)
            expected = f"vectors of norm 1 along axis {axis}"
            refuse(self, norms, _is_one(norms, self.raw.dtype), expected, f"UnitNorm.normalise(w, axis={axis})")

    @classmethod
    def normalise(cls, w: Array | np.ndarray, axis: int = -1) -> "UnitNorm":
        """Vectors of any finite length along the axis, divided by it; zeros become `(1, 0, 0, ...)`."""
        w = as_real(w)
        return cls(_unit(w, _from_the_end(axis, w.shape)), axis)

    def to_dense(self) -> Array:
        return _unit(self.raw, self.axis)


class Simplex(AbstractConstrained):
    """Positive numbers that sum to one along an axis, such as probabilities: `softmax(raw)`.

    >>> import jax.numpy as jnp
    >>> from treeparams import matrices
    >>> matrices.materialise(matrices.Simplex(jnp.array([0.5, 0.25, 0.25])))
    Array([0.5 , 0.25, 0.25], dtype=float32)

    A number added to all of `raw` along the axis changes nothing.

    Args:
        w: positive, with sums along the axis of one, to within the square root of the dtype's precision.
        axis: of the sums. It is kept counted from the end, so that it is the same one in an ensemble.
    """

    raw: Float[Array, "..."]
    axis: int = eqx.field(static=True)

    def __init__(self, w: Array | np.ndarray, axis: int = -1):
        w = as_real(w)
        self.axis = _from_the_end(axis, w.shape)
        if (entries := concrete(w)) is not None:
            fine = entries >= least_positive(w.dtype)
            refuse(self, entries, fine, "positive numbers", f"Simplex(jax.nn.softmax(w, axis={axis}), axis={axis})")
            sums = np.sum(entries, axis=self.axis)
            instead = f"Simplex(w / jnp.sum(w, axis={axis}, keepdims=True), axis={axis})"
            refuse(self, sums, _is_one(sums, w.dtype), f"numbers with sums of 1 along axis {axis}", instead)
        self.raw = jnp.log(wide(w)).astype(w.dtype)

    def to_dense(self) -> Array:
        # By rounding the least would be zeros, of which a logarithm has no gradient.
        x = jax.nn.softmax(wide(self.raw), axis=self.axis)
        return jnp.maximum(x, least_positive(self.raw.dtype)).astype(self.raw.dtype)


def softplus(x: Array, least: float) -> Array:
    """The logarithm of one plus the exponential, but not less than that."""
    return jnp.maximum(jax.nn.softplus(x), least)


def inverse_softplus(w: Array) -> Array:
    """The x with softplus(x) = w."""
    # log(exp(w) - 1) neither overflows nor cancels when it is written so.
    return w + jnp.log(-jnp.expm1(-w))


def _inward(low: float, high: float, dtype: DTypeLike) -> tuple[float, float]:
    """The least and the largest number of the dtype that are not outside of two numbers."""
    with np.errstate(over="ignore"):
        least, most = np.asarray(low, dtype), np.asarray(high, dtype)
    if float(least) < low:
        least = np.nextafter(least, np.asarray(np.inf, dtype))
    if float(most) > high:
        most = np.nextafter(most, np.asarray(-np.inf, dtype))
    # Numbers nearer to zero than the normal ones become zero on most devices.
    tiny = least_positive(dtype)
    least = tiny if 0 < least < tiny else float(least)
    return least, -tiny if -tiny < most < 0 else float(most)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _clamped(x: Array, least: float, most: float) -> Array:
    """Entries that rounding put outside, back inside. The derivative is that of the function that is not rounded."""
    return jnp.clip(x, least, most)


@_clamped.defjvp
def _clamped_jvp(least: float, most: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _clamped(*primals, least, most), tangents[0]


def _unit(x: Array | np.ndarray, axis: int) -> Array:
    vectors, is_zero = scaled(wide(x), axis)
    first = (jnp.arange(x.shape[axis]) == 0).astype(vectors.dtype).reshape(-1, *[1] * (-axis - 1))
    vectors = jnp.where(is_zero, jnp.broadcast_to(first, x.shape), vectors)
    return (vectors / jnp.linalg.norm(vectors, axis=axis, keepdims=True)).astype(x.dtype)


def _from_the_end(axis: int, shape: tuple[int, ...]) -> int:
    axis = operator.index(axis)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"an array of shape {shape} has no axis {axis}")
    return axis if axis < 0 else axis - len(shape)


def _is_one(entries: np.ndarray | np.floating, dtype: DTypeLike) -> np.ndarray | np.bool_:
    return abs(entries - 1) <= float(jnp.finfo(dtype).eps) ** 0.5


Bounded.__module__ = Positive.__module__ = Simplex.__module__ = UnitNorm.__module__ = "treeparams.matrices"
