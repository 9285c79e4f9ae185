"""Nodes of one class replaced by what they stand for, each once however often it stands in the model."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._structure import same_treedef


def replace(model: PyTree, cls: Any, dense: Callable[[Any], Any]) -> PyTree:
    """The model with every node of a class, or of one in a tuple, replaced by what `dense` makes of it.

    Nodes within such nodes come first: `dense` gets a node in which they are replaced. Nodes that are made of the very
    same arrays in the very same way, as those of a tie are, become one object.
    """
    found: dict[tuple[int, ...], list[tuple[Any, Any]]] = {}

    def visit(node: Any) -> Any:
        if not isinstance(node, cls):
            return node
        leaves, treedef = jtu.tree_flatten(node)
        same_leaves = found.setdefault(tuple(map(id, leaves)), [])
        for known, replaced in same_leaves:
            if same_treedef(known, treedef):
                return replaced
        below = jtu.tree_map(visit, node, is_leaf=lambda each: each is not node and isinstance(each, cls))
        same_leaves.append((treedef, dense(below)))
        return same_leaves[-1][1]

    return jtu.tree_map(visit, model, is_leaf=lambda node: isinstance(node, cls))
