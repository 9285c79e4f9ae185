"""Finds a loop over the layers of a net in the program of a function and turns it into a scan.

A *piece* is a part of an array along one axis: a parameter in a stack, one key of many. Equal *parts* of a program
become a loop if each gets its operands in the same way: from itself, from the part before, from pieces of one array (a
*column*), from its number, or from one value for all.
"""

import contextlib
import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.tree_util as jtu
import numpy as np

from .._programs import Kind, Walk, bind, derivative, is_floating, operation_name, programs
from .._tree.static_keys import static_key
from .block import Block, Strip, cut_columns

F = TypeVar("F", bound=Callable[..., Any])

_Var = Any  # of a program: `jax.extend.core.Var`, or `Literal`
_Equation = Any  # `jax.extend.core.JaxprEqn`
_Place = tuple[int, int]  # within a part: of which equation, and which of its operands or results

# A scan has a cost of its own: to compile it takes some 50 ms. What saves fewer equations than this is left as it is.
_LEAST = 8
_TRIED = 20  # candidates for a loop; most of those that fail are a good one, begun or repeated otherwise
_ORDERS = 2  # of derivatives, to which rules for them are compared


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
    two layers before it; or if parameters come from a vector (a scan over a vector is slow). A program with side
    effects, such as `jax.debug.print`, stays as it is. So do convolutions on a CPU, where XLA computes them several
    times slower inside a loop.

    Args:
        function: any function of arrays and of trees that hold arrays; a `Restructure` is such a tree.

    Returns:
        A function with the same arguments and results. Each call traces `function` again, so call it under `jax.jit`.

    Warns:
        UserWarning: no loop was found, with the reason. The result is still correct.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        program, shapes, others = eqx.filter_make_jaxpr(function)(*args, **kwargs)
        results = _evaluated(program, jtu.tree_leaves(eqx.filter((args, kwargs), eqx.is_array)))
        return eqx.combine(jtu.tree_unflatten(jtu.tree_structure(shapes), results), others)

    return wrapped  # pyright: ignore[reportReturnType]


