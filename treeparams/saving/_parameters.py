"""The parameters in a vector or in stacks, by name, on the host: read from the form, and put into a new one."""

from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .._files.arrays import kind_of, placed
from .._files.message import Message
from .._files.names import name_of
from .._files.source import aligned
from .._forms.block import Block
from .._forms.form import Form
from .._forms.restructure import Restructure, halves_of
from .._tree.dtypes import is_complex
from .._tree.text import describe


def form_of(restructure: object) -> Form:
    """The form that a `Restructure` opens."""
    if not isinstance(restructure, Restructure):
        raise TypeError(
            f"expected the restructure that tp.ravel or tp.stack gives with the vector or the stacks, got "
            f"{describe(restructure)}"
        )
    return halves_of(restructure)[2]


def parameters_in(given: Any, form: Form) -> dict[str, np.ndarray]:
    """The parameters in a vector or in stacks, each in its own shape and dtype; views where they lie so."""
    leaves = form.leaves(given)
    for leaf in leaves:
        kind_of(form.noun, leaf)  # refuses arrays without values
    found: dict[int, np.ndarray] = {}
    for block, slots, leaf in zip(form.blocks, form.members, leaves, strict=True):
        parts = _parts(block, np.asarray(leaf))
        found |= zip(slots, map(_as_dtype, parts, block.dtypes), strict=True)
    return {name_of(path): found[slot] for slot, path in enumerate(form.paths)}


def put_into(form: Form, received: Message, like: Any) -> Any:
    """A new vector, or new stacks, of the parameters in a message. It lies where another one lies."""
    leaves, parts, wholes = form.leaves(like), dict[str, np.ndarray](), list[np.ndarray]()
    for block, slots in zip(form.blocks, form.members, strict=True):
        dtype = np.dtype(block.dtype)
        whole = aligned(block.size * dtype.itemsize).view(dtype).reshape(block.shape)
        if block.length is not None:
            whole[block.starts[-1] :] = 0  # the padding
        parts |= zip([name_of(form.paths[slot]) for slot in slots], _parts(block, whole), strict=True)
        wholes.append(whole)
    if received.specs.keys() != parts.keys():
        raise received.source.wrong("its parameters are not those of its layout")
    for name, array in received.views():
        if array.shape != parts[name].shape:
            raise received.source.wrong(f"{name!r} is {describe(array)}, which is not as in its layout")
        parts[name][...] = array
    return jtu.tree_unflatten(form.treedef, list(map(placed, [form.noun] * len(leaves), wholes, leaves)))


def _parts(block: Block, whole: np.ndarray) -> Sequence[np.ndarray]:
    """The arrays in a block, as views."""
    if block.length is None:
        return [whole]
    starts = block.starts
    return [whole[a:b].reshape(shape) for a, b, shape in zip(starts, starts[1:], block.shapes, strict=False)]


def _as_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """An array in a dtype, as the form is read in JAX: of complex numbers the real part, where it is real."""
    if array.dtype == dtype:
        return array
    real = np.real(array) if array.dtype.kind == "c" and not is_complex(dtype) else array
    with np.errstate(over="ignore", under="ignore"):
        return real.astype(dtype)
