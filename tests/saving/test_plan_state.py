"""plan.state: the moments of a model before, as those of the model after; training goes on; and what it refuses."""

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
from .files import flipped, fresh, refused, taken, there_and_back

pytestmark = pytest.mark.usefixtures("standard_promotion")


@functools.partial(jax.jit, static_argnums=0)
def _steps(tx, state, model, steps):
    """The model and the state after some steps, each element by itself, so that it does not matter where it stands."""
    step = lambda i, carry: optim.step(tx, jax.tree.map(lambda x: jnp.sin(x + i), carry[0]), carry[1], carry[0])
    return jax.lax.fori_loop(0, steps, step, (model, state))


_donated_steps = jax.jit(_steps, static_argnums=0, donate_argnums=1)


@functools.cache
def made(form, rule, *trainable):
    """Vectors and stacks try each of their transformations at the first `init`."""
    return form(rule, *trainable)


counts_of = lambda state: [int(count) for count in state.counts]
JOIN, _PART = (lambda *arrays: jnp.concatenate(arrays)), (lambda array: jnp.split(array, 2))
_NET = {"k": ramp(2, 2), "kv": ramp(4, 2), "q": ramp(2, 2), "rows": [ramp(2) + i for i in range(3)]}
BEFORE = {"net": _NET | {"table": ramp(3, 2)}, "z": ramp(2)}
AFTER = {"k2": ramp(2, 2), "v2": ramp(2, 2), "qk": ramp(4, 2), "rows": ramp(3, 2)}
AFTER |= {"table": [ramp(2) for _ in range(3)], "z": ramp(2)}
CHANGES = {("net.q", "net.k"): "qk", "net.kv": ("k2", "v2"), "net.rows.*": "rows", "net.table": "table.*"}
THERE = {"rename": CHANGES, "transform": {("net.q", "net.k"): JOIN, "net.kv": _PART}}
BACK = {"rename": flipped(CHANGES), "transform": {"qk": _PART, ("k2", "v2"): JOIN}}
MOVED = {"model": BEFORE["net"], "z": ramp(2)}
PLANS = {
    "renamed": (MOVED, {"rename": {"net.**": "model.**"}}, {"rename": {"model.**": "net.**"}}),
    "split, merged, stacked": (AFTER, THERE, BACK),
}
MODEL = {"a": ramp(2), "b": ramp(2), "c": ramp(3)}
RULE, MOMENTUM = optax.adam(0.1), optax.sgd(0.1, momentum=0.9)
SCHEDULE = optax.sgd(optax.constant_schedule(0.1))
_state = lambda rule=RULE, model=MODEL: fresh(made(optim.trainable, rule), model)
FORMS = {"tree": optim.trainable, "vector": VECTOR, "stacks": STACKS}
INJECTED = optax.inject_hyperparams(optax.adamw)(0.1, weight_decay=0.01)
FACTORS, SM3 = optax.adafactor(0.1, min_dim_size_to_factor=2), optax.sm3(0.1)
LBFGS = optax.lbfgs(0.1, memory_size=2, linesearch=None)
_matrices = functools.partial(jax.tree.map, lambda x: x.ndim == 2)
# One rule for each kind of state: most of Optax keep some moments and a count, as Adam does.
RULES = {
    "sgd": optax.sgd(0.1),
    "momentum": MOMENTUM,
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 9), momentum=0.9),
    "adam": RULE,
    "chain": optax.chain(optim.clip_by_global_norm(1e6), INJECTED),
    "injected": INJECTED,
    "MultiSteps": optax.MultiSteps(optax.rmsprop(0.1), 2).gradient_transformation(),
    "if finite": optax.apply_if_finite(RULE, 3),
    "plateau": optax.chain(RULE, optax.contrib.reduce_on_plateau()),
    "prodigy": optax.contrib.prodigy(),
    "lbfgs": LBFGS,
    "schedule free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "novograd": optax.novograd(0.1),
    "sm3": SM3,
    "adafactor": FACTORS,
    "muon": optax.contrib.muon(0.1),
    "masked": optax.masked(optax.trace(0.9), _matrices),
    "per leaf": optim.per_leaf(RULE),
    "injected per leaf": optim.per_leaf(INJECTED),
    "factored per leaf": optim.per_leaf(FACTORS),
    "groups": optim.groups({("x", "y"): RULE}, default=MOMENTUM),
    "group without moments": optim.groups({("x", "y"): SCHEDULE}, default=RULE),
    "groups per leaf": optim.groups({("x", "y"): optim.per_leaf(INJECTED)}, default=RULE),
}
# The first form is that of the old state, the second that of the new one.
LAW = [
    ("renamed", "adam", "stacks", "tree"),
    ("split, merged, stacked", "injected", "tree", "vector"),
    ("split, merged, stacked", "schedule", "vector", "stacks"),
]


