"""Programs as JAX traces them: their operations, and the inputs that their results depend on.

Dependence is tracked by marks, the bits of an integer, which are carried from the inputs of a program to its results.
The result of an operation has the marks of all its operands; loops are repeated until no new marks appear. The error is
one-sided: a result may depend on less than its marks say, never on more.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ._tree.dtypes import is_inexact
from ._tree.refs import is_ref

Marks = list[int]
Run = Callable[[ClosedJaxpr | Jaxpr, Sequence[int]], Marks]
"""Maps a program inside an operation, and the marks of its arguments, to the marks of its results."""
Constant = Callable[[Any], int]
"""Maps the value of a constant, or `None` if it is not available, to its mark."""

# Each result is of the operand at its own position.
_PAIRED = {"device_put", "optimization_barrier"}

# Operations that call one program with their own operands. Others hold a program too, such as reductions, but not how
# it is called: their results get the marks of all operands.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "shard_map"} | {
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_vmap_call",
}


def through(eqn: JaxprEqn, marks: Marks, run: Run) -> Marks:
    """Returns the marks of an operation's results from the marks of its operands."""
    name = eqn.primitive.name
    if name in _LOOPS:
        return _LOOPS[name](eqn, marks, run)
    program = called(eqn)
    if program is not None:
        return run(program, marks)
    if name in _PAIRED:
        return marks
    return [functools.reduce(operator.or_, marks, 0)] * len(eqn.outvars)


def is_followed(eqn: JaxprEqn) -> bool:
    """Returns whether marks are carried through the programs inside an operation."""
    return eqn.primitive.name in _LOOPS or called(eqn) is not None


def _through_cond(eqn: JaxprEqn, marks: Marks, run: Run) -> Marks:
    # Each result may be of any branch, and depends on the index that chooses.
    branches = [run(branch, marks[1:]) for branch in eqn.params["branches"]]
    return [functools.reduce(operator.or_, each, marks[0]) for each in zip(*branches, strict=True)]


def _through_scan(eqn: JaxprEqn, marks: Marks, run: Run) -> Marks:
    # Its operands are constants, carries and arrays that are scanned over; its results carries and arrays.
    start, end = scan_carries(eqn)

    def once(carried: Marks) -> Marks:
        return run(eqn.params["jaxpr"], [*marks[:start], *carried, *marks[end:]])

    carried = until_steady(once, marks[start:end])
    return [*carried, *once(carried)[end - start :]]


def _through_while(eqn: JaxprEqn, marks: Marks, run: Run) -> Marks:
    # Its operands are constants of the condition, of the body, and carries. How often the body runs is up to the
    # condition, so all results depend on that.
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    start = eqn.params["cond_nconsts"]
    end = start + eqn.params["body_nconsts"]

    def once(carried: Marks) -> Marks:
        (goes_on,) = run(condition, [*marks[:start], *carried])
        return [goes_on | each for each in run(body, [*marks[start:end], *carried])]

    return until_steady(once, marks[end:])


_LOOPS = {"cond": _through_cond, "scan": _through_scan, "while": _through_while}


Step = Callable[[JaxprEqn, Marks, Run], Marks]
"""Maps one operation, and the marks of its operands, to the marks of its results."""


def carry(
    program: ClosedJaxpr | Jaxpr, marks: Sequence[int], step: Step = through, constant: Constant | None = None
) -> Marks:
    """Returns the marks of a program's results from those of its arguments; constants have none without `constant`."""
    return _Carrying(step, constant).run(program, marks)


class _Carrying:
    """Carries marks through a program and the programs inside it, once for each program and set of marks."""

    def __init__(self, step: Step, constant: Constant | None) -> None:
        self._step = step
        self._constant = constant
        self._done: dict[tuple[int, ...], Marks] = {}  # many operations may call one program

    def run(self, program: ClosedJaxpr | Jaxpr, marks: Sequence[int]) -> Marks:
        jaxpr = _opened(program)
        consts = (
            program.consts if isinstance(program, ClosedJaxpr) and program.consts else [None] * len(jaxpr.constvars)
        )
        key = id(jaxpr), *map(id, consts), *marks
        if key not in self._done:
            self._done[key] = self._along(jaxpr, consts, marks)
        return self._done[key]

    def _along(self, jaxpr: Jaxpr, consts: Sequence[Any], marks: Sequence[int]) -> Marks:
        known: dict[Any, int] = dict(zip(jaxpr.invars, marks, strict=True))
        known |= zip(jaxpr.constvars, map(self._mark, consts), strict=True)
        for eqn in jaxpr.eqns:
            its = self._marks_of(eqn.invars, known)
            # Without constants, nothing comes of nothing. With them, an operation without operands may make something.
            found = self._step(eqn, its, self.run) if self._constant or any(its) else [0] * len(eqn.outvars)
            known.update(zip(eqn.outvars, found, strict=True))
        return self._marks_of(jaxpr.outvars, known)

    def _marks_of(self, atoms: Sequence[Any], known: Mapping[Any, int]) -> Marks:
        # A literal has no entry: it is a constant that stands in the operation itself.
        return [self._mark(atom.val) if isinstance(atom, Literal) else known[atom] for atom in atoms]

    def _mark(self, value: Any) -> int:
        return self._constant(value) if self._constant else 0


