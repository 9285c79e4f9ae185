"""Finds a loop over the layers of a net in the program of a function and turns it into a scan."""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu

from .block import with_gaps
from .primitives import cut
from .repeats import Column, Equation, Loop, Piece, Place, Var, pieces_in, program_of, split, variables

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=Any)

# A scan has a cost of its own: to compile it takes some 50 ms. What saves fewer equations than this is left as it is.
_LEAST = 8


def rolled(function: F) -> F:
    """Compiles equal layers once: finds the loop over them in a function and replaces it by a `jax.lax.scan`.

    A model runs `for layer in self.layers: x = layer(x)`, and `jax.jit` compiles each layer separately. `rolled` traces
    `function`, looks for equal parts of its program that each use the result of the part before, and replaces them by
    one scan. The parameters of the layers must come from stacks, so call `restructure(stacks)` inside the function. You
    do not have to change the model.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> net = eqx.nn.MLP(4, 4, 4, depth=50, key=jax.random.key(0))
    >>> stacks, restructure = tp.stack(net)
    >>> @jax.jit
    ... def gradient(stacks, x):
    ...     return jax.grad(tp.rolled(lambda stacks, x: jnp.sum(restructure(stacks)(x))))(stacks, x)
    >>> gradient(stacks, jnp.ones(4))["float32[4,4]"].shape
    (51, 4, 4)

    The result is that of `function`, up to how XLA rounds inside a loop. You can differentiate, map and compile it like
    `function`. Layers may use keys (`jax.random.split(key, n)[i]`, or in a `zip`) and numbers that differ from layer to
    layer, share parameters (a tie), and be of several kinds, alternating (A B A B) or in sequence (A A A B B B).

    Layers are not found if shapes, functions or static fields differ from one to the next; if a layer uses results of
    two layers before it; if parameters come from a vector (a scan over a vector is slow); or inside a function that you
    compile by `jax.jit` within this one. A program with side effects, such as `jax.debug.print`, stays as it is. So do
    convolutions on a CPU, where XLA computes them several times slower inside a loop.

    Args:
        function: any function of arrays and of trees that hold arrays; a `Restructure` is such a tree.

    Returns:
        A function with the same arguments and results. Each call traces `function` again, so call it under `jax.jit`.

    Warns:
        UserWarning: no loop was found, with the reason. The result is still correct.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        arrays, others = eqx.partition((args, kwargs), eqx.is_array)
        leaves, treedef = jtu.tree_flatten(arrays)
        results: list[Any] = []

        def traced(*leaves: Any) -> Any:
            args, kwargs = eqx.combine(jtu.tree_unflatten(treedef, leaves), others)
            found, rest = eqx.partition(function(*args, **kwargs), eqx.is_array)
            results[:] = jtu.tree_structure(found), rest
            return jtu.tree_leaves(found)

        closed = jax.make_jaxpr(traced)(*leaves)
        structure, rest = results
        return eqx.combine(jtu.tree_unflatten(structure, _evaluated(closed, leaves)), rest)

    return wrapped  # pyright: ignore[reportReturnType]


def _evaluated(closed: jex.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    program = closed.jaxpr
    pieces = pieces_in(program)
    steps = split(program, pieces, _LEAST) if pieces and not program.effects else []
    if any(isinstance(step, Loop) for step in steps):
        return _Evaluation(program, pieces, steps).run([*closed.consts, *operands])
    if program.effects:
        reason = "the program has side effects, such as those of jax.debug.print"
    elif not pieces:
        reason = "no parameter comes from a stack; write `stacks, restructure = tp.stack(model)`, call the function "
        reason += "with the stacks, and call `restructure(stacks)` inside it"
    else:
        reason = "there are no equal layers in sequence, each of which uses the result of the one before"
        if jax.default_backend() == "cpu":
            reason += ", or they hold convolutions, which are slow in loops on a CPU"
    warnings.warn(f"tp.rolled found no loop, so each layer is compiled separately: {reason}", stacklevel=3)
    return jex.jaxpr_as_fun(closed)(*operands)


# -- Where the operands of loops lie -----------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Columns of equal steps that fit into the same rows: cut out of their array at once, one row for each part."""

    root: Var
    start: int
    step: int
    columns: dict[Place, Column]


def _rows_of(loop: Loop) -> list[Rows]:
    found, alike = [], {}
    for place, column in sorted(loop.columns.items(), key=lambda each: each[1].start):
        alike.setdefault((column.root, column.rank, column.step), []).append((place, column))
    for (root, rank, step), columns in alike.items():
        left, parts = columns, len(loop.parts)
        while left:
            # As in `Source.rows`: behind the last row there may be nothing left, and then all of them begin earlier.
            length = root.aval.shape[root.aval.ndim - 1 - rank]
            start = max(0, min(left[0][1].start, length - parts * step))
            inside = {place: column for place, column in left if column.start + column.size <= start + step}
            if not inside:
                start = left[0][1].start
                inside = {place: column for place, column in left if column.start + column.size <= start + step}
            found.append(Rows(root, start, step, inside))
            left = [each for each in left if each[0] not in inside]
    return found


