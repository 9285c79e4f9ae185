"""One vector cut into arrays, and arrays joined into one vector: two linear maps, each the transpose of the other.

XLA has no views: every leaf that is cut out of a vector is a slice with a kernel of its own, and compiling thousands of
those is what makes a flat model slow to compile. Here the leaves of one shape share a kernel (see `_hidden`).

Both maps are primitives of JAX, because nothing less keeps them fast under differentiation of any order: the transpose
of K slices would be K padded additions, and that of a concatenation K slices.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.experimental import jet
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ._mesh import broadcast_as, leading_axis, varying_alike

Shapes = tuple[tuple[int, ...], ...]

# A shape that stands at fewer places than this is cut at constant offsets. For a net of 10 leaves the conditional below
# takes as long as the kernels that it saves, and in a Hessian over 18 leaves it costs a quarter of the run time; from
# some 30 leaves on it saves up to nine tenths of the build, for about 0.13 us of run time per leaf. One hidden offset
# for 2, 8 or 16 leaves, and constant distances from it, did not stand out of the noise.
_FEW = 16


def cut(vector: jax.Array, shapes: Shapes) -> list[jax.Array]:
    """Arrays of these shapes, from the front of a vector, or of each of a stack, on; what is left over is dropped."""
    return cut_p.bind(vector, shapes=shapes) if shapes else []


def join(arrays: Sequence[jax.Array], shapes: Shapes, length: int) -> jax.Array:
    """The vector of these arrays (at least one), or stacks of such, and zeros up to the length: `cut` transposed."""
    return join_p.bind(*varying_alike(arrays), shapes=shapes, length=length)


# -- How it is done ----------------------------------------------------------------------------------------------------


def _split(vector: jax.Array, *, shapes: Shapes) -> list[jax.Array]:
    sizes = [math.prod(shape) for shape in shapes]
    rest = vector.shape[-1] - sum(sizes)
    pieces = jax.lax.split(vector, [*sizes, rest], axis=vector.ndim - 1)
    return [piece.reshape(vector.shape[:-1] + shape) for piece, shape in zip(pieces, shapes, strict=False)]


def _cut_at_run_time(vector: jax.Array, *, shapes: Shapes) -> list[jax.Array]:
    sizes = [math.prod(shape) for shape in shapes]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    counts = collections.Counter(shapes)
    often = [i for i, shape in enumerate(shapes) if counts[shape] >= _FEW]
    hidden = dict(zip(often, _hidden([starts[i] for i in often]), strict=True))
    batch = vector.shape[:-1]
    zeros = [np.uint32(0)] * len(batch)
    pieces = []
    for i, (shape, size, start) in enumerate(zip(shapes, sizes, starts, strict=True)):
        if i in hidden:
            piece = jax.lax.dynamic_slice(vector, [*zeros, hidden[i]], [*batch, size])
        else:
            piece = jax.lax.slice_in_dim(vector, start, start + size, axis=len(batch))
        pieces.append(jax.lax.reshape(piece, batch + shape))
    return pieces


def _hidden(offsets: Sequence[int]) -> Sequence[jax.Array]:
    # XLA compiles a kernel once for all operations that are the same up to their operands. Slices differ in their
    # offsets, unless these are operands too: results of another operation that is neither folded into a constant nor
    # fused into the kernel. On CPU a conditional is such an operation, and behind the barrier it is not known which
    # branch is taken until all that would simplify it has run. A barrier around the offsets alone is not enough:
    # scalar constants are fused.
    if not offsets:
        return []
    always = jax.lax.optimization_barrier(jnp.bool_(True))
    # Unsigned, or JAX would add code for negative offsets. The other branch, never taken, has a number of its own for
    # each too: XLA would make copies of one that comes several times.
    return jax.lax.cond(
        always, lambda: [np.uint32(offset) for offset in offsets], lambda: [np.uint32(offset + 1) for offset in offsets]
    )


def _join(*arrays: jax.Array, shapes: Shapes, length: int) -> jax.Array:
    batch = arrays[0].shape[: arrays[0].ndim - len(shapes[0])]
    sizes = [math.prod(shape) for shape in shapes]
    pieces = [jax.lax.reshape(array, (*batch, size)) for array, size in zip(arrays, sizes, strict=True)]
    if length > sum(sizes):
        pieces.append(jnp.zeros((*batch, length - sum(sizes)), arrays[0].dtype))
    return jax.lax.concatenate(pieces, len(batch))


# -- As primitives -----------------------------------------------------------------------------------------------------

cut_p = jax.extend.core.Primitive("cut")
cut_p.multiple_results = True
_cut_compiled = jax.jit(cut_p.bind, static_argnames="shapes")

join_p = jax.extend.core.Primitive("join")
join_p.def_impl(jax.jit(_join, static_argnames=("shapes", "length")))


@cut_p.def_impl
def _cut_now(vector: jax.Array, *, shapes: Shapes) -> list[jax.Array]:
    # With `jax.disable_jit` the compiled one would come back here.
    is_eager = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    return (_split if is_eager else _cut_compiled)(vector, shapes=shapes)


@cut_p.def_abstract_eval
def _cut_types(vector: Any, *, shapes: Shapes) -> list[Any]:
    return [_like(vector, 1, shape) for shape in shapes]


@join_p.def_abstract_eval
def _join_type(*arrays: Any, shapes: Shapes, length: int) -> Any:
    return _like(arrays[0], len(shapes[0]), (length,))


def _like(aval: Any, replaced: int, shape: tuple[int, ...]) -> Any:
    # The type of an array with other trailing axes, whole on each device; the leading ones lie as they did.
    batch = aval.ndim - replaced
    spec = PartitionSpec(*aval.sharding.spec[:batch], *[None] * len(shape))
    sharding = NamedSharding(aval.sharding.mesh, spec)
    return aval.update(shape=aval.shape[:batch] + shape, sharding=sharding, weak_type=False)


def _transpose_cut(cotangents: Sequence[Any], vector: Any, *, shapes: Shapes) -> list[Any]:
    length = vector.aval.shape[-1]
    return [join([ad.instantiate_zeros(each) for each in cotangents], shapes, length)]


def _transpose_join(cotangent: Any, *arrays: Any, shapes: Shapes, length: int) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(array.aval) if ad.is_undefined_primal(array) else None for array in arrays]
    pieces = cut(cotangent, shapes)
    return [piece if ad.is_undefined_primal(array) else None for piece, array in zip(pieces, arrays, strict=True)]


def _batch_cut(vectors: Sequence[Any], axes: Sequence[Any], *, shapes: Shapes) -> tuple[list[Any], list[int]]:
    return cut(jnp.moveaxis(vectors[0], axes[0], 0), shapes), [0] * len(shapes)


def _batch_join(arrays: Sequence[Any], axes: Sequence[Any], *, shapes: Shapes, length: int) -> tuple[Any, int]:
    stacks = [array if axis is None else jnp.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes, strict=True)]
    mapped = [stack for stack, axis in zip(stacks, axes, strict=True) if axis is not None]
    size = mapped[0].shape[0]
    along = next(filter(None, map(leading_axis, mapped)), None)
    for i, axis in enumerate(axes):
        if axis is None:
            stacks[i] = broadcast_as(stacks[i], size, along)
    return join(stacks, shapes, length), 0


def _taylor_of_cut(vectors: Sequence[Any], series: Sequence[Any], *, shapes: Shapes) -> tuple[list[Any], list[Any]]:
    terms = [cut(term, shapes) for term in series[0]]
    return cut(vectors[0], shapes), [list(each) for each in zip(*terms, strict=True)]


def _taylor_of_join(arrays: Sequence[Any], series: Sequence[Any], **params: Any) -> tuple[Any, list[Any]]:
    return join(arrays, **params), [join(terms, **params) for terms in zip(*series, strict=True)]


ad.deflinear2(cut_p, _transpose_cut)
ad.deflinear2(join_p, _transpose_join)
jet.jet_rules[cut_p] = _taylor_of_cut
jet.jet_rules[join_p] = _taylor_of_join
batching.primitive_batchers[cut_p] = _batch_cut
batching.primitive_batchers[join_p] = _batch_join
mlir.register_lowering(cut_p, mlir.lower_fun(_split, multiple_results=True))
# Run-time offsets are for CPUs, where they were measured. On a GPU the conditional would wait for the host.
mlir.register_lowering(cut_p, mlir.lower_fun(_cut_at_run_time, multiple_results=True), platform="cpu")
mlir.register_lowering(join_p, mlir.lower_fun(_join, multiple_results=False))
