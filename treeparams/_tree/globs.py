"""Globs over paths: which paths they match, and the text that their stars match.

A glob is matched entry by entry, never as joined text, so `*` cannot cross a dot: `*`, `?` and `[..]` match text within
one entry, as in `fnmatch`, and `**` matches any number of entries, including none.
"""

import fnmatch
import functools
import re
from collections.abc import Iterable, Sequence

from .paths import join_path, quote, split_path, unquote

Star = str | tuple[str, ...]
"""The entry, or a part of one, that a `*` stands for; the entries that a `**` stands for."""
States = dict[int, tuple[Star, ...]]
_STARS = ("*", "**")


class Glob:
    """A glob, read entry by entry.

    `**` matches any number of entries, so the entries read so far may lead to several positions in the glob. All of
    them are kept, each with its stars, so that each entry is read only once; trying one position after another would
    read some often. The positions are in the order in which a regex would try them: if two ways lead to one position,
    the one with the longest first `**` is kept.

    >>> Glob("layers.*.**").match(("layers", "0", "linear", "weight"))
    ('0', ('linear', 'weight'))
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.entries = split_path(text)
        self.stars = [token for entry in self.entries for token in _tokens(entry) if token in _STARS]
        self.start: States = {}
        self._enter(self.start, 0, ())

    def step(self, states: States, entry: str) -> States:
        """Returns the positions after one more entry; empty if the glob matches nothing that begins so."""
        after: States = {}
        for at, stars in states.items():
            if at < len(self.entries) and self.entries[at] == "**":
                self._enter(after, at, (*stars[:-1], (*stars[-1], entry)), is_within=True)
            elif at < len(self.entries):
                found = _match_entry(self.entries[at], entry)
                if found is not None:
                    self._enter(after, at + 1, (*stars, *found))
        return after

    def end(self, states: States) -> tuple[Star, ...] | None:
        """Returns the stars if the glob ends here, otherwise `None`."""
        return states.get(len(self.entries))

    def match(self, entries: Iterable[str]) -> tuple[Star, ...] | None:
        """Returns the stars if the glob matches these entries, otherwise `None`."""
        return self.end(functools.reduce(self.step, entries, self.start))

    def selects(self, entries: Iterable[str]) -> bool:
        """Returns whether the glob matches these entries or a node above them.

        >>> globs = ("**.weight", "layers", "layers.*.0")
        >>> [Glob(glob).selects(("layers", "0", "weight")) for glob in globs]
        [True, True, False]
        """
        states = self.start
        for entry in entries:
            if self.end(states) is not None:
                return True
            states = self.step(states, entry)
        return self.end(states) is not None

    def filled(self, stars: Sequence[Star]) -> str:
        """Returns the path with these texts in place of the stars, of either kind.

        >>> Glob("blocks.*.w").filled(["0"]), Glob("blocks.*.w").filled([("0", "mlp")])
        ('blocks.0.w', 'blocks.0.mlp.w')
        >>> Glob("net.*").filled(['"a.b"']), Glob("net.layer_*").filled(['"a.b"'])
        ('net."a.b"', 'net."layer_a.b"')
        """
        left, entries = iter(stars), list[str]()
        for entry in self.entries:
            pieces: list[list[str]] = [[]]  # of each entry that this one becomes: a star may stand for several
            for token in _tokens(entry):
                star = next(left) if token in _STARS else token
                texts = (star,) if isinstance(star, str) else star
                pieces[-1] += texts[:1]
                pieces += [[text] for text in texts[1:]]
            entries += [_joined(each) for each in pieces if each]
        return join_path(entries)

    def _enter(self, states: States, at: int, stars: tuple[Star, ...], *, is_within: bool = False) -> None:
        """Adds a position, and the positions after a `**` that matches nothing more."""
        while at not in states:
            is_open = at < len(self.entries) and self.entries[at] == "**"
            states[at] = stars = (*stars, ()) if is_open and not is_within else stars
            if not is_open:
                return
            at, is_within = at + 1, False


def _joined(pieces: Sequence[str]) -> str:
    """Joins pieces, each quoted like an entry, into one entry."""
    if len(pieces) == 1:
        return pieces[0]
    texts = [unquote(piece) for piece in pieces]
    return "".join(texts) if texts == pieces else quote("".join(texts))


@functools.lru_cache(maxsize=4096)
def _tokens(entry: str) -> tuple[str, ...]:
    """Returns the stars, `?` and `[..]` of an entry of a glob, and the characters between them."""
    if entry == "**" or unquote(entry) != entry:
        return (entry,)
    return tuple(re.findall(r"\*|\[!?\]?[^\]]*\]|.", entry, re.DOTALL))


@functools.lru_cache(maxsize=65536)
def _match_entry(pattern: str, entry: str) -> tuple[str, ...] | None:
    """Returns the stars of one entry of a glob in one of a path; `None` if it does not match."""
    if pattern == "*":
        return (entry,)
    text = unquote(entry)
    if unquote(pattern) != pattern:  # quoted; also where it need not be
        return () if unquote(pattern) == text else None
    found = _regex(_tokens(pattern)).fullmatch(text)
    if found is None:
        return None
    is_foreign = text == entry != quote(text)  # of a name of another program, which stays without quotes
    return found.groups() if is_foreign else tuple(map(quote, found.groups()))


@functools.lru_cache(maxsize=4096)
def _regex(tokens: tuple[str, ...]) -> re.Pattern[str]:
    # Of a translated `?` or `[..]` only what stands between `(?s:` and `)\Z`.
    parts = ["(.*)" if token == "*" else fnmatch.translate(token)[4:-3] for token in tokens]
    return re.compile("".join(parts), re.DOTALL)
