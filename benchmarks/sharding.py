"""Steps over 8 devices by `sharding.make_step`, next to plain `jax.jit` of trees that are laid over the same devices.

The yardstick is FSDP leaf by leaf: parameters and the state of Optax with a `NamedSharding` each, along the first axis,
given to `jax.jit`, which divides the program by itself. "Replicated" is the same with all of them whole on each device.
The other columns are `sharding.make_step` over a canonical tree, a vector and stacks. The net is unrolled, or "scanned"
by `restructure.scan` over the stacks. "Whole rows" are stacks of which each device owns some rows; of the others it has
a part of each row. Muon is over whole rows; where it is "stacked in each step", within plain `jax.jit`, the parameters
rest leaf by leaf. The last table is about what a device has at once: what of the state, the gradients and the
parameters stays split.

Nets of layers of one width learn on a batch of 64, and that all of a table come to the same losses is asserted. The
batch is so small that the update and what is moved count; with it XLA moves activations in place of some weights.
Collectives and bytes are read from the compiled program, by `sharding.collectives` and `memory_analysis`; they are
those of one device, in sizes of the parameters. The time of a call is what the calling thread itself computes until
the call returns; a step ends when its loss is there. "Plan and init" is all that comes before the step is traced: of
`sharding.make_step` also a check of the rule, for which an update is compiled. What is ready within two seconds is made
twice, and the faster counts.

The 8 devices are those of `jax_num_cpu_devices`, in a process of their own. They share the cores and the memory of one
machine, so that times tell of dispatch, copies and what is computed more than once, and not of networks.
"""

import functools
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treeparams as tp
from treeparams import optim, sharding

from ._harness import Scale, Table, Verdict, as_ratios, in_time, there_and_back
from ._steps import IN_A_ROW, RATE, Loop, check_losses, mean_error, model, updated

_BY_LEAF, _REPLICATED, _EACH_STEP = "leaf by leaf", "replicated", "stacked in each step"
_TREE, _VECTOR, _STACKS, _SCANNED = "tree", "vector", "stacks", "stacks, scanned"
_ROWS, _OWNED = "whole rows, scanned", "parameters, whole rows"
_SLACK = 1.1
_EXAMPLES = 64
_SECONDS = 2  # what takes longer to make and to compile is made once
_MATRICES_AND_BIASES = {"all-gather": 2, "reduce-scatter": 2}
_ADAM, _MUON = optax.adam(RATE), optax.contrib.muon(RATE)


def run(scale: Scale) -> Iterator[Table]:
    devices, context = 2 if scale.is_smoke else 8, multiprocessing.get_context("spawn")
    small = () if scale.is_smoke else (_of_small_leaves,)  # the same steps as of large ones
    with ProcessPoolExecutor(1, context, initializer=_begin, initargs=(devices, scale.is_smoke)) as other:
        for make in (_of_large_leaves, *small, _of_matrices, _of_what_is_split):
            yield other.submit(make, scale).result()


def _begin(devices: int, is_smoke: bool) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_disable_most_optimizations", is_smoke)


# -- The tables --------------------------------------------------------------------------------------------------------


def _of_large_leaves(scale: Scale) -> Table:
    task = Task.of(_ADAM, *((4, 32) if scale.is_smoke else (32, 256)))
    found = _measured(_forms(task), scale)
    names = [name for name in found if name not in (_BY_LEAF, _REPLICATED)]
    targets = [
        _has(found, _VECTOR, {"all-gather": 1, "reduce-scatter": 1}),
        _has(found, _STACKS, _MATRICES_AND_BIASES),
        *(_moves(found, name, 2) for name in names),
        *(_at_most(found, "step", name, _BY_LEAF, _SLACK) for name in names),
    ]
    return _table(f"Adam, {task}", found, targets)


def _of_small_leaves(scale: Scale) -> Table:
    task = Task.of(_ADAM, leaves=128, width=8)
    found = _measured(_forms(task), scale)
    targets = [_at_most(found, what, _TREE, _BY_LEAF, _SLACK) for what in ("call", "step")]
    for name in (_VECTOR, _STACKS, _SCANNED, _ROWS):
        targets += [_at_most(found, what, name, _BY_LEAF, 1 / 4) for what in ("call", "step")]
    return _table(f"Adam, {task}", found, targets)


def _of_matrices(scale: Scale) -> Table:
    task, by_row = Task.of(_MUON, *((4, 32) if scale.is_smoke else (32, 128))), optim.per_leaf(_MUON)
    makers = {
        _BY_LEAF: lambda: _by_leaf(task),
        _REPLICATED: lambda: _replicated(task),
        _EACH_STEP: lambda: _stacked_in_each_step(task, by_row),
        _STACKS: lambda: _sharded(task, "stacks", "owned", by_row),
    }
    found = _measured(makers, scale)
    targets = [
        _has(found, _STACKS, _MATRICES_AND_BIASES),
        _moves(found, _STACKS, 2),
        _at_most(found, "step", _STACKS, _BY_LEAF, 1 / 2),
        _at_most(found, "step", _STACKS, _EACH_STEP, 1),
    ]
    return _table(f"Muon, {task}", found, targets)


