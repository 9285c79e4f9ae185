"""The vector form of a training: equal to Optax leaf by leaf, for every rule that does not look at shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from ..zoo import assert_close

pytestmark = pytest.mark.usefixtures("standard_promotion")


def _loss(model):
    return jnp.sum(jnp.sin(model["a"] - 1)) + 3 * jnp.sum(jnp.cos(model["b"] + 2)) + jnp.sin(5 * model["c"][0])


def _model():
    a, b = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), np.linspace(-1, 0.5, 4, dtype=np.float32)
    return {"a": a, "b": b, "c": [np.array(0.3, np.float32)], "n": 3}


BLIND = {  # rules of each kind that treats all elements alike
    "element-wise": optax.adamw(optax.linear_schedule(0.1, 0.01, 3)),
    "global norm": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1, momentum=0.9)),
    "further arguments": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3)),
    "memory of steps": optax.scale_by_lbfgs(memory_size=2),
    "a second iterate": optax.contrib.schedule_free_sgd(0.1),
    "wrapped": optax.MultiSteps(optax.inject_hyperparams(optax.lion)(0.1), 2),
}


@pytest.mark.parametrize("rule", BLIND.values(), ids=BLIND)
def test_equals_optax_leaf_by_leaf(rule):
    params, rest = tp.partition(_model())
    flat, tree = optim.trainable(rule, form="vector"), optim.trainable(rule)

    def step(carry, _):
        params, first, second = carry
        model = tp.combine(params, rest)
        value, grads = tp.value_and_grad(_loss)(model)
        extra = {"value": value, "grad": grads, "value_fn": _loss}
        got, first = flat.update(grads, first, model, **extra)
        want, second = tree.update(grads, second, model, **extra)
        return (optax.apply_updates(params, want), first, second), (got, want)  # nothing is tied or frozen

    run = lambda: jax.lax.scan(step, (params, flat.init(_model()), tree.init(_model())), length=4)[1]
    got, want = jax.jit(run)()
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * float(np.max(np.abs(b))))


def test_refuses_what_looks_at_leaves_or_their_names():
    for rule, match in (
        (optim.groups({"a": optax.sgd(0.1)}, default=optax.adam(0.1)), "or at their names"),
        (optax.MultiSteps(optax.scale_by_trust_ratio(), 300), "looks at the shapes"),
    ):
        with pytest.raises(ValueError, match=match):
            optim.trainable(rule, form="vector").init(_model())


def test_a_rule_that_needs_further_arguments_is_tried_with_examples_and_once():
    calls = []

    def update(updates, state, params=None, *, temperature, **_):
        return jax.tree.map(lambda u: u * temperature, updates), state

    rule = optax.GradientTransformationExtraArgs(lambda params: calls.append(1) or (), update)
    model = {"a": np.ones(2, np.float32)}
    with pytest.raises(ValueError, match=r"it fails there.*temperature.*give examples of them, trial="):
        optim.trainable(rule, form="vector").init(model)
    tx = optim.trainable(rule, trial={"temperature": 2.0}, form="vector")
    state = tx.init(model)
    tried = len(calls)
    np.testing.assert_array_equal(tx.update(tp.copy(model), state, model, temperature=3.0)[0]["a"], 3.0)
    tx.init(model)
    assert len(calls) == tried + 1


def test_none_counts_as_zero():
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = optim.trainable(optax.sgd(1.0, momentum=0.5), form="vector")
    _, state = tx.update(tp.copy(model), tx.init(model), model)
    updates, state = tx.update({"a": jnp.zeros(2), "b": None}, state, model)
    np.testing.assert_array_equal(state.runs[0][0].trace, 0.5)
    np.testing.assert_array_equal(updates["b"], updates["a"])


def test_the_state_is_one_vector_of_the_layout_and_outlives_a_freeze():
    model = {"a": jnp.ones((2, 3)), "b": jnp.ones(4, jnp.bfloat16), "c": jnp.ones(1)}
    layout, rule = tp.layout(model), optax.sgd(0.1, momentum=0.9)
    tx, plain = optim.trainable(rule, layout, form="vector"), optim.trainable(rule)
    state, other = jax.jit(tx.init)(model), plain.init(model)  # the trial is done within a trace, too
    assert (state.runs[0][0].trace.shape, state.runs[0][0].trace.dtype) == ((layout.size,), layout.dtype)
    _, state = tx.update(tp.copy(model), state, model)
    _, other = plain.update(tp.copy(model), other, model)
    state = optim.set_trainable(tx, optim.set_trainable(tx, state, model, "b"), model)
    got, want = tx.update(tp.copy(model), state, model)[0], plain.update(tp.copy(model), other, model)[0]
    assert_close(got, want, 1e-2)
    assert_close((got["a"], got["c"]), (want["a"], want["c"]), 1e-6)


@pytest.mark.parametrize("transform", [jax.vmap, jax.jit, jax.grad, lambda f: jax.jit(jax.vmap(f))])
def test_under_a_traced_rate(transform):
    # Of a traced rate the trial knows no value, so there is none.
    model = {"a": jnp.ones(2), "b": jnp.ones(1)}

    def after(rate):
        tx = optim.trainable(optax.sgd(rate, momentum=0.9), form="vector")
        return jnp.sum(optim.step(tx, tp.copy(model), tx.init(model), model)[0]["a"])

    rates = np.float32(0.5) if transform in (jax.grad, jax.jit) else np.float32([0.5, 0.25])
    np.testing.assert_allclose(transform(after)(rates), -2.0 if transform is jax.grad else 2 - 2 * rates)
