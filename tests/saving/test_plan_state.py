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
from treeparams._forms.form import Form
from treeparams._forms.states import Copies, entries_of
from treeparams._slots.layout import index_of
from treeparams.optim._state import Roles, TrainableState, rule_of
from treeparams.optim._step import Rule

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
FORMS = {"tree": optim.trainable, "vector": VECTOR, "stacks": STACKS}
INJECTED = optax.inject_hyperparams(optax.adamw)(0.1, weight_decay=0.01)
_matrices = functools.partial(jax.tree.map, lambda x: x.ndim == 2)
# One rule for each kind of state: most of Optax keep some moments and a count, as Adam does.
ELEMENTWISE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 9), momentum=0.9),
    "adam": optax.adam(0.1),
    "rprop": optax.rprop(0.1),
    "chain": optax.chain(optim.clip_by_global_norm(1e6), INJECTED),
    "injected": INJECTED,
    "MultiSteps": optax.MultiSteps(optax.rmsprop(0.1), 2).gradient_transformation(),
    "if finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "plateau": optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
    "ema": optax.chain(optax.ema(0.9), optax.trace(0.9)),
    "cocob": optax.contrib.cocob(),
    "prodigy": optax.contrib.prodigy(),
    "lbfgs": optax.lbfgs(0.1, memory_size=2, linesearch=None),
    "schedule free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
}
BY_SHAPE = {
    "novograd": optax.novograd(0.1),
    "sm3": optax.sm3(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "muon": optax.contrib.muon(0.1),
    "masked": optax.masked(optax.trace(0.9), _matrices),
    "per leaf": optim.per_leaf(optax.adam(0.1)),
    "injected per leaf": optim.per_leaf(INJECTED),
    "factored per leaf": optim.per_leaf(optax.adafactor(0.1, min_dim_size_to_factor=2)),
    "groups": optim.groups({("x", "y"): optax.adam(0.1)}, default=optax.sgd(0.1, momentum=0.9)),
    "groups per leaf": optim.groups({("x", "y"): optim.per_leaf(INJECTED)}, default=optax.adam(0.1)),
}
RULES = ELEMENTWISE | BY_SHAPE
BACK_ARGUMENTS = {"rename": BACK, "transform": BACK_FUNCTIONS}
PLANS = {
    "renamed": ({"model": _before()["net"], "z": ramp(2)}, {"rename": RENAMES}, {"rename": {"model.**": "net.**"}}),
    "split, merged, stacked": (_after(), {"rename": CHANGES, "transform": FUNCTIONS}, BACK_ARGUMENTS),
}
# The first form is that of the old state, the second that of the new one.
LAW = [
    ("renamed", "adam", "stacks", "tree"),
    ("split, merged, stacked", "chain", "tree", "vector"),
    ("split, merged, stacked", "schedule", "vector", "stacks"),
    ("split, merged, stacked", "MultiSteps", "stacks", "stacks"),
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


# -- Paths that look like those of a state -----------------------------------------------------------------------------

LOOK_ALIKES = {
    "one position": ([ramp(2, 2)], [("momentum", "vector")]),
    "positions": ([ramp(2, 2), ramp(3), {"0": ramp(1)}], [("per leaf", "stacks"), ("adam", "stacks")]),
    "adam": ({"mu": ramp(2), "nu": {"mu": ramp(2, 2)}, "count": ramp(3)}, [("adam", "tree")]),
    "a count": ({"count": ramp(3)}, [("schedule", "tree"), ("injected", "tree")]),
    "a trace": ({"trace": ramp(2, 2)}, [("momentum", "vector")]),
    "states": (
        {"states": {"count": ramp(2)}, "inner_state": {"0": ramp(3)}, "runs": [ramp(2)]},
        [("per leaf", "stacks")],
    ),
    "keys of stacks": ({"float32[2]": ramp(2), "float32[3]": [ramp(3), ramp(2)]}, [("adam", "stacks")]),
    "bare": (ramp(2, 2), [("per leaf", "stacks"), ("momentum", "vector")]),
}


@pytest.mark.parametrize(("model", "rules"), LOOK_ALIKES.values(), ids=LOOK_ALIKES.keys())
def test_paths_that_look_like_states(model, rules):
    inside = {"net": tp.copy(model)}
    there = saving.plan(tp.layout(model), inside, rename={"**": "net.**"})
    back = saving.plan(tp.layout(inside), model, rename={"net.**": "**"})
    for name, form in rules:
        tx = made(FORMS[form], RULES[name])
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


def test_rates_that_were_set_go_along():
    tx, new = made(optim.trainable, INJECTED), {"x": ramp(2), "b": ramp(2), "new": ramp(1)}
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


# -- States without a program ------------------------------------------------------------------------------------------


def _fresh(rule, layout, start=0):
    """A state of NumPy arrays, with numbers that are not those of another one, and no trial of the rule."""
    like, at = rule.like(layout), index_of(layout).positions
    leaves, treedef = jax.tree.flatten(like.state)
    arrays = [np.asarray(np.arange(x.size).reshape(x.shape) + start + 50 * i, x.dtype) for i, x in enumerate(leaves)]
    roles = Roles(layout, (at,), (), (like.division,))
    return TrainableState((treedef.unflatten(arrays),), (), (np.array(int(start > 0), np.int32),), roles)


def _copies(state, number=0):
    return Copies(entries_of(state.runs[number]), state.roles.divisions[number])


def _pieces(copies, names=lambda path: path):
    """What each parameter has, alone, by place and name; and what is shared."""
    alone = {(at, names(path)): copies.piece(at, path).alone() for at, path in copies.at}
    return alone | {entries: copies.shared(entries) for entries in copies.common}


def _assert_pieces(got, want):
    assert got.keys() == want.keys()
    for at, array in want.items():
        np.testing.assert_array_equal(got[at], array)
    return len(want)


OLD = {"x": ramp(2, 3), "y": ramp(2, 3), "deep": {"z": ramp(3)}, "s": ramp()}
NEW = {"x": ramp(2, 3), "y": ramp(2, 3), "w": ramp(3), "s": ramp()}
MORE = {"begins": ramp(2, 3), "late": ramp(2)}
RENAME = {"x": "y", "y": "x", "deep.z": "w"}
OLD_LAYOUT, NEW_LAYOUT = tp.layout(OLD), tp.layout(NEW)
NAMES = RENAME | {"s": "s"}


# Over the vector and the tree, which have the pieces of the stacks by themselves, a few.
FEW = ["adam", "injected", "MultiSteps"]
AS_TREES = ["lbfgs", "novograd", "sm3", "adafactor", "muon", "masked", "groups"]
CASES = [
    *((name, form) for name in FEW for form in ("tree", "vector")),
    *((name, "tree") for name in AS_TREES),
    *((name, "stacks") for name in RULES if name not in AS_TREES[:5]),
]


def _cases(cases):
    return pytest.mark.parametrize(("name", "form"), cases, ids=map("-".join, cases))


@functools.cache
def _rule(name, form):
    return rule_of(FORMS[form](RULES[name]))


@functools.cache
def _plans():
    back = {right: left for left, right in RENAME.items()}
    return saving.plan(OLD_LAYOUT, NEW, rename=RENAME), saving.plan(NEW_LAYOUT, OLD, rename=back)


@_cases(CASES)
def test_there_and_back(name, form):
    rule, (there, back) = _rule(name, form), _plans()
    state, like = _fresh(rule, OLD_LAYOUT, 7), _fresh(rule, NEW_LAYOUT)
    carried = there.state(state, like)
    assert jax.tree.structure(carried) == jax.tree.structure(like)
    _assert_pieces(_pieces(_copies(carried)), _pieces(_copies(state), NAMES.__getitem__))
    assert_same(back.state(carried, _fresh(rule, OLD_LAYOUT)), state)


@_cases([
    ("adam", "vector"),
    ("prodigy", "stacks"),
    ("injected per leaf", "stacks"),
    ("sm3", "tree"),
    ("groups per leaf", "stacks"),
])
def test_what_begins_is_fresh_and_the_rest_as_it_was(name, form):
    rule, model = _rule(name, form), OLD | MORE
    layout = tp.layout(model)
    state, like = _fresh(rule, OLD_LAYOUT, 7), _fresh(rule, layout)
    made = saving.plan(OLD, model, strict=False).state(state, like)
    assert [each.layout.paths for each in rule.histories(made)] == [OLD_LAYOUT.paths, ("begins", "late")]
    assert [int(count) for count in made.counts] == [1, 0]
    _assert_pieces(_pieces(_copies(made)), _pieces(_copies(state)))
    begun, fresh = (_pieces(_copies(its, number)) for its, number in ((made, 1), (like, 0)))
    _assert_pieces(begun, {at: fresh[at] for at in begun})


# -- Wrong before ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda n: {"head": ramp(n, 3), "b": ramp(2)}, lambda n: [ramp(n, 3), ramp(7, 2)]])
def test_a_padded_vector_is_not_opened_as_another_one(make, tmp_path):
    """Of 10 classes or of 11 it is as long."""
    path, runs = tmp_path / "run.safetensors", []
    for classes in (10, 11):
        layout = tp.layout(make(classes))
        form = Form.vector(layout, pad_to=128)
        rule = Rule(optax.adam(0.1), None, lambda _, form=form: form)
        vector, restructure = tp.ravel(make(classes), pad_to=128)
        runs.append(({"vector": vector, "back": restructure}, {"vector": vector, "state": _fresh(rule, layout, 1)}))
    for ours, theirs in zip(*runs, strict=True):
        saving.save(path, ours)
        assert_same(jax.tree.leaves(saving.load(path, ours)), jax.tree.leaves(ours))
        with pytest.raises(ValueError, match=r"of shape \(11, 3\) in the tree, .*of shape \(10, 3\) in the file"):
            saving.load(path, theirs)


def test_a_vector_of_the_same_parameters_in_another_order_is_not_opened(tmp_path):
    path = tmp_path / "run.safetensors"
    one, other = (dataclasses.make_dataclass("Model", names) for names in (["a", "b"], ["b", "a"]))
    for cls in (one, other):
        jax.tree_util.register_dataclass(cls, [field.name for field in dataclasses.fields(cls)], [])
    runs = [dict(zip(("vector", "back"), tp.ravel(cls(a=ramp(2), b=ramp(2) + 1)), strict=True)) for cls in (one, other)]
    saving.save(path, runs[0])
    with pytest.raises(ValueError, match=r"'back' opens, 'b' is \[0:2\] of shape \(2,\) in the tree, \[2:4\] of shape"):
        saving.load(path, runs[1])
    tx = optim.trainable(optax.adam(0.1), form="vector")
    saving.save(path, tx.init(one(a=ramp(2), b=ramp(2))))
    for like, names in (
        ({"u": ramp(4)}, "u in the tree, a, b in the file"),
        ({"a": ramp(4)}, "a in the tree, a, b in"),
    ):
        with pytest.raises(
            ValueError, match=rf"(?s)does not fit.*state at '' holds {names}.*saving.plan\(path, model, ren"
        ):
            saving.load(path, tx.init(like))
