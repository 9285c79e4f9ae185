"""Derivatives sample by sample: one sweep serves all samples, and what mixes them is found out."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import nested

from ..zoo import ZOO, flops, inexact_leaves, ramp

MLP = eqx.nn.MLP(3, 5, 8, 2, jnp.tanh, key=jax.random.key(0))
X = jax.random.normal(jax.random.key(1), (7, 3))


@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_squares(chunk):
    x = jnp.array([[1.0, 2], [3, 4], [5, 6]])
    for f in (lambda x: x**2, lambda x: jnp.sum(x**3, 1) / 3):
        got = nested.batched_jacobian(f, chunk=chunk, check=True)(x)
        np.testing.assert_allclose(got, jax.jit(jax.vmap(jax.jacfwd(lambda x, f=f: f(x[None])[0])))(x), 1e-6)


@pytest.mark.parametrize("f", [jax.vmap(MLP), lambda x: jax.vmap(MLP)(x)[:, :2], lambda x: jax.vmap(MLP)(x)[:, 0]])
def test_it_is_the_jacobian_of_each_sample(f):
    want = jax.jit(jax.vmap(jax.jacfwd(lambda x: f(x[None])[0])))(X)
    for build in (lambda f: f, jax.jit):
        got = build(nested.batched_jacobian(f))(X)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, 1e-4, 1e-6)


def test_a_rule_for_vjp_alone_goes_backward():
    f = jax.custom_vjp(lambda x: x**2)
    f.defvjp(lambda x: (x**2, x), lambda x, g: (2 * x * g,))
    got = nested.batched_jacobian(lambda x: jnp.sum(f(x), 1))(X)
    np.testing.assert_allclose(got, 2 * X, 1e-6)


def test_axes_of_any_number():
    f = lambda x, scale: scale * jnp.einsum("bij,jk->bikj", jnp.sin(x), jnp.ones((4, 2)))
    x = jax.random.normal(jax.random.key(0), (6, 3, 4))
    got = nested.batched_jacobian(f)(x, 2.0)
    assert got.shape == (6, 3, 2, 4, 3, 4)
    want = jax.jit(jax.vmap(jax.jacrev(lambda x: f(x[None], 2.0)[0])))(x)
    np.testing.assert_allclose(got, want, 1e-5, 1e-6)


def test_gradients_of_numbers():
    f = lambda x: jnp.sum(jax.vmap(MLP)(x), axis=1)
    got = nested.batched_gradient(f, check=True)(X)
    np.testing.assert_allclose(got, jax.jit(jax.vmap(jax.grad(lambda x: f(x[None])[0])))(X), 1e-5)
    np.testing.assert_allclose(got, jax.jit(nested.batched_jacobian(f))(X), 1e-5)


def test_an_empty_batch():
    assert nested.batched_jacobian(jnp.tanh, check=True)(X[:0]).shape == (0, 3, 3)
    assert nested.batched_jacobian(jax.vmap(MLP))(X[:0]).shape == (0, 5, 3)
    assert nested.batched_gradient(lambda x: jnp.sum(x, axis=1))(X[:0]).shape == (0, 3)


def test_a_gradient_of_jacobians_reaches_the_parameters():
    f = lambda model: jnp.sum(nested.batched_jacobian(jax.vmap(model))(X) ** 2)
    by_hand = lambda model: jnp.sum(jax.vmap(jax.jacfwd(model))(X) ** 2)
    both = tp.jit(lambda model: [inexact_leaves(tp.grad(each)(model)) for each in (f, by_hand)])
    for got, want in zip(*both(MLP), strict=True):
        np.testing.assert_allclose(got, want, 1e-4, 1e-5)


@pytest.mark.parametrize(("sizes", "least"), [((4, 32), 4), ((32, 4), 4)])
def test_operations_are_those_of_the_fewer_sweeps(sizes, least):
    mlp = eqx.nn.MLP(*sizes, 64, 3, jnp.tanh, key=jax.random.key(0))
    params, rest = tp.partition(mlp)
    x = jnp.ones((16, sizes[0]))
    forward = flops(lambda params, rest, x: jax.vmap(tp.combine(params, rest))(x), params, rest, x)
    jacobian = lambda params, rest, x: nested.batched_jacobian(jax.vmap(tp.combine(params, rest)))(x)
    assert flops(jacobian, params, rest, x) <= (least + 2) * forward


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x - jnp.mean(x, axis=0, keepdims=True),
        lambda x: jax.nn.softmax(x @ x.T) @ x,
        lambda x: jnp.cumsum(x, axis=0),
        lambda x: x[::-1],
        lambda x: x.at[5].add(1e-3 * x[1]),
    ],
    ids=["normalisation", "attention", "sum", "order", "two of them"],
)
def test_what_mixes_samples_is_found_out(f):
    for derivative in (
        nested.batched_jacobian(f, check=True),
        nested.batched_gradient(lambda x: jnp.sum(f(x), 1), check=True),
    ):
        with pytest.raises(ValueError, match=r"f mixes the samples of the batch .*; use jax\.jacobian"):
            derivative(X)


def test_mixing_is_seen_sample_by_sample_and_in_every_dtype():
    large = jnp.array([1e5, 1.0, 1.0, 1.0]).reshape(4, 1)
    slightly = lambda x: large * x + jnp.array([0.0, 0.02, 0.0, 0.0]).reshape(4, 1) * x[2:3]
    with pytest.raises(ValueError, match="sample 1 with others"):
        nested.batched_jacobian(slightly, check=True)(jnp.ones((4, 3)))
    wide = eqx.nn.MLP(3, 2, 64, 3, jnp.tanh, key=jax.random.key(0)), jax.random.normal(jax.random.key(1), (33, 3))
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        cast = lambda leaf, dtype=dtype: leaf.astype(dtype) if eqx.is_array(leaf) else leaf
        mlp, x = jax.tree.map(cast, wide)
        nested.batched_jacobian(jax.vmap(mlp), check=True)(x)
    subnormal = jnp.float16(1e-5)
    nested.batched_jacobian(lambda x: jnp.tanh(x) * subnormal, check=True)(jnp.ones((9, 3), jnp.float16))


def test_errors_of_batches():
    with pytest.raises(ValueError, match=r"expected f to return \(7, ...\), one output per sample, got shape \(\)"):
        nested.batched_jacobian(jnp.sum)(X)
    with pytest.raises(ValueError, match=r"expected f to return \(7, ...\), one output per sample, got shape \(3,\)"):
        nested.batched_gradient(lambda x: jnp.sum(x, axis=0))(X)
    with pytest.raises(ValueError, match=r"expected f to return \(7,\), one number per sample, got shape \(7, 3\)"):
        nested.batched_gradient(lambda x: x)(X)
    with pytest.raises(TypeError, match="expected real floating samples, got int32"):
        nested.batched_jacobian(lambda x: x)(jnp.arange(3))
    with pytest.raises(ValueError, match=r"expected samples of shape \(batch, ...\), got a scalar"):
        nested.batched_jacobian(lambda x: x)(1.0)
    with pytest.raises(TypeError, match="check=True needs values: call it outside of jit"):
        jax.jit(nested.batched_jacobian(jnp.sin, check=True))(X)
    with pytest.raises(ValueError, match="chunk must be a whole number of sweeps, at least 1, got 0"):
        nested.batched_jacobian(jnp.sin, chunk=0)


def _loss(model, example):
    x, weight = example
    total = sum(jnp.sum(jnp.sin(jnp.abs(jnp.asarray(leaf, jnp.complex64)) * x)) for leaf in inexact_leaves(model))
    return weight * jnp.real(total)


EXAMPLES = (jnp.linspace(0.5, 1.5, 5), jnp.arange(5.0))


@pytest.mark.parametrize("specimen", [each for each in ZOO.values() if each.layout(each.make()).size])
def test_gradients_of_examples(specimen):
    model = specimen.make()
    layout = specimen.layout(model)
    _, restructure = tp.ravel(model, layout)
    one_by_one = lambda model: jax.lax.map(
        lambda example: restructure.ravel_gradient(tp.grad(_loss, layout)(model, example)), EXAMPLES
    )

    def by(model, chunk):
        tree = nested.per_example_gradients(_loss, model, EXAMPLES, trainable=layout, chunk=chunk)
        return (
            tree,
            jax.vmap(restructure.ravel_gradient)(tree),
            nested.per_example_gradients(_loss, model, EXAMPLES, trainable=layout, chunk=chunk, flat=True),
        )

    want, results = tp.jit(lambda model: (one_by_one(model), [by(model, chunk) for chunk in (None, 2)]))(model)
    for tree, joined, matrix in results:
        assert jax.tree.structure(tree) == jax.tree.structure(tp.partition(model, layout)[0])
        np.testing.assert_allclose(matrix, want, 1e-2 if layout.nbytes < 4 * layout.size else 1e-5, 1e-6)
        np.testing.assert_allclose(joined, matrix, 1e-6)


def test_errors_of_examples():
    model = {"w": ramp(2)}
    for batch in ((jnp.ones(3), jnp.ones(2)), (jnp.ones(3), 1.0), ()):
        with pytest.raises(ValueError, match="expected a batch of arrays with one leading axis in common, got shapes"):
            nested.per_example_gradients(_loss, model, batch)
    with pytest.raises(ValueError, match="chunk must be a whole number of examples, at least 1, got 0"):
        nested.per_example_gradients(_loss, model, EXAMPLES, chunk=0)
