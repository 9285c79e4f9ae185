"""Makes the tables of each subject in a new process, as if it were run alone.

It has neither the programs nor the memory of the subjects before it, so its place among them does not matter.
"""

import contextlib
import importlib
import inspect
import multiprocessing
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import jax

from ._harness import Scale, Table
from ._models import PACKAGES

T = TypeVar("T")


def _apart(make: Callable[..., Iterable[T]], *args: Any) -> Iterator[T]:
    """Yields what a function yields in another process.

    Raises:
        SystemExit: that process has failed, and has said why.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # all peers are imported once, and no backend is started
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, make, args))
    process.start()
    theirs.close()
    with contextlib.suppress(EOFError):  # there is no more
        while True:
            yield ours.recv()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{make.__name__}{args} failed with exit code {process.exitcode}")


def _send(to: Connection, make: Callable[..., Iterable[Any]], args: tuple[Any, ...]) -> None:
    for each in make(*args):
        to.send(each)


def subject(name: str, scale: Scale) -> tuple[str, Iterator[Table]]:
    """The docstring of a subject, and its tables as they are made."""
    pieces = _apart(_subject, name, scale)
    return next(pieces), pieces


def _subject(name: str, scale: Scale) -> Iterator[Any]:
    module = importlib.import_module(f"{__package__}.{name}")
    yield inspect.getdoc(module)
    yield from module.run(scale)


def machine() -> str:
    """The versions of all packages, and what they run on."""
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    (backend,) = _apart(_backend)  # asked for here, it would take the memory of a GPU
    python = f"Python {platform.python_version()}"
    return f"{packages}, {python}; {backend} of {os.cpu_count()} cores ({platform.machine()})."


def _backend() -> list[str]:
    return [jax.default_backend()]
