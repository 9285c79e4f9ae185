"""Programs as numbers: the same for a leaf alone and joined with others, if the rule does the same to it.

A rule over one array of all leaves is another program than over the leaves, with other shapes in it, and is right if
each *element* comes out the same. So the programs are run on numbers modulo a prime, one random number for all elements
of a leaf. An array is a sequence of runs, each with the number of its elements: a vector has a run for each leaf in it.
Sums, products and quotients are computed, so that it does not matter in which order, leaf by leaf or at once, a total
is added up. Every other operation gives a number that is a hash of its name and operands, and constants are hashes too.
So programs that do the same give the same numbers, and programs that do something else give others, but for an accident
of one in 2**61.

An operation that is no function of elements - a product of matrices, a sort, a sum along one axis - hashes the shapes
of its operands too, so that it is equal only to itself. Kernels and callbacks to Python hash the reader, so they are
equal to nothing. A choice hashes both branches. Of a loop three rounds are read, whatever their number is.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from .._programs import Kind, Walk, kind_of, operation_name, scan_operands, while_parts

PRIME = (1 << 61) - 1
ROUNDS = 3

Operation = Any  # a `JaxprEqn`, whose type does not say that its operands have shapes

Value = tuple[tuple[int, int | None], ...]
"""The runs of an array: the number of the elements, and how many there are; `None` if all of the array are equal."""

_UNNAMED = {"out_sharding", "sharding", "weak_type"}  # parameters that no number depends on


def hashed(*key: Any) -> int:
    """Returns the number of an operation on other numbers, or of an argument."""
    return hash(key) % PRIME


def equal(number: int) -> Value:
    """Returns an array whose elements are all equal."""
    return ((number % PRIME, None),)


def of_size(number: int, size: int) -> Value:
    """Returns an array of which nothing more is known than its size."""
    return ((number, None if size == 1 else size),)


def each(f: Callable[[Sequence[int]], int], its: Sequence[Value], *first: int) -> Value | None:
    """Returns the result of a function of elements; `None` if runs do not lie at the same places."""
    count = max(map(len, its))
    several = [value * count if value[0][1] is None else value for value in its]
    if {*map(len, several)} != {count}:
        return None
    found = []
    for runs in zip(*several, strict=True):
        sizes = {size for _, size in runs if size is not None}
        if len(sizes) > 1:
            return None
        found.append((f((*first, *[number for number, _ in runs])) % PRIME, sizes.pop() if sizes else None))
    return tuple(found)


def _total(value: Value, size: int) -> int:
    """Returns the sum of all elements of an array of this size."""
    if value[0][1] is None:
        return value[0][0] * size
    sizes = [own or 0 for _, own in value]
    ahead = size // sum(sizes)  # a memory of several steps has leading axes
    return sum(map(operator.mul, [number for number, _ in value], sizes)) * ahead


class Reader(Walk[Value]):
    """Carries the numbers of elements.

    Attributes:
        opaque: the names of the operations that show no program.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opaque = set[str]()
        self._members: dict[int, frozenset[int]] = {}  # the numbers among which one is the largest, the least ...
        self._functions = dict[int, Any]()  # of operations, by their ids
        self._literals = dict[Any, Value]()
        self._kept = list[Any]()  # whose ids are in hashes

    # -- Operations ----------------------------------------------------------------------------------------------------

    def step(self, eqn: Operation, its: list[Value]) -> Sequence[Value]:
        """Returns the numbers of the results of an operation."""
        kind, name = kind_of(eqn), eqn.primitive.name
        if Kind.SAME in kind or (name == "convert_element_type" and _keeps_numbers(eqn)):
            return its
        found: Sequence[Value | None]
        if Kind.EACH in kind:
            if id(eqn) not in self._functions:
                self._functions[id(eqn)] = eqn, *self._function(eqn)
            _, f, *first = self._functions[id(eqn)]
            found = [each(f, its, *first)]
        elif name in _TOTALS:
            found = [self._reduced(eqn, its[0])]
        elif name in _MOVES:
            found = _MOVES[name](eqn, its)
        else:
            return super().step(eqn, its)
        if None in found:
            return self._whole(eqn, its)
        return [
            equal(value[0][0]) if value[0][1] and var.aval.size == 1 else value
            for value, var in zip(found, eqn.outvars, strict=True)
            if value is not None
        ]

    def _function(self, eqn: Operation) -> tuple[Any, ...]:
        """Returns the function of numbers of an element-wise operation, and the numbers that it begins with."""
        name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
        if name == "integer_pow" and jnp.issubdtype(dtype, jnp.inexact):
            return (functools.partial(_power, eqn.params["y"]),)
        if name in _COMPUTED and (name != "div" or jnp.issubdtype(dtype, jnp.inexact)):
            return (_COMPUTED[name],)
        if name in ("max", "min") or (name in ("and", "or") and jnp.issubdtype(dtype, bool)):
            return (functools.partial(self._one_of, name),)
        return hash, hashed(name, *[repr(value) for at, value in sorted(eqn.params.items()) if at not in _UNNAMED])

    def _one_of(self, name: str, numbers: Sequence[int]) -> int:
        """Returns the largest, or the least, of numbers, whatever the order in which they are compared."""
        among = frozenset[int]().union(*[self._members.get(hash((name, n)), (n,)) for n in numbers])
        if len(among) == 1:
            return next(iter(among))
        number = hashed(name, among)
        self._members[hash((name, number))] = among
        return number

    def _reduced(self, eqn: Operation, value: Value) -> Value | None:
        """Reduces over all elements; `None` for a reduction over some axes."""
        shape, axes, name = eqn.invars[0].aval.shape, eqn.params["axes"], _TOTALS[eqn.primitive.name]
        if value[0][1] is not None and not all(axis in axes or size == 1 for axis, size in enumerate(shape)):
            return None if axes else value
        if name == "add":
            return equal(_total(value, math.prod([shape[axis] for axis in axes])))
        return equal(self._one_of(name, [number for number, _ in value]))

    def operation(self, eqn: Operation, its: list[Value]) -> Sequence[Value]:
        """Returns the numbers of an operation of which nothing is known, or only that it is a function."""
        if kind_of(eqn) and Kind.REF not in kind_of(eqn):
            return self._whole(eqn, its)
        self.opaque.add(operation_name(eqn))
        self._kept.append(object())
        return [equal(hashed("opaque", id(self._kept[-1]), i)) for i in range(len(eqn.outvars))]

    def _whole(self, eqn: Operation, its: Sequence[Value]) -> list[Value]:
        """Returns the results of an operation of which only the operands are known, as they lie there."""
        params = repr(sorted([(name, repr(value)) for name, value in eqn.params.items()]))
        key = eqn.primitive.name, params, *[str(atom.aval) for atom in eqn.invars], *its
        return [of_size(hashed("whole", i, key), var.aval.size) for i, var in enumerate(eqn.outvars)]

    def literal(self, atom: Literal) -> Value:
        """Returns the number of a constant in an operation."""
        key = str(atom.aval), repr(atom.val)
        if key not in self._literals:
            self._literals[key] = self.constant(atom.val)
        return self._literals[key]

    def constant(self, value: Any) -> Value:
        """Returns the number of a constant: not its value, which may be a rate that changes later."""
        if isinstance(value, Tracer):
            self._kept.append(value)
            return of_size(hashed("traced", id(value)), value.size)
        if jnp.issubdtype(getattr(value, "dtype", float), jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        array = array.astype(np.int64) if array.dtype in _WHOLE else array
        first, everything = array.ravel()[:1].tobytes(), array.tobytes()
        if everything == first * array.size:
            return equal(hashed("constant", array.dtype.name, first))
        return of_size(hashed("constant", array.dtype.name, array.shape, everything), array.size)

    # -- Branches and loops --------------------------------------------------------------------------------------------

    def of_cond(self, eqn: Operation, its: list[Value]) -> Sequence[Value]:
        """Returns the numbers of a choice between programs."""
        ends = [self.run(branch, its[1:]) for branch in eqn.params["branches"]]
        return self._mixed(eqn, ("cond",), [(its[0], *values) for values in zip(*ends, strict=True)])

    def of_while(self, eqn: Operation, its: list[Value]) -> Sequence[Value]:
        """Returns the numbers of the values that a loop carries."""
        start, end, condition, program = while_parts(eqn)
        rounds, goes_on = [its[end:]], list[Value]()
        for _ in range(ROUNDS):
            goes_on += self.run(condition, [*its[:start], *rounds[-1]])
            rounds.append(self.run(program, [*its[start:end], *rounds[-1]]))
        return self._mixed(eqn, ("while", *goes_on), zip(*rounds, strict=True))

    def of_scan(self, eqn: Operation, its: list[Value]) -> Sequence[Value]:
        """Returns the numbers of the values that a scan carries, and of those that it puts together."""
        program = eqn.params["jaxpr"]
        fixed, start, along = scan_operands(eqn, its)
        given = program.jaxpr.invars[len(its) - len(along) :]
        rounds, made = [start], list[Any]()
        for n in range(ROUNDS):
            rows = [_row(n, value, var.aval) for value, var in zip(along, given, strict=True)]
            if None in rows:
                return self._whole(eqn, its)
            found = self.run(program, [*fixed, *rounds[-1], *[row for row in rows if row]])
            rounds.append(found[: len(start)])
            made.append(found[len(start) :])
        key = "scan", eqn.params["length"], eqn.params["reverse"]
        results = self._mixed(eqn, key, [*zip(*rounds, strict=True), *zip(*made, strict=True)])
        for i in range(len(start), len(results)):
            if results[i][0][1] is None:  # a number of each round
                results[i] = of_size(results[i][0][0], eqn.outvars[i].aval.size)
        return results

    def _mixed(self, eqn: Operation, key: tuple[Any, ...], several: Iterable[Sequence[Value]]) -> list[Value]:
        """Returns one number for each result, from all the numbers that it may be, or comes from."""
        several = list(several)
        found = [each(hash, values, hashed(key)) for values in several]
        unknown = self._whole(eqn, list(itertools.chain(*several))) if None in found else ()
        return [unknown[i] if value is None else value for i, value in enumerate(found)]


def _row(n: int, value: Value, aval: Any) -> Value | None:
    """Returns the value that a scan gives to one of its rounds."""
    if value[0][1] is None:
        return value
    if sum(size for _, size in value if size) == aval.size:  # a memory: the axis ahead is not of the leaf
        return tuple([(hashed("row", n, number), size) for number, size in value])
    return of_size(hashed("row", n, value[0][0], aval.shape), aval.size) if len(value) == 1 else None


# -- Operations that are computed --------------------------------------------------------------------------------------

_WHOLE = {np.dtype(np.int32), np.dtype(np.int64)}  # counts here overflow in neither


def _keeps_numbers(eqn: Operation) -> bool:
    """Returns whether an operation only makes numbers wider or narrower.

    With 64 bits JAX indexes some arrays by int32 and others by int64, according to their rank.
    """
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return {old, new} <= _WHOLE or (jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating))


