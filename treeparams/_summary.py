"""summary: what a model holds, what of it trains, how large it is, and what is tied to what."""

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import PyTree

from ._index import Index
from ._layout import Layout, Trainable
from ._paths import join_path
from ._recognise import structure_of
from ._resolve import look_up
from ._structure import Structure
from ._text import count_of, first_few, in_columns, without_middle
from ._where import select

_HEADER = ("path", "shape", "dtype", "elements", "bytes", "role", "tied to", "group")
_NUMBERS, _ROLE = (3, 4), 5  # columns; those of numbers are aligned to the right
_COLOURS = {"trained": "green", "frozen": "blue"}


class Row(NamedTuple):
    """One array of a model, ties once; or, below the depth asked for, the arrays of one node."""

    path: str
    shape: tuple[int, ...] | None  # none of several arrays
    dtype: str
    arrays: int
    elements: int
    nbytes: int
    role: str  # "trained", "frozen", or "other" for what is no parameter
    tied_to: str
    group: str

    def cells(self) -> list[str]:
        """The row as text, in the order of the header."""
        shape = f"{self.arrays} arrays" if self.shape is None else ",".join(map(str, self.shape)) or "()"
        sizes = [f"{self.elements:,}", in_bytes(self.nbytes)]
        return [self.path or '""', shape, self.dtype, *sizes, self.role, self.tied_to, self.group]


class Total(NamedTuple):
    """Counts of arrays, elements and bytes, ties once."""

    arrays: int
    elements: int
    nbytes: int

    def __str__(self) -> str:
        """In words."""
        arrays = "1 array" if self.arrays == 1 else f"{self.arrays:,} arrays"
        elements = "1 element" if self.elements == 1 else f"{self.elements:,} elements"
        return f"{elements} in {arrays}, {in_bytes(self.nbytes)}"


