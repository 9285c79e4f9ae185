"""per_leaf: runs an optimiser over each row of stacks separately, all rows of one at once."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.extend.core import JaxprEqn, Primitive

from .._forms.form import Form
from .._forms.mesh import is_sharded, laid_as, split
from .._programs import Kind, Marks
from .._tree.text import count_of, describe, in_short
from .._tree.types import PyTree
from ._groups import GroupsState, is_compared
from ._state import ONE, Extended, ModelTransformation, Plain, TrainableState, extended, nodes_of, settled, steady
from ._updates import ScaledState, is_nothing


@dataclasses.dataclass(frozen=True)
class PerLeafState:
    """The state of `optim.per_leaf`, a pytree.

    Attributes:
        states: a tree like the parameters, with a state of `tx` at each stack. All arrays in it have a leading axis
            over the rows, including counts and hyperparameters.
        is_checked: whether `tx` is known to treat each leaf separately; static.
    """

    states: Any
    is_checked: bool = False


PerLeafState.__module__ = "treeparams.types"
jtu.register_dataclass(PerLeafState, ["states"], ["is_checked"])


def per_leaf(tx: Plain, *, at_once: SupportsIndex | None = None) -> optax.GradientTransformationExtraArgs:
    """Runs an optimiser over each row of stacks separately, with all rows of a stack in one operation.

    >>> import jax.numpy as jnp, optax, treeparams as tp
    >>> from treeparams import optim
    >>> layers = [{"w": jnp.ones((2, 3)), "b": jnp.ones(3)} for _ in range(4)]
    >>> stacks, restructure = tp.stack(layers)
    >>> tx = optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(optax.adafactor(0.1)))
    >>> state = tx.init(stacks)
    >>> updates, state = tx.update(stacks, state, stacks)  # of 4 matrices and 4 vectors
    >>> updates["float32[2,3]"].shape, state[1].states["float32[3]"][0].count
    ((4, 2, 3), Array([1, 1, 1, 1], dtype=int32))

    It is plain Optax over **stacks**, as `tp.stack` makes them: the leading axis of each array is the axis of rows, and
    each row is a leaf for `tx`, through `jax.vmap`. So optimisers that look at a leaf's axes or norm (Muon, Adafactor,
    LAMB) are right on stacks and compile as one program for each shape. Element-wise optimisers (`optax.adam`) do not
    need it. Over the leaves of a model Optax is right without it: there the leading axis of a weight would be taken for
    rows, and `form="tree"` and `form="vector"` of `optim.trainable` refuse it.

    A hyperparameter inside (`optax.inject_hyperparams`) is kept for each row, and `optim.adjust` sets it for all.

    `tx` sees one bare array without a name, so a mask by path selects nothing in it. Put `optim.groups` around it, and
    write masks and labels inside it as functions, `mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)`.
    **You get a `ValueError` if `tx` couples leaves** - norms of the whole gradient, `optax.apply_if_finite`, L-BFGS,
    Prodigy - or draws random numbers, which would be the same for all rows. Put these around it, in a chain as above.
    `init` finds coupling in the programs of `tx`, once for each kind of leaf, in 5 to 200 ms. Put `optax.MultiSteps`
    around it, too: inside, each row decides separately, so each call computes the step.

    **`None` is not zero**, and neither is `optax.MaskedNode`: a leaf without a gradient gets no update, and its state
    waits, including its count. All rows of a stack move together.

    Args:
        tx: any Optax transformation that treats each leaf separately.
        at_once: how many rows of a stack run together (`jax.lax.map`), which bounds the memory for intermediate
            results; `None` is all. An optimiser that works only in some steps, by `jax.lax.cond` (Shampoo, SOAP), works
            in every step under `jax.vmap`; `at_once=1` does without `jax.vmap`. On a CPU a small number is faster for
            optimisers that consist mostly of matrix products: Muon over 1000 matrices of 64x64 takes half the time with
            `at_once=1`.

    Returns:
        A transformation with a `PerLeafState`. It passes extra arguments of `update` to every row unchanged.

    Raises:
        ValueError: `at_once` is not positive; `init`, or the first `update` if `tx` needs extra arguments: `tx` couples
            leaves, draws random numbers, contains `optim.groups` or a transformation over models, or fails on one
            array; an array has no axis of rows; `update`: the gradients do not fit the state.
        TypeError: `tx` is not a transformation.
    """
    if isinstance(tx, ModelTransformation):
        raise ValueError(ONE)
    each = _Each(extended(tx), None if at_once is None else count_of("at_once", at_once, "rows"))
    return optax.GradientTransformationExtraArgs(each.init, each.update)


@dataclasses.dataclass(eq=False)
class _Each:
    """A rule over each row of stacks."""

    rule: Extended
    at_once: int | None
    # Rows, with the names of extra arguments, that the rule is known to treat one by one.
    known: set[Any] = dataclasses.field(default_factory=set)

    def init(self, params: PyTree) -> Any:
        """Returns the states of the rows of each stack."""
        if is_compared(params):
            return PerLeafState(())
        leaves, treedef = jtu.tree_flatten(params)
        is_checked = _check(self.rule, self.known, list(map(_row, leaves)))
        states = [_start_rows(self.rule, leaf) for leaf in leaves]
        return PerLeafState(treedef.unflatten(list(map(settled, states))), is_checked)

    def update(self, updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        """Returns the update of each row, and its next state."""
        if not isinstance(state, PerLeafState):
            raise TypeError(f"expected the state that init or the last update returned, got {describe(state)}")
        leaves, treedef = jtu.tree_flatten(updates, is_leaf=is_nothing)
        if is_compared(updates):
            return _as_one_operation(self.rule, updates, params, extra), state
        states = treedef.flatten_up_to(state.states)
        values = [None] * len(leaves) if params is None else treedef.flatten_up_to(params)
        here = [i for i, gradient in enumerate(leaves) if not is_nothing(gradient)]
        if extra or not state.is_checked:  # else `init` has checked it, even if the rule is made anew for each update
            _check(self.rule, self.known, [_row(leaves[i]) for i in here], extra)
        run = lambda gradient, state, value: self.rule.update(gradient, state, value, **extra)
        for i in here:
            leaves[i], after = self._run(run, leaves[i], states[i], values[i])
            states[i] = steady(after, states[i])
        return treedef.unflatten(leaves), dataclasses.replace(state, states=treedef.unflatten(states))

    def _run(self, f: Callable[..., Any], *args: Any) -> Any:
        """Applies a function to each row."""
        limit, count = self.at_once, len(args[0])
        if limit is None or limit >= count:
            return jax.vmap(f)(*args)
        # One at a time needs no `vmap`, under which a `cond` of the rule would compute both of its branches.
        if limit == 1 or count % limit:
            return jax.lax.map(lambda row: f(*row), args, batch_size=limit if limit > 1 else None)
        # Rows that run together are far apart: where devices have as many equal parts of the rows, each runs one.
        apart = jax.tree.map(lambda rows: rows.reshape(limit, -1, *rows.shape[1:]), args)
        at = lambda i: jax.tree.map(lambda rows: jax.lax.dynamic_index_in_dim(rows, i, 1, keepdims=False), apart)
        found = jax.lax.map(lambda i: jax.vmap(f)(*at(i)), jnp.arange(count // limit))
        return jax.tree.map(lambda rows: jnp.swapaxes(rows, 0, 1).reshape(count, *rows.shape[2:]), found)


_KINDS = 6  # of rows; each takes about 10 ms


def _row(stack: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype that the rule sees of a stack."""
    if not jnp.ndim(stack):
        raise ValueError(f"optim.per_leaf takes the leading axis for rows, as of tp.stack, and got {describe(stack)}")
    return jax.ShapeDtypeStruct(jnp.shape(stack)[1:], jnp.result_type(stack))


