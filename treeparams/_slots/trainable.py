"""layout: from what a user passes as `trainable` - nothing, a mask, a `where`, a layout - to the layout it means."""

import functools
import re
from collections.abc import Sequence
from typing import Any

from .._tree.declare import Given
from .._tree.difference import compare, spec_rows
from .._tree.lost_ties import given_to, likeness, note_given, warn_of_lost_ties
from .._tree.messages import warn
from .._tree.recognise import structure_of
from .._tree.structure import Structure
from .._tree.text import first_few, first_lines
from .._tree.types import PyTree
from .index import Index
from .layout import Layout, Trainable, changed, index_of, relaid
from .ties import find_ties, settle
from .where import Where, change, choose


def layout(
    model: PyTree,
    trainable: Trainable = None,
    *,
    freeze: Where | None = None,
    thaw: Where | None = None,
    ties: Given | None = None,
) -> Layout:
    """The static map of a model: which leaves are trained and which of them are one.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> tp.layout(mlp, "!layers.0").paths, tp.layout(mlp, freeze="layers.0").paths  # the same in two ways
    (('layers.1.weight', 'layers.1.bias'), ('layers.1.weight', 'layers.1.bias'))

    Two paths with the same array object are one parameter. So is an alias that a class declares (`tp.field`), or one
    that is passed:

    >>> codec = {"encoder": jnp.ones((2, 3)), "decoder": jnp.ones((3, 2))}
    >>> print(tp.layout(codec, ties={"decoder": ("encoder", jnp.transpose)}))
    path     key           row  offset  size  tied to
    encoder  float32[2,3]    0       0     6  decoder (transpose)
    1 slot, 6 elements, 24 bytes

    **Inside `jax.jit`, `vmap`, `scan`, `equinox.filter_jit` and the like a model passed as an argument has lost its
    ties by identity**: JAX hands over a separate tracer for each leaf. Make the layout outside and pass it in: it is
    static, and every function of this library takes it as its `trainable`.

    >>> shared = jnp.ones(2)
    >>> tied = {"a": shared, "b": shared}
    >>> known = tp.layout(tied)
    >>> jax.jit(lambda model: tp.grad(lambda m: jnp.sum(m["a"] + m["b"]), known)(model))(tied)
    {'a': Array([2., 2.], dtype=float32), 'b': None}

    The other ways through are `tp.partition`, `tp.ravel` and `tp.jit`, and ties that a class declares.

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

    A `where` is a glob over paths (`"layers.*.bias"`, `"**.bias"`; one that matches a node selects all below it, one
    that starts with `!` takes away), a compiled regex that matches a whole path, a class, `tp.leaves(predicate)`, a
    callable from the model to nodes of it, or a sequence of these.

    Returns:
        The layout.

    Raises:
        ValueError: a `where` selects nothing, or a mask has another structure; a tie is trained at one path and
            frozen at another, or its ends do not agree; the model is cyclic; it does not fit the given `Layout`.
        TypeError: `trainable` is none of these; a field declared trained holds what cannot be.

    Warns:
        UserWarning: the model is traced, and one of its structure was met before with ties that it no longer has.
    """
    leaves, _, structure = structure_of(model)
    if freeze is None and thaw is None and ties is None:
        return look_up(structure, trainable, leaves)[0]
    if isinstance(trainable, Layout):
        if ties is not None:
            raise ValueError("the Layout passed as `trainable` has its ties already; give `ties` where it is made")
        return changed(look_up(structure, trainable)[0], freeze, thaw)
    made = _make(structure, trainable, freeze, thaw, ties)
    if ties is not None:
        note_given(structure, index_of(made).ties)
    if structure.is_traced:
        warn_of_lost_ties(structure, leaves, index_of(made).sources, index_of(made).trained)
    return made


