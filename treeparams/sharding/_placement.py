"""Where the parameters of a layout, trained and frozen, lie on a mesh, and all that an optimiser or an average keeps.

Integers, keys and buffers, such as running statistics, do not count as parameters. They are whole on each device.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._forms.block import Block
from .._forms.form import Form
from .._forms.mesh import lay
from .._forms.restructure import Restructure, halves_of, restructure_over
from .._forms.states import Division
from .._slots.index import Slot
from .._slots.layout import Layout, index_of
from .._slots.parts import Rest
from .._tree.text import Table, describe, first_lines, quoted
from .._tree.types import PyTree
from ._specs import Axes, FormName, Place, Rules, automatic, axes_named, first_divided, mesh_within, put_leaf, spec_of

_Make = Callable[[PyTree], PyTree]
_Rule = str | PartitionSpec
# The `where` that selects a parameter, and its rule.
_Matched = tuple[Any, _Rule]
# The entries of the `PartitionSpec` of an array, one for each axis.
_Entries = list[Any]


def _entries_at(make: _Make, form: Form, specs: Sequence[PartitionSpec], start: PyTree) -> list[_Entries]:
    """Finds how each array of `start` lies, which `make` makes from parameters in a form that lies by `specs`.

    Most arrays have the shape of the block that they belong to, perhaps after further axes, and lie as it does. Of
    arrays of another shape (SM3's vectors for each axis, Adafactor's factors) only the rows of stacks are divided, and
    an array that all parameters share is whole.
    """
    arrays = jtu.tree_leaves(start)
    found: list[_Entries] = [[None] * array.ndim for array in arrays]
    if not any(map(any, specs)):
        return found
    division = Division.of(make, form, start)
    if division.problem:
        raise ValueError(division.problem)
    block_of = {tuple([form.paths[slot] for slot in slots]): i for i, slots in enumerate(form.members)}
    for n, (array, owners) in enumerate(zip(arrays, division.owners, strict=True)):
        if owners is not None:
            i = block_of[owners.paths]
            found[n] = _as_block(array.shape, owners.axis, form.blocks[i].shape, specs[i])
    return found


def _as_block(shape: tuple[int, ...], axis: int | None, block: tuple[int, ...], spec: PartitionSpec) -> _Entries:
    """Returns the entries of an array of a block of this shape, whose pieces follow one another along `axis`.

    With `None`, the array belongs to a single parameter.
    """
    own = [*spec, *[None] * (len(block) - len(spec))]
    before = len(shape) - len(block) if axis is None else axis
    if before >= 0 and shape[before + (axis is not None) :] == block[axis is not None :]:
        return [*[None] * before, *own]
    entries: _Entries = [None] * len(shape)
    if axis is not None:
        entries[axis] = own[0]
    return entries


def _matches(layout: Layout, rules: Rules, frozen: frozenset[int]) -> dict[int, _Matched]:
    """Returns the rule of each leaf that a rule selects, with its `where`. Each slot must be selected.

    `frozen` are the leaves of frozen parameters that a rule may select.
    """
    items, index = list(rules.items()), index_of(layout)
    paths = index.structure.paths
    found = index.first_entries(list(rules), asked=frozen.union(index.positions))
    missing = [repr(paths[leaf]) for leaf in index.positions if leaf not in found]
    if missing:
        raise ValueError(
            f"no rule matches\n{first_lines(missing)}\nadd a last rule for all other parameters: "
            '{..., "**": "split"}, or "whole" if they are small'
        )
    return {leaf: items[number] for leaf, number in found.items()}


class _Frozen:
    """How each frozen parameter is sharded. Static.

    Shardings are kept by path, since models of one layout may differ in which of their frozen arrays are the same
    object.
    """

    def __init__(self, layout: Layout, matched: Mapping[int, _Matched], axes: Axes, name: str) -> None:
        """Applies the rules to the leaves that have one. `name` is the form, as users call it."""
        leaves, index = _frozen_leaves(layout), index_of(layout)
        paths = index.structure.paths
        by_alias = {alias.leaf: alias for alias in index.ties}
        rules = {leaf: matched.get(index.sources.get(leaf, leaf), ("**", "whole")) for leaf in leaves}
        # An alias is the array of its source. With a transform it is a separate array that follows the same rule.
        apart = [leaf for leaf in leaves if leaf not in by_alias or by_alias[leaf].transforms]
        self._groups = {paths[leaf]: _as_key(rule) for leaf, (_, rule) in rules.items()}
        slots = index.described(apart)
        # No update reads a frozen row, so no device need own it: it is split if it can be.
        rows = 0 if name == "stacks" else None
        asked = [(_who(slot), rules[leaf], slot.shape, rows) for leaf, slot in zip(apart, slots, strict=True)]
        places = axes.places(asked, name)
        self.rows = list(zip(slots, places, strict=True))
        found = {leaf: place.spec for leaf, place in zip(apart, places, strict=True)}
        self._specs = {paths[leaf]: found[leaf if leaf in found else index.sources[leaf]] for leaf in leaves}

    def groups_of(self, rest: Rest[Any]) -> list[Any]:
        """Returns the group of each array that is no slot; only arrays of one group may lie in one stack."""
        return [self._groups.get(path, "whole") for path in rest.paths]

    def specs_of(self, rest: Rest[Any]) -> list[PartitionSpec]:
        """Returns the spec of each array that is no slot, outside stacks."""
        return [self._specs.get(path, PartitionSpec()) for path in rest.paths]

    def specs(self, rest: Rest[Any] | Restructure[Any]) -> Any:
        """Returns the specs of the arrays that the state of a step holds, as a tree like it."""
        if isinstance(rest, Rest):
            return rest.replaced(self.specs_of(rest))
        singles, form, held, stacks = halves_of(rest)
        own = self.specs_of(singles)
        left = [None if i in held.locations else spec for i, spec in enumerate(own)]
        of_stacks = [PartitionSpec(None, *own[rows[0]]) for rows in held.members]
        return Restructure(singles.replaced(left), type(stacks)(of_stacks), form, held)


def _frozen_leaves(layout: Layout) -> list[int]:
    """Returns the leaves of frozen parameters, without buffers."""
    index = index_of(layout)
    nodes = [node for node, said in index.structure.declaring if said.holds_buffers]
    buffers = {leaf for node in nodes for leaf in range(node.start, node.stop)}
    return [leaf for leaf in index.structure.parameters if not index.trained[leaf] and leaf not in buffers]


T = TypeVar("T")
_ALIGNED = 128  # a vector has the same length over 1, 2, ..., 128 devices


class _Laid(NamedTuple):
    """A form, and where its arrays and its slots lie."""

    form: Form
    specs: list[PartitionSpec]  # of each block, between steps
    slots: list[Place]  # of each slot as an array by itself
    in_update: tuple[Form, list[PartitionSpec]]  # the form while the rule runs, and the spec of each block


MAKERS: dict[str, Callable[[Layout, int], Form]] = {
    "tree": lambda layout, multiple: Form.tree(layout),
    "vector": lambda layout, multiple: Form.vector(layout, pad_to=multiple),
}
"""Makers of forms without rows, by the names that users write; vectors are padded to a multiple of a number."""


def _in_blocks(name: str, layout: Layout, matched: Sequence[_Matched], axes: Axes) -> _Laid:
    rules = [rule for _, rule in matched]
    names = {each for rule in rules for each in (axes.split if rule == "split" else axes_named(rule))}
    form = MAKERS[name](layout, math.lcm(_ALIGNED, axes.along(sorted(names))))
    asked = list[tuple[str, _Matched, tuple[int, ...], int | None]]()
    for block, members in zip(form.blocks, form.members, strict=True):
        rule = _one_rule([(layout.slots[slot].path, rules[slot]) for slot in members])
        is_one = block.length is None
        who = _who(layout.slots[members[0]]) if is_one else f"the {name} ({describe(block)})"
        asked.append((who, (matched[members[0]][0] if members else "**", rule), block.shape, None))
    places = axes.places(asked, name)
    slots = {slot: place for place, members in zip(places, form.members, strict=True) for slot in members}
    specs = [place.spec for place in places]
    return _Laid(form, specs, [slots[i] for i in range(len(rules))], (form, specs))


def _who(slot: Slot) -> str:
    return f"{slot.path!r} ({describe(slot)})"


def _as_key(rule: _Rule) -> Any:
    """Returns a value that is equal for rules that say the same."""
    return rule if isinstance(rule, str) else spec_of([*rule]) or "whole"


def _one_rule(members: Sequence[tuple[str, _Rule]]) -> _Rule:
    """Returns the rule that all members of one array share, from the path and rule of each."""
    path, rule = members[0] if members else ("", "whole")
    other = next((each for each in members if _as_key(each[1]) != _as_key(rule)), None)
    if other is not None:
        raise ValueError(
            f"all parts of a vector need the same rule, but {path!r} has {rule!r} and {other[0]!r} has {other[1]!r}; "
            'give all of them one rule, or use form="stacks"'
        )
    return rule


def _in_stacks(layout: Layout, matched: Sequence[_Matched], axes: Axes) -> _Laid:
    keys = [slot.key for slot in layout.slots]
    owned = collections.Counter(key for key, (_, rule) in zip(keys, matched, strict=True) if rule == "owned")
    pairs = zip(layout.slots, matched, strict=True)
    asked = [(_who(slot), rule, slot.shape, owned[slot.key]) for slot, rule in pairs]
    places = axes.places(asked, "stacks")
    # One array lies in one way. So rows of one shape are one stack if they rest alike, whichever rules say so, and on
    # one device all do.
    of_key: dict[str, dict[str, list[int]]] = {}
    for slot, (key, place) in enumerate(zip(keys, places, strict=True)):
        at_rest = place._replace(is_lent=False).in_words(axes) if place.devices(axes) > 1 else "whole"
        of_key.setdefault(key, {}).setdefault(at_rest, []).append(slot)
    tree = {
        key if len(parts) == 1 else f"{key} {words}": rows
        for key, parts in of_key.items()
        for words, rows in parts.items()
    }
    form = Form.of(tree, layout.slots, layout.paths, "the stacks of the plan")
    of_blocks = [max([places[slot] for slot in rows], key=lambda place: place.is_lent) for rows in form.members]
    specs, in_update = ([place.of_stack(axes, which) for place in of_blocks] for which in (False, True))
    # Devices that own rows have equally many while the rule runs. The rows that are missing are zeros.
    longer = [
        dataclasses.replace(block, length=-(-len(block.shapes) // axes.devices) * axes.devices)
        if place.is_lent
        else block
        for block, place in zip(form.blocks, of_blocks, strict=True)
    ]
    return _Laid(form, specs, places, (dataclasses.replace(form, blocks=tuple(longer)), in_update))


@dataclasses.dataclass(frozen=True)
class StepState:
    """Everything that `sharding.make_step` keeps beside the parameters, as a pytree.

    Attributes:
        rule: the state of the optimiser, as Optax returns it.
        average: the `tp.Ema` of the parameters, in their form, or `None`. `plan.model(state.average.average, state)` is
            the averaged model.
        rest: the model without its trained parameters.
        layout: a zero, stored under the digest of the plan's layout. It identifies the parameters that the state
            belongs to, so the step, `treeparams.saving` and Orbax reject a state of other parameters, even if a padded
            vector has the same length.
        model_state: the state that the model changes, such as running statistics. `None` without `has_state=True`.
    """

    rule: Any
    average: Any
    rest: Any
    layout: dict[str, Any]
    model_state: Any = None


StepState.__module__ = "treeparams.types"
jtu.register_dataclass(StepState, ["rule", "average", "rest", "layout", "model_state"], [])


class Placement:
    """Where each parameter lies: a form, and a spec for each of its blocks. Static."""

    def __init__(self, layout: Layout, axes: Axes, rules: Rules, name: FormName) -> None:
        if name not in (*MAKERS, "stacks"):
            raise ValueError(f'form must be "tree", "vector" or "stacks", got {name!r}')
        axes.check(rules)
        self.layout = layout
        by_leaf = _matches(layout, rules, self.frozen_sources)
        self.axes = axes
        self.name: FormName = name  # of the form, as users call it
        make = _in_stacks if name == "stacks" else functools.partial(_in_blocks, name)
        found = make(layout, [by_leaf[leaf] for leaf in index_of(layout).positions], axes)
        self.form, self.specs, self._slots, self.in_update = found
        self.frozen = _Frozen(layout, by_leaf, axes, name)

    @property
    def frozen_sources(self) -> frozenset[int]:
        """The leaves of frozen parameters that a rule may select, each tie once."""
        return frozenset(_frozen_leaves(self.layout)).difference(index_of(self.layout).sources)

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
        """The sharding of each slot as a separate array. A span of a vector is whole, and so is a row that is owned."""
        spans = {slot for i, members in enumerate(self.form.members) for slot in members if self.vectors[i]}
        return [self.whole if n in spans else self.sharding(place.spec) for n, place in enumerate(self._slots)]

    # -- Trees

    @functools.cached_property
    def vectors(self) -> list[bool]:
        """Whether each block is a vector of several slots."""
        return [block.length is not None and self.name != "stacks" for block in self.form.blocks]

    @property
    def in_files(self) -> Form:
        """The form that does not depend on rules and devices."""
        return Form.stacks(self.layout) if self.name == "stacks" else MAKERS[self.name](self.layout, _ALIGNED)

    def tree(self, leaves: Sequence[Any]) -> PyTree:
        """Returns the tree of the parameters with these leaves."""
        return jtu.tree_unflatten(self.form.treedef, leaves)

    def shapes(self) -> PyTree:
        """Returns the parameters as `jax.ShapeDtypeStruct`s with their shardings."""
        return jax.tree.map(put_leaf, self.form.shapes(), self.params)

    def made(self, make: _Make) -> PyTree:
        """Returns the tree that `make` makes of the parameters, as `jax.ShapeDtypeStruct`s with shardings."""
        start, specs = self.made_over(make, self.form, self.specs)
        shapes, treedef = jtu.tree_flatten(start)
        return treedef.unflatten(list(map(put_leaf, shapes, map(self.sharding, specs))))

    def made_over(self, make: _Make, form: Form, specs: Sequence[PartitionSpec]) -> tuple[PyTree, list[PartitionSpec]]:
        """Returns the shapes, and a spec for each, of what `make` makes of parameters in a form that lies so."""
        start = jax.eval_shape(make, form.shapes())
        return start, [spec_of(each) for each in _entries_at(make, form, specs, start)]

    def laid(self, slots: Sequence[Any]) -> PyTree:
        """Returns the parameters from one array for each slot, in new buffers; from shapes, as shapes."""
        if any(isinstance(slot, jax.ShapeDtypeStruct) for slot in slots):
            return self.shapes()
        shardings = list(map(self.sharding, self.specs))
        if any(isinstance(slot, Tracer) for slot in slots) and isinstance(self.axes.mesh, Mesh):
            of_each = [[slots[slot] for slot in members] for members in self.form.members]
            return self.tree(list(map(_join_over, self.form.blocks, of_each, shardings)))
        leaves = jtu.tree_leaves(self.form.join(slots))
        is_own = [block.length is not None for block in self.form.blocks]
        return self.tree(list(map(put_leaf, leaves, shardings, is_own)))

    def check(self, params: PyTree) -> None:
        """Checks that parameters have the form of this plan."""
        expected, got = (described(tree, _shape_or_type) for tree in (self.form.shapes(), params))
        if expected == got:
            return
        wrong = next((f"{path} ({what})" for path, what in got if (path, what) not in expected), "nothing else")
        raise ValueError(
            f"expected the parameters in their form, a {self.name} of {len(expected)} arrays; got {describe(params)} "
            f"of {len(got)} arrays, among them {wrong}. Pass those that init, the last step or plan.ravel(model) "
            "returned; a model has another form: params, state = init(model)"
        )

    def check_state(self, state: object) -> None:
        """Checks that a state was made for the layout of a plan."""
        if not isinstance(state, StepState):
            raise TypeError(
                f"expected the state that init or the last step returned, got {describe(state)}. Write "
                "params, state, value = step(params, state, *batch), and plan.model(params, state)"
            )
        digest = self.layout.digest
        if state.layout.keys() != {digest}:
            raise ValueError(
                f"the state belongs to another layout: its digest is {quoted([*state.layout]) or 'missing'}, the "
                f"plan's is {digest!r}. The layouts differ in paths, shapes, dtypes, trained parameters or ties, so "
                "values would go to the wrong parameters. Make the plan from the model of the state, or start with "
                "init(model)"
            )

    # -- The rest of a model

    def put_rest(self, rest: Rest[Any], specs: Sequence[PartitionSpec] | None = None) -> Rest[Any]:
        """Places the rest of a model on the mesh: frozen parameters by their rules or `specs`, other arrays whole."""
        specs = self.frozen.specs_of(rest) if specs is None else specs
        shardings = map(self.sharding, specs)
        return rest.replaced(map(put_leaf, rest.arrays, shardings))

    def restructure(self, rest: Rest[Any]) -> Restructure[Any]:
        """Returns the `Restructure` over the mesh, from a `Rest` that lies anywhere or from its shapes."""
        make = functools.partial(restructure_over, form=self.form, groups=self.frozen.groups_of(rest))
        is_of_shapes = any(isinstance(array, jax.ShapeDtypeStruct) for array in rest.arrays)
        # Arrays are laid over the devices one by one, and are stacked there: so none ever has all of them.
        made = jax.eval_shape(make, rest) if is_of_shapes else make(self.put_rest(rest))
        leaves, treedef = jtu.tree_flatten(made)
        specs = jtu.tree_leaves(self.frozen.specs(made), is_leaf=lambda node: isinstance(node, PartitionSpec))
        pairs = zip(leaves, map(self.sharding, specs), strict=True)
        return treedef.unflatten([put_leaf(leaf, to, is_own=True) for leaf, to in pairs])

    # -- In words

    @property
    def rows(self) -> list[tuple[Slot, Place, str]]:
        """Each parameter, trained or frozen, with its place, also in words."""
        trained = [(slot, place, "") for slot, place in zip(self.layout.slots, self._slots, strict=True)]
        frozen = [(slot, place, ", frozen") for slot, place in self.frozen.rows]
        return [(slot, place, place.in_words(self.axes) + mark) for slot, place, mark in (*trained, *frozen)]

    @property
    def replicated(self) -> dict[str, int]:
        """The bytes of each parameter, trained or frozen, that is whole on each device, by path; the largest first."""
        found = {slot.path: _bytes(slot) for slot, place, _ in self.rows if place.devices(self.axes) == 1}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def in_words(self) -> str:
        """Returns the plan as text, with a line for every parameter."""
        table, *lines = self.blocks()
        return "\n".join([*map("  ".join, table.rows), *lines])

    def blocks(self) -> tuple[Table, *tuple[str, ...]]:
        """Returns the plan as a table and the lines below it."""
        each = [(slot, -(-_bytes(slot) // place.devices(self.axes)), words) for slot, place, words in self.rows]
        cells = [[slot.path, slot.key, words, f"{size:,}"] for slot, size, words in each]
        table = Table(["path", "key", "lies", "bytes per device"], cells, right=[3])
        shapes = jtu.tree_leaves(self.form.shapes())
        counts = map(self.axes.along, map(axes_named, self.specs))
        local = sum(_bytes(each) // count for each, count in zip(shapes, counts, strict=True))
        local += sum(size for _, size, _ in each[len(self.layout.slots) :])
        frozen = sum(_bytes(slot) for slot, _ in self.frozen.rows)
        total = sum(map(_bytes, shapes)) + frozen
        lengths = [block.size for block, is_vector in zip(self.form.blocks, self.vectors, strict=True) if is_vector]
        padding = f", padded to {sum(lengths):,} elements" if lengths else ""
        mesh = ", ".join(f"{name!r}: {size}" for name, size in self.axes.mesh.shape.items())
        of_these = f" ({frozen:,} frozen)" if frozen else ""
        lines = [f"{self.name}{padding} over ({mesh}): {total:,} bytes{of_these}, {local:,} on each device"]
        if self.replicated:
            path, size = next(iter(self.replicated.items()))
            lines.append(f"whole on each device: {len(self.replicated)}, the largest {path!r} of {size:,} bytes")
        return (table, *lines)


def described(tree: PyTree, of: Callable[[Any], T]) -> list[tuple[str, T]]:
    """Applies a function to each array, and returns the results after the arrays' paths."""
    return [(jtu.keystr(path), of(leaf)) for path, leaf in jtu.tree_flatten_with_path(tree)[0]]


