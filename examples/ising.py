"""The ground state of a quantum spin chain by natural gradients: 30 steps, where Adam takes hundreds.

    python examples/ising.py [--plot FILE]

Ten spins on a ring, `H = -sum(sz sz') - sum(sx)`: an energy of its 1024 amplitudes, of which a net gives the logarithm.
The natural step follows H in the space of amplitudes as far as the net can, `J step = residual` by least squares. With
fewer samples than parameters it is `J^T (J J^T + damping)^-1 residual`: MinSR (Chen and Heyl, 2024). SPRING
(Goldshlager, Abrahamsen and Lin, 2024) keeps the part of the last step that the samples do not speak against.

All configurations are summed, each weighted by the root of its probability; from a sampler they would come as drawn.
It needs what `pip install -e '.[examples]'` installs.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

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

SITES = 10
SPINS = 1.0 - 2.0 * (np.arange(2**SITES)[:, None] >> np.arange(SITES) & 1)  # all configurations, each a row
RATE, DAMPING, MOMENTUM, CLOSE = 0.1, 0.1, 0.8, 1e-4


class Chain(eqx.Module):
    """The logarithm of an amplitude, the same for a chain that is turned, mirrored, or has all its spins flipped."""

    first: Array
    mirrored: Array = tp.field(tied_to="first", transform=jnp.fliplr)
    second: Array

    def __init__(self, *, key: Array) -> None:
        one, two = jax.random.split(key)
        self.first = jax.random.normal(one, (24, SITES)) / SITES**0.5
        self.mirrored = jnp.fliplr(self.first)
        self.second = 0.02 * jax.random.normal(two, (40, 24))  # amplitudes that are nearly equal

    def __call__(self, spins: Array) -> Array:
        """Of a configuration, shape `(SITES,)`."""
        turned = jnp.stack([jnp.roll(spins, -i) for i in range(SITES)])
        hidden = jnp.tanh(turned @ self.first.T) + jnp.tanh(turned @ self.mirrored.T)
        return jnp.sum(jnp.log(jnp.cosh(hidden @ self.second.T)))


def log_amplitude(chain: Chain, spins: Array) -> Array:
    return chain(spins)


def amplitudes(chain: Chain) -> Array:
    """Those of all configurations, with a norm of one."""
    return jnp.sqrt(jax.nn.softmax(2 * jax.vmap(chain)(jnp.asarray(SPINS))))


def hamiltonian() -> np.ndarray:
    """The matrix: neighbours on the ring in its diagonal, and beside it what differs by one flip."""
    matrix = -np.diag(np.sum(SPINS * np.roll(SPINS, 1, axis=1), axis=1))
    every = np.arange(2**SITES)
    for site in range(SITES):
        matrix[every, every ^ 1 << site] -= 1
    return matrix


def natural(matrix: Array, restructure: Any, momentum: float) -> Callable[[Array, Array], Any]:
    """A step of SPRING; without momentum, of MinSR."""

    def step(vector: Array, previous: Array) -> Any:
        psi, push = jax.linearize(lambda vector: amplitudes(restructure(vector)), vector)
        pull = jax.linear_transpose(push, vector)
        energy = psi @ matrix @ psi
        residual = matrix @ psi - energy * psi
        kernel = centred(nested.kernel(log_amplitude)(restructure(vector), SPINS), psi)
        wanted = residual - momentum * push(previous)
        solved = jax.scipy.linalg.solve(kernel + DAMPING * jnp.eye(len(psi)), wanted, assume_a="pos")
        direction = pull(solved)[0] + momentum * previous
        return vector - RATE * direction, direction, energy

    return step


def centred(kernel: Array, psi: Array) -> Array:
    """`J J^T` of the amplitudes, from that of their logarithms: less its mean, times the amplitudes."""
    chance = psi**2
    mean = kernel @ chance
    return jnp.outer(psi, psi) * (kernel - mean[:, None] - mean[None] + chance @ mean)


def by_adam(matrix: Array, restructure: Any, tx: optax.GradientTransformation) -> Callable[[Array, Any], Any]:
    def step(vector: Array, state: Any) -> Any:
        psi, pull = jax.vjp(lambda vector: amplitudes(restructure(vector)), vector)
        updates, state = tx.update(pull(2 * matrix @ psi)[0], state)
        return optax.apply_updates(vector, updates), state, psi @ matrix @ psi

    return step


def follow(name: str, step: Any, vector: Array, state: Any, steps: int) -> np.ndarray:
    """The energy before each step."""
    bar, energies = tqdm(range(steps), name, ncols=100), []
    bar.set_postfix_str("compiles")
    compiled = jax.jit(step).lower(vector, state).compile()
    for _ in bar:
        vector, state, energy = compiled(vector, state)
        energies.append(float(energy))
    return np.array(energies)


def main(steps: int = 80, adam: int = 1000, seed: int = 0, plot: str = "") -> dict[str, np.ndarray]:
    """Finds the ground state in three ways; returns the error of the energy before each step."""
    matrix = jnp.asarray(hamiltonian())
    exact = float(jnp.linalg.eigvalsh(matrix)[0])
    vector, restructure = tp.ravel(Chain(key=jax.random.key(seed)))
    tx = optax.adam(optax.cosine_decay_schedule(5e-3, adam))
    nothing = jnp.zeros_like(vector)
    errors = {
        "Adam": follow("Adam", by_adam(matrix, restructure, tx), vector, tx.init(vector), adam),
        "MinSR": follow("MinSR", natural(matrix, restructure, 0.0), vector, nothing, steps),
        "SPRING": follow("SPRING", natural(matrix, restructure, MOMENTUM), vector, nothing, steps),
    }
    errors = {name: energies - exact for name, energies in errors.items()}
    print(f"\n{len(vector):,} parameters, exact energy {exact:.6f}\n")
    row = "{:6}  {:>5}  {:>8}  {:>16}".format
    print(row("way", "steps", f"to {CLOSE:.0e}", "error at the end"))
    for name, each in errors.items():
        print(row(name, len(each), str(reached(each)), f"{each[-1]:.1e}"))
    if plot:
        draw(errors, plot)
    return errors


def draw(errors: dict[str, np.ndarray], plot: str) -> None:
    picture = Figure(figsize=(8.5, 4), layout="constrained")
    axes = picture.subplots()
    for name, each in errors.items():
        axes.loglog(1 + np.arange(len(each)), each, label=name)
    axes.set(title="Adam takes over five times the steps of natural gradients", xlabel="step")
    axes.set_ylabel("energy above the exact one")
    axes.legend()
    picture.savefig(plot)


def reached(errors: np.ndarray) -> int | None:
    """After how many steps the error is small and stays so; `None`: not within these."""
    large = np.flatnonzero(errors >= CLOSE)
    after = int(large[-1]) + 1 if len(large) else 0
    return after if after < len(errors) else None


def claims(errors: dict[str, np.ndarray]) -> dict[str, Any]:
    adam, minsr, spring = errors.values()
    slower, ends = reached(minsr), max(minsr[-1], spring[-1])
    return {
        f"MinSR and SPRING come within 1e-4 of exact diagonalisation: {ends:.0e}": ends < CLOSE,
        f"Adam takes at least five times as many steps: {reached(adam) or f'over {len(adam)}'} for {slower}": slower
        and min(adam[: 5 * slower]) > CLOSE,
        f"SPRING ends nearer than MinSR: {spring[-1]:.0e} for {minsr[-1]:.0e}": spring[-1] < minsr[-1],
    }


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # an energy of -12.8 has an error of 1e-6 in float32, which is not small
    parser = argparse.ArgumentParser(description=main.__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--adam", type=int)
    parser.add_argument("--plot", help="a picture to write")
    checked = claims(main(**vars(parser.parse_args())))
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
