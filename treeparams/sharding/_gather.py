"""Gathers arrays that devices share.

A gather is explicit, so that it is one collective where XLA would make many. Its transpose is explicit too: one
collective sums the gradient over the devices and divides it among them.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._forms.mesh import mesh_within, over_devices
from ._by_hand import Dims, gather, scatter
from ._specs import Axes


class Gathering(NamedTuple):
    """How shares are gathered when a loss asks for them.

    Either by hand, each device for itself within `jax.shard_map`; or from arrays over the mesh, whose shardings XLA
    knows.
    """

    axes: Axes
    is_automatic: bool

    def gather(self, share: jax.Array, split: Dims, shift: int, dtype: DTypeLike) -> jax.Array:
        """Gathers an array in a dtype; its gradient is summed over the devices in the dtype of the share."""
        if self.is_automatic:
            return _laid_whole(share, self.axes, split, shift, _Cast(dtype, share.dtype))
        if share.dtype == dtype:
            return gather(share, split, shift)
        return _gathered_in(share, split, shift, _Cast(dtype, share.dtype))

    def divided(self, stack: jax.Array, spec: PartitionSpec) -> tuple[jax.Array, Dims]:
        """Divides each row of a stack among the devices; returns the stack and its split axes.

        If devices own whole rows, one exchange between all devices divides all rows at once. Then a layer can be
        gathered from all devices, as if rows were always split; a broadcast by its owner would have to be a sum with
        zeros. Rows that cannot be divided are gathered.
        """
        split = self.axes.by_hand(spec)
        if not split or split[0][0] != 0:
            return stack, split
        (_, names), *others = split
        devices = self.axes.devices_along(names)
        # Where all devices see the whole stack, so they do its rows; by hand each has so many of them, but all columns.
        entries = [*spec, *[None] * stack.ndim]
        free = [dim for dim in range(1, stack.ndim) if entries[dim] is None and stack.shape[dim] % devices == 0]
        if not free:
            return self.gather(stack, split, 0, stack.dtype), ()
        after = ((free[0], names), *others)
        if self.is_automatic:
            return constrained(stack, self.axes, after, 0), after
        return jax.lax.all_to_all(stack, names, free[0], 0, tiled=True), after


class _Cast(NamedTuple):
    """The dtype in which an array is gathered, and its own, in which its gradient is summed."""

    gathered: DTypeLike
    own: DTypeLike


class Whole(NamedTuple):
    """How a frozen array is gathered: its split axes, and the dtype to gather it in; `None` keeps its dtype."""

    split: Dims
    dtype: Any

    def of(self, share: Any, gathering: Gathering) -> Any:
        """Gathers an array from the share of a device."""
        is_as_it_is = not self.split and self.dtype is None
        return share if is_as_it_is else gathering.gather(share, self.split, 0, self.dtype or share.dtype)


AS_IT_IS = Whole((), None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered_in(share: jax.Array, split: Dims, shift: int, dtypes: _Cast) -> jax.Array:
    """Casts an array before it is moved; the gradient is cast before it is summed."""
    return gather(share.astype(dtypes.gathered), split, shift)


def _gathered_forwards(share: jax.Array, split: Dims, shift: int, dtypes: _Cast) -> tuple[jax.Array, None]:
    return _gathered_in(share, split, shift, dtypes), None


def _gathered_back(split: Dims, shift: int, dtypes: _Cast, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (scatter(gradient.astype(dtypes.own), split, shift),)


_gathered_in.defvjp(_gathered_forwards, _gathered_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _laid_whole(share: jax.Array, axes: Axes, split: Dims, shift: int, dtypes: _Cast) -> jax.Array:
    """Gathers an array over the mesh by one collective; XLA would make many."""
    spec = PartitionSpec(*_entries(share, split, shift, None))
    bring = lambda share: gather(share.astype(dtypes.gathered), split, shift)
    return over_devices(bring, axes.mesh, (spec,), PartitionSpec(), axes.batch)(share)


def _laid_forwards(share: jax.Array, axes: Axes, split: Dims, shift: int, dtypes: _Cast) -> tuple[jax.Array, None]:
    return _laid_whole(share, axes, split, shift, dtypes), None


def _laid_back(axes: Axes, split: Dims, shift: int, dtypes: _Cast, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (constrained(gradient, axes, split, shift).astype(dtypes.own),)


_laid_whole.defvjp(_laid_forwards, _laid_back)


def constrained(array: jax.Array, axes: Axes, split: Dims, shift: int) -> jax.Array:
    """Constrains how an array lies along the batch axes under automatic partitioning; XLA decides the other axes."""
    return constrained_to(array, PartitionSpec(*_entries(array, split, shift, PartitionSpec.UNCONSTRAINED)), axes)


def constrained_to(array: jax.Array, spec: PartitionSpec, axes: Axes) -> jax.Array:
    """Constrains an array under automatic partitioning to a spec."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh_within(axes.mesh), spec))


def _entries(array: jax.Array, split: Dims, shift: int, other: Any) -> list[Any]:
    names_of = {dim + shift: names for dim, names in split}
    return [names_of.get(dim, other) for dim in range(array.ndim)]
