"""From rules over paths to the place of each parameter, checked against its shape and the mesh; arrays put there."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, auto_axes

from .._forms.mesh import lay
from .._slots.where import name_of
from .._tree.text import describe, first_lines, quoted
from .._tree.types import PyTree, is_key

Rule = str | PartitionSpec
Rules = Mapping[Any, Rule]
# The `where` that selects a parameter, and its rule.
_Matched = tuple[Any, Rule]
FormName = Literal["tree", "vector", "stacks"]
AxisNames = str | Sequence[str] | None
_WORDS = ("split", "owned", "whole")


# What an error calls an array that is to lie by a rule; the rule; its shape, or that of the row of a stack; and how
# many rows of its shape devices are to own (`None` if it is no row of a stack).
_Asked = tuple[str, _Matched, tuple[int, ...], int | None]


class Axes(NamedTuple):
    """The axes of a mesh, which of them parameters are split over, and which the batch is split over."""

    mesh: Mesh | AbstractMesh
    split: tuple[str, ...]
    batch: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, axis: AxisNames, batch_axis: AxisNames) -> "Axes":
        """Checks the axes that a user chose, and returns them."""
        if not isinstance(mesh, (Mesh, AbstractMesh)):
            raise TypeError(f'expected a mesh, such as jax.make_mesh((8,), ("data",)), got {describe(mesh)}')
        given = {"axis": axis, "batch_axis": batch_axis}
        for name, value in given.items():
            if not (value is None or isinstance(value, str) or all(isinstance(each, str) for each in _sequence(value))):
                raise TypeError(f"{name} must be the name of an axis of the mesh, or a tuple of names, got {value!r}")
            unknown = [each for each in _axes_in(value) if each not in mesh.axis_names]
            if unknown:
                raise ValueError(f"{name}: the mesh has no axis {unknown[0]!r}; its axes are {quoted(mesh.axis_names)}")
        split, batch = _axes_in(axis), _axes_in(batch_axis)
        if not split and not batch:
            if len(mesh.axis_names) > 1:
                first = "name with axis= those to split parameters over"
                second = "with batch_axis= those to split the batch over, if they differ"
                raise ValueError(f"the mesh has the axes {quoted(mesh.axis_names)}: {first}, and {second}")
            split = tuple(mesh.axis_names)
        split, batch = split or batch, batch or split
        if not set(split) <= set(batch):
            what = f"axis={axis!r}, but the batch is split over {batch_axis!r}"
            why = "devices along an axis that does not split the batch would all compute the same"
            tensor = "for tensor parallelism, which XLA does, write a PartitionSpec as the rule"
            raise ValueError(f"{what}: {why}. Name it in batch_axis too; {tensor}")
        if AxisType.Manual in mesh.axis_types:
            raise ValueError("axes of the mesh are manual, as inside jax.shard_map; make the plan outside of it")
        if problem := _mixed(mesh, batch):
            raise ValueError(problem)
        return cls(mesh, split, batch)

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
        kept = [None if {*_axes_in(entry)} & {*self.batch} else entry for entry in spec]
        return spec_of(kept)

    def check(self, rules: Rules) -> None:
        """Checks rules without regard to the parameters that they select."""
        if not isinstance(rules, Mapping):
            raise TypeError(
                f'rules: expected a dictionary {{where: rule}}, such as {{"**": "split"}}, got {describe(rules)}'
            )
        for where, rule in rules.items():
            if rule not in _WORDS if isinstance(rule, str) else not isinstance(rule, PartitionSpec):
                raise ValueError(
                    f'{name_of(where)}: a rule is "split", "owned", "whole" or a PartitionSpec, got {rule!r}'
                )
            if isinstance(rule, PartitionSpec) and (problem := next(_problems(rule, self), "")):
                raise ValueError(f"{name_of(where)}, {_axes_as_text(rule)}: {problem}")

    def places(self, asked: Sequence[_Asked], name: str) -> "list[Place]":
        """Returns the place of each array in a form of this name; raises an error that lists those that do not fit."""
        found = [_place(shape, rule, self, rows, name) for _, (_, rule), shape, rows in asked]
        pairs = zip(asked, found, strict=True)
        wrong = [f"{who}, by {name_of(where)}: {problem}" for (who, (where, _), *_), (problem, _) in pairs if problem]
        if wrong:
            raise ValueError(f"some parameters do not fit their rules:\n{first_lines(dict.fromkeys(wrong))}")
        return [place for _, place in found]


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
        words = _axes_as_text(self.spec) if axes_named(self.spec) else "whole"
        rows = f"whole rows over {axes.split_entry!r}"
        return rows if self.is_owned else f"{words}, {rows} in the update" if self.is_lent else words

    def devices(self, axes: Axes) -> int:
        """Returns the number of devices that share one such array."""
        return axes.along([*axes_named(self.spec), *(axes.split if self.is_owned else ())])


def _mixed(mesh: Mesh | AbstractMesh, names: Sequence[str]) -> str:
    """Returns why JAX cannot split arrays over these axes of a mesh; an empty text if it can."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    automatic = [name for name in names if kinds.get(name) == AxisType.Auto]
    if not automatic or AxisType.Explicit not in kinds.values():
        return ""
    return (
        f"the mesh has explicit axes, and {quoted(automatic)} is automatic; JAX splits no array over both: make all of "
        "them automatic, jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * n), or all explicit"
    )


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else [value]


