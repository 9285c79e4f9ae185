"""Arrays that are split over devices by type, as with `jax.make_mesh`, whose axes are explicit by default."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard
from jax.typing import ArrayLike

from .._tree.types import PyTree


def is_sharded(array: ArrayLike) -> bool:
    """Returns whether the type of an array says that it is split over a mesh."""
    spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", ())
    return any(axis is not None for axis in spec)


def replicated(array: jax.Array, axes: int | None = None) -> jax.Array:
    """Returns the array, whole on each device of its mesh along its first axes; `None` means along all of them."""
    sharding = jax.typeof(array).sharding if is_sharded(array) else None
    if sharding is None or not any(axis is not None for axis in sharding.spec[:axes]):
        return array
    rest = sharding.spec[array.ndim if axes is None else axes :]
    return reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*[None] * (axes or 0), *rest)))


def laid_as(array: jax.Array, like: ArrayLike) -> jax.Array:
    """Returns the array split over the devices like another; unchanged if the other is whole on each device."""
    # Where an array lies is part of its type on an explicit mesh, and a fact about its buffers on any other. A tracer
    # has the type alone.
    if is_sharded(like) and (isinstance(array, Tracer) or isinstance(like, Tracer)):
        return reshard(array, jax.typeof(like).sharding)
    sharding = None if isinstance(array, Tracer) else split(like)
    return array if sharding is None else jax.device_put(array, sharding)


def split(array: ArrayLike) -> NamedSharding | None:
    """Returns the sharding of an array that is split over devices; `None` if each has all of it, or if it is traced."""
    sharding = None if isinstance(array, Tracer) else getattr(array, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated else None


def _in_shard_map() -> bool:
    """Returns whether this code runs inside a `jax.shard_map`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varying(aval: Any) -> frozenset[str]:
    """Returns the mesh axes along which an array differs between devices by type, inside a `jax.shard_map`."""
    kind = getattr(aval, "manual_axis_type", None)  # `vma` before JAX 0.10
    return frozenset(getattr(aval, "vma", None) or () if kind is None else kind.varying)


def result_varies(f: Callable[..., Any], *args: PyTree) -> frozenset[str]:
    """Returns the axes along which a function's result differs between devices; outside `shard_map` there are none."""
    if not _in_shard_map():
        return frozenset()
    return frozenset[str]().union(*map(varying, jax.make_jaxpr(f)(*args).out_avals))


def varying_alike(arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays with types that vary along all of the axes along which any of them does."""
    if not _in_shard_map():
        return list(arrays)
    union = frozenset[str]().union(*[varying(jax.typeof(array)) for array in arrays])
    return [vary(array, union) for array in arrays]


def vary(array: ArrayLike, axes: frozenset[str]) -> Any:
    """Returns the array with a type that varies along these axes, too."""
    added = tuple(axes - varying(jax.typeof(array))) if axes else ()
    if not added:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, added, to="varying")
    return jax.lax.pvary(array, added)  # pyright: ignore[reportAttributeAccessIssue] - before JAX 0.9


def lay(tree: PyTree, shardings: PyTree) -> PyTree:
    """Places traced arrays on a mesh; `shardings` is a tree like that of the arrays, or like the top of it."""
    placed_by = lambda to: reshard if AxisType.Explicit in to.mesh.axis_types else jax.lax.with_sharding_constraint
    return jax.tree.map(lambda to, below: jax.tree.map(lambda leaf: placed_by(to)(leaf, to), below), shardings, tree)
