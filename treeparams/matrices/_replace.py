"""Nodes of one class replaced by arrays, each once however often it stands in the model."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._structure import same_treedef


def replace(model: PyTree, cls: Any, dense: Callable[[Any], Array]) -> PyTree:
    """The model with every node of a class replaced by what `dense` makes of it.

    Nodes that are made of the very same arrays in the very same way, as those of a tie are, become one array.
    """
    found: dict[tuple[int, ...], list[tuple[Any, Array]]] = {}

    def visit(node: Any) -> Any:
        if not isinstance(node, cls):
            return node
        leaves, treedef = jtu.tree_flatten(node)
        same_leaves = found.setdefault(tuple(map(id, leaves)), [])
        for known, array in same_leaves:
            if same_treedef(known, treedef):
                return array
        same_leaves.append((treedef, dense(node)))
        return same_leaves[-1][1]

    return jtu.tree_map(visit, model, is_leaf=lambda node: isinstance(node, cls))
