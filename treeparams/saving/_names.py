"""names: gives the arrays of any source by name - a file, a dictionary, a model, a layout, Orbax's metadata."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._files.arrays import array_spec, in_numpy
from .._files.names import Names, name_of, names_in
from .._slots.layout import Layout, index_of
from .._slots.ties import Alias
from .._tree.structure import Structure, is_array
from .._tree.text import first_few
from .._tree.types import PyTree, value_of
from ._contents import Contents
from ._rename import Rename, Transforms, routes


def names_of(source: Any) -> Names:
    """Returns the names of any source."""
    known = names_in(source)
    if known is not None:
        return known
    if isinstance(source, Layout):
        index = index_of(source)
        structure = index.structure
        return _of_structure(structure, index.ties, lambda i: jax.ShapeDtypeStruct(*structure.spec(i)[:2]))
    if isinstance(source, np.lib.npyio.NpzFile):
        source = dict(source)
    # Only arrays have names; a number among the values has none.
    is_flat = isinstance(source, Mapping) and jtu.all_leaves(source.values(), is_leaf=lambda each: each is None)
    if is_flat and set(map(type, source)) <= {str}:
        return _of_arrays({name: value_of(array) for name, array in source.items() if not _is_no_array(array)})
    return _of_tree(source)


def _of_structure(
    structure: Structure, ties: Iterable[Alias], read: Callable[[int], Any], numbers: Any = None, states: Any = ()
) -> Names:
    """Returns the names of the arrays of a tree, which `read` gives by leaf."""
    names = {i: name_of(structure.paths[i]) for i, spec in enumerate(structure.specs) if spec is not None}
    ties = list(ties)
    computed = {names[tie.leaf] for tie in ties if tie.transforms}
    leaves = {name: i for i, name in names.items() if name not in computed}
    specs = {name: structure.spec(i) for name, i in leaves.items()}
    aliases = {names[tie.leaf]: names[tie.source] for tie in ties if not tie.transforms}
    # What another program restored is of plain containers, whatever classes it was saved from.
    is_plain = numbers is not None and all(node.cls in (dict, list, tuple) for node in structure.nodes)
    marks = None if is_plain else structure.unkeyed
    return Names(specs, lambda name: read(leaves[name]), aliases, dict(states), numbers, marks, computed)


def _is_no_array(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return not is_array(value)
    return not (hasattr(value, "shape") and hasattr(value, "dtype")) or isinstance(value, np.generic)


def _checked(name: str, array: Any) -> Any:
    """Returns an array; rejects those of PyTorch, whose dtypes are not NumPy's, and masked ones."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name!r} is a masked array, whose mask would be lost; pass array.filled(...)")
    if type(array).__module__.partition(".")[0] == "torch":
        raise TypeError(f"{name!r} is a PyTorch tensor; pass NumPy arrays, {{name: tensor.numpy() for ...}}")
    return array


def _of_arrays(arrays: Mapping[str, Any]) -> Names:
    specs = {name: array_spec(_checked(name, array)) for name, array in arrays.items()}
    # One array under two names is a tie, and one description of an array, such as a `jax.ShapeDtypeStruct`, is none.
    first: dict[int, str] = {}
    valued = {name: array for name, array in arrays.items() if isinstance(array, (np.ndarray, jax.Array))}
    aliases = {name: first.setdefault(id(array), name) for name, array in valued.items()}
    aliases = {alias: name for alias, name in aliases.items() if alias != name}
    return Names(specs, lambda name: _read(arrays[name]), aliases)


def _read(array: Any) -> Any:
    """Returns an array with values in NumPy or JAX, even if it lies in a file, like those of h5py."""
    if isinstance(array, jax.Array) or not hasattr(array, "__array__"):
        return array
    array = np.asarray(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _of_tree(tree: PyTree) -> Names:
    for attribute in ("item_metadata", "tree"):  # of Orbax's metadata of a checkpoint
        if type(tree).__module__.startswith("orbax."):
            tree = getattr(tree, attribute, tree)
    contents = Contents(jtu.tree_map_with_path(_as_known, tree))
    contents.store_what_differs()
    return names_of_contents(contents)


def _as_known(path: jtu.KeyPath, leaf: Any) -> Any:
    """Returns a leaf unchanged, but the shape of an array that JAX does not know, such as Orbax's description."""
    leaf = value_of(leaf)
    if is_array(leaf) or _is_no_array(leaf):
        return leaf
    leaf = _checked(jtu.keystr(path), leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def names_of_contents(contents: Contents) -> Names:
    """Returns the names of a tree that was taken apart."""
    paths, leaves = contents.structure.paths, contents.leaves
    numbers = {name_of(paths[i]): leaves[i] for i in contents.values}
    ties = contents.aliases.values()
    return _of_structure(contents.structure, ties, leaves.__getitem__, numbers, contents.states_in_words)


def names(
    source: Any, below: str | None = None, *, rename: Rename | None = None, transform: Transforms | None = None
) -> Mapping[str, Any]:
    """Returns the arrays of a model or a file by name, each tie once, for other programs and for plans.

    To write them to a file, use `safetensors.numpy.save_file`; `saving.save` is for trees.

    >>> import os, tempfile, equinox as eqx, jax
    >>> from treeparams import saving
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> theirs = saving.names(mlp, rename={"layers.*.**": "net.*.**"})
    >>> list(theirs)
    ['net.0.weight', 'net.0.bias', 'net.1.weight', 'net.1.bias']
    >>> from safetensors.numpy import save_file
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save_file(theirs, path)
    >>> saving.names(path)["net.0.weight"].shape
    (4, 2)

    Args:
        source: a model or any pytree; a dictionary of arrays; the result of `np.load` for an `.npz` file; or the path
            of a safetensors file or a list of several, whose arrays are each read when you access them.
        below: the path of a node. You get only the names below it, without that path.
        rename: as in `saving.plan`.
        transform: as in `saving.plan`.

    Returns:
        For a file without `rename` and `transform`, a mapping from names to arrays. Otherwise a dictionary of NumPy
        arrays, in which PRNG keys are given as their words, and other arrays keep their dtypes. If the source has no
        values (a `Layout`, Orbax's metadata of a checkpoint), the values are `jax.ShapeDtypeStruct`s.

    Raises:
        OSError: the file does not exist.
        ValueError: a pattern matches nothing; two arrays get one name; the file is damaged; nothing lies below `below`;
            or a function gets 64-bit values that do not fit into JAX's 32 bits.
        TypeError: as for `saving.plan`.
    """
    known = names_of(source) if below is None else names_of(source).below(below)
    if known.is_file and rename is None and transform is None:
        return known
    found, used, _ = routes({name: known.specs[name] for name in known}, rename, transform, None)
    used.update(name for route in found for name in route.sources)
    lost = [name for name in known if name not in used]
    if lost:
        raise ValueError(f"rename merges {first_few(lost)} with arrays that are missing; drop them, {{...: None}}")
    made: dict[str, Any] = {}
    for route in found:
        arrays = [known[name] for name in route.sources]
        is_abstract = any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays)
        arrays = jax.eval_shape(route, *arrays) if is_abstract else list(map(in_numpy, route(*arrays)))
        if len(arrays) != len(route.targets):
            raise ValueError(f"{route.how} gives {len(arrays)} arrays, but the names are {', '.join(route.targets)}")
        if not made.keys().isdisjoint(route.targets):
            raise ValueError(f"{route.sources[0]!r} and another array both get one name of {', '.join(route.targets)}")
        made |= zip(route.targets, arrays, strict=True)
    return made
