"""Freeze and thaw in training: nothing that was learned about a leaf is lost, and no leaf follows another's clock."""

import functools
import pickle

import chex
import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

import treeparams as tp
from treeparams import optim

from .test_optim import fit, mlp
from .zoo import assert_close, assert_same, flops

pytestmark = pytest.mark.usefixtures("standard_promotion")
forms = pytest.mark.parametrize("form", [optim.trainable, optim.flat])


def _grads(model, time):
    return jax.tree.map(lambda x: jnp.sin(x + time), model)


def _steps(tx, state, model, times):
    for time in times:
        model, state = optim.step(tx, _grads(model, time), state, model)
    return model, state


def _pair():
    return {"a": jnp.array([1.0, 2.0]), "b": jnp.array([[3.0], [4.0]])}


RULES = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "schedule": optax.adamw(optax.exponential_decay(0.1, 1, 0.9)),
    "chain": optax.chain(optax.clip(0.5), optax.scale_by_adam(), optax.scale_by_learning_rate(0.1)),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "average": optax.chain(optax.adam(0.1), optax.ema(0.9)),
    "injected": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 10)),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


@functools.cache
def made(form, rule):
    """`flat` tries each of its transformations at the first `init`."""
    return form(rule)


# -- What a frozen leaf's steps are ----------------------------------------------------------------------------------


@forms
@rules
def test_frozen_for_50_steps_is_as_if_they_had_not_happened(form, rule):
    model, tx = _pair(), made(form, rule)
    model, state = _steps(tx, tx.init(model), model, range(4))
    state = optim.set_trainable(tx, state, model, "a")
    before = model["b"]
    step = lambda time, carry: _steps(tx, carry[1], carry[0], [time])
    model, state = jax.lax.fori_loop(0, 50, step, (model, state))
    assert np.asarray(model["b"]).tobytes() == np.asarray(before).tobytes()
    state = optim.set_trainable(tx, state, model)
    model, state = _steps(tx, state, model, range(4))
    alone = {"b": _pair()["b"]}  # a model that has the other leaf alone
    alone, _ = _steps(tx, tx.init(alone), alone, [*range(4), *range(4)])
    np.testing.assert_allclose(model["b"], alone["b"], rtol=1e-6)
    assert len(state.runs) == 2
    assert [int(count) for count in state.counts] == [58, 8]
    assert state.held == ()


@forms
def test_the_case_of_two_rates(form):
    model = {"x": jnp.array([1.0, 2.0]), "y": jnp.array([3.0, 4.0])}
    grads = {"x": jnp.array([1.0, 10.0]), "y": jnp.array([100.0, 1000.0])}
    tx = form(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), "x")
    updates, state = tx.update(grads, tx.init(model), model)
    model = optim.apply_updates(model, updates)
    np.testing.assert_allclose(model["x"], [0.9, 1.0], rtol=1e-6)
    np.testing.assert_array_equal(model["y"], [3.0, 4.0])
    state = optim.set_trainable(tx, optim.adjust(state, learning_rate=0.2), model)
    model = optim.apply_updates(model, tx.update(grads, state, model)[0])
    np.testing.assert_allclose(model["x"], [0.7, -1.0], rtol=1e-6)
    np.testing.assert_allclose(model["y"], [-17.0, -196.0], rtol=1e-6)


@forms
def test_a_leaf_trained_for_the_first_time_starts_fresh(form):
    model, tx = _pair(), form(optax.adam(0.1), "a")
    model, state = _steps(tx, tx.init(model), model, range(20))
    state = optim.set_trainable(tx, state, model)
    updates, _ = tx.update({"a": jnp.ones(2), "b": jnp.ones((2, 1))}, state, model)
    np.testing.assert_allclose(updates["b"], -0.1, rtol=1e-5)  # and not three times the rate


