"""Copies, and exponential moving averages of models: target networks, Polyak averages."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from ._slots.index import Index
from ._slots.layout import Trainable
from ._slots.match import read_slots
from ._slots.parts import Rest, index_in, kept_arrays, put_together, take_apart, with_kept_arrays
from ._slots.rules import first_entries
from ._tree.declare import field
from ._tree.dtypes import is_inexact, widened
from ._tree.lost_ties import keep_apart
from ._tree.messages import name_deleted, warn
from ._tree.recognise import structure_of
from ._tree.structure import flatten, is_array
from ._tree.text import describe
from ._tree.types import PyTree

M = TypeVar("M")
P = ParamSpec("P")
T = TypeVar("T")

Policy = Literal["copy", "keep", "average"]
Buffers = Policy | Mapping[Any, Policy]


def copy(tree: M) -> M:
    """The tree with every array in a buffer of its own; ties are kept.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> online = {"w": jnp.ones(2)}
    >>> target = tp.copy(online)
    >>> target["w"] is online["w"], bool((target["w"] == online["w"]).all())
    (False, True)

    If you made the target network by assignment, it would be tied to the online one, and gone when a step donates that.

    Args:
        tree: any pytree.

    Returns:
        A tree of the same structure. An array at several paths is copied once; leaves that are no arrays stay.
    """
    leaves, treedef = flatten(tree)
    copies: dict[int, Any] = {}
    try:
        for leaf in leaves:
            if id(leaf) not in copies:
                copies[id(leaf)] = copy_leaf(leaf)
    except (RuntimeError, ValueError) as error:
        name_deleted(error, tree)
        raise
    return jtu.tree_unflatten(treedef, [copies[id(leaf)] for leaf in leaves])


def _says_decay(f: Callable[P, T]) -> Callable[P, T]:
    """With an error for `tau`, the other word for how fast an average follows, in place of Python's own."""

    @functools.wraps(f)
    def without_tau(*args: P.args, **options: P.kwargs) -> T:
        if "tau" in options:
            raise TypeError("tau is the weight of the model, decay that of the average: write decay=1 - tau")
        return f(*args, **options)

    return without_tau


@_says_decay
def ema(average: M, model: PyTree, *, decay: ArrayLike, buffers: Buffers = "copy", trainable: Trainable = None) -> M:
    """One step of an exponential moving average: `average + (1 - decay) * (model - average)`.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> online = {"w": jnp.ones(2), "steps": jnp.array(5)}
    >>> target = {"w": jnp.zeros(2), "steps": jnp.array(0)}
    >>> target = tp.ema(target, online, decay=0.9)
    >>> print(target["w"], target["steps"])
    [0.1 0.1] 5

    Each slot is averaged once, in at least float32, and cast back to its own dtype. There a bfloat16 or float16 average
    stops moving once a step is below half the spacing between neighbouring numbers: a `UserWarning`, once for each kind
    of model, says so and points to `tp.Ema`, which keeps float32.

    For a soft update with `tau`, as in the literature, write `decay=1 - tau`.

    Args:
        average: the model averaged so far; trained parameters, ties and dtypes are its own. Start with
            `tp.copy(model)`.
        model: the model now, or another tree with its parameters at the same paths.
        decay: the weight of `average`, a number in [0, 1] or a traced scalar, which never promotes a dtype.
        buffers: the policy for integers, bools, keys and frozen arrays: `"copy"` takes the model's, in a buffer of its
            own; `"keep"` leaves the average's; `"average"` averages the floating ones and copies the others. Or
            `{where: policy}`: the first entry that selects an array gives its policy, and the others are copied.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        The new average. Leaves that are no arrays (functions, Python numbers) are those of `average`.

    Raises:
        ValueError: `decay` is not in [0, 1]; the model lacks an array of the average, or has another shape there;
            `buffers` is no policy, or an entry of it selects nothing, or nothing that earlier ones left; as
            `tp.layout`.
        TypeError: the model is complex where the average is real; `tau` in place of `decay`.
    """
    parts, step = take_apart(average, trainable), step_size(decay)
    # A bfloat16 number has 8 significant bits. A step of 0.001 of the distance soon falls below half the spacing of
    # neighbouring numbers, and rounds to zero: the average stops moving, and nothing shows it.
    narrow = [slot for slot in parts.index.slots if slot.dtype.itemsize < 4]
    if narrow and (isinstance(decay, Tracer) or 0.5 < np.asarray(decay) < 1):  # a step of half the distance arrives
        where = f", as at {narrow[0].path!r}," if narrow[0].path else ""
        warn(
            f"an average in {narrow[0].dtype}{where} stops moving once a step is below half the spacing between "
            "neighbouring numbers; tp.Ema(model, decay=...) keeps it in float32",
            about=("ema", narrow[0].dtype, *parts.index.structure.kinds[:1]),
        )
    news = read_slots(parts.index, model, exact_shapes=True)
    rest = next_rest(parts.rest, model, step, buffers)
    try:
        return put_together(rest, lerp(parts.slots, news, step))
    except (RuntimeError, ValueError) as error:
        name_deleted(error, average)
        name_deleted(error, model)
        raise


