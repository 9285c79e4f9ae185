"""Files of named arrays in the safetensors format: written whole or not at all, and read one array at a time.

A file is a JSON header that gives the place of each array, and then the arrays, one after another. The package
`safetensors` is not needed to read or write it. Its reader for NumPy lacks floats of 8 bits and checksums, and raises
errors of another class. The whole header is checked before anything is read or allocated. A dtype that the format lacks
is stored as another one, and marked.
"""

import contextlib
import functools
import json
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._tree.structure import Spec
from .._tree.text import describe, in_short
from .._tree.types import Array
from .arrays import in_jax, in_numpy
from .source import PIECE, FilePath, OnDisk, Source, as_path, crc32, damaged, replacing

# Names in the metadata of a file that begin with this are reserved for this library.
_RESERVED = "treeparams."

_VERSION = 1
_CHECKSUM, _CHECKSUMS, _WORDS = f"{_RESERVED}checksum", f"{_RESERVED}checksums", f"{_RESERVED}header"
# The first two entries of the metadata are the checksum of the header and those of the arrays, always at these offsets.
_BLANK = "0" * 8
_METADATA = '{"__metadata__":'
_START = f'{_METADATA}{{"{_CHECKSUM}":"'.encode()
_SUMS_AT = len(_START) + len(f'{_BLANK}","{_CHECKSUMS}":"')

# -- The header --------------------------------------------------------------------------------------------------------

_table = lambda text: dict(pair.split(":") for pair in text.split())
# The dtypes that all readers of the format support, with their names in NumPy and JAX; and others, which are only read.
_WRITTEN: dict[str, str] = _table(
    "BOOL:bool U8:uint8 I8:int8 U16:uint16 I16:int16 U32:uint32 I32:int32 U64:uint64 I64:int64 F8_E4M3:float8_e4m3fn "
    "F8_E5M2:float8_e5m2 BF16:bfloat16 F16:float16 F32:float32 F64:float64"
)
_DTYPES: dict[str, str] = _WRITTEN | _table(
    "C64:complex64 F8_E8M0:float8_e8m0fnu F8_E4M3FNUZ:float8_e4m3fnuz F8_E5M2FNUZ:float8_e5m2fnuz"
)
# These pack elements of so many bits into bytes, which NumPy and JAX arrays do not do. They are listed, but not read.
_PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_BITS = {name: np.dtype(its).itemsize * 8 for name, its in _DTYPES.items()} | _PACKED
_LONGEST = 100_000_000  # bytes of a header; the format's own limit
_PREFIX = 8  # bytes of the length of the header
_MOST_AXES = 32  # of a NumPy array before NumPy 2
_SHORT = 1 << 22  # characters of a header that is remembered

# An array in a file: its dtype in the format's words, its shape, and its start and stop after the header. A file may
# have 100,000 of these. As plain tuples, unlike objects of a class, they do not slow down Python's search for cycles.
_Stored = tuple[str, tuple[int, ...], int, int]


def _read_header(source: Source) -> tuple[dict[str, _Stored], dict[str, str], bytes]:
    """Reads the header of a file, and checks that it is consistent, also with the number of bytes.

    Returns:
        The arrays in the order of the file, the metadata, and the text of the header.
    """
    size = source.size
    length = int.from_bytes(source.read(0, min(_PREFIX, size)).tobytes(), "little")
    if size < _PREFIX or length > min(size - _PREFIX, _LONGEST):
        raise damaged(source, f"its header is said to have {length:,} bytes, and the {source.noun} has {size:,}")
    first = _PREFIX + length
    text = source.read(_PREFIX, first).tobytes()
    try:
        arrays, metadata = _parsed(text.decode())
    except (ValueError, RecursionError) as error:
        raise damaged(source, f"its header is no JSON of arrays: {error}") from None
    end = first + (next(reversed(arrays.values()))[3] if arrays else 0)
    if end != size:
        raise damaged(source, f"its arrays end at byte {end:,}, and the {source.noun} has {size:,}")
    return arrays, metadata, text


