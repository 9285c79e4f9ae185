"""What a step can change, read from its program, against what steps change when they are run."""

import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import treeparams as tp
from treeparams import optim

from .zoo import Norm, ramp, with_refs

MODEL = {name: ramp(3) for name in ("held", "passed", "plain", "stopped", "unused", "zeroed")}
SGD, MOMENTUM, RMSPROP, ADAMW = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.rmsprop(0.1), optax.adamw(0.1)


def loss(model):
    parts = model | {"stopped": lax.stop_gradient(model["stopped"]), "unused": 0.0}
    return jnp.sum(sum(parts.values()) ** 2)


def by_hand(tx):
    def step(model, state):
        updates, state = tx.update(jax.grad(loss)(model), state, model)
        return optax.apply_updates(model, updates), state

    return tx, step


def scanned(tx):
    tx, step = by_hand(optax.MultiSteps(tx, 1))
    return tx, lambda model, state: lax.scan(lambda carry, _: (step(*carry), None), (model, state), None, 1)[0]


def ours(tx):
    tx = optim.trainable(tx, "!held")
    return tx, lambda model, state: optim.step(tx, tp.grad(loss, state.layout)(model), state, model)


# A way, its rule, and whether some are told to move though they do not: zero gradients, over a root of what may be
# infinite, a norm, a rate that is computed.
WAYS = {
    "sgd": (by_hand, SGD, False),
    "adam": (by_hand, optax.adam(0.1), False),
    "adamw": (by_hand, ADAMW, False),
    "rmsprop": (by_hand, RMSPROP, True),
    "decay": (by_hand, optax.chain(optax.add_decayed_weights(0.1), SGD), False),
    "clip": (by_hand, optax.chain(optax.clip_by_global_norm(0.1), SGD), True),
    "schedule": (by_hand, optax.sgd(optax.linear_schedule(0.1, 0.0, 10)), True),
    "momentum, scanned": (scanned, MOMENTUM, False),
    "ours": (ours, ADAMW, False),
}


@pytest.mark.usefixtures("standard_promotion")
def test_what_is_told_unmoved_is_the_same_bit_for_bit_when_the_step_is_run():
    steps, states, told = {}, {}, {}
    for name, (way, rule, _) in WAYS.items():
        hands_on = optax.masked(rule, {name: name != "passed" for name in MODEL})  # its gradient
        zeroes = optax.masked(optax.set_to_zero(), {name: name == "zeroed" for name in MODEL})
        tx, step = way(optax.chain(hands_on, zeroes))
        # A state that has seen gradients of everything.
        seen = lambda x: np.asarray(x) + np.float32(0.01) if eqx.is_inexact_array(x) else x
        steps[name], states[name] = step, jax.tree.map(seen, tx.init(MODEL))
        told[name] = set(tp.moved(step)(MODEL, states[name]).paths)
    models = jax.jit(lambda states: {name: step(MODEL, states[name])[0] for name, step in steps.items()})(states)
    for name, model in models.items():
        way, _, in_doubt = WAYS[name]
        changed = {path for path in MODEL if not np.array_equal(model[path], MODEL[path])}
        assert changed <= told[name], name
        assert told[name] - changed == ({"stopped", "unused"} if in_doubt else set()), name
        assert {"passed", "plain"} <= changed, name
        assert ("held" in changed, "zeroed" in changed) == (way is not ours, False), name


FOUR = {name: ramp(3) for name in "abcd"}
ZERO, X, ROWS = jnp.zeros(3), jnp.ones(3), np.ones((4, 3), np.float32)


def of(**changes):
    """A step that changes some leaves: from the model and an array to each."""
    return lambda m, x: m | {name: change(m, x) for name, change in changes.items()}


def each(function):
    return lambda m, x: {name: function(leaf, x) for name, leaf in m.items()}


def plus(function):
    return each(lambda w, x: w + function(w, x))


