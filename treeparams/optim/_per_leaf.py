"""per_leaf: runs an optimiser over each row of stacks separately, all rows of one at once."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from .._forms.form import Form
from .._forms.mesh import is_sharded, laid_as, split
from .._tree.text import count_of, describe, in_short
from .._tree.types import PyTree
from ._coupling import Extended, as_one_operation, coupling, is_compared
from ._groups import GroupsState
from ._scaled import ScaledState
from ._state import ONE, ModelTransformation, Plain, TrainableState, extended, nodes_of, settled, steady


@dataclasses.dataclass(frozen=True)
class PerLeafState:
    """The state of `optim.per_leaf`, a pytree.

    Attributes:
        states: a tree like the parameters, with a state of `tx` at each stack. All arrays in it have a leading axis
            over the rows, including counts and hyperparameters.
        spare: if there are no parameters, the state that one would have, so that `optim.adjust` finds the
            hyperparameters.
        is_checked: whether `tx` is known to treat each leaf separately; static.
    """

    states: Any
    spare: Any = None
    is_checked: bool = False


PerLeafState.__module__ = "treeparams.types"
jtu.register_dataclass(PerLeafState, ["states", "spare"], ["is_checked"])


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
    rows = _Rows(None if at_once is None else count_of("at_once", at_once, "rows"))
    each = _Each(extended(tx), rows)
    return optax.GradientTransformationExtraArgs(each.init, each.update)


class _Rows(NamedTuple):
    """The number of rows of a stack that run together; `None` is all."""

    limit: int | None

    def run(self, f: Callable[..., Any], *args: Any) -> Any:
        """Applies `f` to each row."""
        limit, count = self.limit, len(args[0])
        if limit is None or limit >= count:
            return jax.vmap(f)(*args)
        # One at a time needs no `vmap`, under which a `cond` of the rule would compute both of its branches.
        if limit == 1 or count % limit:
            return jax.lax.map(lambda row: f(*row), args, batch_size=limit if limit > 1 else None)
        # Rows that run together are far apart: where devices have as many equal parts of the rows, each runs one.
        apart = jax.tree.map(lambda rows: rows.reshape(limit, -1, *rows.shape[1:]), args)
        found = jax.lax.map(lambda i: jax.vmap(f)(*_at(apart, i)), jnp.arange(count // limit))
        return jax.tree.map(lambda rows: jnp.swapaxes(rows, 0, 1).reshape(-1, *rows.shape[2:]), found)


def _at(apart: PyTree, i: jax.Array) -> PyTree:
    return jax.tree.map(lambda rows: jax.lax.dynamic_index_in_dim(rows, i, 1, keepdims=False), apart)


class _Each:
    """A rule over each row of stacks."""

    def __init__(self, rule: Extended, rows: _Rows) -> None:
        self.rule = rule
        self.rows = rows
        self.known = set[Any]()  # rows, with the names of extra arguments, that the rule is known to treat one by one

    def init(self, params: PyTree) -> Any:
        """Returns the states of the rows of each stack."""
        if is_compared(params):
            return PerLeafState(())
        leaves, treedef = jtu.tree_flatten(params)
        is_checked = _check(self.rule, self.known, list(map(_row, leaves)))
        states = [_start_rows(self.rule, leaf) for leaf in leaves]
        spare = None if leaves else settled(self.rule.init(jnp.zeros(())))
        return PerLeafState(treedef.unflatten(list(map(settled, states))), spare, is_checked)

    def update(self, updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        """Returns the update of each row, and its next state."""
        if not isinstance(state, PerLeafState):
            raise TypeError(f"expected the state that init or the last update returned, got {describe(state)}")
        leaves, treedef = jtu.tree_flatten(updates, is_leaf=_is_nothing)
        if is_compared(updates):
            return as_one_operation(self.rule, updates, params, extra), state
        states = _like(treedef, state.states)
        values = [None] * len(leaves) if params is None else _like(treedef, params)
        here = [i for i, gradient in enumerate(leaves) if not _is_nothing(gradient)]
        if extra or not state.is_checked:  # else `init` has checked it, even if the rule is made anew for each update
            _check(self.rule, self.known, [_row(leaves[i]) for i in here], extra)
        run = functools.partial(self._step, extra)
        for i in here:
            self._check_state(updates, i, leaves[i], states[i])
            leaves[i], after = self.rows.run(run, leaves[i], states[i], values[i])
            states[i] = steady(after, states[i])
        return treedef.unflatten(leaves), dataclasses.replace(state, states=treedef.unflatten(states))

    def _step(self, extra: dict[str, Any], gradient: Any, state: Any, value: Any) -> Any:
        return self.rule.update(gradient, state, value, **extra)

    def _check_state(self, updates: PyTree, i: int, gradient: Any, state: Any) -> None:
        """Refuses a gradient at a stack that `init` did not have, or had with another number of rows."""
        counts = {jnp.shape(each)[0] for each in jax.tree.leaves(state)} - {len(gradient)}
        problem = f" with {len(gradient)} rows, but init had {max(counts)}" if counts else ""
        if _is_nothing(state) and not _is_nothing(jax.eval_shape(self.rule.init, gradient)):
            problem = ", but init had no parameter there; give None"
        if problem:
            path = jtu.keystr(jtu.tree_flatten_with_path(updates, is_leaf=_is_nothing)[0][i][0])
            raise ValueError(f"got a gradient for {path}{problem}")


_KINDS = 6  # of rows; each takes about 10 ms


def _is_nothing(node: Any) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _row(stack: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype that the rule sees of a stack."""
    if not jnp.ndim(stack):
        raise ValueError(
            f"optim.per_leaf takes the leading axis of each array for rows, and got {describe(stack)}; it is for the "
            "stacks of tp.stack, or of optim.trainable(tx, form='stacks')"
        )
    return jax.ShapeDtypeStruct(jnp.shape(stack)[1:], jnp.result_type(stack))


