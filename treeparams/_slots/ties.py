"""Which parameters are tied, and which are trained.

A tie has a *source*, whose array is the parameter, and *aliases*, which hold that array or a fixed linear function of
it, which can be recognised again in other processes. Ties are found by identity among the array objects, declared on
classes, or passed to `tp.layout`. A declared or given tie joins two sets of identical arrays, and the path that it
names as source is the source, wherever it is in the tree. What trains is said by a mask, a `where`, declarations of
classes, `freeze` and `thaw`; a tied parameter is trained or frozen as a whole.
"""

import functools
import importlib
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._tree.declare import Declared, Given, declared, read_source, read_ties, registry
from .._tree.paths import Glob, join_path, nearest, quote, split_path
from .._tree.static_keys import found_at, static_key
from .._tree.structure import Node, Spec, Structure, flatten, same_treedef, scan_tree
from .._tree.text import describe, function_name
from .._tree.types import TreeDef
from .where import Follows, Leaves, Where, found_in, name_of, no_where, read, select, some, whole

# -- Which parameters are trained --------------------------------------------------------------------------------------

Said = dict[int, bool]
"""Whether each parameter is trained. An alias of a declared or given tie has an entry only if a mask or a declaration
names it; the entry must agree with the source."""


def choose(structure: Structure, follows: Follows, trainable: object) -> Said:
    """Reads a mask, a `where` or the declarations (`None`) for each parameter."""
    # Declarations stand above a `where`. A mask stands above both, since it says of each leaf by itself what it is.
    declarations = _declarations(structure)
    frozen = frozenset[int]().union(*declarations)
    mask = _as_mask(structure, trainable)
    if mask is not None:
        return {i: mask[i] for i in structure.parameters}
    every = frozenset(structure.parameters).difference(follows)
    chosen, away = ([], []) if trainable is None else read(structure, trainable, may_only_take=True)
    selected = frozenset[int]() if chosen else every
    for match in chosen:
        found = found_in(structure, match, structure.parameters)
        if found <= frozen:
            raise ValueError(
                f"{name_of(match.where)} selects only leaves that are declared frozen ({some(structure, found)}); "
                "to train them anyway, pass a layout that thaws them: tp.layout(model, thaw=...)"
            )
        selected |= whole(found, follows)
    for match in away:
        selected -= whole(found_in(structure, match, structure.parameters), follows)
    said = {i: i in selected for i in every}
    for each in declarations:
        own = each.intersection(structure.parameters)
        said |= dict.fromkeys(own if own <= follows.keys() else own.difference(follows), False)
    if away and not any(said.values()):
        raise ValueError(f"{name_of(trainable)} selects nothing: everything is excluded or declared frozen")
    return said


def change(structure: Structure, follows: Follows, said: Said, where: Where | None, trained: bool) -> None:
    """Applies `freeze=` or `thaw=`, which overrides everything before it."""
    if where is None:
        return
    selected = select(structure, where, follows)
    if trained and all(said.get(i, True) for i in selected):
        raise ValueError(f"{name_of(where)} selects nothing that is frozen, so there is nothing to thaw")
    said |= dict.fromkeys(selected, trained)
    for alias, places in follows.items():
        if not places.isdisjoint(selected):
            said.pop(alias, None)


def declared_frozen(structure: Structure) -> frozenset[int]:
    """Returns the leaves that the classes of the nodes above them declare frozen."""
    return frozenset[int]().union(*_declarations(structure))


def _declarations(structure: Structure) -> list[frozenset[int]]:
    """Returns the leaves that each declaration freezes."""
    return [each for node, said in declaring_nodes(structure) for each in _frozen_below(structure, node, said)]


def declaring_nodes(structure: Structure) -> list[tuple[Node, Declared]]:
    """Returns the nodes whose classes declare something, with the declarations."""
    classes = dict.fromkeys([node.cls for node in structure.nodes])  # few, of many nodes
    found = {cls: declared(cls, registry.version) for cls in classes}
    declaring = {cls: said for cls, said in found.items() if any(said)}
    return [(node, declaring[node.cls]) for node in structure.nodes if node.cls in declaring]