@pytest.mark.parametrize(("plan", "rule", "one", "other"), LAW, ids=map(", ".join, LAW))
def test_steps_a_plan_and_steps_are_a_plan_of_all_steps(plan, rule, one, other, path):
    (new, arguments, back), old = PLANS[plan], BEFORE
    tx, its = made(FORMS[one], RULES[rule]), made(FORMS[other], RULES[rule])
    there, again = saving.plan(tp.layout(old), new, **arguments), saving.plan(tp.layout(new), old, **back)
    half, state = _steps(tx, jax.jit(tx.init)(old), old, 3)
    saving.save(path, {"model": half, "optimiser": state})
    whole, whole_state = _steps(tx, state, half, 3)
    fresh_one, moved = fresh(its, new), jax.jit(there)
    carried = there.state(state, like=fresh_one)
    assert jax.tree.structure(carried) == jax.tree.structure(fresh_one)
    assert_same(there.state(saving.names(path, "optimiser"), like=fresh_one), carried)
    assert_same(again.state(carried, like=fresh(tx, old)), state, identity=False)
    assert_same(jax.jit(again)(moved(half)), half, identity=False)
    got, got_state = _donated_steps(its, carried, moved(half), 3)
    assert counts_of(got_state) == [6]
    assert_close(got, moved(whole), 1e-6)
    assert_close(got_state.runs, there.state(whole_state, like=fresh_one).runs, 1e-6)


def _fresh(rule, layout, start=0):
    like, at = rule.like(layout), index_of(layout).positions
    leaves, treedef = jax.tree.flatten(like.state)
    arrays = [np.asarray(np.arange(x.size).reshape(x.shape) + start + 50 * i, x.dtype) for i, x in enumerate(leaves)]
    roles = Roles(layout, (at,), (), (like.division,))
    return TrainableState((treedef.unflatten(arrays),), (), (np.array(int(start > 0), np.int32),), roles)


def _pieces(state, number=0, new=lambda path: path):
    copies = Copies(entries_of(jax.tree.map(np.asarray, state.runs[number])), state.roles.divisions[number])
    alone = {(at, new(path)): copies.piece(at, path).alone() for at, path in copies.at}
    return alone | {entries: copies.shared(entries) for entries in copies.common}


