"""From what a user passes - a model and `trainable=` in any of its forms - to leaves and a layout."""

import re
from typing import Any, NamedTuple

from jaxtyping import PyTree

from ._describe import differences
from ._groups import Given, groups, settle
from ._layout import Layout
from ._seen import structure_of
from ._select import Where, change, choose
from ._structure import Structure


class Resolved(NamedTuple):
    """A model taken apart, and the layout that says what its leaves are."""

    leaves: list[Any]
    treedef: Any
    structure: Structure  # of this very model; the layout's may have been made from another, or outside of a trace
    layout: Layout


def layout(
    model: PyTree,
    trainable: Any = None,
    *,
    freeze: Where | None = None,
    thaw: Where | None = None,
    ties: Given | None = None,
) -> Layout:
    """The static map of a model: which leaves are trained and which of them are one.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> tp.layout(mlp, freeze="layers.0").paths
    ('layers.1.weight', 'layers.1.bias')

    Two paths with the same array object are one parameter. So is an alias that is given, or declared on a class:

    >>> codec = {"encoder": jnp.ones((2, 3)), "decoder": jnp.ones((3, 2))}
    >>> print(tp.layout(codec, ties={"decoder": ("encoder", jnp.transpose)}))
    path     shape  dtype    offset  size  tied to
    encoder  2,3    float32       0     6  decoder (transpose)
    1 slot, 6 elements, 24 bytes

    **Inside `jax.jit`, `vmap`, `scan`, `equinox.filter_jit` and the like a model passed as an argument has lost its
    ties**: JAX hands over a separate tracer for each leaf. Make the layout outside and pass it in: it is static, and
    every function of this library takes it as its `trainable`.

    >>> shared = jnp.ones(2)
    >>> tied = {"a": shared, "b": shared}
    >>> known = tp.layout(tied)
    >>> jax.jit(lambda model: tp.grad(lambda m: jnp.sum(m["a"] + m["b"]), known)(model))(tied)
    {'a': Array([2., 2.], dtype=float32), 'b': None}

    The other ways through are `tp.partition`, `tp.ravel` and `tp.jit`.

    Args:
        model: any pytree; its leaves may be `jax.ShapeDtypeStruct`s (then there are no ties by identity).
        trainable: `None`: what the classes declare (`tp.field`, `tp.declare`); everything else is trained. A mask, a
            tree of the model's structure with a bool at every leaf: trained where `True`, whatever is declared; it is
            ignored at leaves that are no parameters. A `where`: only what it selects, of what is not declared frozen.
            A `Layout`: that one, after a check that the model fits it.
        freeze: a `where`; what it selects is frozen.
        thaw: a `where`, after `freeze`; what it selects is trained, also where a class declares it frozen.
        ties: `{alias: path}` or `{alias: (path, transform)}`; the array at the alias is that at the path, or a linear
            function of it. The function is one at module level or a `functools.partial` of one. Where the parameter is
            frozen its aliases stay as the model has them.

    A `where` is a glob over paths (`"layers.*.bias"`, `"**.bias"`; one that matches a node selects all below it), a
    compiled regex that matches a whole path, a class, a callable from the model to nodes of it, or a sequence of these.

    Returns:
        The layout.

    Raises:
        ValueError: a `where` selects nothing, or a mask has another structure; a tie is trained at one path and
            frozen at another, or its ends do not agree; the model is cyclic; it does not fit the given `Layout`.
        TypeError: `trainable` is none of these; a field declared trained holds what cannot be.
    """
    if isinstance(trainable, Layout):
        given = resolve(model, trainable).layout
        if ties is not None:
            raise ValueError("the Layout passed as `trainable` has its ties already; give `ties` where it is made")
        return given if freeze is None and thaw is None else given.changed(freeze, thaw)
    _, _, structure = structure_of(model)
    return _layout(structure, trainable, freeze, thaw, ties)


