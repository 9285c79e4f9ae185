"""Finds out whether a rule couples leaves, by reading its programs.

A rule may run over each row of a stack separately only if it does the same to a leaf whatever the other leaves are.
Trying it on numbers does not show this: `optax.apply_if_finite`, `optax.contrib.prodigy`, D-Adaptation and
`optax.contrib.mechanize` give the same results leaf by leaf as over all leaves, to 1e-7, until a NaN comes or an
estimate has grown - and they do couple.

So each leaf gets a mark, a bit of an integer, and `coupling` carries the marks through the programs of `init` and
`update`. The state of one update is an input of the next, so its marks are carried round until no more are added. A
rule couples if the update of a leaf has the mark of another leaf, or an array of the state has two marks. The only
error is to refuse too much: a rule that joins leaves into one array and divides it again (`optax.flatten`) is refused,
whatever it does in between. Facts that Python reads from the tree, such as the number of leaves, leave no mark.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.extend.core import JaxprEqn, Primitive

from .._programs import Kind, Marks, kind_of
from .._tree.types import PyTree

# An operation that is known to do the same to leaves as to the array that they are joined to.
alike_p = Primitive("alike")
alike_p.def_abstract_eval(lambda array, *_, **__: array)

Extended = optax.GradientTransformationExtraArgs
"""A rule of Optax, as `extended` returns it."""


def coupling(
    tx: optax.GradientTransformation, rows: Sequence[jax.ShapeDtypeStruct], extra: dict[str, Any] | None
) -> str:
    """Describes how a rule couples leaves, on a tree with two leaves of each kind; the empty text if it does not.

    Without `extra`, `update` gets the arguments that rules of Optax ask for.
    """
    leaves = [row for row in rows for _ in range(2)]

    def step(grads: PyTree, state: PyTree, params: PyTree, value: jax.Array) -> tuple[PyTree, PyTree]:
        known = {"value": value, "grad": grads, "value_fn": _loss}
        return tx.update(grads, state, params, **(known if extra is None else extra))

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


def _loss(params: PyTree, *_: Any, **__: Any) -> Any:
    return sum(jnp.sum(jnp.abs(leaf)) for leaf in jtu.tree_leaves(params))


class _Drawing(Marks):
    """Carries marks, and notes whether random numbers are drawn."""

    draws = False

    def operation(self, eqn: JaxprEqn, its: list[int]) -> Sequence[int]:
        self.draws |= Kind.DRAWS in kind_of(eqn)
        return super().operation(eqn, its)


# -- A rule over rows, inside one that is read as a whole --------------------------------------------------------------


class Compared:
    """A node around a leaf, or around the stack of several, that is shown to a rule to compare the two.

    Its key is that of the leaf, so a rule that reads the last key of a path reads this.
    """

    def __init__(self, leaf: Any, key: Any = None) -> None:
        self.leaf = leaf
        self.key = jtu.GetAttrKey("leaf") if key is None else key


jtu.register_pytree_with_keys(
    Compared,
    lambda node: ([(node.key, node.leaf)], node.key),
    lambda key, leaves: Compared(next(iter(leaves)), key),
    lambda node: ([node.leaf], node.key),
)


def compared(treedef: Any, keys: Sequence[Any], leaves: Sequence[Any]) -> PyTree:
    """Returns a tree with a node around each leaf."""
    return jtu.tree_unflatten(
        treedef, [Compared(leaf, path[-1] if path else None) for path, leaf in zip(keys, leaves, strict=True)]
    )


def is_compared(tree: PyTree) -> bool:
    """Returns whether there are such nodes in a tree."""
    return any(map(_is_node, jtu.tree_leaves(tree, is_leaf=_is_node)))


def without_nodes(tree: PyTree) -> PyTree:
    """Returns a tree with the leaves in place of such nodes."""
    return jax.tree.map(lambda node: node.leaf if _is_node(node) else node, tree, is_leaf=_is_node)


def _is_node(node: object) -> bool:
    return isinstance(node, Compared)


_ANY_ROW = jax.ShapeDtypeStruct((2, 3), np.float32)


def as_one_operation(rule: Extended, updates: PyTree, params: PyTree | None, extra: dict[str, Any]) -> PyTree:
    """Returns the updates of a rule over rows as a single operation.

    The rule's program identifies the operation. Values that the rule closes over, such as a rate that was made outside
    of it, are operands.
    """

    def step(row: jax.Array) -> Any:
        own = {name: row if name == "grad" else value for name, value in extra.items()}
        return rule.update(row, rule.init(row), row, **own)

    try:
        program = jax.make_jaxpr(step)(_ANY_ROW)
    except Exception:  # `init`, or the first `update`, says why
        name, closed = "", []
    else:
        name = str(program.jaxpr)
        closed = [jnp.sum(const) for const in program.consts if jnp.issubdtype(const.dtype, jnp.number)]
    values = [] if params is None else [params]
    return jax.tree.map(lambda *own: alike_p.bind(*own, *closed, program=name), updates, *values)
