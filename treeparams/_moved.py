"""Finds the parameters that a training step can change, from its program and without running it."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, cast

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ._programs import (
    Marks,
    Run,
    carry,
    is_floating,
    is_followed,
    makes_zeros,
    numbers_in,
    scan_carries,
    through,
    traced,
)
from ._reached import reached
from ._slots.index import Index
from ._slots.layout import Layout, index_of, noted, trained_at
from ._slots.parts import arrays_in, as_rest, index_in, put_together, with_kept_arrays
from ._slots.trainable import look_up
from ._tree.dtypes import is_inexact
from ._tree.flattening import flatten, same_treedef
from ._tree.lost_ties import keep_apart
from ._tree.recognise import structure_of
from ._tree.structure import Structure
from ._tree.text import describe, first_lines
from ._tree.types import PyTree, TreeDef

P = ParamSpec("P")

# A mark is a set, in bits, of what a value may be: zeros, finite numbers other than zero, anything, or an array of the
# model as it was given, with a bit for each from `_FIRST` on. Where it has one bit, the value is that.
_ZERO, _FINITE, _ANY, _FIRST = 1, 2, 4, 8


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
    path     key         row  offset  size  tied to
    encoder  float32[2]    0       0     2
    head     float32[2]    1       2     2
    2 slots, 4 elements, 16 bytes
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

        def after(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
            return _parameters_in(call(model, *args, **kwargs), treedef, structure)

        changed, written = _changed(after, index, model, (args, kwargs))
        moves = {index.sources.get(i, i) for i in changed}
        found = trained_at(known, sorted(moves))
        refs = [structure.paths[i] for i in sorted(structure.refs) if id(leaves[i]) in written]
        notes = [f"{path}: a ref, which the step writes" for path in refs]
        if loss is not None:
            hit = reached(loss, trained_at(known, index.distinct))(model)
            notes += _notes(index, moves, set(index_of(hit).positions))
        return noted(found, notes) if notes else found

    return cast(Any, layout_of)


def _notes(index: Index, moves: set[int], hit: set[int]) -> list[str]:
    """Describes for each parameter whether it moves and whether the loss reaches it; the mismatches come first."""
    words = {
        (True, False): "moved, and the loss does not reach it (weight decay?)",
        (False, True): "not moved, but the loss reaches it (frozen?)",
        (True, True): "moved, and the loss reaches it",
        (False, False): "not moved, and the loss does not reach it",
    }
    paths = index.structure.paths
    rows = [
        f"{paths[i]}: {said}"
        for key, said in words.items()
        for i in index.distinct
        if (i in moves, i in hit) == key and i not in index.structure.refs
    ]
    return first_lines(rows, 40).splitlines()


def _changed(
    after: Callable[..., list[Any]], index: Index, model: PyTree, rest: tuple[PyTree, PyTree]
) -> tuple[list[int], set[int]]:
    """Returns the leaves that the new model may not hold unchanged, and the ids of the refs that are written."""
    # Two trees, since a state may hold arrays of the model that it was made from, and changes without them.
    halves = as_rest(model), as_rest(rest)

    def of_arrays(*arrays: Sequence[Any]) -> list[Any]:
        keep_apart([each for its in arrays for each in its])
        model, rest = (put_together(with_kept_arrays(half, its), ()) for half, its in zip(halves, arrays, strict=True))
        return after(model, *rest)

    arrays = [arrays_in(half) for half in halves]
    program = traced(of_arrays, *arrays)
    # The arrays of a tie are one, also where they came apart on the way here.
    tied = {each.leaf: each.source for each in index.ties if not each.transforms}
    own = {i: _FIRST << tied.get(i, i) for i in _arrays(index.structure)}
    dtypes = {mark: index.structure.spec(i).dtype for i, mark in own.items()}
    order = index_in(halves[0]).gathers.order
    given = {order[i]: mark for i, mark in own.items()}
    marks = [given.get(k, _ANY) for k in range(len(arrays[0]))] + [_ANY] * len(arrays[1])
    found = zip(own.items(), carry(program, marks, _Same(dtypes), _mark_of), program.out_avals, strict=True)
    changed = [i for (i, mark), new, aval in found if new != mark or getattr(aval, "dtype", None) != dtypes[mark]]
    return changed, {id(program.consts[k]) for k in _written(program)}


def _arrays(structure: Structure) -> list[int]:
    """Returns the parameters that are no refs."""
    return [i for i in structure.parameters if i not in structure.refs]


def _written(program: ClosedJaxpr) -> list[int]:
    """Returns the positions of the constants that a program writes; the refs of a model are among its constants."""
    # A variable since JAX 0.8, its number before. Other effects than reading write, or have no input.
    effects = [each for each in program.effects if type(each).__name__ != "ReadEffect"]
    inputs = [getattr(each, "input", getattr(each, "input_index", None)) for each in effects]
    return [k for k, variable in enumerate(program.jaxpr.constvars) if variable in inputs or k in inputs]


def _parameters_in(out: object, treedef: TreeDef, structure: Structure) -> list[Any]:
    """Returns the parameters of the new model from the result of a step."""
    items = list(out) if isinstance(out, (tuple, list)) else []
    found = [_parameters(each, treedef, structure) for each in [out, *items]]
    new = next((each for each in found[:2] if each is not None), None)
    if new is not None:
        return new
    instead = "return the model from step(model, ...); for the parameters of a loss, write tp.reached(loss)(model)"
    for k, each in enumerate(found[1:]):
        if each is not None:
            instead = f"write tp.moved(lambda model, *args: step(model, *args)[{k}])(model, ...)"
    raise TypeError(
        "expected a step that returns the new model, or a tuple whose first item is the new model, got "
        f"{', '.join(map(describe, items or [out]))}; {instead}"
    )


def _parameters(tree: PyTree, treedef: TreeDef, structure: Structure) -> list[Any] | None:
    """Returns the parameters of a tree that has the structure of the model, otherwise `None`."""
    leaves, got = flatten(tree)
    if not same_treedef(got, treedef):
        return None
    found = [leaves[i] for i in _arrays(structure)]
    shapes = [structure.spec(i).shape for i in _arrays(structure)]
    return found if [getattr(leaf, "shape", None) for leaf in found] == shapes else None


# -- What passes through one operation ---------------------------------------------------------------------------------


def _mark_of(constant: Any) -> int:
    numbers = numbers_in(constant)
    if numbers is None or not np.isfinite(numbers).all():
        return _ANY
    return _ZERO * (numbers.size == 0 or not numbers.all()) | _FINITE * bool(numbers.any())


# Their results are their operands, in other memory or on other devices at most.
_KEEPS = frozenset({"copy", "copy_p", "device_put", "layout_constraint", "mesh_cast", "name", "optimization_barrier"})
_KEEPS |= {"pbroadcast", "pvary", "reshard", "sharding_constraint", "stop_gradient"}
# Their results have the elements of their operand.
_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
# They may give other numbers than their operands have: an index beyond the end, a maximum of nothing.
_MAY_FILL = frozenset({"gather", "reduce_max", "reduce_min"})


class _Same:
    """Computes the set of possible results of one operation; alternatives are joined."""

    def __init__(self, dtypes: dict[int, Any]) -> None:
        self._dtypes = dtypes  # of each array of the model, by its mark

    def __call__(self, eqn: JaxprEqn, marks: Marks, run: Run) -> Marks:
        name = eqn.primitive.name
        if name == "scan":
            return _through_scan(eqn, marks, run)
        if name == "shard_map":
            return _through_shard_map(eqn, marks, run)
        if name == "cond":  # which branch is taken does not matter where all give the same
            marks = [0, *marks[1:]]
        if name == "while":  # nor does it how often the body runs
            run = functools.partial(_of_body, eqn.params["cond_jaxpr"], run)
        if is_followed(eqn):
            return through(eqn, marks, run)
        return marks if name in _KEEPS else [self._result(eqn, marks)] * len(eqn.outvars)

    def _result(self, eqn: JaxprEqn, marks: Marks) -> int:
        name = eqn.primitive.name
        if name == "select_n":
            return functools.reduce(operator.or_, marks[1:])
        if name in ("add", "add_any", "sub") and marks[1] == _ZERO:
            return marks[0]
        if name in ("add", "add_any") and marks[0] == _ZERO:
            return marks[1]
        if name == "convert_element_type" and marks[0] != _ZERO:
            return self._converted(eqn, marks[0])
        if name in _MOVES and _is_known(marks[0]):
            return marks[0]
        return _ZERO if _is_zero(eqn, marks) else _ANY

    def _converted(self, eqn: JaxprEqn, mark: int) -> int:
        """Returns the mark after a cast: widening keeps the mark, and integers and bools become finite numbers."""
        aval: Any = eqn.invars[0].aval
        have, want = self._dtypes.get(mark, aval.dtype), eqn.params["new_dtype"]
        if is_inexact(want) and not is_inexact(have):
            return _ZERO | _FINITE if have == np.bool_ or jnp.iinfo(have).max <= float(jnp.finfo(want).max) else _ANY
        return mark if have == want or np.can_cast(have, want, "safe") else _ANY


def _is_zero(eqn: JaxprEqn, marks: Marks) -> bool:
    """Returns whether the result is zeros; zero times infinity is not."""
    name = eqn.primitive.name
    if name == "div":
        return marks == [_ZERO, _FINITE]
    finite = [_is_known(mark) or not is_floating(atom.aval) for atom, mark in zip(eqn.invars, marks, strict=True)]
    return name not in _MAY_FILL and all(finite) and makes_zeros(name, [mark == _ZERO for mark in marks])


def _is_known(mark: int) -> bool:
    """Returns whether a value consists of zeros and finite numbers written in the program."""
    return not mark & ~(_ZERO | _FINITE)


def _through_scan(eqn: JaxprEqn, marks: Marks, run: Run) -> Marks:
    # A slice is another value than its array, so it has a mark of its own, above all others. What the body gives back
    # in each round is put together to the array that was scanned over.
    start, end = scan_carries(eqn)
    free = max(map(int.bit_length, marks), default=0)
    slices = {1 << free + k: mark for k, mark in enumerate(marks[end:]) if mark >= _FIRST}
    own = [1 << free + k if mark >= _FIRST else mark for k, mark in enumerate(marks[end:])]
    found = through(eqn, [*marks[:end], *own], run)
    stacked = [slices.get(mark, mark if _is_known(mark) else _ANY) for mark in found[end - start :]]
    return [*found[: end - start], *stacked]


def _through_shard_map(eqn: JaxprEqn, marks: Marks, run: Run) -> Marks:
    # An array that is put together in another way than it was divided is another array.
    kind = "specs" if "in_specs" in eqn.params else "names"  # before JAX 0.7
    ins, outs = eqn.params[f"in_{kind}"], eqn.params[f"out_{kind}"]
    found = through(eqn, marks, run)
    return [
        mark if all(own == way for own, each in zip(ins, marks, strict=True) if each & mark >= _FIRST) else _ANY
        for mark, way in zip(found, outs, strict=True)
    ]


def _of_body(condition: Any, run: Run, program: Any, marks: Sequence[int]) -> Marks:
    return [0] if program is condition else run(program, marks)
