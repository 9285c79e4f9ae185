"""What one step over many devices moves between them and holds on each, when it is traced, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import treeparams as tp
from treeparams import optim, sharding

from .nets import ADAM, AUTO, BATCH, EXPLICIT, LAYOUT, MIXED, RULES, SPLIT, X, loss, mesh_of, model_of, started
from .zoo import ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")
set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_vector_is_gathered_once_and_reduced_once(microbatches, kind):
    _, step, params, state = started(mesh=mesh_of(4, kind), microbatches=microbatches)
    moved = sharding.collectives(step.lower(params, state, *BATCH).compile())
    assert {row.kind: row.times for row in moved.rows} == {"all-gather": 1, "reduce-scatter": 1}
    assert moved.bytes == 2 * 256 * 4


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
    for count in (1, 2, 4):
        _, step, params, state = started(optax.sgd(0.1), microbatches=count)
        params, _, value = step(params, state, *BATCH)
        found.append((params, value))
    for each in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), each, found[0])


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_one_trace_what_is_given_is_donated_and_batches_may_lie_anywhere(kind):
    traces = []
    of = lambda model, batch, flag, scale: traces.append(flag) or loss(model, batch["x"], batch["y"]) * scale
    mesh = mesh_of(4, kind)
    _, step, params, state = started(optax.sgd(0.1, 0.9), of=of, mesh=mesh)
    lain = [BATCH, tuple(map(jnp.asarray, BATCH)), jax.device_put(BATCH, NamedSharding(mesh, P("data")))]
    lain += [
        jax.device_put(BATCH, NamedSharding(mesh, P())),
        jax.device_put(BATCH, NamedSharding(mesh, P(None, "data"))),
    ]
    values = []
    for x, y in lain:
        before = (params, state)
        params, state, value = step(params, state, {"x": x, "y": y}, None, 2.0)
        values.append(float(value))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before[0], before[1].rule)))
    assert sorted(values, reverse=True) == values
    count = len(traces)
    for _ in range(2):
        params, state, _ = step(params, state, {"x": lain[2][0], "y": lain[2][1]}, None, 2.0)
    assert len(traces) == count
    with set_mesh(mesh):
        params, state, value = step(params, state, {"x": lain[0][0], "y": lain[0][1]}, None, 2.0)
    assert float(value) < values[-1]


def test_repeated_calls_share_a_trace():
    traces = []
    of = lambda model, x, y: traces.append(0) or loss(model, x, y)
    _, step, params, state = started(optax.sgd(0.1), of=of, mesh=mesh_of(4, EXPLICIT))
    for _ in range(3):
        params, state, _ = step(params, state, *BATCH)
    assert len(traces) == 1


def test_ahead_of_time_from_shapes():
    shapes = jax.eval_shape(lambda: {k: v for k, v in model_of().items() if k not in ("f", "name")})
    of = lambda model, x, y: loss(model | {"f": jnp.tanh}, x, y)
    _, step, params, state = started(of=of, model=shapes, layout=tp.layout(shapes, freeze="scale"))
    assert isinstance(params, jax.ShapeDtypeStruct)
    found = sharding.ahead(step, params, state, *BATCH)
    assert found.parameters == 256
    assert found.moved.count() == 2


# -- What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tx", "form", "rules", "options", "message"),
    [
        (optim.trainable(ADAM), "tree", SPLIT, {}, "expected plain Optax"),
        (
            RULES["muon"],
            "tree",
            SPLIT,
            {},
            r'moves parameters.*\{"\*\*": "owned"\}, form="stacks"\) with optim.per_leaf',
        ),
        (RULES["muon"], "vector", SPLIT, {}, 'take form="stacks" with optim.per_leaf, or form="tree"'),
        (RULES["muon"], "stacks", MIXED, {}, r"stands within optim\.per_leaf"),
        (optim.per_leaf(RULES["muon"]), "stacks", SPLIT, {}, r'moves parameters.*\{"\*\*": "owned"\}'),
        (optax.lbfgs(), "tree", SPLIT, {}, r"calls the loss itself \(a line search\) goes with optim\.flat"),
        (ADAM, "vector", SPLIT, {"split": "parameters"}, r'form="stacks" and loss_takes="form"'),
        (ADAM, "stacks", SPLIT, {"split": "parameters"}, r'form="stacks" and loss_takes="form"'),
        (ADAM, "tree", SPLIT, {"split": "zero"}, 'split must be "state", "gradients" or "parameters", got \'zero\''),
        (ADAM, "tree", SPLIT, {"loss_takes": "x"}, 'loss_takes must be "model" or "form", got \'x\''),
        (ADAM, "tree", SPLIT, {"microbatches": 0}, "microbatches must be a whole number of pieces, at least 1, got 0"),
        (ADAM, "tree", SPLIT, {"average": 2.0}, "decay must be between 0 and 1, got 2.0"),
        (ADAM, "tree", SPLIT, {"average": "0.9"}, "decay|average"),
    ],
)
@pytest.mark.usefixtures("without_type_checks")
def test_steps_that_cannot_be(tx, form, rules, options, message):
    plan = sharding.plan(LAYOUT, mesh_of(), rules, form=form)
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
        sharding.step(loss, tx, plan, **options)


@pytest.mark.usefixtures("without_type_checks")
def test_what_is_no_plan():
    with pytest.raises(TypeError, match=r"expected a plan, sharding\.plan\(model, mesh, rules\), got Layout"):
        sharding.step(loss, ADAM, LAYOUT)


def test_batches_and_parameters_that_do_not_fit():
    _, step, params, state = started(optax.sgd(0.1), form="tree")
    with pytest.raises(
        ValueError, match=r"batch\[1\] has 6 examples, which 4 devices along .*'data'.* cannot share equally"
    ):
        step(params, state, BATCH[0], BATCH[1][:6])
    _, other, *_ = started(optax.sgd(0.1), form="vector")
    with pytest.raises((ValueError, TypeError), match=r"expected .*vector"):
        other(params, state, *BATCH)
    plan = sharding.plan(LAYOUT, mesh_of(), SPLIT)
    with pytest.raises(ValueError, match=r"does not fit the layout.*\n'embed' is float32\[12,4\]"):
        sharding.step(loss, ADAM, plan)[0](model_of() | {"embed": ramp(8, 4)})
