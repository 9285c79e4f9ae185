"""Rows of stacks that wait: another layer each step in one program, and what has no gradient."""

import functools
import warnings

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.core import Tracer

import treeparams as tp
from treeparams import optim

from ..zoo import VECTOR, assert_close, assert_same, bits, filled, ramp
from .test_forms import Layer, _loss, _net, clip, matrices, rows

pytestmark = pytest.mark.usefixtures("standard_promotion")

RULE = optax.adamw(optax.linear_schedule(0.1, 0.01, 5), weight_decay=0.5)
CLIPPED = optim.trainable(optax.chain(clip(0.5), rows(RULE)), form="stacks")
PLACE = tp.stack(_net())[1].place
update, gradient = jax.jit(CLIPPED.update), tp.jit(tp.grad(_loss))


def _row(state, path):
    """The state of a parameter of the net: its row of what `optim.per_leaf` keeps."""
    _, key, row = PLACE(path)
    return jax.tree.leaves(jax.tree.map(lambda leaf: np.asarray(leaf)[row], state.runs[0][1].states[key]))


def _moved(updates):
    return {path for path, leaf in tp.trainables(updates).items() if np.any(np.asarray(leaf) != 0)}


def _in_turns(turns, params, rest):
    """Plain Optax: each layer has a state of its own, and waits by not being called."""
    parts = {f"layers.{i}": layer for i, layer in enumerate(params["layers"])} | {"out": params["out"]}
    states, norm = {name: RULE.init(part) for name, part in parts.items()}, clip(0.5).init(params)
    for turn in turns:
        net = tp.combine({"layers": [parts[f"layers.{i}"] for i in range(3)], "out": parts["out"]}, rest)
        grads = tp.grad(_loss)(net)
        here, norm = clip(0.5).update({f"layers.{turn}": grads["layers"][turn], "out": grads["out"]}, norm)
        for name, gradient in here.items():
            steps, states[name] = RULE.update(gradient, states[name], parts[name])
            parts[name] = optax.apply_updates(parts[name], steps)
    return [*parts.values()], norm, [each[0].count for each in states.values()]


def test_another_layer_each_step_of_each_model_of_an_ensemble_is_optax_by_hand():
    (params, rest), turns = tp.partition(_net()), np.array([[0, 2, 1, 2], [1, 1, 0, 2]])
    several = jax.tree.map(lambda leaf: jax.device_put(np.stack([leaf, np.asarray(leaf) + 1])), params)

    def one(carry, turn):
        net = tp.combine(carry[0], rest)
        grads = tp.grad(_loss)(net)
        # What must not be looked at where a layer waits.
        spoilt = lambda i, layer: jax.tree.map(lambda x: jnp.where(turn == i, x, [np.nan, np.inf, 9.0][i]), layer)
        grads["layers"] = [spoilt(i, layer) for i, layer in enumerate(grads["layers"])]
        active = {f"layers.{i}": turn == i for i in range(3)}
        net, state = optim.step(CLIPPED, grads, carry[1], net, active=active)
        return (tp.partition(net)[0], state), None

    start = lambda params: (params, CLIPPED.init(tp.combine(params, rest)))
    run = jax.vmap(lambda params, turns: jax.lax.scan(one, start(params), turns)[0])
    hand = lambda several: [_in_turns(t, jax.tree.map(lambda x, i=i: x[i], several), rest) for i, t in enumerate(turns)]
    (got, state), want = jax.jit(lambda several: (run(several, turns), hand(several)))(several)
    for i, by_hand in enumerate(want):
        (nets, own) = jax.tree.map(lambda leaf, i=i: leaf[i], (got, state))
        counts = [own.runs[0][1].states[key][0].count[row] for _, key, row in map(PLACE, PARTS)]
        assert_close(([*nets["layers"], nets["out"]], own.runs[0][0], counts), by_hand, 1e-5)


PARTS = ("layers.0.w", "layers.1.w", "layers.2.w", "out")


