"""from_optax, to_optax: convert a state of plain Optax to one of a transformation over models, and back.

An array of a state has a name of two parts: the parameter that it belongs to, if it belongs to one, and the entries of
its path without the parameter's own. Programs freeze and group parameters by wrappers, which put more entries into
these. So the arrays of a parameter are matched by their entries without wrappers, in order, and arrays that parameters
share, such as step counts, by the wrappers in which their parameters were found to be (`_sources_of`).
"""

import collections
import dataclasses
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.core import Tracer

from .._forms.states import Entries, Piece, Place, entries_of
from .._slots.index import Index
from .._slots.layout import index_of
from .._slots.ties import Alias
from .._tree.paths import join_path, quote, split_path
from .._tree.text import describe, first_few
from .._tree.types import PyTree, in_dtype
from ._groups import groups_in
from ._state import History, TrainableState, in_own_buffers, model_state, nodes_of, rule_of, settled, steady

_COUNTS = {("count",), ("gradient_step",)}  # how the paths of numbers of steps end
_OTHER = "it was made by another transformation, or for another model"

Name = tuple[Entries, str | None]
"""The entries of an array without those of its parameter, and the parameter; `None` if parameters share it."""
Places = dict[Entries, Alias | None]
"""Where plain Optax has the arrays of one name: at each place of a tie."""


# -- From Optax and to it ----------------------------------------------------------------------------------------------


