"""One model over several processes: each has a part of every batch, and what they exchange is one vector.

    python examples/distributed.py --processes 4 [--diloco 20] [--plot FILE]

The weights of a classifier of handwritten digits are matrices made of several arrays, `U diag(d) V^T` with `U` and `V`
products of reflections: many small arrays, each of which would be reduced over the processes by itself. As a vector
they are one: one collective sums gradients, each process updates its part of the parameters with its part of Adam's
state, and one all-gather brings them together. It is the training of one process, to rounding.

With `--diloco H` it trains once more in another way: each process makes H steps by itself, then all move by a step of
Nesterov's momentum along the mean of what they have moved, which is all that they exchange (DiLoCo, arXiv 2311.08105).
This is another training, and H times less is moved.

The processes run on this machine; over several machines each would be started there, with the address of the first.
The images come with scikit-learn: `pip install -e '.[examples]'`.
"""

import argparse
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import treeparams as tp
from treeparams import matrices, sharding

PIXELS, WIDTH, DIGITS, BATCH, HEARTBEAT = 64, 64, 10, 840, 10
OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)  # as in the paper
PROCESS, ADDRESS = "TREEPARAMS_PROCESS", "TREEPARAMS_ADDRESS"  # which tell a process that was started what it is


class Network(eqx.Module):
    """Tells which digit an image shows; the weights are `matrices.SVD`, those of an orthogonal matrix at the start."""

    layers: list[eqx.nn.Linear]

    def __init__(self, *, key: Array) -> None:
        self.layers = []
        sizes = (PIXELS, WIDTH, WIDTH, DIGITS)
        for below, above, each in zip(sizes, sizes[1:], jax.random.split(key, 3), strict=False):
            layer = eqx.nn.Linear(below, above, key=each)
            weight = matrices.SVD.random(above, below, key=each, reflections=8)
            self.layers.append(eqx.tree_at(lambda layer: layer.weight, layer, weight))

    def __call__(self, image: Array) -> Array:
        """The score of each digit."""
        for layer in self.layers[:-1]:
            image = jax.nn.gelu(layer(image))
        return self.layers[-1](image)


def loss(model: Network, images: Array, labels: Array) -> Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels))


class Trained(NamedTuple):
    """A model after training, and what it took."""

    model: Network
    bytes: int  # of the parameters and what the optimiser keeps, on each device
    meetings: int  # how often the processes exchange something
    moved: int  # bytes of one device, each time

    @property
    def bytes_moved(self) -> int:
        """In the whole training, on each device."""
        return self.meetings * self.moved


def rows(batch: np.ndarray) -> np.ndarray:
    """The part of this process of what has a row for each example."""
    return np.split(batch, jax.process_count())[jax.process_index()]


def bar(chosen: np.ndarray, title: str) -> Any:
    return tqdm(chosen, title, ncols=100) if jax.process_index() == 0 else chosen


def bytes_here(tree: Any) -> int:
    return sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(tree))


def together(model: Network, data: Any, chosen: np.ndarray) -> Trained:
    """All processes make each step together."""
    plan = sharding.plan(model, jax.make_mesh((jax.process_count(),), ("data",)), {"**": "split"}, form="vector")
    init, step = sharding.make_step(loss, OPTIMISER, plan)
    params, state = init(model)

    def batch(numbers: np.ndarray) -> list[Array]:
        """Each process gives its rows, and has none of the others'."""
        return [jax.make_array_from_process_local_data(plan.batch, each[rows(numbers)]) for each in data]

    if jax.process_index() == 0:
        print(f"{plan}\n")
    for numbers in (shown := bar(chosen, f"{jax.process_count()} processes")):
        params, state, value = step(params, state, *batch(numbers))
        if jax.process_index() == 0:
            shown.set_postfix(loss=f"{value:.4f}", refresh=False)
    trained = jax.tree.map(np.asarray, plan.model(params, state))
    return Trained(trained, bytes_here((params, state.rule)), len(chosen), 3 * params.nbytes)  # gathered, and summed


