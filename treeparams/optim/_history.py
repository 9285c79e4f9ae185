"""Histories: the state of parameters that take their steps together, and how to regroup such states."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
import optax

from .._forms.form import Form
from .._forms.owners import Division, Init, divide
from .._forms.states import Copies, entries_of, regroup
from .._slots.layout import Layout, index_of
from .._tree.types import PyTree
from ._state import nodes_of

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """A state of the rule, the layout of its parameters, the steps it has taken, and the history it was split from."""

    layout: Layout
    state: PyTree
    division: Division
    count: Any = None
    origin: int = 0
    begin: Callable[[], PyTree] | None = None  # makes the arrays of a fresh one, which has only shapes

    @functools.cached_property
    def copies(self) -> Copies:
        """The arrays of the state, and the parameters of each."""
        shapes = {slot.path: slot.shape for slot in self.layout.slots}
        return Copies(shapes, entries_of(self.state), self.division)


def remembered(rule: Any, layout: Layout, name: str, make: Callable[[], T]) -> T:
    """Returns the value that a rule has computed for a layout, kept as long as both live."""
    known = index_of(layout).states.setdefault(rule, {})
    if name not in known:
        known[name] = make()
    return known[name]


def asked(init: Init, form: Form, made: PyTree = None) -> tuple[PyTree, Division]:
    """Returns a fresh state of a form, as shapes, and the parameters of each of its arrays.

    `made` is such a state that exists already.
    """
    if made is None:
        state = jax.eval_shape(init, form.shapes())
    else:
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made)
    return state, divide(init, form, state)


def regrouped(histories: Sequence[History], like: History) -> PyTree:
    """Returns the state for the parameters of another history: their pieces, and the first history's shared arrays.

    Raises:
        ValueError: the rule does not keep its state leaf by leaf, or another rule made it.
    """
    treedef = jtu.tree_structure(like.state)
    first = histories[0]
    if first.layout == like.layout and jtu.tree_structure(first.state) == treedef:
        return first.state
    check_no_memory(histories)
    sources = [each.copies for each in histories]
    if like.begin is not None and like.copies.common.difference(*[each.common for each in sources]):
        # If a group has no parameter left, `optim.per_leaf` keeps an array that the histories do not have.
        sources.append(dataclasses.replace(like, state=like.begin(), begin=None).copies)
    return jtu.tree_unflatten(treedef, regroup(sources, like.copies))


def check_no_memory(histories: Sequence[History]) -> None:
    """Refuses L-BFGS, which couples leaves."""
    if nodes_of(optax.ScaleByLBFGSState, [each.state for each in histories]):
        raise ValueError(
            "L-BFGS remembers steps of all trained leaves together, so it cannot go on with some of them. Give all of "
            'them gradients, tp.project(model, grads, missing="zeros"), or drop the whole state: '
            "optim.set_trainable(..., reset=True)"
        )
