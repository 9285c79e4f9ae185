"""Whether a rule does the same to joined leaves - in a vector, in stacks - as to the leaves themselves.

A rule over one array of all leaves is another program than over the leaves, with other shapes in it, and is right if
each *element* comes out the same. So both programs are run, for three steps, on numbers modulo a prime, one random
number for all elements of a leaf. An array is a sequence of runs, each with the number of its elements: a vector has a
run for each leaf in it. Sums, products and quotients are computed, so that it does not matter in which order, leaf by
leaf or at once, a total is added up. Every other operation gives a number that is a hash of its name and operands, and
constants are hashes too. So programs that do the same give the same numbers, and programs that do something else give
others, but for an accident of one in 2**61.

An operation that is no function of elements - a product of matrices, a sort, a sum along one axis - hashes the shapes
of its operands too, so that it is equal only to itself. Kernels and callbacks to Python hash the reader, so they are
equal to nothing, and the rule is refused. A choice hashes both branches. Of a loop three rounds are read, whatever
their number is. In the tree leaves have their shapes and names, which joined ones do not have.
"""

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from .._forms.form import Form
from .._programs import Kind, Marks, Walk, operation_name
from .._slots.layout import Layout, index_of, trained_at
from .._slots.parts import take_apart
from .._tree.text import in_short
from .._tree.types import PyTree, is_key
from ._groups import compared
from ._per_leaf import PerLeafState, alike_p, usual_arguments
from ._state import Extended, History, nodes_of, settled, steady
from ._updates import Factors, told

_MANY = 32  # leaves; of more only some are looked at
_ROUNDS = 3
_SINGLE = np.dtype(np.float32)
_IN_ROWS = (
    "put an optimiser that looks at single leaves inside optim.per_leaf: "
    "optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(optax.contrib.muon(1e-3)))"
)

# A way to show leaves to a rule, and the leaves in each array that it is shown.
_Way = tuple[Callable[[Sequence[Any]], PyTree], Sequence[Sequence[int]]]


def check_form(
    rule: Extended, layout: Layout, form: Form, name: str, extra: Mapping[str, Any], known: set[Any] | None = None
) -> None:
    """Checks that a rule is the same over a form as over the leaves in it.

    Args:
        rule: an Optax transformation that takes extra arguments.
        layout: the layout of the leaves.
        form: the form that it sees.
        name: the caller, in words.
        extra: arguments that the rule needs, besides `value`, `grad` and `value_fn`.
        known: sets of leaves, by path and kind, for which the rule is known to be right; this adds to them.
    """
    known = set() if known is None else known
    seen = frozenset((slot.path, slot.shape, slot.dtype) for slot in layout.slots)
    if any(seen <= each for each in known) or all(block.length is None for block in form.blocks):
        return
    instead = (
        _IN_ROWS
        if any(block.has_rows for block in form.blocks)
        else 'use form="stacks" with optim.per_leaf, or form="tree"'
    )
    try:
        reason = _reason_of(rule, layout, form, extra)
    except Exception as error:
        raise ValueError(
            f"{name} traces the transformation over leaves, apart and joined, and it fails there ({in_short(error)}); "
            f"{instead}; if it needs more arguments, give examples of them, trial={{...}}"
        ) from error
    if reason:
        raise ValueError(f"the transformation {reason}; {instead}")
    known.add(seen)


