"""The parameters on which a function's value depends, so far as derivatives go: read from its program, never run."""

import functools
import operator
from collections.abc import Callable
from typing import Any, ParamSpec, cast

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.extend.core import Jaxpr, JaxprEqn

from ._programs import Marks, Run, bind, carry, derivative, is_floating, primitives, programs, through
from ._slots.layout import Layout, Trainable, trained_at
from ._slots.parts import Parts, put_together, take_apart
from ._tree.text import describe

P = ParamSpec("P")

# Their results are floating, and their derivative is zero everywhere.
_FLAT = frozenset({"ceil", "floor", "round", "sign", "stop_gradient"})

# They change an array in place (`jax.new_ref`), which is not followed.
_WRITES = frozenset({"addupdate", "masked_swap", "swap"})

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_TRACED = "to see what f reaches it is traced, as by jax.jit, so what it does must not depend on values of the model"


def reached(f: Callable[P, Any], trainable: Trainable = None, has_aux: bool = False) -> Callable[P, Layout]:
    """The parameters that `f(model, *args, **kwargs)` reaches: in which it has a derivative that is not always zero.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> model = {"w": jnp.ones(2), "target": jnp.ones(2), "unused": jnp.ones(3)}
    >>> loss = lambda model, x: jnp.sum((model["w"] * x - jax.lax.stop_gradient(model["target"])) ** 2)
    >>> tp.reached(loss)(model, jnp.ones(2)).paths
    ('w',)

    Of a parameter that a loss does not reach `jax.grad` gives zeros, and AdamW decays it all the same:
    `tp.grad(loss, unreached="none")` gives `None` there, which is no step.

    f is traced and never run. The program is followed through loops, branches, `jax.jit`, `jax.checkpoint` and
    functions with derivative rules of their own, whose rule decides. In doubt a parameter counts as reached: through a
    product with zero, by one of its elements, through an array that is written in place. A tie is reached at any path.

    Args:
        f: a function of the model and further arguments, which may be `jax.ShapeDtypeStruct`s, as the model's leaves.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        has_aux: whether f returns `(value, aux)`, of which only the value is looked at.

    Returns:
        A function of the same arguments as f. It returns the layout of the model in which only the parameters that f
        reaches are trained. Its `diff` with `tp.layout(model)` names the rest; as `trainable` it freezes the rest.

    Raises:
        ValueError: as `tp.layout`.
        TypeError: as `tp.layout`; f is controlled by values, as under `jax.jit`.
    """

    def layout_of(model: Any, /, *args: Any, **kwargs: Any) -> Layout:
        parts = take_apart(model, trainable)
        hit = reaches(f, parts, args, kwargs, has_aux)
        return trained_at(parts.layout, [leaf for leaf, yes in zip(parts.index.positions, hit, strict=True) if yes])

    return cast(Any, layout_of)


def reaches(
    f: Callable[..., Any], parts: Parts, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool
) -> list[bool]:
    """Whether the value of f depends on each slot."""
    # Taken apart and put together, so that objects that may be used once only (`equinox.nn.State`) can be used again.
    leaves, treedef = jtu.tree_flatten((parts.rest, args, kwargs))

    def value(slots: list[Any], given_for_shapes: list[Any]) -> list[Any]:
        given = iter(given_for_shapes)
        rest, args, kwargs = treedef.unflatten([next(given) if _is_shape(leaf) else leaf for leaf in leaves])
        out: Any = f(put_together(rest, slots), *args, **kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"with has_aux=True f must return a pair, (value, aux), got {describe(out)}")
        return [leaf for leaf in jtu.tree_leaves(out[0] if has_aux else out) if hasattr(leaf, "dtype")]

    try:
        program = jax.make_jaxpr(value)(list(parts.slots), list(filter(_is_shape, leaves))).jaxpr
    except _NEEDS_VALUES as error:
        error.add_note(_TRACED)
        raise
    if not _WRITES.isdisjoint(primitives(program)):
        return [True] * len(parts.slots)
    # A bit for each slot. The bits that arrive at any result of the program are the slots that f reaches.
    marks = [1 << i for i in range(len(parts.slots))]
    unmarked = [0] * (len(program.invars) - len(marks))
    step = functools.partial(_differentiable, set())
    found = functools.reduce(operator.or_, carry(program, [*marks, *unmarked], step), 0)
    return [bool(found & mark) for mark in marks]


