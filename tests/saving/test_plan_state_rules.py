"""plan.state by rule: states of plain Optax, groups by other names, arrays that are not of the parameters' shapes."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from ..zoo import VECTOR, assert_same, ramp
from .test_plan import row
from .test_plan_state import MODEL, RULE, fresh, made, taken

pytestmark = pytest.mark.usefixtures("standard_promotion")

# -- Plain Optax -------------------------------------------------------------------------------------------------------


def plain(rule, model, steps=2):
    """A state of plain Optax with numbers in it, as if steps had been taken."""
    leaves, treedef = jax.tree.flatten(jax.eval_shape(rule.init, eqx.filter(model, eqx.is_array)))
    floats = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return treedef.unflatten(
        row(*x.shape, start=9 * i) if floats(x) else np.full(x.shape, steps, x.dtype) for i, x in enumerate(leaves)
    )


PLAIN = {
    "adam": (RULE, optim.trainable),
    "flat": (RULE, VECTOR),
    "schedule": (optax.sgd(optax.constant_schedule(0.1)), optim.trainable),
    "steps": (optax.MultiSteps(RULE, 2), optim.trainable),
    "factors": (optax.adafactor(0.1, min_dim_size_to_factor=2), optim.trainable),
    "rates": (optax.inject_hyperparams(optax.adam)(0.1), optim.trainable),
}


@pytest.mark.parametrize(("rule", "form"), PLAIN.values(), ids=PLAIN.keys())
def test_a_state_of_plain_optax(rule, form, tmp_path):
    """It is as if it had become a state of this library first, in memory and from a file."""
    old = {"net": [{"w": ramp(2, 3), "b": ramp(3)}, {"w": ramp(2, 3), "b": ramp(3)}], "n": np.arange(2), "a.b": ramp(2)}
    new = {
        "layers": [{"w": ramp(2, 3), "bias": ramp(3)}, {"w": ramp(2, 3), "bias": ramp(3)}],
        "new": ramp(1),
        "z": ramp(2),
    }
    rename = {"net.*.b": "layers.*.bias", "net.**": "layers.**", '"a.b"': "z", "n": None}
    plan, tx = saving.plan(old, new, rename=rename, strict=False), made(form, rule)
    state, like = plain(rule, old), fresh(tx, new)
    want = plan.state(optim.from_optax(tx, state, old), like)
    assert [int(count) for count in want.counts] == [2, 0]
    saving.save(tmp_path / "run.safetensors", {"optimiser": state})
    names = saving.names(tmp_path / "run.safetensors", "optimiser")
    for source, its in ((state, rule), (state, tx), (names, rule)):
        carried = plan.state(source, like, tx=its)
        assert jax.tree.structure(carried) == jax.tree.structure(want)
        assert_same(carried, want)


def test_plain_optax_through_functions_and_over_some_parameters():
    old, new = {"w": ramp(2, 3), "v": ramp(3), "f": ramp(2)}, {"u": ramp(3, 2), "v": ramp(3), "f": ramp(2)}
    plan = saving.plan(old, new, rename={"w": "u"}, transform={"w": jnp.transpose})
    some = plain(RULE, {"w": old["w"], "v": None, "f": old["f"]})  # the others were frozen
    carried = plan.state(some, fresh(made(optim.trainable, RULE), new), tx=RULE)
    assert [int(count) for count in carried.counts] == [2, 0]
    np.testing.assert_array_equal(carried.runs[0][0].mu["u"], some[0].mu["w"].T)
    np.testing.assert_array_equal(carried.runs[0][0].mu["f"], some[0].mu["f"])
    assert_same(carried.runs[1][0].mu["v"], np.zeros(3, np.float32), identity=False)


def test_numbers_of_python_in_a_state_of_plain_optax(tmp_path):
    def init(params):
        return {"lr": 0.1, "mu": jax.tree.map(jnp.zeros_like, params)}

    rule = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    state = init({"w": ramp(2)}) | {"lr": 0.05}
    saving.save(tmp_path / "a", {"state": state})
    plan, like = (
        saving.plan({"w": ramp(2)}, {"v": ramp(2)}, rename={"w": "v"}),
        fresh(optim.trainable(rule), {"v": ramp(2)}),
    )
    for source in (state, saving.names(tmp_path / "a", "state")):
        assert plan.state(source, like, tx=rule).runs[0]["lr"] == np.float32(0.05)


def test_plain_optax_of_dotted_keys_of_ties_and_of_one_array():
    dotted, shared, like = (
        {"a.w": ramp(2), "b": ramp(3)},
        ramp(2),
        functools.partial(fresh, made(optim.trainable, RULE)),
    )
    state, new = plain(RULE, dotted), {"w": ramp(2), "b": ramp(3)}
    for source in (dotted, tp.layout(dotted)):
        carried = saving.plan(source, new, rename={"a.w" if source is dotted else '"a.w"': "w"}).state(
            state, like(new), tx=RULE
        )
        np.testing.assert_array_equal(carried.runs[0][0].mu["w"], state[0].mu["a.w"])
    dotted = {"a": ramp(2), "a.w": ramp(3)}
    carried = saving.plan(dotted, {"x": dotted["a"], "y": dotted["a.w"]}, rename={"a": "x", "a.w": "y"})
    state = carried.state(plain(RULE, dotted), like({"x": ramp(2), "y": ramp(3)}), tx=RULE)
    np.testing.assert_array_equal(state.runs[0][0].mu["y"], plain(RULE, dotted)[0].mu["a.w"])
    tied, apart = {"e": shared, "h": shared}, {"x": ramp(2), "y": ramp(2)}
    state = plain(RULE, tied)
    carried = saving.plan(tp.layout(tied), apart, rename={"e": "x", "h": "y"}).state(state, like(apart), tx=RULE)
    np.testing.assert_array_equal(carried.runs[0][0].nu["x"], state[0].nu["e"])
    state = plain(RULE, ramp(2))
    carried = saving.plan(ramp(2), {"w": ramp(2)}, rename={"": "w"}).state(state, like({"w": ramp(2)}), tx=RULE)
    np.testing.assert_array_equal(carried.runs[0][0].mu["w"], state[0].mu)


def test_plain_optax_is_refused_without_its_rule_or_with_another():
    state, like = plain(RULE, MODEL), fresh(made(optim.trainable, RULE), MODEL)
    plan = saving.plan(MODEL, MODEL)
    with pytest.raises(
        TypeError, match=r"expected a state of optim\.trainable.*For a state of plain Optax also pass the rule"
    ):
        plan.state(state, like)
    with pytest.raises(ValueError, match=r"the state has nothing at 0\.trace.*it was made by another transformation"):
        plan.state(state, like, tx=optax.sgd(0.1, momentum=0.9))
    with pytest.raises(TypeError, match="expected an Optax transformation, got"):
        plan.state(state, like, tx=0.1)
    listed = optax.GradientTransformation(
        lambda params: [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(params)],
        lambda grads, state, params: (grads, state),
    )
    with pytest.raises(ValueError, match=r"keeps an array of 'a' at '0', by a number and not by its path"):
        plan.state(plain(listed, MODEL), like, tx=listed)


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
    with pytest.raises(
        ValueError, match=r"no place: it was made by another transformation, or a parameter is now in another group"
    ):
        saving.plan(_BEFORE, _BEFORE).state(state, fresh(_in({"body": _MOMENTUM, "head": _ADAM}), _BEFORE))


def test_groups_that_keep_nothing_of_parameters():
    schedule = optax.sgd(optax.constant_schedule(0.1))
    state = taken(fresh(_in({"body": _ADAM, "head": schedule}), _BEFORE))
    new = {"body": _BEFORE["body"], "tail": _BEFORE["head"]}
    plan = saving.plan(_BEFORE, new, rename={"head.**": "tail.**"})
    carried = plan.state(state, fresh(_in({"body": _ADAM, "tail": schedule}), new))  # the only one that is no more
    assert_same(jax.tree.leaves(carried), jax.tree.leaves(state))
    names = {"body": "trunk", "head": "tail"}
    renamed = {names[name]: its for name, its in _BEFORE.items()}
    plan = saving.plan(_BEFORE, renamed, rename={f"{old}.**": f"{new}.**" for old, new in names.items()})
    state = taken(fresh(_in(dict.fromkeys(names, schedule)), _BEFORE))
    with pytest.raises(ValueError, match=r"the state has nothing at 'inner_states\.t.*count', which a fresh state has"):
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
        r"place: '0\.\d' is made by unstack, and the rule keeps other",
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
