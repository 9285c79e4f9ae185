"""What a rule is shown of a model - a canonical tree, one vector, stacks - and how its state is divided by leaves.

Optax does not say which part of a state belongs to which parameter. It is found by asking: `init` of other parameters,
evaluated for shapes alone, has another state, and the paths in it (or, of a vector, the axes that grow) tell.
"""

import abc
import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from .._index import common_dtype, widened
from .._joined import Form, vector_of
from .._layout import Layout, index_of, trained_at
from .._match import per_slot, slot_gradients
from .._parts import Parts
from .._paths import quote
from .._stacks import in_groups, stacks_of
from .._structure import is_array
from .._types import PyTree
from ._groups import Grouped, GroupsState, groups_in
from ._state import nodes_of


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """A state of the rule, the layout of the parameters it is of, the steps it took, and what it is a part of."""

    layout: Layout
    state: PyTree
    count: Any = None
    origin: int = 0

    @functools.cached_property
    def by_path(self) -> dict[Any, Any]:
        """The leaves of the state."""
        return dict(jtu.tree_flatten_with_path(self.state)[0])


class Shown(abc.ABC):
    """What a rule is shown of a model, and how its state is divided by leaves."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx
        self._fresh: dict[tuple[Layout, int], History] = {}

    def fresh(self, layout: Layout, longer: int = 0) -> History:
        """A fresh state, as shapes; of a vector, one for a vector that is longer by so many elements."""
        found = self._fresh.get((layout, longer))
        if found is None:
            if len(self._fresh) >= 64:
                self._fresh.clear()
            state = jax.eval_shape(self._tx.init, self._like(layout, longer))
            found = self._fresh[layout, longer] = History(layout, state)
        return found

    def regroup(self, histories: Sequence[History], to: Layout) -> PyTree:
        """The state of the slots of `to`: each one's own part as it is, what is shared that of the first history."""
        if histories[0].layout == to:
            return histories[0].state
        check_no_memory(histories)
        return self._regrouped(histories, to)

    def gradients(self, parts: Parts[Any], grads: PyTree) -> list[Any]:
        """One gradient per slot, in its dtype or single precision; `None` where there is none."""
        return slot_gradients(parts.index, grads, None, wide=True)

    def paths_of(self, layout: Layout, paths: Sequence[str]) -> Sequence[str]:
        """The parameters that lie at these paths of what the rule is shown."""
        return paths

    @abc.abstractmethod
    def _like(self, layout: Layout, longer: int) -> PyTree:
        """What the rule is shown of such a model, as shapes."""

    @abc.abstractmethod
    def _regrouped(self, histories: Sequence[History], to: Layout) -> PyTree:
        """As `regroup`, of other slots than the first history's."""


class Tree(Shown):
    """The canonical tree."""

    def __init__(self, tx: Any) -> None:
        super().__init__(tx)
        self._is_by_leaf: bool | None = None

    def show(self, parts: Parts[Any], values: Sequence[Any]) -> PyTree:
        """The canonical tree of one value per slot, `None` where that is none."""
        return parts.canonical(values)

    def read(self, parts: Parts[Any], shown: PyTree) -> list[Any]:
        """One value per slot, `None` where the tree has none."""
        return per_slot(parts.index, shown, "first", exact_shapes=True)

    def _like(self, layout: Layout, longer: int) -> PyTree:
        return _shapes(layout)

    def _regrouped(self, histories: Sequence[History], to: Layout) -> PyTree:
        known: dict[Any, Any] = {}
        for each in reversed(histories):
            known |= each.by_path
        like = next((each for each in histories if each.layout == to), None) or self.fresh(to)
        fits = all(path in known and jnp.shape(known[path]) == jnp.shape(x) for path, x in like.by_path.items())
        if fits and self._is_by_leaf is None:
            # A state kept as a list of leaves has the same paths for other leaves: two halves have fewer than all.
            whole = max((to, *(each.layout for each in histories)), key=lambda layout: layout.size)
            halves = [trained_at(whole, index_of(whole).positions[start::2]) for start in (0, 1)]
            zero, one, both = (self.fresh(each).by_path.keys() for each in (*halves, whole))
            self._is_by_leaf = zero | one == both
        if not (fits and self._is_by_leaf):
            raise ValueError(
                "the state of the transformation is not kept leaf by leaf, so it cannot go on with some of the leaves: "
                'give all of them gradients (tp.project(model, grads, missing="zeros")), and freeze none between steps'
            )
        return jtu.tree_unflatten(jtu.tree_structure(like.state), [known[path] for path in like.by_path])