def _evaluated(closed: jex.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    if closed.effects:
        reason = "the program has side effects, such as those of jax.debug.print"
    else:
        program = _Program(closed)
        pieces = _strips_in(program)
        equations = _in_order(program, pieces) if pieces else []
        steps = _rolled(equations, pieces)
        if any(isinstance(step, _EqualParts) for step in steps):
            return _Evaluation(program, pieces, steps).run(operands)
        if _best(equations, pieces, least=1) is not None:  # not worth a word
            return jex.jaxpr_as_fun(closed)(*operands)
        if any(each.primitive.name == "cut" and not each.params["rank"] for each in program.equations):
            reason = "parameters come from a vector, and a scan over a vector is slow; take tp.stack(model)"
        elif not pieces:
            reason = "no parameter comes from a stack; write `stacks, restructure = tp.stack(model)`, call the "
            reason += "function with the stacks, and call `restructure(stacks)` inside it"
        else:
            reason = "there are no equal layers in sequence, each of which uses the result of the one before"
            if jax.default_backend() == "cpu":
                reason += ", or they hold convolutions, which are slow in loops on a CPU"
    warnings.warn(f"tp.rolled found no loop, so each layer is compiled separately: {reason}", stacklevel=3)
    return jex.jaxpr_as_fun(closed)(*operands)


class _Program(Walk[_Var]):
    """A program that includes those of `jax.jit` within it: layers may be functions that are compiled apart."""

    def __init__(self, program: jex.ClosedJaxpr) -> None:
        super().__init__()
        self.operands: list[_Var] = program.jaxpr.invars
        self.constants: dict[_Var, Any] = {}
        self.equations: list[_Equation] = []
        self.results = self.run(program, self.operands)

    def literal(self, atom: _Var) -> _Var:
        return atom

    def constant(self, value: Any) -> _Var:
        known = (var for var, other in self.constants.items() if other is value)
        var = next(known, None) or jex.Var(jax.typeof(value))
        self.constants[var] = value
        return var

    def step(self, eqn: _Equation, its: list[_Var]) -> list[_Var]:
        within = self.program_of(eqn) if eqn.primitive.name == "jit" else None
        if within is not None:
            return self.run(within, its)
        made = [jex.Var(var.aval) for var in eqn.outvars]  # the program may stand at many places
        self.equations.append(eqn.replace(invars=its, outvars=made))
        return made


# -- Pieces ------------------------------------------------------------------------------------------------------------


# Pieces of one array that differ in their starts alone, one for each part.
_Column = tuple[Strip, ...]


def _strips_in(program: _Program) -> dict[_Var, Strip]:
    """Returns the results of a program that are pieces of its operands, of stacks, or of keys that it has split."""
    # A split of keys that comes again and again is made by each layer for itself: it belongs to the layer.
    splits = [each.outvars[0].aval for each in program.equations if each.primitive.name == "random_split"]
    roots: set[_Var] = {*program.operands, *program.constants}
    found: dict[_Var, Strip] = {}
    for equation in program.equations:
        if equation.primitive.name == "random_split" and splits.count(equation.outvars[0].aval) < 3:
            roots.add(equation.outvars[0])
        elif equation.invars and not isinstance(equation.invars[0], jex.Literal):
            found.update(zip(equation.outvars, _strips_of(equation, roots, found), strict=False))
    return found


def _strips_of(equation: _Equation, roots: set[_Var], found: dict[_Var, Strip]) -> Sequence[Strip]:
    """Returns the pieces that are the results of an equation; nothing if they are none."""
    name, params, operand = equation.primitive.name, equation.params, equation.invars[0]
    shape, of = operand.aval.shape, found.get(operand)
    if name == "cut" and len(shape) == 1 + params["rank"] > 1:
        block = Block(params["shapes"], (), operand.aval.dtype, shape[0], params["rank"])
        return block.strips(range(len(block.shapes)), operand)
    if name == "squeeze" and of is not None:
        is_whole = len(of.shape) == of.rank + 1 and params["dimensions"] == (len(shape) - 1 - of.rank,)
        return [of._replace(shape=of.shape[1:])] if is_whole else []
    if name == "slice":
        spans = list(zip(params["start_indices"], params["limit_indices"], shape, strict=True))
        axes = [axis for axis, (start, end, size) in enumerate(spans) if (start, end) != (0, size)]
        if len(axes) != 1 or set(params["strides"] or [1]) != {1}:
            return []
        axis, (skipped, end, _) = axes[0], spans[axes[0]]
        sizes = [end - skipped]
    elif name in ("split", "unstack"):
        axis, skipped, sizes = params["axis"], 0, params.get("sizes", [1] * len(equation.outvars))
    else:
        return []
    rank = len(shape) - 1 - axis
    if of is None and operand in roots:
        of = Strip(operand, 0, shape[axis], shape[axis:], rank)
    if of is None or of.rank != rank or len(of.shape) != rank + 1:
        return []
    spans = itertools.pairwise(itertools.accumulate(sizes, initial=of.start + skipped))
    shapes = [of.shape[1:] if name == "unstack" else (size, *of.shape[1:]) for size in sizes]
    return [Strip(of.root, a, b - a, own, rank) for (a, b), own in zip(spans, shapes, strict=True)]


def _in_order(program: _Program, pieces: dict[_Var, Strip]) -> list[_Equation]:
    """Returns the equations that make no pieces. Those of pieces alone come where they are needed, with their layer."""
    # A form casts and transposes all its pieces before the first layer.
    equations = [each for each in program.equations if not (each.outvars and each.outvars[0] in pieces)]
    of_pieces, waits = set(pieces), list[bool]()
    for equation in equations:
        operands = _variables(equation.invars)
        waits.append(bool(operands) and of_pieces.issuperset(operands))
        of_pieces.update(equation.outvars if waits[-1] else ())
    roots = lambda atoms: [pieces[var].root if var in pieces else var for var in _variables(atoms)]
    needed, order = dict.fromkeys(roots(program.results), len(equations)), list[tuple[int, int]]()  # needed first
    for i, equation in reversed([*enumerate(equations)]):
        users = [needed[var] for var in equation.outvars if var in needed]
        if users or not waits[i]:
            at = min(users) if waits[i] else i
            order.append((at, i))
            needed |= {var: min(at, needed.get(var, at)) for var in roots(equation.invars)}
    return [equations[i] for _, i in sorted(order)]


def _variables(atoms: Sequence[_Var]) -> list[_Var]:
    """Returns operands that are not constants."""
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]


