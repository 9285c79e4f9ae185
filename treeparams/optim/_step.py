"""The rule of `optim.trainable`, which takes its steps: a rule of Optax, and the form in which it sees a model.

A rule sees the parameters that have a gradient in one form: the canonical tree, one vector, or stacks. Its state holds
copies of that form (see `_forms.states`), divided once, when the state is made.
"""

import contextlib
import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.core import Tracer

from .._forms.block import Block
from .._forms.form import Form
from .._forms.states import Division, Entries
from .._slots.accidents import warn_of_parted_ties
from .._slots.layout import Layout, Trainable, index_of, trained_at
from .._slots.parts import Parts, take_apart
from .._tree.structure import flatten, is_array
from .._tree.text import describe, first_few, warn
from .._tree.types import PyTree, common_dtype, is_complex
from ._boundary import check_run, parts_of, rows_of
from ._groups import GroupsState, check_groups, compared, groups_in
from ._joined import check_form, couples_late, few_alike
from ._per_leaf import check_rows
from ._state import ONE, Extended, History, TrainableState, in_own_buffers, nodes_of, noticed, settled, state_of, steady
from ._updates import MasterState, ScaledState, check_names, copies_in, spread, told


def added(path: str, leaf: jax.Array | np.ndarray, step: jax.Array | np.ndarray | None) -> jax.Array | np.ndarray:
    """Returns a parameter after its update, in its own dtype."""
    if step is None:
        return leaf
    # Outside of jit, to ask for more, or a cast that does nothing, takes as long as the sum.
    if isinstance(leaf, jax.Array) and isinstance(step, jax.Array) and leaf.dtype == step.dtype and not leaf.weak_type:
        return leaf + step
    if jnp.iscomplexobj(step) and not is_complex(leaf.dtype):
        raise TypeError(f"expected a real update at {path!r}, where the parameter is {leaf.dtype}, got {step.dtype}")
    leaf, step = jnp.asarray(leaf), jnp.asarray(step)
    dtype = common_dtype([leaf.dtype, step.dtype])
    return jax.lax.convert_element_type(leaf.astype(dtype) + step.astype(dtype), leaf.dtype)


# -- Narrow parameters -----------------------------------------------------------------------------------------------


def counting(state: TrainableState) -> TrainableState:
    """Returns the state with counts of lost steps, if it is of narrow parameters without copies by `optim.master`."""
    index, roles, copied = index_of(state.layout), state.roles, _copied(state)
    kept = {leaf for positions in (*roles.running, *roles.held) for leaf in positions}
    is_any = any(leaf in kept and index.structure.paths[leaf] not in copied for leaf in index.narrow)
    known = jnp.zeros(len(index.narrow), jnp.int32) if is_any and isinstance(state.still, tuple) else state.still
    return dataclasses.replace(state, still=known if is_any else ())


def _copied(state: TrainableState) -> set[str]:
    """Returns the parameters that `optim.master` keeps copies of."""
    pairs = zip((*state.runs, *state.held), state.roles.divisions, strict=True)
    return {path for run, division in pairs for owners, _ in copies_in(run, division) for path in owners.paths}


def _counts(parts: Parts[Any], state: TrainableState, steps: Sequence[Any]) -> Any:
    """Returns the counts of lost steps after one step of each slot."""
    index, copied = parts.index, _copied(state)
    pairs: list[Any] = [None] * len(index.narrow)
    for slot in index.narrow_slots:
        leaf = index.positions[slot]
        if steps[slot] is not None and index.structure.paths[leaf] not in copied:
            pairs[index.narrow[leaf]] = parts.slots[slot], steps[slot]
    return _counted(state.still, pairs)


_MOVES = 2


@jax.jit  # one call outside of a trace
def _counted(still: jax.Array, pairs: Sequence[tuple[jax.Array, jax.Array] | None]) -> jax.Array:
    effects = jnp.stack([jnp.zeros((), jnp.int32) if pair is None else _effect(*pair) for pair in pairs])
    return jnp.where(effects == _MOVES, 0, still + jnp.where(still < 0, -effects, effects))


