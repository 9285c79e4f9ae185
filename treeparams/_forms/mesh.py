"""Arrays that are split over devices by type, as with `jax.make_mesh`, whose axes are explicit by default."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, auto_axes, reshard
from jax.typing import ArrayLike

from .._tree.types import PyTree


def is_sharded(array: ArrayLike) -> bool:
    """Returns whether the type of an array says that it is split over a mesh."""
    spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", ())
    return any(axis is not None for axis in spec)


def replicated(array: jax.Array) -> jax.Array:
    """Returns the array, whole on each device of its mesh."""
    if not is_sharded(array):
        return array
    sharding = NamedSharding(jax.typeof(array).sharding.mesh, PartitionSpec())
    return reshard(array, sharding)


def first_axis_whole(array: jax.Array) -> jax.Array:
    """Returns the array with its first axis whole on each device of its mesh, and the others split as they are."""
    if not is_sharded(array) or _leading_axis(array) is None:
        return array
    sharding = jax.typeof(array).sharding
    return reshard(array, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:])))


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


def broadcast_as(array: jax.Array, size: int, like: Sequence[jax.Array] = ()) -> jax.Array:
    """Stacks `size` copies of the array, the leading axis split over a mesh as that of the others is by type."""
    axis = next(filter(None, map(_leading_axis, like)), None)
    if axis is None:
        return jax.lax.broadcast(array, (size,))
    sharding = jax.typeof(array).sharding
    spec = PartitionSpec(axis, *sharding.spec)
    return jax.lax.broadcast(array, (size,), out_sharding=NamedSharding(sharding.mesh, spec))


def _leading_axis(array: jax.Array) -> Any:
    """Returns the axes of the mesh along which the leading axis of an array is split by type, or `None`."""
    return jax.typeof(array).sharding.spec[0]


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
    found = [varying(jax.typeof(array)) for array in arrays]
    union = frozenset[str]().union(*found)
    return [vary(array, union - its) for array, its in zip(arrays, found, strict=True)]


def vary(array: ArrayLike, axes: frozenset[str]) -> Any:
    """Returns the array with a type that varies along further axes."""
    if not axes:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, tuple(axes), to="varying")
    return jax.lax.pvary(array, tuple(axes))  # pyright: ignore[reportAttributeAccessIssue] - before JAX 0.9


def mesh_within(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns the mesh of the current trace: inside `automatic`, the axes of a mesh have another type."""
    within = jax.sharding.get_abstract_mesh()
    return mesh if within.empty else within


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether types record the placement of arrays over the mesh."""
    return AxisType.Explicit in mesh.axis_types


def lay(tree: PyTree, shardings: PyTree) -> PyTree:
    """Places traced arrays on a mesh; `shardings` is a tree like that of the arrays, or like the top of it."""
    placed_by = lambda to: reshard if is_explicit(to.mesh) else jax.lax.with_sharding_constraint
    return jax.tree.map(lambda to, below: jax.tree.map(lambda leaf: placed_by(to)(leaf, to), below), shardings, tree)


def automatic(f: Callable[..., Any], shardings: PyTree, mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """Returns a function of traced arrays in which XLA alone decides their placement, except for the results."""
    if not is_explicit(mesh):
        return lambda *args: lay(f(*args), shardings)
    # JAX 0.7 takes no concrete mesh here.
    types = jax.tree.map(lambda each: NamedSharding(each.mesh.abstract_mesh, each.spec), shardings)
    return auto_axes(f, out_sharding=types)
