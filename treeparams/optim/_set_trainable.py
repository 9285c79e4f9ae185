"""set_trainable, adjust, report: between steps: which parameters train or begin anew, hyperparameters, a table."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from .._forms.states import Entries
from .._slots.layout import Layout, Trainable, index_of, retrained, trained_at
from .._slots.parts import take_apart
from .._slots.where import Where
from .._tree.paths import join_path
from .._tree.structure import is_array
from .._tree.text import Printed, Table, describe
from .._tree.types import PyTree, common_dtype, is_key
from ._boundary import parts_of
from ._groups import check_groups, group_name, groups_in
from ._per_leaf import PerLeafState
from ._state import History, TrainableState, in_own_buffers, map_injected, nodes_of, noticed, rule_of, state_of
from ._step import counting
from ._updates import copies_in

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
    the rows, and new rows begin with the hyperparameters that you have set for the others of their group.

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
    # A model shows what a function or a pattern selects.
    if not (callable(reset) or isinstance(reset, (bool, str, re.Pattern, list, tuple, set, frozenset))):
        raise TypeError(f"reset must be True, False or a `where` such as 'head' or '**.bias', got {describe(reset)}")
    choice = None if trainable is ... and isinstance(reset, bool) else trainable
    if len(nodes_of(TrainableState, state)) != 1:
        raise ValueError(f"expected the state of this transformation, got {describe(state)}; order: tx, state, model")
    if [leaf for leaf in jax.tree.leaves((state, model)) if isinstance(leaf, Tracer)]:
        raise ValueError("call set_trainable between steps, outside of jax.jit: it changes the compiled program")
    is_ours = lambda node: isinstance(node, TrainableState)
    change = lambda node: _changed(rule, node, model, choice, reset) if is_ours(node) else node
    return in_own_buffers(jax.tree.map(change, noticed(state), is_leaf=is_ours), jax.tree.leaves(model))


def _changed(rule: Any, state: TrainableState, model: PyTree, trainable: Any, reset: bool | Where) -> TrainableState:
    parts = parts_of(model, state.layout)
    if not isinstance(trainable, EllipsisType):
        parts = take_apart(model, retrained(parts.layout, trainable))
    histories = rule.histories(state)
    known = frozenset([position for history in histories for position in index_of(history.layout).positions])
    anew = frozenset() if isinstance(reset, bool) else known.intersection(parts.index.first_entries([reset], asked=()))
    if parts.layout == state.roles.layout and not anew and reset is not True:
        return state
    if reset is True:
        return rule.start(parts)
    History.check_no_memory(histories)
    now, stays = frozenset(parts.index.positions), known - anew
    rule.check(parts.layout)
    begun = [rule.fresh(take_apart(model, trained_at(parts.layout, list(now - stays))))] if now - stays else []
    shared = _of_run(histories, begun)
    pairs = [(history.holding(shared), stays) for history in histories]
    pairs += [(history.holding(shared | _of_rows(histories, history)), now - stays) for history in begun]
    running, held = (_at(rule, parts.layout, pairs, side) for side in (now, known - now))
    if len(running) > 1:
        rule.check_together(parts.layout)
    running.sort(key=lambda history: -int(np.max(history.count)))  # stable: `state.runs[0]` is the oldest
    is_anew = np.isin(list(parts.index.narrow), list(anew))
    still = jax.tree.map(lambda counts: jnp.where(is_anew, 0, counts), state.still)
    return counting(state_of(parts.layout, running, held, still))


def _at(rule: Any, layout: Layout, pairs: Sequence[tuple[History, Any]], side: frozenset[int]) -> list[History]:
    """Returns the histories of the leaves on one side, those as one that share all that leaves of a history share."""
    found: dict[Any, tuple[list[History], list[int]]] = {}
    for history, stays in pairs:
        inside = [p for p in index_of(history.layout).positions if p in side and p in stays]
        if inside:
            arrays = history.copies.arrays
            clock = _bits(history.count), frozenset([(own, _bits(arrays[own])) for own in history.copies.common])
            several, its = found.setdefault(clock, ([], []))
            several.append(history)
            its += inside
    made = [(rule.like(trained_at(layout, its)), several) for several, its in found.values()]
    return [dataclasses.replace(like, state=like.made_of(own), count=own[0].count) for like, own in made]


def _bits(array: Any) -> tuple[Any, ...]:
    array = jax.random.key_data(array) if is_key(array) else array
    return array.shape, str(array.dtype), np.asarray(array).tobytes()


def _of_run(histories: Sequence[History], begun: Sequence[History]) -> dict[Entries, Any]:
    """Returns the arrays of the run, as wide as all that trains needs them."""
    if not histories:
        return {}
    kept, shared = histories[0].copies.arrays, History.of_run([*histories, *begun])
    found = {entries: kept[entries] for entries in shared if entries in kept}
    for fresh in [each.copies.arrays for each in begun]:
        found |= {entries: _in_width(found[entries], fresh[entries]) for entries in found.keys() & fresh.keys()}
    return found


def _of_rows(histories: Sequence[History], fresh: History) -> dict[Entries, Any]:
    """Returns the hyperparameters that rows in `optim.per_leaf` share, for all rows of a fresh state."""
    known: dict[Any, Any] = {}
    for each in histories:
        for entries, owners in each.copies.owned():
            if owners is not None and "hyperparams" in owners.place[1]:
                known.setdefault(owners.place, []).append(each.copies.arrays[entries][0])
    found = dict[Entries, Any]()
    for entries, owners in fresh.copies.owned():
        if owners is not None and owners.place in known:
            rows, widest = fresh.copies.arrays[entries], max(known[owners.place], key=lambda own: own.dtype.itemsize)
            found[entries] = jnp.full_like(rows, _in_width(widest, rows[0]))
    return found


def _in_width(now: Any, fresh: Any) -> Any:
    """Returns a value of the run that is as wide as a fresh one; the fresh one if it is still as it was made."""
    # Optax rounds hyperparameters to the dtype of the parameters: 0.999 in bfloat16 is 1.
    if now.dtype == fresh.dtype:
        return now
    wide = common_dtype([now.dtype, fresh.dtype])
    is_as_made = wide == fresh.dtype and _bits(now) == _bits(fresh.astype(now.dtype))
    return fresh if is_as_made else jnp.asarray(now, wide)


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
        **hyperparams: the new values, in the shapes of the old ones; inside `optim.per_leaf` a number, for all rows.
            They may be traced, and are copied.

    Returns:
        The new state.

    Warns:
        UserWarning: steps leave a bfloat16 or float16 parameter as it was; see `TrainableState.stuck`.

    Raises:
        ValueError: there is no such group; there is no such hyperparameter in it, or a schedule sets it; the
            shape differs.
    """
    if isinstance(state, optax.GradientTransformation | optax.MultiSteps):
        raise TypeError(f"expected a state, as tx.init(model) returns it, got {describe(state)}; the state comes first")
    state = noticed(state)
    if isinstance(group, (int, float)) or is_array(group):
        raise TypeError(f"expected a group, or hyperparameters by name as in learning_rate=0.1; got {group!r:.40}")
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
        raise ValueError(f"no hyperparameter {each!r} in {where}; {there}; optax.inject_hyperparams keeps them")
    return changed


