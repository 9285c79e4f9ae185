"""The gradient of a model of which most is frozen, and what each call adds outside of `jit`.

The first table is of one compiled program each: a trunk of 50 layers that is not to be trained, a head of 2 that is.
The yardstick differentiates in the head alone, with the trunk as a further argument. Operations, bytes and memory are
XLA's own figures. The second table calls without `jit` a function that reads one leaf of the model.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import paramax
from flax import nnx

import treeparams as tp

from ._harness import Case, Scale, Table, Verdict, as_ratios, in_time, interleave, sweep
from ._models import Net, is_non_trainable, net, nnx_net
from ._programs import in_bytes, until_done

_HAND, _TP, _JAX = "partition by hand", "tp.grad", "jax.grad"


class Frozen(eqx.Module):
    """A model whose trunk is not to be trained."""

    trunk: Net
    head: Net


def run(scale: Scale) -> Iterator[Table]:
    layers, width, batch = (4, 8, 4) if scale.is_smoke else (50, 128, 256)
    model = Frozen(net(2 * layers, width), net(4, width))
    yield _compiled_table(model, jnp.ones((batch, width)), scale)
    found = sweep(_eager, scale, largest=1000)
    yield found.table("`tp.grad(f)(model)` outside of `jit`", [found.growth_target(_TP)])


def _loss(model: Frozen, x: jax.Array) -> jax.Array:
    return jnp.mean(model.head(model.trunk(x)) ** 2)


# -- One program each --------------------------------------------------------------------------------------------------


def _compiled_table(model: Frozen, x: jax.Array, scale: Scale) -> Table:
    functions = _functions(model)
    programs = {name: jax.jit(f).lower(*args, x).compile() for name, (f, args) in functions.items()}
    calls = {name: until_done(programs[name], (*args, x)) for name, (_, args) in functions.items()}
    times = interleave({name: Case(call) for name, call in calls.items()}, scale)
    costs = [program.cost_analysis() for program in programs.values()]
    memory = [program.memory_analysis() for program in programs.values()]
    flops = [cost["flops"] for cost in costs]
    rows = [
        ["operations", *as_ratios(flops, lambda count: f"{count / 1e6:.0f} M")],
        ["bytes moved", *as_ratios([cost["bytes accessed"] for cost in costs], in_bytes)],
        ["temporary memory", *as_ratios([each.temp_size_in_bytes for each in memory], in_bytes)],
        ["output memory", *as_ratios([each.output_size_in_bytes for each in memory], in_bytes)],
        ["run time", *as_ratios([timing.median for timing in times.values()], in_time)],
    ]
    ratio = flops[list(programs).index(_TP)] / flops[0]
    target = Verdict(f"operations of {_TP} <= 1.02x {_HAND}", ratio <= 1.02, f"{ratio:.3f}x")
    return Table(f"A frozen trunk of {len(model.trunk.layers)} layers", ["", *programs], rows, [target])


def _functions(model: Frozen) -> dict[str, tuple[Callable, tuple[Any, ...]]]:
    """Functions of these arguments and of the batch that return a gradient."""
    frozen = tp.layout(model, freeze="trunk")
    wrapped = Frozen(paramax.non_trainable(model.trunk), model.head)
    zero_trunk = optax.masked(optax.set_to_zero(), lambda _: tp.layout(model, "trunk").mask)

    def of_all(model: Frozen, x: jax.Array) -> Any:
        return eqx.filter_grad(_loss)(model, x)

    def with_paramax(model: Frozen, x: jax.Array) -> Any:
        params, static = eqx.partition(model, eqx.is_inexact_array, is_leaf=is_non_trainable)
        return jax.grad(lambda params: _loss(paramax.unwrap(eqx.combine(params, static)), x))(params)

    def with_optax(model: Frozen, x: jax.Array) -> Any:
        return zero_trunk.update(of_all(model, x), zero_trunk.init(model))[0]

    def with_paramax_of_all(model: Frozen, x: jax.Array) -> Any:
        return eqx.filter_grad(lambda model: _loss(paramax.unwrap(model), x))(model)

    return {
        _HAND: (jax.grad(lambda head, trunk, x: _loss(Frozen(trunk, head), x)), (model.head, model.trunk)),
        _TP: (tp.grad(_loss, frozen), (model,)),
        "equinox, of all": (of_all, (model,)),
        "paramax": (with_paramax, (wrapped,)),
        "paramax, of all": (with_paramax_of_all, (wrapped,)),
        "optax, zeroed after": (with_optax, (model,)),
    }


# -- Each call ---------------------------------------------------------------------------------------------------------


def _eager(leaves: int) -> Mapping[str, Callable]:
    model, nnx_model = net(leaves), nnx_net(leaves)

    def one_leaf(model: Any) -> jax.Array:
        return jnp.sum(model.layers[0].weight[...])

    def partitioned(params: Any, rest: Any) -> jax.Array:
        return one_leaf(tp.combine(params, rest))

    params, rest = tp.partition(model)
    return {
        _JAX: lambda: jax.grad(one_leaf)(model),
        _TP: lambda: tp.grad(one_leaf)(model),
        "tp.partition once": lambda: jax.grad(partitioned)(params, rest),
        "eqx.filter_grad": lambda: eqx.filter_grad(one_leaf)(model),
        "nnx.grad": lambda: nnx.grad(one_leaf)(nnx_model),
    }
