"""Carries states and averages of the old model over to the new one.

A state has several histories if parameters were frozen and thawed. Each history is a state of the rule for parameters
that have taken the same steps, and some of them wait. Each new parameter continues the history of the parameters that
it is made from, or waits with it. Parameters that nothing comes to begin a new history. Its arrays are joined from a
piece for each new parameter: the old piece unchanged, or what a function of the plan makes of old pieces, or the piece
that the parameter begins with.

A file, or a plan's source, may name a parameter differently from its path, because a program has a dictionary of dotted
keys, or because ties have changed; so this file looks parameters up. Groups may have other labels in the new model. A
group that keeps arrays of parameters is the one in which these parameters were.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.core import Tracer

from .._average import Ema
from .._files.arrays import Like, as_in_jax, placed, placed_in_turn
from .._files.names import Names, head_of, is_below, name_of, split_name
from .._files.values import Recorded, histories_in, specs_in
from .._forms.states import Copies, Division, Entries, Owners, Piece, Place, entries_of
from .._slots.layout import index_of, trained_at
from .._tree.paths import join_path, unquote
from .._tree.text import describe, first_few
from .._tree.types import Array, in_dtype, is_inexact
from ..optim._state import History, TrainableState, in_own_buffers, nodes_of, state_of
from ._contents import recorded_in, state_in_words
from ._movers import Movers
from ._names import names_of
from ._resume import like_history

M = TypeVar("M")


def carried_state(movers: Movers, source: Any, like: TrainableState) -> TrainableState:
    """Carries a state over to the new model; see `Plan.state`."""
    if not isinstance(like, TrainableState):
        raise TypeError(f"expected a fresh state of the new model, like=tx.init(model), got {describe(like)}")
    if len(like.runs) + len(like.held) > 1:
        raise ValueError("expected a fresh state of the new model, like=tx.init(model), got one with several histories")
    movers.check_like([(slot.path, slot) for slot in like.layout.slots], "tx.init(model)")
    if not like.runs:
        return like
    moving = _Moving(movers, source, History(like.layout, like.runs[0], like.roles.divisions[0]))
    pairs = [(home, made) for home in (*moving.histories, None) if (made := moving.history(home)) is not None]
    moving.check_lost()
    running = sorted([made for home, made in pairs if not (home and home.waits)], key=lambda made: -int(made.count))
    held = [made for home, made in pairs if home and home.waits]
    trains = [leaf for each in running for leaf in index_of(each.layout).positions]
    layout = trained_at(like.layout, trains) if held else like.layout
    return in_own_buffers(state_of(layout, running, held, jax.tree.map(jnp.zeros_like, like.still)))


# -- The old state -----------------------------------------------------------------------------------------------------


class _Before:
    """A history of the old state: its parameters, its arrays (read when they are used), and its steps.

    Attributes:
        at: where each parameter has an array; see `_arrays_of`.
    """

    def __init__(self, said: Recorded, copies: Copies, count: Any, get: Callable[[Any], Any]) -> None:
        self.paths, self.copies, self.waits = tuple(said.parameters), copies, said.side == "held"
        self.at, self._node, self._get = _arrays_of(copies, self.paths), said.path, get
        self.count = int(_with_values(count, "the state", "counts"))

    def name(self, entries: Entries) -> str:
        """Returns the name of an array."""
        return join_path((self._node, *entries))

    def read(self, entries: Entries) -> Any:
        """Returns an array."""
        name = self.name(entries)
        return as_in_jax(name, _with_values(self._get(self.copies.arrays[entries]), "the state", name))

    def piece(self, place: Place, path: str) -> Piece:
        """Returns the piece of a parameter at a place, whatever its group is called; a `KeyError` if there is none."""
        entries, owners, number = self.at[_unlabelled(place[0]), place[1], path]
        return Piece(self.read(entries), owners, number)


_At = tuple[Entries, Entries | None, str]


def _arrays_of(copies: Copies, paths: Iterable[str]) -> dict[_At, tuple[Entries, Owners | None, int]]:
    """Returns where each parameter has an array, by its place in a group of any name, and the path of the parameter.

    A shared array belongs to each parameter of its group, and has no entries after those of a parameter.
    """
    members = collections.defaultdict[Entries, dict[str, None]](dict, {(): dict.fromkeys(paths)})
    for place, path in copies.at:
        members[_group_of(place[0])][path] = None
    found: dict[_At, tuple[Entries, Owners | None, int]]
    found = {(_unlabelled(at), after, path): its for ((at, after), path), its in copies.at.items()}
    pairs = [(entries, path) for entries in copies.common for path in members[_group_of(entries)]]
    return found | {(_unlabelled(entries), None, path): (entries, None, 0) for entries, path in pairs}


def _group_of(entries: Entries) -> Entries:
    """Returns the beginning of a path that ends with the label of the innermost group; empty if it is in none."""
    ends = [end for end, entry in enumerate(entries[:-1], 2) if entry == "inner_states"]
    return entries[: ends[-1]] if ends else ()


def _unlabelled(entries: Entries) -> Entries:
    """Returns the entries of a path with a star for each label of a group."""
    return tuple(["*" if i and entries[i - 1] == "inner_states" else entry for i, entry in enumerate(entries)])


def _histories(movers: Movers, source: Any, fresh: Copies) -> tuple[list[_Before], Names]:
    """Returns the histories of a state, and by the names of the plan's source each parameter's path and history."""
    planned = movers.fit.source
    if isinstance(source, TrainableState):
        words, get = state_in_words(source, is_divided=False), lambda array: array
        copies = map(Copies, map(entries_of, (*source.runs, *source.held)), source.roles.divisions)
        each = zip(histories_in(words), copies, source.counts, strict=True)
    else:
        names = names_of(source)
        words, get = names.states.get(""), functools.cache(names.__getitem__)
        found = recorded_in(words, {name: name for name in names.specs}) if words else _restored(planned, names, fresh)
        each = ((said, copies, get(f"counts.{said.number}")) for said, copies in found)
    histories = [_Before(*its, get) for its in each]
    aliases, specs = dict[str, str](), planned.specs
    if words:
        specs, aliases = specs_in(words), {alias: said[0] for said in words["slots"] for alias in said[1]}
    at = {name_of(path): (path, history) for history in histories for path in history.paths}
    aliases = {name_of(alias): name_of(path) for alias, path in aliases.items() if name_of(path) in at}
    own = {name: specs[path] for name, (path, _) in at.items()}
    own |= {alias: own[name] for alias, name in aliases.items()}
    given = Names(own, lambda name: at[aliases.get(name, name)], aliases).tied_as(planned)
    movers.fit.check_given(given, planned.specs.keys() & given.specs, are_wide=True)
    return histories, given


def _restored(planned: Names, names: Names, fresh: Copies) -> Iterator[tuple[Recorded, Copies]]:
    """Yields the histories of a state without its class, as Orbax restores one, by the paths of its arrays."""
    if "counts.0" not in names.specs:
        raise ValueError(
            "expected a state of optim.trainable, or the names of one, such as saving.names(path, 'optimiser'); got "
            f"{f'names such as {first_few(list(names)[:3])}' if names else 'no arrays'}. Of a state of plain Optax, "
            "optim.from_optax(tx, state, old_model) makes one"
        )
    known = {split_name(name): (name, spec.shape) for name, spec in planned.specs.items() if spec.parameter}
    places = dict.fromkeys(own.place for _, own in fresh.owned() if own is not None)
    are_joined = any(own is not None and own.axis is not None for _, own in fresh.owned())

    def owners_of(entries: Entries) -> Owners | None:
        for before, after in places:
            own = entries[len(before) : len(entries) - len(after)]
            if own in known and entries == (*before, *own, *after):
                name, shape = known[own]
                return Owners.of([name], (before, after), None, [shape], False)
        return None

    heads = {split_name(name)[:2] for name in names.specs if head_of(name) in ("runs", "held")}
    count, number = sum(head_of(name) == "counts" for name in names.specs), 0
    for side, i in sorted(heads, key=lambda at: (at[0] == "held", int(at[1]))):
        node = join_path((side, i))
        arrays = {split_name(name)[2:]: name for name in names.specs if is_below(name, node)}
        division = Division(tuple(map(owners_of, arrays)))
        paths = dict.fromkeys(path for own in division.owners if own is not None for path in own.paths)
        if not paths and count == 1:
            paths = dict.fromkeys(name for name, _ in known.values())
        if paths and not are_joined:
            yield Recorded(side, number, node, list(paths)), Copies(arrays, division)
            number += 1
    if number < count:
        what = "nothing tells which parameters the arrays of the state are of, since they are joined, or there are none"
        raise ValueError(f"{what}; restore it into the shapes of a state, jax.eval_shape(lambda: state)")


def _with_values(array: Any, whose: str, name: str) -> Any:
    """Returns an array; raises an error if it has no values."""
    if isinstance(array, Tracer):
        raise ValueError("call plan.state between steps, outside of jax.jit: its result depends on the number of steps")
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ValueError(f"{whose} has no values at {name!r}, where they are needed: expected arrays")
    return array


# -- On its way --------------------------------------------------------------------------------------------------------


class _Moving:
    """An old state on its way into that of the new model, like a fresh one.

    Attributes:
        histories: those of the old state.
        reads: for each new parameter the old ones that it is made from, each with its history; none for a new one.
        homes: the old history that each new parameter continues; `None` for a new one.
    """

    def __init__(self, movers: Movers, source: Any, fresh: History) -> None:
        self.movers, self.fresh, self.copies = movers, fresh, fresh.copies
        self.histories, self._of = _histories(movers, source, fresh.copies)
        self.reads = {path: self._reads(path) for path in fresh.layout.paths}
        self.homes = {path: its[0][1] if its else None for path, its in self.reads.items()}
        self._at = _arrays_of(self.copies, fresh.layout.paths)
        # Each row of a stack asks for the whole stack, one after another.
        alone = lambda place, name: self._of[name][1].piece(place, self._of[name][0]).alone()
        self._alone = functools.lru_cache(maxsize=4)(alone)
        if nodes_of(optax.ScaleByLBFGSState, fresh.state) and self.histories:
            self._check_memory()

    def _reads(self, path: str) -> list[tuple[str, _Before]]:
        move = self.movers.comes.get(path)
        if move is None or self._of.specs.keys().isdisjoint(move.route.sources):
            return []
        found = {name: self._of.get(name) for name in self.movers.places(path).reads}
        if len({its and its[1] for its in found.values()}) > 1:
            have = [f"{name!r} {_history_in_words(its and its[1])}" for name, its in found.items()]
            raise ValueError(
                f"{path!r} is made of parameters that have not taken their steps together, or of which some wait "
                f"({', '.join(have)}), so there is no state for it; freeze or thaw them together first, "
                "optim.set_trainable(tx, state, model, ...), or begin with a fresh state"
            )
        return [its for its in found.values() if its]

    def _check_memory(self) -> None:
        """Rejects adding parameters to those of L-BFGS, leaving some out, or giving it another form of them."""
        before, olds = self.histories[0], {old for its in self.reads.values() for old, _ in its}
        # If parameters are joined along an axis, their memory is one array, and no parameter has a separate one.
        forms = {own.axis is None for each in (self.copies, before.copies) for _, own in each.owned() if own}
        is_whole = olds == {*before.paths} and set(self.homes.values()) == {before}
        if olds and not (is_whole and len(forms) == 1):
            what = (
                "L-BFGS remembers steps of all its parameters together, in one form, so none can be added or left out"
            )
            raise ValueError(f"{what}; begin with a fresh state")

    def history(self, home: _Before | None) -> History | None:
        """Returns the history of the parameters that continue an old one, or begin; `None` if there are none.

        Only the rule knows the state that it keeps for some of the parameters, and there is no rule here to ask. So the
        state is the one for all parameters, without the arrays that belong to others alone: it has the same pieces.
        """
        paths = {path for path, its in self.homes.items() if its is home}
        if not paths:
            return None
        made, part = self.fresh, self.copies
        if len(paths) < len(self.homes):
            part, index = _part_of(self.copies, paths), index_of(made.layout)
            layout = trained_at(made.layout, [index.structure.index[path] for path in paths])
            made = like_history(made, layout, part)
        arrays = part.joined(self._piece if home else self._begun, functools.partial(self._shared, home))
        made = made.holding(self._as_fresh(part, arrays))
        return dataclasses.replace(made, count=jnp.asarray(home.count if home else 0, jnp.int32))

    def _as_fresh(self, part: Copies, arrays: Sequence[Array]) -> dict[Entries, Array]:
        """Casts arrays to the dtypes of the fresh ones, and places those alike that have the same shape."""
        coming = dict[Entries, Like]()
        for (at, want), array in zip(part.arrays.items(), arrays, strict=True):
            name, like = join_path(at), self.copies.arrays[at]
            if array.shape != want.shape:
                what = f"the state has {describe(array)} at {name!r}, but the fresh one has {describe(like)}"
                raise ValueError(f"{what}: it was made by another transformation")
            coming[at] = name, in_dtype(array, like.dtype), like if want.shape == like.shape else want
        return dict(placed_in_turn(coming.items()))

    # -- Of each parameter

    def _begun(self, place: Place, path: str) -> Piece:
        """Returns the piece that a parameter begins with."""
        piece = self.copies.piece(place, path)
        return piece._replace(array=_with_values(piece.array, "like", path))

    def _piece(self, place: Place, path: str) -> Piece:
        """Returns the piece for a parameter at a place in its state."""
        places = self.movers.places(path)
        if places.is_same:
            ((old, history),) = self.reads[path]
            return history.piece(place, old)
        arrays, route = [self._alone(place, name) for name in places.reads], self.movers.comes[path].route
        shapes = [self.movers.fit.source.specs[name].shape for name in places.reads]
        shape = self.copies.piece(place, path).shape
        are_like = [array.shape for array in arrays] == shapes and all(is_inexact(array.dtype) for array in arrays)
        if are_like and shape == self.fresh.layout[path].shape:
            array = places.filled(arrays)
            if places.dropped is not None:
                begun = self._begun(place, path).alone()
                array = jnp.where(places.dropped, begun, array.astype(begun.dtype))
            return Piece(array)
        # Such as the counts of parameters that took their steps together.
        if all(array.shape == shape and array.size == 1 and bool(np.all(array == arrays[0])) for array in arrays):
            return Piece(arrays[0])
        raise ValueError(
            f"{path!r} is made of {list(route.sources)} by {route.how}, but for these the state has arrays of shapes "
            f"{[array.shape for array in arrays]} at {join_path((*place[0], '*', *place[1]))!r}, which are not the "
            "parameters' shapes, and not all alike: a plan can only rename such a parameter; begin with a fresh state"
        )

    # -- Of all parameters of a history, or of those of a group

    def _shared(self, home: _Before | None, entries: Entries) -> Any:
        """Returns an array that the parameters of a history share; an array of a group is that of their old group."""
        # New parameters begin with the rates that were set, as after optim.set_trainable.
        are_all = home is None and "hyperparams" in entries
        home = next(iter(self.histories), None) if are_all else home
        members = [path for (_, after, path), (its, *_) in self._at.items() if after is None and its == entries]
        reads = [each for path in members for each in self.reads[path] if are_all or each[1] is home]
        found = {history.at[_unlabelled(entries), None, old][0]: history for old, history in reads}
        if home and not found:  # a group without parameters in this history is known by its label
            found = {entries: home} if entries in home.copies.common else {}
            if not (found or members):
                self._check_label(home, entries)
        if not found:
            return _with_values(self.copies.arrays[entries], "like", join_path(entries))
        arrays = [history.read(its) for its, history in found.items()]
        if not all(np.array_equal(arrays[0], other, equal_nan=True) for other in arrays[1:]):
            raise ValueError(
                f"the state has {first_few([join_path(its) for its in found])}, which differ, but parameters of these "
                f"groups are now in one, at {join_path(entries)!r}; begin with a fresh state"
            )
        return arrays[0]

    def _check_label(self, home: _Before, entries: Entries) -> None:
        """Rejects a new label where another group was that keeps nothing of its parameters either."""
        others = home.copies.common - self.copies.common - {its for its, *_ in home.at.values()}
        labels = [_group_of(its)[-1] for its in others if _unlabelled(its) == _unlabelled(entries)]
        if labels:
            what = f"the group {_group_of(entries)[-1]!r} keeps no array of a parameter"
            raise ValueError(f"{what}, so nothing tells whether it was {first_few(labels)}; give it the same name")

    def check_lost(self) -> None:
        """Rejects arrays, of used parameters or of all in their group, for which the fresh state has no place."""
        after = {old: path for path, its in self.reads.items() for old, _ in its}
        shared = set(map(_unlabelled, self.copies.common))
        lost = {
            each.name(entries): None
            for each in self.histories
            for (*place, path), (entries, *_) in each.at.items()
            if path in after and (place[0] not in shared if place[1] is None else (*place, after[path]) not in self._at)
        }
        if lost:
            why = "it was made by another transformation, or a parameter is now in another group, or of another shape"
            raise ValueError(f"the state has {first_few(list(lost))}, for which the fresh one has no place: {why}")


def _history_in_words(history: _Before | None) -> str:
    return "begins" if history is None else f"{'waits after ' if history.waits else ''}{history.count} steps"


def _part_of(copies: Copies, paths: Set[str]) -> Copies:
    """Returns the arrays of some parameters, and the shared ones, as shapes; a joined array is shorter."""
    arrays, found = dict[Entries, Any](), list[Owners | None]()
    for entries, own in copies.owned():
        shape, dtype = copies.arrays[entries].shape, copies.arrays[entries].dtype
        if own is not None:
            kept = [number for number, path in enumerate(own.paths) if path in paths]
            if not kept:
                continue
            if own.axis is not None:  # the pieces that are kept move together, and padding is dropped
                names, shapes, axis = [own.paths[n] for n in kept], [own.block.shapes[n] for n in kept], own.axis
                own = Owners.of(names, own.place, axis, shapes, own.block.has_rows)
                shape = (*shape[:axis], own.block.starts[-1], *shape[axis + 1 :])
        found.append(own)
        arrays[entries] = jax.ShapeDtypeStruct(shape, dtype)
    return Copies(arrays, Division(tuple(found)))


# -- Averages ---------------------------------------------------------------------------------------------------------


def carried_average(movers: Movers, source: Names, like: Ema[M]) -> Ema[M]:
    """Carries an average over to the new model; see `Plan.average`."""
    if not isinstance(like, Ema):
        raise TypeError(f"expected a fresh average of the new model, like=tp.Ema(model, ...), got {describe(like)}")
    if not {"count", "weight"} <= source.specs.keys():
        expected = 'expected a tp.Ema, or the names of one, such as saving.names(path, "average")'
        raise ValueError(f"{expected}; got names such as {first_few(list(source)[:3])}")
    shadows, treedef = jtu.tree_flatten(like.shadow)
    trained = dict(zip(like.rest.layout.paths, shadows, strict=True))
    kept = dict(zip(like.rest.paths, like.rest.arrays, strict=True))
    movers.check_like([*trained.items(), *kept.items()], "tp.Ema(model, ...)")

    # The trained parameters are a canonical tree, and all other arrays are in `rest`, by path. Which of the two a name
    # is in may have changed since: a parameter that trained may be frozen now.
    def path_of(name: str) -> str | None:
        head, *entries = split_name(name)
        return join_path(entries) if head == "shadow" else unquote(entries[0]) if head == "rest" else None

    given = source.under(path_of).tied_as(movers.fit.source)
    movers.fit.check_given(given, movers.used, are_wide=True)

    def moved(path: str, like: Array) -> Array:
        if path not in movers.comes:
            return like
        return placed(path, in_dtype(movers.average(path, given.__getitem__), like.dtype), like)

    shadow, others = ([moved(*each) for each in its.items()] for its in (trained, kept))
    rest = like.rest.replaced(others)
    made = jtu.tree_unflatten(treedef, shadow), rest, *(jnp.asarray(source[name]) for name in ("count", "weight"))
    return in_own_buffers(eqx.tree_at(lambda ema: (ema.shadow, ema.rest, ema.count, ema.weight), like, made))
