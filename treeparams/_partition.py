"""The tree form: a model as its trained parameters and the rest, and back.

Both halves are ordinary pytrees of arrays, so they pass every transformation of JAX. What would not - functions,
strings, the structure, the ties - is static in `Rest`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu
from jaxtyping import PyTree

from ._exact import same
from ._groups import Alias
from ._layout import Layout
from ._match import read_slots
from ._resolve import Resolved, resolve
from ._structure import Structure, flatten, getter, same_treedef


class _Plan(NamedTuple):
    """Where each leaf of a model goes and comes back from; made once per structure and layout."""

    slots: Callable[[Any], tuple[Any, ...]]  # leaves -> one array per slot
    canonical: Callable[[Any], tuple[Any, ...]]  # leaves and None -> the leaves of the canonical tree
    frozen: Callable[[Any], tuple[Any, ...]]  # leaves -> the frozen arrays, each object once
    frozen_paths: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]]  # leaves -> what is no array
    computed: tuple[tuple[int, Alias], ...]  # the aliases with a transform, and their slots
    order: tuple[int, ...]  # of each leaf: its place in slots + frozen + values + computed
    gather: Callable[[Any], tuple[Any, ...]]


class Fixed:
    """What of a model is static: hashable, and equal to another only if no program could tell them apart."""

    def __init__(self, structure: Structure, layout: Layout, values: tuple[Any, ...], treedef: Any = None) -> None:
        self.structure = structure
        self.layout = layout
        self.values = values
        self.treedef = structure.treedef if treedef is None else treedef
        self.plan = _plan(structure, layout)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fixed):
            return NotImplemented
        return self is other or (
            self.layout == other.layout and self.plan.order == other.plan.order and same(self.values, other.values)
        )

    def __hash__(self) -> int:
        return hash((self.layout, self.plan.order))

    def __reduce__(self) -> Any:
        return Fixed, (self.structure, self.layout, self.values)

    def fill(self, slots: Sequence[Any], frozen: Sequence[Any]) -> PyTree:
        """The model with these arrays in its slots, at all paths of each, and these frozen ones."""
        spec, positions = self.structure.spec, self.layout.positions
        computed = [alias.fill(slots[slot], spec(positions[slot])) for slot, alias in self.plan.computed]
        return jtu.tree_unflatten(self.treedef, self.plan.gather([*slots, *frozen, *self.values, *computed]))

    def canonical(self, slots: Sequence[Any]) -> PyTree:
        """The canonical tree of one value per slot."""
        return self.layout.canonical(slots, self.treedef)


class Rest:
    """What `tp.partition` leaves beside the parameters.

    A pytree whose only leaves are the frozen arrays, each object once; functions, strings, numbers, structure and ties
    are static. `rest.layout` is the layout of the model.
    """

    def __init__(self, frozen: tuple[Any, ...], fixed: Fixed) -> None:
        """For this library's own use; users write `tp.partition(model)`."""
        self.frozen = frozen
        self.fixed = fixed

    @property
    def layout(self) -> Layout:
        """The layout of the model."""
        return self.fixed.layout

    def fill(self, slots: Sequence[Any]) -> PyTree:
        """The model with one array per slot. For this library's own use; users write `tp.combine(params, rest)`."""
        return self.fixed.fill(slots, self.frozen)

    def __repr__(self) -> str:
        return f"Rest({len(self.frozen)} frozen arrays, {len(self.fixed.values)} values, {self.layout!r})"


Rest.__module__ = "treeparams"


def _flatten_with_keys(rest: Rest) -> tuple[Any, Fixed]:
    keys = map(jtu.DictKey, rest.fixed.plan.frozen_paths)
    return tuple(zip(keys, rest.frozen, strict=True)), rest.fixed


jtu.register_pytree_with_keys(
    Rest, _flatten_with_keys, lambda fixed, frozen: Rest(tuple(frozen), fixed), lambda rest: (rest.frozen, rest.fixed)
)


