"""Products of Jacobians in the trained parameters, without the Jacobians."""

import math
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact

from .._forms.mesh import replicated
from .._slots.layout import Trainable
from .._tree.dtypes import widened
from .._tree.text import count_of
from .._tree.types import PyTree
from ._jacobian import Mode, Outputs
from ._sweeps import basis, length_of, mapped


def kernel(
    f: Callable[..., Array],
    *,
    axis_name: Hashable = None,
    chunk: int | None = None,
    mode: Mode = "real",
    trainable: Trainable = None,
) -> Callable[..., Inexact[Array, "rows columns"]]:
    """Computes the product `J J^T` of Jacobians in the trained parameters: the empirical tangent kernel.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(0.5)}
    >>> f = lambda model, x: x @ model["w"] + model["b"]
    >>> nested.kernel(f)(model, jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    Array([[2., 2.],
           [2., 3.]], dtype=float32)

    It is the matrix of MinSR (Chen and Heyl, 2024), of Gaussian processes from networks (Jacot et al., 2018) and of
    Gauss-Newton steps with fewer outputs than parameters. It is summed parameter by parameter. Up to 2**26 elements of
    J, all rows are computed at once. A larger J is never in memory: it is computed in blocks of as many rows as there
    are samples, or of `chunk` rows, and beside the result and the values in f itself no array is larger than these rows
    of the largest parameter. The price: the backward pass is repeated for each pair of blocks. That is little beside
    the products of dense weights, and much for convolutions.

    Call it within `jax.jit`: its loops are compiled anew at each call outside. On a mesh with explicit axes, samples
    and parameters are first brought together on each device; to share the work, use `axis_name`.

    Args:
        f: called as `f(model, x)` for one sample, returns an array of any shape.
        axis_name: the axis of a mesh along which the samples lie, inside of `jax.shard_map`. Each device passes its own
            samples, xs and ys, and gets the kernel of all.
        chunk: how many rows of J are computed at once, each of one output of one sample, which bounds the memory;
            `None`: all, if J has at most 2**26 elements, else as many as there are samples.
        mode: as for `parameter_jacobian`; `"holomorphic"` gives `J J^H`.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        A function of `(model, xs, ys)`, where xs is a tree of arrays with one leading axis, the samples; ys are those
        of the second Jacobian. If you leave them out, they are those of the first, and only one triangle is computed.

        It returns the kernel, shape `(samples * outputs, samples_y * outputs)`: sample by sample, with the outputs of
        each as the rows of `parameter_jacobian`. It is summed and returned in at least float32, with matrix products as
        precise as `jax.default_matmul_precision` says.

    Raises:
        ValueError: when called: as `parameter_jacobian`.
        TypeError: when called: as `parameter_jacobian`.
    """

    def matrix(model: PyTree, xs: PyTree, ys: PyTree | None = None) -> jax.Array:
        samples = length_of(xs)
        of = Outputs(f, model, xs, mode, trainable)
        of.slots = jax.tree.map(replicated, of.slots)  # rows of all samples are multiplied with one another
        size = None if chunk is None else count_of("chunk", chunk, "rows")
        left = right = _Rows(of, xs, size, samples)
        if ys is not None or axis_name is not None:
            ys = xs if ys is None else ys
            every = ys if axis_name is None else jax.lax.all_gather(ys, axis_name, tiled=True)
            right = _Rows(of, every, size, length_of(ys))  # as many at once as one device has
        product = _product(left, right, widened(of.dtype))
        return product if axis_name is None else _of_all_devices(product, axis_name)

    return matrix


_ALL = 2**26  # elements of a Jacobian that may be there as a whole, 256 MiB of float32