def _power(exponent: int, numbers: Sequence[int]) -> int:
    return pow(numbers[0], exponent % (PRIME - 1), PRIME)  # of zero, zero


_COMPUTED: dict[str, Callable[[Any], int]] = {
    "add": sum,
    "add_any": sum,
    "sub": lambda numbers: numbers[0] - numbers[1],
    "neg": lambda numbers: -numbers[0],
    "mul": math.prod,
    "div": lambda numbers: numbers[0] * pow(numbers[1], PRIME - 2, PRIME),
    "square": lambda numbers: numbers[0] ** 2,
}
# The operation on two numbers that each reduction repeats.
_TOTALS = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_and": "and", "reduce_or": "or"}


def _product(eqn: Operation, its: list[Value]) -> Sequence[Value | None]:
    """Returns the inner product over all elements; `None` for a product of matrices."""
    (left, right), batch = eqn.params["dimension_numbers"]
    one, other = (atom.aval for atom in eqn.invars)
    if any(batch) or tuple(left) != tuple(right) or len(left) < one.ndim or one.shape != other.shape:
        return [None]
    products = each(math.prod, its)
    return [None if products is None else equal(_total(products, one.size))]


# -- Operations of which it is known where each element lies -----------------------------------------------------------


def _reshaped(eqn: Operation, its: list[Value]) -> Sequence[Value | None]:
    """Keeps the elements, in their order."""
    is_same = eqn.invars[0].aval.size == eqn.outvars[0].aval.size and eqn.params.get("dimensions") is None
    return its[:1] if is_same or eqn.primitive.name == "squeeze" or its[0][0][1] is None else [None]


