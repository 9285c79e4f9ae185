"""Jacobians in the trained parameters, sample by sample, their products without them, and the model linear in them."""

import math
from collections.abc import Callable, Hashable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact

from .._forms.form import Form
from .._forms.mesh import replicated, result_varies, vary
from .._slots.layout import Trainable
from .._tree.text import count_of
from .._tree.types import PyTree, common_dtype, is_complex, widened
from ._reals import (
    Reals,
    array_parts,
    basis,
    form_of_reals,
    in_reals,
    in_sweeps,
    mapped,
    of_reals,
    output,
    result,
    scalar,
    taken,
)

Mode = Literal["real", "complex", "holomorphic"]
_ONE_SAMPLE = "one sample (of a function of a batch make lambda model, x: f(model, x[None])[0])"


def parameter_jacobian(
    f: Callable[..., Array], trainable: Trainable = None, *, chunk: int | None = None, mode: Mode = "real"
) -> Callable[..., Inexact[Array, "samples outputs n"]]:
    """Computes the Jacobian of `f(model, x)`, for one sample x, in the trained parameters, at each sample of a batch.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(0.5)}
    >>> xs = jnp.array([[1.0, 0.0], [1.0, 1.0]])
    >>> jacobian = nested.parameter_jacobian(lambda model, x: x @ model["w"] + model["b"])
    >>> jacobian(model, xs)
    Array([[[1., 1., 0.]],
    <BLANKLINE>
           [[1., 1., 1.]]], dtype=float32)

    The columns are in the order of `tp.ravel` (here `b` comes first). So you can write a step of natural gradient in a
    few lines:

    >>> vector, restructure = tp.ravel(model)
    >>> rows = jacobian(model, xs)[:, 0]
    >>> kernel = rows @ rows.T + 1e-6 * jnp.eye(2)
    >>> model = restructure(vector - rows.T @ jnp.linalg.solve(kernel, jnp.array([1.5, 3.5])))
    >>> print(jnp.abs(xs @ model["w"] + model["b"]) < 1e-4)  # as the targets of this step are zeros
    [ True  True]

    If you only need J in `J J^T`, `kernel` takes less memory.

    Args:
        f: called as `f(model, x)` for one sample, returns an array of any shape.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        chunk: how many samples are differentiated at once. Beside the result, nothing is then larger than their rows,
            `(chunk, outputs, n)`, and the values in f itself; `None`: all.
        mode: `"real"`: f is real. `"complex"`: f may be complex, and counts as twice as many real outputs, first all
            real parts, then all imaginary ones, as variational Monte Carlo needs. In both modes a complex parameter is
            a pair of reals. `"holomorphic"`: f and the parameters are complex, and the derivative is the complex one; f
            must be holomorphic in them, which is not checked.

    Returns:
        A function of `(model, xs)`, with xs a tree of arrays with one leading axis, the samples. It returns the
        Jacobian, shape `(samples, outputs, n)`, with one output for a scalar, and twice as many with `mode="complex"`.
        n is the length of `real_vector` - ties once, of a complex parameter all real parts and then all imaginary ones
        - and with `"holomorphic"` that of the complex vector of `tp.ravel`. It goes by rows, backward, unless there are
        fewer parameters than outputs.

    Raises:
        ValueError: when called: `chunk` is no count; there is no such `mode`; the arrays of xs differ in length, or one
            has no axis; as `tp.layout`.
        TypeError: when called: f returns no floating array; a complex one, with `mode="real"`; a real one, with
            `"holomorphic"`; a parameter is real, with `"holomorphic"`; as `tp.layout`.
    """

    def jacobian(model: PyTree, xs: PyTree) -> jax.Array:
        _length_of(xs)
        of = _Outputs(f, model, xs, mode, trainable)
        return mapped(of.rows, xs, chunk, "samples")

    return jacobian


