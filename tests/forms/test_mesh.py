"""Vectors over several devices: explicit and automatic axes, `shard_map`, padding."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treeparams as tp

from ..long import some
from ..zoo import first_devices, ramp

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
axes = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
# Each law meets either kind of axes, and the mesh set and not; together the laws meet all four.
explicit_within = pytest.mark.parametrize(("kind", "within"), [(AUTO, False), (EXPLICIT, True)])
auto_within = pytest.mark.parametrize(("kind", "within"), [(AUTO, True), (EXPLICIT, False)])


def mesh_of(kind, count=4):
    return jax.make_mesh((count,), ("x",), axis_types=(kind,), devices=first_devices(count))


def set_if(within, mesh):
    return jax.set_mesh(mesh) if within else contextlib.nullcontext()


def put(tree, mesh, *spec):
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def assert_near(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, want)


@jax.jit
def loss(model, x):
    return jnp.mean(jnp.tanh(x @ model["w"] + (model["b"] + model["frozen"])[None]) ** 2)


MODEL = {"b": ramp(2), "frozen": ramp(2, start=3), "w": ramp(2, 2)}
LAYOUT = tp.layout(MODEL, freeze="frozen")
X = np.sin(np.arange(16, dtype=np.float32)).reshape(8, 2)
VECTOR, RESTRUCTURE = tp.ravel(MODEL, LAYOUT)


@pytest.fixture(scope="module")
def want():
    """The loss and its gradient in the vector, on one device."""
    return jax.jit(jax.value_and_grad(lambda v: loss(RESTRUCTURE(v), X)))(VECTOR)


@pytest.mark.parametrize(
    ("kind", "spec", "within"),
    [
        (AUTO, (None, "x"), False),
        (EXPLICIT, ("x", None), True),
        (EXPLICIT, (None, "x"), False),
        # Of these the first two say as much: on automatic axes types say nothing, and leaves beside `w` are whole.
        *some([(AUTO, ("x", None), True), (EXPLICIT, (), True)], [(AUTO, ("x", None), True), (EXPLICIT, (), True)]),
    ],
)
def test_there_and_back_and_gradients_over_sharded_leaves(kind, spec, within, want):
    mesh = mesh_of(kind, 2)
    model = put(MODEL, mesh) | {"w": put(MODEL["w"], mesh, *spec)}
    with set_if(within, mesh):
        vector, restructure = tp.ravel(model, LAYOUT)
        assert kind == AUTO or vector.is_fully_replicated
        back = restructure(vector)
        jax.tree.map(np.testing.assert_array_equal, back, model)
        for made in (vector, restructure.ravel(back), restructure.ravel_gradient(model)):
            np.testing.assert_array_equal(made, VECTOR)
        view = restructure.view(vector)
        np.testing.assert_array_equal(view["w"], MODEL["w"])
        np.testing.assert_array_equal(view.at["w"].add(1.0)[2:], VECTOR[2:] + 1)
        np.testing.assert_allclose(tp.global_norm(vector), np.linalg.norm(VECTOR), 1e-6)

    def gradients(vector, restructure, model, x):
        of_vector = lambda v, x: loss(restructure(v), x)
        through = jax.grad(lambda m: jnp.sum(tp.ravel(m, LAYOUT)[0] ** 2))(model)
        return jax.grad(of_vector)(vector, x), tp.accumulate(of_vector, pieces=2)(vector, x)[1], through["w"]

    with jax.set_mesh(mesh):
        got = jax.jit(gradients)(vector, restructure, model, put(X, mesh, "x"))
    assert_near(got, (want[1], want[1], 2 * MODEL["w"]))


@pytest.mark.parametrize(("kind", "spec"), [(AUTO, ()), (EXPLICIT, ("x",))])
def test_a_padded_vector_lies_over_the_devices(kind, spec, want):
    mesh = mesh_of(kind)
    vector, restructure = tp.ravel(MODEL, LAYOUT, pad_to=4)
    padded = np.append(want[1], [0, 0])
    # On the mesh as well: with explicit axes what meets must lie on one mesh.
    over, restructure, x = put(vector, mesh, "x"), put(restructure, mesh), put(X, mesh, *spec)
    assert over.addressable_shards[0].data.shape == (2,)
    # Eight examples in three pieces, or two of four.
    accumulated = lambda v, r, x: tp.accumulate(lambda v, x: loss(r(v), x), pieces=3)(v, x)

    @jax.jit
    def run(v, r, x):
        gradient = jax.grad(lambda v: loss(r(v), x))(v)
        return gradient, v - 0.1 * gradient, accumulated(v, r, x)

    with jax.set_mesh(mesh):
        gradient, step, in_pieces = run(over, restructure, x)
        assert_near([gradient, step], [padded, vector - 0.1 * padded])
        for back in (restructure(over), restructure.view(over)):
            np.testing.assert_array_equal(back["w"], MODEL["w"])
        np.testing.assert_allclose(tp.global_norm(over), np.linalg.norm(VECTOR), 1e-6)
        found = [in_pieces]
        if jax.__version_info__ >= (0, 10):  # before it, JAX has no name for how XLA splits some results
            found.append(accumulated(over, restructure, x))
    assert_near(found, [(want[0], padded)] * len(found))
    assert kind == AUTO or {each.sharding.spec for each in (gradient, *[g for _, g in found])} == {P("x")}
    # A change of it lies as it does.
    value = put(ramp(4, start=9), mesh, "x")
    changed = restructure.view(over).at["w"].set(value)
    assert changed.sharding.is_equivalent_to(over.sharding, 1)
    np.testing.assert_array_equal(changed, np.concatenate([VECTOR[:2], value, [0, 0]]))


@axes
def test_one_gather_brings_the_vector_together(kind):
    mesh = mesh_of(kind)
    vector, restructure = tp.ravel([ramp(4) for _ in range(20)], pad_to=4)
    with jax.set_mesh(mesh):
        of = jax.jit(lambda v: sum(jnp.sum(each) for each in restructure(v)))
        program = of.lower(put(vector, mesh, "x")).compile().as_text()
    assert program.count(" all-gather(") == 1
    assert "collective-permute" not in program


@axes
def test_gradients_and_accumulation_in_shard_map(kind, want):
    mesh, index = mesh_of(kind, 2), np.arange(4)

    def step(vector, restructure, x):
        gradient = jax.grad(lambda v: jax.lax.pmean(loss(restructure(v), x), "x"))(vector)
        again, _ = tp.ravel(restructure(vector), LAYOUT)
        argument = tp.accumulate(lambda v, x: loss(restructure(v), x), pieces=3)(vector, x)
        keyword = tp.accumulate(lambda v, i, *, x: loss(restructure(v), x[i]), pieces=3)(vector, index, x=x)
        closure = tp.accumulate(lambda v, i: loss(restructure(v), x[i]), pieces=3)(vector, index)
        # As of `jax.grad`, the gradient is summed over the two devices.
        several = [(jax.lax.pmean(value, "x"), gradient / 2) for value, gradient in (argument, keyword, closure)]
        return (gradient, tp.global_norm(gradient), restructure.view(gradient)["w"], again), several

    inside = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=P())
    got = jax.jit(inside)(VECTOR, RESTRUCTURE, put(X, mesh, "x"))
    once = want[1], np.linalg.norm(want[1]), RESTRUCTURE.view(want[1])["w"], VECTOR
    assert_near(got, (once, [want] * 3))


@pytest.mark.parametrize(("kind", "varying_first"), [(AUTO, False), (EXPLICIT, True)])
def test_whole_and_varying_leaves_in_shard_map(kind, varying_first):
    mesh = mesh_of(kind)
    whole, apart = ramp(2, start=1), put(np.arange(8, dtype=np.float32), mesh, "x")
    joined = lambda a, b: tp.ravel({"a": b, "b": a} if varying_first else {"a": a, "b": b})[0]

    def grads(a, b):
        return jax.grad(lambda a, b: jax.lax.psum(jnp.sum(joined(a, b) ** 2), "x"), (0, 1))(a, b)

    inside = jax.shard_map(grads, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P(), P("x")))
    of_whole, of_apart = jax.jit(inside)(whole, apart)
    np.testing.assert_allclose(of_whole, 4 * 2 * whole)  # it is on four devices
    np.testing.assert_allclose(of_apart, 2 * np.asarray(apart))
    with pytest.raises(ValueError, match="which require replication"):
        jax.jit(jax.shard_map(joined, mesh=mesh, in_specs=(P(), P("x")), out_specs=P()))(whole, apart)


def test_one_leaf_for_all_and_one_for_each_device():
    mesh = mesh_of(EXPLICIT)
    stack, whole = put(ramp(4, 2), mesh, "x", None), put(ramp(3), mesh)
    joined = lambda a, b: tp.ravel({"a": a, "b": b})[0]
    of = lambda a, b: (joined(a, b), *jax.grad(lambda a, b: jnp.sum(joined(a, b) ** 2), (0, 1))(a, b))
    with jax.set_mesh(mesh):
        vectors, of_whole, of_stack = jax.jit(jax.vmap(of, (None, 0)))(whole, stack)
    assert vectors.sharding.spec[0] == "x"
    np.testing.assert_array_equal(vectors, np.concatenate([np.tile(ramp(3), (4, 1)), ramp(4, 2)], 1))
    np.testing.assert_array_equal(of_whole, np.tile(2 * ramp(3), (4, 1)))
    np.testing.assert_array_equal(of_stack, 2 * ramp(4, 2))
