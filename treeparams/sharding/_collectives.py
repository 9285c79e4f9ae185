"""How much a compiled program moves between devices, read from its text.

XLA writes a compiled program as computations, each a list of operations; one operation is one line:

    %name = f32[64,32]{1,0} all-gather(%operand), replica_groups={{0,1,2,3}}, dimensions={0}

A loop, a branch or a fusion names the computations that it runs, so the bytes that one run moves are a sum over the
computations from the entry downwards, with the rounds of each loop as factors. Text is all there is: JAX has no other
public view of a compiled program, and the jaxpr is none, since XLA adds, joins, moves and removes collectives.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax

from .._tree.tables import Table, as_html, as_text
from .._tree.text import count_of, in_bytes

_KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_OPERATION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")  # f32[64,32]; of a dynamic dimension, <=64, the bound
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_LOOP = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_ALONE = re.compile(  # each device is a group of its own, or sends to itself
    r"replica_groups=(?:\{\{\d+\}(?:,\{\d+\})*\}|\[\d+,1\])|source_target_pairs=\{(?:\{(\d+),\1\},?)*\}"
)
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")  # mesh['d'=4,'alone'=1] {'alone'}: since JAX 0.12
_BRACKETS = re.compile(r"/\*.*?\*/|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}")

_UNKNOWN = "how often a loop runs depends on values, so what is moved within it has no count"
_BRANCH = "of a conditional, the branch that moves most is counted"


class Collective(NamedTuple):
    """Collectives of one kind and size: for how many bytes each counts, and how often one run has them."""

    kind: str
    bytes: int
    times: int | None  # none within a loop that runs until some value is reached

    @property
    def total(self) -> int | None:
        """Bytes per run."""
        return _total([(self.times, self.bytes)])


@dataclasses.dataclass(frozen=True, repr=False)
class Collectives:
    """How much one run of a compiled program moves between devices; made by `sharding.collectives`. Prints as a table.

    Attributes:
        rows: one per kind and size, with `.kind`, `.bytes` of each, `.times` per run and `.total`; the largest first.
        notes: the questions that the counts leave open.
    """

    rows: tuple[Collective, ...]
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int | None:
        """Bytes per run; `None` if there is a loop whose number of rounds is not known."""
        return _total((1, row.total) for row in self.rows)

    def count(self, kind: str | None = None) -> int | None:
        """How many there are per run, of one kind or in all; `None` if some are within a loop of unknown length.

        Raises:
            ValueError: there is no such kind.
        """
        if kind not in (None, *_KINDS):
            raise ValueError(f"there is no collective {kind!r}; expected one of {', '.join(_KINDS)}")
        return _total((row.times, 1) for row in self.rows if kind in (None, row.kind))

    def __repr__(self) -> str:
        return as_text(self.blocks())

    def _repr_html_(self) -> str:
        return as_html(self.blocks())

    def blocks(self) -> list[Table | str]:
        """The table and the lines below it."""
        cells = [
            (row.kind, _if_known(row.times), in_bytes(row.bytes), _if_known(row.total, in_bytes)) for row in self.rows
        ]
        total = ("total", _if_known(self.count()), "", _if_known(self.bytes, in_bytes))
        table = Table(("collective", "times", "bytes each", "bytes"), [*cells, [""] * 4, total], right=(1, 2, 3))
        return [table, *self.notes] if cells else ["nothing is moved between devices"]


def _if_known(number: int | None, say: Callable[[int], str] = "{:,}".format) -> str:
    return "unknown" if number is None else say(number)


def collectives(compiled: jax.stages.Compiled | str, *, ignore: int = 64) -> Collectives:
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
    computations, entry = _parsed(text or "")
    if entry is None:
        raise ValueError(
            "expected the text of a compiled program, as of compiled.as_text(); it has no ENTRY computation"
        )
    notes: dict[str, None] = {}

    # A computation may be called by several others, and loops stand within loops: its counts are found once, and
    # multiplied where it is called. `None` is a number that is not known, and so is all that it is multiplied with.
    @functools.cache
    def moved(name: str) -> Mapping[tuple[str, int], int | None]:
        """How often each kind and size is met in one run of a computation."""
        counts: dict[tuple[str, int], int | None] = collections.defaultdict(int)

        def add(inner: Mapping[tuple[str, int], int | None], times: int | None) -> None:
            for key, each in inner.items():
                counts[key] = _total([(counts[key], 1), (each, times)])

        for operation in computations.get(name, {}).values():
            kind = operation.kind.removesuffix("-start")
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # as TPU writes it: a fusion of an all-reduce and a slice of its result
            if kind in _KINDS:
                size = _counted(kind, operation, computations[name])
                if size > ignore and not _moves_nothing(operation.attributes):
                    add({(kind, size): 1}, 1)
            elif kind == "while":
                known = _TRIPS.search(operation.attributes)
                trips = int(known[1]) if known else None
                for role, called in _LOOP.findall(operation.attributes):
                    if trips is None and moved(called):
                        notes[_UNKNOWN] = None
                    # The condition is evaluated once more than the body: it ends the loop.
                    add(moved(called), trips if trips is None or role == "body" else trips + 1)
            elif kind == "conditional":
                branches = [moved(called) for called in _names(_BRANCHES, operation.attributes)]
                notes.update({_BRANCH: None} if any(branches) else {})
                add(max(branches, key=_weight, default={}), 1)
            elif not kind.endswith(("-done", "-update")):  # these name once more what was started
                for called in _names(_CALLED, operation.attributes):
                    add(moved(called), 1)
        return dict(counts)

    counts = moved(entry)
    rows = [Collective(kind, size, times) for (kind, size), times in counts.items() if times != 0]
    rows.sort(key=lambda row: (row.times is not None, -(row.times or 1) * row.bytes))
    return Collectives(tuple(rows), tuple(notes) if rows else ())


Collectives.__module__ = "treeparams.sharding"


class _Operation(NamedTuple):
    """One line of a computation."""

    kind: str
    result: str  # its type
    operands: tuple[str, ...]  # names of operations of the same computation
    attributes: str


def _parsed(text: str) -> tuple[dict[str, dict[str, _Operation]], str | None]:
    """The operations of each computation by name, and which computation is run first."""
    computations: dict[str, dict[str, _Operation]] = {}
    entry, current = None, {}
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif found := _OPERATION.match(line):
            name, result, kind, rest = found.groups()
            end = _end(rest)
            current[name] = _Operation(kind, result, tuple(_operands(rest[:end])), rest[end:])
    return computations, entry


def _end(text: str) -> int:
    """Where the bracket is closed that was open before this text."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return i
    return len(text)


