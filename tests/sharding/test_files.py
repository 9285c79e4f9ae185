"""Training goes on from a file over any number of devices, whatever the rules."""

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
from .test_laws import errors, layout_of, model_of

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.timeout(200)]


def loss(model, x):
    return jnp.mean(errors(model, x))


BATCHES = [np.random.default_rng(k).normal(size=(24, 8)) for k in range(3)]
SCHEDULED = optax.adam(optax.linear_schedule(1e-2, 1e-3, 8))
CLIPPED = optax.chain(optim.clip_by_global_norm(0.5), optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation())
MUON, FACTORED = optax.contrib.muon(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=4)
SPLIT, SMALL = {"**": "split"}, {"out": "whole", "**": "split"}
MANY = {"layers.0": "whole", "layers.*.w": "owned", "**": "split"}
OTHERS = {"layers.1": "split", "layers.*.w": "owned", "**": "whole"}
TOLERANCES = (1e-10, 1e-10), (1e-6, 1e-6)
CASES = {  # form, rule, rules by numbers of devices; three pad a vector in another way than eight
    "tree": ("tree", SCHEDULED, {8: SMALL, 1: None}),
    "vector": ("vector", CLIPPED, {3: {("scale", "phase"): "whole", **SPLIT}, 8: SPLIT}),
    "one shape in many ways": ("stacks", FACTORED, {8: MANY, 4: OTHERS}),
    "owned": ("stacks", MUON, {8: {"**": "owned"}, 4: SPLIT, 1: None}),
}


def on_one_device(tx, layout, steps):
    params, rest = tp.partition(model_of(), layout)
    batches = [(x,) for x in BATCHES[:steps]]
    after, _ = by_optax(lambda params, x: loss(tp.combine(params, rest), x), tx, params, batches)
    average = params
    for new in after:
        average = jax.tree.map(lambda old, new: old + 0.1 * (new - old), average, new)
    return after[-1], average


@pytest.mark.parametrize("name", some(CASES, ["owned"]))
def test_training_goes_on_over_other_devices(name, tmp_path):
    form, tx, rules = CASES[name]
    path = tmp_path / "run.safetensors"
    with enable_x64(True):
        layout = layout_of("vector", "")  # without complex parameters
        rule = optim.per_leaf(tx) if tx in (MUON, FACTORED) else tx
        trained = lambda tree: tp.partition(tree, layout)[0]
        before = None
        for k, (devices, its) in enumerate(rules.items()):
            plan = sharding.plan(layout, mesh_of(devices, (AUTO, EXPLICIT)[k % 2]), its, form=form)
            init, step = sharding.make_step(loss, rule, plan, average=0.9)
            params, state = init(model_of())
            if k:  # from a file, bit for bit
                params, state = step.from_file(*saving.load(path, step.to_file(params, state)))
                jax.tree.map(np.testing.assert_array_equal, trained(plan.model(params, state)), before)
            params, state, _ = step(params, state, BATCHES[k])
            saving.save(path, step.to_file(params, state))
            model = plan.model(params, state)
            before = trained(model)
        averaged = plan.model(state.average.average, state)
        near = lambda a, b: np.testing.assert_allclose(a, b, *TOLERANCES[tx in (MUON, FACTORED)])
        for found, want in zip((model, averaged), on_one_device(tx, layout, len(rules)), strict=True):
            jax.tree.map(near, trained(found), want)
        assert model["first"] is model["last"]


def test_where_a_file_needs_no_other_form_it_is_the_arrays_themselves():
    with enable_x64(True):
        plan = sharding.plan(layout_of("vector", ""), mesh_of(8), {"**": "owned"}, form="stacks")
        init, step = sharding.make_step(loss, SCHEDULED, plan)
        params, state = init(model_of())
        assert set(params) == set(tp.stack(model_of(), plan.layout)[0])
    assert step.to_file(params, state) == (params, state)
    rules = {("scale", "phase"): "whole", **SPLIT}
    vectors = [sharding.plan(plan.layout, mesh_of(count), rules, form="vector") for count in (3, 8)]
    assert [each.shapes().size for each in vectors] == [384, 256]  # over three devices it needs one
