"""flat: Optax over one vector, for rules that are the same on a vector as on the leaves in it: found by trying."""

from collections.abc import Mapping
from typing import Any

from .._layout import Trainable
from ._separability import ANY, check_form, over_vector
from ._shown import Vector
from ._state import ModelTransformation, Plain
from ._trainable import Rule


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
    rule = Rule(tx, Vector, trainable)
    plain: Any = rule.tx
    tried: list[bool] = []

    def init(vector: Any) -> Any:
        if not tried:
            check_form(plain, ANY, over_vector, ("optim.flat", "use optim.trainable"), trial or {})
            tried.append(True)
        return plain.init(vector)

    rule.tx = plain._replace(init=init)
    return ModelTransformation(rule.init, rule.update)
