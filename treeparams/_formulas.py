"""What programs compute, as formulas: two programs with the same ones do the same, whatever their arrays are cut into.

A rule of an optimiser over one array of all leaves is another program than the rule over the leaves, with other shapes
in it. It is right if each *element* comes out the same. So an array is described by the formula of its element: `add`
of two arrays is `add(x, y)`, in leaves and vectors alike, a constant is itself wherever it is broadcast to, and a sum
is a set of terms - "x squared, over the elements of slots 0 and 1" - so that the sum of all is one formula, whether it
was added up leaf by leaf or at once, while the norm of one leaf is another formula than that of all.

All formulas are numbers, given out by one `Formulas` for all programs that are compared: equal formulas have equal
numbers. Loops, and the state of an optimiser, carry values round: those that begin alike and go on alike are one, and
are numbered in the order in which they are first carried, which is the same in any form. An operation of which no more
is known - a product of matrices, a sort, a draw - is a formula of its name, its parameters, and all of its operands,
shapes included: it is equal only to itself. What holds a program of another kind (a kernel, a callback) has no formula.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive

from ._programs import called, scan_carries

NO_FORMULA = -1

# Each element of the result is made of the elements at its place.
_EACH = frozenset(
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj "
    "convert_element_type cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a "
    "igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi ne neg nextafter "
    "not or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta add "
    "add_any alike".split()
)
_SAME = frozenset({
    "copy",
    "copy_p",
    "device_put",
    "optimization_barrier",
    "reshard",
    "sharding_constraint",
    "stop_gradient",
})
_RESHAPES = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
_TOTALS = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_and": "and", "reduce_or": "or"}
_LINEAR = frozenset({"mul", "div", "neg", "convert_element_type"})  # what they do to a sum they do to each term
_NOT_OF_FORMULAS = frozenset({"out_sharding", "sharding", "weak_type"})
_KNOWN = {
    each.name for module in (jax.lax, jax.lax.linalg) for each in vars(module).values() if isinstance(each, Primitive)
}
_DRAWS = ("random_", "threefry", "rng_")

alike_p = Primitive("alike")
"""Stands for what is known to do the same to leaves as to what they are joined to, whatever it does."""

alike_p.def_abstract_eval(lambda array, *_, **__: array)


class Part(NamedTuple):
    """A run of elements of an array that have one formula."""

    formula: int
    place: Any  # what their places are: the number of a block, a size of an array of no block; `None` if all are alike
    size: int


Value = tuple[Part, ...]
"""An array, as runs of elements one after another."""


Body = Callable[[list[Value]], tuple[Sequence[Value], Sequence[Value]]]
"""One round: from what is carried to what is carried next, and what else it returns."""


class _Loop(NamedTuple):
    start: Sequence[Value]
    carried: Sequence[Value]  # as the body takes it, but for the formulas
    numbers: list[int]  # of each run of what is carried: equal if they are the same in all rounds
    rounds: dict[int, tuple[int, int]]  # of each number: the first formula, and the next in those of the round before
    others: Sequence[Value]


class Formulas:
    """The numbers of formulas."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._keys: list[Any] = []

    def of(self, *key: Any, over: Iterable[int] = ()) -> int:
        """The number of a formula, of other formulas `over` which it is."""
        over = tuple(over)
        if NO_FORMULA in over:
            return NO_FORMULA
        number = self._numbers.setdefault((key, over), len(self._keys))
        if number == len(self._keys):
            self._keys.append((key, over))
        return number

    def carried(self, depth: int, number: int) -> int:
        """That of what a loop carries, by number."""
        return NO_FORMULA if number == NO_FORMULA else self.of("carried", depth, number)

    def carried_in(self, depth: int, formulas: Iterable[int]) -> set[int]:
        """The numbers of what a loop of this depth carries that formulas are made of."""
        waiting, seen, found = set(formulas) - {NO_FORMULA}, set[int](), set[int]()
        while waiting:
            seen.add(formula := waiting.pop())
            key, over = self._keys[formula]
            waiting |= set(over) - seen
            if key[:2] == ("carried", depth):
                found.add(key[2])
        return found


