"""Making, undoing and telling ties."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from ._average import copy_leaf
from ._groups import Transform, check_shapes, groups, parameter
from ._seen import structure_of
from ._select import Where, select


def tie(
    model: PyTree, alias: str | None = None, to: str | None = None, transform: Callable[[Any], Any] | None = None
) -> PyTree:
    """The model with the parameter at `alias` set to that at `to`; `tp.tie(model)` sets all ties that classes declare.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> model = tp.tie({"embed": jnp.ones((3, 2)), "head": jnp.zeros((3, 2))}, "head", to="embed")
    >>> model["head"] is model["embed"], tp.ties(model)
    (True, {'embed': ('head',)})

    Without a transform the tie is in the model itself: one array object at both paths. With one, the alias holds the
    transformed array, so that the model can be called, but an array cannot tell where it comes from: say it again where
    the layout is made, `tp.layout(model, ties={alias: (to, transform)})`, or once for a class with `tp.declare`.

    Args:
        model: any pytree.
        alias: the path of the parameter that is replaced. `None`, without `to`: every alias that a class declares, as
            for a model that was just built.
        to: the path of the parameter whose value stays.
        transform: a linear function at module level, as for `tp.layout`.

    Returns:
        The model; only the leaf at `alias` is another.

    Raises:
        ValueError: a path names no parameter, shapes or dtypes disagree, or the transform is not linear.
        TypeError: one of `alias` and `to` is given without the other.
    """
    leaves, treedef, structure = structure_of(model)
    if alias is None and to is None and transform is None:
        for group in groups(structure):
            for place in group.aliases:
                leaves[place.leaf] = place.fill(leaves[group.source], structure.spec(group.source))
        return jtu.tree_unflatten(treedef, leaves)
    if alias is None or to is None:
        raise TypeError('tp.tie takes both paths, tp.tie(model, "head", to="embed"), or none for what classes declare')
    at, source = parameter(structure, alias), parameter(structure, to)
    linear = None if transform is None else Transform(transform)
    check_shapes(structure, at, source, linear)
    leaves[at] = leaves[source] if linear is None else linear(leaves[source])
    return jtu.tree_unflatten(treedef, leaves)


def untie(model: PyTree, where: Where | None = None) -> PyTree:
    """The model with an array of its own at every path of a tie.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.ones(2)
    >>> tp.ties(tp.untie({"a": shared, "b": shared}))
    {}

    Args:
        model: any pytree.
        where: the ties to undo, by any of their paths; `None`: all. Ties that a class declares are not in the model and
            stay.

    Returns:
        The model; the first path of each tie keeps its array, the others get copies.

    Raises:
        ValueError: `where` selects nothing.
    """
    leaves, treedef, structure = structure_of(model)
    chosen = frozenset(structure.parameters) if where is None else select(structure, where)
    sources = {structure.first[i] for i in chosen}
    for i in structure.parameters:
        if structure.first[i] != i and structure.first[i] in sources:
            leaves[i] = copy_leaf(leaves[i])
    return jtu.tree_unflatten(treedef, leaves)


def ties(model: PyTree) -> Mapping[str, tuple[str, ...]]:
    """Which parameters are one, by identity or as declared.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.ones(2)
    >>> tp.ties({"a": shared, "b": [shared, jnp.ones(2)]})
    {'a': ('b.0',)}

    Inside a `jax.jit` or `equinox.filter_jit` the arguments have lost their identity: see `tp.layout`.

    Args:
        model: any pytree.

    Returns:
        `{path: (aliases, ...)}`, frozen parameters included.

    Raises:
        ValueError: declared ties contradict each other.
    """
    _, _, structure = structure_of(model)
    paths = structure.paths
    return {paths[group.source]: tuple(paths[alias.leaf] for alias in group.aliases) for group in groups(structure)}
