"""Finds the parameters that a function's value depends on, from its program and without running it."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, cast

import jax
import jax.tree_util as jtu
from jax.extend.core import JaxprEqn

from ._programs import Kind, Marks, derivative, is_floating, makes_zeros, traced
from ._slots.layout import Layout, Trainable, trained_at
from ._slots.parts import take_apart
from ._tree.text import describe

P = ParamSpec("P")


def reached(f: Callable[P, Any], trainable: Trainable = None, has_aux: bool = False) -> Callable[P, Layout]:
    """Finds the parameters that `f(model, *args, **kwargs)` depends on: those whose gradient is not identically zero.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> model = {"w": jnp.ones(2), "target": jnp.ones(2), "unused": jnp.ones(3)}
    >>> loss = lambda model, x: jnp.sum((model["w"] * x - jax.lax.stop_gradient(model["target"])) ** 2)
    >>> tp.reached(loss)(model, jnp.ones(2)).paths
    ('w',)

    For a parameter that a loss does not reach, `jax.grad` gives zeros, and AdamW decays the parameter all the same.
    With `tp.grad(loss, unreached="none")` the gradient is `None` and you take no step there.

    `f` is traced and never run. The program is followed through loops, branches, `jax.jit`, `jax.checkpoint` and
    functions with custom derivative rules, whose rules decide. In doubt a parameter counts as reached: through a
    product with zero; if only some of its elements are used; through an operation that is not known here; by a custom
    rule for cotangents that may add a term, such as weight decay. A tied parameter is reached if any of its paths is.

    Args:
        f: a function of the model and further arguments, which may be `jax.ShapeDtypeStruct`s, like the model's leaves.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        has_aux: whether `f` returns `(value, aux)`, of which only the value is considered.

    Returns:
        A function with the same arguments as `f`. It returns the layout of the model that trains only the parameters
        that `f` reaches. To see the others, compare it with `tp.layout(model)` by `.diff`; to freeze them, pass it as
        `trainable`.

    Raises:
        ValueError: see `tp.layout`.
        TypeError: the control flow of `f` depends on values, as under `jax.jit`; see also `tp.layout`.
    """
    call = cast(Callable[..., Any], f)

    def layout_of(model: Any, /, *args: Any, **kwargs: Any) -> Layout:
        parts = take_apart(model, trainable)
        # Taken apart and put together, so that objects that may be used once only (`equinox.nn.State`) can be used
        # again.
        leaves, treedef = jtu.tree_flatten((parts.rest, args, kwargs))

        def value(slots: list[Any], given_for_shapes: list[Any]) -> list[Any]:
            given = iter(given_for_shapes)
            rest, args, kwargs = treedef.unflatten([next(given) if _is_shape(leaf) else leaf for leaf in leaves])
            out = call(rest.model(slots), *args, **kwargs)
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(f"with has_aux=True f must return a pair, (value, aux), got {describe(out)}")
            return [leaf for leaf in jtu.tree_leaves(out[0] if has_aux else out) if hasattr(leaf, "dtype")]

        program = traced(value, list(parts.slots), list(filter(_is_shape, leaves)))
        count = len(parts.slots)
        marks = [1 << i if i < count else 0 for i in range(len(program.jaxpr.invars))]
        arrived = functools.reduce(operator.or_, _Differentiable(count).follow(program, marks), 0)
        hit = arrived | arrived >> count
        return trained_at(parts.layout, [leaf for slot, leaf in enumerate(parts.index.positions) if hit >> slot & 1])

    return cast(Any, layout_of)


def _is_shape(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


class _Differentiable(Marks):
    """Passes marks through one operation: two marks for each slot.

    The first mark says that a value has a derivative with respect to the slot. The second says that a rule for
    cotangents, on the way from the slot to the value, adds a term, such as weight decay. It does so as soon as
    cotangents arrive, even if they are zeros, and JAX passes zeros to an operation where it could do without: to all
    results of an operation of which one is used, and to operands for which a rule for cotangents has no derivative. So
    the second marks pass where the first do not.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        # A rule may ask which operands move, and takes long to trace. One that has passed all on is taken to do so
        # again where the same line calls it.
        self._adding: dict[tuple[Any, ...], list[int] | None] = {}

    def pure(self, eqn: JaxprEqn, its: list[int]) -> Sequence[int]:
        """Returns the marks of an operation's results, without those that its derivative does not pass on."""
        kind, floating = Kind.of(eqn), [is_floating(var.aval) for var in eqn.outvars]
        if not any(its) or Kind.FLAT in kind or not any(floating):
            return [0] * len(floating)
        if Kind.RULE in kind or "_prim" in eqn.params:
            found = self._by_rule(eqn, its, floating)
        else:
            # Where an entry goes when sorted is no derivative.
            found = its if eqn.primitive.name == "sort" else super().pure(eqn, its)
            shared = self._additions(found)
            found = [each | shared for each in found]
        return [each if yes else 0 for each, yes in zip(found, floating, strict=True)]

    def _additions(self, marks: Sequence[int]) -> int:
        """Returns the second marks of any of these values."""
        return functools.reduce(operator.or_, marks, 0) >> self._count << self._count

    def _by_rule(self, eqn: JaxprEqn, marks: list[int], floating: list[bool]) -> list[int]:
        moves = [bool(mark) and is_floating(atom.aval) for mark, atom in zip(marks, eqn.invars, strict=True)]
        operands = [i for i, move in enumerate(moves) if move]
        call = (eqn.primitive, eqn.source_info.traceback, *moves, *(str(atom.aval) for atom in eqn.invars))
        every = [operands if yes else [] for yes in floating]
        rows, adding = every, self._adding.get(call, [])
        if operands and call not in self._adding:
            try:
                rows, adding = _dependence(eqn, moves)
            except Exception:  # then so does the derivative, if it comes to that, and says why
                rows, adding = every, []
            if rows == every:
                self._adding[call] = adding
        slots = (1 << self._count) - 1
        of_cotangents = [marks[i] for i in operands] + [(marks[i] & slots) << self._count for i in adding or []]
        shared = 0 if adding is None else self._additions(of_cotangents)
        return [functools.reduce(operator.or_, [marks[i] for i in row], shared) for row in rows]


