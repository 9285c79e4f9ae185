"""States and averages of the model before, as those of the model after: regrouped, with a move between cut and join."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jax.core import Tracer

from .._average import Ema
from .._form import Stacks
from .._layout import Layout, index_of
from .._parts import kept_arrays, with_kept_arrays
from .._paths import join_path, nearest, quote, split_path
from .._states import Copies, Division, Entries, Owners, Piece, Place, entries_of, joined
from .._text import describe, first_few
from .._types import PyTree
from ..optim import TrainableState
from ..optim._state import Roles, in_own_buffers, nodes_of
from ._arrays import as_in_jax, placed
from ._contents import division_in, histories_in, specs_in
from ._elements import Movers
from ._names import Names

M = TypeVar("M")
Origin = tuple[int, int]
"""The number of the history that one is a part of, and the steps that it has taken."""


class _Arrays(Mapping[Entries, Any]):
    """The arrays of a history by what follows its place in their names, each read where it is first asked for."""

    def __init__(self, source: Names, place: str) -> None:
        self._names = {split_path(name)[2:]: name for name in source.specs if f"{name}.".startswith(f"{place}.")}
        self._read = functools.cache(source.__getitem__)

    def __getitem__(self, entries: Entries) -> Any:
        return self._read(self._names[entries])

    def __iter__(self) -> Iterator[Entries]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _History:
    """A history, whose pieces are looked up one by one."""

    def __init__(self, place: str, copies: Copies) -> None:
        copies.check()
        self.place = place
        self.copies = copies
        self._at = {
            (owners.place, path): (entries, owners, number)
            for entries, owners in copies.owned()
            if owners is not None
            for number, path in enumerate(owners.paths)
        }
        self._places = {place for place, _ in self._at}
        self._shared = {entries for entries, owners in copies.owned() if owners is None}
        self._in_jax = functools.cache(self._read_in_jax)  # once, and not for each piece

    def piece(self, place: Place, path: str) -> Piece:
        """What a parameter has at a place."""
        entries, owners, number = self._at[place, path]
        return Piece(self._read(entries) if owners.axis is None else self._in_jax(entries), owners, number)

    def alone(self, place: Place, path: str) -> Any:
        """The same, as it is kept beside a leaf."""
        return self.piece(place, path).alone(self.copies.shapes[path])

    def shared(self, entries: Entries) -> Any:
        """An array of all parameters."""
        if entries not in self._shared:
            raise KeyError(entries)
        return self._read(entries)

    def lost(self, other: "_History", used: Set[str]) -> list[str]:
        """The names of arrays, of all parameters or of used ones, for which another history has no place."""
        names = []
        for entries, owners in self.copies.owned():
            is_kept = entries in other._shared if owners is None else owners.place in other._places
            if not is_kept and (owners is None or not used.isdisjoint(owners.paths)):
                names.append(join_path((self.place, *entries)))
        return names

    def _read(self, entries: Entries) -> Any:
        array = self.copies.arrays[entries]
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(f"the state is needed at {join_path(entries)!r}, and has no values there")
        return array

    def _read_in_jax(self, entries: Entries) -> Any:
        return jnp.asarray(as_in_jax(join_path(entries), self._read(entries)))


class _Part(NamedTuple):
    """A history of the model after: its parameters, and what it is made of."""

    origin: Origin
    paths: list[str]
    piece: Callable[[Place, str], Piece]
    shared: Callable[[Entries], Any]


def carried_state(movers: Movers, source: Names, like: TrainableState) -> TrainableState:
    """A state as one of the model after; see `Plan.state`."""
    words = _words_of(movers, source, like)
    if not like.runs:
        return like
    olds, fresh = _histories_of(source, words), _history_of(like)
    owner_of = {path: number for number, (_, paths) in enumerate(histories_in(words)) for path in paths}
    used = {name for path in like.layout.paths for name in movers.sources.get(path, ())}
    lost = [name for old in olds for name in old.lost(fresh, used)]
    if lost:
        raise ValueError(
            f"the state has {first_few(lost)}, for which the fresh one has no place: it was made by another "
            "transformation, or by one that keeps lists of arrays for a parameter"
        )
    # Parts of one history that have taken the same steps are one again, as after optim.set_trainable.
    counts = [_steps(source[f"counts.{number}"]) for number in range(len(olds))]
    origins: list[Origin] = list(zip(words["origins"], counts, strict=True))
    homes = _homes(movers, {path: origins[owner] for path, owner in owner_of.items()}, like.layout)
    if nodes_of(optax.ScaleByLBFGSState, like) and (len(set(homes.values())) > 1 or not used.issuperset(owner_of)):
        raise ValueError(
            "L-BFGS remembers steps of all parameters together, so none can be added or left out; begin with a fresh "
            "state"
        )
    moved = functools.partial(_moved, movers, {path: olds[owner] for path, owner in owner_of.items()}, fresh)
    parts: list[_Part] = []
    for origin in [*dict.fromkeys(origins), None]:
        paths = [path for path, home in homes.items() if home == origin]
        if paths and origin is not None:
            parts.append(_Part(origin, paths, moved, olds[origins.index(origin)].shared))
        elif paths:
            parts.append(_Part((len(olds), 0), paths, fresh.piece, functools.partial(_begun, olds, fresh)))
    return _state_of(like, fresh.copies, parts)


def _histories_of(source: Names, words: Mapping[str, Any]) -> list[_History]:
    shapes, found = {path: spec.shape for path, spec in specs_in(words).items()}, []
    for number, (place, _) in enumerate(histories_in(words)):
        arrays = _Arrays(source, place)
        found.append(_History(place, Copies(shapes, arrays, division_in(words, number, arrays))))
    return found


def _history_of(like: TrainableState) -> _History:
    shapes = {slot.path: slot.shape for slot in like.layout.slots}
    return _History("runs.0", Copies(shapes, entries_of(like.runs[0]), like.roles.divisions[0]))


def _moved(movers: Movers, old: Mapping[str, _History], fresh: _History, place: Place, path: str) -> Piece:
    """What comes to a parameter of the model after, at a place in its state."""
    names = movers.sources[path]
    if movers.is_plain(path):
        return old[names[0]].piece(place, names[0])
    arrays = [old[name].alone(place, name) for name in names]
    return Piece(movers.move(path, fresh.copies.shapes[path], arrays), Owners((path,), place, None, (), False), 0)


def _begun(olds: Sequence[_History], fresh: _History, entries: Entries) -> Any:
    """What parameters share that begin: fresh, but with the rates that were set, as after optim.set_trainable."""
    return (olds[0] if olds and "hyperparams" in entries else fresh).shared(entries)


def _words_of(movers: Movers, source: Names, like: TrainableState) -> dict[str, Any]:
    """What is said of the histories of a state, which must be of the plan's source, and `like` fresh."""
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


