"""Checks whether a rule does the same to joined leaves - in a vector, in stacks - as to the leaves themselves.

The check reads the rule's programs over two forms of one small layout, in which each element must have one formula
(`_formulas`). A rule that calls a kernel or Python has none, and is refused. A rule may also select leaves by their
names, which joined leaves do not have. So its programs are read over the model's own tree too, with leaves of one
shape, and each leaf must have the formula that it has without a name.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import JaxprEqn

from .._forms.form import Form, stacks_in_groups, tree_of, vector_of
from .._programs import Marks
from .._slots.layout import Layout, index_of, trained_at
from .._slots.parts import take_apart
from .._tree.text import describe, in_short
from .._tree.types import PyTree, is_complex
from ._coupling import Extended, compared
from ._formulas import NO_FORMULA, Formulas, Value, alike_p
from ._reader import Reader
from ._scaled import Factors, told
from ._state import History, of_run, settled, steady

Kinds = frozenset[tuple[str, int, int]]
"""Kinds of leaves: the group, or the empty text; the rank; and 1 for one such leaf, 2 for several."""

ANY: Kinds = frozenset(("", rank, 1) for rank in range(4))
"""The kinds for a form in which it does not matter which leaves there are."""

Known = frozenset[Any]
"""The kinds of leaves, and the paths, for which a rule is known to be right."""

# Programs are read and not run, so axes may be long: rules factorise, or precondition, from some length on.
_LONG = 4096
_MANY = 32  # names; of more only some are looked at


def kinds_of(form: Form) -> Kinds:
    """Returns the kinds of leaves in stacks."""
    counts: dict[tuple[str, int], int] = {}
    for keys, block in zip(form.keys, form.blocks, strict=True):
        kind = keys[0].key if len(keys) > 1 else "", block.rank
        counts[kind] = counts.get(kind, 0) + len(block.shapes)
    counts |= {(name, 0): 0 for name, group in _groups_of(form).items() if not group}
    return frozenset((name, rank, min(count, 2)) for (name, rank), count in counts.items())


def _groups_of(form: Form) -> dict[str, Any]:
    """Returns the groups of stacks in a form, by name."""
    tree = jtu.tree_unflatten(form.treedef, form.blocks)
    return {name: own for name, own in tree.items() if isinstance(own, dict)} if form.is_stacks else {}


def check_form(
    rule: Extended,
    layout: Layout,
    form: Form,
    words: tuple[str, str],
    extra: Mapping[str, Any],
    known: Known = frozenset(),
) -> Known:
    """Checks that a rule is the same over a form as over the leaves in it.

    Args:
        rule: an Optax transformation that takes extra arguments.
        layout: the layout of the leaves.
        form: the form that it sees.
        words: the name of the function that asks, and the advice if the rule differs.
        extra: arguments that the rule needs, besides `value`, `grad` and `value_fn`.
        known: the facts about the rule so far.

    Returns:
        The facts about it now.
    """
    kinds = kinds_of(form) if form.is_stacks else ANY
    seen = kinds.union(form.paths)
    if seen <= known or all(block.length is None for block in form.blocks):
        return known
    name, instead = words
    try:
        reason = "" if kinds <= known else _difference(rule, kinds, form.is_stacks, extra)
        if not reason and _goes_by_name(rule, layout, form, extra):
            reason = "uses the names of leaves, which joined leaves do not have"
    except Exception as error:
        raise ValueError(
            f"{name} traces the transformation over a few leaves, apart and joined, and it fails there "
            f"({in_short(error)}). {instead[0].upper()}{instead[1:]}; if it needs more arguments, give examples of "
            "them, trial={...}"
        ) from error
    if reason:
        raise ValueError(f"the transformation {reason}; {instead}")
    return known | seen


class _Way(NamedTuple):
    """A way to show leaves to a rule."""

    show: Callable[[Sequence[Any]], PyTree]
    slots: Sequence[Sequence[int]]  # the leaves in each array that it is shown


def _difference(rule: Extended, kinds: Kinds, is_stacks: bool, extra: Mapping[str, Any]) -> str:
    """Says how a rule differs over joined leaves; the empty text if it does not."""
    shapes, ways = _few(kinds, is_stacks)
    formulas, opaque = Formulas(), set[str]()
    joined, apart = (_updates(formulas, opaque, rule, way, shapes, extra) for way in ways)
    if NO_FORMULA in (*joined, *apart):
        return f"calls {', '.join(sorted(opaque))}, which may do something else to joined leaves"
    for leaf, one, two in zip(shapes, joined, apart, strict=True):
        if one != two:
            other = f"{describe(leaf)} gets another update if it is joined"
            return f"looks at the shapes of leaves, their axes or norms: {other}"
    return ""


def _few(kinds: Kinds, is_stacks: bool) -> tuple[list[jax.ShapeDtypeStruct], list[_Way]]:
    """Returns a few leaves, and the ways to show them joined and apart."""
    leaves = _leaves(kinds)
    shapes = [leaf for _, leaf in leaves]
    groups: dict[Any, list[int]] = {group: [] for group, _, count in kinds if not count}
    for i, (group, _) in enumerate(leaves):
        groups.setdefault(group or None, []).append(i)
    layout = take_apart(shapes, None).layout
    form = stacks_in_groups(layout, groups) if is_stacks else vector_of(layout)

    if not is_stacks:
        return shapes, [_Way(form.join, form.members), _Way(list, [[i] for i in range(len(shapes))])]
    join = lambda arrays: compared(form.treedef, form.keys, jtu.tree_leaves(form.join(arrays)))
    return shapes, [_Way(join, form.members), _nameless(shapes, groups)]


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


def _nameless(leaves: Sequence[Any], groups: Mapping[Any, Sequence[int]]) -> _Way:
    """Returns the way to show leaves of groups apart, without names; the only group `None` means no groups."""
    tree = {name: {f"{i:04} {describe(leaves[i])}": i for i in slots} for name, slots in groups.items()}
    pairs, treedef = jtu.tree_flatten_with_path(tree.get(None, tree))
    keys, order = [path for path, _ in pairs], [i for _, i in pairs]
    return _Way(lambda arrays: compared(treedef, keys, [arrays[i] for i in order]), [[i] for i in order])


# -- Names -------------------------------------------------------------------------------------------------------------


def _goes_by_name(rule: Extended, layout: Layout, form: Form, extra: Mapping[str, Any]) -> bool:
    """Returns whether a leaf gets another update at its path in the model than without a name."""
    few = few_names(layout.paths)
    tree = tree_of(trained_at(layout, [index_of(layout).positions[slot] for slot in few]))
    # Optax makes the hyperparameters of complex leaves complex.
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, np.float32 if is_complex(leaf.dtype) else leaf.dtype)
        for leaf in jtu.tree_leaves(tree.shapes())
    ]
    apart = [[i] for i in range(len(few))]
    named, nameless = _Way(tree.join, apart), _Way(list, apart)
    if form.is_stacks:
        places = zip(form.keys, form.members, strict=True)
        group_of = {slot: keys[0].key if len(keys) > 1 else None for keys, own in places for slot in own}
        groups: dict[Any, list[int]] = {name: [] for name in _groups_of(form)}
        for i, slot in enumerate(few):
            groups.setdefault(group_of[slot], []).append(i)
        named, nameless = _Way(functools.partial(compared, tree.treedef, tree.keys), apart), _nameless(leaves, groups)
    if _step_in_words(rule, named, leaves, extra) == _step_in_words(rule, nameless, leaves, extra):
        return False
    formulas, opaque = Formulas(), set[str]()  # the programs may differ in what makes no difference
    one, other = (_updates(formulas, opaque, rule, way, leaves, extra) for way in (named, nameless))
    return one != other


def _step_in_words(rule: Extended, way: _Way, leaves: Sequence[Any], extra: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Returns the program of the first step, from leaf to leaf, and which arrays it closes over."""

    def step(leaves: Sequence[Any], grads: Sequence[Any], value: Any) -> PyTree:
        params = way.show(leaves)
        updates, state = _step(rule, extra, way.show(grads), settled(rule.init(params)), params, value)
        found = dict(zip([slot for (slot,) in way.slots], jtu.tree_leaves(updates), strict=True))
        return [found[slot] for slot in sorted(found)], state

    program, _ = _program(step, leaves, leaves, np.float32(0))
    return str(program.jaxpr), list(map(id, program.consts))