def _frozen_below(structure: Structure, node: Node, said: Declared) -> Iterator[frozenset[int]]:
    # Globs of a class are relative to its instances, so they are matched against paths without the node's own entries.
    depth = len(node.entries)
    for glob in said.frozen:
        pattern = Glob(glob)
        yield frozenset(i for i in range(node.start, node.stop) if pattern.selects(structure.entries[i][depth:]))
    if not said.fields:
        return
    below: dict[str, list[int]] = {}
    for i in range(node.start, node.stop):
        below.setdefault(structure.entries[i][depth : depth + 1][0], []).append(i)
    if any(entry.isdigit() for entry in below):
        raise TypeError(
            f"{node.cls.__qualname__} declares which fields train but is a pytree without field names; register "
            "it with keys (jax.tree_util.register_dataclass), or write tp.declare(cls, freeze=...) with positions"
        )
    for name, trained in said.fields.items():
        inside = below.get(quote(name), [])
        if not trained:
            yield frozenset(inside)
        elif inside and not any(map(structure.is_parameter, inside)):
            spec = structure.specs[inside[0]]
            kind = f"{spec.dtype} of shape {spec.shape}" if spec else "a Python value, not an array"
            raise TypeError(
                f"{structure.paths[inside[0]]!r} is declared trainable=True, but holds {kind}, and only floating and "
                "complex arrays can be trained; write tp.field(trainable=True, converter=jnp.asarray) for a number, "
                "make the array floating, or drop trainable=True"
            )


def _as_mask(structure: Structure, value: object) -> list[bool] | None:
    """Returns the flag of each leaf if `value` is a mask, otherwise `None`."""
    if value is None or isinstance(value, (str, re.Pattern, type, Leaves)):
        return None
    # A mask and a `where` may both be a sequence, a function or a Module. A tree whose leaves are all bools is a mask;
    # numbers in a tree of the model's structure, or in any that is no sequence, are a mask written wrongly.
    flags, treedef = flatten(value)
    if flags and all(isinstance(flag, (bool, np.bool_)) for flag in flags):
        if same_treedef(treedef, structure.treedef):
            return list(map(bool, flags))
        raise ValueError(_other_structure(structure, value, flags, treedef))
    has_its_structure = same_treedef(treedef, structure.treedef)
    is_sequence = jtu.treedef_is_leaf(treedef) or isinstance(value, (list, tuple, set, frozenset))
    if (has_its_structure or not is_sequence) and any(
        isinstance(flag, (int, float, np.generic)) or hasattr(flag, "dtype") for flag in flags
    ):
        if any(hasattr(flag, "dtype") and flag.dtype.kind != "b" and flag.ndim for flag in flags):
            raise TypeError(no_where(structure, value))
        kinds = ", ".join(sorted({describe(flag) for flag in flags})[:3])
        raise TypeError(f"a mask must hold Python bools, got {kinds}; write jax.tree.map(bool, mask) if they are flags")
    return [] if has_its_structure and not flags else None


def _other_structure(structure: Structure, mask: object, flags: Sequence[Any], treedef: TreeDef) -> str:
    """Returns the error message for a mask that does not have the structure of the model."""
    if jtu.treedef_is_leaf(treedef):
        return (
            f"trainable={mask!r} is not a mask, which has a bool at every leaf of the model. Everything that is not "
            "declared frozen trains by default; write freeze='**' in tp.layout to train nothing"
        )
    paths = scan_tree(mask, flags, treedef).paths
    missing, extra = set(structure.paths) - set(paths), set(paths) - set(structure.paths)
    differs = (
        f"it has no {min(missing)!r}"
        if missing
        else f"it has {min(extra)!r}, which the model does not have"
        if extra
        else f"its nodes are of other types: got {treedef}"
    )
    return (
        f"a mask must have the structure of the model, with a bool at every leaf; {differs}. "
        'Write jax.tree.map(..., model) to make one, or select by path: trainable="head.**"'
    )


# -- Linear functions --------------------------------------------------------------------------------------------------