class Vector(Shown):
    """One vector."""

    def gradients(self, parts: Parts[Any], grads: PyTree) -> list[Any]:
        """One gradient per slot, in its dtype or single precision, zeros where there is none."""
        return slot_gradients(parts.index, grads, "zeros", wide=True)

    def show(self, parts: Parts[Any], values: Sequence[Any]) -> Any:
        """The vector of one value per slot."""
        layout = parts.layout
        is_wide = any(
            value.dtype not in (own, layout.dtype) for value, own in zip(values, parts.index.dtypes, strict=True)
        )
        return vector_of(layout, widened(layout.dtype) if is_wide else None).join(values)

    def read(self, parts: Parts[Any], shown: Any) -> list[Any]:
        """One value per slot, in the slot's dtype."""
        return vector_of(parts.layout).cut(shown)

    def _like(self, layout: Layout, longer: int) -> PyTree:
        return jax.ShapeDtypeStruct((layout.size + longer,), layout.dtype)

    def _regrouped(self, histories: Sequence[History], to: Layout) -> PyTree:
        # Which history has each slot, and where.
        places = {slot.path: (n, slot) for n, each in reversed([*enumerate(histories)]) for slot in each.layout.slots}

        def leaf(one: Any, other: Any, *states: Any) -> Any:
            axis = next((axis for axis, size in enumerate(one.shape) if other.shape[axis] != size), None)
            if axis is None:
                return states[0]
            found = [places[path] for path in to.paths]
            pieces = [jax.lax.slice_in_dim(states[n], s.offset, s.offset + s.size, axis=axis) for n, s in found]
            # A state of narrow leaves may have been that of a wider vector: it keeps its digits.
            dtype = common_dtype([piece.dtype for piece in pieces])
            return jnp.concatenate([piece.astype(dtype) for piece in pieces], axis)

        shapes = [self.fresh(to, longer).state for longer in (0, 1)]
        return jax.tree.map(leaf, *shapes, *(each.state for each in histories))


class Stacks(Shown):
    """Stacks; where `optim.groups` is in the rule, those of each group by themselves."""

    def __init__(self, tx: Any) -> None:
        super().__init__(tx)
        self._forms: dict[Layout, Form] = {}

    def form_of(self, layout: Layout) -> Form:
        """The stacks of a layout."""
        form = self._forms.get(layout)
        if form is None:
            if len(self._forms) >= 64:
                self._forms.clear()
            names = None if self._has_groups is False or not layout.slots else self._groups_of(layout)
            form = self._forms[layout] = stacks_of(layout) if names is None else in_groups(layout, names)
        return form

    @functools.cached_property
    def _has_groups(self) -> bool | None:
        """Whether `optim.groups` is in the rule; `None` where that does not show."""
        try:
            return bool(nodes_of(GroupsState, jax.eval_shape(self._tx.init, Grouped())))
        except Exception:  # it has a mask for other trees, or wants a leaf
            return None

    def _groups_of(self, layout: Layout) -> dict[str, list[int]] | None:
        """The slots of each group of `optim.groups`; `None` where there is none in the rule."""
        try:
            nodes = nodes_of(GroupsState, jax.eval_shape(self._tx.init, _shapes(layout)))
        except Exception:
            if self._has_groups:
                raise
            return None  # its mask is for stacks
        if not nodes:
            return None
        divisions = [{group.name: group.paths for group in node.groups} for node in nodes]
        if any(each != divisions[0] for each in divisions) or any(list(groups_in(node.inner_states)) for node in nodes):
            raise ValueError(
                "over stacks one optim.groups says which leaves lie together; there are several, or groups within "
                "groups: give each group a chain of its own rules, or use optim.trainable"
            )
        numbers = {slot.path: i for i, slot in enumerate(layout.slots)}
        return {name: [numbers[path] for path in paths] for name, paths in divisions[0].items()}

    def show(self, parts: Parts[Any], values: Sequence[Any]) -> PyTree:
        """The stacks of one value per slot, each in the widest dtype of its values."""
        form = self.form_of(parts.layout)
        own = lambda slot: jax.dtypes.canonicalize_dtype(values[slot].dtype)
        dtypes = [common_dtype(map(own, slots)) for slots in form.members]
        if any(block.dtype != dtype for block, dtype in zip(form.blocks, dtypes, strict=True)):
            blocks = [dataclasses.replace(b, dtype=dtype) for b, dtype in zip(form.blocks, dtypes, strict=True)]
            form = dataclasses.replace(form, blocks=tuple(blocks))
        return form.join(values)

    def read(self, parts: Parts[Any], shown: PyTree) -> list[Any]:
        """One value per slot, in the slot's dtype, `None` where `optim.groups` masks another group."""
        form = self.form_of(parts.layout)
        found = {tuple(key.key for key in path): leaf for path, leaf in jtu.tree_flatten_with_path(shown)[0]}
        if len(found) == len(form.keys):
            return form.cut(shown)
        values: list[Any] = [None] * len(parts.slots)
        for keys, slots in zip(form.keys, form.members, strict=True):
            for row, slot in enumerate(slots if keys in found else ()):
                values[slot] = found[keys][row].astype(parts.index.dtypes[slot])
        return values

    def paths_of(self, layout: Layout, paths: Sequence[str]) -> Sequence[str]:
        """The parameters that lie at these paths of what the rule is shown."""
        form = self.form_of(layout)
        stacks = {".".join(map(quote, keys)): slots for keys, slots in zip(form.keys, form.members, strict=True)}
        return [layout.paths[slot] for path in paths for slot in stacks[path]]

    def rows_in(self, layout: Layout, path: Sequence[Any], leaf: Any) -> int | None:
        """The stack of which a leaf of the state has one thing for each row, if there is one."""
        form, names = self.form_of(layout), tuple(getattr(key, "key", None) for key in path)
        for block, keys in enumerate(form.keys):
            width = len(keys)
            found = any(names[i : i + width] == keys for i in range(len(names) - width + 1))
            if found and leaf.shape[:1] == (form.blocks[block].length,):
                return block
        return None

    def _like(self, layout: Layout, longer: int) -> PyTree:
        form = self.form_of(layout)
        shapes = [jax.ShapeDtypeStruct(block.shape, block.dtype) for block in form.blocks]
        return jtu.tree_unflatten(form.treedef, shapes)

    def _regrouped(self, histories: Sequence[History], to: Layout) -> PyTree:
        like, form = self.fresh(to), self.form_of(to)
        forms = [self.form_of(each.layout) for each in histories]
        # Which history has each slot, and in which row.
        places = {
            path: (n, forms[n].places[slot][1])
            for n, each in reversed([*enumerate(histories)])
            for slot, path in enumerate(each.layout.paths)
        }

        def leaf(path: Any, shape: Any) -> Any:
            block = self.rows_in(to, path, shape)
            if block is None:
                return next(each.by_path[path] for each in histories if path in each.by_path)
            found = [places[to.paths[slot]] for slot in form.members[block]]
            pieces = []
            for n, group in itertools.groupby(found, key=lambda place: place[0]):
                rows = np.array([row for _, row in group])
                state = histories[n].by_path[path]
                is_whole = np.array_equal(rows, np.arange(state.shape[0]))
                pieces.append(state if is_whole else state[rows])
            dtype = common_dtype([piece.dtype for piece in pieces])
            return jnp.concatenate([piece.astype(dtype) for piece in pieces])

        leaves = [leaf(path, shape) for path, shape in like.by_path.items()]
        return jtu.tree_unflatten(jtu.tree_structure(like.state), leaves)


