"""The boundary between models and Optax: what a state is and has in it, what it costs, what stays untouched."""

import collections
import copy
import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax.training.train_state import TrainState

import treeparams as tp
from treeparams import optim

from .. import zoo
from ..zoo import ZOO, assert_close, assert_same, filled, ramp
from .test_optim import LINE_SEARCH, MOMENTUM, forms, two

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Optax's rules promote


def test_what_trains_is_what_the_state_says_and_updates_may_be_gradients():
    model, state = two(), optim.trainable(optax.sgd(0.5), "a").init(two())
    assert state.layout.paths == ("a",)
    tx = copy.deepcopy(optim.trainable(optax.sgd(0.5), "b"))  # an outer optimiser over the steps of an inner one
    updates, _ = tx.update(tx.update(tp.copy(model), state, model)[0], state, model)
    assert updates["b"] is None
    np.testing.assert_array_equal(updates["a"], 0.25)


def test_apply_updates_keeps_what_has_no_update():
    for specimen in ZOO.values():
        model = specimen.make()
        same = optim.apply_updates(model, tp.project(model, {}, specimen.layout(model)))
        assert all(a is b for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(model), strict=True))


@forms
def test_dtypes_never_drift(form):
    with zoo.enable_x64(True):
        model = {"half": jnp.ones(3, "float16"), "low": jnp.ones(3, "bfloat16"), "single": jnp.ones(2, jnp.float32)}
        tx = form(optax.chain(optax.clip(10.0), optax.adamw(optax.constant_schedule(1e-3))))
        state = tx.init(model)
        grads = jax.tree.map(lambda x: np.ones(x.shape), model)  # wider than any leaf
        shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
        after = jax.eval_shape(lambda model, state: optim.step(tx, grads, state, model), model, state)
        assert shapes(after) == shapes((model, state))


clip, injected = optim.clip_by_global_norm(0.5), optax.inject_hyperparams(optax.sgd)(0.1)
TRANSFORMATIONS = {
    "flat": (optax.contrib.schedule_free_sgd(0.1), "vector"),
    "groups": (optax.chain(clip, optim.groups({"b": injected}, default=optax.MultiSteps(optax.adam(0.1), 3))), "tree"),
    "stacked groups": (optim.groups({"b": LINE_SEARCH}, default=optim.per_leaf(optax.lamb(0.1))), "stacks"),
}


@pytest.mark.parametrize(("rule", "form"), TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys())
def test_one_trace_donation_and_checkpoints_by_pickle_and_by_orbax(rule, form, tmp_path):
    traces = []
    loss = lambda model: jnp.sum((model["a"] - 3) ** 2) + jnp.sum(model["b"] ** 2)
    tx, model = optim.trainable(rule, form=form), two()
    state = tx.init(model)
    leaves = [leaf for leaf in jax.tree.leaves((model, state)) if isinstance(leaf, jax.Array) and leaf.size]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)  # no buffer twice

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(model, state):
        traces.append(1)
        value, grads = tp.value_and_grad(loss)(model)
        return optim.step(tx, grads, state, model, value=value, grad=grads, value_fn=loss)

    for _ in range(10):
        model, state = step(model, state)
    assert loss(model) < loss(two())
    restored = [pickle.loads(pickle.dumps(state))]
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored.append(checkpointer.restore(tmp_path / "state", tx.init(two())))
    steps = [step(tp.copy(model), tp.copy(each))[0] for each in (state, *restored)]
    for each, after in zip(restored, steps[1:], strict=True):
        assert_same((each, after), (state, steps[0]), identity=False)
    assert len(traces) == 1


def test_costs_what_optax_costs_by_hand_and_a_norm_no_backward_pass_of_what_is_frozen():
    model, rule = filled(eqx.nn.MLP, 16, 16, 32, 4), optax.adamw(0.1)
    (params, rest), x = tp.partition(model), np.ones((8, 16), np.float32)
    loss = lambda model: jnp.mean(jax.vmap(model)(x) ** 2)
    of_params = jax.grad(lambda params: loss(tp.combine(params, rest)))  # of all: XLA drops what nobody needs

    def ours(tx, grad, params, state):
        model = tp.combine(params, rest)
        updates, state = tx.update(grad(params), state, model)
        return tp.partition(optim.apply_updates(model, updates), rest.layout)[0], state

    def by_hand(params, state):
        updates, state = rule.update(of_params(params), state, params)
        return optax.apply_updates(params, updates), state

    tx = optim.trainable(rule, rest.layout)
    by_us = lambda params: tp.grad(loss, rest.layout)(tp.combine(params, rest))
    got = zoo.cost(functools.partial(ours, tx, by_us), params, tx.init(model))
    want = zoo.cost(by_hand, params, rule.init(params))
    for each in ("flops", "bytes accessed"):
        assert got[each] <= 1.005 * want[each]
    last = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(0.1)), "layers.4")
    assert zoo.flops(functools.partial(ours, last, of_params), params, last.init(model)) < 0.5 * want["flops"]


