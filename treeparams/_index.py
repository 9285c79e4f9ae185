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
        # The source of each alias that has a transform, and so is trained if and only if its source is.
        self.follows = {alias.leaf: alias.source for alias in ties if alias.transforms}
        # The leaves that hold one array in the models that are put together.
        self.tied_pairs = [(each.source, each.leaf) for each in ties if not each.transforms and trained[each.leaf]]
        # The trained aliases with a transform, and their slots.
        self.computed = [(self.by_leaf[each.leaf], each) for each in ties if each.transforms and trained[each.leaf]]
        self.shapes = [structure.spec(i).shape for i in self.positions]
        self.dtypes = [structure.spec(i).dtype for i in self.positions]
        self.complex_slots = tuple([slot for slot, dtype in enumerate(self.dtypes) if is_complex(dtype)])

        # A model is taken apart and put together by pieces of its list of leaves, each taken by one call in C.
        others = [i for i in range(len(trained)) if i not in self.by_leaf]
        kept = [i for i in others if structure.specs[i] is not None and structure.first[i] == i]
        values = [i for i in others if structure.specs[i] is None]
        self.kept_paths = tuple(structure.paths[i] for i in kept)  # of all arrays that are no slots, each object once
        self.take_slots, self.take_kept, self.take_values = getter(self.positions), getter(kept), getter(values)
        # The place of each leaf in slots + kept + values + computed.
        places = dict(self.by_leaf)
        rest = [*kept, *values, *(alias.leaf for _, alias in self.computed)]
        places |= {leaf: place for place, leaf in enumerate(rest, start=len(self.positions))}
        self.order = tuple([places[i] if i in places else places[first] for i, first in enumerate(structure.first)])
        self.all_leaves = getter(self.order)

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

    # -- Trees of one value per slot

    @functools.cached_property
    def canonical_leaves(self) -> Callable[[Any], tuple[Any, ...]]:
        """From one value per slot and `None` to the leaves of the canonical tree."""
        places = dict(zip(self.positions, range(len(self.positions)), strict=True))
        return getter([places.get(leaf, len(places)) for leaf in range(len(self.trained))])

    @functools.cached_property
    def canonical_treedef(self) -> Any:
        return jtu.tree_structure(self.canonical([0] * len(self.positions), self.structure.treedef))

    def canonical(self, slots: Sequence[Any], treedef: Any) -> PyTree:
        """The canonical tree of one value per slot."""
        return jtu.tree_unflatten(treedef, self.canonical_leaves([*slots, None]))

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
