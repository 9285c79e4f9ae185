"""Derivatives of functions that treat the samples of a batch independently, for all samples in one sweep."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .._tree.text import count_of
from ._inputs import basis, mapped

_ROUNDING = 16  # units of the dtype that a sample's output may differ by; in most programs it differs by nothing


def batched_gradient(f: Callable[..., Array], *, check: bool = False) -> Callable[..., Array]:
    """The gradient of each sample's output in its own input, for all samples by one backward pass.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> nested.batched_gradient(lambda x: jnp.sum(x**2, axis=1))(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    Array([[2., 4.],
           [6., 8.]], dtype=float32)

    Args:
        f: called as `f(x, *args)` with x of shape `(batch, *in)`, returns `(batch,)`; each output must depend on the
            input of its own sample alone.
        check: as for `batched_jacobian`.

    Returns:
        A function of `(x, *args)` that returns the gradients, shape `(batch, *in)`.

    Raises:
        ValueError: when called: the output is not `(batch,)`; as `batched_jacobian`.
        TypeError: when called: as `batched_jacobian`.
    """

    def gradient(x: ArrayLike, *args: object) -> jax.Array:
        def of_x(x: jax.Array) -> jax.Array:
            return f(x, *args)

        x = _batch(x)
        y, pull = jax.vjp(of_x, x)
        _check_output(x, y)
        if y.ndim != 1:
            raise ValueError(f"expected f to return ({len(x)},), one number per sample, got shape {y.shape}")
        if check:
            _check_independence(jax.linearize(of_x, x)[1], x)
        return pull(jnp.ones_like(y))[0]

    return gradient


def batched_jacobian(f: Callable[..., Array], *, chunk: int | None = None, check: bool = False) -> Callable[..., Array]:
    """The Jacobian of each sample's output in its own input, in as few sweeps over the batch as one sample needs.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> jacobian = nested.batched_jacobian(lambda x: x**2)
    >>> jacobian(jnp.array([[1.0, 2.0], [3.0, 4.0]]))[1]
    Array([[6., 0.],
           [0., 8.]], dtype=float32)

    The Jacobian over the whole batch has a block per pair of samples, of which all but the diagonal ones are zero where
    samples do not mix. So one direction serves all samples at once: forward, one for each entry of a sample's input,
    or backward, one for each entry of its output, whichever are fewer. Where f is written for one sample,
    `jax.vmap(jax.jacfwd(f))` is the same; this is for functions that are only at hand for a batch.

    Args:
        f: called as `f(x, *args)` with x of shape `(batch, *in)`, returns `(batch, *out)`; each output must depend on
            the input of its own sample alone (no normalisation over the batch).
        chunk: how many sweeps are done at once, which bounds the memory; `None`: all.
        check: whether to find out if f mixes samples, any two of them: with one sweep for each binary digit of their
            number. It needs values, so not inside of a trace.

    Returns:
        A function of `(x, *args)` that returns the Jacobians, shape `(batch, *out, *in)`.

    Raises:
        ValueError: `chunk` is no count; when called: x or the output has no batch axis, or another batch size;
            `check=True` and f mixes samples.
        TypeError: when called: x or the output is not real and floating; `check=True` inside of a trace.
    """
    if chunk is not None:
        count_of("chunk", chunk, "sweeps")

    def jacobian(x: ArrayLike, *args: object) -> jax.Array:
        x = _batch(x)
        y, push = jax.linearize(lambda x: f(x, *args), x)
        _check_output(x, y)
        if check:
            _check_independence(push, x)
        if math.prod(x.shape[1:]) <= math.prod(y.shape[1:]):
            columns = _swept(push, x, chunk)
            return jnp.moveaxis(columns, 0, -1).reshape(*y.shape, *x.shape[1:])
        rows = _swept(lambda direction: jax.linear_transpose(push, x)(direction)[0], y, chunk)
        return jnp.moveaxis(rows, 0, 1).reshape(*y.shape, *x.shape[1:])

    return jacobian


def _batch(x: ArrayLike) -> Float[Array, "batch ..."]:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected real floating samples, got {x.dtype}; convert them with x.astype(float)")
    if x.ndim == 0:
        raise ValueError("expected samples of shape (batch, ...), got a scalar")
    return x


def _check_output(x: jax.Array, y: Any) -> None:
    if not hasattr(y, "shape") or y.ndim == 0 or y.shape[0] != len(x):
        got = f"shape {tuple(y.shape)}" if hasattr(y, "shape") else type(y).__name__
        raise ValueError(f"expected f to return ({len(x)}, ...), one output per sample, got {got}")
    if not jnp.issubdtype(y.dtype, jnp.floating):
        raise TypeError(f"expected f to return real floating numbers, got {y.dtype}")


def _swept(f: Callable[[Any], Any], of: jax.Array, chunk: int | None) -> jax.Array:
    """A linear function of the directions of one sample, each of them for all samples, in the first axis."""
    zeros, sample = jnp.zeros_like(of), jnp.zeros(of.shape[1:], of.dtype)
    return mapped(lambda direction: f(zeros + direction[None]), basis(sample), chunk, "sweeps")


def _check_independence(push: Callable[[Any], Any], x: jax.Array) -> None:
    # Where samples do not mix, turning the sign of a sample's direction turns that of its output, without rounding. It
    # is turned for those with a one at a binary digit of their number, digit by digit: any two samples differ at one.
    direction = jax.random.normal(jax.random.key(0), x.shape, x.dtype) + jnp.zeros_like(x)
    together = push(direction)
    if isinstance(together, Tracer):
        raise TypeError("check=True needs values: call it outside of jit, vmap and grad, and without it inside")
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
    """Each sample times its sign."""
    return samples * jnp.asarray(signs.reshape(-1, *[1] * (samples.ndim - 1)), samples.dtype)


def _norms(samples: jax.Array) -> np.ndarray:
    """The norm of each sample."""
    return np.linalg.norm(np.asarray(samples, float).reshape(len(samples), math.prod(samples.shape[1:])), axis=1)
