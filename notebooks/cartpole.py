"""CartPole for Q-learning in JAX: acting, replay, and a whole training run as one `scan`.

What is learned, and how, is up to the caller: `run` takes the learning step as a function.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
from jax import Array

ENVS = 4  # that are played at the same time
BATCH = 64  # transitions in a learning step
EXPLORE = 0.05  # share of random actions, after the first quarter of a run
ENV, PARAMS = gymnax.make("CartPole-v1")


class Learner(NamedTuple):
    """What a learning step changes."""

    online: Any  # from an observation to the values of the two actions
    target: Any
    state: Any  # of the optimiser


class Transition(NamedTuple):
    """One step of one environment."""

    # Four numbers of cart and pole, and the last action, one-hot: zeros where there was none.
    observation: Array
    action: Array  # one-hot
    following: Array  # the observation after it, before any reset
    fallen: Array  # 1.0 where the pole fell; not where the time was up


def reset(key: Array, count: int) -> tuple[Array, Any]:
    """The first observations of `count` episodes, and the states of their environments."""
    physics, states = jax.vmap(ENV.reset, in_axes=(0, None))(jax.random.split(key, count), PARAMS)
    return jnp.concatenate([physics, jnp.zeros((count, 2))], axis=1), states


def act(online: Callable[[Array], Array], observations: Array, explore: Array, key: Array) -> Array:
    """The action in each environment, one-hot: the best, or random with probability `explore`."""
    by_chance, other = jax.random.split(key)
    best = jnp.argmax(jax.vmap(online)(observations), axis=1)
    random = jax.random.randint(other, best.shape, 0, 2)
    explores = jax.random.uniform(by_chance, best.shape) < explore
    return jax.nn.one_hot(jnp.where(explores, random, best), 2)


def advance(
    states: Any, observations: Array, actions: Array, key: Array
) -> tuple[Any, Array, Transition]:
    """One step of each environment. Where an episode ends the next one begins."""
    step = jax.vmap(ENV.step, in_axes=(0, 0, 0, None))
    keys, chosen = jax.random.split(key, len(actions)), jnp.argmax(actions, axis=1)
    physics, states, _, fallen, late, info = step(keys, states, chosen, PARAMS)
    last = jnp.where((fallen | late)[:, None], 0.0, actions)
    following = jnp.concatenate([info["final_observation"], actions], axis=1)
    transition = Transition(observations, actions, following, fallen.astype(float))
    return states, jnp.concatenate([physics, last], axis=1), transition


def measure(learner: Learner) -> dict[str, Array]:
    """The largest value and the mean values of both networks at the start of 256 fixed episodes."""
    starts, _ = reset(jax.random.key(2), 256)
    online, target = jax.vmap(learner.online)(starts), jax.vmap(learner.target)(starts)
    return {
        "largest": jnp.max(jnp.abs(online)),
        "online": jnp.mean(online),
        "target": jnp.mean(target),
    }


def run(
    key: Array,
    learner: Learner,
    learn: Callable[[Learner, Transition, Array], Learner],
    *,
    points: int,
    spacing: int,
) -> tuple[Learner, dict[str, Array]]:
    """Trains a learner in `points * spacing` updates, with a step of every environment before each.

    Args:
        key: for the environments, the exploration and the batches.
        learner: what learns.
        learn: from a learner, a batch and the number of this update, from 1 on, to the learner
            after it.
        points: how often to record the values, after the start.
        spacing: updates between two records. As many steps are played before the first update, to
            fill the replay.

    Returns:
        The learner at the end, and what `measure` says of it `points + 1` times, first before any
        update.
    """
    resetting, playing = jax.random.split(key)
    observations, states = reset(resetting, ENVS)
    length = (points + 1) * spacing
    one = Transition(observations, observations[:, 4:], observations, observations[:, 0])
    replay = jax.tree.map(lambda leaf: jnp.zeros((length, *leaf.shape), leaf.dtype), one)

    def iterate(carry: Any, time: Array) -> tuple[Any, None]:
        learner, states, observations, replay = carry
        acting, stepping, times, columns = jax.random.split(jax.random.fold_in(playing, time), 4)
        explore = jnp.clip(1 - time / (length / 4), EXPLORE, 1.0)
        actions = act(learner.online, observations, explore, acting)
        states, observations, new = advance(states, observations, actions, stepping)
        replay = jax.tree.map(lambda stored, leaf: stored.at[time].set(leaf), replay, new)

        def update(learner: Learner) -> Learner:
            row = jax.random.randint(times, BATCH, 0, time + 1)
            column = jax.random.randint(columns, BATCH, 0, ENVS)
            batch = jax.tree.map(lambda stored: stored[row, column], replay)
            return learn(learner, batch, time - spacing + 1)

        # This `cond` also keeps XLA from copying the whole replay at each step, which takes longer
        # than all the rest: XLA would merge the writing of a row with the reading of a batch.
        learner = jax.lax.cond(time < spacing, lambda learner: learner, update, learner)
        return (learner, states, observations, replay), None

    def until_record(carry: Any, times: Array) -> tuple[Any, Any]:
        carry, _ = jax.lax.scan(iterate, carry, times)
        return carry, measure(carry[0])

    carry = learner, states, observations, replay
    times = jnp.arange(length).reshape(points + 1, spacing)
    (learner, *_), records = jax.lax.scan(until_record, carry, times)
    return learner, records
