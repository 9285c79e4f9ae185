"""What holds of every matrix: it acts as the array that it stands for."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treeparams as tp
from treeparams import matrices

from ..long import some
from ..zoo import assert_close, enable_x64, filled, first_devices
from .zoo import MATRICES, OWN, Circulant, low_rank, normal, put, svd

KINDS = pytest.mark.parametrize("kind", MATRICES.values(), ids=MATRICES.keys())
KEY = jax.random.key(0)


def cast(tree: Any, dtype: Any) -> Any:
    """By NumPy, so that nothing is compiled."""
    put = lambda leaf: jax.device_put(np.asarray(leaf).astype(dtype)) if eqx.is_inexact_array(leaf) else leaf
    return jax.tree.map(put, tree)


def products(matrix: Any, x: Any, y: Any) -> Any:
    """Those of a matrix, or of an array, and of its transpose."""
    return matrix @ x, y @ matrix, matrix.T @ y.T, x.T @ matrix.T


def products_and_derivatives(of: Any, rest: Any, second: bool, *point: Any) -> Any:
    """With the first derivatives of a function of the products, and the second ones."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> Any:
        matrix = of(tp.combine(params, rest))
        outputs = matrix @ x, y @ matrix
        return sum(jnp.sum(jnp.sin(each)) for each in outputs), outputs

    gradient = jax.grad(loss, (0, 1, 2), has_aux=True)
    if not second:
        return gradient(*point)
    direction = jax.tree.map(lambda leaf: jnp.asarray(np.cos(np.arange(leaf.size)).reshape(leaf.shape)), point)
    return jax.jvp(gradient, point, direction)


# Of others they are in `test_svd` and `test_imputing`, or of matrices that these are composed of.
SECOND_DERIVATIVES = ("low rank", "of a user's own")


@pytest.mark.parametrize("name", some(MATRICES, ["inverse of an svd"]))  # an SVD too
def test_products_and_their_derivatives_are_those_of_the_dense_matrix(name: str):
    with enable_x64(True):
        matrix = cast(MATRICES[name](2, 3), jnp.float64)
        params, rest = tp.partition(matrix)
        x, y = (cast(normal(*each), jnp.float64) for each in ((12, matrix.shape[1], 2), (13, 2, matrix.shape[0])))
        ways = (lambda matrix: matrix, lambda matrix: matrix.to_dense())
        second = name in SECOND_DERIVATIVES
        both = jax.jit(lambda *point: [products_and_derivatives(of, rest, second, *point) for of in ways])
        got, want = both(params, x, y)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("float64")}
    assert_close(got, want, 1e-9)


@pytest.mark.parametrize("name", some(MATRICES, ["inverse of an svd"]))
def test_an_ensemble_and_low_precision(name: str):
    one = MATRICES[name](5, 2)
    other = jax.tree.map(lambda leaf: np.float32(0.5) * np.asarray(leaf) if eqx.is_inexact_array(leaf) else leaf, one)
    ensemble = jax.tree.map(lambda *leaves: jax.device_put(np.stack(leaves)), one, other)
    x = normal(18, 2, 2)
    low, low_x = cast((one, x), jnp.bfloat16)

    @jax.jit
    def checked(ensemble: Any, x: jax.Array, *rounded: Any) -> Any:
        each = jax.vmap(lambda matrix, x: (matrix @ x, x @ matrix.T, matrix.to_dense()))
        return each(ensemble, x), [matrix @ x for matrix, x in rounded]

    found = checked(ensemble, x, (low, low_x), cast((low, low_x), jnp.float32))
    each, (of_low, rounded) = jax.device_get(found)
    products, transposed, dense = each
    want = np.einsum("kij,kj->ki", dense, x)
    assert_close((products, transposed), (want, want), 2e-5)
    assert of_low.dtype == low.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(of_low, np.float32), rounded, rtol=0.02, atol=0.02 * np.max(abs(rounded)))
    assert (ensemble.shape, ensemble.ndim) == ((2, *one.shape), 3)
    with pytest.raises(ValueError, match=r"is an ensemble of matrices: multiply each by jax\.vmap"):
        ensemble @ x[0]


