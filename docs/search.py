"""Ranks the pages of the site for a query, as a search over titles and text does: python docs/search.py WORDS.

Each section is a document. Its score is that of BM25 (Robertson and Zaragoza, 2009), in which a word in its title
counts `_TITLE` times and in the title of its page `_PAGE` times; a page has the score of its best section. A word of
the query matches each word that begins with it. The tables of contents are left out, since they lead to pages.
"""

import collections
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGES = Path(__file__).parent / "pages"
_TITLE, _PAGE = 8, 4
_SATURATION, _LENGTH = 1.2, 0.75  # of BM25
_COMMON = {
    "a",
    "and",
    "do",
    "for",
    "from",
    "has",
    "how",
    "i",
    "in",
    "is",
    "it",
    "my",
    "of",
    "the",
    "to",
    "what",
    "with",
}


def ranked(query: str) -> list[str]:
    """Returns the paths of the pages in which a word of the query occurs, best first."""
    words = [word for word in _words(query) if word not in _COMMON]
    sections = [(page, counts) for page in _paths() for counts in _sections(PAGES / page)]
    mean = sum(counts.total() for _, counts in sections) / len(sections)
    best = collections.Counter[str]()
    for word in words:
        found = [sum(count for each, count in counts.items() if each.startswith(word)) for _, counts in sections]
        rarity = math.log(1 + len(sections) / (0.5 + sum(map(bool, found))))
        for i, count in enumerate(found):
            length = _SATURATION * (1 - _LENGTH + _LENGTH * sections[i][1].total() / mean)
            best[i] += rarity * count / (count + length)
    scores = collections.Counter[str]()
    for i, score in best.items():
        scores[sections[i][0]] = max(scores[sections[i][0]], score)
    return [page for page, score in scores.most_common() if score > 0]


def _paths() -> list[str]:
    """Returns the pages written by hand, but for tables of contents and the reference, whose text is in the code."""
    paths = (str(path.relative_to(PAGES)) for path in sorted(PAGES.rglob("*.md")))
    return [path for path in paths if not path.startswith("api/") and path != "how-to/index.md"]


def _sections(path: Path) -> Iterator[collections.Counter[str]]:
    """Yields how often each word counts in each section of a page."""
    text = path.read_text()
    description = re.search(r"^description: (.*)$", text, re.M)
    _, *sections = re.split(r"^#{1,3} (?=\S.*$)", re.sub(r"^```.*?^```$", _code, text, flags=re.M | re.S), flags=re.M)
    page = sections[0].partition("\n")[0]
    for i, section in enumerate(sections):
        title, _, body = section.partition("\n")
        counts = collections.Counter(_words(body + (description[1] if description and i == 0 else "")))
        for word in _words(title):
            counts[word] += _TITLE
        for word in _words(page):
            counts[word] += _PAGE
        yield counts


def _code(block: re.Match[str]) -> str:
    return re.sub(r"^#", "", block[0], flags=re.M)  # a comment is no title


def _words(text: str) -> list[str]:
    """Returns the words of a text, without case; a plural is its singular."""
    return [word.removesuffix("s") if len(word) > 3 else word for word in re.findall(r"[a-z0-9_]+", text.lower())]


if __name__ == "__main__":
    print(*ranked(" ".join(sys.argv[1:]))[:5], sep="\n")
