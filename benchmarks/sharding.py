"""Steps over 8 devices by `sharding.make_step`, next to plain `jax.jit` of trees that are laid over the same devices.

The yardstick is FSDP leaf by leaf: parameters and the state of Optax with a `NamedSharding` each, along the first axis,
given to `jax.jit`, which divides the program by itself. "Replicated" is the same with all of them whole on each device.
The other columns are `sharding.make_step` over a canonical tree, a vector and stacks. The net is unrolled, or "scanned"
by `restructure.scan` over the stacks, which gathers a layer at a time. "Whole rows" are stacks of which each device
owns some rows; of the others it has a part of each row. Muon is over whole rows; where it is "stacked in each step",
within plain `jax.jit`, the parameters rest leaf by leaf. XLA for CPU has no reduce-scatter: it sums each gradient on
all devices, so a step moves three times the parameters. For TPUs see `accelerator`.

Nets of layers of one width learn on a batch of 64, and that all of a table come to the same losses is asserted. The
batch is so small that the update and what is moved count; with it XLA moves activations in place of some weights.
Collectives and bytes are read from the compiled program; they are those of one device, in sizes of the parameters. The
time of a call is what the calling thread itself computes until the call returns: of a tree up to a fifth more, 150 us
of 1.2 ms for 64 leaves. A step ends when its loss is there. "Plan and init" is all that comes before the step is
traced: of `sharding.make_step` also checks of the rule. What is ready within two seconds is made twice, and the faster
counts.

The 8 devices are those of `jax_num_cpu_devices`. They share the cores and the memory of one machine, so that times tell
of dispatch, copies and what is computed more than once, and not of networks.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treeparams as tp
from treeparams import optim, sharding

from ._harness import Scale, Table, Verdict
from ._sharded import SLACK, Makers, Step, at_most, has, measured, moves, table, use_several_devices
from ._steps import RATE, mean_error, model, updated

_BY_LEAF, _REPLICATED, _EACH_STEP = "leaf by leaf", "replicated", "stacked in each step"
_TREE, _VECTOR, _STACKS, _SCANNED = "tree", "vector", "stacks", "stacks, scanned"
_ROWS = "whole rows, scanned"
_EXAMPLES = 64
_MOST = 3.2  # times the parameters: gathered once, and summed on all devices
_ADAM, _MUON = optax.adam(RATE), optax.contrib.muon(RATE)


def run(scale: Scale) -> Iterator[Table]:
    # A smoke test leaves out what takes the same steps as another table.
    use_several_devices(scale)
    for make in (_of_large_leaves, _of_matrices, _of_what_is_scanned):
        yield make(scale)
    if not scale.is_smoke:
        yield _of_small_leaves(scale)


# -- The tables --------------------------------------------------------------------------------------------------------


def _of_large_leaves(scale: Scale) -> Table:
    task = Task.of(_ADAM, *((4, 32) if scale.is_smoke else (16, 256)))
    found = measured(_forms(task), scale)
    names = [name for name in found if name not in (_BY_LEAF, _REPLICATED)]
    targets = [
        has(found, _VECTOR, {"all-gather": 1, "all-reduce": 1}),
        *(moves(found, name, _MOST) for name in names if name not in (_SCANNED, _ROWS)),
        *(at_most(found, "step", name, _BY_LEAF, SLACK) for name in names),
    ]
    return table(f"Adam, {task}", found, targets)


def _of_small_leaves(scale: Scale) -> Table:
    task = Task.of(_ADAM, leaves=64, width=8)
    found = measured(_forms(task), scale)
    targets = [at_most(found, what, _TREE, _BY_LEAF, limit) for what, limit in (("call", 1.2), ("step", SLACK))]
    targets += [at_most(found, "call", name, _BY_LEAF, 1 / 4) for name in (_VECTOR, _STACKS, _SCANNED, _ROWS)]
    # Scanned, a step has a collective for each layer, which over devices that share two cores is a wait for each.
    targets += [at_most(found, "step", name, _BY_LEAF, 1 / 1.4) for name in (_VECTOR, _STACKS)]
    return table(f"Adam, {task}", found, targets)


def _of_matrices(scale: Scale) -> Table:
    task, by_row = Task.of(_MUON, *((4, 32) if scale.is_smoke else (32, 128))), optim.per_leaf(_MUON)
    makers = {
        _BY_LEAF: lambda: _by_leaf(task),
        _REPLICATED: lambda: _replicated(task),
        _EACH_STEP: lambda: _stacked_in_each_step(task, by_row),
        _STACKS: lambda: _sharded(task, "stacks", "owned", by_row),
    }
    found = measured(makers, scale)
    targets = [
        moves(found, _STACKS, _MOST + 1),  # the parts of rows that are computed are not the rows that a device owns
        at_most(found, "step", _STACKS, _BY_LEAF, 1 / 2),
        at_most(found, "step", _STACKS, _EACH_STEP, 1),
    ]
    return table(f"Muon, {task}", found, targets)


def _of_what_is_scanned(scale: Scale) -> Table:
    task = Task.of(_ADAM, *((4, 32) if scale.is_smoke else (64, 128)))
    scanned = functools.partial(_sharded, task, "stacks", is_scanned=True)
    found = measured({_SCANNED: scanned, _ROWS: functools.partial(scanned, "owned")}, scale)
    targets = []
    for name, most in ((_SCANNED, 0.6), (_ROWS, 0.8)):
        memory = found[name].temporary
        what = f"temporary memory of {name} <= {most}x the parameters"
        targets += [moves(found, name, 5), Verdict(what, memory <= most, f"{memory:.2f}x")]
    return table(f"A layer at a time: Adam, {task}", found, targets)


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


def _sharded(task: Task, form: Any, rule: Any = "split", tx: Any = None, is_scanned: bool = False) -> Step:
    plan = sharding.plan(task.net, task.mesh, {"**": rule}, form=form)
    loss, takes = (task.scanned_loss, "form") if is_scanned else (task.loss, "model")
    init, step = sharding.make_step(loss, tx or task.tx, plan, loss_takes=takes)
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
