"""The static description of a tree: its nodes, paths, shapes and dtypes, and the arrays that are at several paths.

Leaves are numbered in tree order, nodes in preorder. So the leaves of a node, and the nodes below it, are consecutive.
"""

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .declare import is_box
from .paths import join_path, sibling_entries
from .static_keys import StaticKeys, identical, is_settled, with_object
from .text import describe
from .types import PyTree, TreeDef, is_inexact, is_ref

take = jtu.default_registry.flatten_one_level_with_keys
"""The children of a node with their keys, and its static value; `None` of a leaf."""


def same_treedef(a: TreeDef, b: TreeDef) -> bool:
    """Returns whether two treedefs are equal as JAX sees it: static fields by `==`, whatever their types."""
    try:
        return bool(a == b)
    except Exception:  # static arrays, whose `==` has no truth value
        return False


def getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns the function that picks the items at these indices, as `operator.itemgetter` but always as a tuple."""
    start, stop = (indices[0], indices[-1] + 1) if indices else (0, 0)
    if list(indices) == list(range(start, stop)):  # a slice takes a fifth of the time, and a model is often one
        return lambda items: tuple(items[start:stop])
    return operator.itemgetter(*indices)


class Avals:
    """The avals of the arrays that fitted last.

    Arrays that come out of one program share these objects from call to call. To find them the same takes a third of
    the time of comparing shapes and dtypes.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: list[Any] = []

    def fit(self, arrays: Sequence[Any], are_right: Callable[[], bool]) -> bool:
        """Returns whether the arrays have the avals of the last ones that fitted, or else whether they are right."""
        try:
            avals = list(map(_aval, arrays))
        except AttributeError:  # of NumPy arrays, of labels, and of arrays that are only described
            return are_right()
        # Lists compare objects before values. Comparing the values of each takes longer than comparing shapes, so the
        # last ones tell whether it is worth a try.
        if avals and self._last and avals[-1] is self._last[-1] and avals == self._last:
            return True
        if are_right():
            self._last = avals
            return True
        return False


_aval = operator.attrgetter("aval")


def flatten(tree: PyTree) -> tuple[list[Any], TreeDef]:
    """Flattens a tree like `jax.tree.flatten`, with clear errors if it contains itself or has too many levels."""
    try:
        return jtu.tree_flatten(tree)
    # JAX raises one of several, by what it was doing when the stack was full. After some of them, such as those of a
    # cycle through a class, jaxlib never gives back the levels of the stack that it took; then nothing can be said.
    except Exception as error:
        path = _find_cycle(tree)
        if path is not None:
            raise ValueError(
                f"the model is cyclic: the node at {path!r} is one of the nodes above it. A pytree is a tree; "
                "keep one of the two references, or hold it in a static field"
            ) from error
        if not _is_of_depth(error):
            raise
        raise ValueError(
            "the tree is nested too deeply for jax.tree.flatten; if it is a chain of nodes, keep the nodes of the "
            "chain in one list"
        ) from error


def _is_of_depth(error: BaseException | None) -> bool:
    """Returns whether an error comes from a full stack, whatever it was turned into since."""
    while error is not None and not isinstance(error, RecursionError):
        error = error.__cause__ or error.__context__
    return error is not None


def _find_cycle(tree: PyTree) -> str | None:
    """Returns the path of the first node that is one of those above it."""
    # No recursion: the tree may be as deep as memory allows.
    above, entries = {id(tree)}, list[str]()
    opened = [(tree, _children_of(tree, entries))]
    while opened:
        node, children = opened[-1]
        for entry, child in children:
            entries.append(entry)
            if id(child) in above:
                return join_path(entries)
            above.add(id(child))
            opened.append((child, _children_of(child, entries)))
            break
        else:
            opened.pop()
            above.discard(id(node))
            del entries[-1:]
    return None


