"""Optax over whole models: the laws of `optim.trainable`, over the zoo and around and within Optax's own wrappers."""

import copy
import functools
import pickle

import chex
import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

import treeparams as tp
from treeparams import optim

from . import zoo
from .zoo import ZOO, Specimen, assert_close, assert_same

RULES = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(0.1),
    "adafactor": optax.adafactor(0.1),
    "clipped": optax.chain(optim.clip_by_global_norm(0.5), optax.adam(0.1)),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
trained = {name: each for name, each in ZOO.items() if name not in ("nothing trained", "all frozen")}
specimens = pytest.mark.parametrize("specimen", trained.values(), ids=trained.keys())


class Declared(eqx.Module):
    """A tie that the class knows."""

    encoder: jax.Array
    decoder: jax.Array = tp.field(tied_to="encoder", transform=jnp.transpose)


TIED = {name: each for name, each in trained.items() if each.layout(each.make()).ties}
TIED["declared"] = Specimen(lambda: Declared(zoo.ramp(2, 3), zoo.ramp(2, 3).T))
pytestmark = pytest.mark.usefixtures("standard_promotion")  # Optax's rules promote


def conjugated(tree):
    return jax.tree.map(lambda x: jnp.conj(x) if jnp.iscomplexobj(x) else x, tree)


def mlp(depth=1):
    return eqx.nn.MLP(3, 1, 4, depth, key=jax.random.key(0))


DATA = jnp.linspace(-1, 1, 15).reshape(5, 3)


def fit(model):
    return jnp.mean((jax.vmap(model)(DATA) - jnp.sum(DATA, 1, keepdims=True)) ** 2)


def descend(tx, state, model, steps, grad=None, **extra):
    grad = tp.grad(fit) if grad is None else grad
    for _ in range(steps):
        model, state = optim.step(tx, grad(model), state, model, **extra)
    return model, state


# -- The same as Optax by hand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [RULES["momentum"], RULES["clipped"]])
@specimens
def test_equals_optax_on_the_canonical_tree(specimen: Specimen, rule):
    current = specimen.make()
    layout = specimen.layout(current)
    params, rest = tp.partition(current, layout)
    tx = optim.trainable(rule, layout)
    state, by_hand = tx.init(current), rule.init(params)
    for _ in range(3):
        grads = zoo.gradient_of_loss(layout)(current)
        updates, after = tx.update(grads, state, current)
        steps, by_hand = rule.update(conjugated(grads), by_hand, params)
        assert_close(tp.partition(updates, tp.layout(updates, thaw="**"))[0] if not layout.ties else steps, steps, 1e-6)
        current, state = optim.step(tx, grads, state, current)
        assert_same(state, after)
        params = optax.apply_updates(params, steps)
    assert_same(current, tp.combine(params, rest))
    kept = zip(jax.tree.leaves(rest), jax.tree.leaves(tp.partition(current, layout)[1]), strict=True)
    assert all(new is old for old, new in kept)  # what is frozen: the very same objects


@hypothesis.settings(deadline=None, max_examples=25, derandomize=True)
@hypothesis.given(zoo.models(floating=True))
def test_equals_plain_optax_where_all_is_trained_and_nothing_tied(model):
    hypothesis.assume(jax.tree.leaves(model))
    layout = tp.layout(tp.copy(model), thaw="**")
    rule = optax.adam(0.1)
    tx = optim.trainable(rule, layout)

    @jax.jit
    def run(model):
        grads = jax.tree.map(jnp.sin, model)
        return tx.update(grads, tx.init(model), model), rule.update(grads, rule.init(model), model)

    (updates, state), (steps, plain) = run(jax.tree.map(jnp.copy, model))
    assert_close(updates, steps)
    assert_close(jax.tree.leaves(state.runs), jax.tree.leaves(plain))


@specimens
def test_the_same_in_jit_and_scan(specimen: Specimen):
    model = specimen.make()
    layout = specimen.layout(model)
    tx = optim.trainable(optax.adam(0.1), layout)
    params, rest = tp.partition(model, layout)

    def step(carry, _):
        params, state = carry
        model = tp.combine(params, rest)
        model, state = optim.step(tx, zoo.gradient_of_loss(layout)(model), state, model)
        return (tp.partition(model, layout)[0], state), None

    start = (params, tx.init(model))
    eager, _ = step(start, None)
    eager, _ = step(eager, None)
    scanned, _ = jax.lax.scan(step, start, length=2)
    assert jax.tree.structure(scanned) == jax.tree.structure(start)
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(eager), strict=True):
        zoo.assert_close(a, b, 1e-2 if a.dtype in (jnp.bfloat16, jnp.float16) else 1e-5)


def test_over_an_ensemble_by_vmap():
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key))(jax.random.split(jax.random.key(0), 3))
    tx = optim.trainable(optax.adam(0.1))
    arrays, static = eqx.partition(models, eqx.is_array)

    def train(arrays):
        model = eqx.combine(arrays, static)
        model, state = descend(tx, tx.init(model), model, 2)
        return eqx.filter(model, eqx.is_array), state

    together, states = jax.jit(jax.vmap(train))(arrays)
    train = jax.jit(train)
    for i in range(3):
        member = functools.partial(jax.tree.map, lambda x, i=i: x[i])
        alone = train(member(arrays))
        assert_close((member(together), member(states)), alone)


