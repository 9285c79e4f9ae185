"""The README does what it says."""

import pathlib

import jax
import pytest

from .blocks import run

README = pathlib.Path(__file__).parent.parent / "README.md"


@pytest.mark.usefixtures("standard_promotion")
def test_the_code_runs_and_prints_what_is_shown():
    namespace, blocks = run(README)
    assert all(block.shown for block in blocks)
    model, vector = namespace["auto"], namespace["vector"]
    assert (model.decoder == model.encoder.T).all()
    assert jax.tree.leaves(namespace["restructure"](vector))[0].tolist() == model.encoder.tolist()
    assert vector.shape == (9,)


def test_it_is_short():
    assert len(README.read_text().split()) < 500
