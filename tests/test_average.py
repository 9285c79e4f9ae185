"""Copies and averages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .zoo import ZOO, Norm, as_data, assert_same, enable_x64, pattern, ramp


def ids(tree):
    return {id(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")}


@pytest.mark.parametrize("name", ZOO)
def test_a_copy_is_equal_and_shares_nothing(name):
    model = ZOO[name].make()
    got = tp.copy(model)
    assert_same(got, model)
    assert not ids(got) & ids(model)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(model), strict=True):
        if isinstance(ours, jax.Array) and ours.size:
            assert as_data(ours).unsafe_buffer_pointer() != as_data(theirs).unsafe_buffer_pointer()


TOLERANCE = {np.float32: 1e-6, jnp.bfloat16: 1e-2, np.float16: 1e-3, np.complex64: 1e-6}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_step(dtype):
    average, model = {"w": ramp(4, dtype=dtype)}, {"w": ramp(4, dtype=dtype, start=3.0)}
    old, new = (np.asarray(each["w"]).astype(np.complex128) for each in (average, model))
    jitted = jax.jit(lambda a, m, d: tp.ema(a, m, decay=d))
    for decay in (0.0, 0.9, 1.0, jnp.float32(0.9), np.float64(0.9)):
        for got in (tp.ema(average, model, decay=decay), jitted(average, model, decay)):
            assert got["w"].dtype == dtype
            want = old + (1 - float(decay)) * (new - old)
            np.testing.assert_allclose(np.asarray(got["w"]).astype(np.complex128), want, TOLERANCE[dtype])


def test_ties_and_declarations_are_those_of_the_average():
    shared = ramp(2)
    average = {"a": shared, "b": shared, "norm": Norm(ramp(1), ramp(1))}
    model = {"a": 3 * shared, "b": 5 * shared, "norm": {"scale": ramp(1, start=2), "mean": ramp(1, start=7)}}
    got = tp.ema(average, model, decay=0.5)
    assert got["a"] is got["b"]
    np.testing.assert_allclose(got["a"], 2 * shared, 1e-6)  # the value at the slot's own path
    np.testing.assert_array_equal(got["norm"].mean, model["norm"]["mean"])


def buffers_model(scale):
    return {
        "w": ramp(1) * scale,
        "norm": Norm(ramp(1), ramp(2) * scale),
        "n": np.arange(2) * scale,
        "flag": np.array([scale > 1]),
        "key": jax.random.key(scale),
        "f": jnp.tanh,
        "p": 0.5 * scale,
    }


@pytest.mark.parametrize("policy", ["copy", "keep", "average"])
@pytest.mark.parametrize("jitted", [False, True])
def test_policies_for_what_is_not_trained(policy, jitted):
    average, model = buffers_model(1), buffers_model(3)
    got = (tp.jit(tp.ema) if jitted else tp.ema)(average, model, decay=0.5, buffers=policy)
    source = average if policy == "keep" else model
    for name in ("n", "flag", "key"):
        np.testing.assert_array_equal(as_data(got[name]), as_data(source[name]))
        assert got[name] is not model[name]
    mean = average["norm"].mean * 2 if policy == "average" else source["norm"].mean
    np.testing.assert_allclose(got["norm"].mean, mean, 1e-6)
    assert (got["f"], got["p"]) == (jnp.tanh, 0.5)
    assert got["norm"].mean is not model["norm"].mean


def test_policies_by_where():
    average, model = buffers_model(1), buffers_model(3)
    got = tp.ema(average, model, decay=0.5, buffers={"**": "keep", Norm: "average", "n": "copy"})
    np.testing.assert_allclose(got["norm"].mean, 2 * average["norm"].mean, 1e-6)
    np.testing.assert_array_equal(got["n"], model["n"])
    np.testing.assert_array_equal(got["flag"], average["flag"])


def test_buffers_keep_the_dtypes_of_the_average():
    average = {"w": ramp(2), "c": ramp(2), "n": jnp.array(3)}
    narrow = {"w": ramp(2, dtype=jnp.bfloat16), "c": ramp(2, dtype=jnp.bfloat16), "n": 4}
    got = tp.ema(average, narrow, decay=0.5, trainable="w")
    assert (got["c"].dtype, got["n"].dtype, int(got["n"])) == (jnp.float32, jnp.int32, 4)
    of_ema = jax.eval_shape(lambda e: e.update(narrow).average, tp.Ema(average, 0.9, trainable="w"))
    assert (of_ema["c"].dtype, of_ema["n"].dtype) == (jnp.float32, jnp.int32)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"decay": 1.5}, "decay must be between 0 and 1, got 1.5"),
        ({}, {"decay": np.ones(2)}, r"decay must be a scalar, got shape \(2,\)"),
        ({"w": np.ones(5, "f")}, {}, r"expected float32\[1\] at 'w', got float32\[5\]"),
        ({"w": ramp(1, dtype=np.complex64)}, {}, r"expected a real float32 at 'w', got complex64\[1\]"),
        ({"w": None}, {}, "trained parameters, found none for 'w'"),
        ({"n": None}, {}, r"average has at 'n' \(shape \(2,\); nothing\); write buffers=\"keep\""),
        ({"n": np.arange(3)}, {}, r"at 'n' \(shape \(2,\); shape \(3,\)\)"),
        ({"extra": np.ones(2)}, {}, "entry at 'extra', where the model has no leaf"),
        ({}, {"buffers": "mean"}, 'buffers must be "copy", "keep" or "average"'),
        ({}, {"buffers": {"m": "keep"}}, "'m' selects nothing"),
        ({}, {"buffers": {"w": "keep"}}, "'w' selects no frozen or integer array, only 'w'"),
    ],
)
def test_bad_input(change, options, message, without_type_checks):
    with pytest.raises((TypeError, ValueError), match=message):
        tp.ema(buffers_model(1), {**buffers_model(3), **change}, **{"decay": 0.5} | options)


def test_donating_the_model_leaves_the_average_alive():
    shared = ramp(8)
    model = {"a": shared, "b": shared, "n": jnp.arange(3)}
    average = tp.copy(model)
    step = tp.jit(lambda m, a: (tp.maptrainable(lambda x: x + 1, m), tp.ema(a, m, decay=0.5)), donate="all")
    model, average = step(*step(model, average))
    assert model["a"] is model["b"]
    assert average["a"] is average["b"]
    np.testing.assert_allclose(average["a"], ramp(8) + 0.5, 1e-6)
    assert shared.is_deleted()


# -- Ema ---------------------------------------------------------------------------------------------------------------


def test_bfloat16_averages_do_not_stick():
    start, ones = {"w": np.zeros(2, jnp.bfloat16)}, {"w": np.ones(2, jnp.bfloat16)}

    def step(carry, _):
        plain, carried = carry
        return (tp.ema(plain, ones, decay=0.999), carried.update(ones)), None

    (plain, carried), _ = jax.lax.scan(step, (start, tp.Ema(start, 0.999)), None, length=5000)
    assert float(plain["w"][0]) < 0.6
    want = 1 - 0.999**5000
    np.testing.assert_allclose(carried.shadow[0], want, 1e-4)
    assert carried.average["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(carried.average["w"], np.float32), want, 1e-2)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("decay", [0.9, lambda count: 1 - 1 / (2.0 + jnp.asarray(count, jnp.float32))])
def test_the_average_is_that_of_its_definition(debias, warmup, decay):
    first, *models = [{"w": ramp(3, start=float(i**2 % 7)), "n": np.array(i), "f": jnp.tanh} for i in range(5)]
    ema = tp.Ema(first, decay, debias=debias, warmup=warmup)
    shadow = np.zeros(3) if debias else np.asarray(first["w"], np.float64)
    weight = 0.0
    for count, model in enumerate(models):
        ema = ema.update(model)
        d = float(decay(count)) if callable(decay) else decay
        d = min(d, (1 + count) / (10 + count)) if warmup else d
        shadow = d * shadow + (1 - d) * np.asarray(model["w"], np.float64)
        weight = d * weight + (1 - d)
        np.testing.assert_allclose(ema.average["w"], shadow / weight if debias else shadow, 1e-5)
        np.testing.assert_allclose(ema.weight, weight, 1e-5)
        assert ema.average["n"] == model["n"]
        assert int(ema.count) == count + 1


@pytest.mark.parametrize("debias", [False, True])
def test_before_the_first_update_the_average_is_the_model_and_it_is_not_trained(debias):
    model = ZOO["same array twice"].make()
    ema = tp.Ema(model, 0.9, debias=debias)
    assert_same(ema.average, model)
    assert not ids(ema.average) & ids(model)
    assert tp.layout(ema).paths == ()


@pytest.mark.parametrize(
    "name", ["functions and static fields", "same array twice", "transposed tie", "bf16 with f32", "complex"]
)
def test_one_structure_in_scan_and_jit(name):
    model = ZOO[name].make()
    ema = tp.Ema(model, 0.9, trainable=ZOO[name].layout(model))
    eager = ema.update(model).update(model)
    scanned, _ = jax.lax.scan(lambda ema, _: (ema.update(model), None), ema, None, length=2)
    jitted = jax.jit(lambda ema: ema.update(model), donate_argnums=0)(ema.update(model))
    for other in (scanned, jitted):
        assert jax.tree.structure(other) == jax.tree.structure(ema)
        assert pattern(jax.tree.leaves(other.average)) == pattern(jax.tree.leaves(eager.average))
        for a, b in zip(other.shadow, eager.shadow, strict=True):
            np.testing.assert_allclose(a, b, 1e-5)
    kinds = ["complex64" if "complex" in str(slot.dtype) else "float32" for slot in ema.rest.layout.slots]
    assert [str(leaf.dtype) for leaf in ema.shadow] == kinds
    with enable_x64(True):
        wide = tp.Ema({"w": np.ones(2)}, 0.9).update({"w": np.zeros(2)})
        np.testing.assert_allclose(wide.average["w"], 0.9, 1e-15)


def test_ema_refuses_what_ema_refuses(without_type_checks):
    with pytest.raises(ValueError, match="decay must be between 0 and 1, got -1"):
        tp.Ema({"w": ramp(2)}, -1.0)
    with pytest.raises(ValueError, match="at 'w', got float32"):
        tp.Ema({"w": ramp(2)}, jnp.float32(0.5)).update({"w": ramp(3)})
    with pytest.raises(TypeError, match="decay of an Ema is static; pass a function of the count"):
        jax.jit(lambda d: tp.Ema({"w": ramp(2)}, d).count)(0.5)
