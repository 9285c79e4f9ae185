"""Exponential moving averages of models: target networks, Polyak averages."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from ._mixing import Buffers, Weights, average_apart, mix, next_rest, weights_of
from ._slots.layout import Trainable
from ._slots.match import read_slots
from ._slots.parts import Rest, index_in, kept_arrays, other_values, put_together, with_kept_arrays
from ._tree.copying import copy, copy_leaf
from ._tree.declare import field
from ._tree.dtypes import widened
from ._tree.memory import keep_apart
from ._tree.messages import name_deleted, warn
from ._tree.types import PyTree

M = TypeVar("M")


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
    program that you port keeps its numbers. `decay` is more accurate, because the two weights of the other formula do
    not add up to exactly one. After 10^6 float32 steps towards a noisy model, the errors relative to float64 were 2e-7
    with `decay` and 9e-7 with `tau` at `tau=0.005`, 6e-7 and 1e-5 at 0.001, 2e-6 and 2e-4 at 0.0001; in bfloat16 they
    are equal. With `decay=0` or `tau=1` the result equals the model, bit for bit.

    Args:
        average: the average so far. It decides the trained parameters, the ties and the dtypes. Start with
            `tp.copy(model)`.
        model: the current model, or another tree with its parameters at the same paths.
        decay: the weight of `average`, a number in [0, 1] or a traced scalar, which never promotes a dtype.
        tau: the weight of `model`. Pass either `decay` or `tau`.
        buffers: the policy for integers, bools, keys and frozen arrays. `"copy"` copies the model's array, `"keep"`
            keeps the average's, and `"average"` averages floating arrays and copies the others. Or `{where: policy}`:
            the first entry that selects an array gives its policy, and arrays that no entry selects are copied. A ref
            (`jax.new_ref`) of the average counts as a frozen array, and the result is written into it. A Python number
            follows the policy for integer arrays. `jax.jit` turns such a number into an array; it keeps this policy if
            the library has seen such a model outside a trace (in `tp.copy`, `tx.init`, `tp.layout`, ...).
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        The new average. Functions and other leaves that are not arrays come from `average`, and so do Python numbers
        that the model does not have.

    Raises:
        ValueError: `decay` or `tau` is not in [0, 1]; the model lacks an array of the average, or has one of another
            shape; `buffers` is not a policy; an entry of `buffers` selects nothing, or only arrays that earlier entries
            selected; see also `tp.layout`.
        TypeError: the model is complex where the average is real; you passed both `decay` and `tau`, or neither.
    """
    parts, weights = average_apart(average, trainable), weights_of(decay, tau)
    # A bfloat16 number has 8 significant bits. A step of 0.001 of the distance soon falls below half the spacing of
    # neighbouring numbers, and rounds to zero: the average stops moving, and nothing shows it.
    narrow = [parts.index.slots[slot] for slot in parts.index.narrow_slots]
    step = weights.of_model
    if narrow and (isinstance(step, Tracer) or 0 < np.asarray(step) < 0.5):  # a step of half the distance arrives
        where = f", as at {narrow[0].path!r}," if narrow[0].path else ""
        warn(
            f"an average in {narrow[0].dtype}{where} stops moving once a step is below half the spacing between "
            "neighbouring numbers; tp.Ema(model, decay=...) keeps it in float32",
            about=("ema", narrow[0].dtype, *parts.index.structure.kinds[:1]),
        )
    news = read_slots(parts.index, model, exact_shapes=True)
    rest = next_rest(parts.rest, model, weights, buffers)
    try:
        return put_together(rest, mix(parts.slots, news, weights))
    except (RuntimeError, ValueError) as error:
        name_deleted(error, average)
        name_deleted(error, model)
        raise


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
            buffers: the policy for integers, bools, keys and frozen arrays; see `tp.ema`. Python numbers stay as they
                are.
            trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        """
        if isinstance(model, (int, float)):
            raise TypeError(f"expected a model, got {model!r}; the model comes first: tp.Ema(model, decay)")
        if isinstance(decay, Tracer) or isinstance(tau, Tracer):
            raise TypeError("decay and tau of an Ema are static; pass a function of the count, or use tp.ema")
        # A function is asked at each step; here it stands for any number.
        weights_of(0.0 if callable(decay) else decay, 0.0 if callable(tau) else tau)
        parts = average_apart(model, trainable)
        self.shadow = parts.canonical([jnp.array(slot, widened(slot.dtype), copy=True) for slot in parts.slots])
        kept, values = (list(map(copy_leaf, of(parts.rest).values())) for of in (kept_arrays, other_values))
        self.rest = with_kept_arrays(parts.rest, kept, values)
        self.count = jnp.zeros((), jnp.int32)
        self.weight = jnp.zeros((), jnp.float32)
        self.decay = decay if decay is None or callable(decay) else float(decay)
        self.tau = tau if tau is None or callable(tau) else float(tau)
        self.debias = debias
        self.warmup = warmup
        self.buffers = buffers

    def update(self, model: PyTree) -> "Ema[M]":
        """Returns the average after one more model.

        Args:
            model: the current model, or another tree with its parameters at the same paths.

        Returns:
            The new average, with the same structure, shapes and dtypes.

        Raises:
            ValueError: the model lacks an array of the average, or has one of another shape.
            TypeError: the model is complex where the average is real.
        """
        decay, tau = (said(self.count) if callable(said) else said for said in (self.decay, self.tau))
        step = weights_of(decay, tau).of_model
        if self.warmup:
            step = jnp.maximum(step, 9 / (10 + self.count))
        weight = jnp.asarray(self.weight + step * (1 - self.weight), jnp.float32)
        if self.debias:
            # Each model so far weighs decay**k * (1 - decay), and all of them together `weight`. Taking the step
            # divided by the new weight is the same as dividing by the weight at the end, but the shadow is itself the
            # average at any time; the first step is 1, so that the values at the start go.
            step = jnp.where(weight > 0, step / jnp.where(weight > 0, weight, 1), 0)
        weights = weights_of(None, step) if decay is None else Weights(step, None)
        news = read_slots(index_in(self.rest), model, exact_shapes=True)
        rest = next_rest(self.rest, model, weights, self.buffers)
        olds, treedef = jtu.tree_flatten(self.shadow)
        shadow = jtu.tree_unflatten(treedef, mix(olds, news, weights))
        changed = shadow, rest, self.count + 1, weight
        return eqx.tree_at(lambda ema: (ema.shadow, ema.rest, ema.count, ema.weight), self, changed)

    @property
    def average(self) -> M:
        """The averaged model: each parameter in its own dtype, ties and frozen arrays included.

        Each access returns a new model in new buffers, so you can donate the `Ema` and keep the model.
        """
        slots = [
            jax.lax.convert_element_type(value, slot.dtype)
            for value, slot in zip(jtu.tree_leaves(self.shadow), self.rest.layout.slots, strict=True)
        ]
        average = copy(put_together(self.rest, slots))
        keep_apart(jtu.tree_leaves(average))
        return average


Ema.__module__ = "treeparams"
