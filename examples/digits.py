"""Handwritten digits: frozen statistics, a tied autoencoder, two stages of training and an average, with plain Optax.

    python examples/digits.py           trains a tree: `tp.partition` and `tp.combine`
    python examples/digits.py --flat    trains a vector: `tp.ravel`

The network normalises an image with statistics of the training data, which are never trained, encodes it, tells from
the code which digit it is, and decodes the code with the transposed weight of the encoder: one parameter in two places.
Stage one trains the heads on the random encoder as it is, stage two trains everything. Both forms take the same steps:
as called above, all 1,320 losses agree to a relative 1e-5 on a CPU. They part by rounding alone, which grows with more
epochs.

The images, 1,797 of 8 by 8 pixels, come with scikit-learn: `pip install 'treeparams[examples]'`.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import treeparams as tp

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"this example needs {error.name}: pip install 'treeparams[examples]'") from None

PIXELS, WIDTH, DIGITS, BATCH = 64, 128, 10, 32
OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))


class Normalise(eqx.Module):
    """Statistics of the training data: arrays of the model, but no parameters."""

    mean: Array = tp.field(trainable=False)
    scale: Array = tp.field(trainable=False)

    def __init__(self, images: Array) -> None:
        self.mean = jnp.mean(images, axis=0)
        self.scale = jnp.std(images, axis=0) + 0.1  # some pixels are blank in every image

    def __call__(self, image: Array) -> Array:
        """The image with each pixel around zero, at about unit variance."""
        return (image - self.mean) / self.scale


class Network(eqx.Module):
    """Encodes an image; from the code it tells the digit and reconstructs the image."""

    normalise: Normalise
    encoder: eqx.nn.Linear
    decoder: eqx.nn.Linear
    classifier: eqx.nn.Linear

    def __init__(self, images: Array, *, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.normalise = Normalise(images)
        self.encoder = eqx.nn.Linear(PIXELS, WIDTH, key=keys[0])
        self.decoder = eqx.nn.Linear(WIDTH, PIXELS, key=keys[1])
        self.classifier = eqx.nn.Linear(WIDTH, DIGITS, key=keys[2])

    def __call__(self, image: Array) -> tuple[Array, Array]:
        """The score of each digit, and the error of the reconstruction."""
        pixels = self.normalise(image)
        code = jax.nn.relu(self.encoder(pixels))
        return self.classifier(code), jnp.mean(jnp.square(self.decoder(code) - pixels))


# Said once of the class: every layout of a Network knows it, inside `jit` too, where arrays have lost their identity.
tp.declare(Network, ties={"decoder.weight": ("encoder.weight", jnp.transpose)})


def loss(model: Network, images: Array, labels: Array) -> Array:
    scores, errors = jax.vmap(model)(images)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels) + errors)


@jax.jit
def accuracy(model: Network, images: Array, labels: Array) -> Array:
    scores, _ = jax.vmap(model)(images)
    return jnp.mean(jnp.argmax(scores, axis=1) == labels)


def split(model: Network, layout: tp.Layout, flat: bool) -> tuple[Any, Any]:
    """What Optax gets, and the way back to the model: a pytree of the frozen arrays, so it may be passed to `jit`."""
    if flat:
        return tp.ravel(model, layout)
    params, rest = tp.partition(model, layout)
    return params, jax.tree_util.Partial(tp.combine, rest=rest)


@jax.jit
def epoch(params: Any, state: Any, ema: tp.Ema, restore: Any, images: Array, labels: Array, key: Array) -> Any:
    """One pass over the images in random order; those that do not fill a batch wait for another epoch."""

    def step(carry: Any, batch: Array) -> Any:
        params, state, ema = carry
        # Frozen arrays are in `restore` and not in `params`: no backward work for them, and Optax never sees them.
        value, grads = jax.value_and_grad(lambda p: loss(restore(p), images[batch], labels[batch]))(params)
        updates, state = OPTIMISER.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state, ema.update(restore(params))), value

    batches = jax.random.permutation(key, len(images))[: len(images) // BATCH * BATCH].reshape(-1, BATCH)
    return jax.lax.scan(step, (params, state, ema), batches)


def train(
    model: Network, ema: tp.Ema, layout: tp.Layout, data: Any, key: Array, epochs: int, flat: bool
) -> tuple[Network, tp.Ema, Array]:
    """Trains what the layout says; returns the model, its average, and the loss of each step."""
    params, restore = split(model, layout, flat)
    state = OPTIMISER.init(params)  # of the slots of this layout; another stage has others
    losses = []
    for each in (bar := tqdm(jax.random.split(key, epochs), "training", ncols=80, unit="epoch")):
        (params, state, ema), values = epoch(params, state, ema, restore, *data, each)
        losses.append(values)
        bar.set_postfix(loss=f"{values.mean():.4f}")
    return restore(params), ema, jnp.concatenate(losses)


def load(seed: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Images and labels to train on, and those to test on."""
    pixels, digits = map(np.asarray, load_digits(return_X_y=True))
    pixels, digits = (pixels / 16).astype(np.float32), digits.astype(np.int32)
    parts = train_test_split(pixels, digits, test_size=0.2, stratify=digits, random_state=seed)
    images, test_images, labels, test_labels = map(jnp.asarray, parts)
    return (images, labels), (test_images, test_labels)


