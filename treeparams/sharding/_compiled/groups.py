"""The devices that a collective connects: its groups, and the axes of the mesh that they lie along.

XLA numbers the devices in the order of the mesh, row by row. It writes groups of these numbers in four ways:

    replica_groups={{0,1},{2,3}}                       each group listed
    replica_groups=[2,2]<=[2,2]T(1,0)                  2 groups of 2: 0, ..., 3 as 2 x 2, transposed, cut into rows
    replica_groups=mesh['a'=2,'b'=2] {'b'}             along an axis of a mesh, whose names are not those of the user
    source_target_pairs={{0,1},{1,0}}                  of a permute: who sends to whom
"""

import functools
import math
import re

import numpy as np
from jax.sharding import AbstractMesh, Mesh

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^)]*\))? \{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'(?:=(\d+)|:\((\d+)\)(\d+))?")  # 'a'=4; of a part of an axis 'a':(1)2


@functools.lru_cache(maxsize=1024)
def groups_in(attributes: str) -> tuple[tuple[int, ...], ...] | None:
    """Returns the groups of devices of a collective, or its pairs; `None` for one group of all, or if none are written.

    >>> groups_in("replica_groups=[2,2]<=[2,2]T(1,0)"), groups_in("replica_groups=mesh['a'=2,'b'=2] {'b'}")
    (((0, 2), (1, 3)), ((0, 1), (2, 3)))
    """
    if found := _LISTED.search(attributes):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1]))
    if found := _IOTA.search(attributes):
        count, size, shape, order = found.groups()
        devices = np.arange(int(count) * int(size)).reshape(_numbers(shape))
        rows = (devices.transpose(_numbers(order)) if order else devices).reshape(int(count), int(size))
    elif found := _NAMED.search(attributes):
        rows = _along({name: int(size) for name, size, _, _ in _AXIS.findall(found[1])}, found[2])
    else:
        return None
    return tuple(map(tuple, rows.tolist()))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _along(sizes: dict[str, int], named: str) -> np.ndarray:
    """Returns the groups along some axes of a mesh of these sizes."""
    shape, within, at = list[int](), list[int](), 0
    parts = {name: (int(before), int(size)) if size else None for name, _, before, size in _AXIS.findall(named)}
    for name, size in sizes.items():
        # An axis of which a part is named is as several axes, one after another.
        before, own = (parts[name] or (1, size)) if name in parts else (1, 1)
        shape += [before, own, size // (before * own)]
        within.append(at + 1)
        at += 3
    others = [axis for axis in range(len(shape)) if axis not in within]
    devices = np.arange(math.prod(shape)).reshape(shape).transpose(others + within)
    return devices.reshape(-1, math.prod(shape[axis] for axis in within))


def moves_nothing(attributes: str) -> bool:
    """Returns whether each device is the only one in its group, or sends to itself."""
    groups = groups_in(attributes)
    return groups is not None and all(len(set(group)) == 1 for group in groups)


def axes_in(attributes: str, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of a mesh along which the devices of a group differ."""
    shape = tuple(mesh.shape.values())
    groups = groups_in(attributes) or (tuple(range(math.prod(shape))),)
    differs = np.zeros(len(shape), bool)
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group), shape)) if shape else np.zeros((0, len(group)))
        differs |= (places != places[:, :1]).any(axis=1)
    return tuple(name for name, does in zip(mesh.axis_names, differs, strict=True) if does)
