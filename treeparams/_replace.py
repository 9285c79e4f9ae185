"""replace: returns the model with other values for some parameters, given as `{where: value}`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike

from ._slots.accidents import note_ties
from ._slots.layout import Layout, look_up
from ._slots.where import name_of, read, select
from ._tree.structure import Node, Structure, is_array, structure_of
from ._tree.text import describe, in_short
from ._tree.types import value_of

M = TypeVar("M")
Value = ArrayLike | Callable[[Any], Any]


def replace(model: M, values: Mapping[Any, Value], *, layout: Layout | None = None) -> M:
    """Returns the model with other values for some parameters, frozen ones included.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> init, keys = (
    ...     jax.nn.initializers.he_normal(in_axis=-1, out_axis=-2),
    ...     iter(jax.random.split(jax.random.key(1))),
    ... )
    >>> mlp = tp.replace(
    ...     mlp, {"**.bias": jnp.zeros_like, "**": lambda w: init(next(keys), w.shape, w.dtype)}
    ... )
    >>> mlp.layers[0].bias
    Array([0., 0., 0., 0.], dtype=float32)

    The first entry that selects a parameter gives its value. Ties are kept: for a tied parameter, a function is called
    once, with the array at its source, and the result is set at all its paths. A parameter with an alias that has a
    transform is named by its source.

    A `where` that names a `matrices.Positive` sets its value; one that names its raw array sets that. Name the arrays
    in other constrained arrays, and in structured matrices.

    >>> from treeparams import matrices
    >>> model = {"k": matrices.Positive(jnp.array(1.0)), "b": jnp.array(0.0)}
    >>> matrices.materialise(tp.replace(model, {"k": 2.0}))["k"], tp.replace(model, {"k.raw": 2.0})["k"].raw
    (Array(2., dtype=float32), Array(2., dtype=float32))

    Args:
        model: any pytree.
        values: `{where: value}`. An array must have the shape of each parameter that the `where` selects; a Python
            number fills it. A function is called with the current array and returns the new one.
        layout: the layout of the model, needed if it was made with `ties=` or if the model is traced; `None` means
            `tp.layout(model)`.

    Returns:
        The model with these arrays, each in the dtype of its parameter; all other leaves are unchanged.

    Raises:
        ValueError: an entry selects no parameter, or only parameters that earlier entries selected, or only one of
            several paths of an array; a value has another shape or dtype, or is no value of the `matrices.Positive`.
        TypeError: `values` is not a dictionary, or a value is not an array, a number or a function; an entry names a
            structured matrix or another constrained array, whose arrays have names of their own.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"values must be a dictionary {{where: value}}, got {describe(values)}")
    leaves, treedef, structure = structure_of(model)
    index = look_up(structure, layout, leaves)[1]
    entries = list(values.items())
    found = index.first_entries(list(values), asked=index.distinct)
    # To read an entry again costs a call of a function, and is needed for models with such nodes alone.
    has_nodes = any(_represents_array(cls) for cls in {node.cls for node in structure.nodes})
    named = [_nodes_named(structure, where) if has_nodes else {} for where in values]
    # An array at two places is a tie. So each parameter gets an array of its own where you give one for several.
    taken = {id(leaf) for i, leaf in enumerate(leaves) if is_array(leaf) and index.sources.get(i, i) not in found}
    for source, number in found.items():
        where, value = entries[number]
        computed = [alias for alias in index.aliases.get(source, ()) if alias.transforms]
        if computed and source not in select(structure, where):
            alias, name = structure.paths[computed[0].leaf], structure.paths[source]
            raise ValueError(f"{name_of(where)} names {alias!r}, which is {computed[0]} of {name!r}; write {name!r}")
        node = _settable_node(structure, source, where, named[number].get(source), leaves)
        at_hand = value_of(leaves[source]) if node is None else node.to_dense()
        new = _fitting_value(structure, source, where, value, at_hand)
        new = new if node is None else type(node)(new).raw
        new = jnp.copy(new) if id(new) in taken else new
        taken.add(id(new))
        leaves[source] = jax.new_ref(new) if source in structure.refs else new
        for each in index.aliases.get(source, ()):
            leaves[each.leaf] = each.value_from(leaves[source], structure.spec(source))
    kept = [each for each in index.ties if each.source in found and not each.transforms]
    note_ties(structure, [(each.source, each.leaf) for each in kept])
    return jtu.tree_unflatten(treedef, leaves)


def _represents_array(cls: type) -> bool:
    """Returns whether nodes of a class, of `matrices` or of paramax, represent an array computed from those in them."""
    return hasattr(cls, "to_dense") or (hasattr(cls, "unwrap") and cls.__name__ != "NonTrainable")


def _nodes_named(structure: Structure, where: object) -> dict[int, Node]:
    """Returns for each leaf in a node that a `where` names, and that represents an array, where its leaves lie."""
    found = {}
    for node in [node for match in read(structure, where)[0] for node in match.nodes]:
        if _represents_array(node.cls):
            found |= dict.fromkeys(range(node.start, node.stop), node)
    return found


def _settable_node(structure: Structure, leaf: int, where: object, node: Node | None, leaves: Sequence[Any]) -> Any:
    """Returns the node around a leaf if you can set its value; `None` if no node there represents an array."""
    if node is None:
        return None
    if getattr(node.cls, "is_made_of_its_value", False):
        return jtu.tree_unflatten(structure.subtreedefs[node.number], leaves[node.start : node.stop])
    what = f"{name_of(where)} names a {node.cls.__name__}, whose value is computed from the arrays in it"
    remedy = f"name one of these, such as {structure.paths[leaf]!r}, or put another node there"
    raise TypeError(f"{what}: {remedy}, eqx.tree_at(where, model, node)")


def _fitting_value(structure: Structure, leaf: int, where: object, value: Any, at_hand: Any) -> Any:
    """Returns the new array for a leaf, in the shape and dtype of the leaf."""
    (shape, dtype, _), path = structure.spec(leaf), structure.paths[leaf]
    made: Any = value
    if callable(value) and not is_array(value):
        if any(map(is_array, jtu.tree_leaves(value))):
            what = f"expected an array, a number or a function for {path!r}"
            raise TypeError(f"{what}, got {describe(value)}, a pytree node")
        try:
            made = value(at_hand)
        except TypeError as error:
            what = f"the function given for {name_of(where)} is called with one argument, the array at {path!r}"
            remedy = "for an initialiser write lambda w: init(key, w.shape, w.dtype)"
            raise TypeError(f"{what}; {remedy}. It failed with {in_short(error)}") from error
    by = f"the function given for {name_of(where)} returned" if made is not value else "got"
    if isinstance(made, (int, float, complex)):
        return jnp.full(shape, made, dtype)
    if not is_array(made):
        raise TypeError(f"expected an array, a number or a function for {path!r}, {by} {describe(made)}")
    got = jax.dtypes.canonicalize_dtype(made.dtype)
    if (made.shape, got) != (shape, dtype):
        hint = f"; write value.astype({dtype.name!r})" if made.shape == shape else ""
        raise ValueError(f"expected {describe(structure.spec(leaf))} at {path!r}, {by} {describe(made)}{hint}")
    are_numpy = isinstance(made, np.ndarray) and isinstance(at_hand, np.ndarray)
    return made if are_numpy else jnp.asarray(made)
