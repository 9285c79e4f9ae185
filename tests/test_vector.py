"""The vector: what goes in, what comes out, what is refused."""

import pickle

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .zoo import ZOO, Norm, assert_same, enable_x64, ramp

EVERYTHING = {
    "bf16": ramp(3, dtype=jnp.bfloat16),
    "c64": ramp(2, dtype=jnp.complex64) * 1j,
    "f16": ramp(2, 2, dtype=jnp.float16),
    "f32": ramp(3, 1),
    "int": jnp.array([2**24 + 1]),
    "key": jax.random.key(0),
    "none": None,
    "raw": jax.random.PRNGKey(0),
    "tanh": jnp.tanh,
}


def test_every_kind_of_leaf_comes_back_bit_for_bit():
    vector, restructure = tp.ravel(EVERYTHING)
    assert (vector.shape, vector.dtype) == ((12,), jnp.complex64)
    assert restructure.layout.paths == ("bf16", "c64", "f16", "f32")
    assert_same(restructure(vector), EVERYTHING)
    with enable_x64(True):
        model = EVERYTHING | {"f64": jnp.array([1 / 3], jnp.float64)}
        assert tp.ravel(model)[0].dtype == jnp.complex128
        for options in ({}, {"dtype_groups": True}, {"bucket": 0}, {"bucket": 2, "pad_to": 4}):
            vectors, restructure = tp.ravel(model, **options)
            assert_same(restructure(vectors), model)


@pytest.mark.parametrize("leaf", [ramp(3), np.ones(3, np.float32), ramp(3, 1), ramp()])
def test_a_fresh_buffer_always(leaf):
    vector, restructure = tp.ravel(leaf)
    assert vector is not leaf
    if isinstance(leaf, jax.Array):
        assert vector.unsafe_buffer_pointer() != leaf.unsafe_buffer_pointer()
    jax.jit(lambda v: v + 1, donate_argnums=0)(vector)
    assert np.isfinite(np.asarray(leaf)).all()
    assert restructure.ravel(leaf) is not restructure.ravel(leaf)


def test_weak_types_do_not_survive():
    for model in (jnp.array(1.0), {"a": jnp.array(1.0), "b": jnp.array(2.0)}):
        vector, restructure = tp.ravel(model)
        leaves = jax.tree.leaves(restructure(vector))
        assert not vector.weak_type
        assert leaves
        assert not any(leaf.weak_type for leaf in leaves)


def test_the_dtype_of_the_vector():
    with jax.numpy_dtype_promotion("strict"):
        assert tp.ravel([ramp(1, dtype=jnp.bfloat16), ramp(1, dtype=jnp.float16)])[0].dtype == jnp.float32
    assert tp.ravel([ramp(0), ramp(1, dtype=jnp.bfloat16)])[0].dtype == jnp.bfloat16
    assert tp.ravel({"w": np.ones(2)})[0].dtype == jnp.float32
    assert tp.ravel(EVERYTHING, "bf16", jnp.float32)[0].dtype == jnp.float32
    assert tp.ravel({"w": ramp(2)}, dtype=np.float64)[0].dtype == jnp.float32  # JAX's dtypes


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (jnp.int32, "must be floating or complex, got int32"),
        (jnp.float32, "'c64' is complex64, which a vector of float32 cannot hold"),
    ],
)
def test_a_dtype_that_cannot_be(dtype, message):
    with pytest.raises(TypeError, match=message):
        tp.ravel(EVERYTHING, dtype=dtype)
    with pytest.raises(TypeError, match="no parameter is complex, so the vector cannot be complex64"):
        tp.ravel({"w": ramp(2)}, dtype=jnp.complex64)


def test_a_float32_master_copy_over_bfloat16():
    model = {"w": ramp(4, dtype=jnp.bfloat16)}
    vector, restructure = tp.ravel(model, dtype=jnp.float32)
    loss = lambda m: jnp.sum(m["w"] ** 2).astype(jnp.float32)
    gradient = jax.grad(lambda v: loss(restructure(v)))(vector)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, restructure.ravel_gradient(tp.grad(loss)(model)))
    fine = {"w": jnp.full(4, 1 + 2**-12)}  # a gradient in float32 is not rounded to the leaf's dtype on its way
    np.testing.assert_array_equal(restructure.ravel_gradient(fine), fine["w"])
    np.testing.assert_array_equal(tp.project(model, fine)["w"].astype(jnp.float32), jnp.ones(4))


