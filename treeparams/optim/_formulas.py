"""Programs as formulas: programs with the same formulas do the same, however their arrays are cut.

A rule over one array of all leaves is another program than over the leaves, with other shapes in it, and is right if
each *element* comes out the same. So an array is described by the formula of its elements: the sum of two arrays is
`add(x, y)`, in leaves and in vectors, and a number has one formula, however it is broadcast. A total is a set of terms,
such as "x squared, over slots 0 and 1". So a sum over all leaves has one formula, whether it is computed leaf by leaf
or at once, and the norm of one leaf has another formula than the norm of all.

Formulas are numbers, which one `Formulas` gives to all programs that are compared. A formula is an operation and the
numbers of the formulas of its operands; the same operation over the same numbers gets the same number again. So two
formulas, however deep, are compared as two numbers, and programs are never compared with each other.

A value is an array, as runs of elements with one formula each: a single run for one array, several for arrays that were
joined.

Example: the norm of all leaves. Leaf by leaf a program has `add(reduce_sum(mul(a, a)), reduce_sum(mul(b, b)))`, with
the leaf `a` in slot 0 and `b` in slot 1. Over a vector it has `reduce_sum(mul(v, v))`, with both slots in `v`. The
elements of `a`, `b` and `v` have one formula, that of the gradient, say 7, so all three products are 8, `mul(7, 7)`.
The first total has two terms, 8 over slot 0 and 8 over slot 1. The second has one, 8 over both. Slots of equal terms
are united, so each is "8 over slots 0 and 1", and has one number.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.core import Tracer
from jax.extend.core import Primitive

NO_FORMULA = -1  # of values that a program does not show, and of all values made from them

# An operation that is known to do the same to leaves as to the array that they are joined to.
alike_p = Primitive("alike")
alike_p.def_abstract_eval(lambda array, *_, **__: array)

# The block in which elements lie; `("of size", n)` for an array of no block; `None` if all elements are equal.
Place = int | tuple[str, int] | None

Key = tuple[Any, ...]  # an operation: its name, and everything else that distinguishes it

# The operation on two numbers that each reduction repeats.
TOTALS = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_and": "and", "reduce_or": "or"}

_LINEAR = frozenset({"mul", "div", "neg", "convert_element_type"})  # applied to a sum, they apply to each term


class Run(NamedTuple):
    """Elements of an array that have one formula."""

    formula: int
    place: Place
    size: int  # of the block, or the number of elements; unknown if all are equal and there is no other run


class Value(tuple[Run, ...]):
    """An array, as its runs."""

    @classmethod
    def equal(cls, formula: int) -> "Value":
        """Returns an array whose elements are all equal."""
        return cls((Run(formula, None, 1),))

    @classmethod
    def of_no_block(cls, formula: int, size: int) -> "Value":
        """Returns an array that belongs to no block."""
        return cls.equal(formula) if size == 1 else cls((Run(formula, ("of size", size), size),))

    @property
    def is_equal(self) -> bool:
        """Whether all elements are equal."""
        return [run.place for run in self] == [None]

    def in_runs(self, like: "Value") -> "Value":
        """Divides an array whose elements are all equal into the runs of another one; returns others as they are."""
        if len(self) == len(like) or not self.is_equal:
            return self
        return Value(own._replace(size=run.size) for own in self for run in like)

    def between(self, size: int, start: int, end: int) -> "Value | None":
        """Returns the elements from one to another of an array of this size; `None` if no runs begin and end there."""
        if self.is_equal:
            return self
        found, at = list[Run](), 0
        for run in self:
            first, last = max(start, at), min(end, at + run.size)
            at += run.size
            if first < last:
                if run.place is not None and last - first < run.size:
                    return None
                found.append(run._replace(size=last - first))
        return Value(found) if at == size and found else None


Terms = Mapping[tuple[int, Place], int]  # how often each formula, over the elements at a place, occurs in a total


class Formulas:
    """Gives numbers to formulas."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Key, tuple[int, ...]], int] = {}
        self._keys: list[tuple[Key, tuple[int, ...]]] = []
        self.kept: list[Tracer] = []  # whose ids are in keys

    def of(self, *key: Hashable, over: Iterable[int] = ()) -> int:
        """Returns the number of a formula; `over` are the formulas of its operands."""
        whole = key, tuple(over)
        if NO_FORMULA in whole[1]:
            return NO_FORMULA
        if whole not in self._numbers:
            self._numbers[whole] = len(self._keys)
            self._keys.append(whole)
        return self._numbers[whole]

    def carried_in(self, depth: int, formulas: Iterable[int]) -> set[int]:
        """Returns the numbers of the values that a loop at this depth carries and that the formulas depend on."""
        waiting, seen, found = set(formulas) - {NO_FORMULA}, set[int](), set[int]()
        while waiting:
            formula = waiting.pop()
            seen.add(formula)
            key, over = self._keys[formula]
            waiting |= set(over) - seen
            if key[:2] == ("carried", depth):
                found.add(key[2])
        return found


