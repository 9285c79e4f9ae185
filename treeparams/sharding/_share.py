"""Stacks of which each device has a share, for a loss that reads them layer by layer."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._forms.form import Form
from .._forms.layers import Source, alike_nodes
from .._forms.restructure import Restructure, halves_of
from .._forms.view import View
from .._slots.parts import kept_arrays
from .._slots.where import Where
from .._tree.types import PyTree
from ._by_hand import Dims
from ._gather import AS_IT_IS, Gathering, Whole


class _ShareSource(Source):
    """A model of which each device has a share of each stacked array. An array that is read from it is gathered."""

    splits: Sequence[Dims]  # of all joined arrays
    of_singles: Sequence[Whole]  # of the frozen arrays that are in no stack
    gathering: Gathering

    def single(self, number: int) -> Any:
        """Returns the whole value of a leaf that is in no stack."""
        value = super().single(number)
        return self.of_singles[number].of(value, self.gathering) if number < len(self.of_singles) else value

    def whole(self, block: int, share: jax.Array, shift: int) -> jax.Array:
        """Gathers an array that is cut out of a split stack."""
        return self.gathering.gather(share, self.splits[block], shift, self.blocks[block].dtype)

    def pick(self, block: int, numbers: Collection[int]) -> dict[int, jax.Array]:
        """Returns the arrays with these numbers, each whole."""
        # A row has no axis over the rows, so its axes come one earlier than those of the stack.
        return {n: self.whole(block, array, -1) for n, array in super().pick(block, numbers).items()}

    def block(self, number: int, columns: Sequence[tuple[int, ...]]) -> list[jax.Array]:
        """Returns the arrays with these numbers, joined for each column, whole."""
        found = self.rows(number, columns)
        if found is None:
            return super().block(number, columns)  # of what `pick` gathers
        rows, pieces = found
        return pieces(self.whole(number, rows, 1))

    def shares(self, number: int, columns: Sequence[tuple[int, ...]]) -> tuple[jax.Array, int, Callable[..., Any]]:
        """Returns this device's share of these arrays, joined for each node, with an axis over the nodes.

        It also returns, for a single node, the `shift` from the axes of the stack to its axes, for `gather`, and a
        function that cuts the node into arrays when it is whole.
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
    """One device's share of stacks, which only `restructure` can open: a sum over it would silently be wrong."""

    def __init__(self, stacks: PyTree) -> None:
        """For internal use. A loss with `split="parameters"` gets one."""
        self.stacks = stacks

    def refuse(self, *_: object) -> Any:
        """Raises an error that says how to get at the parameters."""
        raise TypeError(
            "parameters are split, and a device has a part of each; read them through the restructure: "
            'restructure.scan(layer, x, params, "layers.*"), restructure.part(params, "head"), restructure(params)'
        )

    __getitem__ = __iter__ = refuse


# So that no function of trees passes over it.
jtu.register_pytree_node(DeviceShare, DeviceShare.refuse, DeviceShare.refuse)


class ShareRestructure(Restructure[Any]):
    """A `Restructure` over one device's share of stacks. It gathers only the nodes that you ask for."""

    splits: Sequence[Dims]  # of each stack
    of_rest: Sequence[Whole]  # of each of its own leaves, the frozen arrays
    gathering: Gathering

    @classmethod
    def over(
        cls, rest: Restructure[Any], splits: Sequence[Dims], of_rest: Sequence[Whole], gathering: Gathering
    ) -> "ShareRestructure":
        """Makes one for shares of stacks from the `Restructure` of the shares of frozen arrays."""
        singles, stacks, form, held = halves_of(rest)
        return cls.of_halves((form, held, tuple(splits), tuple(of_rest), gathering), (singles, stacks))

    def __call__(self, form: Any) -> Any:
        """Returns the model, from whole stacks."""
        leaves, treedef = jtu.tree_flatten((self._rest, self._stacks))
        whole = [each.of(leaf, self.gathering) for each, leaf in zip(self.of_rest, leaves, strict=True)]
        rest, stacks = treedef.unflatten(whole)
        return Restructure(rest, self._form, self._held, stacks)(self._whole(form))

    def view(self, form: Any) -> View:
        """Returns a view by name of the whole stacks."""
        return super().view(self._whole(form))

    def _whole(self, form: DeviceShare) -> PyTree:
        leaves, treedef = jtu.tree_flatten(form.stacks)
        triples = zip(leaves, self.splits, self._form.blocks, strict=True)
        return treedef.unflatten([self.gathering.gather(leaf, its, 0, block.dtype) for leaf, its, block in triples])

    def halves(self) -> tuple[Any, Any]:
        """Returns its arrays, and its static half."""
        return (self._rest, self._stacks), (self._form, self._held, self.splits, self.of_rest, self.gathering)

    @classmethod
    def of_halves(
        cls, static: tuple[Form, Form, Sequence[Dims], Sequence[Whole], Gathering], arrays: Sequence[Any]
    ) -> "ShareRestructure":
        """Inverts `halves`."""
        form, held, splits, of_rest, gathering = static
        restructure = cls(arrays[0], form, held, arrays[1])
        restructure.splits, restructure.of_rest, restructure.gathering = splits, of_rest, gathering
        return restructure

    def _source(self, form: Any) -> _ShareSource:
        source = _ShareSource(self._rest, [(self._form, jax.tree.leaves(form.stacks)), (self._held, self._stacks)])
        of_leaves = iter(self.of_rest)
        kept = kept_arrays(self._rest).values()
        source.of_singles = [AS_IT_IS if array is None else next(of_leaves) for array in kept]
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
        """Scans like `Restructure.scan`, but gathers each layer when its turn comes.

        In the backward pass each layer is gathered and computed again, so only the inputs of the layers are kept.
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


def divided_rest(
    rest: Restructure[Any], ways: Sequence[Whole], specs: Sequence[PartitionSpec], gathering: Gathering
) -> tuple[Restructure[Any], list[Whole]]:
    """Divides the owned rows of frozen arrays as those of stacks; returns them, and how each leaf is gathered."""
    leaves, treedef = jtu.tree_flatten(rest)
    _, stacks, _, _ = halves_of(rest)
    first = len(leaves) - len(stacks)
    pairs = [gathering.divided(leaf, spec) for leaf, spec in zip(leaves[first:], specs[first:], strict=True)]
    of_stacks = [Whole(split, way.dtype) for (_, split), way in zip(pairs, ways[first:], strict=True)]
    return treedef.unflatten([*leaves[:first], *(stack for stack, _ in pairs)]), [*ways[:first], *of_stacks]
