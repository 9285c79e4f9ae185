"""What the site takes from elsewhere: the README as home page, notebooks as pages; and links to the API.

Names of the library in backticks become links to their entries, in pages and in docstrings.
"""

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGES = {
    "tp": "treeparams",
    "treeparams": "treeparams",
    "optim": "treeparams.optim",
    "nested": "treeparams.nested",
    "matrices": "treeparams.matrices",
    "saving": "treeparams.saving",
    "sharding": "treeparams.sharding",
    "plot": "treeparams.plot",
}
_NAME = re.compile(r"(?<![\[`])`(tp|treeparams|optim|nested|sharding|plot)\.(\w+)(?:\([^`]*\))?`(?![\]`])")
_ENTRY = re.compile(r"^::: (\S+)", re.MULTILINE)


def on_config(config: Any) -> None:
    """Adds the notebooks that there are to the navigation."""
    pages = [f"notebooks/{path.stem}.md" for path in _notebooks()]
    if pages:
        config.nav.insert(2, {"Notebooks": pages})


def on_files(files: Any, config: Any) -> None:
    """Adds a page for each notebook."""
    for path in _notebooks():
        text = "\n\n".join(_cells(json.loads(path.read_text())))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Puts the README into the home page, and links into all."""
    if page.file.src_uri == "index.md":
        markdown = markdown.replace("{README}", (ROOT / "README.md").read_text())
    return _linked(re.sub(r"(?<=\w)\.ipynb\)", ".md)", markdown))


class Examples(griffe.Extension):
    """Shows the examples of a docstring as code, wherever they stand in it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites one docstring."""
        if obj.docstring:
            obj.docstring.value = _typed(_linked(_fenced(obj.docstring.value)), getattr(obj, "returns", None))


class Runtime(griffe.Extension):
    """Shows what runs, where type checkers are told something else."""

    def on_module_node(self, *, node: Any, **_: Any) -> None:
        """Leaves out what stands under `if TYPE_CHECKING:` with an `else:`."""
        node.body[:] = [each for statement in node.body for each in _that_runs(statement)]


def _that_runs(statement: ast.stmt) -> list[ast.stmt]:
    is_both = isinstance(statement, ast.If) and statement.orelse and ast.unparse(statement.test) == "TYPE_CHECKING"
    return statement.orelse if is_both else [statement]


def _notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"), key=lambda path: (path.stem != "tour", path.stem))


def _cells(notebook: dict[str, Any]) -> Iterator[str]:
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and text:
            yield f"```python\n{text}\n```"
            yield from filter(None, map(_output, cell["outputs"]))
        elif cell["cell_type"] == "markdown":
            yield text


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).replace(chr(10), "")}">'
    shown = data.get("text/plain", "") if output.get("name") != "stderr" else ""
    text = "".join(output["text"] if output.get("name") == "stdout" else shown).rstrip()
    return f"```\n{text}\n```" if text else ""


@functools.cache
def _known() -> frozenset[str]:
    pages = (HERE / "pages" / "api").glob("*.md")
    return frozenset(name for page in pages for name in _ENTRY.findall(page.read_text()))


def _linked(text: str) -> str:
    def link(found: re.Match[str]) -> str:
        name = f"{PACKAGES[found[1]]}.{found[2]}"
        return f"[{found[0]}][{name}]" if name in _known() else found[0]

    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if i % 2 else _NAME.sub(link, part) for i, part in enumerate(parts))


def _typed(text: str, returns: Any) -> str:
    """With the type of what is returned, or a colon in its first sentence would be taken for the end of one."""
    return re.sub(r"^(Returns:\n +)", rf"\g<1>{returns}: ", text, flags=re.MULTILINE) if returns else text


def _fenced(text: str) -> str:
    """Doctests in fences: each from `>>>` to the next blank line."""
    return re.sub(r"^( *)(>>> .*?)(?=\n\s*\n|\s*\Z)", r"\1```pycon\n\1\2\n\1```", text, flags=re.MULTILINE | re.DOTALL)
