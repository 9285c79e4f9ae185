"""Names with stars in them: the text that the stars stand for, and the name that a pattern makes of such text."""

import fnmatch
import re
from collections.abc import Sequence
from typing import Any


class Pattern:
    """A name with stars in it: `*` for any text between two dots, `**` for any number of entries, also none."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._entries = [entry if entry == "**" else _tokens(entry) for entry in text.split(".")]
        stars = [token for entry in self._entries for token in ([entry] if entry == "**" else entry) if token in _STARS]
        self.stars = len(stars)
        self._kinds = stars
        self.single = [i for i, star in enumerate(stars) if star == "*"]
        self._regex = re.compile("".join(map(_regex_of_entry, self._entries)), re.DOTALL)

    def match(self, name: str) -> tuple[Any, ...] | None:
        """The text that the stars stand for in a name: `*` for a text, `**` for a tuple of entries."""
        found = self._regex.fullmatch(f"{name}." if name else "") or (self._regex.fullmatch(".") if not name else None)
        if found is not None:
            groups = zip(self._kinds, found.groups(), strict=True)
            return tuple(tuple(text.split(".")[:-1]) if kind == "**" else text for kind, text in groups)
        return () if name == self.text and not self.stars else None

    def with_stars(self, stars: Sequence[Any]) -> str:
        """The name with something in place of its stars, whichever kind of star that was."""
        # Each star stands for entries here, so that a `*` can take those of a `**`, and the other way round.
        left = iter((star,) if isinstance(star, str) else star for star in stars)
        entries = list[str]()
        for entry in self._entries:
            if entry == "**":
                entries += next(left)
            else:
                entries.append("".join(".".join(next(left)) if token == "*" else token for token in entry))
        return ".".join(entries)


_STARS = ("*", "**")


def _tokens(entry: str) -> list[str]:
    return re.findall(r"\*|\[!?\]?[^\]]*\]|.", entry, re.DOTALL)


def _regex_of_entry(entry: str | list[str]) -> str:
    # Each entry has a dot after it, and so has the name that is matched: then `**`, which may stand for no entry and
    # leaves no dot, needs no case of its own.
    return "((?:[^.]*[.])*)" if entry == "**" else "".join(map(_regex_of, entry)) + "[.]"


def _regex_of(token: str) -> str:
    if token == "*":
        return "([^.]*)"
    return "[^.]" if token == "?" else fnmatch.translate(token)[4:-3]  # without the `(?s:` and `)\\Z` around it
