"""Clipping by the global norm: plain Optax, within optim.trainable and alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import treeparams as tp
from treeparams import optim

from . import zoo
from .zoo import ZOO, Specimen, assert_close, assert_same

pytestmark = pytest.mark.usefixtures("standard_promotion")
specimens = pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO.keys())
shard_map = getattr(jax, "shard_map", None) or __import__("jax.experimental.shard_map", fromlist=["x"]).shard_map


@specimens
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.filterwarnings("ignore:nothing is trained")
def test_clips_the_gradient_of_tp_grad(specimen: Specimen, max_norm):
    model = specimen.make()
    layout = specimen.layout(model)
    grads = zoo.gradient_of_loss(layout)(model)
    tx = optim.clip_by_global_norm(max_norm)
    clipped, state = tx.update(grads, tx.init(grads))
    norm = tp.global_norm(grads)
    assert_close(state.norm, norm, 1e-6)
    assert int(state.clipped) == int(norm > max_norm)
    if norm <= max_norm:
        assert_same(clipped, grads)  # bit for bit
    else:
        assert_close(tp.global_norm(clipped), jnp.float32(max_norm), 1e-2)


def test_equals_optax_where_its_norm_is_right():
    grads = {"a": jnp.array([3.0, -4.0]), "b": jnp.array([[12.0]])}
    for max_norm in (1.0, 13.0, 20.0):
        ours, plain = optim.clip_by_global_norm(max_norm), optax.clip_by_global_norm(max_norm)
        got, _ = ours.update(grads, ours.init(grads), grads)
        want, _ = plain.update(grads, plain.init(grads))
        assert_close(got, want)


def test_the_norm_of_ties_and_of_narrow_gradients():
    shared = jnp.ones(2)
    model = {"a": shared, "b": shared}
    halves = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([1.0, 2.0])}
    within = optim.trainable(optim.clip_by_global_norm(1.0))
    _, state = within.update(halves, within.init(model), model)
    np.testing.assert_allclose(optim.clip_state(state).norm, np.sqrt(20.0), rtol=1e-6)  # not sqrt(10)
    tx = optim.clip_by_global_norm(1.0)
    for dtype, value, norm in ((jnp.bfloat16, 1.0, 31.6228), (jnp.float16, 300.0, 9486.83)):
        wide = {"w": jnp.full(1000, value, dtype)}
        clipped, state = tx.update(wide, tx.init(wide), wide)
        np.testing.assert_allclose(state.norm, norm, rtol=1e-4)
        assert clipped["w"].dtype == dtype
        np.testing.assert_allclose(clipped["w"].astype(jnp.float32), 1 / np.sqrt(1000), rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_traced_limit(dtype):
    tx = optax.inject_hyperparams(optim.clip_by_global_norm)(max_norm=1.0)
    model = {"w": jnp.full(4, 2.0, dtype)}
    clipped, state = jax.jit(tx.update)(model, tx.init(model), model)
    assert clipped["w"].dtype == dtype
    np.testing.assert_allclose(clipped["w"].astype(jnp.float32), 0.5, rtol=1e-2)
    clipped, _ = tx.update(model, optim.adjust(state, max_norm=100.0), model)
    assert_same(clipped, model)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen(bad):
    model = {"a": jnp.ones(2), "b": jnp.ones(1)}
    grads = {"a": jnp.array([1.0, bad]), "b": jnp.ones(1)}
    tx = optim.clip_by_global_norm(1.0)
    clipped, state = tx.update(grads, tx.init(model), model)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(clipped))
    assert not np.isfinite(state.norm)
    assert int(state.clipped) == 1
    clipped, state = tx.update(model, state, model)
    assert int(state.clipped) == 2
    assert float(tp.global_norm(clipped)) == pytest.approx(1.0)


@pytest.mark.parametrize("limit", [np.inf, 1e39, jnp.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_an_infinite_limit_clips_nothing(limit, dtype):
    model = {"a": jnp.array([3.0, 4.0], dtype), "b": jnp.zeros(1, dtype)}
    tx = optim.clip_by_global_norm(limit)
    clipped, state = tx.update(model, tx.init(model), model)
    assert_same(clipped, model)
    assert (float(state.norm), int(state.clipped)) == (5.0, 0)
    injected = optax.inject_hyperparams(optim.clip_by_global_norm)(max_norm=1.0)
    state = optim.adjust(injected.init({"a": jnp.ones(2)}), max_norm=np.inf)
    assert_same(jax.jit(injected.update)({"a": jnp.ones(2)}, state)[0], {"a": jnp.ones(2)})
    slope = jax.grad(lambda x: tx.update({"a": x}, tx.init({"a": x}))[0]["a"].sum())(jnp.zeros(2))
    np.testing.assert_array_equal(slope, 1.0)


def test_apply_if_finite_holds_all_other_state():
    model = {"a": jnp.ones(2)}
    tx = optim.trainable(optax.apply_if_finite(optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.1)), 5))
    _, state = tx.update(model, tx.init(model), model)
    updates, after = tx.update({"a": jnp.array([jnp.inf, 1.0])}, state, model)
    np.testing.assert_array_equal(updates["a"], 0)
    assert_same(after.runs[0].inner_state, state.runs[0].inner_state)


def test_clipping_again_changes_nothing():
    model = {"a": jnp.arange(1.0, 9.0), "b": jnp.full((3, 3), -0.1)}
    tx = optim.clip_by_global_norm(0.7)
    once, state = tx.update(model, tx.init(model), model)
    again, _ = jax.lax.scan(lambda grads, _: (tx.update(grads, state, model)[0], None), once, length=10_000)
    assert_close(again, once, 1e-6)


def test_zero_gradients_stay_zero():
    model = {"a": jnp.zeros(2)}
    tx = optim.clip_by_global_norm(1.0)
    clipped, state = tx.update(model, tx.init(model), model)
    assert_same(clipped, model)
    assert (float(state.norm), int(state.clipped)) == (0.0, 0)


def test_a_declared_frozen_leaf_is_out():
    model = zoo.Norm(jnp.ones(1), jnp.ones(1))
    grads = eqx.filter_grad(lambda model: jnp.sum(3 * model.scale + 100 * model.mean))(model)
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(1.0)))
    updates, _ = tx.update(grads, tx.init(model), model)
    np.testing.assert_allclose(updates.scale, -1.0, rtol=1e-6)
    assert updates.mean is None


def test_before_the_model_it_clips_the_tree_it_is_given():
    model = {"a": jnp.ones(1), "f": jnp.tanh, "n": 3}
    grads = {"a": jnp.array([5.0]), "f": None, "n": None}
    tx = optax.chain(optim.clip_by_global_norm(1.0), optim.trainable(optax.sgd(1.0)))
    model, state = optim.step(tx, grads, tx.init(model), model)
    np.testing.assert_allclose(model["a"], 0.0, atol=1e-6)
    assert float(optim.clip_state(state).norm) == 5.0


@pytest.mark.parametrize("spread", [1.0, 1e25])
def test_across_devices(spread):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    grads = {"w": jnp.arange(1.0, 9.0) * spread}
    tx = optim.clip_by_global_norm(1.0, axis_name="data")

    def local(grads):
        clipped, state = tx.update(grads, tx.init(grads), grads)
        return clipped, state.norm

    spec = PartitionSpec("data")
    clipped, norm = shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec()))(grads)
    np.testing.assert_allclose(norm, np.sqrt(204.0) * spread, rtol=1e-6)
    np.testing.assert_allclose(clipped["w"], np.arange(1.0, 9.0) / np.sqrt(204.0), rtol=1e-6)


def test_the_state_of_several_histories_and_of_none():
    model, tx = {"a": jnp.ones(1), "b": jnp.ones(1)}, optim.trainable(optim.clip_by_global_norm(0.5), "a")
    _, state = tx.update(model, tx.init(model), model)
    state = optim.set_trainable(tx, state, model)
    _, state = jax.jit(tx.update)(model, state, model)
    clip = optim.clip_state(state)
    assert (float(clip.norm), int(clip.clipped)) == (pytest.approx(np.sqrt(2)), 2)
    state = optim.set_trainable(tx, tx.init(model), model, "a")
    for choice, steps in (("a", 3), ("b", 1), (None, 1)):
        state = optim.set_trainable(tx, state, model, choice)
        for _ in range(steps):
            _, state = tx.update(model, state, model)
    assert int(optim.clip_state(state).clipped) == 4
    with pytest.raises(ValueError, match=r"there is no optim.clip_by_global_norm in this state"):
        optim.clip_state(optax.adam(0.1).init(model))


def test_errors_of_clip(without_type_checks):
    with pytest.raises(TypeError, match="max_norm is a number; for a schedule write"):
        optim.clip_by_global_norm(optax.constant_schedule(1.0))
    with pytest.raises(ValueError, match="max_norm must be positive, got -1"):
        optim.clip_by_global_norm(-1)
    with pytest.raises(ValueError, match="max_norm must be positive, got nan"):
        optim.clip_by_global_norm(float("nan"))
    for bad in ("1", None):
        with pytest.raises(TypeError, match="max_norm is a number, got"):
            optim.clip_by_global_norm(bad)


def test_a_limit_that_is_an_array_within_jit():
    limit = jnp.array(1.0)
    clip = lambda grads: optim.clip_by_global_norm(limit).update(grads, optim.clip_by_global_norm(limit).init(grads))[0]
    np.testing.assert_allclose(jax.jit(clip)({"a": jnp.array([3.0, 4.0])})["a"], [0.6, 0.8], rtol=1e-6)


def test_narrow_floats_keep_their_dtype():
    grads = {"a": jnp.array([1.0, 1.0], jnp.float8_e4m3fn)}
    tx = optim.clip_by_global_norm(0.5)
    clipped, _ = tx.update(grads, tx.init(grads))
    assert clipped["a"].dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(clipped["a"].astype(jnp.float32), 0.35, rtol=0.1)