# An operation with a rule of its own is traced once more with its derivative in moving operands. A derivative that does
# not depend on the tangents, or on the cotangents, is zero only if it is the constant zero: a rule may give anything.


def _dependence(eqn: JaxprEqn, moves: list[bool]) -> tuple[list[list[int]], list[int] | None]:
    """Returns for each result the operands with respect to which it has a derivative.

    If the rule is for cotangents, it also returns the operands whose cotangent may be nonzero at zero cotangents.
    """
    program, is_backward = derivative(eqn, moves)
    operands, results = len(eqn.invars), len(eqn.outvars)
    along = results if is_backward else operands
    other = 1 << along
    found = _Dependent(other).follow(program, [*[other] * operands, *(1 << i for i in range(along))])
    # Of which tangents, or cotangents, each depends; of all of them if it has only the other mark, which means doubt.
    of = [[i for i in range(along) if mark >> i & 1] or list(range(along if mark else 0)) for mark in found]
    if not is_backward:
        return [[i for i in row if moves[i]] for row in of[results:]], None
    moving = [i for i, move in enumerate(moves) if move]
    columns = dict(zip(moving, of[-len(moving) :], strict=True))
    rows = [[i for i, column in columns.items() if result in column] for result in range(results)]
    return rows, [i for i, mark in zip(moving, found[-len(moving) :], strict=True) if mark >> along]


class _Dependent(Marks):
    """Carries a mark for each tangent, or cotangent, that a value depends on.

    One more mark, the other one, means that it may be nonzero where all of these are zeros, because of operands,
    constants, or operations that turn zeros into other numbers.
    """

    def __init__(self, other: int) -> None:
        super().__init__()
        self._other = other

    def of_constant(self, value: Any) -> int:
        numbers = self.numbers_in(value)
        return 0 if numbers is not None and not numbers.any() else self._other

    def operation(self, eqn: JaxprEqn, its: list[int]) -> Sequence[int]:
        zeros = makes_zeros(eqn, [not mark & self._other for mark in its])
        found = super().operation(eqn, its)
        return [each & ~self._other for each in found] if zeros else found

    def opaque(self, marks: Sequence[int]) -> int:
        return self.parts(marks) | self._other

    def chooses(self, mark: int) -> int:
        return mark & ~self._other  # what is chosen does not matter where all that may be chosen is zeros
