"""The vector form of a training: equal to Optax leaf by leaf, for every rule that does not look at shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import treeparams as tp
from treeparams import optim

from .zoo import ZOO, Specimen, assert_close

pytestmark = pytest.mark.usefixtures("standard_promotion")

# Every public transformation of optax and optax.contrib, by whether it treats all elements alike. Some need arguments.
BLIND = {
    **dict.fromkeys(
        [
            "adabelief",
            "adadelta",
            "adagrad",
            "adam",
            "adamax",
            "adamaxw",
            "adamw",
            "adan",
            "amsgrad",
            "lion",
            "nadam",
            "nadamw",
            "optimistic_adam",
            "optimistic_adam_v2",
            "optimistic_gradient_descent",
            "radam",
            "rmsprop",
            "rprop",
            "sgd",
            "sign_sgd",
            "yogi",
        ],
        lambda make: make(0.1),
    ),
    **dict.fromkeys(
        [
            "scale_by_adam",
            "scale_by_adadelta",
            "scale_by_adamax",
            "scale_by_adan",
            "scale_by_amsgrad",
            "scale_by_belief",
            "scale_by_lion",
            "scale_by_optimistic_gradient",
            "scale_by_polyak",
            "scale_by_radam",
            "scale_by_rms",
            "scale_by_rss",
            "scale_by_sign",
            "scale_by_stddev",
            "scale_by_yogi",
            "scale_by_lbfgs",
            "zero_nans",
            "identity",
            "set_to_zero",
            "lbfgs",
            "keep_params_nonnegative",
            "normalize_by_update_norm",
            "polyak_sgd",
            "contrib.cocob",
            "contrib.momo",
            "contrib.momo_adam",
            "contrib.prodigy",
            "contrib.dog",
            "contrib.dowg",
            "contrib.dadapt_adamw",
            "contrib.normalize",
            "contrib.reduce_on_plateau",
            "contrib.scale_by_acprop",
            "contrib.scale_by_ademamix",
            "contrib.scale_by_adopt",
            "contrib.scale_by_cocob",
            "contrib.schedule_free_adamw",
            "contrib.schedule_free_sgd",
            "contrib.scale_by_simplified_ademamix",
        ],
        lambda make: make(),
    ),
    **dict.fromkeys(
        [
            "contrib.acprop",
            "contrib.ademamix",
            "contrib.adopt",
            "contrib.madgrad",
            "contrib.scale_by_madgrad",
            "contrib.simplified_ademamix",
        ],
        lambda make: make(0.1),
    ),
    "add_decayed_weights": lambda make: make(0.1),
    "apply_every": lambda make: make(2),
    "apply_if_finite": lambda make: make(optax.adam(0.1), 3),
    "clip": lambda make: make(0.3),
    "clip_by_global_norm": lambda make: make(0.3),
    "conditionally_mask": lambda make: make(optax.adam(0.1), lambda step: step % 2 == 0),
    "conditionally_transform": lambda make: make(optax.adam(0.1), lambda step: step % 2 == 0),
    "ema": lambda make: make(0.9),
    "flatten": lambda make: make(optax.adam(0.1)),
    "inject_hyperparams": lambda make: make(optax.adam)(0.1),
    "scale": lambda make: make(0.1),
    "scale_by_backtracking_linesearch": lambda make: optax.chain(optax.sgd(1.0), make(10)),
    "scale_by_learning_rate": lambda make: make(optax.linear_schedule(0.1, 0.01, 3)),
    "scale_by_rprop": lambda make: make(0.1),
    "scale_by_schedule": lambda make: make(optax.linear_schedule(0.1, 0.01, 3)),
    "scale_by_zoom_linesearch": lambda make: optax.chain(optax.sgd(1.0), make(10)),
    "signum": lambda make: make(0.1, 0.9),
    "trace": lambda make: make(0.9),
    "contrib.mechanize": lambda make: make(optax.adam(0.1)),
    "contrib.schedule_free": lambda make: make(optax.sgd(0.1), 0.1),
    "MultiSteps": lambda make: make(optax.adam(0.1), 2),
}
AWARE = {
    **dict.fromkeys(["adafactor", "fromage", "lamb", "lars", "novograd", "sm3"], lambda make: make(0.1)),
    **dict.fromkeys(["contrib.galore", "contrib.muon"], lambda make: make(0.1)),
    **dict.fromkeys(
        [
            "centralize",
            "scale_by_distance_over_gradients",
            "scale_by_factored_rms",
            "scale_by_novograd",
            "scale_by_param_block_norm",
            "scale_by_param_block_rms",
            "scale_by_sm3",
            "scale_by_trust_ratio",
            "contrib.scale_by_galore",
            "contrib.scale_by_muon",
        ],
        lambda make: make(),
    ),
    "adaptive_grad_clip": lambda make: make(0.01),
    "clip_by_block_rms": lambda make: make(0.1),
    # They draw random numbers leaf by leaf, or expect gradients per example.
    "add_noise": lambda make: make(0.1, 0.1, jax.random.key(0)),
    "noisy_sgd": lambda make: make(0.1, 0.1, 0.1, jax.random.key(0)),
    "per_example_global_norm_clip": lambda make: optax.GradientTransformation(
        optax.identity().init, lambda u, s, p=None: (make(jax.tree.leaves(u), 1.0)[0], s)
    ),
    # They choose leaves.
    "masked": lambda make: make(optax.adam(0.1), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "freeze": lambda make: make(lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "selective_transform": lambda make: make(optax.adam(0.1), freeze_mask={"a": True, "b": False, "c": [False]}),
    "multi_transform": lambda make: make(
        {True: optax.sgd(0.1), False: optax.adam(0.1)}, lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    ),
}
# Not transformations of gradients alone: a second kind of params, of update or of extra argument.
OTHER = {
    "chain", "named_chain", "GradientTransformation", "GradientTransformationExtraArgs", "init_empty_state",
    "lookahead", "maybe_update", "partition", "monitor", "measure_with_ema", "skip_large_updates",
    "skip_not_finite", "snapshot", "stateless", "stateless_with_tree_map", "with_extra_args_support",
    "inject_stateful_hyperparams", "microbatch", "per_example_layer_norm_clip", "contrib.dpsgd",
    "contrib.differentially_private_aggregate", "contrib.sam", "contrib.sophia",
    "contrib.hutchinson_estimator_diag_hessian", "contrib.split_real_and_imaginary",
}  # fmt: skip


def _made(name, make):
    module, _, function = name.rpartition(".")
    found = getattr(optax.contrib if module else optax, function, None)
    if found is None:
        pytest.skip(f"this version of Optax has no {name}")
    return make(found)


def _loss(model):
    # Bounded, since some of the rules ascend.
    return jnp.sum(jnp.sin(model["a"] - 1)) + 3 * jnp.sum(jnp.cos(model["b"] + 2)) + jnp.sin(5 * model["c"][0])


def _model():
    return {"a": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.linspace(-1, 0.5, 4), "c": [jnp.array(0.3)], "n": 3}


def _updates(rule, steps=5):
    """The updates of both forms in each step, at the same parameters and gradients."""
    model = _model()
    params, rest = tp.partition(model)
    flat, tree = optim.flat(rule), optim.trainable(rule)

    def step(carry, _):
        params, first, second = carry
        model = tp.combine(params, rest)
        value, grads = tp.value_and_grad(_loss)(model)
        extra = {"value": value, "grad": grads, "value_fn": _loss}
        got, first = flat.update(grads, first, model, **extra)
        want, second = tree.update(grads, second, model, **extra)
        return (optax.apply_updates(params, want), first, second), (got, want)  # nothing is tied or frozen

    start = params, flat.init(model), tree.init(model)
    return jax.jit(lambda start: jax.lax.scan(step, start, length=steps)[1])(start)


@pytest.mark.parametrize("name", sorted(BLIND))
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_equals_optax_leaf_by_leaf(name):
    got, want = _updates(_made(name, BLIND[name]))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * float(jnp.max(jnp.abs(b))))


refused = pytest.raises(ValueError, match=r"looks at the shapes of leaves|a mask of leaves|it fails there")


@pytest.mark.parametrize("name", sorted(AWARE))
def test_refuses_what_looks_at_shapes(name):
    with refused:
        optim.flat(_made(name, AWARE[name])).init(_model())


@pytest.mark.parametrize("name", ["lamb", "centralize", "masked"])
def test_refuses_it_within_chains_and_injected_hyperparameters(name):
    rule = _made(name, AWARE[name])
    injected = optax.inject_hyperparams(lambda rate: optax.chain(rule, optax.scale(rate)))(0.1)
    with refused:
        optim.flat(optax.chain(optax.scale(1.0), injected)).init(_model())


def test_every_transformation_of_optax_is_here():
    known = BLIND.keys() | AWARE.keys() | OTHER
    for module, prefix in ((optax, ""), (optax.contrib, "contrib.")):
        for name, value in vars(module).items():
            returned = str(getattr(value, "__annotations__", {}).get("return", ""))
            if not name.startswith("_") and "GradientTransformation" in returned:
                assert prefix + name in known


@functools.cache
def _momentum(form, trainable):
    """`flat` tries each of its transformations at the first `init`."""
    return form(optax.sgd(0.1, momentum=0.9), trainable)


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO.keys())
@pytest.mark.filterwarnings("ignore:nothing is trained")
def test_over_the_zoo(specimen: Specimen):
    model = specimen.make()
    layout = specimen.layout(model)
    grads = tp.maptrainable(jnp.sin, model, trainable=layout)
    got, want = (_momentum(form, layout if specimen.options else None) for form in (optim.flat, optim.trainable))
    states = got.init(model), want.init(model)
    for _ in range(2):
        updates, first = got.update(tp.project(model, tp.partition(grads, layout)[0], layout), states[0], model)
        expected, second = want.update(tp.project(model, tp.partition(grads, layout)[0], layout), states[1], model)
        states = first, second
        assert jax.tree.structure(updates) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            assert_close(a, b, 1e-2 if b.dtype in (jnp.bfloat16, jnp.float16) else 1e-6)


def test_none_counts_as_zero():
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = optim.flat(optax.adam(0.1))
    _, state = tx.update(model, tx.init(model), model)
    updates, state = tx.update({"a": jnp.zeros(2), "b": None}, state, model)
    np.testing.assert_allclose(state.runs[0][0].mu, 0.09, rtol=1e-6)
    np.testing.assert_array_equal(updates["b"], updates["a"])


def test_the_state_is_one_vector_of_the_layout():
    model = {"a": jnp.ones((2, 3)), "b": jnp.ones(4, jnp.bfloat16), "c": jnp.ones(1)}
    layout = tp.layout(model)
    tx, plain = optim.flat(optax.adam(0.1), layout), optim.trainable(optax.adam(0.1))
    state, other = tx.init(model), plain.init(model)
    assert (state.runs[0][0].mu.shape, state.runs[0][0].mu.dtype) == ((layout.size,), layout.dtype)
    for _ in range(3):
        updates, state = tx.update(model, state, model)
        want, other = plain.update(model, other, model)
        assert_close(updates["a"], want["a"], 1e-6)
        assert_close(updates["b"], want["b"], 1e-2)
    state = optim.set_trainable(tx, state, model, "b")
    state = optim.set_trainable(tx, state, model)
    assert_close(tx.update(model, state, model)[0]["c"], plain.update(model, other, model)[0]["c"], 1e-6)


def _but_biases(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "b" not in jax.tree_util.keystr(path), params)


HIDDEN = {
    "by name": optax.adamw(0.1, weight_decay=0.5, mask=_but_biases),
    "by rank": optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda x: x.ndim > 2, params)),
    "after some calls": optax.MultiSteps(optax.lamb(0.1), 10),
    "after more calls": optax.MultiSteps(optax.lamb(0.1), 300),
    "after a pause": optax.lamb(
        optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(0.1)], [20])
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_refuses_what_hides_that_it_looks_at_leaves(name):
    with pytest.raises(ValueError, match=r"looks at the shapes of leaves|a mask of leaves"):
        optim.flat(HIDDEN[name]).init(_model())


def test_a_rule_that_needs_further_arguments():
    def update(updates, state, params=None, *, temperature, **_):
        return jax.tree.map(lambda u: u * temperature, updates), state

    rule = optax.GradientTransformationExtraArgs(lambda params: (), update)
    model = {"a": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"it fails there.*temperature.*give examples of them \(trial="):
        optim.flat(rule).init(model)
    tx = optim.flat(rule, trial={"temperature": 2.0})
    np.testing.assert_array_equal(tx.update(model, tx.init(model), model, temperature=3.0)[0]["a"], 3.0)


def test_the_trial_is_done_once():
    calls = []

    def init(params):
        calls.append(params)
        return ()

    tx = optim.flat(optax.GradientTransformation(init, optax.identity().update))
    tx.init(_model())
    tried = len(calls)
    tx.init(_model())
    assert len(calls) == tried + 1


def test_init_within_jit():
    model = {"a": jnp.ones(2)}
    tx = optim.flat(optax.adam(0.1))
    state = jax.jit(tx.init)(model)
    assert state.runs[0][0].mu.shape == (2,)


def test_groups_do_not_go_into_a_vector():
    with pytest.raises(ValueError, match=r"has a mask of leaves, as optax.masked and optim.groups have"):
        optim.flat(optim.groups({"**": optax.sgd(0.1)})).init(_model())


@pytest.mark.parametrize("transform", [jax.vmap, jax.jit, jax.grad, lambda f: jax.jit(jax.vmap(f))])
def test_under_a_traced_rate(transform):
    # Of a traced rate the trial knows no value, so there is none.
    model = {"a": jnp.ones(2), "b": jnp.ones(1)}

    def after(rate):
        tx = optim.flat(optax.sgd(rate, momentum=0.9))
        model_after, _ = optim.step(tx, model, tx.init(model), model)
        return jnp.sum(model_after["a"])

    rates = 0.5 if transform in (jax.grad, jax.jit) else jnp.array([0.5, 0.25])
    np.testing.assert_allclose(transform(after)(rates), -2.0 if transform is jax.grad else 2 - 2 * np.asarray(rates))


def test_gradients_wider_than_the_vector_reach_the_rule():
    model = {"w": jnp.ones(2, jnp.float16)}
    for form in (optim.trainable, optim.flat):
        tx = form(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(1.0)))
        model_after, _ = optim.step(tx, {"w": jnp.full(2, 1e5, jnp.float32)}, tx.init(model), model)
        np.testing.assert_allclose(model_after["w"].astype(jnp.float32), 1 - np.sqrt(0.5), rtol=1e-2)
        assert model_after["w"].dtype == jnp.float16
