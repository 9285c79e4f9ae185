"""Where the bytes of arrays are read from: a file on a disk, or a message in memory."""

import abc
import errno
import io
import os
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .._tree.text import describe
from .replacement import refuse_irregular

FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""The path of a file, as `open` accepts it."""

PIECE = 1 << 20
"""So many bytes are still in the processor's cache when they are used again."""

crc32: Callable[[Any], int] = zlib.crc32
"""The checksum of bytes. It also accepts NumPy arrays, which type checkers do not count as bytes."""

_ALIGNED = 64  # JAX copies buffers that are not aligned like this
_LONGEST_REASON = 500  # characters; a name may have millions


def as_text(path: object) -> str:
    """Returns the path of a file as text."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(
            f"expected the path of a file, got {describe(path)}; it comes first: saving.save(path, model), "
            "saving.load(path, like)"
        )
    return os.fsdecode(path)


class Source(abc.ABC):
    """Bytes to read.

    Attributes:
        name: the name in errors.
        noun, kind: the words for it in errors, a short one and a full one.
        size: the size in bytes.
    """

    name: str
    noun: str
    kind: str
    size: int

    @abc.abstractmethod
    def read_at(self, into: memoryview, offset: int) -> int:
        """Reads from an offset that no other thread or forked process moves; returns the number of bytes read."""

    def wrong(self, why: str) -> ValueError:
        """Makes the error for bytes that cannot be read."""
        why = why if len(why) <= _LONGEST_REASON else f"{why[:_LONGEST_REASON]} ..."
        return ValueError(f"{self.name} is no {self.kind}, or damaged: {why}")

    def read(self, start: int, stop: int, is_summed: bool = False) -> tuple[np.ndarray, int]:
        """Reads bytes into a new buffer that JAX uses without a copy; returns it with its checksum, or 0."""
        found, value = aligned(stop - start), 0
        into = found.data
        while len(into):
            count = self.read_at(into[:PIECE], stop - len(into))
            if not count:
                raise self.wrong("it has become shorter while it was read")
            if is_summed:
                value = zlib.crc32(into[:count], value)
            into = into[count:]
        return found, value


def aligned(size: int) -> np.ndarray:
    """Returns a new buffer of `size` bytes that JAX uses without a copy."""
    buffer = np.empty(size + _ALIGNED, np.uint8)
    first = -buffer.ctypes.data % _ALIGNED
    return buffer[first : first + size]


class InMemory(Source):
    """Bytes in memory, such as those of a message."""

    name, noun, kind = "the message", "message", "message of saving.dumps"

    def __init__(self, message: object) -> None:
        try:
            self.bytes = memoryview(message).cast("B")  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"expected a message, the bytes that saving.dumps made, got {describe(message)}") from None
        self.size = len(self.bytes)

    def read_at(self, into: memoryview, offset: int) -> int:
        part = self.bytes[offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)


class OnDisk(Source):
    """A file that is open for reading. Several threads and forked processes may read from it."""

    noun, kind = "file", "safetensors file"

    def __init__(self, path: FilePath) -> None:
        self.path = as_text(path)
        self.name = repr(self.path)
        self._file = _opened(self.path)
        weakref.finalize(self, self._file.close)
        self.size = os.fstat(self._file.fileno()).st_size

    def read_at(self, into: memoryview, offset: int) -> int:
        file = self._file
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [into], offset)
        if hasattr(os, "pread"):  # macOS before 11
            data = os.pread(file.fileno(), len(into), offset)
            into[: len(data)] = data
            return len(data)
        with _seeking:  # Windows, which does not fork
            file.seek(offset)
            return file.readinto(into) or 0


_seeking = threading.Lock()


def _opened(path: str) -> io.FileIO:
    """Opens a file and checks that it is a regular one; opening a FIFO would wait for another program."""
    flags = getattr(os, "O_NONBLOCK", 0)  # so that not even opening waits
    try:
        file = open(path, "rb", buffering=0, opener=lambda path, given: os.open(path, given | flags))  # noqa: SIM115
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            refuse_irregular(path, os.stat(path).st_mode)
        raise
    try:
        refuse_irregular(path, os.fstat(file.fileno()).st_mode)
    except ValueError:
        file.close()
        raise
    return file