@forms
def test_held_state_is_held_bit_for_bit(form):
    model, tx = _pair(), made(form, RULES["adam"])
    model, state = _steps(tx, tx.init(model), model, range(3))
    frozen = optim.set_trainable(tx, state, model, "a")
    assert [leaf.size for leaf in jax.tree.leaves(frozen.held)] == [1, 2, 2]
    assert [int(count) for count in frozen.counts] == [3, 3]
    _, later = _steps(tx, frozen, model, range(5))
    assert_same(later.held, frozen.held)
    moments = frozen.held[0][0]
    before = state.runs[0][0]
    take = (lambda tree: tree[2:]) if form is optim.flat else (lambda tree: tree["b"])
    there = (lambda tree: tree) if form is optim.flat else (lambda tree: tree["b"])
    for name in ("mu", "nu"):
        np.testing.assert_array_equal(there(getattr(moments, name)), take(getattr(before, name)))
    assert int(moments.count) == 3


@forms
@rules
def test_freezing_and_thawing_without_a_step_between_changes_nothing(form, rule):
    model, tx = _pair(), made(form, rule)
    model, state = _steps(tx, tx.init(model), model, range(3))
    for choice in ("a", "b", None, "a", None):
        there = optim.set_trainable(tx, state, model, choice)
    back = optim.set_trainable(tx, there, model)
    assert_same(back, state)


@pytest.mark.parametrize("choice", ["low", "single"])
def test_a_vector_of_mixed_dtypes_keeps_its_digits(choice):
    model = {"low": jnp.full(3, 1 / 3, jnp.bfloat16), "single": jnp.full(2, 1 / 3)}
    tx = optim.flat(optax.adam(0.1))
    model, state = _steps(tx, tx.init(model), model, range(3))
    there = optim.set_trainable(tx, state, model, choice)
    assert_same(optim.set_trainable(tx, there, model), state)
    _, later = _steps(tx, there, model, range(2))
    like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert like(later) == like(there)
    both = optim.set_trainable(tx, later, model)
    assert len(both.runs) == 2
    _, after = _steps(tx, both, model, range(2))
    assert like(after) == like(both)


def test_leaves_with_one_history_share_one_run():
    model = {name: jnp.ones(2) for name in "abcd"}
    tx = optim.trainable(optax.adam(0.1), ("a", "b"))
    model, state = _steps(tx, tx.init(model), model, range(2))
    state = optim.set_trainable(tx, state, model)  # c and d begin together
    assert [len(run) for run in state.roles.running] == [2, 2]
    model, state = _steps(tx, state, model, range(2))
    state = optim.set_trainable(tx, state, model, ("a", "c"))
    assert [len(run) for run in state.roles.running] == [1, 1]
    assert [len(held) for held in state.roles.held] == [1, 1]
    state = optim.set_trainable(tx, state, model)
    assert [len(run) for run in state.roles.running] == [2, 2]


@forms
def test_rules_that_couple_leaves_see_all_histories(form):
    model = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    clipped = optax.chain(optim.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(-0.1))
    tx = form(clipped, "a")
    _, state = tx.update(model, tx.init(model), model)
    state = optim.set_trainable(tx, state, model)
    assert len(state.runs) == 2
    _, state = tx.update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, state, model)
    assert [float(run[0].norm) for run in state.runs] == [5.0, 5.0]
    moments = [jax.tree.leaves(run[1].mu)[0] for run in state.runs]
    np.testing.assert_allclose(jnp.concatenate(moments), [0.06, 0.08], rtol=1e-6)


