"""From names to names by patterns: which arrays go where - one to one, split, merged, stacked, unstacked, dropped."""

import dataclasses
import fnmatch
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._tree.paths import nearest
from .._tree.structure import Spec
from .._tree.text import describe, in_short

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
        """What is done to the arrays, in words; empty where nothing is."""
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
    """What `rename` and `transform` say of arrays by name."""

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


def _kept(side: Any, targets: Collection[str]) -> set[str]:
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
        pattern = _Pattern(key)
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
    """An entry of `rename`, and the names that it takes: by what their stars stand for, and by pattern."""

    def __init__(self, left: Any, right: Any) -> None:
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
            below = next((name for name in names if _Pattern(f"{pattern.text}.**").match(name) is not None), None)
            hint = (
                f"; {pattern.text}.** takes what is below it, as {below!r}" if below else nearest(pattern.text, names)
            )
            raise ValueError(f"rename has {pattern.text!r}, which matches no name{hint}")

    def routes(
        self, specs: Mapping[str, Spec], function: Callable[..., Any] | None, targets: Collection[str] | None
    ) -> Iterator[Route]:
        """What the entry says of the names that it has taken; of patterns that go together, where all are there."""
        rights = [*(self.rights or ())]
        if len(self.lefts) + len(rights) > 2 and function is None:
            what, example = ("merges", "jnp.concatenate") if len(self.lefts) > 1 else ("splits", "jnp.split")
            raise ValueError(
                f"rename, {self.left!r}: it {what} arrays, and transform is to say how, by a function from one array "
                f"for each source to one for each target, such as one that calls {example}: "
                f"transform={{{self.left!r}: ...}}"
            )
        if self.surplus > 0:
            yield from self._stacked(rights[0], function)
            return
        for stars, its in self.found.items():
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

    def _stacked(self, right: "_Pattern", function: Callable[..., Any] | None) -> Iterator[Route]:
        places = [i for i in self.lefts[0].single if all(stars[i].isdecimal() for stars in self.found)]
        if not places:
            raise ValueError(f"rename, {self.left!r}: no '*' of it stands for numbers alone, so nothing can be stacked")
        place = places[-1]
        stacks: dict[tuple[Any, ...], dict[int, str]] = {}
        for stars, its in self.found.items():
            rows = stacks.setdefault(stars[:place] + stars[place + 1 :], {})
            if int(stars[place]) in rows:
                raise ValueError(f"rename, {self.left!r}: {rows[int(stars[place])]!r} and {its[0]!r} are one row")
            rows[int(stars[place])] = its[0]
        for stars, rows in stacks.items():
            yield Route(tuple(rows[row] for row in sorted(rows)), (right.with_stars(stars),), "stack", function)

    def _rows(self, stars: tuple[Any, ...], targets: Collection[str]) -> tuple[str, ...]:
        """The paths of an array's rows among these, in numeric order."""
        right = self._right
        matched = [(target, found) for target in targets if (found := right.match(target)) is not None]
        for place in reversed(right.single):
            with_row = lambda row, place=place: right.with_stars((*stars[:place], row, *stars[place:]))
            rows = {int(m[place]): t for t, m in matched if m[place].isdecimal() and with_row(m[place]) == t}
            if rows:
                return tuple(rows[row] for row in sorted(rows))
        return ()

    def _numbered(self, stars: tuple[Any, ...], count: int) -> tuple[str, ...]:
        """Names of an array's rows, where no paths of a model tell them."""
        right = self._right
        if len(right.single) > 1:
            raise ValueError(f"rename, {self.left!r}: write one '*' in {right.text!r}, that of the rows, and no other")
        place = right.single[0]
        return tuple(right.with_stars((*stars[:place], str(row), *stars[place:])) for row in range(count))


def _side(side: Any, which: str) -> tuple["_Pattern", ...]:
    texts = (side,) if isinstance(side, str) else side
    if not isinstance(texts, tuple) or not texts or not all(isinstance(text, str) for text in texts):
        also = ", or None" if which == "right" else ""
        raise TypeError(f"a {which} side of rename is a name, a pattern or a tuple of these{also}, got {side!r}")
    return tuple(map(_Pattern, texts))


class _Pattern:
    """A name with stars in it: `*` for any text between two dots, `**` for any number of entries, also none."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._entries = [entry if entry == "**" else _tokens(entry) for entry in text.split(".")]
        stars = [token for entry in self._entries for token in ([entry] if entry == "**" else entry) if token in _STARS]
        self.stars = len(stars)
        self._kinds = stars
        self.single = [i for i, star in enumerate(stars) if star == "*"]
        # Each entry with a dot after it, and so is the name that is matched; `**` then needs no case of its own.
        entry_regex = lambda entry: "((?:[^.]*[.])*)" if entry == "**" else "".join(map(_regex_of, entry)) + "[.]"
        self._regex = re.compile("".join(map(entry_regex, self._entries)), re.DOTALL)

    def match(self, name: str) -> tuple[Any, ...] | None:
        """What the stars stand for in a name: `*` for a text, `**` for a tuple of entries."""
        found = self._regex.fullmatch(f"{name}." if name else "") or (self._regex.fullmatch(".") if not name else None)
        if found is not None:
            groups = zip(self._kinds, found.groups(), strict=True)
            return tuple(tuple(text.split(".")[:-1]) if kind == "**" else text for kind, text in groups)
        return () if name == self.text and not self.stars else None

    def with_stars(self, stars: Sequence[Any]) -> str:
        """The name with something in place of its stars, whichever kind of star that was."""
        left = iter((star,) if isinstance(star, str) else star for star in stars)
        fill = lambda entry: "".join(".".join(next(left)) if token == "*" else token for token in entry)
        entries = [next(left) if entry == "**" else (fill(entry),) for entry in self._entries]
        return ".".join(itertools.chain.from_iterable(entries))


_STARS = ("*", "**")


def _tokens(entry: str) -> list[str]:
    return re.findall(r"\*|\[!?\]?[^\]]*\]|.", entry, re.DOTALL)


def _regex_of(token: str) -> str:
    if token == "*":
        return "([^.]*)"
    return "[^.]" if token == "?" else fnmatch.translate(token)[4:-3]  # without the `(?s:` and `)\\Z` around it
