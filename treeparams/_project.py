"""The canonical gradient, and its norm."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._layout import Layout
from ._match import per_slot
from ._resolve import resolve
from ._structure import Spec, flatten, is_array


def project(model: PyTree, grads: PyTree, trainable: Any = None, *, missing: Literal["zeros"] | None = None) -> PyTree:
    """The canonical form of a gradient, however it came about.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.ones(2)
    >>> model = {"a": shared, "b": shared, "mean": jnp.zeros(2)}
    >>> grads = jax.grad(lambda m: jnp.sum(3 * m["a"] + 13 * m["b"] + m["mean"]))(model)  # two halves, and the mean's
    >>> tp.project(model, grads, ("a", "b"))
    {'a': Array([16., 16.], dtype=float32), 'b': None, 'mean': None}

    This is the one place where gradients of ties are summed; those at an alias with a transform go through its
    transpose. Complex gradients stay in JAX's convention, they are never conjugated.

    Args:
        model: any pytree.
        grads: a tree with entries at paths of the model: of the model's type or another, whole or partial. `None`,
            `optax.MaskedNode`, `float0` and a missing branch are no gradient; entries at frozen leaves are dropped.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        missing: what a slot without a gradient gets: `None` stays `None` (this leaf takes no step); `"zeros"`.

    Returns:
        A tree of the model's structure: at every slot's path the gradient in the slot's shape and dtype, real where
        the slot is real, and `None` everywhere else.

    Raises:
        ValueError: an entry has another shape than its leaf, or stands where the model has no leaf; as `tp.layout`.
        TypeError: an entry is no array.
    """
    if missing not in (None, "zeros"):
        raise ValueError(f'missing must be None or "zeros", got {missing!r}')
    resolved = resolve(model, trainable)
    return resolved.layout.canonical(slot_gradients(resolved.layout, grads, missing), resolved.treedef)


def slot_gradients(layout: Layout, grads: PyTree, missing: Literal["zeros"] | None, dtype: Any = None) -> list[Any]:
    """The projected gradient of each slot, in the slot's dtype or a given one."""
    found = per_slot(layout, grads, "sum", exact_shapes=True)
    specs = map(layout.structure.spec, layout.positions)
    return [_as_gradient(value, spec, dtype or spec.dtype, missing) for value, spec in zip(found, specs, strict=True)]


def _as_gradient(value: Any, spec: Spec, dtype: Any, missing: str | None) -> Any:
    if value is None:
        return jnp.zeros(spec.shape, dtype) if missing else None
    array = jnp.asarray(value)
    if jnp.iscomplexobj(array) and not jnp.issubdtype(spec.dtype, jnp.complexfloating):
        array = array.real
    return array.astype(dtype)


def global_norm(tree: PyTree) -> jax.Array:
    """The Euclidean norm of all floating and complex leaves, safe in every dtype.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> tp.global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0]), "steps": 7})
    Array(5., dtype=float32)
    >>> print(tp.global_norm(jnp.ones(1000, jnp.bfloat16)))  # summed in bfloat16 it would be 16
    31.622776
    >>> jax.grad(tp.global_norm)(jnp.zeros(2))
    Array([0., 0.], dtype=float32)

    It counts every leaf it is given: pass the gradient of `tp.grad` or `tp.project`, or `tp.partition(model)[0]`, in
    which a tie stands once. Inside `shard_map` it is the norm of the local shard.

    Args:
        tree: any pytree; leaves that are no floating or complex arrays are ignored.

    Returns:
        A float32 scalar (float64 if any leaf is float64 or complex128); 0 for an empty tree. Complex leaves count by
        modulus. The sum is scaled by the largest entry, so that it neither overflows nor vanishes; infinite entries
        give infinity, NaN gives NaN. The gradient at zero is zero.
    """
    arrays = [leaf for leaf in flatten(tree)[0] if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return _norm(tuple(arrays))


@jax.jit
def _norm(arrays: Sequence[Any]) -> jax.Array:
    wide = any(jnp.finfo(array.dtype).bits > 32 for array in arrays)
    dtype = jnp.float64 if wide else jnp.float32
    parts = [_real(array).astype(dtype) for array in arrays if math.prod(array.shape)]
    if not parts:
        return jnp.zeros((), dtype)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(jax.lax.stop_gradient(part))) for part in parts]))
    scale = _power_of_two(largest)
    total = sum((jnp.sum(jnp.square(part / scale)) for part in parts), start=jnp.zeros((), dtype))
    # The square root has no derivative at zero; there the sum is replaced before it, so that no NaN is made.
    is_zero = total == 0
    return jnp.where(is_zero, 0, scale * jnp.sqrt(jnp.where(is_zero, 1, total)))


def _real(array: jax.Array) -> jax.Array:
    return jnp.stack([array.real, array.imag]) if jnp.iscomplexobj(array) else array


def _power_of_two(largest: jax.Array) -> jax.Array:
    # A power of two scales without rounding; what has none (zero, infinity, NaN) is not scaled.
    usable = jnp.isfinite(largest) & (largest > 0)
    exponent = jnp.frexp(jnp.where(usable, largest, 1))[1]
    return jnp.ldexp(jnp.ones_like(largest), exponent)
