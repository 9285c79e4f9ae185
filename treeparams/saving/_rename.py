"""Maps names to names by globs: arrays go one to one, or are split, merged, stacked, unstacked or dropped."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._files.arrays import as_in_jax
from .._files.names import split_name
from .._tree.paths import Glob, nearest, quote, unquote
from .._tree.structure import Spec
from .._tree.text import describe, function_name, in_short
from .._tree.types import Array

Rename = Mapping[Any, Any] | Callable[[str], str | None]
"""`{left: right}`, where a side is a glob or several, and the right may be `None`; or a function of a name."""
Transforms = Mapping[Any, Callable[..., Any]]
_Star = str | tuple[str, ...]
_Stars = tuple[_Star, ...]

_AT_ONCE = 32  # operands of one program


def stack(*arrays: Array) -> jax.Array | np.ndarray:
    """Stacks several arrays, such as those of layers, into one.

    JAX compiles a program for each number of operands, which takes seconds for thousands of them. So JAX stacks only
    some at a time, and NumPy stacks NumPy arrays if both give the same dtype.
    """
    if all(isinstance(array, np.ndarray) for array in arrays) and len({array.dtype for array in arrays}) == 1:
        return np.stack(arrays)
    parts = [jnp.stack(list(map(jnp.asarray, some))) for some in _in_parts(arrays)]
    while len(parts) > 1:
        parts = [jnp.concatenate(some) for some in _in_parts(parts)]
    return parts[0]


def _in_parts(arrays: Sequence[Any]) -> list[Sequence[Any]]:
    return [arrays[start : start + _AT_ONCE] for start in range(0, len(arrays), _AT_ONCE)]


def unstack(array: jax.Array | np.ndarray) -> list[Any]:
    """Returns the rows of an array, each as an array of the same kind, even if it is a single number."""
    return [array[row, ...] for row in range(len(array))]


@dataclasses.dataclass(frozen=True)
class Route:
    """Arrays that go somewhere together: the names that they come from, and the names that they go to."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    function: Callable[..., Any] | None = None
    is_exact: bool = False  # whether `rename` has these names themselves, without a star

    @property
    def how(self) -> str:
        """The name of the function that changes the arrays; empty if nothing does."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return "" if function is None else function_name(function)

    def __call__(self, *arrays: Any) -> list[Any]:
        """Returns one array for each target, from one for each source."""
        if self.function is None:
            return list(arrays)
        # A function of `jax.numpy` cuts 64 bits to 32 without a word. NumPy's stacks and rows keep them.
        if not (self.function in (stack, unstack) and all(isinstance(array, np.ndarray) for array in arrays)):
            for name, array in zip(self.sources, arrays, strict=True):
                as_in_jax(name, array)
        try:
            made = self.function(*arrays)
            made = list(made) if isinstance(made, (tuple, list)) else [made]
            made = [np.asarray(each) if isinstance(each, np.generic) else each for each in made]
            reason = next((f"it returned {describe(each)}" for each in made if not hasattr(each, "dtype")), None)
        except jax.errors.TracerArrayConversionError:
            made, reason = [], "it is written with NumPy; write it with jax.numpy"
        except Exception as error:
            made, reason = [], in_short(error)
        if reason is not None:
            given = ", ".join(f"{name!r} ({describe(array)})" for name, array in zip(self.sources, arrays, strict=True))
            raise ValueError(f"{self.how} of {given} fails: {reason}")
        return made


class _Routes(NamedTuple):
    """The content of `rename` and `transform`, as routes of arrays by name."""

    found: list[Route]
    dropped: set[str]  # names, on purpose
    kept: set[str]  # targets to which nothing comes, on purpose


def routes(
    specs: Mapping[str, Spec], rename: Rename | None, transform: Transforms | None, targets: Collection[str] | None
) -> _Routes:
    """Reads `rename` and `transform`.

    The targets determine into how many rows an array is unstacked; without targets, its leading axis does.
    """
    if not (transform is None or isinstance(transform, Mapping)):
        raise TypeError(f"transform must be a dictionary {{left: function}}, got {function_name(transform)}")
    functions = dict(transform or {})
    for key in (key for key, function in functions.items() if not callable(function)):
        raise TypeError(f"transform[{key!r}] must be a function of arrays, got {describe(functions[key])}")
    if not (rename is None or isinstance(rename, Mapping) or callable(rename)):
        raise TypeError(f"rename must be a dictionary {{left: right}} or a function of a name, got {describe(rename)}")
    renamed = {name: rename(name) if callable(rename) else name for name in specs}
    for name, new in renamed.items():
        if not (new is None or isinstance(new, str)):
            raise TypeError(f"rename({name!r}) must return a name, or None to drop it, got {describe(new)}")
    sides = {} if rename is None or callable(rename) else dict(rename)
    stays = _side(sides.pop(None), "right") if None in sides else ()
    kept = {name for glob in stays for name in _matched(glob, targets or (), "rename, None", "path")}
    entries = [_Entry(left, right) for left, right in sides.items()]
    rest = _left_by(entries, specs)
    found = [Route((name,), (new,)) for name in rest if (new := renamed[name]) is not None]
    for entry in entries:
        found += entry.routes(specs, functions.pop(entry.left, None), targets)
    dropped = {name for entry in entries if not entry.rights for name in entry.taken}
    dropped |= {name for name in rest if renamed[name] is None}
    return _Routes(_with_functions(found, functions), dropped, kept)


def _side(side: object, which: str) -> tuple[Glob, ...]:
    texts = (side,) if isinstance(side, str) else tuple(side) if isinstance(side, list) else side
    if not isinstance(texts, tuple) or not texts or not all(isinstance(text, str) for text in texts):
        also = ", or None" if which == "right" else ""
        raise TypeError(f"a {which} side of rename must be a name, a glob or several of these{also}, got {side!r}")
    return tuple(map(Glob, texts))


def _match(glob: Glob, name: str) -> _Stars | None:
    """Returns the text of the stars if a glob matches a name. A name also matches its own text, such as `w[0]`."""
    entries = split_name(name)
    stars = glob.match(entries)
    if stars is None and len(entries) == 1 and "." in name:  # a key of a flat dictionary that was saved as a tree
        stars = glob.match(tuple(map(quote, unquote(name).split("."))))
    return () if stars is None and not glob.stars and glob.text == name else stars


def _matched(glob: Glob, names: Collection[str], of: str, kind: str = "name", hint: str = "") -> list[str]:
    """Returns the names that a glob of `rename` or `transform` matches; raises an error if there are none."""
    found = [name for name in names if _match(glob, name) is not None]
    if found:
        return found
    below = next((name for name in names if glob.selects(split_name(name))), None)
    if below:
        hint = f"; {glob.text}.** matches the names below it, such as {below!r}"
    raise ValueError(f"{of}: {glob.text!r} matches no {kind}{hint or nearest(glob.text, names)}")


def _with_functions(found: list[Route], functions: Mapping[Any, Any]) -> list[Route]:
    """Returns the routes with the functions for globs over their sources."""
    for key, function in functions.items():
        if not isinstance(key, str):
            raise ValueError(f"transform has {key!r}, which is no left side of rename; write it exactly as in rename")
        glob = Glob(key)
        goes = [route.sources[0] for route in found if any(_match(glob, name) is not None for name in route.targets)]
        hint = f"; {goes[0]!r} goes there, so write that name" if goes else ""
        names = _matched(glob, [name for route in found for name in route.sources], "transform", hint=hint)
        for i, route in enumerate(found):
            if set(route.sources).isdisjoint(names):
                continue
            if route.function in (stack, unstack) or len(route.sources) + len(route.targets) > 2:
                raise ValueError(
                    f"transform has {key!r}, which matches {route.sources[0]!r}, but that goes with others to "
                    f"{next(iter(route.targets), '')!r}; write the transform under their left side of rename"
                )
            if route.function is None:
                found[i] = dataclasses.replace(route, function=function)
    return found


class _Entry:
    """An entry of `rename`, and the names that it takes, each with the number of its glob and the stars' text."""

    def __init__(self, left: object, right: object) -> None:
        self.left = left
        self.lefts = _side(left, "left")
        self.rights: tuple[Glob, ...] = () if right is None else _side(right, "right")  # none: the names are dropped
        self.taken: dict[str, tuple[int, _Stars]] = {}
        self._surplus = self._stars_more(right) if self.rights else 0

    def _stars_more(self, right: object) -> int:
        """Returns how many more stars the left side has than the right one: 1 stacks, and -1 unstacks."""
        counts = [{len(glob.stars) for glob in side} for side in (self.lefts, self.rights)]
        if max(map(len, counts)) > 1:
            raise ValueError(f"rename, {self.left!r}: the globs of one side must have the same number of stars")
        surplus = counts[0].pop() - counts[1].pop()
        if abs(surplus) > 1 or (surplus and len(self.lefts) + len(self.rights) > 2):
            raise ValueError(
                f"rename, {self.left!r}: the stars of the left side fill those of the right one in order, but "
                f"{right!r} has another number ({-surplus:+}); one more on the left stacks the arrays of one glob, one "
                "more on the right unstacks one array"
            )
        # A star more on one side tells rows of a stack apart; so there is one glob on each side.
        if surplus and "*" not in (self.lefts if surplus > 0 else self.rights)[0].stars:
            raise ValueError(f"rename, {self.left!r}: the star that stacks or unstacks must be a '*', not '**'")
        return surplus

    def takes(self, name: str) -> Glob | None:
        """Returns the glob by which the entry takes a name."""
        for number, glob in enumerate(self.lefts):
            stars = _match(glob, name)
            if stars is not None:
                self.taken[name] = (number, stars)
                return glob
        return None

    def routes(
        self, specs: Mapping[str, Spec], function: Callable[..., Any] | None, targets: Collection[str] | None
    ) -> Iterator[Route]:
        """Yields the routes of the names that the entry has taken; of globs that go together, only complete sets."""
        if not self.rights:
            return
        if len(self.lefts) + len(self.rights) > 2 and function is None:
            verb, example = ("merges", "jnp.concatenate") if len(self.lefts) > 1 else ("splits", "jnp.split")
            raise ValueError(
                f"rename, {self.left!r}: it {verb} arrays, so transform must say how, from one array for each source "
                f"to one for each target, for example with {example}: transform={{{self.left!r}: ...}}"
            )
        row = self._star_of_rows() if self._surplus > 0 else None
        together: dict[_Stars, dict[int, str]] = {}
        for name, (number, stars) in self.taken.items():
            if row is not None:
                number, stars = _number(stars[row]), stars[:row] + stars[row + 1 :]
            other = together.setdefault(stars, {}).setdefault(number, name)
            if other != name:
                raise ValueError(
                    f"rename, {self.left!r}: it matches {other!r} and {name!r}, which would go to one place; "
                    "write a '*' where they differ"
                )
        function = function or {1: stack, 0: None, -1: unstack}[self._surplus]
        for stars, its in together.items():
            # Of `("*.q", "*.k")`, a layer that has `q` alone gives nothing: its name stays unused, which is reported.
            if len(its) >= len(self.lefts):
                sources = tuple(its[number] for number in sorted(its))
                if self._surplus < 0:
                    made = self._rows(stars, max(specs[sources[0]].shape[:1], default=1), targets)
                else:
                    made = tuple(right.filled(stars) for right in self.rights)
                yield Route(sources, made, function, is_exact=not stars)

    def _star_of_rows(self) -> int:
        """Returns the position of the last star that matches only numbers."""
        for at in reversed(range(len(self.lefts[0].stars))):
            if all(_number(stars[at]) >= 0 for _, stars in self.taken.values()):
                return at
        raise ValueError(f"rename, {self.left!r}: none of its '*' matches numbers alone, so nothing can be stacked")

    def _rows(self, stars: _Stars, count: int, targets: Collection[str] | None) -> tuple[str, ...]:
        """Returns the names of an array's rows: those among the targets, in numeric order, or else `count` new ones."""
        right = self.rights[0]
        if targets is None:
            if right.stars.count("*") > 1:
                raise ValueError(f"rename, {self.left!r}: write only one '*' in {right.text!r}, for the rows")
            at = right.stars.index("*")
            return tuple(right.filled((*stars[:at], str(row), *stars[at:])) for row in range(count))
        matched = [(target, found) for target in targets if (found := _match(right, target)) is not None]
        for at in reversed(range(len(right.stars))):  # the other stars have what they have on the left
            rows = {
                _number(found[at]): target
                for target, found in matched
                if _number(found[at]) >= 0 and right.filled((*stars[:at], found[at], *stars[at:])) == target
            }
            if rows:
                return tuple(rows[row] for row in sorted(rows))
        return ()


def _number(star: _Star) -> int:
    """Returns the number that a star matched, or -1."""
    return int(star) if isinstance(star, str) and star.isdecimal() else -1


def _left_by(entries: Sequence[_Entry], names: Collection[str]) -> list[str]:
    """Gives each name to the first entry that matches it, and returns the names that no entry matches."""
    takers = {name: next(filter(None, (entry.takes(name) for entry in entries)), None) for name in names}
    for entry in entries:
        for number, glob in enumerate(entry.lefts):
            if any(number == its for its, _ in entry.taken.values()):
                continue
            matched = _matched(glob, names, "rename")
            is_default = glob.text == "**" and entry is entries[-1]
            if not (is_default or (entry.taken and not entry.rights)):
                earlier = dict.fromkeys(repr(taker.text) for name in matched if (taker := takers[name]))
                raise ValueError(
                    f"rename: {glob.text!r} comes too late: {', '.join(earlier)} before it took all that it matches; "
                    "a name follows the first entry that matches it"
                )
    return [name for name, taker in takers.items() if taker is None]
