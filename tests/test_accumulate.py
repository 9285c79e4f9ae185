"""Gradients of a large batch in pieces."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp

from .zoo import enable_x64, ramp

BATCH = (jax.random.normal(jax.random.key(1), (12, 3)), jax.random.normal(jax.random.key(2), (12,)))


class Model(eqx.Module):
    mlp: eqx.nn.MLP
    shift: jax.Array = tp.field(trainable=False)

    def __call__(self, x):
        return jax.vmap(self.mlp)(x + self.shift[None])


def make():
    return Model(eqx.nn.MLP(3, "scalar", 4, 2, key=jax.random.key(0)), ramp(3))


def loss(model, x, y, scale=1.0):
    return scale * jnp.mean((model(x) - y) ** 2)


def full(vector, restructure, *batch):
    return jax.value_and_grad(lambda v: loss(restructure(v), *batch))(vector)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("examples", [1, 5, 7, 12])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 5, 12, 20])
def test_it_equals_the_gradient_of_the_full_batch(microbatches, examples, compiled):
    vector, restructure = tp.ravel(make())
    batch = tuple(each[:examples] for each in BATCH)
    of = lambda v, r, *batch: tp.accumulate(loss, r, microbatches)(v, *batch)
    value, gradient = (jax.jit(of) if compiled else of)(vector, restructure, *batch)
    want = full(vector, restructure, *batch)
    np.testing.assert_allclose(value, want[0], 1e-6)
    np.testing.assert_allclose(gradient, want[1], 1e-6, 1e-6)


def test_a_step_of_every_microbatch_is_one_program_per_size():
    vector, restructure = tp.ravel(make())
    sizes = []

    def seen(model, x, y):
        sizes.append(len(x))
        return loss(model, x, y)

    tp.accumulate(seen, restructure, 5)(vector, *BATCH)
    assert sizes == [3, 3] or sizes == [3]  # 12 in 5: pieces of 3 (scan may trace its body twice), none left over
    sizes.clear()
    tp.accumulate(seen, restructure, 7)(vector, *(each[:11] for each in BATCH))
    assert set(sizes) == {2, 1}


def test_dtypes():
    narrow = {"w": ramp(3, dtype=jnp.bfloat16)}
    mean = lambda m, x: jnp.mean((x.astype(jnp.bfloat16) @ m["w"]) ** 2)
    vector, restructure = tp.ravel(narrow)
    value, gradient = tp.accumulate(mean, restructure, 4)(vector, BATCH[0])
    assert (value.dtype, vector.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    groups, grouped = tp.ravel({"a": ramp(3), "b": ramp(3, dtype=jnp.bfloat16)}, dtype_groups=True)
    mixed = lambda m, x: jnp.mean((x @ (m["a"] * m["b"].astype(jnp.float32))) ** 2)
    _, gradients = tp.accumulate(mixed, grouped, 3)(groups, BATCH[0])
    want = jax.grad(lambda v: mixed(grouped(v), BATCH[0]))(groups)
    assert [gradient.dtype for gradient in gradients] == [jnp.float32, jnp.float32]
    for got, each in zip(gradients, want, strict=True):
        np.testing.assert_allclose(got, each.astype(jnp.float32), 2e-2)
    with enable_x64(True):
        wide, restructure = tp.ravel({"w": jnp.ones(3, jnp.float64)})
        value, gradient = tp.accumulate(lambda m, x: jnp.mean(x @ m["w"]), restructure, 2)(wide, jnp.ones((5, 3)))
        assert (value.dtype, gradient.dtype) == (jnp.float64, jnp.float64)


def test_complex_parameters():
    vector, restructure = tp.ravel({"w": ramp(3, dtype=jnp.complex64) * (1 + 1j)})
    of = lambda m, x: jnp.mean(jnp.abs(x.astype(jnp.complex64) @ m["w"]) ** 2)
    value, gradient = tp.accumulate(of, restructure, 5)(vector, BATCH[0])
    want = jax.value_and_grad(lambda v: of(restructure(v), BATCH[0]))(vector)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, want[0], 1e-6)
    np.testing.assert_allclose(gradient, want[1], 1e-6)


def test_the_rest_goes_to_the_loss_as_it_is():
    vector, restructure = tp.ravel(make())
    batch = {"x": BATCH[0], "y": BATCH[1]}
    got = tp.accumulate(lambda m, b, *, scale: loss(m, b["x"], b["y"], scale), restructure, 5)(vector, batch, scale=2.0)
    np.testing.assert_allclose(got[0], 2 * full(vector, restructure, *BATCH)[0], 1e-6)
    view = restructure.view(vector)
    np.testing.assert_allclose(tp.accumulate(loss, restructure, 3)(view, *BATCH)[0], got[0] / 2, 1e-6)


def test_it_trains_and_differentiates_further():
    vector, restructure = tp.ravel(make())
    tx = optax.sgd(0.1, momentum=0.5)

    @jax.jit
    def step(vector, state, restructure, x, y):
        value, gradient = tp.accumulate(loss, restructure, 4)(vector, x, y)
        updates, state = tx.update(gradient, state)
        return optax.apply_updates(vector, updates), state, value

    state, values = tx.init(vector), []
    for _ in range(100):
        vector, state, value = step(vector, state, restructure, *BATCH)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    second = lambda f: jax.grad(lambda v: jnp.sum(f(v)[1] ** 2))(vector)
    got = second(lambda v: tp.accumulate(loss, restructure, 4)(v, *BATCH))
    np.testing.assert_allclose(got, second(lambda v: full(v, restructure, *BATCH)), 1e-4, 1e-5)


def test_memory_is_one_vector_whatever_the_number_of_pieces():
    model = [ramp(64, 64) for _ in range(64)]  # a megabyte
    vector, restructure = tp.ravel(model)

    def mean(model, x):
        for weight in model:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x)

    def temporary(f, examples):
        x = jnp.ones((examples, 64))
        memory = jax.jit(f).lower(vector, restructure, x).compile().memory_analysis()
        assert memory.output_size_in_bytes <= vector.nbytes + 1024
        return memory.temp_size_in_bytes

    alone = temporary(lambda v, r, x: jax.value_and_grad(lambda v: mean(r(v), x))(v), 8)
    of = lambda pieces: temporary(lambda v, r, x: tp.accumulate(mean, r, pieces)(v, x), 8 * pieces)
    assert alone >= vector.nbytes  # the leaves, which XLA copies out of the vector
    assert of(4) <= alone + 0.2 * vector.nbytes
    assert abs(of(32) - of(4)) <= 4096


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("microbatches", [0, -1, 2.0, True, None])
def test_a_number_of_pieces_that_cannot_be(microbatches):
    _, restructure = tp.ravel(make())
    with pytest.raises(ValueError, match=f"a whole number of pieces, at least 1, got {microbatches}"):
        tp.accumulate(loss, restructure, microbatches)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((), "there is no batch to cut"),
        ((jnp.ones((4, 3)), jnp.ones(5)), r"argument \[0\] of the batch has 4, argument \[1\] of the batch has 5"),
        (
            ({"x": jnp.float32(1)},),
            r"argument \[0\]\['x'\] of the batch must be an array whose leading axis .* keyword",
        ),
        ((jnp.ones((4, 3)), 2.0), r"argument \[1\] of the batch must be an array .* got float"),
        ((jnp.ones((0, 3)),), "the batch has no examples"),
    ],
)
def test_batches_that_cannot_be_cut(batch, message):
    vector, restructure = tp.ravel(make())
    with pytest.raises(ValueError, match=message):
        tp.accumulate(loss, restructure, 2)(vector, *batch)


@pytest.mark.usefixtures("without_type_checks")
def test_what_is_no_restructure():
    with pytest.raises(TypeError, match=r"the Restructure of tp\.ravel, got Model"):
        tp.accumulate(loss, make(), 2)


def test_numbers_of_python_and_vectors_of_numpy():
    vector, restructure = tp.ravel(make())
    wide = np.asarray(vector, np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, gradient = tp.accumulate(lambda model, x: 3.0, restructure, np.int64(2))(wide, np.ones((3, 1)))
    assert float(value) == 3
    np.testing.assert_array_equal(gradient, np.zeros(vector.shape, np.float32))
