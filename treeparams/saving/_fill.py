"""The arrays that a plan is called with: compared with those that it was made from, and put into the model."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._files.arrays import Like, as_in_jax, in_numpy, placed_in_turn
from .._files.names import Names, heads_of, spelt_as
from .._tree.copying import copy_leaf
from .._tree.paths import nearest
from .._tree.text import describe, quoted
from .._tree.types import Array
from ._contents import Contents
from ._fit import Fit, Move, shown
from ._rename import Route, stack, unstack


def compared(given: Names, planned: Names, found: Fit, strict: bool) -> Names:
    """Returns the given arrays by the names of a plan, after comparing them with those that it was made from.

    Two mistakes would cause no error later: an array that the plan does not know would be lost; and for two arrays that
    were the same one when the plan was made, the plan uses only one.
    """
    given = spelt_as(planned.specs, given)
    for at, mark in (planned.unkeyed or {}).items():
        if (given.unkeyed or {}).get(at, mark) != mark:
            raise ValueError(
                f"expected a {mark[0]} of {mark[1]} children without keys at {at!r}, from which the plan was made, got "
                f"another class or number of children; make the plan from these arrays"
            )
    for name in found.used:
        want, got = planned.specs[name], given.specs.get(name)
        if got is None:
            heads = heads_of(found.used, given.specs)
            hint = f"; there are such names below {quoted(heads)}: saving.names(arrays, {heads[-1]!r})" if heads else ""
            hint = hint or nearest(name, [other for other in given.specs if other not in planned.specs])
            raise ValueError(f"expected {describe(want)} at {name!r}, from which the plan was made, got nothing{hint}")
        if got != want:
            raise ValueError(
                f"expected {describe(want)} at {name!r}, from which the plan was made, got {describe(got)}"
            )
    known = {given.aliases.get(name, name) for name in given.specs if name in planned.specs or name in planned.computed}
    unknown = [name for name in given if name not in known]
    if unknown and strict:
        raise ValueError(
            f"the plan does not know {quoted(unknown)}, which would be lost; make the plan from these arrays, "
            "saving.plan(arrays, model, ...), and drop some by rename={...: None}, or pass strict=False to it"
        )
    for name, other in found.same.items():
        if name in given.specs:
            _check_tie(given, name, other)
    return given


def _check_tie(given: Names, name: str, other: str) -> None:
    """Rejects two different arrays that were the same one when the plan was made."""
    if given.aliases.get(name, name) == given.aliases.get(other, other):
        return
    is_same = given.specs[name] == given.specs[other]
    if not is_same or not _are_equal(given[name], given[other]):
        raise ValueError(
            f"{name!r} and {other!r} differ, but were the same array when the plan was made, which uses only "
            f"{other!r}; make the plan from these arrays, or drop one, rename={{{name!r}: None}}"
        )


def filled(contents: Contents, found: Fit, given: Names) -> list[Any]:
    """Returns the leaves of a model with the given arrays."""
    names = contents.short_names
    empty = sorted(contents.abstract - found.comes.keys() - contents.aliases.keys())
    if empty:
        raise ValueError(
            f"nothing comes to {shown([names[i] for i in empty])}, and the model has no value there either; pass a "
            "model with values"
        )
    besides, taken = list[tuple[Move, Any]](), set[int]()

    def coming() -> Iterator[tuple[int, Like]]:
        for move, array in _moved(found, given):
            if found.comes.get(move.leaf) is not move:
                besides.append((move, array))
                continue
            # NumPy arrays may change; and a model that is not tied stays so, though the source be.
            is_of_source = isinstance(array, np.ndarray) and not given.is_file and move.route.function is not stack
            array = copy_leaf(array) if is_of_source or id(array) in taken else array
            taken.add(id(array))
            yield move.leaf, (names[move.leaf], array, contents.leaves[move.leaf])

    # NumPy only looks at an array of JAX, which cannot be written to; a leaf of the model can.
    is_looked_at = lambda made: isinstance(made, np.ndarray) and not made.flags.writeable
    values = {i: made.copy() if is_looked_at(made) else made for i, made in placed_in_turn(coming())}
    leaves = contents.leaves_with(values)
    for move, value in besides:
        _check_same(move, value, leaves[move.leaf], contents)
    return leaves


def _moved(found: Fit, given: Names) -> Iterator[tuple[Move, Any]]:
    """Yields the array that each move brings. Each route runs once, even if several of its results are needed."""
    wanted: dict[int, list[Move]] = {}
    for move in (*found.comes.values(), *found.also):
        wanted.setdefault(id(move.route), []).append(move)
    for moves in wanted.values():
        made = _made(moves[0].route, given)
        yield from ((move, made[move.number]) for move in moves)


def _made(route: Route, given: Names) -> list[Any]:
    arrays = [given[name] for name in route.sources]
    for name, array in zip(route.sources, arrays, strict=True):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{name!r} has no value: expected arrays, got jax.ShapeDtypeStructs; jax.eval_shape(plan, arrays) "
                "gives the shapes of the model"
            )
    if route.function in (None, stack, unstack):
        return route(*arrays)
    # The function has met arrays of JAX alone, when the plan was made. It may give back an argument as it is, which is
    # not to be the array of somebody else.
    for i, (name, array) in enumerate(zip(route.sources, arrays, strict=True)):
        if isinstance(array, np.ndarray):
            arrays[i] = jnp.array(as_in_jax(name, array), copy=not given.is_file)
    return route(*arrays)


def _are_equal(one: Array, other: Array) -> bool:
    """Returns whether two arrays have the same values; tracers always count as equal."""
    if isinstance(one, Tracer) or isinstance(other, Tracer):
        return True
    one, other = in_numpy(one), in_numpy(other)
    return bool(np.all((one == other) | ((one != one) & (other != other))))


def _check_same(move: Move, value: Array, have: Array, contents: Contents) -> None:
    """Rejects an array for a tie that differs from the one already there."""
    alias, names = contents.aliases.get(move.leaf), contents.short_names
    if alias and alias.transforms and not isinstance(value, Tracer) and not isinstance(have, Tracer):
        # An alias that is computed, as a norm or an inverse, is the same up to half of its digits.
        value, have = in_numpy(value), in_numpy(have)
        tolerance = float(jnp.finfo(have.dtype).eps) ** 0.5
        wide = np.complex128 if have.dtype.kind == "c" else np.float64  # NumPy does not compare the narrowest floats
        is_same = np.allclose(value.astype(wide), have.astype(wide), tolerance, tolerance, equal_nan=True)
    else:
        is_same = _are_equal(value, have)
    if not is_same:
        raise ValueError(
            f"{move.route.sources[0]!r} goes to {names[move.leaf]!r}, which is tied to "
            f"{names[alias.source if alias else move.leaf]!r}, but another array goes there; drop one of them, "
            f"rename={{{move.route.sources[0]!r}: None}}, or tp.untie the model"
        )