def _concatenated(eqn: Operation, its: list[Value]) -> Sequence[Value | None]:
    sizes = [atom.aval.size for atom in eqn.invars]
    axis = eqn.params["axis" if eqn.primitive.name == "stack" else "dimension"]
    if len({value for value in its if value[0][1] is None}) == len(set(its)) == 1:
        return its[:1]
    runs = [((own[0][0], size),) if own[0][1] is None else own for own, size in zip(its, sizes, strict=True)]
    is_known = [sum(size or 0 for _, size in own) for own in runs] == sizes  # no memory of several steps
    return [tuple(itertools.chain(*runs)) if is_known and not math.prod(eqn.outvars[0].aval.shape[:axis]) > 1 else None]


def _sliced(eqn: Operation, its: list[Value]) -> Sequence[Value | None]:
    shape, params = eqn.invars[0].aval.shape, eqn.params
    axes = [axis for axis, size in enumerate(eqn.outvars[0].aval.shape) if size != shape[axis]] or [0]
    if len(axes) > 1 or any(each != 1 for each in params["strides"] or ()):
        return its if its[0][0][1] is None else [None]
    return _pieces(its[0], shape, axes[0], [(params["start_indices"][axes[0]], params["limit_indices"][axes[0]])])


def _split(eqn: Operation, its: list[Value]) -> Sequence[Value | None]:
    sizes = map(int, eqn.params.get("sizes", [1] * len(eqn.outvars)))  # an `unstack` has none
    spans = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return _pieces(its[0], eqn.invars[0].aval.shape, eqn.params["axis"], [*spans])


