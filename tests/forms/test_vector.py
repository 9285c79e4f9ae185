"""The vector: what goes in, what comes out, what is refused."""

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .. import zoo
from ..zoo import assert_same, enable_x64, filled, ramp

MIXED = {
    "bf16": ramp(3, dtype=jnp.bfloat16),
    "c64": ramp(2, dtype=jnp.complex64) * 1j,
    "f16": ramp(2, 2, dtype=jnp.float16),
    "int": jnp.array([2**24 + 1]),
}


def test_the_dtype_of_the_vector():
    assert tp.ravel(MIXED, "bf16", jnp.float32)[0].dtype == jnp.float32
    assert tp.ravel({"w": ramp(2)}, dtype=float)[0].dtype == jnp.float32  # JAX's dtypes
    with pytest.warns(UserWarning, match="is float32 and not float64, because jax_enable_x64 is not set"):
        assert tp.ravel({"w": ramp(2)}, dtype=np.float64)[0].dtype == jnp.float32
    # A gradient in float32 is not rounded to the leaf's dtype on its way.
    _, restructure = tp.ravel({"w": ramp(4, dtype=jnp.bfloat16)}, dtype=jnp.float32)
    fine = np.full(4, 1 + 2**-12, np.float32)
    np.testing.assert_array_equal(restructure.ravel_gradient({"w": fine}), fine)
    weak, restructure = tp.ravel({"a": jnp.array(1.0), "b": jnp.array(2.0)})
    assert [leaf.weak_type for leaf in (weak, *restructure(weak).values())] == [False] * 3
    with enable_x64(True):
        model = MIXED | {"f64": jnp.array([1 / 3], jnp.float64)}
        vector, restructure = tp.ravel(model)
        assert vector.dtype == jnp.complex128
        assert_same(restructure(vector), model)
        assert tp.ravel(ramp(2), dtype="float64")[0].dtype == jnp.float64


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16])
def test_vectors_of_numpy_and_of_other_floating_dtypes(dtype):
    model = {"w": ramp(2, dtype=jnp.bfloat16), "v": ramp(1)}
    vector, restructure = tp.ravel(model)
    got = restructure(np.asarray(vector).astype(dtype))
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [jnp.float32, jnp.bfloat16]
    np.testing.assert_allclose(got["v"], model["v"], 1e-2)


TREE = {"a": ramp(2), "b": ramp(1), "n": 3}


REFUSED = [
    (lambda r: r(np.ones(4, "f")), ValueError, r"shape \(3,\) .* got shape \(4,\)"),
    (lambda r: jax.eval_shape(r, np.ones(4, "f")), ValueError, r"shape \(3,\) .* got shape \(4,\)"),
    (lambda r: r(np.ones((3, 1), "f")), ValueError, r"got shape \(3, 1\); map over a stack .* with jax.vmap"),
    (lambda r: tp.ravel({"n": 3})[1](np.ones(1, "f")), ValueError, r"shape \(0,\) .* got shape \(1,\)"),
    (lambda r: r(np.arange(3)), TypeError, r"got int\d\d; convert it with vector.astype\(float32\)"),
    (lambda r: r(np.ones(3, np.complex64)), TypeError, "got complex64, and no parameter is .*; pass vector.real"),
    (lambda r: r([1.0, 2.0, 3.0]), TypeError, "got list"),
    (lambda r: r.ravel({"a": ramp(2)}), ValueError, "2 trained parameters, found none for 'b'"),
    (lambda r: r.ravel(TREE | {"a": ramp(3)}), ValueError, r"expected float32\[2\] at 'a', got float32\[3\]"),
    (lambda r: r.ravel(TREE | {"d": ramp(1)}), ValueError, "entry at 'd', where the model has no leaf"),
    (lambda _: tp.ravel(TREE, dtype=jnp.int32), TypeError, "must be floating or complex, got int32"),
    (lambda _: tp.ravel(MIXED, dtype=jnp.float32), TypeError, "'c64' is complex64, which a vector of float32"),
    (lambda _: tp.ravel(TREE, dtype=np.complex64), TypeError, "no parameter is complex, so the .* be complex64"),
    (lambda _: tp.ravel(TREE, pad_to=0), ValueError, "pad_to must be a whole number .* at least 1, got 0"),
    # It is not the 1 that is known by now.
    (lambda _: tp.ravel(TREE, pad_to=True), ValueError, "pad_to must be a whole number .* at least 1, got True"),
]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(("use", "error", "message"), REFUSED)
@pytest.mark.filterwarnings("ignore:nothing is trained")
def test_what_is_refused(use, error, message):
    _, restructure = tp.ravel(TREE)
    with pytest.raises(error, match=message):
        use(restructure)


