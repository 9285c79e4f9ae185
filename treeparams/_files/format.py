"""The safetensors format: a JSON header that gives the place of each array, and then the arrays, one after another.

The package `safetensors` is not needed to read or write it. Its reader for NumPy lacks floats of 8 bits and checksums,
and raises errors of another class. The whole header is checked before anything is read or allocated.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from json.encoder import encode_basestring
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from .source import Source

_WRITTEN = """
BOOL bool  U8 uint8  I8 int8  U16 uint16  I16 int16  U32 uint32  I32 int32  U64 uint64  I64 int64
F8_E4M3 float8_e4m3fn  F8_E5M2 float8_e5m2  BF16 bfloat16  F16 float16  F32 float32  F64 float64
"""
_READ = """
C64 complex64  F8_E8M0 float8_e8m0fnu  F8_E4M3FNUZ float8_e4m3fnuz  F8_E5M2FNUZ float8_e5m2fnuz
"""
WRITTEN = dict(re.findall(r"(\S+) (\S+)", _WRITTEN))
"""The dtypes of the format that all its readers support, with their names in NumPy and JAX."""

DTYPES = WRITTEN | dict(re.findall(r"(\S+) (\S+)", _READ))
"""These and later dtypes, which are read but never written."""


class Packed:
    """A dtype of the format that packs its elements into bytes, which NumPy and JAX arrays do not do."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


PACKED = {name: Packed(name) for name in ("F4", "F6_E2M3", "F6_E3M2")}
"""The packed dtypes by name. Their arrays are listed, but not read."""

