"""The parameters that a rule sees in one update, and rows of stacks that wait in it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._forms.form import Form
from .._forms.states import Division, Init
from .._slots.index import first_entries
from .._slots.layout import Layout, index_of
from .._slots.parts import Parts
from .._tree.structure import is_array
from .._tree.text import describe
from .._tree.types import PyTree
from ._per_leaf import PerLeafState
from ._state import ClipState, History, settled, steady

Run = Callable[[PyTree], tuple[PyTree, PyTree]]
"""From a state of the rule to its steps for the gradients, and its next state."""


@dataclasses.dataclass(frozen=True)
class Sight:
    """The form of the parameters that have a gradient, which the rule sees in one update."""

    parts: Parts[Any]
    layout: Layout
    form: Form
    slots: Sequence[int]  # their numbers in the whole layout
    is_whole: bool  # whether these are all

    def show(self, values: Sequence[Any]) -> PyTree:
        """Returns the form of one value per slot of the whole layout."""
        return self.form.holding(values if self.is_whole else [values[slot] for slot in self.slots])

    def step(self, update: Run, division: Division, before: PyTree, init: Init) -> tuple[list[Any], PyTree]:
        """Returns the step of each slot, and the next state, from a state that is divided in this way."""
        made, after = update(before)
        return self.read(made), steady(after, before)

    def slots_of(self, history: History) -> list[int]:
        """Returns the slots of a history, in a model that may train others too."""
        by_leaf = self.parts.index.by_leaf
        return [by_leaf[position] for position in index_of(history.layout).positions]

    def moves(self, history: History) -> Any:
        """Returns whether any parameter of a history takes a step: a bool, or an array of one."""
        return self.is_whole or not set(self.slots).isdisjoint(self.slots_of(history))

    def read(self, shown: PyTree) -> list[Any]:
        """Returns one value per slot of the whole layout; `None` for slots that the rule did not see, or left out."""
        found = self.form.read(shown)
        if self.is_whole:
            return found
        values = dict(zip(self.slots, found, strict=True))
        return [values.get(slot) for slot in range(len(self.parts.slots))]

    def model(self, shown: PyTree) -> Any:
        """Returns the model with these parameters; everything else is as it was."""
        found = zip(self.read(shown), self.parts.slots, strict=True)
        return self.parts.model([own if new is None else new for new, own in found])


@dataclasses.dataclass(frozen=True)
class Waiting(Sight):
    """Stacks in which some rows wait.

    For a row that waits, the rule sees a parameter of zero, a gradient of zero and a fresh state, so that the row adds
    nothing to a norm, whatever is in it.
    """

    flags: list[Any]  # whether each slot moves: a Python bool where that is known
    absent: frozenset[int]  # the slots without a gradient

    def show(self, values: Sequence[Any]) -> PyTree:
        """Returns the stacks of one value per slot, with zeros in rows that wait."""
        return self._masked(super().show(values), 1)

    def step(self, update: Run, division: Division, before: PyTree, init: Init) -> tuple[list[Any], PyTree]:
        """Returns the same as `Sight.step`, but rows that wait keep their state."""
        fresh = settled(init(self.show(self.parts.slots)))
        made, after = update(self._of_state(division, before, fresh))
        # -0.0 changes no number when it is added; 0.0 would turn -0.0 into 0.0.
        steps = self.read(self._masked(made, -1))
        steps = [None if slot in self.absent else step for slot, step in enumerate(steps)]
        return steps, self._of_state(division, steady(after, before), before)

    def moves(self, history: History) -> Any:
        """Returns whether any parameter of a history takes a step."""
        own = self.slots_of(history)
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
    """Refuses a state with shared arrays, which would move for rows that wait.

    The state of a clip may move, and that of a group without parameters does not.
    """
    is_spare = lambda node: isinstance(node, PerLeafState) and not jtu.tree_leaves(node.states)
    is_clip = lambda node: isinstance(node, ClipState) or is_spare(node)
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


def flags_of(layout: Layout, absent: Sequence[int], active: Any) -> list[Any]:
    """Returns whether each slot moves: a Python bool if that is known."""
    if not isinstance(active, Mapping):
        raise TypeError(f"active must be a dictionary {{where: flag}}, got {describe(active)}")
    for where, flag in active.items():
        if not isinstance(flag, (bool, np.bool_)) and (not is_array(flag) or flag.dtype != bool or flag.shape):
            raise TypeError(f"active[{where!r}] must be a bool, or a scalar array of one, got {describe(flag)}")
    index, flags = index_of(layout), [bool(f) if isinstance(f, (bool, np.bool_)) else f for f in active.values()]
    found = first_entries(index, list(active))
    of_slots = [flags[found[leaf]] if leaf in found else True for leaf in index.positions]
    return [slot not in absent and flag for slot, flag in enumerate(of_slots)]
