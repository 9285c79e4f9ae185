"""Makers of forms: each returns, for a layout, where its slots are stored in a tree of arrays."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from .._slots.index import Slot
from .._slots.layout import Layout, index_of
from .._slots.rules import first_entries
from .._slots.where import Where
from .._tree.dtypes import common_dtype, is_complex, is_inexact
from .._tree.flattening import take
from .._tree.text import count_of, describe, quoted
from .._tree.types import PyTree, TreeDef
from .block import Block
from .form import Form
from .mesh import is_sharded, split

_LONGEST = 2**31 - 1  # offsets in compiled programs are 32 bits wide
_ONE = jtu.tree_structure(0)


def tree_of(layout: Layout) -> Form:
    """Returns the canonical tree of a layout: each slot separately, at its path."""
    forms = index_of(layout).forms
    if "tree" not in forms:
        blocks = tuple([Block.single(slot.shape, slot.dtype) for slot in layout.slots])
        members = tuple([(slot,) for slot in range(len(blocks))])
        treedef = _without_static_arrays(index_of(layout).canonical_treedef)
        forms["tree"] = Form(treedef, blocks, members, layout.paths, "a canonical tree")
    return forms["tree"]


class _Shape(jax.ShapeDtypeStruct):
    """The shape and dtype of a static array; it equals all arrays of these, so that a mask fits that has one.

    Rules call functions under `jax.jit`, which compares static values, and arrays have no truth value.
    """

    __array_ufunc__ = None  # NumPy leaves `==` to it

    def __eq__(self, other: object) -> bool:
        return (self.shape, self.dtype) == (getattr(other, "shape", None), getattr(other, "dtype", None))

    __hash__ = jax.ShapeDtypeStruct.__hash__


def _shaped(value: Any) -> Any:
    """Returns a static value with the shapes of the arrays in it."""
    if isinstance(value, (np.ndarray, jax.Array)):
        return _Shape(value.shape, value.dtype)
    if type(value) in (tuple, list):
        return type(value)(map(_shaped, value))
    return {key: _shaped(each) for key, each in value.items()} if type(value) is dict else value


def _without_static_arrays(treedef: TreeDef) -> TreeDef:
    """Returns the structure with shapes in place of the arrays in static fields."""
    tree = treedef.unflatten(range(treedef.num_leaves))  # of new nodes, which can be changed
    opened = [tree]
    while opened:
        node = opened.pop()
        children, static = take(node) or ((), node)
        opened += [child for _, child in children]
        if static is not node and hasattr(node, "__dict__"):  # otherwise it is a leaf, or static as a whole
            vars(node).update({name: _shaped(value) for name, value in vars(node).items()})
    return jtu.tree_structure(tree)


def vector_of(layout: Layout, dtype: DTypeLike | None = None, pad_to: SupportsIndex = 1) -> Form:
    """Returns one vector of the slots of a layout."""
    dtype = layout.dtype if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    pad_to = pad_to if type(pad_to) is int and pad_to > 0 else count_of("pad_to", pad_to, "elements")
    forms = index_of(layout).forms
    if (dtype, pad_to) not in forms:
        length = -(-layout.size // pad_to) * pad_to
        _check_vector(layout.slots, dtype, length)
        block = Block.vector([s.shape for s in layout.slots], [s.dtype for s in layout.slots], dtype, length)
        forms[dtype, pad_to] = _in_one(block, layout)
    return forms[dtype, pad_to]


def vectors_of(layout: Layout) -> Form:
    """Returns one vector for each dtype among the slots of a layout; a bare vector if there is only one dtype."""
    dtypes: dict[str, list[int]] = {}
    for i, slot in enumerate(layout.slots):
        dtypes.setdefault(str(slot.dtype), []).append(i)
    if len(dtypes) < 2:
        return vector_of(layout)
    forms = index_of(layout).forms
    if "vectors" not in forms:
        members, treedef = jtu.tree_flatten(dtypes, is_leaf=lambda node: isinstance(node, list))
        own = [[layout.slots[i] for i in slots] for slots in members]
        blocks = [Block.vector([s.shape for s in slots], [s.dtype for s in slots], slots[0].dtype) for slots in own]
        for slots, block in zip(own, blocks, strict=True):
            _check_vector(slots, block.dtype, block.size)
        words = "vectors, one for each dtype"
        forms["vectors"] = Form(treedef, tuple(blocks), tuple(map(tuple, members)), layout.paths, words)
    return forms["vectors"]


def reals_of(layout: Layout) -> Form:
    """Returns one real vector; a complex slot contributes all its real parts, then all imaginary parts."""
    forms = index_of(layout).forms
    if not index_of(layout).complex_slots:
        return vector_of(layout)
    if "reals" not in forms:
        reals = [
            (slot.shape, jnp.finfo(slot.dtype).dtype)
            for slot in layout.slots
            for _ in range(2 if is_complex(slot.dtype) else 1)
        ]
        shapes, dtypes = zip(*reals, strict=True)
        dtype = common_dtype(dtype for shape, dtype in reals if 0 not in shape)
        forms["reals"] = _in_one(Block.vector(shapes, dtypes, dtype), layout)
    return forms["reals"]


def stacks_of(layout: Layout, groups: Mapping[str, Where] | None = None) -> Form:
    """Returns stacks of the slots of a layout: one array for each shape and dtype, with a row for each slot."""
    if groups is not None:
        return stacks_in_groups(layout, _grouped(layout, groups))
    forms = index_of(layout).forms
    if "stacks" not in forms:
        forms["stacks"] = stacks_in_groups(layout, {None: range(len(layout.slots))})
    return forms["stacks"]


def stacks_in_groups(layout: Layout, groups: Mapping[Any, Sequence[int]], *, is_apart: bool = False) -> Form:
    """Returns stacks for groups of slots; the only group `None` means no groups. Apart, each has a single row."""
    tree: dict[Any, Any] = {name: {} for name in groups}
    for name, numbers in groups.items():
        for slot in numbers:
            key = layout.slots[slot].key
            tree[name].setdefault(f"{key} {slot}" if is_apart else key, []).append(slot)
    return _stacks(tree.get(None, tree), layout.paths, layout.slots)


def stacks_of_arrays(arrays: Sequence[Any], groups: Sequence[str] | None = None) -> Form:
    """Returns stacks of those arrays whose shape and dtype several share.

    `groups`: the group of each array. A stack holds only arrays of one group, wherever each is stored now.
    """
    # Layers have frozen arrays too, such as masks, and a scan over layers needs these with an axis over the layers. So
    # what there are several of is stacked once, here, and not in each step.
    alike: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        # A stack has no weak type, JAX joins no keys, NumPy has dtypes that JAX has not, and what lies on other devices
        # stays there.
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        is_split = groups is None and (is_sharded(array) or split(array) is not None)
        if isinstance(array, np.ndarray) or is_key or array.weak_type or is_split:
            continue
        where = groups[i] if groups is not None else _devices_of(array)
        alike.setdefault((describe(array), where), []).append(i)
    several = [rows for rows in alike.values() if len(rows) > 1]
    form = _stacks({f"{i:06}": rows for i, rows in enumerate(several)}, [""] * len(arrays), arrays)
    return dataclasses.replace(form, blocks=tuple([dataclasses.replace(each, dtypes=()) for each in form.blocks]))


def _devices_of(array: jax.Array) -> Any:
    """Returns the sharding of an array that is committed to it, otherwise `None`."""
    return array.sharding if not isinstance(array, Tracer) and array.committed else None


def _in_one(block: Block, layout: Layout) -> Form:
    return Form(_ONE, (block,), (tuple(range(len(block.shapes))),), layout.paths, "a vector")


def _check_vector(slots: Sequence[Slot], dtype: np.dtype, length: int) -> None:
    if length > _LONGEST:
        raise ValueError(
            f"a vector of {length:,} elements is longer than the {_LONGEST:,} that compiled programs can address; use "
            "stacks, tp.stack(model), one array for each shape"
        )
    if not is_inexact(dtype):
        raise TypeError(f"the dtype of the vector must be floating or complex, got {dtype}")
    complex_slots = [slot for slot in slots if is_complex(slot.dtype)]
    if not is_complex(dtype) and any(slot.size for slot in complex_slots):
        slot = next(slot for slot in complex_slots if slot.size)
        raise TypeError(f"{slot.path!r} is {slot.dtype}, which a vector of {dtype} cannot hold")
    if is_complex(dtype) and not complex_slots:
        raise TypeError(f"no parameter is complex, so the vector cannot be {dtype}")


def _grouped(layout: Layout, groups: object) -> dict[str, list[int]]:
    """Returns the slots of each group, from one `where` per group."""
    if not isinstance(groups, Mapping) or not all(isinstance(name, str) for name in groups):
        raise TypeError(f"groups must be a dictionary {{name: where}}, got {groups!r:.80}")
    index = index_of(layout)
    entries = first_entries(index, list(groups.values()))
    found: dict[str, list[int]] = {name: [] for name in groups}
    for slot, leaf in enumerate(index.positions):
        if leaf in entries:
            found[[*groups][entries[leaf]]].append(slot)
    lost = [slot for slot, leaf in enumerate(index.positions) if leaf not in entries]
    if lost:
        paths = [layout.slots[i].path for i in lost]
        raise ValueError(
            f"trained, but in no group: {quoted(paths)}; add a group for the rest, groups={{..., 'rest': '**'}}"
        )
    return found


def _stacks(tree: PyTree, paths: Sequence[str], slots: Sequence[Any]) -> Form:
    """Returns the form for this tree of slot numbers (or numbers of arrays like slots): a list for each stack."""
    members, treedef = jtu.tree_flatten(tree, is_leaf=lambda node: isinstance(node, list))
    blocks = [Block.rows(slots[rows[0]].shape, slots[rows[0]].dtype, len(rows)) for rows in members]
    return Form(treedef, tuple(blocks), tuple(map(tuple, members)), tuple(paths), "the stacks of tp.stack")


NOTHING = stacks_of_arrays([])