def warn_of_forgotten_ties(index: Index) -> None:
    """Warns, once, of ties that another layout of such models was given, where they part in training."""
    given = given_to(index.structure)
    if not given:
        return
    paths, trained = index.structure.paths, index.trained
    is_seen = lambda tie: tie.transforms or not index.structure.is_traced  # else `warn_of_lost_ties` looks at it
    root = lambda leaf: index.sources.get(leaf, leaf)  # it may be the other of two that is named as source
    known = lambda tie: tie.leaf in index.follows or root(tie.leaf) == root(tie.source)
    parts = lambda tie: (trained[tie.leaf] or trained[tie.source]) and not known(tie)
    names = [f"{paths[tie.leaf]!r} to {paths[tie.source]!r}" for tie in given if is_seen(tie) and parts(tie)]
    if names:
        warn(
            f"a layout of such a model ties {first_few(names)}; without it they are trained apart. Pass it in (known = "
            "tp.layout(model, ties=...); tp.grad(loss, known), optim.trainable(tx, known)), or, where they are to "
            "part, tp.layout(model)",
            about=(*likeness(index.structure), *names),
        )


def look_up(structure: Structure, trainable: Trainable, leaves: Sequence[Any] | None = None) -> tuple[Layout, Index]:
    """The layout that `trainable` means for models of a structure, and where everything lies in these very models.

    With the leaves of a traced model, ties that it has lost are warned of.
    """
    if isinstance(trainable, Layout):
        index = index_of(trainable)
        if index.structure is not structure:
            index = structure.remember(trainable, lambda: _index_for(structure, trainable))
        return trainable, index
    # Only what is sure to mean the same at the next call is remembered; a callable may close over what changes.
    if trainable is None or isinstance(trainable, (str, re.Pattern, type)):
        found = structure.remember(("layout", trainable), functools.partial(_make, structure, trainable))
    else:
        found = _make(structure, trainable)
    index = index_of(found)
    if structure.is_traced and leaves is not None:
        warn_of_lost_ties(structure, leaves, index.sources, index.trained)
    return found, index


def _make(
    structure: Structure, trainable: Any, freeze: Any = None, thaw: Any = None, given: Given | None = None
) -> Layout:
    ties = find_ties(structure, given)
    follows = {alias.leaf: alias.source for alias in ties if alias.transforms}
    said = choose(structure, follows, trainable)
    if freeze is not None or thaw is not None:
        change(structure, follows, said, freeze, False)
        change(structure, follows, said, thaw, True)
    return Layout(Index(structure, settle(structure, ties, said), ties))


def retrained(layout: Layout, trainable: Trainable) -> Layout:
    """Reads `trainable` for the models of a layout, whose ties stay: arrays in a trace no longer tell them."""
    index = index_of(layout)
    if not isinstance(trainable, Layout):
        return relaid(layout, choose(index.structure, index.follows, trainable))
    other = index_of(trainable)
    if (other.structure, other.ties) != (index.structure, index.ties):
        lines = [row.in_words() for row in layout.diff(trainable).rows]
        raise ValueError(
            "expected a layout of the same models and ties, such as state.layout.freeze(where) or .thaw(where); they "
            f"differ:\n{first_lines(lines)}"
        )
    return trainable


def _index_for(structure: Structure, layout: Layout) -> Index:
    """The `Index` of models of a structure that may differ from the layout's in what is one array."""
    index = index_of(layout)
    want = index.structure
    # Where the layout has a value, the model may have an array: a Python number that `jit` has made a tracer.
    fits = all(a is None or a == b for a, b in zip(want.specs, structure.specs, strict=False))
    if not fits or want.entries != structure.entries or not want.has_statics_of(structure):
        at_leaves = lambda i, j: [] if want.specs[i] is None else spec_rows(want, structure, i, j)
        lines = [row.in_words() for row in compare(want, structure, at_leaves)]
        raise ValueError(
            "the model does not fit the layout (the first below; the model is the second); make the layout from this "
            f"model, tp.layout(model):\n{first_lines(lines)}"
        )
    for i in structure.parameters:
        first = structure.first[i]
        if first != i and index.sources.get(first, first) != index.sources.get(i, i):
            paths = structure.paths
            raise ValueError(
                f"the model does not fit the layout: {paths[first]!r} and {paths[i]!r} are one array, which the "
                f"layout does not know; make it from this model, or with ties={{{paths[i]!r}: {paths[first]!r}}}"
            )
    return Index(structure, index.trained, index.ties)
