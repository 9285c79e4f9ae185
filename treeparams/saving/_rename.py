"""From names to names by patterns: which arrays go where - one to one, split, merged, stacked, unstacked, dropped."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._tree.paths import nearest
from .._tree.structure import Spec
from .._tree.text import describe, in_short
from ._patterns import Pattern

Rename = Mapping[Any, Any] | Callable[[str], str | None]
"""`{left: right}`, a side a pattern or a tuple of them and the right one also `None`; or a function of a name."""
Transforms = Mapping[Any, Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Route:
    """Arrays that go somewhere together: the names that they come from and those that they go to."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    kind: str = ""  # "stack" or "unstack"
    function: Callable[..., Any] | None = None

    @property
    def how(self) -> str:
        """How the arrays are changed, in words; empty where they are not."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return self.kind if function is None else getattr(function, "__name__", type(function).__name__)

    @property
    def is_plain(self) -> bool:
        """Whether one array goes to one place as it is."""
        return not self.kind and self.function is None

    def __call__(self, *arrays: Any) -> list[Any]:
        """One array for each target, from one for each source."""
        if self.function is not None:
            return self._made(self.function, arrays)
        if self.kind == "stack":
            return [jnp.stack([jnp.asarray(array) for array in arrays])]
        if self.kind == "unstack":
            return [arrays[0][row] for row in range(arrays[0].shape[0])]
        return list(arrays)

    def _made(self, function: Callable[..., Any], arrays: Sequence[Any]) -> list[Any]:
        try:
            made = function(*arrays)
            made = list(made) if isinstance(made, (tuple, list)) else [made]
            reason = next((f"it returned {describe(each)}" for each in made if not hasattr(each, "dtype")), None)
        except jax.errors.TracerArrayConversionError:
            made, reason = [], "it is written with NumPy, and has to be with jax.numpy"
        except Exception as error:
            made, reason = [], in_short(error)
        if reason is not None:
            given = ", ".join(f"{name!r} ({describe(array)})" for name, array in zip(self.sources, arrays, strict=True))
            raise ValueError(f"{self.how} of {given} fails: {reason}")
        return made


class Routes(NamedTuple):
    """The words of `rename` and `transform`, as routes of arrays by name."""

    found: list[Route]
    dropped: set[str]  # names, on purpose
    kept: set[str]  # targets to which nothing comes, on purpose


def routes(
    specs: Mapping[str, Spec], rename: Rename | None, transform: Transforms | None, targets: Collection[str] | None
) -> Routes:
    """Reads `rename` and `transform`.

    The targets say into how many an array is unstacked; where there are none, its leading axis does.
    """
    functions = _checked(transform)
    if not (rename is None or isinstance(rename, Mapping) or callable(rename)):
        raise TypeError(f"rename is a dictionary {{left: right}} or a function of a name, got {describe(rename)}")
    if callable(rename):
        renamed = {name: rename(name) for name in specs}
        for name, new in renamed.items():
            if not (new is None or isinstance(new, str)):
                raise TypeError(f"rename({name!r}) is to return a name, or None to drop it, got {describe(new)}")
        found = [Route((name,), (new,)) for name, new in renamed.items() if new is not None]
        return Routes(_with_functions(found, functions), {name for name, new in renamed.items() if new is None}, set())
    kept = _kept(dict(rename or {}).pop(None, ()), targets or ())
    entries = [_Entry(left, right) for left, right in (rename or {}).items() if left is not None]
    rest = [name for name in specs if not any(entry.takes(name) for entry in entries)]
    found, dropped = [Route((name,), (name,)) for name in rest], set[str]()
    for entry in entries:
        entry.check(specs)
        function = functions.pop(entry.left, None)
        if entry.rights is None:
            dropped |= {name for names in entry.found.values() for name in names.values()}
        else:
            found += entry.routes(specs, function, targets)
    return Routes(_with_functions(found, functions), dropped, kept)


def _kept(side: object, targets: Collection[str]) -> set[str]:
    """The targets that patterns under `None` name."""
    kept = set[str]()
    for pattern in _side(side, "right") if side != () else ():
        found = {target for target in targets if pattern.match(target) is not None}
        if not found:
            raise ValueError(
                f"rename, None: no array of the model is at {pattern.text!r}{nearest(pattern.text, targets)}"
            )
        kept |= found
    return kept


def _checked(transform: Transforms | None) -> dict[Any, Callable[..., Any]]:
    functions = dict(transform or {})
    for key, function in functions.items():
        if not callable(function):
            raise TypeError(f"transform[{key!r}] is a function of arrays, got {describe(function)}")
    return functions


def _with_functions(found: list[Route], functions: Mapping[Any, Any]) -> list[Route]:
    """The routes with the functions of patterns over their sources."""
    known = [name for route in found for name in route.sources]
    for key, function in functions.items():
        if not isinstance(key, str):
            raise ValueError(f"transform has {key!r}, which is no left side of rename; write it as it is written there")
        pattern = Pattern(key)
        hits = [i for i, route in enumerate(found) if any(pattern.match(name) is not None for name in route.sources)]
        if not hits:
            at = [route.sources[0] for route in found if any(pattern.match(name) is not None for name in route.targets)]
            hint = f"; it is where {at[0]!r} goes, so write that" if at else nearest(key, known)
            raise ValueError(f"transform has {key!r}, which matches no name{hint}")
        for i in hits:
            route = found[i]
            if route.kind or len(route.sources) + len(route.targets) > 2:
                raise ValueError(
                    f"transform has {key!r}, which matches {route.sources[0]!r}, but that goes with others to "
                    f"{route.targets[0]!r}; give the transform under the left side of rename that says so"
                )
            if route.function is None:
                found[i] = dataclasses.replace(route, function=function)
    return found


class _Entry:
    """An entry of `rename`, and the names that it takes: by the text that their stars stand for, and by pattern."""

    def __init__(self, left: object, right: object) -> None:
        self.left = left
        self.lefts = _side(left, "left")
        self.rights = None if right is None else _side(right, "right")
        self.found: dict[tuple[Any, ...], dict[int, str]] = {}
        if self.rights is None:
            return
        counts = [{pattern.stars for pattern in side} for side in (self.lefts, self.rights)]
        if max(map(len, counts)) > 1:
            raise ValueError(f"rename, {left!r}: the patterns of one side have the same number of stars")
        self.surplus = counts[0].pop() - counts[1].pop()
        if abs(self.surplus) > 1 or (self.surplus and len(self.lefts) + len(self.rights) > 2):
            raise ValueError(
                f"rename, {left!r}: the stars of the left side stand for those of the right one in order, and "
                f"{right!r} has {-self.surplus:+} of them; one more on the left stacks one pattern of arrays, one more "
                "on the right unstacks one array"
            )
        # A star more on one side tells rows of a stack apart; so there is one pattern on each side.
        self._right = self.rights[0]
        longer = self.lefts[0] if self.surplus > 0 else self._right
        if self.surplus and not longer.single:
            raise ValueError(f"rename, {left!r}: the star that stacks or unstacks is a '*', and not '**'")

    def takes(self, name: str) -> bool:
        """Whether the entry takes a name."""
        for position, pattern in enumerate(self.lefts):
            stars = pattern.match(name)
            if stars is None:
                continue
            its = self.found.setdefault(stars, {})
            if position in its and self.rights is not None:
                raise ValueError(
                    f"rename, {self.left!r}: it takes {its[position]!r} and {name!r}, which would go to one place; "
                    "write a '*' for what tells them apart"
                )
            # Names to be dropped are only collected; others have the position of their pattern, that of an argument.
            its[position if self.rights is not None else len(its)] = name
            return True
        return False

    def check(self, names: Collection[str]) -> None:
        """Checks that each pattern has taken a name."""
        for position, pattern in enumerate(self.lefts):
            if any(position in its for its in self.found.values()) or (self.rights is None and self.found):
                continue
            taken = [name for name in names if pattern.match(name) is not None]
            if taken:
                raise ValueError(f"rename has {pattern.text!r}, but entries before it take {taken[0]!r}; put it first")
            below = next((name for name in names if Pattern(f"{pattern.text}.**").match(name) is not None), None)
            hint = (
                f"; {pattern.text}.** takes what is below it, as {below!r}" if below else nearest(pattern.text, names)
            )
            raise ValueError(f"rename has {pattern.text!r}, which matches no name{hint}")

    def routes(
        self, specs: Mapping[str, Spec], function: Callable[..., Any] | None, targets: Collection[str] | None
    ) -> Iterator[Route]:
        """The routes of the names that the entry has taken; of patterns that go together, where all are there."""
        rights = [*(self.rights or ())]
        if len(self.lefts) + len(rights) > 2 and function is None:
            verb, example = ("merges", "jnp.concatenate") if len(self.lefts) > 1 else ("splits", "jnp.split")
            raise ValueError(
                f"rename, {self.left!r}: it {verb} arrays, and transform is to say how, by a function from one array "
                f"for each source to one for each target, such as one that calls {example}: "
                f"transform={{{self.left!r}: ...}}"
            )
        if self.surplus > 0:
            yield from self._stacked(rights[0], function)
            return
        for stars, its in self.found.items():
            # Of `("*.q", "*.k")`, a layer that has `q` alone gives nothing: its name stays unused, which is reported.
            if len(its) < len(self.lefts):
                continue
            sources = tuple(its[position] for position in range(len(self.lefts)))
            if self.surplus == 0:
                made = tuple(right.with_stars(stars) for right in rights)
            elif targets is None:
                made = self._numbered(stars, *specs[sources[0]].shape[:1])
            else:
                made = self._rows(stars, targets)
            yield Route(sources, made, "unstack" if self.surplus else "", function)

    def _stacked(self, right: Pattern, function: Callable[..., Any] | None) -> Iterator[Route]:
        numbered = [i for i in self.lefts[0].single if all(stars[i].isdecimal() for stars in self.found)]
        if not numbered:
            raise ValueError(f"rename, {self.left!r}: no '*' of it stands for numbers alone, so nothing can be stacked")
        star = numbered[-1]
        stacks: dict[tuple[Any, ...], dict[int, str]] = {}
        for stars, its in self.found.items():
            rows = stacks.setdefault(stars[:star] + stars[star + 1 :], {})
            if int(stars[star]) in rows:
                raise ValueError(f"rename, {self.left!r}: {rows[int(stars[star])]!r} and {its[0]!r} are one row")
            rows[int(stars[star])] = its[0]
        for stars, rows in stacks.items():
            yield Route(tuple(rows[row] for row in sorted(rows)), (right.with_stars(stars),), "stack", function)

    def _rows(self, stars: tuple[Any, ...], targets: Collection[str]) -> tuple[str, ...]:
        """The paths of an array's rows among these, in numeric order."""
        right = self._right
        matched = [(target, found) for target in targets if (found := right.match(target)) is not None]
        # The last star that stands for numbers is that of the rows; the others have what they have on the left.
        for star in reversed(right.single):
            rows = {
                int(found[star]): target
                for target, found in matched
                if found[star].isdecimal() and right.with_stars((*stars[:star], found[star], *stars[star:])) == target
            }
            if rows:
                return tuple(rows[row] for row in sorted(rows))
        return ()

    def _numbered(self, stars: tuple[Any, ...], count: int) -> tuple[str, ...]:
        """Names of an array's rows, where no paths of a model tell them."""
        right = self._right
        if len(right.single) > 1:
            raise ValueError(f"rename, {self.left!r}: write one '*' in {right.text!r}, that of the rows, and no other")
        star = right.single[0]
        return tuple(right.with_stars((*stars[:star], str(row), *stars[star:])) for row in range(count))


def _side(side: object, which: str) -> tuple[Pattern, ...]:
    texts = (side,) if isinstance(side, str) else side
    if not isinstance(texts, tuple) or not texts or not all(isinstance(text, str) for text in texts):
        also = ", or None" if which == "right" else ""
        raise TypeError(f"a {which} side of rename is a name, a pattern or a tuple of these{also}, got {side!r}")
    return tuple(map(Pattern, texts))
