"""The canonical gradient and its norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from ..zoo import Norm, enable_x64, ramp


def test_the_canonical_gradient():
    shared = ramp(2)
    model = {"a": shared, "b": shared, "norm": Norm(ramp(1), ramp(1)), "n": np.arange(2), "f": jnp.tanh}
    grads = {"a": np.ones(2, "f"), "b": np.full(2, 2, "f"), "norm": {"mean": np.ones(1, "f")}}
    got = tp.project(model, grads)
    np.testing.assert_array_equal(got["a"], [3.0, 3.0])
    assert (got["b"], got["norm"].scale, got["norm"].mean, got["n"], got["f"]) == (None,) * 5
    zeros = tp.project(model, grads, missing="zeros")["norm"]
    assert (zeros.scale.tolist(), zeros.mean) == ([0.0], None)


@pytest.mark.parametrize("leaf", [np.float32, jnp.bfloat16, np.float16, np.complex64, jnp.float8_e4m3fn])
@pytest.mark.parametrize("entry", [np.float32, jnp.bfloat16, np.complex64, np.int32])
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


@pytest.mark.parametrize(
    ("leaves", "want"),
    [
        ([np.ones(1000, jnp.bfloat16)], 1000**0.5),
        ([np.full(1, np.finfo(np.float32).max)], float(np.finfo(np.float32).max)),
        ([np.full(10_000, 1e30, "f"), np.ones(3, "f")], 1e32),
        ([np.float32([1e-40])], 0.0),  # XLA flushes denormals
        ([np.full(4, 6e-8, np.float16)], 2 * float(np.float16(6e-8))),
        ([np.complex64([3e30 + 4e30j])], 5e30),
        ([np.float32([3.0]), np.zeros((0, 2), "f"), np.full((), 4.0, "f")], 5.0),
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
    x = np.float32([3.0, 4.0])
    slope, hessian = jax.jit(jax.grad(tp.global_norm)), jax.jit(jax.hessian(tp.global_norm))
    np.testing.assert_array_equal(slope(np.zeros(2, "f")), [0.0, 0.0])
    for scale in (1, 1e30, 5e37, 1e-30, 1e-37):
        np.testing.assert_allclose(slope(x * np.float32(scale)), x / 5, 1e-6)
    np.testing.assert_array_equal(jax.grad(tp.global_norm)({"a": np.zeros(2, "f"), "b": np.ones(1, "f")})["b"], [1.0])
    np.testing.assert_allclose(hessian(x), (np.eye(2) - np.outer(x, x) / 25) / 5, 1e-5, 1e-6)
    assert all(np.isfinite(order(tp.global_norm)(np.zeros(2, "f"))).all() for order in (jax.jacfwd, jax.jacrev))


def test_the_norm_under_vmap():
    rows = np.stack([np.float32([3.0, 4.0]) * np.float32(scale) for scale in (1.0, 0.0, 1e30, 1e-30, np.inf, np.nan)])
    shared = np.float32([12.0])
    norm = jax.jit(lambda row, shared: tp.global_norm({"row": row, "shared": shared, "large": jnp.zeros(500) + row[0]}))
    want = np.stack([norm(row, shared) for row in rows])
    both = jax.vmap(jax.vmap(norm, (0, None)), (0, None))(np.stack([rows, rows[::-1]]), shared)
    np.testing.assert_allclose(both, np.stack([want, want[::-1]]), 1e-6)
    slopes = jax.vmap(jax.grad(tp.global_norm))(rows[:4])
    np.testing.assert_allclose(slopes, [[0.6, 0.8], [0.0, 0.0], [0.6, 0.8], [0.6, 0.8]], 1e-6)
    # One branch is run for the whole batch: a mapped predicate would make a select of both.
    assert str(jax.make_jaxpr(jax.vmap(jax.vmap(tp.global_norm)))(np.ones((2, 3, 4), "f"))).count("cond[") == 1
