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
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.core import Tracer

from .._average import Ema
from .._files.arrays import as_in_jax, placed
from .._files.names import Names, head_of, is_below, name_of, split_name, with_ties
from .._files.values import histories_in, specs_in
from .._forms.states import Copies, Division, Entries, Owners, Piece, Place, entries_of, joined
from .._slots.layout import index_of, trained_at
from .._slots.parts import kept_arrays, with_kept_arrays
from .._tree.paths import join_path, quote, split_path, unquote
from .._tree.structure import Spec
from .._tree.text import describe, first_few
from .._tree.types import Array, in_dtype, is_inexact
from ..optim._groups import groups_in
from ..optim._state import History, TrainableState, in_own_buffers, nodes_of, state_of
from ._contents import division_in
from ._fit import check_given
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
    moving.check_memory()
    homes = dict.fromkeys([*moving.histories, None])
    pairs = [(home, made) for home in homes if (made := moving.history(home)) is not None]
    moving.check_lost()
    running = sorted([made for home, made in pairs if not (home and home.waits)], key=lambda made: -int(made.count))
    held = [made for home, made in pairs if home and home.waits]
    trains = [leaf for each in running for leaf in index_of(each.layout).positions]
    layout = trained_at(like.layout, trains) if held else like.layout
    return in_own_buffers(state_of(layout, running, held, jax.tree.map(jnp.zeros_like, like.still)))


# -- The old state -----------------------------------------------------------------------------------------------------


class _Before:
    """A history of the old state: its place in the state, its parameters, arrays and steps.

    In place of arrays it may have their names, for which a function gets them. It notes the arrays that are taken from
    it, each with the parameter if it is of one.
    """

    def __init__(
        self, at: Entries, paths: Iterable[str], copies: Copies, count: Any, get: Callable[[Any], Any]
    ) -> None:
        copies.check()
        self.at, self.paths, self.copies, self.count = at, tuple(paths), copies, int(_concrete(count))
        self.waits, self.taken, self._get = at[0] == "held", set[tuple[Entries, str]](), get
        self.members = _members_in(copies)
        self._heads = {(_unlabelled(head), path): head for head, its in self.members.items() for path in its}

    def same(self, entries: Entries, path: str) -> Entries:
        """Returns the path of an array with the labels that a parameter's groups have in this state."""
        for head in _labelled_in(entries):
            if (_unlabelled(head), path) in self._heads:
                return (*self._heads[_unlabelled(head), path], *entries[len(head) :])
        return entries

    def piece(self, place: Place, path: str) -> Piece:
        """Returns the piece of a parameter at a place, whatever its group is called; a `KeyError` if there is none."""
        entries, owners, number = self.copies.at[(self.same(place[0], path), place[1]), path]
        return Piece(self.read(entries, path), owners, number)

    def read(self, entries: Entries, path: str = "") -> Any:
        """Returns an array, of a parameter or one that all share."""
        self.taken.add((entries, path))
        name = join_path((*self.at, *entries))
        return as_in_jax(name, _concrete(self._get(self.copies.arrays[entries]), f" at {name!r}"))

    def lost(self, used: Set[str], labels: Set[str]) -> Iterator[tuple[str, str]]:
        """Yields the arrays that nobody has taken, of used parameters or of groups with these labels.

        With each comes the parameter that it belongs to.
        """
        every = [(entries, path) for (_, path), (entries, *_) in self.copies.at.items() if path in used]
        for entries in self.copies.common if not used.isdisjoint(self.paths) else ():
            heads = _labelled_in(entries)
            members = next((self.members[head] for head in heads if head in self.members), used)
            if not members.isdisjoint(used) and {head[-1] for head in heads} <= labels:
                every.append((entries, ""))
        for entries, path in every:
            if (entries, path) not in self.taken:
                yield join_path((*self.at, *entries)), path


def _unlabelled(entries: Entries) -> Entries:
    """Returns the entries of a path with a star for each label of a group."""
    return tuple(["*" if i and entries[i - 1] == "inner_states" else entry for i, entry in enumerate(entries)])


