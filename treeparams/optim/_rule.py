"""A rule of Optax over the parameters of models: the form that it sees, and how its steps come back.

The rule sees the parameters that have a gradient in one form: the canonical tree, one vector, or stacks. Its state
holds copies of that form (see `_forms.states`), divided once, when the state is made.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer

from .._forms.form import Form
from .._forms.owners import Division
from .._slots.accidents import warn_of_parted_ties
from .._slots.layout import Layout, Trainable, trained_at
from .._slots.match import slot_gradients
from .._slots.parts import Parts, kept_arrays, take_apart
from .._slots.untrained import warn_of_nothing
from .._tree.messages import warn
from .._tree.text import describe, first_few
from .._tree.types import PyTree
from ._boundary import (
    check_model,
    check_run,
    check_ties,
    counted,
    counting,
    taken_apart,
    zeros_filled,
)
from ._history import History, asked, regrouped, remembered
from ._per_leaf import check_rows
from ._scaled import ScaledState, check_names
from ._separability import Known, check_form
from ._sight import Run, Sight, Update, slots_of
from ._state import (
    ONE,
    ModelTransformation,
    Plain,
    Roles,
    TrainableState,
    extended,
    in_own_buffers,
    nodes_of,
    noticed,
    settled,
    steady,
)

FormMaker = Callable[[Layout], Form]
Steps = tuple[list[Any], tuple[Any, ...], list[Any]]
"""The step of each slot, and the next state and count of each history."""


class Rule:
    """An Optax transformation, the form in which it sees a model, and the parameters that it trains.

    With `fills` a parameter without a gradient has a gradient of zeros, since the form has no holes. `words` are the
    name of the function that makes the rule, and the advice if the rule is not right over the form. `trial` are
    arguments that the check of the rule needs. `frozen` selects the updates of everything that does not move.
    """

    def __init__(
        self,
        tx: Plain,
        form_of: FormMaker,
        trainable: Trainable,
        *,
        fills: bool = False,
        words: tuple[str, str] = ("optim.trainable", "use plain Optax"),
        trial: Mapping[str, Any] | None = None,
        frozen: Literal["zeros"] | None = None,
    ) -> None:
        if frozen not in (None, "zeros"):
            raise ValueError(f'frozen must be None or "zeros", got {frozen!r}')
        if isinstance(tx, ModelTransformation):
            raise ValueError(ONE)
        self.tx = extended(tx)
        self.form_of = form_of
        self.trainable = trainable
        self.fills = fills
        self.frozen = frozen
        self._words = words
        self._trial = dict(trial or {})
        self._right_for: Known = frozenset()
        self._warned: set[int] = set()  # of layouts, by hash

    def __repr__(self) -> str:
        # Rules of Optax have no names, but the name of their `init` contains the function that made them.
        inner = getattr(self.tx.init, "__qualname__", type(self.tx).__name__).partition(".")[0]
        options = {"trainable": self.trainable, "frozen": self.frozen}
        said = [inner, *(f"{name}={value!r}" for name, value in options.items() if value is not None)]
        return f"{self._words[0]}({', '.join(said)})"

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
            return TrainableState((), (), (), Roles(parts.layout, (), (), (), ()))
        run = self.fresh(parts)
        check_names(run, parts.index)
        divisions = (self.like(parts.layout, run).division,)
        roles = Roles(parts.layout, (positions,), (), (0,), divisions)
        state = counting(TrainableState((run,), (), (jnp.zeros((), jnp.int32),), roles))
        return in_own_buffers(state, [*parts.slots, *kept_arrays(parts.rest).values()])

    def fresh(self, parts: Parts[Any]) -> PyTree:
        """Returns a fresh state of the inner rule."""
        form = self.form_of(parts.layout)
        self._right_for = check_form(self.tx, parts.layout, form, self._words, self._trial, self._right_for)
        run = self.tx.init(form.holding(parts.slots))
        check_run(run, parts)
        check_rows(run, form)
        return settled(run)

    def like(self, layout: Layout, made: PyTree = None) -> History:
        """Returns a fresh history of some parameters, as shapes; `made` is a fresh state that exists already."""
        ask = functools.partial(asked, self.tx.init, self.form_of(layout), made)
        return History(layout, *remembered(self, layout, "state", ask), begin=functools.partial(self.begun, layout))

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
        is_one = len(at) == 1 and not roles.held
        layouts = [roles.layout] if is_one else [trained_at(roles.layout, positions) for positions in at]
        states = (*state.runs, *state.held)
        found = list(map(History, layouts, states, roles.divisions, state.counts, roles.origins))
        if found and not _are_of_one_rule(self.like(layouts[0]).division, roles.divisions[0], is_one):
            raise ValueError(
                "the state was made by another transformation than this one; pass the one whose init made it"
            )
        return found

    # -- Steps

    def update(
        self, updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, TrainableState]:
        """Takes one step: returns the updates at all places, and the next state."""
        if params is None:
            raise ValueError("expected the model as the third argument, got None; write tx.update(grads, state, model)")
        histories = self.histories(state)
        if updates is params:
            raise TypeError("the gradients are the model itself; write grads = tp.grad(loss)(model)")
        parts = taken_apart(params, state, updates)
        running = histories[: len(state.runs)]
        steps, runs, counts = self.steps(parts, self._gradients(parts, updates), running, extra)
        tree = parts.everywhere(steps)
        tree = tree if self.frozen is None else zeros_filled(params, tree)
        seen, state = state.seen, state if state.seen & (state.seen - 1) else noticed(state)  # after 0, 1, 2, 4, 8 ...
        still, counts = counted(parts, state, steps), (*counts, *state.counts[len(runs) :])
        after = TrainableState(runs, state.held, counts, state.roles, still)
        object.__setattr__(after, "seen", seen + 1)
        return tree, after

    def steps(
        self, parts: Parts[Any], gradients: list[Any], histories: Sequence[History], extra: dict[str, Any]
    ) -> Steps:
        """Returns the step of each slot, and the next state and count of each history.

        A rule may couple leaves, by a global norm or a line search. So each history runs over all leaves that have a
        gradient, and only its own leaves are kept of the result; XLA computes nothing for the rest.
        """
        for history in histories:
            if all(gradients[slot] is None for slot in slots_of(parts.index, history)):
                self._warn_of_no_gradient(history)
        sight, gradients = self.sight(parts, gradients, extra)
        update = self.update_of(sight, gradients, extra)
        steps: list[Any] = [None] * len(gradients)
        runs, counts = [history.state for history in histories], [history.count for history in histories]
        for number, made, runs[number] in self._made(histories, sight, update):
            history, moves = histories[number], sight.moves(histories[number])
            counts[number] = history.count + (1 if moves is True else moves.astype(jnp.int32))
            for slot in slots_of(parts.index, history):
                steps[slot] = made[slot]
        return steps, tuple(runs), counts

    def sight(self, parts: Parts[Any], gradients: Sequence[Any], extra: dict[str, Any]) -> tuple[Sight, list[Any]]:
        """Returns the part of a model that the rule sees, and the gradients that it sees."""
        if "active" in extra:
            raise TypeError("active= selects the rows of stacks that move: write optim.stacked(tx) instead of this one")
        if self.fills:
            gradients = _filled(parts, gradients)
        layout, slots = parts.layout, [slot for slot, given in enumerate(gradients) if given is not None]
        if len(slots) < len(gradients):
            layout = trained_at(layout, [parts.index.positions[slot] for slot in slots])
        return Sight(parts, layout, self.form_of(layout), slots), list(gradients)

    def update_of(self, sight: Sight, gradients: list[Any], extra: dict[str, Any]) -> Update:
        """Returns the update of the rule."""
        further = {name: self._argument(sight, name, value) for name, value in extra.items()} if extra else {}
        shown, params = sight.show(gradients), sight.show(sight.parts.slots)
        is_scaled = remembered(self, sight.layout, "scaled", functools.partial(self._is_scaled, sight.layout))
        return Update(self.tx, shown, params, further, sight.by_parameter if is_scaled else None)

    def _is_scaled(self, layout: Layout) -> bool:
        """Returns whether the rule contains `optim.scaled`."""
        return bool(nodes_of(ScaledState, self.like(layout).state))

    def _made(self, histories: Sequence[History], sight: Sight, update: Update) -> Iterator[tuple[int, list[Any], Any]]:
        """Yields, for each history that moves, its number, its steps of all slots, and its next state."""
        moving = [number for number, history in enumerate(histories) if sight.moves(history) is not False]
        if len(histories) == 1 and sight.layout is histories[0].layout:
            history = histories[0]
            if moving:
                yield 0, *sight.step(update, history.division, history.state, self.tx.init)
            return
        like = self.like(sight.layout)
        befores = [
            regrouped([histories[number], *histories[:number], *histories[number + 1 :]], like) for number in moving
        ]
        owner = {path: at for at, number in enumerate(moving) for path in histories[number].layout.paths}
        found = sight.steps_apart(update, like.division, befores, owner) if len(moving) > 1 else None
        run: Run = update
        if found is None and isinstance(jnp.zeros(()), Tracer):  # within jit even constants are traced
            run = jax.jit(update)  # so that the rule is traced once and not for each history
        for at, number in enumerate(moving):
            steps, after = found[at] if found else sight.step(run, like.division, befores[at], self.tx.init)
            history = histories[number]
            mine = regrouped([dataclasses.replace(like, state=after), history], history)
            yield number, steps, steady(mine, history.state)

    def _warn_of_no_gradient(self, history: History) -> None:
        """Warns, once, if a history has not taken a step yet."""
        first_time = not isinstance(history.count, Tracer) and not int(history.count)
        if first_time and hash(history.layout) not in self._warned:
            self._warned.add(hash(history.layout))
            message = "take gradients by the layout in the state, tp.grad(loss, state.layout)"
            warn(f"no gradient so far for {first_few(history.layout.paths)}, which the state trains: {message}")

    # -- Arguments

    def _gradients(self, parts: Parts[Any], grads: PyTree) -> list[Any]:
        """Returns one gradient per slot as Optax's rules expect them; `None` if there is none."""
        if grads is None or isinstance(grads, (bool, int)):
            raise TypeError(f"expected a tree of gradients, as tp.grad(loss)(model) returns it, got {describe(grads)}")
        gradients = slot_gradients(parts.index, grads, None, wide=True)
        for slot in parts.index.complex_slots:
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
    return like == division or (not is_one and of_each(like) == of_each(division))
