"""A file of named arrays: written whole or not at all, and read one array at a time."""

import contextlib
import functools
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._tree.structure import Spec
from .._tree.text import in_short
from .arrays import Inventory, Stored, decode, decoded_kind, header_text, pieces_of, prefixed, read_header, specs_of
from .source import PIECE, FilePath, OnDisk, Source, as_path, crc32, replacing

PREFIX = "treeparams."
"""Names in the metadata of a file that begin with this are reserved for this library."""

_VERSION = 1
_CHECKSUM, _CHECKSUMS, _WORDS = f"{PREFIX}checksum", f"{PREFIX}checksums", f"{PREFIX}header"
# The first two entries of the metadata are the checksum of the header and those of the arrays, always at these offsets.
_BLANK = "0" * 8
_START = f'{{"__metadata__":{{"{_CHECKSUM}":"'.encode()
_SUMS_AT = len(_START) + len(f'{_BLANK}","{_CHECKSUMS}":"')


class File:
    """A file that is open for reading, with a checked header.

    Several threads and forked processes may read from one `File`.

    Attributes:
        source: where its bytes are.
        noun: the word for it in errors: a file, or a message.
        is_ours: whether `save` wrote it.
        is_change: whether it is a message that changes another one.
        words: everything that `save` recorded about the tree.
        metadata: all other texts of the file, by name.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.noun = source, source.noun
        try:
            self._arrays, metadata, text = read_header(source)
        except ValueError:
            if isinstance(source, OnDisk):
                _refuse_other(source)
            raise
        self._first = len(prefixed(text))
        self.metadata = {name: said for name, said in metadata.items() if not name.startswith(PREFIX)}
        self.is_ours = len(self.metadata) < len(metadata)
        self.words: dict[str, Any] = {"ties": {}, "states": {}, "marks": {}, "values": {}, "message": None}
        self._sums, self.is_change = "", False  # the checksums of all arrays
        if self.is_ours:
            self._read_words(metadata, text)
        self._marks = self.words["marks"]

    def _read_words(self, metadata: Mapping[str, str], text: bytes) -> None:
        # The checksum is of the header with zeros in its place, since a text cannot hold its own checksum.
        end = len(_START) + len(_BLANK)
        blanked = text[: len(_START)] + _BLANK.encode() + text[end:]
        if text[:end] != _START + f"{zlib.crc32(blanked):08x}".encode():
            raise self.source.wrong("its header has another checksum than when it was saved")
        with self.understood():
            said = json.loads(metadata[_WORDS])
            if said["version"] != _VERSION:
                what = f"{self.source.name} has version {said['version']!r} of the format of treeparams.saving"
                raise ValueError(f"{what}, but this library reads {_VERSION}; install a newer treeparams")
            self.words = {"marks": {}, "values": {}, "message": None} | said
            self._sums, message = metadata[_CHECKSUMS], self.words["message"]
            self.is_change = message is not None and message["since"] is not None

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Names the file where its words turn out to be of another kind than `save` writes.

        The checksum of the header says that these are the words that `save` wrote. So they are not checked before they
        are used.
        """
        try:
            yield
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            if self.source.name in str(error):
                raise
            raise self.source.wrong(f"its description of its arrays cannot be read: {in_short(error)}") from error

    @functools.cached_property
    def specs(self) -> Mapping[str, Spec]:
        """The shape and the dtype in JAX of each array, by name."""
        with self.understood():
            return specs_of(self._arrays, self._marks)

    def dtype(self, name: str) -> Any:
        """Returns the dtype of an array as it was saved, which JAX without x64 may lack."""
        return decoded_kind(self._arrays[name], self._marks.get(name))[1]

    def read(self, name: str) -> Any:
        """Reads an array and compares it with its checksum: a NumPy array in a new buffer, or typed keys."""
        return next(self.arrays([name]))[1]

    def arrays(self, names: Iterable[str], is_checked: bool = True) -> Iterator[tuple[str, Any]]:
        """Yields arrays with their names, in the order of the file, each as `read` returns it.

        Args:
            names: names of arrays in the file.
            is_checked: whether to compare each with its checksum, if the file has one.
        """
        is_checked = is_checked and self.is_ours
        for several in _neighbours(sorted(names, key=lambda name: self._arrays[name][2:]), self._arrays):
            first, is_one = self._arrays[several[0]][2], len(several) == 1
            stop = self._arrays[several[-1]][3]
            data, value = self.source.read(self._first + first, self._first + stop, is_checked and is_one)
            for name in several:
                _, _, start, stop = self._arrays[name]
                part = data if is_one else data[start - first : stop - first].copy()
                if is_checked:
                    self.compare(name, value if is_one else crc32(part))
                try:
                    part = decode(self._arrays[name], self._marks.get(name), part)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{name!r} of {self.source.name} cannot be read: {error}") from None
                yield name, part
            # An array may take half of the memory that there is. So none is referred to while the next one is read.
            data = part = None

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._arrays)}

    def compare(self, name: str, value: int) -> None:
        """Rejects an array with another checksum than the file says."""
        at = len(_BLANK) * self._numbers[name]
        if self._sums[at : at + len(_BLANK)] != f"{value:08x}":
            raise self.source.wrong(f"{name!r} has another checksum than when it was saved")


def file_at(path: FilePath) -> File:
    """Opens the file at a path, after checking that it has all arrays of a tree."""
    file = File(OnDisk(path))
    if file.is_change:
        raise ValueError(f"{file.source.name} is a message that changes another one; write saving.loads(message, have)")
    return file