@KINDS
@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_shapes_and_dtypes(kind: Any, shape: tuple[int, int]):
    matrix = kind(*shape if kind is not MATRICES["of a user's own"] else (1, 1))  # there is no transform of nothing
    m, n = matrix.shape
    x, y = jax.ShapeDtypeStruct((n, 3), jnp.float32), jax.ShapeDtypeStruct((3, m), jnp.float32)
    dense = jax.eval_shape(lambda matrix: matrix.to_dense(), matrix)
    shapes = lambda matrix: jax.eval_shape(products, matrix, x, y)
    assert shapes(matrix) == shapes(np.zeros(dense.shape, dense.dtype))
    assert (matrix.shape, matrix.dtype, matrix.ndim, matrix.T.T.shape) == (dense.shape, dense.dtype, 2, matrix.shape)
    with jax.numpy_dtype_promotion("standard"):
        low, wide, whole = cast(matrix, jnp.bfloat16), np.ones(n, np.float32), np.ones(n, int)
        got = jax.eval_shape(lambda low, matrix: (low @ wide, matrix @ whole), low, matrix)
    assert [each.dtype for each in got] == [jnp.float32] * 2


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_vectors_and_batches_of_jax_and_of_numpy(batch: tuple[int, ...]):
    matrix = low_rank(7, 2, 4)
    x = normal(10, 4) if not batch else normal(10, *batch[:-1], 4, batch[-1])
    y = normal(11, *batch, 2)
    want = np.asarray(matrix.to_dense()) @ np.asarray(x), np.asarray(y) @ np.asarray(matrix.to_dense())
    for of in (lambda array: array, np.asarray):
        got = matrix @ of(x), of(y) @ matrix
        assert all(isinstance(each, jax.Array) for each in got)
        assert_close(got, want)


LAYERS = {
    "gru": (filled(eqx.nn.GRUCell, 4, 4), lambda layer, x: layer(x, x)),
    "attention": (filled(eqx.nn.MultiheadAttention, 2, 4), lambda layer, x: layer(*[jnp.stack([x, -x])] * 3)),
}


@pytest.mark.parametrize(("layer", "call"), LAYERS.values(), ids=LAYERS.keys())
def test_a_layer_that_holds_matrices_works_unchanged(layer: Any, call: Any):
    is_weight = lambda leaf: getattr(leaf, "ndim", 0) == 2
    kept = jax.tree.map(lambda leaf: low_rank(23, *leaf.shape) if is_weight(leaf) else leaf, layer)
    each = lambda layer, xs: jax.vmap(functools.partial(call, layer))(xs)

    @eqx.filter_jit
    def checked(kept: Any, xs: jax.Array) -> Any:
        gradient = tp.grad(lambda layer: jnp.sum(each(layer, xs) ** 2), tp.layout(kept, matrices.LowRank))(kept)
        return each(kept, xs), each(matrices.merge(kept), xs), tp.trainables(gradient)

    got, want, gradient = checked(kept, normal(22, 3, 4))
    assert_close(got, want, 1e-4)
    assert len(gradient) == 2 * len([leaf for leaf in jax.tree.leaves(layer) if is_weight(leaf)])
    assert all(np.any(np.asarray(leaf) != 0) for leaf in gradient.values())


def random_composition(random: np.random.Generator, leaves: list[Any], depth: int, last: int) -> tuple[Any, Any]:
    """A matrix, and in NumPy what it is composed to, of leaves and their entries; `last` chooses the last operation."""
    if depth == 0:
        return leaves[random.integers(len(leaves))]
    parts = [random_composition(random, leaves, depth - 1, random.integers(7)) for _ in range(2)]
    (first, dense), (second, other) = parts
    composed = (
        (first @ second, dense @ other),
        (first + second, dense + other),
        (first - second, dense - other),
        (first.T, dense.T),
        (-first, -dense),
        (first / 2, dense / 2),
        (put(3)[0] * first, 3 * dense),
    )
    return composed[last]


def test_random_compositions():
    assert len(OWN["code"].strip().splitlines()) <= 25  # so many lines does a matrix of a user's own take
    random = np.random.default_rng(0)
    kept = [low_rank(1, 2, 2), matrices.Orthogonal(normal(2, 1, 2)), Circulant(normal(4, 2))]
    entries = jax.jit(lambda each: [matrix.to_dense() for matrix in each])(kept)
    leaves = [(matrix, np.asarray(dense, np.float64)) for matrix, dense in zip(kept, entries, strict=True)]
    composed, x = [random_composition(random, leaves, 2, last) for last in range(7)], normal(25, 2)
    results = lambda each: [(matrix.to_dense(), matrix @ x, x @ matrix) for matrix in each]
    got = jax.jit(results)([matrix for matrix, _ in composed])
    want = [(dense, dense @ x, x @ dense) for _, dense in composed]
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.max(abs(theirs)))


