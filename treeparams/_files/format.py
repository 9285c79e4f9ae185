"""The safetensors format: a header of JSON that says where each array lies, and then the arrays, one after another.

The package `safetensors` is not needed to read or write it: its reader for NumPy has no floats of 8 bits and no
checksums, and its errors are of its own class. All that a header says is checked before anything is read or allocated.
"""

import io
import json
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .._tree.text import describe

DTYPES = {
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
    "C64": "complex64",
}
"""The dtypes of the format and those of NumPy and JAX."""

FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""The path of a file, as `open` takes it."""


def as_text(path: object) -> str:
    """The path of a file as text."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(
            f"expected the path of a file, got {describe(path)}; it comes first: saving.save(path, model), "
            "saving.load(path, like)"
        )
    return os.fsdecode(path)


_LONGEST = 100_000_000  # bytes of a header; the format's own limit
_LONGEST_REASON = 500  # characters; a name may have millions
_PREFIX = 8  # bytes, the length of the header
_MOST_AXES = 32  # of a NumPy array before NumPy 2


class Stored(NamedTuple):
    """An array in a file."""

    dtype: str  # in the format's words
    shape: tuple[int, ...]
    start: int  # in the file
    stop: int


class Header(NamedTuple):
    """The header of a file."""

    arrays: dict[str, Stored]
    metadata: dict[str, str]
    text: bytes  # as it stands in the file


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
    try:
        said = json.loads(text.decode(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise wrong(path, f"its header is no JSON ({error})") from None
    if not isinstance(said, dict):
        raise wrong(path, "its header is no JSON object")
    metadata = said.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise wrong(path, "its metadata are not text by text")
    arrays = {name: _stored(path, name, entry, _PREFIX + length) for name, entry in said.items()}
    # Arrays follow one another without gaps or overlaps: so no byte is of two of them, and none goes unread.
    end = _PREFIX + length
    for name, stored in sorted(arrays.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != end:
            raise wrong(
                path, f"the array {name!r} begins at byte {stored.start:,}, and what is before it ends at {end:,}"
            )
        end = stored.stop
    if end != size:
        raise wrong(path, f"its arrays end at byte {end:,}, and the file has {size:,}")
    return Header(arrays, metadata, text)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _is_size(value: object) -> bool:
    """Whether a value of the header is a whole number that 64 bits can hold."""
    return type(value) is int and 0 <= value < 1 << 63


def _stored(path: str, name: str, entry: object, start: int) -> Stored:
    """One entry of the header, checked: nothing of it is trusted, or used to allocate, before that."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong(path, f"its entry {name!r} is not of a dtype, a shape and two offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong(path, f"{name!r} is of the dtype {dtype!r}, which is none of {', '.join(DTYPES)}")
    is_shape = isinstance(shape, list) and len(shape) <= _MOST_AXES and all(map(_is_size, shape))
    # An axis of size 0 counts as 1 here: NumPy refuses a shape whose other axes are too long, empty or not.
    if not is_shape or not _is_size(8 * math.prod(size or 1 for size in shape)):
        raise wrong(path, f"the shape of {name!r} is no list of at most {_MOST_AXES} sizes that an array can have")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise wrong(path, f"the offsets of {name!r} are not two numbers")
    if offsets[1] - offsets[0] != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
        raise wrong(path, f"{name!r} is {dtype} of shape {shape} in {offsets[1] - offsets[0]:,} bytes")
    return Stored(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def header_text(kinds: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """The header of arrays of these kinds, in the order in which they will stand in the file."""
    said: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, kind in kinds.items():
        said[name] = {"dtype": kind.dtype, "shape": kind.shape, "data_offsets": [end, end + kind.size]}
        end += kind.size
    text = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the arrays are aligned
    if len(text) > _LONGEST:
        raise ValueError(
            f"the names, ties and texts of the tree take {len(text):,} bytes; the format has {_LONGEST:,} at most"
        )
    return text


def prefixed(text: bytes) -> bytes:
    """A header as it stands in the file, behind its length."""
    return len(text).to_bytes(_PREFIX, "little") + text


def read_bytes(path: str, file: io.FileIO, stored: Stored) -> np.ndarray:
    """The bytes of an array, in a buffer of their own that JAX takes as it is."""
    size = stored.stop - stored.start
    buffer = np.empty(size + 64, np.uint8)
    first = -buffer.ctypes.data % 64  # JAX copies what is not aligned so
    found = buffer[first : first + size]
    file.seek(stored.start)
    into = found.data
    while len(into):
        count = file.readinto(into)
        if not count:
            raise wrong(path, "it has become shorter while it was read")
        into = into[count:]
    return found
