"""The forms of trained parameters: the canonical tree, one vector, stacks. Each is a tree of blocks.

A form records where slots are stored in a tree of arrays: `join` makes that tree from one array per slot, and `cut` is
its inverse. No other code asks which form it is. A new form is one more maker.

Compiled programs keep the blocks alive. So blocks must not hold a layout, which keeps static functions and the arrays
that those have captured. A form itself is held by the index of its layout.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from .._slots.index import Slot
from .._slots.layout import Layout, index_of
from .._slots.where import Where
from .._tree.paths import key_entries, nearest, unquote
from .._tree.structure import same_treedef, take
from .._tree.text import count_of, describe, first_few, quoted
from .._tree.types import PyTree, TreeDef, is_complex, is_inexact
from .block import Block, HashedOnce, cast

_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")
_LONGEST = 2**31 - 1  # offsets in compiled programs are 32 bits wide


@dataclasses.dataclass(frozen=True)
class Form(HashedOnce):
    """Where slots are stored in a tree of arrays."""

    treedef: Any = dataclasses.field(hash=False)  # its static fields may have no hash
    blocks: tuple[Block, ...]  # its leaves
    members: tuple[tuple[int, ...], ...]  # the slots in each
    paths: tuple[str, ...] = dataclasses.field(compare=False)  # of the slots
    noun: str = dataclasses.field(compare=False)  # what it is called in messages

    @classmethod
    def of(
        cls, tree: PyTree, slots: Sequence[Any], paths: Sequence[str], noun: str, make: Callable[..., Any] = Block.rows
    ) -> "Form":
        """Returns the form for a tree of numbers of slots (or arrays): a list of them for each block."""
        members, treedef = jtu.tree_flatten(tree, is_leaf=lambda node: isinstance(node, list))
        blocks = tuple([make([slots[i] for i in own]) for own in members])
        return cls(treedef, blocks, tuple(map(tuple, members)), tuple(paths), noun)

    # -- Makers: each returns, for a layout, where its slots are stored in a tree of arrays

    @classmethod
    def tree(cls, layout: Layout) -> "Form":
        """Returns the canonical tree of a layout: each slot separately, at its path."""
        forms = index_of(layout).forms
        if "tree" not in forms:
            blocks = tuple([Block.single(slot.shape, slot.dtype) for slot in layout.slots])
            members = tuple([(slot,) for slot in range(len(blocks))])
            treedef = _without_static_arrays(index_of(layout).canonical_treedef)
            forms["tree"] = cls(treedef, blocks, members, layout.paths, "a canonical tree")
        return forms["tree"]

    @classmethod
    def vector(cls, layout: Layout, dtype: DTypeLike | None = None, pad_to: SupportsIndex = 1) -> "Form":
        """Returns one vector of the slots of a layout."""
        dtype = layout.dtype if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
        pad_to = pad_to if type(pad_to) is int and pad_to > 0 else count_of("pad_to", pad_to, "elements")
        forms = index_of(layout).forms
        if (dtype, pad_to) not in forms:
            length = -(-layout.size // pad_to) * pad_to
            _check_vector(layout.slots, dtype, length)
            every, make = list(range(len(layout.slots))), functools.partial(Block.vector, dtype=dtype, length=length)
            forms[dtype, pad_to] = cls.of(every, layout.slots, layout.paths, "a vector", make)
        return forms[dtype, pad_to]

    @classmethod
    def stacks(cls, layout: Layout, groups: Mapping[str, Where] | None = None) -> "Form":
        """Returns stacks of the slots of a layout: one array for each shape and dtype, with a row for each slot."""
        if groups is not None:
            return cls.in_groups(layout, _grouped(layout, groups))
        forms = index_of(layout).forms
        if "stacks" not in forms:
            forms["stacks"] = cls.in_groups(layout, {None: range(len(layout.slots))})
        return forms["stacks"]

    @classmethod
    def in_groups(cls, layout: Layout, groups: Mapping[Any, Sequence[int]], *, is_apart: bool = False) -> "Form":
        """Returns stacks for groups of slots; the only group `None` means no groups. Apart, each has a single row."""
        tree: dict[Any, Any] = {name: {} for name in groups}
        for name, numbers in groups.items():
            for slot in numbers:
                key = layout.slots[slot].key
                tree[name].setdefault(f"{key} {slot}" if is_apart else key, []).append(slot)
        return cls.of(tree.get(None, tree), layout.slots, layout.paths, "the stacks of tp.stack")

    __hash__ = HashedOnce.__hash__

    @functools.cached_property
    def is_bare(self) -> bool:
        """Whether the form is a single array without a container."""
        return self.treedef == jtu.tree_structure(0)

    @functools.cached_property
    def is_stacks(self) -> bool:
        """Whether the rows of each array in the form are slots."""
        return not self.is_bare and all(block.has_rows for block in self.blocks)

    @functools.cached_property
    def dtype(self) -> Any:
        """The dtype of a form that is one array; `None` for other forms, which keep the dtypes of the slots."""
        return self.blocks[0].dtype if self.is_bare and self.blocks[0].length is not None else None

    @functools.cached_property
    def keys(self) -> tuple[tuple[Any, ...], ...]:
        """The JAX keys on the way to each block."""
        tree = jtu.tree_unflatten(self.treedef, range(len(self.blocks)))
        return tuple([path for path, _ in jtu.tree_flatten_with_path(tree)[0]])

    @functools.cached_property
    def entries(self) -> tuple[tuple[str, ...], ...]:
        """The keys on the way to each block, as the entries of a path."""
        return tuple(map(key_entries, self.keys))

    @functools.cached_property
    def locations(self) -> dict[int, tuple[int, int]]:
        """The block of each slot, and its number in it."""
        return {slot: (b, n) for b, slots in enumerate(self.members) for n, slot in enumerate(slots)}

    @functools.cached_property
    def slots(self) -> list[int]:
        """The slots in the form: all slots of a layout; for frozen arrays, those that share a shape with others."""
        return sorted(self.locations)

    @functools.cached_property
    def has_singles(self) -> bool:
        """Whether each slot is a separate block, in order, so that there is nothing to join or to cut."""
        in_order = tuple([(slot,) for slot in range(len(self.blocks))])
        return bool(in_order) and self.members == in_order and all(block.length is None for block in self.blocks)

    @functools.cached_property
    def _kinds(self) -> tuple[list[Any], list[Any]]:
        """The shapes and dtypes of the blocks."""
        return [block.shape for block in self.blocks], [block.dtype for block in self.blocks]

    @functools.cached_property
    def _order(self) -> list[int] | None:
        """For each slot its number in the order of blocks; `None` if that is the order of slots."""
        # Blocks are cut one after another, so arrays come in the order of blocks; the slots of a stack, of one shape,
        # stand anywhere among the others.
        order = [slot for slots in self.members for slot in slots]
        at = {slot: i for i, slot in enumerate(order)}
        return None if order == self.slots else [at[slot] for slot in self.slots]

    def join(self, arrays: Sequence[Any]) -> PyTree:
        """Makes the form from one array per slot."""
        if self.has_singles:
            return jtu.tree_unflatten(self.treedef, arrays)
        of_each = self._by_block(arrays)
        is_in_turn = any(map(_is_some_at_a_time, self.blocks, of_each))
        leaves = list(map(_join_rows, self.blocks, of_each)) if is_in_turn else _join_all(self.blocks, of_each)
        return jtu.tree_unflatten(self.treedef, leaves)

    def spread(self, numbers: Sequence[Any]) -> PyTree:
        """Makes a tree like this form from one number per slot, with arrays that broadcast against the blocks."""
        return jtu.tree_unflatten(self.treedef, map(Block.spread, self.blocks, self._by_block(numbers)))

    def _by_block(self, values: Sequence[Any]) -> list[list[Any]]:
        return [[values[slot] for slot in slots] for slots in self.members]

    def cut(self, tree: PyTree) -> list[jax.Array]:
        """Checks a tree and cuts it into one array per slot, in its shape and dtype."""
        return self.cut_leaves(self.leaves(tree))

    def cut_leaves(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Cuts leaves that are known to be right into one array for each of `slots`."""
        arrays = [array for own in _cut_blocks(self.blocks, leaves) for array in own]
        return arrays if self._order is None else [arrays[i] for i in self._order]

    def read(self, tree: PyTree) -> list[Any]:
        """Cuts a tree that may lack blocks, with `None` for the slots in these.

        Rules of Optax put a `MaskedNode`, or `None`, where they leave something out.
        """
        leaves = self.leaves(tree, may_lack=True)
        if self.has_singles and self._are_right(leaves):
            return leaves
        here = [i for i, leaf in enumerate(leaves) if leaf is not None]
        values: dict[int, Any] = dict.fromkeys(self.slots)
        for i, own in zip(here, _cut_blocks([self.blocks[i] for i in here], [leaves[i] for i in here]), strict=True):
            values |= zip(self.members[i], own, strict=True)
        return [values[slot] for slot in self.slots]

    def _are_right(self, leaves: Sequence[Any]) -> bool:
        """Returns, from a quick check, whether leaves are arrays in the shapes and dtypes of the blocks."""
        try:
            return (list(map(_shape, leaves)), list(map(_dtype, leaves))) == self._kinds
        except AttributeError:
            return False

    def _at_blocks(self, tree: PyTree) -> list[Any]:
        """Returns the leaf of a tree at the keys of each block, or `None`."""
        found = {_texts(path): leaf for path, leaf in jtu.tree_flatten_with_path(tree)[0]}
        if () in found:
            raise TypeError(f"expected {self.noun}, a dictionary, got {describe(tree)}")
        known = list(map(_texts, self.keys))
        for keys in [keys for keys in found if keys not in known]:
            close = nearest(keys[-1], [each[-1] for each in known])
            raise ValueError(f"expected {self.noun}, got one too many, {_quote(keys)}{close}")
        return [found.get(keys) for keys in known]

    def shapes(self) -> PyTree:
        """Returns the form as `jax.ShapeDtypeStruct`s."""
        kind = lambda block: jax.ShapeDtypeStruct(block.shape, jax.dtypes.canonicalize_dtype(block.dtype))
        return jtu.tree_unflatten(self.treedef, map(kind, self.blocks))

    # -- In words

    @property
    def summary(self) -> str:
        """The form in a few words."""
        if not self.is_bare:
            return f"stacks: {first_few(['.'.join(_texts(keys)) for keys in self.keys]) or 'none'}"
        block = self.blocks[0]
        return f"{block.dtype}{f', padded to {block.size:,}' if block.size > block.starts[-1] else ''}"

    def place_in_words(self, slot: int) -> str:
        """Describes the place of a slot: `[start:stop]` in a vector, or the keys of its stack and its row."""
        block, number = self.locations[slot]
        if self.is_bare:
            start, stop = self.blocks[block].starts[number : number + 2]
            return f"[{start}:{stop}]"
        return " ".join([*_texts(self.keys[block]), str(number)])

    # -- What is given for it

    def leaves(self, tree: PyTree, *, may_lack: bool = False) -> list[Any]:
        """Checks a form that a user passed and returns its leaves; `None` for those that it may lack."""
        leaves, treedef = jtu.tree_flatten(tree)
        if not same_treedef(treedef, self.treedef):
            leaves = self._at_blocks(tree) if may_lack or not self.is_bare else [tree]
        elif self._are_right(leaves):
            return leaves
        for i, leaf in enumerate(leaves):
            if not (may_lack and leaf is None):
                self._check_leaf(i, leaf)
        return leaves

    def _in_words(self, i: int) -> str:
        """Returns the beginning of an error: the array that a block should be."""
        expected = f"expected {self.noun} of shape {self.blocks[i].shape} and floating dtype"
        if self.is_bare:  # one of real numbers has two runs for a complex parameter, and no names
            return expected
        where = f" in {_quote(_texts(self.keys[i]))}" if self.blocks[i].has_rows else ""
        return f"{expected} for {quoted([self.paths[slot] for slot in self.members[i]])}{where}"

    def _check_leaf(self, i: int, leaf: Any) -> None:
        block, array = self.blocks[i], "vector" if self.is_bare else "array"
        if leaf is None:
            raise ValueError(f"{self._in_words(i)}, but there is no such array")
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(f"{self._in_words(i)}, got {describe(leaf)}")
        shape, rank = tuple(leaf.shape), len(block.shape)
        if shape != block.shape:
            is_mapped = len(shape) > rank and (self.is_bare or shape[-rank:] == block.shape)
            hint = f"; map over a stack of {array}s with jax.vmap" if is_mapped else ""
            raise ValueError(f"{self._in_words(i)}, got shape {shape}{hint}")
        if not is_inexact(leaf.dtype):
            raise TypeError(f"{self._in_words(i)}, got {leaf.dtype}; convert it with {array}.astype({block.dtype})")
        if is_complex(leaf.dtype) and not any(map(is_complex, block.dtypes)):
            raise TypeError(f"{self._in_words(i)}, got {leaf.dtype}, and no parameter is complex; pass {array}.real")


