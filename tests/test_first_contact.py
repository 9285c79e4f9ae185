"""What somebody writes on the first day, from the README and the how-to pages alone: two programs, start to end."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .zoo import filled

LIMIT = 4.9  # of the global norm

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Normalise(eqx.Module):
    mean: jax.Array
    std: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x - self.mean) / self.std


class QNet(eqx.Module):
    """The values of all tokens as the next one; the head is the embedding transposed."""

    embed: jax.Array
    normalise: Normalise = tp.field(trainable=False)
    hidden: eqx.nn.Linear
    head: jax.Array = tp.field(tied_to="embed", transform=jnp.transpose)

    def __call__(self, token: jax.Array) -> jax.Array:
        return jnp.tanh(self.hidden(self.normalise(self.embed[token]))) @ self.head


def make_qnet() -> QNet:
    normalise = Normalise(*[jax.device_put(np.full(8, number, np.float32)) for number in (0.1, 1.5)])
    embed = jax.device_put(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    return tp.tie(QNet(embed, normalise, filled(eqx.nn.Linear, 8, 8), jnp.zeros((8, 6))))


def temporal_difference(online: QNet, target: QNet, key: jax.Array) -> jax.Array:
    """On a ring of six tokens; the action is the next token, and a step to the right one is worth 1."""
    token, action = jax.random.randint(key, (2, 32), 0, 6)
    value = jax.vmap(online)(token)[jnp.arange(32), action]
    ahead = jax.vmap(target)(action).max(axis=1)
    reward = (action == (token + 1) % 6).astype(jnp.float32)
    return jnp.mean((value - jax.lax.stop_gradient(reward + 0.5 * ahead)) ** 2)


@pytest.mark.parametrize("compiled", [jax.jit, tp.jit(donate="all")], ids=["jax.jit", "tp.jit, donated"])
def test_a_target_network_with_a_tied_embedding_and_frozen_statistics(compiled: Callable[..., Any]):
    tx = optim.trainable(optax.adam(2e-2))

    @compiled
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

    assert np.isfinite(values).all()
    assert np.mean(values[-5:]) < 0.2 * np.mean(values[:5])
    best = jax.jit(lambda net, token: jax.vmap(net)(token).argmax(axis=1))(online, np.arange(6))
    np.testing.assert_array_equal(best, (np.arange(6) + 1) % 6)
    np.testing.assert_allclose(target.embed, 0.9 * before + 0.1 * np.asarray(online.embed), atol=1e-6)
    for net in (online, target):
        np.testing.assert_array_equal(net.head, np.asarray(net.embed).T)
        assert not np.allclose(net.embed, start.embed, atol=1e-2)
        np.testing.assert_array_equal(net.normalise.mean, start.normalise.mean)
        np.testing.assert_array_equal(net.normalise.std, start.normalise.std)


class Net(eqx.Module):
    trunk: eqx.nn.MLP
    head: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.trunk(x))


def mean_square(model: Callable[[jax.Array], jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def norm_of(grads: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads)))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def test_fine_tuning_thaws_the_trunk_and_keeps_what_was_learned_of_the_head():
    net = Net(filled(eqx.nn.MLP, 3, 8, 8, 1), filled(eqx.nn.Linear, 8, 1, seed=1))
    x = np.random.default_rng(2).normal(size=(64, 3)).astype(np.float32)
    y = 2 * x.sum(axis=1, keepdims=True)
    adamw = optax.adamw(1e-2, weight_decay=0.1)
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(LIMIT), adamw), "!trunk")

    @tp.jit
    def step(net, state):
        value, grads = tp.value_and_grad(mean_square, state.layout)(net, x, y)
        net, state = optim.step(tx, grads, state, net)
        return net, state, value, norm_of(grads)

    def train(net, state, steps):
        history = []
        for _ in range(steps):
            net, state, *numbers = step(net, state)
            history.append(numbers)
        return net, state, *np.array(history).T

    pretrained, state = net.trunk, tx.init(net)
    net, state, _, norms = train(net, state, 30)
    clip = state.clip
    assert bits(net.trunk) == bits(pretrained)
    assert 0 < clip.clipped == (norms > LIMIT).sum() < 30
    np.testing.assert_allclose(clip.norm, norms[-1], rtol=1e-6)

    learned = state.runs[0][1]
    state = optim.set_trainable(tx, state, net)
    assert bits(state.runs[0][1]) == bits(learned)
    assert state.clip.clipped == clip.clipped

    # The next step by plain Optax: one norm over all, the head with its moments, the trunk with fresh ones.
    @eqx.filter_jit
    def by_hand(net, learned):
        grads = eqx.filter_grad(mean_square)(net, x, y)
        grads = jax.tree.map(lambda grad: grad * jnp.minimum(1.0, LIMIT / norm_of(grads)), grads)
        for part in ("head", "trunk"):
            mask = tp.layout(net, part).mask
            params = eqx.filter(net, mask)
            state = learned if part == "head" else adamw.init(params)
            updates, _ = adamw.update(eqx.filter(grads, mask), state, params)
            net = eqx.apply_updates(net, updates)
        return net

    expected = by_hand(net, learned)
    net, state, (before,), (norm,) = train(net, state, 1)
    assert not tp.diff(net, expected, atol=1e-6)
    assert not any(old == new for old, new in zip(bits(net.trunk), bits(pretrained), strict=True))
    np.testing.assert_allclose(state.clip.norm, norm, rtol=1e-6)

    net, state, values, more = train(net, state, 29)
    assert 0 < (more > LIMIT).sum() < 29
    assert state.clip.clipped == clip.clipped + (norm > LIMIT) + (more > LIMIT).sum()
    assert values[-1] < 0.5 * before
