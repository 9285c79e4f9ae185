"""Elements of chains: clipping by the global norm, the average in the state, and one step for several calls."""

import functools
import pickle

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import treeparams as tp
from treeparams import optim

from . import zoo
from .test_optim import fit, mlp
from .zoo import ZOO, Specimen, assert_close, assert_same

pytestmark = pytest.mark.usefixtures("standard_promotion")
specimens = pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO.keys())
shard_map = getattr(jax, "shard_map", None) or __import__("jax.experimental.shard_map", fromlist=["x"]).shard_map


# -- clip_by_global_norm ---------------------------------------------------------------------------------------------


@specimens
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.filterwarnings("ignore:nothing is trained")
def test_clips_what_project_gives(specimen: Specimen, max_norm):
    model = specimen.make()
    layout = specimen.layout(model)
    grads = zoo.gradient_of_loss(layout)(model)
    tx = optim.clip_by_global_norm(max_norm, layout)
    clipped, state = tx.update(grads, tx.init(model), model)
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
        assert_close(ours.update(grads, ours.init(grads))[0], want)  # without a model


def test_the_norm_of_ties_and_of_narrow_gradients():
    shared = jnp.ones(2)
    model = {"a": shared, "b": shared}
    tx = optim.clip_by_global_norm(1.0)
    halves = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([1.0, 2.0])}
    _, state = tx.update(halves, tx.init(model), model)
    np.testing.assert_allclose(state.norm, np.sqrt(20.0), rtol=1e-6)  # not sqrt(10)
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
def test_what_is_not_finite_is_seen_or_dropped(bad):
    model = {"a": jnp.ones(2), "b": jnp.ones(1)}
    grads = {"a": jnp.array([1.0, bad]), "b": jnp.ones(1)}
    tx = optim.clip_by_global_norm(1.0)
    clipped, state = tx.update(grads, tx.init(model), model)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(clipped))
    assert not np.isfinite(state.norm)
    tx = optim.clip_by_global_norm(1.0, nonfinite="zero")
    zeros, state = tx.update(grads, tx.init(model), model)
    assert_same(zeros, jax.tree.map(jnp.zeros_like, model))
    assert int(state.clipped) == 1
    clipped, state = tx.update(model, state, model)
    assert int(state.clipped) == 2
    assert float(tp.global_norm(clipped)) == pytest.approx(1.0)


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


def test_a_declared_frozen_leaf_is_out_wherever_the_clip_stands():
    model = zoo.Norm(jnp.ones(1), jnp.ones(1))
    grads = eqx.filter_grad(lambda model: jnp.sum(3 * model.scale + 100 * model.mean))(model)
    clip = optim.clip_by_global_norm(1.0)
    for tx in (optax.chain(clip, optim.trainable(optax.sgd(1.0))), optim.trainable(optax.chain(clip, optax.sgd(1.0)))):
        updates, _ = tx.update(grads, tx.init(model), model)
        np.testing.assert_allclose(updates.scale, -1.0, rtol=1e-6)
        assert updates.mean is None


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


def test_errors_of_clip(without_type_checks):
    with pytest.raises(TypeError, match="max_norm is a number; for a schedule write"):
        optim.clip_by_global_norm(optax.constant_schedule(1.0))
    model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0, "a"), optax.adam(0.1)))
    with pytest.raises(ValueError, match="this clip leaves 'b' out, which trains in the transformation around it"):
        tx.update(model, tx.init(model), model)
    with pytest.raises(ValueError, match="max_norm must be positive, got -1"):
        optim.clip_by_global_norm(-1)
    with pytest.raises(ValueError, match="max_norm must be positive, got nan"):
        optim.clip_by_global_norm(float("nan"))


@pytest.mark.usefixtures("without_type_checks")
def test_the_message_without_type_checks():
    with pytest.raises(ValueError, match='nonfinite must be "propagate" or "zero", got \'skip\''):
        optim.clip_by_global_norm(1.0, nonfinite="skip")  # pyright: ignore[reportArgumentType]


# -- ema -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "decay"),
    [
        ({}, 0.9),
        ({"debias": True}, 0.9),
        ({"debias": True, "warmup": True}, 0.9),
        ({"warmup": True}, lambda count: 1 - 1 / (count + 2)),
    ],
)
@pytest.mark.parametrize("place", ["after", "within", "flat"])
def test_the_average_in_the_chain_is_that_of_tp_ema(options, decay, place):
    element, rule = optim.ema(decay, **options), optax.adam(0.1)
    tx = {
        "after": lambda: optax.chain(optim.trainable(rule), element),
        "within": lambda: optim.trainable(optax.chain(rule, element)),
        "flat": lambda: optim.flat(optax.chain(rule, element)),
    }[place]()
    model = mlp()
    state, want = tx.init(model), tp.Ema(model, decay, **options)
    for _ in range(4):
        updates, state = tx.update(tp.grad(fit)(model), state, model)
        model = optim.apply_updates(model, updates)
        want = want.update(model)
    got = optim.as_ema(state, model, decay, **options)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert_close(got.update(model).average.layers[0].weight, want.update(model).average.layers[0].weight)


