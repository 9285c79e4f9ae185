"""`python -m benchmarks [NAME ...] [--smoke]`: one or more tables per subject.

A subject is a module of this folder whose name has no underscore in front: its docstring heads its section, and its
`run(scale)` yields tables. A whole run is also written to `RESULTS.md`; what is run of a few subjects is only printed,
so that the file is always of one run on one machine. `GPU.md` is `accelerator --to benchmarks/GPU.md` where a GPU is.
"""

import argparse
import pathlib
import pkgutil
import time

from ._apart import machine, subject
from ._harness import FULL, SMOKE, Scale, Table, Verdict

_FOLDER = pathlib.Path(__file__).parent
_SUBJECTS = sorted(module.name for module in pkgutil.iter_modules([str(_FOLDER)]) if not module.name.startswith("_"))

_INTRODUCTION = """\
# What it costs

Written by `python -m benchmarks`: first what is claimed and what was found, then the tables. In each table the first
column of numbers is the yardstick, in absolute terms, and the others are multiples of it: medians of calls that were
made in rounds, each in another order, so that other work of the machine falls on all alike. Each subject has a process.

Where a claim is about two medians, the 95 % interval of their ratio stands behind it. A claim is missed if the interval
is above the limit as a whole. It is unclear if the ratio is above the limit, and the interval reaches below it. Where a
claim of a subject is missed, the subject is measured once more. The second time stands here, and says what the first
one missed.
"""
_TABLES = """\
# Tables

Each timed call comes after one of the same case that is not timed. Garbage collection waits until the calls of a row
are done. The growth is the exponent of the number of leaves, fitted by least squares to the logarithms: 1 is linear.
Fixed costs at the small end lower it, so that of the last step, between the two largest sizes, is given below it. A
dash was not run; a line below the table says why.
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Times treeparams next to its peers.")
    parser.add_argument("subjects", nargs="*", metavar="NAME", help=f"of {', '.join(_SUBJECTS)}; none: all")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that all still runs")
    parser.add_argument("--to", metavar="FILE", type=pathlib.Path, help="written there; a full run: RESULTS.md")
    arguments = parser.parse_args()
    unknown = set(arguments.subjects) - set(_SUBJECTS)
    if unknown:
        parser.error(f"no subject {', '.join(sorted(unknown))}; there are {', '.join(_SUBJECTS)}")
    start, claims, sections = time.perf_counter(), [], []
    scale = SMOKE if arguments.smoke else FULL
    on = machine()
    print(_INTRODUCTION, on, sep="\n")
    for name in arguments.subjects or _SUBJECTS:
        began = time.perf_counter()
        verdicts, section = _measured(name, scale)
        missed = [each for each in verdicts if each.is_met is False]
        if missed and not scale.is_smoke:
            verdicts, section = _measured(name, scale)
            section.append(f"The first time missed: {'; '.join(f'{each.target} ({each.found})' for each in missed)}.\n")
        claims += [[name, each.target, each.found, each.word] for each in verdicts]
        sections += [*section, f"This took {time.perf_counter() - began:.0f} s.\n"]
        print(sections[-1], flush=True)
    took = f"All of it took {time.perf_counter() - start:.0f} s."
    print(took)
    to = arguments.to or (None if arguments.subjects or arguments.smoke else _FOLDER / "RESULTS.md")
    if to:
        found = Table("What is claimed", ["", "claim", "found", ""], claims).markdown()
        pieces = [_INTRODUCTION, f"{on} {took}\n", *([f"{found}\n"] if claims else []), _TABLES, *sections]
        to.write_text("\n".join(pieces), encoding="utf-8")


def _measured(name: str, scale: Scale) -> tuple[list[Verdict], list[str]]:
    """Runs a subject, and prints its tables as they are made. Returns its verdicts and the parts of its section."""
    introduction, tables = subject(name, scale)
    verdicts, section = [], [f"## {name}\n\n{introduction}\n"]
    print(f"\n{section[0]}")
    for table in tables:
        section.append(f"{table.markdown()}\n")
        print(section[-1], flush=True)
        verdicts += [line for line in table.lines if isinstance(line, Verdict)]
    return verdicts, section


if __name__ == "__main__":
    main()
