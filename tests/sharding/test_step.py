"""One step over many devices is that of one device, with every rule in every form that takes it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeparams as tp
from treeparams import optim, sharding
from treeparams._forms.makers import tree_of
from treeparams.sharding._call import Setup
from treeparams.sharding._compute import Compute
from treeparams.sharding._gradient import value_and_gradient
from treeparams.sharding._loss import Loss
from treeparams.sharding._plan import placement_of
from treeparams.sharding._update import Update

from ..long import LONG, some
from ..nets import (
    ADAM,
    AUTO,
    BATCH,
    EXPLICIT,
    LAYOUT,
    MIXED,
    OF_MATRICES,
    RULES,
    SPLIT,
    X,
    Y,
    loss,
    mesh_of,
    model_of,
    started,
    two_axes,
)
from ..zoo import enable_x64, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")
AXES = {"axis": "fsdp", "batch_axis": ("replica", "fsdp")}


def batches(name, dtype, count):
    """A number that is none, in what one device has of one batch."""
    bad = np.where(np.arange(16)[:, None] == 13, np.nan, X)
    return [
        (jnp.asarray(bad if name == "if finite" and i == 2 else X, dtype), jnp.asarray(Y, dtype)) for i in range(count)
    ]


@functools.cache
def on_one_device(name, dtype, count):
    params, rest = tp.partition(model_of(dtype), layout_of(dtype))
    tx, average = RULES[name], tp.Ema(params, decay=0.9)

    @jax.jit
    def step(params, state, average, x, y):
        value, gradient = jax.value_and_grad(lambda params: loss(tp.combine(params, rest), x, y))(params)
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, average.update(params), value

    state, values = tx.init(params), []
    for batch in batches(name, dtype, count):
        params, state, average, value = step(params, state, average, *batch)
        values.append(value)
    return tp.combine(params, rest), tp.combine(average.average, rest), values


def layout_of(dtype):
    return tp.layout(model_of(dtype), freeze="scale")


class Case(NamedTuple):
    rule: str
    form: str
    rules: dict
    mesh: object
    split: str = "gradients"
    axes: dict = {}


# Each rule in one form that divides it or more, each form with what counts, what clips and what skips.
CASES = [
    Case("clip by Optax", "tree", SPLIT, mesh_of(4)),
    *[Case(name, "vector", SPLIT, mesh_of(4, EXPLICIT)) for name in ("clip", "every second step")],
    *[Case(name, "stacks", MIXED, mesh_of(4, EXPLICIT)) for name in ("if finite", "muon")],
    Case("clip", "tree", SPLIT, mesh_of(2, EXPLICIT), "state"),
    Case("adafactor", "stacks", MIXED, mesh_of(2), "state"),
    Case("momentum", "stacks", {"layers.*.b": "whole", **MIXED}, mesh_of(8, EXPLICIT)),
    Case("adam", "vector", SPLIT, two_axes(("replica", "fsdp"), EXPLICIT), "gradients", AXES),
    Case("momentum", "stacks", MIXED, two_axes(("replica", "fsdp")), "state", AXES),
    Case("sgd", "tree", {"embed": P(("replica", "fsdp")), **SPLIT}, two_axes(("replica", "fsdp")), "gradients", AXES),
]
LONG_CASES = [
    Case("sgd", "vector", SPLIT, mesh_of(4, EXPLICIT)),
    *[Case(name, "stacks", MIXED, mesh_of(4, EXPLICIT)) for name in ("clip", "lamb")],
    Case("momentum", "vector", SPLIT, mesh_of(1, EXPLICIT)),
    Case("adam", "vector", {"**": "whole"}, mesh_of(2)),
    Case("adafactor", "tree", {"**": "whole"}, mesh_of(4)),
    Case("every second step", "tree", SPLIT, mesh_of(4)),
]


def name_of(case):
    kind = "explicit" if case.mesh.axis_types[0] == EXPLICIT else "automatic"
    return f"{case.rule}, {case.form} {next(iter(case.rules.values()))}, {case.mesh.size} {kind}, {case.split}"


def assert_near(got, want, tolerance):
    """Of the parameters of two models."""
    arrays = [tp.partition(model)[0] for model in (got, want)]
    assert len(jax.tree.leaves(arrays[0])) == 15
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance), *arrays)


def check(case, dtype, count, tolerance):
    tx = RULES[case.rule]
    if case.rule in OF_MATRICES and case.form == "stacks":
        tx = optim.per_leaf(tx)
    model = model_of(dtype)
    plan = sharding.plan(layout_of(dtype), case.mesh, case.rules, form=case.form, **case.axes)
    init, step = sharding.make_step(loss, tx, plan, loss_is="mean", split=case.split, average=0.9)
    params, state = init(model)
    want, averaged, values = on_one_device(case.rule, dtype, count)
    step = step.lower(params, state, *batches("", dtype, 1)[0]).compile()
    for batch, expected in zip(batches(case.rule, dtype, count), values, strict=True):
        params, state, value = step(params, state, *batch)
        np.testing.assert_allclose(value, expected, tolerance)
    assert_near(plan.model(params, state), want, tolerance)
    assert_near(plan.model(state.average.average, state), averaged, tolerance)
    return plan, step, params, state


@pytest.mark.parametrize("case", some([*CASES, *LONG_CASES], LONG_CASES), ids=name_of)
def test_equal_to_one_device(case):
    with enable_x64(True):
        plan, step, params, state = check(case, jnp.float64, 4, 1e-10)
        # A device holds its part, but for what a rule keeps and never reads.
        of_one = lambda tree: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        held = of_one((params, state)) + (X.nbytes + Y.nbytes) // case.mesh.size
        assert step.memory_analysis().argument_size_in_bytes == pytest.approx(held, abs=200)
        if case.rules is SPLIT:
            assert of_one(params) == 256 * 8 // plan.mesh.shape.get("fsdp", plan.mesh.size)
    if case.split == "gradients" and "replica" not in case.mesh.axis_names:
        scalars, frozen = 100, 16 * 8
        assert sharding.collectives(step).bytes <= 2 * 256 * 8 + frozen + scalars


@pytest.mark.long
def test_equal_to_one_device_in_float32_over_twenty_steps():
    check(Case("adam", "vector", SPLIT, mesh_of(8)), jnp.float32, 20, 1e-5)


# -- Its parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "rules", "kind", "split", "pieces"),
    [
        ("tree", SPLIT, AUTO, "state", 2),
        ("vector", SPLIT, EXPLICIT, "gradients", 1),
        ("stacks", MIXED, EXPLICIT, "gradients", 1),
    ],
)
def test_the_gradient_by_itself(form, rules, kind, split, pieces):
    model = model_of()
    plan = sharding.plan(LAYOUT, mesh_of(4, kind), rules, form=form)
    params, rest = plan.ravel(model), tp.partition(plan.put(model), LAYOUT)[1]
    want, gradient = tp.value_and_grad(loss, LAYOUT)(model, *BATCH)
    mean = Loss(loss, None, is_mean=True, takes_form=False, has_aux=False, has_state=False)
    placement = placement_of(plan)
    compute = Compute.of(placement.layout, placement.form, None, None)
    of_loss = functools.partial(value_and_gradient, Setup(placement, mean, split, pieces, compute))
    got, found, _, _ = jax.jit(of_loss)(params, rest, None, BATCH)
    np.testing.assert_allclose(got, want, 1e-5)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(plan.params), strict=True)
    assert all(leaf.sharding.is_equivalent_to(to, leaf.ndim) for leaf, to in pairs)
    assert_near(
        plan.model(found, sharding.StepState(None, None, rest, {placement.layout.digest: 0})),
        tp.combine(gradient, tp.partition(model, LAYOUT)[1]),
        1e-5,
    )


def test_the_update_by_itself():
    """Of a rule and an average, in JAX's convention of complex gradients."""
    params = {"a": jnp.array([1 + 2j], jnp.complex64), "b": jnp.ones(2)}
    gradients = {"a": jnp.array([3 + 4j], jnp.complex64), "b": jnp.full(2, 2.0)}
    layout = tp.layout(params)
    update = Update.of(optax.sgd(0.5), layout, tree_of(layout), 0.75)
    state, average = update.start(params)
    found, state, average = update.step(params, gradients, state, average, jnp.zeros(()))
    np.testing.assert_allclose(found["a"], [-0.5 + 4j])
    np.testing.assert_allclose(found["b"], [0, 0])
    np.testing.assert_allclose(average.average["b"], [0.75, 0.75])
    assert Update.of(optax.sgd(0.5), layout, tree_of(layout)).start(params)[1] is None