def test_the_average_of_narrow_parameters_does_not_stick():
    model = {"w": jnp.zeros(2, jnp.bfloat16)}
    tx = optax.chain(optim.trainable(optax.sgd(1.0)), optim.ema(0.999))
    _, state = tx.update({"w": -jnp.ones(2, jnp.bfloat16)}, tx.init(model), model)
    model = {"w": jnp.ones(2, jnp.bfloat16)}
    step = lambda _, state: tx.update({"w": jnp.zeros(2, jnp.bfloat16)}, state, model)[1]
    state = jax.lax.fori_loop(0, 999, step, state)
    assert state[1].average["w"].dtype == jnp.float32
    np.testing.assert_allclose(state[1].average["w"], 1 - 0.999**1000, rtol=1e-4)


def test_the_average_knows_ties_and_what_is_frozen():
    shared = jnp.ones(2)
    model = {"a": shared, "b": shared, "frozen": jnp.full(1, 5.0), "n": 3}
    tx = optax.chain(optim.trainable(optax.sgd(1.0), ("a", "b")), optim.ema(0.5, trainable=("a", "b")))
    state = tx.init(model)
    assert state[1].average["b"] is None
    assert state[1].average["frozen"] is None

    @jax.jit
    def step(arrays, state):
        updates, state = tx.update({"a": jnp.ones(2)}, state, {**arrays, "n": 3})
        return optim.apply_updates({**arrays, "n": 3}, updates, state[0].layout), state

    arrays = {name: leaf for name, leaf in model.items() if name != "n"}
    arrays, state = step(arrays, state)
    average = optim.as_ema(state, {**arrays, "n": 3}, 0.5).average
    np.testing.assert_array_equal(average["a"], 0.5)
    assert average["a"] is average["b"]
    np.testing.assert_array_equal(average["frozen"], 5.0)


def test_the_average_of_several_histories():
    model = {"a": jnp.zeros(1), "b": jnp.zeros(1), "c": jnp.zeros(1)}
    tx = optim.trainable(optax.chain(optax.sgd(1.0), optim.ema(0.5)), ("a", "b"))
    grads = jax.tree.map(lambda x: x - 1, model)
    updates, state = tx.update(grads, tx.init(model), model)
    model = optim.apply_updates(model, updates)
    state = optim.set_trainable(tx, state, model, ("b", "c"))
    updates, state = tx.update(grads, state, model)
    model = optim.apply_updates(model, updates)
    ema = optim.as_ema(state, model, 0.5)
    assert_close(ema.average, {"a": jnp.array([0.5]), "b": jnp.array([1.25]), "c": jnp.array([0.5])})
    assert int(ema.count) == 2


def test_errors_of_ema():
    model = {"w": jnp.ones(2)}
    tx = optim.ema(0.9)
    with pytest.raises(ValueError, match=r"needs it: tx.update\(grads, state, model\)"):
        tx.update(model, tx.init(model))
    with pytest.raises(ValueError, match="the average has a parameter at 'w', the model has none there"):
        tx.update({}, tx.init(model), {"v": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"there is no EmaState in the state; put optim.ema"):
        optim.as_ema(optax.adam(0.1).init(model), model, 0.9)
    with pytest.raises(ValueError, match="an average for 'w', the model has no parameter there"):
        optim.as_ema(tx.init(model), {"v": jnp.ones(2)}, 0.9)
    twice = optax.chain(optim.ema(0.9), optim.ema(0.99)).init(model)
    with pytest.raises(ValueError, match="two averages of 'w'; pass the part of it that has the one you mean"):
        optim.as_ema(twice, model, 0.9)
    assert optim.as_ema(twice[1], model, 0.99).average["w"].shape == (2,)
    with pytest.raises(ValueError, match="decay must be between 0 and 1"):
        optim.ema(1.5)


# -- accumulate ------------------------------------------------------------------------------------------------------


def _calls(tx, model, gradients, **extra):
    state, updates = tx.init(model), None
    for i, grads in enumerate(gradients):
        updates, state = tx.update(grads, state, model, **{name: value[i] for name, value in extra.items()})
    return updates, state


@pytest.mark.parametrize(
    "rule", [optax.sgd(1.0), optax.adam(0.1), optax.chain(optim.clip_by_global_norm(0.1), optax.sgd(1.0))]
)
@pytest.mark.parametrize("jit", [False, True])
def test_one_step_with_the_mean(rule, jit):
    model = mlp()
    arrays, static = eqx.partition(model, eqx.is_array)
    gradients = [jax.tree.map(lambda x, i=i: jnp.sin(x + i), arrays) for i in range(3)]
    tx, once = optim.accumulate(rule, 3), optim.trainable(rule)
    update = lambda g, s, a: tx.update(g, s, eqx.combine(a, static))
    update = jax.jit(update) if jit else update
    state = tx.init(model)
    for grads in gradients[:2]:
        updates, state = update(grads, state, arrays)
        assert all(not leaf.any() for leaf in jax.tree.leaves(updates))
    updates, state = update(gradients[2], state, arrays)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 3, *gradients)
    want, inner = once.update(mean, once.init(model), model)
    assert_close(updates, want, 1e-6)
    assert_close(jax.tree.leaves(state.runs[0].inner), jax.tree.leaves(inner.runs[0]), 1e-6)
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.runs[0].total))


