"""The loss of a step: what it is given, what it returns, and what its result says of the examples of a batch."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._programs import carry, through
from .._tree.structure import is_array
from .._tree.text import describe
from .._tree.types import PyTree
from ._pieces import Result, uncut, wide

LossIs = Literal["mean"] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A loss, and what the user says of it."""

    function: Callable[..., Any]
    outputs: Callable[..., Any] | None  # the part that each device computes of its examples alone
    is_mean: bool
    takes_form: bool  # whether it is of parameters in their form and of the way back, and not of the model
    has_aux: bool
    has_state: bool

    @property
    def in_words(self) -> str:
        """The same in a line."""
        taken = "form" if self.takes_form else "model"
        said = ["is a mean"] * self.is_mean + ["has outputs"] * (self.outputs is not None)
        said += ["has aux"] * self.has_aux + ["has state"] * self.has_state
        return ", ".join([f"the loss takes the {taken}", *said])

    def result(self, result: Any) -> Result:
        """What the loss returned, checked."""
        aux = model_state = None
        if self.has_state:
            result, model_state = _two(result, "has_state=True", "(value, state)")
        if self.has_aux:
            result, aux = _two(result, "has_aux=True", "(value, aux)")
            _check_aux(aux)
        if is_pair(result) and not self.is_mean:
            value, weight = map(jnp.asarray, result)
            return Result(value, weight, aux, model_state)
        is_number = is_array(result) and not result.shape and jnp.issubdtype(result.dtype, jnp.floating)
        if is_number or isinstance(result, float):
            return Result(jnp.asarray(result), None, aux, model_state)
        if self.is_mean:
            expected = 'with loss_is="mean" the loss must return one real number, the mean over its examples'
        else:
            expected = "the loss must return one real number, or (sum, weight), two real numbers"
        remedy = "; where the rest of it is auxiliary, write has_aux=True" if isinstance(result, tuple) else ""
        raise TypeError(f"{expected}, got {_in_words(result)}{remedy}")


def _check_aux(aux: PyTree) -> None:
    for path, leaf in jtu.tree_flatten_with_path(aux)[0]:
        if not (is_array(leaf) or _is_real_number(leaf)):
            raise ValueError(f"aux{jtu.keystr(path)}: expected arrays and numbers, got {describe(leaf)}")


def is_pair(value: Any) -> bool:
    """Whether a value is `(sum, weight)`, a tuple of two real numbers."""
    return type(value) is tuple and len(value) == 2 and all(map(_is_real_number, value))


def _is_real_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float)):
        return True
    return is_array(value) and not value.shape and not jnp.issubdtype(value.dtype, jnp.complexfloating)


def _two(result: Any, option: str, expected: str) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise TypeError(f"with {option} the loss is to return {expected}, got {_in_words(result)}")


def _in_words(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else describe(result)


def seen(f: Callable[[list[Any]], Result], shapes: list[jax.ShapeDtypeStruct], is_divided: bool) -> Result:
    """What a loss returns, as shapes, of arrays of parameters; where it is divided its weight depends on none."""
    program, found = jax.make_jaxpr(f, return_shape=True)(shapes)
    if found.weight is not None and is_divided:
        # By any way, and not by its derivative alone: an accuracy, which somebody returns beside a loss, has none.
        number = len(jtu.tree_leaves(found.value))
        if carry(program.jaxpr, [1] * len(program.jaxpr.invars), through)[number]:
            raise ValueError(
                "the loss returns two numbers, which are taken for (sum, weight), but the second depends on the "
                "parameters. A weight is of the batch alone, such as the sum of a mask; return one number for a loss "
                "that divides by something of the parameters, and write has_aux=True if it is a result beside the loss"
            )
    return found


# -- Results beside the loss -------------------------------------------------------------------------------------------


class Aux(NamedTuple):
    """What becomes of results beside the loss, over pieces of a batch and over devices."""

    treedef: Any
    kinds: list[str]  # "pair", "number", "examples" or "whole", of each entry; a pair is one

    def over_pieces(self, aux: PyTree) -> list[Any]:
        """The entries of what pieces returned, each with a first axis over these."""
        return [
            _OVER_PIECES[kind](each) for kind, each in zip(self.kinds, self.treedef.flatten_up_to(aux), strict=True)
        ]

    def over_devices(self, entries: Sequence[Any], axes: Sequence[str]) -> tuple[list[Any], list[jax.Array]]:
        """Of a device's entries those with a row for each example, after the others, which are of all devices."""
        pairs = list(zip(self.kinds, entries, strict=True))
        over = {"pair": jax.lax.psum, "number": jax.lax.pmean}
        of_all = [
            over[kind](each, axes) if kind in over and axes else each for kind, each in pairs if kind != "examples"
        ]
        return of_all, [each for kind, each in pairs if kind == "examples"]

    def tree(self, of_all: Sequence[Any], rows: Sequence[jax.Array]) -> PyTree:
        """The tree of these; pairs are divided."""
        numbers, arrays = iter(of_all), iter(rows)
        entries = [next(arrays if kind == "examples" else numbers) for kind in self.kinds]
        divided = [
            each[0] / each[1] if kind == "pair" else each for kind, each in zip(self.kinds, entries, strict=True)
        ]
        return self.treedef.unflatten(divided)


def _summed_pair(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    return tuple([jnp.sum(wide(each)) for each in pair])


_OVER_PIECES: dict[str, Callable[[Any], Any]] = {
    "pair": _summed_pair,
    "number": lambda numbers: jnp.mean(wide(numbers)),
    "examples": uncut,
    "whole": lambda arrays: arrays[0],
}


def aux_of(aux: PyTree, examples: int, is_mean: bool, in_parts: bool) -> Aux:
    """What is to become of results, of their shapes for the whole batch.

    Args:
        aux: the results as shapes.
        examples: how many there are in the batch.
        is_mean: whether the loss is a mean, so that numbers beside it are.
        in_parts: whether devices, or pieces, each have results of their examples alone.
    """
    entries, treedef = jtu.tree_flatten_with_path(aux, is_leaf=is_pair)
    return Aux(treedef, [_kind(jtu.keystr(path), each, examples, is_mean, in_parts) for path, each in entries])


def _kind(path: str, entry: Any, examples: int, is_mean: bool, in_parts: bool) -> str:
    if is_pair(entry):
        return "pair"
    if _is_real_number(entry) and is_mean:
        return "number"
    if is_array(entry) and not in_parts:
        return "whole"
    if is_array(entry) and entry.shape and entry.shape[0] == examples:
        return "examples"
    number = "a number where the loss is a mean, " if is_mean else ""
    raise ValueError(
        f"aux{path}: expected a pair of numbers (sum, weight), which is summed over the batch and divided, {number}or "
        f"an array with one row for each of the {examples} examples, got {describe(entry)}"
    )


def check_rows(outputs: PyTree, arrays: Sequence[Any]) -> None:
    """Checks that outputs have a row for each example that a device was given."""
    examples = next((array.shape[0] for array in arrays if array.ndim), 0)
    for path, each in jtu.tree_flatten_with_path(outputs)[0]:
        if not is_array(each) or each.shape[:1] != (examples,):
            raise ValueError(
                f"outputs{jtu.keystr(path)}: expected an array with one row for each of the {examples} examples that "
                f"it was given, since a device has these alone, got {describe(each)}; what is of all examples goes "
                "into the loss"
            )
