"""Two deep nets in plain Equinox, each a list of layers and a loop over them, and what they learn."""

import pydoc_data.topics
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import digits
from jax import Array

import treeparams as tp

WIDTH, LENGTH, LETTERS, HEADS = 32, 32, 128, 4


class Net(eqx.Module):
    """Layers between a stem and a head."""

    stem: Callable[[Array], Array]
    layers: Sequence[Callable[[Array], Array]]
    head: Callable[[Array], Array]

    def __call__(self, x: Array) -> Array:
        """The scores of an image, or at each letter of a text those of the next one."""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Residual(eqx.Module):
    """A small step, so that rounding does not grow through 500 of them."""

    linear: eqx.nn.Linear
    size: float

    def __call__(self, x: Array) -> Array:
        """Shape `(width,)`, as that of `x`."""
        return x + self.size * jnp.tanh(self.linear(x))


class Block(eqx.Module):
    """Attention to the letters before, and beside it a perceptron for each letter."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP  # its activation, a function, is one of its leaves

    def __init__(self, *, key: Array) -> None:
        attention, mlp = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=mlp)

    def __call__(self, x: Array) -> Array:
        """Shape `(letters, width)`, as that of `x`."""
        normed = jax.vmap(self.norm)(x)
        before = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        return x + self.attention(normed, normed, normed, before) + jax.vmap(self.mlp)(normed)


class Embedding(eqx.Module):
    """A vector for each letter, and for the place where it stands."""

    letters: Array
    places: Array = tp.field(trainable=False)  # sines of many lengths: no parameter

    def __call__(self, text: Array) -> Array:
        """Shape `(letters, width)`."""
        return WIDTH**0.5 * self.letters[text] + self.places


class Scores(eqx.Module):
    """Of all letters, at each place."""

    norm: eqx.nn.LayerNorm
    letters: Array  # those of the embedding: one array at two places is one parameter

    def __call__(self, x: Array) -> Array:
        """Shape `(places, letters)`."""
        return jax.vmap(self.norm)(x) @ self.letters.T


def images(layers: int, key: Array) -> tuple[Net, Array, Array]:
    """A residual net, handwritten digits, and which they are."""
    stem, head, *keys = jax.random.split(key, 2 + layers)
    residuals = [Residual(eqx.nn.Linear(WIDTH, WIDTH, key=each), 1 / layers) for each in keys]
    (pixels, labels), _ = digits(0)
    net = Net(eqx.nn.Linear(64, WIDTH, key=stem), residuals, eqx.nn.Linear(WIDTH, 10, key=head))
    return net, pixels.reshape(-1, 64), labels


def texts(layers: int, key: Array) -> tuple[Net, Any, Any]:
    """A transformer, texts of Python's help, and at each letter the next one."""
    first, *keys = jax.random.split(key, 1 + layers)
    letters = jax.random.normal(first, (LETTERS, WIDTH)) / WIDTH**0.5
    places = jnp.sin(jnp.arange(LENGTH)[:, None] / 10_000 ** jnp.linspace(0, 1, WIDTH)[None])
    net = Net(Embedding(letters, places), [Block(key=each) for each in keys], Scores(eqx.nn.LayerNorm(WIDTH), letters))
    topics = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
    codes = np.frombuffer(topics, np.uint8).astype(np.int32)
    size = len(codes) // LENGTH * LENGTH
    return net, codes[: size - LENGTH].reshape(-1, LENGTH), codes[1 : size - LENGTH + 1].reshape(-1, LENGTH)
