"""Splits a model into its trained parameters, one array per slot, and the rest; and puts it together again.

Every function of this library is `take_apart`, its own operation on `parts.slots`, and `parts.model(...)` or
`parts.canonical(...)`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

import jax.tree_util as jtu
from jax import export
from jax.core import Tracer

from .._tree.declare import registry
from .._tree.difference import Diff, Difference, compare
from .._tree.static_keys import contents, identical, static_key
from .._tree.structure import Spec, Structure, flatten, same_treedef, structure_of
from .._tree.text import describe
from .._tree.types import PyTree, TreeDef
from . import accidents
from .accidents import keep_apart, meet, note_ties
from .index import Index
from .layout import Layout, Trainable, index_of, look_up, trained_at

M = TypeVar("M")
T = TypeVar("T")


class _Static:
    """The static half of a `Rest`. Equal only if one compiled program is right for both."""

    __slots__ = ("_key", "index", "layout", "treedef", "values")

    def __init__(self, layout: Layout, index: Index, treedef: TreeDef, values: tuple[Any, ...]) -> None:
        self.layout, self.index, self.treedef = layout, index, treedef
        self.values = values  # of the leaves that are no arrays
        # Of values that can change in place a snapshot: a list would be compared with itself after it has changed.
        self._key = None if index.structure.settled else static_key(values, strict=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static):
            return NotImplemented
        these, those = self.index, other.index
        # Equal layouts do not do: the models may differ in which frozen arrays are one (`order`), and bare objects in
        # them may be others, which programs tell apart.
        are_alike = these is those or (self.layout, these.gathers.order) == (other.layout, those.gathers.order)
        if not (are_alike and identical(these.structure.bare, those.structure.bare)):
            return False
        are_same_objects = self._key is None is other._key and identical(self.values, other.values)
        return are_same_objects or self._snapshot() == other._snapshot()

    def _snapshot(self) -> Hashable:
        return static_key(self.values, strict=True) if self._key is None else self._key

    def __hash__(self) -> int:
        return hash((self.layout, self.index.gathers.order))

    def __reduce__(self) -> Any:
        return _static, (self.layout, self.index.structure, self.values)


contents[_Static] = lambda static: [static.layout, *static.values]


def _static(layout: Layout, structure: Structure, values: tuple[Any, ...]) -> _Static:
    # Equinox's treedefs do not survive pickling, so it is that of the structure, which is made from a tree.
    return _Static(layout, look_up(structure, layout)[1], structure.treedef, values)


class Rest(Generic[M]):
    """A model without its trained parameters, as `tp.partition` returns it.

    It is a pytree whose only leaves are the frozen arrays, each object once; functions, strings, numbers, structure and
    ties are static. You can pass it to plain `jax.jit`.

    Attributes:
        layout: the layout of the model.
    """

    def __init__(self, arrays: tuple[Any, ...], static: _Static) -> None:
        """Used by this library; write `tp.partition(model)`."""
        self.arrays, self._static, self.layout = arrays, static, static.layout
        self.index, self.treedef = static.index, static.treedef  # of this model
        self.values = static.values  # the leaves that are not arrays, and refs

    def __reduce__(self) -> Any:
        return Rest, (self.arrays, self._static)

    def __dir__(self) -> Iterable[str]:
        # All other names are for the other files of this library.
        return [name for name in super().__dir__() if name.startswith("_") or name == "layout"]

    @staticmethod
    def of(tree: T, *, by_shape: bool = True, tied: bool = True) -> "Rest[T]":
        """Returns any tree as a `Rest` that holds all of it: nothing is trained.

        Its static half equals that of a tree that differs only in shapes and dtypes. Without `by_shape`, all of these
        share one structure. Without `tied`, an array object that is at several places is kept once for each.
        """
        leaves, treedef, structure = structure_of(tree, by_shape=by_shape)
        structure.remember("met", lambda: meet(structure, leaves, is_call=not by_shape))
        layout = structure.remember(("nothing trained", tied), lambda: _nothing_trained(structure, tied))
        index = index_of(layout)
        return Rest(index.gathers.kept(leaves), _Static(layout, index, treedef, index.gathers.values(leaves)))

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each array."""
        return self.index.gathers.kept_paths

    def model(self, slots: Sequence[Any] = ()) -> M:
        """Returns the model with one value per slot, at all paths of each."""
        index, values = self.index, [*slots, *self.arrays, *self.values]
        # A model is put together here with its ties, and a later trace may lose them: it is noted that they are one, or
        # of tracers that they are apart as the arrays were. Once per index, so that an ordinary step pays nothing.
        if slots:
            if isinstance(slots[0], Tracer):
                keep_apart(slots)
            elif index.gathers.tied_pairs and not index.are_ties_noted:
                note_ties(index.structure, index.gathers.tied_pairs)
                index.are_ties_noted = True
            if index.computed:
                values += index.computed_from(slots)
        # One gather and one unflatten, since it is known where each leaf lies.
        return jtu.tree_unflatten(self.treedef, index.gathers.leaves(values))

    def unpacked(self) -> M:
        """Returns the tree within a function of arrays, whose arrays are apart there as they were outside."""
        keep_apart(self.arrays)
        return self.model()

    def replaced(self, arrays: Iterable[Any], values: Iterable[Any] | None = None) -> "Rest[M]":
        """Returns a `Rest` with other arrays, and optionally other values."""
        static = self._static
        if values is not None:
            static = _Static(static.layout, static.index, static.treedef, tuple(values))
        return Rest(tuple(arrays), static)

    def diff(self, other: "Rest[Any]") -> Diff:
        """Returns how two trees, or calls, differ, from their static halves alone."""
        these, those = self.index.structure, other.index.structure
        leaves = lambda rest: rest.index.gathers.values(range(len(rest.index.trained)))
        ours, theirs = (dict(zip(leaves(rest), rest.values, strict=True)) for rest in (self, other))

        def at_leaves(i: int, j: int) -> Iterator[Difference]:
            if i in ours and j in theirs and static_key(ours[i], strict=True) != static_key(theirs[j], strict=True):
                yield Difference.of_values(these.paths[i], "value", ours[i], theirs[j])
            elif (i in ours) != (j in theirs):
                words = ("no array", "an array") if i in ours else ("an array", "no array")
                yield Difference(these.paths[i], "type", *words)

        shared = these.index.keys() & those.index.keys()
        ties = Difference.of_ties(these.ties, those.ties, shared.__contains__)
        return Diff([*compare(these, those, at_leaves), *ties])

    def __repr__(self) -> str:
        return f"Rest({len(self.arrays)} frozen arrays, {len(self.values)} values, {self.layout!r})"


