"""Arrays that devices share, brought together.

A gather is explicit, so that it is one collective where XLA would make many, and its transpose is explicit too: the
gradient is summed over the devices and divided among them at once.
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
    """How shares are brought together where a loss asks for them.

    By hand, each device for itself within `jax.shard_map`; or from arrays that lie over the mesh, of which XLA knows
    where they lie.
    """

    axes: Axes
    is_automatic: bool

    def gather(self, share: jax.Array, split: Dims, shift: int, dtype: DTypeLike) -> jax.Array:
        """The whole of an array, in a dtype; its gradient is summed over the devices in the dtype of the share."""
        if self.is_automatic:
            return _laid_whole(share, self.axes, split, shift, _Cast(dtype, share.dtype))
        if share.dtype == dtype:
            return gather(share, split, shift)
        return _gathered_in(share, split, shift, _Cast(dtype, share.dtype))

    def divided(self, stack: jax.Array, spec: PartitionSpec) -> tuple[jax.Array, Dims]:
        """A stack of which each device has a share of each row, and which axes are split.

        Where each device has whole rows they are divided, all at once, by one exchange between all devices. So a layer
        can be gathered from all devices, as if rows had been split at rest; broadcast by its owner it would have to be
        summed with zeros. Rows that cannot be divided are gathered.
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
    """An array is gathered in one dtype, and its gradient summed in another, its own."""

    gathered: DTypeLike
    own: DTypeLike


class Whole(NamedTuple):
    """How a frozen array is brought together: along which axes, and in which dtype; none in its own."""

    split: Dims
    dtype: Any

    def of(self, share: Any, gathering: Gathering) -> Any:
        """The whole of an array, of the share of a device."""
        is_as_it_is = not self.split and self.dtype is None
        return share if is_as_it_is else gathering.gather(share, self.split, 0, self.dtype or share.dtype)


AS_IT_IS = Whole((), None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered_in(share: jax.Array, split: Dims, shift: int, dtypes: _Cast) -> jax.Array:
    """Cast before it is moved; the gradient is cast before it is summed."""
    return gather(share.astype(dtypes.gathered), split, shift)


def _gathered_forwards(share: jax.Array, split: Dims, shift: int, dtypes: _Cast) -> tuple[jax.Array, None]:
    return _gathered_in(share, split, shift, dtypes), None


def _gathered_back(split: Dims, shift: int, dtypes: _Cast, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (scatter(gradient.astype(dtypes.own), split, shift),)


_gathered_in.defvjp(_gathered_forwards, _gathered_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _laid_whole(share: jax.Array, axes: Axes, split: Dims, shift: int, dtypes: _Cast) -> jax.Array:
    """An array over the mesh, brought together by one gather; left to itself XLA would make many."""
    spec = PartitionSpec(*_entries(share, split, shift, None))
    bring = lambda share: gather(share.astype(dtypes.gathered), split, shift)
    return over_devices(bring, axes.mesh, (spec,), PartitionSpec(), axes.batch)(share)


def _laid_forwards(share: jax.Array, axes: Axes, split: Dims, shift: int, dtypes: _Cast) -> tuple[jax.Array, None]:
    return _laid_whole(share, axes, split, shift, dtypes), None


def _laid_back(axes: Axes, split: Dims, shift: int, dtypes: _Cast, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (constrained(gradient, axes, split, shift).astype(dtypes.own),)


_laid_whole.defvjp(_laid_forwards, _laid_back)


def constrained(array: jax.Array, axes: Axes, split: Dims, shift: int) -> jax.Array:
    """An array under automatic partitioning that lies along the batch as said, and along other axes as XLA likes."""
    return constrained_to(array, PartitionSpec(*_entries(array, split, shift, PartitionSpec.UNCONSTRAINED)), axes)


def constrained_to(array: jax.Array, spec: PartitionSpec, axes: Axes) -> jax.Array:
    """An array under automatic partitioning that lies by a spec."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh_within(axes.mesh), spec))


def _entries(array: jax.Array, split: Dims, shift: int, other: Any) -> list[Any]:
    names_of = {dim + shift: names for dim, names in split}
    return [names_of.get(dim, other) for dim in range(array.ndim)]
