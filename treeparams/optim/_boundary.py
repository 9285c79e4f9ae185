"""The boundary between models and Optax: models and runs that do not fit a state; which rows of stacks wait."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from .._forms.form import Form
from .._forms.states import Division
from .._slots.layout import Layout, MisfitError, index_of
from .._slots.parts import Parts, take_apart
from .._tree.structure import is_array, structure_of
from .._tree.text import describe
from .._tree.types import PyTree
from ._state import ONE, ClipState, History, TrainableState, map_injected, nodes_of
from ._updates import MasterState


def check_run(run: PyTree, parts: Parts[Any]) -> None:
    """Checks that a fresh state is one of plain Optax over one model, and that wide copies are last in a chain."""
    if nodes_of(TrainableState, run):
        raise ValueError(ONE)
    if nodes_of(optax.LookaheadState, run):
        raise ValueError("optax.lookahead needs a pair of models: run it over tp.partition(model)[0] by hand")
    rates = list[Any]()
    map_injected(lambda _, node: rates.extend(node.hyperparams.values()) or node, run)
    if any(map(jnp.iscomplexobj, rates)) and len(parts.index.complex_slots) < len(parts.slots):
        raise ValueError("complex leaves make all rates complex; write inject_hyperparams(..., hyperparam_dtype=float)")
    _check_chains(run)


def _is_chain(node: object) -> bool:
    return type(node) is tuple and len(node) > 1


_LAST = "optim.master must be last in a chain, around all of it: write optim.master(optax.chain(...))"


def _check_chains(run: PyTree) -> None:
    """Refuses a chain in which another transformation follows wide copies."""
    # It would change the updates, so that no parameter is its copy rounded. Then all copies restart from the parameters
    # in each step, and small steps are lost as without copies.
    for node in filter(_is_chain, jax.tree.leaves(run, is_leaf=_is_chain)):
        if nodes_of(MasterState, node[:-1]):
            raise ValueError(_LAST)
        _check_chains(node[-1])


def parts_of(model: PyTree, layout: Layout, grads: PyTree = None) -> Parts[Any]:
    """Takes a model apart by the layout in a state; an error names the argument that does not fit it."""
    try:
        return take_apart(model, layout)
    except MisfitError as error:
        differences = error.differences
    if None in structure_of(grads)[2].specs:  # functions and numbers are in a model, and not in gradients
        raise ValueError("the gradients hold values that are not arrays; the order is tx.update(grads, state, model)")
    if any(node.cls.__module__.startswith("flax.nnx") for node in index_of(layout).structure.nodes):
        raise ValueError(
            "the state was made from variables of flax.nnx, and the model has none: nnx.Optimizer passes one kind of "
            "tree to init and another to update, so write the step yourself: graph, params, rest = nnx.split(net, "
            "nnx.Param, ...); state = tx.init(params); params, state = optim.step(tx, grads, state, params)"
        )
    raise ValueError(
        "the state was made from another tree (the first below) than this model (the second): write state = "
        f"tx.init(model) with the whole model, not eqx.filter(model, ...), and pass it each time:\n{differences}"
    )


# -- Rows of stacks that wait in one update ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Which rows of stacks move."""

    form: Form
    flags: list[Any]  # the distinct ones: a Python bool where that is known
    numbers: np.ndarray  # of each slot's flag

    # All rows of one stack at once: an operation for each leaf would take as long to compile as all the rest.
    def beside(self, moving: PyTree, waiting: PyTree) -> PyTree:
        """Returns stacks with the rows of `moving` that move, and those of `waiting` that wait."""
        moves, treedef = jtu.tree_flatten(moving)
        rows = [self._moving(slots, 0, leaf.ndim) for slots, leaf in zip(self.form.members, moves, strict=True)]
        return jtu.tree_unflatten(treedef, list(map(jnp.where, rows, moves, treedef.flatten_up_to(waiting))))

    def masked(self, tree: PyTree, sign: int) -> PyTree:
        """Returns stacks with zeros of this sign in the rows that wait."""
        return self.beside(tree, jax.tree.map(lambda leaf: sign * jnp.zeros((), leaf.dtype), tree))

    def of_state(self, division: Division, moving: PyTree, waiting: PyTree) -> PyTree:
        """Returns a state from `moving` for rows that move and for shared arrays, and from `waiting` for the others."""
        moves, treedef = jtu.tree_flatten(moving)
        waits, slot_at = jtu.tree_leaves(waiting), {path: slot for slot, path in enumerate(self.form.paths)}
        for i, owners in enumerate(division.owners):
            if owners is not None:
                rows = self._moving([slot_at[path] for path in owners.paths], owners.axis, moves[i].ndim)
                moves[i] = jnp.where(rows, moves[i], waits[i])
        return jtu.tree_unflatten(treedef, moves)

    def without_absent(self, steps: Sequence[Any]) -> list[Any]:
        """Returns the steps without those of slots that have no gradient, whose flag is the last."""
        last = len(self.flags) - 1
        return [None if number == last else step for number, step in zip(self.numbers, steps, strict=True)]

    def moves(self, history: History, slots: Sequence[int]) -> Any:
        """Returns whether any parameter of a history, which has these slots, takes a step."""
        flags = [self.flags[number] for number in self.numbers[slots]]
        if all(flag is False for flag in flags) or all(flag is True for flag in flags):
            return flags[0]
        _check_shared(history)
        return jnp.any(self._moving(slots, 0, 1))

    @functools.cached_property
    def _stacked(self) -> jax.Array:
        return jnp.stack(list(map(jnp.asarray, self.flags)))

    def _moving(self, slots: Sequence[int], axis: int | None, ndim: int) -> jax.Array:
        """Returns whether each of these slots moves, along one axis of an array."""
        moving = self._stacked[self.numbers[np.array(slots)]]
        return jnp.expand_dims(moving, [each for each in range(ndim) if each != axis])


def _check_shared(history: History) -> None:
    """Refuses a state with shared arrays other than that of a clip, which would move for rows that wait."""
    is_clip = lambda node: isinstance(node, ClipState)
    each = iter(history.division.owners)
    for path, node in jtu.tree_flatten_with_path(history.state, is_leaf=is_clip)[0]:
        owners = [next(each) for _ in jtu.tree_leaves(node)]
        if not is_clip(node) and None in owners:
            raise ValueError(
                "some parameters wait in this update, but the transformation keeps state that is not kept row by row, "
                f"state{jtu.keystr(path)}: put optimisers with state inside optim.per_leaf, or give all gradients, "
                'tp.project(model, grads, missing="zeros")'
            )


def rows_of(layout: Layout, form: Form, absent: Sequence[int], active: Any) -> Rows | None:
    """Returns which rows of a form move; `None` if all do."""
    if not isinstance(active, Mapping):
        raise TypeError(f"active must be a dictionary {{where: flag}}, got {describe(active)}")
    flags = list[Any]()
    for where, flag in active.items():
        is_bool = isinstance(flag, (bool, np.bool_))
        if not is_bool and (not is_array(flag) or flag.dtype != bool or flag.shape):
            raise TypeError(f"active[{where!r}] must be a bool, or a scalar array of one, got {describe(flag)}")
        flags.append(bool(flag) if is_bool else flag)
    index = index_of(layout)
    found = index.first_entries(list(active))
    numbers = [found.get(leaf, len(flags)) for leaf in index.positions]
    for slot in absent:
        numbers[slot] = len(flags) + 1
    flags += [True, False]
    return None if all(flags[number] is True for number in numbers) else Rows(form, flags, np.array(numbers))
