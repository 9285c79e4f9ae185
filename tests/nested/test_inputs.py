"""Derivatives in the input, of a point or a batch, are those of JAX, and their gradients reach everything."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeparams as tp
from treeparams import nested

from ..zoo import ZOO, Specimen, assert_close, enable_x64, filled, first_devices, flops, inexact_leaves


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


def energy():
    mlp = filled(eqx.nn.MLP, 3, 2, 4, 1, jax.nn.softplus)
    return Energy(mlp, jnp.ones(3), jnp.full(3, 0.1), jnp.arange(2))


call = lambda model, x, t: model(x, t)
total = lambda model, x, t: model.total(x, t)
table = lambda model, x, t: jnp.outer(model(x, t), x)
square = lambda w, z: jnp.sum(jnp.abs(w * z) ** 2)
of_tree = lambda k, x: k * x["q"] @ x["p"][0] ** 2
sine = lambda w, x: jnp.sin(w * x[:, :1] + x[0, 1])
SHAPES = [  # results of all that a Jacobian of x of shape (3, 2) can have
    sine,
    lambda w, x: sine(w, x) @ x[:1] * x[0, 0],
    lambda w, x: sine(w, x)[0, 0],
    lambda w, x: jnp.full(1, 3.0),
    lambda w, x: 3.0,
    lambda w, x: sine(w, x)[:0],
]
of_shapes = lambda jacobian: lambda w, x: [jacobian(f)(w, x) for f in SHAPES]
in_closure = lambda model, x, t: nested.input_gradient(lambda nothing, x: model.total(x, t))(None, x)
backward = jax.custom_vjp(lambda x: x**2)
backward.defvjp(lambda x: (x**2, x), lambda x, g: (2 * x * g,))
of_zoo = lambda model, x: sum(
    jnp.sin(jnp.sum(jnp.abs(leaf).astype(x.dtype) ** 2) + i) * jnp.sum(x**2)
    for i, leaf in enumerate(inexact_leaves(model))
)
of_many = lambda w, x, scale: scale * jnp.einsum("bij,jk->bikj", jnp.sin(x), w)


def alone_and_in_a_batch(derivative):
    values = lambda *args: jax.lax.stop_gradient(derivative(*args))
    return lambda model, x, t: (values(model, x[0], t[0]), jax.vmap(derivative, (None, 0, 0))(model, x, t))


def in_chunks(whole, chunked):
    return lambda model, x: (whole(model, x), jax.lax.stop_gradient(chunked(model, x)))


def of_samples(outputs):
    """Jacobians of a batch by ours, whole and in chunks, and by hand."""
    f = lambda model, x: jax.vmap(model)(x)[outputs]
    by_hand = lambda model, x: jax.vmap(jax.jacfwd(lambda x: f(model, x[None])[0]))(x)
    ours = (nested.input_jacobian(f, batched=True, chunk=chunk) for chunk in (None, 2))
    return in_chunks(*ours), in_chunks(by_hand, by_hand)


X, T = np.array([[0.3, -0.2, 0.5], [1.0, 0.4, -0.7]]), np.array([0.7, -1.1])
POINT, SAMPLES = (X[0], T[0]), np.random.default_rng(1).normal(size=(7, 3))
OF_ZOO = ("ints and bools", "complex", "transposed tie")
of_energy, of_mlp = Specimen(energy), Specimen(lambda: filled(eqx.nn.MLP, 3, 5, 4, 1, jnp.tanh))
of_array = lambda value: Specimen(lambda: jnp.asarray(value))
CASES = {  # ours, JAX's, the model and the other arguments
    **{
        name: (alone_and_in_a_batch(ours), alone_and_in_a_batch(by_jax), of_energy, (X, T))
        for name, ours, by_jax in (
            ("gradient", nested.input_gradient(total), jax.grad(total, 1)),
            ("jacobian by rows", nested.input_jacobian(call), jax.jacfwd(call, 1)),
            ("jacobian by columns", nested.input_jacobian(table), jax.jacfwd(table, 1)),
        )
    },
    "a bound method": (
        nested.input_gradient(lambda f, x, t: f(x, t)), jax.grad(lambda f, x, t: f(x, t), 1),
        Specimen(lambda: energy().total), POINT,
    ),
    "a closure": (in_closure, jax.grad(total, 1), of_energy, POINT),
    "trees": (
        nested.input_gradient(of_tree), jax.grad(of_tree, 1),
        of_array(2.0), ({"q": np.array([1.0, 2.0]), "p": (np.array([3.0, -1.0]), None)},),
    ),
    "complex numbers": (
        nested.input_gradient(square), jax.grad(square, 1), of_array([1 + 2j, 0.5]), (np.array([1 - 1j, 2j]),),
    ),
    "any shape": (
        in_chunks(of_shapes(nested.input_jacobian), of_shapes(lambda f: nested.input_jacobian(f, chunk=2))),
        in_chunks(*[of_shapes(lambda f: jax.jacobian(lambda w, x: jnp.asarray(f(w, x)), 1))] * 2),
        of_array(2.0), (np.arange(6.0).reshape(3, 2),),
    ),
    # Of each sample of a batch.
    "forward": (*of_samples(np.s_[:]), of_mlp, (SAMPLES,)),
    "backward": (*of_samples(np.s_[:, :2]), of_mlp, (SAMPLES,)),
    "one number": (*of_samples(np.s_[:, 0]), of_mlp, (SAMPLES,)),
    "a rule for vjp alone": (
        nested.input_jacobian(lambda w, x: w * jnp.sum(backward(x), 1), batched=True), lambda w, x: w * 2 * x,
        of_array(2.0), (SAMPLES,),
    ),
    "a batch of matrices": (
        nested.input_jacobian(of_many, batched=True),
        lambda w, x, scale: jax.vmap(jax.jacrev(lambda x: of_many(w, x[None], scale)[0]))(x),
        of_array(np.ones((4, 2))), (np.cos(np.arange(24.0)).reshape(2, 3, 4), 2.0),
    ),
    # What is no parameter is no hindrance.
    **{name: (nested.input_gradient(of_zoo), jax.grad(of_zoo, 1), ZOO[name], (np.arange(1.0, 3),)) for name in OF_ZOO},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_jax(name):
    """In the parameters and all that is beside them; of a gradient the second derivatives too."""
    ours, by_jax, specimen, args = CASES[name]
    with enable_x64(True):
        model = specimen.make()
        params, rest = tp.partition(model, specimen.layout(model))

        def everything(derivative):
            squares = lambda leaf: jnp.sum(jnp.abs(leaf) ** 2)
            loss = lambda model, *args: sum(map(squares, jax.tree.leaves(derivative(model, *args))))
            of = lambda params, args: loss(tp.combine(params, rest), *args)
            found = derivative(tp.combine(params, rest), *args), jax.grad(of, (0, 1))(params, args)
            direction = np.cos(np.arange(rest.layout.size, dtype=float))
            return (found, nested.hvp(loss, rest.layout)(model, direction, *args)) if name == "gradient" else found

        got, want = jax.jit(lambda params, args: [everything(ours), everything(by_jax)])(params, args)
        assert_close(got, want, 1e-5 if name in OF_ZOO else 1e-11)
    assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(want[1][0])[:1])


def test_derivatives_nested_in_each_other_call_the_function_once_and_may_choose_by_values():
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
    chosen = nested.input_gradient(lambda model, x: model * x if x > 0 else -model * x**2)
    assert chosen(3.0, -2.0) == 12


# -- What they cost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "derivative"), [((2, 64), jax.jacfwd), ((64, 2), jax.jacrev)])
def test_operations_are_those_of_the_fewer_sweeps(sizes, derivative):
    """Of a batch, those of the better `vmap` over a function of one sample."""
    weight, x = np.ones(sizes[::-1], np.float32), np.ones((16, sizes[0]), np.float32)
    jacobian = nested.input_jacobian(lambda weight, x: weight @ jnp.sin(x))
    assert flops(jacobian, weight, x[0]) <= 4 * weight.size + 1000
    net = lambda weight, x: jnp.tanh(weight @ jnp.tanh(weight.T @ weight @ jnp.sin(x)))
    whole = nested.input_jacobian(lambda weight, x: jax.vmap(net, (None, 0))(weight, x), batched=True)
    assert flops(whole, weight, x) <= 1.1 * flops(jax.vmap(derivative(net, 1), (None, 0)), weight, x)


def test_what_is_frozen_costs_nothing():
    mlp, x = filled(eqx.nn.MLP, 4, "scalar", 64, 4, jnp.tanh), jnp.ones((16, 4))
    layout = tp.layout(mlp, "layers.4")
    params, rest = tp.partition(mlp, layout)
    slopes = lambda of: lambda model, x: jnp.sum(jax.vmap(of, (None, 0))(model, x) ** 2)

    def of(trainable):
        grad = tp.grad(slopes(nested.input_gradient(lambda model, x: model(x))), trainable)
        return flops(lambda params, rest, x: grad(tp.combine(params, rest), x), params, rest, x)

    assert of(layout) <= 0.5 * of(None)


@pytest.mark.filterwarnings("ignore:nested.input_laplacian has no rule")
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

    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d")))
    assert_close(sharded(w, x), jax.jit(run)(w, x))


# -- Whether a function mixes the samples of a batch -------------------------------------------------------------------

XS = jax.device_put(SAMPLES.astype(np.float32))


@pytest.fixture(autouse=True)
def draws_by_numpy(monkeypatch):
    """The directions of a check: JAX would compile a program to draw by, for each shape."""
    draw = lambda _, shape, dtype: jnp.asarray(np.random.default_rng(0).normal(size=shape).astype(dtype))
    monkeypatch.setattr(jax.random, "normal", draw)


def of_batch(f, model=None, batched=True, **options):
    """The Jacobian of each sample, for f of the samples alone or of the model too."""
    of = tp.jit(f if model is not None else lambda _, x: f(x))
    return lambda *args: nested.input_jacobian(of, batched=batched, **options)(model, *args)


MIXING = {
    "normalisation": lambda x: x - jnp.mean(x, axis=0, keepdims=True),
    "order": lambda x: x[::-1],
    "two of them": lambda x: x.at[5].add(1e-3 * x[1]),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_found_out(name):
    for of in (MIXING[name], lambda x: jnp.sum(MIXING[name](x), 1)):
        with pytest.raises(ValueError, match=r"f mixes the samples of the batch .*; use jax\.jacobian"):
            of_batch(of, batched="check")(XS)


def test_mixing_is_seen_sample_by_sample_and_in_every_dtype():
    large, small = np.ones((7, 1), np.float32), np.zeros((7, 1), np.float32)
    large[0], small[1] = 1e5, 0.02
    with pytest.raises(ValueError, match="sample 1 with others"):
        of_batch(lambda x: large * x + small * x[2:3], batched="check")(jnp.ones((7, 3)))
    narrow = jax.device_put(SAMPLES.astype(jnp.bfloat16))
    of_batch(lambda w, x: jnp.tanh(x @ w), narrow[:3], "check")(narrow)
    of_batch(lambda x: jnp.tanh(x) * jnp.float16(1e-5), batched="check")(jnp.ones((7, 3), jnp.float16))  # subnormal
    # A check that finds nothing changes nothing.
    mlp = filled(eqx.nn.MLP, 3, 3, 4, 1, jnp.tanh)
    of = lambda model, x: jax.vmap(model)(x)
    checked, whole = of_batch(of, mlp, "check")(XS), tp.jit(nested.input_jacobian(of, batched=True))(mlp, XS)
    np.testing.assert_allclose(checked, whole, 1e-4, 1e-6)
    assert of_batch(lambda x: x**2, batched="check")(XS[:0]).shape == (0, 3, 3)
    assert jax.eval_shape(of_batch(lambda x: jnp.sum(x, axis=1)), XS[:0]).shape == (0, 3)


times, pair, ONES = (lambda w, x: w * x), (lambda w, x: (x, x)), np.ones(2, np.float32)
NO_ARRAY, NO_CHUNK = ("expected f to return a real floating array, got tuple", "chunk must be a whole number of sweeps")
ERRORS = [
    (lambda: nested.input_gradient(times)(ONES, ONES), TypeError, r"a scalar, got float32\[2\]; use nested.input_jaco"),
    (lambda: nested.input_gradient(pair)(ONES, ONES), TypeError, NO_ARRAY),
    (lambda: nested.input_gradient(times)(ONES, {"a": [jnp.arange(2)]}), TypeError, r"got int32\[2\] at 'a.0'; conver"),
    (lambda: nested.input_jacobian(times)(ONES, {"x": ONES}), TypeError, "array for x, got dict; for trees use nested"),
    (lambda: nested.input_jacobian(times)(ONES, ONES.astype(complex)), TypeError, "x to be real and floating, got"),
    (lambda: nested.input_jacobian(times, chunk=0)(ONES, ONES), ValueError, NO_CHUNK),
    (lambda: nested.input_jacobian(times, batched="yes"), ValueError, "batched must be True, False or 'check', go"),
    (lambda: of_batch(jnp.sum)(XS), ValueError, r"\(batch, ...\) to \(batch, ...\), got shapes \(7, 3\) and \(\)"),
    (lambda: of_batch(lambda x: x[0])(XS), ValueError, r"got shapes \(7, 3\) and \(3,\)"),
    (lambda: jax.jit(of_batch(jnp.sin, batched="check"))(XS), TypeError, "batched='check' needs values: use it only"),
]  # fmt: skip


def test_errors(without_type_checks):
    for call, error, words in ERRORS:
        with pytest.raises(error, match=words):
            call()
