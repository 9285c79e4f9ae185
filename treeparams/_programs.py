"""Reads programs as JAX traces them: one table of operations, and one walk along a program.

A walk goes along the operations of a program and keeps a value for each variable. A *domain*, a subclass of `Walk`,
says which value. `tp.reached` and `tp.moved` carry marks of parameters, a check of optimisers carries numbers of
elements, `nested.input_laplacian` carries derivatives. The walk itself knows how operations call programs. It reads a
*hi primitive* in the program that JAX lowers it to.

An operation that is not in the table is *opaque*: nothing is known of it. That is the safe answer in every domain. A
parameter that goes into an opaque operation is reached, and has moved; its elements are equal to no others; there is
no loop.
"""

import contextlib
import enum
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ._tree.types import is_inexact, is_ref

V = TypeVar("V")


# -- The table ---------------------------------------------------------------------------------------------------------


class Kind(enum.Flag):
    """The facts known about an operation. An operation of no kind is opaque."""

    SAME = enum.auto()  # its results are its operands, in their order
    MOVES = enum.auto()  # its results consist of elements of its first operand
    EACH = enum.auto()  # each element of the result is computed from the elements at its place
    SMOOTH = enum.auto()  # as EACH, and the function has derivatives
    LINEAR = enum.auto()  # linear over the reals in all floating operands together
    PIECEWISE = enum.auto()  # made of linear pieces, for real operands
    PRODUCT = enum.auto()  # linear in each of two operands
    ZERO = enum.auto()  # makes zeros of zeros
    FLAT = enum.auto()  # its derivative is zero everywhere
    FILLS = enum.auto()  # may give a number that no operand has: for an index behind the end, the maximum of nothing
    WHOLE = enum.auto()  # a function of its operands of which nothing more is known
    DRAWS = enum.auto()  # draws random numbers
    REF = enum.auto()  # makes, reads or writes a ref
    CALLS = enum.auto()  # runs the program in its parameters on its own operands
    RULE = enum.auto()  # has a rule for its derivative
    BACKWARD = enum.auto()  # and that rule is for cotangents alone

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "Kind":
        """Returns the facts known about an operation."""
        return _KINDS.get(eqn.primitive.name) or _KINDS.get(operation_name(eqn), cls(0))


_TABLE = {
    Kind.SAME: "copy copy_p device_put layout_constraint mesh_cast name optimization_barrier pbroadcast pvary reshard "
    "sharding_constraint",
    Kind.SAME | Kind.FLAT: "stop_gradient",
    Kind.MOVES: "broadcast_in_dim cut dynamic_slice expand_dims reshape rev slice split squeeze tile transpose unstack",
    Kind.MOVES | Kind.FILLS: "gather",
    Kind.LINEAR | Kind.ZERO: "concatenate cumsum dynamic_update_slice join pad psum psum_invariant reduce_sum "
    "scatter-add stack",
    Kind.LINEAR: "fft reduce_window_sum scatter",
    Kind.PIECEWISE | Kind.ZERO | Kind.FILLS: "reduce_max reduce_min",
    Kind.EACH | Kind.LINEAR | Kind.ZERO: "add add_any conj convert_element_type imag neg real select_n sub",
    Kind.EACH | Kind.LINEAR: "complex reduce_precision",
    Kind.EACH | Kind.PIECEWISE | Kind.ZERO: "abs max min",
    Kind.EACH | Kind.PIECEWISE: "clamp",
    Kind.EACH | Kind.PRODUCT: "and mul",
    Kind.PRODUCT | Kind.WHOLE: "conv_general_dilated dot_general",
    Kind.EACH | Kind.SMOOTH | Kind.ZERO: "sqrt square",
    Kind.EACH | Kind.SMOOTH: "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp "
    "exp2 expm1 integer_pow lgamma log log1p log2 logistic one_minus_square pow rsqrt sin sinh tan tanh",
    Kind.EACH | Kind.FLAT | Kind.ZERO: "sign",
    Kind.EACH | Kind.FLAT: "ceil floor round",
    Kind.EACH: "alike bessel_i0e bessel_i1e bitcast_convert_type clz eq eq_to ge gt igamma igamma_grad_a igammac "
    "is_finite le le_to lt lt_to mulhi ne nextafter not or polygamma population_count regularized_incomplete_beta rem "
    "shift_left shift_right_arithmetic shift_right_logical xor zeta",
    Kind.PIECEWISE | Kind.WHOLE: "sort",
    Kind.WHOLE: "all_gather all_to_all approx_top_k argmax argmin axis_index cholesky cholesky_update cumlogsumexp "
    "cummax cummin cumprod custom_linear_solve eig eigh geqrf geqp3 hessenberg householder_product iota lu "
    "lu_pivots_to_permutation ormqr pmax pmin ppermute qr ragged_dot ragged_dot_general random_clone random_seed "
    "random_unwrap random_wrap reduce reduce_and reduce_or reduce_prod reduce_window reduce_window_max "
    "reduce_window_min reduce_xor scatter-max scatter-min scatter-mul scatter-sub schur select_and_gather_add "
    "select_and_scatter select_and_scatter_add svd symmetric_product top_k triangular_solve tridiagonal "
    "tridiagonal_solve",
    Kind.DRAWS | Kind.WHOLE: "random_bits random_fold_in random_gamma random_split rng_bit_generator rng_uniform "
    "threefry2x32",
    Kind.REF: "addupdate freeze get new_ref swap",
    Kind.CALLS: "checkpoint closed_call core_call custom_vmap_call eval_jaxpr jit remat remat2 shard_map",
    Kind.CALLS | Kind.RULE: "custom_jvp_call",
    Kind.CALLS | Kind.RULE | Kind.BACKWARD: "custom_vjp_call custom_vjp_call_jaxpr",
    Kind.RULE: "CustomJVPTraced",  # names of hi primitives begin with a capital
    Kind.RULE | Kind.BACKWARD: "CustomVJPTraced",
}
_KINDS = {name: kind for kind, names in _TABLE.items() for name in names.split()}

