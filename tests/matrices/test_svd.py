"""Reflections, rotations, and the decomposition made of them."""

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

from ..zoo import assert_close, assert_same, enable_x64, flops
from .zoo import equations, mixed, normal, put, svd

KEY = jax.random.key(0)


def product_of_reflections(vectors: Any, x: Any) -> Any:
    """By the definition, one after the other."""
    return jax.lax.scan(lambda x, v: (x - 2 * v * (v @ x) / (v @ v), None), x, vectors, reverse=True)[0]


@pytest.mark.parametrize("shape", [(0, 3), (7, 4)])
def test_it_is_the_product_of_its_reflections(shape: tuple[int, int]):
    ways = [lambda vectors, x: matrices.Orthogonal(vectors) @ x, product_of_reflections]

    def derivatives(product: Any, vectors: jax.Array) -> Any:
        loss = lambda vectors: jnp.sum(jnp.sin(product(vectors, np.arange(1.0, shape[1] + 1))))
        entries = jax.vmap(lambda x: product(vectors, x), 1, 1)(np.eye(shape[1]))
        return entries, jax.jvp(jax.grad(loss), (vectors,), (jnp.cos(vectors),))

    with enable_x64(True):
        q = matrices.Orthogonal(jax.device_put(np.float64(normal(0, *shape))))
        others = lambda q: (q.to_dense(), [each.slogdet() for each in (q, q.T, q.inv())])
        (got, want), (dense, determinants) = jax.jit(
            lambda q: ([derivatives(way, q.vectors) for way in ways], others(q))
        )(q)
    assert_close(got, want, 1e-9)
    np.testing.assert_allclose(dense, want[0], atol=1e-9)
    for determinant in determinants:
        np.testing.assert_allclose(determinant, np.linalg.slogdet(np.asarray(dense)), atol=1e-9)


def test_it_is_orthogonal_whatever_the_lengths_and_a_vector_of_zeros_is_the_identity():
    vectors = np.asarray(normal(1, 6, 6))
    lengths = np.array([1, 1e-30, 1e-17, 1e17, 1e20, 1e37, 0], np.float32)
    every_second = np.where(np.arange(6) % 2 == 0, lengths[:, None], np.float32(1))[..., None]
    one = matrices.Orthogonal(jax.device_put(vectors))
    ensemble = eqx.tree_at(lambda q: q.vectors, one, jax.device_put(every_second * vectors))
    gradient = jax.grad(lambda q: jnp.sum(jnp.sin(q @ np.arange(6, dtype=np.float32))))
    results = lambda q: (q.to_dense(), q.slogdet(), gradient(q).vectors)
    without = matrices.Orthogonal(jax.device_put(vectors[1::2]))
    # Of two blocks, nearly parallel.
    n = 140
    alike = matrices.Orthogonal(jax.device_put(np.float32(1) + np.float32(1e-3) * np.asarray(normal(2, n, n))))

    @jax.jit
    def run(ensemble: Any, without: Any, alike: Any) -> Any:
        return jax.vmap(results)(ensemble), results(without), alike.to_dense()

    (dense, (signs, logs), gradients), (of_three, determinant, slopes), of_alike = jax.device_get(
        run(ensemble, without, alike)
    )
    np.testing.assert_allclose(of_alike @ of_alike.T, np.eye(n), atol=1e-5)
    np.testing.assert_allclose(dense @ np.swapaxes(dense, 1, 2), np.stack([np.eye(6)] * 7), atol=1e-5)
    assert_close(dense, np.stack([*[dense[0]] * 6, of_three]))
    assert_close((signs, logs), (np.float32([1] * 6 + [determinant[0]]), np.zeros(7, np.float32)))
    assert determinant[0] == -1
    assert np.all(np.isfinite(gradients))
    assert_close(gradients[6], np.stack([np.zeros_like(slopes), slopes], 1).reshape(6, 6))


def test_layers_of_rotations():
    def rotation(n: int, i: int, j: int, angle: Any) -> np.ndarray:
        plane = np.eye(n)
        plane[[i, j], [i, j]], plane[i, j], plane[j, i] = np.cos(angle), -np.sin(angle), np.sin(angle)
        return plane

    angles = normal(4, 2, 2)
    first = rotation(5, 0, 1, angles[0, 0]) @ rotation(5, 2, 3, angles[0, 1])
    second = rotation(5, 1, 2, angles[1, 0]) @ rotation(5, 3, 4, angles[1, 1])
    around = rotation(4, 1, 2, angles[1, 0]) @ rotation(4, 3, 0, angles[1, 1])
    of_five, of_four = jax.jit(lambda angles: [matrices.Givens(angles, n).to_dense() for n in (5, 4)])(angles)
    np.testing.assert_allclose(of_five, first @ second, atol=1e-6)
    np.testing.assert_allclose(of_four, first[:4, :4] @ around, atol=1e-6)
    assert matrices.Givens(angles, 5).slogdet() == matrices.Givens(angles, 5).T.slogdet() == (1, 0)


# -- The decomposition


@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (0, 3)])
def test_from_dense(shape: tuple[int, int]):
    w = normal(7, *shape)

    @jax.jit
    def there_and_back(w: jax.Array) -> Any:
        decomposed = matrices.SVD.from_dense(w)
        of_a_matrix = matrices.SVD.from_dense(decomposed.T)
        return decomposed.d, decomposed.to_dense(), of_a_matrix.to_dense()

    d, dense, transposed = there_and_back(w)
    assert_close((dense, transposed), (w, np.asarray(w).T))
    np.testing.assert_allclose(np.sort(np.abs(d))[::-1], np.linalg.svd(w, compute_uv=False), rtol=1e-5)


