"""States and averages of the model before, as those of the model after."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jax.core import Tracer

from .._average import Ema
from .._layout import Layout, index_of
from .._parts import kept_arrays, with_kept_arrays
from .._paths import join_path, key_text, nearest, quote
from .._recognise import structure_of
from .._text import describe, first_few
from .._types import PyTree
from ..optim import GroupsState, PerLeafState, TrainableState
from ..optim._groups import groups_in
from ..optim._state import Roles, in_own_buffers, nodes_of
from ._arrays import placed
from ._contents import histories_in
from ._divided import NamedHistory
from ._elements import Movers
from ._names import Names, names_of

M = TypeVar("M")


def carried_state(movers: Movers, source: Names, like: TrainableState) -> TrainableState:
    """A state as one of the model after; see `Plan.state`."""
    words = _words_of(movers, source, like)
    if not like.runs:
        return like
    olds = [NamedHistory(source, place, words, paths) for place, paths in histories_in(words)]
    owner_of = {path: number for number, old in enumerate(olds) for path in old.specs}
    fresh_names = names_of(like)
    fresh = NamedHistory(fresh_names, "runs.0", fresh_names.states[""], like.layout.paths)
    used = {name for path in like.layout.paths for name in movers.sources.get(path, ())}
    lost = [name for old in olds for name in old.lost(fresh, used)]
    if lost:
        raise ValueError(
            f"the state has {first_few(lost)}, for which the fresh one has no place: it was made by another "
            "transformation, or by one that keeps lists of arrays for a parameter"
        )
    # Parts of one history that have taken the same steps are one again, as after optim.set_trainable.
    counts = [_steps(source[f"counts.{number}"]) for number in range(len(olds))]
    numbers = list(zip(words["origins"], counts, strict=True))
    homes = _homes(movers, {path: numbers[owner] for path, owner in owner_of.items()}, like.layout)
    made: list[tuple[int, PyTree, int, list[str]]] = []
    for home in dict.fromkeys(numbers):
        paths = [path for path, its in homes.items() if its == home]
        if paths:
            of = lambda place, path: movers.move(
                path, fresh.specs[path].shape, [olds[owner_of[name]].of(place, name) for name in movers.sources[path]]
            )
            shared = olds[numbers.index(home)].shared
            made.append((home[0], _state(like, fresh, paths, of, shared), home[1], paths))
    new = [path for path, home in homes.items() if home is None]
    if new:
        # They have the rates that were set since, as after optim.set_trainable.
        shared = lambda entries: (olds[0] if olds and "hyperparams" in entries else fresh).shared(entries)
        made.append((len(olds), _state(like, fresh, new, fresh.of, shared), 0, new))
    if nodes_of(optax.ScaleByLBFGSState, like) and (len(made) > 1 or not used.issuperset(owner_of)):
        raise ValueError(
            "L-BFGS remembers steps of all parameters together, so none can be added or left out; begin with a fresh "
            "state"
        )
    made.sort(key=lambda each: -each[2])  # stable; the oldest first, as after optim.set_trainable
    leaves = dict(zip(like.layout.paths, index_of(like.layout).positions, strict=True))
    running = tuple(tuple(leaves[path] for path in paths) for *_, paths in made)
    roles = Roles(like.layout, running, (), tuple(origin for origin, *_ in made))
    counts = tuple(jnp.asarray(count, jnp.int32) for _, _, count, _ in made)
    return in_own_buffers(TrainableState(tuple(state for _, state, _, _ in made), (), counts, roles))


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
    if not {path for group in groups_in(like) for path in group.paths} <= set(like.layout.paths):
        raise ValueError(
            "over stacks a state of optim.groups does not say which row is of which parameter, so it goes through no "
            "plan; take optim.trainable, whose states go by path"
        )
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


def _homes(movers: Movers, numbers: Mapping[str, tuple[int, int]], layout: Layout) -> dict[str, tuple[int, int] | None]:
    """The history that each parameter goes on with, by origin and steps; `None`: one of its own."""
    homes: dict[str, tuple[int, int] | None] = {}
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


def _state(
    like: TrainableState,
    fresh: NamedHistory,
    paths: Collection[str],
    of: Callable[[Any, str], Any],
    shared: Callable[[Any], Any],
) -> PyTree:
    """The state of the rule for some of the parameters of a fresh one, with arrays from elsewhere."""
    leaves, treedef, structure = structure_of(like.runs[0])
    made: list[Any] = []
    for leaf, entries in zip(leaves, structure.entries, strict=True):
        part = fresh.parts.get(entries)
        if part is None:
            made.append(_as(leaf, shared(entries), entries, leaf.shape))
            continue
        its = [of(part.place, path) for path in part.paths if path in paths]
        if part.form == "tree":
            made.append(_as(leaf, its[0], entries, leaf.shape) if its else None)
        elif part.form == "stack":
            its = [_as(leaf, each, entries, leaf.shape[1:]) for each in its]
            made.append(jnp.stack(its) if its else None)
        else:
            made.append(jnp.concatenate([jnp.ravel(_as(leaf, each, entries, each.shape)) for each in its]))
    state = jtu.tree_unflatten(treedef, made)
    return state if len(paths) == len(fresh.specs) else _of_these(state, fresh, paths, like.layout)


def _as(like: Any, array: Any, entries: Sequence[str], shape: tuple[int, ...]) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ValueError(f"the fresh state is needed at {'.'.join(entries)!r}, and has no values there: tx.init(model)")
    if array.shape != shape:
        raise ValueError(
            f"the state has {describe(array)} at {'.'.join(entries)!r}, and the fresh one {describe(like)}: it was "
            "made by another transformation"
        )
    return placed(
        ".".join(entries), array if array.dtype == like.dtype else jnp.asarray(array).astype(like.dtype), like
    )


def _of_these(state: PyTree, fresh: NamedHistory, paths: Collection[str], layout: Layout) -> PyTree:
    """The state in the structure that it has for these parameters alone; what is of others is `None` in it."""
    forms = {part.form for part in fresh.parts.values()}
    stacks, left = ({describe(fresh.specs[path]) for path in each} for each in (fresh.specs, paths))
    treedef = index_of(layout).canonical_treedef

    is_masked = lambda node: isinstance(node, optax.MaskedNode)

    def visit(node: Any) -> Any:
        if isinstance(node, GroupsState):
            groups = [each._replace(paths=tuple(p for p in each.paths if p in paths)) for each in node.groups]
            states = jtu.tree_map_with_path(unmasked, node.inner_states, is_leaf=is_masked)
            return GroupsState(jax.tree.map(visit, states, is_leaf=is_whole), tuple(groups))
        if isinstance(node, PerLeafState):
            states = zip(treedef.flatten_up_to(node.states), layout.paths, strict=True)
            return PerLeafState(treedef.unflatten([its if path in paths else None for its, path in states]))
        return {key: its for key, its in node.items() if key in left} if is_whole(node) else node

    def unmasked(path: Any, node: Any) -> Any:
        """What is masked for the rule of another group is there no more, if it is of another history."""
        entries = [quote(key_text(key)) for key in path]
        its = next((own for start in range(len(entries)) if (own := join_path(entries[start:])) in fresh.specs), None)
        return None if is_masked(node) and its is not None and its not in paths else node

    def is_whole(node: Any) -> bool:
        if "stack" in forms:
            return isinstance(node, dict) and not stacks.isdisjoint(node)
        return isinstance(node, GroupsState) or (isinstance(node, PerLeafState) and "vector" not in forms)

    return jax.tree.map(visit, state, is_leaf=is_whole)


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