class _Transform:
    """A linear function with a static identity: equal to another of the same function and bound arguments."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        """Checks that the function can be recognised again."""
        inner, bound = function, []
        while isinstance(inner, functools.partial):
            bound.append((inner.args, tuple(sorted(inner.keywords.items()))))
            inner = inner.func
        self.function = function
        self._inner = inner
        self._names = _found_under(inner)
        self._bound = tuple(bound)
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
        return _found, (*self._names, self._bound)

    def __repr__(self) -> str:
        arguments = [
            text
            for args, keywords in reversed(self._bound)
            for text in (*map(repr, args), *(f"{name}={value!r}" for name, value in keywords))
        ]
        return self._names[1] + (f"({', '.join(arguments)})" if arguments else "")

    def tried(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, bool]:
        """Returns the shape and dtype of the result, and whether it is the array itself (a transpose of one axis).

        The array at an alias is then the array at its source, and such a tie is the same as one without a transform.
        """
        known = _tried.setdefault(self, {})
        if (shape, dtype) not in known:
            known[shape, dtype] = self._try(shape, dtype)
        return known[shape, dtype]

    def _try(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, bool]:
        source = jax.ShapeDtypeStruct(shape, dtype)
        try:
            jaxpr, result = jax.make_jaxpr(self.__call__, return_shape=True)(source)
            jax.eval_shape(jax.linear_transpose(self.__call__, source), result)
        except Exception as error:
            raise ValueError(f"a tie's transform must be linear, but JAX cannot transpose {self}: {error}") from error
        with jax.ensure_compile_time_eval():
            zeros = jnp.zeros(shape, dtype)
            at_zero = self(zeros)
            if not isinstance(at_zero, jax.Array) or jnp.any(at_zero != 0):
                raise ValueError(f"a tie's transform must be linear, but {self} of zeros is not an array of zeros")
        return result, at_zero is zeros or jaxpr.jaxpr.outvars[0] is jaxpr.jaxpr.invars[0]


_tried: "weakref.WeakKeyDictionary[_Transform, dict[Any, Any]]" = weakref.WeakKeyDictionary()  # by shape and dtype


def _found_under(function: Callable[..., Any]) -> tuple[str, str]:
    """Returns the module and the name by which another process finds a function."""
    module = getattr(function, "__module__", None)
    for name in (getattr(function, "__qualname__", None), getattr(function, "__name__", None)):
        if module and name and found_at(module, name) is function:
            return module, name
    raise ValueError(
        f"a tie's transform must be found again by `jit` and in the next process, but {function_name(function)} is "
        "made anew each time; use a function at module level, such as jnp.transpose, or a functools.partial of one"
    )


def _found(module: str, name: str, bound: tuple[Any, ...]) -> _Transform:
    importlib.import_module(module)
    function = found_at(module, name)
    for args, keywords in reversed(bound):
        function = functools.partial(function, *args, **dict(keywords))
    return _Transform(function)


# -- Ties --------------------------------------------------------------------------------------------------------------


class Alias(NamedTuple):
    """A further leaf of a parameter: the source's array, or the transforms of it, one after another."""

    leaf: int
    source: int
    transforms: tuple[_Transform, ...]
    is_said: bool = False  # by a class, or to `tp.layout`; else the two are one array object

    # However a tie came about, programs over the two are the same.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alias) and self[:3] == other[:3]

    def __hash__(self) -> int:
        return hash(self[:3])

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


def find_ties(structure: Structure, given: Given | None = None) -> tuple[Alias, ...]:
    """Returns all aliases of a model, including those of frozen parameters, in the order of their sources."""
    # Sets of leaves that are one array object are named by their first leaf. Each knows at most one set above it.
    above: dict[int, tuple[int, _Transform | None]] = {}  # alias -> (source, transform), as sets
    named: dict[int, int] = {}  # the leaf that a tie names as source, of the set it is in
    said = set[int]()  # leaves that a tie names as alias
    for alias, source, transform in [*_declared_ties(structure), *(_given_ties(structure, given) if given else ())]:
        # The ends of a tie stand for the sets they are in: tying one path of a set ties all of them.
        lower, upper = structure.first[alias], structure.first[source]
        named[upper] = min(named.get(upper, source), source)
        said.add(alias)
        if lower == upper and transform is None:
            continue
        names = structure.paths[alias], structure.paths[source]
        if lower == upper:
            raise ValueError(
                f"{names[0]!r} and {names[1]!r} are one array already, so one cannot be {transform} of the other"
            )
        if above.setdefault(lower, (upper, transform)) != (upper, transform):
            other = structure.paths[above[lower][0]]
            raise ValueError(f"{names[0]!r} is tied twice: to {other!r} and to {names[1]!r}")
    if not above and not [i for i in structure.parameters if i != structure.first[i]]:
        return ()
    # Declared ties join the sets to trees, and the set at the root of a tree holds the source. The source is the leaf
    # that a tie names, which need not be the first of its set: tables and messages show the path that you wrote.
    trees: dict[int, list[tuple[int, tuple[_Transform, ...], bool]]] = {}
    for leaf in structure.parameters:
        root, transforms = _root(structure, structure.first[leaf], above)
        trees.setdefault(root, []).append((leaf, transforms, leaf in said or root != structure.first[leaf]))
    return tuple(
        Alias(leaf, source, transforms, is_said)
        for source, joined in sorted((named.get(root, root), joined) for root, joined in trees.items())
        for leaf, transforms, is_said in joined
        if leaf != source
    )


def followers(ties: Sequence[Alias]) -> Follows:
    """Returns the aliases of declared or given ties, and for each the leaves of its source: one array object."""
    places: dict[int, set[int]] = {}
    for alias in ties:
        its = places.setdefault(alias.source, {alias.source})
        its |= set() if alias.is_said else {alias.leaf}
    return {alias.leaf: frozenset(places[alias.source]) for alias in ties if alias.is_said}


def _root(
    structure: Structure, start: int, above: Mapping[int, tuple[int, _Transform | None]]
) -> tuple[int, tuple[_Transform, ...]]:
    """Returns the set at the end of a chain of ties, and the transforms back from it, in order of application."""
    at, transforms, passed = start, (), {start}
    while at in above:
        at, transform = above[at]
        transforms = transforms if transform is None else (transform, *transforms)
        if at in passed:
            raise ValueError(f"the ties of {structure.paths[start]!r} form a cycle; name one path as the source")
        passed.add(at)
    return at, transforms