Rest.__module__ = "treeparams"
_halves: Callable[[Rest[Any]], tuple[tuple[Any, ...], _Static]] = operator.attrgetter("arrays", "_static")


def _flatten_with_keys(rest: Rest[Any]) -> tuple[Any, _Static]:
    return tuple(zip(map(jtu.DictKey, rest.paths), rest.arrays, strict=True)), _halves(rest)[1]


def _refuse(_: object) -> bytes:
    why = "an exported function cannot take a Rest or a Restructure, which holds functions of the model"
    raise ValueError(f"{why}; close over it, as in jax.jit(lambda params: f(params, rest))")


jtu.register_pytree_with_keys(Rest, _flatten_with_keys, lambda static, arrays: Rest(tuple(arrays), static), _halves)
export.register_pytree_node_serialization(
    Rest, serialized_name="treeparams.Rest", serialize_auxdata=_refuse, deserialize_auxdata=_refuse
)


@dataclasses.dataclass(slots=True, eq=False)
class Parts(Generic[M]):
    """A model taken apart: one array per slot, and the rest."""

    slots: tuple[Any, ...]  # one array per slot
    rest: Rest[M]

    @property
    def layout(self) -> Layout:
        """The layout of the model."""
        return self.rest.layout

    @property
    def index(self) -> Index:
        """The `Index` of this model, with its own structure."""
        return self.rest.index

    def model(self, slots: Sequence[Any]) -> M:
        """Returns the model with these values in its slots, at all paths of each."""
        return self.rest.model(slots)

    def canonical(self, slots: Sequence[Any]) -> PyTree:
        """Returns the canonical tree of one value per slot."""
        return self.rest.index.canonical(slots, self.rest.treedef)

    def everywhere(self, slots: Sequence[Any]) -> PyTree:
        """Returns a tree with one value per slot at all paths of each, and `None` elsewhere."""
        index = self.rest.index
        computed = index.computed_from(slots) if index.computed else ()
        return jtu.tree_unflatten(self.rest.treedef, index.everywhere([*slots, None, *computed]))


