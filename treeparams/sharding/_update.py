"""The update of a step: changes parameters by gradients, with the state of a rule and an average."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._average import Ema
from .._forms.form import Form
from .._forms.owners import divide
from .._slots.layout import Layout, index_of
from .._tree.text import describe, in_short
from .._tree.types import PyTree
from ..optim._master import MasterState, copies_in, landed
from ..optim._scaled import ByParameter, spread, told
from ..optim._state import ModelTransformation, extended, nodes_of, settled, steady
from ..optim._step import added

Average = float | Callable[[Any], Ema[Any]]
"""A decay, or a function that makes the average of parameters."""


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """One step of a rule, and of an average if there is one."""

    rule: Any  # plain Optax that takes extra arguments
    form: Form  # of the parameters, while the rule runs
    by_parameter: ByParameter
    make_average: Callable[[PyTree], Ema[Any]] | None = None

    @classmethod
    def of(cls, tx: Any, layout: Layout, form: Form, average: Average | None = None) -> "Update":
        """Makes the update from an Optax optimiser, a form of a model, and the user's option for the average."""
        if isinstance(tx, ModelTransformation):
            raise ValueError(
                "expected an Optax optimiser, got a transformation over whole models; the plan's layout already says "
                "which parameters train: pass the optimiser inside it, such as optax.adam(1e-3)"
            )
        by_parameter = functools.partial(spread, index_of(layout), layout, form)
        return cls(extended(tx), form, by_parameter, None if average is None else ema_maker(average))

    def start(self, params: PyTree) -> tuple[PyTree, Ema[Any] | None]:
        """Returns the first state of the rule, and the average."""
        state = settled(self.rule.init(params))
        return state, None if self.make_average is None else self.make_average(params)

    def check(self) -> None:
        """Checks, on shapes, that the rule can make a step."""
        params, value = self.form.shapes(), jax.ShapeDtypeStruct((), np.float32)
        try:
            jax.eval_shape(self.step, params, params, jax.eval_shape(self.start, params)[0], value)
        except Exception as error:
            raise ValueError(
                f"the update of the rule fails ({in_short(error)}). sharding.make_step passes it gradients, parameters "
                "and only one extra argument, value=; for a rule that calls the loss itself (a line search), use "
                "optim.trainable(tx, form='vector')"
            ) from error

    def step(self, params: PyTree, gradients: PyTree, state: PyTree, value: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns the next parameters and state, from gradients in JAX's convention."""
        before = told(state, self.by_parameter)
        updates, after = self.rule.update(jax.tree.map(jnp.conj, gradients), before, params, value=value)
        leaves, treedef = jtu.tree_flatten(params)
        steps = treedef.flatten_up_to(updates)
        moved = list(map(added, map(str, range(len(leaves))), leaves, steps))
        for i, copy in self._copies(after).items():
            moved[i] = moved[i] if steps[i] is None else landed(leaves[i], steps[i], copy, moved[i])
        return treedef.unflatten(moved), steady(told(after, None), state)

    def _copies(self, state: PyTree) -> dict[int, jax.Array]:
        """Returns the wide copy of each array of the parameters that `optim.master` keeps one for."""
        if not nodes_of(MasterState, state):
            return {}
        blocks = {tuple([self.form.paths[slot] for slot in slots]): i for i, slots in enumerate(self.form.members)}
        division = divide(self.rule.init, self.form, state)
        return {blocks[owners.paths]: copy for owners, copy in copies_in(state, division)}


def ema_maker(average: Average) -> Callable[[PyTree], Ema[Any]]:
    """Returns a function that makes an average of parameters."""

    def make(params: PyTree) -> Ema[Any]:
        made = average(params) if callable(average) else Ema(params, average)
        if not isinstance(made, Ema):
            raise TypeError(f"{expected}; it made {describe(made)}")
        return made

    expected = (
        "average must be a decay, such as 0.999, or a function that makes a tp.Ema of parameters, such as "
        "functools.partial(tp.Ema, decay=0.999, warmup=True)"
    )
    is_decay = isinstance(average, (int, float, np.floating)) and not isinstance(average, bool)
    if isinstance(average, type) or not (is_decay or callable(average)):
        raise TypeError(f"{expected}, got {average!r}")
    return make


def sharding_of(shapes: PyTree) -> PyTree:
    """Returns the sharding of each shape."""
    return jax.tree.map(lambda shape: shape.sharding, shapes)
