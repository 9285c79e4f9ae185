"""ahead: how much memory, communication and arithmetic a step needs, found by compiling it without running it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._tree.paths import join_path, key_entries
from .._tree.tables import Table, as_html, as_text
from .._tree.text import in_bytes, in_units
from .._tree.types import PyTree
from ._compiled.collectives import Collectives, collectives, gathered_at_once
from ._compiled.hlo import Text
from ._compiled.products import flops_of
from ._put import shapes_over
from ._specs import as_text as spec_as_text
from ._step import Step, StepState, program_of
from ._topology import devices_of

_MEANING = {
    "parameters": "",
    "frozen": "arrays of the model that do not train",
    "state": "of the optimiser, and averages",
    "batch": "",
    "results": "that take no buffer of an argument",
    "temporaries": "",
}
_WITHIN = {
    "gathered": "of the temporaries: by all-gathers, of a loop those of one round",
    "gradients": "of the temporaries, at most",
    "activations": "the rest of the temporaries",
}
_SHOWN = 5


class Lying(NamedTuple):
    """An array between steps: its name, its bytes on each device, and how it is sharded."""

    name: str
    bytes: int
    lies: str


class Seconds(NamedTuple):
    """A lower bound on the time of a step, made by `Ahead.seconds`. Prints as a sentence.

    Attributes:
        moving: seconds to move the bytes between devices.
        computing: seconds to compute the matrix products and convolutions.
    """

    moving: float
    computing: float

    def __repr__(self) -> str:
        words = f"moving {self.moving:.3g} s, computing {self.computing:.3g} s"
        if self.moving <= self.computing:
            return words
        return f"{words}: moving takes longer, so devices wait: give each more examples"


@dataclasses.dataclass(frozen=True, repr=False)
class Ahead:
    """Memory, communication and arithmetic of a step on each device, made by `sharding.ahead`. Prints as a table.

    All sizes are bytes on one device.

    Attributes:
        devices: how many devices the step runs on.
        parameters: bytes of the trained parameters.
        frozen: bytes of the arrays of the model that do not train. 0 for a function that `sharding.make_step` did not
            make.
        state: bytes of the optimiser's state and of averages.
        batch: bytes of all further arguments.
        results: bytes of results that do not reuse the buffer of an argument. If the function donates nothing, these
            are all results.
        temporaries: bytes of arrays that are made and dropped within the step, as the compiler reports them.
        gathered: bytes that all-gathers make, read from the program. All-gathers in a loop count for one round.
        gradients: bytes of the gradient at its peak, derived from the plan. A device holds the gradient of whole
            parameters, or of its share with `split="parameters"`. The dtype is that of the loss or the one that
            gradients are summed in, whichever is wider. 0 for a function that `sharding.make_step` did not make,
            because its gradients cannot be recognised.
        flops: floating-point operations of matrix products and convolutions on each device, with all rounds of loops;
            `None` if some are in a loop whose number of rounds depends on values.
        largest: the largest arrays between steps. Each has a `.name`, its `.bytes` on each device, and its sharding as
            `.lies`.
        moved: the bytes that one step moves between devices, as `sharding.collectives` counts them.
    """

    devices: int
    parameters: int
    frozen: int
    state: int
    batch: int
    results: int
    temporaries: int
    gathered: int
    gradients: int
    flops: int | None
    largest: tuple[Lying, ...]
    moved: Collectives

    @property
    def total(self) -> int:
        """The bytes that a device needs: arguments, temporaries, and results outside the buffers of arguments."""
        return self.parameters + self.frozen + self.state + self.batch + self.results + self.temporaries

    @property
    def activations(self) -> int:
        """The bytes of `temporaries` that are neither `gathered` nor `gradients`; derived, and at least 0."""
        return max(0, self.temporaries - self.gathered - self.gradients)

    def seconds(self, *, bandwidth: int | float | Mapping[str, int | float], flops: int | float) -> Seconds:
        """Estimates how long a step takes at least, on devices of a given speed.

        Args:
            bandwidth: bytes per second that each device moves. Pass a mapping to give each axis of the mesh its own
                bandwidth, such as `{"data": 4.5e10}`; if data moves along several axes at once, the slowest of them
                counts.
            flops: floating-point operations per second of each device.

        Returns:
            `Seconds`, with `.moving` and `.computing`. If devices do both at once, a step takes at least the longer of
            the two; if nothing overlaps, it takes their sum.

        Raises:
            ValueError: the bytes or operations of the program are not known; an axis has no bandwidth; a bandwidth or
                `flops` is not positive.
        """
        if self.flops is None or self.moved.bytes is None:
            raise ValueError("how often a loop of this step runs depends on values, so its time cannot be estimated")
        speeds = [*bandwidth.values()] if isinstance(bandwidth, Mapping) else [bandwidth]
        if wrong := [each for each in (flops, *speeds) if not each > 0]:
            raise ValueError(f"bandwidth and flops, per second and device, must be more than 0, got {wrong[0]!r}")
        if not isinstance(bandwidth, Mapping):
            return Seconds(self.moved.bytes / bandwidth, self.flops / flops)
        over = self.moved.over
        if missing := [axis for axes in over for axis in axes if axis not in bandwidth]:
            raise ValueError(f"the step moves data along the axis {missing[0]!r}; bandwidth has only {[*bandwidth]}")
        moving = sum((size or 0) / min(bandwidth[axis] for axis in axes) for axes, size in over.items())
        return Seconds(moving, self.flops / flops)

    def __repr__(self) -> str:
        return as_text(self._blocks())

    def _repr_html_(self) -> str:
        return as_html(self._blocks())

    def _blocks(self) -> list[Table | str]:
        rows = [(name, in_bytes(getattr(self, name)), meaning) for name, meaning in _MEANING.items()]
        rows += [("total", in_bytes(self.total), ""), ("", "", "")]
        rows += [(name, in_bytes(getattr(self, name)), meaning) for name, meaning in _WITHIN.items()]
        blocks: list[Table | str] = [Table((f"each of {self.devices:,}", "bytes", ""), rows, (1,)), ""]
        if self.largest:
            cells = [(each.name, in_bytes(each.bytes), each.lies) for each in self.largest]
            blocks += [Table(("the largest arrays", "bytes", "lies"), cells, (1,)), ""]
        return [*blocks, *self.moved.blocks(), "", self._products()]

    def _products(self) -> str:
        if self.flops is None:
            return "how often a loop runs depends on values, so its products are not counted"
        moved = self.moved.bytes
        ratio = f", {self.flops / moved:,.0f} for each byte moved" if moved else ""
        return f"{in_units(self.flops, 'FLOP')} of matrix products and convolutions{ratio}"


def ahead(
    step: Callable[..., Any], params: PyTree, state: PyTree, *batch: PyTree, topology: str | Any | None = None
) -> Ahead:
    """Compiles a step without running it, and reports the memory, communication and arithmetic it needs on each device.

    >>> import jax, jax.numpy as jnp, optax
    >>> from treeparams import sharding
    >>> model = {"w": jax.ShapeDtypeStruct((100_000, 1000), jnp.float32)}
    >>> plan = sharding.plan(model, jax.sharding.Mesh(jax.devices()[:4], "data"), {"**": "split"})
    >>> loss = lambda model, x: jnp.mean((x @ model["w"]) ** 2)
    >>> init, step = sharding.make_step(loss, optax.sgd(0.1, 0.9), plan, loss_is="mean")
    >>> found = sharding.ahead(step, *init(model), jax.ShapeDtypeStruct((8, 100_000), jnp.float32))
    >>> found.parameters, found.state, found.batch  # bytes of each device; printed, it is a table
    (100000000, 100000004, 800000)
    >>> found.moved
    collective      times  bytes each     bytes  over
    all-gather          1    400.0 MB  400.0 MB  data
    reduce-scatter      1    400.0 MB  400.0 MB  data
    <BLANKLINE>
    total               2              800.0 MB
    >>> found.seconds(bandwidth=4.5e10, flops=2e14)
    moving 0.0178 s, computing 4e-06 s: moving takes longer, so devices wait: give each more examples

    `ahead` runs nothing and makes no arrays, so the model may be larger than your machine, and you may plan for more
    devices than you have. Start Python with `XLA_FLAGS=--xla_force_host_platform_device_count=64` and make the mesh of
    these devices. Or compile for devices that you do not have with `topology="v5e:2x4"`; then the mesh may be an
    `AbstractMesh`.

    Args:
        step: a step that `sharding.make_step` made, or any `jax.jit` function that accepts these arguments.
        params: the parameters that `init` returned. If the model consists of `jax.ShapeDtypeStruct`s, `init` returns
            shapes with their shardings, which work here too.
        state: the state that `init` returned.
        *batch: further arguments of the step: arrays or `jax.ShapeDtypeStruct`s.
        topology: the devices to compile for. The name of a TPU topology, such as `"v5e:2x4"`, needs the TPU compiler
            (`pip install libtpu`) but no TPU. For another plugin, pass the result of
            `jax.experimental.topologies.get_topology_desc`. `None` means the devices of the mesh.

    Returns:
        An `Ahead`, which prints as a table. Argument bytes, results, temporaries, collectives and products come from
        the compiled program; gradients and activations are derived from them. Without `topology` the program is
        compiled for the devices that you have. For other devices XLA schedules and fuses differently, which changes the
        temporaries most.

    Raises:
        TypeError: `step` is not a `jax.jit` function.
        ValueError: the compiler of the device does not report how much memory its programs need; the compiler for the
            topology is not installed; the topology has another number of devices than the mesh; the mesh is an
            `AbstractMesh` and you gave no topology.
    """
    if getattr(step, "lower", None) is None:
        raise TypeError(f"expected a step of sharding.make_step or a jax.jit function, got a {type(step).__name__}")
    arguments = (params, state, *batch)
    mesh = _mesh_of(arguments)
    if topology is not None:
        if mesh is None:
            raise ValueError(
                "no argument has a NamedSharding, so there is no mesh to map to the topology; pass params and state as "
                "init returned them"
            )
        mesh = devices_of(topology, mesh)
        arguments = shapes_over(arguments, mesh)
        step = step.over(mesh) if isinstance(step, Step) else step
    elif isinstance(mesh, AbstractMesh):
        raise ValueError('the plan is over an AbstractMesh, which has no devices; name some: topology="v5e:2x4"')
    compiled: jax.stages.Compiled = step.lower(*arguments).compile()  # type: ignore[attr-defined]
    return _found(compiled, arguments, mesh, program_of(step).gradient_bytes if isinstance(step, Step) else 0)


def _found(compiled: jax.stages.Compiled, arguments: tuple[Any, ...], mesh: Mesh | None, gradients: int) -> Ahead:
    """Collects everything that `Ahead` reports about a compiled step."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError("the compiler of this device does not report the memory that a program needs; use a CPU mesh")
    params, state, *batch = _at_rest(compiled, arguments)
    rest = (
        [each for each in state if each.name.startswith("state.rest.")] if isinstance(arguments[1], StepState) else []
    )
    in_all = lambda arrays: sum(each.bytes for each in arrays)
    text = Text.of(compiled.as_text() or "")
    largest = sorted([*params, *state], key=lambda each: -each.bytes)
    return Ahead(
        _devices_of(compiled, mesh),
        in_all(params),
        in_all(rest),
        in_all(state) - in_all(rest),
        sum(map(in_all, batch)),
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        gathered_at_once(text),
        gradients,
        flops_of(text),
        tuple(each for each in largest[:_SHOWN] if each.bytes),
        collectives(compiled, mesh=mesh),
    )