@hypothesis.settings(deadline=None, max_examples=15, derandomize=True)
@hypothesis.given(st.lists(st.tuples(st.sets(st.sampled_from("abc"), min_size=1), st.integers(0, 3)), max_size=5))
def test_any_sequence_of_choices_is_each_leafs_own_run(stages):
    with jax.numpy_dtype_promotion("standard"):
        start = {"a": jnp.array([1.0]), "b": jnp.array([2.0, 3.0]), "c": jnp.array(4.0)}
        rule = optax.adam(optax.linear_schedule(0.1, 0.01, 8))
        gradient = lambda leaf: jnp.cos(3 * leaf)
        tx = optim.trainable(rule, "a")
        model, state = start, tx.init(start)
        for names, steps in stages:
            state = optim.set_trainable(tx, state, model, sorted(names))
            for _ in range(steps):
                updates, state = tx.update(jax.tree.map(gradient, model), state, model)
                model = optim.apply_updates(model, updates)
        for name, leaf in start.items():
            alone = rule.init(leaf)
            for _ in range(sum(steps for names, steps in stages if name in names)):
                update, alone = rule.update(gradient(leaf), alone, leaf)
                leaf = leaf + update
            np.testing.assert_allclose(model[name], leaf, rtol=1e-5)


# -- What it costs ---------------------------------------------------------------------------------------------------


def test_one_retrace_per_change_and_none_of_a_known_choice():
    model, tx = mlp(), optim.trainable(optax.adam(0.1))
    state = tx.init(model)
    chex.clear_trace_counter()

    @eqx.filter_jit
    @chex.assert_max_traces(n=3)
    def step(model, state):
        updates, state = tx.update(tp.grad(fit, state.layout)(model), state, model)
        return optim.apply_updates(model, updates), state

    for choice in (None, "layers.1", None):
        state = optim.set_trainable(tx, state, model, choice)
        for _ in range(3):
            model, state = step(model, state)


def test_frozen_leaves_cost_no_backward_no_optimiser_work_and_no_memory():
    model = eqx.nn.MLP(32, 32, 64, 4, key=jax.random.key(0))
    last = tp.layout(model, "layers.4")
    x = jnp.ones((16, 32))

    def work(state):
        params, rest = tp.partition(model, state.layout)

        def step(params, rest, state):
            model = tp.combine(params, rest)
            grads = tp.grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2), state.layout)(model)
            model, state = optim.step(tx, grads, state, model)
            return tp.partition(model, state.layout)[0], state

        return flops(step, params, rest, state)

    tx = optim.trainable(optax.adam(0.1))
    frozen = optim.set_trainable(tx, tx.init(model), model, last)
    from_start = optim.trainable(optax.adam(0.1), last).init(model)
    assert work(frozen) == work(from_start) < 0.5 * work(tx.init(model))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
    assert held == sum(leaf.nbytes for leaf in jax.tree.leaves(tx.init(model))) + 8  # the counts of a second history


def test_two_histories_cost_as_much_work_as_one():
    model = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 64))}
    tx = optim.trainable(optax.adam(0.1), "a")
    _, state = tx.update(model, tx.init(model), model)
    both = optim.set_trainable(tx, state, model)
    together = optim.trainable(optax.adam(0.1)).init(model)
    update = lambda state: flops(lambda m, s: tx.update(m, s, m), model, state)
    assert update(both) < 1.01 * update(together)


def test_a_rule_is_traced_once_for_all_histories():
    model = {name: jnp.ones(2) for name in "abcdef"}
    calls = {"init": 0, "update": 0}
    adam = optax.adam(0.1)

    def init(params):
        calls["init"] += 1
        return adam.init(params)

    def update(updates, state, params=None):
        calls["update"] += 1
        return adam.update(updates, state, params)

    tx = optim.trainable(optax.GradientTransformation(init, update), "a")
    model, state = _steps(tx, tx.init(model), model, [0])
    for names in ("ab", "abc", "abcd", "abcde"):
        calls["init"] = 0
        state = optim.set_trainable(tx, state, model, list(names))
        assert calls["init"] <= 2  # the fresh leaf's, and the shapes of the first history, once
        model, state = _steps(tx, state, model, [0])
    assert len(state.runs) == 5
    calls["update"] = 0
    compiled = jax.jit(tx.update)
    compiled(model, state, model)
    assert calls["update"] == 1
    eager, _ = tx.update(model, state, model)
    assert_close(compiled(model, state, model)[0], eager, 1e-6)