# -- Ties ------------------------------------------------------------------------------------------------------------


def tied():
    t = jnp.array([1.0, 2.0])
    return {"t": [t, t], "copy": [jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0])]}


three, five, seven = (jnp.full(2, x) for x in (3.0, 5.0, 7.0))


@pytest.mark.parametrize("form", [optim.trainable, optim.flat])
@pytest.mark.parametrize(
    ("grads", "tie"),
    [
        (([three, jnp.full(2, 10.0) + seven]), [-1.0, 0.0]),
        (([three, None]), [0.7, 1.7]),
        (([None, five + jnp.full(2, 2.0)]), [0.3, 1.3]),
    ],
)
def test_a_tie_stays_one_array_and_gets_the_sum(form, grads, tie):
    model, tx = tied(), form(optax.sgd(0.1, momentum=0.9))
    updates, _ = tx.update({"t": grads, "copy": [None, five]}, tx.init(model), model)
    model = optim.apply_updates(model, updates)
    assert model["t"][0] is model["t"][1]
    np.testing.assert_allclose(model["t"][0], tie, rtol=1e-6)
    np.testing.assert_allclose(model["copy"][1], [0.5, 1.5], rtol=1e-6)
    np.testing.assert_array_equal(updates["t"][1], updates["t"][0])


def test_a_tie_at_two_depths_from_fresh_states():
    t = jnp.array([1.0, 2.0])
    model = (t, (t, jnp.array([1.0, 2.0])))
    tx = optim.trainable(optax.sgd(0.1, momentum=0.9))

    def after(grads):
        return optim.apply_updates(model, tx.update(grads, tx.init(model), model)[0])

    first, (second, copy) = after((three / 3, (9 * three / 3, seven)))
    np.testing.assert_allclose(first, [0.0, 1.0], atol=1e-6)
    assert first is second
    np.testing.assert_allclose(copy, [0.3, 1.3], rtol=1e-6)
    first, (second, copy) = after((three, None))
    np.testing.assert_allclose(first, [0.7, 1.7], rtol=1e-6)
    assert first is second
    assert copy is model[1][1]
    first, (second, copy) = after((None, (seven, five)))
    np.testing.assert_allclose(second, [0.3, 1.3], rtol=1e-6)
    np.testing.assert_allclose(copy, [0.5, 1.5], rtol=1e-6)
    assert first is second


def test_plain_jit_knows_the_ties_from_the_state():
    model, tx = tied(), optim.trainable(optax.sgd(0.1))
    state = tx.init(model)

    @jax.jit
    def step(model, state, grads):
        return optim.step(tx, grads, state, model)

    got, state = step(model, state, {"t": [three, seven], "copy": [None, None]})
    np.testing.assert_allclose(got["t"][0], [0.0, 1.0], atol=1e-6)
    np.testing.assert_array_equal(got["t"][0], got["t"][1])


def test_a_declared_tie_with_a_transform():
    codec = {"encoder": jnp.ones((2, 3)), "decoder": jnp.ones((3, 2))}
    layout = tp.layout(codec, ties={"decoder": ("encoder", jnp.transpose)})
    tx = optim.trainable(optax.sgd(1.0), layout)
    grads = {"encoder": None, "decoder": jnp.arange(6.0).reshape(3, 2)}
    updates, _ = tx.update(grads, tx.init(codec), codec)
    np.testing.assert_array_equal(updates["decoder"], updates["encoder"].T)
    codec, _ = optim.step(tx, grads, tx.init(codec), codec)
    np.testing.assert_array_equal(codec["encoder"], 1 - jnp.arange(6.0).reshape(3, 2).T)
    np.testing.assert_array_equal(codec["decoder"], codec["encoder"].T)


