"""groups, report and adjust: a transformation for each part of a model, and the rates of each."""

import pickle
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .test_optim import fit, mlp
from .zoo import assert_close, assert_same

pytestmark = pytest.mark.usefixtures("standard_promotion")
sgd = optax.inject_hyperparams(optax.sgd)


def _model():
    return {"a": jnp.ones(2), "b": {"w": jnp.ones((2, 2)), "v": jnp.ones(1)}, "n": jnp.array(3)}


def _ones(model):
    return jax.tree.map(jnp.ones_like, tp.partition(model)[0])


# -- groups ----------------------------------------------------------------------------------------------------------


def test_the_first_match_wins():
    tx = optim.groups({"b.w": optax.sgd(1.0), "b": optax.sgd(2.0), "**": optax.sgd(3.0)})
    model = _model()
    updates, _ = tx.update(_ones(model), tx.init(model), model)
    rates = jax.tree.map(lambda x: float(-x.ravel()[0]), updates)
    assert rates == {"a": 3.0, "b": {"w": 1.0, "v": 2.0}, "n": None}


def test_any_where_is_a_key():
    model = eqx.nn.MLP(2, 1, 3, 2, key=jax.random.key(0))
    keys = (re.compile(r".*\.0\..*"), lambda model: model.layers[1].weight, ("**.bias", "layers.2.weight"))
    tx = optim.groups({key: optax.sgd(float(i)) for i, key in enumerate(keys, 1)})
    updates, state = tx.update(_ones(model), tx.init(model), model)
    rates = {path: float(-leaf.ravel()[0]) for path, leaf in tp.trainables(updates).items()}
    assert rates == {
        "layers.0.weight": 1, "layers.0.bias": 1, "layers.1.weight": 2, "layers.1.bias": 3, "layers.2.weight": 3,
        "layers.2.bias": 3,
    }  # fmt: skip
    assert_same(pickle.loads(pickle.dumps(state)), state)  # the keys do not pickle, their names do
    by_class = optim.groups({eqx.nn.Linear: optax.sgd(1.0)})
    assert_close(
        by_class.update(_ones(model), by_class.init(model), model)[0], jax.tree.map(lambda x: -x, _ones(model))
    )


def test_equals_optax_partition():
    model = mlp()
    rules = {"w": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}
    labels = lambda params: jax.tree.map(lambda x: "w" if x.ndim > 1 else "b", params)
    ours = optim.groups({"**.weight": rules["w"], "**": rules["b"]})
    plain = optim.trainable(optax.multi_transform(rules, labels))
    states = [ours.init(model), plain.init(model)]
    for _ in range(3):
        grads = tp.grad(fit)(model)
        got, states[0] = ours.update(grads, states[0], model)
        want, states[1] = plain.update(grads, states[1], model)
        assert_same(got, want)
        model = optim.apply_updates(model, got)


def test_alone_and_within_trainable_and_a_chain():
    groups = optim.groups({"a": optax.adam(0.1), "**": optax.adam(0.2)})
    model = _model()
    results = []
    for tx in (groups, optim.trainable(groups), optim.trainable(optax.chain(optax.identity(), groups))):
        state = tx.init(model)
        for _ in range(2):
            updates, state = tx.update(_ones(model), state, model)
        results.append(updates)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_a_norm_within_a_group_is_that_of_the_group():
    clip = optax.chain(optim.clip_by_global_norm(1.0), optax.scale(-1.0))
    tx = optim.groups({"a": clip, "**": clip})
    model = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([6.0, 8.0])}
    updates, _ = tx.update(model, tx.init(model), model)
    np.testing.assert_allclose(updates["a"], [-0.6, -0.8], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [-0.6, -0.8], rtol=1e-6)


def test_none_is_not_zero_in_groups():
    tx, model = optim.groups({"a": optax.adam(0.1), "**": optax.adam(0.1)}), _model()
    _, state = tx.update(_ones(model), tx.init(model), model)
    updates, after = tx.update({"b": {"w": jnp.ones((2, 2))}}, state, model)
    assert updates["a"] is None
    assert updates["b"]["v"] is None
    first, second = after.runs[0].states
    assert_same(first, state.runs[0].states[0])  # the count of a group without gradients stands still
    assert_same(second[0].mu["b"]["v"], state.runs[0].states[1][0].mu["b"]["v"])


