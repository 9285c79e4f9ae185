"""Layouts and trees in words: what differs between two, and the table that a layout prints as."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from ._exact import exact
from ._structure import Structure, describe

_ROWS = 40
_NAMES = 6


def differences(these: Structure, those: Structure, *, as_template: bool = False) -> Iterator[str]:
    """What differs between two structures, one line per leaf or node.

    Args:
        these: the first.
        those: the second.
        as_template: whether anything may stand where the first has no array.
    """
    for path in these.paths:
        if path not in those.index:
            yield f"{path!r} is only in the first"
    for path, j in those.index.items():
        i = these.index.get(path)
        if i is None:
            yield f"{path!r} is only in the second"
        elif these.specs[i] != those.specs[j] and not (as_template and these.specs[i] is None):
            yield f"{path!r} is {_leaf(these, i)} in the first, {_leaf(those, j)} in the second"
    if these.paths == those.paths and these.statics != those.statics:
        yield from _static_differences(these, those)


def _leaf(structure: Structure, i: int) -> str:
    spec = structure.specs[i]
    return describe(spec) if spec else "no array"


def _static_differences(these: Structure, those: Structure) -> Iterator[str]:
    found = False
    for here, there in zip(these.nodes, those.nodes, strict=False):
        where = f"the node at {here.path!r}" if here.path else "the root"
        if here.cls is not there.cls:
            yield f"{where} is a {here.cls.__qualname__} in the first, a {there.cls.__qualname__} in the second"
        elif exact(here.static) != exact(there.static):
            yield f"{where} has other static values: {here.static!r} in the first, {there.static!r} in the second"
        else:
            continue
        found = True
    if not found:
        yield "they differ in nodes without leaves"


def without_middle(rows: Sequence[Sequence[str]], width: int) -> Sequence[Sequence[str]]:
    """The rows of a table; of many the first and the last, with one of this width between them that counts the rest."""
    left_out = len(rows) - _ROWS
    if left_out <= 0:
        return rows
    return [*rows[: _ROWS // 2], [f"... {left_out:,} more", *[""] * (width - 1)], *rows[-_ROWS // 2 :]]


def in_columns(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as aligned text; the columns in `right` are aligned to the right. Of many rows the middle is left out.

    >>> in_columns(["path", "size"], [["a", "10"], ["b.c", "5"]], right=[1])
    ['path  size', 'a       10', 'b.c      5']
    """
    cells = [list(header), *map(list, without_middle(rows, len(header)))]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    align = ["rjust" if column in right else "ljust" for column in range(len(header))]
    return [
        "  ".join(getattr(cell, how)(width) for cell, how, width in zip(row, align, widths, strict=True)).rstrip()
        for row in cells
    ]


def first_few(names: Sequence[str]) -> str:
    """Names in one line, of many the first ones and the last."""
    shown = names if len(names) <= _NAMES else [*names[: _NAMES - 1], "...", names[-1]]
    return ", ".join(shown)


def count_of(name: str, value: Any, what: str, least: int = 1) -> int:
    """An argument that counts something, as a Python int.

    Raises:
        ValueError: it is no whole number, or less than the least.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be a whole number of {what}, at least {least}, got {value!r}")
    return number
