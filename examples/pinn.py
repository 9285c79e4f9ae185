"""Poisson's equation by a physics-informed net: where Adam crawls, Gauss-Newton on the net's parameters goes on.

    python examples/pinn.py [--plot FILE]

On the unit square, with u = 0 on its border, a net u is to solve `laplacian(u) = -source`, of which the solution is
known. The loss is the mean square of what is left at points inside; it holds `nested.input_laplacian` of the net.

Adam comes near and then crawls, since the loss is steep in some directions and flat in others. Gauss-Newton by
`nested.ggn_operator` goes on from there: a step solves `(G + damping) step = -gradient` by conjugate gradients.
It needs what `pip install -e '.[examples]'` installs.
"""

import argparse
import sys
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from tqdm import tqdm

import treeparams as tp
from treeparams import nested


class Solution(eqx.Module):
    """A function on the unit square that is zero on its border."""

    frequencies: Array = tp.field(trainable=False)  # drawn once
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


def residuals(model: Any, points: Array) -> Array:
    """What is left of the equation at each point."""
    laplacian = nested.input_laplacian(lambda model, point: model(point))
    return jax.vmap(lambda point: laplacian(model, point) + 5 * jnp.pi**2 * exact(point))(points)


def mean_square(values: Array) -> Array:
    return jnp.mean(values**2)


def loss(model: Any, points: Array) -> Array:
    return mean_square(residuals(model, points))


class Found(NamedTuple):
    """Where a way arrived."""

    model: Solution
    losses: np.ndarray  # before each step
    seconds: float  # without tracing and compiling


def by_adam(name: str, start: Solution, points: Array, steps: int, rate: float) -> Found:
    vector, restructure = tp.ravel(start)
    tx = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def step(vector: Array, state: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda vector: loss(restructure(vector), points))(vector)
        updates, state = tx.update(gradient, state)
        return optax.apply_updates(vector, updates), state, value

    return follow(name, step, vector, tx.init(vector), restructure, steps)


def by_gauss_newton(name: str, start: Solution, points: Array, steps: int) -> Found:
    vector, restructure = tp.ravel(start)

    def step(vector: Array, damping: Array) -> Any:
        value, gradient = jax.value_and_grad(lambda vector: loss(restructure(vector), points))(vector)
        matrix = nested.ggn_operator(residuals, mean_square, damping=damping)(restructure(vector), points)
        direction, _ = jax.scipy.sparse.linalg.cg(matrix, -gradient, tol=1e-3, maxiter=100)
        better = loss(restructure(vector + direction), points) < value  # also false for NaN
        damping = jnp.where(better, jnp.maximum(damping / 3, 1e-10), 4 * damping)
        return jnp.where(better, vector + direction, vector), damping, value

    return follow(name, step, vector, jnp.ones(()), restructure, steps)


def follow(name: str, step: Any, vector: Array, state: Any, restructure: Any, steps: int) -> Found:
    bar, losses = tqdm(range(steps), name, ncols=100), []
    bar.set_postfix_str("compiles")
    compiled = jax.jit(step).lower(vector, state).compile()
    begin = time.perf_counter()
    for _ in bar:
        vector, state, value = compiled(vector, state)
        losses.append(float(value))
        bar.set_postfix(loss=f"{value:.1e}", refresh=False)
    return Found(restructure(vector), np.array(losses), time.perf_counter() - begin)


def error(model: Any) -> float:
    """The norm of the error at points that were not trained on, relative to the solution's."""
    points = grid(jnp.linspace(0, 1, 51))
    want = jax.vmap(exact)(points)
    return float(jnp.linalg.norm(jax.vmap(model)(points) - want) / jnp.linalg.norm(want))


def grid(ticks: Array) -> Array:
    """Points of the unit square, shape `(n**2, 2)`."""
    return jnp.stack(jnp.meshgrid(ticks, ticks, indexing="ij"), -1).reshape(-1, 2)


def main(adam: int = 1000, more: int = 4000, newton: int = 40, seed: int = 0, plot: str = "") -> dict[str, Found]:
    """Solves Poisson's equation by a net, with Adam and with Gauss-Newton; returns where each arrived."""
    points = grid((jnp.arange(24) + 0.5) / 24)
    first = by_adam("Adam", Solution(key=jax.random.key(seed)), points, adam, 5e-3)
    found = {
        f"Adam, {adam} steps": first,
        f"then Adam, {more} more": by_adam("more of Adam", first.model, points, more, 1e-3),
        f"or Gauss-Newton, {newton}": by_gauss_newton("Gauss-Newton", first.model, points, newton),
    }
    row = "{:20}  {:>7}  {:>10}  {:>6}".format
    print("\n" + row("way", "loss", "error of u", "time"))
    for name, each in found.items():
        print(row(name, f"{each.losses[-1]:.1e}", f"{error(each.model):.1e}", f"{each.seconds:.1f} s"))
    if plot:
        draw(found, plot)
    return found


def draw(found: dict[str, Found], plot: str) -> None:
    """The losses after the first way, by the time that they took."""
    picture = Figure(figsize=(8.5, 4), layout="constrained")
    axes = picture.subplots()
    for name, each in list(found.items())[1:]:
        axes.semilogy(np.linspace(0, each.seconds, len(each.losses)), each.losses, label=name)
    axes.set(title="Gauss-Newton goes on where Adam crawls", xlabel="seconds after the first Adam", ylabel="loss")
    axes.legend()
    picture.savefig(plot)


def claims(found: dict[str, Found]) -> dict[str, Any]:
    _, more, newton = found.values()
    off, lower = max(error(more.model), error(newton.model)), newton.losses[-1] / more.losses[-1]
    return {
        f"both ways come within 0.1 % of the solution: {off:.2%}": off < 1e-3,
        "no step of Gauss-Newton raises the loss": all(np.diff(newton.losses) <= 1e-8 * newton.losses[:-1]),
        f"Gauss-Newton takes the loss to a tenth of where Adam does: {lower:.3f}": lower < 0.1,
    }


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # conjugate gradients lose their directions in float32
    parser = argparse.ArgumentParser(description=main.__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--plot", help="a picture to write")
    checked = claims(main(**vars(parser.parse_args())))
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
