"""A JAX program, equation by equation: how to evaluate it, and what an equation calls."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

CALLS = frozenset({"jit", "pjit", "closed_call"})  # "pjit" up to JAX 0.6
CUSTOM = "custom_jvp_call"
CHECKPOINT = "remat2"


def evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], results: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """The results of a program, of whose equations each has those that `results(equation, operands)` gives."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda var: var.val if isinstance(var, Literal) else values[var]
    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, results(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation, of these operands."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # since JAX 0.9.2 they are a parameter
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def inner(eqn: Any) -> Any:
    """The closed program that an equation calls."""
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
