"""Five discussions of users, each as the program that was asked for, and what it must give."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import nested, optim

from .zoo import assert_close, cost, enable_x64, ramp

# -- A matrix that is a struct -----------------------------------------------------------------------------------------


@jax.custom_vjp
def product(w, v, x):
    return w @ x


product.defvjp(  # v, which the product never uses, gets a gradient by the rule
    lambda w, v, x: (w @ x, (w, x)), lambda kept, y: (jnp.outer(y, kept[1]), 2 * y, kept[0].T @ y)
)


class Struct(eqx.Module):
    w: jax.Array
    v: jax.Array
    is_ruled: bool = False

    def __matmul__(self, x):
        return product(self.w, self.v, x) if self.is_ruled else self.w @ x


class Layer(eqx.Module):
    W: Struct
    b: jax.Array

    def __call__(self, x):
        return jnp.tanh(self.W @ x + self.b)


def layers(**options):
    return [Layer(Struct(ramp(4, 3, start=n), ramp(4), **options), ramp(4)) for n in range(2)]


def both_layers(model, x):
    return jnp.sum(model[0](x) * model[1](x))


X = ramp(3)
SIX = {"0.W.w": (4, 3), "0.W.v": (4,), "0.b": (4,), "1.W.w": (4, 3), "1.W.v": (4,), "1.b": (4,)}
gradient = tp.jit(tp.grad(both_layers))


def test_gradients_of_fields_by_name_and_in_one_vector():
    model = layers()
    grads = gradient(model, X)
    np.testing.assert_array_equal(grads[0].W.v, np.zeros(4))
    assert tp.jit(tp.grad(both_layers, unreached="none"))(model, X)[0].W.v is None

    vector, restructure = tp.ravel(model)
    joined = restructure.ravel_gradient(grads)
    of_vector = jax.jit(jax.grad(lambda v: both_layers(restructure(v), X)))(vector)
    # The derivative of tanh is 1 - tanh^2, here a small difference of numbers near 1: each rounds by their epsilon.
    np.testing.assert_allclose(joined, of_vector, 1e-6, 16 * jnp.finfo(jnp.float32).eps)
    by_name = restructure.view(joined)
    assert {path: by_name[path].shape for path in by_name} == SIX
    np.testing.assert_array_equal(by_name["1.W.w"], grads[1].W.w)
    np.testing.assert_array_equal(by_name["1.W.v"], np.zeros(4))


def test_gradients_are_added_in_the_vector_that_was_made_beforehand():
    model = layers()
    restructure, grads = tp.ravel(model)[1], gradient(model, X)
    half = [grads[0], None]  # nothing for the second layer
    add = jax.jit(lambda vector, grads: vector + restructure.ravel_gradient(grads), donate_argnums=0)
    vector = jnp.zeros(restructure.layout.size)
    at = vector.unsafe_buffer_pointer()
    for each in (half, grads):
        vector = add(vector, each)
    assert vector.unsafe_buffer_pointer() == at
    by_name = restructure.view(vector)
    np.testing.assert_array_equal(by_name["0.W.w"], 2 * grads[0].W.w)
    np.testing.assert_array_equal(by_name["1.b"], grads[1].b)

    # Sent over a network, and reduced there.
    received = np.stack([pickle.loads(pickle.dumps(np.asarray(vector))) for _ in range(2)])
    total = jax.vmap(lambda vector: jax.lax.psum(vector, "workers"), axis_name="workers")(received)[0]
    np.testing.assert_array_equal(restructure.view(total)["1.b"], 2 * grads[1].b)


def test_the_rule_of_the_product_counts():
    grads, plain = gradient(layers(is_ruled=True), X), gradient(layers(), X)
    np.testing.assert_allclose(grads[0].W.w, plain[0].W.w, 1e-6)
    np.testing.assert_allclose(grads[0].W.v, 2 * plain[0].b, 1e-6)


# -- Only some fields train --------------------------------------------------------------------------------------------


class Inner(eqx.Module):
    p: jax.Array
    q: jax.Array


class Some(eqx.Module):
    a1: jax.Array
    eps: float
    inner: Inner


class OnlyOne(Some):
    inner: Inner = tp.field(trainable=False)


def use(model, x):
    return jnp.sum(model.a1 * x * model.inner.p + model.inner.q + model.eps)


def test_the_gradient_is_of_the_one_field_alone_by_every_route():
    parts = ramp(3), 0.5, Inner(ramp(3), ramp(3))
    free, declared = Some(*parts), OnlyOne(*parts)
    mask = jax.tree.map(lambda leaf: leaf is free.a1, free)
    by_hand = jax.make_jaxpr(jax.grad(lambda a1, x: use(Some(a1, *parts[1:]), x)))(free.a1, X)
    for model, trainable in ((declared, None), (free, mask), (free, "a1"), (free, lambda m: m.a1)):
        grads = tp.jit(tp.grad(use, trainable))(model, X)
        np.testing.assert_array_equal(grads.a1, X * model.inner.p)
        assert (grads.eps, grads.inner) == (None, Inner(None, None))
        program = jax.make_jaxpr(lambda p, r, x: tp.grad(use, r.layout)(tp.combine(p, r), x))(
            *tp.partition(model, trainable), X
        )
        assert len(program.eqns) == len(by_hand.eqns)  # nothing is computed for the rest
    state = optim.trainable(optax.adam(1e-3)).init(declared)
    assert [leaf.shape for leaf in jax.tree.leaves(state.runs[0][0].mu)] == [(3,)]


def test_a_constructor_in_the_loss_of_which_one_argument_trains():
    loss = lambda args, x: jnp.sum(Layer(Struct(args["W"], x), args["b"])(x))  # make_model(W, b)
    args = {"W": ramp(4, 3), "b": ramp(4)}
    grads = tp.jit(tp.grad(loss, "W"))(args, X)
    assert grads["b"] is None
    np.testing.assert_allclose(grads["W"], np.outer(1 - np.tanh(args["W"] @ X + args["b"]) ** 2, X), 1e-5, 1e-6)


# -- A loss that touches a large array ---------------------------------------------------------------------------------


def test_a_frozen_array_is_not_touched_by_the_backward_pass():
    accessed = []
    for n in (1_000, 100_000):
        model = {"p": ramp(), "c": np.ones(n, "f")}
        accessed.append(cost(tp.grad(lambda m: m["c"][0] * m["p"], "p"), model)["bytes accessed"])
    assert len(set(accessed)) == 1


def polynomial(c, x):
    return c["c0"] + c["c1"] * x + c["c2"] * x**2 + c["c3"] * x**3


C = {f"c{n}": jnp.float32(n + 1) for n in range(4)}


def test_one_coefficient_of_a_polynomial():
    assert tp.grad(polynomial, "c2")(C, 3.0) == {"c0": None, "c1": None, "c2": 9.0, "c3": None}
    after = tp.replace(C, {"c2": jnp.float32(5)})
    assert after["c2"] == 5
    assert all(after[name] is C[name] for name in ("c0", "c1", "c3"))
    assert tp.reached(lambda c: polynomial(c | {"c3": jax.lax.stop_gradient(c["c3"])}, 3.0))(C).paths == (
        "c0",
        "c1",
        "c2",
    )
    layout = tp.layout(C)
    outer = layout.freeze("c1")
    assert outer.freeze("c2").paths == ("c0", "c3")
    assert outer.freeze("c2").thaw("c2") == outer
    assert outer.thaw("c1") == layout


# -- A derivative in a loss --------------------------------------------------------------------------------------------


def test_a_network_whose_slope_is_to_be_a_cosine():
    """Its gradient in the parameters, and in t and the parameters at once."""
    net, t = {"a": ramp(3), "b": ramp(3, start=-1.0)}, ramp(4)
    slopes = jax.vmap(nested.input_gradient(lambda net, t: jnp.sum(net["b"] * jnp.tanh(net["a"] * t))), (None, 0))
    by_hand = jax.vmap(lambda net, t: jnp.sum(net["a"] * net["b"] / jnp.cosh(net["a"] * t) ** 2), (None, 0))
    loss = lambda both, slopes: jnp.mean((slopes(both["net"], both["t"]) - jnp.cos(both["t"])) ** 2)

    @jax.jit
    def gradients(both):
        of_net = tp.grad(lambda net: loss({"net": net, "t": both["t"]}, slopes))(both["net"])
        return of_net, tp.grad(loss)(both, slopes), jax.grad(loss)(both, by_hand)

    of_net, at_once, want = gradients({"net": net, "t": t})
    assert_close(of_net, want["net"])
    assert_close(at_once, want)


def test_a_polynomial_fitted_with_its_derivative():
    """h(x) = g(f, df/dx) = f + 2 df/dx, which is linear in the coefficients."""
    h = jax.vmap(lambda c, x: polynomial(c, x) + 2 * nested.input_gradient(polynomial)(c, x), (None, 0))
    xs = np.linspace(-2.0, 2.0, 8, dtype="f")
    vector, restructure = tp.ravel(C)
    of_vector = lambda v: h(restructure(v), xs)
    wanted, matrix = jax.jit(lambda v: (of_vector(v), jax.jacfwd(of_vector)(v)))(vector)
    np.testing.assert_allclose(np.linalg.lstsq(matrix, wanted, rcond=None)[0], [1.0, 2.0, 3.0, 4.0], 1e-4)


def test_a_function_of_a_gradient():
    """Of (-sum(x) / r^3)^3, by hand; and its slope is one directional derivative of the gradient of f."""
    f = lambda x: 1 / jnp.linalg.norm(x)
    gradient = nested.input_gradient(lambda model, x: f(x))
    h = lambda x: jnp.sum(gradient(None, x)) ** 3
    with enable_x64(True):
        x = np.arange(1.0, 6.0)
        s, r = np.sum(x), np.linalg.norm(x)
        want = 3 * (s / r**3) ** 2 * (-1 / r**3 + 3 * s * x / r**5)
        direction = np.full(5, 3 * (s / r**3) ** 2)  # the slope of g at the gradient of f

        @jax.jit
        def of(x):
            along = jax.jvp(lambda x: gradient(None, x), (x,), (direction,))[1]
            return h(x), jax.grad(h)(x), jax.jacfwd(h)(x), along, nested.hvp(f)(x, direction)

        value, *slopes = of(x)
        np.testing.assert_allclose(value, -4.973265838810882e-05, rtol=1e-12)
        for slope in (jax.grad(h)(x), *slopes):
            np.testing.assert_allclose(slope, want, rtol=1e-12)


# -- Walks over a model and other trees --------------------------------------------------------------------------------


S = np.array([1.0], "f")
MODEL = {"a": S, "b": S}
GRADIENT = {"a": np.array([3.0], "f"), "b": np.array([4.0], "f")}
STATE = {"a": np.array([10.0], "f"), "b": np.array([10.0], "f")}


def test_we_add_dx_but_not_state():
    seen = []
    f = lambda x, dx, state: seen.append(float(x[0])) or dx + state
    with pytest.raises(ValueError, match=r"entries at \['a', 'b'\].*tied=\(\"sum\", \"first\"\)"):
        tp.maptrainable(f, MODEL, GRADIENT, STATE)
    after = tp.maptrainable(f, MODEL, GRADIENT, STATE, tied=("sum", "first"))
    assert (seen, after["a"].tolist(), after["a"] is after["b"]) == ([1.0], [7 + 10], True)