def _children_of(node: PyTree, entries: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Returns the children of a node, each with its entry in a path."""
    taken = take(node)
    children = list(taken[0]) if taken is not None else []
    names = sibling_entries([key for key, _ in children], entries)
    return iter([(entry, child) for entry, (_, child) in zip(names, children, strict=True)])


T = TypeVar("T")

_MEMORIES = 256  # derived things per structure; far more than a program uses


_Entries = tuple[str, ...]


class Spec(NamedTuple):
    """Shape and (JAX) dtype of an array leaf."""

    shape: tuple[int, ...]
    dtype: Any
    parameter: bool  # floating or complex, so that it can be trained


class Node(NamedTuple):
    """An inner node, which may have no leaves; but not `None`."""

    cls: type
    entries: tuple[str, ...]
    start: int  # its first leaf
    stop: int
    static: Any  # as it is in the treedef
    last: int  # the node after the last one below it, in preorder

    @property
    def path(self) -> str:
        return join_path(self.entries)


_CLS = operator.attrgetter("cls")
_KEY = operator.itemgetter(0)
_NO_KEY = jtu.FlattenedIndexKey  # the key that JAX gives where a class is registered without keys


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """The static description of a kind of tree. It holds no array of the tree."""

    treedef: TreeDef
    nodes: tuple[Node, ...]
    entries: tuple[tuple[str, ...], ...]  # of each leaf
    states: "_States"  # those with names
    numbered: Mapping[int, _Entries]  # the entries that their leaves had if values went by number, as elsewhere
    unkeyed: Mapping[str, list[Any]]  # of each node whose children go by number its class and their number, by path
    specs: tuple[Spec | None, ...]  # of each leaf; None: not an array
    values: tuple[str | None, ...]  # of each leaf that is no array what it is, for messages and tables
    first: tuple[int, ...]  # of each leaf: the first that is the same array object
    statics: tuple[Any, ...]  # keys of each node's type and static value; taken at once, since a list may change later
    bare: tuple[object, ...]  # static `object()`s, whose keys are their order
    settled: bool  # whether the leaves that are no arrays are of types whose values cannot change in place
    refs: frozenset[int]  # the arrays that can be written; no part of the value
    is_unpickled: bool = False  # then its bare objects are copies
    is_traced: bool = False  # whether leaves are tracers, which do not tell which arrays are one
    _memo: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        return tuple(map(join_path, self.entries))

    @functools.cached_property
    def index(self) -> dict[str, int]:
        return {path: i for i, path in enumerate(self.paths)}

    @functools.cached_property
    def parameters(self) -> tuple[int, ...]:
        """The positions of the leaves that can be trained."""
        return tuple([i for i, spec in enumerate(self.specs) if spec is not None and spec.parameter])

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each node."""
        return tuple(map(self.kind_of, range(len(self.nodes))))

    def kind_of(self, number: int) -> int:
        """Returns a key that is equal for nodes with the same paths and classes below.

        Shapes, dtypes and static values do not matter.
        """
        node = self.nodes[number]
        entries, specs = self.entries[node.start : node.stop], self.specs[node.start : node.stop]
        if node.entries:
            entries = tuple([each[len(node.entries) :] for each in entries])
        are_parameters = tuple(map(getattr, specs, itertools.repeat("parameter"), itertools.repeat(None)))
        return hash((entries, are_parameters, tuple(map(_CLS, self.nodes[number : node.last]))))

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.entries, self.specs))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self is other or (
            self._hash == other._hash
            and (self.specs, self.entries) == (other.specs, other.entries)
            and self.has_statics_of(other)
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # A treedef that holds static values does not pickle. A tree of that structure does.
        skeleton = jtu.tree_unflatten(self.treedef, range(self.treedef.num_leaves))
        return _from_skeleton, (skeleton, self.specs, self.values, self.first, self.settled, self.refs)

    def has_statics_of(self, other: "Structure") -> bool:
        """Returns whether another structure has the same nodes, with the same static values.

        Bare objects are compared by identity. Pickling makes others of them, which are compared only by their order.
        """
        is_copy = self.is_unpickled or other.is_unpickled
        return self.statics == other.statics and (is_copy or identical(self.bare, other.bare))

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the value remembered under this key; the first time it calls `make`."""
        found = self._memo.get(key, self)  # one look-up; nothing that is derived is the structure itself
        if found is self:
            if len(self._memo) >= _MEMORIES:
                self._memo.clear()
            found = self._memo[key] = make()
        return found

    def is_parameter(self, i: int) -> bool:
        """Returns whether a leaf can be trained."""
        spec = self.specs[i]
        return spec is not None and spec.parameter

    def is_array(self, i: int) -> bool:
        """Returns whether a leaf is an array that cannot be written."""
        return self.specs[i] is not None and i not in self.refs

    def spec(self, i: int) -> Spec:
        """Returns the shape and dtype of an array leaf."""
        spec = self.specs[i]
        if spec is None:
            raise TypeError(f"{self.paths[i]!r} is not an array")
        return spec

    def describe(self, i: int) -> str:
        """Describes a leaf as `'path' (float32[2,3])`, for error messages."""
        spec = self.specs[i]
        return f"{self.paths[i]!r} ({describe(spec) if spec else f'{self.values[i]}, not an array'})"


def scan_tree(tree: PyTree, leaves: Sequence[Any], treedef: TreeDef) -> Structure:
    """Works out the structure of a tree."""
    read = _Reading(tree)
    specs: list[Spec | None] = []
    same, first = list(range(len(leaves))), {}
    kinds = set(map(type, leaves))
    of_jax = {each for each in kinds if _is_array_type(each) and not issubclass(each, np.ndarray)}
    for i, leaf in enumerate(leaves):
        try:
            spec = _spec_of(leaf.shape, leaf.dtype) if type(leaf) in of_jax else _spec(leaf)
        except TypeError as error:
            raise TypeError(
                f"{join_path(read.entries[i])!r} is a NumPy array of {leaf.dtype}, which JAX does not support; "
                "convert it, or hold it in a static field"
            ) from error
        specs.append(spec)
        if spec is not None and type(leaf) is not jax.ShapeDtypeStruct:
            same[i] = first.setdefault(id(leaf), i)
    # One leaf of each type tells for all of them, but for frozen sets, which hold values of any type.
    one_of_each = {type(leaf): leaf for leaf, spec in zip(leaves, specs, strict=True) if spec is None}
    settled = frozenset not in one_of_each and all(map(is_settled, one_of_each.values()))
    is_traced = bool([kind for kind in kinds if issubclass(kind, Tracer)])
    kind = lambda leaf: "function" if callable(leaf) else type(leaf).__name__
    values = tuple([None if spec else kind(leaf) for leaf, spec in zip(leaves, specs, strict=True)])
    arrays = tuple(specs), values, tuple(same)
    return Structure(treedef, *read.found(), *arrays, *read.keys(), settled, refs_in(leaves), is_traced=is_traced)


def refs_in(leaves: Sequence[Any]) -> frozenset[int]:
    """Returns the positions of the refs."""
    return frozenset([i for i, leaf in enumerate(leaves) if is_ref(leaf)])


class _Reading:
    """The nodes of a tree in preorder, the entries of each leaf's path, and the keys of all nodes' static values.

    The tree is taken apart one level at a time, which gives keys, children and static value of a node together.
    """

    def __init__(self, tree: PyTree) -> None:
        self.nodes: list[Any] = []
        self.entries: list[tuple[str, ...]] = []
        self.statics: list[Hashable] = []
        self._unkeyed: dict[int, int] = {}  # the number of children, by node
        self._keys = StaticKeys()
        self._known: dict[Hashable, Hashable] = {}  # many nodes have the same objects as static values
        self._held: list[object] = []  # so that no other object gets the identity of one that is known
        self._visit(tree)

    def found(
        self,
    ) -> tuple[tuple[Node, ...], tuple[_Entries, ...], "_States", dict[int, _Entries], dict[str, list[Any]]]:
        """Returns the nodes, the entries of each leaf, the names of states, and the nodes without keys."""
        has_states = any(self.nodes[number].cls is eqx.nn.State for number in self._unkeyed)
        states, numbered = _name_states(self.nodes, self.entries) if has_states else ({}, {})
        pairs = [(self.nodes[number], count) for number, count in self._unkeyed.items()]
        by_number = {each.path: [each.cls.__name__, count] for each, count in pairs if each.entries not in states}
        return tuple(self.nodes), tuple(self.entries), states, numbered, by_number

    def keys(self) -> tuple[tuple[Hashable, ...], tuple[object, ...]]:
        """Returns the static keys, and the bare objects in them."""
        return tuple(self.statics), tuple(self._keys.bare)

    def _visit(self, tree: PyTree) -> None:
        # No recursion: from Python 3.12 on, JAX takes more levels than Python has frames.
        opened: list[tuple[Any, ...]] = []  # the nodes above, each with its siblings that are not read yet
        children, above = zip([(None, tree)], [None], strict=True), ()
        while True:
            for (_, child), entry in children:
                path = above if entry is None else (*above, entry)
                taken = take(child)
                if taken is None:
                    self.entries.append(path)
                    continue
                kind, data, pairs = type(child), taken[1], list(taken[0])
                names = keys_of(kind, pairs)
                self.statics.append((kind, len(names), self._static_key(data)))
                if child is None:
                    continue
                if names and type(names[0]) is _NO_KEY:
                    self._unkeyed[len(self.nodes)] = len(names)
                opened.append((len(self.nodes), kind, path, len(self.entries), data, children, above))
                self.nodes.append(None)  # in preorder; its last leaf is not known yet
                children, above = zip(pairs, _entries_below(kind, names, path), strict=True), path
                break
            else:
                if not opened:
                    return
                number, kind, path, start, data, children, above = opened.pop()
                self.nodes[number] = Node(kind, path, start, len(self.entries), data, len(self.nodes))

    def _static_key(self, data: object) -> Hashable:
        # JAX makes the tuple of static fields anew at each flattening, around values that are not.
        same = tuple(map(id, data)) if type(data) is tuple else id(data)
        if same not in self._known:
            self._held.append(data)
            self._known[same] = self._keys.key(data)
        return self._known[same]


def _entries_below(kind: type, names: Sequence[Any], path: tuple[str, ...]) -> Sequence[str | None]:
    """Returns the entries that a node's children add to their paths; `None` for nothing, below a box."""
    # Siblings without leaves take part in the naming of the others, so that a path does not change when a sibling loses
    # its leaves.
    return [None] if len(names) == 1 and is_box(kind) else sibling_entries(names, path)


_States = Mapping[_Entries, Sequence[_Entries]]
"""For each `eqx.nn.State` whose values have names, by its entries: the entries that each value adds to these."""


def _name_states(nodes: list[Node], entries: list[_Entries]) -> tuple[_States, dict[int, _Entries]]:
    """Calls each value of an `eqx.nn.State` after the index of the model that owns it, in the nodes and leaves below.

    A state is a dictionary without keys. An index is in the model, and holds the key of its value. So a state without
    its model in the tree has no names, and its values go by number.

    Returns:
        The states that have names, and the entries of their leaves by number.
    """
    indices: dict[Hashable, list[_Entries]] = {}
    for node in nodes:
        if node.cls is eqx.nn.StateIndex:
            indices.setdefault(node.static[-1], []).append(node.entries)
    states, numbered = dict[_Entries, list[_Entries]](), dict[int, _Entries]()
    for number, node in enumerate(nodes):
        if node.cls is not eqx.nn.State or not node.static or not all(key in indices for key in node.static):
            continue
        # An optimiser's state and an average hold the indices, too: the nearest one is the model's, or the topmost.
        far = lambda index, state=node.entries: (-_count_shared(index, state), len(index))
        found = [min(indices[key], key=far) for key in node.static]
        # The model is what holds all of them, next to the state.
        depth = _count_shared(node.entries, *found)
        depth += len({index[depth] for index in found}) == 1 < min(map(len, found)) - depth
        names = states[node.entries] = [index[depth:] for index in found]

        def named(its: _Entries, above: _Entries = node.entries, names: list[_Entries] = names) -> _Entries:
            return (*above, *names[int(its[len(above)])], *its[len(above) + 1 :])

        numbered |= {i: entries[i] for i in range(node.start, node.stop)}
        nodes[number + 1 : node.last] = [
            each._replace(entries=named(each.entries)) for each in nodes[number + 1 : node.last]
        ]
        entries[node.start : node.stop] = map(named, entries[node.start : node.stop])
    return states, numbered


def _count_shared(*several: _Entries) -> int:
    """Returns how many entries several paths share at the start."""
    different = (i for i, entries in enumerate(zip(*several, strict=False)) if len(set(entries)) > 1)
    return next(different, min(map(len, several)))


def keys_of(kind: type, children: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Returns the keys of a node's children, from the children and keys that JAX gives."""
    names = list(map(_KEY, children))
    if issubclass(kind, tuple) and kind is not tuple:  # jaxlib gives each field of a NamedTuple the first one's key
        return list(map(jtu.GetAttrKey, getattr(kind, "_fields", names)))
    return names


def _from_skeleton(
    skeleton: PyTree,
    specs: tuple[Spec | None, ...],
    values: tuple[str | None, ...],
    first: tuple[int, ...],
    settled: bool,
    refs: frozenset[int],
) -> Structure:
    treedef, read = jtu.tree_structure(skeleton), _Reading(skeleton)
    arrays = specs, values, first
    return Structure(treedef, *read.found(), *arrays, *read.keys(), settled, refs, is_unpickled=True)


def _spec(leaf: Any) -> Spec | None:
    if not (is_array(leaf) or is_ref(leaf)):
        return None
    dtype = leaf.dtype
    if isinstance(leaf, np.ndarray):
        _check_dtype(dtype)
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return _spec_of(tuple(leaf.shape), dtype)


@functools.cache
def _check_dtype(dtype: np.dtype) -> None:
    if dtype == jax.dtypes.float0:
        return
    if dtype.names or not dtype.isnative:
        raise TypeError("it has fields, or the byte order of another machine")
    jax.eval_shape(lambda array: array, np.empty((), dtype))


@functools.lru_cache(maxsize=65536)
def _spec_of(shape: tuple[int, ...], dtype: Any) -> Spec:
    return Spec(shape, dtype, is_inexact(dtype))


def is_array(leaf: object) -> bool:
    """Returns whether a leaf is an array, concrete, traced or abstract, and no ref."""
    always = _is_array_type(type(leaf))
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSUMm"  # objects, texts and times are no arrays to JAX
    # JAX 0.7.0 counts traced refs as arrays.
    return isinstance(leaf, jax.Array) and not is_ref(leaf) if always is None else always


@with_object
def _is_array_type(kind: type) -> bool | None:
    # `isinstance(x, jax.Array)` asks the value, at a microsecond each; only for tracers does the answer depend on it.
    if issubclass(kind, Tracer):
        return None
    return issubclass(kind, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


@contextlib.contextmanager
def naming_deleted(*trees: PyTree) -> Iterator[None]:
    """Within this, an error of JAX becomes one that names a deleted array of these trees, if there is one.

    Asking each array beforehand would cost more than all other checks.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        for tree in trees:
            leaves, treedef = flatten(tree)
            for leaf, path in zip(leaves, scan_tree(tree, leaves, treedef).paths, strict=True):
                if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
                    raise RuntimeError(
                        f"the array at {path!r} has been deleted, as by a step that donates it; if you need the model "
                        "after the step, keep a copy, tp.copy(model)"
                    ) from error
        raise
