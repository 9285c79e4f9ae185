"""Replaces a file by a new one, which is written beside it and moved to its place when all of it is on the disk."""

import contextlib
import errno
import io
import os
import secrets
import stat
import time
import zlib
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # Windows, which does not remove or rename a file that is open
    fcntl = None

_LEFT = 24 * 60 * 60.0
"""Seconds after which a file counts as abandoned where there are no locks."""


_IRREGULAR = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def refuse_irregular(path: str, mode: int) -> None:
    """Rejects a path that is not a regular file, by its mode; the system rejects a folder."""
    kind = _IRREGULAR.get(stat.S_IFMT(mode))
    if kind is not None:
        raise ValueError(f"{path!r} is {kind}, but arrays are read from and written to regular files only")


@contextlib.contextmanager
def replacing(path: str) -> Iterator[io.BufferedWriter]:
    """Opens a file that replaces the one at a path when all of it is on the disk, with its mode and owner."""
    try:
        before = os.stat(path)
    except OSError:  # there is nothing yet; or the folder is none, of which writing says more
        before = None
    else:
        refuse_irregular(path, before.st_mode)
    path = os.path.realpath(path)
    folder, name = os.path.split(path)
    # A killed process leaves its file behind, and the next one that writes to the same path removes it. So the name
    # tells the path, by a checksum: the name of the path itself may be as long as the file system allows.
    start, end = f".{zlib.crc32(os.fsencode(name)):08x}.", ".unfinished"
    for each in os.listdir(folder):
        if each.startswith(start) and each.endswith(end):
            _remove_unless_written(os.path.join(folder, each))
    file = _locked(os.path.join(folder, start), end, is_private=before is not None)
    try:
        with file:
            yield file
            file.flush()
            if before is not None and fcntl is not None:
                _keep_mode(file.fileno(), before)
            os.fsync(file.fileno())
            # The lock, which keeps other savers from removing the file, is held until it has its name.
            if fcntl is not None:
                os.replace(file.name, path)
        if fcntl is None:
            os.replace(file.name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(file.name)
        raise
    if fcntl is not None:
        _sync_folder(folder)


def _locked(start: str, end: str, is_private: bool) -> io.BufferedWriter:
    """Opens a new file and locks it. If it replaces another file, only its owner can read it until it has its mode."""
    while True:
        unfinished = f"{start}{secrets.token_hex(4)}{end}"
        opener = _as_private if is_private else None
        file = open(unfinished, "xb", opener=opener)  # noqa: SIM115 - the caller closes it
        if fcntl is None:
            return file
        with contextlib.suppress(OSError):  # not all file systems have locks
            fcntl.flock(file, fcntl.LOCK_EX)
        # Between the two calls another process may have taken it for one that was left, and removed it.
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _as_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _keep_mode(descriptor: int, before: os.stat_result) -> None:
    """Gives a file the owner and the mode of another one, as far as the system allows it.

    The mode grants rights to the owner and the group. If these cannot be kept, the group gets only the rights of
    everybody, and nobody runs the file as its owner.
    """
    mode, now = stat.S_IMODE(before.st_mode), os.fstat(descriptor)
    for owner, group in ((before.st_uid, -1), (-1, before.st_gid)):
        if (owner, group) not in ((now.st_uid, -1), (-1, now.st_gid)):
            with contextlib.suppress(OSError):
                os.fchown(descriptor, owner, group)
    now = os.fstat(descriptor)
    if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
        mode &= ~(stat.S_ISUID | stat.S_ISGID)
    if now.st_gid != before.st_gid:
        mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    with contextlib.suppress(OSError):  # a file system without modes
        os.fchmod(descriptor, mode)


def _sync_folder(folder: str) -> None:
    """Makes the disk record the new name too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems that do so by themselves
            raise
    finally:
        os.close(descriptor)


def _remove_unless_written(unfinished: str) -> None:
    """Removes a file that a killed process left; a process that still writes holds a lock."""
    with contextlib.suppress(OSError):
        if fcntl is None:
            if time.time() - os.stat(unfinished).st_mtime > _LEFT:
                os.remove(unfinished)
            return
        with open(unfinished, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.remove(unfinished)  # with the lock, so that nobody gets it who has just made the file
