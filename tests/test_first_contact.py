"""What somebody writes on the first day, from the README and the how-to pages alone, from start to end."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .long import some
from .zoo import filled

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Normalise(eqx.Module):
    mean: jax.Array
    std: jax.Array

    def __call__(self, x):
        return (x - self.mean) / self.std


class QNet(eqx.Module):
    """The values of all tokens as the next one; the head is the embedding transposed."""

    embed: jax.Array
    normalise: Normalise = tp.field(trainable=False)
    hidden: eqx.nn.Linear
    head: jax.Array = tp.field(tied_to="embed", transform=jnp.transpose)

    def __call__(self, token):
        return jnp.tanh(self.hidden(self.normalise(self.embed[token]))) @ self.head


def make_qnet():
    normalise = Normalise(*[np.full(8, number, np.float32) for number in (0.1, 1.5)])
    embed = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    return jax.device_put(tp.tie(QNet(embed, normalise, filled(eqx.nn.Linear, 8, 8), embed.T.copy())))


def temporal_difference(online, target, key):
    """On a ring of six tokens; the action is the next token, and a step to the right one is worth 1."""
    token, action = jax.random.randint(key, (2, 32), 0, 6)
    value = jax.vmap(online)(token)[jnp.arange(32), action]
    ahead = jax.vmap(target)(action).max(axis=1)
    reward = (action == (token + 1) % 6).astype(jnp.float32)
    return jnp.mean((value - jax.lax.stop_gradient(reward + 0.5 * ahead)) ** 2)


JITS = {"jax.jit": jax.jit, "tp.jit, donated": tp.jit(donate="all")}


@pytest.mark.parametrize("name", some(JITS, ["jax.jit"]))
def test_a_target_network_with_a_tied_embedding_and_frozen_statistics(name):
    tx = optim.trainable(optax.adam(2e-2))

    @JITS[name]
    def step(online, target, state, key):
        value, grads = tp.value_and_grad(temporal_difference, state.layout)(online, target, key)
        assert grads.head is None
        assert grads.normalise.mean is None
        online, state = optim.step(tx, grads, state, online)
        return online, tp.ema(target, online, decay=0.9), state, value

    online = make_qnet()
    start = jax.tree.map(np.array, online)  # a donated array is gone
    target, state = tp.copy(online), tx.init(online)
    values = []
    for key in jax.random.split(jax.random.key(1), 60):
        before = np.array(target.embed)
        online, target, state, value = step(online, target, state, key)
        values.append(float(value))

    assert np.mean(values[-5:]) < 0.2 * np.mean(values[:5])
    best = jax.jit(lambda net, token: jax.vmap(net)(token).argmax(axis=1))(online, np.arange(6))
    np.testing.assert_array_equal(best, (np.arange(6) + 1) % 6)
    np.testing.assert_allclose(target.embed, 0.9 * before + 0.1 * np.asarray(online.embed), atol=1e-6)
    for net in (online, target):
        np.testing.assert_array_equal(net.head, np.asarray(net.embed).T)
        assert not np.allclose(net.embed, start.embed, atol=1e-2)
        np.testing.assert_array_equal(net.normalise.mean, start.normalise.mean)
        np.testing.assert_array_equal(net.normalise.std, start.normalise.std)