for _public in (Ahead, Lying, Seconds):
    _public.__module__ = "treeparams.sharding"


def _mesh_of(arguments: PyTree) -> Mesh | AbstractMesh | None:
    """Returns the mesh that the arguments are sharded over, or `None`."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jtu.tree_leaves(arguments)]
    return next((each.mesh for each in shardings if isinstance(each, NamedSharding)), None)


def _devices_of(compiled: jax.stages.Compiled, mesh: Mesh | None) -> int:
    shardings = [each for each in jtu.tree_leaves(compiled.input_shardings[0]) if each is not None]
    return max((len(each.device_set) for each in shardings), default=1 if mesh is None else mesh.size)


def _at_rest(compiled: jax.stages.Compiled, arguments: tuple[Any, ...]) -> Iterator[list[Lying]]:
    """Yields the arrays of each argument of a compiled program."""
    # An argument that the program does not read has no sharding in it, but lies on the device all the same.
    shardings = jax.tree.map(
        lambda leaf, sharding: getattr(leaf, "sharding", None) if sharding is None else sharding,
        arguments,
        compiled.input_shardings[0],
    )
    for name, argument, its in zip(
        ("params", "state", *["batch"] * len(arguments)), arguments, shardings, strict=False
    ):
        leaves, treedef = jtu.tree_flatten_with_path(argument)
        pairs = zip(leaves, treedef.flatten_up_to(its), strict=True)
        yield [_lying(name, *each, sharding) for each, sharding in pairs]


def _lying(name: str, path: Any, leaf: Any, sharding: jax.sharding.Sharding | None) -> Lying:
    """Describes how one array of an argument is sharded."""
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    is_split = isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated
    lies = spec_as_text(sharding.spec) if isinstance(sharding, NamedSharding) and is_split else "whole"
    return Lying(join_path([name, *key_entries(path)]), math.prod(shape) * leaf.dtype.itemsize, lies)
