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

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.timeout(200)]


def model_of():
    draw = np.random.default_rng(0)
    matrix = lambda *shape: jnp.asarray(draw.normal(size=shape) * 0.4)
    shared, layers = matrix(16, 8), [{"b": matrix(8), "w": matrix(8, 8)} for _ in range(3)]
    model = {"e": shared, "f": matrix(8, 8), "h": shared, "l": layers, "o": matrix(8, 6)}
    return model | {"key": jax.random.key(1), "n": 3}


def loss(model, x, y):
    h = x @ model["e"]
    for each in model["l"]:
        h = jnp.tanh(h @ each["w"] + each["b"][None])
    h = h + h @ model["f"] + (h @ model["o"]).sum(-1, keepdims=True)
    return jnp.mean((h @ model["h"].T - y) ** 2)


BATCHES = [np.random.default_rng(k).normal(size=(2, 24, 16)) for k in range(3)]
SCHEDULED = optax.adam(optax.linear_schedule(1e-2, 1e-3, 8))
CLIPPED = optax.chain(optim.clip_by_global_norm(0.5), optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation())
MUON, FACTORED = optax.contrib.muon(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=4)
SPLIT, SMALL = {"**": "split"}, {"o": "whole", "**": "split"}
# Of the layers' matrices two are owned: rows of one shape that four or eight devices do not divide.
MANY = {"l.0": "whole", "l.*.w": "owned", "**": "split"}
OTHERS = {"l.1": "split", "l.*.w": "owned", "**": "whole"}
TOLERANCES = (1e-10, 1e-10), (1e-6, 1e-6)
CASES = {  # form, rule, rules by numbers of devices; three pad a vector in another way than eight
    "tree": ("tree", SCHEDULED, {8: SMALL, 1: None}),
    "vector": ("vector", CLIPPED, {3: {"f": "whole", **SPLIT}, 8: SPLIT}),
    "one shape in many ways": ("stacks", FACTORED, {8: MANY, 4: OTHERS}),
    "tree, thrice": ("tree", SCHEDULED, {8: SMALL, 4: SPLIT, 1: None}),
    "vector, thrice": ("vector", CLIPPED, {8: SPLIT, 4: {"**": "whole"}, 1: SPLIT}),
    "owned": ("stacks", MUON, {8: {"**": "owned"}, 4: SPLIT, 1: None}),
    "factored": ("stacks", FACTORED, {8: {"l.*.w": "owned", "**": "whole"}, 4: {"**": "owned"}, 1: None}),
}


def on_one_device(tx, steps):
    params, rest = tp.partition(model_of(), tp.layout(model_of(), freeze="f"))
    after, _ = by_optax(lambda params, *batch: loss(tp.combine(params, rest), *batch), tx, params, BATCHES[:steps])
    average = params
    for new in after:
        average = jax.tree.map(lambda old, new: old + 0.1 * (new - old), average, new)
    return after[-1], average


@pytest.mark.parametrize("name", some(CASES, ["tree, thrice", "vector, thrice", "owned", "factored"]))
def test_training_goes_on_over_other_devices(name, tmp_path):
    form, tx, rules = CASES[name]
    path = tmp_path / "run.safetensors"
    with enable_x64(True):
        layout = tp.layout(model_of(), freeze="f")
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
            params, state, _ = step(params, state, *BATCHES[k])
            saving.save(path, step.to_file(params, state))
            model = plan.model(params, state)
            before = trained(model)
        averaged = plan.model(state.average.average, state)
        near = lambda a, b: np.testing.assert_allclose(a, b, *TOLERANCES[tx in (MUON, FACTORED)])
        for found, want in zip((model, averaged), on_one_device(tx, len(rules)), strict=True):
            jax.tree.map(near, trained(found), want)
        assert model["e"] is model["h"]


def test_where_a_file_needs_no_other_form_it_is_the_arrays_themselves():
    plan = sharding.plan(tp.layout(model_of(), freeze="f"), mesh_of(8), {"**": "owned"}, form="stacks")
    init, step = sharding.make_step(loss, SCHEDULED, plan)
    params, state = init(model_of())
    assert step.to_file(params, state) == (params, state)
    assert set(params) == set(tp.stack(model_of(), "!f")[0])
    rules = {"f": "whole", **SPLIT}
    vectors = [sharding.plan(plan.layout, mesh_of(count), rules, form="vector") for count in (3, 8)]
    assert [each.shapes().size for each in vectors] == [768, 512]  # over three devices it needs one