OLD = {"x": ramp(2, 3), "y": ramp(2, 3), "deep": {"z": ramp(3)}, "s": ramp()}
NEW = {"x": ramp(2, 3), "y": ramp(2, 3), "w": ramp(3), "s": ramp()}
MORE = {"begins": ramp(2, 3), "late": ramp(2)}
# Over the vector and the tree, which have the pieces of the stacks by themselves, a few.
AS_TREES = ["lbfgs", "novograd", "sm3", "adafactor", "muon", "masked", "groups"]
POSITIONS = [ramp(2, 2), ramp(3), {"0": ramp(1)}]
CASES = [
    *((OLD, name, form) for name in ["adam", "injected", "MultiSteps"] for form in ("tree", "vector")),
    *((OLD, name, "tree") for name in AS_TREES),
    *((OLD, name, "stacks") for name in RULES if name not in AS_TREES[:5]),
    # Paths that look like those of a state.
    (POSITIONS, "per leaf", "stacks"),
    ({"mu": ramp(2), "nu": {"mu": ramp(2, 2)}, "count": ramp(3)}, "adam", "tree"),
    ({"count": ramp(3)}, "injected", "tree"),
    ({"__metadata__": ramp(2, 2)}, "momentum", "vector"),
    ({"states": {"count": ramp(2)}, "inner_state": {"0": ramp(3)}, "runs": [ramp(2)]}, "per leaf", "stacks"),
    ({"float32[2]": ramp(2), "float32[3]": [ramp(3), ramp(2)]}, "adam", "stacks"),
    (ramp(2, 2), "momentum", "vector"),
]
_rule = functools.cache(lambda name, form: rule_of(FORMS[form](RULES[name])))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_there_and_back(case):
    old, name, form = CASES[case]
    renamed = {"x": "y", "y": "x", "deep.z": "w", "s": "s"}
    new, rename, back = {"net": tp.copy(old)}, {"**": "net.**"}, {"net.**": "**"}
    if old is OLD:
        new, rename, back = NEW, renamed, flipped(renamed)
    before, after, rule = tp.layout(old), tp.layout(new), _rule(name, form)
    state, like = _fresh(rule, before, 7), _fresh(rule, after)
    carried = saving.plan(before, new, rename=rename).state(state, like)
    assert jax.tree.structure(carried) == jax.tree.structure(like)
    its = renamed.__getitem__ if old is OLD else lambda path: f"net.{path}" if path else "net"
    np.testing.assert_equal(_pieces(carried), _pieces(state, new=its))
    assert_same(saving.plan(after, old, rename=back).state(carried, _fresh(rule, before)), state)


BEGIN = {"adam": "vector", "prodigy": "stacks", "injected per leaf": "stacks", "sm3": "tree"}


@pytest.mark.parametrize(("name", "form"), [*BEGIN.items(), ("groups per leaf", "stacks")])
def test_what_begins_is_fresh_and_the_rest_as_it_was(name, form):
    rule, model = _rule(name, form), OLD | MORE
    old, layout = tp.layout(OLD), tp.layout(model)
    state, like = _fresh(rule, old, 7), _fresh(rule, layout)
    carried = saving.plan(OLD, model, strict=False).state(state, like)
    assert [each.layout.paths for each in rule.histories(carried)] == [old.paths, ("begins", "late")]
    assert counts_of(carried) == [1, 0]
    np.testing.assert_equal(_pieces(carried), _pieces(state))
    begun, all_fresh = _pieces(carried, 1), _pieces(like)
    assert begun
    np.testing.assert_equal(begun, {at: all_fresh[at] for at in begun})


def test_a_padded_vector_is_not_opened_as_another_one(path):
    runs = []
    for model in ({"head": ramp(n, 3), "b": ramp(2)} for n in (10, 11)):
        layout = tp.layout(model)
        form = Form.vector(layout, pad_to=128)
        rule = Rule(RULE, None, lambda _, form=form: form)
        vector, restructure = tp.ravel(model, pad_to=128)
        runs.append(({"vector": vector, "back": restructure}, {"vector": vector, "state": _fresh(rule, layout, 1)}))
    for ours, theirs in zip(*runs, strict=True):
        assert_same(jax.tree.leaves(there_and_back(path, ours, ours)), jax.tree.leaves(ours))
        refused(r"of shape \(11, 3\) in the tree, .*of shape \(10, 3\) in the file", saving.load, path, theirs)


