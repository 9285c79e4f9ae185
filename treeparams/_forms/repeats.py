"""Finds where a program repeats itself: runs of equal parts, each fed by the part before and by separate pieces."""

import functools
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._programs import bind, derivative
from .primitives import cut_p

Var = Any  # of a program: `jax.extend.core.Var`, or `Literal`
Equation = Any  # `jax.extend.core.JaxprEqn`
Place = tuple[int, int]  # a result within a part: of which equation, and which of its results


class Piece(NamedTuple):
    """A part of an array along one axis: a parameter in a stack, one key of many."""

    root: Var
    start: int
    size: int
    shape: tuple[int, ...]  # without the axes before that axis, which are a batch
    rank: int  # the number of axes behind that axis, as in `cut`


class Column(NamedTuple):
    """Pieces at equal distances, one for each part."""

    root: Var
    start: int
    step: int
    size: int
    shape: tuple[int, ...]
    rank: int


class Loop(NamedTuple):
    """Equal parts of a program, one after another."""

    parts: list[list[Equation]]
    carries: dict[Place, Var]  # what a part takes from the one before, with what the first part takes
    columns: dict[Place, Column]  # operands that are pieces: of which equation, and which of its operands
    numbers: dict[Place, np.ndarray]  # operands that are constants, where these differ

    @property
    def saved(self) -> int:
        """The number of equations that need not be compiled."""
        return (len(self.parts) - 1) * len(self.parts[0])


def pieces_in(program: jex.Jaxpr) -> dict[Var, Piece]:
    """Returns the results of a program that are pieces of its operands, or of keys that it has split."""
    roots: set[Var] = {*program.invars, *program.constvars}
    found: dict[Var, Piece] = {}
    for equation in program.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "random_split":
            roots.add(equation.outvars[0])
            continue
        operand: Any = equation.invars[0] if equation.invars else None
        if operand is None or isinstance(operand, jex.Literal):
            continue
        shape = operand.aval.shape
        if equation.primitive is cut_p and len(shape) == 1 + params["rank"] > 1:
            start, rank = 0, params["rank"]
            for var, each in zip(equation.outvars, params["shapes"], strict=True):
                size = math.prod(each[: len(each) - rank])
                found[var] = Piece(operand, start, size, each, rank)
                start += size
        elif name == "slice" and (axis := _sliced_axis(params, shape)) is not None:
            rank, start = len(shape) - 1 - axis, params["start_indices"][axis]
            size = params["limit_indices"][axis] - start
            of = found.get(operand) or Piece(operand, 0, shape[axis], shape[axis:], rank)
            if of.root in roots and of.rank == rank and len(of.shape) == rank + 1:
                found[equation.outvars[0]] = Piece(of.root, of.start + start, size, (size, *shape[axis + 1 :]), rank)
        elif name == "squeeze" and operand in found:
            piece = found[operand]
            if params["dimensions"] == (len(shape) - 1 - piece.rank,) and len(piece.shape) == piece.rank + 1:
                found[equation.outvars[0]] = piece._replace(shape=piece.shape[1:])
    return found


def _sliced_axis(params: dict[str, Any], shape: tuple[int, ...]) -> int | None:
    """Returns the only axis of which a slice takes a part, in steps of one; otherwise `None`."""
    spans = zip(params["start_indices"], params["limit_indices"], shape, strict=True)
    axes = [axis for axis, (start, limit, size) in enumerate(spans) if (start, limit) != (0, size)]
    is_dense = params["strides"] is None or set(params["strides"]) == {1}
    return axes[0] if len(axes) == 1 and is_dense else None


def program_of(equations: Sequence[Equation], operands: Sequence[Var], results: Sequence[Var]) -> jex.Jaxpr:
    """Returns the program of some equations."""
    empty = jax.make_jaxpr(lambda: ())().jaxpr
    unnamed = getattr(empty.debug_info, "with_unknown_names", lambda: empty.debug_info)()  # older versions have no such
    return empty.replace(invars=[*operands], outvars=[*results], eqns=[*equations], debug_info=unnamed)


def split(program: jex.Jaxpr, pieces: dict[Var, Piece], least: int) -> list[Equation | Loop]:
    """Returns the equations of a program, in an order in which they can run, with loops in place of equal parts."""
    return list(_rolled(_in_order(program, pieces), pieces, least))