def _shapes(layout: Layout) -> PyTree:
    """The canonical tree of a layout, as shapes."""
    shapes = [jax.ShapeDtypeStruct(slot.shape, slot.dtype) for slot in layout.slots]
    return index_of(layout).canonical(shapes, index_of(layout).structure.treedef)


def check_no_memory(histories: Sequence[History]) -> None:
    """Refuses L-BFGS, which couples leaves."""
    if nodes_of(optax.ScaleByLBFGSState, [each.state for each in histories]):
        raise ValueError(
            "L-BFGS remembers steps of all trained leaves together, so it cannot go on with some of them. Give all of "
            'them gradients, tp.project(model, grads, missing="zeros"), or forget what it and all other state has '
            "learned: optim.set_trainable(..., reset=True)"
        )


# -- The dtypes of a state ---------------------------------------------------------------------------------------------


def settled(state: PyTree) -> PyTree:
    """The state as arrays of fixed dtypes: a weak type, or a Python number, becomes another after the first step."""

    def fix(leaf: Any) -> Any:
        if not (isinstance(leaf, (bool, int, float, complex)) or _is_numbers(leaf)):
            return leaf
        array = jnp.asarray(leaf)
        return jax.lax.convert_element_type(array, array.dtype)

    return jax.tree.map(fix, state)


def steady(new: PyTree, old: PyTree) -> PyTree:
    """The new state in the dtypes of the old one, whose structure and shapes it must have."""
    news, new_treedef = jtu.tree_flatten(new)
    leaves, treedef = jtu.tree_flatten(old)
    if treedef != new_treedef:
        raise ValueError(f"the transformation changed the structure of its state from {treedef} to {new_treedef}")
    kind = operator.attrgetter("shape", "dtype", "weak_type")
    try:
        if list(map(kind, news)) == list(map(kind, leaves)):
            return new
    except AttributeError:  # not all are arrays
        pass
    for i, (leaf, before) in enumerate(zip(news, leaves, strict=True)):
        if not _is_numbers(before):
            continue
        if jnp.shape(leaf) != before.shape:
            where = jtu.keystr(jtu.tree_flatten_with_path(old)[0][i][0])
            got = f"from {before.shape} to {jnp.shape(leaf)}"
            raise ValueError(f"the transformation changed the shape of its state at {where} {got}")
        news[i] = jax.lax.convert_element_type(leaf, before.dtype)
    return jtu.tree_unflatten(treedef, news)


def _is_numbers(leaf: Any) -> bool:
    return is_array(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
