"""Jacobians in the parameters and their kernels hold no more than they say, and take samples that lie over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treeparams as tp
from treeparams import nested
from treeparams.nested import _jacobian

from ..matrices.zoo import equations
from ..zoo import assert_close, first_devices, ramp

WIDE = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in {"a": (50, 40), "b": (40, 50)}.items()}
SAMPLES = jax.ShapeDtypeStruct((32, 40), jnp.float32)


def several(model, x):
    return (model["b"] @ jnp.tanh(model["a"] @ x))[:2]


def single(model, x):
    return several(model, x)[0]


def arrays(f, *args):
    """The numbers of elements of all that a program makes, within loops and branches as well."""
    program = jax.make_jaxpr(f)(*args)
    return [variable.aval.size for equation in equations(program.jaxpr) for variable in equation.outvars]


# Each two of the three options meet.
OPTIONS = [(1, None, False), (1, 8, True), (1, 5, False), (2, None, True), (2, 8, False), (2, 5, True)]


@pytest.mark.parametrize(("outputs", "chunk", "others"), OPTIONS)
def test_a_kernel_holds_no_jacobian(outputs, chunk, others, monkeypatch):
    monkeypatch.setattr(_jacobian, "_ALL", 32 * outputs * 4000 - 1)
    f = single if outputs == 1 else several
    of = lambda model, xs: nested.kernel(f, chunk=chunk)(model, xs, xs if others else None)
    largest = (chunk or 32) * 2000
    assert (35 * outputs) ** 2 < largest  # the result, with what fills up chunks
    assert largest / 2 < max(arrays(of, WIDE, SAMPLES)) <= largest


def test_a_kernel_takes_each_sample_forward_once_where_all_rows_may_be_there():
    primitives = lambda f: [each.primitive.name for each in equations(jax.make_jaxpr(f)(WIDE, SAMPLES).jaxpr)]
    found = primitives(nested.kernel(several))
    assert found.count("tanh") == primitives(jax.vmap(several, (None, 0))).count("tanh") == 1
    assert not {"scan", "cond"} & set(found)
    assert max(arrays(nested.kernel(several), WIDE, SAMPLES)) == 32 * 2 * 2000


COLUMNS = {"scale": ramp(), "w": ramp(9)}
JACOBIANS = {
    "one output": (single, WIDE, 1, 4000),
    "several outputs": (several, WIDE, 2, 4000),
    "by columns": (lambda model, x: jnp.outer(jnp.tanh(x * model["scale"]), model["w"]), COLUMNS, 360, 10),
}


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", JACOBIANS)
def test_a_jacobian_holds_nothing_larger_than_itself_or_a_chunk(name, chunk):
    f, model, outputs, n = JACOBIANS[name]
    sizes = arrays(lambda model, xs: nested.parameter_jacobian(f, chunk=chunk)(model, xs), model, SAMPLES)
    result = 32 * outputs * n
    assert max(sizes) == result
    if chunk is not None:
        largest = max(size for size in sizes if size != result)
        assert chunk * outputs * n / 2 < largest <= chunk * outputs * n


XS = jax.device_put(np.sin(np.arange(36, dtype=np.float32)).reshape(12, 3))


def net(model, x):
    return jnp.tanh(model["w"] @ (x * model["scale"])) * jnp.sum(model["tied"] @ x) + model["frozen"]


SHARED = ramp(2, 3)
MODEL = {"w": SHARED, "scale": ramp(3, start=-1.0), "tied": SHARED, "frozen": ramp(2, start=3.0)}
LAYOUT = tp.layout(MODEL, freeze="frozen")


def test_samples_over_devices():
    """Each device has its own samples, and the model is on all of them: nothing is summed over devices."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=first_devices(4))
    waves, loss = {"k": ramp(2).astype(jnp.complex64), "b": ramp(1)}, lambda model, x: jnp.sum(net(model, x) ** 2)
    many = lambda model, x: jnp.outer(model["b"] ** 2, x)  # more outputs than parameters
    phases = lambda waves, x: jnp.exp(waves["k"] * (x[:2] * waves["b"]).astype(jnp.complex64))

    def run(own, others, model, waves, axis_name):
        kernel = lambda *samples, **options: nested.kernel(net, LAYOUT, axis_name=axis_name, **options)(model, *samples)
        of_pairs = nested.kernel(phases, mode="complex", chunk=2, axis_name=axis_name)(waves, own)
        return (kernel(own, chunk=2), kernel(own, others), of_pairs), (
            nested.parameter_jacobian(net, LAYOUT, chunk=2)(model, own),
            nested.parameter_jacobian(phases, mode="complex", chunk=1)(waves, own),
            nested.per_example_gradients(loss, LAYOUT, flat=True, chunk=2)(model, own),
            nested.parameter_jacobian(many, "b", chunk=2)(waves, own),
        )

    within = lambda *args: run(*args, "d")
    sharded = jax.shard_map(within, mesh=mesh, in_specs=(P("d"), P("d"), P(), P()), out_specs=(P(), P("d")))
    args = XS, XS[:4] + 1, MODEL, waves
    got, want = jax.jit(sharded)(*args), jax.jit(lambda *args: run(*args, None))(*args)
    assert [kernel.shape for kernel in got[0]] == [(24, 24), (24, 8), (48, 48)]
    assert_close(got, want)
    for kernel in got[0]:
        first, *rest = (np.asarray(shard.data) for shard in kernel.addressable_shards)
        assert len(rest) == 3
        assert all(np.array_equal(each, first) for each in rest)