def _texts(keys: Sequence[Any]) -> tuple[str, ...]:
    return tuple(map(unquote, key_entries(keys)))


def _quote(keys: Sequence[Any]) -> str:
    return " of group ".join(map(repr, reversed(keys)))


# -- Outside of a trace ------------------------------------------------------------------------------------------------
# All blocks are joined, and cut, as one program: a call per leaf would take 20 times as long. But many rows are joined
# and cut some at a time. A program with a thousand operands takes seconds to compile, and is needed once; one for 64
# rows serves all. Not so large rows, which would be held twice meanwhile.

_AT_ONCE = 64
_LARGE = 2**20  # bytes


def _cut_blocks(blocks: Sequence[Block], leaves: Sequence[Any]) -> list[list[Any]]:
    """Cuts each block into its arrays, each in its dtype; a single array that has its dtype already is not copied."""
    is_some_at_a_time = any(_is_some_at_a_time(block, [leaf]) for block, leaf in zip(blocks, leaves, strict=True))
    if is_some_at_a_time or all(block.length is None for block in blocks):
        return list(map(_cut_rows, blocks, leaves))
    return _cut_all(tuple(blocks), leaves)


def _is_some_at_a_time(block: Block, arrays: Sequence[Any]) -> bool:
    return len(block.shapes) > _AT_ONCE and block.has_rows and not any(isinstance(each, Tracer) for each in arrays)


