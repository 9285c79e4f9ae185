"""Reflections, rotations, and the decomposition made of them."""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import matrices, optim

from .matrix_zoo import normal
from .zoo import assert_close, flops


def product_of_reflections(vectors: Any) -> np.ndarray:
    vectors = np.asarray(vectors, np.float64)
    q = np.eye(vectors.shape[1])
    for v in vectors:
        q = q @ (np.eye(len(v)) - 2 * np.outer(v, v) / (v @ v))
    return q


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (3, 4), (7, 4), (140, 140)])
def test_it_is_the_product_of_its_reflections(shape: tuple[int, int]):
    vectors = normal(0, *shape)
    want = product_of_reflections(vectors)
    q = matrices.Orthogonal(vectors)
    np.testing.assert_allclose(q.to_dense(), want, atol=5e-6)
    np.testing.assert_allclose(q.T.to_dense(), want.T, atol=5e-6)
    np.testing.assert_allclose(q.slogdet()[0], np.linalg.slogdet(want)[0])


def test_the_length_of_a_reflection_vector_does_not_matter():
    vectors = normal(1, 3, 4)
    lengths = jnp.array([[1e-15], [1.0], [1e15]])
    assert_close(matrices.Orthogonal(vectors * lengths).to_dense(), matrices.Orthogonal(vectors).to_dense())


def test_vectors_that_are_nearly_parallel():
    vectors = jnp.ones((64, 64)) + 1e-3 * normal(2, 64, 64)
    q = np.asarray(matrices.Orthogonal(vectors).to_dense())
    np.testing.assert_allclose(q @ q.T, np.eye(64), atol=1e-5)


def test_a_vector_of_zeros_is_the_identity():
    vectors = normal(3, 3, 4).at[1].set(0)
    loss = lambda q: jnp.sum(jnp.sin(q @ jnp.arange(4.0)))
    one, other = matrices.Orthogonal(vectors), matrices.Orthogonal(vectors[jnp.array([0, 2])])
    assert_close(one.to_dense(), other.to_dense())
    assert one.slogdet()[0] == other.slogdet()[0] == 1
    got, want = jax.jit(jax.grad(loss))(one).vectors, jax.jit(jax.grad(loss))(other).vectors
    assert_close(got, jnp.zeros((3, 4)).at[jnp.array([0, 2])].set(want))
    assert_close(matrices.Orthogonal(jnp.zeros((2, 3))).to_dense(), jnp.eye(3))


def test_layers_of_rotations():
    angles = normal(4, 2, 2)
    plane = lambda i, j, angle: _rotation(5, i, j, angle)
    first = plane(0, 1, angles[0, 0]) @ plane(2, 3, angles[0, 1])
    second = plane(1, 2, angles[1, 0]) @ plane(3, 4, angles[1, 1])
    assert_close(matrices.Givens(angles, 5).to_dense(), first @ second)
    around = plane(1, 2, angles[1, 0])[:4, :4] @ _rotation(4, 3, 0, angles[1, 1])
    assert_close(matrices.Givens(angles, 4).to_dense(), first[:4, :4] @ around)
    assert matrices.Givens(angles, 5).slogdet() == (1, 0)


def _rotation(n: int, i: int, j: int, angle: Any) -> jax.Array:
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.eye(n).at[i, i].set(cos).at[j, j].set(cos).at[i, j].set(-sin).at[j, i].set(sin)


def test_n_layers_of_rotations_reach_any_rotation():
    target = matrices.Orthogonal(normal(5, 4, 5)).to_dense()
    start = matrices.Givens.random(5, key=jax.random.key(1))
    loss = lambda q: jnp.sum((q.to_dense() - target) ** 2)
    assert jax.jit(functools.partial(descend, loss, steps=800, rate=0.05))(start)[1] < 1e-4


def descend(loss: Any, model: Any, steps: int, rate: float) -> tuple[Any, jax.Array]:
    tx = optim.trainable(optax.adam(rate))

    def step(carry: Any, _: None) -> tuple[Any, None]:
        model, state = carry
        with jax.numpy_dtype_promotion("standard"):
            return optim.step(tx, tp.grad(loss)(model), state, model), None

    model = jax.lax.scan(step, (model, tx.init(model)), None, steps)[0][0]
    return model, loss(model)


