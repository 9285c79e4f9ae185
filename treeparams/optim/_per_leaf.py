"""per_leaf: a rule over each leaf by itself, and over all rows of a stack at once."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from .._mesh import is_sharded, laid_as, split
from .._stacks import is_stack
from .._text import count_of, describe, in_short
from .._types import PyTree
from ._coupling import coupling, is_unread, unread
from ._groups import GroupsState
from ._shown import settled, steady
from ._state import ONE, ModelTransformation, Plain, TrainableState, extended, nodes_of


@dataclasses.dataclass(frozen=True)
class PerLeafState:
    """The state of `optim.per_leaf`, a pytree.

    Attributes:
        states: a tree like the parameters, with a state of the rule at each array. At a stack, all arrays in it have a
            leading axis over the rows, counts and hyperparameters too.
    """

    states: Any


PerLeafState.__module__ = "treeparams.optim"
jtu.register_dataclass(PerLeafState, ["states"], [])


def per_leaf(tx: Plain, *, at_once: SupportsIndex | None = None) -> optax.GradientTransformationExtraArgs:
    """A rule over each leaf by itself: over each row of a stack, all rows of one in one operation.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> stacks = {"float32[2,3]": jnp.ones((4, 2, 3)), "float32[3]": jnp.ones((5, 3))}
    >>> tx = optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(optax.adafactor(0.1)))
    >>> state = tx.init(stacks)
    >>> updates, state = tx.update(stacks, state, stacks)  # of 4 matrices and 5 vectors
    >>> updates["float32[2,3]"].shape, state[1].states["float32[3]"][0].count
    ((4, 2, 3), Array([1, 1, 1, 1, 1], dtype=int32))

    It is plain Optax, of any tree. **A stack** is an array in a dictionary under the key of its rows, as `tp.stack`
    makes it: `"float32[2,3]"` over shape `(k, 2, 3)`, in any floating dtype. Its rows are leaves to `tx`, through
    `jax.vmap`; any other array is one leaf. So rules that look at a leaf's axes or norm (Muon, Adafactor, LAMB) are
    right on stacks and compile as one program for each shape; what treats elements alike (`optax.adam`) needs none of
    this.

    `tx` sees one bare array, and no names: `optim.groups` stands around it, masks and labels within it are functions,
    `mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)`. **What couples leaves is refused** - norms of the
    whole gradient, `optax.apply_if_finite`, L-BFGS, Prodigy - and so is what draws random numbers, of which all rows
    would get the same, and what asks for paths. Put these around it, in a chain as above. Coupling is read from the
    programs of `tx`, once for each kind of leaf, in 5 to 200 ms. `optax.MultiSteps` belongs around it, too: within,
    each row decides for itself, so each call computes the step.

    **`None` is not zero**, nor is `optax.MaskedNode`: a leaf without a gradient gets no update, and its state, count
    included, waits. All rows of a stack move together.

    Args:
        tx: any Optax transformation that treats each leaf for itself.
        at_once: how many rows of a stack run together (`jax.lax.map`), which bounds the memory for what is computed
            between; `None` is all. A rule that does its work in some steps only, by `jax.lax.cond` (Shampoo, SOAP),
            does it in each under `jax.vmap`, of which `at_once=1` has none. On a CPU a few are faster for rules that
            are mostly products: Muon over 1000 matrices of 64x64 takes half the time with `at_once=1`.

    Returns:
        A transformation with a `PerLeafState`. Extra arguments of `update` go to every row as they are.

    Raises:
        ValueError: `at_once` is not positive; `init`, or the first `update` if `tx` needs extra arguments: `tx` couples
            leaves, draws random numbers, has `optim.groups` or a transformation over models in it, or fails on one
            array; `update`: the gradients do not fit the state.
        TypeError: `tx` is no transformation.
    """
    if isinstance(tx, ModelTransformation):
        raise ValueError(ONE)
    rule: Any = extended(tx)
    limit = None if at_once is None else count_of("at_once", at_once, "rows")
    known = set[Any]()  # rows, with the names of extra arguments, that `tx` treats one by one

    def over_rows(f: Callable[..., Any], *args: Any) -> Any:
        if limit is None or limit >= len(args[0]):
            return jax.vmap(f)(*args)
        # One at a time needs no `vmap`, under which a `cond` of the rule would compute both of its branches.
        if limit == 1 or len(args[0]) % limit:
            return jax.lax.map(lambda row: f(*row), args, batch_size=limit if limit > 1 else None)
        # Rows that run together are far apart: where devices have as many equal parts of the rows, each runs one.
        apart = jax.tree.map(lambda rows: rows.reshape(limit, -1, *rows.shape[1:]), args)
        pick = lambda i: jax.tree.map(lambda rows: jax.lax.dynamic_index_in_dim(rows, i, 1, keepdims=False), apart)
        found = jax.lax.map(lambda i: jax.vmap(f)(*pick(i)), jnp.arange(len(args[0]) // limit))
        return jax.tree.map(lambda rows: jnp.swapaxes(rows, 0, 1).reshape(-1, *rows.shape[2:]), found)

    def init(params: PyTree) -> Any:
        if is_unread.get():
            return PerLeafState(())
        _check(rule, known, jtu.tree_flatten_with_path(params)[0])
        start = lambda path, leaf: settled(_start_rows(rule, leaf) if is_stack(path, leaf) else rule.init(leaf))
        return PerLeafState(jtu.tree_map_with_path(start, params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        if not isinstance(state, PerLeafState):
            raise TypeError(f"expected the state that init or the last update returned, got {describe(state)}")
        leaves, treedef = jtu.tree_flatten_with_path(updates, is_leaf=_is_nothing)
        if is_unread.get():
            first = [
                jax.ShapeDtypeStruct(_row_shape(*pair), pair[1].dtype) for pair in leaves if not _is_nothing(pair[1])
            ]
            return unread(rule, first[0], updates, params, extra) if first else updates, state
        states, values = [*_like(treedef, state.states)], [None] * len(leaves)
        if params is not None:
            values = _like(treedef, params)
        _check(rule, known, [pair for pair in leaves if not _is_nothing(pair[1])], extra)
        run = lambda gradient, before, value: rule.update(gradient, before, value, **extra)
        steps = [leaf for _, leaf in leaves]
        for i, (path, gradient) in enumerate(leaves):
            if _is_nothing(gradient):
                continue
            if _is_nothing(states[i]) and not _is_nothing(jax.eval_shape(rule.init, gradient)):
                raise ValueError(f"a gradient for {jtu.keystr(path)}, for which init had no parameter; give None there")
            args = gradient, states[i], values[i]
            steps[i], after = over_rows(run, *args) if is_stack(path, gradient) else run(*args)
            states[i] = steady(after, states[i])
        return treedef.unflatten(steps), PerLeafState(treedef.unflatten(states))

    return optax.GradientTransformationExtraArgs(init, update)


_KINDS = 6  # of rows; each takes some 10 ms
_is_nothing: Callable[[Any], bool] = lambda node: node is None or isinstance(node, optax.MaskedNode)


def _row_shape(path: Sequence[Any], leaf: Any) -> tuple[int, ...]:
    shape = jnp.shape(leaf)
    return shape[1:] if is_stack(path, leaf) else shape


def _start_rows(rule: Any, stack: Any) -> PyTree:
    """The state of all rows, over the devices as they lie: `jax.vmap` leaves whole on each what starts alike."""
    state = jax.vmap(rule.init)(stack)
    if not is_sharded(stack) and split(stack) is None:
        return state
    rows = jnp.sum(stack, range(1, stack.ndim))
    return jax.tree.map(lambda leaf: laid_as(leaf, stack if leaf.shape == stack.shape else rows), state)


def _like(treedef: Any, tree: PyTree) -> list[Any]:
    """What a tree has at the leaves of another one."""
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        reason = str(error).splitlines()[0][:120]  # JAX goes on with all values
        raise ValueError(
            f"the gradients have another structure than the state or the parameters ({reason} ...); give a tree like "
            "the parameters, with None where there is no gradient"
        ) from error


def _check(rule: Any, known: set[Any], leaves: Iterable[tuple[Any, Any]], extra: dict[str, Any] | None = None) -> None:
    """Checks that a rule treats rows like those of these leaves one by one, which it does for those that are known."""
    kinds = {(_row_shape(path, leaf), jnp.result_type(leaf)) for path, leaf in leaves}
    by_size = sorted(kinds, key=lambda kind: (math.prod(kind[0]), kind[0], str(kind[1])))
    # Of many, the largest of each rank: rules treat matrices and vectors, or large and small axes, in different ways.
    several = by_size if len(by_size) <= _KINDS else {len(shape): (shape, dtype) for shape, dtype in by_size}.values()
    rows = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in several]
    seen = {(row, frozenset(extra or ())) for row in rows}
    if known.issuperset(seen):
        return
    for row in rows:
        _check_alone(rule, row)
    try:
        reason = coupling(rule, rows, extra)
    except Exception as error:
        if extra is None:  # it may take other arguments: the first update tells
            return
        raise ValueError(
            f"{_fails('update', error)}. Extra arguments go to each row as they are, so trees of gradients and "
            "functions of the model are not for rules within optim.per_leaf; a number is given by "
            "tx.update(grads, state, params, value=loss)"
        ) from error
    if reason:
        raise ValueError(
            f"optim.per_leaf is for rules that treat each leaf for itself, and of this one {reason}. Put what "
            "concerns all leaves around it: optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(...))"
        )
    known.update(seen)


def _check_alone(rule: Any, row: jax.ShapeDtypeStruct) -> None:
    """Checks that a rule can start with one array, and has nothing in it that goes by the paths of a model."""
    try:
        state = jax.eval_shape(rule.init, row)
    except Exception as error:
        raise ValueError(
            f"{_fails('init', error)}. If it has masks or labels, give them as functions, "
            "mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params), since a tree does not fit one array"
        ) from error
    if nodes_of(TrainableState, state):
        raise ValueError(ONE)
    if nodes_of(GroupsState, state):
        raise ValueError(
            "groups go by path, and within optim.per_leaf no leaf has one; write "
            "optim.groups({'layers.0': optim.per_leaf(...)}, default=...)"
        )


def _fails(what: str, error: Exception) -> str:
    reason = in_short(error)
    return f"optim.per_leaf runs the transformation on each array by itself, and its {what} fails there ({reason})"
