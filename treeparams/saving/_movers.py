"""Moves moments, averages and other arrays that belong to parameters as a plan moves the parameters.

A function of parameters is read from its program. It must be linear, with factors of zero and one, and add nothing but
zeros: then it is a matrix of whole numbers, none of them negative. It moves elements, each to one place at most, if no
row and no column of the matrix sums up to more than one; where a row sums up to zero, no element comes. If each
operation moves elements of whole arrays that nothing else uses, this holds for any of their shapes. For other functions
the function and its transpose, applied to ones, give the sums.

The function that was read is applied to the arrays that belong to the parameters. Casts are left out, so that these
keep their digits.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._files.names import Names
from .._programs import Kind, Walk, bind, is_floating, is_linear, kind_of
from .._tree.paths import nearest
from .._tree.structure import Spec
from .._tree.text import describe
from .._tree.types import common_dtype, is_complex
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
        self._found: dict[Any, dict[int, _Places]] = {}

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
        arrays, places = list(map(read, self.reads(path))), self._places(path)
        if self.is_plain(path):
            return arrays[0]
        if route.function is unstack:
            return arrays[0][number]
        return route(*arrays)[number] if places is None else places.filled(arrays)

    def dropped(self, path: str) -> Any:
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
        key = id(route.function), *specs  # which layers have in common
        if key not in self._found:
            self._found[key] = _places_in(route, specs)
        return self._found[key][number]


# -- Where elements come from ------------------------------------------------------------------------------------------


class _Places(NamedTuple):
    """Where the elements of a result come from.

    Attributes:
        reads: the numbers of the arguments that it is made from.
        is_same: whether it is the one argument, unchanged.
        dropped: where no element comes, since a mask or padding makes zeros; `None` if nowhere.
        filled: returns the result for arrays that belong to these arguments.
    """

    reads: Sequence[int]
    is_same: bool
    dropped: Any
    filled: Callable[[Sequence[Any]], Any]


def _places_in(route: Route, specs: Sequence[Spec]) -> dict[int, _Places]:
    """Returns where the elements come from, for each result that is floating or complex."""
    own = [i for i, spec in enumerate(specs) if spec.parameter]

    def linear(arrays: Mapping[int, Any], dtype: Any) -> dict[int, Any]:
        return {number: result.array for number, result in _Linear(dtype).results(program, arrays).items()}

    def filled(number: int, dropped: Any, reads: Sequence[int], arrays: Sequence[Any]) -> Any:
        dtype = common_dtype([array.dtype for array in arrays])
        given = {i: jnp.asarray(array).astype(dtype) for i, array in zip(reads, arrays, strict=True)}
        result = linear({i: np.zeros(specs[i].shape, dtype) for i in own} | given, dtype)[number]
        return result if dropped is None else jnp.where(dropped, 0, result)

    with jax.ensure_compile_time_eval():
        try:
            program = jax.make_jaxpr(route)(*[jax.ShapeDtypeStruct(*spec[:2]) for spec in specs])
            read = _Linear()
            results = read.results(program, dict.fromkeys(own))
            rows = {} if read.has_moved(results.values()) else _rows(linear, {i: specs[i].shape for i in own})
        except _NotMovedError as error:
            raise ValueError(
                f"moments and averages can follow a function that moves, drops or joins elements, each at most once, "
                f"but {route.how}, from {list(route.sources)} to {list(route.targets)}, {error}; use the plan for the "
                "parameters alone, plan(arrays), and begin with a fresh state and average: tx.init(model), "
                "tp.Ema(model, ...)"
            ) from None
    places = dict[int, _Places]()
    for number, result in results.items():
        # What has no elements counts as made from the first parameter, as if a mask had dropped all of it.
        reads = tuple(sorted(result.reads)) or (own[0],)
        dropped = rows[number] == 0 if number in rows and not rows[number].all() else None
        of = functools.partial(filled, number, dropped, reads)
        places[number] = _Places(reads, result.is_given, dropped, of)
    return places


def _rows(linear: Callable[..., dict[int, Any]], shapes: Mapping[int, tuple[int, ...]]) -> dict[int, Any]:
    """Returns the sums of the rows for each result, if none of them and no sum of a column is more than one."""
    total = sum(map(math.prod, shapes.values()))
    if total >= 2**31:
        raise _NotMovedError(f"is of {total:,} elements, and does more than use each array once, as a whole")
    ones = {i: np.ones(shape, np.float32) for i, shape in shapes.items()}
    rows, transposed = jax.vjp(lambda ones: linear(ones, np.float32), ones)
    (columns,) = transposed(jax.tree.map(jnp.ones_like, rows))
    if not all(jnp.max(each, initial=0) <= 1 for each in [*rows.values(), *columns.values()]):
        raise _NotMovedError("changes or repeats them")
    return jax.tree.map(np.asarray, rows)


class _NotMovedError(Exception):
    """Raised for an operation that may do something else to elements than move them."""


class _Elements(NamedTuple):
    """An array that is made of elements of these arguments, and whether it is one of them as it was given."""

    reads: frozenset[int]
    array: Any
    is_given: bool = False


_UNKNOWN = object()  # an array that is no parameter, and what is made of such arrays


class _Linear(Walk[Any]):
    """Applies a program that is linear in its parameters, with factors of zero and one; other values are constants.

    Without a dtype there are no arrays in place of the parameters, and the program is only read.
    """

    def __init__(self, dtype: Any = None) -> None:
        super().__init__()
        self._dtype, self._are_moves, self._taken = dtype, True, list[_Elements]()

    def results(self, program: ClosedJaxpr, arrays: Mapping[int, Any]) -> dict[int, _Elements]:
        """Returns the floating and complex results for arrays in place of the parameters among the arguments."""
        own = {i: _Elements(frozenset({i}), array, True) for i, array in arrays.items()}
        results = self.run(program, [own.get(i, _UNKNOWN) for i in range(len(program.in_avals))])
        return {i: self._elements(results[i]) for i, aval in enumerate(program.out_avals) if is_floating(aval)}

    def has_moved(self, results: Iterable[_Elements]) -> bool:
        """Returns whether results consist of elements, none of which is in two, as operations and shapes tell."""
        every = [*self._taken, *results]  # each array was used once
        return self._are_moves and all(each.reads for each in every) and len(set(map(id, every))) == len(every)

    def step(self, eqn: JaxprEqn, its: list[Any]) -> Sequence[Any]:
        own, is_unknown = [isinstance(each, _Elements) for each in its], any(each is _UNKNOWN for each in its)
        if not any(own):
            with jax.ensure_compile_time_eval():
                return [_UNKNOWN] * len(eqn.outvars) if is_unknown else bind(eqn, its)
        name, kind, program = eqn.primitive.name, kind_of(eqn), self.program_of(eqn)
        if program is not None and name != "shard_map":
            return self.run(program, its)
        operands, made = ([var.aval for var in some] for some in cast(Any, (eqn.invars, eqn.outvars)))
        ends = [*itertools.compress(operands, own), *made]
        keeps_type = all(map(is_floating, ends)) and len({is_complex(aval.dtype) for aval in ends}) == 1
        if is_unknown or not keeps_type or not is_linear(eqn, own) or name in ("conj", "div", "fft", "neg", "sub"):
            raise _NotMovedError("changes or repeats them")
        if Kind.SAME in kind or name in ("convert_element_type", "reduce_precision"):
            return its
        if name == "mul" and np.all(its[own.index(False)] == 1) and operands[own.index(True)].shape == made[0].shape:
            return [its[own.index(True)]]
        # What is not floating are places, and what chooses between arrays.
        pairs = zip(operands, its, strict=True)
        values = [self._elements(it, Kind.PRODUCT in kind) if is_floating(aval) else it for aval, it in pairs]
        elements = [each for each in values if isinstance(each, _Elements)]
        is_no_more = sum(aval.size for aval in made) <= operands[0].size
        is_move = Kind.MOVES in kind and Kind.FILLS not in kind and len(its) == 1 and is_no_more
        self._are_moves &= is_move or name in ("concatenate", "stack")
        self._taken += elements
        results = [None] * len(eqn.outvars)
        if self._dtype is not None:
            params = eqn.params | dict.fromkeys({"preferred_element_type"} & eqn.params.keys())
            results = bind(eqn.replace(params=params), [getattr(each, "array", each) for each in values])
        return [_Elements(frozenset().union(*(each.reads for each in elements)), result) for result in results]

    def _elements(self, value: Any, is_factor: bool = False) -> _Elements:
        """Returns elements, or a constant as such: zeros, or zeros and ones as a factor."""
        if isinstance(value, _Elements):
            return value
        numbers = np.not_equal(value, 0) & is_factor
        if not np.array_equal(value, numbers):
            raise _NotMovedError("changes or repeats them")
        return _Elements(frozenset(), np.asarray(numbers, self._dtype))
