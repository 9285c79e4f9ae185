"""The batch of a step: checks its arrays and places them on the devices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from .._tree.text import quoted
from .._tree.types import PyTree
from ._placement import Placement
from ._put import put_leaf
from ._specs import Axes


def taken(batch: PyTree, placement: Placement, pieces: int) -> tuple[list[Any], Any, list[NamedSharding]]:
    """Checks a batch, and returns its arrays, its treedef and their shardings: examples split, scalars whole."""
    arrays, treedef = jtu.tree_flatten_with_path(batch)
    check_batch(arrays, placement.axes, pieces)
    leaves = [array for _, array in arrays]
    along, whole = placement.batch, placement.whole
    return leaves, treedef, [along if jnp.ndim(leaf) else whole for leaf in leaves]


def put_batch(batch: PyTree, placement: Placement, pieces: int) -> PyTree:
    """Places a batch on the devices. Python numbers, shapes and traced arrays are returned unchanged.

    `jax.jit` would compile one program for NumPy arrays, one for arrays on one device and one for arrays sharded like
    this.
    """
    leaves, treedef, shardings = taken(batch, placement, pieces)
    return treedef.unflatten(list(map(_put, leaves, shardings)))


def _put(leaf: Any, to: NamedSharding) -> Any:
    is_value = hasattr(leaf, "dtype") and not isinstance(leaf, (Tracer, jax.ShapeDtypeStruct))
    if not is_value or getattr(leaf, "sharding", None) == to:
        return leaf
    return put_leaf(np.asarray(leaf) if isinstance(leaf, np.generic) else leaf, to, is_own=True)


def check_batch(arrays: Sequence[tuple[Any, Any]], axes: Axes, pieces: int) -> None:
    """Checks that all arrays have the same number of examples, and that the devices can share them equally."""
    counts = [(path, jnp.shape(array)[0]) for path, array in arrays if jnp.ndim(array)]
    if not counts and pieces == 1:
        return
    # Each call of a step comes by here: names are made of paths for an error alone.
    (first, count), *others = counts or [((), 0)]
    for path, its in others:
        if its != count:
            raise ValueError(
                f"{_named(first)} has {count} examples and {_named(path)} {its}; the leading axis of each array of a "
                "batch must run over the examples. Pass other arrays to the loss itself, for example by "
                "functools.partial, and one key for each example, jax.random.split(key, count)"
            )
    if not count:
        raise ValueError(f"{_named(first)} has no examples")
    devices = axes.devices_along(axes.batch)
    if count % (devices * pieces):
        in_pieces = f" in {pieces} pieces" if pieces > 1 else ""
        raise ValueError(
            f"{_named(first)} has {count} examples, which {devices} devices along {quoted(axes.batch)} cannot share "
            f"equally{in_pieces}; give a multiple of {devices * pieces}"
        )


def _named(path: tuple[Any, ...]) -> str:
    return f"batch{jtu.keystr(path)}" if path else "the batch"


def check_keys(treedef: Any, arrays: Sequence[Any]) -> None:
    """Rejects a PRNG key with which all devices would draw the same numbers."""
    paths = jtu.tree_flatten_with_path(jtu.tree_unflatten(treedef, range(len(arrays))))[0]
    for (path, _), array in zip(paths, arrays, strict=True):
        if not array.ndim and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"{_named(path)} is one key, with which each device would draw the same numbers for its "
                "examples; give each example a key, jax.random.split(key, n), or leave out loss_is= and outputs= and "
                "return one number, so that the loss sees the whole batch"
            )
