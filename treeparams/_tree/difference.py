"""The differences of two trees, row by row: the rows, their table, and the rows that two structures give.

The two trees are read side by side from the root. A subtree without a counterpart is named once, by its topmost node.
For two nodes at one path, the class and the static values are compared. Two leaves at one path are passed to the
caller, who has more to compare: a layout whether they are trained, `tp.diff` the arrays themselves.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .declare import is_box
from .paths import join_path, quote, sibling_entries
from .static_keys import contents, static_key
from .structure import Spec, Structure, take
from .text import Printed, Table, describe, first_few, first_lines, function_name
from .types import PyTree

_WORDS = {"class": "is a", "static": "has other static values:", "value": "has other values:", "tie": "is tied to"}
_AGAIN = {"class": "a ", "tie": "to "}  # before the second
_NOTHING = "nothing"  # is shown for the tree that has nothing at the path
_LONGEST = 40  # characters of a value
_Names = Sequence[tuple[str, ...]] | None
_IsShared = Callable[[str], bool]
# The path that names an array, another one of it, and a note on that: compared by `==`, shown by its `str`.
_Ties = Sequence[tuple[str, str, Any]]


class Difference(NamedTuple):
    """One row: one difference at a path. The numbers describe the elements of two arrays."""

    path: str
    what: str  # "structure", "class", "static", "type", "value", "shape", "dtype", ..., "tie", "trained", "elements"
    first: str  # of elements: the one that differs most
    second: str
    absolute: float | None = None  # the largest difference
    relative: float | None = None  # the largest, as a fraction of the second
    differing: int | None = None  # how many elements differ
    size: int | None = None  # of how many
    nans: tuple[int, int] | None = None  # how many are NaN in the first, and in the second

    def in_words(self, one: str = "in the first", other: str = "in the second", root: str = "the root") -> str:
        """Returns the row as a line of an error message; `one` and `other` name the trees, `root` the empty path."""
        where = repr(self.path) if self.path else root
        for side, without in ((one, self.second), (other, self.first)):
            if without == _NOTHING and self.what == "structure":
                return f"{where} is only {side}"
        again = "" if self.second.startswith("another ") else _AGAIN.get(self.what, "")
        return f"{where} {_WORDS.get(self.what, 'is')} {self.first} {one}, {again}{self.second} {other}"

    @staticmethod
    def value_in_text(value: object) -> str:
        """Returns a value and its type, shortened; for an array its dtype and shape, for a function or class its name.

        >>> [Difference.value_in_text(value) for value in (2.0, len, dict)]
        ['2.0 (float)', 'len (builtin_function_or_method)', 'dict']
        """
        return _shortened(_in_full(value))

    @staticmethod
    def of_values(path: str, what: str, here: object, there: object) -> "Difference":
        """Returns the row for two values that differ, in texts that differ: those of long ones start where they do."""
        one, other = _in_full(here), _in_full(there)
        if one == other and hasattr(here, "__qualname__"):
            one, other = (f"{getattr(each, '__module__', '')}.{one}" for each in (here, there))
        if one == other:
            return Difference(path, what, _shortened(one), _shortened(f"another {other}"))
        start = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), 0) - _LONGEST // 4
        start = max(start, 0) if max(len(one), len(other)) > _LONGEST else 0
        return Difference(path, what, _shortened(one, start), _shortened(other, start))

    @staticmethod
    def of_one(path: str, text: str, side: int) -> "Difference":
        """Returns the row for what only one tree has, the first or (if `side` is 1) the second."""
        return Difference(path, "structure", *((_NOTHING, text) if side else (text, _NOTHING)))

    @staticmethod
    def of_specs(path: str, here: Spec | None, there: Spec | None) -> "list[Difference]":
        """Returns how two leaves at a path differ in shape and dtype, or that only one is an array."""
        if here == there:
            return []
        what = "type"
        if here is not None and there is not None:
            what = ", ".join(name for name in ("shape", "dtype") if getattr(here, name) != getattr(there, name))
        first, second = (describe(spec) if spec else "no array" for spec in (here, there))
        return [Difference(path, what, first, second)]

    @staticmethod
    def of_ties(here: _Ties, there: _Ties, is_shared: _IsShared, of_source: str = "") -> "Iterator[Difference]":
        """Yields how ties differ among the paths that both trees have; `of_source` is the note on a source."""
        ours, theirs = _other_paths(here, is_shared, of_source), _other_paths(there, is_shared, of_source)
        for path in dict.fromkeys(source for source, _, _ in [*here, *there]):
            one, other = ours.get(path, {}), theirs.get(path, {})
            if one != other:
                yield Difference(path, "tie", _with_notes(one), _with_notes(other))


def _in_full(value: object) -> str:
    # Arrays of texts, objects or times are no arrays to JAX. Two of them differ in their elements, so these are shown.
    is_array = hasattr(value, "shape") and not isinstance(value, np.generic)
    if is_array and getattr(getattr(value, "dtype", None), "kind", "V") not in "OSUMm":
        return describe(value)
    name, kind = getattr(value, "__qualname__", None), type(value)
    name = function_name(value) if isinstance(name, str) and name.endswith("<lambda>") else name
    if isinstance(value, type) or (name is None and kind.__repr__ is object.__repr__):
        return name or f"a {kind.__qualname__}"
    text = name or (str(value) if isinstance(value, np.generic) else repr(value))
    return f"{text} ({kind.__name__})"


def _shortened(text: str, start: int = 0) -> str:
    """Returns a text from a position on, shortened to fit into a table."""
    text = f"...{text[start:]}" if start else text
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _with_notes(others: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} ({note})" if str(note) else path for path, note in others.items()) or _NOTHING


def _other_paths(ties: _Ties, is_shared: _IsShared, of_source: str) -> dict[str, dict[str, Any]]:
    """Returns, for each tied path that both trees have, the other such paths of its array."""
    groups: dict[str, dict[str, Any]] = {}
    for source, alias, note in ties:
        groups.setdefault(source, {source: of_source})[alias] = note
    found = {}
    for group in groups.values():
        shared = {path: note for path, note in group.items() if is_shared(path)}
        found |= {path: {other: note for other, note in shared.items() if other != path} for path in shared}
    return found


class Diff(Printed):
    """The differences of two trees or layouts, by path; false if there are none. You get one from `tp.diff`.

    It prints as a table, in a notebook too: first the differences that a compiler sees, in tree order, then arrays
    whose elements differ, the largest difference first.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> diff = tp.diff({"a": jnp.ones(2), "b": 2}, {"a": jnp.zeros(2), "b": 2.0})
    >>> bool(diff), diff.paths
    (True, ('b', 'a'))

    Attributes:
        rows: one per difference, with `.path` and `.what`, and the texts `.first` and `.second`. If `.what` is
            `"elements"`, there are numbers too: `.absolute` and `.relative`, the largest differences; `.differing`
            elements out of `.size`; and `.nans`, the number of NaNs in the first and in the second.
    """

    def __init__(self, rows: Iterable[Difference]) -> None:
        """Used by this library; write `tp.diff(a, b)`."""
        self.rows = tuple(rows)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths at which something differs, each once, in the order of the rows."""
        return tuple(dict.fromkeys(row.path for row in self.rows))

    def __bool__(self) -> bool:
        return bool(self.rows)

    def in_words(self, *names: str) -> str:
        """Returns the first few rows as lines of an error message; see `Difference.in_words`."""
        return first_lines([row.in_words(*names) for row in self.rows])

    def __repr__(self) -> str:
        return f"Diff({self._total()}{f' ({first_few(self.paths)})' if self.rows else ''})"

    def _blocks(self) -> list[Table | str]:
        seen = [row for row in self.rows if row.what != "elements"]
        elements = [row for row in self.rows if row.what == "elements"]
        blocks: list[Table | str] = []
        if seen:
            cells = [[row.path or '""', row.what, row.first, row.second] for row in seen]
            blocks += [Table(["path", "what", "first", "second"], cells), ""]
        if elements:
            blocks += [_table_of_elements(elements), ""]
        counts = collections.Counter(row.what for row in self.rows)
        each = ", ".join(f"{what} {count:,}" for what, count in counts.items())
        return [*blocks, f"{self._total()}: {each}" if len(counts) > 1 else self._total()]

    def _total(self) -> str:
        count = f"{len(self.rows):,}" if self.rows else "no"
        return f"{count} difference{'' if len(self.rows) == 1 else 's'}"