def _of_what_is_split(scale: Scale) -> Table:
    task = Task.of(_ADAM, *((4, 32) if scale.is_smoke else (64, 128)))
    scanned = functools.partial(_sharded, task, "stacks", is_scanned=True)
    splits = ("parameters",) if scale.is_smoke else ("state", "gradients", "parameters")
    makers = {split: functools.partial(scanned, split=split) for split in splits}
    makers[_OWNED] = functools.partial(scanned, "owned", split="parameters")
    found = _measured(makers, scale)
    targets = [_moves(found, name, 2) for name in found if name == "gradients"]
    for name in ("parameters", _OWNED):
        memory = found[name].temporary
        what = f"temporary memory of {name} <= 0.4x the parameters"
        targets += [_moves(found, name, 3), Verdict(what, memory <= 0.4, f"{memory:.2f}x")]
    return _table(f"What stays split: Adam, stacks, scanned, {task}", found, targets)


# -- The steps ---------------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """What a step is to do."""

    tx: optax.GradientTransformation
    net: Any
    mesh: Mesh
    batch: tuple[jax.Array, jax.Array]

    @classmethod
    def of(cls, tx: optax.GradientTransformation, leaves: int, width: int) -> "Task":
        """A net of so many leaves, and the batch over all devices."""
        mesh = Mesh(np.array(jax.devices()), ("data",))
        x = np.random.default_rng(1).normal(size=(_EXAMPLES, width)).astype(np.float32)
        batch = jax.device_put((x, np.roll(x, 1, axis=1)), NamedSharding(mesh, PartitionSpec("data")))
        return cls(tx, model(leaves, width), mesh, batch)

    def __str__(self) -> str:
        leaves = jax.tree.leaves(self.net)
        rows, columns = leaves[0].shape
        return f"{len(leaves)} leaves of {rows}x{columns} and {rows}"

    def loss(self, net: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        """The loss of the net, unrolled."""
        return mean_error(net(x), y)

    def scanned_loss(self, stacks: Any, restructure: tp.Restructure, x: jax.Array, y: jax.Array) -> jax.Array:
        """The same of a scan over its layers."""
        # Not `x @ weight.T`: a scan keeps a transposed copy of all weights for the way back.
        product = functools.partial(jnp.einsum, "bi,oi->bo")
        layer = lambda x, layer: (jnp.tanh(product(x, layer.weight) + layer.bias[None]), None)
        return mean_error(restructure.scan(layer, x, stacks, "layers.*")[0], y)


class Step(Loop):
    """A loop of `params, state, value = step(params, state, *batch)`, with the seconds of the calling thread."""

    def __init__(self, step: Any, params: Any, state: Any, batch: tuple[jax.Array, ...]) -> None:
        super().__init__(step, (params, state), *batch, lower=lambda state, *args: step.lower(*state, *args))
        self.calls: list[float] = []

    def __call__(self) -> jax.Array:
        start = time.thread_time()
        *self.state, value = self.step(*self.state, *self.args)
        self.calls.append(time.thread_time() - start)
        return value.block_until_ready()


Makers = Mapping[str, Callable[[], Step]]


def _forms(task: Task) -> Makers:
    return {
        _BY_LEAF: lambda: _by_leaf(task),
        _REPLICATED: lambda: _replicated(task),
        _TREE: lambda: _sharded(task, "tree"),
        _VECTOR: lambda: _sharded(task, "vector"),
        _STACKS: lambda: _sharded(task, "stacks"),
        _SCANNED: lambda: _sharded(task, "stacks", is_scanned=True),
        _ROWS: lambda: _sharded(task, "stacks", "owned", is_scanned=True),
    }


def _sharded(
    task: Task, form: Any, rule: Any = "split", tx: Any = None, is_scanned: bool = False, **options: Any
) -> Step:
    plan = sharding.plan(task.net, task.mesh, {"**": rule}, form=form)
    loss, takes = (task.scanned_loss, "form") if is_scanned else (task.loss, "model")
    init, step = sharding.make_step(loss, tx or task.tx, plan, loss_is="mean", loss_takes=takes, **options)
    return Step(step, *init(task.net), task.batch)


def _by_leaf(task: Task) -> Step:
    return _partitioned(task, functools.partial(updated, task.tx), task.tx.init, PartitionSpec("data"))


def _replicated(task: Task) -> Step:
    return _partitioned(task, functools.partial(updated, task.tx), task.tx.init, PartitionSpec())


def _stacked_in_each_step(task: Task, tx: Any) -> Step:
    split = PartitionSpec("data")
    owned = lambda stacks: jax.lax.with_sharding_constraint(stacks, NamedSharding(task.mesh, split))

    def update(grads: Any, net: Any, moments: Any) -> tuple[Any, Any]:
        stacks, restructure = tp.stack(net)
        stacks, moments = updated(tx, owned(restructure.ravel_gradient(grads)), owned(stacks), moments)
        return restructure(stacks), moments

    return _partitioned(task, update, lambda net: tx.init(tp.stack(net)[0]), split)


def _partitioned(task: Task, update: Callable, init: Callable, spec: PartitionSpec) -> Step:
    """A step by plain `jax.jit`, whose parameters and state lie by one spec, as far as they can be divided."""
    lying = functools.partial(NamedSharding, task.mesh)
    net = tp.copy(task.net)
    parts = task.mesh.size
    place = lambda leaf: lying(spec if leaf.ndim and leaf.shape[0] % parts == 0 else PartitionSpec())
    params_at, state_at = jax.tree.map(place, (net, jax.eval_shape(init, net)))

    def step(net: Any, moments: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(task.loss)(net, x, y)
        return *update(grads, net, moments), value

    arguments = (params_at, state_at, *(array.sharding for array in task.batch))
    results = (params_at, state_at, lying(PartitionSpec()))
    jitted = jax.jit(step, in_shardings=arguments, out_shardings=results, donate_argnums=(0, 1))
    return Step(jitted, jax.device_put(net, params_at), jax.jit(init, out_shardings=state_at)(net), task.batch)


# -- What was found ----------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Of one step: seconds; bytes in sizes of the parameters; collectives."""

    start: float
    build: float
    call: float
    step: float
    at_rest: float
    temporary: float
    moved: float
    counts: dict[str, int]


def _measured(makers: Makers, scale: Scale) -> dict[str, Found]:
    loops: dict[str, Step] = {}
    starts: dict[str, float] = {}
    builds: dict[str, float] = {}
    for is_again in (False,) if scale.is_smoke else (False, True):
        for name, make in makers.items():
            if is_again and starts[name] + builds[name] > _SECONDS:
                continue
            start = time.perf_counter()
            loops[name] = make()
            jax.block_until_ready(loops[name].state)
            starts[name] = min(time.perf_counter() - start, starts.get(name, math.inf))
            builds[name] = min(loops[name].build(), builds.get(name, math.inf))
    check_losses(loops)
    steps = there_and_back(loops, scale, IN_A_ROW)
    found = {}
    for name, loop in loops.items():
        moved, memory = sharding.collectives(loop.compiled), loop.compiled.memory_analysis()
        counts = {row.kind: moved.count(row.kind) for row in moved.rows}
        of_params = sum(leaf.nbytes for leaf in jax.tree.leaves(loop.state[0]))
        at_rest = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(loop.state))
        sizes = [each / of_params for each in (at_rest, memory.temp_size_in_bytes, moved.bytes)]
        found[name] = Found(starts[name], builds[name], statistics.median(loop.calls), steps[name], *sizes, counts)
    return found


_TIMES = {"start": "plan and init", "build": "trace, lower, compile", "call": "call", "step": "step"}
_SIZES = {"at_rest": "at rest", "temporary": "temporary memory", "moved": "moved in a step"}


def _table(title: str, found: Mapping[str, Found], targets: Sequence[Verdict]) -> Table:
    each = found.values()
    rows = [[words, *as_ratios([getattr(of, what) for of in each], in_time)] for what, words in _TIMES.items()]
    rows += [[f"{words} / parameters", *(f"{getattr(of, what):.2f}" for of in each)] for what, words in _SIZES.items()]
    for kind in sorted({kind for of in each for kind in of.counts}):
        rows.append([kind, *(str(of.counts.get(kind, 0)) for of in each)])
    return Table(title, ["", *found], rows, targets)


def _has(found: Mapping[str, Found], name: str, counts: Mapping[str, int]) -> Verdict:
    in_words = lambda counts: " and ".join(f"{count} {kind}" for kind, count in counts.items())
    return Verdict(f"{name}: {in_words(counts)}", found[name].counts == counts, in_words(found[name].counts))


def _moves(found: Mapping[str, Found], name: str, limit: float) -> Verdict:
    moved = found[name].moved
    return Verdict(f"{name}: moves <= {limit}x the parameters", moved <= limit, f"{moved:.2f}x")


def _at_most(found: Mapping[str, Found], what: str, name: str, of: str, limit: float) -> Verdict:
    ratio = getattr(found[name], what) / getattr(found[of], what)
    allowed = f"1/{1 / limit:g} of" if limit < 1 else f"{limit:g}x"
    return Verdict(f"{what} of {name} <= {allowed} {of}", ratio <= limit, f"{ratio:.2f}x")
