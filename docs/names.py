"""Links: names of this library and of others, in backticks, become links to where they are documented."""

import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PREFIXES = {
    "tp": "treeparams",
    "np": "numpy",
    "eqx": "equinox",
    "jnp": "jax.numpy",
    **{
        name: f"treeparams.{name}"
        for name in ("lax", "optim", "nested", "matrices", "saving", "sharding", "plot", "types")
    },
    **{name: f"treeparams.{name.capitalize()}" for name in ("layout", "restructure", "view", "rest")},
    **{name: f"treeparams.{name}" for name in ("Layout", "Restructure", "View", "Rest", "Ema", "Slot")},
    "Operator": "treeparams.nested.Operator",
    "state": "treeparams.types.TrainableState",
}
_NAME = re.compile(r"(?<![\[`])`([A-Za-z]\w*)((?:\.\w+)+)(?:[(\[](?:[^`\n]|\n(?!\n))*)?`(?![\]`])")
_AS_IS = re.compile(r"(^ *```.*?^ *```$|^#[^\n]*$)", re.MULTILINE | re.DOTALL)  # code and headings


def linked(text: str) -> str:
    """The text with links at the names that are documented here or elsewhere."""

    def link(found: re.Match[str]) -> str:
        name = PREFIXES.get(found[1], found[1]) + found[2]
        return f"[{found[0]}][{name}]" if name in documented() else found[0]

    return "".join(part if i % 2 else _NAME.sub(link, part) for i, part in enumerate(_AS_IS.split(text)))


def at_a_glance(text: str) -> str:
    """The text with links in its table; names there have no prefix, since each row says whose they are."""
    return re.sub(r"^\|.*\|$", lambda row: _row(row[0]), text, flags=re.MULTILINE)


def _row(row: str) -> str:
    module = re.search(r"`(treeparams\.\w+)`", row)
    inside = owner = module[1] if module else "treeparams"

    def link(found: re.Match[str]) -> str:
        nonlocal owner
        first, dot, last = found[1].partition(".")
        if dot and first:
            owner = f"{inside}.{PREFIXES.get(first, first).removeprefix('treeparams.')}"
        name = f"{owner}.{last}" if dot else f"{inside}.{first}"
        return f"[`{found[1]}`][{name}]" if name in entries() else found[0]

    return linked(re.sub(r"`([\w.]+)`", link, row))


@functools.cache
def entries() -> frozenset[str]:
    """Names with an entry on the pages of the API: functions, classes and the members of these, modules."""
    found = set()
    for page in (HERE / "pages" / "api").glob("*.md"):
        text = page.read_text()
        found.update(re.findall(r"^#.*\{ #(\S+) \}$", text, re.MULTILINE))
        for name, options in re.findall(r"^::: (\S+)\n((?: .*\n)*)", text, re.MULTILINE):
            members = re.search(r"members: \[(.*?)\]", options, re.DOTALL)
            found.update([name, *(f"{name}.{each.strip()}" for each in (members[1].split(",") if members else []))])
    return frozenset(found)


def elsewhere() -> Iterator[tuple[str, str, str]]:
    """Names that other projects document: the project's address, the name, and its page with the anchor."""
    for project in tomllib.loads((HERE / "elsewhere.toml").read_text()).values():
        for page, names in project["pages"].items():
            for name in names:
                yield project["url"], name, page.format(name) + ("" if "#" in page else f"#{name}")


@functools.cache
def documented() -> frozenset[str]:
    """Names with an entry here or elsewhere."""
    return entries() | {name for _, name, _ in elsewhere()}