def partition(model: PyTree, trainable: Any = None) -> tuple[PyTree, Rest]:
    """Splits a model into its trained parameters and the rest.

    >>> import equinox as eqx, jax, optax, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> params, rest = tp.partition(mlp, "layers.1")
    >>> params.layers[0].weight is None, params.layers[1].weight.shape
    (True, (1, 4))
    >>> state = optax.adam(1e-3).init(params)  # any transformation takes params as they are
    >>> loss = lambda params, rest, x: tp.combine(params, rest)(x)[0]
    >>> gradient = jax.jit(jax.grad(loss))(params, rest, jax.numpy.ones(2))  # plain jit: mlp itself would not pass
    >>> gradient.layers[1].bias
    Array([1.], dtype=float32)

    Args:
        model: any pytree.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        `params`, the canonical tree: of the model's own structure, with the array at each slot's path and `None`
        everywhere else (frozen, aliases, what is no parameter); and `rest`, everything else. Arrays are not copied, so
        a step that donates `params` takes them from `model` too: `tp.partition(tp.copy(model))` keeps that.

    Raises:
        ValueError: as `tp.layout`.
        TypeError: as `tp.layout`.
    """
    resolved = resolve(model, trainable)
    rest = rest_of(resolved)
    canonical = rest.fixed.plan.canonical([*resolved.leaves, None])
    return jtu.tree_unflatten(resolved.treedef, canonical), rest


def combine(params: PyTree, rest: Rest) -> PyTree:
    """The inverse of `tp.partition`: the model of these parameters.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.ones(2)
    >>> params, rest = tp.partition({"a": shared, "b": shared})
    >>> model = tp.combine({"a": 2 * params["a"], "b": None}, rest)
    >>> model["a"] is model["b"]
    True

    Args:
        params: the canonical tree, or another tree with arrays at the same paths.
        rest: from `tp.partition`.

    Returns:
        The model. One array object stands at all paths of a tie, also inside a trace, so that its gradient is summed;
        where the tie has a transform, the alias is computed.

    Raises:
        ValueError: `params` lacks a parameter or has an entry at a path that the model has not.
    """
    leaves, treedef = flatten(params)
    if not same_treedef(treedef, rest.layout.canonical_treedef):
        leaves = read_slots(rest.layout, params)
    return rest.fill(leaves)


def split(model: PyTree, trainable: Any) -> tuple[tuple[Any, ...], Rest]:
    """As `partition`, with one array per slot in place of the tree."""
    resolved = resolve(model, trainable)
    return slots_of(resolved), rest_of(resolved)


def slots_of(resolved: Resolved) -> tuple[Any, ...]:
    """One array per slot."""
    return _plan(resolved.structure, resolved.layout).slots(resolved.leaves)


def rest_of(resolved: Resolved) -> Rest:
    """Everything else."""
    leaves, treedef, structure, layout = resolved
    plan = _plan(structure, layout)
    return Rest(plan.frozen(leaves), Fixed(structure, layout, plan.values(leaves), treedef))


def _plan(structure: Structure, layout: Layout) -> _Plan:
    return structure.remember(("plan", layout), lambda: _make_plan(structure, layout))


def _make_plan(structure: Structure, layout: Layout) -> _Plan:
    count, slots = len(structure.specs), layout.by_leaf
    others = [i for i in range(count) if i not in slots]
    frozen = [i for i in others if structure.specs[i] is not None and structure.first[i] == i]
    values = [i for i in others if structure.specs[i] is None]
    computed = tuple((slot, alias) for slot, group in enumerate(layout.aliases) for alias in group if alias.chain)
    computed_leaves = [alias.leaf for _, alias in computed]
    places = dict(slots)
    for place, i in enumerate([*frozen, *values, *computed_leaves], start=len(layout.positions)):
        places[i] = place
    order = tuple(places[i] if i in places else places[structure.first[i]] for i in range(count))
    at_slot = set(layout.positions)
    canonical = [i if i in at_slot else count for i in range(count)]
    return _Plan(
        getter(layout.positions),
        getter(canonical),
        getter(frozen),
        tuple(structure.paths[i] for i in frozen),
        getter(values),
        computed,
        order,
        getter(order),
    )
