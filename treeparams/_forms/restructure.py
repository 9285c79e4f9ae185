"""The way back from a vector or stacks to the model, or to single nodes of it."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.tree_util as jtu
from jaxtyping import Array, Inexact

from .._slots.index import Index
from .._slots.layout import Layout, slot_at
from .._slots.match import read_slots, slot_gradients
from .._slots.parts import (
    Rest,
    index_in,
    kept_arrays,
    others,
    put_together,
    take_apart,
    with_kept_arrays,
)
from .._slots.where import Where
from .._tree.types import PyTree
from .form import Form
from .layers import Source, alike_nodes, part
from .makers import NOTHING, stacks_of_arrays
from .mesh import broadcast_as
from .view import View

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
        return part(self._source(form), where)

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
                nodes (or a list of them). You get the outermost matches, in tree order.

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
        found = alike_nodes(source, where)
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
        found = alike_nodes(source, where)
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

    def _source(self, form: Resting) -> Source:
        own = self._form
        return Source(self._rest, [(own, own.leaves(form)), (self._held, self._stacks)])

    def __repr__(self) -> str:
        return f"Restructure({self.layout!r}; {self._form.summary})"


Restructure.__module__ = "treeparams"
halves_of: Callable[[Restructure[Any]], Any] = operator.attrgetter("_rest", "_stacks", "_form", "_held")
"""The `Rest` of the frozen arrays that are in no stack, the stacks of the others, the form, and that of the stacks."""


def _flatten(restructure: Restructure[Any]) -> Any:
    rest, stacks, *static = halves_of(restructure)
    return (rest, stacks), tuple(static)


def _flatten_with_keys(restructure: Restructure[Any]) -> Any:
    rest, stacks, *static = halves_of(restructure)
    return ((jtu.GetAttrKey("rest"), rest), (jtu.GetAttrKey("stacks"), stacks)), tuple(static)


def _unflatten(static: tuple[Form, Form], children: Iterable[Any]) -> Restructure[Any]:
    rest, stacks = children
    return Restructure(rest, *static, stacks)


jtu.register_pytree_with_keys(Restructure, _flatten_with_keys, _unflatten, _flatten)


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
