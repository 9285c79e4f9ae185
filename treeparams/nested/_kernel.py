"""Products of Jacobians in the trained parameters, without the Jacobians."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._forms.mesh import replicated
from .._slots.layout import Trainable
from .._tree.dtypes import widened
from .._tree.text import count_of
from .._tree.types import PyTree
from ._inputs import length_of
from ._jacobian import Mode, Outputs


def kernel(
    f: Callable[..., Array],
    model: PyTree,
    xs: PyTree,
    ys: PyTree | None = None,
    *,
    chunk: int | None = None,
    mode: Mode = "real",
    trainable: Trainable = None,
    axis_name: Any = None,
) -> Inexact[Array, "rows columns"]:
    """The product `J J^T` of Jacobians in the trained parameters: the empirical tangent kernel.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(0.5)}
    >>> f = lambda model, x: x @ model["w"] + model["b"]
    >>> nested.kernel(f, model, jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    Array([[2., 2.],
           [2., 3.]], dtype=float32)

    It is the matrix of MinSR (Chen and Heyl, 2024), of Gaussian processes from networks (Jacot et al., 2018) and of
    Gauss-Newton steps with fewer outputs than parameters. It is summed parameter by parameter, for the samples of one
    output at a time, so that J is never there: beside the result and what f itself computes, no array is larger than
    samples x the largest parameter. The price: the backward pass is done anew for each pair of blocks of rows, a block
    being one output of all samples, or of a chunk. Beside the products of dense weights that is little, but not where
    samples or chunks are few, or f is long (convolutions): if J fits into memory, `parameter_jacobian` is faster there.

    Call it within `jax.jit`: its loops are compiled anew at each call outside. On a mesh with explicit axes, samples
    and parameters are first brought together on each device; to share the work, take `axis_name`.

    Args:
        f: called as `f(model, x)` for one sample, returns an array of any shape.
        model: any pytree.
        xs: a tree of arrays with one leading axis, the samples.
        ys: the samples of the second Jacobian; `None`: those of the first, of which then one triangle is computed.
        chunk: how many samples are differentiated at once: for samples read chunk in what is said above; `None`: all.
        mode: as for `parameter_jacobian`; `"holomorphic"` gives `J J^H`.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        axis_name: the axis of a mesh along which the samples lie, inside of `jax.shard_map`. Each device passes its own
            samples, xs and ys, and gets the kernel of all.

    Returns:
        The kernel, shape `(samples * outputs, samples_y * outputs)`: sample by sample, with the outputs of each as the
        rows of `parameter_jacobian`. It is summed and returned in at least float32, with matrix products as precise as
        `jax.default_matmul_precision` says.

    Raises:
        ValueError: as `parameter_jacobian`.
        TypeError: as `parameter_jacobian`.
    """
    of = Outputs(f, model, xs, mode, trainable)
    of.slots = jax.tree.map(replicated, of.slots)  # rows of all samples are multiplied with one another
    dtype = widened(of.dtype)
    left = right = _Blocks(of, xs, chunk)
    if ys is not None or axis_name is not None:
        own = xs if ys is None else ys
        gather = lambda leaf: leaf if axis_name is None else jax.lax.all_gather(leaf, axis_name, tiled=True)
        right = _Blocks(of, jax.tree.map(gather, own), max(1, length_of(own)) if chunk is None else chunk)

    def product(rows: list[jax.Array], columns: list[jax.Array]) -> jax.Array:
        total = jnp.zeros((left.size, right.size), dtype)
        for a, b in zip(rows, columns, strict=True):
            total += jnp.matmul(a, b.conj().T, preferred_element_type=dtype)
        return total

    def across(i: Any) -> jax.Array:
        rows = left.rows(i)
        if left is not right:
            return _each(lambda j: product(rows, right.rows(j)), right.count)
        if left.count == 1:
            return product(rows, rows)[None]
        nothing = jnp.zeros_like(product(rows, rows))  # what is above the diagonal is that below it, turned
        return _each(lambda j: jax.lax.cond(j <= i, lambda: product(rows, left.rows(j)), lambda: nothing), left.count)

    shape = left.samples * left.outputs, right.samples * right.outputs
    devices = 1 if axis_name is None else jax.lax.psum(1, axis_name)
    if 0 in shape:
        return jnp.zeros((devices * shape[0], shape[1]), dtype)
    blocks = _each(across, left.count)
    if left is right:
        number = jnp.arange(left.count)
        is_above = (number[:, None] < number[None])[:, :, None, None]
        blocks = jnp.where(is_above, blocks.conj().transpose(1, 0, 3, 2), blocks)
    # From (piece, output) pairs of blocks to rows and columns that go sample by sample, outputs within.
    pieces = blocks.reshape(-1, left.outputs, right.pieces, right.outputs, left.size, right.size)
    padded = pieces.transpose(0, 4, 1, 2, 5, 3).reshape(left.count * left.size, right.count * right.size)
    whole = padded[: shape[0], : shape[1]]
    if axis_name is None:
        return whole
    # Summed and not gathered: so the type says that it is the same on all devices.
    place = jax.lax.axis_index(axis_name)
    zeros = jnp.zeros((devices * shape[0], shape[1]), dtype)
    return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(zeros, whole, place * shape[0], 0), axis_name)


class _Blocks:
    """The rows of a Jacobian, those of one output of some samples at a time.

    There are `pieces` of the samples, each of `size`, and for each the blocks of all outputs follow one another.
    """

    def __init__(self, of: Outputs, samples: PyTree, chunk: int | None) -> None:
        self.samples = length_of(samples)
        self.outputs = jax.eval_shape(jax.vmap(lambda x: of(of.slots, x)), samples).shape[1]
        at_once = max(1, self.samples) if chunk is None else count_of("chunk", chunk, "samples")
        self.pieces = max(1, -(-self.samples // at_once))
        self.size = -(-self.samples // self.pieces)  # of each; the last sample fills up what is missing
        self.count = self.pieces * self.outputs
        missing = self.pieces * self.size - self.samples
        pad = lambda leaf: jnp.pad(leaf, ((0, missing), *[(0, 0)] * (jnp.ndim(leaf) - 1)), mode="edge")
        samples = jax.tree.map(lambda leaf: replicated(jnp.asarray(leaf)), samples)
        self._samples = jax.tree.map(pad, samples) if missing else samples
        self._of = of

    def rows(self, block: Any) -> list[jax.Array]:
        """The rows of one block, a matrix for each slot."""
        of, start = self._of, block // self.outputs * self.size
        some = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, self.size), self._samples)

        def one(x: Any) -> PyTree:
            y, pull = jax.vjp(lambda slots: of(slots, x), of.slots)
            unit = jax.nn.one_hot(block % self.outputs, self.outputs, dtype=y.dtype)
            return pull(unit + jnp.zeros_like(y))[0]  # as y varies over devices

        leaves = jax.tree.leaves(jax.vmap(one)(some))
        return [leaf.reshape(self.size, math.prod(leaf.shape[1:])) for leaf in leaves]


def _each(f: Callable[[Any], jax.Array], count: int) -> jax.Array:
    """`f` of each number below the count; without a loop where there is one."""
    return f(0)[None] if count == 1 else jax.lax.map(f, jnp.arange(count))
