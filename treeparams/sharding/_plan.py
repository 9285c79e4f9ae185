"""plan: where each parameter of a model lies on a mesh, in the form in which it rests, and the optimiser's state."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._index import Slot
from .._joined import Form, vector_of
from .._layout import Layout, index_of
from .._mesh import automatic
from .._parts import Rest, kept_arrays, put_together, take_apart, with_kept_arrays
from .._recognise import keep_apart
from .._restructure import Restructure, released
from .._stacks import in_groups
from .._text import in_columns
from ..optim._shown import settled
from ._like import Average, ema_maker, entries_of, plain, sharding_of, spec_of
from ._put import put_leaf
from ._specs import Axes, FormName, Placed, Rules, as_text, axes_of, group_of, names_in, place


class Plan:
    """Where the parameters of a model lie on a mesh, and in which form. Made by `sharding.plan`.

    It is static: it holds shapes, and the frozen arrays of the model that it was made of.

    Attributes:
        layout: what trains.
        mesh: the mesh.
        form: `"tree"`, `"vector"` or `"stacks"`.
    """

    layout: Layout
    mesh: Any
    form: FormName

    def __init__(
        self, layout: Layout, rest: Rest[Any] | None, axes: Axes, rules: Rules, placed: Sequence[Placed], form: FormName
    ) -> None:
        """For this library's own use; users write `sharding.plan(model, mesh, rules)`."""
        self.layout = layout
        self.mesh = axes.mesh
        self.form = form
        self._index, self._rest, self._placed = index_of(layout), rest, placed
        self.axes = axes
        self.joined: Form | None = None  # of a vector or stacks
        if form == "vector":
            # The same length over 1, 2, ..., 128 devices, so that what was saved by some is read by others.
            self.specs = [placed[0].spec if placed else PartitionSpec()]
            parts = axes.parts_along([name for entry in self.specs[0] for name in names_in(entry)])
            self.joined = vector_of(self.layout, pad_to=math.lcm(parts, 128))
        elif form == "stacks":
            groups: dict[Any, list[int]] = {group_of(rule): [] for rule in rules.values()}
            for slot, each in enumerate(placed):
                groups[each.group].append(slot)
            self.joined = in_groups(layout, groups if len(groups) > 1 else {None: range(len(placed))})
            self.specs = []
            for slots in self.joined.members:
                group, spec = placed[slots[0]]
                self.specs.append(spec_of([axes.split_entry if group == "owned" else None, *spec]))
        else:
            self.specs = [each.spec for each in placed]

    # -- Shardings

    @property
    def params(self) -> PyTree:
        """The `NamedSharding` of each array of the parameters, a tree like these."""
        return self.tree(list(map(self._sharding, self.specs)))

    @property
    def batch(self) -> NamedSharding:
        """That of arrays with the examples as their leading axis."""
        return self._sharding(PartitionSpec(self.axes.batch))

    @property
    def whole(self) -> NamedSharding:
        """That of arrays that are whole on each device."""
        return self._sharding(PartitionSpec())

    def state(self, tx: Any) -> PyTree:
        """The `NamedSharding` of each array in the state of a rule of Optax, a tree like `tx.init(params)`.

        >>> import jax, jax.numpy as jnp, optax
        >>> from treeparams import sharding
        >>> plan = sharding.plan({"w": jnp.ones((8, 3))}, jax.make_mesh((1,), ("data",)), {"**": "split"})
        >>> state = plan.state(optax.adam(1e-3))
        >>> state[0].mu["w"].spec, state[0].count.spec
        (PartitionSpec('data',), PartitionSpec())

        What belongs to a parameter lies as it does. It is found by asking: `init` of parameters of which the axes that
        are split are twice as long has a state in which some axes are longer, too.

        Args:
            tx: a rule of Optax over parameters in the form of this plan.

        Returns:
            The shardings. Of what has no axis in common with what is split: whole on each device.

        Raises:
            ValueError: `tx` is `optim.trainable` or the like, which takes models.
        """
        rule = plain(tx)
        return sharding_of(self.like(lambda params: settled(rule.init(params))))

    def average(self, average: Average) -> PyTree:
        """The `NamedSharding` of each array in an average of the parameters, a tree like that `tp.Ema`.

        Args:
            average: as for `sharding.step`: an `Ema` has static fields, which the tree of its shardings has too.
        """
        return sharding_of(self.like(ema_maker(average)))

    def like(self, make: Callable[[PyTree], PyTree]) -> PyTree:
        """What is made of the parameters, as `jax.ShapeDtypeStruct`s with shardings."""
        leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jtu.tree_leaves(self.shapes())]
        start = jax.eval_shape(make, self.tree(leaves))
        found = entries_of(make, start, self.tree, leaves, self.specs, self.joined)
        lay_one = lambda leaf, entries: put_leaf(leaf, self._sharding(spec_of(entries)))
        return jax.tree.map(lay_one, start, found)

    def shapes(self) -> PyTree:
        """The parameters as `jax.ShapeDtypeStruct`s, with their shardings."""
        if self.joined is None:
            blocks: Sequence[Any] = self.layout.slots
        else:
            blocks = self.joined.blocks
        dtype = jax.dtypes.canonicalize_dtype
        shapes = [jax.ShapeDtypeStruct(block.shape, dtype(block.dtype)) for block in blocks]
        return self.tree(list(map(put_leaf, shapes, map(self._sharding, self.specs))))

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def tree(self, leaves: Sequence[Any]) -> PyTree:
        """The tree of the parameters with these leaves."""
        if self.joined is not None:
            return jtu.tree_unflatten(self.joined.treedef, leaves)
        return self._index.canonical(leaves, self._index.structure.treedef)

    # -- Values

    def ravel(self, model: PyTree) -> PyTree:
        """The parameters of a model, in the form of this plan and laid over the mesh.

        Args:
            model: a model of this layout; a traced one, or one of `jax.ShapeDtypeStruct`s, too.

        Returns:
            The canonical tree, the vector or the stacks, in buffers of their own.

        Raises:
            ValueError: the model does not fit the layout.
        """
        slots = take_apart(model, self.layout).slots
        if any(isinstance(slot, jax.ShapeDtypeStruct) for slot in slots):
            return self.shapes()
        leaves = list(slots) if self.joined is None else jtu.tree_leaves(self.joined.join(slots))
        return self.tree([put_leaf(leaf, self._sharding(spec)) for leaf, spec in zip(leaves, self.specs, strict=True)])

    def model(self, params: PyTree, state: Any = None) -> Any:
        """The model of parameters in the form of this plan.

        Args:
            params: the parameters, or what else has their form: gradients, an average.
            state: the state of the step, which has the frozen arrays of the model. Without it they are those of the
                model that the plan was made of.

        Returns:
            The model, each array where `plan.put` has it, in a buffer of its own.

        Raises:
            ValueError: the parameters have another form; the plan was made of shapes, and there is no state.
        """
        rest = self._rest if state is None else state.rest
        if isinstance(rest, Restructure):
            rest = released(rest)
        if rest is None or any(isinstance(array, jax.ShapeDtypeStruct) for array in kept_arrays(rest).values()):
            raise ValueError(
                "the plan was made of shapes, so it has no frozen arrays and no functions; give the state of the step, "
                "which has them: plan.model(params, state)"
            )
        self.check(params)
        slots = self._laid_slots(params)
        keep_apart(slots)
        # In buffers of its own: a step donates its state.
        return put_together(self.put_rest(rest), slots)

    @functools.cached_property
    def _laid_slots(self) -> Callable[[PyTree], list[Any]]:
        return jax.jit(automatic(self.slots_of, self._slot_shardings(), self.mesh))

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

    def put(self, model: Any) -> Any:
        """The model over the mesh.

        Args:
            model: a model of this layout.

        Returns:
            The model, in buffers of its own, ties kept: each parameter as its own rule lays it, as far as that is
            about its own axes; what lies in a vector, rows that are owned, and all frozen arrays whole on each device.
            What is no array is as it is.

        Raises:
            ValueError: the model does not fit the layout.
        """
        parts = take_apart(model, self.layout)
        slots = list(map(put_leaf, parts.slots, self._slot_shardings()))
        keep_apart(slots)
        return put_together(self.put_rest(parts.rest), slots)

    def put_rest(self, rest: Rest[Any]) -> Rest[Any]:
        """All else of a model over the mesh, its arrays whole on each device."""
        return with_kept_arrays(rest, [put_leaf(array, self.whole) for array in kept_arrays(rest).values()])

    def _slot_shardings(self) -> list[NamedSharding]:
        whole = [self.whole] * len(self._placed)
        return whole if self.form == "vector" else [self._sharding(each.spec) for each in self._placed]

    # -- In words

    @property
    def replicated(self) -> dict[str, int]:
        """The parameters that are not split, with their bytes on each device; the largest first."""
        found = {slot.path: _bytes(slot) for slot, lies, parts in self.rows() if parts == 1}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def rows(self) -> list[tuple[Slot, str, int]]:
        """Each slot, how it lies in words, and in how many parts."""
        parts = self.axes.parts_along
        rows = []
        for slot, (group, spec) in zip(self.layout.slots, self._placed, strict=True):
            names = [name for entry in spec for name in names_in(entry)]
            words = as_text(spec)
            if group == "owned":
                names, words = list(self.axes.split), f"whole rows over {self.axes.split_entry!r}"
            rows.append((slot, words if names else "whole", parts(names)))
        return rows

    def in_words(self, *, all_rows: bool = False) -> str:
        """The plan as a table, of many rows without those in the middle."""
        cells = [[s.path, s.key, lies, f"{-(-_bytes(s) // parts):,}"] for s, lies, parts in self.rows()]
        header = ["path", "key", "lies", "bytes per device"]
        lines = ["  ".join(row) for row in cells] if all_rows else in_columns(header, cells, right=[3])
        shapes = jtu.tree_leaves(self.shapes())
        total = sum(_bytes(each) for each in shapes)
        local = sum(
            _bytes(each) // self.axes.parts_along([name for entry in spec for name in names_in(entry)])
            for each, spec in zip(shapes, self.specs, strict=True)
        )
        padding = f", padded to {shapes[0].shape[0]:,} elements" if self.form == "vector" and shapes else ""
        mesh = ", ".join(f"{name!r}: {size}" for name, size in self.mesh.shape.items())
        lines.append(f"{self.form}{padding} over ({mesh}): {total:,} bytes, {local:,} on each device")
        if self.replicated:
            path, size = next(iter(self.replicated.items()))
            lines.append(f"whole on each device: {len(self.replicated)}, the largest {path!r} of {size:,} bytes")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.in_words()


