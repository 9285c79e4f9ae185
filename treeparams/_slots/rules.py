"""Reads `{where: value}`: the first entry that selects a parameter gives its value."""

from collections.abc import Collection, Sequence

from .index import Index
from .where import Where, name_of, select


def first_entries(
    index: Index,
    wheres: Sequence[Where],
    among: Collection[int] | None = None,
    *,
    asked: Collection[int] | None = None,
    kind: str = "parameter",
    may_be_empty: bool = False,
) -> dict[int, int]:
    """Returns, for each leaf that any entry selects, the number of the entry that gives its value.

    A tied parameter gets the value for its source. An entry that selects nothing, or only leaves that earlier entries
    selected, is an error, except for a final `**`, the default.

    Args:
        index: of a model.
        wheres: of the entries, in order.
        among: the leaves that an entry may select; `None`: the parameters.
        asked: the leaves for which an entry must have an effect, if it selects any of them; `None`: the trained ones.
            An entry that selects only others has no effect.
        kind: of the leaves, in words.
        may_be_empty: whether an entry may select nothing, as in a tree of which only a part is shown.
    """
    asked = frozenset(index.positions if asked is None else asked)
    found: dict[int, int] = {}
    for number, where in enumerate(wheres):
        selected = select(index.structure, where, index.follows, among=among, kind=kind, may_be_empty=may_be_empty)
        _check_ties(index, where, selected)
        its = selected.difference(index.sources)
        left = its.difference(found)
        if not left and its & asked and (number < len(wheres) - 1 or where != "**"):
            earlier = dict.fromkeys(found[leaf] for leaf in sorted(its & asked))
            raise ValueError(
                f"{name_of(where)} comes too late: {', '.join(name_of(wheres[each]) for each in earlier)} before it "
                "selects the same parameters; the first entry that selects a parameter decides"
            )
        found |= dict.fromkeys(left, number)
    return found


def _check_ties(index: Index, where: object, selected: frozenset[int]) -> None:
    """Raises a `ValueError` for an entry that selects only aliases of arrays, since the source decides for these."""
    if selected and selected <= index.sources.keys():
        leaf = min(selected)
        source, paths = index.sources[leaf], index.structure.paths
        raise ValueError(
            f"{name_of(where)} names {paths[leaf]!r}, but {paths[source]!r} and {paths[leaf]!r} are one array. "
            f"Either make {paths[leaf]!r} a separate array (tp.copy, as for a target network; tp.untie), or write "
            f"{paths[source]!r}"
        )
