"""The real vector of the parameters, and a model that is linear along a direction in them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import nested

from ..zoo import ZOO, assert_close, assert_same, inexact_leaves, ramp


@pytest.mark.parametrize("name", ZOO)
def test_the_real_vector_goes_there_and_back(name):
    """Of a complex slot it has all real parts, then all imaginary ones; else it is the vector of `tp.ravel`."""
    model = ZOO[name].make()
    layout = ZOO[name].layout(model)
    vector, restructure = nested.real_vector(model, layout)
    parts = [np.zeros(0)]
    for leaf in map(np.asarray, jax.tree.leaves(tp.partition(model, layout)[0])):
        parts += [leaf.real.ravel(), leaf.imag.ravel()] if np.iscomplexobj(leaf) else [leaf.astype(float).ravel()]
    np.testing.assert_array_equal(vector, np.concatenate(parts))
    assert vector.dtype == (jnp.float32 if name == "complex" else layout.dtype)
    by_jit = jax.jit(lambda restructure, vector: inexact_leaves(restructure(vector)))(restructure, vector)
    assert_same(by_jit, inexact_leaves(model), identity=False)
    if name != "numpy leaves":  # which come back as arrays of JAX
        assert_same(restructure(vector), tp.tie(model, layout))


def test_gradients_through_the_real_vector_are_those_of_the_parts():
    model = {"x": ramp(2), "z": ramp(3).astype(jnp.complex64) * (1 + 2j)}
    loss = lambda model: jnp.sum(jnp.abs(model["z"]) ** 3) * jnp.sum(model["x"] ** 2) + jnp.sum(model["z"].imag ** 3)

    @jax.jit
    def run(model):
        vector, restructure = nested.real_vector(model)
        of_parts = lambda x, real, imag: loss({"x": x, "z": jax.lax.complex(real, imag)})
        by_parts = jax.grad(of_parts, (0, 1, 2))(model["x"], model["z"].real, model["z"].imag)
        rows = jax.vmap(jax.grad(lambda v: loss(restructure(v))))(jnp.stack([vector, vector]))
        conjugate = jax.tree.map(jnp.conj, tp.grad(loss)(model))
        return jnp.concatenate(by_parts), rows, nested.real_vector(conjugate)[0]

    want, rows, of_gradient = run(model)
    for got in (*rows, of_gradient):
        assert_close(got, want)


NET = {"a": ramp(3), "b": ramp(2, 3, start=-1.0), "frozen": ramp(2)}
LAYOUT = tp.layout(NET, freeze="frozen")


def net(model, x, scale):
    return {"y": jnp.tanh(model["b"] @ (x * model["a"])) * scale + model["frozen"], "norm": jnp.sum(model["a"] ** 2)}


def test_linearised_is_value_and_derivative():
    vector, restructure = tp.ravel(NET, LAYOUT)
    directions, x = jnp.asarray(np.cos(np.arange(18, dtype=np.float32)).reshape(2, 9)), ramp(3)

    @jax.jit
    def run(vector, directions):
        near = functools.partial(nested.linearised(net, trainable=LAYOUT), restructure(vector))
        jacobian = jax.jacrev(lambda v: net(restructure(v), x, 2.0))(vector)
        tree = tp.partition(restructure(directions[0]), LAYOUT)[0]
        return (
            jacobian,
            jax.vmap(lambda d: near(d, x, 2.0))(directions),
            near(tree, x, 2.0),
            near({"a": jnp.ones(3)}, x, 2.0),
            near(0 * vector, x, 2.0),
            jax.grad(lambda d: jnp.sum(near(d, x, 2.0)["y"]))(directions[0]),
        )

    jacobian, along, of_tree, of_part, here, gradient = run(vector, directions)
    value = net(NET, x, 2.0)
    assert_close(here, value)
    assert_close(along["y"], value["y"][None] + directions @ jacobian["y"].T)
    assert_close(along["norm"], value["norm"] + directions @ jacobian["norm"])
    assert_close(of_tree, {name: leaf[0] for name, leaf in along.items()})
    assert_close(of_part["y"], value["y"] + jacobian["y"][:, :3] @ jnp.ones(3))
    assert_close(gradient, jnp.sum(jacobian["y"], axis=0))


def test_outputs_of_a_linearised_model_that_are_not_floating_stay():
    near = nested.linearised(lambda model: (model["a"] ** 2, jnp.arange(3), None), trainable=LAYOUT)
    floating, whole, nothing = near(NET, jnp.ones(9))
    assert_close(floating, NET["a"] ** 2 + 2 * NET["a"])
    np.testing.assert_array_equal(whole, np.arange(3))
    assert nothing is None
