"""States of rules as copies of a form: which array is of which parameter, and all that follows from it."""

import collections
import dataclasses
import gc
import pickle
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving
from treeparams._forms.form import Form
from treeparams._forms.states import Division

from ..zoo import assert_close, assert_same, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")


def _pair():
    return {"a": jnp.array([3.0, 4.0]), "b": jnp.array([30.0, 40.0])}


# -- Dividing ----------------------------------------------------------------------------------------------------------

MODEL = {"deep": [ramp(2, 3), ramp(2, 3)], "w": ramp(3), "s": ramp()}
LAYOUT = tp.layout(MODEL)


def _owners(rule, form):
    """The paths, place and axis of each array, by its own path; those that all share have none."""
    state = jax.eval_shape(rule.init, form.shapes())
    division = Division.of(rule.init, form, state)
    assert not division.problem
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    return dict(zip(names, division.owners, strict=True))


def test_each_array_is_of_one_parameter_in_a_tree_all_in_a_vector_and_has_a_row_for_each_in_stacks():
    found = _owners(optax.adam(0.1), Form.tree(LAYOUT))
    owners = found["[0].nu['deep'][1]"]
    assert (owners.paths, owners.place, owners.axis) == (("deep.1",), (("0", "nu"), ()), None)
    assert [path for path, each in found.items() if each is None] == ["[0].count"]
    owners = _owners(optax.adam(0.1), Form.vector(LAYOUT))["[0].mu"]
    assert (owners.paths, owners.place, owners.axis) == (LAYOUT.paths, (("0", "mu"), ()), 0)
    assert owners.block.starts == [0, 6, 12, 13, 16]
    found = _owners(optim.per_leaf(optax.adafactor(0.1, min_dim_size_to_factor=2)), Form.stacks(LAYOUT))
    owners = next(each for path, each in found.items() if "v_row" in path and "[2,3]" in path)
    assert (owners.paths, owners.axis, owners.block.has_rows) == (("deep.0", "deep.1"), 0, True)
    assert None not in found.values()  # counts too


def _in_a_list(leaf):
    """A rule that lists what it keeps for each leaf."""
    init = lambda params: [leaf(each) for each in jax.tree.leaves(params)]
    return optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))


def test_a_list_is_divided_by_number():
    in_list = _in_a_list(lambda leaf: {"sum": jnp.zeros_like(leaf)})
    for form in (Form.tree, Form.stacks):
        found = _owners(optax.chain(optax.adam(0.1), in_list), form(LAYOUT))
        listed = [each for path, each in found.items() if path.startswith("[1]")]
        assert [each.paths for each in listed] == [each.paths for path, each in found.items() if "mu" in path]
        assert {each.place for each in listed} == {(("1",), ("sum",))}
    found = _owners(_in_a_list(lambda leaf: (jnp.zeros_like(leaf), jnp.zeros(()))), Form.tree(LAYOUT))
    assert [found[f"[{i}][1]"].paths for i in range(4)] == [(path,) for path in LAYOUT.paths]


def test_parameters_freeze_and_thaw_where_the_state_is_a_list():
    def update(grads, state, params=None):
        leaves, treedef = jax.tree.flatten(grads)
        sums = [old + leaf for old, leaf in zip(state, leaves, strict=True)]
        return treedef.unflatten([-each for each in sums]), sums

    tx = optim.trainable(optax.GradientTransformation(_in_a_list(jnp.zeros_like).init, update))
    model = _pair() | {"c": jnp.ones((2, 2))}
    _, state = tx.update(tp.copy(model), tx.init(model), model)
    state = optim.set_trainable(tx, state, model, ("b", "c"))
    _, state = tx.update(tp.copy(model), state, model)
    updates, _ = tx.update(tp.copy(model), optim.set_trainable(tx, state, model), model)
    assert_same(updates, {"a": -2 * model["a"], "b": -3 * model["b"], "c": -3 * model["c"]})


@pytest.mark.parametrize(
    "model", [[ramp(2), ramp(2)], {"mu": [ramp(2)], "0": ramp(2), "nu": ramp(2)}], ids=["list", "names"]
)
def test_a_parameter_may_be_called_as_the_state_is(model):
    rule = optax.chain(optax.adam(0.1), optax.ema(0.9), optax.adam(0.1))
    found = _owners(rule, Form.tree(tp.layout(model)))
    for place in (("0", "0", "mu"), ("1", "ema"), ("2", "0", "nu")):
        paths = [each.paths[0] for each in found.values() if each is not None and each.place == (place, ())]
        assert paths == list(tp.layout(model).paths)


