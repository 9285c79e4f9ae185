"""What a compiled program moves between devices, read from its text."""

import collections
import math
import re
from typing import Any, NamedTuple

import jax

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_OPERATION = re.compile(rf"%?([\w.\-]+) = (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*?)\)(, .*)?$")
_RESULT = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) [a-z]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_CALLED = re.compile(r"\b(body|calls|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_ROUNDS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_LIMIT = re.compile(r"constant\((\d+)\)")
_ARRAY = re.compile(r"\b([a-z]+\d*)\w*\[([\d,]*)\]")
_ONE_EACH = re.compile(r"replica_groups=(\{(\{\d+\},?)+\}|\[\d+,1\])")


class Moved(NamedTuple):
    """The bytes that one device moves in a run, and how often each kind of collective runs.

    An all-gather counts for its result, a reduce-scatter for its operand, an all-reduce, which does both, twice.
    """

    bytes: int
    counts: dict[str, int]


def moved(compiled: jax.stages.Compiled | str, ignore: int = 64) -> Moved:
    """Counts what a program moves, without collectives of at most `ignore` bytes; those of a loop in each round."""
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    bodies, entry = _computations(text)
    size, counts = 0, collections.Counter[str]()

    def visit(name: str, times: int) -> None:
        nonlocal size
        for line in bodies.get(name, []):
            found = _OPERATION.search(line)
            if found and not _ONE_EACH.search(line) and not _is_end(line, bodies[name]):
                kind = _kind(name, found[3])
                its = _counted(kind, found, bodies[name])
                size += times * its if its > ignore else 0
                counts[kind] += times if its > ignore else 0
            rounds = times * _rounds(line, bodies) if " while(" in line else times
            for role, names in _CALLED.findall(line):
                if role != "to_apply" or " call(" in line:
                    for each in re.findall(r"[\w.\-]+", names):
                        visit(each, rounds)

    visit(entry, 1)
    return Moved(size, dict(+counts))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies, entry, current = dict[str, list[str]](), "", list[str]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        else:
            current.append(line)
    return bodies, entry


def _kind(computation: str, kind: str) -> str:
    """As TPU writes a reduce-scatter: a fusion of an all-reduce and a slice of its result."""
    return "reduce-scatter" if kind == "all-reduce" and computation.startswith("all-reduce-scatter") else kind


def _is_end(line: str, lines: list[str]) -> bool:
    """Whether an asynchronous collective of TPU, which is several fusions, does not start here."""
    return "chain_id=" in line and not any("AsyncCollectiveStart" in each for each in lines)


def _counted(kind: str, found: Any, lines: list[str]) -> int:
    names = re.findall(r"%?([\w.\-]+)(?:,|$)", re.sub(r"\S+\[[^ ]* ", "", found[4]))
    results = {each[1]: each[2] for each in map(_RESULT.match, lines) if each}
    operand = sum(_bytes(results.get(name, "")) for name in names)
    if kind == "all-gather":
        return _bytes(found[2]) - (operand if "-start(" in found[0] else 0)
    return 2 * operand if kind == "all-reduce" else operand


def _rounds(line: str, bodies: dict[str, list[str]]) -> int:
    """The rounds of a loop: as the compiler says, or the largest constant in its condition, as loops of a scan have."""
    if known := _ROUNDS.search(line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    return max(map(int, _LIMIT.findall("\n".join(bodies[condition[1]] if condition else []))), default=1)


def _bytes(types: str) -> int:
    bits = lambda dtype: 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype) or 0)
    size = lambda dimensions: math.prod(map(int, filter(None, dimensions.split(","))))
    return sum(-(-bits(dtype) * size(dimensions) // 8) for dtype, dimensions in _ARRAY.findall(types))
