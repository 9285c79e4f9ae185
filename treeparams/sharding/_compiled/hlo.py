"""Parses the text of a compiled program.

XLA writes a compiled program as computations, each a list of operations, with one operation on each line:

    %name = f32[64,32]{1,0} all-gather(%operand), replica_groups={{0,1,2,3}}, dimensions={0}

A loop, a branch or a fusion names the computations that it runs. So the bytes or operations of one run are a sum over
the computations from the entry downwards, with the rounds of each loop as factors. JAX has no other public view of a
compiled program. The jaxpr does not help, since XLA adds, joins, moves and removes operations.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_OPERATION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")  # f32[64,32]; of a dynamic dimension, <=64, the bound
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


def shapes_in(types: str) -> list[tuple[int, ...]]:
    """Returns the shapes of an array, or of a tuple's arrays, from the text of its type."""
    return [_sizes(dimensions) for _, dimensions in _ARRAY.findall(types)]


def bytes_in(types: str) -> int:
    """Returns the bytes of an array, or of a tuple's arrays together, from the text of its type.

    >>> bytes_in("(f32[64,32]{1,0}, pred[3], s4[6], f8e4m3fn[2], c64[], token[])")
    8208
    """
    total = 0
    for dtype, dimensions in _ARRAY.findall(types):
        bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["0"])[0])
        total += -(-bits * math.prod(_sizes(dimensions)) // 8)
    return total


def _sizes(dimensions: str) -> tuple[int, ...]:
    return tuple(int(size.removeprefix("<=")) for size in dimensions.split(",") if size)