Diff.__module__ = "treeparams.types"


def _table_of_elements(rows: Sequence[Difference]) -> Table:
    header = ["path", "largest", "relative", "elements", "NaN", "first", "second"]
    cells = list[list[str]]()
    for row in rows:
        numbers = f"{row.absolute:.3g}", f"{row.relative:.3g}", f"{row.differing:,} of {row.size:,}"
        cells.append([row.path or '""', *numbers, ", ".join(map(str, row.nans or ())), row.first, row.second])
    if not any(any(row.nans or ()) for row in rows):
        header, *cells = [[*row[:4], *row[5:]] for row in (header, *cells)]
    return Table(header, cells, right=range(1, len(header)))


# -- Two structures ----------------------------------------------------------------------------------------------------

_AtLeaves = Callable[[int, int], Iterable[Difference]]
_Leaves = tuple[Sequence[Any], Sequence[Any]]


def compare(
    these: Structure, those: Structure, at_leaves: _AtLeaves | None = None, leaves: _Leaves | None = None
) -> Iterator[Difference]:
    """Yields the differences between the nodes of two structures, and between two leaves at one path, in tree order.

    Args:
        these: the first.
        those: the second.
        at_leaves: compares two leaves at one path, by their numbers in the two trees; `None`: in shape and dtype.
        leaves: the leaves themselves, so that those that are not arrays are shown.
    """
    pair = _Pair(these, those, at_leaves, leaves)
    if these.entries == those.entries and these.has_statics_of(those):
        for i in range(len(these.entries)):
            yield from pair.at_leaves(i, i)
        return
    numbers = [jtu.tree_unflatten(each.treedef, range(each.treedef.num_leaves)) for each in (these, those)]
    rows = list(pair.visit((), *numbers))
    yield from rows
    ours, theirs = ([key for key in each.statics if isinstance(key[0], type)] for each in (these, those))
    if ours != theirs and {"structure", "class", "static"}.isdisjoint(row.what for row in rows):
        # The keys of static values are taken when a structure is met. What was read here are lists as they are now.
        yield Difference("", "static", "a static value", "the same, changed in place since")


