"""Freeze and thaw in training, and parts that begin anew: nothing that was learned about a leaf is lost, and no leaf
follows another's clock."""

import dataclasses
import functools
import pickle

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

from ..zoo import STACKS, VECTOR, assert_close, assert_same, filled, flops, ramp
from .test_optim import forms, made

pytestmark = pytest.mark.usefixtures("standard_promotion")
MOMENTUM = optax.sgd(0.1, momentum=0.9)


@functools.partial(jax.jit, static_argnums=0)
def _steps(tx, state, model, steps, time=0):
    """The model and the state after some steps, in one program."""
    step = lambda i, carry: optim.step(tx, jax.tree.map(lambda x: jnp.sin(x + time + i), carry[0]), carry[1], carry[0])
    return jax.lax.fori_loop(0, steps, step, (model, state))


def _pair():
    return {"a": jax.device_put(np.float32([1, 2])), "b": jax.device_put(np.float32([[3], [4]]))}


def _ones(model):
    return jax.tree.map(np.ones_like, model)


RULES = {
    "adamw": optax.adamw(0.1, weight_decay=0.5),
    "MultiSteps": optax.MultiSteps(MOMENTUM, 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
}


@pytest.mark.parametrize(("form", "name"), [(VECTOR, "adamw"), (optim.trainable, "MultiSteps"), (STACKS, "injected")])
def test_frozen_for_50_steps_is_as_if_they_had_not_happened(form, name):
    rule = RULES[name]
    model, tx = _pair(), made(form, rule)
    model, state = _steps(tx, tx.init(model), model, 4)
    back = state
    for choice in ("a", "b", None, "a", None):  # without a step between nothing changes
        back = optim.set_trainable(tx, back, model, choice)
    assert_same(back, state)
    state = optim.set_trainable(tx, state, model, "a")
    before, held = model["b"], state.held
    model, state = _steps(tx, state, model, 50, 9)
    assert_same((model["b"], state.held), (before, held))
    state = optim.set_trainable(tx, state, model)
    model, state = _steps(tx, state, model, 4)
    alone, plain = {"b": _pair()["b"]}, made(optim.trainable, rule)  # a model that has the other leaf alone
    alone, single = _steps(plain, plain.init(alone), alone, 4)
    alone, _ = _steps(plain, single, alone, 4)
    np.testing.assert_allclose(model["b"], alone["b"], rtol=1e-6)
    assert [int(count) for count in state.counts] == [58, 8]
    assert (len(state.runs), state.held) == (2, ())


@forms
def test_leaves_with_one_history_share_one_run_and_all_may_freeze(form, tmp_path):
    model, tx = {name: jnp.ones(2) for name in "abcd"}, made(form, MOMENTUM, ("a", "b"))
    step = jax.jit(tx.update, donate_argnums=1)  # what a change returns may be donated
    _, state = step(model, tx.init(model), model)
    for choice, trains, waits in (("**", [2, 2], []), (("a", "c"), [1, 1], [1, 1]), ("**", [2, 2], [])):
        state = optim.set_trainable(tx, state, model, choice)
        sizes = [[len(each) for each in side] for side in (state.roles.running, state.roles.held)]
        assert sizes == [trains, waits]  # c and d begin together
        _, state = step(model, state, model) if choice == "**" else (None, state)
    none = optim.set_trainable(tx, state, model, jax.tree.map(lambda _: False, model))
    same, none = optim.step(tx, _ones(model), none, model)
    assert_same(same, model)
    assert_same(optim.set_trainable(tx, none, model, "**"), state)
    kept = pickle.dumps(jax.eval_shape(lambda: state))
    assert_same(pickle.loads(pickle.dumps(state)), state, identity=False)
    if form is STACKS:
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            assert_same(checkpointer.restore(tmp_path / "state", pickle.loads(kept)), state, identity=False)


@pytest.mark.parametrize("choice", ["low", "single"])
def test_a_vector_of_mixed_dtypes_keeps_its_digits_and_none_counts_as_zero(choice):
    model = {"low": jnp.full(3, 1 / 3, jnp.bfloat16), "single": jnp.full(2, 1 / 3)}
    tx = made(VECTOR, MOMENTUM)
    state = tx.init(model)
    trace = state.runs[0][0].trace
    assert (trace.shape, trace.dtype) == ((5,), jnp.float32)
    zero, none = (
        tx.update(grads, state, model)[1]
        for grads in (_ones(model) | {"low": 0 * model["low"]}, {"single": np.ones(2, "f4")})
    )
    assert_same(none.runs, zero.runs)
    model, state = _steps(tx, state, model, 3)
    there = optim.set_trainable(tx, state, model, choice)
    assert_same(optim.set_trainable(tx, there, model), state)
    both = optim.set_trainable(tx, _steps(tx, there, model, 1)[1], model)
    assert len(both.runs) == 2
    for before in (there, both):
        assert jax.eval_shape(tx.update, model, before, model)[1] == jax.eval_shape(lambda state: state, before)


def test_histories_are_one_where_counts_and_all_else_that_is_shared_are_equal():
    model, tx = {"a": jnp.ones(1), "b": jnp.ones(1)}, optim.trainable(optax.sgd(1.0, momentum=0.5), "a")
    update = lambda state, **grads: tx.update({name: np.float32([x]) for name, x in grads.items()}, state, model)
    state = optim.set_trainable(tx, update(tx.init(model), a=1)[1], model, "b")
    state = optim.set_trainable(tx, update(state, b=1)[1], model)
    assert ([int(count) for count in state.counts], len(state.runs)) == ([1], 1)
    for _ in range(3):
        _, state = update(state, a=1)
    np.testing.assert_array_equal(update(state, b=2)[0]["b"], -2.5)  # its momentum has waited
    # What is of the run keeps no two apart: a rate that was set while one of them was frozen, the state of a clip.
    for rule in (optax.inject_hyperparams(optax.sgd)(0.1), optim.clip_by_global_norm(9.0)):
        one = optim.trainable(rule)
        _, state = one.update(tp.copy(model), one.init(model), model)
        for choice, rate in (("a", 0.1), ("b", 0.2)):
            state = optim.set_trainable(one, state, model, choice)
            state = optim.adjust(state, learning_rate=rate) if hasattr(state.runs[0], "hyperparams") else state
            _, state = one.update({choice: model[choice] * rate}, state, model)
        state = optim.set_trainable(one, state, model)
        assert ([int(count) for count in state.counts], len(state.runs)) == ([2], 1)


FALLING = optax.sgd(optax.linear_schedule(0.1, 0.02, 8), momentum=0.5)


@hypothesis.settings(deadline=None, max_examples=8, derandomize=True)
@hypothesis.given(st.lists(st.tuples(st.sets(st.sampled_from("abc"), min_size=1), st.integers(0, 3)), max_size=5))
def test_any_sequence_of_choices_is_each_leafs_own_run(stages):
    # By hand: momentum of each leaf by itself, and a rate that falls with the steps of the run.
    with jax.numpy_dtype_promotion("standard"):
        model = {"a": jnp.array([1.0]), "b": jnp.array([2.0]), "c": jnp.array([4.0])}
        tx = made(optim.trainable, FALLING, "a")
        want, state, time = {name: [float(leaf[0]), 0.0] for name, leaf in model.items()}, tx.init(model), 0
        for names, steps in stages:
            state = optim.set_trainable(tx, state, model, sorted(names))
            for _ in range(steps):
                model, state = optim.step(tx, jax.tree.map(lambda x: np.cos(3 * np.asarray(x)), model), state, model)
                for name in names:
                    leaf, trace = want[name]
                    trace = np.cos(3 * leaf) + 0.5 * trace
                    want[name] = leaf - (0.1 - 0.01 * min(time, 8)) * trace, trace
                time += 1
        for name, (leaf, _) in want.items():
            np.testing.assert_allclose(model[name], [leaf], rtol=1e-4)


def test_frozen_leaves_cost_no_backward_no_optimiser_work_and_no_memory():
    model, x = filled(eqx.nn.MLP, 16, 16, 32, 4), np.ones((8, 16), np.float32)
    last = tp.layout(model, "layers.4")

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
    two = optim.set_trainable(tx, dataclasses.replace(from_start, counts=(jnp.array(2, jnp.int32),)), model)
    assert len(two.runs) == 2
    whole = work(tx.init(model))
    assert work(two) < 1.01 * whole  # two histories as much as one
    assert work(frozen) == work(from_start) < 0.5 * whole
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
    assert held == sum(leaf.nbytes for leaf in jax.tree.leaves(tx.init(model))) + 8  # the counts of a second history


def test_a_rule_is_traced_once_for_all_histories_and_a_step_once_per_choice():
    model, calls = {name: jnp.ones(2) for name in "abcdef"}, []
    init = lambda params: calls.append("init") or MOMENTUM.init(params)
    update = lambda updates, state, params=None: calls.append("update") or MOMENTUM.update(updates, state, params)
    tx = optim.trainable(optax.GradientTransformation(init, update), "a")
    compiled, state = jax.jit(tx.update), tx.init(model)
    for names in ("ab", "abc", "abcd", "abcde"):
        _, state = tx.update(tp.copy(model), state, model)
        calls.clear()
        state = optim.set_trainable(tx, state, model, list(names))
        assert calls.count("init") <= 4  # the fresh leaf's, the shapes of all, and of both which array is of which leaf
    assert len(state.runs) == 5
    calls.clear()
    updates, after = compiled(model, state, model)
    assert calls.count("update") == 1
    assert_close(updates, tx.update(tp.copy(model), state, model)[0], 1e-6)
    fewer = optim.set_trainable(tx, after, model, list("abc"))
    for each in (fewer, optim.set_trainable(tx, fewer, model, list("abcde"))):  # the second choice is known
        compiled(model, each, model)
    assert compiled._cache_size() == 2


def test_in_the_state_of_a_wrapper():
    tx, grads = made(optim.trainable, MOMENTUM), _ones(_pair())
    model, state = optim.step(tx, grads, tx.init(_pair()), _pair())
    some = grads | {"b": None}  # apply_if_finite compares its structure with that of the updates
    want, _ = optim.step(tx, some, optim.set_trainable(tx, state, model, "a"), model)
    injected = optax.inject_hyperparams(lambda scale: optax.chain(tx, optax.scale(scale)))(1.0)
    for wrapped in (optax.named_chain(("all", tx)), optax.apply_if_finite(tx, 3), injected):
        _, around = optim.step(wrapped, grads, wrapped.init(_pair()), _pair())
        around = optim.set_trainable(tx, around, model, "a")
        assert_close(optim.step(wrapped, some, around, model)[0], want)


@pytest.mark.parametrize("form", [optim.trainable, STACKS])
def test_groups(form):
    model, rules = _pair(), {"a": optax.MultiSteps(optax.sgd(0.1), 2), "**": optax.inject_hyperparams(optax.sgd)(0.1)}
    tx = form(optim.groups(rules))
    model, state = _steps(tx, tx.init(model), model, 3)
    state = optim.adjust(optim.set_trainable(tx, state, model, "b"), "**", learning_rate=0.5)
    before = model["a"]
    model, state = optim.step(tx, _ones(model), state, model)
    assert model["a"] is before
    updates, _ = jax.jit(tx.update)(_ones(model), optim.set_trainable(tx, state, model), model)
    np.testing.assert_allclose(updates["b"], -0.5)
    assert np.max(updates["a"]) < 0  # the second of its two calls


def test_ties_are_those_of_the_state():
    shared = jnp.array([1.0, 2.0])
    model = {"a": shared, "b": shared, "c": jnp.ones(1)}
    tx = optim.trainable(optax.sgd(0.1))
    state = tx.init(model)
    parted = {name: jnp.copy(leaf) for name, leaf in model.items()}  # the tie is lost here
    state = optim.set_trainable(tx, state, parted, "c")
    state = optim.set_trainable(tx, state, parted)
    assert state.layout.ties == {"a": ("b",)}
    match = r"same models and ties, such as state.layout.freeze.*; they differ:\n(.*\n)*'a' is tied to"
    with pytest.raises(ValueError, match=match):
        optim.set_trainable(tx, state, parted, tp.layout(parted, "c"))
    with pytest.raises(ValueError, match="'a' is trained and 'b' is frozen, but they are one array"):
        optim.set_trainable(tx, state, model, "a")


def test_thawing_what_a_class_declares_frozen():
    class Model(eqx.Module):
        weight: jax.Array
        mean: jax.Array = tp.field(trainable=False)

    model = Model(jnp.ones(1), jnp.ones(1))
    tx = optim.trainable(optim.groups({"mean": optax.sgd(2.0)}, default=optax.sgd(1.0)), tp.layout(model, thaw="mean"))
    updates, _ = tx.update(tp.copy(model), tx.init(model), model)
    assert_same(optim.apply_updates(model, updates), Model(jnp.zeros(1), -jnp.ones(1)))
    state = optim.set_trainable(tx, tx.init(model), model)  # as declared
    with pytest.raises(ValueError, match="declared frozen"):
        optim.set_trainable(tx, state, model, "mean")
    assert optim.set_trainable(tx, state, model, state.layout.thaw("mean")).layout.paths == ("weight", "mean")


@pytest.mark.parametrize("form", [optim.trainable, STACKS])
def test_fresh_leaves_have_fresh_hyperparameters_in_their_dtype(form):
    model = {"low": jnp.ones(2, jnp.bfloat16), "single": jnp.ones(2)}
    rule = optax.inject_hyperparams(optax.adam)(3e-4)
    tx = form(rule, "low")
    fresh, single = tx.init(model), form(rule, "single").init(model)
    both = optim.set_trainable(tx, fresh, model).hyperparams
    assert_same(both, single.hyperparams)  # b2 is 0.999; in bfloat16, 1
    adjusted = optim.adjust(fresh, learning_rate=0.25)
    assert_same(optim.set_trainable(tx, adjusted, model).hyperparams, both | {"learning_rate": jnp.array(0.25)})
    assert_same(optim.set_trainable(tx, adjusted, model, "single", reset=True), single)  # all of it begins anew


FALLS = optax.piecewise_constant_schedule(1.0, {3: 1e-5})
OF_THE_RUN = {
    "an injected schedule": ("tree", optax.inject_hyperparams(optax.adam)(FALLS)),
    "a plateau": ("stacks", optax.chain(optax.adam(1.0), optax.contrib.reduce_on_plateau(1e-5, 0, cooldown=99))),
    "a node within": ("vector", optax.apply_if_finite(optax.adam(FALLS), 3)),
    "in groups": ("stacks", optim.groups({"b": optax.adam(FALLS)}, optax.sgd(1e-5))),
}


@pytest.mark.parametrize("name", OF_THE_RUN)
def test_what_begins_late_takes_the_rate_of_the_run_and_its_own_corrections(name):
    (form, rule), model = OF_THE_RUN[name], _pair() | {"b": jnp.ones(3, jnp.bfloat16)}
    tx, grads = optim.trainable(rule, "a", form=form), _ones(model)
    step = lambda grads, state: tx.update(grads, state, model, value=jnp.ones(()))
    state = tx.init(model)
    for _ in range(4):  # from here on the rate is 1e-5
        _, state = step(grads, state)
    thawed = optim.set_trainable(tx, state, model)
    updates, after = jax.jit(step)(grads, thawed)
    assert_close(updates, jax.tree.map(lambda leaf: jnp.full_like(leaf, -1e-5), model), 1e-6)
    assert [int(count) for count in after.counts] == [5, 1]
    for reset in ("b", "a"):  # reset=where leaves alone what is of the run
        anew = optim.set_trainable(tx, after, model, reset=reset)
        assert_close(step(grads, anew)[0], updates, 1e-6)
    assert_same(optim.set_trainable(tx, after, model, "a", reset=True), tx.init(model))
    # A history without a gradient does not fall behind, nor does one that waits.
    if form == "tree":
        assert_close(step(grads, step(grads | {"b": None}, after)[1])[0]["b"], updates["b"], 1e-6)
    late = step(grads, optim.set_trainable(tx, after, model, "a"))[1]
    assert_close(step(grads, optim.set_trainable(tx, late, model))[0], updates, 1e-6)


def test_a_history_without_gradients_is_warned_of_once():
    model = _pair()
    tx = optim.trainable(optax.sgd(0.1), "a")
    state = tx.init(model)
    known = state.layout  # closed over by a step that does not ask the state
    _, state = tx.update(tp.copy(model), state, model)
    state = optim.set_trainable(tx, state, model)
    grads = tp.project(model, _ones(model), known)
    with pytest.warns(UserWarning, match=r"no gradient so far for b, which the state trains: .*state.layout"):
        model, state = optim.step(tx, grads, state, model)
    model, state = optim.step(tx, grads, state, model)  # a second warning would be an error
    jax.jit(tx.update)(grads, state, model)
    _, state = tx.update(tp.copy(model), state, model)
    optim.step(tx, grads, state, model)  # it had one: partial gradients are allowed


# -- A part begins anew ------------------------------------------------------------------------------------------------

DECAYED = optax.adamw(0.1, weight_decay=0.5)
INJECTED = RULES["injected"]
CASES = {
    "vector": (VECTOR, DECAYED),
    "groups": (optim.trainable, optim.groups({"head": DECAYED}, default=INJECTED)),
    "stacks in groups": (STACKS, optim.groups({"body": optim.per_leaf(DECAYED)}, default=INJECTED)),
}


def _model():
    return {"body": ramp(2), "head": {"w": ramp(2, 2), "b": ramp(2, start=1)}, "other": ramp(1)}


@pytest.mark.parametrize(("form", "rule"), CASES.values(), ids=CASES)
def test_a_part_is_as_by_a_fresh_optimiser_and_the_rest_as_before(form, rule):
    tx = form(rule, ("body", "head"))
    model, state = _steps(tx, tx.init(_model()), _model(), 3)
    has_rate = bool(optax.tree_utils.tree_get_all_with_path(state.runs[0], "hyperparams"))
    adjusted = lambda state: optim.adjust(state, learning_rate=0.25) if has_rate else state
    state = adjusted(state)  # which no reset forgets
    model["head"] = jax.tree.map(lambda x: x / 2, model["head"])  # a head that is made anew
    as_before, _ = _steps(tx, state, model, 2)
    alone = form(rule, "head")
    want, _ = _steps(alone, adjusted(alone.init(model)), model, 2)
    anew = optim.set_trainable(tx, state, model, reset="head")
    got, after = _steps(tx, anew, model, 2)
    assert optim.set_trainable(tx, after, got, reset="head").roles == after.roles  # a step is not traced again
    assert_close(got, as_before | {"head": want["head"]}, 1e-6)
    assert [int(count) for count in after.counts] == [5, 2]
    # Of what is frozen too: nothing is held any more.
    frozen = optim.set_trainable(tx, state, model, "body")
    dropped = optim.set_trainable(tx, frozen, model, reset=("head", "other"))
    assert (len(frozen.held), dropped.held, dropped.layout.paths) == (1, (), ("body",))
    assert_same(optim.set_trainable(tx, dropped, model, ("body", "head")), anew)


@forms
def test_what_trains_stays_as_it_is_unless_it_is_said(form):
    model = _model()
    tx = form(optax.adam(0.1), "body")
    _, state = _steps(tx, tx.init(model), model, 1)
    paths = lambda **said: optim.set_trainable(tx, state, model, **said).layout.paths
    assert paths(reset="body") == ("body",)
    assert paths() == paths(trainable=None, reset="body") == paths(reset=True) == tp.layout(model).paths
    assert paths(trainable="head.w", reset="body") == ("head.w",)
    assert_same(optim.set_trainable(tx, state, model, reset="head"), state)  # it has not begun
    assert_same(optim.set_trainable(tx, state, model, reset="**"), tx.init(model))


def test_a_tie_is_reset_whole():
    class Model(eqx.Module):
        embed: jax.Array
        head: jax.Array = tp.field(tied_to="embed", transform=jnp.transpose)
        bias: jax.Array

    model, tx = Model(ramp(2, 3), ramp(2, 3).T, ramp(2)), optim.trainable(optax.sgd(0.1, momentum=0.5))
    _, state = tx.update(tp.partition(model)[0], tx.init(model), model)
    for where in ("embed", "head", lambda m: m.head):
        after = optim.set_trainable(tx, state, model, reset=where)
        assert [[int(count) for count in after.counts], *map(len, after.roles.running)] == [[1, 0], 1, 1]
    shared = jnp.array([1.0, 2.0])
    model = {"a": shared, "b": shared, "c": jnp.ones(1)}
    _, state = tx.update(tp.copy(model), tx.init(model), model)
    for where in ("a", ("a", "b")):
        assert len(optim.set_trainable(tx, state, model, reset=where).runs) == 2
    with pytest.raises(ValueError, match=r"'b' names 'b', but 'a' and 'b' are one array.* or write 'a'"):
        optim.set_trainable(tx, state, model, reset="b")


def test_errors(without_type_checks):
    model, tx = _model(), optim.trainable(optax.adam(0.1))
    state, plain, momentum = tx.init(model), MOMENTUM.init(model), optim.trainable(MOMENTUM).init(model)
    change, anew = functools.partial(optim.set_trainable, tx), lambda reset: change(state, model, reset=reset)
    words = r"reset must be True, False or a `where` such as 'head' or '\*\*.bias', got "
    for call, error, match in (
        (lambda: change(plain, model, "body"), ValueError, "expected the state of this transformation, .*got tuple"),
        (lambda: change(momentum, model, "body"), ValueError, "made by another transformation than this one"),
        (lambda: change(state, model, True), TypeError, "trainable=True selects nothing; write None"),
        (lambda: change(state, model, False), TypeError, "trainable=False selects nothing; write None"),
        (lambda: change(state, {"body": ramp(3)}, "body"), ValueError, "made from another tree .* than this model"),
        (lambda: change(state, model, "x"), ValueError, "'x' selects nothing"),
        (lambda: jax.jit(lambda s: change(s, model, "body"))(state), ValueError, r"between steps, outside of jax.jit"),
        (lambda: anew("haed"), ValueError, "'haed' selects nothing; nearest: 'head"),
        (lambda: anew(None), TypeError, words + "None"),
        (lambda: anew(1), TypeError, words + "int"),
        (lambda: anew(np.True_), TypeError, words + "bool"),
        (lambda: anew({"head": True}), TypeError, words + "dict"),
    ):
        with pytest.raises(error, match=match):
            call()


def test_lbfgs_refuses_the_change_unless_reset_and_gradients_of_some():
    rule, model = optax.scale_by_lbfgs(memory_size=2), _pair()
    tx, first = made(VECTOR, rule), made(VECTOR, rule, "a")
    state, tree = tx.init(model), optim.trainable(rule)
    assert_same(optim.set_trainable(tx, state, model), state)  # no change
    for call in (
        lambda: optim.set_trainable(tx, state, model, "a"),
        lambda: optim.set_trainable(first, first.init(model), model, None),
        lambda: optim.set_trainable(tx, state, model, reset="a"),
        lambda: tree.update({"a": model["a"]}, tree.init(model), model),
    ):
        with pytest.raises(ValueError, match=r'L-BFGS remembers.* all trained leaves.*missing="zeros".*reset=True'):
            call()
    jax.eval_shape(tree.update, tp.project(model, {"a": model["a"]}, missing="zeros"), tree.init(model), model)
    _, state = jax.jit(tx.update)(model, state, model)
    assert_same(optim.set_trainable(tx, state, model, "a", reset=True), first.init(model))