@pytest.mark.parametrize("apply", [optim.apply_updates, eqx.apply_updates, None], ids=["ours", "equinox", "step"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("specimen", TIED.values(), ids=TIED.keys())
def test_the_places_of_a_tie_hold_equal_values_after_any_step(specimen: Specimen, compiled, apply):
    model = specimen.make()
    layout = specimen.layout(model)
    rule = optax.chain(optim.clip_by_global_norm(0.5), optax.adamw(0.1))
    tx = optim.trainable(rule, layout)
    arrays, static = eqx.partition(model, eqx.is_array)

    def step(arrays, state):
        model = eqx.combine(arrays, static)
        grads = tp.grad(zoo.loss, state.layout)(model)
        if apply is None:
            model, state = optim.step(tx, grads, state, model)
        else:
            updates, state = tx.update(grads, state, model)
            model = apply(model, updates)
        return eqx.filter(model, eqx.is_array), state

    state = tx.init(model)
    step = jax.jit(step) if compiled else step
    for _ in range(3):
        arrays, state = step(arrays, state)
    after = eqx.combine(arrays, static)
    assert_same(jax.tree.leaves(tp.tie(after, layout)), jax.tree.leaves(after), identity=False)
    assert not np.array_equal(
        tp.trainables(after, layout)[layout.paths[0]], tp.trainables(model, layout)[layout.paths[0]]
    )


def test_init_refuses_an_alias_of_another_value():
    codec = {"encoder": jnp.ones((2, 3)), "decoder": jnp.zeros((3, 2))}
    layout = tp.layout(codec, ties={"decoder": ("encoder", jnp.transpose)})
    for form in (optim.trainable, optim.flat):
        tx = form(optax.sgd(0.1), layout)
        with pytest.raises(
            ValueError, match=r"'decoder' is tied to 'encoder', but has another .*tp.tie\(model, layout\)"
        ):
            tx.init(codec)
        tx.init(tp.tie(codec, layout))
        jax.jit(tx.init)(codec)  # of a trace there is nothing to see
    parted = {"a": jnp.ones(2), "b": jnp.ones(2)}
    known = tp.layout(parted, ties={"b": "a"})
    assert optim.trainable(optax.sgd(0.1), known).init(parted).layout.ties == {"a": ("b",)}
    with pytest.raises(ValueError, match="'b' is tied to 'a', but has another value"):
        optim.trainable(optax.sgd(0.1), known).init(parted | {"b": jnp.zeros(2)})
    frozen = parted | {"b": jnp.zeros(2), "c": jnp.ones(1)}  # of what is frozen the aliases stay as they are
    optim.trainable(optax.sgd(0.1), tp.layout(frozen, "c", ties={"b": "a"})).init(frozen)


# -- Gradients in any form -------------------------------------------------------------------------------------------


def test_gradients_of_every_maker_are_the_same_step():
    model = {"mlp": mlp(), "steps": jnp.array(3), "flag": True}
    loss = lambda model: fit(model["mlp"])
    tx = optim.trainable(optax.adam(0.1), "mlp.layers.1")
    state = tx.init(model)
    want, _ = tx.update(tp.grad(loss, "mlp.layers.1")(model), state, model)
    arrays, static = eqx.partition(model, eqx.is_array)
    slot = tp.grad(loss)(model)
    forms = {
        "equinox": eqx.filter_grad(loss)(model),
        "jax, integers as float0": jax.grad(lambda a: loss(eqx.combine(a, static)), allow_int=True)(arrays),
        "masked": eqx.tree_at(lambda t: t["mlp"].layers[0], slot, optax.MaskedNode()),
        "by path": {
            "mlp": {"layers": {1: {"weight": slot["mlp"].layers[1].weight, "bias": slot["mlp"].layers[1].bias}}}
        },
    }
    for got in (tx.update(grads, state, model)[0] for grads in forms.values()):
        assert_same(got, want)
    assert got["mlp"].layers[0].weight is None
    assert got["steps"] is None


@pytest.mark.parametrize("missing", [None, optax.MaskedNode(), np.zeros(2, jax.dtypes.float0)])
def test_none_is_not_zero(missing):
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = optim.trainable(optax.adam(0.1))
    updates, state = tx.update(model, tx.init(model), model)
    model = optim.apply_updates(model, updates)
    updates, after = tx.update({"a": jnp.zeros(2), "b": missing}, state, model)
    moments, before = after.runs[0][0], state.runs[0][0]
    np.testing.assert_allclose(moments.mu["a"], 0.09, rtol=1e-6)
    np.testing.assert_allclose(moments.nu["a"], 0.000999, rtol=1e-6)
    np.testing.assert_allclose(before.mu["b"], 0.1, rtol=1e-6)
    assert updates["b"] is None
    assert optim.apply_updates(model, updates)["b"] is model["b"]
    assert_same((moments.mu["b"], moments.nu["b"]), (before.mu["b"], before.nu["b"]))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    updates, unmoved = tx.update({"a": None, "b": missing}, after, model)
    assert jax.tree.leaves(updates) == []
    assert_same(unmoved, after)


@rules
def test_a_missing_branch_is_as_if_the_leaf_were_not_there(rule):
    both = {"a": jnp.array([[3.0, 4.0], [1.0, 2.0]]), "b": jnp.array([2.0])}
    tx, alone = optim.trainable(rule), optim.trainable(rule)
    state, single = tx.init(both), alone.init({"a": both["a"]})
    for _ in range(3):
        updates, state = tx.update({"a": both["a"]}, state, both)
        want, single = alone.update({"a": both["a"]}, single, {"a": both["a"]})
        np.testing.assert_array_equal(updates["a"], want["a"])  # a norm runs over what has a gradient


def test_lbfgs_refuses_gradients_of_some_leaves():
    model, tx = {"a": jnp.ones(2), "b": jnp.ones(3)}, optim.trainable(optax.scale_by_lbfgs())
    with pytest.raises(ValueError, match=r'L-BFGS remembers.*missing="zeros".*reset=True'):
        tx.update({"a": jnp.ones(2)}, tx.init(model), model)


def test_a_state_kept_as_a_list_is_refused_for_some_leaves_only():
    listed = optax.GradientTransformation(
        lambda params: [jnp.zeros_like(x) for x in jax.tree.leaves(params)], lambda u, s, p=None: (u, s)
    )
    joined = optax.flatten(optax.adam(0.1))
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    for tx in map(optim.trainable, (listed, joined)):
        state = tx.init(model)
        _, state = tx.update(model, state, model)
        with pytest.raises(ValueError, match=r'not kept leaf by leaf.*missing="zeros"'):
            tx.update({"a": jnp.ones(2)}, state, model)
        tx.update(tp.project(model, {"a": jnp.ones(2)}, missing="zeros"), state, model)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", [optim.trainable, optim.flat])
def test_gradients_wider_than_their_leaf_keep_single_precision_up_to_the_rule(form, dtype):
    model = {"w": jnp.ones(2, dtype)}
    small = {"w": jnp.array([1e-5, -1e-5])}  # squared it vanishes in half precision: 0 / 0
    model_after, _ = optim.step(form(optax.adam(0.1)), small, form(optax.adam(0.1)).init(model), model)
    np.testing.assert_allclose(model_after["w"].astype(jnp.float32), [0.9, 1.1], rtol=1e-2)
    assert model_after["w"].dtype == dtype
    seen = []
    look = optax.GradientTransformation(
        lambda p: (), lambda u, s, p=None: (seen.append(jax.tree.leaves(u)[0].dtype) or u, s)
    )
    for grads in (small, {"w": jnp.ones(2, dtype)}):
        form(look).update(grads, form(look).init(model), model)
    assert seen[-2:] == [jnp.float32, jnp.dtype(dtype)]


def test_functions_among_the_extra_arguments_are_called_with_models():
    model = {"w": jnp.zeros(2), "f": jnp.tanh, "n": 3, "v": jnp.ones(1)}
    loss = lambda m: jnp.sum((m["f"](m["w"]) - 0.5) ** 2) + m["n"] * jnp.sum(m["v"] ** 2)
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2, opaque_mode=True)
    for tx, extra in (
        (optim.trainable(sam, "w"), {"grad_fn": lambda m, _: eqx.filter_grad(loss)(m)}),
        (optim.trainable(optax.contrib.hutchinson_estimator_diag_hessian(), "w"), {"obj_fn": loss}),
        (optim.flat(optax.lbfgs(), "w"), {"value": loss(model), "grad": tp.grad(loss)(model), "value_fn": loss}),
    ):
        after, _ = optim.step(tx, tp.grad(loss)(model), tx.init(model), model, **extra)
        assert after["v"] is model["v"]
        assert bool((after["w"] != model["w"]).all())


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), "optax.lookahead takes a pair of models.*by hand"),
        (optax.contrib.differentially_private_aggregate(1.0, 0.1, 0), "a gradient for each example.*by hand"),
    ],
)
def test_rules_of_another_kind_are_refused_by_name(rule, match):
    with pytest.raises(ValueError, match=match):
        optim.trainable(optax.chain(rule)).init({"w": jnp.ones(2)})


