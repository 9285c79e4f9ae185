"""The vector form: all trained parameters in one contiguous vector, each tie once, and the way back."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, SupportsIndex, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, PyTree

from ._index import is_complex
from ._layout import Layout, Trainable, index_of
from ._match import read_slots, slot_gradients
from ._mesh import replicated
from ._parts import Rest, index_in, put_together, take_apart
from ._primitives import cut, join
from ._recognise import name_deleted
from ._structure import is_inexact
from ._text import count_of, describe
from ._view import View

M = TypeVar("M")
_LONGEST = 2**31 - 1  # offsets in compiled programs are 32 bits wide


@dataclasses.dataclass(frozen=True)
class Vector:
    """A kind of vector: what lies in it. Of slots it knows shapes and dtypes alone, so that like models share programs.

    Programs compiled for it hold on to it, and a layout holds on to static functions and all that these have captured.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    dtype: Any  # of the vector
    length: int  # with the padding

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shapes, self.dtypes, self.dtype, self.length))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return Vector, (self.shapes, self.dtypes, self.dtype, self.length)  # hashes differ between processes

    # Compiled as one program where it is called outside of a trace: a call per leaf would take 20 times as long. Inside
    # of one, inlining leaves no trace of that.
    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def join(self, arrays: Sequence[Any]) -> jax.Array:
        """The vector of one array per slot."""
        if not arrays:
            return jnp.zeros(self.length, self.dtype)
        cast = [_cast(replicated(jnp.asarray(array)), self.dtype) for array in arrays]
        return join(cast, self.shapes, self.length)

    def cut(self, vector: Any) -> list[jax.Array]:
        """One array per slot, in its shape and dtype."""
        self.check(vector)
        return _cut(self, vector)

    def check(self, given: Any) -> None:
        """Checks a vector."""
        expected = f"expected a vector of shape ({self.length},) and floating dtype"
        if not (hasattr(given, "shape") and hasattr(given, "dtype")):
            raise TypeError(f"{expected}, got {describe(given)}")
        if tuple(given.shape) != (self.length,):
            stack = "; map over a stack of vectors with jax.vmap" if len(given.shape) > 1 else ""
            raise ValueError(f"{expected} for {len(self.shapes)} slots, got shape {tuple(given.shape)}{stack}")
        if not is_inexact(given.dtype):
            raise TypeError(f"{expected}, got {given.dtype}; convert it with vector.astype({self.dtype})")
        if is_complex(given.dtype) and not any(map(is_complex, self.dtypes)):
            raise TypeError(f"{expected}, got {given.dtype}, and no parameter is complex; take vector.real")


# As for `Vector.join`; a vector is checked before, where it may be anything.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _cut(kind: Vector, vector: Any) -> list[jax.Array]:
    pieces = cut(replicated(jnp.asarray(vector)), kind.shapes)
    return [_cast(piece, dtype) for piece, dtype in zip(pieces, kind.dtypes, strict=True)]


def _cast(array: jax.Array, dtype: Any) -> jax.Array:
    if jnp.iscomplexobj(array) and not is_complex(dtype):
        array = array.real
    return jax.lax.convert_element_type(array, dtype)


@functools.cache
def row_shape(key: str) -> tuple[int, ...] | None:
    """The shape in the key of a stack, `"float32[3,4]"`; `None` of another text."""
    name, _, shape = key.partition("[")
    try:
        sizes = tuple(int(size) for size in shape.removesuffix("]").split(",") if size)
        is_key = is_inexact(jnp.dtype(name)) and key == f"{name}[{','.join(map(str, sizes))}]"
    except (TypeError, ValueError):
        return None
    return sizes if is_key else None


def is_stack(path: Sequence[Any], leaf: Any) -> bool:
    """Whether an array is a stack: it stands in a dictionary under the key of its rows, whatever its own dtype."""
    key, shape = getattr(path[-1], "key", None) if path else None, getattr(leaf, "shape", ())
    return isinstance(key, str) and len(shape) > 0 and row_shape(key) == tuple(shape[1:])


def vector_of(layout: Layout, dtype: Any = None, pad_to: SupportsIndex = 1) -> Vector:
    """The kind of vector that holds the slots of a layout."""
    pad_to = count_of("pad_to", pad_to, "elements")
    dtype = layout.dtype if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    structure = index_of(layout).structure
    return structure.remember((layout, dtype, pad_to), lambda: _vector_of(layout, dtype, pad_to))


