"""A step over many devices has the numbers of one device: any loss, form, rules, rule of Optax and mesh, in float64."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeparams as tp
from treeparams import optim, sharding

from ..long import LONG, some
from ..nets import AUTO, EXPLICIT, by_optax, mesh_of, two_axes
from ..zoo import enable_x64

pytestmark = pytest.mark.usefixtures("standard_promotion")
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(16, 8))
# Masks of which some devices have much and others little: the mean of their means is another number.
MASK = (DRAW.random((16, 4)) < np.linspace(0.1, 0.9, 16)[:, None]).astype(float)


@functools.cache
def model_of():
    """Layers, a frozen leaf, complex ones, a tie, a tie by a transpose, and what is no parameter."""
    draw = np.random.default_rng(1)
    matrix = lambda *shape: jnp.asarray(draw.normal(size=shape) / 2)
    shared, turned = matrix(8, 8), matrix(8, 8)
    return {
        "f": jnp.tanh,
        "first": shared,
        "last": shared,
        "layers": [{"b": matrix(8), "w": matrix(8, 8)}, {"b": matrix(8), "w": turned}],
        "name": "net",
        "out": matrix(8, 4),
        "phase": jnp.asarray(np.exp(1j * np.arange(8))),
        "scale": jnp.full(8, 1.5),
        "turned": turned.T,
    }


def layout_of(form, rule):
    """A vector of real and complex parameters would be complex, and most rules are for real ones."""
    frozen = ("scale",) if form != "vector" and rule == "adam" else ("scale", "phase")
    return tp.layout(model_of(), freeze=frozen, ties={"turned": ("layers.1.w", jnp.transpose)})


def layer_of(x, layer):
    return x + jnp.tanh(x @ layer["w"] + layer["b"][None])


def errors(model, x):
    """One for each example and output."""
    y = x @ model["first"]
    for each in model["layers"]:
        y = layer_of(y, each)
    y = y @ model["turned"] @ model["last"] * model["scale"][None]
    return jnp.abs((y * model["phase"][None]) @ model["out"].astype(model["phase"].dtype) - x[:, :4]) ** 2


def mean(model, x, mask):
    return jnp.mean(errors(model, x))


def masked(model, x, mask):
    return jnp.sum(errors(model, x) * mask) / jnp.sum(mask)


def summed(model, x, mask):
    return jnp.sum(errors(model, x))


def contrastive(model, x, mask):
    found = errors(model, x)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(found @ found.T)))


def of_statistics(model, x, mask):
    found = errors(model, x)
    return jnp.mean(jnp.abs((found - found.mean(0)[None]) / jnp.sqrt(found.var(0) + 0.1)[None]))


def of_classes(model, x, weights):
    """Weights of classes, as many as examples, which are no examples."""
    return jnp.mean(errors(model, x) * weights[jnp.argmax(x, 1)])


def dropout(model, x, key):
    return jnp.mean(errors(model, x * jax.random.bernoulli(key, 0.5, x.shape)))


BATCH = (X, MASK)
BATCHES = {of_classes: (X, np.arange(16.0)[:, None]), dropout: (X, jax.random.key(3))}
LOSSES = (mean, masked, summed, contrastive, of_statistics, of_classes, dropout)


class Way(NamedTuple):
    """How parameters lie."""

    form: Any
    rules: Any
    mesh: Any
    options: dict = {}


SMALL = {"**.b": "whole"}
WAYS = {
    "tree": Way("tree", {"**": "split"}, mesh_of(8)),
    "tree, some whole": Way("tree", {"layers.1": "whole", **SMALL, "**": "split"}, mesh_of(8, EXPLICIT)),
    "tree, two axes": Way(
        "tree", {"layers.*.w": P(None, "model"), "out": P("data"), "**": "whole"}, two_axes(("data", "model"))
    ),
    "vector": Way("vector", {"**": "split"}, mesh_of(8)),
    "vector, explicit": Way("vector", {"**": "split"}, mesh_of(4, EXPLICIT)),
    "stacks": Way("stacks", {"**": "split"}, mesh_of(8, EXPLICIT)),
    "stacks, owned": Way("stacks", {"**": "owned"}, mesh_of(8)),
    "stacks, owned by two": Way("stacks", {"**": "owned"}, mesh_of(2, EXPLICIT)),
    "stacks, one shape in many ways": Way(
        "stacks", {"layers.0": "whole", "layers.*.w": "owned", "**": "split"}, mesh_of(4)
    ),
    "replicas": Way(
        "stacks", {"**": "owned"}, two_axes(("replica", "fsdp")), {"axis": "fsdp", "batch_axis": ("replica", "fsdp")}
    ),
}
MATRICES = {"**": "owned"}
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
RULES = {
    "adam": (ADAM, tuple(WAYS)),
    "momentum": (optax.sgd(0.01, momentum=0.9), ("vector, explicit", "tree")),
    "every second step": (
        optax.MultiSteps(optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0.0, 9)), 2),
        ("stacks, owned", "tree, some whole"),
    ),
    "if finite": (optax.apply_if_finite(optax.adam(1e-2), 3), ("vector", "stacks, one shape in many ways")),
    "prodigy": (optax.contrib.prodigy(1.0), ("stacks", "vector")),
    "muon": (optax.contrib.muon(1e-2), ("stacks, one shape in many ways", "tree", "stacks, owned", "replicas")),
    "adafactor": (optax.adafactor(1e-2, min_dim_size_to_factor=4), ("stacks, owned by two", "stacks", "stacks, owned")),
    "lamb": (optax.lamb(1e-2), ("tree, some whole", "stacks, owned")),
}
OF_LEAVES = ("muon", "adafactor", "lamb")


@functools.cache
def on_one_device(loss, rule, form, pieces):
    """The values and parameters of two steps, of the mean over the pieces x[i::k]."""
    params, rest = tp.partition(model_of(), layout_of(form, rule))

    def of(params, *batch):
        cut = lambda array, i: array[i::pieces] if jnp.ndim(array) else array
        model = tp.combine(params, rest)
        return sum(loss(model, *(cut(array, i) for array in batch)) for i in range(pieces)) / pieces

    after, values = by_optax(of, RULES[rule][0], params, [BATCHES.get(loss, BATCH)] * 2)
    return values, tp.trainables(tp.combine(after[-1], rest), rest.layout)


def trained(loss, rule, way, batch, **options):
    """Two steps over the devices: values and parameters."""
    form, rules, mesh, axes = WAYS[way]
    axes = axes or ({"axis": "data"} if len(mesh.axis_names) > 1 else {})
    tx = RULES[rule][0]
    tx = optim.per_leaf(tx) if form == "stacks" and rule in OF_LEAVES else tx
    plan = sharding.plan(layout_of(form, rule), mesh, rules, form=form, **axes)
    init, step = sharding.make_step(loss, tx, plan, **options)
    (params, state), values = init(model_of()), []
    for _ in range(2):
        params, state, value = step(params, state, *batch)
        values.append(value)
    return values, plan.model(params, state, whole=True), plan


# Each way, loss and rule at least once in each run. What a loss is depends neither on the rule nor on where arrays lie:
# each loss in each way, and each rule in several ways, is left to --long.
USUAL = {
    "tree": (contrastive, "adam", 2),
    "tree, some whole": (masked, "lamb", 1),
    "tree, two axes": (summed, "adam", 1),
    "vector": (contrastive, "if finite", 1),
    "vector, explicit": (mean, "momentum", 1),
    "stacks": (of_classes, "prodigy", 1),
    "stacks, owned": (dropout, "every second step", 1),
    "stacks, owned by two": (masked, "adafactor", 2),
    "stacks, one shape in many ways": (of_statistics, "muon", 1),
    "replicas": (of_statistics, "adam", 1),
}
OTHERS = dict.fromkeys((loss, "adam", way, 1) for loss in LOSSES for way in WAYS)
OTHERS |= dict.fromkeys((mean, rule, way, 1) for rule, (_, ways) in RULES.items() for way in ways)
CASES = {(loss, rule, way, pieces): None for way, (loss, rule, pieces) in USUAL.items()}
ALL = some(CASES | OTHERS, OTHERS.keys() - CASES.keys())


@pytest.mark.parametrize(("loss", "rule", "way", "pieces"), ALL)
def test_any_loss_in_any_form_by_any_rule_of_optax(loss, rule, way, pieces):
    """A loss that is no mean over examples is another one in pieces: the same on any number of devices."""
    traced = []
    with enable_x64(True):
        counted = lambda *args: traced.append(0) or loss(*args)
        values, model, plan = trained(counted, rule, way, BATCHES.get(loss, BATCH), microbatches=pieces)
        want, parameters = on_one_device(loss, rule, WAYS[way].form, pieces)
        tolerance = 1e-6 if rule in OF_LEAVES else 1e-9  # products of matrices, again and again
        np.testing.assert_allclose(values, want, tolerance)
        for path, array in tp.trainables(model, plan.layout).items():
            np.testing.assert_allclose(array, parameters[path], tolerance, 1e-10)
        assert model["first"] is model["last"]
        np.testing.assert_allclose(model["turned"], model["layers"][1]["w"].T)
        np.testing.assert_array_equal(model["scale"], model_of()["scale"])
    assert pieces == 1 or len(traced) == 1  # the loss is traced once


# -- Beside the value --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [pytest.param(1, marks=LONG), 2])
def test_results_beside_the_loss_are_as_it_returns_them(pieces):
    x, mask, model = X.astype("f"), MASK.astype("f"), {"w": jnp.ones((8, 4))}
    of = lambda model, x, mask: (jnp.mean(x @ model["w"]), {"rows": x @ model["w"], "pair": (jnp.sum(mask), 2.0)})
    plan = sharding.plan(model, mesh_of(4), {"**": "split"})
    init, step = sharding.make_step(of, ADAM, plan, has_aux=True, microbatches=pieces)
    _, _, (value, aux) = step(*init(model), x, mask)
    want = [of(model, x[i::pieces], mask[i::pieces]) for i in range(pieces)]
    np.testing.assert_allclose(value, np.mean([each for each, _ in want]), 1e-5)
    want = jax.tree.map(lambda *each: np.stack(each), *(aux for _, aux in want)) if pieces > 1 else want[0][1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), aux, want)


class Normed(eqx.Module):
    """A net with running statistics."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.first, self.norm = eqx.nn.Linear(8, 4, key=key), eqx.nn.BatchNorm(4, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.first(x), state)


