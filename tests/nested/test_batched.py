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


def _alone(f):
    """A function of a batch for one sample."""
    return lambda model, x: f(model, x[None])[0]


def _at_random(model, x):
    return jax.vmap(model)(x)


@pytest.mark.parametrize(
    "f",
    [_at_random, lambda model, x: _at_random(model, x)[:, :2], lambda model, x: _at_random(model, x)[:, 0]],
    ids=["forward", "backward", "one number each"],
)
def test_it_is_the_jacobian_of_each_sample(f):
    want = jax.jit(jax.vmap(jax.jacfwd(lambda x: _alone(f)(MLP, x))))(X)
    for options in ({"check": True}, {"chunk": 2}):
        got = nested.batched_jacobian(f, **options)(MLP, X)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, 1e-4, 1e-6)


def test_a_rule_for_vjp_alone_goes_backward():
    f = jax.custom_vjp(lambda x: x**2)
    f.defvjp(lambda x: (x**2, x), lambda x, g: (2 * x * g,))
    got = nested.batched_jacobian(lambda model, x: jnp.sum(f(x), 1))(None, X)
    np.testing.assert_allclose(got, 2 * X, 1e-6)


def test_axes_of_any_number():
    f = lambda model, x, scale: scale * jnp.einsum("bij,jk->bikj", jnp.sin(x), model)
    model, x = jnp.ones((4, 2)), jax.random.normal(jax.random.key(0), (2, 3, 4))
    got = jax.jit(nested.batched_jacobian(f))(model, x, 2.0)
    assert got.shape == (2, 3, 2, 4, 3, 4)
    want = jax.jit(jax.vmap(jax.jacrev(lambda x: f(model, x[None], 2.0)[0])))(x)
    np.testing.assert_allclose(got, want, 1e-5, 1e-6)


def test_an_empty_batch():
    square = lambda model, x: x**2
    assert nested.batched_jacobian(square, check=True)(None, X[:0]).shape == (0, 3, 3)
    assert nested.batched_jacobian(lambda model, x: jnp.sum(x, axis=1))(None, X[:0]).shape == (0, 3)


def test_a_gradient_of_jacobians_reaches_the_parameters():
    f = lambda model: jnp.sum(nested.batched_jacobian(_at_random)(model, X) ** 2)
    by_hand = lambda model: jnp.sum(jax.vmap(jax.jacfwd(model))(X) ** 2)
    both = tp.jit(lambda model: [inexact_leaves(tp.grad(each)(model)) for each in (f, by_hand)])
    for got, want in zip(*both(MLP), strict=True):
        np.testing.assert_allclose(got, want, 1e-4, 1e-5)


@pytest.mark.parametrize("sizes", [(4, 32), (32, 4), (32, "scalar")])
def test_operations_are_those_of_the_fewer_sweeps(sizes):
    """And of the better `vmap` over a function of one sample."""
    mlp = eqx.nn.MLP(*sizes, 64, 3, jnp.tanh, key=jax.random.key(0))
    params, rest = tp.partition(mlp)
    x = jnp.ones((16, sizes[0]))
    whole = lambda params, x: _at_random(tp.combine(params, rest), x)
    derivative = jax.jacrev if sizes[0] == 32 else jax.jacfwd
    best = jax.vmap(derivative(_alone(whole), 1), (None, 0))
    assert flops(nested.batched_jacobian(whole), params, x) <= 1.1 * flops(best, params, x)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x - jnp.mean(x, axis=0, keepdims=True),
        lambda x: jnp.cumsum(x, axis=0),
        lambda x: x[::-1],
        lambda x: x.at[5].add(1e-3 * x[1]),
    ],
    ids=["normalisation", "sum", "order", "two of them"],
)
def test_what_mixes_samples_is_found_out(f):
    for of in (f, lambda x: jnp.sum(f(x), 1)):
        with pytest.raises(ValueError, match=r"f mixes the samples of the batch .*; use jax\.jacobian"):
            nested.batched_jacobian(lambda _, x, of=of: of(x), check=True)(None, X)


