"""Derivatives of a model's output in its input, for losses that contain them.

`input_laplacian` evaluates a program with the Jacobian and the Laplacian of each intermediate result beside its value.
If `y = g(z)` and z is known to second order, the Jacobian is `g' J` and the Laplacian `g' l + sum_i g''[J_i, J_i]`:
all second derivatives are summed as soon as they arise (Li et al., 2024, "A computational framework for neural
network-based variational Monte Carlo with Forward Laplacian"). Only the last term needs a rule for each primitive.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from .._programs import Kind, Walk, bind, derivative, is_floating, is_linear, operation_name, programs
from .._tree.structure import structure_of
from .._tree.text import describe, warn
from .._tree.types import PyTree
from ._reals import basis, in_sweeps, output, result

_ONE_POINT = "one point x (for many map what nested returns: jax.vmap(nested.input_gradient(f), (None, 0)))"
_LONGEST = 32  # chains that branch off at each step would be replayed from their root each time


@overload
def input_laplacian(f: Callable[..., Array], *, full: Literal[False] = False) -> Callable[..., Array]: ...


@overload
def input_laplacian(f: Callable[..., Array], *, full: Literal[True]) -> Callable[..., tuple[Array, Array, Array]]: ...


def input_laplacian(f: Callable[..., Array], *, full: bool = False) -> Callable[..., Any]:
    """Computes the Laplacian of `f(model, x, *args)` in x, for one point x: the trace of the Hessian, for a loss.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> f = lambda model, x: jnp.sin(model["k"] * x[0]) * jnp.exp(x[1])
    >>> model, x = {"k": jnp.array(2.0)}, jnp.array([0.5, 0.0])
    >>> print(f"{nested.input_laplacian(f)(model, x):.3f}")  # (1 - k^2) sin(k x_0)
    -2.524
    >>> print(f"{tp.grad(nested.input_laplacian(f))(model, x)['k']:.3f}")
    -4.176

    Value, Jacobian and Laplacian go forward together through the program (Li et al., 2024, "Forward Laplacian"), which
    takes about half the operations of the Hessian's trace. It works on one point; for many write
    `jax.vmap(nested.input_laplacian(f), (None, 0))`. It has rules for:

    - linear and piecewise linear operations: sums, reshapes, slices, gathers, padding, `max`, `sort`, `where`;
    - products: `dot_general`, convolutions, `mul`;
    - functions of each entry: `exp`, `tanh`, `erf`, `logistic`, powers, quotients and the like, and whole functions of
      `jax.nn` that are made of them, such as `gelu`, as one;
    - `jax.jit` and `jax.checkpoint` around all this, and functions with a rule for `jvp`, whose rule is used.

    Intermediate results and the output may be complex. Anything else that JAX differentiates forward (loops, branches,
    factorisations) is as exact, by one second derivative of that operation alone per entry of x, and you get a warning
    that names it. It does not exploit entries of x that are treated independently.

    Args:
        f: called as `f(model, x, *args)` with an array x, returns an array.
        full: whether to return `(value, jacobian, laplacian)`, all of the same pass.

    Returns:
        A function of `(model, x, *args)` that returns the Laplacian, of the output's shape; the Jacobian has shape
        `(*out, *in)`.

    Raises:
        TypeError: when called: x is no real floating array, or the output no floating or complex one; a function has a
            rule for `vjp` alone (within a loop the error is JAX's own).
    """

    def of(model: PyTree, x: object, *args: object) -> Any:
        x = _real_array(x)
        closed = jax.make_jaxpr(lambda x: output(result(f, _ONE_POINT, model, x, *args), "floating or complex"))(x)
        forward = _Forward()
        y = _series(*forward.run(closed, [_Series(x, basis(x), jnp.zeros_like(x))]))
        if forward.unknown:
            names = ", ".join(sorted(forward.unknown))
            warn(
                f"nested.input_laplacian has no rule for {names}: the result is exact, but takes one second derivative "
                "of that part per entry of the input"
            )
        if not isinstance(y, _Series):  # it does not depend on x
            aval: Any = closed.out_avals[0]
            y = jnp.asarray(y, aval.dtype)
            y = _Series(y, jnp.zeros((x.size, *y.shape), y.dtype), jnp.zeros_like(y))
        if not full:
            return y.laplacian
        return y.value, jnp.moveaxis(y.jacobian, 0, -1).reshape(*y.value.shape, *x.shape), y.laplacian

    return of


_Function = Callable[..., list[Any]]  # of values, returns the results


class _Series(NamedTuple):
    """An intermediate result with its derivatives; n is the number of entries of the input."""

    value: jax.Array
    jacobian: jax.Array  # (n, *shape)
    laplacian: jax.Array  # the shape of the value


class _Chain:
    """A result that is an elementwise function of one series, through any number of equations.

    Its Jacobian is computed for all of them at once, on demand, so that n numbers per entry are written once and not at
    each equation: three times as fast for a dense net with `jax.nn.gelu`, which is ten equations.
    """

    def __init__(self, root: _Series, eqn: JaxprEqn, operands: list[Any], value: jax.Array) -> None:
        self.root, self.eqn, self.operands, self.value = root, eqn, operands, value
        earlier = [operand.steps for operand in operands if isinstance(operand, _Chain)]
        self.steps: dict[int, _Chain] = {key: step for steps in earlier for key, step in steps.items()}
        self.steps[id(self)] = self

    @functools.cached_property
    def series(self) -> _Series:
        """The result with its derivatives."""

        def replay(value: jax.Array) -> list[Any]:
            done: dict[int, Any] = {id(self.root): value}
            for key, step in self.steps.items():
                (done[key],) = bind(step.eqn, [done.get(id(operand), operand) for operand in step.operands])
            return [done[id(self)]]

        return _elementwise(replay, [self.root])


def _series(operand: object) -> Any:
    return operand.series if isinstance(operand, _Chain) else operand


class _Forward(Walk[Any]):
    """Carries series, chains, or arrays and numbers that do not depend on the input.

    Attributes:
        unknown: the names of the operations that have no rule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unknown = set[str]()

    def step(self, eqn: JaxprEqn, its: list[Any]) -> Sequence[Any]:
        which = [isinstance(operand, _Series | _Chain) for operand in its]
        depends = [operand for operand, moves in zip(its, which, strict=True) if moves]
        values = [operand.value if moves else operand for operand, moves in zip(its, which, strict=True)]
        kept = [is_floating(var.aval) for var in eqn.outvars]
        if not depends or not any(kept) or eqn.primitive.name == "stop_gradient":
            return bind(eqn, values)
        pointwise = _is_pointwise(eqn, depends)
        longest = max(len(each.steps) if isinstance(each, _Chain) else 0 for each in depends)
        # A bias that is added to a series leaves its Jacobian as it is; within a chain it would be multiplied by ones.
        begins_linear = longest == 0 and _is_linear_in(eqn, which)
        roots = [each.root if isinstance(each, _Chain) else each for each in depends]
        is_of_one = all(each is roots[0] for each in roots)
        if pointwise and is_of_one and not begins_linear and longest < _LONGEST:
            return [_Chain(roots[0], eqn, its, *bind(eqn, values))]
        program = self.program_of(eqn)
        if program is not None and _is_call(eqn) and not pointwise:
            return self.run(program, its)
        if program is not None and "policy" in eqn.params:  # jax.checkpoint

            def run(operands: list[Any]) -> list[Any]:
                return list(map(_series, self.run(program, operands)))

            policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
            return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(list(map(_series, its)))

        def of(*moving: jax.Array) -> list[Any]:
            """The equation as a function of the operands that depend on the input; returns the floating results."""
            given = iter(moving)
            filled = [next(given) if moves else value for moves, value in zip(which, values, strict=True)]
            return [result for result, keep in zip(bind(eqn, filled), kept, strict=True) if keep]

        found = iter(self._through(eqn, which, pointwise, of, list(map(_series, depends))))
        others = kept if all(kept) else bind(eqn, values)
        return [next(found) if keep else other for other, keep in zip(others, kept, strict=True)]

    def _through(
        self, eqn: JaxprEqn, which: list[bool], pointwise: bool, of: _Function, depends: list[_Series]
    ) -> list[_Series]:
        """Returns the floating results of an operation, by the best rule that applies."""
        kind = Kind.of(eqn)
        if _is_linear_in(eqn, which):
            return _linear(of, depends)
        if Kind.PRODUCT in kind:
            return _bilinear(eqn, of, depends)
        if Kind.SMOOTH in kind or pointwise:
            return [_elementwise(of, depends)]
        if Kind.BACKWARD in kind:
            raise TypeError(
                "f calls a function with a rule for vjp alone (jax.custom_vjp), which has no forward derivative; give "
                "it a rule for jvp, or use the trace of jax.jacrev(jax.grad(f))"
            )
        if Kind.RULE not in kind and eqn.primitive.name != "abs":
            self.unknown.add(operation_name(eqn))
        return _traced(of, depends)


# -- Through one operation ---------------------------------------------------------------------------------------------


def _is_linear_in(eqn: JaxprEqn, which: Sequence[bool]) -> bool:
    """Returns whether an equation is linear, at least in pieces, in those of its operands together."""
    return not _is_complex(eqn) if Kind.PIECEWISE in Kind.of(eqn) else is_linear(eqn, which)


def _is_complex(eqn: JaxprEqn) -> bool:
    return any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in _avals(eqn))


