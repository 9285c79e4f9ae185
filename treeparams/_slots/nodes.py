"""The nodes that a `where` matches, such as the layers of a net, and whether they are alike."""

import re
from collections.abc import Iterator

from .._tree.difference import static_differences
from .._tree.flattening import same_treedef
from .._tree.paths import join_path, split_path
from .._tree.structure import Structure
from .._tree.text import quoted
from .spans import Span, subtreedefs
from .where import Where, found_in, name_of, read


def nodes_in(structure: Structure, where: Where, are_alike: bool) -> list[Span]:
    """Returns the outermost nodes, or leaves, that a `where` matches, in tree order; an error if they are not alike.

    The result is remembered, except for functions, which may find others at the next call.
    """

    def find() -> list[Span]:
        found = _find_nodes(structure, where)
        return _check_alike(structure, where, found) if are_alike else found

    is_sure = isinstance(where, (str, re.Pattern, type))
    return structure.remember(("nodes", where, are_alike), find) if is_sure else find()


def _find_nodes(structure: Structure, where: Where) -> list[Span]:
    chosen, away = read(structure, where)
    every = range(len(structure.specs))
    for match in (*chosen, *away):
        found_in(structure, match, every, "leaf")
    taken = frozenset[int]().union(*[match.leaves() for match in away])
    # From the largest to the smallest, so that a node is met before all that is below it: the outermost is found.
    found, covered = list[Span](), set[int]()
    for span in sorted({span for match in chosen for span in match.spans}, key=lambda span: span.start - span.stop):
        leaves = range(span.start, span.stop)
        if taken.isdisjoint(leaves):
            if covered.isdisjoint(leaves):
                found.append(span)
                covered.update(leaves)
        elif not taken.issuperset(leaves):
            raise ValueError(
                f"{name_of(where)} excludes a part of the node {span.path!r}; name the nodes that you mean"
            )
    if not found:
        raise ValueError(f"{name_of(where)} selects nothing: everything that it selects is excluded")
    return sorted(found, key=lambda span: (span.start, span.stop))


def _check_alike(structure: Structure, where: Where, spans: list[Span]) -> list[Span]:
    """Returns the nodes, if they have one structure, with leaves of the same shapes and dtypes."""
    first = spans[0]
    cls = None if first.number is None else structure.nodes[first.number].cls
    if len(spans) == 1 and cls in (list, tuple, dict) and _is_one(structure, where, cls):
        inner = f"{first.path}.*".lstrip(".")
        raise ValueError(f"{first.path!r} is one node, a {cls.__name__}; for the nodes in it write {inner!r}")
    for span in spans[1:]:
        difference = next(_differences(structure, first, span), None)
        if difference is not None:
            raise ValueError(
                f"{first.path!r} and {span.path!r} cannot be one node with an axis over both: {difference}. Select "
                "nodes that are alike"
            )
    return spans


def _is_one(structure: Structure, where: object, cls: type | None) -> bool:
    """Returns whether a `where` that found one list, or dictionary, means that node and not the nodes in it.

    A glob that matches one dictionary may mean the layers of a net with a single layer; for a list that is unlikely.
    """
    if isinstance(where, str):
        return cls is not dict or not set("*?[") & set("".join(split_path(where)[-1:])) or where.endswith("**")
    if isinstance(where, (list, tuple)):
        return all(_is_one(structure, each, cls) for each in where)
    return not any(match.is_listed for match in read(structure, where)[0])


def _differences(structure: Structure, first: Span, other: Span) -> Iterator[str]:
    ours, theirs = _entries_within(structure, first), _entries_within(structure, other)
    if ours != theirs:
        only = set(ours) ^ set(theirs)
        yield f"only one of them has {quoted(sorted(map(join_path, only - {()})) or ['leaves'])}"
        return
    for i, j in zip(range(first.start, first.stop), range(other.start, other.stop), strict=True):
        if structure.specs[i] != structure.specs[j]:
            yield f"{structure.describe(i)} differs from {structure.describe(j)}"
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
    """Returns the entries of the leaves in a node, relative to the node."""
    return [entries[len(span.entries) :] for entries in structure.entries[span.start : span.stop]]