def test_points_are_turned_onto_others():
    """What Orthogonal is for: the rotation or reflection between two clouds of points, known in closed form."""
    points = normal(20, 12, 3)
    others = points @ matrices.Orthogonal(normal(21, 3, 3)).to_dense() + 0.05 * normal(22, 12, 3)
    u, _, vt = np.linalg.svd(points.T @ others)
    loss = lambda q: jnp.mean((points @ q - others) ** 2)
    start = matrices.Orthogonal.random(3, key=jax.random.key(3))
    q, error = jax.jit(functools.partial(descend, loss, steps=300, rate=0.05))(start)
    np.testing.assert_allclose(error, loss(jnp.asarray(u @ vt)), rtol=1e-3)
    np.testing.assert_allclose(q.to_dense(), u @ vt, atol=1e-2)


def test_orthogonal_after_a_thousand_steps():
    target = normal(6, 8, 8)
    start = matrices.SVD.random(8, 8, key=jax.random.key(2))
    loss = lambda svd: jnp.sum((svd.to_dense() - target) ** 2)
    svd, error = jax.jit(functools.partial(descend, loss, steps=1000, rate=0.03))(start)
    assert error < 1e-2 * loss(start)
    for q in (svd.u, svd.v):
        assert not np.allclose(q.vectors, start.u.vectors, atol=0.5)
        np.testing.assert_allclose(q.to_dense() @ q.to_dense().T, np.eye(8), atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5), (1, 1), (0, 3)])
def test_from_dense(shape: tuple[int, int]):
    w = normal(7, *shape)
    svd = matrices.SVD.from_dense(w)
    assert_close(svd.to_dense(), w)
    np.testing.assert_allclose(np.sort(np.abs(svd.d))[::-1], np.linalg.svd(w, compute_uv=False), rtol=1e-5)
    assert_close(jax.jit(lambda w: matrices.SVD.from_dense(matrices.SVD.from_dense(w).T).to_dense())(w), w.T)


@pytest.mark.parametrize(("kind", "n"), [*(("householder", n) for n in (1, 7, 64)), *(("givens", n) for n in (1, 64))])
def test_the_inverse(kind: Any, n: int):
    svd = matrices.SVD.random(n, n, key=jax.random.key(n), kind=kind)
    svd = eqx.tree_at(lambda svd: svd.d, svd, jnp.linspace(0.5, 3, n))
    x = normal(8, n)
    got = jax.jit(lambda svd, x: (svd.inv() @ (svd @ x), svd.solve(svd @ x), svd.inv().inv() @ x, x @ svd @ svd.inv()))
    for each, want in zip(got(svd, x), (x, x, svd @ x, x), strict=True):
        np.testing.assert_allclose(each, want, atol=1e-3)
    q = svd.u
    np.testing.assert_allclose(q.solve(q @ x), x, atol=1e-4)


def test_the_determinant_is_that_of_the_layers_jacobian():
    layer = eqx.nn.Linear(5, 5, key=jax.random.key(0))
    for weight in (matrices.SVD.from_dense(normal(9, 5, 5)), matrices.SVD.from_dense(normal(10, 5, 5)).inv().T):
        held = eqx.tree_at(lambda layer: layer.weight, layer, weight)
        sign, logarithm = np.linalg.slogdet(jax.jacobian(held)(jnp.ones(5)))
        np.testing.assert_allclose(weight.logdet(), logarithm, atol=1e-4)
        np.testing.assert_allclose(weight.slogdet(), (sign, logarithm), atol=1e-4)
        dense = jax.grad(lambda w: jnp.linalg.slogdet(w)[1])(weight.to_dense())
        assert_close(jax.grad(lambda w: w.logdet())(weight).d, jax.vjp(_as_d(weight), weight.d)[1](dense)[0], 1e-3)


def _as_d(weight: Any) -> Any:
    return lambda d: eqx.tree_at(lambda weight: weight.d, weight, d).to_dense()


def test_the_inverse_is_tied_to_the_original():
    svd = matrices.SVD.from_dense(normal(11, 4, 4))
    model = {"there": svd, "back": svd.inv()}
    layout = tp.layout(model)
    assert layout.paths == ("back.u.vectors", "back.d", "back.v.vectors")
    x = normal(12, 4)
    loss = lambda model, x: jnp.sum((model["there"] @ x - 1) ** 2) + jnp.sum((model["back"] @ x) ** 2)
    tx = optim.trainable(optax.sgd(1e-2), layout)
    after, _ = optim.step(tx, tp.grad(loss, layout)(model, x), tx.init(model), model)
    assert not np.allclose(after["there"] @ x, svd @ x, atol=1e-3)
    np.testing.assert_allclose(after["back"] @ (after["there"] @ x), x, atol=1e-4)


