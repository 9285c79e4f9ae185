"""The layout of a model: which leaves are trained, which of them are one, and where each lies in the vector.

A layout is static. It holds paths, shapes, dtypes and bools but no array, so it is hashable, goes into `jax.jit` as a
static argument or a closure, and is the same for all models of one kind. Made outside a `jit` and passed in, it tells
what the traced arguments no longer know: which of them are one array.
"""

import functools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ._describe import differences, in_columns
from ._groups import Alias, Group, settle
from ._paths import nearest
from ._select import Choice, Where, change
from ._structure import Structure, common_dtype


class Slot(NamedTuple):
    """One distinct trained parameter and its place in the vector."""

    path: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    offset: int  # in elements
    size: int  # in elements


class Layout:
    """Which leaves of a model are trained and which of them are one: the static map of its parameters.

    Made by `tp.layout`. Two layouts are equal when they describe models of the same structure, static fields, shapes,
    dtypes, trained leaves and ties.

    >>> import equinox as eqx, jax, treeparams as tp
    >>> layout = tp.layout(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
    >>> print(layout)
    path    shape  dtype    offset  size  tied to
    weight  2,3    float32       0     6
    bias    2      float32       6     2
    2 slots, 8 elements, 32 bytes
    >>> layout["bias"].offset, layout.freeze("weight").paths
    (6, ('bias',))
    """

    def __init__(self, structure: Structure, trained: tuple[bool, ...], groups: tuple[Group, ...]) -> None:
        """For this library's own use; users write `tp.layout(model)`."""
        # Equal models share one layout, so it must not change.
        vars(self).update(structure=structure, trained=trained, groups=groups)

    structure: Structure
    trained: tuple[bool, ...]  # of each leaf
    groups: tuple[Group, ...]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Layout does not change; {name!r} cannot be set. layout.freeze and thaw make another")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Layout does not change; {name!r} cannot be deleted")

    # -- What it says

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The distinct trained parameters, in tree order of the paths that name them."""
        paths, slots, offset = self.structure.paths, [], 0
        for i, aliases in zip(self.positions, self.aliases, strict=True):
            spec = self.structure.spec(i)
            size = math.prod(spec.shape)
            names = tuple(paths[alias.leaf] for alias in aliases)
            slots.append(Slot(paths[i], names, spec.shape, spec.dtype, offset, size))
            offset += size
        return tuple(slots)

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each slot, in order."""
        return tuple(slot.path for slot in self.slots)

    @functools.cached_property
    def size(self) -> int:
        """The number of trained elements, ties once."""
        return sum(slot.size for slot in self.slots)

    @functools.cached_property
    def nbytes(self) -> int:
        """The bytes of the trained leaves, ties once."""
        return sum(slot.size * jnp.dtype(slot.dtype).itemsize for slot in self.slots)

    @functools.cached_property
    def dtype(self) -> Any:
        """The dtype of the vector: `jnp.result_type` of the slots that have elements; JAX's float when none has."""
        return common_dtype(slot.dtype for slot in self.slots if slot.size)

    @functools.cached_property
    def ties(self) -> Mapping[str, tuple[str, ...]]:
        """The further paths of each parameter that has any, frozen ones included: `{path: (aliases, ...)}`."""
        paths = self.structure.paths
        ties = {paths[group.source]: tuple(paths[alias.leaf] for alias in group.aliases) for group in self.groups}
        return types.MappingProxyType(ties)

    @property
    def mask(self) -> PyTree[bool]:
        """A tree of the model's structure: `True` at each trained parameter, aliases included."""
        return jtu.tree_unflatten(self.structure.treedef, self.trained)

    def __getitem__(self, path: str) -> Slot:
        """The slot at a path; an alias finds its slot.

        Raises:
            KeyError: there is none; the message names the nearest.
        """
        leaf = self.structure.index.get(path)
        if leaf in self.by_leaf:
            return self.slots[self.by_leaf[leaf]]
        if leaf is None:
            known = [self.structure.paths[i] for i in self.by_leaf]
            raise KeyError(f"{path!r} is no path of the model{nearest(path, known)}")
        if self.structure.is_parameter(leaf):
            raise KeyError(f"{path!r} is frozen, so it has no slot; layout.thaw({path!r}) gives it one")
        raise KeyError(f"{self.structure.describe(leaf)} is no parameter")

    # -- A new word

    def freeze(self, where: Where) -> "Layout":
        """The layout with what `where` selects frozen. Ties are remembered.

        Raises:
            ValueError: `where` selects nothing, or half of a tie.
        """
        return self.changed(freeze=where)

    def thaw(self, where: Where) -> "Layout":
        """The layout with what `where` selects trained, also where a class declares it frozen.

        Raises:
            ValueError: `where` selects nothing, or half of a tie.
        """
        return self.changed(thaw=where)

    def changed(self, freeze: Where | None = None, thaw: Where | None = None) -> "Layout":
        """The layout after both words; only then are the ties looked at."""
        choice = Choice({i: self.trained[i] for i in self.structure.parameters}, {})
        choice = change(self.structure, change(self.structure, choice, freeze, False), thaw, True)
        return Layout(self.structure, settle(self.structure, self.groups, choice), self.groups)

    def diff(self, other: "Layout") -> str:
        """What differs between two layouts, in words, one line each; empty when they are equal."""
        lines = list(differences(self.structure, other.structure))
        for path, i in self.structure.index.items():
            j = other.structure.index.get(path)
            if j is not None and self.trained[i] != other.trained[j]:
                here, there = ("trained", "not") if self.trained[i] else ("not trained", "trained")
                lines.append(f"{path!r} is {here} in the first, {there} in the second")
        for path in dict.fromkeys([*self.ties, *other.ties]):
            here, there = self.ties.get(path, ()), other.ties.get(path, ())
            if here != there:
                lines.append(f"{path!r} is tied to {list(here)} in the first, to {list(there)} in the second")
        if not lines and self.groups != other.groups:
            lines.append("their ties have other transforms")
        return "\n".join(lines)

    # -- As a value

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.structure, self.trained, self.groups))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (
            self.trained == other.trained and self.groups == other.groups and self.structure == other.structure
        )

    def __reduce__(self) -> Any:
        return Layout, (self.structure, self.trained, self.groups)

    def __repr__(self) -> str:
        return f"Layout({_count(self.slots)}, {self.size} elements, {self.dtype}; {len(self.frozen)} frozen)"

    def __str__(self) -> str:
        paths, tied = self.structure.paths, self._tied
        rows = [
            [slot.path or '""', _shape(slot.shape), str(slot.dtype), f"{slot.offset:,}", f"{slot.size:,}", tied(i)]
            for i, slot in zip(self.positions, self.slots, strict=True)
        ]
        held = 0
        for i in self.frozen:
            spec = self.structure.spec(i)
            size = math.prod(spec.shape)
            held += size
            rows.append([paths[i] or '""', _shape(spec.shape), str(spec.dtype), "frozen", f"{size:,}", tied(i)])
        lines = in_columns(["path", "shape", "dtype", "offset", "size", "tied to"], rows, right=[3, 4])
        total = f"{_count(self.slots)}, {self.size:,} elements, {self.nbytes:,} bytes"
        return "\n".join([*lines, total + (f"; {held:,} elements frozen" if self.frozen else "")])

    def _tied(self, source: int) -> str:
        return ", ".join(
            self.structure.paths[alias.leaf] + (f" ({alias.formula})" if alias.chain else "")
            for alias in self._by_source.get(source, ())
        )

    # -- For the other files of this library

    @functools.cached_property
    def _by_source(self) -> dict[int, tuple[Alias, ...]]:
        return {group.source: group.aliases for group in self.groups}

    @functools.cached_property
    def _distinct(self) -> tuple[int, ...]:
        aliases = {alias.leaf for group in self.groups for alias in group.aliases}
        return tuple(i for i in self.structure.parameters if i not in aliases)

    @functools.cached_property
    def positions(self) -> tuple[int, ...]:
        """The leaf of each slot."""
        return tuple(i for i in self._distinct if self.trained[i])

    @functools.cached_property
    def frozen(self) -> tuple[int, ...]:
        """The leaf of each frozen parameter, ties once."""
        return tuple(i for i in self._distinct if not self.trained[i])

    @functools.cached_property
    def aliases(self) -> tuple[tuple[Alias, ...], ...]:
        """The further places of each slot."""
        return tuple(self._by_source.get(i, ()) for i in self.positions)

    @functools.cached_property
    def by_leaf(self) -> dict[int, int]:
        """The slot of each trained leaf, aliases included."""
        slots = dict(zip(self.positions, range(len(self.positions)), strict=True))
        return slots | {alias.leaf: slot for slot, aliases in enumerate(self.aliases) for alias in aliases}

    @functools.cached_property
    def canonical_treedef(self) -> Any:
        """The treedef of the canonical tree."""
        return jtu.tree_structure(self.canonical([0] * len(self.positions)))

    def canonical(self, values: Sequence[Any], treedef: Any = None) -> PyTree:
        """The canonical tree of one value per slot: model-shaped, `None` everywhere else."""
        leaves: list[Any] = [None] * len(self.trained)
        for position, value in zip(self.positions, values, strict=True):
            leaves[position] = value
        return jtu.tree_unflatten(self.structure.treedef if treedef is None else treedef, leaves)


def _count(slots: Sequence[Slot]) -> str:
    return f"{len(slots)} slot{'' if len(slots) == 1 else 's'}"


def _shape(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape)) or "()"


Layout.__module__ = Slot.__module__ = "treeparams"
