"""States of plain Optax as those of a transformation over models, and back."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from ..zoo import STACKS, VECTOR, assert_same, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")

RULES = {
    "schedule": optax.adamw(optax.linear_schedule(0.1, 0.01, 5)),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "several": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
    "factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "by name": optim.groups({"w": optax.adam(0.1)}, default=optax.sgd(0.1, momentum=0.5)),
}
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
    txs = {name: optim.trainable(rule, "!mean") for name, rule in RULES.items()}
    states = {name: optim.from_optax(tx, middle[name][1], model) for name, tx in txs.items()}
    counts = {name: int(state.counts[0]) for name, state in states.items()}
    assert counts == {name: {"momentum": 0, "several": 1}.get(name, 3) for name in RULES}

    @jax.jit
    def our_steps(runs):
        def step(_, runs):
            found = {}
            for name, (params, state) in runs.items():
                after, state = optim.step(txs[name], grads_of(params), state, params | {"f": jnp.tanh})
                found[name] = after | {"f": None}, state
            return found

        return jax.lax.fori_loop(0, 3, step, runs)

    n = {"n": model["n"]}
    for name, (params, state) in our_steps({name: (middle[name][0] | n, states[name]) for name in RULES}).items():
        after, theirs = wanted[name]
        assert_same([params["w"], params["b"]], [after["w"], after["b"]])
        assert_same(params["mean"], middle[name][0]["mean"])
        back = optim.to_optax(txs[name], state, params | {"n": None})
        assert jax.tree.structure(back) == jax.tree.structure(theirs)
        again = optim.from_optax(txs[name], back, model)
        assert_same(again.runs, state.runs)


@pytest.mark.parametrize("form", [VECTOR, STACKS])
def test_over_a_vector_and_stacks(form):
    model, rule = whole(), optax.adam(0.1)
    made = jax.tree.map(lambda leaf: leaf + 1, rule.init(eqx.filter(model, eqx.is_array)))
    tx = form(rule, ("w", "b"))
    state = optim.from_optax(tx, made, model)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(model))
    assert int(state.counts[0]) == 1
    back = optim.to_optax(tx, state, eqx.filter(model, eqx.is_array))
    for path in ("w", "b"):
        assert_same(back[0].nu[path], made[0].nu[path])
    assert_same(back[0].count, made[0].count)
    assert_same(back[0].mu["mean"], jnp.zeros(3))  # as `init` makes it
    assert jax.tree.structure(back) == jax.tree.structure(made)


def test_the_memory_of_lbfgs_goes_over_as_a_whole():
    params = {"w": ramp(2, 3), "b": ramp(3)}
    theirs = jax.tree.map(lambda leaf: leaf + 1, MEMORY.init(params))
    tx = optim.trainable(MEMORY)
    state = optim.from_optax(tx, theirs, params)
    assert_same(state.runs[0], theirs)
    assert_same(optim.to_optax(tx, state, params), theirs)


def test_a_restored_state_may_be_dictionaries_of_numpy():
    model, rule = whole(), optax.adam(0.1)
    state = rule.init(arrays_of(model))
    restored = {"0": {"count": np.int32(5), "mu": jax.tree.map(np.asarray, state[0].mu), "nu": state[0].nu}}
    tx = optim.trainable(rule)
    assert_same(optim.from_optax(tx, restored, model).runs[0][0], state[0]._replace(count=jnp.array(5, jnp.int32)))


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
    assert_same(optim.to_optax(tx, state, model), theirs, identity=False)  # each moment has a buffer of its own
    canonical = tp.partition(model, layout)[0]  # there is nothing at the aliases
    assert_same(optim.to_optax(tx, state, canonical), state.runs[0])
    assert_same(optim.from_optax(tx, state.runs[0], model).runs, state.runs)
    for path in ("head", "decoder"):
        apart = (theirs[0]._replace(mu=theirs[0].mu | {path: theirs[0].mu[path] + 1}), *theirs[1:])
        with pytest.raises(ValueError, match=rf"'{path}' is tied to 'embed'.* at '0.mu.{path}' than at '0.mu.embed'"):
            optim.from_optax(tx, apart, model)


def test_a_group_whose_parameters_are_frozen_is_dropped():
    model = [ramp(2), ramp(3)]
    rule = optim.groups({"0": optax.sgd(0.1, momentum=0.9)}, default=optax.adam(0.1))
    state = optim.from_optax(optim.trainable(rule, "0"), rule.init(model), model)
    assert state.layout.paths == ("0",)


def test_on_the_way_back_frozen_parameters_have_what_the_state_holds():
    model, rule = whole(), optax.adam(0.1)
    tx = optim.trainable(rule)
    state = optim.from_optax(tx, jax.tree.map(lambda leaf: leaf + 1, rule.init(arrays_of(model))), model)
    held = optim.set_trainable(tx, state, model, "!b")
    back = optim.to_optax(tx, held, arrays_of(model))
    assert_same(back[0].mu, state.runs[0][0].mu)
    _, stepped = optim.step(tx, grads_of(model), held, model)
    apart = optim.set_trainable(tx, stepped, model)
    with pytest.raises(ValueError, match=r"have not taken their steps together \(mean, w 2; b\.0 1\)"):
        optim.to_optax(tx, apart, arrays_of(model))


WITH_ADAM = optim.trainable(optax.adam(0.1))


@pytest.mark.parametrize(
    ("tx", "rule", "message"),
    [
        (WITH_ADAM, optax.sgd(0.1, momentum=0.9), r"nothing at 0\.count, 0\.mu\.b\.0.*but has 0\.trace\.b\.0"),
        (optim.trainable(optax.sgd(0.1)), optax.adam(0.1), r"has 0\.count, 0\.mu\.b\.0.* has no place"),
        (WITH_ADAM, optax.adam(0.1, mu_dtype=jnp.bfloat16), r"bfloat16\[3\] at '0\.mu\.b\.0', .*keeps float32\[3\]"),
        (optim.trainable(MEMORY, "!mean"), MEMORY, "L-BFGS remembers steps of all parameters"),
        (optim.trainable(MEMORY, form="vector"), MEMORY, "L-BFGS remembers steps of all parameters"),
    ],
    ids=["less", "more", "dtype", "memory of a part", "memory in another form"],
)
def test_the_state_of_another_rule_is_refused(tx, rule, message):
    with pytest.raises(ValueError, match=message):
        optim.from_optax(tx, rule.init(arrays_of(whole())), whole())


def test_what_else_is_refused():
    model = whole()
    params, state = arrays_of(model), WITH_ADAM.init(model)
    theirs = optax.adam(0.1).init(params)
    with pytest.raises(ValueError, match=r"float32\[4\] at '0\.mu\.mean', .* keeps float32\[3\]"):
        optim.from_optax(WITH_ADAM, optax.adam(0.1).init(params | {"mean": ramp(4)}), model)
    with pytest.raises(ValueError, match="already a state of a transformation over models"):
        optim.from_optax(WITH_ADAM, state, model)
    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(lambda theirs: optim.from_optax(WITH_ADAM, theirs, model).runs)(theirs)
    for call in (optim.from_optax, optim.to_optax):
        with pytest.raises(TypeError, match=r"expected optim\.trainable\(\.\.\.\)"):
            call(optax.adam(0.1), theirs, params)
    with pytest.raises(TypeError, match=r"as eqx\.filter\(model, eqx\.is_array\); got PjitFunction at 'f'"):
        optim.to_optax(WITH_ADAM, state, model)
    with pytest.raises(ValueError, match=r"expected float32\[3\] at 'mean' of params, got None"):
        optim.to_optax(WITH_ADAM, state, params | {"mean": None})
    with pytest.warns(UserWarning, match="nothing"):
        nothing = optim.from_optax(WITH_ADAM, theirs, {"n": 1})
    assert nothing.runs == ()
    assert_same(optim.to_optax(WITH_ADAM, nothing, params), theirs)
    by_leaf = optim.trainable(optim.per_leaf(optax.adam(0.1)), form="stacks")
    with pytest.raises(ValueError, match=r"at 'states.*, where the transformation keeps .*: it was made by another"):
        optim.to_optax(by_leaf, by_leaf.init(model), params)
