"""PyTree and TreeDef, for type checkers and for the checks at run time."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    PyTree: TypeAlias = Any  # jaxtyping's own is unknown to pyright, and so is, then, all that is called with it
    TreeDef: TypeAlias = Any  # to pyright JAX's is a variable
else:
    from jax.tree_util import PyTreeDef as TreeDef  # noqa: F401
    from jaxtyping import PyTree as PyTree
