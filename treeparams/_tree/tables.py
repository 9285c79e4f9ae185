"""Tables as text and as HTML, for terminals and notebooks."""

import html
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from .text import in_columns, in_one_line, without_middle


class Table(NamedTuple):
    """Rows of text below a header; the columns in `right` are aligned to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()


def as_text(blocks: Sequence[Table | str]) -> str:
    """Formats tables with aligned columns, and lines of text.

    >>> print(as_text([Table(["path", "size"], [["a", "10"]], right=[1]), "", "10 elements"]))
    path  size
    a       10
    <BLANKLINE>
    10 elements
    """
    lines = [[block] if isinstance(block, str) else in_columns(*block) for block in blocks]
    return "\n".join(itertools.chain.from_iterable(lines))


def as_html(blocks: Sequence[Table | str]) -> str:
    """Formats tables and lines of text for a notebook.

    >>> as_html(["10 elements"])
    '<div style="text-align:left"><p style="font-family:monospace">10 elements</p></div>'
    """
    # Every cell says for itself how it looks: nbconvert, Colab and GitHub keep different parts of a style sheet, and
    # show a bare `<pre>` in a proportional font or not at all.
    parts = []
    for is_text, group in itertools.groupby(blocks, lambda block: isinstance(block, str)):
        if is_text:
            text = "<br>".join(html.escape(line) for line in group if isinstance(line, str) and line)
            parts += [f'<p style="font-family:monospace">{text}</p>'] if text else []
        else:
            parts += [_table(block) for block in group if isinstance(block, Table)]
    return f'<div style="text-align:left">{"".join(parts)}</div>'


def _table(table: Table) -> str:
    rows = [("th", table.header), *(("td", row) for row in without_middle(table.rows, len(table.header)))]
    lines = ["".join(_cell(tag, i in table.right, cell) for i, cell in enumerate(row)) for tag, row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{body}</table>"


def _cell(tag: str, is_right: bool, cell: str) -> str:
    side = "right" if is_right else "left"
    style = f"text-align:{side};font-family:monospace;white-space:pre"
    return f'<{tag} style="{style}">{html.escape(in_one_line(cell))}</{tag}>'
