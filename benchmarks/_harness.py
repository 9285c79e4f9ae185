"""Interleaved timing, and the tables made of it.

A *case* is one thing to call. Each round calls all cases of a row, in an order that is drawn anew, and the median over
the rounds counts: a machine that slows down for a second slows down all of them. Before each timed call comes one of
the same case off the clock, as in training, where a program follows itself. Both matter: with a fixed order a case is
timed with the caches that the one before it leaves, and those at the ends of a row that is called there and back follow
themselves, which showed programs of equal speed as 1.0 and 1.3 to 1.7. A *sweep* is a row for each of several sizes,
all relative to one of its cases, the yardstick.

A claim about two medians is missed where their ratio is above the limit and the 95 % interval of the ratio too: the
rounds are drawn again, a thousand times, with replacement (a bootstrap). Where the interval holds the limit the verdict
is "unclear". What has fewer samples than three, or is no time, is what it is.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

_BATCH = 0.3e-3  # seconds; faster cases are called several times in a row, or the clock itself would count
_SLOW = 50e-3  # such a call finds no caches of its own anyway


class Scale(NamedTuple):
    """How much to run."""

    sizes: tuple[int, ...]  # numbers of leaves
    seconds: float  # per row
    rounds: int  # at least
    patience: float  # seconds that a first call may take
    is_smoke: bool = False


FULL = Scale((10, 100, 1000, 5000), seconds=1.2, rounds=5, patience=30)
SMOKE = Scale((10, 20), seconds=0.02, rounds=2, patience=10, is_smoke=True)
_MOST_ROUNDS = 300


class Case(NamedTuple):
    """Something to call."""

    call: Callable[..., Any]
    prepare: Callable[[], Any] | None = None  # off the clock, before each call, which gets its result
    rounds: int = _MOST_ROUNDS  # at most
    in_a_row: int = 1  # calls, in each round, but for slow ones, which find no caches of their own anyway


class Median(float):
    """The median of samples, which it keeps: how far it is from another's is only as sure as they are."""

    samples: np.ndarray

    def __new__(cls, samples: Iterable[float]) -> "Median":
        made = super().__new__(cls, statistics.median(samples := list(samples)))
        made.samples = np.array(samples)
        return made


class Timing(NamedTuple):
    """What was measured of a case, in seconds."""

    first: float  # tracing and compilation included
    median: float


def interleave(cases: Mapping[str, Case], scale: Scale) -> dict[str, Timing]:
    """Times the cases, each once in a round."""
    firsts = {name: _clock(case, 1) for name, case in cases.items()}
    warm = {name: _clock(case, 1) for name, case in cases.items()}
    repeats = {name: 1 if case.prepare else _repeats(case, warm[name]) for name, case in cases.items()}
    again = [name for name, case in cases.items() if warm[name] < _SLOW and not case.prepare]
    per_round = sum(warm[name] * (repeats[name] + (name in again)) for name in cases)
    rounds = int(min(max(scale.seconds / per_round, scale.rounds), _MOST_ROUNDS))
    samples: dict[str, list[float]] = {name: [] for name in cases}
    shuffled = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for name in shuffled.sample(list(cases), len(cases)):
                if i < cases[name].rounds:
                    if name in again:
                        _clock(cases[name], 1)
                    samples[name].append(_clock(cases[name], repeats[name]))
    finally:
        gc.enable()
    return {name: Timing(firsts[name], Median(samples[name])) for name in cases}


def _repeats(case: Case, seconds: float) -> int:
    return max(1, round(_BATCH / seconds), min(case.in_a_row, round(_SLOW / seconds)))


def medians(calls: Mapping[str, Callable[[], Any]], scale: Scale, in_a_row: int = 1) -> dict[str, float]:
    """The median time of each call."""
    timings = interleave({name: Case(call, in_a_row=in_a_row) for name, call in calls.items()}, scale)
    return {name: timing.median for name, timing in timings.items()}


def _clock(case: Case, repeats: int) -> float:
    arguments = () if case.prepare is None else (case.prepare(),)
    result = None
    start = time.perf_counter()
    for _ in range(repeats):
        result = case.call(*arguments)
    stop = time.perf_counter()
    jax.block_until_ready(result)  # off the clock: a case that is to be timed to its end blocks by itself
    return (stop - start) / repeats


