"""Ties through a transform: what one can be, and from the gradient to the average."""

import functools
import pickle
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .zoo import assert_close, ramp as leaf


def add_one(x: Any) -> Any:
    return x + 1


def all_of(x: Any) -> Any:
    return x[:]


def scaled(x: Any, by: Any = 1) -> Any:
    return x * by


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


# -- Transforms


@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        (jnp.transpose, (3, 2)),
        (np.transpose, (3, 2)),
        (jnp.negative, (2, 3)),
        (jnp.ravel, (6,)),
        (functools.partial(functools.partial(jnp.reshape), shape=(6, 1)), (6, 1)),
    ],
)
def test_an_alias_is_a_linear_function_of_its_source(transform: Any, shape: tuple[int, ...]):
    model = {"a": leaf(2, 3), "b": np.zeros(shape, "f")}
    layout = tp.layout(model, ties={"b": ("a", transform)})
    assert layout.slots == (tp.Slot("a", ("b",), (2, 3), jnp.dtype("float32"), 0, 6),)
    np.testing.assert_array_equal(tp.combine(*tp.partition(model, layout))["b"], transform(model["a"]))
    assert layout == pickle.loads(pickle.dumps(layout))


def test_transforms_chain():
    model = {"a": leaf(2, 3), "b": leaf(3, 2), "c": leaf(3, 2)}
    layout = tp.layout(model, ties={"c": ("b", jnp.negative), "b": ("a", jnp.transpose)})
    np.testing.assert_array_equal(tp.combine(*tp.partition(model, layout))["c"], -model["a"].T)
    with pytest.raises(ValueError, match=r"'c' is negative of transpose of 'a', its source.*say it of the source 'a'"):
        layout.freeze("c")


def test_partials_are_equal_by_what_they_bind_and_its_type():
    model = {"a": leaf(2, dtype=jnp.bfloat16), "b": leaf(2, dtype=jnp.bfloat16)}
    of = lambda by: tp.layout(model, ties={"b": ("a", functools.partial(scaled, by=by))})
    with jax.numpy_dtype_promotion("standard"):
        assert of(2) == of(2) != of(2.0)
        assert of(3) != of(2)
        with pytest.raises(ValueError, match=r"'b' is bfloat16\[2\] and cannot be tied to 'a', which is float32\[2\]"):
            of(np.float32(2))


@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        (jnp.transpose, (4,)),
        (all_of, (4,)),
        (functools.partial(jnp.reshape, shape=(2, 2)), (2, 2)),
    ],
)
def test_a_transform_that_is_the_identity_at_its_shape_is_a_tie_without_one(transform: Any, shape: Any):
    model = {"a": leaf(*shape), "b": leaf(*shape)}
    layout = tp.layout(model, ties={"b": ("a", transform)})
    assert layout.ties == {"a": ("b",)}
    again = tp.combine(*tp.partition(model, layout))
    assert again["a"] is again["b"]
    assert tp.layout(again, ties={"b": ("a", transform)}) == layout  # its own result is no contradiction


class Half:  # an instance has no name at module level: in the next process it is another object
    def __call__(self, x: Any) -> Any:
        return x / 2


def refused() -> list[Any]:
    def local(x: Any) -> Any:
        return x

    made_anew = r"is made anew each time; write a function at module level"
    return [
        (lambda x: x, made_anew),
        (jax.jit(lambda x: x), made_anew),
        (functools.partial(local), made_anew),
        (Half(), r"module level"),
        (functools.partial(jnp.matmul, np.ones((2, 2), "float32")), r"hash"),
        (jnp.square, r"must be linear, and JAX cannot transpose square"),
        (add_one, r"must be linear, and add_one of zeros is not an array of zeros"),
    ]


@pytest.mark.parametrize(("transform", "message"), refused())
def test_what_is_no_transform(transform: Any, message: str):
    square = {"a": leaf(2, 2), "b": leaf(2, 2)}
    for use in (
        lambda: tp.layout(square, ties={"b": ("a", transform)}),
        lambda: tp.tie(square, "b", to="a", transform=transform),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_a_transform_redefined_under_its_name_is_another(monkeypatch):
    model = {"a": np.ones((2, 2), "f"), "b": np.ones((2, 2), "f")}

    def define(scale):
        namespace = {"__name__": __name__}
        exec(f"def redefined(x): return {scale} * x", namespace)
        monkeypatch.setattr(sys.modules[__name__], "redefined", namespace["redefined"], raising=False)
        return tp.layout(model, ties={"b": ("a", namespace["redefined"])})

    first, second = define(2.0), define(3.0)
    assert first != second
    assert float(tp.combine(*tp.partition(model, second))["b"][0, 0]) == 3.0


def test_ensembles_abstract_models_and_labels_at_a_transformed_alias():
    flat = {"b": ("a", functools.partial(jnp.reshape, shape=(6,)))}
    model = {"a": np.ones((2, 3), "f"), "b": np.ones(6, "f")}
    layout = tp.layout(model, ties=flat)
    assert tp.maptrainable(lambda x: "adam", model, trainable=layout) == {"a": "adam", "b": "adam"}
    summed = tp.maptrainable(jnp.sum, model, trainable=layout)  # no leaf any more that the transform takes
    assert summed["a"] is summed["b"]
    params, rest = tp.partition(model, layout)
    stacked = tp.combine({"a": np.stack([params["a"], 2 * params["a"]]), "b": None}, rest)
    np.testing.assert_array_equal(stacked["b"], [[1] * 6, [2] * 6])
    abstract = jax.eval_shape(lambda: model)
    assert tp.combine(*tp.partition(abstract, tp.layout(abstract, ties=flat)))["b"].shape == (6,)


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
