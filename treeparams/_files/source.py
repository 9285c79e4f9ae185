"""Where bytes are: a file on a disk, or a message in memory.

A file replaces another one when all of it is on the disk; until then it is beside it.
"""

import contextlib
import errno
import glob
import io
import os
import secrets
import stat
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from .._tree.text import describe

try:
    import fcntl
except ImportError:  # Windows, which does not remove or rename a file that is open
    fcntl = None

FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""The path of a file, as `open` accepts it."""

PIECE = 1 << 20
"""So many bytes are still in the processor's cache when they are used again."""

crc32: Callable[..., int] = zlib.crc32
"""The checksum of bytes. It also accepts NumPy arrays, which type checkers do not count as bytes."""

_ALIGNED = 64  # JAX copies buffers that are not aligned like this
_LONGEST_REASON = 500  # characters; a name may have millions


def as_path(path: object, verb: str = "save(path, model)") -> str:
    """Returns the path of a file as text."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"expected the path of a file, got {describe(path)}; it comes first: saving.{verb}")
    return os.fsdecode(path)


def damaged(source: "Source", why: str) -> ValueError:
    """Makes the error for bytes that cannot be read."""
    why = why if len(why) <= _LONGEST_REASON else f"{why[:_LONGEST_REASON]} ..."
    return ValueError(f"{source.name} is no {source.kind}, or damaged: {why}")


class InMemory:
    """The bytes of a message."""

    name, noun, kind = "the message", "message", "message of saving.dumps"

    def __init__(self, message: object) -> None:
        try:
            self.bytes = memoryview(message).cast("B")  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"expected a message, the bytes that saving.dumps made, got {describe(message)}") from None
        self.size = len(self.bytes)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns bytes without a copy."""
        return np.asarray(self.bytes[start:stop])


class OnDisk:
    """A file that is open for reading. Several threads and forked processes may read from it."""

    noun, kind = "file", "safetensors file"

    def __init__(self, path: FilePath) -> None:
        self.path = as_path(path)
        self.name = repr(self.path)
        _refuse_irregular(self.path, os.stat(self.path).st_mode)  # to open a FIFO would wait for another program
        self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - open for as long as this object lives
        weakref.finalize(self, self._file.close)
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads bytes into a new buffer that JAX uses without a copy."""
        found = aligned(stop - start)
        into = found.data
        while len(into):
            count = self.read_at(into[: 1 << 30], stop - len(into))  # macOS refuses to read 2 GiB at once
            if not count:
                raise damaged(self, "it has become shorter while it was read")
            into = into[count:]
        return found

    def read_at(self, into: memoryview, offset: int) -> int:
        """Reads from an offset that no other thread or forked process moves; returns the number of bytes read."""
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [into], offset)
        with _seeking:  # Windows, which does not fork
            self._file.seek(offset)
            return self._file.readinto(into) or 0


Source = InMemory | OnDisk
_seeking = threading.Lock()


def aligned(size: int) -> np.ndarray:
    """Returns a new buffer of `size` bytes that JAX uses without a copy."""
    buffer = np.empty(size + _ALIGNED, np.uint8)
    first = -buffer.ctypes.data % _ALIGNED
    return buffer[first : first + size]


def _refuse_irregular(path: str, mode: int) -> None:
    """Rejects a path that is not a regular file, by its mode; the system rejects a folder."""
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{path!r} is a FIFO, a socket or a device; arrays are read from and written to files only")


# -- Files that replace others ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str) -> Iterator[io.BufferedWriter]:
    """Opens a file that replaces the one at a path when all of it is on the disk, with its mode and owner."""
    before = None
    with contextlib.suppress(OSError):  # there is nothing yet; or the folder is none, of which writing says more
        before = os.stat(path)
        _refuse_irregular(path, before.st_mode)
    path = os.path.realpath(path)
    folder, name = os.path.split(path)
    if not os.path.exists(folder):
        raise FileNotFoundError(errno.ENOENT, "there is no such folder; make it first", folder)
    # A killed process leaves its file behind, and the next one that writes to the same path removes it. So the name
    # tells the path, by a checksum: the name of the path itself may be as long as the file system allows.
    start, end = os.path.join(folder, f".{zlib.crc32(os.fsencode(name)):08x}."), ".unfinished"
    for each in glob.iglob(f"{glob.escape(start)}*{end}"):  # nothing of a folder that may be written to and not listed
        _remove_unless_written(each)
    file = _locked(start, end, mode=0o666 if before is None else 0o600)
    try:
        with file:
            yield file
            file.flush()
            if before is not None and fcntl is not None:
                _keep_mode(file.fileno(), before)
            _sync(file.fileno())
            # The lock, which keeps other savers from removing the file, is held until it has its name.
            if fcntl is None:
                file.close()
            os.replace(file.name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(file.name)
        raise
    with contextlib.suppress(PermissionError):  # Windows opens no folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            _sync(descriptor)
        finally:
            os.close(descriptor)


def _locked(start: str, end: str, mode: int) -> io.BufferedWriter:
    """Opens a new file and locks it. One that replaces another is only its owner's to read until it has its mode."""
    while True:
        unfinished = f"{start}{secrets.token_hex(4)}{end}"
        file = open(unfinished, "xb", opener=lambda path, flags: os.open(path, flags, mode))  # noqa: SIM115
        if fcntl is None:
            return file
        with contextlib.suppress(OSError):  # not all file systems have locks
            fcntl.flock(file, fcntl.LOCK_EX)
        # Between the two calls another process may have taken it for one that was left, and removed it.
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _remove_unless_written(unfinished: str) -> None:
    """Removes a file that a killed process left; a process that still writes holds a lock, or has it open."""
    with contextlib.suppress(OSError):
        if fcntl is None:
            os.remove(unfinished)
            return
        with open(unfinished, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.remove(unfinished)  # with the lock, so that nobody gets it who has just made the file


def _keep_mode(descriptor: int, before: os.stat_result) -> None:
    """Gives a file the owner and the mode of another one, as far as the system allows it.

    The mode grants rights to the owner and the group. If these cannot be kept, the group gets only the rights of
    everybody, and nobody runs the file as its owner.
    """
    mode = stat.S_IMODE(before.st_mode)
    for owner, group in ((before.st_uid, -1), (-1, before.st_gid)):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, owner, group)
    now = os.fstat(descriptor)
    if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
        mode &= stat.S_IRWXU | stat.S_IRWXO | (mode & stat.S_IRWXO) << 3
    with contextlib.suppress(OSError):  # a file system without modes
        os.fchmod(descriptor, mode)


def _sync(descriptor: int) -> None:
    """Waits until all of a file, or the names in a folder, are on the disk."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems that do so by themselves
            raise
