"""Which parameters are tied.

A tie has a *source*, whose array is the parameter, and *aliases*, which hold that array or a fixed linear function of
it, which can be recognised again in other processes. Ties are found by identity among the array objects, declared on
classes, or passed to `tp.layout`. A declared or given tie joins two sets of identical arrays, and the path that it
names as source is the source, wherever it is in the tree.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._tree.declare import Given, read_ties
from .._tree.paths import join_path, nearest, split_path
from .._tree.static_keys import found_at, static_key
from .._tree.structure import Spec, Structure
from .._tree.text import describe, function_name

# -- Linear functions --------------------------------------------------------------------------------------------------


class _Transform:
    """A linear function with a static identity: equal to another of the same function and bound arguments."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        """Checks that the function can be recognised again."""
        # A partial of a partial is one, to Python.
        bound = function if isinstance(function, functools.partial) else functools.partial(function)
        self.function, self._inner = function, bound.func
        self._names = _found_under(self._inner)
        self._bound = bound.args, tuple(sorted(bound.keywords.items()))
        try:
            hash(self._bound)
        except TypeError as error:
            raise ValueError(f"a tie's transform binds an argument that cannot be hashed: {error}") from error
        self._key = static_key(self._bound)  # `2` and `np.float32(2)` are equal and give other dtypes

    def __call__(self, value: ArrayLike) -> Any:
        return self.function(value)

    def __eq__(self, other: object) -> bool:
        # By the function itself, not its name alone: in a notebook a name may come to stand for another function.
        return isinstance(other, _Transform) and self._inner is other._inner and self._key == other._key

    def __hash__(self) -> int:
        return hash((self._names, self._key))

    def __reduce__(self) -> Any:
        return _found, (*self._names, *self._bound)

    def __repr__(self) -> str:
        args, keywords = self._bound
        arguments = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in keywords)])
        return self._names[1] + (f"({arguments})" if arguments else "")

    def tried(self, spec: Spec) -> tuple[jax.ShapeDtypeStruct, bool]:
        """Returns the shape and dtype of the result, and whether it is the array itself (a transpose of one axis).

        The array at an alias is then the array at its source, and such a tie is the same as one without a transform.
        """
        source = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        try:
            jaxpr, result = jax.make_jaxpr(self.__call__, return_shape=True)(source)
            jax.eval_shape(jax.linear_transpose(self.__call__, source), result)
        except Exception as error:
            raise ValueError(f"a tie's transform must be linear, but JAX cannot transpose {self}: {error}") from error
        with jax.ensure_compile_time_eval():
            zeros = jnp.zeros(spec.shape, spec.dtype)
            at_zero = self(zeros)
            if not isinstance(at_zero, jax.Array) or jnp.any(at_zero != 0):
                raise ValueError(f"a tie's transform must be linear, but {self} of zeros is not an array of zeros")
        return result, at_zero is zeros or jaxpr.jaxpr.outvars[0] is jaxpr.jaxpr.invars[0]


def _found_under(function: Callable[..., Any]) -> tuple[str, str]:
    """Returns the module and the name by which another process finds a function."""
    module = getattr(function, "__module__", None)
    for name in (getattr(function, "__qualname__", None), getattr(function, "__name__", None)):
        if module and name and found_at(module, name) is function:
            return module, name
    why = f"{function_name(function)} is made anew each time"
    remedy = "use a function at module level, such as jnp.transpose, or a functools.partial of one"
    raise ValueError(f"a tie's transform must be found again in the next process, but {why}; {remedy}")


def _found(module: str, name: str, args: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]) -> _Transform:
    importlib.import_module(module)
    function = found_at(module, name)
    return _Transform(functools.partial(function, *args, **dict(keywords)) if args or keywords else function)


# -- Ties --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Alias:
    """A further leaf of a parameter: the source's array, or the transforms of it, one after another."""

    leaf: int
    source: int
    transforms: tuple[_Transform, ...]
    # By a class, or to `tp.layout`; else the two are one array object. However a tie came about, programs over the two
    # are the same.
    is_said: bool = dataclasses.field(default=False, compare=False)

    def __str__(self) -> str:
        """Returns the transforms in words; empty if there are none."""
        return " of ".join(map(repr, reversed(self.transforms)))

    def value_from(self, value: Any, source: Spec) -> Any:
        """Computes the value of the alias from the value of the source.

        The value may be a stack of such arrays, as in an ensemble. Any other value goes to all paths of a tie
        unchanged: a label per parameter, a norm.
        """
        shape = getattr(value, "shape", None)
        stacked = -1 if shape is None else len(shape) - len(source.shape)
        if shape is None or stacked < 0 or tuple(shape[stacked:]) != source.shape:
            return value
        # A transform is a function of one array, which need not know of axes in front.
        function = self._apply
        for _ in range(stacked):
            function = jax.vmap(function)
        return jax.eval_shape(function, value) if isinstance(value, jax.ShapeDtypeStruct) else function(value)

    def _apply(self, value: ArrayLike) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value

    def pull_back(self, cotangent: ArrayLike, source: Spec) -> ArrayLike:
        """Turns a gradient at the alias into one at the source."""
        if not self.transforms:
            return cotangent
        cotangent = jnp.asarray(cotangent)
        transpose = jax.linear_transpose(self._apply, jax.ShapeDtypeStruct(source.shape, cotangent.dtype))
        return transpose(cotangent)[0]


