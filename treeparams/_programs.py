"""Programs as JAX traces them: their operations, and what their results depend on.

That is told by marks, bits of an integer, which are carried from the inputs of a program to its results. The result of
an operation has the marks of all its operands; loops are gone round until no more marks come. This errs on one side
alone: a result may depend on less than its marks say, never on more.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

Marks = list[int]
Run = Callable[[Any, Sequence[int]], Marks]
"""From a program within an operation, and the marks of its arguments, to those of its results."""

# What calls one program with its own operands. Other operations hold a program too, such as reductions, but not how it
# is called: their results get the marks of all operands.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "shard_map"} | {
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}


def through(eqn: Any, marks: Marks, run: Run) -> Marks:
    """The marks of what one operation returns, of those of its operands."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        branches = [run(branch.jaxpr, marks[1:]) for branch in params["branches"]]
        return [functools.reduce(operator.or_, each, marks[0]) for each in zip(*branches, strict=True)]
    if name == "scan":
        start = params["num_consts"]
        end = start + params["num_carry"]
        body = lambda carried: run(params["jaxpr"].jaxpr, [*marks[:start], *carried, *marks[end:]])
        carried = until_steady(body, marks[start:end])
        return [*carried, *body(carried)[end - start :]]
    if name == "while":
        start = params["cond_nconsts"]
        end = start + params["body_nconsts"]

        def once(carried: Marks) -> Marks:
            (goes_on,) = run(params["cond_jaxpr"].jaxpr, [*marks[:start], *carried])
            return [goes_on | each for each in run(params["body_jaxpr"].jaxpr, [*marks[start:end], *carried])]

        return until_steady(once, marks[end:])
    if name in _CALLS:
        for program in programs(eqn):
            if (len(program.invars), len(program.outvars)) == (len(eqn.invars), len(eqn.outvars)):
                return run(program, marks)
    return [functools.reduce(operator.or_, marks)] * len(eqn.outvars)


def carry(
    jaxpr: Jaxpr, marks: Sequence[int], step: Callable[[Any, Marks, Run], Marks] = through, constant: int = 0
) -> Marks:
    """The marks of what a program returns, of those of its arguments; constants that are not zero have their own."""
    known = dict(zip(jaxpr.invars, marks, strict=True)) | dict.fromkeys(jaxpr.constvars, constant)

    def look(atoms: Sequence[Any]) -> Marks:
        return [(constant if np.any(atom.val) else 0) if isinstance(atom, Literal) else known[atom] for atom in atoms]

    run = lambda inner, given: carry(inner, given, step, constant)
    for eqn in jaxpr.eqns:
        its = look(eqn.invars) or [constant]
        found = step(eqn, its, run) if any(its) else [0] * len(eqn.outvars)
        known.update(zip(eqn.outvars, found, strict=True))
    return look(jaxpr.outvars)


def until_steady(run: Callable[[Marks], Marks], marks: Marks) -> Marks:
    """The marks of what is carried round, after any number of rounds; `run` may return more than that."""
    while (after := [old | new for old, new in zip(marks, run(marks), strict=False)]) != marks:
        marks = after
    return marks


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an operation, of these operands."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # since JAX 0.9.2 they are a parameter
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def derivative(eqn: Any) -> ClosedJaxpr:
    """The program of an operation and its derivative: of operands and tangents, one for each, to results and theirs."""
    operands = shapes_of(eqn.invars)
    moves = [is_floating(operand) for operand in operands]

    def of(values: Any, tangents: Any) -> Any:
        moving, still = eqx.partition(values, moves)
        run = lambda moving: bind(eqn, eqx.combine(moving, still))
        return jax.jvp(run, (moving,), (eqx.filter(tangents, moves),))

    return jax.make_jaxpr(of)(operands, operands)


def shapes_of(atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of operands or results."""
    return [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]


def is_floating(aval: Any) -> bool:
    """Whether a value of this kind, floating or complex, may have a derivative."""
    return bool(jnp.issubdtype(getattr(aval, "dtype", bool), jnp.inexact))


def programs(eqn: Any) -> Iterator[Any]:
    """The programs within an operation."""
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, (ClosedJaxpr, Jaxpr)):
                yield getattr(each, "jaxpr", each)


def primitives(jaxpr: Any) -> Iterator[str]:
    """The names of all operations of a program, those of programs within it too."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for program in programs(eqn):
            yield from primitives(program)
