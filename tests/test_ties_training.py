"""Ties through a transform, from the gradient to the average."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .zoo import assert_close

TIES = {"t": ("W", jnp.transpose)}
TOTAL = [[98.6486, 107.1512, 113.7883], [154.7071, 170.7440, 183.8160]]
AFTER = [[-8.8649, -8.7151, -8.3788], [-11.4707, -12.0744, -12.3816]]


def model() -> dict[str, jax.Array]:
    w = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    return {"W": w, "t": w.T, "v": jnp.array([7.0, 8.0, 9.0])}


def loss(model: dict[str, jax.Array]) -> jax.Array:
    x = jnp.array([1.0, 0.1])
    return jnp.sum((model["W"] @ jnp.log(model["t"] @ x + model["v"])) ** 2)


def test_a_raw_gradient_at_the_alias_is_pulled_back():
    layout = tp.layout(model(), ties=TIES)
    raw = jax.grad(loss)(model())
    total = raw["W"] + raw["t"].T
    np.testing.assert_allclose(total, TOTAL, rtol=1e-5)
    for gradient in (tp.grad(loss, layout)(model()), tp.project(model(), raw, layout)):
        assert_close(gradient["W"], total)
        assert gradient["t"] is None
    vector, restructure = tp.ravel(model(), layout)
    of_vector = jax.grad(lambda vector: loss(restructure(vector)))(vector)
    assert_close(of_vector, restructure.ravel_gradient(raw))
    assert_close(restructure.view(of_vector)["W"], total)


def test_a_step_keeps_the_alias_the_transpose():
    layout = tp.layout(model(), ties=TIES)
    tx = optim.trainable(optax.sgd(0.1), layout)
    for gradient in (tp.grad(loss, layout)(model()), jax.grad(loss)(model())):
        after, _ = optim.step(tx, gradient, tx.init(model()), model())
        np.testing.assert_allclose(after["W"], AFTER, rtol=1e-4)
        np.testing.assert_array_equal(after["t"], after["W"].T)


def test_clipping_acts_on_the_sum():
    layout = tp.layout(model(), ties=TIES)
    gradient = tp.grad(loss, layout)(model())
    norm = np.sqrt(np.sum(np.square(gradient["W"])) + np.sum(np.square(gradient["v"])))
    np.testing.assert_allclose(tp.global_norm(gradient), norm, rtol=1e-6)
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(1.0)), layout)
    after, _ = optim.step(tx, jax.grad(loss)(model()), tx.init(model()), model())
    np.testing.assert_allclose(after["W"], model()["W"] - gradient["W"] / norm, rtol=1e-5)


def test_an_average_keeps_the_alias_the_transpose():
    layout = tp.layout(model(), ties=TIES)
    online = tp.maptrainable(lambda leaf: leaf + 1, model(), trainable=layout)
    target = tp.ema(model(), online, decay=0.75, trainable=layout)
    np.testing.assert_allclose(target["W"], model()["W"] + 0.25)
    np.testing.assert_array_equal(target["t"], target["W"].T)


def test_it_is_printed():
    assert "t (transpose)" in str(tp.layout(model(), ties=TIES))
    assert tp.layout(model(), ties=TIES).size == 9


def to_the_third(x: jax.Array) -> jax.Array:
    return x**3


def plus_one(x: jax.Array) -> jax.Array:
    return x + 1


@pytest.mark.parametrize("transform", [to_the_third, plus_one])
def test_a_transform_that_is_not_linear_is_refused(transform):
    square = {"W": jnp.ones((2, 2)), "t": jnp.ones((2, 2))}
    with pytest.raises(ValueError, match="linear"):
        tp.layout(square, ties={"t": ("W", transform)})


# -- A language model whose head is its embedding, transposed

TEXT = "what is tied is one parameter, and one parameter takes one step. "
LETTERS = sorted(set(TEXT))


class LanguageModel(eqx.Module):
    """The next letter from the last three."""

    embed: jax.Array  # (letters, width)
    body: eqx.nn.MLP
    head: jax.Array  # (width, letters)

    def __init__(self, key: jax.Array, width: int = 16) -> None:
        keys = jax.random.split(key)
        self.embed = 0.3 * jax.random.normal(keys[0], (len(LETTERS), width))
        self.body = eqx.nn.MLP(3 * width, width, 32, 1, key=keys[1])
        self.head = self.embed.T

    def __call__(self, letters: jax.Array) -> jax.Array:
        return self.body(self.embed[letters].reshape(-1)) @ self.head


tp.declare(LanguageModel, ties={"head": ("embed", jnp.transpose)})


def surprise(model: LanguageModel, letters: jax.Array) -> jax.Array:
    windows = jnp.stack([letters[i : i - 3] for i in range(3)], axis=1)
    logits = jax.vmap(model)(windows)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, letters[3:]))


def test_a_language_model_with_a_tied_head():
    model = LanguageModel(jax.random.key(0))
    letters = jnp.array([LETTERS.index(letter) for letter in 3 * TEXT])
    layout = tp.layout(model)
    assert layout.ties == {"embed": ("head",)}
    assert layout.size == sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))) - model.head.size
    tx = optim.trainable(optax.adam(1e-2), layout)

    @jax.jit
    def train(params, rest, letters):
        def step(carry, _):
            params, state = carry
            model = tp.combine(params, rest)
            value, gradient = tp.value_and_grad(surprise, layout)(model, letters)
            model, state = optim.step(tx, gradient, state, model)
            return (tp.partition(model, layout)[0], state), value

        return jax.lax.scan(step, (params, tx.init(tp.combine(params, rest))), None, 150)

    with jax.numpy_dtype_promotion("standard"):
        params, rest = tp.partition(model, layout)
        (params, _), values = train(params, rest, letters)
    trained = tp.combine(params, rest)
    assert values[0] > 2.5
    assert values[-1] < 0.3
    assert surprise(trained, letters) < 0.3
    np.testing.assert_array_equal(trained.head, trained.embed.T)
    gradient = jax.grad(
        lambda embed, head: surprise(eqx.tree_at(lambda m: (m.embed, m.head), model, (embed, head)), letters), (0, 1)
    )
    of_embed, of_head = gradient(model.embed, model.head)
    assert_close(tp.grad(surprise)(model, letters).embed, of_embed + of_head.T)
