"""Freeze and thaw in training: nothing that was learned about a leaf is lost, and no leaf follows another's clock."""

import dataclasses
import functools

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from ..zoo import STACKS, VECTOR, assert_close, assert_same, flops, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")
forms = pytest.mark.parametrize("form", [optim.trainable, VECTOR, STACKS])


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
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
}


@functools.cache
def made(form, rule, trainable=None):
    """`flat` tries each of its transformations at the first `init`."""
    return form(rule, trainable)


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
def test_leaves_with_one_history_share_one_run(form):
    model = {name: jnp.ones(2) for name in "abcd"}
    tx = form(optax.sgd(0.1, momentum=0.9), ("a", "b"))
    step = jax.jit(tx.update, donate_argnums=1)  # what a change returns may be donated
    _, state = step(model, tx.init(model), model)
    state = optim.set_trainable(tx, state, model)  # c and d begin together
    assert [len(run) for run in state.roles.running] == [2, 2]
    _, state = step(model, state, model)
    state = optim.set_trainable(tx, state, model, ("a", "c"))
    assert [len(run) for run in state.roles.running] == [1, 1]
    assert [len(held) for held in state.roles.held] == [1, 1]
    state = optim.set_trainable(tx, state, model)
    assert [len(run) for run in state.roles.running] == [2, 2]


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
    model = eqx.filter_eval_shape(eqx.nn.MLP, 16, 16, 32, 4, key=jax.random.key(0))
    model = jax.tree.map(lambda leaf: ramp(*leaf.shape) if hasattr(leaf, "shape") else leaf, model)
    last = tp.layout(model, "layers.4")
    x = np.ones((8, 16), np.float32)

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


def test_ties_are_those_of_the_state():
    shared = jnp.array([1.0, 2.0])
    model = {"a": shared, "b": shared, "c": jnp.ones(1)}
    tx = optim.trainable(optax.sgd(0.1))
    state = tx.init(model)
    parted = {name: jnp.copy(leaf) for name, leaf in model.items()}  # the tie is lost here
    state = optim.set_trainable(tx, state, parted, "c")
    state = optim.set_trainable(tx, state, parted)
    assert state.layout.ties == {"a": ("b",)}
    with pytest.raises(
        ValueError, match=r"same models and ties, such as state.layout.freeze.*; they differ:\n(.*\n)*'a' is tied to"
    ):
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
    "a schedule": ("tree", optax.adam(FALLS)),
    "a plateau": ("stacks", optax.chain(optax.adam(1.0), optax.contrib.reduce_on_plateau(1e-5, 0, cooldown=99))),
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


def test_errors():
    model, tx = _pair(), optim.trainable(optax.adam(0.1))
    state, plain = tx.init(model), optax.sgd(0.1)
    momentum = optim.trainable(optax.sgd(0.1, momentum=0.9)).init(model)
    for arguments, error, match in (
        ((tx, plain.init(model), model, "a"), ValueError, "expected the state of this transformation, .*got tuple"),
        ((tx, momentum, model, "a"), ValueError, "made by another transformation than this one"),
        ((tx, state, model, True), TypeError, "trainable=True selects nothing; write None"),
        ((tx, state, model, False), TypeError, "trainable=False selects nothing; write None"),
        ((tx, state, {"a": jnp.ones(3)}, "a"), ValueError, "made from another tree .* than this model"),
        ((tx, state, model, "x"), ValueError, "'x' selects nothing"),
    ):
        with pytest.raises(error, match=match):
            optim.set_trainable(*arguments)
    with pytest.raises(ValueError, match=r"between steps, outside of jax.jit"):
        jax.jit(lambda state: optim.set_trainable(tx, state, model, "a"))(state)
