"""Ties through a transform, from the gradient to the average."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeparams as tp
from treeparams import optim

from .zoo import assert_close

W = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
MODEL = {"W": W, "t": W.T, "v": np.array([7.0, 8.0, 9.0], np.float32)}
LAYOUT = tp.layout(MODEL, ties={"t": ("W", jnp.transpose)})
# By hand: of the loss below, and after a step of a tenth of it.
TOTAL = [[98.6486, 107.1512, 113.7883], [154.7071, 170.7440, 183.8160]]
AFTER = [[-8.8649, -8.7151, -8.3788], [-11.4707, -12.0744, -12.3816]]


@jax.jit
def loss(model: dict[str, jax.Array]) -> jax.Array:
    x = jnp.array([1.0, 0.1])
    return jnp.sum((model["W"] @ jnp.log(model["t"] @ x + model["v"])) ** 2)


def test_a_raw_gradient_at_the_alias_is_pulled_back():
    raw = jax.grad(loss)(MODEL)
    for gradient in (tp.grad(loss, LAYOUT)(MODEL), tp.project(MODEL, raw, LAYOUT)):
        np.testing.assert_allclose(gradient["W"], TOTAL, 1e-5)
        assert gradient["t"] is None
    vector, restructure = tp.ravel(MODEL, LAYOUT)
    of_vector = jax.grad(lambda vector: loss(restructure(vector)))(vector)
    assert_close(of_vector, restructure.ravel_gradient(raw))
    np.testing.assert_allclose(restructure.view(of_vector)["W"], TOTAL, 1e-5)


def test_a_step_and_an_average_keep_the_alias_the_transpose():
    tx = optim.trainable(optax.sgd(0.1), LAYOUT)
    gradient = tp.grad(loss, LAYOUT)(MODEL)
    step = lambda gradient: optim.step(tx, gradient, tx.init(MODEL), MODEL)[0]
    walked = tp.maptrainable(lambda x, g: x - 0.1 * g, MODEL, gradient, trainable=LAYOUT)
    for after in (step(gradient), step(jax.grad(loss)(MODEL)), walked):
        np.testing.assert_allclose(after["W"], AFTER, 1e-4)
        np.testing.assert_array_equal(after["t"], after["W"].T)
    target = tp.ema(MODEL, walked, decay=0.75, trainable=LAYOUT)
    np.testing.assert_allclose(target["W"], 0.75 * W + 0.25 * walked["W"], 1e-5)
    np.testing.assert_array_equal(target["t"], target["W"].T)


def test_clipping_acts_on_the_sum():
    gradient = tp.grad(loss, LAYOUT)(MODEL)
    norm = np.sqrt(np.sum(np.square(gradient["W"])) + np.sum(np.square(gradient["v"])))
    np.testing.assert_allclose(tp.global_norm(gradient), norm, 1e-6)
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(1.0)), LAYOUT)
    after, _ = optim.step(tx, jax.grad(loss)(MODEL), tx.init(MODEL), MODEL)
    np.testing.assert_allclose(after["W"], W - gradient["W"] / norm, 1e-5)


# -- A language model whose head is its embedding, transposed

TEXT = "what is tied is one parameter, and one parameter takes one step. "
LETTERS = sorted(set(TEXT))


class LanguageModel(eqx.Module):
    """The next letter from the last three."""

    embed: jax.Array  # (letters, width)
    body: eqx.nn.MLP
    head: jax.Array = tp.field(tied_to="embed", transform=jnp.transpose)  # (width, letters)

    def __init__(self, key: jax.Array, width: int = 16) -> None:
        keys = jax.random.split(key)
        self.embed = 0.3 * jax.random.normal(keys[0], (len(LETTERS), width))
        self.body = eqx.nn.MLP(3 * width, width, 32, 1, key=keys[1])
        self.head = self.embed.T

    def __call__(self, letters: jax.Array) -> jax.Array:
        return self.body(self.embed[letters].reshape(-1)) @ self.head


def surprise(model: LanguageModel, letters: jax.Array) -> jax.Array:
    windows = jnp.stack([letters[i : i - 3] for i in range(3)], axis=1)
    logits = jax.vmap(model)(windows)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, letters[3:]))


def test_a_language_model_with_a_tied_head(standard_promotion):
    model = LanguageModel(jax.random.key(0))
    letters = np.array([LETTERS.index(letter) for letter in 3 * TEXT])
    layout = tp.layout(model)
    assert layout.ties == {"embed": ("head",)}
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    assert layout.size == sum(array.size for array in arrays) - model.head.size
    tx = optim.trainable(optax.adam(1e-2), layout)

    @jax.jit
    def train(params, rest, letters):
        def step(carry, _):
            params, state = carry
            model = tp.combine(params, rest)
            value, gradient = tp.value_and_grad(surprise, layout)(model, letters)
            model, state = optim.step(tx, gradient, state, model)
            return (tp.partition(model, layout)[0], state), value

        (params, _), values = jax.lax.scan(step, (params, tx.init(tp.combine(params, rest))), None, 150)
        return params, values

    params, rest = tp.partition(model, layout)
    params, values = train(params, rest, letters)
    trained = tp.combine(params, rest)
    assert values[0] > 2.5
    assert values[-1] < 0.3
    np.testing.assert_array_equal(trained.head, trained.embed.T)
