"""The nodes that a `where` itself matches, such as the layers of a net, and whether they are alike.

Here `layers.*` means the layers; as `trainable` it means the parameters in them (see `where`).
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .._tree.difference import static_differences
from .._tree.paths import join_path, nearest, selects, split_path
from .._tree.structure import Structure, same_treedef
from .._tree.text import describe, quoted
from .._tree.types import TreeDef
from .where import Where, name_of, with_distinct_leaves


class Span(NamedTuple):
    """A node, or a leaf, by the leaves in it."""

    start: int
    stop: int
    entries: tuple[str, ...]
    number: int | None  # of the node; none of a leaf

    @property
    def path(self) -> str:
        return join_path(self.entries)


def nodes_in(structure: Structure, where: Where, are_alike: bool) -> list[Span]:
    """The outermost nodes, or leaves, that a `where` itself matches, in tree order; an error if they are not alike.

    Remembered, but for functions, which may find others at the next call.
    """

    def find() -> list[Span]:
        found = _find_nodes(structure, where)
        return _check_alike(structure, where, found) if are_alike else found

    is_sure = isinstance(where, (str, re.Pattern, type))
    return structure.remember(("nodes", where, are_alike), find) if is_sure else find()


def _find_nodes(structure: Structure, where: Where) -> list[Span]:
    several = list(where) if isinstance(where, (list, tuple)) else [where]
    if not several:
        raise ValueError("an empty sequence matches no node")
    away = [each[1:] for each in several if isinstance(each, str) and each.startswith("!")]
    if len(away) == len(several):
        raise ValueError(f"{name_of(where)} only takes away; write what it takes from before it: ['**', {where!r}]")
    matches, not_these = ([_matcher(structure, each) for each in side] for side in (several, away))
    spans = [Span(node.start, node.stop, node.entries, n) for n, node in enumerate(structure.nodes)]
    spans += [Span(i, i + 1, entries, None) for i, entries in enumerate(structure.entries)]
    # Nodes come in preorder and leaves last, so a node is met before all that is below it: the outermost is found.
    found: dict[tuple[str, ...], Span] = {}
    for span in spans:
        is_below = any(span.entries[:depth] in found for depth in range(len(span.entries) + 1))
        if not is_below and any(match(span) for match in matches) and not any(match(span) for match in not_these):
            found[span.entries] = span
    if not found:
        known = [span.path for span in spans if span.entries]
        raise ValueError(f"{name_of(where)} matches no node{nearest(str(where), known)}")
    return sorted(found.values(), key=lambda span: (span.start, span.stop))


def _matcher(structure: Structure, where: object) -> Callable[[Span], bool]:
    """A function that tells whether a single `where` matches a node."""
    if isinstance(where, str):
        pattern = split_path(where)
        return lambda span: selects(pattern, span.entries)
    if isinstance(where, re.Pattern):
        return lambda span: where.fullmatch(span.path) is not None
    if isinstance(where, type):
        return lambda span: span.number is not None and issubclass(structure.nodes[span.number].cls, where)
    if not callable(where):
        raise TypeError(
            "expected a glob, a compiled regex, a class, a callable from the model to nodes of it, or a sequence of "
            f"these, which match nodes, got {name_of(where)}"
        )
    found = _pointed_nodes(structure, where)[0]
    treedefs = subtreedefs(structure)
    return lambda span: (list(range(span.start, span.stop)), treedefs[span.number]) in found


def _pointed_nodes(structure: Structure, where: Callable[[Any], Any]) -> tuple[list[tuple[list[int], TreeDef]], bool]:
    """The leaves and treedefs of the nodes that a callable returns, and whether it is a list of them."""
    tree, index = with_distinct_leaves(structure)
    nodes: Any = where(tree)
    are_several = type(nodes) in (list, tuple)
    found = []
    for node in nodes if are_several else [nodes]:
        leaves, treedef = jtu.tree_flatten(node)
        if not leaves or any(id(leaf) not in index for leaf in leaves):
            raise ValueError(f"{name_of(where)} must return nodes of the model that have leaves, got {describe(node)}")
        found.append(([index[id(leaf)][0] for leaf in leaves], treedef))
    return found, are_several


def _check_alike(structure: Structure, where: Where, spans: list[Span]) -> list[Span]:
    """The nodes, if they have one structure, with leaves of the same shapes and dtypes."""
    first = spans[0]
    cls = None if first.number is None else structure.nodes[first.number].cls
    if len(spans) == 1 and cls in (list, tuple, dict) and _is_one(structure, where, cls):
        inner = f"{first.path}.*".lstrip(".")
        raise ValueError(f"{first.path!r} is one node, a {cls.__name__}; for the nodes in it write {inner!r}")
    for span in spans[1:]:
        difference = next(_differences(structure, first, span), None)
        if difference is not None:
            raise ValueError(
                f"{first.path!r} and {span.path!r} cannot be one node with an axis over both: {difference}. Name those "
                "that are alike"
            )
    return spans


def _is_one(structure: Structure, where: object, cls: type | None) -> bool:
    """Whether a `where` that found one list, or dictionary, means that and not the nodes in it.

    A glob may stand for the layers of a net of which there is one, a dictionary; hardly for one that is a list.
    """
    if isinstance(where, str):
        return cls is not dict or not set("*?[") & set("".join(split_path(where)[-1:])) or where.endswith("**")
    if isinstance(where, (list, tuple)):
        return all(_is_one(structure, each, cls) for each in where)
    return isinstance(where, (type, re.Pattern)) or not (callable(where) and _pointed_nodes(structure, where)[1])


def _differences(structure: Structure, first: Span, other: Span) -> Iterator[str]:
    ours, theirs = _entries_within(structure, first), _entries_within(structure, other)
    if ours != theirs:
        only = set(ours) ^ set(theirs)
        yield f"one of them alone has {quoted(sorted(map(join_path, only - {()})) or ['leaves'])}"
        return
    for i, j in zip(range(first.start, first.stop), range(other.start, other.stop), strict=True):
        if structure.specs[i] != structure.specs[j]:
            yield f"{structure.describe(i)} is not as {structure.describe(j)}"
    if first.number is None or other.number is None:
        return
    nodes = [structure.nodes[n : structure.nodes[n].last] for n in (first.number, other.number)]
    for here, there in zip(*nodes, strict=False):
        if here.cls is not there.cls:
            yield f"{here.path!r} is a {here.cls.__qualname__}, {there.path!r} a {there.cls.__qualname__}"
        if here.cls is there.cls:
            for row in static_differences(structure, here, there):
                yield f"the static value {row.path!r} is {row.first}, and {row.second} at {there.path!r}"
    treedefs = subtreedefs(structure)
    if not same_treedef(treedefs[first.number], treedefs[other.number]):
        yield "they differ in where they hold None"


def _entries_within(structure: Structure, span: Span) -> list[tuple[str, ...]]:
    """The entries of the leaves in a node, from the node on."""
    return [entries[len(span.entries) :] for entries in structure.entries[span.start : span.stop]]


def subtreedefs(structure: Structure) -> dict[int | None, TreeDef]:
    """The treedef of each node of a structure, and of a leaf."""
    return structure.remember("subtreedefs", functools.partial(_find_subtreedefs, structure.treedef))


def _find_subtreedefs(treedef: TreeDef) -> dict[int | None, TreeDef]:
    # In preorder, as a structure numbers its nodes: the children are put on the stack last first.
    found: dict[int | None, TreeDef] = {None: jtu.tree_structure(0)}
    waiting = [treedef]
    while waiting:
        each = waiting.pop()
        if each.node_data() is not None and each.node_data()[0] is not type(None):
            found[len(found) - 1] = each
            waiting += reversed(each.children())
    return found
