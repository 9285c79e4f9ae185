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

    **Use it once, as the outermost transformation.** Everything inside it is plain Optax over the canonical tree
    (model-shaped, `None` at aliases and at everything that is not trained), so chains, masks, `optax.MultiSteps`, line
    searches and `optim.groups` work as their documentation says. A transformation around it must accept any tree as a
    whole: no mask, no `optax.partition`, no second transformation over models. Put transformations that compare
    gradients with updates (`optax.apply_if_finite`), make zeros of the model (`optax.MultiSteps`) or ask it for a dtype
    (`optax.inject_hyperparams` without `hyperparam_dtype`) *inside*. There they see each parameter once and nothing
    else; outside they would see the whole model and may fail.

    **The state records which parameters train**: `init` fixes them, `optim.set_trainable` changes them. It also records
    the ties for `update`, since inside `jax.jit` arrays no longer show them. Take gradients by `state.layout`. `init`
    sees ties outside of a trace, in `tp.jit(tx.init)`, or if you pass a `Layout`.

    **`None` is not zero.** A leaf without a gradient takes no step in this call and its moments stay as they are;
    optimisers that couple leaves (a global norm, a line search) run over the leaves that have one. All leaves of one
    history share a step count, which goes on if any of them has a gradient. `optax.MultiSteps` needs all gradients in
    each call: `tp.project(model, grads, missing="zeros")`.

    **`update` conjugates complex gradients for `tx`**, and nothing else in this library does: JAX's gradient of a real
    loss is the conjugate of the direction of ascent.

    Args:
        tx: any Optax transformation or chain. If gradients are partial or you freeze leaves later, it must keep its
            state leaf by leaf.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        frozen: the updates of everything that does not move: `None`, or with `"zeros"` zeros of the leaf's dtype, for
            code that adds an update to every leaf, such as `optax.apply_updates` and Flax's `TrainState`. Integers and
            numbers get zeros too, but not functions, texts and typed keys, to which nothing can be added. A floating
            zero is -0.0, which changes no number. In a compiled step zeros cost nothing.

    Returns:
        A transformation. `init(model)` returns a `TrainableState`, which shares no buffer with the model.
        `update(grads, state, model, **extra)` accepts a gradient in any form that `tp.project` accepts; one that is
        wider than its leaf keeps single precision. A tied parameter has its update at all places, through the transform
        of an alias that has one, and everything that does not move has `None` (see `frozen`). So
        `eqx.apply_updates(model, updates)` is right; `optim.step` does both, and recomputes an alias that has a
        transform, since sums would let it drift by rounding. Among the extra arguments `grad` may be in any form too,
        functions are called with models (`grad_fn` may return a gradient in any form), and others are passed on.

    Warns:
        UserWarning: `init`: nothing is trained. `update`, outside of a trace: no leaf of a history has had a gradient
            since it was made; three nonzero steps or more have left a bfloat16 or float16 leaf as it was, see
            `TrainableState.stuck`. It looks after 0, 1, 2, 4, 8 ... such calls, so as not to wait for a device in each.

    Raises:
        TypeError: `tx` is not a transformation; `init`: as `tp.layout`; `update`: the gradients are the model itself,
            or integers; as `tp.project`, and for a line search over complex parameters.
        ValueError: `frozen` is another word; `tx` contains a transformation over models; `init`: an alias has another
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
    """Wraps an Optax optimiser like `optim.trainable`, and runs it over one vector: one operation instead of thousands.

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
    The vector has the widest dtype of its leaves; with `optim.master` in `tx` there is a vector for each dtype.

    For optimisers that do not look at shapes the result is that of Optax leaf by leaf. Those that do (adafactor, lamb,
    lars, muon, clipping by block, masks by shape) raise a `ValueError` at the first `init`, and so do those that use
    names (masks by path, `optim.groups`). `init` reads the programs of `tx` over a few leaves with up to three axes, of
    up to 4096 by 4096 elements, apart and joined, in 20 to 500 ms. So the numbers do not matter, nor whether they are
    traced. **Kernels and callbacks show no program**: an optimiser that calls one, for more than something beside its
    updates, is refused by its name.

    Args:
        tx: any Optax transformation that treats all elements alike.
        trainable: as for `optim.trainable`.
        trial: examples of extra arguments that `tx` needs. `value`, `grad` and `value_fn` are there.
        frozen: as for `optim.trainable`.

    Returns:
        A transformation that accepts and returns the same as `optim.trainable`.

    Raises:
        ValueError: `init`: `tx` is not the same on a vector; otherwise as `optim.trainable`.
        TypeError: as `optim.trainable`.
    """
    rule = _FlatRule(tx, trainable, trial, frozen)
    return ModelTransformation(rule.init, rule.update)


class _FlatRule(Rule):
    """A `Rule` over one vector; if it contains `optim.master`, over one for each dtype."""

    def __init__(self, tx: Plain, trainable: Trainable, trial: Mapping[str, Any] | None, frozen: Any) -> None:
        words = "optim.flat", "use optim.trainable"
        super().__init__(tx, self._vector_of, trainable, fills=True, words=words, trial=trial, frozen=frozen)

    def _vector_of(self, layout: Layout) -> Form:
        return remembered(self, layout, "form", functools.partial(self._make_vector, layout))

    def _make_vector(self, layout: Layout) -> Form:
        # One vector of several dtypes has the widest of them, which would hide narrow parameters from `optim.master`.
        form, by_dtype = vector_of(layout), vectors_of(layout)
        return by_dtype if by_dtype != form and self._has_master(form) else form

    def _has_master(self, form: Form) -> bool:
        """Returns whether the rule contains `optim.master`."""
        with contextlib.suppress(Exception):  # `init` says why
            return bool(nodes_of(MasterState, jax.eval_shape(self.tx.init, form.shapes())))
        return False