class Summary:
    """A table of a model's arrays: plain text, in colours by `rich.print`, HTML in a notebook.

    Made by `tp.summary`.

    Attributes:
        rows: one per array, ties once, in tree order.
        totals: `{role: Total}`, with `.arrays`, `.elements` and `.nbytes`, of the roles `"trained"`, `"frozen"` and
            `"other"`; then of each group, as `"group NAME"`.
    """

    def __init__(self, rows: Sequence[Row], shown: Sequence[Row], values: Sequence[str]) -> None:
        """For this library's own use; users write `tp.summary(model)`."""
        self.rows = tuple(rows)
        self.totals = {role: _total(row for row in rows if row.role == role) for role in ("trained", "frozen", "other")}
        for group in dict.fromkeys(row.group for row in rows if row.group):
            self.totals[f"group {group}"] = _total(row for row in rows if row.group == group)
        cells = [row.cells() for row in shown]
        self._columns = [i for i in range(len(_HEADER)) if i <= _ROLE or any(row[i] for row in cells)]
        self._shown = [[row[i] for i in self._columns] for row in cells]
        self._values = first_few(values)

    def _header(self) -> list[str]:
        return [_HEADER[i] for i in self._columns]

    def _below(self) -> list[list[str]]:
        # What the model has none of is not worth a line, unless nothing is trained: that is.
        lines = [[name, str(total)] for name, total in self.totals.items() if total.arrays or name == "trained"]
        return [*lines, ["no arrays", self._values]] if self._values else lines

    def __repr__(self) -> str:
        table = in_columns(self._header(), self._shown, right=_NUMBERS)
        first, *below = self._below()
        return "\n".join([*table, "", *in_columns(first, below)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def __rich__(self) -> Any:
        # Only Rich calls this, so it is installed.
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table, below = Table(), Table.grid(padding=(0, 2))
        for i, name in enumerate(self._header()):
            table.add_column(name, justify="right" if i in _NUMBERS else "left", overflow="fold")
        for row in without_middle(self._shown, len(self._columns)):
            table.add_row(*map(Text, row), style=_COLOURS.get(row[_ROLE]))
        for name, text in self._below():
            below.add_row(Text(name, style=_COLOURS.get(name, "")), Text(text))
        return Group(table, below)


def summary(
    model: PyTree, trainable: Trainable = None, *, depth: int | None = None, groups: Mapping[Any, str] | None = None
) -> Summary:
    """Lists what trains in a model, how large it is, what is tied to what, and which group it belongs to.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> embed = jnp.ones((10, 4))
    >>> model = {"embed": embed, "norm": {"mean": jnp.zeros(4)}, "head": embed, "steps": jnp.array(0), "act": jnp.tanh}
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

    A model too large to make is described as well, since only shapes are looked at. `depth` puts what lies deeper into
    one row per node:

    >>> make = lambda key: eqx.nn.MLP(512, 512, 8192, depth=8, key=key)
    >>> tp.summary(eqx.filter_eval_shape(make, jax.random.key(0)), "layers.8", depth=2)  # doctest: +ELLIPSIS
    path      shape     dtype      elements     bytes  role
    layers.0  2 arrays  float32   4,202,496   16.8 MB  frozen
    layers.1  2 arrays  float32  67,117,056  268.5 MB  frozen
    ...
    layers.8  2 arrays  float32   4,194,816   16.8 MB  trained
    <BLANKLINE>
    trained    4,194,816 elements in 2 arrays, 16.8 MB
    frozen     474,021,888 elements in 16 arrays, 1.9 GB
    no arrays  activation (function), final_activation (function)

    The groups of an optimiser are those of its report: `tp.summary(model, groups=optim.report(tx, model).groups)`.
    With Rich (`pip install 'treeparams[rich]'`), `rich.print(tp.summary(model))` shows the table in colours.

    Args:
        model: any pytree; its leaves may be `jax.ShapeDtypeStruct`s.
        trainable: as for `tp.layout`; what comes of it stands under "role". "other" are the arrays that are no
            parameters: ints, bools, keys.
        depth: how many entries of a path are shown; several arrays that lie deeper below one node are one row. `None`:
            every array.
        groups: `{where: name}`, the first that matches counts; trained parameters only.

    Returns:
        A `Summary`. It prints as a table; totals count ties once. 1 kB is 1000 B.

    Raises:
        ValueError: `depth` is no count; a group selects nothing; as `tp.layout`.
        TypeError: `model` is a `Layout`; a group's name is no text; as `tp.layout`.
    """
    if isinstance(model, Layout):
        raise TypeError("a summary is of a model, got a Layout; write tp.summary(model, layout), or print the layout")
    leaves, _, structure = structure_of(model)
    _, index = look_up(structure, trainable, leaves)
    parameters = set(structure.parameters)
    others = [i for i, spec in enumerate(structure.specs) if spec and structure.first[i] == i and i not in parameters]
    names, arrays = _groups(index, groups or {}), sorted([*index.distinct, *others])
    tied = index.tied_to | _same(structure, others)
    rows = [_row(index, i, tied, names.get(i, "")) for i in arrays]
    shown = rows if depth is None else _folded([structure.entries[i] for i in arrays], rows, depth)
    without = [i for i, spec in enumerate(structure.specs) if spec is None]
    values = [f"{structure.paths[i] or repr('')} ({_kind(leaves[i])})" for i in without]
    return Summary(rows, shown, values)


def in_bytes(count: int) -> str:
    """A number of bytes, to four digits at most.

    >>> in_bytes(999), in_bytes(1000), in_bytes(999_950), in_bytes(90_853_376)
    ('999 B', '1.0 kB', '1.0 MB', '90.9 MB')
    """
    if count < 1000:
        return f"{count} B"
    scaled, units = count / 1000, list("kMGTP")
    while scaled >= 999.95 and len(units) > 1:
        scaled, units = scaled / 1000, units[1:]
    return f"{scaled:,.1f} {units[0]}B"


def _row(index: Index, leaf: int, tied: Mapping[str, str], group: str) -> Row:
    path, spec = index.structure.paths[leaf], index.structure.spec(leaf)
    size = math.prod(spec.shape)
    role = "trained" if leaf in index.by_leaf else "frozen" if spec.parameter else "other"
    return Row(path, spec.shape, str(spec.dtype), 1, size, size * spec.dtype.itemsize, role, tied.get(path, ""), group)


def _same(structure: Structure, others: Sequence[int]) -> dict[str, str]:
    """The further places of arrays that have no ties, as they are no parameters, but stand in several all the same."""
    places: dict[int, list[str]] = {i: [] for i in others}
    for i, first in enumerate(structure.first):
        if first in places and i != first:
            places[first].append(structure.paths[i])
    return {structure.paths[i]: ", ".join(paths) for i, paths in places.items()}


def _kind(leaf: Any) -> str:
    return "function" if callable(leaf) else type(leaf).__name__


def _groups(index: Index, groups: Mapping[Any, str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for where, name in groups.items():
        if not isinstance(name, str):
            raise TypeError(f"groups is a dictionary from a `where` to a name, got {name!r} for {where!r}")
        for leaf in select(index.structure, where):
            source = index.sources.get(leaf, leaf)
            if source in index.by_leaf:
                found.setdefault(source, name)
    return found


def _folded(entries: Sequence[Sequence[str]], rows: Sequence[Row], depth: int) -> list[Row]:
    count_of("depth", depth, "entries")
    heads = [join_path(each[:depth]) for each in entries]
    pairs = itertools.groupby(zip(heads, rows, strict=True), key=lambda pair: pair[0])
    return [_fold(head, [row for _, row in members]) for head, members in pairs]


def _fold(path: str, rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    dtypes, roles, ties, groups = (
        list(dict.fromkeys(each for each in column if each))
        for column in zip(*((row.dtype, row.role, row.tied_to, row.group) for row in rows), strict=True)
    )
    trained = sum(row.role == "trained" for row in rows)
    role = roles[0] if len(roles) == 1 else f"{trained} of {len(rows)} trained"
    total = _total(rows)
    return Row(path, None, ", ".join(dtypes), *total, role, first_few(ties), first_few(groups))


def _total(rows: Iterable[Row]) -> Total:
    rows = list(rows)
    return Total(*(sum(getattr(row, name) for row in rows) for name in Total._fields))


Summary.__module__ = "treeparams"