@pytest.mark.parametrize("form", ["tree", "vector", "stacks"])
def test_factors_by_name_in_every_form(form):
    tx = optax.chain(optim.scaled({"layers.0": 0.25, "**.w": 2.0}), optax.sgd(0.1))
    _, step, params, state = started(tx, {"**": "whole"}, form)
    params, _, _ = step(params, state, *BATCH)
    model, at_once = model_of(), optim.trainable(tx, LAYOUT)
    want, _ = optim.step(at_once, tp.grad(loss, LAYOUT)(model, *BATCH), at_once.init(model), model)
    plan = sharding.plan(LAYOUT, mesh_of(), {"**": "whole"}, form=form)
    for got, wanted in zip(placement_of(plan).form.read(params), tp.trainables(want, LAYOUT).values(), strict=True):
        np.testing.assert_allclose(got, wanted, 1e-5, 1e-6)
    with pytest.raises(ValueError, match=r"'layer.0' selects nothing; nearest: 'layers"):
        sharding.make_step(loss, optim.scaled({"layer.0": 0.25}), plan)
    if form == "tree":
        with pytest.raises(ValueError, match=r"'layer.0' selects nothing; nearest: 'layers"):
            sharding.make_step(loss, optim.groups({"layer.0": optax.sgd(0.1)}, default=tx), plan)


