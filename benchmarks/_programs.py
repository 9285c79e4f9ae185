"""Compiled programs side by side: what they cost to build, in operations and memory, and to run."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ._harness import Median, Scale, as_ratios, in_time, medians

Function = tuple[Callable[..., Any], tuple[Any, ...]]  # and its arguments


class Program(NamedTuple):
    """A function compiled for its arguments."""

    call: Callable[..., Any]
    build: float  # seconds for tracing, lowering and compiling
    flops: float
    temporary: int  # bytes, beside arguments and results


@contextlib.contextmanager
def unburdened() -> Iterator[None]:
    """Keeps the garbage collector from searching again and again through what earlier programs left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def build(
    f: Callable[..., Any], *args: Any, donate: Sequence[int] = (), platforms: tuple[str, ...] | None = None
) -> Program:
    """Compiles a function from nothing: what JAX remembers of earlier traces is forgotten."""
    jax.clear_caches()
    with unburdened():
        start = time.perf_counter()
        compiled = jax.jit(f, donate_argnums=tuple(donate)).trace(*args).lower(lowering_platforms=platforms).compile()
        seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Program(compiled, seconds, compiled.cost_analysis()["flops"], memory.temp_size_in_bytes)


def built(functions: Mapping[str, Function], patience: float, donate: Sequence[int] = ()) -> dict[str, Program]:
    """Each program, and the median time to build it, of three rounds or as many as begin within these seconds."""
    found: dict[str, list[Program]] = {name: [] for name in functions}
    stop = time.perf_counter() + patience
    for done in range(3):
        if done and time.perf_counter() >= stop:
            break
        for name, (f, args) in functions.items():
            found[name].append(build(f, *args, donate=donate))
    of_all = {name: Median(program.build for program in programs) for name, programs in found.items()}
    return {name: programs[-1]._replace(build=of_all[name]) for name, programs in found.items()}


def timed(programs: Mapping[str, Program], functions: Mapping[str, Function], scale: Scale) -> dict[str, float]:
    """The run time of each program, all in turn."""
    return medians({name: until_done(program.call, functions[name][1]) for name, program in programs.items()}, scale)


def rows(programs: Iterable[Program], times: Iterable[float]) -> list[list[str]]:
    """The rows of a table with one column per program; the first is the yardstick."""
    programs = list(programs)
    return [
        ["trace, lower, compile", *as_ratios([each.build for each in programs], in_time)],
        ["run time", *as_ratios(list(times), in_time)],
        ["operations", *as_ratios([each.flops for each in programs], in_millions)],
        ["temporary memory", *as_ratios([each.temporary for each in programs], in_bytes)],
    ]


def in_millions(count: float) -> str:
    """A count in millions.

    >>> in_millions(6_516_287)
    '6.52 M'
    """
    return f"{count / 1e6:.3g} M"


def in_bytes(count: float) -> str:
    """Bytes in a unit that leaves three digits.

    >>> in_bytes(10_485_760), in_bytes(512)
    ('10.5 MB', '512 B')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def until_done(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """A call that ends when its result is there."""
    return lambda: jax.block_until_ready(f(*args))
