"""flat: Optax over one vector, for rules that are the same on a vector as on the leaves in it."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import jax

from .._forms.form import Form
from .._forms.makers import vector_of, vectors_of
from .._slots.layout import Layout, Trainable
from ._history import remembered
from ._master import MasterState
from ._rule import Rule
from ._state import ModelTransformation, Plain, nodes_of


def flat(tx: Plain, trainable: Trainable = None, *, trial: Mapping[str, Any] | None = None) -> ModelTransformation:
    """The same as `optim.trainable`, over one vector: one operation where there were thousands, and compiled as one.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> model = {"a": jnp.ones(2), "b": jnp.ones((2, 2)), "steps": jnp.array(3)}
    >>> tx = optim.flat(optax.sgd(0.1, momentum=0.9))
    >>> state = tx.init(model)
    >>> state.runs[0][0].trace.shape
    (6,)
    >>> updates, state = tx.update({"a": jnp.ones(2)}, state, model)
    >>> updates["a"].shape, updates["steps"]
    ((2,), None)

    **One vector has no holes**: a leaf without a gradient counts as zero here, so its moments decay and it may move.
    It has the widest dtype of its leaves; with `optim.master` in `tx` there is a vector for each dtype.

    For rules that do not look at shapes the result is that of Optax leaf by leaf. Those that do (adafactor, lamb, lars,
    muon, clipping by block, masks by shape) are refused at the first `init`, and so are those that go by names (masks
    by path, `optim.groups`). This is read from the programs of `tx` over a few leaves with up to three axes, of up to
    4096 by 4096 elements, apart and joined, in 20 to 500 ms. So it does not matter what the numbers are, or whether
    they are traced. **Kernels and callbacks show no program**: a rule that calls them is tried with numbers, for some
    updates, and what it does otherwise in later ones, or at a rate of zero, is not found.

    Args:
        tx: any Optax transformation that treats all elements alike.
        trainable: as for `optim.trainable`.
        trial: examples of extra arguments that `tx` needs. `value`, `grad` and `value_fn` are there.

    Returns:
        A transformation that takes and returns what `optim.trainable` does.

    Raises:
        ValueError: `init`: `tx` is not the same on a vector; otherwise as `optim.trainable`.
        TypeError: as `optim.trainable`.
    """
    rule = _FlatRule(tx, trainable, trial)
    return ModelTransformation(rule.init, rule.update)


class _FlatRule(Rule):
    """As `Rule`, over one vector; where `optim.master` is in it, over one for each dtype."""

    def __init__(self, tx: Plain, trainable: Trainable, trial: Mapping[str, Any] | None) -> None:
        words = "optim.flat", "use optim.trainable"
        super().__init__(tx, self._vector_of, trainable, fills=True, words=words, trial=trial)

    def _vector_of(self, layout: Layout) -> Form:
        return remembered(self, layout, "form", functools.partial(self._make_vector, layout))

    def _make_vector(self, layout: Layout) -> Form:
        # Of several dtypes one vector has the widest, in which it does not show that a parameter is narrow.
        form, by_dtype = vector_of(layout), vectors_of(layout)
        return by_dtype if by_dtype != form and self._has_master(form) else form

    def _has_master(self, form: Form) -> bool:
        """Whether `optim.master` is in the rule."""
        with contextlib.suppress(Exception):  # `init` says why
            return bool(nodes_of(MasterState, jax.eval_shape(self.tx.init, form.shapes())))
        return False