# -- Complex ---------------------------------------------------------------------------------------------------------


def test_complex_parameters_descend():
    target = jnp.array([1 + 2j, -1 - 1j], jnp.complex64)
    loss = lambda model: jnp.sum(jnp.abs(model["w"] - target) ** 2)
    for form in (optim.trainable, optim.flat):
        model, tx = {"w": jnp.zeros(2, jnp.complex64)}, form(optax.sgd(0.1))
        model, _ = descend(tx, tx.init(model), model, 40, jax.grad(loss))
        assert loss(model) < 1e-4
        assert model["w"].dtype == jnp.complex64


def test_one_transformation_over_models():
    one, model = optim.trainable(optax.sgd(0.1)), {"w": jnp.ones(2), "v": jnp.ones(1)}
    for form in (optim.trainable, optim.flat):
        with pytest.raises(ValueError, match=r"write one optim\.trainable"):
            form(one)
    for within in (
        optax.chain(optim.clip_by_global_norm(1.0), one),
        optim.groups({"w": one}, default=optax.sgd(1.0)),
        optax.inject_hyperparams(lambda rate: optim.flat(optax.sgd(rate)))(0.1),
    ):
        with pytest.raises(ValueError, match=r"write one optim\.trainable"):
            optim.trainable(within).init(model)


@pytest.mark.parametrize("compiled", [False, True])
def test_two_in_a_chain_are_refused(compiled):
    # Complex gradients would be conjugated twice and ascend, and those of ties added up twice.
    model = {"w": jnp.zeros(2, jnp.complex64)}
    tx = optax.chain(optim.clip_by_global_norm(1.0), optim.trainable(optax.sgd(0.1)), optim.trainable(optax.sgd(0.1)))
    update = jax.jit(tx.update) if compiled else tx.update
    with pytest.raises(ValueError, match=r"updates of another transformation over models.*write one"):
        update({"w": jnp.ones(2, jnp.complex64)}, tx.init(model), model)
    apart = optax.chain(optim.trainable(optax.sgd(0.1)), optax.scale(1.0), optim.trainable(optax.sgd(0.1)))
    with pytest.raises(ValueError, match="expected one transformation over models in `tx`, got 2"):
        optim.step(apart, {"w": jnp.ones(2, jnp.complex64)}, apart.init(model), model)