@jax.jit  # traced once for all parameters of a shape
def _effect(leaf: jax.Array, step: jax.Array) -> jax.Array:
    """Returns `_MOVES` if a step changes its parameter, 1 if it is not zero and is lost, otherwise 0."""
    # The bits are compared, since compilers may leave out the rounding of a sum that is compared as a number.
    after, bits = added("", leaf, step), f"uint{jnp.finfo(leaf.dtype).bits}"
    has_moved = jax.lax.bitcast_convert_type(after, bits) != jax.lax.bitcast_convert_type(leaf, bits)
    is_lost = jnp.isfinite(leaf) & (jnp.abs(step) > 0)
    # In bytes, since not every compiler reduces the effects as it makes them.
    return jnp.max(jnp.where(has_moved, _MOVES, is_lost.astype(jnp.int8)), initial=0).astype(jnp.int32)


# -- What a rule sees in one update ----------------------------------------------------------------------------------

Run = Callable[[PyTree], tuple[PyTree, PyTree]]
"""From a state of the rule to its steps for the gradients, and its next state."""


@dataclasses.dataclass(frozen=True)
class Sight:
    """The form of the parameters that the rule sees in one update."""

    parts: Parts[Any]
    layout: Layout
    form: Form
    slots: Sequence[int] | None = None  # their numbers in the whole layout; `None` if these are all
    rows: Any = None  # which `Rows` move, if some wait

    def show(self, values: Sequence[Any]) -> PyTree:
        """Returns the form of one value per slot of the whole layout, with zeros in rows that wait."""
        shown = _in_widest(self.form, values if self.slots is None else [values[slot] for slot in self.slots])
        return shown if self.rows is None else self.rows.masked(shown, 1)

    def step(self, update: Run, division: Division, before: PyTree, init: Callable[[PyTree], PyTree]) -> Any:
        """Returns the step of each slot, and the next state, from a state that is divided in this way."""
        if self.rows is None:
            made, after = update(before)
            return self._read(made), steady(after, before)
        # For a row that waits, the rule sees a parameter of zero, a gradient of zero and a fresh state, so that the row
        # adds nothing to a norm, whatever is in it.
        fresh = settled(init(self.show(self.parts.slots)))
        made, after = update(self.rows.of_state(division, before, fresh))
        # -0.0 changes no number when it is added; 0.0 would turn -0.0 into 0.0.
        steps = self.rows.without_absent(self._read(self.rows.masked(made, -1)))
        return steps, self.rows.of_state(division, steady(after, before), before)

    def slots_of(self, history: History) -> list[int]:
        """Returns the slots of a history, in a model that may train others too."""
        by_leaf = self.parts.index.by_leaf
        return [by_leaf[position] for position in index_of(history.layout).positions]

    def moves(self, history: History) -> Any:
        """Returns whether any parameter of a history takes a step: a bool, or an array of one."""
        if self.rows is not None:
            return self.rows.moves(history, self.slots_of(history))
        return self.slots is None or not set(self.slots).isdisjoint(self.slots_of(history))

    def _read(self, shown: PyTree) -> list[Any]:
        """Returns one value per slot of the whole layout; `None` for slots that the rule did not see, or left out."""
        found = self.form.read(shown)
        if self.slots is None:
            return found
        values = dict(zip(self.slots, found, strict=True))
        return [values.get(slot) for slot in range(len(self.parts.slots))]

    def model(self, shown: PyTree) -> Any:
        """Returns the model with these parameters; everything else, and rows that wait, are as they were."""
        if self.rows is not None:
            shown = self.rows.beside(shown, self.form.join(self.parts.slots))
        found = zip(self._read(shown), self.parts.slots, strict=True)
        return self.parts.model([own if new is None else new for new, own in found])


def _in_widest(form: Form, arrays: Sequence[Any]) -> PyTree:
    """Makes a form from one array per slot, each block in the widest dtype of its arrays: gradients may be wide."""
    if form.has_singles:
        return form.join(arrays)
    blocks = list(form.blocks)
    for i, slots in enumerate(form.members):
        its = {arrays[slot].dtype for slot in slots if arrays[slot].size}
        dtype = common_dtype([blocks[i].dtype, *map(jax.dtypes.canonicalize_dtype, its)])
        if blocks[i].length is not None and dtype != blocks[i].dtype:
            blocks[i] = dataclasses.replace(blocks[i], dtype=dtype)
    is_same = all(map(operator.is_, blocks, form.blocks))  # what a form has worked out is not worked out again
    return (form if is_same else dataclasses.replace(form, blocks=tuple(blocks))).join(arrays)