def test_what_waits_keeps_its_bits():
    odd, more = jnp.array([-0.0, 0.0, jnp.inf, jnp.nan, 1e-6]), ramp(5)
    low, pairs = (jax.device_put(np.asarray(odd).astype(dtype)) for dtype in (jnp.bfloat16, jnp.complex64))
    model = {"odd": odd, "low": low, "c": pairs, "moves": more, "tied": odd}
    tx = optim.trainable(optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1)), tp.layout(model), form="stacks")
    grads = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), model) | {"moves": more}
    flags = (False, np.False_, np.array(False), jnp.array(False))

    @jax.jit
    def updated(state):
        return [tx.update(grads, state, model, active={"moves": True, "**": flag})[0] for flag in flags]

    for updates in updated(tx.init(model)):
        for after in (optim.apply_updates(model, updates), eqx.apply_updates(model, updates)):
            for name in ("odd", "low", "c", "tied"):
                assert bits(after[name]) == bits(model[name])
            assert_close(after["moves"], np.float32(0.85) * more)


def test_who_is_named_and_the_first_entry():
    shared, linear = ramp(4, 4), filled(eqx.nn.Linear, 4, 4)
    model = {"a": [Layer(shared, ramp(4), ramp(4)), linear], "z": shared, "s": ramp()}
    tx, everything = optim.trainable(optax.sgd(1.0), form="stacks"), {"a.0.w", "a.0.b", "a.1.weight", "a.1.bias", "s"}
    cases = (
        (None, set()),
        ({("a.0.w", "z"): False}, {"a.0.w"}),
        ({"**.b*": False}, {"a.0.b", "a.1.bias"}),
        ({eqx.nn.Linear: False}, {"a.1.weight", "a.1.bias"}),
        ({lambda model: model["a"][0].w: False}, {"a.0.w"}),
        ({matrices: False}, {"a.0.w", "a.1.weight"}),
        ({("a.*", "!a.1"): False}, {"a.0.w", "a.0.b"}),
        ({"a.0.b": False, "a": True, "**": False}, {"s", "a.0.b"}),
        ({"**": False}, everything),
    )
    grads, state = jax.tree.map(jnp.ones_like, tp.partition(model)[0]), tx.init(model)
    steps = jax.jit(lambda state: [tx.update(grads, state, model, active=active)[0] for active, _ in cases])
    for updates, (_, waits) in zip(steps(state), cases, strict=True):
        assert _moved(updates) - {"z"} == everything - waits


def test_errors_of_active(without_type_checks):
    net, state = _net(), CLIPPED.init(_net())
    for active, error, match in (
        ({"layer.1": True}, ValueError, "'layer.1' selects nothing; nearest: 'layers.1'"),
        ({"layers": True, "layers.1": False}, ValueError, "'layers.1' comes too late: 'layers' before it selects"),
        ({"layers.1": 1}, TypeError, r"active\['layers.1'\] must be a bool, or a scalar array of one, got int"),
        ({"layers.1": None}, TypeError, "must be a bool, or a scalar array of one, got None"),
        ({"layers.1": jnp.ones(())}, TypeError, r"must be a bool, or a scalar array of one, got float32\[\]"),
        ({"layers.1": np.array([True])}, TypeError, r"must be a bool, or a scalar array of one, got bool\[1\]"),
        (["layers.1"], TypeError, r"active must be a dictionary \{where: flag\}, got list"),
        ("layers.1", TypeError, r"active must be a dictionary \{where: flag\}, got "),
    ):
        with pytest.raises(error, match=match):
            CLIPPED.update(tp.copy(net), state, net, active=active)
    for form in (optim.trainable, VECTOR):
        tx = form(optax.sgd(0.1))
        for active in ({"layers.1": False}, {}, None):
            with pytest.raises(TypeError, match=r"write optim.trainable\(tx, form=\"stacks\"\)"):
                optim.step(tx, tp.copy(net), tx.init(net), net, active=active)


