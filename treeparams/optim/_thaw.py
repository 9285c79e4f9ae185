"""set_trainable: freeze and thaw between steps, with the state of every leaf kept."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .._layout import Trainable, index_of, trained_at
from .._parts import Parts, take_apart
from .._resolve import retrained
from ._forms import Form, Part, is_lbfgs
from ._state import (
    Roles,
    TrainableState,
    Transformation,
    in_own_buffers,
    map_hyperparams,
)
from ._whole import Collected, Whole, is_collected, skeleton

S = TypeVar("S")


def set_trainable(
    tx: Transformation, state: S, model: PyTree, trainable: Trainable = None, *, reset: bool = False
) -> S:
    """The state with another choice of what trains; nothing that was learned about a leaf is lost.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> model = {"x": jnp.array([1.0, 2.0]), "y": jnp.array([3.0, 4.0])}
    >>> grads = {"x": jnp.array([1.0, 10.0]), "y": jnp.array([100.0, 1000.0])}
    >>> tx = optim.trainable(optax.inject_hyperparams(optax.sgd)(0.1), "x")
    >>> updates, state = tx.update(grads, tx.init(model), model)
    >>> model = optim.apply_updates(model, updates)
    >>> state = optim.set_trainable(tx, optim.adjust(state, learning_rate=0.2), model)  # as declared: both
    >>> updates, state = tx.update(grads, state, model)
    >>> optim.apply_updates(model, updates)
    {'x': Array([ 0.7, -1. ], dtype=float32), 'y': Array([ -17., -196.], dtype=float32)}

    Call it between steps, outside of `jax.jit`; a jitted step is traced once more. A leaf that is frozen takes its
    state with it, bit for bit and with its step count. Thawed, it goes on **with its own count**, as if the steps in
    between had not happened for it, also in schedules within `tx`; who wants to follow the clock sets the rate with
    `optim.adjust`. A leaf that is trained for the first time starts fresh, at count zero. Leaves with equal histories
    share one run of `tx`; each further history is one more. That costs no work in the tree form, since only the leaves
    of each are kept; in the vector form each is a run over the whole vector.

    To restore such a state with Orbax, keep its structure beside it: pickle `jax.eval_shape(lambda: state)`. A fresh
    `init` has one history.

    Args:
        tx: the transformation that made the state: `optim.trainable`, `flat`, `groups` or `accumulate`, or a chain with
            them. **What stands beside them in a chain keeps its own choice**: a clip or an average within follows.
            Wrappers of Optax that keep gradients themselves (`MultiSteps`, `apply_if_finite`) belong inside too.
        state: its state.
        model: the model as it is now.
        trainable: what is trained from now on: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
            Ties are those that the state knows.
        reset: whether to forget all histories: what is trained starts fresh, and nothing is held. Hyperparameters stay
            as they were set.

    Returns:
        The new state. What is frozen costs no more than its held state.

    Raises:
        ValueError: L-BFGS is in `tx`, whose memory is of all leaves together, and `reset` is not set; the model does
            not fit the state; the state is traced or was made by another `tx`; as `tp.layout`.
        TypeError: nothing in `tx` is of this library.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, model))):
        raise ValueError("set_trainable is called between steps, outside of jax.jit: it changes what is compiled")

    def change(there: Any, here: Any) -> Any:
        if not is_collected(there):
            return here
        if not isinstance(here, TrainableState):
            raise ValueError(f"the state was made by another transformation: expected a TrainableState, got {here!r}")
        return _changed(there, here, trainable, reset)

    changed = jax.tree.map(change, skeleton(tx, model), state, is_leaf=is_collected)
    return in_own_buffers(changed, jax.tree.leaves(model))


def _changed(collected: Collected, state: TrainableState, trainable: Any, reset: bool) -> TrainableState:
    whole, roles = collected.whole, state.roles
    known = take_apart(collected.params, roles.layout)
    model = take_apart(collected.params, retrained(known.layout, trainable))
    if model.layout == roles.layout and not reset:
        return state
    histories = [
        Part(trained_at(roles.layout, positions), part)
        for positions, part in zip(roles.runs + roles.held, state.runs + state.held, strict=True)
    ]
    if reset:
        fresh = whole.start(model)
        return fresh._replace(runs=tuple(_with_hyperparams(run, histories) for run in fresh.runs))
    if any(map(is_lbfgs, jax.tree.leaves(state, is_leaf=is_lbfgs))):
        raise ValueError(
            "L-BFGS remembers steps of all trained leaves together, so it cannot go on with others; "
            "optim.set_trainable(..., reset=True) starts its memory, and all other state, anew"
        )
    return _regrouped(whole, model, histories)


def _regrouped(whole: Whole, model: Parts, histories: Sequence[Part]) -> TrainableState:
    layout, form, tx = model.layout, whole.form, whole.tx
    now = set(model.index.positions)
    known = {position for part in histories for position in index_of(part.layout).positions}
    running = [_restricted(form, tx, part, now) for part in histories]
    held = [_restricted(form, tx, part, known - now) for part in histories]
    fresh = tuple(position for position in model.index.positions if position not in known)
    if fresh:
        state = _with_hyperparams(whole.fresh(model, fresh), histories)
        running.append(Part(trained_at(layout, fresh), state))
    runs, kept = (_merged(form, tx, [part for part in parts if part]) for parts in (running, held))
    roles = Roles(layout, *(tuple(index_of(part.layout).positions for part in parts) for parts in (runs, kept)))
    return TrainableState(roles, *(tuple(part.state for part in parts) for parts in (runs, kept)))


def _restricted(form: Form, tx: Any, part: Part, positions: set[int]) -> Part | None:
    inside = [position for position in index_of(part.layout).positions if position in positions]
    if not inside:
        return None
    to = trained_at(part.layout, inside)
    return Part(to, form.regroup(tx, [part], to))


def _merged(form: Form, tx: Any, parts: Sequence[Part]) -> list[Part]:
    """The same with equal histories in one."""
    merged: list[Part] = []
    for part in parts:
        for i, other in enumerate(merged):
            both = [position for each in (part, other) for position in index_of(each.layout).positions]
            to = trained_at(part.layout, both)
            one = form.regroup(tx, [part, other], to)
            if _same(one, form.regroup(tx, [other, part], to)):
                merged[i] = Part(to, one)
                break
        else:
            merged.append(part)
    return merged


def _same(one: PyTree, other: PyTree) -> bool:
    # Both have each leaf's own state; what is of no leaf - counts, rates - is from the one or the other.
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(_bits(a) == _bits(b) for a, b in pairs)


def _bits(array: Any) -> bytes:
    is_key = isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array).tobytes()


def _with_hyperparams(state: PyTree, histories: Sequence[Part]) -> PyTree:
    """A fresh state with the hyperparameters as they were set, which are of no leaf's history."""
    if not histories:
        return state
    settings: list[dict[str, Any]] = []
    map_hyperparams(lambda node: settings.append(node.hyperparams) or node, histories[0].state)
    return map_hyperparams(lambda node: _with(node, settings.pop(0)), state)


def _with(node: Any, settings: dict[str, Any]) -> Any:
    scheduled = getattr(node, "hyperparams_states", {})
    return node._replace(hyperparams={k: v if k in scheduled else settings[k] for k, v in node.hyperparams.items()})
