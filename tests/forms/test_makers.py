"""A form that the library does not have, one vector for each dtype, is all that a form is: only its maker is here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeparams as tp
from treeparams import optim, saving, sharding
from treeparams._forms.block import Block
from treeparams._forms.form import Form
from treeparams.optim._state import ModelTransformation
from treeparams.optim._step import Rule
from treeparams.sharding import _placement

from ..long import LONG
from ..nets import AUTO, EXPLICIT, by_optax, mesh_of
from ..zoo import assert_same, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion", "without_type_checks")


def dtypes_of(layout, multiple=1):
    """One vector for each dtype, of a length that is a multiple."""
    members = {}
    for number, slot in enumerate(layout.slots):
        members.setdefault(str(slot.dtype), []).append(number)

    def block_of(slots):
        length = -(-sum(slot.size for slot in slots) // multiple) * multiple
        return Block.vector(slots, slots[0].dtype, length)

    return Form.of(members, layout.slots, layout.paths, "a vector for each dtype", block_of)


def dtypes(tx, trainable=None):
    """As `optim.trainable(..., form="vector")`, over one vector for each dtype."""
    rule = Rule(optax.with_extra_args_support(tx), trainable, dtypes_of)
    return ModelTransformation(rule.init, rule.update)


@pytest.fixture
def in_plans(monkeypatch):
    """The form under a name that plans know."""
    monkeypatch.setitem(_placement.MAKERS, "dtypes", dtypes_of)


def model_of():
    """Six parameters in two dtypes."""
    bias = lambda i: ramp(4, dtype=jnp.bfloat16, start=i) / jnp.bfloat16(64)
    layers = [{"b": bias(i), "w": ramp(4, 4, start=i) / 64} for i in range(3)]
    return {"layers": layers, "scale": jnp.ones(4), "steps": jnp.array(3)}


LAYOUT = tp.layout(model_of(), freeze="scale")
BATCH = tuple(np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32))


def loss(model, x, y):
    for each in model["layers"]:
        x = x + 0.1 * jnp.tanh(x @ each["w"] + each["b"].astype(jnp.float32)[None])
    return jnp.mean((x * model["scale"][None] - y) ** 2)


@functools.partial(jax.jit, static_argnums=0)
def trained(tx, state, model, steps):
    """After some steps with gradients that depend on where the model is."""
    of_leaf = lambda x: jnp.sin(3 * x + 0.5).astype(x.dtype)
    step = lambda i, carry: optim.step(tx, jax.tree.map(of_leaf, tp.partition(carry[0], LAYOUT)[0]), carry[1], carry[0])
    return jax.lax.fori_loop(0, steps, step, (model, state))


@functools.cache
def after_three_of_adam():
    """A rule over the form, with the model and the state after three steps."""
    tx, model = dtypes(optax.adam(1e-2), LAYOUT), model_of()
    return tx, *trained(tx, tx.init(model), model, 3)


def assert_near(got, want, tolerance=1e-5):
    """Of the trained parameters of two models; bfloat16 has 8 digits."""
    for path, leaf in tp.trainables(want, LAYOUT).items():
        near = tolerance if leaf.dtype == jnp.float32 else max(tolerance, 1e-2)
        other = tp.trainables(got, LAYOUT)[path]
        assert other.dtype == leaf.dtype
        np.testing.assert_allclose(other.astype(jnp.float32), leaf.astype(jnp.float32), near, near, err_msg=path)


RULES = {
    "adam": optax.adam(1e-2),
    "clip": optax.chain(optim.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "several steps": optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
}


def test_what_it_is():
    form, slots = dtypes_of(LAYOUT, 128), tp.trainables(model_of(), LAYOUT)
    joined = form.join([*slots.values()])
    assert {key: (leaf.shape, str(leaf.dtype)) for key, leaf in joined.items()} == {
        key: ((128,), key) for key in ("bfloat16", "float32")
    }
    assert_same(form.cut(joined), [*slots.values()])


def test_it_trains_freezes_and_thaws():
    rule = RULES["several steps"]
    found = []
    for tx in (dtypes(rule, LAYOUT), optim.trainable(rule, LAYOUT, form="stacks")):  # which equals Optax leaf by leaf
        model = model_of()
        model, state = trained(tx, tx.init(model), model, 3)
        models = [model]
        for layout in (LAYOUT.freeze(["layers.[01].w", "layers.1.b"]), LAYOUT):
            state = optim.set_trainable(tx, state, model, layout)
            model, state = trained(tx, state, model, 2)
            models.append(model)
        assert state.layout == LAYOUT
        assert len(state.runs) > 1
        found.append(models)
    before = model_of()
    for got, want in zip(*found, strict=True):
        assert_near(got, want)
        assert not np.allclose(got["layers"][0]["w"], before["layers"][0]["w"], atol=1e-3)


def test_what_is_frozen_waits_and_a_vector_has_no_holes():
    tx, model, state = after_three_of_adam()
    assert {key: leaf.shape for key, leaf in state.runs[0][0].mu.items()} == {"bfloat16": (12,), "float32": (48,)}
    frozen = optim.set_trainable(tx, state, model, LAYOUT.freeze("layers.0"))
    assert {key: leaf.shape for key, leaf in frozen.runs[0][0].mu.items()} == {"bfloat16": (8,), "float32": (32,)}
    assert_same(optim.set_trainable(tx, frozen, model, LAYOUT), state)
    updates, _ = tx.update({"layers": [{"w": jnp.ones((4, 4))}]}, state, model)
    assert np.all(updates["layers"][2]["w"] != 0)


def test_it_is_saved(tmp_path):
    tx, model, state = after_three_of_adam()
    state = optim.set_trainable(tx, state, model, LAYOUT.freeze("layers.0"))
    saving.save(tmp_path / "run", {"model": model, "state": state})
    like = jax.tree.map(jnp.zeros_like, {"model": model, "state": state})
    back = saving.load(tmp_path / "run", like)
    assert_same(back, {"model": model, "state": state})
    assert back["state"].roles == state.roles


# -- Over devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "takes"), [("clip", EXPLICIT, "form"), pytest.param("several steps", AUTO, "model", marks=LONG)]
)
def test_it_lies_over_devices(name, kind, takes, in_plans):
    model, rule = model_of(), RULES[name]
    plan = sharding.plan(LAYOUT, mesh_of(4, kind), {"**": "split"}, form="dtypes")
    assert {name: each.spec for name, each in plan.params.items()} == dict.fromkeys(("bfloat16", "float32"), P("data"))
    of = loss if takes == "model" else lambda params, restructure, *batch: loss(restructure(params), *batch)
    init, step = sharding.make_step(of, rule, plan, average=0.9, loss_takes=takes)
    params, state = init(model)
    whole, rest = tp.partition(model_of(), LAYOUT)
    after, values = by_optax(lambda params, *batch: loss(tp.combine(params, rest), *batch), rule, whole, [BATCH] * 3)
    for expected in values:
        params, state, value = step(params, state, *BATCH)
        np.testing.assert_allclose(value, expected, 1e-3)
    assert_near(plan.model(params, state), tp.combine(after[-1], rest), 1e-3)
    split = [leaf for leaf in jax.tree.leaves((params, state.rule)) if leaf.ndim]
    assert {leaf.addressable_shards[0].data.size for leaf in split} == {32}
    assert "dtypes, padded to 256 elements over ('data': 4): 784 bytes (16 frozen), 196 on each device" in repr(plan)


def test_what_it_cannot_be_over_devices(in_plans):
    mesh = mesh_of()
    with pytest.raises(ValueError, match=r"'\*\*': \"owned\" is for rows of stacks; .* or \"split\" in a dtypes"):
        sharding.plan(LAYOUT, mesh, {"**": "owned"}, form="dtypes")
    with pytest.raises(ValueError, match=r"all parts of a vector need the same rule, but 'layers\.0\.b' has 'whole'"):
        sharding.plan(LAYOUT, mesh, {"layers.0": "whole", "**": "split"}, form="dtypes")
    # Each vector may lie in a way of its own.
    plan = sharding.plan(LAYOUT, mesh, {"**.b": "whole", "**": "split"}, form="dtypes")
    assert {name: each.spec for name, each in plan.params.items()} == {"bfloat16": P(), "float32": P("data")}
    with pytest.raises(ValueError, match=r'use form="stacks" with optim\.per_leaf, or form="tree"'):
        sharding.make_step(loss, optax.lamb(1e-2), plan)
    with pytest.raises(ValueError, match='form must be "tree", "vector" or "stacks", got \'dtype\''):
        sharding.plan(LAYOUT, mesh, {"**": "split"}, form="dtype")
