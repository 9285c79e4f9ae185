"""The two halves of a model; the canonical gradient, and its norm."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp

from ..zoo import Norm, enable_x64, filled, ramp


def model():
    shared, table = ramp(2), jnp.arange(3)
    return {"a": shared, "b": [shared, Norm(ramp(1), ramp(4))], "f": jnp.tanh, "n": (table, table), "p": 5}


def test_the_halves():
    whole = model()
    params, rest = tp.partition(whole)
    assert params["a"] is whole["a"]
    assert params["b"][1].scale is whole["b"][1].scale
    assert [params["b"][0], params["b"][1].mean, params["f"], *params["n"], params["p"]] == [None] * 6
    assert [id(leaf) for leaf in jax.tree.leaves(rest)] == [id(whole["b"][1].mean), id(whole["n"][0])]
    assert rest.layout == tp.layout(whole)
    assert repr(rest).startswith("Rest(2 frozen arrays, 2 values, Layout(2 slots")


def test_the_mask_goes_into_equinox_and_optax_of_a_callable_model_too():
    whole = filled(eqx.nn.Linear, 2, 1)  # which fails if Optax calls it
    mask = tp.layout(whole, freeze="bias").mask
    trained, frozen = eqx.partition(whole, mask)
    assert trained.weight is whole.weight
    assert (trained.bias, frozen.weight) == (None, None)
    tx = optax.add_decayed_weights(0.5, mask=mask)
    updates, _ = tx.update(jax.tree.map(np.zeros_like, whole), tx.init(whole), whole)
    np.testing.assert_allclose(updates.weight, 0.5 * whole.weight, 1e-6)
    np.testing.assert_array_equal(updates.bias, [0])


def test_donation():
    whole = tp.copy(model())
    more = lambda tree: jax.tree.map(lambda x: x + 1, tree)
    step = jax.jit(lambda params, rest: (more(params), more(rest)), donate_argnums=(0, 1))
    got = tp.combine(*step(*step(*tp.partition(whole))))
    np.testing.assert_allclose(got["a"], ramp(2) + 2, 1e-6)
    assert got["a"] is got["b"][0]
    assert got["n"][0] is got["n"][1]
    assert whole["a"].is_deleted()
    assert whole["n"][0].is_deleted()  # the rest of a partition holds what the model held


def test_rests_with_other_values_are_other_programs():
    traces = []
    f = jax.jit(lambda p, r: traces.append(1) or tp.combine(p, r)["x"] * tp.combine(p, r)["p"])
    for p in (2, 2.0, 2, 3):
        f(*tp.partition({"x": ramp(2), "p": p}))
    assert len(traces) == 3
    structure = lambda p: jax.tree.structure(tp.partition({"p": p})[1])
    assert structure([1, 2]) == structure([1, 2]) != structure([1, 2.0])


# -- The canonical gradient --------------------------------------------------------------------------------------------


def test_the_canonical_gradient():
    grads = {"a": np.ones(2, "f"), "b": [np.full(2, 2, "f"), {"mean": np.ones(4, "f")}]}
    got = tp.project(model(), grads)
    np.testing.assert_array_equal(got["a"], [3.0, 3.0])
    assert [got["b"][0], got["b"][1].scale, got["b"][1].mean, *got["n"], got["f"]] == [None] * 6
    zeros = tp.project(model(), grads, missing="zeros")["b"][1]
    assert (zeros.scale.tolist(), zeros.mean) == ([0.0], None)


@pytest.mark.parametrize("leaf", [np.float32, jnp.bfloat16, np.complex64, jnp.float8_e4m3fn])
@pytest.mark.parametrize("entry", [np.float32, np.complex64, np.int32])
def test_each_entry_in_its_leafs_dtype(leaf, entry):
    got = tp.project({"w": ramp(2, dtype=leaf)}, {"w": np.array([1, 2]).astype(entry)})["w"]
    assert got.dtype == leaf
    np.testing.assert_array_equal(np.asarray(got).astype(np.complex64), [1.0, 2.0])


def test_complex_gradients_are_real_where_the_leaf_is_and_never_conjugated():
    value = np.array([1 + 2j], np.complex64)
    np.testing.assert_array_equal(tp.project(ramp(1), value), [1.0])
    np.testing.assert_array_equal(tp.project(1j * value, value), value)


def test_ties_are_summed_before_they_are_rounded_one_object_twice_too():
    shared = ramp(1, dtype=jnp.bfloat16)
    first, second, half = np.array([256.0], "f"), np.array([0.9], "f"), np.ones(1, np.float16)
    for grads, want in (((first, second), 256.9), ((first, half), 257), ((second, second), 1.8)):
        assert float(tp.project((shared, shared), grads)[0][0]) == float(jnp.bfloat16(want))


# -- Its norm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaves", "want"),
    [
        ([np.ones(1000, jnp.bfloat16)], 1000**0.5),
        ([np.full(1, np.finfo(np.float32).max)], float(np.finfo(np.float32).max)),
        ([np.full(10_000, 1e30, "f"), np.ones(3, "f")], 1e32),
        ([np.full(4, 6e-8, np.float16)], 2 * float(np.float16(6e-8))),
        ([np.complex64([3e30 + 4e30j])], 5e30),
        ([np.arange(5), np.array([True]), jax.random.key(0), "x", 2.0], 0.0),
        ([], 0.0),
        ([np.float32([-np.inf, 1.0])], np.inf),
        ([np.float32([np.nan]), np.float32([np.inf])], np.nan),
    ],
)
def test_the_norm_in_every_range(leaves, want):
    norm = tp.global_norm(leaves)
    assert (norm.dtype, norm.shape) == (jnp.float32, ())
    np.testing.assert_allclose(norm, want, 1e-6)


def test_the_norm_is_float64_where_a_leaf_is():
    with enable_x64(True):
        norm = tp.global_norm([np.full(4, 1e200), np.ones(3, np.float32)])
        assert norm.dtype == jnp.float64
        np.testing.assert_allclose(norm, 2e200, 1e-14)


def test_the_gradient_of_the_norm():
    @jax.jit
    def derivatives(x):
        beside_zeros = jax.grad(tp.global_norm)({"a": jnp.zeros(2), "b": jnp.ones(1)})["b"]
        orders = jax.grad, jax.jacfwd, jax.jacrev, jax.hessian
        return *[order(tp.global_norm)(x) for order in orders], beside_zeros

    x = np.float32([3.0, 4.0])
    for scale in (1e30, 5e37, 1e-30, 1e-37, 1):
        *slopes, hessian, beside_zeros = derivatives(x * np.float32(scale))
        np.testing.assert_allclose(slopes, [x / 5] * 3, 1e-6)
    np.testing.assert_allclose(hessian, (np.eye(2) - np.outer(x, x) / 25) / 5, 1e-5, 1e-6)
    np.testing.assert_array_equal(beside_zeros, [1.0])
    slope, *others, _, _ = derivatives(np.zeros(2, "f"))
    np.testing.assert_array_equal(slope, [0.0, 0.0])
    assert np.isfinite(others).all()


def test_the_norm_under_vmap():
    scales = np.array([1.0, 0.0, 1e30, 1e-30, np.inf, np.nan])
    rows = (scales[:, None] * [3, 4]).astype(np.float32)
    norm = lambda row: tp.global_norm({"row": row, "shared": np.float32([12.0]), "large": jnp.zeros(500) + row[0]})
    run = jax.jit(lambda both: (jax.vmap(jax.vmap(norm))(both), jax.vmap(jax.grad(tp.global_norm))(both[0, :4])))
    norms, slopes = run(np.stack([rows, rows[::-1]]))
    want = np.sqrt((25 + 500 * 9) * scales**2 + 12**2)
    np.testing.assert_allclose(norms, [want, want[::-1]], 1e-6)
    np.testing.assert_allclose(slopes, [[0.6, 0.8], [0.0, 0.0], [0.6, 0.8], [0.6, 0.8]], 1e-6)
    # One branch is run for the whole batch: a mapped predicate would make a select of both.
    assert str(jax.make_jaxpr(jax.vmap(jax.vmap(tp.global_norm)))(np.ones((2, 3, 4), "f"))).count("cond[") == 1