class _Rows:
    """The rows of a Jacobian, sample by sample with the outputs of each: in blocks, of which the last repeats a row."""

    def __init__(self, of: Outputs, samples: PyTree, at_once: int | None, unless_all: int) -> None:
        self.outputs = jax.eval_shape(jax.vmap(lambda x: of(of.slots, x)), samples).shape[1]
        self.count = length_of(samples) * self.outputs
        is_small = self.count * sum(leaf.size for leaf in jax.tree.leaves(of.slots)) <= _ALL
        most = at_once or (self.count if is_small else unless_all)
        self.blocks = max(1, -(-self.count // max(1, most)))
        self.size = -(-self.count // self.blocks)
        self._samples = jax.tree.map(lambda leaf: replicated(jnp.asarray(leaf)), samples)
        self._of = of

    def block(self, number: int | jax.Array) -> list[jax.Array]:
        """Returns the rows of one block, a matrix for each slot."""
        if self.blocks == 1:  # one forward pass for all outputs of a sample
            leaves = jax.tree.leaves(jax.vmap(self._all_rows)(self._samples))
            return [leaf.reshape(self.count, math.prod(leaf.shape[2:])) for leaf in leaves]
        rows = jnp.minimum(number * self.size + jnp.arange(self.size), self.count - 1)
        leaves = jax.tree.leaves(jax.vmap(self._row)(rows))
        return [leaf.reshape(self.size, math.prod(leaf.shape[1:])) for leaf in leaves]

    def _row(self, number: jax.Array) -> PyTree:
        sample, output = number // self.outputs, number % self.outputs
        x = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, sample, keepdims=False), self._samples)
        y, pull = self._pulled(x)
        return pull(jax.nn.one_hot(output, self.outputs, dtype=y.dtype) + jnp.zeros_like(y))[0]  # varies as y does

    def _all_rows(self, x: PyTree) -> PyTree:
        y, pull = self._pulled(x)
        return mapped(lambda direction: pull(direction)[0], basis(y), None, "rows")

    def _pulled(self, x: PyTree) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
        """Returns the outputs of one sample, and their derivative backward."""
        return jax.vjp(lambda slots: self._of(slots, x), self._of.slots)


def _product(left: _Rows, right: _Rows, dtype: np.dtype) -> jax.Array:
    """Returns `J J^H` of these rows, block by block."""
    if left.count == 0 or right.count == 0:
        return jnp.zeros((left.count, right.count), dtype)

    def product(rows: list[jax.Array], others: list[jax.Array]) -> jax.Array:
        total = jnp.zeros((left.size, right.size), dtype)
        for a, b in zip(rows, others, strict=True):
            total += jnp.matmul(a, b.conj().T, preferred_element_type=dtype)
        return total

    def across(i: int | jax.Array) -> jax.Array:
        rows = left.block(i)
        if left is not right:
            return _each(lambda j: product(rows, right.block(j)), right.blocks)
        if left.blocks == 1:
            return product(rows, rows)[None]
        nothing = jnp.zeros_like(product(rows, rows))  # above the diagonal, where blocks are filled in below
        return _each(lambda j: jax.lax.cond(j <= i, lambda: product(rows, left.block(j)), lambda: nothing), left.blocks)

    blocks = _each(across, left.blocks)
    if left is right:
        # Block (j, i) is `J_j J_i^H`, and so block (i, j) turned and conjugated.
        number = jnp.arange(left.blocks)
        is_above = (number[:, None] < number[None])[:, :, None, None]
        blocks = jnp.where(is_above, blocks.conj().transpose(1, 0, 3, 2), blocks)
    whole = blocks.transpose(0, 2, 1, 3).reshape(left.blocks * left.size, right.blocks * right.size)
    return whole[: left.count, : right.count]


def _of_all_devices(product: jax.Array, axis_name: Hashable) -> jax.Array:
    """Returns the rows of all devices, where each device has those of its samples."""
    # Summed and not gathered, their type says that all devices have the same kernel.
    count, width = product.shape
    zeros = jnp.zeros((jax.lax.psum(1, axis_name) * count, width), product.dtype)
    start = jax.lax.axis_index(axis_name) * count
    return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(zeros, product, start, 0), axis_name)


def _each(f: Callable[[int | jax.Array], jax.Array], count: int) -> jax.Array:
    """Returns `f` of each number below the count; without a loop if there is one."""
    return f(0)[None] if count == 1 else jax.lax.map(f, jnp.arange(count))
