"""Clipping by the global norm: plain Optax, within optim.trainable and alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import treeparams as tp
from treeparams import optim

from .. import zoo
from ..zoo import ZOO, assert_close, assert_same, first_devices

pytestmark = pytest.mark.usefixtures("standard_promotion")


def clipped(grads, max_norm=1.0, state=None):
    tx = optim.clip_by_global_norm(max_norm)
    return tx.update(grads, tx.init(grads) if state is None else state)


compiled = jax.jit(clipped)  # with a limit that is traced


@pytest.mark.parametrize("name", ["complex", "bf16 with f32", "same array twice"])
def test_clips_the_gradient_of_tp_grad(name):
    model = ZOO[name].make()
    grads = zoo.gradient_of_loss(ZOO[name].layout(model))(model)
    norm = tp.global_norm(grads)
    below, state = compiled(grads, 0.1)
    assert_close(state.norm, norm, 1e-6)
    assert_close(below, jax.tree.map(lambda x: jnp.asarray(x * (0.1 / norm), x.dtype), grads), 1e-2)
    assert int(state.clipped) == 1
    within, state = compiled(grads, 1e6)
    assert_same(within, grads)  # bit for bit
    assert int(state.clipped) == 0


def test_the_norm_of_ties_and_of_narrow_gradients():
    shared = jnp.array([1.0, 2.0])
    model, halves = {"a": shared, "b": shared}, {"a": jnp.array([1.0, 2.0]), "b": jnp.array([1.0, 2.0])}
    within = optim.trainable(optim.clip_by_global_norm(1.0))
    _, state = within.update(halves, within.init(model), model)
    np.testing.assert_allclose(state.clip.norm, np.sqrt(20.0), rtol=1e-6)  # not sqrt(10)
    for dtype, value, norm in ((jnp.bfloat16, 1.0, 31.6228), (jnp.float16, 300.0, 9486.83)):
        below, state = compiled({"w": np.full(1000, value, dtype)})
        np.testing.assert_allclose(state.norm, norm, rtol=1e-4)
        np.testing.assert_allclose(below["w"].astype(jnp.float32), 1 / np.sqrt(1000), rtol=1e-2)
        assert below["w"].dtype == dtype
    below, _ = compiled({"w": np.ones(2, jnp.float8_e4m3fn)}, 0.5)
    assert below["w"].dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(below["w"].astype(jnp.float32), 0.35, rtol=0.1)


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["outside", "jit"])
def test_a_limit_that_comes_as_an_array_may_reach_zero(compiled):
    falling = optax.linear_schedule(1.0, 0.0, 2)
    tx = optax.inject_hyperparams(optim.clip_by_global_norm)(max_norm=falling)
    grads, update = {"w": jnp.array([3.0, 4.0]), "none": jnp.zeros(1)}, compiled(tx.update)
    state = tx.init(grads)
    for limit in (1.0, 0.5, 0.0, 0.0):
        below, state = update(grads, state)
        np.testing.assert_allclose(below["w"], limit * np.array([0.6, 0.8]), 1e-6)
    for limit in (jnp.array(0.0), jnp.array(-1.0)):
        below = compiled(lambda grads, limit: clipped(grads, limit)[0])(grads, limit)
        np.testing.assert_array_equal(below["w"], [0, 0])
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        optim.clip_by_global_norm(0.0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen(bad):
    fine = {"a": jnp.ones(2), "b": jnp.ones(1)}
    below, state = clipped(fine | {"a": jnp.array([1.0, bad])})
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(below))
    assert not np.isfinite(state.norm)
    assert (int(state.clipped), int(state.nonfinite)) == (0, 1)
    below, state = clipped(fine, state=state)
    assert (int(state.clipped), int(state.nonfinite)) == (1, 1)
    assert float(tp.global_norm(below)) == pytest.approx(1.0)


@pytest.mark.parametrize("spread", [1.0, 1e25])
def test_across_devices(spread):
    mesh = Mesh(np.array(first_devices(4)), ("data",))
    grads = {"w": jnp.arange(1.0, 9.0) * spread}
    tx = optim.clip_by_global_norm(1.0, axis_name="data")

    def local(grads):
        clipped, state = tx.update(tp.copy(grads), tx.init(grads), grads)
        return clipped, state.norm

    spec = PartitionSpec("data")
    below, norm = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec())))(grads)
    np.testing.assert_allclose(norm, np.sqrt(204.0) * spread, rtol=1e-6)
    np.testing.assert_allclose(below["w"], np.arange(1.0, 9.0) / np.sqrt(204.0), rtol=1e-6)


def test_errors_of_clip(without_type_checks):
    for bad, error, match in (
        (optax.constant_schedule(1.0), TypeError, "max_norm must be a number, got function; for a schedule write"),
        (-1, ValueError, "max_norm must be positive, got -1"),
        (float("nan"), ValueError, "max_norm must be positive, got nan"),
        ("1", TypeError, "max_norm must be a number, got"),
        (None, TypeError, "max_norm must be a number, got"),
    ):
        with pytest.raises(error, match=match):
            optim.clip_by_global_norm(bad)