def _vector_of(layout: Layout, dtype: Any, pad_to: int) -> Vector:
    slots, length = layout.slots, -(-layout.size // pad_to) * pad_to
    if length > _LONGEST:
        raise ValueError(
            f"a vector of {length:,} elements is longer than the {_LONGEST:,} that compiled programs can address; take "
            "the tree form, tp.partition, or flatten parts of the model by themselves"
        )
    if not is_inexact(dtype):
        raise TypeError(f"the dtype of the vector must be floating or complex, got {dtype}")
    complex_slots = [slot for slot in slots if is_complex(slot.dtype)]
    if not is_complex(dtype) and any(slot.size for slot in complex_slots):
        slot = next(slot for slot in complex_slots if slot.size)
        raise TypeError(f"{slot.path!r} is {slot.dtype}, which a vector of {dtype} cannot hold")
    if is_complex(dtype) and not complex_slots:
        raise TypeError(f"no parameter is complex, so the vector cannot be {dtype}")
    return Vector(tuple([slot.shape for slot in slots]), tuple([slot.dtype for slot in slots]), dtype, length)


class Restructure(Generic[M]):
    """From a vector back to the model: `restructure(vector) -> model`.

    A pytree whose leaves are the frozen arrays, with everything else static, so that it can be closed over, passed to
    and returned from `jax.jit`, mapped, scanned and differentiated. Made by `tp.ravel`.
    """

    def __init__(self, rest: Rest[M], kind: Any) -> None:
        """For this library's own use; users write `tp.ravel(model)`."""
        self._rest = rest
        self._kind: Vector = kind

    @property
    def layout(self) -> Layout:
        """The layout of the model: which part of the vector is what."""
        return self._rest.layout

    def __call__(self, vector: Inexact[Array, " n"] | Any) -> M:
        """The model of these parameters.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> vector, restructure = tp.ravel({"w": jnp.ones((2, 2)), "b": jnp.zeros(1, jnp.bfloat16), "n": 7})
        >>> restructure(2 * vector)
        {'b': Array([0], dtype=bfloat16), 'n': 7, 'w': Array([[2., 2.],
               [2., 2.]], dtype=float32)}

        Args:
            vector: as `tp.ravel` gave it: shape `(layout.size,)` (or padded), of any floating dtype; complex only if a
                slot is complex (a real slot then takes the real part). NumPy vectors are fine.

        Returns:
            The model: each parameter in its own shape and dtype, one array at all paths of a tie, frozen arrays and all
            else as they were.
        """
        return put_together(self._rest, self._kind.cut(vector))

    def ravel(self, model: PyTree) -> Inexact[Array, " n"]:
        """The vector of a model's values, the inverse of calling.

        Args:
            model: a tree with an array for every slot, at the same paths: the model itself, a canonical tree, another
                type. At a tie the value at the slot's own path counts. What is frozen is ignored.

        Returns:
            The vector, as `tp.ravel` gives it, in a buffer of its own.

        Raises:
            ValueError: a slot is missing or has another shape; an entry stands where the model has no leaf.
            TypeError: an entry is no array, or complex where the slot is real.
        """
        return self._kind.join(read_slots(index_in(self._rest), model, exact_shapes=True))

    def ravel_gradient(self, grads: PyTree) -> Inexact[Array, " n"]:
        """The vector of a gradient, the transpose of calling: ties are summed, what is missing is zero.

        >>> import jax, jax.numpy as jnp, treeparams as tp
        >>> shared = jnp.ones(2)
        >>> model = {"a": shared, "b": shared, "c": jnp.ones(1)}
        >>> _, restructure = tp.ravel(model)
        >>> restructure.ravel_gradient({"a": jnp.ones(2), "b": 10 * jnp.ones(2)})
        Array([11., 11.,  0.], dtype=float32)

        Args:
            grads: as for `tp.project`.

        Returns:
            The vector, as `tp.ravel` gives it.

        Raises:
            ValueError: an entry has another shape than its leaf, or stands where the model has no leaf.
            TypeError: an entry is no array.
        """
        index = index_in(self._rest)
        return self._kind.join(slot_gradients(index, grads, "zeros", self._kind.dtype))

    def view(self, vector: Inexact[Array, " n"] | Any) -> View:
        """Names over a vector: of parameters, a gradient, an optimiser's moments, a tangent.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> vector, restructure = tp.ravel({"a": {"w": jnp.ones(2), "b": jnp.zeros(1)}, "c": {"w": jnp.ones(3)}})
        >>> view = restructure.view(vector)
        >>> view["a.w"], list(view["*.w"])
        (Array([1., 1.], dtype=float32), ['a.w', 'c.w'])
        >>> view.at["*.w"].multiply(5)
        Array([0., 5., 5., 5., 5., 5.], dtype=float32)

        Args:
            vector: as for calling.

        Returns:
            A mapping from paths to arrays; see `View`.

        Raises:
            ValueError: as for calling.
            TypeError: as for calling.
        """
        self._kind.check(vector)
        return View(self.layout, vector)

    def with_frozen(self, model: M) -> "Restructure[M]":
        """Takes the frozen leaves from another model.

        Args:
            model: a model of equal structure.

        Returns:
            A `Restructure` of the same layout, whose frozen arrays, functions and numbers are those of `model`.

        Raises:
            ValueError: the model does not fit the layout.
        """
        return Restructure(take_apart(model, self.layout).rest, self._kind)

    def __repr__(self) -> str:
        kind = self._kind
        padded = f", padded to {kind.length:,}" if kind.length > self.layout.size else ""
        return f"Restructure({self.layout!r}; {kind.dtype}{padded})"


Restructure.__module__ = "treeparams"
_halves: Callable[[Restructure[Any]], tuple[Rest[Any], Vector]] = operator.attrgetter("_rest", "_kind")


def _flatten(restructure: Restructure[Any]) -> tuple[tuple[Rest[Any]], Vector]:
    rest, kind = _halves(restructure)
    return (rest,), kind


def _flatten_with_keys(restructure: Restructure[Any]) -> tuple[Any, Vector]:
    rest, kind = _halves(restructure)
    return ((jtu.GetAttrKey("rest"), rest),), kind


jtu.register_pytree_with_keys(
    Restructure, _flatten_with_keys, lambda kind, children: Restructure(next(iter(children)), kind), _flatten
)


def ravel(
    model: M, trainable: Trainable = None, dtype: DTypeLike | None = None, *, pad_to: SupportsIndex = 1
) -> tuple[Inexact[Array, " n"], Restructure[M]]:
    """The trained parameters of a model as one contiguous vector, and the way back.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
    >>> vector, restructure = tp.ravel(mlp, "!layers.0")  # all but the first layer; tp.ravel(mlp): everything
    >>> vector.shape, bool(restructure(vector)(jnp.ones(2)) == mlp(jnp.ones(2)))
    ((5,), True)
    >>> loss = jax.jit(lambda vector, restructure, x: restructure(vector)(x) ** 2)
    >>> jax.grad(loss)(vector, restructure, jnp.ones(2)).shape
    (5,)

    Only trained floating and complex arrays are in the vector, in tree order, each tie once, at the offsets that
    `restructure.layout` prints. Integers, keys and functions are not converted: they stay with `restructure`.

    **What it costs.** An update, a norm, an average of one vector is one operation in place of thousands, and compiles
    as one. But XLA has no views: while a step runs, the leaves exist beside the vector, and so do their gradients. Many
    small leaves: take the vector. A few huge ones: take the tree form (`tp.partition`). Master weights:
    `dtype=jnp.float32` over bfloat16 leaves; the forward pass runs in bfloat16, the gradient and the update are one
    float32 vector.

    Args:
        model: any pytree.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        dtype: the dtype of the vector; `None`: `jnp.result_type` of the slots that have elements. A narrower one loses
            digits; float32 over bfloat16 leaves keeps a master copy. Weak types do not survive.
        pad_to: zeros follow the parameters until the length is a multiple of this, so that the vector can be laid over
            so many devices. No parameter, gradient or view ever includes them.

    Returns:
        The vector, shape `(layout.size,)`, always in a buffer of its own and whole on each device, and the
        `Restructure`. Nothing trained: shape `(0,)`.

    Raises:
        ValueError: `pad_to` is not positive; more than 2^31 - 1 elements; as `tp.layout`.
        TypeError: `dtype` is not floating, real where a slot is complex or complex where none is; as `tp.layout`.
    """
    parts = take_apart(model, trainable)
    kind = vector_of(parts.layout, dtype, pad_to)
    try:
        return kind.join(parts.slots), Restructure(parts.rest, kind)
    except (RuntimeError, ValueError) as error:
        name_deleted(error, model)
        raise
