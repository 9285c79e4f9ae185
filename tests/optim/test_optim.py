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


@pytest.mark.parametrize("name", EAGERLY)
def test_equals_optax_on_the_canonical_tree_in_each_form_and_eagerly(name):
    specimen = trained[name]
    model = specimen.make()
    layout = specimen.layout(model)
    params, rest = tp.partition(model, layout)
    known = layout if specimen.options else None
    txs = [made(form, CLIPPED, known) for form in (optim.trainable, VECTOR)] + [made(STACKS, BY_ROW, known)]

    def assert_kept(kept):
        kept = zip(jax.tree.leaves(rest), jax.tree.leaves(kept), strict=True)
        assert all(new is old for old, new in kept)  # what is frozen: the very same objects

    def by_us(tx, carry, _):
        current = tp.combine(carry[0], rest)
        grads = tp.grad(zoo.loss, layout)(current)
        current, state = optim.step(tx, grads, carry[1], current)
        after, kept = tp.partition(current, layout)
        assert_kept(kept)
        return (after, state), grads

    def by_hand(carry, _):
        grads = tp.grad(zoo.loss, layout)(tp.combine(carry[0], rest))
        grads = jax.tree.map(lambda x: jnp.conj(x) if jnp.iscomplexobj(x) else x, grads)
        updates, state = CLIPPED.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    @jax.jit
    def run(params):
        starts = [(functools.partial(by_us, tx), (params, tx.init(model))) for tx in txs]
        starts.append((by_hand, (params, CLIPPED.init(params))))
        ends, (grads, *_) = zip(*(jax.lax.scan(step, start, length=2) for step, start in starts), strict=True)
        return ends, grads

    ((ours, state), (flat, _), (stacked, _), (plain, of_plain)), grads = run(params)
    assert_near((ours, jax.tree.leaves(state.runs), flat, stacked), (plain, jax.tree.leaves(of_plain), plain, plain))
    eager, state = model, txs[0].init(model)
    for i in range(2):
        now = jax.tree.map(lambda x, i=i: jax.device_put(np.asarray(x)[i]), grads)
        eager, state = optim.step(txs[0], now, state, eager)
    after, kept = tp.partition(eager, layout)
    assert_near(after, ours)
    assert_kept(kept)


@forms
def test_over_an_ensemble_by_vmap(form):
    models = {"w": zoo.ramp(3, 2), "b": zoo.ramp(3, 1), "n": jnp.arange(3)}
    tx = made(form, MOMENTUM)

    @jax.jit
    def train(model):
        state = tx.init(model)
        for _ in range(2):
            model, state = optim.step(tx, tp.grad(zoo.loss)(model), state, model)
        return model, state

    together, one_by_one = jax.jit(lambda models: (jax.vmap(train)(models), jax.lax.map(train, models)))(models)
    assert_close(together, one_by_one)


WRAPPERS = {  # of a transformation and of its maker from a rate
    "inject_hyperparams": lambda tx, make: optax.inject_hyperparams(make)(optax.linear_schedule(0.1, 0.01, 5)),
    "masked": lambda tx, make: optax.masked(tx, lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
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
    for form in (optim.trainable, VECTOR, STACKS):
        tx = form(optax.sgd(0.1), layout)
        match = (
            r"'decoder' is tied to 'encoder', but does not have the value that the tie gives.*tp.tie\(model, layout\)"
        )
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
