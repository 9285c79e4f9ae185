"""Cases that are left to `--long`, of laws of which other cases are in each run; `.ci/run` takes those of pages."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

LONG = pytest.mark.long


def some(cases: Iterable[Any], long: Collection[Any]) -> list[Any]:
    """These cases, of which some are left to `--long`; a plain tuple has an argument for each name."""
    arguments = lambda case: case if type(case) is tuple else (case,)
    return [pytest.param(*arguments(case), marks=LONG if case in long else ()) for case in cases]
