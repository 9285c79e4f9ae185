"""save, load, metadata: writes a tree to one file, and reads it back into a tree like it."""

import contextlib
import enum
import gc
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from .._files.file import Inventory, file_at, stored_as
from .._files.names import name_of
from .._files.source import FilePath, as_path
from .._files.values import LONG
from .._forms.restructure import Restructure
from .._tree.structure import is_array, naming_deleted
from .._tree.text import describe, first_lines, function_name
from .._tree.types import PyTree
from ..optim._state import ModelTransformation
from ._contents import Contents, places_in_words
from ._reading import Reading
from ._resume import with_histories

M = TypeVar("M")


def save(path: FilePath, model: PyTree, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes the arrays of a tree, each once, and its numbers and texts to a file in the safetensors format, by path.

    >>> import os, tempfile, jax.numpy as jnp, optax
    >>> from treeparams import optim, saving
    >>> path = os.path.join(tempfile.mkdtemp(), "run.safetensors")
    >>> shared = jnp.array([1.0, 2.0])
    >>> model = {"embed": shared, "head": shared, "steps": jnp.array(3)}
    >>> tx = optim.trainable(optax.adam(0.1))
    >>> run = {"model": model, "optimiser": tx.init(model), "epoch": 5}
    >>> saving.save(path, run, metadata={"run": "7"})
    >>> list(saving.names(path, "model"))
    ['embed', 'steps']
    >>> saving.load(path, {"model": model, "optimiser": tx.init(model), "epoch": 0})["epoch"]
    5

    `save` writes trained and frozen parameters, integers, bools and PRNG keys, from JAX or NumPy, in the dtypes they
    have, the values of refs (`jax.new_ref`), and numbers and texts with their types. It does not write anything else:
    functions, other objects, static fields and the structure come from the code that builds the model. The file also
    records which paths share one array, the checksum of each array, which parameters are declared frozen, and which
    parameters each array of an optimiser's state belongs to. For a `Restructure` in the tree it records where each
    parameter lies in its vector or stacks. Statistics in an `eqx.nn.State` have the names of their layers if the model
    is in the same tree, `(model, state)`. A state alone goes by number, as does a class that is registered without keys
    (`jax.tree_util.register_pytree_node`): the file records the name of the class and the number of its children.

    Any program that reads safetensors can read the arrays. Complex numbers are stored as pairs, and dtypes that the
    format lacks as bytes.

    The new file replaces an old one only when all of it is on the disk, so a killed process or a full disk leaves the
    old file intact. The new file keeps the mode and the owner of the old one, if the system allows it. If several
    processes save to one path, the last one wins with a complete file. A NumPy array may change while it is written:
    the file then holds each piece as it was when that piece was written.

    Args:
        path: the path of the file, usually ending in `.safetensors`.
        model: any pytree: a model, a state, an average, or a dictionary of these and of numbers.
        metadata: a dictionary of texts for people and other programs. `saving.metadata(path)` reads it.

    Raises:
        OSError: the file cannot be written.
        ValueError: an array has no values, lies over several processes (use Orbax for these), or has a dtype that the
            format cannot hold; a name or text is not Unicode; `metadata` has a name that starts with `treeparams.`; the
            tree is nested too deeply for JAX; or the path is not a regular file, but a FIFO or `/dev/null`, for
            example.
        TypeError: the path does not come first; `metadata` is not a dictionary of texts; or a leaf that is not a
            pytree, such as a plain dataclass, a `deque`, a `functools.partial` or `jax.vmap(module)`, holds an array,
            which would not be saved. `save` looks at the objects that the leaf itself refers to: its attributes,
            `__wrapped__` of a function, the arguments of a partial. It does not look further, nor into closures.
    """
    as_path(path)
    said = {} if metadata is None else metadata
    if not isinstance(said, Mapping) or not all(isinstance(each, str) for pair in said.items() for each in pair):
        raise TypeError(f"metadata must be a dictionary of texts, {{str: str}}, got {said!r}")
    inventory, leaves, words = stored_in(model, "the path comes first: saving.save(path, model)")
    with naming_deleted(model):
        inventory.to_disk(path, inventory.header(words, said), leaves)


def stored_in(model: PyTree, instead: str) -> tuple[Inventory, dict[str, Any], dict[str, Any]]:
    """Returns how the arrays of a tree are stored, these by name, and the words that describe the tree.

    Args:
        model: the tree.
        instead: the call to suggest if it is not a tree.
    """
    _check_tree(model, instead)
    contents = Contents(model)
    lost = list(_lost_arrays(contents))
    if lost:
        raise TypeError(first_lines(lost))
    paths, names = contents.structure.paths, contents.names
    with naming_deleted(model):
        contents.store_what_differs()
        stored, frozen = contents.stored, contents.frozen
        inventory = Inventory({name: stored_as(name, contents.leaves[i]) for name, i in stored.items()})
    words = {
        "ties": {names[i]: (names[alias.source], str(alias)) for i, alias in contents.aliases.items()},
        "states": contents.states_in_words,
        "restructures": {path: places_in_words(each) for path, each in contents.of_class(Restructure).items()},
        "frozen": [name for name, i in stored.items() if i in frozen],
        "values": {name_of(paths[i]): value for i, value in contents.values.items()},
        "unkeyed": contents.structure.unkeyed,
    }
    return inventory, {name: contents.leaves[i] for name, i in stored.items()}, words


def _check_tree(tree: object, instead: str) -> None:
    """Rejects anything but a tree of arrays: a text or a path, because two arguments may be in PyTorch's order."""
    if isinstance(tree, (str, bytes, os.PathLike)):
        raise TypeError(f"expected a tree of arrays, got the text or path {tree!r}; {instead}")
    if isinstance(tree, (type, ModelTransformation)):
        raise TypeError(f"expected a model or a state, tx.init(model), got {function_name(tree)}, which has no arrays")


# -- Arrays inside leaves that are not pytrees, which JAX functions do not see -----------------------------------------

_BARE = (bytes, type, enum.Enum, np.generic, np.dtype, types.ModuleType, types.BuiltinFunctionType, types.MethodType)


def _lost_arrays(contents: Contents) -> Iterator[str]:
    """Yields a sentence for each leaf with arrays that would not be saved."""
    seen = set[int]()
    for i, (path, leaf) in enumerate(zip(contents.structure.paths, contents.leaves, strict=True)):
        is_kept = i in contents.values or (i in contents.names and not isinstance(leaf, np.ma.MaskedArray))
        is_bare = isinstance(leaf, _BARE) and not isinstance(leaf, LONG)
        if is_kept or is_bare or id(leaf) in seen:  # a model has many leaves, of few functions
            continue
        seen.add(id(leaf))
        if isinstance(leaf, (np.ma.MaskedArray, Mapping, *LONG)) or _is_foreign(leaf):
            lost = [", which JAX does not have, so it"]
        else:
            lost = [f" and not a pytree, so its array {describe(each)}" for each in _arrays_held_by(leaf)]
        if lost:
            what = f"{path!r} is a {type(leaf).__qualname__}{lost[0]} would not be saved"
            yield f"{what}: keep arrays in pytrees, such as an eqx.Module, a dict or jax.tree_util.Partial"


def _arrays_held_by(leaf: object) -> list[Any]:
    """Returns the arrays in objects that a leaf refers to; of a function `__wrapped__`, and not globals or closure."""
    held = vars(leaf).values() if isinstance(leaf, types.FunctionType) else gc.get_referents(leaf)
    found = list[Any]()
    for each in leaf.tolist() if isinstance(leaf, np.ndarray) else held:
        with contextlib.suppress(Exception):  # of what cannot be flattened, nothing would be saved
            found += jax.tree.leaves(each)
    found = [each for each in found if not isinstance(each, jax.ShapeDtypeStruct)]
    return [each for each in found if is_array(each) or _is_foreign(each)]


def _is_foreign(value: object) -> bool:
    """Returns whether a value is an array that JAX does not support: of texts, of times, or of another library."""
    if isinstance(value, np.ndarray):
        return value.dtype != object and not is_array(value)
    return all(hasattr(type(value), name) for name in ("shape", "dtype")) and not isinstance(value, np.generic)


# -- Reading -----------------------------------------------------------------------------------------------------------


def metadata(path: FilePath) -> dict[str, str]:
    """Reads the metadata that you passed to `save`, or that another program wrote.

    >>> import os, tempfile, jax.numpy as jnp
    >>> from treeparams import saving
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> saving.save(path, {"w": jnp.ones(2)}, metadata={"accuracy": "0.93"})
    >>> saving.metadata(path)
    {'accuracy': '0.93'}

    Args:
        path: the path of a safetensors file.

    Returns:
        A dictionary of texts.

    Raises:
        OSError: the file does not exist.
        ValueError: the file is not a safetensors file, it is damaged, or it is a message that changes another one.
    """
    return file_at(path).metadata


def load(path: FilePath, like: M, *, checksum: bool = True) -> M:
    """Reads a file that `save` wrote into a tree like the one that was saved.

    >>> import os, tempfile, equinox as eqx, jax, treeparams as tp
    >>> from treeparams import saving
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> make = lambda key: eqx.nn.MLP(2, 1, 4, 1, key=key)
    >>> model = make(jax.random.key(0))
    >>> saving.save(path, model)
    >>> print(tp.diff(saving.load(path, make(jax.random.key(1))), model))
    no differences
    >>> shapes = eqx.filter_eval_shape(make, jax.random.key(1))  # draws no random numbers
    >>> print(tp.diff(saving.load(path, shapes), model))
    no differences

    **By name.** Each array, number and text goes to its path, whatever the order of fields. So a dropout rate or
    `inference` is the one in the file; `saving.plan(path, like)(path)` keeps those of `like` instead. `load` checks
    names, shapes, dtypes, ties and histories before it reads the first array, and compares each array with its checksum
    as it reads it. If names or shapes have changed since the file was saved, map them with
    `saving.plan(path, model, rename=...)`.

    **By position.** The children of a class without keys have no names. They go into a class of the same name with as
    many children. If that class itself changed their order, nothing tells. So register it with
    `jax.tree_util.register_pytree_with_keys`.

    Args:
        path: the path of a file that `save` wrote.
        like: a tree with the same structure, shapes and dtypes, with numbers where the file has numbers, and with the
            same ties of trained parameters. You get functions, other objects and static fields from it. Arrays go where
            its arrays are: to their devices, with their sharding, in NumPy or in JAX. A ref (`jax.new_ref`) stays that
            ref: its array is written into it, after all of the file is checked. A leaf may be a `jax.ShapeDtypeStruct`;
            it gets the ties of the file. For a state of an optimiser `tx.init(model)` is enough: the file says which
            parameters train, wait, and took their steps together.
        checksum: whether to compare the arrays with their checksums.

    Returns:
        The tree, in new buffers but for refs, with one array at all paths of a tie. No array has a weak type.

    Raises:
        OSError: the file does not exist.
        ValueError: the file is damaged, or `save` did not write it; or it does not fit `like`, and the error lists
            every difference.
        TypeError: the path does not come first.
    """
    as_path(path, "load(path, like)")
    _check_tree(like, "the path comes first: saving.load(path, like)")
    file = file_at(path)
    if not file.is_ours:
        raise ValueError(f"{file.source.name} was not written by saving.save; write saving.plan(path, model)(path)")
    with file.understood():
        reading = Reading(with_histories(like, file), file)
        reading.fit()
    return reading.tree(file.arrays(file.specs, checksum))
