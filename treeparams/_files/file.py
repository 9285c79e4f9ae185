"""A file of arrays by name: written whole or not at all, and read one array at a time."""

import contextlib
import errno
import json
import os
import secrets
import weakref
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from .._tree.text import in_short
from .arrays import PIECE, decode, decoded_kind, kind_of, pieces_of, spec_of
from .format import FilePath, Header, as_text, header_text, prefixed, read_bytes, read_header, wrong
from .words import are_right

try:
    import fcntl
except ImportError:  # Windows, which does not remove a file that is open
    fcntl = None

PREFIX = "treeparams."
"""Of what this library says in the metadata of a file."""

_VERSION = 1
_CHECKSUM, _WORDS = f"{PREFIX}checksum", f"{PREFIX}header"
_START = f'{{"__metadata__":{{"{_CHECKSUM}":"'.encode()
_BLANK = "0" * 8


class File:
    """A file that is open for reading; its header has been checked.

    Attributes:
        specs: the shape and dtype in JAX of each array, by name.
        is_ours: whether `save` wrote it.
        words: all that `save` has said of the tree.
        metadata: all else that the file says, text by text.
    """

    def __init__(self, path: FilePath) -> None:
        self.path = as_text(path)
        self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - open as long as this object is there
        weakref.finalize(self, self._file.close)
        try:
            header = read_header(self.path, self._file)
        except ValueError:
            self._refuse_other()
            raise
        self.metadata = {name: text for name, text in header.metadata.items() if not name.startswith(PREFIX)}
        self.is_ours = len(self.metadata) < len(header.metadata)
        self.words: dict[str, Any] = {"ties": {}, "states": {}, "marks": {}, "checksums": {}}
        if self.is_ours:
            self.words = _words(self.path, header)
        self._arrays, marks = header.arrays, self.words["marks"]
        try:
            self.specs = {name: spec_of(its, marks.get(name, {})) for name, its in header.arrays.items()}
        except Exception as error:
            raise wrong(self.path, f"an array is marked as what it cannot be: {error}") from None

    def _refuse_other(self) -> None:
        """Says how to read what other programs have written."""
        self._file.seek(0)
        start = self._file.read(4)
        if start == b"\x93NUM":
            raise ValueError(
                f"{self.path!r} is written by NumPy, as by eqx.tree_serialise_leaves; read it as it was written, "
                "eqx.tree_deserialise_leaves(path, like), and save that"
            ) from None
        if _is_of_savez(self.path):
            raise ValueError(
                f"{self.path!r} is written by np.savez: write arrays = dict(np.load(path)), saving.plan(arrays, model)"
            ) from None
        # The length of a header may begin with the same two bytes, but a zero follows, which no pickle has there.
        is_pickle = start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5" and start[2:3] != b"\0"
        if is_pickle or start[:4] == b"PK\3\4":
            raise ValueError(
                f"{self.path!r} is a pickle, as PyTorch writes, which may run any code when it is read, and is not "
                "read here. Where you trust it, convert it once with PyTorch: arrays = torch.load(path, "
                'map_location="cpu", weights_only=True), safetensors.torch.save_file({name: array.contiguous().clone() '
                'for name, array in arrays.items()}, "model.safetensors")'
            ) from None

    def dtype(self, name: str) -> Any:
        """The dtype of an array as it was saved, which NumPy may have and JAX without x64 not."""
        return decoded_kind(self._arrays[name], self.words["marks"].get(name, {}))[1]

    def read(self, name: str) -> Any:
        """An array: of NumPy, in a buffer of its own, or typed keys."""
        stored = self._arrays[name]
        return decode(stored, self.words["marks"].get(name, {}), read_bytes(self.path, self._file, stored))

    def check(self, name: str) -> None:
        """Compares an array with its checksum, where the file has one."""
        if not self.is_ours:
            return
        stored, value = self._arrays[name], 0
        self._file.seek(stored.start)
        for start in range(stored.start, stored.stop, PIECE):
            value = zlib.crc32(self._file.read(min(PIECE, stored.stop - start)), value)
        if f"{value:08x}" != self.words["checksums"][name]:
            raise wrong(self.path, f"{name!r} has another checksum than when it was saved")