def _numbered(grads, state, params=None):
    leaves, treedef = jax.tree.flatten(grads)
    state = state + jnp.stack([jnp.mean(each**2) for each in leaves])
    return treedef.unflatten([-leaf / jnp.sqrt(size) for leaf, size in zip(leaves, state, strict=True)]), state


# Arrays of all parameters: they go into one another, or have one number for each, or for each pair.
_pairs = optax.GradientTransformation(
    lambda p: {"n": jnp.zeros((len(jax.tree.leaves(p)),) * 2)}, lambda g, s, p: (g, s)
)
OF_ALL = {
    "flatten": optax.flatten(optax.adam(0.1)),
    "numbered": optax.GradientTransformation(lambda params: jnp.zeros(len(jax.tree.leaves(params))), _numbered),
    "numbered in a chain": optax.chain(optax.adam(0.1), _pairs),
}
NOT_BY_LEAF = "is not kept leaf by leaf, so it"


@pytest.mark.parametrize("rule", OF_ALL.values(), ids=OF_ALL)
def test_a_state_that_cannot_be_divided_trains_and_is_refused_where_it_would_have_to_be(rule, tmp_path):
    tx, model = optim.trainable(rule), _pair()
    updates, state = tx.update(tp.copy(model), tx.init(model), model)
    assert_close(updates, rule.update(tp.copy(model), rule.init(model), model)[0])
    with pytest.raises(ValueError, match=NOT_BY_LEAF):
        optim.set_trainable(tx, state, model, "a")
    with pytest.raises(ValueError, match=NOT_BY_LEAF):
        tx.update({"a": model["a"]}, state, model)
    for rename in ({"a": "b", "b": "a"}, {"a": "c", "b": "d"}):
        new = {rename[path]: leaf for path, leaf in model.items()}
        with pytest.raises(ValueError, match=NOT_BY_LEAF):
            saving.plan(model, new, rename=rename).state(state, like=tx.init(new))
    saving.save(tmp_path / "state", state)
    assert_same(saving.load(tmp_path / "state", tx.init(model)), state)
    with pytest.raises(ValueError, match=r"is not kept leaf by leaf.*: a, b in the file, c, d in the tree"):
        saving.load(tmp_path / "state", tx.init({"c": model["a"], "d": model["b"]}))
    turned = collections.OrderedDict((name, model[name]) for name in "ba")
    saving.save(tmp_path / "state", tx.init(collections.OrderedDict(reversed(turned.items()))))
    with pytest.raises(ValueError, match="a, b in the file, b, a in the tree"):
        saving.load(tmp_path / "state", tx.init(turned))


def test_numbers_that_all_share_are_not_of_the_parameters():
    rates = optax.inject_hyperparams(lambda rates: optax.sgd(rates[0], momentum=0.9))(jnp.array([0.1, 0.2]))
    tx, model = optim.trainable(optax.chain(rates, optax.add_noise(0.0, 0.5, 1))), _pair()
    _, state = tx.update(tp.copy(model), tx.init(model), model)
    state = optim.set_trainable(tx, state, model, "b")
    assert_same(state.runs[0][0].hyperparams["rates"], jnp.array([0.1, 0.2]))


# -- Static arrays -----------------------------------------------------------------------------------------------------


class Grid(eqx.Module):
    w: jax.Array
    at: object = eqx.field(static=True)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_models_of_one_class_have_static_arrays_of_their_own():
    rule = optax.adam(0.1)
    tx, gradient = optim.trainable(rule), {"net": {"w": jnp.array([3.0, 4.0])}}
    for at in (np.arange(2.0), np.arange(2.0), np.arange(3), jnp.ones(2), "none"):
        model, state = {"net": Grid(jnp.ones(2), at)}, None
        plain, plain_state = jnp.ones(2), rule.init(jnp.ones(2))
        for _ in range(2):  # the second in another process
            model, state = optim.step(tx, gradient, tx.init(model) if state is None else state, model)
            model, state = pickle.loads(pickle.dumps((model, state)))
            steps, plain_state = rule.update(gradient["net"]["w"], plain_state, plain)
            plain = plain + steps
        assert_same(model["net"].w, plain)
        assert_same(model["net"].at, at)
    model = {"net": Grid(jnp.ones(2), np.arange(2.0)), "b": jnp.ones(2)}
    decay = optim.trainable(optax.add_decayed_weights(1.0, mask=tp.layout(model, "net").mask))
    updates, _ = decay.update(jax.tree.map(jnp.zeros_like, model), decay.init(model), model)
    assert_same((updates["net"].w, updates["b"]), (jnp.ones(2), jnp.zeros(2)))  # masks fit such a model


