"""Wide copies of narrow parameters: each parameter is its copy rounded, and the copies train as Optax trains them."""

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
from treeparams import optim, saving, sharding

from ..zoo import STACKS, VECTOR, assert_same, enable_x64, first_devices, ramp
from .shared import Tied

LOW, HALF = jnp.bfloat16, jnp.float16


def _model():
    low = {"a": ramp(2, 2, dtype=LOW), "b": ramp(2, 2, dtype=LOW, start=1e-3)}
    return low | {"c": ramp(2, 2), "h": ramp(2, 2, dtype=HALF), "n": 7}


def _grads(model, time=0):
    """In single precision, with steps of any size among them."""
    grow = lambda leaf: 10.0 ** (time % 3) * np.sin(np.arange(leaf.size, dtype="f4") + time).reshape(leaf.shape)
    return tp.maptrainable(grow, model)


_wide = lambda model: tp.maptrainable(lambda leaf: leaf.astype(jnp.float32), model)
_cast = lambda leaf, own: np.asarray(leaf).astype(own.dtype)
_rounded = lambda wide, like: tp.maptrainable(_cast, wide, like, tied="first")
DECAYED = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5, momentum=0.9))
SCALED = optax.chain(DECAYED, optim.scaled({"b": 0.5}))
ROWS = {"[ac]": lambda of: optim.per_leaf(of(DECAYED)), "**": lambda of: of(optim.per_leaf(DECAYED))}
WAYS = {  # the form, the rule with `optim.master` or without, and whether a leaf is frozen and thawed meanwhile
    "tree": (optim.trainable, lambda of: optax.chain(optim.clip_by_global_norm(1e9), of(SCALED)), False),
    "vectors": (VECTOR, lambda of: of(DECAYED), True),
    "stacks in groups": (STACKS, lambda of: optim.groups({where: rule(of) for where, rule in ROWS.items()}), False),
}


@pytest.mark.parametrize("way", WAYS)
def test_equals_optax_over_wide_parameters_rounded(way):
    form, rule, is_frozen_meanwhile = WAYS[way]
    tx, plain = form(rule(optim.master)), form(rule(lambda tx: tx))
    model, wide = _model(), _wide(_model())
    state, of_wide = tx.init(model), plain.init(wide)
    for time in range(4):
        if is_frozen_meanwhile and time in (1, 2):
            trained = "!a" if time == 1 else None
            state = optim.set_trainable(tx, state, model, trained)
            of_wide = optim.set_trainable(plain, of_wide, wide, trained)
        grads = _grads(model, time)
        if way == "tree" and time == 3:
            del grads["h"]
        model, state = optim.step(tx, grads, state, model)
        wide, of_wide = optim.step(plain, grads, of_wide, wide)
        assert_same(model, _rounded(wide, model))
    dtypes = {name: leaf.dtype.name for name, leaf in tp.trainables(model).items()}
    assert dtypes == {"a": "bfloat16", "b": "bfloat16", "c": "float32", "h": "float16"}


def test_what_is_changed_from_outside_begins_anew():
    model = _model()
    tx = optim.trainable(optim.master(optax.sgd(1e-3)), form="vector")
    once, state = optim.step(tx, _grads(model), tx.init(model), model)
    changed = tp.replace(once, {"a": once["a"].at[0, 1].set(5.0), "b": once["b"].at[0].set(jnp.inf)})
    zero, back = (tp.maptrainable(lambda leaf, by=by: by * leaf, _grads(model)) for by in (0, -1))
    twice, after = optim.step(tx, zero, state, changed)
    assert_same(twice, changed)
    (back, _), (keep, _) = optim.step(tx, back, after, twice), optim.step(tx, back, state, once)
    at = np.array([[True, False], [True, True]])
    np.testing.assert_array_equal(back["a"][at], keep["a"][at])
    np.testing.assert_array_equal(back["a"][at], model["a"][at])  # nothing was lost on the way
    assert back["a"][0, 1] == LOW(5.0 + 1e-3 * np.sin(1))
    np.testing.assert_array_equal(np.isinf(back["b"]), [[True, True], [False, False]])