def run(epochs: int, seed: int, flat: bool) -> tuple[Array, dict[str, bool]]:
    """Both stages; returns the loss of each step and what was checked after them."""
    data, test = load(seed)
    print(f"{len(data[0]):,} images to train on, {len(test[0])} to test on; trains a {'vector' if flat else 'tree'}")
    keys = jax.random.split(jax.random.key(seed), 3)
    start = tp.tie(Network(data[0], key=keys[0]))  # sets decoder.weight, as the class declares
    heads = tp.layout(start, freeze="encoder")  # freezes decoder.weight too: a tie is one parameter
    stages = {"Stage one: the heads": heads, "Stage two: the encoder too": heads.thaw("encoder")}
    models, losses, scores, ema = [start], [], [], tp.Ema(start, decay=0.99, warmup=True)
    for (title, layout), key in zip(stages.items(), keys[1:], strict=True):
        print(f"\n{title}\n\n{layout}\n")
        model, ema, values = train(models[-1], ema, layout, data, key, epochs, flat)
        scores = [accuracy(model, *test), accuracy(ema.average, *test)]
        print("test accuracy: model {:.1%}, average {:.1%}".format(*scores))
        models.append(model)
        losses.append(values)
    _, middle, end = models
    return jnp.concatenate(losses), {
        **facts(start, middle, end, ema.average),
        "test accuracy is at least 95%, of model and average": bool(min(scores) >= 0.95),
    }


def facts(start: Network, middle: Network, end: Network, average: Network) -> dict[str, bool]:
    """What frozen and tied mean, looked up in the models before, between and after the stages."""
    ends = end, average
    return {
        "the encoder is bit for bit the same after stage one": same_bits(start.encoder, middle.encoder),
        "the encoder is another after stage two": not same_bits(start.encoder, end.encoder),
        "the statistics are bit for bit the same, in model and average": all(
            same_bits(start.normalise, model.normalise) for model in ends
        ),
        "decoder.weight is encoder.weight transposed, in model and average": all(
            same_bits(model.decoder.weight, model.encoder.weight.T) for model in ends
        ),
    }


def same_bits(these: Any, those: Any) -> bool:
    pairs = zip(jax.tree.leaves(these), jax.tree.leaves(those), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def main(argv: Sequence[str] | None = None) -> Array:
    parser = argparse.ArgumentParser(description="Trains a tied, partly frozen network on handwritten digits.")
    parser.add_argument("--flat", action="store_true", help="train one vector (tp.ravel) in place of a tree")
    parser.add_argument("--epochs", type=int, default=15, help="of each of the two stages (default: 15)")
    parser.add_argument("--seed", type=int, default=0, help="of the split of the data, the start and the batches")
    losses, checks = run(**vars(parser.parse_args(argv)))
    print("\nChecked:")
    for what, holds in checks.items():
        print(f"  {'ok' if holds else 'FAILED'}  {what}")
    if not all(checks.values()):
        raise SystemExit(1)
    return losses


if __name__ == "__main__":
    main()
