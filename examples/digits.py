"""Handwritten digits: what a class says is frozen or tied stays so, whatever trains it.

    python examples/digits.py [--plot FILE]

The network normalises an image with statistics of the training data, which are no parameters; encodes it; tells from
the code which digit it is; and decodes the code with the encoder's weight, transposed: one parameter in two places. All
this is said once, in the class. The loop is plain JAX and Optax.

Then the same loop trains every array, as `eqx.partition` with `eqx.is_inexact_array` takes them: the statistics drift,
the decoder parts from the encoder, and twice as many parameters learn less.
The images come with scikit-learn: `pip install -e '.[examples]'`.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import treeparams as tp

PIXELS, WIDTH, DIGITS, BATCH = 64, 128, 10, 32
OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))


class Network(eqx.Module):
    """Encodes an image; from the code it tells the digit and reconstructs the image."""

    mean: Array = tp.field(trainable=False)
    scale: Array = tp.field(trainable=False)
    encoder: eqx.nn.Linear
    decoder: eqx.nn.Linear
    classifier: eqx.nn.Linear

    def __init__(self, images: Array, *, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.mean = jnp.mean(images, axis=0)
        self.scale = jnp.std(images, axis=0) + 0.1  # some pixels are blank in every image
        self.encoder = eqx.nn.Linear(PIXELS, WIDTH, key=keys[0])
        self.decoder = eqx.nn.Linear(WIDTH, PIXELS, key=keys[1])
        self.classifier = eqx.nn.Linear(WIDTH, DIGITS, key=keys[2])

    def __call__(self, image: Array) -> tuple[Array, Array]:
        """The score of each digit, and the error of the reconstruction."""
        pixels = (image - self.mean) / self.scale
        code = jax.nn.relu(self.encoder(pixels))
        return self.classifier(code), jnp.mean(jnp.square(self.decoder(code) - pixels))


# Said of the class, so it holds inside `jit` too, where two arrays that were one have lost their identity.
tp.declare(Network, ties={"decoder.weight": ("encoder.weight", jnp.transpose)})


def loss(model: Network, images: Array, labels: Array) -> Array:
    scores, errors = jax.vmap(model)(images)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels) + errors)


@jax.jit
def accuracy(model: Network, images: Array, labels: Array) -> Array:
    scores, _ = jax.vmap(model)(images)
    return jnp.mean(jnp.argmax(scores, axis=1) == labels)


# How a model is taken apart into what Optax gets and the rest, and put together again.
WAYS: dict[str, tuple[Callable[..., tuple[Any, Any]], Callable[..., Network]]] = {
    "as declared": (tp.partition, tp.combine),
    "every array": (lambda model: eqx.partition(model, eqx.is_inexact_array), eqx.combine),
}


@functools.partial(jax.jit, static_argnames="combine")
def epoch(params: Any, rest: Any, state: Any, data: Any, key: Array, combine: Callable[..., Network]) -> Any:
    """One pass over the images in random order."""
    images, labels = data

    def step(carry: Any, batch: Array) -> Any:
        params, state = carry
        # Frozen arrays are in `rest`: no backward work for them, and Optax never sees them.
        value, grads = jax.value_and_grad(lambda p: loss(combine(p, rest), images[batch], labels[batch]))(params)
        updates, state = OPTIMISER.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    # What does not fill a batch waits for another epoch.
    order = jax.random.permutation(key, len(images))[: len(images) // BATCH * BATCH]
    return jax.lax.scan(step, (params, state), order.reshape(-1, BATCH))


def train(name: str, start: Network, data: Any, key: Array, epochs: int) -> list[Network]:
    """The network after each epoch."""
    split, combine = WAYS[name]
    params, rest = split(start)
    state, models = OPTIMISER.init(params), []
    for each in (bar := tqdm(jax.random.split(key, epochs), name, ncols=100)):
        (params, state), values = epoch(params, rest, state, data, each, combine)
        models.append(combine(params, rest))
        bar.set_postfix(loss=f"{values.mean():.4f}", refresh=False)
    return models


def apart(model: Network) -> float:
    """The largest difference of encoder and decoder."""
    return float(jnp.max(jnp.abs(model.decoder.weight - model.encoder.weight.T)))


class Result(NamedTuple):
    """A trained model, and what became of it."""

    model: Network
    accuracy: float  # on the images to test on
    size: int  # numbers that were trained
    drift: float  # of the mean, a statistic: the largest change
    parted: list[float]  # encoder and decoder after each epoch: the largest difference


def main(epochs: int = 15, seed: int = 0, plot: str = "") -> tuple[Network, dict[str, Result]]:
    """Trains a tied, partly frozen network on handwritten digits; returns it untrained and trained in both ways."""
    pixels, labels = load_digits(return_X_y=True)
    data = (pixels / 16).astype(np.float32), labels.astype(np.int32)
    images, test_images, labels, test_labels = train_test_split(
        *data, test_size=0.2, stratify=labels, random_state=seed
    )
    print(f"{len(images):,} images to train on, {len(test_images)} to test on\n")
    first, second = jax.random.split(jax.random.key(seed))
    start = tp.tie(Network(jnp.asarray(images), key=first))  # sets decoder.weight, as the class declares
    print(f"{tp.layout(start)}\n")
    results = {}
    for name, (split, _) in WAYS.items():
        models = train(name, start, (images, labels), second, epochs)
        model = models[-1]
        results[name] = Result(
            model,
            accuracy=float(accuracy(model, test_images, test_labels)),
            size=sum(leaf.size for leaf in jax.tree.leaves(split(start)[0])),
            drift=float(jnp.max(jnp.abs(model.mean - start.mean))),
            parted=[apart(each) for each in models],
        )
    row = "{:11}  {:>13}  {:>10}  {:>14}  {:>12}".format
    print("\n" + row("trained", "test accuracy", "parameters", "mean drifts by", "tie parts by"))
    for name, each in results.items():
        print(row(name, f"{each.accuracy:.1%}", f"{each.size:,}", f"{each.drift:.3f}", f"{each.parted[-1]:.3f}"))
    if plot:
        draw(results, plot)
    return start, results


def draw(results: dict[str, Result], plot: str) -> None:
    """How far encoder and decoder are apart."""
    picture = Figure(figsize=(8.5, 4), layout="constrained")
    axes = picture.subplots()
    for name, each in results.items():
        label = f"{name}: {each.accuracy:.1%} of the digits are told, with {each.size:,} parameters"
        axes.plot(range(1, len(each.parted) + 1), each.parted, "o-", label=label)
    axes.set(title="A tie that the class declares holds; otherwise the two weights part", xlabel="epoch")
    axes.set_ylabel("encoder and decoder differ by")
    axes.legend()
    picture.savefig(plot)


def claims(outcome: tuple[Network, dict[str, Result]]) -> dict[str, Any]:
    declared, every = outcome[1].values()
    return {
        "as declared, the statistics are the same and the tie holds": declared.drift == max(declared.parted) == 0,
        f"as declared, at least 95% of the digits are told: {declared.accuracy:.1%}": declared.accuracy >= 0.95,
        "with every array trained, the statistics drift and the tie parts": min(every.drift, every.parted[-1]) > 1e-3,
        f"and fewer digits are told: {every.accuracy:.1%}": every.accuracy < declared.accuracy,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--plot", help="a picture to write")
    checked = claims(main(**vars(parser.parse_args())))
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
