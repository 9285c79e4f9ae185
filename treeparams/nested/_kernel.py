"""Products of Jacobians in the trained parameters, without the Jacobians."""

import functools
import math
from collections.abc import Callable, Hashable

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
    axis_name: Hashable = None,
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
    output at a time, so that J is never there: beside the result and the values in f itself, no array is larger than
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
        chunk: how many samples are differentiated at once, which bounds the memory; `None`: all.
        mode: as for `parameter_jacobian`; `"holomorphic"` gives `J J^H`.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
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
        ys = xs if ys is None else ys
        at_once = max(1, length_of(ys)) if chunk is None else chunk  # as many as one device has
        right = _Blocks(of, ys if axis_name is None else jax.lax.all_gather(ys, axis_name, tiled=True), at_once)

    def product(rows: list[jax.Array], columns: list[jax.Array]) -> jax.Array:
        total = jnp.zeros((left.size, right.size), dtype)
        for a, b in zip(rows, columns, strict=True):
            total += jnp.matmul(a, b.conj().T, preferred_element_type=dtype)
        return total

    def across(i: int | jax.Array) -> jax.Array:
        rows = left.rows(i)
        if left is not right:
            return _each(lambda j: product(rows, right.rows(j)), right.count)
        if left.count == 1:
            return product(rows, rows)[None]
        nothing = jnp.zeros_like(product(rows, rows))  # above the diagonal, where blocks are filled in below
        return _each(lambda j: jax.lax.cond(j <= i, lambda: product(rows, left.rows(j)), lambda: nothing), left.count)

    shape = left.samples * left.outputs, right.samples * right.outputs
    devices = 1 if axis_name is None else jax.lax.psum(1, axis_name)
    if 0 in shape:
        return jnp.zeros((devices * shape[0], shape[1]), dtype)
    blocks = _each(across, left.count)
    if left is right:
        # Block (j, i) is `J_j J_i^H`, and so block (i, j) turned and conjugated.
        number = jnp.arange(left.count)
        is_above = (number[:, None] < number[None])[:, :, None, None]
        blocks = jnp.where(is_above, blocks.conj().transpose(1, 0, 3, 2), blocks)
    # `blocks[i, j, a, b]` is of sample a of block i and sample b of block j. The number of a block is
    # `piece * outputs + output`, that of a row of the kernel `(piece * size + a) * outputs + output`. So i and j are
    # split into piece and output, and the output moves behind the sample. The samples that only fill up the last piece
    # are then the last rows and columns, and are cut off.
    pieces = blocks.reshape(-1, left.outputs, right.pieces, right.outputs, left.size, right.size)
    padded = pieces.transpose(0, 4, 1, 2, 5, 3).reshape(left.count * left.size, right.count * right.size)
    whole = padded[: shape[0], : shape[1]]
    if axis_name is None:
        return whole
    # Each device has the rows of its own samples. Summed and not gathered, their type says that all devices have the
    # same kernel.
    zeros = jnp.zeros((devices * shape[0], shape[1]), dtype)
    start = jax.lax.axis_index(axis_name) * shape[0]
    return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(zeros, whole, start, 0), axis_name)


class _Blocks:
    """The rows of a Jacobian, those of one output of some samples at a time.

    The samples are divided into `pieces` of `size` each. A block has one row for each sample of a piece, that of one
    output; its number is `piece * outputs + output`, so that the blocks of one piece follow one another.
    """

    def __init__(self, of: Outputs, samples: PyTree, chunk: int | None) -> None:
        self.samples = length_of(samples)
        self.outputs = jax.eval_shape(jax.vmap(lambda x: of(of.slots, x)), samples).shape[1]
        at_once = max(1, self.samples) if chunk is None else count_of("chunk", chunk, "samples")
        self.pieces = max(1, -(-self.samples // at_once))
        self.size = -(-self.samples // self.pieces)  # the last sample fills up the last piece
        self.count = self.pieces * self.outputs
        missing = self.pieces * self.size - self.samples
        samples = jax.tree.map(lambda leaf: replicated(jnp.asarray(leaf)), samples)
        self._samples = jax.tree.map(functools.partial(_with_last, missing), samples) if missing else samples
        self._of = of

    def rows(self, block: int | jax.Array) -> list[jax.Array]:
        """The rows of one block, a matrix for each slot."""
        of, start = self._of, block // self.outputs * self.size
        some = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, self.size), self._samples)

        def one(x: PyTree) -> PyTree:
            y, pull = jax.vjp(lambda slots: of(slots, x), of.slots)
            unit = jax.nn.one_hot(block % self.outputs, self.outputs, dtype=y.dtype)
            return pull(unit + jnp.zeros_like(y))[0]  # as y varies over devices

        leaves = jax.tree.leaves(jax.vmap(one)(some))
        return [leaf.reshape(self.size, math.prod(leaf.shape[1:])) for leaf in leaves]


def _with_last(count: int, samples: jax.Array) -> jax.Array:
    """Samples and so many more of the last one."""
    return jnp.pad(samples, ((0, count), *[(0, 0)] * (samples.ndim - 1)), mode="edge")


def _each(f: Callable[[int | jax.Array], jax.Array], count: int) -> jax.Array:
    """`f` of each number below the count; without a loop where there is one."""
    return f(0)[None] if count == 1 else jax.lax.map(f, jnp.arange(count))
