"""Finds how often a loop of a compiled program runs."""

import re
from typing import NamedTuple

from .hlo import CALLED, LOOP, Computation, Operation, Text, names

_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_DIRECTION = re.compile(r"\bdirection=(\w+)")


class _Carried(NamedTuple):
    """An element of the tuple that a loop carries, plus a number. `element` is `None` for the whole tuple."""

    element: int | None
    plus: int = 0


class _Compared(NamedTuple):
    """A comparison of two values."""

    left: "_Value"
    right: "_Value"
    direction: str


_Value = int | _Carried | _Compared | None
_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def trips_of(text: Text, loop: Operation, beside: Computation) -> int | None:
    """Returns how often the body of a loop runs; `None` if that depends on values.

    Some compilers write this number beside the loop. The TPU compiler does not. There it is derived from the condition,
    `element i < limit`, from the number that the body adds to this element, and from the constant that it starts with.
    """
    if known := _TRIPS.search(loop.attributes):
        return int(known[1])
    called = {role: text.computations.get(name, {}) for role, name in LOOP.findall(loop.attributes)}
    if len(called) < 2:
        return None
    test = _value_of_root(text, called["condition"], (_Carried(None),))
    if not isinstance(test, _Compared):
        return None
    if not isinstance(test.left, _Carried):
        test = _Compared(test.right, test.left, _FLIPPED.get(test.direction, ""))
    start = beside.get(loop.operands[0])
    after = next((operation for operation in called["body"].values() if operation.is_root), None)
    if not isinstance(test.left, _Carried) or start is None or after is None:
        return None

    def changed(element: int | None) -> tuple[_Value, _Value]:
        """Returns the first value of an element, and its value after a round."""
        return (
            _element(text, start, beside, (), element),
            _element(text, after, called["body"], (_Carried(None),), element),
        )

    limit = test.right
    if isinstance(limit, _Carried) and limit.element is not None:  # carried along as it is
        begin, kept = changed(limit.element)
        limit = begin + limit.plus if isinstance(begin, int) and kept == _Carried(limit.element) else None
    begin, following = changed(test.left.element)
    if not isinstance(begin, int) or not isinstance(limit, int):
        return None
    if not isinstance(following, _Carried) or following.element != test.left.element:
        return None
    return _rounds(begin + test.left.plus, following.plus, limit, test.direction)


def _rounds(start: int, step: int, limit: int, direction: str) -> int | None:
    """Returns how often a counter is on the right side of a limit.

    >>> _rounds(0, 1, 6, "LT"), _rounds(2, 3, 20, "LT"), _rounds(5, -1, 0, "GE"), _rounds(0, 0, 6, "LT")
    (6, 6, 6, None)
    """
    if direction in ("GT", "GE"):
        start, step, limit, direction = -start, -step, -limit, _FLIPPED[direction]
    distance = limit - start + (direction == "LE")
    if direction == "NE" and step and distance % step == 0 and distance // step >= 0:
        return distance // step
    if direction not in ("LT", "LE") or step <= 0:
        return None
    return max(0, -(-distance // step))


def _value_of_root(text: Text, computation: Computation, arguments: tuple[_Value, ...]) -> _Value:
    root = next((name for name, operation in computation.items() if operation.is_root), "")
    return _value(text, root, computation, arguments)


def _value(text: Text, name: str, beside: Computation, arguments: tuple[_Value, ...]) -> _Value:
    """Returns the result of an operation if it is a number, a carried element or a comparison of these."""
    operation = beside.get(name)
    if operation is None:
        return None
    kind, operands = operation.kind, operation.operands
    if kind == "constant":
        return int(operands[0]) if operands and re.fullmatch(r"-?\d+", operands[0]) else None
    if kind == "parameter":
        number = int(operands[0])
        return arguments[number] if number < len(arguments) else None
    if kind in _SAME:
        return _value(text, operands[0], beside, arguments)
    if kind == "get-tuple-element":
        number = int((_INDEX.search(operation.attributes) or ["", "0"])[1])
        return _element(text, beside.get(operands[0]), beside, arguments, number)
    if kind in ("add", "subtract", "compare", "fusion", "call"):
        values = tuple(_value(text, operand, beside, arguments) for operand in operands)
        if kind in ("fusion", "call"):
            called = names(CALLED, operation.attributes)
            return _value_of_root(text, text.computations.get(called[0], {}), values) if called else None
        if kind == "compare":
            return _Compared(values[0], values[1], (_DIRECTION.search(operation.attributes) or ["", ""])[1])
        return (
            _plus(values[0], values[1])
            if kind == "add"
            else _plus(values[0], -values[1] if isinstance(values[1], int) else None)
        )
    return None


def _element(
    text: Text, whole: Operation | None, beside: Computation, arguments: tuple[_Value, ...], number: int | None
) -> _Value:
    """Returns an element of a tuple."""
    if whole is None or number is None:
        return None
    if whole.kind == "tuple":
        return _value(text, whole.operands[number], beside, arguments)
    if whole.kind in ("copy", "opt-barrier"):
        return _element(text, beside.get(whole.operands[0]), beside, arguments, number)
    is_carry = whole.kind == "parameter" and arguments[int(whole.operands[0]) :][:1] == (_Carried(None),)
    return _Carried(number) if is_carry else None


def _plus(one: _Value, other: _Value) -> _Value:
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    if isinstance(one, int):
        one, other = other, one
    if isinstance(one, _Carried) and one.element is not None and isinstance(other, int):
        return _Carried(one.element, one.plus + other)
    return None
