"""A list of leaves that notices who asks for their names."""

import sys
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu


class Asked:
    """Whether anybody has asked for names."""

    names = False


class Named:
    """Leaves with names: those who ask for these, a rule that goes by names among them, leave a note.

    Which names decide cannot be known, so it is no use to try some. But whoever sees names, by
    `jax.tree_util.tree_map_with_path` or otherwise, has them from a function that is registered here.
    """

    def __init__(self, leaves: Sequence[Any], asked: Asked) -> None:
        self.leaves, self.asked = leaves, asked


def _with_keys(tree: Named) -> tuple[list[tuple[Any, Any]], Asked]:
    tree.asked.names |= _is_asked_by_a_rule()
    return [(jtu.SequenceKey(i), leaf) for i, leaf in enumerate(tree.leaves)], tree.asked


jtu.register_pytree_with_keys(
    Named,
    _with_keys,
    lambda asked, leaves: Named([*leaves], asked),
    lambda tree: (tree.leaves, tree.asked),
)


def _is_asked_by_a_rule() -> bool:
    """Whether other code asks than JAX and this library (for messages), and Optax (which looks for fields of states)."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        package, *modules = str(frame.f_globals.get("__name__", "")).split(".")
        is_between = package in _BETWEEN or (package == "jax" and modules[-1:] in (["tree_util"], ["tree"]))
        if not is_between and (package != "treeparams" or modules[:1] == ["optim"]):
            return package not in ("jax", "optax", "treeparams")
        frame = frame.f_back
    return False


_BETWEEN = frozenset({"functools", "jaxtyping", "beartype"})  # they call what others call