def _as_before(node: Any, name: str, value: Any, of_rows: set[int]) -> jax.Array:
    if name in getattr(node, "hyperparams_states", {}):
        raise ValueError(f"{name!r} follows a schedule, which would set it again in the next step; use a number there")
    if not (isinstance(value, (bool, int, float, complex)) or is_array(value)):
        raise TypeError(f"expected a number for {name}, got {describe(value)}")
    old, given = jnp.asarray(node.hyperparams[name]), jnp.result_type(value)
    shape = () if id(node.hyperparams[name]) in of_rows else old.shape  # one for all rows
    if jnp.shape(value) != shape:
        raise ValueError(f"expected {name} of shape {shape}, got shape {jnp.shape(value)}")
    wider = (jnp.complexfloating, jnp.inexact)
    if any(jnp.issubdtype(given, kind) and not jnp.issubdtype(old.dtype, kind) for kind in wider):
        raise ValueError(f"{name} is {old.dtype}, which cannot hold {value}; write a float in inject_hyperparams")
    # A new buffer, for traced values too, since the state may be donated.
    return jnp.array(jnp.broadcast_to(value, old.shape), old.dtype, copy=True)


@dataclasses.dataclass(frozen=True)
class Report(Printed):
    """The group of each leaf; you see it printed as a table.

    Attributes:
        groups: `{path: group}` of each trained parameter; the empty text if all share one optimiser.
        table: the rows, as the texts that are printed.
        notes: the lines below: the parameters that steps leave as they were, see `TrainableState.stuck`.
    """

    groups: dict[str, str]
    table: Table
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return str(self)

    def _blocks(self) -> list[Table | str]:
        return [self.table, *self.notes]


