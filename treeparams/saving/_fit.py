"""Finds the named array for each array of a model, and those that do not fit."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._files.arrays import Like, array_spec, as_in_jax, in_numpy, placed_in_turn
from .._files.names import Names, bare, heads_of
from .._tree.paths import nearest
from .._tree.structure import Spec
from .._tree.text import describe, first_few, quoted
from .._tree.types import Array, copy_leaf
from ._contents import Contents
from ._names import Rename, Route, Transforms, routes, stack, unstack
from ._unlike import unlike_nodes


class Move(NamedTuple):
    """One of the results of a route, and the leaf of the model that it is for."""

    route: Route
    number: int
    leaf: int


class Fit(NamedTuple):
    """The move that fills each array, ties once, and the arrays that do not fit."""

    comes: dict[int, Move]  # to each leaf that is stored
    also: list[Move]  # further arrays for a tie, which must equal the first
    same: dict[str, str]  # names that go nowhere because another name of the same array does; and that name
    missing: tuple[int, ...]
    unused: dict[str, str]  # and where they would go
    disagrees: tuple[str, ...]
    kept: frozenset[int]  # leaves that keep their arrays on purpose

    @property
    def used(self) -> list[str]:
        """The names of the arrays that go somewhere."""
        return list(dict.fromkeys(name for move in (*self.comes.values(), *self.also) for name in move.route.sources))


def fit(contents: Contents, source: Names, rename: Rename | None, transform: Transforms | None) -> Fit:
    """Finds the move that fills each array of a model."""
    leaves, aliases = contents.leaf_at, source.aliases
    found, dropped, kept = routes(source.specs, rename, transform, leaves)
    found = [_to_leaves(route, leaves) for route in found]
    pairs = [pair for route in found if not route.is_exact for pair in zip(route.sources, route.targets, strict=False)]
    unlike = unlike_nodes(contents, source.unkeyed, pairs, "source")
    offers, nowhere, used = _Offers(contents, source.specs, sorted(kept)), dict[str, str](), set(dropped)
    for route in found:
        why = next((unlike[name] for name in route.sources if name in unlike), None)
        if why is None and leaves.keys().isdisjoint(route.targets):
            nowhere |= dict.fromkeys(route.sources, first_few(route.targets))
            continue
        used.update(route.sources)
        if why is None:
            offers.add(route)
        else:
            offers.refuse(route, why)
    # A file has a tie under several names; the one that is stored is used where another one is.
    used.update([aliases[name] for name in used if name in aliases])
    comes, also = offers.chosen(aliases)
    filled_or_not = comes.keys() | offers.refused | offers.stay.keys()
    made = Fit(
        comes,
        also,
        {},
        tuple(i for i in contents.stored.values() if i not in filled_or_not),
        {name: nowhere.get(name, "") for name in source if name not in used},
        tuple(offers.disagrees),
        frozenset(offers.stay),
    )
    # Names of ties of the source that go nowhere, each with the name of the same array that does.
    taken = {aliases.get(name, name): name for name in reversed(made.used)}
    others = dict.fromkeys(name for pair in aliases.items() for name in pair)
    apart = {*made.used, *dropped, *offers.reported}
    pairs = [(name, taken.get(aliases.get(name, name))) for name in others if name not in apart]
    return made._replace(same={name: other for name, other in pairs if other is not None})


def _to_leaves(route: Route, leaves: Mapping[str, int]) -> Route:
    """Removes quotes from a target if it is a path only without them: a flat dictionary into a nested model."""
    targets = tuple([
        text if target not in leaves and (text := bare(target)) in leaves else target for target in route.targets
    ])
    return route if targets == route.targets else dataclasses.replace(route, targets=targets)


def shown(names: Sequence[str]) -> str:
    """Formats names in one line; of many only the first ones and the last."""
    return first_few([name or '""' for name in names])


class _Offers:
    """The moves to the leaves of a model, and which of them fit.

    Attributes:
        fits: the moves that fit, by leaf; for a tie, by its stored leaf.
        refused: the stored leaves for which an array does not fit.
        reported: the names of the arrays that do not fit.
        disagrees: the reasons why they do not, one line each.
        stay: the stored leaves that keep their arrays, each with the name that says so.
    """

    def __init__(self, contents: Contents, specs: Mapping[str, Spec], kept: Sequence[str]) -> None:
        self.fits: dict[int, list[Move]] = {}
        self.refused = set[int]()
        self.reported = set[str]()
        self.disagrees = dict[str, None]()
        self._goes_to: dict[int, str] = {}  # the leaves for which there is an array, each with its first name
        self._contents, self._specs = contents, specs
        self.stay = {self._root(contents.leaf_at[name]): name for name in kept}

    def _root(self, leaf: int) -> int:
        """Returns the leaf that a leaf follows from; for a stored leaf, itself."""
        return self._contents.aliases[leaf].source if leaf in self._contents.aliases else leaf

    def add(self, route: Route) -> None:
        """Compares the results of a route with the leaves that they go to."""
        leaves, given = self._contents.leaf_at, shown(route.sources)
        for target in route.targets:
            if target not in leaves:
                self.refuse(route, f"{given}: no array is at {target!r}{nearest(target, leaves)}")
        unknown = next((name for name in route.sources if not _is_in_jax(self._specs[name].dtype)), None)
        if unknown is not None:
            spec = self._specs[unknown]
            none = "JAX does" if isinstance(spec.dtype, np.dtype) else "NumPy and JAX do"
            what = f"{unknown!r} is {describe(spec)}, which {none} not support"
            self.refuse(route, f"{what}; drop it, rename={{{unknown!r}: None}}")
            return
        made = _results(route, self._specs)
        if len(made) != len(route.targets):
            count = f"{route.how} gives {len(made)} arrays"
            self.refuse(route, f"{given}: {count}, but the paths are {shown(route.targets)}")
            return
        for number, target in enumerate(route.targets):
            if target in leaves:
                self._offer(Move(route, number, leaves[target]), made[number])

    def refuse(self, route: Route, why: str) -> None:
        """Notes why a route does not fit, and that no array of it is missing."""
        self.disagrees[why] = None
        self.reported.update(route.sources)
        leaves = self._contents.leaf_at
        self.refused.update(self._root(leaves[target]) for target in route.targets if target in leaves)

    def _offer(self, move: Move, made: Spec) -> None:
        contents, route, leaf = self._contents, move.route, move.leaf
        name, want, alias = contents.short_names[leaf], contents.structure.spec(leaf), contents.aliases.get(leaf)
        if leaf in self._goes_to:
            other = self._goes_to[leaf]
            raise ValueError(f"{other!r} and {route.sources[0]!r} both go to {name!r}; drop one with None")
        self._goes_to[leaf] = route.sources[0]
        at = self.stay.get(self._root(leaf))
        if at is not None:  # it must not be tied to one that is filled either
            raise ValueError(f"rename, None: {at!r} should stay as it is, but {route.sources[0]!r} goes there")
        # Several names may go to one tie. Of these moves one fills the array, that to its own path if there is one; the
        # others are compared with it. An alias with a transform is never filled: it is computed.
        root = leaf if alias is None or alias.transforms else alias.source
        if made == want:
            self.fits.setdefault(root, []).append(move)
        else:
            self.refuse(route, _disagreement(name, want, made, route))

    def chosen(self, aliases: Mapping[str, str]) -> tuple[dict[int, Move], list[Move]]:
        """Returns the move that fills each stored leaf, and the moves to compare with it."""
        comes, also = dict[int, Move](), list[Move]()
        for root, moves in self.fits.items():
            if root in self._contents.aliases:  # it is computed; arrays that come there are compared with it
                also += moves
                continue
            first, *others = sorted(moves, key=lambda move: move.leaf != root)
            comes[root] = first._replace(leaf=root)
            also += [move for move in others if not _is_again(first.route, move.route, aliases)]
        return comes, also


def _is_in_jax(dtype: Any) -> bool:
    """Returns whether JAX has arrays of a dtype."""
    if not isinstance(dtype, np.dtype):
        return getattr(dtype, "type", None) is jax.dtypes.prng_key  # else it is in a file, and nowhere else
    widest = 16 if dtype.kind == "c" else 8  # NumPy has floats of 16 bytes, too
    return dtype.kind == "b" or (jnp.issubdtype(dtype, np.number) and dtype.itemsize <= widest)


def _results(route: Route, specs: Mapping[str, Spec]) -> list[Spec]:
    """Returns the results of a route as shapes."""
    if route.function is None:
        return [specs[route.sources[0]]]
    made = jax.eval_shape(route, *(jax.ShapeDtypeStruct(*specs[name][:2]) for name in route.sources))
    return list(map(array_spec, made))


def _disagreement(name: str, want: Spec, got: Spec, route: Route) -> str:
    hint = ""
    if want.shape == got.shape and isinstance(want.dtype, np.dtype) and isinstance(got.dtype, np.dtype):
        hint = f"; to cast it, write a transform, lambda array: array.astype({str(want.dtype)!r})"
    elif want.shape == got.shape[::-1] != got.shape:
        hint = "; to transpose it, write transform={...: jnp.transpose}"
    by = f" by {route.how}" if route.how else ""
    return f"{name!r} is {describe(want)}, but {describe(got)} comes from {shown(route.sources)}{by}{hint}"


def _is_again(one: Route, other: Route, aliases: Mapping[str, str]) -> bool:
    """Returns whether two routes use one array that the source has under two names."""
    first, second = ([aliases.get(name, name) for name in route.sources] for route in (one, other))
    return one.function is other.function is None and first == second


# -- Arrays that a plan is called with --------------------------------------------------------------------------------


def compared(given: Names, planned: Names, found: Fit, strict: bool) -> Names:
    """Returns the given arrays by the names of a plan, after comparing them with those that it was made from.

    Two mistakes would cause no error later: an array that the plan does not know would be lost; and for two arrays that
    were the same one when the plan was made, the plan uses only one.
    """
    given = given.spelt_as(planned.specs)
    for at, mark in (planned.unkeyed or {}).items():
        if (given.unkeyed or {}).get(at, mark) != mark:
            raise ValueError(
                f"expected a {mark[0]} of {mark[1]} children without keys at {at!r}, from which the plan was made, got "
                f"another class or number of children; make the plan from these arrays"
            )
    check_given(given, planned, found.used, strict)
    for name, other in found.same.items():
        if name not in given.specs or given.aliases.get(name, name) == given.aliases.get(other, other):
            continue
        if given.specs[name] != given.specs[other] or not _are_equal(given[name], given[other]):
            raise ValueError(
                f"{name!r} and {other!r} differ, but were the same array when the plan was made, which uses only "
                f"{other!r}; make the plan from these arrays, or drop one, rename={{{name!r}: None}}"
            )
    return given


def check_given(given: Names, planned: Names, used: Iterable[str], strict: bool, *, are_wide: bool = False) -> None:
    """Rejects names that a plan does not know, and arrays that are missing or others than those it was made from.

    `are_wide`: arrays that are kept for parameters may have other dtypes.
    """
    used = list(used)
    for name in used:
        want, got = planned.specs[name], given.specs.get(name)
        if got is None:
            heads = heads_of(used, given.specs)
            hint = f"; there are such names below {quoted(heads)}: saving.names(arrays, {heads[-1]!r})" if heads else ""
            hint = hint or nearest(name, [other for other in given.specs if other not in planned.specs])
            raise ValueError(f"expected {describe(want)} at {name!r}, from which the plan was made, got nothing{hint}")
        if got != want and not (are_wide and got.shape == want.shape and got.parameter and want.parameter):
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
        for move, array in _arriving(found, given):
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


def _arriving(found: Fit, given: Names) -> Iterator[tuple[Move, Any]]:
    """Yields the array that each move brings. Each route runs once, even if several of its results are needed."""
    wanted: dict[int, list[Move]] = {}
    for move in (*found.comes.values(), *found.also):
        wanted.setdefault(id(move.route), []).append(move)
    for moves in wanted.values():
        route = moves[0].route
        arrays = [given[name] for name in route.sources]
        for i, (name, array) in enumerate(zip(route.sources, arrays, strict=True)):
            if isinstance(array, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"{name!r} has no value: expected arrays, got jax.ShapeDtypeStructs; jax.eval_shape(plan, arrays) "
                    "gives the shapes of the model"
                )
            # A function has met arrays of JAX alone, when the plan was made. It may give back an argument as it is,
            # which is not to be the array of somebody else.
            if isinstance(array, np.ndarray) and route.function not in (None, stack, unstack):
                arrays[i] = jnp.array(as_in_jax(name, array), copy=not given.is_file)
        made = route(*arrays)
        yield from ((move, made[move.number]) for move in moves)


def _are_equal(one: Array, other: Array) -> bool:
    """Returns whether two arrays have the same values; tracers always count as equal."""
    if isinstance(one, Tracer) or isinstance(other, Tracer):
        return True
    one, other = in_numpy(one), in_numpy(other)
    return bool(np.all((one == other) | ((one != one) & (other != other))))


def _check_same(move: Move, value: Array, have: Array, contents: Contents) -> None:
    """Rejects an array for a tie that differs from the one already there."""
    alias, names = contents.aliases.get(move.leaf), contents.short_names
    is_same = _are_equal(value, have)
    if not is_same and alias and alias.transforms:
        # An alias that is computed, as a norm or an inverse, is the same up to half of its digits.
        tolerance = float(jnp.finfo(have.dtype).eps) ** 0.5
        with jax.ensure_compile_time_eval():  # in a trace, too
            is_same = bool(jnp.allclose(value, have, tolerance, tolerance, equal_nan=True))
    if not is_same:
        raise ValueError(
            f"{move.route.sources[0]!r} goes to {names[move.leaf]!r}, which is tied to "
            f"{names[alias.source if alias else move.leaf]!r}, but another array goes there; drop one of them, "
            f"rename={{{move.route.sources[0]!r}: None}}, or tp.untie the model"
        )
