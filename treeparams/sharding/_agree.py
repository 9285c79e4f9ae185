"""Compares the work that several processes are about to do: their plans, steps and values, by digest."""

import concurrent.futures
import difflib
import hashlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh

from .._tree.text import describe
from .._tree.types import PyTree

_PACKAGES = ("jax", "jaxlib", "optax", "equinox", "treeparams")
_LINES = 40  # of what differs, at most: a plan may have thousands
_SHOWN = 8  # elements of an array that are shown; of more, a hash


def agree(words: str) -> None:
    """Checks that all processes have the same text, and raises an error in every process if they differ.

    All processes call it together. The arrays that they exchange have the same shape whatever the texts are, so `agree`
    cannot hang or mix up data as other collectives do between processes that differ.

    >>> agree("float32[64,64]  split")  # one process agrees with itself
    """
    if jax.process_count() > 1:
        # The caller may be within `jax.jit`, which each thread has for itself.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(_agree, words).result()


def _agree(words: str) -> None:
    text = np.frombuffer(words.encode(), np.uint8)
    digests = multihost_utils.process_allgather(np.frombuffer(hashlib.sha256(words.encode()).digest(), np.uint8))
    if (digests == digests[0]).all():
        return
    # Only where they differ is all of the text exchanged, padded to one length: a gather needs arrays of one shape.
    sizes = multihost_utils.process_allgather(np.asarray(text.size, np.int32))
    padded = np.pad(text, (0, sizes.max() - text.size))
    rows = zip(multihost_utils.process_allgather(padded), sizes, strict=True)
    said: dict[str, list[int]] = {}
    for process, (row, size) in enumerate(rows):
        said.setdefault(row[:size].tobytes().decode(), []).append(process)
    # Against what most of them say; among equals, against the first process.
    (usual, holders), *others = sorted(said.items(), key=lambda item: -len(item[1]))
    lines = itertools.chain.from_iterable(
        difflib.unified_diff(
            usual.split("\n"), other.split("\n"), _listed(holders), _listed(processes), lineterm="", n=0
        )
        for other, processes in others
    )
    shown = list(itertools.islice(lines, _LINES))
    more = sum(1 for _ in lines)
    raise ValueError(
        "the plans, steps or values differ between the processes; make them from the same model, rules, options and "
        "seeds in all of them:\n" + "\n".join(shown + [f"... and {more} more lines"] * (more > 0))
    )


def _listed(processes: Sequence[int]) -> str:
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}"


# -- What they compare -------------------------------------------------------------------------------------------------


def surroundings_in_words(mesh: Mesh | AbstractMesh) -> str:
    """Returns the versions of packages, and the devices of a mesh in order."""
    lines = [f"{name} {getattr(sys.modules.get(name), '__version__', 'of no version')}" for name in _PACKAGES]
    axes = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    lines.append("mesh  " + ", ".join(f"{name!r}: {size} {kind.name}" for (name, size), kind in axes))
    if isinstance(mesh, Mesh) and is_shared(mesh):
        lines.append("devices  " + " ".join(str(device.id) for device in mesh.devices.flat))
    return "\n".join(lines)


def is_shared(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether a mesh has devices of other processes. On its own devices a process may train alone."""
    return isinstance(mesh, Mesh) and any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def values_in_words(tree: PyTree) -> str:
    """Returns the values of all arrays and numbers of a tree as text; large arrays as a hash."""
    return "\n".join(f"{jtu.keystr(path)}  {_value(leaf)}" for path, leaf in jtu.tree_flatten_with_path(tree)[0])


def _value(leaf: Any) -> str:
    if isinstance(leaf, (bool, int, float, complex)):
        return repr(leaf)
    if not isinstance(leaf, (jax.Array, np.ndarray)) or isinstance(leaf, Tracer):
        return describe(leaf)
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_replicated and not leaf.is_fully_addressable:
            return describe(leaf)  # each process has a part of it
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    array = np.asarray(leaf)
    if array.size <= _SHOWN:
        return f"{describe(array)} {array.tolist()}"
    # As JAX has it: NumPy's float64 in one process is the same model as float32 in another.
    array = np.ascontiguousarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    return f"{describe(array)} values {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
