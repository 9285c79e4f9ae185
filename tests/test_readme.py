"""The README does what it says."""

import contextlib
import io
import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"


@pytest.mark.usefixtures("standard_promotion")
def test_the_code_runs_and_prints_what_is_shown():
    blocks = re.findall(r"```(\w*)\n(.*?)```", README.read_text(), re.S)
    code = [text for language, text in blocks if language == "python"]
    shown = [text for language, text in blocks if language == ""]
    assert (len(code), len(shown)) == (2, 1)
    namespace = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in code:
            exec(block, namespace)
    assert printed.getvalue() == shown[0]
    assert namespace["vector"].shape == (6,)
    assert (namespace["model"].head == namespace["model"].embed.T).all()


def test_it_is_short():
    assert len(README.read_text().split()) < 500
