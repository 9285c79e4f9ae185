"""States and averages of the model before, as those of the model after: regrouped, with a move between cut and join.

A state has several histories where parameters were frozen and thawed: each is a state of the rule, for parameters that
have taken the same steps. The histories after are not those before. Each parameter after goes on with the history of
the parameters that it is made of (`_homes`); histories before that come from one and have taken the same steps are one
again; and parameters to which nothing comes begin a history of their own. The arrays of a history after are made
piece by piece (`_moved`), where `regroup` would take the pieces as they are.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jax.core import Tracer

from .._average import Ema
from .._files.arrays import Array, as_in_jax, placed
from .._files.names import Names
from .._files.words import histories_in, specs_in
from .._forms.owners import Division, Entries, Owners, Place
from .._forms.states import Copies, Piece, entries_of, joined, only
from .._slots.layout import Layout, index_of
from .._slots.parts import kept_arrays, with_kept_arrays
from .._tree.paths import join_path, nearest, quote, split_path
from .._tree.text import describe, first_few
from .._tree.types import PyTree
from ..optim import TrainableState
from ..optim._state import Roles, in_own_buffers, nodes_of
from ._contents import division_in
from ._elements import Movers
from ._names import names_of

M = TypeVar("M")
Origin = tuple[int, int]
"""The number of the history that one has come from, by freezing and thawing, and the steps that it has taken."""


class _Arrays(Mapping[Entries, Any]):
    """The arrays of a history by the rest of their names, each read once, where it is asked for."""

    def __init__(self, source: Names, path: str) -> None:
        self._names = {split_path(name)[2:]: name for name in source.specs if f"{name}.".startswith(f"{path}.")}
        self._source = source
        self._read = functools.cache(self._from_source)

    def __getitem__(self, entries: Entries) -> Any:
        return self._read(self._names[entries])

    def __iter__(self) -> Iterator[Entries]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _from_source(self, name: str) -> Any:
        array = self._source[name]
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(f"the state is needed at {name!r}, and has no values there: expected arrays")
        return as_in_jax(name, array)


class _History(NamedTuple):
    """A history of the model after: its parameters, and where its arrays come from."""

    origin: Origin
    paths: list[str]
    piece: Callable[[Place, str], Piece]
    shared: Callable[[Entries], Any]


def carried_state(movers: Movers, source: Names, like: TrainableState) -> TrainableState:
    """A state as one of the model after; see `Plan.state`."""
    words = _words_of(movers, source, like)
    if not like.runs:
        return like
    names = names_of(like)
    olds, (fresh,) = _histories_of(source, words), _histories_of(names, names.states[""])
    owner_of = {path: number for number, (_, paths) in enumerate(histories_in(words)) for path in paths}
    used = {name for path in like.layout.paths for name in movers.sources.get(path, ())}
    _check_lost(olds, fresh, words, used)
    # Histories that come from one and have taken the same steps are one again, as after optim.set_trainable.
    counts = [_steps(source[f"counts.{number}"]) for number in range(len(olds))]
    origins: list[Origin] = list(zip(words["origins"], counts, strict=True))
    homes = _homes(movers, {path: origins[owner] for path, owner in owner_of.items()}, like.layout)
    if nodes_of(optax.ScaleByLBFGSState, like) and (len(set(homes.values())) > 1 or not used.issuperset(owner_of)):
        raise ValueError(
            "L-BFGS remembers steps of all parameters together, so none can be added or left out; begin with a fresh "
            "state"
        )
    moved = functools.partial(_moved, movers, {path: olds[owner] for path, owner in owner_of.items()}, fresh.shapes)
    histories: list[_History] = []
    for origin in [*dict.fromkeys(origins), None]:
        paths = [path for path, home in homes.items() if home == origin]
        if paths and origin is not None:
            # Histories of one origin that have taken the same steps share the same counts, so that of any will do.
            histories.append(_History(origin, paths, moved, olds[origins.index(origin)].shared))
        elif paths:
            begun = functools.partial(_begun, olds, fresh)
            histories.append(_History((len(olds), 0), paths, fresh.piece, begun))
    return _state_of(like, histories)


def _histories_of(source: Names, words: Mapping[str, Any]) -> list[Copies]:
    shapes, found = {path: spec.shape for path, spec in specs_in(words).items()}, []
    for number, (path, _) in enumerate(histories_in(words)):
        arrays = _Arrays(source, path)
        found.append(Copies(shapes, arrays, division_in(words, number, arrays)))
        found[-1].check()
    return found


def _check_lost(olds: Sequence[Copies], fresh: Copies, words: Mapping[str, Any], used: Set[str]) -> None:
    """Refuses arrays, of all parameters or of used ones, for which the fresh state has no place."""
    places, lost = {place for place, _ in fresh.at}, list[str]()
    for old, (at, _) in zip(olds, histories_in(words), strict=True):
        for entries, owners in old.owned():
            is_kept = entries in fresh.common if owners is None else owners.place in places
            if not is_kept and (owners is None or not used.isdisjoint(owners.paths)):
                lost.append(join_path((at, *entries)))
    if lost:
        raise ValueError(
            f"the state has {first_few(lost)}, for which the fresh one has no place: it was made by another "
            "transformation, or by one that keeps lists of arrays for a parameter"
        )


def _moved(movers: Movers, olds: Mapping[str, Copies], shapes: Mapping[str, Any], place: Place, path: str) -> Piece:
    """The piece that comes to a parameter of the model after, at a place in its state."""
    names = movers.sources[path]
    pieces = [olds[name].piece(place, name) for name in names]
    if movers.is_plain(path):
        return pieces[0]
    arrays = [piece.alone(olds[name].shapes[name]) for name, piece in zip(names, pieces, strict=True)]
    return Piece(movers.move(path, shapes[path], arrays), Owners((path,), place, None, (), False), 0)


def _begun(olds: Sequence[Copies], fresh: Copies, entries: Entries) -> Any:
    """An array that new parameters share: fresh, but with the rates that were set, as after optim.set_trainable."""
    return (olds[0] if olds and "hyperparams" in entries else fresh).shared(entries)


def _words_of(movers: Movers, source: Names, like: TrainableState) -> dict[str, Any]:
    """The words on the histories of a state, which must be of the plan's source; and `like` must be fresh."""
    if not isinstance(like, TrainableState):
        raise TypeError(f"expected a fresh state of the new model, like=tx.init(model), got {describe(like)}")
    words = source.states.get("")
    if words is None:
        raise ValueError(
            "expected a state of optim.trainable, flat or stacked, or the names of one, as saving.names(path, "
            f'"optimiser") of a file; got names such as {first_few(list(source)[:3])}'
        )
    if len(like.runs) + len(like.held) > 1:
        raise ValueError("expected a fresh state of the new model, like=tx.init(model), got one with several histories")
    for path, *_ in words["slots"]:
        if path not in movers.known:
            raise ValueError(
                f"the state is of {path!r}, and the plan's source has no such name{nearest(path, movers.known)}; make "
                "the plan from the model that the state is of"
            )
    return words