forward = jax.custom_vjp(lambda m: m | {"a": 2 * m["a"]})
forward.defvjp(lambda m: (forward(m), None), lambda _, cotangent: (cotangent,))
twice = of(a=lambda m, x: m["a"] * 2)
PROGRAMS = {
    "itself": (lambda m, x: m, ""),
    "an array that is no argument, but equal": (lambda m, x: FOUR, "abcd"),
    "a tuple": (lambda m, x: (m, jnp.sum(m["a"])), ""),
    "a list": (lambda m, x: [twice(m, x), 3], "a"),
    "jit": (jax.jit(twice), "a"),
    "eqx.filter_jit": (eqx.filter_jit(twice, donate="all"), "a"),
    "tp.jit": (tp.jit(twice, donate="all"), "a"),
    "checkpoint": (jax.checkpoint(twice), "a"),
    "vmap": (jax.vmap(lambda m, x: m | {"a": 2 * m["a"]}), "a"),
    "a rule for vjp": (lambda m, x: forward(m), "a"),
    "exchanged": (of(a=lambda m, x: m["b"], b=lambda m, x: m["a"]), "ab"),
    "copies": (each(lambda w, x: jnp.array(w, copy=True)), ""),
    "a barrier": (lambda m, x: lax.optimization_barrier(m), ""),
    "put on a device": (lambda m, x: jax.device_put(m, jax.devices()[0]), ""),
    "plus zero": (each(lambda w, x: 0 + (w + 0.0) - 0.0), ""),
    "plus zeros": (plus(lambda w, x: jnp.zeros_like(x)), ""),
    "plus zeros that are closed over": (jax.jit(plus(lambda w, x: ZERO)), ""),
    "plus zeros that are an argument": (lambda m, x: jax.jit(plus(lambda w, x: x))(m, ZERO), ""),
    "plus NumPy's zeros": (plus(lambda w, x: np.zeros(3, "f")), ""),
    "plus zero times a number": (plus(lambda w, x: -0.1 * (jnp.zeros_like(x) / 3)), ""),
    "plus zero times infinity": (plus(lambda w, x: 0 * jnp.inf), "abcd"),
    "plus zero times what may be infinite": (
        of(a=lambda m, x: m["a"] + 0.0 * x, b=lambda m, x: m["b"] + 0.0 * m["a"]), "ab"),
    "plus zero times an integer": (plus(lambda w, x: (0 * x.astype(int)).astype(w.dtype)), ""),
    "plus zero times a flag": (plus(lambda w, x: 0.0 * (x > 1).astype(w.dtype)), ""),
    "plus zeros that were multiplied": (each(lambda w, x: w - 0.1 * (jnp.zeros((3, 2)) @ jnp.ones(2))), ""),
    "plus zeros, chosen": (plus(lambda w, x: jnp.where(x > 1, 0.0, jnp.zeros(3))), ""),
    "a choice": (of(a=lambda m, x: jnp.where(x > 1, m["a"], m["b"])), "a"),
    "a choice of zero or itself": (each(lambda w, x: jnp.where(x > 1, w, 0.0)), "abcd"),
    "reshaped, in doubt": (each(lambda w, x: w[:, None][:, 0]), "abcd"),
    "a branch": (lambda m, x: lax.cond(x[0] > 0, twice, lambda m, x: m, m, x), "a"),
    "equal branches": (lambda m, x: lax.switch(2, [lambda m, x: m, lambda m, x: m, plus(lambda w, x: 0)], m, x), ""),
    "scan": (lambda m, x: lax.scan(lambda m, x: (m | {"b": m["a"] + x, "c": m["b"]}, x), m, ROWS)[0], "bc"),
    "scan, what is set to what it is": (lambda m, x: lax.scan(lambda m, x: (m | {"a": x}, x), m, ROWS)[0], "a"),
    "scan over the model": (lambda m, x: lax.map(lambda m: m | {"a": m["b"]}, m), "a"),
    "while": (
        lambda m, x: lax.while_loop(lambda m: m["a"][0] < 2, lambda m: m | {"a": 2 * m["a"], "b": m["c"]}, m), "ab"),
    "fori_loop, in the second round": (
        lambda m, x: lax.fori_loop(0, 3, lambda i, m: m | {"a": m["b"], "b": m["c"]}, m), "ab"),
}  # fmt: skip


@pytest.mark.parametrize(("step", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_programs(step, expected):
    assert tp.moved(step)(FOUR, X).paths == tuple(expected)


def test_an_array_in_a_wider_dtype_and_back():
    model = {"bf16": ramp(3, dtype=jnp.bfloat16), "f32": ramp(3), "wide": ramp(3, dtype=jnp.bfloat16)}

    def step(m):
        wide = {name: leaf.astype(jnp.float32) + 0 for name, leaf in m.items()}
        there = m["f32"].astype(jnp.bfloat16)
        return wide | {"bf16": wide["bf16"].astype(jnp.bfloat16), "f32": there.astype(jnp.float32)}

    assert tp.moved(step)(model).paths == ("f32", "wide")  # it is rounded; the dtype is another


def test_within_a_trace_a_constant_may_be_anything():
    paths = lambda zeros: tp.moved(lambda m: m | {"a": m["a"] + zeros})(FOUR).paths
    assert paths(ZERO) == ()
    assert jax.eval_shape(lambda zeros: zeros[: len(paths(zeros))], ZERO).shape == (1,)


def test_what_is_declared_frozen_moves_and_so_does_a_model_that_is_replaced_by_an_equal_one():
    model = Norm(ramp(3), ramp(3))
    decayed = tp.moved(lambda m: jax.tree.map(lambda x: 0.9 * x, m))(model)
    assert decayed == tp.layout(model, thaw="mean")
    assert tp.moved(lambda model, state: (state, state))(FOUR, FOUR).paths == tuple(FOUR)  # even by the same object


def test_ties():
    shared = ramp(2, 2)
    model = {"embed": shared, "head": shared, "decoder": shared.T, "x": ramp(2)}
    layout = tp.layout(model, ties={"decoder": ("embed", jnp.transpose)})
    for place in ("embed", "head", "decoder"):
        step = jax.jit(lambda m, place=place: m | {place: m[place] + 1})
        assert tp.moved(step, layout=layout)(model) == layout.freeze("x")
        assert tp.moved(step)(model).paths == (("decoder",) if place == "decoder" else ("embed",))
    # The ends of a tie that came apart on the way here: one may take the place of the other.
    apart = jax.eval_shape(lambda: model)
    assert tp.moved(lambda m: m | {"head": m["embed"]}, layout=tp.layout(model))(apart).paths == ()
    assert tp.moved(lambda m: m | {"head": m["embed"]})(apart).paths == ("head",)


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_of_ours_moves_what_its_state_trains():
    shared = ramp(3)
    model = {"embed": shared, "head": shared, "b": ramp(3), "n": jnp.arange(3), "key": jax.random.key(0)}
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.adamw(1e-3)), "!b")
    state = tx.init(model)

    def step(model, state, x):
        grads = tp.grad(lambda m: jnp.sum((m["embed"] + m["b"]) * m["head"] * x), state.layout)(model)
        model, state = optim.step(tx, grads, state, model)
        return model | {"n": model["n"] + 1, "key": jax.random.split(model["key"])[0]}, state

    for each in (step, jax.jit(step), tp.jit(step), eqx.filter_jit(step)):
        assert tp.moved(each)(model, state, np.ones(3, "f")) == state.layout