# -- Equal parts -------------------------------------------------------------------------------------------------------


class _EqualParts(NamedTuple):
    """Equal parts of a program, one after another."""

    parts: list[list[_Equation]]
    taken: dict[_Place, _Place]  # operands that are results of the part before, and where it has them
    first: dict[_Place, _Var]  # what the first part takes in place of these results
    along: dict[_Place, _Column | np.ndarray]  # operands that are pieces, or constants that differ

    def body(self) -> list[list[_Var | _Place]]:
        """Returns the operands of each equation of the first part, as places where those of other parts differ."""
        own = {*self.along, *self.taken}
        operands = enumerate([each.invars for each in self.parts[0]])
        return [[(k, m) if (k, m) in own else var for m, var in enumerate(its)] for k, its in operands]

    def needs(self) -> list[_Var]:
        """Returns the values that are needed from elsewhere."""
        made = {var for equation in self.parts[0] for var in equation.outvars}
        shared = [var for its in self.body() for var in its if not isinstance(var, tuple)]
        shared = [var for var in _variables(shared) if var not in made]
        return [*self.first.values(), *shared, *(column[0].root for column in self.columns())]

    def columns(self) -> list[_Column]:
        """Returns the operands that are pieces."""
        return [each for each in self.along.values() if isinstance(each, tuple)]


def _rolled(equations: list[_Equation], pieces: dict[_Var, Strip]) -> list[_Equation | _EqualParts]:
    """Returns the best loop, between the loops and equations before and after it."""
    found = _best(equations, pieces)
    if found is None:
        return equations
    start, loop = found
    end = start + sum(map(len, loop.parts))
    return [*_rolled(equations[:start], pieces), loop, *_rolled(equations[end:], pieces)]


