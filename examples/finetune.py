"""Fine-tuning in stages with one optimiser: what rests is not touched, what thaws goes on, what is new starts fresh.

    python examples/finetune.py [--plot FILE]

A small convolutional network that knows the digits 0 to 4 learns 5 to 9, from the head down: first a new head trains,
then the last block alone, then everything. `optim.set_trainable` leads from one stage to the next. While the head
rests, its moments and its count wait in the state; in the last stage it goes on with them.

The images, 1,797 of 8 by 8 pixels, come with scikit-learn: `pip install -e '.[examples]'`.
"""

import argparse
import itertools
import sys
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
from treeparams import optim

CHANNELS, DIGITS, BATCH = 8, 5, 32
STAGES = {"the head": "head", "the last block": "blocks.1", "everything": None}  # as `trainable` of `tp.layout`
LAYERS = "head", "blocks.1", "blocks.0", "stem"
# `optim.trainable` takes the model; all within it is plain Optax, and sees what trains and nothing else.
OPTIMISER = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.adam(3e-3)))


class Network(eqx.Module):
    """Tells which of five digits an image shows."""

    mean: Array = tp.field(trainable=False)  # of the digits 0 to 4: no parameter in any stage
    stem: eqx.nn.Conv2d
    blocks: tuple[eqx.nn.Conv2d, ...]
    head: eqx.nn.Linear

    def __init__(self, images: Array, *, key: Array) -> None:
        stem, head, *blocks = jax.random.split(key, 4)
        self.mean = jnp.mean(images, axis=0)
        self.stem = eqx.nn.Conv2d(1, CHANNELS, kernel_size=3, padding=1, key=stem)
        self.blocks = tuple(eqx.nn.Conv2d(CHANNELS, CHANNELS, kernel_size=3, padding=1, key=each) for each in blocks)
        self.head = eqx.nn.Linear(4 * CHANNELS, DIGITS, key=head)

    def __call__(self, image: Array) -> Array:
        """The score of each digit."""
        features = self.stem(2 * (image - self.mean)[None])
        for block in self.blocks:
            features = features + jax.nn.gelu(block(features))
        quarters = features.reshape(CHANNELS, 2, 4, 2, 4).mean(axis=(2, 4))
        return self.head(quarters.reshape(-1))


def digits(seed: int, only: range, test_size: float) -> tuple[Any, Any]:
    """Images of shape `(n, 8, 8)`, and which digits they show, counted from the first: to train and to test on."""
    pixels, labels = load_digits(return_X_y=True)
    chosen = np.isin(labels, only)
    images = (pixels[chosen] / 16).astype(np.float32).reshape(-1, 8, 8)
    labels = labels[chosen].astype(np.int32) - only.start
    parts = train_test_split(images, labels, test_size=test_size, stratify=labels, random_state=seed)
    return tuple(parts[::2]), tuple(parts[1::2])


def loss(model: Network, images: Array, labels: Array) -> Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels))


