"""Words that make this library's prose hard to read, per 1,000 words: `python docs/dialect.py`.

A noun that is avoided ("what is frozen" for a frozen parameter) and an actor who is left out leave these words behind.
The goals are what docstrings of Equinox 0.13.8 and Optax 0.2.8 have, whichever has more; of "you" whichever has less.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
GOALS = {"what": 0.3, "of its own": 0.1, "by itself": 0.0, "stands?": 0.0, "you": 1.9}
_AS_IS = re.compile(r"^ *```(?s:.*?)^ *```$|^ *>>>.*(?:\n(?! *$).*)*|`[^`]*`|\]\([^)]*\)", re.MULTILINE)
_IN_CODE = re.compile(r'"""(?s:.*?)"""|# .*|figures\.show\((?s:.*?)\n\)')


def counted(texts: Iterable[str]) -> dict[str, float]:
    """How often each of the words comes in 1,000; code, names and addresses are left out."""
    prose = "\n".join(_AS_IS.sub(" ", text) for text in texts)
    total = len(re.findall(r"[A-Za-z']+", prose))
    return {word: 1000 * len(re.findall(rf"\b{word}\b", prose, re.IGNORECASE)) / total for word in GOALS}


def docstrings(folder: Path = ROOT / "treeparams") -> Iterator[str]:
    """Of all modules, classes and functions of a package."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield ast.get_docstring(node) or ""


def pages() -> Iterator[str]:
    """Of the site."""
    for path in sorted((ROOT / "docs" / "pages").rglob("*.md")):
        yield path.read_text()


def readme() -> Iterator[str]:
    """The README."""
    yield (ROOT / "README.md").read_text()


def notebooks() -> Iterator[str]:
    """The notebooks: their text, and docstrings, comments and alternative texts in their code."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            yield source if cell["cell_type"] == "markdown" else "\n".join(_IN_CODE.findall(source))


def main() -> None:
    """Prints a table."""
    print(f"{'':12}", *(f"{word:>10}" for word in GOALS))
    kinds = {"docstrings": docstrings(), "pages": pages(), "notebooks": notebooks(), "readme": readme()}
    for name, texts in kinds.items():
        print(f"{name:12}", *(f"{count:10.2f}" for count in counted(texts).values()))
    print(f"{'goal':12}", *(f"{count:10.2f}" for count in GOALS.values()))


if __name__ == "__main__":
    main()
