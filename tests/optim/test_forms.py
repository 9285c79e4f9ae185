"""Optax over a vector and over stacks: equal to Optax leaf by leaf, also where rows of stacks wait."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from ..zoo import STACKS, VECTOR, assert_close, assert_same, bits, ramp


class Layer(eqx.Module):
    w: jax.Array
    b: jax.Array
    mean: jax.Array = tp.field(trainable=False)


_normal = lambda *shape, seed=0: jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _net(count=3):
    layers = [Layer(_normal(4, 4, seed=i), _normal(4, seed=9 + i), _normal(4)) for i in range(count)]
    return {"layers": layers, "out": _normal(4, seed=30)}


def _model(dtype=jnp.bfloat16):
    embed, low = _normal(4, 6, seed=20), jax.device_put(np.asarray(_normal(4)).astype(dtype))
    layers, scale = _net(2)["layers"], _normal()
    return {"decoder": embed.T, "embed": embed, "head": embed, "layers": layers, "low": low, "scale": scale, "n": 3}


LAYOUT = tp.layout(_model(), ties={"decoder": ("embed", jnp.transpose)})
rows, clip = optim.per_leaf, optim.clip_by_global_norm
matrices = tp.leaves(lambda path, leaf: leaf.ndim == 2)


def _loss(model):
    """Of small curvature, so that rounding does not grow."""
    leaves = [leaf for leaf in jax.tree.leaves(model) if eqx.is_inexact_array(leaf)]
    return sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32) + i)) for i, leaf in enumerate(leaves))


def _groups(of):
    rules = {
        "layers.0.b": optax.adam(0.1),
        "scale": optax.set_to_zero(),
        Layer: of(optax.sgd(0.1, momentum=0.9)),
        matrices: of(optax.contrib.muon(0.1)),
    }
    doubled = optim.groups(dict.fromkeys(rules, optax.scale(2.0)), default=optax.identity())
    momentum = optax.sgd(optax.linear_schedule(0.9, 0.1, 3), momentum=0.9)
    return optax.chain(clip(0.5), optim.groups(rules, default=of(momentum)), doubled)


FALLS = optax.linear_schedule(0.1, 0.01, 3)
_injected_lamb = optax.inject_hyperparams(optax.lamb, hyperparam_dtype=jnp.float32)(FALLS)
_blocks = optax.centralize(), optax.adaptive_grad_clip(0.1), optax.novograd(0.1), optax.clip_by_block_rms(0.01)
BLOCKS = optax.MultiSteps(optax.chain(*_blocks), 2).gradient_transformation()
PLATEAU = optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.9)
EQUAL = {  # within `of`, over stacks, is what looks at each leaf
    "clip and rates inside": lambda of: optax.chain(clip(0.5), of(_injected_lamb)),
    "MultiSteps around": lambda of: optax.MultiSteps(of(optax.adafactor(0.1, min_dim_size_to_factor=4)), 2),
    "MultiSteps and a plateau inside": lambda of: of(optax.chain(BLOCKS, PLATEAU)),
    "groups in a chain": _groups,
    "adamw as it is": lambda of: optax.apply_if_finite(optax.adamw(FALLS), 3),
    "schedule_free": lambda of: of(optax.contrib.schedule_free_adamw(0.1, warmup_steps=2)),
}


OF_SEVERAL_DTYPES = ("clip and rates inside", "MultiSteps around", "groups in a chain", "adamw as it is")
BLIND = {  # over a vector, rules of each kind that treats all elements alike
    "global norm": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1, momentum=0.9)),
    "further arguments": optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3)),
    "memory of steps": optax.chain(optax.scale_by_lbfgs(memory_size=2), optax.scale(-0.01)),
}


@pytest.mark.parametrize("name", [*EQUAL, *BLIND])
def test_equals_optax_leaf_by_leaf(name):
    # Of several dtypes a vector has the widest, and Optax has one for rates and sums of all leaves of a tree.
    model = _model(jnp.bfloat16 if name in OF_SEVERAL_DTYPES else jnp.float32)
    layout = tp.layout(model, ties={"decoder": ("embed", jnp.transpose)})
    params, rest = tp.partition(model, layout)

    def after(tx, params):
        def step(carry, _):
            model = tp.combine(carry[0], rest)
            value, grads = tp.value_and_grad(_loss, layout)(model)
            model, state = optim.step(tx, grads, carry[1], model, value=value, grad=grads, value_fn=_loss)
            return (tp.partition(model, layout)[0], state), None

        return jax.lax.scan(step, (params, tx.init(tp.combine(params, rest))), length=5)[0][0]

    if name in EQUAL:
        txs = STACKS(EQUAL[name](rows), layout), optim.trainable(EQUAL[name](lambda tx: tx), layout)
    else:
        txs = VECTOR(BLIND[name], layout), optim.trainable(BLIND[name], layout)
    got, want = jax.jit(lambda params: [after(tx, params) for tx in txs])(params)
    for path, leaf in tp.trainables(want).items():
        here, wide, start = (np.asarray(tp.trainables(tree)[path], np.float32) for tree in (got, want, params))
        assert (np.max(np.abs(wide - start)) > 1e-4) != (name == "groups in a chain" and path == "scale")  # at rest
        # The products of Muon are added up in another order where XLA optimises: some tens of roundings in five steps.
        np.testing.assert_allclose(here, wide, *[1e-2 if leaf.dtype == jnp.bfloat16 else 1e-5] * 2)


pair = lambda *shape: [_normal(*shape, seed=i) for i in range(2)]


def test_a_rule_is_tried_once_for_each_model():
    traces, tried = [], [0]
    tx = optim.trainable(optax.stateless(lambda updates, params: traces.append(1) or updates), form="stacks")
    for model in ([*pair(3), _normal(2)], pair(7), _normal(2, 3), [_normal(4, 4)], pair(2, 2)):
        for init in (tx.init, tx.init, functools.partial(jax.eval_shape, tx.init)):
            init(model)
            tried.append(len(traces))
    assert [bool(new) for new in np.diff(tried)] == [True, False, False] * 5


def test_groups_within_or_beside_groups_would_divide_stacks_twice_and_are_refused():
    one = optax.sgd(0.1)
    two = optax.chain(optim.groups({"layers": one}, one), optim.groups({"embed": one}, one))
    for rules in (two, optim.groups({"layers": optim.groups({"**": one})}, one)):
        with pytest.raises(ValueError, match=r"stacks for one optim\.groups, but there are"):
            optim.trainable(rules, form="stacks").init(_model())


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


RULE = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(optax.linear_schedule(0.1, 0.01, 5), momentum=0.9))
CLIPPED, UNCOUPLED = (STACKS(optax.chain(first, rows(RULE))) for first in (clip(0.5), optax.scale(1.0)))
PLACE = tp.stack(_net())[1].place
PARTS = ("layers.0.w", "layers.1.w", "layers.2.w", "out")
gradient = tp.jit(tp.grad(_loss))


def _row(state, path):
    """The state of a parameter of the net: its row of what `optim.per_leaf` keeps."""
    _, key, row = PLACE(path)
    return jax.tree.leaves(jax.tree.map(lambda leaf: np.asarray(leaf)[row], state.runs[0][1].states[key]))


_moved = lambda updates: {path for path, leaf in tp.trainables(updates).items() if np.any(np.asarray(leaf) != 0)}
_alone, _clipped = jax.jit(RULE.update), jax.jit(clip(0.5).update)


def _in_turns(turns, params, rest):
    """Plain Optax: each layer has a state of its own, and waits by not being called."""
    parts, norm = [*params["layers"], params["out"]], clip(0.5).init(params)
    states = list(map(RULE.init, parts))
    for turn in turns:
        grads = gradient(tp.combine({"layers": parts[:3], "out": parts[3]}, rest))
        here, norm = _clipped([grads["layers"][turn], grads["out"]], norm)
        for i, given in zip((turn, 3), here, strict=True):
            step, states[i] = _alone(given, states[i], parts[i])
            parts[i] = jax.tree.map(lambda leaf, moved: np.asarray(leaf) + np.asarray(moved), parts[i], step)
    return parts, norm, [own[1][1].count for own in states]


def test_another_layer_each_step_of_each_model_of_an_ensemble_is_optax_by_hand():
    (params, rest), turns = tp.partition(_net()), np.array([[0, 2, 1, 2], [1, 1, 0, 2]])
    several = jax.tree.map(lambda leaf: np.stack([leaf, np.asarray(leaf) + 1]), params)

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
    results = jax.tree.map(np.asarray, jax.jit(run)(several, turns))
    for i, turn in enumerate(turns):
        (nets, own), start = jax.tree.map(lambda leaf, i=i: leaf[i], (results, several))
        counts = [own.runs[0][1].states[key][1][1].count[row] for _, key, row in map(PLACE, PARTS)]
        assert_close(([*nets["layers"], nets["out"]], own.runs[0][0], counts), _in_turns(turn, start, rest), 1e-5)


def test_any_choice_of_rows_that_wait_gives_the_bits_of_those_that_step_together():
    net, paths = _net(), tp.layout(_net()).paths
    update = jax.jit(lambda state, active: UNCOUPLED.update(gradient(net), state, net, active=active))
    everything = dict.fromkeys(paths, True)
    _, state = update(UNCOUPLED.init(net), everything)
    together, after_all = update(state, everything)
    for choice in np.random.default_rng(0).integers(0, 2, (6, len(paths)), bool):
        active = dict(zip(paths, choice, strict=True))
        updates, after = update(state, active)
        for path, step in tp.trainables(updates).items():
            want = tp.trainables(together)[path] if active[path] else -np.zeros(step.shape, "f4")
            assert bits(step) == bits(want)
            assert_same(_row(after, path), _row(after_all if active[path] else state, path))


def test_what_waits_keeps_its_bits_and_counts_in_no_norm():
    odd, more = jnp.array([-0.0, 0.0, jnp.inf, jnp.nan, 1e-6]), ramp(5)
    low, pairs = (jax.device_put(np.asarray(odd).astype(dtype)) for dtype in (jnp.bfloat16, jnp.complex64))
    model = {"odd": odd, "low": low, "c": pairs, "moves": more, "tied": odd}
    rule = optax.chain(optax.add_decayed_weights(0.5), clip(1.0), optax.sgd(0.1))
    tx = STACKS(rule, tp.layout(model))
    grads = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), model) | {"moves": more}
    flags = (False, np.False_, np.array(False), jnp.array(False))
    state, ways = tx.init(model), [(grads, {"moves": True, "**": flag}) for flag in flags]
    given = [*ways, ({"moves": more}, {})]
    run = jax.jit(lambda state: [tx.update(grads, state, model, active=active)[0] for grads, active in given])
    for updates in run(state):
        for after in (optim.apply_updates(model, updates), eqx.apply_updates(model, updates)):
            for name in ("odd", "low", "c", "tied"):
                assert bits(after[name]) == bits(model[name])
            assert_close(after["moves"], more - 0.1 * more / jnp.linalg.norm(more))


def test_who_is_named_and_the_first_entry():
    shared = ramp(4, 4)
    model = {"a": Layer(shared, ramp(4), ramp(4)), "z": shared, "s": ramp()}
    tx, everything = optim.trainable(optax.sgd(1.0), form="stacks"), {"a.w", "a.b", "s"}
    cases = (
        (None, set()),
        ({("a.w", "z"): False}, {"a.w"}),
        ({lambda model: model["a"].b: False}, {"a.b"}),
        ({"a.b": False, "a": True, "**": False}, {"s", "a.b"}),
        ({"**": False}, everything),
    )
    actives, waiting = zip(*cases, strict=True)
    state, grads = tx.init(model), tp.copy(tp.partition(model)[0])
    run = jax.jit(lambda: [tx.update(grads, state, model, active=active)[0] for active in actives])
    assert [_moved(updates) - {"z"} for updates in run()] == [everything - waits for waits in waiting]


KEPT = {  # state that is not kept row by row, by what the error calls it
    r"state\[0\].count": optax.adam(0.1),
    r"state.inner_states\['out'\].*.count": optim.groups({"out": optax.adam(0.1)}, default=rows(optax.sgd(0.1))),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_holds_state_must_be_kept_by_row_for_rows_to_wait(name):
    net, tx = _net(), optim.trainable(KEPT[name], form="stacks")
    grads, state = tp.partition(net)[0], tx.init(net)
    flag, match = jnp.array(True), f"keeps state that is not kept row by row, {name}: put optimisers with state inside"
    update = lambda grads, active: jax.eval_shape(lambda: tx.update(grads, state, net, active=active))
    for wrong, active in ((grads, {"layers.0": False}), (grads, {"layers.0": flag}), (grads | {"out": None}, {})):
        with pytest.raises(ValueError, match=match):
            update(wrong, active)
    assert jax.tree.structure(update(grads, {"**": True})[1]) == jax.tree.structure(state)


def test_state_that_is_kept_by_row_waits_wherever_it_stands():
    # Beside `optim.per_leaf`; in it, where a norm comes after it.
    net, grads = _net(), tp.partition(_net())[0]
    tx = optim.trainable(optax.chain(optax.trace(0.9), rows(optax.trace(0.5)), clip(1.0)), form="stacks")
    flags = ({"layers.0": False}, {"layers": True})
    _, state = jax.jit(tx.update)(grads, tx.init(net), net)
    (updates, after), (_, both) = jax.jit(lambda: [tx.update(grads, state, net, active=each) for each in flags])()
    for path in state.layout.paths:
        old = state if path.startswith("layers.0") else both
        (_, key, row), pairs = PLACE(path), [(run[0].trace, run[1].states) for run in (after.runs[0], old.runs[0])]
        assert_same(*([np.asarray(leaf)[row] for leaf in jax.tree.leaves((t[key], s[key]))] for t, s in pairs))
    assert "layers.0.w" not in _moved(updates)
    np.testing.assert_allclose(tp.global_norm(updates), 1.0, 1e-5)  # of those that move alone


def test_a_first_step_that_waits_is_not_warned_of():
    model, tx = {"a": ramp(2)}, STACKS(rows(optax.sgd(0.1, momentum=0.9)))
    state = tx.init(model)
    for flag in (False, jnp.array(False)):
        assert_same(tx.update(tp.copy(model), state, model, active={"**": flag})[1], state)
    with pytest.warns(UserWarning, match="no gradient so far for a, which the state trains"):
        tx.update({}, state, model)


def test_a_history_waits_whole_without_rows():
    net, tx = _net(), optim.trainable(optax.adam(0.1), form="stacks")
    grads = tp.partition(net)[0]
    cases = ((grads | {"out": None}, {}), (grads, {"out": False}), (grads, {"**": False}))
    update = jax.jit(tx.update)
    _, state = update(grads, tx.init(net), net)
    _, state = update(grads, optim.set_trainable(tx, state, net, "layers"), net)
    state = optim.set_trainable(tx, state, net)
    *waited, (_, same) = jax.jit(lambda: [tx.update(given, state, net, active=active) for given, active in cases])()
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
    ways = [(every, {"out": False}), *[(grads, None) for grads in without], (without[0], active), ({}, None)]
    _, state = jax.jit(CLIPPED.update)(every, CLIPPED.init(net), net)
    run = jax.jit(lambda: [CLIPPED.update(grads, state, net, active=flags) for grads, flags in ways])
    (flagged, same), *absent, (few, _), (none, unmoved) = run()
    for updates, after in absent:
        assert (updates["out"], _row(after, "out")[-1]) == (None, 1)
        assert_same(_row(after, "out"), _row(state, "out"))
        assert_same((updates["layers"], after), (flagged["layers"], same))
        assert float(after.runs[0][0].norm) < float(state.runs[0][0].norm)  # the state of the norm goes on
    stepped = optim.apply_updates(net, updates)
    assert (stepped["out"] is net["out"], stepped["layers"][0].mean is net["layers"][0].mean) == (True, True)
    assert (few["out"], _moved(few), jax.tree.leaves(none)) == (None, {"layers.0.w", "layers.0.b"}, [])
    assert_same(unmoved, state)
