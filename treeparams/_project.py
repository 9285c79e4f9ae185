"""The canonical gradient."""

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import PyTree

from ._layout import Layout
from ._match import per_slot
from ._resolve import resolve
from ._structure import Spec


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


def slot_gradients(
    layout: Layout, grads: PyTree, missing: Literal["zeros"] | None, dtypes: Sequence[Any] | None = None
) -> list[Any]:
    """The projected gradient of each slot, in the slots' dtypes or given ones."""
    found = per_slot(layout, grads, "sum", exact_shapes=True)
    specs = [layout.structure.spec(position) for position in layout.positions]
    dtypes = [spec.dtype for spec in specs] if dtypes is None else dtypes
    return [_as_gradient(*each, missing) for each in zip(found, specs, dtypes, strict=True)]


def _as_gradient(value: Any, spec: Spec, dtype: Any, missing: str | None) -> Any:
    if value is None:
        return jnp.zeros(spec.shape, dtype) if missing else None
    array = jnp.asarray(value)
    # A vector is real beside a complex slot if that is empty.
    if jnp.iscomplexobj(array) and not all(jnp.issubdtype(each, jnp.complexfloating) for each in (spec.dtype, dtype)):
        array = array.real
    return array.astype(dtype)
