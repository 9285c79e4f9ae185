"""A classifier of digits that is less sure of itself where it knows little: Laplace's approximation of its last layer.

    python examples/laplace.py [--plot FILE]

A net that learns from 150 images tells them without an error, and is too sure of others. So the weights of its last
layer are taken for random, with everything below frozen: around what was trained, normal, with the curvature of the
loss and that of a prior as precision (Daxberger et al., 2021, "Laplace Redux"). `nested.ggn_operator` is the curvature.
The scores, linear in the weights, are then normal too, and an image that is unlike all others has scores of large
variance. Only the precision of the prior is chosen, on other images; nothing is trained again.

The same variances come without any matrix over weights from `nested.kernel`, as those of a Gaussian process.
"""

import argparse
import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import treeparams as tp
from treeparams import nested

TRAIN, CHOOSE, WIDTH, BATCH = 150, 300, 32, 30
LAST = "layers.2"  # what has a posterior; any other selection will do
PRECISIONS = np.geomspace(1, 1000, 13)


def scores(net: Any, image: Array) -> Array:
    return net(image.reshape(-1))


def all_scores(net: Any, images: Array) -> Array:
    return jax.vmap(scores, (None, 0))(net, images)


def train(images: Array, labels: Array, key: Array, epochs: int) -> eqx.nn.MLP:
    made, drawn = jax.random.split(key)
    params, rest = tp.partition(eqx.nn.MLP(64, 10, WIDTH, 2, key=made))
    tx = optax.adam(2e-3)

    def loss(params: Any, batch: Array) -> Array:
        found = all_scores(tp.combine(params, rest), images[batch])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(found, labels[batch]))

    def step(carry: Any, batch: Array) -> Any:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, batch), state)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def epoch(carry: Any, key: Array) -> Any:
        return jax.lax.scan(step, carry, jax.random.permutation(key, len(images)).reshape(-1, BATCH))[0]

    carry = params, tx.init(params)
    for each in tqdm(jax.random.split(drawn, epochs), "training", ncols=100):
        carry = epoch(carry, each)
    return tp.combine(carry[0], rest)


class Posterior(NamedTuple):
    """Of the last layer, as eigenvalues and eigenvectors of the curvature, to which a prior adds its precision."""

    net: eqx.nn.MLP
    values: Array
    vectors: Array

    def variances(self, images: Array, precision: Any) -> Array:
        """Of each score of each image, shape `(images, 10)`."""
        along = nested.parameter_jacobian(scores, LAST)(self.net, images) @ self.vectors
        return along**2 @ (1 / (self.values + precision))

    def chances(self, images: Array, precision: Any) -> Array:
        """Of each digit: of scores that are normal, where the net itself has one value (MacKay, 1992)."""
        spread = jnp.sqrt(1 + jnp.pi / 8 * self.variances(images, precision))
        return jax.nn.softmax(all_scores(self.net, images) / spread)


@tp.jit
def posterior(net: eqx.nn.MLP, images: Array, labels: Array) -> Posterior:
    total = lambda found: jnp.sum(optax.softmax_cross_entropy_with_integer_labels(found, labels))
    curvature = nested.ggn_operator(all_scores, total, LAST)(net, images)
    values, vectors = jnp.linalg.eigh(curvature @ jnp.eye(curvature.layout.size))
    return Posterior(net, jnp.maximum(values, 0), vectors)


def variances_of_process(net: eqx.nn.MLP, known: Array, images: Array, precision: Any) -> Array:
    """What `Posterior.variances` gives, from kernels between images: what is known takes away from the prior."""
    kernel = lambda xs, ys: nested.kernel(scores, LAST)(net, xs, ys) / precision
    chance = jax.nn.softmax(all_scores(net, known))
    # The curvature of the loss of each image in its scores is R R^T.
    root = jax.vmap(lambda p: jnp.diag(jnp.sqrt(p)) - jnp.outer(p, jnp.sqrt(p)))(chance)
    times = lambda matrix: jnp.einsum("anb,nbc->anc", matrix.reshape(len(matrix), -1, 10), root).reshape(matrix.shape)
    across = times(kernel(images, known))
    inner = times(times(kernel(known, known)).T)
    taken = jnp.linalg.solve(jnp.eye(len(inner)) + inner, across.T)
    return (jnp.diagonal(kernel(images, images)) - jnp.sum(across.T * taken, axis=0)).reshape(len(images), -1)


class Quality(NamedTuple):
    """How good chances are; bins of the highest one: how high on average, how often right, and how many images."""

    loss: float
    bins: np.ndarray  # (3, bins)

    @property
    def error(self) -> float:
        """The expected calibration error."""
        sure, right, count = self.bins
        return float(np.sum(np.abs(sure - right) * count) / np.sum(count))


