"""The place of each leaf of a model in each form: among the slots, in the canonical tree, in the vector."""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ._structure import Structure, getter, is_inexact
from ._ties import Alias


class Slot(NamedTuple):
    """One distinct trained parameter and its place in the vector."""

    path: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # in elements
    size: int  # in elements


Slot.__module__ = "treeparams"


_LEAF_AND_SOURCE = operator.attrgetter("leaf", "source")


class Index:
    """The places of leaves. Leaves are numbered in tree order, slots in the order of the leaves that they are at."""

    def __init__(self, structure: Structure, trained: tuple[bool, ...], ties: tuple[Alias, ...]) -> None:
        self.structure = structure
        self.are_ties_noted = False  # for the warning of ties that a trace has lost
        self.trained = trained  # of each leaf
        self.ties = ties
        self.sources = dict(map(_LEAF_AND_SOURCE, ties))
        self.distinct = tuple([i for i in structure.parameters if i not in self.sources])
        self.positions = tuple([i for i in self.distinct if trained[i]])  # the leaf of each slot
        self.by_leaf = {leaf: slot for slot, leaf in enumerate(self.positions)}  # the slot of each trained leaf
        at: dict[int, list[Alias]] = {}
        for alias in ties:
            at.setdefault(alias.source, []).append(alias)
            if trained[alias.source]:
                self.by_leaf[alias.leaf] = self.by_leaf[alias.source]
        self.aliases = {source: tuple(aliases) for source, aliases in at.items()}  # of each source

    @functools.cached_property
    def follows(self) -> dict[int, int]:
        """The source of each alias that has a transform, and so is trained if and only if its source is."""
        return {alias.leaf: alias.source for alias in self.ties if alias.transforms}

    @functools.cached_property
    def tied_to(self) -> dict[str, str]:
        """The further places of each parameter that has any, in words."""
        paths = self.structure.paths
        name = lambda alias: paths[alias.leaf] + (f" ({alias})" if alias.transforms else "")
        return {paths[source]: ", ".join(map(name, aliases)) for source, aliases in self.aliases.items()}

    # -- The slots

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        return self._described(self.positions)

    @functools.cached_property
    def frozen(self) -> tuple[Slot, ...]:
        """The frozen parameters, ties once, as if they were slots."""
        return self._described([i for i in self.distinct if not self.trained[i]])

    def _described(self, leaves: Iterable[int]) -> tuple[Slot, ...]:
        slots, offset, paths = [], 0, self.structure.paths
        for i in leaves:
            shape, dtype, _ = self.structure.spec(i)
            aliases = tuple(paths[alias.leaf] for alias in self.aliases.get(i, ()))
            slots.append(Slot(paths[i], aliases, shape, dtype, offset, math.prod(shape)))
            offset += slots[-1].size
        return tuple(slots)

    @functools.cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return [self.structure.spec(i).shape for i in self.positions]

    @functools.cached_property
    def dtypes(self) -> list[Any]:
        return [self.structure.spec(i).dtype for i in self.positions]

    @functools.cached_property
    def complex_slots(self) -> tuple[int, ...]:
        return tuple([slot for slot, dtype in enumerate(self.dtypes) if is_complex(dtype)])

    # -- A model taken apart and put together: pieces of its list of leaves, each taken by one call that runs in C

    @functools.cached_property
    def take_slots(self) -> Callable[[Any], tuple[Any, ...]]:
        """From the leaves of a model to one array per slot."""
        return getter(self.positions)

    @functools.cached_property
    def canonical_leaves(self) -> Callable[[Any], tuple[Any, ...]]:
        """From one value per slot and `None` to the leaves of the canonical tree."""
        nothing = len(self.positions)
        places = [nothing] * len(self.trained)
        for slot, leaf in enumerate(self.positions):
            places[leaf] = slot
        return getter(places)

    @functools.cached_property
    def canonical_treedef(self) -> Any:
        return jtu.tree_structure(self.canonical([0] * len(self.positions), self.structure.treedef))

    def canonical(self, slots: Sequence[Any], treedef: Any) -> PyTree:
        """The canonical tree of one value per slot."""
        return jtu.tree_unflatten(treedef, self.canonical_leaves([*slots, None]))

    @functools.cached_property
    def _kept(self) -> tuple[list[int], list[int]]:
        structure = self.structure
        others = [i for i in range(len(self.trained)) if i not in self.by_leaf]
        arrays = [i for i in others if structure.specs[i] is not None and structure.first[i] == i]
        return arrays, [i for i in others if structure.specs[i] is None]

    @functools.cached_property
    def kept_paths(self) -> tuple[str, ...]:
        """The paths of all arrays that are no slots, each object once."""
        return tuple(self.structure.paths[i] for i in self._kept[0])

    @functools.cached_property
    def take_kept(self) -> Callable[[Any], tuple[Any, ...]]:
        """From the leaves of a model to these arrays."""
        return getter(self._kept[0])

    @functools.cached_property
    def take_values(self) -> Callable[[Any], tuple[Any, ...]]:
        """From the leaves of a model to what is no array."""
        return getter(self._kept[1])

    @functools.cached_property
    def computed(self) -> tuple[tuple[int, Alias], ...]:
        """The trained aliases with a transform, and their slots."""
        return tuple(
            (self.by_leaf[each.leaf], each) for each in self.ties if each.transforms and self.trained[each.leaf]
        )

    def computed_from(self, slots: Sequence[Any]) -> list[Any]:
        """The values of `computed`, from one value per slot; `None` where that is none."""
        spec, positions = self.structure.spec, self.positions
        return [
            None if slots[slot] is None else alias.value_from(slots[slot], spec(positions[slot]))
            for slot, alias in self.computed
        ]

    @functools.cached_property
    def everywhere(self) -> Callable[[Any], tuple[Any, ...]]:
        """From slots + `None` + computed to the leaves of a tree with a value at every place of a tie."""
        nothing = len(self.positions)
        places = self.by_leaf | {alias.leaf: nothing + 1 + n for n, (_, alias) in enumerate(self.computed)}
        return getter([places.get(leaf, nothing) for leaf in range(len(self.trained))])

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The place of each leaf in slots + frozen + values + computed."""
        places = dict(self.by_leaf)
        others = [*self._kept[0], *self._kept[1], *(alias.leaf for _, alias in self.computed)]
        places |= {leaf: place for place, leaf in enumerate(others, start=len(self.positions))}
        first = self.structure.first
        return tuple([places[i] if i in places else places[first[i]] for i in range(len(first))])

    @functools.cached_property
    def all_leaves(self) -> Callable[[Any], tuple[Any, ...]]:
        """From slots + frozen + values + computed to the leaves of the model."""
        return getter(self.order)

    @functools.cached_property
    def tied_pairs(self) -> list[tuple[int, int]]:
        """The leaves that hold one array in the models that are put together."""
        return [(each.source, each.leaf) for each in self.ties if not each.transforms and self.trained[each.leaf]]


def common_dtype(dtypes: Iterable[Any]) -> np.dtype:
    """The dtype that holds all of these; JAX's float when there are none.

    >>> common_dtype([jnp.bfloat16, jnp.float16])
    dtype('float32')

    Beside others, floats of 8 bits count as bfloat16, which holds their values; JAX has no promotion for them.
    """
    distinct = list(dict.fromkeys(map(jnp.dtype, dtypes)))
    if len(distinct) == 1:
        return distinct[0]
    wide = [jnp.bfloat16 if is_inexact(each) and each.itemsize == 1 else each for each in distinct]
    with jax.numpy_dtype_promotion("standard"):  # here dtypes are mixed on purpose
        return jnp.dtype(jnp.result_type(*wide or [float]))


def is_complex(dtype: Any) -> bool:
    """Whether a dtype is complex."""
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def widened(dtype: Any) -> Any:
    """The dtype to sum and average in: at least single precision."""
    return jax.dtypes.canonicalize_dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