def test_the_public_names_are_these():
    names = "trainable step apply_updates set_trainable adjust report groups scaled master per_leaf clip_by_global_norm"
    names += " from_optax to_optax value_and_grad_from_state eval_params"
    assert {name for name, value in vars(optim).items() if name[0] != "_" and callable(value)} == {*names.split()}


def test_a_rule_that_changes_its_state_is_refused():
    model = two()
    for change, match in ((lambda s: (s,), "structure of its state"), (lambda s: s[:1], "shape of its state at")):
        rule = optax.GradientTransformation(lambda p: jnp.zeros(2), lambda u, s, p=None, c=change: (u, c(s)))
        tx = optim.trainable(rule)
        with pytest.raises(ValueError, match=match):
            tx.update(tp.copy(model), tx.init(model), model)


@forms
@pytest.mark.parametrize("name", ["nothing trained", "all frozen"])
def test_nothing_trained_warns_and_changes_nothing(form, name):
    model = ZOO[name].make()
    tx = form(MOMENTUM, ZOO[name].layout(model))
    with pytest.warns(UserWarning, match="nothing is trained"):
        state = tx.init(model)
    same, after = optim.step(tx, jax.tree.map(lambda _: None, model), state, model)
    assert_same((same, after), (model, state))


# -- What a state has in it: value and gradient of a line search, parameters to evaluate at, hyperparameters -----------

SEARCH = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9, store_grad=True))


def problem():
    """A model of which a part is frozen and two places are tied, and the parameters that plain Optax would have."""
    shared = ramp(2)
    return {"a": shared, "b": [shared, ramp(3)], "mean": ramp(2), "n": np.array(3)}, {"a": shared, "c": ramp(3)}


def test_a_step_evaluates_the_loss_as_often_as_in_the_loop_of_optax():
    counted, sizes, (model, params) = collections.Counter(), jnp.array([1.0, 9.0]), problem()
    layout = tp.layout(model).freeze("mean")

    def counting(name, parts_of):
        def loss(tree, sizes):
            jax.debug.callback(lambda: counted.update([name]))
            first, again, other = parts_of(tree)
            return jnp.sum(sizes * first**2 + again**4) + jnp.sum(other**2)

        return loss

    def run(fetch, step, loss, start):
        def one(carry, _):
            value, grad = fetch(loss)(carry[0], sizes, state=carry[1])
            extra = {"value": value, "grad": grad, "value_fn": loss, "sizes": sizes}
            return step(grad, carry[1], carry[0], **extra), value

        return jax.lax.scan(one, start, length=6)[1]

    def plain(gradient, state, params, **extra):
        updates, state = SEARCH.update(gradient, state, params, **extra)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def runs():
        loss = counting("optax", lambda params: (params["a"], params["a"], params["c"]))
        values = [run(optax.value_and_grad_from_state, plain, loss, (params, SEARCH.init(params)))]
        for form in ("tree", "vector"):
            tx, loss = optim.trainable(SEARCH, layout, form=form), counting(form, lambda m: (m["a"], *m["b"]))
            start = model, tx.init(model)
            values.append(run(optim.value_and_grad_from_state, functools.partial(optim.step, tx), loss, start))
        return values

    wanted, *found = runs()
    jax.effects_barrier()
    for values in found:
        np.testing.assert_allclose(values, wanted, rtol=1e-5)
    assert (len(counted), len(set(counted.values()))) == (3, 1), counted


def test_without_a_trace_the_state_says_whether_to_compute():
    model, calls = {"w": ramp(2), "frozen": ramp(2), "rate": 0.5}, list[int]()
    loss = lambda model: calls.append(1) or jnp.sum(model["w"] ** 2)
    tx = optim.trainable(SEARCH, "w")
    state, fetch = tx.init(model), optim.value_and_grad_from_state(loss)
    value, grads = fetch(model, state=state)
    assert len(calls) == 1
    after, state = optim.step(tx, grads, state, model, value=value, grad=grads, value_fn=loss)
    calls.clear()
    found = fetch(after, state=state)
    assert not calls
    assert_close(found, tp.value_and_grad(loss, "w")(after))
    thawed = optim.set_trainable(tx, state, after, ["w", "frozen"], reset=True)  # which has not searched yet
    calls.clear()
    assert_close(fetch(after, state=thawed), tp.value_and_grad(loss, thawed.layout)(after))
    assert len(calls) == 2