def _reason_of(rule: Extended, layout: Layout, form: Form, extra: Mapping[str, Any]) -> str:
    """Says how a rule differs over joined leaves; the empty text if it does not."""
    few = few_alike(layout)
    if not few:
        return ""
    small, reason = trained_at(layout, [index_of(layout).positions[slot] for slot in few]), ""
    # Labels for stacks may look for a shape among them, and are right. A rule that looks at leaves does so for others.
    for more in (0, 1) if form.is_stacks else (0,):
        leaves, ways = _ways(rule, small, few, form, more)
        readers = [_Numbers() for _ in ways]
        found = [_updates(reader, rule, way, leaves, extra) for reader, way in zip(readers, ways, strict=True)]
        differs = [path for path, one, other in zip(small.paths, *found, strict=True) if one != other]
        if not differs:
            return ""
        opaque = sorted({name for reader in readers for name in reader.opaque})
        where = f"{differs[0]!r} gets another update if it is joined with others"
        words = f"looks at the shapes of leaves, their axes or norms, or at their names: {where}"
        reason = reason or words
        if opaque:
            reason = f"calls {', '.join(opaque)}, which may do something else to joined leaves"
    return reason


def _ways(rule: Extended, small: Layout, few: Sequence[int], form: Form, more: int) -> tuple[list[Any], list[_Way]]:
    """Returns a few leaves, with axes that are longer by some elements, and the ways to show them joined and apart."""
    tree = Form.tree(small)
    if not form.is_stacks:
        # In one dtype: a vector has the widest one, and Optax makes the hyperparameters of complex leaves complex.
        joined = Form.vector(small)
        joined = dataclasses.replace(joined, blocks=(dataclasses.replace(joined.blocks[0], dtype=_SINGLE),))
        leaves = [jax.ShapeDtypeStruct(slot.shape, _SINGLE) for slot in small.slots]
        return leaves, [(each.join, each.members) for each in (joined, tree)]
    leaves = [jax.ShapeDtypeStruct([size + more for size in slot.shape], slot.dtype) for slot in small.slots]
    groups: dict[Any, list[int]] = {keys[0].key: [] for keys in form.keys if len(keys) > 1}
    groups |= {name: [] for name, own in jtu.tree_unflatten(form.treedef, form.blocks).items() if own == {}}
    numbers = {slot: i for i, slot in enumerate(few)}
    for keys, slots in zip(form.keys, form.members, strict=True):
        own = groups.setdefault(keys[0].key if len(keys) > 1 else None, [])
        own += [numbers[slot] for slot in slots if slot in numbers]
    joined = Form.in_groups(take_apart(leaves, None).layout, {name: sorted(own) for name, own in groups.items()})
    has_rows = nodes_of(PerLeafState, jax.eval_shape(rule.init, joined.shapes()))
    show = lambda form: functools.partial(_shown, form) if has_rows else form.join
    return leaves, [(show(each), each.members) for each in (joined, tree)]


def _shown(form: Form, arrays: Sequence[Any]) -> PyTree:
    return compared(form, jtu.tree_leaves(form.join(arrays)))


def few_alike(layout: Layout) -> list[int]:
    """Returns the leaves that are looked at: of many, two of each kind whose names differ only in numbers."""
    numbers = [i for i, slot in enumerate(layout.slots) if slot.size]  # an empty leaf has no update
    if len(numbers) <= _MANY:
        return numbers
    alike: dict[Any, list[int]] = {}
    for i in numbers:
        slot = layout.slots[i]
        alike.setdefault((re.sub("[0-9]+", "0", slot.path), slot.shape, slot.dtype), []).append(i)
    return sorted({i for slots in alike.values() for i in (slots[0], slots[-1])})


def _updates(reader: "_Numbers", rule: Extended, way: _Way, leaves: Sequence[Any], extra: Any) -> list[Any]:
    """Returns the numbers of each leaf's updates in some steps."""
    show, members = way
    like = _program(show, leaves)[1]
    init, state = _program(lambda params: settled(rule.init(params)), like)
    update, _ = _program(functools.partial(_stepped, rule, extra), like, state, like, np.float32(0))
    sizes = [math.prod(leaf.shape) for leaf in leaves]

    def argument(*key: Any) -> list[Value]:
        return [
            tuple([(_hashed(*key, slot), None if len(slots) == sizes[slot] == 1 else sizes[slot]) for slot in slots])
            for slots in members
        ]

    found: list[Any] = [[] for _ in leaves]
    kept = reader.run(init, argument("start"))
    for n in range(_ROUNDS):
        args = *argument("gradient", n), *kept, *argument("parameter", n), _equal(_hashed("value", n))
        ends = reader.run(update, args)
        kept = ends[len(members) :]
        for slots, runs in zip(members, ends, strict=False):
            runs = runs * len(slots) if runs[0][1] is None else runs
            for slot, run in itertools.zip_longest(slots, runs):
                found[slots[-1] if slot is None else slot].append(run and run[0])
    return found


