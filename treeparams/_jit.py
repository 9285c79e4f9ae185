"""`jit`, `checkpoint`, `vmap` for models that hold functions among their leaves and one array at several paths."""

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, get_args, overload

import jax
import jax.tree_util as jtu

from ._slots.parts import Rest
from ._tree.structure import getter, naming_deleted
from ._tree.text import describe

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
    """Compiles a function like `equinox.filter_jit`, and keeps weight ties.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> weight = jnp.array([1.0, 2.0])
    >>> step = tp.jit(lambda model: tp.maptrainable(lambda x: x - 0.5, model), donate="all")
    >>> model = step({"a": weight, "b": weight, "activation": jnp.tanh})
    >>> model["a"] is model["b"], model["a"]
    (True, Array([0.5, 1.5], dtype=float32))

    If one array object is at several places among the arguments, your function sees one tracer at all of them, and the
    compiled program has one argument for it. If the function returns one tracer at several places, you get one array
    back. So the library finds the ties of an argument inside `jit`, and you can donate a tied model. Loops and branches
    inside are functions of `tp.lax`, since those of `jax.lax` reject functions and strings, as plain `jax.jit` does.

    Args:
        fun: the function. Without it, `tp.jit` is a decorator with options. If `fun` is a callable pytree (a Module, or
            a bound method of one), its arrays are traced like those of the arguments.
        donate: the arguments whose arrays are donated, as for `equinox.filter_jit`. With `"warn"` you see JAX's
            warnings about buffers that could not be used.
        **jit_kwargs: further options of `jax.jit`, such as `inline` and `compiler_options`.

    Returns:
        The compiled function. Arrays are traced, and come back as JAX arrays. Everything else, Python and NumPy scalars
        included, is static and compared by type and content, so pass a number that changes as an array. `lower(*args)`
        and its `compile()` work as for `jax.jit`; the compiled program rejects arguments of another structure, with
        other ties or with other static values.

    Raises:
        ValueError: `donate` is not one of the five values; you passed an option about single arguments
            (`static_argnums`, `donate_argnums`, `in_shardings`, ...), which `tp.jit` does not support.
    """
    refused = [name for name in jit_kwargs if name.startswith(("static_arg", "donate_arg", "in_"))]
    if refused:
        what = f"tp.jit takes arguments apart and has no {refused[0]!r}; leave it out, all that is no array is static"
        donated = "To donate arguments write donate='all', or donate='all-except-first'"
        raise ValueError(f"{what}. {donated}; to place them use jax.device_put")
    if donate not in get_args(Donate):
        raise ValueError(f"donate must be {', '.join(map(repr, get_args(Donate)))}, got {donate!r}")
    if not (fun is None or callable(fun)):
        raise TypeError(f"expected a function, got {describe(fun)}; write tp.jit(f)(model, x)")
    if fun is None:
        return functools.partial(jit, donate=donate, **jit_kwargs)
    return Jitted(fun, donate, jit_kwargs)


