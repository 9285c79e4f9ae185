"""Recognises a tree whose structure is known, in microseconds.

Working out a structure costs Python work per node, so it is done once per kind of tree. A tree is then recognised by
comparisons that run in C: its treedef, the types, shapes and dtypes of its leaves, the identity of its static values. A
treedef alone is not enough: JAX compares static fields by `==`, so it does not distinguish `2`, `2.0` and `True`. A
single dictionary key instead of these comparisons was tried; building the key costs more than they do.

A structure holds the static values of its tree. So the memory of structures is weak: a full garbage collection takes
away those that nothing else holds, such as a layout, a state or a compiled program. To work one out again takes less
time than the collection did. A plain weak memory would forget them at once, at the end of each call.
"""

import collections
import enum
import functools
import gc
import itertools
import operator
import threading
import types
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from .declare import registry
from .memory import meet
from .static_keys import SIMPLE, StaticKeys, contents, found_at, is_settled
from .structure import Avals, Structure, flatten, getter, refs_in, same_treedef, scan_tree
from .types import PyTree, TreeDef

# JAX hashes a treedef without its static values, so that models that differ in these alone share a bucket. Enough for a
# program, small enough to let go of models that a long notebook session has built and thrown away.
_BUCKETS = 256
_PER_BUCKET = 64


_Context = tuple[int, np.dtype]
"""A structure depends on it besides its tree: the version of the declarations, and whether JAX has 64 bits."""


class _Known:
    """A structure and the tree it was worked out from; a tree that agrees in all of this has the same structure."""

    def __init__(
        self, tree: PyTree, leaves: list[Any], treedef: TreeDef, context: _Context, statics: list[Any], settled: bool
    ) -> None:
        self.structure = scan_tree(tree, leaves, treedef)
        self.structure.remember("known", lambda: self)  # whoever holds the structure keeps it known
        self.treedef = treedef
        self.context = context
        self.types = list(map(type, leaves))
        # The leaves whose type is that of an array. An object or text array is none to JAX, but its type is.
        specs = enumerate(self.structure.specs)
        self.positions = [i for i, spec in specs if spec is not None or isinstance(leaves[i], np.ndarray)]
        self.arrays = getter(self.positions)
        found = self.arrays(leaves)
        self.shapes = list(map(_shape, found))
        self.dtypes = list(map(_dtype, found))
        self.distinct = len(set(map(id, found)))
        self.avals = Avals()
        self.avals.fit(found, lambda: True)
        # Of a NumPy array the type says nothing of the dtype.
        self.numpy = getter([i for i in self.positions if isinstance(leaves[i], np.ndarray)])
        self.numpy_dtypes = list(map(_dtype, self.numpy(leaves)))
        self.statics = statics  # holding them keeps their identity theirs
        self.settled = settled  # whether the same static objects have the same content; else a snapshot is kept
        self.key = None if settled else _keys_of(statics)

    def fits(
        self, leaves: list[Any], treedef: TreeDef, context: _Context, kinds: list[type], statics: list[Any]
    ) -> bool:
        """Returns whether a tree has this structure, up to the shapes and dtypes of arrays that JAX knows by type.

        Cheap comparisons that often fail come first. Each is one call that runs in C, however many leaves there are.
        """
        if self.types != kinds or self.context != context or not same_treedef(self.treedef, treedef):
            return False
        if self.numpy_dtypes and self.numpy_dtypes != list(map(_dtype, self.numpy(leaves))):
            return False
        # Of a tracer the type does not tell whether it is a ref.
        if self.structure.is_traced and refs_in(leaves) != self.structure.refs:
            return False
        arrays = self.arrays(leaves)
        if len(set(map(id, arrays))) != self.distinct:
            return False
        # As many objects as leaves: then nothing is tied. With ties their number does not tell which are one.
        first = self.structure.first
        if self.distinct < len(arrays) and not all(leaves[i] is leaves[first[i]] for i in self.positions):
            return False
        # Trees made from one another share the objects; only a tree built afresh takes the comparison by value.
        if not self.settled:
            return _keys_of(statics) == self.key
        return all(map(operator.is_, statics, self.statics)) or _keys_of(statics) == _keys_of(self.statics)

    def fits_by_shape(self, leaves: list[Any]) -> bool:
        arrays = self.arrays(leaves)
        return self.avals.fit(
            arrays, lambda: list(map(_shape, arrays)) == self.shapes and list(map(_dtype, arrays)) == self.dtypes
        )


_known: "collections.OrderedDict[int, list[_Known]]" = collections.OrderedDict()
_set_aside: list[tuple[int, list["weakref.ref[_Known]"]]] = []
_changing = threading.Lock()  # for writing to `_known`; reading needs none
_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")