def test_with_eqx_apply_updates_while_a_step_is_less_than_a_factor_of_two():
    model = {"w": jnp.asarray([1.0, 1.0, -0.5], LOW)}
    tx = optim.trainable(optim.master(optax.sgd(1.0)))
    state, wide = tx.init(model), _wide(model)
    for step in ([0.3, 0.01, 0.1], [0.2, 1e-3, -0.2]):
        grads = {"w": jnp.asarray(step)}
        updates, state = tx.update(grads, state, model)
        assert updates["w"].dtype == LOW
        model = eqx.apply_updates(model, updates)
        wide = {"w": wide["w"] - grads["w"]}
        assert_same(model, _rounded(wide, model))
    far = {"w": jnp.asarray([0.5 - 1e-5, 0.0, 0.0])}  # to 1e-5, which no sum of narrow numbers gives
    updates, after = tx.update(far, state, model)
    summed, stepped = optim.apply_updates(model, updates), optim.step(tx, far, state, model)[0]
    assert (summed["w"][0], stepped["w"][0]) == (0.0, LOW(after.runs[0].copies["w"][0]))
    again, _ = optim.step(tx, {"w": jnp.zeros(3)}, after, summed)
    assert_same(again, summed)


def test_ties_are_kept():
    embed, shared = ramp(2, 3, dtype=LOW), ramp(3, dtype=LOW)
    model, tx = Tied(embed, embed.T, [shared, shared]), VECTOR(optim.master(optax.sgd(1e-3)))
    state = tx.init(model)
    loss = lambda m: jnp.sum(jnp.sin(_wide(m).embed @ _wide(m).head)) + jnp.sum(_wide(m).other[0] * _wide(m).other[1])
    step = jax.jit(lambda model, state: optim.step(tx, tp.grad(loss, state.layout)(model), state, model))
    for _ in range(3):
        model, state = step(model, state)
    np.testing.assert_array_equal(model.head, np.asarray(model.embed).T)
    np.testing.assert_array_equal(*model.other)


def test_over_devices_copies_lie_as_their_parameters():
    mesh = jax.make_mesh((2,), ("data",), devices=first_devices(2))
    model = {"a": ramp(8, 2, dtype=LOW), "b": ramp(8, 2, dtype=LOW, start=1e-3), "c": ramp(8)}
    loss = lambda m, x: jnp.mean((x @ (_wide(m)["a"] + _wide(m)["b"])) ** 2) + jnp.sum(m["c"] ** 2)
    rule, plan = optim.master(optax.sgd(0.5)), sharding.plan(model, mesh, {"**": "split"}, form="stacks")
    init, step = sharding.make_step(loss, rule, plan)
    params, state = init(model)
    for time in range(2):
        params, state, _ = step(params, state, np.sin(np.arange(32, dtype="f4").reshape(4, 8) + time))
    copies = jax.tree.leaves(state.rule.copies)
    assert len(copies) == 1  # of `a` and `b`, which are one stack
    for copy, leaf in zip(copies, jax.tree.leaves(params), strict=False):
        assert not leaf.sharding.is_fully_replicated
        assert copy.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        np.testing.assert_array_equal(np.asarray(copy).astype(LOW), leaf)  # large steps among them


def test_plain_optax_shares_no_buffer_and_leaves_out_what_has_no_gradient():
    tx = optim.master(optax.contrib.schedule_free(optax.sgd(1e-3), 1e-3))  # keeps parameters
    params = {"a": jnp.ones(3), "b": jnp.ones(3, LOW), "c": jnp.ones(3, LOW)}
    state = tx.init(params)
    leaves = [*jax.tree.leaves(params), *jax.tree.leaves(state)]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    tx = optim.master(optax.sgd(0.1))
    state = tx.init(params)
    grads = {"a": jnp.ones(3), "b": None, "c": jnp.ones(3)}
    updates, after = tx.update(grads, state, params)
    assert (updates["b"], updates["c"].dtype) == (None, LOW)
    assert_same(after.copies, {"a": None, "b": jnp.ones(3), "c": jnp.ones(3) - jnp.float32(0.1)}, identity=False)


def test_what_is_narrower_than_the_dtype_has_a_copy():
    single = {"w": jnp.ones(1), "z": jnp.ones(1, jnp.complex64)}
    assert optim.master(optax.sgd(1.0)).init(single | {"n": np.int32(1)}).copies == dict.fromkeys([*single, "n"])
    with enable_x64():
        copies = optim.master(optax.identity(), jnp.float64).init(single | {"d": jnp.ones(1)}).copies
    assert (copies["w"].dtype, copies["z"].dtype, copies["d"]) == ("float64", "complex128", None)


def test_functions_are_called_with_what_is_trained():
    model, seen = {"w": jnp.asarray([1.0, 0.5, 3.0], LOW)}, []
    loss = lambda model: seen.append(model["w"].dtype) or jnp.sum(model["w"] ** 2)

    def update(updates, state, params, value_fn, grad, grad_fn, note):
        value, gradient = jax.value_and_grad(value_fn)(params)
        seen.extend([value.dtype, gradient["w"].dtype, grad["w"].dtype, grad_fn(params)["w"].dtype, params["w"].dtype])
        return jax.tree.map(lambda each: -0.5 * each, gradient), state

    tx = optim.trainable(optim.master(optax.GradientTransformationExtraArgs(lambda params: (), update)))
    extra = {"grad": model, "value_fn": loss, "grad_fn": tp.grad(loss), "note": "as it is"}
    model, _ = optim.step(tx, tp.copy(model), tx.init(model), model, **extra)
    single = [np.dtype(np.float32)]
    assert seen in ([LOW, *single * 3, LOW, *single * 2], [LOW, LOW, *single * 5])
    np.testing.assert_array_equal(model["w"], jnp.zeros(3, LOW))


