"""stacked: Optax over stacks, in which rows wait that are not active or have no gradient."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._forms.form import Form
from .._forms.makers import stacks_in_groups, stacks_of, tree_of
from .._forms.owners import Division, Init
from .._slots.layout import Layout, Trainable, index_of
from .._slots.parts import Parts
from .._slots.rules import first_entries
from .._tree.structure import is_array
from .._tree.text import describe
from .._tree.types import PyTree
from ._clip import ClipState
from ._coupling import compared
from ._groups import GroupsState, check_groups, groups_in
from ._history import History, remembered
from ._rule import Rule
from ._sight import Run, Sight, Step, slots_of
from ._state import ModelTransformation, Plain, nodes_of, settled, steady


def stacked(
    tx: Plain,
    trainable: Trainable = None,
    *,
    trial: Mapping[str, Any] | None = None,
    frozen: Literal["zeros"] | None = None,
) -> ModelTransformation:
    """Wraps an Optax optimiser like `optim.trainable`, and runs it over stacks: one operation for each shape.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> layers = [{"w": jnp.ones((2, 3)), "b": jnp.ones(3)} for _ in range(4)]
    >>> model = {"layers": layers, "steps": jnp.array(3)}
    >>> adafactor = optim.per_leaf(optax.adafactor(0.1))
    >>> tx = optim.stacked(optax.chain(optim.clip_by_global_norm(1.0), adafactor))
    >>> state = tx.init(model)
    >>> grads = {"layers": layers}
    >>> updates, state = tx.update(grads, state, model, active={"layers.2": True, "**": False})
    >>> updates["layers"][0]["b"], bool(jnp.all(updates["layers"][2]["b"] < 0)), updates["steps"]
    (Array([-0., -0., -0.], dtype=float32), True, None)

    You pass models as they are. The state is kept in stacks, `{"float32[2,3]": array of shape (4, 2, 3)}`, and `tx`
    sees parameters and gradients in stacks. Element-wise optimisers (Adam, SGD) and global ones (clipping by the norm
    of all) work on stacks directly. **Put optimisers that look at a leaf's shape or norm inside `optim.per_leaf`**, as
    above: to Muon a stack of biases would be a matrix. Otherwise the first `init` raises a `ValueError`, also for
    transformations that use names. It reads the programs of `tx`, as for `optim.flat`, over a few leaves of the ranks
    that the model has, vectors and matrices. `tx` may contain `optim.groups`; each group has separate stacks.

    **Freeze without a new trace**: `update(grads, state, model, active={where: flag})` accepts flags that may be
    traced. A parameter whose flag is `False` takes no step and its state waits, including its step count, as if you had
    not made the call for it. The first `where` that selects a parameter gives its flag; a parameter that no entry
    selects moves. Make this dictionary inside `jax.jit`, which sorts the keys of dictionaries that you pass in. The
    gradient of a parameter that waits counts as zero in a norm and may be NaN. So "train another layer every hundred
    steps" compiles once. Parameters without a gradient wait in the same way. Only state that is kept row by row can
    wait, so put transformations with state inside `optim.per_leaf`; the state of `optim.clip_by_global_norm` describes
    the whole call and goes on.

    Args:
        tx: any Optax transformation; see above.
        trainable: as for `optim.trainable`.
        trial: examples of extra arguments that `tx` needs. `value`, `grad` and `value_fn` are there.
        frozen: as for `optim.trainable`.

    Returns:
        A transformation that accepts and returns the same as `optim.trainable`. The updates of a parameter that waits
        are `None` if it has no gradient, else -0.0, the zero that changes no number.

    Raises:
        ValueError: `init`: `tx` is not the same over stacks; it has groups within groups, or several that divide the
            model in different ways; otherwise as `optim.trainable`. `update`: some rows wait, and `tx` keeps state
            outside of `optim.per_leaf`; a `where` selects nothing, or only parameters that earlier entries select;
            otherwise as `optim.trainable`.
        TypeError: a flag is not a bool; otherwise as `optim.trainable`.
    """
    rule = _StackedRule(tx, trainable, trial, frozen)
    return ModelTransformation(rule.init, rule.update)


WITHIN = (
    "put an optimiser that looks at single leaves inside optim.per_leaf: "
    "optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(optax.contrib.muon(1e-3)))"
)


@dataclasses.dataclass(frozen=True)
class _Waiting(Sight):
    """Stacks in which some rows wait.

    For a row that waits, the rule sees a parameter of zero, a gradient of zero and a fresh state, so that the row adds
    nothing to a norm, whatever is in it.
    """

    flags: list[Any]  # whether each slot moves: a Python bool where that is known
    absent: frozenset[int]  # the slots without a gradient

    def show(self, values: Sequence[Any]) -> PyTree:
        """Returns the stacks of one value per slot, with zeros in rows that wait."""
        return self._masked(super().show(values), 1)

    def step(self, update: Run, division: Division, before: PyTree, init: Init) -> Step:
        """Returns the same as `Sight.step`, but rows that wait keep their state."""
        fresh = settled(init(self.show(self.parts.slots)))
        made, after = update(self._of_state(division, before, fresh))
        # -0.0 changes no number when it is added; 0.0 would turn -0.0 into 0.0.
        steps = self.read(self._masked(made, -1))
        steps = [None if slot in self.absent else step for slot, step in enumerate(steps)]
        return steps, self._of_state(division, steady(after, before), before)

    def moves(self, history: History) -> Any:
        """Returns whether any parameter of a history takes a step."""
        own = slots_of(self.parts.index, history)
        flags = [self.flags[slot] for slot in own]
        if all(flag is False for flag in flags) or all(flag is True for flag in flags):
            return flags[0]
        _check_shared(history)
        return jnp.any(self._moving(own))

    def model(self, shown: PyTree) -> Any:
        """Returns the model with these parameters in the rows that move."""
        return super().model(self._beside_waiting(shown, super().show(self.parts.slots)))

    def _of_state(self, division: Division, moving: PyTree, waiting: PyTree) -> PyTree:
        """Returns a state from `moving` for rows that move and for shared arrays, and from `waiting` for the others."""
        moves, treedef = jtu.tree_flatten(moving)
        waits, slot_at = jtu.tree_leaves(waiting), {path: slot for slot, path in enumerate(self.form.paths)}
        for i, owners in enumerate(division.owners):
            if owners is not None:
                rows = self._moving([slot_at[path] for path in owners.paths])
                moves[i] = jnp.where(_along(rows, owners.axis, moves[i].ndim), moves[i], waits[i])
        return jtu.tree_unflatten(treedef, moves)

    # In stacks, all rows of one at once: an operation for each leaf would take as long to compile as all the rest.
    def _beside_waiting(self, moving: PyTree, waiting: PyTree) -> PyTree:
        moves, treedef = jtu.tree_flatten(moving)
        rows = [_along(self._moving(slots), 0, leaf.ndim) for slots, leaf in zip(self.form.members, moves, strict=True)]
        return jtu.tree_unflatten(treedef, list(map(jnp.where, rows, moves, treedef.flatten_up_to(waiting))))

    def _masked(self, tree: PyTree, sign: int) -> PyTree:
        return self._beside_waiting(tree, jax.tree.map(lambda leaf: sign * jnp.zeros((), leaf.dtype), tree))

    @functools.cached_property
    def _distinct(self) -> tuple[jax.Array, np.ndarray]:
        """The flags as an array, each once, since many slots share a flag; and the number of each slot's flag."""
        keys = [flag if isinstance(flag, bool) else id(flag) for flag in self.flags]
        distinct = dict(zip(keys, self.flags, strict=True))
        numbers = {key: number for number, key in enumerate(distinct)}
        return jnp.stack([jnp.asarray(flag) for flag in distinct.values()]), np.array([numbers[key] for key in keys])

    def _moving(self, slots: Sequence[int]) -> jax.Array:
        """Returns whether each of these slots moves."""
        flags, numbers = self._distinct
        return flags[numbers[np.array(slots)]]


