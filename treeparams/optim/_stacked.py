"""stacked: Optax over stacks. Freezing by row: rows that are not active, or have no gradient, wait."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._layout import Layout, Trainable, slots_in, trained_at
from .._parts import Parts
from .._stacks import in_groups
from .._structure import is_array
from .._text import describe
from .._types import PyTree
from ._clip import ClipState
from ._per_leaf import PerLeafState
from ._separability import Kinds, check_form, kinds_of
from ._shown import Stacks
from ._state import ModelTransformation, Plain, TrainableState
from ._trainable import Rule, Steps


def stacked(tx: Plain, trainable: Trainable = None, *, trial: Mapping[str, Any] | None = None) -> ModelTransformation:
    """The same as `optim.trainable`, over stacks: one operation for each shape, rules for matrices included.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> layers = [{"w": jnp.ones((2, 3)), "b": jnp.ones(3)} for _ in range(4)]
    >>> model = {"layers": layers, "steps": jnp.array(3)}
    >>> adafactor = optim.per_leaf(optax.adafactor(0.1))
    >>> tx = optim.stacked(optax.chain(optim.clip_by_global_norm(1.0), adafactor))
    >>> state = tx.init(model)
    >>> updates, state = tx.update(model, state, model, active={"**": False, "layers.2": True})
    >>> updates["layers"][0]["b"], bool(jnp.all(updates["layers"][2]["b"] < 0)), updates["steps"]
    (Array([-0., -0., -0.], dtype=float32), True, None)

    The model stays a model; the state rests in stacks, `{"float32[2,3]": array of shape (4, 2, 3)}`, and `tx` sees
    parameters and gradients so. An element-wise rule (Adam, SGD) and a global one (clipping by the norm of all) take
    stacks as they are. **What looks at a leaf's shape or norm stands within `optim.per_leaf`**, as above, or is refused
    at the first `init`: to Muon a stack of biases would be a matrix. So is what goes by names. This is read from the
    programs of `tx`, as for `optim.flat`, over a few leaves of the ranks that the model has, vectors and matrices.
    `optim.groups` may be in `tx`; its groups have stacks of their own.

    **Freezing without a new trace.** `update(grads, state, model, active={where: flag})` takes flags that may be
    traced: a parameter whose flag is `False` takes no step and its state waits, step count included, as if the call had
    not been made for it. What no `where` selects is active, and the last one that does wins. Its gradient counts as
    zero in a norm and may be NaN. "Train another layer every hundred steps" so compiles once. The same holds for a
    parameter without a gradient. It needs a state that is kept row by row, so what holds state must be within
    `optim.per_leaf`; the state of `optim.clip_by_global_norm` is of the call and goes on.

    Args:
        tx: any Optax transformation; see above.
        trainable: as for `optim.trainable`.
        trial: examples of extra arguments that `tx` needs. `value`, `grad` and `value_fn` are there.

    Returns:
        A transformation that takes and returns what `optim.trainable` does. The updates of a parameter that waits are
        `None` if it has no gradient, else the zero that changes no number, -0.0.

    Raises:
        ValueError: `init`: `tx` is not the same over stacks; it has groups within groups, or ones that divide the model
            in different ways; otherwise as `optim.trainable`. `update`: not all rows move, and `tx` keeps state outside
            of `optim.per_leaf`; a `where` selects nothing that trains; otherwise as `optim.trainable`.
        TypeError: a flag is no bool; otherwise as `optim.trainable`.
    """
    rule = _StackedRule(tx, Stacks, trainable)
    rule.trial = dict(trial or {})
    return ModelTransformation(rule.init, rule.update)


WITHIN = (
    "what looks at a leaf by itself stands within optim.per_leaf: "
    "optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(optax.contrib.muon(1e-3)))"
)


class _StackedRule(Rule):
    """As `Rule`, with rows that wait."""

    form: Stacks
    trial: dict[str, Any]
    _checked: Kinds = frozenset()

    def fresh(self, parts: Parts[Any]) -> PyTree:
        """A fresh state of the rule itself, once it is known to be the same over stacks."""
        kinds = kinds_of(self.form.form_of(parts.layout))
        if not kinds <= self._checked:
            check_form(self.tx, kinds, in_groups, ("optim.stacked", WITHIN), self.trial)
            self._checked |= kinds
        return super().fresh(parts)

    def steps(self, parts: Parts[Any], gradients: list[Any], state: TrainableState, extra: dict[str, Any]) -> Steps:
        """The step of all rows, and of those that are not active the state and parameters from before."""
        active = extra.pop("active", None)
        flags = _flags(parts.layout, gradients, {} if active is None else active)
        filled = lambda its: [jnp.zeros_like(p) if g is None else g for p, g in zip(parts.slots, its, strict=True)]
        whole = lambda grads: parts.canonical(filled(self.read_gradients(parts, grads)))
        _of_gradients(extra, whole)
        if all(flag is True for flag in flags):
            return super().steps(parts, gradients, state, extra)
        rows_of = _rows(flags)
        form = self.form.form_of(parts.layout)
        rows = [rows_of(slots) for slots in form.members]

        # In stacks, all rows of one at once: an operation for each leaf would take as long to compile as all the rest.
        def mask(tree: PyTree, sign: int) -> PyTree:
            leaves, treedef = jtu.tree_flatten(tree)
            zeros = [sign * jnp.zeros((), leaf.dtype) for leaf in leaves]
            return jtu.tree_unflatten(treedef, list(map(jnp.where, map(_beside, rows, leaves), leaves, zeros)))

        def masked_run(shown: PyTree, before: Any, params: PyTree, **further: Any) -> tuple[PyTree, Any]:
            _of_gradients(further, lambda grads: mask(grads, 1))
            made, after = self.tx.update(mask(shown, 1), before, params, **further)
            return mask(made, -1), after  # the number that changes none when it is added: -0.0 + 0.0 is 0.0

        steps, runs, counts = self.steps_by(masked_run, parts, filled(gradients), state, extra)
        steps = [None if gradient is None else step for step, gradient in zip(steps, gradients, strict=True)]
        rested = list(runs)
        for number, (positions, old, new) in enumerate(zip(state.roles.running, state.runs, runs, strict=True)):
            own = [parts.index.by_leaf[each] for each in positions]
            its = [flags[slot] for slot in own]
            if all(flag is True for flag in its):
                continue
            layout = trained_at(parts.layout, positions)
            if all(flag is False for flag in its):
                rested[number], counts[number] = old, state.counts[number]
                if all(gradients[slot] is None for slot in own):
                    self.warn_of_no_gradient(layout, counts[number])
                continue
            members = self.form.form_of(layout).members
            rested[number] = self._rested(layout, [rows_of([own[i] for i in slots]) for slots in members], old, new)
            counts[number] = state.counts[number] + jnp.any(rows_of(own)).astype(jnp.int32)
        return steps, tuple(rested), counts

    def _rested(self, layout: Layout, rows: Sequence[Any], old: PyTree, new: PyTree) -> PyTree:
        """The new state of active rows, and the old one of the others."""

        def choose(path: Any, before: Any, after: Any) -> Any:
            block = self.form.rows_in(layout, path, before)
            return after if block is None else jnp.where(_beside(rows[block], before), after, before)

        def visit(path: Any, before: Any, after: Any) -> Any:
            if isinstance(before, PerLeafState):
                return jtu.tree_map_with_path(choose, before, after)
            if not isinstance(before, ClipState) and is_array(before):
                raise ValueError(
                    "some parameters wait in this update, and the transformation keeps what is not kept row by row, "
                    f"state{jtu.keystr(path)}: put what holds state within optim.per_leaf, as in "
                    "optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(optax.adam(1e-3))), or give all "
                    'gradients, tp.project(model, grads, missing="zeros")'
                )
            return after

        is_whole = lambda node: isinstance(node, (PerLeafState, ClipState))
        return jtu.tree_map_with_path(visit, old, new, is_leaf=is_whole)


def _of_gradients(extra: dict[str, Any], change: Callable[[PyTree], PyTree]) -> None:
    """Changes the gradients among extra arguments, and those that a function among them gives."""
    if "grad" in extra:
        extra["grad"] = change(extra["grad"])
    if "grad_fn" in extra:
        grad_fn = extra["grad_fn"]
        extra["grad_fn"] = functools.wraps(grad_fn)(lambda *args, **kwargs: change(grad_fn(*args, **kwargs)))


def _rows(flags: Sequence[Any]) -> Callable[[Sequence[int]], jax.Array]:
    """From some slots to their flags as one array. Many slots have the same flag, and each is stacked once."""
    key = lambda flag: flag if isinstance(flag, bool) else id(flag)
    distinct = {key(flag): flag for flag in flags}
    numbers = dict(zip(distinct, range(len(distinct)), strict=True))
    stacked = jnp.stack([jnp.asarray(flag) for flag in distinct.values()])
    return lambda slots: stacked[np.array([numbers[key(flags[slot])] for slot in slots])]


def _beside(rows: jax.Array, stack: Any) -> jax.Array:
    return rows.reshape(-1, *[1] * (stack.ndim - 1))


def _flags(layout: Layout, gradients: Sequence[Any], active: Any) -> list[Any]:
    """Whether each slot moves: a Python bool where that is known."""
    if not isinstance(active, Mapping):
        raise TypeError(f"active is a dictionary {{where: flag}}, got {describe(active)}")
    flags: list[Any] = [gradient is not None for gradient in gradients]
    for where, flag in active.items():
        if isinstance(flag, (bool, np.bool_)):
            flag = bool(flag)
        elif not is_array(flag) or flag.dtype != bool or flag.shape:
            raise TypeError(f"active[{where!r}] is a bool, or a scalar array of one, got {describe(flag)}")
        for slot in slots_in(layout, where):
            flags[slot] = flag if gradients[slot] is not None else False
    return flags
