"""What training with `treeparams.optim` costs.

The first table is of the net and the batch of `step`, a whole training step: loss, gradient, Adam, new parameters. The
yardstick is plain Optax over the parameters of `tp.partition`, by hand. The next three pass the model itself to
`tp.value_and_grad` and `optim.step`: in `jax.jit`, as the yardstick, or in `tp.jit`, which takes any model.
`optim.flat` joins the gradients to one vector in each step and cuts the updates out of it. Equinox and Flax train as
their documentation says. Every state is donated. That all take the same steps is asserted. Operations and bytes are
XLA's own figures. (For an update without a gradient, also outside of `jit`, see `adam`.)

In the second table a net is thawed in equal portions, one step apart, so that its leaves have one, two or three
histories; a clip by the global norm goes before Adam. All leaves train in the steps that count. Each history of
`optim.trainable` runs over all leaves, and of what it gives for those of others XLA computes nothing; each of
`optim.flat` runs over the whole vector.

In the third all of a net but its last layer is frozen, and a gradient is clipped by its norm, within `optim.trainable`
or by plain Optax before it. The yardstick takes the gradient of that layer. The others take it of everything and leave
it to XLA to drop what nobody needs; before `optim.trainable` the norm is of everything, and needs the whole backward
pass. All are in `tp.jit`, and all but the yardstick return the frozen layers too.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import treeparams as tp
from treeparams import optim

from ._harness import Scale, Table, Verdict, as_ratios, in_time, there_and_back
from ._programs import in_bytes, in_millions
from ._steps import (
    IN_A_ROW,
    RATE,
    Loop,
    Task,
    batch,
    check_losses,
    filtered,
    mean_error,
    model,
    with_equinox,
    with_nnx,
    with_tree,
)

_HAND, _TRAINABLE, _FLAT = "by hand", "optim.trainable", "optim.flat"
_WITHIN, _OPTAX_WITHIN, _OPTAX_BEFORE = "optim's clip, within", "optax's, within", "optax's, before"
_LIMIT = 1.005


class Cost(NamedTuple):
    """What a step costs."""

    build: float  # seconds for tracing, lowering and compiling
    step: float  # seconds
    flops: float
    moved: float  # bytes


def run(scale: Scale) -> Iterator[Table]:
    sizes, leaves, width, patience = ((4,), 6, 8, 0) if scale.is_smoke else ((10, 200, 1000), 198, 256, 60)
    if not scale.is_smoke:
        for make in _MAKERS.values():  # what JAX loads and traces for its first program is nobody's cost
            make(Task(4, optax.adam(RATE))).build()
    yield _steps_table(sizes, patience, scale)
    yield _histories_table(leaves, patience, scale)
    yield _frozen_table(width, patience, scale)


def _measured(
    makers: Mapping[str, Callable[[], Loop]], patience: float, scale: Scale, are_alike: bool = False
) -> dict[str, Cost]:
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
    for each in [loops] if are_alike else [{name: loop} for name, loop in loops.items()]:
        check_losses(each)
    longer = scale._replace(seconds=4 * scale.seconds)
    steps = there_and_back(loops, longer, IN_A_ROW, at_turns=list(loops.values())[1])
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


def _step(tx: optax.GradientTransformationExtraArgs, loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(state: Any, *args: Any) -> tuple[Any, jax.Array]:
        model, state = state
        value, grads = tp.value_and_grad(loss, state.layout)(model, *args)
        return optim.step(tx, grads, state, model), value

    return step


# -- One history -------------------------------------------------------------------------------------------------------


def _steps_table(sizes: tuple[int, ...], patience: float, scale: Scale) -> Table:
    found = {}
    for leaves in sizes:
        task = Task(leaves, optax.adam(RATE))
        makers = {name: functools.partial(make, task) for name, make in _MAKERS.items()}
        found[leaves] = _measured(makers, patience, scale, are_alike=True)
    rows = [row for leaves, costs in found.items() for row in _rows(costs, f"{leaves} leaves: ")]
    figures: dict[str, Callable[[Cost], float]] = {
        "operations": lambda cost: cost.flops,
        "bytes moved": lambda cost: cost.moved,
    }
    lines = []
    for what, of in figures.items():
        ratios = {leaves: of(costs[_TRAINABLE]) / of(costs[_HAND]) for leaves, costs in found.items()}
        worst = max(ratios, key=lambda leaves: ratios[leaves])
        explained = f"{ratios[worst]:.4f}x at {worst} leaves"
        lines.append(Verdict(f"{what} of {_TRAINABLE} <= {_LIMIT}x {_HAND}", ratios[worst] <= _LIMIT, explained))
    lines.append(
        f"XLA counts more for {_FLAT} than is done: with each leaf that is cut out of the vector of updates a "
        "multiplication, by the rate, of that whole vector, of which only the leaf's part is computed."
    )
    lines.append(
        f"The first `init` of {_FLAT} tries the transformation on three leaves of its own: {in_time(_trial())}."
    )
    return Table("Loss, gradient, Adam", ["", *_MAKERS], rows, lines)


def _trial() -> float:
    tx = optim.flat(optax.adam(RATE))
    start = time.perf_counter()
    tx.init({"w": jnp.ones(2)})
    return time.perf_counter() - start


def _error(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return mean_error(model(x), y)


def _in_jax_jit(make: Callable[..., Any], task: Task) -> Loop:
    net, tx = model(task.leaves), make(task.optimiser)
    return Loop(jax.jit(_step(tx, _error), donate_argnums=0), (net, tx.init(net)), *batch())


def _in_tp_jit(make: Callable[..., Any], task: Task) -> Loop:
    net, tx = model(task.leaves), make(task.optimiser)
    return filtered(tp.jit, _step(tx, _error), (net, tx.init(net)), *batch())


_MAKERS: dict[str, Callable[[Task], Loop]] = {
    _HAND: with_tree,
    _TRAINABLE: lambda task: _in_jax_jit(optim.trainable, task),
    "in tp.jit": lambda task: _in_tp_jit(optim.trainable, task),
    _FLAT: lambda task: _in_jax_jit(optim.flat, task),
    "eqx.filter_jit": with_equinox,
    "nnx.jit": with_nnx,
}


# -- Several histories -------------------------------------------------------------------------------------------------


def _histories_table(leaves: int, patience: float, scale: Scale) -> Table:
    rows = []
    names = ("one history", "two", "three")
    for make in (optim.trainable, optim.flat):
        makers = {
            name: lambda make=make, count=count: _thawed(make, leaves, count) for count, name in enumerate(names, 1)
        }
        rows += _rows(_measured(makers, patience, scale), f"optim.{make.__name__}: ")
    return Table(f"A net of {leaves} leaves, thawed in portions", ["", *names], rows)


def _thawed(make: Callable[..., Any], leaves: int, count: int) -> Loop:
    net = model(leaves)
    layers = len(net.layers)
    tx = make(optax.chain(optim.clip_by_global_norm(1.0), optax.adam(RATE)), _last_of(layers // count))
    step, state = _step(tx, _error), tx.init(net)
    for portion in range(2, count + 1):
        (net, state), _ = step((net, state), *batch())
        state = optim.set_trainable(tx, state, net, _last_of(layers * portion // count))
    return Loop(jax.jit(step, donate_argnums=0), (net, state), *batch())


def _last_of(layers: int) -> Callable[[Any], Any]:
    return lambda net: net.layers[-layers:]


# -- A frozen trunk ----------------------------------------------------------------------------------------------------


def _frozen_table(width: int, patience: float, scale: Scale) -> Table:
    costs = _measured({name: functools.partial(make, width) for name, make in _CLIPPED.items()}, patience, scale)
    ratio = costs[_WITHIN].flops / costs[_HAND].flops
    line = Verdict(f"operations of {_WITHIN} <= {_LIMIT}x {_HAND}", ratio <= _LIMIT, f"{ratio:.4f}x")
    title = f"An MLP of 7 layers, 64 to {width} to 64, on a batch of 128; its last layer trains, with a clip"
    return Table(title, ["", *costs], _rows(costs), [line])


def _clipped_by_hand(width: int) -> Loop:
    net, *args = _frozen(width)
    params, rest = tp.partition(net, _LAST)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE))

    def step(state: Any, rest: Any, *args: Any) -> tuple[Any, jax.Array]:
        params, moments = state
        value, grads = jax.value_and_grad(lambda params: _error_over_batch(tp.combine(params, rest), *args))(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return filtered(tp.jit, step, (params, tx.init(params)), rest, *args)


def _clipped(tx: Any, width: int) -> Loop:
    net, *args = _frozen(width)

    def step(state: Any, *args: Any) -> tuple[Any, jax.Array]:
        model, state = state
        value, grads = eqx.filter_value_and_grad(_error_over_batch)(model, *args)
        return optim.step(tx, grads, state, model), value

    return filtered(tp.jit, step, (net, tx.init(net)), *args)


def _frozen(width: int) -> tuple[eqx.nn.MLP, jax.Array, jax.Array]:
    x, y = jax.random.normal(jax.random.key(1), (2, 128, 64))
    return eqx.nn.MLP(64, 64, width, 6, key=jax.random.key(0)), x, y


def _error_over_batch(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return mean_error(jax.vmap(model)(x), y)


_LAST = "layers.6"
_CLIPPED: dict[str, Callable[[int], Loop]] = {
    _HAND: _clipped_by_hand,
    _WITHIN: lambda width: _clipped(
        optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.adam(RATE)), _LAST), width
    ),
    _OPTAX_WITHIN: lambda width: _clipped(
        optim.trainable(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE)), _LAST), width
    ),
    _OPTAX_BEFORE: lambda width: _clipped(
        optax.chain(optax.clip_by_global_norm(1.0), optim.trainable(optax.adam(RATE), _LAST)), width
    ),
}