def _along(flags: jax.Array, axis: int | None, ndim: int) -> jax.Array:
    """Returns flags along one axis of an array."""
    return jnp.expand_dims(flags, [each for each in range(ndim) if each != axis])


def _check_shared(history: History) -> None:
    """Refuses a state with shared arrays, which would move for rows that wait; the state of a clip may move."""
    is_clip = lambda node: isinstance(node, ClipState)
    each = iter(history.division.owners)
    for path, node in jtu.tree_flatten_with_path(history.state, is_leaf=is_clip)[0]:
        owners = [next(each) for _ in jtu.tree_leaves(node)]
        if not is_clip(node) and None in owners:
            raise ValueError(
                "some parameters wait in this update, but the transformation keeps state that is not kept row by row, "
                f"state{jtu.keystr(path)}: put optimisers with state inside optim.per_leaf, as in "
                "optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(optax.adam(1e-3))), or give all "
                'gradients, tp.project(model, grads, missing="zeros")'
            )


class _StackedRule(Rule):
    """A `Rule` over stacks, with rows that wait; with `optim.groups` each group has separate stacks."""

    def __init__(
        self,
        tx: Plain,
        trainable: Trainable,
        trial: Mapping[str, Any] | None,
        frozen: Literal["zeros"] | None,
    ) -> None:
        words = "optim.stacked", WITHIN
        super().__init__(tx, self._stacks_of, trainable, fills=True, words=words, trial=trial, frozen=frozen)

    # -- Groups

    def _stacks_of(self, layout: Layout) -> Form:
        return remembered(self, layout, "form", functools.partial(self._make_stacks, layout))

    def _make_stacks(self, layout: Layout) -> Form:
        groups = self._groups_of(layout) if layout.slots and self._has_groups is not False else None
        return stacks_of(layout) if groups is None else stacks_in_groups(layout, groups)

    @functools.cached_property
    def _has_groups(self) -> bool | None:
        """Whether the rule contains `optim.groups`; `None` if that is unknown."""
        try:
            return bool(nodes_of(GroupsState, jax.eval_shape(self.tx.init, {})))
        except Exception:  # it has a mask for other trees, or wants a leaf
            return None

    def _groups_of(self, layout: Layout) -> dict[str, list[int]] | None:
        """Returns the slots of each group of `optim.groups`; `None` if the rule has none."""
        try:
            tree = tree_of(layout)
            shown = compared(
                tree.treedef, tree.keys, jtu.tree_leaves(tree.shapes())
            )  # in which `per_leaf` looks at none
            nodes = nodes_of(GroupsState, jax.eval_shape(self.tx.init, shown))
        except Exception:
            if self._has_groups:
                raise
            return None  # its mask is for stacks
        if not nodes:
            return None
        check_groups(nodes, index_of(layout))
        divisions = [{group.name: group.paths for group in node.groups} for node in nodes]
        if any(each != divisions[0] for each in divisions) or any(list(groups_in(node.inner_states)) for node in nodes):
            raise ValueError(
                "optim.stacked makes stacks for one optim.groups, but there are several, or groups within groups: give "
                "each group its own chain, or use optim.trainable"
            )
        numbers = {slot.path: i for i, slot in enumerate(layout.slots)}
        return {name: [numbers[path] for path in paths] for name, paths in divisions[0].items()}

    def sight(self, parts: Parts[Any], gradients: Sequence[Any], extra: dict[str, Any]) -> tuple[Sight, list[Any]]:
        """Returns the stacks that the rule sees, in which some rows may wait."""
        active = extra.pop("active", None)
        flags = _flags(parts.layout, gradients, {} if active is None else active)
        sight, filled = super().sight(parts, gradients, extra)
        if not [flag for flag in flags if flag is not True]:
            return sight, filled
        absent = frozenset([slot for slot, given in enumerate(gradients) if given is None])
        return _Waiting(parts, sight.layout, sight.form, sight.slots, flags, absent), filled


def _flags(layout: Layout, gradients: Sequence[Any], active: Any) -> list[Any]:
    """Returns whether each slot moves: a Python bool if that is known."""
    if not isinstance(active, Mapping):
        raise TypeError(f"active must be a dictionary {{where: flag}}, got {describe(active)}")
    for where, flag in active.items():
        if not isinstance(flag, (bool, np.bool_)) and (not is_array(flag) or flag.dtype != bool or flag.shape):
            raise TypeError(f"active[{where!r}] must be a bool, or a scalar array of one, got {describe(flag)}")
    index, flags = index_of(layout), [bool(f) if isinstance(f, (bool, np.bool_)) else f for f in active.values()]
    found = first_entries(index, list(active))
    of_slots = [flags[found[leaf]] if leaf in found else True for leaf in index.positions]
    return [False if given is None else flag for given, flag in zip(gradients, of_slots, strict=True)]