Report.__module__ = "treeparams.types"


def report(tx: Any, model: PyTree, state: TrainableState | None = None) -> Report:
    """Shows each leaf with its group in `optim.groups`, whether it is frozen, and how many steps it has taken.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> tx = optim.trainable(optim.groups({"a": optax.sgd(1.0)}, default=optax.sgd(0.1)), "[ab]")
    >>> model = {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1)}
    >>> state = tx.update({"a": jnp.ones(2), "b": jnp.ones(3)}, tx.init(model), model)[1]
    >>> print(optim.report(tx, model, optim.set_trainable(tx, state, model)))
    path  shape  dtype    group    history  steps
    a     2      float32  a        0            1
    b     3      float32  default  0            1
    c     1      float32  default  1            0

    If bfloat16 or float16 parameters train, the column "copy" shows the dtype of the copy that `optim.master` keeps of
    each. A parameter with "none" loses steps that are below half the spacing between its neighbouring numbers. Those
    that three steps or more have left as they were are named below the table; see `TrainableState.stuck`.

    Args:
        tx: `optim.trainable(...)`.
        model: any pytree. `report` makes no optimiser state of it.
        state: a state of `tx`: you then see the leaves that train by this state, their histories and their step counts.
            Steps in which a row of stacks waited (`active=`) count too; the row's own count is in the state.

    Returns:
        An object that prints as this table; the names of groups within groups are joined by slashes.

    Raises:
        TypeError: `tx` is plain Optax; as `tp.layout`.
        ValueError: as `init`.
    """
    rule = rule_of(tx)
    if isinstance(model, TrainableState) or not isinstance(state, TrainableState | None):
        got = f"{describe(model)} and {describe(state)}"
        raise TypeError(f"expected a model and the state of tx, got {got}: write optim.report(tx, model, state)")
    layout = take_apart(model, rule.trainable if state is None else state.layout).layout
    index, names = index_of(layout), {path: list[str]() for path in layout.paths}
    like = rule.like(layout) if names else None
    shapes = () if like is None else like.state
    check_groups(shapes, index)
    form = rule.form_of(layout)
    members = {join_path(entries): slots for entries, slots in zip(form.entries, form.members, strict=True)}
    for group in groups_in(shapes):
        for path in group.paths:
            for own in [path] if path in names else [form.paths[slot] for slot in members[path]]:
                names[own].append(group.name)
    groups = {path: " / ".join(each) for path, each in names.items()}
    steps = dict[int, list[str]]()
    if state is not None:
        runs = zip((*state.roles.running, *state.roles.held), state.counts, strict=True)
        steps = {leaf: [str(n), str(count)] for n, (leaves, count) in enumerate(runs) for leaf in leaves}
    copies = {layout.paths[slot]: "none" for slot in index.narrow_slots}
    if copies and like is not None:
        copies |= {path: str(copy.dtype) for owners, copy in copies_in(shapes, like.division) for path in owners.paths}
    rows = []
    for leaf in index.distinct:
        path, spec = index.structure.paths[leaf], index.structure.spec(leaf)
        row = [path, ",".join(map(str, spec.shape)), str(spec.dtype), groups.get(path, "frozen") or "trained"]
        row += steps.get(leaf, ["", ""]) if state is not None else []
        rows.append([*row, copies.get(path, "")] if copies else row)
    header = ["path", "shape", "dtype", "group", *(["history", "steps"] if state is not None else [])]
    table = Table([*header, "copy"] if copies else header, rows, [5])
    return Report(groups, table, ("", state.stuck) if state is not None and state.stuck else ())
