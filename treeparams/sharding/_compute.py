"""The dtypes in which a loss computes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import DTypeLike

from .._forms.block import Block
from .._forms.form import Form
from .._forms.restructure import Restructure, halves_of, with_forms
from .._slots.layout import Layout, index_of
from .._slots.parts import Rest, kept_arrays
from .._slots.rules import first_entries
from .._slots.where import name_of
from .._tree.dtypes import common_dtype, is_complex
from .._tree.text import describe, quoted
from ._frozen import frozen_sources

ComputeDtype = DTypeLike | Mapping[Any, DTypeLike] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Compute:
    """The dtype of each leaf of a model within the loss."""

    form: Form  # of the parameters, as they are within the loss
    of_path: dict[str, Any]  # of arrays of the model; others keep their own

    @classmethod
    def of(cls, layout: Layout, form: Form, compute_dtype: ComputeDtype) -> "Compute":
        """Makes the dtypes from the option of `make_step`."""
        of_path = _of_paths(layout, compute_dtype)
        found = _form_in(form, [of_path.get(slot.path) for slot in layout.slots])
        for block, members in zip(found.blocks, found.members, strict=True):
            own = {of_path.get(layout.slots[slot].path) for slot in members}
            if block.length is not None and not block.rank and len(own) > 1:
                words = quoted([str(each or "its own") for each in sorted(own, key=str)])
                raise ValueError(
                    f"a vector is moved in one dtype, but compute_dtype gives its parameters {words}; use "
                    'form="stacks" or form="tree", or one dtype for all'
                )
        return cls(found, of_path)

    @property
    def in_words(self) -> str:
        """The dtypes in one line."""
        return f"computed in {', '.join(sorted({str(each) for each in self.of_path.values()})) or 'their dtypes'}"

    def params(self, leaves: Sequence[Any]) -> list[Any]:
        """Casts arrays of parameters."""
        return [leaf.astype(block.dtype) for leaf, block in zip(leaves, self.form.blocks, strict=True)]

    def rest(self, rest: Rest[Any] | Restructure[Any]) -> Any:
        """Casts the arrays of the rest of a model."""
        if isinstance(rest, Restructure):
            single, _, _, held = halves_of(rest)
            dtypes = [self.of_path.get(path) for path in kept_arrays(single)]
            held = _form_in(held, dtypes)
            alone = [dtype for i, dtype in enumerate(dtypes) if i not in held.locations]
            rest, dtypes = with_forms(rest, self.form, held), [*alone, *(block.dtype for block in held.blocks)]
        else:
            dtypes = [self.of_path.get(path) for path in kept_arrays(rest)]
        leaves, treedef = jtu.tree_flatten(rest)
        pairs = zip(leaves, dtypes, strict=True)
        return treedef.unflatten([leaf if dtype is None else leaf.astype(dtype) for leaf, dtype in pairs])


def _of_paths(layout: Layout, compute_dtype: ComputeDtype) -> dict[str, Any]:
    """Returns the dtype of each real parameter of a model that gets one, trained or frozen, by path."""
    if compute_dtype is None:
        return {}
    rules = compute_dtype if isinstance(compute_dtype, Mapping) else {"**": compute_dtype}
    dtypes = [_floating(f"compute_dtype of {name_of(where)}", dtype) for where, dtype in rules.items()]
    index = index_of(layout)
    paths, specs = index.structure.paths, index.structure.specs
    found = first_entries(index, list(rules), asked=index.distinct)
    kept = frozen_sources(index).union(index.positions)  # buffers are as they are
    return {
        paths[i]: dtypes[n] for i, n in found.items() if i in kept and (spec := specs[i]) and not is_complex(spec.dtype)
    }


def _floating(name: str, dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{name}: expected a floating dtype, such as jnp.bfloat16, got {describe(dtype)}") from error
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{name}: expected a floating dtype, such as jnp.bfloat16, got {found}")
    return found


def _form_in(form: Form, dtypes: Sequence[Any]) -> Form:
    """Returns a form with a new dtype for each slot; `None` keeps the dtype."""
    pairs = zip(form.blocks, form.members, strict=True)
    blocks = tuple([_in_dtypes(block, [dtypes[slot] for slot in members]) for block, members in pairs])
    return dataclasses.replace(form, blocks=blocks)


def _in_dtypes(block: Block, dtypes: Sequence[Any]) -> Block:
    """Returns a block with a new dtype for each array (`None` keeps it). The block gets the widest of them."""
    own = block.dtypes or (block.dtype,) * len(dtypes)
    chosen = tuple([each if dtype is None else dtype for dtype, each in zip(dtypes, own, strict=True)])
    if chosen == own:
        return block
    return dataclasses.replace(block, dtypes=chosen, dtype=common_dtype(chosen))
