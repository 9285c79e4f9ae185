"""Optax over whole models: the laws of `optim.trainable`, over the zoo and around and within Optax's own wrappers."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .. import zoo
from ..zoo import STACKS, VECTOR, ZOO, Specimen, assert_close, assert_same

MOMENTUM = optax.sgd(0.1, momentum=0.9)
CLIPPED = optax.chain(optim.clip_by_global_norm(0.5), MOMENTUM)
BY_LEAF = optim.per_leaf(MOMENTUM)
BY_ROW = optax.chain(optim.clip_by_global_norm(0.5), BY_LEAF)
LINE_SEARCH = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))
trained = {name: each for name, each in ZOO.items() if name not in ("nothing trained", "all frozen")}
forms = pytest.mark.parametrize("form", [optim.trainable, VECTOR, STACKS])


class Declared(eqx.Module):
    """A tie that the class knows."""

    encoder: jax.Array
    decoder: jax.Array = tp.field(tied_to="encoder", transform=jnp.transpose)


TIED = {name: each for name, each in trained.items() if each.layout(each.make()).ties}
TIED["declared"] = Specimen(lambda: Declared(zoo.ramp(2, 3), zoo.ramp(2, 3).T))
pytestmark = pytest.mark.usefixtures("standard_promotion")  # Optax's rules promote


@functools.cache
def made(form, rule, trainable=None):
    """`flat` tries each of its transformations at the first `init`."""
    return form(rule, trainable)


def assert_near(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, 1e-2 if b.dtype in (jnp.bfloat16, jnp.float16) else 1e-5)


def two():
    return {name: jax.device_put(np.ones(2, np.float32)) for name in "ab"}


# Stepped outside of jit, too: there every operation is a program of its own.
EAGERLY = ("complex", "bf16 with f32", "functions and static fields", "transposed tie", "numpy leaves")


def test_equals_optax_over_every_model_in_each_form_and_eagerly():
    models = {name: (each, each.make()) for name, each in trained.items()}
    parts = {name: tp.partition(model, each.layout(model)) for name, (each, model) in models.items()}
    rules = ((optim.trainable, CLIPPED), (VECTOR, CLIPPED), (STACKS, BY_ROW))
    half = lambda tree: jax.tree.map(lambda leaf: (0.5 * leaf).astype(leaf.dtype), tree)

    def by_us(form, rule, params, rest, steps):
        tx, model = form(rule, rest.layout), tp.combine(params, rest)
        state = tx.init(model)
        for _ in range(steps):
            model, state = optim.step(tx, half(params), state, model)
        after, kept = tp.partition(model, rest.layout)
        assert all(new is old for new, old in zip(jax.tree.leaves(kept), jax.tree.leaves(rest), strict=True))
        return after, jax.tree.leaves(state.runs)

    def by_hand(params, steps):
        grads = jax.tree.map(lambda x: jnp.conj(x) if jnp.iscomplexobj(x) else x, half(params))
        after, state = params, CLIPPED.init(params)
        for _ in range(steps):
            updates, state = CLIPPED.update(grads, state, after)
            after = optax.apply_updates(after, updates)
        return after, jax.tree.leaves(state)

    def all_ways(name, params):
        steps = 1 if name in zoo.STRUCTURE_ALONE else 2
        return [by_hand(params, steps), *[by_us(*each, params, parts[name][1], steps) for each in rules]]

    each = jax.jit(lambda every: {name: all_ways(name, params) for name, params in every.items()})
    results = each({name: params for name, (params, _) in parts.items()})
    for name, (want, tree, vector, stacks) in results.items():
        assert_near((tree, vector[0], stacks[0]), (want, want[0], want[0]))
        if name in EAGERLY:
            assert_near(by_us(*rules[0], *parts[name], steps=2), want)


def test_over_an_ensemble_by_vmap():
    models = {"w": zoo.ramp(3, 2), "b": zoo.ramp(3, 1), "n": jnp.arange(3)}

    def train(tx, model):
        state = tx.init(model)
        for _ in range(2):
            model, state = optim.step(tx, tp.grad(zoo.loss)(model), state, model)
        return model, state

    def train_all(model):
        return [train(made(form, MOMENTUM), model) for form in (optim.trainable, VECTOR, STACKS)]

    assert_close(*jax.jit(lambda models: (jax.vmap(train_all)(models), jax.lax.map(train_all, models)))(models))


WRAPPERS = {  # of a transformation and of its maker from a rate
    "inject_hyperparams": lambda tx, make: optax.inject_hyperparams(make)(optax.linear_schedule(0.1, 0.01, 5)),
    "masked": lambda tx, make: optax.masked(
        optax.partition({"a": optax.sgd(0.2), "b": tx}, functools.partial(jax.tree.map, lambda x: "ab"[x.ndim > 1])),
        functools.partial(jax.tree.map, lambda x: x.ndim > 0),
    ),
    "steps if finite": lambda tx, make: optax.apply_if_finite(optax.MultiSteps(tx, 2).gradient_transformation(), 3),
    "line search": lambda tx, make: optax.chain(tx, optax.scale_by_backtracking_linesearch(10)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_around_wrappers_of_optax_on_the_model_and_within_them_on_the_parameters(name):
    wrap = WRAPPERS[name]
    model = {"w": zoo.ramp(2, 2), "b": zoo.ramp(2), "frozen": zoo.ramp(3), "act": jnp.tanh, "n": 3}
    params, rest = tp.partition(model, ("w", "b"))
    make = functools.partial(optax.sgd, momentum=0.9)
    around = lambda form: wrap(made(form, MOMENTUM), lambda rate: form(make(rate)))
    plainly = wrap(MOMENTUM, make)

    def run(tx, at, loss):
        tx = optax.with_extra_args_support(tx)
        state = tx.init(at)
        for _ in range(3):
            value, grads = tp.value_and_grad(loss)(at)
            extra = {"value": value, "grad": grads, "value_fn": loss} if name == "line search" else {}
            updates, state = tx.update(grads, state, at, **extra)
            at = eqx.apply_updates(at, updates)
        return at, state

    @jax.jit
    def all_ways(params):
        on_params = lambda params: zoo.loss(tp.combine(params, rest))
        after, state = run(optim.trainable(plainly, ("w", "b")), tp.combine(params, rest), zoo.loss)
        forms = () if name == "masked" else (optim.trainable, VECTOR, STACKS)
        others = [run(around(form), params, on_params)[0] for form in forms]
        return [tp.partition(after, ("w", "b"))[0], *others], state.runs[0], run(plainly, params, on_params)

    afters, run_state, (want, plain) = all_ways(params)
    for after in afters:
        assert_close(after, want)
    assert_close(run_state, plain)
    if name == "masked":
        with pytest.raises(ValueError, match=r"a mask, or optax\.partition, is around a transformation"):
            around(optim.trainable).init(params)


def test_lbfgs_with_its_line_search_and_further_arguments_of_the_loss():
    loss = lambda model, x: jnp.sum((model["w"] * x - 1) ** 2)
    model, tx, x = {"w": np.zeros(2, "f")}, optim.trainable(optax.lbfgs()), np.array([1, 2], "f")

    def step(_, carry):
        value, grads = optax.value_and_grad_from_state(loss)(carry[0], x, state=carry[1])
        return optim.step(tx, grads, carry[1], carry[0], value=value, grad=grads, value_fn=loss, x=x)

    run = jax.jit(lambda model: jax.lax.fori_loop(0, 10, step, (model, tx.init(model)))[0])
    np.testing.assert_allclose(run(model)["w"], [1.0, 0.5], rtol=1e-3)


three, five, seven = (np.full(2, x, np.float32) for x in (3.0, 5.0, 7.0))


@forms
def test_a_tie_stays_one_array_and_gets_the_sum_and_a_run_is_plain_optax(form):
    t, copy, other = (jnp.array([1.0, 2.0]) for _ in range(3))
    model, tx = {"t": [t, (t,)], "copy": [copy, other]}, made(form, BY_LEAF if form is STACKS else MOMENTUM)
    cases = [(three, 10 + seven), (three, None), (None, five + 2)]
    grads = [{"t": [first, (second,)], "copy": [None, five]} for first, second in cases]
    state = tx.init(model)
    by_jit = jax.jit(lambda grads, *args: [optim.step(tx, each, *args)[0] for each in grads])(grads, state, model)
    for each, tie, traced in zip(grads, ([-1.0, 0.0], [0.7, 1.7], [0.3, 1.3]), by_jit, strict=True):
        after, _ = optim.step(tx, each, state, model)
        assert after["t"][0] is after["t"][1][0]
        np.testing.assert_allclose(after["t"][0], tie, atol=1e-6)
        np.testing.assert_allclose(after["copy"][1], [0.5, 1.5], rtol=1e-6)
        assert_same(traced, after, identity=False)  # knows the tie from the state
    rule = optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.1))
    state = form(rule).init(model)
    sevens = optax.tree_utils.tree_map_params(rule, lambda x: np.full_like(x, 7), state.runs[0])
    assert all((leaf == 7).all() for leaf in jax.tree.leaves((sevens[1][0].mu, sevens[1][0].nu)))
    assert int(optax.tree_utils.tree_get(state, "clipped")) == 0


@pytest.mark.parametrize(("name", "form"), [("transposed tie", STACKS), ("declared", optim.trainable)])
def test_the_places_of_a_tie_hold_equal_values_after_any_step(name, form):
    specimen = TIED[name]
    model = specimen.make()
    layout = specimen.layout(model)
    within = optim.per_leaf if form is STACKS else lambda tx: tx
    tx = form(optax.chain(optim.clip_by_global_norm(0.5), within(optax.adamw(0.1))), layout)
    arrays, static = eqx.partition(model, eqx.is_array)

    def step(tx, apply, carry, _):
        model, state = eqx.combine(carry[0], static), carry[1]
        grads = tp.jit(tp.grad(zoo.loss, state.layout))(model)
        if apply is None:
            model, state = optim.step(tx, grads, state, model)
        else:
            updates, state = tx.update(grads, state, model)
            model = apply(model, updates)
        return (eqx.filter(model, eqx.is_array), state), None

    @jax.jit
    def run(arrays):
        start = arrays, tx.init(eqx.combine(arrays, static))
        ways = (None, optim.apply_updates, eqx.apply_updates)
        return [jax.lax.scan(functools.partial(step, tx, way), start, length=3)[0][0] for way in ways]

    few = made(form, BY_ROW if form is STACKS else CLIPPED, layout)  # of few operations
    (eager, _), _ = step(few, None, (arrays, few.init(model)), None)
    for each in (eager, *run(arrays)):
        after = eqx.combine(each, static)
        assert_same(jax.tree.leaves(tp.tie(after, layout)), jax.tree.leaves(after), identity=False)
        first = layout.paths[0]
        assert not np.array_equal(tp.trainables(after, layout)[first], tp.trainables(model, layout)[first])


def test_init_refuses_an_alias_of_another_value():
    codec = {"encoder": jnp.ones((2, 3)), "decoder": jnp.zeros((3, 2))}
    layout = tp.layout(codec, ties={"decoder": ("encoder", jnp.transpose)})
    match = r"'decoder' is tied to 'encoder', but does not have the value that the tie gives.*tp.tie\(model, layout\)"
    for form in (optim.trainable, VECTOR, STACKS):
        tx = form(optax.sgd(0.1), layout)
        with pytest.raises(ValueError, match=match):
            tx.init(codec)
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(lambda tx=tx: tx.init(codec))  # of a concrete model within a trace, too
        tx.init(tp.tie(codec, layout))
        jax.eval_shape(tx.init, codec)  # of a trace there is nothing to see
    known = tp.layout(two(), ties={"b": "a"})
    assert optim.trainable(optax.sgd(0.1), known).init(two()).layout.ties == {"a": ("b",)}
    with pytest.warns(UserWarning, match=r"ties 'b' to 'a'; without that layout they are.*\(tx, known\)"):
        optim.trainable(optax.sgd(0.1)).init(two())
    optim.trainable(optax.sgd(0.1)).init(two())  # once
    shared = jnp.ones(2)
    tp.layout({"a": shared, "c": jnp.ones(2)}, ties={"a": "c"})
    optim.trainable(optax.sgd(0.1)).init({"a": shared, "c": shared})  # tied, and named the other way round
    optim.trainable(optax.sgd(0.1)).init({"a": jnp.ones(3), "c": jnp.ones(3)})  # other models
    frozen = {"a": jnp.ones(2), "b": jnp.zeros(2), "c": jnp.ones(1)}  # of what is frozen the aliases stay as they are
    optim.trainable(optax.sgd(0.1), tp.layout(frozen, "c", ties={"b": "a"})).init(frozen)


@pytest.mark.parametrize("missing", [None, optax.MaskedNode(), np.zeros(2, jax.dtypes.float0)])
def test_none_is_not_zero(missing):
    model, tx = two(), made(optim.trainable, MOMENTUM)
    _, state = tx.update(tp.copy(model), tx.init(model), model)
    updates, after = tx.update({"a": np.zeros(2, np.float32), "b": missing}, state, model)
    before, trace = state.runs[0][0].trace, after.runs[0][0].trace
    np.testing.assert_allclose((before["b"], trace["a"]), [[1, 1], [0.9, 0.9]], rtol=1e-6)
    assert_same(trace["b"], before["b"])
    assert updates["b"] is None
    assert optim.apply_updates(model, updates)["b"] is model["b"]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    updates, unmoved = tx.update({"a": None, "b": missing}, after, model)
    assert jax.tree.leaves(updates) == []
    assert_same(unmoved, after)


def test_a_missing_branch_is_as_if_the_leaf_were_not_there():
    both, rules = {"a": jnp.array([[3.0, 4.0], [1.0, 2.0]]), "b": jnp.ones(1)}, (optax.adafactor(0.1), CLIPPED)
    alone, txs = {"a": both["a"]}, list(map(optim.trainable, rules))

    def run(tx, model):  # a norm runs over what has a gradient
        state = tx.init(model)
        return [(step := tx.update(tp.copy(alone), state, model), state := step[1])[0][0]["a"] for _ in range(2)]

    assert_close(*jax.jit(lambda: [[run(tx, model) for tx in txs] for model in (both, alone)])(), 1e-6)


@forms
def test_gradients_wider_than_their_leaf_keep_single_precision_up_to_the_rule(form):
    seen = []
    look = optax.stateless(lambda grads, params: seen.append(jax.tree.leaves(grads)[0].dtype) or grads)
    tx = form(optax.chain(look, optim.clip_by_global_norm(1.0), optax.sgd(1.0)))
    grads = {"w": np.full(2, 1e5, np.float32)}  # no number of half precision
    for dtype in ("float16", "bfloat16", "float64"):  # of NumPy; without x64 single precision
        model = {"w": np.ones(2, dtype)}
        after = jax.jit(lambda model=model: optim.step(tx, grads, tx.init(model), model)[0])()
        np.testing.assert_allclose(np.asarray(after["w"], np.float32), 1 - np.sqrt(0.5), rtol=1e-2)
        assert seen[-1] == jnp.float32
        jax.eval_shape(lambda model: tx.update(tp.copy(model), tx.init(model), model), model)
        assert seen[-1] == after["w"].dtype == jax.dtypes.canonicalize_dtype(dtype)


def test_functions_among_the_extra_arguments_are_called_with_models():
    model = {"w": jax.device_put(np.zeros(2, np.float32)), "f": jnp.tanh, "n": 3, "v": zoo.ramp(1)}
    loss = lambda m: jnp.sum((m["f"](m["w"]) - 0.5) ** 2) + m["n"] * jnp.sum(m["v"] ** 2)
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2, opaque_mode=True)
    value, grads = tp.jit(tp.value_and_grad(loss))(model)
    ways = (
        (optim.trainable(sam, "w"), {"grad_fn": lambda m, _: eqx.filter_grad(loss)(m)}),
        (optim.trainable(optax.contrib.hutchinson_estimator_diag_hessian(), "w"), {"obj_fn": loss}),
        (optim.trainable(LINE_SEARCH, "w", form="vector"), {"value": value, "grad": grads, "value_fn": loss}),
        (optim.trainable(LINE_SEARCH, "w", form="stacks"), {"value": value, "grad": grads, "value_fn": loss}),
    )
    run = lambda: [optim.step(tx, grads, tx.init(model), model, **extra)[0] for tx, extra in ways]
    for after in tp.jit(run)():
        np.testing.assert_array_equal(after["v"], model["v"])
        assert (np.asarray(after["w"]) != 0).all()


@forms
def test_complex_parameters_descend(form):
    target = jnp.array([1 + 2j, -1 - 1j], jnp.complex64)
    loss = lambda model: jnp.sum(jnp.abs(model["w"] - target) ** 2)
    model, tx = {"w": jnp.zeros(2, jnp.complex64)}, form(optax.sgd(0.1))
    step = lambda _, carry: optim.step(tx, jax.grad(loss)(carry[0]), carry[1], carry[0])
    model, _ = jax.lax.fori_loop(0, 40, step, (model, tx.init(model)))
    assert loss(model) < 1e-4
