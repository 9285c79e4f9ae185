"""trainable, flat: Optax over models."""

from collections.abc import Mapping
from typing import Any

from .._layout import Trainable
from ._forms import Flat, Tree
from ._state import ModelTransformation, Transformation
from ._trial import blind
from ._whole import Whole


def trainable(tx: Transformation, trainable: Trainable = None) -> ModelTransformation:
    """An Optax transformation over whole models: it trains what is trained, ties once, and touches nothing else.

    >>> import equinox as eqx, jax, jax.numpy as jnp, optax, treeparams as tp
    >>> from treeparams import optim
    >>> mlp = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))  # with functions and integers in it
    >>> tx = optim.trainable(optax.sgd(1e-2, momentum=0.9), "layers.1")
    >>> state = tx.init(mlp)
    >>> grads = eqx.filter_grad(lambda mlp: mlp(jnp.ones(2)) ** 2)(mlp)  # or tp.grad's, or a partial one
    >>> updates, state = tx.update(grads, state, mlp)
    >>> trained = optim.apply_updates(mlp, updates)
    >>> trained.layers[0].weight is mlp.layers[0].weight, state.layout.paths
    (True, ('layers.1.weight', 'layers.1.bias'))

    **What trains is what the state says**: `init` fixes it, `optim.set_trainable` changes it, and `update` knows the
    ties from it, also inside `jax.jit`, where arrays no longer tell.

    **`None` is not zero.** A leaf without a gradient in this call takes no step and its moments stay as they are; rules
    that couple leaves (a global norm, L-BFGS, a line search) run over the leaves that have one. Step counts are kept
    once for all leaves with one history, so they go on if any leaf of it has a gradient. Where gradients of some leaves
    come only now and then, gather them by `optim.accumulate`; `optax.MultiSteps` steps with what its last call has.

    **Complex parameters descend.** JAX's gradient of a real loss is the conjugate of the direction of ascent. It is
    conjugated here for `tx`, and nowhere else in this library: one transformation over models in a chain, not two.

    **Make the state outside of `jax.jit`**, or by `tp.jit(tx.init)`, or give a `Layout` as `trainable`: within a plain
    `jax.jit` and `jax.eval_shape` `init` does not see what is tied.

    Args:
        tx: any Optax transformation or chain. It sees the canonical tree: model-shaped, `None` at all that is not
            trained. What it keeps must be kept leaf by leaf if gradients are partial or leaves frozen later.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        A transformation. `init(model)` takes the model itself and returns a `TrainableState`, which shares no buffer
        with it. `update(grads, state, model, **extra)` takes a gradient in any form
        that `tp.project` takes and returns the canonical tree of updates, `None` where nothing moves and at aliases:
        pass it to `optim.apply_updates`. Of the extra arguments, `grad` may be in any form too and `value_fn` is the
        loss of the model; others are passed on.

    Warns:
        UserWarning: `init`: nothing is trained, so `update` will change nothing.

    Raises:
        TypeError: `tx` is no transformation; `init`: as `tp.layout`; `update`: as `tp.project`, and for a line search
            over complex parameters.
        ValueError: `init`: as `tp.layout`; `update`: there is no model, it does not fit the state, or as `tp.project`.
    """
    return Whole(tx, Tree(), trainable).transformation()


def flat(
    tx: Transformation, trainable: Trainable = None, *, trial: Mapping[str, Any] | None = None
) -> ModelTransformation:
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
    muon, clipping by block) are refused at `init`, and so are masks of leaves. They are found by trying, once per
    transformation: a few updates of two leaves, of 128 by 128 and of 3 elements, apart and joined. A rule that treats
    only larger leaves in another way is not found.

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
    return Whole(blind(tx, trial or {}), Flat(), trainable).transformation()