def check_rows(state: PyTree, form: Form) -> None:
    """Refuses a rule over rows in a form that has none."""
    if nodes_of(PerLeafState, state) and not form.is_stacks:
        raise ValueError("optim.per_leaf is for rows of stacks: write trainable(tx, form='stacks'), or leave it out")


def _start_rows(rule: Extended, stack: Any) -> PyTree:
    """Returns the state of all rows, sharded as they are.

    `jax.vmap` replicates arrays that start alike for all rows.
    """
    state = jax.vmap(rule.init)(stack)
    if not is_sharded(stack) and split(stack) is None:
        return state
    rows = jnp.sum(stack, range(1, stack.ndim))
    return jax.tree.map(lambda leaf: laid_as(leaf, stack if leaf.shape == stack.shape else rows), state)


def _check(rule: Extended, known: set[Any], each: Iterable[Any], extra: dict[str, Any] | None = None) -> bool:
    """Checks that a rule treats such rows one by one, unless that is known already.

    Returns:
        Whether it could be checked: not if the rule needs extra arguments, and there are none.
    """
    kinds = {(row.shape, row.dtype) for row in each}
    by_size = sorted(kinds, key=lambda kind: (math.prod(kind[0]), kind[0], str(kind[1])))
    # Of many, the largest of each rank: rules treat matrices and vectors, or large and small axes, in different ways.
    several = by_size if len(by_size) <= _KINDS else {len(shape): (shape, dtype) for shape, dtype in by_size}.values()
    rows = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in several]
    seen = {(row, frozenset(extra or ())) for row in rows}
    if known.issuperset(seen):
        return True
    try:
        states = [jax.eval_shape(rule.init, row) for row in rows]
    except Exception as error:
        raise ValueError(
            f"{_ALONE} init fails there ({in_short(error)}). If it has masks or labels, give them as functions, "
            "mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params), since a tree does not fit one array"
        ) from error
    for kind, words in _BY_PATH.items():
        if nodes_of(kind, states):
            raise ValueError(words)
    try:
        reason = coupling(rule, rows, extra)
    except Exception as error:
        if extra is None:  # it may take other arguments: the first update tells
            return False
        raise ValueError(
            f"{_ALONE} update fails there ({in_short(error)}). Rows get no gradients or functions of the model; "
            "pass a number by tx.update(grads, state, params, value=loss)"
        ) from error
    if reason:
        raise ValueError(
            f"optim.per_leaf needs an optimiser that treats each leaf separately, but {reason}; put it around, "
            "optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(...))"
        )
    known.update(seen)
    return True


