"""tie, untie: put one array at several paths of a model, or a separate array at each path."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax.tree_util as jtu

from ._slots.accidents import keep_apart, note_ties, note_untied
from ._slots.layout import Layout, look_up
from ._slots.ties import Alias, find_ties, tie_between
from ._slots.where import Where, select
from ._tree.structure import structure_of
from ._tree.types import copy_leaf

M = TypeVar("M")


def tie(
    model: M, alias: str | Layout | None = None, to: str | None = None, transform: Callable[..., Any] | None = None
) -> M:
    """Sets the ties of a model: those that its classes declare, those of a layout, or the one that you name.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> class Codec(eqx.Module):
    ...     encoder: jax.Array
    ...     decoder: jax.Array = tp.field(tied_to="encoder", transform=jnp.transpose)
    >>> codec = tp.tie(Codec(jnp.ones((3, 2)), jnp.zeros((2, 3))))  # as the class declares
    >>> print(codec.decoder[0])
    [1. 1. 1.]
    >>> model = tp.tie({"embed": jnp.ones((3, 2)), "head": jnp.zeros((3, 2))}, "head", to="embed")
    >>> model["head"] is model["embed"], tp.layout(model).ties["embed"]
    (True, ('head',))

    A tie without a transform is part of the model: one array object is at both paths. A tie with a transform is not,
    because an array does not show that it was computed from another one. Declare it in a class
    (`tp.field(tied_to=...)`, `tp.declare`), or pass it to a layout (`tp.layout(model, ties=...)`).

    Functions that make new arrays break the tie again: plain `jax.jit`, `jax.tree.map`, a cast, a file of Equinox.
    `tp.layout` and `tx.init` warn you. Tie the parameters again, or use `tp.jit` and `treeparams.saving`, which keep
    ties.

    Args:
        model: any pytree.
        alias: the path of the parameter to replace. `None` sets every alias that a class declares; use it for a model
            that you have just built. A `Layout` sets every alias that it records.
        to: the path of the parameter whose value is kept.
        transform: the transform of a tie that a class declares with it.

    Returns:
        The model, in which only the leaves at aliases have changed.

    Raises:
        ValueError: a path names no parameter; shapes or dtypes disagree; the transform is not declared; you passed no
            path and no class declares a tie; the model does not fit the layout.
        TypeError: you passed only one of `alias` and `to`.
    """
    leaves, treedef, structure = structure_of(model)
    if (alias is None or isinstance(alias, Layout)) and to is None and transform is None:
        known = find_ties(structure) if alias is None else look_up(structure, alias)[1].ties
        if alias is None and not known and not any(said.ties for _, said in structure.declaring):
            how = 'declare it, head: jax.Array = tp.field(tied_to="embed")'
            remedy = f'{how}, or name both paths, tp.tie(model, "head", to="embed")'
            raise ValueError(f"no class in this model declares a tie; {remedy}")
    elif not isinstance(alias, str) or to is None:
        both = 'both paths, tp.tie(model, "head", to="embed")'
        raise TypeError(f"tp.tie needs {both}, or none, tp.tie(model), for declared ties")
    else:
        at, source, linear = tie_between(structure, alias, to, transform)
        known = [Alias(at, source, () if linear is None else (linear,))]
        if linear is not None and known[0] not in find_ties(structure):
            written = f"jnp.{linear}" if getattr(transform, "__module__", "") == "jax.numpy" else f"{linear}"
            what = f"an array cannot record that {alias!r} is {linear} of {to!r}, so a step would break the tie"
            how = f'Declare it in the class, {alias}: jax.Array = tp.field(tied_to="{to}", transform={written})'
            known = f'known = tp.layout(model, ties={{"{alias}": ("{to}", {written})}})'
            passed = f"pass it to a layout, {known}, and that to tp.tie(model, known), tp.grad and the optimiser"
            raise ValueError(f"{what}. {how}, or {passed}")
    for each in known:
        leaves[each.leaf] = each.value_from(leaves[each.source], structure.spec(each.source))
    note_ties(structure, [(each.source, each.leaf) for each in known if not each.transforms], is_said=True)
    return jtu.tree_unflatten(treedef, leaves)


def untie(model: M, where: Where | None = None) -> M:
    """Returns the model with a separate array at every path of a tie.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.array([1.0, 2.0])
    >>> tp.layout(tp.untie({"a": shared, "b": shared})).ties
    {}

    The library remembers that you untied the parameters. It does not warn about a lost tie for this model, nor for
    models that you make from it, even if `jax.jit` or the like had already broken the tie.

    Args:
        model: any pytree.
        where: the ties to undo, selected by any of their paths; `None` means all. Ties that a class declares remain
            declared.

    Returns:
        The model. The first path of each tie keeps its array, the others get copies.

    Raises:
        ValueError: `where` selects nothing.
    """
    leaves, treedef, structure = structure_of(model)
    chosen = frozenset(structure.parameters) if where is None else select(structure, where)
    sources = {structure.first[i] for i in chosen}
    note_untied(structure, [i for i in structure.parameters if structure.first[i] in sources])
    for i in structure.parameters:
        if structure.first[i] != i and structure.first[i] in sources:
            leaves[i] = copy_leaf(leaves[i])
    keep_apart(leaves)
    return jtu.tree_unflatten(treedef, leaves)
