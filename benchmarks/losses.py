"""Losses of a tied transformer over 8 devices, next to plain `jax.jit` of a tree that is laid over the same devices.

A masked mean is the same number whichever way it is said: a loss of the whole batch, `(sum, weight)`,
`loss_is="mean"`, `outputs=`, and pieces. The yardstick is FSDP leaf by leaf, as in `sharding`, where the rows and the
devices are explained. In bfloat16 it casts within its loss; its collectives, as the others', are counted in the program
as XLA divides it, since XLA for CPU widens them later.
"""

import functools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import treeparams as tp
from treeparams import sharding

from ._harness import Scale, Table, Verdict
from ._sharded import SLACK, Found, Makers, Step, at_most, measured, moves, table, use_several_devices
from ._steps import RATE, updated
from ._tpu import MISSING, TOPOLOGY, has_compiler, on_tpu

_FSDP, _ANY, _PAIR, _MEAN, _OUTPUTS = "FSDP", "any loss", "(sum, weight)", "mean", "outputs"
_PIECES = "(sum, weight), 4 pieces"
_NARROW = {"compute_dtype": jnp.bfloat16, "reduce_dtype": jnp.bfloat16}
_WIDE: Mapping[str, Any] = {}
_ADAM = optax.adam(RATE)


def run(scale: Scale) -> Iterator[Table]:
    use_several_devices(scale)
    yield _of_losses(scale)
    if not scale.is_smoke:  # which leaves out what takes the same steps as another table
        yield _of_narrow_losses(scale)


# -- The tables --------------------------------------------------------------------------------------------------------


def _of_losses(scale: Scale) -> Table:
    task = _task(scale)
    found = measured(_kinds(task, _WIDE), scale)
    return table(f"float32: Adam, {task}", found, _targets(found, 2))


def _of_narrow_losses(scale: Scale) -> Table:
    task = _task(scale)
    makers = {name: make for name, make in _kinds(task, _NARROW).items() if name not in (_MEAN, _PIECES)}
    found = measured(makers, scale, rtol=3e-2, moved_by=_as_divided)
    title = f"bfloat16, collectives before CPU widens them: Adam, {task}"
    return table(title, found, _targets(found, 1))


def of_tpus(_: Scale) -> Table:
    """The same losses over TPUs that are not there."""
    title = f"Losses over 8 TPUs ({TOPOLOGY}), compiled and not run: Adam"
    if not has_compiler():
        return Table(title, ["", _FSDP], [], [MISSING])
    task = Task.of(2, 256, 512, jnp.float32)
    cells = {_FSDP: _fsdp_on_tpu(task, _WIDE)}
    cells[f"{_ANY}, stacks"] = _on_tpu(task, "stacks", _ANY, _WIDE)
    cells |= {f"{_PAIR}, {form}": _on_tpu(task, form, _PAIR, _WIDE) for form in ("tree", "vector", "stacks")}
    cells[f"{_OUTPUTS}, stacks"] = _on_tpu(task, "stacks", _OUTPUTS, _WIDE)
    cells[f"{_FSDP}, bfloat16"] = _fsdp_on_tpu(task, _NARROW)
    cells[f"{_PAIR}, stacks, bfloat16"] = _on_tpu(task, "stacks", _PAIR, _NARROW)
    return _table_of_tpus(f"{title}, {task}", cells, task.bytes)


def _targets(found: Mapping[str, Found], limit: float) -> list[Verdict]:
    names = [name for name in found if name != _FSDP]
    targets = [at_most(found, "moved", name, _FSDP, 1) for name in names]
    targets += [moves(found, name, limit) for name in names if name != _ANY]
    whole = [name for name in names if name != _PIECES]  # pieces hold the sum of their gradients, and take longer
    targets += [at_most(found, "temporary", name, _FSDP, SLACK if name == _ANY else 1) for name in whole]
    return [*targets, *(at_most(found, "step", name, _FSDP, SLACK) for name in whole)]


