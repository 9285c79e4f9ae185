"""From rules over paths to where each parameter lies: its rule, checked against its shape and the mesh."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from .._index import Index, Slot
from .._text import describe, first_lines, quoted
from .._where import Where, name_of, select

Rules = Mapping[Any, str | PartitionSpec]
FormName = Literal["tree", "vector", "stacks"]
_WORDS = ("split", "owned", "whole")


class Axes(NamedTuple):
    """The axes of a mesh: over which of them parameters are split, and along which the batch lies."""

    mesh: Any
    split: tuple[str, ...]
    batch: tuple[str, ...]

    @property
    def parts(self) -> int:
        """Into how many parts is split what is split."""
        return self.parts_along(self.split)

    def parts_along(self, names: Sequence[str]) -> int:
        """How many devices there are along some axes."""
        return math.prod(self.mesh.shape[name] for name in names)

    @property
    def split_entry(self) -> Any:
        """The axes as an entry of a `PartitionSpec`."""
        return self.split[0] if len(self.split) == 1 else self.split

    def by_hand(self, spec: PartitionSpec) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The axes of an array that are split along the batch, and so are gathered explicitly, with those of the mesh.

        What is split along other axes of the mesh is left to XLA.
        """
        entries = enumerate(map(names_in, spec))
        return tuple([(dim, names) for dim, names in entries if names and names[0] in self.batch])


class Placed(NamedTuple):
    """How one parameter lies."""

    group: str  # the word, or the spec as text: what lies alike is in one group of stacks
    spec: PartitionSpec  # of its own axes; of an owned one none, whole rows lie on some device


def axes_of(mesh: Any, axis: Any, batch_axis: Any) -> Axes:
    """The axes, checked."""
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        raise TypeError(f'expected a mesh, such as jax.make_mesh((8,), ("data",)), got {describe(mesh)}')
    given = {"axis": axis, "batch_axis": batch_axis}
    for name, value in given.items():
        if not (value is None or isinstance(value, str) or all(isinstance(each, str) for each in _sequence(value))):
            raise TypeError(f"{name} is the name of an axis of the mesh, or a tuple of names, got {value!r}")
    found = {name: names_in(value) for name, value in given.items()}
    for name, names in found.items():
        unknown = [each for each in names if each not in mesh.axis_names]
        if unknown:
            raise ValueError(f"{name}: the mesh has no axis {unknown[0]!r}; its axes are {quoted(mesh.axis_names)}")
    split, batch = found["axis"], found["batch_axis"]
    if not split and not batch:
        if len(mesh.axis_names) > 1:
            raise ValueError(
                f"the mesh has the axes {quoted(mesh.axis_names)}: say with axis= over which of them parameters are "
                "split, and with batch_axis= along which the batch lies, if that is not the same"
            )
        split = tuple(mesh.axis_names)
    split, batch = split or batch, batch or split
    if not set(split) <= set(batch):
        raise ValueError(
            f"axis={axis!r}, and the batch lies along {batch_axis!r}: devices along an axis without examples of their "
            "own would all compute the same. Let batch_axis name it too; for tensor parallelism write a PartitionSpec "
            "as the rule, which XLA sees to"
        )
    return Axes(mesh, split, batch)


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else [value]