# -- What lives on ----------------------------------------------------------------------------------------------------


def test_nothing_that_models_hold_lives_as_long_as_the_transformation():
    class Net(eqx.Module):
        w: jax.Array
        f: object = eqx.field(static=True)

    def make():
        captured = np.ones(3)
        return Net(jnp.ones((2, 2)), lambda x: x + captured), weakref.ref(captured)

    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(optax.lamb(0.1))), form="stacks")
    model, captured = make()
    tx.update(tp.partition(model)[0], tx.init(model), model)
    del model
    gc.collect()
    assert captured() is None


# -- Rows that wait ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_wait_count_in_no_norm(value):
    rule = optax.chain(optax.add_decayed_weights(0.1), optax.clip_by_global_norm(1.0), optim.per_leaf(optax.sgd(1.0)))
    model, grads = _pair() | {"b": jnp.array([value, 40.0])}, {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, 1.0])}
    tx = optim.trainable(rule, form="stacks")
    ways = [(grads, {"b": False}), (grads, {"b": jnp.array(False)}), ({"a": grads["a"]}, None)]
    run = jax.jit(lambda state: [tx.update(given, state, model, active=active)[0] for given, active in ways])
    for updates in run(tx.init(model)):
        np.testing.assert_allclose(updates["a"], [-0.6, -0.8], rtol=1e-6)
        assert not np.any(updates["b"] if updates["b"] is not None else 0)
    assert updates["b"] is None


# -- Extra arguments ---------------------------------------------------------------------------------------------------


def test_extra_arguments_reach_what_is_within_multisteps():
    scaled = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda grads, state, params=None, *, scale=1.0, **_: (jax.tree.map(lambda g: -scale * g, grads), state),
    )
    plateau, model = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), _pair()
    for tx, extra in (
        (optim.trainable(optax.MultiSteps(scaled, 1)), {"scale": 0.1}),
        (optim.trainable(optim.per_leaf(optax.MultiSteps(scaled, 1)), form="stacks"), {"scale": 0.1}),
        (optim.trainable(optax.MultiSteps(plateau, 1)), {"value": jnp.float32(1.0)}),
    ):
        updates, _ = tx.update(tp.copy(model), tx.init(model), model, **extra)
        assert_close(updates, jax.tree.map(lambda leaf: -0.1 * leaf, model))


# -- Other states ------------------------------------------------------------------------------------------------------


def test_the_state_of_another_rule_is_refused():
    model = _pair()
    adam, sgd = optim.trainable(optax.adam(0.1)), optim.trainable(optax.sgd(0.1))
    flat = optim.trainable(optax.adam(0.1), form="vector")
    for tx, other in ((sgd, adam), (adam, sgd), (adam, flat), (flat, adam)):
        with pytest.raises(ValueError, match="the state was made by another transformation than this one"):
            tx.update(tp.copy(model), other.init(model), model)


# -- Freezing and thawing ----------------------------------------------------------------------------------------------


LATE = {  # what couples leaves after the count of each has been used
    "a clip": ("tree", optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0))),
    "within MultiSteps": ("stacks", optax.MultiSteps(optax.chain(optax.adam(0.1), optim.clip_by_global_norm(1.0)), 2)),
    "of gradients that are divided by a count": ("tree", optax.MultiSteps(optax.clip_by_global_norm(1.0), 2)),
    "an estimate": ("vector", optax.contrib.prodigy(0.1)),
    "a search": ("tree", optax.chain(optax.adam(1.0), optax.scale_by_backtracking_linesearch(3))),
}
EARLY = {
    "a clip": optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.1)),
    "in a branch": optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 3),
    "a schedule, whose count is of the run": optax.chain(
        optax.scale_by_schedule(lambda n: jnp.where(n < 99, 1.0, 0.0)),
        optax.clip_by_global_norm(1.0),
        optax.sgd(0.1, 0.9),
    ),
}