def take_apart(model: M, trainable: Trainable, *, by_path: bool = False) -> Parts[M]:
    """Splits a model into one array per slot and the rest; refuses a ref among the slots.

    With `by_path`, refs are no slots, and the rest has an entry for each path, though one array be at several.
    """
    leaves, treedef, structure = structure_of(model)
    layout, index = look_up(structure, trainable, leaves)
    if by_path:
        layout = trained_at(layout, index.positions)
        index = structure.remember(("by path", layout), functools.partial(_each_by_itself, structure, layout))
    elif structure.refs:
        index.refuse_refs()
    if not isinstance(trainable, Layout) and index.checked.get("forgotten") != accidents.changes:
        accidents.warn_of_forgotten_ties(index)
    static = _Static(layout, index, treedef, index.gathers.values(leaves))
    return Parts(index.gathers.slots(leaves), Rest(index.gathers.kept(leaves), static))


def _each_by_itself(structure: Structure, layout: Layout) -> Index:
    """Returns the `Index` of models in which no two leaves share an array, except those of a slot."""
    index = look_up(structure, layout)[1]
    first = tuple([first if i in index.by_leaf else i for i, first in enumerate(structure.first)])
    return Index(dataclasses.replace(structure, first=first, _memo={}), index.trained, index.ties)


def _nothing_trained(structure: Structure, tied: bool) -> Layout:
    first = structure.first if tied else tuple(range(len(structure.first)))
    any_array = Spec((), None, False)
    specs = tuple([spec and any_array for spec in structure.specs])
    # A program reads the declarations of classes while it is traced, so it serves one version of them.
    statics = (*structure.statics, ("declarations", registry.version))
    without_shapes = dataclasses.replace(structure, specs=specs, first=first, statics=statics, _memo={})
    return Layout(Index(without_shapes, (False,) * len(specs), ()))


def partition(model: M, trainable: Trainable = None) -> tuple[PyTree, Rest[M]]:
    """Splits a model into its trained parameters and the rest.

    >>> import equinox as eqx, jax, optax, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> params, rest = tp.partition(mlp, "!layers.0")  # all but the first layer
    >>> params.layers[0].weight is None, params.layers[1].weight.shape
    (True, (1, 4))
    >>> state = optax.adam(1e-3).init(params)  # any transformation takes params as they are
    >>> loss = lambda params, rest, x: tp.combine(params, rest)(x)[0]
    >>> # plain jit: mlp itself would not pass
    >>> gradient = jax.jit(jax.grad(loss))(params, rest, jax.numpy.ones(2))
    >>> gradient.layers[1].bias
    Array([1.], dtype=float32)

    Args:
        model: any pytree.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        `params`, the canonical tree: it has the structure of the model, with the array at each slot's path and `None`
        everywhere else (frozen parameters, aliases, other leaves); and `rest`, which holds everything else, counters
        included: a plain `jax.lax.scan` must carry both, and `tp.lax.scan` takes the model as it is. Arrays are
        not copied, so a step that donates `params` deletes them in `model` too. If you need the model afterwards, write
        `tp.partition(tp.copy(model))`.

    Raises:
        ValueError: see `tp.layout`.
        TypeError: see `tp.layout`.
    """
    parts = take_apart(model, trainable)
    return parts.canonical(parts.slots), parts.rest


