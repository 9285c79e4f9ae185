"""The canonical gradient and its norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .zoo import Norm, enable_x64, ramp


def test_the_canonical_gradient():
    shared = ramp(2)
    model = {"a": shared, "b": shared, "norm": Norm(ramp(1), ramp(1)), "n": jnp.arange(2), "f": jnp.tanh}
    grads = {"a": jnp.ones(2), "b": 2 * jnp.ones(2), "norm": {"mean": jnp.ones(1)}}
    got = tp.project(model, grads)
    np.testing.assert_array_equal(got["a"], [3.0, 3.0])
    assert (got["b"], got["norm"].scale, got["norm"].mean, got["n"], got["f"]) == (None,) * 5
    zeros = tp.project(model, grads, missing="zeros")
    np.testing.assert_array_equal(zeros["norm"].scale, [0.0])
    assert zeros["norm"].mean is None


@pytest.mark.parametrize("leaf", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
@pytest.mark.parametrize("entry", [jnp.float32, jnp.bfloat16, jnp.complex64, jnp.int32])
def test_each_entry_in_its_leafs_dtype(leaf, entry):
    got = tp.project({"w": ramp(2, dtype=leaf)}, {"w": jnp.array([1, 2], entry)})["w"]
    assert got.dtype == leaf
    np.testing.assert_array_equal(got.real.astype(jnp.float32), [1.0, 2.0])


def test_complex_gradients_are_real_where_the_leaf_is_and_never_conjugated():
    value = jnp.array([1 + 2j], jnp.complex64)
    np.testing.assert_array_equal(tp.project({"w": ramp(1)}, {"w": value})["w"], [1.0])
    np.testing.assert_array_equal(tp.project({"w": 1j * value}, {"w": value})["w"], value)


def test_ties_are_summed_before_they_are_rounded():
    shared = jnp.ones(1, jnp.bfloat16)
    got = tp.project((shared, shared), (jnp.array([256.0]), jnp.array([0.9])))[0]
    assert float(got[0]) == float(jnp.bfloat16(256.9))
    mixed = tp.project((shared, shared), (jnp.array([1.0]), jnp.ones(1, jnp.float16)))[0]
    assert float(mixed[0]) == 2.0


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (jnp.ones(3), ValueError, r"expected float32\[2\] at 'w', got float32\[3\]"),
        (jnp.ones(()), ValueError, r"expected float32\[2\] at 'w'"),
        (0.5, ValueError, r"expected float32\[2\] at 'w', got float of shape \(\)"),
        ("adam", TypeError, "expected an array at 'w', got str"),
    ],
)
def test_another_shape_is_refused(entry, error, message):
    model = {"w": ramp(2)}
    with pytest.raises(error, match=message):
        tp.project(model, {"w": entry})
    with pytest.raises(error, match=message):
        tp.ravel(model)[1].ravel_gradient({"w": entry})


def test_missing_is_checked(without_type_checks):
    with pytest.raises(ValueError, match='missing must be None or "zeros", got 0'):
        tp.project({"w": ramp(2)}, {}, missing=0)


def test_sgd_of_ties_keeps_them_one_array():
    start = ramp(3)
    pair = (start, start)
    for _ in range(3):
        grads = jax.grad(lambda m: 3 * jnp.sum(m[0]) + 13 * jnp.sum(m[1]))(pair)
        np.testing.assert_array_equal(tp.project(pair, grads)[0], jnp.full(3, 16.0))
        pair = tp.maptrainable(lambda x, g: x - 0.1 * g, pair, tp.project(pair, grads))
        assert pair[0] is pair[1]
    np.testing.assert_allclose(pair[0], start - 4.8, 1e-5)


# -- The norm ----------------------------------------------------------------------------------------------------------


def test_the_norm_of_ties_is_that_of_the_sum():
    shared = jnp.zeros(2)
    model = (shared, shared)
    opposite = tp.project(model, (jnp.array([3.0, 0.0]), jnp.array([-3.0, 0.0])))
    assert float(tp.global_norm(opposite)) == 0.0
    w = jnp.array([1.5, 0.0, 0.0])
    assert float(tp.global_norm(tp.project((w, w), (w, 2 * w)))) == 4.5  # not 3.35


@pytest.mark.parametrize(
    ("leaves", "want"),
    [
        ([jnp.ones(1000, jnp.bfloat16)], 1000**0.5),
        ([jnp.full(10, 300, jnp.float16)], 300 * 10**0.5),
        ([jnp.full(4, 1e30)], 2e30),
        ([jnp.array([3e38])], 3e38),
        ([jnp.array([2e38, 1.0])], 2e38),
        ([jnp.array([jnp.finfo(jnp.float32).max])], float(jnp.finfo(jnp.float32).max)),
        ([jnp.array([2e38]), jnp.array([2e38])], 8**0.5 * 1e38),
        ([jnp.full(1, 3e38, jnp.bfloat16)], float(jnp.bfloat16(3e38))),
        ([jnp.full(10_000, 1e30), jnp.ones(3)], 1e32),
        ([jnp.full(10_000, 1e-30)], 1e-28),
        ([jnp.array([1e-40])], 0.0),  # XLA flushes denormals
        ([jnp.full(4, 1e-30)], 2e-30),
        ([jnp.full(4, 6e-8, jnp.float16)], 2 * float(jnp.float16(6e-8))),
        ([jnp.array([3 + 4j], jnp.complex64)], 5.0),
        ([jnp.full(1, 3e30 + 4e30j, jnp.complex64)], 5e30),
        ([jnp.array([3.0]), jnp.zeros((0, 2)), jnp.array(4.0)], 5.0),
        ([jnp.arange(5), jnp.array([True]), jax.random.key(0), "x", 2.0], 0.0),
        ([], 0.0),
        ([jnp.array([jnp.inf, 1.0])], np.inf),
        ([jnp.array([-jnp.inf, jnp.inf])], np.inf),
        ([jnp.array([jnp.nan, 1.0])], np.nan),
        ([jnp.array([jnp.nan]), jnp.array([jnp.inf])], np.nan),
    ],
)
def test_the_norm_in_every_range(leaves, want):
    for norm in (
        tp.global_norm(leaves),
        jax.jit(tp.global_norm)(leaves) if "x" not in leaves else tp.global_norm(leaves),
    ):
        assert norm.dtype == jnp.float32
        assert norm.shape == ()
        np.testing.assert_allclose(norm, want, 1e-6)


def test_the_norm_is_float64_where_a_leaf_is():
    with enable_x64(True):
        leaves = [np.full(4, 1e200), jnp.ones(3, jnp.float32)]
        assert tp.global_norm(leaves).dtype == jnp.float64
        np.testing.assert_allclose(tp.global_norm(leaves), 2e200, 1e-14)


def test_the_gradient_of_the_norm():
    x = jnp.array([3.0, 4.0])
    np.testing.assert_allclose(jax.grad(tp.global_norm)(x), x / 5, 1e-6)
    np.testing.assert_array_equal(jax.grad(tp.global_norm)(jnp.zeros(2)), [0.0, 0.0])
    np.testing.assert_array_equal(
        jax.grad(lambda t: tp.global_norm(t))({"a": jnp.zeros(2), "b": jnp.ones(1)})["b"], [1.0]
    )
    for scale in (1e30, 5e37, 1e-30, 1e-37):
        np.testing.assert_allclose(jax.grad(tp.global_norm)(x * scale), x / 5, 1e-6)
    np.testing.assert_allclose(jax.hessian(tp.global_norm)(x), (jnp.eye(2) - jnp.outer(x, x) / 25) / 5, 1e-5, 1e-6)
    for order in (jax.jacfwd, jax.jacrev):
        assert np.isfinite(order(tp.global_norm)(jnp.zeros(2))).all()


def test_the_norm_under_vmap():
    rows = jnp.stack([jnp.array([3.0, 4.0]) * scale for scale in (1.0, 0.0, 1e30, 1e-30, jnp.inf, jnp.nan)])
    shared = jnp.array([12.0])
    norm = lambda row, shared: tp.global_norm({"row": row, "shared": shared, "large": jnp.zeros(5000) + row[0]})
    want = jnp.stack([norm(row, shared) for row in rows])
    np.testing.assert_allclose(jax.vmap(norm, (0, None))(rows, shared), want, 1e-6)
    both = jax.vmap(jax.vmap(norm, (0, None)), (0, None))(jnp.stack([rows, rows[::-1]]), shared)
    np.testing.assert_allclose(both, jnp.stack([want, want[::-1]]), 1e-6)
    slopes = jax.vmap(jax.grad(lambda row: tp.global_norm(row)))(rows[:4])
    np.testing.assert_allclose(slopes, [[0.6, 0.8], [0.0, 0.0], [0.6, 0.8], [0.6, 0.8]], 1e-6)
    through = jax.grad(lambda rows: jnp.sum(jax.vmap(tp.global_norm)(rows)))(rows[:4])
    np.testing.assert_allclose(through, slopes, 1e-6)
    # One branch is run for the whole batch: a mapped predicate would make a select of both.
    assert str(jax.make_jaxpr(jax.vmap(jax.vmap(tp.global_norm)))(jnp.ones((2, 3, 4)))).count("cond[") == 1


def test_the_norm_over_devices():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    lay = lambda array, *spec: jax.device_put(
        array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    )
    tree = {"w": lay(jnp.full((4, 2), 2.0), "x"), "b": lay(jnp.full(4, 1.0))}
    assert float(tp.global_norm(tree)) == 6.0


def test_eight_bit_floats_beside_others():
    narrow = jnp.ones(2, jnp.float8_e4m3fn)
    assert tp.layout({"a": narrow, "b": ramp(2)}).dtype == jnp.float32
    assert tp.layout({"a": narrow}).dtype == jnp.float8_e4m3fn
    got = tp.project((narrow, narrow), (narrow, jnp.ones(2)))[0]
    np.testing.assert_array_equal(got.astype(jnp.float32), [2.0, 2.0])
    model = {"a": narrow, "b": ramp(2)}
    vector, restructure = tp.ravel(model)
    assert [leaf.dtype for leaf in jax.tree.leaves(restructure(vector))] == [jnp.float8_e4m3fn, jnp.float32]