def _pieces(value: Value, shape: Sequence[int], axis: int, spans: Sequence[tuple[int, int]]) -> Sequence[Value | None]:
    """Returns the elements from one place to another along an axis, for each span."""
    if value[0][1] is None:
        return [value] * len(spans)
    unit, is_first = math.prod(shape[axis + 1 :]), math.prod(shape[:axis]) == 1
    ends = [*itertools.accumulate([size or 0 for _, size in value], initial=0)]
    found: list[Value | None] = []
    for start, end in spans:
        edges = {start * unit, end * unit}
        its = [run for run, at in zip(value, ends, strict=False) if start * unit <= at < end * unit]
        found.append(tuple(its) if is_first and its and edges <= {*ends} and ends[-1] == math.prod(shape) else None)
    return found


def _windowed(eqn: Operation, its: list[Value]) -> Sequence[Value | None]:
    """Reads or writes a window of axes ahead of the leaf's: one of the steps of a memory."""
    name, shape, params = eqn.primitive.name, eqn.invars[0].aval.shape, eqn.params
    if name == "dynamic_slice" and its[0][0][1] is None:
        return its[:1]
    is_one = True
    if name.startswith("scatter"):
        numbers, window = params["dimension_numbers"], eqn.invars[2].aval.shape
        ahead = len(numbers.inserted_window_dims)
        axes = {tuple(numbers.inserted_window_dims), tuple(numbers.scatter_dims_to_operand_dims), tuple(range(ahead))}
        is_one = len(axes) == 1 and eqn.invars[1].aval.shape == (ahead,) and window == shape[ahead:]
        arrays, index, window = its[::2], its[1:2], (1,) * ahead + window
    else:
        count = 1 if name == "dynamic_slice" else 2
        window = params["slice_sizes"] if count == 1 else eqn.invars[1].aval.shape
        ahead = next((n for n in range(len(shape), 0, -1) if window[n - 1] != shape[n - 1]), 0)
        arrays, index = its[:count], its[count : count + ahead]
    key = name, shape[:ahead], tuple(window[:ahead]), str(params.get("mode")), *index
    found = each(hash, arrays, hashed(key))
    is_leaf = found is not None and sum(size or 1 for _, size in found) == math.prod(shape[ahead:])
    return [tuple([(number, size or 1) for number, size in found]) if found and is_one and is_leaf else None]


# Each returns `None` in place of a result that is not known element by element.
_MOVES: dict[str, Callable[[Operation, list[Value]], Sequence[Value | None]]] = {
    "dot_general": _product,
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze"), _reshaped),
    **dict.fromkeys(("concatenate", "stack"), _concatenated),
    "slice": _sliced,
    **dict.fromkeys(("split", "unstack"), _split),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add"), _windowed),
}
