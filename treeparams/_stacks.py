"""Stacks: the slots of one shape and dtype as one array; what reads like one; and the frozen arrays, stacked too."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from ._joined import Form, Joined
from ._layout import Layout, index_of
from ._mesh import is_sharded, split
from ._paths import unquote
from ._structure import is_inexact
from ._text import describe, quoted
from ._where import Where, name_of, select


@functools.cache
def row_shape(key: str) -> tuple[int, ...] | None:
    """The shape in the key of a stack, `"float32[3,4]"`; `None` of another text."""
    found = re.fullmatch(r"([a-z]\w+)\[((?:\d+(?:,\d+)*)?)\]", key)
    if found is None:
        return None
    try:
        dtype = jnp.dtype(found[1])
    except TypeError:
        return None
    is_key = is_inexact(dtype) and dtype.name == found[1]
    return tuple(map(int, found[2].split(",") if found[2] else ())) if is_key else None


def is_stack(path: Sequence[Any], leaf: Any) -> bool:
    """Whether an array is a stack: it stands in a dictionary under the key of its rows, whatever its own dtype."""
    key, shape = getattr(path[-1], "key", None) if path else None, getattr(leaf, "shape", ())
    return isinstance(key, str) and len(shape) > 0 and row_shape(key) == tuple(shape[1:])


def stacks_of(layout: Layout, groups: Mapping[str, Where] | None = None) -> Form:
    """The stacks of the slots of a layout."""
    if groups is None:
        forms = index_of(layout).forms
        if "stacks" not in forms:
            forms["stacks"] = _stacks_of(layout, None)
        return forms["stacks"]
    if not isinstance(groups, Mapping) or not all(isinstance(name, str) for name in groups):
        raise TypeError(f"groups is a dictionary {{name: where}}, got {groups!r:.80}")
    return _stacks_of(layout, groups)


def _stacks_of(layout: Layout, groups: Mapping[str, Where] | None) -> Form:
    index, slots = index_of(layout), layout.slots
    for i in index.structure.parameters:
        entry, shape = index.structure.entries[i][-1:], index.structure.spec(i).shape
        if entry and shape and row_shape(unquote(entry[0])) == shape[1:]:
            raise ValueError(
                f"{index.structure.paths[i]!r} of the model reads like a stack itself, which optim.per_leaf would take "
                "apart; give it another key"
            )
    if groups is None:
        return in_groups(layout, {None: list(range(len(slots)))})
    lost, found = set(range(len(slots))), {}
    for name, where in groups.items():
        leaves = select(index.structure, where)
        if leaves <= index.sources.keys():
            alias = min(leaves)
            path, source = (index.structure.paths[i] for i in (alias, index.sources[alias]))
            raise ValueError(f"{name_of(where)} selects only {path!r}, which is tied to {source!r}; write that one")
        found[name] = sorted(lost.intersection(index.by_leaf[leaf] for leaf in leaves.intersection(index.positions)))
        lost -= set(found[name])
    if lost:
        paths = [slots[i].path for i in sorted(lost)]
        raise ValueError(f"in no group: {quoted(paths)}; add one for what is left, groups={{..., 'rest': '**'}}")
    return in_groups(layout, found)


def in_groups(layout: Layout, groups: Mapping[Any, Sequence[int]]) -> Form:
    """The stacks of groups of slots; `None` alone for no groups."""
    tree: dict[Any, dict[str, list[int]]] = {}
    for name, numbers in groups.items():
        tree[name] = {}
        for i in numbers:
            tree[name].setdefault(layout.slots[i].key, []).append(i)
    return _form(tree.get(None, tree), layout.paths, layout.slots)


def held_of(arrays: Sequence[Any]) -> Form:
    """The stacks of those arrays of which there are several of one shape and dtype."""
    alike: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        # A stack has no weak type, JAX joins no keys, NumPy has dtypes that JAX has not, and what lies on other devices
        # stays there.
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        if isinstance(array, np.ndarray) or is_key or array.weak_type or is_sharded(array) or split(array) is not None:
            continue
        where = array.sharding if not isinstance(array, Tracer) and array.committed else None
        alike.setdefault((describe(array), where), []).append(i)
    several = [rows for rows in alike.values() if len(rows) > 1]
    form = _form({f"{i:06}": rows for i, rows in enumerate(several)}, [""] * len(arrays), arrays)
    return dataclasses.replace(form, blocks=tuple(dataclasses.replace(block, dtypes=()) for block in form.blocks))


def _form(tree: Any, paths: Sequence[str], slots: Sequence[Any]) -> Form:
    """The form with this tree of the numbers of slots, or of arrays like slots."""
    members, treedef = jtu.tree_flatten(tree, is_leaf=lambda node: isinstance(node, list))
    blocks = []
    for rows in members:
        shape, dtype = slots[rows[0]].shape, slots[rows[0]].dtype
        blocks.append(Joined((tuple(shape),) * len(rows), (dtype,) * len(rows), dtype, len(rows), len(shape)))
    return Form(treedef, tuple(blocks), tuple(map(tuple, members)), tuple(paths))


NOTHING = held_of([])