# Of these operations other operands say where the values go.
_VALUES = {"dynamic_update_slice": slice(2), "scatter": slice(0, 3, 2), "select_n": slice(1, None)}
_VALUES["scatter-add"] = _VALUES["scatter"]


def operation_name(eqn: JaxprEqn) -> str:
    """Returns the name of an operation."""
    # A hi primitive, one of those that JAX lowers to others (`jax.experimental.hijax`), is a parameter.
    return type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else eqn.primitive.name


def makes_zeros(eqn: JaxprEqn, zeros: Sequence[bool]) -> bool:
    """Returns whether an operation gives zeros if some of its operands are zeros and the others are finite."""
    name, kind = eqn.primitive.name, Kind.of(eqn)
    if name == "div":
        return zeros[0] and not zeros[1]  # and not of zero by zero
    if Kind.PRODUCT in kind:
        return any(zeros)
    if Kind.MOVES in kind:
        return zeros[0]
    return bool(kind & (Kind.SAME | Kind.ZERO)) and all(zeros[_VALUES.get(name, slice(None))])


def is_linear(eqn: JaxprEqn, which: Sequence[bool]) -> bool:
    """Returns whether an operation is linear in those of its operands together."""
    kind = Kind.of(eqn)
    if Kind.PRODUCT in kind:
        return sum(which) == 1
    return bool(kind & (Kind.SAME | Kind.MOVES | Kind.LINEAR)) or (eqn.primitive.name == "div" and not which[1])


# -- The walk ----------------------------------------------------------------------------------------------------------


