"""One learner and several actors that are not one JAX job: each new version of the weights is one message, sent by Ray.

    python examples/actors.py [--actors 3] [--updates 12000] [--plot FILE]

The learner trains a Q-network on CartPole from what the actors have played. Now and then it publishes its weights: the
vector of the trained parameters as one message (`saving.dumps`), which Ray's object store hands to all actors. An actor
takes the newest message between two rollouts and waits for nobody. It keeps what it has where a message is torn, old or
of another network (`saving.loads`). Its compiled policy takes the vector, and is traced once.

In the middle of the run a torn message is published, one actor is killed and replaced, and the learner is killed. Its
successor reads the file that it has left (`saving.save`) and counts its versions as of the next run. In the end a
larger network is sent in three ways, side by side: as one message, as a pickle, as one object for each array.

On a cluster you write `--address auto`, and put the file where all machines see it (`--file`).
Ray comes with its extra: `pip install -e '.[ray]'`; a picture needs `.[ray,plot]`.
"""

import argparse
import collections
import contextlib
import importlib
import logging
import os
import pickle
import statistics
import sys
import tempfile
import time
import zlib
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import treeparams as tp
from treeparams import optim, saving

try:
    import ray
    from ray.exceptions import ObjectLostError
except ImportError as error:
    raise SystemExit("examples/actors.py needs Ray, of the extra `ray`: pip install -e '.[ray]'") from error

ENVS, STEPS, LONGEST = 8, 32, 500  # played at the same time, in a rollout, in an episode
BATCH, AT_ONCE, BEFORE, REPLAY = 256, 50, 5_000, 100_000  # transitions in an update, updates in a call, at first, kept
DISCOUNT, TAU, RATE = 0.99, 0.02, 2e-3  # the rate at first; in the end it is 0
REWARD = 1 - DISCOUNT  # for each step that the pole stands, so that a value is 1 at most
FAILS = {"message": "is torn", "actor": "is killed", "learner": "is killed"}
EVERY = 4  # calls from one version to the next


class Network(eqx.Module):
    """The values of pushing the cart to the left and to the right."""

    scale: Array = tp.field(trainable=False)  # of position, speed, angle, angular speed
    body: eqx.nn.MLP

    def __init__(self, *, key: Array) -> None:
        self.scale = jnp.array([0.5, 0.5, 5.0, 0.5])
        self.body = eqx.nn.MLP(4, 2, 64, 2, key=key)

    def __call__(self, observation: Array) -> Array:
        """The two values."""
        return self.body(observation * self.scale)


# -- CartPole (Barto, Sutton and Anderson 1983) -----------------------------------------------------------------------


class Transition(NamedTuple):
    """What an update learns from."""

    observation: Array
    action: Array
    following: Array
    fallen: Array  # the pole; where the time is up there is a next value


def begun(key: Array) -> Array:
    return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)


def pushed(state: Array, action: Array) -> Array:
    """The state of cart and pole 0.02 s later."""
    _, speed, angle, turn = state
    force, gravity, pole, mass, length = jnp.where(action == 1, 10.0, -10.0), 9.8, 0.1, 1.1, 0.5
    pull = (force + pole * length * turn**2 * jnp.sin(angle)) / mass
    turned = (gravity * jnp.sin(angle) - jnp.cos(angle) * pull) / (length * (4 / 3 - pole * jnp.cos(angle) ** 2 / mass))
    moved = pull - pole * length * turned * jnp.cos(angle) / mass
    return state + 0.02 * jnp.array([speed, moved, turn, turned])


def rollout(network: Network, states: Array, ages: Array, key: Array, explore: float) -> Any:
    """Plays on: the states after it, the ages of the episodes, the transitions, and how long each ended episode was."""

    def step(carry: tuple[Array, Array], key: Array) -> Any:
        states, ages = carry
        begin, by_chance, other = jax.random.split(key, 3)
        best = jnp.argmax(jax.vmap(network)(states), axis=1)
        chance = jax.random.uniform(by_chance, best.shape) < explore
        actions = jnp.where(chance, jax.random.randint(other, best.shape, 0, 2), best)
        following = jax.vmap(pushed)(states, actions)
        fallen = (jnp.abs(following[:, 0]) > 2.4) | (jnp.abs(following[:, 2]) > np.radians(12))
        ends = fallen | (ages + 1 >= LONGEST)
        after = jnp.where(ends[:, None], jax.vmap(begun)(jax.random.split(begin, len(ends))), following)
        lengths = jnp.where(ends, ages + 1, 0)
        return (after, jnp.where(ends, 0, ages + 1)), (Transition(states, actions, following, fallen), lengths)

    (states, ages), (played, lengths) = jax.lax.scan(step, (states, ages), jax.random.split(key, STEPS))
    return states, ages, jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), played), lengths


