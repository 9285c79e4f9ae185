"""One minimum, three ways to it: L-BFGS of Optax over a vector and over the tree, and SciPy's over `tp.ravel`'s vector.

    python examples/lbfgs.py

A logistic regression tells malignant from benign tumours. Each of ten measurements of the cell nuclei in an image comes
as mean, standard error and worst value; mean and worst are weighed alike: one parameter in two places. The statistics
that standardise the measurements are arrays of the model, but no parameters. None of the three ways needs to know.

With a penalty of `PENALTY / 2` times the sum of squares the loss is strongly convex: it has one minimum, and where the
norm of the gradient is g, the parameters are within g / PENALTY of it and the loss within g**2 / (2 PENALTY). So it is
known how closely the three must agree, once each has reached the gradient asked for.

The data, 569 images, come with scikit-learn: `pip install 'treeparams[examples]'`.
"""

import argparse
import time
from collections.abc import Callable, Sequence
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
    from scipy.optimize import minimize
    from sklearn.datasets import load_breast_cancer
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"this example needs {error.name}: pip install 'treeparams[examples]'") from None

MEASUREMENTS, PENALTY, GRADIENT = 10, 1e-3, 1e-8
ROUNDING = 1e-14  # of a loss in float64
RUNS = 5  # of each method, for the time it takes


class Standardise(eqx.Module):
    """Statistics of the data: arrays of the model, but no parameters."""

    centre: Array = tp.field(trainable=False)
    scale: Array = tp.field(trainable=False)

    def __init__(self, measured: Array) -> None:
        self.centre = jnp.mean(measured, axis=0)
        self.scale = jnp.std(measured, axis=0)

    def __call__(self, measured: Array) -> Array:
        """The measurements with a mean of zero and a variance of one over all images."""
        return (measured - self.centre) / self.scale


