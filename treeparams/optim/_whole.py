"""An Optax transformation run over the trained parameters of a whole model."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._grad import nothing_trained
from .._index import is_complex
from .._layout import Layout, index_of, trained_at
from .._parts import Parts, kept_arrays, take_apart
from .._structure import is_array
from .._text import describe, first_few
from ._context import around, collecting, given, is_collecting, within
from ._forms import Form, Part, Tree
from ._state import (
    ModelTransformation,
    Positions,
    Roles,
    TrainableState,
    extended,
    in_own_buffers,
    is_placeholder,
    settled,
    steady,
)


class Whole:
    """A transformation, what it sees of a model, and which leaves it trains."""

    def __init__(self, tx: Any, form: Form, trainable: Any, takes_none: bool = False) -> None:
        self.tx = extended(tx)
        self.form = form
        self.trainable = trainable
        self.takes_none = takes_none  # whether `tx` itself knows what a missing gradient means

    def transformation(self) -> ModelTransformation:
        """As Optax knows it."""
        return ModelTransformation(self.init, self.update)

    def init(self, params: PyTree) -> Any:
        """A fresh state."""
        if is_collecting():
            return Collected(self, params)
        if is_placeholder(params):
            with within(None, self.form.is_vector):
                return TrainableState(Roles(None), (self.tx.init(params),), ())
        return self.start(given(params, self.trainable))

    def start(self, parts: Parts) -> TrainableState:
        """A fresh state of what is trained."""
        layout, positions = parts.layout, parts.index.positions
        if not positions:
            warnings.warn(nothing_trained(parts.index), UserWarning, stacklevel=3)
            return TrainableState(Roles(layout, (), ()), (), ())
        runs = (self.fresh(parts, positions),)
        arrays = [*parts.slots, *kept_arrays(parts.rest).values()]
        return in_own_buffers(TrainableState(Roles(layout, (positions,), ()), runs, ()), arrays)

    def fresh(self, parts: Parts, positions: Positions) -> PyTree:
        """A fresh state of the transformation itself, for some parameters."""
        layout = trained_at(parts.layout, positions)
        slots = [parts.slots[parts.index.by_leaf[position]] for position in positions]
        seen = self.form.encode(layout, slots, parts.treedef)
        with within(layout, self.form.is_vector):
            return settled(self.tx.init(seen))

    def update(self, updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        """One step: the canonical tree of updates, and the next state."""
        if params is None:
            raise ValueError("expected the model as the third argument, got None; write tx.update(grads, state, model)")
        if not isinstance(state, TrainableState):
            raise TypeError(f"expected the state that init or the last update returned, got {describe(state)}")
        model = take_apart(params, state.layout)
        layout = model.layout
        gradients = self.gradients(layout, updates)
        if gradients and all(gradient is None for gradient in gradients) and _has_arrays(updates):
            warnings.warn(
                f"none of the gradients is of a leaf that trains ({first_few(layout.paths)}). Of two transformations "
                "over models in a chain, the second sees only what the first trains: use optim.groups",
                UserWarning,
                stacklevel=3,
            )
        present = [i for i, gradient in enumerate(gradients) if gradient is not None or self.takes_none]
        call = _Call(self, model, gradients, present, extra)
        parts = [Part(each, run) for each, run in zip(state.roles.layouts, state.runs, strict=True)]
        steps, runs = [None] * len(gradients), []
        for number, part in enumerate(parts):
            runs.append(call.run([part, *parts[:number], *parts[number + 1 :]], steps))
        return model.canonical(steps), state._replace(runs=tuple(runs))

    def gradients(self, layout: Layout, grads: PyTree) -> list[Any]:
        """One gradient per slot, as Optax's rules take them."""
        gradients = self.form.gradients(layout, grads, wide=self.takes_none)
        # Within another transformation over models that is done already.
        return gradients if around() is not None else [_conjugated(gradient) for gradient in gradients]


class Collected:
    """Stands for the state of a transformation, and says which one it is."""

    def __init__(self, whole: Whole, params: PyTree) -> None:
        self.whole = whole
        self.params = params


def collected_in(tx: Any, model: PyTree) -> list[Collected]:
    """The transformations over models in a chain or wrapper of Optax.

    Raises:
        TypeError: there are none.
    """
    return [node for node in jax.tree.leaves(skeleton(tx, model), is_leaf=is_collected) if is_collected(node)]


