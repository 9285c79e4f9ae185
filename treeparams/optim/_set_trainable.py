"""set_trainable: changes which parameters train, or resets some of them, between steps."""

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .._forms.form import Form
from .._slots.layout import Layout, Trainable, index_of, trained_at
from .._slots.parts import Parts, take_apart
from .._slots.rules import first_entries
from .._slots.trainable import retrained
from .._slots.where import Leaves, Where
from .._tree.text import describe
from .._tree.types import PyTree
from ._boundary import counting, taken_apart
from ._history import History, check_no_memory, regrouped
from ._rule import Rule
from ._state import (
    Roles,
    TrainableState,
    free_rates,
    in_own_buffers,
    map_injected,
    nodes_of,
    noticed,
    rates_in,
    rule_of,
)

S = TypeVar("S")


def set_trainable(
    tx: Any, state: S, model: PyTree, trainable: Trainable | EllipsisType = ..., *, reset: bool | Where = False
) -> S:
    """Freezes and thaws parameters between steps, and keeps the optimiser's state of each.

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

    Call it between steps, outside of `jax.jit`; a jitted step is traced once more. Take gradients by `state.layout`, or
    the thawed parameters get none. A frozen parameter keeps its moments, bit for bit, and its step count. When you thaw
    it, it goes on **with its own count**, as if the steps in between had not happened for it, also in schedules inside
    `tx`. A parameter that trains for the first time starts at count zero, with the hyperparameters of `tx`, or those
    that `optim.adjust` has set.

    **`reset=where` resets part of the model**, such as a head that you re-initialise. Given alone, it does not change
    which parameters train.

    >>> model["y"] = jnp.zeros(2)
    >>> state = optim.set_trainable(tx, state, model, reset="y")
    >>> [int(count) for count in state.counts], state.layout.paths
    ([2, 0], ('x', 'y'))

    A reset parameter is like one that trains for the first time, with a separate history. The held state of a frozen
    parameter is dropped, and a tied parameter is reset at all its places.

    Parameters that trained together from the start share one history: one run of `tx`. If you freeze some of them and
    thaw them before the others take a step, they share it again. Otherwise they stay apart, even if their counts are
    equal. Further histories cost tracing time, and with `optim.flat` a run over the whole vector each. Held states are
    passed through each step: donate the state, or it is copied (9 ms for 16 MB). To restore such a state with Orbax,
    pickle its structure with it, `jax.eval_shape(lambda: state)`: a fresh `init` has one history.

    Args:
        tx: the `optim.trainable(...)`, `optim.flat(...)` or `optim.stacked(...)` that made the state.
        state: its state, or that of a chain or wrapper around `tx`, whose other parts stay as they are; not that of an
            ensemble (`jax.vmap` of `init`).
        model: the model as it is now.
        trainable: the parameters that train from now on: `None` (as declared), a mask, a `where` or a `Layout`; see
            `tp.layout`. Ties are those in the state. If you leave it out, it is `None`, or with `reset=where` the
            choice in the state.
        reset: a `where` of parameters whose moments and counts start afresh, including frozen ones; `True` drops all
            histories and holds nothing. Hyperparameters stay as you set them.

    Returns:
        The new state. A frozen parameter costs no more than its held state.

    Warns:
        UserWarning: steps leave a bfloat16 or float16 parameter as it was; see `TrainableState.stuck`.

    Raises:
        ValueError: `tx` contains L-BFGS, which remembers all parameters together, and `reset` is not `True`; the model
            does not fit the state; the state is traced or was made by another `tx`; `reset` selects nothing, or only
            one place of an array that is at several; as `tp.layout`.
        TypeError: `tx` is plain Optax or no transformation; `reset` is neither a bool nor a `where`.
    """
    rule = rule_of(tx)
    if isinstance(trainable, bool):
        raise TypeError(f"trainable={trainable} selects nothing; write None for the parameters as declared, or '**'")
    if not isinstance(reset, bool):
        _check_where(reset)
    choice = None if trainable is ... and isinstance(reset, bool) else trainable
    if len(nodes_of(TrainableState, state)) != 1:
        raise ValueError(
            f"expected the state of this transformation, as tx.init(model) returns it, got {describe(state)}; the "
            "order is optim.set_trainable(tx, state, model, where)"
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, model))):
        raise ValueError("call set_trainable between steps, outside of jax.jit: it changes the compiled program")

    state = noticed(state)

    def change(node: Any) -> Any:
        return _changed(rule, node, model, choice, reset) if _is_ours(node) else node

    return in_own_buffers(jax.tree.map(change, state, is_leaf=_is_ours), jax.tree.leaves(model))


