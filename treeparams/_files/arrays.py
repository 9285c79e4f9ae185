"""The safetensors format: a JSON header that gives the place of each array, and then the arrays, one after another.

The package `safetensors` is not needed to read or write it. Its reader for NumPy lacks floats of 8 bits and checksums,
and raises errors of another class. The whole header is checked before anything is read or allocated. A dtype that the
format lacks is stored as another one, and marked.
"""

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from .._tree.structure import Spec
from .._tree.text import describe
from .._tree.types import Array, is_inexact
from .source import PIECE, Source

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
_METADATA = '{"__metadata__":'
_SHORT = 1 << 22  # characters of a header that is remembered

Stored = tuple[str, tuple[int, ...], int, int]
"""An array in a file: its dtype in the format's words, its shape, and its start and stop after the header.

A file may have 100,000 of these. As plain tuples, unlike objects of a class, they do not slow down Python's search for
cycles.
"""


def read_header(source: Source) -> tuple[dict[str, Stored], dict[str, str], bytes]:
    """Reads the header of a file, and checks that it is consistent, also with the number of bytes.

    Returns:
        The arrays in the order of the file, the metadata, and the text of the header.
    """
    size = source.size
    length = int.from_bytes(source.read(0, min(_PREFIX, size))[0].tobytes(), "little")
    if size < _PREFIX or length > min(size - _PREFIX, _LONGEST):
        raise source.wrong(f"its header is said to have {length:,} bytes, and the {source.noun} has {size:,}")
    first = _PREFIX + length
    text = source.read(_PREFIX, first)[0].tobytes()
    try:
        arrays, metadata = _parsed(text.decode())
    except (ValueError, RecursionError) as error:
        raise source.wrong(f"its header is no JSON of arrays: {error}") from None
    end = first + (next(reversed(arrays.values()))[3] if arrays else 0)
    if end != size:
        raise source.wrong(f"its arrays end at byte {end:,}, and the {source.noun} has {size:,}")
    return arrays, metadata, text


# An object of JSON is read as the tuple of its pairs, in which a name may occur twice; a list stays a list.
_DECODER = json.JSONDecoder(object_pairs_hook=tuple)


