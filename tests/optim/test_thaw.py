"""Freeze and thaw in training, and parts that begin anew: nothing that was learned about a leaf is lost, and no leaf
follows another's clock."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .. import zoo
from ..zoo import STACKS, VECTOR, Norm, assert_close, assert_same, filled, ramp
from .shared import MOMENTUM, Tied, forms, made, ones, pair, steps

DECAYED, INJECTED = optax.adamw(0.1, weight_decay=0.5), optax.inject_hyperparams(optax.adam)(0.1)
named = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
FALLING = optax.sgd(optax.linear_schedule(0.1, 0.02, 8), momentum=0.5)


def _model():
    """Called as what rules keep."""
    return {"mu": ramp(2), "0": [ramp(2, 2), ramp(2, start=1)], "1": ramp(2, start=3)}


TWO_STEPS = optax.MultiSteps(MOMENTUM, 2).gradient_transformation()
EACH = {  # the form and the rule, and the rules of `mu` and of the others, whose counts are all those of parameters
    "vector": (VECTOR, DECAYED, DECAYED, DECAYED),
    "MultiSteps": (optim.trainable, TWO_STEPS, TWO_STEPS, TWO_STEPS),
    "stacks": (STACKS, INJECTED, INJECTED, INJECTED),
    "rows": (STACKS, optim.groups({"mu": optim.per_leaf(DECAYED)}, default=INJECTED), DECAYED, INJECTED),
    "momentum": (optim.trainable, MOMENTUM, MOMENTUM, MOMENTUM),
    "rows of momentum": (STACKS, optim.per_leaf(FALLING), FALLING, FALLING),
}
STAGES = [  # what trains from now on, what begins anew, how many steps follow; of momentum what waits, has no gradient
    (("mu", "0"), False, 3, (), ()),
    ("mu", False, 5, (), ()),  # the others wait
    (None, False, 2, ("0.0", "1"), ("0.1",)),  # and go on, another leaf begins
    (..., "0", 2, ("mu", "0.1"), ("0.0",)),
    ("0.1", ("mu", "0.0"), 1, (), ("0.1",)),  # of what is frozen nothing is held any more
    (None, False, 2, ("0.1",), ("1",)),
]


updates_of = functools.cache(lambda rule: jax.jit(rule.update) if rule is TWO_STEPS else rule.update)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.filterwarnings("ignore:no gradient so far")
def test_what_freezes_thaws_and_begins_anew_is_each_leafs_own_run(name):
    form, rule, of_mu, of_others = EACH[name]
    model, tx = _model(), form(rule, ("mu", "0"))
    paths = tp.layout(model).paths
    rules = dict.fromkeys(paths, of_others) | {"mu": of_mu}
    rated = lambda state, own: optim.adjust(state, learning_rate=0.25) if own is INJECTED else state
    begun = lambda path, leaf: (leaf, rated(rules[path].init(leaf), rules[path]), 0)  # no reset forgets the rate
    want = {path: begun(path, leaf) for path, leaf in tp.trainables(model).items()}
    state = rated(tx.init(model), of_others)
    for chosen, anew, count, waiting, missing in STAGES:
        state = optim.set_trainable(tx, state, model, chosen, reset=anew)
        held = state.held
        want |= {path: begun(path, want[path][0]) for path in (tp.trainables(model, anew) if anew else ())}
        waiting, missing = waiting if name == "rows of momentum" else (), missing if "momentum" in name else ()
        pulled = lambda path, leaf, missing=missing: None if named(path) in missing else np.sin(np.asarray(leaf))
        active = dict.fromkeys(waiting, False if anew else jnp.array(False))
        step_all = functools.partial(optim.step, tx, **({"active": active} if waiting else {}))
        # Outside of `jit` a rule with branches would be compiled in each step; others share operations on a shape.
        step_all = jax.jit(step_all) if form is not optim.trainable or rule is TWO_STEPS else step_all
        for _ in range(count):
            model, state = step_all(jax.tree.map_with_path(pulled, model), state, model)
            for path in {*state.layout.paths} - {*missing, *waiting}:
                leaf, own, taken = want[path]
                step, own = updates_of(rules[path])(np.sin(np.asarray(leaf)), own, leaf)
                want[path] = leaf + step, own, taken + 1
        assert_same(state.held, held)
        assert_close(dict(tp.trainables(model)), {path: leaf for path, (leaf, *_) in want.items()}, 1e-6)
        for leaves, taken in zip((*state.roles.running, *state.roles.held), state.counts, strict=True):
            assert {want[paths[leaf]][2] for leaf in leaves} == {int(taken)} or "momentum" in name


@forms
def test_leaves_with_one_history_share_one_run_and_all_may_freeze(form):
    model, tx = {name: jnp.ones(2) for name in "abcd"}, made(form, MOMENTUM, ("a", "b"))
    step = jax.jit(tx.update, donate_argnums=1)  # what a change returns may be donated
    _, state = step(model, tx.init(model), model)
    for choice, trains, waits in (("**", [2, 2], []), (("a", "c"), [1, 1], [1, 1]), ("**", [2, 2], [])):
        state = optim.set_trainable(tx, state, model, choice)
        sizes = [[len(each) for each in side] for side in (state.roles.running, state.roles.held)]
        assert sizes == [trains, waits]  # c and d begin together
        _, state = step(model, state, model) if choice == "**" else (None, state)
    none = optim.set_trainable(tx, state, model, jax.tree.map(lambda _: False, model))
    same, none = optim.step(tx, ones(model), none, model)
    assert_same(same, model)
    assert_same(optim.set_trainable(tx, none, model, "**"), state)


@pytest.mark.parametrize("choice", ["low", "single"])
def test_a_vector_of_mixed_dtypes_keeps_its_digits_and_none_counts_as_zero(choice):
    model = {"low": jnp.full(3, 1 / 3, jnp.bfloat16), "single": jnp.full(2, 1 / 3)}
    tx = made(VECTOR, MOMENTUM)
    state = tx.init(model)
    trace = state.runs[0][0].trace
    assert (trace.shape, trace.dtype) == ((5,), jnp.float32)
    given = ({"low": np.zeros(3, model["low"].dtype), "single": np.ones(2, "f4")}, {"single": np.ones(2, "f4")})
    zero, none = (tx.update(grads, state, model)[1] for grads in given)
    assert_same(none.runs, zero.runs)
    model, state = steps(tx, state, model, 3)
    there = optim.set_trainable(tx, state, model, choice)
    assert_same(optim.set_trainable(tx, there, model), state)
    both = optim.set_trainable(tx, steps(tx, there, model, 1)[1], model)
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


def test_costs_what_optax_costs_by_hand_and_for_what_is_frozen_neither_a_backward_pass_nor_work_nor_memory():
    model, rule, x = filled(eqx.nn.MLP, 16, 16, 32, 2), optax.adamw(0.1), np.ones((8, 16), np.float32)
    (params, rest), last = tp.partition(model), tp.layout(model, "layers.2")
    loss = lambda model: jnp.mean(jax.vmap(model)(x) ** 2)
    of_params = jax.grad(lambda params: loss(tp.combine(params, rest)))

    def cost_of(tx, state):
        def step(params, state):
            model = tp.combine(params, rest)
            model, state = optim.step(tx, tp.grad(loss, state.layout)(model), state, model)
            return tp.partition(model, rest.layout)[0], state

        return zoo.cost(step, params, state)

    def by_hand(params, state):
        updates, state = rule.update(of_params(params), state, params)
        return optax.apply_updates(params, updates), state

    tx = optim.trainable(rule)
    whole, want = cost_of(tx, tx.init(model)), zoo.cost(by_hand, params, rule.init(params))
    assert all(whole[each] <= 1.005 * want[each] for each in ("flops", "bytes accessed"))
    frozen = optim.set_trainable(tx, tx.init(model), model, last)
    from_start = optim.trainable(rule, last).init(model)
    two = optim.set_trainable(tx, dataclasses.replace(from_start, counts=(jnp.array(2, jnp.int32),)), model)
    assert len(two.runs) == 2
    assert cost_of(tx, two)["flops"] < 1.01 * whole["flops"]  # two histories as much as one
    assert cost_of(tx, frozen)["flops"] == cost_of(tx, from_start)["flops"] < 0.5 * whole["flops"]
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
    tx, grads = made(optim.trainable, MOMENTUM), ones(pair())
    model, state = optim.step(tx, grads, tx.init(pair()), pair())
    some = grads | {"b": None}  # apply_if_finite compares its structure with that of the updates
    want, _ = optim.step(tx, some, optim.set_trainable(tx, state, model, "a"), model)
    injected = optax.inject_hyperparams(lambda scale: optax.chain(tx, optax.scale(scale)))(1.0)
    for wrapped in (optax.named_chain(("all", tx)), optax.apply_if_finite(tx, 3), injected):
        _, around = optim.step(wrapped, grads, wrapped.init(pair()), pair())
        around = optim.set_trainable(tx, around, model, "a")
        assert_close(optim.step(wrapped, some, around, model)[0], want)


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


def test_thawing_what_a_class_declares_frozen():
    model = Norm(jnp.ones(2), jnp.ones(2))
    tx = optim.trainable(optim.groups({"mean": optax.sgd(2.0)}, default=optax.sgd(1.0)), tp.layout(model, thaw="mean"))
    updates, _ = tx.update(tp.copy(model), tx.init(model), model)
    assert_same(optim.apply_updates(model, updates), Norm(jnp.zeros(2), -jnp.ones(2)))
    state = optim.set_trainable(tx, tx.init(model), model)  # as declared
    with pytest.raises(ValueError, match="declared frozen"):
        optim.set_trainable(tx, state, model, "mean")
    assert optim.set_trainable(tx, state, model, state.layout.thaw("mean")).layout.paths == ("scale", "mean")


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
    (form, rule), model = OF_THE_RUN[name], pair() | {"b": jnp.ones(3, jnp.bfloat16)}
    tx, grads = optim.trainable(rule, "a", form=form), ones(model)
    step = jax.jit(lambda grads, state: tx.update(grads, state, model, value=jnp.ones(())))
    state = tx.init(model)
    for _ in range(4):  # from here on the rate is 1e-5
        _, state = step(grads, state)
    thawed = optim.set_trainable(tx, state, model)
    updates, after = step(grads, thawed)
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
    model, tx = pair(), VECTOR(optax.sgd(0.1), "a")
    state = tx.init(model)
    known = state.layout  # closed over by a step that does not ask the state
    _, state = tx.update(tp.copy(model), state, model)
    state = optim.set_trainable(tx, state, model)
    grads = tp.project(model, ones(model), known)
    with pytest.warns(UserWarning, match=r"no gradient so far for b, which the state trains: .*state.layout"):
        model, state = optim.step(tx, grads, state, model)
    model, state = optim.step(tx, grads, state, model)  # a second warning would be an error
    jax.jit(tx.update)(grads, state, model)
    _, state = tx.update(tp.copy(model), state, model)
    optim.step(tx, grads, state, model)  # it had one: partial gradients are allowed


LATE = {  # what couples leaves after the count of each has been used
    "a clip": ("tree", optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0))),
    "within MultiSteps": ("stacks", optax.MultiSteps(optax.chain(optax.adam(0.1), optim.clip_by_global_norm(1.0)), 2)),
    "an estimate": ("vector", optax.contrib.prodigy(0.1)),
    "a search": ("tree", optax.chain(optax.adam(1.0), optax.scale_by_backtracking_linesearch(3))),
}
RUNNING = optax.scale_by_schedule(lambda n: jnp.where(n < 99, 1.0, 0.0))  # whose count is of the run
EARLY = {
    "a clip": optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.1)),
    "in a branch": optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 3),
    "a schedule": optax.chain(RUNNING, optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9)),
}


@pytest.mark.parametrize(("form", "rule"), LATE.values(), ids=LATE)
def test_what_couples_parameters_after_their_counts_is_refused_where_histories_differ(form, rule):
    model = {"a": jnp.zeros(2), "b": jnp.zeros(2), "c": jnp.zeros(3)}
    tx = optim.trainable(rule, "a", form=form)
    state = dataclasses.replace(tx.init(model), counts=(jnp.array(2, jnp.int32),))
    assert len(optim.set_trainable(tx, state, model, "b").runs) == 1  # one history at a time may be any
    with pytest.raises(ValueError, match=r"different numbers of steps.*Put that first in the chain.*reset=True"):
        optim.set_trainable(tx, state, model)


@pytest.mark.parametrize(("name", "form"), [("a schedule", "tree"), ("a clip", "vector"), ("in a branch", "stacks")])
def test_what_couples_them_before_sees_all(name, form):
    model = {"a": jnp.zeros(2), "b": jnp.zeros(2), "c": jnp.zeros(3)}
    grads = {"a": jnp.array([3.0, 0]), "b": jnp.array([0, 4.0]), "c": jnp.zeros(3)}
    tx, alone = optim.trainable(EARLY[name], "a", form=form), optim.trainable(EARLY[name])
    update, update_alone = jax.jit(tx.update), jax.jit(alone.update)
    state = tx.init(model)
    for _ in range(2):
        _, state = update({"a": grads["a"]}, state, model)
    state = optim.set_trainable(tx, state, model)
    begun, older = alone.init(model), alone.init(model)  # what begins at once with the others, and what began before
    for _ in range(2):
        _, older = update_alone(grads | {"b": jnp.zeros(2)}, older, model)
    for _ in range(2):
        updates, state = update(grads, state, model)
        want, begun = update_alone(grads, begun, model)
        its, older = update_alone(grads, older, model)
        assert_close((updates["a"], updates["b"], updates["c"]), (its["a"], want["b"], want["c"]), 1e-6)
    assert len(state.runs) == 2


def test_a_clip_of_momentum_without_counts_sees_that_of_all():
    model, grads = {"a": jnp.zeros(1), "b": jnp.zeros(1)}, {"a": jnp.array([2.0]), "b": jnp.array([4.0])}
    tx = VECTOR(optax.chain(optax.trace(0.5), optim.clip_by_global_norm(1.0)), "a")
    _, state = tx.update({"a": grads["a"]}, tx.init(model), model)
    updates, after = tx.update(grads, optim.set_trainable(tx, state, model), model)
    assert [(float(run[1].norm), int(run[1].clipped)) for run in after.runs] == [(5.0, 2)] * 2
    assert (float(after.clip.norm), int(after.clip.clipped)) == (5.0, 2)
    assert_close(updates, {"a": jnp.array([0.6]), "b": jnp.array([0.8])}, 1e-6)


@forms
def test_what_trains_stays_as_it_is_unless_it_is_said(form):
    model, tx = _model(), form(optax.adam(0.1), "mu")
    _, state = steps(tx, tx.init(model), model, 1)
    change = lambda state, *to, **said: optim.set_trainable(tx, state, model, *to, **said)
    paths = lambda **said: change(state, **said).layout.paths
    assert paths(reset="mu") == ("mu",)
    assert paths() == paths(trainable=None, reset="mu") == paths(reset=True) == tp.layout(model).paths
    assert paths(trainable="0.0", reset="mu") == ("0.0",)
    assert_same(change(state, reset="0"), state)  # it has not begun
    assert_same(change(state, reset="**"), tx.init(model))
    _, after = steps(tx, change(change(state, ("mu", "0")), reset="0"), model, 2)
    assert change(after, reset="0").roles == after.roles  # a step is not traced again
    frozen = change(after, "mu")
    assert (len(frozen.held), change(frozen, reset=("0", "1")).held) == (1, ())


def test_a_tie_is_reset_whole():
    model, tx = Tied(ramp(2, 3), ramp(2, 3).T, ramp(2)), optim.trainable(optax.sgd(0.1, momentum=0.5))
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


def test_lbfgs_refuses_the_change_unless_reset_and_gradients_of_some():
    rule, model = optax.scale_by_lbfgs(memory_size=2), pair()
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
