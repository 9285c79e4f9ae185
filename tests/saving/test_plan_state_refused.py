"""plan.state: what it refuses; groups by other names; ties; arrays that are not of the parameters' shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from ..zoo import STACKS, VECTOR, assert_same, ramp
from .test_plan_state import JOIN, MODEL, RULE, fresh, history, made, taken

pytestmark = pytest.mark.usefixtures("standard_promotion")

_FACTORS = optax.adafactor(0.1, min_dim_size_to_factor=2)
_MOMENTUM = optax.sgd(0.1, momentum=0.9)
_INJECTED = optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)
_SCHEDULE = optax.sgd(optax.constant_schedule(0.1))
_LBFGS = optax.lbfgs(0.1, memory_size=2, linesearch=None)
_AGAIN = "made by another transformation, or a parameter is now in another group"


def _state(rule=RULE, model=MODEL, form=optim.trainable):
    return fresh(made(form, rule), model)


def _groups(*paths):
    return optim.groups({paths: optax.adam(0.1)}, default=_MOMENTUM)


# -- What is refused ---------------------------------------------------------------------------------------------------

_MERGED = {"rename": {("a", "b"): "ab"}, "transform": {("a", "b"): JOIN}}
_AB, _FEWER, _WIDE = {"ab": ramp(4), "c": ramp(3)}, {"a": ramp(2), "z": ramp(3)}, {"w": ramp(2, 4)}
_GROUPS, _SQUARE = _groups("a"), {"w": ramp(3, 3)}
_DROPS_B = {"rename": {"c": "z", "b": None}}
_ONE = [ramp(2, 3)]
_OTHER_SHAPES = "is made of .* parameters' shapes, and not all alike: .*begin with a fresh state"
# The model before and after, the arguments of the plan, the states before and after, and what the error says.
REFUSED = {
    "another rule": (MODEL, MODEL, {}, _MOMENTUM, RULE, "nothing at '0.count', .* another transformation"),
    "the other way round": (MODEL, MODEL, {}, RULE, _MOMENTUM, "nothing at '0.trace.a', .* another"),
    "one that keeps no count": (MODEL, MODEL, {}, RULE, optax.sgd(0.1), r"runs\.0\.0\.\w+.*, .* has no place: it was"),
    "one that keeps more": (MODEL, MODEL, {}, RULE, optax.amsgrad(0.1), "another transformation"),
    "another group": (MODEL, MODEL, {}, _GROUPS, _groups("a", "b"), "parameter is now in another group"),
    "no state": (MODEL, MODEL, {}, MODEL, RULE, "expected a state of optim.trainable, .*; got names such as a, b, c"),
    "one of plain Optax": (
        MODEL,
        MODEL,
        {},
        RULE.init(MODEL),
        RULE,
        r"names such as 0\.count.*optim\.from_optax\(tx, ",
    ),
    "other shapes": (_WIDE, _WIDE, {}, optax.adafactor(0.1), _FACTORS, "made by another transformation"),
    "a function that computes": (
        *(MODEL, MODEL, {"transform": {"c": lambda c: 2 * c}}, RULE, RULE),
        r"lambda at .*:\d+, from \['c'\] to \['c'\], changes or repeats them; use the plan",
    ),
    "factors, transposed": (_SQUARE, _SQUARE, {"transform": {"w": jnp.transpose}}, _FACTORS, _FACTORS, _OTHER_SHAPES),
    "factors, flipped": (_SQUARE, _SQUARE, {"transform": {"w": jnp.flip}}, _FACTORS, _FACTORS, _OTHER_SHAPES),
    "factors of a stack": (_ONE, [[ramp(3)] * 2], {"rename": {"0": "0.*"}}, _FACTORS, _FACTORS, _OTHER_SHAPES),
    "accumulators, transposed": (
        *(_ONE, [ramp(3, 2)], {"transform": {"0": jnp.transpose}}, optax.sm3(0.1), optax.sm3(0.1)),
        r"\[\(2,\)\] at '0\.mu\.\*\.0', which are",
    ),
    "a memory of fewer": (MODEL, _FEWER, _DROPS_B, _LBFGS, _LBFGS, "L-BFGS remembers steps of all"),
    "a memory of more": (MODEL, MODEL | {"d": ramp(1)}, {"strict": False}, _LBFGS, _LBFGS, "L-BFGS remembers steps"),
    "several histories": (MODEL, MODEL, {}, RULE, lambda: history(optim.trainable, None, "a"), "got one with several"),
    "apart": (MODEL, _AB, _MERGED, lambda: history(optim.trainable, "a", ("a", "b")), RULE, "'a' 4 steps, 'b' 2 steps"),
    "one begins": (MODEL, _AB, _MERGED, lambda: history(optim.trainable, "a"), RULE, "'a' 2 steps, 'b' begins"),
    "like another model": (
        *(MODEL, MODEL | {"c": ramp(3)}, {}, RULE, lambda: _state(model={"z": ramp(2)})),
        r"like has float32\[2\] at 'z', but the plan's model has none there.*write like=tx\.init\(model\)",
    ),
    "of another model": (MODEL, MODEL, {}, lambda: _state(model={"w": ramp(2)}), RULE, "the plan does not know 'w'"),
    "of other shapes": (
        *(MODEL, MODEL, {}, lambda: _state(model=MODEL | {"a": ramp(3)}), RULE),
        r"expected float32\[2\] at 'a', .* got float32\[3\]",
    ),
}


@pytest.mark.parametrize(("old", "new", "arguments", "before", "after", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(old, new, arguments, before, after, message):
    is_rule = lambda it: isinstance(it, optax.GradientTransformation)
    before, after = (
        _state(it, model) if is_rule(it) else it() if callable(it) else it
        for it, model in ((before, old), (after, new))
    )
    with pytest.raises(ValueError, match=message):
        saving.plan(old, new, **arguments).state(before, after)


@pytest.mark.usefixtures("without_type_checks")
def test_like_is_a_fresh_state():
    for like, got in ((MODEL, "dict"), (None, "NoneType"), (RULE.init(MODEL), "tuple")):
        with pytest.raises(TypeError, match=rf"expected a fresh state of the new model, .*, got {got}"):
            saving.plan(MODEL, MODEL).state(_state(), like)


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


def test_frozen_without_a_step_in_between_some_wait():
    tx, together = made(optim.trainable, RULE), history(optim.trainable, None)
    apart, plan = optim.set_trainable(tx, together, MODEL, ("a", "c")), saving.plan(MODEL, _AB, **_MERGED)
    with pytest.raises(ValueError, match=r"'b' waits after 2 steps\), .*; freeze or thaw them together first"):
        plan.state(apart, _state(model=_AB))
    thawed = optim.set_trainable(tx, apart, MODEL)
    assert_same(plan.state(thawed, _state(model=_AB)), plan.state(together, _state(model=_AB)))


# -- What is renamed as it is ------------------------------------------------------------------------------------------

_LEAVES = [ramp(2, 3), ramp(3), ramp(4, 2)]


@pytest.mark.parametrize("rule", [optax.sm3(0.1), _FACTORS], ids=["sm3", "adafactor"])
def test_arrays_of_other_shapes_dropped_and_cast(rule):
    state = taken(_state(rule, _LEAVES))
    new = [_LEAVES[i] for i in (0, 2)]
    carried = saving.plan(_LEAVES, new, rename={"1": None, "2": "1"}).state(state, _state(rule, new))
    for before, after in zip(state.runs[0][0], carried.runs[0][0], strict=True):
        assert_same(after, [before[i] for i in (0, 2)] if isinstance(before, list) else before)
    # A cast and a product with one leave each element where it is, so what is kept beside it stays, too.
    new = [ramp(2, 3, dtype=jnp.bfloat16), *_LEAVES[1:]]
    plan = saving.plan(_LEAVES, new, transform={"0": lambda x: (x * 1).astype(jnp.bfloat16)})
    carried = plan.state(state, _state(rule, new))
    for before, after in zip(*map(jax.tree.leaves, (state.runs, carried.runs)), strict=True):
        np.testing.assert_array_equal(before.astype(after.dtype), after)


def test_a_state_of_plain_optax_becomes_one_of_this_library_first():
    old, new = {"w": ramp(2, 3), "b": ramp(3)}, {"w": ramp(2, 3), "bias": ramp(3), "z": ramp(2)}
    theirs = jax.tree.map(lambda leaf: leaf + 2, RULE.init(old))
    state = optim.from_optax(made(optim.trainable, RULE), theirs, old)
    carried = saving.plan(old, new, rename={"b": "bias"}, strict=False).state(state, _state(model=new, form=VECTOR))
    assert [int(count) for count in carried.counts] == [2, 0]
    np.testing.assert_array_equal(
        carried.runs[0][0].mu, jnp.concatenate([theirs[0].mu["b"], theirs[0].mu["w"].ravel()])
    )


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
    turned, state = plan(old, computed, rename={"w": "e"}, trainable=layout), taken(tx.init(old))
    carried = turned.state(state, optim.trainable(RULE, layout).init(computed))
    np.testing.assert_array_equal(mu(carried)["e"], mu(state)["w"])
    with pytest.raises(ValueError, match=r"like has float32\[3,2\] at 'h', but the plan's model has none there"):
        turned.state(state, optim.trainable(RULE, tp.layout(computed)).init(computed))
    name = {"__metadata__": ramp(2)}  # which a file calls otherwise
    assert_same(plan(name, name).state(taken(_state(model=name)), _state(model=name)), taken(_state(model=name)))


def test_a_function_that_uses_one_of_its_arrays_for_each():
    """What the others have learned, and when, does not matter."""
    new, both = {"ta": ramp(2), "tb": ramp(2), "c": ramp(3)}, {("a", "b"): ("ta", "tb")}
    plan = saving.plan(MODEL, new, rename=both, transform={("a", "b"): lambda a, b: (a[::-1], b[jnp.array([1, 0])])})
    for state, counts in ((history(optim.trainable, None, "b"), [4, 2]), (history(optim.trainable, "b"), [2, 0])):
        carried = plan.state(state, _state(model=new))
        assert [int(count) for count in carried.counts] == counts
        np.testing.assert_array_equal(carried.runs[0][0].mu["tb"], np.flip(state.runs[0][0].mu["b"]))


# -- Groups by other names ---------------------------------------------------------------------------------------------

_BEFORE = {"body": {"w": ramp(2, 2), "b": ramp(2)}, "head": {"w": ramp(2, 2)}}
_AFTER = {"trunk": _BEFORE["body"], "head": _BEFORE["head"]}


def _of_groups(rules, model, form=optim.trainable):
    return fresh(form(optim.groups(rules)), model)


def _inner(state):
    return {name: jax.tree.leaves(its) for name, its in state.runs[0].inner_states.items()}


@pytest.mark.parametrize("form", [optim.trainable, STACKS], ids=["tree", "stacks"])
def test_groups_are_matched_by_their_parameters(form):
    """Not by their names, even where those of others are the same."""
    plan = saving.plan(_BEFORE, _AFTER, rename={"body.**": "trunk.**"})
    state = taken(_of_groups({"body": RULE, "head": _INJECTED}, _BEFORE, form))
    carried = plan.state(state, _of_groups({"trunk": RULE, "head": _INJECTED}, _AFTER, form))
    assert_same(_inner(carried), {"trunk": _inner(state)["body"], "head": _inner(state)["head"]})
    back = saving.plan(_AFTER, _BEFORE, rename={"trunk.**": "body.**"})
    assert_same(back.state(carried, _of_groups({"body": RULE, "head": _INJECTED}, _BEFORE, form)), state)
    # A group is called "head" that holds the body.
    swapped = {"head": _BEFORE["body"], "tail": _BEFORE["head"]}
    plan = saving.plan(_BEFORE, swapped, rename={"body.**": "head.**", "head.**": "tail.**"})
    carried = plan.state(state, _of_groups({"head": RULE, "tail": _INJECTED}, swapped, form))
    assert_same(_inner(carried), {"head": _inner(state)["body"], "tail": _inner(state)["head"]})


def test_groups_that_are_new_dropped_merged_or_of_another_rule():
    state = taken(_of_groups({"body": RULE, "head": _INJECTED}, _BEFORE))
    more = {"body": _BEFORE["body"], "adapter": {"w": ramp(3)}}
    plan, same = saving.plan(_BEFORE, more, rename={"head.**": None}, strict=False), saving.plan(_BEFORE, _BEFORE)
    carried = plan.state(state, _of_groups({"body": RULE, "adapter": optax.rmsprop(0.1)}, more))
    assert [int(count) for count in carried.counts] == [2, 0]
    assert_same(_inner(carried)["body"], _inner(state)["body"])
    # Two groups of one rule are one now.
    two = taken(_of_groups({"body": RULE, "head": RULE}, _BEFORE))
    one = same.state(two, _of_groups({"**": RULE}, _BEFORE))
    assert int(one.runs[0].inner_states["**"].inner_state[0].count) == 2
    two.runs[0].inner_states["head"].inner_state[0].count[...] = 5
    with pytest.raises(ValueError, match=r"inner_states\.body\.inner_state\.0\.count, .*head.*, which differ, but"):
        same.state(two, _of_groups({"**": RULE}, _BEFORE))
    with pytest.raises(ValueError, match=_AGAIN):
        same.state(state, _of_groups({"body": _INJECTED, "head": RULE}, _BEFORE))


def test_groups_that_keep_nothing_of_parameters_are_known_by_name_alone():
    state = taken(_of_groups({"body": RULE, "head": _SCHEDULE}, _BEFORE))
    new = {"body": _BEFORE["body"], "tail": _BEFORE["head"]}
    plan, same = saving.plan(_BEFORE, new, rename={"head.**": "tail.**"}), saving.plan(_BEFORE, _BEFORE)
    with pytest.raises(ValueError, match=r"'tail' keeps no array of a parameter, .* was head;"):
        plan.state(state, _of_groups({"body": RULE, "tail": _SCHEDULE}, new))
    assert_same(same.state(state, _of_groups({"body": RULE, "head": _SCHEDULE}, _BEFORE)), state)
