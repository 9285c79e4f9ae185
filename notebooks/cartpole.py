"""CartPole for Q-learning in JAX: acting, replay, and a whole training run as one `tp.lax.scan`.

You pass the learning step to `run` as a function.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
from jax import Array

import treeparams as tp

ENVS = 4  # played at the same time
BATCH = 64  # transitions in a learning step
EXPLORE = 0.05  # share of random actions, after the first quarter of a run
ENV, PARAMS = gymnax.make("CartPole-v1")


class Learner(NamedTuple):
    """The networks, and the state of the optimiser."""

    online: Any  # from an observation to the values of the two actions
    target: Any
    state: Any  # of the optimiser


class Transition(NamedTuple):
    """One step of one environment."""

    observation: Array  # position and speed of cart and pole, four numbers
    action: Array  # one-hot
    following: Array  # the next observation, before any reset
    fallen: Array  # 1.0 if the pole fell, 0.0 otherwise, also at the end of the time


def reset(key: Array, count: int) -> tuple[Array, Any]:
    """Starts `count` episodes. Returns the first observations, and states of the environments."""
    return jax.vmap(ENV.reset, in_axes=(0, None))(jax.random.split(key, count), PARAMS)


def act(online: Callable[[Array], Array], observations: Array, explore: Array, key: Array) -> Array:
    """Chooses one-hot actions: the best ones, or random ones with probability `explore`."""
    by_chance, other = jax.random.split(key)
    best = jnp.argmax(jax.vmap(online)(observations), axis=1)
    random = jax.random.randint(other, best.shape, 0, 2)
    explores = jax.random.uniform(by_chance, best.shape) < explore
    return jax.nn.one_hot(jnp.where(explores, random, best), 2)


def advance(
    states: Any, observations: Array, actions: Array, key: Array
) -> tuple[Any, Array, Transition]:
    """Steps each environment. After the end of an episode the next one begins."""
    step = jax.vmap(ENV.step, in_axes=(0, 0, 0, None))
    keys, chosen = jax.random.split(key, len(actions)), jnp.argmax(actions, axis=1)
    new, states, _, fallen, _, info = step(keys, states, chosen, PARAMS)
    transition = Transition(observations, actions, info["final_observation"], fallen.astype(float))
    return states, new, transition


def returns(online: Callable[[Array], Array], key: Array, episodes: int = 64) -> Array:
    """Plays episodes without exploration. Returns the mean return, at most 500."""
    observations, states = reset(key, episodes)

    def step(carry: Any, key: Array) -> tuple[Any, Array]:
        states, observations, up = carry
        actions = act(online, observations, jnp.zeros(()), key)
        states, observations, transition = advance(states, observations, actions, key)
        return (states, observations, up * (1 - transition.fallen)), up

    _, rewards = jax.lax.scan(
        step, (states, observations, jnp.ones(episodes)), jax.random.split(key, 500)
    )
    return jnp.mean(jnp.sum(rewards, axis=0))


def measure(learner: Learner) -> dict[str, Array]:
    """Returns the largest value, and the mean values of both networks, at 256 fixed starts."""
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
        learner: the initial learner.
        learn: a function of a learner, a batch and the number of the update, counted from 1. It
            returns the learner after the update.
        points: the number of records after the initial one.
        spacing: updates between two records, and steps before the first update, which fill the
            replay.

    Returns:
        The last learner, and `points + 1` records of `measure`, the first before any update.
    """
    resetting, playing = jax.random.split(key)
    observations, states = reset(resetting, ENVS)
    length = (points + 1) * spacing
    one = Transition(observations, jnp.zeros((ENVS, 2)), observations, jnp.zeros(ENVS))
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

        # Without this `cond` XLA copies the whole replay at each step, because it merges the
        # writing of a row with the reading of a batch. The copy takes longer than all the rest.
        learner = tp.lax.cond(time < spacing, lambda learner: learner, update, learner)
        return (learner, states, observations, replay), None

    def until_record(carry: Any, times: Array) -> tuple[Any, Any]:
        carry, _ = tp.lax.scan(iterate, carry, times)
        return carry, measure(carry[0])

    carry = learner, states, observations, replay
    times = jnp.arange(length).reshape(points + 1, spacing)
    (learner, *_), records = tp.lax.scan(until_record, carry, times)
    return learner, records