def _steps(count: Array | jax.ShapeDtypeStruct) -> int:
    """The number of steps that a history has taken."""
    if isinstance(count, Tracer):
        raise ValueError("plan.state is called between steps, outside of jax.jit: what it makes goes by their number")
    if isinstance(count, jax.ShapeDtypeStruct):
        raise ValueError("the state has no values: expected arrays, got jax.ShapeDtypeStructs")
    return int(count)


def _homes(movers: Movers, numbers: Mapping[str, Origin], layout: Layout) -> dict[str, Origin | None]:
    """The history that each parameter goes on with, by origin and steps; `None`: one of its own."""
    homes: dict[str, Origin | None] = {}
    for path in layout.paths:
        sources = movers.sources.get(path, ())
        found = list(dict.fromkeys(numbers.get(name) for name in sources))
        if len(found) > 1:
            steps = [f"{name!r} {numbers[name][1] if name in numbers else 'no'}" for name in sources]
            raise ValueError(
                f"{path!r} is made of parameters that have not taken their steps together ({', '.join(steps)} steps), "
                "so there is no state for it; begin with a fresh one"
            )
        homes[path] = found[0] if found else None
    return homes


def _state_of(like: TrainableState, histories: Sequence[_History]) -> TrainableState:
    """The state of these histories, the oldest first, as after optim.set_trainable."""
    histories = sorted(histories, key=lambda history: -history.origin[1])
    leaves = dict(zip(like.layout.paths, index_of(like.layout).positions, strict=True))
    running = tuple(tuple(leaves[path] for path in history.paths) for history in histories)
    runs, divisions = zip(*[_run_of(like, history) for history in histories], strict=True)
    counts = tuple(jnp.asarray(history.origin[1], jnp.int32) for history in histories)
    roles = Roles(like.layout, running, (), tuple(history.origin[0] for history in histories), divisions)
    return in_own_buffers(TrainableState(runs, (), counts, roles))