class Wanted(NamedTuple):
    """A part of an array to cut out."""

    start: int
    size: int
    shape: tuple[int, ...]
    name: Any  # a variable, or a number of a loop and one of its rows


def _taken(array: jax.Array, rank: int, wanted: Sequence[Wanted]) -> dict[Any, jax.Array]:
    """Cuts parts out of an array, as many at once as do not overlap: a cut's transpose is as large as the array."""
    longest = max((each.start + each.size for each in wanted), default=0)
    axis = array.ndim - 1 - rank
    missing = longest - array.shape[axis]
    if missing > 0:  # the last row of a loop may end behind the array
        array = jnp.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
    found: dict[Any, jax.Array] = {}
    for some in _apart(wanted):
        found |= zip([each.name for each in some], _cut(array, rank, [each[:3] for each in some]), strict=True)
    return found


def _apart(spans: Iterable[S]) -> Iterator[list[S]]:
    """Sorts spans, which have a `start` and a `size`, into lists without overlaps."""
    left = sorted(spans, key=lambda each: each.start)
    while left:
        now, later, at = [], [], 0
        for each in left:
            fits = each.start >= at
            (now if fits else later).append(each)
            at = each.start + each.size if fits else at
        yield now
        left = later


def _cut(array: jax.Array, rank: int, spans: Sequence[tuple[int, int, tuple[int, ...]]]) -> list[jax.Array]:
    """Cuts pieces out of the axis before the last `rank` ones; axes before that are a batch."""
    axis = array.ndim - 1 - rank
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        slices = [jax.lax.slice_in_dim(array, start, start + size, axis=axis) for start, size, _ in spans]
        return [each.reshape(*array.shape[:axis], *span[2]) for each, span in zip(slices, spans, strict=True)]
    return cut(array, with_gaps(spans, array.shape[axis + 1 :], array.shape[axis]), rank)[1::2]


# -- The program with scans in it --------------------------------------------------------------------------------------


class _Evaluation:
    """Computes the steps of a program one after another."""

    def __init__(self, program: jex.Jaxpr, pieces: dict[Var, Piece], steps: Sequence[Equation | Loop]) -> None:
        self._program = program
        self._steps = steps
        self._rows = {id(step): _rows_of(step) for step in steps if isinstance(step, Loop)}
        # What is needed beside the results of a step within itself.
        self._needed = {var for var in program.outvars if not isinstance(var, jex.Literal)}
        for step in steps:
            self._needed.update(_operands(step))
        self._wanted: dict[Var, dict[int, list[Wanted]]] = {}  # of each array that is cut, by rank
        for var in [var for var in pieces if var in self._needed]:
            root, start, size, shape, rank = pieces[var]
            self._want(root, rank, Wanted(start, size, shape, var))
        for number, every in self._rows.items():
            parts = next(len(step.parts) for step in steps if id(step) == number)
            for i, rows in enumerate(every):
                rank = next(iter(rows.columns.values())).rank
                shape = (parts, rows.step, *rows.root.aval.shape[rows.root.aval.ndim - rank :])
                self._want(rows.root, rank, Wanted(rows.start, parts * rows.step, shape, (number, i)))

    def _want(self, root: Var, rank: int, wanted: Wanted) -> None:
        self._needed.add(root)
        self._wanted.setdefault(root, {}).setdefault(rank, []).append(wanted)

    def run(self, operands: Sequence[Any]) -> list[Any]:
        self._values: dict[Any, Any] = {}
        for var, value in zip([*self._program.constvars, *self._program.invars], operands, strict=True):
            self._write(var, value)
        for is_loop, steps in itertools.groupby(self._steps, key=lambda step: isinstance(step, Loop)):
            if is_loop:
                for loop in steps:
                    self._scan(loop)
            else:
                self._straight(list(steps))
        outvars = self._program.outvars
        return [var.val if isinstance(var, jex.Literal) else self._values[var] for var in outvars]

    def _write(self, var: Var, value: Any) -> None:
        self._values[var] = value
        for rank, wanted in self._wanted.get(var, {}).items():
            self._values |= _taken(value, rank, wanted)

    def _straight(self, equations: list[Equation]) -> None:
        made = [var for equation in equations for var in equation.outvars]
        outs = [var for var in made if var in self._needed]
        given = dict.fromkeys(var for equation in equations for var in variables(equation))
        ins = [var for var in given if var not in set(made)]
        run = jex.jaxpr_as_fun(jex.ClosedJaxpr(program_of(equations, ins, outs), []))
        for var, value in zip(outs, run(*[self._values[var] for var in ins]), strict=True):
            self._write(var, value)

    def _scan(self, loop: Loop) -> None:
        first, parts = loop.parts[0], len(loop.parts)
        body, same = _body(loop)
        # Results of single parts that are needed behind the loop; of the last part those that are carried come anyway.
        kept = []
        for place in itertools.chain(*[[(k, o) for o in range(len(each.outvars))] for k, each in enumerate(first)]):
            others = loop.parts[:-1] if place in loop.carries else loop.parts
            if any(_result(part, place) in self._needed for part in others):
                kept.append(place)
        run = jex.jaxpr_as_fun(jex.ClosedJaxpr(body([*loop.carries, *kept]), []))
        given = [self._values[var] for var in same]

        def step(carry: list[Any], each: Any) -> tuple[list[Any], list[Any]]:
            results = run(*carry, *each, *given)
            return list(map(_strong, results[: len(carry)])), results[len(carry) :]

        arrays: dict[Place, Any] = {}
        for i, rows in enumerate(self._rows[id(loop)]):
            arrays |= _columns(self._values.pop((id(loop), i)), rows)
        along = [*[arrays[place] for place in loop.columns], *loop.numbers.values()]
        carry = [_strong(self._values[var]) for var in loop.carries.values()]
        carry, stacked = jax.lax.scan(step, carry, along, parts)
        for place, value in zip(loop.carries, carry, strict=True):
            self._write(_result(loop.parts[-1], place), value)
        for place, values in zip(kept, stacked, strict=True):
            its = [_result(part, place) for part in loop.parts]
            wanted = [Wanted(i, 1, values.shape[1:], var) for i, var in enumerate(its) if var in self._needed]
            for var, value in _taken(values, values.ndim - 1, wanted).items():
                self._write(var, value)


