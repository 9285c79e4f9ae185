"""Which element goes where: what a function of arrays does to moments and averages, if it only moves elements."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._index import is_complex
from .._structure import Spec, is_inexact
from ._names import Names
from ._rename import Route


class Movers:
    """What comes to each array of a model, for arrays that are kept beside the parameters.

    Attributes:
        sources: of each path of the model, the names that it comes from.
        known: all names, ties once.
    """

    def __init__(self, comes: Mapping[str, tuple[Route, int]], source: Names) -> None:
        self._comes = comes
        self._specs = source.specs
        self._maps: dict[int, Sequence[np.ndarray]] = {}
        one: Callable[[str], str] = lambda name: source.aliases.get(name, name)
        self.sources = {path: tuple(map(one, route.sources)) for path, (route, _) in comes.items()}
        self.known = frozenset(map(one, source.specs))

    def move(self, path: str, shape: tuple[int, ...], arrays: Sequence[Any]) -> Any:
        """The array for a path, of what is kept beside each of its sources.

        What has not the shape of its parameter, as a count of its own, is taken where it is the same for all sources.
        """
        route, number = self._comes[path]
        if route.is_plain:
            return arrays[0]
        specs = [self._specs[name] for name in route.sources]
        if not any(spec.parameter for spec in specs):
            return route(*arrays)[number]
        is_alike = lambda array, spec: array.shape == spec.shape and is_inexact(array.dtype)
        if all(map(is_alike, arrays, specs)):
            if route.function is None:
                return jnp.stack(list(map(jnp.asarray, arrays))) if route.kind == "stack" else arrays[0][number]
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
        """The place of each element of a result among the elements of all sources, one after another."""
        if id(route) not in self._maps:
            self._maps[id(route)] = _places(route, [self._specs[name] for name in route.sources])
        return self._maps[id(route)][number]

    def check(self) -> None:
        """Checks that all functions of parameters only move elements."""
        for route, number in self._comes.values():
            if route.function is not None and any(self._specs[name].parameter for name in route.sources):
                self._map(route, number)


def _places(route: Route, specs: Sequence[Spec]) -> list[np.ndarray]:
    """As `_map`, of each result of a route; found by running it on numbers that tell the elements apart."""
    count = sum(math.prod(spec.shape) for spec in specs)
    # What adds, scales, sorts, rounds or drops signs gives other places by one of these numberings.
    numberings = [np.arange(count) + 1, 3 * np.arange(count) + 5, count + 11 - np.arange(count)]
    found = [_run(route, specs, numbers, unit) for numbers, unit in zip(numberings, (1.0, -0.125, 1.0), strict=True)]
    places = [numbers - 1 for numbers in found[0]]
    together = np.concatenate([each.ravel() for each in places]) if places else np.zeros(0, int)
    is_moved = bool(np.all((together >= 0) & (together < count))) and len(np.unique(together)) == len(together)
    for numbers, results in zip(numberings[1:], found[1:], strict=True):
        is_moved = is_moved and all(np.array_equal(n, numbers[p]) for n, p in zip(results, places, strict=True))
    if not is_moved:
        raise ValueError(
            f"moments and averages go where elements are moved, dropped or joined, each at most once and as it is, and "
            f"{route.how}, from {list(route.sources)} to {list(route.targets)}, changes or repeats them; the "
            "parameters alone go through it: plan(arrays)"
        )
    return [each.ravel() for each in places]


def _run(route: Route, specs: Sequence[Spec], numbers: np.ndarray, unit: float) -> list[np.ndarray]:
    """What a route makes of whole numbers, -1 for what comes out as none.

    They go through it in digits that the narrowest of its dtypes holds exactly, times a unit.
    """
    ends = np.cumsum([math.prod(spec.shape) for spec in specs])[:-1]

    def run(digit: np.ndarray) -> list[np.ndarray]:
        parts = zip(np.split(digit, ends), specs, strict=True)
        return [np.asarray(made) for made in route(*(_as(part, spec) for part, spec in parts))]

    at_zero = run(np.zeros(len(numbers)))
    dtypes = [each.dtype for each in (*specs, *at_zero)]
    if len(set(map(is_complex, dtypes))) > 1:
        return [np.full(made.shape, -1) for made in at_zero]
    base = 2 ** min(jnp.finfo(dtype).nmant + 1 if jnp.issubdtype(dtype, jnp.inexact) else 1 for dtype in dtypes)
    total, power = [np.zeros(made.shape, np.int64) for made in at_zero], 1
    while power <= numbers.max(initial=1):
        digits = [_read(made, base, unit) for made in run(numbers // power % base * unit)]
        total = [np.where((t < 0) | (d < 0), -1, t + d * power) for t, d in zip(total, digits, strict=True)]
        power *= base
    return total


def _as(part: np.ndarray, spec: Spec) -> Any:
    values = part.reshape(spec.shape)
    if jnp.issubdtype(spec.dtype, jnp.complexfloating):
        values = values * (1 + 1j)  # so that a conjugate is told
    return jnp.asarray(values.astype(spec.dtype))


def _read(made: np.ndarray, base: int, unit: float) -> np.ndarray:
    wide = made.astype(np.complex128 if made.dtype.kind == "c" else np.float64) / unit
    is_digit = (wide.real == np.floor(wide.real)) & (wide.real >= 0) & (wide.real < base)
    if made.dtype.kind == "c":
        is_digit &= wide.imag == wide.real
    return np.where(is_digit, wide.real, -1).astype(np.int64)
