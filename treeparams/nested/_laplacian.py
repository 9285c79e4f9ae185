"""laplacian: evaluates a program with the Jacobian and the Laplacian of each intermediate result beside its value."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from .._programs import Walk, bind, is_floating, name_of
from .._tree.messages import warn
from .._tree.types import PyTree
from ._series import Series, elementwise, is_call, is_linear_in, is_pointwise, rule_of, traced
from ._sweeps import basis, output, real_array

_LONGEST = 32  # chains that branch off at each step would be replayed from their root each time


@overload
def laplacian(f: Callable[..., Array], *, full: Literal[False] = False) -> Callable[..., Array]: ...


@overload
def laplacian(f: Callable[..., Array], *, full: Literal[True]) -> Callable[..., tuple[Array, Array, Array]]: ...


def laplacian(f: Callable[..., Array], *, full: bool = False) -> Callable[..., Any]:
    """Computes the Laplacian of `f(model, x, *args)` in x, the trace of its Hessian, for use in a loss.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> f = lambda model, x: jnp.sin(model["k"] * x[0]) * jnp.exp(x[1])
    >>> model, x = {"k": jnp.array(2.0)}, jnp.array([0.5, 0.0])
    >>> print(f"{nested.laplacian(f)(model, x):.3f}")  # (1 - k^2) sin(k x_0)
    -2.524
    >>> print(f"{tp.grad(nested.laplacian(f))(model, x)['k']:.3f}")
    -4.176

    Value, Jacobian and Laplacian go forward together through the program (Li et al., 2024, "Forward Laplacian"), which
    takes about half the operations of the Hessian's trace. It works on one point; `jax.vmap(laplacian(f), (None, 0))`
    takes many. It has rules for:

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
        x = real_array(x)
        closed = jax.make_jaxpr(lambda x: output(f(model, x, *args), "floating or complex"))(x)
        forward = _Forward()
        y = _series(*forward.run(closed, [Series(x, basis(x), jnp.zeros_like(x))]))
        if forward.unknown:
            names = ", ".join(sorted(forward.unknown))
            warn(
                f"nested.laplacian has no rule for {names}: the result is exact, but takes one second derivative of "
                "that part per entry of the input"
            )
        if not isinstance(y, Series):  # it does not depend on x
            aval: Any = closed.out_avals[0]
            y = jnp.asarray(y, aval.dtype)
            y = Series(y, jnp.zeros((x.size, *y.shape), y.dtype), jnp.zeros_like(y))
        if not full:
            return y.laplacian
        return y.value, jnp.moveaxis(y.jacobian, 0, -1).reshape(*y.value.shape, *x.shape), y.laplacian

    return of


class _Chain:
    """A result that is an elementwise function of one series, through any number of equations.

    Its Jacobian is computed for all of them at once, on demand, so that n numbers per entry are written once and not at
    each equation: three times as fast for a dense net with `jax.nn.gelu`, which is ten equations.
    """

    def __init__(self, root: Series, eqn: JaxprEqn, operands: list[Any], value: jax.Array) -> None:
        self.root, self.eqn, self.operands, self.value = root, eqn, operands, value
        earlier = [operand.steps for operand in operands if isinstance(operand, _Chain)]
        self.steps: dict[int, _Chain] = {key: step for steps in earlier for key, step in steps.items()}
        self.steps[id(self)] = self

    @functools.cached_property
    def series(self) -> Series:
        """The result with its derivatives."""

        def replay(value: jax.Array) -> list[Any]:
            done: dict[int, Any] = {id(self.root): value}
            for key, step in self.steps.items():
                (done[key],) = bind(step.eqn, [done.get(id(operand), operand) for operand in step.operands])
            return [done[id(self)]]

        return elementwise(replay, [self.root])


def _series(operand: object) -> Any:
    return operand.series if isinstance(operand, _Chain) else operand


def _root(operand: object) -> Any:
    return operand.root if isinstance(operand, _Chain) else operand


class _Forward(Walk[Any]):
    """Carries series, chains, or arrays and numbers that do not depend on the input.

    Attributes:
        unknown: the names of the operations that have no rule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unknown = set[str]()

    def constant(self, value: Any) -> Any:
        return value

    def step(self, eqn: JaxprEqn, its: list[Any]) -> Sequence[Any]:
        which = [isinstance(operand, Series | _Chain) for operand in its]
        depends = [operand for operand, moves in zip(its, which, strict=True) if moves]
        values = [operand.value if moves else operand for operand, moves in zip(its, which, strict=True)]
        kept = [is_floating(var.aval) for var in eqn.outvars]
        if not depends or not any(kept) or eqn.primitive.name == "stop_gradient":
            return bind(eqn, values)
        pointwise = is_pointwise(eqn, depends)
        longest = max(len(each.steps) if isinstance(each, _Chain) else 0 for each in depends)
        # A bias that is added to a series leaves its Jacobian as it is; within a chain it would be multiplied by ones.
        begins_linear = longest == 0 and is_linear_in(eqn, which)
        root = _root(depends[0])
        if pointwise and all(_root(each) is root for each in depends) and not begins_linear and longest < _LONGEST:
            return [_Chain(root, eqn, its, *bind(eqn, values))]
        program = self.program_of(eqn)
        if program is not None and is_call(eqn) and not pointwise:
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

        rule = rule_of(eqn, which, pointwise)
        if rule is None:
            self.unknown.add(name_of(eqn))
        results = (rule or traced)(eqn, of, list(map(_series, depends)))
        if all(kept):
            return results
        found = iter(results)
        return [next(found) if keep else result for result, keep in zip(bind(eqn, values), kept, strict=True)]