def _parsed(text: str) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns the arrays and the metadata in a header."""
    # The messages of a sender differ in their metadata. The entries behind them are the same text each time.
    said, rest = (), text
    if text.startswith(_METADATA + "{"):
        metadata, end = _DECODER.raw_decode(text, len(_METADATA))
        said, rest = (("__metadata__", metadata),), "{" + text[end:].removeprefix(",").rstrip(" ")
    entries = _remembered(rest) if len(rest) < _SHORT else _entries(rest)
    pairs = [*said, *entries[1]]
    metadata = pairs[0][1] if pairs else ()
    if len(pairs) > 1 or type(metadata) is not tuple or not {str} >= {type(value) for _, value in metadata}:
        raise ValueError("its metadata are not one dictionary of texts")
    return entries[0], _as_dict(metadata)


def _entries(text: str) -> tuple[dict[str, Stored], list[tuple[str, Any]]]:
    """Returns the arrays in a JSON object in the order of the file, and its metadata."""
    pairs = _DECODER.decode(text)
    if type(pairs) is not tuple:
        raise ValueError("it is no JSON object")
    named = _as_dict(pairs)
    metadata = [pair for pair in pairs if pair[0] == "__metadata__"]
    entries = [(name, _stored(name, said)) for name, said in named.items() if name != "__metadata__"]
    # Arrays follow one another without gaps or overlaps: so no byte is of two of them, and none goes unread.
    end, arrays = 0, dict(sorted(entries, key=lambda entry: entry[1][2:]))
    for name, (_, _, start, stop) in arrays.items():
        if start != end:
            raise ValueError(f"the array {name!r} begins at byte {start:,}, and the bytes before it end at {end:,}")
        end = stop
    return arrays, metadata


_remembered = functools.lru_cache(maxsize=8)(_entries)


def _as_dict(pairs: Any) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found


def _stored(name: str, pairs: Any) -> Stored:
    """Returns one entry of the header, checked before any of it is trusted or used to allocate memory."""
    match dict(pairs) if type(pairs) is tuple and len(pairs) == 3 else None:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]} if dtype in _BITS:
            if {int}.issuperset(map(type, [*shape, start, stop])) and min([*shape, start, stop]) >= 0:
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


def header_text(metadata: Mapping[str, str], entries: str) -> bytes:
    """Returns a header of metadata and of the entries of arrays, a JSON object."""
    try:
        text = f"{_METADATA}{_encode(metadata)}{',' * (entries != '{}')}{entries[1:]}".encode()
    except UnicodeEncodeError as error:
        what = error.object[max(0, error.start - 20) : error.end]
        raise ValueError(f"what ends with {what!r} is not Unicode text, so it cannot be saved") from None
    if len(text) > _LONGEST:
        raise ValueError(f"the names and texts take {len(text):,} bytes; the format has {_LONGEST:,} at most")
    return text + b" " * (-len(text) % 8)  # so that the arrays are aligned


def prefixed(text: bytes | bytearray) -> bytes:
    """Returns a header as it is in the file, after its length."""
    return len(text).to_bytes(_PREFIX, "little") + text


# -- Arrays as the format stores them --------------------------------------------------------------------------------

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


class Inventory(NamedTuple):
    """How arrays are stored, by name, in the order of the file, so that each is aligned."""

    kinds: dict[str, StoredAs]
    marks: dict[str, dict[str, str]]
    entries: str  # of the header
    size: int  # in bytes


def inventory_of(kinds: Mapping[str, StoredAs]) -> Inventory:
    """Orders arrays of these kinds as they will be stored."""
    ordered = {name: kinds[name] for name in sorted(kinds, key=lambda name: -kinds[name].itemsize)}
    marks = {name: kind.mark for name, kind in ordered.items() if kind.mark}
    entries, end = dict[str, Any](), 0
    for name, kind in ordered.items():
        start, end = end, end + kind.size
        entries[name] = {"dtype": kind.dtype, "shape": kind.shape, "data_offsets": (start, end)}
    return Inventory(ordered, marks, _encode(entries), end)


def bytes_of(leaf: Array) -> np.ndarray:
    """Returns the bytes of an array as they are stored, with dtype uint8; without a copy if possible."""
    return in_numpy(leaf).reshape(-1).view(np.uint8)


def pieces_of(leaf: Array) -> Iterator[bytes | memoryview]:
    """Yields the bytes of an array in pieces that do not change any more.

    A NumPy array may change while it is written, as a replay buffer does. So each of its pieces is a copy.
    """
    data = bytes_of(leaf).data
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        yield bytes(piece) if isinstance(leaf, np.ndarray) else piece


def in_numpy(array: Array) -> np.ndarray:
    """Returns an array in NumPy; for keys, their words."""
    if not isinstance(array.dtype, np.dtype):
        array = jax.random.key_data(array)
    return np.ascontiguousarray(array).reshape(array.shape)


def decode(stored: Stored, mark: Mapping[str, str] | None, data: np.ndarray) -> Any:
    """Returns the array for bytes in a file: a NumPy array, or typed keys."""
    shape, dtype = decoded_kind(stored, mark)
    if mark and "key" in mark:
        return jax.random.wrap_key_data(jnp.asarray(data.view(np.uint32).reshape(stored[1])), impl=mark["key"])
    if isinstance(dtype, str):
        raise ValueError(f"it is {dtype}, which NumPy and JAX do not support; drop it in a plan, rename={{...: None}}")
    return data.view(dtype).reshape(shape)


def specs_of(arrays: Mapping[str, Stored], marks: Mapping[str, Mapping[str, str]]) -> dict[str, Spec]:
    """Returns the shapes of stored arrays, and their dtypes in JAX."""
    plain = {dtype: _in_jax(_dtype_of(dtype)) for dtype in {stored[0] for stored in arrays.values()}}
    specs = {name: _spec(shape, *plain[dtype]) for name, (dtype, shape, _, _) in arrays.items()}
    for name, mark in marks.items():
        shape, dtype = decoded_kind(arrays[name], mark)
        specs[name] = Spec(shape, *_in_jax(dtype))
    return specs


_spec = functools.lru_cache(maxsize=4096)(Spec)  # equal ones are one object, of which a file may have 100,000


def decoded_kind(stored: Stored, mark: Mapping[str, str] | None) -> tuple[tuple[int, ...], Any]:
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
    """Returns a dtype of the format: NumPy's, or the name of a packed one."""
    return name if name in _PACKED else np.dtype(_DTYPES[name])


