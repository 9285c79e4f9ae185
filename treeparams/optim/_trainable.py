"""trainable: the boundary between models and Optax, and the form in which a rule sees the parameters.

A rule of Optax sees the parameters that have a gradient in one form: the canonical tree, one vector, or stacks. Its
state holds copies of that form (see `_forms.states`), divided once, when the state is made.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer

from .._forms.form import Form, stacks_in_groups, stacks_of, tree_of, vector_of, vectors_of
from .._forms.states import Division, Entries
from .._slots.accidents import warn_of_parted_ties
from .._slots.index import warn_of_nothing
from .._slots.layout import Layout, Trainable, index_of, trained_at
from .._slots.match import slot_gradients
from .._slots.parts import Parts, kept_arrays, take_apart
from .._tree.paths import nearest
from .._tree.text import describe, first_few, warn
from .._tree.types import PyTree
from ._boundary import check_model, check_run, check_ties, counted, counting, taken_apart, zeros_filled
from ._coupling import compared
from ._groups import GroupsState, check_groups, groups_in
from ._master import MasterState
from ._per_leaf import check_rows
from ._scaled import ScaledState, check_names, spread, told
from ._separability import Known, check_form, couples_late, few_alike
from ._state import (
    ONE,
    History,
    ModelTransformation,
    Plain,
    Roles,
    TrainableState,
    asked,
    extended,
    in_own_buffers,
    nodes_of,
    noticed,
    of_run,
    regrouped,
    settled,
    steady,
)
from ._waiting import Sight, Waiting, flags_of

FormName = Literal["tree", "vector", "stacks"]
INSTEAD = {
    "tree": "use plain Optax",
    "vector": 'use form="tree"',
    "stacks": "put an optimiser that looks at single leaves inside optim.per_leaf: "
    "optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(optax.contrib.muon(1e-3)))",
}
"""The forms, and what to write for a rule that is not right over one."""


def trainable(
    tx: Plain,
    trainable: Trainable = None,
    *,
    form: FormName = "tree",
    missing: Literal["zeros"] | None = None,
    trial: Mapping[str, Any] | None = None,
) -> ModelTransformation:
    """Wraps an Optax optimiser so that it accepts a whole model.

    It updates only the trainable parameters, updates a tied parameter once, and leaves everything else unchanged.

    >>> import equinox as eqx, jax, jax.numpy as jnp, optax, treeparams as tp
    >>> from treeparams import optim
    >>> mlp = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))  # with functions and integers in it
    >>> tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(0.1)), "layers.1")
    >>> state = tx.init(mlp)
    >>> grads = tp.grad(lambda mlp: mlp(jnp.ones(2)) ** 2, state.layout)(mlp)
    >>> trained, state = optim.step(tx, grads, state, mlp)
    >>> trained.layers[0].weight is mlp.layers[0].weight, state.layout.paths
    (True, ('layers.1.weight', 'layers.1.bias'))

    **Use it once, as the outermost transformation.** Everything inside it is plain Optax over the form, so chains,
    masks, `optax.MultiSteps`, line searches and `optim.groups` work as their documentation says. A transformation
    around it must accept any tree as a whole: no mask, no `optax.partition`, and no second transformation over models,
    which would add up the places of ties and conjugate complex gradients once more. Put transformations that compare
    gradients with updates (`optax.apply_if_finite`), make zeros of the model (`optax.MultiSteps`) or ask it for a dtype
    (`optax.inject_hyperparams` without `hyperparam_dtype`) *inside*. There they see each parameter once and nothing
    else; outside they would see the whole model and may fail.

    **The state records which parameters train**: `init` fixes them, `optim.set_trainable` changes them. It also records
    the ties for `update`, since inside `jax.jit` arrays no longer show them. Take gradients by `state.layout`. `init`
    sees ties outside of a trace, in `tp.jit(tx.init)`, or if you pass a `Layout`.

    **Three forms.** The rule sees the result of `tp.partition`, `tp.ravel` or `tp.stack`:

    - `form="tree"`: the canonical tree, model-shaped, with `None` at aliases and at everything that is not trained. Any
      optimiser is right over it.
    - `form="vector"`: one vector, one operation instead of thousands. It has the widest dtype of its leaves; with
      `optim.master` in `tx` there is a vector for each dtype.
    - `form="stacks"`: one array for each shape, `{"float32[2,3]": array of shape (4, 2, 3)}`. Element-wise optimisers
      (Adam, SGD) and global ones (clipping by the norm of all) work on stacks directly. **Put optimisers that look at a
      leaf's shape or norm inside `optim.per_leaf`**: to Muon a stack of biases would be a matrix. `tx` may contain
      `optim.groups`; each group has separate stacks.

    Over a vector or stacks, an optimiser that would not do the same as leaf by leaf raises a `ValueError` at `init`:
    one that looks at shapes (adafactor, lamb, muon, masks by shape, in stacks outside of `optim.per_leaf`) or at names
    (masks by path). `init` reads the programs of `tx` over the leaves of the model, apart and joined, in 5 to 500 ms;
    of more than 32 leaves, those of one shape whose names differ only in a number count as two. So the numbers do not
    matter, nor whether they are traced. **Kernels and callbacks show no program**: an optimiser that calls one, for
    more than something beside its updates, is refused by its name.

    **`None` is not zero.** A leaf without a gradient takes no step in this call and its moments stay as they are;
    optimisers that couple leaves (a global norm, a line search) run over the leaves that have one. All leaves of one
    history share a step count, which goes on if any of them has a gradient. `optax.MultiSteps` needs all gradients in
    each call: `tp.project(model, grads, missing="zeros")`. **One vector has no holes**: there a leaf without a gradient
    counts as zero, so its moments decay and it may move. In stacks its row waits.

    **Freeze without a new trace**: with `form="stacks"`, `update(grads, state, model, active={where: flag})` accepts
    flags that may be traced. A parameter whose flag is `False` takes no step and its state waits, including its step
    count, as if you had not made the call for it. The first `where` that selects a parameter gives its flag; a
    parameter that no entry selects moves. Make this dictionary inside `jax.jit`, which sorts the keys of dictionaries
    that you pass in. The gradient of a parameter that waits counts as zero in a norm and may be NaN. So "train another
    layer every hundred steps" compiles once. Only state that is kept row by row can wait, so put transformations with
    state inside `optim.per_leaf`; the state of `optim.clip_by_global_norm` describes the whole call and goes on.

    >>> layers = [{"w": jnp.ones((2, 3)), "b": jnp.ones(3)} for _ in range(4)]
    >>> model, grads = {"layers": layers, "steps": jnp.array(3)}, {"layers": layers}
    >>> adafactor = optim.per_leaf(optax.adafactor(0.1))
    >>> tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), adafactor), form="stacks")
    >>> active = {"layers.2": True, "**": False}
    >>> updates, state = tx.update(grads, tx.init(model), model, active=active)
    >>> updates["layers"][0]["b"], bool(jnp.all(updates["layers"][2]["b"] < 0)), updates["steps"]
    (Array([-0., -0., -0.], dtype=float32), True, None)

    **`update` conjugates complex gradients for `tx`**, and nothing else in this library does: JAX's gradient of a real
    loss is the conjugate of the direction of ascent.

    Args:
        tx: any Optax transformation or chain. If gradients are partial or you freeze leaves later, it must keep its
            state leaf by leaf.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        form: the tree that `tx` sees: `"tree"`, `"vector"` or `"stacks"`.
        missing: the updates of everything that does not move: `None`, or with `"zeros"` zeros of the leaf's dtype, for
            code that adds an update to every leaf, such as `optax.apply_updates` and Flax's `TrainState`. Integers and
            numbers get zeros too, but not functions, texts and typed keys, to which nothing can be added. A floating
            zero is -0.0, which changes no number. In a compiled step zeros cost nothing.
        trial: examples of extra arguments that `tx` needs, for the check of a vector or stacks. `value`, `grad` and
            `value_fn` are there.

    Returns:
        A transformation. `init(model)` returns a `TrainableState`, which shares no buffer with the model.
        `update(grads, state, model, **extra)` accepts a gradient in any form that `tp.project` accepts; one that is
        wider than its leaf keeps single precision. A tied parameter has its update at all places, through the transform
        of an alias that has one, and everything that does not move has `None` (see `missing`); a row of stacks that
        waits has -0.0. So `eqx.apply_updates(model, updates)` is right; `optim.step` does both, and recomputes an alias
        that has a transform, since sums would let it drift by rounding. Among the extra arguments `grad` may be in any
        form too, functions are called with models (`grad_fn` may return a gradient in any form), and others are passed
        on.

    Warns:
        UserWarning: `init`: nothing is trained. `update`, outside of a trace: no leaf of a history has had a gradient
            since it was made; three nonzero steps or more have left a bfloat16 or float16 leaf as it was, see
            `TrainableState.stuck`. It looks after 0, 1, 2, 4, 8 ... such calls, so as not to wait for a device in each.

    Raises:
        TypeError: `tx` is not a transformation; `init`: as `tp.layout`; `update`: the gradients are the model itself,
            or integers; a flag is not a bool; as `tp.project`, and for a line search over complex parameters.
        ValueError: `form` or `missing` is another word; `tx` contains a transformation over models; `init`: an alias
            has another value than its source gives, as `tp.layout`; `tx` is not the same over the form, or has groups
            within groups, or several that divide the stacks in different ways; `update`: there is no model, it does not
            fit the state; some rows wait, and `tx` keeps state outside of `optim.per_leaf`; a `where` of `active`
            selects nothing, or only parameters that earlier entries select; as `tp.project`.
    """
    rule = Rule(tx, trainable, form, missing, trial)
    return ModelTransformation(rule.init, rule.update)


_OTHER_WORDS = {"flat": "vector", "ravel": "vector", "stacked": "stacks", "stack": "stacks", "partition": "tree"}


class Rule:
    """An Optax transformation, the form in which it sees a model, and the parameters that it trains.

    A form without a name here is a function that makes it from a layout.
    """

    def __init__(
        self,
        tx: Plain,
        trainable: Trainable,
        form: FormName | Callable[[Layout], Form],
        missing: Literal["zeros"] | None = None,
        trial: Mapping[str, Any] | None = None,
    ) -> None:
        if not (form in INSTEAD or callable(form)):
            right = f"; write form={_OTHER_WORDS[form]!r}" if form in _OTHER_WORDS else nearest(str(form), [*INSTEAD])
            raise ValueError(f'form must be "tree", "vector" or "stacks", got {form!r}{right}')
        if missing not in (None, "zeros"):
            raise ValueError(f'missing must be None or "zeros", got {missing!r}')
        if isinstance(tx, ModelTransformation):
            raise ValueError(ONE)
        self.tx = extended(tx)
        self.form = form
        self.trainable = trainable
        self.missing = missing
        self._trial = dict(trial or {})
        self._right_for: Known = frozenset()
        self._own: Division | None = None  # the last one that was found to be of this rule
        self._warned: set[int] = set()  # of layouts, by hash

    def __repr__(self) -> str:
        # Rules of Optax have no names, but the name of their `init` contains the function that made them.
        inner = getattr(self.tx.init, "__qualname__", type(self.tx).__name__).partition(".")[0]
        form = None if self.form == "tree" else self.form
        options = {"trainable": self.trainable, "form": form, "missing": self.missing}
        said = [inner, *(f"{name}={value!r}" for name, value in options.items() if value is not None)]
        return f"optim.trainable({', '.join(said)})"

    # -- Forms

    def form_of(self, layout: Layout) -> Form:
        """Returns the form in which the rule sees the parameters of a layout."""
        if self.form == "tree":
            return tree_of(layout)
        if callable(self.form):
            return self.form(layout)
        make = self._vector_of if self.form == "vector" else self._stacks_of
        return self._remembered(layout, "form", functools.partial(make, layout))

    def _remembered(self, layout: Layout, name: str, make: Callable[[], Any]) -> Any:
        """Returns the value that the rule has computed for a layout, kept as long as both live."""
        index = index_of(layout)
        # With the structure, and not with the rule, which may live longer: models may hold functions, and these arrays.
        # Layouts that are equal share it, such as those before a parameter froze and after it thawed.
        rules = index.structure.remember(("of rules", index.trained, index.ties), weakref.WeakKeyDictionary)
        known = rules.setdefault(self, {})
        if name not in known:
            known[name] = make()
        return known[name]

    def _vector_of(self, layout: Layout) -> Form:
        # One vector of several dtypes has the widest of them, which would hide narrow parameters from `optim.master`.
        form, by_dtype = vector_of(layout), vectors_of(layout)
        return by_dtype if by_dtype != form and self._has(MasterState, form.shapes()) else form

    def _stacks_of(self, layout: Layout) -> Form:
        has_any = layout.slots and self._has(GroupsState, {}) is not False
        groups = self._groups_of(layout) if has_any else None
        return stacks_of(layout) if groups is None else stacks_in_groups(layout, groups)

    def _has(self, kind: type, shown: PyTree) -> bool | None:
        """Returns whether a state of the rule has a node of this class; `None` if `init` fails, which will say why."""
        with contextlib.suppress(Exception):
            return bool(nodes_of(kind, jax.eval_shape(self.tx.init, shown)))
        return None

    def _groups_of(self, layout: Layout) -> dict[str, list[int]] | None:
        """Returns the slots of each group of `optim.groups`; `None` if the rule has none."""
        tree = tree_of(layout)
        shown = compared(tree.treedef, tree.keys, jtu.tree_leaves(tree.shapes()))  # in which `per_leaf` looks at none
        try:
            nodes = nodes_of(GroupsState, jax.eval_shape(self.tx.init, shown))
        except Exception:
            if self._has(GroupsState, {}):
                raise
            return None  # its mask is for stacks
        if not nodes:
            return None
        check_groups(nodes, index_of(layout))
        divisions = [{group.name: group.paths for group in node.groups} for node in nodes]
        if any(each != divisions[0] for each in divisions) or any(list(groups_in(node.inner_states)) for node in nodes):
            raise ValueError(
                'form="stacks" makes stacks for one optim.groups, but there are several, or groups within groups: give '
                'each group its own chain, or use form="tree"'
            )
        numbers = {slot.path: i for i, slot in enumerate(layout.slots)}
        return {name: [numbers[path] for path in paths] for name, paths in divisions[0].items()}

    # -- States

    def init(self, params: PyTree) -> TrainableState:
        """Returns a fresh state."""
        check_model(params)
        parts = take_apart(params, self.trainable)
        if not isinstance(self.trainable, Layout):
            warn_of_parted_ties(parts.index, jtu.tree_leaves(params))
        check_ties(params, parts)
        return self.start(parts)

    def start(self, parts: Parts[Any]) -> TrainableState:
        """Returns a fresh state of the trained parameters."""
        positions = parts.index.positions
        if not positions:
            warn_of_nothing(parts.index)
            return TrainableState((), (), (), Roles(parts.layout, (), (), ()))
        self.check(parts.layout)
        run = self.fresh(parts)
        check_names(run, parts.index)
        roles = Roles(parts.layout, (positions,), (), (self.like(parts.layout, run).division,))
        state = counting(TrainableState((run,), (), (jnp.zeros((), jnp.int32),), roles))
        return in_own_buffers(state, [*parts.slots, *kept_arrays(parts.rest).values()])

    def check(self, layout: Layout) -> None:
        """Checks that the inner rule is right over the form of these parameters."""
        if self.form == "tree":
            return
        words = f'form="{self.form}"', INSTEAD.get(str(self.form), INSTEAD["vector"])
        self._right_for = check_form(self.tx, layout, self.form_of(layout), words, self._trial, self._right_for)

    def fresh(self, parts: Parts[Any]) -> PyTree:
        """Returns a fresh state of the inner rule."""
        form = self.form_of(parts.layout)
        run = self.tx.init(form.holding(parts.slots))
        check_run(run, parts)
        check_rows(run, form)
        return settled(run)

    def like(self, layout: Layout, made: PyTree = None) -> History:
        """Returns a fresh history of some parameters, as shapes; `made` is a fresh state that exists already."""
        ask = lambda: asked(self.tx.init, self.form_of(layout), made)
        return History(layout, *self._remembered(layout, "state", ask), begin=functools.partial(self.begun, layout))

    def begun(self, layout: Layout) -> PyTree:
        """Returns a fresh state for some parameters, made from zeros."""
        shapes = self.form_of(layout).shapes()
        return settled(self.tx.init(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)))

    def histories(self, state: Any) -> list[History]:
        """Returns all histories of a state, which must be one of this rule: those that run, then those that wait."""
        if not isinstance(state, TrainableState):
            raise TypeError(
                f"expected the state that tx.init(model) or the last update returned, got {describe(state)}; the order "
                "is tx.update(grads, state, model)"
            )
        roles, at = state.roles, (*state.roles.running, *state.roles.held)
        layouts = [roles.layout] if len(at) == 1 and roles.running else [trained_at(roles.layout, each) for each in at]
        found = list(map(History, layouts, (*state.runs, *state.held), roles.divisions, state.counts))
        if found and found[0].division is not self._own:
            if not _are_of_one_rule(self.like(found[0].layout).division, found[0].division, len(found) == 1):
                raise ValueError(
                    "the state was made by another transformation than this one; pass the one whose init made it"
                )
            self._own = found[0].division
        return found

    def check_together(self, layout: Layout) -> None:
        """Refuses several histories of a rule that couples parameters after it has used their step counts."""
        if self._remembered(layout, "couples late", functools.partial(self._couples_late, layout)):
            raise ValueError(
                "parameters have taken different numbers of steps, and the transformation computes something of all of "
                "them, such as a norm, from what it has made of each with its own count. Put that first in the chain, "
                "optax.chain(optim.clip_by_global_norm(1.0), optax.adam(1e-3)), or begin anew, "
                "optim.set_trainable(..., reset=True)"
            )

    def _couples_late(self, layout: Layout) -> bool:
        positions = index_of(layout).positions
        layout = trained_at(layout, [positions[slot] for slot in few_alike(layout)])
        form = tree_of(layout)
        if self.form == "stacks":
            form = stacks_in_groups(layout, self._groups_of(layout) or {None: range(len(layout.slots))}, is_apart=True)
        return couples_late(self.tx, form, History(layout, *asked(self.tx.init, form)), self._trial)

    # -- Steps

    def update(
        self, updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, TrainableState]:
        """Takes one step: returns the updates at all places, and the next state."""
        if params is None:
            raise ValueError("expected the model as the third argument, got None; write tx.update(grads, state, model)")
        parts, steps, after = self.step(updates, state, params, extra)
        tree = parts.everywhere(steps)
        return tree if self.missing is None else zeros_filled(params, tree), after

    def step(
        self, grads: PyTree, state: Any, model: PyTree, extra: dict[str, Any]
    ) -> tuple[Parts[Any], list[Any], TrainableState]:
        """Takes one step: returns the model's parts, the step of each slot, and the next state."""
        running = self.histories(state)[: len(state.runs)]
        if grads is model:
            raise TypeError("the gradients are the model itself; write grads = tp.grad(loss)(model)")
        parts = taken_apart(model, state, grads)
        gradients = self._gradients(parts, grads)
        absent = [slot for slot, given in enumerate(gradients) if given is None]
        if absent:
            self._warn_of_no_gradient(parts, running, absent)
        sight, gradients = self._sight(parts, gradients, absent, extra)
        is_scaled = bool(running and nodes_of(ScaledState, running[0].state))
        update = self._update(sight, gradients, extra, is_scaled)
        steps, runs, counts = self._steps(sight, update, running)
        seen, still = state.seen, state.still
        if not isinstance(still, tuple):
            state = state if seen & (seen - 1) else noticed(state)  # after 0, 1, 2, 4, 8 ...
            still = counted(parts, state, steps)
        after = TrainableState(runs, state.held, (*counts, *state.counts[len(runs) :]), state.roles, still)
        object.__setattr__(after, "seen", seen + 1)
        return parts, steps, after

    def _steps(
        self, sight: Sight, update: Callable[[PyTree], Any], histories: Sequence[History]
    ) -> tuple[list[Any], tuple[Any, ...], tuple[Any, ...]]:
        """Returns the step of each slot, and the next state and count of each history."""
        if len(histories) == 1 and sight.is_whole:  # all that trains, and most often all there is
            (history,) = histories
            moves = sight.moves(history) if isinstance(sight, Waiting) else True
            if moves is False:
                return [None] * len(sight.parts.slots), (history.state,), (history.count,)
            steps, run = sight.step(update, history.division, history.state, self.tx.init)
            return steps, (run,), (history.count + (1 if moves is True else moves.astype(jnp.int32)),)
        steps: list[Any] = [None] * len(sight.parts.slots)
        after, counts = [*histories], [history.count for history in histories]
        shared = dict[Entries, Any]()
        for number, made, state in self._of_several(sight, update, histories):
            after[number] = dataclasses.replace(histories[number], state=state)
            moves = sight.moves(histories[number])
            counts[number] = counts[number] + (1 if moves is True else moves.astype(jnp.int32))
            for slot in sight.slots_of(histories[number]):
                steps[slot] = made[slot]
            if not shared and len(histories) > 1:  # the same in all histories, and those without a gradient follow
                arrays, its = after[number].copies.arrays, of_run(histories)
                shared = {entries: array for entries, array in arrays.items() if entries in its}
        return steps, tuple([each.holding(shared).state for each in after]), tuple(counts)

    def _of_several(
        self, sight: Sight, update: Callable[[PyTree], Any], histories: Sequence[History]
    ) -> Iterator[tuple[int, list[Any], PyTree]]:
        """Yields, for each history that moves, its number, its steps of all slots, and its next state.

        A rule may couple leaves, by a global norm or a line search. So each history runs over all leaves that have a
        gradient, and only its own leaves are kept of the result; XLA computes nothing for the rest. That is right as
        long as coupled values do not depend on step counts, which `check_together` has seen to.
        """
        if len(histories) > 1:
            self.check_together(sight.parts.layout)
        moving = [number for number, history in enumerate(histories) if sight.moves(history) is not False]
        if isinstance(jnp.zeros(()), Tracer) and len(moving) > 1:  # within jit even constants are traced
            update = jax.jit(update)  # so that the rule is traced once and not for each history
        like = self.like(sight.layout)
        for number in moving:
            history = histories[number]
            before = regrouped([history, *histories[:number], *histories[number + 1 :]], like)
            steps, after = sight.step(update, like.division, before, self.tx.init)
            mine = regrouped([dataclasses.replace(like, state=after), history], history)
            yield number, steps, steady(mine, history.state)

    def _sight(
        self, parts: Parts[Any], gradients: list[Any], absent: list[int], extra: dict[str, Any]
    ) -> tuple[Sight, list[Any]]:
        """Returns the parameters that the rule sees, and the gradients that it sees."""
        if self.form != "stacks" and "active" in extra:
            raise TypeError(
                'active= selects the rows of stacks that move: write optim.trainable(tx, form="stacks") for this one'
            )
        active = extra.pop("active", None)
        layout, slots = parts.layout, [*range(len(gradients))]
        if absent and self.form == "tree":
            slots = [slot for slot in slots if gradients[slot] is not None]
            layout = trained_at(layout, [parts.index.positions[slot] for slot in slots])
            return Sight(parts, layout, tree_of(layout), slots, is_whole=False), gradients
        form = self.form_of(layout)
        if self.form == "stacks" and (absent or active is not None):
            flags = flags_of(layout, absent, {} if active is None else active)
            if any(flag is not True for flag in flags):
                return Waiting(parts, layout, form, slots, True, flags, frozenset(absent)), _filled(parts, gradients)
        return Sight(parts, layout, form, slots, is_whole=True), _filled(parts, gradients) if absent else gradients

    def _update(
        self, sight: Sight, gradients: list[Any], extra: dict[str, Any], is_scaled: bool
    ) -> Callable[[PyTree], Any]:
        """Returns the update of the rule, a function of its state."""
        further = {name: self._argument(sight, name, value) for name, value in extra.items()} if extra else {}
        shown, params = sight.show(gradients), sight.show(sight.parts.slots)
        if not is_scaled:
            return lambda before: self.tx.update(shown, before, params, **further)
        by_parameter = functools.partial(spread, sight.parts.index, sight.layout, sight.form)

        def update(before: PyTree) -> tuple[PyTree, PyTree]:
            made, after = self.tx.update(shown, told(before, by_parameter), params, **further)
            return made, told(after, None)

        return update

    def _warn_of_no_gradient(self, parts: Parts[Any], histories: Sequence[History], absent: Sequence[int]) -> None:
        """Warns, once, of a history that has not taken a step yet."""
        without = {parts.index.positions[slot] for slot in absent}
        for history in histories:
            first_time = not isinstance(history.count, Tracer) and not int(history.count)
            is_known = hash(history.layout) in self._warned
            if first_time and not is_known and without.issuperset(index_of(history.layout).positions):
                self._warned.add(hash(history.layout))
                message = "take gradients by the layout in the state, tp.grad(loss, state.layout)"
                warn(f"no gradient so far for {first_few(history.layout.paths)}, which the state trains: {message}")

    # -- Arguments

    def _gradients(self, parts: Parts[Any], grads: PyTree) -> list[Any]:
        """Returns one gradient per slot as Optax's rules expect them; `None` if there is none."""
        if grads is None or isinstance(grads, (bool, int)):
            raise TypeError(f"expected a tree of gradients, as tp.grad(loss)(model) returns it, got {describe(grads)}")
        index = parts.index
        gradients = slot_gradients(index, grads, None, wide=True)
        for slot in index.complex_slots:
            # JAX's gradient of a real loss is the conjugate of the direction of ascent, which is what Optax takes.
            if gradients[slot] is not None:
                gradients[slot] = jnp.conj(gradients[slot])
        return gradients

    def _argument(self, sight: Sight, name: str, value: Any) -> Any:
        """Converts an extra argument for the rule: gradients and functions of the model become those of the form."""
        if name == "grad":
            return self._show_gradients(sight, value)
        if not (callable(value) and (name in ("value_fn", "obj_fn", "grad_fn") or jtu.all_leaves([value]))):
            return value
        complex_slots = sight.parts.index.complex_slots
        if complex_slots and name != "grad_fn":
            slot = sight.parts.layout.slots[complex_slots[0]]
            raise TypeError(
                "Optax transformations that differentiate a loss themselves, such as line searches, do not descend "
                f"along complex parameters, and {slot.path!r} is {slot.dtype}; keep its real and imaginary parts as "
                "two real parameters"
            )

        @functools.wraps(value)  # Optax looks at the names of its arguments
        def of_what_is_shown(shown: PyTree, *args: Any, **kwargs: Any) -> Any:
            result = value(sight.model(shown), *args, **kwargs)
            return self._show_gradients(sight, result) if name == "grad_fn" else result

        return of_what_is_shown

    def _show_gradients(self, sight: Sight, grads: PyTree) -> PyTree:
        """Converts gradients among the extra arguments to the form."""
        # A rule sees a whole form, so gradients that are missing only here are zero.
        return sight.show(_filled(sight.parts, self._gradients(sight.parts, grads)))


def _filled(parts: Parts[Any], gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradients, with zeros for those that are missing."""
    pairs = zip(parts.slots, gradients, strict=True)
    return [jnp.zeros_like(leaf) if given is None else given for leaf, given in pairs]


def _are_of_one_rule(like: Division, division: Division, is_one: bool) -> bool:
    """Returns whether two states have the same arrays of the same parameters.

    If there are several histories, `saving.plan` makes those of some parameters without asking the rule. Then only the
    arrays that belong to parameters must be the same.
    """
    of_each = lambda it: [(owners.paths, owners.place) for owners in it.owners if owners is not None]
    return like is division or like == division or (not is_one and of_each(like) == of_each(division))
