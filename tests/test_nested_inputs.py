"""Derivatives in the input, within losses: the same in every order, and their gradients reach everything."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import nested

from .zoo import ZOO, assert_close, enable_x64, flops, inexact_leaves

ORDERS = ["reverse/reverse", "forward/reverse", "reverse/forward"]
by_order = pytest.mark.parametrize("mode", ORDERS)


# -- Values that are known


def _of_norm(mode):
    gradient = nested.gradient(lambda model, x: 1 / jnp.linalg.norm(x), mode=mode)
    return lambda x: jnp.sum(gradient(None, x)) ** 3


@by_order
def test_a_function_of_a_gradient(mode):
    with enable_x64(True):
        x, h = jnp.arange(1.0, 6.0), _of_norm(mode)
        want = [-1.80846031e-06, 6.32961107e-06, 1.44676824e-05, 2.26057538e-05, 3.07438252e-05]
        np.testing.assert_allclose(h(x), -4.973265838810882e-05, rtol=1e-12)
        eager = jax.grad(h)(x)
        np.testing.assert_allclose(eager, want, rtol=1e-7)
        compiled = jax.jit(lambda x: [of(h)(x) for of in (jax.grad, jax.jacfwd, jax.hessian, _forward_twice)])
        *slopes, hessian, forward = compiled(x)
        for slope in (eager, *slopes):
            np.testing.assert_allclose(slope, _by_hand(x), rtol=1e-12)
        for got in (hessian, forward):
            np.testing.assert_allclose(got, _hessian_of_norm(), rtol=1e-11, atol=1e-18)
        steps = 1e-5 * np.eye(5)
        numeric = (jax.jit(jax.vmap(h))(x[None] + steps) - jax.jit(jax.vmap(h))(x[None] - steps)) / 2e-5
        np.testing.assert_allclose(numeric, want, rtol=1e-6)


def _forward_twice(h):
    return jax.jacfwd(jax.jacfwd(h))


@functools.cache
def _hessian_of_norm():
    h = lambda x: jnp.sum(jax.grad(lambda x: 1 / jnp.linalg.norm(x))(x)) ** 3
    return jax.jit(jax.hessian(h))(jnp.arange(1.0, 6.0))


def _by_hand(x):
    """Of (-sum(x) / r^3)^3."""
    s, r = np.sum(x), np.linalg.norm(x)
    return 3 * (s / r**3) ** 2 * (-1 / r**3 + 3 * s * np.asarray(x) / r**5)


# -- All orders, all products


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
    mlp = eqx.nn.MLP(3, 2, 4, 2, jax.nn.softplus, key=jax.random.key(0))
    return Energy(mlp, jnp.ones(3), jnp.full(3, 0.1), jnp.arange(2))


X = np.array([[0.3, -0.2, 0.5], [1.0, 0.4, -0.7]])
T = np.array([0.7, -1.1])

LOSSES = {
    "gradient": lambda mode: lambda m, x, t: jnp.sum(nested.gradient(_total, mode=mode)(m, x, t) ** 3),
    "jacobian": lambda mode: lambda m, x, t: jnp.sum(nested.jacobian(_call, mode=mode)(m, x, t) ** 3),
    "vjp": lambda mode: lambda m, x, t: _cubes(nested.vjp(_call, mode=mode)(m, x, jnp.sin(x[:2]), t)),
    "jvp": lambda mode: lambda m, x, t: _cubes(nested.jvp(_call, mode=mode)(m, x, jnp.cos(x) * t, t)),
}
PLAIN = {
    "gradient": lambda m, x, t: jnp.sum(jax.grad(lambda x: m.total(x, t))(x) ** 3),
    "jacobian": lambda m, x, t: jnp.sum(jax.jacfwd(lambda x: m(x, t))(x) ** 3),
    "vjp": lambda m, x, t: _cubes((m(x, t), *jax.vjp(lambda x: m(x, t), x)[1](jnp.sin(x[:2])))),
    "jvp": lambda m, x, t: _cubes(jax.jvp(lambda x: m(x, t), (x,), (jnp.cos(x) * t,))),
}


def _call(model, x, t):
    return model(x, t)


def _total(model, x, t):
    return model.total(x, t)


def _cubes(values):
    return sum(jnp.sum(value**3) for value in values)


def _gradients(loss, model, *data):
    """In the parameters and in all that is beside them."""
    layout = tp.layout(model)
    params, rest = tp.partition(model, layout)
    of = lambda params, *data: loss(tp.combine(params, rest), *data)
    return jax.grad(of, tuple(range(1 + len(data))))(params, *data)


@functools.cache
def _by_jax(name):
    """The value of a loss and its gradients."""
    model, plain = _energy(), PLAIN[name]
    return jax.jit(lambda x, t: (plain(model, x, t), _gradients(plain, model, x, t)))(X[0], T[0])


@pytest.mark.parametrize("name", LOSSES)
def test_the_default_order_has_the_same_value(name):
    with enable_x64(True):
        got = LOSSES[name](None)(_energy(), jnp.asarray(X[0]), jnp.asarray(T[0]))
        np.testing.assert_allclose(got, _by_jax(name)[0], rtol=1e-12)


@by_order
@pytest.mark.parametrize("name", LOSSES)
def test_every_order_has_the_same_gradient(name, mode):
    with enable_x64(True):
        model, loss = _energy(), LOSSES[name](mode)
        got, gradients = jax.jit(lambda x, t: (loss(model, x, t), _gradients(loss, model, x, t)))(X[0], T[0])
        want, by_jax = _by_jax(name)
        np.testing.assert_allclose(got, want, rtol=1e-12)
        assert_close(gradients, by_jax, 1e-12)


def _gradient_and_product(loss):
    """Of the mean over a batch."""
    model = _energy()
    layout = tp.layout(model, "mlp.layers.1")
    direction = jnp.cos(jnp.arange(layout.size, dtype=float))
    mean = lambda m, x, t: jnp.mean(jax.vmap(loss, (None, 0, 0))(m, x, t))
    return lambda x, t: (
        tp.grad(mean, layout)(model, x, t),
        nested.hvp(mean, model, direction, x, t, trainable=layout),
    )


@functools.cache
def _gradient_and_product_by_jax(name):
    return jax.jit(_gradient_and_product(PLAIN[name]))(X, T)


@by_order
@pytest.mark.parametrize("name", ["gradient", "jvp"])
def test_batches_sequences_and_curvature(name, mode):
    with enable_x64(True):
        model, loss = _energy(), LOSSES[name](mode)
        layout = tp.layout(model, "mlp.layers.1")
        scanned = lambda m, x, t: jax.lax.scan(lambda c, xt: (c + loss(m, *xt), None), 0.0, (x, t))[0]
        both = _gradient_and_product(loss)
        (ours, product), in_scan = jax.jit(lambda x, t: (both(x, t), tp.grad(scanned, layout)(model, x, t)))(X, T)
        plain, wanted = _gradient_and_product_by_jax(name)
        assert_close(ours, plain, 1e-11)
        assert_close(jax.tree.map(lambda leaf: leaf / 2, in_scan), plain, 1e-11)
        assert_close(product, wanted, 1e-10)


@by_order
def test_third_derivatives_and_gradients_within_gradients(mode):
    with enable_x64(True):
        model, x = {"w": jnp.array(0.7)}, jnp.array(0.3)
        first = nested.gradient(lambda model, x: jnp.sin(model["w"] * x), mode=mode)
        second = nested.gradient(first, mode=mode)
        third = nested.gradient(second, mode=mode)
        w = 0.7
        for got, want in ((second, -(w**2) * np.sin(w * x)), (third, -(w**3) * np.cos(w * x))):
            np.testing.assert_allclose(got(model, x), want, rtol=1e-12)
        in_w = -3 * w**2 * np.cos(w * x) + w**3 * x * np.sin(w * x)
        np.testing.assert_allclose(tp.grad(third)(model, x)["w"], in_w, rtol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "ints and bools",
        "complex",
        "bf16 with f32",
        "functions and static fields",
        "frozen tie",
        "transposed tie",
        "prng keys",
        "numpy leaves",
        "empty leaves",
    ],
)
def test_what_is_no_parameter_is_no_hindrance(name):
    model = ZOO[name].make()
    layout = ZOO[name].layout(model)

    def f(model, x):
        weights = [jnp.sum(jnp.abs(leaf).astype(jnp.float32) ** 2) for leaf in inexact_leaves(model)]
        return sum(jnp.sin(weight + i) * jnp.sum(x**2) for i, weight in enumerate(weights))

    x = jnp.arange(1.0, 3.0)
    loss = lambda mode: lambda model, x: jnp.sum(nested.gradient(f, mode=mode)(model, x) ** 2)
    modes = (None, *ORDERS[1:])
    want, *results = tp.jit(lambda model, x: [tp.grad(loss(mode), layout)(model, x) for mode in modes])(model, x)
    for got in results:
        assert_close(got, want, 1e-5 if name != "bf16 with f32" else 1e-2)


# -- Which order it is


def _square(x, forward=True):
    """A square that can be differentiated in reverse, and of which the derivative cannot unless it is to be forward."""
    slope = (lambda x: 2 * x) if forward else _square_of_slope
    square = jax.custom_vjp(lambda x: x**2)
    square.defvjp(lambda x: (x**2, x), lambda x, g: (slope(x) * g,))
    return square(x)


def _square_of_slope(x):
    double = jax.custom_vjp(lambda x: 2 * x)
    double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    return double(x)


@pytest.mark.parametrize("derivative", ["gradient", "vjp", "jacobian"])
def test_each_order_is_the_one_that_is_asked_for(derivative):
    """A rule for `vjp` cannot go forward: it shows in which direction each of the two derivatives goes."""

    def works(mode, forward):
        f = lambda w, x: jnp.sum(_square(w * x, forward))
        g = {
            "gradient": lambda: nested.gradient(f, mode=mode),
            "vjp": lambda: lambda w, x: nested.vjp(f, mode=mode)(w, x, 1.0)[1],
            "jacobian": lambda: nested.jacobian(f, mode=mode),
        }[derivative]()
        try:
            found = jax.grad(lambda w: jnp.sum(g(w, jnp.array([3.0, 1.0]))))(2.0)
        except (TypeError, NotImplementedError):
            return False
        np.testing.assert_allclose(found, 32.0)  # of 2 w^2 times 4
        return True

    assert works("reverse/reverse", True)
    assert works("reverse/reverse", False)
    assert works("forward/reverse", True)
    assert not works("forward/reverse", False)
    assert not works("reverse/forward", True)


def _recurrent(model, x):
    step = lambda state, each: (jnp.tanh(model["w"] @ state + each), None)
    return jax.lax.scan(step, jnp.zeros(8), x)[0]


def test_defaults_cost_what_jax_costs_by_itself():
    model, x = {"w": jnp.eye(8)}, jnp.ones((5, 8))
    scalar = lambda model, x: jnp.sum(_recurrent(model, x))
    plain = {
        "gradient": lambda model, x: jax.grad(scalar, 1)(model, x),
        "vjp": lambda model, x: jax.vjp(lambda x: _recurrent(model, x), x)[1](jnp.ones(8))[0],
        "jvp": lambda model, x: jax.jvp(lambda x: _recurrent(model, x), (x,), (x,))[1],
    }
    ours = {
        "gradient": nested.gradient(scalar),
        "vjp": lambda model, x: nested.vjp(_recurrent)(model, x, jnp.ones(8))[1],
        "jvp": lambda model, x: nested.jvp(_recurrent)(model, x, x)[1],
    }
    for name in plain:
        for of in (lambda f: f, lambda f: jax.grad(lambda model, x: jnp.sum(f(model, x) ** 2))):
            assert flops(of(ours[name]), model, x) <= 1.01 * flops(of(plain[name]), model, x)


def test_value_and_product_are_of_one_pass():
    model, x = {"w": jnp.eye(8)}, jnp.ones((5, 8))
    count = lambda f: str(jax.make_jaxpr(f)(model, x)).count("scan[")
    assert count(lambda model, x: nested.jvp(_recurrent)(model, x, x)) == 1
    assert count(lambda model, x: nested.vjp(_recurrent)(model, x, jnp.ones(8))) == 2


@by_order
def test_numbers_that_are_differentiated_outside_of_jit(mode):
    f = lambda model, x, n: model * x**n
    gradient = nested.gradient(f, mode=mode)
    np.testing.assert_allclose(jax.grad(lambda m: gradient(m, 2.0, 3))(1.5), 12.0)
    np.testing.assert_allclose(jax.jvp(lambda x: gradient(1.5, x, 3), (2.0,), (1.0,))[1], 18.0)
    value, product = nested.vjp(lambda model, x: 3.0, mode=mode)(None, 2.0, 1.0)
    assert (value, product) == (3, 0)


# -- What the gradient reaches


@pytest.mark.parametrize("mode", [None, *ORDERS])
def test_parameters_in_bound_and_partial_models_and_in_closures(mode):
    x, t = jnp.asarray(X[0], jnp.float32), jnp.float32(0.7)
    apply = lambda f, x, t: f(x, t)
    loss = lambda f, x, t: jnp.sum(nested.gradient(apply, mode=mode)(f, x, t) ** 2)

    def captured(model):
        gradient = nested.gradient(lambda nothing, x: model.total(x, t), mode=mode)
        return jnp.sum(gradient(None, x) ** 2)

    def run(model):
        return (
            tp.grad(lambda model: jnp.sum(nested.gradient(_total, mode=mode)(model, x, t) ** 2))(model),
            tp.grad(loss)(model.total, x, t),
            tp.grad(loss)(jax.tree_util.Partial(Energy.total, model), x, t),
            tp.grad(captured)(model),
        )

    want, bound, partial, in_closure = (tp.jit(run) if mode else run)(_energy())
    assert jnp.any(want.mlp.layers[0].weight != 0)
    assert_close(jax.tree.leaves(bound), jax.tree.leaves(want))
    assert_close(jax.tree.leaves(partial), jax.tree.leaves(want))
    assert_close(in_closure, want)


@by_order
def test_a_loss_of_the_output_and_its_gradient(mode):
    """A fit of values and slopes, as of energies and forces."""
    x = jnp.linspace(-1.0, 1.0, 9)
    f = lambda model, x: model["a"] * x**2 + model["b"] * x

    def loss(model):
        y, slope = jax.vmap(lambda x: nested.vjp(f, mode=mode)(model, x, 1.0))(x)
        again = jax.vmap(nested.gradient(f, mode=mode), (None, 0))(model, x)
        return jnp.mean((y - 2 * x**2) ** 2 + (slope - 4 * x) ** 2 + 0 * again)

    model = {"a": jnp.array(1.0), "b": jnp.array(0.5)}
    gradient = tp.grad(loss)(model)
    by_hand = {
        "a": jnp.mean(2 * (-(x**2) + 0.5 * x) * x**2 + 2 * (-2 * x + 0.5) * 2 * x),
        "b": jnp.mean(2 * (-(x**2) + 0.5 * x) * x + 2 * (-2 * x + 0.5)),
    }
    assert_close(gradient, by_hand, 1e-4)


def test_what_is_frozen_costs_nothing():
    mlp, x = eqx.nn.MLP(4, "scalar", 64, 4, jnp.tanh, key=jax.random.key(0)), jnp.ones((16, 4))
    layout = tp.layout(mlp, "layers.4")
    params, rest = tp.partition(mlp, layout)

    def by_hand(params, rest, x):
        slope = jax.vmap(lambda params, x: jax.grad(lambda x: tp.combine(params, rest)(x))(x), (None, 0))
        return jax.grad(lambda params: jnp.sum(slope(params, x) ** 2))(params)

    def of(mode, trainable):
        gradient = nested.gradient(lambda model, x: model(x), mode=mode)
        grad = tp.grad(lambda model, x: jnp.sum(jax.vmap(gradient, (None, 0))(model, x) ** 2), trainable)
        return flops(lambda params, rest, x: grad(tp.combine(params, rest), x), params, rest, x)

    want = flops(by_hand, params, rest, x)
    for mode in ORDERS:
        ours = of(mode, layout)
        assert ours <= 1.005 * want
        assert ours <= 0.5 * of(mode, None)


# -- Inputs of other kinds


@by_order
def test_inputs_may_be_trees(mode):
    f = lambda model, x: model["k"] * x["q"] @ x["p"][0] ** 2
    model = {"k": jnp.array(2.0)}
    x = {"q": jnp.array([1.0, 2.0]), "p": (jnp.array([3.0, -1.0]), None)}
    got = nested.gradient(f, mode=mode)(model, x)
    assert_close(got, {"q": 2 * x["p"][0] ** 2, "p": (4 * x["q"] * x["p"][0], None)})
    loss = lambda model: jnp.sum(nested.gradient(f, mode=mode)(model, x)["q"])
    np.testing.assert_allclose(tp.grad(loss)(model)["k"], 10.0)
    y, product = nested.jvp(f, mode=mode)(model, x, {"q": jnp.ones(2), "p": (jnp.zeros(2), None)})
    np.testing.assert_allclose([y, product], [22.0, 20.0])


@by_order
def test_complex_inputs_and_parameters_follow_jax(mode):
    f = lambda model, z: jnp.sum(jnp.abs(model["w"] * z) ** 2)
    model, z = {"w": jnp.array([1 + 2j, 0.5])}, jnp.array([1 - 1j, 2j])
    np.testing.assert_allclose(nested.gradient(f, mode=mode)(model, z), jax.grad(f, 1)(model, z), 1e-6)
    loss = lambda gradient: lambda w: jnp.sum(jnp.abs(gradient({"w": w}, z)) ** 2)
    want = jax.grad(loss(jax.grad(f, 1)))(model["w"])
    np.testing.assert_allclose(jax.grad(loss(nested.gradient(f, mode=mode)))(model["w"]), want, 1e-5)


@pytest.mark.parametrize(("mode", "chunk"), [(None, 1), *((mode, chunk) for mode in ORDERS for chunk in (None, 2))])
def test_jacobians_of_any_shape(mode, chunk):
    f = lambda model, x: jnp.sin(model["w"] * x[:, :1] + x[0, 1])
    model, x = {"w": jnp.array(2.0)}, jnp.arange(6.0).reshape(3, 2)
    for of, shape in (
        (f, (3, 1)),
        (lambda model, x: f(model, x)[0, 0], ()),
        (lambda model, x: f(model, x)[:0], (0, 1)),
    ):
        got = nested.jacobian(of, mode=mode, chunk=chunk)(model, x)
        assert got.shape == (*shape, 3, 2)
        np.testing.assert_allclose(got, jax.jacobian(of, 1)(model, x), 1e-6)


def test_a_jacobian_takes_the_fewer_sweeps():
    for weight in (jnp.ones((64, 2)), jnp.ones((2, 64))):
        jacobian = nested.jacobian(lambda weight, x: weight @ jnp.sin(x))
        sweep = 2 * weight.size
        assert flops(jacobian, weight, jnp.ones(weight.shape[1])) <= 2 * sweep + 1000


# -- Errors


def test_errors(without_type_checks):
    f = lambda model, x: model["w"] * x
    model = {"w": jnp.ones(2)}
    for function in (nested.gradient, nested.jacobian, nested.vjp, nested.jvp):
        with pytest.raises(ValueError, match="mode must be one of 'reverse/reverse', 'forward/reverse', 'reverse/forw"):
            function(f, mode="forward")
    with pytest.raises(TypeError, match=r"expected f to return a real floating scalar, got float32\[2\]; use nested."):
        nested.gradient(f)(model, jnp.ones(2))
    with pytest.raises(TypeError, match=r"expected f to return a real floating scalar, got int32\[\]; it has no"):
        nested.gradient(lambda model, x: jnp.argmax(x))(model, jnp.ones(2))
    with pytest.raises(TypeError, match=r"expected f to return a real floating scalar, got tuple; use nested.vjp"):
        nested.gradient(lambda model, x: (x, x))(model, jnp.ones(2))
    with pytest.raises(TypeError, match=r"expected the output of f to be floating, got int32\[\] at 'n'; leave it out"):
        nested.vjp(lambda model, x: {"n": jnp.argmax(x)})(model, jnp.ones(2), {"n": 1.0})
    with pytest.raises(TypeError, match="expected a real cotangent, got complex64"):
        nested.vjp(f)(model, jnp.ones(2), jnp.ones(2, jnp.complex64))
    with pytest.raises(TypeError, match=r"expected x to be floating, got int32\[2\]; convert it, or pass it in \*args"):
        nested.gradient(f)(model, jnp.arange(2))
    with pytest.raises(TypeError, match=r"expected x to be floating, got int32\[2\] at 'a.1'; convert it"):
        nested.vjp(f)(model, {"a": [jnp.ones(2), jnp.arange(2)]}, jnp.ones(2))
    with pytest.raises(ValueError, match=r"expected a cotangent of shape \(2,\), got \(3,\)"):
        nested.vjp(f)(model, jnp.ones(2), jnp.ones(3))
    with pytest.raises(ValueError, match=r"expected a tangent of shape \(2,\) at 'b', got \(\)"):
        nested.jvp(lambda model, x: x["b"])(model, {"b": jnp.ones(2)}, {"b": 1.0})
    with pytest.raises(ValueError, match="expected a tangent of structure"):
        nested.jvp(f)(model, jnp.ones(2), [jnp.ones(2)])
    with pytest.raises(TypeError, match="expected an array for x, got dict; for trees there are gradient, jvp and vjp"):
        nested.jacobian(f)(model, {"x": jnp.ones(2)})
    with pytest.raises(TypeError, match="expected x to be real and floating, got complex64"):
        nested.jacobian(f)(model, jnp.ones(2, jnp.complex64))
    with pytest.raises(TypeError, match="expected f to return a real floating array, got tuple"):
        nested.jacobian(lambda model, x: (x, x))(model, jnp.ones(2))
    with pytest.raises(ValueError, match="chunk must be a whole number of sweeps, at least 1, got 0"):
        nested.jacobian(f, chunk=0)