def _avals(eqn: JaxprEqn) -> list[Any]:
    """Returns the shapes and dtypes of the operands and the results."""
    return [var.aval for var in (*eqn.invars, *eqn.outvars)]


def _linear(of: _Function, depends: list[_Series]) -> list[_Series]:
    values, jacobians, laplacians = zip(*depends, strict=True)
    results, laplacians = jax.jvp(of, values, laplacians)
    pushed = jax.vmap(lambda *tangents: jax.jvp(of, values, tangents)[1])(*jacobians)
    return list(map(_Series, results, pushed, laplacians))


def _bilinear(eqn: JaxprEqn, of: _Function, depends: list[_Series]) -> list[_Series]:
    (found,) = _linear(of, depends)
    a, b = (operand.jacobian for operand in depends)
    if eqn.primitive.name == "dot_general":  # the products for all entries of the input, summed by the product itself
        pairs = eqn.params["dimension_numbers"]
        contracted, batched = ([tuple(axis + 1 for axis in axes) for axes in pair] for pair in pairs)
        numbers = tuple((0, *axes) for axes in contracted), tuple(batched)
        crossed = eqn.primitive.bind(a, b, **eqn.params | {"dimension_numbers": numbers})
    else:
        crossed = jnp.sum(jax.vmap(of)(a, b)[0], 0)
    return [found._replace(laplacian=found.laplacian + 2 * crossed)]


