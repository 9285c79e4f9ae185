"""set_trainable, adjust: the changes that are made between steps."""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._forms.form import Form
from .._slots.layout import Layout, Trainable, index_of, trained_at
from .._slots.parts import Parts, take_apart
from .._slots.trainable import retrained
from .._slots.where import Where
from .._tree.structure import is_array
from .._tree.text import describe
from .._tree.types import PyTree
from ._groups import group_name, groups_in
from ._history import History, check_no_memory, regrouped
from ._per_leaf import PerLeafState
from ._rule import Rule
from ._state import (
    Roles,
    TrainableState,
    free_rates,
    in_own_buffers,
    map_injected,
    nodes_of,
    rates_in,
    rule_of,
)

S = TypeVar("S")


def set_trainable(tx: Any, state: S, model: PyTree, trainable: Trainable = None, *, reset: bool = False) -> S:
    """The state with another choice of trained leaves; nothing that was learned about a leaf is lost.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> model = {"x": jnp.array([1.0, 2.0]), "y": jnp.array([3.0, 4.0])}
    >>> grads = {"x": jnp.array([1.0, 10.0]), "y": jnp.array([100.0, 1000.0])}
    >>> tx = optim.trainable(optax.inject_hyperparams(optax.sgd)(0.1), "x")
    >>> model, state = optim.step(tx, grads, tx.init(model), model)
    >>> state = optim.set_trainable(tx, optim.adjust(state, learning_rate=0.2), model)  # as declared: both
    >>> model, state = optim.step(tx, grads, state, model)
    >>> model
    {'x': Array([ 0.7, -1. ], dtype=float32), 'y': Array([ -17., -196.], dtype=float32)}

    Call it between steps, outside of `jax.jit`; a jitted step is traced once more. Take gradients by `state.layout`,
    or the thawed leaves get none. A leaf that is frozen takes its state with it, bit for bit and with its step count.
    Thawed, it goes on **with its own count**, as if the steps in between had not happened for it, also in schedules
    within `tx`. A leaf that is trained for the first time starts at count zero, with hyperparameters as `tx` makes
    them, or as `optim.adjust` has set them.

    Leaves that were trained together from the start have one history, one run of `tx`. If you freeze some of them, they
    are of the same history again if the others take no step before you thaw them; else they stay apart, even where
    their counts are equal. Further histories cost tracing, and with `optim.flat` a run over the whole vector each. Held
    states are passed through each step: donate the state, or it is copied (9 ms for 16 MB). To restore such a state
    with Orbax, pickle its structure beside it, `jax.eval_shape(lambda: state)`: a fresh `init` has one history.

    Args:
        tx: the `optim.trainable(...)`, `optim.flat(...)` or `optim.stacked(...)` that made the state.
        state: its state, or that of a chain or wrapper around `tx`, of which the rest stays as it is; not that of an
            ensemble (`jax.vmap` of `init`).
        model: the model as it is now.
        trainable: the leaves that are trained from now on: `None` (as declared), a mask, a `where` or a `Layout`; see
            `tp.layout`. Ties are those that the state knows.
        reset: whether to forget all histories and hold nothing. Hyperparameters stay as they were set.

    Returns:
        The new state. A frozen leaf costs no more than its held state.

    Raises:
        ValueError: L-BFGS is in `tx`, whose memory is of all leaves together, and `reset` is not set; the model does
            not fit the state; the state is traced or was made by another `tx`; as `tp.layout`.
        TypeError: `tx` is plain Optax or no transformation.
    """
    rule = rule_of(tx)
    if isinstance(trainable, bool):
        raise TypeError(f"trainable={trainable} names no leaves; write None for what the classes declare, or '**'")
    if len(nodes_of(TrainableState, state)) != 1:
        raise ValueError(
            f"the state was made by another transformation: expected TrainableState, got {describe(state)}"
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, model))):
        raise ValueError("set_trainable is called between steps, outside of jax.jit: it changes what is compiled")

    def change(node: Any) -> Any:
        return _changed(rule, node, model, trainable, reset) if _is_ours(node) else node

    return in_own_buffers(jax.tree.map(change, state, is_leaf=_is_ours), jax.tree.leaves(model))


def _is_ours(node: object) -> bool:
    return isinstance(node, TrainableState)


