"""Checks whether a rule does the same to joined leaves - in a vector, in stacks - as to the leaves themselves.

The check reads the rule's programs over two forms of one small layout, in which each element must have one formula
(`_formulas`). A rule that calls a kernel or Python has none, and is refused.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._forms.form import Form, Stacks, stacked_leaves
from .._forms.makers import stacks_in_groups, vector_of
from .._slots.parts import take_apart
from .._tree.text import describe, in_short
from .._tree.types import PyTree
from ._coupling import Extended
from ._formulas import NO_FORMULA, Formulas, Value, alike_p
from ._groups import GroupsState
from ._named import Asked, Named, Rows, RowsJoined
from ._reader import Reader
from ._scaled import Factors, told
from ._state import nodes_of, settled, steady

Kinds = frozenset[tuple[str, int, int]]
"""Kinds of leaves: the group, or the empty text; the rank; and 1 for one such leaf, 2 for several."""

ANY: Kinds = frozenset(("", rank, 1) for rank in range(4))
"""The kinds for a form in which it does not matter which leaves there are."""

# Programs are read and not run, so axes may be long: rules factorise, or precondition, from some length on.
_LONG = 4096
_BY_NAME = "uses the names of leaves, which joined leaves do not have"


def kinds_of(form: Form) -> Kinds:
    """Returns the kinds of leaves in stacks."""
    counts: dict[tuple[str, int], int] = {}
    for keys, block in zip(form.keys, form.blocks, strict=True):
        kind = keys[0].key if len(keys) > 1 else "", block.rank
        counts[kind] = counts.get(kind, 0) + len(block.shapes)
    tree = jtu.tree_unflatten(form.treedef, form.blocks)
    counts |= {(name, 0): 0 for name, group in tree.items() if isinstance(group, Stacks) and not group}
    return frozenset((name, rank, min(count, 2)) for (name, rank), count in counts.items())


def check_form(
    rule: Extended,
    form: Form,
    words: tuple[str, str],
    extra: Mapping[str, Any],
    known: Kinds = frozenset(),
) -> Kinds:
    """Checks that a rule is the same over a form as over the leaves in it.

    Args:
        rule: an Optax transformation that takes extra arguments.
        form: the form that it sees.
        words: the name of the function that asks, and the advice if the rule differs.
        extra: arguments that the rule needs, besides `value`, `grad` and `value_fn`.
        known: the kinds of leaves for which it is known to be the same.

    Returns:
        The kinds of leaves for which it is known now.
    """
    stacked = stacked_leaves(form.shapes())
    kinds = kinds_of(form) if any(stacked) else ANY
    if kinds <= known or all(block.length is None for block in form.blocks):
        return known
    name, instead = words
    try:
        reason = _difference(rule, kinds, any(stacked), extra)
    except Exception as error:
        raise ValueError(
            f"{name} traces the transformation over a few leaves, apart and joined, and it fails there "
            f"({in_short(error)}). {instead[0].upper()}{instead[1:]}; if it needs more arguments, give examples of "
            "them, trial={...}"
        ) from error
    if reason:
        raise ValueError(f"the transformation {reason}; {instead}")
    return known | kinds


class _Way(NamedTuple):
    """A way to show leaves to a rule."""

    show: Callable[[Sequence[Any]], PyTree]
    slots: Sequence[Sequence[int]]  # the leaves in each array that it is shown


def _difference(rule: Extended, kinds: Kinds, is_stacks: bool, extra: Mapping[str, Any]) -> str:
    """Says how a rule differs over joined leaves; the empty text if it does not."""
    asked = Asked()
    shapes, ways = _few(kinds, is_stacks, asked)
    if not is_stacks and _has_groups(rule, jax.eval_shape(ways[0].show, shapes)):
        return _BY_NAME
    formulas, opaque = Formulas(), set[str]()
    joined, apart = (_updates(formulas, opaque, rule, way, shapes, extra) for way in ways)
    if asked.names:
        return _BY_NAME
    if NO_FORMULA in (*joined, *apart):
        return f"calls {', '.join(sorted(opaque))}, which may do something else to joined leaves"
    for leaf, one, two in zip(shapes, joined, apart, strict=True):
        if one != two:
            other = f"{describe(leaf)} gets another update if it is joined"
            return f"looks at the shapes of leaves, their axes or norms: {other}"
    return ""


def _few(kinds: Kinds, is_stacks: bool, asked: Asked) -> tuple[list[jax.ShapeDtypeStruct], list[_Way]]:
    """Returns a few leaves, and the ways to show them joined and apart.

    Apart they are in a list in which a rule over rows is one operation.
    """
    leaves = _leaves(kinds)
    shapes = [leaf for _, leaf in leaves]
    groups: dict[Any, list[int]] = {group: [] for group, _, count in kinds if not count}
    for i, (group, _) in enumerate(leaves):
        groups.setdefault(group or None, []).append(i)
    layout = take_apart(shapes, None).layout
    form = stacks_in_groups(layout, groups) if is_stacks else vector_of(layout)
    list_of = Rows if is_stacks else Named

    def join(arrays: Sequence[Any]) -> PyTree:
        return _compared(form.join(arrays)) if is_stacks else form.join(arrays)

    def keep_apart(arrays: Sequence[Any]) -> PyTree:
        found = {group: list_of([arrays[i] for i in slots], asked) for group, slots in groups.items()}
        return found.get(None, found)

    return shapes, [_Way(join, form.members), _Way(keep_apart, [[i] for i in range(len(shapes))])]


def _leaves(kinds: Kinds) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """Returns leaves of some kinds, each with its group, in the order in which stacks lie in their dictionary.

    Each group that has leaves contains a vector and matrices, since the stack of a scalar is a vector, and so on.
    """
    known = {kind[:2] for kind in kinds}
    added = [(group, rank, 1) for group in {group for group, _, count in kinds if count} for rank in (1, 2)]
    of_rank = {0: [()], 1: [(3,)], 2: [(2, 3), (_LONG, _LONG)], 3: [(2, 3, 4), (2, _LONG, _LONG)]}
    found = [
        (group, jax.ShapeDtypeStruct(shape, np.float32))
        for group, rank, count in (*kinds, *(kind for kind in added if kind[:2] not in known))
        for shape in of_rank.get(rank, [(2,) * (rank - 1) + (3,)])
        for _ in range(count)
    ]
    return sorted(found, key=lambda each: (each[0], describe(each[1])))


def _compared(tree: PyTree) -> PyTree:
    """Returns stacks, or stacks in groups, as those that a rule over rows is compared on."""
    return RowsJoined(tree) if isinstance(tree, Stacks) else {name: RowsJoined(own) for name, own in tree.items()}


def _has_groups(rule: Extended, shown: PyTree) -> bool:
    """Returns whether a rule contains `optim.groups`, which uses names."""
    with contextlib.suppress(Exception):
        return bool(nodes_of(GroupsState, jax.eval_shape(rule.init, shown)))
    return False


# -- Read --------------------------------------------------------------------------------------------------------------


def _updates(
    formulas: Formulas,
    opaque: set[str],
    rule: Extended,
    way: _Way,
    shapes: Sequence[jax.ShapeDtypeStruct],
    extra: Mapping[str, Any],
) -> list[Any]:
    """Returns a mark for the update of each leaf, equal if the updates are the same; adds to the opaque operations."""
    like, blocks = jax.eval_shape(way.show, shapes), range(len(way.slots))
    reader = Reader(formulas, way.slots, [leaf.size for leaf in jtu.tree_leaves(like)])
    init, state = jax.make_jaxpr(lambda params: settled(rule.init(params)), return_shape=True)(like)
    update = jax.make_jaxpr(functools.partial(_step, rule, extra))(like, state, like, np.float32(0))
    grads, params, start = ([reader.argument(name, i) for i in blocks] for name in ("gradient", "parameter", "start"))
    found = reader.training(reader.run(init, start), functools.partial(_one_update, reader, update, grads, params))
    opaque |= reader.opaque
    if found is None:
        return [object()] * len(shapes)
    rounds, updates = found
    of_slot = {slot: _mark(rounds, updates[i], i) for i in blocks for slot in way.slots[i]}
    return [of_slot[slot] for slot in range(len(shapes))]


def _one_update(
    reader: Reader, update: Any, grads: Sequence[Value], params: Sequence[Value], carried: Sequence[Value]
) -> tuple[Sequence[Value], Sequence[Value]]:
    """Returns the next state, and the updates."""
    found = reader.run(update, [*grads, *carried, *params, reader.argument("value")])
    return found[len(grads) :], found[: len(grads)]


def _mark(rounds: Any, update: Value, block: int) -> Any:
    """Returns the mark of a block's update; a unique one if the update is not element by element of the block."""
    run, *others = update
    if run.formula == NO_FORMULA:
        return NO_FORMULA
    return (rounds, run.formula) if not others and run.place in (None, block) else object()


def _step(
    rule: Extended, extra: Mapping[str, Any], grads: PyTree, state: PyTree, params: PyTree, value: Any
) -> tuple[PyTree, PyTree]:
    """Returns the updates and the next state."""
    known = {"value": value, "grad": grads, "value_fn": _loss}
    before = told(state, functools.partial(_of_each_element, params))
    updates, after = rule.update(grads, before, params, **known | dict(extra))
    return updates, steady(told(after, None), state)


def _of_each_element(params: PyTree, given: Factors) -> PyTree:
    """Returns factors that are known only to be those of each element, whatever their numbers are."""
    numbers, wheres = list(map(jnp.asarray, given.values())), str([*map(id, given)])
    return jax.tree.map(lambda leaf: alike_p.bind(leaf, *numbers, program=wheres), params)


def _loss(params: PyTree, *_: Any, **__: Any) -> Any:
    """Returns the sum of squares."""
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jtu.tree_leaves(params))