@pytest.mark.parametrize(
    ("vector", "error", "message"),
    [
        (jnp.ones(4), ValueError, r"shape \(3,\) .* got shape \(4,\)"),
        (jnp.ones((3, 1)), ValueError, r"got shape \(3, 1\)"),
        (jnp.ones(()), ValueError, r"got shape \(\)"),
        (jnp.arange(3), TypeError, r"got int32; convert it with vector.astype\(float32\)"),
        (jnp.ones(3, bool), TypeError, "got bool"),
        (jnp.ones(3, jnp.complex64), TypeError, "got complex64, and no parameter is complex; take vector.real"),
        ([1.0, 2.0, 3.0], TypeError, "got list"),
    ],
)
def test_a_vector_that_does_not_fit(vector, error, message):
    _, restructure = tp.ravel({"w": ramp(3)})
    with pytest.raises(error, match=message):
        restructure(vector)
    if hasattr(vector, "shape"):
        with pytest.raises(error, match=message):
            jax.jit(restructure)(vector)


def test_an_empty_model_takes_an_empty_vector_alone():
    model = {"n": 3, "frozen": ramp(2)}
    vector, restructure = tp.ravel(model, tp.layout(model, freeze="frozen"))
    assert (vector.shape, vector.dtype) == ((0,), jnp.float32)
    assert_same(restructure(vector), model)
    assert restructure.ravel_gradient({}).shape == (0,)
    with pytest.raises(ValueError, match=r"shape \(0,\) .* got shape \(1,\)"):
        restructure(jnp.ones(1))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, jnp.bfloat16])
def test_vectors_of_numpy_and_of_other_floating_dtypes(dtype):
    model = {"w": ramp(2, dtype=jnp.bfloat16), "v": ramp(1)}
    vector, restructure = tp.ravel(model)
    got = restructure(np.asarray(vector).astype(dtype))
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [jnp.float32, jnp.bfloat16]
    np.testing.assert_allclose(got["v"], model["v"], 1e-2)


def test_a_restructure_is_a_pytree_of_the_frozen_arrays():
    model = {"norm": Norm(ramp(2), ramp(3)), "n": jnp.arange(2), "f": jnp.tanh}
    vector, restructure = tp.ravel(model)
    assert [leaf.shape for leaf in jax.tree.leaves(restructure)] == [(2,), (3,)]
    keys = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(restructure)[0]]
    assert keys == [".rest['n']", ".rest['norm.mean']"]
    passed = jax.jit(lambda r: jax.tree.map(lambda x: x + 1, r))(restructure)
    np.testing.assert_array_equal(passed(vector)["norm"].mean, model["norm"].mean + 1)
    assert passed(vector)["f"] is jnp.tanh
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), restructure)
    means = jax.vmap(lambda r, v: r(v)["norm"].mean, (0, None))(stacked, vector)
    np.testing.assert_array_equal(means, jnp.stack([model["norm"].mean, 2 * model["norm"].mean]))
    (_, carried), _ = jax.lax.scan(lambda c, _: ((c[0] * 2, c[1]), None), (vector, restructure), None, length=3)
    assert carried.layout == restructure.layout
    ensemble = jax.vmap(lambda v: restructure(v)["norm"].scale)(jnp.stack([vector, 2 * vector]))
    np.testing.assert_array_equal(ensemble, jnp.stack([model["norm"].scale, 2 * model["norm"].scale]))


def test_with_frozen():
    first = {"norm": Norm(ramp(2), ramp(3)), "f": jnp.tanh}
    second = {"norm": Norm(ramp(2, start=5), ramp(3, start=7)), "f": jnp.sin}
    vector, restructure = tp.ravel(first)
    got = restructure.with_frozen(second)(vector)
    assert got["norm"].mean is second["norm"].mean
    assert got["f"] is jnp.sin
    np.testing.assert_array_equal(got["norm"].scale, first["norm"].scale)
    with pytest.raises(ValueError, match=r"'norm\.mean' is float32\[3\] in the first, float32\[4\] in the second"):
        restructure.with_frozen({"norm": Norm(ramp(2), ramp(4)), "f": jnp.tanh})


def test_ravel_reads_any_tree_with_the_slots():
    shared = ramp(2)
    vector, restructure = tp.ravel({"a": shared, "b": shared, "c": ramp(1)})
    got = restructure.ravel({"a": 2 * shared, "b": 3 * shared, "c": ramp(1)})  # values: never asks
    np.testing.assert_array_equal(got[:2], 2 * shared)
    np.testing.assert_array_equal(restructure.ravel({"b": shared, "c": ramp(1)}), vector)
    with pytest.raises(ValueError, match="2 trained parameters, found none for 'c'"):
        restructure.ravel({"a": shared})
    with pytest.raises(ValueError, match=r"expected float32\[2\] at 'a', got float32\[3\]"):
        restructure.ravel({"a": ramp(3), "c": ramp(1)})
    with pytest.raises(ValueError, match="entry at 'd', where the model has no leaf"):
        restructure.ravel({"a": shared, "c": ramp(1), "d": ramp(1)})


