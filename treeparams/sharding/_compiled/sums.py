"""Sums counts over all operations of one run of a compiled program."""

import collections
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .hlo import CALLED, LOOP, Computation, Operation, Text, names
from .loops import trips_of

_BRANCHES = re.compile(r"\b(?:branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)")

UNKNOWN = "how often a loop runs depends on values, so the bytes {} within it are not counted"
BRANCH = "of a conditional, the branch that {} most is counted"

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
