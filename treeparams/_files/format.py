"""The safetensors format: a header of JSON that says where each array lies, and then the arrays, one after another.

The package `safetensors` is not needed to read or write it: its reader for NumPy has no floats of 8 bits and no
checksums, and its errors are of its own class. All that a header says is checked before anything is read or allocated.
"""

import functools
import io
import json
import math
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from .._tree.text import describe

WRITTEN = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}
"""The dtypes of the format and those of NumPy and JAX, that all its readers know."""

DTYPES = WRITTEN | {
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""With those that came later, which are read and never written."""


class Packed:
    """A dtype of the format whose elements are packed into bytes, as arrays of NumPy and JAX are not."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


PACKED = {name: Packed(name) for name in ("F4", "F6_E2M3", "F6_E3M2")}
"""These dtypes by name: an array of one is listed, and not read."""

_BITS = {name: np.dtype(its).itemsize * 8 for name, its in DTYPES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""The path of a file, as `open` takes it."""

PIECE = 1 << 20
"""Bytes that are still in the cache of a processor when they are used again."""

SMALL = 1 << 14
"""Bytes of an array that take less time than the calls around them."""

_LONGEST = 100_000_000  # bytes of a header; the format's own limit
_LONGEST_REASON = 500  # characters; a name may have millions
_PREFIX = 8  # bytes, the length of the header
_ENTRY = frozenset(["dtype", "shape", "data_offsets"])
_NO_SHAPE: tuple[tuple[int, ...], int] = ((), -1)
_MOST_AXES = 32  # of a NumPy array before NumPy 2


Stored = tuple[str, tuple[int, ...], int, int]
"""An array in a file: its dtype in the format's words, its shape, and where in the file it starts and stops.

A file may have 100,000 of these. As plain tuples, unlike objects of a class, Python's search for cycles lets them be.
"""


class Header(NamedTuple):
    """The header of a file."""

    arrays: dict[str, Stored]
    metadata: dict[str, str]
    text: bytes  # as it stands in the file


def as_text(path: object) -> str:
    """The path of a file as text."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(
            f"expected the path of a file, got {describe(path)}; it comes first: saving.save(path, model), "
            "saving.load(path, like)"
        )
    return os.fsdecode(path)


def wrong(path: str, why: str) -> ValueError:
    """The error of a file that cannot be read."""
    why = why if len(why) <= _LONGEST_REASON else f"{why[:_LONGEST_REASON]} ..."
    return ValueError(f"{path!r} is no safetensors file, or damaged: {why}")


def read_header(path: str, file: io.FileIO) -> Header:
    """The header of an open file, once all in it agrees with itself and with the size of the file."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(_PREFIX), "little")
    if size < _PREFIX or length > min(size - _PREFIX, _LONGEST):
        raise wrong(path, f"its header is said to have {length:,} bytes, and the file has {size:,}")
    text = file.read(length)
    first = _PREFIX + length

    def as_read(pairs: list[tuple[str, Any]]) -> Stored | _Object:
        """An object of JSON: an entry is made at once, since 100,000 objects that live on keep Python busy."""
        try:
            return _stored(path, "", pairs, first)
        except ValueError:
            return _Object(pairs)

    try:
        said = json.loads(text.decode(), object_pairs_hook=as_read)
    except (ValueError, RecursionError) as error:
        raise wrong(path, f"its header is no JSON ({error})") from None
    if type(said) is not _Object:
        raise wrong(path, "its header is no JSON object of arrays")
    arrays = _distinct(path, said.pairs)
    metadata = arrays.pop("__metadata__", _Object([]))
    if type(metadata) is not _Object or not all(isinstance(value, str) for _, value in metadata.pairs):
        raise wrong(path, "its metadata are not text by text")
    metadata = _distinct(path, metadata.pairs)
    for name, stored in arrays.items():
        if type(stored) is not tuple:
            _stored(path, name, stored.pairs if type(stored) is _Object else [], first)  # the error, with the name
    # Arrays follow one another without gaps or overlaps: so no byte is of two of them, and none goes unread.
    end = first
    for name in in_order(arrays, arrays):
        _, _, start, stop = arrays[name]
        if start != end:
            raise wrong(path, f"the array {name!r} begins at byte {start:,}, and what is before it ends at {end:,}")
        end = stop
    if end != size:
        raise wrong(path, f"its arrays end at byte {end:,}, and the file has {size:,}")
    return Header(arrays, metadata, text)


class _Object(NamedTuple):
    """An object of JSON that is no entry: its pairs, where a name may stand twice."""

    pairs: list[tuple[str, Any]]


def in_order(names: Iterable[str], arrays: Mapping[str, Stored]) -> list[str]:
    """The names of arrays in the order of the file; an empty one comes before another that begins where it does."""
    return sorted(names, key=lambda name: arrays[name][2] + arrays[name][3])


def _distinct(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise wrong(path, "a name stands twice in one object of its header")
    return found


def _is_size(value: object) -> TypeGuard[int]:
    """Whether a value of the header is a whole number that 64 bits can hold."""
    return type(value) is int and 0 <= value < 1 << 63


def _stored(path: str, name: str, pairs: list[tuple[str, Any]], start: int) -> Stored:
    """One entry of the header, checked: nothing of it is trusted, or used to allocate, before that."""
    its = dict(pairs)
    if len(its) < len(pairs) or its.keys() != _ENTRY:
        _distinct(path, pairs)
        raise wrong(path, f"its entry {name!r} is not of a dtype, a shape and two offsets")
    dtype, shape, offsets = its["dtype"], its["shape"], its["data_offsets"]
    if type(dtype) is not str or dtype not in _BITS:
        raise wrong(path, f"{name!r} is of the dtype {dtype!r}, which is none of {', '.join(_BITS)}")
    try:
        is_list = type(shape) is list and len(shape) <= _MOST_AXES
        sizes, bits = _shape_and_bits(dtype, *shape) if is_list else _NO_SHAPE
    except TypeError:  # of a list of lists
        sizes, bits = _NO_SHAPE
    if bits < 0:
        raise wrong(path, f"the shape of {name!r} is no list of at most {_MOST_AXES} sizes that an array can have")
    if type(offsets) is not list or len(offsets) != 2 or not (_is_size(offsets[0]) and _is_size(offsets[1])):
        raise wrong(path, f"the offsets of {name!r} are not two numbers")
    first, last = offsets
    if 8 * (last - first) != bits:
        raise wrong(path, f"{name!r} is {dtype} of shape {shape} in {last - first:,} bytes")
    return dtype, sizes, start + first, start + last


@functools.lru_cache(maxsize=4096, typed=True)  # `True` is no size, though it is equal to 1
def _shape_and_bits(dtype: str, *shape: object) -> tuple[tuple[int, ...], int]:
    """The same tuple for equal shapes, and how many bits such an array takes; -1 if there can be no such array."""
    sizes = tuple([size for size in shape if _is_size(size)])
    # An axis of size 0 counts as 1 here: NumPy refuses a shape whose other axes are too long, empty or not.
    is_right = len(sizes) == len(shape) and _is_size(8 * math.prod(filter(None, sizes)))
    return sizes, math.prod(sizes) * _BITS[dtype] if is_right else -1


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def entries_text(kinds: Mapping[str, Any]) -> str:
    """The entries of a header for arrays of these kinds, in the order in which they will stand in the file."""
    entries, end = list[str](), 0
    for name, kind in kinds.items():
        start, end = end, end + kind.size
        shape = ",".join(map(str, kind.shape))
        entries.append(f',{_encode(name)}:{{"dtype":"{kind.dtype}","shape":[{shape}],"data_offsets":[{start},{end}]}}')
    return "".join(entries)


def header_text(metadata: Mapping[str, str], entries: str) -> bytes:
    """A header of these metadata and of the arrays of `entries_text`."""
    text = f'{{"__metadata__":{_encode(metadata)}{entries}}}'.encode()
    text += b" " * (-len(text) % 8)  # so that the arrays are aligned
    if len(text) > _LONGEST:
        raise ValueError(
            f"the names, ties and texts of the tree take {len(text):,} bytes; the format has {_LONGEST:,} at most"
        )
    return text


def prefixed(text: bytes) -> bytes:
    """A header as it stands in the file, behind its length."""
    return len(text).to_bytes(_PREFIX, "little") + text


# -- Reading -----------------------------------------------------------------------------------------------------------

_ALIGNED = 64  # JAX copies what is not aligned so


def read_bytes(path: str, file: io.FileIO, start: int, stop: int, is_summed: bool) -> tuple[np.ndarray, int]:
    """A part of a file, in a buffer of its own that JAX takes as it is, and its checksum, or 0."""
    size = stop - start
    buffer = np.empty(size + _ALIGNED, np.uint8)
    first = -buffer.ctypes.data % _ALIGNED
    found, value = buffer[first : first + size], 0
    into = found.data
    while len(into):
        count = _read_at(file, into[:PIECE], stop - len(into))
        if not count:
            raise wrong(path, "it has become shorter while it was read")
        if is_summed:
            value = zlib.crc32(into[:count], value)
        into = into[count:]
    return found, value


_seeking = threading.Lock()


def _read_at(file: io.FileIO, into: memoryview, offset: int) -> int:
    """Reads from an offset, which no other thread and no forked process moves, and returns how many bytes it were."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [into], offset)
    if hasattr(os, "pread"):  # macOS before 11
        data = os.pread(file.fileno(), len(into), offset)
        into[: len(data)] = data
        return len(data)
    with _seeking:  # Windows, which does not fork
        file.seek(offset)
        return file.readinto(into) or 0