Plan.__module__ = "treeparams.sharding"


def plan(
    model: PyTree, mesh: Any, rules: Rules, *, form: FormName = "tree", axis: Any = None, batch_axis: Any = None
) -> Plan:
    """Where each parameter of a model lies on a mesh, by rules over paths.

    >>> import jax, jax.numpy as jnp
    >>> from treeparams import sharding
    >>> model = {"embed": jnp.ones((16, 4)), "layers": [{"w": jnp.ones((4, 4)), "b": jnp.ones(3)} for _ in range(2)]}
    >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
    >>> sharding.plan(model, mesh, {"layers.*.b": "whole", "**": "split"})
    path        key            lies       bytes per device
    embed       float32[16,4]  P('data')                64
    layers.0.b  float32[3]     whole                    12
    layers.0.w  float32[4,4]   P('data')                16
    layers.1.b  float32[3]     whole                    12
    layers.1.w  float32[4,4]   P('data')                16
    tree over ('data': 4): 408 bytes, 120 on each device
    whole on each device: 2, the largest 'layers.0.b' of 12 bytes

    Args:
        model: a model, one of `jax.ShapeDtypeStruct`s, or a `Layout`. No value is read.
        mesh: a `jax.sharding.Mesh` or, to look at a plan, an `AbstractMesh`.
        rules: `{where: rule}`; the first that matches a parameter says how it lies:

            - `"split"`: over `axis`, a leaf along its first axis that can be divided by the number of devices; a vector
              in equal parts (it is padded);
            - `"owned"`: whole rows of a stack on each device, what rules for matrices need (Muon, Adafactor, LAMB);
            - `"whole"`: on each device;
            - a `PartitionSpec` over the axes of the leaf. Axes of the mesh other than those of the batch are left to
              XLA (tensor parallelism).

            A tie lies as its source does. Vectors lie by one rule.
        form: in which form the parameters rest: `"tree"` (as `tp.partition`), `"vector"` (`tp.ravel`) or `"stacks"`
            (`tp.stack`). Stacks that lie in different ways are in groups named after their rules, `{"owned": {key:
            array}, "whole": {...}}`. The form does not depend on how many devices there are (a vector is padded to a
            multiple of 128), so that what some have saved is read by others.
        axis: the axis of the mesh, or several as a tuple, over which is split; `None`: the only one, or `batch_axis`.
        batch_axis: along which the batch lies; `None`: `axis`.

    Returns:
        The `Plan`.

    Raises:
        ValueError: a parameter is matched by no rule, or cannot be divided as its rule says; an alias has another rule
            than its source; parts of a vector have different rules; `axis` is no axis of the mesh or must be given.
        TypeError: `mesh` is no mesh, `rules` no dictionary.
    """
    axes = axes_of(mesh, axis, batch_axis)
    rest = None if isinstance(model, Layout) else take_apart(model, None).rest
    layout = model if rest is None else rest.layout
    return Plan(layout, rest, axes, rules, place(index_of(layout), rules, axes, form), form)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
