"""Steps over several devices: what they take, side by side."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from . import _harness
from ._harness import Median, Scale, Table, Verdict, as_ratios, in_time, medians
from ._moved import moved
from ._steps import IN_A_ROW, Loop, check_losses

SLACK = 1.1
_SECONDS = 2  # what takes longer to make and to compile is made once


def use_several_devices(scale: Scale) -> None:
    """Gives this process eight devices on CPU. It must have computed nothing yet."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2 if scale.is_smoke else 8)


class Step(Loop):
    """A loop of `params, state, value = step(params, state, *batch)`, with the seconds of the calling thread."""

    def __init__(self, step: Any, params: Any, state: Any, batch: tuple[jax.Array, ...]) -> None:
        super().__init__(step, (params, state), *batch, lower=lambda state, *args: step.lower(*state, *args))
        self.calls: list[float] = []

    def __call__(self) -> jax.Array:
        start = time.thread_time()
        *self.state, value = self.step(*self.state, *self.args)
        self.calls.append(time.thread_time() - start)
        return value.block_until_ready()


Makers = Mapping[str, Callable[[], Step]]


# -- What was found ----------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Of one step: seconds; bytes in sizes of the parameters; collectives."""

    start: float
    build: float
    call: float
    step: float
    at_rest: float
    temporary: float
    moved: float
    counts: dict[str, int]


def measured(
    makers: Makers, scale: Scale, rtol: float = 1e-4, moved_by: Callable[[Step], Any] | None = None
) -> dict[str, Found]:
    """What each of these steps takes, all in turn.

    Args:
        makers: how each is made, by its name.
        scale: how much to run.
        rtol: how far the losses may be from each other.
        moved_by: the text of the program in which collectives are counted, if not that of the program as it runs.
    """
    loops: dict[str, Step] = {}
    starts: dict[str, float] = {}
    builds: dict[str, float] = {}
    for is_again in (False,) if scale.is_smoke else (False, True):
        for name, make in makers.items():
            if is_again and starts[name] + builds[name] > _SECONDS:
                continue
            start = time.perf_counter()
            loops[name] = make()
            jax.block_until_ready(loops[name].state)
            starts[name] = min(time.perf_counter() - start, starts.get(name, math.inf))
            builds[name] = min(loops[name].build(), builds.get(name, math.inf))
    check_losses(loops, rtol)
    steps = medians(loops, scale, IN_A_ROW)
    found = {}
    for name, loop in loops.items():
        found_in = moved(moved_by(loop) if moved_by else loop.compiled)
        memory = loop.compiled.memory_analysis()
        of_params = sum(leaf.nbytes for leaf in jax.tree.leaves(loop.state[0]))
        at_rest = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(loop.state))
        sizes = [each / of_params for each in (at_rest, memory.temp_size_in_bytes, found_in.bytes)]
        found[name] = Found(starts[name], builds[name], Median(loop.calls), steps[name], *sizes, found_in.counts)
    return found


_TIMES = {"start": "plan and init", "build": "trace, lower, compile", "call": "call", "step": "step"}
_SIZES = {"at_rest": "at rest", "temporary": "temporary memory", "moved": "moved in a step"}


def table(title: str, found: Mapping[str, Found], targets: Sequence[Verdict]) -> Table:
    """A table of one column for each step."""
    each = found.values()
    rows = [[words, *as_ratios([getattr(of, what) for of in each], in_time)] for what, words in _TIMES.items()]
    rows += [[f"{words} / parameters", *(f"{getattr(of, what):.2f}" for of in each)] for what, words in _SIZES.items()]
    for kind in sorted({kind for of in each for kind in of.counts}):
        rows.append([kind, *(str(of.counts.get(kind, 0)) for of in each)])
    return Table(title, ["", *found], rows, targets)


def has(found: Mapping[str, Found], name: str, counts: Mapping[str, int]) -> Verdict:
    """Says whether a step has these collectives, and no others."""
    in_words = lambda counts: " and ".join(f"{count} {kind}" for kind, count in counts.items())
    return Verdict(f"{name}: {in_words(counts)}", found[name].counts == counts, in_words(found[name].counts))


def moves(found: Mapping[str, Found], name: str, limit: float) -> Verdict:
    """Says whether a step moves no more than so often its parameters."""
    moved = found[name].moved
    return Verdict(f"{name}: moves <= {limit}x the parameters", moved <= limit, f"{moved:.2f}x")


def at_most(found: Mapping[str, Found], what: str, name: str, of: str, limit: float) -> Verdict:
    """Says whether a step takes no more of something than a multiple of another."""
    return _harness.at_most(limit, what, {each: getattr(found[each], what) for each in (name, of)}, name, of)
