"""plan.state: what it refuses, and what of states is not of the shape of parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from ..zoo import assert_same, ramp
from .test_plan_state import JOIN, MODEL, RULE, fresh, history, made, taken

pytestmark = pytest.mark.usefixtures("standard_promotion")
ADAFACTOR = optax.adafactor(0.1, min_dim_size_to_factor=2)


def test_sources_of_different_histories():
    merge = {"rename": {("a", "b"): "ab"}, "transform": {("a", "b"): JOIN}}
    new = {"ab": ramp(4), "c": ramp(3)}
    plan, like = saving.plan(MODEL, new, **merge), fresh(made(optim.trainable, RULE), new)
    with pytest.raises(ValueError, match=r"'ab' is made of parameters .* \('a' 4, 'b' 2 steps\), so there is no state"):
        plan.state(history(optim.trainable, "a", ("a", "b")), like)
    with pytest.raises(ValueError, match=r"'ab' is made of parameters .* \('a' 2, 'b' no steps\)"):
        plan.state(history(optim.trainable, "a"), like)
    # Frozen without a step in between, they have; but now one waits.
    tx, together = made(optim.trainable, RULE), history(optim.trainable, None)
    apart = optim.set_trainable(tx, together, MODEL, ("a", "c"))
    with pytest.raises(ValueError, match=r"'ab' .* \('a' trains, 'b' waits\), .*; freeze or thaw them together first"):
        plan.state(apart, like)
    assert_same(plan.state(optim.set_trainable(tx, apart, MODEL), like), plan.state(together, like))


def _state(rule=RULE, form=optim.trainable, model=MODEL):
    return fresh(made(form, rule), model)


def _groups(*paths):
    return optim.groups({paths: optax.adam(0.1)}, default=optax.sgd(0.1, momentum=0.9))


_MOMENTUM, _GROUPS = optax.sgd(0.1, momentum=0.9), _groups("a")
_FACTORS = optax.adafactor(0.1), optax.adafactor(0.1, min_dim_size_to_factor=1)
_MATRIX = {"w": ramp(2, 4)}
REFUSED = {
    "another rule": (
        lambda: (_state(_MOMENTUM), _state()),
        "the state has nothing at '0.count', .* another transformation",
    ),
    "the other way round": (lambda: (_state(), _state(_MOMENTUM)), "the state has nothing at '0.trace.a', .* another"),
    "one that keeps no count": (lambda: (_state(), _state(optax.sgd(0.1))), r"runs\.0\.0\.\w+.*, .* has no place"),
    "one that keeps less": (lambda: (_state(), _state(optax.sgd(0.1))), "another transformation"),
    "one that keeps more": (lambda: (_state(), _state(optax.amsgrad(0.1))), "another transformation"),
    "another group": (lambda: (_state(_GROUPS), _state(_groups("a", "b"))), "parameter is now in another group"),
    "another model": (
        lambda: (_state(model={"w": ramp(2)}), _state()),
        "the plan does not know 'w', which would be lost",
    ),
    "no state": (lambda: (MODEL, _state()), "expected a state of optim.trainable, .*; got names such as a, b, c"),
    "several": (lambda: (_state(), history(optim.trainable, None, "a")), "got one with several histories"),
}


@pytest.mark.parametrize(("states", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(states, message):
    with pytest.raises(ValueError, match=message):
        saving.plan(MODEL, MODEL).state(*states())


def test_a_state_of_other_shapes():
    states = [_state(rule, model=_MATRIX) for rule in _FACTORS]
    with pytest.raises(ValueError, match="made by another transformation"):
        saving.plan(_MATRIX, _MATRIX).state(*states)


@pytest.mark.usefixtures("without_type_checks")
def test_like_is_a_fresh_state():
    plan = saving.plan(MODEL, MODEL)
    for like, got in ((MODEL, "dict"), (None, "NoneType"), (RULE.init(MODEL), "tuple")):
        with pytest.raises(TypeError, match=rf"expected a fresh state of the new model, .*, got {got}"):
            plan.state(_state(), like)


def test_functions_that_do_more_than_move():
    plan = saving.plan(MODEL, MODEL, transform={"c": lambda c: 2 * c})
    np.testing.assert_array_equal(plan(MODEL)["c"], 2 * MODEL["c"])
    with pytest.raises(
        ValueError, match=r"lambda at .*:\d+, from \['c'\] to \['c'\], changes or repeats them; use the plan"
    ):
        plan.state(_state(), _state())


@pytest.mark.parametrize("function", [jnp.transpose, jnp.flip])
def test_what_is_not_of_the_parameters_shape_is_not_moved_with_it(function):
    model, rule = {"w": ramp(3, 3)}, ADAFACTOR
    plan = saving.plan(model, model, transform={"w": function})
    with pytest.raises(ValueError, match=rf"'w' is made of \['w'\] by {function.__name__}, .* parameters' shapes"):
        plan.state(_state(rule, model=model), _state(rule, model=model))


def test_one_parameter_whose_state_has_other_shapes():
    model, new, rule = {"w": ramp(3, 4)}, {"v": ramp(3, 4)}, ADAFACTOR
    state = taken(_state(rule, model=model))
    carried = saving.plan(model, new, rename={"w": "v"}).state(state, _state(rule, model=new))
    assert_same(jax.tree.leaves(carried), jax.tree.leaves(state))


def test_a_memory_of_all_parameters_together():
    rule, new = optax.lbfgs(0.1, memory_size=2, linesearch=None), {"a": ramp(2), "b": ramp(2), "z": ramp(3)}
    state = taken(_state(rule))
    carried = saving.plan(MODEL, new, rename={"c": "z"}).state(state, _state(rule, model=new))
    assert_same(jax.tree.leaves(carried), jax.tree.leaves(state))
    fewer, more = {"a": ramp(2), "b": ramp(2)}, MODEL | {"d": ramp(1)}
    for model, rename in ((fewer, {"c": None}), (more, None)):
        plan = saving.plan(MODEL, model, rename=rename, strict=False)
        with pytest.raises(ValueError, match="L-BFGS"):
            plan.state(state, _state(rule, model=model))


def test_states_without_values():
    tx, model, more = made(optim.trainable, RULE), {"a": ramp(2)}, {"a": ramp(2), "b": ramp(2)}
    plan, state = saving.plan(model, model), taken(_state(model=model))
    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(lambda state: plan.state(state, tx.init(model)))(state)
    with pytest.raises(ValueError, match=r"no values"):
        plan.state(jax.eval_shape(tx.init, model), state)
    with pytest.raises(ValueError, match=r"no values|without values"):
        saving.plan(model, more, strict=False).state(state, jax.eval_shape(tx.init, more))
    assert_same(plan.state(state, jax.eval_shape(tx.init, model)), state)  # where nothing is needed of it


def test_like_of_another_model():
    """A parameter that the plan knows nothing of would begin anew, and nobody would see it."""
    like = functools.partial(_state, RULE)
    plan = saving.plan(MODEL, {"a": ramp(2), "b": ramp(2), "z": ramp(3)}, rename={"c": "z"})
    state = taken(_state())
    for model, message in (
        (MODEL, r"like has float32\[3\] at 'c', but the plan's model has none there.*write like=tx\.init\(model\)"),
        ({"a": ramp(2), "z": ramp(2)}, r"like has float32\[2\] at 'z', but the plan's model has float32\[3\] there"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.state(state, like(model=model))
    assert plan.state(state, like(model={"z": ramp(3)})).layout.paths == ("z",)  # what `like` lacks is left out
    wide = {"a": ramp(3), "b": ramp(2), "c": ramp(3)}
    with pytest.raises(ValueError, match=r"expected float32\[2\] at 'a', .* got float32\[3\]"):
        plan.state(_state(model=wide), like(model={"z": ramp(3)}))


def test_ties_of_the_source_and_of_the_model_that_are_others_now():
    """None of them begins anew."""
    shared, tx = ramp(2), made(optim.trainable, RULE)
    tied, apart = {"e": shared, "h": shared}, {"e": ramp(2), "h": ramp(2) + 1}
    mu, plan = lambda state: state.runs[0][0].mu, functools.partial(saving.plan, strict=False)
    of_tied, of_apart = taken(tx.init(tied)), taken(tx.init(apart))
    for source, model in ((tied, tied), (apart, tied), (tied, apart), (apart, apart)):
        carried = plan(source, model).state(of_tied, tx.init(apart))
        assert_same([mu(carried)["e"], mu(carried)["h"]], [mu(of_tied)["e"]] * 2, identity=False)
        assert [int(count) for count in carried.counts] == [2]
        carried = plan(source, model).state(of_apart, tx.init(tied))
        np.testing.assert_array_equal(mu(carried)["e"], mu(of_apart)["e"])
    # What is computed of another parameter has no moments to give.
    computed, old = {"e": ramp(2, 3), "h": ramp(2, 3).T}, {"w": ramp(2, 3)}
    layout = tp.layout(computed, ties={"h": ("e", jnp.transpose)})
    turned = saving.plan(old, computed, rename={"w": "e"}, strict=False, trainable=layout)
    state = taken(tx.init(old))
    np.testing.assert_array_equal(
        mu(turned.state(state, optim.trainable(RULE, layout).init(computed)))["e"], mu(state)["w"]
    )
    with pytest.raises(ValueError, match=r"like has float32\[3,2\] at 'h', but the plan's model has none there"):
        turned.state(state, optim.trainable(RULE, tp.layout(computed)).init(computed))
    name = {"__metadata__": ramp(2)}  # which a file calls otherwise
    assert_same(saving.plan(name, name).state(taken(_state(model=name)), _state(model=name)), taken(_state(model=name)))


def test_a_function_that_uses_one_of_its_arrays_for_each():
    """What the others have learned, and when, does not matter."""
    new = {"ta": ramp(2), "tb": ramp(2), "c": ramp(3)}
    both = {("a", "b"): ("ta", "tb")}
    for flip in (lambda a, b: (a[::-1], b[::-1]), lambda a, b: (a[jnp.array([1, 0])], b[jnp.array([1, 0])])):
        plan = saving.plan(MODEL, new, rename=both, transform={("a", "b"): flip})
        for state, counts in ((history(optim.trainable, None, "b"), [4, 2]), (history(optim.trainable, "b"), [2, 0])):
            carried = plan.state(state, fresh(made(optim.trainable, RULE), new))
            assert [int(count) for count in carried.counts] == counts
            assert "tb" in carried.runs[0][0].mu
            np.testing.assert_array_equal(carried.runs[0][0].mu["tb"], np.flip(state.runs[0][0].mu["b"]))
