"""An average that is carried along: float32, debiased, with a warm-up of its decay."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ._average import Buffers, as_decay, copy, copy_leaf, lerp, next_buffers, next_step, widened
from ._declare import field
from ._match import read_slots
from ._partition import Rest, split


class Ema(eqx.Module):
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
        shadow: the averages, one per slot, float32 (float64 of a float64 leaf, complex64 of a complex one).
        rest: the frozen arrays and all else of the model.
        count: how many times it was updated.
        weight: how much of the average comes from updates, `1 - decay**count` for a constant decay.
    """

    shadow: list[Array] = field(trainable=False)
    rest: Rest = field(trainable=False)
    count: Int[Array, ""] = field(trainable=False)
    weight: Float[Array, ""] = field(trainable=False)
    decay: float | Callable[[Any], Any] = field(static=True)
    debias: bool = field(static=True)
    warmup: bool = field(static=True)
    buffers: Any = field(static=True)

    def __init__(
        self,
        model: PyTree,
        decay: float | Callable[[Any], Any],
        *,
        debias: bool = False,
        warmup: bool = False,
        buffers: Buffers = "copy",
        trainable: Any = None,
    ) -> None:
        """Starts the average at the values of `model`, in buffers of its own.

        Args:
            model: any pytree.
            decay: the weight of the average in each step, in [0, 1]; or a function from the number of updates so far to
                it, such as an Optax schedule.
            debias: whether the values at the start have no weight: the average is that of the updates alone, as with
                Adam's correction by `1 - decay**count`. Before the first update it is the model.
            warmup: whether the decay starts low: `min(decay, (1 + count) / (10 + count))`.
            buffers: what to do with integers, bools, keys and frozen arrays; see `tp.ema`.
            trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

        Raises:
            ValueError: `decay` is not in [0, 1]; as `tp.layout`.
        """
        decay = as_decay(decay)
        slots, rest = split(model, trainable)
        self.shadow = [jnp.array(slot, widened(slot.dtype), copy=True) for slot in slots]
        self.rest = Rest(tuple(map(copy_leaf, rest.frozen)), rest.fixed)
        self.count = jnp.zeros((), jnp.int32)
        self.weight = jnp.zeros((), jnp.float32)
        self.decay = decay
        self.debias = debias
        self.warmup = warmup
        self.buffers = buffers

    def update(self, model: PyTree) -> "Ema":
        """The average after one more model.

        Args:
            model: the model now, or another tree with its parameters at the same paths.

        Returns:
            The new average, of the same structure, shapes and dtypes.

        Raises:
            ValueError: the model lacks an array of the average, or has another shape there.
            TypeError: the model is complex where the average is real.
        """
        step, weight = next_step(self.decay, self.count, self.weight, debias=self.debias, warmup=self.warmup)
        news = read_slots(self.rest.layout, model, exact_shapes=True)
        shadow = lerp(self.shadow, news, step)
        rest = Rest(tuple(next_buffers(self.rest, model, step, self.buffers)), self.rest.fixed)
        changed = shadow, rest, self.count + 1, weight
        return eqx.tree_at(lambda ema: (ema.shadow, ema.rest, ema.count, ema.weight), self, changed)

    @property
    def average(self) -> PyTree:
        """The averaged model: each parameter in its own dtype, ties and frozen arrays in place.

        It is made anew at each access, in buffers of its own, so that a donated `Ema` does not take it along.
        """
        slots = [
            jax.lax.convert_element_type(value, slot.dtype)
            for value, slot in zip(self.shadow, self.rest.layout.slots, strict=True)
        ]
        return copy(self.rest.fill(slots))
