"""The static half of a tree: its nodes, paths, shapes and dtypes, and the arrays that are at several paths.

Leaves are numbered in tree order, nodes in preorder. So the leaves of a node, and the nodes below it, are consecutive.

Working out a structure costs Python work per node, so it is done once per kind of tree. A tree is then recognised by
comparisons that run in C: its treedef, the types, shapes and dtypes of its leaves, the identity of its static values. A
treedef alone is not enough: JAX compares static fields by `==`, so it does not distinguish `2`, `2.0` and `True`.

A structure holds the static values of its tree. So the memory of structures is weak: a full garbage collection takes
away those that nothing else holds, such as a layout, a state or a compiled program. To work one out again takes less
time than the collection did. A plain weak memory would forget them at once, at the end of each call.
"""

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .declare import Declared, declared, is_box, registry
from .paths import join_path, sibling_entries
from .static_keys import identical, is_harmless, is_settled, static_key, with_object
from .text import describe
from .types import PyTree, TreeDef, is_inexact, is_ref

T = TypeVar("T")
Entries = tuple[str, ...]
_MEMORIES = 256  # derived things per structure; far more than a program uses
_NO_KEY = jtu.FlattenedIndexKey  # the key that JAX gives where a class is registered without keys
_shape, _dtype, _aval = map(operator.attrgetter, ("shape", "dtype", "aval"))


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


def flatten(tree: PyTree) -> tuple[list[Any], TreeDef]:
    """Flattens a tree like `jax.tree.flatten`, with clear errors if it contains itself or has too many levels."""
    try:
        return jtu.tree_flatten(tree)
    # JAX raises one of several, by what it was doing when the stack was full. After some of them, such as those of a
    # cycle through a class, jaxlib never gives back the levels of the stack that it took; then nothing can be said.
    except Exception as error:
        with contextlib.suppress(RecursionError):
            path = _path_of_cycle(tree, {id(tree)}, ())
            if path is None:  # it is not nested too deeply, not even for Python
                raise
            cycle = f"the model is cyclic: the node at {path!r} is one of the nodes above it"
            raise ValueError(f"{cycle}; keep one of the two references, or hold it in a static field") from error
        raise ValueError("the tree is nested too deeply for jax.tree.flatten; keep its nodes in a list") from error


def _path_of_cycle(node: PyTree, above: set[int], entries: Entries) -> str | None:
    """Returns the path of the first node that is one of those above it."""
    keys, children, _ = take(node) or ((), (), None)
    for entry, child in zip(sibling_entries(keys, entries), children, strict=True):
        path = (*entries, entry)
        found = join_path(path) if id(child) in above else _path_of_cycle(child, above | {id(child)}, path)
        if found is not None:
            return found
    return None


# -- The structure of a tree -------------------------------------------------------------------------------------------


class Spec(NamedTuple):
    """Shape and (JAX) dtype of an array leaf."""

    shape: tuple[int, ...]
    dtype: Any
    parameter: bool  # floating or complex, so that it can be trained