def _is_ours(node: object) -> bool:
    return isinstance(node, TrainableState)


def _check_where(reset: object) -> None:
    """Checks that an argument that is not a bool may be a `where`; only a model shows what it selects."""
    if not (callable(reset) or isinstance(reset, (str, re.Pattern, Leaves, list, tuple, set, frozenset))):
        raise TypeError(f"reset must be True, False or a `where` such as 'head' or '**.bias', got {describe(reset)}")


def _changed(
    rule: Rule, state: TrainableState, model: PyTree, trainable: Trainable | EllipsisType, reset: bool | Where
) -> TrainableState:
    parts = taken_apart(model, state)
    if not isinstance(trainable, EllipsisType):
        parts = take_apart(model, retrained(parts.layout, trainable))
    histories = _told_apart(rule.histories(state))
    known = frozenset(position for history in histories for position in index_of(history.layout).positions)
    anew = frozenset() if isinstance(reset, bool) else known.intersection(first_entries(parts.index, [reset], asked=()))
    if parts.layout == state.roles.layout and not anew and reset is not True:
        return state
    if reset is True:
        fresh = rule.start(parts)
        runs = tuple([_with_rates(rule, run, parts.layout, histories) for run in fresh.runs])
        return dataclasses.replace(fresh, runs=runs)
    check_no_memory(histories)
    now = frozenset(parts.index.positions)
    stays = known - anew
    running, held = (_at(rule, histories, positions) for positions in (now & stays, stays - now))
    if now - stays:
        begin = take_apart(model, trained_at(parts.layout, list(now - stays)))
        # Numbered after the histories that stay, so that repeated resets give one number, and a step one program.
        running.append(_begun(rule, begin, histories, _next_origin([*running, *held])))
    running.sort(key=lambda history: -int(np.max(history.count)))  # stable: `state.runs[0]` is the oldest
    is_anew = np.isin(list(parts.index.narrow), list(anew))
    still = jax.tree.map(lambda counts: jnp.where(is_anew, 0, counts), state.still)
    return _state_of(parts.layout, running, held, still)


def _told_apart(histories: Sequence[History]) -> list[History]:
    """Returns the histories, with a new origin for each that has taken other steps than the first of its origin."""
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


def _begun(rule: Rule, parts: Parts[Any], histories: Sequence[History], origin: int) -> History:
    """Returns the history of parameters that begin, with the hyperparameters that you have set for the others."""
    run = _with_rates(rule, rule.fresh(parts), parts.layout, histories)
    like = rule.like(parts.layout)
    return History(parts.layout, run, like.division, jnp.zeros((), jnp.int32), origin)


def _at(rule: Rule, histories: Sequence[History], positions: frozenset[int]) -> list[History]:
    """Returns the histories of the leaves at some positions, joined if they have one origin and stepped together."""
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


def _state_of(layout: Layout, running: Sequence[History], held: Sequence[History], still: Any) -> TrainableState:
    """Returns the state of these histories."""
    both = (*running, *held)
    origins, divisions = (tuple(map(operator.attrgetter(name), both)) for name in ("origin", "division"))
    runs, waiting = (tuple([history.state for history in side]) for side in (running, held))
    run_at, wait_at = (tuple([index_of(history.layout).positions for history in side]) for side in (running, held))
    roles = Roles(layout, run_at, wait_at, origins, divisions)
    return counting(TrainableState(runs, waiting, tuple([history.count for history in both]), roles, still))


def _with_rates(rule: Rule, fresh: PyTree, layout: Layout, histories: Sequence[History]) -> PyTree:
    """Returns a fresh state with the hyperparameters that were set since the others were made."""
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
    """Returns the bytes of the widest hyperparameter; 0 if there is none."""
    return max((jnp.dtype(rate.dtype).itemsize for each in rates for rate in each.values()), default=0)


def _by_rule(form: Form, state: PyTree) -> dict[Any, Any]:
    """Returns the nodes of `optax.inject_hyperparams` by the place of the rule; in `optim.per_leaf` the first one."""
    site, nodes = _site_of_rule(form), dict[Any, Any]()
    map_injected(lambda path, node: nodes.setdefault(site(path), node) and node, state)
    return nodes


def _site_of_rule(form: Form) -> Callable[[Any], Any]:
    """Returns a function that maps a path in a state to the place of the rule, without the leaf in `optim.per_leaf`."""
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
    """Returns the hyperparameter of another leaf for a leaf, or for each row of a stack."""
    rate = rate if jnp.shape(rate) == like.shape else jnp.broadcast_to(jnp.ravel(rate)[0], like.shape)
    return jnp.array(rate, like.dtype)
