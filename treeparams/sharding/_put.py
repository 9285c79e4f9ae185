"""Places arrays on a mesh, whether they are values, traced or shapes, so that no device ever holds all of them."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .._forms.block import Block, cast
from .._forms.mesh import automatic, lay, over_devices
from ._specs import first_divided, names_in


def put_leaf(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct, sharding: NamedSharding, is_own: bool = False) -> Any:
    """Places an array on a mesh, in a new buffer unless `is_own` says it has one; a shape gets its sharding."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        raise ValueError(
            "an AbstractMesh has no devices, so you can only look at a plan over it; make the mesh with jax.make_mesh, "
            "or pass jax.ShapeDtypeStructs, as jax.eval_shape returns them"
        )
    if isinstance(leaf, Tracer):
        return lay(leaf, sharding)
    if isinstance(leaf, np.ndarray):
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))
    if sharding.is_fully_addressable:
        # Copy first: `device_put` does not copy an array that is already on the device, even with `may_alias=False`.
        return jax.device_put(leaf if is_own else jnp.copy(leaf), sharding)
    if not getattr(leaf, "is_fully_addressable", True):
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    # Over several processes each gives what its own devices have.
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    values = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    array = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key else array


# -- Parameters of a traced model --------------------------------------------------------------------------------------
# An initialiser under `jax.jit` yields one traced array for each slot. If these were concatenated into a result that is
# split along the same axis, XLA would first gather all of them on each device.


def join_over(block: Block, slots: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    """Joins traced slots into a block that lies over a mesh; the result equals `block.join`, bit for bit."""
    first, *of_row = [*sharding.spec, None]
    names = names_in(first)
    mesh, arrays = sharding.mesh, [cast(jnp.asarray(slot), block.dtype) for slot in slots]
    devices = math.prod(mesh.shape[name] for name in names)
    if block.length is None or not arrays or devices == 1:
        # Of rows that are split within, each lies as it will in the stack.
        its = NamedSharding(mesh, PartitionSpec(*of_row[: block.rank]))
        rows = [lay(array, its) for array in arrays] if block.rank and any(of_row) else arrays
        return lay(block.join(rows), sharding)
    # First each slot is split along one of its axes. Constraints propagate to the code that makes the slot, so that
    # its random numbers are drawn in parts too.
    specs = [_divided(array.shape, names, devices) for array in arrays]
    laid = [lay(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]
    f = functools.partial(_share, block, specs, names, devices)

    def run(*laid: jax.Array) -> jax.Array:  # the mesh is asked for within `automatic`, where it is another one
        return over_devices(f, mesh, tuple(specs), PartitionSpec(first), names)(*laid)

    return automatic(run, sharding, mesh)(*laid)


def _divided(shape: tuple[int, ...], names: tuple[str, ...], devices: int) -> PartitionSpec:
    """Returns the spec that splits the first axis that devices can share; of an array without one, whole."""
    dim = first_divided(shape, devices)
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, names)


def _share(
    block: Block, specs: Sequence[PartitionSpec], names: tuple[str, ...], devices: int, *parts: jax.Array
) -> jax.Array:
    """Returns this device's share of a block, from its parts of all slots."""
    length, *row = block.shape
    own = jnp.zeros((length // devices, *row), block.dtype)
    begin = jax.lax.axis_index(names) * own.shape[0]
    alike: dict[Any, list[int]] = {}
    for n, (shape, part) in enumerate(zip(block.shapes, parts, strict=True)):
        if part.size:
            alike.setdefault((shape, part.shape), []).append(n)
    for numbers in alike.values():
        write = functools.partial(_write, names, specs[numbers[0]], begin)
        # One slot after another. In a loop, since XLA of CPU drops optimization barriers, and then gathers all at once.
        starts = jnp.asarray([block.starts[n] for n in numbers], begin.dtype)
        own, _ = jax.lax.scan(write, own, (jnp.stack([parts[n] for n in numbers]), starts))
    return own


def _write(
    names: tuple[str, ...], spec: PartitionSpec, begin: jax.Array, own: jax.Array, each: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    """Gathers one slot, and writes the part of it that belongs into this device's share, which starts at `begin`."""
    part, start = each
    whole = jax.lax.all_gather(part, names, axis=len(spec) - 1, tiled=True) if len(spec) else part
    return _written(own, whole.reshape(-1, *own.shape[1:]), start - begin), None


def _written(own: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
    """Writes rows into an array from `at` on, as far as they overlap; `at` may lie outside of the array."""
    count = min(len(own), len(rows))
    start = jnp.clip(at, 0, len(own) - count)
    numbers = start - at + jnp.arange(count, dtype=at.dtype)
    overlap = ((numbers >= 0) & (numbers < len(rows))).reshape(-1, *[1] * (own.ndim - 1))
    values = jnp.take(rows, numbers, axis=0, mode="clip")
    before = jax.lax.dynamic_slice_in_dim(own, start, count)
    return jax.lax.dynamic_update_slice_in_dim(own, jnp.where(overlap, values, before), start, 0)
