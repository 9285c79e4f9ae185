"""Arrays by name, whatever they come from: a file, a dictionary, a model, a layout, Orbax's metadata."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._slots.layout import Layout, index_of
from .._tree.paths import nearest
from .._tree.structure import Spec, is_array
from .._tree.text import describe, first_few
from .._tree.types import PyTree
from ._arrays import array_spec, in_numpy
from ._contents import Contents, head_of, name_of, state_in_words
from ._file import File
from ._rename import Rename, Transforms, routes


class Names(Mapping[str, Any]):
    """Arrays by name, each read where it is asked for.

    Attributes:
        specs: shape and dtype in JAX of each, of further names of one array too.
        aliases: the further names that only say again what another name says, and that one.
        states: the words on the states of optimisers, by path.
        check: compares an array with its checksum, where there is one.
        is_file: whether each array is read into a buffer of its own.
    """

    def __init__(
        self,
        specs: Mapping[str, Spec],
        read: Callable[[str], Any],
        aliases: Mapping[str, str] | None = None,
        states: Mapping[str, dict[str, Any]] | None = None,
        check: Callable[[str], None] = lambda name: None,
        is_file: bool = False,
    ) -> None:
        self.specs = specs
        self.aliases = aliases or {}
        self.states = states or {}
        self.check = check
        self.is_file = is_file
        self._read = read

    def __getitem__(self, name: str) -> Any:
        if name not in self.specs:
            raise KeyError(f"{name!r}{nearest(name, self.specs)}")
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.specs if name not in self.aliases)

    def __len__(self) -> int:
        return len(self.specs) - len(self.aliases)

    def __repr__(self) -> str:
        return f"Names({', '.join(f'{name}: {describe(self.specs[name])}' for name in self)})"

    def below(self, path: str) -> "Names":
        """The names below a node, without its path."""
        short = {name: name[len(path) + 1 :] for name in self.specs if name == path or name.startswith(f"{path}.")}
        if not short:
            heads = dict.fromkeys(map(head_of, self.specs))
            raise ValueError(f"nothing lies below {path!r}{nearest(path, heads)}")
        whole = {new: name for name, new in short.items()}
        aliases = {short[name]: short[to] for name, to in self.aliases.items() if name in short and to in short}
        states = {at[len(path) + 1 :]: s for at, s in self.states.items() if at == path or at.startswith(f"{path}.")}
        specs = {new: self.specs[name] for name, new in short.items()}
        return Names(
            specs,
            lambda name: self[whole[name]],
            aliases,
            states,
            lambda name: self.check(whole[name]),
            self.is_file,
        )


def names_of(source: Any) -> Names:
    """The names of whatever has names."""
    if isinstance(source, Names):
        return source
    paths = _paths_in(source)
    if paths:
        return _of_several([_of_file(File(path)) for path in paths])
    if isinstance(source, Layout):
        index = index_of(source)
        paths, specs = index.structure.paths, index.structure.specs
        names = {name_of(paths[i]): spec for i, spec in enumerate(specs) if spec is not None}
        aliases = {name_of(paths[a.leaf]): name_of(paths[a.source]) for a in index.ties if not a.transforms}
        return Names(names, lambda name: jax.ShapeDtypeStruct(*names[name][:2]), aliases)
    # What is no array, such as a number among the values, has no name.
    if isinstance(source, Mapping) and all(isinstance(name, str) and _is_leaf(each) for name, each in source.items()):
        return _of_arrays({name: array for name, array in source.items() if not _is_no_array(array)})
    return _of_tree(source)


def _is_leaf(value: object) -> bool:
    return value is None or jtu.all_leaves([value])


def _is_no_array(value: object) -> bool:
    return not (hasattr(value, "shape") and hasattr(value, "dtype")) or isinstance(value, np.generic)


def _checked(name: str, array: Any) -> Any:
    """An array, refused where it is one of PyTorch, whose dtypes are none of NumPy."""
    if type(array).__module__.partition(".")[0] == "torch":
        raise TypeError(f"{name!r} is an array of PyTorch; pass NumPy's, {{name: tensor.numpy() for ...}}")
    return array


def _of_file(file: File) -> Names:
    aliases = {alias: source for alias, (source, transforms) in file.words["ties"].items() if not transforms}
    specs = file.specs | {alias: file.specs[source] for alias, source in aliases.items()}
    stored = {name: aliases.get(name, name) for name in specs}
    return Names(
        specs,
        lambda name: file.read(stored[name]),
        aliases,
        file.words["states"],
        lambda name: file.check(stored[name]),
    )


def _paths_in(source: object) -> Sequence[Any]:
    """The paths of files, where a source is one or several."""
    several = source if isinstance(source, (list, tuple)) else [source]
    return several if all(isinstance(each, (str, os.PathLike)) for each in several) else ()


def _of_several(files: Sequence[Names]) -> Names:
    """The names of several files together, as of a model that is saved in shards."""
    owners: dict[str, Names] = {}
    for file in files:
        for name in file.specs:
            if name in owners:
                raise ValueError(f"{name!r} is in two of the files")
            owners[name] = file
    return Names(
        {name: file.specs[name] for name, file in owners.items()},
        lambda name: owners[name][name],
        {alias: name for file in files for alias, name in file.aliases.items()},
        {path: state for file in files for path, state in file.states.items()},
        lambda name: owners[name].check(name),
        is_file=True,
    )


def _of_arrays(arrays: Mapping[str, Any]) -> Names:
    specs = {name: array_spec(_checked(name, array)) for name, array in arrays.items()}
    first: dict[int, str] = {}
    aliases = {name: first.setdefault(id(array), name) for name, array in arrays.items()}
    return Names(specs, arrays.__getitem__, {alias: name for alias, name in aliases.items() if alias != name})


def _of_tree(tree: PyTree) -> Names:
    for attribute in ("item_metadata", "tree"):  # of what Orbax says of a checkpoint
        if type(tree).__module__.startswith("orbax."):
            tree = getattr(tree, attribute, tree)

    return names_of_contents(Contents(jtu.tree_map_with_path(_as_known, tree)))


def _as_known(path: jtu.KeyPath, leaf: Any) -> Any:
    """A leaf as it is, but an array that JAX does not know, such as Orbax's description of one, by its shape."""
    if is_array(leaf) or _is_no_array(leaf):
        return leaf
    leaf = _checked(jtu.keystr(path), leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def names_of_contents(contents: Contents) -> Names:
    """The names of a tree that is taken apart."""
    specs = {name: contents.spec(i) for i, name in contents.names.items()}
    leaves = {name: i for i, name in contents.names.items()}
    plain = {i: alias.source for i, alias in contents.aliases.items() if not alias.transforms}
    aliases = {contents.names[i]: contents.names[source] for i, source in plain.items()}
    states = {path: state_in_words(state) for path, state in contents.states.items()}
    return Names(specs, lambda name: contents.leaves[leaves[name]], aliases, states)


def names(
    source: Any, below: str | None = None, *, rename: Rename | None = None, transform: Transforms | None = None
) -> Mapping[str, Any]:
    """The arrays of a model or a file by name, each tie once: for other programs, and for plans.

    `safetensors.numpy.save_file` writes them; `saving.save` is for trees.

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
        source: a model or any pytree, a dictionary of arrays, or a safetensors file or a list of several, of which each
            array is read when it is asked for.
        below: the path of a node, to take only the names below it, without that path.
        rename: as in `saving.plan`.
        transform: as in `saving.plan`.

    Returns:
        Of a file the arrays by name, as a mapping. Else, or with `rename`, a dictionary of NumPy arrays: keys as their
        words, all else in its dtype. Of a source without values - a `Layout`, Orbax's metadata of a checkpoint - the
        values are `jax.ShapeDtypeStruct`s.

    Raises:
        OSError: there is no such file.
        ValueError: a pattern matches nothing; two arrays get one name; the file is damaged; nothing lies below.
        TypeError: as `saving.plan`.
    """
    known = names_of(source)
    known = known if below is None else known.below(below)
    if (isinstance(source, Names) or _paths_in(source)) and rename is None and transform is None:
        return known
    found, used, _ = routes({name: known.specs[name] for name in known}, rename, transform, None)
    used.update(name for route in found for name in route.sources)
    if len(used) < len(known):
        lost = [name for name in known if name not in used]
        raise ValueError(
            f"rename merges {first_few(lost)} with arrays that are not there; drop them: rename={{...: None}}"
        )
    made: dict[str, Any] = {}
    for route in found:
        arrays = [known[name] for name in route.sources]
        is_abstract = any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays)
        arrays = jax.eval_shape(route, *arrays) if is_abstract else route(*arrays)
        if len(arrays) != len(route.targets):
            raise ValueError(f"{route.how} gives {len(arrays)} arrays, and the names are {', '.join(route.targets)}")
        for name, array in zip(route.targets, arrays, strict=True):
            if name in made:
                raise ValueError(f"{route.sources[0]!r} and another array both get the name {name!r}")
            made[name] = array if is_abstract else in_numpy(array)
    return made
