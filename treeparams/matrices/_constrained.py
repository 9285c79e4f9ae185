"""What every constrained array of this module is: a node that holds raw parameters and stands for a function of them.

The function is total: whatever an optimiser, an average or noise makes of the raw parameters, the array they stand for
is on its set. Nothing has to be projected or clipped after a step, and all that this library does with arrays - train,
freeze, flatten, tie - it does with the raw ones.

Unlike a matrix of this module such a node is dense, so it has `__jax_array__` and can be used as the array it stands
for. Each use computes it anew; `materialise` computes each once.
"""

import abc
import operator
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, PyTree

from ._printing import pdoc
from ._replace import replace


def _unary(operation: Callable[..., Any]) -> Any:
    return lambda self: operation(self.to_dense())


def _left(operation: Callable[..., Any]) -> Any:
    return lambda self, other: operation(self.to_dense(), other)


def _right(operation: Callable[..., Any]) -> Any:
    return lambda self, other: operation(other, self.to_dense())


class AbstractConstrained(eqx.Module):
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
    Increasing(shape=(3,), raw=f32[3])
    >>> 2 * knots, jnp.exp(knots)[0], knots @ jnp.ones(3)
    (Array([0., 2., 4.], dtype=float32), Array(1., dtype=float32), Array(3., dtype=float32))

    It can be used as the array it stands for: in arithmetic, comparisons, `@`, indexing, functions of `jax.numpy`, and
    as the weight of a layer. Functions of `jax.lax`, and so convolutions, take arrays only: `materialise` the model.

    A `shape` other than that of `raw` is for the subclass to say, from the last axes, so that it holds for an ensemble
    made by `equinox.filter_vmap` too.
    """

    raw: eqx.AbstractVar[Array]

    __array_ufunc__ = None  # so that NumPy leaves `x @ w` to us
    __hash__ = None  # type: ignore[assignment]  # as of an array, since `==` goes entry by entry

    @abc.abstractmethod
    def to_dense(self) -> Inexact[Array, "..."]:
        """The array it stands for, in the dtype of `raw`; a point of the set for any finite `raw`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array it stands for."""
        return self.raw.shape

    @property
    def dtype(self) -> np.dtype:
        """That of the raw parameters."""
        return self.raw.dtype

    @property
    def ndim(self) -> int:
        """How many axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many entries; there may be fewer raw parameters."""
        return int(np.prod(self.shape))

    @property
    def T(self) -> Array:  # noqa: N802 - as of an array
        """The transpose, an array."""
        return self.to_dense().T

    def astype(self, dtype: DTypeLike) -> Array:
        """An array of another dtype."""
        return self.to_dense().astype(dtype)

    def __jax_array__(self) -> Array:
        return self.to_dense()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.to_dense(), dtype)

    def __getitem__(self, index: Any) -> Array:
        return self.to_dense()[index]

    __neg__, __pos__, __abs__ = _unary(operator.neg), _unary(operator.pos), _unary(abs)
    __iter__, __len__, __bool__, __float__ = _unary(iter), _unary(len), _unary(bool), _unary(float)
    __add__, __radd__ = _left(operator.add), _right(operator.add)
    __sub__, __rsub__ = _left(operator.sub), _right(operator.sub)
    __mul__, __rmul__ = _left(operator.mul), _right(operator.mul)
    __truediv__, __rtruediv__ = _left(operator.truediv), _right(operator.truediv)
    __floordiv__, __rfloordiv__ = _left(operator.floordiv), _right(operator.floordiv)
    __mod__, __rmod__ = _left(operator.mod), _right(operator.mod)
    __pow__, __rpow__ = _left(operator.pow), _right(operator.pow)
    __matmul__, __rmatmul__ = _left(operator.matmul), _right(operator.matmul)
    __lt__, __le__, __gt__, __ge__ = map(_left, (operator.lt, operator.le, operator.gt, operator.ge))
    __eq__, __ne__ = _left(operator.eq), _left(operator.ne)  # type: ignore[assignment]

    __pdoc__ = pdoc


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
    Positive(shape=(3, 2), raw=f32[3,2])

    To be called once per step, at the top of the loss: what a scan or a loop then uses are arrays, and a tie is
    computed once. Matrices stay what they are, made of arrays. Nodes of paramax are unwrapped, as by `paramax.unwrap`.

    Args:
        model: any pytree.

    Returns:
        The model. One array stands at all places of a tie, that is, of nodes made of the very same arrays.
    """
    return replace(model, constrained_kinds(), _value)


def constrained_kinds() -> tuple[type, ...]:
    """The classes of constrained arrays: ours, and those of paramax, of which a model has none if it is not loaded."""
    paramax = sys.modules.get("paramax")
    return (AbstractConstrained, *([paramax.AbstractUnwrappable] if paramax else []))


def _value(node: Any) -> Any:
    return node.to_dense() if isinstance(node, AbstractConstrained) else node.unwrap()


def concrete(value: Any) -> np.ndarray | None:
    """The entries in float64, to be checked; `None` for what is traced, whose entries are not known."""
    return None if isinstance(value, Tracer) else np.asarray(value).astype(np.float64)


def refuse(node: Any, entries: Any, fine: Any, expected: str, instead: str) -> None:
    """An error for the first entry that is not fine, if there is one."""
    if np.all(fine):
        return
    index = tuple(map(int, np.argwhere(~np.asarray(fine))[0]))
    place = f" at index {list(index)}" if index else ""
    raise ValueError(
        f"{type(node).__name__} takes {expected}, got {np.asarray(entries)[index]:.8g}{place}. To make such ones, "
        f"write for example {instead}"
    )


AbstractConstrained.__module__ = "treeparams.matrices"
