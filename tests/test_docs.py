"""The pages of the site do what they say, and name all that is public."""

import collections
import importlib
import inspect
import pathlib
import re

import pytest

import treeparams as tp
from treeparams import matrices, nested, optim, saving, sharding

from .blocks import run

SITE = pathlib.Path(__file__).parent.parent / ".docs"
PAGES = {str(path.relative_to(SITE / "pages")): path for path in sorted((SITE / "pages").rglob("*.md"))}
IDIOMS = "coming-from.md"
WITH_CODE = [name for name in PAGES if not name.startswith("api/") and name != IDIOMS]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", WITH_CODE)
def test_the_code_of_a_page_runs_and_prints_what_is_shown(name):
    namespace, blocks = run(PAGES[name])
    assert blocks
    assert "tp" in namespace
    assert any(block.shown for block in blocks)


@pytest.mark.usefixtures("standard_promotion")
def test_each_line_of_the_tables_of_idioms_runs_after_its_code():
    namespace, blocks = run(PAGES[IDIOMS])
    rows = [row.split("|")[1:-1] for row in re.findall(r"^\| .*\|$", PAGES[IDIOMS].read_text(), re.MULTILINE)]
    rows = [row for row in rows if row[0].strip() != "idiom"]
    assert (len(blocks), {len(row) for row in rows}) == (1, {3})
    lines = [line for _, here, _ in rows for line in re.findall("`([^`]+)`", here)]
    assert len(lines) == len(rows) > 70
    for line in dict.fromkeys(lines):  # some are the idiom here of several elsewhere
        exec(compile(line, line, "exec"), dict(namespace))


def test_every_public_name_is_listed_once():
    entries = [
        entry
        for name, path in PAGES.items()
        if name.startswith("api/")
        for entry in re.findall(r"^::: (\S+)$", re.sub("<!--.*?-->", "", path.read_text(), flags=re.DOTALL), re.M)
    ]
    listed = collections.defaultdict(list)
    for entry in entries:
        module, _, name = entry.rpartition(".")
        assert hasattr(importlib.import_module(module), name), entry
        listed[module].append(name)
    for module in (tp, optim, nested, matrices, saving, sharding):
        public = [name for name, value in vars(module).items() if name[0] != "_" and not inspect.ismodule(value)]
        assert sorted(listed[module.__name__]) == sorted(public)