def _parsed(text: str) -> tuple[dict[str, _Stored], dict[str, str]]:
    """Returns the arrays and the metadata in a header."""
    said = []
    if text.startswith(_METADATA + "{"):
        # The messages of a sender differ in their metadata. The entries behind them are the same text each time.
        metadata, end = _DECODER.raw_decode(text, len(_METADATA))
        said, text = [metadata], "{" + text[end:].lstrip().removeprefix(",").rstrip(" ")
    arrays, more = (_remembered if len(text) < _SHORT else _entries)(text)
    match [*said, *more]:
        case []:
            return arrays, {}
        case [dict(metadata)] if {str}.issuperset(map(type, metadata.values())):
            return arrays, metadata
    raise ValueError("its metadata are not one dictionary of texts")


def _as_read(pairs: Sequence[tuple[str, Any]]) -> Any:
    """Returns an entry of the header as it is kept: 100,000 dictionaries in their place would slow Python down."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in one object")
    try:
        return _stored("", found) if "data_offsets" in found else found
    except ValueError:  # which then says its name, too
        return found


_DECODER = json.JSONDecoder(object_pairs_hook=_as_read)


def _entries(text: str) -> tuple[dict[str, _Stored], list[Any]]:
    """Returns the arrays in a JSON object in the order of the file, and its metadata, if any."""
    named = _DECODER.decode(text)
    if type(named) is not dict:
        raise ValueError("it is no JSON object")
    metadata = [named.pop("__metadata__")] if "__metadata__" in named else []
    entries = [(name, said if type(said) is tuple else _stored(name, said)) for name, said in named.items()]
    # Arrays follow one another without gaps or overlaps: so no byte is of two of them, and none goes unread.
    end, arrays = 0, dict(sorted(entries, key=lambda entry: entry[1][2:]))
    for name, (_, _, start, stop) in arrays.items():
        if start != end:
            raise ValueError(f"the array {name!r} begins at byte {start:,}, and the bytes before it end at {end:,}")
        end = stop
    return arrays, metadata


_remembered = functools.lru_cache(maxsize=8)(_entries)


def _stored(name: str, said: Any) -> _Stored:
    """Returns one entry of the header, checked before any of it is trusted or used to allocate memory."""
    match said:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]} if len(said) == 3:
            numbers = [*shape, start, stop]
            if dtype in _BITS and {int}.issuperset(map(type, numbers)) and min(numbers) >= 0:
                sizes, bits = _shape_and_bits(dtype, *shape)
                if 8 * (stop - start) == bits:
                    return dtype, sizes, start, stop
                raise ValueError(f"{name!r} is {dtype} of shape {shape} in {stop - start:,} bytes")
    raise ValueError(f"its entry {name!r} is not a dtype ({', '.join(_BITS)}), a shape and two offsets")


@functools.lru_cache(maxsize=4096)
def _shape_and_bits(dtype: str, *shape: int) -> tuple[tuple[int, ...], int]:
    """Returns a shape, the same tuple for equal ones, and the bits of such an array; -1 if it cannot exist."""
    # An axis of size 0 counts as 1 here: NumPy refuses a shape whose other axes are too long, empty or not.
    can_exist = len(shape) <= _MOST_AXES and 8 * math.prod(filter(None, shape)) < 1 << 63
    return shape, math.prod(shape) * _BITS[dtype] if can_exist else -1


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


# -- Arrays as the format stores them ----------------------------------------------------------------------------------

_NAMES = {name: text for text, name in _WRITTEN.items()}


class StoredAs(NamedTuple):
    """How an array is stored."""

    dtype: str  # in the format's words
    shape: tuple[int, ...]
    itemsize: int
    mark: dict[str, str]  # its real kind, if it is stored as another one

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.itemsize


def stored_as(path: str, leaf: Array | jax.ShapeDtypeStruct) -> StoredAs:
    """Returns how an array will be stored."""
    if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
        raise ValueError(f"{path!r} is {describe(leaf)} without values, so it cannot be saved")
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(f"{path!r} lies over several processes, but a file holds whole arrays; save it with Orbax")
    if not isinstance(leaf.dtype, np.dtype):  # of typed keys
        impl = jax.random.key_impl(leaf)
        if not isinstance(impl, str):
            raise ValueError(f"the key at {path!r} uses {impl}, which has no name; save its jax.random.key_data")
        return StoredAs("U32", (*leaf.shape, *_key_kind(impl)[1]), 4, {"key": impl})
    return _stored_as(leaf.dtype, tuple(leaf.shape))


@functools.lru_cache(maxsize=4096)
def _stored_as(dtype: np.dtype, shape: tuple[int, ...]) -> StoredAs:
    if dtype.kind == "c":
        half = np.dtype(f"float{dtype.itemsize * 4}")
        return StoredAs(_NAMES[half.name], (*shape, 2), half.itemsize, {"dtype": dtype.name})
    if dtype.name in _NAMES:
        return StoredAs(_NAMES[dtype.name], shape, dtype.itemsize, {})
    if dtype.itemsize != 1:
        raise ValueError(f"the format cannot hold arrays of {dtype}")
    return StoredAs("U8", shape, 1, {"dtype": dtype.name})


def bytes_of(leaf: Array) -> np.ndarray:
    """Returns the bytes of an array as they are stored, with dtype uint8; without a copy if possible."""
    return in_numpy(leaf).reshape(-1).view(np.uint8)


def _pieces_of(leaf: Array) -> Iterator[bytes | memoryview]:
    """Yields the bytes of an array in pieces that do not change any more.

    A NumPy array may change while it is written, as a replay buffer does. So each of its pieces is a copy.
    """
    data = bytes_of(leaf).data
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        yield bytes(piece) if isinstance(leaf, np.ndarray) else piece


def _kind_of(stored: _Stored, mark: Mapping[str, str] | None) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of a stored array as it was saved; a packed dtype is text."""
    its, shape, _, _ = stored
    if not mark:
        return shape, _dtype_of(its)
    if "key" in mark:
        dtype, words = _key_kind(mark["key"])
        return shape[: len(shape) - len(words)], dtype
    dtype = np.dtype(mark["dtype"])
    return shape[:-1] if dtype.kind == "c" else shape, dtype


