"""A function of a model as one of its trained parameters, all of them real; tangents as vectors or as trees.

A complex parameter is differentiated as the pair of its real and imaginary part: only so are Hessians symmetric, and
Jacobians matrices if f is not holomorphic. Tangents and products are complex again, `re + i im` of the pair.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float

from .._forms.makers import reals_of, vector_of
from .._forms.mesh import result_varies, vary, varying
from .._slots.layout import Layout, Trainable, index_of
from .._slots.match import per_slot, slot_gradients
from .._slots.parts import Parts, Rest, put_together, take_apart
from .._tree.dtypes import common_dtype, is_complex
from .._tree.structure import is_array
from .._tree.text import describe
from .._tree.types import PyTree


class Pair(NamedTuple):
    """The real and the imaginary part of a complex array, which replace it in a tree."""

    real: Any
    imag: Any


Reals = tuple[jax.Array | Pair, ...]
"""One value for each slot, complex ones as pairs."""


def in_reals(tree: PyTree) -> PyTree:
    """Returns a tree of arrays with complex ones as pairs."""
    return jax.tree.map(lambda leaf: Pair(leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else leaf, tree)


def from_reals(tree: PyTree) -> PyTree:
    """Returns a tree of arrays with pairs as complex ones."""
    is_pair = lambda node: isinstance(node, Pair)
    return jax.tree.map(lambda node: jax.lax.complex(*node) if is_pair(node) else node, tree, is_leaf=is_pair)


def parts_of(model: PyTree, trainable: Trainable) -> Parts:
    """Takes the model apart, with JAX arrays in its slots."""
    parts = take_apart(model, trainable)
    return Parts(tuple(map(jnp.asarray, parts.slots)), parts.rest)


def of_reals(f: Callable[..., Any], parts: Parts, *args: object) -> Callable[[Any], Any]:
    """Returns `f(model, *args)` as a function of the slots in reals."""
    if not callable(f):
        raise TypeError(f"expected a function of the model, got {describe(f)}; write nested.hessian(loss)(model, x)")
    return lambda reals: f(parts.model(from_reals(reals)), *args)


def loss_of_reals(f: Callable[..., Any], parts: Parts, *args: object) -> Callable[[Any], Any]:
    """Returns the same for a loss, which must return a scalar."""
    of = of_reals(f, parts, *args)

    def loss(reals: Any) -> Any:
        value = of(reals)
        if getattr(value, "shape", ()) != ():
            raise TypeError(f"expected f to return a scalar, got {describe(value)}; write jnp.mean(...) of it")
        return value

    return loss


def own_copies(f: Callable[[Any], Any], slots: Reals) -> Reals:
    """Returns the slots as types that vary over devices as `f(slots)` does, inside of a `jax.shard_map`.

    If slots are the same on all devices, JAX sums each gradient over the devices. The gradient of one example must be
    of that example alone.
    """
    axes = result_varies(f, slots)
    return jax.tree.map(lambda leaf: vary(leaf, axes - varying(jax.typeof(leaf))), slots)


# -- Tangents ----------------------------------------------------------------------------------------------------------


def joined(layout: Layout, reals: Reals) -> jax.Array:
    """Returns the real vector of one value per slot in reals."""
    return reals_of(layout).join(jax.tree.leaves(reals))


def divided(layout: Layout, vector: jax.Array | np.ndarray) -> Reals:
    """Inverts `joined`."""
    if index_of(layout).complex_slots and jnp.iscomplexobj(vector):
        raise TypeError(
            "expected a real vector, with complex parameters as pairs of reals (nested.real_vector), "
            f"got {vector.dtype}"
        )
    cut = iter(reals_of(layout).cut(vector))
    return tuple(Pair(next(cut), next(cut)) if is_complex(slot.dtype) else next(cut) for slot in layout.slots)


def taken(layout: Layout, tangent: PyTree) -> Reals:
    """Returns a tangent (vector, real vector or tree) as one value per slot in reals; missing entries are zero.

    A tangent is a value of the parameters, so at a tie the slot's own entry counts, not a sum of several.
    """
    index, shape = index_of(layout), getattr(tangent, "shape", None)
    if shape == (layout.size,):
        return in_reals(tuple(vector_of(layout).cut(tangent)))
    length = reals_of(layout).blocks[0].size
    if shape == (length,):
        return divided(layout, tangent)
    if is_array(tangent) and not jtu.treedef_is_leaf(index.structure.treedef):
        pairs = f" (or {length}, complex ones as pairs of reals)" if index.complex_slots else ""
        raise ValueError(
            f"expected a vector of {layout.size} elements{pairs}, one per trained parameter, or a tree of the model's "
            f"structure, got an array of shape {jnp.shape(tangent)}"
        )
    return in_reals(tuple(slot_gradients(index, tangent, "zeros", tied="first")))


def given_back(layout: Layout, reals: Reals, tangent: PyTree) -> PyTree:
    """Returns one value per slot in reals in the form of the tangent, a vector, a real vector or a tree.

    No dtype is narrower than in the tangent.
    """
    shape = getattr(tangent, "shape", None)
    if shape == (layout.size,):
        return _no_narrower(vector_of(layout).join(from_reals(reals)), tangent)
    if shape == (reals_of(layout).blocks[0].size,):
        return _no_narrower(joined(layout, reals), tangent)
    index = index_of(layout)
    entries = per_slot(index, tangent, "first")
    return index.canonical(list(map(_no_narrower, from_reals(reals), entries)), index.structure.treedef)


def _no_narrower(product: jax.Array, tangent: Any) -> jax.Array:
    dtype = getattr(tangent, "dtype", product.dtype)
    return product.astype(common_dtype([product.dtype, jax.dtypes.canonicalize_dtype(dtype)]))


def real_vector(model: PyTree, trainable: Trainable = None) -> tuple[Float[Array, " n"], Callable[[Any], Any]]:
    """Returns the trained parameters as one real vector, complex ones as pairs of reals, and the way back.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0 + 2.0j, 3.0 + 4.0j]), "b": jnp.ones(1)}
    >>> vector, restructure = nested.real_vector(model)
    >>> print(vector)
    [1. 1. 3. 2. 4.]
    >>> restructure(2 * vector)["w"]
    Array([2.+4.j, 6.+8.j], dtype=complex64)

    The columns of `parameter_jacobian` are counted by this vector. If no parameter is complex, it equals the one of
    `tp.ravel`, whose `restructure` has names too. The positions in a layout (`layout.slice`, `layout.indices`) are
    those of `tp.ravel`, so they do not fit this vector if parameters are complex.

    Args:
        model: any pytree.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        The vector, shape `(n,)`: slots in order, ties once, for a complex slot all real parts and then all imaginary
        ones; and a function from such a vector to the model, a pytree that you may pass through `jax.jit`.

    Raises:
        ValueError: as `tp.layout`.
        TypeError: as `tp.layout`.
    """
    parts = parts_of(model, trainable)
    return joined(parts.layout, in_reals(parts.slots)), jtu.Partial(_restructured, parts.rest)


def _restructured(rest: Rest[Any], vector: jax.Array | np.ndarray) -> Any:
    return put_together(rest, from_reals(divided(rest.layout, vector)))
