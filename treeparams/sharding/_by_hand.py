"""Collectives inside `jax.shard_map`: gathers an array from the devices, and sums and divides its gradient."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Dims = Sequence[tuple[int, tuple[str, ...]]]
"""The split axes of an array, each with its axes of the mesh; made by `Axes.by_hand`."""


def gather(array: jax.Array, split: Dims, shift: int = 0) -> jax.Array:
    """Gathers the whole array from the devices' shares. `shift` is added to the axes in `split`."""
    for dim, names in split:
        if array.ndim == 1:
            array = _gather_vector(array, names)
        else:
            array = jax.lax.all_gather(array, names, axis=dim + shift, tiled=True)
    return array


def scatter(gradient: jax.Array, split: Dims, shift: int = 0) -> jax.Array:
    """Returns the device's share of the sum of gradients over the devices; the transpose of `gather`."""
    # In the opposite order: an axis of the array may be split over several axes of the mesh, one after another.
    for dim, names in reversed(split):
        if gradient.ndim == 1:
            gradient = _scatter_vector(gradient, names)
        else:
            gradient = jax.lax.psum_scatter(gradient, names, scatter_dimension=dim + shift, tiled=True)
    return gradient


def summed(gradient: jax.Array, split: Dims, batch: Sequence[str]) -> jax.Array:
    """Sums gradients over the devices along the batch, except along axes where they are already summed."""
    left = tuple(name for name in batch if all(name not in names for _, names in split))
    return jax.lax.psum(gradient, left) if left else gradient


# -- Vectors, in rows --------------------------------------------------------------------------------------------------

# XLA for TPU has no reduce-scatter of a vector: it sums the whole vector on all devices, which moves twice as much, and
# each device keeps its share. A first axis over the shares does not change that. And if the shares of a vector are not
# whole lines of 128 numbers, as in the registers of a TPU, XLA gathers it as a sum with zeros. For rows of one line
# it compiles a real reduce-scatter and a real all-gather. On other devices a vector and its rows are the same
# bytes, and nothing changes.
_LINE = 128


def _filling(share: int) -> int:
    """Returns how many numbers fill a share up to whole lines; 0 if that would add 1% or more."""
    filling = -share % _LINE
    return filling if 100 * filling < share else 0


def _rows(shares: jax.Array, length: int) -> jax.Array:
    """Reshapes one share, or all shares one after another, into rows of a line; unchanged if they do not divide."""
    filling = _filling(length)
    if filling:
        shares = jnp.pad(shares.reshape(-1, length), ((0, 0), (0, filling)))
    return shares if (length + filling) % _LINE else shares.reshape(-1, _LINE)


def _shares(rows: jax.Array, length: int) -> jax.Array:
    """Inverts `_rows`."""
    filling = _filling(length)
    return rows.reshape(-1, length + filling)[:, :length].reshape(-1) if filling else rows.reshape(-1)


def _gather_vector(share: jax.Array, names: tuple[str, ...]) -> jax.Array:
    (length,) = share.shape
    return _shares(jax.lax.all_gather(_rows(share, length), names, tiled=True), length)


def _scatter_vector(gradient: jax.Array, names: tuple[str, ...]) -> jax.Array:
    length = gradient.shape[0] // jax.lax.psum(1, names)
    return _shares(jax.lax.psum_scatter(_rows(gradient, length), names, tiled=True), length)