def _elementwise(of: _Function, depends: Sequence[_Series]) -> _Series:
    """Applies a function of entries at one index, with broadcasting: its derivative is one number per entry."""
    values, jacobians, laplacians = zip(*depends, strict=True)
    (result,) = of(*values)
    count, dtype = len(depends), result.dtype
    ones = [tuple(jnp.full_like(value, i == j) for i, value in enumerate(values)) for j in range(count)]
    first = [lambda *values, ones=each: jax.jvp(of, values, ones)[1][0] for each in ones]
    # Axes of length one after the first, for a scalar beside an array.
    jacobians = [jnp.expand_dims(each, tuple(range(1, 2 + result.ndim - each.ndim))) for each in jacobians]
    jacobian, laplacian = jnp.zeros((), dtype), jnp.zeros((), dtype)
    for j in range(count):
        slope = first[j](*values)
        jacobian += jnp.expand_dims(slope, 0) * jacobians[j].astype(dtype)
        laplacian += slope * laplacians[j].astype(dtype)
        for i in range(j + 1):
            curvature = (1 if i == j else 2) * jax.jvp(first[j], values, ones[i])[1]
            laplacian += curvature * jnp.sum(jacobians[i] * jacobians[j], 0).astype(dtype)
    return _Series(result, jacobian, laplacian)


def _traced(of: _Function, depends: list[_Series]) -> list[_Series]:
    """Applies any primitive: the last term by second derivatives, one per entry of the input."""
    values, jacobians, _ = zip(*depends, strict=True)

    def second(*tangents: jax.Array) -> list[Any]:
        return jax.jvp(lambda *values: jax.jvp(of, values, tangents)[1], values, tangents)[1]

    last, found = jax.vmap(second)(*jacobians), _linear(of, depends)
    return [own._replace(laplacian=own.laplacian + jnp.sum(each, 0)) for own, each in zip(found, last, strict=True)]


# -- Which operations are elementwise ----------------------------------------------------------------------------------


def _is_call(eqn: JaxprEqn) -> bool:
    """Returns whether an equation calls a program, whose derivative JAX finds in it."""
    return eqn.primitive.name in ("jit", "closed_call", "eval_jaxpr")


def _is_pointwise(eqn: JaxprEqn, depends: Sequence[Any]) -> bool:
    """Returns whether an equation, and all that it calls, act on each entry of real operands of the result's shape."""
    shapes = {aval.shape for aval in _avals(eqn)[len(eqn.invars) :]} | {operand.value.shape for operand in depends}
    # A choice between two operands, as `jnp.where` is, does not look at the slope of the other one.
    is_choice = _is_call(eqn) and len(depends) > 1
    return len(shapes) == 1 and len(eqn.outvars) == 1 and not is_choice and _is_within(eqn, shapes.pop())


