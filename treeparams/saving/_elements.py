"""Reads from its JAX program how a function of arrays moves their elements.

Each operation on elements must be one that moves them. Operations on constants alone, such as those for the rows of
`x[jnp.array([2, 0, 1])]`, may compute anything. A transpose, a slice or a concatenation never repeats an element. So a
program of such operations that uses each array once can only move elements: there is no need to look at the elements,
and the program moves any arrays of the same shapes.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._programs import bind, called
from .._tree.dtypes import common_dtype, in_dtype, is_complex, is_inexact


class NotMovedError(Exception):
    """Raised if a function does more than move elements."""


# -- Reading -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Elements:
    """An array of elements: an argument, or the result of an operation. Any other value is a constant."""

    step: "Step | None" = None


@dataclasses.dataclass(eq=False)
class Step:
    """An operation on elements, and its operands, of which some may be constants."""

    eqn: JaxprEqn
    operands: list[Any]
    results: list[Elements] = dataclasses.field(default_factory=list)


# These give each element of their first operand once, or drop it.
_MOVES = {"dynamic_slice", "reshape", "rev", "slice", "split", "squeeze", "transpose"}
JOINS = {"concatenate", "stack"}
# Of these only numbers tell. Which operands of each may be elements; the others say where they go.
_BY_PLACES = {"broadcast_in_dim": (0,), "gather": (0,), "pad": (0, 1), "dynamic_update_slice": (0, 1)}
_BY_PLACES |= {"scatter": (0, 2), "mul": (0, 1)}
_SAME = {"copy", "device_put", "optimization_barrier", "stop_gradient"}
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}
_COMMUTE = {"add", "mul"}


def results_of(program: ClosedJaxpr, arguments: Sequence[Elements]) -> list[Elements]:
    """Returns the results of a program for these arguments, all of which must be elements."""
    results = _read(program.jaxpr, program.consts, arguments)
    if not all(map(are_elements, results)):
        raise NotMovedError
    return results


def _read(jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Returns the results of a program for elements and constants."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _read_step(eqn, _values(eqn.invars, known)), strict=True))
    return _values(jaxpr.outvars, known)


def _values(atoms: Sequence[Any], known: Mapping[Any, Any]) -> list[Any]:
    """Returns the values of literals and of variables."""
    return [atom.val if isinstance(atom, Literal) else known[atom] for atom in atoms]


def _read_step(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """Returns the results of one operation.

    An operation on constants alone runs as it is. Any other operation that does not move elements raises
    `NotMovedError`.
    """
    name, program = eqn.primitive.name, called(eqn)
    if not any(map(are_elements, values)):
        return bind(eqn, values)
    if program is not None:
        return _read(program.jaxpr, program.consts, values)
    if name in _SAME or (name == "convert_element_type" and _is_rounding(eqn)):
        return values
    kept = _kept(eqn, values)
    if kept is not None:
        return [kept]
    places = range(len(values)) if name in JOINS else (0,) if name in _MOVES else _BY_PLACES.get(name, ())
    if name == "select_n":
        places = range(1, len(values))
    if any(are_elements(value) and i not in places for i, value in enumerate(values)):
        raise NotMovedError
    if name == "mul" and not _is_mask(values):
        raise NotMovedError
    step = Step(eqn, values)
    step.results = [Elements(step) for _ in eqn.outvars]
    return step.results


def are_elements(value: object) -> bool:
    """Returns whether a value consists of elements, and is not a constant."""
    return isinstance(value, Elements)


def _is_rounding(eqn: Any) -> bool:
    """Returns whether a conversion changes only the precision."""
    before, after = (atom.aval.dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    return is_inexact(before) and is_inexact(after) and is_complex(before) == is_complex(after)


def _kept(eqn: Any, values: list[Any]) -> Elements | None:
    """Returns the elements if the operation adds zero to them or multiplies them by one."""
    name = eqn.primitive.name
    if name not in _NEUTRAL:
        return None
    for one, other in ((0, 1), (1, 0)) if name in _COMMUTE else ((0, 1),):
        is_alone = are_elements(values[one]) and not are_elements(values[other])
        is_whole = eqn.invars[one].aval.shape == eqn.outvars[0].aval.shape
        if is_alone and is_whole and bool(np.all(np.asarray(values[other]) == _NEUTRAL[name])):
            return values[one]
    return None


def _is_mask(values: Sequence[Any]) -> bool:
    """Returns whether elements are multiplied by constant zeros and ones."""
    constants = [np.asarray(value) for value in values if not are_elements(value)]
    return len(constants) == 1 and bool(np.all((constants[0] == 0) | (constants[0] == 1)))


# -- Which operations are needed, and whether they are seen to move ----------------------------------------------------


def _steps_to(results: Sequence[Elements]) -> list[Step]:
    """Returns the operations that make these results, each after those that it needs."""
    found: dict[int, Step] = {}
    waiting = [result.step for result in results if result.step is not None]
    while waiting:
        step = waiting[-1]
        needed = [each.step for each in step.operands if are_elements(each) and each.step is not None]
        needed = [each for each in needed if id(each) not in found]
        if id(step) in found or not needed:
            found[id(waiting.pop())] = step
        else:
            waiting += needed
    return list(found.values())


def arguments_of(result: Elements) -> list[Elements]:
    """Returns the arguments that a result is made from."""
    operands = [each for step in _steps_to([result]) for each in step.operands if are_elements(each)]
    return [*{id(each): each for each in (result, *operands) if each.step is None}.values()]


def are_seen_to_move(results: Sequence[Elements]) -> bool:
    """Returns whether all operations are of kinds that never repeat an element, and use each array once."""
    steps = _steps_to(results)
    used = [*results, *(each for step in steps for each in step.operands if are_elements(each))]
    return len(set(map(id, used))) == len(used) and all(map(_is_simple, steps))


def _is_simple(step: Step) -> bool:
    name, ends = step.eqn.primitive.name, cast(Any, (step.eqn.invars[0], step.eqn.outvars[0]))
    if name == "broadcast_in_dim":
        before, after = (math.prod(atom.aval.shape) for atom in ends)
        return before == after
    return name in _MOVES or (name in JOINS and all(map(are_elements, step.operands)))


# -- Running -----------------------------------------------------------------------------------------------------------


def run(
    results: Sequence[Elements], arrays: Mapping[int, Any], do: Callable[[Step, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Returns the arrays for the results. `arrays` has the array for each argument, by the argument's `id`."""
    known = dict(arrays)
    for step in _steps_to(results):
        values = [known[id(each)] if are_elements(each) else each for each in step.operands]
        known.update(zip(map(id, step.results), do(step, values), strict=True))
    return [known[id(result)] for result in results]


def move(step: Step, values: list[Any]) -> list[Any]:
    """Runs an operation that moves elements on arrays of any dtype."""
    if step.eqn.primitive.name in JOINS:  # casts of the program are left out here
        dtype = common_dtype([array.dtype for array in values])
        values = [in_dtype(array, dtype) for array in values]
    return bind(step.eqn, values)