def _is_of_savez(path: str) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith(".npy") for name in archive.namelist())


def _words(path: str, header: Header) -> dict[str, Any]:
    """The words of `save`, once the header's checksum is right and all that they say can be."""
    # The first entry of the header is its checksum, always at the same offset. It is of the header with zeros in its
    # place, since a text cannot hold its own checksum.
    end = len(_START) + len(_BLANK)
    blanked = header.text[: len(_START)] + _BLANK.encode() + header.text[end:]
    is_whole = header.text[len(_START) : end] == f"{zlib.crc32(blanked):08x}".encode()
    if not header.text.startswith(_START) or not is_whole:
        raise wrong(path, "its header has another checksum than when it was saved")
    try:
        words = json.loads(header.metadata[_WORDS])
        version = words["version"]
        is_right = version != _VERSION or are_right(words, header.arrays.keys())
    except Exception as error:  # whatever comes of JSON of another kind
        raise wrong(path, f"what it says of its arrays cannot be read: {in_short(error)}") from None
    if version != _VERSION:
        raise ValueError(
            f"{path!r} is of version {version!r} of the files of treeparams.saving, and this one reads {_VERSION}; "
            "install a newer treeparams"
        )
    if not is_right:
        raise wrong(path, "what it says of its arrays is not of these arrays")
    return words


# -- Writing -----------------------------------------------------------------------------------------------------------


def write(path: FilePath, leaves: Mapping[str, Any], words: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes a file of arrays by name, whole or not at all.

    Each array is read once. The header comes first in the file and holds the checksums, which are known only when all
    arrays are written, so it is written twice: with blanks of the same length, and in the end with the checksums. The
    checksum of the header is that of its text with blanks in the checksum's own place.
    """
    kinds = {name: kind_of(name, leaf) for name, leaf in leaves.items()}
    kinds = dict(sorted(kinds.items(), key=lambda item: -item[1].itemsize))  # so that each is aligned
    sums = dict.fromkeys(kinds, _BLANK)
    marks = {name: kind.mark for name, kind in kinds.items() if kind.mark}

    def header() -> bytes:
        said = json.dumps({"version": _VERSION, **words, "marks": marks, "checksums": sums}, ensure_ascii=False)
        text = header_text(kinds, {_CHECKSUM: _BLANK, _WORDS: said, **metadata})
        return text.replace(_BLANK.encode(), f"{zlib.crc32(text):08x}".encode(), 1)

    before = header()
    with _replacing(os.path.realpath(as_text(path))) as file:
        file.write(prefixed(before))
        for name in kinds:
            value = 0
            for piece in pieces_of(leaves[name]):
                value = zlib.crc32(piece, value)
                file.write(piece)
            sums[name] = f"{value:08x}"
        file.seek(0)
        file.write(prefixed(header()))


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[Any]:
    """A file that takes the place of the one at a path when all of it is on the disk."""
    folder, name = os.path.split(path)
    # A killed process leaves its file behind, and the next one that writes to the same path removes it. So the name
    # tells the path, by a checksum: the name of the path itself may be as long as the file system allows.
    start, end = f".{zlib.crc32(os.fsencode(name)):08x}.", ".unfinished"
    for each in os.listdir(folder):
        if each.startswith(start) and each.endswith(end):
            _remove_unless_written(os.path.join(folder, each))
    unfinished = os.path.join(folder, f"{start}{secrets.token_hex(4)}{end}")
    try:
        with open(unfinished, "xb") as file:
            with contextlib.suppress(OSError):  # not all file systems have locks
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(unfinished)
        raise
    if fcntl is not None:  # the new name is on the disk once the folder is
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems that do so by themselves
                raise
        finally:
            os.close(descriptor)


def _remove_unless_written(unfinished: str) -> None:
    """Removes the file that a killed process has left; one that still writes holds a lock."""
    with contextlib.suppress(OSError):
        if fcntl is not None:
            with open(unfinished, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.remove(unfinished)
