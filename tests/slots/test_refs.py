"""Refs as leaves: arrays that can be written, which cannot be trained."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from ..zoo import with_refs


def loss(model, x=1.0):
    return jnp.sum(model["w"]) * jnp.sum(model["mean"][...]) * x


TRAINS = {
    "layout": tp.layout,
    "grad": lambda model: tp.grad(loss)(model),
    "optim": lambda model: optim.trainable(optax.sgd(0.1)).init(model),
    "thaw": lambda model: tp.layout(model, freeze="mean").thaw("mean"),
    "a layout of arrays": lambda model: tp.grad(loss, tp.layout({**model, "mean": jnp.ones(3)}))(model),
    "inside jit": lambda model: jax.jit(lambda refs: tp.layout({**model, **refs}).size)({"mean": model["mean"]}),
}


@pytest.mark.parametrize("name", TRAINS)
def test_a_ref_among_what_trains_is_refused_with_the_way(name):
    with pytest.raises(ValueError, match="got a ref, which is an array that can be written, at 'mean'") as caught:
        TRAINS[name](with_refs())
    for words in ("ref[...] or jax.freeze(ref) into", "a new ref of the result", "freeze='mean'", "declare it frozen"):
        assert words in str(caught.value)


class Declared(eqx.Module):
    w: jax.Array
    mean: object = tp.field(trainable=False)


@pytest.mark.parametrize("options", [{"freeze": "mean"}, {"trainable": "w"}])
def test_a_frozen_ref_is_left_alone(options):
    model = with_refs()
    arrays = {**model, "mean": model["mean"][...], "steps": model["steps"][...]}
    layout = tp.layout(model, **options)
    assert (layout.paths, layout) == (("w",), tp.layout(arrays, **options))
    assert layout.digest == tp.layout(arrays, **options).digest
    assert "mean   3      float32         3   12 B  frozen" in str(layout)
    vector, restructure = tp.ravel(model, layout)
    tx = optim.trainable(optax.sgd(1.0), layout)
    for made in (
        tp.combine(*tp.partition(model, layout)),
        restructure(vector),
        tp.maptrainable(jnp.sin, model, trainable=layout),
        optim.step(tx, tp.grad(loss, layout)(model), tx.init(model), model)[0],
        optim.apply_updates(model, {"w": jnp.ones(2)}),
    ):
        assert made["mean"] is model["mean"]
        assert made["steps"] is model["steps"]
    np.testing.assert_array_equal(tp.grad(loss, layout)(model)["w"], [21, 21])
    assert {layout: 1}[pickle.loads(pickle.dumps(layout))]
    buffers = {"w": jnp.ones(2), "steps": jax.new_ref(jnp.array(4)), "key": jax.new_ref(jax.random.key(0))}
    assert tp.layout(buffers).paths == tp.layout(Declared(jnp.ones(2), jax.new_ref(jnp.ones(3)))).paths == ("w",)


def test_refs_are_known_inside_a_trace_from_arrays_of_their_shape():
    model = {"w": jnp.ones(3), "mean": jax.new_ref(jnp.full(3, 2.0))}
    layout = tp.layout(model, "w")

    @jax.jit
    def gradient(model):
        made = tp.layout(model, "w")  # of a traced ref
        assert made == layout
        return tp.grad(loss, made)(model)["w"]

    arrays = {"w": jnp.ones(3), "mean": jnp.ones(3)}
    assert jax.jit(lambda model: jnp.array(tp.layout(model).size))(arrays) == 6
    np.testing.assert_array_equal(gradient(model), [6, 6, 6])
    assert jax.jit(lambda model: jnp.array(tp.layout(model).size))(arrays) == 6


def test_a_jitted_step_writes_refs_and_gives_them_back():
    model = with_refs()

    @tp.jit
    def step(model):
        model["steps"][...] += 1
        model["mean"][...] = 2 * model["mean"][...]
        return {**model, "w": model["w"] + 1}

    after = step(step(model))
    assert after["mean"] is model["mean"]
    assert int(after["steps"][...]) == 6
    np.testing.assert_array_equal(after["mean"][...], [28, 28, 28])


def test_what_reads_refuses_no_ref_and_replace_gives_a_new_one():
    model = with_refs()
    summary = tp.summary(model)
    roles = {row.path: row.role for row in summary.rows}
    assert roles == {"mean": "frozen", "seen": "other", "steps": "other", "w": "trained"}
    totals = {role: total.elements for role, total in summary.totals.items()}
    assert totals == {"trained": 2, "frozen": 3, "other": 2}
    for value in (jnp.full(3, 14.0), lambda mean: 2 * mean):
        made = tp.replace(model, {"mean": value})
        np.testing.assert_array_equal(made["mean"][...], [14, 14, 14])
        assert made["steps"] is model["steps"]
    twice = tp.copy(dict.fromkeys("ab", shared := jax.new_ref(jnp.ones(2))))
    assert twice["a"] is twice["b"] is not shared
