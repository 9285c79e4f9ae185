"""Derivatives of a model's output in its input, for losses that contain them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from .._tree.recognise import structure_of
from .._tree.text import count_of, describe
from .._tree.types import PyTree
from ._sweeps import in_sweeps, output, real_array

_ROUNDING = 16  # units of the dtype that a sample's output may differ by; in most programs it differs by nothing


def gradient(f: Callable[..., Array]) -> Callable[..., PyTree]:
    """Computes the gradient of `f(model, x, *args)` in x, for use in a loss.

    The gradient of that loss reaches all parameters of the model, arrays that f captured, x and the other arguments.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> energy = lambda model, x: model["k"] * jnp.sum(x**2)
    >>> force = nested.gradient(energy)
    >>> model, x = {"k": jnp.array(2.0), "frozen": jnp.ones(1)}, jnp.array([1.0, 3.0])
    >>> force(model, x)
    Array([ 4., 12.], dtype=float32)
    >>> loss = lambda model: jnp.sum(force(model, x) ** 2)  # 4 k^2 x^2
    >>> tp.grad(loss, "k")(model)["k"]
    Array(160., dtype=float32, weak_type=True)

    It is `jax.grad` in x, so the gradient of the loss is reverse over reverse; for the cost of other orders see "A
    derivative in a loss" in the documentation. The model may be a bound method of a Module or a
    `jax.tree_util.Partial`, which carry their parameters: `nested.gradient(lambda energy, x: energy(x))(net.energy,
    x)`. It works on one point; `jax.vmap(force, (None, 0))` takes many, or use `batched_jacobian` if you only have f
    for a batch.

    Args:
        f: called as `f(model, x, *args)`, once, returns a scalar.

    Returns:
        A function of `(model, x, *args)` that returns the gradient, a tree like x.

    Raises:
        TypeError: when called: x has a leaf that is not floating; f returns no real floating scalar.
    """

    def of(model: PyTree, x: PyTree, *args: object) -> PyTree:
        for i, leaf in enumerate(jax.tree.leaves(x)):
            if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact):
                path = structure_of(x)[2].paths[i]
                got = describe(leaf) + (f" at {path!r}" if path else "")
                raise TypeError(f"expected x to be floating, got {got}; convert it, or pass it in *args")

        def scalar(x: PyTree) -> Any:
            y = output(f(model, x, *args))
            if y.shape:
                raise TypeError(f"expected f to return a scalar, got {describe(y)}; use nested.jacobian")
            return y

        return jax.grad(scalar)(jax.tree.map(jnp.asarray, x))

    return of


def jacobian(f: Callable[..., Array], *, chunk: int | None = None) -> Callable[..., Array]:
    """Computes the Jacobian of `f(model, x, *args)` in x, for use in a loss.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> f = lambda model, x: model["w"] @ x**2
    >>> model, x = {"w": jnp.array([[1.0, 2.0], [0.0, 1.0]])}, jnp.array([1.0, 3.0])
    >>> nested.jacobian(f)(model, x)
    Array([[ 2., 12.],
           [ 0.,  6.]], dtype=float32)
    >>> tp.grad(lambda model: jnp.trace(nested.jacobian(f)(model, x)))(model)["w"]
    Array([[2., 0.],
           [0., 6.]], dtype=float32)

    If x has no more entries than the output, it goes by columns, one forward sweep for each entry of x; otherwise by
    rows, one backward sweep for each entry of the output.

    Args:
        f: called as `f(model, x, *args)` with an array x, once, returns an array.
        chunk: how many sweeps are done at once, which bounds the memory; `None`: all.

    Returns:
        A function of `(model, x, *args)` that returns the Jacobian, shape `(*out, *in)`.

    Raises:
        ValueError: `chunk` is no count.
        TypeError: when called: x or the output is no real floating array.
    """
    if chunk is not None:
        count_of("chunk", chunk, "sweeps")

    def of(model: PyTree, x: object, *args: object) -> jax.Array:
        return in_sweeps(lambda x: output(f(model, x, *args)), real_array(x), chunk)

    return of


def batched_jacobian(f: Callable[..., Array], *, chunk: int | None = None, check: bool = False) -> Callable[..., Array]:
    """Computes the Jacobian of each sample's output in its own input, for a function that you only have for a batch.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model, xs = {"k": jnp.array(2.0)}, jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> nested.batched_jacobian(lambda model, xs: model["k"] * xs**2)(model, xs)[1]
    Array([[12.,  0.],
           [ 0., 16.]], dtype=float32)

    If f returns one number per sample, it is the gradient of each, by one backward pass:

    >>> nested.batched_jacobian(lambda model, xs: jnp.sum(model["k"] * xs**2, axis=1))(model, xs)
    Array([[ 4.,  8.],
           [12., 16.]], dtype=float32)

    The Jacobian over the whole batch has a block per pair of samples; if samples do not mix, all but the diagonal
    blocks are zero. So one direction serves all samples at once: forward, one for each entry of a sample's input, or
    backward, one for each entry of its output, whichever are fewer. This takes as many operations as
    `jax.vmap(jax.jacfwd(f))`, or `jacrev`, which gives the same if f is written for one sample.

    Args:
        f: called as `f(model, x, *args)` with x of shape `(batch, *in)`, returns `(batch, *out)`; each output must
            depend only on its sample's input (no normalisation over the batch).
        chunk: how many sweeps are done at once, which bounds the memory; `None`: all.
        check: whether to check that f mixes no two samples, with one sweep for each binary digit of their number. The
            check needs values, so it does not work inside of a trace.

    Returns:
        A function of `(model, x, *args)` that returns the Jacobians, shape `(batch, *out, *in)`.

    Raises:
        ValueError: `chunk` is no count; when called: x or the output has no batch axis, or another batch size;
            `check=True` and f mixes samples.
        TypeError: when called: x or the output is no real floating array; `check=True` inside of a trace.
    """
    if chunk is not None:
        count_of("chunk", chunk, "sweeps")

    def of(model: PyTree, x: object, *args: object) -> jax.Array:
        x = real_array(x)
        if x.ndim == 0:
            raise ValueError("expected samples of shape (batch, ...), got a scalar")

        def of_x(x: jax.Array) -> jax.Array:
            y = output(f(model, x, *args))
            if y.shape[:1] != x.shape[:1]:
                raise ValueError(f"expected f to return ({len(x)}, ...), one output per sample, got shape {y.shape}")
            return y

        if check:
            _check_independence(of_x, x)
        return in_sweeps(of_x, x, chunk, batch=1)

    return of


def _check_independence(f: Callable[[Any], jax.Array], x: jax.Array) -> None:
    # Where samples do not mix, turning the sign of a sample's direction turns that of its output, without rounding. It
    # is turned for those with a one at a binary digit of their number, digit by digit: any two samples differ at one.
    direction = jax.random.normal(jax.random.key(0), x.shape, x.dtype) + jnp.zeros_like(x)
    _, push = jax.linearize(f, x)
    together = push(direction)
    if isinstance(together, Tracer):
        raise TypeError("check=True needs values: use it only outside of jit, vmap and grad")
    number, eps = np.arange(len(x)), float(jnp.finfo(together.dtype).eps)
    for digit in range((len(x) - 1).bit_length()):
        signs = 1 - 2 * (number >> digit & 1)
        expected = _signed(signs, together)
        difference = push(_signed(signs, direction)) - expected
        mixed = np.flatnonzero(_norms(difference) > _ROUNDING * eps * _norms(expected))
        if mixed.size:
            raise ValueError(
                "f mixes the samples of the batch (a normalisation over it, attention, a sum?), sample "
                f"{mixed[0]} with others, so there is no Jacobian per sample; use jax.jacobian"
            )


def _signed(signs: np.ndarray, samples: jax.Array) -> jax.Array:
    """Returns each sample times its sign."""
    return samples * jnp.asarray(signs.reshape(-1, *[1] * (samples.ndim - 1)), samples.dtype)


def _norms(samples: jax.Array) -> np.ndarray:
    """Returns the norm of each sample."""
    return np.sqrt(np.sum(np.asarray(samples, float) ** 2, axis=tuple(range(1, samples.ndim))))