class Reader:
    """Reads programs over some blocks, arrays that slots lie in: leaves, one vector, stacks."""

    def __init__(self, formulas: Formulas, slots: Sequence[Iterable[int]], sizes: Sequence[int]) -> None:
        self._formulas = formulas
        self._slots = list(map(frozenset, slots))  # in each block
        self._sizes = sizes
        self._terms: dict[int, tuple[str, dict[tuple[int, Any], int]]] = {}  # of a total: its operation and its terms
        self._depth = 0

    def argument(self, name: str, block: int | None = None) -> Value:
        """An argument of this name: a block, or a number."""
        return (Part(self._formulas.of(name), block, 1 if block is None else self._sizes[block]),)

    def slots(self, place: Any) -> Any:
        """The slots whose elements have such places."""
        return self._slots[place] if isinstance(place, int) else place

    def run(self, program: ClosedJaxpr | Jaxpr, args: Sequence[Value]) -> list[Value]:
        """What a program returns for these arguments."""
        jaxpr: Any = getattr(program, "jaxpr", program)
        known = dict(zip(jaxpr.invars, args, strict=True))
        known |= zip(jaxpr.constvars, map(self._constant, getattr(program, "consts", ())), strict=True)

        def look(atoms: Sequence[Any]) -> list[Value]:
            return [self._constant(atom.val) if isinstance(atom, Literal) else known[atom] for atom in atoms]

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self._step(eqn, look(eqn.invars)), strict=True))
        return look(jaxpr.outvars)

    def training(self, start: Sequence[Value], body: Body) -> tuple[Any, Sequence[Value]] | None:
        """What is returned beside what is carried round: what it depends on, and its formulas in one round.

        `None` where what is carried does not stay what it was.
        """
        found = self._loop(start, body)
        if found is None:
            return None
        needed, formulas = set[int](), [part.formula for value in found.others for part in value]
        while more := self._formulas.carried_in(self._depth + 1, formulas) - needed:
            needed |= more
            formulas = [found.rounds[n][1] for n in more]
        if needed < found.rounds.keys():  # what is kept to be looked at, by whatever leaf, is numbered no more
            kept = iter([
                part.formula if n in needed else NO_FORMULA
                for n, part in zip(found.numbers, _parts(found.start), strict=True)
            ])
            found = self._loop(_with(found.start, kept), body)
        return None if found is None else (tuple(found.rounds.values()), found.others)

    def _loop(self, start: Sequence[Value], body: Body) -> "_Loop | None":
        """What goes round; `None` where what is carried does not stay what it was."""
        self._depth += 1
        carried, numbers = list(start), _numbered([part.formula for part in _parts(start)])
        while True:
            symbols = [self._formulas.carried(self._depth, n) for n in numbers]
            after, others = body(_with(carried, symbols))
            joined = list(map(_joined, carried, after))
            if None in joined:
                self._depth -= 1
                return None
            if list(map(len, joined)) != list(map(len, carried)):  # zeros that are as many runs after the first round
                carried, start = joined, list(map(_in_runs, start, joined))
                numbers = _numbered([part.formula for part in _parts(start)])
                continue
            ends = [part.formula for part in _parts(map(_in_runs, after, joined))]
            finer = _numbered([NO_FORMULA if NO_FORMULA in pair else pair for pair in zip(numbers, ends, strict=True)])
            if finer == numbers and joined == carried:
                break
            carried, numbers = joined, finer
        self._depth -= 1
        begins = [part.formula for part in _parts(start)]
        rounds = {n: (begin, end) for n, begin, end in zip(numbers, begins, ends, strict=True) if n != NO_FORMULA}
        return _Loop(start, carried, numbers, rounds, others)

    # -- Operations ----------------------------------------------------------------------------------------------------

    def _step(self, eqn: Any, its: list[Value]) -> Sequence[Value]:
        """The results of an operation."""
        name, program = eqn.primitive.name, called(eqn)
        if program is not None:
            return self.run(program, its)
        if name in _SAME:
            return its
        found: Sequence[Value] | None = None
        if name in ("cond", "scan", "while"):
            found = {"cond": self._cond, "scan": self._scan, "while": self._while}[name](eqn, its)
        elif name in _KNOWN or name == "alike" or name.startswith(_DRAWS):
            found = self._split(eqn, its) if name in ("split", "unstack") else self._single(eqn, name, its)
        else:
            return [_uniform(NO_FORMULA)] * len(eqn.outvars)
        if found is not None:
            return found
        params = repr(sorted((key, repr(value)) for key, value in eqn.params.items()))
        return self._whole((name, params), eqn, its)

    def _single(self, eqn: Any, name: str, its: list[Value]) -> list[Value] | None:
        """The result of an operation that has one; `None` if no more is known of it than that."""
        found: Value | None = None
        if name in _EACH:
            key = (
                name.removesuffix("_any"),
                *(repr(eqn.params[key]) for key in sorted(eqn.params.keys() - _NOT_OF_FORMULAS)),
            )
            found = self._arithmetic(key, its) or self._each(key, its)
        elif name in _TOTALS:
            found = self._reduced(eqn, its[0])
        elif name == "dot_general":
            found = self._product(eqn, its)
        elif name in _RESHAPES:
            found = self._reshaped(eqn, its[0])
        elif name in ("concatenate", "stack"):
            found = self._concatenated(eqn, its)
        elif name == "slice":
            found = self._sliced(eqn, its[0])
        elif name.startswith(("dynamic_", "scatter")):
            found = self._windowed(eqn, name, its)
        return None if found is None else [found]

    def _each(self, key: tuple[Any, ...], its: Sequence[Value]) -> Value | None:
        """What is made element by element; `None` where places differ: element 0 of one leaf, and of another."""
        longest = max(its, key=len)
        found = []
        for parts in zip(*(_in_runs(value, longest) for value in its), strict=True):
            placed = {part.place: part for part in parts if part.place is not None}
            if len(placed) > 1 or (len(longest) > 1 and len({part.size for part in parts}) > 1):
                return None
            like = next(iter(placed.values()), parts[0])
            found.append(like._replace(formula=self._formulas.of(*key, over=[part.formula for part in parts])))
        return tuple(found)

    def _whole(self, key: tuple[Any, ...], eqn: Any, its: Sequence[Value]) -> list[Value]:
        """The results of an operation of which nothing is known but what goes into it, as it lies there."""
        kinds = tuple(str(atom.aval) for atom in eqn.invars)
        lies = tuple(map(self._lies, its))
        over = [part.formula for value in its for part in value]
        formulas = [self._formulas.of("whole", *key, kinds, lies, i, over=over) for i in range(len(eqn.outvars))]
        return [_of_no_block(formula, var.aval.size) for formula, var in zip(formulas, eqn.outvars, strict=True)]

    def _constant(self, given: Any) -> Value:
        if isinstance(given, Tracer):
            return _of_no_block(self._formulas.of("traced", id(given)), given.size)
        if jax.dtypes.issubdtype(getattr(given, "dtype", float), jax.dtypes.prng_key):
            given = jax.random.key_data(given)
        array = np.asarray(given)
        first, everything = array.ravel()[:1].tobytes(), array.tobytes()
        if everything == first * array.size:
            return _uniform(self._formulas.of("constant", str(array.dtype), first))
        return _of_no_block(self._formulas.of("constant", str(array.dtype), array.shape, everything), array.size)

    # -- Totals --------------------------------------------------------------------------------------------------------

    def _total(self, kind: str, terms: Mapping[tuple[int, Any], int]) -> Value:
        """A sum, or a largest, or whether all are true, of terms over the elements at places, each so many times."""
        terms = dict(terms) if kind == "add" else dict.fromkeys(terms, 1)
        if [*terms.values()] == [1] and next(iter(terms))[1] is None:
            return _uniform(next(iter(terms))[0])
        reached: dict[tuple[int, int, Any], frozenset[int]] = {}
        for (formula, place), count in terms.items():
            slots, key = (self.slots(place), None) if isinstance(place, int) else (frozenset[int](), place)
            reached[formula, count, key] = reached.get((formula, count, key), frozenset()) | slots
        total = NO_FORMULA
        if not any(formula == NO_FORMULA for formula, _ in terms):
            over = sorted({formula for formula, _ in terms})
            total = self._formulas.of("total", kind, frozenset(reached.items()), over=over)
            self._terms[total] = kind, terms
        return _uniform(total)

    def _terms_of(self, kind: str, formula: int, count: int = 1) -> dict[tuple[int, Any], int]:
        own, terms = self._terms.get(formula, ("", {}))
        return {term: n * count for term, n in terms.items()} if own == kind else {(formula, None): count}

    def _arithmetic(self, key: tuple[Any, ...], its: Sequence[Value]) -> Value | None:
        """Of totals, where the result is one too: leaf by leaf they are added up, or scaled before they are."""
        if any(len(value) > 1 or value[0].place is not None for value in its):
            return None
        name, formulas = key[0], [value[0].formula for value in its]
        totals = [i for i, formula in enumerate(formulas) if formula in self._terms]
        if name == "sub" and any(self._terms[formulas[i]][0] == "add" for i in totals):
            negative = self._arithmetic(("neg",), its[1:]) or self._each(("neg",), its[1:])
            return None if negative is None else self._arithmetic(("add",), [its[0], negative])
        if name in _TOTALS.values() and any(self._terms[formulas[i]][0] == name for i in totals):
            return self._total(name, _added(self._terms_of(name, formula) for formula in formulas))
        if name in _LINEAR and len(totals) == 1 and not (name == "div" and totals == [1]):
            kind, terms = self._terms[formulas[totals[0]]]
            if kind == "add":
                scaled: dict[tuple[int, Any], int] = {}
                for (term, place), count in terms.items():
                    over = [term if i == totals[0] else formula for i, formula in enumerate(formulas)]
                    scaled |= _added([scaled, {(self._formulas.of(*key, over=over), place): count}])
                return self._total("add", scaled)
        return None

    def _reduced(self, eqn: Any, value: Value) -> Value | None:
        name, shape, axes = eqn.primitive.name, eqn.invars[0].aval.shape, eqn.params["axes"]
        kind, (first, *others) = _TOTALS[name], value
        if all(axis in axes or size == 1 for axis, size in enumerate(shape)):
            return self._over_all(kind, value, math.prod(shape))
        if others or not axes:
            return None if axes else value
        if first.place is None:
            count = math.prod(shape[axis] for axis in axes)
            return _uniform(self._formulas.of("times", count, over=[first.formula])) if kind == "add" else value
        ahead = max(axes) + 1
        if not isinstance(first.place, int) or math.prod(shape[ahead:]) % first.size:
            return None
        return (first._replace(formula=self._formulas.of(name, shape[:ahead], axes, over=[first.formula])),)

    def _over_all(self, kind: str, value: Value, size: int) -> Value:
        terms: list[dict[tuple[int, Any], int]] = []
        for formula, place, own in value:
            if place is None:
                terms.append(self._terms_of(kind, formula, size if len(value) == 1 else own))
                continue
            times = size // own if len(value) == 1 else 1  # a memory of several steps has axes ahead of the leaf's
            formula = formula if times == 1 else self._formulas.of("ahead", times, over=[formula])
            terms.append({(formula, place): 1})
        return self._total(kind, _added(terms))

    def _product(self, eqn: Any, its: Sequence[Value]) -> Value | None:
        """The inner product of all elements; `None` of a product of matrices."""
        (left, right), batch = eqn.params["dimension_numbers"]
        aval = eqn.invars[0].aval
        if any(batch) or tuple(left) != tuple(right) or len(left) < aval.ndim or aval.shape != eqn.invars[1].aval.shape:
            return None
        products = self._each(("mul",), its)
        return None if products is None else self._over_all("add", products, aval.size)

    # -- Moves of elements ---------------------------------------------------------------------------------------------

    def _reshaped(self, eqn: Any, value: Value) -> Value | None:
        """Elements stay in order; a new axis may come ahead of them."""
        (old, *_), (new,) = ([var.aval for var in each] for each in (eqn.invars, eqn.outvars))
        first, ahead = value[0], new.ndim - old.ndim
        if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
            return None
        if old.size == new.size or (len(value) == 1 and first.place is None):
            return value
        is_ahead = new.shape[ahead:] == old.shape and (*eqn.params["broadcast_dimensions"],) == (
            *range(ahead, new.ndim),
        )
        if len(value) > 1 or not isinstance(first.place, int) or not is_ahead:
            return None
        return (first._replace(formula=self._formulas.of("repeated", new.shape[:ahead], over=[first.formula])),)

    def _concatenated(self, eqn: Any, its: Sequence[Value]) -> Value | None:
        (axis,) = [value for key, value in eqn.params.items() if key in ("axis", "dimension")]
        if math.prod(eqn.outvars[0].aval.shape[:axis]) != 1:
            return None
        found: list[Part] = []
        for atom, value in zip(eqn.invars, its, strict=True):
            if len(value) == 1:
                if value[0].place is not None and value[0].size != atom.aval.size:
                    return None
                value = (value[0]._replace(size=atom.aval.size),)
            found += value
        is_uniform = all(part.place is None and part.formula == found[0].formula for part in found)
        return _uniform(found[0].formula) if is_uniform else tuple(found)

    def _sliced(self, eqn: Any, value: Value) -> Value | None:
        shape, params = eqn.invars[0].aval.shape, eqn.params
        if len(value) == 1 and value[0].place is None:
            return value
        axes = [axis for axis, size in enumerate(eqn.outvars[0].aval.shape) if size != shape[axis]]
        if not axes:
            return value if all(each == 1 for each in params["strides"] or ()) else None
        if len(axes) > 1 or math.prod(shape[: axes[0]]) > 1 or any(each != 1 for each in params["strides"] or ()):
            return None
        unit = math.prod(shape[axes[0] + 1 :])
        return _between(value, params["start_indices"][axes[0]] * unit, params["limit_indices"][axes[0]] * unit)

    def _split(self, eqn: Any, its: Sequence[Value]) -> list[Value] | None:
        ends = [*itertools.accumulate(var.aval.size for var in eqn.outvars)]
        pieces = [_between(its[0], start, end) for start, end in zip([0, *ends], ends, strict=False)]
        is_whole = math.prod(eqn.invars[0].aval.shape[: eqn.params["axis"]]) > 1 or None in pieces
        return None if is_whole else [piece for piece in pieces if piece is not None]

    def _windowed(self, eqn: Any, name: str, its: list[Value]) -> Value | None:
        """A window of axes that are ahead of the leaf's, cut out or written: one of the steps of a memory."""
        shape, params = eqn.invars[0].aval.shape, eqn.params
        if name == "dynamic_slice":
            window, others, index = params["slice_sizes"], [], its[1:]
        elif name == "dynamic_update_slice":
            window, others, index = eqn.invars[1].aval.shape, its[1:2], its[2:]
        else:
            numbers, written = params["dimension_numbers"], eqn.invars[2].aval.shape
            ahead = len(numbers.inserted_window_dims)
            axes = tuple(range(ahead))
            in_front = tuple(numbers.inserted_window_dims) == tuple(numbers.scatter_dims_to_operand_dims) == axes
            if not in_front or eqn.invars[1].aval.shape != (ahead,) or written != shape[ahead:]:
                return None
            window, others, index = ((1,) * ahead + written), its[2:], its[1:2]
        ahead = next((n for n in range(len(shape), 0, -1) if window[n - 1] != shape[n - 1]), 0)
        if name.startswith("scatter"):
            ahead = len(params["dimension_numbers"].inserted_window_dims)
        else:
            index = index[:ahead]
        if any(len(value) > 1 for value in its):
            return None
        placed = {value[0].place: value[0] for value in (its[0], *others) if value[0].place is not None}
        if not placed and not others:
            return its[0]
        (place, part), *more = [*placed.items()] or [(None, its[0][0])]
        if more or not isinstance(place, int) or math.prod(shape[ahead:]) % part.size:
            return None
        over = [value[0].formula for value in (its[0], *others, *index)]
        key = name, shape[:ahead], tuple(window[:ahead]), str(params.get("mode"))
        return (part._replace(formula=self._formulas.of(*key, over=over)),)

    # -- Branches and loops --------------------------------------------------------------------------------------------

    def _cond(self, eqn: Any, its: Sequence[Value]) -> list[Value]:
        branches = [self.run(branch, its[1:]) for branch in eqn.params["branches"]]
        found = []
        for i, ends in enumerate(zip(*branches, strict=True)):
            of_all = [its[0], *ends]
            each = self._each(("cond",), of_all)
            found.append(self._whole(("cond",), eqn, of_all)[i] if each is None else each)
        return found

    def _while(self, eqn: Any, its: Sequence[Value]) -> list[Value] | None:
        start = eqn.params["cond_nconsts"]
        end = start + eqn.params["body_nconsts"]

        def body(carried: list[Value]) -> tuple[list[Value], list[Value]]:
            goes_on = self.run(eqn.params["cond_jaxpr"], [*its[:start], *carried])
            return self.run(eqn.params["body_jaxpr"], [*its[start:end], *carried]), goes_on

        found = self._loop(its[end:], body)
        return (
            None if found is None else self._after(found, "while", over=[part.formula for part in found.others[0]])[1]
        )

    def _scan(self, eqn: Any, its: Sequence[Value]) -> list[Value] | None:
        start, end = scan_carries(eqn)
        avals = [var.aval for var in eqn.params["jaxpr"].jaxpr.invars[end:]]
        rows = [self._row(value, aval.size) for value, aval in zip(its[end:], avals, strict=True)]
        if None in rows:
            return None

        def body(carried: list[Value]) -> tuple[list[Value], list[Value]]:
            found = self.run(eqn.params["jaxpr"], [*its[:start], *carried, *(row for row in rows if row is not None)])
            return found[: end - start], found[end - start :]

        found = self._loop(its[start:end], body)
        if found is None:
            return None
        loop, results = self._after(found, "scan", eqn.params["length"], eqn.params["reverse"])
        for value, var in zip(found.others, eqn.outvars[end - start :], strict=True):
            formula = self._formulas.of("rows", self._lies(value), over=[loop, *(part.formula for part in value)])
            is_block = len(value) == 1 and isinstance(value[0].place, int)
            results.append((value[0]._replace(formula=formula),) if is_block else _of_no_block(formula, var.aval.size))
        return results

    def _after(self, found: _Loop, *key: Any, over: Sequence[int] = ()) -> tuple[int, list[Value]]:
        """The formula of a loop, and what is carried after all rounds."""
        loop = self._formulas.of(*key, over=[*itertools.chain(*found.rounds.values()), *over])
        of = {n: self._formulas.of("result", n, over=[loop]) for n in found.rounds} | {NO_FORMULA: NO_FORMULA}
        return loop, _with(found.carried, [of[n] for n in found.numbers])

    def _row(self, value: Value, size: int) -> Value | None:
        """What a scan gives to each of its rounds: an axis ahead of the leaf's goes."""
        first, *others = value
        if first.place is None and not others:
            return value
        if others or (isinstance(first.place, int) and size % first.size):
            return None
        formula = self._formulas.of("row", self._depth + 1, over=[first.formula])
        return (first._replace(formula=formula),) if isinstance(first.place, int) else _of_no_block(formula, size)

    def _lies(self, value: Value) -> Any:
        return tuple((self.slots(part.place), len(value) > 1 and part.size) for part in value)