def _in_order(program: jex.Jaxpr, pieces: dict[Var, Piece]) -> list[Equation]:
    # A form casts and transposes all its pieces before the first layer. What is computed from pieces alone is moved to
    # where it is needed, so that it comes with its layer.
    made: dict[Var, Equation] = {}
    ordered: list[Equation] = []
    done: set[int] = set()

    def emit(equation: Equation) -> None:
        if id(equation) not in done:
            done.add(id(equation))
            for operand in variables(equation):
                if operand in made:
                    emit(made[operand])
            ordered.append(equation)

    for equation in program.eqns:
        if equation.outvars[0] in pieces:
            continue
        operands = variables(equation)
        if operands and all(operand in pieces or operand in made for operand in operands):
            made |= dict.fromkeys(equation.outvars, equation)
        else:
            emit(equation)
    for operand in program.outvars:
        if not isinstance(operand, jex.Literal) and operand in made:
            emit(made[operand])
    return ordered


def variables(equation: Equation) -> list[Var]:
    """Returns the operands of an equation that are not constants."""
    return [operand for operand in equation.invars if not isinstance(operand, jex.Literal)]


def _rolled(equations: list[Equation], pieces: dict[Var, Piece], least: int) -> Iterator[Equation | Loop]:
    """Yields the best loop, and recursively the loops and equations before and after it."""
    found = _best(equations, pieces, least)
    if found is None:
        yield from equations
        return
    start, loop = found
    yield from _rolled(equations[:start], pieces, least)
    yield loop
    yield from _rolled(equations[start + loop.saved + len(loop.parts[0]) :], pieces, least)


_TRIED = 20  # candidates; most of those that fail are a good one, begun or repeated otherwise