class Walk(Generic[V]):
    """Goes along a program and keeps a value for each variable. A subclass says which."""

    def __init__(self) -> None:
        self._lowered: dict[int, tuple[JaxprEqn, ClosedJaxpr | None]] = {}  # by the id of the operation, which is kept

    def run(self, program: ClosedJaxpr, args: Sequence[V]) -> list[V]:
        """Returns the values of a program's results from those of its arguments."""
        jaxpr = program.jaxpr
        known = dict(zip(jaxpr.invars, args, strict=True))
        known.update(zip(jaxpr.constvars, map(self.constant, program.consts), strict=True))
        # A literal has no entry: it is a constant that stands in the operation itself.
        for eqn in jaxpr.eqns:
            its = [self.literal(atom) if isinstance(atom, Literal) else known[atom] for atom in eqn.invars]
            known.update(zip(eqn.outvars, self.step(eqn, its), strict=True))
        return [self.literal(atom) if isinstance(atom, Literal) else known[atom] for atom in jaxpr.outvars]

    def literal(self, atom: Literal) -> V:
        """Returns the value of a constant in an operation."""
        return self.constant(atom.val)

    def step(self, eqn: JaxprEqn, its: list[V]) -> Sequence[V]:
        """Returns the values of an operation's results."""
        within = self.within(eqn)
        return self.operation(eqn, its) if within is None else within(its)

    def within(self, eqn: JaxprEqn) -> Callable[[list[V]], Sequence[V]] | None:
        """Returns the function from operands to results that goes through the programs in an operation, or `None`."""
        own = getattr(self, f"of_{eqn.primitive.name}", None)  # such as `of_scan`, if the domain follows scans
        if own is not None:
            return functools.partial(own, eqn)
        program = self.program_of(eqn)
        return None if program is None else functools.partial(self.run, program)

    def program_of(self, eqn: JaxprEqn) -> ClosedJaxpr | None:
        """Returns the program that an operation runs on its own operands, or `None`."""
        if "_prim" not in eqn.params:
            ends = len(eqn.invars), len(eqn.outvars)
            within = programs(eqn) if Kind.CALLS in Kind.of(eqn) else ()
            return next((each for each in within if (len(each.jaxpr.invars), len(each.jaxpr.outvars)) == ends), None)
        if id(eqn) not in self._lowered:
            self._lowered[id(eqn)] = eqn, _lowered(eqn)
        return self._lowered[id(eqn)][1]

    @staticmethod
    def scan_operands(eqn: JaxprEqn, its: list[V]) -> tuple[list[V], list[V], list[V]]:
        """Returns the operands of a scan that stay as they are, those that are carried, and those that it goes over."""
        params = eqn.params
        if "ft_in" in params:  # since JAX 0.12
            fixed, count, _ = map(len, params["ft_in"].unpack())
        else:
            fixed, count = params["num_consts"], params["num_carry"]
        return its[:fixed], its[fixed : fixed + count], its[fixed + count :]

    def while_round(self, eqn: JaxprEqn, its: list[V], carried: list[V]) -> tuple[V, list[V]]:
        """Returns the value of a loop's condition, and those that it carries after one more round."""
        params = eqn.params
        start, end = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        (goes_on,) = self.run(params["cond_jaxpr"], [*its[:start], *carried])
        return goes_on, self.run(params["body_jaxpr"], [*its[start:end], *carried])

    def constant(self, value: Any) -> V:
        """Returns the value of a constant, which is `None` if it is not available."""
        return value

    def operation(self, eqn: JaxprEqn, its: list[V]) -> Sequence[V]:
        """Returns the values of the results of an operation that runs no program, or one that is not known."""
        raise NotImplementedError


class _Cell:
    """The mark of the array in a ref. An operation that writes to the ref changes it."""

    def __init__(self, mark: Any, lasts: bool = False) -> None:
        self.mark = mark
        self.lasts = lasts  # whether the ref was there before the program


