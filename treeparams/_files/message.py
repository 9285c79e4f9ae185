"""A file in memory that one process sends to another: all arrays, or changes of arrays that both have."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._tree.paths import nearest
from .._tree.text import first_few
from .arrays import Inventory, Kind, decode, inventory_of
from .file import File, hexadecimal
from .source import InMemory, aligned, crc32

Version = int | tuple[int, int]
"""A number, or a run and a number. The versions of one sender grow."""


def as_version(version: object) -> Version | None:
    """Converts a version to Python integers; NumPy integers are accepted too."""
    try:
        if not isinstance(version, (tuple, list)):
            return None if version is None else operator.index(version)  # type: ignore[arg-type]
        run, number = map(operator.index, version)
        return run, number
    except (TypeError, ValueError):
        raise TypeError(f"a version must be a number, or (run, number), got {version!r}") from None


class Message(File):
    """A message with a checked header.

    Attributes:
        is_tree: whether it is of a tree; otherwise it is of the parameters in a vector or stacks.
        version: the version of the arrays, or `None`.
        since: for a change, the version and the arrays that it changes.
        bytes: the message.
    """

    def __init__(self, message: object) -> None:
        source = InMemory(message)
        super().__init__(source)
        # A file that `save` wrote is a message too.
        said = self.words.get("message") or {"is_tree": True, "version": None, "since": None}
        self.is_tree: bool = said["is_tree"]
        self.version = as_version(said["version"])
        self.since: dict[str, Any] | None = said["since"] and {
            **said["since"],
            "version": as_version(said["since"]["version"]),
        }
        self.bytes = source.bytes

    def fill(self, buffers: Mapping[str, np.ndarray]) -> None:
        """Copies the bytes of each array into its buffer; raises a `ValueError` if one differs from the sent one."""
        if buffers.keys() != self._arrays.keys():
            raise self.source.wrong("its arrays are not those of its layout")
        self._fill(buffers)

    def _fill(self, buffers: Mapping[str, np.ndarray]) -> None:
        sums, first = [], self._first
        for name, (_, _, start, stop) in self._arrays.items():
            into = buffers[name].data  # as a `memoryview`, into which a copy takes a third of the time
            into[:] = self.bytes[first + start : first + stop]
            sums.append(crc32(into))  # of the copy: somebody may write into the message meanwhile
        self._compare(sums)

    def owned(self) -> Iterator[tuple[str, Any]]:
        """Yields all arrays with their names: NumPy arrays in new buffers, or typed keys."""
        data = {name: aligned(stop - start) for name, (_, _, start, stop) in self._arrays.items()}
        self.fill(data)
        for name in list(data):
            yield name, decode(self._arrays[name], self._marks.get(name), data.pop(name))

    def _compare(self, sums: Sequence[int]) -> None:
        found = hexadecimal(sums)
        if found != self._said:
            at = next(i for i in range(len(sums)) if found[8 * i : 8 * i + 8] != self._said[8 * i : 8 * i + 8])
            raise self.source.wrong(f"{list(self._arrays)[at]!r} has another checksum than when it was sent")


class Change(Message):
    """A message with the arrays that a change makes from those that you have.

    Args:
        message: the change.
        kinds: how the arrays that you have are stored, by name.
        have: their bytes.
    """

    def __init__(self, message: object, kinds: Mapping[str, Kind], have: Mapping[str, np.ndarray]) -> None:
        super().__init__(message)
        since = self.since or {}
        self._same, self._changed = since["same"], frozenset(since["changed"])
        names = [*self._same, *self._arrays]
        lacking = [name for name in names if name not in have]
        if lacking:
            raise ValueError(
                f"the message changes {first_few(lacking)}, which you do not have{nearest(lacking[0], have)}"
            )
        if _checksum_of(kinds, {name: have[name] for name in names}) != since["checksum"]:
            raise ValueError(
                "the message is a change of other numbers than you have, or of other dtypes: it comes from another "
                "sender, or from one that was restarted and counts from the same number. Ask for all arrays, "
                "saving.dumps without `since`"
            )
        self._kinds, self._have, data, first = kinds, have, np.asarray(self.bytes), self._first
        self._rows = {name: data[first + start : first + stop] for name, (_, _, start, stop) in self._arrays.items()}
        self._compare(list(map(crc32, self._rows.values())))
        # From here on it is as if the sender had sent all of them.
        kept = {name: kinds[name] for name in (*self._same, *self._changed)}
        self._arrays = self._arrays | {n: (kind.dtype, kind.shape, 0, kind.size) for n, kind in kept.items()}
        self._marks = self._marks | {name: kind.mark for name, kind in kept.items() if kind.mark}

    def _fill(self, buffers: Mapping[str, np.ndarray]) -> None:
        for name in (*self._same, *self._changed):
            buffers[name][:] = self._have[name]
        for name, part in self._rows.items():
            if name not in self._changed:
                buffers[name][:] = part
                continue
            try:
                _set_rows(part, buffers[name], self._kinds[name].itemsize)
            except ValueError as error:
                raise self.source.wrong(f"{name!r}: {error}") from None


def change_of(
    kinds: Mapping[str, Kind], before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> tuple[Inventory, dict[str, np.ndarray], dict[str, Any]]:
    """Returns how the arrays of a change are stored, their bytes, and the words of the message about them.

    An array is left out if no bit of it has changed. It is sent as rows (`_rows_of`), or whole if the rows do not
    save enough.
    """
    sent, parts, same, changed = dict[str, Kind](), dict[str, np.ndarray](), list[str](), list[str]()
    for name, part in after.items():
        rows = _rows_of(before[name], part, kinds[name].itemsize)
        if rows is None:
            sent[name], parts[name] = kinds[name], part
        elif len(rows):
            sent[name], parts[name] = Kind("U8", rows.shape, 1, {}), rows.reshape(-1)
            changed.append(name)
        else:
            same.append(name)
    return inventory_of(sent), parts, {"checksum": _checksum_of(kinds, before), "same": same, "changed": changed}


def _checksum_of(kinds: Mapping[str, Kind], parts: Mapping[str, np.ndarray]) -> str:
    """Returns a checksum of arrays with their names and dtypes, whatever their order."""
    lines = [f"{name} {kinds[name].dtype} {crc32(parts[name])}\n" for name in sorted(parts)]
    return hexadecimal([crc32("".join(lines).encode())])


# -- Elements that have changed ---------------------------------------------------------------------------------------

# Small rates change few of the bits of narrow weights: some 1 to 3 % of bfloat16 elements in a step of Adam at rate
# 1e-6. A change has one row for each element that differs: the number of equal elements before it, in one byte, and the
# new element. If more than 255 equal elements lie between, some of these are sent as if they had changed: at most one
# in 256. For 2 % of bfloat16 elements this takes 3.0 % of the bytes of all. A bit for each element takes 8.3 %, in half
# of the time. `zlib` of the exclusive or takes 3.8 %, in three times the time. At 18 % they take 27, 24 and 17 %
# (`benchmarks/wire.py`).

_AT_ONCE = 1 << 20  # elements whose comparison stays in the cache of a processor
_FURTHEST = 256  # from an element to the next one
_MOST = 0.5  # of the bytes of an array, above which all of it is sent


def _rows_of(before: np.ndarray, after: np.ndarray, itemsize: int) -> np.ndarray | None:
    """Returns the rows that turn one array into another.

    Args:
        before: the bytes of an array.
        after: as many bytes.
        itemsize: the size of an element in bytes.

    Returns:
        Bytes of shape `(rows, 1 + itemsize)`; `None` if they would be more than about half of the bytes of the array.
    """
    kind = _row(itemsize)
    old, new = (each.view(f"u{itemsize}") for each in (before, after))
    pieces = [slice(start, start + _AT_ONCE) for start in range(0, new.size, _AT_ONCE)]
    # To count first takes a tenth of the time of the rows, which would be made in vain.
    changed = sum(np.count_nonzero(old[piece] != new[piece]) for piece in pieces)
    if changed * kind.itemsize > _MOST * after.size:
        return None
    found, last = [np.empty(0, kind)], -1
    for piece in pieces if changed else ():
        at = np.flatnonzero(old[piece] != new[piece]) + piece.start
        if not at.size:
            continue
        steps = np.diff(at, prepend=last)
        ends = np.cumsum((steps - 1) // _FURTHEST + 1)
        # All steps are as long as they can be, but those that end at an element that differs.
        full = np.full(ends[-1], _FURTHEST)
        full[ends - 1] = (steps - 1) % _FURTHEST + 1
        these = np.empty(ends[-1], kind)
        these["equal"] = full - 1
        these["element"] = new[last + np.cumsum(full)]
        found.append(these)
        last = at[-1]
    return np.concatenate(found).view(np.uint8).reshape(-1, kind.itemsize)


def _set_rows(rows: np.ndarray, array: np.ndarray, itemsize: int) -> None:
    """Changes the bytes of an array by the rows between it and another one."""
    kind = _row(itemsize)
    if rows.size % kind.itemsize:
        raise ValueError(f"a change has {rows.size:,} bytes, which is no multiple of {kind.itemsize}")
    these, elements, last = rows.reshape(-1).view(kind), array.view(f"u{itemsize}"), -1
    for start in range(0, these.size, _AT_ONCE):
        some = these[start : start + _AT_ONCE]
        at = last + np.cumsum(some["equal"].astype(np.int64) + 1)
        last = at[-1]
        if last >= elements.size:
            raise ValueError(f"a change goes beyond the {elements.size:,} elements of its array")
        elements[at] = some["element"]


def _row(itemsize: int) -> np.dtype:
    return np.dtype([("equal", "u1"), ("element", f"u{itemsize}")])