_Tie = tuple[int, int, _Transform | None]
_Above = dict[int, tuple[int, _Transform | None]]


def find_ties(structure: Structure, given: Given | None = None) -> tuple[Alias, ...]:
    """Returns all aliases of a model, including those of frozen parameters, in the order of their sources."""
    if given is None:
        return structure.remember("ties", lambda: _find_ties(structure, {}))
    return _find_ties(structure, read_ties(given, "ties"))


def _find_ties(structure: Structure, given: Mapping[str, tuple[str, Any]]) -> tuple[Alias, ...]:
    # Sets of leaves that are one array object are named by their first leaf. Each knows at most one set above it.
    above: _Above = {}  # alias -> (source, transform), as sets
    named: dict[int, int] = {}  # the leaf that a tie names as source, of the set it is in
    said = set[int]()  # leaves that a tie names as alias
    ties = [*_declared_ties(structure), *(tie_between(structure, alias, *source) for alias, source in given.items())]
    for alias, source, transform in ties:
        # The ends of a tie stand for the sets they are in: tying one path of a set ties all of them.
        lower, upper = structure.first[alias], structure.first[source]
        named[upper] = min(named.get(upper, source), source)
        said.add(alias)
        if lower == upper and transform is None:
            continue
        names = repr(structure.paths[alias]), repr(structure.paths[source])
        if lower == upper:
            are_one = f"{names[0]} and {names[1]} are one array already"
            raise ValueError(f"{are_one}, so one cannot be {transform} of the other")
        if above.setdefault(lower, (upper, transform)) != (upper, transform):
            raise ValueError(f"{names[0]} is tied twice: to {structure.paths[above[lower][0]]!r} and to {names[1]}")
    # Declared ties join the sets to trees, and the set at the root of a tree holds the source. The source is the leaf
    # that a tie names, which need not be the first of its set: tables and messages show the path that you wrote.
    found = list[Alias]()
    for leaf in structure.parameters:
        first = structure.first[leaf]
        root, transforms = _root(structure, first, above) if above else (first, ())
        if leaf != named.get(root, root):
            found.append(Alias(leaf, named.get(root, root), transforms, leaf in said or root != first))
    return tuple(sorted(found, key=lambda alias: (alias.source, alias.leaf)))


def _root(structure: Structure, start: int, above: _Above) -> tuple[int, tuple[_Transform, ...]]:
    """Returns the set at the end of a chain of ties, and the transforms back from it, in order of application."""
    at, transforms, passed = start, (), {start}
    while at in above:
        at, transform = above[at]
        transforms = transforms if transform is None else (transform, *transforms)
        if at in passed:
            raise ValueError(f"the ties of {structure.paths[start]!r} form a cycle; name one path as the source")
        passed.add(at)
    return at, transforms


def followers(ties: Sequence[Alias]) -> Mapping[int, frozenset[int]]:
    """Returns the aliases of declared or given ties, and for each the leaves of its source: one array object."""
    places: dict[int, set[int]] = {}
    for alias in ties:
        its = places.setdefault(alias.source, {alias.source})
        its |= set() if alias.is_said else {alias.leaf}
    return {alias.leaf: frozenset(places[alias.source]) for alias in ties if alias.is_said}


def _declared_ties(structure: Structure) -> list[_Tie]:
    found = []
    for node, said in structure.declaring:
        for alias, (path, transform) in said.ties.items():
            ends = [(*node.entries, *split_path(each)) for each in (alias, path)]
            if join_path(ends[0]) in structure.index:
                found.append(tie_between(structure, join_path(ends[0]), join_path(ends[1]), transform))
            elif any(structure.entries[i][: len(ends[0])] == ends[0] for i in range(node.start, node.stop)):
                name = node.cls.__qualname__
                what = f"{name} declares {alias!r} tied to {path!r}, but it is a node, not an array"
                remedy = f'tp.declare({name}, ties={{"{alias}.weight": ...}})'
                raise TypeError(f"{what}; name an array below it: {remedy}")
            # Else there is nothing: a Linear without bias; a canonical tree, whose aliases are empty.
    return found


def tie_between(structure: Structure, alias: str, source: str, function: Callable[..., Any] | None) -> _Tie:
    """Returns the leaves at two paths, and the transform between them; `None` if it is the identity."""
    ends = _parameter_at(structure, alias), _parameter_at(structure, source)
    if ends[0] == ends[1]:
        raise ValueError(f"{alias!r} is tied to itself; name two paths")
    want, have = map(structure.spec, ends)
    transform = None if function is None else _Transform(function)
    got, is_identity = (have, True) if transform is None else transform.tried(have)
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        after = f" after {transform}" if transform else ""
        what = f"{alias!r} is {describe(want)} and cannot be tied to {source!r}"
        raise ValueError(f"{what}, which is {describe(got)}{after}")
    return (*ends, None if is_identity else transform)


def _parameter_at(structure: Structure, path: str) -> int:
    i = structure.index.get(join_path(split_path(path)))
    if i is None:
        known = [structure.paths[at] for at in structure.parameters]
        has = "a node; name an array in it" if any(node.path == path for node in structure.nodes) else "no leaf"
        raise ValueError(f"a tie names {path!r}, where the model has {has}{nearest(path, known)}")
    if not structure.is_parameter(i):
        raise ValueError(f"a tie names {structure.describe(i)}, which is not a parameter")
    return i