def _program(f: Callable[..., PyTree], *args: PyTree) -> tuple[Any, PyTree]:
    """Returns the program of a function, and its result as shapes."""
    # JAX remembers the structures of arguments and results, and what is static in a model is in them.
    leaves, treedef = jtu.tree_flatten(args)
    treedefs: list[Any] = []

    def of_leaves(leaves: Sequence[Any]) -> list[Any]:
        made, its = jtu.tree_flatten(f(*jtu.tree_unflatten(treedef, leaves)))
        treedefs.append(its)
        return made

    program, made = jax.make_jaxpr(of_leaves, return_shape=True)(leaves)
    return program, jtu.tree_unflatten(treedefs[-1], made)


def _stepped(
    rule: Extended, extra: Mapping[str, Any], grads: PyTree, state: PyTree, params: PyTree, value: Any
) -> tuple[PyTree, PyTree]:
    """Returns the updates and the next state."""
    before, known = told(state, functools.partial(_unknown_factors, params)), usual_arguments(grads, value)
    updates, after = rule.update(grads, before, params, **known | dict(extra))
    return updates, steady(told(after, None), state)


def _unknown_factors(params: PyTree, given: Factors) -> PyTree:
    """Returns factors that are known only to be those of each element, whatever their numbers are."""
    numbers, wheres = list(map(jnp.asarray, given.values())), str([*map(id, given)])
    return jax.tree.map(lambda leaf: alike_p.bind(jnp.real(leaf), *numbers, program=wheres), params)


# -- Several histories -------------------------------------------------------------------------------------------------


def couples_late(tx: Extended, form: Form, like: History, extra: Mapping[str, Any]) -> bool:
    """Returns whether a rule couples leaves through values that it has made of each by a step count of its own.

    An example is a clip after Adam, which divides by a power of the step count. A clip before it couples gradients, and
    these do not depend on the count. The run's state is the same for all leaves.

    Args:
        tx: the rule.
        form: a form in which each leaf is an array.
        like: the rule's state over it, as shapes.
        extra: arguments that the rule needs, besides `value`, `grad` and `value_fn`.
    """
    if like.division.problem or len(form.blocks) < 2:
        return bool(like.division.problem)
    params, run = form.shapes(), History.of_run([like])
    own = [1 << i for i in range(len(form.blocks))]
    of_path = {form.paths[slot]: mark for mark, slots in zip(own, form.members, strict=True) for slot in slots}
    kept = [
        (0 if entries in run else 1 << len(own)) if its is None else of_path[its.paths[0]]
        for entries, its in like.copies.owned()
    ]
    program, _ = _program(functools.partial(_stepped, tx, extra), params, like.state, params, np.float32(0))
    walk = _Late(len(own))
    return any(mark & walk.late for mark in walk.run(program, [*own, *kept, *own, 0]))


class _Late(Marks):
    """Carries a mark for each leaf, one for values that all share, and one for values that couple leaves with these."""

    def __init__(self, leaves: int) -> None:
        super().__init__()
        self._shared, self.late = 1 << leaves, 2 << leaves

    def operation(self, eqn: JaxprEqn, its: list[int]) -> Sequence[int]:
        return list(map(self._coupled, super().operation(eqn, its)))

    def _coupled(self, mark: int) -> int:
        leaves = mark & (self._shared - 1)
        if mark & self.late or not leaves & (leaves - 1):
            return mark
        # What several leaves have made together, without a count, is the same number for all of them.
        return mark | self.late if mark & self._shared else 0