def test_mixing_is_seen_sample_by_sample_and_in_every_dtype():
    large = jnp.array([1e5, 1.0, 1.0, 1.0]).reshape(4, 1)
    slightly = lambda _, x: large * x + jnp.array([0.0, 0.02, 0.0, 0.0]).reshape(4, 1) * x[2:3]
    with pytest.raises(ValueError, match="sample 1 with others"):
        nested.batched_jacobian(slightly, check=True)(None, jnp.ones((4, 3)))
    weights, x = jax.random.normal(jax.random.key(0), (16, 3)), jax.random.normal(jax.random.key(1), (5, 3))
    half = weights.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    nested.batched_jacobian(lambda w, x: jnp.tanh(x @ w.T), check=True)(*half)
    subnormal = jnp.float16(1e-5)
    nested.batched_jacobian(lambda _, x: jnp.tanh(x) * subnormal, check=True)(None, jnp.ones((3, 3), jnp.float16))


def test_errors_of_batches(without_type_checks):
    of = lambda f, **options: lambda x: nested.batched_jacobian(lambda _, x: f(x), **options)(None, x)
    with pytest.raises(ValueError, match=r"expected f to return \(7, ...\), one output per sample, got shape \(\)"):
        of(jnp.sum)(X)
    with pytest.raises(ValueError, match=r"expected f to return \(7, ...\), one output per sample, got shape \(3,\)"):
        of(lambda x: jnp.sum(x, axis=0))(X)
    with pytest.raises(TypeError, match="expected x to be real and floating, got int32"):
        of(lambda x: x)(jnp.arange(3))
    with pytest.raises(TypeError, match="expected f to return a real floating array, got tuple"):
        of(lambda x: (x,))(X)
    with pytest.raises(ValueError, match=r"expected samples of shape \(batch, ...\), got a scalar"):
        of(lambda x: x)(1.0)
    with pytest.raises(TypeError, match="check=True needs values: use it only outside of jit"):
        jax.jit(of(jnp.sin, check=True))(X)
    with pytest.raises(ValueError, match="chunk must be a whole number of sweeps, at least 1, got 0"):
        of(jnp.sin, chunk=0)(X)


def _loss(model, x, weight):
    total = sum(jnp.sum(jnp.sin(jnp.abs(jnp.asarray(leaf, jnp.complex64)) * x)) for leaf in inexact_leaves(model))
    return weight * jnp.real(total)


EXAMPLES = (jnp.linspace(0.5, 1.5, 5), jnp.arange(5.0))


@pytest.mark.parametrize("name", ["complex", "bf16 with f32", "same array twice", "transposed tie", "prng keys", "mlp"])
def test_gradients_of_examples(name):
    model = ZOO[name].make()
    layout = ZOO[name].layout(model)
    _, restructure = tp.ravel(model, layout)
    one_by_one = lambda model: jax.lax.map(
        lambda example: restructure.ravel_gradient(tp.grad(_loss, layout)(model, *example)), EXAMPLES
    )

    @tp.jit
    def run(model):
        tree = nested.per_example_gradients(_loss, trainable=layout, chunk=2)(model, *EXAMPLES)
        matrix = nested.per_example_gradients(_loss, trainable=layout, flat=True)(model, *EXAMPLES)
        return one_by_one(model), tree, jax.vmap(restructure.ravel_gradient)(tree), matrix

    want, tree, *found = run(model)
    assert jax.tree.structure(tree) == jax.tree.structure(tp.partition(model, layout)[0])
    for matrix in found:
        np.testing.assert_allclose(matrix, want, 1e-2 if layout.nbytes < 4 * layout.size else 1e-5, 1e-6)


def test_errors_of_examples():
    model = {"w": ramp(2)}
    for batch in ((jnp.ones(3), jnp.ones(2)), (jnp.ones(3), 1.0), ()):
        with pytest.raises(ValueError, match="expected a batch of arrays with one leading axis in common, got shapes"):
            nested.per_example_gradients(_loss)(model, *batch)
    with pytest.raises(ValueError, match="chunk must be a whole number of examples, at least 1, got 0"):
        nested.per_example_gradients(_loss, chunk=0)(model, *EXAMPLES)
