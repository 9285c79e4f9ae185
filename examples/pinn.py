"""Poisson's equation by a physics-informed net: first Adam, then Newton's method on the net's parameters.

    python examples/pinn.py [--plot FILE]

On the unit square, with u = 0 on its border, the net u is to solve `laplacian(u) = -source` for a source whose solution
is known, sin(pi x) sin(2 pi y). The loss is the mean square of what is left of the equation at points inside. It holds
second derivatives in the point, by `nested.laplacian`, and its gradient is in the parameters.

Adam comes near and then crawls, since the loss is steep in some directions and flat in others. From there three ways go
on: Adam for more steps, Newton's method by `nested.hessian_operator`, and Gauss-Newton by `nested.ggn_operator`. A step
of the latter solves `(H + damping) step = -gradient` by conjugate gradients, which need products with H and never H. A
step that does not lower the loss is taken back, and the damping grows.

The frequencies of the first layer are drawn once and frozen: an array of the model, but no parameter.
"""

import argparse
import pathlib
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
from treeparams import nested

ADAM, MORE, NEWTON, PRODUCTS = 1000, 6000, 60, 100  # steps; and products with a matrix in one of Newton's
INSIDE, TEST = 24, 51  # points along each side
ROUNDING = 1e-8  # of one loss, computed with its gradient and without


class Solution(eqx.Module):
    """A function on the unit square that is zero on its border."""

    frequencies: Array = tp.field(trainable=False)
    mlp: eqx.nn.MLP

    def __init__(self, *, key: Array) -> None:
        drawn, made = jax.random.split(key)
        self.frequencies = 2 * jax.random.normal(drawn, (16, 2))
        self.mlp = eqx.nn.MLP(32, "scalar", 32, 1, jnp.tanh, key=made)

    def __call__(self, point: Array) -> Array:
        """The value at a point, shape `(2,)`."""
        (x, y), phase = point, self.frequencies @ point
        return x * (1 - x) * y * (1 - y) * self.mlp(jnp.concatenate([jnp.sin(phase), jnp.cos(phase)]))


def exact(point: Array) -> Array:
    return jnp.sin(jnp.pi * point[0]) * jnp.sin(2 * jnp.pi * point[1])


def residuals(model: Solution, points: Array) -> Array:
    """What is left of the equation at each point."""
    laplacian = nested.laplacian(lambda model, point: model(point))
    return jax.vmap(lambda point: laplacian(model, point) + 5 * jnp.pi**2 * exact(point))(points)


def mean_square(values: Array) -> Array:
    return jnp.mean(values**2)


def loss(model: Solution, points: Array) -> Array:
    return mean_square(residuals(model, points))


# -- The ways, over the vector of the parameters


class Found(NamedTuple):
    """Where a way arrived."""

    model: Solution
    losses: Array  # before each step and after the last
    seconds: float  # without tracing and compiling


def by_adam(start: Solution, points: Array, steps: int, rate: float) -> Found:
    vector, restructure = tp.ravel(start)
    tx = optax.adam(optax.cosine_decay_schedule(rate, steps))
    of_vector = lambda vector: loss(restructure(vector), points)

    def step(carry: Any, _: None) -> Any:
        vector, state = carry
        value, gradient = jax.value_and_grad(of_vector)(vector)
        updates, state = tx.update(gradient, state)
        return (optax.apply_updates(vector, updates), state), value

    @jax.jit
    def run(vector: Array) -> tuple[Array, Array]:
        (vector, _), losses = jax.lax.scan(step, (vector, tx.init(vector)), None, steps)
        return vector, jnp.append(losses, of_vector(vector))

    (vector, losses), seconds = timed(run.lower(vector).compile(), vector)
    return Found(restructure(vector), losses, seconds)


def hessian(model: Solution, points: Array, damping: Array) -> nested.Operator:
    return nested.hessian_operator(loss, model, points, damping=damping)


def gauss_newton(model: Solution, points: Array, damping: Array) -> nested.Operator:
    return nested.ggn_operator(residuals, mean_square, model, points, damping=damping)


def by_newton(matrix: Callable[..., nested.Operator], start: Solution, points: Array, steps: int) -> Found:
    vector, restructure = tp.ravel(start)
    of_vector = lambda vector: loss(restructure(vector), points)

    def step(carry: Any, _: None) -> Any:
        vector, damping = carry
        value, gradient = jax.value_and_grad(of_vector)(vector)
        operator = matrix(restructure(vector), points, damping)
        direction, _ = jax.scipy.sparse.linalg.cg(operator, -gradient, tol=1e-3, maxiter=PRODUCTS)
        better = of_vector(vector + direction) < value  # also false for NaN
        damping = jnp.where(better, jnp.maximum(damping / 3, 1e-10), 4 * damping)
        return (jnp.where(better, vector + direction, vector), damping), value

    @jax.jit
    def run(vector: Array) -> tuple[Array, Array]:
        (vector, _), losses = jax.lax.scan(step, (vector, jnp.ones(())), None, steps)
        return vector, jnp.append(losses, of_vector(vector))

    (vector, losses), seconds = timed(run.lower(vector).compile(), vector)
    return Found(restructure(vector), losses, seconds)


