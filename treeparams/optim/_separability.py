"""Whether a rule does the same to leaves that lie together - in a vector, in stacks - as to the leaves themselves.

It is read from its programs over two forms of one small layout, in which each element must have one formula
(`_formulas`). What calls kernels or Python has none, and is tried with numbers on the same two forms.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .._forms.form import Form, Stacks, stacked_leaves
from .._forms.makers import stacks_in_groups, vector_of
from .._slots.layout import Layout
from .._slots.parts import take_apart
from .._tree.text import describe, in_short
from .._tree.types import PyTree
from ._coupling import rows_unread
from ._formulas import NO_FORMULA, Formulas, Value
from ._groups import GroupsState
from ._named import Asked, Named
from ._reader import Reader
from ._state import nodes_of, settled, steady

Kinds = frozenset[tuple[str, int, int]]
"""Of leaves: the group, empty where there are no groups; the rank; and whether it is 1 or, for several, 2."""

Make = Callable[[Layout, Mapping[Any, Sequence[int]]], Form]
"""From a layout, and the slots of each group (or those of `None`), to its form."""

ANY: Kinds = frozenset(("", rank, 1) for rank in range(4))
"""For a form in which it does not matter which leaves there are."""

# Programs are read and not run, so axes may be long: rules factorise, or precondition, from some length on.
_LONG, _TRIED = 4096, 128
_CALLS, _UPDATES = 512, 3  # up to so many calls, until so many updates were not zero: a rule may gather, or warm up
_SCALES = (1e-3, 1.0, 1e3)  # thresholds are passed at one scale or another
_TOLERANCE = 1e-4  # of the largest update of a leaf; sums in another order differ by less
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # it runs for milliseconds


def over_vector(layout: Layout, groups: Mapping[Any, Sequence[int]]) -> Form:
    """The vector of a layout, which has no groups."""
    return vector_of(layout)


def kinds_of(form: Form) -> Kinds:
    """The kinds of leaves in stacks."""
    counts: dict[tuple[str, int], int] = {}
    for keys, block in zip(form.keys, form.blocks, strict=True):
        kind = keys[0].key if len(keys) > 1 else "", block.rank
        counts[kind] = counts.get(kind, 0) + len(block.shapes)
    tree = jtu.tree_unflatten(form.treedef, form.blocks)
    empty = [name for name, group in tree.items() if isinstance(group, Stacks) and not group]
    return frozenset((*kind, min(count, 2)) for kind, count in (*counts.items(), *(((name, 0), 0) for name in empty)))


def check_form(
    rule: Any, form: Form, words: tuple[str, str], extra: Mapping[str, Any], known: Kinds = frozenset()
) -> Kinds:
    """Checks that a rule is the same over a form as over the leaves in it.

    Args:
        rule: an Optax transformation that takes extra arguments.
        form: what it is shown.
        words: the name of the function that asks, and what to write instead.
        extra: arguments that the rule needs, besides `value`, `grad` and `value_fn`.
        known: the kinds of leaves for which it is known.

    Returns:
        The kinds of leaves for which it is known now.
    """
    stacked = stacked_leaves(form.shapes())
    kinds = kinds_of(form) if any(stacked) else ANY
    if kinds <= known or all(block.length is None for block in form.blocks):
        return known
    name, instead = words
    try:
        reason = _difference(rule, kinds, stacks_in_groups if any(stacked) else over_vector, extra)
    except Exception as error:
        raise ValueError(
            f"{name} traces the transformation over a few leaves, apart and joined, and it fails there "
            f"({in_short(error)}). {instead[0].upper()}{instead[1:]}; if it needs more arguments, give examples of "
            "them (trial={...})"
        ) from error
    if reason:
        raise ValueError(f"the transformation {reason}; {instead}")
    return known | kinds


class _Way(NamedTuple):
    """A way to show leaves to a rule."""

    show: Callable[[Sequence[Any]], Any]
    read: Callable[[Any], Sequence[Any]]  # and back to the leaves
    slots: Sequence[Sequence[int]]  # the leaves in each array that it is shown


def _difference(rule: Any, kinds: Kinds, make: Make, extra: Mapping[str, Any]) -> str:
    """What a rule does otherwise, in words; the empty text if nothing."""
    asked = Asked()
    shapes, ways = _few(rule, kinds, make, _LONG, asked)
    formulas, stacks = Formulas(), stacked_leaves(jax.eval_shape(ways[0].show, shapes))
    with rows_unread(all(stacks)):
        together, apart = (_updates(formulas, rule, way, shapes, extra) for way in ways)
    if asked.names:
        return "goes by the names of leaves, and where they are joined they have none"
    if NO_FORMULA in (*together, *apart):
        gap = _gap(rule, *_few(rule, kinds, make, _TRIED, asked), extra)
        tried = "looks at the shapes of leaves: tried on a few, apart and joined, its updates differ by"
        return "" if gap <= _TOLERANCE else f"{tried} {gap:.0e} of the largest"  # NaN is not
    pairs = zip(shapes, together, apart, strict=True)
    other = next((describe(leaf) for leaf, one, two in pairs if one != two), "")
    return (
        other and f"looks at the shapes of leaves, their axes or norms: {other} has another update where it is joined"
    )


def _few(
    rule: Any, kinds: Kinds, make: Make, long: int, asked: Asked
) -> tuple[list[jax.ShapeDtypeStruct], tuple[_Way, _Way]]:
    """A few leaves, and how they are shown, joined and apart.

    A vector and matrices are among them whatever the model has: the stack of a scalar is a vector, and so on.
    """
    known = {kind[:2] for kind in kinds}
    added = [(group, rank, 1) for group in {group for group, _, count in kinds if count} for rank in (1, 2)]
    of_rank = {0: [()], 1: [(3,)], 2: [(2, 3), (long, long)], 3: [(2, 3, 4), (2, long, long)]}
    each = [
        (group, describe(leaf), leaf)
        for group, rank, count in (*kinds, *(kind for kind in added if kind[:2] not in known))
        for shape in of_rank.get(rank, [(2,) * (rank - 1) + (3,)])
        for leaf in [jax.ShapeDtypeStruct(shape, np.float32)] * count
    ]
    each.sort(key=lambda leaf: leaf[:2])  # as stacks lie in their dictionary: what is carried comes in one order
    shapes = [leaf for *_, leaf in each]
    groups: dict[Any, list[int]] = {group: [] for group, _, count in kinds if not count}
    for i, (group, *_) in enumerate(each):
        groups.setdefault(group or None, []).append(i)
    form = make(take_apart(shapes, None).layout, groups)
    if None in groups:
        asked.names |= _has_groups(rule, jax.eval_shape(form.join, shapes))

    def tree(leaves: Sequence[Any]) -> Any:
        found = {group: Named([leaves[i] for i in slots], asked) for group, slots in groups.items()}
        return found.get(None, found)

    together = _Way(form.join, form.cut, form.members)
    apart = _Way(tree, jtu.tree_leaves, [[i] for i in range(len(shapes))])
    return shapes, (together, apart)


def _has_groups(rule: Any, shown: PyTree) -> bool:
    """Whether `optim.groups`, which goes by names, is in a rule that is shown no groups."""
    with contextlib.suppress(Exception), rows_unread(True):
        return bool(nodes_of(GroupsState, jax.eval_shape(rule.init, shown)))
    return False


def _step(rule: Any, extra: Mapping[str, Any], scale: Any, grads: Any, state: Any, params: Any, value: Any) -> Any:
    """The updates and the next state; the loss is the sum of squares, times a scale."""
    loss = lambda params, *_, **__: scale * sum(jnp.sum(jnp.square(leaf)) for leaf in jtu.tree_leaves(params))
    known = {"value": value, "grad": grads, "value_fn": loss}
    updates, after = rule.update(grads, state, params, **known | dict(extra))
    return updates, steady(after, state)


def _updates(formulas: Formulas, rule: Any, way: _Way, shapes: Sequence[Any], extra: Mapping[str, Any]) -> list[Any]:
    """What tells the updates of leaves apart: equal if they are the same."""
    like, blocks = jax.eval_shape(way.show, shapes), range(len(way.slots))
    reader = Reader(formulas, way.slots, [leaf.size for leaf in jtu.tree_leaves(like)])
    init, state = jax.make_jaxpr(lambda params: settled(rule.init(params)), return_shape=True)(like)
    update = jax.make_jaxpr(functools.partial(_step, rule, extra, 1.0))(like, state, like, np.float32(0))
    grads, params, start = ([reader.argument(name, i) for i in blocks] for name in ("gradient", "parameter", "start"))

    def once(carried: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
        found = reader.run(update, [*grads, *carried, *params, reader.argument("value")])
        return found[len(blocks) :], found[: len(blocks)]

    found = reader.training(reader.run(init, start), once)
    if found is None:
        return [NO_FORMULA] * len(shapes)
    rounds, updates = found
    of_slot = {slot: _mark(rounds, updates[i], i) for i in blocks for slot in way.slots[i]}
    return [of_slot[slot] for slot in range(len(shapes))]


def _mark(rounds: Any, update: Value, block: int) -> Any:
    run, *others = update
    if run.formula == NO_FORMULA:
        return NO_FORMULA
    return (rounds, run.formula) if not others and run.place in (None, block) else object()


def _gap(rule: Any, shapes: Sequence[Any], ways: Sequence[_Way], extra: Mapping[str, Any]) -> float:
    """The largest difference of a leaf's updates at any scale and step, relative to the largest of them there."""
    rng, factors = np.random.default_rng(0), itertools.cycle((1, 30, 5))  # gradients of some leaves are larger
    start = [
        factor * rng.normal(size=leaf.shape).astype(np.float32) for factor, leaf in zip(factors, shapes, strict=False)
    ]

    def begin() -> list[Any]:
        shown = [way.show(list(map(jnp.asarray, start))) for way in ways]
        return [(params, settled(rule.init(params))) for params in shown]

    def step(way: _Way, carry: Any, scale: Any) -> Any:
        params, state = carry
        grads = jax.tree.map(lambda leaf: 2 * scale * leaf, params)
        value = scale * sum(jnp.sum(jnp.square(leaf)) for leaf in jtu.tree_leaves(params))
        updates, after = _step(rule, extra, scale, grads, state, params, value)
        return way.read(updates), (jax.tree.map(jnp.add, params, updates), after)

    both = lambda carries, scale: [step(way, carry, scale) for way, carry in zip(ways, carries, strict=True)]
    programs = (begin, ()), (both, (jax.eval_shape(begin), np.float32(1)))
    if any(isinstance(const, Tracer) for f, args in programs for const in jax.make_jaxpr(f)(*args).consts):
        raise ValueError("it calls kernels or Python, which is tried with numbers, and has traced ones in it")
    # Compiled ahead, they run within jit too, where `init` may be called; of what they return only NumPy sees values.
    begin_now, both_now = (jax.jit(f).lower(*args).compile(compiler_options=_QUICK) for f, args in programs)
    worst = 0.0
    for scale in map(np.float32, _SCALES):
        carries, calls, moved = begin_now(), 0, 0
        while calls < _CALLS and moved < _UPDATES:
            (one, first), (other, second) = both_now(carries, scale)
            carries, calls = [first, second], calls + 1
            moved += any(map(np.any, one))
            for a, b in zip(map(np.asarray, one), map(np.asarray, other), strict=True):
                gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
                worst = float(np.maximum(worst, np.max(gap) / max(np.nanmax(np.abs([a, b])), 1e-30)))
    return worst