# -- The rule --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, repr=False)
class Rule:
    """An Optax transformation, the form in which it sees a model, and the parameters that it trains.

    A form without a name here is a function that makes it from a layout.
    """

    tx: Any  # which takes extra arguments
    trainable: Trainable
    form: Any
    missing: str | None = None
    trial: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._right_for = set[Any]()
        self._own: Division | None = None  # the last one that was found to be of this rule
        self._is_scaled = False  # whether `optim.scaled` is in it
        self._warned = set[int]()  # of layouts, by hash

    def form_of(self, layout: Layout) -> Form:
        """Returns the form in which the rule sees the parameters of a layout."""
        if self.form == "tree":
            return Form.tree(layout)
        if not isinstance(self.form, str):
            return self.form(layout)
        return self._remembered(layout, "form", functools.partial(_form_for, self.tx, self.form, layout))

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

    # -- States

    def init(self, params: PyTree) -> TrainableState:
        """Returns a fresh state."""
        if type(params).__name__ == "_ParamsPlaceholder":
            raise TypeError("map_params takes plain Optax: pass the one in optim.trainable, and state.runs[0]")
        if nodes_of(optax.MaskedNode, params):
            raise ValueError(f"a mask, or optax.partition, is around a transformation over models; {ONE}")
        parts = take_apart(params, self.trainable)
        if not isinstance(self.trainable, Layout):
            warn_of_parted_ties(parts.index, jtu.tree_leaves(params))
        _check_model(params, parts)
        return self.start(parts)

    def start(self, parts: Parts[Any]) -> TrainableState:
        """Returns a fresh state of the trained parameters."""
        if not parts.slots:
            parts.index.warn_of_nothing()
            return state_of(parts.layout, (), (), ())
        self.check(parts.layout)
        begun = self.fresh(parts)
        check_names(begun.state, parts.index)
        state = counting(state_of(parts.layout, (begun,), (), ()))
        return in_own_buffers(state, [*parts.slots, *parts.rest.arrays])

    def check(self, layout: Layout) -> None:
        """Checks that the inner rule is right over the form of these parameters."""
        if self.form != "tree":
            check_form(self.tx, layout, self.form_of(layout), f'form="{self.form}"', self.trial, self._right_for)

    def fresh(self, parts: Parts[Any]) -> History:
        """Returns the history of parameters that begin."""
        form = self.form_of(parts.layout)
        run = self.tx.init(form.join(parts.slots))
        check_run(run, parts)
        check_rows(run, form)
        run = settled(run)
        return History(parts.layout, run, self.like(parts.layout, run).division, jnp.zeros((), jnp.int32))

    def like(self, layout: Layout, made: PyTree = None) -> History:
        """Returns a fresh history of some parameters, as shapes; `made` is a fresh state that exists already."""
        ask = lambda: _state_for(self.tx.init, self.form_of(layout), made)
        return History(layout, *self._remembered(layout, "state", ask))

    def histories(self, state: Any) -> list[History]:
        """Returns all histories of a state, which must be one of this rule: those that run, then those that wait."""
        if not isinstance(state, TrainableState):
            raise TypeError(f"expected a state, got {describe(state)}; the order is tx.update(grads, state, model)")
        roles, at = state.roles, (*state.roles.running, *state.roles.held)
        layouts = [roles.layout] if len(at) == 1 and roles.running else [trained_at(roles.layout, each) for each in at]
        found = list(map(History, layouts, (*state.runs, *state.held), roles.divisions, state.counts))
        if found and found[0].division is not self._own:
            like, own = self.like(found[0].layout).division, found[0].division
            # Of several histories, `saving.plan` makes those of some parameters without asking the rule. Then only the
            # arrays that belong to parameters must be the same.
            of_each = lambda it: [(owners.paths, owners.place) for owners in it.owners if owners is not None]
            if like != own and (len(found) == 1 or of_each(like) != of_each(own)):
                raise ValueError("the state was made by another transformation than this one; pass the other")
            self._own, self._is_scaled = own, bool(nodes_of(ScaledState, found[0].state))
        return found

    def check_together(self, layout: Layout) -> None:
        """Refuses several histories of a rule that couples parameters after it has used their step counts."""

        def couples() -> bool:
            positions = index_of(layout).positions
            few = trained_at(layout, [positions[slot] for slot in few_alike(layout)])
            form = _form_for(self.tx, "stacks", few, is_apart=True) if self.form == "stacks" else Form.tree(few)
            return couples_late(self.tx, form, History(few, *_state_for(self.tx.init, form)), self.trial)

        if self._remembered(layout, "couples late", couples):
            raise ValueError(
                "parameters have taken different numbers of steps, and the transformation couples what it makes of "
                "each by its count. Put that first in the chain, optax.chain(optim.clip_by_global_norm(1.0), "
                "optax.adam(1e-3)), or begin anew, optim.set_trainable(..., reset=True)"
            )

    # -- Steps

    def update(self, updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        """Takes one step: returns the updates at all places, and the next state."""
        if params is None:
            raise ValueError("expected the model as the third argument, got None; write tx.update(grads, state, model)")
        parts, steps, after = self.step(updates, state, params, extra)
        tree = parts.everywhere(steps)
        return tree if self.missing is None else _zeros_filled(params, tree), after

    def step(self, grads: PyTree, state: Any, model: PyTree, extra: Any) -> tuple[Parts[Any], list[Any], Any]:
        """Takes one step: returns the model's parts, the step of each slot, and the next state."""
        running = self.histories(state)[: len(state.runs)]
        if grads is model:
            raise TypeError("the gradients are the model itself; write grads = tp.grad(loss)(model)")
        parts = parts_of(model, state.roles.layout, grads)
        gradients = self._gradients(parts, grads)
        absent = [slot for slot, given in enumerate(gradients) if given is None]
        if len(absent) == len(gradients) and nodes_of(optax.EmptyState, grads):
            raise TypeError("expected a tree of gradients, as tp.grad(loss)(model) returns it, got a state of Optax")
        if absent:
            self._warn_of_no_gradient(parts, running, absent)
        sight, gradients = self._sight(parts, gradients, absent, extra)
        steps, after = self._steps(sight, self._update(sight, gradients, extra), running)
        seen, still = state.seen, state.still
        if not isinstance(still, tuple):
            state = state if seen & (seen - 1) else noticed(state)  # after 0, 1, 2, 4, 8 ...
            still = _counts(parts, state, steps)
        runs, counts = [each.state for each in after], [each.count for each in after]
        next_state = TrainableState(tuple(runs), state.held, (*counts, *state.counts[len(runs) :]), state.roles, still)
        object.__setattr__(next_state, "seen", seen + 1)
        return parts, steps, next_state

    def _steps(self, sight: Sight, update: Run, histories: Sequence[History]) -> tuple[list[Any], list[History]]:
        """Returns the step of each slot, and the histories after it.

        A rule may couple leaves, by a global norm or a line search. So each of several histories runs over all leaves
        that have a gradient, and only its own leaves are kept of the result; XLA computes nothing for the rest. That is
        right as long as coupled values do not depend on step counts, which `check_together` has seen to.
        """
        steps, after = [None] * len(sight.parts.slots), [*histories]
        moves = [sight.moves(history) for history in histories]
        if len(histories) > 1:
            self.check_together(sight.parts.layout)
            if isinstance(jnp.zeros(()), Tracer):  # within jit even constants are traced
                update = jax.jit(update)  # so that the rule is traced once and not for each history
        for number, history in enumerate(histories):
            if moves[number] is False:
                continue
            if len(histories) == 1 and sight.slots is None:  # all that trains, and most often all there is
                steps, state = sight.step(update, history.division, history.state, self.tx.init)
            else:
                like = self.like(sight.layout)
                before = like.made_of([history, *histories[:number], *histories[number + 1 :]])
                made, run = sight.step(update, like.division, before, self.tx.init)
                mine = history.made_of([dataclasses.replace(like, state=run), history])
                state = steady(mine, history.state)
                for slot in sight.slots_of(history):
                    steps[slot] = made[slot]
            one = 1 if moves[number] is True else moves[number].astype(jnp.int32)
            after[number] = dataclasses.replace(history, state=state, count=history.count + one)
        first = next((number for number, moved in enumerate(moves) if moved is not False), None)
        if len(histories) > 1 and first is not None:  # of the run, and the same in all; what has no gradient follows
            arrays, its = after[first].copies.arrays, History.of_run(histories)
            shared: dict[Entries, Any] = {entries: array for entries, array in arrays.items() if entries in its}
            after = [each.holding(shared) for each in after]
        return steps, after

    def _sight(self, parts: Parts[Any], gradients: list[Any], absent: list[int], extra: Any) -> tuple[Sight, list[Any]]:
        """Returns the parameters that the rule sees, and the gradients that it sees."""
        if self.form != "stacks" and "active" in extra:
            raise TypeError('active= is for the rows of stacks: write optim.trainable(tx, form="stacks")')
        active, layout = extra.pop("active", None), parts.layout
        if absent and self.form == "tree":
            slots = [slot for slot, given in enumerate(gradients) if given is not None]
            layout = trained_at(layout, [parts.index.positions[slot] for slot in slots])
            return Sight(parts, layout, Form.tree(layout), slots), gradients
        form, rows = self.form_of(layout), None
        if self.form == "stacks" and (absent or active is not None):
            rows = rows_of(layout, form, absent, {} if active is None else active)
        return Sight(parts, layout, form, None, rows), _filled(parts, gradients) if absent else gradients

    def _update(self, sight: Sight, gradients: list[Any], extra: dict[str, Any]) -> Run:
        """Returns the update of the rule, a function of its state."""
        further = {name: self._argument(sight, name, value) for name, value in extra.items()} if extra else {}
        shown, params = sight.show(gradients), sight.show(sight.parts.slots)
        by_parameter = functools.partial(spread, sight.parts.index, sight.layout, sight.form)

        def update(before: PyTree) -> tuple[PyTree, PyTree]:
            seen = told(before, by_parameter) if self._is_scaled else before
            try:
                made, after = self.tx.update(shown, seen, params, **further)
            except TypeError as error:
                if "required keyword-only argument" not in str(error):
                    raise
                raise TypeError(
                    f"the transformation needs more than gradients ({error}): write optim.step(tx, grads, state, "
                    "model, value=value, grad=grads, value_fn=lambda model: loss(model, x)), or what it needs of these"
                ) from error
            return made, told(after, None) if self._is_scaled else after

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
        gradients = index.gradients(grads, None, wide=True)
        for slot in index.complex_slots:
            # JAX's gradient of a real loss is the conjugate of the direction of ascent, which is what Optax takes.
            if gradients[slot] is not None:
                gradients[slot] = jnp.conj(gradients[slot])
        return gradients

    def _argument(self, sight: Sight, name: str, value: Any) -> Any:
        """Converts an extra argument for the rule: gradients and functions of the model become those of the form."""
        # A rule sees a whole form, so gradients that are missing only here are zero.
        show = lambda grads: sight.show(_filled(sight.parts, self._gradients(sight.parts, grads)))
        if name == "grad":
            return show(value)
        if not (callable(value) and (name in ("value_fn", "obj_fn", "grad_fn") or jtu.all_leaves([value]))):
            return value
        complex_slots = sight.parts.index.complex_slots
        if complex_slots and name != "grad_fn":
            path = sight.parts.layout.slots[complex_slots[0]].path
            raise TypeError(f"no line search descends along complex parameters: make two real parameters of {path!r}")

        @functools.wraps(value)  # Optax looks at the names of its arguments
        def of_what_is_shown(shown: PyTree, *args: Any, **kwargs: Any) -> Any:
            result = value(sight.model(shown), *args, **kwargs)
            return show(result) if name == "grad_fn" else result

        return of_what_is_shown


def _filled(parts: Parts[Any], gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradients, with zeros for those that are missing."""
    pairs = zip(parts.slots, gradients, strict=True)
    return [jnp.zeros_like(leaf) if given is None else given for leaf, given in pairs]


def _state_for(init: Callable[[PyTree], PyTree], form: Form, made: PyTree = None) -> tuple[PyTree, Division]:
    """Returns a fresh state of a form, as shapes, and the parameters of each of its arrays.

    `made` is such a state that exists already.
    """
    if made is None:
        state = jax.eval_shape(init, form.shapes())
    else:
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made)
    return state, Division.of(init, form, state)


# -- What is refused, and in which form a rule sees a model ------------------------------------------------------------


def _check_model(model: PyTree, parts: Parts[Any]) -> None:
    """Checks that the places of each trained tie agree in a model that `init` received, if these are known."""
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
                f"{paths[alias.leaf]!r} is tied to {paths[alias.source]!r}, but does not have the value that the tie "
                "gives; set it first: layout = tp.layout(model), model = tp.tie(model, layout)"
            )


def _form_for(tx: Extended, name: str, layout: Layout, *, is_apart: bool = False) -> Form:
    """Returns the vector or the stacks in which a rule sees the parameters of a layout; apart, a row is a stack."""
    if name == "vector":
        # One vector of several dtypes has the widest of them, which would hide narrow parameters from `optim.master`.
        form, by_dtype = Form.vector(layout), dict[str, list[int]]()
        for i, slot in enumerate(layout.slots):
            by_dtype.setdefault(str(slot.dtype), []).append(i)
        if len(by_dtype) < 2 or not _has(MasterState, tx, form.shapes()):
            return form
        make = lambda slots: Block.vector(slots, slots[0].dtype)
        return Form.of(by_dtype, layout.slots, layout.paths, "vectors, one for each dtype", make)
    has_any = layout.slots and _has(GroupsState, tx, {}) is not False
    groups = _groups_for(tx, layout) if has_any else None
    if groups is None and not is_apart:
        return Form.stacks(layout)
    return Form.in_groups(layout, groups or {None: range(len(layout.slots))}, is_apart=is_apart)


def _has(kind: type, tx: Extended, shown: PyTree) -> bool | None:
    """Returns whether a state of the rule has a node of this class; `None` if `init` fails, which will say why."""
    with contextlib.suppress(Exception):
        return bool(nodes_of(kind, jax.eval_shape(tx.init, shown)))
    return None


def _groups_for(tx: Extended, layout: Layout) -> dict[str, list[int]] | None:
    """Returns the slots of each group of `optim.groups`; `None` if the rule has none."""
    tree = Form.tree(layout)
    shown = compared(tree, jtu.tree_leaves(tree.shapes()))  # in which `per_leaf` looks at none
    try:
        nodes = nodes_of(GroupsState, jax.eval_shape(tx.init, shown))
    except Exception:
        if _has(GroupsState, tx, {}):
            raise
        return None  # its mask is for stacks
    if not nodes:
        return None
    check_groups(nodes, index_of(layout))
    divisions = [{group.name: group.paths for group in node.groups} for node in nodes]
    if any(each != divisions[0] for each in divisions) or any(list(groups_in(node.inner_states)) for node in nodes):
        raise ValueError('form="stacks" makes stacks for one optim.groups, but there are several; chain within groups')
    numbers = {slot.path: i for i, slot in enumerate(layout.slots)}
    return {name: [numbers[path] for path in paths] for name, paths in divisions[0].items()}


def _zeros_filled(model: PyTree, updates: PyTree) -> PyTree:
    """Returns the updates, with a zero at each number and array of numbers that has no update."""
    leaves, treedef = flatten(model)
    return jtu.tree_unflatten(treedef, map(_or_zero, leaves, treedef.flatten_up_to(updates)))


def _or_zero(leaf: Any, step: Any) -> Any:
    """Returns the step, or else -0.0: adding it changes no number, whereas 0.0 would turn -0.0 into 0.0."""
    if step is not None:
        return step
    if is_array(leaf):
        # Nothing can be added to a PRNG key, so no update is right for code that adds one to each leaf.
        is_number = leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.number)
        return jnp.full_like(leaf, complex(-0.0, -0.0) if jnp.iscomplexobj(leaf) else -0.0) if is_number else None
    # Numbers too: a plain `jax.jit` makes arrays of them.
    kind: Any = type(leaf)
    return kind(-0.0) if isinstance(leaf, (bool, int, float, complex, np.number, np.bool_)) else None
