"""Where the parameters of a layout lie on a mesh, in the form of a plan; shared by plans and steps."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._forms.block import Block
from .._forms.form import Form, stacked_leaves
from .._forms.makers import stacks_in_groups, tree_of, vector_of
from .._forms.restructure import Restructure, restructure_over
from .._slots.index import Slot
from .._slots.layout import Layout, index_of
from .._slots.parts import Rest, kept_arrays, with_kept_arrays
from .._tree.tables import Table
from .._tree.types import PyTree
from ._frozen import Frozen, frozen_sources
from ._joined import join_over
from ._owners import entries_of
from ._put import put_leaf
from ._specs import (
    Axes,
    FormName,
    Lying,
    Rules,
    as_text,
    check_rules,
    devices_by,
    group_of,
    is_spec,
    matches,
    names_of,
    spec_of,
    specs_of,
)

T = TypeVar("T")
Maker = Callable[[Layout, Mapping[str, Sequence[int]], int], Form]
"""Makes the form of a layout, from groups of slots that lie alike.

The length of joined arrays is a multiple of the last argument.
"""


def _stacks(layout: Layout, groups: Mapping[str, Sequence[int]], multiple: int) -> Form:
    return stacks_in_groups(layout, groups if len(groups) > 1 else {None: range(len(layout.slots))})


MAKERS: dict[str, Maker] = {
    "tree": lambda layout, groups, multiple: tree_of(layout),
    "vector": lambda layout, groups, multiple: vector_of(layout, pad_to=multiple),
    "stacks": _stacks,
}
"""The makers by the names that users write. No other code depends on which form it is."""

_ALIGNED = 128  # the same length over 1, 2, ..., 128 devices, so that others can read a file that some saved


class Placement:
    """Where each parameter lies: a form, and a spec for each of its blocks. Static."""

    def __init__(self, layout: Layout, axes: Axes, rules: Rules, name: FormName) -> None:
        if name not in MAKERS:
            *others, last = map('"{}"'.format, MAKERS)
            raise ValueError(f"form must be {', '.join(others)} or {last}, got {name!r}")
        check_rules(rules, axes)
        index = index_of(layout)
        by_leaf = matches(index, rules, frozen_sources(index))
        matched = [by_leaf[leaf] for leaf in index.positions]
        groups: dict[str, list[int]] = {group_of(rule): [] for rule in rules.values()}
        for slot, (_, rule) in enumerate(matched):
            groups[group_of(rule)].append(slot)
        # A vector is padded so that all of its devices have equal shares of it; more than that, to the same length for
        # any usual number of devices, or a file of 8 devices would not fit 16.
        multiple = math.lcm(_ALIGNED, devices_by([rule for _, rule in matched], axes))
        self.layout = layout
        self.axes = axes
        self.name: FormName = name  # of the form, as users call it
        self.form = MAKERS[name](layout, groups, multiple)
        self.specs = specs_of(self.form, layout.slots, matched, axes, name)  # of each block
        self.frozen = Frozen(index, by_leaf, axes, name)

    def over(self, mesh: Mesh | AbstractMesh) -> "Placement":
        """Returns the same placement over a mesh of other devices with the same axes."""
        other = copy.copy(self)
        other.axes = self.axes._replace(mesh=mesh)
        return other

    # -- Shardings

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.axes.mesh, spec)

    @property
    def params(self) -> PyTree:
        """The sharding of each array of the parameters, as a tree of the same structure."""
        return self.tree(list(map(self.sharding, self.specs)))

    @property
    def batch(self) -> NamedSharding:
        """The sharding of arrays whose leading axis runs over the examples."""
        return self.sharding(PartitionSpec(self.axes.batch))

    @property
    def whole(self) -> NamedSharding:
        """The sharding of arrays that are whole on each device."""
        return self.sharding(PartitionSpec())

    @property
    def of_slots(self) -> list[NamedSharding]:
        """The sharding of each slot as a separate array."""
        return [self.sharding(each.spec) for _, each in self.rows]

    # -- Trees

    @functools.cached_property
    def stacked(self) -> list[bool]:
        """Whether each block is a stack."""
        return stacked_leaves(self.form.shapes())

    def tree(self, leaves: Sequence[Any]) -> PyTree:
        """Returns the tree of the parameters with these leaves."""
        return jtu.tree_unflatten(self.form.treedef, leaves)

    def shapes(self) -> PyTree:
        """Returns the parameters as `jax.ShapeDtypeStruct`s with their shardings."""
        return jax.tree.map(put_leaf, self.form.shapes(), self.params)

    def made(self, make: Callable[[PyTree], PyTree]) -> PyTree:
        """Returns the tree that `make` makes of the parameters, as `jax.ShapeDtypeStruct`s with shardings."""
        start, treedef = jtu.tree_flatten(jax.eval_shape(make, self.form.shapes()))
        entries = entries_of(make, self.form, self.specs, treedef.unflatten(start))
        shardings = [self.sharding(spec_of(each)) for each in entries]
        return treedef.unflatten(list(map(put_leaf, start, shardings)))

    def laid(self, slots: Sequence[Any]) -> PyTree:
        """Returns the parameters from one array for each slot, in new buffers; from shapes, as shapes."""
        if any(isinstance(slot, jax.ShapeDtypeStruct) for slot in slots):
            return self.shapes()
        shardings = list(map(self.sharding, self.specs))
        if any(isinstance(slot, Tracer) for slot in slots) and isinstance(self.axes.mesh, Mesh):
            of_each = [[slots[slot] for slot in members] for members in self.form.members]
            return self.tree(list(map(join_over, self.form.blocks, of_each, shardings)))
        leaves = jtu.tree_leaves(self.form.join(slots))
        is_own = [block.length is not None for block in self.form.blocks]
        return self.tree(list(map(put_leaf, leaves, shardings, is_own)))

    def slots_of(self, params: PyTree) -> list[Any]:
        """Returns one array for each slot."""
        return self.form.read(params)

    def check(self, params: PyTree) -> None:
        """Checks that parameters have the form of this plan."""
        expected, got = (described(tree, _shape_of) for tree in (self.form.shapes(), params))
        if expected != got:
            wrong = next((pair for pair in got if pair not in expected), None) or "nothing more"
            raise ValueError(
                f"expected parameters that init or plan.ravel returned, a {self.name} of {len(expected)} arrays, the "
                f"first {expected[0] if expected else None}; got {len(got)} arrays, including {wrong}"
            )

    # -- The rest of a model

    def put_rest(self, rest: Rest[Any], specs: Sequence[PartitionSpec] | None = None) -> Rest[Any]:
        """Places the rest of a model on the mesh: frozen parameters by their rules or `specs`, other arrays whole."""
        specs = self.frozen.specs_of(rest) if specs is None else specs
        shardings = map(self.sharding, specs)
        return with_kept_arrays(rest, list(map(put_leaf, kept_arrays(rest).values(), shardings)))

    def rest_specs(self, rest: Rest[Any] | Restructure[Any]) -> Any:
        """Returns the specs of the arrays that the state of a step holds, as a tree like it."""
        return self.frozen.specs(rest)

    @functools.cached_property
    def has_restructure(self) -> bool:
        """Whether a `Restructure` leads back to the model; from a canonical tree, `tp.combine` does."""
        return self.form != tree_of(self.layout)

    def restructure(self, rest: Rest[Any]) -> Restructure[Any]:
        """Returns the `Restructure` over the mesh, from a `Rest` that lies anywhere or from its shapes."""
        make = functools.partial(restructure_over, form=self.form, groups=self.frozen.groups_of(rest))
        is_of_shapes = any(isinstance(array, jax.ShapeDtypeStruct) for array in kept_arrays(rest).values())
        # Arrays are laid over the devices one by one, and are stacked there: so none ever has all of them.
        rest, specs = self.frozen.on_the_way(rest)
        made = jax.eval_shape(make, rest) if is_of_shapes else make(self.put_rest(rest, specs))
        leaves, treedef = jtu.tree_flatten(made)
        shardings = map(self.sharding, jtu.tree_leaves(self.rest_specs(made), is_leaf=is_spec))
        # In buffers of their own already.
        return treedef.unflatten([put_leaf(leaf, to, is_own=True) for leaf, to in zip(leaves, shardings, strict=True)])

    # -- In words

    @functools.cached_property
    def rows(self) -> list[tuple[Slot, Lying]]:
        """Each slot, and how it lies."""
        of_blocks = list(map(self._lying, self.form.blocks, self.specs, self.stacked))
        return [(slot, of_blocks[self.form.locations[n][0]]) for n, slot in enumerate(self.layout.slots)]

    def _lying(self, block: Block, spec: PartitionSpec, is_stack: bool) -> Lying:
        """Describes how each slot in a block lies."""
        first, *of_row = [*spec, None]
        is_owned = is_stack and first is not None
        own = spec_of(of_row) if is_stack else spec
        words = f"whole rows over {first!r}" if is_owned else as_text(own) if names_of(spec) else "whole"
        # In a vector it has none of its axes.
        is_vector = block.length is not None and not is_stack
        return Lying(PartitionSpec() if is_vector else own, words, self.axes.devices_along(names_of(spec)), is_owned)

    @property
    def replicated(self) -> dict[str, int]:
        """The bytes of each parameter, trained or frozen, that is whole on each device, by path; the largest first."""
        found = {slot.path: _bytes(slot) for slot, each in (*self.rows, *self.frozen.rows) if each.devices == 1}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def in_words(self) -> str:
        """Returns the plan as text, with a line for every parameter."""
        table, *lines = self.blocks()
        return "\n".join([*map("  ".join, table.rows), *lines])

    def blocks(self) -> tuple[Table, *tuple[str, ...]]:
        """Returns the plan as a table and the lines below it."""
        cells = [
            [slot.path, slot.key, each.words + mark, f"{_bytes_of_one(slot, each):,}"]
            for rows, mark in ((self.rows, ""), (self.frozen.rows, ", frozen"))
            for slot, each in rows
        ]
        table = Table(["path", "key", "lies", "bytes per device"], cells, right=[3])
        shapes = jtu.tree_leaves(self.form.shapes())
        total = sum(map(_bytes, shapes))
        counts = map(self.axes.devices_along, map(names_of, self.specs))
        local = sum(_bytes(each) // count for each, count in zip(shapes, counts, strict=True))
        frozen = sum(_bytes(slot) for slot, _ in self.frozen.rows)
        local += sum(_bytes_of_one(slot, each) for slot, each in self.frozen.rows)
        pairs = zip(self.form.blocks, self.stacked, strict=True)
        lengths = [block.length for block, is_stack in pairs if block.length is not None and not is_stack]
        padding = f", padded to {sum(lengths):,} elements" if lengths else ""
        mesh = ", ".join(f"{name!r}: {size}" for name, size in self.axes.mesh.shape.items())
        of_these = f" ({frozen:,} frozen)" if frozen else ""
        lines = [f"{self.name}{padding} over ({mesh}): {total + frozen:,} bytes{of_these}, {local:,} on each device"]
        if self.replicated:
            path, size = next(iter(self.replicated.items()))
            lines.append(f"whole on each device: {len(self.replicated)}, the largest {path!r} of {size:,} bytes")
        return (table, *lines)


def described(tree: PyTree, of: Callable[[Any], T]) -> list[tuple[str, T]]:
    """Applies a function to each array, and returns the results after the arrays' paths."""
    return [(jtu.keystr(path), of(leaf)) for path, leaf in jtu.tree_flatten_with_path(tree)[0]]


def _shape_of(leaf: object) -> tuple[int, ...] | str:
    shape = getattr(leaf, "shape", None)
    return type(leaf).__name__ if shape is None else tuple(shape)


def _bytes_of_one(slot: Slot, lying: Lying) -> int:
    """Returns the bytes of a parameter on a device that has a part of it."""
    return -(-_bytes(slot) // lying.devices)


def _bytes(array: Slot | jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
