"""Pages whose code is run: each block of Python, in one namespace, and what a plain block below it says it prints."""

import contextlib
import io
import pathlib
import re
import sys
from typing import Any, NamedTuple

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of Python on a page."""

    line: int  # of its first line of code
    code: str
    shown: str  # what the page says it prints; empty where no plain block follows


def blocks(text: str) -> list[Block]:
    """The blocks of Python on a page; a plain block directly after one, with nothing between, is its output."""
    fences, found = list(_FENCE.finditer(text)), []
    for fence, after in zip(fences, [*fences, None][1:], strict=True):
        if fence[1] != "python":
            continue
        follows = after is not None and not after[1] and not text[fence.end() : after.start()].strip()
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(line, fence[2], after[2] if follows else ""))
    return found


def run(page: pathlib.Path, namespace: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[Block]]:
    """Runs all blocks of a page in order; returns the names that they made, and the blocks.

    Raises:
        AssertionError: a block prints something else than is shown.
    """
    namespace = {"__name__": page.stem} if namespace is None else namespace
    found = blocks(page.read_text())
    for block in found:
        # Blank lines before it, so that a traceback has the line of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        assert printed.getvalue() == block.shown, f"{page.name}, line {block.line}"
    return namespace, found


def module(text: str) -> str:
    """All blocks of a page as one module for type checkers, each line at the number that it has on the page."""
    lines = ["# pyright: standard"]  # code on a page need not say the types of all parameters
    for block in blocks(text):
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join([*lines, ""])


if __name__ == "__main__":  # python -m tests.blocks PAGE > MODULE
    print(module(pathlib.Path(sys.argv[1]).read_text()), end="")