def test_a_vector_of_the_same_parameters_in_another_order_is_not_opened(path):
    runs = []
    for names in ("ab", "ba"):
        cls = dataclasses.make_dataclass("Model", names)
        jax.tree_util.register_dataclass(cls, list(names), [])
        vector, restructure = tp.ravel(cls(a=ramp(2), b=ramp(2) + 1))
        runs.append({"vector": vector, "back": restructure})
    refused(r"'back' opens, 'b' is \[0:2\] of shape \(2,\) in the tree, \[2:4\] of shape", there_and_back, path, *runs)
    tx, pair = made(VECTOR, RULE), {"a": ramp(2), "b": ramp(2)}
    words = r"(?s)does not fit.*state at '' holds u in the tree, a, b in .*saving.plan\(old_model, model, ren"
    refused(words, there_and_back, path, fresh(tx, pair), fresh(tx, {"u": ramp(4)}))


def history(form, *choices, steps=2):
    tx = made(form, RULE)
    state = fresh(made(form, RULE, choices[0]), MODEL)
    for choice in choices:
        state = taken(optim.set_trainable(tx, state, MODEL, choice), steps)
    return state


@pytest.mark.parametrize(("form", "steps"), [(optim.trainable, 2), (STACKS, 0)])
def test_what_waits_waits_afterwards(form, steps, path):
    """A plan that changes nothing gives the state as it is; thawed, it is what it would have been without a plan."""
    tx, plan = made(form, RULE), saving.plan(MODEL, MODEL)
    for choices in ((None, ("a", "b"), "c"), ("c", "a", ("a", "b"))):
        state = history(form, *choices, steps=steps)
        carried = plan.state(state, fresh(tx, MODEL))
        assert carried.roles == state.roles
        assert assert_same((carried.runs, carried.held, carried.counts), (state.runs, state.held, state.counts)) > 7
        saving.save(path, state)
        assert_same(plan.state(path, fresh(tx, MODEL)), carried)
        some = plan.state(state, fresh(made(form, RULE, ("a", "c")), MODEL))
        for wanted, its in ((None, carried), (("a", "c"), carried), (("a", "c"), some)):
            thawed, again = (optim.set_trainable(tx, each, MODEL, wanted) for each in (state, its))
            assert again.roles.running == thawed.roles.running
            assert_same((again.runs, again.counts[: len(again.runs)]), (thawed.runs, thawed.counts[: len(thawed.runs)]))


@pytest.mark.parametrize("form", [optim.trainable, VECTOR], ids=["tree", "vector"])
def test_parameters_that_wait_are_renamed_moved_and_stepped_around(form):
    tx, new, both = made(form, RULE), {"c": ramp(3), "w": ramp(2, 2), "x": ramp(3, 2)}, ("a", "b")
    turned = {both: lambda *two: jnp.stack(two)[:, ::-1]}
    plan = saving.plan(MODEL, new, rename={both: "w"}, transform=turned, strict=False)
    state = history(form, None, "c")
    carried = plan.state(state, fresh(tx, new))
    assert carried.layout.paths == ("c", "x")
    assert counts_of(carried) == [4, 0, 2]
    old, now = (optim.set_trainable(tx, each, model).runs for each, model in ((state, MODEL), (carried, new)))
    assert (len(old), len(now)) == (2, 3)
    if form is optim.trainable:
        for before, after in zip(state.held[0][0][1:], carried.held[0][0][1:], strict=True):
            np.testing.assert_array_equal(after["w"], np.stack([before["a"], before["b"]])[:, ::-1])
        after, later = _steps(tx, carried, new, 1)
        assert_same((after["w"], later.held), (new["w"], carried.held), identity=False)
        assert counts_of(later) == [5, 1, 2]
    refused(r"'w' is made of .* \('a' 4 steps, 'b' waits after 2", plan.state, history(form, None, "a"), fresh(tx, new))


