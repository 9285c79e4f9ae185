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
                    f"topology {topology!r}: the compiler of TPUs is not installed; pip install 'jax[tpu]', or the "
                    "version of libtpu that this says for your JAX. It needs no TPU"
                ) from error
            if "lockfile" in str(error):
                raise ValueError(
                    f"topology {topology!r}: another process has the compiler of TPUs, which one at a time may load; "
                    "where there is no TPU, set ALLOW_MULTIPLE_LIBTPU_LOAD=1 in the environment"
                ) from error
            raise ValueError(f'topology {topology!r} is none, expected one as "v5e:2x4" ({in_short(error)})') from error
    else:
        name = "given"
    devices = getattr(topology, "devices", None)
    if devices is None:
        raise TypeError(
            f'topology is a name, such as "v5e:2x4", or what jax.experimental.topologies.get_topology_desc returns, '
            f"got {describe(topology)}"
        )
    shape = dict(mesh.shape)
    if len(devices) != mesh.size:
        raise ValueError(
            f"the topology {name!r} has {len(devices)} devices, the mesh {shape} {mesh.size}; make the plan over "
            f'jax.sharding.AbstractMesh(({len(devices)},), ("data",)), or name a topology of {mesh.size} devices'
        )
    # In the order in which `jax.make_mesh` would have them: neighbours along an axis are neighbours on the network.
    return jax.make_mesh(tuple(shape.values()), mesh.axis_names, axis_types=mesh.axis_types, devices=list(devices))