def _best(equations: list[_Equation], pieces: dict[_Var, Strip], least: int = _LEAST) -> tuple[int, _EqualParts] | None:
    known, kinds = dict[Any, int](), _Kinds(pieces)
    ids = np.array([known.setdefault(kinds.of(equation), len(known)) for equation in equations])
    is_slow = np.array([_is_slow_in_loops(equation) for equation in equations])
    candidates = []
    for period in range(1, len(ids) // 3 + 1):
        # Runs of equations that are like those one period later.
        changes = np.flatnonzero(np.diff([0, *(ids[:-period] == ids[period:]), 0]))
        for start, stop in changes.reshape(-1, 2).tolist():
            parts = (stop - start) // period + 1
            if parts >= 3 and (parts - 1) * period >= least and not is_slow[start : start + period].any():
                candidates.append(((parts - 1) * period, start, period, parts, stop + period))
    candidates.sort(key=lambda each: (-each[0], each[2]))
    for _, start, period, most, stop in candidates[:_TRIED]:
        for parts in (most, most - 1) if most > 3 else (most,):
            # Where the first part begins may be one of several; the one that hands on least is the best.
            begins = range(start, stop - parts * period + 1)
            loops = [(begin, _as_loop(equations[begin : begin + parts * period], period, pieces)) for begin in begins]
            found = [(begin, loop) for begin, loop in loops if loop is not None]
            if found:
                return min(found, key=lambda each: len(each[1].first))
    return None


def _is_slow_in_loops(equation: _Equation) -> bool:
    # XLA for CPU computes a convolution within a loop on one core, and not by its library: a ResNet of 26 layers took
    # 5.5 times as long.
    if jax.default_backend() != "cpu":
        return False
    inside = [each for program in programs(equation) for each in program.eqns]
    return equation.primitive.name == "conv_general_dilated" or any(map(_is_slow_in_loops, inside))


def _as_loop(equations: list[_Equation], period: int, pieces: dict[_Var, Strip]) -> _EqualParts | None:
    """Returns the loop of these equations, if each part gets its operands from the same places as the others."""
    parts = [equations[i : i + period] for i in range(0, len(equations), period)]
    made: dict[_Var, tuple[int, _Place]] = {}
    for number, part in enumerate(parts):
        for k, equation in enumerate(part):
            made |= {var: (number, (k, o)) for o, var in enumerate(equation.outvars)}
    loop = _EqualParts(parts, {}, {}, {})
    for place in [(k, m) for k in range(period) for m in range(len(parts[0][k].invars))]:
        operands = [part[place[0]].invars[place[1]] for part in parts]
        if isinstance(operands[0], jex.Literal):
            values = [np.asarray(operand.val, getattr(operand.aval, "dtype", None)) for operand in operands]
            if len({value.tobytes() for value in values}) > 1:
                loop.along[place] = np.stack(values)
        elif all(operand in pieces for operand in operands):
            column = _column_of([pieces[operand] for operand in operands])
            if column is not None:
                loop.along[place] = column
            elif len(set(operands)) > 1:
                return None
        elif len(set(operands)) > 1 or operands[0] in made:
            # How many parts before, and where: all are of the same part, or all but the first of the part before.
            origins = enumerate([made.get(operand) for operand in operands])
            own, *ways = [None if origin is None else (n - origin[0], origin[1]) for n, origin in origins]
            way = ways[0]
            if way is None or way[0] > 1 or len({*ways}) > 1:
                return None
            is_handed_on = way[0] == 1 and own is None and _hands_on(loop, place, way[1], operands[0])
            if own != way and not is_handed_on:
                return None
    return loop


def _hands_on(loop: _EqualParts, place: _Place, origin: _Place, first: _Var) -> bool:
    """Notes that an operand is a result of the part before; returns whether a scan can carry it."""
    handed = loop.parts[0][origin[0]].outvars[origin[1]].aval
    loop.taken[place] = origin
    is_one = loop.first.setdefault(origin, first) is first
    return is_one and (handed.shape, handed.dtype) == (first.aval.shape, first.aval.dtype)


def _column_of(pieces: list[Strip]) -> _Column | None:
    starts = sorted({piece.start for piece in pieces})
    are_apart = len(starts) == len(pieces) and min(map(operator.sub, starts[1:], starts)) >= pieces[0].size
    are_alike = all(piece == pieces[0]._replace(start=piece.start) for piece in pieces)
    return tuple(pieces) if are_apart and are_alike else None


class _Kinds:
    """Gives each equation a key that is equal for equations that do the same.

    Their operands then have the same types, or are pieces of the same arrays.
    """

    def __init__(self, pieces: dict[_Var, Strip]) -> None:
        self._pieces = pieces
        self._known: dict[Any, Any] = {}  # the keys of programs: most stand at many places

    def of(self, equation: _Equation, orders: int = _ORDERS, type_of: Callable[[_Var], Any] | None = None) -> Any:
        """Returns the key of an equation."""
        type_of = type_of or self._type
        types = tuple(map(type_of, equation.invars)), tuple(map(type_of, equation.outvars))
        within = tuple([self._program(each, orders) for each in programs(equation)])
        params, rule = equation.params, None
        if "_prim" in params or equation.primitive.name.startswith("custom_"):
            # The rules are closures, made anew at each call. What they do is the program of the derivative. That may
            # hold the function itself, as that of `jax.nn.relu` does, so they are followed to the second derivative.
            params = {name: value for name, value in params.items() if isinstance(value, (bool, int, str))}
            name = operation_name(equation) if Kind.RULE in Kind.of(equation) else repr(equation.params.get("_prim"))
            rule = name, self._rule(equation, orders - 1) if orders else None
        plain = {name: params[name] for name in sorted(params) if not _holds_a_program(params[name])}
        return equation.primitive, *types, within, rule, static_key(plain, strict=True)

    def _type(self, var: _Var) -> Any:
        is_literal = isinstance(var, jex.Literal)
        piece = None if is_literal else self._pieces.get(var)
        return (is_literal, var.aval) if piece is None else piece._replace(start=0)

    def _program(self, program: jex.ClosedJaxpr, orders: int) -> Any:
        key, jaxpr = (id(program.jaxpr), *map(id, program.consts), orders), program.jaxpr
        numbers: dict[_Var, int] = {}

        def name(var: _Var) -> Any:
            if isinstance(var, jex.Literal):
                return var.aval, np.asarray(var.val).tobytes()
            return numbers.setdefault(var, len(numbers)), var.aval

        if key not in self._known:
            operands = tuple(map(name, (*jaxpr.constvars, *jaxpr.invars)))
            equations = tuple([self.of(each, orders, name) for each in jaxpr.eqns])
            # With the program, which keeps its id.
            self._known[key] = (operands, equations, tuple(map(name, jaxpr.outvars)), key[1:-1]), program
        return self._known[key][0]

    def _rule(self, equation: _Equation, orders: int) -> Any:
        """Returns the program of an equation's derivative; if it has none, a value that equals nothing else."""
        operands = [is_floating(var.aval) for var in equation.invars]
        # A function may have closed over the first operands, in which its rule has no derivative.
        for closed_over in range(len(operands)):
            with contextlib.suppress(Exception):  # whatever a user's rule raises, it raises again where it is used
                moves = [i >= closed_over and floats for i, floats in enumerate(operands)]
                return self._program(derivative(equation, moves)[0], orders)
        return object()


def _holds_a_program(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_a_program, value))
    return isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr))


