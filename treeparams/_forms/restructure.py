"""The way back from a vector or stacks to the model, to single nodes of it, or to equal nodes as one.

Nodes of one kind, such as layers, become one with a leading axis; stored in sequence, they are cut as one block.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Inexact

from .._slots.index import Index, summary_of
from .._slots.layout import Layout, slot_at
from .._slots.match import read_slots, slot_gradients
from .._slots.parts import Rest, index_in, kept_arrays, others, put_together, take_apart, with_kept_arrays
from .._slots.ties import Alias
from .._slots.where import Where, name_of, nodes_in, subtreedefs
from .._tree.static_keys import static_key
from .._tree.text import as_text, quoted
from .._tree.types import PyTree
from .block import cast, cut, cut_spans, join
from .form import NOTHING, Form, stacks_of_arrays
from .mesh import alike, broadcast_as, is_sharded
from .view import View

# -- Nodes of one kind -------------------------------------------------------------------------------------------------


class _Location(NamedTuple):
    """The place of the value of a leaf."""

    block: int | None  # which of the joined arrays it is cut from; none: it is one of the singles
    number: int
    alias: Alias | None = None  # by which it is computed from that


class _Unbuilt:
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

    def location(self, leaf: int) -> _Location:
        """Returns the place of the value of a leaf of the model."""
        # The numbers of a model's leaves in one list: slots, then what is no slot, then what is computed from slots.
        slots, number = len(self.index.positions), self.index.gathers.order[leaf]
        if number >= slots + len(self.singles):
            slot, alias = self.index.computed[number - slots - len(self.singles)]
            return _Location(*self._locations[slot], alias)
        return _Location(*self._locations[number]) if number in self._locations else _Location(None, number - slots)

    def single(self, number: int) -> Any:
        """Returns the value of a leaf that is in no joined array."""
        return self.singles[number]

    def one_by_one(self, locations: Sequence[_Location]) -> list[Any]:
        """Returns the values of leaves; tied leaves are one array."""
        numbers: dict[int, set[int]] = {}
        for location in locations:
            if location.block is not None:
                numbers.setdefault(location.block, set()).add(location.number)
        picked = {block: self.pick(block, wanted) for block, wanted in numbers.items()}
        values: dict[_Location, Any] = {}
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

    def value(self, location: _Location, array: jax.Array) -> Any:
        """Returns the value at a location in a joined array, from the array (or several, stacked) that was cut out."""
        block, number, alias = location
        dtypes = () if block is None else self.blocks[block].dtypes
        array = cast(array, dtypes[number]) if dtypes else array
        return array if alias is None else alias.value_from(array, self.index.structure.spec(alias.source))

    def along(self, columns: Sequence[Sequence[_Location]]) -> list[Any]:
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

    def _kind(self, location: _Location) -> tuple[Any, ...]:
        """Returns a key that is equal for leaves of several nodes that can be cut out and computed as one array."""
        shape = None if location.block is None else self.blocks[location.block].shapes[location.number]
        return location.block, shape, location.alias and location.alias.transforms

    def _run(self, columns: Sequence[Sequence[_Location]]) -> list[Any]:
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
            arrays = dict(zip(order, cut_spans(rows, block.rank, spans), strict=True))
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


def _part(source: _Unbuilt, where: Where) -> Any:
    """Returns the one node, or leaf, that a `where` matches."""
    structure = source.index.structure
    spans = nodes_in(structure, where, are_alike=False)
    if len(spans) > 1:
        paths = quoted([span.path for span in spans])
        raise ValueError(f"{name_of(where)} matches {paths}; a part is one node, for several use `repeated`")
    locations = [source.location(leaf) for leaf in range(spans[0].start, spans[0].stop)]
    return jtu.tree_unflatten(subtreedefs(structure)[spans[0].number], source.one_by_one(locations))


class _Alike(NamedTuple):
    """Several nodes as one: the places of their leaves."""

    treedef: Any
    nodes: int  # how many
    columns: list[tuple[_Location, ...]]  # of the arrays that have an axis over the nodes: a location in each
    locations: list[_Location]  # of those that are the same in all
    values: list[Any]  # what is no array
    order: list[int]  # where each leaf is in all of these

    def node(self, along: Sequence[Any], same: Sequence[Any]) -> Any:
        """Returns the node with these arrays, one for each of `columns` and of `locations`."""
        leaves = [*along, *same, *self.values]
        return jtu.tree_unflatten(self.treedef, [leaves[i] for i in self.order])


def _alike_nodes(source: _Unbuilt, where: Where) -> _Alike:
    """Returns the nodes that a `where` matches, as one."""
    structure = source.index.structure
    spans = nodes_in(structure, where, are_alike=True)
    values: dict[int, Any] = {}
    same: dict[int, _Location] = {}
    several: dict[int, tuple[_Location, ...]] = {}
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
    return _Alike(treedef, len(spans), columns, locations, list(values.values()), [order[j] for j in range(len(order))])


# -- Restructure -------------------------------------------------------------------------------------------------------

M = TypeVar("M")
C = TypeVar("C")
Resting = Inexact[Array, " n"] | Mapping[str, Any] | Any
"""A vector or stacks."""


class Restructure(Generic[M]):
    """Rebuilds the model from a vector or from stacks: `restructure(vector) -> model`.

    You get one from `tp.ravel` or `tp.stack`. It is a pytree whose leaves are the frozen arrays, with everything else
    static, so you can close over it, pass it to `jax.jit` and return it, map it, scan with it and differentiate through
    it. In its methods, *form* means either the vector or the stacks.
    """

    def __init__(self, rest: Rest[M], form: Form, held: Form = NOTHING, stacks: Sequence[Any] = ()) -> None:
        """Used by this library; write `tp.ravel(model)` or `tp.stack(model)`."""
        self._rest = rest  # without the frozen arrays that are in stacks
        self._form = form
        self._held = held  # which frozen arrays are in which of the stacks
        self._stacks = stacks

    @property
    def layout(self) -> Layout:
        """The layout of the model, with the place of each parameter in the vector and in the stacks."""
        return self._rest.layout

    def __call__(self, form: Resting) -> M:
        """Builds the model with these parameters.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> vector, restructure = tp.ravel({"w": jnp.ones((2, 2)), "b": jnp.zeros(1, jnp.bfloat16), "n": 7})
        >>> restructure(2 * vector)
        {'b': Array([0], dtype=bfloat16), 'n': 7, 'w': Array([[2., 2.],
               [2., 2.]], dtype=float32)}

        Args:
            form: a vector or stacks with the shapes that `tp.ravel` or `tp.stack` returned, in any floating dtype. It
                may be complex only if a slot in it is complex; a real slot then takes the real part. NumPy arrays are
                fine.

        Returns:
            The model: each parameter in its own shape and dtype, one array at all paths of a tie, frozen arrays and
            everything else unchanged. (With stacks, frozen arrays of one shape are cut out of a stack as well, so they
            are new objects.)

        Raises:
            ValueError: an array has another shape; there is a stack too many, or one is missing.
            TypeError: the dtype is an integer one, or complex although every parameter is real.
        """
        return put_together(released(self), self._form.cut(form))

    def ravel(self, model: PyTree) -> Any:
        """Collects the values of a model into the vector or the stacks; the inverse of calling.

        Args:
            model: a tree with an array for every slot at the same paths: the model, a canonical tree, or another type.
                For a tied parameter, the value at the slot's own path counts. Frozen leaves are ignored.

        Returns:
            The vector or the stacks, as `tp.ravel` or `tp.stack` returns them, in new buffers.

        Raises:
            ValueError: a slot is missing or has another shape; there is an entry where the model has no leaf.
            TypeError: an entry is not an array, or is complex although the slot is real.
        """
        return self._form.join(read_slots(index_in(self._rest), model, exact_shapes=True))

    def ravel_gradient(self, grads: PyTree) -> Any:
        """Collects a gradient into the vector or the stacks; the transpose of calling.

        The gradients of a tied parameter are summed, and missing leaves become zeros.

        >>> import jax, jax.numpy as jnp, treeparams as tp
        >>> shared = jnp.array([1.0, 2.0])
        >>> model = {"a": shared, "b": shared, "c": jnp.ones(1)}
        >>> _, restructure = tp.ravel(model)
        >>> restructure.ravel_gradient({"a": jnp.ones(2), "b": 10 * jnp.ones(2)})
        Array([11., 11.,  0.], dtype=float32)

        Args:
            grads: a gradient in any form that `tp.project` accepts.

        Returns:
            The vector or the stacks, as `tp.ravel` or `tp.stack` returns them.

        Raises:
            ValueError: an entry has another shape than its leaf; there is an entry where the model has no leaf.
            TypeError: an entry is not an array.
        """
        return self._form.join(slot_gradients(index_in(self._rest), grads, "zeros", self._form.dtype))

    def view(self, form: Resting) -> View:
        """Returns a view with names over a vector or stacks: parameters, a gradient, an optimiser's moments, a tangent.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> model = {"a": {"w": jnp.ones(2), "b": jnp.zeros(1)}, "c": {"w": jnp.ones(3)}}
        >>> vector, restructure = tp.ravel(model)
        >>> view = restructure.view(vector)
        >>> view["a.w"], list(view["*.w"])
        (Array([1., 1.], dtype=float32), ['a.w', 'c.w'])
        >>> view.at["*.w"].multiply(5)
        Array([0., 5., 5., 5., 5., 5.], dtype=float32)

        Args:
            form: see `restructure(form)`.

        Returns:
            A mapping from paths to arrays; see `View`.

        Raises:
            ValueError: see `restructure(form)`.
            TypeError: see `restructure(form)`.
        """
        return View(self.layout, self._form, self._form.leaves(form))

    def place(self, path: str) -> tuple[str | None, str, int]:
        """Returns where a parameter is stored in the stacks.

        Args:
            path: the path of a parameter; an alias means its slot.

        Returns:
            Its group (`None` without groups), the key of its stack and its row. So you find it in `stacks[key][row]`,
            or with groups in `stacks[group][key][row]`.

        Raises:
            KeyError: there is no such slot; see `layout[path]`.
            ValueError: the form is a vector; use `layout.slice(path)`.
        """
        slot = slot_at(self.layout, path)
        if self._form.is_bare:
            raise ValueError(f"{path!r} is in a vector, at layout.slice({path!r}); only stacks (tp.stack) have rows")
        block, row = self._form.locations[slot]
        *group, key = [entry.key for entry in self._form.keys[block]]
        return (group[0] if group else None), key, row

    def part(self, form: Resting, where: Where) -> Any:
        """Builds one node of the model, or one array, such as an embedding or a head, and no other node.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> model = {"layers": [{"w": jnp.ones(2)}] * 2, "head": {"w": jnp.zeros(2), "n": 3}}
        >>> stacks, restructure = tp.stack(model)
        >>> restructure.part(stacks, "head")
        {'n': 3, 'w': Array([0., 0.], dtype=float32)}

        Use it together with `repeated` and `scan`: `restructure(stacks)` would put each leaf into the program a second
        time.

        Args:
            form: see `restructure(form)`.
            where: a `where` that matches exactly one node or leaf.

        Returns:
            The node, in its own class.

        Raises:
            ValueError: `where` matches nothing, or several nodes; see also `restructure(form)`.
            TypeError: see `restructure(form)`.
        """
        return _part(self._source(form), where)

    def repeated(self, form: Resting, where: Where) -> Any:
        """Returns equal nodes, such as the layers of a net, as one node whose arrays have a leading axis over them.

        >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> experts = [eqx.nn.Linear(2, 4, key=key) for key in keys]
        >>> stacks, restructure = tp.stack({"experts": experts})
        >>> every = restructure.repeated(stacks, "experts.*")
        >>> every.weight.shape, jax.vmap(lambda expert: expert(jnp.ones(2)))(every).shape
        ((3, 4, 2), (3, 4))

        This takes a few operations, however many nodes there are. The gradient is that of the vector or the stacks.

        Args:
            form: see `restructure(form)`.
            where: a `where` that matches the nodes themselves: `"layers.*"`, a class, or a function from the model to
                nodes (or a list of them). You get the outermost matches, in tree order, or if their paths differ in
                numbers alone, in the order of these: `Block_10` after `Block_2`.

        Returns:
            One node of their class. Its arrays, frozen ones too, have a leading axis over the nodes. An array that is
            tied across all nodes is repeated, and its gradient summed. A leaf that is not an array is the one that all
            nodes share, so if the nodes hold functions, use `eqx.filter_vmap` instead of `jax.vmap`.

        Raises:
            ValueError: `where` selects nothing, or a list of nodes instead of the nodes in it; the nodes differ in
                structure, shape, dtype, static fields or in a leaf that is not an array (the message gives the paths);
                see also `restructure(form)`.
            TypeError: see `restructure(form)`.
        """
        source = self._source(form)
        found = _alike_nodes(source, where)
        same = [broadcast_as(array, found.nodes, None) for array in source.one_by_one(found.locations)]
        return found.node(source.along(found.columns), same)

    def scan(
        self, step: Callable[..., tuple[C, Any]], carry: C, form: Resting, where: Where, xs: Any = None, **options: Any
    ) -> tuple[C, Any]:
        """Runs `jax.lax.scan` over equal nodes, such as the layers of a net, so that you trace and compile them once.

        >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
        >>> keys = jax.random.split(jax.random.key(0), 50)
        >>> net = {"layers": [eqx.nn.Linear(3, 3, key=key) for key in keys], "head": jnp.ones(3)}
        >>> stacks, restructure = tp.stack(net)
        >>> def forward(stacks, restructure, x):
        ...     x, _ = restructure.scan(lambda x, layer: (x + jnp.tanh(layer(x)), None), x, stacks, "layers.*")
        ...     return restructure.part(stacks, "head") @ x
        >>> jax.jit(jax.grad(forward))(stacks, restructure, jnp.ones(3))["float32[3,3]"].shape
        (50, 3, 3)

        Args:
            step: `step(carry, node) -> (carry, out)`. The node has its own class, with the functions, numbers and
                frozen arrays that it has in the model. To recompute it in the backward pass when nodes hold functions,
                pass `eqx.filter_checkpoint(step)`.
            carry: the initial carry.
            form: see `restructure(form)`.
            where: see `repeated`.
            xs: a tree of arrays with a leading axis over the nodes, such as keys for dropout; the step is then called
                as `step(carry, node, x)`.
            **options: options of `jax.lax.scan`: `reverse`, `unroll`.

        Returns:
            The final carry, and the outs with a leading axis over the nodes.

        Raises:
            ValueError: see `repeated`.
            TypeError: see `restructure(form)`.
        """
        source = self._source(form)
        found = _alike_nodes(source, where)
        # What is the same in all nodes is closed over: no copies of it, and its gradient is summed on the way.
        same = source.one_by_one(found.locations)
        further = () if xs is None else (xs,)

        def body(carry: C, each: tuple[Any, ...]) -> tuple[C, Any]:
            along, *further = each
            return step(carry, found.node(along, same), *further)

        return jax.lax.scan(body, carry, (source.along(found.columns), *further), found.nodes, **options)

    def with_frozen(self, model: M) -> "Restructure[M]":
        """Returns a `Restructure` with the frozen leaves of another model.

        Args:
            model: a model of equal structure.

        Returns:
            A `Restructure` with the same layout and the frozen arrays, functions and numbers of `model`.

        Raises:
            ValueError: the model does not fit the layout.
        """
        return restructure_over(take_apart(model, self.layout).rest, self._form)

    def _source(self, form: Resting) -> _Unbuilt:
        own = self._form
        return _Unbuilt(self._rest, [(own, own.leaves(form)), (self._held, self._stacks)])

    def __repr__(self) -> str:
        return f"Restructure({self.layout!r}; {self._form.summary})"

    def __str__(self) -> str:
        index, _, places = known_leaves(self)
        return as_text(summary_of(index, places).blocks)


Restructure.__module__ = "treeparams"
halves_of: Callable[[Restructure[Any]], Any] = operator.attrgetter("_rest", "_stacks", "_form", "_held")
"""The `Rest` of the frozen arrays that are in no stack, the stacks of the others, the form, and that of the stacks."""


def _children(restructure: Restructure[Any]) -> Any:
    rest, stacks, *static = halves_of(restructure)
    return (rest, stacks), tuple(static)


def _children_with_keys(restructure: Restructure[Any]) -> Any:
    rest, stacks, *static = halves_of(restructure)
    return ((jtu.GetAttrKey("rest"), rest), (jtu.GetAttrKey("stacks"), stacks)), tuple(static)


def _unflatten(static: tuple[Form, Form], children: Iterable[Any]) -> Restructure[Any]:
    rest, stacks = children
    return Restructure(rest, *static, stacks)


jtu.register_pytree_with_keys(Restructure, _children_with_keys, _unflatten, _children)


def released(restructure: Restructure[M]) -> Rest[M]:
    """Returns the `Rest` with each frozen array cut out of its stack."""
    rest, stacks, _, held = halves_of(restructure)
    if not held.blocks:
        return rest
    kept = list(kept_arrays(rest).values())
    for i, array in zip(held.slots, held.cut_leaves(stacks), strict=True):
        kept[i] = array
    return with_kept_arrays(rest, kept)


def with_forms(restructure: Restructure[M], form: Form, held: Form) -> Restructure[M]:
    """Returns the same `Restructure` over other forms, whose arrays have other dtypes."""
    rest, stacks, _, _ = halves_of(restructure)
    return Restructure(rest, form, held, stacks)


def known_leaves(restructure: Restructure[Any]) -> tuple[Index, dict[int, Any], dict[str, str]]:
    """Returns a `Restructure`'s index, its leaves that are not arrays, and the place of each slot in words."""
    rest, _, form, _ = halves_of(restructure)
    index, singles = index_in(rest), others(rest)
    leaves = {
        i: singles[index.gathers.order[i] - len(index.positions)]
        for i in range(len(index.trained))
        if not index.structure.is_array(i)
    }
    return index, leaves, {path: form.place_in_words(slot) for slot, path in enumerate(form.paths)}


def restructure_over(rest: Rest[M], form: Form, groups: Sequence[str] | None = None) -> Restructure[M]:
    """Returns the way back from a form; beside stacks it also stacks frozen arrays of one shape, to be scanned too.

    `groups`: see `stacks_of_arrays`.
    """
    if form.is_bare:
        return Restructure(rest, form)
    kept = list(kept_arrays(rest).values())
    held = stacks_of_arrays(kept, groups)
    left = [None if i in held.locations else array for i, array in enumerate(kept)]
    return Restructure(with_kept_arrays(rest, left), form, held, jtu.tree_leaves(held.join(kept)))