def _uniform(formula: int) -> Value:
    return (Part(formula, None, 1),)


def _of_no_block(formula: int, size: int) -> Value:
    return _uniform(formula) if size == 1 else (Part(formula, ("of size", size), size),)


def _numbered(keys: Sequence[Any]) -> list[int]:
    """The numbers of keys, by their first places; of what has no formula there is none."""
    found = {NO_FORMULA: NO_FORMULA}
    return [found.setdefault(key, len(found) - 1) for key in keys]


def _parts(values: Iterable[Value]) -> list[Part]:
    return [part for value in values for part in value]


def _with(values: Sequence[Value], formulas: Iterable[int]) -> list[Value]:
    given = iter(formulas)
    return [tuple(part._replace(formula=next(given)) for part in value) for value in values]


def _in_runs(value: Value, like: Value) -> Value:
    """A value whose elements are all alike, as runs like those of another; others as they are."""
    if len(value) == len(like) or len(value) > 1 or value[0].place is not None:
        return value
    return tuple(value[0]._replace(size=part.size) for part in like)


def _joined(old: Value, new: Value) -> Value | None:
    """The runs and places of what is `old` at first and `new` later; `None` where they are others."""
    old, new = _in_runs(old, new), _in_runs(new, old)
    if len(old) != len(new):
        return None
    pairs = list(zip(old, new, strict=True))
    if any(None not in (before.place, after.place) and before.place != after.place for before, after in pairs):
        return None
    is_new = [before.place is None and after.place is not None for before, after in pairs]
    return tuple(after if new else before for new, (before, after) in zip(is_new, pairs, strict=True))


def _between(value: Value, start: int, end: int) -> Value | None:
    """The runs from one element to another; `None` where they do not begin and end there."""
    found, at = [], 0
    for part in value:
        first, last = max(start, at), min(end, at + part.size)
        at += part.size
        if first < last:
            if part.place is not None and last - first < part.size:
                return None
            found.append(part._replace(size=last - first))
    return tuple(found)


def _added(several: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for terms in several:
        for term, count in terms.items():
            found[term] = found.get(term, 0) + count
    return found