class _Pair:
    """Two structures that are read side by side."""

    def __init__(self, these: Structure, those: Structure, at_leaves: _AtLeaves | None, leaves: _Leaves | None) -> None:
        self.structures, self.leaves = (these, those), leaves
        self.at_leaves = at_leaves or (lambda i, j: Difference.of_specs(these.paths[i], these.specs[i], those.specs[j]))
        # Bare objects are the same by identity, but in a copy made by pickling by their order, which is not known here.
        self.strict = not (these.is_unpickled or those.is_unpickled)

    def visit(self, entries: tuple[str, ...], here: PyTree, there: PyTree) -> Iterator[Difference]:
        """Yields the rows at and below two nodes at one path; their leaves are numbers."""
        left, right, kind = take(here), take(there), type(here)
        if left is None and right is None:
            yield from self.at_leaves(here, there)
            return
        # `None` is a node to JAX, without leaves. In a table it is something in one tree alone.
        if left is None or right is None or (kind is not type(there) and (here is None or there is None)):
            yield Difference(join_path(entries), "structure", self.text(0, here), self.text(1, there))
            return
        ours, theirs = (self.children(side, entries, taken) for side, taken in enumerate((left, right)))
        if kind is not type(there):
            yield Difference.of_values(join_path(entries), "class", kind, type(there))
        # The static value of a dictionary, and of a state of Equinox, is its keys.
        elif not (isinstance(here, (dict, eqx.nn.State)) and ours.keys() != theirs.keys()):
            names = []
            if dataclasses.is_dataclass(kind):
                names = [(field.name,) for field in dataclasses.fields(kind) if field.metadata.get("static")]
            yield from self.static_rows(entries, left[2], right[2], names)
        # Children are matched by their entries and not by position, so that one that is missing shifts no other.
        for entry in dict.fromkeys([*ours, *theirs]):
            is_boxed = len(ours) == 1 == len(theirs) and is_box(kind) and is_box(type(there))
            below = entries if is_boxed else (*entries, *entry)
            if entry in ours and entry in theirs:
                yield from self.visit(below, ours[entry], theirs[entry])
            else:
                side, its = (0, ours) if entry in ours else (1, theirs)
                yield Difference.of_one(join_path(below), self.text(side, its[entry]), side)

    def children(self, side: int, entries: tuple[str, ...], taken: Any) -> dict[tuple[str, ...], PyTree]:
        """Returns the children of a node of one of the two, each by the entries that it adds."""
        names = self.structures[side].states.get(entries)
        names = names or [(entry,) for entry in sibling_entries(taken[0], entries)]
        return dict(zip(names, taken[1], strict=True))

    def text(self, side: int, tree: PyTree) -> str:
        """Describes a subtree of one of the two; its leaves are numbers."""
        if tree is None:
            return "None"
        if take(tree) is None:
            spec = self.structures[side].specs[tree]
            if spec is None and self.leaves is not None:
                return Difference.value_in_text(self.leaves[side][tree])
            return describe(spec) if spec else "no array"
        count = jtu.tree_structure(tree).num_leaves
        return f"{type(tree).__qualname__} of {count:,} lea{'f' if count == 1 else 'ves'}"

    def static_rows(
        self, entries: tuple[str, ...], here: Any, there: Any, names: _Names, depth: int = 8
    ) -> Iterator[Difference]:
        """Yields how two static values differ; for containers with the same keys, which of their values differ.

        Args:
            entries: of the path.
            here: the first.
            there: the second.
            names: of the static value of a node, the entries of its fields.
            depth: of containers to look into, since a value may contain itself.
        """
        if here is there or static_key(here, strict=self.strict) == static_key(there, strict=self.strict):
            return
        rows: list[Difference] = []
        # The deeper a row can point the better: into layouts, then into containers. Where that shows no row, as for
        # lists of different lengths, the two values are one row.
        if type(here) is type(there) and type(here) in contents and hasattr(here, "diff"):
            found = [(row, (row.path,) if row.path else ()) for row in here.diff(there).rows]
            rows = [row._replace(path=join_path((*entries, *below))) for row, below in found]
        elif type(here) is type(there) and depth:
            ours, theirs = _items(here, names), _items(there, names)
            if [key for key, _, _ in ours] == [key for key, _, _ in theirs]:
                for (_, entry, one), (_, _, other) in zip(ours, theirs, strict=True):
                    rows += self.static_rows((*entries, *entry), one, other, None, depth - 1)
        yield from rows or [Difference.of_values(join_path(entries), "static", here, there)]


def _items(value: Any, names: _Names) -> list[tuple[Any, tuple[str, ...], Any]]:
    """Returns the values in a static value, each with its key, whose type counts, and its entry of a path."""
    if type(value) in contents:
        return [(i, (), each) for i, each in enumerate(contents[type(value)](value))]
    if type(value) is tuple and names is not None:
        # Fields are counted from the end: Equinox puts values of its own before theirs.
        entries = [*[()] * (len(value) - len(names)), *names]
        return [(i, *each) for i, each in enumerate(zip(entries, value, strict=False))]
    if type(value) is tuple or type(value) is list:
        return [(i, (str(i),), each) for i, each in enumerate(value)]
    if type(value) is dict:
        return [((type(key), key), (quote(str(key)),), each) for key, each in value.items()]
    return []
