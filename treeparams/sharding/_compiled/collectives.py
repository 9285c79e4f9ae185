"""How much a compiled program moves between devices, read from its text."""

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
    """Collectives of one kind and size: for how many bytes each counts, and how often one run has them."""

    kind: str
    bytes: int
    times: int | None  # none within a loop that runs until some value is reached
    axes: tuple[str, ...] | None = None  # of the mesh, between whose devices they move; none without a mesh

    @property
    def total(self) -> int | None:
        """Bytes per run."""
        return total([(self.times, self.bytes)])


@dataclasses.dataclass(frozen=True, repr=False)
class Collectives:
    """How much one run of a compiled program moves between devices; made by `sharding.collectives`. Prints as a table.

    Attributes:
        rows: one per kind, size and axes, with `.kind`, `.bytes` of each, `.times` per run, `.total`, and `.axes` if a
            mesh was given; the largest first.
        notes: the questions that the counts leave open.
    """

    rows: tuple[Collective, ...]
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int | None:
        """Bytes per run; `None` if there is a loop whose number of rounds is not known."""
        return total((1, row.total) for row in self.rows)

    @property
    def over(self) -> Mapping[tuple[str, ...], int | None]:
        """Bytes per run between the devices along each axis of the mesh, or along several together; the most first.

        Raises:
            ValueError: no mesh was given.
        """
        found: dict[tuple[str, ...], int | None] = {}
        for row in self.rows:
            if row.axes is None:
                raise ValueError("which axes it is depends on the mesh: sharding.collectives(compiled, mesh=mesh)")
            found[row.axes] = total([(found.get(row.axes, 0), 1), (row.total, 1)])
        return dict(sorted(found.items(), key=lambda item: (item[1] is not None, -(item[1] or 0))))

    def count(self, kind: str | None = None) -> int | None:
        """How many there are per run, of one kind or in all; `None` if some are within a loop of unknown length.

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
        """The table and the lines below it."""
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
    """Counts the bytes that one run of a compiled program moves between devices, each way.

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

    The bytes are those of one device: of an all-gather its result, of a reduce-scatter its operand, of an all-reduce,
    which is both in one, twice its operand, of all others their operand; times the rounds of all loops around it. The
    compiler's own program is counted: on CPU it widens narrow floats, say, and a collective among groups of one
    device, which moves nothing, is left out.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`; arguments may be `jax.ShapeDtypeStruct`s. Or the text
            of such a program, `compiled.as_text()`.
        ignore: a collective that counts for at most this many bytes is left out: the loss, a norm.
        mesh: the mesh of the program: `axes` of each row then says between devices along which of its axes is moved.

    Returns:
        `Collectives`, which print as a table. A loop that runs until some value is reached has no count:
        `None`, printed as "unknown". Of a conditional, the branch that moves most is counted.

    Raises:
        TypeError: `compiled` is no compiled program.
        ValueError: the text is not that of a compiled program; `ignore` is no number of bytes.
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
    """The collective that an operation is, if it is one."""
    kind = collective_of(name, operation, beside)
    if kind is None or moves_nothing(operation.attributes):
        return {}
    size = _counted(kind, operation, beside)
    axes = None if mesh is None else axes_in(operation.attributes, mesh)
    return {(kind, size, axes): 1} if size > ignore else {}


def collective_of(name: str, operation: Operation, beside: Computation) -> str | None:
    """The kind of collective that an operation in a computation of this name starts; `None` if it starts none."""
    kind = operation.kind.removesuffix("-start")
    if kind not in _KINDS:
        return None
    # On TPU one that runs beside others is written in several fusions: of its start, of what is computed meanwhile and
    # of its end. It counts where it is started.
    if "chain_id=" in operation.attributes and not any(
        "AsyncCollectiveStart" in its.attributes for its in beside.values()
    ):
        return None
    # As TPU writes it: a fusion of an all-reduce and a slice of its result.
    return "reduce-scatter" if kind == "all-reduce" and name.startswith("all-reduce-scatter") else kind


def gathered_at_once(text: Text) -> int:
    """The bytes that the all-gathers of a program make, those of a loop in one of its rounds.

    Of several loops, one after another, each counts.
    """

    def made(name: str, operation: Operation, beside: Computation) -> Counts:
        kind = collective_of(name, operation, beside)
        return {"": _counted(kind, operation, beside)} if kind == "all-gather" else {}

    # The condition of a loop is evaluated once more than its body, which is of no matter here: it gathers nothing.
    return summed(text, made, _weight_of_one, lambda _: 1).counts.get("", 0) or 0


def _weight_of_one(counts: Counts) -> float:
    return sum(each or 0 for each in counts.values())


def _counted(kind: str, operation: Operation, beside: Computation) -> int:
    """For how many bytes a collective counts."""
    # The sliced permute and the ragged exchange also name where to write, and offsets.
    first = kind == "ragged-all-to-all" or "slice_sizes=" in operation.attributes
    names = operation.operands[:1] if first else operation.operands
    operand = sum(bytes_in(beside[name].result) for name in names if name in beside)
    if kind == "all-gather":
        if kind == operation.kind:
            return bytes_in(operation.result)
        # What is started has as its type operand and result in one, and counters.
        return bytes_in(re.sub(r"\b[su]32\[\]", "", operation.result)) - operand
    return 2 * operand if kind == "all-reduce" else operand


def _weight(counts: Mapping[_Key, int | None]) -> float:
    found = total((times, size) for (_, size, _), times in counts.items())
    return math.inf if found is None else float(found)