# -- Programs on numbers -----------------------------------------------------------------------------------------------

_PRIME = (1 << 61) - 1

Operation = Any  # a `JaxprEqn`, whose type does not say that its operands have shapes

Value = tuple[tuple[int, int | None], ...]
"""The runs of an array: the number of the elements, and how many there are; `None` if all of the array are equal."""

_UNNAMED = {"out_sharding", "sharding", "weak_type"}  # parameters that no number depends on
_WHOLE = {np.dtype(np.int32), np.dtype(np.int64)}  # counts here overflow in neither


def _hashed(*key: Any) -> int:
    """Returns the number of an operation on other numbers, or of an argument."""
    return hash(key) % _PRIME


def _equal(number: int) -> Value:
    """Returns an array whose elements are all equal."""
    return ((number % _PRIME, None),)


def _of_size(number: int, size: int) -> Value:
    """Returns an array of which nothing more is known than its size."""
    return ((number, None if size == 1 else size),)


def _each(f: Callable[[Sequence[int]], int], its: Sequence[Value], *first: int) -> Value | None:
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
        found.append((f((*first, *[number for number, _ in runs])) % _PRIME, sizes.pop() if sizes else None))
    return tuple(found)


def _total(value: Value, size: int) -> int:
    """Returns the sum of all elements of an array of this size."""
    if value[0][1] is None:
        return value[0][0] * size
    sizes = [own or 0 for _, own in value]
    ahead = size // sum(sizes)  # a memory of several steps has leading axes
    return sum(map(operator.mul, [number for number, _ in value], sizes)) * ahead


