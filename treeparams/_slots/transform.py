"""Linear functions from the source of a tie to an alias, which can be recognised again in other processes."""

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._tree.static_keys import found_at, static_key
from .._tree.text import function_name


class Transform:
    """A linear function with a static identity: equal to another of the same function and bound arguments."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        """Checks that the function can be recognised again."""
        inner, bound = function, []
        while isinstance(inner, functools.partial):
            bound.append((inner.args, tuple(sorted(inner.keywords.items()))))
            inner = inner.func
        self.function = function
        self._inner = inner
        self._names = _names(inner)
        self._bound = tuple(bound)
        try:
            hash(self._bound)
        except TypeError as error:
            raise ValueError(f"a tie's transform binds an argument that cannot be hashed: {error}") from error
        self._key = static_key(self._bound)  # `2` and `np.float32(2)` are equal and give other dtypes

    def __call__(self, value: ArrayLike) -> Any:
        return self.function(value)

    def __eq__(self, other: object) -> bool:
        # By the function itself, not its name alone: in a notebook a name may come to stand for another function.
        return isinstance(other, Transform) and self._inner is other._inner and self._key == other._key

    def __hash__(self) -> int:
        return hash((self._names, self._key))

    def __reduce__(self) -> Any:
        return _found, (*self._names, self._bound)

    def __repr__(self) -> str:
        arguments = [
            text
            for args, keywords in reversed(self._bound)
            for text in (*map(repr, args), *(f"{name}={value!r}" for name, value in keywords))
        ]
        return self._names[1] + (f"({', '.join(arguments)})" if arguments else "")

    def tried(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, bool]:
        """Returns the shape and dtype of the result, and whether it is the array itself (a transpose of one axis).

        The array at an alias is then the array at its source, and such a tie is the same as one without a transform.
        """
        known = _tried.setdefault(self, {})
        if (shape, dtype) not in known:
            known[shape, dtype] = self._try(shape, dtype)
        return known[shape, dtype]

    def _try(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, bool]:
        source = jax.ShapeDtypeStruct(shape, dtype)
        try:
            jaxpr, result = jax.make_jaxpr(self.__call__, return_shape=True)(source)
            jax.eval_shape(jax.linear_transpose(self.__call__, source), result)
        except Exception as error:
            raise ValueError(f"a tie's transform must be linear, but JAX cannot transpose {self}: {error}") from error
        with jax.ensure_compile_time_eval():
            zeros = jnp.zeros(shape, dtype)
            at_zero = self(zeros)
            if not isinstance(at_zero, jax.Array) or jnp.any(at_zero != 0):
                raise ValueError(f"a tie's transform must be linear, but {self} of zeros is not an array of zeros")
        return result, at_zero is zeros or jaxpr.jaxpr.outvars[0] is jaxpr.jaxpr.invars[0]


_tried: "weakref.WeakKeyDictionary[Transform, dict[Any, Any]]" = weakref.WeakKeyDictionary()  # by shape and dtype


def _names(function: Callable[..., Any]) -> tuple[str, str]:
    """Returns the module and the name by which another process finds a function."""
    module = getattr(function, "__module__", None)
    for name in (getattr(function, "__qualname__", None), getattr(function, "__name__", None)):
        if module and name and found_at(module, name) is function:
            return module, name
    raise ValueError(
        f"a tie's transform must be found again by `jit` and in the next process, but {function_name(function)} is "
        "made anew each time; use a function at module level, such as jnp.transpose, or a functools.partial of one"
    )


def _found(module: str, name: str, bound: tuple[Any, ...]) -> Transform:
    importlib.import_module(module)
    function = found_at(module, name)
    for args, keywords in reversed(bound):
        function = functools.partial(function, *args, **dict(keywords))
    return Transform(function)
