"""Recognising a tree whose structure is known, in microseconds.

Working out a structure costs Python work per node, so it is done once per kind of tree. A tree is then recognised by
comparisons that run in C: its treedef, the types, shapes and dtypes of its leaves, the identity of its static values. A
treedef alone does not do: JAX compares static fields by `==`, so `2`, `2.0` and `True` are one to it. One key in a
dictionary in place of these comparisons was tried; building the key costs more than they do.
"""

import collections
import enum
import functools
import inspect
import itertools
import operator
import os
import threading
import types
import warnings
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jaxtyping
import numpy as np
from jax.core import Tracer

from ._declare import registry
from ._static_keys import SIMPLE, contents, found_at, is_settled, static_key
from ._structure import Structure, flatten, getter, same_treedef, scan
from ._text import first_few

# JAX hashes a treedef without its static values, so that models that differ in these alone share a bucket. Enough for a
# program, small enough to let go of what a long notebook session has built and thrown away.
_BUCKETS = 256
_PER_BUCKET = 64


class _Known:
    """A structure and the tree it was worked out from: a tree that agrees in all of this has the same structure."""

    def __init__(
        self, tree: Any, leaves: list[Any], treedef: Any, context: Any, statics: list[Any], settled: bool
    ) -> None:
        self.structure = scan(tree, leaves, treedef)
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
        # The avals of the arrays that fitted last, where all are JAX's.
        is_concrete = not self.structure.is_traced and all(map(_is_concrete, set(map(type, found))))
        self.avals = list(map(_aval, found)) if is_concrete else []
        # Of a NumPy array the type says nothing of the dtype.
        self.numpy = getter([i for i in self.positions if isinstance(leaves[i], np.ndarray)])
        self.numpy_dtypes = list(map(_dtype, self.numpy(leaves)))
        self.statics = statics  # holding them keeps their identity theirs
        self.settled = settled  # whether the same static objects have the same content; else a snapshot is kept
        self.key = None if settled else _key(statics)

    def fits(self, leaves: list[Any], treedef: Any, context: Any, kinds: list[type], statics: list[Any]) -> bool:
        """Whether a tree has this structure, up to the shapes and dtypes of arrays that JAX knows by type."""
        if self.types != kinds or self.context != context or not same_treedef(self.treedef, treedef):
            return False
        if self.numpy_dtypes and self.numpy_dtypes != list(map(_dtype, self.numpy(leaves))):
            return False
        arrays = self.arrays(leaves)
        if len(set(map(id, arrays))) != self.distinct:
            return False
        first = self.structure.first
        if self.distinct < len(arrays) and not all(leaves[i] is leaves[first[i]] for i in self.positions):
            return False
        # Trees made from one another share the objects; only a tree built afresh takes the comparison by value.
        if not self.settled:
            return _key(statics) == self.key
        return all(map(operator.is_, statics, self.statics)) or _key(statics) == _key(self.statics)

    def fits_by_shape(self, leaves: list[Any]) -> bool:
        arrays = self.arrays(leaves)
        # Arrays that came out of one program share the objects that are their types, and to find these the same takes
        # a third of the time of comparing shapes and dtypes.
        avals = list(map(_aval, arrays)) if self.avals else []
        if avals and all(map(operator.is_, avals, self.avals)):
            return True
        fits = list(map(_shape, arrays)) == self.shapes and list(map(_dtype, arrays)) == self.dtypes
        if fits and avals:
            self.avals[:] = avals
        return fits


_known: "collections.OrderedDict[int, list[_Known]]" = collections.OrderedDict()
_changing = threading.Lock()  # of what is known; reading needs none
_key = functools.partial(static_key, strict=True)
_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")
_aval = operator.attrgetter("aval")


