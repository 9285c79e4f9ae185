"""A step over many devices has the numbers of one device: any loss, form, rules, rule of Optax and mesh, in float64."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeparams as tp
from treeparams import optim, sharding

from ..long import some
from ..nets import EXPLICIT, by_optax, mesh_of, two_axes
from ..zoo import enable_x64, filled

pytestmark = pytest.mark.usefixtures("standard_promotion")
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(16, 8))
# Masks of which some devices have much and others little: the mean of their means is another number.
MASK = (DRAW.random((16, 4)) < np.linspace(0.1, 0.9, 16)[:, None]).astype(float)


@functools.cache
def model_of():
    """Layers, a frozen leaf, complex ones, a tie, one by a transpose, and what is no parameter; 240 real ones train."""
    draw = np.random.default_rng(1)
    matrix = lambda *shape: jnp.asarray(draw.normal(size=shape) / 2)
    shared, turned = matrix(8, 8), matrix(8, 8)
    return {
        "f": jnp.tanh,
        "first": shared,
        "key": jax.random.key(1),
        "last": shared,
        "layers": [{"b": matrix(8), "w": matrix(8, 8)}, {"b": matrix(8), "w": turned}],
        "n": 3,
        "name": "net",
        "out": matrix(8, 4),
        "phase": jnp.asarray(np.exp(1j * np.arange(8))),
        "scale": jnp.full(8, 1.5),
        "turned": turned.T,
    }


def layout_of(form, rule):
    """A vector of real and complex parameters would be complex, and most rules are for real ones."""
    frozen = ("scale",) if form != "vector" and rule in ("adam", "momentum") else ("scale", "phase")
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


def contrastive(found):
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(found @ found.T)))


def of_statistics(found):
    return jnp.mean(jnp.abs((found - found.mean(0)[None]) / jnp.sqrt(found.var(0) + 0.1)[None]))


LOSSES = {
    "mean": lambda model, x, mask: jnp.mean(errors(model, x)),
    "masked": lambda model, x, mask: jnp.sum(errors(model, x) * mask) / jnp.sum(mask),
    "summed": lambda model, x, mask: jnp.sum(errors(model, x)),
    "contrastive": lambda model, x, mask: contrastive(errors(model, x)),
    "of statistics": lambda model, x, mask: of_statistics(errors(model, x)),
    # Weights of classes, as many as examples, which are no examples.
    "of classes": lambda model, x, weights: jnp.mean(errors(model, x) * weights[jnp.argmax(x, 1)]),
    "dropout": lambda model, x, key: jnp.mean(errors(model, x * jax.random.bernoulli(key, 0.5, x.shape))),
}
BATCHES = dict.fromkeys(LOSSES, (X, MASK)) | {
    "of classes": (X, np.arange(16.0)[:, None]),
    "dropout": (X, jax.random.key(3)),
}


SPLIT, OWNED = {"**": "split"}, {"**": "owned"}
PARTS = {"layers.*.w": P(None, "model"), "out": P("data"), "**": "whole"}
MANY = {"layers.0": "whole", "layers.*.w": "owned", "**": "split"}
REPLICAS = {"axis": "fsdp", "batch_axis": ("replica", "fsdp")}
WAYS = {  # form, rules, mesh and its axes: how parameters lie
    "tree": ("tree", SPLIT, mesh_of(8), {}),
    "tree, some whole": ("tree", {"layers.1": "whole", "**.b": "whole", **SPLIT}, mesh_of(8, EXPLICIT), {}),
    "tree, two axes": ("tree", PARTS, two_axes(("data", "model")), {"axis": "data"}),
    "vector": ("vector", SPLIT, mesh_of(8), {}),
    "vector, explicit": ("vector", SPLIT, mesh_of(4, EXPLICIT), {}),
    "stacks": ("stacks", SPLIT, mesh_of(8, EXPLICIT), {}),
    "stacks, owned": ("stacks", OWNED, mesh_of(8), {}),
    "stacks, owned by two": ("stacks", OWNED, mesh_of(2, EXPLICIT), {}),
    "stacks, one shape in many ways": ("stacks", MANY, mesh_of(4), {}),
    "replicas": ("stacks", OWNED, two_axes(("replica", "fsdp")), REPLICAS),
}
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
SCHEDULED = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0.0, 9))
RULES = {
    "adam": ADAM,
    "momentum": optax.sgd(0.01, momentum=0.9),
    "every second step": optax.MultiSteps(SCHEDULED, 2),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "prodigy": optax.contrib.prodigy(1.0),
    "muon": optax.contrib.muon(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
}
OF_LEAVES = ("muon", "adafactor", "lamb")


@functools.cache
def on_one_device(loss, rule, form, pieces):
    """The values and parameters of two steps, of the mean over the pieces x[i::k]."""
    params, rest = tp.partition(model_of(), layout_of(form, rule))

    def of(params, *batch):
        cut = lambda array, i: array[i::pieces] if jnp.ndim(array) else array
        model = tp.combine(params, rest)
        return sum(LOSSES[loss](model, *(cut(array, i) for array in batch)) for i in range(pieces)) / pieces

    after, values = by_optax(of, RULES[rule], params, [BATCHES[loss]] * 2)
    return values, tp.trainables(tp.combine(after[-1], rest), rest.layout)


# Each loss and rule at least once in each run, and each way but two that test_files and test_scan have. What a loss is
# depends neither on the rule nor on where arrays lie: each loss, and each rule, in each way are left to --long.
USUAL = {
    "tree": ("contrastive", "adam", 2),
    "tree, some whole": ("masked", "lamb", 1),
    "tree, two axes": ("of classes", "prodigy", 1),
    "vector": ("summed", "if finite", 1),
    "stacks, owned": ("dropout", "every second step", 1),
    "stacks, owned by two": ("masked", "adafactor", 2),
    "stacks, one shape in many ways": ("mean", "muon", 1),
    "replicas": ("of statistics", "momentum", 1),
}
OTHERS = dict.fromkeys((loss, "adam", way, 1) for loss in LOSSES for way in WAYS)
OTHERS |= dict.fromkeys(("mean", rule, way, 1) for rule in RULES for way in ("tree", "stacks, owned"))
CASES = {(loss, rule, way, pieces): None for way, (loss, rule, pieces) in USUAL.items()}
ALL = some(CASES | OTHERS, OTHERS.keys() - CASES.keys())


@pytest.mark.parametrize(("loss", "rule", "way", "pieces"), ALL)
def test_any_loss_in_any_form_by_any_rule_of_optax(loss, rule, way, pieces):
    """A loss that is no mean over examples is another one in pieces: the same on any number of devices."""
    form, rules, mesh, axes = WAYS[way]
    tx, traced = RULES[rule], []
    counted = lambda *args: traced.append(0) or LOSSES[loss](*args)
    with enable_x64(True):
        plan = sharding.plan(layout_of(form, rule), mesh, rules, form=form, **axes)
        tx = optim.per_leaf(tx) if form == "stacks" and rule in OF_LEAVES else tx
        init, step = sharding.make_step(counted, tx, plan, microbatches=pieces)
        params, state = init(model_of())
        values, parameters = on_one_device(loss, rule, form, pieces)
        tolerance = 1e-6 if rule in OF_LEAVES else 1e-9  # products of matrices, again and again
        for want in values:
            params, state, value = step(params, state, *BATCHES[loss])
            np.testing.assert_allclose(value, want, tolerance)
        model = plan.model(params, state, whole=True)
        for path, array in tp.trainables(model, plan.layout).items():
            np.testing.assert_allclose(array, parameters[path], tolerance, 1e-10)
        assert model["first"] is model["last"]
        np.testing.assert_allclose(model["turned"], model["layers"][1]["w"].T)
        np.testing.assert_array_equal(model["scale"], model_of()["scale"])
    assert pieces == 1 or len(traced) == 1  # the loss is traced once


# -- Beside the value --------------------------------------------------------------------------------------------------


def test_results_beside_the_loss_are_as_it_returns_them_of_each_piece():
    x, mask, model = X.astype("f"), MASK.astype("f"), {"w": jnp.ones((8, 4))}
    of = lambda model, x, mask: (jnp.mean(x @ model["w"]), {"rows": x @ model["w"], "pair": (jnp.sum(mask), 2.0)})
    plan = sharding.plan(model, mesh_of(4), {"**": "split"})
    init, step = sharding.make_step(of, ADAM, plan, has_aux=True, microbatches=2)
    _, _, (value, aux) = step(*init(model), x, mask)
    values, want = zip(*(jax.jit(of)(model, x[i::2], mask[i::2]) for i in range(2)), strict=True)
    np.testing.assert_allclose(value, np.mean(values), 1e-5)
    jax.tree.map(lambda a, *each: np.testing.assert_allclose(a, np.stack(each), 1e-5), aux, *want)


def with_statistics():
    return eqx.nn.Sequential([filled(eqx.nn.Linear, 8, 4), eqx.nn.BatchNorm(4, "batch", mode="batch")])


def normed(model, state, x, mask):
    y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    return jnp.mean((y - x[:, :4]) ** 2 * mask), state


def test_the_state_of_a_model_is_that_of_one_device():
    """Statistics are of all examples of a piece, over all devices; pieces pass them on in order."""
    model, running = eqx.nn.make_with_state(with_statistics)()
    plan = sharding.plan(model, mesh_of(4, EXPLICIT), {"layers.0.weight": "split", "**": "whole"})
    init, step = sharding.make_step(normed, optax.sgd(0.1), plan, has_state=True, microbatches=2)
    params, state = init(model, running)
    x, mask = X.astype("f"), MASK.astype("f")
    whole, rest = tp.partition(model)

    @jax.jit
    def on_one_device(params, running):
        new = params
        for i in range(2):
            of = lambda params, running: normed(tp.combine(params, rest), running, x[i::2], mask[i::2])  # noqa: B023
            gradient, running = jax.grad(of, has_aux=True)(params, running)
            new = jax.tree.map(lambda leaf, each: leaf - 0.05 * each, new, gradient)
        return new, running

    want = on_one_device(whole, running)
    params, state, _ = step(params, state, x, mask)
    near = lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6)
    jax.tree.map(near, (params, state.model_state), want)


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
        gradient = jax.jit(jax.grad(loss))(model, X.astype("f"))["w"]
        step_taken = (np.asarray(model["w"]) - plan.model(params, state, whole=True)["w"]) / 0.1
        np.testing.assert_allclose(step_taken, gradient, 5e-2, 5e-2)
