"""Moves moments, averages and other arrays that belong to parameters as a plan moves the parameters.

A function of parameters is read from its program, which must be affine: a matrix, and constants that are added. An
average follows any such function, because its weights sum to one: the function is applied to it. Moments follow if the
function moves elements, each to one place at most: if the factors are zero and one, and no row and no column of the
matrix sums up to more than one. Where a row sums up to zero no element comes, and moments begin. If each operation
moves elements of whole arrays that nothing else uses, this holds for any of their shapes. For other functions the
matrix and its transpose, applied to ones, give the sums.

Casts within the function are left out, so that moments keep their digits.
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
from .._programs import Kind, Walk, bind, is_floating, is_linear
from .._tree.paths import nearest
from .._tree.text import describe
from .._tree.types import common_dtype, is_complex
from ._contents import Contents
from ._fit import Move
from ._names import Route, stack, unstack


class Movers:
    """The moves of a plan, by the paths of its model, for arrays that belong to the parameters.

    Attributes:
        source: the names and specs of the plan's source.
        strict: whether names that the source does not have are errors.
        comes: the source of each path.
        used: the names that come somewhere.
    """

    def __init__(self, contents: Contents, comes: Mapping[int, Move], source: Names, strict: bool) -> None:
        self.source, self.strict = source, strict
        paths = contents.structure.paths
        # In a model that was untied after the plan was made each place gets the array of the tie, unless computed.
        roots = {i: alias.source for i, alias in contents.aliases.items() if not alias.transforms}
        leaves = [i for i in contents.names if i in roots or i not in contents.aliases]
        self._model = {paths[i]: contents.structure.spec(i) for i in leaves}
        self.comes = {paths[i]: comes[roots.get(i, i)] for i in leaves if roots.get(i, i) in comes}
        self.used = {name for route, _, _ in self.comes.values() for name in route.sources}
        self._found: dict[Any, dict[int, Places]] = {}

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

    def places(self, path: str) -> "Places":
        """Returns where the elements of a parameter come from."""
        route, number, _ = self.comes[path]
        if route.function is None:
            return Places(route.sources, True, None, lambda arrays: arrays[0])
        if route.function in (stack, unstack):
            return Places(route.sources, False, None, lambda arrays: route(*arrays)[number])
        key = id(route.function), *(self.source.specs[name] for name in route.sources)  # layers have it in common
        if key not in self._found:
            self._found[key] = _Reader(route, self.source).places()
        found = self._found[key][number]
        return found._replace(reads=tuple([route.sources[i] for i in found.reads]))

    def check(self) -> None:
        """Checks that averages can follow all functions."""
        for route, _, _ in self.comes.values():
            _Reader(route, self.source).check()

    def average(self, path: str, read: Callable[[str], Any]) -> Any:
        """Returns the average for a path, from the averages by name; it keeps the dtype of these."""
        route, number, _ = self.comes[path]
        reader, arrays = _Reader(route, self.source), list(map(read, route.sources))
        if reader.own and self._model[path].parameter:
            return reader.results({i: arrays[i] for i in reader.own})[number]
        return route(*arrays)[number]


# -- Where elements come from ------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where the elements of a result come from.

    Attributes:
        reads: the arguments that it is made from.
        is_same: whether it is the one argument, unchanged.
        dropped: where no element comes, but a constant; `None` if nowhere.
        filled: returns the result for arrays that belong to these arguments; zero where no element comes.
    """

    reads: Sequence[Any]
    is_same: bool
    dropped: Any
    filled: Callable[[Sequence[Any]], Any]