class Node(NamedTuple):
    """An inner node, which may have no leaves, but not `None`; or a leaf, of the class `object`."""

    cls: type
    entries: Entries
    start: int  # its first leaf
    stop: int
    number: int = -1  # in preorder; -1 of a leaf
    last: int = 0  # the node after the last one below it, in preorder
    static: Any = None  # as it is in the treedef

    @property
    def path(self) -> str:
        return join_path(self.entries)


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """The static description of a kind of tree. It holds no array of the tree."""

    treedef: TreeDef
    nodes: tuple[Node, ...]
    entries: tuple[Entries, ...]  # of each leaf
    states: "_States"  # those with names
    unkeyed: Mapping[str, list[Any]]  # of each node whose children go by number its class and their number, by path
    statics: tuple[Any, ...]  # keys of each node's type and static value; taken at once, since a list may change later
    bare: tuple[object, ...]  # static `object()`s, whose keys are their order
    specs: tuple[Spec | None, ...]  # of each leaf; None: not an array
    values: tuple[str | None, ...]  # of each leaf that is no array what it is, for messages and tables
    first: tuple[int, ...]  # of each leaf: the first that is the same array object
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
    def subtreedefs(self) -> dict[int, TreeDef]:
        """The treedef of each node by its number, and of a leaf."""
        # In preorder, as nodes are numbered: the children are put on the stack last first.
        found: dict[int, TreeDef] = {-1: jtu.tree_structure(0)}
        waiting = [self.treedef]
        while waiting:
            each = waiting.pop()
            if each.node_data() is not None and each.node_data()[0] is not type(None):
                found[len(found) - 1] = each
                waiting += reversed(each.children())
        return found

    @property
    def declaring(self) -> list[tuple[Node, Declared]]:
        """The nodes whose classes declare something, with the declarations as they are now."""
        found = {cls: declared(cls, registry.version) for cls in {node.cls for node in self.nodes}}
        return [(node, found[node.cls]) for node in self.nodes if any(found[node.cls])]

    @property
    def ties(self) -> list[tuple[str, str, str]]:
        """The paths of each array object that has several: the first, and another one; for `Difference.of_ties`."""
        return [(self.paths[first], self.paths[i], "") for i, first in enumerate(self.first) if first != i]

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """A key of each node, equal for nodes with the same paths and classes below.

        Shapes, dtypes and static values do not matter.
        """
        return tuple(map(self.kind_of, range(len(self.nodes))))

    def kind_of(self, number: int) -> int:
        """Returns the kind of one node, without those of the others."""
        node = self.nodes[number]
        entries = self.entries[node.start : node.stop]
        if node.entries:
            entries = tuple([each[len(node.entries) :] for each in entries])
        are_parameters = tuple([spec and spec.parameter for spec in self.specs[node.start : node.stop]])
        return hash((entries, are_parameters, tuple([each.cls for each in self.nodes[number : node.last]])))

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.entries, self.specs))

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Structure):
            return self is other
        are_alike = self._hash == other._hash and (self.specs, self.entries) == (other.specs, other.entries)
        return are_alike and self.has_statics_of(other)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # A treedef that holds static values does not pickle. A tree of that structure does.
        skeleton = jtu.tree_unflatten(self.treedef, range(self.treedef.num_leaves))
        names = "specs", "values", "first", "settled", "refs"
        return _from_skeleton, (skeleton, {name: getattr(self, name) for name in names})

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
    read = _read_nodes(tree)
    specs: list[Spec | None] = []
    same, first = list(range(len(leaves))), {}
    kinds = set(map(type, leaves))
    of_jax = {kind for kind in kinds if _is_array_type(kind) and not issubclass(kind, np.ndarray)}
    for i, leaf in enumerate(leaves):
        try:
            spec = _spec_of(leaf.shape, leaf.dtype) if type(leaf) in of_jax else _spec(leaf)
        except TypeError as error:
            what = f"{join_path(read['entries'][i])!r} is a NumPy array of {leaf.dtype}, which JAX does not support"
            raise TypeError(f"{what}; convert it, or hold it in a static field") from error
        specs.append(spec)
        if spec is not None and type(leaf) is not jax.ShapeDtypeStruct:
            same[i] = first.setdefault(id(leaf), i)
    others = {i: leaf for i, leaf in enumerate(leaves) if specs[i] is None}
    # One leaf of each type tells for all of them, but for frozen sets, which hold values of any type.
    one_of_each = {type(leaf): leaf for leaf in others.values()}
    names = {i: "function" if callable(leaf) else type(leaf).__name__ for i, leaf in others.items()}
    values, is_traced = tuple(map(names.get, range(len(leaves)))), any(issubclass(kind, Tracer) for kind in kinds)
    settled = frozenset not in one_of_each and all(map(is_settled, one_of_each.values()))
    found = {"specs": tuple(specs), "values": values, "first": tuple(same), "settled": settled}
    return Structure(treedef=treedef, refs=_refs_in(leaves), is_traced=is_traced, **found, **read)


