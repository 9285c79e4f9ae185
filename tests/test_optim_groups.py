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


def groups(rules, default=None, trainable=None):
    return optim.trainable(optim.groups(rules, default), trainable)


def _ones(model):
    return jax.tree.map(jnp.ones_like, tp.partition(model)[0])


# -- groups ----------------------------------------------------------------------------------------------------------


def test_the_first_match_wins():
    tx = groups({"b.w": optax.sgd(1.0), "b": optax.sgd(2.0), "**": optax.sgd(3.0)})
    model = _model()
    updates, _ = tx.update(_ones(model), tx.init(model), model)
    rates = jax.tree.map(lambda x: float(-x.ravel()[0]), updates)
    assert rates == {"a": 3.0, "b": {"w": 1.0, "v": 2.0}, "n": None}


def test_any_where_is_a_key():
    model = eqx.nn.MLP(2, 1, 3, 2, key=jax.random.key(0))
    keys = (re.compile(r".*\.0\..*"), lambda model: model.layers[1].weight, ("**.bias", "layers.2.weight"))
    tx = groups({key: optax.sgd(float(i)) for i, key in enumerate(keys, 1)})
    updates, state = tx.update(_ones(model), tx.init(model), model)
    rates = {path: float(-leaf.ravel()[0]) for path, leaf in tp.trainables(updates).items()}
    assert rates == {
        "layers.0.weight": 1, "layers.0.bias": 1, "layers.1.weight": 2, "layers.1.bias": 3, "layers.2.weight": 3,
        "layers.2.bias": 3,
    }  # fmt: skip
    assert_same(pickle.loads(pickle.dumps(state)), state)  # the keys do not pickle, their names do
    by_class = groups({eqx.nn.Linear: optax.sgd(1.0)})
    assert_close(
        by_class.update(_ones(model), by_class.init(model), model)[0], jax.tree.map(lambda x: -x, _ones(model))
    )


def test_equals_optax_partition():
    model = mlp()
    rules = {"w": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}
    labels = lambda params: jax.tree.map(lambda x: "w" if x.ndim > 1 else "b", params)
    ours = groups({"**.weight": rules["w"], "**": rules["b"]})
    plain = optim.trainable(optax.multi_transform(rules, labels))
    states = [ours.init(model), plain.init(model)]
    for _ in range(3):
        grads = tp.grad(fit)(model)
        got, states[0] = ours.update(grads, states[0], model)
        want, states[1] = plain.update(grads, states[1], model)
        assert_same(got, want)
        model = optim.apply_updates(model, got)


def test_in_a_chain():
    rules = optim.groups({"a": optax.adam(0.1)}, default=optax.adam(0.2))
    model = _model()
    results = []
    for tx in (rules, optax.chain(optax.identity(), rules), optax.inject_hyperparams(lambda: rules)()):
        tx = optim.trainable(tx)
        state = tx.init(model)
        for _ in range(2):
            updates, state = tx.update(_ones(model), state, model)
        results.append(updates)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_labels_of_a_module_that_can_be_called_are_not_called():
    class Calls(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            raise AssertionError

    model, tx = Calls(jnp.ones(2)), groups({"w": optax.sgd(1.0)})
    np.testing.assert_array_equal(tx.update(model, tx.init(model), model)[0].w, -1.0)


def test_a_norm_within_a_group_is_that_of_the_group():
    clip = optax.chain(optim.clip_by_global_norm(1.0), optax.scale(-1.0))
    tx = groups({"a": clip, "**": clip})
    model = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([6.0, 8.0])}
    updates, _ = tx.update(model, tx.init(model), model)
    np.testing.assert_allclose(updates["a"], [-0.6, -0.8], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [-0.6, -0.8], rtol=1e-6)