class Marks(Walk[Any]):
    """Carries marks from the arguments of a program to its results; they tell which arguments it may depend on.

    A mark is a set: an integer, whose bits say where a value comes from, or a `frozenset`. A result has the marks of
    all operands, unless a subclass knows better. Loops run until no new marks appear. So the error is one-sided: a
    result may depend on less than its marks say, never on more.
    """

    nothing: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self._done: dict[tuple[Any, ...], list[Any]] = {}  # many operations may call one program
        self._cells: list[_Cell] = []
        self._refs: dict[int, _Cell] = {}  # of constants, by their id

    def follow(self, program: ClosedJaxpr, marks: Sequence[Any]) -> list[Any]:
        """Returns the marks of a program's results; the mark of a ref is that of the array in it."""
        pairs = zip(program.jaxpr.invars, marks, strict=True)
        return self.run(program, [self._cell(mark) if is_ref(var) else mark for var, mark in pairs])

    def _cell(self, mark: Any, lasts: bool = False) -> _Cell:
        self._cells.append(_Cell(mark, lasts))
        return self._cells[-1]

    def run(self, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Returns the marks of a program's results from those of its arguments."""
        key = id(program.jaxpr), *map(id, program.consts), *args
        if self._cells or key not in self._done:
            found = super().run(program, args)
            if self._cells:  # the same program may find other values in a ref
                return found
            self._done[key] = found
        return self._done[key]

    def constant(self, value: Any) -> Any:
        """Returns the mark of a constant."""
        if not is_ref(value):
            return self.of_constant(value)
        if id(value) not in self._refs:
            self._refs[id(value)] = self._cell(self.of_constant(None), lasts=True)
        return self._refs[id(value)]

    def of_constant(self, value: Any) -> Any:
        """Returns the mark of a constant that is no ref."""
        return self.nothing

    def numbers_in(self, constant: Any) -> np.ndarray | None:
        """Returns the numbers in a constant of a program, or `None` if they cannot be read."""
        if isinstance(constant, Tracer) or constant is None or is_ref(constant):
            return None
        if isinstance(constant, jax.Array) and (constant.is_deleted() or not constant.is_fully_addressable):
            return None
        dtype = getattr(constant, "dtype", float)
        return np.asarray(constant) if any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_)) else None

    def step(self, eqn: JaxprEqn, its: list[Any]) -> Sequence[Any]:
        """Returns the marks of an operation's results."""
        if Kind.REF in Kind.of(eqn):
            return self._of_ref(eqn, its)
        refs = [each for each in its if isinstance(each, _Cell)]
        if not refs:
            return self.pure(eqn, its)
        within = self.within(eqn)
        if within is not None:
            return within(its)
        # Whoever is given a ref may write all that it has been given.
        every = self.opaque([each.mark if isinstance(each, _Cell) else each for each in its])
        for ref in refs:
            ref.mark |= every
        return [every] * len(eqn.outvars)

    def pure(self, eqn: JaxprEqn, its: list[Any]) -> Sequence[Any]:
        """Returns the marks of the results of an operation that is given no refs."""
        return super().step(eqn, its)

    def operation(self, eqn: JaxprEqn, its: list[Any]) -> Sequence[Any]:
        """Returns the marks of the results of an operation that runs no program."""
        return its if Kind.SAME in Kind.of(eqn) else [self.opaque(its)] * len(eqn.outvars)

    def opaque(self, marks: Sequence[Any]) -> Any:
        """Returns the mark of whatever is computed from these."""
        return self.parts(marks)

    def parts(self, marks: Sequence[Any]) -> Any:
        """Returns the mark of an array that consists of elements of some of these, chosen by the others."""
        return functools.reduce(operator.or_, marks, self.nothing)

    def _of_ref(self, eqn: JaxprEqn, its: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "new_ref":
            return [self._cell(its[0])]
        ref, *given = its
        held = ref.mark
        if name == "freeze":
            return [held]
        aval: Any = eqn.invars[0].aval
        is_whole = len(given) == int(name != "get") and eqn.params["tree"] == _whole_ref(aval.inner_aval)
        if name == "addupdate":
            ref.mark = self.opaque([held, *given])
            return []
        if name == "swap":
            ref.mark = given[0] if is_whole and not ref.lasts else self.parts([held, *given])
            del given[0]
        return [held if is_whole else self.parts([held, *given])]

    # -- Branches and loops

    def chooses(self, mark: Any) -> Any:
        """Returns the mark that passes from the value that chooses a branch, or ends a loop, to the results."""
        return mark

    def row(self, eqn: JaxprEqn, mark: Any) -> Any:
        """Returns the mark of one row of an array that a scan goes over."""
        return mark

    def rows(self, eqn: JaxprEqn, mark: Any) -> Any:
        """Returns the mark of the array that a scan makes of the rows that its rounds return."""
        return mark

    def later(self, eqn: JaxprEqn, mark: Any) -> Any:
        """Returns the mark that a value has in the rounds, and after the scan, that follow the round it comes from."""
        return mark

    def of_cond(self, eqn: JaxprEqn, its: list[Any]) -> Sequence[Any]:
        """Returns the marks of a choice: each result may be of any branch."""
        by, held = self.chooses(its[0]), self._held()
        ends, found = [], []
        for branch in eqn.params["branches"]:
            self._hold(held)
            found.append(self.run(branch, its[1:]))
            ends.append(self._held())
        self._hold([functools.reduce(operator.or_, each, by) for each in zip(*ends, strict=False)])
        return [functools.reduce(operator.or_, each, by) for each in zip(*found, strict=True)]

    def of_scan(self, eqn: JaxprEqn, its: list[Any]) -> Sequence[Any]:
        """Returns the marks of a scan."""
        fixed, carried, along = self.scan_operands(eqn, its)
        rows = [self.row(eqn, mark) for mark in along]
        after, found = self._loop(eqn, lambda now: self.run(eqn.params["jaxpr"], [*fixed, *now, *rows]), carried)
        return [*after, *(self.rows(eqn, mark) for mark in found[len(carried) :])]

    def of_while(self, eqn: JaxprEqn, its: list[Any]) -> Sequence[Any]:
        """Returns the marks of a loop: how often its body runs is up to the condition, so all depends on that."""

        def once(carried: list[Any]) -> list[Any]:
            goes_on, found = self.while_round(eqn, its, carried)
            return [self.chooses(goes_on) | each for each in found]

        return self._loop(eqn, once, its[len(its) - len(eqn.outvars) :])[0]

    def _loop(
        self, eqn: JaxprEqn, once: Callable[[list[Any]], list[Any]], carried: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns the marks of the carried values after any number of rounds, and the results of such a round."""
        # Marks are only added, and there are finitely many, so it ends.
        while True:
            held = self._held()
            found = once(carried)
            now = [old | self.later(eqn, ref.mark) for old, ref in zip(held, self._cells, strict=False)]
            after = [old | self.later(eqn, new) for old, new in zip(carried, found, strict=False)]
            self._hold(now)
            if (now, after) == (held, carried):
                return carried, found
            carried = after

    def _held(self) -> list[Any]:
        return [ref.mark for ref in self._cells]

    def _hold(self, marks: Iterable[Any]) -> None:
        # Refs that were made inside a branch or a loop end with it.
        count = len(marks := list(marks))
        self._cells = self._cells[:count] + [ref for ref in self._cells[count:] if ref.lasts]
        for ref, mark in zip(self._cells, marks, strict=False):
            ref.mark = mark


@functools.lru_cache(256)
def _whole_ref(aval: Any) -> Any:
    """Returns the index that JAX writes for `...` where a ref of this type is read or written."""
    return jax.make_jaxpr(lambda array: jax.new_ref(array)[...])(aval).jaxpr.eqns[-1].params["tree"]


# -- Operations --------------------------------------------------------------------------------------------------------


def _lowered(eqn: JaxprEqn) -> ClosedJaxpr | None:
    lower: Any = getattr(eqn.primitive, "to_lojax", None)
    try:
        return jax.make_jaxpr(functools.partial(lower, **eqn.params))(*[atom.aval for atom in eqn.invars])
    except Exception:  # its operands are of types of their own, or this version of JAX lowers otherwise
        return None


def programs(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Returns the programs in the parameters of an operation; constants that are not available are `None`."""
    values = [each if isinstance(each, (tuple, list)) else (each,) for each in eqn.params.values()]
    found = [each for value in values for each in value if isinstance(each, (ClosedJaxpr, Jaxpr))]
    closed = lambda program: ClosedJaxpr(program, [None] * len(program.constvars))
    return [each if isinstance(each, ClosedJaxpr) else closed(each) for each in found]


def bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Applies an operation to these operands and returns its results."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # since JAX 0.9.2 they are a parameter
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def derivative(eqn: JaxprEqn, moves: Sequence[bool]) -> tuple[ClosedJaxpr, bool]:
    """Returns the program of an operation and its derivative in the operands that move, and whether it is backwards.

    Forwards it maps operands and tangents, one for each operand, to results and their tangents. Backwards, for a rule
    for cotangents, it maps operands and cotangents, one for each result, to the floating results and the cotangents of
    the operands that move.
    """

    def forwards(values: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
        moving, still = eqx.partition(values, list(moves))
        along = eqx.filter(tangents, list(moves))
        return jax.jvp(lambda moving: bind(eqn, eqx.combine(moving, still)), (moving,), (along,))

    def backwards(values: list[Any], cotangents: list[Any]) -> tuple[list[Any], Any]:
        moving, still = eqx.partition(values, list(moves))
        outs, pull_back = jax.vjp(lambda moving: eqx.filter(bind(eqn, eqx.combine(moving, still)), kept), moving)
        return outs, pull_back(eqx.filter(cotangents, kept))

    operands, results = ([var.aval for var in some] for some in (eqn.invars, eqn.outvars))
    kept = list(map(is_floating, results))
    if Kind.BACKWARD not in Kind.of(eqn):
        with contextlib.suppress(TypeError):  # a hi primitive without a rule for tangents
            return jax.make_jaxpr(forwards)(operands, operands), False
    return jax.make_jaxpr(backwards)(operands, results), True


def traced(f: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Traces a user's function to a program; if the function needs values, the error explains why there are none."""
    try:
        return jax.make_jaxpr(f)(*args)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.NonConcreteBooleanIndexError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        error.add_note("the function is traced, as by jit, so its control flow must not depend on values of the model")
        raise


def is_floating(aval: object) -> bool:
    """Returns whether a value of this type, floating or complex, may have a derivative."""
    return is_inexact(getattr(aval, "dtype", bool))