def test_the_inverse_and_the_determinant_are_those_of_the_entries():
    n = 6
    with_d = lambda matrix, d: eqx.tree_at(lambda matrix: matrix.d, matrix, d)
    of_dense = lambda d, matrix: jnp.linalg.slogdet(with_d(matrix, d).to_dense())
    positive, weight = (with_d(mixed(n, n, n), put(*d)) for d in (np.linspace(0.5, 3, n), [0.5, -1, 2, 3, 1, 1.5]))

    def determinants(matrix: Any) -> Any:
        got = matrix.slogdet(), jax.grad(lambda d: with_d(matrix, d).logdet())(matrix.d)
        return got, (tuple(of_dense(matrix.d, matrix)), jax.grad(lambda d: of_dense(d, matrix)[1])(matrix.d))

    @jax.jit
    def run(m: Any, weight: Any, x: jax.Array) -> Any:
        y, stacked = m @ x, jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), weight)
        same = m.solve(y), x @ m @ m.inv(), m.T.solve(m.T @ x), m.u.solve(m.u @ x)
        of_each = determinants(weight), determinants(weight.inv().T)
        return same, (m.inv().logdet(), m.T.logdet(), m.logdet()), of_each, stacked.slogdet()

    x = normal(8, n)
    same, (of_inverse, of_transpose, logdet), of_each, of_both = run(positive, weight, x)
    assert_same(positive.inv().inv(), positive)
    for each in same:
        np.testing.assert_allclose(each, x, atol=1e-3)
    np.testing.assert_allclose((-of_inverse, of_transpose), np.sum(np.log(positive.d)), rtol=1e-5)
    assert logdet == of_transpose
    for got, want in of_each:
        assert_close(got, want, 1e-4)
    assert_close(of_both, tuple(np.stack([each, each]) for each in of_each[0][0][0]))


def test_the_inverse_is_tied_to_the_original():
    weight = svd(3, 2, 2)
    model = {"there": weight, "back": weight.inv()}
    layout = tp.layout(model)
    assert layout.paths == ("back.u.vectors", "back.d", "back.v.vectors")
    x = normal(12, 2)
    loss = lambda model: jnp.sum((model["there"] @ x - 1) ** 2) + jnp.sum((model["back"] @ x) ** 2)
    tx = optim.trainable(optax.sgd(1e-2), layout)

    @jax.jit
    def step(model: Any) -> Any:
        after, _ = optim.step(tx, tp.grad(loss, layout)(model), tx.init(model), model)
        return after["there"] @ x, model["there"] @ x, after["back"] @ (after["there"] @ x)

    moved, before, same = step(model)
    assert not np.allclose(moved, before, atol=1e-3)
    np.testing.assert_allclose(same, x, atol=1e-4)
    loaded = jax.tree.map(np.asarray, weight)  # as a file gives it
    assert len(tp.layout([loaded, loaded.inv(), loaded.T]).ties) == 3


def test_random_ones_of_a_dtype():
    for kind in ("householder", "givens"):
        made = jax.eval_shape(lambda: matrices.SVD.random(3, 4, key=KEY, kind=kind, dtype=jnp.bfloat16))  # noqa: B023
        assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype("bfloat16")}


@pytest.mark.usefixtures("standard_promotion")
def test_a_complex_operand():
    x = np.asarray(normal(14, 3)) + np.complex64(1j) * np.asarray(normal(15, 3))
    products = jax.jit(lambda each: ((each @ x, x @ each), (each.to_dense() @ x, x @ each.to_dense())))
    assert_close(*products(mixed(13, 3, 3)))


@pytest.mark.parametrize(("kind", "factors"), [("householder", 140), ("givens", 6)])
def test_no_square_array_in_a_program_and_full_precision_in_its_products(kind: Any, factors: int):
    n, batch = 150, 5
    weight = jax.eval_shape(lambda: matrices.SVD.random(n, n, key=KEY, reflections=factors, kind=kind))
    loss = lambda svd, x: jnp.sum((svd @ x) ** 2) + jnp.sum((x.T @ svd.T) ** 2) + jnp.sum((svd.inv() @ x) ** 2)
    program = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(weight, jax.ShapeDtypeStruct((n, batch), jnp.float32))
    found = list(equations(program))
    shapes = {variable.aval.shape for equation in found for variable in equation.outvars}
    assert (batch, n) in shapes
    assert not {shape for shape in shapes if math.prod(shape) >= n * n}
    products = [each.params["precision"] for each in found if each.primitive.name == "dot_general"]
    assert bool(products) == (kind == "householder")  # rotations take none
    assert set(products) <= {(jax.lax.Precision.HIGHEST,) * 2}


def test_operations_of_few_reflections():
    n, batch = 512, 64
    weight = jax.eval_shape(lambda: matrices.SVD.random(n, n, key=KEY, reflections=n // 16))
    x = jax.ShapeDtypeStruct((n, batch), jnp.float32)
    dense = flops(lambda w, x: w @ x, jax.ShapeDtypeStruct((n, n), jnp.float32), x)
    assert flops(lambda svd, x: svd @ x, weight, x) < 0.35 * dense  # 0.25, and the triangles
