"""Fine-tuning in stages: a network that knows the digits 0 to 4 learns 5 to 9, from the head down, at a rate per layer.

    python examples/finetune.py                      and look at finetune.png
    python examples/finetune.py --plot norms.png

The small convolutional network is pretrained here, in some seconds. Its new head trains first, then the last block
alone, with the head at rest, then everything: the head goes on where it stopped, with its moments and its own step
count, and the layers below start fresh. The last stage trains the same at a fifth of the rates. The lower a layer, the
lower its rate. Gradients are clipped by their norm, and an average of the parameters is carried along. The statistics
that normalise an image are those of the digits 0 to 4, and never trained.

The plot has the loss, the norm of the gradient and how often it was clipped, as the optimiser's state tells.

The images, 1,797 of 8 by 8 pixels, come with scikit-learn: `pip install 'treeparams[examples]'`.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import treeparams as tp
from treeparams import optim

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"this example needs {error.name}: pip install 'treeparams[examples]'") from None

CHANNELS, BLOCKS, DIGITS, BATCH = 8, 3, 5, 32
RATE, FALL, LIMIT, DECAY = 4e-3, 0.6, 1.0, 0.98
AROUND = 15  # steps, for a mean in the plot


class Stage(NamedTuple):
    """What is trained, and how fast."""

    title: str
    trainable: Any  # as for `tp.layout`
    factor: float = 1.0  # of the rates of all layers


STAGES = (
    Stage("the head", "head"),
    Stage("the last block", f"blocks.{BLOCKS - 1}"),
    Stage("everything", None),
    Stage("everything, slower", None, 0.2),
)
LAYERS = ("head", *(f"blocks.{i}" for i in reversed(range(BLOCKS))), "stem")
RATES = {layer: RATE * FALL**depth for depth, layer in enumerate(LAYERS)}
# A rate that is injected is part of the state, where `optim.adjust` sets it.
RULES = {layer: optax.inject_hyperparams(optax.adam)(learning_rate=rate) for layer, rate in RATES.items()}
# `optim.trainable` takes the model; all within it is plain Optax, and sees what trains and nothing else.
OPTIMISER = optim.trainable(optax.chain(optim.clip_by_global_norm(LIMIT), optim.groups(RULES)))


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


class Block(eqx.Module):
    """Adds to an image what a convolution sees in it."""

    norm: eqx.nn.GroupNorm
    convolution: eqx.nn.Conv2d

    def __init__(self, *, key: Array) -> None:
        self.norm = eqx.nn.GroupNorm(groups=4, channels=CHANNELS)
        self.convolution = eqx.nn.Conv2d(CHANNELS, CHANNELS, kernel_size=3, padding=1, key=key)

    def __call__(self, image: Array) -> Array:
        """An image of the same shape."""
        return image + jax.nn.gelu(self.convolution(self.norm(image)))


class Network(eqx.Module):
    """Tells which of five digits an image shows."""

    normalise: Normalise
    stem: eqx.nn.Conv2d
    blocks: tuple[Block, ...]
    head: eqx.nn.Linear

    def __init__(self, images: Array, *, key: Array) -> None:
        stem, head, *blocks = jax.random.split(key, 2 + BLOCKS)
        self.normalise = Normalise(images)
        self.stem = eqx.nn.Conv2d(1, CHANNELS, kernel_size=3, padding=1, key=stem)
        self.blocks = tuple(Block(key=each) for each in blocks)
        self.head = eqx.nn.Linear(4 * CHANNELS, DIGITS, key=head)

    def __call__(self, image: Array) -> Array:
        """The score of each digit."""
        features = self.stem(self.normalise(image)[None])
        for block in self.blocks:
            features = block(features)
        quarters = features.reshape(CHANNELS, 2, 4, 2, 4).mean(axis=(2, 4))
        return self.head(quarters.reshape(-1))


class Training(NamedTuple):
    """What a step changes."""

    model: Network
    state: optim.TrainableState
    ema: tp.Ema[Network]  # of all layers, those at rest too


class Steps(NamedTuple):
    """What is known of each step of a stage."""

    loss: Array
    norm: Array  # of the gradient, before clipping
    clipped: Array  # steps so far whose gradient was clipped


class Outcome(NamedTuple):
    """A stage that was trained."""

    stage: Stage
    before: Training
    after: Training
    steps: Steps
    scores: tuple[float, float]  # test accuracy of model and average
    traces: int


def loss(model: Network, images: Array, labels: Array) -> Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels))


@jax.jit
def accuracy(model: Network, images: Array, labels: Array) -> Array:
    return jnp.mean(jnp.argmax(jax.vmap(model)(images), axis=1) == labels)


def epoch(traced: list[tp.Layout], training: Training, images: Array, labels: Array, key: Array) -> Any:
    """One pass over the images in random order; those that do not fill a batch wait for another epoch."""
    layout = training.state.layout  # what trains is static, and part of the state
    traced.append(layout)  # Python comes by here once per compiled program
    # Of what trains alone: no backward work for what is frozen, and it is not in the norm that is clipped.
    value_and_grad = tp.value_and_grad(loss, layout)

    def step(training: Training, batch: Array) -> tuple[Training, Steps]:
        model, state, ema = training
        value, grads = value_and_grad(model, images[batch], labels[batch])
        model, state = optim.step(OPTIMISER, grads, state, model)
        clip = optim.clip_state(state)
        return Training(model, state, ema.update(model)), Steps(value, clip.norm, clip.clipped)

    batches = jax.random.permutation(key, len(images))[: len(images) // BATCH * BATCH].reshape(-1, BATCH)
    return jax.lax.scan(step, training, batches)


def train(
    jitted: Callable[..., Any], training: Training, data: Any, key: Array, epochs: int, title: str
) -> tuple[Training, Steps]:
    found = []
    for each in (bar := tqdm(jax.random.split(key, epochs), title, ncols=100, unit="epoch")):
        training, steps = jitted(training, *data, each)
        found.append(steps)
        bar.set_postfix(loss=f"{steps.loss.mean():.4f}")
    return training, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


def begin(model: Network) -> Training:
    return Training(model, OPTIMISER.init(model), tp.Ema(model, DECAY, warmup=True))


def pretrained(jitted: Callable[..., Any], data: Any, key: Array, epochs: int) -> Network:
    """A network that knows the digits 0 to 4."""
    train_on, test = data
    keys = jax.random.split(key)
    start = begin(Network(train_on[0], key=keys[0]))
    start = start._replace(state=optim.adjust(start.state, learning_rate=RATE))  # one rate for all layers
    training, _ = train(jitted, start, train_on, keys[1], epochs, "pretraining")
    model = training.ema.average
    print(f"digits 0 to 4: test accuracy of the average {accuracy(model, *test):.1%}\n")
    return model


def finetuned(
    jitted: Callable[..., Any], traced: list[Any], model: Network, data: Any, key: Array, epochs: int
) -> list[Outcome]:
    """All stages, one after the other."""
    train_on, test = data
    training = begin(model)
    outcomes: list[Outcome] = []
    for stage, each in zip(STAGES, jax.random.split(key, len(STAGES)), strict=True):
        # Before the first stage nothing has been learned about any leaf, so nothing needs to be held.
        state = optim.set_trainable(OPTIMISER, training.state, training.model, stage.trainable, reset=not outcomes)
        for layer, rate in RATES.items():
            state = optim.adjust(state, layer, learning_rate=stage.factor * rate)
        before, known = training._replace(state=state), len(traced)
        training, steps = train(jitted, before, train_on, each, epochs, stage.title)
        scores = float(accuracy(training.model, *test)), float(accuracy(training.ema.average, *test))
        outcomes.append(Outcome(stage, before, training, steps, scores, len(traced) - known))
    print(f"\nafter all stages:\n\n{optim.report(OPTIMISER, training.model, training.state)}")
    return outcomes


def load(seed: int) -> tuple[Any, Any]:
    """Of the digits 0 to 4 and of 5 to 9: what to train on and what to test on, images and labels from 0 to 4."""
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images / 16, np.float32).reshape(-1, 8, 8)
    labels = np.asarray(labels, np.int32)

    def parts(chosen: np.ndarray, test_size: float) -> Any:
        known = labels[chosen] % DIGITS
        found = train_test_split(images[chosen], known, test_size=test_size, stratify=known, random_state=seed)
        images_, test_images, labels_, test_labels = map(jnp.asarray, found)
        return (images_, labels_), (test_images, test_labels)

    return parts(labels < DIGITS, 0.2), parts(labels >= DIGITS, 0.5)


def run(epochs: int, seed: int, plot: Path) -> tuple[list[Outcome], dict[str, bool]]:
    """Pretraining and all stages; returns these, and what was checked after them."""
    low, high = load(seed)
    print(f"{len(high[0][0])} images of the digits 5 to 9 to train on, {len(high[1][0])} to test on\n")
    keys = jax.random.split(jax.random.key(seed), 3)
    traced: list[tp.Layout] = []
    jitted = jax.jit(functools.partial(epoch, traced))
    model = pretrained(jitted, low, keys[0], epochs)
    model = eqx.tree_at(lambda network: network.head, model, eqx.nn.Linear(4 * CHANNELS, DIGITS, key=keys[1]))
    print(optim.report(OPTIMISER, model), end="\n\n")
    print("rates: " + ", ".join(f"{layer} {rate:.1e}" for layer, rate in RATES.items()))
    outcomes = finetuned(jitted, traced, model, high, keys[2], epochs)
    print(table(outcomes))
    figure(outcomes).savefig(plot, dpi=150)
    print(f"\nplotted in {plot}")
    return outcomes, {**facts(outcomes), **scored(outcomes)}


def table(outcomes: Sequence[Outcome]) -> str:
    """What each stage did, looked up in the models before and after it."""
    rows: list[tuple[str, ...]] = [
        ("stage", "changed", "leaves", "elements", "steps", "clipped", "traces", "test: model", "average")
    ]
    for number, outcome in enumerate(outcomes, 1):
        leaves, paths = leaves_of(outcome.before.model), changed(outcome)
        layers = layers_of(paths)
        rows.append((
            f"{number} {outcome.stage.title}",
            "all layers" if len(layers) == len(LAYERS) else ", ".join(layers),
            f"{len(paths)} of {len(leaves)}",
            f"{sum(leaves[path].size for path in paths):,}",
            f"{len(outcome.steps.loss)}",
            f"{is_clipped(outcome).mean():.0%}",
            f"{outcome.traces}",
            *(f"{score:.1%}" for score in outcome.scores),
        ))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)] for row in rows]
    words = [f"{row[0].ljust(widths[0])}  {row[1].ljust(widths[1])}" for row in rows]
    return "\n" + "\n".join("  ".join([first, *line]) for first, line in zip(words, lines, strict=True))


def figure(outcomes: Sequence[Outcome]) -> Figure:
    """Loss, norm of the gradient and clip rate over all steps, with the stages marked."""
    drawn = Figure(figsize=(10, 8), layout="constrained")  # without pyplot there is no window, and no state to leave
    top, middle, bottom = drawn.subplots(3, sharex=True, height_ratios=(3, 3, 1.5))
    drawn.suptitle("Digits 5 to 9 learned in stages, by a network that knows 0 to 4", fontsize=14)
    end = 0
    for number, outcome in enumerate(outcomes):
        start, end, colour, first = end, end + len(outcome.steps.loss), f"C{number}", number == 0
        steps, clipped = np.arange(start, end), is_clipped(outcome)
        losses, norms = np.asarray(outcome.steps.loss), np.asarray(outcome.steps.norm)
        top.plot(steps, losses, color=colour, alpha=0.35, linewidth=0.8, label="one step" if first else None)
        top.plot(steps, smooth(losses), color=colour, linewidth=2, label=f"mean of {AROUND}" if first else None)
        middle.plot(steps, norms, color=colour, linewidth=0.9)
        middle.plot(steps[clipped], norms[clipped], "k.", markersize=3.5, label="clipped" if first else None)
        bottom.fill_between(steps, smooth(clipped.astype(float)), color=colour, alpha=0.6, linewidth=0)
        title = f"{number + 1} {outcome.stage.title}\naverage: {outcome.scores[1]:.1%} in the test"
        top.annotate(title, ((start + end) / 2, 1.03), xycoords=("data", "axes fraction"), ha="center", fontsize=11)
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.25)
        for border in np.cumsum([len(outcome.steps.loss) for outcome in outcomes[:-1]]):
            axes.axvline(border, color="black", linewidth=0.8)
    middle.axhline(LIMIT, color="black", linestyle="--", linewidth=1, label="limit")
    top.set(yscale="log", ylabel="loss")
    middle.set(yscale="log", ylabel="norm of the gradient")
    bottom.set(ylim=(0, 1.02), ylabel="steps clipped", xlabel="step", xlim=(0, end))
    bottom.yaxis.set_major_formatter(PercentFormatter(1))
    top.legend(loc="upper right")
    middle.legend(loc="upper right")
    return drawn


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of the values around each; of fewer at the ends."""
    window = np.ones(min(AROUND, len(values)))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def facts(outcomes: Sequence[Outcome]) -> dict[str, bool]:
    """What frozen, held and thawed mean, looked up in models and states before and after the stages."""
    first, second, last = outcomes[0], outcomes[1], outcomes[-1]
    trained = [set(outcome.after.state.layout.paths) for outcome in outcomes]
    differ = [changed(outcome) for outcome in outcomes]
    steps = [(len(outcome.steps.loss), paths) for outcome, paths in zip(outcomes, trained, strict=True)]
    own = {layer: sum(count for count, paths in steps if layer in layers_of(paths)) for layer in LAYERS}
    others = [True, *(one != other for one, other in itertools.pairwise(trained))]
    return {
        "what a stage freezes is bit for bit the same after it": all(map(set.issubset, differ, trained)),
        "what a stage trains is another after it": all(map(set.issuperset, differ, trained)),
        "the statistics are bit for bit the same after all stages, in model and average": all(
            same_bits(first.before.model.normalise, model.normalise)
            for model in (last.after.model, last.after.ema.average)
        ),
        "while the head rests, its moments and its count are held bit for bit": same_bits(
            first.after.state.runs, second.after.state.held
        ),
        "thawed, it goes on: each layer has counted the steps in which it was trained": counts(last.after.state) == own,
        "the steps that were clipped are those with a norm above the limit": all(
            np.array_equal(is_clipped(outcome), np.asarray(outcome.steps.norm) > LIMIT) for outcome in outcomes
        ),
        "a step is traced once more for other leaves, and not for other rates": others
        == [outcome.traces for outcome in outcomes],
    }


