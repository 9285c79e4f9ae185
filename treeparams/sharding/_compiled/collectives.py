"""collectives: counts the bytes that a compiled program moves between devices, from its text."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from ..._tree.tables import Table, as_html, as_text
from ..._tree.text import count_of, in_bytes
from .groups import axes_in, moves_nothing
from .hlo import Computation, Operation, Text, bytes_in
from .sums import BRANCH, UNKNOWN, Counts, summed, total

_KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Collective(NamedTuple):
    """Collectives of one kind and size: the bytes that each counts for, and how many there are in one run."""

    kind: str
    bytes: int
    times: int | None  # none within a loop that runs until some value is reached
    axes: tuple[str, ...] | None = None  # of the mesh, between whose devices they move; none without a mesh

    @property
    def total(self) -> int | None:
        """The bytes per run; `None` if `times` is not known."""
        return total([(self.times, self.bytes)])


@dataclasses.dataclass(frozen=True, repr=False)
class Collectives:
    """The bytes that one run of a program moves between devices, made by `sharding.collectives`. Prints as a table.

    Attributes:
        rows: one row for each kind, size and axes, the largest first. Each has a `.kind`, the `.bytes` of one
            collective, how many `.times` it runs, the `.total` and, if you gave a mesh, `.axes`.
        notes: sentences about counts that are uncertain.
    """

    rows: tuple[Collective, ...]
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int | None:
        """The bytes per run; `None` if the number of rounds of some loop is not known."""
        return total((1, row.total) for row in self.rows)

    @property
    def over(self) -> Mapping[tuple[str, ...], int | None]:
        """The bytes per run along each axis of the mesh, or along several axes together; the largest first.

        Raises:
            ValueError: you gave no mesh.
        """
        found: dict[tuple[str, ...], int | None] = {}
        for row in self.rows:
            if row.axes is None:
                raise ValueError("the axes depend on the mesh; pass it: sharding.collectives(compiled, mesh=mesh)")
            found[row.axes] = total([(found.get(row.axes, 0), 1), (row.total, 1)])
        return dict(sorted(found.items(), key=lambda item: (item[1] is not None, -(item[1] or 0))))

    def count(self, kind: str | None = None) -> int | None:
        """Counts the collectives of one run, of one kind or of all; `None` if some are in a loop of unknown length.

        Raises:
            ValueError: there is no such kind.
        """
        if kind not in (None, *_KINDS):
            raise ValueError(f"there is no collective {kind!r}; expected one of {', '.join(_KINDS)}")
        return total((row.times, 1) for row in self.rows if kind in (None, row.kind))

    def __repr__(self) -> str:
        return as_text(self.blocks())

    def _repr_html_(self) -> str:
        return as_html(self.blocks())

    def blocks(self) -> list[Table | str]:
        """Returns the table and the lines below it."""
        rows = [
            [row.kind, _if_known(row.times), in_bytes(row.bytes), _if_known(row.total, in_bytes)] for row in self.rows
        ]
        end = ["total", _if_known(self.count()), "", _if_known(self.bytes, in_bytes)]
        header = ["collective", "times", "bytes each", "bytes"]
        if any(row.axes is not None for row in self.rows):
            header.append("over")
            rows = [[*cells, ", ".join(row.axes or ())] for cells, row in zip(rows, self.rows, strict=True)]
            end.append("")
        table = Table(header, [*rows, [""] * len(header), end], right=(1, 2, 3))
        return [table, *self.notes] if rows else ["nothing is moved between devices"]


def _if_known(number: int | None, say: Callable[[int], str] = "{:,}".format) -> str:
    return "unknown" if number is None else say(number)


def collectives(
    compiled: jax.stages.Compiled | str, *, ignore: int = 64, mesh: Mesh | AbstractMesh | None = None
) -> Collectives:
    """Counts the bytes that one run of a compiled program moves between devices, and how.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
    >>> from treeparams import sharding
    >>> batch = NamedSharding(Mesh(jax.devices()[:4], "data"), PartitionSpec("data"))
    >>> center = lambda x, _: (x - x.mean(axis=0, keepdims=True), None)
    >>> f = jax.jit(lambda x: jax.lax.scan(center, x, length=3)[0], in_shardings=batch, out_shardings=batch)
    >>> sharding.collectives(f.lower(jax.ShapeDtypeStruct((64, 1000), jnp.float32)).compile())
    collective  times  bytes each    bytes
    all-reduce      3      8.0 kB  24.0 kB
    <BLANKLINE>
    total           3              24.0 kB

    The bytes are those of one device: for an all-gather its result, for a reduce-scatter its operand, for an
    all-reduce, which does both, twice its operand, and for any other collective its operand; each times the rounds of
    all loops around it. The count is of the program that the compiler made. On CPU, for example, the compiler widens
    narrow floats. A collective among groups of one device moves nothing and is not counted.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`, whose arguments may be `jax.ShapeDtypeStruct`s; or
            the text of such a program, `compiled.as_text()`.
        ignore: leaves out collectives that count for at most this many bytes, such as those of the loss or a norm.
        mesh: the mesh of the program. With it, `axes` of each row names the axes of the mesh that the data moves along.

    Returns:
        `Collectives`, which print as a table. Collectives in a loop whose number of rounds depends on values have no
        count: you get `None`, printed as "unknown". Of a conditional, the branch that moves most counts.

    Raises:
        TypeError: `compiled` is not a compiled program.
        ValueError: the text is not that of a compiled program, or `ignore` is not a number of bytes.
    """
    count_of("ignore", ignore, "bytes", least=0)
    text = compiled if isinstance(compiled, str) else None
    if isinstance(compiled, jax.stages.Compiled):
        text = compiled.as_text()
    elif text is None:
        remedy = ".compile()" if isinstance(compiled, jax.stages.Lowered) else ".lower(...).compile()"
        raise TypeError(f"expected a compiled program, got a {type(compiled).__name__}; write {remedy} after it")
    of_one = functools.partial(_moved_by, ignore, mesh)
    found = summed(Text.of(text or ""), of_one, _weight)
    notes = [UNKNOWN.format("moved")] * found.has_unknown + [BRANCH.format("moves")] * found.has_branches
    rows = [Collective(kind, size, times, axes) for (kind, size, axes), times in found.counts.items() if times != 0]
    rows.sort(key=lambda row: (row.times is not None, -(row.times or 1) * row.bytes))
    return Collectives(tuple(rows), tuple(notes) if rows else ())


Collectives.__module__ = "treeparams.sharding"


_Key = tuple[str, int, tuple[str, ...] | None]  # kind, bytes, axes


def _moved_by(
    ignore: int, mesh: Mesh | AbstractMesh | None, name: str, operation: Operation, beside: Computation
) -> dict[_Key, int | None]:
    """Returns the collective that an operation is, or nothing."""
    kind = collective_of(name, operation, beside)
    if kind is None or moves_nothing(operation.attributes):
        return {}
    size = _counted(kind, operation, beside)
    axes = None if mesh is None else axes_in(operation.attributes, mesh)
    return {(kind, size, axes): 1} if size > ignore else {}


def collective_of(name: str, operation: Operation, beside: Computation) -> str | None:
    """Returns the kind of collective that an operation of the computation `name` starts, or `None`."""
    kind = operation.kind.removesuffix("-start")
    if kind not in _KINDS:
        return None
    # On TPU an asynchronous collective is written as several fusions: its start, the computation meanwhile, and its
    # end. It counts once, where it starts.
    if "chain_id=" in operation.attributes and not any(
        "AsyncCollectiveStart" in its.attributes for its in beside.values()
    ):
        return None
    # As TPU writes it: a fusion of an all-reduce and a slice of its result.
    return "reduce-scatter" if kind == "all-reduce" and name.startswith("all-reduce-scatter") else kind


def gathered_at_once(text: Text) -> int:
    """Returns the bytes that the all-gathers of a program make; those in a loop count for one round.

    If several loops follow one another, each counts.
    """

    def made(name: str, operation: Operation, beside: Computation) -> Counts:
        kind = collective_of(name, operation, beside)
        return {"": _counted(kind, operation, beside)} if kind == "all-gather" else {}

    # The condition of a loop is evaluated once more than its body, which is of no matter here: it gathers nothing.
    return summed(text, made, _weight_of_one, lambda _: 1).counts.get("", 0) or 0


def _weight_of_one(counts: Counts) -> float:
    return sum(each or 0 for each in counts.values())


def _counted(kind: str, operation: Operation, beside: Computation) -> int:
    """Returns the bytes that a collective counts for."""
    # The sliced permute and the ragged exchange also name where to write, and offsets.
    first = kind == "ragged-all-to-all" or "slice_sizes=" in operation.attributes
    names = operation.operands[:1] if first else operation.operands
    operand = sum(bytes_in(beside[name].result) for name in names if name in beside)
    if kind == "all-gather":
        if kind == operation.kind:
            return bytes_in(operation.result)
        # The type of an asynchronous start contains both operand and result, and counters.
        return bytes_in(re.sub(r"\b[su]32\[\]", "", operation.result)) - operand
    return 2 * operand if kind == "all-reduce" else operand


def _weight(counts: Mapping[_Key, int | None]) -> float:
    found = total((times, size) for (_, size, _), times in counts.items())
    return math.inf if found is None else float(found)
