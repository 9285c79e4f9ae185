"""Equations of a JAX program: what they call, and how to evaluate one."""

from collections.abc import Sequence
from typing import Any

CALLS = frozenset({"jit", "pjit", "closed_call"})  # "pjit" up to JAX 0.6
CUSTOM = "custom_jvp_call"
CHECKPOINT = "remat2"


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
