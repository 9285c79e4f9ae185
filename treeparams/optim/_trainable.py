"""trainable, flat: the boundary between models and Optax, over the tree and over one vector."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax

from .._forms.form import Form
from .._forms.makers import tree_of, vector_of, vectors_of
from .._slots.layout import Layout, Trainable
from ._history import remembered
from ._master import MasterState
from ._rule import Rule
from ._state import ModelTransformation, Plain, nodes_of


def trainable(tx: Plain, trainable: Trainable = None, *, frozen: Literal["zeros"] | None = None) -> ModelTransformation:
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
        frozen: what the updates are where nothing moves: `None`, or with `"zeros"` zeros of the leaf's dtype, for code
            that adds an update to every leaf, such as `optax.apply_updates` and Flax's `TrainState`. They stand at
            integers and numbers too, but not at functions, texts and typed keys, which nothing can be added to. A zero
            that is floating is -0.0, which changes no number. In a compiled step zeros cost nothing.

    Returns:
        A transformation. `init(model)` returns a `TrainableState`, which shares no buffer with the model.
        `update(grads, state, model, **extra)` takes a gradient in any form that `tp.project` takes; one that is wider
        than its leaf keeps single precision. The updates stand at all places of a tie, through the transform of an
        alias that has one, and are `None` where nothing moves (see `frozen`), so that `eqx.apply_updates(model,
        updates)` is right; `optim.step` does both, and computes such an alias anew, where sums would drift by its
        rounding. Of the extra arguments `grad` may be in any form too, functions are called with models (what `grad_fn`
        returns may be in any form), and others are passed on.

    Warns:
        UserWarning: `init`: nothing is trained. `update`, outside of a trace: no leaf of a history has had a gradient
            since it was made; the first three steps change nothing of a bfloat16 or float16 leaf, see `optim.master`.

    Raises:
        TypeError: `tx` is no transformation; `init`: as `tp.layout`; `update`: the gradients are the model itself, or
            integers; as `tp.project`, and for a line search over complex parameters.
        ValueError: `frozen` is another word; `tx` has a transformation over models in it; `init`: an alias has another
            value than its source gives, as `tp.layout`; `update`: there is no model, it does not fit the state, the
            gradients are updates of another transformation over models, or as `tp.project`.
    """
    rule = Rule(tx, tree_of, trainable, frozen=frozen)
    return ModelTransformation(rule.init, rule.update)


def flat(
    tx: Plain,
    trainable: Trainable = None,
    *,
    trial: Mapping[str, Any] | None = None,
    frozen: Literal["zeros"] | None = None,
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
        frozen: as for `optim.trainable`.

    Returns:
        A transformation that takes and returns what `optim.trainable` does.

    Raises:
        ValueError: `init`: `tx` is not the same on a vector; otherwise as `optim.trainable`.
        TypeError: as `optim.trainable`.
    """
    rule = _FlatRule(tx, trainable, trial, frozen)
    return ModelTransformation(rule.init, rule.update)


class _FlatRule(Rule):
    """As `Rule`, over one vector; where `optim.master` is in it, over one for each dtype."""

    def __init__(self, tx: Plain, trainable: Trainable, trial: Mapping[str, Any] | None, frozen: Any) -> None:
        words = "optim.flat", "use optim.trainable"
        super().__init__(tx, self._vector_of, trainable, fills=True, words=words, trial=trial, frozen=frozen)

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