class _Numbers(Walk[Value]):
    """Carries the numbers of elements.

    Attributes:
        opaque: the names of the operations that show no program.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opaque = set[str]()
        self._members: dict[int, frozenset[int]] = {}  # the numbers among which one is the largest, the least ...
        self._literals = dict[Any, Value]()
        self._kept = list[Any]()  # whose ids are in hashes

    # -- Operations ----------------------------------------------------------------------------------------------------

    def step(self, eqn: Operation, its: list[Value]) -> Sequence[Value]:
        """Returns the numbers of the results of an operation."""
        kind, name = Kind.of(eqn), eqn.primitive.name
        if Kind.SAME in kind or (name == "convert_element_type" and _keeps_numbers(eqn)):
            return its
        found: Sequence[Value | None]
        if Kind.EACH in kind:
            f, *first = self._function(eqn)
            found = [_each(f, its, *first)]
        elif name in _TOTALS:
            found = [self._reduced(eqn, its[0])]
        elif name in _MOVES:
            found = _MOVES[name](eqn, its)
        else:
            return super().step(eqn, its)
        if None in found:
            return self._whole(eqn, its)
        return [
            _equal(value[0][0]) if value[0][1] and var.aval.size == 1 else value
            for value, var in zip(found, eqn.outvars, strict=True)
            if value is not None
        ]

    def _function(self, eqn: Operation) -> tuple[Any, ...]:
        """Returns the function of numbers of an element-wise operation, and the numbers that it begins with."""
        name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
        if name == "integer_pow" and jnp.issubdtype(dtype, jnp.inexact):
            return (lambda numbers: pow(numbers[0], eqn.params["y"] % (_PRIME - 1), _PRIME),)  # of zero, zero
        if name in _COMPUTED and (name != "div" or jnp.issubdtype(dtype, jnp.inexact)):
            return (_COMPUTED[name],)
        if name in ("max", "min") or (name in ("and", "or") and jnp.issubdtype(dtype, bool)):
            return (functools.partial(self._one_of, name),)
        return hash, _hashed(name, *[repr(value) for at, value in sorted(eqn.params.items()) if at not in _UNNAMED])

    def _one_of(self, name: str, numbers: Sequence[int]) -> int:
        """Returns the largest, or the least, of numbers, whatever the order in which they are compared."""
        among = frozenset[int]().union(*[self._members.get(hash((name, n)), (n,)) for n in numbers])
        if len(among) == 1:
            return next(iter(among))
        number = _hashed(name, among)
        self._members[hash((name, number))] = among
        return number

    def _reduced(self, eqn: Operation, value: Value) -> Value | None:
        """Reduces over all elements; `None` for a reduction over some axes."""
        shape, axes, name = eqn.invars[0].aval.shape, eqn.params["axes"], _TOTALS[eqn.primitive.name]
        if value[0][1] is not None and not all(axis in axes or size == 1 for axis, size in enumerate(shape)):
            return None if axes else value
        if name == "add":
            return _equal(_total(value, math.prod([shape[axis] for axis in axes])))
        return _equal(self._one_of(name, [number for number, _ in value]))

    def operation(self, eqn: Operation, its: list[Value]) -> Sequence[Value]:
        """Returns the numbers of an operation of which nothing is known, or only that it is a function."""
        if Kind.of(eqn) and Kind.REF not in Kind.of(eqn):
            return self._whole(eqn, its)
        self.opaque.add(operation_name(eqn))
        self._kept.append(object())
        return [_equal(_hashed("opaque", id(self._kept[-1]), i)) for i in range(len(eqn.outvars))]

    def _whole(self, eqn: Operation, its: Sequence[Value]) -> list[Value]:
        """Returns the results of an operation of which only the operands are known, as they lie there."""
        params = repr(sorted([(name, repr(value)) for name, value in eqn.params.items()]))
        key = eqn.primitive.name, params, *[str(atom.aval) for atom in eqn.invars], *its
        return [_of_size(_hashed("whole", i, key), var.aval.size) for i, var in enumerate(eqn.outvars)]

    def literal(self, atom: Any) -> Value:
        """Returns the number of a constant in an operation."""
        key = str(atom.aval), repr(atom.val)
        if key not in self._literals:
            self._literals[key] = self.constant(atom.val)
        return self._literals[key]

    def constant(self, value: Any) -> Value:
        """Returns the number of a constant: not its value, which may be a rate that changes later."""
        if isinstance(value, Tracer):
            self._kept.append(value)
            return _of_size(_hashed("traced", id(value)), value.size)
        if is_key(value):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        array = array.astype(np.int64) if array.dtype in _WHOLE else array
        first, everything = array.ravel()[:1].tobytes(), array.tobytes()
        if everything == first * array.size:
            return _equal(_hashed("constant", array.dtype.name, first))
        return _of_size(_hashed("constant", array.dtype.name, array.shape, everything), array.size)

    # -- Branches and loops --------------------------------------------------------------------------------------------

    def of_cond(self, eqn: Operation, its: list[Value]) -> Sequence[Value]:
        """Returns the numbers of a choice between programs."""
        ends = [self.run(branch, its[1:]) for branch in eqn.params["branches"]]
        return self._mixed(eqn, ("cond",), [(its[0], *values) for values in zip(*ends, strict=True)])

    def of_while(self, eqn: Operation, its: list[Value]) -> Sequence[Value]:
        """Returns the numbers of the values that a loop carries."""
        rounds, goes_on = [its[len(its) - len(eqn.outvars) :]], list[Value]()
        for _ in range(_ROUNDS):
            found, carried = self.while_round(eqn, its, rounds[-1])
            goes_on.append(found)
            rounds.append(carried)
        return self._mixed(eqn, ("while", *goes_on), zip(*rounds, strict=True))

    def of_scan(self, eqn: Operation, its: list[Value]) -> Sequence[Value]:
        """Returns the numbers of the values that a scan carries, and of those that it puts together."""
        program = eqn.params["jaxpr"]
        fixed, start, along = self.scan_operands(eqn, its)
        given = program.jaxpr.invars[len(its) - len(along) :]
        rounds, made = [start], list[Any]()
        for n in range(_ROUNDS):
            rows = [_row_of(n, value, var.aval) for value, var in zip(along, given, strict=True)]
            if None in rows:
                return self._whole(eqn, its)
            found = self.run(program, [*fixed, *rounds[-1], *[row for row in rows if row]])
            rounds.append(found[: len(start)])
            made.append(found[len(start) :])
        key = "scan", eqn.params["length"], eqn.params["reverse"]
        results = self._mixed(eqn, key, [*zip(*rounds, strict=True), *zip(*made, strict=True)])
        for i in range(len(start), len(results)):
            if results[i][0][1] is None:  # a number of each round
                results[i] = _of_size(results[i][0][0], eqn.outvars[i].aval.size)
        return results

    def _mixed(self, eqn: Operation, key: tuple[Any, ...], several: Iterable[Sequence[Value]]) -> list[Value]:
        """Returns one number for each result, from all the numbers that it may be, or comes from."""
        several = list(several)
        found = [_each(hash, values, _hashed(key)) for values in several]
        unknown = self._whole(eqn, list(itertools.chain(*several))) if None in found else ()
        return [unknown[i] if value is None else value for i, value in enumerate(found)]


def _row_of(n: int, value: Value, aval: Any) -> Value | None:
    """Returns the value that a scan gives to one of its rounds."""
    if value[0][1] is None:
        return value
    return _of_size(_hashed("row", n, value[0][0], aval.shape), aval.size) if len(value) == 1 else None


# -- Operations that are computed --------------------------------------------------------------------------------------


def _keeps_numbers(eqn: Operation) -> bool:
    """Returns whether an operation only makes numbers wider or narrower.

    With 64 bits JAX indexes some arrays by int32 and others by int64, according to their rank.
    """
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return {old, new} <= _WHOLE or (jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating))


_COMPUTED: dict[str, Callable[[Any], int]] = {
    "add": sum,
    "add_any": sum,
    "sub": lambda numbers: numbers[0] - numbers[1],
    "neg": lambda numbers: -numbers[0],
    "mul": math.prod,
    "div": lambda numbers: numbers[0] * pow(numbers[1], _PRIME - 2, _PRIME),
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
    products = _each(math.prod, its)
    return [None if products is None else _equal(_total(products, one.size))]


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


def _windowed(eqn: Operation, its: list[Value]) -> Sequence[Value | None]:
    """Reads or writes one of the steps of a memory, which its first axis counts."""
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
    if name == "dynamic_slice" and its[0][0][1] is None:
        return its[:1]
    count = {"dynamic_slice": 1, "dynamic_update_slice": 2}.get(name, 0)
    if count:
        arrays, index, one = its[:count], its[count], eqn.outvars[0] if count == 1 else eqn.invars[1]
        window = one.aval.shape
    else:
        arrays, index, window = its[::2], its[1], (1, *eqn.invars[2].aval.shape)
        if eqn.params["dimension_numbers"].scatter_dims_to_operand_dims != (0,) or eqn.invars[1].aval.shape != (1,):
            return [None]
    found = _each(hash, arrays, _hashed(name, shape[:1], window[:1], str(eqn.params.get("mode")), index))
    if found is None or sum(size or 1 for _, size in found) != math.prod(shape[1:]) or window[1:] != shape[1:]:
        return [None]
    return [tuple([(number, size or 1) for number, size in found])]


# Each returns `None` in place of a result that is not known element by element.
_MOVES: dict[str, Callable[[Operation, list[Value]], Sequence[Value | None]]] = {
    "dot_general": _product,
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze"), _reshaped),
    **dict.fromkeys(("concatenate", "stack"), _concatenated),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add"), _windowed),
}