def _labelled_in(entries: Entries) -> list[Entries]:
    """Returns the beginnings of a path that end with the label of a group, the innermost first."""
    return [entries[: i + 2] for i in reversed(range(len(entries) - 1)) if entries[i] == "inner_states"]


def _members_in(copies: Copies) -> dict[Entries, set[str]]:
    """Returns the parameters in each group that keeps arrays of parameters, by the path of its state."""
    found = collections.defaultdict[Entries, set[str]](set)
    for place, path in copies.at:
        for head in _labelled_in(place[0]):
            found[head].add(path)
    return dict(found)


def _histories(movers: Movers, source: Any, fresh: Copies) -> tuple[list[_Before], Names]:
    """Returns the histories of a state, and by the names of the plan's source each parameter's path and history."""
    if isinstance(source, TrainableState):
        roles, index = source.roles, index_of(source.layout)
        structure, ats = index.structure, [("runs", str(i)) for i in range(len(source.runs))]
        ats += [("held", str(i)) for i in range(len(source.held))]
        specs: Any = dict(zip(structure.paths, structure.specs, strict=True))
        aliases = {structure.paths[tie.leaf]: structure.paths[tie.source] for tie in index.ties}
        paths = [[structure.paths[leaf] for leaf in its] for its in (*roles.running, *roles.held)]
        copies = map(Copies, map(entries_of, (*source.runs, *source.held)), roles.divisions)
        histories = list(map(_Before, ats, paths, copies, source.counts, itertools.repeat(lambda array: array)))
    elif "" in (names := names_of(source)).states:
        words = names.states[""]
        aliases, specs = {alias: path for path, also, *_ in words["slots"] for alias in also}, specs_in(words)
        histories, get = list[_Before](), functools.cache(names.__getitem__)
        for number, said in enumerate(histories_in(words)):
            at, count = split_path(said.path), names[f"counts.{number}"]
            arrays = _names_below(names, at)
            copies = Copies(arrays, division_in(words, number, arrays))
            histories.append(_Before(at, said.parameters, copies, count, get))
    elif "counts.0" in names.specs:
        histories, specs, aliases = _restored(movers.source.specs, names, fresh), movers.source.specs, {}
    else:
        raise ValueError(
            "expected a state of optim.trainable, or the names of one, such as saving.names(path, 'optimiser'); got "
            f"{f'names such as {first_few(list(names)[:3])}' if names else 'no arrays'}. Of a state of plain Optax, "
            "optim.from_optax(tx, state, old_model) makes one"
        )
    at = {name_of(path): (path, history) for history in histories for path in history.paths}
    aliases = {name_of(alias): name_of(path) for alias, path in aliases.items() if name_of(path) in at}
    own = {name: specs[path] for name, (path, _) in at.items()}
    own |= {alias: own[name] for alias, name in aliases.items()}
    given = with_ties(movers.source, Names(own, lambda name: at[aliases.get(name, name)], aliases))
    check_given(given, movers.source, movers.source.specs.keys() & given.specs, movers.strict, are_wide=True)
    return histories, given


def _names_below(names: Names, at: Entries) -> dict[Entries, str]:
    """Returns the names below a node by the rest of their entries."""
    return {split_name(name)[len(at) :]: name for name in names.specs if is_below(name, join_path(at))}


