"""Narrow parameters that steps leave as they were: counted in the state wherever it trains, and named from there."""

import dataclasses
import pickle
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from ..zoo import VECTOR, assert_same

pytestmark = pytest.mark.usefixtures("standard_promotion")
LOW, HALF = jnp.bfloat16, jnp.float16
SLOW = optax.adam(1e-4)  # below half the spacing at 1
FORMS = {
    "tree": optim.trainable,
    "vector": VECTOR,
    "stacks": lambda tx: optim.trainable(optim.per_leaf(tx), form="stacks"),
}


def _model():
    """Of these, `k` and `q` are stuck at small steps, `near zero` moves, and `wide` is float32."""
    ones = jnp.ones(3, LOW)
    return {"k": ones, "near zero": 1e-4 * ones, "q": jnp.ones((2, 2), HALF) * 4, "wide": jnp.ones(3)}


def _step(tx):
    return lambda model, state: optim.step(tx, jax.tree.map(jnp.ones_like, model), state, model)


def _scanned(tx):
    return lambda model, state: jax.lax.scan(lambda pair, _: (_step(tx)(*pair), None), (model, state), length=10)[0]


def _donated(tx):
    return jax.jit(_step(tx), donate_argnums=(0, 1))


def _applied(tx):
    def step(model, state):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, model), state, model)
        return eqx.apply_updates(model, updates), state

    return jax.jit(step)


# How it trains, and how many calls are ten steps.
WAYS = {
    "eager": (_step, 10),
    "jit": (lambda tx: jax.jit(_step(tx)), 10),
    "tp.jit": (lambda tx: tp.jit(_step(tx)), 10),
    "scan": (_scanned, 1),
    "donated": (_donated, 10),
    "eqx.apply_updates": (_applied, 10),
}


