"""A whole step of training, compiled: loss, gradient, Adam, new parameters. What it costs in time and memory.

The yardstick is the tree form, `tp.partition`. The flat form is one vector, of `tp.ravel`. Parameters and state are
donated, so that the temporary memory is what a step needs beside the parameters, their two averages and the batch.

The last table is of nets of 20 weights and biases of one size each. It tells up to what size one vector pays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import treeparams as tp

from ._harness import Scale, Table, as_ratios, in_time, medians
from ._models import Net, net
from ._programs import Program, built, in_bytes, rows

_TREE, _FLAT = "tree", "flat"
_BATCH = 8
_OPTIMISER = optax.adam(1e-3)
_SLACK = 1.1  # a form that takes so much is still as good


class Form(NamedTuple):
    """Parameters in one of the forms, and the loss as a function of them."""

    params: Any
    loss: Callable[[Any], jax.Array]


def run(scale: Scale) -> Iterator[Table]:
    huge, depth = (256, 5) if scale.is_smoke else (1024, 250)
    several = f"{2 * depth} leaves"
    yield _table(f"Many small leaves: {several}, of 8x8 and 8", [net(2 * depth, 8)], scale)
    yield _table(f"A few huge ones: 12 leaves, of {huge}x{huge} and {huge}", [net(12, huge)], scale)
    mixed = [net(6, huge), net(4 * depth // 5, 8)]
    yield _table(f"Both: 6 leaves of {huge}x{huge} and {huge}, {4 * depth // 5} of 8x8 and 8", mixed, scale)
    yield _crossing((8,) if scale.is_smoke else (16, 64, 256, 512), scale)


def _table(title: str, model: list[Net], scale: Scale) -> Table:
    programs, times = _measured(model, 0 if scale.is_smoke else 6, scale)
    memory = {name: program.temporary for name, program in programs.items()}
    best = f"The least run time: {_best(times)}. The least temporary memory: {_best(memory)}."
    return Table(title, ["", *programs], rows(programs.values(), times.values()), [best])


def _best(found: Mapping[str, float]) -> str:
    least = min(found.values())
    return " and ".join(name for name, value in found.items() if value <= _SLACK * least)


def _measured(model: list[Net], patience: float, scale: Scale) -> tuple[dict[str, Program], dict[str, float]]:
    forms = _forms(model)
    functions = {name: (_step(form.loss), (form.params, _OPTIMISER.init(form.params))) for name, form in forms.items()}
    programs = built(functions, patience, donate=(0, 1))
    calls = {name: _training(programs[name], *args) for name, (_, args) in functions.items()}
    return programs, medians(calls, scale)


def _forms(model: list[Net]) -> dict[str, Form]:
    batches = [jnp.ones((_BATCH, each.layers[0].weight.shape[1])) for each in model]

    def loss(model: list[Net]) -> jax.Array:
        return sum(jnp.sum(each(x) ** 2) for each, x in zip(model, batches, strict=True))

    params, rest = tp.partition(tp.copy(model))
    vector, restructure = tp.ravel(model)
    return {
        _TREE: Form(params, lambda params: loss(tp.combine(params, rest))),
        _FLAT: Form(vector, lambda vector: loss(restructure(vector))),
    }


def _step(loss: Callable[[Any], jax.Array]) -> Callable[[Any, Any], Any]:
    def step(params: Any, state: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = _OPTIMISER.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def _training(program: Program, *args: Any) -> Callable[[], Any]:
    held = list(args)  # what is donated is gone, so each call goes on from the one before

    def go_on() -> Any:
        *held[:], value = program.call(*held)
        return jax.block_until_ready((held, value))

    return go_on


# -- Which form is the best --------------------------------------------------------------------------------------------


def _crossing(widths: Sequence[int], scale: Scale) -> Table:
    names = (_TREE, _FLAT)
    cells, gains = [], {}
    for width in widths:
        size = width * width
        programs, times = _measured([net(40, width)], 0, scale._replace(seconds=scale.seconds / 2))
        cells.append([f"{size:,}: run time", *as_ratios([times[name] for name in names], in_time)])
        cells.append([f"{size:,}: temporary memory", *(in_bytes(programs[name].temporary) for name in names)])
        gains[size] = times[_TREE] / times[_FLAT]
    faster, clearly = (max((n for n in gains if gains[n] >= least), default=0) for least in (1, _SLACK))
    found = f"One vector is faster than the tree up to {faster:,} elements, {_SLACK}x up to {clearly:,}."
    return Table("20 weights of so many elements each", ["", *names], cells, [found])
