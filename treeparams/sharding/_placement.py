"""Where the parameters of a layout lie, in the form in which they rest: what a plan says, and a step asks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._index import Slot
from .._joined import Form, vector_of
from .._layout import Layout, index_of
from .._parts import Rest, kept_arrays, with_kept_arrays
from .._stacks import in_groups
from .._text import in_columns
from .._types import PyTree
from ._like import entries_of
from ._put import put_leaf
from ._specs import Axes, FormName, Rules, as_text, group_of, names_of, place, spec_of


class Placement:
    """Where each parameter lies. Static."""

    def __init__(self, layout: Layout, axes: Axes, rules: Rules, form: FormName) -> None:
        self.layout, self.axes, self.form = layout, axes, form
        self.mesh = axes.mesh
        self.placed = place(index_of(layout), rules, axes, form)  # of each slot
        self.specs: list[PartitionSpec] = []  # of each array of the parameters
        self.joined: Form | None = None  # of a vector or stacks
        if form == "vector":
            # The same length over 1, 2, ..., 128 devices, so that what was saved by some is read by others.
            self.specs = [self.placed[0].spec if self.placed else PartitionSpec()]
            parts = axes.parts_along(names_of(self.specs[0]))
            self.joined = vector_of(layout, pad_to=math.lcm(parts, 128))
        elif form == "stacks":
            groups: dict[Any, list[int]] = {group_of(rule): [] for rule in rules.values()}
            for slot, each in enumerate(self.placed):
                groups[each.group].append(slot)
            self.joined = in_groups(layout, groups if len(groups) > 1 else {None: range(len(self.placed))})
            for slots in self.joined.members:
                group, spec = self.placed[slots[0]]
                self.specs.append(spec_of([axes.split_entry if group == "owned" else None, *spec]))
        else:
            self.specs = [each.spec for each in self.placed]

    # -- Shardings

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @property
    def params(self) -> PyTree:
        """That of each array of the parameters, a tree like these."""
        return self.tree(list(map(self.sharding, self.specs)))

    @property
    def batch(self) -> NamedSharding:
        """That of arrays with the examples as their leading axis."""
        return self.sharding(PartitionSpec(self.axes.batch))

    @property
    def whole(self) -> NamedSharding:
        """That of arrays that are whole on each device."""
        return self.sharding(PartitionSpec())

    @property
    def of_slots(self) -> list[NamedSharding]:
        """That of each slot by itself."""
        whole = [self.whole] * len(self.placed)
        return whole if self.form == "vector" else [self.sharding(each.spec) for each in self.placed]

    # -- Trees

    def tree(self, leaves: Sequence[Any]) -> PyTree:
        """The tree of the parameters with these leaves."""
        if self.joined is not None:
            return jtu.tree_unflatten(self.joined.treedef, leaves)
        return index_of(self.layout).canonical(leaves, index_of(self.layout).structure.treedef)

    def shapes(self) -> PyTree:
        """The parameters as `jax.ShapeDtypeStruct`s, with their shardings."""
        if self.joined is None:
            blocks: Sequence[Any] = self.layout.slots
        else:
            blocks = self.joined.blocks
        dtype = jax.dtypes.canonicalize_dtype
        shapes = [jax.ShapeDtypeStruct(block.shape, dtype(block.dtype)) for block in blocks]
        return self.tree(list(map(put_leaf, shapes, map(self.sharding, self.specs))))

    def made(self, make: Callable[[PyTree], PyTree]) -> PyTree:
        """What is made of the parameters, as `jax.ShapeDtypeStruct`s with shardings."""
        leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jtu.tree_leaves(self.shapes())]
        start = jax.eval_shape(make, self.tree(leaves))
        found = entries_of(make, start, self.tree, leaves, self.specs, self.joined)
        lay_one = lambda leaf, entries: put_leaf(leaf, self.sharding(spec_of(entries)))
        return jax.tree.map(lay_one, start, found)

    def slots_of(self, params: PyTree) -> list[Any]:
        """One array per slot."""
        if self.joined is not None:
            return self.joined.cut(params)
        return jtu.tree_leaves(params)

    def check(self, params: PyTree) -> None:
        """Checks that parameters have the form of this plan."""
        shape = lambda leaf: tuple(leaf.shape) if hasattr(leaf, "shape") else type(leaf).__name__
        described = lambda tree: [(jtu.keystr(path), shape(leaf)) for path, leaf in jtu.tree_flatten_with_path(tree)[0]]
        expected, got = described(self.shapes()), described(params)
        if expected != got:
            wrong = next((pair for pair in got if pair not in expected), None) or "nothing more"
            raise ValueError(
                f"expected parameters as of init or plan.ravel, a {self.form} with {len(expected)} arrays, the first "
                f"{expected[0] if expected else None}; got {len(got)}, and among them {wrong}"
            )

    def put_rest(self, rest: Rest[Any]) -> Rest[Any]:
        """All else of a model over the mesh, its arrays whole on each device."""
        return with_kept_arrays(rest, [put_leaf(array, self.whole) for array in kept_arrays(rest).values()])

    # -- In words

    def rows(self) -> list[tuple[Slot, str, int]]:
        """Each slot, how it lies in words, and in how many parts."""
        parts = self.axes.parts_along
        rows = []
        for slot, (group, spec) in zip(self.layout.slots, self.placed, strict=True):
            names, words = names_of(spec), as_text(spec)
            if group == "owned":
                names, words = self.axes.split, f"whole rows over {self.axes.split_entry!r}"
            rows.append((slot, words if names else "whole", parts(names)))
        return rows

    @property
    def replicated(self) -> dict[str, int]:
        """What is not split, with its bytes on each device; the largest first."""
        found = {slot.path: _bytes(slot) for slot, _, parts in self.rows() if parts == 1}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def in_words(self, *, all_rows: bool = False) -> str:
        """The plan as a table, of many rows without those in the middle."""
        cells = [[s.path, s.key, lies, f"{-(-_bytes(s) // parts):,}"] for s, lies, parts in self.rows()]
        header = ["path", "key", "lies", "bytes per device"]
        lines = ["  ".join(row) for row in cells] if all_rows else in_columns(header, cells, right=[3])
        shapes = jtu.tree_leaves(self.shapes())
        total = sum(_bytes(each) for each in shapes)
        parts_of = map(self.axes.parts_along, map(names_of, self.specs))
        local = sum(_bytes(each) // parts for each, parts in zip(shapes, parts_of, strict=True))
        padding = f", padded to {shapes[0].shape[0]:,} elements" if self.form == "vector" and shapes else ""
        mesh = ", ".join(f"{name!r}: {size}" for name, size in self.mesh.shape.items())
        lines.append(f"{self.form}{padding} over ({mesh}): {total:,} bytes, {local:,} on each device")
        if self.replicated:
            path, size = next(iter(self.replicated.items()))
            lines.append(f"whole on each device: {len(self.replicated)}, the largest {path!r} of {size:,} bytes")
        return "\n".join(lines)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
