"""Checks whether a rule does the same to joined leaves - in a vector, in stacks - as to the leaves themselves.

The check reads the rule's programs over the form and over the canonical tree, and each leaf must get the same number
(`_reader`) in each of three steps. In the tree leaves have their shapes and names, which joined ones do not have. A
rule that calls a kernel or Python for its updates gets no number, and is refused.
"""

import dataclasses
import functools
import itertools
import math
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
from .._tree.text import in_short
from .._tree.types import PyTree
from ._coupling import Extended, alike_p, compared
from ._per_leaf import PerLeafState
from ._reader import ROUNDS, Reader, Value, equal, hashed
from ._scaled import Factors, told
from ._state import History, nodes_of, of_run, settled, steady

Known = frozenset[Any]
"""The leaves, by path and kind, of the models for which a rule is known to be right."""

_MANY = 32  # leaves; of more only some are looked at


class _Way(NamedTuple):
    """A way to show leaves to a rule."""

    show: Callable[[Sequence[Any]], PyTree]
    slots: Sequence[Sequence[int]]  # the leaves in each array that it is shown


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
    seen = frozenset((slot.path, slot.shape, slot.dtype) for slot in layout.slots)
    if any(seen <= each for each in known) or all(block.length is None for block in form.blocks):
        return known
    name, instead = words
    try:
        reason = _difference(rule, layout, form, extra)
    except Exception as error:
        raise ValueError(
            f"{name} traces the transformation over the leaves, apart and joined, and it fails there "
            f"({in_short(error)}). {instead[0].upper()}{instead[1:]}; if it needs more arguments, give examples of "
            "them, trial={...}"
        ) from error
    if reason:
        raise ValueError(f"the transformation {reason}; {instead}")
    return known | {seen}


def _difference(rule: Extended, layout: Layout, form: Form, extra: Mapping[str, Any]) -> str:
    """Says how a rule differs over joined leaves; the empty text if it does not."""
    few = few_alike(layout)
    if not few:
        return ""
    small = trained_at(layout, [index_of(layout).positions[slot] for slot in few])
    found = _compared(rule, small, _ways(rule, small, few, form, 0), extra)
    # Labels for stacks may look for a shape among them, and are right. A rule that looks at leaves does so for others.
    is_right = not found or (form.is_stacks and not _compared(rule, small, _ways(rule, small, few, form, 1), extra))
    return "" if is_right else found


def _ways(rule: Extended, small: Layout, few: Sequence[int], form: Form, more: int) -> tuple[list[Any], list[_Way]]:
    """Returns a few leaves, with axes that are longer by some elements, and the ways to show them joined and apart."""
    tree = tree_of(small)
    if not form.is_stacks:
        # In one dtype: a vector has the widest one, and Optax makes the hyperparameters of complex leaves complex.
        joined = vector_of(small)
        joined = dataclasses.replace(joined, blocks=(dataclasses.replace(joined.blocks[0], dtype=_SINGLE),))
        leaves = [jax.ShapeDtypeStruct(slot.shape, _SINGLE) for slot in small.slots]
        return leaves, [_Way(each.join, each.members) for each in (joined, tree)]
    leaves = [jax.ShapeDtypeStruct([size + more for size in slot.shape], slot.dtype) for slot in small.slots]
    groups: dict[Any, list[int]] = {keys[0].key: [] for keys in form.keys if len(keys) > 1}
    groups |= {name: [] for name, own in jtu.tree_unflatten(form.treedef, form.blocks).items() if own == {}}
    numbers = {slot: i for i, slot in enumerate(few)}
    for keys, slots in zip(form.keys, form.members, strict=True):
        own = groups.setdefault(keys[0].key if len(keys) > 1 else None, [])
        own += [numbers[slot] for slot in slots if slot in numbers]
    joined = stacks_in_groups(take_apart(leaves, None).layout, {name: sorted(own) for name, own in groups.items()})
    has_rows = nodes_of(PerLeafState, jax.eval_shape(rule.init, joined.shapes()))
    show = lambda form: functools.partial(_shown, form) if has_rows else form.join
    return leaves, [_Way(show(each), each.members) for each in (joined, tree)]


