"""Derivatives in the input, within losses: those of JAX, and their gradients reach everything."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeparams as tp
from treeparams import nested

from ..zoo import ZOO, assert_close, enable_x64, first_devices, flops, inexact_leaves


class Energy(eqx.Module):
    mlp: eqx.nn.MLP
    scale: jax.Array
    shift: jax.Array = tp.field(trainable=False)
    count: jax.Array
    name: str = "energy"

    def __call__(self, x, t):
        return self.mlp(self.scale * x + self.shift) * t

    def total(self, x, t):
        return jnp.sum(self(x, t))


def _energy():
    mlp = eqx.nn.MLP(3, 2, 4, 1, jax.nn.softplus, key=jax.random.key(0))
    return Energy(mlp, jnp.ones(3), jnp.full(3, 0.1), jnp.arange(2))


X = np.array([[0.3, -0.2, 0.5], [1.0, 0.4, -0.7]])
T = np.array([0.7, -1.1])


def _call(model, x, t):
    return model(x, t)


def _total(model, x, t):
    return model.total(x, t)


DERIVATIVES = {
    "gradient": (nested.gradient(_total), jax.grad(_total, 1)),
    "jacobian by rows": (nested.jacobian(_call), jax.jacfwd(_call, 1)),
    "jacobian by columns": (
        nested.jacobian(lambda m, x, t: jnp.outer(m(x, t), x)),
        jax.jacfwd(lambda m, x, t: jnp.outer(m(x, t), x), 1),
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_values_and_gradients_are_those_of_jax(name):
    """In the parameters and all that is beside them; for one point and a batch; and second derivatives."""

    def everything(derivative, model, x, t):
        layout = tp.layout(model)
        params, rest = tp.partition(model, layout)
        direction = jnp.cos(jnp.arange(layout.size, dtype=float))
        loss = lambda model, x, t: jnp.sum(derivative(model, x, t) ** 3)
        mean = lambda model, x, t: jnp.mean(jax.vmap(loss, (None, 0, 0))(model, x, t))
        of = lambda params, x, t: loss(tp.combine(params, rest), x, t)
        return (
            derivative(model, x[0], t[0]),
            jax.grad(of, (0, 1, 2))(params, x[0], t[0]),
            tp.grad(mean, layout)(model, x, t),
            nested.hvp(mean, trainable=layout)(model, direction, x, t),
        )

    with enable_x64(True):
        model = _energy()
        got, want = jax.jit(lambda x, t: [everything(each, model, x, t) for each in DERIVATIVES[name]])(X, T)
        assert_close(got, want, 1e-11)


def test_derivatives_nested_in_each_other_call_the_function_once():
    model, w, x = {"w": jnp.array(0.7)}, 0.7, 0.3
    calls = []

    def sine(model, x):
        calls.append(x)
        return jnp.sin(model["w"] * x)

    for derivative in (nested.gradient, nested.jacobian):
        third = jax.jit(derivative(derivative(derivative(sine))))
        calls.clear()
        np.testing.assert_allclose(third(model, x), -(w**3) * np.cos(w * x), rtol=1e-5)
        assert len(calls) == 1
    in_w = -3 * w**2 * np.cos(w * x) + w**3 * x * np.sin(w * x)
    np.testing.assert_allclose(jax.jit(tp.grad(third))(model, x)["w"], in_w, rtol=1e-5)


def test_a_choice_by_values_outside_of_jit():
    gradient = nested.gradient(lambda model, x: model * x if x > 0 else -model * x**2)
    assert gradient(3.0, -2.0) == 12


@pytest.mark.parametrize(
    "name",
    ["ints and bools", "complex", "bf16 with f32", "functions and static fields", "transposed tie", "prng keys"],
)
def test_what_is_no_parameter_is_no_hindrance(name):
    model = ZOO[name].make()
    layout = ZOO[name].layout(model)

    def f(model, x):
        weights = [jnp.sum(jnp.abs(leaf).astype(jnp.float32) ** 2) for leaf in inexact_leaves(model)]
        return sum(jnp.sin(weight + i) * jnp.sum(x**2) for i, weight in enumerate(weights))

    x = jnp.arange(1.0, 3.0)
    loss = lambda gradient: lambda model, x: jnp.sum(gradient(model, x) ** 2)
    by_hand = lambda model, x: jax.grad(lambda x: f(model, x))(x)
    got, want = tp.jit(lambda model, x: [tp.grad(loss(g), layout)(model, x) for g in (nested.gradient(f), by_hand)])(
        model, x
    )
    assert_close(got, want, 1e-5 if name != "bf16 with f32" else 1e-2)


def test_parameters_in_bound_and_partial_models_and_in_closures():
    x, t = jnp.asarray(X[0], jnp.float32), jnp.float32(0.7)
    loss = lambda f, x, t: jnp.sum(nested.gradient(lambda f, x, t: f(x, t))(f, x, t) ** 2)
    captured = lambda model: jnp.sum(nested.gradient(lambda nothing, x: model.total(x, t))(None, x) ** 2)

    @tp.jit
    def run(model):
        return (
            tp.grad(lambda model: jnp.sum(nested.gradient(_total)(model, x, t) ** 2))(model),
            tp.grad(loss)(model.total, x, t),
            tp.grad(loss)(jax.tree_util.Partial(Energy.total, model), x, t),
            tp.grad(captured)(model),
        )

    want, bound, partial, in_closure = run(_energy())
    assert jnp.any(want.mlp.layers[0].weight != 0)
    assert_close(jax.tree.leaves(bound), jax.tree.leaves(want))
    assert_close(jax.tree.leaves(partial), jax.tree.leaves(want))
    assert_close(in_closure, want)


def test_they_cost_what_jax_costs_by_itself():
    model, x = {"w": jnp.eye(8)}, jnp.ones((5, 8))

    def recurrent(model, x):
        return jax.lax.scan(lambda state, each: (jnp.tanh(model["w"] @ state + each), None), jnp.zeros(8), x)[0]

    scalar = lambda model, x: jnp.sum(recurrent(model, x))
    for ours, plain in (
        (nested.gradient(scalar), jax.grad(scalar, 1)),
        (nested.jacobian(recurrent), jax.jacrev(recurrent, 1)),
    ):
        of = lambda f: jax.grad(lambda model, x: jnp.sum(f(model, x) ** 2))
        assert flops(of(ours), model, x) <= 1.01 * flops(of(plain), model, x)


def test_what_is_frozen_costs_nothing():
    mlp, x = eqx.nn.MLP(4, "scalar", 64, 4, jnp.tanh, key=jax.random.key(0)), jnp.ones((16, 4))
    layout = tp.layout(mlp, "layers.4")
    params, rest = tp.partition(mlp, layout)
    slopes = lambda model, x: jax.vmap(nested.gradient(lambda model, x: model(x)), (None, 0))(model, x)

    def by_hand(params, rest, x):
        slope = jax.vmap(lambda params, x: jax.grad(lambda x: tp.combine(params, rest)(x))(x), (None, 0))
        return jax.grad(lambda params: jnp.sum(slope(params, x) ** 2))(params)

    def of(trainable):
        grad = tp.grad(lambda model, x: jnp.sum(slopes(model, x) ** 2), trainable)
        return flops(lambda params, rest, x: grad(tp.combine(params, rest), x), params, rest, x)

    assert of(layout) <= 1.005 * flops(by_hand, params, rest, x)
    assert of(layout) <= 0.5 * of(None)


def test_a_jacobian_takes_the_fewer_sweeps():
    for weight in (np.ones((64, 2)), np.ones((2, 64))):
        jacobian = nested.jacobian(lambda weight, x: weight @ jnp.sin(x))
        assert flops(jacobian, weight, np.ones(weight.shape[1])) <= 4 * weight.size + 1000


def test_inputs_may_be_trees():
    f = lambda model, x: model["k"] * x["q"] @ x["p"][0] ** 2
    model = {"k": jnp.array(2.0)}
    x = {"q": jnp.array([1.0, 2.0]), "p": (jnp.array([3.0, -1.0]), None)}
    got = nested.gradient(f)(model, x)
    assert_close(got, {"q": 2 * x["p"][0] ** 2, "p": (4 * x["q"] * x["p"][0], None)})
    loss = lambda model: jnp.sum(nested.gradient(f)(model, x)["q"])
    np.testing.assert_allclose(tp.grad(loss)(model)["k"], 10.0)


def test_complex_inputs_and_parameters_follow_jax():
    f = lambda model, z: jnp.sum(jnp.abs(model["w"] * z) ** 2)
    model, z = {"w": jnp.array([1 + 2j, 0.5])}, jnp.array([1 - 1j, 2j])
    np.testing.assert_allclose(nested.gradient(f)(model, z), jax.grad(f, 1)(model, z), 1e-6)
    loss = lambda gradient: lambda w: jnp.sum(jnp.abs(gradient({"w": w}, z)) ** 2)
    want = jax.grad(loss(jax.grad(f, 1)))(model["w"])
    np.testing.assert_allclose(jax.grad(loss(nested.gradient(f)))(model["w"]), want, 1e-5)


@pytest.mark.parametrize("chunk", [None, 2])
def test_jacobians_of_any_shape(chunk):
    f = lambda model, x: jnp.sin(model["w"] * x[:, :1] + x[0, 1])
    model, x = {"w": jnp.array(2.0)}, jnp.arange(6.0).reshape(3, 2)
    cases = {
        (3, 1): f,
        (3, 2): lambda model, x: f(model, x) @ x[:1] * x[0, 0],
        (): lambda model, x: f(model, x)[0, 0],
        (1,): lambda model, x: jnp.full(1, 3.0),
        (0, 1): lambda model, x: f(model, x)[:0],
    }

    @jax.jit
    def run(model, x):
        both = lambda of: (nested.jacobian(of, chunk=chunk)(model, x), jax.jacobian(of, 1)(model, x))
        return list(map(both, cases.values()))

    for shape, (got, want) in zip(cases, run(model, x), strict=True):
        assert got.shape == (*shape, 3, 2)
        np.testing.assert_allclose(got, want, 1e-6)
    assert not jnp.any(nested.jacobian(lambda model, x: 3.0, chunk=chunk)(model, x))


def test_within_a_shard_map_that_checks_what_varies():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=first_devices(4))
    w, x = jnp.arange(6.0).reshape(3, 2) / 7, jnp.linspace(-1.0, 1.0, 16).reshape(8, 2)
    wide = lambda w, x: jnp.tanh(w @ x)
    tall = lambda w, x: jnp.sum(wide(w, x), keepdims=True)
    loop = lambda w, x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x * w[0]), x)
    batch = lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x)

    def run(w, x):
        return (
            batch(nested.gradient(lambda w, x: tall(w, x)[0]))(w, x),
            [batch(nested.jacobian(f, chunk=chunk))(w, x) for f in (wide, tall) for chunk in (None, 1)],
            [nested.batched_jacobian(batch(f))(w, x) for f in (wide, tall)],
            [batch(nested.laplacian(f))(w, x) for f in (wide, loop)],
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nested.laplacian has no rule")
        sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d")))
        assert_close(sharded(w, x), jax.jit(run)(w, x))


def test_errors(without_type_checks):
    f = lambda model, x: model["w"] * x
    model = {"w": np.ones(2, np.float32)}
    x = np.ones(2, np.float32)
    with pytest.raises(TypeError, match=r"expected f to return a scalar, got float32\[2\]; use nested.jacobian"):
        nested.gradient(f)(model, x)
    with pytest.raises(TypeError, match=r"expected f to return a real floating array, got int32\[\]"):
        nested.gradient(lambda model, x: jnp.argmax(x))(model, x)
    with pytest.raises(TypeError, match="expected f to return a real floating array, got tuple"):
        nested.gradient(lambda model, x: (x, x))(model, x)
    with pytest.raises(TypeError, match=r"expected x to be floating, got int32\[2\]; convert it, or pass it in \*args"):
        nested.gradient(f)(model, jnp.arange(2))
    with pytest.raises(TypeError, match=r"expected x to be floating, got int32\[2\] at 'a.1'; convert it"):
        nested.gradient(f)(model, {"a": [x, jnp.arange(2)]})
    with pytest.raises(TypeError, match=r"expected an array for x, got dict; for trees use nested.gradient"):
        nested.jacobian(f)(model, {"x": x})
    with pytest.raises(TypeError, match="expected x to be real and floating, got complex64"):
        nested.jacobian(f)(model, x.astype(np.complex64))
    with pytest.raises(TypeError, match="expected f to return a real floating array, got tuple"):
        nested.jacobian(lambda model, x: (x, x))(model, x)
    with pytest.raises(ValueError, match="chunk must be a whole number of sweeps, at least 1, got 0"):
        nested.jacobian(f, chunk=0)
