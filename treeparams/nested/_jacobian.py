"""Jacobians in the trained parameters, sample by sample, and the model that is linear in them."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact

from .._forms.makers import reals_of, vector_of
from .._slots.layout import Trainable
from .._tree.dtypes import common_dtype, is_complex
from .._tree.types import PyTree
from ._inputs import basis, check_output, length_of, mapped
from ._slots import Reals, in_reals, of_reals, own_copies, parts_of, taken

Mode = Literal["real", "complex", "holomorphic"]


def parameter_jacobian(
    f: Callable[..., Array],
    model: PyTree,
    xs: PyTree,
    *,
    chunk: int | None = None,
    mode: Mode = "real",
    trainable: Trainable = None,
) -> Inexact[Array, "samples outputs n"]:
    """The Jacobian of `f(model, x)` in the trained parameters, for each sample x.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(0.5)}
    >>> xs = jnp.array([[1.0, 0.0], [1.0, 1.0]])
    >>> nested.parameter_jacobian(lambda model, x: x @ model["w"] + model["b"], model, xs)
    Array([[[1., 1., 0.]],
    <BLANKLINE>
           [[1., 1., 1.]]], dtype=float32)

    The columns are in the order of `tp.ravel` (here `b` comes first). So a step of natural gradient is a few lines:

    >>> vector, restructure = tp.ravel(model)
    >>> rows = nested.parameter_jacobian(lambda model, x: x @ model["w"] + model["b"], model, xs)[:, 0]
    >>> kernel = rows @ rows.T + 1e-6 * jnp.eye(2)
    >>> model = restructure(vector - rows.T @ jnp.linalg.solve(kernel, jnp.array([1.5, 3.5])))
    >>> print(jnp.abs(xs @ model["w"] + model["b"]) < 1e-4)  # as the targets of this step are zeros
    [ True  True]

    Where J is only needed in `J J^T`, `kernel` takes less memory.

    Args:
        f: called as `f(model, x)` for one sample, returns an array of any shape.
        model: any pytree.
        xs: a tree of arrays with one leading axis, the samples.
        chunk: how many samples are differentiated at once. Beside the result nothing is then larger than their rows,
            `(chunk, outputs, n)`, and the values in f itself; `None`: all.
        mode: `"real"`: f is real. `"complex"`: f may be complex, and counts as twice as many real outputs, first all
            real parts, then all imaginary ones, as variational Monte Carlo needs. In both a complex parameter is a pair
            of reals. `"holomorphic"`: f and the parameters are complex, and the derivative is the complex one; f must
            be holomorphic in them, which is not checked.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        The Jacobian, shape `(samples, outputs, n)`, with one output for a scalar, and twice as many with
        `mode="complex"`. n is the length of `real_vector` - ties once, of a complex parameter all real parts and then
        all imaginary ones - and with `"holomorphic"` that of the complex vector of `tp.ravel`. It goes by rows,
        backward, unless there are fewer parameters than outputs.

    Raises:
        ValueError: `chunk` is no count; there is no such `mode`; the arrays of xs differ in length, or one has no axis;
            as `tp.layout`.
        TypeError: f returns no floating array; a complex one, with `mode="real"`; a real one, with `"holomorphic"`; a
            parameter is real, with `"holomorphic"`; as `tp.layout`.
    """
    length_of(xs)
    of = Outputs(f, model, xs, mode, trainable)
    length = of.form.blocks[0].size

    def one(x: PyTree) -> jax.Array:
        y, push = jax.linearize(lambda slots: of(slots, x), of.slots)
        if y.size > length:
            columns = jnp.eye(length, dtype=of.form.dtype)
            return jax.vmap(lambda column: push(of.cut(column)), out_axes=1)(columns).astype(of.dtype)
        pull = jax.linear_transpose(push, of.slots)
        return jax.vmap(lambda row: of.form.join(jtu.tree_leaves(pull(row)[0])))(basis(y))

    return mapped(one, xs, chunk, "samples")


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
                    f"mode='holomorphic' is of complex parameters, and {real.path!r} is {real.dtype}; freeze it, or "
                    "take mode='complex'"
                )
        self.slots = own_copies(lambda slots: jax.vmap(lambda x: self(slots, x))(batch), slots)

    def __call__(self, slots: Reals, x: PyTree) -> jax.Array:
        """The outputs of one sample."""
        y = of_reals(self._f, self._parts, x)(slots)
        check_output(y, "floating or complex")
        if self.mode == "real" and is_complex(y.dtype):
            raise TypeError(
                f"f returns {y.dtype}; mode='complex' gives the derivatives of its real and imaginary parts, "
                "mode='holomorphic' the complex one"
            )
        if self.mode == "holomorphic" and not is_complex(y.dtype):
            raise TypeError(f"mode='holomorphic' is of complex outputs, and f returns {y.dtype}; take mode='real'")
        flat = jnp.asarray(y).reshape(-1)
        return jnp.concatenate([flat.real, flat.imag]) if self.mode == "complex" else flat

    def cut(self, vector: jax.Array) -> Reals:
        """The slots of a vector, each as it varies over devices."""
        slots = jtu.tree_unflatten(jtu.tree_structure(self.slots), self.form.cut(vector))
        return jax.tree.map(lambda cut, slot: cut + jnp.zeros_like(slot), slots, self.slots)


def linearised(f: Callable[..., PyTree], model: PyTree, *, trainable: Trainable = None) -> Callable[..., PyTree]:
    """`f` near the parameters of a model: its value plus its derivative along a direction.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0])}
    >>> near = nested.linearised(lambda model, x: jnp.sum(model["w"] ** 2) * x, model)
    >>> near(jnp.array([0.5, 0.0]), 10.0)  # 10 (5 + 2 * 1 * 0.5)
    Array(60., dtype=float32)

    With it the Laplace approximation has predictions in closed form, and training along the tangent (the lazy regime of
    Jacot et al., 2018) is convex in the direction where the loss is in the outputs.

    Args:
        f: called as `f(model, *args)`, returns an array or a tree of arrays; those not floating stay as they are.
        model: any pytree; the parameters to start from.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        A function `(direction, *args)`, where the direction is a tangent as for `hvp`: a vector of `tp.ravel`, one of
        `real_vector`, or a tree. It returns a tree like that of f.

    Raises:
        ValueError: as `tp.layout`; when called: the direction does not fit, as for `hvp`.
        TypeError: as `tp.layout`.
    """
    parts = parts_of(model, trainable)

    def near(direction: PyTree, *args: object) -> PyTree:
        along = taken(parts.layout, direction)
        value, change = jax.jvp(of_reals(f, parts, *args), (in_reals(parts.slots),), (along,))
        return jax.tree.map(lambda y, dy: y if dy.dtype == jax.dtypes.float0 else y + dy, value, change)

    return near
