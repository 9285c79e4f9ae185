"""Figures of the code: `python -m tests.house` prints them, and fails where one is past its limit.

Lines of code are lines with a token that is neither docstring nor comment. A name passes between files if one file of
the package imports it from another; what an `__init__` imports is what its folder offers, and is left out. A limit is
what the figure was when it was last changed. Those of the whole only fall; a part may take the room that another gives.
"""

import ast
import collections
import io
import pathlib
import sys
import tokenize

PACKAGE = pathlib.Path("treeparams")
FOLDERS = ("optim", "saving", "_files", "sharding", "nested", "matrices")
LIMITS = {
    "lines of code, core": 6000,
    "lines of code, _files": 714,
    "lines of code, matrices": 768,
    "lines of code, nested": 683,
    "lines of code, optim": 2195,
    "lines of code, saving": 1886,
    "lines of code, sharding": 1217,
    "lines of code": 13463,
    "files": 83,
    "lines of the longest file": 581,
    "names between files": 287,
    "names with one reader": 66,
    "names defined in several files": 6,
}
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """Returns how many lines hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = [range(token.start[0], token.end[0] + 1) for token in tokens if token.type not in _NO_CODE]
    return len({line for span in spans for line in span} - docstrings)


def names_read(path: pathlib.Path, modules: set[str]) -> set[tuple[str, str]]:
    """Returns the names that a file imports from others, each after the module that it is in."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = ".".join([*path.parts[: len(path.parts) - node.level], *(node.module or "").split(".")]).strip(".")
            names = [alias.name for alias in node.names if f"{module}.{alias.name}" not in modules]
            found |= {(module, name) for name in names if module in modules}
    return found


def figures() -> dict[str, int]:
    """Returns the figures by name."""
    files = sorted(PACKAGE.rglob("*.py"))
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files}
    lines, readers, places = (
        collections.Counter[str](),
        collections.Counter[tuple[str, str]](),
        collections.Counter[str](),
    )
    for path in files:
        lines[path.parts[1] if path.parts[1] in FOLDERS else "core"] += lines_of_code(path.read_text())
        body = ast.parse(path.read_text()).body
        places.update({node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))})
        if path.name != "__init__.py":
            readers.update(names_read(path, modules))
    return {
        **{f"lines of code, {part}": count for part, count in lines.items()},
        "lines of code": lines.total(),
        "files": len(files),
        "lines of the longest file": max(path.read_text().count("\n") for path in files),
        "names between files": len(readers),
        "names with one reader": sum(count == 1 for count in readers.values()),
        "names defined in several files": sum(count > 1 for count in places.values()),
    }


if __name__ == "__main__":
    found = figures()
    for name, figure in found.items():
        print(f"{name:31} {figure:6}, at most {LIMITS[name]:6}{'  <-- past its limit' * (figure > LIMITS[name])}")
    sys.exit(any(figure > LIMITS[name] for name, figure in found.items()))
