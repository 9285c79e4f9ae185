"""Reads `{where: value}` inside plain Optax: finds the entry of each parameter of a canonical tree, and checks it.

A rule inside `optim.trainable` sees only the trained parameters. So entries are read in the tree that the rule sees,
and checked in the whole model, which `init` has.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from .._slots.index import Index
from .._slots.rules import first_entries
from .._slots.said import declaring_nodes
from .._slots.ties import find_ties
from .._slots.where import Where, name_of
from .._tree.declare import read_source
from .._tree.paths import join_path, key_entries, split_path
from .._tree.recognise import structure_of
from .._tree.static_keys import contents
from .._tree.types import PyTree


class Keys:
    """The keys of entries in a state, for the check at `init`.

    All are equal, and a pickled copy has none, so that programs and files do not depend on functions that select.
    """

    def __init__(self, wheres: Sequence[Where] = (), by_parameter: Callable[..., PyTree] | None = None) -> None:
        self.wheres = tuple(wheres)
        self.by_parameter = by_parameter  # reads factors by parameter in one update, see `told`

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys)

    def __hash__(self) -> int:
        return 0

    def __reduce__(self) -> Any:
        return Keys, ()


contents[Keys] = lambda _: ()


def entries_of(params: PyTree, wheres: Sequence[Where], *, is_whole: bool = False) -> dict[str, int]:
    """Returns the number of the entry that selects each parameter of a canonical tree; others are left out.

    You may name a tie that a class declares by either end, although the tree has nothing at its alias. If the tree is
    not a whole model, an entry may select nothing.
    """
    structure = structure_of(_with_aliases(params))[2]
    index = Index(structure, (True,) * len(structure.specs), find_ties(structure))
    found = first_entries(index, wheres, asked=None if is_whole else (), may_be_empty=not is_whole)
    return {structure.paths[leaf]: number for leaf, number in found.items()}


def check_entries(index: Index, keys: Keys, numbers: Mapping[str, int | None]) -> None:
    """Checks entries in the whole model, and that each parameter has the entry that the rule found for it."""
    found = first_entries(index, keys.wheres)
    for leaf in index.positions:
        path = index.structure.paths[leaf]
        if path in numbers and numbers[path] != found.get(leaf):
            name = name_of(keys.wheres[found[leaf]])
            raise ValueError(
                f"{name} names {path!r} by an alias that only a layout has, and the optimiser does not see it; write "
                f"{path!r}, or declare the tie in its class"
            )


def _with_aliases(params: PyTree) -> PyTree:
    """Returns the tree as shapes, with further ones at the aliases that its classes declare."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    structure, aliases = structure_of(shapes)[2], dict[str, Any]()
    for node, said in declaring_nodes(structure):
        for alias, source in said.ties.items():
            path, transform = read_source(source, node.cls.__qualname__)
            at = structure.index.get(join_path((*node.entries, *split_path(path))))
            if at is not None:
                shape = jax.ShapeDtypeStruct(*structure.spec(at)[:2])
                there = join_path((*node.entries, *split_path(alias)))
                aliases[there] = shape if transform is None else jax.eval_shape(transform, shape)
    if not aliases:
        return shapes
    pairs, treedef = jtu.tree_flatten_with_path(shapes, is_leaf=lambda node: node is None)
    paths = [join_path(key_entries(keys)) for keys, _ in pairs]
    leaves = [aliases.get(path) if leaf is None else leaf for path, (_, leaf) in zip(paths, pairs, strict=True)]
    return jtu.tree_unflatten(treedef, leaves)
