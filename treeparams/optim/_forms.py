"""What a transformation sees of a model - a canonical tree, or one vector - and how its state is divided by leaves.

Optax does not say which part of a state belongs to which parameter. It is found by asking: `init` of other parameters,
evaluated for shapes alone, has another state, and the paths in it (or, of a vector, the axes that grow) tell.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import PyTree

from .._forms import vector_of
from .._index import Slot, common_dtype, widened
from .._layout import Layout, index_of, trained_at
from .._match import per_slot, slot_gradients
from ._context import within


class Part(NamedTuple):
    """A state, and the layout of the parameters it is of."""

    layout: Layout
    state: PyTree


class Tree:
    """The canonical tree."""

    is_vector = False

    def gradients(self, layout: Layout, grads: PyTree, wide: bool = False) -> list[Any]:
        """One gradient per slot, in its dtype or one that has at least single precision; `None` where there is none."""
        dtypes = [widened(slot.dtype) for slot in layout.slots] if wide else None
        return slot_gradients(index_of(layout), grads, None, dtypes)

    def encode(self, layout: Layout, values: Sequence[Any], treedef: Any) -> PyTree:
        """The canonical tree of one value per slot."""
        index = index_of(layout)
        return index.canonical(values, index.structure.treedef if treedef is None else treedef)

    def decode(self, layout: Layout, seen: PyTree) -> list[Any]:
        """One value per slot, `None` where the tree has none."""
        return per_slot(index_of(layout), seen, "first", exact_shapes=True)

    def regroup(self, tx: Any, parts: Sequence[Part], to: Layout) -> PyTree:
        """The state of the slots of `to`; leaves are told by their paths in the state.

        Raises:
            ValueError: the state is not kept leaf by leaf.
        """
        if index_of(parts[0].layout).positions == index_of(to).positions:
            return parts[0].state
        leaves, treedef = jtu.tree_flatten_with_path(shapes_of(tx, self, to))
        known: dict[Any, Any] = {}
        for part in reversed(parts):
            known |= _by_path(part.state)
        if not (all(self._is_by_leaf(tx, part, to) for part in parts) and _fit(leaves, known)):
            raise ValueError(
                "the state of the transformation is not kept leaf by leaf, so it cannot go on with some of the leaves: "
                'give all of them gradients (tp.project(model, grads, missing="zeros")), and freeze none between steps'
            )
        return _relinked(jtu.tree_unflatten(treedef, [known[path] for path, _ in leaves]))

    def _is_by_leaf(self, tx: Any, part: Part, to: Layout) -> bool:
        # A state kept as a list of leaves would have the same paths for other leaves. But then the states of two
        # complementary choices have fewer paths together than the state of all.
        here = set(index_of(part.layout).positions)
        inside, outside = here & set(index_of(to).positions), here - set(index_of(to).positions)
        if not inside or not outside:
            return True
        paths = _paths(tx, self, trained_at(part.layout, list(inside))) | _paths(
            tx, self, trained_at(part.layout, list(outside))
        )
        return paths == set(_by_path(part.state))


class Flat:
    """One vector."""

    is_vector = True

    def gradients(self, layout: Layout, grads: PyTree, wide: bool = False) -> list[Any]:
        """One gradient per slot, in the vector's dtype, zeros where there is none."""
        return slot_gradients(index_of(layout), grads, "zeros", [layout.dtype] * len(layout.slots))

    def encode(self, layout: Layout, values: Sequence[Any], treedef: Any) -> Any:
        """The vector of one value per slot."""
        return vector_of(layout).join(values)

    def decode(self, layout: Layout, seen: Any) -> list[Any]:
        """One value per slot, in the slot's dtype."""
        return vector_of(layout).cut(seen)

    def regroup(self, tx: Any, parts: Sequence[Part], to: Layout) -> PyTree:
        """The state of the slots of `to`, cut out of the vectors in the states and joined again."""
        if index_of(parts[0].layout).positions == index_of(to).positions:
            return parts[0].state
        shapes, treedef = jtu.tree_flatten(shapes_of(tx, self, to))
        states = [jtu.tree_leaves(part.state) for part in parts]
        places = [{slot.path: slot for slot in part.layout.slots} for part in parts]
        leaves = []
        for i, (axis, shape) in enumerate(zip(_axes(tx, self, to), shapes, strict=True)):
            found = [(state[i], slots) for state, slots in zip(states, places, strict=True)]
            leaves.append(states[0][i] if axis is None else _joined(to, axis, shape, found))
        return jtu.tree_unflatten(treedef, leaves)


Form = Tree | Flat
"""What a transformation is given in place of a model, for the slots of a layout."""


