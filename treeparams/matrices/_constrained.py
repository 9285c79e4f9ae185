"""Constrained arrays, and the base of all nodes of this module: no arrays themselves, they say how to get one.

The function of a constrained array is total, so that you need not project or clip anything after a step. A node is not
an array: with a `__jax_array__` that returns one, each use would compute it anew, in a loop at each turn, and `jax.lax`
would refuse it.
"""

import abc
import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Inexact

from .._tree.structure import same_treedef
from .._tree.types import PyTree, is_complex


def _refused(operation: str) -> Callable[..., Any]:
    """Makes a method, for a class body, that raises an error and says how to get an array."""

    def refuse(self: "NotAnArray", *_: object, **__: object) -> Any:
        raise TypeError(f"{operation} needs an array, which {type(self).__name__} is not: call {self.instead} first")

    return refuse


class NotAnArray:
    """A base of nodes. Operations that need an array raise an error that says how to get one."""

    instead: ClassVar[str]  # how to get one

    __array_ufunc__ = None  # so that NumPy leaves `x @ M` to us
    __array__ = _refused("NumPy")
    __add__ = __radd__ = __sub__ = __rsub__ = _refused("a sum")
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refused("a product entry by entry")
    __matmul__ = __rmatmul__ = _refused("@")
    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _refused("arithmetic")
    __neg__ = __pos__ = __abs__ = __float__ = _refused("arithmetic")
    __lt__ = __le__ = __gt__ = __ge__ = _refused("a comparison")
    __getitem__ = _refused("indexing")
    __iter__ = _refused("iteration")


def replaced(model: PyTree, cls: type | tuple[type, ...], dense: Callable[[Any], Any]) -> PyTree:
    """Returns the model with every node of a class, or of one in a tuple, replaced by `dense(node)`.

    Nodes within such nodes come first: `dense` gets a node in which they are replaced. Nodes that consist of the same
    array objects in the same way, like those of a tie, become one object.
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


# -- The arguments of constructors


def is_jax_or_numpy(value: object) -> TypeGuard[jax.Array | np.ndarray]:
    """Returns whether it is an array of JAX or of NumPy."""
    return isinstance(value, jax.Array | np.ndarray)


def as_parameter(value: object, *, is_real: bool = False) -> Array:
    """Checks the floating array given to a constructor, and returns it; for the `converter` of a field."""
    if not is_jax_or_numpy(value):
        raise TypeError(f"expected an array, got {type(value).__name__}")
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(f"a parameter must be floating or complex, got {array.dtype}: convert it with x.astype(float)")
    if is_real and is_complex(array.dtype):
        raise TypeError(f"expected real numbers, got {array.dtype}")
    return array


# -- Numbers


def wide(x: Array | np.ndarray) -> Array:
    """Converts to at least float32: in a narrower dtype, several steps of computation lose too many digits."""
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def _least_positive(dtype: DTypeLike) -> float:
    """Returns the smallest normal number: smaller ones are zero on most devices."""
    return float(jnp.finfo(dtype).tiny)


def as_row(vector: Array, x: Array) -> Array:
    """Returns a vector in the dtype of x and with its number of axes, to meet its last one."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (x.shape[-1],))


class AbstractConstrained(NotAnArray, eqx.Module):
    """An array that stays on a set; subclasses define the set by a function of `raw` whose values all lie on it.

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

    To use it, `materialise` the model. Arithmetic with it, `@`, indexing, its `shape`, and functions of `jax.numpy` and
    NumPy raise an error that tells you so. Functions of `jax.lax` raise an error of JAX, which names the class.
    """

    instead = "matrices.materialise(model)"

    raw: eqx.AbstractVar[Array]

    __array_ufunc__ = _refused("NumPy")  # type: ignore[assignment]
    # A property raises where JAX asks whether there is one. Of a method jax.lax says to call jax.numpy.array.
    __jax_array__ = property(_refused("JAX"))

    @abc.abstractmethod
    def to_dense(self) -> Inexact[Array, "..."]:
        """Returns the array it represents, in the dtype of `raw`; a point of the set for any finite `raw`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name!r}: for that of an array call {self.instead} first")


def materialise(model: PyTree) -> PyTree:
    """Returns the model with every constrained array replaced by the array it represents, each computed once.

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

    Call it once per step, at the top of the loss: a scan or a loop then uses arrays, and a tied node is computed once.
    Outside of a loss `node.to_dense()` gives you the array of one node. Matrices stay matrices, made of arrays. Nodes
    of paramax are unwrapped, as by `paramax.unwrap`.

    Args:
        model: any pytree. Tied nodes, which are made of the same array objects, become one array.
    """
    ours = AbstractConstrained
    return replaced(
        model, constrained_kinds(), lambda node: node.to_dense() if isinstance(node, ours) else node.unwrap()
    )


def constrained_kinds() -> tuple[type, ...]:
    """Returns the classes of constrained arrays: those of this library, and of paramax if it has been imported."""
    paramax = sys.modules.get("paramax")
    return (AbstractConstrained, *([paramax.AbstractUnwrappable] if paramax else []))


class Positive(AbstractConstrained):
    """Positive numbers: `softplus(raw)`, which is `log(1 + exp(raw))`.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> scale = matrices.Positive(jnp.array([1.0, 10.0]))
    >>> matrices.materialise(scale), tp.layout({"scale": scale}).paths
    (Array([ 1., 10.], dtype=float32), ('scale.raw',))

    A step in `raw` changes a small value by a factor, as with an exponential, and a large one by a summand, so that no
    step is magnified. The value keeps a relative precision of about `1 + |log(value)|` roundings. It is never zero: its
    minimum is the smallest normal number of the dtype.

    Args:
        w: the numbers themselves, positive, any shape. Outside of a trace other numbers raise a `ValueError`.
    """

    raw: Float[Array, "..."]

    is_made_of_its_value: ClassVar[bool] = True  # so `tp.replace` can set it

    def __init__(self, w: Array | np.ndarray):
        w = as_parameter(w, is_real=True)
        if not isinstance(w, Tracer):
            _refuse_others(np.asarray(w).astype(np.float64), _least_positive(w.dtype))
        x = wide(w)
        # The logarithm of exp(x) - 1, which neither overflows nor cancels when it is written so.
        self.raw = (x + jnp.log(-jnp.expm1(-x))).astype(w.dtype)

    def to_dense(self) -> Array:
        least = _least_positive(self.raw.dtype)
        return jnp.maximum(jax.nn.softplus(wide(self.raw)), least).astype(self.raw.dtype)


def _refuse_others(entries: np.ndarray, least: float) -> None:
    fine = (entries >= least) & (entries < np.inf)
    if np.all(fine):
        return
    index = np.argwhere(~fine)[0].tolist()
    where = f" at index {index}" if index else ""
    raise ValueError(
        f"Positive accepts finite numbers of at least {least:.3g}, got {entries[tuple(index)]:.8g}{where}. Write for "
        "example Positive(jnp.abs(w) + 1e-6)"
    )


AbstractConstrained.__module__ = Positive.__module__ = "treeparams.matrices"