def test_none_is_not_zero_in_groups():
    tx, model = groups({"a": optax.adam(0.1), "**": optax.adam(0.1)}), _model()
    _, state = tx.update(_ones(model), tx.init(model), model)
    updates, after = tx.update({"b": {"w": jnp.ones((2, 2))}}, state, model)
    assert updates["a"] is None
    assert updates["b"]["v"] is None
    before, after = (each.runs[0].inner_states["**"].inner_state[0] for each in (state, after))
    assert_same(after.mu["b"]["v"], before.mu["b"]["v"])
    assert int(after.count) == int(before.count) + 1


def test_a_tie_goes_where_its_own_path_goes():
    shared = jnp.ones(2)
    model = {"embed": shared, "head": shared, "body": jnp.ones(1)}
    tx = groups({"embed": optax.sgd(1.0), "**": optax.sgd(2.0)}, trainable=("embed", "head"))
    updates, state = tx.update({"embed": shared, "head": shared}, tx.init(model), model)
    np.testing.assert_array_equal(updates["embed"], -2.0)
    np.testing.assert_array_equal(updates["head"], -2.0)
    state = optim.set_trainable(tx, state, model)
    updates, _ = tx.update({"body": jnp.ones(1)}, state, model)
    np.testing.assert_array_equal(updates["body"], -2.0)
    for rules in ({"head": optax.sgd(1.0)}, {("head",): optax.sgd(1.0)}):
        with pytest.raises(ValueError, match=r"selects only 'head', which is tied to 'embed'; .* write that one"):
            groups(rules, optax.sgd(1.0)).init(model)
    parted = {"embed": shared, "head": shared + 1, "body": jnp.ones(1)}
    tied = tp.layout(parted, ties={"head": ("embed", _plus_nothing)})
    with pytest.raises(ValueError, match="selects only 'head', which is tied to 'embed'"):
        groups({"head": optax.sgd(1.0)}, optax.sgd(1.0), tied).init(tp.tie(parted, tied))


def _plus_nothing(x):
    return 1.0 * x


@pytest.mark.parametrize("where", ["body", tp.leaves(lambda path, leaf: path == "body"), lambda m: m["body"]])
def test_a_group_of_frozen_leaves_is_empty_until_they_thaw(where):
    model = {"embed": jnp.ones(2), "body": jnp.ones(1)}
    tx = groups({where: optax.adam(0.5)}, optax.sgd(1.0), "embed")
    state = tx.init(model)
    assert optim.report(tx, model).groups == {"embed": "default"}
    state = optim.set_trainable(tx, state, model)
    updates, _ = tx.update(model, state, model)
    np.testing.assert_allclose(updates["body"], -0.5, rtol=1e-5)
    np.testing.assert_array_equal(updates["embed"], -1.0)


def test_a_field_that_a_layout_thawed_within_groups():
    class Model(eqx.Module):
        weight: jax.Array
        mean: jax.Array = tp.field(trainable=False)

    model = Model(jnp.ones(1), jnp.ones(1))
    tx = groups({"mean": optax.sgd(2.0), "**": optax.sgd(1.0)}, trainable=tp.layout(model, thaw="mean"))
    updates, _ = tx.update({"mean": jnp.ones(1), "weight": jnp.ones(1)}, tx.init(model), model)
    assert (float(updates.mean[0]), float(updates.weight[0])) == (-2.0, -1.0)


def test_a_line_search_within_a_group():
    loss = lambda model: jnp.sum((model["a"] - 1) ** 2) + jnp.sum((model["b"] + 2) ** 2)
    tx = groups({"a": optax.lbfgs(), "**": optax.sgd(0.1)})
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
    with pytest.raises(ValueError, match=r"trained, but in no group: 'a', 'b.v'. The groups are b.w; .*default="):
        groups({"b.w": optax.sgd(1.0)}).init(model)
    with pytest.raises(ValueError, match="'bb' selects nothing; nearest: 'b'"):
        groups({"bb": optax.sgd(1.0), "**": optax.sgd(1.0)}).init(model)
    with pytest.raises(ValueError, match="two groups read alike"):
        groups({lambda m: m["a"]: optax.sgd(1.0), lambda m: m["b"]: optax.sgd(1.0)})
    with pytest.raises(ValueError, match="two groups read alike"):
        groups({"default": optax.sgd(1.0)}, optax.sgd(1.0))
    with pytest.raises(TypeError, match="expected an Optax transformation, got"):
        groups({"**": 0.1})
    with pytest.raises(TypeError, match=r"expected a dictionary \{where: transformation\}, got"):
        groups([optax.sgd(1.0)])