# Inside of a trace, inlining leaves no trace of these.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _join_all(blocks: tuple[Block, ...], arrays: Sequence[Sequence[Any]]) -> list[Any]:
    return list(map(Block.join, blocks, arrays))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _cut_all(blocks: tuple[Block, ...], leaves: Sequence[Any]) -> list[list[jax.Array]]:
    return list(map(Block.cut, blocks, leaves))


def _join_rows(block: Block, rows: Sequence[Any]) -> jax.Array:
    is_large = math.prod(block.shapes[0]) * jnp.dtype(block.dtype).itemsize > _LARGE
    if is_large or not _is_some_at_a_time(block, rows):
        return _join_all((block,), [rows])[0]
    batches = [rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE)]
    stacks = [_join_all((_some_rows(block, len(batch)),), [batch])[0] for batch in batches]
    # The small stacks are then joined in their turn: to a block each is an array of several rows.
    return _join_all((dataclasses.replace(block, shapes=tuple(stack.shape for stack in stacks)),), [stacks])[0]


def _cut_rows(block: Block, leaf: ArrayLike) -> list[Any]:
    if block.length is None:
        is_right = isinstance(leaf, jax.Array) and leaf.dtype == block.dtype
        return [leaf if is_right else cast(jnp.asarray(leaf), block.dtype)]
    leaf, found = block.gathered(leaf), []
    for start in range(0, len(block.shapes), _AT_ONCE) if block.has_rows else ():
        count = min(_AT_ONCE, len(block.shapes) - start)
        # The start is an operand, so that the slices for all starts are one program.
        rows = _slice(leaf, np.uint32(start), count)
        found += _cut_all((_some_rows(block, count),), [rows])[0]
    return found or _cut_all((block,), [leaf])[0]


