"""The vector: what goes in, what comes out, what is refused."""

import collections.abc
import gc
import pickle
import weakref

import equinox as eqx
import jax
import jax.experimental.jet
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from . import zoo
from .zoo import ZOO, Norm, assert_same, enable_x64, ramp


class Captures(eqx.Module):
    weight: jax.Array
    activation: collections.abc.Callable = eqx.field(static=True)


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
        for options in ({}, {"pad_to": 8}):
            vector, restructure = tp.ravel(model, **options)
            assert_same(restructure(vector), model)


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


# -- Padding, dtypes and lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_a_padded_vector_goes_there_and_back(name):
    model = ZOO[name].make()
    layout = ZOO[name].layout(model)
    vector, restructure = tp.ravel(model, layout, pad_to=8)
    assert vector.shape == (-(-layout.size // 8) * 8,)
    assert restructure.layout == layout  # how it was raveled is no part of the layout
    assert not np.asarray(vector[layout.size :]).any()
    assert_same(restructure(vector), tp.ravel(model, layout)[1](tp.ravel(model, layout)[0]))
    np.testing.assert_array_equal(restructure.ravel(restructure(vector)), vector)


def test_padding_never_leaks():
    model = {"a": ramp(3), "b": ramp(2)}
    vector, restructure = tp.ravel(model, pad_to=4)
    plain, unpadded = tp.ravel(model)
    assert (vector.shape, restructure.layout.size) == ((8,), 5)
    assert "padded to 8" in repr(restructure)
    np.testing.assert_array_equal(tp.global_norm(vector), tp.global_norm(plain))
    noisy = vector.at[5:].set(jnp.nan)
    assert_same(restructure(noisy), model)
    assert_same(dict(restructure.view(noisy)), model)
    gradient = jax.grad(lambda v: zoo.loss(restructure(v)))(noisy)
    np.testing.assert_array_equal(gradient[5:], jnp.zeros(3))
    np.testing.assert_array_equal(gradient[:5], jax.grad(lambda v: zoo.loss(unpadded(v)))(plain))
    np.testing.assert_array_equal(restructure.view(vector).at["**"].set(1.0), [1, 1, 1, 1, 1, 0, 0, 0])
    assert restructure.layout.indices("**").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"shape \(8,\) .* got shape \(5,\)"):
        restructure(plain)
    hessian = jax.hessian(lambda v: zoo.loss(restructure(v)))(vector)
    with pytest.raises(ValueError, match=r"expected an array of shape \(5, 5\) .* got shape \(8, 8\)"):
        restructure.layout.block(hessian, "a", "b")
    want = unpadded.layout.block(jax.hessian(lambda v: zoo.loss(unpadded(v)))(plain), "a", "b")
    np.testing.assert_array_equal(restructure.layout.block(hessian[:5, :5], "a", "b"), want)


def test_an_option_means_what_it_says_at_each_call():
    model = {"a": ramp(3), "b": ramp(2, dtype=jnp.bfloat16)}
    padded = tp.ravel(model, dtype=jnp.bfloat16, pad_to=np.int64(4))[1].layout
    vector, restructure = tp.ravel(model, padded, pad_to=1)
    assert (vector.shape, vector.dtype) == ((5,), jnp.float32)
    assert tp.ravel(model, padded)[0].shape == (5,)
    assert padded == tp.layout(model) == restructure.layout


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("pad_to", [0, -1, 1.5, True, None])
def test_a_padding_that_cannot_be(pad_to):
    tp.ravel({"w": ramp(2)})  # `True` is not the 1 that is known by now
    with pytest.raises(ValueError, match=f"pad_to must be a whole number of elements, at least 1, got {pad_to}"):
        tp.ravel({"w": ramp(2)}, pad_to=pad_to)


def test_float64_is_not_none():
    with enable_x64(True):
        model = {"w": ramp(2, dtype=jnp.float32)}
        vector, restructure = tp.ravel(model, dtype="float64")
        assert (vector.dtype, restructure(vector)["w"].dtype) == (jnp.float64, jnp.float32)
        assert tp.ravel(model)[0].dtype == jnp.float32
        assert restructure.layout == tp.layout(model)


def test_float32_master_weights_in_one_step():
    model = {"w": ramp(8, 8, dtype=jnp.bfloat16), "b": ramp(8, dtype=jnp.bfloat16)}
    vector, restructure = tp.ravel(model, dtype=jnp.float32)
    seen = []

    def loss(vector, restructure, x):
        model = restructure(vector)
        seen.append({leaf.dtype for leaf in jax.tree.leaves(model)})
        return jnp.mean((x @ model["w"] + model["b"][None]).astype(jnp.float32) ** 2)

    step = jax.jit(lambda v, r, x: v - 1e-4 * jax.grad(loss)(v, r, x))
    after = vector
    for _ in range(20):
        after = step(after, restructure, jnp.ones((2, 8), jnp.bfloat16))
    assert seen == [{jnp.dtype(jnp.bfloat16)}]
    assert after.dtype == jnp.float32
    assert float(jnp.abs(after - vector).max()) > 0  # in bfloat16 steps this small are lost
    lost = vector.astype(jnp.bfloat16)
    small = (1e-4 * jax.grad(loss)(vector, restructure, jnp.ones((2, 8), jnp.bfloat16))).astype(jnp.bfloat16)
    np.testing.assert_array_equal(lost - small, lost)


@pytest.mark.parametrize("leaves", [1, 16])
def test_a_vector_that_programs_cannot_address_is_refused_by_name(leaves):
    message = (
        r"a vector of 4,294,967,296 elements is longer than the 2,147,483,647 .*; take the tree form, tp.partition"
    )
    size = 2**32 // leaves
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda model: tp.ravel(model)[0], [jax.ShapeDtypeStruct((size,), "float32")] * leaves)
    with pytest.raises(ValueError, match=message.replace("4,294,967,296", "4,294,967,296")):
        tp.ravel([jax.ShapeDtypeStruct((size,), "float32")] * leaves)
    edge = [jax.ShapeDtypeStruct((2**31 - 1,), "float32")]
    assert jax.eval_shape(lambda model: tp.ravel(model)[0], edge).shape == (2**31 - 1,)
    with pytest.raises(ValueError, match="a vector of 2,147,483,648 elements"):
        jax.eval_shape(lambda model: tp.ravel(model, pad_to=2)[0], edge)
    assert tp.layout([jax.ShapeDtypeStruct((size,), "float32")] * leaves).size == 2**32


