"""What is made of parameters - the state of a rule, an average - and where it lies: as they do."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from .._average import Ema
from .._joined import Form
from .._text import describe
from .._types import PyTree
from ..optim._state import ModelTransformation, extended

Average = float | Callable[[Any], Ema[Any]]
"""A decay, or what makes the average of parameters."""


def sharding_of(shapes: PyTree) -> PyTree:
    """The sharding of each."""
    return jax.tree.map(lambda shape: shape.sharding, shapes)


def plain(tx: Any) -> Any:
    """A rule that is plain Optax."""
    if isinstance(tx, ModelTransformation):
        raise ValueError(
            "expected plain Optax, got a transformation over models; the plan's layout says what trains, and its form "
            "how it rests: pass what is within it, such as optax.adam(1e-3)"
        )
    return extended(tx)


def ema_maker(average: Average) -> Callable[[PyTree], Any]:
    """What makes an average of parameters."""

    def make(params: PyTree) -> Any:
        made = average(params) if callable(average) else Ema(params, average)
        if not isinstance(made, Ema):
            raise TypeError(f"{expected}; it made {describe(made)}")
        return made

    expected = (
        "average is a decay, such as 0.999, or makes a tp.Ema of parameters, such as "
        "functools.partial(tp.Ema, decay=0.999, warmup=True)"
    )
    is_decay = isinstance(average, (int, float, np.floating)) and not isinstance(average, bool)
    if isinstance(average, type) or not (is_decay or callable(average)):
        raise TypeError(f"{expected}, got {average!r}")
    return make


def entries_of(
    make: Callable[[PyTree], PyTree],
    start: PyTree,
    tree: Callable[[Sequence[Any]], PyTree],
    leaves: Sequence[jax.ShapeDtypeStruct],
    specs: Sequence[PartitionSpec],
    joined: Form | None,
) -> PyTree:
    """For each array of `start`, which `make` makes of parameters, the entries of its `PartitionSpec`.

    They are found by asking: of parameters that are twice as long along the axes that are split over some axes of the
    mesh, it makes something that is longer along its own.

    Args:
        make: what makes it.
        start: what it makes, as shapes.
        tree: from the arrays of the parameters to their tree.
        leaves: these arrays, as shapes.
        specs: how each lies.
        joined: their form, if it is no tree.
    """
    paths = [(path, leaf.shape) for path, leaf in jtu.tree_flatten_with_path(start)[0]]
    entries: dict[Any, list[Any]] = {path: [None] * len(shape) for path, shape in paths}
    for entry in {entry: None for spec in specs for entry in spec if entry is not None}:
        twice = lambda size, each, entry=entry: 2 * size if each == entry else size
        longer = [
            jax.ShapeDtypeStruct(tuple(itertools.starmap(twice, itertools.zip_longest(leaf.shape, spec))), leaf.dtype)
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
        params, names = _with_keys(tree, longer, joined)
        grown = jtu.tree_flatten_with_path(jax.eval_shape(make, params))[0]
        found = {_renamed(path, names): leaf.shape for path, leaf in grown}
        for path, shape in paths:
            if len(found.get(path, ())) != len(shape):
                raise ValueError(
                    f"the rule keeps a state of another structure for longer parameters, at {jtu.keystr(path)}: it "
                    "looks at the shapes of leaves, and would have parts of them. Let devices own whole rows, "
                    '"owned" with form="stacks" and optim.per_leaf(tx), or write "whole"'
                )
            sizes = zip(entries[path], shape, found[path], strict=True)
            # What only grows, as a whole that they are joined to, is not split.
            entries[path] = [entry if size and larger == 2 * size else before for before, size, larger in sizes]
    return jtu.tree_unflatten(jtu.tree_structure(start), [tuple(entries[path]) for path, _ in paths])


def _with_keys(
    tree: Callable[[Sequence[Any]], PyTree], leaves: Sequence[jax.ShapeDtypeStruct], joined: Form | None
) -> tuple[PyTree, dict[Any, Any]]:
    """The parameters with these arrays, under keys that say their shapes, and which keys they had before."""
    if joined is None or joined.is_vector:
        return tree(leaves), {}
    names: dict[Any, Any] = {}
    stacks = tree(leaves)  # the groups that are empty, too
    for *group, key in joined.keys:
        (stacks[group[0]] if group else stacks).pop(key)
    for (*group, key), leaf in zip(joined.keys, leaves, strict=True):
        row = describe(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype))
        names[*group, row] = (*group, key)
        (stacks[group[0]] if group else stacks)[row] = leaf
    return stacks, names


def _renamed(path: tuple[Any, ...], names: Mapping[Any, Any]) -> tuple[Any, ...]:
    """A path with the names of stacks that it goes through as they are."""
    entries = [getattr(entry, "key", None) for entry in path]
    for width in {len(keys) for keys in names}:
        for i in range(len(path) - width + 1):
            old = names.get(tuple(entries[i : i + width]))
            if old is not None:
                return (*path[:i], *map(jtu.DictKey, old), *path[i + width :])
    return path
