"""What is static about a tree: its nodes, the paths of its leaves, their shapes and dtypes, which are one array."""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from ._declare import is_box
from ._exact import node_statics
from ._paths import join, sibling_entries

_REMEMBERED = 256  # derived things per structure; far more than a program uses


class Spec(NamedTuple):
    """Shape and (JAX) dtype of an array leaf."""

    shape: tuple[int, ...]
    dtype: Any
    parameter: bool  # floating or complex: what can be trained


class Child(NamedTuple):
    """A child that has leaves: its key, its entry in paths (none below a box), and the range of its leaves."""

    key: Any
    entry: tuple[str, ...]
    start: int
    stop: int
    is_leaf: bool


class Node(NamedTuple):
    """An inner node that has leaves."""

    cls: type
    entries: tuple[str, ...]
    children: tuple[Child, ...]
    start: int
    stop: int
    static: Any  # as it is in the treedef

    @property
    def path(self) -> str:
        return join(self.entries)


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """The static description of a kind of tree. It holds no array of the tree."""

    treedef: Any
    nodes: tuple[Node, ...]
    entries: tuple[tuple[str, ...], ...]  # of each leaf
    specs: tuple[Spec | None, ...]  # of each leaf; None: not an array
    first: tuple[int, ...]  # of each leaf: the first that is the same array object
    statics: tuple[Any, ...]  # of each node, exact; taken at once, since a static list may change later
    _memo: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        return tuple(map(join, self.entries))

    @functools.cached_property
    def index(self) -> dict[str, int]:
        return {path: i for i, path in enumerate(self.paths)}

    @functools.cached_property
    def parameters(self) -> tuple[int, ...]:
        """The positions of the leaves that can be trained."""
        return tuple(i for i in range(len(self.specs)) if self.is_parameter(i))

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.paths, self.specs))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self is other or (
            self._hash == other._hash
            and (self.specs, self.paths, self.statics) == (other.specs, other.paths, other.statics)
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # A treedef that holds static values does not pickle. A tree of that structure does.
        skeleton = jtu.tree_unflatten(self.treedef, range(self.treedef.num_leaves))
        return _from_skeleton, (skeleton, self.specs, self.first)

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was derived from the structure under this key, or is now."""
        if key not in self._memo:
            if len(self._memo) >= _REMEMBERED:
                self._memo.clear()
            self._memo[key] = make()
        return self._memo[key]

    def is_parameter(self, i: int) -> bool:
        """Whether a leaf can be trained."""
        spec = self.specs[i]
        return spec is not None and spec.parameter

    def spec(self, i: int) -> Spec:
        """The shape and dtype of an array leaf."""
        spec = self.specs[i]
        if spec is None:
            raise TypeError(f"{self.paths[i]!r} is no array")
        return spec

    def describe(self, i: int) -> str:
        """A leaf as `'path' (float32[2,3])`, for error messages."""
        spec = self.specs[i]
        return f"{self.paths[i]!r}" + (f" ({describe(spec)})" if spec else " (not an array)")


def describe(value: Any) -> str:
    """The dtype and shape of an array, or the type of what is none.

    >>> describe(jnp.ones((2, 3))), describe(0.5)
    ('float32[2,3]', 'float')
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return type(value).__name__


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, concrete, traced or abstract."""
    always = _is_array_type(type(leaf))
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSUMm"  # objects, texts and times are no arrays to JAX
    return isinstance(leaf, jax.Array) if always is None else always


@functools.cache
def _is_array_type(kind: type) -> bool | None:
    # `isinstance(x, jax.Array)` asks the value, at a microsecond each; only for tracers does the answer depend on it.
    if issubclass(kind, Tracer):
        return None
    return issubclass(kind, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def common_dtype(dtypes: Iterable[Any]) -> Any:
    """The dtype that holds all of these; JAX's float when there are none.

    >>> common_dtype([jnp.bfloat16, jnp.float16])
    dtype('float32')

    Beside others, floats of 8 bits count as bfloat16, which holds their values; JAX has no promotion for them.
    """
    distinct = list(dict.fromkeys(map(jnp.dtype, dtypes)))
    if len(distinct) == 1:
        return distinct[0]
    wide = [jnp.bfloat16 if _is_inexact(each) and each.itemsize == 1 else each for each in distinct]
    with jax.numpy_dtype_promotion("standard"):  # here dtypes are mixed on purpose
        return jnp.dtype(jnp.result_type(*wide or [float]))


def same_treedef(a: Any, b: Any) -> bool:
    """Whether two treedefs are equal as JAX sees it: static fields by `==`, whatever their types."""
    try:
        return bool(a == b)
    except Exception:  # static arrays, whose `==` has no truth value
        return False


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """`jax.tree.flatten` with a clear error for a tree that contains itself."""
    try:
        return jtu.tree_flatten(tree)
    except (RecursionError, SystemError) as error:  # SystemError: how the C++ side reports a RecursionError
        path = _find_cycle(tree)
        if path is None:
            raise
        raise ValueError(
            f"the model is cyclic: the node at {path!r} is one of the nodes above it. A pytree is a tree; "
            "keep one of the two references, or hold it in a static field"
        ) from error


def getter(indices: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """`operator.itemgetter` that returns a tuple for any number of indices."""
    if len(indices) == 1:
        only = indices[0]
        return lambda items: (items[only],)
    return operator.itemgetter(*indices) if indices else lambda _: ()


def scan(tree: Any, leaves: Sequence[Any]) -> Structure:
    """Works out the structure of a tree."""
    first: dict[int, int] = {}
    concrete = [is_array(leaf) and type(leaf) is not jax.ShapeDtypeStruct for leaf in leaves]
    same = tuple(
        first.setdefault(id(leaf), i) if array else i
        for i, (leaf, array) in enumerate(zip(leaves, concrete, strict=True))
    )
    return _from_skeleton(tree, tuple(map(_spec, leaves)), same)


def _from_skeleton(tree: Any, specs: tuple[Spec | None, ...], first: tuple[int, ...]) -> Structure:
    keys = [path for path, _ in jtu.tree_flatten_with_path(tree)[0]]
    treedef = jtu.tree_structure(tree)
    scan = _Scan(keys)
    scan.visit(treedef, (), 0)
    return Structure(treedef, tuple(scan.nodes), tuple(scan.entries), specs, first, node_statics(treedef))


class _Scan:
    """One pass over a treedef beside the key paths of its leaves."""

    def __init__(self, keys: list[tuple[Any, ...]]) -> None:
        self.keys = keys
        self.nodes: list[Node] = []
        self.entries: list[tuple[str, ...]] = []

    def visit(self, treedef: Any, above: tuple[str, ...], depth: int) -> None:
        data = treedef.node_data()
        if data is None:
            self.entries.append(above)
            return
        every = treedef.children()
        below = [child for child in every if child.num_leaves]
        start = stop = len(self.entries)
        ranges, keys = [], []
        for child in below:
            keys.append(self.keys[stop][depth])
            ranges.append((stop, stop := stop + child.num_leaves))
        texts = [()] if len(below) == 1 and is_box(data[0]) else _entries(data, every, keys)
        children = tuple(
            Child(key, text, begin, end, child.node_data() is None)
            for key, text, (begin, end), child in zip(keys, texts, ranges, below, strict=True)
        )
        self.nodes.append(Node(data[0], above, children, start, stop, data[1]))
        for child, text in zip(below, texts, strict=True):
            self.visit(child, (*above, *text), depth + 1)


def _entries(data: tuple[type, Any], children: list[Any], keys: list[Any]) -> list[tuple[str, ...]]:
    # A path does not change when a sibling loses its leaves, so those without take part. Only dicts can have keys that
    # read alike, and a dict's static value ends in its keys.
    if data[0] in (dict, collections.OrderedDict, collections.defaultdict) and len(children) > len(keys):
        names = data[1][1] if data[0] is collections.defaultdict else data[1]
        entries = sibling_entries([jtu.DictKey(name) for name in names])
        return [(entry,) for entry, child in zip(entries, children, strict=True) if child.num_leaves]
    return [(entry,) for entry in sibling_entries(keys)]


def _spec(leaf: Any) -> Spec | None:
    if not is_array(leaf):
        return None
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if isinstance(leaf, np.ndarray) else leaf.dtype
    return Spec(tuple(leaf.shape), dtype, _is_inexact(dtype))


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _find_cycle(tree: Any, above: tuple[Any, ...] = (), entries: tuple[str, ...] = ()) -> str | None:
    if any(tree is node for node in above):
        return join(entries)
    root_first = iter((False,))  # only the root is taken apart, so that its children come out whole
    children = jtu.tree_flatten_with_path(tree, is_leaf=lambda _: next(root_first, True))[0]
    if children and not children[0][0]:  # a leaf
        return None
    for entry, (_, child) in zip(sibling_entries([key[0] for key, _ in children]), children, strict=True):
        found = _find_cycle(child, (*above, tree), (*entries, entry))
        if found is not None:
            return found
    return None
