"""A plan in words: its rows, its table, and its problems."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .._files.names import Names, heads_of
from .._tree.paths import nearest
from .._tree.text import Table, describe, quoted
from ._contents import Contents
from ._fit import Fit, shown


class Row(NamedTuple):
    """An array of the model, and the names that come there."""

    path: str
    names: tuple[str, ...]  # of the source; none: nothing comes
    how: str  # the function applied to them; empty if none
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        names = ", ".join(shown([name]) for name in self.names) or "nothing"
        how = f" by {self.how}" if self.how else ""
        return f"{shown([self.path])}: {describe(self)}, from {names}{how}"


def rows_of(contents: Contents, found: Fit) -> tuple[Row, ...]:
    """Returns the arrays of a model, ties once."""
    rows = []
    for leaf in contents.stored.values():
        spec, move = contents.spec(leaf), found.comes.get(leaf)
        names, how = (move.route.sources, move.route.how) if move else ((), "")
        if move and len(move.route.targets) > 1:
            how += f", {move.number + 1} of {len(move.route.targets)}"
        rows.append(Row(contents.structure.paths[leaf], names, how, spec.shape, spec.dtype))
    return tuple(rows)


def blocks(contents: Contents, found: Fit, rows: Sequence[Row]) -> list[Table | str]:
    """Returns the table of a plan, and a line with the number of arrays that come from the source."""
    why = dict.fromkeys(found.missing, "missing") | dict.fromkeys(found.kept, "stays")
    cells = [
        [
            shown([contents.short_names[leaf]]),
            shown(row.names) or "-",
            row.how if row.names else why.get(leaf, "disagrees"),
            describe(row),
        ]
        for leaf, row in zip(contents.stored.values(), rows, strict=True)
    ]
    used = sum(1 for row in rows if row.names)
    return [Table(["path", "from", "how", "is"], cells), f"{used} of {len(rows)} arrays come from the source"]


def problems(contents: Contents, source: Names, found: Fit) -> list[str]:
    """Returns all problems, one line each."""
    heads = heads_of([contents.names[leaf] for leaf in found.missing], source.specs)
    if heads:
        call = f"names = saving.names(path, {heads[-1]!r}), saving.plan(names, model)(names)"
        return [f"the source has such a model below {quoted(heads)}; to load one, write {call}"]
    paths = [contents.short_names[leaf] for leaf in found.missing]
    few = len(paths) * len(found.unused) < 1000  # the nearest of many takes long to find
    unused, missing = (found.unused, paths) if few else ((), ())
    return [
        *(f"{path!r} is missing: nothing comes to it{nearest(path, unused)}" for path in paths),
        *(
            f"{name!r} is unused: no array is at {to or name!r}{nearest(to or name, missing)}"
            for name, to in found.unused.items()
        ),
        *found.disagrees,
    ]
