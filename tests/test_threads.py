"""Discussions of users, each as the program that was asked for, and what it must give."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeparams as tp
from treeparams import nested, optim

from .zoo import assert_close, cost, enable_x64, ramp

# -- A matrix that is a struct -----------------------------------------------------------------------------------------


class Struct(eqx.Module):
    w: jax.Array
    v: jax.Array  # which the product does not use

    def __matmul__(self, x):
        return self.w @ x


class Layer(eqx.Module):
    W: Struct
    b: jax.Array

    def __call__(self, x):
        return jnp.tanh(self.W @ x + self.b)


X = ramp(3)
SIX = {"0.W.w": (4, 3), "0.W.v": (4,), "0.b": (4,), "1.W.w": (4, 3), "1.W.v": (4,), "1.b": (4,)}


def both_layers(model, x):
    return jnp.sum(model[0](x) * model[1](x))


def test_gradients_are_added_by_name_in_the_vector_that_was_made_beforehand():
    model = [Layer(Struct(ramp(4, 3, start=n), ramp(4)), ramp(4)) for n in range(2)]
    vector, restructure = tp.ravel(model)
    grads, unreached, of_vector = tp.jit(
        lambda model, vector: (
            tp.grad(both_layers)(model, X),
            tp.grad(both_layers, unreached="none")(model, X),
            jax.grad(lambda v: both_layers(restructure(v), X))(vector),
        )
    )(model, vector)
    np.testing.assert_array_equal(grads[0].W.v, np.zeros(4))
    assert unreached[0].W.v is None
    # The derivative of tanh is 1 - tanh^2, here a small difference of numbers near 1: each rounds by their epsilon.
    joined = restructure.ravel_gradient(grads)
    np.testing.assert_allclose(joined, of_vector, 1e-6, 16 * jnp.finfo(jnp.float32).eps)

    half = [grads[0], None]  # nothing for the second layer
    add = jax.jit(lambda vector, grads: vector + restructure.ravel_gradient(grads), donate_argnums=0)
    vector = jnp.zeros(restructure.layout.size)
    at = vector.unsafe_buffer_pointer()
    for each in (half, grads):
        vector = add(vector, each)
    assert vector.unsafe_buffer_pointer() == at
    by_name = restructure.view(np.asarray(vector))  # as one that was sent over a network
    assert {path: by_name[path].shape for path in by_name} == SIX
    np.testing.assert_array_equal(by_name["0.W.w"], 2 * grads[0].W.w)
    np.testing.assert_array_equal(by_name["1.b"], grads[1].b)


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


# -- A loss that touches a large array ---------------------------------------------------------------------------------


def test_a_frozen_array_is_not_touched_by_the_backward_pass():
    accessed = []
    for n in (1_000, 100_000):
        model = {"p": ramp(), "c": np.ones(n, "f")}
        accessed.append(cost(tp.grad(lambda m: m["c"][0] * m["p"], "p"), model)["bytes accessed"])
    assert len(set(accessed)) == 1


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