def _table_of_tpus(title: str, cells: Mapping[str, sharding.Ahead], size: int) -> Table:
    kinds = sorted({row.kind for of in cells.values() for row in of.moved.rows})
    header = ["", "temporary memory / parameters", "moved / parameters", "MFLOP", *kinds]
    rows = []
    for name, of in cells.items():
        counts = [str(of.moved.count(kind)) for kind in kinds]
        sizes = f"{of.temporaries / size:.2f}", f"{of.moved.bytes / size:.2f}", f"{of.flops / 1e6:.0f}"
        rows.append([name, *sizes, *counts])
    targets = []
    for name, of in cells.items():
        against = cells[f"{_FSDP}, bfloat16" if name.endswith("bfloat16") else _FSDP]
        if of is not against:
            moved = of.moved.bytes / against.moved.bytes
            limit = SLACK if name.endswith("vector") else 1  # a vector is moved in whole rows of 128
            targets.append(Verdict(f"{name}: moves <= {limit:g}x {_FSDP}", moved <= limit, f"{moved:.2f}x"))
            # The compiler says none of some small programs; why is not known, so a ratio could not be formed.
            sizes = f"{of.temporaries / size:.2f} and {against.temporaries / size:.2f} of the parameters"
            targets.append(Verdict(f"{name}: temporary <= 1x {_FSDP}", of.temporaries <= against.temporaries, sizes))
    return Table(title, header, rows, targets)


# -- The net and its loss ----------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A net of tokens, whose first and last matrix are one, and a batch, as NumPy arrays."""

    model: Any
    batch: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, layers: int, width: int, examples: int, dtype: Any) -> "Task":
        """A net of so many layers."""
        draw = np.random.default_rng(0)
        matrix = lambda *shape: jnp.asarray(draw.normal(size=shape) / np.sqrt(shape[0]), dtype)
        layer = lambda: {
            "attention": matrix(width, 4 * width),
            "norms": jnp.ones((2, width), dtype),
            "up": matrix(width, 2 * width),
            "down": matrix(2 * width, width),
        }
        embed = matrix(2 * width, width)
        model = {"embed": embed, "layers": [layer() for _ in range(layers)], "head": embed}
        tokens = draw.integers(0, 2 * width, (examples, 8)).astype(np.int32)
        # As many of each example, so that the mean of the examples' means is the same number as the masked mean.
        mask = np.tile((np.arange(8) < 6).astype(np.float32), (examples, 1))
        return cls(model, (tokens, mask))

    @property
    def bytes(self) -> int:
        """Those of the parameters."""
        return sum(array.nbytes for array in tp.trainables(self.model).values())

    def __str__(self) -> str:
        return f"{len(tp.trainables(self.model))} leaves, a tied transformer of {len(self.model['layers'])} layers"


def _task(scale: Scale) -> Task:
    return Task.of(*((1, 16, 16) if scale.is_smoke else (2, 128, 64)), jnp.float32)


