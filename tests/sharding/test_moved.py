"""What one step over many devices moves between them and holds on each, and when it is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import treeparams as tp
from treeparams import optim, sharding

from ..nets import AUTO, BATCH, EXPLICIT, RULES, X, loss, mesh_of, model_of, started
from ..zoo import ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize(("microbatches", "kind"), [(1, AUTO), (2, EXPLICIT)])
def test_a_vector_is_gathered_once_and_reduced_once(microbatches, kind):
    _, step, params, state = started(mesh=mesh_of(4, kind), microbatches=microbatches)
    moved = sharding.collectives(step.lower(params, state, *BATCH).compile())
    assert {row.kind: row.times for row in moved.rows} == {"all-gather": 1, "reduce-scatter": 1}
    assert moved.bytes == 2 * 256 * 4


def test_shares_of_a_vector_that_are_no_whole_lines_are_filled():
    """TPU reduces and scatters rows of 128 numbers, and no vectors; a hundredth more is moved."""
    model = {"w": ramp(103, 128) / 1e4}  # 8 shares of 1,648, which are moved as 1,664
    of = lambda model, x: jnp.mean((x @ model["w"]) ** 2)
    x = ramp(8, 103)
    _, step, params, state = started(optax.sgd(0.1), of=of, model=model, layout=tp.layout(model), mesh=mesh_of(8))
    moved = sharding.collectives(step.lower(params, state, x).compile())
    assert [(row.kind, row.bytes, row.times) for row in moved.rows] == [
        ("all-gather", 8 * 1664 * 4, 1),
        ("reduce-scatter", 8 * 1664 * 4, 1),
    ]
    params, _, _ = step(params, state, x)
    want = model["w"] - 0.1 * jax.grad(of)(model, x)["w"]
    np.testing.assert_allclose(params.reshape(103, 128), want, 1e-5)


def test_stacks_that_are_owned_are_gathered_once_and_reduced_once():
    """Of Muon, with no collective in the update."""
    model = {"layers": [{"u": ramp(4, 8, start=i), "w": ramp(8, 4, start=i)} for i in range(4)]}
    of = lambda model, x: jnp.mean(sum(jnp.tanh(x @ layer["w"] @ layer["u"]) for layer in model["layers"]) ** 2)
    tx = optim.per_leaf(RULES["muon"])
    _, step, params, state = started(tx, {"**": "owned"}, "stacks", of=of, model=model, layout=tp.layout(model))
    moved = sharding.collectives(step.lower(params, state, X[:, :8].astype(np.float32)).compile())
    assert {kind: moved.count(kind) for kind in ("all-gather", "reduce-scatter")} == {
        "all-gather": 2,
        "reduce-scatter": 2,
    }
    assert moved.count() == 4
    assert moved.bytes == 2 * 4 * 64 * 4


def test_microbatches_are_one_batch():
    found = []
    for count in (1, 4):
        _, step, params, state = started(optax.sgd(0.1), microbatches=count)
        params, _, value = step(params, state, *BATCH)
        found.append((params, value))
    for each in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), each, found[0])


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_one_trace_what_is_given_is_donated_and_batches_may_lie_anywhere(kind):
    traces = []
    keys = jax.random.key(0), 2.0

    def of(model, batch, key, scale):
        traces.append(0)
        return loss(model, batch["x"], batch["y"]) * scale * (1 + jax.random.uniform(key))

    mesh = mesh_of(4, kind)
    _, step, params, state = started(optax.sgd(0.1, 0.9), of=of, mesh=mesh, loss_is=None)
    lain = [BATCH, tuple(map(jnp.asarray, BATCH)), jax.device_put(BATCH, NamedSharding(mesh, P("data")))]
    lain += [
        jax.device_put(BATCH, NamedSharding(mesh, P())),
        jax.device_put(BATCH, NamedSharding(mesh, P(None, "data"))),
    ]
    values = []
    for x, y in lain:
        before = (params, state)
        params, state, value = step(params, state, {"x": x, "y": y}, *keys)
        values.append(float(value))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before[0], before[1].rule)))
    assert sorted(values, reverse=True) == values
    count = len(traces)
    for _ in range(2):
        params, state, value = step(params, state, {"x": lain[2][0], "y": lain[2][1]}, *keys)
        value.block_until_ready()
    assert len(traces) == count
    with jax.set_mesh(mesh):
        params, state, value = step(params, state, {"x": lain[0][0], "y": lain[0][1]}, *keys)
    assert float(value) < values[-1]


def test_repeated_calls_share_a_trace():
    traces = []
    of = lambda model, x, y: traces.append(0) or loss(model, x, y)
    _, step, params, state = started(optax.sgd(0.1), of=of, mesh=mesh_of(4, EXPLICIT))
    for _ in range(3):
        params, state, value = step(params, state, *BATCH)
        value.block_until_ready()  # many at once would wait for one another on few cores
    assert len(traces) == 2  # to see what it returns, and with its gradient


def test_ahead_of_time_from_shapes():
    shapes = jax.eval_shape(lambda: {k: v for k, v in model_of().items() if k not in ("f", "name")})
    of = lambda model, x, y: loss(model | {"f": jnp.tanh}, x, y)
    _, step, params, state = started(of=of, model=shapes, layout=tp.layout(shapes, freeze="scale"))
    assert isinstance(params, jax.ShapeDtypeStruct)
    found = sharding.ahead(step, params, state, *BATCH)
    assert found.parameters == 256
    assert found.moved.count() == 2


@pytest.mark.parametrize("form", ["tree", "vector"])
def test_models_outlive_the_next_step(form):
    """The frozen arrays of what a plan gives are its own, while a step donates those of its state."""
    plan, step, params, state = started(optax.sgd(0.1), form=form, average=0.5)
    models = [plan.model(params, state), plan.model(state.average.average, state)]
    step(params, state, *BATCH)
    assert loss(models[0], *BATCH) == loss(models[1], *BATCH)


@pytest.mark.parametrize("split", ["state", "gradients"])
def test_narrow_gradients_are_divided_before_they_are_summed(split):
    model = {"w": jnp.zeros((8, 4), jnp.float16)}
    plan = sharding.plan(model, mesh_of(8), {"**": "split"})
    of = lambda model, x: jnp.mean(x @ model["w"])
    init, step = sharding.make_step(of, optax.sgd(2.0**-15), plan, loss_is="mean", split=split)
    params, _, _ = step(*init(model), jnp.full((8, 8), 2**16 - 2**7, jnp.float16))
    np.testing.assert_allclose(params["w"], -0.5, 2e-2)
