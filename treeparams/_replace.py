"""replace: the model with other values of some parameters, given by `{where: value}`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from ._slots.index import Index
from ._slots.layout import Layout
from ._slots.rules import first_entries
from ._slots.ties import Alias
from ._slots.trainable import look_up
from ._slots.where import name_of, read
from ._tree.lost_ties import note_ties
from ._tree.recognise import structure_of
from ._tree.structure import Spec, Structure, is_array
from ._tree.text import describe, in_short

M = TypeVar("M")
Value = ArrayLike | Callable[[Any], Any]


def replace(model: M, values: Mapping[Any, Value], *, layout: Layout | None = None) -> M:
    """The model with other values of some parameters, frozen ones included.

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

    The first entry that selects a parameter gives its value. Ties are kept: a function is called once for a tie, with
    the array at its source, and its result is at all places. An array that you give at an alias with a transform alone
    has the shape of the alias.

    Args:
        model: any pytree.
        values: `{where: value}`. An array has the shape of each parameter that the `where` selects; a Python number
            fills it. A function is called with the array at hand and returns one.
        layout: of the model, where it was made with `ties=`, or the model is traced; `None`: `tp.layout(model)`.

    Returns:
        The model with these arrays, each in the dtype that its parameter has; all other leaves are as they were.

    Raises:
        ValueError: an entry selects no parameter, or none that earlier entries left, or one place alone of an array
            that is at several; a value has another shape, or a dtype that the parameter's does not hold.
        TypeError: `values` is no dictionary, or a value no array, number or function.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"values is a dictionary {{where: value}}, got {describe(values)}")
    leaves, treedef, structure = structure_of(model)
    index = look_up(structure, layout, leaves)[1]
    entries = list(values.items())
    found = first_entries(index, list(values), asked=index.distinct)
    through = [_aliases_alone(index, where) for where in values]
    # An array at two places is a tie. So each parameter gets an array of its own where you give one for several.
    taken = {id(leaf) for i, leaf in enumerate(leaves) if is_array(leaf) and index.sources.get(i, i) not in found}
    for source, number in found.items():
        where, value = entries[number]
        alias = through[number].get(source)
        new = _checked(structure, source if alias is None else alias.leaf, where, value, leaves)
        if alias is not None:
            new = _inverted(structure, alias, new)
        new = jnp.copy(new) if id(new) in taken else new
        taken.add(id(new))
        leaves[source] = new
        for each in index.aliases.get(source, ()):
            leaves[each.leaf] = each.value_from(new, structure.spec(source))
    pairs = [(each.source, each.leaf) for each in index.ties if each.source in found and not each.transforms]
    if pairs and not isinstance(leaves[pairs[0][0]], Tracer):
        note_ties(structure, pairs)
    return jtu.tree_unflatten(treedef, leaves)


def _aliases_alone(index: Index, where: object) -> dict[int, Alias]:
    """The aliases with a transform that a `where` names, and not their sources, by the source."""
    if not any(alias.transforms for alias in index.ties):
        return {}
    selected = [match.leaves() for match in read(index.structure, where)[0]]
    others = frozenset[int]().union(*[leaves for leaves in selected if not leaves <= index.follows.keys()])
    named = frozenset[int]().union(*selected) - others
    return {
        each.source: each for each in index.ties if each.transforms and each.leaf in named and each.source not in others
    }


def _checked(structure: Structure, leaf: int, where: object, value: Any, leaves: Sequence[Any]) -> Any:
    """The new array at a leaf, in its shape and dtype."""
    (shape, dtype, _), path = structure.spec(leaf), structure.paths[leaf]
    made = _called(where, value, path, leaves[leaf])
    by = f"the function given for {name_of(where)} returned" if made is not value else "got"
    if isinstance(made, (int, float, complex)):
        return jnp.full(shape, made, dtype)
    if not is_array(made):
        raise TypeError(f"expected an array, a number or a function for {path!r}, {by} {describe(made)}")
    got = jax.dtypes.canonicalize_dtype(made.dtype)
    if (made.shape, got) != (shape, dtype):
        hint = f"; write value.astype({dtype.name!r})" if made.shape == shape else ""
        raise ValueError(f"expected {describe(structure.spec(leaf))} at {path!r}, {by} {describe(made)}{hint}")
    are_numpy = isinstance(made, np.ndarray) and isinstance(leaves[leaf], np.ndarray)
    return made if are_numpy else jnp.asarray(made)


def _called(where: object, value: Any, path: str, at_hand: Any) -> Any:
    """The value, or what it returns where it is a function."""
    if not callable(value) or is_array(value):
        return value
    if any(map(is_array, jtu.tree_leaves(value))):
        raise TypeError(f"expected an array, a number or a function for {path!r}, got {describe(value)}, a node")
    try:
        return value(at_hand)
    except TypeError as error:
        raise TypeError(
            f"the function given for {name_of(where)} is called with one argument, the array at {path!r}; of an "
            f"initializer write lambda w: init(key, w.shape, w.dtype). It failed with {in_short(error)}"
        ) from error


def _inverted(structure: Structure, alias: Alias, value: Any) -> Any:
    """The array at the source of an alias, from that at the alias."""
    source = structure.spec(alias.source)
    # A transform that only moves elements is undone by its transpose, one that does more is not: this tells them apart.
    with jax.ensure_compile_time_eval():
        trial = jnp.arange(1, 1 + math.prod(source.shape), dtype=jnp.float32).reshape(source.shape)
        spec = Spec(source.shape, trial.dtype, True)
        moves = bool(jnp.array_equal(alias.pull_back(alias.value_from(trial, spec), spec), trial))
    if not moves or math.prod(source.shape) != value.size:
        names = structure.paths[alias.leaf], structure.paths[alias.source]
        raise ValueError(
            f"{names[0]!r} is {alias} of {names[1]!r}, which cannot be undone; give the value of {names[1]!r}"
        )
    return alias.pull_back(value, source)
