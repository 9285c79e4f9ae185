"""Finds where each element goes: a program runs on the numbers of elements, and the results show their new places.

This covers programs that depend on the places in a constant, and programs that use an array several times.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._programs import bind
from ._elements import JOINS, Elements, NotMovedError, Step, are_elements, run

DROPPED, _FOREIGN = -1, -2
"""Stand-ins for the number of an element: a mask dropped one here; no element is here."""


def numbered(
    results: Sequence[Elements], arguments: Sequence[Elements], shapes: Sequence[tuple[int, ...]]
) -> list[np.ndarray]:
    """Returns the number of each element of the results, counted through the elements of all arguments in order."""
    starts = starts_of(shapes)
    if starts[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            f"numbers of 32 bits cannot follow {starts[-1]:,} elements; write the function with slices, transposes, "
            "reshapes and concatenations, and use each array once, which needs no numbers"
        )
    numbers = np.split(np.arange(starts[-1], dtype=np.int32), starts[1:-1])
    arrays = [own.reshape(shape) for own, shape in zip(numbers, shapes, strict=True)]
    known = dict(zip(map(id, arguments), arrays, strict=True))
    found = list(map(np.asarray, run(results, known, _number)))
    # Over all results together: an element that comes out in two of them is repeated, too.
    together, seen = np.concatenate(list(map(np.ravel, found))), np.zeros(starts[-1], bool)
    elements = together[together != DROPPED]
    if (elements < 0).any():
        raise NotMovedError
    seen[elements] = True
    if np.count_nonzero(seen) < len(elements):
        raise NotMovedError
    return found


def starts_of(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns where the elements of each array begin if all arrays follow one another, and where the last ones end."""
    return [*itertools.accumulate(map(math.prod, shapes), initial=0)]


def _number(step: Step, values: list[Any]) -> Sequence[Any]:
    """Returns the results of an operation on the numbers of elements."""
    name, eqn = step.eqn.primitive.name, step.eqn
    if name in _NUMBERED:
        return [_NUMBERED[name](step, values)]
    if name in JOINS or name == "pad":
        pairs = zip(step.operands, values, strict=True)
        values = [value if are_elements(it) else _foreign(value) for it, value in pairs]
    if name == "gather":  # behind the end of its operand it may fill in a number
        eqn = eqn.replace(params=eqn.params | {"fill_value": _FOREIGN})
    return bind(eqn, values)


def _foreign(constant: Any) -> np.ndarray:
    return np.full(np.shape(constant), _FOREIGN, np.int32)


def _masked(step: Step, values: list[Any]) -> np.ndarray:
    """Returns the numbers where a mask is one."""
    at = 0 if are_elements(step.operands[0]) else 1
    numbers, mask = np.asarray(values[at]), np.asarray(values[1 - at])
    return np.where((mask == 0) & (numbers != _FOREIGN), np.int32(DROPPED), numbers)


def _selected(step: Step, values: list[Any]) -> np.ndarray:
    """Returns the numbers that a constant selects from several arrays; zeros among elements drop them."""
    which, *cases = map(np.asarray, values)
    pairs = list(zip(cases, map(are_elements, step.operands[1:]), strict=True))
    is_known = functools.reduce(np.logical_or, [case != _FOREIGN for case, is_own in pairs if is_own])
    cases = [
        case if is_own else np.where((case == 0) & is_known, np.int32(DROPPED), np.int32(_FOREIGN))
        for case, is_own in pairs
    ]
    return np.choose(which.astype(np.int32), cases)


def _written(step: Step, values: list[Any]) -> np.ndarray:
    """Returns the numbers after others, or zeros, are written over some of them."""
    at = 2 if step.eqn.primitive.name == "scatter" else 1
    before = np.asarray(values[0]) if are_elements(step.operands[0]) else _foreign(values[0])
    new = np.asarray(values[at])
    is_new = are_elements(step.operands[at])
    if not is_new:
        new = np.full(new.shape, _FOREIGN if new.any() else DROPPED, np.int32)
    made = np.asarray(bind(step.eqn, [before, *values[1:at], new, *values[at + 1 :]])[0])
    if is_new and not np.isin(new, made).all():  # two are written to one place, and none says which is the last
        raise NotMovedError
    return np.where((made == DROPPED) & (before == _FOREIGN), np.int32(_FOREIGN), made)


_NUMBERED = {"dynamic_update_slice": _written, "mul": _masked, "scatter": _written, "select_n": _selected}
