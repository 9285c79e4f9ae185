"""From rules over paths to the sharding of each parameter, checked against its shape and the mesh."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from .._forms.form import Form, stacked_leaves
from .._slots.index import Index, Slot
from .._slots.rules import first_entries
from .._slots.where import Where, name_of
from .._tree.text import describe, first_lines, quoted

Rule = str | PartitionSpec
Rules = Mapping[Any, Rule]
Matched = tuple[Where, Rule]
"""The `where` that selects a parameter, and its rule."""
FormName = Literal["tree", "vector", "stacks"]
AxisNames = str | Sequence[str] | None
_WORDS = ("split", "owned", "whole")


class Axes(NamedTuple):
    """The axes of a mesh, which of them parameters are split over, and which the batch is split over."""

    mesh: Mesh | AbstractMesh
    split: tuple[str, ...]
    batch: tuple[str, ...]

    @property
    def devices(self) -> int:
        """The number of devices that parameters are split over."""
        return self.devices_along(self.split)

    def devices_along(self, names: Sequence[str]) -> int:
        """Returns the number of devices along the given axes."""
        return math.prod(self.mesh.shape[name] for name in names)

    @property
    def split_entry(self) -> Any:
        """The axes that parameters are split over, as an entry of a `PartitionSpec`."""
        return self.split[0] if len(self.split) == 1 else self.split

    def by_hand(self, spec: PartitionSpec) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Returns the axes of an array that are split along the batch, each with its axes of the mesh.

        These are gathered explicitly. Splits along other axes of the mesh are left to XLA.
        """
        entries = enumerate(map(names_in, spec))
        return tuple([(dim, names) for dim, names in entries if names and names[0] in self.batch])

    def along_batch(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns a spec without its entries that are not along the batch axes."""
        by_hand = {dim for dim, _ in self.by_hand(spec)}
        return PartitionSpec(*[entry if dim in by_hand else None for dim, entry in enumerate(spec)])


def axes_of(mesh: Mesh | AbstractMesh, axis: AxisNames, batch_axis: AxisNames) -> Axes:
    """Checks the axes that a user chose, and returns them."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f'expected a mesh, such as jax.make_mesh((8,), ("data",)), got {describe(mesh)}')
    given = {"axis": axis, "batch_axis": batch_axis}
    for name, value in given.items():
        if not (value is None or isinstance(value, str) or all(isinstance(each, str) for each in _sequence(value))):
            raise TypeError(f"{name} must be the name of an axis of the mesh, or a tuple of names, got {value!r}")
    found = {name: names_in(value) for name, value in given.items()}
    for name, names in found.items():
        unknown = [each for each in names if each not in mesh.axis_names]
        if unknown:
            raise ValueError(f"{name}: the mesh has no axis {unknown[0]!r}; its axes are {quoted(mesh.axis_names)}")
    split, batch = found["axis"], found["batch_axis"]
    if not split and not batch:
        if len(mesh.axis_names) > 1:
            raise ValueError(
                f"the mesh has the axes {quoted(mesh.axis_names)}: name with axis= those to split parameters over, and "
                "with batch_axis= those to split the batch over, if they differ"
            )
        split = tuple(mesh.axis_names)
    split, batch = split or batch, batch or split
    if not set(split) <= set(batch):
        raise ValueError(
            f"axis={axis!r}, but the batch is split over {batch_axis!r}: devices along an axis that does not split the "
            "batch would all compute the same. Name it in batch_axis too; for tensor parallelism, which XLA does, "
            "write a PartitionSpec as the rule"
        )
    _check_types(mesh, batch)
    return Axes(mesh, split, batch)


_ONE_TYPE = "make all of them automatic, jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * n), or all explicit"


def _check_types(mesh: Mesh | AbstractMesh, batch: Sequence[str]) -> None:
    """Rejects meshes whose axis types do not let JAX place parameters."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = [name for name, its in types.items() if its == AxisType.Manual]
    if manual:
        raise ValueError(
            f"the axes {quoted(manual)} of the mesh are manual, as inside jax.shard_map; make the plan outside of it: "
            f"{_ONE_TYPE}"
        )
    automatic = [name for name in batch if types[name] == AxisType.Auto]
    if automatic and AxisType.Explicit in types.values():
        raise ValueError(
            f"the mesh has explicit axes, and {quoted(automatic)}, over which parameters or the batch are split, is "
            f"automatic; JAX splits no array over both: {_ONE_TYPE}"
        )


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else [value]


def names_in(entry: AxisNames) -> tuple[str, ...]:
    """Returns the axes of the mesh in one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def names_of(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the axes of the mesh in all entries of a `PartitionSpec`."""
    return tuple([name for entry in spec for name in names_in(entry)])


def check_rules(rules: Rules, axes: Axes) -> None:
    """Checks rules without regard to the parameters that they select."""
    if not isinstance(rules, Mapping):
        raise TypeError(f'rules must be a dictionary {{where: rule}}, such as {{"**": "split"}}, got {describe(rules)}')
    for where, rule in rules.items():
        if rule not in _WORDS if isinstance(rule, str) else not isinstance(rule, PartitionSpec):
            raise ValueError(f'{name_of(where)}: expected "split", "owned", "whole" or a PartitionSpec, got {rule!r}')
        if isinstance(rule, PartitionSpec) and (problem := next(_problems(rule, axes), "")):
            raise ValueError(f"{name_of(where)}, {as_text(rule)}: {problem}")


def _problems(spec: PartitionSpec, axes: Axes) -> Iterator[str]:
    """Yields the problems of a spec over these axes, whichever arrays it is for."""
    if any(not isinstance(name, str) for entry in spec if entry is not None for name in _sequence(entry)):
        yield "its entries must be None, the name of an axis of the mesh, or a tuple of names"
        return
    used = names_of(spec)
    unknown = [name for name in used if name not in axes.mesh.axis_names]
    if unknown:
        yield f"the mesh has no axis {unknown[0]!r}; its axes are {quoted(axes.mesh.axis_names)}"
    types = {name: its for name, its in zip(axes.mesh.axis_names, axes.mesh.axis_types, strict=True) if name in used}
    if AxisType.Explicit in axes.mesh.axis_types and AxisType.Auto in types.values():
        name = next(name for name, its in types.items() if its == AxisType.Auto)
        yield f"the mesh has explicit axes, and {name!r} is automatic; {_ONE_TYPE}"
    if len(set(used)) < len(used):
        yield "the spec names an axis of the mesh twice"
    for dim, entry in enumerate(spec):
        if len({name in axes.batch for name in names_in(entry)}) > 1:
            yield f"axis {dim} is split along the batch and along another axis of the mesh at once"


class Lying(NamedTuple):
    """How one parameter is sharded."""

    spec: PartitionSpec  # of its own axes
    words: str
    devices: int  # over which it is split
    is_owned: bool  # whether it is a row that is whole on some device


def matches(index: Index, rules: Rules, frozen: frozenset[int]) -> dict[int, Matched]:
    """Returns the rule of each leaf that a rule selects, with its `where`. Each slot must be selected.

    `frozen` are the leaves of frozen parameters that a rule may select.
    """
    items, paths = list(rules.items()), index.structure.paths
    found = first_entries(index, list(rules), asked=frozen.union(index.positions))
    missing = [repr(paths[leaf]) for leaf in index.positions if leaf not in found]
    if missing:
        raise ValueError(
            f"no rule matches\n{first_lines(missing)}\nadd a last rule for all other parameters: "
            '{..., "**": "split"}, or "whole" if they are small'
        )
    return {leaf: items[number] for leaf, number in found.items()}


def devices_by(rules: Sequence[Rule], axes: Axes) -> int:
    """Returns the number of devices that these rules split over, along all axes of the mesh that they name."""
    words = {"split": axes.split, "owned": axes.split, "whole": ()}
    names = {name for rule in rules for name in (words[rule] if isinstance(rule, str) else names_of(rule))}
    return axes.devices_along(sorted(names))


def specs_of(
    form: Form, slots: Sequence[Slot], matched: Sequence[Matched], axes: Axes, name: str
) -> list[PartitionSpec]:
    """Returns the spec of each block of a form, by the rules of its slots; `name` is the form, as users call it."""
    specs, wrong = list[PartitionSpec](), dict[int, str]()
    for block, members, is_stack in zip(form.blocks, form.members, stacked_leaves(form.shapes()), strict=True):
        rule = _one_rule([(slots[slot].path, matched[slot][1]) for slot in members])
        rows = block.length if is_stack else None
        problem, spec = checked(block.shape[is_stack:], rule, axes, rows, name)
        specs.append(stack_spec(spec, rule == "owned", axes) if is_stack else spec)
        is_vector = block.length is not None and not is_stack
        for slot in members if problem else ():
            who = f"the {name} ({describe(block)})" if is_vector else None
            wrong[slot] = misfit_in_words(slots[slot], matched[slot][0], problem, who)
    refuse([wrong[slot] for slot in sorted(wrong)])
    return specs


def stack_spec(row: PartitionSpec, is_owned: bool, axes: Axes) -> PartitionSpec:
    """Returns the spec of a stack from that of its rows."""
    return spec_of([axes.split_entry if is_owned else None, *row])


def misfit_in_words(slot: Slot, where: Where, problem: str, who: str | None = None) -> str:
    """Returns a line about a parameter, or the array that it is in, that its rule does not fit."""
    return f"{who or f'{slot.path!r} ({describe(slot)})'}, by {name_of(where)}: {problem}"


def refuse(wrong: Sequence[str]) -> None:
    """Raises an error with these lines about parameters that their rules do not fit, if there are any."""
    if wrong:
        raise ValueError(f"some parameters do not fit their rules:\n{first_lines(dict.fromkeys(wrong))}")


def _one_rule(members: Sequence[tuple[str, Rule]]) -> Rule:
    """Returns the rule that all members of one array share, from the path and rule of each."""
    rule = members[0][1] if members else "whole"
    other = next((each for each in members if group_of(each[1]) != group_of(rule)), None)
    if other is not None:
        raise ValueError(
            f"all parts of a vector need the same rule, but {members[0][0]!r} has {rule!r} and {other[0]!r} has "
            f'{other[1]!r}; give all of them one rule, or use form="stacks"'
        )
    return rule


def checked(shape: tuple[int, ...], rule: Rule, axes: Axes, rows: int | None, name: str) -> tuple[str, PartitionSpec]:
    """Returns the problem of a rule for an array, or for one of `rows` rows of a stack, and the spec."""
    whole, devices, size = PartitionSpec(), axes.devices, math.prod(shape)
    if isinstance(rule, PartitionSpec):
        return _misfit(rule, shape, axes), rule if size else whole
    divided = first_divided(shape, axes)
    # A row that is owned lies whole on one device: the axis over the rows is split, which `specs_of` puts before this.
    if rule == "owned":
        return _not_owned(rows, devices, divided is not None, name), whole
    if rule == "whole" or not size:
        return "", whole
    if divided is not None:
        return "", divided
    others = {each: axes.mesh.shape[each] for each in axes.mesh.axis_names if each not in axes.split}
    fitting = [each for each, size in others.items() if size > 1 and any(length % size == 0 for length in shape)]
    remedies = ['"owned", whole rows of its stack'] if rows and rows % devices == 0 else []
    remedies += [f"a split over another axis of the mesh, {fitting[0]!r}"] if fitting else []
    return f"none of its axes is a multiple of {devices}; write " + ", or ".join([*remedies, '"whole"']), whole


def first_divided(shape: tuple[int, ...], axes: Axes) -> PartitionSpec | None:
    """Returns the spec that splits an array along its first axis that can be divided, or `None`."""
    axis = next((axis for axis, each in enumerate(shape) if each % axes.devices == 0), None)
    return None if axis is None else PartitionSpec(*[None] * axis, axes.split_entry)


def _not_owned(rows: int | None, devices: int, can_split: bool, name: str) -> str:
    """Returns why devices cannot own rows; an empty text if they can."""
    if rows is None:
        return f'"owned" is for rows of stacks; write form="stacks", or "split" in a {name}'
    if rows % devices == 0:
        return ""
    instead = '"split", which divides each row, or "whole"' if can_split else '"whole"'
    s = "s" if rows > 1 else ""
    return f"{devices} devices cannot own the {rows} row{s} of its stack in equal parts; write {instead}"


def _misfit(spec: PartitionSpec, shape: tuple[int, ...], axes: Axes) -> str:
    """Returns why an array of this shape cannot be sharded by a spec; an empty text if it can."""
    if len(spec) > len(shape):
        return f"the spec has {len(spec)} entries, the array {len(shape)} ax{'i' if len(shape) == 1 else 'e'}s"
    for dim, devices in enumerate(map(axes.devices_along, map(names_in, spec))):
        if shape[dim] % devices:
            return f"its axis {dim} of size {shape[dim]} is no multiple of {devices}"
    return ""


def group_of(rule: Rule) -> str:
    """Returns the name of the group of parameters with this rule."""
    if isinstance(rule, str):
        return rule
    spec = spec_of([*rule])
    return as_text(spec) if len(spec) else "whole"


def spec_of(entries: Sequence[Any]) -> PartitionSpec:
    """Returns the spec with these entries, without `None` at the end, so that equal shardings have equal specs."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)


def is_spec(node: object) -> bool:
    """Returns whether a node of a tree is a spec. Some versions of JAX do not treat specs as leaves."""
    return isinstance(node, PartitionSpec)


def as_text(spec: PartitionSpec) -> str:
    """Formats a spec in the same way for all versions of JAX.

    >>> as_text(PartitionSpec(None, "data"))
    "P(None, 'data')"
    """
    return f"P({', '.join(map(repr, spec))})"
