"""Stacks: the slots of one shape and dtype as one array; what reads like one; and the frozen arrays, stacked too."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ._joined import Form, Joined
from ._layout import Layout, index_of
from ._paths import unquote
from ._structure import is_inexact
from ._text import describe, quoted
from ._where import Where, name_of, select


@functools.cache
def row_shape(key: str) -> tuple[int, ...] | None:
    """The shape in the key of a stack, `"float32[3,4]"`; `None` of another text."""
    name, _, shape = key.partition("[")
    try:
        sizes = tuple(int(size) for size in shape.removesuffix("]").split(",") if size)
        is_key = is_inexact(jnp.dtype(name)) and key == f"{name}[{','.join(map(str, sizes))}]"
    except (TypeError, ValueError):
        return None
    return sizes if is_key else None


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
    tree: dict[str, Any] = {}
    if groups is None:
        for i, slot in enumerate(slots):
            tree.setdefault(slot.key, []).append(i)
    else:
        lost = set(range(len(slots)))
        for name, where in groups.items():
            leaves = select(index.structure, where)
            if leaves <= index.sources.keys():
                alias = min(leaves)
                path, source = (index.structure.paths[i] for i in (alias, index.sources[alias]))
                raise ValueError(f"{name_of(where)} selects only {path!r}, which is tied to {source!r}; write that one")
            tree[name] = {}
            for i in sorted(index.by_leaf[leaf] for leaf in leaves.intersection(index.positions)):
                if i in lost:
                    tree[name].setdefault(slots[i].key, []).append(i)
            lost -= {i for rows in tree[name].values() for i in rows}
        if lost:
            paths = [slots[i].path for i in sorted(lost)]
            raise ValueError(
                f"in no group: {quoted(paths)}; add one for all that is left, groups={{..., 'rest': '**'}}"
            )
    return _form(tree, layout.paths, slots)


def held_of(arrays: Sequence[Any]) -> Form:
    """The stacks of those arrays of which there are several of one shape and dtype."""
    tree: dict[str, list[int]] = {}
    for i, array in enumerate(arrays):
        # A stack has no weak type, JAX joins no keys, and what is NumPy's stays on the host.
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        if isinstance(array, jax.Array) and not is_key and not array.weak_type:
            tree.setdefault(describe(array), []).append(i)
    several = {key: rows for key, rows in tree.items() if len(rows) > 1}
    return _form(several, [""] * len(arrays), arrays)


def _form(tree: Any, paths: Sequence[str], slots: Sequence[Any]) -> Form:
    """The form with this tree of the numbers of slots, or of arrays like slots."""
    members, treedef = jtu.tree_flatten(tree, is_leaf=lambda node: isinstance(node, list))
    blocks = []
    for rows in members:
        shape, dtype = slots[rows[0]].shape, slots[rows[0]].dtype
        blocks.append(Joined((tuple(shape),) * len(rows), (dtype,) * len(rows), dtype, len(rows), len(shape)))
    return Form(treedef, tuple(blocks), tuple(map(tuple, members)), tuple(paths))


NOTHING = held_of([])
