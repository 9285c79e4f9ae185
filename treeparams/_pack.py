"""Where the slots lie: all in one vector, one vector for each dtype, or large ones each in a vector of its own."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._describe import count_of, in_columns
from ._structure import common_dtype


class Slot(NamedTuple):
    """One distinct trained parameter and its place in the vector."""

    path: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    offset: int  # in elements
    size: int  # in elements
    vector: int = 0  # which one, where `tp.ravel` makes several


class Vector(NamedTuple):
    """One of the vectors that `tp.ravel` makes: what lies in it."""

    dtype: Any
    slots: tuple[int, ...]  # as positions in `layout.slots`
    shapes: tuple[tuple[int, ...], ...]  # of the slots
    size: int  # in elements
    length: int  # the same, padded


class Packing(NamedTuple):
    """How slots are put into vectors; the options of `tp.ravel`."""

    dtype: str | None = None  # by name, since `np.dtype("float64") == None` is true
    dtype_groups: bool = False
    bucket: int | None = None
    pad_to: int = 1

    @property
    def is_single(self) -> bool:
        """Whether there is one vector, in place of a tuple of them."""
        return not self.dtype_groups and self.bucket is None

    @property
    def is_complex(self) -> bool:
        """Whether a complex dtype is asked for."""
        return self.dtype is not None and is_complex(jnp.dtype(self.dtype))

    def changed(self, dtype: Any, dtype_groups: bool, bucket: Any, pad_to: Any) -> "Packing":
        """The packing with the options that are given; those at their defaults stay as they are.

        Raises:
            ValueError: options that exclude each other or are out of range.
            TypeError: the dtype is not floating.
        """
        new = Packing(
            self.dtype if dtype is None else _floating(dtype),
            dtype_groups or self.dtype_groups,
            self.bucket if bucket is None else count_of("bucket", bucket, "elements", 0),
            count_of("pad_to", pad_to, "elements") if pad_to != ONE.pad_to else self.pad_to,
        )
        if new.dtype_groups and new.dtype is not None:
            raise ValueError(f"dtype_groups=True keeps every dtype, so it does not go with dtype={new.dtype}; give one")
        return new

    def options(self) -> list[str]:
        """What was asked for, as it is written in a call."""
        fields = zip(self._fields, self, ONE, strict=True)
        return [f"{name}={value!r}" for name, value, unset in fields if value != unset]

    def key(self, slot: Slot) -> Hashable:
        """What slots that share a vector have in common."""
        if self.bucket is not None and slot.size > self.bucket:
            return slot.path
        return slot.dtype if self.dtype_groups else None


ONE = Packing()
"""One vector of the common dtype."""


def pack(slots: Sequence[Slot], packing: Packing) -> tuple[tuple[Slot, ...], tuple[Vector, ...]]:
    """The slots with their places, and the vectors in the order in which the first slot of each comes.

    Raises:
        TypeError: the dtype asked for cannot hold a slot.
    """
    members: dict[Hashable, list[int]] = {None: []} if packing.is_single else {}
    for i, slot in enumerate(slots):
        members.setdefault(packing.key(slot), []).append(i)
    placed, vectors = list(slots), []
    for number, indices in enumerate(members.values()):
        offset = 0
        for i in indices:
            placed[i] = slots[i]._replace(offset=offset, vector=number)
            offset += slots[i].size
        dtype = _dtype([slots[i] for i in indices], packing.dtype)
        shapes = tuple(slots[i].shape for i in indices)
        length = -(-offset // packing.pad_to) * packing.pad_to
        vectors.append(Vector(dtype, tuple(indices), shapes, offset, length))
    return tuple(placed), tuple(vectors)


def unplaced(path: str, aliases: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> Slot:
    """A slot that `pack` has yet to place."""
    return Slot(path, aliases, shape, dtype, 0, math.prod(shape))


def table(slots: Sequence[Slot], frozen: Sequence[Slot], tied: Mapping[str, str]) -> str:
    """The slots as a table, frozen parameters below, and what they are tied to."""
    several = len({slot.vector for slot in slots}) > 1
    rows = [_row(slot, f"{slot.vector}: " * several + f"{slot.offset:,}", tied) for slot in slots]
    rows += [_row(slot, "frozen", tied) for slot in frozen]
    lines = in_columns(["path", "shape", "dtype", "offset", "size", "tied to"], rows, right=[3, 4])
    nbytes = sum(slot.size * jnp.dtype(slot.dtype).itemsize for slot in slots)
    total = f"{count(slots)}, {sum(slot.size for slot in slots):,} elements, {nbytes:,} bytes"
    held = f"; {sum(slot.size for slot in frozen):,} elements frozen" if frozen else ""
    return "\n".join([*lines, total + held])


def _row(slot: Slot, offset: str, tied: Mapping[str, str]) -> list[str]:
    shape = ",".join(map(str, slot.shape)) or "()"
    return [slot.path or '""', shape, str(slot.dtype), offset, f"{slot.size:,}", tied.get(slot.path, "")]


def count(slots: Sequence[Slot]) -> str:
    """How many, in words."""
    return f"{len(slots)} slot{'' if len(slots) == 1 else 's'}"


def is_complex(dtype: Any) -> bool:
    """Whether a dtype is complex."""
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def _dtype(slots: Sequence[Slot], asked: str | None) -> Any:
    if asked is None:
        return common_dtype(slot.dtype for slot in slots if slot.size)
    dtype = jnp.dtype(asked)
    slot = next((slot for slot in slots if is_complex(slot.dtype)), None)
    if slot is not None and not is_complex(dtype):
        raise TypeError(f"{slot.path!r} is {slot.dtype}, which a vector of {asked} cannot hold")
    # A vector in which nothing is complex, beside one in which something is: both have the same precision.
    return dtype if slot is not None else jnp.finfo(dtype).dtype


def _floating(dtype: Any) -> str:
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"the dtype of the vector must be floating or complex, got {dtype}")
    return dtype.name


Slot.__module__ = "treeparams"
