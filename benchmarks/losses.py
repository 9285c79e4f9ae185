"""A loss of a tied transformer over 8 devices, next to plain `jax.jit` of a tree that is laid over the same devices.

The loss is a masked mean, whose pieces have equal weights. The yardstick is FSDP leaf by leaf, as in `sharding`, where
the rows and the devices are explained. In bfloat16 it casts within its loss; its collectives, as the others', are
counted in the program as XLA divides it, since XLA for CPU widens them later.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treeparams as tp
from treeparams import sharding

from ._harness import Scale, Table, Verdict
from ._moved import moved
from ._sharded import SLACK, Found, Makers, Step, at_most, measured, table, use_several_devices
from ._steps import RATE, updated
from ._tpu import MISSING, TOPOLOGY, has_compiler, mesh_of_tpus

_FSDP, _PIECES, _FORMS = "FSDP", "stacks, 4 pieces", ("tree", "stacks")
_NARROW = {"compute_dtype": jnp.bfloat16}
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
    found = measured(_makers(task, _WIDE), scale)
    return table(f"float32: Adam, {task}", found, _targets(found))


def _of_narrow_losses(scale: Scale) -> Table:
    task = _task(scale)
    makers = {name: make for name, make in _makers(task, _NARROW).items() if name != _PIECES}
    found = measured(makers, scale, rtol=3e-2, moved_by=_as_divided)
    return table(f"bfloat16, collectives before CPU widens them: Adam, {task}", found, _targets(found))


def of_tpus(_: Scale) -> Table:
    """The same losses over TPUs that are not there."""
    title = f"A loss over 8 TPUs ({TOPOLOGY}), compiled and not run: Adam"
    if not has_compiler():
        return Table(title, ["", _FSDP], [], [MISSING])
    task = Task.of(2, 256, 512, jnp.float32)
    cells: dict[str, jax.stages.Compiled] = {}
    for words, dtypes in (("", _WIDE), (", bfloat16", _NARROW)):
        cells[f"{_FSDP}{words}"] = _fsdp_on_tpu(task, dtypes)
        cells |= {f"{form}{words}": _on_tpu(task, form, dtypes) for form in _FORMS}
    return _table_of_tpus(f"{title}, {task}", cells, task.bytes)


def _targets(found: Mapping[str, Found]) -> list[Verdict]:
    names = [name for name in found if name not in (_FSDP, _PIECES)]  # pieces reduce their gradients one by one
    targets = [at_most(found, "moved", name, _FSDP, 1) for name in names]
    targets += [at_most(found, "temporary", name, _FSDP, SLACK) for name in names]
    return [*targets, *(at_most(found, "step", name, _FSDP, SLACK) for name in names)]


def _table_of_tpus(title: str, cells: Mapping[str, jax.stages.Compiled], size: int) -> Table:
    counted = {name: moved(of) for name, of in cells.items()}
    held = {name: of.memory_analysis().temp_size_in_bytes for name, of in cells.items()}
    kinds = sorted({kind for each in counted.values() for kind in each.counts})
    rows, targets = [], []
    for name, its in counted.items():
        counts = [str(its.counts.get(kind, 0)) for kind in kinds]
        rows.append([name, f"{held[name] / size:.2f}", f"{its.bytes / size:.2f}", *counts])
        against = f"{_FSDP}, bfloat16" if name.endswith("bfloat16") else _FSDP
        if name != against:
            ratio = its.bytes / counted[against].bytes
            targets.append(Verdict(f"{name}: moves <= 1x {_FSDP}", ratio <= 1, f"{ratio:.2f}x"))
    return Table(title, ["", "temporary memory / parameters", "moved / parameters", *kinds], rows, targets)


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


def _masked(model: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(_errors(model, tokens, mask) * mask) / jnp.sum(mask)


# -- The steps ---------------------------------------------------------------------------------------------------------


def _makers(task: Task, dtypes: Mapping[str, Any]) -> Makers:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    makers = {_FSDP: functools.partial(_fsdp, task, mesh, dtypes)}
    makers |= {form: functools.partial(_sharded, task, mesh, form, dtypes) for form in _FORMS}
    return makers | {_PIECES: functools.partial(_sharded, task, mesh, "stacks", {**dtypes, "microbatches": 4})}


def _made(task: Task, mesh: Any, form: Any, options: Mapping[str, Any]) -> Any:
    return sharding.make_step(_masked, _ADAM, sharding.plan(task.model, mesh, {"**": "split"}, form=form), **options)


def _sharded(task: Task, mesh: Mesh, form: Any, options: Mapping[str, Any]) -> Step:
    init, step = _made(task, mesh, form, options)
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
        return _masked(tp.combine(jax.tree.map(lambda leaf: leaf.astype(dtype), params), rest), *batch)

    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return *updated(_ADAM, grads, params, state), value

    examples = lying(PartitionSpec("data"))
    results = params_at, state_at, lying(PartitionSpec())
    ins = params_at, state_at, examples, examples
    return jax.jit(step, in_shardings=ins, out_shardings=results, donate_argnums=(0, 1)), params_at, state_at


def _as_divided(step: Step) -> str:
    """The text of a program as XLA divides it; on CPU it widens narrow floats later."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        step.lower(step.state, *step.args).compile(compiler_options=options)
        (path,) = pathlib.Path(folder).glob("*after_spmd-partitioning*")
        return path.read_text()


# -- Devices that are not there ----------------------------------------------------------------------------------------


def _on_tpu(task: Task, form: Any, options: Mapping[str, Any]) -> jax.stages.Compiled:
    init, step = _made(task, mesh_of_tpus(), form, options)
    return step.lower(*init(jax.eval_shape(lambda: task.model)), *_shapes(task.batch)).compile()


def _fsdp_on_tpu(task: Task, dtypes: Mapping[str, Any]) -> jax.stages.Compiled:
    step, *lying = _jitted(task, mesh_of_tpus(), dtypes)
    params, _ = tp.partition(task.model)
    given = params, jax.eval_shape(_ADAM.init, params)
    laid = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), given, tuple(lying))
    return step.lower(*laid, *_shapes(task.batch)).compile()


def _shapes(batch: Any) -> Any:
    along = NamedSharding(mesh_of_tpus(), PartitionSpec("data"))
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=along), batch)