class Verdict(NamedTuple):
    """A line that says whether a target was met; `None` where the samples do not tell."""

    target: str
    is_met: bool | None
    found: str

    def __str__(self) -> str:
        return f"{self.word}: {self.target} ({self.found})"

    @property
    def word(self) -> str:
        return "unclear" if self.is_met is None else "met" if self.is_met else "**missed**"


_ENOUGH = 3  # samples for an interval


def at_most(limit: float, what: str, found: Mapping[str, float], name: str, of: str) -> Verdict:
    """Says whether something of one case keeps to a multiple, or to a fraction, of that of another."""
    is_met, ratio = _compared(found[name], found[of], limit)
    return Verdict(f"{what} of {name} <= {_times(limit)} {of}", is_met, ratio)


def _times(limit: float) -> str:
    return f"1/{1 / limit:.3g} of" if limit < 1 else f"{limit:g}x"


def _compared(value: float, of: float, limit: float) -> tuple[bool | None, str]:
    """Whether a value is at most a multiple of another, and the ratio with its interval, in words."""
    ratio, digits = value / of, 3 if value > of and value < 1.01 * of else 2
    text = f"1/{of / value:.1f}" if limit < 1 else f"{ratio:.{digits}f}x"
    samples = [each.samples for each in (value, of) if isinstance(each, Median) and len(each.samples) >= _ENOUGH]
    if len(samples) < 2:
        return ratio <= limit, text
    low, high = _interval(*samples)
    text += f", 1/{1 / high:.1f} to 1/{1 / low:.1f}" if limit < 1 else f", {low:.2f} to {high:.2f}"
    return True if ratio <= limit else None if low <= limit else False, text