def _changed(rule: Rule, state: TrainableState, model: PyTree, trainable: Trainable, reset: bool) -> TrainableState:
    roles = state.roles
    parts = take_apart(model, retrained(take_apart(model, roles.layout).layout, trainable))
    if parts.layout == roles.layout and not reset:
        return state
    histories = _told_apart(rule.histories(state))
    if reset:
        fresh = rule.start(parts)
        runs = tuple([_with_rates(rule, run, parts.layout, histories) for run in fresh.runs])
        return dataclasses.replace(fresh, runs=runs)
    check_no_memory(histories)
    now = frozenset(parts.index.positions)
    known = frozenset(position for history in histories for position in index_of(history.layout).positions)
    running, held = (_at(rule, histories, positions) for positions in (now, known - now))
    if now - known:
        running.append(_begun(rule, take_apart(model, trained_at(parts.layout, list(now - known))), histories))
    running.sort(key=lambda history: -int(np.max(history.count)))  # stable: `state.runs[0]` is the oldest
    return _state_of(parts.layout, running, held)


def _told_apart(histories: Sequence[History]) -> list[History]:
    """The histories, with an origin of its own for each that has taken other steps than the first of its origin."""
    found: list[History] = []
    together: dict[int, np.ndarray] = {}
    for history in histories:
        count, origin = np.asarray(history.count), history.origin
        if not np.array_equal(together.setdefault(origin, count), count):
            origin = _next_origin([*histories, *found])
        found.append(dataclasses.replace(history, origin=origin))
    return found


def _next_origin(histories: Sequence[History]) -> int:
    return 1 + max((history.origin for history in histories), default=-1)


def _begun(rule: Rule, parts: Parts[Any], histories: Sequence[History]) -> History:
    """The history of parameters that begin, with the hyperparameters that the others have been given."""
    run = _with_rates(rule, rule.fresh(parts), parts.layout, histories)
    like = rule.like(parts.layout)
    return History(parts.layout, run, like.division, jnp.zeros((), jnp.int32), _next_origin(histories))


def _at(rule: Rule, histories: Sequence[History], positions: frozenset[int]) -> list[History]:
    """The histories of the leaves at some positions; those of one origin, which took their steps together, as one."""
    found: dict[int, list[History]] = {}
    for history in histories:
        if not positions.isdisjoint(index_of(history.layout).positions):
            found.setdefault(history.origin, []).append(history)
    result = []
    for several in found.values():
        inside = [p for history in several for p in index_of(history.layout).positions if p in positions]
        like = rule.like(trained_at(several[0].layout, inside))
        made = dataclasses.replace(like, state=regrouped(several, like), count=several[0].count)
        result.append(dataclasses.replace(made, origin=several[0].origin))
    return result


def _state_of(layout: Layout, running: Sequence[History], held: Sequence[History]) -> TrainableState:
    """The state of these histories."""
    both = (*running, *held)
    origins, divisions = (tuple(map(operator.attrgetter(name), both)) for name in ("origin", "division"))
    runs, waiting = (tuple([history.state for history in side]) for side in (running, held))
    run_at, wait_at = (tuple([index_of(history.layout).positions for history in side]) for side in (running, held))
    roles = Roles(layout, run_at, wait_at, origins, divisions)
    return TrainableState(runs, waiting, tuple([history.count for history in both]), roles)


def _with_rates(rule: Rule, fresh: PyTree, layout: Layout, histories: Sequence[History]) -> PyTree:
    """A fresh state with the hyperparameters that were set since the others were made; the rest are its own."""
    known = [(rates_in(history.state), history) for history in histories]
    rates, history = max(known, key=lambda pair: _width(pair[0]), default=([], None))
    if history is None or not _width(rates):
        return fresh
    form = rule.form_of(history.layout)
    made, now = (_by_rule(form, state) for state in (rule.begun(history.layout), history.state))
    site = _site_of_rule(rule.form_of(layout))

    def restore(path: tuple[Any, ...], node: Any) -> Any:
        key = site(path)
        if key not in now:
            return node
        old, rates = made[key].hyperparams, free_rates(now[key])
        changed = {name for name, rate in rates.items() if not np.array_equal(rate, old[name], equal_nan=True)}
        new = {name: _for_rows(rates[name], node.hyperparams[name]) for name in changed}
        return node._replace(hyperparams=node.hyperparams | new)

    return map_injected(restore, fresh)


def _width(rates: Sequence[Mapping[str, Any]]) -> int:
    """The bytes of the widest hyperparameter; 0 where there is none."""
    return max((jnp.dtype(rate.dtype).itemsize for each in rates for rate in each.values()), default=0)


def _by_rule(form: Form, state: PyTree) -> dict[Any, Any]:
    """The nodes of `optax.inject_hyperparams` by where the rule stands; of `optim.per_leaf` those of the first leaf."""
    site, nodes = _site_of_rule(form), dict[Any, Any]()
    map_injected(lambda path, node: nodes.setdefault(site(path), node) and node, state)
    return nodes


