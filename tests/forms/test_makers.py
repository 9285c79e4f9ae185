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

from ..nets import EXPLICIT, by_optax, mesh_of
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


def model_of():
    """Four parameters in two dtypes."""
    bias = lambda i: ramp(4, dtype=jnp.bfloat16, start=i) / jnp.bfloat16(64)
    layers = [{"b": bias(i), "w": ramp(4, 4, start=i) / 64} for i in range(2)]
    return {"layers": layers, "scale": jnp.ones(4), "steps": jnp.array(3)}


LAYOUT = tp.layout(model_of(), freeze="scale")
BATCH = tuple(np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32))


def loss(model, x, y):
    for each in model["layers"]:
        x = x + 0.1 * jnp.tanh(x @ each["w"] + each["b"].astype(jnp.float32)[None])
    return jnp.mean((x * model["scale"][None] - y) ** 2)


@functools.partial(jax.jit, static_argnums=0)
def after_a_step(tx, model, state):
    """With gradients that depend on where the model is."""
    grads = jax.tree.map(lambda x: jnp.sin(3 * x + 0.5).astype(x.dtype), tp.partition(model, LAYOUT)[0])
    return optim.step(tx, grads, state, model)


def assert_near(got, want, tolerance):
    """Of the trained parameters of two models; bfloat16 has 8 digits."""
    for path, leaf, other in tp.biwalk(got, want, trainable=LAYOUT):
        near = tolerance if leaf.dtype == jnp.float32 else max(tolerance, 1e-2)
        assert leaf.dtype == LAYOUT[path].dtype
        np.testing.assert_allclose(np.asarray(leaf, np.float32), np.asarray(other, np.float32), near, near, path)


def test_it_trains_freezes_and_thaws_as_stacks_do():
    rule = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation()
    txs, models = (dtypes(rule, LAYOUT), optim.trainable(rule, LAYOUT, form="stacks")), [model_of()] * 2
    states = [tx.init(model) for tx, model in zip(txs, models, strict=True)]
    for layout, steps in ((LAYOUT, 3), (LAYOUT.freeze(["layers.0.w", "layers.1.b"]), 2), (LAYOUT, 2)):
        for i, tx in enumerate(txs):
            states[i] = optim.set_trainable(tx, states[i], models[i], layout)
            for _ in range(steps):
                models[i], states[i] = after_a_step(tx, models[i], states[i])
        assert states[0].layout == layout
        assert_near(*models, 1e-5)
    assert len(states[0].runs) > 1


def test_what_is_frozen_waits_and_is_saved_and_a_vector_has_no_holes(tmp_path):
    tx, model = dtypes(optax.adam(1e-2), LAYOUT), model_of()
    model, state = after_a_step(tx, model, tx.init(model))
    shapes_of_mu = lambda state: {key: leaf.shape for key, leaf in state.runs[0][0].mu.items()}
    assert shapes_of_mu(state) == {"bfloat16": (8,), "float32": (32,)}
    frozen = optim.set_trainable(tx, state, model, LAYOUT.freeze("layers.0"))
    assert shapes_of_mu(frozen) == {"bfloat16": (4,), "float32": (16,)}
    saving.save(tmp_path / "run", frozen)
    back = saving.load(tmp_path / "run", jax.tree.map(jnp.zeros_like, frozen))
    assert_same(back, frozen)
    assert back.roles == frozen.roles
    assert_same(optim.set_trainable(tx, frozen, model, LAYOUT), state)


def test_it_lies_over_devices_each_vector_in_a_way_of_its_own(monkeypatch):
    monkeypatch.setitem(_placement.MAKERS, "dtypes", dtypes_of)  # the name of the form in plans
    rule, (whole, rest) = (
        optax.chain(optim.clip_by_global_norm(0.1), optax.adam(1e-2)),
        tp.partition(model_of(), LAYOUT),
    )
    plan_of = functools.partial(sharding.plan, LAYOUT, mesh_of(4, EXPLICIT), form="dtypes")
    plan = plan_of({"**": "split"})
    assert {name: each.spec for name, each in plan.params.items()} == dict.fromkeys(("bfloat16", "float32"), P("data"))
    init, step = sharding.make_step(
        lambda params, restructure, *batch: loss(restructure(params), *batch),
        rule,
        plan,
        average=0.9,
        loss_takes="form",
    )
    params, state = init(model_of())
    after, values = by_optax(lambda params, *batch: loss(tp.combine(params, rest), *batch), rule, whole, [BATCH] * 3)
    for expected in values:
        params, state, value = step(params, state, *BATCH)
        np.testing.assert_allclose(value, expected, 1e-3)
    assert_near(plan.model(params, state), tp.combine(after[-1], rest), 1e-3)
    split = [leaf for leaf in jax.tree.leaves((params, state.rule)) if leaf.ndim]
    assert {leaf.addressable_shards[0].data.size for leaf in split} == {32}
    assert "dtypes, padded to 256 elements over ('data': 4): 784 bytes (16 frozen), 196 on each device" in repr(plan)
    of_each = plan_of({"**.b": "whole", "**": "split"})
    assert {name: each.spec for name, each in of_each.params.items()} == {"bfloat16": P(), "float32": P("data")}
    for rules, words in (
        ({"**": "owned"}, r"'\*\*': \"owned\" is for rows of stacks; .* or \"split\" in a dtypes"),
        ({"layers.0": "whole", "**": "split"}, "of a vector need the same rule, but 'layers.0.b' has 'whole"),
    ):
        with pytest.raises(ValueError, match=words):
            plan_of(rules)
    with pytest.raises(ValueError, match=r'use form="stacks" with optim\.per_leaf, or form="tree"'):
        sharding.make_step(loss, optax.lamb(1e-2), of_each)
