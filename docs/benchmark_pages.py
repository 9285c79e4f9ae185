"""Benchmarks as pages: what is claimed and found on a CPU, the tables behind that, and those of a GPU."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

REPOSITORY = "https://github.com/treeparams/treeparams/blob/main/benchmarks"
_CLAIM = re.compile(r"^\| (\w+) +\| *(\S.*?) +\| *(\S.*?) +\| *(met|unclear|\*\*missed\*\*) \|$", re.MULTILINE)


def pages(results: str, gpu: str) -> Iterator[tuple[str, str]]:
    """The name and the text of each page, from `RESULTS.md` and `GPU.md`."""
    first, tables = results.split("\n# Tables\n")
    lead, claimed = first.split("\n### What is claimed\n")
    lead = lead.partition("\n")[2].strip().replace("GPU.md", "[Benchmarks on a GPU](gpu.md)")
    yield (
        "index.md",
        _page(
            "Benchmarks: claims and results",
            "Speed and memory that treeparams claims, measured on a CPU beside Optax and Equinox, with all misses.",
            "RESULTS.md",
            _claims(lead, _CLAIM.findall(claimed)),
        ),
    )
    yield (
        "tables.md",
        _page(
            "Benchmarks: all tables",
            "All tables of the benchmarks of treeparams on a CPU, and of programs that are compiled for TPUs.",
            "RESULTS.md",
            tables,
        ),
    )
    yield (
        "gpu.md",
        _page(
            "Benchmarks on a GPU",
            "Run time, compile time and memory of trees, vectors and stacks of parameters on an NVIDIA H100.",
            "GPU.md",
            gpu.partition("\n")[2].replace("\n# Tables\n", "\n## How to read the tables\n"),
        ),
    )


def _page(title: str, description: str, source: str, text: str) -> str:
    """Searches leave such a page out: it has most numbers and names of the site, and answers few questions."""
    head = f"description: {description}\nsource: {REPOSITORY}/{source}\nsearch:\n  exclude: true"
    return f"---\n{head}\n---\n\n# {title}\n\n{text.strip()}\n"


def _claims(lead: str, found: list[tuple[str, str, str, str]]) -> str:
    counts = Counter(verdict.strip("*") for *_, verdict in found)
    parts = [f"**{counts['met']} of {len(found)} claims are met, {counts['missed']} are missed.**", lead]
    for subject, rows in groupby(found, lambda each: each[0]):
        lines = [f"| {claim} | {result} | {verdict} |" for _, claim, result, verdict in rows]
        parts.append(
            "\n".join([f"## {subject}\n\n| claim | found | [tables](tables.md#{subject}) |\n|---|---|---|", *lines])
        )
    return "\n\n".join(parts)
