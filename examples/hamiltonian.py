"""A net that learns an energy, and whose motion therefore conserves one.

    python examples/hamiltonian.py [--plot FILE]

From noisy measurements of how a pendulum moves, its angle and momentum with their rates, two nets learn to go on. One
gives the rates as they come. The other gives an energy H(q, p), and the rates by Hamilton's equations, dq/dt = dH/dp
and dp/dt = -dH/dq (Greydanus, Dzamba and Yosinski, 2019). Its loss holds the net's derivative in its input, by
`nested.gradient`, and is differentiated once more, in the parameters.

Then both are let go for a hundred units of time, about 15 swings, from 16 states. Whatever the second has learned, its
own energy is constant along its motion; and as that is near the pendulum's, so is the pendulum's.

The scale of the measurements is an array of both models, but no parameter.
"""

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import treeparams as tp
from treeparams import nested, optim

EXAMPLES, NOISE, STEPS, BATCH = 2000, 0.05, 4000, 200
TIME, STEP, STARTS = 100.0, 0.05, 16
PLAIN, LEARNED = "rates as they come", "rates of an energy"


def energy(state: Array) -> Array:
    """The pendulum's, of a state (q, p); zero at rest, 2 where it stands on its head."""
    return state[1] ** 2 / 2 + 1 - jnp.cos(state[0])


def hamilton(of_energy: Callable[[Any, Array], Array], model: Any, state: Array) -> Array:
    """The rates of a state (q, p) by Hamilton's equations."""
    slope = nested.gradient(of_energy)(model, state)
    return jnp.stack([slope[1], -slope[0]])


class Net(eqx.Module):
    """A function of the state, which knows that an angle comes round."""

    scale: Array = tp.field(trainable=False)
    mlp: eqx.nn.MLP

    def __init__(self, outputs: Any, scale: Array, *, key: Array) -> None:
        self.scale = scale
        self.mlp = eqx.nn.MLP(3, outputs, 64, 2, jnp.tanh, key=key)

    def __call__(self, state: Array) -> Array:
        """Of a state, shape `(2,)`."""
        return self.mlp(jnp.stack([jnp.sin(state[0]), jnp.cos(state[0]), state[1] / self.scale]))


class Data(NamedTuple):
    """States and their measured rates, shape `(n, 2)` each."""

    states: Array
    rates: Array


RATES: dict[str, Callable[[Net, Array], Array]] = {
    PLAIN: lambda net, state: net(state),
    LEARNED: lambda net, state: hamilton(lambda net, state: net(state), net, state),
}


def measure(key: Array) -> Data:
    """States of all energies up to 1.8, and their rates with noise."""
    drawn, noise = jax.random.split(key)
    states = jax.random.uniform(drawn, (4 * EXAMPLES, 2), minval=-jnp.array([3.0, 2.0]), maxval=jnp.array([3.0, 2.0]))
    states = states[jax.vmap(energy)(states) < 1.8][:EXAMPLES]
    rates = jax.vmap(lambda state: hamilton(lambda _, state: energy(state), None, state))(states)
    return Data(states, rates + NOISE * jax.random.normal(noise, rates.shape))


def train(rates: Callable[[Net, Array], Array], net: Net, data: Data, key: Array) -> tuple[Net, Array]:
    """The trained net, and the loss at each step."""
    layout = tp.layout(net)
    tx = optim.trainable(optax.adam(optax.cosine_decay_schedule(3e-3, STEPS)), layout)
    params, rest = tp.partition(net, layout)

    def loss(net: Net, states: Array, measured: Array) -> Array:
        return jnp.mean((jax.vmap(rates, (None, 0))(net, states) - measured) ** 2)

    @jax.jit
    def run(params: Any, rest: Any, key: Array) -> tuple[Any, Array]:
        def step(carry: Any, key: Array) -> Any:
            params, state = carry
            net = tp.combine(params, rest)
            batch = jax.random.randint(key, (BATCH,), 0, len(data.states))
            value, grads = tp.value_and_grad(loss, layout)(net, data.states[batch], data.rates[batch])
            net, state = optim.step(tx, grads, state, net)
            return (tp.partition(net, layout)[0], state), value

        start = params, tx.init(tp.combine(params, rest))
        (params, _), losses = jax.lax.scan(step, start, jax.random.split(key, STEPS))
        return params, losses

    params, losses = run(params, rest, key)
    return tp.combine(params, rest), losses


def let_go(rates: Callable[[Net, Array], Array], net: Net, count: int) -> Array:
    """The states at each step, shape `(steps, count, 2)`, by the classical method of Runge and Kutta.

    All start at rest, with angles up to 2.4; at pi the pendulum stands on its head.
    """

    def step(state: Array, _: None) -> tuple[Array, Array]:
        one = rates(net, state)
        two = rates(net, state + STEP / 2 * one)
        three = rates(net, state + STEP / 2 * two)
        four = rates(net, state + STEP * three)
        return state + STEP / 6 * (one + 2 * two + 2 * three + four), state

    starts = jnp.stack([jnp.linspace(0.8, 2.4, count), jnp.zeros(count)], 1)
    steps = round(TIME / STEP) + 1
    along = jax.jit(jax.vmap(lambda state: jax.lax.scan(step, state, None, steps)[1], out_axes=1))
    return along(starts)


