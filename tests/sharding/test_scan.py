"""Losses that take parameters in their form: layers in a scan, gathered one at a time, are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeparams as tp
from treeparams import sharding

from ..nets import EXPLICIT, by_optax, mesh_of, two_axes
from ..zoo import enable_x64

pytestmark = pytest.mark.usefixtures("standard_promotion")

# Four weights of one shape in each layer, and more of that shape before and after the layers.
WEIGHTS = ("key", "out", "query", "value")


def attention():
    draw = np.random.default_rng(0)
    matrix = lambda *shape: jnp.asarray(draw.normal(size=shape) / 4)
    layer = lambda: {"b": matrix(8), "f": jnp.tanh, "scale": matrix(4)} | {name: matrix(8, 8) for name in WEIGHTS}
    first = matrix(8, 8)
    return {
        "a_first": first,
        "layers": [layer() for _ in range(2)],
        "name": "attention",
        "tail": [{"w": first, "c": matrix(6)}, *({"w": matrix(8, 8), "c": matrix(6)} for _ in range(3))],
    }


def layout_of(model):
    return tp.layout(model, freeze="layers.*.scale")


def layer_of(x, layer, shift):
    scores = jax.nn.softmax((x @ layer["query"]) @ (x @ layer["key"]).T)
    y = layer["f"](scores @ (x @ layer["value"]) + layer["b"][None] * shift)
    return x + y @ layer["out"] * jnp.sum(layer["scale"])


def tail_of(x, each):
    return jnp.sum(jnp.tanh(x @ each["w"]) ** 2) * jnp.sum(jnp.sin(each["c"]))


SHIFTS = np.linspace(0.5, 1.5, 2)


def of_model(model, x, y, backwards=False):
    """The mean over examples, each a sequence."""

    def one(x):
        x = x @ model["a_first"]
        pairs = [*zip(model["layers"], SHIFTS, strict=True)]
        for layer, shift in pairs[::-1] if backwards else pairs:
            x = layer_of(x, layer, shift)
        return x, sum(tail_of(x, each) for each in model["tail"])

    found, tail = jax.vmap(one)(x)
    return jnp.mean((found - y) ** 2) + 0.1 * jnp.mean(tail)


def of_form(form, restructure, x, y, **options):
    first, tail = restructure.part(form, "a_first"), restructure.repeated(form, "tail.*")

    def turn(x, layer, shift):
        return jax.vmap(lambda x: layer_of(x, layer, shift))(x), jnp.mean(shift)

    x, shifts = restructure.scan(turn, x @ first, form, "layers.*", xs=jnp.asarray(SHIFTS, x.dtype), **options)
    assert shifts.shape == (2,)
    of_one = lambda x: jnp.sum(jax.vmap(tail_of, (None, 0))(x, tail))
    return jnp.mean((x - y) ** 2) + 0.1 * jnp.mean(jax.vmap(of_one)(x)) + 0 * jnp.sum(shifts)


X, Y = np.random.default_rng(1).normal(size=(2, 16, 3, 8))
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.3, momentum=0.9))
STEPS = 2


@functools.cache
def on_one_device(backwards=False):
    params, rest = tp.partition(attention(), layout_of(attention()))
    after, values = by_optax(
        lambda params: of_model(tp.combine(params, rest), X, Y, backwards), TX, params, [()] * STEPS
    )
    return after[-1], values


SMALL = {"layers.*.b": "whole", "tail.*.c": "whole"}
OWNED, SPLIT = {**SMALL, "**": "owned"}, {**SMALL, "**": "split"}
BY_SPEC = {"layers.*.query": P(None, "data"), "layers.*.out": "whole", **SMALL, "layers": "split", "**": P("data")}
TENSORS = {"layers.*.[qk]*": P("data", "model"), "layers.*.scale": "whole", **SMALL, "**": P(None, "model")}
CASES = {  # rules, mesh, axes, options of the scan
    "owned, explicit": (OWNED, mesh_of(4, EXPLICIT), {}, {"unroll": 2}),
    "split, in pieces": (SPLIT, mesh_of(4), {}, {}),
    "many rules": (BY_SPEC, mesh_of(4), {}, {"reverse": True}),
    "tensors": (TENSORS, two_axes(("data", "model")), {"axis": "data"}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_in_a_scan_are_those_of_one_device(name):
    rules, mesh, axes, options = CASES[name]
    microbatches = 2 if "pieces" in name else 1
    with enable_x64(True):
        model = attention()
        plan = sharding.plan(layout_of(model), mesh, rules, form="stacks", **axes)
        of = lambda *args: of_form(*args, **options)
        init, step = sharding.make_step(of, TX, plan, loss_takes="form", microbatches=microbatches)
        params, state = init(model)
        want, values = on_one_device("reverse" in options)
        for expected in values:
            params, state, value = step(params, state, X, Y)
            np.testing.assert_allclose(value, expected, 1e-10)
        back = plan.model(params, state)
        got = tp.partition(back, plan.layout)[0]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-10), got, want)
    assert back["tail"][0]["w"] is back["a_first"]
    assert back["layers"][0]["f"] is jnp.tanh
    np.testing.assert_array_equal(back["layers"][1]["scale"], model["layers"][1]["scale"])
