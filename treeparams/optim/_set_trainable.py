"""set_trainable, adjust: changes between steps: which parameters train or begin anew, hyperparameters."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._forms.states import Entries, Place, entries_of
from .._slots.index import first_entries
from .._slots.layout import Layout, Trainable, index_of, retrained, trained_at
from .._slots.parts import Parts, take_apart
from .._slots.where import Leaves, Where
from .._tree.structure import is_array
from .._tree.text import describe
from .._tree.types import PyTree, common_dtype
from ._boundary import counting, taken_apart
from ._groups import group_name, groups_in
from ._per_leaf import PerLeafState
from ._state import (
    History,
    TrainableState,
    check_no_memory,
    check_state,
    free_rates,
    in_own_buffers,
    map_injected,
    nodes_of,
    noticed,
    of_run,
    regrouped,
    rule_of,
    state_of,
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
    it, it goes on **with its own count**, as if the steps in between had not happened for it. A parameter that trains
    for the first time starts at count zero.

    **The run has all that holds no array of a parameter**: the count of a schedule, a plateau, injected rates, the
    state of a clip or of `optax.apply_if_finite`. It goes on in each step, for all. So `optax.adam(schedule)` keeps two
    counts: Adam's corrections go by the parameter's, the rate goes by the run's. Inside `optim.per_leaf` all belongs to
    the rows, and fresh ones get the hyperparameters that you have set by `optim.adjust`.

    **`reset=where` resets part of the model**, such as a head that you re-initialise. Given alone, it does not change
    which parameters train.

    >>> model["y"] = jnp.zeros(2)
    >>> state = optim.set_trainable(tx, state, model, reset="y")
    >>> [int(count) for count in state.counts], state.layout.paths
    ([2, 0], ('x', 'y'))

    A reset parameter is like one that trains for the first time, with a separate history. The held state of a frozen
    parameter is dropped, and a tied parameter is reset at all its places.

    Parameters with the same step count, and equal values of all else that `tx` shares between parameters, have one
    history: one run of `tx`. Others have one each, as if each were a group. Further histories cost tracing time, and
    over a vector a run over the whole of it each. A transformation that couples parameters, such as a clip, still sees
    all of them. It must come before those that use the step count, as in
    `optax.chain(optim.clip_by_global_norm(1.0), optax.adam(1e-3))`. Held
    states are passed through each step: donate the state, or it is copied (9 ms for 16 MB). To restore such a state
    with Orbax, pickle its structure with it, `jax.eval_shape(lambda: state)`: a fresh `init` has one history.

    Args:
        tx: the `optim.trainable(...)` that made the state.
        state: its state, or that of a chain or wrapper around `tx`, whose other parts stay as they are; not that of an
            ensemble (`jax.vmap` of `init`).
        model: the model as it is now.
        trainable: the parameters that train from now on: `None` (as declared), a mask, a `where` or a `Layout`; see
            `tp.layout`. Ties are those in the state. If you leave it out, it is `None`, or with `reset=where` the
            choice in the state.
        reset: a `where` of parameters whose moments and counts start afresh, including frozen ones; the state of the
            run goes on. `True` begins all of it anew.

    Returns:
        The new state. A frozen parameter costs no more than its held state.

    Warns:
        UserWarning: steps leave a bfloat16 or float16 parameter as it was; see `TrainableState.stuck`.

    Raises:
        ValueError: `tx` contains L-BFGS, which remembers all parameters together, and `reset` is not `True`; several
            histories train, and `tx` couples parameters after it has used their counts; the model does not fit the
            state; the state is traced or was made by another `tx`; `reset` selects nothing, or only one place of an
            array that is at several; as `tp.layout`.
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
    if [leaf for leaf in jax.tree.leaves((state, model)) if isinstance(leaf, Tracer)]:
        raise ValueError("call set_trainable between steps, outside of jax.jit: it changes the compiled program")

    state = noticed(state)

    def change(node: Any) -> Any:
        return _changed(rule, node, model, choice, reset) if _is_ours(node) else node

    return in_own_buffers(jax.tree.map(change, state, is_leaf=_is_ours), jax.tree.leaves(model))


def _is_ours(node: object) -> bool:
    return isinstance(node, TrainableState)


def _check_where(reset: object) -> None:
    """Checks that an argument that is not a bool may be a `where`; a model shows its selection."""
    if not (callable(reset) or isinstance(reset, (str, re.Pattern, Leaves, list, tuple, set, frozenset))):
        raise TypeError(f"reset must be True, False or a `where` such as 'head' or '**.bias', got {describe(reset)}")


def _changed(
    rule: Any, state: TrainableState, model: PyTree, trainable: Trainable | EllipsisType, reset: bool | Where
) -> TrainableState:
    parts = taken_apart(model, state)
    if not isinstance(trainable, EllipsisType):
        parts = take_apart(model, retrained(parts.layout, trainable))
    histories = rule.histories(state)
    known = frozenset([position for history in histories for position in index_of(history.layout).positions])
    anew = frozenset() if isinstance(reset, bool) else known.intersection(first_entries(parts.index, [reset], asked=()))
    if parts.layout == state.roles.layout and not anew and reset is not True:
        return state
    if reset is True:
        return rule.start(parts)
    check_no_memory(histories)
    now = frozenset(parts.index.positions)
    stays = known - anew
    rule.check(parts.layout)
    begun = [_begun(rule, take_apart(model, trained_at(parts.layout, list(now - stays))))] if now - stays else []
    shared = _of_run(rule, histories, begun)
    pairs = [(history.holding(shared), stays) for history in histories]
    pairs += [(_as_set(rule, history.holding(shared), histories), now - stays) for history in begun]
    running, held = _at(rule, parts.layout, pairs, now), _at(rule, parts.layout, pairs, known - now)
    if len(running) > 1:
        rule.check_together(parts.layout)
    running.sort(key=lambda history: -int(np.max(history.count)))  # stable: `state.runs[0]` is the oldest
    is_anew = np.isin(list(parts.index.narrow), list(anew))
    still = jax.tree.map(lambda counts: jnp.where(is_anew, 0, counts), state.still)
    return counting(state_of(parts.layout, running, held, still))


def _begun(rule: Any, parts: Parts[Any]) -> History:
    """Returns the history of parameters that begin."""
    run = rule.fresh(parts)
    return History(parts.layout, run, rule.like(parts.layout, run).division, jnp.zeros((), jnp.int32))


def _at(
    rule: Any, layout: Layout, pairs: Sequence[tuple[History, frozenset[int]]], side: frozenset[int]
) -> list[History]:
    """Returns the histories of the leaves on one side, those as one that share all that leaves of a history share."""
    found: dict[Any, tuple[list[History], list[int]]] = {}
    for history, stays in pairs:
        inside = [p for p in index_of(history.layout).positions if p in side and p in stays]
        if inside:
            several, its = found.setdefault(_clock(history), ([], []))
            several.append(history)
            its += inside
    made = [(rule.like(trained_at(layout, its)), several) for several, its in found.values()]
    return [dataclasses.replace(like, state=regrouped(own, like), count=own[0].count) for like, own in made]


def _clock(history: History) -> frozenset[Any]:
    """Returns the count of a history, and its arrays that are no leaf's: equal for histories that go on as one."""
    arrays = history.copies.arrays
    return frozenset([("", _bits(history.count)), *[(own, _bits(arrays[own])) for own in history.copies.common]])


