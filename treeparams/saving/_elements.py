"""Which element goes where: how a function of arrays moves moments and averages, if it only moves elements.

That is read from its program: each operation on elements has to be one that moves them. The program then runs on the
numbers of the elements. What is computed of constants alone, such as the rows of `x[jnp.array([2, 0, 1])]`, may be
anything.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._files.names import Names
from .._programs import bind, called
from .._tree.dtypes import is_complex, is_inexact
from .._tree.structure import Spec
from ._rename import Route, stack, unstack


class Movers:
    """Which arrays come to each array of a model, for arrays that are kept beside the parameters.

    Attributes:
        sources: of each path of the model, the names that it comes from.
        known: all names, ties once.
    """

    def __init__(self, comes: Mapping[str, tuple[Route, int]], source: Names) -> None:
        self._comes = comes
        self._specs = source.specs
        self._maps: dict[int, Sequence[np.ndarray]] = {}
        roots = {name: source.aliases.get(name, name) for name in source.specs}
        self.sources = {path: tuple([roots[name] for name in route.sources]) for path, (route, _) in comes.items()}
        self.known = frozenset(roots.values())

    def move(self, path: str, shape: tuple[int, ...], arrays: Sequence[Any]) -> Any:
        """The array for a path, of the arrays that are kept beside each of its sources.

        An array of another shape than its parameter, as a count of its own, is taken if it is the same for all sources.
        """
        route, number = self._comes[path]
        if route.function is None:
            return arrays[0]
        specs = [self._specs[name] for name in route.sources]
        if not any(spec.parameter for spec in specs):
            return route(*arrays)[number]
        pairs = zip(arrays, specs, strict=True)
        if all(array.shape == spec.shape and is_inexact(array.dtype) for array, spec in pairs):
            if route.function in (stack, unstack):
                return stack(*arrays) if route.function is stack else arrays[0][number]
            elements = jnp.concatenate([jnp.ravel(array) for array in arrays])
            return jnp.reshape(elements[self._map(route, number)], shape)
        first = arrays[0]
        if all(array.size == 1 and array.shape == first.shape and bool(array == first) for array in arrays):
            return first
        raise ValueError(
            f"{path!r} is made of {list(route.sources)} by {route.how}, and of these the state has arrays of "
            f"{[array.shape for array in arrays]}, which are not of the parameters' shapes, and not all alike; "
            "begin with a fresh state"
        )

    def _map(self, route: Route, number: int) -> np.ndarray:
        """The number of each element of a result, among the elements of all sources, one after another."""
        if id(route) not in self._maps:
            self._maps[id(route)] = _element_maps(route, [self._specs[name] for name in route.sources])
        return self._maps[id(route)][number]

    def is_plain(self, path: str) -> bool:
        """Whether one array comes to a path as it is."""
        return self._comes[path][0].function is None

    def check(self) -> None:
        """Checks that all functions of parameters only move elements."""
        for route, number in self._comes.values():
            if route.function not in (None, stack, unstack) and any(
                self._specs[name].parameter for name in route.sources
            ):
                self._map(route, number)


def _element_maps(route: Route, specs: Sequence[Spec]) -> list[np.ndarray]:
    """As `_map`, of each result of a route.

    The elements of all sources are numbered, one source after another. The program of the route runs on the numbers, so
    that its results say which element is where.
    """
    ends = list(itertools.accumulate(math.prod(spec.shape) for spec in specs))
    numbers = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
    program = jax.make_jaxpr(route)(*[jax.ShapeDtypeStruct(*spec[:2]) for spec in specs])
    elements = [_Elements(jnp.reshape(own, spec.shape)) for own, spec in zip(numbers, specs, strict=True)]
    try:
        found = [np.ravel(_numbers(made)) for made in _run(program.jaxpr, program.consts, elements)]
        # Over all results together: an element that comes out in two of them is repeated, too.
        together = np.concatenate(found) if found else np.zeros(0, np.int32)
        is_moved = np.all((together >= 0) & (together < ends[-1])) and len(np.unique(together)) == len(together)
    except _NotMovedError:
        found, is_moved = [], False
    if not is_moved:
        raise ValueError(
            f"moments and averages go where elements are moved, dropped or joined, each at most once and as it is, and "
            f"{route.how}, from {list(route.sources)} to {list(route.targets)}, changes or repeats them; the "
            "parameters alone go through it: plan(arrays)"
        )
    return found


class _NotMovedError(Exception):
    pass


class _Elements(NamedTuple):
    """An array of elements, by their numbers; any other value is a constant."""

    numbers: Any


# What moves the elements of one operand, of several. No element may come out twice, which is seen in the end.
_MOVES = {"broadcast_in_dim", "dynamic_slice", "expand_dims", "gather", "reshape", "rev", "slice", "split", "squeeze"}
_MOVES |= {"transpose"}
_JOINS = {"concatenate", "stack"}
_SAME = {"copy", "device_put", "optimization_barrier"}
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}


def _numbers(value: object) -> Any:
    if not isinstance(value, _Elements):
        raise _NotMovedError
    return value.numbers


def _run(jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The results of a program, of elements and of constants."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _step(eqn, _values(eqn.invars, known)), strict=True))
    return _values(jaxpr.outvars, known)


def _values(atoms: Sequence[Any], known: Mapping[Any, Any]) -> list[Any]:
    """The values of literals and of variables."""
    return [atom.val if isinstance(atom, Literal) else known[atom] for atom in atoms]


def _step(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """The results of one operation.

    An operation on constants alone runs as it is. An operation that moves elements runs on their numbers. Any other one
    on elements would compute something of them.
    """
    name, program = eqn.primitive.name, called(eqn)
    if not any(isinstance(value, _Elements) for value in values):
        return bind(eqn, values)
    if program is not None:
        is_open = isinstance(program, Jaxpr)
        return _run(program, (), values) if is_open else _run(program.jaxpr, program.consts, values)
    if name in _MOVES | _JOINS:
        count = len(values) if name in _JOINS else 1
        if any(isinstance(value, _Elements) for value in values[count:]):
            raise _NotMovedError
        # Behind the end of its operand a gather may fill in a number. -1 is that of no element, so it is noticed.
        if name == "gather":
            eqn = eqn.replace(params=eqn.params | {"fill_value": -1})
        return list(map(_Elements, bind(eqn, [*map(_numbers, values[:count]), *values[count:]])))
    if name in _SAME or (name == "convert_element_type" and _is_rounding(eqn)) or _is_neutral(eqn, values):
        return values[: len(eqn.outvars)]
    raise _NotMovedError


def _is_rounding(eqn: Any) -> bool:
    """Whether a conversion changes no more than digits."""
    before, after = (atom.aval.dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    return is_inexact(before) and is_inexact(after) and is_complex(before) == is_complex(after)


def _is_neutral(eqn: Any, values: list[Any]) -> bool:
    """Whether zero is added to elements, or they are multiplied by one."""
    neutral, same = _NEUTRAL.get(eqn.primitive.name), eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    return neutral is not None and same and not isinstance(values[1], _Elements) and bool(np.all(values[1] == neutral))