def test_nothing_is_run_or_donated():
    ran, model = [], {"w": ramp(3), "gone": ramp(3) + 1}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(model, x, rate):
        jax.debug.callback(ran.append, x)
        return model | {"w": model["w"] + rate * x.sum()}, x

    large, shapes = jax.ShapeDtypeStruct((3, 10**12), jnp.float32), jax.eval_shape(lambda: model)
    model["gone"].delete()
    for its in ((model, large), (shapes, large), (model, X)):
        assert tp.moved(step)(*its, rate=0.1).paths == ("w",)
    jax.effects_barrier()
    assert ran == []
    assert not model["w"].is_deleted()


def test_the_loss_beside_each_path():
    step = of(a=lambda m, x: m["a"] * 0.9, b=lambda m, x: m["b"] - x)
    got = tp.moved(step, loss=lambda m: jnp.sum(m["b"] * m["c"]))(FOUR, X)
    assert str(got).splitlines()[-5:] == [
        "frozen   6 elements in 2 arrays, 24 B",
        "a: moved, and the loss does not reach it (weight decay?)",
        "c: not moved, but the loss reaches it (frozen?)",
        "b: moved, and the loss reaches it",
        "d: not moved, and the loss does not reach it",
    ]
    plain = tp.moved(step)(FOUR, X)
    assert got == plain == tp.layout(FOUR, ["a", "b"])
    assert str(pickle.loads(pickle.dumps(got))) == str(plain)
    many = {f"w{i}": ramp(1) for i in range(60)}
    lines = str(tp.moved(lambda m: m, loss=lambda m: m["w7"].sum())(many)).splitlines()
    assert lines[-42:][1:2] + lines[-1:] == ["w7: not moved, but the loss reaches it (frozen?)", "... and 20 more"]


def adds(model):
    model["mean"][...] = model["mean"][...] + 1


WRITES = {
    "directly": adds,
    "in jit": lambda model: jax.jit(lambda refs: adds(refs))({"mean": model["mean"]}),
    "in a loop": lambda model: lax.scan(lambda carry, _: (adds(model), (carry, None))[1], 0, None, length=2),
    "in a branch": lambda model: lax.cond(model["w"][0] > 0, lambda: adds(model), lambda: None),
    "by the model's parameter": lambda model: model["mean"].__setitem__(0, model["w"][0]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_refs_that_a_step_writes_are_named_and_not_in_the_layout(write):
    def step(model, state):
        write(model)
        return {**model, "w": model["w"] + model["mean"][:2] * state["scale"][...]}, state

    model, state = with_refs() | {"v": ramp(2)}, {"scale": jax.new_ref(jnp.ones(2))}
    found = tp.moved(step)(model, state)
    assert found == tp.layout(model, "w")
    assert [line for line in str(found).splitlines() if "ref" in line] == ["mean: a ref, which the step writes"]
    np.testing.assert_array_equal(model["mean"][...], [7, 7, 7])  # it is not run


def test_a_ref_that_is_only_read_is_not_named():
    read = lambda model: model["w"] * model["mean"][0]

    def step(model):
        count[...] += 1  # of nobody's model
        return {**model, "w": read(model)}

    count, model = jax.new_ref(jnp.array(0)), with_refs()
    assert "ref" not in str(tp.moved(step)(model))
    said = tp.moved(step, loss=lambda model: jnp.sum(read(model)))(model)
    assert str(said).splitlines()[-1] == "w: moved, and the loss reaches it"
