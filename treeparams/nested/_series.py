"""Value, Jacobian and Laplacian of a result, and rules to carry them through one equation of a program.

If `y = g(z)` and z is known to second order, the Jacobian is `g' J` and the Laplacian `g' l + sum_i g''[J_i, J_i]`: all
second derivatives are summed as soon as they arise (Li et al., 2024, "A computational framework for neural
network-based variational Monte Carlo with Forward Laplacian"). Only the last term needs a rule for each primitive.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from .._programs import Kind, derivative, is_floating, is_linear, kind_of, programs

Function = Callable[..., list[Any]]  # of values, returns the results


class Series(NamedTuple):
    """An intermediate result with its derivatives; n is the number of entries of the input."""

    value: jax.Array
    jacobian: jax.Array  # (n, *shape)
    laplacian: jax.Array  # the shape of the value


Rule = Callable[[Any, Function, list[Series]], list[Series]]


def rule_of(eqn: JaxprEqn, which: Sequence[bool], pointwise: bool) -> Rule | None:
    """Returns the rule of an equation whose operands `which` depend on the input; `None` if only `traced` applies."""
    kind = kind_of(eqn)
    if is_linear_in(eqn, which):
        return _linear
    if Kind.PRODUCT in kind:
        return _bilinear
    if Kind.SMOOTH in kind or pointwise:
        return lambda eqn, of, depends: [elementwise(of, depends)]
    if Kind.BACKWARD in kind:
        raise TypeError(
            "f calls a function with a rule for vjp alone (jax.custom_vjp), which has no forward derivative; give it a "
            "rule for jvp, or use the trace of jax.jacrev(jax.grad(f))"
        )
    return traced if Kind.RULE in kind or eqn.primitive.name == "abs" else None


def is_linear_in(eqn: JaxprEqn, which: Sequence[bool]) -> bool:
    """Returns whether an equation is linear, at least in pieces, in those of its operands together."""
    return not _is_complex(eqn) if Kind.PIECEWISE in kind_of(eqn) else is_linear(eqn, which)


def _is_complex(eqn: JaxprEqn) -> bool:
    return any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in _avals(eqn))


def _avals(eqn: JaxprEqn) -> list[Any]:
    """Returns the shapes and dtypes of the operands and the results."""
    return [var.aval for var in (*eqn.invars, *eqn.outvars)]


def _linear(eqn: JaxprEqn, of: Function, depends: list[Series]) -> list[Series]:
    values, jacobians, laplacians = zip(*depends, strict=True)
    results, laplacians = jax.jvp(of, values, laplacians)
    pushed = jax.vmap(lambda *tangents: jax.jvp(of, values, tangents)[1])(*jacobians)
    return list(map(Series, results, pushed, laplacians))


def _bilinear(eqn: JaxprEqn, of: Function, depends: list[Series]) -> list[Series]:
    ((value, jacobian, laplacian),) = _linear(eqn, of, depends)
    a, b = (operand.jacobian for operand in depends)
    if eqn.primitive.name == "dot_general":  # the products for all entries of the input, summed by the product itself
        pairs = eqn.params["dimension_numbers"]
        contracted, batched = ([tuple(axis + 1 for axis in axes) for axes in pair] for pair in pairs)
        numbers = tuple((0, *axes) for axes in contracted), tuple(batched)
        crossed = eqn.primitive.bind(a, b, **eqn.params | {"dimension_numbers": numbers})
    else:
        crossed = jnp.sum(jax.vmap(of)(a, b)[0], 0)
    return [Series(value, jacobian, laplacian + 2 * crossed)]


def elementwise(of: Function, depends: Sequence[Series]) -> Series:
    """Applies a function of entries at one index, with broadcasting: its derivative is one number per entry."""
    values, jacobians, laplacians = zip(*depends, strict=True)
    (result,) = of(*values)
    count, dtype = len(depends), result.dtype
    ones = [tuple(jnp.full_like(value, i == j) for i, value in enumerate(values)) for j in range(count)]
    first = [lambda *values, ones=each: jax.jvp(of, values, ones)[1][0] for each in ones]
    # Axes of length one after the first, for a scalar beside an array.
    jacobians = [jnp.expand_dims(each, tuple(range(1, 2 + result.ndim - each.ndim))) for each in jacobians]
    jacobian, laplacian = jnp.zeros((), dtype), jnp.zeros((), dtype)
    for j in range(count):
        slope = first[j](*values)
        jacobian += jnp.expand_dims(slope, 0) * jacobians[j].astype(dtype)
        laplacian += slope * laplacians[j].astype(dtype)
        for i in range(j + 1):
            curvature = (1 if i == j else 2) * jax.jvp(first[j], values, ones[i])[1]
            laplacian += curvature * jnp.sum(jacobians[i] * jacobians[j], 0).astype(dtype)
    return Series(result, jacobian, laplacian)


def traced(eqn: JaxprEqn, of: Function, depends: list[Series]) -> list[Series]:
    """Applies any primitive: the last term by second derivatives, one per entry of the input."""
    values, jacobians, _ = zip(*depends, strict=True)

    def second(*tangents: jax.Array) -> list[Any]:
        return jax.jvp(lambda *values: jax.jvp(of, values, tangents)[1], values, tangents)[1]

    last = jax.vmap(second)(*jacobians)
    return [
        Series(value, jacobian, laplacian + jnp.sum(each, 0))
        for (value, jacobian, laplacian), each in zip(_linear(eqn, of, depends), last, strict=True)
    ]


# -- Which equations are elementwise


def is_call(eqn: JaxprEqn) -> bool:
    """Returns whether an equation calls a program, whose derivative JAX finds in it."""
    return eqn.primitive.name in ("jit", "closed_call", "eval_jaxpr")


def is_pointwise(eqn: JaxprEqn, depends: Sequence[Any]) -> bool:
    """Returns whether an equation, and all that it calls, act on each entry of real operands of the result's shape."""
    results: list[Any] = eqn.outvars
    shapes = {var.aval.shape for var in results} | {operand.value.shape for operand in depends}
    # A choice between two operands, as `jnp.where` is, does not look at the slope of the other one.
    is_choice = is_call(eqn) and len(depends) > 1
    return len(shapes) == 1 and len(eqn.outvars) == 1 and not is_choice and _is_within(eqn, shapes.pop())


def _is_within(eqn: JaxprEqn, shape: tuple[int, ...], rules: int = 2) -> bool:
    # Nothing here makes a scalar of an array of the shape: scalars do not depend on the input unless all is one.
    if not all(aval.shape in ((), shape) for aval in _avals(eqn)) or _is_complex(eqn):
        return False
    within, kind = programs(eqn) if is_call(eqn) else [], kind_of(eqn)
    if Kind.RULE in kind and Kind.BACKWARD not in kind:
        # A rule may call its own function for the value, which has the rule again; two derivatives are taken.
        within = programs(eqn)[:1]
        if rules > 0:
            within.append(derivative(eqn, [is_floating(var.aval) for var in eqn.invars]))
            rules -= 1
    if within:
        return all(_is_within(each, shape, rules) for program in within for each in program.eqns)
    return bool(kind & (Kind.EACH | Kind.SAME)) or eqn.primitive.name == "broadcast_in_dim"
