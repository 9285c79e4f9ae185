"""The layout of a model: its trained parameters, its ties, and the place of each parameter in vector and stacks.

A layout is static and holds no array, so you can pass it to `jax.jit` as a static argument or close over it.
"""

import dataclasses
import functools
import operator
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np

from .._tree.declare import Given
from .._tree.difference import Diff, Difference, compare
from .._tree.static_keys import contents
from .._tree.structure import Structure, structure_of
from .._tree.text import Printed, Table, describe, first_few
from .._tree.types import PyTree, common_dtype
from . import accidents
from .accidents import meet, note_ties, warn_of_parted_ties
from .index import Index, Slot
from .ties import Alias, find_ties
from .where import Where, decide

A = TypeVar("A", np.ndarray, jax.Array)


class Layout(Printed):
    """The static map of a model's parameters: which are trained, and which are tied.

    You get one from `tp.layout`. Two layouts are equal if they describe models of the same structure, static fields,
    shapes, dtypes, trained leaves and ties.

    >>> import equinox as eqx, jax, treeparams as tp
    >>> layout = tp.layout(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
    >>> print(layout)
    path    shape  dtype    elements  bytes  role
    weight  2,3    float32         6   24 B  trained
    bias    2      float32         2    8 B  trained
    <BLANKLINE>
    trained  8 elements in 2 arrays, 32 B
    >>> layout["bias"].offset, layout.freeze("weight").paths
    (6, ('bias',))
    """

    _index: Index  # where everything lies in the models that it was made from; for the other files of this library
    _notes: tuple[str, ...]  # lines that are printed below the table, and no part of the value

    def __init__(self, index: Index, notes: Iterable[str] = ()) -> None:
        """Used by this library; write `tp.layout(model)`."""
        # Equal models share one layout, so it must not change.
        vars(self).update(_index=index, _notes=tuple(notes))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Layout is immutable: {name!r} not set; layout.freeze and layout.thaw return others")

    # -- What it says

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The distinct trained parameters, in tree order of the paths that name them."""
        return self._index.slots

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each slot, in order."""
        return tuple(slot.path for slot in self.slots)

    @property
    def size(self) -> int:
        """The number of trained elements; a tied parameter counts once."""
        return sum(slot.size for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """The size of the trained leaves in bytes; a tied parameter counts once."""
        return sum(slot.size * slot.dtype.itemsize for slot in self.slots)

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The dtype of the vector: `jnp.result_type` of the slots that have elements; JAX's float if none has."""
        return common_dtype(slot.dtype for slot in self.slots if slot.size)

    @property
    def ties(self) -> dict[str, tuple[str, ...]]:
        """The other paths of each tied parameter, including frozen parameters: `{path: (aliases, ...)}`."""
        paths, aliases = self._index.structure.paths, self._index.aliases
        return {paths[source]: tuple(paths[alias.leaf] for alias in its) for source, its in aliases.items()}

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that are equal for layouts with equal paths, shapes, dtypes, trained leaves and ties.

        They are the same in all processes, on all machines and in all versions of this library. Compare them when two
        programs exchange arrays. Classes, static values and leaves that are not arrays do not count: a model has the
        digest of a dictionary with its paths. Dtypes are JAX's, as everywhere in a layout.

        >>> import jax.numpy as jnp, numpy as np, treeparams as tp
        >>> of = lambda model: tp.layout(model).digest
        >>> of({"w": jnp.ones(3)}), of({"w": np.ones(3, np.float32)}), of({"w": jnp.ones(4)})
        ('d9a89746af407a62', 'd9a89746af407a62', 'ad6dd18672a8abe2')
        """
        return self._index.digest

    @property
    def mask(self) -> PyTree:
        """A tree with the structure of the model: `True` at each trained parameter and its aliases, `False` elsewhere.

        You can pass it to `eqx.partition(model, mask)` and `optax.adamw(1e-3, mask=mask)` as it is. The latter works
        even if the model is callable, because Optax looks at the leaves of a mask.
        """
        return jtu.tree_unflatten(self._index.structure.treedef, self._index.trained)

    def __getitem__(self, path: str) -> Slot:
        """Returns the slot at a path; for an alias, the slot of its source."""
        return self.slots[self._index.slot_at(path)]

    def _ipython_key_completions_(self) -> list[str]:
        return [path for slot in self.slots for path in (slot.path, *slot.aliases)]

    # -- Positions in the vector

    def slice(self, path: str) -> slice:
        """Returns the slice of the vector that holds a parameter.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> layout = tp.layout({"a": jnp.ones(2), "b": jnp.ones((2, 2))})
        >>> layout.slice("b")
        slice(2, 6, None)

        Raises:
            KeyError: there is no slot at this path.
        """
        slot = self[path]
        return slice(slot.offset, slot.offset + slot.size)

    def indices(self, where: Where) -> np.ndarray:
        """Returns the positions in the vector of all elements that `where` selects, in ascending order, each once.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> layout = tp.layout({"a": {"w": jnp.ones(2), "b": jnp.ones(1)}, "c": {"w": jnp.ones(2)}})
        >>> print(layout.indices("*.w"))
        [1 2 3 4]

        Raises:
            ValueError: `where` selects no trained parameter.
        """
        slots = [self.slots[i] for i in self._index.slots_in(where)]
        return np.concatenate([np.arange(slot.offset, slot.offset + slot.size) for slot in slots])

    def block(self, matrix: A, rows: Where, columns: Where) -> A:
        """Cuts the block for two parameters out of a matrix over the vector, such as a Hessian or a covariance.

        >>> import jax, jax.numpy as jnp, treeparams as tp
        >>> vector, restructure = tp.ravel({"a": jnp.ones(2), "b": jnp.ones(3)})
        >>> hessian = jax.hessian(lambda v: jnp.sum(restructure(v)["a"]) * jnp.sum(restructure(v)["b"]))(vector)
        >>> restructure.layout.block(hessian, "a", "b").shape
        (2, 3)

        Args:
            matrix: shape `(n, n)`, with n the size of the layout, or a stack of such matrices, `(*batch, n, n)`. For a
                matrix over a padded vector, pass `matrix[..., :n, :n]`.
            rows: a path, or a `where` that selects several parameters.
            columns: the same for the columns.

        Returns:
            The block, of shape `(*batch, n_rows, n_columns)`.

        Raises:
            ValueError: the matrix has another shape; see also `layout.indices`.
        """
        size, shape = self.size, getattr(matrix, "shape", None)
        if shape is None or shape[-2:] != (size, size):
            got = type(matrix).__name__ if shape is None else f"shape {tuple(shape)}"
            raise ValueError(f"expected an array of shape ({size}, {size}) over the vector of {self!r}, got {got}")
        positions = self.indices(rows), self.indices(columns)
        are_runs = all(len(each) and each[-1] - each[0] + 1 == len(each) for each in positions)  # they ascend
        # Slices put no indices into a compiled program; of a NumPy matrix they would be a view.
        array: Any = matrix
        if are_runs and not isinstance(matrix, np.ndarray):
            return array[(..., *(slice(int(each[0]), int(each[-1]) + 1) for each in positions))]
        return array[(..., *np.ix_(*positions))]

    # -- Other trained leaves

    def freeze(self, where: Where) -> "Layout":
        """Returns the layout with the selected parameters frozen. Ties are kept.

        Raises:
            ValueError: `where` selects nothing, or only some paths of a tied parameter.
        """
        return _changed_by(self, freeze=where)

    def thaw(self, where: Where) -> "Layout":
        """Returns the layout with the selected parameters trained, even those that a class declares frozen.

        Raises:
            ValueError: `where` selects nothing, or only some paths of a tied parameter.
        """
        return _changed_by(self, thaw=where)

    def diff(self, other: "Layout") -> Diff:
        """Lists how two layouts differ: structure, static values, shapes, dtypes, trained parameters, and ties.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> layout = tp.layout({"a": jnp.ones(2), "b": jnp.ones(3)})
        >>> print(layout.diff(layout.freeze("b")))
        path  what     first    second
        b     trained  trained  frozen
        <BLANKLINE>
        1 difference

        Returns:
            A `Diff`, which is false if there are no differences; `tp.diff` returns the same for two layouts.
        """
        if not isinstance(other, Layout):
            raise TypeError(f"expected another Layout, tp.layout(model), got {describe(other)}")
        these, those = self._index, other._index
        here, there = these.structure, those.structure

        def at_leaves(i: int, j: int) -> Iterator[Difference]:
            yield from Difference.of_specs(here.paths[i], here.specs[i], there.specs[j])
            if here.is_parameter(i) and there.is_parameter(j) and these.trained[i] != those.trained[j]:
                words = ("trained", "frozen") if these.trained[i] else ("frozen", "trained")
                yield Difference(here.paths[i], "trained", *words)

        def ties(index: Index) -> list[tuple[str, str, Alias]]:
            # Transforms are compared: leaves have other numbers in another model.
            paths = index.structure.paths
            bare = lambda tie: dataclasses.replace(tie, leaf=0, source=0)
            return [(paths[tie.source], paths[tie.leaf], bare(tie)) for tie in index.ties]

        both = here.index.keys() & there.index.keys()
        rows = Difference.of_ties(ties(these), ties(those), both.__contains__, "its source")
        return Diff([*compare(here, there, at_leaves), *rows])

    # -- As a value

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self._index.structure, self._index.trained, self._index.ties))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Layout):
            return self is other
        these, those = self._index, other._index
        return (these.trained, these.ties) == (those.trained, those.ties) and these.structure == those.structure

    def __reduce__(self) -> Any:
        # The index is worked out anew: it holds functions, and memories of this process.
        return _again, (self._index.structure, self._index.trained, self._index.ties)

    def __repr__(self) -> str:
        names = f" ({first_few(self.paths)})" if self.slots else ""
        frozen = len(self._index.frozen)
        counts = f"{len(self.slots):,} slot{'s' * (len(self.slots) != 1)}{names}"
        counts += f", {self.size:,} element{'s' * (self.size != 1)}, {self.dtype}"
        return f"Layout({counts}; {frozen} frozen; digest {self.digest})"

    def _blocks(self) -> list[Table | str]:
        return [*self._index.summary().blocks, *self._notes]


Layout.__module__ = "treeparams"
Trainable = Where | PyTree | Layout | None
"""The ways to choose the trained parameters: `None` (as declared), a mask, a `where` or a `Layout`.

Use it to annotate an argument that you pass on: `def train(model, trainable: tp.types.Trainable = None)`.
"""
if not TYPE_CHECKING and sys.version_info >= (3, 12):
    Trainable = typing.TypeAliasType("Trainable", Trainable)
index_of: Callable[[Layout], Index] = operator.attrgetter("_index")
"""The `Index` of the models that a layout was made from."""


contents[Layout] = lambda layout: [node.static for node in index_of(layout).structure.nodes]


def _again(structure: Structure, trained: tuple[bool, ...], ties: tuple[Alias, ...]) -> Layout:
    return Layout(Index(structure, trained, ties))


def _changed_by(layout: Layout, freeze: Where | None = None, thaw: Where | None = None) -> Layout:
    """Returns the layout after both statements; ties are checked only after the second."""
    index = index_of(layout)
    said = {i: index.trained[i] for i in index.structure.parameters if i not in index.follows}
    made = _relaid(layout, freeze=freeze, thaw=thaw, said=said)
    index_of(made).refuse_refs()
    return made


def _relaid(layout: Layout, trainable: Trainable = None, **said: Any) -> Layout:
    """Returns the layout of the same models and ties with other trained leaves, as `decide` reads them."""
    index = index_of(layout)
    trained = decide(index.structure, index.ties, trainable, **said)
    return layout if trained == index.trained else Layout(Index(index.structure, trained, index.ties))


def trained_at(layout: Layout, leaves: Sequence[int]) -> Layout:
    """Returns the layout that trains exactly the parameters at these leaves, with their ties, and no ref."""
    index, chosen = index_of(layout), frozenset(leaves) - index_of(layout).structure.refs
    parameters = (i for i in index.structure.parameters if i not in index.follows)
    make = lambda: _relaid(layout, said={i: index.sources.get(i, i) in chosen for i in parameters})
    return index.structure.remember(("trained at", layout, chosen), make)


# -- From a mask, a `where`, or nothing, to a layout -------------------------------------------------------------------


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
    path     shape  dtype    elements  bytes  role     tied to
    encoder  2,3    float32         6   24 B  trained  decoder (transpose)
    <BLANKLINE>
    trained  6 elements in 1 array, 24 B

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
    if isinstance(trainable, Layout) and ties is not None:
        raise ValueError("the Layout passed as `trainable` has its ties already; pass `ties` where you make it")
    made, index = look_up(structure, trainable, leaves, ties, freeze, thaw)
    index.refuse_refs()
    if isinstance(trainable, Layout):
        return made if freeze is None and thaw is None else _changed_by(made, freeze, thaw)
    for tie in () if ties is None else index.ties:
        note_ties(structure, [(tie.leaf, tie.source)], word="computed" if tie.transforms else "given")
    index.warn_of_floats()
    warn_of_parted_ties(index, leaves)
    return made


def look_up(
    structure: Structure, trainable: Any, leaves: Any = None, given: Any = None, freeze: Any = None, thaw: Any = None
) -> tuple[Layout, Index]:
    """Returns the layout that `trainable` means for models of a structure, and the `Index` of these models.

    If you pass the leaves of the model, its ties are remembered, and accidental ones warned of.
    """
    if leaves is not None:
        if len(leaves) == 1 and not structure.nodes and isinstance(leaves[0], (type, str, Layout)):
            got = describe(leaves[0])
            if isinstance(leaves[0], type):
                got = f"the class {leaves[0].__name__}; make an instance of it first"
            raise TypeError(f"expected a model, a pytree with arrays, got {got}")
        structure.remember("met", lambda: meet(structure, leaves))
    if isinstance(trainable, Layout):
        index = index_of(trainable)
        if index.structure is not structure:
            index = structure.remember(trainable, lambda: _index_for(structure, trainable))
        return trainable, index

    def make() -> Layout:
        ties = find_ties(structure, given)
        return Layout(Index(structure, decide(structure, ties, trainable, freeze, thaw), ties))

    # Only what is sure to mean the same at the next call is remembered; a callable may close over what changes.
    is_sure = trainable is None or isinstance(trainable, (str, re.Pattern, type))
    is_alone = freeze is None and thaw is None and given is None
    found = structure.remember(("layout", trainable), make) if is_sure and is_alone else make()
    index = index_of(found)
    if leaves is not None and (structure.is_traced or index.checked.get("accidents") != accidents.changes):
        accidents.warn_of_accidents(index, leaves)
    return found, index


def retrained(layout: Layout, trainable: Trainable) -> Layout:
    """Reads `trainable` for the models of a layout and keeps its ties, which traced arrays do not show."""
    index = index_of(layout)
    if not isinstance(trainable, Layout):
        return _relaid(layout, trainable)
    other = index_of(trainable)
    if (other.structure, other.ties) != (index.structure, index.ties):
        expected = "expected a layout of the same models and ties, such as state.layout.freeze(where)"
        raise ValueError(f"{expected}; they differ:\n{layout.diff(trainable).in_words()}")
    return trainable


class MisfitError(ValueError):
    """A model does not fit a layout; `differences` lists the first few differences in words."""

    def __init__(self, differences: str) -> None:
        remedy = "make the layout from this model, tp.layout(model)"
        which = "The layout is the first, the model the second"
        super().__init__(f"the model does not fit the layout; {remedy}. {which}:\n{differences}")
        self.differences = differences


def _index_for(structure: Structure, layout: Layout) -> Index:
    """Returns the `Index` for models of a structure that may have fewer ties by identity than the layout."""
    index = index_of(layout)
    want = index.structure
    # Where the layout has a value, the model may have an array: a Python number that `jit` has made a tracer.
    fits = all(a is None or a == b for a, b in zip(want.specs, structure.specs, strict=False))
    if not fits or want.entries != structure.entries or not want.has_statics_of(structure):
        at_leaves = lambda i, j: Difference.of_specs(want.paths[i], want.specs[i], want.specs[i] and structure.specs[j])
        raise MisfitError(Diff(compare(want, structure, at_leaves)).in_words())
    # A model may have fewer ties than the layout, as a traced one has, but not one that the layout does not know.
    for i in structure.parameters:
        first = structure.first[i]
        if first != i and index.sources.get(first, first) != index.sources.get(i, i):
            one, other = structure.paths[first], structure.paths[i]
            what = f"the model does not fit the layout: {one!r} and {other!r} are one array"
            remedy = f"make it from this model, or with ties={{{other!r}: {one!r}}}"
            raise ValueError(f"{what}, but the layout does not tie them; {remedy}")
    return Index(structure, index.trained, index.ties)
