"""One update of parameters that have taken different numbers of steps.

What a rule shares, such as a step count, then has a value for each history, while what it makes of all parameters
together, such as a global norm, is one. To run the rule for each history by itself is right where the coupling comes
first (a clip, then Adam). Where it comes after (Adam, then a clip of its updates), each run would see the moments of
the others with its own count. So the program of the rule is gone through once, and each value in it is known to be

- of one history: computed from arrays of its parameters, with its own count;
- shared by all: there is one for each history;
- of all together: computed from what is of several histories, each with its own count.

An operation on what is of several histories *and* shared has no such reading, inside a branch or a loop; then there is
no result, and each history runs by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, Literal

from .._programs import bind, called
from .._tree.types import PyTree


class Value(NamedTuple):
    """A value in the program: one, or, of what is shared, one for each history."""

    each: tuple[Any, ...]
    owner: int | None = None  # the history that it is of

    def of(self, history: int) -> Any:
        """The value as one history has it."""
        return self.each[history if len(self.each) > 1 else 0]


class Unclear(Exception):  # noqa: N818 - no error of the user's
    """An operation is on what is of several histories and on what is shared."""


def run_apart(
    update: Callable[..., PyTree], args: Sequence[PyTree], values: Sequence[Value], count: int
) -> list[PyTree] | None:
    """What an update gives as each of so many histories has it; `None` where that cannot be told.

    Args:
        update: a function of trees of arrays.
        args: the trees, as any history has them.
        values: their leaves.
        count: of histories.
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