def _axes_in(entry: AxisNames) -> tuple[str, ...]:
    """Returns the axes of the mesh in one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axes_named(spec: Rule) -> tuple[str, ...]:
    """Returns the axes of the mesh in all entries of a `PartitionSpec`; a word names none."""
    return () if isinstance(spec, str) else tuple([name for entry in spec for name in _axes_in(entry)])


def _problems(spec: PartitionSpec, axes: Axes) -> Iterator[str]:
    """Yields the problems of a spec over these axes, whichever arrays it is for."""
    if any(not isinstance(name, str) for entry in spec if entry is not None for name in _sequence(entry)):
        yield "its entries must be None, the name of an axis of the mesh, or a tuple of names"
        return
    used = axes_named(spec)
    unknown = [name for name in used if name not in axes.mesh.axis_names]
    if unknown:
        yield f"the mesh has no axis {unknown[0]!r}; its axes are {quoted(axes.mesh.axis_names)}"
    if problem := _mixed(axes.mesh, used):
        yield problem
    if len(set(used)) < len(used):
        yield "the spec names an axis of the mesh twice"
    for dim, entry in enumerate(spec):
        if len({name in axes.batch for name in _axes_in(entry)}) > 1:
            yield f"axis {dim} is split along the batch and along another axis of the mesh at once"


def _place(shape: tuple[int, ...], rule: Rule, axes: Axes, rows: int | None, name: str) -> tuple[str, Place]:
    """Returns the problem of a rule for an array, if there is one, and the place that it gives."""
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
    for dim, devices in enumerate(map(axes.along, map(_axes_in, spec))):
        if shape[dim] % devices:
            return f"its axis {dim} of size {shape[dim]} is no multiple of {devices}"
    return ""


def spec_of(entries: Sequence[Any]) -> PartitionSpec:
    """Returns the spec with these entries, without `None` at the end, so that equal shardings have equal specs."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)


def _axes_as_text(spec: PartitionSpec) -> str:
    """Formats a spec in the same way for all versions of JAX.

    >>> _axes_as_text(PartitionSpec(None, "data"))
    "P(None, 'data')"
    """
    return f"P({', '.join(map(repr, spec))})"


# -- Arrays are put in place, whether they are values, traced or shapes; no device ever holds all of them --------------


def put_leaf(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct, sharding: NamedSharding, is_own: bool = False) -> Any:
    """Places an array on a mesh, in a new buffer unless `is_own` says it has one; a shape gets its sharding."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        raise ValueError(
            "an AbstractMesh has no devices, so you can only look at a plan over it; make the mesh with jax.make_mesh, "
            "or pass jax.ShapeDtypeStructs, as jax.eval_shape returns them"
        )
    if isinstance(leaf, Tracer):
        return lay(leaf, sharding)
    if isinstance(leaf, np.ndarray):
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))
    if sharding.is_fully_addressable:
        # Copy first: `device_put` does not copy an array that is already on the device, even with `may_alias=False`.
        return jax.device_put(leaf if is_own else jnp.copy(leaf), sharding)
    if not getattr(leaf, "is_fully_addressable", True):
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    # Over several processes each gives what its own devices have.
    has_keys = is_key(leaf)
    values = np.asarray(jax.random.key_data(leaf) if has_keys else leaf)
    array = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if has_keys else array


def mesh_within(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns the mesh of the current trace: inside `automatic`, the axes of a mesh have another type."""
    within = jax.sharding.get_abstract_mesh()
    return mesh if within.empty else within


def automatic(f: Callable[..., Any], shardings: PyTree, mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """Returns a function of traced arrays in which XLA alone decides their placement, except for the results."""
    if AxisType.Explicit not in mesh.axis_types:
        return lambda *args: lay(f(*args), shardings)
    # JAX 0.7 takes no concrete mesh here.
    types = jax.tree.map(lambda each: NamedSharding(each.mesh.abstract_mesh, each.spec), shardings)
    return auto_axes(f, out_sharding=types)
