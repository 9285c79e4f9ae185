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
from .arrays import Inventory, decode, decoded_kind, pieces_of, specs_of
from .format import SMALL, Header, Stored, header_text, in_order, prefixed, read_header
from .source import PIECE, FilePath, OnDisk, Source, as_text, crc32, replacing
from .values import are_right

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
        words: everything that `save` recorded about the tree.
        metadata: all other texts of the file, by name.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.noun = source, source.noun
        try:
            header = read_header(source)
        except ValueError:
            if isinstance(source, OnDisk):
                _refuse_other(source)
            raise
        self.metadata = {name: text for name, text in header.metadata.items() if not name.startswith(PREFIX)}
        self.is_ours = len(self.metadata) < len(header.metadata)
        self.words: dict[str, Any] = {"ties": {}, "states": {}, "marks": {}, "values": {}}
        self._said = ""  # the checksums of all arrays
        if self.is_ours:
            self.words = _words(source, header)
            self._said = header.metadata[_CHECKSUMS]
        self._arrays, self._first, self._marks = header.arrays, header.first, self.words["marks"]

    @functools.cached_property
    def specs(self) -> Mapping[str, Spec]:
        """The shape and the dtype in JAX of each array, by name."""
        try:
            return specs_of(self._arrays, self._marks)
        except Exception as error:
            raise self.source.wrong(f"an array does not fit its mark: {error}") from None

    @functools.cached_property
    def _sums(self) -> Mapping[str, str]:
        """The checksum of each array, if the file has them."""
        said = [self._said[i : i + len(_BLANK)] for i in range(0, len(self._said), len(_BLANK))]
        return dict(zip(self._arrays, said, strict=True)) if self.is_ours else {}

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Names the file where its words turn out to be of another kind than `save` writes."""
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if self.source.name in str(error):
                raise
            raise self.source.wrong(f"its description of a state cannot be read: {in_short(error)}") from error

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
        sums = self._sums if is_checked else {}
        for several in _neighbours(in_order(names, self._arrays), self._arrays):
            if len(several) > 1:
                yield from self._together(several, sums)
            else:
                yield several[0], self._alone(several[0], sums)

    # An array may take half of the memory that there is. So nothing here refers to the one before while the next one is
    # read, which is why these two are functions.

    def _alone(self, name: str, sums: Mapping[str, str]) -> Any:
        _, _, start, stop = self._arrays[name]
        data, value = self.source.read(self._first + start, self._first + stop, is_summed=bool(sums))
        return self._array(name, data, value, sums)

    def _together(self, names: list[str], sums: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
        first, last = self._arrays[names[0]][2], self._arrays[names[-1]][3]
        data, _ = self.source.read(self._first + first, self._first + last)
        text = data.data
        for name in names:
            _, _, start, stop = self._arrays[name]
            part = slice(start - first, stop - first)
            yield name, self._array(name, data[part].copy(), zlib.crc32(text[part]) if sums else 0, sums)

    def _array(self, name: str, data: np.ndarray, value: int, sums: Mapping[str, str]) -> Any:
        if sums and f"{value:08x}" != sums[name]:
            raise self.source.wrong(f"{name!r} has another checksum than when it was saved")
        try:
            return decode(self._arrays[name], self._marks.get(name), data)
        except ValueError as error:
            raise ValueError(f"{name!r} of {self.source.name} cannot be read: {error}") from None


def file_at(path: FilePath) -> File:
    """Opens the file at a path, after checking that it has all arrays of a tree."""
    file = File(OnDisk(path))
    if (file.words.get("message") or {"since": None})["since"]:
        raise ValueError(f"{file.source.name} is a message that changes another one; write saving.loads(message, have)")
    return file


def _neighbours(names: list[str], arrays: Mapping[str, Stored]) -> Iterator[list[str]]:
    """Yields names in the order of the file; small arrays that follow one another together, up to one piece."""
    together, first, last = list[str](), 0, 0
    for name in names:
        _, _, start, stop = arrays[name]
        is_small = stop - start <= SMALL
        if together and not (is_small and start == last and stop - first <= PIECE):
            yield together
            together = []
        if not together:
            first = start
        last = stop if is_small else -1  # nothing joins a large one
        together.append(name)
    if together:
        yield together


_TRUST = "; reading one can run any code, so treeparams does not. If you trust it, convert it once"
_BY_TORCH = (
    ", and then safetensors.torch.save_file({name: array.contiguous().clone() for name, array in arrays.items()}, "
    '"model.safetensors")'
)
_TORCH = (
    f'is a pickle, as PyTorch writes it{_TRUST} with PyTorch: arrays = torch.load(path, map_location="cpu", '
    f"weights_only=True), of a checkpoint of several parts the part with the weights{_BY_TORCH}"
)
_TORCH_SCRIPT = (
    f"is a program of TorchScript{_TRUST} with PyTorch: arrays = torch.jit.load(path).state_dict(){_BY_TORCH}"
)
_PICKLE = f"is a pickle{_TRUST}: with open(path, 'rb') as file: saving.save(\"model.safetensors\", pickle.load(file))"
_SAVEZ = "was written by np.savez; use np.load(path) as source: saving.plan(np.load(path), model)"
_FLAX = (
    "looks like MessagePack, as Flax writes it; read it with flax.serialization.msgpack_restore(file.read()), and use "
    "the result as source"
)
_ONNX = (
    "looks like a program of ONNX; use its arrays by name as source: {each.name: onnx.numpy_helper.to_array(each) for "
    "each in onnx.load(path).graph.initializer}"
)
_OTHERS = {
    b"\x93numpy": "was written by NumPy, as by eqx.tree_serialise_leaves; read it with "
    "eqx.tree_deserialise_leaves(path, like), and save the result",
    b"\x89hdf\r\n": "is of HDF5; open it with h5py.File, and use its datasets by name as source",
    b"gguf": "is of GGUF; use its arrays by name as source: {each.name: each.data for each in "
    "gguf.GGUFReader(path).tensors}, of which quantised ones are bytes",
    b"version https://git-lfs": "is a pointer of Git LFS in place of the file; run git lfs pull",
    b"<!doctype html": "is a web page, as a failed download leaves it; download the file again",
    b"<html": "is a web page, as a failed download leaves it; download the file again",
}
_MAGIC_OF_TORCH = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # of its pickles before they were zip archives


def _refuse_other(source: OnDisk) -> None:
    """Rejects the files of other programs, with the lines that read them."""
    start = source.read(0, min(1024, source.size))[0].tobytes()
    text = start.lstrip().lower()
    if zipfile.is_zipfile(source.path):
        what = _of_archive(source.path)
    # The length of a header may begin with the same two bytes, but a zero follows, which no pickle has there.
    elif start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5" and start[2:3] != b"\0":
        what = _TORCH if start[2:].startswith(_MAGIC_OF_TORCH) else _PICKLE
    elif re.match(rb"([\x81-\x8f]|\xde..|\xdf....)([\xa1-\xbf]|\xd9.)[ -~]{2}", start, re.DOTALL):  # a map, and a text
        what = _FLAX
    elif re.match(rb"\x08[\x01-\x20](\x12[\x01-\x40][ -~]|\x3a)", start):  # its version, and its author or its graph
        what = _ONNX
    else:
        what = next((what for begins, what in _OTHERS.items() if text.startswith(begins)), None)
    if what:
        raise ValueError(f"{source.name} {what}") from None


def _of_archive(path: str) -> str:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any(name.endswith(".npy") for name in names):
        return _SAVEZ
    return _TORCH_SCRIPT if any(name.endswith("/constants.pkl") for name in names) else _TORCH


def _words(source: Source, header: Header) -> dict[str, Any]:
    """Returns the words that `save` wrote, after checking them and the header's checksum."""
    # The checksum is of the header with zeros in its place, since a text cannot hold its own checksum.
    end = len(_START) + len(_BLANK)
    blanked = header.text[: len(_START)] + _BLANK.encode() + header.text[end:]
    is_whole = header.text[len(_START) : end] == f"{zlib.crc32(blanked):08x}".encode()
    if not header.text.startswith(_START) or not is_whole:
        raise source.wrong("its header has another checksum than when it was saved")
    try:
        words = {"values": {}} | json.loads(header.metadata[_WORDS])
        version = words["version"]
        is_right = version != _VERSION or (
            are_right(words, header.arrays.keys())
            and len(header.metadata[_CHECKSUMS]) == len(_BLANK) * len(header.arrays)
        )
    except Exception as error:  # whatever comes of JSON of another kind
        raise source.wrong(f"its description of its arrays cannot be read: {in_short(error)}") from None
    if version != _VERSION:
        raise ValueError(
            f"{source.name} has version {version!r} of the format of treeparams.saving, but this library reads "
            f"{_VERSION}; install a newer treeparams"
        )
    if not is_right:
        raise source.wrong("its description of its arrays does not fit them")
    return words


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
        with replacing(as_text(path)) as file:
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
        header, text = self._header.copy(), hexadecimal(sums).encode()
        header[_SUMS_AT : _SUMS_AT + len(text)] = text
        header[len(_START) : len(_START) + len(_BLANK)] = b"%08x" % zlib.crc32(header)
        return prefixed(header)


def hexadecimal(sums: Sequence[int]) -> str:
    """Formats checksums as text, in 8 characters each."""
    return np.array(sums, ">u4").tobytes().hex()
