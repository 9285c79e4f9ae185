"""Copies, and exponential moving averages of models: target networks, Polyak averages.

A trained parameter is averaged once for all paths of its tie. Everything else is read and written at its own path,
even if the average or the model holds one array at several: two counters that start with one array are two counters.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from ._slots.accidents import keep_apart
from ._slots.index import Index
from ._slots.layout import Trainable
from ._slots.parts import Parts, Rest, take_apart
from ._tree.declare import field
from ._tree.structure import flatten, is_array, naming_deleted, structure_of
from ._tree.text import AS_ARRAY, describe, warn
from ._tree.types import PyTree, copy_leaf, is_complex, is_inexact, is_key, is_ref, value_of, widened

M = TypeVar("M")

Policy = Literal["copy", "keep", "average"]
Buffers = Policy | Mapping[Any, Policy]


def copy(tree: M) -> M:
    """Copies every array of a tree into a new buffer; ties are kept.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> online = {"w": jnp.ones(2)}
    >>> target = tp.copy(online)
    >>> target["w"] is online["w"], bool((target["w"] == online["w"]).all())
    (False, True)

    If you made the target network by assignment, it would share its arrays with the online network, and a step that
    donates the online network would delete them.

    Args:
        tree: any pytree.

    Returns:
        A tree of the same structure. An array at several paths is copied once; a ref (`jax.new_ref`) becomes a new ref;
        leaves that are not arrays are unchanged.
    """
    leaves, treedef = flatten(tree)
    distinct = {id(leaf): leaf for leaf in leaves}
    with naming_deleted(tree):
        copies = {identity: copy_leaf(leaf) for identity, leaf in distinct.items()}
    return jtu.tree_unflatten(treedef, [copies[id(leaf)] for leaf in leaves])


def ema(
    average: M,
    model: PyTree,
    *,
    decay: ArrayLike | None = None,
    tau: ArrayLike | None = None,
    buffers: Buffers = "copy",
    trainable: Trainable = None,
) -> M:
    """Takes one step of an exponential moving average: `average + (1 - decay) * (model - average)`.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> online = {"w": jnp.ones(2), "steps": jnp.array(5)}
    >>> target = {"w": jnp.zeros(2), "steps": jnp.array(0)}
    >>> target = tp.ema(target, online, decay=0.9)
    >>> print(target["w"], target["steps"])
    [0.1 0.1] 5

    A tied parameter is averaged once. Each parameter is averaged in at least float32 and cast back to its own dtype. A
    bfloat16 or float16 average stops moving once a step is smaller than half the spacing between neighbouring numbers.
    You get a `UserWarning` about this once for each kind of model; `tp.Ema` keeps the average in float32.

    For the soft update of a target network you can pass `tau`, which is `1 - decay`. The result is then rounded as in
    `optax.incremental_update`, `tau * model + (1 - tau) * average`. Inside `jit` the two agree to the last bit, so a
    program that you port keeps its numbers. `decay` is more accurate. The page "Promises" of the documentation says by
    how much, and how other expressions are rounded. With `decay=0` or `tau=1` the result equals the model bit for bit,
    with `decay=1` or `tau=0` the average. Nothing overflows near the largest float.

    Each array that is not trained is read and written at its own path, even if the average or the model holds one
    array object at several paths: two counters that start with the same `jnp.array(0)` are two counters.

    Python numbers are not averaged. A number that is equal in both stays (a rate, `dropout.p`), and any other is an
    error, so write `jnp.asarray(number)`. `jax.jit` turns the numbers among its arguments into arrays, which are
    averaged like all others; to leave them out, pass a `Layout` that you made outside.

    Args:
        average: the average so far. It decides the trained parameters, the ties and the dtypes. Start with
            `tp.copy(model)`.
        model: the current model, or another tree with its parameters at the same paths.
        decay: the weight of `average`, a number in [0, 1] or a traced scalar, which never promotes a dtype.
        tau: the weight of `model`. Pass either `decay` or `tau`.
        buffers: the policy for integers, bools, keys and frozen arrays. `"copy"` copies the model's array, `"keep"`
            keeps the average's, and `"average"` averages floating arrays and copies the others. Or `{where: policy}`:
            the first entry that selects an array gives its policy, and arrays that no entry selects are copied. A ref
            (`jax.new_ref`) of the average counts as a frozen array, and the result is written into it. With `"keep"` a
            Python number stays, whatever the model has.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        The new average. Functions, bools, numbers and other leaves that are not arrays come from `average`.

    Raises:
        ValueError: `decay` or `tau` is not in [0, 1]; the model lacks an array of the average, or has one of another
            shape; a Python number in one of the two is an array or another number in the other; `buffers` is not a
            policy; an entry of `buffers` selects nothing, or only arrays that earlier entries selected; see also
            `tp.layout`.
        TypeError: the model is complex where the average is real; you passed both `decay` and `tau`, or neither.
    """
    parts, weights = take_apart(average, trainable, by_path=True), _weights_of(decay, tau)
    # A bfloat16 number has 8 significant bits. A step of 0.001 of the distance soon falls below half the spacing of
    # neighbouring numbers, and rounds to zero: the average stops moving, and nothing shows it.
    narrow, step = [parts.index.slots[slot] for slot in parts.index.narrow_slots], weights.of_model
    if narrow and (isinstance(step, Tracer) or 0 < np.asarray(step) < 0.5):  # a step of half the distance arrives
        where = f", as at {narrow[0].path!r}," if narrow[0].path else ""
        warn(
            f"an average in {narrow[0].dtype}{where} stops moving once a step is below half the spacing between "
            "neighbouring numbers; tp.Ema(model, decay=...) keeps it in float32",
            about=("ema", narrow[0].dtype, *parts.index.structure.kinds[:1]),
        )
    with naming_deleted(average, model):
        after = _average_step(parts, model, weights, buffers)
        return after.model(after.slots)


class Ema(eqx.Module, Generic[M]):
    """An exponential moving average of a model, kept in float32.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> model = {"w": jnp.zeros(2, jnp.bfloat16)}
    >>> ema = tp.Ema(model, decay=0.999)
    >>> for _ in range(1000):
    ...     ema = ema.update({"w": jnp.ones(2, jnp.bfloat16)})
    >>> print(ema.average["w"])  # 1 - 0.999**1000; averaged in bfloat16 it sticks
    [0.632812 0.632812]

    An `Ema` is a pytree of arrays with everything else static. You can pass it to `jax.jit`, carry it through `scan`
    and donate it: it shares no buffer with the model that you made it from.

    Attributes:
        shadow: the averages as a canonical tree, in float32 (float64 for a float64 leaf, complex64 for a complex one).
        rest: the frozen arrays and everything else in the model.
        count: the number of updates so far.
        weight: how much of the average comes from updates: `1 - decay**count` for a constant decay.
    """

    shadow: PyTree = field(trainable=False)
    rest: Rest[M] = field(trainable=False)
    count: Int[Array, ""] = field(trainable=False)
    weight: Float[Array, ""] = field(trainable=False)
    decay: float | Callable[[Any], Any] | None = field(static=True)
    tau: float | Callable[[Any], Any] | None = field(static=True)
    debias: bool = field(static=True)
    warmup: bool = field(static=True)
    buffers: Buffers = field(static=True)

    def __repr__(self) -> str:
        rate = f"decay={self.decay}" if self.tau is None else f"tau={self.tau}"
        return f"Ema({rate}, {self.rest.layout!r})"

    def __init__(
        self,
        model: M,
        decay: float | Callable[[Any], Any] | None = None,
        *,
        tau: float | Callable[[Any], Any] | None = None,
        debias: bool = False,
        warmup: bool = False,
        buffers: Buffers = "copy",
        trainable: Trainable = None,
    ) -> None:
        """Starts the average at the values of `model`, in new buffers.

        Args:
            model: any pytree.
            decay: the weight of the average in each step, in [0, 1]; or a function from the number of updates so far to
                that weight, such as an Optax schedule.
            tau: `1 - decay`, the weight of the model in each step, or a function that returns it; rounded as in
                `tp.ema`. Pass either `decay` or `tau`.
            debias: if `True`, the initial values have no weight: the result averages the updates alone, as in Adam's
                correction by `1 - decay**count`. Before the first update it equals the model.
            warmup: if `True`, the decay starts low: `min(decay, (1 + count) / (10 + count))`.
            buffers: the policy for integers, bools, keys and frozen arrays; see `tp.ema`. In a step, Python
                numbers must be equal to those of the model, or kept.
            trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        """
        if isinstance(model, (int, float)):
            raise TypeError(f"expected a model, got {model!r}; the model comes first: tp.Ema(model, decay)")
        if isinstance(decay, Tracer) or isinstance(tau, Tracer):
            raise TypeError("decay and tau of an Ema are static; pass a function of the count, or use tp.ema")
        # A function is asked at each step; here it stands for any number.
        _weights_of(0.0 if callable(decay) else decay, 0.0 if callable(tau) else tau)
        parts = take_apart(model, trainable, by_path=True)
        self.shadow = parts.canonical([jnp.array(slot, widened(slot.dtype), copy=True) for slot in parts.slots])
        self.rest = parts.rest.replaced(map(copy_leaf, parts.rest.arrays), map(copy_leaf, parts.rest.values))
        self.count, self.weight = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        self.decay = decay if decay is None or callable(decay) else float(decay)
        self.tau = tau if tau is None or callable(tau) else float(tau)
        self.debias, self.warmup, self.buffers = debias, warmup, buffers

    def update(self, model: PyTree) -> "Ema[M]":
        """Returns the average after one more model.

        Args:
            model: the current model, or another tree with its parameters at the same paths.

        Returns:
            The new average, with the same structure, shapes and dtypes.

        Raises:
            ValueError: the model lacks an array of the average, or has one of another shape, or a Python number where
                the average has an array or another number, or the other way round.
            TypeError: the model is complex where the average is real.
        """
        decay, tau = (said(self.count) if callable(said) else said for said in (self.decay, self.tau))
        step = _weights_of(decay, tau).of_model
        if self.warmup:
            step = jnp.maximum(step, 9 / (10 + self.count))
        weight = jnp.asarray(self.weight + step * (1 - self.weight), jnp.float32)
        if self.debias:
            # Each model so far weighs decay**k * (1 - decay), and all of them together `weight`. Taking the step
            # divided by the new weight is the same as dividing by the weight at the end, but the shadow is itself the
            # average at any time; the first step is 1, so that the values at the start go.
            step = jnp.where(weight > 0, step / jnp.where(weight > 0, weight, 1), 0)
        weights = _weights_of(None, step) if decay is None else _Weights(step, None)
        olds, treedef = jtu.tree_flatten(self.shadow)
        after = _average_step(Parts(tuple(olds), self.rest), model, weights, self.buffers)
        changed = jtu.tree_unflatten(treedef, after.slots), after.rest, self.count + 1, weight
        return eqx.tree_at(lambda ema: (ema.shadow, ema.rest, ema.count, ema.weight), self, changed)

    @property
    def average(self) -> M:
        """The averaged model: each parameter in its own dtype, ties and frozen arrays included.

        Each access returns a new model in new buffers, so you can donate the `Ema` and keep the model.
        """
        pairs = zip(jtu.tree_leaves(self.shadow), self.rest.layout.slots, strict=True)
        slots = [jax.lax.convert_element_type(value, slot.dtype) for value, slot in pairs]
        average = copy(self.rest.model(slots))
        keep_apart(jtu.tree_leaves(average))
        return average


Ema.__module__ = "treeparams"


# -- One step ----------------------------------------------------------------------------------------------------------


class _Weights(NamedTuple):
    """The weights of one step."""

    of_model: ArrayLike
    of_average: ArrayLike | None  # None: the rest of one


def _weights_of(decay: ArrayLike | None, tau: ArrayLike | None) -> _Weights:
    """Returns the weights for `decay` or `tau`; Python numbers are subtracted in double precision."""
    given = [(name, value) for name, value in (("decay", decay), ("tau", tau)) if value is not None]
    if len(given) != 1:
        either = "pass either decay, the weight of the average, or tau = 1 - decay, the weight of the model"
        raise TypeError(f"{either}; got {'both' if given else 'neither'}")
    ((name, value),) = given
    is_number = isinstance(value, (int, float, np.generic))
    if not (is_number or is_array(value)):
        raise TypeError(f"{name} must be a number in [0, 1], got {describe(value)}")
    if jnp.ndim(value) != 0 or (is_number and not 0 <= value <= 1):
        raise ValueError(f"{name} must be a scalar between 0 and 1, got {value}")
    if name == "decay":
        return _Weights(1 - value, None)
    return _Weights(value, None if is_number and value == 1 else 1 - value)


def _average_step(parts: Parts[M], model: PyTree, weights: _Weights, buffers: Buffers) -> Parts[M]:
    """Returns an average after a step towards a model. Refs are written after all checks."""
    index, rest = parts.index, parts.rest
    arrays = dict(zip(rest.paths, rest.arrays, strict=True))
    values = dict(zip(index.gathers.values(index.structure.paths), rest.values, strict=True))
    news = index.read(model, exact_shapes=True)
    olds = arrays | {path: value for path, value in values.items() if _is_number(value) or is_ref(value)}
    policies = _policies(index, olds, buffers)
    olds = {path: old for path, old in olds.items() if policies[path] != "keep"}
    found: dict[str, Any] = {}
    if olds:
        leaves, _, structure = structure_of(model)
        found = {path: leaves[i] for path, i in structure.index.items() if path in olds}
    paths = [slot.path for slot in index.slots]
    _check_alike(olds | dict(zip(paths, parts.slots, strict=True)), found | dict(zip(paths, news, strict=True)))
    steps = {path: _next(policies[path], olds[path], new, weights) for path, new in found.items()}
    kept = [steps.get(path, array) for path, array in arrays.items()]
    written = [steps.get(path, value) for path, value in values.items()] if index.structure.refs else None
    return Parts(tuple(_mix(parts.slots, news, weights)), rest.replaced(kept, written))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, complex, np.number)) and not isinstance(value, bool)  # bools are flags


def _check_alike(olds: Mapping[str, Any], news: Mapping[str, Any]) -> None:
    """Raises a `ValueError` where the model has no array of the average's shape, or not the same number."""

    def are_alike(old: Any, new: Any) -> bool:
        if _is_number(old) or _is_number(new):
            return _is_number(old) and _is_number(new) and bool(old == new or (old != old and new != new))
        return (is_array(new) or is_ref(new) or isinstance(new, bool)) and jnp.shape(new) == jnp.shape(old)

    # The model may lack a number: it would not be read.
    wrong = [path for path, old in olds.items() if not (_is_number(old) and path not in news)]
    wrong = [path for path in wrong if not are_alike(olds[path], news.get(path))]
    said = lambda path, tree: repr(tree[path]) if _is_number(tree.get(path)) else describe(tree.get(path))
    if wrong:
        at = ", ".join(f"{path!r} ({said(path, olds)}; {said(path, news)})" for path in wrong)
        what = f"the model does not match the average at {at}. A Python number is not averaged: {AS_ARRAY}, for both"
        keep = 'write buffers="keep", or buffers={where: "keep"} for some'
        raise ValueError(f"{what}. To keep the average's arrays and numbers, {keep}")