def _operands(text: str) -> Iterator[str]:
    """The names in `%a, f32[2,3]{1,0} %b, (f32[], s32[]) %c`: some versions write their types, some a `%`."""
    # The pattern takes the innermost brackets away, those that hold no others; so again, until none are left.
    before = ""
    while before != text:
        before, text = text, _BRACKETS.sub("", text)
    for operand in text.split(","):
        if words := operand.split():
            yield words[-1].removeprefix("%")


def _moves_nothing(attributes: str) -> bool:
    """Whether each group is of one device."""
    if named := _NAMED.search(attributes):
        sizes = dict(axis.rsplit("=", 1) for axis in named[1].split(","))
        return all(sizes.get(axis) == "1" for axis in named[2].split(","))
    return bool(_ALONE.search(attributes))


def _names(pattern: re.Pattern[str], attributes: str) -> list[str]:
    return [name for found in pattern.findall(attributes) for name in re.findall(r"[\w.\-]+", found)]


def _counted(kind: str, operation: _Operation, beside: Mapping[str, _Operation]) -> int:
    """For how many bytes a collective counts."""
    # The sliced permute and the ragged exchange also name where to write, and offsets.
    first = kind == "ragged-all-to-all" or "slice_sizes=" in operation.attributes
    names = operation.operands[:1] if first else operation.operands
    operand = sum(_bytes(beside[name].result) for name in names if name in beside)
    if kind == "all-gather":
        if kind == operation.kind:
            return _bytes(operation.result)
        # What is started has as its type operand and result in one, and counters.
        return _bytes(re.sub(r"\b[su]32\[\]", "", operation.result)) - operand
    return 2 * operand if kind == "all-reduce" else operand


def _bytes(types: str) -> int:
    """The size of an array, or of a tuple's arrays together, from the text of its type.

    >>> _bytes("(f32[64,32]{1,0}, pred[3], s4[6], f8e4m3fn[2], c64[], token[])")
    8208
    """
    total = 0
    for dtype, dimensions in _ARRAY.findall(types):
        bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["0"])[0])
        total += -(-bits * math.prod(int(size.removeprefix("<=")) for size in dimensions.split(",") if size) // 8)
    return total


def _total(products: Iterable[tuple[int | None, int | None]]) -> int | None:
    """The sum of products; none if a factor is not known."""
    total = 0
    for one, other in products:
        if one is None or other is None:
            return None
        total += one * other
    return total


def _weight(counts: Mapping[tuple[str, int], int | None]) -> float:
    total = _total((times, size) for (_, size), times in counts.items())
    return math.inf if total is None else float(total)