def _site_of_rule(form: Form) -> Callable[[Any], Any]:
    """From a path in a state to where the rule stands: without the leaf, for each of which `optim.per_leaf` has one."""
    leaves, states, spare = set(form.keys), jtu.GetAttrKey("states"), jtu.GetAttrKey("spare")

    def site(path: tuple[Any, ...]) -> tuple[Any, ...]:
        if spare in path:
            at = path.index(spare)
            return (*path[:at], states, *path[at + 1 :])
        start = path.index(states) + 1 if states in path else len(path)
        end = next((end for end in range(start, len(path) + 1) if path[start:end] in leaves), start)
        return path[:start] + path[end:]

    return site


def _for_rows(rate: jax.Array, like: jax.Array) -> jax.Array:
    """A hyperparameter for a leaf, or for each row of a stack, of that of another one."""
    rate = rate if jnp.shape(rate) == like.shape else jnp.broadcast_to(jnp.ravel(rate)[0], like.shape)
    return jnp.array(rate, like.dtype)


def adjust(state: S, group: Where | None = None, **hyperparams: ArrayLike) -> S:
    """The state with other hyperparameters, if `optax.inject_hyperparams` keeps them in it.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> sgd = optax.inject_hyperparams(optax.sgd)
    >>> tx = optim.trainable(optim.groups({"a": sgd(0.1)}, default=sgd(0.1)))
    >>> model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    >>> state = optim.adjust(tx.init(model), "a", learning_rate=0.5)
    >>> tx.update(model, state, model)[0]
    {'a': Array([-0.5], dtype=float32), 'b': Array([-0.1], dtype=float32)}

    A jitted step is not traced again. Leaves that are frozen now are adjusted too: thawed, they have the same rate.

    Args:
        state: any state, of this library or of Optax.
        group: the key of one group of `optim.groups`, or "default"; `None` is everywhere.
        **hyperparams: the new values, of the shapes they have; they may be traced. They are copied. Within
            `optim.per_leaf` a number is that of all leaves and rows.

    Returns:
        The new state.

    Raises:
        ValueError: no group of this name; no group has such a hyperparameter, or a schedule sets it; another shape.
    """
    name = None if group is None else group_name(group)
    groups, known, found = {each.name for each in groups_in(state)}, set[str](), set[str]()
    of_rows = {id(leaf) for leaf in jax.tree.leaves(nodes_of(PerLeafState, state))}

    def change(path: tuple[Any, ...], node: Any) -> Any:
        keys = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
        above = {key for before, key in itertools.pairwise(keys) if before == "inner_states"}
        groups.update(above)
        if name is not None and name not in above:
            return node
        known.update(node.hyperparams)
        here = hyperparams.keys() & node.hyperparams.keys()
        found.update(here)
        new = {each: _as_before(node, each, hyperparams[each], of_rows) for each in here}
        return node._replace(hyperparams=node.hyperparams | new)

    changed = map_injected(change, state)
    if name is not None and name not in groups:
        raise ValueError(f"no group {name!r} in the state; there are {', '.join(map(repr, sorted(groups))) or 'none'}")
    for each in hyperparams.keys() - found:
        there = f"there are {', '.join(map(repr, sorted(known)))}" if known else "there are none"
        where = "the state" if name is None else f"the state of group {name!r}"
        raise ValueError(
            f"no hyperparameter {each!r} in {where}; {there}. Only what optax.inject_hyperparams keeps can be "
            "adjusted: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)"
        )
    return changed


def _as_before(node: Any, name: str, value: Any, of_rows: set[int]) -> jax.Array:
    if name not in free_rates(node):
        raise ValueError(f"{name!r} follows a schedule, which would set it again in the next step; give a number there")
    if not (isinstance(value, (bool, int, float, complex)) or is_array(value)):
        raise TypeError(f"expected a number for {name}, got {describe(value)}")
    old, given = jnp.asarray(node.hyperparams[name]), jnp.result_type(value)
    is_for_all = jnp.shape(value) == () and id(node.hyperparams[name]) in of_rows
    if jnp.shape(value) != old.shape and not is_for_all:
        raise ValueError(f"expected {name} of shape {old.shape}, got shape {jnp.shape(value)}")
    wider = (jnp.complexfloating, jnp.inexact)
    if any(jnp.issubdtype(given, kind) and not jnp.issubdtype(old.dtype, kind) for kind in wider):
        raise ValueError(
            f"{name} is {old.dtype}, which does not hold {value}; write the number in inject_hyperparams as a float"
        )
    # A buffer of its own, of a traced value too: the state may be donated.
    return jnp.array(jnp.broadcast_to(jnp.asarray(value, old.dtype), old.shape), copy=True)
