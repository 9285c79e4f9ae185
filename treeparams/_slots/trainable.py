"""layout: turns the argument `trainable` - nothing, a mask, a `where`, a layout - into a layout."""

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from .._tree.declare import Given
from .._tree.difference import Difference, compare, spec_rows
from .._tree.memory import note_ties
from .._tree.recognise import structure_of
from .._tree.structure import Structure
from .._tree.text import describe, first_lines
from .._tree.types import PyTree
from .accidents import warn_of_accidents, warn_of_parted_ties
from .index import Index
from .layout import Layout, Trainable, changed, index_of, relaid
from .said import change, choose
from .ties import find_ties, followers, settle
from .untrained import refuse_refs, warn_of_floats
from .where import Where


def layout(
    model: PyTree,
    trainable: Trainable = None,
    *,
    freeze: Where | None = None,
    thaw: Where | None = None,
    ties: Given | None = None,
) -> Layout:
    """Makes the static map of a model: which parameters are trained, and which are tied.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> tp.layout(mlp, "!layers.0").paths, tp.layout(mlp, freeze="layers.0").paths  # the same in two ways
    (('layers.1.weight', 'layers.1.bias'), ('layers.1.weight', 'layers.1.bias'))

    Two paths with the same array object are one parameter. (If all elements of that array are equal, like zeros that
    two biases start with, you get a warning that asks whether you mean it: use `tp.untie` or `tp.tie`.) An alias that a
    class declares (`tp.field`), or that you pass, is tied as well:

    >>> codec = {"encoder": jnp.ones((2, 3)), "decoder": jnp.ones((3, 2))}
    >>> print(tp.layout(codec, ties={"decoder": ("encoder", jnp.transpose)}))
    path     key           row  offset  size  tied to
    encoder  float32[2,3]    0       0     6  decoder (transpose)
    1 slot, 6 elements, 24 bytes

    **Inside `jax.jit`, `vmap`, `scan`, `equinox.filter_jit` and the like, a model passed as an argument has lost its
    ties by identity**: JAX passes a separate tracer for each leaf. Make the layout outside and pass it in. It is
    static, and every function of this library accepts it as `trainable`.

    >>> shared = jnp.array([1.0, 2.0])
    >>> tied = {"a": shared, "b": shared}
    >>> known = tp.layout(tied)
    >>> jax.jit(lambda model: tp.grad(lambda m: jnp.sum(m["a"] + m["b"]), known)(model))(tied)
    {'a': Array([2., 2.], dtype=float32), 'b': None}

    You can also use `tp.partition`, `tp.ravel` or `tp.jit`, or declare the ties in a class.

    Args:
        model: any pytree; its leaves may be `jax.ShapeDtypeStruct`s (then there are no ties by identity).
        trainable: `None` trains all parameters except those that classes declare frozen (`tp.field`, `tp.declare`). A
            mask is a tree of the model's structure with a bool at every leaf: a parameter is trained where it is
            `True`, whatever is declared; leaves that are not parameters are ignored. A `where` trains only the
            parameters that it selects and that are not declared frozen. A `Layout` is used as it is, after a check that
            the model fits it.
        freeze: a `where` of parameters to freeze.
        thaw: a `where` of parameters to train, applied after `freeze`, even if a class declares them frozen.
        ties: `{alias: path}` or `{alias: (path, transform)}`. The array at the alias is the one at the path, or a
            linear function of it. The function must be defined at module level, or be a `functools.partial` of one that
            is. If the parameter is frozen, its aliases keep the arrays that the model has.

    A `where` is a glob over paths (`"layers.*.bias"`, `"**.bias"`, `"layers.-1"`), a compiled regex that matches a
    whole path, a class, `tp.leaves(predicate)`, a callable from the model to nodes of it, or a sequence of these. A
    glob that matches a node selects everything below it; a glob that starts with `!` excludes its matches. To select a
    tie that a class declares or that you pass, select its source, or only an alias. A `where` that selects the alias
    and other leaves, as `"decoder"` does if the decoder has a bias too, does not change the tie. If one array is at
    several paths, select all of them.

    Returns:
        The layout.

    Raises:
        ValueError: a `where` selects nothing; a mask has another structure; a tied parameter is trained at one path and
            frozen at another; the shapes or dtypes of a tie do not match; a ref (`jax.new_ref`) would be trained; the
            model is cyclic; it does not fit the given `Layout`.
        TypeError: `trainable` is none of these; a field declared trained holds no floating or complex array.

    Warns:
        UserWarning: once for each kind of model, in any of these cases. The model is traced, and the library has met a
            model of its structure with ties that this one no longer has. The model is not traced, and one array has
            become two that are equal bit for bit. Trained paths hold one array whose elements are all equal, although
            nothing (a class, `ties`, `tp.tie`) ties them and they are not part of a layer that is used twice. The model
            is a list, tuple or dictionary of the same node, repeated. A Python float, which does not train, is beside
            parameters in a dict, list or tuple.
    """
    leaves, _, structure = structure_of(model)
    check_is_model(leaves, structure)
    if not isinstance(trainable, Layout):
        warn_of_floats(structure)
    if freeze is None and thaw is None and ties is None:
        made, index = look_up(structure, trainable, leaves)
        refuse_refs(index)
        if not isinstance(trainable, Layout):
            warn_of_parted_ties(index, leaves)
        return made
    if isinstance(trainable, Layout):
        if ties is not None:
            raise ValueError("the Layout passed as `trainable` has its ties already; pass `ties` where you make it")
        return changed(look_up(structure, trainable)[0], freeze, thaw)
    made = _make(structure, trainable, freeze, thaw, ties)
    refuse_refs(index_of(made))
    for tie in () if ties is None else index_of(made).ties:
        note_ties(structure, [(tie.leaf, tie.source)], word="computed" if tie.transforms else "given")
    warn_of_accidents(index_of(made), leaves)
    warn_of_parted_ties(index_of(made), leaves)
    return made


