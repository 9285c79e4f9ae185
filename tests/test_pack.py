"""One vector or several: dtype groups, buckets, padding."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from . import zoo
from .zoo import ZOO, assert_close, assert_same, ramp

PACKINGS = {
    "one": {},
    "padded": {"pad_to": 8},
    "dtype groups": {"dtype_groups": True},
    "buckets": {"bucket": 2},
    "all in buckets": {"bucket": 0},
    "padded buckets of dtype groups": {"bucket": 2, "dtype_groups": True, "pad_to": 4},
}
specimens = pytest.mark.parametrize("name", ZOO)
packings = pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS.keys())


def raveled(name, packing):
    model = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, ZOO[name].make())
    return model, *tp.ravel(model, ZOO[name].layout(model), **packing)


@specimens
@packings
def test_round_trip(name, packing):
    model, vectors, restructure = raveled(name, packing)
    several = vectors if isinstance(vectors, tuple) else (vectors,)
    assert isinstance(vectors, tuple) == bool({"bucket", "dtype_groups"} & set(packing))
    assert_same(restructure(vectors), model)
    jax.tree.map(np.testing.assert_array_equal, restructure.ravel(restructure(vectors)), vectors)
    for vector, made in zip(several, restructure.layout.vectors, strict=True):
        assert (vector.shape, vector.dtype) == ((made.length,), made.dtype)
        assert made.length % packing.get("pad_to", 1) == 0
        assert not np.asarray(vector[made.size :]).any()
    assert sum(made.size for made in restructure.layout.vectors) == restructure.layout.size
    assert_same(jax.jit(lambda v, r: (v, r))(vectors, restructure)[1](vectors), model)


@specimens
@packings
def test_the_gradient_in_the_vectors_is_the_flat_gradient(name, packing):
    model, vectors, restructure = raveled(name, packing)
    f = lambda vectors, restructure: zoo.loss(restructure(vectors))
    got = jax.grad(f)(vectors, restructure)
    if not restructure.layout.slots:
        assert not any(leaf.size for leaf in jax.tree.leaves(got))
        return
    want = restructure.ravel_gradient(zoo.gradient_of_loss(ZOO[name].layout(model))(model))
    assert_close(got, want, 1e-5)

    @jax.jit
    def compiled(vectors, restructure):
        batched = jax.tree.map(lambda x: jnp.stack([0 * x, x]), vectors)
        mapped = jax.vmap(jax.grad(f), (0, None))(batched, restructure)
        return jax.grad(f)(vectors, restructure), jax.tree.map(lambda x: x[1], mapped)

    for each in compiled(vectors, restructure):
        assert_close(each, want, 1e-5)
    for gradient, vector in zip(jax.tree.leaves(got), restructure.layout.vectors, strict=True):
        assert not np.asarray(gradient[vector.size :]).any()


MIXED = {
    "a": ramp(2, dtype=jnp.bfloat16),
    "b": ramp(3),
    "c": ramp(2, 2, dtype=jnp.bfloat16),
    "d": ramp(1, dtype=jnp.complex64),
    "e": ramp(2),
    "n": jnp.array([2**24 + 1]),
}


def test_dtype_groups_come_in_order_of_first_appearance_without_promotion():
    vectors, restructure = tp.ravel(MIXED, dtype_groups=True)
    assert [(vector.shape, vector.dtype) for vector in vectors] == [
        ((6,), jnp.bfloat16),
        ((5,), jnp.float32),
        ((1,), jnp.complex64),
    ]
    layout = restructure.layout
    assert [(slot.path, slot.vector, slot.offset) for slot in layout.slots] == [
        ("a", 0, 0), ("b", 1, 0), ("c", 0, 2), ("d", 2, 0), ("e", 1, 3),
    ]  # fmt: skip
    np.testing.assert_array_equal(vectors[0][layout.slice("c")], MIXED["c"].ravel())
    np.testing.assert_array_equal(vectors[1][layout.indices(["e", "b"])], jnp.concatenate([MIXED["b"], MIXED["e"]]))
    assert "1: 3" in str(layout)
    with pytest.raises(ValueError, match="'a' and 'b' lie in different vectors"):
        layout.indices(["a", "b"])


def test_large_leaves_lie_in_vectors_of_their_own():
    model = {
        "large": ramp(4, 4),
        "small": ramp(2),
        "tiny": ramp(1, dtype=jnp.bfloat16),
        "wide": ramp(3, 3).astype(jnp.bfloat16),
    }
    vectors, restructure = tp.ravel(model, bucket=8)
    assert [(vector.shape, vector.dtype) for vector in vectors] == [
        ((16,), jnp.float32),
        ((3,), jnp.float32),
        ((9,), jnp.bfloat16),
    ]
    assert [slot.vector for slot in restructure.layout.slots] == [0, 1, 1, 2]
    masters, _ = tp.ravel(model, dtype=jnp.float32, bucket=8)
    assert {vector.dtype for vector in masters} == {jnp.dtype("float32")}
    text = jax.jit(lambda v, r: jnp.sum(r(v)["large"])).lower(vectors, restructure).compile().as_text()
    assert "copy" not in text
    assert "slice" not in text


def test_padding_never_leaks():
    model = {"a": ramp(3), "b": ramp(2)}
    vector, restructure = tp.ravel(model, pad_to=4)
    plain, unpadded = tp.ravel(model)
    layout = restructure.layout
    assert (vector.shape, layout.size, layout.vectors[0].length) == ((8,), 5, 8)
    np.testing.assert_array_equal(tp.global_norm(vector), tp.global_norm(plain))
    noisy = vector.at[5:].set(jnp.nan)
    assert_same(restructure(noisy), model)
    assert_same(dict(restructure.view(noisy)), model)
    assert not np.isnan(jax.grad(lambda v: zoo.loss(restructure(v)))(noisy)).any()
    np.testing.assert_array_equal(restructure.view(vector).at["**"].set(1.0), [1, 1, 1, 1, 1, 0, 0, 0])
    assert layout.indices("**").tolist() == [0, 1, 2, 3, 4]
    hessian = jax.hessian(lambda v: zoo.loss(restructure(v)))(vector)
    np.testing.assert_array_equal(
        layout.block(hessian, "a", "b"),
        unpadded.layout.block(jax.hessian(lambda v: zoo.loss(unpadded(v)))(plain), "a", "b"),
    )
    with pytest.raises(ValueError, match=r"shape \(8,\) .* got shape \(5,\)"):
        restructure(plain)


def test_a_layout_knows_how_it_was_raveled():
    vector, restructure = tp.ravel(MIXED, dtype_groups=True, pad_to=4)
    again, other = tp.ravel(MIXED, restructure.layout)
    assert other.layout == restructure.layout
    jax.tree.map(np.testing.assert_array_equal, again, vector)
    plain = tp.layout(MIXED)
    assert restructure.layout != plain
    assert plain.diff(restructure.layout).splitlines() == [
        "raveled with dtype_groups=False in the first, dtype_groups=True in the second",
        "raveled with pad_to=1 in the first, pad_to=4 in the second",
    ]
    assert restructure.layout.freeze("d").vectors[-1].dtype == jnp.float32
    assert len({plain, restructure.layout, other.layout}) == 2


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


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": jnp.float32, "dtype_groups": True}, ValueError, "does not go with dtype=float32; give one"),
        ({"pad_to": 0}, ValueError, "pad_to must be a whole number of elements, at least 1, got 0"),
        ({"pad_to": 1.5}, ValueError, "pad_to must be a whole number of elements, at least 1, got 1.5"),
        ({"bucket": -1}, ValueError, "bucket must be a whole number of elements, at least 0, got -1"),
        ({"bucket": True}, ValueError, "bucket must be a whole number of elements, at least 0, got True"),
        ({"dtype": jnp.complex64}, TypeError, "no parameter is complex, so the vector cannot be complex64"),
        ({"dtype": int}, TypeError, "must be floating or complex, got int32"),
    ],
)
def test_options_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        tp.ravel({"w": ramp(2)}, **options)


@pytest.mark.parametrize(
    ("vectors", "error", "message"),
    [
        (jnp.ones(3), TypeError, "expected a tuple of 2 vectors"),
        ((jnp.ones(3),), ValueError, "expected a tuple of 2 vectors .* got one of 1"),
        ((jnp.ones(3), jnp.ones(3)), ValueError, r"number 1 a vector of shape \(2,\) .* got shape \(3,\)"),
        ((jnp.ones(3), jnp.arange(2)), TypeError, "number 1 .* got int32"),
        ((jnp.ones(3, jnp.complex64), jnp.ones(2)), TypeError, "number 0 .* take vector.real"),
    ],
)
def test_vectors_that_do_not_fit(vectors, error, message):
    _, restructure = tp.ravel({"a": ramp(3), "b": ramp(2, dtype=jnp.bfloat16)}, dtype_groups=True)
    with pytest.raises(error, match=message):
        restructure(vectors)


def test_float64_is_not_none():
    with zoo.enable_x64(True):
        model = {"w": ramp(2, dtype=jnp.float32)}
        vector, restructure = tp.ravel(model, dtype="float64")
        assert (vector.dtype, restructure(vector)["w"].dtype) == (jnp.float64, jnp.float32)
        diff = restructure.layout.diff(tp.layout(model))
        assert diff == "raveled with dtype='float64' in the first, dtype=None in the second"
        assert restructure.layout != tp.layout(model)
        assert tp.ravel(model, dtype=np.float64)[1].layout == restructure.layout


def test_a_layout_tells_the_options_that_are_not_given():
    model = {"a": ramp(3), "b": ramp(2, dtype=jnp.bfloat16)}
    layout = tp.ravel(model, dtype_groups=True, pad_to=np.int64(4))[1].layout
    assert [vector.shape for vector in tp.ravel(model, layout)[0]] == [(4,), (4,)]
    assert [vector.shape for vector in tp.ravel(model, layout, pad_to=8)[0]] == [(8,), (8,)]
    assert [vector.shape for vector in tp.ravel(model, layout, bucket=2)[0]] == [(4,), (4,)]
    with pytest.raises(ValueError, match="does not go with dtype=float32"):
        tp.ravel(model, layout, dtype=jnp.float32)


def test_a_packed_layout_pickles():
    layout = tp.ravel({"a": ramp(3), "b": ramp(2, dtype=jnp.bfloat16)}, bucket=2, pad_to=4)[1].layout
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert again.vectors == layout.vectors


def test_a_complex_dtype_where_one_vector_is_real():
    model = {"a": ramp(2), "z": ramp(3, dtype=jnp.complex64)}
    vectors, restructure = tp.ravel(model, dtype=jnp.complex64, bucket=2)
    assert [vector.dtype for vector in vectors] == [jnp.float32, jnp.complex64]
    assert restructure.layout.freeze("z").dtype == jnp.float32
    layout = tp.ravel(model, tp.layout(model, freeze="z"), dtype=jnp.float32)[1].layout
    with pytest.raises(TypeError, match="'z' is complex64, which a vector of float32 cannot hold"):
        layout.thaw("z")


@packings
def test_into_the_memory_of_another_vector(packing):
    model = {"a": ramp(3), "b": ramp(2, dtype=jnp.bfloat16), "c": ramp(2, 2)}
    vectors, restructure = tp.ravel(model, **packing)
    doubled = jax.tree.map(lambda x: 2 * x, model)
    want = restructure.ravel(doubled)
    pointers = [vector.unsafe_buffer_pointer() for vector in jax.tree.leaves(vectors)]
    got = restructure.ravel(doubled, into=vectors)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(vector.is_deleted() for vector in jax.tree.leaves(vectors))
    assert [vector.unsafe_buffer_pointer() for vector in jax.tree.leaves(got)] == pointers
    again = restructure.ravel_gradient(model, into=got)
    jax.tree.map(np.testing.assert_array_equal, again, restructure.ravel_gradient(model))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda m, v: restructure.ravel(m, into=v))(doubled, want), want)
    with pytest.raises(ValueError, match=r"into= must be a JAX array of \w+, got ndarray"):
        restructure.ravel(model, into=jax.tree.map(np.asarray, want))


def test_memory_that_cannot_be_taken():
    vectors, restructure = tp.ravel({"a": ramp(3), "b": ramp(3)}, bucket=0)
    with pytest.raises(ValueError, match="into= is also the array at 'b'"):
        restructure.ravel({"a": ramp(3), "b": vectors[0]}, into=vectors)
    with pytest.raises(ValueError, match="into= has one vector twice"):
        restructure.ravel({"a": ramp(3), "b": ramp(3)}, into=(vectors[0], vectors[0]))
    assert not vectors[0].is_deleted()


def test_inside_of_jit_its_donated_argument_is_the_memory():
    model = {"a": ramp(3), "b": ramp(4)}
    vector, restructure = tp.ravel(model)
    write = jax.jit(lambda m, v: restructure.ravel(m, into=v), donate_argnums=1, keep_unused=True)
    assert write.lower(model, vector).compile().memory_analysis().alias_size_in_bytes == vector.nbytes
