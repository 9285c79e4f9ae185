"""Inside of `jax.shard_map`: parameters that devices share, brought together, all at once or a layer at a time.

A gather is explicit, so that it is one collective where XLA would make many, and its transpose is explicit too: the
gradient is summed over the devices and divided among them at once.
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
from .._forms.restructure import Restructure, halves_of
from .._forms.view import View
from .._slots.parts import kept_arrays
from .._slots.where import Where
from .._tree.types import PyTree
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


_NOTHING = Whole((), None)


def divided_rest(
    rest: Restructure[Any], ways: Sequence[Whole], specs: Sequence[PartitionSpec], gathering: Gathering
) -> tuple[Restructure[Any], list[Whole]]:
    """Frozen arrays with rows that are owned divided as those of stacks are, and how each leaf is brought together."""
    leaves, treedef = jtu.tree_flatten(rest)
    _, stacks, _, _ = halves_of(rest)
    first = len(leaves) - len(stacks)
    pairs = [gathering.divided(leaf, spec) for leaf, spec in zip(leaves[first:], specs[first:], strict=True)]
    of_stacks = [Whole(split, way.dtype) for (_, split), way in zip(pairs, ways[first:], strict=True)]
    return treedef.unflatten([*leaves[:first], *(stack for stack, _ in pairs)]), [*ways[:first], *of_stacks]


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

    splits: Sequence[Dims]  # of all joined arrays
    of_singles: Sequence["Whole"]  # of the frozen arrays that are in no stack
    gathering: Gathering

    def single(self, number: int) -> Any:
        """The value of a leaf that is in no stack, whole."""
        value = super().single(number)
        return self.of_singles[number].of(value, self.gathering) if number < len(self.of_singles) else value

    def whole(self, block: int, share: jax.Array, shift: int) -> jax.Array:
        """The whole of an array that is cut out of a split stack."""
        return self.gathering.gather(share, self.splits[block], shift, self.blocks[block].dtype)

    def pick(self, block: int, numbers: Collection[int]) -> dict[int, jax.Array]:
        """Arrays of these numbers, each whole."""
        # Without the axis over the rows, the axes of an array stand one earlier than those of the stack.
        return {n: self.whole(block, array, -1) for n, array in super().pick(block, numbers).items()}

    def block(self, number: int, columns: Sequence[tuple[int, ...]]) -> list[jax.Array]:
        """The arrays of these numbers, those of each column as one, whole."""
        found = self.rows(number, columns)
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
    of_rest: Sequence["Whole"]  # of each of its own leaves, the frozen arrays
    gathering: Gathering

    @classmethod
    def over(
        cls, rest: Restructure[Any], splits: Sequence[Dims], of_rest: Sequence["Whole"], gathering: Gathering
    ) -> "ShareRestructure":
        """That of the shares of stacks, from the one of the shares of frozen arrays."""
        singles, stacks, form, held = halves_of(rest)
        return cls.of_halves((form, held, tuple(splits), tuple(of_rest), gathering), (singles, stacks))

    def __call__(self, form: Any) -> Any:
        """The model, of whole stacks."""
        leaves, treedef = jtu.tree_flatten((self._rest, self._stacks))
        whole = [each.of(leaf, self.gathering) for each, leaf in zip(self.of_rest, leaves, strict=True)]
        rest, stacks = treedef.unflatten(whole)
        return Restructure(rest, self._form, self._held, stacks)(self._whole(form))

    def view(self, form: Any) -> View:
        """Names over whole stacks."""
        return super().view(self._whole(form))

    def _whole(self, form: DeviceShare) -> PyTree:
        leaves, treedef = jtu.tree_flatten(form.stacks)
        triples = zip(leaves, self.splits, self._form.blocks, strict=True)
        return treedef.unflatten([self.gathering.gather(leaf, its, 0, block.dtype) for leaf, its, block in triples])

    def halves(self) -> tuple[Any, Any]:
        """Its arrays, and its static half."""
        return (self._rest, self._stacks), (self._form, self._held, self.splits, self.of_rest, self.gathering)

    @classmethod
    def of_halves(
        cls, static: tuple[Form, Form, Sequence[Dims], Sequence["Whole"], Gathering], arrays: Sequence[Any]
    ) -> "ShareRestructure":
        """The inverse of `halves`."""
        form, held, splits, of_rest, gathering = static
        restructure = cls(arrays[0], form, held, arrays[1])
        restructure.splits, restructure.of_rest, restructure.gathering = splits, of_rest, gathering
        return restructure

    def _source(self, form: Any) -> _ShareSource:
        source = _ShareSource(self._rest, [(self._form, jax.tree.leaves(form.stacks)), (self._held, self._stacks)])
        of_leaves = iter(self.of_rest)
        kept = kept_arrays(self._rest).values()
        source.of_singles = [_NOTHING if array is None else next(of_leaves) for array in kept]
        source.splits = [*self.splits, *(each.split for each in of_leaves)]
        source.gathering = self.gathering
        # The blocks say how long whole rows are, and a device has shorter ones.
        for block, leaf in enumerate(source.leaves):
            count, *row = leaf.shape
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
        # Gathered in each turn are the columns that lie in one split stack for all layers, of frozen arrays too. Any
        # other one, such as of layers that lie in different stacks, is brought together before the scan.
        of_block: dict[int, list[int]] = {}
        for j, column in enumerate(found.columns):
            block, one_block = column[0].block, len({at.block for at in column}) == 1
            if block is not None and one_block and source.splits[block]:
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