def test_gradients_that_a_rule_hands_on_are_no_updates_of_another():
    model = {"w": jnp.ones(2)}
    tx = optim.trainable(optax.identity())
    state = tx.init(model)
    for _ in range(2):
        updates, state = tx.update(model, state, model)
        assert updates["w"] is model["w"]


def test_a_complex_rate_beside_real_leaves_is_refused():
    model = {"a": jnp.ones(2, jnp.complex64), "b": jnp.ones(2)}
    with pytest.raises(
        ValueError, match=r"the hyperparameters of real ones complex too; .*hyperparam_dtype=jnp.float32"
    ):
        optim.trainable(optax.inject_hyperparams(optax.sgd)(0.1)).init(model)
    tx = optim.trainable(optax.inject_hyperparams(optax.sgd, hyperparam_dtype=jnp.float32)(0.1))
    after, _ = optim.step(tx, model, tx.init(model), model)
    np.testing.assert_allclose(after["b"], 0.9, rtol=1e-6)


def test_a_line_search_along_complex_parameters_is_refused():
    model, tx = {"w": jnp.zeros(2, jnp.complex64)}, optim.trainable(optax.lbfgs())
    with pytest.raises(TypeError, match="'w' is complex64; keep its real and imaginary parts as two real parameters"):
        tx.update(model, tx.init(model), model, value=0.0, grad=model, value_fn=lambda model: 0.0)


# -- Around Optax, and within it -------------------------------------------------------------------------------------

AROUND = {
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(0.01),
    "schedule": optax.adam(optax.linear_schedule(0.1, 0.01, 5)),
    "MultiSteps": optax.MultiSteps(optax.adam(0.01), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.01), 3),
    "masked": optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "partition": optax.multi_transform(
        {"a": optax.sgd(0.1), "b": optax.adam(0.1)},
        lambda params: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", params),
    ),
    "lbfgs": optax.lbfgs(),
    "backtracking": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)),
}


@pytest.mark.parametrize("name", AROUND)
def test_around_any_transformation_on_the_raw_model(name):
    rule, model = AROUND[name], mlp()
    tx = optim.trainable(rule, "layers.1")
    params, rest = tp.partition(model, "layers.1")
    by_hand = rule.gradient_transformation() if isinstance(rule, optax.MultiSteps) else rule
    by_hand = optax.with_extra_args_support(by_hand)
    state, plain = tx.init(model), by_hand.init(params)
    on_params = lambda params: fit(tp.combine(params, rest))

    # Compiled, but for L-BFGS: it makes much of the last digit, in which two programs differ.
    build = (lambda f: f) if name == "lbfgs" else tp.jit

    @build
    def ours(model, state):
        value, grads = eqx.filter_value_and_grad(fit)(model)
        return optim.step(tx, grads, state, model, value=value, grad=grads, value_fn=fit)

    @build
    def optax_alone(params, state):
        value, grads = jax.value_and_grad(on_params)(params)
        steps, state = by_hand.update(grads, state, params, value=value, grad=grads, value_fn=on_params)
        return optax.apply_updates(params, steps), state

    for _ in range(3):
        model, state = ours(model, state)
        params, plain = optax_alone(params, plain)
    assert_close(tp.partition(model, "layers.1")[0], params)
    assert_close(jax.tree.leaves(state.runs), jax.tree.leaves(plain))


WITHIN = {
    "inject_hyperparams": lambda make, params: optax.inject_hyperparams(make)(0.1),
    "MultiSteps": lambda make, params: optax.MultiSteps(make(0.1), 2),
    "masked": lambda make, params: optax.masked(make(0.1), lambda _: jax.tree.map(lambda x: x.ndim > 1, params)),
    "partition": lambda make, params: optax.multi_transform(
        {"a": make(0.1), "b": optax.adam(0.1)}, lambda _: jax.tree.map(lambda x: "ab"[x.ndim > 1], params)
    ),
    "apply_if_finite": lambda make, params: optax.apply_if_finite(make(0.1), 3),
    "named_chain": lambda make, params: optax.named_chain(("clip", optax.clip(0.5)), ("adam", make(0.1))),
}


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("form", [optim.trainable, optim.flat])
def test_within_optax_on_the_parameters(name, form):
    params, rest = tp.partition(mlp())
    grads = jax.grad(lambda params: fit(tp.combine(params, rest)))(params)
    ours = WITHIN[name](lambda rate: form(optax.adam(rate)), params)
    plain = WITHIN[name](optax.adam, params)

    @jax.jit
    def run(grads, params, state, other):
        for _ in range(3):
            got, state = ours.update(grads, state, params)
            want, other = plain.update(grads, other, params)
        return got, want, state

    state = ours.init(params)
    got, want, after = run(grads, params, state, plain.init(params))
    assert_close(got, want, 1e-6)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_value_and_grad_from_state():
    params, rest = tp.partition(mlp())
    loss = lambda params: fit(tp.combine(params, rest))
    tx = optim.trainable(optax.lbfgs())

    @jax.jit
    def step(params, state):
        value, grads = optax.value_and_grad_from_state(loss)(params, state=state)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(15):
        params, state = step(params, state)
    assert loss(params) < 1e-2


