"""ahead: how much a step takes of each device, from a program that is compiled and never run."""

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
    """An array at rest: its name, its bytes on each device, and how it lies."""

    name: str
    bytes: int
    lies: str


class Seconds(NamedTuple):
    """How long a step takes at least; made by `Ahead.seconds`. Prints as a sentence.

    Attributes:
        moving: seconds for the bytes that are moved.
        computing: seconds for the products.
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
    """How much a step takes of each device; made by `sharding.ahead`. Prints as a table.

    Attributes:
        devices: over how many the step runs.
        parameters: bytes of the parameters that a device has; so `frozen`, `state` and `batch`.
        frozen: arrays of the model that do not train; of another function than a step of `sharding.make_step` 0.
        state: of the optimiser, and averages.
        batch: of all further arguments.
        results: bytes of results that take no buffer of an argument: all, where a function donates nothing.
        temporaries: bytes of arrays that are made and dropped within the step, as the compiler counts them.
        gathered: bytes that all-gathers make, of a loop in one round; read from the program.
        gradients: bytes of the gradient at its peak, derived from the plan: of whole parameters, but with
            `split="parameters"` a share; in the dtype of the loss or the one in which they are summed, whichever is
            wider. Of another function 0: nobody knows which arrays they are.
        flops: floating-point operations of matrix products and convolutions on each device, with the rounds of loops;
            `None` if some are in a loop that runs until some value is reached.
        largest: the largest arrays at rest, with `.name`, `.bytes` on each device, and how it `.lies`.
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
        """Bytes of a device: arguments, results that take no buffer of these, and temporaries."""
        return self.parameters + self.frozen + self.state + self.batch + self.results + self.temporaries

    @property
    def activations(self) -> int:
        """Bytes of the temporaries less those of `gathered` and `gradients`: derived, and at least 0."""
        return max(0, self.temporaries - self.gathered - self.gradients)

    def seconds(self, *, bandwidth: int | float | Mapping[str, int | float], flops: int | float) -> Seconds:
        """How long a step takes at least, on devices of some speed.

        Args:
            bandwidth: bytes per second that each device moves; or of each axis of the mesh, `{"data": 4.5e10}`. Between
                devices along several axes at once the slowest of them counts.
            flops: floating-point operations per second of each device.

        Returns:
            `Seconds`, with `.moving` and `.computing`. Devices may do both at once, so a step takes the longer of the
            two at least, and their sum where nothing overlaps.

        Raises:
            ValueError: a number of the program is not known; an axis has no bandwidth, or one that is not positive.
        """
        if self.flops is None or self.moved.bytes is None:
            raise ValueError("how often a loop of this step runs depends on values, so it has no number of seconds")
        speeds = [*bandwidth.values()] if isinstance(bandwidth, Mapping) else [bandwidth]
        if wrong := [each for each in (flops, *speeds) if not each > 0]:
            raise ValueError(f"bandwidth and flops are per second and device, more than 0, got {wrong[0]!r}")
        if not isinstance(bandwidth, Mapping):
            return Seconds(self.moved.bytes / bandwidth, self.flops / flops)
        over = self.moved.over
        if missing := [axis for axes in over for axis in axes if axis not in bandwidth]:
            raise ValueError(f"bandwidth has no axis {missing[0]!r}, over which is moved; it has {[*bandwidth]}")
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
            return "how often a loop runs depends on values, so its products have no count"
        moved = self.moved.bytes
        ratio = f", {self.flops / moved:,.0f} for each byte moved" if moved else ""
        return f"{in_units(self.flops, 'FLOP')} of matrix products and convolutions{ratio}"


def ahead(
    step: Callable[..., Any], params: PyTree, state: PyTree, *batch: PyTree, topology: str | Any | None = None
) -> Ahead:
    """Compiles a step and tells how much it takes of each device: bytes at rest, temporary ones, bytes moved, products.

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

    Nothing is run and no array is made, so the model may be larger than your machine, and the devices more than you
    have: start Python with `XLA_FLAGS=--xla_force_host_platform_device_count=64`, and make the mesh of these. Or
    compile for devices that are not there, `topology="v5e:2x4"`: then the mesh may be an `AbstractMesh`.

    Args:
        step: of `sharding.make_step`; or any function of `jax.jit` with these arguments.
        params: as `init` returned them; of a model of `jax.ShapeDtypeStruct`s these are shapes and places.
        state: the same.
        *batch: further arguments of the step: arrays or `jax.ShapeDtypeStruct`s.
        topology: the devices to compile for. A name as of TPUs, `"v5e:2x4"`, needs their compiler (`pip install
            libtpu`) and no TPU. Those of another plugin give as `jax.experimental.topologies.get_topology_desc` returns
            them. `None`: the devices of the mesh.

    Returns:
        An `Ahead`, which prints as a table. Bytes at rest, results and temporaries, collectives and products are those
        of the compiled program; gradients and activations are derived from them. Without `topology` it is a program for
        the devices that are there; on others XLA schedules and joins otherwise, so that temporaries differ first.

    Raises:
        TypeError: `step` is no function of `jax.jit`.
        ValueError: the device's compiler does not tell how much memory its programs take; the compiler of the topology
            is not installed; it has another number of devices than the mesh; there is an `AbstractMesh` and no
            topology.
    """
    if getattr(step, "lower", None) is None:
        raise TypeError(f"expected a step of sharding.make_step, or what jax.jit returns, got a {type(step).__name__}")
    arguments = (params, state, *batch)
    mesh = _mesh_of(arguments)
    if topology is not None:
        if mesh is None:
            raise ValueError(
                "no argument says by a NamedSharding how it lies, so there is no mesh to lay over a topology"
            )
        mesh = devices_of(topology, mesh)
        arguments = shapes_over(arguments, mesh)
        step = step.over(mesh) if isinstance(step, Step) else step
    elif isinstance(mesh, AbstractMesh):
        raise ValueError('the plan is over an AbstractMesh, which has no devices; say which: topology="v5e:2x4"')
    compiled: jax.stages.Compiled = step.lower(*arguments).compile()  # type: ignore[attr-defined]
    return _found(compiled, arguments, mesh, program_of(step).gradient_bytes if isinstance(step, Step) else 0)


def _found(compiled: jax.stages.Compiled, arguments: tuple[Any, ...], mesh: Mesh | None, gradients: int) -> Ahead:
    """All that is to be told of a compiled step."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError("the compiler of this device does not tell how much memory a program takes; take that of CPU")
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
    """The mesh that arguments lie over."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jtu.tree_leaves(arguments)]
    return next((each.mesh for each in shardings if isinstance(each, NamedSharding)), None)


def _devices_of(compiled: jax.stages.Compiled, mesh: Mesh | None) -> int:
    shardings = [each for each in jtu.tree_leaves(compiled.input_shardings[0]) if each is not None]
    return max((len(each.device_set) for each in shardings), default=1 if mesh is None else mesh.size)


def _at_rest(compiled: jax.stages.Compiled, arguments: tuple[Any, ...]) -> Iterator[list[Lying]]:
    """The arrays of each argument of a compiled program."""
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
    """How one array of an argument lies."""
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    is_split = isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated
    lies = spec_as_text(sharding.spec) if isinstance(sharding, NamedSharding) and is_split else "whole"
    return Lying(join_path([name, *key_entries(path)]), math.prod(shape) * leaf.dtype.itemsize, lies)
