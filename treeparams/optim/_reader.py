"""From programs to formulas: the effect of JAX's operations on the elements of blocks.

Loops, and the state of an optimiser, carry values from round to round. Values that begin alike and change alike share a
number. Numbers follow the order in which values are first carried, which is the same in any form. An operation of which
nothing more is known - a product of matrices, a sort, a draw - has a formula of its name, its parameters and its
operands, including shapes, so that it is equal only to itself. Kernels, and callbacks to Python, have no formula.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal, Var

from .._programs import Kind, Walk, kind_of, operation_name, scan_operands, while_parts
from ._formulas import NO_FORMULA, TOTALS, Blocks, Formulas, Run, Value, runs_of, with_formulas

_WHOLE = {np.dtype(np.int32), np.dtype(np.int64)}  # counts here overflow in neither
_UNNAMED = {"out_sharding", "sharding", "weak_type"}  # parameters that no number depends on

# One round: from the carried values to the next ones, and its other results.
Body = Callable[[list[Value]], tuple[Sequence[Value], Sequence[Value]]]


class _Loop(NamedTuple):
    """The values of a loop."""

    start: Sequence[Value]
    carried: Sequence[Value]  # as the body takes it
    numbers: list[int]  # of each run that is carried, equal if the runs are
    rounds: dict[int, tuple[int, int]]  # for each number, the first formula, and the next one in terms of the round's
    others: Sequence[Value]


class Reader(Walk[Value], Blocks):
    """Carries formulas of elements.

    Attributes:
        opaque: the names of the operations that have no formula.
    """

    _depth = 0  # of loops

    def __init__(self, formulas: Formulas, slots: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        Walk.__init__(self)
        Blocks.__init__(self, formulas, slots, sizes)
        self.opaque = set[str]()

    def training(self, start: Sequence[Value], body: Body) -> tuple[Any, Sequence[Value]] | None:
        """Returns all rounds that the results beside the carried values depend on, and these results in one round.

        It returns `None` if a carried value does not keep its runs and places.

        The state of an optimiser may contain arrays that no update depends on, such as the norm of each leaf for a
        plot, which differs over a vector. So only those numbers of the loop count that the updates are made of, in this
        round or through the rounds before.
        """
        found = self._loop(start, body)
        if found is None:
            return None
        needed, formulas = set[int](), [run.formula for run in runs_of(found.others)]
        while more := self.formulas.carried_in(self._depth + 1, formulas) - needed:
            needed |= more
            formulas = [found.rounds[n][1] for n in more]
        if needed < found.rounds.keys():
            # Read again without the others, which would otherwise influence the numbers of those that count.
            pairs = zip(found.numbers, runs_of(found.start), strict=True)
            kept = [run.formula if n in needed else NO_FORMULA for n, run in pairs]
            found = self._loop(with_formulas(found.start, kept), body)
        return None if found is None else ((*found.rounds.values(),), found.others)

    # -- Operations ----------------------------------------------------------------------------------------------------

    def operation(self, eqn: JaxprEqn, its: list[Value]) -> Sequence[Value]:
        """Returns the formulas of the results of an operation."""
        name, kind = eqn.primitive.name, kind_of(eqn)
        if Kind.SAME in kind or (name == "convert_element_type" and _keeps_whole_numbers(eqn)):
            return its
        found: Sequence[Value] | None = None
        shape = _aval_of(eqn.outvars[0]).shape if eqn.outvars else ()
        if Kind.EACH in kind and any(_aval_of(atom).shape == shape for atom in eqn.invars):
            params = (repr(value) for key, value in sorted(eqn.params.items()) if key not in _UNNAMED)
            key = name.removesuffix("_any"), *params
            is_floating = jnp.issubdtype(_aval_of(eqn.outvars[0]).dtype, jnp.inexact)
            value = self.of_totals(key, its, is_floating) or self.each(key, its)
            found = None if value is None else [value]
        elif name in _MOVES:
            found = _MOVES[name](self, eqn, its)
        elif not kind or Kind.REF in kind:
            self.opaque.add(operation_name(eqn))
            return [Value.equal(NO_FORMULA)] * len(eqn.outvars)
        return self._whole(eqn, its) if found is None else found

    def _whole(self, eqn: JaxprEqn, its: Sequence[Value]) -> list[Value]:
        """Returns the results of an operation of which only the operands are known, as they lie there."""
        params = repr(sorted((key, repr(value)) for key, value in eqn.params.items()))
        key = eqn.primitive.name, params, *(str(_aval_of(atom)) for atom in eqn.invars), *map(self.lies, its)
        over = [run.formula for run in runs_of(its)]
        formulas = [self.formulas.of("whole", i, *key, over=over) for i in range(len(eqn.outvars))]
        return list(map(Value.of_no_block, formulas, [_aval_of(var).size for var in eqn.outvars]))

    def constant(self, value: Any) -> Value:
        """Returns the formula of a constant."""
        if isinstance(value, Tracer):
            self.formulas.kept.append(value)  # so that no other gets its id
            return Value.of_no_block(self.formulas.of("traced", id(value)), value.size)
        if jnp.issubdtype(getattr(value, "dtype", float), jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        if array.dtype in _WHOLE:
            array = array.astype(np.int64)
        first, everything = array.ravel()[:1].tobytes(), array.tobytes()
        if everything == first * array.size:
            return Value.equal(self.formulas.of("constant", array.dtype.name, first))
        return Value.of_no_block(self.formulas.of("constant", array.dtype.name, array.shape, everything), array.size)

    # -- Branches and loops --------------------------------------------------------------------------------------------

    def of_cond(self, eqn: JaxprEqn, its: list[Value]) -> Sequence[Value]:
        """Returns the formulas of a choice between programs."""
        ends = [self.run(branch, its[1:]) for branch in eqn.params["branches"]]
        found = []
        for i, several in enumerate(zip(*ends, strict=True)):
            either = self.each(("cond",), [its[0], *several])
            found.append(self._whole(eqn, [*its, *several])[i] if either is None else either)
        return found

    def of_while(self, eqn: JaxprEqn, its: list[Value]) -> Sequence[Value]:
        """Returns the formulas of the values that a loop carries."""
        start, end, condition, program = while_parts(eqn)

        def body(carried: list[Value]) -> tuple[list[Value], list[Value]]:
            goes_on = self.run(condition, [*its[:start], *carried])
            return self.run(program, [*its[start:end], *carried]), goes_on

        found = self._loop(its[end:], body)
        if found is None:
            return self._whole(eqn, its)
        return self._after(found, "while", self.lies(found.others[0]), over=[run.formula for run in found.others[0]])[1]

    def of_scan(self, eqn: JaxprEqn, its: list[Value]) -> Sequence[Value]:
        """Returns the formulas of the values that a scan carries, and of those that it puts together."""
        program = eqn.params["jaxpr"]
        fixed, start, along = scan_operands(eqn, its)
        given = program.jaxpr.invars[len(its) - len(along) :]
        rows = [self._row(value, _aval_of(var).size) for value, var in zip(along, given, strict=True)]

        def body(carried: list[Value]) -> tuple[list[Value], list[Value]]:
            found = self.run(program, [*fixed, *carried, *filter(None, rows)])
            return found[: len(start)], found[len(start) :]

        found = self._loop(start, body) if all(rows) else None
        if found is None:
            return self._whole(eqn, its)
        loop, results = self._after(found, "scan", eqn.params["length"], eqn.params["reverse"])
        for value, var in zip(found.others, eqn.outvars[len(start) :], strict=True):
            formula = self.formulas.of("rows", self.lies(value), over=[loop, *(run.formula for run in value)])
            results.append(_with_formula(value, formula, _aval_of(var).size))
        return results

    def _row(self, value: Value, size: int) -> Value | None:
        """Returns the value that a scan gives to each of its rounds, without the axis ahead of the leaf's."""
        run, *others = value
        if value.is_equal:
            return value
        if others or (isinstance(run.place, int) and size % run.size):
            return None
        return _with_formula(value, self.formulas.of("row", self._depth + 1, over=[run.formula]), size)

    def _loop(self, start: Sequence[Value], body: Body) -> _Loop | None:
        """Returns the values of a loop; `None` if a carried value does not keep its runs and places.

        A round is read with symbols, "the value carried under this number". The runs that share a number are found from
        above. At first these are all runs that begin with one formula, such as the moments of all leaves, which begin
        with zero. If a round makes different formulas of two of them, they get separate numbers, and the round is read
        again. That ends, as there are more numbers each time and no more than runs. Runs that share a number then have
        begun alike, and each round does the same to them, so they are equal after any number of rounds. The moment of a
        vector that holds these leaves gets one number in the same way, and so the same symbol.
        """
        self._depth += 1
        carried, numbers = [*start], _numbered([run.formula for run in runs_of(start)])
        while True:
            symbols = [NO_FORMULA if n == NO_FORMULA else self.formulas.of("carried", self._depth, n) for n in numbers]
            after, others = body(with_formulas(carried, symbols))
            merged = [_merged(*pair) for pair in zip(carried, after, strict=True)]
            joined = [value for value in merged if value is not None]
            if len(joined) < len(merged):
                self._depth -= 1
                return None
            # Zeros lie nowhere, and are one run. A round may turn them into a block, or into the runs of several, if
            # leaves were joined. Then they are treated as such from the start.
            if [*map(len, joined)] != [*map(len, carried)]:
                carried, start = joined, [*map(Value.in_runs, start, joined)]
                numbers = _numbered([run.formula for run in runs_of(start)])
                continue
            ends = [run.formula for run in runs_of(map(Value.in_runs, after, joined))]
            # Two that had other numbers stay apart, even where this round makes them equal.
            finer = _numbered([NO_FORMULA if NO_FORMULA in pair else pair for pair in zip(numbers, ends, strict=True)])
            if finer == numbers and joined == carried:
                break
            carried, numbers = joined, finer
        self._depth -= 1
        begins = [run.formula for run in runs_of(start)]
        rounds = {n: (begin, end) for n, begin, end in zip(numbers, begins, ends, strict=True) if n != NO_FORMULA}
        return _Loop(start, carried, numbers, rounds, others)

    def _after(self, found: _Loop, *key: Any, over: Sequence[int] = ()) -> tuple[int, list[Value]]:
        """Returns the formula of a loop, and the carried values after all rounds."""
        loop = self.formulas.of(*key, over=[*itertools.chain(*found.rounds.values()), *over])
        of = {n: self.formulas.of("result", n, over=[loop]) for n in found.rounds} | {NO_FORMULA: NO_FORMULA}
        return loop, with_formulas(found.carried, [of[n] for n in found.numbers])