def test_derivatives_to_any_order_in_both_modes():
    _, restructure = tp.ravel((ramp(3), ramp(3)))
    f = lambda y: jnp.sum(restructure(y)[0] ** 3) + jnp.prod(restructure(y)[1])
    y = jnp.arange(1.0, 7.0)
    want = jax.hessian(lambda y: jnp.sum(y[:3] ** 3) + jnp.prod(y[3:]))(y)
    for outer in (jax.jacfwd, jax.jacrev):
        for inner in (jax.jacfwd, jax.jacrev):
            np.testing.assert_allclose(outer(inner(f))(y), want, 1e-6)
    third = jax.grad(lambda y: jnp.sum(jax.grad(lambda y: jnp.sum(jax.grad(f)(y)))(y)))(y)
    np.testing.assert_allclose(third[:3], 6.0, 1e-6)
    squares = lambda y: jnp.sum(jax.grad(lambda y: jnp.sum(restructure(y)[0] ** 2))(y) ** 2)
    np.testing.assert_allclose(jax.grad(squares)(y), [8.0, 16.0, 24.0, 0.0, 0.0, 0.0])
    flat = lambda y: tp.ravel(restructure(y))[0]
    np.testing.assert_array_equal(jax.jacrev(flat)(y), jnp.eye(6))


@pytest.mark.parametrize("name", ["same array twice", "plain dataclass", "ints and bools", "transposed tie"])
def test_both_halves_pickle(name):
    model = ZOO[name].make()
    vector, restructure = tp.ravel(model, ZOO[name].layout(model))
    again = pickle.loads(pickle.dumps(restructure))
    assert again.layout == restructure.layout
    assert_same(again(vector), restructure(vector))
    params, rest = tp.partition(model, restructure.layout)
    assert_same(tp.combine(params, pickle.loads(pickle.dumps(rest))), tp.combine(params, rest))


def test_lowered_ahead_of_time_from_shapes():
    abstract = eqx.filter_eval_shape(eqx.nn.MLP, 2, 1, 3, 1, key=jax.random.key(0))
    vector, restructure = jax.eval_shape(lambda v, r: (v, r), *_abstract(abstract))
    compiled = (
        jax.jit(lambda v, r, x: r(v)(x)).lower(vector, restructure, jax.ShapeDtypeStruct((2,), "float32")).compile()
    )
    mlp = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    real, real_restructure = tp.ravel(mlp)
    np.testing.assert_allclose(compiled(real, real_restructure, jnp.ones(2)), mlp(jnp.ones(2)), 1e-6)


def _abstract(model):
    layout = tp.layout(model)
    _, restructure = tp.ravel(jax.tree.map(lambda s: jnp.zeros(s.shape) if hasattr(s, "shape") else s, model))
    assert restructure.layout == layout
    return jax.ShapeDtypeStruct((layout.size,), layout.dtype), restructure


def test_shapes_alone_and_programs_for_elsewhere():
    model = {"norm": Norm(ramp(2), ramp(3)), "w": [ramp(2, 2, start=k) for k in range(12)], "f": jnp.tanh}
    vector, restructure = tp.ravel(model)
    parts = lambda v, r: (r(v)["norm"].mean, r(v)["w"], r.ravel_gradient({"w": [None, v[:4].reshape(2, 2)]}))
    shapes = jax.eval_shape(parts, jax.ShapeDtypeStruct(vector.shape, vector.dtype), restructure)
    assert [each.shape for each in jax.tree.leaves(shapes)] == [(3,), *[(2, 2)] * 12, (50,)]
    exported = jax.export.export(jax.jit(lambda v: jax.grad(lambda v: jnp.sum(restructure(v)["w"][3]))(v)))(vector)
    np.testing.assert_array_equal(
        exported.call(vector), restructure.ravel_gradient({"w": [None] * 3 + [jnp.ones((2, 2))]})
    )
    platforms = jax.export.export(jax.jit(lambda v: restructure(v)["w"]), platforms=("cpu", "cuda", "tpu"))(vector)
    jax.tree.map(np.testing.assert_array_equal, platforms.call(vector), model["w"])
