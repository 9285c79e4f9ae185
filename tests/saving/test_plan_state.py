"""plan.state: the moments of a model before, as those of the model after; training goes on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from ..zoo import STACKS, VECTOR, assert_close, assert_same, ramp
from .test_plan import row

pytestmark = pytest.mark.usefixtures("standard_promotion")


@functools.partial(jax.jit, static_argnums=0)
def _steps(tx, state, model, steps):
    """The model and the state after some steps, each element by itself, so that it does not matter where it stands."""
    step = lambda i, carry: optim.step(tx, jax.tree.map(lambda x: jnp.sin(x + i), carry[0]), carry[1], carry[0])
    return jax.lax.fori_loop(0, steps, step, (model, state))


_donated_steps = jax.jit(_steps, static_argnums=0, donate_argnums=1)


@functools.cache
def made(form, rule, *trainable):
    """`flat` and `stacked` try each of their transformations at the first `init`."""
    return form(rule, *trainable)


def fresh(tx, model):
    """What `tx.init(model)` returns, with zeros of NumPy: JAX compiles a program for each of its own."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(tx.init, model))


def taken(state, steps=2):
    """The state with other numbers in all that runs, as if steps had been taken."""
    floats = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    leaves, treedef = jax.tree.flatten(state.runs)
    runs = [
        row(*x.shape, dtype=x.dtype, start=9 * i) if floats(x) else np.asarray(x + steps, x.dtype)
        for i, x in enumerate(leaves)
    ]
    counts = [np.asarray(count + steps * (i < len(state.runs)), np.int32) for i, count in enumerate(state.counts)]
    return dataclasses.replace(state, runs=treedef.unflatten(runs), counts=tuple(counts))


# -- Changes and rules -------------------------------------------------------------------------------------------------


def _before():
    model = {"k": ramp(2, 2), "kv": ramp(4, 2), "q": ramp(2, 2), "rows": [ramp(2) + i for i in range(3)]}
    return {"net": model | {"table": ramp(3, 2)}, "z": ramp(2)}


RENAMES = {"net.**": "model.**"}
JOIN, _PART = (lambda *arrays: jnp.concatenate(arrays)), (lambda array: jnp.split(array, 2))
CHANGES = {
    ("net.q", "net.k"): "qk",
    "net.kv": ("k2", "v2"),
    "net.rows.*": "rows",
    "net.table": "table.*",
}
BACK = {right: left for left, right in CHANGES.items()}
FUNCTIONS = {("net.q", "net.k"): JOIN, "net.kv": _PART}
BACK_FUNCTIONS = {"qk": _PART, ("k2", "v2"): JOIN}


def _after():
    model = {"k2": ramp(2, 2), "v2": ramp(2, 2), "qk": ramp(4, 2), "rows": ramp(3, 2)}
    return model | {"table": [ramp(2) for _ in range(3)], "z": ramp(2)}


RULE = optax.adam(0.1)
_ADAMW = optax.inject_hyperparams(optax.adamw)(0.1, weight_decay=0.01)
FORMS = {"tree": optim.trainable, "vector": VECTOR, "stacks": STACKS}
RULES = {
    "adam": optax.adam(0.1),
    "injected": optax.chain(optim.clip_by_global_norm(1e6), _ADAMW),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 9), momentum=0.9),
    "every other step": optax.MultiSteps(optax.rmsprop(0.1), 2).gradient_transformation(),
}
BACK_ARGUMENTS = {"rename": BACK, "transform": BACK_FUNCTIONS}
PLANS = {
    "renamed": ({"model": _before()["net"], "z": ramp(2)}, {"rename": RENAMES}, {"rename": {"model.**": "net.**"}}),
    "split, merged, stacked": (_after(), {"rename": CHANGES, "transform": FUNCTIONS}, BACK_ARGUMENTS),
}
# The first form is that of the old state, the second that of the new one.
LAW = [
    ("renamed", "adam", "stacks", "tree"),
    ("split, merged, stacked", "injected", "tree", "vector"),
    ("split, merged, stacked", "schedule", "vector", "stacks"),
    ("split, merged, stacked", "every other step", "stacks", "stacks"),
]


