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
from jax.extend.core import ClosedJaxpr, Literal

from .._programs import bind, called
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
        results = _run(program, values, count)
    except Unclear:
        return None
    treedef = jtu.tree_structure(made)
    return [treedef.unflatten([each.of(history) for each in results]) for history in range(count)]


def _run(program: ClosedJaxpr, values: Sequence[Value], count: int) -> list[Value]:
    jaxpr = program.jaxpr
    known: dict[Any, Value] = {var: Value((const,)) for var, const in zip(jaxpr.constvars, program.consts, strict=True)}
    known.update(zip(jaxpr.invars, values, strict=True))
    look = lambda atom: Value((atom.val,)) if isinstance(atom, Literal) else known[atom]
    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _results(eqn, list(map(look, eqn.invars)), count), strict=True))
    return list(map(look, jaxpr.outvars))


def _results(eqn: Any, operands: Sequence[Value], count: int) -> list[Value]:
    owners = {operand.owner for operand in operands} - {None}
    is_shared = any(len(operand.each) > 1 for operand in operands)
    run = lambda history: bind(eqn, [operand.of(history) for operand in operands])
    if len(owners) == 1:
        (owner,) = owners
        return [Value((result,), owner) for result in run(owner)]
    if not owners and is_shared:
        return [Value(each) for each in zip(*map(run, range(count)), strict=True)]
    inner = called(eqn) if owners and eqn.primitive.name != "shard_map" else None
    if inner is not None:
        return _run(inner, operands, count)
    if is_shared:
        raise Unclear
    return [Value((result,)) for result in run(0)]