class LanguageModel(eqx.Module):
    """The next token from the last; the head is the embedding."""

    embed: eqx.nn.Embedding
    body: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(12, 8, key=keys[0])
        self.body = eqx.nn.MLP(8, 8, 16, 2, key=keys[1])
        head = eqx.nn.Linear(8, 12, key=keys[2])
        self.head = eqx.tree_at(lambda head: head.weight, head, self.embed.weight)

    def __call__(self, token):
        return self.head(self.body(self.embed(token)))


def test_muon_for_matrices_of_a_language_model_with_a_tied_head():
    model, adam = LanguageModel(jax.random.key(0)), optax.adam(1e-2)
    muon = optax.contrib.muon(1e-2)
    matrices = tp.leaves(lambda path, leaf: leaf.ndim == 2)
    tx = optim.trainable(optim.groups({eqx.nn.Embedding: adam, matrices: muon}, default=adam))
    assert optim.report(tx, model).groups == {
        "embed.weight": "Embedding",  # and so is the head's, which is this array
        **{f"body.layers.{i}.weight": "tp.leaves(" + matrices.predicate.__qualname__ + ")" for i in range(3)},
        **{f"body.layers.{i}.bias": "default" for i in range(3)},
        "head.bias": "default",
    }
    tokens = jnp.array([1, 5, 3, 2, 9, 7])
    loss = lambda m: jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(m)(tokens[:-1]), tokens[1:]))
    state = tx.init(model)
    step = eqx.filter_jit(lambda m, s: optim.step(tx, tp.grad(loss, s.layout)(m), s, m))
    before = loss(model)
    after, state = step(model, state)
    # What each rule does by itself to its own leaves.
    grads = tp.trainables(tp.grad(loss, state.layout)(model))
    matrix, embedding = "body.layers.1.weight", "embed.weight"
    for path, rule in ((matrix, muon), (embedding, adam)):
        own = {path: tp.trainables(model)[path]}
        want, _ = rule.update({path: grads[path]}, rule.init(own), own)
        assert_close(tp.trainables(after)[path] - own[path], want[path], 1e-3)
    for _ in range(60):
        after, state = step(after, state)
    np.testing.assert_array_equal(after.head.weight, after.embed.weight)
    assert loss(after) < 0.2 * before


def test_weight_decay_by_shape():
    model = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    tx = optim.trainable(optax.adamw(0.1, weight_decay=1.0, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)))
    after, _ = optim.step(tx, jax.tree.map(jnp.zeros_like, model), tx.init(model), model)
    np.testing.assert_allclose(after["w"], 0.9, rtol=1e-6)
    np.testing.assert_array_equal(after["b"], 1.0)


# -- report ----------------------------------------------------------------------------------------------------------


def test_report():
    model = {**_model(), "frozen": jnp.ones((3, 4), jnp.bfloat16)}
    inner = optim.groups({"b.v": optax.sgd(1.0), "**": optax.adam(1.0)})
    rules = optim.groups({"a": optax.sgd(1.0), "b": inner})
    for tx in (optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), rules), ("a", "b")),):
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
    with pytest.raises(
        TypeError,
        match=r"expected optim.trainable\(...\) or optim.flat\(...\), got .*, plain Optax, which knows no model",
    ):
        optim.report(optax.adam(0.1), {"a": jnp.ones(2)})


