"""Programs for TPUs that are not there: what they move and hold, compiled and never run. Needs `pip install libtpu`."""

import functools
import importlib.util
from typing import NamedTuple

import jax
from jax.experimental import topologies

from ._hbm import main_memory_bytes
from ._programs import build
from ._steps import Loop

TOPOLOGY = "v5e:2x4"
ONE = "v5e"
MISSING = f"Programs for TPU ({TOPOLOGY}) are left out: their compiler is not installed, pip install libtpu."


def has_compiler() -> bool:
    """Whether programs can be compiled for TPU; a table says `MISSING` where they cannot."""
    return importlib.util.find_spec("libtpu") is not None


@functools.cache
def mesh_of_tpus() -> jax.sharding.Mesh:
    """A mesh over TPUs that are not there."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=list(devices))


class OnTpu(NamedTuple):
    """What a step takes of one TPU, in bytes; `build` in seconds."""

    parameters: int  # as they are on CPU, not padded
    moved: int  # between main memory and the rest
    temporary: int
    at_rest: int  # all arguments, padded
    build: float


def compiled_for_one(loop: Loop) -> OnTpu:
    """Compiles a step for one TPU."""
    arguments = (loop.state, *loop.args)
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_first_device())
    program = build(loop.step, *jax.tree.map(shape, arguments), donate=(0,), platforms=("tpu",))
    moved, held = main_memory_bytes(program.call.as_text()), program.call.memory_analysis().argument_size_in_bytes
    assert moved is not None, "a loop whose rounds are not known"
    parameters = loop.args[0] if loop.state is None else loop.state[0]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
    return OnTpu(size, moved, program.temporary, held, program.build)


@functools.cache
def _first_device() -> jax.sharding.Sharding:
    found = topologies.get_topology_desc(platform="tpu", topology_name=f"{ONE}:2x2")
    return jax.sharding.SingleDeviceSharding(found.devices[0])
