"""A file of arrays by name: written whole or not at all, and read one array at a time."""

import contextlib
import json
import os
import secrets
import weakref
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from ._arrays import PIECE, decode, kind_of, pieces_of, spec_of
from ._format import header_text, prefixed, read_bytes, read_header, wrong

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
        words: what `save` has said of the tree.
        metadata: what else the file says, text by text.
    """

    def __init__(self, path: Any) -> None:
        self.path = os.fspath(path)
        if self.path.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl")):
            raise ValueError(
                f"{self.path!r} looks like a pickle, which may run any code when it is read, and is not read here. "
                "Where you trust it, convert it once with PyTorch: safetensors.torch.save_file("
                'torch.load(path, map_location="cpu", weights_only=True), "model.safetensors")'
            )
        self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - open as long as this object is there
        weakref.finalize(self, self._file.close)
        header = read_header(self.path, self._file)
        self.metadata = {name: text for name, text in header.metadata.items() if not name.startswith(PREFIX)}
        self.is_ours = len(self.metadata) < len(header.metadata)
        self.words: dict[str, Any] = {"ties": {}, "states": {}, "marks": {}, "checksums": {}}
        if self.is_ours:
            self.words = _words(self.path, header.text, header.metadata)
        self._arrays, marks = header.arrays, self.words["marks"]
        try:
            self.specs = {name: spec_of(its, marks.get(name, {})) for name, its in header.arrays.items()}
        except Exception as error:
            raise wrong(self.path, f"an array is marked as what it cannot be: {error}") from None

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


def _words(path: str, text: bytes, metadata: Mapping[str, str]) -> dict[str, Any]:
    end = len(_START) + len(_BLANK)
    blanked = text[: len(_START)] + _BLANK.encode() + text[end:]
    if not text.startswith(_START) or text[len(_START) : end] != f"{zlib.crc32(blanked):08x}".encode():
        raise wrong(path, "its header has another checksum than when it was saved")
    words = json.loads(metadata[_WORDS])
    if words["version"] != _VERSION:
        raise ValueError(
            f"{path!r} is of version {words['version']} of the files of treeparams.saving, and this one reads "
            f"{_VERSION}; install a newer treeparams"
        )
    return words


# -- Writing -----------------------------------------------------------------------------------------------------------


def write(path: Any, leaves: Mapping[str, Any], words: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes a file of arrays by name, whole or not at all."""
    kinds = {name: kind_of(name, leaf) for name, leaf in leaves.items()}
    kinds = dict(sorted(kinds.items(), key=lambda item: -item[1].itemsize))  # so that each is aligned
    sums = dict.fromkeys(kinds, _BLANK)
    marks = {name: kind.mark for name, kind in kinds.items() if kind.mark}

    def header() -> bytes:
        said = json.dumps({"version": _VERSION, **words, "marks": marks, "checksums": sums}, ensure_ascii=False)
        text = header_text(kinds, {_CHECKSUM: _BLANK, _WORDS: said, **metadata})
        return text.replace(_BLANK.encode(), f"{zlib.crc32(text):08x}".encode(), 1)

    before = header()
    with _replacing(os.path.realpath(path)) as file:
        file.write(prefixed(before))
        for name in kinds:
            value = 0
            for piece in pieces_of(leaves[name]):
                value = zlib.crc32(piece, value)
                file.write(piece)
            sums[name] = f"{value:08x}"
        file.seek(0)
        file.write(prefixed(header()))  # now with the checksums, which are as long as what stood in their place


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[Any]:
    """A file that takes the place of the one at a path when all of it is on the disk."""
    folder, name = os.path.split(path)
    start, end = f".{zlib.crc32(os.fsencode(name)):08x}.", ".unfinished"  # a name of any length is not too long for it
    for each in os.listdir(folder):
        if each.startswith(start) and each.endswith(end):
            _remove_unless_written(os.path.join(folder, each))
    unfinished = os.path.join(folder, f"{start}{secrets.token_hex(4)}{end}")
    try:
        with open(unfinished, "xb") as file:
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
        finally:
            os.close(descriptor)


def _remove_unless_written(unfinished: str) -> None:
    """Removes what a killed process has left; one that still writes holds a lock."""
    with contextlib.suppress(OSError):
        if fcntl is not None:
            with open(unfinished, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.remove(unfinished)
