"""The README does what it says."""

import pathlib

import pytest

from .blocks import run

README = pathlib.Path(__file__).parent.parent / "README.md"


@pytest.mark.usefixtures("standard_promotion")
def test_the_code_runs_and_prints_what_is_shown():
    namespace, blocks = run(README)
    assert [bool(block.shown) for block in blocks] == [True, False]
    assert namespace["vector"].shape == (6,)
    assert (namespace["model"].head == namespace["model"].embed.T).all()


def test_it_is_short():
    assert len(README.read_text().split()) < 500
