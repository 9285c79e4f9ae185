"""The loss of a step: its arguments, its result, and how results are combined over the examples of a batch."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal as Constant

from .._programs import bind, carry, through
from .._tree.structure import is_array
from .._tree.text import describe
from .._tree.types import PyTree
from ._pieces import Result, examples_of, uncut, wide

LossIs = Literal["mean"] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A loss, and the user's options about it."""

    function: Callable[..., Any]
    outputs: Callable[..., Any] | None  # the part that each device computes of its examples alone
    is_mean: bool
    takes_form: bool  # whether it is of parameters in their form and of the way back, and not of the model
    has_aux: bool
    has_state: bool

    @property
    def in_words(self) -> str:
        """The options in one line."""
        taken = "form" if self.takes_form else "model"
        said = ["is a mean"] * self.is_mean + ["has outputs"] * (self.outputs is not None)
        said += ["has aux"] * self.has_aux + ["has state"] * self.has_state
        return ", ".join([f"the loss takes the {taken}", *said])

    def result(self, result: Any) -> Result:
        """Checks the value that the loss returned, and takes it apart."""
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
        remedy = "; if the rest of it is auxiliary, pass has_aux=True" if isinstance(result, tuple) else ""
        raise TypeError(f"{expected}, got {_in_words(result)}{remedy}")


def _check_aux(aux: PyTree) -> None:
    for path, leaf in jtu.tree_flatten_with_path(aux)[0]:
        if not (is_array(leaf) or _is_real_number(leaf)):
            raise ValueError(f"aux{jtu.keystr(path)}: expected arrays and numbers, got {describe(leaf)}")


def is_pair(value: Any) -> bool:
    """Returns whether a value is `(sum, weight)`, a tuple of two real numbers."""
    return type(value) is tuple and len(value) == 2 and all(map(_is_real_number, value))


def _is_real_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float)):
        return True
    kinds = jnp.bool_, jnp.integer, jnp.floating
    return is_array(value) and not value.shape and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def _two(result: Any, option: str, expected: str) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise TypeError(f"with {option} the loss must return {expected}, got {_in_words(result)}")