_slice = jax.jit(jax.lax.dynamic_slice_in_dim, static_argnums=2)


@functools.lru_cache
def _some_rows(block: Block, count: int) -> Block:
    return dataclasses.replace(block, shapes=block.shapes[:count], dtypes=block.dtypes[:count], length=count)


# -- What the makers check, and read -----------------------------------------------------------------------------------


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
        _, children, static = take(node) or ((), (), node)
        opened += children
        if static is not node and hasattr(node, "__dict__"):  # otherwise it is a leaf, or static as a whole
            vars(node).update({name: _shaped(value) for name, value in vars(node).items()})
    return jtu.tree_structure(tree)


def _check_vector(slots: Sequence[Slot], dtype: np.dtype, length: int) -> None:
    if length > _LONGEST:
        what = f"a vector of {length:,} elements is longer than the {_LONGEST:,} that compiled programs can address"
        raise ValueError(f"{what}; use stacks, tp.stack(model), one array for each shape")
    if not is_inexact(dtype):
        raise TypeError(f"the dtype of the vector must be floating or complex, got {dtype}")
    complex_slots = [slot for slot in slots if is_complex(slot.dtype)]
    first = next((slot for slot in complex_slots if slot.size), None)
    if first is not None and not is_complex(dtype):
        raise TypeError(f"{first.path!r} is {first.dtype}, which a vector of {dtype} cannot hold")
    if is_complex(dtype) and not complex_slots:
        raise TypeError(f"no parameter is complex, so the vector cannot be {dtype}")


def _grouped(layout: Layout, groups: object) -> dict[str, list[int]]:
    """Returns the slots of each group, from one `where` per group."""
    if not isinstance(groups, Mapping) or not all(isinstance(name, str) for name in groups):
        raise TypeError(f"groups must be a dictionary {{name: where}}, got {groups!r:.80}")
    index = index_of(layout)
    entries = index.first_entries(list(groups.values()))
    lost = [slot.path for slot, leaf in zip(layout.slots, index.positions, strict=True) if leaf not in entries]
    if lost:
        remedy = "add a group for the rest, groups={..., 'rest': '**'}"
        raise ValueError(f"trained, but in no group: {quoted(lost)}; {remedy}")
    chosen = [entries[leaf] for leaf in index.positions]
    return {name: [i for i, own in enumerate(chosen) if own == number] for number, name in enumerate(groups)}