def _keeps_whole_numbers(eqn: JaxprEqn) -> bool:
    """Returns whether an operation only turns integers into wider or narrower ones.

    With 64 bits JAX indexes some arrays by int32 and others by int64, according to their rank.
    """
    return _aval_of(eqn.invars[0]).dtype in _WHOLE and eqn.params["new_dtype"] in _WHOLE


def _numbered(keys: Sequence[Any]) -> list[int]:
    """Numbers keys by their first places; values without a formula have no number."""
    found = {NO_FORMULA: NO_FORMULA}
    return [found.setdefault(key, len(found) - 1) for key in keys]


def _merged(old: Value, new: Value) -> Value | None:
    """Returns a value that is `old` at first and `new` later, in runs and places that hold both, or `None`."""
    old, new = old.in_runs(new), new.in_runs(old)
    if len(old) != len(new):
        return None
    pairs = [(before, after) for before, after in zip(old, new, strict=True) if before.place != after.place]
    if any(None not in (before.place, after.place) for before, after in pairs):
        return None
    return Value(after if before.place is None else before for before, after in zip(old, new, strict=True))


def _with_formula(value: Value, formula: int, size: int) -> Value:
    """Returns an array of this size with another formula, in the block of a value if that is in one."""
    is_block = len(value) == 1 and isinstance(value[0].place, int)
    return with_formulas([value], [formula])[0] if is_block else Value.of_no_block(formula, size)


