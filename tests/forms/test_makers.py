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


def assert_near(got, want, tolerance=1e-5):
    """Of the trained parameters of a model; bfloat16 has 8 digits."""
    for path, leaf in tp.trainables(got, LAYOUT).items():
        near = tolerance if leaf.dtype == jnp.float32 else max(tolerance, 1e-2)
        assert leaf.dtype == LAYOUT[path].dtype
        np.testing.assert_allclose(np.asarray(leaf, np.float32), np.asarray(want[path], np.float32), near, near, path)


RULES = {
    "clip": optax.chain(optim.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "several steps": optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
}


def test_it_trains_freezes_and_thaws():
    tx, model = dtypes(RULES["several steps"], LAYOUT), model_of()
    state = tx.init(model)
    by_hand = {path: np.asarray(leaf, np.float32) for path, leaf in tp.trainables(model, LAYOUT).items()}
    momentum, waiting = dict.fromkeys(by_hand, 0.0), {path: [] for path in by_hand}
    for layout, steps in ((LAYOUT, 3), (LAYOUT.freeze(["layers.0.w", "layers.1.b"]), 2), (LAYOUT, 2)):
        state = optim.set_trainable(tx, state, model, layout)
        for _ in range(steps):
            model, state = after_a_step(tx, model, state)
            for path in layout.paths:  # what is frozen waits, with the gradient that has no second one yet
                waiting[path].append(np.sin(3 * by_hand[path] + 0.5))
                if len(waiting[path]) == 2:
                    momentum[path] = 0.9 * momentum[path] + sum(waiting[path]) / 2
                    by_hand[path], waiting[path] = by_hand[path] - 0.1 * momentum[path], []
        assert state.layout == layout
        assert_near(model, by_hand)
    assert len(state.runs) > 1


def test_what_is_frozen_waits_and_is_saved_and_a_vector_has_no_holes(tmp_path):
    tx, model = dtypes(optax.adam(1e-2), LAYOUT), model_of()
    state = tx.init(model)
    for _ in range(3):
        model, state = after_a_step(tx, model, state)
    shapes_of_mu = lambda state: {key: leaf.shape for key, leaf in state.runs[0][0].mu.items()}
    assert shapes_of_mu(state) == {"bfloat16": (8,), "float32": (32,)}
    updates, _ = tx.update({"layers": [{"w": jnp.ones((4, 4))}]}, state, model)
    assert np.all(updates["layers"][1]["w"] != 0)
    frozen = optim.set_trainable(tx, state, model, LAYOUT.freeze("layers.0"))
    assert shapes_of_mu(frozen) == {"bfloat16": (4,), "float32": (16,)}
    saving.save(tmp_path / "run", {"model": model, "state": frozen})
    back = saving.load(tmp_path / "run", jax.tree.map(jnp.zeros_like, {"model": model, "state": frozen}))
    assert_same(back, {"model": model, "state": frozen})
    assert back["state"].roles == frozen.roles
    assert_same(optim.set_trainable(tx, frozen, model, LAYOUT), state)


# -- Over devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "takes"), [("clip", EXPLICIT, "form"), pytest.param("several steps", AUTO, "model", marks=LONG)]
)
def test_it_lies_over_devices(name, kind, takes, in_plans):
    rule, (whole, rest) = RULES[name], tp.partition(model_of(), LAYOUT)
    plan = sharding.plan(LAYOUT, mesh_of(4, kind), {"**": "split"}, form="dtypes")
    assert {name: each.spec for name, each in plan.params.items()} == dict.fromkeys(("bfloat16", "float32"), P("data"))
    of = loss if takes == "model" else lambda params, restructure, *batch: loss(restructure(params), *batch)
    init, step = sharding.make_step(of, rule, plan, average=0.9, loss_takes=takes)
    params, state = init(model_of())
    after, values = by_optax(lambda params, *batch: loss(tp.combine(params, rest), *batch), rule, whole, [BATCH] * 3)
    for expected in values:
        params, state, value = step(params, state, *BATCH)
        np.testing.assert_allclose(value, expected, 1e-3)
    assert_near(plan.model(params, state), tp.trainables(tp.combine(after[-1], rest), LAYOUT), 1e-3)
    split = [leaf for leaf in jax.tree.leaves((params, state.rule)) if leaf.ndim]
    assert {leaf.addressable_shards[0].data.size for leaf in split} == {32}
    assert "dtypes, padded to 256 elements over ('data': 4): 784 bytes (16 frozen), 196 on each device" in repr(plan)


def test_what_it_cannot_be_over_devices(in_plans):
    plan_of = functools.partial(sharding.plan, LAYOUT, mesh_of())
    for rules, form, words in (
        ({"**": "owned"}, "dtypes", r"'\*\*': \"owned\" is for rows of stacks; .* or \"split\" in a dtypes"),
        (
            {"layers.0": "whole", "**": "split"},
            "dtypes",
            r"of a vector need the same rule, but 'layers\.0\.b' has 'whole",
        ),
        ({"**": "split"}, "dtype", 'form must be "tree", "vector" or "stacks", got \'dtype\''),
    ):
        with pytest.raises(ValueError, match=words):
            plan_of(rules, form=form)
    # Each vector may lie in a way of its own.
    plan = plan_of({"**.b": "whole", "**": "split"}, form="dtypes")
    assert {name: each.spec for name, each in plan.params.items()} == {"bfloat16": P(), "float32": P("data")}
    with pytest.raises(ValueError, match=r'use form="stacks" with optim\.per_leaf, or form="tree"'):
        sharding.make_step(loss, optax.lamb(1e-2), plan)