def _run_of(like: TrainableState, history: _History) -> tuple[PyTree, Division]:
    """A state of the rule and its division.

    Only the rule knows what state it keeps for some of the parameters, and it is not here to be asked. So the state for
    all of them is taken, without the arrays of others alone: it has the same pieces.
    """
    shapes, fresh = {slot.path: slot.shape for slot in like.layout.slots}, entries_of(like.runs[0])
    run, its = only(like.runs[0], Copies(shapes, fresh, like.roles.divisions[0]), set(history.paths))
    made = zip(its.arrays.items(), joined(its, history.piece, history.shared), strict=True)
    arrays = [_as(fresh[entries], array, entries, want.shape) for (entries, want), array in made]
    return jtu.tree_unflatten(jtu.tree_structure(run), arrays), its.division


def _as(like: Array | jax.ShapeDtypeStruct, array: Array, entries: Entries, shape: tuple[int, ...]) -> Array:
    """An array in the dtype of the fresh one, and where that lies; of other parameters that may not be possible."""
    name = join_path(entries)
    if array.shape != shape:
        raise ValueError(
            f"the state has {describe(array)} at {name!r}, and the fresh one {describe(like)}: it was made by another "
            "transformation"
        )
    array = array if array.dtype == like.dtype else jnp.asarray(array).astype(like.dtype)
    return placed(name, array, like) if shape == like.shape else jnp.asarray(array)


def carried_average(movers: Movers, source: Names, like: Ema[M]) -> Ema[M]:
    """An average as one of the model after; see `Plan.average`."""
    if not isinstance(like, Ema):
        raise TypeError(f"expected a fresh average of the new model, like=tp.Ema(model, ...), got {describe(like)}")
    if not {"count", "weight"} <= source.specs.keys():
        raise ValueError(
            'expected a tp.Ema, or the names of one, as saving.names(path, "average") of a file; got names such as '
            f"{first_few(list(source)[:3])}"
        )

    # An average has the trained parameters as a canonical tree, and all other arrays in its `rest`, by path. Which of
    # the two a name is in may have changed since: a parameter that trained may be frozen now.
    def average_of(name: str) -> Any:
        shadow = f"shadow.{name}" if name else "shadow"
        known = shadow if shadow in source.specs else f"rest.{quote(name)}"
        if known not in source.specs:
            raise ValueError(f"the average has nothing of {name!r}{nearest(shadow, source.specs)}")
        return source[known]

    def moved(path: str, old: Array) -> Array:
        if path not in movers.sources:
            return old
        new = movers.move(path, old.shape, [average_of(name) for name in movers.sources[path]])
        if new.shape != old.shape:
            raise ValueError(f"the average of {path!r} is {describe(new)}, and of the model's shape {describe(old)}")
        return placed(path, new if new.dtype == old.dtype else jnp.asarray(new).astype(old.dtype), old)

    shadows, treedef = jtu.tree_flatten(like.shadow)
    shadow = [moved(path, old) for path, old in zip(like.rest.layout.paths, shadows, strict=True)]
    rest = with_kept_arrays(like.rest, [moved(path, old) for path, old in kept_arrays(like.rest).items()])
    made = jtu.tree_unflatten(treedef, shadow), rest, *(jnp.asarray(source[name]) for name in ("count", "weight"))
    return in_own_buffers(eqx.tree_at(lambda ema: (ema.shadow, ema.rest, ema.count, ema.weight), like, made))
