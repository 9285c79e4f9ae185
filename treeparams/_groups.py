"""Which parameters are one: ties by identity, declared on classes, and given, brought into groups.

A group has a *source*, whose array is the parameter, and *aliases*, which hold that array or a fixed linear function
of it. Ties by identity are found among the array objects; a declared or given tie joins two such sets, and the path it
names as source is the source, wherever it stands.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._declare import declared
from ._paths import join, nearest, split
from ._select import Choice
from ._structure import Node, Spec, Structure, describe
from ._transform import Transform


class Alias(NamedTuple):
    """A further place of a parameter; its value is the chain of transforms applied to the source."""

    leaf: int
    chain: tuple[Transform, ...]

    @property
    def formula(self) -> str:
        """What it is of the source, in words."""
        return " of ".join(map(repr, reversed(self.chain)))

    def fill(self, value: Any, source: Spec) -> Any:
        """The alias's value, from the source's.

        The source's may be a stack of such arrays, as in an ensemble. Anything else goes to all places of a tie as it
        is: a label per parameter, a norm.
        """
        shape = getattr(value, "shape", None)
        stacked = -1 if shape is None else len(shape) - len(source.shape)
        if shape is None or stacked < 0 or tuple(shape[stacked:]) != source.shape:
            return value
        function = self._apply
        for _ in range(stacked):
            function = jax.vmap(function)
        return jax.eval_shape(function, value) if isinstance(value, jax.ShapeDtypeStruct) else function(value)

    def _apply(self, value: Any) -> Any:
        for transform in self.chain:
            value = transform(value)
        return value

    def pull_back(self, cotangent: Any, source: Spec) -> Any:
        """What a gradient at the alias is at the source."""
        if not self.chain:
            return cotangent
        cotangent = jnp.asarray(cotangent)
        transpose = jax.linear_transpose(self._apply, jax.ShapeDtypeStruct(source.shape, cotangent.dtype))
        return transpose(cotangent)[0]


class Group(NamedTuple):
    """One parameter that stands at several places."""

    source: int
    aliases: tuple[Alias, ...]


class _Edge(NamedTuple):
    alias: int
    source: int
    transform: Transform | None


Given = Mapping[str, str | tuple[str, Callable[[Any], Any]]]


def groups(structure: Structure, given: Given | None = None) -> tuple[Group, ...]:
    """All ties of a model, frozen parameters included, in the order of their sources.

    Raises:
        ValueError: a given or declared tie names no parameter, runs in a circle, contradicts another, has shapes or
            dtypes that disagree, or a transform that is not linear.
    """
    edges = [edge for node in structure.nodes for edge in _declared_edges(structure, node)]
    edges += [_edge(structure, alias, source) for alias, source in (given or {}).items()]
    parent: dict[int, _Edge] = {}  # of a set of one array object, named by its first leaf
    named: dict[int, int] = {}
    for edge in edges:
        _link(structure, edge, parent, named)
    members: dict[int, list[Alias]] = {}
    for leaf in structure.parameters:
        root, chain = _root(structure, structure.first[leaf], parent)
        members.setdefault(root, []).append(Alias(leaf, chain))
    found = [_group(named.get(root, root), places) for root, places in members.items() if len(places) > 1]
    return tuple(sorted(found, key=lambda group: group.source))


def _group(source: int, places: list[Alias]) -> Group:
    return Group(source, tuple(place for place in places if place.leaf != source))


def _link(structure: Structure, edge: _Edge, parent: dict[int, _Edge], named: dict[int, int]) -> None:
    alias, source = structure.first[edge.alias], structure.first[edge.source]
    named[source] = min(named.get(source, edge.source), edge.source)
    if alias == source:
        if edge.transform is not None:
            raise ValueError(
                f"{structure.paths[edge.alias]!r} and {structure.paths[edge.source]!r} are one array already, so one "
                f"cannot be {edge.transform} of the other"
            )
        return
    before = parent.get(alias)
    if before is not None and (structure.first[before.source], before.transform) != (source, edge.transform):
        raise ValueError(
            f"{structure.paths[edge.alias]!r} is tied twice: to {structure.paths[before.source]!r} and to "
            f"{structure.paths[edge.source]!r}"
        )
    parent[alias] = edge


def _root(structure: Structure, start: int, parent: dict[int, _Edge]) -> tuple[int, tuple[Transform, ...]]:
    at, chain, passed = start, (), {start}
    while at in parent:
        edge = parent[at]
        chain = chain if edge.transform is None else (edge.transform, *chain)
        at = structure.first[edge.source]
        if at in passed:
            raise ValueError(f"the ties of {structure.paths[start]!r} run in a circle; name one path as the source")
        passed.add(at)
    return at, chain


def _declared_edges(structure: Structure, node: Node) -> list[_Edge]:
    edges = []
    for alias, source in declared(node.cls).ties.items():
        path, *transform = (source,) if isinstance(source, str) else source
        ends = [join((*node.entries, *split(each))) for each in (alias, path)]
        if ends[0] not in structure.index:
            continue  # a Linear without bias; a canonical tree, whose aliases are empty
        edges.append(_edge(structure, ends[0], (ends[1], *transform) if transform else ends[1]))
    return edges


def _edge(structure: Structure, alias: str, source: Any) -> _Edge:
    path, function = (source, None) if isinstance(source, str) else source
    transform = None if function is None else Transform(function)
    if alias == path:
        raise ValueError(f"{alias!r} is tied to itself")
    edge = _Edge(parameter(structure, alias), parameter(structure, path), transform)
    check_shapes(structure, edge.alias, edge.source, transform)
    return edge


def parameter(structure: Structure, path: str) -> int:
    """The leaf at a path.

    Raises:
        ValueError: there is none, or it is no parameter.
    """
    i = structure.index.get(join(split(path)))
    if i is None:
        known = [structure.paths[at] for at in structure.parameters]
        raise ValueError(f"a tie names {path!r}, where the model has no leaf{nearest(path, known)}")
    if not structure.is_parameter(i):
        raise ValueError(f"a tie names {structure.describe(i)}, which is no parameter")
    return i


def check_shapes(structure: Structure, alias: int, source: int, transform: Transform | None) -> None:
    """Checks that the source, transformed, has the alias's shape and dtype.

    Raises:
        ValueError: it has not, or the transform is not linear.
    """
    want, have = structure.spec(alias), structure.spec(source)
    got = have if transform is None else transform.result(have.shape, have.dtype)
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        after = f" after {transform}" if transform else ""
        raise ValueError(
            f"{structure.paths[alias]!r} is {describe(want)} and cannot be tied to {structure.paths[source]!r}, which "
            f"is {describe(got)}{after}"
        )


# -- Trained as a whole ------------------------------------------------------------------------------------------------


def settle(structure: Structure, ties: tuple[Group, ...], choice: Choice) -> tuple[bool, ...]:
    """What is trained, per leaf, with every tie trained or frozen as a whole.

    Raises:
        ValueError: a tie is trained at one path and frozen at another.
    """
    trained = dict(choice.trained)
    computed = {alias.leaf for group in ties for alias in group.aliases if alias.chain}
    for group in ties:
        for alias in group.aliases:
            if alias.leaf in computed and not _overruled(alias.leaf, group.source, choice, computed):
                trained[alias.leaf] = trained[group.source]
            elif trained[alias.leaf] != trained[group.source]:
                raise ValueError(_half(structure, group, alias, trained))
    return tuple(trained.get(i, False) for i in range(len(structure.specs)))


def _overruled(alias: int, source: int, choice: Choice, computed: set[int]) -> bool:
    # An alias with a transform follows its source, unless a word was said of it, not earlier than of the source, that
    # the source does not agree with. A word for a whole node that holds such an alias among others is not one of it.
    word = choice.said.get(alias)
    if word is None or choice.trained[alias] == choice.trained[source]:
        return False
    of_source = choice.said.get(source)
    return (word.singly or word.leaves <= computed) and (of_source is None or word.step >= of_source.step)


def _half(structure: Structure, group: Group, alias: Alias, trained: dict[int, bool]) -> str:
    names = structure.paths[group.source], structure.paths[alias.leaf]
    every = [names[0], *(structure.paths[each.leaf] for each in group.aliases if not each.chain)]
    is_, other = ("trained", "frozen") if trained[group.source] else ("frozen", "trained")
    if alias.chain:
        return (
            f"{names[1]!r} is {alias.formula} of {names[0]!r}, its source, and is trained or frozen with it, but "
            f"the source is {is_} and the alias {other}; say it of the source {names[0]!r} (or of both)"
        )
    return (
        f"{names[0]!r} is {is_} and {names[1]!r} is {other}, but they are one array. Either give one of them a copy of "
        f"its own (tp.copy, as for a target network; tp.untie), or name all in one call: "
        f"tp.layout(model, freeze={every!r}), or thaw=... or trainable=... of all these"
    )