def _keys_of(statics: Sequence[Any]) -> list[Hashable]:
    """Returns the keys of static values; many nodes hold the same object."""
    once, key = dict(zip(map(id, statics), statics, strict=True)), StaticKeys(strict=True).key
    keys = {each: (type(it), it) if type(it) in SIMPLE else key(it) for each, it in once.items()}
    return list(map(keys.__getitem__, map(id, statics)))


def structure_of(tree: PyTree, *, by_shape: bool = True) -> tuple[list[Any], TreeDef, Structure]:
    """Returns the leaves of a tree, its treedef, and its structure.

    Without `by_shape`, the structure may have other shapes and dtypes. The structure's own treedef may hold other
    static *objects* of the same type and value.
    """
    leaves, treedef = flatten(tree)
    kinds = list(map(type, leaves))
    context = (registry.version, jax.dtypes.canonicalize_dtype(np.float64))
    statics = static_values(treedef)
    hashed = hash(treedef)
    bucket = _known.get(hashed, [])
    for i, known in enumerate(bucket):
        if known.fits(leaves, treedef, context, kinds, statics) and (not by_shape or known.fits_by_shape(leaves)):
            if i:  # to the front, where it is found at once; in a new list, since another thread may read the old one
                _known[hashed] = [known, *bucket[:i], *bucket[i + 1 :]]
            return leaves, treedef, known.structure
    # Many nodes share their static values, such as an activation, so each object is looked at once.
    looked_at = {id(value): value for value in statics if type(value) not in SIMPLE}.values()
    settled = all(map(is_settled, looked_at))
    known = _Known(tree, leaves, treedef, context, statics, settled)
    if not known.structure.is_traced and jax.ShapeDtypeStruct not in known.types:
        meet(known.structure, is_call=not by_shape)
    if all(map(_is_harmless, looked_at)):
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


# -- Static values -----------------------------------------------------------------------------------------------------


def static_values(treedef: TreeDef) -> list[Any]:
    """Returns the static values of all nodes."""
    values: list[Any] = []
    # JAX walks over the nodes and calls back for each; the leaves are given as `None`, and `bool` of them is for free.
    extend, append = values.extend, values.append
    leaves = itertools.repeat(None, treedef.num_leaves)
    treedef.walk(lambda _, data: extend(data) if type(data) in _MADE_ANEW else append(data), bool, leaves)
    return values


_MADE_ANEW = frozenset((tuple, list))  # at each flattening, around values that are not


def _is_harmless(static: object, depth: int = 4) -> bool:
    """Returns whether holding a static value keeps no array or tracer alive.

    A tree with a value that may hold one, such as a closure over an array, is not remembered but worked out at each
    call: a tracer that is kept alive is an error under `jax.checking_leaks`, and an array is memory.
    """
    kind = type(static)
    if isinstance(static, _PLAIN) or kind is object:
        return True
    # What a module holds by name lives as long as the module, whoever remembers it.
    module, name = getattr(static, "__module__", None), getattr(static, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and found_at(module, name) is static:
        return True
    if isinstance(static, (jax.Array, np.ndarray)) or depth == 0:
        return False
    if isinstance(static, types.FunctionType):
        held = [static.__defaults__, static.__kwdefaults__, vars(static)]
        try:
            held += [cell.cell_contents for cell in static.__closure__ or ()]
        except ValueError:  # an empty cell, of a name that is not bound yet
            return False
    elif kind in contents:
        held = list(contents[kind](static))
    elif isinstance(static, (tuple, list, set, frozenset)):
        held = list(static)
    elif isinstance(static, dict):
        held = [*static.keys(), *static.values()]
    elif isinstance(static, functools.partial):
        held = [static.func, static.args, static.keywords]
    elif kind.__module__.startswith("jaxlib"):
        held = [getattr(static, "__wrapped__", np.empty(0))]  # the function that `jax.jit` compiles
    elif not [cls for cls in kind.__mro__[:-1] if not cls.__flags__ & _WRITTEN_IN_PYTHON]:
        held = [object.__getstate__(static)]  # attributes and slots
    else:
        return False
    return not [each for each in held if not _is_harmless(each, depth - 1)]


# Types whose instances hold no other objects.
_PLAIN = (
    *(int, float, complex, str, bytes, type(None), enum.Enum, np.generic, np.dtype, np.ufunc, types.ModuleType),
    *(jax.Device, jax.sharding.Mesh, jax.sharding.Sharding, jax.sharding.PartitionSpec),
)
_WRITTEN_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: not one of the types that are part of the interpreter
