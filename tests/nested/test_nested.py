"""Curvature of what is trained: products agree with matrices, in every form and under every transformation."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import nested

from ..long import some
from ..zoo import STRUCTURE_ALONE, ZOO, flops, loss, ramp

REAL = {name: each for name, each in ZOO.items() if name != "complex"}
ROUGH = {"bf16 with f32": 5e-2}  # gradients are in the leaves' own dtypes


def _close(got, want, name=""):
    tolerance = ROUGH.get(name, 1e-5)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, tolerance, tolerance * np.abs(want).max(initial=1))


@pytest.mark.parametrize("name", some(REAL, STRUCTURE_ALONE))
def test_products_and_matrices_agree(name):
    """With a tangent in the form of the vector, or of the tree, whose form the product has."""
    model = REAL[name].make()
    layout = REAL[name].layout(model)
    vector, restructure = tp.ravel(model, layout)
    direction = jnp.cos(jnp.arange(layout.size, dtype=layout.dtype))
    tree, _ = tp.partition(restructure(direction), layout)

    @jax.jit
    def run(vector, direction, tree):
        model = restructure(vector)
        product = lambda tangent: nested.hvp(loss, trainable=layout)(model, tangent)
        matrix = nested.hessian(loss, trainable=layout)(model)
        by_jax = jax.hessian(lambda v: loss(restructure(v)))(vector) if layout.size else matrix
        return product(direction), product(tree), matrix, by_jax

    of_vector, of_tree, matrix, by_jax = run(vector, direction, tree)
    want = np.asarray(by_jax, np.float64)
    assert jax.tree.structure(of_tree) == jax.tree.structure(tree)
    assert [leaf.dtype for leaf in jax.tree.leaves(of_tree)] == [slot.dtype for slot in layout.slots]
    for got in (of_vector, restructure.ravel(of_tree)):
        _close(got, want @ np.asarray(direction, np.float64), name)
    _close(matrix, want, name)
    _close(matrix.T, want, name)


def test_a_partial_tree_has_zeros_where_it_has_nothing():
    model = {"a": ramp(2), "b": {"c": ramp(3)}}
    got = nested.hvp(loss)(model, {"b": {"c": jnp.ones(3)}})
    want = nested.hvp(loss)(model, jnp.array([0.0, 0, 1, 1, 1]))
    np.testing.assert_allclose(tp.ravel(model)[1].ravel(got), want, 1e-6)


def test_a_tangent_in_the_form_of_the_model_counts_a_tie_once():
    shared = ramp(2, 3)
    model = {"a": shared, "b": shared, "c": ramp(3, 2), "d": ramp(2)}
    layout = tp.layout(model, ties={"c": ("a", jnp.transpose)})
    vector, restructure = tp.ravel(tp.tie(model, layout), layout)
    cubes = lambda m: jnp.sum(m["a"] ** 3) + jnp.sum(m["b"] ** 2 * m["d"][0]) + jnp.sum(m["c"] ** 4)
    tangent = jnp.cos(vector)
    trees = restructure(tangent), tp.partition(restructure(tangent), layout)[0]
    product = functools.partial(nested.hvp(cubes, trainable=layout), model)
    want, found = jax.jit(lambda tangent, trees: (product(tangent), list(map(product, trees))))(tangent, trees)
    for got in found:
        np.testing.assert_allclose(restructure.ravel(got), want, 1e-6)


def test_what_is_frozen_costs_nothing():
    mlp = eqx.nn.MLP(16, 4, 64, 4, key=jax.random.key(0))
    x = jnp.ones((32, 16))
    f = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    layout = tp.layout(mlp, "layers.4")
    params, rest = tp.partition(mlp, layout)
    product = lambda params, rest, x, v: nested.hvp(f, trainable=layout)(tp.combine(params, rest), v, x)
    forward = lambda params, rest, x: f(tp.combine(params, rest), x)
    assert flops(product, params, rest, x, jnp.ones(layout.size)) < 1.1 * flops(forward, params, rest, x)


def test_a_product_has_the_wider_of_the_two_dtypes():
    """Computed in the parameters' own, and returned so that a solver goes on in that of its vectors."""
    model = {"w": ramp(3, dtype=jnp.bfloat16), "b": ramp(1, dtype=jnp.bfloat16)}
    product = jax.jit(nested.hvp(loss))
    right = jnp.array([1.0, 0.5, 0.25, 2.0], jnp.bfloat16)
    want = product(model, right)
    assert want.dtype == jnp.bfloat16
    wide = product(model, right.astype(np.float32))
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, want.astype(np.float32))
    tree = product(model, {"w": jnp.ones(3, jnp.float32)})
    assert (tree["w"].dtype, tree["b"].dtype) == (jnp.float32, jnp.bfloat16)
    assert product({"w": ramp(3), "b": ramp(1)}, right).dtype == jnp.float32
    assert product({"w": ramp(3).astype(jnp.complex64), "b": ramp(1)}, jnp.ones(4)).dtype == jnp.complex64
    square = nested.hessian_operator(lambda model: jnp.sum(model["w"] ** 2))({"w": model["w"]})
    np.testing.assert_allclose(jax.scipy.sparse.linalg.cg(square, jnp.ones(3))[0], 0.5)