def _refs_in(leaves: Sequence[Any]) -> frozenset[int]:
    return frozenset([i for i, leaf in enumerate(leaves) if is_ref(leaf)])


def _read_nodes(tree: PyTree) -> dict[str, Any]:
    """Returns the nodes of a tree, the entries of its leaves, and the keys of all static values: fields of `Structure`.

    The tree is taken apart one level at a time, which gives keys, children and static value of a node together.
    """
    nodes, entries, statics, bare = list[Any](), list[Entries](), list[Hashable](), list[object]()
    unkeyed: dict[int, int] = {}  # the number of children, by node
    known: dict[Hashable, tuple[Any, Hashable]] = {}  # many nodes have the same objects as static values
    # No recursion: from Python 3.12 on, JAX takes more levels than Python has frames.
    opened: list[tuple[Any, ...]] = []  # the nodes above, each with its siblings that are not read yet
    children, above = iter([(tree, None)]), ()
    while True:
        for child, entry in children:
            path = above if entry is None else (*above, entry)
            taken = take(child)
            if taken is None:
                entries.append(path)
                continue
            kind, (keys, below, data) = type(child), taken
            # JAX makes the tuple of static fields anew at each flattening, around values that are not.
            same = tuple(map(id, data)) if type(data) is tuple else id(data)
            if same not in known:  # it is held, so that no other object gets its identity
                known[same] = data, static_key(data, bare=bare)
            statics.append((kind, len(keys), known[same][1]))
            if child is None:
                continue
            if keys and type(keys[0]) is _NO_KEY:
                unkeyed[len(nodes)] = len(keys)
            opened.append((len(nodes), kind, path, len(entries), data, children, above))
            nodes.append(None)  # in preorder; its last leaf is not known yet
            # Siblings without leaves take part in the naming of the others, so that a path does not change when a
            # sibling loses its leaves. A box adds no entry.
            names = [None] if len(keys) == 1 and is_box(kind) else sibling_entries(keys, path)
            children, above = zip(below, names, strict=True), path
            break
        else:
            if not opened:
                return _named(nodes, entries, unkeyed) | {"statics": tuple(statics), "bare": tuple(bare)}
            number, kind, path, start, data, children, above = opened.pop()
            nodes[number] = Node(kind, path, start, len(entries), number, len(nodes), data)


# For each `eqx.nn.State` whose values have names, by its entries: the entries that each value adds to these.
_States = Mapping[Entries, Sequence[Entries]]


def _named(nodes: list[Node], entries: list[Entries], unkeyed: Mapping[int, int]) -> dict[str, Any]:
    """Calls each value of an `eqx.nn.State` after the index of the model that owns it, in the nodes and leaves below.

    A state is a dictionary without keys. An index is in the model, and holds the key of its value. So a state without
    its model in the tree has no names, and its values go by number.
    """
    indices: dict[Hashable, list[Entries]] = {}
    for node in nodes:
        if node.cls is eqx.nn.StateIndex:
            indices.setdefault(node.static[-1], []).append(node.entries)
    states = dict[Entries, list[Entries]]()
    for number in unkeyed if indices else ():
        node = nodes[number]
        if node.cls is not eqx.nn.State or not node.static or not all(key in indices for key in node.static):
            continue
        # An optimiser's state and an average hold the indices, too: the nearest one is the model's, or the topmost.
        far = lambda index, state=node.entries: (-_count_shared(index, state), len(index))
        found = [min(indices[key], key=far) for key in node.static]
        # The model is what holds all of them, next to the state.
        depth = _count_shared(node.entries, *found)
        depth += len({index[depth] for index in found}) == 1 < min(map(len, found)) - depth
        names = states[node.entries] = [index[depth:] for index in found]

        def named(its: Entries, above: Entries = node.entries, names: list[Entries] = names) -> Entries:
            return (*above, *names[int(its[len(above)])], *its[len(above) + 1 :])

        below = slice(number + 1, node.last)
        nodes[below] = [each._replace(entries=named(each.entries)) for each in nodes[below]]
        entries[node.start : node.stop] = map(named, entries[node.start : node.stop])
    pairs = [(nodes[number], count) for number, count in unkeyed.items()]
    by_number = {node.path: [node.cls.__name__, count] for node, count in pairs if node.entries not in states}
    return {"nodes": tuple(nodes), "entries": tuple(entries), "states": states, "unkeyed": by_number}


