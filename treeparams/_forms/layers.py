"""Nodes of one kind, such as the layers of a net, as one node whose arrays have a leading axis over them.

What is taken from a form is cut out of it at once, and where the nodes lie one after another - as the layers of a net
do, in a vector and in stacks alike - as one block, reshaped and cut along its second axis: so many layers take as many
operations as few, forwards and backwards. (Each leaf by itself would be a strided slice, and each transpose of one a
padded copy of the whole stack.)
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._slots.nodes import nodes_in, subtreedefs
from .._slots.parts import Rest, index_in, others
from .._slots.ties import Alias
from .._slots.where import Where, name_of
from .._tree.static_keys import static_key
from .._tree.text import quoted
from .block import cast, with_gaps
from .form import Form
from .mesh import alike, is_sharded
from .primitives import cut, join


class Place(NamedTuple):
    """Where the value of a leaf is found."""

    block: int | None  # which of the joined arrays it is cut from; none: it is one of the singles
    number: int
    alias: Alias | None = None  # by which it is computed from that


class Source:
    """A model that is not put together: the arrays that are joined, and all else."""

    def __init__(self, rest: Rest[Any], joined: Sequence[tuple[Form, Sequence[Any]]]) -> None:
        """Of a form and of the frozen arrays that are in stacks, each with its leaves."""
        self.index = index_in(rest)
        self.singles = others(rest)
        self.blocks = [block for form, _ in joined for block in form.blocks]
        leaves = [leaf for _, each in joined for leaf in each]
        self.leaves = [block.gathered(leaf) for block, leaf in zip(self.blocks, leaves, strict=True)]
        (form, _), (held, _) = joined
        slots, blocks = len(self.index.positions), len(form.blocks)
        frozen = {slots + i: (blocks + block, number) for i, (block, number) in held.places.items()}
        self._places = form.places | frozen

    def place(self, leaf: int) -> Place:
        """The place of a leaf of the model."""
        slots, place = len(self.index.positions), self.index.gathers.order[leaf]
        if place >= slots + len(self.singles):
            slot, alias = self.index.computed[place - slots - len(self.singles)]
            return Place(*self._places[slot], alias)
        return Place(*self._places[place]) if place in self._places else Place(None, place - slots)

    def one_by_one(self, places: Sequence[Place]) -> list[Any]:
        """The values of leaves; those that are tied are one array."""
        numbers: dict[int, set[int]] = {}
        for place in places:
            if place.block is not None:
                numbers.setdefault(place.block, set()).add(place.number)
        picked = {block: self.pick(block, wanted) for block, wanted in numbers.items()}
        values: dict[Place, Any] = {}
        for place in dict.fromkeys(places):
            if place.block is None:
                values[place] = self.singles[place.number]
            else:
                values[place] = self.value(place, picked[place.block][place.number])
        return [values[place] for place in places]

    def pick(self, block: int, numbers: Collection[int]) -> dict[int, jax.Array]:
        """Arrays of these numbers, cut out of a joined one at once."""
        wanted = sorted(numbers)
        pieces, _ = self.blocks[block].between(self.leaves[block], wanted)
        return dict(zip(wanted, pieces[1::2], strict=False))

    def value(self, place: Place, array: jax.Array) -> Any:
        """The value at a place in a joined array, or of several that are stacked, from what is cut out."""
        block, number, alias = place
        dtypes = () if block is None else self.blocks[block].dtypes
        array = cast(array, dtypes[number]) if dtypes else array
        return array if alias is None else alias.value_from(array, self.index.structure.spec(alias.source))

    def along(self, columns: Sequence[Sequence[Place]]) -> list[Any]:
        """The values of leaves, each of which has a place in each of some nodes, with an axis over the nodes."""
        if not columns:
            return []
        shape = lambda place: None if place.block is None else self.blocks[place.block].shapes[place.number]
        kind = lambda place: (place.block, shape(place), place.alias and place.alias.transforms)
        nodes = [tuple(map(kind, places)) for places in zip(*columns, strict=True)]
        of_kind: dict[Any, list[int]] = {}
        for node, its in enumerate(nodes):
            of_kind.setdefault(its, []).append(node)
        runs = [self._run([[column[node] for node in its] for column in columns]) for its in of_kind.values()]
        if len(runs) == 1:
            return runs[0]
        order = np.argsort([node for its in of_kind.values() for node in its])
        joined = [jnp.concatenate(alike(pieces)) for pieces in zip(*runs, strict=True)]
        is_in_order = np.array_equal(order, np.arange(len(order)))
        return joined if is_in_order else [_reordered(each, order) for each in joined]

    def _run(self, columns: Sequence[Sequence[Place]]) -> list[Any]:
        """As `along`, of nodes in which each leaf has its value from the same joined array."""
        found: dict[int, Any] = {}
        of_block: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for j, column in enumerate(columns):
            numbers = tuple([place.number for place in column])
            if column[0].block is None:
                found[j] = _stacked([jnp.asarray(self.singles[number]) for number in numbers])
            else:
                of_block.setdefault(column[0].block, {}).setdefault(numbers, []).append(j)
        for block, its in of_block.items():
            for array, users in zip(self.block(block, list(its)), its.values(), strict=True):
                found |= {j: self.value(columns[j][0], array) for j in users}
        return [found[j] for j in range(len(columns))]

    def block(self, number: int, columns: Sequence[tuple[int, ...]]) -> list[jax.Array]:
        """The arrays of these numbers of a joined one, those of each column as one."""
        found = self.rows(number, columns)
        if found is not None:
            rows, pieces = found
            return pieces(rows)
        picked = self.pick(number, {each for column in columns for each in column})
        return [_stacked([picked[each] for each in column]) for column in columns]

    def rows(self, number: int, columns: Sequence[tuple[int, ...]]) -> tuple[jax.Array, Any] | None:
        """As `block`, where the nodes lie one after another: each in one piece, and what cuts such a piece, or several.

        The pieces have an axis over the nodes.
        """
        block, nodes = self.blocks[number], len(columns[0])
        starts = np.array([[block.starts[each] for each in column] for column in columns])
        sizes = np.array([block.starts[column[0] + 1] - block.starts[column[0]] for column in columns])
        first = int(starts[:, 0].min())
        step = int(starts[:, 1].min()) - first if nodes > 1 else int((starts[:, 0] + sizes).max()) - first
        # Behind the last leaf of the last node there may be nothing.
        first = min(first, block.shape[0] - nodes * step)
        offsets = starts[:, 0] - first
        order = [int(j) for j in np.argsort(offsets)]
        ends = [*offsets[order][1:], step]
        is_regular = first >= 0 and all(offsets[j] + sizes[j] <= end for j, end in zip(order, ends, strict=True))
        if not is_regular or not np.array_equal(starts, starts[:, :1] + step * np.arange(nodes)):
            return None

        def pieces(rows: jax.Array) -> list[jax.Array]:
            # Of parts of rows, as devices have them, the pieces are parts.
            row = rows.shape[rows.ndim - block.rank :]
            spans = [
                (int(offsets[j]), int(sizes[j]), row if block.rank else block.shapes[columns[j][0]]) for j in order
            ]
            arrays = dict(zip(order, cut(rows, with_gaps(spans, row, step), block.rank)[1::2], strict=False))
            return [arrays[j] for j in range(len(columns))]

        leaf = self.leaves[number]
        row = leaf.shape[1:]
        return cut(leaf, ((first, *row), (nodes, step, *row)), block.rank)[1], pieces


def _reordered(array: jax.Array, order: np.ndarray) -> jax.Array:
    if is_sharded(array):  # JAX does not know where what is taken by indices lies
        shape = array.shape[1:]
        rows = cut(array, (shape,) * len(order), len(shape))
        return _stacked([rows[i] for i in order])
    return array.at[order].get(mode="promise_in_bounds", unique_indices=True)


def _stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    shape = arrays[0].shape
    if jnp.issubdtype(arrays[0].dtype, jax.dtypes.prng_key):
        return jnp.stack(arrays)
    return join(alike(arrays), (shape,) * len(arrays), len(arrays), len(shape))


def part(source: Source, where: Where) -> Any:
    """The one node, or leaf, that a `where` matches."""
    structure = source.index.structure
    spans = nodes_in(structure, where, are_alike=False)
    if len(spans) > 1:
        paths = quoted([span.path for span in spans])
        raise ValueError(f"{name_of(where)} matches {paths}; a part is one node, for several take `repeated`")
    places = [source.place(leaf) for leaf in range(spans[0].start, spans[0].stop)]
    return jtu.tree_unflatten(subtreedefs(structure)[spans[0].number], source.one_by_one(places))


class Alike(NamedTuple):
    """Several nodes as one: where their leaves are."""

    treedef: Any
    nodes: int  # how many
    columns: list[tuple[Place, ...]]  # of the arrays that have an axis over the nodes: a place in each
    places: list[Place]  # of those that are the same in all
    values: list[Any]  # what is no array
    order: list[int]  # where each leaf is in all of these

    def node(self, along: Sequence[Any], same: Sequence[Any]) -> Any:
        """The node with these arrays, one for each of `columns` and of `places`."""
        parts = [*along, *same, *self.values]
        return jtu.tree_unflatten(self.treedef, [parts[i] for i in self.order])


def alike_nodes(source: Source, where: Where) -> Alike:
    """The nodes that a `where` matches, as one."""
    structure = source.index.structure
    spans = nodes_in(structure, where, are_alike=True)
    values: dict[int, Any] = {}
    same: dict[int, Place] = {}
    several: dict[int, tuple[Place, ...]] = {}
    for j, leaves in enumerate(zip(*(range(span.start, span.stop) for span in spans), strict=True)):
        places = tuple(map(source.place, leaves))
        if structure.specs[leaves[0]] is None:
            values[j] = source.singles[places[0].number]
            for leaf, place in zip(leaves, places, strict=True):
                if static_key(source.singles[place.number], strict=True) != static_key(values[j], strict=True):
                    paths = structure.paths[leaves[0]], structure.paths[leaf]
                    raise ValueError(
                        f"{paths[0]!r} and {paths[1]!r}, which are no arrays, differ; numbers that differ can be arrays"
                    )
        elif len({(place.block, place.number, place.alias and place.alias.transforms) for place in places}) == 1:
            same[j] = places[0]
        else:
            several[j] = places
    # Leaves that are tied within a node are one array.
    columns, places = list(dict.fromkeys(several.values())), list(dict.fromkeys(same.values()))
    order = {j: columns.index(column) for j, column in several.items()}
    order |= {j: len(columns) + places.index(place) for j, place in same.items()}
    order |= {j: len(columns) + len(places) + i for i, j in enumerate(values)}
    treedef = subtreedefs(structure)[spans[0].number]
    return Alike(treedef, len(spans), columns, places, list(values.values()), [order[j] for j in range(len(order))])
