"""Moves moments, averages and other arrays that belong to parameters as a plan moves the parameters.

Where the elements of a function's results come from is found by running it on numbers: a function moves elements if it
moves the digits of the elements' own numbers, which tell the places, and then random numbers, which must come out
unchanged at these places. Nothing is read from its program, so any way to move elements is as good as another, a
product with a permutation included.

All numbers are such that the narrowest of the function's dtypes holds them and, if it loses digits of these, that
bfloat16 holds them too, so that casts within the function do no harm. The random ones lie near both ends of the range
of these dtypes, between them, on both sides of zero, and on it, so that bounds, roundings, thresholds and orders by
value are noticed.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._files.names import Names
from .._tree.dtypes import common_dtype, is_complex, is_inexact
from .._tree.paths import nearest
from .._tree.structure import Spec
from .._tree.text import describe
from ._contents import Contents
from ._fit import Move
from ._rename import Route, stack, unstack


class Movers:
    """The moves of a plan, by the paths of its model, for arrays that belong to the parameters.

    Attributes:
        specs: the specs of the arrays of the plan's source, by name.
        roots: for each further name of an array of the source, its first name.
    """

    def __init__(self, contents: Contents, comes: Mapping[int, Move], source: Names) -> None:
        self.specs, self.roots = source.specs, source.aliases
        paths = contents.structure.paths
        # In a model that was untied after the plan was made each place gets the array of the tie, unless computed.
        roots = {i: alias.source for i, alias in contents.aliases.items() if not alias.transforms}
        leaves = [i for i in contents.names if i in roots or i not in contents.aliases]
        self._model = {paths[i]: contents.spec(i) for i in leaves}
        self._comes = {paths[i]: comes[roots.get(i, i)] for i in leaves if roots.get(i, i) in comes}
        self._found: dict[int, dict[int, _Places]] = {}

    def check_like(self, arrays: Iterable[tuple[str, Any]], write: str) -> None:
        """Rejects a fresh state or average that has a path or a shape that the plan's model does not have."""
        for path, array in arrays:
            spec = self._model.get(path)
            if spec is None or spec.shape != tuple(array.shape):
                got = "has none" if spec is None else f"has {describe(spec)}"
                hint = nearest(path, self._model) if spec is None else ""
                raise ValueError(
                    f"like has {describe(array)} at {path!r}, but the plan's model {got} there{hint}: it belongs to "
                    f"another model; write like={write} with the model that the plan makes"
                )

    def sources(self, path: str) -> tuple[str, ...]:
        """Returns the names that come to a path together; empty if none do."""
        return self._comes[path].route.sources if path in self._comes else ()

    def reads(self, path: str) -> tuple[str, ...]:
        """Returns those of the names that the array at a path is made from."""
        sources, places = self._comes[path].route.sources, self._places(path)
        return sources if places is None else tuple([sources[i] for i in places.reads])

    def is_plain(self, path: str) -> bool:
        """Returns whether one array comes to a path unchanged, except for its dtype."""
        places = self._places(path)
        return self._comes[path].route.function is None or (places is not None and places.is_same)

    def how(self, path: str) -> str:
        """Returns the name of the function that makes the array for a path."""
        return self._comes[path].route.how

    def move(self, path: str, read: Callable[[str], Any]) -> Any:
        """Returns the array for a path, from the arrays that belong to the parameters it is made from.

        It keeps the dtype of these arrays. Where no element comes it is zero.
        """
        route, number, _ = self._comes[path]
        arrays, places = {name: read(name) for name in self.reads(path)}, self._places(path)
        if self.is_plain(path):
            return next(iter(arrays.values()))
        if route.function is unstack:
            return arrays[route.sources[0]][number]
        if places is not None and not places.are_kept(arrays.values()):
            return places.filled(list(arrays.values()))
        # What the result is not made from may be anything. Rows that are stacked, or of no parameters, are made of all.
        others = {name: self.specs[name] for name in route.sources if name not in arrays}
        arrays |= {name: jax.lax.full(spec.shape, 0, spec.dtype) for name, spec in others.items()}
        return route(*[arrays[name] for name in route.sources])[number]

    def dropped(self, path: str) -> np.ndarray | None:
        """Returns where no element comes to the array for a path; `None` if nowhere."""
        places = self._places(path)
        return None if places is None else places.dropped

    def check(self) -> None:
        """Checks that all functions of parameters only move elements."""
        for path in self._comes:
            self._places(path)

    def _places(self, path: str) -> "_Places | None":
        """Returns where the elements of a parameter come from if a function of parameters moves them."""
        route, number, _ = self._comes[path]
        specs: list[Spec] = [self.specs[name] for name in route.sources]
        is_moved = self._model[path].parameter and any(spec.parameter for spec in specs)
        if route.function in (None, stack, unstack) or not is_moved:
            return None
        if id(route) not in self._found:
            self._found[id(route)] = _places_in(route, specs)
        return self._found[id(route)][number]


