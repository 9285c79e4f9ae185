"""trainable: the boundary between models and Optax."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.core import Tracer

from .._grad import nothing_trained
from .._layout import Layout, Trainable, trained_at
from .._parts import Parts, kept_arrays, take_apart
from .._recognise import warn
from .._text import describe, first_few
from .._types import PyTree
from ._groups import check_groups
from ._shown import History, Stacks, Tree, Vector, settled, steady
from ._state import ONE, ModelTransformation, Plain, Roles, TrainableState, extended, in_own_buffers, nodes_of, rates_in


def trainable(tx: Plain, trainable: Trainable = None) -> ModelTransformation:
    """An Optax transformation over whole models: it trains what is trained, ties once, and touches nothing else.

    >>> import equinox as eqx, jax, jax.numpy as jnp, optax, treeparams as tp
    >>> from treeparams import optim
    >>> mlp = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))  # with functions and integers in it
    >>> tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(0.1)), "layers.1")
    >>> state = tx.init(mlp)
    >>> grads = tp.grad(lambda mlp: mlp(jnp.ones(2)) ** 2, state.layout)(mlp)
    >>> trained, state = optim.step(tx, grads, state, mlp)
    >>> trained.layers[0].weight is mlp.layers[0].weight, state.layout.paths
    (True, ('layers.1.weight', 'layers.1.bias'))

    **It stands outermost**, once: all within is plain Optax over the canonical tree (model-shaped, `None` at aliases
    and at all that is not trained), so chains, masks, `optax.MultiSteps`, line searches and `optim.groups` work as
    their own documentation says. Around it may stand what treats trees as trees. What compares gradients with updates
    (`optax.apply_if_finite`), makes zeros of the model (`optax.MultiSteps`) or asks it for a dtype
    (`optax.inject_hyperparams` without `hyperparam_dtype`) belongs within, where all are parameters, each once.

    **What trains is what the state says**: `init` fixes it, `optim.set_trainable` changes it, and `update` knows the
    ties from it, also inside `jax.jit`, where arrays no longer tell. Take gradients by `state.layout`. `init` sees ties
    outside of a trace, in `tp.jit(tx.init)`, or where a `Layout` is given.

    **`None` is not zero.** A leaf without a gradient in this call takes no step and its moments stay as they are; rules
    that couple leaves (a global norm, a line search) run over the leaves that have one. Step counts are kept once for
    all leaves with one history, so they go on if any leaf of it has a gradient. `optax.MultiSteps` wants all gradients
    in each call: `tp.project(model, grads, missing="zeros")`.

    **Complex parameters descend.** JAX's gradient of a real loss is the conjugate of the direction of ascent. It is
    conjugated here for `tx`, and nowhere else in this library.

    Args:
        tx: any Optax transformation or chain. What it keeps must be kept leaf by leaf if gradients are partial or
            leaves frozen later.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        A transformation. `init(model)` returns a `TrainableState`, which shares no buffer with the model.
        `update(grads, state, model, **extra)` takes a gradient in any form that `tp.project` takes; one that is wider
        than its leaf keeps single precision. The updates stand at all places of a tie, through the transform of an
        alias that has one, and are `None` where nothing moves, so that `eqx.apply_updates(model, updates)` is right;
        `optim.step` does both, and computes such an alias anew, where sums would drift by its rounding. Of the extra
        arguments `grad` may be in any form too, functions are called with models (what `grad_fn` returns may be in any
        form), and others are passed on.

    Warns:
        UserWarning: `init`: nothing is trained. `update`, outside of a trace: no leaf of a history has had a gradient
            since it was made.

    Raises:
        TypeError: `tx` is no transformation; `init`: as `tp.layout`; `update`: as `tp.project`, and for a line search
            over complex parameters.
        ValueError: `tx` has a transformation over models in it; `init`: an alias has another value than its source
            gives, as `tp.layout`; `update`: there is no model, it does not fit the state, the gradients are updates of
            another transformation over models, or as `tp.project`.
    """
    rule = Rule(tx, Tree, trainable)
    return ModelTransformation(rule.init, rule.update)


# By their states.
_OTHER = {
    optax.LookaheadState: "optax.lookahead takes a pair of models, slow and fast, in place of one",
    optax.contrib.DifferentiallyPrivateAggregateState: "differential privacy takes a gradient for each example",
}
# One array of each tree of updates that was handed out, as long as it lives: as gradients they would be conjugated
# twice, or those of ties added up.
_handed_out: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


Steps = tuple[list[Any], tuple[Any, ...], list[Any]]


class Rule:
    """An Optax transformation, what it is shown of a model, and which leaves it trains."""

    def __init__(self, tx: Any, form: type[Tree | Vector | Stacks], trainable: Trainable) -> None:
        if isinstance(tx, ModelTransformation):
            raise ValueError(ONE)
        self.tx = extended(tx)
        self.form = form(self.tx)
        self.trainable = trainable
        self._warned: set[int] = set()  # of layouts, by hash

    def init(self, params: PyTree) -> TrainableState:
        """A fresh state."""
        if type(params).__name__ == "_ParamsPlaceholder":  # of optax.tree_utils.tree_map_params
            raise TypeError("map plain Optax: pass the transformation within optim.trainable and state.runs[0]")
        parts = take_apart(params, self.trainable)
        _check_ties(params, parts)
        return self.start(parts)

    def start(self, parts: Parts[Any]) -> TrainableState:
        """A fresh state of what is trained."""
        positions = parts.index.positions
        if not positions:
            warn(nothing_trained(parts.index))
            return TrainableState((), (), (), Roles(parts.layout, (), (), ()))
        run = self.fresh(parts)
        check_groups(run, parts.index)
        state = TrainableState((run,), (), (jnp.zeros((), jnp.int32),), Roles(parts.layout, (positions,), (), (0,)))
        return in_own_buffers(state, [*parts.slots, *kept_arrays(parts.rest).values()])

    def fresh(self, parts: Parts[Any]) -> PyTree:
        """A fresh state of the rule itself."""
        run = self.tx.init(self.form.show(parts, parts.slots))
        if nodes_of(TrainableState, run):
            raise ValueError(ONE)
        for kind, why in _OTHER.items():
            if nodes_of(kind, run):
                raise ValueError(f"{why}: run it over tp.partition(model)[0] by hand")
        is_complex = any(jnp.iscomplexobj(rate) for rates in rates_in(run) for rate in rates.values())
        if is_complex and len(parts.index.complex_slots) < len(parts.slots):
            raise ValueError(
                "beside complex leaves optax.inject_hyperparams makes the hyperparameters of real ones complex too; "
                "write inject_hyperparams(..., hyperparam_dtype=jnp.float32)"
            )
        return settled(run)

    def update(
        self, updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, TrainableState]:
        """One step: the updates at all places, and the next state."""
        if params is None:
            raise ValueError("expected the model as the third argument, got None; write tx.update(grads, state, model)")
        if not isinstance(state, TrainableState):
            raise TypeError(f"expected the state that init or the last update returned, got {describe(state)}")
        parts = take_apart(params, state.roles.layout)
        gradients = self._gradients(parts, updates)
        steps, runs, counts = self.steps(parts, gradients, state, extra)
        tree = parts.everywhere(steps)
        if parts.index.ties or parts.index.complex_slots:
            first = next(iter(jtu.tree_leaves(tree)), None)
            if isinstance(first, jax.Array) and id(first) not in set(map(id, jtu.tree_leaves(updates))):
                _handed_out[id(first)] = first
        return tree, TrainableState(runs, state.held, (*counts, *state.counts[len(runs) :]), state.roles)

    def steps(self, parts: Parts[Any], gradients: list[Any], state: TrainableState, extra: dict[str, Any]) -> Steps:
        """The step of each slot, and the next state and count of each history."""
        if "active" in extra:
            raise TypeError("active= says which rows of stacks move: write optim.stacked(tx) in place of this one")
        return self.steps_by(self.tx.update, parts, gradients, state, extra)

    def steps_by(
        self,
        run: Callable[..., tuple[Any, Any]],
        parts: Parts[Any],
        gradients: list[Any],
        state: TrainableState,
        extra: dict[str, Any],
    ) -> Steps:
        """As `steps`, by some update of what the rule is shown.

        A rule may couple leaves, by a global norm or a line search. So each history runs over all leaves that have a
        gradient, with its own count, and only its own leaves are kept of the result; of the rest XLA computes nothing.
        """
        index, layout, form = parts.index, parts.layout, self.form
        here = [slot for slot, gradient in enumerate(gradients) if gradient is not None]
        seen, values = layout, parts.slots
        if len(here) < len(gradients):
            seen = trained_at(layout, [index.positions[slot] for slot in here])
            values = [None if gradient is None else own for gradient, own in zip(gradients, parts.slots, strict=True)]
        shown = form.show(parts, gradients), form.show(parts, values)
        further = {name: self._argument(parts, here, name, value) for name, value in extra.items()} if extra else {}
        layouts = [layout] if len(state.runs) == 1 else [trained_at(layout, each) for each in state.roles.running]
        histories = list(map(History, layouts, state.runs))
        update = lambda before: run(shown[0], before, shown[1], **further)
        if len(histories) > 1 and isinstance(jnp.zeros(()), Tracer):  # within jit even constants are traced
            update = jax.jit(update)  # so that the rule is traced once and not for each history
        steps, runs, counts = [None] * len(gradients), list(state.runs), list(state.counts[: len(state.runs)])
        for number, (positions, history) in enumerate(zip(state.roles.running, histories, strict=True)):
            own = [index.by_leaf[each] for each in positions if gradients[index.by_leaf[each]] is not None]
            if not own:
                self.warn_of_no_gradient(history.layout, counts[number])
                continue
            is_all = seen is history.layout
            others = [*histories[:number], *histories[number + 1 :]]
            before = history.state if is_all else form.regroup([history, *others], seen)
            made, after = update(before)
            found = form.read(parts, made)
            for slot in own:
                steps[slot] = found[slot]
            runs[number] = steady(after, before)
            if not is_all:
                mine = form.regroup([History(seen, runs[number]), history], history.layout)
                runs[number] = steady(mine, history.state)
            counts[number] = counts[number] + 1
        return steps, tuple(runs), counts

    def warn_of_no_gradient(self, layout: Layout, count: Any) -> None:
        """Warns, once, if a history has not taken a step yet."""
        first_time = not isinstance(count, Tracer) and not int(count)
        if first_time and hash(layout) not in self._warned:
            self._warned.add(hash(layout))
            message = "trains, and no gradient has come for it since: take gradients by what the state says"
            paths = first_few(layout.paths)
            warn(f"{paths} {message}, tp.grad(loss, state.layout)")

    def _gradients(self, parts: Parts[Any], grads: PyTree) -> list[Any]:
        """One gradient per slot, as Optax's rules take them."""
        gradients = self.read_gradients(parts, grads)
        for slot in parts.index.complex_slots:
            # JAX's gradient of a real loss is the conjugate of the direction of ascent, which is what Optax takes.
            if gradients[slot] is not None:
                gradients[slot] = jnp.conj(gradients[slot])
        return gradients

    def read_gradients(self, parts: Parts[Any], grads: PyTree) -> list[Any]:
        """One gradient per slot, in JAX's convention."""
        if grads is None or isinstance(grads, (bool, int)):
            raise TypeError(f"expected a tree of gradients as of tp.grad(loss)(model), got {describe(grads)}")
        gradients = self.form.gradients(parts, grads)
        if parts.index.ties or parts.index.complex_slots:
            first = next(iter(jtu.tree_leaves(grads)), None)
            if first is not None and _handed_out.get(id(first)) is first:
                raise ValueError(f"these gradients are the updates of another transformation over models; {ONE}")
        return gradients

    def _argument(self, parts: Parts[Any], here: Sequence[int], name: str, value: Any) -> Any:
        """An extra argument as the rule understands it: gradients and functions are of what it is shown."""
        gradients = lambda grads: self.form.show(
            parts, [each if i in here else None for i, each in enumerate(self._gradients(parts, grads))]
        )
        if name == "grad":
            return gradients(value)
        if not (callable(value) and (name in ("value_fn", "obj_fn", "grad_fn") or jtu.all_leaves([value]))):
            return value
        if parts.index.complex_slots and name != "grad_fn":
            slot = parts.layout.slots[parts.index.complex_slots[0]]
            raise TypeError(
                "rules of Optax that differentiate a loss themselves, such as line searches, do not descend along "
                f"complex parameters, and {slot.path!r} is {slot.dtype}; keep its real and imaginary parts as two real "
                "parameters"
            )

        @functools.wraps(value)  # Optax looks at the names of its arguments
        def of_what_is_shown(shown: PyTree, *args: Any, **kwargs: Any) -> Any:
            found = zip(self.form.read(parts, shown), parts.slots, strict=True)
            result = value(parts.model([own if new is None else new for new, own in found]), *args, **kwargs)
            return gradients(result) if name == "grad_fn" else result

        return of_what_is_shown


def _check_ties(model: PyTree, parts: Parts[Any]) -> None:
    """Checks that the places of each tie that trains agree, where there are values to see it."""
    index, leaves = parts.index, jtu.tree_leaves(model)
    for alias in index.ties:
        pair = have, source = leaves[alias.leaf], leaves[alias.source]
        is_seen = all(isinstance(each, (jax.Array, np.ndarray)) and not isinstance(each, Tracer) for each in pair)
        if not (is_seen and index.trained[alias.source]) or (have is source and not alias.transforms):
            continue
        with jax.ensure_compile_time_eval():  # in a trace, too
            want = alias.value_from(source, index.structure.spec(alias.source))
            tolerance = float(jnp.finfo(want.dtype).eps) ** 0.5 if alias.transforms else 0.0  # many steps of rounding
            is_equal = bool(jnp.allclose(have, want, tolerance, tolerance, equal_nan=True))
        if not is_equal:
            paths = index.structure.paths
            raise ValueError(
                f"{paths[alias.leaf]!r} is tied to {paths[alias.source]!r}, but has another value than that gives, and "
                "the first step would change it; set it first: model = tp.tie(model, layout), layout = tp.layout(model)"
            )
