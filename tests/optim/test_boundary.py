"""The boundary of `optim`: one transformation over models, what its state is, what it costs, what it refuses."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

import treeparams as tp
from treeparams import optim

from .. import zoo
from ..zoo import STACKS, VECTOR, ZOO, assert_same
from .test_optim import LINE_SEARCH, MOMENTUM, forms, two

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Optax's rules promote


def test_one_transformation_over_models():
    one, model = optim.trainable(optax.sgd(0.1)), {"w": jnp.ones(2), "v": jnp.ones(1)}
    for form in (optim.trainable, VECTOR, STACKS):
        with pytest.raises(ValueError, match=r"write one optim\.trainable"):
            form(one)
    for within in (
        optax.chain(optim.clip_by_global_norm(1.0), one),
        optim.groups({"w": one}, default=optax.sgd(1.0)),
        optax.inject_hyperparams(lambda rate: optim.trainable(optax.sgd(rate), form="vector"))(0.1),
    ):
        with pytest.raises(ValueError, match=r"write one optim\.trainable"):
            optim.trainable(within).init(model)


@forms
def test_dtypes_never_drift(form):
    with zoo.enable_x64(True):
        model = {"half": jnp.ones(3, "float16"), "low": jnp.ones(3, "bfloat16"), "single": jnp.ones(2, jnp.float32)}
        tx = form(optax.chain(optax.clip(10.0), optax.adamw(optax.constant_schedule(1e-3))))
        state = tx.init(model)
        grads = jax.tree.map(lambda x: np.ones(x.shape), model)  # wider than any leaf
        shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
        after = jax.eval_shape(lambda model, state: optim.step(tx, grads, state, model), model, state)
        assert shapes(after) == shapes((model, state))


TRANSFORMATIONS = {
    "flat": lambda: optim.trainable(optax.contrib.schedule_free_sgd(0.1), form="vector"),
    "line search": lambda: optim.trainable(optim.groups({"a": LINE_SEARCH}, default=optax.sgd(0.1))),
    "stacked groups": lambda: optim.trainable(
        optim.groups({"b": LINE_SEARCH}, default=optim.per_leaf(optax.lamb(0.1))), form="stacks"
    ),
}


@pytest.mark.parametrize("make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys())
def test_one_trace_donation_and_checkpoints_by_pickle_and_by_orbax(make, tmp_path):
    traces = []
    loss = lambda model: jnp.sum((model["a"] - 3) ** 2) + jnp.sum(model["b"] ** 2)
    tx, model = make(), two()
    state = tx.init(model)
    leaves = [leaf for leaf in jax.tree.leaves((model, state)) if isinstance(leaf, jax.Array) and leaf.size]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)  # no buffer twice

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(model, state):
        traces.append(1)
        value, grads = tp.value_and_grad(loss)(model)
        return optim.step(tx, grads, state, model, value=value, grad=grads, value_fn=loss)

    for _ in range(10):
        model, state = step(model, state)
    assert loss(model) < loss(two())
    restored = [pickle.loads(pickle.dumps(state))]
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored.append(checkpointer.restore(tmp_path / "state", tx.init(two())))
    for each in restored:
        assert_same(each, state, identity=False)
    steps = [step(tp.copy(model), tp.copy(each))[0] for each in (state, *restored)]
    for each in steps[1:]:
        assert_same(each, steps[0], identity=False)
    assert len(traces) == 1


def test_errors_of_update(without_type_checks):
    model, tx = {"w": jnp.ones(2), "b": jnp.ones(1)}, optim.trainable(optax.sgd(0.1))
    state, plain = tx.init(model), optax.sgd(0.1)
    for arguments, error, match in (
        (({"ww": jnp.ones(2)}, state, model), ValueError, r"entry at 'ww', where the model has no leaf.*'w'"),
        (({"w": jnp.ones(3)}, state, model), ValueError, r"at 'w', got float32\["),
        ((model, state, {"w": jnp.ones(3), "b": jnp.ones(1)}), ValueError, "made from another tree .* than this model"),
        *(((bad, state, model), TypeError, r"expected a tree of gradients, as tp\.grad") for bad in (None, True, 3)),
    ):
        with pytest.raises(error, match=match):
            tx.update(*arguments)
    with pytest.raises(TypeError, match=r"tx is plain Optax, .*: write tx = optim.trainable\(tx\)"):
        optim.step(plain, {"w": model["w"], "b": None}, plain.init(model), model)  # Optax itself fails at the `None`
    with pytest.raises(TypeError, match="expected a real update at 'w'"):
        optim.apply_updates(model, {"w": jnp.ones(2, jnp.complex64)})
    with pytest.raises(ValueError, match="entry at 'x', where the model has no leaf"):
        optim.apply_updates(model, {"x": jnp.ones(2)})
    search, by = optim.trainable(optax.lbfgs()), {"w": jnp.zeros(2, jnp.complex64)}
    with pytest.raises(TypeError, match="make two real parameters of 'w'"):
        search.update(tp.copy(by), search.init(by), by, value=0.0, grad=by, value_fn=lambda model: 0.0)


def test_a_rule_that_changes_its_state_is_refused():
    model = two()
    for change, match in ((lambda s: (s,), "structure of its state"), (lambda s: s[:1], "shape of its state at")):
        rule = optax.GradientTransformation(lambda p: jnp.zeros(2), lambda u, s, p=None, c=change: (u, c(s)))
        tx = optim.trainable(rule)
        with pytest.raises(ValueError, match=match):
            tx.update(tp.copy(model), tx.init(model), model)


@forms
@pytest.mark.parametrize("name", ["nothing trained", "all frozen"])
def test_nothing_trained_warns_and_changes_nothing(form, name):
    model = ZOO[name].make()
    tx = form(MOMENTUM, ZOO[name].layout(model))
    with pytest.warns(UserWarning, match="nothing is trained"):
        state = tx.init(model)
    same, after = optim.step(tx, jax.tree.map(lambda _: None, model), state, model)
    assert_same((same, after), (model, state))