def quality(chances: Array, labels: Any) -> Quality:
    found = np.asarray(chances, float)
    loss = -np.mean(np.log(found[np.arange(len(labels)), labels] + 1e-12))
    sure, right = found.max(axis=1), found.argmax(axis=1) == labels
    bins = np.minimum((10 * sure).astype(int), 9)
    of_bins = [(sure[bins == i].mean(), right[bins == i].mean(), np.sum(bins == i)) for i in np.unique(bins)]
    return Quality(float(loss), np.transpose(of_bins))


def corrupted(images: np.ndarray, seed: int) -> dict[str, Array]:
    """Images as they are, and what a net should be less sure of."""
    noise = np.random.default_rng(seed).normal(size=images.shape)
    return {
        "as they are": jnp.asarray(images),
        "turned by 15 degrees": jnp.asarray(rotate(images, 15, axes=(1, 2), reshape=False, order=1)),
        "with noise of 0.3": jnp.asarray(images + 0.3 * noise, jnp.float32),
    }


class Outcome(NamedTuple):
    """Before and after on each kind of images, and how far both forms of the variances are apart, relatively."""

    qualities: dict[str, tuple[Quality, Quality]]
    apart: float


def main(epochs: int = 400, seed: int = 0, plot: str = "") -> Outcome:
    """Trains a classifier, takes its last layer for random; returns how well calibrated it is before and after."""
    pixels, labels = load_digits(return_X_y=True)
    data = (pixels / 16).astype(np.float32).reshape(-1, 8, 8), labels.astype(np.int32)
    images, others, labels, test_labels = train_test_split(
        *data, train_size=TRAIN + CHOOSE, stratify=labels, random_state=seed
    )
    images, chosen_on = jnp.split(jnp.asarray(images), [TRAIN])
    labels, chosen_by = np.split(labels, [TRAIN])
    net = train(images, jnp.asarray(labels), jax.random.key(seed), epochs)
    found = posterior(net, images, jnp.asarray(labels))
    chances = tp.jit(Posterior.chances)
    losses = [quality(chances(found, chosen_on, each), chosen_by).loss for each in PRECISIONS]
    precision = PRECISIONS[np.argmin(losses)]

    qualities, row, rows = {}, "{:20}  {:>5}  {:>14}  {:>17}".format, []
    for name, some in corrupted(np.asarray(others), seed).items():
        before = jax.nn.softmax(all_scores(net, some))
        after = chances(found, some, precision)
        qualities[name] = both = quality(before, test_labels), quality(after, test_labels)
        right = np.mean(np.argmax(before, axis=1) == test_labels)
        told = [f"{one:.3f} -> {other:.3f}" for one, other in zip(*[(q.loss, q.error) for q in both], strict=True)]
        rows.append(row(name, f"{right:.1%}", *told))
    print(f"\n{tp.layout(net, LAST)}\nprecision of the prior, chosen on {CHOOSE} images: {precision:.2f}\n")
    print(row(f"{len(others):,} other images", "right", "log loss", "calibration error"), *rows, sep="\n")

    few = jnp.asarray(others[:20])
    want = found.variances(few, precision)
    apart = jnp.max(jnp.abs(variances_of_process(net, images, few, precision) / want - 1))
    if plot:
        draw_reliability(plot, qualities)
    return Outcome(qualities, float(apart))


def draw_reliability(plot: str, qualities: dict[str, tuple[Quality, Quality]]) -> None:
    picture = Figure(figsize=(8.5, 4), layout="constrained")
    picture.suptitle("Laplace: how sure it is comes nearer to how often it is right", x=0.01, ha="left")
    for axes, (name, both) in zip(picture.subplots(1, len(qualities), sharey=True), qualities.items(), strict=True):
        axes.plot([0, 1], [0, 1], "k:", linewidth=1)
        for each, label in zip(both, ("the net", "Laplace"), strict=True):
            sure, right, count = each.bins
            enough = count >= 10  # of fewer images the share of right ones is chance
            axes.plot(sure[enough], right[enough], "o-", label=f"{label}: {each.error:.3f}")
        axes.set_title(name, weight="normal")
        axes.set_xlabel("how sure of the digit")
        axes.legend(title="calibration error")
    picture.axes[0].set_ylabel("how often right")
    picture.savefig(plot)


def claims(outcome: Outcome) -> dict[str, Any]:
    pairs = list(outcome.qualities.values())
    plain = pairs[0][1].error
    return {
        "log loss is less on all images, corrupted or not": all(after.loss < before.loss for before, after in pairs),
        "so is the calibration error": all(after.error < before.error for before, after in pairs),
        f"which is below 5 % on images as they are: {plain:.1%}": plain < 0.05,
        f"variances from weights and from kernels agree to 1 %: {outcome.apart:.2%}": outcome.apart < 0.01,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--plot", help="a picture to write")
    checked = claims(main(**vars(parser.parse_args())))
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