def _restored(specs: Mapping[str, Spec], names: Names, fresh: Copies) -> list[_Before]:
    """Returns the histories of a state without its class, as Orbax restores one, by the paths of its arrays."""
    known = {split_name(name): (name, spec.shape) for name, spec in specs.items() if spec.parameter}
    owners = [own for _, own in fresh.owned() if own is not None]
    places = {own.place for own in owners}
    heads = {split_name(name)[:2] for name in names.specs if head_of(name) in ("runs", "held")}
    counts = [names[name] for i in range(len(names.specs)) if (name := f"counts.{i}") in names.specs]
    found, get = list[_Before](), functools.cache(names.__getitem__)
    for at, count in zip(sorted(heads, key=lambda at: (at[0] == "held", int(at[1]))), counts, strict=False):
        arrays, its = _names_below(names, at), list[Owners | None]()
        for entries in arrays:
            spans = {place: entries[len(place[0]) : len(entries) - len(place[1])] for place in places}
            mine = [each for each, own in spans.items() if (*each[0], *own, *each[1]) == entries and own in known]
            alone = [Owners.of([known[spans[each]][0]], each, None, [known[spans[each]][1]], False) for each in mine]
            its.append(next(iter(alone), None))
        paths = {path: None for own in its if own is not None for path in own.paths}
        if len(counts) == 1:
            paths = {name: None for name, _ in known.values() if not paths or name in paths}
        if paths:
            found.append(_Before(at, paths, Copies(arrays, Division(tuple(its))), count, get))
    if len(found) < len(counts) or any(own.axis is not None for own in owners):
        raise ValueError(
            "nothing tells which parameters the arrays of the state are of, since they are joined, or since there are "
            "none; restore it into the shapes of a state, jax.eval_shape(lambda: state)"
        )
    return found