def _errors(model: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """The negative logarithm of the probability of each next token."""
    x = model["embed"][tokens]
    for layer in model["layers"]:
        x = x + _attention(_normed(x, layer["norms"][0]), layer["attention"])
        x = x + jax.nn.relu(_normed(x, layer["norms"][1]) @ layer["up"]) @ layer["down"]
    logits = (x @ model["head"].T).astype(jnp.float32)
    shifted = jnp.roll(tokens, -1, axis=1)
    # Not `take_along_axis`, whose indices XLA brings together.
    target = jnp.sum(jnp.where(shifted[..., None] == jnp.arange(logits.shape[-1]), logits, 0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - target


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _attention(x: jax.Array, matrix: jax.Array) -> jax.Array:
    queries, keys, values, gates = jnp.split(x @ matrix, 4, axis=-1)
    scores = jnp.einsum("bqd,bkd->bqk", queries, keys) / x.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.where(causal, scores, -1e9)), values) * jax.nn.sigmoid(gates)


def _masked(errors: jax.Array, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(errors * mask) / jnp.sum(mask)


def _pair(model: Any, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(_errors(model, tokens, mask) * mask), jnp.sum(mask)


def _any(model: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    return _masked(_errors(model, tokens, mask), tokens, mask)


# -- The steps ---------------------------------------------------------------------------------------------------------

_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    _ANY: (_any, {}),
    _PAIR: (_pair, {}),
    _MEAN: (_any, {"loss_is": "mean"}),
    _OUTPUTS: (_masked, {"outputs": _errors}),
    _PIECES: (_pair, {"microbatches": 4}),
}


def _kinds(task: Task, dtypes: Mapping[str, Any]) -> Makers:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    makers = {_FSDP: functools.partial(_fsdp, task, mesh, dtypes)}
    return makers | {kind: functools.partial(_sharded, task, mesh, kind, dtypes) for kind in _KINDS}


def _made(task: Task, mesh: Any, form: Any, kind: str, dtypes: Mapping[str, Any]) -> Any:
    plan = sharding.plan(task.model, mesh, {"**": "split"}, form=form)
    loss, options = _KINDS[kind]
    return sharding.make_step(loss, _ADAM, plan, **options, **dtypes)


def _sharded(task: Task, mesh: Mesh, kind: str, dtypes: Mapping[str, Any]) -> Step:
    init, step = _made(task, mesh, "stacks", kind, dtypes)
    return Step(step, *init(task.model), _laid(task, mesh))


def _laid(task: Task, mesh: Mesh) -> Any:
    return jax.device_put(task.batch, NamedSharding(mesh, PartitionSpec("data")))


def _fsdp(task: Task, mesh: Mesh, dtypes: Mapping[str, Any]) -> Step:
    step, params_at, state_at = _jitted(task, mesh, dtypes)
    params = jax.device_put(tp.partition(tp.copy(task.model))[0], params_at)
    return Step(step, params, jax.jit(_ADAM.init, out_shardings=state_at)(params), _laid(task, mesh))


def _jitted(task: Task, mesh: Mesh, dtypes: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """A step by plain `jax.jit`, and where parameters and state lie: along the first axis that can be divided."""
    params, rest = tp.partition(task.model)
    lying = functools.partial(NamedSharding, mesh)

    def place(leaf: Any) -> NamedSharding:
        free = [dim for dim, length in enumerate(leaf.shape) if length % mesh.size == 0]
        return lying(PartitionSpec(*[None] * free[0], "data") if free else PartitionSpec())

    params_at, state_at = jax.tree.map(place, (params, jax.eval_shape(_ADAM.init, params)))
    dtype = dtypes.get("compute_dtype", jnp.float32)

    def loss(params: Any, *batch: Any) -> jax.Array:
        return _any(tp.combine(jax.tree.map(lambda leaf: leaf.astype(dtype), params), rest), *batch)

    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return *updated(_ADAM, grads, params, state), value

    examples = lying(PartitionSpec("data"))
    results = params_at, state_at, lying(PartitionSpec())
    ins = params_at, state_at, examples, examples
    return jax.jit(step, in_shardings=ins, out_shardings=results, donate_argnums=(0, 1)), params_at, state_at


def _as_divided(step: Step) -> sharding.Collectives:
    """The collectives of a program as XLA divides it; on CPU it widens narrow floats later."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        step.lower(step.state, *step.args).compile(compiler_options=options)
        (path,) = pathlib.Path(folder).glob("*after_spmd-partitioning*")
        return sharding.collectives(path.read_text())


# -- Devices that are not there ----------------------------------------------------------------------------------------


def _on_tpu(task: Task, form: Any, kind: str, dtypes: Mapping[str, Any]) -> sharding.Ahead:
    init, step = _made(task, AbstractMesh((8,), ("data",)), form, kind, dtypes)
    return on_tpu(step, *init(jax.eval_shape(lambda: task.model)), *_shapes(task.batch))


def _fsdp_on_tpu(task: Task, dtypes: Mapping[str, Any]) -> sharding.Ahead:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=list(devices))
    step, *lying = _jitted(task, mesh, dtypes)
    params, _ = tp.partition(task.model)
    given = params, jax.eval_shape(_ADAM.init, params)
    laid = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), given, tuple(lying))
    return on_tpu(step, *laid, *_shapes(task.batch))


def _shapes(batch: Any) -> Any:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)
