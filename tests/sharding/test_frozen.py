"""Frozen parameters over several devices: they lie by rules, and are gathered, never reduced."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P

import treeparams as tp
from treeparams import sharding

from ..long import some
from ..nets import EXPLICIT, mesh_of, two_axes
from ..zoo import enable_x64, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")
LAYERS = 5
X = np.random.default_rng(1).normal(size=(16, 8))
TX = optax.sgd(0.1, momentum=0.9)
FROZEN = ("first", "layers.*.base", "layers.*.lift", "turn", "last")


@functools.cache
def net():
    """Adapters beside frozen matrices: of JAX and of NumPy, complex, tied, integers and a buffer."""
    draw = np.random.default_rng(0)
    matrix = lambda *shape: draw.normal(size=shape) / 3
    first = jnp.asarray(matrix(8, 8))
    layer = lambda i: {
        "base": first if i == 2 else jnp.asarray(matrix(8, 8)),  # used in the scan and before it
        "a": jnp.asarray(matrix(8, 4)),
        "b": jnp.asarray(matrix(4, 8)),
        "lift": matrix(8),
        "count": jnp.arange(3),
    }
    turn = jnp.asarray(np.exp(1j * np.arange(8)), np.complex128)
    layers = [layer(i) for i in range(LAYERS)]
    buffer = eqx.nn.StateIndex(jnp.ones(3))
    return {"first": first, "layers": layers, "turn": turn, "last": first, "key": jax.random.key(0), "seen": buffer}


def layer_of(x, layer):
    y = x @ layer["base"] + x @ layer["a"] @ layer["b"] + layer["lift"][None]
    return x + jnp.tanh(y) * layer["count"][1].astype(x.dtype)


def ending(x, first, turn):
    return jnp.mean(jnp.abs((x @ first) * turn[None] - 1) ** 2)


def of_model(model, x):
    x = x @ model["first"]
    for layer in model["layers"]:
        x = layer_of(x, layer)
    return ending(x, model["last"], model["turn"])


def of_form(form, restructure, x):
    part = functools.partial(restructure.part, form)
    x, _ = restructure.scan(lambda x, layer: (layer_of(x, layer), None), x @ part("first"), form, "layers.*")
    return ending(x, part("last"), part("turn"))


@functools.cache
def on_one_device():
    params, rest = tp.partition(net(), tp.layout(net(), freeze=FROZEN))
    state, values = TX.init(params), []

    @jax.jit
    def step(params, state):
        value, gradient = jax.value_and_grad(lambda params: of_model(tp.combine(params, rest), X))(params)
        updates, state = TX.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(3):
        params, state, value = step(params, state)
        values.append(float(value))
    return params, values


SPLIT = {"**": "split"}
OWNED = {"layers.*.base": "owned", "**": "split"}
SHARE = {"loss_takes": "form"}
CASES = {
    "tree": ("tree", SPLIT, mesh_of(4), {}),
    "tree, form": ("tree", SPLIT, mesh_of(4), SHARE),
    "vector, explicit": ("vector", SPLIT, mesh_of(4, EXPLICIT), {"microbatches": 2}),
    "vector, whole but one": ("vector", {"layers.*.base": P(None, "data"), "layers": "whole"}, mesh_of(4), {}),
    "stacks": ("stacks", SPLIT, mesh_of(8), {}),
    "stacks, owned, for a model": ("stacks", OWNED, mesh_of(4, EXPLICIT), {}),
    "stacks, owned, for a form": ("stacks", OWNED, mesh_of(2), {"loss_takes": "form"}),
    "parameters": ("stacks", SPLIT, mesh_of(4), SHARE),
    "parameters, owned, in pieces": ("stacks", OWNED, mesh_of(4, EXPLICIT), SHARE | {"microbatches": 2}),
    "parameters, by layer": ("stacks", {"layers.1.base": "whole", **SPLIT}, mesh_of(4), SHARE),
}
CASES["two axes"] = (
    "tree",
    {
        "first": P("data", "model"),
        "layers.*.base": P(None, "model"),
        "turn": P("model"),
        "layers.*.[ab]": "split",
    },
    two_axes(("data", "model"), EXPLICIT),
    {},
)
CASES["two axes, parameters"] = ("stacks", CASES["two axes"][1], two_axes(("data", "model")), SHARE)


def started(name):
    form, rules, mesh, options = CASES[name]
    model = net()
    axis = "data" if len(mesh.axis_names) > 1 else None
    plan = sharding.plan(tp.layout(model, freeze=FROZEN), mesh, rules, form=form, axis=axis)
    of = of_any if "loss_takes" in options else of_model
    return plan, model, *sharding.make_step(of, TX, plan, **options)


def of_any(form, rest, x):
    return of_form(form, rest, x) if isinstance(rest, tp.Restructure) else of_model(tp.combine(form, rest), x)


def places(tree):
    return [leaf.sharding for leaf in jax.tree.leaves(tree)]


# What these say of numbers, others say too: of stacks, of split parameters, of two axes.
LONG_CASES = ("vector, whole but one", "stacks", "parameters", "parameters, by layer", "two axes")


@pytest.mark.parametrize("name", some(CASES, LONG_CASES))
def test_numbers_are_those_of_one_device(name):
    with enable_x64(True):
        plan, model, init, step = started(name)
        params, state = init(model)
        before = places(state)
        want, values = on_one_device()
        for expected in values:
            given = state
            params, state, value = step(params, state, X)
            np.testing.assert_allclose(value, expected, 1e-10)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given.rest))
        pairs = zip(jax.tree.leaves(state), before, strict=True)
        assert all(leaf.sharding.is_equivalent_to(place, leaf.ndim) for leaf, place in pairs)
        back, put = plan.model(params, state), plan.put(model)
        got = tp.partition(back, plan.layout)[0]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-10), got, want)
        for path in ("first", "turn"):
            np.testing.assert_array_equal(back[path], model[path])
            assert back[path].sharding.is_equivalent_to(put[path].sharding, back[path].ndim)
        assert back["layers"][1]["lift"].sharding.is_equivalent_to(put["layers"][1]["lift"].sharding, 1)
        np.testing.assert_array_equal(back["layers"][3]["base"], model["layers"][3]["base"])
        assert back["first"] is back["last"] is back["layers"][2]["base"]
        assert all(leaf.sharding.is_fully_replicated for leaf in (back["key"], back["seen"].init, put["seen"].init))
        whole = plan.model(params, state, whole=True)
        assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(whole) if isinstance(leaf, jax.Array))


ROWS, WIDTH, RANK = 8, 64, 4


def deep():
    """Eight matrices, which are frozen, and changes of low rank."""
    layer = lambda: {"base": jnp.ones((WIDTH, WIDTH)), "a": jnp.ones((WIDTH, RANK)), "b": jnp.zeros((RANK, WIDTH))}
    return {"layers": [layer() for _ in range(ROWS)]}


EVERY = {"layers.*.[ab]": "split"}


# -- Rules -------------------------------------------------------------------------------------------------------------

ANY = AbstractMesh((4,), ("data",))


def test_those_that_no_rule_matches_are_whole_and_listed():
    model = {"w": ramp(8, 4), "base": ramp(16, 4), "small": ramp(3), "copy": ramp(4, 8), "n": jnp.arange(5)}
    layout = tp.layout(model, freeze=("base", "small", "copy"))
    plan = sharding.plan(layout, ANY, {"w": "split", "small": "whole"})
    assert plan.replicated == {"base": 256, "copy": 128, "small": 12}
    # A rule for frozen parameters alone is one.
    plan = sharding.plan(layout, ANY, {"w": "whole", "base": "split", "copy": P(None, "data")})
    assert repr(plan).splitlines()[2:] == [
        "base   float32[16,4]  P('data'), frozen                      64",
        "copy   float32[4,8]   P(None, 'data'), frozen                32",
        "small  float32[3]     whole, frozen                          12",
        "tree over ('data': 4): 524 bytes (396 frozen), 236 on each device",
        "whole on each device: 2, the largest 'w' of 128 bytes",
    ]


def test_a_frozen_alias_lies_as_its_source():
    base = ramp(8, 4)
    model = {"again": base, "base": base, "turned": base.T, "w": ramp(8)}
    layout = tp.layout(model, freeze=("again", "base", "turned"), ties={"turned": ("base", jnp.transpose)})
    plan = sharding.plan(layout, mesh_of(4), {"base": "split", "w": "whole"})
    put = plan.put(model)
    assert put["again"] is put["base"]
    assert put["base"].addressable_shards[0].data.shape == (2, 4)
    assert put["turned"].addressable_shards[0].data.shape == (1, 8)
    assert "again" not in repr(plan)


@pytest.mark.parametrize(
    ("rules", "form", "message"),
    [
        (
            {"**": "split"},
            "tree",
            "'base.0' (float32[6,3]), by '**': none of its axes is a multiple of 4; write \"whole\"",
        ),
        ({"**": "split"}, "vector", "'base.0' (float32[6,3]), by '**': none of its axes is a multiple of 4"),
        ({"base": "owned", "**": "split"}, "tree", '"owned" is for rows of stacks; write form="stacks", or "split"'),
        ({"base": P("data"), "**": "split"}, "tree", "its axis 0 of size 6 is no multiple of 4"),
        ({"w": "split", "**": "whole", "base": "split"}, "tree", "'base' comes too late: '**' before it selects"),
        ({"base": "whole", "bias": "split", "w": "split"}, "tree", "'bias' selects nothing; nearest: 'base'"),
    ],
)
def test_a_rule_that_cannot_hold_is_refused(rules, form, message):
    model = {"w": ramp(8, 4), "base": [ramp(6, 3), ramp(6, 3)]}
    with pytest.raises(ValueError, match=re.escape(message)):
        sharding.plan(tp.layout(model, freeze="base"), ANY, rules, form=form)


def test_buffers_and_integers_are_whole_whatever_rules_say():
    norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
    model = {"norm": norm, "numbers": jnp.arange(5), "key": jax.random.key(0), "w": ramp(8)}
    plan = sharding.plan(model, mesh_of(4), {"norm.weight": "whole", "norm.bias": "whole", "**": "split"})
    assert "frozen" not in repr(plan)
    put = plan.put(model)
    arrays = [leaf for leaf in jax.tree.leaves((put["norm"], put["numbers"], put["key"])) if eqx.is_array(leaf)]
    assert len(arrays) > 4
    assert all(leaf.is_fully_replicated for leaf in arrays)


def test_shapes_lie_as_values_do():
    for options in ({}, {"loss_takes": "form"}):
        layout = tp.layout(deep(), freeze="layers.*.base")
        plan = sharding.plan(layout, mesh_of(4), {**EVERY, "**": "split"}, form="stacks")
        init, _ = sharding.make_step(lambda *args: 0.0, optax.sgd(0.1), plan, **options)
        states = [init(model)[1] for model in (deep(), jax.eval_shape(deep))]
        assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
        pairs = [*zip(jax.tree.leaves(states[0]), jax.tree.leaves(states[1]), strict=True)]
        assert pairs[-2][0].addressable_shards[0].data.shape in [(ROWS, WIDTH // 4, WIDTH), (WIDTH // 4, WIDTH)]
        assert all(value.sharding.is_equivalent_to(shape.sharding, value.ndim) for value, shape in pairs)
        _, made = jax.jit(init)(deep())
        assert all(
            a.is_equivalent_to(b, c.ndim) for a, b, (c, _) in zip(places(made), places(states[0]), pairs, strict=True)
        )