# -- adjust ----------------------------------------------------------------------------------------------------------


def test_adjust_one_group_and_all():
    tx = groups({"a": sgd(0.1), "**": sgd(0.2, momentum=0.0)})
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
    tx = groups({"a": sgd(0.1), "**": optax.adam(0.1)})
    state = tx.init(_model())
    with pytest.raises(
        ValueError, match=r"no hyperparameter 'rate' in the state; there are 'learning_rate'.*inject_hyp"
    ):
        optim.adjust(state, rate=0.1)
    with pytest.raises(
        ValueError, match=r"no hyperparameter 'learning_rate' in the state of group '\*\*'; there are none"
    ):
        optim.adjust(state, "**", learning_rate=0.1)
    with pytest.raises(ValueError, match=r"no group 'c' in the state; there are '\*\*', 'a'"):
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


def test_an_adjusted_state_can_be_donated():
    rate = jnp.float32(0.5)
    tx = groups({"a": sgd(0.1)}, sgd(0.1))
    model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    step = jax.jit(tx.update, donate_argnums=1)
    for _ in range(2):  # the same number for two groups, and again for a later state
        step(model, optim.adjust(tx.init(model), learning_rate=rate), model)
    assert not rate.is_deleted()


# -- What a name may and may not mean --------------------------------------------------------------------------------


def test_labels_are_those_of_the_parameters_and_not_of_wider_gradients():
    model = {"w": jnp.ones(2, jnp.bfloat16), "v": jnp.ones(2)}
    narrow = tp.leaves(lambda path, leaf: leaf.dtype == jnp.bfloat16)
    tx = groups({narrow: optax.adam(1.0)}, optax.sgd(100.0))
    updates, _ = tx.update({"w": jnp.ones(2), "v": jnp.ones(2)}, tx.init(model), model)
    np.testing.assert_allclose(updates["w"].astype(jnp.float32), -1.0, rtol=1e-2)
    np.testing.assert_array_equal(updates["v"], -100.0)


def test_a_parameter_called_hyperparams_is_none():
    model = {"hyperparams": {"learning_rate": jnp.ones(())}, "w": jnp.ones(2)}
    tx = optim.trainable(optax.inject_hyperparams(optax.adam)(0.1))
    _, state = tx.update(model, tx.init(model), model)
    adjusted = optim.adjust(state, learning_rate=0.5)
    assert float(adjusted.runs[0].hyperparams["learning_rate"]) == 0.5
    assert_same(adjusted.runs[0].inner_state, state.runs[0].inner_state)
    fresh = optim.set_trainable(tx, state, model, reset=True)
    assert_same(fresh.runs[0].inner_state, tx.init(model).runs[0].inner_state)


def test_each_glob_of_a_group_is_checked():
    shared = jnp.ones(2)
    model = {"a": shared, "b": shared, "c": jnp.ones(1)}
    for where, match in (
        (("a", "nope"), "'nope' selects nothing"),
        (("b", "c"), "'b' selects only 'b', which is tied"),
    ):
        tx = groups({where: optax.sgd(1.0)}, optax.sgd(1.0))
        with pytest.raises(ValueError, match=match):
            tx.init(model)
        with pytest.raises(ValueError, match=match):
            optim.report(tx, model)


def test_adjust_takes_numbers(without_type_checks):
    tx = optim.trainable(sgd(0.1))
    for bad, error, match in (
        (None, TypeError, "expected a number for learning_rate, got None"),
        ([0.1], TypeError, "expected a number for learning_rate, got list"),
        (1j, ValueError, "learning_rate is float32, which does not hold 1j"),
    ):
        with pytest.raises(error, match=match):
            optim.adjust(tx.init({"a": jnp.ones(1)}), learning_rate=bad)
    with pytest.raises(TypeError, match="expected the state of this transformation, got dict"):
        optim.report(tx, {"a": jnp.ones(1)}, {})