def _best(equations: list[Equation], pieces: dict[Var, Piece], least: int) -> tuple[int, Loop] | None:
    kinds: dict[Any, int] = {}
    ids = np.array([kinds.setdefault(_kind(equation, pieces), len(kinds)) for equation in equations])
    is_slow = np.array([_is_slow_in_loops(equation) for equation in equations])
    candidates = []
    for period in range(1, len(ids) // 3 + 1):
        # Runs of equations that are like those one period later.
        changes = np.flatnonzero(np.diff([0, *(ids[:-period] == ids[period:]), 0]))
        for start, stop in changes.reshape(-1, 2).tolist():
            parts = (stop - start) // period + 1
            if parts >= 3 and (parts - 1) * period >= least and not is_slow[start : start + period].any():
                candidates.append(((parts - 1) * period, start, period, parts, stop + period))
    best = heapq.nsmallest(_TRIED, candidates, key=lambda each: (-each[0], each[2]))
    for _, start, period, parts, stop in best:
        loops = []
        # Where the first part begins may be one of several; the one that hands on least is the best.
        for begin in range(start, stop - parts * period + 1):
            loop = _as_loop(equations[begin : begin + parts * period], period, pieces)
            if loop is not None:
                loops.append((begin, loop))
        for begin in range(start, stop - (parts - 1) * period + 1) if not loops and parts > 3 else ():
            loop = _as_loop(equations[begin : begin + (parts - 1) * period], period, pieces)
            if loop is not None:
                loops.append((begin, loop))
        if loops:
            return min(loops, key=lambda each: len(each[1].carries))
    return None


def _is_slow_in_loops(equation: Equation) -> bool:
    # XLA for CPU computes a convolution within a loop on one core, and not by its library: a ResNet of 26 layers took
    # 5.5 times as long.
    if jax.default_backend() != "cpu":
        return False
    inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
    inside = [each for program in inner if isinstance(program, jex.Jaxpr) for each in program.eqns]
    return equation.primitive.name == "conv_general_dilated" or any(map(_is_slow_in_loops, inside))


def _as_loop(equations: list[Equation], period: int, pieces: dict[Var, Piece]) -> Loop | None:
    """Returns the loop of these equations, if each part gets its operands from the same places as the others."""
    parts = [equations[i : i + period] for i in range(0, len(equations), period)]
    made = {
        var: (number, (k, o))
        for number, part in enumerate(parts)
        for k, equation in enumerate(part)
        for o, var in enumerate(equation.outvars)
    }
    carries: dict[Place, Var] = {}
    columns: dict[Place, Column] = {}
    numbers: dict[Place, np.ndarray] = {}
    for k in range(period):
        for m in range(len(parts[0][k].invars)):
            operands = [part[k].invars[m] for part in parts]
            if isinstance(operands[0], jex.Literal):
                values = [operand.val for operand in operands]
                if len({np.asarray(value).tobytes() for value in values}) > 1:
                    dtype: Any = getattr(operands[0].aval, "dtype", None)
                    numbers[k, m] = np.stack([np.asarray(value, dtype) for value in values])
                continue
            if len(set(operands)) == 1 and operands[0] not in made:
                continue  # the same for all
            its = [pieces.get(operand) for operand in operands]
            if all(its):
                column = _column([piece for piece in its if piece])
                if column is None:
                    return None
                columns[k, m] = column
                continue
            origins = [made.get(operand) for operand in operands[1:]]
            if None in origins:
                return None
            places = {origin[1] for origin in origins if origin}
            back = {number - origin[0] for number, origin in enumerate(origins, 1) if origin}
            if len(places) > 1 or len(back) > 1:
                return None
            place, distance = places.pop(), back.pop()
            first = made.get(operands[0])
            if distance == 0 and first == (0, place):
                continue  # of the same part
            if distance != 1 or first is not None or carries.setdefault(place, operands[0]) is not operands[0]:
                return None
            handed = parts[0][place[0]].outvars[place[1]].aval
            if (handed.shape, handed.dtype) != (operands[0].aval.shape, operands[0].aval.dtype):
                return None
    return Loop(parts, carries, columns, numbers)


def _column(pieces: list[Piece]) -> Column | None:
    root, start, size, shape, rank = pieces[0]
    step = pieces[1].start - start
    is_even = all(piece.start == start + i * step for i, piece in enumerate(pieces))
    is_alike = {(piece.root, piece.size, piece.shape, piece.rank) for piece in pieces} == {(root, size, shape, rank)}
    return Column(root, start, step, size, shape, rank) if is_even and is_alike and step >= size else None


# -- Equal equations ---------------------------------------------------------------------------------------------------


_PLAIN = (jex.ClosedJaxpr, jex.Jaxpr, bool, int, str)
_ORDERS = 2  # of derivatives, to which rules for them are compared


def _kind(equation: Equation, pieces: dict[Var, Piece]) -> Any:
    """Returns a key that is equal for equations that do the same.

    Their operands then have the same types, or are pieces of the same arrays.
    """
    types = tuple([
        (isinstance(operand, jex.Literal), operand.aval)
        if isinstance(operand, jex.Literal) or operand not in pieces
        else pieces[operand]._replace(start=0)
        for operand in equation.invars
    ])
    return equation.primitive, types, tuple([var.aval for var in equation.outvars]), _params(equation, _ORDERS)


def _params(equation: Equation, orders: int) -> Any:
    params = {name: _param(value, orders) for name, value in equation.params.items()}
    if equation.primitive.name.startswith("custom_"):
        # The rules are closures, made anew at each call. What they do is the program of the derivative. That may hold
        # the function itself, as that of `jax.nn.relu` does, so they are followed to the second derivative.
        params = {name: params[name] for name in params if isinstance(equation.params[name], _PLAIN)}
        params["rule"] = _rule(equation, orders - 1) if orders else ()
    return tuple(sorted(params.items()))


def _param(value: Any, orders: int) -> Any:
    if isinstance(value, jex.ClosedJaxpr):
        return _of_program(value.jaxpr, orders), tuple(map(id, value.consts))
    if isinstance(value, jex.Jaxpr):
        return _of_program(value, orders)
    if isinstance(value, (tuple, list)):
        return tuple([_param(each, orders) for each in value])
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


@functools.lru_cache(maxsize=4096)
def _of_program(program: jex.Jaxpr, orders: int) -> Any:
    numbers: dict[Var, int] = {}

    def name(var: Var) -> Any:
        if isinstance(var, jex.Literal):
            return var.aval, np.asarray(var.val).tobytes()
        return numbers.setdefault(var, len(numbers)), var.aval

    operands = tuple([name(var) for var in (*program.constvars, *program.invars)])
    equations = tuple(
        (each.primitive, tuple(map(name, each.invars)), _params(each, orders), tuple(map(name, each.outvars)))
        for each in program.eqns
    )
    return operands, equations, tuple(map(name, program.outvars))


def _rule(equation: Equation, orders: int) -> Any:
    """Returns the program of an equation's derivative; if it has none, a value that equals nothing else."""
    moves = [jnp.issubdtype(operand.aval.dtype, jnp.inexact) for operand in equation.invars]
    try:
        if "jvp" in equation.primitive.name:
            return _param(derivative(equation, moves), orders)
        return _param(jax.make_jaxpr(_pull_back(equation, moves))([var.aval for var in equation.invars]), orders)
    except Exception:  # whatever a user's rule raises: its layers stay as they are, and raise where they are used
        return object()


def _pull_back(equation: Equation, moves: Sequence[bool]) -> Callable[[list[Any]], Any]:
    def of(values: list[Any]) -> Any:
        moving, still = eqx.partition(values, list(moves))
        outs, back = jax.vjp(lambda moving: bind(equation, eqx.combine(moving, still)), moving)
        return outs, back(outs)

    return of
