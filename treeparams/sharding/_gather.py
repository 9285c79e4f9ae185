"""Inside of `jax.shard_map`: what devices have of parameters brought together, whole or a layer at a time.

A gather is explicit, so that it is one collective where XLA would make many, and its transpose is explicit too: the
gradient is summed over the devices and divided among them at once (`psum_scatter`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._repeated import Place, Source, alike_nodes
from .._restructure import Resting, Restructure
from .._where import Where
from ._specs import Axes


def gather(array: Any, split: Sequence[tuple[int, tuple[str, ...]]], shift: int = 0) -> Any:
    """The whole of an array of which each device has a part; `split` is of `Axes.by_hand`."""
    for dim, names in split:
        array = jax.lax.all_gather(array, names, axis=dim + shift, tiled=True)
    return array


def scatter(gradient: Any, split: Sequence[tuple[int, tuple[str, ...]]], batch: Sequence[str]) -> Any:
    """The device's own part of the sum of gradients over the devices along the batch: `gather` transposed."""
    for dim, names in reversed(split):
        gradient = jax.lax.psum_scatter(gradient, names, scatter_dimension=dim, tiled=True)
    left = tuple(name for name in batch if all(name not in names for _, names in split))
    return jax.lax.psum(gradient, left) if left else gradient


# What only moves numbers. On the way back it is done again: so nothing that was gathered is kept until then, nor what
# is a copy of it, cut, transposed or in another dtype.
_MOVES = frozenset({
    "all_gather",
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "cut",
    "dynamic_slice",
    "gather",
    "join",
    "reshape",
    "rev",
    "select_n",
    "slice",
    "split",
    "squeeze",
    "transpose",
})


