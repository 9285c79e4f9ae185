"""Pairs of leaves that are marked in all models of a kind."""

from collections.abc import Iterable, Sequence

from .memory import Recent
from .structure import Structure

Pair = tuple[int, int]


class Marks:
    """Pairs of leaves, marked in every model of one kind, and in whatever holds such a model.

    A pair is marked at each node that holds both leaves, and found at any of these. So a marked model is recognised as
    a part of another, and a part that was marked within a model is recognised alone.
    """

    def __init__(self) -> None:
        self._marked = Recent()  # the kind of a node, and the number of a leaf within it

    def add(self, structure: Structure, pairs: Iterable[Pair]) -> None:
        """Marks pairs."""
        self._marked.note(leaf for pair in pairs for at in _places(structure, pair) for leaf in at)

    def discard(self, structure: Structure, pairs: Iterable[Pair]) -> None:
        """Removes the marks of pairs."""
        for leaf in [leaf for pair in pairs for at in _places(structure, pair) for leaf in at]:
            self._marked.pop(leaf, None)

    def without(self, structure: Structure, pairs: Sequence[Pair]) -> list[Pair]:
        """Returns the pairs that are not marked."""
        if not self._marked:
            return list(pairs)
        return [pair for pair in pairs if not any(self._marked.keys() >= {*at} for at in _places(structure, pair))]

    def clear(self) -> None:
        """Removes all marks."""
        self._marked.clear()


def _places(structure: Structure, pair: Pair) -> list[tuple[Pair, Pair]]:
    """Returns the two leaves as numbered within each node that holds both."""
    found = [(structure.kinds[number], structure.nodes[number].start) for number in holding(structure, *pair)]
    return [((kind, pair[0] - start), (kind, pair[1] - start)) for kind, start in found]


def holding(structure: Structure, a: int, b: int) -> list[int]:
    """Returns the nodes that hold both of two leaves, from the innermost to the root."""
    above_leaves, above_nodes = structure.remember("above", lambda: _above(structure))
    found, number = [], above_leaves[min(a, b)]
    while number is not None:
        if max(a, b) < structure.nodes[number].stop:
            found.append(number)
        number = above_nodes[number]
    return found


def _above(structure: Structure) -> tuple[list[int | None], list[int | None]]:
    """Returns the innermost node that holds each leaf, and each node."""
    leaves: list[int | None] = [None] * len(structure.entries)
    nodes: list[int | None] = [None] * len(structure.nodes)
    for number, node in enumerate(structure.nodes):  # in preorder: what lies deeper overwrites
        leaves[node.start : node.stop] = [number] * (node.stop - node.start)
        nodes[number + 1 : node.last] = [number] * (node.last - number - 1)
    return leaves, nodes
