"""Where the frozen parameters of a layout lie: each by its own rule.

Beside a tree or a vector they are separate arrays; beside stacks they are rows of stacks.

Integers, keys and buffers, such as running statistics, do not count as parameters. They are whole on each device.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._forms.restructure import Restructure, halves_of
from .._slots.index import Index
from .._slots.parts import Rest, kept_arrays, with_kept_arrays
from .._tree.declare import holds_buffers
from .._tree.structure import Structure
from ._specs import (
    Axes,
    Lying,
    Matched,
    as_text,
    checked,
    first_divided,
    group_of,
    misfit_in_words,
    names_of,
    refuse,
    stack_spec,
)

_WHOLE = "whole"


class Frozen:
    """How each frozen parameter is sharded. Static.

    Shardings are kept by path, since models of one layout may differ in which of their frozen arrays are the same
    object.
    """

    def __init__(self, index: Index, matched: Mapping[int, Matched], axes: Axes, name: str) -> None:
        """Applies the rules to the leaves that have one. `name` is the form, as users call it."""
        self._axes = axes
        leaves = _frozen_leaves(index)
        by_alias = {alias.leaf: alias for alias in index.ties}
        rules = {leaf: matched.get(index.sources.get(leaf, leaf)) for leaf in leaves}
        # An alias is the array of its source. With a transform it is a separate array that follows the same rule.
        apart = [leaf for leaf in leaves if leaf not in by_alias or by_alias[leaf].transforms]
        slots = dict(zip(apart, index.described(apart), strict=True))
        groups = {leaf: group_of(rule[1]) if rule else _WHOLE for leaf, rule in rules.items()}
        self.groups = {index.structure.paths[leaf]: group for leaf, group in groups.items()}
        rows = Counter((slot.key, groups[leaf]) for leaf, slot in slots.items())
        found, wrong = dict[int, Lying](), list[str]()
        for leaf, slot in slots.items():
            where, rule = rules[leaf] or ("**", _WHOLE)
            count = rows[slot.key, groups[leaf]] if name == "stacks" else None
            problem, spec = checked(slot.shape, rule, axes, count, name)
            if problem:
                wrong.append(misfit_in_words(slot, where, problem))
            found[leaf] = self._lying(spec, is_owned=rule == "owned" and axes.devices > 1)
        refuse(wrong)
        self.rows = [(slots[leaf], found[leaf]) for leaf in apart]
        self.lying = {
            index.structure.paths[leaf]: found[leaf if leaf in found else index.sources[leaf]] for leaf in leaves
        }

    def _lying(self, spec: PartitionSpec, is_owned: bool) -> Lying:
        if is_owned:
            words = f"whole rows over {self._axes.split_entry!r}"
            return Lying(spec, words, self._axes.devices, True)
        return Lying(spec, as_text(spec) if names_of(spec) else _WHOLE, self._axes.devices_along(names_of(spec)), False)

    @property
    def are_owned(self) -> bool:
        """Whether any are rows that devices own. Then they are kept in stacks, whatever the loss takes."""
        return any(each.is_owned for each in self.lying.values())

    # -- Of a model: of each array that is no slot, in the order of `kept_arrays`

    def groups_of(self, rest: Rest[Any]) -> list[str]:
        """Returns the group of each array; only arrays of one group may lie in one stack."""
        return [self.groups.get(path, _WHOLE) for path in kept_arrays(rest)]

    def specs_of(self, rest: Rest[Any]) -> list[PartitionSpec]:
        """Returns the spec of each array outside stacks. There, a row of an owned stack is whole."""
        return [self.lying[path].spec if path in self.lying else PartitionSpec() for path in kept_arrays(rest)]

    def on_the_way(self, rest: Rest[Any]) -> tuple[Rest[Any], list[PartitionSpec]]:
        """Returns the arrays ready to be stacked, and their specs before that: owned ones are divided if possible."""
        kept, specs = kept_arrays(rest), self.specs_of(rest)
        for i, (path, array) in enumerate(kept.items()):
            if path in self.lying and self.lying[path].is_owned:
                specs[i] = first_divided(array.shape, self._axes) or PartitionSpec()
                # A row has no weak type, and one that is left out of its stack would be whole.
                kept[path] = _strong(array)
        return with_kept_arrays(rest, [*kept.values()]), specs

    def specs(self, rest: Rest[Any] | Restructure[Any]) -> Any:
        """Returns the specs of the arrays that the state of a step holds, as a tree like it."""
        if isinstance(rest, Rest):
            return with_kept_arrays(rest, self.specs_of(rest))
        singles, stacks, form, held = halves_of(rest)
        own, paths = self.specs_of(singles), [*kept_arrays(singles)]
        left = [None if i in held.locations else spec for i, spec in enumerate(own)]
        of_stacks = [self._spec_of_stack(paths[rows[0]]) for rows in held.members]
        return Restructure(with_kept_arrays(singles, left), form, held, type(stacks)(of_stacks))

    def _spec_of_stack(self, path: str) -> PartitionSpec:
        """Returns the spec of the stack in which the array at a path is a row."""
        lying = self.lying.get(path)
        return PartitionSpec() if lying is None else stack_spec(lying.spec, lying.is_owned, self._axes)


def frozen_sources(index: Index) -> frozenset[int]:
    """Returns the leaves of frozen parameters that a rule may select, each tie once."""
    return frozenset(_frozen_leaves(index)).difference(index.sources)


def _frozen_leaves(index: Index) -> list[int]:
    """Returns the leaves of frozen parameters, without buffers."""
    structure = index.structure
    buffers = _buffers(structure)
    return [leaf for leaf in structure.parameters if not index.trained[leaf] and leaf not in buffers]


def _buffers(structure: Structure) -> Collection[int]:
    nodes = [node for node in structure.nodes if holds_buffers(node.cls)]
    return {leaf for node in nodes for leaf in range(node.start, node.stop)}


def _strong(array: Any) -> Any:
    """Returns an array without weak type."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype)
    return jax.lax.convert_element_type(array, jnp.dtype(array.dtype)) if getattr(array, "weak_type", False) else array
