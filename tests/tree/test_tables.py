"""What prints as a table is an HTML table in a notebook, with the same cells."""

import html
import re

import jax.numpy as jnp
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from ..zoo import ramp

MODEL = {"<a>": ramp(2, 3), "b": {"long name": ramp(1)}, "n": jnp.tanh}


@pytest.mark.parametrize(
    "make",
    [
        tp.layout,
        tp.summary,
        lambda model: tp.diff(model, {**model, "b": 3}),
        lambda model: optim.report(optim.trainable(optax.sgd(0.1)), model),
        lambda model: saving.plan(model, model),
    ],
    ids=["layout", "summary", "diff", "report", "plan"],
)
def test_a_table_in_a_notebook_has_the_cells_of_the_text(make):
    shown = make(MODEL)
    lines, page = [line for line in str(shown).splitlines() if line], shown._repr_html_()
    found = [re.findall("<t[hd][^>]*>([^<]+)</t", row) for row in page.split("<tr>")[1:]]
    rows = [[html.unescape(cell) for cell in row] for row in found]
    below = [line for each in re.findall("<p[^>]*>(.*?)</p>", page) for line in html.unescape(each).split("<br>")]
    assert len(rows) > 1
    is_row = [re.split("  +", line.strip()) in rows for line in lines]
    assert sum(is_row) == len(rows)
    assert below == [line for line, yes in zip(lines, is_row, strict=True) if not yes]
    assert "font-family:monospace" in page
    assert "<pre>" not in page