class Jitted(Generic[P, R]):
    """A function compiled by `tp.jit`: `jax.jit` over one `Rest` that holds the function and all its arguments."""

    def __init__(self, fun: Callable[P, R], donate: Donate, jit_kwargs: dict[str, Any]) -> None:
        """Used by this library; write `tp.jit(f)`."""
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._donate: Donate = donate

        # The whole call, function and arguments, is one `Rest`: an array that is at several paths of it is one of its
        # leaves, whichever arguments these are in. If the arrays of the first argument are not donated, they are in
        # another one, and `None` marks their gaps.
        def run(call: Rest[Any], first: Rest[Any] | None) -> Rest[R]:
            if first is not None:
                pairs = zip(call.arrays, first.arrays, strict=True)
                call = call.replaced([kept if array is None else array for array, kept in pairs])
            return _rest_of_call(call.unpacked())

        run.__name__ = run.__qualname__ = getattr(fun, "__name__", type(fun).__name__)
        self._run = jax.jit(run, donate_argnums=() if donate == "none" else 0, **jit_kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        parts = self._take_apart(args, kwargs)
        is_silent = self._donate != "none" and not self._donate.startswith("warn")
        with naming_deleted([*args, kwargs]), warnings.catch_warnings() if is_silent else contextlib.nullcontext():
            if is_silent:
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self._run(*parts).model()

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> "Stage":
        """Lowers the program for these arguments without compiling it: `as_text()`, `cost_analysis()`, `compile()`."""
        parts = self._take_apart(args, kwargs)
        return Stage(self._take_apart, self._run.lower(*parts), parts[0].replaced(()))

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> "Jitted[P, R]": ...

    @overload
    def __get__(self: "Jitted[Concatenate[S, Q], R]", instance: S, owner: type | None = None) -> Callable[Q, R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Rest[Any], Rest[Any] | None]:
        call = Rest.of((self._fun, args, kwargs), by_shape=False)
        return _without_first(call) if self._donate.endswith("except-first") else (call, None)


def checkpoint(
    fun: Callable[P, R], *, prevent_cse: bool = True, policy: Callable[..., bool] | None = None
) -> Callable[P, R]:
    """`jax.checkpoint` of a function of models: the backward pass computes the values in `fun` again.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> layer = {"w": jnp.array(2.0), "act": jnp.square}
    >>> f = tp.checkpoint(lambda layer, x: layer["act"](layer["w"] * x))
    >>> float(tp.grad(f)(layer, 3.0)["w"])
    36.0

    Args:
        fun: the function. Its arguments and results are as for `tp.jit`: ties hold, and only arrays are traced.
        prevent_cse: as for `jax.checkpoint`; `False` is right, and faster, within a scan.
        policy: which values to keep, one of `jax.checkpoint_policies`.

    Returns:
        The function.
    """
    saving = jax.checkpoint(lambda call: _rest_of_call(call.unpacked()), prevent_cse=prevent_cse, policy=policy)

    @functools.wraps(fun, updated=())
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return saving(Rest.of((fun, args, kwargs), by_shape=False)).model()

    return run


def _rest_of_call(call: tuple[Callable[..., R], Iterable[Any], dict[str, Any]]) -> Rest[R]:
    fun, args, kwargs = call
    return Rest.of(fun(*args, **kwargs))


def vmap(
    fun: Callable[P, Any],
    in_axes: int | Sequence[int | None] | None = 0,
    out_axes: int | tuple[int | None, ...] | None = 0,
    **vmap_kwargs: Any,
) -> Callable[P, Any]:
    """`jax.vmap` of a function of models, such as an ensemble: a model with a leading axis in its arrays.

    >>> import equinox as eqx, jax, treeparams as tp
    >>> make = lambda key: eqx.nn.MLP(2, 1, 4, 1, key=key)
    >>> ensemble = tp.vmap(make)(jax.random.split(jax.random.key(0), 3))
    >>> ensemble.layers[0].weight.shape
    (3, 4, 2)
    >>> tp.vmap(lambda member, x: member(x), in_axes=(0, None))(ensemble, jax.numpy.ones(2)).shape
    (3, 1)

    Args:
        fun: the function. Leaves that are not arrays are the same in each call, in arguments and results.
        in_axes: the axis of all arrays of an argument, or `None`: one for all arguments, or one for each. A tied array
            is mapped once. Keyword arguments are mapped over axis 0.
        out_axes: the same for the result, or a tuple if `fun` returns one.
        **vmap_kwargs: further options of `jax.vmap`, such as `axis_name` and `axis_size`.

    Returns:
        The function.
    """
    axes = tuple(in_axes) if isinstance(in_axes, Sequence) else in_axes
    is_tuple = isinstance(out_axes, tuple)

    def of_arrays(args: tuple[Rest[Any], ...], kwargs: dict[str, Rest[Any]]) -> Any:
        by_name = {name: each.unpacked() for name, each in kwargs.items()}
        result: Any = _rest_of_call((fun, map(Rest.unpacked, args), by_name))
        return tuple(map(Rest.of, result.model())) if is_tuple else result

    mapped = jax.vmap(of_arrays, in_axes=(axes, 0), out_axes=out_axes, **vmap_kwargs)

    @functools.wraps(fun, updated=())
    def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        result = mapped(tuple(map(Rest.of, args)), {name: Rest.of(each) for name, each in kwargs.items()})
        return tuple([each.model() for each in result]) if is_tuple else result.model()

    return run


def _without_first(call: Rest[Any]) -> tuple[Rest[Any], Rest[Any]]:
    """Returns the call with `None` in place of the arrays of the first argument, and with these alone."""
    rest, first = call.index.structure.remember("arrays of the first argument", lambda: _rest_and_first(call))
    arrays = [*call.arrays, None]
    return call.replaced(rest(arrays)), call.replaced(first(arrays))


def _rest_and_first(call: Rest[Any]) -> tuple[Callable[[Any], tuple[Any, ...]], ...]:
    """Returns two functions of the arrays of a call and a final `None`.

    The first one puts `None` in place of the arrays of the first argument, the second one in place of all others.
    """
    index, count = call.index, len(call.arrays)
    fun, args, _ = index.structure.treedef.children()
    size = args.children()[0].num_leaves if args.children() else 0
    # An array of the first argument is kept where it is in another argument too: it is one argument of the program.
    # `order` counts arrays first, so that the numbers of values that are no arrays lie above `count`.
    numbers = {index.gathers.order[leaf] for leaf in range(fun.num_leaves, fun.num_leaves + size)}
    of = lambda is_first: getter([i if (i in numbers) == is_first else count for i in range(count)])
    return of(False), of(True)


class Stage:
    """A lowered or compiled program; a compiled one is called with the arguments of the function."""

    def __init__(self, take_apart: Callable[[Any, Any], Any], stage: Any, call: Rest[Any]) -> None:
        """Used by this library; write `tp.jit(f).lower(...)`."""
        self._take_apart = take_apart
        self._stage = stage
        self._lowered_for = call  # without its arrays

    def compile(self, *args: Any, **kwargs: Any) -> "Stage":
        """Compiles the program; you can call the result."""
        return Stage(self._take_apart, self._stage.compile(*args, **kwargs), self._lowered_for)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parts = self._take_apart(args, kwargs)
        call = parts[0].replaced(())
        if jtu.tree_structure(call) != jtu.tree_structure(self._lowered_for):
            differences = self._lowered_for.diff(call).in_words() or _UNSEEN
            what = "the program was lowered for other arguments (the first; these are the second)"
            raise ValueError(f"{what}:\n{differences}")
        return self._stage(*parts).model()

    def __getattr__(self, name: str) -> Any:
        if name == "_stage":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._stage, name)


_UNSEEN = "tp.declare has been called since, or a value that is no array has been changed in place"
