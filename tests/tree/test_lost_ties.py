"""A tie that a trace has lost is noticed, once for each model, by whatever meets it; and not where it is known.

What is remembered for that may warn, and never changes a number; and it has a limit.
"""

import functools
import itertools
import json
import pathlib
import re
import subprocess
import sys
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams._slots import accidents

from .. import verbs
from ..verbs import OTHERS, VERBS, loss
from ..zoo import Norm, ramp

_count = itertools.count()


def tied(*shape: int, name: str = "w", batch: tuple[int, ...] = ()) -> dict[str, Any]:
    embed = ramp(*batch, *shape)
    return {"embed": embed, "head": embed, name: ramp(*batch, 2)}


def fresh(*batch: int) -> dict[str, Any]:
    """A model of a structure that this process has not met, since the warning is given once per structure."""
    return tied(2, 3, name=f"w{next(_count)}", batch=batch)


def apart(tree: Any) -> Any:
    """With arrays of their own, as JAX alone makes them."""
    return jax.tree.map(lambda leaf: jax.device_put(np.array(leaf)), tree)


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


knowing = lambda model: tp.layout(model, ties={"head": "embed"})
MEETS = {
    "tie": lambda model: tp.tie(model, "head", to="embed"),
    "combine": lambda model: tp.combine(*tp.partition(model, knowing(model))),
    "restructure": lambda model: (lambda vector, restructure: restructure(vector))(*tp.ravel(model, knowing(model))),
    "maptrainable": lambda model: tp.maptrainable(lambda x: x, model, trainable=knowing(model)),
    "tp.jit": lambda model: tp.jit(lambda model: model)({**model, "head": model["embed"]}),
}


@pytest.mark.parametrize("meet", MEETS)
def test_it_is_met_by_any_function_and_by_what_they_return(meet: str):
    model = MEETS[meet](apart(fresh()))
    assert model["embed"] is model["head"]
    with noticed():
        jax.eval_shape(tp.grad(loss), model)


TRACES = {
    "vmap": jax.vmap(tp.grad(loss)),  # without the axis that is mapped
    "carry of a scan": lambda model: jax.lax.scan(lambda m, _: (tp.maptrainable(jnp.sin, m), None), model, None, 2),
    "xs of a scan": lambda model: jax.lax.scan(lambda c, each: (c + tp.ravel(each)[0][0], None), 0.0, model),
}


@pytest.mark.parametrize("run", TRACES.values(), ids=TRACES)
def test_in_vmap_and_scan(run: Any):
    tp.layout(model := fresh(4))
    with noticed():
        run(model)


def test_what_a_plain_jit_returned_does_not_erase_it():
    model = fresh()
    params, _ = tp.partition(model)
    found = jax.jit(lambda model: model)(eqx.apply_updates(model, params))
    assert found["embed"] is not found["head"]
    assert tp.layout(found).ties == {}
    with noticed():
        jax.eval_shape(tp.grad(loss), found)


# -- Once for each model that a person would call another --------------------------------------------------------------


def lose(model: Any) -> list[str]:
    """Loses the ties of a model that was met in a trace, and in a copy outside. Returns the warnings of both."""
    tp.layout(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(tp.grad(lambda model: 0.0), model)
        tp.layout(apart(model))
    found = [re.match(r"'(\S+)' and '\S+' were one array", str(each.message)) for each in caught]
    return [each[1] for each in found if each]


LOSSES = (
    ({"a": tied(2, 3)}, "a"),  # in the trace, and outside
    ({"b": tied(2, 3)}, "b"),  # another name above
    ({"a": tied(4, 3)}, "a"),  # other shapes
    ({"held": {"a": tied(2, 3)}, "body": ramp(3)}, ""),  # a model that holds the first
    (tied(2, 3), ""),  # a part of the first
    ({"a": tied(2, 3, name="v")}, "a"),  # another layer beside them
)


def test_a_lost_tie_is_noticed_once_for_each_model():
    for model, node in LOSSES:
        assert lose(model) == [f"{node}.embed"] * 2 * bool(node)


# -- Where it is silent: warnings are errors in these tests ------------------------------------------------------------


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
    with pytest.warns(UserWarning, match="'embed' and 'head' were one array .* equal bit for bit"):
        own = tp.layout(model := apart(model))
    assert own.ties == {}
    jax.eval_shape(tp.grad(loss, own), model)


def test_shared_cotangents_teach_no_ties():
    model = {"one": eqx.nn.Linear(3, 3, key=jax.random.key(0)), "other": eqx.nn.Linear(3, 3, key=jax.random.key(1))}
    of = lambda model: jnp.sum(jnp.arange(3.0) * (model["one"](jnp.ones(3)) + model["other"](jnp.ones(3))))
    grads = tp.grad(of)(model)
    grads = eqx.tree_at(lambda g: g["other"].bias, grads, grads["one"].bias)  # one object, as newer JAX has it
    tp.trainables(grads)
    tp.jit(lambda state: state)({"mu": jax.tree.map(lambda _: np.zeros(3, "f"), grads), "nu": grads})
    model = tp.jit(lambda model, grads: tp.maptrainable(lambda x, g: x - 0.1 * g, model, grads))(model, grads)
    eqx.filter_jit(tp.grad(of))(model)


def test_many_kinds_leave_as_many_entries_as_there_may_be(monkeypatch):
    monkeypatch.setattr(accidents, "_MOST", 40)
    monkeypatch.setattr(accidents, "_SHAPES", 10)
    shared = ramp(2)
    for i in range(60):
        model = {f"x{i}": shared, f"y{i}": shared, f"z{i}": np.ones(2, "f")}
        tp.layout(tp.tie(tp.untie(model), f"y{i}", to=f"x{i}"), ties={f"z{i}": f"x{i}"})
        tp.layout({"x": (each := ramp(i + 1)), "y": each})  # one kind, of many shapes
    assert lose(fresh()) == ["embed", "embed"]  # what was met last is known
    assert 30 < len(accidents._facts) <= 40
    assert max(map(len, accidents._facts.values())) <= 11


# -- It never changes a number -----------------------------------------------------------------------------------------


def model_of(kind: str) -> dict[str, Any]:
    """A model of a kind of its own, with two arrays of each sort that are one."""
    shared, bias, mean, zero = ramp(2, 3), jnp.zeros(2), jnp.ones(2), jnp.array(0)
    net = {f"embed {kind}": shared, f"head {kind}": shared, "norms": [Norm(ramp(2), mean), Norm(ramp(2), mean)]}
    return {f"net {kind}": net, "steps": zero, "episodes": zero, "bias": bias, "shift": bias, "rate": 1.0}


EVERY = VERBS | OTHERS


def program(verb: str, kind: str) -> str:
    """The program of a verb in a trace, with the numbers that are constants in it: what tells all of its results."""
    made = jax.make_jaxpr(EVERY[verb])(model_of(kind))
    return re.sub(r"0x\w+", "", f"{made} {[np.asarray(each).tolist() for each in made.consts]}")


@pytest.mark.filterwarnings("ignore")
def test_a_verb_in_a_trace_is_the_same_program_whatever_was_met_before():
    command, root = [sys.executable, "-m", __spec__.name], pathlib.Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as other:
        accidents._facts.clear()
        for verb in EVERY.values():
            jax.eval_shape(functools.partial(verb, model_of("met")))  # concrete arrays, and nothing to compile
        met = {verb: program(verb, "met") for verb in EVERY}
        assert met == json.loads(other.communicate()[0])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({verb: program(verb, verb) for verb in EVERY}))
