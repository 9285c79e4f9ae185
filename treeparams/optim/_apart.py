"""Runs one update for parameters that have taken different numbers of steps.

Values that a rule shares between parameters, such as a step count, then exist once for each history. Values computed
from all parameters together, such as a global norm, exist only once. Running the rule separately for each history is
right if the coupling comes first (a clip, then Adam). It is wrong if the coupling comes later (Adam, then a clip of its
updates): each run would see the moments of the other histories under its own count. So `run_apart` interprets the
rule's program once and classifies each value in it as

- of one history: computed from arrays of its parameters, with its own count;
- shared by all: there is one value for each history;
- of all together: computed from values of several histories, each with its own count.

A branch or a loop that uses values of several histories *and* shared values cannot be classified. Then `run_apart`
returns `None`, and the caller runs the rule separately for each history.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
from jax.extend.core import JaxprEqn

from .._programs import Walk, bind
from .._tree.types import PyTree


class Value(NamedTuple):
    """A value in the program: a single one, or, if it is shared, one for each history."""

    each: tuple[Any, ...]
    owner: int | None = None  # the history it belongs to

    def of(self, history: int) -> Any:
        """Returns the value that one history sees."""
        return self.each[history if len(self.each) > 1 else 0]


class Unclear(Exception):  # noqa: N818 - no error of the user's
    """Raised for an operation on values of several histories and on shared values."""


def run_apart(
    update: Callable[..., PyTree], args: Sequence[PyTree], values: Sequence[Value], count: int
) -> list[PyTree] | None:
    """Returns the results of an update for each history, or `None` if they cannot be told apart.

    Args:
        update: a function of trees of arrays.
        args: the trees, as one of the histories has them.
        values: their leaves.
        count: the number of histories.
    """
    program, made = jax.make_jaxpr(update, return_shape=True)(*args)
    try:
        results = _Apart(count).run(program, values)
    except Unclear:
        return None
    treedef = jtu.tree_structure(made)
    return [treedef.unflatten([each.of(history) for each in results]) for history in range(count)]


class _Apart(Walk[Value]):
    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def constant(self, value: Any) -> Value:
        return Value((value,))

    def step(self, eqn: JaxprEqn, its: list[Value]) -> Sequence[Value]:
        owners = {each.owner for each in its} - {None}
        is_shared = any(len(each.each) > 1 for each in its)
        run = lambda history: bind(eqn, [each.of(history) for each in its])
        if len(owners) == 1:
            (owner,) = owners
            return [Value((result,), owner) for result in run(owner)]
        if not owners and is_shared:
            return [Value(each) for each in zip(*map(run, range(self._count)), strict=True)]
        program = self.program_of(eqn) if owners and eqn.primitive.name != "shard_map" else None
        if program is not None:
            return self.run(program, its)
        if is_shared:
            raise Unclear
        return [Value((result,)) for result in run(0)]