def _in_words(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else describe(result)


_OF_LOSS = "the weight of the loss"


class Looked(NamedTuple):
    """A loss traced as a program of the arrays of parameters and of a batch, and its result as shapes."""

    program: ClosedJaxpr
    result: Result
    parameters: int  # how many arrays of these come first
    examples: int


def look(f: Callable[[list[Any], list[Any]], Result], parameters: list[Any], arrays: list[Any]) -> Looked:
    """Traces a loss for arrays given as shapes."""
    program, result = jax.make_jaxpr(f, return_shape=True)(parameters, arrays)
    return Looked(program, result, len(parameters), examples_of(arrays))


def check_weights(looked: Looked, is_divided: bool) -> None:
    """Checks that no weight depends on a parameter: those of pairs in `aux`, and that of the loss if it is a sum."""
    # By any way, and not by its derivative alone: an accuracy, which somebody returns beside a loss, has none.
    program = looked.program
    of_parameters = carry(program, [int(i < looked.parameters) for i in range(len(program.jaxpr.invars))], through)
    wrong = [name for name, i in _weights(looked.result).items() if of_parameters[i]]
    if is_divided and _OF_LOSS in wrong:
        raise ValueError(
            "the loss returns two numbers, which are read as (sum, weight), but the second depends on the "
            "parameters. A weight must depend on the batch alone, such as the sum of a mask. If the loss divides by "
            "something that depends on the parameters, return one number; if the second number is an auxiliary "
            "result, pass has_aux=True"
        )
    for name in wrong:
        if name != _OF_LOSS:
            raise ValueError(
                f"{name} depends on the parameters. A tuple of two numbers is read as (sum, weight) and divided; for "
                "two results return a list or a dictionary, and for a sum over the examples a pair, (number, len(x))"
            )


def check_model_state(before: PyTree, after: PyTree) -> None:
    """Checks that the loss returned a state with the tree, shapes and dtypes of the one it was given."""
    ours, its = (
        {jtu.keystr(path): describe(leaf) for path, leaf in jtu.tree_leaves_with_path(tree)} for tree in (before, after)
    )
    wrong = next((path for path in [*ours, *its] if ours.get(path) != its.get(path)), None)
    if wrong is not None:
        raise ValueError(
            f"the loss returned a different state of the model than it was given: state{wrong} was "
            f"{ours.get(wrong, 'nothing')} and is {its.get(wrong, 'nothing')}; return one with the same tree, shapes "
            "and dtypes"
        )


def check_sums(whole: Looked, look_at_part: Callable[[], Looked], parts: int) -> None:
    """Checks that the weights of the parts of a batch add up to those of the whole batch.

    A weight that depends on the examples, such as the sum of a mask, is assumed to be a sum over them. Any other weight
    must be proportional to their number, as `len(x)` is: `1.0` would add up to the number of parts.
    """
    jaxpr = whole.program.jaxpr
    marks = [int(i >= whole.parameters and bool(var.aval.ndim)) for i, var in enumerate(jaxpr.invars)]
    of_examples = carry(whole.program, marks, through)
    alike = {name: i for name, i in _weights(whole.result).items() if not of_examples[i]}
    part = look_at_part() if alike and parts > 1 else whole
    for name, i in alike.items() if part is not whole else ():
        ours, its = (_with_ones(each.program, i) for each in (whole, part))
        if not np.isclose(parts * its, ours, rtol=1e-2):
            raise ValueError(
                f"{name} does not depend on the examples: it is the same for all {whole.examples} of the batch as for "
                f"the {part.examples} of each of its {parts} parts, over which it is summed. Return len(x), the sum of "
                "a mask, or the like; divide by other numbers inside the loss"
            )


def _weights(result: Result) -> dict[str, int]:
    """Returns the position among all results of the weight of the loss and of each weight in `aux`."""
    leaves, treedef = jtu.tree_flatten(result)
    numbers = treedef.unflatten(range(len(leaves)))
    found = {} if result.weight is None else {_OF_LOSS: numbers.weight}
    entries, of_pairs = jtu.tree_flatten_with_path(result.aux, is_leaf=is_pair)
    for (path, entry), its in zip(entries, of_pairs.flatten_up_to(numbers.aux), strict=True):
        if is_pair(entry):
            found[f"the weight in aux{jtu.keystr(path)}"] = its[1]
    return found


def _with_ones(program: ClosedJaxpr, number: int) -> float:
    """Evaluates one result of a program with ones for all inputs that it depends on."""
    jaxpr, out = program.jaxpr, program.jaxpr.outvars[number]
    needed, eqns = {atom for atom in [out] if not isinstance(atom, Constant)}, list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            eqns.append(eqn)
            needed.update(atom for atom in eqn.invars if not isinstance(atom, Constant))
    inputs = [*zip(jaxpr.constvars, program.consts, strict=True), *((var, None) for var in jaxpr.invars)]
    with jax.ensure_compile_time_eval():
        known: dict[Any, Any] = {
            var: jnp.ones(var.aval.shape, var.aval.dtype) if value is None or isinstance(value, Tracer) else value
            for var, value in inputs
            if var in needed
        }
        value_of = lambda atom: atom.val if isinstance(atom, Constant) else known[atom]
        for eqn in reversed(eqns):
            known |= zip(eqn.outvars, bind(eqn, list(map(value_of, eqn.invars))), strict=True)
        return float(value_of(out))


# -- Results beside the loss -------------------------------------------------------------------------------------------


class Aux(NamedTuple):
    """How the entries of `aux` are combined over pieces of a batch and over devices."""

    treedef: Any
    kinds: list[str]  # "pair", "number", "examples" or "whole", of each entry; a pair is one

    def over_pieces(self, aux: PyTree) -> list[Any]:
        """Combines the entries that the pieces returned; each has a first axis over the pieces."""
        return [
            _OVER_PIECES[kind](each) for kind, each in zip(self.kinds, self.treedef.flatten_up_to(aux), strict=True)
        ]

    def over_devices(self, entries: Sequence[Any], axes: Sequence[str]) -> tuple[list[Any], list[jax.Array]]:
        """Combines a device's entries over devices; returns these, and the entries with a row for each example."""
        pairs = list(zip(self.kinds, entries, strict=True))
        over = {"pair": jax.lax.psum, "number": jax.lax.pmean}
        of_all = [
            over[kind](each, axes) if kind in over and axes else each for kind, each in pairs if kind != "examples"
        ]
        return of_all, [each for kind, each in pairs if kind == "examples"]

    def of_whole(self, aux: PyTree) -> PyTree:
        """Returns the tree of entries that the pieces returned, if each piece covers all devices."""
        return self.tree(*self.over_devices(self.over_pieces(aux), ()))

    def tree(self, of_all: Sequence[Any], rows: Sequence[jax.Array]) -> PyTree:
        """Returns the tree of combined entries; pairs are divided."""
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
    """Decides how to combine the entries of `aux`, from their shapes for the whole batch.

    Args:
        aux: the entries as shapes.
        examples: the number of examples in the batch.
        is_mean: whether the loss is a mean, so that numbers in `aux` are means too.
        in_parts: whether devices or pieces each return entries for their own examples only.
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


def check_aux_rows(aux: Aux, of_piece: PyTree, arrays: Sequence[Any]) -> None:
    """Checks that arrays with a row for each example of the batch have a row for each example of a piece too."""
    examples = examples_of(arrays)
    for kind, each in zip(aux.kinds, aux.treedef.flatten_up_to(of_piece), strict=True):
        if kind == "examples" and each.shape[0] != examples:
            raise ValueError(
                f"aux: {describe(each)} has as many rows as the batch has examples, but not one row for each example: "
                f"for {examples} examples it also has {each.shape[0]} rows. Add a leading axis over the examples, or "
                "return sums of it as pairs (sum, weight)"
            )


def check_rows(outputs: PyTree, arrays: Sequence[Any]) -> None:
    """Checks that outputs have a row for each example that a device was given."""
    examples = examples_of(arrays)
    for path, each in jtu.tree_flatten_with_path(outputs)[0]:
        if not is_array(each) or each.shape[:1] != (examples,):
            raise ValueError(
                f"outputs{jtu.keystr(path)}: expected an array with one row for each of the {examples} examples that "
                f"it was given, since a device has only these, got {describe(each)}; compute results of all examples "
                "in the loss"
            )
