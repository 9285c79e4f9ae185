"""The way back from a vector or stacks to the model, to single nodes of it, or to equal nodes as one.

Nodes of one kind, such as layers, become one with a leading axis; stored in sequence, they are cut as one block.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Inexact

from .._slots.layout import Layout
from .._slots.parts import Rest, take_apart
from .._slots.ties import Alias
from .._slots.where import Where, name_of, nodes_in
from .._tree.static_keys import static_key
from .._tree.structure import is_array
from .._tree.text import describe, quoted
from .._tree.types import PyTree, TreeDef, is_key
from .block import cast, cut_columns, stacked
from .form import Form
from .mesh import is_sharded, split
from .view import View

# -- Nodes of one kind -------------------------------------------------------------------------------------------------


# Where the value of a leaf is: the joined array, and its number in it (or `None` and its number among the other
# values), and the alias by which it is computed from that.
_Origin = tuple[int | None, int, Alias | None]
# The places of one leaf of equal nodes, one for each node; or the one place that it has in all of them.
_Column = tuple[_Origin, ...]


class _Unbuilt:
    """A model that is not put together: the joined arrays, and everything else."""

    def __init__(self, rest: Rest[Any], joined: Sequence[tuple[Form, Sequence[Any]]]) -> None:
        """Takes a form and the frozen arrays that are in stacks, each with its leaves."""
        self.index = rest.index
        self.singles = [*rest.arrays, *rest.values]
        self.blocks = [block for form, _ in joined for block in form.blocks]
        leaves = [leaf for _, each in joined for leaf in each]
        self.leaves = [block.gathered(leaf) for block, leaf in zip(self.blocks, leaves, strict=True)]
        (form, _), (held, _) = joined
        slots, blocks = len(self.index.positions), len(form.blocks)
        frozen = {slots + i: (blocks + block, number) for i, (block, number) in held.locations.items()}
        self._locations = form.locations | frozen

    def nodes(self, where: Where, *, is_part: bool = False) -> tuple[TreeDef, int, list[_Column]]:
        """Returns the structure of the nodes that a `where` matches, their number, and the column of each leaf."""
        structure = self.index.structure
        nodes = nodes_in(structure, where, are_alike=not is_part)
        if is_part and len(nodes) > 1:
            paths = quoted([node.path for node in nodes])
            raise ValueError(f"{name_of(where)} matches {paths}; a part is one node, for several use `repeated`")
        columns: list[_Column] = []
        for leaves in zip(*(range(node.start, node.stop) for node in nodes), strict=True):
            column = tuple(map(self._place, leaves))
            if structure.is_array(leaves[0]):
                kinds = {(block, number, alias and alias.transforms) for block, number, alias in column}
                columns.append(column[:1] if len(kinds) == 1 else column)
                continue
            columns.append(column[:1])
            first, *keys = [static_key(self.singles[number], strict=True) for _, number, _ in column]
            for leaf, key in zip(leaves[1:], keys, strict=True):
                if key != first:
                    what = f"{structure.paths[leaves[0]]!r} and {structure.paths[leaf]!r}, which are not arrays, differ"
                    raise ValueError(f"{what}; turn such numbers into arrays")
        return structure.subtreedefs[nodes[0].number], len(nodes), columns

    def _place(self, leaf: int) -> _Origin:
        # The numbers of a model's leaves in one list: slots, then what is no slot, then what is computed from slots.
        slots, number, alias = len(self.index.positions), self.index.gathers.order[leaf], None
        if number >= slots + len(self.singles):
            number, alias = self.index.computed[number - slots - len(self.singles)]
        block, number = self._locations.get(number, (None, number - slots))
        return block, number, alias

    def same(self, columns: Iterable[_Column]) -> dict[_Column, Any]:
        """Returns the values of the columns of one place; tied leaves are one array."""
        places = dict.fromkeys(column[0] for column in columns if len(column) == 1)
        return {(place,): value for place, value in zip(places, self._one_by_one(list(places)), strict=True)}

    def _one_by_one(self, places: Sequence[_Origin]) -> list[Any]:
        wanted: dict[int, set[int]] = {}
        for block, number, _ in places:
            if block is not None:
                wanted.setdefault(block, set()).add(number)
        pieces: dict[int | None, Any] = {i: self.blocks[i].some(self.leaves[i], its) for i, its in wanted.items()}
        pieces[None] = self.singles
        return [self._value(place, pieces[place[0]][place[1]]) for place in places]

    def _value(self, place: _Origin, array: Any) -> Any:
        """Returns the value at a place in a joined array, from the array (or several, stacked) that was cut out."""
        block, number, alias = place
        dtypes = () if block is None else self.blocks[block].dtypes
        array = cast(array, dtypes[number]) if dtypes else array
        return array if alias is None else alias.value_from(array, self.index.structure.spec(alias.source))

    def along(self, columns: Iterable[_Column]) -> dict[_Column, Any]:
        """Returns the values of the columns of several places, each with an axis over the nodes."""
        # Nodes that are equal to users may have their values from different arrays: the weight of one is trained and
        # that of another frozen, or the alias of a transposed one. These are taken one by one.
        strips: dict[_Column, tuple[Any, ...]] = {}
        apart: list[_Column] = []
        for column in dict.fromkeys(each for each in columns if len(each) > 1):
            block, numbers = column[0][0], [number for _, number, _ in column]
            kinds = {(i, i is None or self.blocks[i].shapes[n], alias and alias.transforms) for i, n, alias in column}
            if block is None or len(kinds) > 1:
                apart.append(column)
            else:
                strips[column] = self.blocks[block].strips(numbers, block)
        arrays = cut_columns(strips.values(), self.leaves.__getitem__)
        found = {column: self._value(column[0], arrays[its]) for column, its in strips.items()}
        values = iter(self._one_by_one([place for column in apart for place in column]))  # by one cut of each block
        return found | {column: stacked([jnp.asarray(next(values)) for _ in column]) for column in apart}


# -- Frozen arrays ----------------------------------------------------------------------------------------------------


def _stacks_of_arrays(arrays: Sequence[Any], groups: Sequence[Any] | None = None) -> Form:
    """Returns stacks of those arrays whose shape and dtype several share.

    `groups`: the group of each array. A stack holds only arrays of one group, wherever each is stored now.
    """
    # Layers have frozen arrays too, such as masks, and a scan over layers needs these with an axis over the layers. So
    # what there are several of is stacked once, here, and not in each step.
    alike: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        # A stack has no weak type, JAX joins no keys, NumPy has dtypes that JAX has not, and what lies on other devices
        # stays there.
        is_split = groups is None and (is_sharded(array) or split(array) is not None)
        if isinstance(array, np.ndarray) or is_key(array) or array.weak_type or is_split:
            continue
        is_committed = not isinstance(array, Tracer) and array.committed
        where = groups[i] if groups is not None else array.sharding if is_committed else None
        alike.setdefault((describe(array), where), []).append(i)
    several = [rows for rows in alike.values() if len(rows) > 1]
    form = Form.of({f"{i:06}": rows for i, rows in enumerate(several)}, arrays, [""] * len(arrays), "stacks")
    return dataclasses.replace(form, blocks=tuple([dataclasses.replace(each, dtypes=()) for each in form.blocks]))


_NOTHING = _stacks_of_arrays([])

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

    def __init__(self, rest: Rest[M], stacks: Any, form: Form, held: Form = _NOTHING, gather: Any = None) -> None:
        """Used by this library; write `tp.ravel(model)` or `tp.stack(model)`."""
        self._rest = rest  # without the frozen arrays that are in stacks
        self._form = form
        self._held = held  # which frozen arrays are in which of the stacks
        self._stacks = stacks
        self._gather = gather  # makes what is built whole on each device, from where it is asked for

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
        return self._whole(halves_of(self).released().model(self._form.cut(self._whole(form))))

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
        return self._form.join(self._rest.index.read(model, exact_shapes=True))

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
        return self._form.join(self._rest.index.gradients(grads, "zeros", self._form.dtype))

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
        return View(self.layout, self._form, self._form.leaves(self._whole(form)))

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
        slot = self._rest.index.slot_at(path)
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
        source = self._source(form)
        treedef, _, columns = source.nodes(where, is_part=True)
        return self._whole(treedef.unflatten(map(source.same(columns).get, columns)))

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
        treedef, count, columns = source.nodes(where)
        values = source.along(columns)
        for column, value in source.same(columns).items():
            values[column] = jax.lax.broadcast(value, (count,)) if is_array(value) else value
        return self._whole(treedef.unflatten(map(values.get, columns)))

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
        treedef, count, columns = source.nodes(where)
        # What is the same in all nodes is closed over: no copies of it, and its gradient is summed on the way.
        same, along = source.same(columns), source.along(columns)

        def body(carry: C, each: tuple[Any, ...]) -> tuple[C, Any]:
            arrays, *further = each
            values = same | dict(zip(along, arrays, strict=True))
            return turn(carry, treedef.unflatten(map(values.get, columns)), *further)

        def gathered(carry: C, node: Any, *further: Any) -> tuple[C, Any]:
            return step(carry, self._whole(node), *further)

        # On the way back each node is gathered and computed again, so that only their inputs are kept.
        turn = step if self._gather is None else eqx.filter_checkpoint(gathered, prevent_cse=False)
        rows = [*along.values()], *([] if xs is None else [xs])
        return jax.lax.scan(body, carry, rows, count, **options)

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

    def _whole(self, tree: Any) -> Any:
        return tree if self._gather is None else self._gather(tree)

    def _source(self, form: Resting) -> _Unbuilt:
        own = self._form
        return _Unbuilt(self._rest, [(own, own.leaves(form)), (self._held, self._stacks)])

    def __repr__(self) -> str:
        return f"Restructure({self.layout!r}; {self._form.summary})"

    def __str__(self) -> str:
        return str(self._rest.index.summary(halves_of(self).places))


Restructure.__module__ = "treeparams"


class Halves(NamedTuple):
    """A `Restructure` without what makes its models whole on each device; for the other files of this library."""

    rest: Rest[Any]  # without the frozen arrays that are in stacks
    form: Form
    held: Form  # of these stacks
    stacks: Any

    def released(self) -> Rest[Any]:
        """Returns the `Rest` with each frozen array cut out of its stack."""
        if not self.held.blocks:
            return self.rest
        kept = list(self.rest.arrays)
        for i, array in zip(self.held.slots, self.held.cut_leaves(self.stacks), strict=True):
            kept[i] = array
        return self.rest.replaced(kept)

    @property
    def places(self) -> dict[str, str]:
        """The place of each slot in words, by its path."""
        return {path: self.form.place_in_words(slot) for slot, path in enumerate(self.form.paths)}


def halves_of(restructure: Restructure[Any]) -> Halves:
    """Returns the frozen arrays of a `Restructure`, and where they and the slots are stored."""
    return Halves(*operator.attrgetter("_rest", "_form", "_held", "_stacks")(restructure))


def _children(restructure: Restructure[Any]) -> Any:
    rest, form, held, stacks = halves_of(restructure)
    static = form, held, operator.attrgetter("_gather")(restructure)
    return ((jtu.GetAttrKey("rest"), rest), (jtu.GetAttrKey("stacks"), stacks)), static


jtu.register_pytree_with_keys(Restructure, _children, lambda static, children: Restructure(*children, *static))


def restructure_over(rest: Rest[M], form: Form, groups: Sequence[Any] | None = None) -> Restructure[M]:
    """Returns the way back from a form; beside stacks it also stacks frozen arrays of one shape, to be scanned too.

    `groups`: see `_stacks_of_arrays`.
    """
    if form.is_bare:
        return Restructure(rest, (), form)
    held = _stacks_of_arrays(rest.arrays, groups)
    left = [None if i in held.locations else array for i, array in enumerate(rest.arrays)]
    return Restructure(rest.replaced(left), jtu.tree_leaves(held.join(rest.arrays)), form, held)