def few_names(paths: Sequence[str]) -> list[int]:
    """Returns the leaves whose names are looked at: of many, the first and the last that differ only in numbers."""
    if len(paths) <= _MANY:
        return [*range(len(paths))]
    alike: dict[str, list[int]] = {}
    for slot, path in enumerate(paths):
        alike.setdefault(re.sub("[0-9]+", "0", path), []).append(slot)
    return sorted({slot for slots in alike.values() for slot in (slots[0], slots[-1])})


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
    like, blocks = _program(way.show, shapes)[1], range(len(way.slots))
    reader = Reader(formulas, way.slots, [leaf.size for leaf in jtu.tree_leaves(like)])
    init, state = _program(lambda params: settled(rule.init(params)), like)
    update, _ = _program(functools.partial(_step, rule, extra), like, state, like, np.float32(0))
    grads, params, start = ([reader.argument(name, i) for i in blocks] for name in ("gradient", "parameter", "start"))
    found = reader.training(reader.run(init, start), functools.partial(_one_update, reader, update, grads, params))
    opaque |= reader.opaque
    if found is None:
        return [object()] * len(shapes)
    rounds, updates = found
    of_slot = {slot: _mark(rounds, updates[i], i) for i in blocks for slot in way.slots[i]}
    return [of_slot[slot] for slot in range(len(shapes))]


