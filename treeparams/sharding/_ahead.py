"""ahead: how much a step takes of each device, from a program that is compiled and never run."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from .._tree.tables import Table, as_html, as_text
from .._tree.text import in_bytes
from .._tree.types import PyTree
from ._collectives import Collectives, collectives

_MEANING = {
    "parameters": "",
    "state": "of the optimiser",
    "batch": "",
    "temporaries": "gradients, activations, what is gathered",
}


@dataclasses.dataclass(frozen=True, repr=False)
class Ahead:
    """How much a step takes of each device; made by `sharding.ahead`. Prints as a table.

    Attributes:
        devices: over how many the step runs.
        parameters: bytes of the parameters that a device has; so `state` and `batch`.
        state: of the optimiser.
        batch: of all further arguments.
        temporaries: bytes of arrays that are made and dropped within the step: gradients, activations, gathered
            parameters.
        moved: the bytes that one step moves between devices, as `sharding.collectives` counts them.
    """

    devices: int
    parameters: int
    state: int
    batch: int
    temporaries: int
    moved: Collectives

    @property
    def total(self) -> int:
        """Bytes of a device: arguments, whose buffers the results take where the step donates them, and temporaries."""
        return self.parameters + self.state + self.batch + self.temporaries

    def __repr__(self) -> str:
        return as_text(self._blocks())

    def _repr_html_(self) -> str:
        return as_html(self._blocks())

    def _blocks(self) -> list[Table | str]:
        rows = [(name, in_bytes(getattr(self, name)), meaning) for name, meaning in _MEANING.items()]
        total = ("total", in_bytes(self.total), "")
        return [Table((f"each of {self.devices:,}", "bytes", ""), [*rows, total], (1,)), "", *self.moved.blocks()]


def ahead(step: Callable[..., Any], params: PyTree, state: PyTree, *batch: PyTree) -> Ahead:
    """Compiles a step and tells how much it takes of each device: bytes at rest, temporary ones, bytes moved.

    >>> import jax, jax.numpy as jnp, optax
    >>> from treeparams import sharding
    >>> model = {"w": jax.ShapeDtypeStruct((100_000, 1000), jnp.float32)}
    >>> plan = sharding.plan(model, jax.sharding.Mesh(jax.devices()[:4], "data"), {"**": "split"})
    >>> loss = lambda model, x: jnp.mean((x @ model["w"]) ** 2)
    >>> init, step = sharding.make_step(loss, optax.sgd(0.1, 0.9), plan)
    >>> found = sharding.ahead(step, *init(model), jax.ShapeDtypeStruct((8, 100_000), jnp.float32))
    >>> found.parameters, found.state, found.batch  # bytes of each device; printed, it is a table
    (100000000, 100000004, 800000)
    >>> found.moved
    collective      times  bytes each     bytes
    all-gather          1    400.0 MB  400.0 MB
    reduce-scatter      1    400.0 MB  400.0 MB
    <BLANKLINE>
    total               2              800.0 MB

    Nothing is run and no array is made, so the model may be larger than your machine, and the devices more than you
    have: start Python with `XLA_FLAGS=--xla_force_host_platform_device_count=64`, and make the mesh of these.

    Args:
        step: of `sharding.make_step`; or any function of `jax.jit` with these arguments.
        params: as `init` returned them; of a model of `jax.ShapeDtypeStruct`s these are shapes and places.
        state: the same.
        *batch: further arguments of the step: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        An `Ahead`, which prints as a table. The numbers are those of a program for the devices that are there; on
        others XLA schedules and joins otherwise, so that temporaries differ first.

    Raises:
        TypeError: `step` is no function of `jax.jit`.
        ValueError: the device's compiler does not tell how much memory its programs take.
    """
    lower = getattr(step, "lower", None)
    if lower is None:
        raise TypeError(f"expected a step of sharding.make_step, or what jax.jit returns, got a {type(step).__name__}")
    compiled = lower(params, state, *batch).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError("the compiler of this device does not tell how much memory a program takes; take that of CPU")
    arguments = (params, state, *batch)
    # An argument that the program does not read has no sharding in it, but lies on the device all the same.
    shardings = jax.tree.map(
        lambda leaf, sharding: getattr(leaf, "sharding", None) if sharding is None else sharding,
        arguments,
        compiled.input_shardings[0],
    )
    bytes_of = jax.tree.map(_bytes_of_each, arguments, shardings)
    for_params, for_state, for_batch = (sum(jax.tree.leaves(each)) for each in (bytes_of[0], bytes_of[1], bytes_of[2:]))
    devices = max((len(sharding.device_set) for sharding in jax.tree.leaves(shardings)), default=1)
    return Ahead(devices, for_params, for_state, for_batch, memory.temp_size_in_bytes, collectives(compiled))


Ahead.__module__ = "treeparams.sharding"


def _bytes_of_each(leaf: Any, sharding: jax.sharding.Sharding | None) -> int:
    """How many bytes of an array one device has."""
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