def check_is_model(leaves: Sequence[Any], structure: Structure) -> None:
    """Raises a `TypeError` for a class, a path or a layout that is passed instead of a model."""
    if len(leaves) == 1 and not structure.nodes and isinstance(leaves[0], (type, str, Layout)):
        got = f"the class {leaves[0].__name__}" if isinstance(leaves[0], type) else describe(leaves[0])
        remedy = "; make an instance of it first" if isinstance(leaves[0], type) else ""
        raise TypeError(f"expected a model, a pytree with arrays, got {got}{remedy}")


def look_up(structure: Structure, trainable: Trainable, leaves: Sequence[Any] | None = None) -> tuple[Layout, Index]:
    """Returns the layout that `trainable` means for models of a structure, and the `Index` of these models.

    If you pass the leaves of the model, accidental ties are warned of.
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
    if leaves is not None:
        warn_of_accidents(index, leaves)
    return found, index


def _make(
    structure: Structure,
    trainable: Trainable,
    freeze: Where | None = None,
    thaw: Where | None = None,
    given: Given | None = None,
) -> Layout:
    ties = find_ties(structure, given)
    follows = followers(ties)
    said = choose(structure, follows, trainable)
    if freeze is not None or thaw is not None:
        change(structure, follows, said, freeze, False)
        change(structure, follows, said, thaw, True)
    return Layout(Index(structure, settle(structure, ties, said), ties))


def retrained(layout: Layout, trainable: Trainable) -> Layout:
    """Reads `trainable` for the models of a layout and keeps its ties, which traced arrays do not show."""
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


class MisfitError(ValueError):
    """A model does not fit a layout; `differences` lists the first few differences in words."""

    def __init__(self, differences: str) -> None:
        super().__init__(
            "the model does not fit the layout; make the layout from this model, tp.layout(model). The layout is the "
            f"first, the model the second:\n{differences}"
        )
        self.differences = differences


def _index_for(structure: Structure, layout: Layout) -> Index:
    """Returns the `Index` for models of a structure that may have fewer ties by identity than the layout."""
    index = index_of(layout)
    want = index.structure
    # Where the layout has a value, the model may have an array: a Python number that `jit` has made a tracer.
    fits = all(a is None or a == b for a, b in zip(want.specs, structure.specs, strict=False))
    if not fits or want.entries != structure.entries or not want.has_statics_of(structure):

        def at_leaves(i: int, j: int) -> Iterable[Difference]:
            return [] if want.specs[i] is None else spec_rows(want.paths[i], want.specs[i], structure.specs[j])

        lines = [row.in_words() for row in compare(want, structure, at_leaves)]
        raise MisfitError(first_lines(lines))
    # A model may have fewer ties than the layout, as a traced one has, but not one that the layout does not know.
    for i in structure.parameters:
        first = structure.first[i]
        if first != i and index.sources.get(first, first) != index.sources.get(i, i):
            paths = structure.paths
            raise ValueError(
                f"the model does not fit the layout: {paths[first]!r} and {paths[i]!r} are one array, but the "
                f"layout does not tie them; make it from this model, or with ties={{{paths[i]!r}: {paths[first]!r}}}"
            )
    return Index(structure, index.trained, index.ties)