def timed(run: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    begin = time.perf_counter()
    return jax.block_until_ready(run(*args)), time.perf_counter() - begin


# -- All together


def grid(along: int, border: bool) -> Array:
    """Points of the unit square, shape `(along**2, 2)`."""
    ticks = jnp.linspace(0, 1, along) if border else (jnp.arange(along) + 0.5) / along
    return jnp.stack(jnp.meshgrid(ticks, ticks, indexing="ij"), -1).reshape(-1, 2)


def run(seed: int, newton: int, plot: pathlib.Path | None) -> tuple[dict[str, Found], dict[str, bool]]:
    """All ways; returns where they arrived, and what was checked."""
    start, points = Solution(key=jax.random.key(seed)), grid(INSIDE, border=False)
    print(f"{tp.summary(start)}\n")
    adam = by_adam(start, points, ADAM, 5e-3)
    found = {
        f"Adam, {ADAM} steps": adam,
        f"Adam, {MORE} more": by_adam(adam.model, points, MORE, 1e-3),
        f"Newton, {newton}": by_newton(hessian, adam.model, points, newton),
        f"Gauss-Newton, {newton}": by_newton(gauss_newton, adam.model, points, newton),
    }
    errors = {name: error(each.model) for name, each in found.items()}
    print(table(found, errors))
    if plot is not None:
        draw(found, plot)
    return found, facts(start, found, errors)


def error(model: Solution) -> float:
    """The norm of the error at points that were not trained on, relative to the solution's."""
    points = grid(TEST, border=True)
    want = jax.vmap(exact)(points)
    return float(jnp.linalg.norm(jax.vmap(model)(points) - want) / jnp.linalg.norm(want))


def table(found: dict[str, Found], errors: dict[str, float]) -> str:
    lines = [f"{'':20}{'loss':>12}{'error of u':>12}{'time':>9}"]
    for name, each in found.items():
        lines.append(f"{name:20}{float(each.losses[-1]):12.2e}{errors[name]:12.1e}{each.seconds:7.2f} s")
    return "\n".join(lines)


def facts(start: Solution, found: dict[str, Found], errors: dict[str, float]) -> dict[str, bool]:
    adam, more, newton, gauss = found.values()
    end = lambda way: float(way.losses[-1])
    frozen = np.asarray(start.frequencies).tobytes()
    return {
        "Adam comes within 5 % of the solution, all others within 0.1 %": all(
            error < limit for error, limit in zip(errors.values(), (0.05, 1e-3, 1e-3, 1e-3), strict=True)
        ),
        "Newton's method takes the loss to a hundredth": end(newton) < end(adam) / 100,
        "Gauss-Newton takes it to a tenth of where more steps of Adam do": end(gauss) < end(more) / 10,
        "no step of the two raised the loss": all(
            bool(jnp.all(each.losses[1:] <= (1 + ROUNDING) * each.losses[:-1])) for each in (newton, gauss)
        ),
        "the frequencies are bit for bit the same": all(
            np.asarray(each.model.frequencies).tobytes() == frozen for each in found.values()
        ),
    }


def draw(found: dict[str, Found], plot: pathlib.Path) -> None:
    """The solution, the error of each way, and the losses over time."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as problem:
        raise ModuleNotFoundError(f"--plot needs {problem.name}: pip install 'treeparams[plot]'") from None
    points = grid(TEST, border=True)
    want = np.asarray(jax.vmap(exact)(points)).reshape(TEST, TEST)
    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplot_mosaic([["first", "more", "losses"], ["newton", "gauss", "losses"]], width_ratios=(1, 1, 1.3))
    losses = axes.pop("losses")
    for axis, (name, each) in zip(axes.values(), found.items(), strict=True):
        wrong = np.asarray(jax.vmap(each.model)(points)).reshape(TEST, TEST) - want
        image = axis.imshow(1e4 * wrong.T, origin="lower", extent=(0, 1, 0, 1), cmap="RdBu")
        image.set_clim(-1e4 * np.abs(wrong).max(), 1e4 * np.abs(wrong).max())
        axis.set(title=name, xlabel="x", ylabel="y")
        figure.colorbar(image, ax=axis, shrink=0.8, label="error of u, in 1e-4")
    for name, each in list(found.items())[1:]:
        losses.semilogy(np.linspace(0, each.seconds, len(each.losses)), each.losses, label=name)
    losses.set(title=f"After {ADAM} steps of Adam", xlabel="seconds", ylabel="loss")
    losses.legend()
    figure.savefig(plot, dpi=100)


def main(argv: Sequence[str] | None = None) -> dict[str, Found]:
    parser = argparse.ArgumentParser(
        description="Solves Poisson's equation by a net, with Adam and with Newton's method."
    )
    parser.add_argument("--seed", type=int, default=0, help="of the start")
    parser.add_argument("--newton", type=int, default=NEWTON, help=f"steps of Newton's (default: {NEWTON})")
    parser.add_argument("--plot", type=pathlib.Path, help="a file for a picture of errors and losses")
    arguments = parser.parse_args(argv)
    if arguments.plot is not None and not arguments.plot.parent.is_dir():
        parser.error(f"there is no directory {arguments.plot.parent} for the plot")
    jax.config.update("jax_enable_x64", True)  # conjugate gradients lose their directions in float32
    found, checks = run(**vars(arguments))
    print("\nChecked:")
    for what, holds in checks.items():
        print(f"  {'ok' if holds else 'FAILED'}  {what}")
    if not all(checks.values()):
        raise SystemExit(1)
    return found


if __name__ == "__main__":
    main()