def skeleton(tx: Any, model: PyTree) -> PyTree:
    """What `init` returns, with a `Collected` in place of each `TrainableState`.

    Raises:
        TypeError: there are none.
    """
    with collecting():
        found = tx.init(model)
    if not any(map(is_collected, jax.tree.leaves(found, is_leaf=is_collected))):
        raise TypeError("expected a transformation with optim.trainable, flat, groups or accumulate in it, got none")
    return found


def is_collected(node: Any) -> bool:
    """Whether a node of a state stands for a transformation."""
    return isinstance(node, Collected)


class TakesNone(ModelTransformation):
    """A transformation that knows by itself what it means that a leaf has no gradient."""


def standing(element: Any, trainable: Any, takes_none: bool = False) -> ModelTransformation:
    """An element of chains over canonical trees, which alone is a transformation over models."""
    alone = Whole(ModelTransformation(element.init, element.update), Tree(), trainable, takes_none)

    def init(params: PyTree) -> PyTree:
        return (alone if around() is None else element).init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, PyTree]:
        return (alone if around() is None else element).update(updates, state, params, **extra)

    return (TakesNone if takes_none else ModelTransformation)(init, update)


class _Call:
    """What the transformation is given in one call, the same for each history."""

    def __init__(
        self, whole: Whole, model: Parts, gradients: list[Any], present: list[int], extra: dict[str, Any]
    ) -> None:
        self.whole, self.model, self.layout, self.present = whole, model, model.layout, present
        self.positions = model.index.positions
        self.seen = trained_at(self.layout, [self.positions[i] for i in present])
        self.is_partial = len(present) < len(gradients)
        self.gradients, self.params = self._show(gradients), self._show(model.slots)
        self.extra = {name: self._argument(name, value) for name, value in extra.items()}

    def run(self, parts: list[Part], steps: list[Any]) -> PyTree:
        """Runs the history of the first part, with the leaves of the others beside it; its next state.

        A rule may couple leaves, by a global norm or a line search. So each history runs over all leaves that have a
        gradient, with its own count, and only its own leaves are kept of the result; of the rest XLA computes nothing.
        """
        form, tx, part = self.whole.form, self.whole.tx, parts[0]
        own = set(index_of(part.layout).positions) & set(index_of(self.seen).positions)
        if not own:
            return part.state
        before = form.regroup(tx, parts, self.seen)
        with within(self.layout, form.is_vector, self.is_partial):
            updates, after = tx.update(self.gradients, before, self.params, **self.extra)
        for i, step in zip(self.present, form.decode(self.seen, updates), strict=True):
            if self.positions[i] in own:
                steps[i] = step
        return steady(form.regroup(tx, [Part(self.seen, steady(after, before)), part], part.layout), part.state)

    def _show(self, values: Sequence[Any]) -> PyTree:
        return self.whole.form.encode(self.seen, [values[i] for i in self.present], self.model.treedef)

    def _argument(self, name: str, value: Any) -> Any:
        """An argument as the transformation understands it: line searches take a gradient, and the loss itself."""
        if name == "grad":
            return self._show(self.whole.gradients(self.layout, value))
        return self._loss(value) if name == "value_fn" else value

    def _loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        for slot in self.layout.slots:
            if is_complex(slot.dtype):
                raise TypeError(
                    "Optax's line searches do not descend along complex parameters, "
                    f"and {slot.path!r} is {slot.dtype}; keep its real and imaginary parts as two real parameters"
                )
        model = self.model

        @functools.wraps(loss)  # Optax looks at the names of its arguments
        def of_what_is_seen(seen: PyTree, *args: Any, **kwargs: Any) -> Any:
            found = dict(zip(self.present, self.whole.form.decode(self.seen, seen), strict=True))
            return loss(model.model([found.get(i, value) for i, value in enumerate(model.slots)]), *args, **kwargs)

        return of_what_is_seen


def _has_arrays(updates: PyTree) -> bool:
    return any(is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(updates))


def _conjugated(gradient: Any) -> Any:
    # JAX's gradient of a real loss is the conjugate of the direction of ascent, which is what Optax's rules take.
    return jnp.conj(gradient) if gradient is not None and is_complex(gradient.dtype) else gradient