class Blocks:
    """Computes the formulas of values made from blocks: arrays that hold slots, such as leaves, a vector, stacks."""

    def __init__(self, formulas: Formulas, slots: Sequence[Iterable[int]], sizes: Sequence[int]) -> None:
        self.formulas = formulas
        self._slots = list(map(frozenset, slots))  # in each block
        self._sizes = sizes
        self._terms: dict[int, tuple[str, Terms]] = {}  # of a formula that is a total

    def argument(self, name: str, block: int | None = None) -> Value:
        """Returns an argument of this name: a block, or a number."""
        return Value((Run(self.formulas.of(name), block, 1 if block is None else self._sizes[block]),))

    def lies(self, value: Value) -> Key:
        """Returns where the elements of a value lie, in terms of slots."""
        slots = [self._slots[run.place] if isinstance(run.place, int) else run.place for run in value]
        return tuple((own, run.size if len(value) > 1 else 0) for own, run in zip(slots, value, strict=True))

    def each(self, key: Key, its: Sequence[Value]) -> Value | None:
        """Returns the result of an element-wise operation; `None` if places differ, such as elements of two leaves."""
        longest = max(its, key=len)  # an array of equal elements, such as a rate, goes with each run of the others
        found = []
        for runs in zip(*(value.in_runs(longest) for value in its), strict=True):
            placed = {run.place: run for run in runs if run.place is not None}
            if len(placed) > 1 or (len(longest) > 1 and len({run.size for run in runs}) > 1):
                return None
            like = next(iter(placed.values()), runs[0])
            found.append(like._replace(formula=self.formulas.of(*key, over=[run.formula for run in runs])))
        return Value(found)

    def over_all(self, kind: str, value: Value, size: int) -> Value:
        """Returns the sum (or the largest, or whether all are true, ...) of all elements of an array of this size."""
        terms: list[Terms] = []
        for formula, place, own in value:
            if place is None:
                terms.append(self._terms_of(kind, formula, size if len(value) == 1 else own))
                continue
            ahead = size // own if len(value) == 1 else 1  # a memory of several steps has leading axes
            terms.append({(formula if ahead == 1 else self.formulas.of("ahead", ahead, over=[formula]), place): 1})
        return self._total(kind, terms)

    def of_totals(self, key: Key, its: Sequence[Value], is_floating: bool) -> Value | None:
        """Returns the result of an operation on totals, if it is a total too.

        Leaf by leaf, totals are added up, and may be scaled before.
        """
        formulas = [value[0].formula for value in its]
        totals = {i: self._terms[formula] for i, formula in enumerate(formulas) if formula in self._terms}
        kinds = {kind for kind, _ in totals.values()}
        if not kinds or not all(value.is_equal for value in its):
            return None
        if key[0] == "sub" and "add" in kinds:  # as the sum with the negative
            negative = self.of_totals(("neg",), its[1:], is_floating) or self.each(("neg",), its[1:])
            return None if negative is None else self.of_totals(("add",), [its[0], negative], is_floating)
        if key[0] in kinds:
            return self._total(key[0], [self._terms_of(key[0], formula, 1) for formula in formulas])
        at, *others = totals
        # Half of a sum is the sum of the halves, so both get one number. With integers they differ, and the reciprocal
        # of a sum is not the sum of the reciprocals.
        if key[0] not in _LINEAR or not is_floating or kinds != {"add"} or others or (key[0] == "div" and at == 1):
            return None
        scaled = {}
        for (term, place), count in totals[at][1].items():
            formulas[at] = term
            scaled[self.formulas.of(*key, over=formulas), place] = count
        return self._total("add", [scaled])

    def _terms_of(self, kind: str, formula: int, count: int) -> Terms:
        own, terms = self._terms.get(formula, ("", {}))
        return {term: n * count for term, n in terms.items()} if own == kind else {(formula, None): count}

    def _total(self, kind: str, several: Sequence[Terms]) -> Value:
        """Returns the total of several others: all their terms, with the slots of equal terms united."""
        terms: dict[tuple[int, Place], int] = {}
        for term, count in (item for each in several for item in each.items()):
            terms[term] = terms.get(term, 0) + count if kind == "add" else 1
        if [*terms.values()] == [1] and next(iter(terms))[1] is None:
            return Value.equal(next(iter(terms))[0])
        # Leaves and a vector have different blocks, so a total lists the slots that a formula is summed over. The slots
        # of separate leaves are united, as they are in the vector.
        reached: dict[tuple[int, int, Place], frozenset[int]] = {}
        for (formula, place), count in terms.items():
            slots, other = (self._slots[place], None) if isinstance(place, int) else (frozenset[int](), place)
            reached[formula, count, other] = reached.get((formula, count, other), frozenset()) | slots
        over = sorted({formula for formula, _ in terms})
        total = self.formulas.of("total", kind, frozenset(reached.items()), over=over)
        if total != NO_FORMULA:
            self._terms[total] = kind, terms
        return Value.equal(total)


def runs_of(values: Iterable[Value]) -> list[Run]:
    """Returns the runs of some values."""
    return [run for value in values for run in value]


def with_formulas(values: Sequence[Value], formulas: Iterable[int]) -> list[Value]:
    """Returns values with other formulas, one for each run."""
    given = iter(formulas)
    return [Value(run._replace(formula=next(given)) for run in value) for value in values]
