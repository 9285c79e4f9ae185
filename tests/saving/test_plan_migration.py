"""A migration, end to end: a field renamed, a layer inserted, three arrays merged into one, and training goes on."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from ..zoo import assert_close, assert_same, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Attention(eqx.Module):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    out: jax.Array

    def __call__(self, x):
        return _attend(x, self.query, self.key, self.value) @ self.out


class Merged(eqx.Module):
    qkv: jax.Array
    out: jax.Array

    def __call__(self, x):
        return _attend(x, *jnp.split(self.qkv, 3)) @ self.out


def _attend(x, query, key, value):
    return jax.nn.softmax((x @ query.T) @ (x @ key.T).T) @ (x @ value.T)


class Before(eqx.Module):
    layers: list
    head: jax.Array
    offset: jax.Array = tp.field(trainable=False)

    def __call__(self, x):
        return _run(self.layers, x + self.offset[None]) @ self.head


class After(eqx.Module):
    blocks: list
    offset: jax.Array = tp.field(trainable=False)
    readout: jax.Array

    def __call__(self, x):
        return _run(self.blocks, x + self.offset[None]) @ self.readout


def _run(layers, x):
    for layer in layers:
        x = x + layer(x)
    return x


_RANDOM = np.random.default_rng(3)


def _noise(*shape):
    return jnp.asarray(_RANDOM.normal(0, 0.3, shape).astype(np.float32))


def _before():
    layer = lambda: Attention(*(_noise(4, 4) for _ in range(4)))
    return Before([layer(), layer()], _noise(4, 2), ramp(4))


def _after():
    layer = lambda: Merged(_noise(12, 4), jnp.asarray(np.zeros((4, 4), np.float32)))
    return After([layer(), layer(), layer()], ramp(4), ramp(4, 2))


_X, _Y = _noise(5, 4), _noise(5, 2)


@jax.jit
def _loss(model):
    return jnp.mean((model(_X) - _Y) ** 2)


TX = optim.trainable(optax.adam(0.02))
_THREE = ("query", "key", "value")
# What was layer 1 is block 2 now; the new one in between adds zero.
RENAME = {
    **{tuple(f"layers.{old}.{name}" for name in _THREE): f"blocks.{new}.qkv" for old, new in ((0, 0), (1, 2))},
    "layers.0.**": "blocks.0.**",
    "layers.1.**": "blocks.2.**",
    "head": "readout",
}
TRANSFORM = {left: (lambda *three: jnp.concatenate(three)) for left in RENAME if isinstance(left, tuple)}


@functools.partial(jax.jit, static_argnames="waits")
def _train(model, state, ema, steps, waits=None):
    """Some steps, in which what waits gets no gradient."""
    trained = state.layout if waits is None else state.layout.freeze(waits)

    def step(_, carry):
        params, state, ema = carry
        model = tp.combine(params, rest)
        model, state = optim.step(TX, tp.grad(_loss, trained)(model), state, model)
        return tp.partition(model, state.layout)[0], state, ema.update(model)

    params, rest = tp.partition(model, state.layout)
    params, state, ema = jax.lax.fori_loop(0, steps, step, (params, state, ema))
    return tp.combine(params, rest), state, ema


def test_migration(tmp_path):
    path = tmp_path / "run.safetensors"
    start = _before()
    old, state, ema = _train(start, TX.init(start), tp.Ema(start, 0.9, debias=True), 20)
    saving.save(path, {"model": old, "optimiser": state, "average": ema})
    fresh = _after()
    names = functools.partial(saving.names, path)
    plan = saving.plan(names("model"), fresh, rename=RENAME, transform=TRANSFORM, strict=False)
    assert (plan.missing, plan.unused, plan.disagrees) == (("blocks.1.qkv", "blocks.1.out"), (), ())
    new = plan(names("model"))
    assert new.blocks[1].qkv is fresh.blocks[1].qkv
    np.testing.assert_allclose(_loss(new), _loss(old), rtol=1e-6)
    assert float(_loss(old)) < 0.5 * float(_loss(start))
    new_state = plan.state(names("optimiser"), like=TX.init(new))
    new_ema = plan.average(names("average"), like=tp.Ema(new, 0.9, debias=True))
    assert [int(count) for count in new_state.counts] == [20, 0]
    assert (int(new_ema.count), float(new_ema.weight)) == (20, float(ema.weight))
    np.testing.assert_allclose(_loss(new_ema.average), _loss(ema.average), rtol=1e-6)
    # From the file or from memory is the same.
    assert_same(plan.state(state, like=TX.init(new)), new_state)
    assert_same(plan(old), new)
    # The step after loading, of all layers: to what was there before the new layer is as if it were not.
    step, step_state, _ = _train(new, new_state, new_ema, 1)
    old_step, old_step_state, _ = _train(old, state, ema, 1)
    _assert_goes_on(plan, step, old_step)
    assert_close(plan.state(old_step_state, TX.init(new)).runs[0], step_state.runs[0], 1e-6)
    assert not np.array_equal(step.blocks[1].out, new.blocks[1].out)
    # Three steps in which the new layer waits.
    later, later_state, later_ema = _train(new, new_state, new_ema, 3, waits="blocks.1")
    old_later, old_state, old_ema = _train(old, state, ema, 3)
    _assert_goes_on(plan, later, old_later)
    _assert_goes_on(plan, later_ema.average, old_ema.average)
    assert [int(count) for count in later_state.counts] == [23, 0]
    assert_close(plan.state(old_state, TX.init(new)).runs[0], later_state.runs[0], 1e-6)
    assert_same(later.blocks[1], new.blocks[1])


def _assert_goes_on(plan, new, old):
    """All but the inserted layer."""
    others = lambda model: (model.blocks[0], model.blocks[2], model.readout, model.offset)
    assert_close(others(new), others(plan(old)), 1e-6)