def td_error(online: Network, target: Network, batch: Transition) -> Array:
    """Double Q-learning, by Huber's loss."""
    values = jnp.take_along_axis(jax.vmap(online)(batch.observation), batch.action[:, None], axis=1)[:, 0]
    best = jnp.argmax(jax.vmap(online)(batch.following), axis=1)
    later = jnp.take_along_axis(jax.vmap(target)(batch.following), best[:, None], axis=1)[:, 0]
    wanted = jax.lax.stop_gradient(REWARD + DISCOUNT * jnp.where(batch.fallen, 0.0, later))
    return jnp.mean(optax.huber_loss(values, wanted))


def started(kind: type, *arguments: Any) -> Any:
    """A process of Ray with an object of a class, which waits for work more than it computes."""
    return ray.remote(num_cpus=0)(kind).remote(*arguments)


def got(references: Any) -> Any:
    """The values of references."""
    return ray.get(references)


# -- The processes -----------------------------------------------------------------------------------------------------


class Board:
    """Where the newest message hangs, and what has been played waits. It holds no weights, and outlives the others."""

    def __init__(self) -> None:
        self.newest: Any = None
        self.published = dict[Any, int]()  # the checksum of the vector of each version
        self.sizes = list[int]()
        self.waiting = collections.deque[Any](maxlen=10)  # what nobody takes in time is gone: actors wait for nobody
        self.reports = list[dict[str, Any]]()
        self.done = 0

    def publish(self, version: Any, found: int | None, size: int, reference: list[Any], updates: int) -> None:
        """Hangs up a message, with the checksum of its vector; none of a torn message, which is nobody's version."""
        if found is not None:
            self.published[version] = found
            self.sizes.append(size)
            self.done = updates
        self.newest = reference

    def look(self) -> Any:
        """The newest message, as a reference that whoever wants it gets by itself."""
        return self.newest

    def add(self, report: dict[str, Any], played: Any) -> None:
        """Takes a rollout, and what its actor says of it."""
        self.reports.append(report | {"newest": max(self.published), "at": time.monotonic()})
        self.waiting.append(played)

    def take(self) -> list[Any]:
        """The rollouts since the last call."""
        taken = list(self.waiting)
        self.waiting.clear()
        return taken

    def report(self) -> Any:
        """All that was said."""
        return self.reports, self.published, self.sizes, self.done


class Actor:
    """Plays with the newest weights that came whole."""

    def __init__(self, board: Any, number: int, explore: float) -> None:
        self.board, self.number, self.explore = board, number, explore

    def run(self) -> None:
        """Plays until it is killed."""
        vector, restructure = tp.ravel(Network(key=jax.random.key(self.number)))
        traces, refused, version, seen = 0, 0, None, None

        @jax.jit
        def play(vector: Array, states: Array, ages: Array, key: Array) -> Any:
            nonlocal traces
            traces += 1
            return rollout(restructure(vector), states, ages, key, self.explore)

        key, ages = jax.random.key(self.number), jnp.zeros(ENVS, int)
        states = jax.vmap(begun)(jax.random.split(key, ENVS))
        while True:
            reference = got(self.board.look.remote())
            if reference is not None and reference != seen:
                seen = reference
                try:
                    message = got(reference[0])  # read-only, in the memory that all processes of a machine share
                    vector, version = saving.loads(message, vector, restructure, version=version)
                except (ValueError, ObjectLostError):  # torn, or its learner is gone: play on
                    refused += 1
            if version is None:
                time.sleep(0.05)
                continue
            key, now = jax.random.split(key)
            states, ages, played, lengths = play(vector, states, ages, now)
            lengths = np.asarray(lengths)
            report: dict[str, Any] = {
                "actor": self.number,
                "version": version,
                "checksum": zlib.crc32(np.asarray(vector).tobytes()),
            }
            report |= {"traces": traces, "refused": refused, "lengths": lengths[lengths > 0]}
            self.board.add.remote(report, jax.tree.map(np.asarray, played))