def test_the_state_can_be_donated_after_a_change():
    model, tx = mlp(), optim.trainable(optax.adam(0.1))
    state = optim.set_trainable(tx, tx.init(model), model, "layers.0")
    arrays = eqx.filter(model, eqx.is_array)
    static = eqx.filter(model, eqx.is_array, inverse=True)
    step = jax.jit(lambda state, arrays: tx.update(arrays, state, eqx.combine(arrays, static))[1], donate_argnums=0)
    state = step(state, arrays)
    state = step(optim.set_trainable(tx, state, model), arrays)
    assert len(state.runs) == 2


# -- Within groups, and around ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.named_chain(("all", tx)),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.chain(optim.clip_by_global_norm(1e6), tx),
        lambda tx: optax.inject_hyperparams(lambda scale: optax.chain(tx, optax.scale(scale)))(1.0),
    ],
)
def test_in_the_state_of_a_wrapper(wrap):
    model, tx = _pair(), optim.trainable(optax.adam(0.1))
    wrapped = wrap(tx)
    model, state = _steps(tx, tx.init(model), model, range(2))
    _, around = _steps(wrapped, wrapped.init(_pair()), _pair(), range(2))
    want, _ = _steps(tx, optim.set_trainable(tx, state, model, "a"), model, range(1, 2))
    around = optim.set_trainable(tx, around, model, "a")
    grads = {"a": _grads(model, 1)["a"], "b": None}  # apply_if_finite compares its structure with that of the updates
    assert_close(optim.step(wrapped, grads, around, model)[0], want)


def test_groups():
    model = _pair()
    rules = {"a": optax.MultiSteps(optax.adam(0.1), 2), "**": optax.inject_hyperparams(optax.sgd)(0.1)}
    tx = optim.trainable(optim.groups(rules))
    model, state = _steps(tx, tx.init(model), model, range(3))
    state = optim.set_trainable(tx, state, model, "b")
    state = optim.adjust(state, "**", learning_rate=0.5)
    before = model["a"]
    model, state = _steps(tx, state, model, range(3))
    assert model["a"] is before
    state = optim.set_trainable(tx, state, model)
    updates, state = tx.update({"a": jnp.ones(2), "b": jnp.ones((2, 1))}, state, model)
    np.testing.assert_allclose(updates["b"], -0.5)
    assert float(jnp.max(updates["a"])) < 0  # the second of its two calls


# -- Ties, errors ----------------------------------------------------------------------------------------------------


def test_ties_are_those_of_the_state():
    shared = jnp.ones(2)
    model = {"a": shared, "b": shared, "c": jnp.ones(1)}
    tx = optim.trainable(optax.sgd(0.1))
    state = tx.init(model)
    parted = jax.jit(lambda model: model)(model)  # the tie is lost here
    parted = {name: jnp.copy(leaf) for name, leaf in parted.items()}
    state = optim.set_trainable(tx, state, parted, "c")
    state = optim.set_trainable(tx, state, parted)
    assert state.layout.ties == {"a": ("b",)}
    with pytest.raises(ValueError, match=r"same models and ties; they differ:\n(.*\n)*'a' is tied to"):
        optim.set_trainable(tx, state, parted, tp.layout(parted, "c"))
    with pytest.raises(ValueError, match="'a' is trained and 'b' is frozen, but they are one array"):
        optim.set_trainable(tx, state, model, "a")


def test_thawing_what_a_class_declares_frozen():
    class Model(eqx.Module):
        weight: jax.Array
        mean: jax.Array = tp.field(trainable=False)

    model, tx = Model(jnp.ones(1), jnp.ones(1)), optim.trainable(optax.sgd(1.0))
    state = tx.init(model)
    with pytest.raises(ValueError, match="declared frozen"):
        optim.set_trainable(tx, state, model, "mean")
    state = optim.set_trainable(tx, state, model, state.layout.thaw("mean"))
    updates, _ = tx.update({"weight": jnp.ones(1), "mean": jnp.ones(1)}, state, model)
    np.testing.assert_array_equal(optim.apply_updates(model, updates).mean, 0)


