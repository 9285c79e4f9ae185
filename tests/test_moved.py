"""What a step can change, read from its program, against what steps change when they are run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .zoo import ramp

# -- The law: what is told unmoved is the same, bit for bit, when the step is run --------------------------------------

MODEL = {name: ramp(3) for name in ("held", "passed", "plain", "stopped", "unused", "zeroed")}
RULES = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "lion": optax.lion(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 10)),
}


def loss(model):
    parts = model | {"stopped": jax.lax.stop_gradient(model["stopped"]), "unused": 0.0}
    return jnp.sum(sum(parts.values()) ** 2)


def by_hand(tx):
    def step(model, state):
        updates, state = tx.update(jax.grad(loss)(model), state, model)
        return optax.apply_updates(model, updates), state

    return tx, step


def scanned(tx):
    tx, step = by_hand(optax.MultiSteps(tx, 1))
    return tx, lambda model, state: jax.lax.scan(lambda carry, _: (step(*carry), None), (model, state), None, 1)[0]


def ours(tx):
    tx = optim.trainable(tx, "!held")
    return tx, lambda model, state: optim.step(tx, tp.grad(loss, state.layout)(model), state, model)


WAYS = [(name, by_hand) for name in RULES] + [(name, way) for name in ("adamw", "rmsprop") for way in (scanned, ours)]
ZEROS = {"stopped", "unused"}
# Told to move though they do not: zero gradients, over a root of what may be infinite, a norm, a rate that is computed.
IN_DOUBT = {"rmsprop", "clip", "schedule"}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("rule", "way"), WAYS)
def test_what_is_told_unmoved_does_not_change(rule, way):
    tx, step = way(
        optax.chain(
            optax.masked(RULES[rule], {name: name != "passed" for name in MODEL}),  # hands its gradient on
            optax.masked(optax.set_to_zero(), {name: name == "zeroed" for name in MODEL}),
        )
    )
    # A state that has seen gradients of everything.
    state = jax.tree.map(lambda x: x + 0.01 if eqx.is_inexact_array(x) else x, tx.init(MODEL))
    told = set(tp.moved(step)(MODEL, state).paths)
    with jax.disable_jit():
        model, _ = step(MODEL, state)
    changed = {path for path in MODEL if not np.array_equal(model[path], MODEL[path])}
    assert changed <= told
    assert told - changed == (ZEROS if rule in IN_DOUBT else set())
    assert {"passed", "plain"} <= changed
    assert ("held" in changed, "zeroed" in changed) == (way is not ours, False)
