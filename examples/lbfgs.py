"""One minimum, three ways to it: L-BFGS of Optax over a vector and over the tree, and SciPy's over `tp.ravel`'s vector.

    python examples/lbfgs.py [--plot FILE]

A logistic regression tells malignant from benign tumours. Each of ten measurements of the cell nuclei in an image comes
as mean, standard error and worst value; mean and worst are weighed alike: one parameter in two places. The statistics
that standardise the measurements are arrays of the model, but no parameters. None of the three ways needs to know.

With a penalty of `PENALTY / 2` times the sum of squares the loss is strongly convex: it has one minimum, and where the
norm of the gradient is g, the parameters are within g / PENALTY of it and the loss within g**2 / (2 PENALTY).

The data, 569 images, come with scikit-learn: `pip install -e '.[examples]'`.
"""

import argparse
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
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer

import treeparams as tp
from treeparams import optim

MEASUREMENTS, PENALTY, GRADIENT = 10, 1e-3, 1e-8


class Classifier(eqx.Module):
    """The log odds that a tumour is benign."""

    centre: Array = tp.field(trainable=False)
    scale: Array = tp.field(trainable=False)
    mean: eqx.nn.Linear
    error: eqx.nn.Linear
    worst: eqx.nn.Linear

    def __init__(self, measured: Array, *, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.centre, self.scale = jnp.mean(measured, axis=0), jnp.std(measured, axis=0)
        self.mean = eqx.nn.Linear(MEASUREMENTS, "scalar", key=keys[0])
        self.error = eqx.nn.Linear(MEASUREMENTS, "scalar", use_bias=False, key=keys[1])
        self.worst = eqx.nn.Linear(MEASUREMENTS, "scalar", use_bias=False, key=keys[2])

    def __call__(self, measured: Array) -> Array:
        """Of the means, the errors and the worst values of one image, shape `(3, 10)`."""
        mean, error, worst = (measured - self.centre) / self.scale
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
    norms: np.ndarray  # of the gradient after each iteration


def loss(model: Classifier, data: Data) -> Array:
    odds = jax.vmap(model)(data.measured)
    squares = sum(jnp.sum(jnp.square(array)) for array in tp.trainables(model).values())  # a tie is one parameter
    return jnp.mean(jnp.logaddexp(0, odds) - data.benign * odds) + PENALTY / 2 * squares


loss_and_gradient = jax.jit(tp.value_and_grad(loss))


def with_optax(tx: Any, start: Classifier, data: Data, most: int) -> Found:
    """Iterates within one compiled program until the gradient is small."""
    # A search has computed loss and gradient where it ended, and keeps them in the state, where the next step begins.
    value_and_grad = optim.value_and_grad_from_state(loss)

    def goes_on(carry: Any) -> Array:
        _, _, (_, grads), iterations, *_ = carry
        return (tp.global_norm(grads) > GRADIENT) & (iterations < most)

    def step(carry: Any) -> Any:
        model, state, (value, grads), iterations, evaluations, norms = carry
        norms = norms.at[iterations].set(tp.global_norm(grads))
        model, state = optim.step(tx, grads, state, model, value=value, grad=grads, value_fn=loss, data=data)
        evaluations += optax.tree_utils.tree_get(state, "num_linesearch_steps")
        return model, state, value_and_grad(model, data, state=state), iterations + 1, evaluations, norms

    state = tx.init(start)
    start_from = start, state, value_and_grad(start, data, state=state), 0, 1, jnp.zeros(most)
    loop = jax.jit(lambda carry: jax.lax.while_loop(goes_on, step, carry))
    model, _, (_, grads), iterations, evaluations, norms = loop(start_from)
    norms = np.append(norms[:iterations], tp.global_norm(grads))
    return Found(model, int(iterations), int(evaluations), norms)


def with_scipy(start: Classifier, data: Data, most: int) -> Found:
    vector, restructure = tp.ravel(start)
    function = jax.jit(jax.value_and_grad(lambda vector: loss(restructure(vector), data)))
    evaluated, norms = [], []

    def noted(vector: np.ndarray) -> tuple[Any, Any]:
        value, gradient = function(vector)
        evaluated.append(np.linalg.norm(gradient))
        return value, gradient

    note = lambda _: norms.append(evaluated[-1])  # an iteration ends where its line search does
    gtol = GRADIENT / np.sqrt(vector.size)  # of the largest entry of the gradient
    options = {"gtol": gtol, "ftol": 0, "maxiter": most}
    found = minimize(noted, np.asarray(vector), jac=True, method="L-BFGS-B", options=options, callback=note)
    return Found(restructure(jnp.asarray(found.x)), found.nit, found.nfev, np.array([evaluated[0], *norms]))


METHODS: dict[str, Callable[[Classifier, Data, int], Found]] = {
    "optim.trainable(optax.lbfgs(), form='vector')": lambda *given: with_optax(
        optim.trainable(optax.lbfgs(), form="vector"), *given
    ),
    "optim.trainable(optax.lbfgs())": lambda *given: with_optax(optim.trainable(optax.lbfgs()), *given),
    "scipy, L-BFGS-B over tp.ravel": with_scipy,
}


def main(most: int = 500, seed: int = 0, plot: str = "") -> tuple[Data, dict[str, Found]]:
    """Minimises one loss by L-BFGS of Optax, over two forms, and of SciPy; returns where each arrived."""
    measured, benign = load_breast_cancer(return_X_y=True)
    data = Data(jnp.asarray(measured.reshape(-1, 3, MEASUREMENTS)), jnp.asarray(benign, float))
    start = tp.tie(Classifier(data.measured, key=jax.random.key(seed)))  # sets worst.weight, as the class declares
    print(f"{tp.layout(start)}\n")
    found = {name: method(start, data, most) for name, method in METHODS.items()}
    row = "{:30}  {:>10}  {:>11}  {:>17}  {:>8}".format
    print(row("method", "iterations", "evaluations", "loss", "gradient"))
    for name, (model, iterations, evaluations, _) in found.items():
        value, grads = loss_and_gradient(model, data)
        print(row(name, iterations, evaluations, f"{value:.15f}", f"{tp.global_norm(grads):.1e}"))
    if plot:
        draw(found, plot)
    return data, found


def draw(found: dict[str, Found], plot: str) -> None:
    """The norm of the gradient after each iteration."""
    picture = Figure(figsize=(8.5, 4), layout="constrained")
    axes = picture.subplots()
    for (name, each), width in zip(found.items(), (6, 3, 1), strict=True):  # each is seen under the next
        axes.semilogy(each.norms, linewidth=width, label=f"{name}: {each.evaluations} evaluations")
    axes.axhline(GRADIENT, color="k", linestyle=":", linewidth=1)
    axes.set(title="Three ways lead to one minimum in about as many iterations", xlabel="iteration")
    axes.set_ylabel("norm of the gradient")
    axes.legend()
    picture.savefig(plot)


def claims(outcome: tuple[Data, dict[str, Found]]) -> dict[str, Any]:
    """What strong convexity promises of any two that have reached the gradient, and what an iteration costs."""
    data, found = outcome
    losses, grads = zip(*(loss_and_gradient(each.model, data) for each in found.values()), strict=True)
    vectors = np.stack([tp.ravel(each.model)[0] for each in found.values()])
    apart = max(np.linalg.norm(one - other) for one in vectors for other in vectors)
    near = 2 * GRADIENT / PENALTY
    low = GRADIENT**2 / (2 * PENALTY) + 1e-14  # the rounding of a loss in float64
    norm, differ = max(map(tp.global_norm, grads)), max(losses) - min(losses)
    times = max(each.evaluations / each.iterations for each in found.values())
    return {
        f"all reach a gradient of norm {GRADIENT:.0e}: {norm:.1e}": norm <= GRADIENT,
        f"none evaluates the loss more than 1.2 times an iteration: {times:.2f}": times <= 1.2,
        f"their losses agree to {low:.0e}: {differ:.0e}": differ <= low,
        f"their parameters are within {near:.0e} of each other: {apart:.0e}": apart <= near,
    }


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # SciPy computes in float64, and a float32 gradient ends far above 1e-8
    parser = argparse.ArgumentParser(description=main.__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--plot", help="a picture to write")
    checked = claims(main(**vars(parser.parse_args())))
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
