"""groups: a transformation for each part of a model."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._layout import Layout, Trainable, index_of
from .._match import per_slot
from .._parts import Parts
from .._where import Where, name_of, select
from ._context import around, given
from ._state import ModelTransformation, Transformation, extended, is_placeholder
from ._whole import TakesNone, standing


class Names:
    """What a `GroupsState` is of: the groups and the leaves in each; static, without leaves."""

    def __init__(self, names: tuple[str, ...], paths: tuple[tuple[str, ...], ...] | None) -> None:
        self.names = names
        self.paths = paths  # `None` where `optax.tree.map_params` asks what a state looks like: any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Names) or self.names != other.names:
            return False
        if self.paths is None or other.paths is None:  # as with `Roles`
            self.paths = other.paths = self.paths or other.paths
        return self.paths == other.paths

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"Names({', '.join(self.names)})"


jtu.register_pytree_node(Names, lambda names: ((), names), lambda names, _: names)


class GroupsState(NamedTuple):
    """The state of `optim.groups`.

    Attributes:
        names: the groups and the leaves in each; static.
        states: one per group.
    """

    names: Names
    states: tuple[Any, ...]


GroupsState.__module__ = "treeparams.optim"


def groups(transformations: Mapping[Any, Transformation], trainable: Trainable = None) -> ModelTransformation:
    """A transformation for each part of a model; the first that selects a leaf gets it.

    >>> import equinox as eqx, jax, optax, treeparams as tp
    >>> from treeparams import optim
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> tx = optim.groups({"**.bias": optax.sgd(0.1), "layers.1": optax.adam(1e-3), "**": optax.adam(1e-4)})
    >>> print(optim.report(tx, mlp))
    path             shape  dtype    group
    layers.0.weight  4,2    float32  **
    layers.0.bias    4      float32  **.bias
    layers.1.weight  1,4    float32  layers.1
    layers.1.bias    1      float32  **.bias

    It takes a whole model, as `optim.trainable` does; inside of that, or of a chain in it, it takes what it is given.

    Args:
        transformations: `{where: tx}`, with any `where` of `tp.layout` that is hashable. Each `tx` sees the canonical
            tree of its own leaves alone, so a norm in it is that of the group.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        A transformation, with a `GroupsState` in its state; `optim.adjust(state, where, ...)` sets the rates of one.

    Raises:
        ValueError: two groups read alike; `init`: a trained leaf is in no group; a `where` selects nothing; as
            `optim.trainable`.
        TypeError: a group has no transformation; as `optim.trainable`.
    """
    return standing(_Groups(transformations), trainable)


class _Groups:
    """The transformation on a canonical tree."""

    def __init__(self, transformations: Mapping[Where, Any]) -> None:
        self.wheres = tuple(transformations)
        self.txs = tuple(extended(tx) for tx in transformations.values())
        self.names = tuple(map(label, self.wheres))
        if len(set(self.names)) < len(self.names):
            raise ValueError(
                f"two groups read alike, so optim.adjust could not tell them apart: {', '.join(self.names)}"
            )

    def init(self, params: PyTree) -> GroupsState:
        if is_placeholder(params):
            return GroupsState(Names(self.names, None), tuple(tx.init(params) for tx in self.txs))
        parts, members = self._divided(params)
        shown = [parts.canonical(self._of(each, parts.slots)) for each in members]
        paths = tuple(tuple(parts.layout.paths[i] for i in each) for each in members)
        states = tuple(tx.init(tree) for tx, tree in zip(self.txs, shown, strict=True))
        return GroupsState(Names(self.names, paths), states)

    def update(
        self, updates: PyTree, state: GroupsState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, GroupsState]:
        parts, members = self._divided(params)
        index, values = parts.index, parts.slots
        above = around()
        if above is not None and above.is_partial and any(isinstance(tx, TakesNone) for tx in self.txs):
            raise ValueError(
                "some leaves have no gradient in this call, and in a group optim.accumulate does not see this; let it "
                "stand outermost: optim.accumulate(optim.groups(...), every)"
            )
        gradients, steps, states = per_slot(index, updates, "first"), [None] * len(values), list(state.states)
        for number, (tx, each) in enumerate(zip(self.txs, members, strict=True)):
            if each:
                grads, leaves = (parts.canonical(self._of(each, given)) for given in (gradients, values))
                own = {name: self._argument(name, value, each, parts) for name, value in extra.items()}
                step, states[number] = tx.update(grads, states[number], leaves, **own)
                for i, value in enumerate(per_slot(index, step, "first")):
                    steps[i] = value if i in each else steps[i]
        return parts.canonical(steps), GroupsState(state.names, tuple(states))

    def _argument(self, name: str, value: Any, members: Collection[int], parts: Parts) -> Any:
        """An argument as a line search in one group understands it: along its own leaves, the others as they are."""
        if name == "grad":
            return parts.canonical(self._of(members, per_slot(parts.index, value, "first")))
        if name != "value_fn":
            return value

        @functools.wraps(value)
        def along_members(params: PyTree, *args: Any, **kwargs: Any) -> Any:
            found = per_slot(parts.index, params, "first")
            whole = [found[i] if i in members else other for i, other in enumerate(parts.slots)]
            return value(parts.canonical(whole), *args, **kwargs)

        return along_members

    def _of(self, members: Collection[int], values: Sequence[Any]) -> list[Any]:
        return [value if i in members else None for i, value in enumerate(values)]

    def _divided(self, params: PyTree) -> tuple[Parts, list[dict[int, None]]]:
        """What is given, taken apart, and the slots of each group."""
        above = around()
        assert above is not None  # `standing` sees to it
        assert above.layout is not None
        if above.is_vector:
            raise ValueError(
                "optim.groups divides leaves, and inside of optim.flat there is one vector; put flat into it"
            )
        parts = given(params, None)
        found = self._by_path(above.layout)
        lost = [path for path in parts.layout.paths if path not in found]
        if lost:
            raise ValueError(
                f"trained, but in no group: {', '.join(map(repr, lost))}. The groups are {', '.join(self.names)}; "
                'the last may be "**", which selects all that is left'
            )
        members: list[dict[int, None]] = [{} for _ in self.txs]
        for i, path in enumerate(parts.layout.paths):
            members[found[path]][i] = None
        return parts, members

    def _by_path(self, layout: Layout) -> dict[str, int]:
        # Of the whole model: what is frozen now must not make a group a misspelt one.
        found: dict[str, int] = {}
        index = index_of(layout)
        for number, where in enumerate(self.wheres):
            for i in select(index.structure, where):
                found.setdefault(index.structure.paths[index.sources.get(i, i)], number)
        return found


def label(where: Any) -> str:
    """The name of a group, of its key."""
    return where if isinstance(where, str) else name_of(where)