def test_floating_point_operations():
    mlp = eqx.nn.MLP(8, 1, 64, 4, jnp.tanh, key=jax.random.key(0))
    vector, restructure = tp.ravel(mlp)
    x = jnp.ones((32, 8))
    f = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    one = flops(lambda v, t: nested.hvp(f)(restructure(v), t, x), vector, vector)
    gradient = flops(lambda v: jax.grad(lambda v: f(restructure(v), x))(v), vector)
    assert one <= 4 * gradient

    def five(v, directions):
        operator = nested.hessian_operator(f)(restructure(v), x)
        return [operator(direction) for direction in directions]

    assert flops(five, vector, [jnp.sin(i + vector) for i in range(5)]) <= 4.2 * one


@pytest.mark.parametrize("made", [jnp.asarray, np.asarray])
def test_an_array_times_an_operator(made):
    """The operator is symmetric."""
    model = {"w": ramp(3), "b": ramp()}
    operator = nested.hessian_operator(_quartic, damping=0.5)(model, ramp(3))
    dense = np.asarray(operator @ jnp.eye(4))
    np.testing.assert_allclose(made(ramp(4)) @ operator, dense @ ramp(4), 1e-6)
    np.testing.assert_allclose(made(ramp(2, 4)) @ operator, ramp(2, 4) @ dense, 1e-6)
    for wrong in (np.ones((2, 2, 4)), np.ones(4, np.complex64), [1.0] * 4):
        with pytest.raises(TypeError, match=r"@ operator needs a real vector \(n,\) or matrix \(k, n\), got "):
            _ = wrong @ operator


def _quartic(model, x):
    return jnp.sum(x * model["w"] ** 4) + model["b"] * jnp.sum(model["w"])


def test_an_operator_passes_through_jit_vmap_and_scan():
    model, x = {"w": ramp(3), "b": jnp.array(2.0)}, jnp.arange(1.0, 4.0)
    operator = nested.hessian_operator(_quartic, damping=0.1)(model, x)
    tangents = jnp.eye(4)
    want = jnp.stack([operator(each) for each in tangents])
    apply = jax.jit(lambda operator, tangent: operator(tangent))
    np.testing.assert_allclose([apply(operator, each) for each in tangents], want, 1e-6)
    assert apply._cache_size() == 1
    np.testing.assert_allclose(jax.jit(jax.vmap(operator))(tangents), want, 1e-6)
    np.testing.assert_allclose(jax.lax.scan(lambda c, t: (c, operator(t)), 0, tangents)[1], want, 1e-6)
    made = jax.jit(lambda model: nested.hessian_operator(_quartic, damping=0.1)(model, x))(model)
    np.testing.assert_allclose(made(tangents[0]), want[0], 1e-6)
    batch = jax.jit(jax.vmap(lambda x: nested.hvp(_quartic)(model, tangents[1], x)))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(batch[1][1:], 2 * batch[0][1:], 1e-6)
    np.testing.assert_allclose(batch[0][1:], want[1][1:] - 0.1 * tangents[1][1:], 1e-5)


def test_derivatives_of_products():
    model, x = {"w": ramp(3), "b": jnp.array(2.0)}, jnp.arange(1.0, 4.0)
    vector, restructure = tp.ravel(model)
    direction = jnp.ones(4)
    third = jax.jit(jax.grad(lambda v: direction @ nested.hvp(_quartic)(restructure(v), direction, x)))(vector)
    np.testing.assert_allclose(third[1:], 24 * x * model["w"], 1e-5)
    by_tree = tp.grad(lambda model: direction @ nested.hvp(_quartic)(model, direction, x))(model)
    np.testing.assert_allclose(by_tree["w"], third[1:], 1e-5)