def test_only_floating_arrays_are_trained():
    svd = matrices.SVD.random(3, 4, key=jax.random.key(0), reflections=2)
    assert tp.layout(svd).paths == ("u.vectors", "d", "v.vectors")
    assert tp.layout(matrices.SVD.random(3, 4, key=jax.random.key(0), kind="givens")).paths == (
        "u.angles",
        "d",
        "v.angles",
    )
    assert tp.layout(svd, freeze=("u", "v")).paths == ("d",)


# -- What it costs


def shapes_in(jaxpr: Any) -> set[tuple[int, ...]]:
    found = set()
    for equation in jaxpr.eqns:
        found |= {variable.aval.shape for variable in equation.outvars}
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda each: hasattr(each, "jaxpr") or hasattr(each, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            found |= shapes_in(inner) if hasattr(inner, "eqns") else set()
    return found


@pytest.mark.parametrize(("kind", "factors"), [("householder", 140), ("givens", 6)])
def test_no_square_array_in_a_program(kind: Any, factors: int):
    n, batch = 150, 5
    svd = matrices.SVD.random(n, n, key=jax.random.key(0), reflections=factors, kind=kind)
    loss = lambda svd, x: jnp.sum((svd @ x) ** 2) + jnp.sum((x.T @ svd.T) ** 2) + jnp.sum((svd.inv() @ x) ** 2)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(svd, jnp.ones((n, batch)))
    shapes = shapes_in(jaxpr.jaxpr)
    assert (batch, n) in shapes
    assert not {shape for shape in shapes if math.prod(shape) >= n * n}


def test_operations_of_few_reflections():
    n, batch = 512, 64
    svd = matrices.SVD.random(n, n, key=jax.random.key(0), reflections=n // 16)
    x = jnp.ones((n, batch))
    dense = flops(lambda w, x: w @ x, svd.to_dense(), x)
    assert flops(lambda svd, x: svd @ x, svd, x) < 0.35 * dense  # 0.25, and the triangles


# -- What is refused


@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_what_only_a_square_matrix_has(shape: tuple[int, int]):
    svd = matrices.SVD.random(*shape, key=jax.random.key(0))
    inverses, determinants = [svd.inv, lambda: svd.solve(jnp.ones(shape[0]))], [svd.logdet, svd.slogdet]
    uses = [(use, "an inverse") for use in inverses] + [(use, "a determinant") for use in determinants]
    for use, what in uses:
        with pytest.raises(
            ValueError, match=rf"only a square matrix has {what}, and this SVD has shape \({shape[0]}, "
        ):
            use()


@pytest.mark.usefixtures("without_type_checks")
def test_wrong_parameters():
    q = matrices.Orthogonal(jnp.ones((1, 3)))
    with pytest.raises(ValueError, match=r"expected d of shape \(3,\) for u of \(3, 3\) and v of \(3, 3\), got \(2,\)"):
        matrices.SVD(q, jnp.ones(2), q)
    with pytest.raises(TypeError, match="expected real numbers, got complex64"):
        matrices.Orthogonal(jnp.ones((1, 3), jnp.complex64))
    with pytest.raises(TypeError, match="a parameter is floating or complex, got int32"):
        matrices.Orthogonal(jnp.ones((1, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"Orthogonal\.vectors has shape \(3,\), but one matrix has 2 axes there"):
        matrices.Orthogonal(jnp.ones(3))
    with pytest.raises(ValueError, match=r"expected angles of shape \(layers, 2\) for n=5, got \(1, 3\)"):
        matrices.Givens(jnp.ones((1, 3)), 5)
    with pytest.raises(ValueError, match='kind must be "householder" or "givens", got \'fft\''):
        matrices.SVD.random(2, 2, key=jax.random.key(0), kind="fft")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected real numbers, got complex64"):
        matrices.SVD.from_dense(jnp.ones((2, 2), jnp.complex64))


def test_a_complex_operand():
    q = matrices.SVD.from_dense(normal(13, 3, 3))
    x = jax.lax.complex(normal(14, 3), normal(15, 3))
    with jax.numpy_dtype_promotion("standard"):
        assert_close(q @ x, q.to_dense() @ x)
        rotations = matrices.Givens.random(3, key=jax.random.key(0))
        assert_close(x @ rotations, x @ rotations.to_dense())