def step_size(decay: ArrayLike) -> ArrayLike:
    """`1 - decay`, in double precision where the decay is a Python number."""
    if not (isinstance(decay, (int, float)) or is_array(decay) or isinstance(decay, np.generic)):
        raise TypeError(f"decay must be a number in [0, 1], got {describe(decay)}")
    if jnp.ndim(decay) != 0:
        raise ValueError(f"decay must be a scalar, got shape {jnp.shape(decay)}")
    if isinstance(decay, (int, float, np.generic)) and not 0 <= decay <= 1:
        raise ValueError(f"decay must be between 0 and 1, got {decay}")
    return 1 - decay


@jax.jit
def lerp(olds: Sequence[Any], news: Sequence[Any], step: ArrayLike) -> list[Any]:
    """`old + step * (new - old)` of each pair, computed in at least float32, in the dtype of `old`."""
    # One program for all pairs: one call of a compiled function in place of a few operations for each.
    return [_lerp_one(old, new, step) for old, new in zip(olds, news, strict=True)]


def _lerp_one(old: jax.Array, new: ArrayLike, step: ArrayLike) -> jax.Array:
    wide = widened(old.dtype)
    start = old.astype(wide)
    return (start + jnp.asarray(step).astype(wide) * (jnp.asarray(new).astype(wide) - start)).astype(old.dtype)


def next_rest(rest: Rest[M], model: PyTree, step: ArrayLike, buffers: Buffers) -> Rest[M]:
    """The rest of an average after a step: the arrays that are no slots, by their policies."""
    olds = kept_arrays(rest)
    policies = _policies(index_in(rest), olds, buffers)
    if all(policy == "keep" for policy in policies.values()):  # or there are none
        return rest
    leaves, _, others = structure_of(model)
    found = {path: leaves[i] for path, i in others.index.items()}
    wrong = [
        f"{path!r} (shape {jnp.shape(old)}; {'nothing' if path not in found else f'shape {jnp.shape(found[path])}'})"
        for path, old in olds.items()
        if policies[path] != "keep" and (path not in found or jnp.shape(found[path]) != jnp.shape(old))
    ]
    if wrong:
        raise ValueError(
            f"what is not trained is taken from the model, which has not what the average has at {', '.join(wrong)}; "
            'write buffers="keep" to leave the average\'s, or buffers={where: "keep"} for some'
        )
    return with_kept_arrays(
        rest, [_next_array(policies[path], old, found.get(path), step) for path, old in olds.items()]
    )


def _next_array(policy: str, old: Any, new: Any, step: ArrayLike) -> Any:
    """An array of the rest after a step; `new` is the model's, or `None` where it has none and its own is kept."""
    if policy == "keep":
        return old
    if policy == "average" and is_inexact(jnp.result_type(old)) and is_inexact(jnp.result_type(new)):
        return lerp([old], [new], step)[0]
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):  # `jnp.array` takes no such dtype
        return copy_leaf(new)
    return jnp.array(new, jax.dtypes.canonicalize_dtype(old.dtype), copy=True)


