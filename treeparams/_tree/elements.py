"""How two arrays of one shape differ in their elements, by value."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from .difference import Difference
from .dtypes import is_complex, is_inexact

_AT_ONCE = 1 << 18  # elements; of more than these no temporary is made


def elements(
    path: str, here: jax.Array | np.ndarray, there: jax.Array | np.ndarray, tolerance: tuple[float, float]
) -> Iterator[Difference]:
    """Yields the row for two arrays of one shape, if their elements differ by more than `(atol, rtol)`."""
    are_keys = [jnp.issubdtype(each.dtype, jax.dtypes.prng_key) for each in (here, there)]
    if (any(are_keys) and here.dtype != there.dtype) or jax.dtypes.float0 in (here.dtype, there.dtype):
        return
    if any(are_keys):
        here, there = jax.random.key_data(here), jax.random.key_data(there)
    first, second = np.asarray(here).reshape(-1), np.asarray(there).reshape(-1)
    is_exact = any(are_keys) or bool in (first.dtype, second.dtype)
    atol, rtol = (0.0, 0.0) if is_exact else tolerance
    largest, relative, differing, largest_at, nans = 0.0, 0.0, 0, 0, [0, 0]
    # Slice by slice: two arrays may be most of the memory, and the temporaries in double precision would be twice them.
    for start in range(0, first.size, _AT_ONCE):
        x, y = first[start : start + _AT_ONCE], second[start : start + _AT_ONCE]
        if first.dtype == second.dtype and not (x != y).any():  # nor is there a NaN
            continue
        with np.errstate(all="ignore"):
            gaps, sizes = _gaps(x, y, nans)
            far = gaps > 0
            if atol or rtol:
                far &= ~((gaps <= atol + rtol * sizes) & np.isfinite(gaps))
            if not far.any():
                continue
            gaps = np.where(far, gaps, 0)
            ratios = np.where(far, gaps / sizes, 0)
        differing += int(np.count_nonzero(far))
        relative = max(relative, float(np.where(np.isnan(ratios), np.inf, ratios).max()))
        at = int(gaps.argmax())
        if gaps[at] > largest:
            largest, largest_at = float(gaps[at]), start + at
    if differing:
        words = str(first[largest_at]), str(second[largest_at])
        yield Difference(path, "elements", *words, largest, relative, differing, first.size, (nans[0], nans[1]))


def _gaps(x: np.ndarray, y: np.ndarray, nans: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distances of elements, and the sizes of the second ones, in double precision; counts NaNs."""
    dtype = np.result_type(*(each.dtype if each.dtype.kind in "iu" else np.int64 for each in (x, y)))
    if not is_inexact(x.dtype) and not is_inexact(y.dtype) and dtype.kind in "iu":
        x, y = x.astype(dtype), y.astype(dtype)
        # The difference of two integers of 64 bits needs these bits and no sign: it is right where it wraps around.
        return np.where(x > y, x - y, y - x).view(f"u{dtype.itemsize}").astype(np.float64), np.abs(y.astype(np.float64))
    wide = np.complex128 if is_complex(x.dtype) or is_complex(y.dtype) else np.float64
    x, y = x.astype(wide), y.astype(wide)
    for side, each in enumerate((x, y)):
        nans[side] += int(np.count_nonzero(np.isnan(each)))
    gaps = np.abs(x - y)
    # NaN comes of a NaN on either side and of infinities: all are infinitely far apart, but for those that are equal.
    gaps[np.isnan(gaps)] = math.inf
    gaps[_are_equal(np.real(x), np.real(y)) & _are_equal(np.imag(x), np.imag(y))] = 0
    return gaps, np.abs(y)


def _are_equal(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns whether numbers are equal, or both NaN; pass each part of a complex number separately."""
    return (x == y) | ((x != x) & (y != y))