def _program(f: Callable[..., PyTree], *args: PyTree) -> tuple[Any, PyTree]:
    """Returns the program of a function, and its result as shapes."""
    # JAX remembers the structures of arguments and results, and what is static in a model is in them.
    leaves, treedef = jtu.tree_flatten(args)
    treedefs: list[Any] = []

    def of_leaves(leaves: Sequence[Any]) -> list[Any]:
        made, its = jtu.tree_flatten(f(*jtu.tree_unflatten(treedef, leaves)))
        treedefs.append(its)
        return made

    program, made = jax.make_jaxpr(of_leaves, return_shape=True)(leaves)
    return program, jtu.tree_unflatten(treedefs[-1], made)


def _one_update(
    reader: Reader, update: Any, grads: Sequence[Value], params: Sequence[Value], carried: Sequence[Value]
) -> tuple[Sequence[Value], Sequence[Value]]:
    """Returns the next state, and the updates."""
    found = reader.run(update, [*grads, *carried, *params, reader.argument("value")])
    return found[len(grads) :], found[: len(grads)]


def _mark(rounds: Any, update: Value, block: int) -> Any:
    """Returns the mark of a block's update: the operations on its elements, and the elements of others."""
    if update[0].formula == NO_FORMULA:
        return NO_FORMULA
    return rounds, [(run.formula, None if run.place in (None, block) else (run.place, run.size)) for run in update]


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


# -- Several histories -------------------------------------------------------------------------------------------------


def couples_late(tx: Extended, form: Form, like: History, extra: Mapping[str, Any]) -> bool:
    """Returns whether a rule couples leaves through values that it has made of each by a step count of its own.

    An example is a clip after Adam, which divides by a power of the step count. A clip before it couples gradients, and
    these do not depend on the count. What is of the run is the same for all leaves.

    Args:
        tx: the rule.
        form: a form in which each leaf is an array.
        like: the rule's state over it, as shapes.
        extra: arguments that the rule needs, besides `value`, `grad` and `value_fn`.
    """
    if like.division.problem or len(form.blocks) < 2:
        return bool(like.division.problem)
    params, run = form.shapes(), of_run([like])
    own = [1 << i for i in range(len(form.blocks))]
    of_path = {form.paths[slot]: mark for mark, slots in zip(own, form.members, strict=True) for slot in slots}
    kept = [
        (0 if entries in run else 1 << len(own)) if its is None else of_path[its.paths[0]]
        for entries, its in like.copies.owned()
    ]
    program, _ = _program(functools.partial(_step, tx, extra), params, like.state, params, np.float32(0))
    walk = _Late(len(own))
    return any(mark & walk.late for mark in walk.run(program, [*own, *kept, *own, 0]))


class _Late(Marks):
    """Carries a mark for each leaf, one for values that all share, and one for values that couple leaves with these."""

    def __init__(self, leaves: int) -> None:
        super().__init__()
        self._shared, self.late = 1 << leaves, 2 << leaves

    def operation(self, eqn: JaxprEqn, its: list[int]) -> Sequence[int]:
        return list(map(self._coupled, super().operation(eqn, its)))

    def _coupled(self, mark: int) -> int:
        leaves = mark & (self._shared - 1)
        if mark & self.late or not leaves & (leaves - 1):
            return mark
        # What several leaves have made together, without a count, is the same number for all of them.
        return mark | self.late if mark & self._shared else 0