@pytest.mark.parametrize(("form", "rule"), LATE.values(), ids=LATE)
def test_what_couples_parameters_after_their_counts_is_refused_where_histories_differ(form, rule):
    model = {"a": jnp.zeros(2), "b": jnp.zeros(2), "c": jnp.zeros(3)}
    tx = optim.trainable(rule, "a", form=form)
    state = dataclasses.replace(tx.init(model), counts=(jnp.array(2, jnp.int32),))
    assert len(optim.set_trainable(tx, state, model, "b").runs) == 1  # one history at a time may be any
    with pytest.raises(ValueError, match=r"different numbers of steps.*Put that first in the chain.*reset=True"):
        optim.set_trainable(tx, state, model)


@pytest.mark.parametrize(
    ("name", "form"),
    [("a schedule, whose count is of the run", "tree"), ("a clip", "vector"), ("in a branch", "stacks")],
)
def test_what_couples_them_before_sees_all(name, form):
    model = {"a": jnp.zeros(2), "b": jnp.zeros(2), "c": jnp.zeros(3)}
    grads = {"a": jnp.array([3.0, 0]), "b": jnp.array([0, 4.0]), "c": jnp.zeros(3)}
    tx = optim.trainable(EARLY[name], "a", form=form)
    state = tx.init(model)
    for _ in range(2):
        _, state = tx.update({"a": grads["a"]}, state, model)
    state = optim.set_trainable(tx, state, model)
    alone = optim.trainable(EARLY[name])
    begun = alone.init(model)  # what begins at once with the others
    for _ in range(2):
        updates, state = tx.update(grads, state, model)
        want, begun = alone.update(grads, begun, model)
        assert_close((updates["b"], updates["c"]), (want["b"], want["c"]), 1e-6)
    assert len(state.runs) == 2


def test_a_clip_of_momentum_without_counts_sees_that_of_all_and_a_vector_warns_of_gradients_by_another_layout():
    model, grads = {"a": jnp.zeros(1), "b": jnp.zeros(1)}, {"a": jnp.array([2.0]), "b": jnp.array([4.0])}
    for form in ("tree", "vector"):
        tx = optim.trainable(optax.chain(optax.trace(0.5), optim.clip_by_global_norm(1.0)), "a", form=form)
        _, state = tx.update({"a": grads["a"]}, tx.init(model), model)
        old, state = state.layout, optim.set_trainable(tx, state, model)
        updates, after = tx.update(grads, state, model)
        assert [float(run[1].norm) for run in after.runs] == [5.0, 5.0]
        assert_close(updates, {"a": jnp.array([0.6]), "b": jnp.array([0.8])}, 1e-6)
    with pytest.warns(UserWarning, match="no gradient so far for b, which the state trains"):
        tx.update(tp.grad(lambda m: jnp.sum(m["a"]), old)(model), state, model)


def test_a_group_whose_parameters_all_wait_goes_on_without_them():
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    adam = optim.per_leaf(optax.adam(0.1))
    tx = optim.trainable(optim.groups({"a": adam}, default=adam), form="stacks")
    _, state = tx.update(tp.copy(model), tx.init(model), model)
    frozen = optim.set_trainable(tx, state, model, "b")
    updates, after = tx.update({"b": model["b"]}, frozen, model)
    partial, _ = tx.update({"b": model["b"]}, state, model)
    assert_same((updates["b"], updates["a"]), (partial["b"], partial["a"]))
    again = optim.set_trainable(tx, after, model)
    assert_same(again.runs[0].inner_states["default"], after.runs[0].inner_states["default"])


def test_a_state_prints_a_line_for_each_history_and_a_transformation_what_it_is():
    model = {"a": ramp(2), "b": ramp(1)}
    tx = optim.trainable(optax.sgd(0.1, momentum=0.9), "a", missing="zeros", form="vector")
    assert repr(tx) == "optim.trainable(chain, trainable='a', form='vector', missing='zeros')"
    state = tx.update(tp.copy(model), tx.init(model), model)[1]
    assert repr(state) == "TrainableState\n  trains, 1 step taken: a"
    both = optim.set_trainable(tx, state, model, "b")
    assert repr(both) == "TrainableState\n  trains, 0 steps taken: b\n  waits, 1 step taken: a"
    texts = []
    jax.jit(lambda state: texts.append(repr(state)))(state)
    assert texts == ["TrainableState\n  trains, int32[] steps taken: a"]
    assert repr(jax.tree.map(lambda _: None, state)) == "TrainableState\n  trains, unknown steps taken: a"