def scored(outcomes: Sequence[Outcome]) -> dict[str, bool]:
    head, end = outcomes[0].scores, outcomes[-1].scores
    return {
        "test accuracy is at least 95%, of model and average": min(end) >= 0.95,
        "fine-tuning everything beats the head alone, in model and average": all(
            one < other for one, other in zip(head, end, strict=True)
        ),
    }


def counts(state: optim.TrainableState) -> dict[str, int]:
    """The steps of each layer, as its rule counts them; leaves with another past are in a state of their own."""
    return {
        group.name: int(groups.inner_states[group.name].inner_state.count)
        for _, groups in (*state.runs, *state.held)
        for group in groups.groups
        if group.paths
    }


def is_clipped(outcome: Outcome) -> np.ndarray:
    """Of each step, whether its gradient was clipped."""
    before = optim.clip_state(outcome.before.state).clipped
    return np.diff(np.asarray(outcome.steps.clipped), prepend=np.asarray(before)) > 0


def changed(outcome: Outcome) -> set[str]:
    """The paths of the leaves with other bits after a stage."""
    before, after = leaves_of(outcome.before.model), leaves_of(outcome.after.model)
    return {path for path, leaf in before.items() if not same_bits(leaf, after[path])}


def layers_of(paths: Collection[str]) -> list[str]:
    return [layer for layer in LAYERS if any(path.startswith(f"{layer}.") for path in paths)]


def leaves_of(model: Network) -> dict[str, Array]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def same_bits(these: Any, those: Any) -> bool:
    pairs = zip(jax.tree.leaves(these), jax.tree.leaves(those), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def main(argv: Sequence[str] | None = None) -> list[Outcome]:
    parser = argparse.ArgumentParser(description="Fine-tunes a small network on handwritten digits, stage by stage.")
    parser.add_argument("--epochs", type=int, default=8, help="of the pretraining and of each stage (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the split of the data, the start and the batches")
    parser.add_argument("--plot", type=Path, default=Path("finetune.png"), help="where to (default: finetune.png)")
    given = parser.parse_args(argv)
    if not given.plot.parent.is_dir():  # said now, not after the training
        parser.error(f"there is no directory {given.plot.parent} for the plot")
    outcomes, checks = run(**vars(given))
    print("\nChecked:")
    for what, holds in checks.items():
        print(f"  {'ok' if holds else 'FAILED'}  {what}")
    if not all(checks.values()):
        raise SystemExit(1)
    return outcomes


if __name__ == "__main__":
    main()
