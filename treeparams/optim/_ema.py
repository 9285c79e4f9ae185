"""ema: the average of the parameters, carried in the optimiser's state. as_ema: as a `tp.Ema`."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from .._average import Buffers, Ema, as_decay, lerp, next_step
from .._index import is_complex, widened
from .._layout import Layout, Trainable, index_of, trained_at
from .._primitives import cut
from .._recognise import structure_of
from .._resolve import look_up
from .._structure import is_array
from ._apply import moved
from ._context import given
from ._state import TrainableState, is_placeholder, layout_in

M = TypeVar("M")


class EmaState(NamedTuple):
    """The state of `optim.ema`.

    Attributes:
        average: the averages, float32 (float64 of a float64 leaf, complex64 of a complex one), as a canonical tree.
        count: the number of steps.
        weight: how much of the average comes from them, `1 - decay**count` for a constant decay.
    """

    average: PyTree
    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    weight: Float[Array, ""]


EmaState.__module__ = "treeparams.optim"


def ema(
    decay: float | Callable[[Any], Any], *, debias: bool = False, warmup: bool = False, trainable: Trainable = None
) -> optax.GradientTransformationExtraArgs:
    """An element of a chain that averages the parameters after each step; it must be the last.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> tx = optax.chain(optim.trainable(optax.sgd(1.0)), optim.ema(0.5))
    >>> model = {"w": jnp.zeros(2), "steps": jnp.array(3)}
    >>> state = tx.init(model)
    >>> updates, state = tx.update({"w": -jnp.ones(2)}, state, model)
    >>> state[-1].average["w"], optim.as_ema(state, model, 0.5).average["steps"]
    (Array([0.5, 0.5], dtype=float32), Array(3, dtype=int32, weak_type=True))

    After `optim.trainable` in a chain it averages all parameters at every step, those without a gradient too; ties that
    were given to a `tp.layout` it knows if it is given that layout. Within `optim.trainable`, what is frozen or has no
    gradient keeps its average, as it does its other state.

    Args:
        decay: the weight of the average in each step, in [0, 1]; or a function from the number of steps so far to it,
            such as an Optax schedule.
        debias: whether the values at the start have no weight; see `tp.Ema`.
        warmup: whether the decay starts low; see `tp.Ema`.
        trainable: what is averaged: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        A transformation with an `EmaState`; updates pass as they are. `update` needs the model.

    Raises:
        ValueError: `decay` is not in [0, 1]; `update`: there is no model, or it lacks a parameter of the average.
        TypeError: `decay` is traced.
    """
    decay = as_decay(decay)

    def init(params: PyTree) -> EmaState:
        if not is_placeholder(params):
            parts = given(params, trainable)
            params = parts.canonical([jnp.array(leaf, widened(leaf.dtype), copy=True) for leaf in parts.slots])
        return EmaState(params, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **_: Any) -> tuple[PyTree, EmaState]:
        if params is None:
            raise ValueError("optim.ema averages the model, so it needs it: tx.update(grads, state, model)")
        step, weight = next_step(decay, state.count, state.weight, debias=debias, warmup=warmup)
        shadow, treedef, structure = structure_of(state.average)
        leaves, steps = _by_path(params), _by_path(updates)
        missing = [path for path in structure.paths if path not in leaves]
        if missing:
            raise ValueError(f"the average has a parameter at {missing[0]!r}, the model has none there")
        news = [moved(path, leaves[path], steps.get(path)) for path in structure.paths]
        average = jax.tree.unflatten(treedef, lerp(shadow, news, step))
        return updates, EmaState(average, state.count + 1, weight)

    return optax.GradientTransformationExtraArgs(init, update)


def as_ema(
    state: PyTree,
    model: M,
    decay: float | Callable[[Any], Any],
    *,
    debias: bool = False,
    warmup: bool = False,
    buffers: Buffers = "copy",
) -> Ema[M]:
    """The average that `optim.ema` keeps in a state, as a `tp.Ema`: `.average` is a model, `.update` goes on.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> model = {"w": jnp.zeros(2, jnp.bfloat16)}
    >>> tx = optim.trainable(optax.chain(optax.sgd(1.0), optim.ema(0.75)))
    >>> updates, state = tx.update({"w": -jnp.ones(2, jnp.bfloat16)}, tx.init(model), model)
    >>> optim.as_ema(state, model, 0.75).average
    {'w': Array([0.25, 0.25], dtype=bfloat16)}

    Args:
        state: any state with an `EmaState` in it.
        model: the model as it is now; what is not averaged is taken from it.
        decay: how it goes on, as are `debias`, `warmup` and `buffers`; see `tp.Ema`.
        debias: as for `tp.Ema`.
        warmup: as for `tp.Ema`.
        buffers: as for `tp.Ema`.

    Returns:
        A `tp.Ema` in buffers of its own, of the parameters that the state averages.

    Raises:
        ValueError: there is no `EmaState` in the state, or two of one parameter, or it is of another model; as
            `tp.Ema`.
    """
    found = list(_averages(state, None))
    if not found:
        raise ValueError("there is no EmaState in the state; put optim.ema(decay) at the end of the chain")
    values: dict[str, Any] = {}
    for each, layout in found:
        averages = _values(each, layout)
        twice = values.keys() & averages.keys()
        if twice:
            raise ValueError(
                f"the state has two averages of {min(twice)!r}; pass the part of it that has the one you mean"
            )
        values |= averages
    layout, _ = look_up(structure_of(model)[2], layout_in(state))  # the state knows the ties
    index = index_of(layout).structure.index
    unknown = [path for path in values if path not in index]
    if unknown:
        raise ValueError(f"the state has an average for {unknown[0]!r}, the model has no parameter there")
    layout = trained_at(layout, [index[path] for path in values])
    average = Ema(model, decay, debias=debias, warmup=warmup, buffers=buffers, trainable=layout)
    last = max((each for each, _ in found), key=lambda each: int(each.count)) if len(found) > 1 else found[0][0]
    changed = [jnp.copy(values[path]) for path in layout.paths], jnp.copy(last.count), jnp.copy(last.weight)
    return eqx.tree_at(lambda ema: (ema.shadow, ema.count, ema.weight), average, changed)


def _averages(state: PyTree, layout: Layout | None) -> Iterator[tuple[EmaState, Layout | None]]:
    """Each average in a state, with the layout of its leaves where a transformation over models is around it."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, (EmaState, TrainableState)))
    for node in nodes:
        if isinstance(node, EmaState):
            yield node, layout
        elif isinstance(node, TrainableState):
            runs = [*zip(node.roles.runs, node.runs, strict=True), *zip(node.roles.held, node.held, strict=True)]
            for positions, run in runs:
                yield from _averages(run, trained_at(node.layout, positions))


def _values(state: EmaState, layout: Layout | None) -> dict[str, Any]:
    if layout is not None and is_array(state.average) and state.average.shape == (layout.size,):
        pieces = cut(state.average, tuple(slot.shape for slot in layout.slots))
        return {s.path: p if is_complex(s.dtype) else p.real for s, p in zip(layout.slots, pieces, strict=True)}
    return _by_path(state.average)


def _by_path(tree: PyTree) -> dict[str, Any]:
    leaves, _, structure = structure_of(tree)
    return dict(zip(structure.paths, leaves, strict=True))
