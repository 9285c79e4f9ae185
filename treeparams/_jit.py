"""`jit` for models as they are: functions among the leaves, one array in several places."""

import functools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.tree_util as jtu

from ._declare import registry
from ._difference import Difference, both_in_text, compare, groups_of, spec_rows, tie_rows
from ._recognise import keep_apart, structure_of
from ._static_keys import Values
from ._structure import Structure, getter, is_array
from ._text import first_lines

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)
S = TypeVar("S")

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]


@overload
def jit(fun: Callable[P, R], *, donate: Donate = "none", **jit_kwargs: Any) -> "Jitted[P, R]": ...


@overload
def jit(*, donate: Donate = "none", **jit_kwargs: Any) -> Callable[[Callable[P, R]], "Jitted[P, R]"]: ...


def jit(fun: Callable[..., Any] | None = None, *, donate: Donate = "none", **jit_kwargs: Any) -> Any:
    """`equinox.filter_jit` that keeps ties.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> weight = jnp.ones(2)
    >>> step = tp.jit(lambda model: tp.maptrainable(lambda x: x - 0.5, model), donate="all")
    >>> model = step({"a": weight, "b": weight, "activation": jnp.tanh})
    >>> model["a"] is model["b"], model["a"]
    (True, Array([0.5, 0.5], dtype=float32))

    Arrays that are one object among the arguments are one tracer inside, and one argument of the compiled program; what
    is one tracer among the results is one array outside. So the library finds the ties of an argument by itself, and a
    tied model can be donated.

    Args:
        fun: the function; left out, `tp.jit` is a decorator with options. A callable pytree (a Module, a bound method
            of one) has its arrays traced like those of the arguments.
        donate: as for `equinox.filter_jit`: which arguments' arrays are donated, `"warn"` with JAX's warnings about
            buffers that could not be used.
        **jit_kwargs: further options of `jax.jit`, such as `inline` and `compiler_options`.

    Returns:
        The function, compiled. Arrays are traced and come back as JAX arrays; everything else, Python and NumPy scalars
        included, is static and compared by type and content: pass a number that changes as an array. `lower(*args)` and
        its `compile()` are as for `jax.jit`; what is compiled refuses arguments of other structure, ties or values.

    Raises:
        ValueError: `donate` is none of the five; an option that speaks of single arguments (`static_argnums`,
            `donate_argnums`, `in_shardings`, ...), which are taken apart here.
    """
    refused = [name for name in jit_kwargs if name.startswith(("static_arg", "donate_arg", "in_"))]
    if refused:
        raise ValueError(f"tp.jit takes arguments apart and cannot have {refused[0]!r}; see `donate`, or use jax.jit")
    if donate not in ("all", "all-except-first", "warn", "warn-except-first", "none"):
        raise ValueError(
            f"donate must be 'all', 'all-except-first', 'warn', 'warn-except-first' or 'none', got {donate!r}"
        )
    if fun is None:
        return functools.partial(jit, donate=donate, **jit_kwargs)
    return Jitted(fun, donate, jit_kwargs)


class Jitted(Generic[P, R]):
    """A function compiled by `tp.jit`."""

    def __init__(self, fun: Callable[P, R], donate: Donate, jit_kwargs: dict[str, Any]) -> None:
        """For this library's own use; users write `tp.jit(f)`."""
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._donate: Donate = donate

        def run(donated: Sequence[Any], kept: Sequence[Any], call: _Call) -> _Result:
            fun, args, kwargs = call.restore(donated, kept)
            keep_apart((*donated, *kept))
            leaves, treedef = jtu.tree_flatten(fun(*args, **kwargs))
            arrays = {id(leaf): leaf for leaf in leaves if is_array(leaf)}
            values = [leaf for leaf in leaves if id(leaf) not in arrays]
            places = {key: place for place, key in enumerate(arrays)}
            at = iter(range(len(arrays), len(leaves)))
            order = [places[id(leaf)] if id(leaf) in places else next(at) for leaf in leaves]
            return _Result(list(arrays.values()), (getter(order), treedef, values))

        run.__name__ = run.__qualname__ = getattr(fun, "__name__", type(fun).__name__)
        self._run = jax.jit(run, donate_argnums=0, static_argnums=2, **jit_kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        donated, kept, call = self._take_apart(args, kwargs)
        if self._donate == "none" or self._donate.startswith("warn"):
            return self._run(donated, kept, call).restore()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self._run(donated, kept, call).restore()

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> "Stage":
        """The program for these arguments, before it is compiled: `as_text()`, `cost_analysis()`, `compile()`."""
        donated, kept, call = self._take_apart(args, kwargs)
        return Stage(self._take_apart, self._run.lower(donated, kept, call), call)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Jitted[P, R]": ...

    @overload
    def __get__(self: "Jitted[Concatenate[S, Q], R]", instance: S, owner: Any = None) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _take_apart(self, args: Any, kwargs: Any) -> "tuple[tuple[Any, ...], tuple[Any, ...], _Call]":
        leaves, treedef, structure = structure_of((self._fun, args, kwargs), by_shape=False)
        plan = structure.remember(("jit", self._donate), lambda: _plan(structure, treedef, self._donate))
        values = Values(plan.values(leaves), structure.settled)
        return plan.donated(leaves), plan.kept(leaves), _Call(structure, treedef, plan, values)


class Stage:
    """A lowered or compiled program, called with the arguments of the function."""

    def __init__(self, take_apart: Callable[[Any, Any], Any], stage: Any, call: "_Call") -> None:
        """For this library's own use; users write `tp.jit(f).lower(...)`."""
        self._take_apart = take_apart
        self._stage = stage
        self._lowered_for = call

    def compile(self, *args: Any, **kwargs: Any) -> "Stage":
        """The compiled program; it can be called."""
        return Stage(self._take_apart, self._stage.compile(*args, **kwargs), self._lowered_for)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        donated, kept, call = self._take_apart(args, kwargs)
        if call != self._lowered_for:
            raise ValueError(
                "the program was lowered for other arguments (the first; these are the second):\n"
                + first_lines(self._lowered_for.differences(call))
            )
        return self._stage(donated, kept).restore()

    def __getattr__(self, name: str) -> Any:
        if name == "_stage":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._stage, name)