# -- Where elements come from ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Places:
    """Where the elements of a result come from.

    Attributes:
        reads: the numbers of the arguments that it is made from.
        numbers: for each place the number of its element, counted through these arguments; -1 if there is none.
        is_same: whether it is the one argument, unchanged.
        dtype: the dtype of arrays that the function itself moves without loss; `None` if of none.
    """

    reads: tuple[int, ...]
    numbers: np.ndarray
    is_same: bool
    dtype: np.dtype | None

    @functools.cached_property
    def dropped(self) -> np.ndarray | None:
        """Where no element comes, since a mask or padding makes zeros; `None` if nowhere."""
        where = self.numbers < 0
        return where if where.any() else None

    def are_kept(self, arrays: Iterable[Any]) -> bool:
        """Returns whether the function itself moves these arrays, and loses nothing."""
        # Where it makes zeros it may do so by a product, which makes no zeros of what is not finite.
        return self.dropped is None and all(array.dtype == self.dtype for array in arrays)

    def filled(self, arrays: Sequence[Any]) -> Any:
        """Returns the result for arrays that belong to the arguments that it is made from."""
        dtype = common_dtype([array.dtype for array in arrays])
        elements = [jnp.ravel(jnp.asarray(array).astype(dtype)) for array in arrays]
        return jnp.concatenate([*elements, jnp.zeros(1, dtype)])[self.numbers]  # -1 is the zero


def _places_in(route: Route, specs: Sequence[Spec]) -> dict[int, _Places]:
    """Returns where the elements come from, for each result that is floating or complex."""
    starts = np.cumsum([0, *(math.prod(spec.shape) * spec.parameter for spec in specs)])
    total, how = int(starts[-1]), f"{route.how}, from {list(route.sources)} to {list(route.targets)},"
    fresh = "begin with a fresh state and average: tx.init(model), tp.Ema(model, ...)"
    if total >= np.iinfo(np.int32).max:
        raise ValueError(
            f"numbers of 32 bits cannot follow {total:,} elements, of moments and averages, through {how} at once; "
            f"write functions of fewer, or {fresh}"
        )
    found, exact = _numbers(route, specs, total)
    seen, count, places = np.zeros(total, bool), 0, dict[int, _Places]()
    for number, its in found.items():
        own = np.zeros(total + 1, bool)  # the last is for places without elements
        for part in _parts(its):
            own[part] = True
        seen |= own[:-1]
        count += np.count_nonzero(its >= 0)
        # What has no elements counts as made from the first parameter, as if a mask had dropped all of it.
        reads = [i for i, (start, stop) in enumerate(itertools.pairwise(starts)) if own[start:stop].any()]
        reads = reads or [next(i for i, spec in enumerate(specs) if spec.parameter)]
        begins, sizes = starts[reads], np.diff(starts)[reads]
        skipped = begins - np.cumsum(sizes) + sizes
        if skipped.any():
            its -= np.array([0, *skipped], np.int32)[np.searchsorted(begins, its, side="right")]
        is_same = len(reads) == 1 and its.shape == specs[reads[0]].shape
        is_same = is_same and np.array_equal(its.ravel(), np.arange(its.size, dtype=np.int32))
        places[number] = _Places(tuple(reads), its, is_same, exact)
    # Over all results together: an element that comes out in two of them is repeated, too.
    if not found or np.count_nonzero(seen) < count:
        raise ValueError(
            f"moments and averages can follow a function that moves, drops or joins elements, each at most once, "
            f"but {how} changes or repeats them; use the plan for the parameters alone, plan(arrays), and {fresh}"
        )
    return places


def _numbers(route: Route, specs: Sequence[Spec], total: int) -> tuple[dict[int, np.ndarray], np.dtype | None]:
    """Returns for each floating or complex result the numbers of its elements, through all parameters; -1 if none.

    There are no numbers if not all elements are moved. Also returns the dtype in which the function loses no digit.
    """
    made = jax.eval_shape(route, *[jax.ShapeDtypeStruct(*spec[:2]) for spec in specs])
    dtypes = {jnp.dtype(each.dtype) for each in (*specs, *made) if is_inexact(each.dtype)}
    for held in (dtypes, {*dtypes, jnp.dtype(jnp.bfloat16)}):
        numbers = {i: np.zeros(each.shape, np.int32) for i, each in enumerate(made) if is_inexact(each.dtype)}
        if _are_found(numbers, held, route, specs, total):
            return numbers, next(iter(dtypes)) if len(dtypes) == 1 and held == dtypes else None
    return {}, None