def trainable(model: PyTree, where: Any = None) -> PyTree[bool]:
    """A mask of what is trained: `tp.layout(model, where).mask`.

    >>> import equinox as eqx, jax, treeparams as tp
    >>> linear = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    >>> tp.trainable(linear, "bias").weight
    False
    >>> trained, frozen = eqx.partition(linear, tp.trainable(linear, "bias"))

    For Optax write `optax.masked(tx, lambda _: mask)`: it *calls* a mask that is callable, as a Module may be.

    Args:
        model: any pytree.
        where: as `trainable` of `tp.layout`.

    Returns:
        A tree of the model's structure: `True` at every trained parameter, aliases included, `False` elsewhere.

    Raises:
        ValueError: as `tp.layout`.
        TypeError: as `tp.layout`.
    """
    return layout(model, where).mask


def resolve(model: PyTree, trainable: Any) -> Resolved:
    """The leaves of a model and the layout that `trainable` means for it."""
    leaves, treedef, structure = structure_of(model)
    if isinstance(trainable, Layout):
        _check_fit(trainable, structure)
        return Resolved(leaves, treedef, structure, trainable)
    return Resolved(leaves, treedef, structure, _layout(structure, trainable, None, None, None))


def retrained(known: Layout, trainable: Any) -> Layout:
    """What `trainable` means for the models of a layout, whose ties stay: arrays in a trace no longer tell them.

    Raises:
        ValueError: a `Layout` of other models or other ties; as `tp.layout`.
        TypeError: as `tp.layout`.
    """
    if not isinstance(trainable, Layout):
        trained = settle(known.structure, known.groups, choose(known.structure, trainable))
        return Layout(known.structure, trained, known.groups, known.packing)
    if trainable.structure != known.structure or trainable.groups != known.groups:
        raise ValueError(f"expected a layout of the same models and ties; they differ:\n{known.diff(trainable)}")
    return trainable


def _layout(structure: Structure, trainable: Any, freeze: Any, thaw: Any, ties: Given | None) -> Layout:
    stated = (trainable, freeze, thaw)
    if ties is not None or not all(map(_is_constant, stated)):
        return _make(structure, trainable, freeze, thaw, ties)
    return structure.remember(("layout", *stated), lambda: _make(structure, *stated, None))


def _make(structure: Structure, trainable: Any, freeze: Any, thaw: Any, ties: Given | None) -> Layout:
    choice = choose(structure, trainable)
    choice = change(structure, choice, freeze, False)
    choice = change(structure, choice, thaw, True)
    found = groups(structure, ties)
    return Layout(structure, settle(structure, found, choice), found)


def _is_constant(where: Any) -> bool:
    # What is sure to mean the same at the next call; a callable may close over what changes.
    return where is None or isinstance(where, (str, re.Pattern, type))


def _check_fit(layout: Layout, structure: Structure) -> None:
    if structure is not layout.structure:
        structure.remember(("fits", layout), lambda: _compare(layout, structure))


def _compare(layout: Layout, structure: Structure) -> None:
    if not _same_leaves(layout.structure, structure):
        lines = "\n".join(differences(layout.structure, structure, as_template=True))
        raise ValueError(f"the model does not fit the layout (the first below; the model is the second):\n{lines}")
    for i in structure.parameters:
        first = structure.first[i]
        if first != i and layout.by_leaf.get(first) != layout.by_leaf.get(i):
            paths = structure.paths
            raise ValueError(
                f"the model does not fit the layout: {paths[first]!r} and {paths[i]!r} are one array, which the "
                f"layout does not know; make it from this model, or with ties={{{paths[i]!r}: {paths[first]!r}}}"
            )


def _same_leaves(want: Structure, have: Structure) -> bool:
    # Where the layout has a value, the model may have an array: a Python number that `jit` has made a tracer.
    return (
        want.paths == have.paths
        and want.statics == have.statics
        and all(a is None or a == b for a, b in zip(want.specs, have.specs, strict=True))
    )