def _bits(array: Any) -> tuple[Any, ...]:
    array = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    return array.shape, str(array.dtype), np.asarray(array).tobytes()


def _of_run(rule: Any, histories: Sequence[History], begun: Sequence[History]) -> dict[Entries, Any]:
    """Returns the arrays of the run, as wide as all that trains needs them."""
    if not histories:
        return {}
    first = histories[0]
    kept, shared = first.copies.arrays, of_run([*histories, *begun])
    found = {entries: kept[entries] for entries in shared if entries in kept}
    fresh = {entries: array for each in begun for entries, array in each.copies.arrays.items() if entries in found}
    wider = {entries: _wider(found[entries], array) for entries, array in fresh.items()}
    if any(found[entries].dtype != dtype for entries, dtype in wider.items()):
        # Optax rounds hyperparameters to the dtype of the parameters: 0.999 in bfloat16 is 1.
        start = entries_of(rule.begun(first.layout))
        for entries, dtype in wider.items():
            is_as_made = _bits(found[entries]) == _bits(start[entries])
            found[entries] = fresh[entries] if is_as_made else jnp.asarray(found[entries], dtype)
    return found


def _wider(one: Any, other: Any) -> Any:
    return one.dtype if one.dtype == other.dtype else common_dtype([one.dtype, other.dtype])


