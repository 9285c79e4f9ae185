"""Parameters in a vector or in stacks by name, on the host: reads them from the form, and puts them into a new one."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .._files.arrays import Inventory, Kind, bytes_of, inventory_of, kind_of, placed
from .._files.message import Message
from .._files.names import name_of
from .._files.source import aligned
from .._forms.block import Block
from .._forms.form import Form
from .._forms.restructure import Restructure, halves_of
from .._slots.layout import Layout
from .._tree.static_keys import with_object
from .._tree.text import describe
from .._tree.types import is_complex


def layout_and_form(restructure: object) -> tuple[Layout, Form]:
    """Returns the layout of a `Restructure`, and the form that it opens."""
    if not isinstance(restructure, Restructure):
        raise TypeError(
            f"expected the restructure that tp.ravel or tp.stack returns with the vector or the stacks, got "
            f"{describe(restructure)}"
        )
    return restructure.layout, halves_of(restructure)[2]


@with_object
def inventory(form: Form) -> Inventory:
    """Returns how the parameters in a form are stored, by name, each in its own dtype; senders often ask."""
    kinds = dict[str, Kind]()
    for slot, path in enumerate(form.paths):
        block, number = form.locations[slot]
        zero = np.zeros((), form.blocks[block].dtypes[number])
        kinds[name_of(path)] = kind_of(path, np.broadcast_to(zero, form.blocks[block].shapes[number]))
    return inventory_of(kinds)


def parts_of(form: Form, given: Any) -> dict[str, np.ndarray]:
    """Returns the bytes of the parameters in a vector or stacks, each in its own dtype; without a copy if possible."""
    leaves, found = form.leaves(given), dict[str, np.ndarray]()
    for block, names, leaf in zip(form.blocks, _names(form), leaves, strict=True):
        kind_of(form.noun, leaf)  # refuses arrays without values
        array = np.asarray(leaf)
        if _is_as_stored(block, array.dtype):
            found |= zip(names, _cut(block, bytes_of(array)), strict=True)
        else:
            arrays = map(_as_dtype, _views(block, array), block.dtypes)
            found |= zip(names, map(bytes_of, arrays), strict=True)
    return found


def form_from(form: Form, received: Message, like: Any) -> Any:
    """Makes a new vector or new stacks from the parameters in a message, placed like `like`."""
    leaves, wholes, buffers = form.leaves(like), list[np.ndarray](), dict[str, np.ndarray]()
    others = list[tuple[np.ndarray, np.ndarray]]()  # parameters in another dtype than their block has
    for block, names in zip(form.blocks, _names(form), strict=True):
        dtype = np.dtype(block.dtype)
        data = aligned(block.size * dtype.itemsize)
        wholes.append(data.view(dtype).reshape(block.shape))
        if block.length is not None:
            wholes[-1][block.starts[-1] :] = 0  # the padding
        if _is_as_stored(block, dtype):
            buffers |= zip(names, _cut(block, data), strict=True)
        else:
            own = list(map(np.empty, block.shapes, block.dtypes))
            buffers |= zip(names, map(bytes_of, own), strict=True)
            others += zip(_views(block, wholes[-1]), own, strict=True)
    received.fill(buffers)
    for into, array in others:
        into[...] = array
    return jtu.tree_unflatten(form.treedef, list(map(placed, [form.noun] * len(leaves), wholes, leaves)))


@with_object
def _names(form: Form) -> list[list[str]]:
    """Returns the names of the parameters in each block."""
    return [[name_of(form.paths[slot]) for slot in slots] for slots in form.members]


def _is_as_stored(block: Block, dtype: Any) -> bool:
    """Returns whether the bytes of a block in a dtype are those of its arrays, each in its own dtype."""
    return set(block.dtypes) <= {dtype}


def _cut(block: Block, data: np.ndarray) -> list[np.ndarray]:
    """Returns the bytes of each array in a block."""
    if block.length is None:
        return [data]
    row = len(data) // block.length if block.length else 0
    return [data[row * a : row * b] for a, b in itertools.pairwise(block.starts)]


def _views(block: Block, whole: np.ndarray) -> Sequence[np.ndarray]:
    """Returns the arrays in a block as views."""
    if block.length is None:
        return [whole]
    spans = zip(itertools.pairwise(block.starts), block.shapes, strict=True)
    return [whole[start:stop].reshape(shape) for (start, stop), shape in spans]


def _as_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Casts an array as JAX does when it reads a form: a complex array becomes its real part if the dtype is real."""
    if array.dtype == dtype:
        return array
    real = np.real(array) if array.dtype.kind == "c" and not is_complex(dtype) else array
    with np.errstate(over="ignore", under="ignore"):
        return real.astype(dtype)
