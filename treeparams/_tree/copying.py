"""copy: a tree with every array in a new buffer."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .structure import flatten, naming_deleted
from .types import is_ref, value_of

M = TypeVar("M")


def copy(tree: M) -> M:
    """Copies every array of a tree into a new buffer; ties are kept.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> online = {"w": jnp.ones(2)}
    >>> target = tp.copy(online)
    >>> target["w"] is online["w"], bool((target["w"] == online["w"]).all())
    (False, True)

    If you made the target network by assignment, it would share its arrays with the online network, and a step that
    donates the online network would delete them.

    Args:
        tree: any pytree.

    Returns:
        A tree of the same structure. An array at several paths is copied once; a ref (`jax.new_ref`) becomes a new ref;
        leaves that are not arrays are unchanged.
    """
    leaves, treedef = flatten(tree)
    copies: dict[int, Any] = {}
    with naming_deleted(tree):
        for leaf in leaves:
            if id(leaf) not in copies:
                copies[id(leaf)] = copy_leaf(leaf)
    return jtu.tree_unflatten(treedef, [copies[id(leaf)] for leaf in leaves])


def copy_leaf(leaf: Any) -> Any:
    """Returns a copy of an array; any other value unchanged."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if is_ref(leaf):
        return jax.new_ref(value_of(leaf))
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
