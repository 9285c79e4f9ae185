"""The base of all constrained arrays: a node that holds raw parameters and stands for a function of them.

The function is total, so that nothing has to be projected or clipped after a step. A node is no array itself: with a
`__jax_array__` that gives one, each use would compute it anew, in a loop at each turn, and `jax.lax` would refuse it.
"""

import abc
import sys
from typing import Any

import equinox as eqx
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Inexact

from .._tree.types import PyTree
from ._nodes import NotAnArray, refused, replace


class AbstractConstrained(NotAnArray, eqx.Module):
    """An array that stays on a set; subclasses say on which, by a function of `raw` with values on it alone.

    >>> import jax.numpy as jnp
    >>> from treeparams import matrices
    >>> class Increasing(matrices.AbstractConstrained):
    ...     raw: jnp.ndarray  # the first entry, then logarithms of the steps
    ...
    ...     def to_dense(self):
    ...         return jnp.cumsum(jnp.concatenate([self.raw[:1], jnp.exp(self.raw[1:])]))
    >>> knots = Increasing(jnp.zeros(3))
    >>> knots
    Increasing(raw=f32[3])
    >>> matrices.materialise({"knots": knots})
    {'knots': Array([0., 1., 2.], dtype=float32)}

    To use it, `materialise` the model. Arithmetic with it, `@`, indexing, its `shape`, and functions of JAX and NumPy
    are errors that say so. The constructors of this module take the array itself: outside of a trace it is a
    `ValueError` if it is not on the set.
    """

    instead = "matrices.materialise(model)"

    raw: eqx.AbstractVar[Array]

    __array_ufunc__ = refused("NumPy")  # type: ignore[assignment]
    __jax_array__ = refused("JAX")

    @abc.abstractmethod
    def to_dense(self) -> Inexact[Array, "..."]:
        """The array it stands for, in the dtype of `raw`; a point of the set for any finite `raw`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name!r}: for that of an array take {self.instead} first")


def materialise(model: PyTree) -> PyTree:
    """The model with every constrained array replaced by the array it stands for, each computed once.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    >>> layer = eqx.tree_at(lambda layer: layer.weight, layer, matrices.Positive(jnp.ones((3, 2))))
    >>> def loss(layer, x):
    ...     layer = matrices.materialise(layer)  # here arrays
    ...     return jnp.sum(jax.vmap(layer)(x))
    >>> value, grads = tp.value_and_grad(loss)(layer, jnp.ones((4, 2)))
    >>> grads.weight  # of the raw parameters
    Positive(raw=f32[3,2])

    Call it once per step, at the top of the loss: a scan or a loop then uses arrays, and a tie is computed once.
    Outside of a loss `node.to_dense()` gives you the array of one node. Matrices stay matrices, made of arrays. Nodes
    of paramax are unwrapped, as by `paramax.unwrap`.

    Args:
        model: any pytree; one array will stand at all paths of a tie, that is, of nodes made of the very same arrays.
    """
    return replace(model, constrained_kinds(), _value_of)


def _value_of(node: Any) -> Any:
    return node.to_dense() if isinstance(node, AbstractConstrained) else node.unwrap()


def constrained_kinds() -> tuple[type, ...]:
    """The classes of constrained arrays: ours, and those of paramax, of which a model has none if it is not loaded."""
    paramax = sys.modules.get("paramax")
    return (AbstractConstrained, *([paramax.AbstractUnwrappable] if paramax else []))


def concrete(value: Array | np.ndarray) -> np.ndarray | None:
    """The entries in float64, to be checked; `None` for a traced array, whose entries are not known."""
    return None if isinstance(value, Tracer) else np.asarray(value).astype(np.float64)


def refuse(
    node: AbstractConstrained,
    entries: np.ndarray | np.floating,
    fine: np.ndarray | np.bool_,
    expected: str,
    instead: str,
) -> None:
    """An error for the first entry that is not fine, if there is one."""
    if np.all(fine):
        return
    index = tuple(map(int, np.argwhere(~np.asarray(fine))[0]))
    where = f" at index {list(index)}" if index else ""
    raise ValueError(
        f"{type(node).__name__} takes {expected}, got {np.asarray(entries)[index]:.8g}{where}. To make such ones, "
        f"write for example {instead}"
    )


AbstractConstrained.__module__ = "treeparams.matrices"
