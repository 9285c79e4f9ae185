"""Inside of `jax.shard_map`: parameters that devices share, brought together, all at once or a layer at a time.

A gather is explicit, so that it is one collective where XLA would make many, and its transpose is explicit too: the
gradient is summed over the devices and divided among them at once (`psum_scatter`).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._forms.form import Form
from .._forms.layers import Source, alike_nodes
from .._forms.mesh import over_devices
from .._forms.restructure import Restructure
from .._forms.view import View
from .._slots.where import Where
from .._tree.types import PyTree
from ._specs import Axes

Dims = Sequence[tuple[int, tuple[str, ...]]]
"""The axes of an array that are split, with those of the mesh; of `Axes.by_hand`."""


def gather(array: jax.Array, split: Dims, shift: int = 0) -> jax.Array:
    """The whole of an array of which each device has a share; `shift`: by how much its axes are later than `split`."""
    for dim, names in split:
        array = jax.lax.all_gather(array, names, axis=dim + shift, tiled=True)
    return array


def scatter(gradient: jax.Array, split: Dims, shift: int = 0) -> jax.Array:
    """The device's own share of the sum of gradients over the devices: `gather` transposed."""
    # In the opposite order: an axis of the array may be split over several axes of the mesh, one after another.
    for dim, names in reversed(split):
        gradient = jax.lax.psum_scatter(gradient, names, scatter_dimension=dim + shift, tiled=True)
    return gradient


def summed(gradient: jax.Array, split: Dims, batch: Sequence[str]) -> jax.Array:
    """The sum of gradients over the devices along the batch, but for the axes along which they have been summed."""
    left = tuple(name for name in batch if all(name not in names for _, names in split))
    return jax.lax.psum(gradient, left) if left else gradient


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
    within = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(array, NamedSharding(axes.mesh if within.empty else within, spec))


def _entries(array: jax.Array, split: Dims, shift: int, other: Any) -> list[Any]:
    names_of = {dim + shift: names for dim, names in split}
    return [names_of.get(dim, other) for dim in range(array.ndim)]


class _ShareSource(Source):
    """A model of which each device has a share of each array in stacks: an array that is cut out is gathered."""

    splits: Sequence[Dims]
    gathering: Gathering

    def whole(self, block: int, share: jax.Array, shift: int) -> jax.Array:
        """The whole of an array that is cut out of a split stack."""
        return self.gathering.gather(share, self.splits[block], shift, self.blocks[block].dtype)

    def pick(self, block: int, numbers: Collection[int]) -> dict[int, jax.Array]:
        """Arrays of these numbers, each whole."""
        # The stacks come first among the blocks. Behind them are those of frozen arrays, which are whole. Without the
        # axis over the rows, the axes of an array stand one earlier than those of the stack.
        found = super().pick(block, numbers)
        return found if block >= len(self.splits) else {n: self.whole(block, a, -1) for n, a in found.items()}

    def block(self, number: int, columns: Sequence[tuple[int, ...]]) -> list[jax.Array]:
        """The arrays of these numbers, those of each column as one, whole."""
        found = self.rows(number, columns) if number < len(self.splits) else None
        if found is None:
            return super().block(number, columns)  # of what `pick` gathers
        rows, pieces = found
        return pieces(self.whole(number, rows, 1))

    def shares(self, number: int, columns: Sequence[tuple[int, ...]]) -> tuple[jax.Array, int, Callable[..., Any]]:
        """This device's share of these arrays, those of each node as one, with an axis over the nodes.

        And for one node: how its axes lie to those of the stack, as `gather` asks, and a function that cuts it when it
        is whole.
        """
        # One gather for each layer, whatever the number of its arrays in this stack. Where the layers lie one after
        # another, a layer is a span of rows and is cut after it is gathered; one array of each layer needs no axis over
        # rows. Where they do not, the arrays of each layer are picked first, and stacked along an axis of their own.
        found = self.rows(number, columns)
        if found is not None and len(columns) > 1:
            return found[0], 0, found[1]
        if found is not None:
            rows, pieces = found
            return pieces(rows)[0], -1, lambda whole: [whole]
        shares = super().pick(number, {each for column in columns for each in column})
        return jnp.stack([jnp.stack([shares[each] for each in column]) for column in columns], 1), 0, list


class DeviceShare:
    """One device's share of stacks, for `restructure` alone: a sum over it would be one over a share, in silence."""

    def __init__(self, stacks: PyTree) -> None:
        """For this library's own use; a loss with `split="parameters"` is given it."""
        self.stacks = stacks

    def refuse(self, *_: object) -> Any:
        """Says how to write it instead."""
        raise TypeError(
            "parameters are split, and a device has a part of each; take them by the restructure: "
            'restructure.scan(layer, x, params, "layers.*"), restructure.part(params, "head"), restructure(params)'
        )

    __getitem__ = __iter__ = refuse


