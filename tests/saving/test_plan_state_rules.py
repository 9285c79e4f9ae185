"""plan.state by rule: states of plain Optax, groups by other names, arrays that are not of the parameters' shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from treeparams import optim, saving

from ..zoo import VECTOR, assert_same, ramp
from .test_plan_state import RULE, fresh, made, taken

pytestmark = pytest.mark.usefixtures("standard_promotion")

# -- Plain Optax -------------------------------------------------------------------------------------------------------


def test_a_state_of_plain_optax_becomes_one_of_this_library_first():
    old, new = (
        {"net": [{"w": ramp(2, 3), "b": ramp(3)}]},
        {"layers": [{"w": ramp(2, 3), "bias": ramp(3)}], "z": ramp(2)},
    )
    plan = saving.plan(old, new, rename={"net.*.b": "layers.*.bias", "net.**": "layers.**"}, strict=False)
    theirs = jax.tree.map(lambda leaf: leaf + 2, RULE.init(old))
    like = fresh(made(VECTOR, RULE), new)
    with pytest.raises(
        ValueError, match=r"names such as 0\.count.*plain Optax, optim\.from_optax\(tx, state, old_model\)"
    ):
        plan.state(theirs, like)
    carried = plan.state(optim.from_optax(made(optim.trainable, RULE), theirs, old), like)
    assert [int(count) for count in carried.counts] == [2, 0]
    back = jnp.concatenate([theirs[0].mu["net"][0]["b"], theirs[0].mu["net"][0]["w"].ravel()])
    np.testing.assert_array_equal(carried.runs[0][0].mu, back)


# -- Groups by other names ---------------------------------------------------------------------------------------------

_ADAM, _MOMENTUM = optax.adam(0.1), optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)
_BEFORE = {"body": {"w": ramp(2, 2), "b": ramp(2)}, "head": {"w": ramp(2, 2)}}
_AFTER = {"trunk": {"w": ramp(2, 2), "b": ramp(2)}, "head": {"w": ramp(2, 2)}}


def _in(rules, form=optim.trainable):
    return form(optim.groups(rules))


@pytest.mark.parametrize("form", [optim.trainable, lambda rule: optim.trainable(rule, form="stacks")])
def test_groups_are_matched_by_their_parameters(form):
    """Not by their names, even where those of others are the same."""
    plan = saving.plan(_BEFORE, _AFTER, rename={"body.**": "trunk.**"})
    state = taken(fresh(_in({"body": _ADAM, "head": _MOMENTUM}, form), _BEFORE))
    carried = plan.state(state, fresh(_in({"trunk": _ADAM, "head": _MOMENTUM}, form), _AFTER))
    old, new = state.runs[0].inner_states, carried.runs[0].inner_states
    assert set(new) == {"trunk", "head"}
    assert_same(jax.tree.leaves(new["trunk"]), jax.tree.leaves(old["body"]))
    assert_same(jax.tree.leaves(new["head"]), jax.tree.leaves(old["head"]))
    back = saving.plan(_AFTER, _BEFORE, rename={"trunk.**": "body.**"})
    assert_same(back.state(carried, fresh(_in({"body": _ADAM, "head": _MOMENTUM}, form), _BEFORE)), state)


def test_groups_that_have_swapped_their_names():
    """Here a group is called "head" that holds the body, and the head is in the default."""
    state = taken(fresh(_in({"body": _MOMENTUM, "head": _MOMENTUM}), _BEFORE))
    rates = [jnp.float32(0.25), jnp.float32(0.5)]
    for name, rate in zip(("body", "head"), rates, strict=True):
        state.runs[0].inner_states[name].inner_state.hyperparams["learning_rate"] = rate
    new = {"head": _BEFORE["body"], "tail": _BEFORE["head"]}
    plan = saving.plan(_BEFORE, new, rename={"body.**": "head.**", "head.**": "tail.**"})
    carried = plan.state(state, fresh(_in({"head": _MOMENTUM, "tail": _MOMENTUM}), new))
    found = [carried.runs[0].inner_states[name].inner_state.hyperparams["learning_rate"] for name in ("head", "tail")]
    assert [float(rate) for rate in found] == [0.25, 0.5]


def test_groups_that_are_new_dropped_merged_or_of_another_rule():
    state = taken(fresh(_in({"body": _ADAM, "head": _MOMENTUM}), _BEFORE))
    more = {"body": _BEFORE["body"], "adapter": {"w": ramp(3)}}
    plan = saving.plan(_BEFORE, more, rename={"head.**": None}, strict=False)
    carried = plan.state(state, fresh(_in({"body": _ADAM, "adapter": optax.rmsprop(0.1)}), more))
    assert [int(count) for count in carried.counts] == [2, 0]
    assert_same(
        jax.tree.leaves(carried.runs[0].inner_states["body"]), jax.tree.leaves(state.runs[0].inner_states["body"])
    )
    # Two groups of one rule are one now.
    two = taken(fresh(_in({"body": _ADAM, "head": _ADAM}), _BEFORE))
    one = saving.plan(_BEFORE, _BEFORE).state(two, fresh(_in({"**": _ADAM}), _BEFORE))
    assert int(one.runs[0].inner_states["**"].inner_state[0].count) == 2
    two.runs[0].inner_states["head"].inner_state[0].count[...] = 5
    with pytest.raises(ValueError, match=r"inner_states\.body\.inner_state\.0\.count' and .*head.*, which differ, but"):
        saving.plan(_BEFORE, _BEFORE).state(two, fresh(_in({"**": _ADAM}), _BEFORE))
    with pytest.raises(ValueError, match="made by another transformation, or a parameter is now in another group"):
        saving.plan(_BEFORE, _BEFORE).state(state, fresh(_in({"body": _MOMENTUM, "head": _ADAM}), _BEFORE))


def test_groups_that_keep_nothing_of_parameters():
    schedule = optax.sgd(optax.constant_schedule(0.1))
    state = taken(fresh(_in({"body": _ADAM, "head": schedule}), _BEFORE))
    new = {"body": _BEFORE["body"], "tail": _BEFORE["head"]}
    plan = saving.plan(_BEFORE, new, rename={"head.**": "tail.**"})
    with pytest.raises(ValueError, match=r"'tail' keeps no array of a parameter, .* was head;"):
        plan.state(state, fresh(_in({"body": _ADAM, "tail": schedule}), new))
    names = {"body": "trunk", "head": "tail"}
    renamed = {names[name]: its for name, its in _BEFORE.items()}
    plan = saving.plan(_BEFORE, renamed, rename={f"{old}.**": f"{new}.**" for old, new in names.items()})
    state = taken(fresh(_in(dict.fromkeys(names, schedule)), _BEFORE))
    with pytest.raises(ValueError, match=r"'t\w+' keeps no array of a parameter, .* was \w+, \w+;"):
        plan.state(state, fresh(_in(dict.fromkeys(names.values(), schedule)), renamed))


def test_a_memory_of_a_group():
    """What is not of its parameters may be added and left out."""
    rules = {"body": optax.lbfgs(0.1, memory_size=2, linesearch=None), "**": optax.sgd(0.1, momentum=0.9)}
    state = taken(fresh(_in(rules), _BEFORE))
    new = {"body": _BEFORE["body"], "new": ramp(2)}
    plan = saving.plan(_BEFORE, new, rename={"head.**": None}, strict=False)
    carried = plan.state(state, fresh(_in(rules), new))
    old, now = (its.runs[0].inner_states["body"] for its in (state, carried))
    assert_same(jax.tree.leaves(now), jax.tree.leaves(old))
    fewer = {"body": {"w": ramp(2, 2)}, "head": _BEFORE["head"]}
    with pytest.raises(ValueError, match="L-BFGS remembers steps of all its parameters together"):
        saving.plan(_BEFORE, fewer, rename={"body.b": None}).state(state, fresh(_in(rules), fewer))


# -- Arrays of other shapes than the parameters' -----------------------------------------------------------------------

_FACTORS = optax.adafactor(0.1, min_dim_size_to_factor=2)


def test_sm3_and_adafactor_with_names_dropped_and_cast():
    old = [ramp(2, 3), ramp(3), ramp(4, 2)]
    for rule in (optax.sm3(0.1), _FACTORS):
        state = taken(fresh(made(optim.trainable, rule), old))
        for kept in ((0, 1), (0, 2), (1, 2), (1,)):
            new = [old[i] for i in kept]
            rename = {str(i): str(kept.index(i)) if i in kept else None for i in range(3)}
            carried = saving.plan(old, new, rename=rename).state(state, fresh(made(optim.trainable, rule), new))
            for before, after in zip(state.runs[0][0], carried.runs[0][0], strict=True):
                assert_same(after, [before[i] for i in kept] if isinstance(before, list) else before)
        # A cast and a product with one leave each element where it is, so what is kept beside it stays, too.
        new = [ramp(2, 3, dtype=jnp.bfloat16), old[1], old[2]]
        plan = saving.plan(old, new, transform={"0": lambda x: (x * 1).astype(jnp.bfloat16)})
        carried = plan.state(state, fresh(made(optim.trainable, rule), new))
        for before, after in zip(*map(jax.tree.leaves, (state.runs, carried.runs)), strict=True):
            np.testing.assert_array_equal(before.astype(after.dtype), after)


REFUSED = {
    "rows of a stack": (
        optax.sm3(0.1),
        {"0": "0.*"},
        None,
        [[ramp(3), ramp(3)]],
        r"'0\.0' is made of \['0'\] by unstack, but .* parameters' shapes",
    ),
    "transposed factors": (
        _FACTORS,
        None,
        {"0": jnp.transpose},
        [ramp(3, 2)],
        r"shapes \[\(2,\)\] at '0\.v_row\.\*'",
    ),
    "accumulators": (
        optax.sm3(0.1),
        None,
        {"0": jnp.transpose},
        [ramp(3, 2)],
        r"\[\(2,\)\] at '0\.mu\.\*\.0', which are",
    ),
    "factors of a stack": (_FACTORS, {"0": "0.*"}, None, [[ramp(3), ramp(3)]], "parameters' shapes, and not all alike"),
}


@pytest.mark.parametrize(("rule", "rename", "transform", "new", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_moved_with_a_parameter(rule, rename, transform, new, message):
    old, tx = [ramp(2, 3)], made(optim.trainable, rule)
    with pytest.raises(ValueError, match=message) as caught:
        saving.plan(old, new, rename=rename, transform=transform).state(taken(fresh(tx, old)), fresh(tx, new))
    assert "another transformation" not in str(caught.value)
    assert "begin with a fresh state" in str(caught.value)