def test_conjugate_gradients_take_an_operator_with_vectors_and_trees():
    model, x = {"w": ramp(3), "b": jnp.array(0.0)}, jnp.arange(1.0, 4.0)
    operator = nested.hessian_operator(_quartic, damping=3.0)(model, x)
    matrix = jax.jit(nested.hessian(_quartic))(model, x) + 3 * np.eye(4, dtype=np.float32)
    right = jnp.arange(4.0)
    step, _ = jax.scipy.sparse.linalg.cg(operator, right, tol=1e-7)
    np.testing.assert_allclose(step, np.linalg.solve(matrix, right), 1e-4, 1e-5)
    tree = {"w": right[1:], "b": right[0]}
    by_tree, _ = jax.scipy.sparse.linalg.cg(operator, tree, tol=1e-7)
    np.testing.assert_allclose(by_tree["w"], step[1:], 1e-4, 1e-5)


def test_gauss_newton_is_the_hessian_where_the_model_is_linear():
    key = jax.random.key(0)
    model, x = eqx.nn.Linear(4, 3, key=key), jax.random.normal(key, (10, 4))
    outputs = lambda model, x: {"scores": jax.vmap(model)(x)}
    entropy = lambda y: -jnp.mean(jax.nn.log_softmax(y["scores"])[:, 0])
    operator = nested.ggn_operator(outputs, entropy, damping=0.2)(model, x)
    hessian = jax.jit(lambda model: nested.hessian(lambda model, x: entropy(outputs(model, x)))(model, x))
    matrix = hessian(model) + 0.2 * np.eye(15, dtype=np.float32)
    np.testing.assert_allclose(jax.jit(jax.vmap(operator))(jnp.eye(15)), matrix, 1e-4, 1e-6)


def test_gauss_newton_of_a_network_is_positive_and_not_the_hessian():
    key = jax.random.key(1)
    mlp, x = eqx.nn.MLP(3, 2, 5, 1, jnp.tanh, key=key), jax.random.normal(key, (6, 3))
    outputs, error = lambda model, x: jax.vmap(model)(x), lambda y: jnp.sum((y - 3) ** 2)
    layout = tp.layout(mlp, freeze="layers.0.bias")
    vector, restructure = tp.ravel(mlp, layout)

    @jax.jit
    def run(vector):
        operator = nested.ggn_operator(outputs, error, trainable=layout)(restructure(vector), x)
        jacobian = jax.jacobian(lambda v: outputs(restructure(v), x).ravel())(vector)
        loss = lambda model, x: error(outputs(model, x))
        return (
            jax.vmap(operator)(jnp.eye(layout.size)),
            jacobian,
            nested.hessian(loss, trainable=layout)(restructure(vector), x),
        )

    matrix, jacobian, hessian = map(np.asarray, run(vector))
    np.testing.assert_allclose(matrix, 2 * jacobian.T @ jacobian, 1e-4, 1e-4)
    assert np.linalg.eigvalsh(matrix)[0] > -1e-4
    assert np.linalg.eigvalsh(hessian)[0] < -1


def test_every_chunk_gives_the_same():
    model, x = {"w": ramp(3), "b": jnp.array(2.0)}, jnp.arange(1.0, 4.0)
    whole, operator = nested.hessian(_quartic)(model, x), nested.hessian_operator(_quartic)(model, x)
    np.testing.assert_allclose(nested.hessian(_quartic, chunk=3)(model, x), whole, 1e-6)
    np.testing.assert_allclose(operator.diagonal(chunk=3), np.diag(whole), 1e-6)


def test_errors():
    model = {"w": ramp(2), "b": ramp(1)}
    with pytest.raises(ValueError, match="entry at 'x', where the model has no leaf"):
        nested.hvp(loss)(model, {"x": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"expected a vector of 3 elements, .* got an array of shape \(5,\)"):
        nested.hvp(loss)(model, jnp.ones(5))
    with pytest.raises(TypeError, match=r"expected a real tangent at 'w', got complex64\[2\]"):
        nested.hvp(loss)(model, {"w": jnp.ones(2, jnp.complex64)})
    with pytest.raises(ValueError, match=r"expected float32\[2\] at 'w', got float32\[3\]"):
        nested.hessian_operator(loss)(model)({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="chunk must be a whole number of columns, at least 1, got 0"):
        nested.hessian(loss, chunk=0)(model)