@functools.cache
def _key_kind(impl: str) -> tuple[Any, tuple[int, ...]]:
    """Returns the dtype of keys of an implementation, and the shape of one key's words."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    return key.dtype, jax.eval_shape(jax.random.key_data, key).shape


def _in_jax(dtype: Any) -> tuple[Any, bool]:
    """Returns a dtype in JAX, and whether a parameter may have it."""
    if not isinstance(dtype, np.dtype):  # of keys, or packed
        return dtype, False
    dtype = jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))
    return dtype, is_inexact(dtype)


def array_spec(array: Array | jax.ShapeDtypeStruct) -> Spec:
    """Returns the shape of an array, and its dtype in JAX."""
    return Spec(tuple(array.shape), *_in_jax(array.dtype))


# -- Arrays where others are ------------------------------------------------------------------------------------------

Like = tuple[str, Array, Array | jax.ShapeDtypeStruct]
"""A name, an array, and another one that lies where the array is to lie."""


def placed(name: str, array: Array, like: Array | jax.ShapeDtypeStruct) -> Array:
    """Places an array like another one: in NumPy, or on its devices with its sharding."""
    return next(placed_in_turn([(0, (name, array, like))]))[1]


def placed_in_turn(arrays: Iterable[tuple[int, Like]]) -> Iterator[tuple[int, Array]]:
    """Yields each array with its key, placed as by `placed`.

    A large one is let go before the next one is read. Small ones wait for one another: JAX takes less than half the
    time for many that go to one place together.
    """
    waiting, size = dict[int, Like](), 0
    for key, (name, array, like) in arrays:
        if isinstance(array, Tracer):
            yield key, array
        elif isinstance(like, np.ndarray):
            yield key, _narrowed(name, np.asarray(array), like.dtype)
        else:
            waiting[key], size = (name, array, like), size + array.nbytes
        del array
        if size >= PIECE:
            yield from zip(waiting, _in_jax_together(waiting.values()), strict=True)
            waiting, size = {}, 0
    yield from zip(waiting, _in_jax_together(waiting.values()), strict=True)


def _in_jax_together(arrays: Iterable[Like]) -> list[jax.Array]:
    made: list[Any] = []
    together: dict[tuple[Any, bool], list[int]] = {}
    for name, array, like in arrays:
        array, sharding = as_in_jax(name, array), getattr(like, "sharding", None)
        if isinstance(array, jax.Array) or sharding is None or isinstance(sharding, SingleDeviceSharding):
            together.setdefault((sharding, getattr(like, "committed", True)), []).append(len(made))
        else:  # each device, of this process or of another one, gets its share
            share = lambda index, array=array: np.array(np.asarray(array)[index])
            array = jax.make_array_from_callback(array.shape, sharding, share)
        made.append(array)
    for (sharding, committed), several in together.items():
        # An array that is on a device only because that is the default must not be committed to it, or it could no
        # longer be used together with arrays of other devices.
        arrays = [made[i] for i in several]
        if sharding is None or committed:
            arrays = jax.device_put(arrays, sharding)
        else:
            with jax.default_device(*sharding.device_set):
                arrays = jax.device_put(arrays)
        for i, array in zip(several, arrays, strict=True):
            made[i] = array
    return made


def as_in_jax(name: str, array: Array) -> Array:
    """Casts an array to the dtype that it has in JAX."""
    is_numpy = isinstance(array, np.ndarray)
    return _narrowed(name, array, _in_jax(array.dtype)[0]) if is_numpy else array


def _narrowed(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts an array to a dtype that may have fewer bits, as in JAX without x64; only digits may be lost."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", under="ignore"):
        made = array.astype(dtype)
    # No value may change by more than rounding: to infinity, zero, or another integer. Complex ones are pairs here.
    old, new = (np.ravel(each).view(np.real(each).dtype) for each in (array, made))
    at = np.isinf(new) | (new == 0) if new.dtype.kind == "f" else new != old  # few, so that little memory is needed
    if (np.isfinite(old[at]) & (old[at] != new[at])).any():
        raise ValueError(f"{name!r} has values that {dtype} cannot hold; switch on jax_enable_x64")
    return made
