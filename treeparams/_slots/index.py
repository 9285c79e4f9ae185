"""The place of each leaf of a model: among the slots, in the canonical tree, in the vector, in stacks."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu
import numpy as np

from .._tree.dtypes import is_complex
from .._tree.flattening import Avals, getter
from .._tree.structure import Structure
from .._tree.text import describe
from .._tree.types import PyTree, TreeDef
from .ties import Alias, followers


class Slot(NamedTuple):
    """One distinct trained parameter, and its place in the vector and in the stacks."""

    path: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # in elements
    size: int  # in elements
    key: str  # of its stack
    row: int


Slot.__module__ = "treeparams"


class Gathers(NamedTuple):
    """Functions that pick parts of the list of a model's leaves, and the way back: each is one call that runs in C."""

    slots: Callable[[Any], tuple[Any, ...]]  # from the leaves of a model to one array per slot
    kept: Callable[[Any], tuple[Any, ...]]  # ... to all arrays that are no slots, each object once
    values: Callable[[Any], tuple[Any, ...]]  # ... to the leaves that are no arrays, and to refs
    kept_paths: tuple[str, ...]
    order: tuple[int, ...]  # the position of each leaf in slots + kept + values + computed
    leaves: Callable[[Any], tuple[Any, ...]]  # from these to the leaves
    tied_pairs: list[tuple[int, int]]  # which of these are one array