# -- The program with scans in it --------------------------------------------------------------------------------------


class _Evaluation:
    """Computes the steps of a program one after another."""

    def __init__(self, program: _Program, pieces: dict[_Var, Strip], steps: Sequence[_Equation | _EqualParts]) -> None:
        self._program, self._steps = program, steps
        # Pieces that are no columns are made where they are read.
        self._makers = {var: each for each in program.equations for var in each.outvars if var in pieces}
        # What is needed beside the results of a loop within itself.
        needed = [step.needs() if isinstance(step, _EqualParts) else _variables(step.invars) for step in steps]
        needed = [*itertools.chain(_variables(program.results), *needed)]
        self._needed = {*needed, *(pieces[var].root for var in needed if var in pieces)}

    def run(self, operands: Sequence[Any]) -> list[Any]:
        self._values = self._program.constants | dict(zip(self._program.operands, operands, strict=True))
        for step in self._steps:
            if isinstance(step, _EqualParts):
                self._scan(step)
            else:
                self._run(step)
        return list(map(self._read, self._program.results))

    def _run(self, equation: _Equation) -> None:
        self._values |= zip(equation.outvars, bind(equation, list(map(self._read, equation.invars))), strict=True)

    def _read(self, var: _Var, made: Mapping[_Var, Any] | None = None) -> Any:
        if isinstance(var, jex.Literal):
            return var.val
        if made and var in made:
            return made[var]
        if var not in self._values:
            self._run(self._makers[var])
        return self._values[var]

    def _scan(self, loop: _EqualParts) -> None:
        first, last = loop.parts[0], loop.parts[-1]
        for var in loop.needs():
            self._read(var)  # what were made within the body could not be used behind it
        # Results of single parts that are needed behind the loop; of the last part those that are carried come anyway.
        places = [(k, o) for k, equation in enumerate(first) for o in range(len(equation.outvars))]
        ends = {place: loop.parts[:-1] if place in loop.first else loop.parts for place in places}
        kept = [place for place in places if any(_result(part, place) in self._needed for part in ends[place])]

        def step(carry: list[Any], along: list[Any]) -> tuple[list[Any], list[Any]]:
            handed = dict(zip(loop.first, carry, strict=True))
            made: dict[Any, Any] = {place: handed[origin] for place, origin in loop.taken.items()}
            made |= zip(loop.along, along, strict=True)
            for equation, operands in zip(first, loop.body(), strict=True):
                values = [self._read(each, made) for each in operands]
                made |= zip(equation.outvars, bind(equation, values), strict=True)
            found = lambda places: [made[_result(first, place)] for place in places]
            return list(map(_strong, found(loop.first))), found(kept)

        # Columns are cut here and not in the body, which would save them for the way back.
        columns = cut_columns(loop.columns(), self._read)
        along = [columns[each] if isinstance(each, tuple) else each for each in loop.along.values()]
        carry = [_strong(self._read(var)) for var in loop.first.values()]
        carry, stacked = jax.lax.scan(step, carry, along, len(loop.parts))
        self._values |= {_result(last, place): value for place, value in zip(loop.first, carry, strict=True)}
        for place, values in zip(kept, stacked, strict=True):
            results = [_result(part, place) for part in loop.parts]
            rows = Block.rows([var.aval for var in results]).pieces(values)
            self._values |= {var: row for var, row in zip(results, rows, strict=True) if var in self._needed}


def _result(part: Sequence[_Equation], place: _Place) -> _Var:
    return part[place[0]].outvars[place[1]]


def _strong(array: Any) -> Any:
    """Returns the array without a weak type: the first carry might have one and the next one not."""
    return jax.lax.convert_element_type(array, array.dtype)