def _next(policy: str, old: Any, new: Any, weights: _Weights) -> Any:
    """Returns the leaf at a path of an average after a step, from that of the model; no slot is there."""
    if is_ref(old):  # the average writes its own one, and never the one of the model
        own = copy_leaf(old) if old is new else old
        own[...] = _next(policy, value_of(old), value_of(new), weights)
        return own
    new = value_of(new)
    if not is_array(old):  # an equal number
        return old
    if policy == "average" and is_inexact(old.dtype) and is_inexact(jnp.result_type(new)):
        return _mix([old], [new], weights)[0]
    if is_key(old):  # `jnp.array` takes no such dtype
        return copy_leaf(new)
    return jnp.array(new, jax.dtypes.canonicalize_dtype(old.dtype), copy=True)


def _policies(index: Index, paths: Collection[str], buffers: Buffers) -> dict[str, str]:
    """Returns the policy for the array, ref or number at each path."""
    rules = buffers if isinstance(buffers, Mapping) else {"**": buffers}
    for policy in rules.values():
        if policy not in ("copy", "keep", "average"):
            expected = 'buffers must be "copy", "keep" or "average", or a dict {where: policy}'
            raise ValueError(f"{expected}, got {policy!r}")
    if isinstance(buffers, str):
        return dict.fromkeys(paths, buffers)
    structure, policies = index.structure, list(rules.values())
    untied = structure.remember("without ties", lambda: Index(structure, index.trained, ()))
    leaves = [structure.index[path] for path in paths]
    found = untied.first_entries(list(rules), leaves, asked=leaves)
    return {path: policies[found[i]] if i in found else "copy" for path, i in zip(paths, leaves, strict=True)}