FREE, EVALUATE = optax.contrib.schedule_free_sgd(0.1), optax.contrib.schedule_free_eval_params
ways = [("tree", lambda tx: tx), ("vector", lambda tx: tx), ("stacks", lambda tx: tx), ("stacks", optim.per_leaf)]


def later(state):
    """A state as if steps had been taken."""
    return jax.tree.map(lambda leaf: leaf + np.float32(0.25) if leaf.dtype == jnp.float32 else leaf, state)


@pytest.mark.parametrize(("form", "within"), ways)
def test_parameters_to_evaluate_at_are_those_of_optax(form, within):
    model, params = problem()
    state = later(optim.trainable(within(FREE), "!mean", form=form).init(model))
    evaluated, wanted = optim.eval_params(EVALUATE, state, model), EVALUATE(later(FREE.init(params)), params)
    assert float(wanted["a"][0]) != float(params["a"][0])
    assert_close([evaluated["a"], evaluated["b"][1]], [wanted["a"], wanted["c"]])
    kept = (evaluated["b"][0] is evaluated["a"], evaluated["mean"] is model["mean"], evaluated["n"] is model["n"])
    assert kept == (True, True, True)


def test_each_history_is_evaluated_by_itself():
    model, of_second = {"x": ramp(2), "y": ramp(3)}, lambda state, params: EVALUATE(state[1], params)
    tx = optim.trainable(optax.chain(optax.identity(), FREE), "x")
    state = optim.set_trainable(tx, later(tx.init(model)), model)
    evaluated = optim.eval_params(of_second, state, model)
    for path in model:
        (run,) = [run for run in state.runs if run[1].z[path] is not None]
        assert_same(evaluated[path], EVALUATE(run[1], model | {other: None for other in model if other != path})[path])
    held = optim.set_trainable(tx, state, model, "x")
    assert optim.eval_params(of_second, held, model)["y"] is model["y"]


def test_a_state_that_has_no_such_thing_is_refused():
    model, loss = {"x": ramp(2), "y": ramp(2)}, lambda model: jnp.sum(model["x"])
    forgets = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9))
    mixed = optim.groups({"x": FREE}, default=optax.sgd(0.1, momentum=0.9))
    searches = lambda state: optim.value_and_grad_from_state(loss)(model, state=state)
    evaluates = lambda state: optim.eval_params(EVALUATE, state, model)
    many, no_model = (
        r"expected one line search .*, found {}: use optax\.lbfgs",
        "the state of one transformation over mod",
    )
    for call, state, match in (
        (searches, optim.trainable(optax.adam(0.1)).init(model), many.format(0)),
        (searches, optim.trainable(forgets).init(model), many.format(0)),
        (searches, optim.trainable(optax.chain(SEARCH, SEARCH)).init(model), many.format(2)),
        (searches, SEARCH.init(model), f"expected {no_model}"),
        (evaluates, optim.trainable(mixed, form="stacks").init(model), "in stacks of groups"),
        (evaluates, FREE.init(model), f"expected {no_model}"),
    ):
        with pytest.raises(ValueError, match=match):
            call(state)


def test_hyperparameters_are_where_the_users_of_optax_read_them():
    model = {"a": ramp(2), "b": ramp(2)}
    tx = optim.trainable(optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.5), "a")
    state = optim.adjust(tx.init(model), learning_rate=0.25)
    assert {name: float(value) for name, value in state.hyperparams.items()} == {"learning_rate": 0.25, "momentum": 0.5}
    _, state = tx.update(tp.copy(model), state, model)
    for where in ("b", "**"):  # they are of the run
        assert optim.set_trainable(tx, state, model, where).hyperparams["learning_rate"] == 0.25
    rows = optim.trainable(optim.per_leaf(optax.inject_hyperparams(optax.sgd)(0.1)), "a", form="stacks")
    assert rows.init(model).hyperparams["learning_rate"].shape == (1,)
    with pytest.raises(ValueError, match=r"several histories train, each with hyperparameters in state.runs: a; b"):
        _ = optim.set_trainable(rows, rows.update(tp.copy(model), rows.init(model), model)[1], model).hyperparams


# -- Code that adds an update to every leaf: updates of zeros, in place of `None` --------------------------------------

SPECIAL = [-0.0, 0.0, np.inf, -np.inf, np.nan, 1.5]
PAYLOADS = np.array([0x7FC12345, 0x80000000, 0x7F812345, 0x00000001], "u4")  # numbers by their bits