def test_a_tie_named_by_an_alias_and_a_frozen_group():
    shared = jnp.ones(2)
    model = {"embed": shared, "head": shared, "body": jnp.ones(1)}
    tx = optim.groups({"head": optax.sgd(1.0), "body": optax.sgd(2.0)}, trainable=("embed", "head"))
    updates, state = tx.update({"embed": shared, "head": shared}, tx.init(model), model)
    np.testing.assert_array_equal(updates["embed"], -2.0)
    state = optim.set_trainable(tx, state, model)
    updates, _ = tx.update({"body": jnp.ones(1)}, state, model)
    np.testing.assert_array_equal(updates["body"], -2.0)


def test_a_field_that_a_layout_thawed_within_groups():
    class Model(eqx.Module):
        weight: jax.Array
        mean: jax.Array = tp.field(trainable=False)

    model = Model(jnp.ones(1), jnp.ones(1))
    tx = optim.groups({"mean": optax.sgd(2.0), "**": optax.sgd(1.0)}, tp.layout(model, thaw="mean"))
    updates, _ = tx.update({"mean": jnp.ones(1), "weight": jnp.ones(1)}, tx.init(model), model)
    assert (float(updates.mean[0]), float(updates.weight[0])) == (-2.0, -1.0)


def test_a_line_search_within_a_group():
    loss = lambda model: jnp.sum((model["a"] - 1) ** 2) + jnp.sum((model["b"] + 2) ** 2)
    tx = optim.groups({"a": optax.lbfgs(), "**": optax.sgd(0.1)})
    model = {"a": jnp.zeros(2), "b": jnp.zeros(1), "n": 3}

    @eqx.filter_jit
    def step(model, state):
        value, grads = tp.value_and_grad(loss)(model)
        updates, state = tx.update(grads, state, model, value=value, grad=grads, value_fn=loss)
        return optim.apply_updates(model, updates), state

    state = tx.init(model)
    for _ in range(30):
        model, state = step(model, state)
    assert float(loss(model)) < 1e-3


def test_errors_of_groups(without_type_checks):
    model = _model()
    with pytest.raises(ValueError, match=r"trained, but in no group: 'a', 'b.v'. The groups are b.w; .*\"\*\*\""):
        optim.groups({"b.w": optax.sgd(1.0)}).init(model)
    with pytest.raises(ValueError, match="'bb' selects nothing; nearest: 'b'"):
        optim.groups({"bb": optax.sgd(1.0), "**": optax.sgd(1.0)}).init(model)
    accumulating = optim.groups({"a": optim.accumulate(optax.sgd(1.0), 2), "**": optax.sgd(1.0)})
    with pytest.raises(ValueError, match=r"in a group optim.accumulate does not see this"):
        accumulating.update({"b": {"v": jnp.ones(1)}}, accumulating.init(model), model)
    with pytest.raises(ValueError, match="two groups read alike"):
        optim.groups({lambda m: m["a"]: optax.sgd(1.0), lambda m: m["b"]: optax.sgd(1.0)})
    with pytest.raises(TypeError, match="expected an Optax transformation, got"):
        optim.groups({"**": 0.1})


# -- report ----------------------------------------------------------------------------------------------------------


def test_report():
    model = {**_model(), "frozen": jnp.ones((3, 4), jnp.bfloat16)}
    inner = optim.groups({"b.v": optax.sgd(1.0), "**": optax.adam(1.0)})
    groups = optim.groups({"a": optax.sgd(1.0), "b": inner})
    for tx in (optax.chain(optim.clip_by_global_norm(1.0), optim.trainable(groups, ("a", "b"))),):
        report = optim.report(tx, model)
        assert report.groups == {"a": "a", "b.v": "b / b.v", "b.w": "b / **"}
        assert str(report).splitlines() == [
            "path    shape  dtype     group",
            "a       2      float32   a",
            "b.v     1      float32   b / b.v",
            "b.w     2,2    float32   b / **",
            "frozen  3,4    bfloat16  frozen",
        ]
    plain = optim.report(optim.flat(optax.adam(0.1)), {"a": jnp.ones(2)})
    assert str(plain).splitlines()[1:] == ["a     2      float32  trained"]
    with pytest.raises(TypeError, match=r"expected a transformation with optim.trainable"):
        optim.report(optax.adam(0.1), {"a": jnp.ones(2)})


# -- adjust ----------------------------------------------------------------------------------------------------------


