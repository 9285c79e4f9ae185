"""What a function does with the elements of arrays: a program that only moves them moves moments and averages as well.

That is read from the program of the function, as JAX traces it: each operation on elements has to be one that moves
them. What is computed of constants alone, such as the rows of `x[jnp.array([2, 0, 1])]`, may be anything. Then no
element may come out twice. A transpose, a slice, a concatenation never repeat one, so a program of these in which each
array is used once is known to be right without a look at its elements, and it moves any arrays of the same shapes. For
all other programs, as those that go by the places in a constant, the elements are numbered: the program runs on the
numbers, so that its results say which element is where.

A constant mask of zeros and ones drops elements. The zeros that stand in their places have learned nothing.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._programs import bind, called
from .._tree.dtypes import common_dtype, is_complex, is_inexact
from .._tree.structure import Spec
from ._rename import Route

_DROPPED, _FOREIGN = -1, -2
"""In place of the number of an element: that a mask has dropped one here; that here is no element."""


class Program:
    """The program of a route, which is known to move elements, each at most once and as it is.

    Attributes:
        reads: of each result, the numbers of the arguments that it is made of.
        same: of each result, the number of the argument that it is, if it is one as it is.
        dropped: of each result, where a mask has dropped elements; `None`: nowhere.
    """

    def __init__(self, route: Route, specs: Sequence[Spec]) -> None:
        self._shapes = [spec.shape for spec in specs]
        self._arguments = [_Elements() for _ in specs]
        try:
            self._results = _results_of(route, specs, self._arguments)
            steps = _steps_to(self._results)
            self._numbers = None if _are_seen_to_move(self._results, steps) else self._numbered(steps)
        except _NotMovedError:
            raise ValueError(
                f"moments and averages go where elements are moved, dropped or joined, each at most once and as it is, "
                f"and {route.how}, from {list(route.sources)} to {list(route.targets)}, changes or repeats them; the "
                "parameters alone go through it: plan(arrays)"
            ) from None
        number = {id(argument): i for i, argument in enumerate(self._arguments)}
        self.same = [number.get(id(result)) for result in self._results]
        self.reads = [tuple(sorted(number[id(each)] for each in _arguments_of(it))) for it in self._results]
        drops = [each == _DROPPED for each in self._numbers or ()]
        self.dropped = [where if where.any() else None for where in drops] or [None] * len(self._results)

    def _numbered(self, steps: Sequence["_Step"]) -> list[np.ndarray]:
        """The number of each element of the results, among the elements of all arguments, one after another."""
        starts = self._starts(range(len(self._shapes)))
        if starts[-1] > np.iinfo(np.int32).max:
            raise _NotMovedError
        numbers = np.split(np.arange(starts[-1], dtype=np.int32), starts[1:-1])
        arguments = [own.reshape(shape) for own, shape in zip(numbers, self._shapes, strict=True)]
        known = dict(zip(map(id, self._arguments), arguments, strict=True))
        found = list(map(np.asarray, _run(steps, self._results, known, _number)))
        # Over all results together: an element that comes out in two of them is repeated, too.
        together, seen = np.concatenate(list(map(np.ravel, found))), np.zeros(starts[-1], bool)
        elements = together[together != _DROPPED]
        if (elements < 0).any():
            raise _NotMovedError
        seen[elements] = True
        if np.count_nonzero(seen) < len(elements):
            raise _NotMovedError
        return found

    def _starts(self, arguments: Iterable[int]) -> list[int]:
        """Where the elements of each of these arguments begin, one after another, and where the last ones end."""
        return [*itertools.accumulate((math.prod(self._shapes[i]) for i in arguments), initial=0)]

    def results(self, number: int, arrays: Callable[[int], Any]) -> dict[int, Any]:
        """A result, and those that are made of the same arguments, of arrays that are kept beside these.

        The arrays keep their dtypes. Where an element is dropped stands zero.
        """
        reads = self.reads[number]
        wanted = [i for i, its in enumerate(self.reads) if its == reads]
        if self._numbers is not None:
            return {i: self._taken(i, [arrays(argument) for argument in reads]) for i in wanted}
        known = {id(self._arguments[i]): arrays(i) for i in reads}
        results = [self._results[i] for i in wanted]
        return dict(zip(wanted, _run(_steps_to(results), results, known, _move), strict=True))

    def _taken(self, number: int, arrays: Sequence[Any]) -> Any:
        """A result by the numbers of its elements, of the arguments that it is made of."""
        numbers, reads, dropped = (each[number] for each in (self._numbers or (), self.reads, self.dropped))
        if len(reads) < len(self._shapes):  # without the others, elements begin earlier
            starts = np.array(self._starts(range(len(self._shapes))))
            shifts = starts[list(reads)] - self._starts(reads)[:-1]
            of = np.searchsorted(starts[list(reads)], numbers, side="right") - 1
            numbers = numbers - shifts[of].astype(np.int32)
        dtype = common_dtype([array.dtype for array in arrays])
        elements = [jnp.ravel(jnp.asarray(array).astype(dtype)) for array in arrays]
        made = jnp.take(elements[0] if len(elements) == 1 else jnp.concatenate(elements), numbers, mode="clip")
        return made if dropped is None else jnp.where(dropped, jnp.zeros((), dtype), made)


class _NotMovedError(Exception):
    pass


# -- Reading -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Elements:
    """An array of elements, an argument or the result of an operation; any other value is a constant."""

    step: "_Step | None" = None


@dataclasses.dataclass(eq=False)
class _Step:
    """An operation on elements, and its operands, of which some may be constants."""

    eqn: JaxprEqn
    operands: list[Any]
    results: list[_Elements] = dataclasses.field(default_factory=list)


# These give each element of their first operand once, or drop it.
_MOVES = {"dynamic_slice", "reshape", "rev", "slice", "split", "squeeze", "transpose"}
_JOINS = {"concatenate", "stack"}
# Of these only numbers tell. Which operands of each may be elements; the others say where they go.
_BY_PLACES = {"broadcast_in_dim": (0,), "gather": (0,), "pad": (0, 1), "dynamic_update_slice": (0, 1)}
_BY_PLACES |= {"scatter": (0, 2), "mul": (0, 1)}
_SAME = {"copy", "device_put", "optimization_barrier", "stop_gradient"}
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}
_COMMUTE = {"add", "mul"}


def _results_of(route: Route, specs: Sequence[Spec], arguments: Sequence[_Elements]) -> list[_Elements]:
    """The results of the program of a route."""
    traced = jax.make_jaxpr(route)(*[jax.ShapeDtypeStruct(*spec[:2]) for spec in specs])
    results = _read(traced.jaxpr, traced.consts, arguments)
    if not all(map(_are_elements, results)):
        raise _NotMovedError
    return results


def _read(jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The results of a program, of elements and of constants."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _read_step(eqn, _values(eqn.invars, known)), strict=True))
    return _values(jaxpr.outvars, known)


def _values(atoms: Sequence[Any], known: Mapping[Any, Any]) -> list[Any]:
    """The values of literals and of variables."""
    return [atom.val if isinstance(atom, Literal) else known[atom] for atom in atoms]


def _read_step(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """The results of one operation.

    An operation on constants alone runs as it is. Any other one but those that move elements would compute something
    of them.
    """
    name, program = eqn.primitive.name, called(eqn)
    if not any(map(_are_elements, values)):
        return bind(eqn, values)
    if program is not None:
        return _read(program.jaxpr, program.consts, values)
    if name in _SAME or (name == "convert_element_type" and _is_rounding(eqn)):
        return values
    kept = _kept(eqn, values)
    if kept is not None:
        return [kept]
    places = range(len(values)) if name in _JOINS else (0,) if name in _MOVES else _BY_PLACES.get(name, ())
    if name == "select_n":
        places = range(1, len(values))
    if any(_are_elements(value) and i not in places for i, value in enumerate(values)):
        raise _NotMovedError
    if name == "mul" and not _is_mask(values):
        raise _NotMovedError
    step = _Step(eqn, values)
    step.results = [_Elements(step) for _ in eqn.outvars]
    return step.results


def _are_elements(value: object) -> bool:
    return isinstance(value, _Elements)


def _is_rounding(eqn: Any) -> bool:
    """Whether a conversion changes no more than digits."""
    before, after = (atom.aval.dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    return is_inexact(before) and is_inexact(after) and is_complex(before) == is_complex(after)


def _kept(eqn: Any, values: list[Any]) -> _Elements | None:
    """The elements to which zero is added, or that are multiplied by one."""
    name = eqn.primitive.name
    if name not in _NEUTRAL:
        return None
    for one, other in ((0, 1), (1, 0)) if name in _COMMUTE else ((0, 1),):
        is_alone = _are_elements(values[one]) and not _are_elements(values[other])
        is_whole = eqn.invars[one].aval.shape == eqn.outvars[0].aval.shape
        if is_alone and is_whole and bool(np.all(np.asarray(values[other]) == _NEUTRAL[name])):
            return values[one]
    return None


def _is_mask(values: Sequence[Any]) -> bool:
    """Whether elements are multiplied by constant zeros and ones."""
    constants = [np.asarray(value) for value in values if not _are_elements(value)]
    return len(constants) == 1 and bool(np.all((constants[0] == 0) | (constants[0] == 1)))


# -- Which operations are needed, and whether they are seen to move ----------------------------------------------------


def _steps_to(results: Sequence[_Elements]) -> list[_Step]:
    """The operations that results are made by, each behind those that it needs."""
    found: dict[int, _Step] = {}
    waiting = [result.step for result in results if result.step is not None]
    while waiting:
        step = waiting[-1]
        needed = [each.step for each in step.operands if _are_elements(each) and each.step is not None]
        needed = [each for each in needed if id(each) not in found]
        if id(step) in found or not needed:
            found[id(waiting.pop())] = step
        else:
            waiting += needed
    return list(found.values())


def _arguments_of(result: _Elements) -> list[_Elements]:
    """The arguments that a result is made of."""
    operands = [each for step in _steps_to([result]) for each in step.operands if _are_elements(each)]
    return [*{id(each): each for each in (result, *operands) if each.step is None}.values()]


def _are_seen_to_move(results: Sequence[_Elements], steps: Sequence[_Step]) -> bool:
    """Whether operations that never repeat an element take each array of elements once."""
    used = [*results, *(each for step in steps for each in step.operands if _are_elements(each))]
    return len(set(map(id, used))) == len(used) and all(map(_is_simple, steps))


def _is_simple(step: _Step) -> bool:
    name, atoms = step.eqn.primitive.name, (*step.eqn.invars[:1], *step.eqn.outvars[:1])
    if name == "broadcast_in_dim":
        before, after = (math.prod(atom.aval.shape) for atom in atoms)
        return before == after
    return name in _MOVES or (name in _JOINS and all(map(_are_elements, step.operands)))


# -- Running -----------------------------------------------------------------------------------------------------------


def _run(
    steps: Sequence[_Step],
    results: Sequence[_Elements],
    known: dict[int, Any],
    do: Callable[[_Step, list[Any]], Sequence[Any]],
) -> list[Any]:
    """The arrays in place of these results, where those of the arguments are known."""
    for step in steps:
        values = [known[id(each)] if _are_elements(each) else each for each in step.operands]
        known.update(zip(map(id, step.results), do(step, values), strict=True))
    return [known[id(result)] for result in results]


def _move(step: _Step, values: list[Any]) -> list[Any]:
    """The results of an operation that is seen to move elements, of arrays of any dtype."""
    if step.eqn.primitive.name in _JOINS:  # what is cast in the program is not cast here
        dtype = common_dtype([array.dtype for array in values])
        values = [array if array.dtype == dtype else jnp.asarray(array).astype(dtype) for array in values]
    return bind(step.eqn, values)


def _number(step: _Step, values: list[Any]) -> Sequence[Any]:
    """The results of an operation, of the numbers of elements."""
    name, eqn = step.eqn.primitive.name, step.eqn
    if name in _NUMBERED:
        return [_NUMBERED[name](step, values)]
    if name in _JOINS or name == "pad":
        values = [
            value if _are_elements(it) else _foreign(value) for it, value in zip(step.operands, values, strict=True)
        ]
    if name == "gather":  # behind the end of its operand it may fill in a number
        eqn = eqn.replace(params=eqn.params | {"fill_value": _FOREIGN})
    return bind(eqn, values)


def _foreign(constant: Any) -> np.ndarray:
    return np.full(np.shape(constant), _FOREIGN, np.int32)


def _masked(step: _Step, values: list[Any]) -> np.ndarray:
    """Numbers where a mask is one."""
    at = 0 if _are_elements(step.operands[0]) else 1
    numbers, mask = np.asarray(values[at]), np.asarray(values[1 - at])
    return np.where((mask == 0) & (numbers != _FOREIGN), np.int32(_DROPPED), numbers)


def _selected(step: _Step, values: list[Any]) -> np.ndarray:
    """Numbers of one of several arrays, by a constant; zeros among elements drop them."""
    which, *cases = map(np.asarray, values)
    pairs = list(zip(cases, map(_are_elements, step.operands[1:]), strict=True))
    is_known = functools.reduce(np.logical_or, [case != _FOREIGN for case, are_elements in pairs if are_elements])
    cases = [
        case if are_elements else np.where((case == 0) & is_known, np.int32(_DROPPED), np.int32(_FOREIGN))
        for case, are_elements in pairs
    ]
    return np.choose(which.astype(np.int32), cases)


def _written(step: _Step, values: list[Any]) -> np.ndarray:
    """Numbers, over some of which others are written, or zeros."""
    at = 2 if step.eqn.primitive.name == "scatter" else 1
    before = np.asarray(values[0]) if _are_elements(step.operands[0]) else _foreign(values[0])
    new = np.asarray(values[at])
    is_new = _are_elements(step.operands[at])
    if not is_new:
        new = np.full(new.shape, _FOREIGN if new.any() else _DROPPED, np.int32)
    made = np.asarray(bind(step.eqn, [before, *values[1:at], new, *values[at + 1 :]])[0])
    if is_new and not np.isin(new, made).all():  # two are written to one place, and none says which is the last
        raise _NotMovedError
    return np.where((made == _DROPPED) & (before == _FOREIGN), np.int32(_FOREIGN), made)


_NUMBERED = {"dynamic_update_slice": _written, "mul": _masked, "scatter": _written, "select_n": _selected}