def normed(model, state, x, mask):
    y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    return jnp.mean((y - x[:, :4]) ** 2 * mask), state


@pytest.mark.parametrize(("pieces", "mesh"), [pytest.param(1, AUTO, marks=LONG), (2, EXPLICIT)])
def test_the_state_of_a_model_is_that_of_one_device(pieces, mesh):
    """Statistics are of all examples of a piece, over all devices; pieces pass them on in order."""
    model, running = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    plan = sharding.plan(model, mesh_of(4, mesh), {"first.weight": "split", "**": "whole"})
    init, step = sharding.make_step(normed, optax.sgd(0.1), plan, has_state=True, microbatches=pieces)
    params, state = init(model, running)
    x, mask = X.astype("f"), MASK.astype("f")
    (want, rest), total = tp.partition(model), jax.tree.map(jnp.zeros_like, tp.partition(model)[0])
    for i in range(pieces):
        of = lambda params, running=running, i=i: normed(
            tp.combine(params, rest), running, x[i::pieces], mask[i::pieces]
        )
        (_, running), gradient = jax.value_and_grad(of, has_aux=True)(want)
        total = jax.tree.map(jnp.add, total, gradient)
    params, state, _ = step(params, state, x, mask)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), state.model_state, running)
    want = jax.tree.map(lambda leaf, each: leaf - 0.1 * each / pieces, want, total)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), params, want)