def test_parts_of_a_batch_are_the_batch():
    model = mlp()
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    parts = [jnp.linspace(-1, 1, 9).reshape(3, 3), jnp.linspace(0, 2, 3).reshape(1, 3), jnp.ones((2, 3))]
    tx, once = optim.accumulate(optax.adam(0.1), 3, "size"), optim.trainable(optax.adam(0.1))
    updates, _ = _calls(tx, model, [tp.grad(loss)(model, x) for x in parts], size=[len(x) for x in parts])
    want, _ = once.update(tp.grad(loss)(model, jnp.concatenate(parts)), once.init(model), model)
    assert_close(updates, want, 1e-4)


def test_equals_optax_multisteps():
    model = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(0.5)}
    ours = optim.accumulate(optax.adam(0.1), 2)
    plain = optax.MultiSteps(optax.adam(0.1), 2)
    states = [ours.init(model), plain.init(model)]
    for i in range(6):
        grads = jax.tree.map(lambda x, i=i: jnp.cos(x + i), model)
        got, states[0] = ours.update(grads, states[0], model)
        want, states[1] = plain.update(grads, states[1], model)
        assert_close(got, want, 1e-6)


@functools.cache
def _compiled(calls):
    """What takes one step for so many calls, its `update` compiled once for each choice of gradients."""
    tx = optim.accumulate(optax.adam(0.1), calls) if calls > 1 else optim.trainable(optax.adam(0.1))
    return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


