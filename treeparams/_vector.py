"""The vector form: all trained parameters in one contiguous vector, each tie once, and the way back."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jaxtyping import Array, Inexact, PyTree

from ._flat import as_given, as_vectors, leaves_of, vectors_into, vectors_of
from ._layout import Layout
from ._match import read_slots
from ._partition import Rest, rest_of, slots_of
from ._project import slot_gradients
from ._resolve import resolve
from ._view import View, unwrapped


class Restructure:
    """From a vector back to the model: `restructure(vector) -> model`.

    A pytree whose leaves are the frozen arrays, with everything else static, so that it can be closed over, passed to
    and returned from `jax.jit`, mapped, scanned and differentiated. Made by `tp.ravel`.
    """

    def __init__(self, rest: Rest) -> None:
        """For this library's own use; users write `tp.ravel(model)`."""
        self.rest = rest

    @property
    def layout(self) -> Layout:
        """The layout of the model: which part of the vector is what."""
        return self.rest.layout

    def __call__(self, vector: Inexact[Array, " n"] | Any) -> PyTree:
        """The model of these parameters.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> vector, restructure = tp.ravel({"w": jnp.ones((2, 2)), "b": jnp.zeros(1, jnp.bfloat16), "n": 7})
        >>> restructure(2 * vector)
        {'b': Array([0], dtype=bfloat16), 'n': 7, 'w': Array([[2., 2.],
               [2., 2.]], dtype=float32)}

        Args:
            vector: as `tp.ravel` gave it: shape `(layout.size,)` (or padded), of any floating dtype; complex only if a
                slot is complex (a real slot then takes the real part). A tuple where `tp.ravel` gave one. NumPy vectors
                are fine, and so is a `View`.

        Returns:
            The model: each parameter in its own shape and dtype, one array at all paths of a tie, frozen arrays and all
            else as they were.

        Raises:
            ValueError: another length or rank; a view of another layout, with what differs.
            TypeError: an integer vector, a complex one where no slot is complex, or no array.
        """
        vectors = as_vectors(self.layout, unwrapped(self.layout, vector))
        return self.rest.fill(leaves_of(self.layout, vectors))

    def ravel(self, model: PyTree, *, into: Any = None) -> Inexact[Array, " n"] | Any:
        """The vector of a model's values, the inverse of calling.

        Args:
            model: a tree with an array for every slot, at the same paths: the model itself, a canonical tree, another
                type. At a tie the value at the slot's own path counts. What is frozen is ignored.
            into: a vector whose memory the result takes, and which is gone after (donated); `None`: new memory. It has
                the dtype and length of the result, which lies over devices as it does. Inside of a trace it is ignored,
                since memory is XLA's business there: donate it to `jax.jit`, with `keep_unused=True`.

        Returns:
            The vector or vectors, as `tp.ravel` gives them, in buffers of their own.

        Raises:
            ValueError: a slot is missing or has another shape; an entry stands where the model has no leaf; `into` has
                another length or dtype, or is itself an entry.
            TypeError: an entry is no array, or complex where the slot is real.
        """
        return _write(self.layout, read_slots(self.layout, model, exact_shapes=True), into)

    def ravel_gradient(self, grads: PyTree, *, into: Any = None) -> Inexact[Array, " n"] | Any:
        """The vector of a gradient, the transpose of calling: ties are summed, what is missing is zero.

        >>> import jax, jax.numpy as jnp, treeparams as tp
        >>> shared = jnp.ones(2)
        >>> model = {"a": shared, "b": shared, "c": jnp.ones(1)}
        >>> _, restructure = tp.ravel(model)
        >>> restructure.ravel_gradient({"a": jnp.ones(2), "b": 10 * jnp.ones(2)})
        Array([11., 11.,  0.], dtype=float32)

        Args:
            grads: as for `tp.project`.
            into: as for `ravel`.

        Returns:
            The vector or vectors, as `tp.ravel` gives them.

        Raises:
            ValueError: an entry has another shape than its leaf, or stands where the model has no leaf; `into` does not
                fit.
            TypeError: an entry is no array.
        """
        dtypes = [self.layout.vectors[slot.vector].dtype for slot in self.layout.slots]
        return _write(self.layout, slot_gradients(self.layout, grads, "zeros", dtypes), into)

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
        return View(self.layout, as_vectors(self.layout, unwrapped(self.layout, vector)))

    def with_frozen(self, model: PyTree) -> "Restructure":
        """The same vector form around the frozen leaves of another model.

        Args:
            model: a model of equal structure.

        Returns:
            A `Restructure` of the same layout, whose frozen arrays, functions and numbers are those of `model`.

        Raises:
            ValueError: the model does not fit the layout.
        """
        return Restructure(rest_of(resolve(model, self.layout)))

    def __repr__(self) -> str:
        return f"Restructure({self.layout!r})"


