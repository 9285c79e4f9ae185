"""plan.state: the moments of a model before, as those of the model after; training goes on as if nothing had changed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from .test_plan import row
from .zoo import assert_close, assert_same, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")


@functools.partial(jax.jit, static_argnums=0)
def _steps(tx, state, model, steps):
    """The model and the state after some steps, each element by itself, so that it does not matter where it stands."""
    step = lambda i, carry: optim.step(tx, jax.tree.map(lambda x: jnp.sin(x + i), carry[0]), carry[1], carry[0])
    return jax.lax.fori_loop(0, steps, step, (model, state))


@functools.cache
def made(form, rule, *trainable):
    """`flat` and `stacked` try each of their transformations at the first `init`."""
    return form(rule, *trainable)


def filled(state):
    """The state with distinct numbers in all arrays but the counts."""
    leaves, treedef = jax.tree.flatten(state)
    numbers = lambda i, x: (
        row(*x.shape, dtype=x.dtype, start=9 * i) if jnp.issubdtype(x.dtype, jnp.inexact) else 5 + 0 * x
    )
    return treedef.unflatten([jnp.asarray(numbers(i, leaf)) for i, leaf in enumerate(leaves)])


# -- Changes and rules -------------------------------------------------------------------------------------------------


def _before():
    model = {
        "k": ramp(2, 2),
        "kv": ramp(4, 2),
        "q": ramp(2, 2),
        "rows": [ramp(2) + i for i in range(3)],
        "table": ramp(3, 2),
    }
    return {"net": model, "z": ramp(2)}


RENAMES = {"net.**": "model.**"}
_JOIN, _PART = (lambda *arrays: jnp.concatenate(arrays)), (lambda array: jnp.split(array, 2))
CHANGES = {
    ("net.q", "net.k"): "qk",
    "net.kv": ("k2", "v2"),
    "net.rows.*": "rows",
    "net.table": "table.*",
}
BACK = {right: left for left, right in CHANGES.items()}
FUNCTIONS = {("net.q", "net.k"): _JOIN, "net.kv": _PART}
BACK_FUNCTIONS = {"qk": _PART, ("k2", "v2"): _JOIN}


def _after():
    names = {
        "k2": ramp(2, 2),
        "v2": ramp(2, 2),
        "qk": ramp(4, 2),
        "rows": ramp(3, 2),
        "table": [ramp(2) for _ in range(3)],
    }
    return names | {"z": ramp(2)}


_ADAMW = optax.inject_hyperparams(optax.adamw)(0.1, weight_decay=0.01)
ELEMENTWISE = {
    "clip": (optim.trainable, optax.chain(optim.clip_by_global_norm(1.0), _ADAMW)),
    "MultiSteps": (optim.trainable, optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation()),
    "per leaf": (optim.trainable, optim.per_leaf(optax.adam(0.1))),
    "vector": (optim.flat, _ADAMW),
    "stacks": (optim.stacked, optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.1))),
    "stacks per leaf": (optim.stacked, optim.per_leaf(optax.adam(0.1))),
}
OTHERS = {
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "masked": optax.chain(
        optax.masked(optax.sgd(0.1, momentum=0.9), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
        optax.adam(0.1),
    ),
    "groups": optim.groups({"**.rows": optax.sgd(0.1, momentum=0.9)}, default=optax.adam(0.1)),
}
elementwise = pytest.mark.parametrize(("form", "rule"), ELEMENTWISE.values(), ids=ELEMENTWISE.keys())


@pytest.mark.parametrize(
    ("form", "rule"),
    [*ELEMENTWISE.values(), *((optim.trainable, rule) for rule in OTHERS.values())],
    ids=[*ELEMENTWISE, *OTHERS],
)
def test_renamed_it_goes_on_bit_for_bit(form, rule, tmp_path):
    tx, old = made(form, rule), _before()
    old, state = _steps(tx, tx.init(old), old, 4)
    saving.save(tmp_path / "run.safetensors", {"model": old, "optimiser": state})
    plan = saving.plan(tp.layout(old), {"model": _before()["net"], "z": ramp(2)}, rename=RENAMES)
    new = plan(old)
    carried = plan.state(state, like=tx.init(new))
    assert jax.tree.structure(carried) == jax.tree.structure(tx.init(new))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(carried))
    from_file = plan.state(saving.names(tmp_path / "run.safetensors", "optimiser"), like=tx.init(new))
    assert not tp.diff(from_file, carried)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(from_file))
    old, state = _steps(tx, state, old, 3)
    new, carried = _steps(tx, carried, new, 3)
    assert_same(new, plan(old))
    assert_same(jax.tree.leaves(carried), jax.tree.leaves(state))


@elementwise
def test_split_merged_stacked_unstacked_it_goes_on(form, rule):
    tx, old = made(form, rule), _before()
    old, state = _steps(tx, tx.init(old), old, 4)
    plan = saving.plan(old, _after(), rename=CHANGES, transform=FUNCTIONS)
    new = plan(old)
    carried = plan.state(state, like=tx.init(new))
    assert jax.tree.structure(carried) == jax.tree.structure(tx.init(new))
    back = saving.plan(new, old, rename=BACK, transform=BACK_FUNCTIONS)
    assert_same(back.state(carried, like=tx.init(old)), state)
    assert_same(back(new), old)
    old, _ = _steps(tx, state, old, 3)
    new, carried = jax.jit(_steps, static_argnums=0, donate_argnums=1)(tx, carried, new, 3)
    assert_close(new, plan(old), 1e-6)
    assert [int(count) for count in carried.counts] == [7]


def test_what_is_carried_may_be_donated():
    """With all that it was made of still there."""
    tx, old = made(*ELEMENTWISE["per leaf"]), _before()
    plan = saving.plan(old, _after(), rename=CHANGES, transform=FUNCTIONS)
    state, new = filled(tx.init(old)), plan(old)
    like = tx.init(new)
    jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)(plan.state(state, like))
    assert_same(plan.state(state, like), plan.state(state, tx.init(new)))
    renamed = saving.plan(old, {"model": _before()["net"], "z": ramp(2)}, rename=RENAMES)
    like = tx.init(renamed(old))
    jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)(renamed.state(state, like))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, like)))


# -- Paths that look like those of a state -----------------------------------------------------------------------------

LOOK_ALIKES = {
    "one position": [ramp(2, 2)],
    "positions": [ramp(2, 2), ramp(3), {"0": ramp(1)}],
    "adam": {"mu": ramp(2), "nu": {"mu": ramp(2, 2)}, "count": ramp(3)},
    "a count": {"count": ramp(3)},
    "a number": {"count": ramp()},
    "a trace": {"trace": ramp(2, 2)},
    "states": {"states": {"count": ramp(2)}, "inner_state": {"0": ramp(3)}, "runs": [ramp(2)]},
    "keys of stacks": {"float32[2]": ramp(2), "float32[3]": [ramp(3), ramp(2)]},
    "bare": ramp(2, 2),
    "one element": ramp(1),
}
PLAIN = {
    "adam": (optim.trainable, optax.adam(0.1)),
    "schedule": (optim.trainable, optax.sgd(optax.constant_schedule(0.1))),
    "per leaf": (optim.trainable, optim.per_leaf(optax.adam(0.1))),
    "injected": (optim.trainable, _ADAMW),
    "vector": (optim.flat, optax.sgd(0.1, momentum=0.9)),
    "stacks": (optim.stacked, optax.adam(0.1)),
}


@pytest.mark.parametrize("model", LOOK_ALIKES.values(), ids=LOOK_ALIKES.keys())
def test_paths_that_look_like_states(model):
    inside = {"net": tp.copy(model)}
    there = saving.plan(tp.layout(model), inside, rename={"**": "net.**"})
    back = saving.plan(tp.layout(inside), model, rename={"net.**": "**"})
    for form, rule in PLAIN.values():
        tx = made(form, rule)
        state = filled(tx.init(model))
        carried = there.state(state, like=tx.init(inside))
        assert jax.tree.structure(carried) == jax.tree.structure(tx.init(inside))
        # The order of leaves is the same in both.
        assert assert_same(jax.tree.leaves(carried), jax.tree.leaves(state)) > 0
        assert_same(back.state(carried, like=tx.init(model)), state)


# -- Histories ---------------------------------------------------------------------------------------------------------

_MODEL = {"a": ramp(2), "b": ramp(2), "c": ramp(3)}
_RULE = optax.adam(0.1)


def _history(tx, *choices, steps=1):
    """A state after steps in which now this, now that was trained."""
    state = tx.init(_MODEL)
    for choice in choices:
        state = optim.set_trainable(tx, state, _MODEL, choice)
        if steps:
            _, state = _steps(tx, state, _MODEL, steps)
    return state


@pytest.mark.parametrize("form", [optim.trainable, optim.flat, optim.stacked])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_plan_that_changes_nothing_is_as_thawing(form, steps):
    tx = made(form, _RULE)
    for choices in ((None, ("a", "b"), "c"), ("c", "a", ("a", "b"))):
        state = _history(made(form, _RULE, "c") if choices[0] else tx, *choices, steps=steps)
        for wanted in (None, ("a", "c")):
            thawed = optim.set_trainable(tx, state, _MODEL, wanted)
            like = made(form, _RULE, *([wanted] if wanted else [])).init(_MODEL)
            carried = saving.plan(_MODEL, _MODEL).state(state, like)
            assert carried.roles.running == thawed.roles.running
            assert_same((carried.runs, carried.counts), (thawed.runs, thawed.counts[: len(thawed.runs)]))
            assert carried.held == ()


@pytest.mark.parametrize("form", [optim.trainable, optim.flat, optim.stacked])
def test_what_has_no_source_begins_a_history_of_its_own(form):
    tx = made(form, _RULE)
    _, state = _steps(tx, tx.init(_MODEL), _MODEL, 4)
    new = {"a": ramp(2), "inserted": {"b": ramp(2), "w": ramp(2, 2)}, "z": ramp(2)}
    plan = saving.plan(_MODEL, new, rename={"b": "z", "c": None}, strict=False)
    carried = plan.state(state, like=tx.init(new))
    like = optim.set_trainable(tx, optim.set_trainable(tx, tx.init(new), new, ("a", "z"), reset=True), new)
    assert jax.tree.structure(carried) == jax.tree.structure(like)
    assert [int(count) for count in carried.counts] == [4, 0]
    assert_same(carried.runs[1], like.runs[1])
    # Steps, freezing and thawing go on.
    after, later = _steps(tx, carried, new, 1)
    np.testing.assert_allclose(jnp.abs(after["inserted"]["w"] - new["inserted"]["w"]), 0.1, rtol=1e-4)  # a first step
    frozen = optim.set_trainable(tx, later, after, "inserted.w")
    after, frozen = _steps(tx, frozen, after, 1)
    thawed = optim.set_trainable(tx, frozen, after)
    assert sorted(int(count) for count in thawed.counts) == [1, 2, 5]


def test_rates_that_were_set_go_along():
    tx = made(optim.trainable, _ADAMW)
    state = optim.adjust(tx.init(_MODEL), learning_rate=0.5)
    plan = saving.plan(_MODEL, {"x": ramp(2), "b": ramp(2), "new": ramp(1)}, rename={"a": "x", "c": None}, strict=False)
    carried = plan.state(state, tx.init({"x": ramp(2), "b": ramp(2), "new": ramp(1)}))
    assert [float(run.hyperparams["learning_rate"]) for run in carried.runs] == [0.5, np.float32(0.1)]


def test_nothing_comes_or_nothing_trains():
    tx = made(optim.trainable, _RULE)
    state, other = _history(tx, None), {"other": ramp(2)}
    nothing = saving.plan(_MODEL, other, strict=False)
    assert_same(nothing.state(state, tx.init(other)).runs, tx.init(other).runs)
    with pytest.warns(UserWarning, match="nothing is trained"):
        empty = tx.init({"n": jnp.arange(2)})
    assert_same(saving.plan(_MODEL, {"n": jnp.arange(2)}, strict=False).state(state, empty), empty)
    frozen = made(optim.trainable, _RULE, ("a", "c")).init(_MODEL)
    assert saving.plan(_MODEL, _MODEL).state(state, frozen).layout.paths == ("a", "c")


def test_ties_go_by_the_names_that_the_state_has():
    shared, tx = ramp(2, 2), made(optim.trainable, _RULE)
    tied, other = {"embed": shared, "head": shared}, {"lm": ramp(2, 2), "wte": ramp(2, 2)}
    state = filled(tx.init(tied))
    as_tied = dict.fromkeys(("out", "wte"), ramp(2, 2))
    moved = saving.plan(tp.layout(tied), as_tied, rename={"embed": "wte", "head": "out"})
    assert_same(jax.tree.leaves(moved.state(state, tx.init(as_tied))), jax.tree.leaves(state))
    untied = saving.plan(tp.layout(tied), other, rename={"embed": "wte", "head": "lm"})
    both = untied.state(state, tx.init(other)).runs[0][0]
    for moments, old in ((both.mu, state.runs[0][0].mu), (both.nu, state.runs[0][0].nu)):
        assert_same(list(moments.values()), [old["embed"]] * 2, identity=False)


def test_a_plan_of_a_plan():
    tx, old = made(optim.trainable, _RULE), {"a": ramp(2, 2)}
    first = saving.plan(old, {"b": ramp(2, 2)}, rename={"a": "b"})
    second = saving.plan(first, {"c": ramp(2, 2)}, rename={"b": "c"}, transform={"b": jnp.transpose})
    state = filled(tx.init(old))
    carried = second.state(first.state(state, tx.init(first(old))), tx.init({"c": ramp(2, 2)}))
    np.testing.assert_array_equal(carried.runs[0][0].mu["c"], state.runs[0][0].mu["a"].T)


# -- Refusals ----------------------------------------------------------------------------------------------------------


def _adam(model, form=optim.trainable):
    return made(form, _RULE).init(model)


def test_sources_of_different_histories():
    tx = made(optim.trainable, _RULE)
    merge = {"rename": {("a", "b"): "ab"}, "transform": {("a", "b"): _JOIN}}
    plan = saving.plan(_MODEL, {"ab": ramp(4), "c": ramp(3)}, **merge)
    like = _adam({"ab": ramp(4), "c": ramp(3)})
    with pytest.raises(
        ValueError, match="'ab' is made of parameters .* \\('a' 3, 'b' 2 steps\\), so there is no state"
    ):
        plan.state(_history(tx, None, None, "a"), like)
    with pytest.raises(ValueError, match=r"'ab' is made of parameters .* \('a' 1, 'b' no steps\)"):
        plan.state(_history(made(optim.trainable, _RULE, "a"), "a"), like)
    # Frozen without a step in between, they have.
    together = _history(tx, None, None)
    apart = optim.set_trainable(tx, together, _MODEL, ("a", "c"))
    assert_same(plan.state(apart, like), plan.state(together, like))


def _refused():
    other = {"w": ramp(2), "v": ramp(2), "c": ramp(3)}
    momentum = made(optim.trainable, optax.sgd(0.1, momentum=0.9))
    grouped = made(optim.stacked, optim.groups({"a": optax.adam(0.1)}, default=optax.adam(0.1)))
    groups = [
        made(optim.trainable, optim.groups({"a": optax.adam(0.1)}, default=optax.sgd(0.1, momentum=0.9))),
        made(optim.trainable, optim.groups({("a", "b"): optax.adam(0.1)}, default=optax.sgd(0.1, momentum=0.9))),
    ]
    adam = _adam(_MODEL)
    factors = made(optim.trainable, optax.adafactor(0.1)).init(_MODEL)
    return {
        "another rule": (momentum.init(_MODEL), adam, "the state has nothing at '0.count', .* made by another transform"),
        "the other way round": (adam, momentum.init(_MODEL), "the state has nothing at '0.trace.a'"),
        "one that keeps less": (adam, made(optim.trainable, optax.sgd(0.1)).init(_MODEL), "another transformation"),
        "one that keeps more": (adam, made(optim.trainable, optax.amsgrad(0.1)).init(_MODEL), "another transformation"),
        "other shapes": (factors, made(optim.trainable, optax.adafactor(0.1, min_dim_size_to_factor=1, momentum=0.1)).init(_MODEL), "another transformation"),
        "a vector": (_adam(_MODEL, optim.flat), adam, r"in another form \(optim.trainable, flat, stacked\)"),
        "for a vector": (adam, _adam(_MODEL, optim.flat), "in another form"),
        "stacks": (_adam(_MODEL, optim.stacked), _adam(_MODEL, optim.flat), "in another form"),
        "another group": (groups[0].init(_MODEL), groups[1].init(_MODEL), "a parameter is now in another group"),
        "groups over stacks": (grouped.init(_MODEL), grouped.init(_MODEL), "a state of optim.groups .* so it goes through no"),
        "another model": (_adam(other), adam, "the state is of 'c?[vw]?', and the plan's source has no such name"),
        "no state": (_MODEL, adam, r"expected a state of optim.trainable, flat or stacked, .*; got names such as a, b, c"),
        "plain Optax": (_RULE.init(_MODEL), adam, "expected a state of optim.trainable, flat or stacked, or the names of"),
        "several histories": (adam, _history(made(optim.trainable, _RULE), None, "a"), "got one with several histories"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    _NAMES := [
        "another rule",
        "the other way round",
        "one that keeps less",
        "one that keeps more",
        "other shapes",
        "a vector",
        "for a vector",
        "stacks",
        "another group",
        "groups over stacks",
        "another model",
        "no state",
        "plain Optax",
        "several histories",
    ],
)
def test_refused(name):
    source, like, message = functools.cache(_refused)()[name]
    with pytest.raises(ValueError, match=message):
        saving.plan(_MODEL, _MODEL).state(source, like)


@pytest.mark.usefixtures("without_type_checks")
def test_like_is_a_fresh_state():
    plan = saving.plan(_MODEL, _MODEL)
    for like, got in ((_MODEL, "dict"), (None, "NoneType"), (_RULE.init(_MODEL), "tuple")):
        with pytest.raises(
            TypeError, match=rf"expected a fresh state of the new model, like=tx.init\(model\), got {got}"
        ):
            plan.state(_adam(_MODEL), like)


def test_functions_that_do_more_than_move():
    plan = saving.plan(_MODEL, _MODEL, transform={"c": lambda c: 2 * c})
    np.testing.assert_array_equal(plan(_MODEL)["c"], 2 * _MODEL["c"])
    with pytest.raises(
        ValueError, match=r"<lambda>, from \['c'\] to \['c'\], changes or repeats them; the parameters alone"
    ):
        plan.state(_adam(_MODEL), _adam(_MODEL))


def test_what_is_no_longer_of_the_parameters_shape():
    factors, model = made(optim.trainable, OTHERS["adafactor"]), {"w": ramp(3, 3)}
    for function in (jnp.transpose, jnp.flip):
        plan = saving.plan(model, model, transform={"w": function})
        with pytest.raises(ValueError, match=rf"'w' is made of \['w'\] by {function.__name__}, .* parameters' shapes"):
            plan.state(factors.init(model), factors.init(model))