class Index:
    """The places of leaves. Leaves are numbered in tree order, slots in the order of their leaves."""

    def __init__(self, structure: Structure, trained: tuple[bool, ...], ties: tuple[Alias, ...]) -> None:
        self.structure = structure
        self.forms: dict[Any, Any] = {}  # those that were asked for
        self.are_ties_noted = False  # for the warning of ties that a trace has lost
        self._avals = Avals()  # of arrays with the shapes of the slots
        # For accidents with ties: as of which change of the memory. A mask, or a callable, makes an index at each call.
        self.checked: dict[str, int] = structure.remember(("checked", trained, ties), dict)
        self.trained = trained  # of each leaf
        self.ties = ties
        self.sources = {alias.leaf: alias.source for alias in ties}
        self.distinct = tuple([i for i in structure.parameters if i not in self.sources])
        self.positions = tuple([i for i in self.distinct if trained[i]])  # the leaf of each slot
        self.by_leaf = {leaf: slot for slot, leaf in enumerate(self.positions)}  # the slot of each trained leaf
        self.aliases: dict[int, list[Alias]] = {}  # of each source
        self.follows = followers(ties)
        self.computed: list[tuple[int, Alias]] = []  # aliases with a transform that are trained, and their slots
        for alias in ties:
            self.aliases.setdefault(alias.source, []).append(alias)
            if trained[alias.source]:
                self.by_leaf[alias.leaf] = self.by_leaf[alias.source]
                if alias.transforms:
                    self.computed.append((self.by_leaf[alias.leaf], alias))

    @functools.cached_property
    def tied_to(self) -> dict[str, str]:
        """The aliases of each tied parameter, in words."""
        paths = self.structure.paths
        return {
            paths[source]: ", ".join(paths[each.leaf] + f" ({each})" * bool(each.transforms) for each in aliases)
            for source, aliases in self.aliases.items()
        }

    # -- The slots

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        return self.described(self.positions)

    @property
    def size(self) -> int:
        """The number of trained elements; a tied parameter counts once."""
        return sum(slot.size for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """The bytes of the trained leaves; a tied parameter counts once."""
        return sum(slot.size * slot.dtype.itemsize for slot in self.slots)

    @functools.cached_property
    def frozen(self) -> tuple[Slot, ...]:
        """The frozen parameters, each once, described like slots."""
        return self.described([i for i in self.distinct if not self.trained[i]])

    def described(self, leaves: Iterable[int]) -> tuple[Slot, ...]:
        """Describes these parameters as if they, and no others, were slots."""
        slots, offset, paths = [], 0, self.structure.paths
        rows: dict[str, int] = {}
        for i in leaves:
            shape, dtype, _ = self.structure.spec(i)
            aliases = tuple(paths[alias.leaf] for alias in self.aliases.get(i, ()))
            key = describe(self.structure.spec(i))
            rows[key] = row = rows.get(key, -1) + 1
            slots.append(Slot(paths[i], aliases, shape, dtype, offset, math.prod(shape), key, row))
            offset += slots[-1].size
        return tuple(slots)

    @functools.cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return [self.structure.spec(i).shape for i in self.positions]

    def have_shapes(self, arrays: Sequence[Any]) -> bool:
        """Returns whether these are arrays, one for each slot, of its shape."""
        return self._avals.fit(arrays, lambda: [getattr(each, "shape", None) for each in arrays] == self.shapes)

    @functools.cached_property
    def dtypes(self) -> list[Any]:
        return [self.structure.spec(i).dtype for i in self.positions]

    @functools.cached_property
    def complex_slots(self) -> tuple[int, ...]:
        return tuple([slot for slot, dtype in enumerate(self.dtypes) if is_complex(dtype)])

    @functools.cached_property
    def narrow(self) -> dict[int, int]:
        """The parameters with fewer bits than single precision, in which small steps round to zero, with their numbers.

        Frozen ones are among them.
        """
        spec = self.structure.spec
        return {leaf: n for n, leaf in enumerate(i for i in self.distinct if spec(i).dtype.itemsize < 4)}

    @functools.cached_property
    def narrow_slots(self) -> tuple[int, ...]:
        """The slots of those that train."""
        return tuple([self.by_leaf[i] for i in self.narrow if self.trained[i]])

    # -- Trees

    @functools.cached_property
    def gathers(self) -> Gathers:
        """The functions that take a model apart, made when a model is first taken apart.

        Each leaf is one of four kinds: at a slot, an array that is kept, a value that is not an array, or computed from
        a slot. A leaf that holds the array of an earlier leaf shares the place of that leaf. A ref counts as a value:
        JAX lets a program write it, but not return it.
        """
        structure = self.structure
        others = [i for i in range(len(self.trained)) if i not in self.by_leaf]
        kept = [i for i in others if structure.is_array(i) and structure.first[i] == i]
        values = [i for i in others if not structure.is_array(i)]
        rest = [*kept, *values, *(alias.leaf for _, alias in self.computed)]
        positions = self.by_leaf | {leaf: n for n, leaf in enumerate(rest, start=len(self.positions))}
        order = tuple([positions[i if i in positions else first] for i, first in enumerate(structure.first)])
        paths = tuple([structure.paths[i] for i in kept])
        tied = [(each.source, each.leaf) for each in self.ties if not each.transforms and self.trained[each.leaf]]
        return Gathers(getter(self.positions), getter(kept), getter(values), paths, order, getter(order), tied)

    @functools.cached_property
    def canonical_leaves(self) -> Callable[[Any], tuple[Any, ...]]:
        """The function from one value per slot, followed by `None`, to the leaves of the canonical tree."""
        slots = {leaf: slot for slot, leaf in enumerate(self.positions)}  # without aliases, unlike `by_leaf`
        return getter([slots.get(leaf, len(slots)) for leaf in range(len(self.trained))])

    @functools.cached_property
    def canonical_treedef(self) -> TreeDef:
        return jtu.tree_structure(self.canonical([0] * len(self.positions), self.structure.treedef))

    def canonical(self, slots: Sequence[Any], treedef: TreeDef) -> PyTree:
        """Returns the canonical tree of one value per slot."""
        return jtu.tree_unflatten(treedef, self.canonical_leaves([*slots, None]))

    def computed_from(self, slots: Sequence[Any]) -> list[Any]:
        """Returns the values of `computed` from one value per slot; `None` stays `None`."""
        spec, positions = self.structure.spec, self.positions
        return [
            None if slots[slot] is None else alias.value_from(slots[slot], spec(positions[slot]))
            for slot, alias in self.computed
        ]

    @functools.cached_property
    def everywhere(self) -> Callable[[Any], tuple[Any, ...]]:
        """The function from slots + `None` + computed to the leaves of a tree with a value at every path of a tie."""
        nothing = len(self.positions)
        positions = self.by_leaf | {alias.leaf: nothing + 1 + n for n, (_, alias) in enumerate(self.computed)}
        return getter([positions.get(leaf, nothing) for leaf in range(len(self.trained))])
