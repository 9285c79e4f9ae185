"""A net that learns an energy, and whose motion therefore conserves one.

    python examples/hamiltonian.py [--plot FILE]

From noisy measurements of how a pendulum moves, its angle and momentum with their rates, two nets learn to go on. One
gives the rates as they come. The other gives an energy H(q, p), and the rates by Hamilton's equations, dq/dt = dH/dp
and dp/dt = -dH/dq (Greydanus, Dzamba and Yosinski, 2019). Its loss holds the net's derivative in its input, by
`nested.input_gradient`, and is differentiated once more, in the parameters.

Then both are let go for about 15 swings. Whatever energy the second has learned, it is constant along the motion.
It needs what `pip install -e '.[examples]'` installs.
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
from tqdm import tqdm

import treeparams as tp
from treeparams import nested

EXAMPLES, NOISE, BATCH = 2000, 0.05, 200
STEP, STARTS = 0.05, 16
PLAIN, LEARNED = "rates as they come", "rates of an energy"


def energy(state: Array) -> Array:
    """The pendulum's, of a state (q, p); zero at rest, 2 where it stands on its head."""
    return state[1] ** 2 / 2 + 1 - jnp.cos(state[0])


class Net(eqx.Module):
    """A function of the state, which knows that an angle comes round."""

    scale: Array = tp.field(trainable=False)  # of the momenta that were measured: no parameter
    mlp: eqx.nn.MLP

    def __call__(self, state: Array) -> Array:
        """Of a state, shape `(2,)`."""
        return self.mlp(jnp.stack([jnp.sin(state[0]), jnp.cos(state[0]), state[1] / self.scale]))


def hamilton(net: Net, state: Array) -> Array:
    """The rates of a state (q, p) by Hamilton's equations."""
    slope = nested.input_gradient(lambda net, state: net(state))(net, state)
    return jnp.stack([slope[1], -slope[0]])


RATES: dict[str, Callable[[Net, Array], Array]] = {PLAIN: lambda net, state: net(state), LEARNED: hamilton}


def measure(key: Array) -> tuple[Array, Array]:
    """States of all energies up to 1.8, and their rates with noise."""
    drawn, noise = jax.random.split(key)
    most = jnp.array([3.0, 2.0])
    states = jax.random.uniform(drawn, (4 * EXAMPLES, 2), minval=-most, maxval=most)
    states = states[jax.vmap(energy)(states) < 1.8][:EXAMPLES]
    rates = jnp.stack([states[:, 1], -jnp.sin(states[:, 0])], axis=1)
    return states, rates + NOISE * jax.random.normal(noise, rates.shape)


def train(name: str, net: Net, data: Any, key: Array, steps: int) -> tuple[Net, np.ndarray]:
    """The trained net, and the loss at each step."""
    tx = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    rates = RATES[name]
    params, rest = tp.partition(net)

    def loss(params: Any, states: Array, measured: Array) -> Array:
        return jnp.mean((jax.vmap(rates, (None, 0))(tp.combine(params, rest), states) - measured) ** 2)

    @jax.jit
    def step(params: Any, state: Any, key: Array) -> Any:
        batch = jax.random.randint(key, (BATCH,), 0, EXAMPLES)
        value, grads = jax.value_and_grad(loss)(params, data[0][batch], data[1][batch])
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for each in (bar := tqdm(jax.random.split(key, steps), name, ncols=100)):
        params, state, value = step(params, state, each)
        losses.append(float(value))
        bar.set_postfix(loss=f"{value:.4f}", refresh=False)
    return tp.combine(params, rest), np.array(losses)


def let_go(rates: Callable[[Net, Array], Array], net: Net, time: float) -> Array:
    """The states at each step, shape `(steps, starts, 2)`, by the classical method of Runge and Kutta.

    All start at rest, with angles up to 2.4; at pi the pendulum stands on its head.
    """

    def step(state: Array, _: None) -> tuple[Array, Array]:
        one = rates(net, state)
        two = rates(net, state + STEP / 2 * one)
        three = rates(net, state + STEP / 2 * two)
        four = rates(net, state + STEP * three)
        return state + STEP / 6 * (one + 2 * two + 2 * three + four), state

    starts = jnp.stack([jnp.linspace(0.8, 2.4, STARTS), jnp.zeros(STARTS)], 1)
    along = lambda state: jax.lax.scan(step, state, None, round(time / STEP) + 1)[1]
    return jax.jit(jax.vmap(along, out_axes=1))(starts)


class Motion(NamedTuple):
    """How a net moves from each start."""

    net: Net
    states: Array


def drift(of_energy: Callable[[Array], Array], motion: Motion) -> float:
    """The largest change of an energy along any motion, as a part of the pendulum's energy at its start."""
    along = jax.vmap(jax.vmap(of_energy))(motion.states)
    return float(jnp.max(jnp.abs(along - along[:1]) / jax.vmap(energy)(motion.states[0])[None]))


def main(steps: int = 2000, time: float = 100.0, seed: int = 0, plot: str = "") -> dict[str, Motion]:
    """Learns how a pendulum moves, by two nets; returns how each of them moves."""
    drawn, made, batches = jax.random.split(jax.random.key(seed), 3)
    data = measure(drawn)
    outputs: dict[str, Any] = {PLAIN: 2, LEARNED: "scalar"}
    motions, row, rows = {}, "{:18}  {:>7}  {:>17}  {:>10}".format, []
    for name, rates in RATES.items():
        net = Net(jnp.std(data[0][:, 1]), eqx.nn.MLP(3, outputs[name], 64, 2, jnp.tanh, key=made))
        net, losses = train(name, net, data, batches, steps)
        motions[name] = motion = Motion(net, let_go(rates, net, time))
        own = f"{drift(net, motion):.5%}" if name == LEARNED else "-"
        rows.append(row(name, f"{losses[-100:].mean():.5f}", f"{drift(energy, motion):.1%}", own))
    print("", row("what is learned", "loss", "energy changes by", "its own by"), *rows, sep="\n")
    if plot:
        draw(motions, plot)
    return motions


def draw(motions: dict[str, Motion], plot: str) -> None:
    """The pendulum's energy along the motions from some of the starts."""
    picture = Figure(figsize=(8.5, 4), layout="constrained")
    axes = picture.subplots()
    for i, (name, motion) in enumerate(motions.items()):
        energies = jax.vmap(jax.vmap(energy))(motion.states[:, ::3])
        axes.plot(STEP * np.arange(len(energies)), energies, color=f"C{i}")[0].set_label(name)
    axes.set(title="A net that learns an energy conserves it", xlabel="time", ylabel="the pendulum's energy")
    picture.legend(loc="outside right upper")
    picture.savefig(plot)


def claims(motions: dict[str, Motion]) -> dict[str, Any]:
    plain, learned = motions.values()
    own, with_it, without = drift(learned.net, learned), drift(energy, learned), drift(energy, plain)
    return {
        f"the learned energy is constant along its motion to 0.01 %: {own:.4%}": own < 1e-4,
        f"the pendulum's energy then changes by less than 4 %: {with_it:.1%}": with_it < 0.04,
        f"and by more than five times as much without: {without:.1%}": without > 5 * with_it,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--plot", help="a picture to write")
    checked = claims(main(**vars(parser.parse_args())))
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