def test_lbfgs_refuses_the_change_unless_reset():
    loss = lambda model: jnp.sum((model["a"] - 1) ** 2) + jnp.sum((model["b"] - 1) ** 2)
    for form in (optim.trainable, optim.flat):
        model, tx = _pair(), form(optax.lbfgs())
        state = tx.init(model)
        grads = jax.grad(loss)(model)
        _, state = tx.update(grads, state, model, value=loss(model), grad=grads, value_fn=loss)
        with pytest.raises(ValueError, match=r"L-BFGS remembers steps of all trained leaves.*reset=True"):
            optim.set_trainable(tx, state, model, "a")
        assert_same(optim.set_trainable(tx, state, model), state)  # no change
        first = form(optax.lbfgs(), "a")
        with pytest.raises(ValueError, match=r"L-BFGS remembers steps of all trained leaves.*reset=True"):
            optim.set_trainable(first, first.init(model), model)
        fresh = optim.set_trainable(tx, state, model, "a", reset=True)
        assert_same(fresh, form(optax.lbfgs(), "a").init(model))


def test_a_reset_keeps_the_hyperparameters():
    model, tx = _pair(), optim.trainable(optax.inject_hyperparams(optax.adam)(0.1))
    _, state = _steps(tx, optim.adjust(tx.init(model), learning_rate=0.5), model, range(2))
    fresh = optim.set_trainable(tx, state, model, "a", reset=True)
    want = optim.adjust(optim.trainable(optax.inject_hyperparams(optax.adam)(0.1), "a").init(model), learning_rate=0.5)
    assert_same(fresh, want)


def test_checkpoints_of_several_histories(tmp_path):
    model, tx = _pair(), optim.trainable(optax.adam(0.1), "a")
    model, state = _steps(tx, tx.init(model), model, range(2))
    state = optim.set_trainable(tx, state, model)
    kept = pickle.dumps(jax.eval_shape(lambda: state))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        assert_same(checkpointer.restore(tmp_path / "state", pickle.loads(kept)), state, identity=False)
    assert_same(pickle.loads(pickle.dumps(state)), state, identity=False)


def test_errors():
    model, tx = _pair(), optim.trainable(optax.adam(0.1))
    state = tx.init(model)
    with pytest.raises(ValueError, match=r"between steps, outside of jax.jit"):
        jax.jit(lambda state: optim.set_trainable(tx, state, model, "a"))(state)
    with pytest.raises(
        TypeError, match=r"plain Optax, which knows no model.*; of a wrapper around it, pass what is wrapped"
    ):
        optim.set_trainable(optax.adam(0.1), optax.adam(0.1).init(model), model, "a")
    with pytest.raises(TypeError, match=r"expected optim.trainable.*the transformation is first"):
        optim.set_trainable(state, model, "a")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="made by another transformation: expected TrainableState"):
        optim.set_trainable(tx, optax.sgd(0.1).init(model), model, "a")
    with pytest.raises(ValueError, match="made by another transformation than this one"):
        optim.set_trainable(tx, optim.trainable(optax.sgd(0.1, momentum=0.9)).init(model), model, "a")
    for flag in (True, False):
        with pytest.raises(TypeError, match=f"trainable={flag} names no leaves; write None"):
            optim.set_trainable(tx, state, model, flag)
    with pytest.raises(ValueError, match="the model does not fit the layout"):
        optim.set_trainable(tx, state, {"a": jnp.ones(3)}, "a")
    with pytest.raises(ValueError, match="'x' selects nothing"):
        optim.set_trainable(tx, state, model, "x")


def test_freezing_all_and_thawing_again():
    model, tx = _pair(), optim.trainable(optax.adam(0.1))
    model, state = _steps(tx, tx.init(model), model, range(2))
    none = optim.set_trainable(tx, state, model, jax.tree.map(lambda _: False, model))
    same, none = _steps(tx, none, model, range(2))
    assert_same(same, model)
    assert_same(optim.set_trainable(tx, none, model), state)