def names_in(entry: Any) -> tuple[str, ...]:
    """The axes of the mesh in one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def names_of(spec: PartitionSpec) -> tuple[str, ...]:
    """The axes of the mesh in all of a `PartitionSpec`."""
    return tuple([name for entry in spec for name in names_in(entry)])


def place(index: Index, rules: Rules, axes: Axes, form: FormName) -> list[Placed]:
    """How each slot lies: by the first rule that matches it."""
    if form not in ("tree", "vector", "stacks"):
        raise ValueError(f'form must be "tree", "vector" or "stacks", got {form!r}')
    if not isinstance(rules, Mapping):
        raise TypeError(f'rules is a dictionary {{where: rule}}, such as {{"**": "split"}}, got {describe(rules)}')
    for where, rule in rules.items():
        if rule not in _WORDS if isinstance(rule, str) else not isinstance(rule, PartitionSpec):
            raise ValueError(f'{name_of(where)}: a rule is "split", "owned", "whole" or a PartitionSpec, got {rule!r}')
        if rule == "owned" and form != "stacks":
            raise ValueError(
                f'{name_of(where)}: "owned" is of rows of stacks; write form="stacks", or "split" in a {form}'
            )
    matched = _matches(index, rules)
    slots = index.slots
    if form == "vector":
        return _in_a_vector(slots, [rule for _, rule in matched], axes)
    rows: dict[Any, int] = {}  # of each stack
    for slot, (_, rule) in zip(slots, matched, strict=True):
        rows[slot.key, rule] = rows.get((slot.key, rule), 0) + 1
    found, wrong = [], []
    for slot, (where, rule) in zip(slots, matched, strict=True):
        problem, spec = _checked(slot, rule, axes, form, rows[slot.key, rule])
        wrong += [f"{slot.path!r} ({describe(slot)}), by {name_of(where)}: {problem}"] if problem else []
        found.append(Placed(group_of(rule), spec))
    if wrong:
        raise ValueError(f"not everything can lie as the rules say:\n{first_lines(wrong)}")
    return found


def _matches(index: Index, rules: Rules) -> list[tuple[Where, Any]]:
    """The rule of each slot, and the `where` that it is under."""
    paths = index.structure.paths
    of_leaf: dict[int, int] = {}  # the number of the first rule that matches
    leaves = [select(index.structure, where) for where in rules]
    for number, matched in reversed([*enumerate(leaves)]):
        of_leaf |= dict.fromkeys(matched, number)
    items, missing, found = [*rules.items()], [], []
    taken = set(of_leaf.values())
    for number, (where, _) in enumerate(items[:-1]):
        if number not in taken:
            raise ValueError(
                f"{name_of(where)} comes too late: earlier rules match all that it does; put it before them"
            )
    for leaf in index.positions:
        number = of_leaf.get(leaf)
        aliases = [alias.leaf for alias in index.aliases.get(leaf, ()) if alias.leaf in of_leaf]
        for alias in aliases:
            other = of_leaf[alias]
            # A rule that is for both is no other word: the first that matches the source has been taken.
            if number is not None and leaf not in leaves[other] and items[other][1] != items[number][1]:
                raise ValueError(
                    f"{paths[leaf]!r} is {items[number][1]!r} by {name_of(items[number][0])}, and {paths[alias]!r}, "
                    f"which is tied to it, {items[other][1]!r} by {name_of(items[other][0])}: they are one array; the "
                    "rule of the first is enough"
                )
        if number is None:
            hint = f" (of which {paths[aliases[0]]!r} is an alias; write the source)" if aliases else ""
            missing.append(f"{paths[leaf]!r}{hint}")
        else:
            found.append(items[number])
    if missing:
        raise ValueError(
            f"no rule matches\n{first_lines(missing)}\nadd one for what is left, as the last: "
            '{..., "**": "split"}, or "whole" for what is small'
        )
    return found


def _in_a_vector(slots: Sequence[Slot], rules: Sequence[Any], axes: Axes) -> list[Placed]:
    others = [(slot, rule) for slot, rule in zip(slots, rules, strict=True) if rule != rules[0]]
    if others:
        slot, rule = others[0]
        raise ValueError(
            f"one vector lies in one way, but {slots[0].path!r} is {rules[0]!r} and {slot.path!r} is {rule!r}; give "
            'all of it one rule, or take form="stacks"'
        )
    rule = rules[0] if rules else "whole"
    if isinstance(rule, PartitionSpec):
        problem = next(_problems(rule, None, axes), "")
        if problem:
            raise ValueError(f"the rule of the vector, {as_text(rule)}: {problem}")
        spec = rule
    else:
        spec = PartitionSpec(axes.split_entry) if rule == "split" else PartitionSpec()
    return [Placed(group_of(rule), spec)] * len(slots)


def _checked(slot: Slot, rule: Any, axes: Axes, form: FormName, rows: int) -> tuple[str, PartitionSpec]:
    """What is wrong with a rule for a slot, and else its spec."""
    parts = axes.parts
    whole = PartitionSpec()
    if isinstance(rule, PartitionSpec):
        return next(_problems(rule, slot.shape, axes), ""), rule if slot.size else whole
    if rule == "owned":
        if rows % parts == 0:
            return "", whole
        fits = _first_axis(slot, parts) is not None
        return (
            f"{parts} devices cannot own the {rows} rows of its stack in equal parts; write "
            + ('"split", which divides each row, or "whole"' if fits else '"whole"'),
            whole,
        )
    if rule == "whole" or not slot.size:
        return "", whole
    axis = _first_axis(slot, parts)
    if axis is not None:
        return "", PartitionSpec(*[None] * axis, axes.split_entry)
    others = [name for name in axes.mesh.axis_names if name not in axes.split and axes.mesh.shape[name] > 1]
    fitting = [name for name in others if _first_axis(slot, axes.mesh.shape[name]) is not None]
    remedies = ['"owned", whole rows of its stack'] if form == "stacks" and rows % parts == 0 else []
    remedies += [f"a split over another axis of the mesh, {fitting[0]!r}"] if fitting else []
    return f"none of its axes is a multiple of {parts}; write " + ", or ".join([*remedies, '"whole"']), whole


def _first_axis(slot: Slot, parts: int) -> int | None:
    """The first axis that can be split into so many parts."""
    return next((axis for axis, size in enumerate(slot.shape) if size % parts == 0), None)


def _problems(spec: PartitionSpec, shape: tuple[int, ...] | None, axes: Axes) -> Iterator[str]:
    """What is wrong with a spec for a shape; for a vector, which is padded, that is `None`."""
    rank = 1 if shape is None else len(shape)
    if any(not isinstance(name, str) for entry in spec if entry is not None for name in _sequence(entry)):
        yield "its entries are None, the name of an axis of the mesh, or a tuple of names"
        return
    if len(spec) > rank:
        yield f"the spec has {len(spec)} entries, the array {rank} axes"
        return
    used = names_of(spec)
    unknown = [name for name in used if name not in axes.mesh.axis_names]
    if unknown:
        yield f"the mesh has no axis {unknown[0]!r}; its axes are {quoted(axes.mesh.axis_names)}"
        return
    if len(set(used)) < len(used):
        yield "an axis of the mesh stands in the spec twice"
    for dim, entry in enumerate(spec):
        names = names_in(entry)
        if len({name in axes.batch for name in names}) > 1:
            yield f"axis {dim} is split along the batch and along another axis of the mesh at once"
        parts = axes.parts_along(names)
        if shape is not None and shape[dim] % parts:
            yield f"its axis {dim} of size {shape[dim]} is no multiple of {parts}"


def group_of(rule: Any) -> str:
    """The name of the group of what lies by a rule."""
    if isinstance(rule, str):
        return rule
    spec = spec_of([*rule])
    return as_text(spec) if len(spec) else "whole"


def spec_of(entries: Sequence[Any]) -> PartitionSpec:
    """The spec with these entries; arrays that lie alike have equal ones."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)


def as_text(spec: PartitionSpec) -> str:
    """A spec in words that are the same in all versions of JAX.

    >>> as_text(PartitionSpec(None, "data"))
    "P(None, 'data')"
    """
    return f"P({', '.join(map(repr, spec))})"