# So that no function of trees passes over it.
jtu.register_pytree_node(DeviceShare, DeviceShare.refuse, DeviceShare.refuse)


class ShareRestructure(Restructure[Any]):
    """A `Restructure` over one device's share of stacks. It gathers the nodes that you ask for, and nothing else."""

    splits: Sequence[Dims]  # of each stack
    gathering: Gathering

    @classmethod
    def over(cls, whole: Restructure[Any], splits: Sequence[Dims], gathering: Gathering) -> "ShareRestructure":
        """That of the shares of stacks, from the one of the whole."""
        return cls.of_halves((whole._form, whole._held, tuple(splits), gathering), (whole._rest, whole._stacks))

    def __call__(self, form: Any) -> Any:
        """The model, of whole stacks."""
        return super().__call__(self._whole(form))

    def view(self, form: Any) -> View:
        """Names over whole stacks."""
        return super().view(self._whole(form))

    def _whole(self, form: DeviceShare) -> PyTree:
        leaves, treedef = jtu.tree_flatten(form.stacks)
        triples = zip(leaves, self.splits, self._form.blocks, strict=True)
        return treedef.unflatten([self.gathering.gather(leaf, its, 0, block.dtype) for leaf, its, block in triples])

    def halves(self) -> tuple[Any, Any]:
        """Its arrays, and its static half."""
        return (self._rest, self._stacks), (self._form, self._held, self.splits, self.gathering)

    @classmethod
    def of_halves(
        cls, static: tuple[Form, Form, Sequence[Dims], Gathering], arrays: Sequence[Any]
    ) -> "ShareRestructure":
        """The inverse of `halves`."""
        form, held, splits, gathering = static
        restructure = cls(arrays[0], form, held, arrays[1])
        restructure.splits, restructure.gathering = splits, gathering
        return restructure

    def _source(self, form: Any) -> _ShareSource:
        source = _ShareSource(self._rest, [(self._form, jax.tree.leaves(form.stacks)), (self._held, self._stacks)])
        source.splits, source.gathering = self.splits, self.gathering
        # The blocks say how long whole rows are, and a device has shorter ones.
        for block in range(len(self.splits)):
            count, *row = source.leaves[block].shape
            rows = (tuple(row),) * count
            source.blocks[block] = dataclasses.replace(source.blocks[block], shapes=rows)
        return source

    def scan(
        self, step: Callable[..., Any], carry: Any, form: Any, where: Where, xs: PyTree = None, **options: Any
    ) -> tuple[Any, Any]:
        """As that of `Restructure`: each layer is gathered when its turn comes.

        On the way back it is gathered, and computed, once more: so of all layers only their inputs are kept.
        """
        source = self._source(form)
        found = alike_nodes(source, where)
        # Gathered in each turn are the columns that lie in one split stack for all layers. Any other one - of frozen
        # arrays, or of layers that lie in different stacks - is brought together before the scan.
        of_block: dict[int, list[int]] = {}
        for j, column in enumerate(found.columns):
            block, one_block = column[0].block, len({at.block for at in column}) == 1
            if block is not None and one_block and block < len(self.splits) and self.splits[block]:
                of_block.setdefault(block, []).append(j)
        gathered = {j for its in of_block.values() for j in its}
        others = [j for j in range(len(found.columns)) if j not in gathered]
        along = dict(zip(others, source.along([found.columns[j] for j in others]), strict=True))
        same = source.one_by_one(found.locations)
        numbers = [tuple(at.number for at in column) for column in found.columns]
        found_shares = {block: source.shares(block, [numbers[j] for j in its]) for block, its in of_block.items()}
        shares = {block: share for block, (share, _, _) in found_shares.items()}

        @jax.checkpoint
        def turn(carry: Any, each: tuple[Any, ...]) -> Any:
            shares, along, further = each
            arrays = dict(along)
            for block, share in shares.items():
                _, shift, pieces = found_shares[block]
                pairs = zip(of_block[block], pieces(source.whole(block, share, shift)), strict=True)
                arrays |= {j: source.value(found.columns[j][0], piece) for j, piece in pairs}
            return step(carry, found.node([arrays[j] for j in range(len(found.columns))], same), *further)

        further = () if xs is None else (xs,)
        return jax.lax.scan(turn, carry, (shares, along, further), found.nodes, **options)


jtu.register_pytree_node(ShareRestructure, ShareRestructure.halves, ShareRestructure.of_halves)