class _Reader:
    """Reads the function of a route.

    Attributes:
        own: the arguments that are parameters, by number, unless the function only stacks or unstacks arrays.
    """

    def __init__(self, route: Route, source: Names) -> None:
        self._route, self._specs = route, [source.specs[name] for name in route.sources]
        is_read = route.function not in (None, stack, unstack)
        self.own = [i for i, spec in enumerate(self._specs) if spec.parameter and is_read]

    def places(self) -> dict[int, Places]:
        """Returns where the elements come from, for each result that is floating or complex."""
        read = _Linear(is_exact=True)
        results = self._walked(read, dict.fromkeys(self.own))
        rows = {} if read.has_moved(results.values()) else self._rows()
        found = dict[int, Places]()
        for number, result in results.items():
            # What is made of constants counts as made from the first parameter, as if a mask had dropped all of it.
            reads = tuple(sorted(result.reads)) or (self.own[0],)
            dropped = rows[number] == 0 if number in rows and not rows[number].all() else None
            filled = functools.partial(self._filled, number, dropped, reads)
            found[number] = Places(reads, result.is_given, dropped, filled)
        return found

    def check(self) -> None:
        """Checks that the function is affine."""
        if self.own:
            self._walked(_Linear(), dict.fromkeys(self.own))

    def results(self, arrays: Mapping[int, Any], *, is_exact: bool = False) -> dict[int, Any]:
        """Returns the results for these arrays in place of the parameters."""
        dtype = common_dtype([array.dtype for array in arrays.values()])
        own = {i: jnp.asarray(array).astype(dtype) for i, array in arrays.items()}
        return {number: result.array for number, result in self._walked(_Linear(dtype, is_exact), own).items()}

    def _filled(self, number: int, dropped: Any, reads: Sequence[int], arrays: Sequence[Any]) -> Any:
        zeros = {i: np.zeros(self._specs[i].shape, arrays[0].dtype) for i in self.own}
        result = self.results(zeros | dict(zip(reads, arrays, strict=True)), is_exact=True)[number]
        return result if dropped is None else jnp.where(dropped, 0, result)

    def _rows(self) -> dict[int, Any]:
        """Returns the sums of the rows for each result, if none of them and no sum of a column is more than one."""
        shapes = {i: self._specs[i].shape for i in self.own}
        total = sum(map(math.prod, shapes.values()))
        if total >= 2**31:
            raise self._refused(f"is of {total:,} elements, and does more than use each array once, as a whole")
        with jax.ensure_compile_time_eval():
            ones = {i: np.ones(shape, np.float32) for i, shape in shapes.items()}
            rows, transposed = jax.vjp(lambda ones: self.results(ones, is_exact=True), ones)
            (columns,) = transposed(jax.tree.map(jnp.ones_like, rows))
            if not all(jnp.max(each, initial=0) <= 1 for each in [*rows.values(), *columns.values()]):
                raise self._refused("changes or repeats them")
            return jax.tree.map(np.asarray, rows)

    def _walked(self, walk: "_Linear", arrays: Mapping[int, Any]) -> "dict[int, _Elements]":
        try:
            with jax.ensure_compile_time_eval():
                program = jax.make_jaxpr(self._route)(*[jax.ShapeDtypeStruct(*spec[:2]) for spec in self._specs])
            return walk.results(program, arrays)
        except _NotMovedError as error:
            raise self._refused(str(error), "moves, drops or joins elements" * walk.is_exact) from None

    def _refused(self, why: str, what: str = "moves, drops or joins elements") -> ValueError:
        route = self._route
        can = f"moments can follow a function that {what}, each at most once" if what else "averages can follow sums"
        return ValueError(
            f"{can}, but {route.how}, from {list(route.sources)} to {list(route.targets)}, {why}; use the plan for the "
            "parameters alone, plan(arrays), and begin with a fresh state and average: tx.init(model), "
            "tp.Ema(model, ...)"
        )


class _NotMovedError(Exception):
    """Raised for an operation that may do something else to elements than it may."""


class _Elements(NamedTuple):
    """An array that is made of elements of these arguments, and whether it is one of them as it was given."""

    reads: frozenset[int]
    array: Any
    is_given: bool = False


_UNKNOWN = object()  # an array that is no parameter, and what is made of such arrays


class _Linear(Walk[Any]):
    """Applies a program that is affine in its parameters; other values are constants.

    Without a dtype there are no arrays in place of the parameters, and the program is only read. If it is to be exact,
    factors are zero and one, and a zero is the place of each constant that is added.
    """

    def __init__(self, dtype: Any = None, is_exact: bool = False) -> None:
        super().__init__()
        self._dtype, self.is_exact, self._are_moves, self._taken = dtype, is_exact, True, list[_Elements]()

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
        name, kind, program = eqn.primitive.name, Kind.of(eqn), self.program_of(eqn)
        if program is not None and name != "shard_map":
            return self.run(program, its)
        operands, made = ([var.aval for var in some] for some in cast(Any, (eqn.invars, eqn.outvars)))
        ends = [*itertools.compress(operands, own), *made]
        keeps_type = all(map(is_floating, ends)) and len({is_complex(aval.dtype) for aval in ends}) == 1
        is_inexact = self.is_exact and name in ("conj", "div", "fft", "neg", "sub")
        if is_unknown or not keeps_type or not is_linear(eqn, own) or is_inexact:
            raise _NotMovedError("changes or repeats them" if self.is_exact else "is not affine")
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
        """Returns elements, or a constant as such."""
        if isinstance(value, _Elements):
            return value
        if value is _UNKNOWN:
            raise _NotMovedError("depends on an array that is no parameter")
        if self.is_exact:
            numbers = np.not_equal(value, 0) & is_factor
            if is_factor and not np.array_equal(value, numbers):
                raise _NotMovedError("changes or repeats them")
            value = numbers
        return _Elements(frozenset(), np.asarray(value, self._dtype))
