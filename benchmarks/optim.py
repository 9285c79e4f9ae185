"""What training with `treeparams.optim` costs.

The first table is of the net and the batch of `step`, a whole training step: loss, gradient, Adam, new parameters. The
yardstick is plain Optax over the parameters of `tp.partition`, by hand. `optim.trainable` passes the model itself to
`tp.value_and_grad` and `optim.step`; `form="vector"` joins the gradients to one vector in each step and cuts the
updates out of it. Equinox and Flax train as their documentation says. Every state is donated. That all take the same
steps is asserted. Operations and bytes are XLA's own figures. (For an update without a gradient, outside of `jit` too:
`adam`.)

In the second table a net is thawed in equal portions, one step apart, so that its leaves have one, two or three
histories; a clip by the global norm goes before Adam. All leaves train in the steps that count.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax

import treeparams as tp
from treeparams import optim

from ._harness import Scale, Table, Verdict, as_ratios, in_time, medians
from ._programs import in_bytes, in_millions
from ._steps import (
    IN_A_ROW,
    RATE,
    Loop,
    Task,
    check_losses,
    examples,
    mean_error,
    model,
    with_equinox,
    with_nnx,
    with_tree,
)

_HAND, _TRAINABLE, _FLAT = "by hand", "optim.trainable", "form='vector'"
_LIMIT = 1.005


class Cost(NamedTuple):
    """What a step costs."""

    build: float  # seconds for tracing, lowering and compiling
    step: float  # seconds
    flops: float
    moved: float  # bytes


def run(scale: Scale) -> Iterator[Table]:
    sizes, leaves, patience = ((4,), 6, 0) if scale.is_smoke else ((10, 200), 198, 10)
    if not scale.is_smoke:
        for make in _MAKERS.values():  # what JAX loads and traces for its first program is nobody's cost
            make(Task(4, optax.adam(RATE))).build()
    yield _steps_table(sizes, patience, scale)
    counts = {"one history": 1, "two": 2, "three histories": 3}
    makers = {name: functools.partial(_thawed, leaves, count) for name, count in counts.items()}
    costs = _measured(makers, patience, scale)
    line = _no_more({"": costs}, "three histories", "one history", "flops")
    yield Table(f"{_TRAINABLE} of a net of {leaves} leaves, thawed in portions", ["", *costs], _rows(costs), [line])


def _measured(makers: Mapping[str, Callable[[], Loop]], patience: float, scale: Scale) -> dict[str, Cost]:
    """The costs of each step; all are built in turn, three times or as often as begins within these seconds."""
    builds: dict[str, list[float]] = {name: [] for name in makers}
    loops: dict[str, Loop] = {}
    stop = time.perf_counter() + patience
    for done in range(3):
        if done and time.perf_counter() >= stop:
            break
        for name, make in makers.items():
            loops[name] = make()
            builds[name].append(loops[name].build())
    if makers.keys() == _MAKERS.keys():
        check_losses(loops)
    steps = medians(loops, scale, IN_A_ROW)
    costs = {name: loop.cost() for name, loop in loops.items()}
    return {
        name: Cost(statistics.median(builds[name]), steps[name], cost["flops"], cost["bytes accessed"])
        for name, cost in costs.items()
    }


def _rows(costs: Mapping[str, Cost], label: str = "") -> list[list[str]]:
    builds, steps, flops, moved = zip(*costs.values(), strict=True)
    return [
        [f"{label}trace, lower, compile", *as_ratios(builds, in_time)],
        [f"{label}step", *as_ratios(steps, in_time)],
        [f"{label}operations", *as_ratios(flops, in_millions)],
        [f"{label}bytes moved", *as_ratios(moved, in_bytes)],
    ]


def _no_more(found: Mapping[str, Mapping[str, Cost]], name: str, of: str, field: str) -> Verdict:
    what = "operations" if field == "flops" else "bytes moved"
    ratios = {where: getattr(costs[name], field) / getattr(costs[of], field) for where, costs in found.items()}
    worst = max(ratios, key=lambda where: ratios[where])
    return Verdict(f"{what} of {name} <= {_LIMIT}x {of}", ratios[worst] <= _LIMIT, f"{ratios[worst]:.4f}x{worst}")


def _step(tx: Any) -> Callable[..., Any]:
    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        net, state = state
        value, grads = tp.value_and_grad(lambda net: mean_error(net(x), y), state.layout)(net)
        return optim.step(tx, grads, state, net), value

    return step


def _steps_table(sizes: tuple[int, ...], patience: float, scale: Scale) -> Table:
    found, rows = {}, []
    for leaves in sizes:
        task = Task(leaves, optax.adam(RATE))
        costs = _measured({name: functools.partial(make, task) for name, make in _MAKERS.items()}, patience, scale)
        found[f" at {leaves} leaves"] = costs
        rows += _rows(costs, f"{leaves} leaves: ")
    lines = [_no_more(found, _TRAINABLE, _HAND, field) for field in ("flops", "moved")]
    explained = f"XLA counts more for {_FLAT} than is done: a whole vector for each leaf that is cut out of it."
    return Table("Loss, gradient, Adam", ["", *_MAKERS], rows, [*lines, explained])


def _by_us(make: Callable[..., Any], task: Task) -> Loop:
    net, tx = model(task.leaves), make(task.optimiser)
    return Loop(jax.jit(_step(tx), donate_argnums=0), (net, tx.init(net)), *examples())


_MAKERS: dict[str, Callable[[Task], Loop]] = {
    _HAND: with_tree,
    _TRAINABLE: lambda task: _by_us(optim.trainable, task),
    _FLAT: lambda task: _by_us(functools.partial(optim.trainable, form="vector"), task),
    "eqx.filter_jit": with_equinox,
    "nnx.jit": with_nnx,
}


def _thawed(leaves: int, count: int) -> Loop:
    net = model(leaves)
    last = lambda portion: lambda net: net.layers[-(len(net.layers) * portion // count) :]
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.adam(RATE)), last(1))
    step, state = _step(tx), tx.init(net)
    for portion in range(2, count + 1):
        (net, state), _ = step((net, state), *examples())
        state = optim.set_trainable(tx, state, net, last(portion))
    return Loop(jax.jit(step, donate_argnums=0), (net, state), *examples())