def test_rates_that_were_set_go_along_and_what_is_new_or_frozen():
    tx, new = made(optim.trainable, INJECTED), {"x": ramp(2), "b": ramp(2), "new": ramp(1)}
    plan = saving.plan(MODEL, new, rename={"a": "x", "c": None}, strict=False)
    carried = plan.state(optim.adjust(fresh(tx, MODEL), learning_rate=0.5), fresh(tx, new))
    assert [float(run.hyperparams["learning_rate"]) for run in carried.runs] == [0.5, 0.5]
    tx, state, other = made(optim.trainable, RULE), taken(_state()), {"other": ramp(2)}
    nothing = saving.plan(MODEL, other, strict=False)
    assert_same(nothing.state(state, fresh(tx, other)).runs, fresh(tx, other).runs)
    with pytest.warns(UserWarning, match="nothing is trained"):
        empty = tx.init({"n": jnp.arange(2)})
    assert_same(saving.plan(MODEL, {"n": jnp.arange(2)}, strict=False).state(state, empty), empty)
    frozen = fresh(made(optim.trainable, RULE, ("a", "c")), MODEL)
    assert saving.plan(MODEL, MODEL).state(state, frozen).layout.paths == ("a", "c")


def test_ties_of_the_source_and_of_the_model_that_are_others_now():
    shared, tx = ramp(2), made(optim.trainable, RULE)
    tied, apart = {"e": shared, "h": shared}, {"e": ramp(2), "h": ramp(2, start=1.5)}
    mu, plan = lambda state: state.runs[0][0].mu, functools.partial(saving.plan, strict=False)
    of_tied, of_apart = taken(tx.init(tied)), taken(tx.init(apart))
    for source, model in ((tied, tied), (apart, tied), (tied, apart), (apart, apart)):
        carried = plan(source, model).state(of_tied, tx.init(apart))
        assert_same([mu(carried)["e"], mu(carried)["h"]], [mu(of_tied)["e"]] * 2, identity=False)
        assert counts_of(carried) == [2]
        carried = plan(source, model).state(of_apart, tx.init(tied))
        np.testing.assert_array_equal(mu(carried)["e"], mu(of_apart)["e"])
    # By the names that the state has, which a plan may change.
    for new in ({"out": shared, "wte": shared}, {"out": ramp(2), "wte": ramp(2, start=1.5)}):
        moved = saving.plan(tp.layout(tied), new, rename={"e": "wte", "h": "out"})
        its = jax.tree.leaves(mu(moved.state(of_tied, tx.init(new))))
        assert_same(its, [mu(of_tied)["e"]] * len(tp.layout(new).slots), identity=False)


@pytest.mark.parametrize("rule", [SM3, FACTORS], ids=["sm3", "adafactor"])
def test_arrays_of_other_shapes_dropped_and_cast(rule):
    old = [ramp(2, 3), ramp(3), ramp(4, 2)]
    state, new = taken(_state(rule, old)), [old[0], old[2]]
    carried = saving.plan(old, new, rename={"1": None, "2": "1"}).state(state, _state(rule, new))
    for before, after in zip(state.runs[0][0], carried.runs[0][0], strict=True):
        assert_same(after, [before[i] for i in (0, 2)] if isinstance(before, list) else before)
    # A cast and a product with one leave each element where it is, so what is kept beside it stays, too.
    new = [ramp(2, 3, dtype=jnp.bfloat16), *old[1:]]
    plan = saving.plan(old, new, transform={"0": lambda x: (x * 1).astype(jnp.bfloat16)})
    carried = plan.state(state, _state(rule, new))
    for before, after in zip(*map(jax.tree.leaves, (state.runs, carried.runs)), strict=True):
        np.testing.assert_array_equal(before.astype(after.dtype), after)


_BODY, _HEAD = {"w": ramp(2, 2), "b": ramp(2)}, {"w": ramp(2, 2)}
_BEFORE = {"body": _BODY, "head": _HEAD}
_of_groups = lambda rules, model, form=optim.trainable: fresh(form(optim.groups(rules)), model)
_inner = lambda state: {name: jax.tree.leaves(its) for name, its in state.runs[0].inner_states.items()}