def _concrete(array: Any, where: str = "") -> Any:
    """Returns an array of a state that has values."""
    if isinstance(array, Tracer):
        raise ValueError("call plan.state between steps, outside of jax.jit: its result depends on the number of steps")
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ValueError(f"the state has no values{where}, where they are needed: expected arrays")
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
        self._members = _members_in(self.copies)

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

    def history(self, home: _Before | None) -> History | None:
        """Returns the history of the parameters that continue an old one, or begin; `None` if there are none.

        Only the rule knows the state that it keeps for some of the parameters, and there is no rule here to ask. So the
        state is the one for all parameters, without the arrays that belong to others alone: it has the same pieces.
        """
        paths = [path for path, its in self.homes.items() if its is home]
        if not paths:
            return None
        made, part = self.fresh, self.copies
        if len(paths) < len(self.homes):
            part, index = _part_of(self.copies, set(paths)), index_of(made.layout)
            layout = trained_at(made.layout, [index.structure.index[path] for path in paths])
            made = like_history(made, layout, part.arrays, dict(part.owned()))
        shared = functools.partial(self._shared, home, paths)
        found = zip(part.arrays.items(), joined(part, self._piece if home else self._begun, shared), strict=True)
        arrays = {at: self._as_fresh(at, array, like.shape) for (at, like), array in found}
        return dataclasses.replace(made.holding(arrays), count=jnp.asarray(home.count if home else 0, jnp.int32))

    def _as_fresh(self, at: Entries, array: Array, shape: tuple[int, ...]) -> Array:
        """Casts an array to the dtype of the fresh one, and places it alike if it has the same shape."""
        name, like = join_path(at), self.copies.arrays[at]
        if array.shape != shape:
            raise ValueError(
                f"the state has {describe(array)} at {name!r}, but the fresh one has {describe(like)}: it was made by "
                "another transformation"
            )
        array = in_dtype(array, like.dtype)
        return placed(name, array, like) if shape == like.shape else jnp.asarray(array)

    # -- Of each parameter

    def _begun(self, place: Place, path: str) -> Piece:
        """Returns the piece that a parameter begins with."""
        piece = self.copies.piece(place, path)
        return piece._replace(array=_with_values(piece.array, path))

    def _piece(self, place: Place, path: str) -> Piece:
        """Returns the piece for a parameter at a place in its state."""
        places = self.movers.places(path)
        if places.is_same:
            ((old, history),) = self.reads[path]
            return history.piece(place, old)
        try:
            arrays = [self._alone(place, name) for name in places.reads]
        except KeyError:
            raise ValueError(
                f"{self._made(path)}, and the rule keeps other arrays for it at {join_path(place[0])!r}; begin with a "
                "fresh state"
            ) from None
        specs, shape = self.movers.source.specs, self.copies.piece(place, path).shape
        are_like = all(
            it.shape == specs[name].shape and is_inexact(it.dtype)
            for it, name in zip(arrays, places.reads, strict=True)
        )
        # Such as the counts of parameters that took their steps together.
        is_one = all(array.size == 1 and bool(np.all(array == arrays[0])) for array in arrays)
        if are_like and shape == self.fresh.layout[path].shape:
            array = places.filled(arrays)
            if places.dropped is not None:
                begun = self._begun(place, path).alone()
                array = jnp.where(places.dropped, begun, array.astype(begun.dtype))
            return Piece(array)
        if is_one and {it.shape for it in arrays} == {shape}:
            return Piece(arrays[0])
        raise ValueError(
            f"{self._made(path)}, but for these the state has arrays of shapes {[it.shape for it in arrays]} at "
            f"{join_path((*place[0], '*', *place[1]))!r}, which are not the parameters' shapes, and not all alike: a "
            "plan can only rename such a parameter; begin with a fresh state"
        )

    @functools.cached_property
    def _alone(self) -> Callable[[Place, str], Any]:
        """A function from a place and a name to the array that an old parameter has there."""

        @functools.lru_cache(maxsize=4)  # each row of a stack asks for the whole stack, one after another
        def alone(place: Place, name: str) -> Any:
            old, history = self._of[name]
            return history.piece(place, old).alone()

        return alone

    def _made(self, path: str) -> str:
        route = self.movers.comes[path].route
        return f"{path!r} is made of {list(route.sources)} by {route.how}"

    # -- Of all parameters of a history, or of those of a group

    def _shared(self, home: _Before | None, paths: Sequence[str], entries: Entries) -> Any:
        """Returns an array that the parameters of a history share; an array of a group is that of their old group."""
        if home is None and "hyperparams" in entries and self.histories:
            # New parameters begin with the rates that were set, as after optim.set_trainable.
            home, paths = self.histories[0], [path for path, its in self.homes.items() if its]
        found = self._sources(home, paths, entries) if home else {}
        if not found:
            return _with_values(self.copies.arrays[entries], join_path(entries))
        if any(its not in history.copies.common for its, history in found.items()):
            raise KeyError(entries)
        arrays = [history.read(its) for its, history in found.items()]
        if not all(np.array_equal(arrays[0], other, equal_nan=True) for other in arrays[1:]):
            raise ValueError(
                f"the state has {first_few([join_path(its) for its in found])}, which differ, but parameters of these "
                f"groups are now in one, at {join_path(entries)!r}; begin with a fresh state"
            )
        return arrays[0]

    def _sources(self, home: _Before, paths: Sequence[str], entries: Entries) -> Mapping[Entries, _Before]:
        """Returns where an array that is shared was before; nothing for that of a group without old parameters."""
        labels = _labelled_in(entries)
        members = next((self._members[head] for head in labels if head in self._members), frozenset[str]())
        reads = {each.same(entries, old): each for path in paths if path in members for old, each in self.reads[path]}
        if reads or not labels or entries in home.copies.common:
            return reads or {entries: home}
        others = [its for its in home.copies.common - self.copies.common if _unlabelled(its) == _unlabelled(entries)]
        others = [its for its in others if home.members.keys().isdisjoint(_labelled_in(its))]
        if others and not members:
            raise ValueError(
                f"the group {labels[0][-1]!r} keeps no array of a parameter, so nothing tells whether it was "
                f"{first_few([_labelled_in(its)[0][-1] for its in others])}; give it the same name"
            )
        return {}

    # -- Checks

    def check_lost(self) -> None:
        """Rejects arrays, of used parameters or of all in a known group, for which the fresh state has no place."""
        after = {old: path for path, its in self.reads.items() for old, _ in its}
        labels = {quote(group.name) for group in groups_in(self.fresh.state)}
        labels |= {head[-1] for entries in self.copies.arrays for head in _labelled_in(entries)}
        lost = [pair for each in self.histories for pair in each.lost(after.keys(), labels)]
        if lost:
            why = "it was made by another transformation, or a parameter is now in another group"
            changed = [after[old] for _, old in lost if old and not self.movers.places(after[old]).is_same]
            if changed:
                why = f"{self._made(changed[0])}, and the rule keeps other arrays for it; begin with a fresh state"
            names = [name for name, _ in lost]
            raise ValueError(f"the state has {first_few(names)}, for which the fresh one has no place: {why}")

    def check_memory(self) -> None:
        """Rejects adding parameters to those of L-BFGS, leaving some out, or giving it another form of them."""
        if not nodes_of(optax.ScaleByLBFGSState, self.fresh.state) or not self.histories:
            return
        before, olds = self.histories[0], {old for its in self.reads.values() for old, _ in its}
        # If parameters are joined along an axis, their memory is one array, and no parameter has a separate one.
        forms = {own.axis is None for each in (self.copies, before.copies) for _, own in each.owned() if own}
        is_whole = olds == {*before.paths} and set(self.homes.values()) == {before}
        if olds and not (is_whole and len(forms) == 1):
            raise ValueError(
                "L-BFGS remembers steps of all its parameters together, in one form, so none can be added or left out; "
                "begin with a fresh state"
            )