def until_steady(run: Callable[[Marks], Marks], marks: Marks) -> Marks:
    """Returns the marks of the carried values after any number of rounds; `run` may return more marks than these."""
    # Marks are only added, and there are finitely many, so it ends.
    while (after := [old | new for old, new in zip(marks, run(marks), strict=False)]) != marks:
        marks = after
    return marks


def bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Applies an operation to these operands and returns its results."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # since JAX 0.9.2 they are a parameter
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def derivative(eqn: JaxprEqn, moves: Sequence[bool]) -> ClosedJaxpr:
    """Returns the program of an operation and its derivative with respect to the operands that move.

    It maps operands and tangents, one for each operand, to results and their tangents.
    """

    def of(values: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
        moving, still = eqx.partition(values, list(moves))
        along = eqx.filter(tangents, list(moves))
        return jax.jvp(lambda moving: bind(eqn, eqx.combine(moving, still)), (moving,), (along,))

    operands = [atom.aval for atom in eqn.invars]
    return jax.make_jaxpr(of)(operands, operands)


def traced(f: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Traces a user's function to a program; if the function needs values, the error explains why there are none."""
    try:
        return jax.make_jaxpr(f)(*args)
    except _NEEDS_VALUES as error:
        error.add_note(_TRACED)
        raise


_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_TRACED = "the function is traced, as by jax.jit, so its control flow must not depend on values of the model"


def numbers_in(constant: Any) -> np.ndarray | None:
    """Returns the numbers in a constant of a program, or `None` if they cannot be read."""
    if isinstance(constant, Tracer) or constant is None or is_ref(constant):
        return None
    if isinstance(constant, jax.Array) and (constant.is_deleted() or not constant.is_fully_addressable):
        return None
    dtype = getattr(constant, "dtype", float)
    return np.asarray(constant) if any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_)) else None


def is_zeros(constant: Any) -> bool:
    """Returns whether a constant of a program is known to be zeros."""
    numbers = numbers_in(constant)
    return numbers is not None and not numbers.any()


def makes_zeros(name: str, zeros: Sequence[bool]) -> bool:
    """Returns whether an operation gives zeros if some of its operands are zeros and the others are finite."""
    if name in _PRODUCTS:
        return any(zeros)
    if name == "div":
        return zeros[0] and not zeros[1]  # and not of zero by zero
    return name in _KEEPS_ZERO and all(zeros[_KEEPS_ZERO[name]])


_PRODUCTS = frozenset({"and", "conv_general_dilated", "dot_general", "mul"})

# Operations that make zeros where these operands are zeros; others, such as `exp`, may make anything of them.
_KEEPS_ZERO = {
    **dict.fromkeys(
        (
            "abs", "add", "add_any", "broadcast_in_dim", "concatenate", "conj", "convert_element_type", "copy",
            "cumsum", "device_put", "imag", "max", "min", "neg", "pad", "psum", "psum_invariant", "real", "reduce_max",
            "reduce_min", "reduce_sum", "reshape", "rev", "sign", "slice", "split", "sqrt", "square", "squeeze",
            "stop_gradient", "sub", "transpose",
        ),
        slice(None),
    ),
    **dict.fromkeys(("div", "dynamic_slice", "gather"), slice(1)),
    "dynamic_update_slice": slice(2),
    "scatter-add": slice(0, 3, 2),
    "select_n": slice(1, None),
}  # fmt: skip


def is_floating(aval: object) -> bool:
    """Returns whether a value of this type, floating or complex, may have a derivative."""
    return is_inexact(getattr(aval, "dtype", bool))


def scan_carries(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns where the carried operands of a scan begin and end."""
    params = eqn.params
    if "ft_in" in params:  # since JAX 0.12
        start, count, _ = map(len, params["ft_in"].unpack())
    else:
        start, count = params["num_consts"], params["num_carry"]
    return start, start + count


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the program that an operation calls with its own operands, or `None`."""
    for program in _closed_programs(eqn) if eqn.primitive.name in _CALLS else ():
        closed = program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())
        if (len(closed.jaxpr.invars), len(closed.jaxpr.outvars)) == (len(eqn.invars), len(eqn.outvars)):
            return closed
    return None


def programs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Iterates over the programs inside an operation."""
    return map(_opened, _closed_programs(eqn))


def _opened(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """Returns a program without the values of its constants."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def _closed_programs(eqn: JaxprEqn) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, (ClosedJaxpr, Jaxpr)):
                yield each


def primitives(jaxpr: ClosedJaxpr | Jaxpr) -> set[str]:
    """Returns the names of all operations in a program and the programs inside it, except in Pallas kernels."""
    found, seen, waiting = set(), set(), [jaxpr]
    while waiting:
        jaxpr = waiting.pop()
        if id(jaxpr) not in seen:  # a program may be called many times
            seen.add(id(jaxpr))
            found |= {eqn.primitive.name for eqn in jaxpr.eqns}
            waiting += [each for eqn in jaxpr.eqns if eqn.primitive.name != "pallas_call" for each in programs(eqn)]
    return found
