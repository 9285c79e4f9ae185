"""tie, untie: a model in which one array is at several paths, or each path has its own."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.tree_util as jtu
from jax.core import Tracer

from ._slots.layout import Layout
from ._slots.said import declaring_nodes
from ._slots.ties import Alias, checked, find_ties, parameter_at
from ._slots.trainable import look_up
from ._slots.where import Where, select
from ._tree.copying import copy_leaf
from ._tree.lost_ties import keep_apart, note_said, note_ties, note_untied
from ._tree.recognise import structure_of

M = TypeVar("M")


def tie(
    model: M,
    alias: str | Layout | None = None,
    to: str | None = None,
    transform: Callable[[jax.Array], jax.Array] | None = None,
) -> M:
    """The model with its ties set: those that its classes declare, those of a layout, or one by identity.

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

    A tie without a transform is in the model itself: one array object at both paths. One with a transform is not, since
    an array cannot tell that it was computed from another: declare it in a class (`tp.field(tied_to=...)`,
    `tp.declare`), or give it to a layout (`tp.layout(model, ties=...)`).

    Whatever makes new arrays parts the two again: plain `jax.jit`, `jax.tree.map`, a cast, a file of Equinox.
    `tp.layout` and `tx.init` warn of it; tie them again, or use `tp.jit` and `treeparams.saving`, which keep ties.

    Args:
        model: any pytree.
        alias: the path of the parameter that is replaced. `None`: every alias that a class declares, as for a model
            that you have just built. A `Layout`: every alias that it knows.
        to: the path of the parameter whose value stays.
        transform: of a tie that a class declares so.

    Returns:
        The model; only the leaves at aliases are others.

    Raises:
        ValueError: a path names no parameter, shapes or dtypes disagree; a transform that is not declared; no path is
            given and no class declares a tie; the model does not fit the layout.
        TypeError: one of `alias` and `to` is given without the other.
    """
    leaves, treedef, structure = structure_of(model)
    if (alias is None or isinstance(alias, Layout)) and to is None and transform is None:
        known = find_ties(structure) if alias is None else look_up(structure, alias)[1].ties
        if alias is None and not known and not any(said.ties for _, said in declaring_nodes(structure)):
            raise ValueError(
                "no class in this model declares a tie; declare it, "
                'head: jax.Array = tp.field(tied_to="embed"), or name both paths, tp.tie(model, "head", to="embed")'
            )
    elif not isinstance(alias, str) or to is None:
        raise TypeError('tp.tie takes both paths, tp.tie(model, "head", to="embed"), or none for what classes declare')
    else:
        at, source = parameter_at(structure, alias), parameter_at(structure, to)
        linear = checked(structure, at, source, transform)
        known = [Alias(at, source, () if linear is None else (linear,))]
        if linear is not None and known[0] not in find_ties(structure):
            written = f"jnp.{linear}" if getattr(transform, "__module__", "") == "jax.numpy" else f"{linear}"
            raise ValueError(
                f"nothing would remember that {alias!r} is {linear} of {to!r}, and the first step would part them. "
                f'Declare it in the class, {alias}: jax.Array = tp.field(tied_to="{to}", transform={written}), or '
                f'give it to a layout, known = tp.layout(model, ties={{"{alias}": ("{to}", {written})}}), which '
                "tp.tie(model, known), tp.grad and the optimiser take"
            )
    for each in known:
        leaves[each.leaf] = each.value_from(leaves[each.source], structure.spec(each.source))
    # The memory of ties may have met this kind of model apart, and then ignores ties that it meets later (see `meet`):
    # so it is told of these.
    pairs = [(each.source, each.leaf) for each in known if not each.transforms]
    note_said(structure, pairs)
    if pairs and not isinstance(leaves[pairs[0][0]], Tracer):
        note_ties(structure, pairs)
    return jtu.tree_unflatten(treedef, leaves)


def untie(model: M, where: Where | None = None) -> M:
    """The model with an array of its own at every path of a tie.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.array([1.0, 2.0])
    >>> tp.layout(tp.untie({"a": shared, "b": shared})).ties
    {}

    Untying is a word of yours that is remembered: no warning says of such models, or of what you make of them, that a
    tie was lost. That holds too for two arrays that were one before `jax.jit` or the like parted them.

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
    note_untied(structure, [i for i in structure.parameters if structure.first[i] in sources])
    for i in structure.parameters:
        if structure.first[i] != i and structure.first[i] in sources:
            leaves[i] = copy_leaf(leaves[i])
    keep_apart(leaves)
    return jtu.tree_unflatten(treedef, leaves)