def structure_of(tree: Any, *, by_shape: bool = True) -> tuple[list[Any], Any, Structure]:
    """The leaves of a tree, its treedef, and its structure; without `by_shape` that of another in shapes and dtypes.

    The structure's own treedef may hold other static *objects* of the same type and value.
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
    looked_at = {id(value): value for value in statics if type(value) not in SIMPLE}.values()
    settled = all(map(is_settled, looked_at))
    known = _Known(tree, leaves, treedef, context, statics, settled)
    if not known.structure.is_traced:
        _meet(known.structure, is_call=not by_shape)
    if all(map(_is_harmless, looked_at)):
        with _changing:
            # A new list, since another thread may be reading the old one. The newest first: it is the likeliest.
            _known[hashed] = [known, *_known.get(hashed, ())][:_PER_BUCKET]
            _known.move_to_end(hashed)
            while len(_known) > _BUCKETS:
                _known.popitem(last=False)
    return leaves, treedef, known.structure


# -- Ties that a trace has lost ----------------------------------------------------------------------------------------

# Kinds of structure that were met with one array at several places: shapes, and pairs of leaves. No arrays.
_met_tied: "collections.OrderedDict[int, list[tuple[list[Any], list[tuple[int, int]]]]]" = collections.OrderedDict()
_met_apart: set[int] = set()  # kinds that were met with an array of its own at each place, and not tied before
_given: "collections.OrderedDict[tuple[int, ...], dict[Any, None]]" = collections.OrderedDict()  # ties, to layouts
_warned_of: set[Hashable] = set()
_on_purpose: dict[int, "weakref.ref[Tracer]"] = {}  # tracers that are apart because the arrays were, by identity
_MET = 1024  # kinds
# Where run-time checks of annotations are switched on, they stand between the calls of this library.
OURS = (os.path.dirname(__file__), os.path.dirname(jaxtyping.__file__), "<@beartype(treeparams")


def _meet(structure: Structure, is_call: bool) -> None:
    """Remembers the ties by identity of what is met outside of a trace: of a tree, or of each argument of a call.

    Not where the same kind was met apart before. The gradient of a sum has one object at two places, and it has the
    structure of its model; what ties a model met before, `tp.tie` or a layout, notes that by itself.
    """
    first, pairs = structure.first, []
    if len(set(first)) < len(first):
        pairs = [(first[i], i) for i in structure.parameters if first[i] != i]
    for number, root in enumerate(structure.nodes if is_call else structure.nodes[:1]):
        if len(root.entries) != (2 if is_call else 0):
            continue
        kind = structure.kind_of(number)
        if kind not in _met_tied and not [a for a, b in pairs if root.start <= a and b < root.stop]:
            _met_apart.add(kind)
    if pairs:
        note_ties(structure, pairs, above=2 if is_call else 0)


def note_ties(structure: Structure, pairs: Sequence[tuple[int, int]], *, above: int | None = None) -> None:
    """Remembers that parameters of a structure are one array, outside of any trace.

    A model may be a part of something else, such as a state: each node that holds both places is remembered, if its
    path has at least `above` entries; without that also a node of a kind that was met apart.
    """
    shapes = [spec and spec.shape for spec in structure.specs]
    for number, node in enumerate(structure.nodes):
        inside = [(a - node.start, b - node.start) for a, b in map(sorted, pairs) if node.start <= a < b < node.stop]
        if not inside or len(node.entries) < (above or 0):
            continue
        kind, found = structure.kind_of(number), (shapes[node.start : node.stop], inside)
        if above is not None and kind in _met_apart:
            continue
        with _changing:
            _met_apart.discard(kind)
            if found not in _met_tied.setdefault(kind, []):
                _met_tied[kind].append(found)
            while len(_met_tied) > _MET:
                _met_tied.popitem(last=False)


def keep_apart(tracers: Iterable[Any]) -> None:
    """Remembers that these are apart as the arrays are: arguments of `tp.jit`, slots of a `Rest`, untied copies."""
    if _met_tied:
        for each in tracers:
            if isinstance(each, Tracer):
                key = id(each)
                _on_purpose[key] = weakref.ref(each, lambda _, key=key: _on_purpose.pop(key, None))


def likeness(structure: Structure) -> tuple[int, ...]:
    """Equal for models of one class with the same paths, shapes and dtypes."""
    return hash(structure), *structure.kinds[:1]


def note_given(structure: Structure, ties: Iterable[Any]) -> None:
    """Remembers ties that a layout was given, which neither arrays nor classes tell."""
    _given.setdefault(likeness(structure), {}).update(dict.fromkeys(ties))
    if len(_given) > _MET:
        _given.popitem(last=False)


def given_to(structure: Structure) -> Iterable[Any]:
    """The ties that layouts of such models were given."""
    return _given.get(likeness(structure), ()) if _given else ()


def warn_of_lost_ties(structure: Structure, leaves: Sequence[Any], sources: Mapping[int, int], trained: Any) -> None:
    """Warns, once per kind of structure, where a traced model has two arrays in place of one that was met before.

    Not of aliases whose sources are known in spite of the trace, nor of what is frozen: it has no gradient to part.
    """
    root = lambda leaf: sources.get(structure.first[leaf], structure.first[leaf])
    for node, kind in zip(structure.nodes, structure.kinds, strict=True) if _met_tied else ():
        if kind in _warned_of or kind not in _met_tied:
            continue
        for shapes, pairs in _met_tied[kind]:
            within = [(a + node.start, b + node.start) for a, b in pairs]
            lost = [pair for pair in within if root(pair[0]) != root(pair[1]) and any(trained[i] for i in pair)]
            lost = [pair for pair in lost if not all(id(leaves[i]) in _on_purpose for i in pair)]
            # Within `vmap` and `scan` all leaves lack the axes that are mapped, as many of each.
            specs = zip(structure.specs[node.start : node.stop], shapes, strict=True)
            now = [(spec.shape, shape) for spec, shape in specs if spec is not None]
            mapped = {len(shape) - len(inner) for inner, shape in now}
            if lost and len(mapped) == 1 and all(inner == shape[min(mapped) :] for inner, shape in now):
                names = [f"{structure.paths[one]!r} and {structure.paths[other]!r}" for one, other in lost]
                warn(_LOST.format(first_few(names)), about=kind)
                break


_LOST = (
    "{} were one array in a model of this structure that was met before. In this one, among the arguments of jax.jit, "
    "vmap, scan or the like, they are two, each with a gradient and a step of its own. Make a layout outside and pass "
    "it in (known = tp.layout(model); tp.grad(loss, known)), or (params, rest) of tp.partition, or a Restructure of "
    "tp.ravel; or use tp.jit. For a model that only looks alike pass its own layout, and this warning is not given"
)


def warn(message: str, about: Hashable = None) -> None:
    """Gives a warning at the line that called this library; of what is named by `about`, once."""
    if about is not None:
        if about in _warned_of:
            return
        _warned_of.add(about)
    frame, levels = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame, levels = frame.f_back, levels + 1
    warnings.warn(message, UserWarning, stacklevel=levels)


def name_deleted(error: Exception, tree: Any) -> None:
    """Raises an error that names the array of a tree that has been deleted, where there is one.

    To be called where JAX has failed: to ask each array beforehand would cost more than all else that is asked.
    """
    leaves, _, structure = structure_of(tree)
    for leaf, path in zip(leaves, structure.paths, strict=True):
        if _is_concrete(type(leaf)) and leaf.is_deleted():
            raise RuntimeError(
                f"the array at {path!r} has been deleted, as by a step that donates it; keep a copy of what is needed "
                "after, tp.copy(model)"
            ) from error


# -- What is looked at -------------------------------------------------------------------------------------------------


def static_values(treedef: Any) -> list[Any]:
    """The static values of all nodes."""
    values: list[Any] = []
    extend, append = values.extend, values.append
    leaves = itertools.repeat(None, treedef.num_leaves)
    treedef.walk(lambda _, data: extend(data) if type(data) in _MADE_ANEW else append(data), bool, leaves)
    return values


_MADE_ANEW = frozenset((tuple, list))  # at each flattening, around values that are not


def _is_concrete(kind: type) -> bool:
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


def _is_harmless(static: Any, depth: int = 4) -> bool:
    """Whether holding a static value keeps no array or tracer alive.

    What is not known to hold none is not remembered: a tree with a closure over an array is worked out at each call.
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
        held = [getattr(static, "__wrapped__", np.empty(0))]  # what `jax.jit` compiles
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
