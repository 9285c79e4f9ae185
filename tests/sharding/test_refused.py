"""What plans and steps over them refuse, and what to write instead."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P

import treeparams as tp
from treeparams import optim, sharding

from .. import nets
from ..nets import ADAM, BATCH, MIXED, RULES, SPLIT, loss, mesh_of, model_of, started, two_axes
from ..zoo import ramp

pytestmark = pytest.mark.usefixtures("standard_promotion", "without_type_checks")
MESH, TWO = mesh_of(4), two_axes(("data", "model"))
EMBED = ramp(16, 4)
LAYOUT = tp.layout({
    "embed": EMBED,
    "head": EMBED,
    "layers": [{"b": ramp(3, start=i), "w": ramp(4, 4, start=i)} for i in range(4)],
})


@pytest.mark.parametrize(
    ("rules", "options", "message"),
    [
        ({"embed": "split"}, {}, "no rule matches\n'layers.0.b'~add a last rule for all other parameters"),
        ({}, {}, "no rule matches"),
        ({"**": "whole", "layers": "split", "embed": "whole"}, {}, "'layers' comes too late: '**' before it selects"),
        ({"**": "split", "layers": "whole"}, {}, "'layers' comes too late: '**' before it selects"),
        ({"head": "whole", "layers": "whole"}, {}, "'head' names 'head', but 'embed' and 'head' are one array"),
        ({"embd": "split", "**": "whole"}, {}, "'embd' selects nothing; nearest: 'embed'"),
        (
            {"**": "split"},
            {},
            "'layers.0.b' (float32[3]), by '**': none of its axes is a multiple of 4; write \"whole\"",
        ),
        (
            {"**": "split"},
            {"form": "stacks"},
            "'layers.0.b' (float32[3]), by '**': none of its axes is a multiple of 4; write \"owned\"",
        ),
        (
            {"**": "split"},
            {"mesh": AbstractMesh((4, 3), ("data", "model")), "axis": "data"},
            "none of its axes is a multiple of 4; write a split over another axis of the mesh, 'model', or \"whole\"",
        ),
        (
            {"**": "owned"},
            {"form": "stacks"},
            "'embed' (float32[16,4]), by '**': 4 devices cannot own the 1 row~ of its stack~write \"split\"",
        ),
        ({"**": "owned"}, {}, '\'**\': "owned" is for rows of stacks; write form="stacks", or "split" in a tree'),
        ({"**": "owned"}, {"form": "vector"}, 'write form="stacks", or "split" in a vector'),
        (
            {"embed": "whole", "**": "split"},
            {"form": "vector"},
            "all parts of a vector need the same rule, but 'embed' has 'whole' and 'layers.0.b'~form=\"stacks\"",
        ),
        ({"**": P(None, "data")}, {"form": "vector"}, "the spec has 2 entries, the array 1 ax"),
        (
            {"embed": P("model"), "**": "whole"},
            {},
            "'embed'~the mesh has no axis 'model'; its axes are 'data'",
        ),
        ({"embed": P(None, None, "data"), "**": "whole"}, {}, "the spec has 3 entries, the array 2 axes"),
        ({"embed": P("data", "data"), "**": "whole"}, {}, "the spec names an axis of the mesh twice"),
        (
            {"**": P("data")},
            {},
            "'layers.0.b' (float32[3]), by '**': its axis 0 of size 3 is no multiple of 4",
        ),
        (
            {"embed": P(("data", "model")), "**": "whole"},
            {"mesh": TWO, "axis": "data"},
            "axis 0 is split along the batch and along another axis of the mesh at once",
        ),
        ({"**": "spilt"}, {}, '\'**\': expected "split", "owned", "whole" or a PartitionSpec, got \'spilt\''),
        ({"**": None}, {}, 'expected "split", "owned", "whole" or a PartitionSpec, got None'),
        ({"**": P(P.UNCONSTRAINED)}, {}, "its entries must be None, the name of an axis of the mesh, or a tuple"),
        ({"**": "whole"}, {"form": "stack"}, 'form must be "tree", "vector" or "stacks", got \'stack\''),
        ({"**": "whole"}, {"axis": "model"}, "axis: the mesh has no axis 'model'; its axes are 'data'"),
        ({"**": "whole"}, {"batch_axis": ("data", "x")}, "batch_axis: the mesh has no axis 'x'"),
        ({"**": "whole"}, {"mesh": TWO}, "the mesh has the axes 'data', 'model': name with axis="),
        (
            {"**": "whole"},
            {"mesh": TWO, "axis": "model", "batch_axis": "data"},
            "devices along an axis that does not split the batch would all compute the same~write a PartitionSpec",
        ),
    ],
)
def test_rules_that_cannot_be(rules, options, message):
    """In the messages, ~ is for what stands between."""
    pattern = ".*".join(map(re.escape, message.split("~")))
    with pytest.raises(ValueError, match=f"(?s){pattern}"):
        sharding.plan(LAYOUT, rules=rules, **({"mesh": MESH} | options))


@pytest.mark.parametrize(
    ("rules", "options", "message"),
    [
        ("split", {}, r'rules must be a dictionary \{where: rule\}, such as \{"\*\*": "split"\}, got str'),
        ({"**": "whole"}, {"mesh": 4}, r"expected a mesh, such as jax\.make_mesh.*, got int"),
        ({"**": "whole"}, {"axis": 3}, "axis"),
    ],
)
def test_what_is_no_rule_no_mesh_no_axis(rules, options, message):
    with pytest.raises(TypeError, match=message):
        sharding.plan(LAYOUT, rules=rules, **({"mesh": MESH} | options))


# -- Steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tx", "form", "rules", "options", "message"),
    [
        (optim.trainable(ADAM), "tree", SPLIT, {}, "expected an Optax optimiser"),
        (
            RULES["muon"],
            "tree",
            SPLIT,
            {},
            r'moves parameters.*\{"\*\*": "owned"\}, form="stacks"\) with optim.per_leaf',
        ),
        (RULES["muon"], "vector", SPLIT, {}, 'use form="stacks" with optim.per_leaf, or form="tree"'),
        (RULES["muon"], "stacks", MIXED, {}, r"inside optim\.per_leaf"),
        (optim.per_leaf(RULES["muon"]), "stacks", SPLIT, {}, r'moves parameters.*\{"\*\*": "owned"\}'),
        (optax.lbfgs(), "tree", SPLIT, {}, r"calls the loss itself \(a line search\), use optim\.flat"),
        (ADAM, "vector", SPLIT, {"split": "parameters"}, r'form="stacks" and loss_takes="form"'),
        (ADAM, "stacks", SPLIT, {"split": "parameters"}, r'form="stacks" and loss_takes="form"'),
        (ADAM, "tree", SPLIT, {"split": "zero"}, 'split must be "state", "gradients" or "parameters", got \'zero\''),
        (ADAM, "tree", SPLIT, {"loss_takes": "x"}, 'loss_takes must be "model" or "form", got \'x\''),
        (ADAM, "tree", SPLIT, {"microbatches": 0}, "microbatches must be a whole number of pieces, at least 1, got 0"),
        (ADAM, "tree", SPLIT, {"average": 2.0}, "decay must be between 0 and 1, got 2.0"),
        (ADAM, "tree", SPLIT, {"average": "0.9"}, r"average must be a decay, .*functools\.partial.*, got '0\.9'"),
        (ADAM, "tree", SPLIT, {"average": tp.Ema}, r"average must be a decay, .*functools\.partial.*, got .*Ema"),
        (ADAM, "tree", SPLIT, {"average": lambda params: 3}, "makes a tp.Ema of parameters, .*; it made int"),
    ],
)
def test_steps_that_cannot_be(tx, form, rules, options, message):
    plan = sharding.plan(nets.LAYOUT, mesh_of(), rules, form=form)
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
        sharding.make_step(loss, tx, plan, **options)


def test_owned_rows_that_run_one_after_another():
    layers = [ramp(16, 16, start=i) for i in range(8)]
    plan = sharding.plan(layers, mesh_of(), {"**": "owned"}, form="stacks")
    of = lambda layers, x: jnp.mean(sum(x @ each for each in layers) ** 2)
    sharding.make_step(of, optim.per_leaf(RULES["muon"], at_once=4), plan)
    with pytest.raises(ValueError, match=r"one row after another, but the rows lie on different devices.*at_once=4"):
        sharding.make_step(of, optim.per_leaf(RULES["muon"], at_once=1), plan)


def test_what_is_no_plan():
    with pytest.raises(TypeError, match=r"expected a plan, sharding\.plan\(model, mesh, rules\), got Layout"):
        sharding.make_step(loss, ADAM, nets.LAYOUT)


def test_batches_and_parameters_that_do_not_fit():
    _, step, params, state = started(optax.sgd(0.1), form="tree")
    few = tuple(each[:6] for each in BATCH)
    with pytest.raises(ValueError, match=r"batch\[0\] has 6 examples, which 4 devices along .*'data'.* cannot share"):
        step(params, state, *few)
    with pytest.raises(ValueError, match=r"batch\[0\] has 16 examples and batch\[1\] 6"):
        step(params, state, BATCH[0], few[1])
    _, other, *_ = started(optax.sgd(0.1), form="vector")
    with pytest.raises((ValueError, TypeError), match=r"expected .*vector"):
        other(params, state, *BATCH)
    plan = sharding.plan(nets.LAYOUT, mesh_of(), SPLIT)
    with pytest.raises(ValueError, match=r"does not fit the layout.*\n'embed' is float32\[12,4\]"):
        sharding.make_step(loss, ADAM, plan)[0](model_of() | {"embed": ramp(8, 4)})


def test_batches_without_examples_and_losses_that_are_no_number():
    _, step, params, state = started(optax.sgd(0.1), form="tree")
    with pytest.raises(ValueError, match=r"batch\[0\] has no examples"):
        step(params, state, *(each[:0] for each in BATCH))
    for wrong, got in (
        (lambda model, x, y: (loss(model, x, y), 0), "a tuple of 2"),
        (lambda model, x, y: x, "float32.16,12."),
    ):
        _, step, params, state = started(optax.sgd(0.1), form="tree", of=wrong)
        with pytest.raises(TypeError, match=f'with loss_is="mean" the loss must return one real number.*got {got}'):
            step(params, state, *BATCH)


@pytest.mark.parametrize(
    "sum_of", [lambda params: params["float32[4]"], lambda params: sum(jax.tree.leaves(params)), tp.global_norm]
)
def test_split_parameters_are_for_the_restructure_alone(sum_of):
    """A sum over what one device has of them would be another number."""
    of = lambda params, restructure, x, y: loss(restructure(params), x, y) + jnp.sum(sum_of(params))
    options = {"split": "parameters", "loss_takes": "form"}
    _, step, params, state = started(optax.sgd(0.1), SPLIT, "stacks", of=of, **options)
    with pytest.raises(TypeError, match="read them through the restructure"):
        step(params, state, *BATCH)
