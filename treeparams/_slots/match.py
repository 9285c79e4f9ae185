"""Other trees - gradients, averages, partial trees, other types - matched by path to a model's slots; project."""

import functools
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._tree.paths import nearest, unquote
from .._tree.structure import Structure, flatten, same_treedef, structure_of
from .._tree.text import describe, quoted
from .._tree.types import PyTree, common_dtype, is_complex, is_inexact, value_of, widened
from .index import Index
from .layout import Trainable, look_up
from .ties import Alias

Tied = Literal["sum", "first"] | None
_shape, _dtype, _weak_type = map(operator.attrgetter, ("shape", "dtype", "weak_type"))
_float0 = jax.dtypes.float0  # of a gradient that is none, of an integer


def per_slot(index: Index, tree: PyTree, tied: Tied, *, exact_shapes: bool = False) -> list[Any]:
    """Looks up the entry of another tree for each slot; `None` if the tree has none."""
    if tied not in ("sum", "first", None):
        raise ValueError(f'tied must be "sum" (gradients), "first" (values) or None, got {tied!r}')
    leaves, treedef = flatten(tree)
    # Three ways, the quickest first: a canonical tree, a tree of the model's structure, any other, by path.
    if same_treedef(treedef, index.canonical_treedef):
        try:  # in a few calls that run in C
            if exact_shapes and list(map(_shape, leaves)) == index.shapes and _float0 not in map(_dtype, leaves):
                return leaves
        except AttributeError:  # not all are arrays
            pass
        pairs = zip(index.positions, leaves, strict=True)
    elif same_treedef(treedef, index.structure.treedef):
        pairs = enumerate(leaves)
    else:
        pairs = _entries_by_path(index, tree)
    pairs = ((leaf, value) for leaf, value in pairs if leaf in index.by_leaf)  # entries at frozen leaves are ignored
    found = {leaf: value for leaf, value in pairs if getattr(value, "dtype", None) != _float0}
    if exact_shapes:
        for leaf, value in found.items():
            _check_shape(index.structure, leaf, value)
    if not index.aliases:
        return [found.get(position) for position in index.positions]
    return [_one(index, found, position, tied) for position in index.positions]


def read_slots(index: Index, tree: PyTree, *, exact_shapes: bool = False) -> list[Any]:
    """Returns the values of the slots in a tree that must have all of them, such as a model of another type."""
    values = list(map(value_of, per_slot(index, tree, "first", exact_shapes=exact_shapes)))
    pairs = list(zip(index.slots, values, strict=True))
    missing = [slot.path for slot, value in pairs if value is None]
    if missing:
        expected = f"expected an array for each of the {len(values)} trained parameters"
        raise ValueError(f"{expected}, found none for {quoted(missing)}")
    for slot, value in pairs if exact_shapes else ():
        if jnp.iscomplexobj(value) and not is_complex(slot.dtype):
            raise TypeError(f"expected a real {slot.dtype} at {slot.path!r}, got {describe(value)}")
    return values


def _check_shape(structure: Structure, leaf: int, value: Any) -> None:
    """Checks that a value has the shape of its leaf."""
    spec, path = structure.spec(leaf), structure.paths[leaf]
    if not isinstance(value, (bool, int, float, complex)) and not hasattr(value, "shape"):
        raise TypeError(f"expected an array at {path!r}, got {describe(value)}")
    if jnp.shape(value) != spec.shape:
        got = describe(value) if hasattr(value, "dtype") else f"{describe(value)} of shape {jnp.shape(value)}"
        raise ValueError(f"expected {describe(spec)} at {path!r}, got {got}")