def test_report_and_summary_name_narrow_parameters():
    model = _model() | {"frozen": jnp.ones(1, LOW)}
    tx = optim.trainable(optim.groups({"a": optim.master(optax.sgd(1.0))}, default=optax.sgd(1.0)), "!frozen")
    lines = str(optim.report(tx, model, tx.init(model))).splitlines()
    assert [line.split()[-1] for line in lines] == ["copy", "float32", "none", "0", "frozen", "none"]
    flat = optim.trainable(optim.master(optax.sgd(1.0)), form="vector")
    assert str(optim.report(flat, _model())).split().count("float32") == 4  # of `c` the dtype
    narrow = "narrow     12 trained in bfloat16, float16, where small steps round to zero; optim.master and tp.Ema"
    assert narrow in str(tp.summary(model, "!frozen"))
    assert "narrow" not in str(tp.summary(model, "c"))


SLOW = optax.sgd(1e-4)  # below half the spacing at 1


def _narrow():
    """Of these, `k` and `q` are stuck at small steps, `near zero` moves, and `wide` is float32."""
    full = lambda value, dtype: jax.device_put(np.full(3, value).astype(dtype))
    return {"k": full(1, LOW), "near zero": full(1e-4, LOW), "q": full(4, HALF), "wide": full(1, "f4")}


def _stepped(tx):
    return lambda model, state: optim.step(tx, jax.tree.map(jnp.ones_like, model), state, model)


def _applied(tx):
    def step(model, state):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, model), state, model)
        return eqx.apply_updates(model, updates), state

    return jax.jit(step)


def _run(tx, model, calls, make=lambda tx: jax.jit(_stepped(tx)), state=None):
    call, state = make(tx), tx.init(model) if state is None else state
    for _ in range(calls):
        model, state = call(model, state)
    return model, state


def _warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    assert all(each.filename == __file__ for each in caught)
    return result, [str(each.message) for each in caught]


_scanned = lambda tx: lambda *pair: jax.lax.scan(lambda pair, _: (_stepped(tx)(*pair), None), pair, length=12)[0]
WARMED = optax.sgd(lambda count: jnp.where(count < 2, 0.0, 1e-4))
COUNTED = {  # how it trains, the steps of 12 that are not zero, and at which of these it is said
    "eager": (optim.trainable(SLOW), _stepped, 12, 4),
    "warm-up from 0": (optim.trainable(WARMED), _stepped, 10, 6),
    "MultiSteps": (VECTOR(optax.MultiSteps(SLOW, 4)), lambda tx: jax.jit(_stepped(tx)), 3, None),
    "scan": (STACKS(optim.per_leaf(SLOW)), _scanned, 12, None),
    "eqx.apply_updates": (optim.trainable(SLOW), _applied, 12, None),
}


@pytest.mark.parametrize(("tx", "make", "count", "said_at"), COUNTED.values(), ids=COUNTED)
def test_counts_the_steps_that_are_not_zero_in_any_form_wherever_it_trains(tx, make, count, said_at):
    before = _narrow()
    (model, state), said = _warnings_of(lambda: _run(tx, tp.copy(before), 1 if make is _scanned else 12, make))
    assert_same((model["k"], model["q"]), (before["k"], before["q"]))
    assert model["near zero"][0] != before["near zero"][0]
    words = f"2 of 4 leaves stuck for {count} steps: k, q (bfloat16, float16)"
    assert state.stuck == words
    assert f"stuck    {words}" in str(tp.summary({"state": state}))
    assert str(optim.report(tx, model, state)).splitlines()[-1] == words
    # Outside of a trace it says so once, a few steps in; then it is known.
    expected = [words.replace(str(count), str(said_at)) + "."] if said_at else []
    assert [each.partition(" A step")[0] for each in said] == expected
    assert all("optim.trainable(optim.master(tx)), or make the parameters float32" in each for each in said)