_BITS = {name: np.dtype(its).itemsize * 8 for name, its in DTYPES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

SMALL = 1 << 14
"""An array of fewer bytes takes less time than the calls around it."""

_LONGEST = 100_000_000  # bytes of a header; the format's own limit
_PREFIX = 8  # bytes, the length of the header
_ENTRY = frozenset(["dtype", "shape", "data_offsets"])
_NO_SHAPE: tuple[tuple[int, ...], int] = ((), -1)
_MOST_AXES = 32  # of a NumPy array before NumPy 2
_METADATA = '{"__metadata__":'
_SHORT = 1 << 22  # characters of a header that is remembered


Stored = tuple[str, tuple[int, ...], int, int]
"""An array in a file: its dtype in the format's words, its shape, and its start and stop after the header.

A file may have 100,000 of these. As plain tuples, unlike objects of a class, they do not slow down Python's search for
cycles.
"""


class Header(NamedTuple):
    """The header of a file."""

    arrays: dict[str, Stored]  # in the order of the file
    metadata: dict[str, str]
    text: bytes  # as it is in the file
    first: int  # where the arrays begin, in bytes


def read_header(source: Source) -> Header:
    """Reads the header of a file, and checks that it is consistent, also with the number of bytes."""
    size = source.size
    start = source.read(0, min(SMALL, size))[0].tobytes()
    length = int.from_bytes(start[:_PREFIX], "little")
    if size < _PREFIX or length > min(size - _PREFIX, _LONGEST):
        raise source.wrong(f"its header is said to have {length:,} bytes, and the {source.noun} has {size:,}")
    first = _PREFIX + length
    text = start[_PREFIX:first] if first <= len(start) else source.read(_PREFIX, first)[0].tobytes()
    try:
        arrays, metadata = _parsed(text.decode())
    except UnicodeDecodeError as error:
        raise source.wrong(f"its header is no JSON ({error})") from None
    except ValueError as error:
        raise source.wrong(str(error)) from None
    end = first + (next(reversed(arrays.values()))[3] if arrays else 0)
    if end != size:
        raise source.wrong(f"its arrays end at byte {end:,}, and the {source.noun} has {size:,}")
    return Header(arrays, metadata, text, first)


def _parsed(text: str) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns the arrays and the metadata in a header."""
    # The messages of a sender differ in their metadata. The entries behind them are the same text each time.
    said, end = _read_json(_DECODER.raw_decode, text, len(_METADATA)) if text.startswith(_METADATA + "{") else (None, 0)
    rest = text[end:]
    if not rest.startswith(',"'):
        arrays, metadata = _entries(text)
        return arrays, {} if metadata is _MISSING else _as_metadata(metadata)
    rest = "{" + rest[1:].rstrip(" ")
    arrays, again = _remembered(rest) if len(rest) < _SHORT else _entries(rest)
    if again is not _MISSING:
        raise ValueError("a name occurs twice in one object of its header")
    return arrays, _as_metadata(said)


def _entries(text: str) -> tuple[dict[str, Stored], Any]:
    """Returns the arrays in a JSON object, and its metadata."""
    said = _read_json(_DECODER.decode, text)
    if type(said) is not _Object:
        raise ValueError("its header is no JSON object of arrays")
    arrays = _distinct(said.pairs)
    metadata = arrays.pop("__metadata__", _MISSING)
    for name, stored in arrays.items():
        if type(stored) is not tuple:
            _stored(name, stored.pairs if type(stored) is _Object else [])  # the error, with the name
    # Arrays follow one another without gaps or overlaps: so no byte is of two of them, and none goes unread.
    end = 0
    arrays = {name: arrays[name] for name in in_order(arrays, arrays)}
    for name, (_, _, start, stop) in arrays.items():
        if start != end:
            raise ValueError(f"the array {name!r} begins at byte {start:,}, and the bytes before it end at {end:,}")
        end = stop
    return arrays, metadata


_remembered = functools.lru_cache(maxsize=8)(_entries)


def _as_metadata(said: object) -> dict[str, str]:
    if type(said) is not _Object or not {str} >= {type(value) for _, value in said.pairs}:
        raise ValueError("its metadata are not a dictionary of texts")
    return _distinct(said.pairs)


class _Object(NamedTuple):
    """A JSON object that is not an entry: its pairs, in which a name may occur twice."""

    pairs: list[tuple[str, Any]]


def _as_read(pairs: list[tuple[str, Any]]) -> Stored | _Object:
    """Converts a JSON object; entries are converted at once, because 100,000 objects that live on slow Python down."""
    try:
        return _stored("", pairs)
    except ValueError:
        return _Object(pairs)


def _read_json(read: Callable[..., Any], *text: Any) -> Any:
    try:
        return read(*text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is no JSON ({error})") from None


_DECODER = json.JSONDecoder(object_pairs_hook=_as_read)
_MISSING = object()


def in_order(names: Iterable[str], arrays: Mapping[str, Stored]) -> list[str]:
    """Sorts the names of arrays in the order of the file; an empty one before another with the same start."""
    return sorted(names, key=lambda name: arrays[name][2] + arrays[name][3])


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in one object of its header")
    return found


def _is_size(value: object) -> TypeGuard[int]:
    """Returns whether a value of the header is a whole number that fits into 64 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def _stored(name: str, pairs: list[tuple[str, Any]]) -> Stored:
    """Returns one entry of the header, checked before any of it is trusted or used to allocate memory."""
    its = dict(pairs)
    if len(its) < len(pairs) or its.keys() != _ENTRY:
        _distinct(pairs)
        raise ValueError(f"its entry {name!r} is not a dtype, a shape and two offsets")
    dtype, shape, offsets = its["dtype"], its["shape"], its["data_offsets"]
    if type(dtype) is not str or dtype not in _BITS:
        raise ValueError(f"{name!r} is of the dtype {dtype!r}, which is none of {', '.join(_BITS)}")
    try:
        is_list = type(shape) is list and len(shape) <= _MOST_AXES
        sizes, bits = _shape_and_bits(dtype, *shape) if is_list else _NO_SHAPE
    except TypeError:  # of a list of lists
        sizes, bits = _NO_SHAPE
    if bits < 0:
        raise ValueError(f"the shape of {name!r} is no list of at most {_MOST_AXES} sizes that an array can have")
    if type(offsets) is not list or len(offsets) != 2 or not (_is_size(offsets[0]) and _is_size(offsets[1])):
        raise ValueError(f"the offsets of {name!r} are not two numbers")
    first, last = offsets
    if 8 * (last - first) != bits:
        raise ValueError(f"{name!r} is {dtype} of shape {shape} in {last - first:,} bytes")
    return dtype, sizes, first, last


@functools.lru_cache(maxsize=4096, typed=True)  # `True` is no size, though it is equal to 1
def _shape_and_bits(dtype: str, *shape: object) -> tuple[tuple[int, ...], int]:
    """Returns a shape, the same tuple for equal ones, and the bits of such an array; -1 if it cannot exist."""
    sizes = tuple([size for size in shape if _is_size(size)])
    # An axis of size 0 counts as 1 here: NumPy refuses a shape whose other axes are too long, empty or not.
    is_right = len(sizes) == len(shape) and _is_size(8 * math.prod(filter(None, sizes)))
    return sizes, math.prod(sizes) * _BITS[dtype] if is_right else -1


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def entries_text(kinds: Mapping[str, Any]) -> str:
    """Returns the entries of a header for arrays of these kinds, in the order of the file."""
    entries, end = list[str](), 0
    for name, kind in kinds.items():
        start, end = end, end + kind.size
        entries.append(f',{encode_basestring(name)}:{{{_kind_text(*kind[:2])},"data_offsets":[{start},{end}]}}')
    return "".join(entries)


@functools.lru_cache(maxsize=4096)
def _kind_text(dtype: str, shape: tuple[int, ...]) -> str:
    return f'"dtype":"{dtype}","shape":[{",".join(map(str, shape))}]'


def header_text(metadata: Mapping[str, str], entries: str) -> bytes:
    """Returns a header with these metadata and the arrays of `entries_text`."""
    text = f'{{"__metadata__":{_encode(metadata)}{entries}}}'.encode()
    text += b" " * (-len(text) % 8)  # so that the arrays are aligned
    if len(text) > _LONGEST:
        raise ValueError(
            f"the names, ties and texts of the tree take {len(text):,} bytes; the format has {_LONGEST:,} at most"
        )
    return text


def prefixed(text: bytes | bytearray) -> bytes:
    """Returns a header as it is in the file, after its length."""
    return len(text).to_bytes(_PREFIX, "little") + text