@jax.jit
def epoch(model: Network, state: tp.types.TrainableState, data: Any, key: Array) -> Any:
    """One pass over the images in random order."""
    images, labels = data
    # What trains is static and part of the state. There is no backward work for what rests.
    value_and_grad = tp.value_and_grad(loss, state.layout)

    def step(carry: Any, batch: Array) -> Any:
        model, state = carry
        value, grads = value_and_grad(model, images[batch], labels[batch])
        return optim.step(OPTIMISER, grads, state, model), value

    # What does not fill a batch waits for another epoch.
    order = jax.random.permutation(key, len(images))[: len(images) // BATCH * BATCH]
    return jax.lax.scan(step, (model, state), order.reshape(-1, BATCH))


@jax.jit
def accuracy(model: Network, images: Array, labels: Array) -> Array:
    return jnp.mean(jnp.argmax(jax.vmap(model)(images), axis=1) == labels)


class Stage(NamedTuple):
    """Where a stage ended."""

    model: Network
    state: tp.types.TrainableState
    losses: Array  # at each step
    accuracy: float  # on the images to test on


def train(title: str, model: Network, state: Any, data: Any, test: Any, key: Array, epochs: int) -> Stage:
    losses = []
    for each in (bar := tqdm(jax.random.split(key, epochs), title, ncols=100)):
        (model, state), values = epoch(model, state, data, each)
        losses.append(values)
        bar.set_postfix(loss=f"{values.mean():.4f}", refresh=False)
    return Stage(model, state, jnp.concatenate(losses), float(accuracy(model, *test)))


def main(epochs: int = 10, seed: int = 0, plot: str = "") -> dict[str, Stage]:
    """Fine-tunes a small network on handwritten digits, stage by stage; returns all stages, pretraining first."""
    known, new = digits(seed, range(5), 0.2), digits(seed, range(5, 10), 0.5)
    keys = jax.random.split(jax.random.key(seed), 3 + len(STAGES))
    model = Network(jnp.asarray(known[0][0]), key=keys[0])
    stages = {"0 to 4": train("0 to 4, everything", model, OPTIMISER.init(model), *known, keys[1], epochs)}
    model = stages["0 to 4"].model
    model = eqx.tree_at(lambda model: model.head, model, eqx.nn.Linear(4 * CHANNELS, DIGITS, key=keys[2]))
    state = OPTIMISER.init(model)
    for (title, trainable), key in zip(STAGES.items(), keys[3:], strict=True):
        # Of the first stage nothing is to be held, since no leaf has been trained yet.
        state = optim.set_trainable(OPTIMISER, state, model, trainable, reset=title == "the head")
        stages[title] = train(f"5 to 9, {title}", model, state, *new, key, epochs)
        model, state = stages[title].model, stages[title].state
    print(f"\nAfter all stages:\n\n{optim.report(OPTIMISER, model, state)}\n")
    row = "{:14}  {:>15}  {:>13}".format
    print(row("stage", "trained numbers", "test accuracy"))
    for title, each in stages.items():
        print(row(title, f"{each.state.layout.size:,}", f"{each.accuracy:.1%}"))
    if plot:
        draw(stages, plot)
    return stages


def draw(stages: dict[str, Stage], plot: str) -> None:
    """The loss at each step, and which layers are trained when."""
    picture = Figure(figsize=(8.5, 5), layout="constrained")
    top, bottom = picture.subplots(2, sharex=True, height_ratios=(3, 1))
    top.set_title("With everything thawed, more of the new digits are told than by the head alone")
    end = 0
    for i, title in enumerate(STAGES):
        stage, start = stages[title], end
        end += len(stage.losses)
        top.plot(range(start, end), stage.losses, color=f"C{i}")
        said = f"{title}\n{stage.accuracy:.1%} in the test"
        top.annotate(said, ((start + end) / 2, 0.97), xycoords=("data", "axes fraction"), ha="center", va="top")
        trained = [layer for layer in LAYERS if any(path.startswith(layer) for path in stage.state.layout.paths)]
        bottom.barh(trained, end - start, left=start, color=f"C{i}", edgecolor="white")
    top.set(yscale="log", ylabel="loss", ylim=(None, 20))
    bottom.set(ylabel="trained", xlabel="step", xlim=(0, end), ylim=(3.5, -0.5))
    picture.savefig(plot)


def claims(stages: dict[str, Stage]) -> dict[str, Any]:
    end, head = stages["everything"], stages["the head"].accuracy
    changes = [(tp.diff(one.model, other.model), other) for one, other in itertools.pairwise(stages.values())]
    return {
        "each stage changes what it trains, and not a bit of all else": all(
            set(diff.paths) == set(stage.state.layout.paths) for diff, stage in changes
        ),
        f"at the end more digits are told than by the head alone: {end.accuracy:.1%} for {head:.1%}": end.accuracy
        > head,
        f"at the end at least 94% are told: {end.accuracy:.1%}": end.accuracy >= 0.94,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--plot", help="a picture to write")
    checked = claims(main(**vars(parser.parse_args())))
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
