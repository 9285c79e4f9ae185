"""From rules over paths to the place of each parameter, checked against its shape and the mesh."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

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
        return self.along(self.split)

    def along(self, names: Sequence[str]) -> int:
        """Returns the number of devices along the given axes."""
        return math.prod(self.mesh.shape[name] for name in names)

    @property
    def split_entry(self) -> Any:
        """The axes that parameters are split over, as an entry of a `PartitionSpec`."""
        return self.split[0] if len(self.split) == 1 else self.split

    def gathered(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns the spec of an array while a loss reads it: whole along the batch, and else as it is."""
        kept = [None if {*names_in(entry)} & {*self.batch} else entry for entry in spec]
        return spec_of(kept)


class Place(NamedTuple):
    """Where an array rests, and whether devices own its rows."""

    spec: PartitionSpec = PartitionSpec()  # of its own axes; of a row without the axis over the rows
    is_owned: bool = False  # each row rests on one device
    is_lent: bool = False  # each row goes to one device for the update, since devices cannot share them at rest

    def of_stack(self, axes: Axes, in_update: bool = False) -> PartitionSpec:
        """Returns the spec of a stack of such rows."""
        if in_update and self.is_lent:
            return PartitionSpec(axes.split_entry)
        return spec_of([axes.split_entry if self.is_owned else None, *self.spec])

    def in_words(self, axes: Axes) -> str:
        """Describes the place."""
        words = as_text(self.spec) if names_of(self.spec) else "whole"
        rows = f"whole rows over {axes.split_entry!r}"
        return rows if self.is_owned else f"{words}, {rows} in the update" if self.is_lent else words

    def devices(self, axes: Axes) -> int:
        """Returns the number of devices that share one such array."""
        return axes.along([*names_of(self.spec), *(axes.split if self.is_owned else ())])


def axes_of(mesh: Mesh | AbstractMesh, axis: AxisNames, batch_axis: AxisNames) -> Axes:
    """Checks the axes that a user chose, and returns them."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f'expected a mesh, such as jax.make_mesh((8,), ("data",)), got {describe(mesh)}')
    given = {"axis": axis, "batch_axis": batch_axis}
    for name, value in given.items():
        if not (value is None or isinstance(value, str) or all(isinstance(each, str) for each in _sequence(value))):
            raise TypeError(f"{name} must be the name of an axis of the mesh, or a tuple of names, got {value!r}")
        unknown = [each for each in names_in(value) if each not in mesh.axis_names]
        if unknown:
            raise ValueError(f"{name}: the mesh has no axis {unknown[0]!r}; its axes are {quoted(mesh.axis_names)}")
    split, batch = names_in(axis), names_in(batch_axis)
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
    if AxisType.Manual in types.values():
        raise ValueError("axes of the mesh are manual, as inside jax.shard_map; make the plan outside of it")
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


def names_of(spec: Rule) -> tuple[str, ...]:
    """Returns the axes of the mesh in all entries of a `PartitionSpec`; a word names none."""
    return () if isinstance(spec, str) else tuple([name for entry in spec for name in names_in(entry)])


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


def misfit_in_words(slot: Slot, where: Where, problem: str, who: str | None = None) -> str:
    """Returns a line about a parameter, or the array that it is in, that its rule does not fit."""
    return f"{who or f'{slot.path!r} ({describe(slot)})'}, by {name_of(where)}: {problem}"


def refuse(wrong: Sequence[str]) -> None:
    """Raises an error with these lines about parameters that their rules do not fit, if there are any."""
    if wrong:
        raise ValueError(f"some parameters do not fit their rules:\n{first_lines(dict.fromkeys(wrong))}")


def checked(shape: tuple[int, ...], rule: Rule, axes: Axes, rows: int | None, name: str) -> tuple[str, Place]:
    """Returns the problem of a rule for an array, if there is one, and the place that it gives.

    Args:
        shape: the shape of the array, or of the row of a stack.
        rule: the rule.
        axes: the axes of the mesh.
        rows: how many rows of its shape devices are to own; `None` if it is no row of a stack.
        name: the form, as users call it.
    """
    size, divided = math.prod(shape), first_divided(shape, axes.devices)
    split = Place() if divided is None else Place(PartitionSpec(*[None] * divided, axes.split_entry))
    if isinstance(rule, PartitionSpec):
        return _misfit(rule, shape, axes), Place(rule if size else PartitionSpec())
    if rule == "owned" and rows is None:
        return f'"owned" is for rows of stacks; write form="stacks", or "split" in a {name}', Place()
    if rule == "whole" or not size or (axes.devices == 1 and rule == "owned"):
        return "", Place()
    if rule == "owned" and rows and rows % axes.devices == 0:
        return "", Place(is_owned=True)
    if rule == "owned":
        return "", split._replace(is_lent=bool(rows and rows > 1))
    if divided is not None:
        return "", split
    others = {each: axes.mesh.shape[each] for each in axes.mesh.axis_names if each not in axes.split}
    fitting = [each for each, size in others.items() if size > 1 and any(length % size == 0 for length in shape)]
    remedies = [f"a split over another axis of the mesh, {fitting[0]!r}"] if fitting else []
    problem = f"none of its axes is a multiple of {axes.devices}; write " + ", or ".join([*remedies, '"whole"'])
    return problem, Place()


def first_divided(shape: Sequence[int], devices: int) -> int | None:
    """Returns the first axis of an array that devices can share; `None` if there is none."""
    return next((axis for axis, size in enumerate(shape) if size and size % devices == 0), None)


def _misfit(spec: PartitionSpec, shape: tuple[int, ...], axes: Axes) -> str:
    """Returns why an array of this shape cannot be sharded by a spec; an empty text if it can."""
    if len(spec) > len(shape):
        return f"the spec has {len(spec)} entries, the array {len(shape)} ax{'i' if len(shape) == 1 else 'e'}s"
    for dim, devices in enumerate(map(axes.along, map(names_in, spec))):
        if shape[dim] % devices:
            return f"its axis {dim} of size {shape[dim]} is no multiple of {devices}"
    return ""


def group_of(rule: Rule) -> str:
    """Returns a text that is equal for equal rules."""
    if isinstance(rule, str):
        return rule
    spec = spec_of([*rule])
    return as_text(spec) if len(spec) else "whole"


def spec_of(entries: Sequence[Any]) -> PartitionSpec:
    """Returns the spec with these entries, without `None` at the end, so that equal shardings have equal specs."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)


def as_text(spec: PartitionSpec) -> str:
    """Formats a spec in the same way for all versions of JAX.

    >>> as_text(PartitionSpec(None, "data"))
    "P(None, 'data')"
    """
    return f"P({', '.join(map(repr, spec))})"