def _history_in_words(history: _Before | None) -> str:
    return "begins" if history is None else f"{'waits after ' if history.waits else ''}{history.count} steps"


def _part_of(copies: Copies, paths: Set[str]) -> Copies:
    """Returns the arrays of some parameters, and the shared ones, as shapes; a joined array is shorter."""
    arrays, found = dict[Entries, Any](), list[Owners | None]()
    for entries, own in copies.owned():
        array = copies.arrays[entries]
        shape = array.shape
        if own is not None and own.axis is not None:
            # The pieces that are kept move together. Padding is dropped.
            kept = [number for number, path in enumerate(own.paths) if path in paths]
            names, shapes = [own.paths[n] for n in kept], [own.block.shapes[n] for n in kept]
            length = sum(own.block.starts[n + 1] - own.block.starts[n] for n in kept)
            shape = (*shape[: own.axis], length, *shape[own.axis + 1 :])
            if not kept:
                continue
            own = Owners.of(names, own.place, own.axis, shapes, own.block.has_rows)
        elif own is not None and paths.isdisjoint(own.paths):
            continue
        found.append(own)
        arrays[entries] = jax.ShapeDtypeStruct(shape, array.dtype)
    return Copies(arrays, Division(tuple(found)))


def _with_values(array: Any, name: str) -> Any:
    """Returns a fresh array; raises an error if it has no values."""
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ValueError(f"like has no values at {name!r}, where they are needed: expected arrays, like=tx.init(model)")
    return array


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
    # The trained parameters are a canonical tree, and all other arrays are in `rest`, by path. Which of the two a name
    # is in may have changed since: a parameter that trained may be frozen now.
    at: dict[str, str] = {}
    for name in source.specs:
        head, *entries = split_name(name)
        if head in ("shadow", "rest"):
            at[join_path(entries) if head == "shadow" else unquote(entries[0])] = name
    of_model = Names({name: source.specs[its] for name, its in at.items()}, lambda name: source[at[name]])
    given = with_ties(movers.source, of_model)
    check_given(given, movers.source, movers.used, movers.strict, are_wide=True)

    def moved(path: str, like: Array) -> Array:
        if path not in movers.comes:
            return like
        return placed(path, in_dtype(movers.average(path, given.__getitem__), like.dtype), like)

    shadow, others = ([moved(*each) for each in its.items()] for its in (trained, kept))
    rest = with_kept_arrays(like.rest, others)
    made = jtu.tree_unflatten(treedef, shadow), rest, *(jnp.asarray(source[name]) for name in ("count", "weight"))
    return in_own_buffers(eqx.tree_at(lambda ema: (ema.shadow, ema.rest, ema.count, ema.weight), like, made))
