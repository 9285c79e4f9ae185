"""The global norm: computed in float32 for narrower leaves, without overflow, with a gradient at zero."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._forms.mesh import is_sharded
from ._tree.structure import flatten, is_array
from ._tree.types import PyTree

# Leaves of one shape up to this many elements are summed as one array: XLA compiles one kernel for all in place of one
# for each (1000 leaves of 2x2: 0.8 s in place of 2.8 s, and a third of the run time). Larger ones would cost a copy.
# They are stacked and not joined to a vector, so that arrays that are split over devices stay where they are.
_SMALL = 4096
# A sum of squares above this has lost nothing that counts to underflow, whatever the number of terms.
_SAFE = 2.0**-60


def global_norm(tree: PyTree) -> jax.Array:
    """Computes the Euclidean norm of all floating and complex leaves, safely in every dtype.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> tp.global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0]), "steps": 7})
    Array(5., dtype=float32)
    >>> print(tp.global_norm([jnp.ones((), jnp.bfloat16)] * 1000))  # added up in bfloat16 it would be 16
    31.622776
    >>> jax.grad(tp.global_norm)(jnp.zeros(2))
    Array([0., 0.], dtype=float32)

    It counts every leaf that you pass, including the frozen leaves of a whole model. So pass the gradient of `tp.grad`
    or `tp.project`, or `tp.partition(model)[0]`, in which a tied parameter appears once. Inside `shard_map` it returns
    the norm of the local shard. Under `jax.vmap`, the data are read twice if any norm in the batch is zero, tiny, huge
    or not finite.

    Args:
        tree: any pytree; leaves that are not floating or complex arrays are ignored.

    Returns:
        A float32 scalar (float64 if any leaf is float64 or complex128); 0 for an empty tree. Complex leaves count by
        modulus. The sum is scaled by the largest entry, so it neither overflows nor vanishes; infinite entries give
        infinity, NaN gives NaN. The gradient at zero is zero.
    """
    arrays = [leaf for leaf in flatten(tree)[0] if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return _norm_of_arrays(arrays)


@jax.jit
def _norm_of_arrays(arrays: Sequence[Any]) -> jax.Array:
    wide = any(jnp.finfo(array.dtype).bits > 32 for array in arrays)
    dtype = jnp.float64 if wide else jnp.float32
    real = [x for array in arrays for x in ([array.real, array.imag] if jnp.iscomplexobj(array) else [array])]
    small: dict[tuple[int, ...], list[jax.Array]] = {}
    large = []
    for x in real:
        if math.prod(x.shape):
            is_large = x.size > _SMALL or is_sharded(x)
            (large if is_large else small.setdefault(x.shape, [])).append(x.astype(dtype))
    stacks = [jnp.stack(each) if len(each) > 1 else each[0] for each in small.values()]
    return _norm([*stacks, *large]) if stacks or large else jnp.zeros((), dtype)


@jax.custom_jvp
def _norm(arrays: list[jax.Array]) -> jax.Array:
    return _batched_norms(0)(arrays)


@functools.cache
def _batched_norms(rank: int) -> Callable[[list[jax.Array]], jax.Array]:
    """Returns the function that computes the norms of real arrays with this many leading batch axes.

    Under `jax.vmap`, a `cond` with a mapped predicate runs both branches. Here one predicate decides for the whole
    batch.
    """

    @jax.custom_batching.custom_vmap
    def norms(arrays: list[jax.Array]) -> jax.Array:
        total = _sum_of_squares(arrays, rank)
        usual = jnp.isfinite(total) & (total > _SAFE)
        # The usual case reads the data once. Only data whose sum overflowed or may have vanished is read again, scaled.
        return jax.lax.cond(
            jnp.all(usual), lambda _: jnp.sqrt(total), lambda arrays: _scaled_norm(arrays, rank), arrays
        )

    @norms.def_vmap
    def over_a_batch(size: int, is_mapped: list[list[bool]], arrays: list[jax.Array]) -> tuple[jax.Array, bool]:
        pairs = zip(arrays, is_mapped[0], strict=True)
        return _batched_norms(rank + 1)([x if mapped else jnp.stack([x] * size) for x, mapped in pairs]), True

    return norms


@_norm.defjvp
def _norm_jvp(primals: tuple[list[jax.Array]], tangents: tuple[list[jax.Array]]) -> tuple[jax.Array, jax.Array]:
    # d|x| = <x, dx> / |x|, and zero at zero, where the square root has no derivative. Both are scaled, since near the
    # largest numbers the reciprocal of the norm vanishes.
    norm = _norm(*primals)
    scale = _power_of_two(norm)
    safe = jnp.where(norm == 0, 1, norm / scale)
    pairs = zip(*primals, *tangents, strict=True)
    return norm, functools.reduce(jnp.add, [jnp.sum(x / scale / safe * tangent) for x, tangent in pairs])


def _scaled_norm(arrays: list[jax.Array], rank: int) -> jax.Array:
    scale = _power_of_two(functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), _axes(x, rank)) for x in arrays]))
    scaled = [x / scale.reshape(*scale.shape, *[1] * (x.ndim - rank)) for x in arrays]
    return scale * jnp.sqrt(_sum_of_squares(scaled, rank))


def _power_of_two(size: jax.Array) -> jax.Array:
    # The one at or below `size`, by which is scaled without rounding; 1 for zero, infinity and NaN. Its reciprocal is a
    # normal number too, since XLA may multiply by that in place of dividing.
    usable = jnp.isfinite(size) & (size > 0)
    exponent = jnp.frexp(jnp.where(usable, size, 1))[1]
    tiny = jnp.finfo(size.dtype).tiny
    return jnp.clip(jnp.ldexp(jnp.ones_like(size), exponent - 1), tiny, 1 / tiny)


def _sum_of_squares(arrays: list[jax.Array], rank: int) -> jax.Array:
    return functools.reduce(jnp.add, [jnp.sum(jnp.square(x), _axes(x, rank)) for x in arrays])


def _axes(array: jax.Array, rank: int) -> tuple[int, ...]:
    return tuple(range(rank, array.ndim))