@pytest.mark.parametrize("form", [optim.trainable, STACKS], ids=["tree", "stacks"])
def test_groups_are_matched_by_their_parameters(form):
    tx = form(optim.groups({"body": RULE, "head": INJECTED}))
    state = taken(fresh(tx, _BEFORE))
    for body, head in (("trunk", "head"), ("head", "tail")):
        new, there = {body: _BODY, head: _HEAD}, {"body.**": f"{body}.**", "head.**": f"{head}.**"}
        like = _of_groups({body: RULE, head: INJECTED}, new, form)
        carried = saving.plan(_BEFORE, new, rename=there).state(state, like)
        assert_same(_inner(carried), {body: _inner(state)["body"], head: _inner(state)["head"]})
        back = saving.plan(new, _BEFORE, rename=flipped(there))
        assert_same(back.state(carried, fresh(tx, _BEFORE)), state)


def test_groups_that_are_new_dropped_merged_wait_or_are_of_another_rule():
    state = taken(_of_groups({"body": RULE, "head": INJECTED}, _BEFORE))
    more = {"body": _BODY, "adapter": {"w": ramp(3)}}
    plan, same = saving.plan(_BEFORE, more, rename={"head.**": None}, strict=False), saving.plan(_BEFORE, _BEFORE)
    carried = plan.state(state, _of_groups({"body": RULE, "adapter": optax.rmsprop(0.1)}, more))
    assert counts_of(carried) == [2, 0]
    assert_same(_inner(carried)["body"], _inner(state)["body"])
    # Two groups of one rule are one now.
    two = taken(_of_groups({"body": RULE, "head": RULE}, _BEFORE))
    one = same.state(two, _of_groups({"**": RULE}, _BEFORE))
    assert int(one.runs[0].inner_states["**"].inner_state[0].count) == 2
    two.runs[0].inner_states["head"].inner_state[0].count[...] = 5
    refused(r"body\.inner_state\.0\.count, .*head.*, which differ", same.state, two, _of_groups({"**": RULE}, _BEFORE))
    words = "made by another transformation, or a parameter is now in another group"
    refused(words, same.state, state, _of_groups({"body": INJECTED, "head": RULE}, _BEFORE))
    # Of one group all wait: the rule of the other goes on as before.
    new, moved = {"trunk": _BODY, "head": _HEAD}, {"body.**": "trunk.**"}
    tx, its = (optim.trainable(optim.groups({body: RULE, "head": INJECTED})) for body in ("body", "trunk"))
    waiting = optim.set_trainable(tx, state, _BEFORE, "body")
    carried = saving.plan(_BEFORE, new, rename=moved).state(waiting, fresh(its, new))
    assert (carried.layout.paths, counts_of(carried)) == (("trunk.b", "trunk.w"), [2, 2])
    assert_same(_inner(carried)["trunk"], _inner(waiting)["body"])
    assert_same(*(jax.tree.leaves(each.held[0].inner_states["head"]) for each in (carried, waiting)))
    want = optim.set_trainable(its, fresh(its, new), new, "trunk")
    assert jax.tree.structure((carried.runs, carried.held)) == jax.tree.structure((want.runs, want.held))