def _policies(index: Index, paths: Collection[str], buffers: Buffers) -> dict[str, str]:
    """The policy for the array at each path."""
    rules = buffers if isinstance(buffers, Mapping) else {"**": buffers}
    for policy in rules.values():
        if policy not in ("copy", "keep", "average"):
            raise ValueError(
                f'buffers must be "copy", "keep" or "average", or a dict from where to these, got {policy!r}'
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


def copy_leaf(leaf: Any) -> Any:
    """A copy of an array; anything else as it is."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


# -- An average that is carried along ----------------------------------------------------------------------------------


class Ema(eqx.Module, Generic[M]):
    """An exponential moving average of a model, kept in float32.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> model = {"w": jnp.zeros(2, jnp.bfloat16)}
    >>> ema = tp.Ema(model, decay=0.999)
    >>> for _ in range(1000):
    ...     ema = ema.update({"w": jnp.ones(2, jnp.bfloat16)})
    >>> print(ema.average["w"])  # 1 - 0.999**1000; averaged in bfloat16 it sticks
    [0.632812 0.632812]

    It is a pytree of arrays, with all else static: it goes through `jax.jit`, into `scan` as a carry, and may be
    donated (it shares no buffer with the model it was made from).

    Attributes:
        shadow: the averages, a canonical tree, float32 (float64 of a float64 leaf, complex64 of a complex one).
        rest: the frozen arrays and all else of the model.
        count: how many times it was updated.
        weight: how much of the average comes from updates, `1 - decay**count` for a constant decay.
    """

    shadow: PyTree = field(trainable=False)
    rest: Rest[M] = field(trainable=False)
    count: Int[Array, ""] = field(trainable=False)
    weight: Float[Array, ""] = field(trainable=False)
    decay: float | Callable[[Any], Any] = field(static=True)
    debias: bool = field(static=True)
    warmup: bool = field(static=True)
    buffers: Buffers = field(static=True)

    @_says_decay
    def __init__(
        self,
        model: M,
        decay: float | Callable[[Any], Any],
        *,
        debias: bool = False,
        warmup: bool = False,
        buffers: Buffers = "copy",
        trainable: Trainable = None,
    ) -> None:
        """Starts the average at the values of `model`, in buffers of its own.

        Args:
            model: any pytree.
            decay: the weight of the average in each step, in [0, 1]; or a function from the number of updates so far to
                it, such as an Optax schedule.
            debias: whether the values at the start have no weight: the average is that of the updates alone, as with
                Adam's correction by `1 - decay**count`. Before the first update it is the model.
            warmup: whether the decay starts low: `min(decay, (1 + count) / (10 + count))`.
            buffers: the policy for integers, bools, keys and frozen arrays; see `tp.ema`.
            trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        """
        if isinstance(model, (int, float)):
            raise TypeError(f"expected a model, got {model!r}; the model comes first: tp.Ema(model, decay)")
        if isinstance(decay, Tracer):
            raise TypeError("the decay of an Ema is static; pass a function of the count, or use tp.ema")
        if not callable(decay):
            step_size(decay)  # checks it
            decay = float(decay)
        parts = take_apart(model, trainable)
        self.shadow = parts.canonical([jnp.array(slot, widened(slot.dtype), copy=True) for slot in parts.slots])
        self.rest = with_kept_arrays(parts.rest, list(map(copy_leaf, kept_arrays(parts.rest).values())))
        self.count = jnp.zeros((), jnp.int32)
        self.weight = jnp.zeros((), jnp.float32)
        self.decay = decay
        self.debias = debias
        self.warmup = warmup
        self.buffers = buffers

    def update(self, model: PyTree) -> "Ema[M]":
        """The average after one more model.

        Args:
            model: the model now, or another tree with its parameters at the same paths.

        Returns:
            The new average, of the same structure, shapes and dtypes.

        Raises:
            ValueError: the model lacks an array of the average, or has another shape there.
            TypeError: the model is complex where the average is real.
        """
        decay = self.decay(self.count) if callable(self.decay) else self.decay
        step = step_size(jnp.minimum(decay, (1 + self.count) / (10 + self.count)) if self.warmup else decay)
        weight = jnp.asarray(self.weight + step * (1 - self.weight), jnp.float32)
        if self.debias:
            # Each model so far weighs decay**k * (1 - decay), and all of them together `weight`. Taking the step
            # divided by the new weight is the same as dividing by the weight at the end, but the shadow is itself the
            # average at any time; the first step is 1, so that the values at the start go.
            step = jnp.where(weight > 0, step / jnp.where(weight > 0, weight, 1), 0)
        news = read_slots(index_in(self.rest), model, exact_shapes=True)
        rest = next_rest(self.rest, model, step, self.buffers)
        olds, treedef = jtu.tree_flatten(self.shadow)
        shadow = jtu.tree_unflatten(treedef, lerp(olds, news, step))
        changed = shadow, rest, self.count + 1, weight
        return eqx.tree_at(lambda ema: (ema.shadow, ema.rest, ema.count, ema.weight), self, changed)

    @property
    def average(self) -> M:
        """The averaged model: each parameter in its own dtype, ties and frozen arrays included.

        You get a new one at each access, in buffers of its own, so that a donated `Ema` does not take it along.
        """
        slots = [
            jax.lax.convert_element_type(value, slot.dtype)
            for value, slot in zip(jtu.tree_leaves(self.shadow), self.rest.layout.slots, strict=True)
        ]
        average = copy(put_together(self.rest, slots))
        keep_apart(jtu.tree_leaves(average))
        return average


Ema.__module__ = "treeparams"
