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
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ._tree.dtypes import is_inexact

Marks = list[int]
Run = Callable[[Any, Sequence[int]], Marks]
"""From a program within an operation, and the marks of its arguments, to those of its results."""

# Each result is of the operand at its place.
_PAIRED = {"device_put", "optimization_barrier"}

# What calls one program with its own operands. Other operations hold a program too, such as reductions, but not how it
# is called: their results get the marks of all operands.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "shard_map"} | {
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_vmap_call",
}


def through(eqn: Any, marks: Marks, run: Run) -> Marks:
    """The marks of what one operation returns, of those of its operands."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        branches = [run(branch.jaxpr, marks[1:]) for branch in params["branches"]]
        return [functools.reduce(operator.or_, each, marks[0]) for each in zip(*branches, strict=True)]
    if name == "scan":
        start, end = scan_carries(eqn)
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
    program = called(eqn)
    if program is not None:
        return run(getattr(program, "jaxpr", program), marks)
    if name in _PAIRED:
        return marks
    return [functools.reduce(operator.or_, marks, 0)] * len(eqn.outvars)


def carry(
    jaxpr: Jaxpr, marks: Sequence[int], step: Callable[[Any, Marks, Run], Marks] = through, constant: int = 0
) -> Marks:
    """The marks of what a program returns, of those of its arguments; constants that are not zero have their own."""
    done: dict[Any, Marks] = {}  # a program may be called at many places

    def run(jaxpr: Any, marks: Sequence[int]) -> Marks:
        key = id(jaxpr), *marks
        if key not in done:
            done[key] = along(jaxpr, marks)
        return done[key]

    def along(jaxpr: Any, marks: Sequence[int]) -> Marks:
        known = dict(zip(jaxpr.invars, marks, strict=True)) | dict.fromkeys(jaxpr.constvars, constant)
        of_literal = lambda literal: constant if np.any(literal.val) else 0
        look = lambda atoms: [of_literal(atom) if isinstance(atom, Literal) else known[atom] for atom in atoms]
        for eqn in jaxpr.eqns:
            its = look(eqn.invars)
            found = step(eqn, its, run) if constant or any(its) else [0] * len(eqn.outvars)
            known.update(zip(eqn.outvars, found, strict=True))
        return look(jaxpr.outvars)

    return run(jaxpr, marks)


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


def derivative(eqn: Any, moves: Sequence[bool]) -> ClosedJaxpr:
    """The program of an operation and its derivative in the operands that move.

    From operands and tangents, one for each operand, to results and their tangents.
    """

    def of(values: Any, tangents: Any) -> Any:
        moving, still = eqx.partition(values, list(moves))
        run = lambda moving: bind(eqn, eqx.combine(moving, still))
        return jax.jvp(run, (moving,), (eqx.filter(tangents, list(moves)),))

    operands = [atom.aval for atom in eqn.invars]
    return jax.make_jaxpr(of)(operands, operands)


def is_floating(aval: Any) -> bool:
    """Whether a value of this kind, floating or complex, may have a derivative."""
    return is_inexact(getattr(aval, "dtype", bool))


def scan_carries(eqn: Any) -> tuple[int, int]:
    """Where the operands that a scan carries begin and end."""
    params = eqn.params
    if "ft_in" in params:  # since JAX 0.12
        start, count, _ = map(len, params["ft_in"].unpack())
    else:
        start, count = params["num_consts"], params["num_carry"]
    return start, start + count


def called(eqn: Any) -> ClosedJaxpr | None:
    """The program that an operation calls with its own operands, if that is what it does."""
    for program in _closed_programs(eqn) if eqn.primitive.name in _CALLS else ():
        closed = program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())
        if (len(closed.jaxpr.invars), len(closed.jaxpr.outvars)) == (len(eqn.invars), len(eqn.outvars)):
            return closed
    return None


def programs(eqn: Any) -> Iterator[Any]:
    """The programs within an operation."""
    for program in _closed_programs(eqn):
        yield getattr(program, "jaxpr", program)


def _closed_programs(eqn: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, (ClosedJaxpr, Jaxpr)):
                yield each


def primitives(jaxpr: Any) -> set[str]:
    """The names of all operations of a program, those of programs within it too, but for kernels of Pallas."""
    found, seen, waiting = set(), set(), [jaxpr]
    while waiting:
        jaxpr = waiting.pop()
        if id(jaxpr) not in seen:  # a program may be called at many places
            seen.add(id(jaxpr))
            found |= {eqn.primitive.name for eqn in jaxpr.eqns}
            waiting += [each for eqn in jaxpr.eqns if eqn.primitive.name != "pallas_call" for each in programs(eqn)]
    return found
