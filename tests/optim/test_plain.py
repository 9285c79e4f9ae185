"""States of plain Optax as those of a transformation over models, and back."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from ..zoo import STACKS, VECTOR, assert_close, assert_same, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")

SCHEDULE, NOTHING = optax.linear_schedule(0.1, 0.01, 5), optax.set_to_zero()
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(SCHEDULE))
FLAT = optax.clip(1.0), optax.trace(0.9), optax.scale_by_learning_rate(SCHEDULE)
RATES, FACTORS = optax.inject_hyperparams(optax.adam)(0.1), optax.adafactor(0.1, min_dim_size_to_factor=2)
GROUPS = optim.groups({"w": optax.adam(0.1)}, default=RATES)


def masked(rule, *, frozen):
    return optax.masked(rule, {"w": not frozen, "b": [not frozen], "mean": frozen, "n": None, "f": None})


def parted(w, b, labels=("w", "b", "frozen"), frozen=NOTHING):
    first, second, third = labels
    return optax.partition(
        {first: w, second: b, third: frozen}, {"w": first, "b": [second], "mean": third, "n": None, "f": None}
    )


def alone(rule):
    return parted(rule, rule, ("train", "train", "frozen"))


def steps_of_two(rule):
    return optax.MultiSteps(rule, 2).gradient_transformation()


# Each rule of plain Optax, and what continues its run here.
RULES = {
    "momentum": (optax.sgd(0.1, momentum=0.9),) * 2,
    "clip": (CLIPPED,) * 2,
    "several": (steps_of_two(optax.adam(0.1)),) * 2,
    "injected": (RATES,) * 2,
    "factored": (FACTORS,) * 2,
    "by name": (optim.groups({"w": optax.adam(0.1)}, default=optax.sgd(0.1, momentum=0.5)),) * 2,
    "partition": (alone(CLIPPED), CLIPPED),
    "partition without moments": (alone(optax.sgd(SCHEDULE)), optax.sgd(SCHEDULE)),
    "partition of another rule": (parted(CLIPPED, CLIPPED, ("a", "a", "b"), optax.adam(0.0)), CLIPPED),
    "masked": (optax.chain(masked(CLIPPED, frozen=False), masked(NOTHING, frozen=True)), CLIPPED),
    "zeros last": (optax.chain(CLIPPED, masked(NOTHING, frozen=True)), CLIPPED),
    "zeros first": (optax.chain(masked(NOTHING, frozen=True), CLIPPED), CLIPPED),
    "zeros in a chain": (optax.chain(masked(NOTHING, frozen=True), *FLAT), optax.chain(*FLAT)),
    "within steps": (steps_of_two(alone(RATES)), steps_of_two(RATES)),
    "labels": (parted(optax.adam(0.1), RATES, ("head", "body", "frozen")), GROUPS),
    "swapped labels": (parted(optax.adam(0.1), RATES, ("default", "w", "frozen")), GROUPS),
    "one to groups": (alone(RATES), optim.groups({"w": RATES}, default=RATES)),
    "groups to one": (parted(RATES, RATES), RATES),
}
IN_ROWS = {"muon": optax.contrib.muon(0.1), "rows": FACTORS, "rates": RATES}
SAME = {name for name, (rule, ours) in RULES.items() if rule is ours}
TXS = {name: optim.trainable(rule, "!mean") for name, (_, rule) in RULES.items()} | {
    name: STACKS(optim.per_leaf(rule), "!mean") for name, rule in IN_ROWS.items()
}
IN_FORMS = {"in a vector": (VECTOR, optax.adam(0.1)), "in stacks": (STACKS, optax.adam(0.2))}
TXS |= {name: form(rule, "!mean") for name, (form, rule) in IN_FORMS.items()}
RULES = {name: rule for name, (rule, _) in RULES.items()} | IN_ROWS | {n: rule for n, (_, rule) in IN_FORMS.items()}
WITH_ADAM = optim.trainable(optax.adam(0.1))
MEMORY = optax.scale_by_lbfgs(memory_size=2)


def whole():
    return {"w": ramp(2, 3), "b": [ramp(3)], "mean": ramp(3), "n": jnp.array(3), "f": jnp.tanh}


def arrays_of(model):
    return eqx.filter(model, eqx.is_inexact_array)


def grads_of(model):
    """Nothing moves `mean`, so that a norm over all is that of the others."""
    return {"w": 0.5 * model["w"], "b": [0.5 * model["b"][0]], "mean": 0 * model["mean"], "n": None, "f": None}


@jax.jit
def plain_steps(runs):
    """Three steps of each rule, in one program."""

    def step(_, runs):
        found = {}
        for name, (params, state) in runs.items():
            updates, state = RULES[name].update(grads_of(params), state, params)
            found[name] = optax.apply_updates(params, updates), state
        return found

    return jax.lax.fori_loop(0, 3, step, runs)


def test_the_next_steps_are_those_of_optax_and_the_way_back_is_its_state():
    model = whole()
    begin = arrays_of(model)
    middle = plain_steps({name: (begin, rule.init(begin)) for name, rule in RULES.items()})
    wanted = plain_steps(middle)
    states = {name: optim.from_optax(tx, middle[name][1], model) for name, tx in TXS.items()}
    for name, tx in TXS.items():
        assert_same(optim.to_optax(tx, states[name], like=middle[name][1]), middle[name][1], identity=False)
    counts = {name: int(state.counts[0]) for name, state in states.items()}
    assert counts == {name: {"momentum": 0, "several": 1, "within steps": 1}.get(name, 3) for name in RULES}

    @jax.jit
    def our_steps(runs):
        def step(_, runs):
            found = {}
            for name, (params, state) in runs.items():
                after, state = optim.step(TXS[name], grads_of(params), state, params | {"f": jnp.tanh})
                found[name] = after | {"f": None}, state
            return found

        return jax.lax.fori_loop(0, 3, step, runs)

    n = {"n": model["n"]}
    for name, (params, state) in our_steps({name: (middle[name][0] | n, states[name]) for name in RULES}).items():
        after, theirs = wanted[name]
        same = assert_same if name in SAME else assert_close  # of another program XLA rounds otherwise
        same([params["w"], params["b"]], [after["w"], after["b"]])
        assert_same(params["mean"], middle[name][0]["mean"])
        back = optim.to_optax(TXS[name], state, RULES[name].init(params | {"n": None}))
        assert jax.tree.structure(back) == jax.tree.structure(theirs)
        again = optim.from_optax(TXS[name], back, model)
        assert_same(again.runs, state.runs)


def test_the_memory_of_lbfgs_goes_over_as_a_whole_and_a_restored_state_may_be_dictionaries_of_numpy():
    params, tx, model, adam = {"w": ramp(2, 3), "b": ramp(3)}, optim.trainable(MEMORY), whole(), optax.adam(0.1)
    theirs = jax.tree.map(lambda leaf: leaf + 1, MEMORY.init(params))
    state = optim.from_optax(tx, theirs, params)
    assert_same((state.runs[0], optim.to_optax(tx, state, MEMORY.init(params))), (theirs, theirs), identity=False)
    made = adam.init(arrays_of(model))
    restored = {"0": {"count": np.int32(5), "mu": jax.tree.map(np.asarray, made[0].mu), "nu": made[0].nu}}
    state = optim.from_optax(WITH_ADAM, restored, model)
    assert_same(state.runs[0][0], made[0]._replace(count=jnp.array(5, jnp.int32)))


@pytest.mark.parametrize("model", [ramp(2), {"a.w": ramp(2), "a": ramp(3)}, [ramp(2), [ramp(3), ramp(1)]]])
def test_any_names(model):
    theirs = jax.tree.map(lambda leaf: leaf + 1, RATES.init(model))
    tx = optim.trainable(RATES)
    state = optim.from_optax(tx, theirs, model)
    assert_same(state.runs[0], theirs, identity=False)
    assert_same(optim.to_optax(tx, state, RATES.init(model)), theirs, identity=False)


def test_ties_are_one_if_their_moments_are():
    shared = ramp(2, 3)
    model = {"embed": shared, "head": shared, "decoder": shared.T}
    layout = tp.layout(model, ties={"decoder": ("embed", jnp.transpose)})
    rule = optax.adam(0.1)
    tx = optim.trainable(rule, layout)
    moment = ramp(2, 3, start=3.0)
    theirs = rule.init(model)
    theirs = (theirs[0]._replace(mu={"embed": moment, "head": moment, "decoder": moment.T}), *theirs[1:])
    state = optim.from_optax(tx, theirs, model)
    assert_same(state.runs[0][0].mu, {"embed": moment, "head": None, "decoder": None})
    assert_same(optim.to_optax(tx, state, rule.init(model)), theirs, identity=False)  # each has a buffer of its own
    canonical = tp.partition(model, layout)[0]  # there is nothing at the aliases
    assert_same(optim.to_optax(tx, state, rule.init(canonical)), state.runs[0])
    assert_same(optim.from_optax(tx, state.runs[0], model).runs, state.runs)
    for path in ("head", "decoder"):
        apart = (theirs[0]._replace(mu=theirs[0].mu | {path: theirs[0].mu[path] + 1}), *theirs[1:])
        with pytest.raises(ValueError, match=rf"'{path}' is tied to 'embed'.* at '0.mu.{path}' than at '0.mu.embed'"):
            optim.from_optax(tx, apart, model)


def test_what_is_frozen_has_on_the_way_back_what_the_state_holds_and_its_group_is_dropped_on_the_way_here():
    model = [ramp(2), ramp(3)]
    rule = optim.groups({"0": optax.sgd(0.1, momentum=0.9)}, default=optax.adam(0.1))
    assert optim.from_optax(optim.trainable(rule, "0"), rule.init(model), model).layout.paths == ("0",)
    model, rule = whole(), optax.adam(0.1)
    tx = optim.trainable(rule)
    state = optim.from_optax(tx, jax.tree.map(lambda leaf: leaf + 1, rule.init(arrays_of(model))), model)
    held = optim.set_trainable(tx, state, model, "!b")
    back = optim.to_optax(tx, held, rule.init(arrays_of(model)))
    assert_same(back[0].mu, state.runs[0][0].mu)
    _, stepped = optim.step(tx, grads_of(model), held, model)
    apart = optim.set_trainable(tx, stepped, model)
    with pytest.raises(ValueError, match=r"have not taken their steps together \(mean, w 2; b\.0 1\)"):
        optim.to_optax(tx, apart, rule.init(arrays_of(model)))


def test_groups_that_have_not_run_alike_do_not_become_one():
    model, rule = whole(), parted(RATES, RATES, ("body", "head", "frozen"))
    theirs = rule.init(arrays_of(model))
    theirs.inner_states["head"].inner_state.hyperparams["learning_rate"] = jnp.float32(0.2)
    words = r"other values at 'inner_states\.body\..*than at 'inner_states\.head\..*keep them apart"
    with pytest.raises(ValueError, match=words):
        optim.from_optax(optim.trainable(RATES, "!mean"), theirs, model)


def taken(tx, rule, **others):
    return optim.from_optax(tx, rule.init(arrays_of(whole()) | others), whole())


def given(rule, **others):
    return optim.to_optax(WITH_ADAM, WITH_ADAM.init(whole()), rule.init(arrays_of(whole()) | others))


ADAM, SGD, OURS = optax.adam(0.1), optax.sgd(0.1, momentum=0.9), r"expected optim\.trainable\(\.\.\.\)"
LOW = optax.adam(0.1, mu_dtype=jnp.bfloat16)
ALL = "L-BFGS remembers steps of all parameters"
REFUSED = [
    (lambda: taken(WITH_ADAM, SGD), ValueError, r"nothing at 0\.count, 0\.mu\.b\.0.*but has 0\.trace\.b\.0"),
    (lambda: taken(optim.trainable(optax.sgd(0.1)), ADAM), ValueError, r"has 0\.count, 0\.mu\.b\.0.* has no place"),
    (lambda: taken(WITH_ADAM, LOW), ValueError, r"bfloat16\[3\] at '0\.mu\.b\.0', .*keeps float32\[3\]"),
    (lambda: taken(optim.trainable(MEMORY, "!mean"), MEMORY), ValueError, ALL),
    (lambda: taken(optim.trainable(MEMORY, form="vector"), MEMORY), ValueError, ALL),
    (lambda: taken(WITH_ADAM, ADAM, mean=ramp(4)), ValueError, r"float32\[4\] at '0\.mu\.mean', .* keeps float32\[3\]"),
    (lambda: taken(WITH_ADAM, optim.trainable(ADAM)), ValueError, "already a state of a transformation over models"),
    (lambda: jax.jit(lambda x: taken(WITH_ADAM, ADAM, mean=x).runs)(ramp(3)), ValueError, r"outside of jax\.jit"),
    (lambda: taken(ADAM, ADAM), TypeError, OURS),
    (lambda: optim.to_optax(ADAM, ADAM.init(arrays_of(whole())), arrays_of(whole())), TypeError, OURS),
    (lambda: given(ADAM, mean=None), ValueError, "has 0.mu.mean, 0.nu.mean, for which the other one has no place"),
    (lambda: given(SGD), ValueError, r"nothing at 0\.trace\.b\.0, .* but has 0\.count, 0\.mu\.b\.0"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_of_a_model_that_trains_nothing_nothing_goes_over():
    theirs = ADAM.init(arrays_of(whole()))
    with pytest.warns(UserWarning, match="nothing"):
        nothing = optim.from_optax(WITH_ADAM, theirs, {"n": 1})
    assert nothing.runs == ()
    assert_same(optim.to_optax(WITH_ADAM, nothing, theirs), theirs)
