"""The words that `save` adds to a file (ties, states, numbers), checked before anything uses them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._tree.structure import Spec
from .values import from_words, in_words


def are_right(words: Mapping[str, Any], names: Collection[str]) -> bool:
    """Returns whether these words are of the kinds that `save` writes, and fit these arrays."""
    ties, marks, states = (words[each] for each in ("ties", "marks", "states"))
    message = words.get("message")
    if message is not None:
        if not _is_message(message):
            return False
        names = {*names, *(message["since"] or {"same": ()})["same"]}  # a change has not the arrays that stay
    return (
        _is_text(words["layout"])
        and _are(_is_text, words["frozen"])
        and all(alias not in names and _is_tie(tie) and tie[0] in names for alias, tie in ties.items())
        and all(name in names and _is_mark(mark) for name, mark in marks.items())
        and all(map(_is_state, states.values()))
        and all(all(map(_is_location, located.values())) for located in words["restructures"].values())
        and all(_is_text(kind) and _is_count(count) for kind, count in words.get("unkeyed", {}).values())
        and all(_is_value(said) and name not in names and name not in ties for name, said in values_in(words).items())
    )


def _is_text(said: object) -> bool:
    """Returns whether a value of a file is text."""
    return type(said) is str


def _is_message(message: Mapping[str, Any]) -> bool:
    """Returns whether this describes a message: its version, and for a change the arrays that it changes."""
    since = message["since"]
    return (
        type(message["is_tree"]) is bool
        and _is_version(message["version"])
        and (since is None or (_is_version(since["version"]) and _is_text(since["checksum"])))
        and (since is None or (_are(_is_text, since["same"]) and _are(_is_text, since["changed"])))
    )


def _is_version(said: object) -> bool:
    """Returns whether this is a number, a run and a number, or nothing."""
    return said is None or _is_number(said) or (_are(_is_number, said) and len(said) == 2)  # type: ignore[arg-type]


def _is_number(said: object) -> bool:
    return type(said) is int


def _is_tie(tie: Sequence[Any]) -> bool:
    """Returns whether this is the name of an array, and the transforms by which another one follows from it."""
    return _are(_is_text, tie) and len(tie) == 2


def _is_mark(mark: Mapping[str, Any]) -> bool:
    """Returns whether this marks an array as one of another dtype than the stored one, or of keys."""
    return len(mark) == 1 and mark.keys() <= {"key", "dtype"} and all(map(_is_text, mark.values()))


def _is_value(said: Sequence[Any]) -> bool:
    """Returns whether this is a number or a text in the words of `save`."""
    return _are(_is_text, said) and in_words(from_words(said)) == said


def _is_slot(slot: Sequence[Any]) -> bool:
    """Returns whether this is a parameter: its path, its aliases, its shape and its dtype."""
    path, aliases, shape, dtype = slot
    return _is_text(path) and _are(_is_text, aliases) and _are(_is_count, shape) and _is_text(dtype)


def _is_location(location: Sequence[Any]) -> bool:
    """Returns whether this is the place of a parameter in a vector or in stacks, and its shape."""
    return len(location) == 2 and _is_text(location[0]) and _are(_is_count, location[1])


def _is_state(state: Mapping[str, Any]) -> bool:
    """Returns whether this is a state: its parameters, their histories, and how each history divides its arrays."""
    histories = [*state["running"], *state["held"]]
    are_histories = all(_are(_is_text, each) for each in histories) and _are(_is_count, state["origins"])
    if not (are_histories and _are(_is_slot, state["slots"]) and len(state["origins"]) == len(histories)):
        return False
    divisions, count = state["divisions"], len(state["slots"])
    if len(divisions) != len(histories) or not all(_is_division(each, count) for each in divisions):
        return False
    return specs_in(state).keys() == {path for each in histories for path in each}


def _is_division(said: Mapping[str, Any], count: int) -> bool:
    """Returns whether this divides the arrays of a history among `count` parameters, as `save` does.

    A file may be damaged, or made to do harm. So each number is compared here with the length of the list that it
    indexes, before `division_in` uses it.
    """

    def is_block(block: Sequence[Any]) -> bool:
        slots, starts, has_rows = block
        are_there = _are(_is_count, slots) and all(slot < count for slot in slots) and type(has_rows) is bool
        return are_there and _are(_is_count, starts) and len(starts) in (0, len(slots) + 1) and starts == sorted(starts)

    def is_owned(its: Sequence[Any]) -> bool:
        *numbers, axis = its
        is_there = _are(_is_count, numbers) and len(numbers) == 3 and numbers[0] < len(said["blocks"])
        if not is_there or not (axis is None or _is_count(axis)):
            return False
        # Only a joined array has an axis, and then `starts` says how it is cut; any other is of one parameter.
        slots, starts, _ = said["blocks"][numbers[0]]
        return bool(starts) if axis is not None else not starts and len(slots) == 1

    blocks, owners = said["blocks"], said["owners"]
    return _are(is_block, blocks) and type(said["problem"]) is str and all(map(is_owned, owners.values()))


def _is_count(said: object) -> bool:
    """Returns whether a value of a file is a whole number that counts something."""
    return type(said) is int and said >= 0  # not `isinstance`: `true` is an `int` to Python


def _are(is_one: Callable[[Any], bool], several: object) -> bool:
    """Returns whether a value of a file is a list, and each of its entries passes a test."""
    return type(several) is list and all(map(is_one, several))


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
