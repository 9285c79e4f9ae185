"""Where the arrays of an optimiser's state or of an average lie: where their parameters lie."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._forms.block import Block
from .._forms.form import Form
from .._forms.mesh import MeshAxes
from .._forms.owners import divide
from .._tree.types import PyTree

Make = Callable[[PyTree], PyTree]
Entries = list[Any]
"""The entries of the `PartitionSpec` of an array, one for each axis."""


def entries_of(make: Make, form: Form, specs: Sequence[PartitionSpec], start: PyTree) -> list[Entries]:
    """Finds how each array of `start` lies, which `make` makes from parameters in a form that lies by `specs`.

    Most arrays have the shape of the block that they belong to, and lie as it does. For arrays of another shape (SM3's
    vectors for each axis, Adafactor's factors), `_ask` finds it out. An array that all parameters share is whole.
    """
    arrays = jtu.tree_leaves(start)
    found: list[Entries] = [[None] * array.ndim for array in arrays]
    if not any(map(any, specs)):
        return found
    division = divide(make, form, start)
    if division.problem:
        raise ValueError(division.problem)
    block_of = {tuple([form.paths[slot] for slot in slots]): i for i, slots in enumerate(form.members)}
    unknown: dict[int, int] = {}  # the block of each array that is to be asked for
    for n, (array, owners) in enumerate(zip(arrays, division.owners, strict=True)):
        if owners is not None:
            block = block_of[owners.paths]
            found[n], is_known = _as_block(array.shape, owners.axis, form.blocks[block], specs[block])
            unknown |= {} if is_known else {n: block}
    if unknown:
        _ask(make, form, specs, start, unknown, found)
    return found


def _as_block(shape: tuple[int, ...], axis: int | None, block: Block, spec: PartitionSpec) -> tuple[Entries, bool]:
    """Returns the entries of an array of a block that follow from the block's, and whether they are complete.

    The block's pieces follow one another along `axis`; with `None`, the array belongs to a single parameter.
    """
    own = [*spec, *[None] * (len(block.shape) - len(spec))]
    if axis is None:
        return (own, True) if shape == block.shape else ([None] * len(shape), not any(own))
    first, *of_row = own
    before = [*[None] * axis, first]
    if shape[axis + 1 :] == block.shape[1:]:
        return [*before, *of_row], True
    return [*before, *[None] * (len(shape) - len(before))], not any(of_row)


def _ask(
    make: Make,
    form: Form,
    specs: Sequence[PartitionSpec],
    start: PyTree,
    unknown: Mapping[int, int],
    found: list[Entries],
) -> None:
    """Completes the entries of arrays whose axes are not those of their blocks.

    It doubles the parameters along the axes that are split over given axes of the mesh. Then `make` returns arrays that
    are doubled along their own such axes. The entry of the axis that joins parameters is known without asking.
    """
    # One question for each entry, that is for each set of axes of the mesh, of all blocks at once. A weight of shape
    # (8, 3) that lies by `P("data")` becomes (16, 3): Adafactor's factor over rows grows from 8 to 16, and the one over
    # columns stays. Doubled, and not longer by one, since a rule may look at sizes: whether an axis can be divided.
    pairs, asked = list(zip(form.blocks, specs, strict=True)), set(unknown.values())
    arrays = jtu.tree_flatten_with_path(start)[0]
    for entry in dict.fromkeys(entry for i in asked for entry in _within(*pairs[i]) if entry is not None):
        leaves = [_longer(*pair, entry if i in asked else None) for i, pair in enumerate(pairs)]
        grown = dict(jtu.tree_flatten_with_path(jax.eval_shape(make, jtu.tree_unflatten(form.treedef, leaves)))[0])
        for n, (path, array) in enumerate(arrays):
            if path not in grown or grown[path].ndim != array.ndim:
                raise ValueError(
                    f"the state of the rule has another structure for longer parameters, at {jtu.keystr(path)}: the "
                    "rule looks at the shapes of leaves, but would get parts of them. Let devices own whole rows, "
                    '"owned" with form="stacks" and optim.per_leaf(tx), or write "whole"'
                )
            sizes = zip(array.shape, grown[path].shape, strict=True)
            # An axis that grows but does not double is one along which parameters are joined, and is not split. If
            # several axes double because they belong to the same axis, as in a matrix over pairs, one is split.
            axes = [axis for axis, (size, larger) in enumerate(sizes) if size and larger == 2 * size]
            if n in unknown and axes:
                found[n][axes[0]] = entry


def _within(block: Block, spec: PartitionSpec) -> Entries:
    """Returns the entries of a block, with `None` for the axis along which parameters are joined."""
    return [*spec] if block.length is None else [None, *spec[1:]]


def _longer(block: Block, spec: PartitionSpec, entry: MeshAxes) -> jax.ShapeDtypeStruct:
    """Returns a block that is twice as long along the axis that is split over the given axes of the mesh."""
    pairs = itertools.zip_longest(block.shape, _within(block, spec))
    shape = [2 * size if entry is not None and each == entry else size for size, each in pairs]
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(block.dtype))