def test_the_line_search_passes_further_arguments_to_the_loss():
    loss = lambda model, x: jnp.sum((model["w"] * x - 1) ** 2)
    model, tx, x = {"w": jnp.zeros(2), "n": 3}, optim.trainable(optax.lbfgs()), jnp.array([1.0, 2.0])

    @eqx.filter_jit
    def step(model, state):
        value, grads = tp.value_and_grad(loss)(model, x)
        updates, state = tx.update(grads, state, model, value=value, grad=grads, value_fn=loss, x=x)
        return optim.apply_updates(model, updates), state

    state = tx.init(model)
    for _ in range(10):
        model, state = step(model, state)
    np.testing.assert_allclose(model["w"], [1.0, 0.5], rtol=1e-3)


@pytest.mark.parametrize("form", [optim.trainable, optim.flat])
def test_a_run_is_plain_optax(form):
    model, rule = mlp(), optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.1))
    tx = form(rule)
    state = tx.init(model)
    sevens = optax.tree_utils.tree_map_params(rule, lambda x: jnp.full_like(x, 7), state.runs[0])
    assert all(bool((leaf == 7).all()) for leaf in jax.tree.leaves((sevens[1][0].mu, sevens[1][0].nu)))
    assert int(optax.tree_utils.tree_get(state, "clipped")) == 0
    with pytest.raises(TypeError, match=r"the transformation within optim.trainable and state.runs\[0\]"):
        optax.tree_utils.tree_map_params(tx, lambda x: x, state)


# -- What the state is -----------------------------------------------------------------------------------------------


def test_what_trains_is_what_the_state_says():
    model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    tx = optim.trainable(optax.sgd(1.0), "a")
    state = tx.init(model)
    assert state.layout.paths == ("a",)
    other = optim.trainable(optax.sgd(1.0), "b")
    updates, _ = other.update(model, state, model)
    assert updates["b"] is None
    np.testing.assert_array_equal(updates["a"], -1)


@pytest.mark.parametrize("form", [optim.trainable, optim.flat])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes_never_drift(form, dtype):
    with zoo.enable_x64(True):
        model = {"low": jnp.ones(3, dtype), "single": jnp.ones(2, jnp.float32)}
        tx = form(optax.chain(optax.clip(10.0), optax.adamw(optax.constant_schedule(1e-3))))
        state = tx.init(model)
        start = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), (model, state))

        @jax.jit
        def step(model, state):
            grads = jax.tree.map(lambda x: jnp.sin(jnp.asarray(x, jnp.float64)), model)
            updates, state = tx.update(grads, state, model)
            return optim.apply_updates(model, updates), state

        for _ in range(100):
            model, state = step(model, state)
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), (model, state)) == start
        assert step._cache_size() == 1


@pytest.mark.parametrize("form", [optim.trainable, optim.flat])
def test_frozen_leaves_never_move_nor_decay(form):
    model = {"w": jnp.ones(2), "frozen": jnp.full(2, 1 / 3)}
    tx = form(optax.adamw(0.1, weight_decay=0.5), "w")
    state = tx.init(model)

    @jax.jit
    def run(model, state):
        def step(carry, _):
            model, state = carry
            updates, state = tx.update(model, state, model)
            return (optim.apply_updates(model, updates), state), None

        return jax.lax.scan(step, (model, state), length=1000)[0]

    after, _ = run(model, state)
    assert np.asarray(after["frozen"]).tobytes() == np.asarray(model["frozen"]).tobytes()
    assert not np.allclose(after["w"], model["w"])


