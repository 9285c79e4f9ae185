"""A tie that a trace has lost is noticed, once, by whatever meets the model there; and not where it is known."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .. import verbs
from ..verbs import VERBS, loss
from ..zoo import ramp

_count = iter(range(10**6))


def fresh(*batch: int, tied: bool = True) -> dict[str, Any]:
    """A model of a structure that this process has not met, since the warning is given once per structure."""
    embed = ramp(*batch, 2, 3)
    return {"embed": embed, "head": embed if tied else embed + 0, f"w{next(_count)}": ramp(*batch, 2)}


MESSAGE = (
    r"'embed' and 'head' were one array in an earlier model of this structure.*known = tp.layout\(model\); "
    r"tp.grad\(loss, known\).*tp.partition.*tp.ravel.*tp.jit.*its own layout"
)
noticed = lambda: pytest.warns(UserWarning, match=MESSAGE)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_notices(verb: str):
    model = fresh()
    tp.layout(model)  # met outside
    with noticed() as caught:
        jax.eval_shape(VERBS[verb], model)
    assert [each.filename for each in caught] == [verbs.__file__]  # it points at the caller
    jax.eval_shape(lambda model: VERBS[verb](model), model)  # once per structure


knowing = lambda apart: tp.layout(apart, ties={"head": "embed"})
MEETS = {
    "tie": lambda apart: tp.tie(apart, "head", to="embed"),
    "combine": lambda apart: tp.combine(*tp.partition(apart, knowing(apart))),
    "restructure": lambda apart: (lambda vector, restructure: restructure(vector))(*tp.ravel(apart, knowing(apart))),
    "maptrainable": lambda apart: tp.maptrainable(lambda x: x, apart, trainable=knowing(apart)),
    "tp.jit": lambda apart: tp.jit(lambda model: model)({**apart, "head": apart["embed"]}),
}


@pytest.mark.parametrize("meet", MEETS)
def test_it_is_met_by_any_function_and_by_what_they_return(meet: str):
    model = MEETS[meet](fresh(tied=False))
    assert model["embed"] is model["head"]
    with noticed():
        jax.eval_shape(tp.grad(loss), model)


def test_what_a_plain_jit_returned_does_not_erase_it():
    model = fresh()
    params, _ = tp.partition(model)
    apart = jax.jit(lambda model: model)(eqx.apply_updates(model, params))
    assert apart["embed"] is not apart["head"]
    assert tp.layout(apart).ties == {}
    with noticed():
        jax.eval_shape(tp.grad(loss), apart)


TRACES = {
    "filter_jit": eqx.filter_jit(tp.grad(loss)),
    "vmap": jax.vmap(tp.grad(loss)),  # without the axis that is mapped
    "carry of a scan": lambda model: jax.lax.scan(lambda m, _: (tp.maptrainable(jnp.sin, m), None), model, None, 2),
    "xs of a scan": lambda model: jax.lax.scan(lambda c, each: (c + tp.ravel(each)[0][0], None), 0.0, model),
}


@pytest.mark.parametrize("run", TRACES.values(), ids=TRACES)
def test_in_filter_jit_vmap_and_scan(run: Any):
    tp.layout(model := fresh(4))
    with noticed():
        run(model)


def test_a_model_within_something_larger_is_noticed_too():
    tp.layout(model := fresh())
    with pytest.warns(UserWarning, match=r"'net.embed' and 'net.head' were one array"):
        jax.eval_shape(lambda both: tp.ravel(both)[0], {"net": model, "temperature": ramp(2)})


# -- Where it is silent: warnings are errors in these tests


@pytest.mark.parametrize("untied", [False, True])
def test_it_is_silent_where_the_ties_are_known_and_for_copies_that_were_untied(untied: bool):
    model = fresh()
    layout = tp.layout(model)
    if untied:
        model = tp.untie(model)
        layout = tp.layout(model)
    (params, rest), (vector, restructure) = tp.partition(model), tp.ravel(model)
    of_halves = lambda params, rest: tp.grad(loss)(tp.combine(params, rest))
    jax.eval_shape(tp.grad(loss, layout), model)
    jax.eval_shape(lambda model: tp.ravel(model, layout)[0], model)
    jax.eval_shape(of_halves, params, rest)
    jax.eval_shape(lambda vector, restructure: tp.grad(loss)(restructure(vector)), vector, restructure)
    tp.jit(tp.grad(loss))(model)
    tp.jit(of_halves)(params, rest)
    tp.jit(lambda average: tp.grad(loss)(average.average))(tp.Ema(model, 0.9))
    tp.jit(lambda model: tp.grad(loss)(tp.untie(model)))(model)
    jax.vmap(lambda x: tp.grad(loss)(model, x))(np.ones(3, "f"))  # the model is no argument of the `vmap`
    jax.grad(lambda params: loss(tp.combine(params, rest)))(params)


def test_it_is_silent_for_what_is_frozen_has_other_shapes_or_its_own_layout():
    tp.layout(model := fresh())
    jax.eval_shape(tp.grad(loss, "w*"), model)
    jax.eval_shape(tp.grad(loss), {name: ramp(3, *leaf.shape) for name, leaf in model.items()})
    jax.eval_shape(tp.grad(loss), {"embed": ramp(2, 3), "head": ramp(2, 3), "other": ramp(2)})
    apart = {name: leaf + 0 for name, leaf in model.items()}
    with pytest.warns(UserWarning, match="'embed' and 'head' were one array .* equal bit for bit"):
        own = tp.layout(apart)
    assert own.ties == {}
    jax.eval_shape(tp.grad(loss, own), apart)


def test_shared_cotangents_teach_no_ties():
    model = {"one": eqx.nn.Linear(3, 3, key=jax.random.key(0)), "other": eqx.nn.Linear(3, 3, key=jax.random.key(1))}
    of = lambda model: jnp.sum(jnp.arange(3.0) * (model["one"](jnp.ones(3)) + model["other"](jnp.ones(3))))
    grads = tp.grad(of)(model)
    grads = eqx.tree_at(lambda g: g["other"].bias, grads, grads["one"].bias)  # one object, as newer JAX has it
    tp.trainables(grads)
    tp.jit(lambda state: state)({"mu": jax.tree.map(lambda _: np.zeros(3, "f"), grads), "nu": grads})
    model = tp.jit(lambda model, grads: tp.maptrainable(lambda x, g: x - 0.1 * g, model, grads))(model, grads)
    eqx.filter_jit(tp.grad(of))(model)


@pytest.mark.filterwarnings("error")
def test_empty_arrays_tell_nothing():
    shared = jnp.zeros(0)
    tp.layout({"a": shared, "b": shared})
    tp.layout({"a": jnp.zeros(0), "b": jnp.zeros(0)})
