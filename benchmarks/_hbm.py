"""How many bytes a program for an accelerator reads from its main memory and writes to it, read from its text.

XLA's own count, `bytes accessed`, is no measure of that for a TPU. Reads and writes of the fast memory of the core
(128 MB of a v5e) are in it as those of the main memory are, and the body of a loop is counted once. Here each array in
main memory counts as it is padded to tiles, a slice as what is read of it, an update in place as what is written, and a
loop with its rounds. Arrays in fast memory count nothing.
"""

import math
import re
from typing import NamedTuple

from ._hlo import CALLED, Computation, Operation, Text, names, summed

_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\](?:\{([\d,]*):?([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all", "partition-id")
_INNER = ("while", "conditional", "call")
_SLICES = ("slice", "dynamic-slice")


class _Array(NamedTuple):
    bytes: int
    is_in_main: bool


def main_memory_bytes(text: str) -> int | None:
    """Bytes that one run reads from main memory and writes to it; `None` if a loop's rounds depend on values."""
    parsed = Text.of(text)
    count = lambda _, operation, beside: {"bytes": _moved(parsed, operation, beside)} if _counts(operation) else {}
    return summed(parsed, count, lambda counts: counts.get("bytes") or 0).counts.get("bytes", 0)


def _counts(operation: Operation) -> bool:
    return operation.kind not in (*_FREE, *_INNER) and not operation.kind.endswith(("-done", "-update"))


def _arrays(types: str) -> list[_Array]:
    found = []
    for letters, bits, dimensions, order, layout in _ARRAY.findall(types):
        sizes = [int(size) for size in dimensions.split(",") if size]
        tile = [int(size) for found in _TILE.findall(layout)[:1] for size in found.split(",")]
        for axis, size in zip([int(axis) for axis in order.split(",") if axis], reversed(tile), strict=False):
            sizes[axis] = -(-sizes[axis] // size) * size  # padded to whole tiles
        width = 8 if letters == "pred" else int(bits or 0)
        found.append(_Array(math.prod(sizes) * width // 8, "S(" not in layout))
    return found


def _within(text: Text, fusion: Operation) -> Computation:
    return text.computations[names(CALLED, fusion.attributes)[0]]


def _moved(text: Text, operation: Operation, beside: Computation) -> int:
    results = _arrays(operation.result)
    if operation.kind.endswith("-start"):  # of a copy: the two sides, of which a slice has the smaller one
        size = min(results[0].bytes, results[1].bytes)
        return size * sum(each.is_in_main for each in results[:2])
    operands = [_arrays(beside[name].result) for name in operation.operands if name in beside]
    if operation.kind == "fusion":
        inner = _within(text, operation)
        written = [found if it.is_in_main else 0 for found, it in zip(_written(text, inner), results, strict=True)]
        reads = [
            min(_read(text, inner, i), arrays[0].bytes)
            for i, arrays in enumerate(operands)
            if arrays and arrays[0].is_in_main
        ]
        return sum(written) + sum(reads)
    if operation.kind in _SLICES:
        return results[0].bytes * (results[0].is_in_main + operands[0][0].is_in_main)
    if operation.kind == "dynamic-update-slice":
        return operands[1][0].bytes * (results[0].is_in_main + operands[1][0].is_in_main)
    return sum(each.bytes for arrays in (results, *operands) for each in arrays if each.is_in_main)


def _read(text: Text, computation: Computation, number: int) -> int:
    """How much a fusion reads of one of its operands."""
    is_it = lambda each: each.kind == "parameter" and int(each.operands[0]) == number
    return _read_of(text, computation, next(name for name, each in computation.items() if is_it(each)))


def _read_of(text: Text, computation: Computation, name: str) -> int:
    total = 0
    for user, operation in computation.items():
        for i, operand in enumerate(operation.operands):
            if operand != name:
                continue
            if operation.kind == "bitcast":
                total += _read_of(text, computation, user)
            elif operation.kind == "fusion":
                total += _read(text, _within(text, operation), i)
            elif operation.kind in _SLICES:
                total += _arrays(operation.result)[0].bytes if i == 0 else 0
            elif operation.kind != "dynamic-update-slice" or i == 1:
                return _arrays(computation[name].result)[0].bytes
    return total


def _written(text: Text, computation: Computation) -> list[int]:
    """How much a fusion writes of each of its results."""
    root = next(name for name, each in computation.items() if each.is_root)
    is_tuple = computation[root].kind == "tuple"
    roots = computation[root].operands if is_tuple else (root,)
    return [size for name in roots for size in _written_of(text, computation, name)]


def _written_of(text: Text, computation: Computation, name: str) -> list[int]:
    operation = computation[name]
    if operation.kind == "bitcast":
        return _written_of(text, computation, operation.operands[0])
    if operation.kind == "fusion":
        return _written(text, _within(text, operation))
    if operation.kind == "dynamic-update-slice":
        return [_arrays(computation[operation.operands[1]].result)[0].bytes]
    return [each.bytes for each in _arrays(operation.result)]