@pytest.mark.parametrize(("plan", "rule", "one", "other"), LAW, ids=map(", ".join, LAW))
def test_steps_a_plan_and_steps_are_a_plan_of_all_steps(plan, rule, one, other, tmp_path):
    """k steps, plan, k steps = plan of 2k steps; there and back is what it was; a file is as good as memory."""
    (new, arguments, back), old = PLANS[plan], _before()
    tx, its = made(FORMS[one], RULES[rule]), made(FORMS[other], RULES[rule])
    there, again = saving.plan(tp.layout(old), new, **arguments), saving.plan(tp.layout(new), old, **back)
    half, state = _steps(tx, tx.init(old), old, 3)
    saving.save(tmp_path / "run.safetensors", {"model": half, "optimiser": state})
    whole, whole_state = _steps(tx, state, half, 3)
    fresh_one = its.init(there(half))
    carried = there.state(state, like=fresh_one)
    assert jax.tree.structure(carried) == jax.tree.structure(fresh_one)
    assert_same(there.state(saving.names(tmp_path / "run.safetensors", "optimiser"), like=fresh_one), carried)
    assert_same(again.state(carried, like=tx.init(old)), state, identity=False)
    assert_same(again(there(half)), half, identity=False)
    got, got_state = _donated_steps(its, carried, there(half), 3)
    assert [int(count) for count in got_state.counts] == [6]
    assert_close(got, there(whole), 1e-6)
    assert_close(got_state.runs, there.state(whole_state, like=its.init(got)).runs, 1e-6)


# -- Functions ---------------------------------------------------------------------------------------------------------

_MASK = np.float32([[1, 0, 1], [0, 1, 1]])
MOVED = {
    "rounded": (lambda x: x.astype(jnp.bfloat16)[:, ::-1].astype(jnp.float32), lambda _, x: x[:, ::-1]),
    "narrow": (lambda x: x.T.astype(jnp.bfloat16), lambda _, x: x.T),
    "mask": (lambda x: x * _MASK, lambda begun, x: np.where(_MASK, x, begun)),
    "set": (lambda x: x.at[:, 1].set(0), lambda begun, x: np.where([True, False, True], x, begun)),
}


_BEGINS = optax.chain(optax.scale_by_adam(mu_dtype=jnp.float32), optax.scale_by_rss(initial_accumulator_value=0.25))


@pytest.mark.parametrize("name", MOVED)
def test_moments_are_moved_as_they_are(name):
    """In their own dtype, and where a mask drops elements they begin as the rule has them begin, not at zero."""
    function, by_hand = MOVED[name]
    old = {"v": ramp(3), "w": row(2, 3, start=1) / 7}
    new = {"v": ramp(3), "w": np.asarray(function(jnp.asarray(old["w"])))}
    plan = saving.plan(old, new, transform={"w": function})
    for form in [optim.trainable, VECTOR][: 1 + (name == "mask")]:
        tx = made(form, _BEGINS)
        like = dataclasses.replace(its := fresh(tx, new), runs=((its.runs[0][0], _filled(its.runs[0][1], 0.25)),))
        state = taken(fresh(tx, old))
        carried = plan.state(state, like)
        for find in (lambda run: run[0].mu, lambda run: run[0].nu, lambda run: run[1].sum_of_squares):
            before, after, begun = (find(its.runs[0]) for its in (state, carried, like))
            if form is VECTOR:
                before, after, begun = before[3:].reshape(2, 3), after[3:9].reshape(new["w"].shape), begun[-1]
            else:
                before, after, begun = before["w"], after["w"], begun["w"].ravel()[0]
            want = by_hand(np.asarray(begun, np.float32), np.asarray(before, np.float32))
            np.testing.assert_array_equal(after, want.astype(after.dtype))


def _filled(tree, value):
    return jax.tree.map(lambda leaf: np.full(leaf.shape, value, leaf.dtype), tree)


# -- Paths that look like those of a state -----------------------------------------------------------------------------

PLAIN = {
    "adam": (optim.trainable, optax.adam(0.1)),
    "schedule": (optim.trainable, optax.sgd(optax.constant_schedule(0.1))),
    "per leaf": (STACKS, optim.per_leaf(optax.adam(0.1))),
    "injected": (optim.trainable, _ADAMW),
    "vector": (VECTOR, optax.sgd(0.1, momentum=0.9)),
    "stacks": (STACKS, optax.adam(0.1)),
}
LOOK_ALIKES = {
    "one position": ([ramp(2, 2)], ["vector"]),
    "positions": ([ramp(2, 2), ramp(3), {"0": ramp(1)}], ["per leaf", "stacks"]),
    "adam": ({"mu": ramp(2), "nu": {"mu": ramp(2, 2)}, "count": ramp(3)}, ["adam"]),
    "a count": ({"count": ramp(3)}, ["schedule", "injected"]),
    "a trace": ({"trace": ramp(2, 2)}, ["vector"]),
    "states": (
        {"states": {"count": ramp(2)}, "inner_state": {"0": ramp(3)}, "runs": [ramp(2)]},
        ["per leaf"],
    ),
    "keys of stacks": ({"float32[2]": ramp(2), "float32[3]": [ramp(3), ramp(2)]}, ["stacks"]),
    "bare": (ramp(2, 2), ["per leaf", "vector"]),
}


