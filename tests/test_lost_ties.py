"""A tie that a trace has lost is noticed, once, by whatever meets the model there; and not where it is known."""

import concurrent.futures
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .zoo import ramp

_count = iter(range(10**6))


def fresh(ensemble: int | None = None) -> dict[str, Any]:
    """A tied model of a structure that this process has not met, since the warning is given once per structure."""
    name = f"w{next(_count)}"
    shared = ramp(2, 3) if ensemble is None else ramp(ensemble, 2, 3)
    return {"embed": shared, "head": shared, name: ramp(2) if ensemble is None else ramp(ensemble, 2)}


def loss(model: Any, x: Any = 1.0) -> jax.Array:
    return x * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model) if eqx.is_inexact_array(leaf))


MESSAGE = (
    r"'embed' and 'head' were one array in a model of this structure that was met before.*known = tp.layout\(model\); "
    r"tp.grad\(loss, known\).*tp.partition.*tp.ravel.*tp.jit.*its own layout"
)

VERBS = {
    "layout": lambda model: tp.layout(model).size,
    "layout of freeze": lambda model: tp.layout(model, freeze="w*").size,
    "partition": lambda model: jax.tree.leaves(tp.partition(model)[0]),
    "ravel": lambda model: tp.ravel(model)[0],
    "grad": lambda model: tp.grad(loss)(model)["embed"],
    "value_and_grad": lambda model: tp.value_and_grad(loss)(model)[0],
    "maptrainable": lambda model: tp.maptrainable(lambda x: 2 * x, model),
    "mapreduce": lambda model: tp.mapreduce(jnp.sum, jnp.add, model, init=0.0),
    "biwalk": lambda model: [leaf for _, leaf, _ in tp.biwalk(model, {})],
    "trainables": lambda model: tp.trainables(model),
    "project": lambda model: tp.project(model, {"embed": model["embed"]})["embed"],
    "ema": lambda model: tp.ema(model, model, decay=0.5),
    "summary": lambda model: tp.summary(model).totals["trained"].elements,
    "accumulate": lambda model: tp.accumulate(lambda m, x: loss(m), pieces=2)(model, jnp.ones(4))[0],
    "optim": lambda model: jax.tree.leaves(optim.trainable(optax.sgd(1.0)).init(model)),
    "a where": lambda model: tp.trainables(model, "embed"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_notices(verb: str):
    model = fresh()
    tp.layout(model)  # met outside
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        jax.jit(VERBS[verb])(model)
    assert [each.filename for each in caught] == [__file__]  # it points at the caller
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda model: VERBS[verb](model))(model)  # once per structure


@pytest.mark.parametrize("meet", ["partition", "tie", "combine", "restructure", "tp.jit", "maptrainable"])
def test_it_is_met_by_any_function_and_by_what_they_return(meet: str):
    model = fresh()
    (name,) = set(model) - {"embed", "head"}
    apart = {"embed": ramp(2, 3), "head": ramp(2, 3), name: ramp(2)}
    given = lambda: tp.layout(apart, ties={"head": "embed"})
    if meet == "tie":
        model = tp.tie(apart, "head", to="embed")
    elif meet == "combine":
        model = tp.combine(*tp.partition(apart, given()))
    elif meet == "restructure":
        vector, restructure = tp.ravel(apart, given())
        model = restructure(vector)
    elif meet == "maptrainable":
        model = tp.maptrainable(lambda x: x, apart, trainable=given())
    elif meet == "tp.jit":
        model = tp.jit(lambda model: model)(model)
    else:
        tp.partition(model)
    assert model["embed"] is model["head"]
    with pytest.warns(UserWarning, match=MESSAGE):
        jax.jit(tp.grad(loss))(model)


def test_what_a_plain_jit_returned_does_not_erase_it():
    model = fresh()
    params, _ = tp.partition(model)
    apart = jax.jit(lambda model: model)(eqx.apply_updates(model, params))
    assert apart["embed"] is not apart["head"]
    assert tp.layout(apart).ties == {}
    with pytest.warns(UserWarning, match=MESSAGE):
        jax.jit(tp.grad(loss))(apart)


def test_in_filter_jit_vmap_and_scan():
    model = fresh()
    tp.layout(model)
    with pytest.warns(UserWarning, match=MESSAGE):
        eqx.filter_jit(tp.grad(loss))(model)
    ensemble = fresh(4)
    tp.layout(ensemble)
    with pytest.warns(UserWarning, match=MESSAGE):
        jax.vmap(tp.grad(loss))(ensemble)  # without the axis that is mapped
    carried = fresh()
    tp.layout(carried)
    with pytest.warns(UserWarning, match=MESSAGE):
        jax.lax.scan(lambda model, _: (tp.maptrainable(lambda x: 0.5 * x, model), None), carried, None, length=2)
    layers = fresh(4)
    tp.layout(layers)
    with pytest.warns(UserWarning, match=MESSAGE):
        jax.lax.scan(lambda carry, layer: (carry + tp.ravel(layer)[0][0], None), 0.0, layers)


def test_it_is_silent_where_the_ties_are_known():
    model = fresh()
    layout = tp.layout(model)
    params, rest = tp.partition(model)
    vector, restructure = tp.ravel(model)
    jax.jit(tp.grad(loss, layout))(model)
    jax.jit(lambda model: tp.ravel(model, layout)[0])(model)
    jax.jit(lambda params, rest: tp.grad(loss)(tp.combine(params, rest)))(params, rest)
    jax.jit(lambda vector, restructure: tp.grad(loss)(restructure(vector)))(vector, restructure)
    tp.jit(tp.grad(loss))(model)
    tp.jit(lambda model: tp.maptrainable(lambda x: 2 * x, model))(model)
    jax.vmap(lambda x: tp.grad(loss)(model, x))(jnp.ones(3))  # the model is no argument of the `vmap`
    jax.grad(lambda params: loss(tp.combine(params, rest)))(params)


class Declared(eqx.Module):
    embed: jax.Array
    head: jax.Array = tp.field(tied_to="embed")


def test_it_is_silent_where_a_class_declares_the_tie():
    model = tp.tie(Declared(ramp(2, 3), ramp(2, 3)))
    assert model.embed is model.head
    tp.layout(model)
    jax.jit(tp.grad(loss))(model)


def test_it_is_silent_for_what_is_frozen():
    model = fresh()
    (name,) = set(model) - {"embed", "head"}
    tp.layout(model)
    jax.jit(tp.grad(loss, name))(model)


class Residual(eqx.Module):
    one: eqx.nn.Linear
    other: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.one(x) + self.other(x)


def test_shared_cotangents_teach_no_ties():
    keys = jax.random.split(jax.random.key(0))
    model = Residual(eqx.nn.Linear(3, 3, key=keys[0]), eqx.nn.Linear(3, 3, key=keys[1]))
    of = lambda model: jnp.sum(model(jnp.ones(3)))
    grads = tp.grad(of)(model)
    grads = eqx.tree_at(lambda g: g.other.bias, grads, grads.one.bias)  # one object, as newer JAX has it by itself
    tp.trainables(grads)
    model = tp.jit(lambda model, grads: tp.maptrainable(lambda x, g: x - 0.1 * g, model, grads))(model, grads)
    state = {"mu": jax.tree.map(lambda _: jnp.zeros(3), grads), "nu": grads}
    tp.jit(lambda state: state)(state)
    eqx.filter_jit(tp.grad(of))(model)
    jax.jit(lambda a, b: tp.ravel((a, b))[0])(jnp.ones(3), jnp.ones(3))


def test_it_is_silent_for_copies_that_were_untied():
    model = fresh()
    tp.layout(model)
    apart = tp.untie(model)
    params, rest = tp.partition(apart)
    vector, restructure = tp.ravel(apart)
    jax.jit(lambda params, rest: tp.grad(loss)(tp.combine(params, rest)))(params, rest)
    jax.jit(lambda vector, restructure: tp.grad(loss)(restructure(vector)))(vector, restructure)
    tp.jit(tp.grad(loss))(apart)
    tp.jit(lambda params, rest: tp.grad(loss)(tp.combine(params, rest)))(params, rest)
    tp.jit(lambda average: tp.grad(loss)(average.average))(tp.Ema(apart, 0.9))
    tp.jit(lambda model: tp.grad(loss)(tp.untie(model)))(model)


def test_two_patterns_of_one_kind():
    a, b = ramp(2), ramp(2)
    name = f"w{next(_count)}"
    first, second = {name: a, "b": a, "c": b}, {name: a, "b": b, "c": b}
    for model in (first, second, first):
        tp.layout(model)
        tp.jit(tp.grad(loss))(model)


def test_a_model_within_something_larger_is_noticed_too():
    model = fresh()
    tp.layout(model)
    with pytest.warns(UserWarning, match=r"'net.embed' and 'net.head' were one array"):
        jax.jit(lambda both: tp.ravel(both)[0])({"net": model, "temperature": jnp.ones(2)})


def test_threads_do_not_disturb_it():
    models = [fresh() for _ in range(60)]

    def work(model: Any) -> float:
        tp.layout(model)
        return float(tp.jit(lambda model: loss(model))(model))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(work, models))) == 1


def test_it_is_silent_for_what_was_never_tied_and_for_other_shapes():
    model = fresh()
    (name,) = set(model) - {"embed", "head"}
    tp.layout(model)
    jax.jit(tp.grad(loss))({"embed": ramp(3, 3), "head": ramp(3, 3), name: ramp(2)})
    jax.jit(tp.grad(loss))({"embed": ramp(2, 3), "head": ramp(2, 3), "other": ramp(2)})


def test_its_own_layout_silences_it_for_a_model_that_only_looks_alike():
    model = fresh()
    (name,) = set(model) - {"embed", "head"}
    tp.layout(model)
    alike = {"embed": ramp(2, 3), "head": ramp(2, 3), name: ramp(2)}
    own = tp.layout(alike)
    assert own.ties == {}
    jax.jit(tp.grad(loss, own))(alike)