def _result(part: Sequence[Equation], place: Place) -> Var:
    equation, result = place
    return part[equation].outvars[result]


def _columns(array: jax.Array, rows: Rows) -> dict[Place, jax.Array]:
    """Cuts the pieces out of rows; each gets a leading axis over the parts."""
    # Cut here and not in the body: what a body cuts it would save for the way back, as a copy of the parameters.
    found: dict[Column, jax.Array] = {}
    for some in _apart(set(rows.columns.values())):
        spans = [(column.start - rows.start, column.size, column.shape) for column in some]
        parts = array.ndim - 2 - some[0].rank  # which axis, behind those of a batch
        pieces = _cut(array, some[0].rank, spans)
        found |= zip(some, [jnp.moveaxis(piece, parts, 0) for piece in pieces], strict=True)
    return {place: found[column] for place, column in rows.columns.items()}


def _operands(step: Equation | Loop) -> Iterable[Var]:
    """Returns the values that a step needs from elsewhere, besides the columns of a loop."""
    if not isinstance(step, Loop):
        return variables(step)
    return [*step.carries.values(), *_body(step)[1]]


def _body(loop: Loop) -> tuple[Callable[[Sequence[Place]], jex.Jaxpr], list[Var]]:
    """Returns the program of one part, by the results wanted from it, and the operands that all parts share.

    Its operands are the carried values, then the columns, the numbers, and the operands that all parts share.
    """
    first, second = loop.parts[:2]
    handed = [_result(first, place) for place in loop.carries]
    types = [var.aval for var in handed]
    types += [first[k].invars[m].aval for k, m in (*loop.columns, *loop.numbers)]
    new = _variables(types)
    carried = dict(zip(handed, new, strict=False))
    own = dict(zip([*loop.columns, *loop.numbers], new[len(carried) :], strict=True))
    equations = []
    for k, equation in enumerate(first):
        # The operands of the second part that come from the first one are those that are carried.
        operands = [
            own.get((k, m), operand if isinstance(after, jex.Literal) else carried.get(after, operand))
            for m, (operand, after) in enumerate(zip(equation.invars, second[k].invars, strict=True))
        ]
        equations.append(equation.replace(invars=operands))
    made = {*new, *[var for equation in first for var in equation.outvars]}
    same = [var for var in dict.fromkeys(var for each in equations for var in variables(each)) if var not in made]
    return lambda places: program_of(equations, [*new, *same], [_result(first, place) for place in places]), same


def _variables(types: Sequence[Any]) -> list[Var]:
    """Makes new variables that are in no program."""
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types]
    return list(jax.make_jaxpr(lambda *xs: xs)(*structs).jaxpr.invars)


def _strong(array: Any) -> Any:
    """Returns the array without a weak type: the first carry might have one and the next one not."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return array if is_key else jax.lax.convert_element_type(array, array.dtype)
