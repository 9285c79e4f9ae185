"""Key paths as text and back, and the nearest path to a misspelt one; globs over paths, and the matches of their stars.

A *path* identifies a node or leaf in a pytree, with one entry per key and dots between them: `layers.0.weight`. The
root is the empty text. An entry that would be misread - it is empty, or holds a dot, a quote or a glob character, or
starts with `!` - is written as a JSON string: `"a.b".weight`. So text splits back into entries without the model.

A *glob* is matched entry by entry, never as joined text, so `*` cannot cross a dot: `*`, `?` and `[..]` match text
within one entry, as in `fnmatch`, and `**` matches any number of entries, including none.
"""

import difflib
import fnmatch
import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax.tree_util import GetAttrKey, SequenceKey

_NEEDS_QUOTES = re.compile(r"""^!|[.*?\[\]"']""")
# One entry: a JSON string, or a run of anything but a dot; a glob's `[...]` may hold a dot.
_JSON = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
_ENTRY = rf'(?:{_JSON}|(?!")(?:\[[^\]]*\]|[^.])*+)'
_PATH, _EACH = re.compile(rf"{_ENTRY}(?:\.{_ENTRY})*"), re.compile(rf"(?:^|\.)({_ENTRY})")


@functools.lru_cache(maxsize=65536)
def quote(text: str) -> str:
    """Returns `text` as one entry of a path: bare if that can be read back, otherwise as a JSON string.

    >>> quote("weight"), quote("a.b"), quote("")
    ('weight', '"a.b"', '""')
    """
    return json.dumps(text, ensure_ascii=False) if not text or _NEEDS_QUOTES.search(text) else text


def unquote(entry: str) -> str:
    """Returns the text that `quote` wrote."""
    return json.loads(entry) if len(entry) >= 2 and entry[0] == '"' == entry[-1] else entry


@functools.lru_cache(maxsize=65536)
def split_path(path: str) -> tuple[str, ...]:
    """Splits a path or glob into its entries, still quoted where they were.

    >>> split_path('layers.0."a.b"')
    ('layers', '0', '"a.b"')
    >>> split_path("")
    ()
    """
    begin = _PATH.match(path)
    rest = path[begin.end() :] if begin else path
    if rest:
        expected = "expected JSON strings, or entries between dots"
        raise ValueError(f"the path {path!r} cannot be read at {rest!r}: {expected}")
    return tuple(_EACH.findall(path)) if path else ()


def join_path(entries: Iterable[str]) -> str:
    """Joins entries into a path; the inverse of `split_path`."""
    return ".".join(entries)


def _key_text(key: object) -> str:
    """Returns the bare text of one JAX key entry: an attribute's name, a dict's key, a position."""
    values = [getattr(key, attribute, None) for attribute in ("name", "key", "idx")]
    return str([*[value for value in values if value is not None], getattr(key, "key", key)][0])


def key_entries(keys: Iterable[object]) -> tuple[str, ...]:
    """Returns the entries of a JAX key path, for keys whose siblings need not be checked."""
    return tuple([quote(_key_text(key)) for key in keys])


def sibling_entries(keys: Sequence[Any], above: Sequence[str] = ()) -> Sequence[str]:
    """Returns the entries of all children of one node; raises an error if two have the same text.

    With the same text, a path would name two leaves.
    """
    entries = [
        key.name if type(key) is GetAttrKey else str(key.idx) if type(key) is SequenceKey else quote(_key_text(key))
        for key in keys
    ]
    if len(set(entries)) < len(entries):
        twice = next(entry for entry in entries if entries.count(entry) > 1)
        one, other = [key for key, entry in zip(keys, entries, strict=True) if entry == twice][:2]
        where = f"the node at {join_path(above)!r}" if above else "the root"
        raise ValueError(f"the keys {one} and {other} of {where} have the same text in a path, {twice!r}; rename one")
    return entries


def nearest(path: str, known: Iterable[str], count: int = 3) -> str:
    """Returns the known paths most like `path`, as the end of an error message; empty if there are none.

    >>> nearest("layer.0.weight", ["layers.0.weight", "head.bias"], count=1)
    "; nearest: 'layers.0.weight'"
    """
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(path, known, n=count, cutoff=0.3) or known[:count]
    return f"; nearest: {', '.join(map(repr, close))}" if close else ""


# -- Globs -------------------------------------------------------------------------------------------------------------

# The entry, or a part of one, that a `*` stands for; the entries that a `**` stands for.
_Star = str | tuple[str, ...]
_STARS = ("*", "**")
_END = "\udfff"  # of each entry in the text that is matched; a lone surrogate, which no text has


class Glob:
    """A glob, as a regex over the texts of entries, each with its end marked, so that `*` crosses none.

    >>> Glob("layers.*.**").match(("layers", "0", "linear", "weight"))
    ('0', ('linear', 'weight'))
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.entries = split_path(text)
        self.stars = [token for entry in self.entries for token in _tokens(entry) if token in _STARS]
        self._regex = re.compile("".join(map(_pattern, self.entries)), re.DOTALL)

    def match(self, entries: Sequence[str]) -> tuple[_Star, ...] | None:
        """Returns the stars if the glob matches these entries, otherwise `None`."""
        marked = _with_ends(entries)
        found = self._regex.fullmatch(marked)
        if found is None:
            return None
        stars = list[_Star]()
        for number, star in enumerate(self.stars, start=1):
            at, text = marked.count(_END, 0, found.start(number)), found[number]
            if star == "**":
                stars.append(tuple(entries[at : at + text.count(_END)]))
                continue
            whole = unquote(entries[at])
            is_foreign = whole == entries[at] != quote(whole)  # a name of another program, which stays without quotes
            stars.append(entries[at] if text == whole else text if is_foreign else quote(text))
        return tuple(stars)

    def selects(self, entries: Sequence[str]) -> bool:
        """Returns whether the glob matches these entries or a node above them.

        >>> globs = ("**.weight", "layers", "layers.*.0")
        >>> [Glob(glob).selects(("layers", "0", "weight")) for glob in globs]
        [True, True, False]
        """
        return self._regex.match(_with_ends(entries)) is not None

    def filled(self, stars: Sequence[_Star]) -> str:
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
            entries += [_one_entry(each) for each in pieces if each]
        return join_path(entries)


def _with_ends(entries: Iterable[str]) -> str:
    return "".join([unquote(entry) + _END for entry in entries])


def _one_entry(pieces: Sequence[str]) -> str:
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


@functools.lru_cache(maxsize=4096)
def _pattern(entry: str) -> str:
    """Returns the regex of one entry of a glob; each star is a group."""
    if entry == "**":
        return f"((?:[^{_END}]*{_END})*)"
    if unquote(entry) != entry:  # quoted; also where it need not be
        return re.escape(unquote(entry)) + _END
    # Of a translated `?` or `[..]` only what stands between `(?s:` and `)\Z`.
    one = lambda token: f"(?!{_END}){fnmatch.translate(token)[4:-3]}"
    return "".join([f"([^{_END}]*)" if token == "*" else one(token) for token in _tokens(entry)]) + _END
