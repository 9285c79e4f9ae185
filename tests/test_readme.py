"""The README does what it says."""

import pathlib
import re

import pytest

from .blocks import run

README = pathlib.Path(__file__).parent.parent / "README.md"


@pytest.mark.usefixtures("standard_promotion")
def test_the_code_runs_and_prints_what_is_shown():
    namespace, blocks = run(README)
    assert all(block.shown for block in blocks)
    model, restructure, vector = (namespace[name] for name in ("model", "restructure", "vector"))
    assert (model.decoder == model.encoder.T).all()
    assert (model.mean == 1).all()
    assert restructure(vector).encoder.tolist() == model.encoder.tolist()


def test_it_is_short():
    text = re.sub(r"^```.*?^```$|^\[\S+\]: \S+$", "", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(re.sub(r"\]\(\S+\)", "]", text).split()) <= 600  # beside code and addresses
