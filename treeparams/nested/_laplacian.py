"""The Laplacian of a model's output in its input, by one pass forward."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ._forward import forward
from ._inputs import basis, check_output, real_array
from ._series import Series


@overload
def laplacian(f: Callable[..., Array], *, full: Literal[False] = False) -> Callable[..., Array]: ...


@overload
def laplacian(f: Callable[..., Array], *, full: Literal[True]) -> Callable[..., tuple[Array, Array, Array]]: ...


def laplacian(f: Callable[..., Array], *, full: bool = False) -> Callable[..., Any]:
    """The Laplacian of `f(model, x, *args)` in x, the trace of its Hessian, to stand in a loss.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> f = lambda model, x: jnp.sin(model["k"] * x[0]) * jnp.exp(x[1])
    >>> model, x = {"k": jnp.array(2.0)}, jnp.array([0.5, 0.0])
    >>> print(f"{nested.laplacian(f)(model, x):.3f}")  # (1 - k^2) sin(k x_0)
    -2.524
    >>> print(f"{tp.grad(nested.laplacian(f))(model, x)['k']:.3f}")
    -4.176

    Value, Jacobian and Laplacian go forward together through the program (Li et al., 2024, "Forward Laplacian"), which
    takes about half the operations of the Hessian's trace. For one point; `jax.vmap(laplacian(f), (None, 0))` takes
    many. What it knows:

    - linear and piecewise linear: sums, reshapes, slices, gathers, padding, `max`, `sort`, `where`;
    - products: `dot_general`, convolutions, `mul`;
    - functions of each entry: `exp`, `tanh`, `erf`, `logistic`, powers, quotients and the like, and whole functions of
      `jax.nn` that are made of them, such as `gelu`, as one;
    - `jax.jit` and `jax.checkpoint` around all this, and functions with a rule for `jvp`, whose rule is used.

    What is in between may be complex, and the output. Anything else that JAX differentiates forward (loops, branches,
    factorisations) is as exact, by one second derivative of that part alone per entry of x, and a warning names it. It
    makes no use of entries of x that are treated independently.

    Args:
        f: called as `f(model, x, *args)` with an array x, returns an array.
        full: whether to return `(value, jacobian, laplacian)`, all of the same pass.

    Returns:
        A function of `(model, x, *args)` that returns the Laplacian, of the output's shape; the Jacobian has shape
        `(*out, *in)`.

    Raises:
        TypeError: when called: x is no real floating array, or the output no floating or complex one; a function has a
            rule for `vjp` alone (within a loop the error is JAX's own).
    """

    def of(model: PyTree, x: Any, *args: Any) -> Any:
        x = real_array(x)
        closed, shape = jax.make_jaxpr(lambda x: f(model, x, *args), return_shape=True)(x)
        check_output(shape, "floating or complex")
        (y,), unknown = forward(closed, Series(x, basis(x), jnp.zeros_like(x)))
        if unknown:
            warnings.warn(
                f"nested.laplacian has no rule for {', '.join(sorted(unknown))}: what it gives is exact, but takes one "
                "second derivative of that part per entry of the input",
                stacklevel=2,
            )
        if not isinstance(y, Series):  # it does not depend on x
            y = jnp.asarray(y, shape.dtype)
            y = Series(y, jnp.zeros((x.size, *y.shape), y.dtype), jnp.zeros_like(y))
        if not full:
            return y.laplacian
        return y.value, jnp.moveaxis(y.jacobian, 0, -1).reshape(*y.value.shape, *x.shape), y.laplacian

    return of