def _is_shape(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _differentiable(seen: set[Any], eqn: JaxprEqn, marks: Marks, run: Run) -> Marks:
    """The marks of the results of one operation, without those that its derivative does not pass on."""
    name = eqn.primitive.name
    floating = [is_floating(var.aval) for var in eqn.outvars]
    if name in _FLAT or not any(floating):
        return [0] * len(floating)
    rule = _by_jvp if name == "custom_jvp_call" else _by_vjp if name.startswith("custom_vjp_call") else None
    if rule is None:
        # Where an entry goes when sorted is no derivative.
        found = marks if name == "sort" else through(eqn, marks, run)
        return [each if yes else 0 for each, yes in zip(found, floating, strict=True)]
    # A rule may ask which operands move. It takes long to trace; one that has passed all on is taken to do so again
    # where the same line calls it.
    moves = [bool(mark) and is_floating(atom.aval) for mark, atom in zip(marks, eqn.invars, strict=True)]
    operands = [i for i, move in enumerate(moves) if move]
    call = (name, eqn.source_info.traceback, *moves, *(str(atom.aval) for atom in eqn.invars))
    rows = [operands if yes else [] for yes in floating]
    if operands and call not in seen:
        try:
            found = rule(eqn, moves)
        except Exception:  # then so does the derivative, if it comes to that, and says why
            found = rows
        if found == rows:
            seen.add(call)
        rows = found
    return [functools.reduce(operator.or_, [marks[i] for i in row], 0) for row in rows]


# An operation with a rule of its own is traced once more with its derivative in moving operands. A derivative that does
# not depend on the tangents, or on the cotangents, is zero only if it is the constant zero: a rule may give anything.


def _by_jvp(eqn: JaxprEqn, moves: list[bool]) -> list[list[int]]:
    """For each result the operands in which it has a derivative, by the operation's rule for tangents."""
    count = len(eqn.invars)
    rows = _dependent(derivative(eqn, moves).jaxpr, count, count)[len(eqn.outvars) :]
    return [[i for i in row if moves[i]] for row in rows]


def _by_vjp(eqn: JaxprEqn, moves: list[bool]) -> list[list[int]]:
    """The same by the rule for cotangents, which tells for each operand the results, and is turned round."""
    operands, results = ([atom.aval for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    kept = list(map(is_floating, results))

    def of(values: list[Any], cotangents: list[Any]) -> Any:
        moving, still = eqx.partition(values, moves)
        _, pull_back = jax.vjp(lambda moving: eqx.filter(bind(eqn, eqx.combine(moving, still)), kept), moving)
        return pull_back(eqx.filter(cotangents, kept))

    # The derivatives come one after another, for the operands that move alone.
    columns = iter(_dependent(jax.make_jaxpr(of)(operands, results).jaxpr, len(operands), len(results)))
    of_operand = [next(columns) if move else [] for move in moves]
    return [[i for i, column in enumerate(of_operand) if result in column] for result in range(len(results))]


def _dependent(program: Jaxpr, others: int, along: int) -> list[list[int]]:
    """For each result of a program, on which of its last arguments it depends; on all of them, if in doubt."""
    # One more mark for everything else that is not zero: other arguments, constants, and what operations make of zeros.
    other = 1 << along

    def step(eqn: JaxprEqn, marks: Marks, run: Run) -> Marks:
        found = through(eqn, marks, run)
        makes_something = not any(marks) and eqn.primitive.name not in _KEEPS_ZERO and not any(programs(eqn))
        return [other] * len(found) if makes_something else found

    rows = carry(program, [*[other] * others, *(1 << i for i in range(along))], step, other)
    return [[i for i in range(along) if row >> i & 1] or list(range(along if row else 0)) for row in rows]


# Operations that make zeros of zeros; others, such as `exp`, may make anything of them.
_KEEPS_ZERO = frozenset({
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "device_put", "dot_general",
    "mul", "neg", "pad", "reduce_sum", "reshape", "select_n", "slice", "squeeze", "sub", "transpose",
})  # fmt: skip
