"""Carries states of the old model over to the new one: regroups them, with a move between cutting and joining.

A state has several histories if parameters were frozen and thawed. Each history is a state of the rule for parameters
that have taken the same steps, and some of them wait. The new histories differ from the old ones. Each new parameter
continues the history of the parameters that it is made from, or waits with it (`_homes`). Parameters
that nothing comes to begin a new history. The arrays of a new history are made piece by piece (`Moving`), where
`regroup` would use the pieces unchanged.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from .._files.arrays import placed
from .._files.names import Names
from .._forms.states import Copies, Division, Entries, entries_of, joined, only
from .._slots.layout import index_of, trained_at
from .._tree.paths import join_path, key_entries
from .._tree.text import describe, first_few
from .._tree.types import Array, PyTree, in_dtype
from ..optim._groups import groups_in
from ..optim._state import Roles, TrainableState, in_own_buffers
from ._before import Before, Source, histories_before, unlabelled
from ._movers import Movers
from ._pieces import Moving


class _History(NamedTuple):
    """A history of the new model: the steps it has taken, and whether it waits."""

    steps: int
    waits: bool
    paths: list[str]
    run: PyTree
    division: Division


def carried_state(movers: Movers, source: Names, like: TrainableState) -> TrainableState:
    """Carries a state over to the new model; see `Plan.state`."""
    if not isinstance(like, TrainableState):
        raise TypeError(f"expected a fresh state of the new model, like=tx.init(model), got {describe(like)}")
    before = histories_before(movers, source)
    if len(like.runs) + len(like.held) > 1:
        raise ValueError("expected a fresh state of the new model, like=tx.init(model), got one with several histories")
    movers.check_like([(slot.path, slot) for slot in like.layout.slots], "tx.init(model)")
    if not like.runs:
        return like
    homes = _homes(movers, before, like.layout.paths)
    moving = Moving(movers, before, _fresh(like), homes, list(groups_in(like.runs[0])))
    _check_memory(moving, like)
    _check_lost(moving)
    histories = list[_History]()
    for home in [*before.histories, None]:
        paths = [path for path, its in homes.items() if its is home]
        if paths:
            run, division = _run_of(like, moving, home, paths)
            histories.append(_History(home.steps if home else 0, home is not None and home.waits, paths, run, division))
    return _state_of(like, histories)


def _fresh(like: TrainableState) -> Copies:
    """Returns the arrays of the fresh state, or their shapes."""
    arrays, division = entries_of(like.runs[0]), like.roles.divisions[0]
    fresh = Copies({slot.path: slot.shape for slot in like.layout.slots}, arrays, division)
    fresh.check()
    if len(arrays) != len(division.owners):
        raise ValueError("like was changed since its transformation made it: it has other arrays; pass tx.init(model)")
    return fresh


def _homes(movers: Movers, before: Source, paths: Sequence[str]) -> dict[str, Before | None]:
    """Returns the history that each parameter continues; `None` for a new one."""
    homes: dict[str, Before | None] = {}
    for path in paths:
        known = any(name in before.of for name in movers.sources(path))
        sources = {name: before.of.get(name) for name in movers.reads(path)} if known else {}
        found = {name: its[1] if its else None for name, its in sources.items()}
        distinct = list(dict.fromkeys(found.values()))
        if len(distinct) > 1:
            raise ValueError(_no_home(path, found))
        homes[path] = distinct[0] if distinct else None
    return homes


def _no_home(path: str, found: dict[str, Before | None]) -> str:
    if len({home.waits for home in found.values() if home}) > 1:
        sides = [f"{name!r} {'waits' if home and home.waits else 'trains'}" for name, home in found.items()]
        return (
            f"{path!r} is made of parameters of which some wait and others train ({first_few(sides)}), so there is no "
            "state for it; freeze or thaw them together first, optim.set_trainable(tx, state, model, ...)"
        )
    steps = [f"{name!r} {home.steps if home else 'no'}" for name, home in found.items()]
    return (
        f"{path!r} is made of parameters that have not taken their steps together ({', '.join(steps)} steps), so there "
        "is no state for it; begin with a fresh one"
    )


def _check_memory(moving: Moving, like: TrainableState) -> None:
    """Rejects adding parameters to those of L-BFGS, leaving some out, or giving it another form of them."""
    nodes = jtu.tree_flatten_with_path(like.runs[0], is_leaf=_is_memory)[0]
    for head in [key_entries(keys) for keys, node in nodes if _is_memory(node)]:
        after = _below(moving.fresh, head)
        homes = {moving.homes[path] for path in after}
        reads = [each for path in after if moving.homes[path] for each in moving.reads(path)]
        olds = {id(history): (history, history.same(head, old)) for old, history in reads}
        before = {path: axis for history, its in olds.values() for path, axis in _below(history.copies, its).items()}
        # If parameters are joined along an axis, their memory is one array, and no parameter has a separate one.
        forms = {axis is None for axis in (*after.values(), *before.values())}
        if reads and (len(homes) > 1 or before.keys() != {old for old, _ in reads} or len(forms) > 1):
            raise ValueError(
                "L-BFGS remembers steps of all its parameters together, in one form, so none can be added or left out; "
                "begin with a fresh state"
            )


def _is_memory(node: object) -> bool:
    return isinstance(node, optax.ScaleByLBFGSState)


def _below(copies: Copies, head: Entries) -> dict[str, int | None]:
    """Returns the parameters with arrays below a node of a state, and the axis along which these join them."""
    return {path: its[1].axis for (place, path), its in copies.at.items() if place[0][: len(head)] == head}


def _check_lost(moving: Moving) -> None:
    """Rejects arrays, of all parameters or of used ones, for which the fresh state has no place."""
    reads = {path: moving.reads(path) for path, home in moving.homes.items() if home}
    after = {old: path for path, its in reads.items() for old, _ in its}
    places = [((unlabelled(place[0]), place[1]), path) for place, path in moving.fresh.at]
    taken = {(place, old) for place, path in places for old, _ in reads.get(path, ())}
    shared = set(map(unlabelled, moving.fresh.common))
    lost, changed = list[str](), list[str]()  # the names of arrays, and the parameters that are made of theirs
    for history in moving.before.histories:
        for entries, owners in history.copies.owned():
            if owners is None:
                is_lost = unlabelled(entries) not in shared and not history.is_of_others(entries, after.keys())
            else:
                place = unlabelled(owners.place[0]), owners.place[1]
                its = [after[path] for path in owners.paths if path in after and (place, path) not in taken]
                is_lost, changed = bool(its), [*changed, *(path for path in its if not moving.movers.is_plain(path))]
            if is_lost:
                lost.append(join_path((*history.at, *entries)))
    if lost:
        why = "it was made by another transformation, or a parameter is now in another group"
        if changed:
            how = moving.movers.how(changed[0])
            why = f"{changed[0]!r} is made by {how}, and the rule keeps other arrays for it; begin with a fresh state"
        raise ValueError(f"the state has {first_few(lost)}, for which the fresh one has no place: {why}")


def _run_of(like: TrainableState, moving: Moving, home: Before | None, paths: Sequence[str]) -> tuple[PyTree, Division]:
    """Returns a state of the rule, and its division.

    Only the rule knows the state that it keeps for some of the parameters, and there is no rule here to ask. So the
    state is the one for all parameters, without the arrays that belong to others alone: it has the same pieces.
    """
    run, its = only(like.runs[0], moving.fresh, set(paths))
    piece = moving.piece if home else moving.begun
    made = zip(its.arrays.items(), joined(its, piece, functools.partial(moving.shared, home, paths)), strict=True)
    arrays = [
        _as(moving.fresh.arrays[entries], array, join_path(entries), want.shape) for (entries, want), array in made
    ]
    return jtu.tree_unflatten(jtu.tree_structure(run), arrays), its.division


def _as(like: Array | jax.ShapeDtypeStruct, array: Array, name: str, shape: tuple[int, ...]) -> Array:
    """Casts an array to the dtype of the fresh one, and places it alike if it has the same shape."""
    if array.shape != shape:
        raise ValueError(
            f"the state has {describe(array)} at {name!r}, but the fresh one has {describe(like)}: it was made by "
            "another transformation"
        )
    array = in_dtype(array, like.dtype)
    return placed(name, array, like) if shape == like.shape else jnp.asarray(array)


def _state_of(like: TrainableState, histories: Sequence[_History]) -> TrainableState:
    """Returns the state of these histories, the oldest first, as after `optim.set_trainable`."""
    leaves = dict(zip(like.layout.paths, index_of(like.layout).positions, strict=True))
    running = sorted([each for each in histories if not each.waits], key=lambda history: -history.steps)
    held = [each for each in histories if each.waits]
    both = [*running, *held]
    trains, waits = (
        tuple([tuple([leaves[path] for path in history.paths]) for history in side]) for side in (running, held)
    )
    layout = trained_at(like.layout, [leaf for at in trains for leaf in at]) if held else like.layout
    roles = Roles(layout, trains, waits, tuple([history.division for history in both]))
    counts = tuple([jnp.asarray(history.steps, jnp.int32) for history in both])
    runs, waiting = (tuple([history.run for history in side]) for side in (running, held))
    return in_own_buffers(TrainableState(runs, waiting, counts, roles, jax.tree.map(jnp.zeros_like, like.still)))
