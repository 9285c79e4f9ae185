"""Vectors over several devices: explicit and automatic axes, `shard_map`, padding."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treeparams as tp

from .zoo import ramp

shard_map = getattr(jax, "shard_map", None)
if shard_map is None:  # JAX 0.6
    from jax.experimental.shard_map import shard_map
set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh

axes = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
SPECS = [P("x", None), P(None, "x"), P()]


def mesh_of(kind, devices=2):
    return jax.make_mesh((devices,), ("x",), axis_types=(kind,), devices=jax.devices()[:devices])


def make():
    return {"b": ramp(2), "frozen": ramp(2, start=3), "w": ramp(2, 2)}


def loss(model, x):
    return jnp.mean(jnp.tanh(x @ model["w"] + (model["b"] + model["frozen"])[None]) ** 2)


LAYOUT = tp.layout(make(), freeze="frozen")
X = jax.random.normal(jax.random.key(0), (8, 2))


def laid(mesh, spec):
    put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    model = make()
    return {"b": put(model["b"]), "frozen": put(model["frozen"]), "w": put(model["w"], *spec)}


@axes
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("within", [False, True])
def test_there_and_back_over_sharded_leaves(kind, spec, within):
    mesh = mesh_of(kind)
    model, plain = laid(mesh, spec), tp.ravel(make(), LAYOUT)[0]
    with set_mesh(mesh) if within else jax.default_device(None):
        vector, restructure = tp.ravel(model, LAYOUT)
        np.testing.assert_array_equal(vector, plain)
        if kind == AxisType.Explicit:
            assert vector.is_fully_replicated
        back = restructure(vector)
        jax.tree.map(np.testing.assert_array_equal, back, model)
        np.testing.assert_array_equal(restructure.ravel(back), plain)
        np.testing.assert_array_equal(restructure.ravel_gradient(model), plain)
        np.testing.assert_array_equal(restructure.view(vector)["w"], make()["w"])
        np.testing.assert_array_equal(restructure.view(vector).at["w"].add(1.0)[2:], plain[2:] + 1)
        np.testing.assert_allclose(tp.global_norm(vector), tp.global_norm(plain), 1e-6)


@axes
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradients_in_the_leaves_and_in_the_vector(kind, spec):
    mesh = mesh_of(kind)
    model = laid(mesh, spec)
    want = jax.grad(lambda v, r: loss(r(v), X))(*tp.ravel(make(), LAYOUT))
    with set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("x")))
        vector, restructure = tp.ravel(model, LAYOUT)
        for of in (
            jax.grad(lambda v, r, x: loss(r(v), x)),
            lambda v, r, x: tp.accumulate(lambda v, x: loss(r(v), x), pieces=2)(v, x)[1],
        ):
            np.testing.assert_allclose(jax.jit(of)(vector, restructure, x), want, 1e-5, 1e-6)
        through = jax.jit(jax.grad(lambda m: jnp.sum(tp.ravel(m, LAYOUT)[0] ** 2)))(model)
        np.testing.assert_allclose(through["w"], 2 * make()["w"], 1e-6)


@axes
def test_a_padded_vector_lies_over_the_devices(kind):
    mesh = mesh_of(kind, 4)
    vector, restructure = tp.ravel(make(), LAYOUT, pad_to=4)
    want = jax.grad(lambda v, r: loss(r(v), X))(vector, restructure)
    assert vector.shape == (8,)  # of six elements
    over = jax.device_put(vector, NamedSharding(mesh, P("x")))
    assert over.addressable_shards[0].data.shape == (2,)
    # On the mesh as well: with explicit axes what meets must lie on one mesh.
    restructure = jax.device_put(restructure, NamedSharding(mesh, P()))
    with set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P()))
        gradient = jax.jit(jax.grad(lambda v, r, x: loss(r(v), x)))(over, restructure, x)
        np.testing.assert_allclose(gradient, want, 1e-5, 1e-6)
        if kind == AxisType.Explicit:
            assert gradient.sharding.spec == P("x")
        np.testing.assert_array_equal(jax.jit(lambda r, v: r(v)["w"])(restructure, over), make()["w"])
        np.testing.assert_array_equal(restructure.view(over)["w"], make()["w"])
        np.testing.assert_allclose(tp.global_norm(over), tp.global_norm(vector), 1e-6)
        step = jax.jit(lambda v, r, x: v - 0.1 * jax.grad(lambda v: loss(r(v), x))(v))
        np.testing.assert_allclose(step(over, restructure, x), vector - 0.1 * want, 1e-5, 1e-6)


@axes
def test_one_gather_brings_the_vector_together(kind):
    mesh = mesh_of(kind, 4)
    model = [ramp(4) for _ in range(20)]
    vector, restructure = tp.ravel(model, pad_to=4)
    over = jax.device_put(vector, NamedSharding(mesh, P("x")))
    with set_mesh(mesh):
        program = jax.jit(lambda v: sum(jnp.sum(each) for each in restructure(v))).lower(over).compile().as_text()
    assert program.count(" all-gather(") == 1
    assert "collective-permute" not in program


def _inside(mesh, of, *specs, out):
    return jax.jit(shard_map(of, mesh=mesh, in_specs=specs, out_specs=out))


@axes
def test_data_parallel_in_shard_map(kind):
    mesh = mesh_of(kind, 4)
    vector, restructure = tp.ravel(make(), LAYOUT)
    want = jax.grad(lambda v, r: loss(r(v), X))(vector, restructure)
    x = jax.device_put(X, NamedSharding(mesh, P("x")))

    def step(vector, restructure, x):
        gradient = jax.grad(lambda v: jax.lax.pmean(loss(restructure(v), x), "x"))(vector)
        return (
            gradient,
            tp.global_norm(gradient),
            restructure.view(gradient)["w"],
            tp.ravel(restructure(vector), LAYOUT)[0],
        )

    gradient, norm, part, again = _inside(mesh, step, P(), P(), P("x"), out=P())(vector, restructure, x)
    np.testing.assert_allclose(gradient, want, 1e-5, 1e-6)
    np.testing.assert_allclose(norm, tp.global_norm(want), 1e-5)
    np.testing.assert_allclose(part, restructure.view(want)["w"], 1e-5, 1e-6)
    np.testing.assert_array_equal(again, vector)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="JAX 0.6 refuses derivatives of what varies, of any function")
@axes
@pytest.mark.parametrize("how", ["argument", "keyword", "closure"])
def test_accumulation_in_shard_map(kind, how):
    mesh = mesh_of(kind, 2)
    vector, restructure = tp.ravel(make(), LAYOUT)
    want = jax.value_and_grad(lambda v, r: loss(r(v), X))(vector, restructure)
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    index = jnp.arange(4)

    def step(vector, restructure, x):
        if how == "argument":
            value, gradient = tp.accumulate(lambda v, x: loss(restructure(v), x), pieces=3)(vector, x)
        elif how == "keyword":
            of = lambda v, i, *, x: loss(restructure(v), x[i])
            value, gradient = tp.accumulate(of, pieces=3)(vector, index, x=x)
        else:
            value, gradient = tp.accumulate(lambda v, i: loss(restructure(v), x[i]), pieces=3)(vector, index)
        return jax.lax.pmean(value, "x"), gradient / 2  # as of `jax.grad`, summed over the two devices

    got = _inside(mesh, step, P(), P(), P("x"), out=P())(vector, restructure, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, want)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="JAX 0.6 finds no name for how XLA splits some results")
@axes
def test_accumulation_into_a_vector_over_the_devices(kind):
    mesh = mesh_of(kind, 4)
    vector, restructure = tp.ravel(make(), LAYOUT, pad_to=4)
    want = jax.value_and_grad(lambda v, r: loss(r(v), X))(vector, restructure)
    over = jax.device_put(vector, NamedSharding(mesh, P("x")))
    restructure = jax.device_put(restructure, NamedSharding(mesh, P()))
    with set_mesh(mesh):
        for spec in (P(), P("x")):
            x = jax.device_put(X, NamedSharding(mesh, spec))
            # Eight examples in three pieces, or two of four.
            of = lambda v, r, x: tp.accumulate(lambda v, x: loss(r(v), x), pieces=3)(v, x)
            for run in (of, jax.jit(of)):
                got = run(over, restructure, x)
                jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, want)
                assert kind == AxisType.Auto or got[1].sharding.spec == P("x")


@axes
@pytest.mark.parametrize("varying_first", [False, True])
def test_whole_and_varying_leaves_in_shard_map(kind, varying_first):
    mesh = mesh_of(kind, 4)
    whole, apart = ramp(2, start=1), jnp.arange(8.0)
    joined = lambda a, b: tp.ravel({"a": b, "b": a} if varying_first else {"a": a, "b": b})[0]

    def grads(a, b):
        return jax.grad(lambda a, b: jax.lax.psum(jnp.sum(joined(a, b) ** 2), "x"), (0, 1))(a, b)

    inside = shard_map(grads, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P(), P("x")))
    got = jax.jit(inside)(whole, jax.device_put(apart, NamedSharding(mesh, P("x"))))
    np.testing.assert_allclose(got[0], 4 * 2 * whole)  # it is on four devices
    np.testing.assert_allclose(got[1], 2 * apart)
    with pytest.raises(ValueError, match="which require replication"):
        _inside(mesh, joined, P(), P("x"), out=P())(whole, jax.device_put(apart, NamedSharding(mesh, P("x"))))


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="JAX 0.6 has no vmap over an explicit axis")
def test_one_leaf_for_all_and_one_for_each_device():
    mesh = mesh_of(AxisType.Explicit, 4)
    stack = jax.device_put(ramp(4, 2), NamedSharding(mesh, P("x", None)))
    whole = jax.device_put(ramp(3), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        of = jax.grad(lambda a, b: jnp.sum(tp.ravel({"a": a, "b": b})[0] ** 2), (0, 1))
        vectors = jax.jit(jax.vmap(lambda a, b: tp.ravel({"a": a, "b": b})[0], (None, 0)))(whole, stack)
        grads = jax.jit(jax.vmap(of, (None, 0)))(whole, stack)
    assert vectors.sharding.spec[0] == "x"
    np.testing.assert_array_equal(vectors[:, :3], np.tile(ramp(3), (4, 1)))
    np.testing.assert_array_equal(vectors[:, 3:], stack)
    np.testing.assert_array_equal(grads[0], np.tile(2 * ramp(3), (4, 1)))
    np.testing.assert_array_equal(grads[1], 2 * stack)


@axes
def test_changes_and_memory_of_a_vector_over_the_devices(kind):
    mesh = mesh_of(kind, 4)
    model = jax.device_put(make(), NamedSharding(mesh, P()))
    vector, restructure = tp.ravel(model, LAYOUT, pad_to=4)
    lies = NamedSharding(mesh, P("x"))
    over = jax.device_put(vector, lies)
    value = jax.device_put(ramp(4, start=9), lies)
    want = np.asarray(vector).copy()
    want[2:6] = ramp(4, start=9)
    changed = restructure.view(over).at["w"].set(value)
    assert changed.sharding.is_equivalent_to(lies, 1)
    np.testing.assert_array_equal(changed, want)


@axes
def test_modules_on_a_mesh(kind):
    mesh = mesh_of(kind)
    mlp = eqx.nn.MLP(2, 1, 4, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(mlp, eqx.is_array)
    spread = lambda a: NamedSharding(mesh, P("x") if a.shape[0] % 2 == 0 else P())
    model = eqx.combine(jax.tree.map(lambda a: jax.device_put(a, spread(a)), arrays), static)
    plain, _ = tp.ravel(mlp)
    for options in ({}, {"pad_to": 16}):
        vector, restructure = tp.ravel(model, **options)
        np.testing.assert_array_equal(vector, tp.ravel(mlp, **options)[0])
        with set_mesh(mesh):
            np.testing.assert_array_equal(tp.ravel(restructure(vector))[0], plain)
