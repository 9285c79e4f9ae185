"""A file in memory, as one process sends it to another: all arrays, or what has changed of arrays that both have."""

import operator
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .._tree.paths import nearest
from .._tree.text import describe, first_few
from . import change
from .arrays import array_spec, bytes_of, decode, kind_of, own
from .file import File
from .source import InMemory

Version = int | tuple[int, int]
"""A number, or a run and a number; versions of one sender grow."""


def as_version(version: object) -> Version | None:
    """A version as whole numbers of Python, which may come as one of NumPy."""
    try:
        if not isinstance(version, (tuple, list)):
            return None if version is None else operator.index(version)  # type: ignore[arg-type]
        run, number = map(operator.index, version)
        return run, number
    except (TypeError, ValueError):
        raise TypeError(f"a version is a number, or (run, number), got {version!r}") from None


class Message(File):
    """A message, whose header has been checked.

    Attributes:
        is_tree: whether it is of a tree; else it is of the parameters in a vector or stacks.
        version: of the arrays, if it says one.
        since: of a change, what it is a change of.
        bytes: the message.
    """

    def __init__(self, message: object) -> None:
        source = InMemory(message)
        super().__init__(source)
        # What `save` wrote is a message too.
        said = self.words.get("message") or {"is_tree": True, "version": None, "since": None}
        self.is_tree: bool = said["is_tree"]
        self.version = as_version(said["version"])
        self.since: dict[str, Any] | None = said["since"]
        self.bytes = source.bytes

    def views(self) -> Iterator[tuple[str, Any]]:
        """All arrays with their names: of NumPy as they lie in the message, or typed keys."""
        for name, (_, _, start, stop) in self._arrays.items():
            part = self.bytes[self._first + start : self._first + stop]
            data = np.frombuffer(part, np.uint8)
            # Keys are arrays of JAX, which could lie in the message for as long as they live.
            data = data.copy() if "key" in self._marks.get(name, ()) else data
            yield name, self._array(name, data, zlib.crc32(part), self._sums)


class Change(Message):
    """The message of all arrays that a change makes of those that you have, by name."""

    def __init__(self, message: object, have: Mapping[str, Any]) -> None:
        super().__init__(message)
        since = self.since or {}
        self._same, self._changed, self._checksum = since["same"], since["changed"], since["checksum"]
        names = [*self._same, *self.specs]
        lacking = [name for name in names if name not in have]
        if lacking:
            raise ValueError(
                f"the message changes {first_few(lacking)}, of which there is none in what you have"
                f"{nearest(lacking[0], have)}"
            )
        self._have = {name: have[name] for name in names}
        self.specs = self.specs | {name: array_spec(have[name]) for name in (*self._same, *self._changed)}

    def dtype(self, name: str) -> Any:
        """The dtype of an array as the sender has it."""
        return self._have[name].dtype if name in {*self._same, *self._changed} else super().dtype(name)

    def views(self) -> Iterator[tuple[str, Any]]:
        """All arrays with their names; some lie in the message, some are those that you have."""
        if checksum_of(self._have) != self._checksum:
            raise ValueError(
                "the message is a change of other numbers than you have: of another sender, or of one that was started "
                "anew and counts its versions from the same number. Ask for all arrays, saving.dumps without `since`"
            )
        yield from ((name, self._have[name]) for name in self._same)
        for name, sent in super().views():
            yield name, self._made(name, sent) if name in self._changed else sent

    def _made(self, name: str, rows: np.ndarray) -> Any:
        have = self._have[name]
        kind, data = kind_of(name, have), own(bytes_of(have))
        try:
            change.decode(rows, data, kind.itemsize)
        except ValueError as error:
            raise self.source.wrong(f"{name!r}: {error}") from None
        return decode((kind.dtype, kind.shape, 0, kind.size), kind.mark, data)


def change_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a message from one version to the next, and what it says of them.

    An array is left out where no bit has changed. It is sent as rows (`change.encode`), or as it is where these take
    more bytes.
    """
    arrays, same, changed = dict[str, Any](), list[str](), dict[str, str]()
    for name, array in after.items():
        kind = kind_of(name, array)
        if name not in before or kind_of(name, before[name]) != kind:
            got = describe(before[name]) if name in before else "nothing"
            raise ValueError(f"expected {describe(array)} at {name!r} of `before`, as in the model, got {got}")
        rows = change.encode(bytes_of(before[name]), bytes_of(array), kind.itemsize)
        if rows is None:
            arrays[name] = array
        elif len(rows):
            arrays[name], changed[name] = rows, kind.dtype
        else:
            same.append(name)
    return arrays, {"checksum": checksum_of(before), "same": same, "changed": changed}


def checksum_of(arrays: Mapping[str, Any]) -> str:
    """A checksum of arrays with their names and stored dtypes, in whatever order they come."""
    lines = [
        f"{name} {kind_of(name, array).dtype} {zlib.crc32(bytes_of(array).data)}\n"
        for name, array in sorted(arrays.items())
    ]
    return f"{zlib.crc32(''.join(lines).encode()):08x}"
