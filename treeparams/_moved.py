"""Finds the parameters that a training step can change, from its program and without running it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeGuard, cast

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ._programs import Kind, Marks, is_floating, makes_zeros, traced
from ._reached import reached
from ._slots.accidents import keep_apart
from ._slots.index import Index
from ._slots.layout import Layout, index_of, look_up, trained_at
from ._slots.parts import Rest
from ._tree.structure import flatten, same_treedef, structure_of
from ._tree.text import describe, first_lines
from ._tree.types import PyTree, TreeDef, is_inexact

P = ParamSpec("P")


def moved(
    step: Callable[P, Any], *, loss: Callable[..., Any] | None = None, layout: Layout | None = None
) -> Callable[P, Layout]:
    """Finds the parameters that a training step can change, whoever wrote the step.

    >>> import jax, jax.numpy as jnp, optax, treeparams as tp
    >>> model = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
    >>> loss = lambda model: jnp.sum(jax.lax.stop_gradient(model["encoder"]) * model["head"])
    >>> tx = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
    >>> @jax.jit
    ... def step(model, state):
    ...     updates, state = tx.update(jax.grad(loss)(model), state, model)
    ...     return optax.apply_updates(model, updates), state
    >>> print(tp.moved(step, loss=loss)(model, tx.init(model)))
    path     shape  dtype    elements  bytes  role
    encoder  2      float32         2    8 B  trained
    head     2      float32         2    8 B  trained
    <BLANKLINE>
    trained  4 elements in 2 arrays, 16 B
    encoder: moved, and the loss does not reach it (weight decay?)
    head: moved, and the loss reaches it

    In a test, compare with the layout that you want to train: `assert tp.moved(step)(model, state, x) == state.layout`.

    The step is traced and never run, so nothing is donated. The result holds for any values of the arrays among the
    arguments, but only for the given Python numbers and closed-over values. A parameter does not move if the returned
    model holds the very array that was passed in; this is followed through `jax.jit`, loops, branches, `jax.shard_map`
    and functions with custom derivative rules. Adding zeros to it is no move either, nor is adding products of zeros
    and finite numbers written in the program. (`-0.0 + 0.0` is `0.0`, which does not count as a move.) In doubt a
    parameter counts as moved: under zero gradients and a rule with momentum, which may be left from earlier steps;
    under zeros times a computed rate, which may be infinite. A tied parameter moves if it moves at any of its paths.
    Integers and keys are not reported. A ref (`jax.new_ref`) that the step writes is named below the table.

    Args:
        step: a function of the model and further arguments, which may be `jax.ShapeDtypeStruct`s, like the model's
            leaves. It returns the new model, or a tuple whose first item is the new model.
        loss: a function of the model. If you pass it, the result also prints for each path whether the loss depends on
            it, as found by `tp.reached`. Bind its other arguments first: `lambda model: loss(model, x, y)`.
        layout: a layout of such models, for ties that only this layout records. The parameters that it trains do not
            matter.

    Returns:
        A function with the same arguments as `step`. It returns the layout of the model that trains exactly the
        parameters that the step can change, whatever is declared. The lines printed for `loss` are not part of its
        value: it equals the layout without them.

    Raises:
        ValueError: see `tp.layout`.
        TypeError: `step` is not a function; the step returns no model; its control flow depends on values, as under
            `jax.jit`.
    """
    call = cast(Callable[..., Any], step)
    if not callable(step):
        raise TypeError(f"expected a training step, got {describe(step)}; write tp.moved(step)(model, state, x)")

    def layout_of(model: Any, /, *args: Any, **kwargs: Any) -> Layout:
        leaves, treedef, structure = structure_of(model)
        known, index = look_up(structure, layout, leaves)
        own = [i for i in structure.parameters if i not in structure.refs]

        def after(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
            return _leaves_of_model(call(model, *args, **kwargs), treedef, [(i, structure.spec(i).shape) for i in own])

        changed, written = _leaves_changed(after, index, own, model, (args, kwargs))
        moves = {index.sources.get(i, i) for i in changed}
        found = trained_at(known, sorted(moves))
        refs = [structure.paths[i] for i in sorted(structure.refs) if id(leaves[i]) in written]
        notes = [f"{path}: a ref, which the step writes" for path in refs]
        if loss is not None:
            hit = index_of(reached(loss, trained_at(known, index.distinct))(model)).positions
            pairs = {i: (i in moves, i in hit) for i in index.distinct if i not in structure.refs}
            rows = [f"{structure.paths[i]}: {said}" for key, said in _SAID.items() for i in pairs if pairs[i] == key]
            notes += first_lines(rows, 40).splitlines()
        return Layout(index_of(found), notes) if notes else found

    return cast(Any, layout_of)


# Whether a parameter moves, and whether the loss reaches it; the mismatches come first.
_SAID = {
    (True, False): "moved, and the loss does not reach it (weight decay?)",
    (False, True): "not moved, but the loss reaches it (frozen?)",
    (True, True): "moved, and the loss reaches it",
    (False, False): "not moved, and the loss does not reach it",
}


def _leaves_changed(
    step: Callable[..., list[Any]], index: Index, own: Sequence[int], model: PyTree, rest: tuple[PyTree, PyTree]
) -> tuple[list[int], set[int]]:
    """Returns which leaves of these the new model may not hold unchanged, and the ids of the refs that are written."""
    # Two trees, since a state may hold arrays of the model that it was made from, and changes without them.
    halves = Rest.of(model), Rest.of(rest)

    def of_arrays(*arrays: Sequence[Any]) -> list[Any]:
        keep_apart([each for its in arrays for each in its])
        model, rest = (half.replaced(its).model() for half, its in zip(halves, arrays, strict=True))
        return step(model, *rest)

    arrays = [half.arrays for half in halves]
    program = traced(of_arrays, *arrays)
    # The arrays of a tie are one, also where they came apart on the way here.
    tied = {each.leaf: each.source for each in index.ties if not each.transforms}
    dtypes = {i: index.structure.spec(i).dtype for i in own}
    given = {i: frozenset({_Given(tied.get(i, i), dtype)}) for i, dtype in dtypes.items()}
    order = halves[0].index.gathers.order
    own_marks = {order[i]: mark for i, mark in given.items()}
    marks = [own_marks.get(number, _ANY) for number in range(sum(map(len, arrays)))]
    after = zip(own, _Same().follow(program, marks), program.out_avals, strict=True)
    changed = [i for i, new, aval in after if new != given[i] or getattr(aval, "dtype", None) != dtypes[i]]
    # The refs of a model are constants of the program. An effect names a variable since JAX 0.8, its number before;
    # others than reading write, or have no input.
    effects = [each for each in program.effects if type(each).__name__ != "ReadEffect"]
    inputs = [getattr(each, "input", getattr(each, "input_index", None)) for each in effects]
    constants = enumerate(zip(program.jaxpr.constvars, program.consts, strict=True))
    return changed, {id(ref) for k, (variable, ref) in constants if variable in inputs or k in inputs}


def _leaves_of_model(out: Any, treedef: TreeDef, shapes: Sequence[tuple[int, tuple[int, ...]]]) -> list[Any]:
    """Returns the leaves of these numbers and shapes of the new model, from the result of a step."""
    items = list(out) if isinstance(out, (tuple, list)) else []
    for tree in (out, *items[:1]):
        leaves, got = flatten(tree)
        if same_treedef(got, treedef) and all(getattr(leaves[i], "shape", None) == shape for i, shape in shapes):
            return [leaves[i] for i, _ in shapes]
    expected = "expected a step that returns the new model, or a tuple whose first item is the new model"
    other = "if it is another item, write tp.moved(lambda model, *args: step(model, *args)[1])(model, ...)"
    got = f"got {', '.join(map(describe, items or [out]))}"
    raise TypeError(f"{expected}, {got}; {other}; for the parameters of a loss, write tp.reached(loss)(model)")


# -- What a value may be -----------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """An array of the model as it was given, or the row of one that scans take, in the rounds that take it."""

    leaf: int
    dtype: Any
    scans: tuple[int, ...] = ()  # the ids of the operations


# A mark is the set of what a value may be: zeros, finite numbers without zeros, anything, an array of the model, a row.
_ZERO, _FINITE, _ANY = (frozenset({each}) for each in ("zero", "finite", "any"))
_NUMBERS = _ZERO | _FINITE
_Mark = frozenset[Any]


class _Same(Marks):
    """Carries the set of possible values."""

    nothing: _Mark = frozenset()

    def of_constant(self, value: Any) -> _Mark:
        numbers = self.numbers_in(value)
        if numbers is None or not np.isfinite(numbers).all():
            return _ANY
        has = bool(numbers.any()), numbers.size == 0 or not numbers.all()
        return (_FINITE if has[0] else self.nothing) | (_ZERO if has[1] else self.nothing)

    def opaque(self, marks: Sequence[_Mark]) -> _Mark:
        return _ANY

    def parts(self, marks: Sequence[_Mark]) -> _Mark:
        every = super().parts(marks)
        return every if every <= _NUMBERS else _ANY

    def chooses(self, mark: _Mark) -> _Mark:
        return self.nothing  # which branch is taken does not matter where all give the same

    def operation(self, eqn: JaxprEqn, its: list[_Mark]) -> Sequence[_Mark]:
        return its if Kind.SAME in Kind.of(eqn) else [self._result(eqn, its)] * len(eqn.outvars)

    def _result(self, eqn: JaxprEqn, its: list[_Mark]) -> _Mark:
        name, kind = eqn.primitive.name, Kind.of(eqn)
        if name == "select_n":
            return frozenset().union(*its[1:])
        if name in ("add", "add_any", "sub") and its[1] == _ZERO:
            return its[0]
        if name in ("add", "add_any") and its[0] == _ZERO:
            return its[1]
        if name == "convert_element_type" and its[0] != _ZERO:
            return _converted(eqn, its[0])
        if Kind.MOVES in kind and Kind.FILLS not in kind and its[0] <= _NUMBERS:
            return its[0]
        if name == "div":
            return _ZERO if its == [_ZERO, _FINITE] else _ANY
        finite = [mark <= _NUMBERS or not is_floating(atom.aval) for atom, mark in zip(eqn.invars, its, strict=True)]
        zeros = Kind.FILLS not in kind and all(finite) and makes_zeros(eqn, [mark == _ZERO for mark in its])
        return _ZERO if zeros else _ANY

    def row(self, eqn: JaxprEqn, mark: _Mark) -> _Mark:
        own = (each for each in mark if isinstance(each, _Given))
        return mark & (_NUMBERS | _ANY) | {each._replace(scans=(*each.scans, id(eqn))) for each in own}

    def rows(self, eqn: JaxprEqn, mark: _Mark) -> _Mark:
        # What the rounds give back is put together to the array that was scanned over, if each gives back its own row.
        (first, *others) = mark or _ANY
        if not others and _is_row(first, eqn):
            return frozenset({first._replace(scans=first.scans[:-1])})
        return self.parts([mark])

    def later(self, eqn: JaxprEqn, mark: _Mark) -> _Mark:
        return frozenset("any" if _is_row(each, eqn) else each for each in mark)

    def step(self, eqn: JaxprEqn, its: list[Any]) -> Sequence[Any]:
        found = super().step(eqn, its)
        if eqn.primitive.name != "shard_map":
            return found
        # An array that is put together in another way than it was divided is another array.
        ins, outs = eqn.params["in_specs"], eqn.params["out_specs"]
        pairs = [(mark, way) for mark, way in zip(its, ins, strict=True) if isinstance(mark, frozenset)]
        is_same = lambda new, way: new <= _NUMBERS or all(own == way for mark, own in pairs if mark & new)
        return [new if is_same(new, way) else _ANY for new, way in zip(found, outs, strict=True)]


def _is_row(value: Any, eqn: JaxprEqn) -> TypeGuard[_Given]:
    """Returns whether a value is the row that this scan takes."""
    return isinstance(value, _Given) and value.scans[-1:] == (id(eqn),)


def _converted(eqn: JaxprEqn, mark: _Mark) -> _Mark:
    """Returns the mark after a cast: widening keeps the mark, and integers and bools become finite numbers."""
    aval: Any = eqn.invars[0].aval
    own, want = aval.dtype, eqn.params["new_dtype"]
    if is_inexact(want) and not is_inexact(own):
        return _NUMBERS if own == np.bool_ or jnp.iinfo(own).max <= float(jnp.finfo(want).max) else _ANY
    have = {getattr(each, "dtype", own) for each in mark}
    return mark if all(each == want or np.can_cast(each, want, "safe") for each in have) else _ANY