def _compared(rule: Extended, small: Layout, ways: tuple[list[Any], list[_Way]], extra: Mapping[str, Any]) -> str:
    leaves, both = ways
    readers = Reader(), Reader()
    found = [_updates(reader, rule, way, leaves, extra) for reader, way in zip(readers, both, strict=True)]
    differs = [path for path, one, other in zip(small.paths, *found, strict=True) if one != other]
    opaque = sorted({name for reader in readers for name in reader.opaque})
    if differs and opaque:
        return f"calls {', '.join(opaque)}, which may do something else to joined leaves"
    where = f"{differs[0]!r} gets another update if it is joined with others" if differs else ""
    return f"looks at the shapes of leaves, their axes or norms, or at their names: {where}" if differs else ""


_SINGLE = np.dtype(np.float32)


def _shown(form: Form, arrays: Sequence[Any]) -> PyTree:
    return compared(form.treedef, form.keys, jtu.tree_leaves(form.join(arrays)))


def few_alike(layout: Layout) -> list[int]:
    """Returns the leaves that are looked at: of many, two of each kind whose names differ only in numbers."""
    numbers = [i for i, slot in enumerate(layout.slots) if slot.size]  # an empty leaf has no update
    if len(numbers) <= _MANY:
        return numbers
    alike: dict[Any, list[int]] = {}
    for i in numbers:
        slot = layout.slots[i]
        alike.setdefault((re.sub("[0-9]+", "0", slot.path), slot.shape, slot.dtype), []).append(i)
    return sorted({i for slots in alike.values() for i in (slots[0], slots[-1])})


# -- Read --------------------------------------------------------------------------------------------------------------


def _updates(
    reader: Reader, rule: Extended, way: _Way, shapes: Sequence[jax.ShapeDtypeStruct], extra: Mapping[str, Any]
) -> list[Any]:
    """Returns the numbers of each leaf's updates in some steps."""
    like = _program(way.show, shapes)[1]
    init, state = _program(lambda params: settled(rule.init(params)), like)
    update, _ = _program(functools.partial(_step, rule, extra), like, state, like, np.float32(0))
    sizes = [math.prod(leaf.shape) for leaf in shapes]

    def argument(*key: Any) -> list[Value]:
        return [
            tuple([(hashed(*key, slot), None if len(slots) == sizes[slot] == 1 else sizes[slot]) for slot in slots])
            for slots in way.slots
        ]

    found: list[Any] = [[] for _ in shapes]
    kept = reader.run(init, argument("start"))
    for n in range(ROUNDS):
        args = *argument("gradient", n), *kept, *argument("parameter", n), equal(hashed("value", n))
        ends = reader.run(update, args)
        updates, kept = ends[: len(way.slots)], ends[len(way.slots) :]
        for slots, runs in zip(way.slots, updates, strict=True):
            runs = runs * len(slots) if runs[0][1] is None else runs
            for slot, number in itertools.zip_longest(slots, [number for number, _ in runs]):
                found[slots[-1] if slot is None else slot].append(number)
    return found


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
    return jax.tree.map(lambda leaf: alike_p.bind(jnp.real(leaf), *numbers, program=wheres), params)


def _loss(params: PyTree, *_: Any, **__: Any) -> Any:
    """Returns the sum of squares."""
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jtu.tree_leaves(params))


# -- Several histories -------------------------------------------------------------------------------------------------


def couples_late(tx: Extended, form: Form, like: History, extra: Mapping[str, Any]) -> bool:
    """Returns whether a rule couples leaves through values that it has made of each by a step count of its own.

    An example is a clip after Adam, which divides by a power of the step count. A clip before it couples gradients, and
    these do not depend on the count. The run's state is the same for all leaves.

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