def test_a_loss_computes_in_the_dtype_that_it_is_told():
    """Frozen parameters too; parameters rest, and gradients are summed over pieces, in their own dtype."""
    seen = []

    def loss(model, x):
        seen.append({path: str(leaf.dtype) for path, leaf in tp.trainables(model).items()})
        return jnp.mean((x.astype(model["w"].dtype) @ model["w"] @ model["frozen"] + model["b"][None]) ** 2)

    draw = np.random.default_rng(4)
    model = {"b": jnp.ones(8), "frozen": jnp.asarray(draw.normal(size=(8, 8)).astype("f")), "w": jnp.ones((8, 8))}
    narrow = {"b": jnp.float32, "**": jnp.bfloat16}
    for form, pieces in (("tree", 1), ("stacks", 2)):
        plan = sharding.plan(tp.layout(model, freeze="frozen"), mesh_of(4), {"**": "split"}, form=form)
        init, step = sharding.make_step(loss, optax.sgd(0.1), plan, compute_dtype=narrow, microbatches=pieces)
        params, state, _ = step(*init(model), X.astype("f"))
        assert seen[-1] == {"b": "float32", "frozen": "bfloat16", "w": "bfloat16"}
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}
        gradient = jax.grad(loss)(model, X.astype("f"))["w"]
        step_taken = (np.asarray(model["w"]) - plan.model(params, state, whole=True)["w"]) / 0.1
        np.testing.assert_allclose(step_taken, gradient, 5e-2, 5e-2)
