"""Missing measurements: what stands for them is learned with the net, and beats their mean where it is no accident.

    python examples/imputing.py [--seeds N] [--plot FILE]

The table of 569 tumours holds ten measurements of the cells in each, as the mean over the cells, its error, and the
worst value; a net with a branch for each of these three says whether the tumour is benign. A third of the values is
removed, from what it trains on and from what it is tested on alike, in two ways:

    out of range     large readings are lost: nine of ten above a measurement's 70% quantile, one of ten below
    at random        as many, whatever they are

Two nets start as one and the same function. For a missing value, one gets the mean of the observed ones, and the other
learns a value for each measurement, by `matrices.PreImputing` in place of the weight of an `eqx.nn.Linear`.

Where it tells something that a value is missing, a learned one says it and a mean denies it. At random there is nothing
to say, and the mean does slightly better, as it cannot overfit. The table is real, but how values get lost is made up
here; the spread over seeds is not that of new patients.

The table comes with scikit-learn: `pip install -e '.[examples]'`.
"""

import argparse
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer

import treeparams as tp
from treeparams import matrices, optim

BRANCHES, INPUTS, WIDTH, TRAINED_ON = 3, 10, 16, 400
OPTIMISER = optim.trainable(optax.adamw(3e-3, weight_decay=1e-2))
RANGE, RANDOM = "out of range", "at random"
MEAN, LEARNED = "mean", "PreImputing"


class Network(eqx.Module):
    """From the mean, the error and the worst value of ten measurements to the scores of malignant and benign."""

    branches: eqx.nn.Linear  # three of them, stacked
    scores: eqx.nn.Linear

    def __init__(self, imputing: str, *, key: Array) -> None:
        *keys, last = jax.random.split(key, BRANCHES + 1)
        branches = stacked(eqx.nn.Linear(INPUTS, WIDTH, key=key) for key in keys)
        if imputing == LEARNED:
            make = jax.vmap(lambda weight: matrices.PreImputing(weight, jnp.zeros(INPUTS)))
            branches = eqx.tree_at(lambda branches: branches.weight, branches, make(branches.weight))
        self.branches, self.scores = branches, eqx.nn.Linear(WIDTH, 2, key=last)

    def __call__(self, measured: Array) -> Array:
        """The two scores, of measurements of shape `(3, 10)`."""
        hidden = jax.vmap(lambda branch, measured: branch(measured))(self.branches, measured)
        return self.scores(jax.nn.relu(jnp.sum(hidden, axis=0)))


def stacked(trees: Iterable[Any]) -> Any:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)


class Data(NamedTuple):
    """Measurements, shape `(n, 3, 10)`, at zero mean and unit variance of what is observed, and what they are of."""

    measured: Any
    benign: Any


def draw(how: str, seed: int) -> tuple[Data, Data]:
    """The table with values missing: some to train on, the others to test on."""
    random = np.random.default_rng(seed)
    measured, benign = load_breast_cancer(return_X_y=True)
    measured = measured.reshape(-1, 3, 10)  # of each tumour the mean, the error and the worst value
    rank = np.argsort(np.argsort(measured, axis=0), axis=0) / len(measured)
    large = rank > 0.7 if how == RANGE else random.uniform(size=rank.shape) > 0.7
    measured = np.where(random.uniform(size=rank.shape) < np.where(large, 0.9, 0.1), np.nan, measured)
    train, test = np.split(random.permutation(len(measured)), [TRAINED_ON])
    centre, scale = np.nanmean(measured[train], axis=0), np.nanstd(measured[train], axis=0)
    standard = ((measured - centre) / scale).astype(np.float32)
    return Data(standard[train], benign[train]), Data(standard[test], benign[test])


class Outcome(NamedTuple):
    """Of each seed: at the end, on what it is tested on."""

    net: Network
    log_loss: Array
    accuracy: Array


def loss(net: Network, data: Data) -> Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(net)(data.measured), data.benign))


