"""flat: Optax over one vector, for rules that are the same on a vector as on the leaves in it: found by trying."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from .._form import Form
from .._layout import Trainable
from .._makers import vector_of
from ._rule import Rule
from ._state import ModelTransformation, Plain, nodes_of
from ._trial import Way, check_same


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

    For rules that do not look at shapes the result is that of Optax leaf by leaf. Those that do (adafactor, lamb, lars,
    muon, clipping by block) are refused at the first `init`, as are masks of leaves and `optim.groups`. They are found
    by trying, in 0.1 to 0.3 s: some updates of three leaves, of 128 by 128 and of 6 and 3 elements, apart and joined. A
    rule that treats only larger leaves in another way is not found, nor one that closes over traced numbers (a rate
    under `jax.vmap`), of which no values are known.

    Args:
        tx: any Optax transformation that treats all elements alike.
        trainable: as for `optim.trainable`.
        trial: extra arguments that `tx` needs, for the trial. `value`, `grad` and `value_fn` are there.

    Returns:
        A transformation that takes and returns what `optim.trainable` does.

    Raises:
        ValueError: `init`: `tx` is not the same on a vector; otherwise as `optim.trainable`.
        TypeError: as `optim.trainable`.
    """
    rule = _FlatRule(tx, vector_of, trainable, fills=True)
    rule.trial = dict(trial or {})
    return ModelTransformation(rule.init, rule.update)


class _FlatRule(Rule):
    """As `Rule`, over one vector."""

    trial: dict[str, Any]
    _is_checked = False

    def check(self, form: Form) -> None:
        """Checks, once, that the rule is the same over a vector."""
        if not self._is_checked:
            check_over_vector(self.tx, self.trial, ("optim.flat", "use optim.trainable"))
            self._is_checked = True


def check_over_vector(tx: Any, trial: Mapping[str, Any], words: tuple[str, str]) -> None:
    """Checks that a rule is the same over a vector as over its leaves. `words`: who asks, and what to write instead."""
    name, instead = words
    has_masks = lambda state: bool(nodes_of(optax.MaskedState, state))
    leaves = "three small leaves, apart and joined to one vector"
    check_same(tx, _SHAPES, (_JOINED, _APART), has_masks, trial, (name, leaves, instead))


# What rules look at: rank, the sizes of axes (128 is where adafactor begins to factorise), the norm of a leaf.
_SHAPES = ((128, 128), (3,), (2, 3))
_ENDS = np.cumsum([math.prod(shape) for shape in _SHAPES])[:-1]
_JOINED = Way(
    lambda leaves: jnp.concatenate([jnp.ravel(leaf) for leaf in leaves]),
    lambda vector: [x.reshape(s) for x, s in zip(jnp.split(vector, _ENDS), _SHAPES, strict=True)],
)
_APART = Way(lambda leaves: leaves, lambda leaves: leaves)