# -- Hyperparameters and histories -----------------------------------------------------------------------------------


def test_fresh_leaves_have_fresh_hyperparameters_in_their_dtype():
    model = {"low": jnp.ones(2, jnp.bfloat16), "single": jnp.ones(2)}
    rule = optax.inject_hyperparams(optax.adam)(3e-4)
    tx = optim.trainable(rule, "low")
    _, state = _steps(tx, tx.init(model), model, range(2))
    state = optim.set_trainable(tx, state, model)
    assert_same(state.runs[1], optim.trainable(rule, "single").init(model).runs[0])  # b2 is 0.999; in bfloat16, 1
    adjusted = optim.adjust(optim.set_trainable(tx, state, model, "low"), learning_rate=0.25)
    fresh = optim.trainable(rule, "low").init(model)
    state = optim.set_trainable(tx, optim.adjust(fresh, learning_rate=0.25), model)
    assert [float(run.hyperparams["learning_rate"]) for run in state.runs] == [0.25, 0.25]
    np.testing.assert_array_equal(state.runs[1].hyperparams["b2"], np.float32(0.999))
    assert [float(run.hyperparams["learning_rate"]) for run in (*adjusted.runs, *adjusted.held)] == [0.25, 0.25]


def test_histories_of_equal_counts_stay_apart():
    model = {"a": jnp.array([1.0]), "b": jnp.array([1.0])}
    tx = optim.trainable(optax.adam(0.1), "a")
    _, state = tx.update({"a": jnp.ones(1)}, tx.init(model), model)
    state = optim.set_trainable(tx, state, model, "b")
    _, state = tx.update({"b": jnp.ones(1)}, state, model)
    state = optim.set_trainable(tx, state, model)
    assert [int(count) for count in state.counts] == [1, 1]
    assert len(state.runs) == 2
    for _ in range(3):
        _, state = tx.update({"a": jnp.ones(1)}, state, model)
    assert sorted(int(count) for count in state.counts) == [1, 4]
    updates, _ = tx.update({"b": jnp.full(1, 2.0)}, state, model)
    alone = optim.trainable(optax.adam(0.1))
    _, single = alone.update({"b": jnp.ones(1)}, alone.init({"b": jnp.ones(1)}), {"b": jnp.ones(1)})
    assert_same(updates["b"], alone.update({"b": jnp.full(1, 2.0)}, single, {"b": jnp.ones(1)})[0]["b"])


def test_parts_of_one_history_that_were_trained_in_turn_stay_apart():
    model, tx = _pair(), optim.trainable(optax.adam(0.1))
    model, state = _steps(tx, tx.init(model), model, range(2))
    for choice in ("a", "b"):
        state = optim.set_trainable(tx, state, model, choice)
        model, state = _steps(tx, state, model, range(3))
    state = optim.set_trainable(tx, state, model)
    assert [int(count) for count in state.counts] == [5, 5]
    assert len(state.runs) == 2


def test_a_history_without_gradients_is_warned_of_once():
    model = _pair()
    tx = optim.trainable(optax.adam(0.1), "a")
    state = tx.init(model)
    known = state.layout  # closed over by a step that does not ask the state
    model, state = _steps(tx, state, model, range(1))
    state = optim.set_trainable(tx, state, model)
    grads = lambda model: tp.grad(lambda m: jnp.sum(m["a"]) + jnp.sum(m["b"]), known)(model)
    with pytest.warns(UserWarning, match=r"b trains, and no gradient has come for it since: .*state.layout"):
        model, state = optim.step(tx, grads(model), state, model)
    model, state = optim.step(tx, grads(model), state, model)  # a second warning would be an error
    jax.jit(tx.update)(grads(model), state, model)
    model, state = _steps(tx, state, model, range(1))
    optim.step(tx, grads(model), state, model)  # it had one: partial gradients are allowed
