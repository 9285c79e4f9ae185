"""Where the frozen parameters of a layout lie: each by its own rule.

Integers, keys and buffers, such as running statistics, do not count as parameters. They are whole on each device.
"""

from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from .._forms.restructure import Restructure, halves_of
from .._slots.index import Index
from .._slots.parts import Rest, kept_arrays, with_kept_arrays
from .._tree.declare import holds_buffers
from ._specs import Axes, Matched, Place, checked, group_of, misfit_in_words, refuse


class Frozen:
    """How each frozen parameter is sharded. Static.

    Shardings are kept by path, since models of one layout may differ in which of their frozen arrays are the same
    object.
    """

    def __init__(self, index: Index, matched: Mapping[int, Matched], axes: Axes, name: str) -> None:
        """Applies the rules to the leaves that have one. `name` is the form, as users call it."""
        leaves, paths = _frozen_leaves(index), index.structure.paths
        by_alias = {alias.leaf: alias for alias in index.ties}
        rules = {leaf: matched.get(index.sources.get(leaf, leaf), ("**", "whole")) for leaf in leaves}
        # An alias is the array of its source. With a transform it is a separate array that follows the same rule.
        apart = [leaf for leaf in leaves if leaf not in by_alias or by_alias[leaf].transforms]
        self.rows = list[tuple[Any, Place]]()
        self._groups = {paths[leaf]: group_of(rule) for leaf, (_, rule) in rules.items()}
        wrong = list[str]()
        for leaf, slot in zip(apart, index.described(apart), strict=True):
            where, rule = rules[leaf]
            # No update reads a frozen row, so no device need own it: it is split if it can be.
            problem, place = checked(slot.shape, rule, axes, 0 if name == "stacks" else None, name)
            wrong += [misfit_in_words(slot, where, problem)] if problem else []
            self.rows.append((slot, place))
        refuse(wrong)
        found = {leaf: place.spec for leaf, (_, place) in zip(apart, self.rows, strict=True)}
        self._specs = {paths[leaf]: found[leaf if leaf in found else index.sources[leaf]] for leaf in leaves}

    def groups_of(self, rest: Rest[Any]) -> list[str]:
        """Returns the group of each array that is no slot; only arrays of one group may lie in one stack."""
        return [self._groups.get(path, "whole") for path in kept_arrays(rest)]

    def specs_of(self, rest: Rest[Any]) -> list[PartitionSpec]:
        """Returns the spec of each array that is no slot, outside stacks."""
        return [self._specs.get(path, PartitionSpec()) for path in kept_arrays(rest)]

    def specs(self, rest: Rest[Any] | Restructure[Any]) -> Any:
        """Returns the specs of the arrays that the state of a step holds, as a tree like it."""
        if isinstance(rest, Rest):
            return with_kept_arrays(rest, self.specs_of(rest))
        singles, stacks, form, held = halves_of(rest)
        own = self.specs_of(singles)
        left = [None if i in held.locations else spec for i, spec in enumerate(own)]
        of_stacks = [PartitionSpec(None, *own[rows[0]]) for rows in held.members]
        return Restructure(with_kept_arrays(singles, left), form, held, type(stacks)(of_stacks))


def frozen_sources(index: Index) -> frozenset[int]:
    """Returns the leaves of frozen parameters that a rule may select, each tie once."""
    return frozenset(_frozen_leaves(index)).difference(index.sources)


def _frozen_leaves(index: Index) -> list[int]:
    """Returns the leaves of frozen parameters, without buffers."""
    nodes = [node for node in index.structure.nodes if holds_buffers(node.cls)]
    buffers = {leaf for node in nodes for leaf in range(node.start, node.stop)}
    return [leaf for leaf in index.structure.parameters if not index.trained[leaf] and leaf not in buffers]