@jax.jit
def _mix(olds: Sequence[Any], news: Sequence[Any], weights: _Weights) -> list[Any]:
    """Averages each pair by the weights, in at least float32, and returns it in the dtype of the old value."""
    # One program for all pairs: one call of a compiled function in place of a few operations for each.
    return [_mix_one(old, new, weights) for old, new in zip(olds, news, strict=True)]


def _mix_one(old: jax.Array, new: ArrayLike, weights: _Weights) -> jax.Array:
    wide, new = widened(old.dtype), jnp.asarray(new)
    of_new, start, end = (jnp.asarray(each).astype(wide) for each in (weights.of_model, old, new))
    # An average that has overflowed, or is not a number, is replaced too where the model weighs one, and stays where
    # the average does.
    is_all, is_none = of_new == 1, of_new == 0
    if weights.of_average is not None:
        of_old = jnp.asarray(weights.of_average).astype(wide)
        if not is_complex(wide):
            # A choice after the sum would change how XLA fuses a product into it, and so the last bit. Adding -0.0
            # leaves every number as it is.
            end, start = jnp.where(is_none, -0.0, end), jnp.where(is_all, -0.0, start)
            return (of_new * end + of_old * start).astype(old.dtype)
        mixed = of_new * end + of_old * start
    else:
        # The difference of two large numbers may overflow. A choice before the sum would change its last bit, too.
        mixed = start + of_new * (end - start)
        mixed = jnp.where(jnp.isfinite(mixed), mixed, start - (of_new * start - of_new * end))
    mixed = jnp.where(is_none, start, mixed)
    return jnp.where(is_all, new.astype(old.dtype), mixed.astype(old.dtype))
