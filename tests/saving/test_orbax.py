"""Orbax takes our trees as they are: saved over four devices, restored over two and on one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treeparams as tp
from treeparams import optim, saving

from ..zoo import first_devices

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Layer(eqx.Module):
    weight: jax.Array
    scale: jax.Array


class Model(eqx.Module):
    """Two dtypes, equal layers, something frozen, a count, a function; ties by identity and through a transpose."""

    embed: jax.Array
    layers: tuple[Layer, ...]
    mean: jax.Array = tp.field(trainable=False)
    head: jax.Array = tp.field(tied_to="embed", transform=jnp.transpose)
    calls: jax.Array
    same: jax.Array
    activation: object = jax.nn.relu


def make(seed):
    embed, weights = (jax.random.normal(jax.random.key(seed), shape) for shape in [(8, 4), (4, 4, 4)])
    embed = embed.at[0, :2].set(jnp.array([jnp.nan, -0.0]))
    layers = tuple(Layer(weight, weight[0].astype(jnp.bfloat16)) for weight in weights)
    return Model(embed, layers, jnp.full(8, seed + 0.5), embed.T, jnp.asarray(seed), embed)


def sharding(leaf, devices):
    """By the first axis that some devices divide; scalars whole on each."""
    mesh = Mesh(np.array(first_devices(devices)), ("data",))
    axis = next((axis for axis, length in enumerate(leaf.shape) if length % devices == 0), None)
    return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "data"))


def over(tree, devices):
    lay = lambda leaf: jax.device_put(leaf, sharding(leaf, devices)) if eqx.is_array(leaf) else leaf
    return jax.tree.map(lay, tree)


def shapes_over(tree, devices):
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(leaf, devices))
    return jax.tree.map(shape, tree)


RULES = {
    "trainable": optim.trainable(optax.adam(0.1)),
    "stacked": optim.trainable(optax.sgd(0.1, momentum=0.9), form="stacks"),
    "histories": optim.trainable(optax.sgd(0.1, momentum=0.9)),
}


def stepped(name, model):
    """A state after steps; one of them with three histories, of which one waits."""
    rule = RULES[name]
    state = rule.init(model)
    stages = [tp.layout(model, freeze=where) for where in ("layers", "layers.1", "layers.0")]
    for layout in stages if name == "histories" else [None]:
        state = state if layout is None else optim.set_trainable(rule, state, model, layout)
        ones = jax.tree.map(jnp.ones_like, tp.partition(model, state.layout)[0])
        model, state = optim.step(rule, ones, state, model)
    return state


TREES = {
    "params": lambda model: tp.partition(model)[0],
    "rest": lambda model: tp.partition(model)[1],
    "stacks": lambda model: tp.stack(model)[0],
    "average": lambda model: tp.Ema(model, decay=0.9).update(model),
    **{name: lambda model, name=name: stepped(name, model) for name in RULES},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with each tree, whose arrays lay over four devices, and these trees."""
    folder = tmp_path_factory.mktemp("orbax")
    with jax.numpy_dtype_promotion("standard"), orbax.checkpoint.StandardCheckpointer() as checkpointer:
        trees = {name: over(of(make(0)), 4) for name, of in TREES.items()}
        for name, tree in trees.items():
            checkpointer.save(folder / name, tree)
    return folder, trees


def restored(folder, name, like):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / name, like)


def bits(tree):
    return [
        (leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    ]


@pytest.mark.parametrize(("name", "devices"), [*((name, 2) for name in TREES), ("stacked", 1)])
def test_trees_come_back_bit_for_bit_over_fewer_devices(saved, name, devices):
    folder, trees = saved
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(trees[name]))
    like = shapes_over(TREES[name](make(1)), devices)
    back = restored(folder, name, like)
    assert jax.tree.structure(back) == jax.tree.structure(like)
    assert bits(back) == bits(trees[name])
    assert all(leaf.sharding == sharding(leaf, devices) for leaf in jax.tree.leaves(back))


def test_the_model_of_params_and_rest_is_tied_as_before(saved):
    folder, trees = saved
    model = tp.combine(*(restored(folder, name, shapes_over(trees[name], 2)) for name in ("params", "rest")))
    assert model.same is model.embed
    assert tp.layout(model) == tp.layout(make(0))
    assert bits(model) == bits(make(0))


def test_each_array_of_a_tie_is_stored_once(saved):
    folder, _ = saved
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        names = saving.names(checkpointer.metadata(folder / "params"))
    assert list(names) == ["embed", *(f"layers.{i}.{name}" for i in range(4) for name in ("scale", "weight"))]


def test_a_plan_is_made_of_the_metadata_and_takes_what_is_restored(saved):
    folder, trees = saved
    model = {"table": jnp.zeros((8, 4)), "weights": jnp.zeros((4, 4, 4)), "scales": jnp.zeros((4, 4), jnp.bfloat16)}
    rename = {"embed": "table", "layers.*.weight": "weights", "layers.*.scale": "scales"}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        plan = saving.plan(checkpointer.metadata(folder / "params"), shapes_over(model, 2), rename=rename)
    old = restored(folder, "params", shapes_over(trees["params"], 2))
    new = plan(old)
    assert bits(new["table"]) == bits(old.embed)
    assert bits(new["weights"]) == bits(jnp.stack([layer.weight for layer in old.layers]))
    assert bits(new["scales"]) == bits(jnp.stack([layer.scale for layer in old.layers]))
    assert all(leaf.sharding == sharding(leaf, 2) for leaf in jax.tree.leaves(new))


FROZEN = {
    "clip": optax.chain(optim.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(0.1)),
    "groups": optim.groups({"layers": optax.adam(0.1)}, default=optax.sgd(0.1, momentum=0.9)),
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_state_restored_without_a_target_is_that_of_its_plan(name, tmp_path):
    """Whatever was frozen and thawed; the plan may rename it."""
    tx, model = optim.trainable(FROZEN[name]), make(0)
    state = optim.set_trainable(tx, tx.init(model), model, "layers.[01]")
    ones = jax.tree.map(jnp.ones_like, tp.partition(model, state.layout)[0])
    model, state = optim.step(tx, ones, state, model)
    for choice in (None, "layers.[12]"):
        state = optim.set_trainable(tx, state, model, choice)
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state, force=True)
            checkpointer.wait_until_finished()
            restored_state = checkpointer.restore(tmp_path / "state")
        back = saving.plan(model, model).state(restored_state, like=tx.init(model))
        assert jax.tree.structure(back) == jax.tree.structure(state)
        assert bits(back) == bits(state)
        new = {"net": model}
        renamed = saving.plan(model, new, rename={"**": "net.**"})
        if name != "groups":
            assert bits(renamed.state(restored_state, like=tx.init(new))) == bits(state)


@pytest.mark.parametrize("form", ["vector", "stacks"])
def test_of_joined_arrays_nothing_tells_their_parameters(form, tmp_path):
    tx, model = optim.trainable(optax.adam(0.1), form=form), {"a": jnp.ones(2), "b": jnp.ones(2)}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", tx.init(model))
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state")
    with pytest.raises(ValueError, match="nothing tells which parameters the arrays of the state are of"):
        saving.plan(model, model).state(back, like=tx.init(model))