Restructure.__module__ = "treeparams"
jtu.register_pytree_with_keys(
    Restructure,
    lambda restructure: (((jtu.GetAttrKey("rest"), restructure.rest),), None),
    lambda _, children: Restructure(next(iter(children))),
    lambda restructure: ((restructure.rest,), None),
)


def ravel(
    model: PyTree,
    trainable: Any = None,
    dtype: Any = None,
    *,
    dtype_groups: bool = False,
    bucket: SupportsIndex | None = None,
    pad_to: SupportsIndex = 1,
) -> tuple[Inexact[Array, " n"] | Any, Restructure]:
    """The trained parameters of a model as one contiguous vector, and the way back.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
    >>> vector, restructure = tp.ravel(mlp)
    >>> vector.shape, bool(restructure(vector)(jnp.ones(2)) == mlp(jnp.ones(2)))
    ((17,), True)
    >>> loss = jax.jit(lambda vector, restructure, x: restructure(vector)(x) ** 2)
    >>> jax.grad(loss)(vector, restructure, jnp.ones(2)).shape
    (17,)

    Only trained floating and complex arrays are in the vector, in tree order, each tie once, at the offsets that
    `restructure.layout` prints. Integers, keys and functions are not converted: they stay with `restructure`.

    **What it costs.** An update, a norm, an average of one vector is one operation in place of thousands, and compiles
    as one. But XLA has no views: while a step runs, the leaves exist beside the vector, and so do their gradients. Many
    small leaves: take the vector. A few huge ones: take the tree form (`tp.partition`), or `bucket=`, which does the
    one for the small leaves and the other for the large. Master weights: `dtype=jnp.float32` over bfloat16 leaves; the
    forward pass runs in bfloat16, the gradient and the update are one float32 vector.

    Args:
        model: any pytree.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`. The
            `restructure.layout` of another model also tells how it was raveled, where the options below do not say.
        dtype: the dtype of the vector; `None`: `jnp.result_type` of the slots that have elements. A narrower one loses
            digits; float32 over bfloat16 leaves keeps a master copy. Weak types do not survive.
        dtype_groups: a tuple of vectors in place of one, one for each dtype in order of first appearance, without
            promotion. Offsets are then within each. Not together with `dtype`.
        bucket: a tuple of vectors: parameters of more elements than this lie each in a vector of its own, with its own
            dtype, which costs no copy in a compiled step; the others share one (or one for each dtype).
        pad_to: zeros follow the parameters until the length is a multiple of this, so that the vector can be laid over
            so many devices. No parameter, gradient or view ever includes them.

    Returns:
        The vector, shape `(layout.size,)`, always in a buffer of its own and whole on each device, and the
        `Restructure`. Nothing trained: shape `(0,)`. A tuple of such vectors with `dtype_groups` or `bucket`.

    Raises:
        ValueError: `dtype` and `dtype_groups` together; `bucket` or `pad_to` out of range; as `tp.layout`.
        TypeError: `dtype` is not floating, or real where a slot is complex; as `tp.layout`.
    """
    resolved = resolve(model, trainable)
    packing = resolved.layout.packing.changed(dtype, dtype_groups, bucket, pad_to)
    resolved = resolved._replace(layout=resolved.layout.packed(packing))
    return _write(resolved.layout, slots_of(resolved), None), Restructure(rest_of(resolved))


def _write(layout: Layout, arrays: Sequence[Any], into: Any) -> Any:
    if into is None:
        return as_given(layout, vectors_of(layout, arrays))
    buffers = as_vectors(layout, unwrapped(layout, into))
    for buffer, vector in zip(buffers, layout.vectors, strict=True):
        if buffer.dtype != vector.dtype or not isinstance(buffer, jax.Array):
            raise ValueError(
                f"into= must be a JAX array of {vector.dtype}, got {type(buffer).__name__} of {buffer.dtype}"
            )
    if any(isinstance(array, Tracer) for array in (*arrays, *buffers)):
        return as_given(layout, vectors_of(layout, arrays))
    taken = {id(buffer) for buffer in buffers}
    if len(taken) < len(buffers):
        raise ValueError("into= has one vector twice; each needs memory of its own")
    for slot, array in zip(layout.slots, arrays, strict=True):
        if id(array) in taken:
            raise ValueError(f"into= is also the array at {slot.path!r}; its memory cannot be read and taken at once")
    return as_given(layout, vectors_into(layout, arrays, buffers))