@functools.cache
def _dtype_of(name: str) -> Any:
    return name if name in _PACKED else np.dtype(_DTYPES[name])


@functools.cache
def _key_kind(impl: str) -> tuple[Any, tuple[int, ...]]:
    """Returns the dtype of keys of an implementation, and the shape of one key's words."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    return key.dtype, jax.eval_shape(jax.random.key_data, key).shape


_spec = functools.lru_cache(maxsize=4096)(Spec)  # equal ones are one object, of which a file may have 100,000

# -- Reading -----------------------------------------------------------------------------------------------------------


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
            self._arrays, metadata, text = _read_header(source)
        except ValueError:
            if isinstance(source, OnDisk):
                _refuse_other(source)
            raise
        self._first = _PREFIX + len(text)
        self.metadata = {name: said for name, said in metadata.items() if not name.startswith(_RESERVED)}
        self.is_ours, self.is_change = len(self.metadata) < len(metadata), False
        self.words: dict[str, Any] = {"ties": {}, "states": {}, "marks": {}, "values": {}, "message": None}
        self._sums = dict[str, int]()  # the checksums of all arrays
        if self.is_ours:
            self._read_words(metadata, text)
        self._marks = self.words["marks"]

    def _read_words(self, metadata: Mapping[str, str], text: bytes) -> None:
        # The checksum is of the header with zeros in its place, since a text cannot hold its own checksum.
        end = len(_START) + len(_BLANK)
        blanked = text[: len(_START)] + _BLANK.encode() + text[end:]
        if text[:end] != _START + f"{crc32(blanked):08x}".encode():
            raise damaged(self.source, "its header has another checksum than when it was saved")
        with self.understood():
            said = json.loads(metadata[_WORDS])
            if said["version"] != _VERSION:
                what = f"{self.source.name} has version {said['version']!r} of the format of treeparams.saving"
                raise ValueError(f"{what}, but this library reads {_VERSION}; install a newer treeparams")
            self.words = {"marks": {}, "values": {}, "message": None} | said
            sums, message = np.frombuffer(bytes.fromhex(metadata[_CHECKSUMS]), ">u4"), self.words["message"]
            self._sums = dict(zip(self._arrays, sums.tolist(), strict=True))
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
            raise damaged(self.source, f"its description of its arrays cannot be read: {in_short(error)}") from error

    @functools.cached_property
    def specs(self) -> Mapping[str, Spec]:
        """The shape and the dtype in JAX of each array, by name."""
        with self.understood():
            plain = {dtype: in_jax(_dtype_of(dtype)) for dtype in {stored[0] for stored in self._arrays.values()}}
            specs = {name: _spec(shape, *plain[dtype]) for name, (dtype, shape, _, _) in self._arrays.items()}
            for name, mark in self._marks.items():
                shape, dtype = _kind_of(self._arrays[name], mark)
                specs[name] = Spec(shape, *in_jax(dtype))
            return specs

    def dtype(self, name: str) -> Any:
        """Returns the dtype of an array as it was saved, which JAX without x64 may lack."""
        return _kind_of(self._arrays[name], self._marks.get(name))[1]

    def read(self, name: str) -> Any:
        """Reads an array and compares it with its checksum: a NumPy array in a new buffer, or typed keys."""
        return next(self.arrays([name]))[1]

    def arrays(self, names: Iterable[str], is_checked: bool = True) -> Iterator[tuple[str, Any]]:
        """Yields arrays with their names, in the order of the file, each as `read` returns it.

        Args:
            names: names of arrays in the file.
            is_checked: whether to compare each with its checksum, if the file has one.
        """
        ordered = sorted(names, key=lambda name: self._arrays[name][2:])
        # Of a whole file small arrays are read many at once: a call of the system for each takes as long as the rest.
        small = 4096 if len(ordered) == len(self._arrays) and isinstance(self.source, OnDisk) else -1
        base, first, ahead = self._first, 0, np.empty(0, np.uint8)
        for name in ordered:
            _, _, start, stop = self._arrays[name]
            if stop - start > small:
                data = self.source.read(base + start, base + stop)
            else:
                if stop > first + len(ahead):
                    first, ahead = start, self.source.read(base + start, min(base + start + 65536, self.source.size))
                data = ahead[start - first : stop - first].copy()
            if is_checked and self.is_ours:
                self.compare(name, data)
            yield name, self.decoded(name, data)
            # An array may take half of the memory that there is. So none is referred to while the next one is read.
            del data

    def compare(self, name: str, data: np.ndarray | memoryview) -> None:
        """Rejects the bytes of an array if they have another checksum than the file says."""
        if self._sums[name] != crc32(data):
            raise damaged(self.source, f"{name!r} has another checksum than when it was saved")

    def decoded(self, name: str, data: np.ndarray) -> Any:
        """Returns the array for its bytes: a NumPy array, or typed keys."""
        stored, mark = self._arrays[name], self._marks.get(name)
        try:
            shape, dtype = _kind_of(stored, mark)
            if isinstance(dtype, str):
                raise ValueError(f"it is {dtype}, which NumPy and JAX lack; drop it in a plan, rename={{...: None}}")
            if mark and "key" in mark:
                words = jnp.asarray(data.view(np.uint32).reshape(stored[1]))
                return jax.random.wrap_key_data(words, impl=mark["key"])
            return data.view(dtype).reshape(shape)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name!r} of {self.source.name} cannot be read: {error}") from None


def file_at(path: FilePath) -> File:
    """Opens the file at a path, after checking that it has all arrays of a tree."""
    file = File(OnDisk(path))
    if file.is_change:
        raise ValueError(f"{file.source.name} is a message that changes another one; write saving.loads(message, have)")
    return file


# -- Files of other programs ------------------------------------------------------------------------------------------

_TRUST = "; reading one can run any code. If you trust it, convert it once"
_SAVE = '; safetensors.torch.save_file({n: a.contiguous().clone() for n, a in arrays.items()}, "model.safetensors")'
_OTHERS = {  # by how they begin; for a zip archive by the names in it
    rb"zip:.*\.npy\n": "was written by np.savez; use np.load(path) as source: saving.plan(np.load(path), model)",
    rb"zip:.*/constants\.pkl\n": f"is of TorchScript{_TRUST}: arrays = torch.jit.load(path).state_dict(){_SAVE}",
    # An archive, and what it was before there were archives.
    rb"zip:|\x80[\2-\5]\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19": f"is a pickle, as PyTorch writes it{_TRUST} with PyTorch: "
    f"arrays = torch.load(path, weights_only=True){_SAVE}",
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
    start = source.read(0, min(1024, source.size)).tobytes()
    if zipfile.is_zipfile(source.path):
        with zipfile.ZipFile(source.path) as archive:
            start = "\n".join(["zip:", *archive.namelist(), ""]).encode()
    for begins, what in _OTHERS.items():
        if re.match(begins, start, re.DOTALL | re.IGNORECASE):
            raise ValueError(f"{source.name} {what}") from None


# -- Writing -----------------------------------------------------------------------------------------------------------


class Inventory:
    """How arrays are stored, by name, in the order of the file, so that each is aligned.

    Attributes:
        size: the size of the arrays in bytes.
    """

    def __init__(self, kinds: Mapping[str, StoredAs]) -> None:
        self.kinds = {name: kinds[name] for name in sorted(kinds, key=lambda name: -kinds[name].itemsize)}
        self._marks = {name: kind.mark for name, kind in self.kinds.items() if kind.mark}
        entries, self.size = dict[str, Any](), 0
        for name, kind in self.kinds.items():
            start, self.size = self.size, self.size + kind.size
            entries[name] = {"dtype": kind.dtype, "shape": kind.shape, "data_offsets": (start, self.size)}
        self._entries = _encode(entries)

    def header(self, words: Mapping[str, Any], metadata: Mapping[str, str]) -> bytearray:
        """Returns the header of a file with these words about the arrays; it has blanks in place of checksums."""
        if any(name.startswith(_RESERVED) for name in metadata):
            raise ValueError(f"metadata {list(metadata)}: names that start with {_RESERVED!r} are reserved")
        said = json.dumps({"version": _VERSION, **words, "marks": self._marks}, ensure_ascii=False)
        metadata = {_CHECKSUM: _BLANK, _CHECKSUMS: _BLANK * len(self.kinds), _WORDS: said, **metadata}
        try:
            text = f"{_METADATA}{_encode(metadata)}{',' * bool(self.kinds)}{self._entries[1:]}".encode()
        except UnicodeEncodeError as error:
            what = error.object[max(0, error.start - 20) : error.end]
            raise ValueError(f"what ends with {what!r} is not Unicode text, so it cannot be saved") from None
        if len(text) > _LONGEST:
            raise ValueError(f"the names and texts take {len(text):,} bytes; the format has {_LONGEST:,} at most")
        text += b" " * (-len(text) % 8)  # so that the arrays are aligned
        return bytearray(len(text).to_bytes(_PREFIX, "little") + text)

    def to_disk(self, path: FilePath, header: bytearray, leaves: Mapping[str, Any]) -> None:
        """Writes a file, whole or not at all. Each array is read once.

        The header comes first in the file and holds the checksums, which are known only when all arrays are written. So
        it is written twice: first with blanks of the same length, and in the end with the checksums.
        """
        with replacing(as_path(path)) as file:
            file.write(header)
            sums = list[int]()
            for name in self.kinds:
                value = 0
                for piece in _pieces_of(leaves[name]):
                    value = crc32(piece, value)
                    file.write(piece)
                sums.append(value)
            file.seek(0)
            file.write(_with_sums(header, sums))

    def to_memory(self, header: bytearray, parts: Mapping[str, Any]) -> bytes:
        """Returns the bytes of such a file, from those of its arrays. If these change meanwhile, checksums differ."""
        ordered = [parts[name] for name in self.kinds]
        return b"".join([_with_sums(header, list(map(crc32, ordered))), *ordered])


def _with_sums(header: bytearray, sums: Sequence[int]) -> bytearray:
    """Returns the header with the checksums of the arrays, and with its own, made with blanks in its place."""
    header, text = header.copy(), np.array(sums, ">u4").tobytes().hex().encode()
    first = _PREFIX + _SUMS_AT
    header[first : first + len(text)] = text
    first = _PREFIX + len(_START)
    header[first : first + len(_BLANK)] = b"%08x" % crc32(header[_PREFIX:])
    return header