TRANSFORMATIONS = {
    "trainable": lambda: optim.trainable(optax.adam(0.1)),
    "flat": lambda: optim.flat(optax.adam(0.1)),
    "groups": lambda: optim.trainable(optim.groups({"**.bias": optax.sgd(0.1)}, default=optax.adam(0.1))),
    "MultiSteps": lambda: optim.trainable(optax.MultiSteps(optax.adam(0.1), 3)),
    "clip": lambda: optim.trainable(optax.chain(optim.clip_by_global_norm(0.5), optax.adam(0.1))),
    "lbfgs": lambda: optim.trainable(optax.lbfgs()),
    "schedule-free": lambda: optim.trainable(optax.contrib.schedule_free_sgd(0.1)),
    "hyperparameters": lambda: optim.trainable(optax.inject_hyperparams(optax.adam)(0.1)),
}
transformations = pytest.mark.parametrize("make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys())


@transformations
def test_one_trace_and_donation_over_100_steps(make):
    tx, model = make(), mlp()
    model = eqx.tree_at(lambda m: m.layers[1].bias, model, replace=jnp.zeros(1), is_leaf=lambda x: x is None)
    arrays, static = eqx.partition(model, eqx.is_array)
    arrays = tp.copy(arrays)
    state = tx.init(eqx.combine(arrays, static))
    chex.clear_trace_counter()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @chex.assert_max_traces(n=1)
    def step(arrays, state):
        model = eqx.combine(arrays, static)
        value, grads = tp.value_and_grad(fit)(model)
        updates, state = tx.update(grads, state, model, value=value, grad=grads, value_fn=fit)
        return eqx.filter(optim.apply_updates(model, updates), eqx.is_array), state

    before = fit(model)
    for _ in range(100):
        arrays, state = step(arrays, state)
    assert fit(eqx.combine(arrays, static)) < before


@transformations
def test_checkpoints_by_pickle_and_by_orbax(make, tmp_path):
    tx, model = make(), mlp()
    value, grads = tp.value_and_grad(fit)(model)
    update = tp.jit(lambda state: tx.update(grads, state, model, value=value, grad=grads, value_fn=fit))
    _, state = update(tx.init(model))
    restored = {"pickle": pickle.loads(pickle.dumps(state))}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored["orbax"] = checkpointer.restore(tmp_path / "state", tx.init(model))
    want, _ = update(state)
    for each in restored.values():
        assert_same(each, state, identity=False)
        assert_same(update(each)[0], want)


def test_init_shares_no_buffer_with_the_model_and_has_none_twice():
    model = {"w": jnp.ones(2)}
    for rule in (optax.lbfgs(), optax.contrib.schedule_free_sgd(0.1)):
        state = optim.trainable(rule).init(model)
        leaves = [leaf for leaf in jax.tree.leaves((model, state)) if isinstance(leaf, jax.Array)]
        pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]
        assert len(set(pointers)) == len(pointers)


# -- What it costs ---------------------------------------------------------------------------------------------------


def test_costs_what_optax_costs_by_hand():
    model = eqx.nn.MLP(16, 16, 32, 4, key=jax.random.key(0))
    params, rest = tp.partition(model)
    x, rule = jnp.ones((8, 16)), optax.adamw(0.1)
    tx = optim.trainable(rule, rest.layout)
    loss = lambda model: jnp.sum(jax.vmap(model)(x) ** 2)

    def ours(params, state):
        model = tp.combine(params, rest)
        updates, state = tx.update(tp.grad(loss, rest.layout)(model), state, model)
        return tp.partition(optim.apply_updates(model, updates), rest.layout)[0], state

    def by_hand(params, state):
        grads = jax.grad(lambda params: loss(tp.combine(params, rest)))(params)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    got, want = zoo.cost(ours, params, tx.init(model)), zoo.cost(by_hand, params, rule.init(params))
    for each in ("flops", "bytes accessed"):
        assert got[each] <= 1.005 * want[each]


def test_the_norm_does_not_bring_the_backward_pass_of_what_is_frozen_back():
    model = eqx.nn.MLP(64, 64, 256, 6, key=jax.random.key(0))
    params, rest = tp.partition(model)  # jax.grad of everything; XLA drops what nobody needs
    x = jnp.ones((128, 64))
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(0.1)), "layers.6")

    def step(params, state):
        grads = jax.grad(lambda params: jnp.mean(jax.vmap(tp.combine(params, rest))(x) ** 2))(params)
        model, state = optim.step(tx, grads, state, tp.combine(params, rest))
        return tp.partition(model)[0], state

    assert 90e6 < zoo.flops(step, params, tx.init(model)) < 100e6  # 97 MFLOP; with the whole backward pass 275


# -- Errors ----------------------------------------------------------------------------------------------------------


def test_errors(without_type_checks):
    model = {"w": jnp.ones(2), "b": jnp.ones(1)}
    tx = optim.trainable(optax.sgd(0.1))
    state = tx.init(model)
    with pytest.raises(ValueError, match=r"expected the model as the third argument.*tx.update\(grads, state, model\)"):
        tx.update(model, state)
    with pytest.raises(ValueError, match=r"entry at 'ww', where the model has no leaf.*'w'"):
        tx.update({"ww": jnp.ones(2)}, state, model)
    with pytest.raises(ValueError, match=r"at 'w', got float32\["):
        tx.update({"w": jnp.ones(3)}, state, model)
    with pytest.raises(ValueError, match="the model does not fit the layout"):
        tx.update({"w": jnp.ones(3)}, state, {"w": jnp.ones(3), "b": jnp.ones(1)})
    with pytest.raises(TypeError, match="expected the state that init or the last update returned, got"):
        tx.update(model, optax.sgd(0.1).init(model), model)
    with pytest.raises(TypeError, match=r"expected an Optax transformation.*call it with its arguments"):
        optim.trainable(optax.adam)
    with pytest.raises(TypeError, match="expected a real update at 'w'"):
        optim.apply_updates(model, {"w": jnp.ones(2, jnp.complex64)})
    with pytest.raises(ValueError, match="entry at 'x', where the model has no leaf"):
        optim.apply_updates(model, {"x": jnp.ones(2)})
    for bad in (None, True, 3):
        with pytest.raises(TypeError, match=r"expected a tree of gradients as of tp\.grad"):
            tx.update(bad, state, model)
    with pytest.raises(
        ValueError, match=r"expected one transformation over models in `tx`, got 0; .* stands outermost"
    ):
        optim.step(optax.sgd(0.1), model, optax.sgd(0.1).init(model), model)