_ALONE = "optim.per_leaf runs the transformation on each array separately, and its"
_BY_PATH = {
    TrainableState: ONE,
    GroupsState: "optim.groups selects by path, and inside optim.per_leaf no leaf has one; write "
    "optim.groups({'layers.0': optim.per_leaf(...)}, default=...)",
    ScaledState: "optim.scaled selects by path, and inside optim.per_leaf no leaf has one; write "
    "optax.chain(optim.per_leaf(...), optim.scaled(...))",
}


# -- Whether a rule couples leaves -------------------------------------------------------------------------------------

# A rule may run over each row of a stack separately only if it does the same to a leaf whatever the other leaves are.
# Trying it on numbers does not show this: `optax.apply_if_finite`, `optax.contrib.prodigy`, D-Adaptation and
# `optax.contrib.mechanize` give the same results leaf by leaf as over all leaves, to 1e-7, until a NaN comes or an
# estimate has grown - and they do couple.
#
# So each leaf gets a mark, a bit of an integer, and `coupling` carries the marks through the programs of `init` and
# `update`. The state of one update is an input of the next, so its marks are carried round until no more are added. A
# rule couples if the update of a leaf has the mark of another leaf, or an array of the state has two marks. The only
# error is to refuse too much: a rule that joins leaves into one array and divides it again (`optax.flatten`) is
# refused, whatever it does in between. What Python reads from the tree, such as its length, leaves no mark.


def coupling(tx: Extended, rows: Sequence[jax.ShapeDtypeStruct], extra: Mapping[str, Any] | None) -> str:
    """Describes how a rule couples leaves, on a tree with two leaves of each kind; the empty text if it does not."""
    leaves = [row for row in rows for _ in range(2)]

    def step(grads: PyTree, state: PyTree, params: PyTree, value: Any) -> tuple[PyTree, PyTree]:
        return tx.update(grads, state, params, **(usual_arguments(grads, value) if extra is None else extra))

    init, state = jax.make_jaxpr(tx.init, return_shape=True)(leaves)
    update, (updates, _) = jax.make_jaxpr(step, return_shape=True)(leaves, state, leaves, np.float32(0))
    own = [1 << i for i in range(2 * len(rows))]
    slots, places = (jtu.tree_flatten_with_path(tree)[0] for tree in (updates, state))
    walk = _Drawing()
    kept, before, ends = walk.run(init, own), None, list[int]()
    while kept != before:
        before, ends = kept, walk.run(update, [*own, *kept, *own, 0])
        kept = [old | new for old, new in zip(kept, ends[len(slots) :], strict=True)]
    if walk.draws:
        return "it draws random numbers, which would be the same for all leaves of one shape"
    found = []
    if any(marks & ~own[path[0].idx] for (path, _), marks in zip(slots, ends, strict=False)):
        found.append("the update of one leaf depends on another")
    shared = next((path for (path, _), marks in zip(places, kept, strict=True) if marks.bit_count() > 1), None)
    if shared is not None:
        name = "state" if type(state) is tuple else type(state).__name__
        found.append(f"{name}{jtu.keystr(shared)} depends on more than one leaf")
    return ", and ".join(found)


def usual_arguments(grads: PyTree, value: Any) -> dict[str, Any]:
    """Returns the extra arguments that rules of Optax ask for."""
    return {"value": value, "grad": grads, "value_fn": _loss}


def _loss(params: PyTree, *_: Any, **__: Any) -> Any:
    """Returns the sum of squares."""
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jtu.tree_leaves(params))


class _Drawing(Marks):
    """Carries marks, and notes whether random numbers are drawn."""

    draws = False

    def operation(self, eqn: JaxprEqn, its: list[int]) -> Sequence[int]:
        self.draws |= Kind.DRAWS in Kind.of(eqn)
        return super().operation(eqn, its)


# -- A rule over rows, inside one that is read as a whole --------------------------------------------------------------

# An operation that is known to do the same to leaves as to the array that they are joined to.
alike_p = Primitive("alike")
alike_p.def_abstract_eval(lambda array, *_, **__: array)


def _as_one_operation(rule: Extended, updates: PyTree, params: PyTree | None, extra: dict[str, Any]) -> PyTree:
    """Returns the updates of a rule over rows as a single operation.

    The rule's program identifies the operation. Values that the rule closes over, such as a rate that was made outside
    of it, are operands.
    """

    def step(row: jax.Array) -> Any:
        own = {name: row if name == "grad" else value for name, value in extra.items()}
        return rule.update(row, rule.init(row), row, **own)

    try:
        program = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((2, 3), np.float32))  # any row
    except Exception:  # `init`, or the first `update`, says why
        name, closed = "", []
    else:
        name = str(program.jaxpr)
        closed = [jnp.sum(const) for const in program.consts if jnp.issubdtype(const.dtype, jnp.number)]
    values = [] if params is None else [params]
    return jax.tree.map(lambda *own: alike_p.bind(*own, *closed, program=name), updates, *values)