def _shape_or_type(leaf: object) -> tuple[int, ...] | str:
    shape = getattr(leaf, "shape", None)
    return type(leaf).__name__ if shape is None else tuple(shape)


def _bytes(array: Slot | jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize


# -- Parameters of a traced model --------------------------------------------------------------------------------------
# An initialiser under `jax.jit` yields one traced array for each slot. If these were concatenated into a result that is
# split along the same axis, XLA would first gather all of them on each device.


def _join_over(block: Block, slots: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    """Joins traced slots into a block that lies over a mesh; the result equals `block.join`, bit for bit."""
    first, *of_row = [*sharding.spec, None]
    names = axes_named(PartitionSpec(first))
    mesh, arrays = sharding.mesh, [jnp.asarray(slot, block.dtype) for slot in slots]
    devices = math.prod(mesh.shape[name] for name in names)
    if block.length is None or not arrays or devices == 1:
        # Of rows that are split within, each lies as it will in the stack.
        its = NamedSharding(mesh, PartitionSpec(*of_row[: block.rank]))
        rows = [lay(array, its) for array in arrays] if block.rank and any(of_row) else arrays
        return lay(block.join(rows), sharding)
    # First each slot is split along one of its axes. Constraints propagate to the code that makes the slot, so that
    # its random numbers are drawn in parts too.
    specs = [_split_spec(array.shape, names, devices) for array in arrays]
    laid = [lay(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]
    f = functools.partial(_share, block, specs, names, devices)

    def run(*laid: jax.Array) -> jax.Array:  # the mesh is asked for within `automatic`, where it is another one
        # Without types that track which values vary: zeros would not vary over the devices, but what is put in does.
        mapped = functools.partial(jax.shard_map, axis_names=set(names), check_vma=False)
        return mapped(f, mesh=mesh_within(mesh), in_specs=tuple(specs), out_specs=PartitionSpec(first))(*laid)

    return automatic(run, sharding, mesh)(*laid)


def _split_spec(shape: tuple[int, ...], names: tuple[str, ...], devices: int) -> PartitionSpec:
    """Returns the spec that splits the first axis that devices can share; of an array without one, whole."""
    dim = first_divided(shape, devices)
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, names)


def _share(
    block: Block, specs: Sequence[PartitionSpec], names: tuple[str, ...], devices: int, *parts: jax.Array
) -> jax.Array:
    """Returns this device's share of a block, from its parts of all slots."""
    length, *row = block.shape
    own = jnp.zeros((length // devices, *row), block.dtype)
    begin = jax.lax.axis_index(names) * own.shape[0]
    alike: dict[Any, list[int]] = {}
    for n, (shape, part) in enumerate(zip(block.shapes, parts, strict=True)):
        if part.size:
            alike.setdefault((shape, part.shape), []).append(n)
    for numbers in alike.values():
        write = functools.partial(_write, names, specs[numbers[0]], begin)
        # One slot after another. In a loop, since XLA of CPU drops optimization barriers, and then gathers all at once.
        starts = jnp.asarray([block.starts[n] for n in numbers], begin.dtype)
        own, _ = jax.lax.scan(write, own, (jnp.stack([parts[n] for n in numbers]), starts))
    return own


def _write(
    names: tuple[str, ...], spec: PartitionSpec, begin: jax.Array, own: jax.Array, each: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    """Gathers one slot, and writes the part of it that belongs into this device's share, which starts at `begin`."""
    part, start = each
    whole = jax.lax.all_gather(part, names, axis=len(spec) - 1, tiled=True) if len(spec) else part
    return _rows_written(own, whole.reshape(-1, *own.shape[1:]), start - begin), None


def _rows_written(own: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
    """Writes rows into an array from `at` on, as far as they overlap; `at` may lie outside of the array."""
    count = min(len(own), len(rows))
    start = jnp.clip(at, 0, len(own) - count)
    numbers = start - at + jnp.arange(count, dtype=at.dtype)
    overlap = ((numbers >= 0) & (numbers < len(rows))).reshape(-1, *[1] * (own.ndim - 1))
    values = jnp.take(rows, numbers, axis=0, mode="clip")
    before = jax.lax.dynamic_slice_in_dim(own, start, count)
    return jax.lax.dynamic_update_slice_in_dim(own, jnp.where(overlap, values, before), start, 0)
