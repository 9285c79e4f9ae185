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
from ..zoo import ZOO, assert_close, assert_same, filled, flops, inexact_leaves, loss, ramp

REAL = {name: each for name, each in ZOO.items() if name != "complex"}
EVERY_TIME = {"bf16 with f32", "transposed tie", "frozen tie", "empty leaves", "all frozen"}


@pytest.mark.parametrize("name", some(REAL, REAL.keys() - EVERY_TIME))
def test_products_and_matrices_agree(name):
    """With a tangent in the form of the vector, or of the tree, whose form the product has."""
    model = REAL[name].make()
    layout = REAL[name].layout(model)
    vector, restructure = tp.ravel(model, layout)
    direction = np.cos(np.arange(layout.size)).astype(layout.dtype)
    tree, _ = tp.partition(restructure(direction), layout)

    @jax.jit
    def run(vector, direction, tree):
        model = restructure(vector)
        of_vector, of_tree = (nested.hvp(loss, layout)(model, tangent) for tangent in (direction, tree))
        matrix = nested.hessian(loss, layout)(model)
        by_jax = jax.hessian(lambda v: loss(restructure(v)))(vector) if layout.size else matrix
        return of_vector, of_tree, matrix, by_jax

    of_vector, of_tree, matrix, by_jax = run(vector, direction, tree)
    want = np.asarray(by_jax, np.float64)
    assert jax.tree.structure(of_tree) == jax.tree.structure(tree)
    assert [leaf.dtype for leaf in jax.tree.leaves(of_tree)] == [slot.dtype for slot in layout.slots]
    along = want @ np.asarray(direction, np.float64)
    tolerance = 5e-2 if name == "bf16 with f32" else 1e-5  # gradients are in the leaves' own dtypes
    for got, its in ((of_vector, along), (restructure.ravel(of_tree), along), (matrix, want), (matrix.T, want)):
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, its, tolerance, tolerance * np.abs(its).max(initial=1))


def test_a_tangent_in_the_form_of_the_model_counts_a_tie_once():
    """And is zero where it has nothing."""
    shared = ramp(2, 3)
    model = {"a": shared, "b": shared, "c": ramp(3, 2), "d": ramp(2)}
    layout = tp.layout(model, ties={"c": ("a", jnp.transpose)})
    vector, restructure = tp.ravel(tp.tie(model, layout), layout)
    cubes = lambda m: jnp.sum(m["a"] ** 3) + jnp.sum(m["b"] ** 2 * m["d"][0]) + jnp.sum(m["c"] ** 4)
    tangent, part = jnp.cos(vector), jnp.zeros(8).at[6:].set(1.0)
    trees = restructure(tangent), tp.partition(restructure(tangent), layout)[0]
    product = functools.partial(nested.hvp(cubes, layout), model)
    found = jax.jit(lambda *tangents: list(map(product, tangents)))(tangent, *trees, part, {"d": jnp.ones(2)})
    want, *of_trees, of_part, of_partial = found
    for got in of_trees:
        np.testing.assert_allclose(restructure.ravel(got), want, 1e-6)
    np.testing.assert_allclose(restructure.ravel(of_partial), of_part, 1e-6)


def test_what_is_frozen_costs_nothing():
    mlp, x = filled(eqx.nn.MLP, 16, 4, 64, 4), jnp.ones((32, 16))
    f = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    layout = tp.layout(mlp, "layers.4")
    params, rest = tp.partition(mlp, layout)
    product = lambda params, rest, x, v: nested.hvp(f, layout)(tp.combine(params, rest), v, x)
    forward = lambda params, rest, x: f(tp.combine(params, rest), x)
    assert flops(product, params, rest, x, jnp.ones(layout.size)) < 1.1 * flops(forward, params, rest, x)