class Motion(NamedTuple):
    """How a net moves from each start."""

    net: Net
    states: Array


def run(seed: int, plot: pathlib.Path | None) -> tuple[dict[str, Motion], dict[str, bool]]:
    """Both nets; returns how they move, and what was checked."""
    drawn, first, second, batches = jax.random.split(jax.random.key(seed), 4)
    data = measure(drawn)
    scale = jnp.std(data.states[:, 1])
    nets = dict(zip(RATES, (Net(2, scale, key=first), Net("scalar", scale, key=second)), strict=True))
    print(f"{tp.summary(nets[LEARNED])}\n")
    motions, losses = {}, {}
    for name, net in nets.items():
        trained, history = train(RATES[name], net, data, batches)
        losses[name] = float(jnp.mean(history[-100:]))
        motions[name] = Motion(trained, let_go(RATES[name], trained, STARTS))
    print(table(motions, losses))
    if plot is not None:
        draw(motions, plot)
    return motions, facts(scale, motions)


def drift(of_energy: Callable[[Array], Array], states: Array) -> float:
    """The largest change of an energy along any motion, as a part of the pendulum's energy at its start."""
    along = jax.vmap(jax.vmap(of_energy))(states)
    return float(jnp.max(jnp.abs(along - along[:1]) / jax.vmap(energy)(states[0])[None]))


def table(motions: dict[str, Motion], losses: dict[str, float]) -> str:
    lines = [f"{'':20}{'loss':>10}{'change of energy':>18}{'of its own':>12}"]
    for name, (net, states) in motions.items():
        own = f"{drift(net, states):12.1e}" if name == LEARNED else f"{'-':>12}"
        lines.append(f"{name:20}{losses[name]:10.5f}{100 * drift(energy, states):16.1f} %{own}")
    return "\n".join(lines)


def facts(scale: Array, motions: dict[str, Motion]) -> dict[str, bool]:
    net, states = motions[LEARNED]
    conserved = drift(energy, states)
    return {
        "the learned energy is constant along its motion to 1e-4": drift(net, states) < 1e-4,
        "the pendulum's energy then changes by less than 4 %": conserved < 0.04,
        "and by more than five times as much without": drift(energy, motions[PLAIN].states) > 5 * conserved,
        "the scale is bit for bit the same": all(
            np.asarray(each.net.scale).tobytes() == np.asarray(scale).tobytes() for each in motions.values()
        ),
    }


def draw(motions: dict[str, Motion], plot: pathlib.Path) -> None:
    """The last quarter of each motion in the plane of the states, and the energies over time."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as problem:
        raise ModuleNotFoundError(f"--plot needs {problem.name}: pip install 'treeparams[plot]'") from None
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    axes = figure.subplots(1, len(motions) + 1)
    for axis, (name, (_, states)) in zip(axes, motions.items(), strict=False):
        late = np.asarray(states[-len(states) // 4 :])
        for one in range(0, states.shape[1], 3):
            axis.plot(late[:, one, 0], late[:, one, 1], linewidth=0.8)
        axis.set(title=f"{name}: the last quarter", xlabel="angle", ylabel="momentum", xlim=(-3, 3), ylim=(-2.2, 2.2))
    for (name, (_, states)), colour in zip(motions.items(), ("tab:orange", "tab:blue"), strict=True):
        along = np.asarray(jax.vmap(jax.vmap(energy))(states[:, ::5]))
        lines = axes[-1].plot(STEP * np.arange(len(along)), along, color=colour, linewidth=0.8)
        lines[0].set_label(name)
    axes[-1].set(title="the pendulum's energy", xlabel="time", ylabel="energy")
    axes[-1].legend()
    figure.savefig(plot, dpi=100)


def main(argv: Sequence[str] | None = None) -> dict[str, Motion]:
    parser = argparse.ArgumentParser(description="Learns the energy of a pendulum, and how it moves, by two nets.")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the starts")
    parser.add_argument("--plot", type=pathlib.Path, help="a file for a picture of the motions")
    arguments = parser.parse_args(argv)
    if arguments.plot is not None and not arguments.plot.parent.is_dir():
        parser.error(f"there is no directory {arguments.plot.parent} for the plot")
    motions, checks = run(**vars(arguments))
    print("\nChecked:")
    for what, holds in checks.items():
        print(f"  {'ok' if holds else 'FAILED'}  {what}")
    if not all(checks.values()):
        raise SystemExit(1)
    return motions


if __name__ == "__main__":
    main()