def _count_shared(*several: Entries) -> int:
    """Returns how many entries several paths share at the start."""
    different = (i for i, entries in enumerate(zip(*several, strict=False)) if len(set(entries)) > 1)
    return next(different, min(map(len, several)))


def take(node: PyTree) -> tuple[Sequence[Any], Sequence[Any], Any] | None:
    """Returns the keys and the children of a node, and its static value; `None` of a leaf."""
    taken, kind = jtu.default_registry.flatten_one_level_with_keys(node), type(node)
    if taken is None:
        return None
    pairs = list(taken[0])
    keys = [key for key, _ in pairs]
    if issubclass(kind, tuple) and kind is not tuple:  # jaxlib gives each field of a NamedTuple the first one's key
        keys = list(map(jtu.GetAttrKey, getattr(kind, "_fields", keys)))
    return keys, [child for _, child in pairs], taken[1]


def _from_skeleton(skeleton: PyTree, leaves: dict[str, Any]) -> Structure:
    return Structure(treedef=jtu.tree_structure(skeleton), is_unpickled=True, **leaves, **_read_nodes(skeleton))


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
                    deleted = f"the array at {path!r} has been deleted, as by a step that donates it"
                    raise RuntimeError(f"{deleted}; keep a copy if you need the model, tp.copy(model)") from error
        raise


# -- Trees recognised --------------------------------------------------------------------------------------------------

# JAX hashes a treedef without its static values, so that models that differ in these alone share a bucket. Enough for a
# program, small enough to let go of models that a long notebook session has built and thrown away.
_BUCKETS = 256
_PER_BUCKET = 64


class _Known:
    """A structure and the tree it was worked out from; a tree that agrees in all of this has the same structure."""

    def __init__(
        self, structure: Structure, leaves: list[Any], treedef: TreeDef, context: Any, statics: list[Any], settled: bool
    ) -> None:
        self.structure = structure
        structure.remember("known", lambda: self)  # whoever holds the structure keeps it known
        self.treedef, self.context, self.types = treedef, context, list(map(type, leaves))
        # The leaves whose type is that of an array. An object or text array is none to JAX, but its type is.
        pairs = enumerate(zip(leaves, structure.specs, strict=True))
        self.positions = [i for i, (leaf, spec) in pairs if spec is not None or isinstance(leaf, np.ndarray)]
        self.arrays = getter(self.positions)
        found = self.arrays(leaves)
        self.shapes, self.dtypes, self.avals = list(map(_shape, found)), list(map(_dtype, found)), Avals()
        self.distinct = len(set(map(id, found)))
        # Of a NumPy array the type says nothing of the dtype.
        self.numpy = getter([i for i in self.positions if isinstance(leaves[i], np.ndarray)])
        self.numpy_dtypes = list(map(_dtype, self.numpy(leaves)))
        self.statics = statics  # holding them keeps their identity theirs
        self.key = None if settled else _keys_of(statics)  # a snapshot, if the same objects can have another content

    def fits(
        self, leaves: list[Any], treedef: TreeDef, context: Any, kinds: list[type], statics: list[Any], by_shape: bool
    ) -> bool:
        """Returns whether a tree has this structure; without `by_shape` up to the shapes and dtypes of JAX's arrays.

        Cheap comparisons that often fail come first. Each is one call that runs in C, however many leaves there are.
        """
        if self.types != kinds or self.context != context or not same_treedef(self.treedef, treedef):
            return False
        # Of a tracer the type does not tell whether it is a ref.
        if self.structure.is_traced and _refs_in(leaves) != self.structure.refs:
            return False
        arrays = self.arrays(leaves)
        are_right = lambda: list(map(_shape, arrays)) == self.shapes and list(map(_dtype, arrays)) == self.dtypes
        if by_shape and not self.avals.fit(arrays, are_right):
            return False
        if not by_shape and self.numpy_dtypes != list(map(_dtype, self.numpy(leaves))):
            return False
        if len(set(map(id, arrays))) != self.distinct:
            return False
        # As many objects as leaves: then nothing is tied. With ties their number does not tell which are one.
        first = self.structure.first
        if self.distinct < len(arrays) and not all(leaves[i] is leaves[first[i]] for i in self.positions):
            return False
        # Trees made from one another share the objects; only a tree built afresh takes the comparison by value.
        if self.key is not None:
            return _keys_of(statics) == self.key
        return all(map(operator.is_, statics, self.statics)) or _keys_of(statics) == _keys_of(self.statics)


