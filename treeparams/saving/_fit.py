"""Finds the named array for each array of a model, and those that do not fit."""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from ._reading import unlike_nodes


class _Move(NamedTuple):
    """One of the results of a route, and the leaf of the model that it is for."""

    route: Route
    number: int
    leaf: int


class Fit:
    """Which array of a source goes to which leaf of a model, ties once, and the arrays that do not fit.

    Attributes:
        contents: the model.
        source: the names and specs of the source. A plan holds no array of it, which may be large, and may be gone when
            the plan is applied.
        strict: whether names that the source does not have are errors later.
        comes: the move that fills each leaf that is stored.
        also: further moves for a tie, whose arrays must equal the first.
        same: names that go nowhere because another name of the same array does; and that name.
        missing: the stored leaves that nothing comes to.
        unused: the names that go nowhere, and where they would go.
        disagrees: the reasons why arrays do not fit, one line each.
        stay: the stored leaves that keep their arrays on purpose, each with the name that says so.
    """

    def __init__(
        self, contents: Contents, source: Names, rename: Rename | None, transform: Transforms | None, strict: bool
    ) -> None:
        self.contents, self.source, self.strict = contents, dataclasses.replace(source, read={}.__getitem__), strict
        self.comes, self.also = dict[int, _Move](), list[_Move]()
        self.disagrees, nowhere = dict[str, None](), dict[str, str]()
        self._refused, self._reported = set[int](), set[str]()  # leaves and names of which arrays do not fit
        self._fits: dict[int, list[_Move]] = {}  # by leaf; for a tie, by its stored leaf
        self._goes_to: dict[int, str] = {}  # the leaves for which there is an array, each with its first name
        leaves, aliases = contents.leaf_at, source.aliases
        found, dropped, kept = routes(source.specs, rename, transform, leaves)
        self.stay = {self._root(leaves[name]): name for name in sorted(kept)}
        # A target may be a path only without quotes: a flat dictionary into a nested model.
        spelt = lambda target: text if target not in leaves and (text := bare(target)) in leaves else target
        renamed = lambda route: dataclasses.replace(route, targets=tuple(map(spelt, route.targets)))
        found = [route if leaves.keys() >= {*route.targets} else renamed(route) for route in found]
        pairs = [pair for each in found if not each.is_exact for pair in zip(each.sources, each.targets, strict=False)]
        unlike, used = unlike_nodes(contents, source.unkeyed, pairs, "source"), set(dropped)
        for route in found:
            why = next((unlike[name] for name in route.sources if name in unlike), None)
            if why is not None:
                self._refuse(route, why)
            elif leaves.keys().isdisjoint(route.targets):
                nowhere |= dict.fromkeys(route.sources, first_few(route.targets))
                continue
            else:
                self._add(route)
            used.update(route.sources)
        self._choose()
        # A file has a tie under several names; the one that is stored is used where another one is.
        used.update([aliases[name] for name in used if name in aliases])
        self.unused = {name: nowhere.get(name, name) for name in source if name not in used}
        filled_or_not = self.comes.keys() | self._refused | self.stay.keys()
        self.missing = [i for i in contents.stored.values() if i not in filled_or_not]
        # Names of ties of the source that go nowhere, each with the name of the same array that does.
        taken = {aliases.get(name, name): name for name in reversed(self.used)}
        others = dict.fromkeys(name for pair in aliases.items() for name in pair)
        apart = {*self.used, *dropped, *self._reported}
        same = [(name, taken.get(aliases.get(name, name))) for name in others if name not in apart]
        self.same = {name: other for name, other in same if other is not None}

    @functools.cached_property
    def used(self) -> list[str]:
        """The names of the arrays that go somewhere."""
        return list(dict.fromkeys(name for move in (*self.comes.values(), *self.also) for name in move.route.sources))

    def _root(self, leaf: int) -> int:
        """Returns the leaf that a leaf follows from; for a stored leaf, itself."""
        return self.contents.aliases[leaf].source if leaf in self.contents.aliases else leaf

    def _add(self, route: Route) -> None:
        """Compares the results of a route with the leaves that they go to."""
        leaves, given, specs = self.contents.leaf_at, shown(route.sources), self.source.specs
        for target in route.targets:
            if target not in leaves:
                self._refuse(route, f"{given}: no array is at {target!r}{nearest(target, leaves)}")
        unknown = next((name for name in route.sources if not _is_in_jax(specs[name].dtype)), None)
        if unknown is not None:
            none = "JAX does" if isinstance(specs[unknown].dtype, np.dtype) else "NumPy and JAX do"
            what = f"{unknown!r} is {describe(specs[unknown])}, which {none} not support"
            self._refuse(route, f"{what}; drop it, rename={{{unknown!r}: None}}")
            return
        made = [specs[route.sources[0]]]
        if route.function is not None:
            shapes = [jax.ShapeDtypeStruct(*specs[name][:2]) for name in route.sources]
            made = list(map(array_spec, jax.eval_shape(route, *shapes)))
        if len(made) != len(route.targets):
            count = f"{route.how} gives {len(made)} arrays"
            self._refuse(route, f"{given}: {count}, but the paths are {shown(route.targets)}")
            return
        for number, target in enumerate(route.targets):
            if target in leaves:
                self._offer(_Move(route, number, leaves[target]), made[number])

    def _refuse(self, route: Route, why: str) -> None:
        """Notes why a route does not fit, and that no array of it is missing."""
        self.disagrees[why] = None
        self._reported.update(route.sources)
        leaves = self.contents.leaf_at
        self._refused.update(self._root(leaves[target]) for target in route.targets if target in leaves)

    def _offer(self, move: _Move, made: Spec) -> None:
        contents, route, leaf = self.contents, move.route, move.leaf
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
            self._fits.setdefault(root, []).append(move)
        else:
            self._refuse(route, _disagreement(name, want, made, route))

    def _choose(self) -> None:
        """Chooses the move that fills each stored leaf, and the moves to compare with it."""
        for root, moves in self._fits.items():
            if root in self.contents.aliases:  # it is computed; arrays that come there are compared with it
                self.also += moves
                continue
            first, *others = sorted(moves, key=lambda move: move.leaf != root)
            self.comes[root] = first._replace(leaf=root)
            self.also += [move for move in others if not _is_again(first.route, move.route, self.source.aliases)]

    # -- Arrays that a plan is called with

    def compared(self, given: Names) -> Names:
        """Returns the given arrays by the names of the plan, after comparing them with those that it was made from.

        Two mistakes would cause no error later: an array that the plan does not know would be lost; and for two arrays
        that were the same one when the plan was made, the plan uses only one.
        """
        given = given.spelt_as(self.source.specs)
        for at, mark in (self.source.unkeyed or {}).items():
            if (given.unkeyed or {}).get(at, mark) != mark:
                what = (
                    f"expected a {mark[0]} of {mark[1]} children without keys at {at!r}, from which the plan was made"
                )
                raise ValueError(f"{what}, got another class or number of children; make the plan from these arrays")
        self.check_given(given, self.used)
        for name, other in self.same.items():
            if name not in given.specs or given.aliases.get(name, name) == given.aliases.get(other, other):
                continue
            if given.specs[name] != given.specs[other] or not _are_equal(given[name], given[other]):
                what = f"{name!r} and {other!r} differ, but were the same array when the plan was made"
                remedy = f"make the plan from these arrays, or drop one, rename={{{name!r}: None}}"
                raise ValueError(f"{what}, which uses only {other!r}; {remedy}")
        return given

    def check_given(self, given: Names, used: Collection[str], *, are_wide: bool = False) -> None:
        """Rejects names that the plan does not know, and arrays that are missing or others than those it was made from.

        `are_wide`: arrays that are kept for parameters may have other dtypes.
        """
        specs, computed = self.source.specs, self.source.computed
        for name in used:
            want, got = specs[name], given.specs.get(name)
            is_wide = are_wide and got is not None and got.shape == want.shape and got.parameter and want.parameter
            if got == want or is_wide:
                continue
            heads = [] if got else heads_of(used, given.specs)
            hint = "" if got else nearest(name, [other for other in given.specs if other not in specs])
            if heads:
                hint = f"; there are such names below {quoted(heads)}: saving.names(arrays, {heads[-1]!r})"
            what = f"expected {describe(want)} at {name!r}, from which the plan was made"
            raise ValueError(f"{what}, got {describe(got) if got else 'nothing'}{hint}")
        known = {given.aliases.get(name, name) for name in given.specs if name in specs or name in computed}
        unknown = [name for name in given if name not in known]
        if unknown and self.strict:
            remedy = "make the plan from these arrays, saving.plan(arrays, model, ...), and drop some by"
            remedy += " rename={...: None}, or pass strict=False to it"
            raise ValueError(f"the plan does not know {quoted(unknown)}, which would be lost; {remedy}")

    def filled(self, given: Names) -> list[Any]:
        """Returns the leaves of the model with the given arrays."""
        contents, names = self.contents, self.contents.short_names
        empty = sorted(contents.abstract - self.comes.keys() - contents.aliases.keys())
        if empty:
            what = f"nothing comes to {shown([names[i] for i in empty])}, and the model has no value there either"
            raise ValueError(f"{what}; pass a model with values")
        besides, taken = list[tuple[_Move, Any]](), set[int]()

        def coming() -> Iterator[tuple[int, Like]]:
            for move, array in self._arriving(given):
                if self.comes.get(move.leaf) is not move:
                    besides.append((move, array))
                    continue
                # NumPy arrays may change; and a model that is not tied stays so, though the source be.
                is_of_source = isinstance(array, np.ndarray) and not given.is_file and move.route.function is not stack
                array = copy_leaf(array) if is_of_source or id(array) in taken else array
                taken.add(id(array))
                yield move.leaf, (names[move.leaf], array, contents.leaves[move.leaf])

        leaves = contents.leaves_with(dict(placed_in_turn(coming())))
        for move, value in besides:
            name, leaf, alias = move.route.sources[0], move.leaf, self.contents.aliases.get(move.leaf)
            if not _are_equal(value, leaves[leaf], in_half_of_digits=bool(alias and alias.transforms)):
                what = f"{name!r} goes to {names[leaf]!r}, which is tied to {names[self._root(leaf)]!r}"
                remedy = f"drop one of them, rename={{{name!r}: None}}, or tp.untie the model"
                raise ValueError(f"{what}, but another array goes there; {remedy}")
        return leaves

    def _arriving(self, given: Names) -> Iterator[tuple[_Move, Any]]:
        """Yields the array that each move brings. Each route runs once, even if several of its results are needed."""
        wanted: dict[int, list[_Move]] = {}
        for move in (*self.comes.values(), *self.also):
            wanted.setdefault(id(move.route), []).append(move)
        for moves in wanted.values():
            route = moves[0].route
            arrays = [given[name] for name in route.sources]
            for i, (name, array) in enumerate(zip(route.sources, arrays, strict=True)):
                if isinstance(array, jax.ShapeDtypeStruct):
                    shapes = "jax.eval_shape(plan, arrays) gives the shapes of the model"
                    raise ValueError(f"{name!r} has no value: expected arrays, got jax.ShapeDtypeStructs; {shapes}")
                # A function has met arrays of JAX alone, when the plan was made. It may give back an argument as it is,
                # which is not to be the array of somebody else.
                if isinstance(array, np.ndarray) and route.function not in (None, stack, unstack):
                    arrays[i] = jnp.array(as_in_jax(name, array), copy=not given.is_file)
            made = route(*arrays)
            yield from ((move, made[move.number]) for move in moves)


def shown(names: Sequence[str]) -> str:
    """Formats names in one line; of many only the first ones and the last."""
    return first_few([name or '""' for name in names])


def _is_in_jax(dtype: Any) -> bool:
    """Returns whether JAX has arrays of a dtype."""
    if not isinstance(dtype, np.dtype):
        return getattr(dtype, "type", None) is jax.dtypes.prng_key  # else it is in a file, and nowhere else
    widest = 16 if dtype.kind == "c" else 8  # NumPy has floats of 16 bytes, too
    return dtype.kind == "b" or (jnp.issubdtype(dtype, np.number) and dtype.itemsize <= widest)


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


def _are_equal(one: Array, other: Array, in_half_of_digits: bool = False) -> bool:
    """Returns whether two arrays have the same values; tracers always count as equal."""
    if isinstance(one, Tracer) or isinstance(other, Tracer):
        return True
    one, other = in_numpy(one), in_numpy(other)
    if np.all((one == other) | ((one != one) & (other != other))):
        return True
    if not in_half_of_digits:
        return False
    # The other is computed from another parameter, and machines round otherwise.
    near = float(jnp.finfo(other.dtype).eps) ** 0.5
    return np.allclose(one.astype(complex), other.astype(complex), near, near, equal_nan=True)
