"""Applies a function that moves the elements of parameters to arrays that belong to these parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._tree.dtypes import common_dtype
from .._tree.structure import Spec
from ._elements import Elements, NotMovedError, are_seen_to_move, arguments_of, move, results_of, run
from ._numbering import DROPPED, numbered, starts_of
from ._rename import Route


class Program:
    """The program of a route. It moves elements, each at most once and unchanged.

    Attributes:
        reads: for each result, the numbers of the arguments that it is made from.
        same: for each result, the number of the argument that it equals, or `None`.
        dropped: for each result, where a mask has dropped elements; `None` if nowhere.
    """

    def __init__(self, route: Route, specs: Sequence[Spec]) -> None:
        self._shapes = [spec.shape for spec in specs]
        self._arguments = [Elements() for _ in specs]
        self._numbers: list[np.ndarray] | None = None
        try:
            program = jax.make_jaxpr(route)(*[jax.ShapeDtypeStruct(*spec[:2]) for spec in specs])
            with jax.ensure_compile_time_eval():  # constants have values within `jit`, too
                self._results = results_of(program, self._arguments)
                if not are_seen_to_move(self._results):
                    self._numbers = numbered(self._results, self._arguments, self._shapes)
        except NotMovedError:
            raise ValueError(
                f"moments and averages can follow a function that moves, drops or joins elements, each at most once, "
                f"but {route.how}, from {list(route.sources)} to {list(route.targets)}, changes or repeats them; use "
                "the plan for the parameters alone, plan(arrays), and begin with a fresh state and average: "
                "tx.init(model), tp.Ema(model, ...)"
            ) from None
        number = {id(argument): i for i, argument in enumerate(self._arguments)}
        self.same = [number.get(id(result)) for result in self._results]
        self.reads = [tuple(sorted(number[id(each)] for each in arguments_of(it))) for it in self._results]
        drops = [each == DROPPED for each in self._numbers or ()]
        self.dropped = [where if where.any() else None for where in drops] or [None] * len(self._results)

    def results(self, number: int, arrays: Callable[[int], Any]) -> dict[int, Any]:
        """Returns a result, and those made from the same arguments, for arrays that belong to the parameters.

        The arrays keep their dtypes. Dropped elements become zero.
        """
        reads = self.reads[number]
        wanted = [i for i, its in enumerate(self.reads) if its == reads]
        if self._numbers is not None:
            its = [arrays(argument) for argument in reads]
            return {i: self._taken(self._numbers[i], self.dropped[i], reads, its) for i in wanted}
        known = {id(self._arguments[i]): arrays(i) for i in reads}
        return dict(zip(wanted, run([self._results[i] for i in wanted], known, move), strict=True))

    def _taken(self, numbers: np.ndarray, dropped: np.ndarray | None, reads: Sequence[int], arrays: list[Any]) -> Any:
        """Returns a result by the numbers of its elements, from the arguments that it is made from."""
        if len(reads) < len(self._shapes):  # without the others, elements begin earlier
            starts = np.array(starts_of(self._shapes))[list(reads)]
            shifts = starts - starts_of([self._shapes[i] for i in reads])[:-1]
            numbers = numbers - shifts.astype(np.int32)[np.searchsorted(starts, numbers, side="right") - 1]
        dtype = common_dtype([array.dtype for array in arrays])
        elements = [jnp.ravel(jnp.asarray(array).astype(dtype)) for array in arrays]
        made = jnp.take(elements[0] if len(elements) == 1 else jnp.concatenate(elements), numbers, mode="clip")
        return made if dropped is None else jnp.where(dropped, jnp.zeros((), dtype), made)