def _are_found(
    numbers: dict[int, np.ndarray], dtypes: Set[np.dtype], route: Route, specs: Sequence[Spec], total: int
) -> bool:
    """Adds the numbers to zeros, found with digits and letters that all of these dtypes hold, and checks them."""
    digits = min(jnp.finfo(dtype).nmant for dtype in dtypes)
    lowest = max(math.ceil(math.log2(jnp.finfo(dtype).smallest_normal)) for dtype in dtypes)
    highest = min(math.floor(math.log2(jnp.finfo(dtype).max)) for dtype in dtypes) - 1
    bits, common = min(digits + 1, highest + 1, 16), common_dtype(dtypes)
    for place in range(0, max(1, (total - 1).bit_length()), bits):
        index = (np.arange(total, dtype=np.int32) >> place & 2**bits - 1).astype(np.uint16)
        if not _are_added(numbers, _tried(route, specs, np.arange(1.0, 2**bits + 1), index, common)[1], place):
            return False
    for its in numbers.values():
        np.maximum(its, -1, out=its)
    if any((its >= total).any() for its in numbers.values()):
        return False
    letters = _letters(digits, lowest, highest)
    index = np.random.default_rng(0).integers(0, letters.shape[1], total, dtype=np.uint8)
    turns = letters if total < 2**20 else letters[:2]  # some of many elements get each letter in one turn
    return all(_are_at(numbers, *_tried(route, specs, own, index, common, turn)) for turn, own in enumerate(turns))


def _are_added(numbers: dict[int, np.ndarray], results: dict[int, np.ndarray], place: int) -> bool:
    """Adds the digits that a function has moved to numbers, at their binary place; returns whether all are whole."""
    for i, its in numbers.items():
        for at, own in zip(_parts(its), _parts(np.real(results[i])), strict=True):
            with np.errstate(invalid="ignore"):
                digits = own.astype(np.int32)
            if not np.array_equal(digits.astype(own.dtype), own):
                return False
            at += (digits - 1) << place
    return True


def _are_at(numbers: dict[int, np.ndarray], elements: np.ndarray, results: dict[int, np.ndarray]) -> bool:
    """Returns whether results have the elements with these numbers, unchanged."""
    pairs = ((at, own) for i, its in numbers.items() for at, own in zip(_parts(its), _parts(results[i]), strict=True))
    return all(np.array_equal(elements[at], own.astype(elements.dtype)) for at, own in pairs)


def _letters(digits: int, lowest: int, highest: int) -> np.ndarray:
    """Returns numbers of so many binary digits, those of each turn in a row.

    They are moderate in the first turn, with zeros, and zeros alone in the last. In each of those between they are
    large and small, of both signs; an element gets one of each kind, in turns.
    """
    rng, count = np.random.default_rng(0), 50

    def drawn(low: int, high: int) -> np.ndarray:
        exponents = rng.integers(low, high, count, endpoint=True)
        return np.ldexp(1 + rng.integers(0, 2**digits, count) / 2**digits, exponents)

    large, small, moderate = (highest // 2, highest), (lowest, lowest // 2), (max(lowest, -3), min(highest, 3))
    kinds = np.stack([drawn(*large), -drawn(*large), drawn(*small), -drawn(*small)])
    first = np.concatenate([drawn(*moderate) * sign for sign in (1, -1, 1, 0)])
    return np.stack([first, *(np.roll(kinds, turn, axis=0).T.ravel() for turn in range(4)), np.zeros(kinds.size)])


def _tried(
    route: Route, specs: Sequence[Spec], letters: np.ndarray, index: np.ndarray, dtype: np.dtype, turn: int = 0
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Runs a function on elements that spell an index in letters.

    Returns these elements, with a zero after them, and the floating and complex results.
    """
    elements, given, start = np.zeros(len(index) + 1, dtype), list[Any](), 0
    with jax.ensure_compile_time_eval():
        for spec in specs:
            if not spec.parameter:  # it changes from turn to turn, so that what depends on it is noticed
                given.append(jax.lax.full(spec.shape, turn, spec.dtype))
                continue
            its = slice(start, start := start + math.prod(spec.shape))
            table = (letters + 1j * letters[::-1] if is_complex(spec.dtype) else letters).astype(dtype)
            for part, at in zip(_parts(elements[its]), _parts(index[its]), strict=True):
                part[:] = table[at]
            own = elements[its] if is_complex(spec.dtype) else np.real(elements[its])
            given.append(jnp.asarray(own.reshape(spec.shape).astype(spec.dtype, copy=False)))
        results = enumerate(route(*given))
        return elements, {i: np.asarray(own) for i, own in results if is_inexact(own.dtype)}


def _parts(array: np.ndarray) -> list[np.ndarray]:
    """Returns the elements in parts, of which one at a time is copied, such as to the 64 bits of an index."""
    return np.array_split(array.reshape(-1), 1 + array.size // 2**20)
