"""to_optax: the state of a transformation over models as one of plain Optax."""

from collections.abc import Iterator, Set
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._forms.owners import Entries
from .._forms.states import entries_of
from .._slots.layout import Layout, index_of
from .._tree.dtypes import in_dtype
from .._tree.paths import join_path
from .._tree.recognise import structure_of
from .._tree.structure import is_array
from .._tree.text import describe, first_few
from .._tree.types import PyTree
from ._history import History
from ._plain import check_kind, path_at, places_of
from ._state import in_own_buffers, model_state, rule_of, settled


def to_optax(tx: object, state: PyTree, params: PyTree) -> PyTree:
    """The state of plain Optax that one of a transformation over models is: the way back of `optim.from_optax`.

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
        params: the tree that plain Optax is to go on with, such as `eqx.filter(model, eqx.is_inexact_array)`: arrays
            alone, at the paths of the model.

    Returns:
        What `tx` holds within, as if it had been made over `params`. The moments of a tie stand at all of its places,
        through the transform of an alias that has one. Of parameters that are frozen it has what the state holds of
        them, or what `init` makes: there is one step count, so Adam's first steps are too long for them.

    Raises:
        ValueError: parameters that train have not taken their steps together, as after `optim.set_trainable`; `params`
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
            check_kind(entries, like, array)
            found[entries] = array
    return in_own_buffers(jtu.tree_unflatten(jtu.tree_structure(fresh), found.values()), jax.tree.leaves(params))


def _known_in(params: PyTree, layout: Layout) -> Set[str]:
    """The paths of a tree that plain Optax takes, which has all that is trained."""
    structure = structure_of(params)[2]
    for leaf, path in zip(jax.tree.leaves(params), structure.paths, strict=True):
        if not (is_array(leaf) or isinstance(leaf, (bool, int, float, complex))):
            raise TypeError(
                f"expected the tree that plain Optax takes, arrays alone, as eqx.filter(model, eqx.is_array); got "
                f"{describe(leaf)} at {path!r}"
            )
    for slot in layout.slots:
        spec = structure.specs[structure.index[slot.path]] if slot.path in structure.index else None
        if spec is None or spec.shape != slot.shape:
            raise ValueError(f"expected {describe(slot)} at {slot.path!r} of params, got {spec and describe(spec)}")
    return structure.index.keys()


def _as_plain(history: History, known: Set[str]) -> Iterator[tuple[Entries, Any]]:
    """The arrays of parameters in a history, by their paths in a state of plain Optax over a tree of known paths."""
    index, copies = index_of(history.layout), history.copies
    there = {leaf for leaf, path in enumerate(index.structure.paths) if path in known}
    leaf_at = dict(zip(history.layout.paths, index.positions, strict=True))
    for place, path in copies.at:
        spec = index.structure.spec(leaf_at[path])
        array = copies.piece(place, path).alone(spec.shape)
        for alias in places_of(index, leaf_at[path]):
            if alias.leaf in there:
                yield path_at(place, index, alias.leaf), alias.value_from(array, spec)
