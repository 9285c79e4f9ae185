"""The notebooks as they are committed: run from top to bottom, with pictures, and nothing of the machine in them.

That they run is tested by running them: `pytest --nbmake notebooks`, as `.ci/run` does.
"""

import json
import pathlib
import re

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SCREEN = 40  # lines of code in a cell


def test_all_are_there():
    names = [path.stem for path in NOTEBOOKS]
    assert names == ["derivatives_in_losses", "flat_methods", "global_norm_clipping", "target_networks", "tour"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def cells(request):
    return json.loads(request.param.read_text())["cells"]


def _code(cells):
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_it_ran_once_from_top_to_bottom_without_a_word_on_stderr(cells):
    assert [cell["execution_count"] for cell in _code(cells)] == list(range(1, len(_code(cells)) + 1))
    outputs = [output for cell in _code(cells) for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}


def test_it_shows_pictures_and_asserts_what_it_claims(cells):
    kinds = [kind for cell in _code(cells) for output in cell["outputs"] for kind in output.get("data", {})]
    assert kinds.count("image/png") >= 2
    assert sum("assert" in line for cell in _code(cells) for line in cell["source"]) >= 8


def test_no_cell_is_longer_than_a_screen_and_each_picture_has_words_beside_it(cells):
    for cell in _code(cells):
        assert len(cell["source"]) <= SCREEN, cell["source"][0]
    for before, cell, after in zip([None, *cells], cells, [*cells[1:], None], strict=False):
        if cell["cell_type"] == "code" and any("image/png" in output.get("data", {}) for output in cell["outputs"]):
            assert "markdown" in {near["cell_type"] for near in (before, after) if near}


def test_nothing_of_the_machine_is_in_it(cells):
    assert re.findall(r"/(?:home|root|tmp|usr|Users)/|0x[0-9a-f]{8,}", json.dumps(cells)) == []
