"""The place of each leaf of a model: among the slots, in the canonical tree, in the vector, in stacks; in words."""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import DTypeLike

from .._tree.paths import join_path, nearest, split_path, unquote
from .._tree.structure import Avals, Structure, flatten, getter, same_treedef, structure_of
from .._tree.text import AS_ARRAY, Printed, Table, describe, first_few, in_bytes, quoted, warn
from .._tree.types import PyTree, TreeDef, common_dtype, is_complex, is_inexact, value_of, widened
from .ties import Alias, followers
from .where import Where, declared_frozen, name_of, select


class Slot(NamedTuple):
    """One distinct trained parameter, and its place in the vector and in the stacks."""

    path: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # in elements
    size: int  # in elements
    key: str  # of its stack
    row: int


Slot.__module__ = "treeparams"


_Some = Collection[int] | None
Tied = Literal["sum", "first"] | None
_shape, _dtype, _weak_type = map(operator.attrgetter, ("shape", "dtype", "weak_type"))
_float0 = jax.dtypes.float0  # of a gradient that is none, of an integer


class _Gathers(NamedTuple):
    """Functions that pick parts of the list of a model's leaves, and the way back: each is one call that runs in C."""

    slots: Callable[[Any], tuple[Any, ...]]  # from the leaves of a model to one array per slot
    kept: Callable[[Any], tuple[Any, ...]]  # ... to all arrays that are no slots, each object once
    values: Callable[[Any], tuple[Any, ...]]  # ... to the leaves that are no arrays, and to refs
    kept_paths: tuple[str, ...]
    order: tuple[int, ...]  # the position of each leaf in slots + kept + values + computed
    leaves: Callable[[Any], tuple[Any, ...]]  # from these to the leaves
    tied_pairs: list[tuple[int, int]]  # which of these are one array