def test_programs_are_shared_by_layouts_that_differ_in_names_alone():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    arrays = [ramp(7, 3), ramp(11)]
    for i in range(5):
        vector, restructure = tp.ravel({f"x{i}": arrays[0], f"y{i}": arrays[1]})
        restructure(vector)
        if i == 0:
            compiled.clear()
    assert compiled == []


def test_no_program_keeps_an_array_alive_that_a_static_function_captured():
    captured = jnp.ones(1000)
    held = weakref.ref(captured)

    def activation(x, big=captured):
        return x

    vector, restructure = tp.ravel(Captures(ramp(5), activation))
    restructure(vector)
    tp.partition(Captures(ramp(5), activation))
    del captured, activation, restructure
    gc.collect()
    assert held() is None


def test_jet_goes_through():
    vector, restructure = tp.ravel({"a": ramp(2), "b": ramp(2, 2)})
    f = lambda v: jnp.sum(jnp.sin(restructure(v)["a"])) + jnp.sum(restructure(v)["b"] ** 3)
    plain = lambda v: jnp.sum(jnp.sin(v[:2])) + jnp.sum(v[2:] ** 3)
    series = ([jnp.ones(6), jnp.zeros(6)],)
    got, want = (jax.experimental.jet.jet(each, (vector,), series) for each in (f, plain))
    np.testing.assert_allclose(got[0], want[0], 1e-6)
    np.testing.assert_allclose(got[1], want[1], 1e-6)
    joined = jax.experimental.jet.jet(
        lambda v: restructure.ravel({"a": v[:2], "b": v[2:].reshape(2, 2)}), (vector,), series
    )
    np.testing.assert_array_equal(joined[1][0], jnp.ones(6))
