"""Other trees - gradients, averages, partial ones, other types - matched by path to a model's slots."""

import functools
import operator
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._groups import Alias
from ._layout import Layout
from ._paths import nearest, unquote
from ._seen import structure_of
from ._structure import Structure, common_dtype, describe, flatten, same_treedef

Tied = Literal["sum", "first"] | None


def per_slot(layout: Layout, tree: PyTree, tied: Tied, *, exact_shapes: bool = False) -> list[Any]:
    """What another tree has for each slot; `None` where it has nothing.

    Args:
        layout: of the model.
        tree: a tree with entries at paths of the model.
        tied: what several entries at one tie mean: `"sum"` (gradients) or `"first"` (values).
        exact_shapes: whether each entry must have its leaf's shape.

    Raises:
        ValueError: an entry where the model has no leaf; several at one tie without `tied`; another shape.
    """
    if tied not in ("sum", "first", None):
        raise ValueError(f'tied must be "sum" (gradients), "first" (values) or None, got {tied!r}')
    found = _entries(layout, tree)
    if exact_shapes:
        for leaf, value in found.items():
            check_shape(layout, leaf, value)
    return [
        _one(layout, found, position, aliases, tied) if aliases else found.get(position)
        for position, aliases in zip(layout.positions, layout.aliases, strict=True)
    ]


def read_slots(layout: Layout, tree: PyTree, *, exact_shapes: bool = False) -> list[Any]:
    """The values of the slots in a tree that has them all, as a model of another type has.

    Raises:
        ValueError: a slot is missing; an entry where the model has no leaf; another shape.
    """
    values = per_slot(layout, tree, "first", exact_shapes=exact_shapes)
    missing = [slot.path for slot, value in zip(layout.slots, values, strict=True) if value is None]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"expected an array for each of the {len(values)} trained parameters, found none for "
            f"{', '.join(map(repr, missing[:3]))}{more}"
        )
    if exact_shapes:
        for slot, value in zip(layout.slots, values, strict=True):
            if jnp.iscomplexobj(value) and not jnp.issubdtype(slot.dtype, jnp.complexfloating):
                raise TypeError(f"expected a real {slot.dtype} at {slot.path!r}, got {describe(value)}")
    return values


def check_shape(layout: Layout, leaf: int, value: Any) -> None:
    """Checks that a value has the shape of its leaf.

    Raises:
        ValueError: it has another.
        TypeError: it is no number or array of numbers.
    """
    spec, path = layout.structure.spec(leaf), layout.structure.paths[leaf]
    if not isinstance(value, (bool, int, float, complex)) and not hasattr(value, "shape"):
        raise TypeError(f"expected an array at {path!r}, got {describe(value)}")
    if jnp.shape(value) != spec.shape:
        got = describe(value) if hasattr(value, "dtype") else f"{describe(value)} of shape {jnp.shape(value)}"
        raise ValueError(f"expected {describe(spec)} at {path!r}, got {got}")


def _entries(layout: Layout, tree: PyTree) -> dict[int, Any]:
    """The entries of a tree by leaf of the model, at trained parameters."""
    leaves, treedef = flatten(tree)
    if same_treedef(treedef, layout.canonical_treedef):
        pairs = zip(layout.positions, leaves, strict=True)
    elif same_treedef(treedef, layout.structure.treedef):
        pairs = ((leaf, leaves[leaf]) for leaf in layout.by_leaf)
    else:
        pairs = _by_path(layout, tree)
    return {leaf: value for leaf, value in pairs if getattr(value, "dtype", None) != jax.dtypes.float0}


def _by_path(layout: Layout, tree: PyTree) -> list[tuple[int, Any]]:
    leaves, _, structure = structure_of(tree)
    index = layout.structure.index
    paths = structure.paths
    if any(path not in index for path in paths):
        paths = _named(index, structure) or paths
    unknown = [path for path in paths if path not in index]
    if unknown:
        nodes = {node.path for node in layout.structure.nodes}
        has = "a node" if unknown[0] in nodes else "no leaf"
        raise ValueError(
            f"the tree has an entry at {unknown[0]!r}, where the model has {has}"
            f"{nearest(unknown[0], layout.structure.paths)}"
        )
    pairs = ((index[path], value) for path, value in zip(paths, leaves, strict=True))
    return [(leaf, value) for leaf, value in pairs if leaf in layout.by_leaf]


def _named(index: Mapping[str, int], tree: Structure) -> list[str] | None:
    """The keys of a dictionary all of which are whole paths, as of `tp.trainables`; `None` of any other tree."""
    if any(len(entries) != 1 for entries in tree.entries):
        return None
    # Such a key is one entry of the dictionary that may hold dots, and so stands in quotes.
    paths = [unquote(path) for path in tree.paths]
    return paths if all(path in index for path in paths) else None


def _one(layout: Layout, found: dict[int, Any], position: int, aliases: tuple[Alias, ...], tied: Tied) -> Any:
    entries = [(place, found[place.leaf]) for place in (Alias(position, ()), *aliases) if place.leaf in found]
    if not entries:
        return None
    only_computed = bool(entries[0][0].chain)  # so says nothing of the source's own value
    if (len(entries) > 1 and tied is None) or (only_computed and tied != "sum"):
        raise ValueError(_ambiguous(layout, position, [place for place, _ in entries], tied))
    if tied != "sum" or (len(entries) == 1 and not only_computed):
        return entries[0][1]
    source = layout.structure.spec(position)
    values = []
    for place, value in entries:
        if place.chain:
            check_shape(layout, place.leaf, value)
        values.append(place.pull_back(value, source))
    dtype = common_dtype(jnp.result_type(value) for value in values)
    return functools.reduce(operator.add, [jnp.asarray(value, dtype) for value in values])


def _ambiguous(layout: Layout, position: int, places: list[Alias], tied: Tied) -> str:
    paths = [layout.structure.paths[place.leaf] for place in places]
    source = layout.structure.paths[position]
    if tied == "first":
        return f"the tree has a value at {paths[0]!r} only, which is computed from {source!r}; give it at {source!r}"
    return (
        f"the tree has entries at {paths}, which are one parameter, {source!r}. Say what they mean: "
        'tied="sum" adds them, as is right for gradients, tied="first" takes the first, as is right for values'
    )
