"""The words that `save` adds to a file (ties, states, numbers), checked before anything uses them."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from .._tree.structure import Spec
from .values import from_words, in_words


def are_right(words: Mapping[str, Any], names: Collection[str]) -> bool:
    """Returns whether ties, marks and values are of these arrays; raises any error if they are of another kind.

    The checksum of the header says that these are the words that `save` wrote. So this is no defence against a file
    that was made to do harm; words about states are not checked before they are used (`File.understood`).
    """
    ties, values, since = words["ties"], values_in(words), (words.get("message") or {"since": None})["since"]
    names = {*names, *(since["same"] if since else ())}  # a change has not the arrays that stay
    return (
        all(type(each) is dict for each in (words["restructures"], words["states"], *words["states"].values()))
        and all(alias not in names and source in names and type(how) is str for alias, (source, how) in ties.items())
        and words["marks"].keys() <= names
        and all(len(mark) == 2 for mark in words.get("unkeyed", {}).values())
        and names.isdisjoint(values)
        and values.keys().isdisjoint(ties)
        and all(in_words(from_words(said)) == said for said in values.values())
    )


def values_in(words: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the numbers and texts in a file, by path; a file of an older `save` has none."""
    return words.get("values", {})


class History(NamedTuple):
    """A history of a state, as a file records it."""

    side: str  # "runs", or "held" if its parameters wait
    path: str  # of its arrays in the state
    parameters: list[str]

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies the history among those of a state, whatever their order; each parameter has one history."""
        return self.side, *self.parameters


def histories_in(words: Mapping[str, Any]) -> list[History]:
    """Returns the histories of a state in the order of the counts."""
    sides = (("runs", words["running"]), ("held", words["held"]))
    return [History(side, f"{side}.{i}", paths) for side, several in sides for i, paths in enumerate(several)]


def specs_in(words: Mapping[str, Any]) -> dict[str, Spec]:
    """Returns the shapes and dtypes of the parameters that a state belongs to."""
    return {path: Spec(tuple(shape), np.dtype(dtype), True) for path, _, shape, dtype in words["slots"]}
