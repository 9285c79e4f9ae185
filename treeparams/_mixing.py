"""One step of an average: its parameters, and everything else by the policies of `buffers`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from ._slots.index import Index
from ._slots.layout import Layout, Trainable, trained_at
from ._slots.parts import Parts, Rest, index_in, kept_arrays, other_values, take_apart, with_kept_arrays
from ._slots.rules import first_entries
from ._tree.copying import copy_leaf
from ._tree.dtypes import is_complex, is_inexact, widened
from ._tree.numbers import NUMBERS, was_number
from ._tree.recognise import structure_of
from ._tree.refs import is_ref, value_of
from ._tree.structure import is_array
from ._tree.text import describe
from ._tree.types import PyTree

M = TypeVar("M")

Policy = Literal["copy", "keep", "average"]
Buffers = Policy | Mapping[Any, Policy]


class Weights(NamedTuple):
    """The weights of one step."""

    of_model: ArrayLike
    of_average: ArrayLike | None  # None: what `of_model` leaves of one


def weights_of(decay: ArrayLike | None, tau: ArrayLike | None) -> Weights:
    """Returns the weights for `decay` or `tau`; Python numbers are subtracted in double precision."""
    if decay is None and tau is not None:
        _check_weight("tau", tau)
        return Weights(tau, None if isinstance(tau, (int, float)) and tau == 1 else 1 - tau)
    if decay is not None and tau is None:
        _check_weight("decay", decay)
        return Weights(1 - decay, None)
    raise TypeError(
        "pass either decay, the weight of the average, or tau = 1 - decay, the weight of the model; got "
        + ("neither" if tau is None else "both")
    )


def _check_weight(name: str, value: ArrayLike) -> None:
    if not (isinstance(value, (int, float, np.generic)) or is_array(value)):
        raise TypeError(f"{name} must be a number in [0, 1], got {describe(value)}")
    if jnp.ndim(value) != 0:
        raise ValueError(f"{name} must be a scalar, got shape {jnp.shape(value)}")
    if isinstance(value, (int, float, np.generic)) and not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


@jax.jit
def mix(olds: Sequence[Any], news: Sequence[Any], weights: Weights) -> list[Any]:
    """Averages each pair by the weights, in at least float32, and returns it in the dtype of the old value."""
    # One program for all pairs: one call of a compiled function in place of a few operations for each.
    return [_mix_one(old, new, weights) for old, new in zip(olds, news, strict=True)]


def _mix_one(old: jax.Array, new: ArrayLike, weights: Weights) -> jax.Array:
    wide, new = widened(old.dtype), jnp.asarray(new)
    of_new, start, end = (jnp.asarray(each).astype(wide) for each in (weights.of_model, old, new))
    # An average that has overflowed, or is not a number, is replaced too where the model weighs one.
    is_all = of_new == 1
    if weights.of_average is None:
        mixed = start + of_new * (end - start)
    else:
        of_old = jnp.asarray(weights.of_average).astype(wide)
        if not is_complex(wide):
            # A choice after the sum would change how XLA fuses a product into it, and so the last bit. Adding -0.0
            # leaves every number as it is.
            return (of_new * end + of_old * jnp.where(is_all, -0.0, start)).astype(old.dtype)
        mixed = of_new * end + of_old * start
    return jnp.where(is_all, new.astype(old.dtype), mixed.astype(old.dtype))


def average_apart(average: M, trainable: Trainable) -> Parts[M]:
    """Takes an average apart. No Python number, even if `jax.jit` made it a tracer, and no ref is a parameter of it."""
    if isinstance(trainable, Layout):
        return take_apart(average, trainable)
    parts = take_apart(average, trainable, allow_refs=True)
    pairs = zip(parts.index.positions, parts.slots, strict=True)
    leaves = [leaf for leaf, slot in pairs if not (is_ref(slot) or _is_number(parts.index, leaf, slot))]
    return parts if len(leaves) == len(parts.slots) else take_apart(average, trained_at(parts.layout, leaves))


def next_rest(rest: Rest[M], model: PyTree, weights: Weights, buffers: Buffers) -> Rest[M]:
    """Returns the rest of an average after a step: arrays that are not slots, and numbers, each by its policy."""
    arrays, values = kept_arrays(rest), other_values(rest)
    olds = arrays | {path: value for path, value in values.items() if type(value) in NUMBERS or is_ref(value)}
    policies = _policies(index_in(rest), olds, buffers)
    if all(policy == "keep" for policy in policies.values()):  # or there are none
        return rest
    leaves, _, others = structure_of(model)
    found = {path: leaves[i] for path, i in others.index.items()}
    wrong = [
        f"{path!r} (shape {jnp.shape(old)}; {_found_at(path, found)})"
        for path, old in olds.items()
        if policies[path] != "keep" and not _fits(old, found.get(path, old if path in values else None))
    ]
    if wrong:
        raise ValueError(
            f"arrays that are not trained are copied from the model, which does not match the average at "
            f'{", ".join(wrong)}; write buffers="keep" to keep the average\'s, or buffers={{where: "keep"}} for some'
        )
    index = index_in(rest)
    # As an integer: a number is not averaged.
    taken = [path for path, old in arrays.items() if _is_number(index, index.structure.index[path], old)]
    policies |= {path: "take" for path in taken if policies[path] != "keep"}
    nexts = {path: _next(policies[path], old, found.get(path, old), weights) for path, old in olds.items()}
    news = [nexts.get(path, value) for path, value in values.items()]
    return with_kept_arrays(rest, [nexts[path] for path in arrays], news if len(olds) > len(arrays) else None)


def _found_at(path: str, found: Mapping[str, Any]) -> str:
    if path not in found:
        return "nothing"
    is_one = _is_number_or_array(found[path])
    return f"shape {jnp.shape(found[path])}" if is_one else describe(found[path])


def _fits(old: Any, new: Any) -> bool:
    return _is_number_or_array(new) and jnp.shape(new) == jnp.shape(old)


def _is_number_or_array(value: object) -> bool:
    return is_array(value) or is_ref(value) or type(value) in NUMBERS


def _next(policy: str, old: Any, new: Any, weights: Weights) -> Any:
    """Returns an array or number of the rest after a step."""
    if policy == "keep":
        return old
    if is_ref(old):  # the average writes its own one, and never the one of the model
        own = copy_leaf(old) if old is new else old
        own[...] = _next(policy, value_of(old), value_of(new), weights)
        return own
    new = value_of(new)
    if policy == "take":
        return new
    if type(old) in NUMBERS:
        return new.item() if is_array(new) and not isinstance(new, Tracer) else new
    if policy == "average" and is_inexact(jnp.result_type(old)) and is_inexact(jnp.result_type(new)):
        return mix([old], [new], weights)[0]
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):  # `jnp.array` takes no such dtype
        return copy_leaf(new)
    return jnp.array(new, jax.dtypes.canonicalize_dtype(old.dtype), copy=True)


def _is_number(index: Index, leaf: int, value: Any) -> bool:
    """Returns whether a leaf is a tracer that a trace made from a Python number: a scalar with a weak type."""
    is_weak = isinstance(value, Tracer) and not value.shape and getattr(value, "weak_type", False)
    return is_weak and was_number(index.structure, leaf)


def _policies(index: Index, paths: Collection[str], buffers: Buffers) -> dict[str, str]:
    """Returns the policy for the array at each path."""
    rules = buffers if isinstance(buffers, Mapping) else {"**": buffers}
    for policy in rules.values():
        if policy not in ("copy", "keep", "average"):
            raise ValueError(
                f'buffers must be "copy", "keep" or "average", or a dict {{where: policy}}, got {policy!r}'
            )
    if isinstance(buffers, str):
        return dict.fromkeys(paths, buffers)
    structure, policies = index.structure, list(rules.values())
    kept = {path: structure.index[path] for path in paths}
    places = [i for i, first in enumerate(structure.first) if first in kept.values()]
    sources = {path: index.sources.get(i, i) for path, i in kept.items()}
    asked, kind = frozenset(sources.values()), "frozen or integer array"
    found = first_entries(index, list(rules), places, asked=asked, kind=kind)
    return {path: policies[found[i]] if i in found else "copy" for path, i in sources.items()}