def train(start: Network, data: tuple[Data, Data], steps: int) -> Outcome:
    to_train_on, to_test_on = data

    def step(carry: Any, _: None) -> Any:
        net, state = carry
        return optim.step(OPTIMISER, tp.grad(loss, state.layout)(net, to_train_on), state, net), None

    (net, _), _ = jax.lax.scan(step, (start, OPTIMISER.init(start)), None, steps)
    correct = jnp.argmax(jax.vmap(net)(to_test_on.measured), axis=1) == to_test_on.benign
    return Outcome(net, loss(net, to_test_on), jnp.mean(correct))


def main(seeds: int = 20, steps: int = 120, plot: str = "") -> dict[tuple[str, str], Outcome]:
    """Learns what stands for missing measurements, and compares it with their mean."""
    print(f"What trains, with {LEARNED}:\n\n{tp.layout(Network(LEARNED, key=jax.random.key(0)))}\n")
    print(f"{TRAINED_ON} tumours to train on, {569 - TRAINED_ON} to test on; mean ± spread of {seeds} seeds\n")
    outcomes, of_each_seed = {}, jax.jit(jax.vmap(lambda start, data: train(start, data, steps)))
    for how in (RANGE, RANDOM):
        data = stacked(draw(how, seed) for seed in range(seeds))
        for imputing in (MEAN, LEARNED):
            starts = stacked(Network(imputing, key=jax.random.key(seed)) for seed in range(seeds))
            filled = jax.tree.map(jnp.nan_to_num, data) if imputing == MEAN else data  # the mean is zero
            outcomes[how, imputing] = of_each_seed(starts, filled)
    row = "{:12}  {:>11}  {:>13}  {:>13}  {:>35}".format
    print(row("lost", "instead", "test log-loss", "accuracy in %", "log-loss less than with the mean"))
    for (how, imputing), each in outcomes.items():
        gained = gain(outcomes, how)
        better = f"{spread(gained, '.3f')}, {np.sum(gained > 0)} of {seeds} seeds" if imputing == LEARNED else ""
        print(row(how, imputing, spread(each.log_loss, ".3f"), spread(100 * each.accuracy, ".1f"), better).rstrip())
    if plot:
        draw_seeds(outcomes, plot)
    return outcomes


def draw_seeds(outcomes: dict[tuple[str, str], Outcome], plot: str) -> None:
    """The log-loss of each seed in both ways; below the line the learned values are better."""
    picture = Figure(figsize=(8.5, 5.5), layout="constrained")
    axes = picture.subplots()
    for how in (RANGE, RANDOM):
        mean, learned = (outcomes[how, imputing].log_loss for imputing in (MEAN, LEARNED))
        axes.plot(mean, learned, "o", label=f"lost {how}: better for {np.mean(learned < mean):.0%} of the seeds")
    axes.axline((0.2, 0.2), slope=1, color="k", linestyle=":", linewidth=1)
    axes.set(title="Learned values beat the mean where large readings are lost", aspect="equal")
    axes.set(xlabel="log-loss with the mean", ylabel="log-loss with learned values")
    axes.legend()
    picture.savefig(plot)


def gain(outcomes: dict[tuple[str, str], Outcome], how: str) -> np.ndarray:
    """By how much the log-loss is lower than with the mean, for each seed."""
    return np.asarray(outcomes[how, MEAN].log_loss - outcomes[how, LEARNED].log_loss)


def spread(values: Any, form: str) -> str:
    return f"{np.mean(values):{form}} ± {np.std(values):{form}}"


def claims(outcomes: dict[tuple[str, str], Outcome]) -> dict[str, Any]:
    gained, by_chance = gain(outcomes, RANGE), gain(outcomes, RANDOM)
    return {
        f"out of range, learned values beat the mean for 9 of 10 seeds: {np.mean(gained > 0):.0%}": np.mean(gained > 0)
        >= 0.9,
        f"and by more than the spread: {spread(gained, '.3f')}": np.mean(gained) > np.std(gained),
        f"at random they do not: {spread(by_chance, '.3f')}": np.mean(by_chance) < np.std(by_chance),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--plot", help="a picture to write")
    checked = claims(main(**vars(parser.parse_args())))
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