@hypothesis.settings(deadline=None, max_examples=25, derandomize=True)
@hypothesis.given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=4))
def test_missing_in_some_calls_is_zero_and_in_all_is_none(present):
    with jax.numpy_dtype_promotion("standard"):
        model = {"a": jnp.ones(2), "b": jnp.ones(3)}
        tx, once = _compiled(len(present)), _compiled(1)
        _, first = once.update(model, once.init(model), model)
        _, state = _calls(tx, model, [model] * len(present))
        mean = {}
        for flags in present:
            grads = {name: leaf for name, leaf, has in zip("ab", model.values(), flags, strict=True) if has}
            updates, state = tx.update(grads, state, model)
            for name, leaf in grads.items():
                mean[name] = mean.get(name, 0) + leaf / len(present)
        want, second = once.update(mean, first, model)
        for name in model:
            expected = jnp.zeros_like(model[name]) if want[name] is None else want[name]
            np.testing.assert_allclose(updates[name], expected, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(state.runs[0].inner), jax.tree.leaves(second.runs[0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_many_leaves_of_which_one_never_has_a_gradient():
    model = {f"{i:02}": jnp.full(1, float(i)) for i in range(19)}
    grads = {name: leaf + 1 for name, leaf in model.items() if name not in ("03", "18")}
    tx = optim.accumulate(optax.adam(0.1), 2)
    _, state = _calls(tx, model, [model, model])
    before = state.runs[0].inner[0]
    for _ in range(2):
        updates, state = tx.update(grads, state, model)
    after = state.runs[0].inner[0]
    still = [name for name in model if np.array_equal(before.nu[name], after.nu[name])]
    assert still == ["03", "18"]
    assert [name for name in model if not updates[name].any()] == ["03", "18"]


@pytest.mark.parametrize("weights", [(3.0, 1.0, 2.0), "examples"])
def test_weights(weights):
    model = {"w": jnp.zeros(1)}
    tx = optim.accumulate(optax.sgd(1.0), 3, weights)
    extra = {"examples": [3, 1, 2]} if weights == "examples" else {}
    updates, _ = _calls(tx, model, [{"w": jnp.full(1, x)} for x in (1.0, 2.0, 4.0)], **extra)
    np.testing.assert_allclose(updates["w"], -(3 * 1 + 2 + 2 * 4) / 6, rtol=1e-6)


def test_calls_without_weight_are_no_step():
    model = {"w": jnp.ones(1)}
    tx = optim.accumulate(optax.adam(0.1), 2, "n")
    _, state = _calls(tx, model, [model, model], n=[1, 1])
    for _ in range(2):
        updates, after = tx.update(model, state, model, n=0)
    np.testing.assert_array_equal(updates["w"], 0)
    updates, after = tx.update(model, after, model, n=0.0)
    np.testing.assert_array_equal(updates["w"], 0)
    assert_same(after.runs[0].inner, state.runs[0].inner)


def test_an_empty_batch_is_no_gradient():
    model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    tx = optim.accumulate(optax.adam(0.1), 2, "n")
    _, state = _calls(tx, model, [model, model], n=[1, 1])
    before = state.runs[0].inner
    updates, state = tx.update({"a": jnp.full(1, jnp.nan), "b": jnp.ones(1)}, state, model, n=0)
    updates, state = tx.update({"a": jnp.ones(1)}, state, model, n=4)
    np.testing.assert_allclose(updates["a"], -0.1, rtol=1e-4)
    np.testing.assert_array_equal(updates["b"], 0)  # its only call had no weight
    assert_same(state.runs[0].inner[0].mu["b"], before[0].mu["b"])


def test_gradients_wider_than_their_leaves_are_summed_as_they_are():
    model = {"w": jnp.zeros(1, jnp.bfloat16)}
    tx = optim.accumulate(optax.sgd(1.0), 2)
    _, state = tx.update({"w": jnp.full(1, 1.001)}, tx.init(model), model)
    np.testing.assert_allclose(state.runs[0].total["w"], 1.001)


def test_the_sum_is_in_float32_and_stable_in_scan():
    model = {"w": jnp.zeros(1, jnp.bfloat16)}
    tx = optim.accumulate(optax.sgd(1.0), 512)
    step = lambda state, _: tx.update({"w": jnp.ones(1, jnp.bfloat16)}, state, model)[::-1]
    state, updates = jax.lax.scan(step, tx.init(model), length=512)
    assert updates["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(updates["w"][-1], -1)  # in bfloat16 the sum would end at 256
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), tx.init(model)
    )
    both = jax.lax.cond(
        True, lambda s: tx.update(model, s, model), lambda s: tx.update(model, s, model), tx.init(model)
    )
    assert jax.tree.structure(both[1]) == jax.tree.structure(state)


def test_the_transformation_gets_extra_arguments():
    tx = optim.accumulate(optax.lbfgs(), 2)
    model = {"w": jnp.array([3.0])}
    loss = lambda model: jnp.sum(model["w"] ** 2)
    state = tx.init(model)
    for _ in range(6):
        value, grads = jax.value_and_grad(loss)(model)
        updates, state = tx.update(grads, state, model, value=value, grad=grads, value_fn=loss)
        model = optim.apply_updates(model, updates)
    assert float(loss(model)) < 1e-4


def test_errors_of_accumulate():
    model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    with pytest.raises(ValueError, match="every must be"):
        optim.accumulate(optax.sgd(1.0), 0)
    for weights in ([1.0], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match=r"weights must be 2 numbers, one per call"):
            optim.accumulate(optax.sgd(1.0), 2, weights)
    tx = optim.accumulate(optax.sgd(1.0), 2, "n")
    with pytest.raises(ValueError, match=r"expected the weight of this call as n=\.\.\."):
        tx.update(model, tx.init(model), model)
    for weight in (-1.0, float("nan"), jnp.ones(2)):
        with pytest.raises(ValueError, match="the weight n must be a number that is not negative"):
            tx.update(model, tx.init(model), model, n=weight)
    tx = optim.trainable(optax.chain(optim.accumulate(optax.adam(1.0), 2), optax.scale(1.0)))
    with pytest.raises(ValueError, match=r"what stands around optim.accumulate leaves these out; let"):
        tx.update({"a": jnp.ones(1)}, tx.init(model), model)


def test_states_pickle():
    model = mlp()
    tx = optax.chain(optim.clip_by_global_norm(1.0), optim.accumulate(optax.adam(0.1), 2), optim.ema(0.9))
    _, state = tx.update(tp.grad(fit)(model), tx.init(model), model)
    assert_same(pickle.loads(pickle.dumps(state)), state, identity=False)
