"""trainable: the boundary between models and Optax."""

from .._forms.makers import tree_of
from .._slots.layout import Trainable
from ._rule import Rule
from ._state import ModelTransformation, Plain


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
    their own documentation says. Around it may stand what treats trees as trees and takes all of them: no mask, no
    `optax.partition`, no second transformation over models. What compares gradients with updates
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
            since it was made; the first three steps change nothing of a bfloat16 or float16 leaf, see `optim.master`.

    Raises:
        TypeError: `tx` is no transformation; `init`: as `tp.layout`; `update`: as `tp.project`, and for a line search
            over complex parameters.
        ValueError: `tx` has a transformation over models in it; `init`: an alias has another value than its source
            gives, as `tp.layout`; `update`: there is no model, it does not fit the state, the gradients are updates of
            another transformation over models, or as `tp.project`.
    """
    rule = Rule(tx, tree_of, trainable)
    return ModelTransformation(rule.init, rule.update)
