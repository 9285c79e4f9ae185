"""The nodes and leaves of a structure as spans of leaves: all of them, those below a node, those that look alike."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .._tree.paths import join_path
from .._tree.structure import Structure
from .._tree.types import TreeDef


class Span(NamedTuple):
    """A node, or a leaf, given by the leaves in it."""

    start: int
    stop: int
    entries: tuple[str, ...]
    number: int | None  # of the node; none of a leaf

    @property
    def path(self) -> str:
        return join_path(self.entries)


def spans_of(structure: Structure) -> list[Span]:
    """Returns all nodes, in preorder, and then all leaves."""
    nodes = [Span(node.start, node.stop, node.entries, n) for n, node in enumerate(structure.nodes)]
    return nodes + [Span(i, i + 1, entries, None) for i, entries in enumerate(structure.entries)]


def below(structure: Structure) -> Mapping[Any, list[Span]]:
    """Returns the children of each node, by its entries; under `None` the root."""

    def find() -> dict[Any, list[Span]]:
        found: dict[Any, list[Span]] = {}
        named = {(*state, *its): state for state, values in structure.states.items() for its in values}
        for span in spans_of(structure):
            above = named.get(span.entries, span.entries[:-1])
            found.setdefault(above if span.entries else None, []).append(span)
        return found

    return structure.remember("below", find)


def outermost(structure: Structure, matches: Callable[[Span], bool]) -> tuple[Span, ...]:
    """Returns the nodes and leaves for which a predicate holds, without those below another one."""
    found: list[Span] = []
    inside = set[int]()  # leaves; a node stands before those in it, and all leaves stand last
    for span in spans_of(structure):
        if not (span.start in inside and span.stop > span.start) and matches(span):
            found.append(span)
            inside.update(range(span.start, span.stop))
    return tuple(found)


def items_in(structure: Structure, span: Span) -> int:
    """Returns the number of items of a list or tuple, including `None`, which frozen ones may be; 0 for other nodes."""
    if span.number is None or structure.nodes[span.number].cls not in (list, tuple):
        return 0
    return len(subtreedefs(structure)[span.number].children())


def by_treedef(structure: Structure) -> Mapping[tuple[int, TreeDef], Span]:
    """Returns the nodes by their first leaf and their treedef."""
    treedefs = subtreedefs(structure)
    make = lambda: {(span.start, treedefs[span.number]): span for span in spans_of(structure)}
    return structure.remember("by treedef", make)


def subtreedefs(structure: Structure) -> dict[int | None, TreeDef]:
    """Returns the treedef of each node of a structure, and of a leaf."""

    def find() -> dict[int | None, TreeDef]:
        # In preorder, as a structure numbers its nodes: the children are put on the stack last first.
        found: dict[int | None, TreeDef] = {None: jtu.tree_structure(0)}
        waiting = [structure.treedef]
        while waiting:
            each = waiting.pop()
            if each.node_data() is not None and each.node_data()[0] is not type(None):
                found[len(found) - 1] = each
                waiting += reversed(each.children())
        return found

    return structure.remember("subtreedefs", find)