def shapes_of(tx: Any, form: Form, layout: Layout, longer: bool = False) -> PyTree:
    """The shapes and dtypes of a fresh state.

    Args:
        tx: the transformation.
        form: what it sees.
        layout: of what trains.
        longer: whether the vector is longer than it is by one, to tell which axes are its.
    """
    like = [jax.ShapeDtypeStruct(slot.shape, slot.dtype) for slot in layout.slots]
    seen = jax.eval_shape(lambda values: form.encode(layout, values, None), like)
    if longer:
        seen = jax.ShapeDtypeStruct((seen.shape[0] + 1,), seen.dtype)
    with within(layout, form.is_vector):
        return jax.eval_shape(tx.init, seen)


def owners(tx: Any, form: Form, layout: Layout) -> list[int | None]:
    """Whose each leaf of a state is, as the number of a slot; `None` is of no slot, such as a count.

    Raises:
        ValueError: the state is not kept leaf by leaf.
    """
    paths = list(_by_path(shapes_of(tx, form, layout)))
    count = len(layout.slots)
    # Each slot is known by its number in binary: a leaf of the state is there where init is given the slots that have
    # a digit, or those that have it not. So a few questions do for thousands of slots.
    numbers = dict.fromkeys(paths, 0)
    shared = set(paths)
    for digit in range((count - 1).bit_length()):
        divided = [[p for i, p in enumerate(index_of(layout).positions) if i >> digit & 1 == one] for one in (0, 1)]
        zeros, ones = (_paths(tx, form, trained_at(layout, positions)) for positions in divided)
        if ones | zeros != set(paths):
            raise ValueError("the state of the transformation is not kept leaf by leaf; give every leaf a gradient")
        shared &= ones & zeros
        for path in ones - zeros:
            numbers[path] |= 1 << digit
    if count == 1:
        shared = set()  # all is held or goes on as one
    return [None if path in shared else numbers[path] for path in paths]


def _relinked(state: PyTree) -> PyTree:
    """The state with the weights of L-BFGS, 1 / <s, y> of each remembered step, those of the leaves that are in it.

    The weights are of all leaves that took the step together. Those of other leaves would not belong to what is left,
    and the approximate inverse Hessian would not be positive.
    """

    def relink(node: Any) -> Any:
        if not is_lbfgs(node):
            return node
        steps, changes = (jax.tree.leaves(each) for each in (node.diff_params_memory, node.diff_updates_memory))
        products = [
            jnp.sum(jnp.real(jnp.conj(s) * y), axis=tuple(range(1, s.ndim)))
            for s, y in zip(steps, changes, strict=True)
        ]
        total = functools.reduce(jnp.add, products).astype(node.weights_memory.dtype)
        weights = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
        return node._replace(weights_memory=weights)

    return jax.tree.map(relink, state, is_leaf=is_lbfgs)


def is_lbfgs(node: Any) -> bool:
    """Whether this is the state of L-BFGS, which couples leaves."""
    return isinstance(node, optax.ScaleByLBFGSState)


def _paths(tx: Any, form: Form, layout: Layout) -> set[Any]:
    return set(_by_path(shapes_of(tx, form, layout)))


def _by_path(state: PyTree) -> dict[Any, Any]:
    return dict(jtu.tree_flatten_with_path(state)[0])


def _fit(leaves: Sequence[tuple[Any, Any]], known: dict[Any, Any]) -> bool:
    return all(path in known and jnp.shape(known[path]) == shape.shape for path, shape in leaves)


def _axes(tx: Any, form: Form, layout: Layout) -> list[int | None]:
    """For each leaf of a state over a vector the axis along the vector, `None` where there is none."""
    shapes = (jtu.tree_leaves(shapes_of(tx, form, layout, longer)) for longer in (False, True))
    return [
        next((axis for axis, size in enumerate(shape.shape) if grown.shape[axis] != size), None)
        for shape, grown in zip(*shapes, strict=True)
    ]


def _joined(to: Layout, axis: int, shape: Any, found: Sequence[tuple[Any, Mapping[str, Slot]]]) -> Any:
    pieces = []
    for path in to.paths:
        leaf, slot = next((leaf, slots[path]) for leaf, slots in found if path in slots)
        pieces.append(jax.lax.slice_in_dim(leaf, slot.offset, slot.offset + slot.size, axis=axis))
    # A state of narrow leaves may have been that of a wider vector: it keeps its digits.
    dtype = common_dtype(piece.dtype for piece in pieces) if pieces else shape.dtype
    return jnp.concatenate([piece.astype(dtype) for piece in pieces], axis)
