"""Inside of `jax.shard_map`: one array gathered from devices that share it, and its gradient summed and divided."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Dims = Sequence[tuple[int, tuple[str, ...]]]
"""The axes of an array that are split, with those of the mesh; of `Axes.by_hand`."""


def gather(array: jax.Array, split: Dims, shift: int = 0) -> jax.Array:
    """The whole of an array of which each device has a share; `shift`: by how much its axes are later than `split`."""
    for dim, names in split:
        if array.ndim == 1:
            array = _gather_vector(array, names)
        else:
            array = jax.lax.all_gather(array, names, axis=dim + shift, tiled=True)
    return array


def scatter(gradient: jax.Array, split: Dims, shift: int = 0) -> jax.Array:
    """The device's own share of the sum of gradients over the devices: `gather` transposed."""
    # In the opposite order: an axis of the array may be split over several axes of the mesh, one after another.
    for dim, names in reversed(split):
        if gradient.ndim == 1:
            gradient = _scatter_vector(gradient, names)
        else:
            gradient = jax.lax.psum_scatter(gradient, names, scatter_dimension=dim + shift, tiled=True)
    return gradient


def summed(gradient: jax.Array, split: Dims, batch: Sequence[str]) -> jax.Array:
    """The sum of gradients over the devices along the batch, but for the axes along which they have been summed."""
    left = tuple(name for name in batch if all(name not in names for _, names in split))
    return jax.lax.psum(gradient, left) if left else gradient


# -- Vectors, in rows --------------------------------------------------------------------------------------------------

# XLA for TPU has no reduce-scatter of a vector: all of it is summed on all devices, which moves twice as much, and each
# device takes its share of that. With a first axis over the shares it does the same. A vector whose shares are not so
# many whole lines of 128 numbers, as registers of a TPU have them, it gathers by a sum with zeros. In rows of a line
# both are what they are called. On other devices a vector and its rows are the same bytes, and nothing changes.
_LINE = 128


def _filling(share: int) -> int:
    """By how many numbers a share is filled to whole lines; by none where a hundredth more would be moved."""
    filling = -share % _LINE
    return filling if 100 * filling < share else 0


def _rows(shares: jax.Array, length: int) -> jax.Array:
    """A share, or all shares one after another, each of this length, in rows; as they are if these are not whole."""
    filling = _filling(length)
    if filling:
        shares = jnp.pad(shares.reshape(-1, length), ((0, 0), (0, filling)))
    return shares if (length + filling) % _LINE else shares.reshape(-1, _LINE)


def _shares(rows: jax.Array, length: int) -> jax.Array:
    """The inverse of `_rows`."""
    filling = _filling(length)
    return rows.reshape(-1, length + filling)[:, :length].reshape(-1) if filling else rows.reshape(-1)


def _gather_vector(share: jax.Array, names: tuple[str, ...]) -> jax.Array:
    (length,) = share.shape
    return _shares(jax.lax.all_gather(_rows(share, length), names, tiled=True), length)


def _scatter_vector(gradient: jax.Array, names: tuple[str, ...]) -> jax.Array:
    length = gradient.shape[0] // jax.lax.psum(1, names)
    return _shares(jax.lax.psum_scatter(_rows(gradient, length), names, tiled=True), length)