def _entries_by_path(index: Index, tree: PyTree) -> list[tuple[int, Any]]:
    leaves, _, structure = structure_of(tree)
    model, paths = index.structure, structure.paths
    expected = "expected a tree with arrays at paths of the model, got"
    if leaves and not structure.nodes and model.nodes:
        raise ValueError(f"{expected} {describe(leaves[0])}; a vector becomes a model by restructure(vector)")
    if any(path not in model.index for path in paths) and all(len(entries) == 1 for entries in structure.entries):
        # A dictionary with whole paths as its keys, as of `tp.trainables`: one with dots in it stands in quotes.
        whole = tuple(map(unquote, paths))
        paths = whole if all(path in model.index for path in whole) else paths
    unknown = [path for path in paths if path not in model.index]
    if unknown and type(tree) is tuple and model.nodes and model.nodes[0].cls is not tuple:
        results = f"a tuple of {len(tree)}: if these are all results of one call, pass only the one that you mean"
        raise ValueError(f"{expected} {results}")
    if unknown:
        has = "a node" if any(node.path == unknown[0] for node in model.nodes) else "no leaf"
        # Functions are in a model, and not in what is made of one.
        is_model = set(model.paths) <= set(paths) and any(callable(leaves[paths.index(path)]) for path in unknown)
        remedy = "; the model comes first, then the other tree" if is_model else nearest(unknown[0], model.paths)
        raise ValueError(f"the tree has an entry at {unknown[0]!r}, where the model has {has}{remedy}")
    return [(model.index[path], value) for path, value in zip(paths, leaves, strict=True)]


def _one(index: Index, found: dict[int, Any], position: int, tied: Tied) -> Any:
    """Returns one value from the entries at the paths of a tie."""
    its = (Alias(position, position, ()), *index.aliases.get(position, ()))
    entries = [(alias, found[alias.leaf]) for alias in its if alias.leaf in found]
    if not entries:
        return None
    # A value at a computed alias alone gives none at the source, since a transform need not be invertible; a gradient
    # there can be pulled back.
    only_computed = bool(entries[0][0].transforms)
    paths, source = index.structure.paths, index.structure.spec(position)
    if only_computed and tied == "first":
        alias, name = paths[entries[0][0].leaf], paths[position]
        raise ValueError(f"the tree has a value only at {alias!r}, which is computed from {name!r}; put it at {name!r}")
    if tied is None and (len(entries) > 1 or only_computed):
        what = f"the tree has entries at {[paths[alias.leaf] for alias, _ in entries]}, which are one parameter"
        how = 'tied="sum" adds them, as is right for gradients, tied="first" takes the first, as is right for values'
        raise ValueError(f'{what}. Say how to read them: {how}; for several trees write tied=("sum", "first")')
    if tied != "sum" or (len(entries) == 1 and not only_computed):
        return entries[0][1]
    for alias, value in entries:
        if alias.transforms:
            _check_shape(index.structure, alias.leaf, value)
    values = [alias.pull_back(value, source) for alias, value in entries]
    dtype = common_dtype(jnp.result_type(value) for value in values)
    return functools.reduce(operator.add, [jnp.asarray(value, dtype) for value in values])


# -- The canonical gradient --------------------------------------------------------------------------------------------


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
    return index.canonical(slot_gradients(index, grads, missing), treedef)


def slot_gradients(
    index: Index,
    grads: PyTree,
    missing: Literal["zeros"] | None,
    dtype: DTypeLike | None = None,
    *,
    wide: bool = False,
    tied: Tied = "sum",
) -> list[Any]:
    """Returns the projected gradient of each slot, real if the slot is.

    With `tied="first"` it returns a tangent, a value, which must be real if the slot is. Each has the dtype of its
    slot, or the given one. With `wide`, for a step, a gradient in another dtype keeps at least single precision, and
    integers are an error.
    """
    found = per_slot(index, grads, tied, exact_shapes=True)
    try:  # the usual case: arrays of JAX, all as they should be
        if dtype is None and list(map(_dtype, found)) == index.dtypes and not any(map(_weak_type, found)):
            return found
    except AttributeError:
        pass
    for i, (value, own) in enumerate(zip(found, index.dtypes, strict=True)):
        to = own if dtype is None else dtype
        if value is None:
            found[i] = jnp.zeros(index.shapes[i], to) if missing else None
        elif not (isinstance(value, jax.Array) and value.dtype == own == to and not value.weak_type):
            array, path = jnp.asarray(value), index.slots[i].path
            if wide and not is_inexact(array.dtype):
                cast = "if it is a gradient, write gradient.astype(float)"
                raise TypeError(f"expected a floating gradient at {path!r}, got {describe(value)}; {cast}")
            if jnp.iscomplexobj(array) and not (is_complex(own) and is_complex(to)):
                if tied == "first":
                    raise TypeError(f"expected a real tangent at {path!r}, got {describe(value)}")
                array = array.real
            found[i] = array.astype(widened(to) if wide and array.dtype != to else to)
    return found
