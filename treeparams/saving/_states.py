"""Carries states of the old model over to the new one: regroups them, with a move between cutting and joining.

A state has several histories if parameters were frozen and thawed. Each history is a state of the rule for parameters
that have taken the same steps, and some of them wait. Each new parameter continues the history of the parameters that
it is made from, or waits with it. Parameters that nothing comes to begin a new history. The arrays of a new history are
made piece by piece, where `regroup` would use the pieces unchanged.

Groups may have other labels in the new model. A group that keeps arrays of parameters is the one in which these
parameters were.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from .._average import Ema
from .._files.arrays import placed
from .._files.names import Names, split_name, with_ties
from .._forms.states import Copies, Division, Entries, Owners, Piece, Place, entries_of, joined
from .._slots.layout import index_of, trained_at
from .._slots.parts import kept_arrays, with_kept_arrays
from .._tree.paths import join_path, key_entries, quote, unquote
from .._tree.text import describe, first_few
from .._tree.types import Array, PyTree, in_dtype, is_inexact
from ..optim._groups import groups_in
from ..optim._state import Roles, TrainableState, in_own_buffers
from ._before import Before, OldState, labelled_in, members_in, old_histories, unlabelled
from ._fit import check_given
from ._movers import Movers
from ._resume import like_history

M = TypeVar("M")


class _Continued(NamedTuple):
    """A history of the new model: the steps it has taken, and whether it waits."""

    steps: int
    waits: bool
    leaves: tuple[int, ...]
    run: PyTree
    division: Division


def carried_state(movers: Movers, source: Any, like: TrainableState) -> TrainableState:
    """Carries a state over to the new model; see `Plan.state`."""
    if not isinstance(like, TrainableState):
        raise TypeError(f"expected a fresh state of the new model, like=tx.init(model), got {describe(like)}")
    if len(like.runs) + len(like.held) > 1:
        raise ValueError("expected a fresh state of the new model, like=tx.init(model), got one with several histories")
    movers.check_like([(slot.path, slot) for slot in like.layout.slots], "tx.init(model)")
    if not like.runs:
        return like
    shapes = {slot.path: slot.shape for slot in like.layout.slots}
    fresh = Copies(shapes, entries_of(like.runs[0]), like.roles.divisions[0])
    before = old_histories(movers, source, fresh)
    moving = _Moving(movers, before, fresh, groups_in(like.runs[0]))
    _check_memory(moving, like)
    histories = [moving.history(like, home) for home in dict.fromkeys([*before.histories, None])]
    moving.check_lost()
    return _continued(like, list(filter(None, histories)))


class _Moving:
    """An old state on its way into that of the new model, like a fresh one.

    Attributes:
        reads: for each new parameter the old ones that it is made from, each with its history; none for a new one.
        homes: the old history that each new parameter continues; `None` for a new one.
    """

    def __init__(self, movers: Movers, before: OldState, fresh: Copies, groups: Iterator[Any]) -> None:
        self.movers, self.before, self.fresh = movers, before, fresh
        self.reads = {path: self._reads(path) for path in fresh.shapes}
        self.homes = {path: next((history for _, history in its), None) for path, its in self.reads.items()}
        # The new parameters in each group, by its path, and by its label where it keeps no arrays of parameters.
        self._members: dict[Any, Set[str]] = {quote(group.name): set(group.paths) for group in groups}
        self._members |= members_in(fresh)

    def _reads(self, path: str) -> list[tuple[str, Before]]:
        of, move = self.before.of, self.movers.comes.get(path)
        if move is None or not any(name in of for name in move.route.sources):
            return []
        found = {name: of.get(name) for name in self.movers.places(path).reads}
        if len({its and id(its[1]) for its in found.values()}) > 1:
            raise ValueError(_no_home(path, {name: its and its[1] for name, its in found.items()}))
        return [its for its in found.values() if its]

    def history(self, like: TrainableState, home: Before | None) -> _Continued | None:
        """Returns the history of the parameters that continue an old one, or begin.

        Only the rule knows the state that it keeps for some of the parameters, and there is no rule here to ask. So the
        state is the one for all parameters, without the arrays that belong to others alone: it has the same pieces.
        """
        at = dict(zip(like.layout.paths, index_of(like.layout).positions, strict=True))
        leaves = tuple([at[path] for path, its in self.homes.items() if its is home])
        if not leaves:
            return None
        paths = [path for path, its in self.homes.items() if its is home]
        part = _part_of(self.fresh, set(paths))
        run, division = like.runs[0], like.roles.divisions[0]
        if part is not self.fresh:
            layouts = like.layout, trained_at(like.layout, leaves)
            run, division = like_history(run, division, layouts, part.arrays, dict(part.owned()))
        piece = self.piece if home else self.begun
        made = dict(zip(part.arrays, joined(part, piece, functools.partial(self.shared, home, paths)), strict=True))
        order = part.arrays if part is self.fresh else entries_of(run)
        arrays = [_as(self.fresh.arrays[at], made[at], join_path(at), part.arrays[at].shape) for at in order]
        run = jtu.tree_unflatten(jtu.tree_structure(run), arrays)
        return _Continued(home.steps if home else 0, home is not None and home.waits, leaves, run, division)

    # -- Of each parameter

    def piece(self, place: Place, path: str) -> Piece:
        """Returns the piece for a parameter at a place in its state."""
        places = self.movers.places(path)
        if places.is_same:
            ((old, history),) = self.reads[path]
            return history.piece(place, old)
        shape, fresh = self.fresh.shapes[path], self.fresh.piece(place, path)
        try:
            arrays = [self._alone(place, name) for name in places.reads]
        except KeyError:
            raise ValueError(
                f"{self._made(path)}, and the rule keeps other arrays for it at {join_path(place[0])!r}; begin with a "
                "fresh state"
            ) from None
        specs = [self.movers.source.specs[name] for name in places.reads]
        are_like = all(it.shape == spec.shape and is_inexact(it.dtype) for it, spec in zip(arrays, specs, strict=True))
        # Such as the counts of parameters that took their steps together.
        is_one = all(array.size == 1 and bool(np.all(array == arrays[0])) for array in arrays)
        if are_like and fresh.shape_alone(shape) == shape:
            array = places.filled(arrays)
            if places.dropped is not None:
                begun = self.begun(place, path).alone(shape)
                array = jnp.where(places.dropped, begun, array.astype(begun.dtype))
        elif {it.shape for it in arrays} == {fresh.shape_alone(shape)} and is_one:
            array = arrays[0]
        else:
            raise ValueError(
                f"{self._made(path)}, but for these the state has arrays of shapes {[it.shape for it in arrays]} at "
                f"{join_path((*place[0], '*', *place[1]))!r}, which are not the parameters' shapes, and not all alike: "
                "a plan can only rename such a parameter; begin with a fresh state"
            )
        return Piece(array, Owners((path,), place, None, (), False), 0)

    @functools.cached_property
    def _alone(self) -> Callable[[Place, str], Any]:
        """A function from a place and a name to the array that an old parameter has there."""

        # Each row of a stack asks for the whole stack, one after another.
        @functools.lru_cache(maxsize=4)
        def alone(place: Place, name: str) -> Any:
            old, history = self.before.of[name]
            return history.piece(place, old).alone(history.copies.shapes[old])

        return alone

    def _made(self, path: str) -> str:
        route = self.movers.comes[path].route
        return f"{path!r} is made of {list(route.sources)} by {route.how}"

    def begun(self, place: Place, path: str) -> Piece:
        """Returns the piece that a parameter begins with."""
        piece = self.fresh.piece(place, path)
        return piece._replace(array=_with_values(piece.array, path))

    # -- Of all parameters of a history, or of those of a group

    def shared(self, home: Before | None, paths: Sequence[str], entries: Entries) -> Any:
        """Returns an array that the parameters of a history share; an array of a group is that of their old group."""
        history = home
        if home is None and "hyperparams" in entries and self.before.histories:
            # New parameters begin with the rates that were set, as after optim.set_trainable.
            history, paths = self.before.histories[0], [path for path, its in self.homes.items() if its]
        found = self._before(history, paths, entries) if history else []
        if not found:
            return _with_values(self.fresh.arrays[entries], join_path(entries))
        (first, its), *others = found
        array = first.shared(its)
        for each, other in others:
            if other != its and not np.array_equal(array, each.shared(other), equal_nan=True):
                raise ValueError(
                    f"the state has {join_path(its)!r} and {join_path(other)!r}, which differ, but parameters of both "
                    f"groups are now in one, at {join_path(entries)!r}; begin with a fresh state"
                )
        return array

    def _before(self, history: Before, paths: Sequence[str], entries: Entries) -> list[tuple[Before, Entries]]:
        """Returns where an array that is shared was before; nothing for that of a group without old parameters."""
        head = next((head for head in labelled_in(entries) if head in self._members), None)
        members = self._members.get(head, frozenset())
        reads = [(each.same(entries, old), each) for path in paths if path in members for old, each in self.reads[path]]
        if reads:
            return [(each, its) for its, each in dict(reads).items()]
        labels = list(labelled_in(entries))
        if not labels or entries in history.copies.common:
            return [(history, entries)]
        if head is None:
            members = self._members.get(labels[0][-1], frozenset())
            heads = {each for its in history.copies.common - self.fresh.common for each in labelled_in(its)}
            heads -= set().union(*(each.members for each in self.before.histories))
            others = [each for each in heads if unlabelled(each) == unlabelled(labels[0])]
            if others:
                raise ValueError(
                    f"the group {labels[0][-1]!r} keeps no array of a parameter, so nothing tells whether it was "
                    f"{first_few([each[-1] for each in others])}; give it the same name"
                )
        return [] if members.isdisjoint(paths) else [(history, entries)]

    def check_lost(self) -> None:
        """Rejects arrays, of all parameters or of used ones, for which the fresh state has no place."""
        after = {old: path for path, its in self.reads.items() for old, _ in its}
        labels = {head[-1] for entries in self.fresh.arrays for head in labelled_in(entries)}
        labels |= {label for label in self._members if isinstance(label, str)}
        pairs = [(each.at, *its) for each in self.before.histories for its in each.lost(after.keys(), labels)]
        if pairs:
            why = "it was made by another transformation, or a parameter is now in another group"
            changed = [after[old] for *_, old in pairs if old and not self.movers.places(after[old]).is_same]
            if changed:
                why = f"{self._made(changed[0])}, and the rule keeps other arrays for it; begin with a fresh state"
            names = [join_path((*at, *entries)) for at, entries, _ in pairs]
            raise ValueError(f"the state has {first_few(names)}, for which the fresh one has no place: {why}")


def _no_home(path: str, found: Mapping[str, Before | None]) -> str:
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


def _part_of(copies: Copies, paths: Set[str]) -> Copies:
    """Returns the arrays of some parameters, and the shared ones, as shapes; a joined array is shorter."""
    if paths >= copies.shapes.keys():
        return copies
    arrays, owners = dict[Entries, Any](), list[Owners | None]()
    for entries, own in copies.owned():
        array = copies.arrays[entries]
        shape = array.shape
        if own is not None and paths.isdisjoint(own.paths):
            continue
        if own is not None and own.axis is not None:
            # The pieces that are kept move together, so each begins where the last one now ends. Padding is dropped.
            kept = [number for number, path in enumerate(own.paths) if path in paths]
            sizes = [own.starts[number + 1] - own.starts[number] for number in kept]
            starts = (0, *itertools.accumulate(sizes))
            shape = (*shape[: own.axis], starts[-1], *shape[own.axis + 1 :])
            own = own._replace(paths=tuple([own.paths[number] for number in kept]), starts=starts)
        owners.append(own)
        arrays[entries] = jax.ShapeDtypeStruct(shape, array.dtype)
    return Copies(copies.shapes, arrays, Division(tuple(owners)))


def _check_memory(moving: _Moving, like: TrainableState) -> None:
    """Rejects adding parameters to those of L-BFGS, leaving some out, or giving it another form of them."""
    is_memory = optax.ScaleByLBFGSState.__instancecheck__
    nodes = jtu.tree_flatten_with_path(like.runs[0], is_leaf=is_memory)[0]
    for head in [key_entries(keys) for keys, node in nodes if is_memory(node)]:
        after = _axes(moving.fresh, head)
        reads = [each for path in after for each in moving.reads[path]]
        olds = {id(history): (history, history.same(head, old)) for old, history in reads}
        before = {path: axis for history, its in olds.values() for path, axis in _axes(history.copies, its).items()}
        # If parameters are joined along an axis, their memory is one array, and no parameter has a separate one.
        forms = {axis is None for axis in (*after.values(), *before.values())}
        homes = {moving.homes[path] for path in after}
        if reads and (len(homes) > 1 or before.keys() != {old for old, _ in reads} or len(forms) > 1):
            raise ValueError(
                "L-BFGS remembers steps of all its parameters together, in one form, so none can be added or left out; "
                "begin with a fresh state"
            )


def _axes(copies: Copies, head: Entries) -> dict[str, int | None]:
    """Returns the parameters with arrays below a node of a state, and the axis along which these join them."""
    return {path: its[1].axis for (place, path), its in copies.at.items() if place[0][: len(head)] == head}


def _with_values(array: Any, name: str) -> Any:
    """Returns a fresh array; raises an error if it has no values."""
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ValueError(f"like has no values at {name!r}, where they are needed: expected arrays, like=tx.init(model)")
    return array


def _as(like: Array | jax.ShapeDtypeStruct, array: Array, name: str, shape: tuple[int, ...]) -> Array:
    """Casts an array to the dtype of the fresh one, and places it alike if it has the same shape."""
    if array.shape != shape:
        raise ValueError(
            f"the state has {describe(array)} at {name!r}, but the fresh one has {describe(like)}: it was made by "
            "another transformation"
        )
    array = in_dtype(array, like.dtype)
    return placed(name, array, like) if shape == like.shape else jnp.asarray(array)


def _continued(like: TrainableState, histories: Sequence[_Continued]) -> TrainableState:
    """Returns the state of these histories, the oldest first, as after `optim.set_trainable`."""
    running = sorted([each for each in histories if not each.waits], key=lambda history: -history.steps)
    held = [each for each in histories if each.waits]
    sides = running, held
    trains, waits = (tuple([history.leaves for history in side]) for side in sides)
    layout = trained_at(like.layout, [leaf for at in trains for leaf in at]) if held else like.layout
    roles = Roles(layout, trains, waits, tuple([history.division for history in (*running, *held)]))
    runs, waiting = (tuple([history.run for history in side]) for side in sides)
    counts = tuple([jnp.asarray(history.steps, jnp.int32) for history in (*running, *held)])
    return in_own_buffers(TrainableState(runs, waiting, counts, roles, jax.tree.map(jnp.zeros_like, like.still)))


# -- Averages ---------------------------------------------------------------------------------------------------------


def carried_average(movers: Movers, source: Names, like: Ema[M]) -> Ema[M]:
    """Carries an average over to the new model; see `Plan.average`."""
    if not isinstance(like, Ema):
        raise TypeError(f"expected a fresh average of the new model, like=tp.Ema(model, ...), got {describe(like)}")
    if not {"count", "weight"} <= source.specs.keys():
        raise ValueError(
            'expected a tp.Ema, or the names of one, such as saving.names(path, "average"); got names such as '
            f"{first_few(list(source)[:3])}"
        )
    shadows, treedef = jtu.tree_flatten(like.shadow)
    trained, kept = dict(zip(like.rest.layout.paths, shadows, strict=True)), kept_arrays(like.rest)
    movers.check_like([*trained.items(), *kept.items()], "tp.Ema(model, ...)")
    given = with_ties(movers.source, _of_model(source))
    check_given(given, movers.source, movers.used, movers.strict, are_wide=True)

    def moved(path: str, like: Array) -> Array:
        if path not in movers.comes:
            return like
        return placed(path, in_dtype(movers.average(path, given.__getitem__), like.dtype), like)

    shadow, others = ([moved(*each) for each in its.items()] for its in (trained, kept))
    rest = with_kept_arrays(like.rest, others)
    made = jtu.tree_unflatten(treedef, shadow), rest, *(jnp.asarray(source[name]) for name in ("count", "weight"))
    return in_own_buffers(eqx.tree_at(lambda ema: (ema.shadow, ema.rest, ema.count, ema.weight), like, made))


def _of_model(source: Names) -> Names:
    """Returns the averages by the names of their parameters and the other arrays of their model."""
    # The trained parameters are a canonical tree, and all other arrays are in `rest`, by path. Which of the two a name
    # is in may have changed since: a parameter that trained may be frozen now.
    at: dict[str, str] = {}
    for name in source.specs:
        head, *entries = split_name(name)
        if head in ("shadow", "rest"):
            at[join_path(entries) if head == "shadow" else unquote(entries[0])] = name
    return Names({name: source.specs[its] for name, its in at.items()}, lambda name: source[at[name]])