def test_numpy_leaves_of_double_precision():
    model = {"w": np.ones(2)}
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(1.0)))
    updates, _ = tx.update({"w": np.array([3.0, 4.0])}, tx.init(model), model)
    np.testing.assert_allclose(optim.apply_updates(model, updates)["w"], [0.4, 0.2], rtol=1e-6)


def test_a_rule_that_changes_its_state_is_refused():
    model = {"w": jnp.ones(2)}
    for change, match in ((lambda s: (s,), "structure of its state"), (lambda s: s[:1], "shape of its state at")):
        rule = optax.GradientTransformation(lambda p: jnp.zeros(2), lambda u, s, p=None, c=change: (u, c(s)))
        tx = optim.trainable(rule)
        with pytest.raises(ValueError, match=match):
            tx.update(model, tx.init(model), model)


@pytest.mark.parametrize("form", [optim.trainable, optim.flat])
@pytest.mark.parametrize("name", ["nothing trained", "all frozen"])
def test_nothing_trained_warns_and_changes_nothing(form, name):
    model = ZOO[name].make()
    tx = form(optax.adam(0.1), ZOO[name].layout(model))
    with pytest.warns(UserWarning, match="nothing is trained"):
        state = tx.init(model)
    updates, after = tx.update(jax.tree.map(lambda _: None, model), state, model)
    assert jax.tree.leaves(updates) == []
    assert_same(after, state)
    assert_same(optim.apply_updates(model, updates), model)


def test_apply_updates_follows_the_updates_where_a_layout_thawed_a_frozen_field():
    model = zoo.Norm(jnp.ones(2), jnp.ones(2))
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(100.0), optax.sgd(1.0)), tp.layout(model, thaw="mean"))
    updates, _ = tx.update({"scale": jnp.ones(2), "mean": jnp.full(2, 2.0)}, tx.init(model), model)
    model = optim.apply_updates(model, updates)
    np.testing.assert_array_equal(model.mean, -1.0)
    np.testing.assert_array_equal(model.scale, 0.0)


@specimens
def test_apply_updates_keeps_what_has_no_update(specimen: Specimen):
    model = specimen.make()
    same = optim.apply_updates(model, tp.project(model, {}, specimen.layout(model)))
    assert all(a is b for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(model), strict=True))


# -- At the edges ----------------------------------------------------------------------------------------------------


def test_updates_may_be_gradients_where_nothing_could_go_wrong():
    # An outer optimiser over the steps of an inner one; nothing is tied, nothing complex.
    model, tx = {"w": jnp.ones(2)}, optim.trainable(optax.sgd(0.5))
    state = tx.init(model)
    updates, _ = tx.update(model, state, model)
    again, _ = tx.update(updates, state, model)
    np.testing.assert_array_equal(again["w"], 0.25)
    tied = {"a": model["w"], "b": model["w"]}
    chain = optax.chain(optim.trainable(optax.identity()), tx)
    with pytest.raises(ValueError, match=r"updates of another transformation over models"):
        chain.update(tied, chain.init(tied), tied)


def test_init_of_a_concrete_model_within_a_trace():
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    layout = tp.layout(model, ties={"b": "a"})
    tx = optim.trainable(optax.adam(0.1), layout)
    jax.eval_shape(lambda: tx.init(model))
    parted = model | {"b": jnp.zeros(2)}
    with pytest.raises(ValueError, match="'b' is tied to 'a', but has another value"):
        jax.eval_shape(lambda: tx.init(parted))


def test_injected_hyperparameters_around():
    model = mlp()
    tx = optax.inject_hyperparams(lambda rate: optim.trainable(optax.sgd(rate)), hyperparam_dtype=jnp.float32)(0.1)
    after, state = optim.step(tx, tp.grad(fit)(model), tx.init(model), model)
    plain = optim.trainable(optax.sgd(0.1))
    assert_same(after, optim.step(plain, tp.grad(fit)(model), plain.init(model), model)[0])
    assert state.inner_state.layout == tp.layout(model)


@pytest.mark.parametrize("form", [optim.trainable, optim.flat])
def test_transformations_are_copied(form):
    tx, model = form(optax.adam(0.1)), {"w": jnp.ones(2)}
    state = tx.init(model)
    other = copy.deepcopy(tx)
    assert_same(other.update(model, state, model)[0], tx.update(model, state, model)[0])
