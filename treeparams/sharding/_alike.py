"""What processes compare before they start, in words: versions, devices, values."""

import hashlib
import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from .._tree.text import describe
from .._tree.types import PyTree

_PACKAGES = ("jax", "jaxlib", "optax", "equinox", "treeparams")
_SHOWN = 8  # elements of an array that are shown; of more, a hash


def surroundings_in_words(mesh: Mesh | AbstractMesh) -> str:
    """The versions of packages, and the devices of a mesh in their order."""
    lines = []
    for name in _PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:  # it lies on the path, and is not installed
            lines.append(f"{name} of no version")
    axes = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    lines.append("mesh  " + ", ".join(f"{name!r}: {size} {kind.name}" for (name, size), kind in axes))
    if isinstance(mesh, Mesh) and is_shared(mesh):
        lines.append("devices  " + " ".join(str(device.id) for device in mesh.devices.flat))
    return "\n".join(lines)


def is_shared(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a mesh has devices of other processes. Over its own devices a process may train as it likes."""
    return isinstance(mesh, Mesh) and any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def values_in_words(tree: PyTree) -> str:
    """The values of all arrays and numbers of a tree, those of arrays that have many as a hash."""
    return "\n".join(f"{jtu.keystr(path)}  {_value(leaf)}" for path, leaf in jtu.tree_flatten_with_path(tree)[0])


def is_whole(leaf: Any) -> bool:
    """Whether each process has all of an array, and it is no traced one."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_fully_replicated


def _value(leaf: Any) -> str:
    if isinstance(leaf, (bool, int, float, complex)):
        return repr(leaf)
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        return describe(leaf)
    if isinstance(leaf, jax.Array):
        if not is_whole(leaf) and (isinstance(leaf, Tracer) or not leaf.is_fully_addressable):
            return describe(leaf)  # each process has a part of it, or none yet
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    array = np.asarray(leaf)
    if array.size <= _SHOWN:
        return f"{describe(array)} {array.tolist()}"
    # As JAX has it: NumPy's float64 in one process is the same model as float32 in another.
    array = np.ascontiguousarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    return f"{describe(array)} values {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
