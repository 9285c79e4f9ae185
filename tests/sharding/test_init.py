"""A model made under `jax.jit`, and what a state says of its layout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeparams as tp
from treeparams import saving, sharding

from ..nets import ADAM, AUTO, BATCH, EXPLICIT, SPLIT, loss, mesh_of, model_of

pytestmark = pytest.mark.usefixtures("standard_promotion")


def make(seed):
    """A tied net of 16 layers; some arrays are no multiples of the devices. Drawn by integers, which compile fast."""
    draw = lambda i: ((jax.lax.iota(jnp.int32, 4096) * (2 * i + 3) + seed) % 1009).astype(jnp.float32).reshape(64, 64)
    layers = [{"b": jnp.full(3, i, jnp.float32), "w": draw(i)} for i in range(16)]
    embed = draw(16)
    return {"embed": embed, "head": embed, "layers": layers, "odd": jnp.arange(7.0)}


LAYOUT = tp.layout(jax.eval_shape(make, 0), ties={"head": "embed"})
SMALL = {"odd": "whole", "layers.*.b": "whole"}
CASES = {
    "tree": ("tree", SMALL | SPLIT, AUTO),
    "vector": ("vector", SPLIT, EXPLICIT),
    "stacks, owned": ("stacks", SMALL | {"embed": "split", "layers.[0-7].w": "split", "**": "owned"}, EXPLICIT),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_made_under_jit_is_never_whole_on_a_device(name):
    form, rules, kind = CASES[name]
    plan = sharding.plan(LAYOUT, mesh_of(8, kind), rules, form=form)
    init, _ = sharding.make_step(lambda model, x: jnp.mean(x) * jnp.sum(model["odd"]), optax.sgd(0.1, 0.9), plan)
    seed = jnp.int32(5)
    compiled = jax.jit(lambda seed: init(make(seed))).lower(seed).compile()
    largest = max(slot.size for slot in LAYOUT.slots) * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * LAYOUT.nbytes / 8 + 2 * largest
    got, want = compiled(seed), init(jax.jit(make)(seed))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(a, b)


def test_a_plan_of_this_device():
    plan = sharding.plan(model_of())
    assert (plan.mesh.size, plan.batch.spec, len(plan.replicated)) == (1, P("data"), 15)
    assert plan.mesh.devices.item() == jnp.zeros(()).device
    assert "no rules were given, so all parameters are whole on each device" in repr(plan)
    init, step = sharding.make_step(loss, ADAM, sharding.plan(model_of(), None, SPLIT, form="vector"))
    want = jax.jit(lambda *batch: loss(model_of(), *batch))(*BATCH)
    np.testing.assert_allclose(step(*init(model_of()), *BATCH)[2], want, 1e-5)


# -- The digest --------------------------------------------------------------------------------------------------------


def classes(count):
    """A step, parameters and state of a classifier: a vector, padded to one length for 10 and for 11 classes."""
    model = {"b": jnp.zeros(count), "w": jnp.ones((4, count))}
    plan = sharding.plan(model, form="vector")
    init, step = sharding.make_step(lambda model, x: jnp.mean(x @ model["w"] + model["b"][None]), ADAM, plan)
    return plan, step, *init(model)


def test_a_state_of_another_layout_is_refused_everywhere(tmp_path):
    import orbax.checkpoint

    _, _, params, state = classes(10)
    plan, step, others, other = classes(11)
    (digest,), (wanted,) = state.layout, other.layout
    assert params.shape == others.shape
    message = rf"(?s)its digest is '{digest}', the plan's is '{wanted}'"
    for use in (lambda: step(params, state, jnp.ones((2, 4))), lambda: plan.model(params, state)):
        with pytest.raises(ValueError, match=message):
            use()
    run, like = ({"params": each, "state": its} for each, its in ((params, state), (others, other)))
    saving.save(tmp_path / "file", run)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", run)
        checkpointer.wait_until_finished()
        for load, name in ((saving.load, "file"), (checkpointer.restore, "run")):
            with pytest.raises(ValueError, match=digest) as caught:
                load(tmp_path / name, like)
            assert wanted in str(caught.value)
    assert jax.tree.structure(saving.load(tmp_path / "file", run)) == jax.tree.structure(run)


# -- Shapes, and batches ----------------------------------------------------------------------------------------------


def test_shapes_do_not_tell_ties_and_a_plan_of_them_says_so():
    said = "made from shapes, which do not show ties"
    assert said in repr(sharding.plan(jax.eval_shape(make, 0))).splitlines()[-1]
    assert said not in repr(sharding.plan(make(0)))


def test_batches_of_all_kinds_are_one_program():
    plan = sharding.plan(model_of(), mesh_of(4), {"**": "whole"})
    traced = []
    init, step = sharding.make_step(lambda *args: traced.append(0) or loss(*args), optax.sgd(0.1), plan)
    params, state = init(model_of())
    on_first = lambda array: jax.device_put(array, jax.devices()[0])
    kinds = [lambda array: array, jnp.asarray, on_first, lambda array: jax.device_put(array, plan.batch)]
    params, state, _ = step(params, state, *BATCH)
    for put in kinds:
        params, state, _ = step(params, state, *map(put, BATCH))
    assert len(traced) == 1
    assert step._compiled._cache_size() == 1