@pytest.mark.parametrize(("model", "rules"), LOOK_ALIKES.values(), ids=LOOK_ALIKES.keys())
def test_paths_that_look_like_states(model, rules):
    inside = {"net": tp.copy(model)}
    there = saving.plan(tp.layout(model), inside, rename={"**": "net.**"})
    back = saving.plan(tp.layout(inside), model, rename={"net.**": "**"})
    for name in rules:
        tx = made(*PLAIN[name])
        state, like = taken(fresh(tx, model)), fresh(tx, inside)
        carried = there.state(state, like)
        assert jax.tree.structure(carried) == jax.tree.structure(like)
        assert assert_same(jax.tree.leaves(carried), jax.tree.leaves(state)) > 0  # in one order
        assert_same(back.state(carried, fresh(tx, model)), state)


# -- Histories ---------------------------------------------------------------------------------------------------------

MODEL = {"a": ramp(2), "b": ramp(2), "c": ramp(3)}


def history(form, *choices, steps=2):
    """A state after steps in which now this, now that was trained."""
    tx = made(form, RULE)
    state = fresh(made(form, RULE, choices[0]), MODEL)
    for choice in choices:
        state = taken(optim.set_trainable(tx, state, MODEL, choice), steps)
    return state


@pytest.mark.parametrize(("form", "steps"), [(optim.trainable, 2), (STACKS, 0)])
def test_what_waits_waits_afterwards(form, steps, tmp_path):
    """A plan that changes nothing gives the state as it is; thawed, it is what it would have been without a plan."""
    tx, plan = made(form, RULE), saving.plan(MODEL, MODEL)
    for choices in ((None, ("a", "b"), "c"), ("c", "a", ("a", "b"))):
        state = history(form, *choices, steps=steps)
        carried = plan.state(state, fresh(tx, MODEL))
        roles = [its.roles for its in (carried, state)]
        assert roles[0] == roles[1]
        assert assert_same((carried.runs, carried.held, carried.counts), (state.runs, state.held, state.counts)) > 7
        saving.save(tmp_path / "run.safetensors", state)
        assert_same(plan.state(saving.names(tmp_path / "run.safetensors"), fresh(tx, MODEL)), carried)
        some = plan.state(state, fresh(made(form, RULE, ("a", "c")), MODEL))
        for wanted, its in ((None, carried), (("a", "c"), carried), (("a", "c"), some)):
            thawed = optim.set_trainable(tx, state, MODEL, wanted)
            again = optim.set_trainable(tx, its, MODEL, wanted)
            assert again.roles.running == thawed.roles.running
            assert_same((again.runs, again.counts[: len(again.runs)]), (thawed.runs, thawed.counts[: len(thawed.runs)]))
        assert not {"b"} & {
            slot for copies in some.roles.divisions for own in copies.owners if own for slot in own.paths
        }


@pytest.mark.parametrize("form", [optim.trainable, VECTOR], ids=["tree", "vector"])
def test_parameters_that_wait_are_renamed_moved_and_stepped_around(form):
    tx, new = made(form, RULE), {"c": ramp(3), "w": ramp(2, 2), "x": ramp(3, 2)}
    plan = saving.plan(
        MODEL, new, rename={("a", "b"): "w"}, transform={("a", "b"): lambda *two: jnp.stack(two)[:, ::-1]}, strict=False
    )
    state = history(form, None, "c")
    carried = plan.state(state, tx.init(new))
    assert carried.layout.paths == ("c", "x")
    assert [int(count) for count in carried.counts] == [4, 0, 2]
    old, now = (optim.set_trainable(tx, each, model).runs for each, model in ((state, MODEL), (carried, new)))
    assert (len(old), len(now)) == (2, 3)
    if form is optim.trainable:
        for before, after in zip(state.held[0][0][1:], carried.held[0][0][1:], strict=True):
            np.testing.assert_array_equal(after["w"], np.stack([before["a"], before["b"]])[:, ::-1])
        after, later = _steps(tx, carried, new, 1)
        assert_same((after["w"], later.held), (new["w"], carried.held), identity=False)
        assert [int(count) for count in later.counts] == [5, 1, 2]
    with pytest.raises(ValueError, match=r"'w' is made of parameters .* \('a' 4 steps, 'b' waits after 2 steps\)"):
        plan.state(history(form, None, "a"), tx.init(new))