def _steps(count: Any) -> int:
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


def _state_of(like: TrainableState, fresh: Copies, parts: list[_Part]) -> TrainableState:
    """The state of these histories, the oldest first, as after optim.set_trainable."""
    parts = sorted(parts, key=lambda part: -part.origin[1])
    leaves = dict(zip(like.layout.paths, index_of(like.layout).positions, strict=True))
    running = tuple(tuple(leaves[path] for path in part.paths) for part in parts)
    made = [_run_of(like.runs[0], fresh, part) for part in parts]
    runs, divisions = zip(*made, strict=True)
    counts = tuple(jnp.asarray(part.origin[1], jnp.int32) for part in parts)
    roles = Roles(like.layout, running, (), tuple(part.origin[0] for part in parts), divisions)
    return in_own_buffers(TrainableState(runs, (), counts, roles))


def _run_of(run: PyTree, fresh: Copies, part: _Part) -> tuple[PyTree, Division]:
    """The state of the rule for some parameters, and its division: like the fresh one, without what is of others alone.

    Only the rule could say what its state of them alone is, and the plan does not have it. The optimiser regroups it.
    """
    run, like = _only(run, fresh, set(part.paths))
    pairs = zip(like.arrays, joined(like, part.piece, part.shared), strict=True)
    arrays = [_as(fresh.arrays[entries], array, entries, like.arrays[entries].shape) for entries, array in pairs]
    return jtu.tree_unflatten(jtu.tree_structure(run), arrays), like.division


def _only(run: PyTree, fresh: Copies, paths: Set[str]) -> tuple[PyTree, Copies]:
    """The structure, and the arrays as shapes, of the state of some of the parameters."""
    if len(paths) == len(fresh.shapes):
        return run, fresh
    arrays, owners, absent = dict[Entries, Any](), list[Owners | None](), list[Any]()
    for (keys, array), (entries, own) in zip(jtu.tree_flatten_with_path(run)[0], fresh.owned(), strict=True):
        if own is not None and paths.isdisjoint(own.paths):
            absent.append(keys[: len(keys) - len(own.place[1])])
            continue
        shape = array.shape
        if own is not None and own.axis is not None:
            kept = [number for number, path in enumerate(own.paths) if path in paths]
            sizes = [own.starts[number + 1] - own.starts[number] for number in kept]
            starts = (0, *itertools.accumulate(sizes))
            shape = (*shape[: own.axis], starts[-1], *shape[own.axis + 1 :])
            own = own._replace(paths=tuple([own.paths[number] for number in kept]), starts=starts)
        owners.append(own)
        arrays[entries] = jax.ShapeDtypeStruct(shape, array.dtype)
    return _without(run, absent), Copies(fresh.shapes, arrays, Division(tuple(owners)))


def _without(node: PyTree, absent: Sequence[Any]) -> PyTree:
    """A tree with nothing at some paths; of stacks there is not even the key."""
    below: dict[Any, list[Any]] = {}
    for keys in absent:
        if not keys:
            return None
        below.setdefault(keys[0], []).append(keys[1:])
    if not below:
        return node
    children, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)
    made = treedef.unflatten([_without(child, below.get(key, ())) for (key,), child in children])
    return Stacks({key: child for key, child in made.items() if child is not None}) if type(node) is Stacks else made


def _as(like: Any, array: Any, entries: Entries, shape: tuple[int, ...]) -> Any:
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

    def average_of(name: str) -> Any:
        shadow = f"shadow.{name}" if name else "shadow"
        place = shadow if shadow in source.specs else f"rest.{quote(name)}"
        if place not in source.specs:
            raise ValueError(f"the average has nothing of {name!r}{nearest(shadow, source.specs)}")
        return source[place]

    def moved(path: str, old: Any) -> Any:
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