def _interval(these: np.ndarray, those: np.ndarray) -> tuple[float, float]:
    random = np.random.default_rng(0)
    draws = [random.integers(len(each), size=(1000, len(each))) for each in (these, those)]
    if len(these) == len(those):  # of the same rounds: what slows one down slows down the other
        draws[1] = draws[0]
    ratios = np.median(these[draws[0]], axis=1) / np.median(those[draws[1]], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


class Table(NamedTuple):
    """A table, and the lines below it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[str | Verdict] = ()

    def markdown(self) -> str:
        """Markdown that reads as plain text too."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        ruler = [f"{'-' * (width - 1)}:" for width in widths]
        ruler[0] = "-" * widths[0]
        body = [_in_columns(row, widths) for row in (self.header, ruler, *self.rows)]
        return "\n".join([f"### {self.title}", "", *body, "", *(f"- {line}" for line in self.lines)]).rstrip()


def _in_columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    texts = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return f"| {' | '.join(texts)} |"


class Sweep:
    """The timings of cases at several sizes."""

    def __init__(self, timings: Mapping[int, Mapping[str, Timing]], notes: Sequence[str]) -> None:
        self.timings = timings
        self.notes = notes
        self.names = list(timings[min(timings)])  # at larger sizes the slow ones may be missing

    def table(self, title: str, lines: Iterable[str | Verdict]) -> Table:
        """Ratios to the first case, one row per size, and the growth exponents."""
        return self._table(title, lines, self.names, firsts=False)

    def firsts(self, title: str, lines: Iterable[str | Verdict], names: Sequence[str]) -> Table:
        """The same of the first calls of some cases."""
        return self._table(title, lines, names, firsts=True)

    def _table(self, title: str, lines: Iterable[str | Verdict], names: Sequence[str], firsts: bool) -> Table:
        rows = [[str(size), *self._row(size, names, firsts)] for size in self.timings]
        if len(self.timings) == 1:
            return Table(title, ["leaves", *names], rows, [*lines, *self.notes])
        for label, last in (("growth", 0), ("last step", 2)):
            exponents = [self.exponent(name, firsts, last) for name in names]
            rows.append([label, *("-" if np.isnan(each) else f"{each:.2f}" for each in exponents)])
        return Table(title, ["leaves", *names], rows, [*lines, *self.notes])

    def _row(self, size: int, names: Sequence[str], firsts: bool) -> list[str]:
        timings = {name: timing.first if firsts else timing.median for name, timing in self.timings[size].items()}
        return as_ratios([timings.get(name) for name in names], in_time)

    def exponent(self, name: str, firsts: bool = False, last: int = 0) -> float:
        """The growth exponent of a case in the number of leaves, over all or the last few of its sizes."""
        found = [(size, row[name]) for size, row in self.timings.items() if name in row][-last:]
        return fit_exponent({size: timing.first if firsts else timing.median for size, timing in found})

    def ratio_target(self, name: str, of: str, limit: float, sizes: Sequence[int] = ()) -> Verdict:
        """Says whether a case kept to a multiple of another at these sizes, or at every one."""
        rows = {size: row for size, row in self.timings.items() if name in row and of in row}
        asked = {size: row for size, row in rows.items() if size in sizes}
        rows, at = (asked, f" at {_listed(asked)} leaves") if asked else (rows, "")
        found = {size: _compared(row[name].median, row[of].median, limit) for size, row in rows.items()}
        worst = max(rows, key=lambda size: rows[size][name].median / rows[size][of].median)
        are_met = [is_met for is_met, _ in found.values()]
        is_met = False if False in are_met else None if None in are_met else True
        words = "; ".join(f"{found[size][1]} at {size} leaves" for size in sorted({worst, max(rows)}))
        return Verdict(f"{name} <= {_times(limit)} {of}{at}", is_met, words)

    def ratios(self, name: str, of: str) -> dict[int, float]:
        """What a case takes as a multiple of another, at the sizes at which both were run."""
        rows = {size: row for size, row in self.timings.items() if name in row and of in row}
        return {size: row[name].median / row[of].median for size, row in rows.items()}

    def growth_target(self, name: str, limit: float = 1.1, *, firsts: bool = False) -> Verdict:
        """Says whether the cost of a case grows with the number of leaves, and not much faster.

        First calls that got too slow for the next size have grown faster; calls may not have.
        """
        found = self.exponent(name, firsts)
        what = f"first call of {name}" if firsts else name
        stopped = [size for size, row in self.timings.items() if name not in row]
        beyond = f", and its first call too slow for {stopped[0]} leaves" if stopped else ""
        last = self.exponent(name, firsts, last=2)
        explained = f"{found:.2f}, in the last step {last:.2f}{beyond}"
        return Verdict(f"growth of {what} <= {limit:g}", found <= limit and not (firsts and stopped), explained)


def _listed(sizes: Iterable[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} and {last}" if others else last


def sweep(
    make: Callable[[int], Mapping[str, Callable[..., Any] | Case]], scale: Scale, largest: int | None = None
) -> Sweep:
    """Times the cases that `make(size)` gives, for each size up to the largest.

    A case whose first call got so slow that the next size would try the patience (compilation may be quadratic in the
    number of leaves) is left out from there on. What it takes at the smallest size is no matter of size.
    """
    sizes = [size for size in scale.sizes if largest is None or size <= largest]
    timings: dict[int, dict[str, Timing]] = {}
    notes: dict[str, str] = {}
    for size, after in zip(sizes, [*sizes[1:], 0], strict=True):
        made = {name: each if isinstance(each, Case) else Case(each) for name, each in make(size).items()}
        left = {name: case for name, case in made.items() if name not in notes}
        if not left:
            break
        timings[size] = interleave(left, scale)
        for name, timing in timings[size].items():
            grown = timing.first - timings[sizes[0]][name].first
            if grown * (after / size) ** 2 > scale.patience:
                first = in_time(timing.first)
                notes[name] = f"{name} was not run above {size} leaves, where its first call takes {first}."
    return Sweep(timings, list(notes.values()))


def fit_exponent(times: Mapping[int, float]) -> float:
    """The slope of the line through (log size, log time), by least squares."""
    if len(times) < 2:
        return float("nan")
    return float(np.polyfit(np.log(list(times)), np.log(list(times.values())), 1)[0])


def as_ratios(values: Sequence[float | None], unit: Callable[[float], str]) -> list[str]:
    """The first value in its unit, the others as multiples of it; a dash for `None`."""
    first = values[0]
    if not first:
        return ["-" if value is None else unit(value) for value in values]
    return [unit(first), *("-" if value is None else f"{value / first:.2f}x" for value in values[1:])]


def in_time(seconds: float) -> str:
    """A time to three digits.

    >>> in_time(0.00123), in_time(45), in_time(0.0009996)
    ('1.23 ms', '45 s', '1 ms')
    """
    for unit, name in ((1, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} us"
