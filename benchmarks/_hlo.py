"""Parses the text of a compiled program, and sums counts over all operations of one run.

XLA writes a compiled program as computations, each a list of operations, with one operation on each line:

    %name = f32[64,32]{1,0} all-gather(%operand), replica_groups={{0,1,2,3}}, dimensions={0}

A loop, a branch or a fusion names the computations that it runs. So the bytes or operations of one run are a sum over
the computations from the entry downwards, with the rounds of each loop as factors.
"""

import collections
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_OPERATION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
LOOP = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
CALLED = re.compile(r"\b(?:calls|to_apply|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_BRACKETS = re.compile(r"/\*.*?\*/|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}")


class Operation(NamedTuple):
    """One line of a computation."""

    kind: str
    result: str  # its type
    operands: tuple[str, ...]  # names of operations of the same computation; of a constant its value
    attributes: str
    is_root: bool


Computation = Mapping[str, Operation]


class Text(NamedTuple):
    """A program: the operations of each computation by name, and the name of the computation that runs first."""

    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def of(cls, text: str) -> "Text":
        """Parses the result of `compiled.as_text()`."""
        computations: dict[str, dict[str, Operation]] = {}
        entry, current = None, {}
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                current = computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
            elif found := _OPERATION.match(line):
                root, name, result, kind, rest = found.groups()
                end = _end(rest)
                current[name] = Operation(kind, result, tuple(_operands(rest[:end])), rest[end:], bool(root))
        if entry is None:
            raise ValueError(
                "expected the text of a compiled program, such as compiled.as_text(); it has no ENTRY computation"
            )
        return cls(computations, entry)


def _end(text: str) -> int:
    """Returns the position of the bracket that closes the one opened before this text."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return i
    return len(text)


def _operands(text: str) -> Iterator[str]:
    """Yields the names in `%a, f32[2,3]{1,0} %b, (f32[], s32[]) %c`. Some versions write types, some write `%`."""
    # The pattern takes the innermost brackets away, those that hold no others; so again, until none are left.
    before = ""
    while before != text:
        before, text = text, _BRACKETS.sub("", text)
    for operand in text.split(","):
        if words := operand.split():
            yield words[-1].removeprefix("%")


def names(pattern: re.Pattern[str], attributes: str) -> list[str]:
    """Returns the names after these words: one name, or several in braces."""
    return [name for found in pattern.findall(attributes) for name in re.findall(r"[\w.\-]+", found)]


# -- Loops -------------------------------------------------------------------------------------------------------------

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
    """Returns how often a counter is on the right side of a limit."""
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


# -- Sums --------------------------------------------------------------------------------------------------------------

_BRANCHES = re.compile(r"\b(?:branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)")

Counts = Mapping[Any, int | None]
"""How often each thing occurs; `None` if that is not known."""


def total(products: Iterable[tuple[int | None, int | None]]) -> int | None:
    """Sums products; `None` if a factor is not known."""
    found = 0
    for one, other in products:
        if one is None or other is None:
            return None
        found += one * other
    return found


class Sums(NamedTuple):
    """The counts for one run of a program, and how certain they are."""

    counts: Counts
    has_unknown: bool  # whether some is within a loop of unknown length
    has_branches: bool  # whether some is within a conditional


def summed(
    text: Text,
    of_one: Callable[[str, Operation, Computation], Counts],
    weight: Callable[[Counts], float],
    rounds: Callable[[int | None], int | None] = lambda trips: trips,
) -> Sums:
    """Sums the counts of operations over one run of a program.

    Args:
        text: the program.
        of_one: counts for one operation, from the name of its computation, the operation, and the computation.
        weight: the weight of counts. Of a conditional, the heaviest branch counts.
        rounds: maps the number of rounds of a loop to the number that it counts for.
    """
    open_questions = {"unknown": False, "branches": False}

    # A computation may be called by several others, and loops may be nested. So its counts are found once, and
    # multiplied where it is called. `None` is an unknown number, and its products are unknown too.
    @functools.cache
    def of(name: str) -> Counts:
        counts: dict[Any, int | None] = collections.defaultdict(int)

        def add(inner: Counts, times: int | None) -> None:
            for key, each in inner.items():
                counts[key] = total([(counts[key], 1), (each, times)])

        operations = text.computations.get(name, {})
        for operation in operations.values():
            found = of_one(name, operation, operations)
            if found:
                add(found, 1)
            elif operation.kind == "while":
                trips = rounds(trips_of(text, operation, operations))
                for role, called in LOOP.findall(operation.attributes):
                    open_questions["unknown"] |= trips is None and bool(of(called))
                    # The condition is evaluated once more than the body: it ends the loop.
                    add(of(called), trips if trips is None or role == "body" else trips + 1)
            elif operation.kind == "conditional":
                branches = [of(called) for called in names(_BRANCHES, operation.attributes)]
                open_questions["branches"] |= any(branches)
                add(max(branches, key=weight, default={}), 1)
            elif not operation.kind.endswith(("-done", "-update")):  # these name once more what was started
                for called in names(CALLED, operation.attributes):
                    add(of(called), 1)
        return dict(counts)

    return Sums(of(text.entry), open_questions["unknown"], open_questions["branches"])
