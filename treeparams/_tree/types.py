"""PyTree: what it is to type checkers, and to the checks at run time."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    PyTree: TypeAlias = Any  # jaxtyping's own is unknown to pyright, and so is, then, all that is called with it
else:
    from jaxtyping import PyTree as PyTree
