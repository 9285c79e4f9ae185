"""accumulate: one step for the gradients of several calls."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from .._index import widened
from .._layout import Trainable
from .._match import per_slot
from .._parts import Parts
from .._text import count_of
from ._context import around, given
from ._forms import Tree, owners
from ._state import ModelTransformation, Transformation, extended, is_placeholder, settled, steady
from ._whole import standing


class AccumulateState(NamedTuple):
    """The state of `optim.accumulate`.

    Attributes:
        inner: the state of the transformation.
        total: the weighted sum of the gradients so far, at least float32, as a canonical tree.
        seen: of each leaf, whether it had a gradient in one of these calls.
        weight: the sum of the weights.
        calls: since the last step.
    """

    inner: Any
    total: PyTree
    seen: PyTree
    weight: Float[Array, ""]
    calls: Int[Array, ""]


AccumulateState.__module__ = "treeparams.optim"


def accumulate(
    tx: Transformation, every: int, weights: Sequence[float] | str | None = None, trainable: Trainable = None
) -> ModelTransformation:
    """Takes one step of `tx` in every so many calls, with the mean of their gradients.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> tx = optim.accumulate(optax.sgd(1.0), every=2, weights="examples")
    >>> model = {"w": jnp.zeros(1), "b": jnp.zeros(1)}
    >>> state = tx.init(model)
    >>> updates, state = tx.update({"w": jnp.array([1.0])}, state, model, examples=30)
    >>> updates["w"]
    Array([0.], dtype=float32)
    >>> updates, state = tx.update({"w": jnp.array([5.0])}, state, model, examples=10)
    >>> updates["w"]  # -(30 * 1 + 10 * 5) / 40
    Array([-2.], dtype=float32)

    Gradients are summed in at least float32. A leaf without a gradient in some of the calls counts as zero there; one
    that has none in all of them takes no step and keeps its moments.

    It takes a whole model, as `optim.trainable` does, and stands around a chain or `optim.groups`, not in one, if
    gradients are partial: `optim.accumulate(optax.chain(clip, adam), 4)`.

    Args:
        tx: any Optax transformation or chain, as for `optim.trainable`.
        every: the number of calls, positive.
        weights: a number for each of the calls; or the name of the extra argument of `update` that has the weight of
            its call, such as a number of examples; `None`: all alike. The mean is divided by their sum.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        A transformation, with an `AccumulateState` in its state. Between steps its updates are zero.

    Raises:
        ValueError: `every` is not positive, or `weights` are not as many, or one is negative or all are zero; `update`:
            the extra argument is not there; as `optim.trainable`.
        TypeError: `every` is no integer; as `optim.trainable`.
    """
    every = count_of("every", every, "calls")
    if weights is not None and not isinstance(weights, str):
        weights = tuple(map(float, weights))
        if len(weights) != every or min(weights) < 0 or not 0 < math.fsum(weights) < math.inf:
            raise ValueError(
                f"weights must be {every} numbers, one per call, none negative and not all zero, got {weights}"
            )
    return standing(_Accumulate(extended(tx), every, weights), trainable, takes_none=True)


class _Accumulate:
    """The transformation on a canonical tree."""

    def __init__(self, tx: optax.GradientTransformationExtraArgs, every: int, weights: Any) -> None:
        self.tx, self.every, self.weights = tx, every, weights

    def init(self, params: PyTree) -> AccumulateState:
        zeros = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        if is_placeholder(params):
            return AccumulateState(self.tx.init(params), params, False, *zeros)
        parts = given(params, None)
        show, slots = lambda leaves: parts.canonical(list(leaves)), parts.slots
        total = show(jnp.zeros_like(slot, widened(slot.dtype)) for slot in slots)
        return AccumulateState(settled(self.tx.init(params)), total, show(jnp.zeros((), bool) for _ in slots), *zeros)

    def update(
        self, updates: PyTree, state: AccumulateState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, AccumulateState]:
        above = around()
        if above is not None and above.is_partial:
            raise ValueError(
                "some leaves have no gradient in this call, and what stands around optim.accumulate leaves these out; "
                "let it stand outermost: optim.accumulate(optax.chain(...), every), or with optim.groups in it"
            )
        return _Round(self, given(params, None), updates, state, extra).taken()

    def weight(self, calls: Any, extra: dict[str, Any]) -> Any:
        """The weight of this call; takes it out of the extra arguments."""
        if self.weights is None:
            return jnp.ones((), jnp.float32)
        if not isinstance(self.weights, str):
            return jnp.asarray(self.weights, jnp.float32)[calls]
        if self.weights not in extra:
            raise ValueError(
                f"expected the weight of this call as {self.weights}=..., got the extra arguments {sorted(extra)}"
            )
        weight = extra.pop(self.weights)
        if jnp.ndim(weight) or (not isinstance(weight, Tracer) and not 0 <= weight < math.inf):
            raise ValueError(f"the weight {self.weights} must be a number that is not negative, got {weight}")
        return jnp.asarray(weight, jnp.float32)


class _Round:
    """One call: adds, and every so often steps."""

    def __init__(
        self, outer: _Accumulate, parts: Parts, updates: PyTree, state: AccumulateState, extra: dict[str, Any]
    ) -> None:
        self.tx, self.layout, self.index, self.show = outer.tx, parts.layout, parts.index, parts.canonical
        self.params, self.inner, self.extra = self.show(parts.slots), state.inner, dict(extra)
        weight = outer.weight(state.calls, self.extra)
        self.gradients = per_slot(self.index, updates, "first")
        self.has = [gradient is not None for gradient in self.gradients]
        totals, seen = (per_slot(self.index, tree, "first") for tree in (state.total, state.seen))
        self.totals = [_plus(*each, weight) for each in zip(totals, self.gradients, strict=True)]
        self.seen = [before | (has & (weight > 0)) for before, has in zip(seen, self.has, strict=True)]
        self.may_be_void = isinstance(outer.weights, str)  # calls of no weight are as calls without gradients
        self.weight, self.calls, self.every = state.weight + weight, state.calls + 1, outer.every

    def taken(self) -> tuple[PyTree, AccumulateState]:
        """The updates and the next state."""
        steps = self.calls == self.every
        if isinstance(steps, Tracer):
            updates, state = jax.lax.cond(steps, self.step, self.wait)
        else:  # `cond` would compile its branches at each call
            updates, state = self.step() if steps else self.wait()
        return self.show(updates), state

    def wait(self) -> tuple[list[Any], AccumulateState]:
        """Between steps: no update."""
        updates = [jnp.zeros(slot.shape, slot.dtype) for slot in self.layout.slots]
        return updates, AccumulateState(
            self.inner, self.show(self.totals), self.show(self.seen), self.weight, self.calls
        )

    def step(self) -> tuple[list[Any], AccumulateState]:
        """The step: the update of the mean, and nothing gathered."""
        slots = self.layout.slots
        mean = [_mean(total, self.weight, slot.dtype) for total, slot in zip(self.totals, slots, strict=True)]
        found, inner = self.tx.update(self.show(mean), self.inner, self.params, **self.extra)
        updates = [
            jnp.zeros(slot.shape, slot.dtype) if each is None else jnp.where(flag, each, 0).astype(slot.dtype)
            for slot, each, flag in zip(slots, per_slot(self.index, found, "first"), self.seen, strict=True)
        ]
        inner = self.kept(steady(inner, self.inner))
        total, seen = (self.show([jnp.zeros_like(each) for each in gathered]) for gathered in (self.totals, self.seen))
        return updates, AccumulateState(inner, total, seen, jnp.zeros_like(self.weight), jnp.zeros_like(self.calls))

    def kept(self, inner: PyTree) -> PyTree:
        """The next state, with that of leaves without any gradient as it was."""
        if all(self.has) and not self.may_be_void:
            return inner
        seen = [*self.seen, functools.reduce(jnp.logical_or, self.seen)]  # the last is for what is of no leaf
        flags = [seen[-1 if i is None else i] for i in owners(self.tx, Tree(), self.layout)]
        leaves, treedef = jax.tree.flatten(inner)
        chosen = map(jnp.where, flags, leaves, jax.tree.leaves(self.inner))
        return jax.tree.unflatten(treedef, list(chosen))


def _plus(total: jax.Array, gradient: Any, weight: jax.Array) -> jax.Array:
    if gradient is None:
        return total
    # Of no weight: nothing is added, though the gradient of an empty batch may be NaN.
    added = gradient.astype(total.dtype) * weight.astype(jnp.finfo(total.dtype).dtype)
    return total + jnp.where(weight > 0, added, 0)


def _mean(total: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    weight = weight.astype(jnp.finfo(total.dtype).dtype)
    return (total / jnp.where(weight > 0, weight, 1)).astype(dtype)