def test_says_nothing_where_parameters_move_or_steps_are_zero():
    def quiet(tx, model, steps=9):
        (model, state), said = _warnings_of(lambda: _run(tx, model, steps))
        assert (state.stuck, said) == ("", [])
        assert not _warnings_of(lambda: optim.set_trainable(tx, state, model, "**"))[1]
        return state

    nan = {"k": jax.device_put(np.full(3, np.nan).astype(LOW)), "none": ramp(0, 2, dtype=LOW)}
    for tx, model in ((optax.sgd(1e-1), _narrow()), (optax.sgd(0.0), _narrow()), (SLOW, nan)):
        assert np.max(quiet(optim.trainable(tx), model).still) == 0
    quiet(optim.trainable(SLOW), _narrow(), 2)
    for tx, model in ((SLOW, {"a": jnp.ones(2), "n": 3}), (optim.master(SLOW), _narrow())):
        assert quiet(optim.trainable(tx), model).still == ()  # such states are as without a count
    assert quiet(optim.trainable(SLOW, "wide"), _narrow()).still == ()
    mixed = optim.trainable(optim.groups({"[kq]": optim.master(SLOW)}, default=SLOW))
    assert len(quiet(mixed, _narrow()).still) == 3


def test_the_next_touch_outside_of_a_trace_says_so_once():
    tx = optim.trainable(optax.inject_hyperparams(optax.sgd, hyperparam_dtype=jnp.float32)(1e-4))
    model, state = _run(tx, _narrow(), 5)
    words = r"^2 of 4 leaves stuck for 5 steps: k, q \(bfloat16, float16\)\. A step below half the spacing "
    touches = (
        lambda: _stepped(tx)(model, state)[1],
        lambda: optim.adjust({"state": state}, learning_rate=1e-4)["state"],
        lambda: optim.set_trainable(tx, state, model, "!wide"),
    )
    same = jax.jit(_stepped(tx))
    run = lambda *of, **given: _run(tx, *of, lambda tx: same, **given)
    for touch in touches:
        with pytest.warns(UserWarning, match=words) as caught:
            after = touch()
        assert caught[0].filename == __file__
        model_then, then = run(model, 5, state=after)  # that it was said is in the state, through jit too
        assert " 10 " in then.stuck or " 11 " in then.stuck
        faster, said = _warnings_of(lambda then=then: optim.adjust(then, learning_rate=1e-1))
        assert not said
    model, moved = run(model_then, 1, state=faster)
    assert (moved.stuck, moved.still.min()) == ("", 0)
    with pytest.warns(UserWarning, match="stuck for 4 steps"):
        optim.adjust(run(model, 4, state=optim.adjust(moved, learning_rate=1e-9))[1], learning_rate=1e-4)


def test_a_count_belongs_to_its_parameter_through_freezing_and_resets():
    tx = optim.trainable(SLOW)
    model, state = _run(tx, _narrow(), 2)
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


def test_rows_that_wait_and_missing_gradients_are_no_steps_and_an_ensemble_counts_for_each_member():
    tx, model = optim.trainable(optim.per_leaf(SLOW), form="stacks"), {"a": jnp.ones(2, LOW), "b": jnp.ones(2, LOW)}
    update = jax.jit(lambda state, flag: tx.update(tp.copy(model), state, model, active={"a": flag})[1])
    state = tx.init(model)
    for flag in (True, False, False, True):
        state = update(state, jnp.asarray(flag))
    assert list(state.still) == [2, 4]
    tx, models = optim.trainable(SLOW), {"k": jax.device_put(np.array([[1, 1], [0, 0]]).astype(LOW))}
    assert list(tx.update({"b": model["b"]}, tx.init(model), model)[1].still) == [0, 1]
    states, step = jax.vmap(tx.init)(models), jax.jit(jax.vmap(_stepped(tx)))
    for _ in range(4):
        models, states = step(models, states)
    assert [list(each) for each in states.still] == [[4], [0]]
    assert states.stuck == "1 of 1 leaves stuck for 4 steps: k (bfloat16)"


def test_the_count_is_saved_and_files_without_it_load_with_zeros(tmp_path):
    tx = optim.trainable(SLOW)
    model, state = _run(tx, _narrow(), 5)
    fresh = {"state": tx.init(model)}
    saving.save(tmp_path / "run", {"state": state})
    for like in (fresh, jax.eval_shape(lambda: fresh), jax.tree.map(np.asarray, fresh)):
        assert saving.load(tmp_path / "run", like)["state"].stuck == state.stuck
        saving.save(tmp_path / "before", {"state": dataclasses.replace(state, still=())})
        loaded = saving.load(tmp_path / "before", like)["state"]
        assert_same((loaded.still, loaded.runs), (np.zeros(3, np.int32), state.runs))
    assert (pickle.loads(pickle.dumps(state)).stuck, jax.eval_shape(lambda: state).stuck) == (state.stuck, "")