class Learner:
    """Trains the network, publishes its versions, and leaves a file from which the next learner goes on."""

    def __init__(self, board: Any, path: str, updates: int, seed: int) -> None:
        self.board, self.path, self.updates, self.seed = board, path, updates, seed
        rate = optax.linear_schedule(RATE, 0.0, updates)
        self.rule = optax.chain(optim.clip_by_global_norm(10.0), optax.adam(rate))
        vector, self.restructure = tp.ravel(Network(key=jax.random.key(seed)))
        self.run_ = {
            "online": vector,
            "target": tp.copy(vector),
            "state": self.rule.init(vector),
            "updates": 0,
            "run": -1,
        }
        self.run_ |= {"restructure": self.restructure}
        if os.path.exists(path):
            self.run_ = saving.load(path, self.run_)
        self.run_["run"] += 1

    def learn(self) -> dict[str, Any]:
        """Trains until there were so many updates, in all runs."""
        restructure, random = self.restructure, np.random.default_rng([self.seed, self.run_["run"]])

        def update(carry: Any, batch: Transition) -> Any:
            online, target, state = carry
            loss = lambda online: td_error(restructure(online), restructure(target), batch)
            changes, state = self.rule.update(jax.grad(loss)(online), state, online)
            online = optax.apply_updates(online, changes)
            return (online, tp.ema(target, online, tau=TAU), state), None

        several = jax.jit(lambda carry, batches: jax.lax.scan(update, carry, batches)[0])
        replay = collections.deque[Any](maxlen=REPLAY // (ENVS * STEPS))
        self.publish(0)
        number = 0
        while self.run_["updates"] < self.updates:
            replay.extend(got(self.board.take.remote()))
            if len(replay) * ENVS * STEPS < BEFORE:
                time.sleep(0.05)
                continue
            rows = random.integers(len(replay) * ENVS * STEPS, size=(AT_ONCE, BATCH))
            batches = Transition(*(jnp.asarray(np.concatenate(each)[rows]) for each in zip(*replay, strict=True)))
            carry = several((self.run_["online"], self.run_["target"], self.run_["state"]), batches)
            self.run_ |= zip(("online", "target", "state"), carry, strict=True)
            self.run_["updates"] += AT_ONCE
            if self.run_["updates"] // AT_ONCE % EVERY == 0:
                self.publish(number := number + 1)
        return {"updates": self.run_["updates"], "vector": np.asarray(self.run_["online"])}

    def publish(self, number: int) -> None:
        """Sends the weights, and leaves the file, which is replaced whole."""
        vector, version = self.run_["online"], (self.run_["run"], number)
        message = saving.dumps(vector, self.restructure, version=version)
        saving.save(self.path, self.run_)
        # Ray hands arrays of NumPy to their readers without a copy, and bytes with one.
        reference = [ray.put(np.frombuffer(message, np.uint8))]
        found = zlib.crc32(np.asarray(vector).tobytes())
        got(self.board.publish.remote(version, found, len(message), reference, self.run_["updates"]))


# -- Three ways to send ------------------------------------------------------------------------------------------------


class Reader:
    """Gets a model that was sent in one of three ways."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vector, self.restructure = tp.ravel(model)
        self.whole = jax.jit(self.restructure)

    def take(self, way: str, references: list[Any]) -> None:
        """Gets the model, and makes it ready."""
        arrays = got(references)
        if way == "one message":
            self.vector, _ = saving.loads(arrays[0], self.vector, self.restructure)
            model = self.whole(self.vector)
        elif way == "a pickle":
            model = pickle.loads(arrays[0])
        else:
            model = jax.tree.unflatten(jax.tree.structure(self.model), list(map(jnp.array, arrays)))
        jax.block_until_ready(model)


def three_ways(layers: int, rounds: int) -> dict[str, tuple[int, float]]:
    """For each way the bytes of a version, and the seconds until another process has the model; medians."""
    keys = jax.random.split(jax.random.key(0), layers)
    model = [(jax.random.normal(key, (128, 128)), jnp.zeros(128)) for key in keys]
    vector, restructure = tp.ravel(model)
    reader = started(Reader, jax.tree.map(np.asarray, model))

    def as_message() -> list[Any]:
        return [np.frombuffer(saving.dumps(vector, restructure, version=1), np.uint8)]

    def as_pickle() -> list[Any]:
        return [pickle.dumps(model)]

    def apart() -> list[Any]:
        return list(map(np.asarray, jax.tree.leaves(model)))

    ways = {"one message": as_message, "a pickle": as_pickle, "an object for each array": apart}
    seconds = dict[str, list[float]]()
    for number in range(rounds + 1):
        for way, make in ways.items():
            start = time.perf_counter()
            got(reader.take.remote(way, [ray.put(each) for each in make()]))
            if number:  # the first is of compilations
                seconds.setdefault(way, []).append(time.perf_counter() - start)
    ray.kill(reader)
    sizes = {
        way: sum(each.nbytes if isinstance(each, np.ndarray) else len(each) for each in make())
        for way, make in ways.items()
    }
    return {way: (sizes[way], statistics.median(seconds[way])) for way in ways}


# -- The run -----------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What became of a run."""

    reports: list[dict[str, Any]]  # of all rollouts
    published: dict[Any, int]
    sizes: list[int]  # of the messages, in bytes
    updates: int
    seconds: float
    first: Array  # lengths of episodes without chance, by weights that nobody has trained
    lengths: Array  # ... by the last ones
    replaced: dict[str, float]  # what was killed, when
    ways: dict[str, tuple[int, float]]


def main(
    actors: int = 3,
    updates: int = 12_000,
    seed: int = 0,
    file: str | None = None,
    address: str | None = None,
    layers: int = 100,
    rounds: int = 7,
    plot: str = "",
) -> Result:
    """Trains on CartPole with a learner and several actors, some of which are killed; returns what they report."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = file or os.path.join(folder, "learner.safetensors")
        local: Any = {} if address else {"num_cpus": 1, "include_dashboard": False}
        ray.init(address=address, log_to_driver=True, logging_level=logging.ERROR, **local)
        stack.callback(ray.shutdown)
        result = run(actors, updates, seed, path, (layers, rounds))
    if plot:
        draw(result, plot)
    return result


def run(actors: int, updates: int, seed: int, path: str, sent: tuple[int, int]) -> Result:
    board, start = started(Board), time.monotonic()

    def play(number: int) -> Any:
        actor = started(Actor, board, seed * 1000 + number, 0.02 + 0.3 * (number % actors) / actors)
        return actor, actor.run.remote()

    def learn() -> Any:
        learner = started(Learner, board, path, updates, seed)
        return learner, learner.learn.remote()

    playing, (learner, learned), replaced = [play(number) for number in range(actors)], learn(), dict[str, float]()
    torn = list[Any]()
    while not ray.wait([learned], timeout=0.2)[0]:
        reports, published, _, done = got(board.report.remote())
        if done >= updates // 4 and not any(report["refused"] for report in reports):
            newest = got(board.look.remote())
            if newest != torn:  # again, if no actor looked before the next version came
                message = np.array(got(newest[0]))
                message[-1] ^= 1
                torn = [ray.put(message)]
                got(board.publish.remote(None, None, 0, torn, 0))
                replaced.setdefault("message", time.monotonic())
        if done >= updates // 3 and "actor" not in replaced:
            ray.kill(playing[0][0])
            playing[0] = play(actors)
            replaced["actor"] = time.monotonic()
        if done >= updates // 2 and "learner" not in replaced:
            ray.kill(learner)
            learner, learned = learn()
            replaced["learner"] = time.monotonic()
    last = got(learned)
    reports, published, sizes, _ = got(board.report.remote())
    seconds = time.monotonic() - start
    for each in (learner, *(actor for actor, _ in playing)):
        ray.kill(each)
    untrained, restructure = tp.ravel(Network(key=jax.random.key(seed)))
    first, lengths = (judged(restructure(vector)) for vector in (untrained, last["vector"]))
    return Result(reports, published, sizes, last["updates"], seconds, first, lengths, replaced, three_ways(*sent))


@tp.jit
def judged(network: Network) -> Array:
    """How long 64 episodes are without chance."""

    def step(carry: tuple[Array, Array], _: None) -> Any:
        states, stands = carry
        states = jax.vmap(pushed)(states, jnp.argmax(jax.vmap(network)(states), axis=1))
        stands &= (jnp.abs(states[:, 0]) <= 2.4) & (jnp.abs(states[:, 2]) <= np.radians(12))
        return (states, stands), stands

    states = jax.vmap(begun)(jax.random.split(jax.random.key(1), 64))
    _, stood = jax.lax.scan(step, (states, jnp.ones(64, bool)), length=LONGEST)
    return 1 + jnp.sum(stood[:-1], axis=0)


def printed(result: Result) -> None:
    reports, order = result.reports, {version: i for i, version in enumerate(sorted(result.published))}
    behind = [order[each["newest"]] - order[each["version"]] for each in reports]
    pulled = len({(each["actor"], each["version"]) for each in reports})
    steps = len(reports) * ENVS * STEPS
    print(f"{steps / result.seconds:,.0f} steps of the environment a second, in {len(reports):,} rollouts")
    print(f"{result.updates / result.seconds:,.0f} updates a second")
    print(f"{len(result.published)} versions of {result.sizes[0]:,} bytes")
    print(f"{pulled * result.sizes[0] / result.seconds / 1e3:,.0f} kB a second come to the actors")
    print(f"rollouts are {statistics.mean(behind):.2f} versions old in the mean, {max(behind)} at most")
    print(f"episodes without chance: {np.mean(result.lengths):.0f} steps in the mean, of {LONGEST} at most")
    print("\n" + (row := "{:24}  {:>12}  {:>10}  {:>8}".format)("A network of 100 layers", "bytes", "seconds", "MB/s"))
    for way, (size, seconds) in result.ways.items():
        print(row(way, f"{size:,}", f"{seconds:.4f}", f"{size / seconds / 1e6:,.0f}"))


def draw(result: Result, plot: str) -> None:
    """How long the episodes of the rollouts were, and when something was killed."""
    from matplotlib.figure import Figure  # all else runs without it

    picture = Figure(figsize=(8.5, 4), layout="constrained")
    axes, start = picture.subplots(), result.reports[0]["at"]
    ended = [each for each in result.reports if len(each["lengths"])]
    times, lengths = ([each["at"] - start for each in ended], [np.mean(each["lengths"]) for each in ended])
    axes.plot(times, lengths, ".", alpha=0.2)
    window = max(1, len(ended) // 40)
    axes.plot(times[window - 1 :], np.convolve(lengths, np.ones(window) / window, "valid"), label="moving mean")
    for i, (label, at) in enumerate(result.replaced.items(), 1):
        axes.axvline(at - start, color=f"C{i}", linestyle="--", label=f"{label} {FAILS[label]}")
    axes.set(title="Training goes on when an actor or the learner is killed", xlabel="seconds")
    axes.set_ylabel("steps until the pole falls")
    axes.legend()
    picture.savefig(plot)


def claims(outcome: Result) -> dict[str, bool]:
    reports, published = outcome.reports, outcome.published
    after = lambda what: [each for each in reports if each["at"] > outcome.replaced[what]]
    actors = {each["actor"] for each in after("actor")}
    first, last = float(np.mean(outcome.first)), float(np.mean(outcome.lengths))
    message, apart = (1e3 * outcome.ways[way][1] for way in ("one message", "an object for each array"))
    return {
        f"each of {len(reports):,} rollouts is by weights that were published, bit for bit": all(
            published[each["version"]] == each["checksum"] for each in reports
        ),
        "a torn message is refused, and its actor plays on": any(each["refused"] for each in after("message")),
        "the actor that was killed is replaced": max(each["actor"] for each in reports) in actors,
        "the learner that was killed goes on from its file, as the next run": max(published)[0] == 1
        and any(each["version"][0] == 1 for each in after("learner")),
        "each actor has traced its policy once": all(each["traces"] == 1 for each in reports),
        f"the pole stands five times as long as by the first weights: {last:.0f} steps for {first:.0f}": last
        >= 5 * first,
        f"one message is faster than one object for each array: {message:.1f} ms for {apart:.1f} ms": message < apart,
    }


if __name__ == "__main__":
    # Ray's processes import this file by its name. Classes of the program itself they would get as text, by pickle,
    # which those of Equinox do not outlive.
    actors = importlib.import_module("actors")
    parser = argparse.ArgumentParser(description=actors.main.__doc__, argument_default=argparse.SUPPRESS)
    for option in ("actors", "updates", "seed", "layers", "rounds"):
        parser.add_argument(f"--{option}", type=int)
    parser.add_argument("--file", help="where the learner leaves its run")
    parser.add_argument("--plot", help="a picture to write")
    parser.add_argument("--address", help="of a Ray cluster")
    result = actors.main(**vars(parser.parse_args()))
    actors.printed(result)
    checked = actors.claims(result)
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
