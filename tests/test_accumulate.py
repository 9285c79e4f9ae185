"""Gradients of a large batch in pieces."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .zoo import Norm, assert_close, enable_x64, filled, ramp

BATCH = (np.sin(np.arange(36, dtype=np.float32)).reshape(12, 3), np.cos(np.arange(12, dtype=np.float32)))


@pytest.fixture(scope="module")
def model():
    return {"linear": filled(eqx.nn.Linear, 3, "scalar"), "norm": Norm(ramp(3), ramp(3)), "act": jnp.tanh}


def loss(model, batch):
    x, y = batch
    x = (x - model["norm"].mean[None]) * model["norm"].scale[None]
    return jnp.mean((model["act"](jax.vmap(model["linear"])(x)) - y) ** 2)


def test_it_equals_the_gradient_of_the_full_batch_of_a_model_and_of_a_vector_and_differentiates_further(model):
    known, (vector, restructure) = tp.layout(model), tp.ravel(model)
    of, of_vector = tp.value_and_grad(loss, known), lambda v, batch: loss(restructure(v), batch)
    second = lambda f: jax.grad(lambda v: jnp.sum(f(v, BATCH)[1] ** 2))(vector)

    @tp.jit
    def all_of_them(model, vector):
        seven, one = (tuple(each[:count] for each in BATCH) for count in (7, 1))
        results = [tp.accumulate(loss, known, pieces=pieces)(model, seven) for pieces in (1, 5, 20)]
        results.append(tp.accumulate(loss, known, pieces=2)(model, one))
        fs = tp.accumulate(of_vector, pieces=5), jax.value_and_grad(of_vector)
        return results, [of(model, seven)] * 3 + [of(model, one)], [(f(vector, BATCH), second(f)) for f in fs]

    results, wanted, of_vectors = all_of_them(model, vector)
    assert_close(results, wanted, 1e-6)
    assert_close(*of_vectors, 1e-4)


def test_ties_are_summed_frozen_parts_get_nothing_and_parameters_may_be_complex():
    shared = ramp(3)
    model = {"a": shared, "b": shared, "c": ramp(3), "z": ramp(3, dtype=jnp.complex64) * (1 + 1j)}

    def of(model, x):
        z = jnp.abs(x.astype(jnp.complex64) @ model["z"]) ** 2
        return jnp.mean(jnp.tanh(x @ model["a"]) * (x @ model["b"]) + x @ model["c"] + z)

    ways = tp.accumulate(of, "!c", pieces=5), tp.value_and_grad(of, "!c")
    (value, grads), want = tp.jit(lambda model, x: [f(model, x) for f in ways])(model, BATCH[0])
    assert value.dtype == jnp.float32
    assert grads["b"] is grads["c"] is None
    np.testing.assert_allclose(value, want[0], 1e-5)
    assert_close(grads, want[1])


def test_each_size_of_piece_is_one_program(model):
    for pieces, examples, sizes in ((5, 12, {3}), (7, 11, {2, 1})):  # of the first, none is left over
        seen = []
        of = tp.accumulate(lambda model, x, seen=seen: seen.append(len(x[0])) or loss(model, x), pieces=pieces)
        jax.eval_shape(lambda batch, of=of: of(model, batch), tuple(each[:examples] for each in BATCH))
        assert set(seen) == sizes
        assert len(seen) <= 2 * len(sizes)  # a scan may trace its body twice


def test_sums_are_wide_and_gradients_in_the_leaves_dtypes():
    # Each piece gives the first entry a gradient of 1, but for the first piece, which gives 256: in bfloat16 the ones
    # would be lost one by one.
    narrow = {"w": ramp(1, start=1.0, dtype=jnp.bfloat16)}
    batch = np.asarray([256.0] + [1.0] * 63, jnp.bfloat16)
    value, grads = tp.jit(tp.accumulate(lambda m, x: jnp.mean(x * m["w"][0]), pieces=64))(narrow, batch)
    assert (value.dtype, grads["w"].dtype) == (jnp.float32, jnp.bfloat16)
    assert float(value) == 319 / 64
    assert float(grads["w"][0]) == float(jnp.bfloat16(319 / 64))
    mean = tp.accumulate(lambda m, x: jnp.mean(x @ m["w"]), pieces=2)
    with enable_x64(True):
        value, grads = jax.eval_shape(mean, {"w": np.ones(3)}, np.ones((5, 3)))
        assert (value.dtype, grads["w"].dtype) == (jnp.float64, jnp.float64)


def test_memory_is_that_of_one_piece_whatever_their_number():
    model = [np.ones((64, 64), "f") for _ in range(8)]

    def mean(model, x):
        for weight in model:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x)

    def temporary(f, examples):
        compiled = jax.jit(f).lower(model, np.ones((examples, 64), "f")).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    of = lambda pieces: temporary(tp.accumulate(mean, pieces=pieces), 64 * pieces)
    assert temporary(jax.value_and_grad(mean), 64 * 32) > 4 * of(32)
    assert abs(of(32) - of(4)) <= 4096


ONES = np.ones((4, 3))


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("batch", "pieces", "message"),
    [
        (ONES, True, "a whole number of pieces, at least 1, got True"),
        ((ONES, np.ones(5)), 2, r"got: batch\[0\] has 4, batch\[1\] has 5"),
        ((ONES, 2.0), 2, r"batch\[1\] has 0; pass anything .* as a further argument"),
        (np.ones((0, 3)), 2, "at least one, got: batch has 0"),
    ],
)
def test_what_is_refused(model, batch, pieces, message):
    with pytest.raises(ValueError, match=message):
        tp.accumulate(loss, pieces=pieces)(model, batch)


def test_a_value_that_is_a_number_of_python_batches_of_numpy_and_further_arguments(model):
    of = tp.accumulate(lambda model, x, scale, shift=0.0: 3.0 * scale + shift, pieces=np.int64(2))
    assert float(of(model, ONES, 2.0, shift=1.0)[0]) == 7
