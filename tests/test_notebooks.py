"""The notebooks as committed: executed from top to bottom, with pictures, and without traces of a machine.

`pytest --nbmake notebooks` executes them, as `.ci/run` does.
"""

import base64
import json
import pathlib
import re
import struct

import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
COLAB = """import sys

if "google.colab" in sys.modules:  # on Colab: install the library, and go to its notebooks
    !git clone -q https://github.com/treeparams/treeparams /content/treeparams
    !pip install -q "/content/treeparams[notebooks]"
    %cd -q /content/treeparams/notebooks"""
FOLDED = {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": ["hide-input"]}  # Colab, JupyterLab, the site


def test_pictures_in_the_readme_are_those_of_the_notebooks():
    assert len(NOTEBOOKS) == 7
    shown = {png for path in NOTEBOOKS for cell in json.loads(path.read_text())["cells"] for png in _pictures(cell)}
    pictures = {path.name: path.read_bytes() for path in (FOLDER / "images").iterdir()}
    assert sorted(pictures) == ["layout.png", "target_networks.png"]
    assert set(pictures.values()) <= shown


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def cells(request):
    return json.loads(request.param.read_text())["cells"]


def _code(cells):
    return [cell for cell in cells if cell["cell_type"] == "code"]


def _pictures(cell):
    """As bytes, with the width at which each is shown; where none is said, it is shown as wide as it is."""
    data = [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
    widths = [each["metadata"].get("image/png", {}).get("width") for each in data]
    return {base64.b64decode(each["data"]["image/png"]): width for each, width in zip(data, widths, strict=True)}


def test_it_ran_once_from_top_to_bottom_without_a_word_on_stderr_and_asserts_what_it_claims(cells):
    assert [cell["execution_count"] for cell in _code(cells)] == list(range(1, len(_code(cells)) + 1))
    assert sum("assert" in line for cell in _code(cells) for line in cell["source"]) >= 8
    outputs = [output for cell in _code(cells) for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert re.findall(r"/(?:home|root|tmp|usr|Users)/|0x[0-9a-f]{8,}", json.dumps(cells)) == []  # of the machine


def test_it_begins_with_the_installation_on_colab_and_has_the_style_of_all(cells):
    assert "".join(_code(cells)[0]["source"]) == COLAB
    assert 'plt.style.use("figures.mplstyle")' in "".join(line for cell in _code(cells) for line in cell["source"])


def test_each_picture_has_an_alternative_text(cells):
    outputs = [output for cell in _code(cells) for output in cell["outputs"] if "image/png" in output.get("data", {})]
    texts = [output["metadata"]["image/png"]["alt"] for output in outputs]
    assert len(set(texts)) == len(texts) >= 2
    assert [alt for alt in texts if len(alt.split()) < 6] == []


def test_code_that_only_draws_is_folded_and_pictures_have_200_dots_per_inch(cells):
    for cell in cells:
        draws = "plt.subplots(" in "".join(cell["source"]) and cell["cell_type"] == "code"
        assert cell["metadata"] == (FOLDED if draws else {}), cell["id"]
        for png, width in _pictures(cell).items():
            assert abs(struct.unpack(">I", png[16:20])[0] - 2 * width) <= 1