def check_rows(state: PyTree, form: Form) -> None:
    """Refuses a rule over rows in a form that has none."""
    if nodes_of(PerLeafState, state) and not form.is_stacks:
        raise ValueError(
            "optim.per_leaf takes the leading axis of each array for rows of stacks, which this form does not have: "
            "write optim.trainable(tx, form='stacks'), or leave optim.per_leaf out, since a leaf of a tree is seen by "
            "itself"
        )


def _start_rows(rule: Extended, stack: Any) -> PyTree:
    """Returns the state of all rows, sharded as they are.

    `jax.vmap` replicates arrays that start alike for all rows.
    """
    state = jax.vmap(rule.init)(stack)
    if not is_sharded(stack) and split(stack) is None:
        return state
    rows = jnp.sum(stack, range(1, stack.ndim))
    return jax.tree.map(lambda leaf: laid_as(leaf, stack if leaf.shape == stack.shape else rows), state)


def _like(treedef: Any, tree: PyTree) -> list[Any]:
    """Returns the subtrees of a tree at the leaves of another one."""
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        reason = str(error).splitlines()[0][:120]  # JAX goes on with all values
        raise ValueError(
            f"the gradients have another structure than the state or the parameters ({reason} ...); give a tree like "
            "the parameters, with None where there is no gradient"
        ) from error


def _check(
    rule: Extended, known: set[Any], each: Iterable[jax.ShapeDtypeStruct], extra: dict[str, Any] | None = None
) -> bool:
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
    for row in rows:
        _check_alone(rule, row)
    try:
        reason = coupling(rule, rows, extra)
    except Exception as error:
        if extra is None:  # it may take other arguments: the first update tells
            return False
        raise ValueError(
            f"{_fails('update', error)}. Each row gets extra arguments unchanged, so optimisers inside optim.per_leaf "
            "cannot use trees of gradients or functions of the model; pass a number by "
            "tx.update(grads, state, params, value=loss)"
        ) from error
    if reason:
        raise ValueError(
            f"optim.per_leaf needs an optimiser that treats each leaf separately, but {reason}. Put transformations "
            "of all leaves around it: optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(...))"
        )
    known.update(seen)
    return True


def _check_alone(rule: Extended, row: jax.ShapeDtypeStruct) -> None:
    """Checks that a rule can start with one array, and contains nothing that uses the paths of a model."""
    try:
        state = jax.eval_shape(rule.init, row)
    except Exception as error:
        raise ValueError(
            f"{_fails('init', error)}. If it has masks or labels, give them as functions, "
            "mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params), since a tree does not fit one array"
        ) from error
    for kind, words in _BY_PATH.items():
        if nodes_of(kind, state):
            raise ValueError(words)


_BY_PATH = {
    TrainableState: ONE,
    GroupsState: "optim.groups selects by path, and inside optim.per_leaf no leaf has one; write "
    "optim.groups({'layers.0': optim.per_leaf(...)}, default=...)",
    ScaledState: "optim.scaled selects by path, and inside optim.per_leaf no leaf has one; write "
    "optax.chain(optim.per_leaf(...), optim.scaled(...))",
}


def _fails(what: str, error: Exception) -> str:
    reason = in_short(error)
    return f"optim.per_leaf runs the transformation on each array separately, and its {what} fails there ({reason})"
