"""Notebooks as pages: their text, code and outputs, with pictures as files beside the page."""

import base64
import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

REPOSITORY = "treeparams/treeparams/blob/main/notebooks"
COLAB = f"https://colab.research.google.com/github/{REPOSITORY}"
FOLD = "hide-input"  # a tag that folds the code of a cell, also in Jupyter Book


def write(notebook: Path, folder: Path) -> str:
    """Writes the pictures of a notebook and a copy of it into a folder; returns its page."""
    written = json.loads(notebook.read_text())
    cells = written["cells"]
    (folder / notebook.name).write_bytes(notebook.read_bytes())
    title, *rest = [part for i, cell in enumerate(cells, 1) for part in _cell(cell, folder / f"{notebook.stem}-{i}")]
    heading, _, lead = title.partition("\n")
    buttons = (
        f"[Open in Colab]({COLAB}/{notebook.name}){{ .md-button }}\n"
        f'<a class="md-button" href="{notebook.name}" download>Download the notebook</a>'
    )
    page = "\n\n".join([heading, buttons, lead.strip(), *rest])
    head = {
        "description": written["metadata"]["description"],
        "source": f"https://github.com/{REPOSITORY}/{notebook.name}",
    }
    if picture := re.search(r'<img class="figure.*?" src="(.*?)"', page):
        head["image"] = f"notebooks/{picture[1]}"
    return "\n".join(["---", *(f"{key}: {value}" for key, value in head.items()), "---", "", page])


def _cell(cell: dict[str, Any], picture: Path) -> Iterator[str]:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield text
    elif text:
        code = f"```python\n{text}\n```"
        yield _folded(code) if FOLD in cell["metadata"].get("tags", ()) else code
        kind = "figure map" if re.search(r"\b(imshow|pcolormesh|contourf)\(", text) else "figure"
        for i, output in enumerate(cell["outputs"]):
            yield from filter(None, [_output(output, kind, picture.with_suffix(f".{i}.png"))])


def _folded(code: str) -> str:
    return f'<details markdown="1">\n<summary>Code of the figure</summary>\n\n{code}\n\n</details>'


def _output(output: dict[str, Any], kind: str, picture: Path) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        picture.write_bytes(base64.b64decode("".join(data["image/png"])))
        about = output["metadata"].get("image/png", {})
        size = f' width="{about["width"]}"' if "width" in about else ""  # for screens of twice the resolution
        return f'<img class="{kind}" src="{picture.name}" alt="{escape(about.get("alt", ""))}"{size}>'
    if "text/markdown" in data:
        return "".join(data["text/markdown"])
    shown = data.get("text/plain", "") if output.get("name") != "stderr" else ""
    text = "".join(output["text"] if output.get("name") == "stdout" else shown).rstrip()
    return f"```text\n{text}\n```" if text else ""
