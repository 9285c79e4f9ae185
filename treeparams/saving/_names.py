"""names: gives the arrays of any source by name - a file, a dictionary, a model, a layout, Orbax's metadata.

Names are mapped to names by globs: arrays go one to one, or are split, merged, stacked, unstacked or dropped.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .._files.arrays import array_spec, as_in_jax, in_numpy
from .._files.names import Names, name_of, names_in, split_name
from .._slots.layout import Layout, index_of
from .._slots.ties import Alias
from .._tree.paths import Glob, nearest, quote, unquote
from .._tree.structure import Spec, Structure, is_array
from .._tree.text import describe, first_few, function_name, in_short
from .._tree.types import Array, PyTree, value_of
from ._contents import Contents

Rename = Mapping[Any, Any] | Callable[[str], str | None]
"""`{left: right}`, where a side is a glob or several, and the right may be `None`; or a function of a name."""
Transforms = Mapping[Any, Callable[..., Any]]
_Star = str | tuple[str, ...]
_Stars = tuple[_Star, ...]


def stack(*arrays: Array) -> jax.Array | np.ndarray:
    """Stacks several arrays, such as those of layers, into one."""
    # JAX compiles a program for each number of operands, which takes seconds for thousands of them.
    are_numpy = all(isinstance(each.dtype, np.dtype) and not isinstance(each, Tracer) for each in arrays)
    if are_numpy and len({each.dtype for each in arrays}) == 1:
        return np.stack([np.asarray(each) for each in arrays])
    return jnp.stack(list(map(jnp.asarray, arrays)))


def unstack(array: jax.Array | np.ndarray) -> list[Any]:
    """Returns the rows of an array, each as an array of the same kind, even if it is a single number."""
    return [array[row, ...] for row in range(len(array))]


@dataclasses.dataclass(frozen=True)
class Route:
    """Arrays that go somewhere together: the names that they come from, and the names that they go to."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    function: Callable[..., Any] | None = None
    is_exact: bool = False  # whether `rename` has these names themselves, without a star

    @property
    def how(self) -> str:
        """The name of the function that changes the arrays; empty if nothing does."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return "" if function is None else function_name(function)

    def __call__(self, *arrays: Any) -> list[Any]:
        """Returns one array for each target, from one for each source."""
        if self.function is None:
            return list(arrays)
        # A function of `jax.numpy` cuts 64 bits to 32 without a word. NumPy's stacks and rows keep them.
        if not (self.function in (stack, unstack) and all(isinstance(array, np.ndarray) for array in arrays)):
            for name, array in zip(self.sources, arrays, strict=True):
                as_in_jax(name, array)
        try:
            made = self.function(*arrays)
            made = list(made) if isinstance(made, (tuple, list)) else [made]
            made = [np.asarray(each) if isinstance(each, np.generic) else each for each in made]
            for each in made:
                if not hasattr(each, "dtype"):
                    raise TypeError(f"it returned {describe(each)}")
        except Exception as error:
            given = ", ".join(f"{name!r} ({describe(array)})" for name, array in zip(self.sources, arrays, strict=True))
            raise ValueError(f"{self.how} of {given} fails: {in_short(error)}") from error
        return made


def routes(
    specs: Mapping[str, Spec], rename: Rename | None, transform: Transforms | None, targets: Collection[str] | None
) -> tuple[list[Route], set[str], set[str]]:
    """Reads `rename` and `transform`.

    The targets determine into how many rows an array is unstacked; without targets, its leading axis does.

    Returns:
        The routes of arrays by name, the names that are dropped, and the targets that keep their arrays.
    """
    for name, given, right in (("transform", transform, "function"), ("rename", rename, "right")):
        if not (given is None or isinstance(given, Mapping) or (name == "rename" and callable(given))):
            raise TypeError(f"{name} must be a dictionary {{left: {right}}}, got {describe(given)}")
    functions = dict(transform or {})
    for key, function in functions.items():
        if not callable(function):
            raise TypeError(f"transform[{key!r}] must be a function of arrays, got {describe(function)}")
    renamed = {name: rename(name) if callable(rename) else name for name in specs}
    for name, new in renamed.items():
        if not (new is None or isinstance(new, str)):
            raise TypeError(f"rename({name!r}) must return a name, or None to drop it, got {describe(new)}")
    sides = dict(rename) if isinstance(rename, Mapping) else {}
    stays = _side(sides.pop(None), "right") if None in sides else ()
    kept = {name for glob in stays for name in _matched(glob, targets or (), "rename, None", "path")}
    entries = [_Entry(left, right) for left, right in sides.items()]
    rest = _left_by(entries, specs)
    found = [Route((name,), (new,)) for name in rest if (new := renamed[name]) is not None]
    for entry in entries:
        found += entry.routes(specs, functions.pop(entry.left, None), targets)
    dropped = {name for entry in entries if not entry.rights for name in entry.taken}
    dropped |= {name for name in rest if renamed[name] is None}
    return _with_functions(found, functions), dropped, kept


def _side(side: object, which: str) -> tuple[Glob, ...]:
    texts = (side,) if isinstance(side, str) else tuple(side) if isinstance(side, list) else side
    if not isinstance(texts, tuple) or not texts or not all(isinstance(text, str) for text in texts):
        also = ", or None" if which == "right" else ""
        raise TypeError(f"a {which} side of rename must be a name, a glob or several of these{also}, got {side!r}")
    return tuple(map(Glob, texts))


def _match(glob: Glob, name: str) -> _Stars | None:
    """Returns the text of the stars if a glob matches a name. A name also matches its own text, such as `w[0]`."""
    entries = split_name(name)
    stars = glob.match(entries)
    if stars is None and len(entries) == 1 and "." in name:  # a key of a flat dictionary that was saved as a tree
        stars = glob.match(tuple(map(quote, unquote(name).split("."))))
    return () if stars is None and not glob.stars and glob.text == name else stars


def _matched(glob: Glob, names: Collection[str], of: str, kind: str = "name") -> list[str]:
    """Returns the names that a glob of `rename` or `transform` matches; raises an error if there are none."""
    found = [name for name in names if _match(glob, name) is not None]
    if found:
        return found
    below = next((name for name in names if glob.selects(split_name(name))), None)
    hint = f"; {glob.text}.** matches the names below it, such as {below!r}" if below else nearest(glob.text, names)
    raise ValueError(f"{of}: {glob.text!r} matches no {kind}{hint}")


def _with_functions(found: list[Route], functions: Mapping[Any, Any]) -> list[Route]:
    """Returns the routes with the functions for globs over their sources."""
    for key, function in functions.items():
        if not isinstance(key, str):
            raise ValueError(f"transform has {key!r}, which is no left side of rename; write it exactly as in rename")
        names = set(_matched(Glob(key), [name for route in found for name in route.sources], "transform"))
        for i, route in enumerate(found):
            if names.isdisjoint(route.sources):
                continue
            if route.function in (stack, unstack) or len(route.sources) + len(route.targets) > 2:
                what = f"transform has {key!r}, which matches {route.sources[0]!r}, but that goes with others"
                raise ValueError(f"{what}; write the transform under their left side of rename")
            found[i] = dataclasses.replace(route, function=route.function or function)
    return found


class _Entry:
    """An entry of `rename`, and the names that it takes, each with the number of its glob and the stars' text."""

    def __init__(self, left: object, right: object) -> None:
        self.left = left
        self.lefts = _side(left, "left")
        self.rights: tuple[Glob, ...] = () if right is None else _side(right, "right")  # none: the names are dropped
        self.taken: dict[str, tuple[int, _Stars]] = {}
        self._is_many = len(self.lefts) + len(self.rights) > 2
        ours, theirs = ({len(glob.stars) for glob in side} for side in (self.lefts, self.rights))
        self._surplus = max(ours) - max(theirs) if self.rights else 0
        # A star more on one side tells rows of a stack apart; so there is one glob on each side.
        longer = (self.lefts if self._surplus > 0 else self.rights)[:1]
        can_stack = not self._is_many and abs(self._surplus) == 1 and any("*" in glob.stars for glob in longer)
        if self.rights and (max(len(ours), len(theirs)) > 1 or (self._surplus and not can_stack)):
            what = f"rename, {left!r}: the stars of {right!r} are not those of the left side"
            raise ValueError(f"{what}; one more '*' on the left stacks arrays, one more on the right unstacks one")

    def routes(
        self, specs: Mapping[str, Spec], function: Callable[..., Any] | None, targets: Collection[str] | None
    ) -> Iterator[Route]:
        """Yields the routes of the names that the entry has taken; of globs that go together, only complete sets."""
        if self._is_many and function is None and self.rights:
            what = f"rename, {self.left!r}: it merges or splits arrays, so write how: transform={{{self.left!r}: ...}}"
            raise ValueError(f"{what}, a function from one array for each source to one for each target")
        row = self._star_of_rows() if self._surplus > 0 else None
        together: dict[_Stars, dict[int, str]] = {}
        for name, (number, stars) in self.taken.items() if self.rights else ():
            if row is not None:
                number, stars = _number(stars[row]), stars[:row] + stars[row + 1 :]
            other = together.setdefault(stars, {}).setdefault(number, name)
            if other != name:
                raise ValueError(f"rename, {self.left!r}: it matches {other!r} and {name!r}, which go to one place")
        function = function or {1: stack, 0: None, -1: unstack}[self._surplus]
        for stars, its in together.items():
            # Of `("*.q", "*.k")`, a layer that has `q` alone gives nothing: its name stays unused, which is reported.
            if len(its) >= len(self.lefts):
                sources = tuple(its[number] for number in sorted(its))
                if self._surplus < 0:
                    made = self._rows(stars, max(specs[sources[0]].shape[:1], default=1), targets)
                else:
                    made = tuple(right.filled(stars) for right in self.rights)
                yield Route(sources, made, function, is_exact=not stars)

    def _star_of_rows(self) -> int:
        """Returns the position of the last star that matches only numbers."""
        for at in reversed(range(len(self.lefts[0].stars))):
            if all(_number(stars[at]) >= 0 for _, stars in self.taken.values()):
                return at
        raise ValueError(f"rename, {self.left!r}: none of its '*' matches numbers alone, so nothing can be stacked")

    def _rows(self, stars: _Stars, count: int, targets: Collection[str] | None) -> tuple[str, ...]:
        """Returns the names of an array's rows: those among the targets, in numeric order, or else `count` new ones."""
        right, rows = self.rights[0], list(map(str, range(count)))
        for at in reversed([i for i, star in enumerate(right.stars) if star == "*"]):
            if targets is not None:
                found = filter(None, (_match(right, target) for target in targets))
                rows = sorted({its[at] for its in found if _number(its[at]) >= 0}, key=_number)
            made = [right.filled((*stars[:at], row, *stars[at:])) for row in rows]
            made = tuple([name for name in made if targets is None or name in targets])
            if made:  # the other stars have what they have on the left
                return made
        return ()


