"""Key paths as text and back, and the nearest path to a misspelt one.

A *path* identifies a node or leaf in a pytree, with one entry per key and dots between them: `layers.0.weight`. The
root is the empty text. An entry that would be misread - it is empty, or holds a dot, a quote or a glob character, or
starts with `!` - is written as a JSON string: `"a.b".weight`. So text splits back into entries without the model.
"""

import difflib
import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax.tree_util import GetAttrKey, SequenceKey

_NEEDS_QUOTES = re.compile(r"""^!|[.*?\[\]"']""")
# One entry: a JSON string or a run of anything but a dot; a glob's `[...]` may hold a dot.
_ENTRY = re.compile(r'"(?:[^"\\]|\\.)*"|(?!")(?:\[[^\]]*\]|[^.])*')


@functools.lru_cache(maxsize=65536)
def quote(text: str) -> str:
    """Returns `text` as one entry of a path: bare if that can be read back, otherwise as a JSON string.

    >>> quote("weight"), quote("a.b"), quote("")
    ('weight', '"a.b"', '""')
    """
    return _json(text) if not text or _NEEDS_QUOTES.search(text) else text


def unquote(entry: str) -> str:
    """Returns the text that `quote` wrote."""
    return json.loads(entry) if _is_quoted(entry) else entry


def split_path(path: str) -> tuple[str, ...]:
    """Splits a path or glob into its entries, still quoted where they were.

    >>> split_path('layers.0."a.b"')
    ('layers', '0', '"a.b"')
    >>> split_path("")
    ()
    """
    if not path:
        return ()
    entries, at = [], 0
    while True:
        match = _ENTRY.match(path, at)
        if match is None or not _is_readable(match.group()):
            raise ValueError(f"the path {path!r} cannot be read at {path[at:]!r}: expected a JSON string")
        entries.append(match.group())
        at = match.end()
        if at == len(path):
            return tuple(entries)
        if path[at] != ".":
            raise ValueError(f"the path {path!r} cannot be read at {path[at:]!r}: expected a dot or the end")
        at += 1


def _is_readable(entry: str) -> bool:
    try:
        unquote(entry)
    except json.JSONDecodeError:
        return False
    return True


def join_path(entries: Iterable[str]) -> str:
    """Joins entries into a path; the inverse of `split_path`."""
    return ".".join(entries)


def key_text(key: object) -> str:
    """Returns the bare text of one JAX key entry: an attribute's name, a dict's key, a position."""
    for attribute in ("name", "key", "idx"):
        value = getattr(key, attribute, None)
        if value is not None:
            return str(value)
    return str(getattr(key, "key", key))


def key_entries(keys: Iterable[object]) -> tuple[str, ...]:
    """Returns the entries of a JAX key path, for keys whose siblings need not be checked."""
    return tuple([quote(key_text(key)) for key in keys])


def sibling_entries(keys: Sequence[Any], above: Sequence[str] = ()) -> Sequence[str]:
    """Returns the entries of all children of one node; raises an error if two have the same text.

    With the same text, a path would name two leaves.
    """
    entries = [
        key.name if type(key) is GetAttrKey else str(key.idx) if type(key) is SequenceKey else quote(key_text(key))
        for key in keys
    ]
    if len(set(entries)) < len(entries):
        known = dict(zip(entries, keys, strict=True))
        entry, one = next((entry, key) for entry, key in zip(entries, keys, strict=True) if key is not known[entry])
        where = f"the node at {join_path(above)!r}" if above else "the root"
        raise ValueError(
            f"the keys {one} and {known[entry]} of {where} have the same text in a path, {entry!r}; rename one, so "
            "that each path names one leaf"
        )
    return entries


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_quoted(entry: str) -> bool:
    return len(entry) >= 2 and entry[0] == '"' == entry[-1]


def nearest(path: str, known: Iterable[str], count: int = 3) -> str:
    """Returns the known paths most like `path`, as the end of an error message; empty if there are none.

    >>> nearest("layer.0.weight", ["layers.0.weight", "head.bias"], count=1)
    "; nearest: 'layers.0.weight'"
    """
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(path, known, n=count, cutoff=0.3) or known[:count]
    return f"; nearest: {', '.join(map(repr, close))}" if close else ""