def combine(params: PyTree, rest: Rest[M]) -> M:
    """Puts a model together from its parameters and the rest; the inverse of `tp.partition`.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.array([1.0, 2.0])
    >>> params, rest = tp.partition({"a": shared, "b": shared})
    >>> model = tp.combine({"a": 2 * params["a"], "b": None}, rest)
    >>> model["a"] is model["b"]
    True

    Args:
        params: the canonical tree, or another tree with arrays at the same paths. Each array has the shape of its leaf,
            or is a stack of such arrays, as in an ensemble.
        rest: from `tp.partition`.

    Returns:
        The model. One array object is at all paths of a tie, also inside a trace, so that its gradient is summed. If
        the tie has a transform, the alias is computed.

    Raises:
        ValueError: `params` lacks a parameter, has one of another shape, or has an entry at a path that the model does
            not have.
        TypeError: `rest` is not a `Rest`.
    """
    if not isinstance(rest, Rest):
        remedy = "params, rest = tp.partition(model); the two trees of eqx.partition go into eqx.combine"
        if isinstance(params, Rest):
            remedy = "the parameters come first: tp.combine(params, rest)"
        raise TypeError(f"expected the Rest of tp.partition, got {describe(rest)}; {remedy}")
    leaves, treedef = flatten(params)
    index = rest.index
    if not same_treedef(treedef, index.canonical_treedef):
        leaves = index.read(params)
    for leaf, slot in zip(leaves, () if index.have_shapes(leaves) else index.slots, strict=False):
        shape = getattr(leaf, "shape", slot.shape)  # labels have none, nor have results of a `jax.tree.map`
        if tuple(shape[max(len(shape) - len(slot.shape), 0) :]) != slot.shape:
            raise ValueError(f"expected {describe(slot)} at {slot.path!r}, got {describe(leaf)}")
    return rest.model(leaves)


def project(
    model: PyTree, grads: PyTree, trainable: Trainable = None, *, missing: Literal["zeros"] | None = None
) -> PyTree:
    """Turns a gradient, however you computed it, into the canonical tree.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.array([1.0, 2.0])
    >>> model = {"a": shared, "b": shared, "mean": jnp.zeros(2)}
    >>> loss = lambda m: jnp.sum(3 * m["a"] + 13 * m["b"] + m["mean"])
    >>> grads = jax.grad(loss)(model)  # two halves, and the mean's
    >>> tp.project(model, grads, ("a", "b"))
    {'a': Array([16., 16.], dtype=float32), 'b': None, 'mean': None}

    This is the only function that sums the gradients of tied parameters; at an alias with a transform, it applies the
    transpose. Complex gradients stay in JAX's convention and are never conjugated.

    Args:
        model: any pytree.
        grads: a tree with entries at paths of the model: of the model's type or another, whole or partial. `None`,
            `optax.MaskedNode`, `float0` and a missing branch mean no gradient; entries at frozen leaves are dropped.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        missing: the result for a slot without a gradient: `None` (you take no step there), or `"zeros"`.

    Returns:
        A tree of the model's structure: at every slot's path the gradient in the slot's shape and dtype, real if the
        slot is real, and `None` everywhere else.

    Raises:
        ValueError: an entry has another shape than its leaf; there is an entry where the model has no leaf; see also
            `tp.layout`.
        TypeError: an entry is not an array.
    """
    if missing not in (None, "zeros"):
        raise ValueError(f'missing must be None or "zeros", got {missing!r}')
    leaves, treedef, structure = structure_of(model)
    _, index = look_up(structure, trainable, leaves)
    index.refuse_refs()
    return index.canonical(index.gradients(grads, missing), treedef)
