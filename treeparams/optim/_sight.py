"""The form that a rule sees in one update, and how its results come back."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu

from .._forms.form import Form
from .._forms.owners import Division, Init
from .._slots.index import Index
from .._slots.layout import Layout, index_of
from .._slots.parts import Parts
from .._tree.types import PyTree
from ._apart import Value, run_apart
from ._history import History
from ._scaled import ByParameter, spread, told
from ._state import steady

Run = Callable[[PyTree], tuple[PyTree, PyTree]]
"""From a state of the rule to its steps for the gradients, and its next state."""
Step = tuple[list[Any], PyTree]
"""The step of each slot, and the next state of the rule."""


def slots_of(index: Index, history: History) -> list[int]:
    """Returns the slots of a history, in a model that may train others too."""
    return [index.by_leaf[position] for position in index_of(history.layout).positions]


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """An update of a rule, with all its arguments but the state."""

    tx: Any
    gradients: PyTree
    params: PyTree
    extra: dict[str, Any]
    by_parameter: ByParameter | None  # where `optim.scaled` is in the rule

    def __call__(self, before: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the rule's steps for the gradients, and its next state."""
        return self.of(self.gradients, before, self.params)

    def of(self, gradients: PyTree, before: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the same for other gradients and parameters."""
        if self.by_parameter is None:
            return self.tx.update(gradients, before, params, **self.extra)
        made, after = self.tx.update(gradients, told(before, self.by_parameter), params, **self.extra)
        return made, told(after, None)


@dataclasses.dataclass(frozen=True)
class Sight:
    """The form of the parameters that have a gradient, which the rule sees in one update."""

    parts: Parts[Any]
    layout: Layout
    form: Form
    slots: list[int]  # their numbers in the whole layout

    def show(self, values: Sequence[Any]) -> PyTree:
        """Returns the form of one value per slot of the whole layout."""
        return self.form.holding([values[slot] for slot in self.slots])

    def step(self, update: Run, division: Division, before: PyTree, init: Init) -> Step:
        """Returns the step of each slot, and the next state, from a state that is divided in this way."""
        made, after = update(before)
        return self.read(made), steady(after, before)

    def steps_apart(
        self, update: Update, division: Division, befores: Sequence[PyTree], owner: Mapping[str, int]
    ) -> list[Step] | None:
        """Returns the results of `step` for several histories at once; `owner` gives the history of each parameter.

        `None` if parameters lie together in one array, or the program of the rule does not tell them apart.
        """
        if any(block.length is not None for block in self.form.blocks):
            return None
        leaves = list(zip(*map(jtu.tree_leaves, befores), strict=True))
        of_slots = [owner[self.form.paths[slot]] for (slot,) in self.form.members]
        shown = [list(map(Value, zip(jtu.tree_leaves(tree)), of_slots)) for tree in (update.gradients, update.params)]
        state = [
            Value(each) if owners is None else Value(each[:1], owner[owners.paths[0]])
            for each, owners in zip(leaves, division.owners, strict=True)
        ]
        args = update.gradients, befores[0], update.params
        found = run_apart(update.of, args, [*shown[0], *state, *shown[1]], len(befores))
        if found is None:
            return None
        return [(self.read(made), steady(after, old)) for (made, after), old in zip(found, befores, strict=True)]

    def moves(self, history: History) -> Any:
        """Returns whether any parameter of a history takes a step: a bool, or an array of one."""
        return not set(self.slots).isdisjoint(slots_of(self.parts.index, history))

    def read(self, shown: PyTree) -> list[Any]:
        """Returns one value per slot of the whole layout; `None` for slots that the rule did not see, or left out."""
        values: list[Any] = [None] * len(self.parts.slots)
        for slot, value in zip(self.slots, self.form.read(shown), strict=True):
            values[slot] = value
        return values

    @property
    def by_parameter(self) -> ByParameter:
        """Maps `{where: number}` to the number of each parameter, 1 by default, in arrays that broadcast."""
        return functools.partial(spread, self.parts.index, self.layout, self.form)

    def model(self, shown: PyTree) -> Any:
        """Returns the model with these parameters; everything else is as it was."""
        found = zip(self.read(shown), self.parts.slots, strict=True)
        return self.parts.model([own if new is None else new for new, own in found])