def _length_of(batch: PyTree) -> int:
    """Returns how many samples there are in a tree of arrays with one leading axis in common."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(f"expected a batch of arrays with one leading axis in common, got shapes {shapes}")
    return shapes[0][0]


def _own_copies(f: Callable[[Any], Any], slots: Reals) -> Reals:
    """Returns the slots as types that vary over devices as `f(slots)` does, inside of a `jax.shard_map`.

    If slots are the same on all devices, JAX sums each gradient over the devices. The gradient of one example must be
    of that example alone.
    """
    axes = result_varies(f, slots)
    return jax.tree.map(lambda leaf: vary(leaf, axes), slots)


class _Outputs:
    """`f(model, x)` as a vector for each sample, and the slots that it is differentiated in: in reals, or complex."""

    def __init__(self, f: Callable[..., Any], model: PyTree, batch: PyTree, mode: Mode, trainable: Trainable) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be 'real', 'complex' or 'holomorphic', got {mode!r}")
        parts = array_parts(model, trainable)
        self.mode, self._f, self._parts = mode, f, parts
        slots, self.form = in_reals(parts.slots), form_of_reals(parts.layout)
        self.dtype = self.form.dtype
        if mode == "holomorphic":
            slots, self.form = parts.slots, Form.vector(parts.layout)
            self.dtype = common_dtype([self.form.dtype, jnp.complex64])  # also where there are no slots
            real = next((slot for slot in parts.layout.slots if not is_complex(slot.dtype)), None)
            if real is not None:
                raise TypeError(
                    f"mode='holomorphic' needs complex parameters, and {real.path!r} is {real.dtype}; freeze it, or "
                    "use mode='complex'"
                )
        self.slots = _own_copies(lambda slots: jax.vmap(lambda x: self(slots, x))(batch), slots)

    def __call__(self, slots: Reals, x: PyTree) -> jax.Array:
        """Returns the outputs of one sample."""
        y = output(of_reals(self._f, self._parts, x, given=_ONE_SAMPLE)(slots), "floating or complex")
        if self.mode == "real" and is_complex(y.dtype):
            raise TypeError(
                f"f returns {y.dtype}; mode='complex' gives the derivatives of its real and imaginary parts, "
                "mode='holomorphic' the complex one"
            )
        if self.mode == "holomorphic" and not is_complex(y.dtype):
            raise TypeError(f"mode='holomorphic' needs complex outputs, and f returns {y.dtype}; use mode='real'")
        flat = y.reshape(-1)
        return jnp.concatenate([flat.real, flat.imag]) if self.mode == "complex" else flat

    def rows(self, x: PyTree) -> jax.Array:
        """Returns the Jacobian of one sample, a row for each output."""
        vector, treedef = self.form.join(jax.tree.leaves(self.slots)), jax.tree.structure(self.slots)
        of_vector = lambda vector: self(treedef.unflatten(self.form.cut(vector)), x)
        return in_sweeps(of_vector, vector, None).astype(self.dtype)


def linearised(f: Callable[..., PyTree], trainable: Trainable = None) -> Callable[..., PyTree]:
    """Linearises `f`, of a sample or a batch, near the parameters of a model: value plus derivative along a direction.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0])}
    >>> near = nested.linearised(lambda model, x: jnp.sum(model["w"] ** 2) * x)
    >>> near(model, jnp.array([0.5, 0.0]), 10.0)  # 10 (5 + 2 * 1 * 0.5)
    Array(60., dtype=float32)

    With it you get the predictions of a Laplace approximation in closed form. Training along the tangent (the lazy
    regime of Jacot et al., 2018) is convex in the direction if the loss is convex in the outputs.

    Args:
        f: called as `f(model, *args)`, returns an array or a tree of arrays; those not floating stay as they are.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        A function of `(model, direction, *args)`, where the model holds the parameters to start from, and the direction
        is a tangent as for `hvp`: a vector of `tp.ravel`, one of `real_vector`, or a tree. It returns a tree like that
        of f.

    Raises:
        ValueError: when called: the direction does not fit, as for `hvp`; as `tp.layout`.
        TypeError: when called: as `tp.layout`.
    """

    def near(model: PyTree, direction: PyTree, *args: object) -> PyTree:
        parts = array_parts(model, trainable)
        along = taken(parts.layout, direction)
        value, change = jax.jvp(of_reals(f, parts, *args), (in_reals(parts.slots),), (along,))
        return jax.tree.map(lambda y, dy: y if dy.dtype == jax.dtypes.float0 else y + dy, value, change)

    return near


def per_example_gradients(
    f: Callable[..., Array], trainable: Trainable = None, *, chunk: int | None = None, flat: bool = False
) -> Callable[..., PyTree]:
    """Computes the gradient of a loss `f(model, *example)`, for one example, at each example of a batch.

    Private training, influence functions and the Fisher matrix need them.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0])}
    >>> xs, ys = jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([0.0, 1.0])
    >>> loss = lambda model, x, y: (x @ model["w"] - y) ** 2
    >>> nested.per_example_gradients(loss, flat=True)(model, xs, ys)
    Array([[2., 0.],
           [4., 4.]], dtype=float32)

    If you only want the norms, square and sum within the map: compiled, XLA then keeps no gradient. That takes an
    eightieth of the memory for a net of four layers.

    >>> gradient = tp.grad(loss)
    >>> wide = lambda *example: [leaf.astype(float) for leaf in jax.tree.leaves(gradient(model, *example))]
    >>> square = lambda *example: sum(jnp.sum(leaf**2) for leaf in wide(*example))
    >>> jnp.sqrt(jax.jit(jax.vmap(square))(xs, ys))
    Array([2.      , 5.656854], dtype=float32)

    Args:
        f: called as `f(model, *example)`, returns a scalar.
        trainable: as for `hvp`.
        chunk: how many examples are differentiated at once, which bounds the memory of the backward pass; `None`: all.
        flat: whether to return a matrix.

    Returns:
        A function of `(model, *batch)`, trees of arrays with one leading axis, the examples. It returns the canonical
        tree of gradients with a leading axis, `None` where nothing is trained; or the matrix, shape `(batch, n)` with n
        the length of the vector. For complex parameters they are as of `tp.grad`.

    Raises:
        ValueError: when called: the arrays of the batch differ in length, or one has no axis; `chunk` is no count; as
            `tp.layout`.
        TypeError: when called: f returns no real scalar; as `tp.layout`.
    """

    def gradients(model: PyTree, *batch: PyTree) -> PyTree:
        _length_of(batch)
        parts = array_parts(model, trainable)
        joined = Form.vector(parts.layout).join if flat else parts.canonical

        def of(slots: tuple[jax.Array, ...], example: tuple[PyTree, ...]) -> jax.Array:
            return scalar(result(f, _ONE_SAMPLE, parts.model(slots), *example))

        slots = _own_copies(lambda slots: jax.vmap(of, (None, 0))(slots, batch), parts.slots)
        return mapped(lambda example: joined(jax.grad(of)(slots, example)), batch, chunk, "examples")

    return gradients


# -- Products of Jacobians, without the Jacobians ----------------------------------------------------------------------


def kernel(
    f: Callable[..., Array],
    trainable: Trainable = None,
    *,
    axis_name: Hashable = None,
    chunk: int | None = None,
    mode: Mode = "real",
) -> Callable[..., Inexact[Array, "rows columns"]]:
    """Computes `J J^T` over a batch, the empirical tangent kernel, of `f(model, x)` for one sample x.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(0.5)}
    >>> f = lambda model, x: x @ model["w"] + model["b"]
    >>> nested.kernel(f)(model, jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    Array([[2., 2.],
           [2., 3.]], dtype=float32)

    J is the Jacobian in the trained parameters. It is the matrix of MinSR (Chen and Heyl, 2024), of Gaussian processes
    from networks (Jacot et al., 2018) and of Gauss-Newton steps with fewer outputs than parameters. It is summed
    parameter by parameter. Up to 2**26 elements of J, all rows are computed at once. A larger J is never in memory: it
    is computed in blocks of as many rows as there are samples, or of `chunk` rows, and beside the result and the values
    in f itself no array is larger than these rows of the largest parameter. The price: the backward pass is repeated
    for each pair of blocks. That is little beside the products of dense weights, and much for convolutions.

    Call it within `jax.jit`: its loops are compiled anew at each call outside. On a mesh with explicit axes, samples
    and parameters are first brought together on each device; to share the work, use `axis_name`.

    Args:
        f: called as `f(model, x)` for one sample, returns an array of any shape.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        axis_name: the axis of a mesh along which the samples lie, inside of `jax.shard_map`. Each device passes its own
            samples, xs and ys, and gets the kernel of all.
        chunk: how many rows of J are computed at once, each of one output of one sample, which bounds the memory;
            `None`: all, if J has at most 2**26 elements, else as many as there are samples.
        mode: as for `parameter_jacobian`; `"holomorphic"` gives `J J^H`.

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
        samples = _length_of(xs)
        of = _Outputs(f, model, xs, mode, trainable)
        of.slots = jax.tree.map(replicated, of.slots)  # rows of all samples are multiplied with one another
        size = None if chunk is None else count_of("chunk", chunk, "rows")
        left = right = _JacobianRows(of, xs, size, samples)
        if ys is not None or axis_name is not None:
            ys = xs if ys is None else ys
            every = ys if axis_name is None else jax.lax.all_gather(ys, axis_name, tiled=True)
            right = _JacobianRows(of, every, size, _length_of(ys))  # as many at once as one device has
        product = _kernel_of(left, right, widened(of.dtype))
        return product if axis_name is None else _of_all_devices(product, axis_name)

    return matrix


_ALL = 2**26  # elements of a Jacobian that may be there as a whole, 256 MiB of float32


class _JacobianRows:
    """The rows of a Jacobian, sample by sample with the outputs of each: in blocks, of which the last repeats a row."""

    def __init__(self, of: _Outputs, samples: PyTree, at_once: int | None, unless_all: int) -> None:
        self.outputs = jax.eval_shape(jax.vmap(lambda x: of(of.slots, x)), samples).shape[1]
        self.count = _length_of(samples) * self.outputs
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


def _kernel_of(left: _JacobianRows, right: _JacobianRows, dtype: np.dtype) -> jax.Array:
    """Returns `J J^H` of these rows, block by block."""
    if left.count == 0 or right.count == 0:
        return jnp.zeros((left.count, right.count), dtype)

    def product(rows: list[jax.Array], others: list[jax.Array]) -> jax.Array:
        each = (jnp.matmul(a, b.conj().T, preferred_element_type=dtype) for a, b in zip(rows, others, strict=True))
        return sum(each, jnp.zeros((left.size, right.size), dtype))

    def across(i: int | jax.Array) -> jax.Array:
        rows = left.block(i)
        if left is not right:
            return _of_each(lambda j: product(rows, right.block(j)), right.blocks)
        if left.blocks == 1:
            return product(rows, rows)[None]
        nothing = jnp.zeros_like(product(rows, rows))  # above the diagonal, where blocks are filled in below
        return _of_each(
            lambda j: jax.lax.cond(j <= i, lambda: product(rows, left.block(j)), lambda: nothing), left.blocks
        )

    blocks = _of_each(across, left.blocks)
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


def _of_each(f: Callable[[int | jax.Array], jax.Array], count: int) -> jax.Array:
    """Returns `f` of each number below the count; without a loop if there is one."""
    return f(0)[None] if count == 1 else jax.lax.map(f, jnp.arange(count))
