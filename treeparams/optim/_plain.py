"""from_optax, to_optax: convert a state of plain Optax to one of a transformation over models, and back.

Plain Optax over a tree of arrays keeps its copies of that tree at the same paths as over the canonical tree, where the
latter has arrays. So the array at a place of a parameter's state has the same path in both. The difference is that
plain Optax has an array for each place of a tie, and one for each frozen array.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.core import Tracer

from .._forms.makers import tree_of
from .._forms.owners import Entries, Place
from .._forms.states import entries_of
from .._slots.index import Index
from .._slots.layout import Layout, index_of, trained_at
from .._slots.ties import Alias
from .._tree.dtypes import in_dtype
from .._tree.paths import join_path, split_path
from .._tree.recognise import structure_of
from .._tree.structure import is_array
from .._tree.text import describe, first_few
from .._tree.types import PyTree
from ._state import (
    History,
    ModelTransformation,
    TrainableState,
    asked,
    extended,
    in_own_buffers,
    model_state,
    nodes_of,
    regrouped,
    rule_of,
    settled,
    steady,
)

_COUNTS = {("count",), ("gradient_step",)}  # how the paths of numbers of steps end


# -- From Optax --------------------------------------------------------------------------------------------------------


def from_optax(tx: object, optax_state: PyTree, model: PyTree) -> TrainableState:
    """Converts a state of plain Optax to one of a transformation over models, to continue a run with this library.

    >>> import equinox as eqx, jax, jax.numpy as jnp, optax, treeparams as tp
    >>> from treeparams import optim
    >>> mlp, adam = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)), optax.adam(1e-3)
    >>> theirs = adam.init(eqx.filter(mlp, eqx.is_array))  # as a program without this library has it
    >>> tx = optim.trainable(adam, "!layers.0")
    >>> state = optim.from_optax(tx, theirs, mlp)
    >>> state.layout.paths, state.runs[0][0].mu.layers[1].weight is theirs[0].mu.layers[1].weight
    (('layers.1.weight', 'layers.1.bias'), True)

    The next steps are those that Optax would have taken, bit for bit, with its step counts and hyperparameters. The
    state of frozen parameters, and of integers, is dropped. A tied parameter has an array at each of its places in
    Optax's state: they must be equal. For complex parameters Optax must have received the conjugates of JAX's
    gradients.

    Args:
        tx: an `optim.trainable(...)` around the optimiser that made the
            state.
        optax_state: its state, over the model or over any part of it that contains the trained parameters, such as
            `eqx.filter(model, eqx.is_inexact_array)`. It may be a tree of NumPy arrays with the same paths. If a mask
            or `optax.partition` was around the optimiser, pass the inner state,
            `state.inner_states["train"].inner_state`.
        model: the model as it is now.

    Returns:
        The state. Arrays that need not change are not copied.

    Raises:
        ValueError: the state lacks arrays that `tx` keeps, or has more, or other shapes or dtypes, or other values at
            two places of a tie; it is traced; it contains L-BFGS, which remembers all parameters together, and some of
            them are frozen, tied or in another form; otherwise as `tx.init`.
        TypeError: `tx` is plain Optax; otherwise as `tx.init`.
    """
    rule = rule_of(tx)
    if nodes_of(TrainableState, optax_state):
        raise ValueError("this is already a state of a transformation over models: pass it to tx.update as it is")
    given = entries_of(optax_state)
    if any(isinstance(leaf, Tracer) for leaf in given.values()):
        raise ValueError("call from_optax between steps, outside of jax.jit: it compares tied arrays")
    fresh = rule.init(model)
    if not fresh.runs:
        return fresh
    layout = fresh.layout
    tree = History(layout, *asked(rule.tx.init, tree_of(layout)))
    plain = _history_of(tree, given)
    _check_memory(tree, given, is_tree=jtu.tree_structure(tree.state) == jtu.tree_structure(fresh.runs[0]))
    run = steady(regrouped([plain], rule.like(layout)), fresh.runs[0])
    made = dataclasses.replace(fresh, runs=(run,), counts=(jnp.asarray(plain.count, jnp.int32),))
    return in_own_buffers(made, jax.tree.leaves(model))


def _history_of(tree: History, given: Mapping[Entries, Any]) -> History:
    """Returns a state of plain Optax as a history over the canonical tree, with the largest step count in it."""
    state = jtu.tree_unflatten(jtu.tree_structure(tree.state), _arrays_for(tree, given))
    count = max([int(np.max(given[entries])) for entries in given if entries[-1:] in _COUNTS], default=0)
    return dataclasses.replace(tree, state=state, count=count)


def known_history(tx: object, given: Mapping[Entries, Any], layout: Layout) -> History:
    """Returns a state of plain Optax as a history of those parameters of a layout for which it has arrays."""
    init = rule_of(tx).tx.init if isinstance(tx, ModelTransformation) else extended(tx).init
    tree = History(layout, *asked(init, tree_of(layout)))
    own = {(place, path): entries for (place, path), (entries, *_) in _owned_by_path(tree)}
    kept = {path for _, path in own}
    known = {path for (_, path), entries in own.items() if entries in given}
    leaf_at = dict(zip(layout.paths, index_of(layout).positions, strict=True))
    if known and known < kept:  # the others were frozen, or masked
        layout = trained_at(layout, [leaf for path, leaf in leaf_at.items() if path in known or path not in kept])
        tree = History(layout, *asked(init, tree_of(layout)))
    return _history_of(tree, given)


def _owned_by_path(tree: History) -> Iterable[Any]:
    """Returns the arrays of parameters, which must be at their paths: numbers in a list may be those of others."""
    tree.copies.check()
    for (place, path), found in tree.copies.at.items():
        if found[0] != (*place[0], *split_path(path), *place[1]):
            raise ValueError(
                f"the optimiser keeps an array of {path!r} at {join_path(found[0])!r}, by a number and not by its "
                "path, so the old model is needed to find its parameter; first write state = "
                "optim.from_optax(tx, state, model) with the old model"
            )
    return tree.copies.at.items()


def _arrays_for(tree: History, given: Mapping[Entries, Any]) -> list[Any]:
    """Returns the arrays of a state over the canonical tree, from one over a whole tree that has no further arrays."""
    index, owned = index_of(tree.layout), list(tree.copies.owned())
    leaf_at, taken = dict(zip(tree.layout.paths, index.positions, strict=True)), set[Entries]()
    found: list[Any] = []
    for entries, owners in owned:
        names = {entries: None}
        if owners is not None:
            its = _places_of(index, leaf_at[owners.paths[0]])
            names = {_at(owners.place, index, alias.leaf): alias for alias in its}
        here = {name: alias for name, alias in names.items() if name in given}
        taken.update(here)
        has_value = any(alias is None or not alias.transforms for alias in here.values())
        found.append(_one_of(index, given, here) if has_value else None)
    shapes = list(tree.copies.arrays.items())
    missing = [join_path(entries) for (entries, _), array in zip(shapes, found, strict=True) if array is None]
    rest = [name for name in given if name not in taken]
    if missing:
        raise ValueError(
            f"the state has nothing at {first_few(missing)}, where the transformation keeps an array, but has "
            f"{first_few(list(map(join_path, rest))) or 'nothing else'}: it was made by another transformation, or "
            "over a tree of other paths than eqx.filter(model, eqx.is_array)"
        )
    for (entries, want), array in zip(shapes, found, strict=True):
        _check_kind(entries, want, array)
    places = {owners.place for _, owners in owned if owners is not None}
    _check_rest(index, places, rest)
    return found


def _places_of(index: Index, leaf: int) -> list[Alias]:
    """Returns the source of a tie and its aliases, those with a transform last; for an untied parameter only itself."""
    return [Alias(leaf, leaf, ()), *sorted(index.aliases.get(leaf, ()), key=lambda alias: bool(alias.transforms))]


def _at(place: Place, index: Index, leaf: int) -> Entries:
    """Returns the path of the array at this place in the state of a parameter."""
    return (*place[0], *index.structure.entries[leaf], *place[1])


def _one_of(index: Index, given: Mapping[Entries, Any], here: Mapping[Entries, Alias | None]) -> Any:
    """Returns the array at the places of a tie, which must be equal."""
    (first, source), *others = here.items()
    array = jnp.asarray(given[first])
    for name, alias in others:
        if source is None or alias is None:
            continue
        like = alias.value_from(array, index.structure.spec(alias.source))
        if like.shape != jnp.shape(given[name]) or not np.array_equal(like, given[name], equal_nan=True):
            paths = index.structure.paths
            raise ValueError(
                f"{paths[alias.leaf]!r} is tied to {paths[source.leaf]!r}, and the state has other values at "
                f"{join_path(name)!r} than at {join_path(first)!r}: plain Optax has trained them apart. Untie them, "
                "tp.untie(model), or begin with tx.init(model)"
            )
    return array


def _check_kind(entries: Entries, want: Any, array: Any) -> None:
    if (array.shape, array.dtype) != (want.shape, want.dtype):
        raise ValueError(
            f"the state has {describe(array)} at {join_path(entries)!r}, where the transformation keeps "
            f"{describe(want)}: it was made by another transformation, or for another model"
        )


def _check_rest(index: Index, places: Set[Place], rest: Iterable[Entries]) -> None:
    """Refuses arrays that do not belong to a frozen array of the model."""
    entries = index.structure.entries
    known = {_at(place, index, leaf) for place in places for leaf in range(len(entries)) if leaf not in index.by_leaf}
    leaf_at = {own: leaf for leaf, own in enumerate(entries)}
    lost = [join_path(name) for name in rest if name not in known and not _is_of_untrained(index, leaf_at, name)]
    if lost:
        raise ValueError(
            f"the state has {first_few(lost)}, for which the transformation has no place: it was made by another "
            "transformation, or for another model"
        )


def _is_of_untrained(index: Index, leaf_at: Mapping[Entries, int], name: Entries) -> bool:
    """Returns whether an array belongs to a frozen leaf, at a place that no trained one has, as in a separate group.

    In a list, positions of a chain may be paths of parameters, too. So the longest path in the name counts, and the
    last.
    """
    spans = [(stop - start, start) for start in range(len(name)) for stop in range(start + 1, len(name) + 1)]
    size, start = max([span for span in spans if name[span[1] : sum(span)] in leaf_at], default=(0, 0))
    return size > 0 and leaf_at[name[start : start + size]] not in index.by_leaf and name[-1:] not in _COUNTS


def _check_memory(tree: History, given: Mapping[Entries, Any], *, is_tree: bool) -> None:
    """Refuses L-BFGS except for the same parameters in the same form."""
    if nodes_of(optax.ScaleByLBFGSState, tree.state) and not (is_tree and len(given) == len(tree.copies.arrays)):
        raise ValueError(
            "L-BFGS remembers steps of all parameters together, in one form: you can convert its state only for "
            "optim.trainable, if all of them train and none is tied; begin with tx.init(model)"
        )


# -- To Optax ----------------------------------------------------------------------------------------------------------


def to_optax(tx: object, state: PyTree, params: PyTree) -> PyTree:
    """Converts a state of a transformation over models to one of plain Optax: the inverse of `optim.from_optax`.

    >>> import equinox as eqx, jax, optax
    >>> from treeparams import optim
    >>> mlp, adam = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)), optax.adam(1e-3)
    >>> tx = optim.trainable(adam)
    >>> theirs = optim.to_optax(tx, tx.init(mlp), eqx.filter(mlp, eqx.is_array))
    >>> theirs[0].mu.layers[0].weight.shape
    (4, 2)

    Args:
        tx: the transformation over models that made the state.
        state: its state, or that of a chain or wrapper around it.
        params: the tree that plain Optax will continue with, such as `eqx.filter(model, eqx.is_inexact_array)`: only
            arrays, at the paths of the model.

    Returns:
        The state of the optimiser inside `tx`, as if you had made it over `params`. It has the moments of a tied
        parameter at all of its places, through the transform of an alias that has one. For a frozen parameter it has
        the state that `tx` held, or else a fresh one. Since there is one step count, Adam's first steps are too long
        for it.

    Raises:
        ValueError: trained parameters have taken different numbers of steps, as after `optim.set_trainable`; `params`
            is of another model; the state is of another transformation.
        TypeError: `tx` is plain Optax; `params` has functions or texts in it.
    """
    rule = rule_of(tx)
    ours = model_state(state)
    histories = rule.histories(ours)
    running, held = histories[: len(ours.runs)], histories[len(ours.runs) :]
    if len(running) > 1:
        steps = [f"{first_few(each.layout.paths)} {int(np.max(each.count))}" for each in running]
        raise ValueError(
            f"parameters have not taken their steps together ({'; '.join(steps)}), and plain Optax has one count for "
            "all of them; begin with its own init"
        )
    known = _known_in(params, ours.layout)
    fresh = settled(rule.tx.init(params))
    found = dict(entries_of(fresh))
    shared = [(entries, history.copies.shared(entries)) for history in running for entries in history.copies.common]
    trained = [each for history in running for each in _as_plain(history, known)]
    lost = [join_path(entries) for entries, _ in [*shared, *trained] if entries not in found]
    if lost:
        raise ValueError(f"the state has {first_few(lost)}, for which plain Optax over params has no place")
    for entries, array in [*(each for history in held for each in _as_plain(history, known)), *shared, *trained]:
        if entries in found:
            like = found[entries]
            array = in_dtype(array, like.dtype)
            _check_kind(entries, like, array)
            found[entries] = array
    return in_own_buffers(jtu.tree_unflatten(jtu.tree_structure(fresh), found.values()), jax.tree.leaves(params))


def _known_in(params: PyTree, layout: Layout) -> Set[str]:
    """Returns the paths of a tree for plain Optax, which must contain all trained parameters."""
    structure = structure_of(params)[2]
    for leaf, path in zip(jax.tree.leaves(params), structure.paths, strict=True):
        if not (is_array(leaf) or isinstance(leaf, (bool, int, float, complex))):
            raise TypeError(
                f"expected the tree of arrays that plain Optax accepts, as eqx.filter(model, eqx.is_array); got "
                f"{describe(leaf)} at {path!r}"
            )
    for slot in layout.slots:
        spec = structure.specs[structure.index[slot.path]] if slot.path in structure.index else None
        if spec is None or spec.shape != slot.shape:
            raise ValueError(f"expected {describe(slot)} at {slot.path!r} of params, got {spec and describe(spec)}")
    return structure.index.keys()


def _as_plain(history: History, known: Set[str]) -> Iterator[tuple[Entries, Any]]:
    """Yields the arrays of a history's parameters, with their paths in a state of plain Optax over known paths."""
    index, copies = index_of(history.layout), history.copies
    there = {leaf for leaf, path in enumerate(index.structure.paths) if path in known}
    leaf_at = dict(zip(history.layout.paths, index.positions, strict=True))
    for place, path in copies.at:
        spec = index.structure.spec(leaf_at[path])
        array = copies.piece(place, path).alone(spec.shape)
        for alias in _places_of(index, leaf_at[path]):
            if alias.leaf in there:
                yield _at(place, index, alias.leaf), alias.value_from(array, spec)