def test_a_product_has_the_wider_of_the_two_dtypes():
    """Computed in the parameters' own, and returned so that a solver goes on in that of its vectors."""
    model = {"w": ramp(3, dtype=jnp.bfloat16), "b": ramp(1, dtype=jnp.bfloat16)}
    right = jnp.array([1.0, 0.5, 0.25, 2.0], jnp.bfloat16)
    partial, single = {"w": jnp.ones(3, jnp.float32)}, {"w": ramp(3), "b": ramp(1)}

    @jax.jit
    def run(model, right):
        product = nested.hvp(loss)
        of_complex = product({"w": ramp(3).astype(jnp.complex64), "b": ramp(1)}, jnp.ones(4))
        square = nested.hessian_operator(lambda model: jnp.sum(model["w"] ** 2), "w")(model)
        solved = jax.scipy.sparse.linalg.cg(square, jnp.ones(3))[0]
        vectors = product(model, right), product(model, right.astype(np.float32)), product(single, right), of_complex
        return vectors, product(model, partial), solved

    vectors, tree, solved = run(model, right)
    assert [str(each.dtype) for each in vectors] == ["bfloat16", "float32", "float32", "complex64"]
    np.testing.assert_array_equal(vectors[1], vectors[0].astype(np.float32))
    assert (tree["w"].dtype, tree["b"].dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(solved, 0.5)


def test_floating_point_operations():
    mlp, x = filled(eqx.nn.MLP, 8, 1, 64, 4, jnp.tanh), jnp.ones((32, 8))
    vector, restructure = tp.ravel(mlp)
    f = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    one = flops(lambda v, t: nested.hvp(f)(restructure(v), t, x), vector, vector)
    assert one <= 4 * flops(lambda v: jax.grad(lambda v: f(restructure(v), x))(v), vector)

    def five(v, directions):
        operator = nested.hessian_operator(f)(restructure(v), x)
        return [operator(direction) for direction in directions]

    assert flops(five, vector, [jnp.sin(i + vector) for i in range(5)]) <= 4.2 * one


# -- Operators ---------------------------------------------------------------------------------------------------------


def _quartic(model, x):
    return jnp.sum(x * model["w"] ** 4) + model["b"] * jnp.sum(model["w"])


MODEL, X = {"w": ramp(3), "b": jnp.array(2.0)}, jnp.arange(1.0, 4.0)


@pytest.fixture(scope="module")
def operator():
    return jax.jit(lambda: nested.hessian_operator(_quartic, damping=3.0)(MODEL, X))()


@pytest.fixture(scope="module")
def dense():
    return np.asarray(jax.jit(nested.hessian(_quartic))(MODEL, X)) + 3 * np.eye(4, dtype=np.float32)


def test_an_array_times_an_operator(operator, dense):
    """The operator is symmetric."""
    vector, rows = np.asarray(ramp(4)), np.asarray(ramp(2, 4))
    for made in (jnp.asarray, np.asarray):
        np.testing.assert_allclose(made(vector) @ operator, dense @ vector, 1e-6)
        np.testing.assert_allclose(made(rows) @ operator, rows @ dense, 1e-6)


def test_an_operator_passes_through_jit_vmap_and_scan(operator, dense):
    tangents = np.eye(4, dtype=np.float32)
    apply = jax.jit(lambda operator, tangent: operator(tangent))
    np.testing.assert_allclose([apply(operator, each) for each in tangents], dense, 1e-6)
    assert apply._cache_size() == 1

    @jax.jit
    def run(operator, tangents):
        batch = jax.vmap(lambda x: nested.hvp(_quartic)(MODEL, tangents[1], x))(jnp.stack([X, 2 * X]))
        scanned = jax.lax.scan(lambda c, t: (c, operator(t)), 0, tangents)[1]
        matrices = [operator.matrix(chunk=chunk) for chunk in (None, 3)]
        return batch, [jax.vmap(operator)(tangents), scanned, *matrices], operator.diagonal(chunk=3)

    batch, matrices, diagonal = jax.device_get(run(operator, tangents))
    np.testing.assert_allclose(matrices, [dense] * 4, 1e-6)
    np.testing.assert_allclose(diagonal, np.diag(dense), 1e-6)
    np.testing.assert_allclose(batch[1][1:], 2 * batch[0][1:], 1e-6)
    np.testing.assert_allclose(batch[0], dense[1] - 3 * tangents[1], 1e-5)


def test_derivatives_of_products():
    vector, restructure = tp.ravel(MODEL)
    along = lambda model: jnp.ones(4) @ nested.hvp(_quartic)(model, jnp.ones(4), X)
    third, by_tree = jax.jit(lambda v: (jax.grad(lambda v: along(restructure(v)))(v), tp.grad(along)(MODEL)))(vector)
    np.testing.assert_allclose(third[1:], 24 * X * MODEL["w"], 1e-5)
    np.testing.assert_allclose(by_tree["w"], third[1:], 1e-5)


def test_conjugate_gradients_take_an_operator_with_vectors_and_trees(operator, dense):
    right = jnp.arange(4.0)
    solve = jax.jit(lambda right: jax.scipy.sparse.linalg.cg(operator, right, tol=1e-7)[0])
    step, by_tree = solve(right), solve({"w": right[1:], "b": right[0]})
    np.testing.assert_allclose(step, np.linalg.solve(dense, right), 1e-4, 1e-5)
    np.testing.assert_allclose(by_tree["w"], step[1:], 1e-4, 1e-5)


def test_gauss_newton_of_a_network_is_positive_and_not_the_hessian():
    """Its outputs are a tree."""
    x = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    mlp = filled(eqx.nn.MLP, 3, 2, 4, 1, jnp.tanh, seed=1)
    outputs, error = lambda model, x: {"y": jax.vmap(model)(x)}, lambda y: jnp.sum((y["y"] - 3) ** 2)
    layout = tp.layout(mlp, freeze="layers.0.bias")
    vector, restructure = tp.ravel(mlp, layout)

    @jax.jit
    def run(vector):
        model = restructure(vector)
        matrix = nested.ggn_operator(outputs, error, layout, damping=0.2)(model, x).matrix()
        jacobian = jax.jacobian(lambda v: outputs(restructure(v), x)["y"].ravel())(vector)
        return matrix, jacobian, nested.hessian(lambda model, x: error(outputs(model, x)), layout)(model, x)

    matrix, jacobian, hessian = map(np.asarray, run(vector))
    np.testing.assert_allclose(matrix, 2 * jacobian.T @ jacobian + 0.2 * np.eye(len(matrix)), 1e-4, 1e-4)
    assert np.linalg.eigvalsh(matrix)[0] > 0.2 - 1e-4
    assert np.linalg.eigvalsh(hessian)[0] < -1


# -- The real vector, and a model that is linear along a direction -----------------------------------------------------


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


NET = {"a": ramp(3), "b": ramp(2, 3, start=-1.0), "frozen": ramp(2)}
LAYOUT = tp.layout(NET, freeze="frozen")


def net(model, x, scale):
    """Of its outputs one is not floating, and one is nothing."""
    y = jnp.tanh(model["b"] @ (x * model["a"])) * scale + model["frozen"]
    return {"y": y, "norm": jnp.sum(model["a"] ** 2), "whole": jnp.arange(3), "nothing": None}


def test_linearised_is_value_and_derivative():
    vector, restructure = tp.ravel(NET, LAYOUT)
    directions, x = np.cos(np.arange(18, dtype=np.float32)).reshape(2, 9), ramp(3)

    @jax.jit
    def run(vector, directions):
        near = functools.partial(nested.linearised(net, LAYOUT), restructure(vector))
        floating = lambda v: {name: net(restructure(v), x, 2.0)[name] for name in ("y", "norm")}
        return (
            jax.jacrev(floating)(vector),
            jax.vmap(lambda d: near(d, x, 2.0))(directions),
            near(tp.partition(restructure(directions[0]), LAYOUT)[0], x, 2.0),
            near({"a": jnp.ones(3)}, x, 2.0),
            near(0 * vector, x, 2.0),
            jax.grad(lambda d: jnp.sum(near(d, x, 2.0)["y"]))(directions[0]),
        )

    jacobian, along, of_tree, of_part, here, gradient = run(vector, directions)
    value, jacobian, along = jax.tree.map(np.asarray, (jax.jit(net)(NET, x, 2.0), jacobian, along))
    assert_close(here, value)
    assert_close(along["y"], value["y"][None] + directions @ jacobian["y"].T)
    assert_close(along["norm"], value["norm"] + directions @ jacobian["norm"])
    assert_close(of_tree, {name: None if leaf is None else leaf[0] for name, leaf in along.items()})
    assert_close(of_part["y"], value["y"] + jacobian["y"][:, :3].sum(1))
    assert_close(gradient, jacobian["y"].sum(0))


# -- Errors ------------------------------------------------------------------------------------------------------------

SMALL = {"w": ramp(2), "b": ramp(1)}
MATRIX = r"@ operator needs a real vector \(n,\) or matrix \(k, n\), got "
ERRORS = [
    (lambda _: nested.hvp(loss)(SMALL, {"x": jnp.ones(2)}), ValueError, "entry at 'x', where the model has no leaf"),
    (lambda _: nested.hvp(loss)(SMALL, jnp.ones(5)), ValueError, r"a vector of 3 elements, .* array of shape \(5,\)"),
    (lambda _: nested.hvp(loss)(SMALL, {"w": jnp.ones(2, complex)}), TypeError, r"a real tangent at 'w', got comp"),
    (lambda _: nested.hessian(loss, chunk=0)(SMALL), ValueError, "chunk must be a whole number of products, at"),
    (lambda of: of({"w": jnp.ones(4)}), ValueError, r"expected float32\[3\] at 'w', got float32\[4\]"),
    (lambda of: np.ones((2, 2, 4)) @ of, TypeError, MATRIX),
    (lambda of: np.ones(4, np.complex64) @ of, TypeError, MATRIX),
    (lambda of: [1.0] * 4 @ of, TypeError, MATRIX),
]  # fmt: skip


def test_errors(operator):
    for call, error, words in ERRORS:
        with pytest.raises(error, match=words):
            call(operator)
