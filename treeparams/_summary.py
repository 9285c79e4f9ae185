"""summary: lists the arrays of a model, which of them train, their sizes and their ties."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.tree_util as jtu

from ._forms.restructure import Restructure, known_leaves
from ._slots.index import Index, no_arrays
from ._slots.layout import Layout, Trainable, check_is_model, look_up
from ._tree.paths import join_path, split_path
from ._tree.recognise import structure_of
from ._tree.text import Table, as_html, as_text, count_of, first_few, in_bytes
from ._tree.types import PyTree

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


class Summary:
    """A table of a model's arrays, made by `tp.summary`. It prints as text, and as a table in a notebook.

    Attributes:
        rows: one row per array (a tied parameter once), in tree order.
        totals: one row per role, `"trained"`, `"frozen"` and `"other"`, with `.arrays`, `.elements` and `.nbytes`.
    """

    def __init__(self, rows: Sequence[_Row], shown: Sequence[_Row], notes: Mapping[str, str]) -> None:
        """Used by this library; write `tp.summary(model)`."""
        self.rows = tuple(rows)
        self.totals = {role: _joined_rows(role, [row for row in rows if row.role == role]) for role in _ROLES}
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
        self._blocks = [Table(header, lines, right=_NUMBERS), "", Table(below[0], below[1:])]

    def __repr__(self) -> str:
        return as_text(self._blocks)

    def _repr_html_(self) -> str:
        return as_html(self._blocks)


def summary(model: PyTree, trainable: Trainable = None, *, depth: int | None = None) -> Summary:
    """Lists the arrays of a model: which of them train, their sizes and their ties.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> embed = jnp.arange(40.0).reshape(10, 4)
    >>> model = {
    ...     "embed": embed,
    ...     "norm": {"mean": jnp.zeros(4)},
    ...     "head": embed,
    ...     "steps": jnp.array(0),
    ...     "act": jnp.tanh,
    ... }
    >>> tp.summary(model, tp.layout(model, freeze="norm"))
    path       shape  dtype    elements  bytes  role     tied to
    embed      10,4   float32        40  160 B  trained  head
    norm.mean  4      float32         4   16 B  frozen
    steps      ()     int32           1    4 B  other
    <BLANKLINE>
    trained    40 elements in 1 array, 160 B
    frozen     4 elements in 1 array, 16 B
    other      1 element in 1 array, 4 B
    no arrays  act (function)

    You can pass the shapes of a model that is too large to make. `depth=1` gives one row for each of its entries:

    >>> make = lambda key: eqx.nn.MLP(512, 512, 8192, depth=8, key=key)
    >>> tp.summary(eqx.filter_eval_shape(make, jax.random.key(0)), "layers.8", depth=1)
    path    shape      dtype       elements   bytes  role
    layers  18 arrays  float32  478,216,704  1.9 GB  2 of 18 trained
    <BLANKLINE>
    trained    4,194,816 elements in 2 arrays, 16.8 MB
    frozen     474,021,888 elements in 16 arrays, 1.9 GB
    no arrays  activation (function), final_activation (function)

    The line "narrow" counts trained parameters with less than single precision:

    >>> tp.summary({"w": jnp.ones(3, jnp.bfloat16)})
    path  shape  dtype     elements  bytes  role
    w     3      bfloat16         3    6 B  trained
    <BLANKLINE>
    trained  3 elements in 1 array, 6 B
    narrow   3 trained in bfloat16, where small steps round to zero; optim.master and tp.Ema keep float32

    For a `Restructure` you see where each parameter is stored: in which stack and row, or at which elements of the
    vector.

    >>> tp.summary(tp.stack({"w": jnp.ones((2, 3)), "v": jnp.ones((2, 3))})[1])
    path  shape  dtype    elements  bytes  role     place
    v     2,3    float32         6   24 B  trained  float32[2,3] 0
    w     2,3    float32         6   24 B  trained  float32[2,3] 1
    <BLANKLINE>
    trained  12 elements in 2 arrays, 48 B

    To see which group of an optimiser each parameter is in, use `optim.report`. For a state of `optim.trainable`, the
    line "stuck" names narrow parameters that steps leave as they were.

    Args:
        model: any pytree, also with `jax.ShapeDtypeStruct`s as leaves; or a `Restructure`.
        trainable: the parameters to train, as for `tp.layout`; leave it out for a `Restructure`. The column "role"
            shows the result; "other" means arrays that are not parameters: ints, bools, keys.
        depth: how many entries of a path are shown; all deeper arrays below one node share a row. `None` shows every
            array.

    Returns:
        A `Summary`, which prints as a table; its totals count a tied parameter once. 1 kB is 1000 B.

    Raises:
        ValueError: `depth` is not a positive integer; see also `tp.layout`.
        TypeError: `model` is a `Layout`; you passed `trainable` with a `Restructure`; see also `tp.layout`.
    """
    if isinstance(model, Layout):
        raise TypeError("expected a model, got a Layout; write tp.summary(model, layout), or print the layout")
    if isinstance(model, Restructure):
        if trainable is not None:
            raise TypeError("a Restructure already fixes which parameters train; leave `trainable` out")
        index, _, places = known_leaves(model)
    else:
        leaves, _, structure = structure_of(model)
        check_is_model(leaves, structure)
        index, places = look_up(structure, trainable, leaves)[1], {}
    structure, rows = index.structure, []
    for i, (path, spec) in enumerate(zip(structure.paths, structure.specs, strict=True)):
        if spec is not None and (i not in index.sources if spec.parameter else structure.first[i] == i):
            sizes = 1, math.prod(spec.shape), math.prod(spec.shape) * spec.dtype.itemsize
            is_trained = i in index.by_leaf and i not in structure.refs
            role = "trained" if is_trained else "frozen" if spec.parameter else "other"
            rows.append(
                _Row(path, spec.shape, str(spec.dtype), *sizes, role, places.get(path, ""), index.tied_to.get(path, ""))
            )
    shown = rows
    if depth is not None:
        count_of("depth", depth, "entries")
        shown = [
            _joined_rows(path, list(members))
            for path, members in itertools.groupby(rows, lambda row: join_path(split_path(row.path)[:depth]))
        ]
    notes = {"narrow": _of_narrow(index, rows), "no arrays": no_arrays(structure)}
    has_more = lambda node: hasattr(type(node), "summary_notes")  # as a state of an optimiser has
    for node in filter(has_more, jtu.tree_leaves(model, is_leaf=has_more)):
        notes |= node.summary_notes()
    return Summary(rows, shown, notes)


def _of_narrow(index: Index, rows: Sequence[_Row]) -> str:
    """Describes the trained parameters with less than single precision, if there are any."""
    paths = {index.slots[slot].path for slot in index.narrow_slots}
    own = [row for row in rows if row.path in paths]
    if not own:
        return ""
    dtypes = first_few(list(dict.fromkeys(row.dtype for row in own)))
    return (
        f"{sum(row.elements for row in own):,} trained in {dtypes}, where small steps round to zero; optim.master and "
        "tp.Ema keep float32"
    )


def _joined_rows(path: str, rows: Sequence[_Row]) -> _Row:
    """Joins several rows into one; a single row is returned as it is."""
    if len(rows) == 1:
        return rows[0]
    roles = [row.role for row in rows]
    role = roles[0] if len(set(roles)) == 1 else f"{roles.count('trained')} of {len(rows)} trained"
    dtypes = dict.fromkeys(row.dtype for row in rows)
    arrays, elements = sum(row.arrays for row in rows), sum(row.elements for row in rows)
    nbytes = sum(row.nbytes for row in rows)
    ties = first_few([row.tied_to for row in rows if row.tied_to])
    return _Row(path, None, ", ".join(dtypes), arrays, elements, nbytes, role, "", ties)


Summary.__module__ = "treeparams.types"