class _Plan(NamedTuple):
    donated: Callable[[Any], tuple[Any, ...]]
    kept: Callable[[Any], tuple[Any, ...]]
    values: Callable[[Any], tuple[Any, ...]]
    gather: Callable[[Any], tuple[Any, ...]]  # donated + kept + values -> leaves
    traced: list[bool]  # of each leaf


def _plan(structure: Structure, treedef: Any, donate: Donate) -> _Plan:
    count = len(structure.specs)
    traced = [spec is not None for spec in structure.specs]
    arrays = [i for i in range(count) if traced[i] and structure.first[i] == i]
    values = [i for i in range(count) if not traced[i]]
    safe = range(count if donate == "none" else 0)
    if donate.endswith("except-first"):
        fun, args, _ = treedef.children()
        first = args.children()[0].num_leaves if args.children() else 0
        safe = range(fun.num_leaves, fun.num_leaves + first)
    shared = {structure.first[i] for i in safe}  # what also stands among what is not donated
    donated = [i for i in arrays if i not in shared]
    kept = [i for i in arrays if i in shared]
    places = {i: place for place, i in enumerate([*donated, *kept, *values])}
    order = getter([places[structure.first[i]] for i in range(count)])
    return _Plan(getter(donated), getter(kept), getter(values), order, traced)


class _Call:
    """The static half of a call: function, structure, and the values that are no arrays."""

    def __init__(self, structure: Structure, treedef: Any, plan: _Plan, values: Values) -> None:
        self.structure = structure
        self._treedef = treedef
        self._plan = plan
        self._values = values
        self._declarations = registry.version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Call):
            return NotImplemented
        # Shapes and dtypes are left to `jax.jit`.
        these, those = self.structure, other.structure
        is_same = these is those or (
            (these.first, self._plan.traced) == (those.first, other._plan.traced) and these.has_statics_of(those)
        )
        return is_same and self._declarations == other._declarations and self._values == other._values

    def __hash__(self) -> int:
        return hash((len(self.structure.specs), len(self.structure.statics)))

    def differences(self, other: "_Call") -> list[str]:
        """Says in words what differs between two calls."""
        these, those = self.structure, other.structure
        ours, theirs = (
            dict(zip(call._plan.values(range(len(call.structure.specs))), call._values.values, strict=True))
            for call in (self, other)
        )

        def at_leaves(i: int, j: int) -> Iterator[Difference]:
            # Shapes and dtypes may be those of an earlier call.
            if i in ours and j in theirs and Values([ours[i]], False) != Values([theirs[j]], False):
                yield Difference(these.paths[i], "value", *both_in_text(ours[i], theirs[j]))
            elif (i in ours) != (j in theirs):
                yield from spec_rows(these, those, i, j)

        shared = these.index.keys() & those.index.keys()
        ties = tie_rows(groups_of(these), groups_of(those), shared.__contains__)
        rows = [*compare(these, those, at_leaves), *ties]
        return [row.in_words() for row in rows] or ["tp.declare has been called since"]

    def restore(self, donated: Sequence[Any], kept: Sequence[Any]) -> Any:
        return jtu.tree_unflatten(self._treedef, self._plan.gather([*donated, *kept, *self._values.values]))


class _Result:
    """A result as a pytree of its distinct arrays; all else is static."""

    def __init__(self, arrays: Sequence[Any], static: tuple[Any, ...]) -> None:
        self.arrays = arrays
        self.static = static

    def restore(self) -> Any:
        gather, treedef, values = self.static
        return jtu.tree_unflatten(treedef, gather([*self.arrays, *values]))


jtu.register_pytree_node(
    _Result, lambda result: (result.arrays, result.static), lambda static, arrays: _Result(arrays, static)
)
