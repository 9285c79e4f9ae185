"""Devices that you do not have: a mesh over a topology, to compile programs for without running them."""

from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh

from .._tree.text import describe, in_short


def devices_of(topology: str | Any, mesh: Mesh | AbstractMesh) -> Mesh:
    """Returns a mesh like another one, over the devices of a topology.

    Args:
        topology: the name of a TPU topology, or an object with `devices`.
        mesh: the other mesh.

    Raises:
        ValueError: the topology does not exist, its compiler is missing, or it has another number of devices.
        TypeError: `topology` is neither.
    """
    if isinstance(topology, str):
        try:
            topology, name = topologies.get_topology_desc(platform="tpu", topology_name=topology), topology
        except RuntimeError as error:
            if "not installed" in str(error):
                raise ValueError(
                    f"topology {topology!r}: the TPU compiler is not installed; pip install 'jax[tpu]', or the version "
                    "of libtpu that this extra names for your JAX. You need no TPU"
                ) from error
            if "lockfile" in str(error):
                raise ValueError(
                    f"topology {topology!r}: another process uses the TPU compiler, which one process at a time can "
                    "load; on a machine without a TPU, set ALLOW_MULTIPLE_LIBTPU_LOAD=1 in the environment"
                ) from error
            raise ValueError(
                f'topology {topology!r} does not exist, expected a name such as "v5e:2x4" ({in_short(error)})'
            ) from error
    else:
        name = "given"
    devices = getattr(topology, "devices", None)
    if devices is None:
        raise TypeError(
            'topology must be a name, such as "v5e:2x4", or a result of '
            f"jax.experimental.topologies.get_topology_desc, got {describe(topology)}"
        )
    shape = dict(mesh.shape)
    if len(devices) != mesh.size:
        raise ValueError(
            f"the topology {name!r} has {len(devices)} devices, the mesh {shape} has {mesh.size}; make the plan over "
            f'jax.sharding.AbstractMesh(({len(devices)},), ("data",)), or name a topology of {mesh.size} devices'
        )
    # In the order in which `jax.make_mesh` would have them: neighbours along an axis are neighbours on the network.
    return jax.make_mesh(tuple(shape.values()), mesh.axis_names, axis_types=mesh.axis_types, devices=list(devices))