@pytest.mark.parametrize("form", [optim.trainable, VECTOR])
def test_what_has_no_source_begins_a_history_of_its_own(form):
    tx, new = made(form, RULE), {"a": ramp(2), "inserted": {"b": ramp(2), "w": ramp(2, 2)}, "z": ramp(2)}
    plan = saving.plan(MODEL, new, rename={"b": "z", "c": None}, strict=False)
    carried = plan.state(taken(fresh(tx, MODEL), 4), fresh(tx, new))
    both = taken(optim.set_trainable(tx, fresh(tx, new), new, ("a", "z"), reset=True), 4)
    like = optim.set_trainable(tx, both, new)
    assert jax.tree.structure(carried) == jax.tree.structure(like)
    assert [int(count) for count in carried.counts] == [4, 0]
    assert_same(carried.runs[1], like.runs[1])
    thawed = optim.set_trainable(tx, optim.set_trainable(tx, carried, new, "inserted.w"), new)
    assert_same(thawed, carried)
    # One that is frozen, and thawed later.
    waits = plan.state(taken(fresh(tx, MODEL), 4), fresh(made(form, RULE, "a"), new))
    assert (waits.layout.paths, len(optim.set_trainable(tx, waits, new).runs)) == (("a",), 2)
    if form is optim.trainable:
        after, later = _steps(tx, carried, new, 1)
        np.testing.assert_allclose(jnp.abs(after["inserted"]["w"] - new["inserted"]["w"]), 0.1, rtol=1e-4)
        assert [int(count) for count in later.counts] == [5, 1]


def test_rates_that_were_set_go_along():
    tx, new = made(optim.trainable, _ADAMW), {"x": ramp(2), "b": ramp(2), "new": ramp(1)}
    plan = saving.plan(MODEL, new, rename={"a": "x", "c": None}, strict=False)
    carried = plan.state(optim.adjust(fresh(tx, MODEL), learning_rate=0.5), fresh(tx, new))
    assert [float(run.hyperparams["learning_rate"]) for run in carried.runs] == [0.5, 0.5]


def test_nothing_comes_or_nothing_trains():
    tx = made(optim.trainable, RULE)
    state, other = taken(fresh(tx, MODEL)), {"other": ramp(2)}
    nothing = saving.plan(MODEL, other, strict=False)
    assert_same(nothing.state(state, fresh(tx, other)).runs, fresh(tx, other).runs)
    with pytest.warns(UserWarning, match="nothing is trained"):
        empty = tx.init({"n": jnp.arange(2)})
    assert_same(saving.plan(MODEL, {"n": jnp.arange(2)}, strict=False).state(state, empty), empty)
    frozen = fresh(made(optim.trainable, RULE, ("a", "c")), MODEL)
    assert saving.plan(MODEL, MODEL).state(state, frozen).layout.paths == ("a", "c")


def test_ties_go_by_the_names_that_the_state_has():
    shared, tx = ramp(2, 2), made(optim.trainable, RULE)
    tied, other = {"embed": shared, "head": shared}, {"lm": ramp(2, 2), "wte": ramp(2, 2)}
    state = taken(tx.init(tied))
    as_tied = dict.fromkeys(("out", "wte"), ramp(2, 2))
    moved = saving.plan(tp.layout(tied), as_tied, rename={"embed": "wte", "head": "out"})
    assert_same(jax.tree.leaves(moved.state(state, tx.init(as_tied))), jax.tree.leaves(state))
    untied = saving.plan(tp.layout(tied), other, rename={"embed": "wte", "head": "lm"})
    made_of_one = untied.state(state, fresh(tx, other)).runs[0][0]
    for moments, old in ((made_of_one.mu, state.runs[0][0].mu), (made_of_one.nu, state.runs[0][0].nu)):
        assert_same(list(moments.values()), [old["embed"]] * 2, identity=False)