def _declared_ties(structure: Structure) -> list[tuple[int, int, _Transform | None]]:
    found = []
    for node, said in declaring_nodes(structure):
        for alias, source in said.ties.items():
            path, transform = read_source(source, node.cls.__qualname__)
            ends = [(*node.entries, *split_path(each)) for each in (alias, path)]
            if join_path(ends[0]) in structure.index:
                found.append(_tie(structure, join_path(ends[0]), join_path(ends[1]), transform))
            elif any(structure.entries[i][: len(ends[0])] == ends[0] for i in range(node.start, node.stop)):
                raise TypeError(
                    f"{node.cls.__qualname__} declares {alias!r} tied to {path!r}, but it is a node, not an array; "
                    f'name an array below it: tp.declare({node.cls.__qualname__}, ties={{"{alias}.weight": ...}})'
                )
            # Else there is nothing: a Linear without bias; a canonical tree, whose aliases are empty.
    return found


def _given_ties(structure: Structure, given: Given) -> list[tuple[int, int, _Transform | None]]:
    read = {alias: read_source(source, f"ties, {alias!r}") for alias, source in read_ties(given).items()}
    return [_tie(structure, alias, *source) for alias, source in read.items()]


def _tie(
    structure: Structure, alias: str, source: str, function: Callable[..., Any] | None
) -> tuple[int, int, _Transform | None]:
    ends = parameter_at(structure, alias), parameter_at(structure, source)
    return (*ends, checked_transform(structure, *ends, function))


def parameter_at(structure: Structure, path: str) -> int:
    """Returns the leaf at a path."""
    i = structure.index.get(join_path(split_path(path)))
    if i is None:
        known = [structure.paths[at] for at in structure.parameters]
        has = "a node; name an array in it" if any(node.path == path for node in structure.nodes) else "no leaf"
        raise ValueError(f"a tie names {path!r}, where the model has {has}{nearest(path, known)}")
    if not structure.is_parameter(i):
        raise ValueError(f"a tie names {structure.describe(i)}, which is not a parameter")
    return i


def checked_transform(
    structure: Structure, alias: int, source: int, function: Callable[..., Any] | None
) -> _Transform | None:
    """Returns the transform of a tie, `None` if it is the identity."""
    if alias == source:
        raise ValueError(f"{structure.paths[alias]!r} is tied to itself; name two paths")
    want, have = structure.spec(alias), structure.spec(source)
    transform = None if function is None else _Transform(function)
    got, is_identity = (have, True) if transform is None else transform.tried(have.shape, have.dtype)
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        after = f" after {transform}" if transform else ""
        raise ValueError(
            f"{structure.paths[alias]!r} is {describe(want)} and cannot be tied to {structure.paths[source]!r}, which "
            f"is {describe(got)}{after}"
        )
    return None if is_identity else transform


# -- Trained as a whole ------------------------------------------------------------------------------------------------


def settle(structure: Structure, ties: tuple[Alias, ...], said: Said) -> tuple[bool, ...]:
    """Decides for each leaf whether it is trained, so that every tied parameter is trained or frozen as a whole."""
    trained = dict(said)
    for alias in ties:
        # A source is no alias, so its own entry is final. An alias that nothing is said of agrees with its source.
        of_source = trained[alias.source]
        if said.get(alias.leaf, of_source) != of_source:
            raise ValueError(_half_trained(structure, ties, alias, of_source))
        trained[alias.leaf] = of_source
    return tuple([trained.get(i, False) for i in range(len(structure.specs))])


def _half_trained(structure: Structure, ties: tuple[Alias, ...], alias: Alias, of_source: bool) -> str:
    names = structure.paths[alias.source], structure.paths[alias.leaf]
    is_, other = ("trained", "frozen") if of_source else ("frozen", "trained")
    if alias.is_said:
        how = f"is {alias} of" if alias.transforms else "is tied to"
        return (
            f"{names[1]!r} {how} {names[0]!r}, its source, and is trained or frozen with it, but the source is {is_} "
            f"and the alias {other}; select the source {names[0]!r} (or both)"
        )
    every = [structure.paths[each.leaf] for each in ties if each.source == alias.source and not each.is_said]
    every.insert(0, names[0])
    return (
        f"{names[0]!r} is {is_} and {names[1]!r} is {other}, but they are one array. Either make one of them a "
        f"separate array (tp.copy, as for a target network; tp.untie), or name all in one call: "
        f"tp.layout(model, freeze={every!r}), or thaw=... or trainable=... with all these"
    )