def one_process(restructure: tp.Restructure[Network]) -> Any:
    """A step of one process by itself, of all parameters as one vector."""

    @jax.jit
    def step(vector: Array, state: Any, *batch: Array) -> Any:
        grads = jax.grad(lambda vector: loss(restructure(vector), *batch))(vector)
        updates, state = OPTIMISER.update(grads, state, vector)
        return optax.apply_updates(vector, updates), state

    return step


def alone(model: Network, data: Any, chosen: np.ndarray) -> Trained:
    """One process makes all steps on whole batches, by Optax alone."""
    vector, restructure = tp.ravel(model)
    state, step = OPTIMISER.init(vector), one_process(restructure)
    for numbers in bar(chosen, "one process"):
        vector, state = step(vector, state, *(each[numbers] for each in data))
    return Trained(restructure(vector), bytes_here((vector, state)), 0, 0)


def seldom(model: Network, data: Any, chosen: np.ndarray, apart: int) -> Trained:
    """Each process makes steps by itself, on its part of each batch, and after so many all meet."""
    mesh = jax.make_mesh((jax.process_count(),), ("data",))
    whole, a_row_each = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    vector, restructure = tp.ravel(model)
    state, step = OPTIMISER.init(vector), one_process(restructure)
    start = jax.make_array_from_process_local_data(whole, np.asarray(vector))
    momentum = jax.jit(OUTER.init, out_shardings=whole)(start)

    @functools.partial(jax.jit, out_shardings=whole)
    def meet(start: Array, momentum: Any, ends: Array) -> Any:
        """From where all started and where each ended to where all go on."""
        updates, momentum = OUTER.update(start - jnp.mean(ends, axis=0), momentum)
        return optax.apply_updates(start, updates), momentum

    for number, numbers in enumerate(bar(chosen, f"DiLoCo, {apart} steps apart"), 1):
        vector, state = step(vector, state, *(each[rows(numbers)] for each in data))
        if number % apart == 0:
            row = jax.make_array_from_process_local_data(a_row_each, np.asarray(vector)[None])
            start, momentum = meet(start, momentum, row)
            vector = jnp.asarray(np.asarray(start))
    size = bytes_here((vector, state, start, momentum))
    return Trained(restructure(vector), size, len(chosen) // apart, 2 * vector.nbytes)  # summed


def launch(processes: int) -> int:
    """Starts the processes, of which the first has the terminal. When one fails, all end; returns the status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that what was started is ended below
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        started: list[subprocess.Popen[bytes]] = []
        said: list[Any] = []

        @stack.callback
        def _() -> None:
            for each in started:
                each.kill()
            for each in started:
                each.wait()

        for process in range(processes):
            said.append(stack.enter_context(tempfile.TemporaryFile()))
            output = None if process == 0 else said[-1]
            environment = os.environ | {PROCESS: str(process), ADDRESS: address}
            each = subprocess.Popen([sys.executable, *sys.argv], env=environment, stdout=output, stderr=output)
            started.append(each)
        while not any(statuses := [each.poll() for each in started]) and None in statuses:
            time.sleep(0.05)
        if not any(statuses):
            return 0
        failed = next(process for process, status in enumerate(statuses) if status)
        said[failed].seek(0)
        print(f"\n{said[failed].read().decode()}\nProcess {failed} {outcome(statuses[failed])}.", file=sys.stderr)
        since = time.monotonic()
        while None in [each.poll() for each in started] and time.monotonic() < since + 2 * HEARTBEAT:
            time.sleep(0.05)
        others = [f"{process} {outcome(each.returncode)}" for process, each in enumerate(started) if process != failed]
        print(f"After {time.monotonic() - since:.1f} s: {', '.join(others)}.", file=sys.stderr)
        return 1


def outcome(status: int | None) -> str:
    if status is None:
        return "still runs and is ended now"
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class Result(NamedTuple):
    """What became of a training, beside that of one process."""

    trained: Trained
    accuracy: float  # on the images to test on
    differs: float  # from one process: the norm of the difference, relative to that of the parameters


def main(processes: int = 4, steps: int = 200, diloco: int = 0, seed: int = 0, plot: str = "") -> dict[str, Result]:
    """Trains a classifier over several processes and in one; returns the results, in the first of the processes."""
    if not 2 <= processes <= 8 or not 0 <= diloco <= steps:
        raise SystemExit(f"expected 2 to 8 processes and --diloco up to {steps} steps, got {processes} and {diloco}")
    if PROCESS not in os.environ:
        raise SystemExit(launch(processes))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        os.environ[ADDRESS],
        processes,
        int(os.environ[PROCESS]),
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=12 * HEARTBEAT,  # the first process goes on alone, and draws
    )
    pixels, labels = load_digits(return_X_y=True)
    every = (pixels / 16).astype(np.float32), labels.astype(np.int32)
    images, test_images, labels, test_labels = train_test_split(
        *every, test_size=0.2, stratify=labels, random_state=seed
    )
    data = images, labels
    made, drawn = jax.random.split(jax.random.key(seed))
    model, size = Network(key=made), BATCH // processes * processes  # equally many rows in each process
    chosen = np.asarray(jax.random.randint(drawn, (steps, size), 0, len(images)))
    found = {"together": together(model, data, chosen)}
    if diloco:
        found["DiLoCo"] = seldom(model, data, chosen[: steps // diloco * diloco], diloco)
    if jax.process_index() > 0:
        return {}
    one = found["one process"] = alone(model, data, chosen)
    results = {}
    for name, each in found.items():
        right = jnp.argmax(jax.vmap(each.model)(jnp.asarray(test_images)), axis=1) == test_labels
        differs = tp.global_norm(jax.tree.map(np.subtract, each.model, one.model)) / tp.global_norm(one.model)
        results[name] = Result(each, float(jnp.mean(right)), float(differs))
    row = "{:11}  {:>16}  {:>8}  {:>11}  {:>13}  {:>10}".format
    print("\n" + row("", "bytes per device", "meetings", "bytes moved", "test accuracy", "differs by"))
    for name, result in results.items():
        sizes = f"{result.trained.bytes:,}", result.trained.meetings, f"{result.trained.bytes_moved:,}"
        print(row(name, *sizes, f"{result.accuracy:.1%}", f"{result.differs:.1e}"))
    if plot:
        draw(results, plot)
    return results


def draw(results: dict[str, Result], plot: str) -> None:
    """What each device keeps, and what it moves."""
    picture = Figure(figsize=(8.5, 4), layout="constrained")
    less = ", and DiLoCo moves less" if "DiLoCo" in results else ""
    picture.suptitle(f"Together each process keeps a part of what one keeps alone{less}", x=0.01, ha="left")
    sizes = {
        "kB kept on each device": [each.trained.bytes / 1e3 for each in results.values()],
        "MB moved in the training": [each.trained.bytes_moved / 1e6 for each in results.values()],
    }
    names = [f"{name}\n{each.accuracy:.1%} right" for name, each in results.items()]
    for axes, (label, heights) in zip(picture.subplots(1, 2), sizes.items(), strict=True):
        axes.bar_label(axes.bar(names, heights, color=["C0", "C1", "C2"][: len(names)]), fmt="%.2f")
        axes.set_ylabel(label)
        axes.margins(y=0.1)
    picture.savefig(plot)


def claims(outcome: dict[str, Result]) -> dict[str, Any]:
    if not outcome:  # of a process that is not the first
        return {}
    together, one = outcome["together"].trained, outcome["one process"].trained
    differs, right = outcome["together"].differs, outcome["together"].accuracy
    kept = together.bytes / one.bytes
    checked = {
        f"parameters are those of one process, to 1e-6: {differs:.0e}": differs <= 1e-6,
        f"each process keeps its part of the parameters and of Adam's state: {kept:.0%}": kept < 0.6,
        f"at least 95% of the digits are told: {right:.1%}": right >= 0.95,
    }
    if "DiLoCo" in outcome:
        apart = outcome["DiLoCo"]
        less = apart.trained.bytes_moved / together.bytes_moved
        checked[f"with DiLoCo at least 90%: {apart.accuracy:.1%}"] = apart.accuracy >= 0.9
        checked[f"and less is moved: {less:.0%}"] = less < 1
    return checked


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--diloco", type=int)
    parser.add_argument("--plot", help="a picture to write")
    checked = claims(main(**vars(parser.parse_args())))
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