def _is_within(eqn: JaxprEqn, shape: tuple[int, ...], rules: int = 2) -> bool:
    # Nothing here makes a scalar of an array of the shape: scalars do not depend on the input unless all is one.
    if not all(aval.shape in ((), shape) for aval in _avals(eqn)) or _is_complex(eqn):
        return False
    within, kind = programs(eqn) if _is_call(eqn) else [], Kind.of(eqn)
    if Kind.RULE in kind and Kind.BACKWARD not in kind:
        # A rule may call its own function for the value, which has the rule again; two derivatives are taken.
        within = programs(eqn)[:1]
        if rules > 0:
            within.append(derivative(eqn, [is_floating(var.aval) for var in eqn.invars])[0])
            rules -= 1
    if within:
        return all(_is_within(each, shape, rules) for program in within for each in program.eqns)
    return bool(kind & (Kind.EACH | Kind.SAME)) or eqn.primitive.name == "broadcast_in_dim"


# -- Gradients and Jacobians -------------------------------------------------------------------------------------------

_ROUNDING = 16  # units of the dtype that a sample's output may differ by; in most programs it differs by nothing


def input_gradient(f: Callable[..., Array]) -> Callable[..., PyTree]:
    """Computes the gradient of `f(model, x, *args)` in x, for one point x, for use in a loss.

    The gradient of that loss reaches all parameters of the model, arrays that f captured, x and the other arguments.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> energy = lambda model, x: model["k"] * jnp.sum(x**2)
    >>> force = nested.input_gradient(energy)
    >>> model, x = {"k": jnp.array(2.0), "frozen": jnp.ones(1)}, jnp.array([1.0, 3.0])
    >>> force(model, x)
    Array([ 4., 12.], dtype=float32)
    >>> loss = lambda model: jnp.sum(force(model, x) ** 2)  # 4 k^2 x^2
    >>> tp.grad(loss, "k")(model)["k"]
    Array(160., dtype=float32, weak_type=True)

    It is `jax.grad` in x, so the gradient of the loss is reverse over reverse; for the cost of other orders see "A
    derivative in a loss" in the documentation. The model may be a bound method of a Module or a
    `jax.tree_util.Partial`, which carry their parameters:
    `nested.input_gradient(lambda energy, x: energy(x))(net.energy, x)`. It works on one point;
    `jax.vmap(force, (None, 0))` takes many. If you only have f for a batch, use
    `nested.input_jacobian(f, batched=True)`.

    Args:
        f: called as `f(model, x, *args)`, once, returns a scalar.

    Returns:
        A function of `(model, x, *args)` that returns the gradient, a tree like x.

    Raises:
        TypeError: when called: x has a leaf that is not floating; f returns no real floating scalar.
    """

    def of(model: PyTree, x: PyTree, *args: object) -> PyTree:
        for i, leaf in enumerate(jax.tree.leaves(x)):
            if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact):
                path = structure_of(x)[2].paths[i]
                got = describe(leaf) + (f" at {path!r}" if path else "")
                raise TypeError(f"expected x to be floating, got {got}; convert it, or pass it in *args")

        def of_x(x: PyTree) -> Any:
            y = output(result(f, _ONE_POINT, model, x, *args))
            if y.shape:
                raise TypeError(
                    f"expected f to return a scalar, got {describe(y)}; use nested.input_jacobian, for one number per "
                    "sample of a batch with batched=True"
                )
            return y

        return jax.grad(of_x)(jax.tree.map(jnp.asarray, x))

    return of