KEPT = {  # state that is not kept row by row, by what the error calls it
    r"state\[0\].count": optax.adam(0.1),
    r"state.count": optax.inject_hyperparams(lambda rate: rows(optax.sgd(rate)))(0.1),
    r"state.inner_states\['out'\].*.count": optim.groups({"out": optax.adam(0.1)}, default=rows(optax.sgd(0.1))),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_holds_state_must_be_kept_by_row_for_rows_to_wait(name):
    net, tx = _net(), optim.trainable(KEPT[name], form="stacks")
    grads, state = tp.partition(net)[0], tx.init(net)
    flag, match = jnp.array(True), f"keeps state that is not kept row by row, {name}: put optimisers with state inside"
    for wrong, active in ((grads, {"layers.0": False}), (grads, {"layers.0": flag}), (grads | {"out": None}, {})):
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(functools.partial(tx.update, active=active), wrong, state, net)
    _, after = jax.eval_shape(functools.partial(tx.update, active={"**": True}), grads, state, net)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_state_that_is_kept_by_row_waits_wherever_it_stands():
    """Beside `optim.per_leaf`; in it, where a norm comes after it; the boundary may be in a wrapper of Optax."""
    net, grads = _net(), tp.partition(_net())[0]
    tx = optim.trainable(optax.chain(optax.trace(0.9), rows(optax.scale_by_adam()), clip(1.0)), form="stacks")
    around = optax.MultiSteps(optim.trainable(optax.sgd(1.0), form="stacks"), 1)

    @jax.jit
    def run():
        _, state = tx.update(grads, tx.init(net), net)
        few, after = tx.update(grads, state, net, active={"layers.0": False})
        stepped = optim.step(around, grads, around.init(grads), grads, active={"out": False})[0]
        return state, few, after, tx.update(grads, state, net, active={"layers": True})[1], stepped

    state, updates, after, both, stepped = run()
    for path in state.layout.paths:
        key, row = state.layout[path].key, state.layout[path].row
        of_row = lambda state, key=key, row=row: jax.tree.map(
            lambda leaf: leaf[row], (state.runs[0][0].trace[key], state.runs[0][1].states[key])
        )
        assert_same(of_row(after), of_row(state if path.startswith("layers.0") else both))
    assert "layers.0.w" not in _moved(updates)
    np.testing.assert_allclose(tp.global_norm(updates), 1.0, 1e-5)  # of those that move alone
    assert_same(stepped, jax.tree.map(jnp.zeros_like, grads) | {"out": grads["out"]})


def test_gradients_among_the_extra_arguments_are_zero_where_rows_wait():
    net, seen, (_, key, row) = _net(), [], PLACE("out")

    def look(grads, state, params=None, *, grad, grad_fn=lambda _: {}, **_):
        trees = (grads, grad, grad_fn(params))
        seen.extend(np.asarray(tree[key][row]) for tree in trees if key in tree and not isinstance(tree[key], Tracer))
        return grads, state

    tx = optim.trainable(optax.GradientTransformationExtraArgs(lambda params: (), look), form="stacks")
    state, grads, spoilt = tx.init(net), gradient(net), np.full(4, np.nan, np.float32)
    for out, active in ((None, {}), (spoilt, {"out": False}), (spoilt, {"out": jnp.array(False)}), (grads["out"], {})):
        given = grads | {"out": out}
        tx.update(given, state, net, grad=given, grad_fn=lambda net, given=given: given, active=active)
    np.testing.assert_array_equal(seen, [*np.zeros((9, 4)), *[grads["out"]] * 3])


def test_more_layers_take_no_more_masks_and_a_first_step_that_waits_is_not_warned_of():
    tx = optim.trainable(rows(optax.sgd(0.1, momentum=0.9)), form="stacks")

    def masks(layers):
        net = {"layers": [{"w": ramp(2, 2), "b": ramp(2)} for _ in range(layers)]}
        one = lambda net, state, flags: tx.update(
            tp.copy(net), state, net, active={f"layers.{i}": flags[i] for i in range(layers)}
        )
        text = jax.jit(one).lower(net, tx.init(net), np.ones(layers, bool)).as_text()
        return text.count("stablehlo.select") + text.count("call @_where")

    assert masks(9) == masks(3) > 0
    model = {"a": ramp(2)}
    state = tx.init(model)
    for flag in (False, jnp.array(False)):
        assert_same(tx.update(tp.copy(model), state, model, active={"**": flag})[1], state)
    with pytest.warns(UserWarning, match="no gradient so far for a, which the state trains"):
        tx.update({}, state, model)


def test_a_history_waits_whole_without_rows():
    net, tx = _net(), optim.trainable(optax.adam(0.1), form="stacks")
    grads = tp.partition(net)[0]
    cases = ((grads | {"out": None}, {}), (grads, {"out": False}), (grads, {"**": False}))

    advance = jax.jit(tx.update)
    _, state = advance(grads, tx.init(net), net)
    _, state = advance(grads, optim.set_trainable(tx, state, net, "layers"), net)
    state = optim.set_trainable(tx, state, net)
    in_each = jax.jit(lambda state: [tx.update(given, state, net, active=active) for given, active in cases])
    *waited, (_, same) = in_each(state)
    assert [int(count) for count in state.counts] == [2, 1]
    for updates, after in waited:
        assert "out" not in _moved(updates)
        assert_same((after.runs[1], [int(count) for count in after.counts]), (state.runs[1], [3, 1]))
    assert_same(same, state)


def test_rows_without_a_gradient_wait_and_have_no_update():
    net = _net()
    every, nothing = gradient(net), (None, optax.MaskedNode(), np.zeros(4, jax.dtypes.float0))
    without = [every | {"out": each} for each in nothing] + [{"layers": every["layers"]}]
    active = {"layers.0": True, "out": True, "**": False}

    @jax.jit
    def in_each(state):
        ways = [(every, {"out": False}), *[(grads, None) for grads in without], (without[0], active), ({}, None)]
        return [CLIPPED.update(grads, state, net, active=flags) for grads, flags in ways]

    _, state = update(every, CLIPPED.init(net), net)
    (flagged, same), *absent, (few, _), (none, unmoved) = in_each(state)
    for updates, after in absent:
        assert (updates["out"], _row(after, "out")[0]) == (None, 1)
        assert_same(_row(after, "out"), _row(state, "out"))
        assert_same((updates["layers"], after), (flagged["layers"], same))
        assert float(after.runs[0][0].norm) < float(state.runs[0][0].norm)  # the state of the norm goes on
    stepped = optim.apply_updates(net, updates)
    assert (stepped["out"] is net["out"], stepped["layers"][0].mean is net["layers"][0].mean) == (True, True)
    assert (few["out"], _moved(few), jax.tree.leaves(none)) == (None, {"layers.0.w", "layers.0.b"}, [])
    assert_same(unmoved, state)


FALLING = optax.sgd(optax.linear_schedule(0.1, 0.02, 8), momentum=0.5)
AS_ONE = optim.trainable(rows(FALLING), form="stacks")
some = st.sets(st.sampled_from("abc"))


@hypothesis.settings(deadline=None, max_examples=5, derandomize=True)
@hypothesis.given(st.lists(st.tuples(some.filter(bool), some, some, st.booleans()), max_size=5))
def test_any_sequence_of_choices_and_flags_is_each_leafs_own_run(stages):
    # By hand: momentum and a rate that falls with the count, each leaf by itself.
    with jax.numpy_dtype_promotion("standard"):
        model = {"a": ramp(2, 3), "b": ramp(3), "c": ramp(2, 3, start=2)}
        want = {name: (np.asarray(leaf), 0.0, 0) for name, leaf in model.items()}
        state = AS_ONE.init(model)
        for trained, waiting, missing, is_traced in stages:
            state = optim.set_trainable(AS_ONE, state, model, sorted(trained))
            flag = jnp.array(False) if is_traced else False
            grads = {k: None if k in missing else jnp.cos(3 * x) for k, x in model.items()}
            with warnings.catch_warnings(action="ignore"):  # that no gradient has come yet
                active = dict.fromkeys(trained & waiting, flag)
                model, state = optim.step(AS_ONE, grads, state, model, active=active)
            for name in trained - waiting - missing:
                leaf, trace, count = want[name]
                trace = np.cos(3 * leaf) + 0.5 * trace
                want[name] = leaf - (0.1 - 0.01 * count) * trace, trace, min(count + 1, 8)
        for name, (leaf, *_) in want.items():
            np.testing.assert_allclose(model[name], leaf, rtol=1e-5)
