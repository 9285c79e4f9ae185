"""Arrays that lie over several devices by type, as with `jax.make_mesh`, whose axes are explicit by default."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

try:
    from jax.sharding import reshard as _reshard
except ImportError:  # JAX 0.6
    from jax.experimental.shard import reshard as _reshard  # pyright: ignore[reportMissingImports]


def is_sharded(array: Any) -> bool:
    """Whether the type of an array says that it is split over a mesh.

    Arrays that are split in different ways cannot be joined without moving them.
    """
    spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", ())
    return any(axis is not None for axis in spec)


def replicated(array: Any) -> Any:
    """The array, whole on each device of its mesh."""
    if not is_sharded(array):
        return array
    sharding = NamedSharding(jax.typeof(array).sharding.mesh, PartitionSpec())
    return _reshard(array, sharding)


def is_varying(tree: Any) -> bool:
    """Whether any array of a tree differs from device to device by type, inside a `jax.shard_map`."""
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves(tree)]
    # The name of it has changed with JAX 0.10.
    kinds = [getattr(each, "manual_axis_type", None) for each in types]
    return any(getattr(each, "vma", None) for each in types) or any(getattr(each, "varying", None) for each in kinds)
