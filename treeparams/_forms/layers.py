"""Nodes of one kind, such as the layers of a net, as one node whose arrays have a leading axis over them.

All arrays are cut out of a form at once. If the nodes are stored in sequence, as the layers of a net are, in a vector
and in stacks alike, they are cut as one block, reshaped, and cut along its second axis. So many layers need as few
operations as few layers, forwards and backwards. (Cutting each leaf separately would be a strided slice, and the
transpose of each slice a padded copy of the whole stack.)
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._slots.nodes import nodes_in
from .._slots.parts import Rest, index_in, others
from .._slots.spans import subtreedefs
from .._slots.ties import Alias
from .._slots.where import Where, name_of
from .._tree.static_keys import static_key
from .._tree.text import quoted
from .block import cast, with_gaps
from .form import Form
from .mesh import alike, is_sharded
from .primitives import cut, join


class Location(NamedTuple):
    """The place of the value of a leaf."""

    block: int | None  # which of the joined arrays it is cut from; none: it is one of the singles
    number: int
    alias: Alias | None = None  # by which it is computed from that


class Source:
    """A model that is not put together: the joined arrays, and everything else."""

    def __init__(self, rest: Rest[Any], joined: Sequence[tuple[Form, Sequence[Any]]]) -> None:
        """Takes a form and the frozen arrays that are in stacks, each with its leaves."""
        self.index = index_in(rest)
        self.singles = others(rest)
        self.blocks = [block for form, _ in joined for block in form.blocks]
        leaves = [leaf for _, each in joined for leaf in each]
        self.leaves = [block.gathered(leaf) for block, leaf in zip(self.blocks, leaves, strict=True)]
        (form, _), (held, _) = joined
        slots, blocks = len(self.index.positions), len(form.blocks)
        frozen = {slots + i: (blocks + block, number) for i, (block, number) in held.locations.items()}
        self._locations = form.locations | frozen

    def location(self, leaf: int) -> Location:
        """Returns the place of the value of a leaf of the model."""
        # The numbers of a model's leaves in one list: slots, then what is no slot, then what is computed from slots.
        slots, number = len(self.index.positions), self.index.gathers.order[leaf]
        if number >= slots + len(self.singles):
            slot, alias = self.index.computed[number - slots - len(self.singles)]
            return Location(*self._locations[slot], alias)
        return Location(*self._locations[number]) if number in self._locations else Location(None, number - slots)

    def single(self, number: int) -> Any:
        """Returns the value of a leaf that is in no joined array."""
        return self.singles[number]

    def one_by_one(self, locations: Sequence[Location]) -> list[Any]:
        """Returns the values of leaves; tied leaves are one array."""
        numbers: dict[int, set[int]] = {}
        for location in locations:
            if location.block is not None:
                numbers.setdefault(location.block, set()).add(location.number)
        picked = {block: self.pick(block, wanted) for block, wanted in numbers.items()}
        values: dict[Location, Any] = {}
        for location in dict.fromkeys(locations):
            if location.block is None:
                values[location] = self.single(location.number)
            else:
                values[location] = self.value(location, picked[location.block][location.number])
        return [values[location] for location in locations]

    def pick(self, block: int, numbers: Collection[int]) -> dict[int, jax.Array]:
        """Cuts the arrays with these numbers out of a joined one at once."""
        wanted = sorted(numbers)
        pieces, _ = self.blocks[block].between(self.leaves[block], wanted)
        return dict(zip(wanted, pieces[1::2], strict=False))

    def value(self, location: Location, array: jax.Array) -> Any:
        """Returns the value at a location in a joined array, from the array (or several, stacked) that was cut out."""
        block, number, alias = location
        dtypes = () if block is None else self.blocks[block].dtypes
        array = cast(array, dtypes[number]) if dtypes else array
        return array if alias is None else alias.value_from(array, self.index.structure.spec(alias.source))

    def along(self, columns: Sequence[Sequence[Location]]) -> list[Any]:
        """Returns the values of leaves that have one location in each of several nodes, with an axis over the nodes."""
        if not columns:
            return []
        # Nodes that are equal to users may have their values from different arrays: the weight of one is trained and
        # that of another frozen, or the alias of a transposed one. Such nodes are taken apart by kind, those of one
        # kind at once, and the results are brought back into the order of the nodes.
        of_kind: dict[Any, list[int]] = {}
        for node, its in enumerate(zip(*columns, strict=True)):
            of_kind.setdefault(tuple(map(self._kind, its)), []).append(node)
        runs = [self._run([[column[node] for node in its] for column in columns]) for its in of_kind.values()]
        if len(runs) == 1:
            return runs[0]
        order = np.argsort([node for its in of_kind.values() for node in its])
        joined = [jnp.concatenate(alike(pieces)) for pieces in zip(*runs, strict=True)]
        is_in_order = np.array_equal(order, np.arange(len(order)))
        return joined if is_in_order else [_reordered(each, order) for each in joined]

    def _kind(self, location: Location) -> tuple[Any, ...]:
        """Returns a key that is equal for leaves of several nodes that can be cut out and computed as one array."""
        shape = None if location.block is None else self.blocks[location.block].shapes[location.number]
        return location.block, shape, location.alias and location.alias.transforms

    def _run(self, columns: Sequence[Sequence[Location]]) -> list[Any]:
        """Does the work of `along` for nodes in which each leaf has its value from the same joined array."""
        found: dict[int, Any] = {}
        of_block: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for j, column in enumerate(columns):
            numbers = tuple([location.number for location in column])
            if column[0].block is None:
                found[j] = _stacked([jnp.asarray(self.single(number)) for number in numbers])
            else:
                of_block.setdefault(column[0].block, {}).setdefault(numbers, []).append(j)
        for block, its in of_block.items():
            for array, users in zip(self.block(block, list(its)), its.values(), strict=True):
                found |= {j: self.value(columns[j][0], array) for j in users}
        return [found[j] for j in range(len(columns))]

    def block(self, number: int, columns: Sequence[tuple[int, ...]]) -> list[jax.Array]:
        """Cuts the arrays with these numbers out of a joined one, those of each column as one array."""
        found = self.rows(number, columns)
        if found is not None:
            rows, pieces = found
            return pieces(rows)
        picked = self.pick(number, {each for column in columns for each in column})
        return [_stacked([picked[each] for each in column]) for column in columns]

    def rows(self, number: int, columns: Sequence[tuple[int, ...]]) -> tuple[jax.Array, Any] | None:
        """Does the work of `block` if the nodes follow one another; otherwise returns `None`.

        Returns one array with a row per node, and a function that cuts it into arrays with an axis over the nodes.
        """
        # A net of three equal layers, each with a bias (b) and a weight (w), lies in a vector like this:
        #
        #     e e e | b b w w w w | b b w w w w | b b w w w w | h h h
        #     first --^   step = 6
        #
        # The three layers are one array of shape (3, 6), and their weights the columns 2 to 6 of it. That holds if each
        # leaf of node n begins at `first + offset + n * step`, with one offset for each leaf, and if no leaf reaches
        # into the next node. Leaves of other nodes may lie between: they are gaps, and cut out with the rest.
        block, nodes = self.blocks[number], len(columns[0])
        starts = np.array([[block.starts[each] for each in column] for column in columns])
        sizes = np.array([block.starts[column[0] + 1] - block.starts[column[0]] for column in columns])
        first = int(starts[:, 0].min())
        step = int(starts[:, 1].min()) - first if nodes > 1 else int((starts[:, 0] + sizes).max()) - first
        # A step may be longer than the leaves of a node, if others lie between nodes. Behind the last node there may
        # be nothing left, so that its piece would end behind the array: then all pieces begin earlier.
        first = min(first, block.shape[0] - nodes * step)
        offsets = starts[:, 0] - first
        order = [int(j) for j in np.argsort(offsets)]
        ends = [*offsets[order][1:], step]
        is_regular = first >= 0 and all(offsets[j] + sizes[j] <= end for j, end in zip(order, ends, strict=True))
        if not is_regular or not np.array_equal(starts, starts[:, :1] + step * np.arange(nodes)):
            return None

        def pieces(rows: jax.Array) -> list[jax.Array]:
            # The rows may be shorter than those of the block: inside of a `shard_map`, each device has its share.
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
    """Returns the one node, or leaf, that a `where` matches."""
    structure = source.index.structure
    spans = nodes_in(structure, where, are_alike=False)
    if len(spans) > 1:
        paths = quoted([span.path for span in spans])
        raise ValueError(f"{name_of(where)} matches {paths}; a part is one node, for several use `repeated`")
    locations = [source.location(leaf) for leaf in range(spans[0].start, spans[0].stop)]
    return jtu.tree_unflatten(subtreedefs(structure)[spans[0].number], source.one_by_one(locations))


class Alike(NamedTuple):
    """Several nodes as one: the places of their leaves."""

    treedef: Any
    nodes: int  # how many
    columns: list[tuple[Location, ...]]  # of the arrays that have an axis over the nodes: a location in each
    locations: list[Location]  # of those that are the same in all
    values: list[Any]  # what is no array
    order: list[int]  # where each leaf is in all of these

    def node(self, along: Sequence[Any], same: Sequence[Any]) -> Any:
        """Returns the node with these arrays, one for each of `columns` and of `locations`."""
        leaves = [*along, *same, *self.values]
        return jtu.tree_unflatten(self.treedef, [leaves[i] for i in self.order])


def alike_nodes(source: Source, where: Where) -> Alike:
    """Returns the nodes that a `where` matches, as one."""
    structure = source.index.structure
    spans = nodes_in(structure, where, are_alike=True)
    values: dict[int, Any] = {}
    same: dict[int, Location] = {}
    several: dict[int, tuple[Location, ...]] = {}
    for j, leaves in enumerate(zip(*(range(span.start, span.stop) for span in spans), strict=True)):
        locations = tuple(map(source.location, leaves))
        if not structure.is_array(leaves[0]):
            values[j] = source.singles[locations[0].number]
            for leaf, location in zip(leaves, locations, strict=True):
                if static_key(source.singles[location.number], strict=True) != static_key(values[j], strict=True):
                    paths = structure.paths[leaves[0]], structure.paths[leaf]
                    raise ValueError(
                        f"{paths[0]!r} and {paths[1]!r}, which are not arrays, differ; turn such numbers into arrays"
                    )
        elif len({(at.block, at.number, at.alias and at.alias.transforms) for at in locations}) == 1:
            same[j] = locations[0]
        else:
            several[j] = locations
    # Leaves that are tied within a node are one array.
    columns, locations = list(dict.fromkeys(several.values())), list(dict.fromkeys(same.values()))
    order = {j: columns.index(column) for j, column in several.items()}
    order |= {j: len(columns) + locations.index(location) for j, location in same.items()}
    order |= {j: len(columns) + len(locations) + i for i, j in enumerate(values)}
    treedef = subtreedefs(structure)[spans[0].number]
    return Alike(treedef, len(spans), columns, locations, list(values.values()), [order[j] for j in range(len(order))])