def from_optax(tx: object, optax_state: PyTree, model: PyTree) -> TrainableState:
    """Converts a state of plain Optax to one of a transformation over models, to continue a run with this library.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> model, adam = {"embed": jnp.ones((3, 2)), "head": jnp.ones(2)}, optax.adam(1e-3)
    >>> labels = {"embed": "freeze", "head": "train"}
    >>> theirs = optax.partition({"train": adam, "freeze": optax.set_to_zero()}, labels).init(model)
    >>> tx = optim.trainable(adam, "!embed")
    >>> state = optim.from_optax(tx, theirs, model)
    >>> state.runs[0][0].mu["head"] is theirs.inner_states["train"].inner_state[0].mu["head"]
    True

    The next steps are those that Optax would have taken, bit for bit, with its step counts and hyperparameters, in any
    form: in stacks, Muon, LAMB and Adafactor go into the rows of `optim.per_leaf`. **Arrays are matched by their
    parameters**, so it does not matter by which wrappers the program froze parameters (`optax.masked`,
    `optax.partition`, `optax.transforms.freeze`, a `set_to_zero` in the chain). One optimiser may become several
    groups. Groups may have other labels, or become one if their counts and hyperparameters are equal.

    The state of frozen parameters, and of integers, is dropped. A tied parameter has an array at each of its places in
    Optax's state: they must be equal. For complex parameters Optax must have received the conjugates of JAX's
    gradients.

    Args:
        tx: an `optim.trainable(...)` around the optimiser that made the state.
        optax_state: its state, over the model or over any part of it that contains the trained parameters, such as
            `eqx.filter(model, eqx.is_inexact_array)`. It may be a tree of NumPy arrays with the same paths.
        model: the model as it is now.

    Returns:
        The state. Arrays that need not change are not copied.

    Raises:
        ValueError: the state lacks arrays that `tx` keeps, or has more, or other shapes or dtypes, or other values at
            two places of a tie, or in groups that are one in `tx`; it is traced; it contains L-BFGS, which remembers
            all parameters together, and some of them are frozen, tied or in another form; otherwise as `tx.init`.
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
    (history,) = rule.histories(fresh)
    is_whole = rule.form == "tree" and len(given) == len(history.copies.arrays)
    if nodes_of(optax.ScaleByLBFGSState, fresh.runs) and not is_whole:
        raise ValueError("L-BFGS remembers steps of all parameters together: its state goes over as a whole, or not")
    index, own, paths = index_of(fresh.layout), _own_names(history), history.layout.paths
    theirs = _of(_their_names(index, own, given), paths)
    empty = {quote(group.name) for group in groups_in(fresh.runs) if not group.paths}
    found = _sources_of(own, theirs, [name for name in own if not empty.isdisjoint(name[0])])
    arrays = {name: _one_of(index, given, theirs[name]) for its in found.values() for name in its}
    run = jtu.tree_unflatten(jtu.tree_structure(fresh.runs[0]), _arrays_for(history, own, found, arrays))
    steps = [np.max(array) for (entries, path), array in arrays.items() if path is None and entries[-1:] in _COUNTS]
    count = jnp.asarray(max(map(int, steps), default=0), jnp.int32)
    made = dataclasses.replace(fresh, runs=(steady(run, fresh.runs[0]),), counts=(count,))
    return in_own_buffers(made, jax.tree.leaves(model))


def to_optax(tx: object, state: PyTree, like: PyTree) -> PyTree:
    """Converts a state of a transformation over models to one of plain Optax: the inverse of `optim.from_optax`.

    >>> import equinox as eqx, jax, optax
    >>> from treeparams import optim
    >>> mlp, adam = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)), optax.adam(1e-3)
    >>> tx = optim.trainable(adam)
    >>> theirs = optim.to_optax(tx, tx.init(mlp), adam.init(eqx.filter(mlp, eqx.is_array)))
    >>> theirs[0].mu.layers[0].weight.shape
    (4, 2)

    Args:
        tx: the transformation over models that made the state.
        state: its state, or that of a chain or wrapper around it.
        like: a fresh state of plain Optax, of the optimiser and the tree that it will continue with, such as
            `optax.adam(1e-3).init(eqx.filter(model, eqx.is_inexact_array))`. Its wrappers and groups may differ from
            those of `tx`, as in `optim.from_optax`.

    Returns:
        The state, in the structure of `like`. It has the moments of a tied parameter at all of its places, through the
        transform of an alias that has one. For a frozen parameter it has the moments that the state holds, or else
        those of `like`. Since there is one step count, Adam's first steps are too long for it.

    Raises:
        ValueError: trained parameters have taken different numbers of steps, as after `optim.set_trainable`; `like` is
            of another model or optimiser; the state is of another transformation.
        TypeError: `tx` is plain Optax.
    """
    rule, ours = rule_of(tx), model_state(state)
    histories = rule.histories(ours)
    running, held = histories[: len(ours.runs)], histories[len(ours.runs) :]
    if len(running) > 1:
        steps = [f"{first_few(each.layout.paths)} {int(np.max(each.count))}" for each in running]
        raise ValueError(
            f"parameters have not taken their steps together ({'; '.join(steps)}), and Optax has one count for all"
        )
    index, fresh = index_of(ours.layout), settled(like)
    names, found = [_own_names(history) for history in (*held, *running)], entries_of(fresh)
    theirs = _their_names(index, {name: place for each in names for name, place in each.items()}, found)
    for history, own in zip((*held, *running), names, strict=True):
        wanted = _of(theirs, history.layout.paths)
        if history in held:  # its numbers are those of the histories that train
            wanted = {name: its for name, its in wanted.items() if name[1] is not None}
            own = {name: place for name, place in own.items() if place is not None}
        copies = history.copies
        arrays = {
            name: copies.shared(name[0]) if place is None else copies.piece(place, str(name[1])).alone()
            for name, place in own.items()
        }
        for name, sources in _sources_of(wanted, own).items():
            array = _one_value(sources, arrays)
            for entries, alias in wanted[name].items():
                there = alias.value_from(array, index.structure.spec(alias.source)) if alias else array
                want = found[entries]
                found[entries] = _fitting(name, in_dtype(there, want.dtype), want, want.shape)
    return in_own_buffers(jtu.tree_unflatten(jtu.tree_structure(fresh), found.values()))


# -- Names -------------------------------------------------------------------------------------------------------------


def _own_names(history: History) -> dict[Name, Place | None]:
    """Returns the names in a state of a transformation over models, with the place of each parameter's piece.

    `optim.per_leaf` keeps a state for each parameter, so there even a count belongs to one.
    """
    names: dict[Name, Place | None] = {}
    for entries, owners in history.copies.owned():
        if owners is None:
            names[entries, None] = None
        else:
            before, after = owners.place
            names |= {((*before, *after), path): owners.place for path in owners.paths}
    return names


def _their_names(index: Index, own: Mapping[Name, Place | None], given: Iterable[Entries]) -> dict[Name, Places]:
    """Returns the names in a state of plain Optax, and where the arrays of each are."""
    leaves, paths = {own: leaf for leaf, own in enumerate(index.structure.entries)}, index.structure.paths
    known, common = ({_bare(name) for name, path in own if (path is None) == is_shared} for is_shared in (False, True))
    # In plain Optax, arrays of a parameter end with its path, but for a rule that keeps a node for each.
    ends = {(), *[place[1] for name, place in own.items() if place and name[0] == place[0] + place[1]]}
    names = collections.defaultdict[Name, Places](dict)
    for entries in given:
        spans = [(start, stop) for start in range(len(entries) + 1) for stop in range(start, len(entries) + 1)]
        # In a list, positions of a chain may be paths of parameters, too: the longest counts, and the last.
        best = (-1, False, -1)
        for start, stop in spans:
            leaf, before, after = leaves.get(entries[start:stop]), entries[:start], entries[stop:]
            if leaf is None or after not in ends:
                continue
            is_known = _bare(before + after) in known
            # A frozen one may be in a group of its own, whose rule keeps other arrays.
            if is_known or (leaf not in index.by_leaf and stop > start and not after and _bare(entries) not in common):
                best = max(best, (stop - start, after != (), start))
        length, _, start = best
        if length < 0:
            names[entries, None][entries] = None
        else:
            leaf = leaves[entries[start : start + length]]
            source = index.sources.get(leaf, leaf)
            alias = next((each for each in index.aliases.get(source, ()) if each.leaf == leaf), Alias(leaf, leaf, ()))
            names[entries[:start] + entries[start + length :], paths[source]][entries] = alias
    return dict(names)


def _bare(entries: Entries) -> Entries:
    """Returns entries without those of wrappers: positions in a chain, fields of masks, groups and `optim.per_leaf`."""
    wrappers = {"inner_state", "inner_states", "states"}
    labels = {i + 1 for i, entry in enumerate(entries) if entry == "inner_states"}
    return tuple([each for i, each in enumerate(entries) if not (each in wrappers or each.isdigit() or i in labels)])


def _of(names: Mapping[Name, Places], paths: Container[object]) -> dict[Name, Places]:
    """Returns the names for these parameters, without the shared ones of wrappers around others alone."""
    wrappers = lambda is_of: {
        entries[: i + 1]
        for entries, path in names
        if path is not None and (path in paths) is is_of
        for i, entry in enumerate(entries)
        if entry == "inner_state"
    }
    alone = wrappers(False) - wrappers(True)
    around = lambda entries: {entries[: i + 1] for i in range(len(entries))}
    is_kept = lambda name: name[1] in paths if name[1] is not None else alone.isdisjoint(around(name[0]))
    return {name: its for name, its in names.items() if is_kept(name)}


# -- Matching ----------------------------------------------------------------------------------------------------------


def _sources_of(wanted: Collection[Name], have: Collection[Name], optional: Any = ()) -> dict[Name, list[Name]]:
    """Returns, for each array that is wanted, those of the other state that it comes from; several must be equal."""
    found, heads = dict[Name, list[Name]](), collections.defaultdict[Any, set[Entries]](set)
    here, there, alike = _by_bare(wanted), _by_bare(have), collections.defaultdict[Entries, list[Name]](list)
    for name, path in have:
        alike[_bare(name)].append((name, path))
    for (bare, path), names in here.items():
        others = there.get((bare, path), [])
        if path is None or len(names) != len(others):
            continue
        for name, other in zip(names, others, strict=True):
            found[name, path] = [(other, path)]
            while name and other and name[-1] == other[-1]:  # nodes around the two that are called alike
                name, other = name[:-1], other[:-1]
                heads[path, name].add(other)
                heads[None, name].add(other)
    candidates = lambda bare, path: [each for each in alike[bare] if path is None or each[1] is None]
    for name, path in [each for each in wanted if each not in found]:
        for end in reversed(range(len(name))):  # the innermost node around arrays of its parameters decides
            moved = {(*head, *name[end:]) for head in heads[path, name[:end]]}
            if its := [each for each in candidates(_bare(name), path) if each[0] in moved]:
                found[name, path] = its
                break
    used = {each for its in found.values() for each in its}
    for (bare, path), names in here.items():
        names = [name for name in names if (name, path) not in found]
        others = [each for each in candidates(bare, path) if bare and each not in used]
        for i, name in enumerate(names):
            in_order = others[i : i + 1] if len(others) == len(names) else others
            if its := [each for each in others if each[0] == name] or in_order:
                found[name, path] = its
    missing = [_text(name) for name in wanted if name not in found and name not in optional]
    lost = [_text(name) for name in have if name not in {each for its in found.values() for each in its}]
    if missing:
        raise ValueError(
            f"the state has nothing at {first_few(missing)}, where the other one keeps an array, but has "
            f"{first_few(lost) or 'nothing else'}: {_OTHER}"
        )
    if lost:
        raise ValueError(f"the state has {first_few(lost)}, for which the other one has no place: {_OTHER}")
    return found


def _by_bare(names: Iterable[Name]) -> dict[Name, list[Entries]]:
    """Returns the entries of arrays by their names without wrappers, in order."""
    found = collections.defaultdict[Name, list[Entries]](list)
    for name, path in names:
        found[_bare(name), path].append(name)
    return found


# -- Arrays ------------------------------------------------------------------------------------------------------------


def _arrays_for(history: History, own: Mapping[Name, Any], found: Mapping[Name, Any], arrays: Any) -> list[Any]:
    """Returns the arrays of a history in its form, from those of plain Optax."""
    copies, slots = history.copies, {slot.path: slot for slot in history.layout.slots}
    names = {(place, name[1]): name for name, place in own.items()}

    def piece(place: Place, path: str) -> Piece:
        its, name, slot = copies.piece(place, path), names[place, path], slots[path]
        if name not in found:
            return its
        owners: Any = its.owners
        is_vector = owners.axis is not None and not owners.block.has_rows  # of several dtypes it has the widest
        array, dtype = _one_value(found[name], arrays), slot.dtype if is_vector else None
        return Piece(_fitting(name, array, its.array, its.shape, dtype))

    def shared(entries: Entries) -> Any:
        its, like = found.get((entries, None)), copies.shared(entries)
        return _fitting((entries, None), _one_value(its, arrays), like, like.shape) if its else like

    return copies.joined(piece, shared)


def _one_value(names: Sequence[Name], arrays: Mapping[Name, Any]) -> Any:
    """Returns the array of these names, which must be equal."""
    first, *others = names
    for other in others:
        if not np.array_equal(arrays[first], arrays[other], equal_nan=True):
            raise ValueError(
                f"the state has other values at {_text(first)!r} than at {_text(other)!r}, which cannot become "
                "one: keep them apart, optim.groups({...})"
            )
    return arrays[first]


def _one_of(index: Index, given: Mapping[Entries, Any], places: Places) -> Any:
    """Returns the array at the places of a tie, which must be equal."""
    (first, source), *others = sorted(places.items(), key=lambda each: bool(each[1] and each[1].transforms))
    array = jnp.asarray(given[first])
    for entries, alias in others:
        if source is None or alias is None:
            continue
        like = alias.value_from(array, index.structure.spec(alias.source))
        if like.shape != jnp.shape(given[entries]) or not np.array_equal(like, given[entries], equal_nan=True):
            paths = index.structure.paths
            raise ValueError(
                f"{paths[alias.leaf]!r} is tied to {paths[source.leaf]!r}, and the state has other values at "
                f"{join_path(entries)!r} than at {join_path(first)!r}: tp.untie(model), or begin with tx.init(model)"
            )
    return array


def _fitting(name: Name, array: Any, like: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Returns the array, of this shape, and of the dtype of another one or of this one."""
    if (array.shape, True) != (shape, array.dtype in (like.dtype, dtype)):
        raise ValueError(
            f"the state has {describe(array)} at {_text(name)!r}, where the transformation keeps "
            f"{describe(jax.ShapeDtypeStruct(shape, like.dtype))}: {_OTHER}"
        )
    return array


def _text(name: Name) -> str:
    return join_path((*name[0], *split_path(name[1] or "")))
