"""Jacobians and gradients in the trained parameters, sample by sample, and the model that is linear in them."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._forms.makers import reals_of, vector_of
from .._slots.layout import Trainable
from .._tree.dtypes import common_dtype, is_complex
from .._tree.types import PyTree
from ._slots import Reals, in_reals, of_reals, own_copies, parts_of, taken
from ._sweeps import in_sweeps, length_of, mapped, output

Mode = Literal["real", "complex", "holomorphic"]


def parameter_jacobian(
    f: Callable[..., Array], *, chunk: int | None = None, mode: Mode = "real", trainable: Trainable = None
) -> Callable[..., Inexact[Array, "samples outputs n"]]:
    """Computes the Jacobian of `f(model, x)` in the trained parameters, for each sample x.

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
        chunk: how many samples are differentiated at once. Beside the result, nothing is then larger than their rows,
            `(chunk, outputs, n)`, and the values in f itself; `None`: all.
        mode: `"real"`: f is real. `"complex"`: f may be complex, and counts as twice as many real outputs, first all
            real parts, then all imaginary ones, as variational Monte Carlo needs. In both modes a complex parameter is
            a pair of reals. `"holomorphic"`: f and the parameters are complex, and the derivative is the complex one; f
            must be holomorphic in them, which is not checked.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

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
        length_of(xs)
        of = Outputs(f, model, xs, mode, trainable)
        return mapped(of.rows, xs, chunk, "samples")

    return jacobian


class Outputs:
    """`f(model, x)` as a vector for each sample, and the slots that it is differentiated in: in reals, or complex."""

    def __init__(self, f: Callable[..., Any], model: PyTree, batch: PyTree, mode: Mode, trainable: Trainable) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be 'real', 'complex' or 'holomorphic', got {mode!r}")
        parts = parts_of(model, trainable)
        self.mode, self._f, self._parts = mode, f, parts
        slots, self.form = in_reals(parts.slots), reals_of(parts.layout)
        self.dtype = self.form.dtype
        if mode == "holomorphic":
            slots, self.form = parts.slots, vector_of(parts.layout)
            self.dtype = common_dtype([self.form.dtype, jnp.complex64])  # also where there are no slots
            real = next((slot for slot in parts.layout.slots if not is_complex(slot.dtype)), None)
            if real is not None:
                raise TypeError(
                    f"mode='holomorphic' needs complex parameters, and {real.path!r} is {real.dtype}; freeze it, or "
                    "use mode='complex'"
                )
        self.slots = own_copies(lambda slots: jax.vmap(lambda x: self(slots, x))(batch), slots)

    def __call__(self, slots: Reals, x: PyTree) -> jax.Array:
        """Returns the outputs of one sample."""
        y = output(of_reals(self._f, self._parts, x)(slots), "floating or complex")
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


def linearised(f: Callable[..., PyTree], *, trainable: Trainable = None) -> Callable[..., PyTree]:
    """Linearises `f` near the parameters of a model: its value plus its derivative along a direction.

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
        parts = parts_of(model, trainable)
        along = taken(parts.layout, direction)
        value, change = jax.jvp(of_reals(f, parts, *args), (in_reals(parts.slots),), (along,))
        return jax.tree.map(lambda y, dy: y if dy.dtype == jax.dtypes.float0 else y + dy, value, change)

    return near


def per_example_gradients(
    f: Callable[..., Array], *, chunk: int | None = None, flat: bool = False, trainable: Trainable = None
) -> Callable[..., PyTree]:
    """Computes the gradient of a loss for each example of a batch: for private training, influence, the Fisher matrix.

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
        chunk: how many examples are differentiated at once, which bounds the memory of the backward pass; `None`: all.
        flat: whether to return a matrix.
        trainable: as for `hvp`.

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
        length_of(batch)
        parts = parts_of(model, trainable)
        joined = vector_of(parts.layout).join if flat else parts.canonical

        def of(slots: tuple[jax.Array, ...], example: tuple[PyTree, ...]) -> jax.Array:
            return f(parts.model(slots), *example)

        slots = own_copies(lambda slots: jax.vmap(of, (None, 0))(slots, batch), parts.slots)
        return mapped(lambda example: joined(jax.grad(of)(slots, example)), batch, chunk, "examples")

    return gradients
