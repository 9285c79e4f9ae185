"""An index in words: its table, and how it differs from another one."""

from collections.abc import Iterator, Mapping
from typing import Any

from .._tree.difference import Difference, compare, spec_rows, tie_rows
from .._tree.tables import Table
from .index import Index, Slot
from .untrained import no_arrays


def blocks(index: Index) -> list[Table | str]:
    """Returns the table of the parameters, and the lines below it."""
    slots, frozen, tied_to = index.slots, index.frozen, index.tied_to
    rows = [_row(slot, str(slot.row), f"{slot.offset:,}", tied_to) for slot in slots]
    rows += [_row(slot, "", "frozen", tied_to) for slot in frozen]
    table = Table(["path", "key", "row", "offset", "size", "tied to"], rows, right=[2, 3, 4])
    total = f"{count(len(slots), 'slot')}, {count(index.size, 'element')}, {index.nbytes:,} bytes"
    held = f"; {count(sum(slot.size for slot in frozen), 'element')} frozen" if frozen else ""
    others = no_arrays(index.structure)
    return [table, total + held, *([f"not trained: {others}"] if others else [])]


def _row(slot: Slot, row: str, offset: str, tied_to: Mapping[str, str]) -> list[str]:
    return [slot.path or '""', slot.key, row, offset, f"{slot.size:,}", tied_to.get(slot.path, "")]


def count(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural if needed."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def differences(these: Index, those: Index) -> list[Difference]:
    """Returns how two models differ: structure, static values, shapes, dtypes, trained parameters, and ties."""
    here, there = these.structure, those.structure

    def at_leaves(i: int, j: int) -> Iterator[Difference]:
        yield from spec_rows(here.paths[i], here.specs[i], there.specs[j])
        if here.is_parameter(i) and there.is_parameter(j) and these.trained[i] != those.trained[j]:
            words = ("trained", "frozen") if these.trained[i] else ("frozen", "trained")
            yield Difference(here.paths[i], "trained", *words)

    shared = here.index.keys() & there.index.keys()
    return [*compare(here, there, at_leaves), *tie_rows(_groups(these), _groups(those), shared.__contains__)]


def _groups(index: Index) -> dict[str, dict[str, Any]]:
    """Returns the paths of each tie, and for each alias its transforms."""
    paths = index.structure.paths
    # The notes are compared between two models, in which leaves have other numbers: so these are left out.
    return {
        paths[source]: {paths[source]: "its source"}
        | {paths[each.leaf]: each._replace(leaf=0, source=0) for each in its}
        for source, its in index.aliases.items()
    }