def _number(star: _Star) -> int:
    """Returns the number that a star matched, or -1."""
    return int(star) if isinstance(star, str) and star.isdecimal() else -1


def _left_by(entries: Sequence[_Entry], names: Collection[str]) -> list[str]:
    """Gives each name to the first entry that matches it, and returns the names that no entry matches."""
    globs = [(entry, number, glob) for entry in entries for number, glob in enumerate(entry.lefts)]
    takers = dict[str, _Entry]()
    for name in names:
        for entry, number, glob in globs:
            if name not in takers and (stars := _match(glob, name)) is not None:
                takers[name], entry.taken[name] = entry, (number, stars)
    for entry, number, glob in globs:
        is_default = glob.text == "**" and entry is entries[-1]
        if all(number != its for its, _ in entry.taken.values()):
            matched = _matched(glob, names, "rename")
            if not (is_default or (entry.taken and not entry.rights)):
                earlier = first_few(list(dict.fromkeys(repr(takers[name].left) for name in matched)))
                raise ValueError(f"rename: {glob.text!r} comes too late: {earlier} took all that it matches")
    return [name for name in names if name not in takers]


# -- Names of any source ----------------------------------------------------------------------------------------------


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


def _not_foreign(name: str, array: Any) -> Any:
    """Returns an array; rejects those of PyTorch, whose dtypes are not NumPy's, and masked ones."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name!r} is a masked array, whose mask would be lost; pass array.filled(...)")
    if type(array).__module__.partition(".")[0] == "torch":
        raise TypeError(f"{name!r} is a PyTorch tensor; pass NumPy arrays, {{name: tensor.numpy() for ...}}")
    return array


def _of_arrays(arrays: Mapping[str, Any]) -> Names:
    specs = {name: array_spec(_not_foreign(name, array)) for name, array in arrays.items()}
    # One array under two names is a tie, and one description of an array, such as a `jax.ShapeDtypeStruct`, is none.
    first: dict[int, str] = {}
    valued = {name: array for name, array in arrays.items() if isinstance(array, (np.ndarray, jax.Array))}
    aliases = {name: first.setdefault(id(array), name) for name, array in valued.items()}
    aliases = {alias: name for alias, name in aliases.items() if alias != name}
    return Names(specs, lambda name: _as_numpy(arrays[name]), aliases)


def _as_numpy(array: Any) -> Any:
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
    paths, leaves = contents.structure.paths, contents.leaves
    numbers = {name_of(paths[i]): leaves[i] for i in contents.values}
    ties = contents.aliases.values()
    return _of_structure(contents.structure, ties, leaves.__getitem__, numbers, contents.states_in_words)


def _as_known(path: jtu.KeyPath, leaf: Any) -> Any:
    """Returns a leaf unchanged, but the shape of an array that JAX does not know, such as Orbax's description."""
    leaf = value_of(leaf)
    if is_array(leaf) or _is_no_array(leaf):
        return leaf
    leaf = _not_foreign(jtu.keystr(path), leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


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
