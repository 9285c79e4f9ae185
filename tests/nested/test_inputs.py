"""Derivatives in the input, of a point or a batch, are those of JAX, and their gradients reach everything."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeparams as tp
from treeparams import nested

from ..long import some
from ..zoo import ZOO, assert_close, enable_x64, filled, first_devices, flops, inexact_leaves


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
    mlp = filled(eqx.nn.MLP, 3, 2, 4, 1, jax.nn.softplus)
    return Energy(mlp, jnp.ones(3), jnp.full(3, 0.1), jnp.arange(2))


X = np.array([[0.3, -0.2, 0.5], [1.0, 0.4, -0.7]])
T = np.array([0.7, -1.1])


_call = lambda model, x, t: model(x, t)
_total = lambda model, x, t: model.total(x, t)
_table = lambda model, x, t: jnp.outer(model(x, t), x)
DERIVATIVES = {
    "gradient": (nested.input_gradient(_total), jax.grad(_total, 1)),
    "jacobian by rows": (nested.input_jacobian(_call), jax.jacfwd(_call, 1)),
    "jacobian by columns": (nested.input_jacobian(_table), jax.jacfwd(_table, 1)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_values_and_gradients_are_those_of_jax(name):
    """In the parameters and all that is beside them; for one point and a batch; and second derivatives."""

    def everything(derivative, model, x, t):
        params, rest = tp.partition(model)
        loss = lambda model, x, t: jnp.sum(derivative(model, x, t) ** 3)
        mean = lambda model, x, t: jnp.mean(jax.vmap(loss, (None, 0, 0))(model, x, t))
        of = lambda params, x, t: mean(tp.combine(params, rest), x, t)
        found = derivative(model, x[0], t[0]), jax.grad(of, (0, 1, 2))(params, x, t)
        direction = np.cos(np.arange(rest.layout.size, dtype=float))
        return (found, nested.hvp(mean, rest.layout)(model, direction, x, t)) if name == "gradient" else found

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

    for derivative in (nested.input_gradient, nested.input_jacobian):
        third = jax.jit(derivative(derivative(derivative(sine))))
        calls.clear()
        np.testing.assert_allclose(third(model, x), -(w**3) * np.cos(w * x), rtol=1e-5)
        assert len(calls) == 1
    in_w = -3 * w**2 * np.cos(w * x) + w**3 * x * np.sin(w * x)
    np.testing.assert_allclose(jax.jit(tp.grad(third))(model, x)["w"], in_w, rtol=1e-5)


def test_a_choice_by_values_outside_of_jit():
    gradient = nested.input_gradient(lambda model, x: model * x if x > 0 else -model * x**2)
    assert gradient(3.0, -2.0) == 12


LONG = ("bf16 with f32", "functions and static fields", "prng keys")


@pytest.mark.parametrize("name", some(["ints and bools", "complex", "transposed tie", *LONG], LONG))
def test_what_is_no_parameter_is_no_hindrance(name):
    model = ZOO[name].make()
    layout = ZOO[name].layout(model)

    def f(model, x):
        weights = [jnp.sum(jnp.abs(leaf).astype(jnp.float32) ** 2) for leaf in inexact_leaves(model)]
        return sum(jnp.sin(weight + i) * jnp.sum(x**2) for i, weight in enumerate(weights))

    by_hand = lambda model, x: jax.grad(lambda x: f(model, x))(x)
    losses = [lambda model, x, of=of: jnp.sum(of(model, x) ** 2) for of in (nested.input_gradient(f), by_hand)]
    got, want = tp.jit(lambda model, x: [tp.grad(loss, layout)(model, x) for loss in losses])(model, jnp.arange(1.0, 3))
    assert_close(got, want, 1e-5 if name != "bf16 with f32" else 1e-2)


def test_parameters_in_bound_and_partial_models_and_in_closures():
    x, t = jnp.asarray(X[0], jnp.float32), jnp.float32(0.7)
    of = lambda f, model, *args: jnp.sum(nested.input_gradient(f)(model, *args) ** 2)
    called = tp.grad(lambda f: of(lambda f, x, t: f(x, t), f, x, t))
    captured = tp.grad(lambda model: of(lambda nothing, x: model.total(x, t), None, x))
    run = tp.jit(
        lambda model: [
            tp.grad(lambda model: of(_total, model, x, t))(model),
            called(model.total),
            called(jax.tree_util.Partial(Energy.total, model)),
            captured(model),
        ]
    )
    want, *others = run(_energy())
    assert np.any(want.mlp.layers[0].weight != 0)
    for got in others:
        assert_close(jax.tree.leaves(got), jax.tree.leaves(want))


def test_they_cost_what_jax_costs_by_itself():
    model, x = {"w": jnp.eye(8)}, jnp.ones((5, 8))

    def recurrent(model, x):
        return jax.lax.scan(lambda state, each: (jnp.tanh(model["w"] @ state + each), None), jnp.zeros(8), x)[0]

    of = lambda f: jax.grad(lambda model, x: jnp.sum(f(model, x) ** 2))
    ours, plain = of(nested.input_jacobian(recurrent)), of(jax.jacrev(recurrent, 1))
    assert flops(ours, model, x) <= 1.01 * flops(plain, model, x)
    for weight in (np.ones((64, 2)), np.ones((2, 64))):  # the fewer sweeps
        jacobian = nested.input_jacobian(lambda weight, x: weight @ jnp.sin(x))
        assert flops(jacobian, weight, np.ones(weight.shape[1])) <= 4 * weight.size + 1000


def test_what_is_frozen_costs_nothing():
    mlp, x = filled(eqx.nn.MLP, 4, "scalar", 64, 4, jnp.tanh), jnp.ones((16, 4))
    layout = tp.layout(mlp, "layers.4")
    params, rest = tp.partition(mlp, layout)
    slopes = lambda of: lambda model, x: jnp.sum(jax.vmap(of, (None, 0))(model, x) ** 2)

    def by_hand(params, rest, x):
        of = lambda params, x: jax.grad(lambda x: tp.combine(params, rest)(x))(x)
        return jax.grad(slopes(of))(params, x)

    def of(trainable):
        grad = tp.grad(slopes(nested.input_gradient(lambda model, x: model(x))), trainable)
        return flops(lambda params, rest, x: grad(tp.combine(params, rest), x), params, rest, x)

    assert of(layout) <= 1.005 * flops(by_hand, params, rest, x)
    assert of(layout) <= 0.5 * of(None)


def test_inputs_may_be_trees_or_complex():
    f = lambda model, x: model["k"] * x["q"] @ x["p"][0] ** 2
    model = {"k": jnp.array(2.0)}
    x = {"q": jnp.array([1.0, 2.0]), "p": (jnp.array([3.0, -1.0]), None)}
    square = lambda w, z: jnp.sum(jnp.abs(w * z) ** 2)
    w, z = jnp.array([1 + 2j, 0.5]), jnp.array([1 - 1j, 2j])

    @jax.jit
    def run(model, x, w, z):
        loss = lambda model: jnp.sum(nested.input_gradient(f)(model, x)["q"])
        both = lambda of: (of(w, z), jax.grad(lambda w: jnp.sum(jnp.abs(of(w, z)) ** 2))(w))
        complex_ones = list(map(both, (nested.input_gradient(square), jax.grad(square, 1))))
        return nested.input_gradient(f)(model, x), tp.grad(loss)(model)["k"], complex_ones

    got, in_k, complex_ones = run(model, x, w, z)
    q, p = np.asarray(x["q"]), np.asarray(x["p"][0])
    assert_close(got, {"q": 2 * p**2, "p": (4 * q * p, None)})
    np.testing.assert_allclose(in_k, 10.0)
    assert_close(*complex_ones, 1e-5)


def test_jacobians_of_any_shape():
    f = lambda model, x: jnp.sin(model["w"] * x[:, :1] + x[0, 1])
    model, x = {"w": jnp.array(2.0)}, np.arange(6, dtype=np.float32).reshape(3, 2)
    cases = {
        (3, 1): f,
        (3, 2): lambda model, x: f(model, x) @ x[:1] * x[0, 0],
        (): lambda model, x: f(model, x)[0, 0],
        (1,): lambda model, x: jnp.full(1, 3.0),
        (0, 1): lambda model, x: f(model, x)[:0],
    }
    jacobians = lambda of: [nested.input_jacobian(of, chunk=chunk) for chunk in (None, 2)]
    run = jax.jit(lambda *at: [[each(*at) for each in (*jacobians(of), jax.jacobian(of, 1))] for of in cases.values()])
    for shape, (*found, want) in zip(cases, run(model, x), strict=True):
        for got in found:
            assert got.shape == (*shape, 3, 2)
            np.testing.assert_allclose(got, want, 1e-6)
    assert not any(jnp.any(each(model, x)) for each in jacobians(lambda model, x: 3.0))


def test_within_a_shard_map_that_checks_what_varies():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=first_devices(4))
    w, x = jnp.arange(6.0).reshape(3, 2) / 7, jnp.linspace(-1.0, 1.0, 16).reshape(8, 2)
    wide = lambda w, x: jnp.tanh(w @ x)
    tall = lambda w, x: jnp.sum(wide(w, x), keepdims=True)
    loop = lambda w, x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x * w[0]), x)
    batch = lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x)

    def run(w, x):
        return (
            batch(nested.input_gradient(lambda w, x: tall(w, x)[0]))(w, x),
            [batch(nested.input_jacobian(f, chunk=chunk))(w, x) for f in (wide, tall) for chunk in (None, 1)],
            [nested.input_jacobian(batch(f), batched=True)(w, x) for f in (wide, tall)],
            [batch(nested.input_laplacian(f))(w, x) for f in (wide, loop)],
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nested.input_laplacian has no rule")
        sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d")))
        assert_close(sharded(w, x), jax.jit(run)(w, x))


# -- Of each sample of a batch -----------------------------------------------------------------------------------------

MLP = filled(eqx.nn.MLP, 3, 5, 4, 1, jnp.tanh)
XS = jax.device_put(np.random.default_rng(1).normal(size=(7, 3)).astype(np.float32))


@pytest.fixture(autouse=True)
def draws_by_numpy(monkeypatch):
    """The directions of a check: JAX would compile a program to draw by, for each shape."""
    draw = lambda _, shape, dtype: jnp.asarray(np.random.default_rng(0).normal(size=shape).astype(dtype))
    monkeypatch.setattr(jax.random, "normal", draw)


def of_batch(f, model=None, batched=True, **options):
    """The Jacobian of each sample, for f of the samples alone or of the model too."""
    of = tp.jit(f if model is not None else lambda _, x: f(x))
    return lambda *args: nested.input_jacobian(of, batched=batched, **options)(model, *args)


@pytest.mark.parametrize("outputs", [np.s_[:], np.s_[:, :2], np.s_[:, 0]], ids=["forward", "backward", "one number"])
def test_it_is_the_jacobian_of_each_sample(outputs):
    """And its gradient reaches the parameters."""
    f = lambda model, x: jax.vmap(model)(x)[outputs]
    by_hand = lambda model, x: jax.vmap(jax.jacfwd(lambda x: f(model, x[None])[0]))(x)
    loss = lambda of: lambda model: jnp.sum(of(model, XS) ** 2)
    both = lambda of: (of(MLP, XS), inexact_leaves(tp.grad(loss(of))(MLP)))
    ours, in_chunks = (nested.input_jacobian(f, batched=True, chunk=chunk) for chunk in (None, 2))
    got, want, chunked = tp.jit(lambda: [both(ours), both(by_hand), in_chunks(MLP, XS)])()
    assert got[0].shape == want[0].shape
    assert_close(got, want, 1e-4)
    np.testing.assert_allclose(chunked, want[0], 1e-4, 1e-6)
    if outputs == np.s_[:]:  # a check that finds nothing changes nothing
        checked = of_batch(lambda model, x: jax.vmap(model)(x), MLP, "check")(XS)
        np.testing.assert_allclose(checked, want[0], 1e-4, 1e-6)


def test_batches_of_any_shape_and_rule():
    f = jax.custom_vjp(lambda x: x**2)
    f.defvjp(lambda x: (x**2, x), lambda x, g: (2 * x * g,))
    np.testing.assert_allclose(of_batch(lambda x: jnp.sum(f(x), 1))(XS), 2 * np.asarray(XS), 1e-6)  # backward alone
    assert of_batch(lambda x: x**2, batched="check")(XS[:0]).shape == (0, 3, 3)
    assert of_batch(lambda x: jnp.sum(x, axis=1))(XS[:0]).shape == (0, 3)

    of_many = lambda w, x, scale: scale * jnp.einsum("bij,jk->bikj", jnp.sin(x), w)
    w, x = np.ones((4, 2), np.float32), np.cos(np.arange(24, dtype=np.float32)).reshape(2, 3, 4)
    by_hand = jax.vmap(jax.jacrev(lambda x: of_many(w, x[None], 2.0)[0]))
    got, want = jax.jit(lambda x: (of_batch(of_many, w)(x, 2.0), by_hand(x)))(x)
    assert got.shape == (2, 3, 2, 4, 3, 4)
    np.testing.assert_allclose(got, want, 1e-5, 1e-6)


@pytest.mark.parametrize("sizes", [(4, 32), (32, "scalar")])
def test_operations_are_those_of_the_fewer_sweeps(sizes):
    """And of the better `vmap` over a function of one sample."""
    params, rest = tp.partition(filled(eqx.nn.MLP, *sizes, 64, 3, jnp.tanh))
    x, derivative = jnp.ones((16, sizes[0])), jax.jacrev if sizes[0] == 32 else jax.jacfwd
    f = lambda params, x: tp.combine(params, rest)(x)
    whole = nested.input_jacobian(lambda params, x: jax.vmap(f, (None, 0))(params, x), batched=True)
    assert flops(whole, params, x) <= 1.1 * flops(jax.vmap(derivative(f, 1), (None, 0)), params, x)


@pytest.mark.parametrize(
    "f",
    [lambda x: x - jnp.mean(x, axis=0, keepdims=True), lambda x: x[::-1], lambda x: x.at[5].add(1e-3 * x[1])],
    ids=["normalisation", "order", "two of them"],
)
def test_what_mixes_samples_is_found_out(f):
    for of in (f, lambda x: jnp.sum(f(x), 1)):
        with pytest.raises(ValueError, match=r"f mixes the samples of the batch .*; use jax\.jacobian"):
            of_batch(of, batched="check")(XS)


def test_mixing_is_seen_sample_by_sample_and_in_every_dtype():
    large, small = np.array([[1e5], [1], [1], [1]], np.float32), np.array([[0], [0.02], [0], [0]], np.float32)
    slightly = lambda x: large * x + small * x[2:3]
    with pytest.raises(ValueError, match="sample 1 with others"):
        of_batch(slightly, batched="check")(jnp.ones((4, 3)))
    narrow = jax.device_put(np.asarray(XS).astype(jnp.bfloat16))
    of_batch(lambda w, x: jnp.tanh(x @ w.T), narrow, "check")(narrow)
    of_batch(lambda x: jnp.tanh(x) * jnp.float16(1e-5), batched="check")(jnp.ones((3, 3), jnp.float16))  # subnormal


# -- Errors ------------------------------------------------------------------------------------------------------------

times, pair, ONES = (lambda w, x: w * x), (lambda w, x: (x, x)), np.ones(2, np.float32)
ints = lambda w, x: jnp.argmax(x)
NO_ARRAY, NO_CHUNK = ("expected f to return a real floating array, got tuple", "chunk must be a whole number of sweeps")
ERRORS = [
    (lambda: nested.input_gradient(times)(ONES, ONES), TypeError, r"a scalar, got float32\[2\]; use nested.input_jaco"),
    (lambda: nested.input_gradient(ints)(ONES, ONES), TypeError, r"return a real floating array, got int32\[\]"),
    (lambda: nested.input_gradient(pair)(ONES, ONES), TypeError, NO_ARRAY),
    (lambda: nested.input_gradient(times)(ONES, jnp.arange(2)), TypeError, r"x to be floating, got int32\[2\]; con"),
    (lambda: nested.input_gradient(times)(ONES, {"a": [jnp.arange(2)]}), TypeError, r"got int32\[2\] at 'a.0'; conver"),
    (lambda: nested.input_jacobian(times)(ONES, {"x": ONES}), TypeError, "array for x, got dict; for trees use nested"),
    (lambda: nested.input_jacobian(times)(ONES, ONES.astype(complex)), TypeError, "x to be real and floating, got"),
    (lambda: nested.input_jacobian(pair)(ONES, ONES), TypeError, NO_ARRAY),
    (lambda: nested.input_jacobian(times, chunk=0)(ONES, ONES), ValueError, NO_CHUNK),
    (lambda: nested.input_jacobian(times, batched="yes"), ValueError, "batched must be True, False or 'check', go"),
    (lambda: of_batch(jnp.sum)(XS), ValueError, r"\(batch, ...\) to \(batch, ...\), got shapes \(7, 3\) and \(\)"),
    (lambda: of_batch(lambda x: x[0])(XS), ValueError, r"got shapes \(7, 3\) and \(3,\)"),
    (lambda: of_batch(jnp.sin)(1.0), ValueError, r"got shapes \(\) and \(\)"),
    (lambda: of_batch(jnp.sin)(jnp.arange(3)), TypeError, "expected x to be real and floating, got int32"),
    (lambda: of_batch(lambda x: (x,))(XS), TypeError, NO_ARRAY),
    (lambda: jax.jit(of_batch(jnp.sin, batched="check"))(XS), TypeError, "batched='check' needs values: use it only"),
    (lambda: of_batch(jnp.sin, chunk=0)(XS), ValueError, NO_CHUNK),
]  # fmt: skip


def test_errors(without_type_checks):
    for call, error, words in ERRORS:
        with pytest.raises(error, match=words):
            call()