def _keys_of(statics: Sequence[Any]) -> list[Hashable]:
    # Many nodes hold the same object, such as an activation.
    distinct = dict(zip(map(id, statics), statics, strict=True))
    keys = {number: static_key(each, strict=True) for number, each in distinct.items()}
    return list(map(keys.__getitem__, map(id, statics)))


_known: "collections.OrderedDict[int, list[_Known]]" = collections.OrderedDict()
_set_aside: list[tuple[int, list["weakref.ref[_Known]"]]] = []
_changing = threading.Lock()  # for writing to `_known`; reading needs none


def structure_of(tree: PyTree, *, by_shape: bool = True) -> tuple[list[Any], TreeDef, Structure]:
    """Returns the leaves of a tree, its treedef, and its structure.

    Without `by_shape`, the structure may have other shapes and dtypes. The structure's own treedef may hold other
    static *objects* of the same type and value.
    """
    leaves, treedef = flatten(tree)
    statics: list[Any] = []
    kinds, hashed, extend, append = list(map(type, leaves)), hash(treedef), statics.extend, statics.append
    nothing = itertools.repeat(None, treedef.num_leaves)
    # JAX walks over the nodes and calls back for each; the leaves are given as `None`, and `bool` of them is for free.
    # Static values that are tuples and lists are made anew at each flattening, around values that are not.
    treedef.walk(lambda _, data: extend(data) if type(data) in (tuple, list) else append(data), bool, nothing)
    # A structure depends on the declarations too, and on whether JAX has 64 bits.
    context = registry.version, jax.dtypes.canonicalize_dtype(np.float64)
    bucket = _known.get(hashed, [])
    for i, known in enumerate(bucket):
        if known.fits(leaves, treedef, context, kinds, statics, by_shape):
            if i:  # to the front, where it is found at once; in a new list, since another thread may read the old one
                _known[hashed] = [known, *bucket[:i], *bucket[i + 1 :]]
            return leaves, treedef, known.structure
    looked_at = {id(each): each for each in statics if type(each) is not str}.values()  # keys of dictionaries are many
    settled = all(map(is_settled, looked_at))
    known = _Known(scan_tree(tree, leaves, treedef), leaves, treedef, context, statics, settled)
    if all(map(is_harmless, looked_at)):
        with _changing:
            # A new list, since another thread may be reading the old one. The newest first: it is the likeliest.
            _known[hashed] = [known, *_known.get(hashed, ())][:_PER_BUCKET]
            _known.move_to_end(hashed)
            while len(_known) > _BUCKETS:
                _known.popitem(last=False)
            if _let_go not in gc.callbacks:
                gc.callbacks.append(_let_go)
    return leaves, treedef, known.structure


def _let_go(phase: str, info: dict[str, int]) -> None:
    """Holds the known structures by weak reference while a full garbage collection runs."""
    if info["generation"] == 2 and phase == "start":
        _set_aside[:] = [(hashed, list(map(weakref.ref, bucket))) for hashed, bucket in _known.items()]
        _known.clear()
    elif info["generation"] == 2:
        for hashed, bucket in _set_aside:
            found = [known for each in bucket if (known := each()) is not None]
            if found:
                _known.setdefault(hashed, found)