def test_a_kernel_over_two_axes_of_a_mesh():
    mesh, axes = jax.make_mesh((2, 2), ("d", "e"), (AxisType.Auto,) * 2, devices=first_devices(4)), ("d", "e")
    of = lambda axis_name: lambda model, xs: nested.kernel(net, LAYOUT, axis_name=axis_name)(model, xs)
    sharded = jax.shard_map(of(axes), mesh=mesh, in_specs=(P(), P(axes)), out_specs=P())
    assert_close(*jax.jit(lambda *args: (sharded(*args), of(None)(*args)))(MODEL, XS))


def test_meshes_with_explicit_axes():
    """What lies over devices by type is brought together where rows are multiplied; tangents lie as the slots do."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=first_devices(2))
    model, xs, vector = {"w": ramp(2, 2), "b": ramp(2)}, np.sin(ramp(4, 2) * 9), ramp(6)
    f = lambda model, x: jnp.tanh(x @ model["w"] + model["b"])
    loss = lambda model: jnp.sum(jnp.tanh(model["w"]) ** 2 * model["b"][None])

    @jax.jit
    def of_samples(model, xs):
        gradients = nested.per_example_gradients(lambda m, x: jnp.sum(f(m, x) ** 2), flat=True, chunk=3)(model, xs)
        kernels = [nested.kernel(f, chunk=chunk)(model, xs) for chunk in (None, 3)]
        return nested.parameter_jacobian(f, chunk=3)(model, xs), gradients, kernels

    @jax.jit
    def of_parameters(model, xs, vector):
        operator = nested.hessian_operator(loss, damping=0.1)(model)
        outputs = nested.ggn_operator(lambda m: jnp.tanh(m["w"]), lambda y: jnp.sum(y**2))(model)
        return nested.kernel(f)(model, xs), operator(vector), operator.matrix(), operator.diagonal(), outputs(vector)

    want = of_samples(model, xs), of_parameters(model, xs, vector)
    put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    whole = jax.tree.map(put, model)
    with jax.set_mesh(mesh):
        split = {"w": put(model["w"], "d"), "b": whole["b"]}
        got = of_samples(whole, put(xs, "d")), of_parameters(split, put(xs), put(vector))
    assert_close(got, want)
    in_chunks = jax.jit(nested.parameter_jacobian(f, chunk=3))(whole, put(xs, "d"))  # without `jax.set_mesh`
    assert_close(in_chunks, want[0][0])