def input_jacobian(
    f: Callable[..., Array], *, batched: bool | Literal["check"] = False, chunk: int | None = None
) -> Callable[..., Array]:
    """Computes the Jacobian of `f(model, x, *args)` in x, for one point x or each of a batch, for use in a loss.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> f = lambda model, x: model["w"] @ x**2
    >>> model, x = {"w": jnp.array([[1.0, 2.0], [0.0, 1.0]])}, jnp.array([1.0, 3.0])
    >>> nested.input_jacobian(f)(model, x)
    Array([[ 2., 12.],
           [ 0.,  6.]], dtype=float32)
    >>> tp.grad(lambda model: jnp.trace(nested.input_jacobian(f)(model, x)))(model)["w"]
    Array([[2., 0.],
           [0., 6.]], dtype=float32)

    If x has no more entries than the output, it goes by columns, one forward sweep for each entry of x; otherwise by
    rows, one backward sweep for each entry of the output.

    With `batched=True`, for an f that you only have for a batch, you get the Jacobian of each sample's output in its
    own input; if f returns one number per sample, that is the gradient of each, by one backward pass:

    >>> f = lambda model, xs: jnp.sum(model["k"] * xs**2, axis=1)
    >>> nested.input_jacobian(f, batched=True)({"k": jnp.array(2.0)}, jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    Array([[ 4.,  8.],
           [12., 16.]], dtype=float32)

    The Jacobian over the whole batch has a block per pair of samples; if samples do not mix, all but the diagonal
    blocks are zero. So one direction serves all samples at once, which takes as many operations as
    `jax.vmap(jax.jacfwd(f))`, or `jacrev`, of an f for one sample.

    Args:
        f: called as `f(model, x, *args)` with an array x, once, returns an array. If batched, x is of shape
            `(batch, *in)`, the result of shape `(batch, *out)`, and each output must depend only on its sample's input
            (no normalisation over the batch).
        batched: whether the first axis is that of samples. `"check"`: and f is checked to mix no two of them, with one
            sweep for each binary digit of their number. The check needs values, so it does not work inside of a trace.
        chunk: how many sweeps are done at once, which bounds the memory; `None`: all.

    Returns:
        A function of `(model, x, *args)` that returns the Jacobian, shape `(*out, *in)`, or `(batch, *out, *in)`.

    Raises:
        ValueError: there is no such `batched`; when called: `chunk` is no count; x or the output has no batch axis, or
            another batch size; `batched="check"` and f mixes samples.
        TypeError: when called: x or the output is no real floating array; `batched="check"` inside of a trace.
    """
    if batched not in (False, True, "check"):
        raise ValueError(f"batched must be True, False or 'check', got {batched!r}")
    given = "a batch, with batched=True" if batched else _ONE_POINT

    def of(model: PyTree, x: object, *args: object) -> jax.Array:
        x = _real_array(x)

        def of_x(x: jax.Array) -> jax.Array:
            y = output(result(f, given, model, x, *args))
            if batched and (x.shape[:1] != y.shape[:1] or x.shape == ()):
                raise ValueError(f"expected f from (batch, ...) to (batch, ...), got shapes {x.shape} and {y.shape}")
            return y

        if batched == "check":
            _check_independence(of_x, x)
        return in_sweeps(of_x, x, chunk, batch=int(bool(batched)))

    return of


def _real_array(x: object) -> jax.Array:
    """Returns an input as an array, if it is a real floating one."""
    if not hasattr(x, "dtype") and not isinstance(x, float):
        raise TypeError(f"expected an array for x, got {type(x).__name__}; for trees use nested.input_gradient")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected x to be real and floating, got {x.dtype}")
    return x


def _check_independence(f: Callable[[Any], jax.Array], x: jax.Array) -> None:
    # Where samples do not mix, turning the sign of a sample's direction turns that of its output, without rounding. It
    # is turned for those with a one at a binary digit of their number, digit by digit: any two samples differ at one.
    direction = jax.random.normal(jax.random.key(0), x.shape, x.dtype) + jnp.zeros_like(x)
    _, push = jax.linearize(f, x)
    together = push(direction)
    if isinstance(together, Tracer):
        raise TypeError("batched='check' needs values: use it only outside of jit, vmap and grad")
    number, eps = np.arange(len(x)), float(jnp.finfo(together.dtype).eps)
    for digit in range((len(x) - 1).bit_length()):
        signs = 1 - 2 * (number >> digit & 1)
        expected = _signed(signs, together)
        difference = push(_signed(signs, direction)) - expected
        mixed = np.flatnonzero(_norm_of_each(difference) > _ROUNDING * eps * _norm_of_each(expected))
        if mixed.size:
            raise ValueError(
                "f mixes the samples of the batch (a normalisation over it, attention, a sum?), sample "
                f"{mixed[0]} with others, so there is no Jacobian per sample; use jax.jacobian"
            )


def _signed(signs: np.ndarray, samples: jax.Array) -> jax.Array:
    """Returns each sample times its sign."""
    return samples * jnp.asarray(signs.reshape(-1, *[1] * (samples.ndim - 1)), samples.dtype)


def _norm_of_each(samples: jax.Array) -> np.ndarray:
    """Returns the norm of each sample."""
    return np.sqrt(np.sum(np.asarray(samples, float) ** 2, axis=tuple(range(1, samples.ndim))))
