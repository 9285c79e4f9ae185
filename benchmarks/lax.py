"""A thousand updates of a small DQN in one compiled loop, building included.

The network has two hidden layers of 64; a batch is 64 transitions. An update is loss, gradient, Adam, and a soft update
of the target; a counter and a running mean of the observations change too. The same agent goes through `tp.lax.scan` as
it is; through `jax.lax.scan` over `(params, rest)` with the same verbs; and, as a tuple of arrays, through
`jax.lax.scan` with plain Optax. Each case is traced, lowered, compiled and run once in each round, all in one `jit`, as
a program is that runs once. That all end at the same parameters is asserted.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeparams as tp
from treeparams import optim

from ._harness import Case, Scale, Table, as_ratios, at_most, in_time, interleave

_TP, _HALVES, _TUPLES = "tp.lax.scan", "(params, rest)", "tuples, plain Optax"
_WIDTH, _BATCH, _TAU, _GAMMA = 64, 64, 0.005, 0.99
_RULE = optax.adam(1e-3)
_TX = optim.trainable(_RULE)

Batch = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Program = Callable[[Batch], list[jax.Array]]


class Agent(eqx.Module):
    """A Q-network that normalises its observations, and counts its updates."""

    q: eqx.nn.MLP
    mean: jax.Array = tp.field(trainable=False)
    updates: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.q(x - self.mean)


def run(scale: Scale) -> Iterator[Table]:
    steps = 3 if scale.is_smoke else 1000
    draw = np.random.default_rng(0)
    observations = jnp.asarray(draw.normal(size=(2, steps, _BATCH, 4)), jnp.float32)
    actions = jnp.asarray(draw.integers(0, 2, size=(steps, _BATCH)))
    batches = observations[0], actions, jnp.ones((steps, _BATCH)), observations[1]
    makers = {_TP: _with_lax, _HALVES: _by_halves, _TUPLES: _by_tuples}
    results: dict[str, list[jax.Array]] = {}

    def build_and_run(name: str) -> None:
        results[name] = jax.block_until_ready(makers[name]()(batches))

    cases = {name: Case(lambda name=name: build_and_run(name)) for name in makers}
    timings = interleave(cases, scale._replace(seconds=60 * scale.seconds))
    for leaves in zip(*results.values(), strict=True):
        for leaf in leaves[1:]:
            np.testing.assert_allclose(leaf, leaves[0], rtol=1e-2, atol=1e-3)
    times = {name: timing.median for name, timing in timings.items()}
    targets = [at_most(1.02, "time", times, _TP, _HALVES), at_most(1.05, "time", times, _TP, _TUPLES)]
    row = ["build and run", *as_ratios(list(times.values()), in_time)]
    yield Table(f"{steps} updates of a DQN in one program", ["", *times], [row], targets)


def _start() -> tuple[Agent, Agent, Any]:
    agent = Agent(eqx.nn.MLP(4, 2, _WIDTH, 2, key=jax.random.key(0)), jnp.zeros(4), jnp.array(0))
    return agent, tp.copy(agent), _TX.init(agent)


def _error(values: jax.Array, after: jax.Array, batch: Batch) -> jax.Array:
    _, action, reward, _ = batch
    chosen = values[jnp.arange(_BATCH), action]
    return jnp.mean((chosen - reward - _GAMMA * jnp.max(after, axis=1)) ** 2)


def _loss(agent: Agent, target: Agent, batch: Batch) -> jax.Array:
    return _error(jax.vmap(agent)(batch[0]), jax.vmap(target)(batch[3]), batch)


def _update(carry: tuple[Agent, Agent, Any], batch: Batch) -> tuple[tuple[Agent, Agent, Any], jax.Array]:
    agent, target, state = carry
    value, grads = tp.value_and_grad(_loss)(agent, target, batch)
    agent, state = optim.step(_TX, grads, state, agent)
    statistics = 0.99 * agent.mean + 0.01 * batch[0].mean(0), agent.updates + 1
    agent = eqx.tree_at(lambda agent: (agent.mean, agent.updates), agent, statistics)
    return (agent, tp.ema(target, agent, tau=_TAU), state), value


def _with_lax() -> Program:
    carry = _start()
    step = lambda carry, batch: _update(carry, batch)  # a new function, which nothing has traced yet
    train = tp.jit(lambda carry, batches: tp.lax.scan(step, carry, batches)[0][0])
    return lambda batches: jax.tree.leaves(tp.partition(train(carry, batches))[0])


def _by_halves() -> Program:
    agent, target, state = _start()
    layout = tp.layout(agent)

    @jax.jit
    def train(carry: Any, batches: Batch) -> Any:
        def step(carry: Any, batch: Batch) -> tuple[Any, jax.Array]:
            agent, target, state = carry
            new, value = _update((tp.combine(*agent), tp.combine(*target), state), batch)
            return (tp.partition(new[0], layout), tp.partition(new[1], layout), new[2]), value

        return jax.lax.scan(step, carry, batches)[0][0][0]

    carry = tp.partition(agent, layout), tp.partition(target, layout), state
    return lambda batches: jax.tree.leaves(train(carry, batches))


def _by_tuples() -> Program:
    agent, _, _ = _start()
    params = tuple((layer.weight, layer.bias) for layer in agent.q.layers)

    def values(params: Any, mean: jax.Array, x: jax.Array) -> jax.Array:
        x = x - mean
        for weight, bias in params[:-1]:
            x = jax.nn.relu(x @ weight.T + bias)
        return x @ params[-1][0].T + params[-1][1]

    @jax.jit
    def train(carry: Any, batches: Batch) -> Any:
        def step(carry: Any, batch: Batch) -> tuple[Any, jax.Array]:
            params, mean, target, target_mean, state, count = carry
            after = values(target, target_mean, batch[3])
            value, grads = jax.value_and_grad(lambda params: _error(values(params, mean, batch[0]), after, batch))(
                params
            )
            updates, state = _RULE.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            mean = 0.99 * mean + 0.01 * batch[0].mean(0)
            target = optax.incremental_update(params, target, _TAU)
            return (params, mean, target, mean, state, count + 1), value

        return jax.lax.scan(step, carry, batches)[0][0]

    carry = params, agent.mean, params, agent.mean, _RULE.init(params), agent.updates
    return lambda batches: jax.tree.leaves(train(carry, batches))