# -- Models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_tensor_parallelism_beside_it(kind):
    rules = {"layers.*.w": P(None, "model"), "layers.*.u": P("model"), "layers.*.b": P("model"), **SPLIT}
    plan = sharding.plan(LAYOUT, two_axes(("data", "model"), kind), rules, axis="data")
    init, step = sharding.make_step(loss, RULES["momentum"], plan)
    params, state = init(model_of())
    for _ in range(4):
        params, state, value = step(params, state, *BATCH)
    assert params["layers"][0]["w"].addressable_shards[0].data.shape == (4, 2)
    want, _, values = on_one_device("momentum", jnp.float32, 4)
    np.testing.assert_allclose(value, values[-1], 1e-5)
    assert_near(plan.model(params, state), want, 1e-5)


@pytest.mark.parametrize(
    ("form", "rules"),
    [
        pytest.param("tree", {"b": "whole", **SPLIT}, marks=LONG),
        ("vector", SPLIT),
        ("stacks", {"b": "whole", **SPLIT}),
    ],
)
def test_complex_tied_and_narrow_parameters(form, rules):
    model = {
        "b": ramp(3, dtype=jnp.bfloat16),
        "decode": jnp.zeros((4, 8), jnp.complex64),
        "encode": ramp(8, 4, dtype=jnp.complex64) * (0.1 + 0.2j),
        "same": ramp(8),
    }
    model |= {"again": model["same"]}
    layout = tp.layout(model, ties={"decode": ("encode", jnp.transpose)})
    model = tp.tie(model, layout)

    def of(model, x):
        y = (x * model["same"][None]).astype(jnp.complex64) @ model["encode"] @ model["decode"] * (1 + 1j)
        return jnp.mean(jnp.abs(y - model["again"][None]) ** 2) + jnp.sum(model["b"].astype(jnp.float32) ** 2)

    x = X[:, :8].astype(np.float32)
    tx = optim.trainable(RULES["momentum"], layout)
    want, state = model, tx.init(model)
    plan, step, params, over = started(RULES["momentum"], rules, form, of=of, model=model, layout=layout)

    @tp.jit
    def on_one(want, state):
        value, gradient = tp.value_and_grad(of, layout)(want, x)
        return *optim.step(tx, gradient, state, want), value

    for _ in range(3):
        want, state, value = on_one(want, state)
        params, over, got = step(params, over, x)
        np.testing.assert_allclose(got, value, 1e-5)
    back = plan.model(params, over)
    assert back["again"] is back["same"]
    for name, tolerance in {"b": 1e-2, "decode": 1e-5, "encode": 1e-5, "same": 1e-5}.items():
        assert back[name].dtype == model[name].dtype
        wide = np.complex128 if name.endswith("code") else np.float64
        np.testing.assert_allclose(np.asarray(back[name]).astype(wide), np.asarray(want[name]).astype(wide), tolerance)


def test_groups_of_stacks_have_rules_of_their_own():
    of_stacks = optim.groups({"owned": optim.per_leaf(RULES["momentum"]), "whole": ADAM})
    plan, step, params, state = started(of_stacks, MIXED, "stacks")
    tx = optim.groups({"layers": RULES["momentum"]}, default=ADAM)
    want, rest = tp.partition(model_of(), LAYOUT)
    before = tx.init(want)

    @jax.jit
    def on_one(want, before):
        gradient = jax.grad(lambda params: loss(tp.combine(params, rest), *BATCH))(want)
        updates, before = tx.update(gradient, before, want)
        return optax.apply_updates(want, updates), before

    for _ in range(3):
        want, before = on_one(want, before)
        params, state, _ = step(params, state, *BATCH)
    assert_near(plan.model(params, state), tp.combine(want, rest), 1e-5)