def specials():
    """Trained, without a gradient, and frozen arrays of each kind; numbers."""
    frozen = [np.array(SPECIAL, "f4"), np.array(SPECIAL, jnp.bfloat16), np.array([-0.0, complex(-0.0, np.nan)], "c8")]
    bits = [PAYLOADS.view("f4"), (PAYLOADS >> 16).astype("u2").view(jnp.bfloat16)]
    model = {"frozen": jax.device_put(frozen), "bits": jax.device_put(bits), "rate": -0.0, "is_on": True}
    model |= {"count": jnp.array(7), "mask": jnp.array([True, False]), "key": jax.random.PRNGKey(3)}
    return model | {"w": ramp(2, 3), "no gradient": ramp(3, dtype=jnp.bfloat16), "numpy": np.array([-0.0, 2.0], "f4")}


def bits_of(tree):
    arrays = [np.asarray(jnp.asarray(leaf)) for leaf in jax.tree.leaves(tree)]
    return [(array.dtype, array.shape, array.tobytes()) for array in arrays]


def test_updates_have_the_structure_and_dtypes_of_the_model_and_change_no_bit_of_it():
    before, programs = specials(), {}
    for missing in (None, "zeros"):
        tx = optim.trainable(optax.sgd(0.1), ["w", "no gradient"], missing=missing)
        state = tx.init(before)
        programs[missing] = jax.make_jaxpr(lambda m, s, tx=tx: tx.update({"w": m["w"]}, s, m))(before, state)
    added = {str(eqn.primitive) for eqn in programs["zeros"].eqns[len(programs[None].eqns) :]}
    assert (added, programs["zeros"].consts) == ({"broadcast_in_dim"}, [])
    update = lambda model: tx.update({"w": ramp(2, 3)}, state, model)[0]
    updates = update(before)
    assert jax.tree.structure(updates) == jax.tree.structure(before)  # code over dm-tree asks no more
    assert [each[:2] for each in bits_of(updates)] == [each[:2] for each in bits_of(before)]
    apply = lambda model: optax.apply_updates(model, update(model))
    for after, moved in ((apply(before), {"w": 0, "bits": 0}), (jax.jit(apply)(before), {"w": 0})):  # XLA adds nothing
        np.testing.assert_allclose(after["w"], 0.9 * before["w"], rtol=1e-6)
        assert bits_of(after | moved) == bits_of(before | moved)
    assert optim.step(tx, {"w": ramp(2, 3)}, state, before)[0]["frozen"][0] is before["frozen"][0]


def test_what_nothing_can_be_added_to_has_no_zero_and_optax_fetches_from_such_a_state():
    model = {"w": ramp(2), "key": jax.random.key(0), "f": jnp.tanh, "text": "relu", "n": 2}
    tx = optim.trainable(SEARCH, "w", missing="zeros")
    loss = lambda params, rest: jnp.sum(tp.combine(params, rest)["w"] ** 2)
    state, extra = tx.init(model), {"value": 1.0, "grad": {"w": ramp(2)}, "value_fn": lambda m: jnp.sum(m["w"] ** 2)}
    updates, _ = tx.update({"w": ramp(2)}, state, model, **extra)
    assert {path: updates[path] for path in model.keys() - {"w"}} == {"key": None, "f": None, "text": None, "n": 0}
    params, rest = tp.partition(model, state.layout)
    value, grads = optax.value_and_grad_from_state(loss)(params, rest, state=state)
    np.testing.assert_allclose((value, *grads["w"]), (jnp.sum(model["w"] ** 2), *2 * model["w"]), rtol=1e-6)


@forms
def test_a_train_state_trains_what_is_not_frozen_with_ties(form):
    shared = ramp(2, 3)
    params = {"encoder": {"table": ramp(3)}, "embed": shared, "head": shared, "count": jnp.array(3)}
    run = TrainState.create(apply_fn=None, params=params, tx=form(optax.adamw(0.1), "!encoder", missing="zeros"))
    run = run.apply_gradients(grads=jax.tree.map(lambda leaf: np.ones(leaf.shape, "f4"), params))
    # The first step of Adam is as long as the rate, whatever the gradient; then comes the decay.
    np.testing.assert_allclose(run.params["embed"], np.asarray(shared) * (1 - 0.1 * 1e-4) - 0.1, rtol=1e-5)
    np.testing.assert_array_equal(run.params["embed"], run.params["head"])
    np.testing.assert_array_equal(run.params["encoder"]["table"], params["encoder"]["table"])
    assert int(run.params["count"]) == 3
