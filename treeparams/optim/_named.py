"""A list of leaves that notices who asks for their names."""

import inspect
from collections.abc import Iterable
from typing import Any

import jax.tree_util as jtu


class Asked:
    """Whether anybody has asked for names."""

    names = False


class Named(list[Any]):
    """A list of leaves that notices if their names are asked for, as by `jax.tree_util.tree_map_with_path`.

    Which names decide cannot be known, so it is no use to try some. But whoever sees names has them from the function
    that is registered here.
    """

    def __init__(self, leaves: Iterable[Any], asked: Asked) -> None:
        super().__init__(leaves)
        self.asked = asked


def _with_keys(tree: Named) -> tuple[list[tuple[Any, Any]], Asked]:
    tree.asked.names |= _is_asked_by_a_rule()
    return [(jtu.SequenceKey(i), leaf) for i, leaf in enumerate(tree)], tree.asked


jtu.register_pytree_with_keys(
    Named, _with_keys, lambda asked, leaves: Named(leaves, asked), lambda tree: (tuple(tree), tree.asked)
)


def _is_asked_by_a_rule() -> bool:
    """Whether other code asks than JAX and this library, for messages, and Optax, for fields of states."""
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


_BETWEEN = frozenset({"functools", "jaxtyping", "beartype"})  # they call what others call