@pytest.mark.usefixtures("standard_promotion")
def test_which_parameters_and_dtype_a_matrix_of_matrices_has():
    a, imaginary, x = matrices.Orthogonal(normal(26, 2, 2)), 1j * low_rank(37, 2, 2), np.ones(2, np.complex64)
    model = {"a": a, "twice": 2 * a, "squared": a @ a, "transposed": a.T}
    assert tp.layout(model).paths == ("a.vectors",)
    assert len(tp.layout(model).ties["a.vectors"]) == 4
    for each in (2.0 * a, a / 2, jax.jit(lambda a: a / 2)(a), jax.jit(lambda a: -a)(a)):
        assert tp.layout(each).paths == ("matrix.vectors",)
    assert tp.layout(put(2)[0] * a).paths == ("matrix.vectors", "factor")  # if it is an array
    assert imaginary.dtype == imaginary.T.dtype == (imaginary + imaginary).dtype == jnp.complex64
    assert_close(*jax.jit(lambda matrix: (matrix.T @ x, matrix.to_dense().T @ x))(imaginary))


def test_it_prints_its_shape_and_its_parameters():
    weight = svd(0, 2, 3)
    assert "v=Orthogonal(shape=(3, 3), vectors=f32[2,3])" in repr({"layer": weight})
    mask = tp.layout(weight).mask  # a matrix with bools in place of its arrays
    assert "Orthogonal(shape=None, vectors=True)" in repr(mask)


def test_to_lineax_and_back():
    matrix, b = low_rank(28, 3, 3), normal(31, 3)

    @jax.jit
    def checked(matrix: Any) -> Any:
        operator, dense = matrices.to_lineax(matrix), matrix.to_dense()
        solved = lambda matrix: lineax.linear_solve(matrices.to_lineax(matrix), b).value
        of_dense = lambda matrix: jnp.linalg.solve(matrix.to_dense(), b)
        results = lambda solve: (solve(matrix), tp.grad(lambda matrix: jnp.sum(solve(matrix)))(matrix))
        got = operator.as_matrix(), operator.mv(b), operator.transpose().mv(b), results(solved)
        return got, (dense, dense @ b, b @ dense, results(of_dense))

    assert_close(*checked(matrix), 1e-3)
    tagged = matrices.to_lineax(matrix, lineax.positive_semidefinite_tag)
    assert lineax.is_positive_semidefinite(tagged)
    assert not lineax.is_positive_semidefinite(matrices.to_lineax(matrix))


def test_an_operator_as_a_weight():
    w, x = normal(33, 3, 4), normal(34, 4, 2)
    held = {"weight": matrices.from_lineax(lineax.MatrixLinearOperator(w))}
    assert tp.layout(held).paths == ("weight.operator.matrix",)
    operators = lineax.MatrixLinearOperator(w), lineax.MatrixLinearOperator(normal(0, 4, 0))
    kept = held["weight"], matrices.LowRank.random(operators[0], 1, key=KEY), matrices.from_lineax(operators[1]).T
    of_each = jax.jit(lambda kept: [(matrix @ x, matrix.T.T @ x, matrix.to_dense()) for matrix in kept])(kept)
    for got, dense in zip(of_each, (w, w, np.zeros((0, 4), np.float32)), strict=True):
        assert_close(got, (dense @ x, dense @ x, dense))


SPREAD = {
    "svd": MATRICES["svd"],  # a scan over blocks of reflections, and one over layers of rotations
    "pre-imputing, of low rank": lambda m, n: matrices.PreImputing(low_rank(7, m, n), normal(11, n)),
    "post-imputing": MATRICES["post-imputing"],
}


@pytest.mark.parametrize("name", SPREAD)
def test_a_batch_that_is_spread_over_devices(name: str):
    """On an explicit mesh, and within `shard_map` as it is by default, where types say what varies."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=first_devices(2))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    matrix, x = SPREAD[name](3, 4), normal(5, 4, 4)

    def results(matrix: Any, x: jax.Array) -> Any:
        y, pull = jax.vjp(lambda matrix, x: x @ matrix.T, matrix, x)
        return y, *pull(jnp.cos(y))

    want, products = jax.jit(results)(matrix, x), lambda *args: (results(*args)[0], results(*args)[2])
    several = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), matrix)
    with jax.set_mesh(mesh):
        of_mesh, of_x = jax.device_put(matrix, whole), jax.device_put(x, split)
        assert_close(jax.jit(results)(of_mesh, of_x), want)
        in_map = jax.shard_map(products, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
        assert_close(jax.jit(in_map)(of_mesh, of_x), (want[0], want[2]))
        if name != "svd":
            return
        # Each device has a matrix of its own, and all of the batch.
        own = lambda several, x: x @ jax.tree.map(lambda leaf: leaf[0], several).T
        in_map = jax.shard_map(own, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
        got = jax.jit(in_map)(jax.device_put(several, split), jax.device_put(x, whole))
        assert_close(got, np.concatenate([want[0], want[0]]))
