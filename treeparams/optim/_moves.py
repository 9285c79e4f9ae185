"""Operations that move elements or reduce over all of them, for which it is known where each element lies."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from ._formulas import TOTALS, Blocks, Run, Value, between, equal, is_equal, runs_of


def aval_of(atom: Var | Literal) -> Any:
    """Returns the shape and dtype of an operand or a result, which abstract values do not declare to type checkers."""
    return atom.aval


def _reduced(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    """Reduces over all elements; `None` for a reduction over some axes."""
    shape, axes, kind = aval_of(eqn.invars[0]).shape, eqn.params["axes"], TOTALS[eqn.primitive.name]
    if all(axis in axes or size == 1 for axis, size in enumerate(shape)):
        return [blocks.over_all(kind, its[0], math.prod(shape))]
    return its if not axes or (is_equal(its[0]) and kind != "add") else None


def _product(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    """Returns the inner product over all elements; `None` for a product of matrices."""
    (left, right), batch = eqn.params["dimension_numbers"]
    one, other = map(aval_of, eqn.invars)
    if any(batch) or tuple(left) != tuple(right) or len(left) < one.ndim or one.shape != other.shape:
        return None
    products = blocks.each(("mul",), its)
    return None if products is None else [blocks.over_all("add", products, one.size)]


def _reshaped(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    """Keeps the elements, in their order."""
    is_same = aval_of(eqn.invars[0]).size == aval_of(eqn.outvars[0]).size and eqn.params.get("dimensions") is None
    return its[:1] if is_same or eqn.primitive.name == "squeeze" or is_equal(its[0]) else None


def _concatenated(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    found: list[Run] = []
    for atom, value in zip(eqn.invars, its, strict=True):
        run, *others = value
        if not (others or run.place is None or run.size == aval_of(atom).size):
            return None  # a memory of several steps
        found += value if others else [run._replace(size=aval_of(atom).size)]
    if all(run.place is None and run.formula == found[0].formula for run in found):
        return [equal(found[0].formula)]
    axis = eqn.params["axis" if eqn.primitive.name == "stack" else "dimension"]
    return [tuple(found)] if math.prod(aval_of(eqn.outvars[0]).shape[:axis]) == 1 else None


def _sliced(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    shape, params = aval_of(eqn.invars[0]).shape, eqn.params
    axes = [axis for axis, size in enumerate(aval_of(eqn.outvars[0]).shape) if size != shape[axis]] or [0]
    if len(axes) > 1 or math.prod(shape[: axes[0]]) > 1 or any(each != 1 for each in params["strides"] or ()):
        return its if is_equal(its[0]) else None
    unit = math.prod(shape[axes[0] + 1 :])
    start, end = (params[name][axes[0]] * unit for name in ("start_indices", "limit_indices"))
    found = between(its[0], math.prod(shape), start, end)
    return None if found is None else [found]


def _split(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    shape = aval_of(eqn.invars[0]).shape
    ends = [*itertools.accumulate(aval_of(var).size for var in eqn.outvars)]
    if math.prod(shape[: eqn.params["axis"]]) > 1:
        return None
    pieces = [between(its[0], ends[-1], start, end) for start, end in zip([0, *ends], ends, strict=False)]
    found = [piece for piece in pieces if piece is not None]
    return found if len(found) == len(pieces) else None


def _windowed(blocks: Blocks, eqn: JaxprEqn, its: list[Value]) -> list[Value] | None:
    """Reads or writes a window of axes ahead of the leaf's: one of the steps of a memory."""
    if eqn.primitive.name == "dynamic_slice" and is_equal(its[0]):
        return its[:1]
    arrays, index, ahead, window = _window(eqn, its)
    placed = {run.place: run for run in runs_of(arrays) if run.place is not None}
    run, *more = [*placed.values()] or runs_of(arrays)[:1]
    shape = aval_of(eqn.invars[0]).shape
    is_known = isinstance(run.place, int) and window and math.prod(shape[ahead:]) % run.size == 0
    is_one = all(len(value) == 1 for value in (*arrays, *index)) and not more
    if not (is_known and is_one) or any(isinstance(each.place, int) for each in runs_of(index)):
        return None
    key = eqn.primitive.name, shape[:ahead], tuple(window[:ahead]), str(eqn.params.get("mode"))
    over = [each.formula for each in runs_of([*arrays, *index])]
    return [(run._replace(formula=blocks.formulas.of(*key, over=over)),)]


def _window(eqn: JaxprEqn, its: list[Value]) -> tuple[list[Value], list[Value], int, Sequence[int]]:
    """Returns an operation's arrays, its index, the number of axes ahead of those that are whole in the window, and it.

    The window is empty unless it is a single one, at one index.
    """
    shape, params = aval_of(eqn.invars[0]).shape, eqn.params
    if eqn.primitive.name.startswith("scatter"):
        numbers, written = params["dimension_numbers"], aval_of(eqn.invars[2]).shape
        ahead = len(numbers.inserted_window_dims)
        axes = {tuple(numbers.inserted_window_dims), tuple(numbers.scatter_dims_to_operand_dims), tuple(range(ahead))}
        is_window = len(axes) == 1 and aval_of(eqn.invars[1]).shape == (ahead,) and written == shape[ahead:]
        return [its[0], its[2]], its[1:2], ahead, ((1,) * ahead + written) if is_window else ()
    is_cut = eqn.primitive.name == "dynamic_slice"
    window = params["slice_sizes"] if is_cut else aval_of(eqn.invars[1]).shape
    ahead = next((n for n in range(len(shape), 0, -1) if window[n - 1] != shape[n - 1]), 0)
    arrays, index = (its[:1], its[1:]) if is_cut else (its[:2], its[2:])
    return arrays, index[:ahead], ahead, window


MOVES: dict[str, Callable[[Blocks, JaxprEqn, list[Value]], list[Value] | None]] = {
    **dict.fromkeys(TOTALS, _reduced),
    "dot_general": _product,
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze"), _reshaped),
    **dict.fromkeys(("concatenate", "stack"), _concatenated),
    "slice": _sliced,
    **dict.fromkeys(("split", "unstack"), _split),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add"), _windowed),
}
"""By name of the primitive; each returns `None` if no formula of elements describes the result."""
