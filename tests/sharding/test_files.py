"""Training goes on from a file over any number of devices, whatever the rules: 8 -> 4 -> 1 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving, sharding

from ..long import some
from ..nets import AUTO, EXPLICIT, by_optax, mesh_of
from ..zoo import enable_x64

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.timeout(200)]


def model_of():
    draw = np.random.default_rng(0)
    matrix = lambda *shape: jnp.asarray(draw.normal(size=shape) * 0.4)
    shared, layers = matrix(16, 8), [{"b": matrix(8), "w": matrix(8, 8)} for _ in range(3)]
    model = {"e": shared, "f": matrix(8, 8), "h": shared, "l": layers, "o": matrix(8, 5)}
    return model | {"key": jax.random.key(1), "n": 3}


def loss(model, x, y):
    h = x @ model["e"]
    for each in model["l"]:
        h = jnp.tanh(h @ each["w"] + each["b"][None])
    h = h + h @ model["f"] + (h @ model["o"]).sum(-1, keepdims=True)
    return jnp.mean((h @ model["h"].T - y) ** 2)


BATCHES = [np.random.default_rng(k).normal(size=(2, 16, 16)) for k in range(3)]
SCHEDULED = optax.adam(optax.linear_schedule(1e-2, 1e-3, 8))
CLIPPED = optax.chain(optim.clip_by_global_norm(0.5), optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation())
MUON, FACTORED = optax.contrib.muon(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=4)
SPLIT, SMALL = {"**": "split"}, {"o": "whole", "**": "split"}
MANY = {"l.0": "whole", "l.*.w": "owned", "**": "split"}
TOLERANCES = (1e-10, 1e-10), (1e-6, 1e-6)
CASES = {  # form, rule, rules on 8, 4 and 1 devices
    "tree": ("tree", SCHEDULED, SMALL, SPLIT, None),
    "vector": ("vector", CLIPPED, SPLIT, {"**": "whole"}, SPLIT),
    "owned": ("stacks", MUON, {"**": "owned"}, SPLIT, None),
    "factored": ("stacks", FACTORED, {"l.*.w": "owned", "**": "whole"}, {"**": "owned"}, None),
    "one shape in many ways": ("stacks", FACTORED, MANY, {"l.1": "split", "**": "whole"}, {"**": "owned"}),
}


def on_one_device(tx):
    params, rest = tp.partition(model_of(), tp.layout(model_of(), freeze="f"))
    after, _ = by_optax(lambda params, *batch: loss(tp.combine(params, rest), *batch), tx, params, BATCHES)
    average = params
    for new in after:
        average = jax.tree.map(lambda old, new: old + 0.1 * (new - old), average, new)
    return after[-1], average


@pytest.mark.parametrize("name", some(CASES, ["owned", "factored"]))
def test_training_goes_on_over_other_devices(name, tmp_path):
    form, tx, *rules = CASES[name]
    path = tmp_path / "run.safetensors"
    with enable_x64(True):
        layout = tp.layout(model_of(), freeze="f")
        rule = optim.per_leaf(tx) if tx in (MUON, FACTORED) else tx
        for k, (devices, its) in enumerate(zip((8, 4, 1), rules, strict=True)):
            plan = sharding.plan(layout, mesh_of(devices, (AUTO, EXPLICIT)[k % 2]), its, form=form)
            init, step = sharding.make_step(loss, rule, plan, average=0.9)
            params, state = init(model_of())
            if k:
                params, state = step.from_file(*saving.load(path, step.to_file(params, state)))
            params, state, _ = step(params, state, *BATCHES[k])
            saving.save(path, step.to_file(params, state))
        model, averaged = plan.model(params, state), plan.model(state.average.average, state)
        near = lambda a, b: np.testing.assert_allclose(a, b, *TOLERANCES[tx in (MUON, FACTORED)])
        for found, want in zip((model, averaged), on_one_device(tx), strict=True):
            jax.tree.map(near, tp.partition(found, layout)[0], want)
        assert model["e"] is model["h"]


def test_where_a_file_needs_no_other_form_it_is_the_arrays_themselves():
    plan = sharding.plan(tp.layout(model_of(), freeze="f"), mesh_of(8), {"**": "owned"}, form="stacks")
    init, step = sharding.make_step(loss, SCHEDULED, plan)
    params, state = init(model_of())
    assert step.to_file(params, state) == (params, state)
    assert set(params) == set(tp.stack(model_of(), "!f")[0])


def test_a_vector_over_three_devices_goes_to_four(tmp_path):
    layout = tp.layout(model_of(), freeze="f")
    loaded = None
    for devices in (3, 4):
        plan = sharding.plan(layout, mesh_of(devices), {"f": "whole", **SPLIT}, form="vector")
        init, step = sharding.make_step(loss, SCHEDULED, plan, average=0.9)
        params, state = init(model_of())
        if loaded is not None:
            params, state = step.from_file(*saving.load(tmp_path / "run", step.to_file(params, state)))
            assert int(state.rule[0].count) == 1
            jax.tree.map(np.testing.assert_array_equal, tp.partition(plan.model(params, state), layout)[0], loaded)
        batch = [each[:12] for each in BATCHES[0]]
        params, state, _ = step(params, state, *batch)
        loaded = tp.partition(plan.model(params, state), layout)[0]
        saving.save(tmp_path / "run", step.to_file(params, state))
