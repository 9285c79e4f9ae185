"""Trees that a rule sees while its programs are read: lists that notice if their names are asked for, and stacks.

By the type of a node, a rule over rows (`optim.per_leaf`) recognises that it is compared over leaves and over stacks of
them, and acts as a single operation.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import jax.tree_util as jtu

from .._forms.form import Stacks
from .._tree.types import PyTree


class Asked:
    """Records whether any code has asked for names."""

    names = False


class Named(list[Any]):
    """A list of leaves that notices if their names are asked for, as by `jax.tree_util.tree_map_with_path`.

    It is no use to try some names, since nobody knows which ones the rule looks for. But code that sees names gets them
    from the function that is registered here.
    """

    def __init__(self, leaves: Iterable[Any], asked: Asked) -> None:
        super().__init__(leaves)
        self.asked = asked


class Rows(Named):
    """Leaves that are compared with stacks of them."""


class RowsJoined(Stacks):
    """The stacks that such leaves are compared with."""


def is_compared(tree: PyTree) -> bool:
    """Returns whether a tree holds rows that are compared with stacks of them, or those stacks."""
    return any(map(_is_row_node, jtu.tree_leaves(tree, is_leaf=_is_row_node)))


def _is_row_node(node: Any) -> bool:
    return isinstance(node, (Rows, RowsJoined))


def _with_keys(tree: Named) -> tuple[list[tuple[Any, Any]], Asked]:
    tree.asked.names |= _is_asked_by_a_rule()
    return [(jtu.SequenceKey(i), leaf) for i, leaf in enumerate(tree)], tree.asked


def _stacks_with_keys(stacks: RowsJoined) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    keys = tuple(sorted(stacks))
    return [(jtu.DictKey(key), stacks[key]) for key in keys], keys


def _without_keys(tree: Named) -> tuple[tuple[Any, ...], Asked]:
    return tuple(tree), tree.asked


jtu.register_pytree_with_keys(Named, _with_keys, lambda asked, leaves: Named(leaves, asked), _without_keys)
jtu.register_pytree_with_keys(Rows, _with_keys, lambda asked, leaves: Rows(leaves, asked), _without_keys)
jtu.register_pytree_with_keys(
    RowsJoined, _stacks_with_keys, lambda keys, arrays: RowsJoined(zip(keys, arrays, strict=True))
)


def _is_asked_by_a_rule() -> bool:
    """Returns whether a rule asks, and not JAX or this library, for messages, or Optax, for fields of states."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        package, *modules = name.split(".")
        is_walk = package == "jax" and modules[-1:] in (["tree_util"], ["tree"])
        is_own = name == __name__ or (package == "treeparams" and modules[:1] != ["optim"])
        if not (is_walk or is_own or package in _BETWEEN):
            return package not in ("jax", "optax", "treeparams")
        frame = frame.f_back
    return False


_BETWEEN = frozenset({"functools", "jaxtyping", "beartype"})  # they only pass calls on
