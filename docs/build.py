"""Builds the site: python docs/build.py FOLDER.

Pages are made first (notebooks, benchmarks, the table of the API), in a temporary folder beside a copy of those that
are written by hand. Zensical builds the site of them. Any warning fails the build, and so does a link that leads
nowhere.
"""

import json
import logging
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import benchmark_pages
from checked import dead_links
from docstrings import with_contents
from latex2mathml.converter import convert
from mkdocstrings import Inventory
from names import at_a_glance, elsewhere, linked
from notebook_pages import write
from zensical.main import cli

HERE = Path(__file__).parent
ROOT = HERE.parent


def main(site: Path) -> None:
    """Builds the site into a folder, which is replaced if it is a site; exits with what it was warned of."""
    if site.exists() and any(site.iterdir()) and not (site / "sitemap.xml").exists():
        sys.exit(f"{site} is neither empty nor a site, and is left alone")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        warned = _Warned()
        logging.getLogger().addHandler(warned)
        _pages(work / "pages")
        (work / "site.yml").write_text(json.dumps(_configuration(work)))  # JSON is YAML
        try:
            cli(["build", "--strict", "--clean", "--config-file", str(work / "site.yml")], standalone_mode=False)
        except RuntimeError as error:  # it has printed what it found
            warned.messages.append(str(error))
        for page in (work / "site").rglob("*.html"):
            page.write_text(_with_formulas(page.read_text()))
        warned.messages += dead_links(work / "site")
        if warned.messages:
            sys.exit("\n".join([*warned.messages, f"{len(warned.messages)} warnings"]))
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(work / "site", site)


class _Warned(logging.Handler):
    """What is logged as a warning or worse: Zensical's --strict looks at links alone, not at docstrings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _pages(folder: Path) -> None:
    shutil.copytree(HERE / "pages", folder)
    (folder / "notebooks").mkdir()
    for notebook in _notebooks():
        (folder / "notebooks" / f"{notebook.stem}.md").write_text(write(notebook, folder / "notebooks"))
    (folder / "notebooks" / "index.md").write_text(_overview(folder / "notebooks"))
    (folder / "benchmarks").mkdir()
    for name, text in _benchmarks():
        (folder / "benchmarks" / name).write_text(text)
    for page in folder.rglob("*.md"):
        text = page.read_text()
        if page.parent.name == "api":
            text = at_a_glance(text) if page.name == "index.md" else with_contents(text)
        text = re.sub(
            r"\{FIGURE (\w+)\}",
            lambda found: _first_figure(folder / "notebooks" / f"{found[1]}.md", "notebooks/"),
            text,
        )
        page.write_text(linked(re.sub(r"(?<=\w)\.ipynb\)", ".md)", text)))


def _overview(folder: Path) -> str:
    """The page of all notebooks, with the first figure of each."""
    source = "https://github.com/treeparams/treeparams/tree/main/notebooks"
    description = "All notebooks of treeparams, with a figure and a sentence for each."
    rows = ["---", f"description: {description}", f"source: {source}", "---", "", "# Notebooks", ""]
    rows += ["| | |", "|---|---|"]
    for page in (folder / f"{notebook.stem}.md" for notebook in _notebooks()):
        title = re.search("^# (.*)$", page.read_text(), re.MULTILINE)
        assert title, page
        picture = re.sub(r' width="\d+"', "", _first_figure(page)).replace("|", "&#124;")
        picture = picture.replace("<img", '<img width="240"')
        rows.append(f"| {picture} | [{title[1]}]({page.name})<br>{_description(page)} |")
    return "\n".join(rows) + "\n"


def _first_figure(page: Path, folder: str = "") -> str:
    """That of a notebook, for a page that has the notebooks in this folder."""
    found = re.search('<img class="figure.*?>', page.read_text())
    if not found:
        logging.warning("%s has no picture", page.name)
        return ""
    return found[0].replace('src="', f'src="{folder}')


def _notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"), key=lambda path: (path.stem != "tour", path.stem))


def _benchmarks() -> list[tuple[str, str]]:
    return list(benchmark_pages.pages(*((ROOT / "benchmarks" / name).read_text() for name in ("RESULTS.md", "GPU.md"))))


def _configuration(work: Path) -> dict[str, Any]:
    project = tomllib.loads((HERE / "zensical.toml").read_text())["project"]
    for section in project["nav"]:
        if "Notebooks" in section:
            section["Notebooks"] += ["notebooks/index.md", *(f"notebooks/{path.stem}.md" for path in _notebooks())]
        if "Benchmarks" in section:
            section["Benchmarks"] += [f"benchmarks/{name}" for name, _ in _benchmarks()]
    project["theme"]["custom_dir"] = str(HERE / "theme")
    project["plugins"]["llmstxt"]["sections"] = {
        title: [{page: _description(work / "pages" / page)} for page in pages]
        for title, pages in _sections(project["nav"])
    }
    python = project["plugins"]["mkdocstrings"]["handlers"]["python"]
    python["paths"] = [str(ROOT)]
    python["inventories"] = [{"url": path.as_uri(), "base_url": url} for url, path in _inventories(work).items()]
    return project | {"docs_dir": "pages", "site_dir": "site"}


def _sections(nav: list[Any], title: str = "") -> Iterator[tuple[str, list[str]]]:
    """The sections of the navigation that have pages, each with its title and its pages, however deep they lie."""
    if pages := [each for each in nav if isinstance(each, str)]:
        yield title, pages
    for each in nav:
        if not isinstance(each, str):
            for name, below in each.items():
                yield from _sections(below, name)


def _description(page: Path) -> str:
    found = re.match(r"---\ndescription: (.*)\n", page.read_text())
    assert found, f"{page} has no description"
    return found[1]


def _inventories(work: Path) -> dict[str, Path]:
    """The table of names that are documented elsewhere, for each project as the file that mkdocstrings reads."""
    inventories: dict[str, Inventory] = {}
    for url, name, page in elsewhere():
        inventories.setdefault(url, Inventory()).register(name=name, domain="py", role="obj", uri=page)
    files = {url: work / f"{i}.inv" for i, url in enumerate(inventories)}
    for url, inventory in inventories.items():
        files[url].write_bytes(inventory.format_sphinx())
    return files


def _with_formulas(page: str) -> str:
    """Formulas as MathML, which browsers draw by themselves: nothing to load, also from a folder without a network."""

    def drawn(found: re.Match[str]) -> str:
        return convert(unescape(found[2]), display="inline" if found[1] == "span" else "block")

    return re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', drawn, page, flags=re.DOTALL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