class Index:
    """The places of leaves. Leaves are numbered in tree order, slots in the order of their leaves."""

    def __init__(self, structure: Structure, trained: tuple[bool, ...], ties: tuple[Alias, ...]) -> None:
        self.structure, self.trained, self.ties = structure, trained, ties  # `trained`: of each leaf
        self.forms: dict[Any, Any] = {}  # those that were asked for
        self._avals = Avals()  # of arrays with the shapes of the slots
        self.are_ties_noted = False  # for the warning of ties that a trace has lost
        # For accidents with ties: as of which change of the memory. A mask, or a callable, makes an index at each call.
        self.checked: dict[str, int] = structure.remember(("checked", trained, ties), dict)
        self.sources = {alias.leaf: alias.source for alias in ties}
        self.distinct = tuple([i for i in structure.parameters if i not in self.sources])
        self.positions = tuple([i for i in self.distinct if trained[i]])  # the leaf of each slot
        specs = {i: structure.spec(i) for i in self.distinct}
        self.shapes, self.dtypes = [specs[i].shape for i in self.positions], [specs[i].dtype for i in self.positions]
        self.complex_slots = tuple([slot for slot, dtype in enumerate(self.dtypes) if dtype.kind == "c"])
        # The parameters, frozen ones too, with fewer bits than single precision, in which small steps round to zero.
        narrow = [i for i, spec in specs.items() if spec.dtype.itemsize < 4]
        self.narrow = {leaf: n for n, leaf in enumerate(narrow)}  # with their numbers among these
        self.by_leaf = {leaf: slot for slot, leaf in enumerate(self.positions)}  # the slot of each trained leaf
        self.narrow_slots = tuple([self.by_leaf[i] for i in narrow if trained[i]])
        self.aliases: dict[int, list[Alias]] = {}  # of each source
        self.follows = followers(ties)
        self.computed: list[tuple[int, Alias]] = []  # aliases with a transform that are trained, and their slots
        for alias in ties:
            self.aliases.setdefault(alias.source, []).append(alias)
            if trained[alias.source]:
                self.by_leaf[alias.leaf] = self.by_leaf[alias.source]
                if alias.transforms:
                    self.computed.append((self.by_leaf[alias.leaf], alias))

    @functools.cached_property
    def digest(self) -> str:
        """A digest of paths, shapes, dtypes, trained leaves and ties.

        It leaves out node types, static values and leaves that are not arrays, so a dictionary that becomes a class
        keeps its digest.
        """
        paths, in_words = self.structure.paths, functools.cache(str)  # of few dtypes, which NumPy names slowly
        # In tree order, since that is how slots follow one another in a vector and in stacks.
        each = zip(paths, self.structure.specs, self.trained, strict=True)
        leaves = [[path, list(spec.shape), in_words(spec.dtype), trained] for path, spec, trained in each if spec]
        # A transform goes by its name and what it binds, without its module, which may be `__main__` in one process.
        aliases = sorted([paths[tie.leaf], paths[tie.source], str(tie)] for tie in self.ties)
        # Whoever changes this text makes all checkpoints foreign.
        text = json.dumps([leaves, aliases], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @functools.cached_property
    def tied_to(self) -> dict[str, str]:
        """The aliases of each tied parameter, in words."""
        paths = self.structure.paths
        shown = lambda alias: paths[alias.leaf] + f" ({alias})" * bool(alias.transforms)
        return {paths[source]: ", ".join(map(shown, aliases)) for source, aliases in self.aliases.items()}

    # -- The slots

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        return self.described(self.positions)

    @functools.cached_property
    def frozen(self) -> tuple[Slot, ...]:
        """The frozen parameters, each once, described like slots."""
        return self.described([i for i in self.distinct if not self.trained[i]])

    def described(self, leaves: Iterable[int]) -> tuple[Slot, ...]:
        """Describes these parameters as if they, and no others, were slots."""
        slots, offset, paths = [], 0, self.structure.paths
        rows: dict[str, int] = {}
        for i in leaves:
            shape, dtype, _ = self.structure.spec(i)
            aliases = tuple(paths[alias.leaf] for alias in self.aliases.get(i, ()))
            key = describe(self.structure.spec(i))
            rows[key] = row = rows.get(key, -1) + 1
            slots.append(Slot(paths[i], aliases, shape, dtype, offset, math.prod(shape), key, row))
            offset += slots[-1].size
        return tuple(slots)

    def slot_at(self, path: str) -> int:
        """Returns the number of the slot at a path."""
        if not isinstance(path, str):
            raise TypeError(f"expected a path, got {path!r}; layout.slots are the slots in order")
        structure, leaf = self.structure, self.structure.index.get(path)
        if leaf in self.by_leaf:
            return self.by_leaf[leaf]
        if leaf is None and any(path == node.path for node in structure.nodes):
            raise KeyError(f"{path!r} is a node; layout.indices({path!r}) are the positions of the parameters below it")
        if leaf is None:
            known = [structure.paths[i] for i in self.by_leaf]
            raise KeyError(f"{path!r} is not a path of the model{nearest(path, known)}")
        if structure.is_parameter(leaf):
            raise KeyError(f"{path!r} is frozen, so it has no slot; layout.thaw({path!r}) gives it one")
        raise KeyError(f"{structure.describe(leaf)} is not a parameter")

    def slots_in(self, where: Where) -> tuple[int, ...]:
        """Returns the numbers of the slots that `where` selects, in order."""
        leaves = select(self.structure, where, self.follows)
        found = {self.by_leaf[leaf] for leaf in leaves if leaf in self.by_leaf}
        if not found:
            path = self.structure.paths[min(leaves)]
            selects = f"{where!r} selects only frozen parameters, such as {path!r}"
            raise ValueError(f"{selects}; layout.thaw({path!r}) trains it")
        return tuple(sorted(found))

    def have_shapes(self, arrays: Sequence[Any]) -> bool:
        """Returns whether these are arrays, one for each slot, of its shape."""
        return self._avals.fit(arrays, lambda: [getattr(each, "shape", None) for each in arrays] == self.shapes)

    # -- Trees

    @functools.cached_property
    def gathers(self) -> _Gathers:
        """The functions that take a model apart, made when a model is first taken apart.

        Each leaf is one of four kinds: at a slot, an array that is kept, a value that is not an array, or computed from
        a slot. A leaf that holds the array of an earlier leaf shares the place of that leaf. A ref counts as a value:
        JAX lets a program write it, but not return it.
        """
        structure = self.structure
        others = [i for i in range(len(self.trained)) if i not in self.by_leaf]
        kept = [i for i in others if structure.is_array(i) and structure.first[i] == i]
        values = [i for i in others if not structure.is_array(i)]
        rest = [*kept, *values, *(alias.leaf for _, alias in self.computed)]
        positions = self.by_leaf | {leaf: n for n, leaf in enumerate(rest, start=len(self.positions))}
        order = tuple([positions[i if i in positions else first] for i, first in enumerate(structure.first)])
        paths = tuple([structure.paths[i] for i in kept])
        tied = [(each.source, each.leaf) for each in self.ties if not each.transforms and self.trained[each.leaf]]
        return _Gathers(getter(self.positions), getter(kept), getter(values), paths, order, getter(order), tied)

    @functools.cached_property
    def canonical_leaves(self) -> Callable[[Any], tuple[Any, ...]]:
        """The function from one value per slot, followed by `None`, to the leaves of the canonical tree."""
        slots = {leaf: slot for slot, leaf in enumerate(self.positions)}  # without aliases, unlike `by_leaf`
        return getter([slots.get(leaf, len(slots)) for leaf in range(len(self.trained))])

    @functools.cached_property
    def canonical_treedef(self) -> TreeDef:
        return jtu.tree_structure(self.canonical([0] * len(self.positions), self.structure.treedef))

    def canonical(self, slots: Sequence[Any], treedef: TreeDef) -> PyTree:
        """Returns the canonical tree of one value per slot."""
        return jtu.tree_unflatten(treedef, self.canonical_leaves([*slots, None]))

    def computed_from(self, slots: Sequence[Any]) -> list[Any]:
        """Returns the values of `computed` from one value per slot; `None` stays `None`."""
        spec, pairs = self.structure.spec, [(slots[slot], alias) for slot, alias in self.computed]
        return [None if value is None else alias.value_from(value, spec(alias.source)) for value, alias in pairs]

    @functools.cached_property
    def everywhere(self) -> Callable[[Any], tuple[Any, ...]]:
        """The function from slots + `None` + computed to the leaves of a tree with a value at every path of a tie."""
        nothing = len(self.positions)
        positions = self.by_leaf | {alias.leaf: nothing + 1 + n for n, (_, alias) in enumerate(self.computed)}
        return getter([positions.get(leaf, nothing) for leaf in range(len(self.trained))])

    # -- Rules: `{where: value}`

    def first_entries(
        self, wheres: Sequence[Where], among: _Some = None, *, asked: _Some = None, may_be_empty: bool = False
    ) -> dict[int, int]:
        """Returns, for each leaf that any entry selects, the number of the entry that gives its value.

        A tied parameter gets the value for its source. An entry that selects nothing, or only leaves that earlier
        entries selected, is an error, except for a final `**`, the default.

        Args:
            wheres: of the entries, in order.
            among: the leaves that an entry may select; `None`: the parameters.
            asked: the leaves for which an entry must have an effect, if it selects any of them; `None`: the trained
                ones. An entry that selects only others has no effect.
            may_be_empty: whether an entry may select nothing, as in a tree of which only a part is shown.
        """
        asked = frozenset(self.positions if asked is None else asked)
        found: dict[int, int] = {}
        for number, where in enumerate(wheres):
            selected = select(self.structure, where, self.follows, among=among, may_be_empty=may_be_empty)
            its = selected.difference(self.sources)
            if selected and not its:  # only aliases, for which their source decides
                alias, source = (repr(self.structure.paths[i]) for i in (min(selected), self.sources[min(selected)]))
                are_one = f"{name_of(where)} names {alias}, but {source} and {alias} are one array"
                raise ValueError(f"{are_one}. Either make {alias} a separate array (tp.untie), or write {source}")
            left = its.difference(found)
            if not left and its & asked and (number < len(wheres) - 1 or where != "**"):
                earlier = dict.fromkeys(found[leaf] for leaf in sorted(its & asked))
                names = ", ".join(name_of(wheres[each]) for each in earlier)
                raise ValueError(f"{name_of(where)} comes too late: {names} before it selects the same parameters")
            found |= dict.fromkeys(left, number)
        return found

    # -- Other trees - gradients, averages, partial trees, other types - matched by path

    def per_slot(self, tree: PyTree, tied: Tied, *, exact_shapes: bool = False) -> list[Any]:
        """Looks up the entry of another tree for each slot; `None` if the tree has none."""
        if tied not in ("sum", "first", None):
            raise ValueError(f'tied must be "sum" (gradients), "first" (values) or None, got {tied!r}')
        leaves, treedef = flatten(tree)
        # Three ways, the quickest first: a canonical tree, a tree of the model's structure, any other, by path.
        if same_treedef(treedef, self.canonical_treedef):
            with contextlib.suppress(AttributeError):  # not all are arrays; in a few calls that run in C
                if exact_shapes and list(map(_shape, leaves)) == self.shapes and _float0 not in map(_dtype, leaves):
                    return leaves
            pairs = zip(self.positions, leaves, strict=True)
        elif same_treedef(treedef, self.structure.treedef):
            pairs = enumerate(leaves)
        else:
            pairs = self._entries_by_path(tree)
        pairs = [pair for pair in pairs if pair[0] in self.by_leaf]  # entries at frozen leaves are ignored
        found = {leaf: value for leaf, value in pairs if getattr(value, "dtype", None) != _float0}
        if exact_shapes:
            for leaf, value in found.items():
                self._check_shape(leaf, value)
        if not self.aliases:
            return [found.get(position) for position in self.positions]
        return [self._one(found, position, tied) for position in self.positions]

    def read(self, tree: PyTree, *, exact_shapes: bool = False) -> list[Any]:
        """Returns the values of the slots in a tree that must have all of them, such as a model of another type."""
        values = list(map(value_of, self.per_slot(tree, "first", exact_shapes=exact_shapes)))
        pairs = list(zip(self.slots, values, strict=True))
        missing = [slot.path for slot, value in pairs if value is None]
        if missing:
            expected = f"expected an array for each of the {len(values)} trained parameters"
            raise ValueError(f"{expected}, found none for {quoted(missing)}")
        for slot, value in pairs if exact_shapes else ():
            if jnp.iscomplexobj(value) and not is_complex(slot.dtype):
                raise TypeError(f"expected a real {slot.dtype} at {slot.path!r}, got {describe(value)}")
        return values

    def gradients(
        self, grads: PyTree, missing: str | None, dtype: DTypeLike | None = None, wide: bool = False, tied: Tied = "sum"
    ) -> list[Any]:
        """Returns the projected gradient of each slot, real if the slot is.

        With `tied="first"` it returns a tangent, a value, which must be real if the slot is. Each has the dtype of its
        slot, or the given one. With `wide`, for a step, a gradient in another dtype keeps at least single precision,
        and integers are an error.
        """
        found = self.per_slot(grads, tied, exact_shapes=True)
        with contextlib.suppress(AttributeError):  # the usual case: arrays of JAX, all as they should be
            if dtype is None and list(map(_dtype, found)) == self.dtypes and not any(map(_weak_type, found)):
                return found
        for i, (value, own) in enumerate(zip(found, self.dtypes, strict=True)):
            to = own if dtype is None else dtype
            if value is None:
                found[i] = jnp.zeros(self.shapes[i], to) if missing else None
            elif not (isinstance(value, jax.Array) and value.dtype == own == to and not value.weak_type):
                array, path = jnp.asarray(value), self.slots[i].path
                if wide and not is_inexact(array.dtype):
                    cast = "if it is a gradient, write gradient.astype(float)"
                    raise TypeError(f"expected a floating gradient at {path!r}, got {describe(value)}; {cast}")
                if jnp.iscomplexobj(array) and not (is_complex(own) and is_complex(to)):
                    if tied == "first":
                        raise TypeError(f"expected a real tangent at {path!r}, got {describe(value)}")
                    array = array.real
                found[i] = array.astype(widened(to) if wide and array.dtype != to else to)
        return found

    def _check_shape(self, leaf: int, value: Any) -> None:
        """Checks that a value has the shape of its leaf."""
        spec, path = self.structure.spec(leaf), self.structure.paths[leaf]
        if not isinstance(value, (bool, int, float, complex)) and not hasattr(value, "shape"):
            raise TypeError(f"expected an array at {path!r}, got {describe(value)}")
        if jnp.shape(value) != spec.shape:
            got = describe(value) if hasattr(value, "dtype") else f"{describe(value)} of shape {jnp.shape(value)}"
            raise ValueError(f"expected {describe(spec)} at {path!r}, got {got}")

    def _entries_by_path(self, tree: PyTree) -> list[tuple[int, Any]]:
        leaves, _, structure = structure_of(tree)
        model, paths = self.structure, structure.paths
        expected = "expected a tree with arrays at paths of the model, got"
        if leaves and not structure.nodes and model.nodes:
            raise ValueError(f"{expected} {describe(leaves[0])}; a vector becomes a model by restructure(vector)")
        if any(path not in model.index for path in paths) and all(len(entries) == 1 for entries in structure.entries):
            # A dictionary with whole paths as its keys, as of `tp.trainables`: one with dots in it stands in quotes.
            whole = tuple(map(unquote, paths))
            paths = whole if all(path in model.index for path in whole) else paths
        unknown = [path for path in paths if path not in model.index]
        if unknown and type(tree) is tuple and model.nodes and model.nodes[0].cls is not tuple:
            results = f"a tuple of {len(tree)}: if these are all results of one call, pass only the one that you mean"
            raise ValueError(f"{expected} {results}")
        if unknown:
            has = "a node" if any(node.path == unknown[0] for node in model.nodes) else "no leaf"
            # Functions are in a model, and not in what is made of one.
            is_model = set(model.paths) <= set(paths) and any(callable(leaves[paths.index(path)]) for path in unknown)
            remedy = "; the model comes first, then the other tree" if is_model else nearest(unknown[0], model.paths)
            raise ValueError(f"the tree has an entry at {unknown[0]!r}, where the model has {has}{remedy}")
        return [(model.index[path], value) for path, value in zip(paths, leaves, strict=True)]

    def _one(self, found: dict[int, Any], position: int, tied: Tied) -> Any:
        """Returns one value from the entries at the paths of a tie."""
        its = (Alias(position, position, ()), *self.aliases.get(position, ()))
        entries = [(alias, found[alias.leaf]) for alias in its if alias.leaf in found]
        if not entries:
            return None
        # A value at a computed alias alone gives none at the source, since a transform need not be invertible; a
        # gradient there can be pulled back.
        only_computed = bool(entries[0][0].transforms)
        paths, source = self.structure.paths, self.structure.spec(position)
        if only_computed and tied == "first":
            alias, name = paths[entries[0][0].leaf], paths[position]
            what = f"the tree has a value only at {alias!r}, which is computed from {name!r}"
            raise ValueError(f"{what}; put it at {name!r}")
        if tied is None and (len(entries) > 1 or only_computed):
            what = f"the tree has entries at {[paths[alias.leaf] for alias, _ in entries]}, which are one parameter"
            how = 'tied="sum" adds them (right for gradients), tied="first" takes the first (right for values)'
            raise ValueError(f'{what}. Say how to read them: {how}; for several trees write tied=("sum", "first")')
        if tied != "sum" or (len(entries) == 1 and not only_computed):
            return entries[0][1]
        for alias, value in entries:
            if alias.transforms:
                self._check_shape(alias.leaf, value)
        values = [alias.pull_back(value, source) for alias, value in entries]
        dtype = common_dtype(jnp.result_type(value) for value in values)
        return functools.reduce(operator.add, [jnp.asarray(value, dtype) for value in values])

    # -- What cannot train

    def refuse_refs(self) -> None:
        """Raises a `ValueError` if a ref is among the trained parameters."""
        refs = [self.structure.paths[i] for i in sorted(self.structure.refs) if self.trained[i]]
        if refs:
            got = f"expected arrays to train, got a ref, which is an array that can be written, at {quoted(refs)}"
            train = "put ref[...] or jax.freeze(ref) into the model, and make a new ref of the result"
            leave = f"pass freeze={refs[0]!r} to tp.layout, declare it frozen, or pass a `where` without it"
            raise ValueError(f"{got}. To train its value, {train}. To leave it out, {leave}")

    def warn_of_floats(self) -> None:
        """Warns, once per kind, of numbers beside parameters in plain containers, which no class can declare."""
        structure = self.structure
        numbers = [] if structure.is_traced else _numbers(structure)
        if not numbers:
            return
        frozen, parameters = declared_frozen(structure), frozenset(structure.parameters)
        plain = [node for node in structure.nodes if node.cls in (dict, list, tuple)]
        beside = {node.entries for node in plain if not parameters.isdisjoint(range(node.start, node.stop))}
        paths = [structure.paths[i] for i in numbers if i not in frozen and structure.entries[i][:-1] in beside]
        if paths:
            what = f"{quoted(paths)}: a Python number is not a parameter and does not train. To train it, {AS_ARRAY}"
            constant = "If it is a constant, hold it in a static field, or outside the model"
            warn(f"{what}. {constant}", about=("floats", *structure.kinds[:1]))

    def warn_of_nothing(self) -> None:
        """Warns that nothing is trained, and says why."""
        paths = self.structure.paths
        frozen = [paths[i] for i in self.structure.parameters]
        numbers = quoted([paths[i] for i in _numbers(self.structure)])
        why = f"all parameters are frozen ({quoted(frozen, 5)}); thaw them with tp.layout(model, thaw=...)"
        if not frozen:
            also = f", and {numbers}: numbers are not parameters; {AS_ARRAY}" if numbers else ""
            why = f"the model has no floating or complex arrays{also}"
        warn(f"nothing is trained: {why}")

    # -- In words

    def summary(
        self, places: Mapping[str, str] | None = None, depth: int | None = None, notes: Mapping[str, str] | None = None
    ) -> "Summary":
        """Returns the table of a model's arrays.

        Args:
            places: of the parameters in a form.
            depth: how many entries of a path are shown; all deeper arrays below one node share a row.
            notes: further lines below the table.
        """
        structure, rows = self.structure, list[_Row]()
        for i, (path, spec) in enumerate(zip(structure.paths, structure.specs, strict=True)):
            if spec is not None and (i not in self.sources if spec.parameter else structure.first[i] == i):
                sizes = 1, math.prod(spec.shape), math.prod(spec.shape) * spec.dtype.itemsize
                is_trained = i in self.by_leaf and i not in structure.refs
                role = "trained" if is_trained else "frozen" if spec.parameter else "other"
                place, tied_to = (places or {}).get(path, ""), self.tied_to.get(path, "")
                rows.append(_Row(path, spec.shape, str(spec.dtype), *sizes, role, place, tied_to))
        shown = rows
        if depth is not None:
            groups = itertools.groupby(rows, lambda row: join_path(split_path(row.path)[:depth]))
            shown = [_joined(path, list(members)) for path, members in groups]
        narrow, numbers = [self.slots[slot] for slot in self.narrow_slots], frozenset(_numbers(structure))
        count, dtypes = sum(slot.size for slot in narrow), dict.fromkeys(str(slot.dtype) for slot in narrow)
        words = f"in {first_few(list(dtypes))}, where small steps round to zero; optim.master and tp.Ema keep float32"
        # Numbers come first, since they may be mistaken for parameters.
        others = sorted([i for i, kind in enumerate(structure.values) if kind], key=lambda i: i not in numbers)
        no_arrays = first_few([f"{structure.paths[i] or repr('')} ({structure.values[i]})" for i in others])
        own = {"narrow": f"{count:,} trained {words}" if narrow else "", "no arrays": no_arrays}
        return Summary(rows, shown, own | dict(notes or {}))


# -- In words ----------------------------------------------------------------------------------------------------------


_HEADER = ("path", "shape", "dtype", "elements", "bytes", "role", "place", "tied to")
_NUMBERS = (3, 4)  # columns that are aligned to the right
_OPTIONAL = (6, 7)  # columns that are left out where there is nothing in them
_ROLES = ("trained", "frozen", "other")


class _Row(NamedTuple):
    """One array of a model (a tied parameter once); or several arrays in one row, those below a node or of one role."""

    path: str
    shape: tuple[int, ...] | None  # none of several arrays
    dtype: str
    arrays: int
    elements: int
    nbytes: int
    role: str  # "trained", "frozen", or "other" of arrays that are no parameters
    place: str  # in the form that a `Restructure` is of
    tied_to: str

    def cells(self) -> list[str]:
        """Returns the row as text, in the order of the header."""
        shape = f"{self.arrays} arrays" if self.shape is None else ",".join(map(str, self.shape)) or "()"
        sizes = f"{self.elements:,}", in_bytes(self.nbytes)
        return [self.path or '""', shape, self.dtype, *sizes, self.role, self.place, self.tied_to]


class Summary(Printed):
    """A table of a model's arrays, made by `tp.summary`. It prints as text, and as a table in a notebook.

    Attributes:
        rows: one row per array (a tied parameter once), in tree order.
        totals: one row per role, `"trained"`, `"frozen"` and `"other"`, with `.arrays`, `.elements` and `.nbytes`.
    """

    def __init__(self, rows: Sequence[_Row], shown: Sequence[_Row], notes: Mapping[str, str]) -> None:
        """Used by this library; write `tp.summary(model)`."""
        self.rows = tuple(rows)
        self.totals = {role: _joined(role, [row for row in rows if row.role == role]) for role in _ROLES}
        # A role that no array has is worth no column and no line. But if nothing is trained, that is worth one.
        cells = [_HEADER, *(row.cells() for row in shown)]
        empty = [i for i in _OPTIONAL if not any(row[i] for row in cells[1:])]
        header, *lines = [[cell for i, cell in enumerate(row) if i not in empty] for row in cells]
        below = []
        for role, total in self.totals.items():
            if total.arrays or role == "trained":
                counts = ((total.elements, "element"), (total.arrays, "array"))
                words = " in ".join(f"{count:,} {noun}{'s' if count != 1 else ''}" for count, noun in counts)
                below.append([role, f"{words}, {in_bytes(total.nbytes)}"])
        below += [[word, text] for word, text in notes.items() if text]
        self.blocks: list[Table | str] = [Table(header, lines, right=_NUMBERS), "", Table(below[0], below[1:])]

    __repr__ = Printed.__str__

    def _blocks(self) -> list[Table | str]:
        return self.blocks


Summary.__module__ = "treeparams.types"


def _joined(path: str, rows: Sequence[_Row]) -> _Row:
    """Joins several rows into one; a single row is returned as it is."""
    if len(rows) == 1:
        return rows[0]
    roles = [row.role for row in rows]
    role = roles[0] if len(set(roles)) == 1 else f"{roles.count('trained')} of {len(rows)} trained"
    dtypes = dict.fromkeys(row.dtype for row in rows)
    sizes = sum(row.arrays for row in rows), sum(row.elements for row in rows), sum(row.nbytes for row in rows)
    ties = first_few([row.tied_to for row in rows if row.tied_to])
    return _Row(path, None, ", ".join(dtypes), *sizes, role, "", ties)


_FLOATS = ("float", "complex", "float16", "float32", "float64", "longdouble", "complex64", "complex128")


def _numbers(structure: Structure) -> list[int]:
    """Returns the leaves that are floating or complex numbers of Python or NumPy."""
    return [i for i, kind in enumerate(structure.values) if kind in _FLOATS]