def _neighbours(names: Sequence[str], arrays: Mapping[str, Stored]) -> Iterator[list[str]]:
    """Yields names in the order of the file: arrays that follow one another together, up to one piece."""
    together, first, last = list[str](), 0, 0
    for name in names:
        _, _, start, stop = arrays[name]
        if together and (start != last or stop - first > PIECE):
            yield together
            together = []
        first, last = first if together else start, stop
        together.append(name)
    if together:
        yield together


# -- Files of other programs ------------------------------------------------------------------------------------------

_TRUST = "; reading one can run any code. If you trust it, convert it once"
_BY_TORCH = (
    ', {n: a.contiguous().clone() for n, a in arrays.items()}, "model.safetensors" by safetensors.torch.save_file'
)
_TORCH = (
    f"is a pickle, as PyTorch writes it{_TRUST} with PyTorch: arrays = torch.load(path, weights_only=True){_BY_TORCH}"
)
_OTHERS = {  # by how they begin; for a zip archive by the names in it
    rb"zip:.*\.npy\n": "was written by np.savez; use np.load(path) as source: saving.plan(np.load(path), model)",
    rb"zip:.*/constants\.pkl\n": f"is of TorchScript{_TRUST}: arrays = torch.jit.load(path).state_dict(){_BY_TORCH}",
    rb"zip:": _TORCH,
    rb"\x80[\2-\5]\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19": _TORCH,  # before it wrote archives
    # The length of a header may begin with the same two bytes, but a zero follows, which no pickle has there.
    rb"\x80[\2-\5][^\0]": f"is a pickle{_TRUST}: saving.save('model.safetensors', pickle.load(open(path, 'rb')))",
    # A map, and a text in it; of ONNX the version, and the author or the graph.
    rb"([\x81-\x8f]|\xde..|\xdf....)([\xa1-\xbf]|\xd9.)[ -~]{2}": "looks like MessagePack, as Flax writes it; use "
    "flax.serialization.msgpack_restore(file.read()) as source",
    rb"\x08[\x01-\x20](\x12[\x01-\x40][ -~]|\x3a)": "looks like a program of ONNX; use its arrays by name as source: "
    "{each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}",
    rb"\x93NUMPY": "is of NumPy, as by eqx.tree_serialise_leaves; write eqx.tree_deserialise_leaves(path, like)",
    rb"\x89HDF\r\n": "is of HDF5; open it with h5py.File, and use its datasets by name as source",
    rb"GGUF": "is of GGUF; use {each.name: each.data for each in gguf.GGUFReader(path).tensors} as source",
    rb"version https://git-lfs": "is a pointer of Git LFS in place of the file; run git lfs pull",
    rb"\s*<(!doctype )?html": "is a web page, as a failed download leaves it; download the file again",
}


def _refuse_other(source: OnDisk) -> None:
    """Rejects the files of other programs, with the lines that read them."""
    start = source.read(0, min(1024, source.size))[0].tobytes()
    if zipfile.is_zipfile(source.path):
        with zipfile.ZipFile(source.path) as archive:
            start = "\n".join(["zip:", *archive.namelist(), ""]).encode()
    for begins, what in _OTHERS.items():
        if re.match(begins, start, re.DOTALL | re.IGNORECASE):
            raise ValueError(f"{source.name} {what}") from None


# -- Writing -----------------------------------------------------------------------------------------------------------


class Draft:
    """The content to write to a file or to memory: how arrays are stored, and the words about them.

    Attributes:
        size: the size of the file in bytes.
    """

    def __init__(self, inventory: Inventory, words: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        self._names = list(inventory.kinds)
        said = json.dumps({"version": _VERSION, **words, "marks": inventory.marks}, ensure_ascii=False)
        metadata = {_CHECKSUM: _BLANK, _CHECKSUMS: _BLANK * len(self._names), _WORDS: said, **metadata}
        self._header = bytearray(header_text(metadata, inventory.entries))
        self.size = len(prefixed(self._header)) + inventory.size

    def to_disk(self, path: FilePath, leaves: Mapping[str, Any]) -> None:
        """Writes a file, whole or not at all. Each array is read once.

        The header comes first in the file and holds the checksums, which are known only when all arrays are written. So
        it is written twice: first with blanks of the same length, and in the end with the checksums.
        """
        with replacing(as_path(path)) as file:
            file.write(prefixed(self._header))
            sums = list[int]()
            for name in self._names:
                value = 0
                for piece in pieces_of(leaves[name]):
                    value = zlib.crc32(piece, value)
                    file.write(piece)
                sums.append(value)
            file.seek(0)
            file.write(self._head(sums))

    def to_memory(self, parts: Mapping[str, Any]) -> bytes:
        """Returns the bytes of such a file, from those of its arrays. If these change meanwhile, checksums differ."""
        ordered = [parts[name] for name in self._names]
        return b"".join([self._head(list(map(crc32, ordered))), *ordered])

    def _head(self, sums: Sequence[int]) -> bytes:
        """Returns the header with the checksums of the arrays, and with its own, made with blanks in its place."""
        header, text = self._header.copy(), np.array(sums, ">u4").tobytes().hex().encode()
        header[_SUMS_AT : _SUMS_AT + len(text)] = text
        header[len(_START) : len(_START) + len(_BLANK)] = b"%08x" % zlib.crc32(header)
        return prefixed(header)