def test_ravel_reads_any_tree_with_the_slots():
    shared = ramp(2)
    vector, restructure = tp.ravel({"a": shared, "b": shared, "c": ramp(1)})
    got = restructure.ravel({"a": 2 * shared, "b": 3 * shared, "c": ramp(1)})  # values: never asks
    np.testing.assert_array_equal(got[:2], 2 * shared)
    np.testing.assert_array_equal(restructure.ravel({"b": shared, "c": ramp(1)}), vector)


def test_programs_made_ahead_of_time_from_shapes_and_for_elsewhere():
    mlp, x = filled(eqx.nn.MLP, 2, 1, 3, 1), np.ones(2, "f")
    vector, restructure = tp.ravel(mlp)
    layout = tp.layout(eqx.filter_eval_shape(eqx.nn.MLP, 2, 1, 3, 1, key=jax.random.key(0)))
    assert layout == restructure.layout
    of_shape = jax.ShapeDtypeStruct((layout.size,), layout.dtype)
    lowered = jax.jit(lambda v, r, x: r(v)(x)).lower(of_shape, restructure, jax.ShapeDtypeStruct((2,), "float32"))
    np.testing.assert_allclose(lowered.compile()(vector, restructure, x), mlp(x), 1e-6)

    weights = [ramp(2, 2, start=k) for k in range(17)]  # so many that they share kernels on a CPU
    vector, restructure = tp.ravel(weights)
    of = jax.jit(lambda v: (restructure(v), jax.grad(lambda v: jnp.sum(restructure(v)[3]))(v)))
    got, gradient = jax.export.export(of, platforms=("cpu", "cuda", "tpu"))(vector).call(vector)
    assert_same(got, weights)
    np.testing.assert_array_equal(gradient, np.repeat(np.arange(17) == 3, 4))


def test_padding_never_leaks():
    model = {"a": ramp(3), "b": ramp(2)}
    (vector, restructure), (plain, unpadded) = tp.ravel(model, pad_to=4), tp.ravel(model)
    assert (vector.shape, restructure.layout.size) == ((8,), 5)
    assert "padded to 8" in repr(restructure)
    noisy = np.append(plain, np.full(3, np.nan, "f"))
    assert_same(restructure(noisy), model)
    assert_same(dict(restructure.view(noisy)), model)
    gradient = jax.grad(lambda v: zoo.loss(restructure(v)))(noisy)
    np.testing.assert_array_equal(gradient, np.append(jax.grad(lambda v: zoo.loss(unpadded(v)))(plain), [0, 0, 0]))
    np.testing.assert_array_equal(restructure.view(vector).at["**"].set(1.0), [1, 1, 1, 1, 1, 0, 0, 0])


def test_an_option_means_what_it_says_at_each_call():
    model = {"a": ramp(3), "b": ramp(2, dtype=jnp.bfloat16)}
    padded = tp.ravel(model, dtype=jnp.bfloat16, pad_to=np.int64(4))[1].layout
    vector, restructure = tp.ravel(model, padded)
    assert (vector.shape, vector.dtype) == ((5,), jnp.float32)
    assert padded == tp.layout(model) == restructure.layout


@pytest.mark.parametrize("leaves", [1, 16])
def test_a_vector_that_programs_cannot_address_is_refused_by_name(leaves):
    message = r"of 4,294,967,296 elements is longer than the 2,147,483,647 .*; use stacks, tp.stack"
    model = [jax.ShapeDtypeStruct((2**32 // leaves,), "float32")] * leaves
    edge = [jax.ShapeDtypeStruct((2**31 - 1,), "float32")]
    shape_of = lambda model, pad_to=1: jax.eval_shape(lambda model: tp.ravel(model, pad_to=pad_to)[0], model).shape
    assert tp.layout(model).size == 2**32
    for ravel in (tp.ravel, shape_of):
        with pytest.raises(ValueError, match=message):
            ravel(model)
    assert shape_of(edge) == (2**31 - 1,)
    with pytest.raises(ValueError, match="a vector of 2,147,483,648 elements"):
        shape_of(edge, pad_to=2)
