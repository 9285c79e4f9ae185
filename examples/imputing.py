"""Missing measurements: what stands for them is learned with the net, and beats their mean where it is no accident.

    python examples/imputing.py [--seeds N]

The table of 569 tumours holds ten measurements of the cells in each, as the mean over the cells, its error, and the
worst value; a net with a branch for each of these three says whether the tumour is benign. Values are removed, from
what it trains on and from what it is tested on alike, in three ways:

    out of range     large readings are lost: nine of ten above a measurement's 70% quantile, one of ten below
    not taken        all ten of a branch are lost at once: nine of ten where they are large on average, one of ten else
    at random        as many as above, whatever they are

Three nets start as one and the same function; only the weights of their first layer differ. The first gets the mean of
the observed values for a missing one. `PreImputing` learns a value per measurement, `PostImputing` learns what a branch
is to give whose measurements were not taken. All are trained alike, by `optim.trainable`.

Where it tells something that a value is missing, a learned one says it and a mean denies it. At random there is nothing
to say, and the mean does slightly better, as it cannot overfit. (A column per measurement that says whether it is
missing can say more, for twice the weights in the first layer.) The table is real, but how values get lost is made up
here. Each seed splits the table, draws what is lost and starts the nets; all are of one table, so that their spread is
not that of new patients.

The table comes with scikit-learn: `pip install 'treeparams[examples]'`.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import treeparams as tp
from treeparams import matrices, optim

try:
    from sklearn.datasets import load_breast_cancer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"this example needs {error.name}: pip install 'treeparams[examples]'") from None

BRANCHES, INPUTS, WIDTH = 3, 10, 16
TRAINED_ON, STEPS = 400, 120
OPTIMISER = optax.adamw(3e-3, weight_decay=1e-2)
WAYS = RANGE, NOT_TAKEN, RANDOM = "out of range", "not taken", "at random"
MEAN, PRE, POST = "mean", "PreImputing", "PostImputing"

KINDS: dict[str, Callable[[Array], Any]] = {
    MEAN: lambda weight: weight,
    PRE: lambda weight: matrices.PreImputing(weight, jnp.zeros(INPUTS)),
    POST: lambda weight: matrices.PostImputing(weight, jnp.zeros(WIDTH)),
}


class Network(eqx.Module):
    """From the mean, the error and the worst value of ten measurements to the scores of malignant and benign."""

    branches: eqx.nn.Linear  # three of them, stacked
    scores: eqx.nn.Linear

    def __init__(self, kind: str, *, key: Array) -> None:
        *keys, last = jax.random.split(key, BRANCHES + 1)
        branches = [eqx.nn.Linear(INPUTS, WIDTH, key=key) for key in keys]
        self.branches = stacked(
            eqx.tree_at(lambda branch: branch.weight, branch, KINDS[kind](branch.weight)) for branch in branches
        )
        self.scores = eqx.nn.Linear(WIDTH, 2, key=last)

    def __call__(self, measured: Array) -> Array:
        """The two scores, of measurements of shape `(3, 10)`."""
        hidden = jax.vmap(lambda branch, measured: branch(measured))(self.branches, measured)
        return self.scores(jax.nn.relu(jnp.sum(hidden, axis=0)))


def stacked(trees: Iterable[Any]) -> Any:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)


# -- The data


class Data(NamedTuple):
    """Measurements, shape `(n, 3, 10)`, at zero mean and unit variance of what is observed, and what they are of."""

    measured: Any  # of NumPy in the table, of JAX in a `Case`
    benign: Any


class Case(NamedTuple):
    """Of one seed and one way of losing values."""

    train: Data
    test: Data


def draw(table: Data, how: str, seed: int) -> Case:
    random = np.random.default_rng(seed)
    measured = np.where(lost(table.measured, how, random), np.nan, table.measured)
    train, test = np.split(random.permutation(len(measured)), [TRAINED_ON])
    centre, scale = np.nanmean(measured[train], axis=0), np.nanstd(measured[train], axis=0)
    standard = ((measured - centre) / scale).astype(np.float32)
    return Case(*(Data(jnp.asarray(standard[rows]), jnp.asarray(table.benign[rows])) for rows in (train, test)))


def lost(measured: np.ndarray, how: str, random: np.random.Generator) -> np.ndarray:
    """Which values are; in every way as many."""
    rank = np.argsort(np.argsort(measured, axis=0), axis=0) / len(measured)
    if how == NOT_TAKEN:
        rank = np.mean(rank, axis=2, keepdims=True)
    large = rank > np.quantile(rank, 0.7, axis=0) if how != RANDOM else random.uniform(size=rank.shape) > 0.7
    return np.broadcast_to(random.uniform(size=rank.shape) < np.where(large, 0.9, 0.1), measured.shape)


# -- Training


class Outcome(NamedTuple):
    """Of each seed."""

    net: Network
    loss: Array  # at the start, on what it trains on
    log_loss: Array  # at the end, on what it is tested on, and so the next
    accuracy: Array


def loss(net: Network, data: Data) -> Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(net)(data.measured), data.benign))


def train(start: Network, case: Case) -> Outcome:
    tx = optim.trainable(OPTIMISER, tp.layout(start))

    def step(carry: Any, _: None) -> Any:
        net, state = carry
        value, grads = tp.value_and_grad(loss, state.layout)(net, case.train)
        return optim.step(tx, grads, state, net), value

    (net, _), losses = jax.lax.scan(step, (start, tx.init(start)), None, STEPS)
    correct = jnp.argmax(jax.vmap(net)(case.test.measured), axis=1) == case.test.benign
    return Outcome(net, losses[0], loss(net, case.test), jnp.mean(correct))


def run(seeds: int) -> tuple[dict[tuple[str, str], Outcome], dict[str, bool]]:
    """All ways and nets; returns how they end, and what was checked."""
    measured, benign = load_breast_cancer(return_X_y=True)
    data = Data(np.reshape(measured, (-1, BRANCHES, INPUTS)), np.asarray(benign))
    print(f"What trains, with {PRE}:\n\n{tp.layout(Network(PRE, key=jax.random.key(0)))}\n")
    print(f"{TRAINED_ON} tumours to train on, {len(benign) - TRAINED_ON} to test on, {seeds} seeds: mean ± spread\n")
    cases = {how: stacked(draw(data, how, seed) for seed in range(seeds)) for how in WAYS}
    outcomes, of_each_seed = {}, jax.jit(jax.vmap(train))
    for kind in KINDS:
        starts = stacked(Network(kind, key=jax.random.key(seed)) for seed in range(seeds))
        for how, case in cases.items():
            if kind != POST or how == NOT_TAKEN:  # where all of a branch are missing or none
                filled = jax.tree.map(jnp.nan_to_num, case) if kind == MEAN else case  # the mean is zero
                outcomes[how, kind] = of_each_seed(starts, filled)
    print(table(outcomes))
    return outcomes, facts(outcomes)


def gain(outcomes: dict[tuple[str, str], Outcome], how: str, kind: str) -> np.ndarray:
    """By how much the log-loss is lower than with the mean, for each seed."""
    return np.asarray(outcomes[how, MEAN].log_loss - outcomes[how, kind].log_loss)


def table(outcomes: dict[tuple[str, str], Outcome]) -> str:
    lines = [f"{'lost':14}{'weights':14}{'test log-loss':17}{'accuracy in %':16}log-loss less than with the mean"]
    for how, kind in sorted(outcomes, key=lambda key: WAYS.index(key[0])):
        each, gained = outcomes[how, kind], gain(outcomes, how, kind)
        columns = f"{spread(each.log_loss, '.3f'):17}{spread(100 * each.accuracy, '.1f'):16}"
        better = f"{spread(gained, '.3f')}, {np.sum(gained > 0)} of {len(gained)} seeds" if kind != MEAN else ""
        lines.append(f"{how:14}{kind:14}{columns}{better}".rstrip())
    return "\n".join(lines)


def spread(values: Any, form: str) -> str:
    return f"{np.mean(values):{form}} ± {np.std(values):{form}}"


def facts(outcomes: dict[tuple[str, str], Outcome]) -> dict[str, bool]:
    weights: dict[str, Any] = {how: outcomes[how, PRE].net.branches.weight for how in (RANGE, RANDOM)}
    learned = {how: np.mean(weight.psi) for how, weight in weights.items()}
    starts = [np.stack([each.loss for (way, _), each in outcomes.items() if way == how]) for how in WAYS]
    return {
        "all nets start as one function": all(np.allclose(losses, losses[0], rtol=1e-5) for losses in starts),
        "nothing became NaN": not any(np.any(np.isnan(leaf)) for leaf in jax.tree.leaves(outcomes)),
        **{
            f"{how}: {kind} beats the mean for 9 of 10 seeds, by more than the spread": beats(gain(outcomes, how, kind))
            for how, kind in ((RANGE, PRE), (NOT_TAKEN, PRE), (NOT_TAKEN, POST))
        },
        "what is out of range is learned to be large, what is lost at random is not": bool(
            learned[RANGE] > 0.1 > abs(learned[RANDOM])
        ),
    }


def beats(gained: np.ndarray) -> bool:
    return bool(np.mean(gained > 0) >= 0.9 and np.mean(gained) > np.std(gained))


def main(argv: Sequence[str] | None = None) -> dict[tuple[str, str], Outcome]:
    parser = argparse.ArgumentParser(description="Learns what stands for missing measurements, and compares it.")
    parser.add_argument("--seeds", type=int, default=20, help="how many splits, losses and starts (default: 20)")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 2:
        parser.error(f"a spread needs at least 2 seeds, got {arguments.seeds}")
    outcomes, checks = run(arguments.seeds)
    print("\nChecked:")
    for what, holds in checks.items():
        print(f"  {'ok' if holds else 'FAILED'}  {what}")
    if not all(checks.values()):
        raise SystemExit(1)
    return outcomes


if __name__ == "__main__":
    main()