_groups = lambda *paths: optim.groups({paths: RULE}, default=MOMENTUM)
_turned = lambda at, function: {"transform": {at: function}}
_MERGED = {"rename": {("a", "b"): "ab"}, "transform": {("a", "b"): JOIN}}
_AB, _FEWER = {"ab": ramp(4), "c": ramp(3)}, {"a": ramp(2), "z": ramp(3)}
_SQUARE, _ONE = {"w": ramp(3, 3)}, [ramp(2, 3)]
_DROPS_B = {"rename": {"c": "z", "b": None}}
_OTHER_SHAPES = "is made of .* parameters' shapes, and not all alike: .*begin with a fresh state"
_COMPUTES = r"lambda at .*:\d+, from \['c'\] to \['c'\], changes or repeats them; use the plan"
_NO_STATE = "expected a state of optim.trainable, .*; got names such as "
_WAITS = r"'b' waits after 2 steps\), .*; freeze or thaw them together first"
_b_waits = lambda: optim.set_trainable(made(optim.trainable, RULE), history(optim.trainable, None), MODEL, ("a", "c"))
_ELSEWHERE = r"like has float32\[2\] at 'z', but the plan's model has none there.*write like=tx\.init\(model\)"
# The model before and after, the arguments of the plan, the states before and after or their rules, and the words.
REFUSED = {
    "another rule": (MODEL, MODEL, {}, MOMENTUM, RULE, "nothing at '0.count', .* another transformation"),
    "one that keeps no count": (MODEL, MODEL, {}, RULE, optax.sgd(0.1), r"runs\.0\.0\.\w+.*, .* has no place: it was"),
    "another group": (MODEL, MODEL, {}, _groups("a"), _groups("a", "b"), "parameter is now in another group"),
    "no state": (MODEL, MODEL, {}, MODEL, RULE, f"{_NO_STATE}a, b, c"),
    "plain Optax": (MODEL, MODEL, {}, RULE.init(MODEL), RULE, rf"{_NO_STATE}0\.count.*optim\.from_optax\(tx, "),
    "a function that computes": (MODEL, MODEL, _turned("c", lambda c: 2 * c), RULE, RULE, _COMPUTES),
    "factors, transposed": (_SQUARE, _SQUARE, _turned("w", jnp.transpose), FACTORS, FACTORS, _OTHER_SHAPES),
    "factors of a stack": (_ONE, [[ramp(3)] * 2], {"rename": {"0": "0.*"}}, FACTORS, FACTORS, _OTHER_SHAPES),
    "a memory of fewer": (MODEL, _FEWER, _DROPS_B, LBFGS, LBFGS, "L-BFGS remembers steps of all"),
    "several histories": (MODEL, MODEL, {}, RULE, lambda: history(optim.trainable, None, "a"), "got one with several"),
    "apart": (MODEL, _AB, _MERGED, lambda: history(optim.trainable, "a", ("a", "b")), RULE, "'a' 4 steps, 'b' 2 steps"),
    "like another model": (MODEL, MODEL | {"c": ramp(3)}, {}, RULE, lambda: _state(model={"z": ramp(2)}), _ELSEWHERE),
    "of another model": (MODEL, MODEL, {}, lambda: _state(model={"w": ramp(2)}), RULE, "the plan does not know 'w'"),
    "one waits, without a step in between": (MODEL, _AB, _MERGED, _b_waits, RULE, _WAITS),
}


@pytest.mark.parametrize(("old", "new", "arguments", "before", "after", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(old, new, arguments, before, after, words):
    is_rule = lambda it: isinstance(it, optax.GradientTransformation)
    made_of = lambda it, model: _state(it, model) if is_rule(it) else it() if callable(it) else it
    refused(words, saving.plan(old, new, **arguments).state, made_of(before, old), made_of(after, new))


@pytest.mark.usefixtures("without_type_checks")
def test_like_is_a_fresh_state_and_states_have_values():
    tx, model, more = made(optim.trainable, RULE), {"a": ramp(2)}, {"a": ramp(2), "b": ramp(2)}
    plan, state = saving.plan(model, model), taken(_state(model=model))
    refused("expected a fresh state of the new model, .*, got dict", plan.state, state, model, kind=TypeError)
    refused(r"outside of jax\.jit", jax.jit(lambda state: plan.state(state, tx.init(model))), state)
    refused("no values", plan.state, jax.eval_shape(tx.init, model), state)
    loose = saving.plan(model, more, strict=False)
    refused("no values|without values", loose.state, state, jax.eval_shape(tx.init, more))
    assert_same(plan.state(state, jax.eval_shape(tx.init, model)), state)  # where nothing is needed of it