def gathered_again(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, for which what is gathered is gathered again on the way back. All else is kept, as usual."""
    return jax.checkpoint(f, policy=lambda primitive, *_, **__: primitive.name not in _MOVES)


class Spread(NamedTuple):
    """How the stacks of a plan are divided among devices."""

    axes: Axes
    specs: Sequence[PartitionSpec]  # of each stack

    def split(self, block: int) -> list[tuple[int, tuple[str, ...]]]:
        """The axes of a stack that are gathered explicitly."""
        return self.axes.by_hand(self.specs[block])

    def is_owned(self, block: int) -> bool:
        """Whether each device has whole rows of a stack."""
        return any(dim == 0 for dim, _ in self.split(block))


class _PartSource(Source):
    """A model of which each device has a part: what is cut out is gathered."""

    spread: Spread

    def pick(self, block: int, numbers: Any) -> dict[int, jax.Array]:
        """Arrays of these numbers, each whole."""
        if block >= len(self.spread.specs):  # frozen arrays
            return super().pick(block, numbers)
        split = self.spread.split(block)
        if not self.spread.is_owned(block):
            return {n: gather(row, split, -1) for n, row in super().pick(block, numbers).items()}
        # Rows at one place of all devices are gathered at once.
        leaf = self.leaves[block]
        own = len(leaf)
        found = {place: gather(leaf[place : place + 1], split) for place in {n % own for n in numbers}}
        return {n: found[n % own][n // own] for n in numbers}

    def block(self, number: int, columns: Sequence[tuple[int, ...]]) -> list[jax.Array]:
        """The arrays of these numbers, those of each column as one, whole."""
        if number >= len(self.spread.specs):
            return super().block(number, columns)
        split = self.spread.split(number)
        if not self.spread.is_owned(number):
            return [gather(array, split) for array in super().block(number, columns)]
        leaf, self.leaves[number] = self.leaves[number], gather(self.leaves[number], split)
        try:
            return super().block(number, columns)
        finally:
            self.leaves[number] = leaf

    def own_block(self, number: int, columns: Sequence[tuple[int, ...]]) -> list[jax.Array]:
        """As `block`, of what this device has of each array."""
        return super().block(number, columns)


class PartRestructure(Restructure[Any]):
    """A `Restructure` over what one device has of stacks. What is asked for is gathered, and nothing else."""

    spread: Spread

    @classmethod
    def over(cls, whole: Restructure[Any], form: Any, spread: Spread) -> "PartRestructure":
        """That of the parts of stacks, from the one of the whole."""
        part = cls(whole._rest, form, whole._held, whole._stacks)
        part.spread = spread
        return part

    def __call__(self, form: Resting) -> Any:
        """The model, of whole stacks."""
        leaves = jax.tree.leaves(form)
        whole = [gather(leaf, self.spread.split(block)) for block, leaf in enumerate(leaves)]
        return super().__call__(jax.tree.unflatten(jax.tree.structure(form), whole))

    def _source(self, form: Resting) -> Source:
        rest, held, stacks = self._rest, self._held, self._stacks
        source = _PartSource(rest, [(self._form, jax.tree.leaves(form)), (held, stacks)])
        source.spread = self.spread
        for block in range(len(self.spread.specs)):
            if not self.spread.is_owned(block):
                row = source.leaves[block].shape[1:]
                own = dataclasses.replace(source.blocks[block], shapes=(row,) * len(source.leaves[block]))
                source.blocks[block] = own
        return source

    def scan(
        self, step: Callable[..., Any], carry: Any, form: Resting, where: Where, xs: Any = None, **options: Any
    ) -> tuple[Any, Any]:
        """As that of `Restructure`: each layer is gathered when its turn comes, and again on the way back.

        Of rows that devices own, one of each is gathered at once, and so the layers that these make up.
        """
        source = self._source(form)
        assert isinstance(source, _PartSource)
        found = alike_nodes(source, where)
        kinds = [{place.block for place in column} for column in found.columns]
        blocks = [next(iter(kind)) if len(kind) == 1 else None for kind in kinds]
        of_form = lambda block: block is not None and block < len(self.spread.specs)
        owned = [j for j, b in enumerate(blocks) if of_form(b) and self.spread.is_owned(b)]
        split = [j for j, b in enumerate(blocks) if of_form(b) and j not in owned and self.spread.split(b)]
        left = [j for j in range(len(blocks)) if j not in {*owned, *split}]
        same = source.one_by_one(found.places)
        chunks = _Chunks(source, [found.columns[j] for j in owned], found.nodes)
        parts: dict[int, Any] = dict(zip(left, source.along([found.columns[j] for j in left]), strict=True))
        for j in split:
            column = found.columns[j]
            (parts[j],) = source.own_block(column[0].block, [tuple(place.number for place in column)])

        # Within each round what was gathered is gathered again on the way back: done again for all rounds before that,
        # it would all be there at once.
        @gathered_again
        def one(carry: Any, each: Any) -> Any:
            whole, arrived, further = each
            arrays = dict(whole)
            for j in split:
                row = gather(arrays[j], self.spread.split(blocks[j]), -1)
                arrays[j] = source.value(found.columns[j][0], row)
            for block, columns in chunks.by_block.items():
                rows = dict(zip(columns, arrived[block], strict=True))
                arrays |= {owned[k]: source.value(found.columns[owned[k]][0], row) for k, row in rows.items()}
            node = found.node([arrays[j] for j in range(len(blocks))], same)
            return step(carry, node, *further)

        @gathered_again
        def several(carry: Any, each: Any) -> Any:
            whole, number, further = each
            arrived = chunks.gather(number)
            if chunks.nodes == 1:
                return one(carry, (whole, {block: rows[0] for block, rows in arrived.items()}, further))
            return jax.lax.scan(one, carry, (whole, arrived, further), chunks.nodes, **options)

        further = () if xs is None else (xs,)
        if not owned:
            return jax.lax.scan(lambda c, each: one(c, (each[0], {}, each[1])), carry, (parts, further), **options)
        cut = lambda array: array.reshape(chunks.count, -1, *array.shape[1:]) if chunks.nodes > 1 else array
        rounds = np.arange(chunks.count)
        each = (jax.tree.map(cut, parts), rounds, jax.tree.map(cut, further))
        outer = {name: value for name, value in options.items() if name != "unroll"}
        carry, outs = jax.lax.scan(several, carry, each, chunks.count, **outer)
        if chunks.nodes > 1:
            outs = jax.tree.map(lambda out: out.reshape(found.nodes, *out.shape[2:]), outs)
        return carry, outs


class _Chunks:
    """Layers whose rows devices own, so many at a time that each device has an equal number of their rows."""

    def __init__(self, source: _PartSource, columns: Sequence[tuple[Place, ...]], nodes: int) -> None:
        self._source = source
        self.by_block: dict[int, list[int]] = {}  # the columns in each stack
        for j, column in enumerate(columns):
            self.by_block.setdefault(column[0].block or 0, []).append(j)
        numbers = np.array([[place.number for place in column] for column in columns]).T  # of each node and column
        sizes = [size for size in range(1, nodes + 1) if nodes % size == 0] if columns else []
        for self.nodes in sizes:
            self.count = nodes // self.nodes
            split = numbers.reshape(self.count, self.nodes, -1)
            tables = {block: self._table(block, split[:, :, its]) for block, its in self.by_block.items()}
            self._tables = {block: table for block, table in tables.items() if table is not None}
            if len(self._tables) == len(tables):
                return
        if columns:
            raise ValueError(
                f"the rows of {nodes} layers do not lie evenly over {source.spread.axes.parts} devices, so they cannot "
                'be gathered a few at a time; use a number of devices that is a power of two, the rule "split", or '
                'split="gradients"'
            )

    def _table(self, block: int, numbers: np.ndarray) -> tuple[np.ndarray, list[int] | None, np.ndarray] | None:
        """Which of its rows each device gives in each round, in which order devices give, and where each row then is.

        Where that order is none, it is the devices' own; where the rows come in tree order, the places count them up.
        """
        own, devices = len(self._source.leaves[block]), self._source.spread.axes.parts
        rows = numbers.reshape(self.count, -1)  # in tree order
        given = [
            [sorted(row % own for row in each if row // own == d) for d in range(devices)] for each in rows.tolist()
        ]
        count = rows.shape[1] // devices
        if not count or any(len(its) != count for each in given for its in each):
            return None
        order = (rows[0, :devices] // own).tolist()
        if len(self._source.spread.split(block)[0][1]) > 1 or len(set(order)) < devices:
            order = None
        turns = order or list(range(devices))
        places = [
            [each[row // own].index(row % own) * devices + turns.index(row // own) for row in its]
            for each, its in zip(given, rows.tolist(), strict=True)
        ]
        return np.array(given), order, np.array(places)

    def gather(self, number: Any) -> dict[int, jax.Array]:
        """The rows of one round, of each stack as an array of shape `(nodes, columns, *row)`."""
        found = {}
        for block, (given, order, places) in self._tables.items():
            leaf, ((_, names), *_) = self._source.leaves[block], self._source.spread.split(block)
            if (given == given[:, :1]).all():
                rows = jnp.asarray(given[:, 0])[number]
            else:
                rows = jnp.asarray(given)[number, jax.lax.axis_index(names)]
            own = leaf.at[rows].get(mode="promise_in_bounds", unique_indices=True)
            # The devices give in the order of their rows, so that none has to be moved after.
            groups = None if order is None else [order]
            arrived = jax.lax.all_gather(own, names, axis=1, axis_index_groups=groups)
            arrived = arrived.reshape(-1, *leaf.shape[1:])
            if (places != np.arange(places.shape[1])).any():
                arrived = arrived.at[jnp.asarray(places)[number]].get(mode="promise_in_bounds", unique_indices=True)
            found[block] = arrived.reshape(self.nodes, -1, *leaf.shape[1:])
        return found