# -- Operations of which it is known where each element lies -----------------------------------------------------------


def _aval_of(atom: Var | Literal) -> Any:
    """Returns the shape and dtype of an operand or a result, which abstract values do not declare to type checkers."""
    return atom.aval


def _reduced(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    """Reduces over all elements; `None` for a reduction over some axes."""
    shape, axes, kind = _aval_of(eqn.invars[0]).shape, eqn.params["axes"], TOTALS[eqn.primitive.name]
    if all(axis in axes or size == 1 for axis, size in enumerate(shape)):
        return [blocks.over_all(kind, its[0], math.prod(shape))]
    return its if not axes or (its[0].is_equal and kind != "add") else None


def _product(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    """Returns the inner product over all elements; `None` for a product of matrices."""
    (left, right), batch = eqn.params["dimension_numbers"]
    one, other = map(_aval_of, eqn.invars)
    if any(batch) or tuple(left) != tuple(right) or len(left) < one.ndim or one.shape != other.shape:
        return None
    products = blocks.each(("mul",), its)
    return None if products is None else [blocks.over_all("add", products, one.size)]


def _reshaped(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    """Keeps the elements, in their order."""
    is_same = _aval_of(eqn.invars[0]).size == _aval_of(eqn.outvars[0]).size and eqn.params.get("dimensions") is None
    return its[:1] if is_same or eqn.primitive.name == "squeeze" or its[0].is_equal else None


def _concatenated(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    found: list[Run] = []
    for atom, value in zip(eqn.invars, its, strict=True):
        run, *others = value
        if not (others or run.place is None or run.size == _aval_of(atom).size):
            return None  # a memory of several steps
        found += value if others else [run._replace(size=_aval_of(atom).size)]
    if all(run.place is None and run.formula == found[0].formula for run in found):
        return [Value.equal(found[0].formula)]
    axis = eqn.params["axis" if eqn.primitive.name == "stack" else "dimension"]
    return [Value(found)] if math.prod(_aval_of(eqn.outvars[0]).shape[:axis]) == 1 else None


def _sliced(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    shape, params = _aval_of(eqn.invars[0]).shape, eqn.params
    axes = [axis for axis, size in enumerate(_aval_of(eqn.outvars[0]).shape) if size != shape[axis]] or [0]
    if len(axes) > 1 or any(each != 1 for each in params["strides"] or ()):
        return its if its[0].is_equal else None
    return _pieces(its[0], shape, axes[0], [(params["start_indices"][axes[0]], params["limit_indices"][axes[0]])])


def _split(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    sizes = map(int, eqn.params.get("sizes", [1] * len(eqn.outvars)))  # an `unstack` has none
    spans = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return _pieces(its[0], _aval_of(eqn.invars[0]).shape, eqn.params["axis"], [*spans])


def _pieces(value: Value, shape: Sequence[int], axis: int, spans: Sequence[tuple[int, int]]) -> list[Value] | None:
    """Returns the elements from one place to another along an axis, for each span."""
    unit, is_first = math.prod(shape[axis + 1 :]), math.prod(shape[:axis]) == 1
    found = [value.between(math.prod(shape), start * unit, end * unit) for start, end in spans]
    return [each for each in found if each] if all(found) and (is_first or value.is_equal) else None


def _windowed(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    """Reads or writes a window of axes ahead of the leaf's: one of the steps of a memory."""
    name, shape, params = eqn.primitive.name, _aval_of(eqn.invars[0]).shape, eqn.params
    if name == "dynamic_slice" and its[0].is_equal:
        return its[:1]
    if name.startswith("scatter"):
        numbers, window = params["dimension_numbers"], _aval_of(eqn.invars[2]).shape
        ahead = len(numbers.inserted_window_dims)
        axes = {tuple(numbers.inserted_window_dims), tuple(numbers.scatter_dims_to_operand_dims), tuple(range(ahead))}
        is_one = len(axes) == 1 and _aval_of(eqn.invars[1]).shape == (ahead,) and window == shape[ahead:]
        arrays, index, window = its[::2], its[1:2], (1,) * ahead + window
    else:
        count, is_one = 1 if name == "dynamic_slice" else 2, True
        window = params["slice_sizes"] if count == 1 else _aval_of(eqn.invars[1]).shape
        ahead = next((n for n in range(len(shape), 0, -1) if window[n - 1] != shape[n - 1]), 0)
        arrays, index = its[:count], its[count : count + ahead]
    placed = {run.place: run for run in runs_of(arrays) if run.place is not None}
    run, *more = [*placed.values()] or runs_of(arrays)[:1]
    is_known = is_one and isinstance(run.place, int) and math.prod(shape[ahead:]) % run.size == 0
    is_single = all(len(value) == 1 for value in (*arrays, *index))
    if more or not (is_known and is_single) or any(isinstance(each.place, int) for each in runs_of(index)):
        return None
    over = [each.formula for each in runs_of([*arrays, *index])]
    formula = blocks.formulas.of(name, shape[:ahead], tuple(window[:ahead]), str(params.get("mode")), over=over)
    return with_formulas([Value((run,))], [formula])


# Each returns `None` if no formula of elements describes the result.
_MOVES: dict[str, Callable[[Blocks, JaxprEqn, list[Value]], list[Value] | None]] = {
    **dict.fromkeys(TOTALS, _reduced),
    "dot_general": _product,
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze"), _reshaped),
    **dict.fromkeys(("concatenate", "stack"), _concatenated),
    "slice": _sliced,
    **dict.fromkeys(("split", "unstack"), _split),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add"), _windowed),
}
