"""Gradients of a large batch in pieces."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp

from .zoo import assert_close, enable_x64, ramp

BATCH = (jax.random.normal(jax.random.key(1), (12, 3)), jax.random.normal(jax.random.key(2), (12,)))


class Model(eqx.Module):
    mlp: eqx.nn.MLP
    shift: jax.Array = tp.field(trainable=False)

    def __call__(self, x):
        return jax.vmap(self.mlp)(x + self.shift[None])


def make():
    return Model(eqx.nn.MLP(3, "scalar", 4, 2, key=jax.random.key(0)), ramp(3))


def loss(model, batch, scale=1.0):
    x, y = batch
    return scale * jnp.mean((model(x) - y) ** 2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("examples", [1, 5, 7, 12])
@pytest.mark.parametrize("pieces", [1, 2, 5, 12, 20])
def test_it_equals_the_gradient_of_the_full_batch(pieces, examples, compiled):
    model, batch = make(), tuple(each[:examples] for each in BATCH)
    known = tp.layout(model)
    of = tp.accumulate(loss, known, pieces=pieces)
    value, grads = (tp.jit(of) if compiled else of)(model, batch)
    want = tp.value_and_grad(loss, known)(model, batch)
    np.testing.assert_allclose(value, want[0], 1e-6)
    assert_close(grads, want[1], 1e-6)


def test_a_vector_is_a_model_too():
    vector, restructure = tp.ravel(make())
    of_vector = lambda v, batch: loss(restructure(v), batch)
    value, gradient = jax.jit(tp.accumulate(of_vector, pieces=5))(vector, BATCH)
    want = jax.value_and_grad(of_vector)(vector, BATCH)
    np.testing.assert_allclose(value, want[0], 1e-6)
    np.testing.assert_allclose(gradient, want[1], 1e-6, 1e-6)


def test_ties_are_summed_and_frozen_parts_get_nothing():
    shared = ramp(3)
    model = {"a": shared, "b": shared, "c": ramp(3)}
    of = lambda m, x: jnp.mean(jnp.tanh(x @ m["a"]) * (x @ m["b"]) + x @ m["c"])
    _, grads = tp.accumulate(of, "!c", pieces=5)(model, BATCH[0])
    assert grads["b"] is grads["c"] is None
    np.testing.assert_allclose(grads["a"], tp.grad(of)(model, BATCH[0])["a"], 1e-5)


def test_each_size_of_piece_is_one_program():
    sizes = []

    def seen(model, batch):
        sizes.append(len(batch[0]))
        return loss(model, batch)

    tp.accumulate(seen, pieces=5)(make(), BATCH)
    assert set(sizes) == {3}  # 12 in 5: pieces of 3, none left over
    assert len(sizes) <= 2  # a scan may trace its body twice
    sizes.clear()
    tp.accumulate(seen, pieces=7)(make(), tuple(each[:11] for each in BATCH))
    assert set(sizes) == {2, 1}


def test_sums_are_wide_and_gradients_in_the_leaves_dtypes():
    # Each piece gives the first entry a gradient of 1, but for the first piece, which gives 256: in bfloat16 the ones
    # would be lost one by one.
    model = {"w": jnp.ones(1, jnp.bfloat16)}
    batch = jnp.asarray([256.0] + [1.0] * 63, jnp.bfloat16)
    value, grads = tp.accumulate(lambda m, x: jnp.mean(x * m["w"][0]), pieces=64)(model, batch)
    assert (value.dtype, grads["w"].dtype) == (jnp.float32, jnp.bfloat16)
    assert float(value) == 319 / 64
    np.testing.assert_array_equal(grads["w"], jnp.full(1, 319 / 64, jnp.bfloat16))
    with enable_x64(True):
        wide = {"w": jnp.ones(3, jnp.float64)}
        value, grads = tp.accumulate(lambda m, x: jnp.mean(x @ m["w"]), pieces=2)(wide, jnp.ones((5, 3)))
        assert (value.dtype, grads["w"].dtype) == (jnp.float64, jnp.float64)
        narrow = {"w": jnp.ones(3, jnp.float32)}
        of = tp.accumulate(lambda m, x: jnp.mean(x @ m["w"]), pieces=2)
        assert of(narrow, jnp.ones((5, 3), jnp.float32))[0].dtype == jnp.float32


def test_complex_parameters():
    model = {"w": ramp(3, dtype=jnp.complex64) * (1 + 1j)}
    of = lambda m, x: jnp.mean(jnp.abs(x.astype(jnp.complex64) @ m["w"]) ** 2)
    value, grads = tp.accumulate(of, pieces=5)(model, BATCH[0])
    want = tp.value_and_grad(of)(model, BATCH[0])
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, want[0], 1e-6)
    np.testing.assert_allclose(grads["w"], want[1]["w"], 1e-6)


def test_further_arguments_are_the_same_for_each_piece():
    got = tp.accumulate(loss, pieces=5)(make(), BATCH, 2.0)
    also = tp.accumulate(loss, pieces=5)(make(), BATCH, scale=2.0)
    want = tp.value_and_grad(loss)(make(), BATCH)
    np.testing.assert_allclose(got[0], 2 * want[0], 1e-6)
    assert_close(got, also)


def test_it_trains_and_differentiates_further():
    vector, restructure = tp.ravel(make())
    tx = optax.sgd(0.1, momentum=0.5)

    @jax.jit
    def step(vector, state, restructure, batch):
        of_vector = lambda v, batch: loss(restructure(v), batch)
        value, gradient = tp.accumulate(of_vector, pieces=4)(vector, batch)
        updates, state = tx.update(gradient, state)
        return optax.apply_updates(vector, updates), state, value

    state, values = tx.init(vector), []
    for _ in range(100):
        vector, state, value = step(vector, state, restructure, BATCH)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    of_vector = lambda v, batch: loss(restructure(v), batch)
    second = lambda f: jax.grad(lambda v: jnp.sum(f(v, BATCH)[1] ** 2))(vector)
    got = second(tp.accumulate(of_vector, pieces=4))
    np.testing.assert_allclose(got, second(jax.value_and_grad(of_vector)), 1e-4, 1e-5)


def test_memory_is_that_of_one_piece_whatever_their_number():
    model = [ramp(64, 64) for _ in range(16)]

    def mean(model, x):
        for weight in model:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x)

    def temporary(f, examples):
        return jax.jit(f).lower(model, jnp.ones((examples, 64))).compile().memory_analysis().temp_size_in_bytes

    of = lambda pieces: temporary(tp.accumulate(mean, pieces=pieces), 64 * pieces)
    assert temporary(jax.value_and_grad(mean), 64 * 32) > 4 * of(32)
    assert abs(of(32) - of(4)) <= 4096


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("pieces", [0, -1, 2.0, True, None])
def test_a_number_of_pieces_that_cannot_be(pieces):
    with pytest.raises(ValueError, match=f"a whole number of pieces, at least 1, got {pieces}"):
        tp.accumulate(loss, pieces=pieces)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((), "there are no arrays in the batch"),
        ((jnp.ones((4, 3)), jnp.ones(5)), r"same number of examples; batch\[0\] has 4, batch\[1\] has 5"),
        ({"x": jnp.float32(1)}, r"batch\['x'\] must be an array whose leading axis is the examples, got float32\[\]"),
        ((jnp.ones((4, 3)), 2.0), r"batch\[1\] must be an array .* got float; pass what is .* as a further argument"),
        (jnp.ones((0, 3)), "the batch has no examples: batch is empty"),
    ],
)
def test_batches_that_cannot_be_cut(batch, message):
    with pytest.raises(ValueError, match=message):
        tp.accumulate(loss, pieces=2)(make(), batch)


@pytest.mark.parametrize("of", [tp.grad, tp.value_and_grad, lambda f: tp.accumulate(f, pieces=2)])
def test_nothing_trained_is_warned_of_where_it_is_called(of):
    with pytest.warns(UserWarning, match="nothing is trained: the model has no floating") as caught:
        of(lambda model, x: jnp.mean(x))({"n": jnp.arange(2)}, jnp.ones(4))
    assert [each.filename for each in caught] == [__file__]


def test_a_value_that_is_a_number_of_python_and_batches_of_numpy():
    value, grads = tp.accumulate(lambda model, x: 3.0, pieces=np.int64(2))(make(), np.ones((3, 1)))
    assert float(value) == 3
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))