def test_adjust_one_group_and_all():
    tx = optim.groups({"a": sgd(0.1), "**": sgd(0.2, momentum=0.0)})
    model = _model()
    state = optim.adjust(tx.init(model), "a", learning_rate=1.0)
    updates, _ = tx.update(_ones(model), state, model)
    assert (float(updates["a"][0]), float(updates["b"]["v"][0])) == (-1.0, pytest.approx(-0.2))
    state = optim.adjust(state, learning_rate=3.0)
    updates, _ = tx.update(_ones(model), state, model)
    assert (float(updates["a"][0]), float(updates["b"]["v"][0])) == (-3.0, -3.0)
    state = optim.adjust(state, momentum=0.5)  # only one of them knows it
    _, state = tx.update(_ones(model), state, model)
    updates, _ = tx.update(_ones(model), state, model)
    assert (float(updates["a"][0]), float(updates["b"]["v"][0])) == (-3.0, -4.5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_adjust_does_not_retrace(dtype):
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(0.1)))
    model = {"w": jnp.ones(2, dtype)}
    step = jax.jit(tx.update)
    state = tx.init(model)
    for rate in (0.1, 1, np.float64(0.2), jnp.float32(0.3), jnp.bfloat16(0.3)):
        state = optim.adjust(state, learning_rate=rate, weight_decay=rate)
        _, state = step(model, state, model)
    assert step._cache_size() == 1


def test_adjust_within_jit_and_of_plain_optax():
    tx = sgd(0.1)
    params = jnp.ones(1)

    @jax.jit
    def step(state, rate):
        return tx.update(params, optim.adjust(state, learning_rate=rate), params)[0]

    np.testing.assert_allclose(step(tx.init(params), 0.7), -0.7, rtol=1e-6)


def test_adjust_reaches_what_is_held():
    model, tx = {"a": jnp.ones(1), "b": jnp.ones(1)}, optim.trainable(optax.inject_hyperparams(optax.adam)(0.1))
    _, state = tx.update(model, tx.init(model), model)
    state = optim.set_trainable(tx, state, model, "a")
    _, state = tx.update(model, state, model)
    state = optim.adjust(state, learning_rate=0.5)
    rates = [float(part.hyperparams["learning_rate"]) for part in (*state.runs, *state.held)]
    assert rates == [0.5, 0.5]


def test_whole_numbers_are_not_rounded_in_silence():
    model, tx = {"w": jnp.ones(1)}, optim.trainable(sgd(learning_rate=1))
    state = tx.init(model)
    with pytest.raises(ValueError, match=r"learning_rate is int32, which does not hold 0.5; write the number"):
        optim.adjust(state, learning_rate=0.5)
    np.testing.assert_array_equal(tx.update(model, optim.adjust(state, learning_rate=2), model)[0]["w"], -2)


def test_errors_of_adjust():
    tx = optim.groups({"a": sgd(0.1), "**": optax.adam(0.1)})
    state = tx.init(_model())
    with pytest.raises(
        ValueError, match=r"no hyperparameter 'rate' in the state; there are 'learning_rate'.*inject_hyp"
    ):
        optim.adjust(state, rate=0.1)
    with pytest.raises(
        ValueError, match=r"no hyperparameter 'learning_rate' in the state of group '\*\*'; there are none"
    ):
        optim.adjust(state, "**", learning_rate=0.1)
    with pytest.raises(ValueError, match="no group 'c' in the state; there are 'a', '"):
        optim.adjust(state, "c", learning_rate=0.1)
    scheduled = optim.trainable(optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(1.0, 0.0, 10)))
    with pytest.raises(ValueError, match="'learning_rate' follows a schedule"):
        optim.adjust(scheduled.init(_model()), learning_rate=0.1)
    with pytest.raises(ValueError, match=r"expected learning_rate of shape \(\), got shape \(2,\)"):
        optim.adjust(state, learning_rate=jnp.ones(2))


def test_nested_hyperparameters_survive_a_change_of_what_trains():
    inner = optax.inject_hyperparams(optax.adam)(0.1)
    tx = optim.trainable(optax.inject_hyperparams(lambda scale: optax.chain(inner, optax.scale(scale)))(1.0), "a")
    model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    state = optim.adjust(tx.init(model), scale=2.0, learning_rate=0.5)
    state = optim.set_trainable(tx, tx.update(model, state, model)[1], model)
    updates, _ = tx.update(model, state, model)
    np.testing.assert_allclose(updates["b"], -1.0, rtol=1e-5)