def _as_set(rule: Any, fresh: History, histories: Sequence[History]) -> History:
    """Returns a fresh history with the hyperparameters that you have set for other rows in `optim.per_leaf`."""
    rates = {entries: rate for entries, owners in fresh.copies.owned() if (rate := _rate_of_rows(entries, owners))}
    changed = dict[Any, Any]()
    for history in histories if rates else ():
        start = entries_of(rule.begun(history.layout))
        for entries, owners in history.copies.owned():
            rate, array = _rate_of_rows(entries, owners), history.copies.arrays[entries]
            if rate and _bits(array) != _bits(start[entries]):
                known = changed.setdefault(rate, array)
                changed[rate] = array if array.dtype.itemsize > known.dtype.itemsize else known
    arrays = fresh.copies.arrays
    known = {entries: jnp.ravel(changed[rate])[0] for entries, rate in rates.items() if rate in changed}
    return fresh.holding({entries: jnp.full_like(arrays[entries], rate) for entries, rate in known.items()})


def _rate_of_rows(entries: Entries, owners: Any) -> Place | None:
    """Returns the place of a hyperparameter that each row in `optim.per_leaf` has, whether there are rows or not."""
    if owners is None and "spare" in entries:
        at = entries.index("spare")
        place = (*entries[:at], "states"), entries[at + 1 :]
    elif owners is not None and owners.block.has_rows:
        place = owners.place
    else:
        return None
    return place if "hyperparams" in place[1] else None


S = TypeVar("S")


def adjust(state: S, group: Where | None = None, **hyperparams: ArrayLike) -> S:
    """Changes hyperparameters that `optax.inject_hyperparams` keeps in an optimiser's state.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> sgd = optax.inject_hyperparams(optax.sgd)
    >>> tx = optim.trainable(optim.groups({"a": sgd(0.1)}, default=sgd(0.1)))
    >>> model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    >>> state = optim.adjust(tx.init(model), "a", learning_rate=0.5)
    >>> tx.update({"a": jnp.ones(1), "b": jnp.ones(1)}, state, model)[0]
    {'a': Array([-0.5], dtype=float32), 'b': Array([-0.1], dtype=float32)}

    A jitted step is not traced again. The hyperparameters of frozen parameters change too, so that you thaw them with
    the same rate.

    Args:
        state: any state of this library or of Optax.
        group: the key of one group of `optim.groups`, or "default"; `None` changes all groups.
        **hyperparams: the new values, in the shapes of the old ones; they may be traced. They are copied. Inside
            `optim.per_leaf` a number applies to all leaves and rows.

    Returns:
        The new state.

    Warns:
        UserWarning: steps leave a bfloat16 or float16 parameter as it was; see `TrainableState.stuck`.

    Raises:
        ValueError: there is no such group; there is no such hyperparameter in it, or a schedule sets it; the shape
            differs.
    """
    check_state(state)
    state = noticed(state)
    if isinstance(group, (int, float)) or is_array(group):
        raise TypeError(f"expected a group, or hyperparameters by name as in learning_rate=0.1; got {group!r:.40}")
    if isinstance(group, TrainableState):
        raise TypeError("the state comes first: optim.adjust(state, group, learning_rate=0.1)")
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
        raise ValueError(f"no group {name!r} in the state; it has {', '.join(map(repr, sorted(groups))) or 'none'}")
    for each in hyperparams.keys() - found:
        there = f"it has {', '.join(map(repr, sorted(known))) or 'none'}"
        where = "the state" if name is None else f"the state of group {name!r}"
        raise ValueError(
            f"no hyperparameter {each!r} in {where}; {there}. You can adjust only those that optax.inject_hyperparams "
            "keeps in the state: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)"
        )
    return changed


def _as_before(node: Any, name: str, value: Any, of_rows: set[int]) -> jax.Array:
    if name not in free_rates(node):
        raise ValueError(f"{name!r} follows a schedule, which would set it again in the next step; use a number there")
    if not (isinstance(value, (bool, int, float, complex)) or is_array(value)):
        raise TypeError(f"expected a number for {name}, got {describe(value)}")
    old, given = jnp.asarray(node.hyperparams[name]), jnp.result_type(value)
    is_for_all = jnp.shape(value) == () and id(node.hyperparams[name]) in of_rows
    if jnp.shape(value) != old.shape and not is_for_all:
        raise ValueError(f"expected {name} of shape {old.shape}, got shape {jnp.shape(value)}")
    wider = (jnp.complexfloating, jnp.inexact)
    if any(jnp.issubdtype(given, kind) and not jnp.issubdtype(old.dtype, kind) for kind in wider):
        raise ValueError(
            f"{name} is {old.dtype}, which cannot hold {value}; write the number in inject_hyperparams as a float"
        )
    # A new buffer, for traced values too, since the state may be donated.
    return jnp.array(jnp.broadcast_to(jnp.asarray(value, old.dtype), old.shape), copy=True)