def _run(tx, model, steps, way="jit", state=None):
    make, calls = WAYS[way]
    call, state = make(tx), tx.init(model) if state is None else state
    for _ in range(steps * calls // 10):
        model, state = call(model, state)
    return model, state


def _warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    assert all(each.filename == __file__ for each in caught)
    return result, [str(each.message) for each in caught]


@pytest.mark.parametrize(("form", "way"), [("tree", "eager"), ("vector", "tp.jit"), ("stacks", "scan")])
def test_counts_in_any_form_wherever_it_trains(form, way):
    tx, before = FORMS[form](SLOW), _model()
    (model, state), said = _warnings_of(lambda: _run(tx, tp.copy(before), 40, way))
    assert_same((model["k"], model["q"]), (before["k"], before["q"]))
    assert model["near zero"][0] != before["near zero"][0]
    words = "2 of 4 leaves stuck for 40 steps: k, q (bfloat16, float16)"
    assert state.stuck == words
    assert f"stuck    {words}" in str(tp.summary({"state": state}))
    assert str(optim.report(tx, model, state)).splitlines()[-1] == words
    assert words in optim.report(tx, model, state)._repr_html_()
    if way == "eager":  # once, a few steps in; then it is known
        assert [each.partition(" A step")[0] for each in said] == [words.replace("40", "4") + "."]
        assert "optim.trainable(optim.master(tx)), or make the parameters float32" in said[0]
    else:
        assert not said


# The rule, and the steps of 40 that are not zero.
RULES = {
    "MultiSteps": (lambda: optax.MultiSteps(SLOW, 4), 10),
    "warm-up from 0": (lambda: optax.adam(lambda count: jnp.where(count < 10, 0.0, 1e-4)), 30),
}


@pytest.mark.parametrize(("rule", "way"), [("MultiSteps", "jit"), ("warm-up from 0", "eager")])
def test_counts_the_steps_that_are_not_zero(rule, way):
    make, count = RULES[rule]
    (_, state), said = _warnings_of(lambda: _run(optim.trainable(make()), {"k": jnp.ones(3, LOW)}, 40, way))
    assert state.stuck == f"1 of 1 leaves stuck for {count} steps: k (bfloat16)"
    assert len(said) == (way == "eager")


def test_says_nothing_where_parameters_move_or_steps_are_zero():
    def quiet(tx, model, steps=20):
        (model, state), said = _warnings_of(lambda: _run(tx, model, steps))
        assert (state.stuck, said) == ("", [])
        assert not _warnings_of(lambda: optim.set_trainable(tx, state, model, "**"))[1]
        return state

    nan = {"k": jnp.full(3, jnp.nan, LOW), "none": jnp.ones((0, 2), LOW)}
    for tx, model in ((optax.sgd(1e-1), _model()), (optax.sgd(0.0), _model()), (SLOW, nan)):
        assert int(quiet(optim.trainable(tx), model).still.max()) == 0
    quiet(optim.trainable(SLOW), _model(), 2)
    for tx, model in ((SLOW, {"a": jnp.ones(2), "n": 3}), (optim.master(SLOW), _model())):
        assert quiet(optim.trainable(tx), model).still == ()  # such states are as without a count
    assert quiet(optim.trainable(SLOW, "wide"), _model()).still == ()
    mixed = optim.trainable(optim.groups({"[kq]": optim.master(SLOW)}, default=SLOW))
    assert len(quiet(mixed, _model()).still) == 3


def test_the_next_touch_outside_of_a_trace_says_so_once():
    tx = optim.trainable(optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(1e-4))
    model, state = _run(tx, _model(), 5)
    words = r"^2 of 4 leaves stuck for 5 steps: k, q \(bfloat16, float16\)\. A step below half the spacing "
    touches = (
        lambda: _step(tx)(model, state)[1],
        lambda: optim.adjust({"state": state}, learning_rate=1e-4)["state"],
        lambda: optim.set_trainable(tx, state, model, "!wide"),
    )
    for touch in touches:
        with pytest.warns(UserWarning, match=words) as caught:
            after = touch()
        assert caught[0].filename == __file__
        model_then, then = _run(tx, model, 5, state=after)  # that it was said is in the state, through jit too
        assert " 10 " in then.stuck or " 11 " in then.stuck
        assert not _warnings_of(lambda then=then: optim.adjust(then, learning_rate=1e-1))[1]
        model_then, moved = _run(tx, model_then, 1, state=optim.adjust(then, learning_rate=1e-1))
        assert (moved.stuck, moved.still.min()) == ("", 0)
        again = _run(tx, model_then, 4, state=optim.adjust(moved, learning_rate=1e-9))[1]
        with pytest.warns(UserWarning, match="stuck for 4 steps"):
            optim.adjust(again, learning_rate=1e-4)


def test_a_count_belongs_to_its_parameter_through_freezing_and_resets():
    tx = optim.trainable(SLOW)
    model, state = _run(tx, _model(), 2)
    assert list(state.still) == [2, 0, 2]
    without = optim.set_trainable(tx, state, model, "!k")
    model, without = _run(tx, model, 2, state=without)
    assert without.stuck == "1 of 3 leaves stuck for 4 steps: q (float16)"
    with pytest.warns(UserWarning, match="1 of 3 leaves stuck for 4 steps: q"):
        both = optim.set_trainable(tx, without, model)
    model, both = _run(tx, model, 1, state=both)
    assert both.stuck == "2 of 4 leaves stuck for 3 to 5 steps: k, q (bfloat16, float16)"
    with pytest.warns(UserWarning, match="1 of 4 leaves stuck for 3 steps: k"):
        anew = optim.set_trainable(tx, both, model, reset="q")
    assert anew.stuck == "1 of 4 leaves stuck for 3 steps: k (bfloat16)"
    assert optim.set_trainable(tx, state, model, "wide", reset=["**", "!wide"]).still == ()
    assert list(optim.set_trainable(tx, state, model, reset=True).still) == [0, 0, 0]
    begins = optim.trainable(SLOW, "wide")
    thawed = optim.set_trainable(begins, begins.init(model), model, "**")
    assert _run(begins, model, 3, state=thawed)[1].stuck.startswith("2 of 4 leaves stuck for 3 steps")


def test_the_count_is_saved_and_files_without_it_load_with_zeros(tmp_path):
    tx = optim.trainable(SLOW)
    model, state = _run(tx, _model(), 5)
    fresh = {"state": tx.init(model)}
    for like in (fresh, jax.eval_shape(lambda: fresh), jax.tree.map(np.asarray, fresh)):
        saving.save(tmp_path / "run", {"state": state})
        assert saving.load(tmp_path / "run", like)["state"].stuck == state.stuck
        saving.save(tmp_path / "before", {"state": dataclasses.replace(state, still=())})
        loaded = saving.load(tmp_path / "before", like)["state"]
        assert_same(loaded.still, np.zeros(3, np.int32))
        assert_same(loaded.runs, state.runs)
    carried = saving.plan(model, model).state(state, like=fresh["state"])
    assert_same((carried.runs, carried.still), (state.runs, jnp.zeros(3, jnp.int32)))
    assert pickle.loads(pickle.dumps(state)).stuck == state.stuck
    assert jax.eval_shape(lambda: state).stuck == ""
