"""A form that the library does not have, one vector for each dtype, is all that a form is: only its maker is here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving
from treeparams._forms.block import Block
from treeparams._forms.form import Form
from treeparams.optim._state import ModelTransformation
from treeparams.optim._step import Rule

from ..zoo import assert_same, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion", "without_type_checks")


def dtypes_of(layout):
    """One vector for each dtype."""
    members = {}
    for number, slot in enumerate(layout.slots):
        members.setdefault(str(slot.dtype), []).append(number)
    block_of = lambda slots: Block.vector(slots, slots[0].dtype)
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


@functools.partial(jax.jit, static_argnums=0)
def after_a_step(tx, model, state):
    """With gradients that depend on where the model is."""
    grads = jax.tree.map(lambda x: jnp.sin(3 * x + 0.5).astype(x.dtype), tp.partition(model, LAYOUT)[0])
    return optim.step(tx, grads, state, model)


def assert_near(got, want):
    """Of the trained parameters of two models; bfloat16 has 8 digits."""
    for path, leaf, other in tp.biwalk(got, want, trainable=LAYOUT):
        near = 1e-5 if leaf.dtype == jnp.float32 else 1e-2
        assert leaf.dtype == LAYOUT[path].dtype
        np.testing.assert_allclose(np.asarray(leaf, np.float32), np.asarray(other, np.float32), near, near, path)


def test_it_trains_freezes_thaws_and_is_saved_as_other_forms_are(tmp_path):
    rule = optax.adam(1e-2)
    txs, models = (dtypes(rule, LAYOUT), optim.trainable(rule, LAYOUT, form="stacks")), [model_of()] * 2
    states = [tx.init(model) for tx, model in zip(txs, models, strict=True)]
    frozen = LAYOUT.freeze(["layers.0.w", "layers.1.b"])
    for layout, shapes in (
        (LAYOUT, {"bfloat16": (8,), "float32": (32,)}),
        (frozen, {"bfloat16": (4,), "float32": (16,)}),  # without holes
        (LAYOUT, {"bfloat16": (4,), "float32": (16,)}),  # the other history is of fewer steps
    ):
        for i, tx in enumerate(txs):
            states[i] = optim.set_trainable(tx, states[i], models[i], layout)
            for _ in range(2):
                models[i], states[i] = after_a_step(tx, models[i], states[i])
        assert_near(*models)
        assert states[0].layout == layout
        assert {key: leaf.shape for key, leaf in states[0].runs[0][0].mu.items()} == shapes
        saving.save(tmp_path / "run", states[0])
        back = saving.load(tmp_path / "run", jax.tree.map(jnp.zeros_like, states[0]))
        assert_same(back, states[0])
        assert back.roles == states[0].roles
    assert len(states[0].runs) == 2
