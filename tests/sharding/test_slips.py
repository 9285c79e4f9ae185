"""What users write by mistake: each is answered by what came, and what to write."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import treeparams as tp
from treeparams import sharding

from .. import nets
from ..nets import ADAM, AUTO, EXPLICIT, SPLIT, loss, mesh_of, two_axes
from ..zoo import filled, first_devices, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion", "without_type_checks")
MESH, TWO, WHOLE = mesh_of(4), two_axes(("data", "model")), {"**": "whole"}
EMBED = ramp(16, 4)
LAYOUT = tp.layout({
    "embed": EMBED,
    "head": EMBED,
    "layers": [{"b": ramp(3, start=i), "w": ramp(4, 4, start=i)} for i in range(4)],
})


def mixed(*kinds, **options):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds, devices=first_devices(4))
    return {"mesh": mesh, "form": "vector", **options}


_VECTOR, _TWO = {"form": "vector"}, {"mesh": TWO, "axis": "data"}
_OF_THREE = {"mesh": AbstractMesh((4, 3), ("data", "model")), "axis": "data"}
_SAYS = "the mesh has explicit axes, and "
PLANS = [  # in the messages, ~ is for what stands between
    ({"embed": "split"}, {}, "no rule matches\n'layers.0.b'~add a last rule for all other parameters"),
    ({"**": "whole", "layers": "split", "embed": "whole"}, {}, "'layers' comes too late: '**' before it selects"),
    ({"head": "whole", "layers": "whole"}, {}, "'head' names 'head', but 'embed' and 'head' are one array"),
    (SPLIT, {}, "'layers.0.b' (float32[3]), by '**': none of its axes is a multiple"),
    (SPLIT, _OF_THREE, "another axis of the mesh, 'model', or \"whole\""),
    ({"**": "owned"}, {}, '\'**\': "owned" is for rows of stacks; write form="stacks", or "split" in a tree'),
    ({"embed": "whole", "**": "split"}, _VECTOR, "'embed' has 'whole' and 'layers.0.b'~form=\"stacks\""),
    ({"embed": P(None, None, "data"), "**": "whole"}, {}, "the spec has 3 entries, the array 2 axes"),
    ({"embed": P("data", "data"), "**": "whole"}, {}, "the spec names an axis of the mesh twice"),
    ({"embed": P(("data", "model")), "**": "whole"}, _TWO, "axis 0 is split along the batch and along"),
    (WHOLE, {"axis": "model"}, "axis: the mesh has no axis 'model'; its axes are 'data'"),
    (WHOLE, {"mesh": TWO}, "the mesh has the axes 'data', 'model': name with axis="),
    (WHOLE, _TWO | {"axis": "model", "batch_axis": "data"}, "would all compute the same~a PartitionSpec"),
    # Axes that JAX cannot mix.
    (SPLIT, mixed(EXPLICIT, AUTO, axis="b"), _SAYS + "'b'~make all of them automatic"),
    ({"**": P("b")}, mixed(EXPLICIT, AUTO, axis="a"), _SAYS + "'b' is automatic"),
    (SPLIT, mixed(AxisType.Manual, AUTO, axis="b"), "axes of the mesh are manual, ~shard_map"),
]


@pytest.mark.parametrize(("rules", "options", "message"), PLANS)
def test_rules_that_cannot_be(rules, options, message):
    pattern = ".*".join(map(re.escape, message.split("~")))
    with pytest.raises(ValueError, match=f"(?s){pattern}"):
        sharding.plan(LAYOUT, rules=rules, **({"mesh": MESH} | options))


_AVERAGE = r"average must be a decay, .*functools\.partial.*, got "
MUON = optax.contrib.muon(1e-2)
STEPS = [
    (MUON, "vector", SPLIT, {}, 'use form="stacks" with optim.per_leaf, or form="tree"'),
    (MUON, "stacks", {"layers": "owned", "**": "whole"}, {}, r"inside optim\.per_leaf"),
    (optax.lbfgs(), "tree", SPLIT, {}, r"calls the loss itself \(a line search\), use optim\.trainable"),
    (ADAM, "tree", SPLIT, {"loss_takes": "x"}, 'loss_takes must be "model" or "form", got \'x\''),
    (ADAM, "tree", SPLIT, {"microbatches": 0}, "microbatches must be a whole number of pieces, at least 1, got 0"),
    (ADAM, "tree", SPLIT, {"average": tp.Ema}, _AVERAGE + ".*Ema"),
    (ADAM, "tree", SPLIT, {"average": lambda params: 3}, "makes a tp.Ema of parameters, .*; it made int"),
    (ADAM, "tree", SPLIT, {"compute_dtype": "int8"}, r"of '\*\*': expected a floating dtype.*got int8"),
    (ADAM, "vector", SPLIT, {"compute_dtype": {"**.b": "float32", "**": "bfloat16"}},
     "a vector is moved in one dtype, but compute_dtype gives its parameters '.*'"),
    (ADAM, "tree", SPLIT, {"has_aux": 1}, "has_aux must be True or False"),
]  # fmt: skip


@pytest.mark.parametrize(("tx", "form", "rules", "options", "message"), STEPS)
def test_steps_that_cannot_be(tx, form, rules, options, message):
    plan = sharding.plan(nets.LAYOUT, mesh_of(), rules, form=form)
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
        sharding.make_step(loss, tx, plan, **options)


# -- By hand, in a first hour ------------------------------------------------------------------------------------------

NET = filled(eqx.nn.MLP, 8, 8, 16, 1)
X = jnp.ones((32, 8))


def of_net(net, x, y):
    return jnp.mean((jax.vmap(net)(x) - y) ** 2)


class Made:
    """A plan, its step and what `init` returned."""

    def __init__(self):
        self.plan = sharding.plan(NET, mesh_of(), SPLIT)
        self.init, self.step = sharding.make_step(of_net, ADAM, self.plan)
        self.params, self.state = self.init(NET)


def masked_by_a_tree(made):
    rule = optax.masked(optax.sgd(0.1), jax.tree.map(lambda _: True, tp.partition(NET)[0]))
    sharding.make_step(of_net, rule, sharding.plan(NET, mesh_of(), SPLIT, form="vector"))


def step_of(made, loss, **options):
    return sharding.make_step(loss, ADAM, made.plan, **options)[1](made.params, made.state, X, X)


def step_twice(made):
    for _ in range(2):
        made.step(made.params, made.state, X, X)


def with_state_that_changes(made):
    of = lambda net, state, x: (of_net(net, x, x), {"count": state["count"] + 0.5})
    init, step = sharding.make_step(of, ADAM, made.plan, has_state=True)
    step(*init(NET, {"count": jnp.zeros((), jnp.int32)}), X)


NO_NUMBER = "the loss must return one real number, got "
SLIPS = {
    "the model for params": (lambda t: t.step(NET, t.state, X, X), "MLP of 6 arrays.* params, state = init"),
    "no state": (lambda t: t.step(t.params, X, X), "got float32.32,8.* Write params, state, value = step.params"),
    "params of an earlier step": (lambda _: step_twice(Made()), "Use those that it"),  # a step donates them
    "a batch that cannot be shared": (lambda t: t.step(t.params, t.state, X[:30], X[:30]), "30 examples.*ple of 4"),
    "a batch as a tuple": (lambda t: t.step(t.params, t.state, (X, X)), "'y'.*got tuple.* one by one"),
    "params for the model": (lambda t: t.init(t.params), "in the form of the plan.* params, state = init"),
    "the model for params, in plan.model": (lambda t: t.plan.model(NET, t.state), "got MLP of 6 arrays.* Pass those"),
    "pieces of another number": (lambda t: step_of(t, of_net, microbatches=3), "in 3 pieces; give a multiple of 12"),
    "a mask of a tree over a vector": (masked_by_a_tree, 'it fails there.* form="tree"'),
    "no examples": (lambda t: t.step(t.params, t.state, X[:0], X[:0]), "batch.0. has 0 examples"),
    "a loss and more": (lambda t: step_of(t, lambda net, x, y: (of_net(net, x, y), 1.0)), NO_NUMBER
                        + "a tuple of 2. Return .value, aux. and pass has_aux=True; or,"),
    "no state of a model": (lambda t: sharding.make_step(of_net, ADAM, t.plan, has_state=True)[0](NET),
                            "init got none. Pass the one that eqx.nn.make_with_state returns"),
    "a state that changes": (with_state_that_changes, r"state\['count'\] was int32\[\] and is float32\[\]"),
    "raw keys": (lambda t: t.step(t.params, t.state, X, jax.random.PRNGKey(0)), "batch.1. 2.*wrap_key_data"),
}  # fmt: skip


@pytest.fixture(scope="module")
def made():
    with jax.numpy_dtype_promotion("standard"):
        return Made()


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_answered_in_two_sentences(name, made):
    slip, message = SLIPS[name]
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}") as caught:
        slip(made)
    assert len(str(caught.value)) < 500
    assert "object at 0x" not in str(caught.value)