class Classifier(eqx.Module):
    """The log odds that a tumour is benign."""

    standardise: Standardise
    mean: eqx.nn.Linear
    error: eqx.nn.Linear
    worst: eqx.nn.Linear

    def __init__(self, measured: Array, *, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.standardise = Standardise(measured)
        self.mean = eqx.nn.Linear(MEASUREMENTS, "scalar", key=keys[0])
        self.error = eqx.nn.Linear(MEASUREMENTS, "scalar", use_bias=False, key=keys[1])
        self.worst = eqx.nn.Linear(MEASUREMENTS, "scalar", use_bias=False, key=keys[2])

    def __call__(self, measured: Array) -> Array:
        """Of the means, the errors and the worst values of one image, shape `(3, 10)`."""
        mean, error, worst = self.standardise(measured)
        return self.mean(mean) + self.error(error) + self.worst(worst)


tp.declare(Classifier, ties={"worst.weight": "mean.weight"})


class Data(NamedTuple):
    """The measurements of each image, shape `(n, 3, 10)`, and whether the tumour is benign, 0 or 1."""

    measured: Array
    benign: Array


class Found(NamedTuple):
    """Where a method arrived."""

    model: Classifier
    iterations: int
    evaluations: int
    build: float  # seconds until the first iteration: init, tracing, compiling
    seconds: float  # from the first iteration to the last


def loss(model: Classifier, data: Data) -> Array:
    odds = jax.vmap(model)(data.measured)
    squares = sum(jnp.sum(jnp.square(array)) for array in tp.trainables(model).values())  # a tie is one parameter
    return jnp.mean(jnp.logaddexp(0, odds) - data.benign * odds) + PENALTY / 2 * squares


@jax.jit
def loss_and_gradient(model: Classifier, data: Data) -> tuple[Array, Any]:
    return tp.value_and_grad(loss)(model, data)


def with_optax(tx: Any, start: Classifier, data: Data, most: int) -> Found:
    """Iterates within one compiled program until the gradient is small."""

    def run(model: Classifier, state: Any, data: Data) -> Any:
        def goes_on(carry: Any) -> Array:
            _, _, (_, grads), iterations, _ = carry
            return (tp.global_norm(grads) > GRADIENT) & (iterations < most)

        def step(carry: Any) -> Any:
            model, state, (value, grads), iterations, evaluations = carry
            model, state = optim.step(tx, grads, state, model, value=value, grad=grads, value_fn=loss, data=data)
            # The search has computed loss and gradient where it ended, and keeps them in the form it was given: a tree
            # or a vector. They are computed once more here, which is the same for both.
            evaluations += optax.tree_utils.tree_get(state, "num_linesearch_steps") + 1
            return model, state, loss_and_gradient(model, data), iterations + 1, evaluations

        found = model, state, loss_and_gradient(model, data), 0, 1
        model, _, _, iterations, evaluations = jax.lax.while_loop(goes_on, step, found)
        return model, iterations, evaluations

    begin = time.perf_counter()
    state = tx.init(start)
    compiled = jax.jit(run).lower(start, state, data).compile()
    build = time.perf_counter() - begin
    (model, iterations, evaluations), seconds = timed(lambda: jax.block_until_ready(compiled(start, state, data)))
    return Found(model, int(iterations), int(evaluations), build, seconds)


def with_scipy(start: Classifier, data: Data, most: int) -> Found:
    """SciPy iterates; each value and gradient is one call of a compiled function of the vector."""
    begin = time.perf_counter()
    vector, restructure = tp.ravel(start)
    function = jax.jit(jax.value_and_grad(lambda vector, data: loss(restructure(vector), data)))
    function(np.asarray(vector), data)
    build = time.perf_counter() - begin
    gtol = GRADIENT / np.sqrt(vector.size)  # of the largest entry of the gradient
    options = {"gtol": gtol, "ftol": 0, "maxiter": most}
    given = {"x0": np.asarray(vector), "args": (data,), "jac": True, "method": "L-BFGS-B", "options": options}
    found, seconds = timed(lambda: minimize(function, **given))
    return Found(restructure(jnp.asarray(found.x)), found.nit, found.nfev, build, seconds)


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and the seconds of the fastest of some runs, which are all alike."""

    def once() -> tuple[Any, float]:
        begin = time.perf_counter()
        return run(), time.perf_counter() - begin

    runs = [once() for _ in range(RUNS)]
    return runs[0][0], min(seconds for _, seconds in runs)


METHODS: dict[str, Callable[[Classifier, Data, int], Found]] = {
    "optim.flat(optax.lbfgs())": lambda *given: with_optax(optim.flat(optax.lbfgs()), *given),
    "optim.trainable(optax.lbfgs())": lambda *given: with_optax(optim.trainable(optax.lbfgs()), *given),
    "scipy, L-BFGS-B over tp.ravel": with_scipy,
}


def load() -> Data:
    measured, labels = load_breast_cancer(return_X_y=True)
    return Data(jnp.asarray(measured.reshape(-1, 3, MEASUREMENTS), float), jnp.asarray(labels, float))


def run(most: int, seed: int) -> tuple[dict[str, Found], dict[str, bool]]:
    """All methods from one start; returns where they arrived, and what was checked."""
    data = load()
    start = tp.tie(Classifier(data.measured, key=jax.random.key(seed)))  # sets worst.weight, as the class declares
    print(f"{tp.layout(start)}\n")
    found = {name: method(start, data, most) for name, method in tqdm(METHODS.items(), "minimising", ncols=80)}
    measures = {name: measured(each.model, data) for name, each in found.items()}
    print(table(found, measures))
    return found, facts(start, found, measures)


def measured(model: Classifier, data: Data) -> tuple[float, float]:
    """The loss, and the norm of its gradient."""
    value, grads = loss_and_gradient(model, data)
    return float(value), float(tp.global_norm(grads))


def table(found: dict[str, Found], measures: dict[str, tuple[float, float]]) -> str:
    lines = [f"{'method':32}{'iterations':>10}{'evaluations':>13}{'loss':>19}{'gradient':>10}{'build':>9}{'run':>10}"]
    for name, each in found.items():
        value, norm = measures[name]
        times = f"{each.build:7.2f} s{1e3 * each.seconds:7.1f} ms"
        lines.append(f"{name:32}{each.iterations:10}{each.evaluations:13}{value:19.15f}{norm:10.1e}{times}")
    return "\n".join(lines)


def facts(start: Classifier, found: dict[str, Found], measures: dict[str, tuple[float, float]]) -> dict[str, bool]:
    """What strong convexity promises of any two that have reached the gradient, and what frozen and tied mean."""
    models = [each.model for each in found.values()]
    losses, norms = zip(*measures.values(), strict=True)
    vectors = np.stack([tp.ravel(model)[0] for model in models])
    apart = max(np.linalg.norm(one - other) for one in vectors for other in vectors)
    near, low = 2 * GRADIENT / PENALTY, GRADIENT**2 / (2 * PENALTY) + ROUNDING
    return {
        f"all reach a gradient of norm {GRADIENT:.0e}": max(norms) <= GRADIENT,
        f"their losses agree to {low:.0e}": max(losses) - min(losses) <= low,
        f"their parameters are within {near:.0e} of each other": bool(apart <= near),
        "the statistics are bit for bit the same": all(
            same_bits(start.standardise, model.standardise) for model in models
        ),
        "worst.weight is mean.weight": all(same_bits(model.mean.weight, model.worst.weight) for model in models),
    }


def same_bits(these: Any, those: Any) -> bool:
    pairs = zip(jax.tree.leaves(these), jax.tree.leaves(those), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def main(argv: Sequence[str] | None = None) -> dict[str, Found]:
    parser = argparse.ArgumentParser(description="Minimises one loss by L-BFGS of Optax, over two forms, and of SciPy.")
    parser.add_argument("--most", type=int, default=500, help="iterations of each method at most (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of the start")
    jax.config.update("jax_enable_x64", True)  # SciPy computes in float64, and a float32 gradient ends far above 1e-8
    found, checks = run(**vars(parser.parse_args(argv)))
    print("\nChecked:")
    for what, holds in checks.items():
        print(f"  {'ok' if holds else 'FAILED'}  {what}")
    if not all(checks.values()):
        raise SystemExit(1)
    return found


if __name__ == "__main__":
    main()
