"""What holds of every matrix: it acts as the array that it stands for."""

import functools
from typing import Any

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest
from hypothesis import example, given, settings

import treeparams as tp
from treeparams import matrices

from .matrix_zoo import MATRICES, Kind, low_rank, normal, svd
from .zoo import assert_close, assert_same, enable_x64

KINDS = pytest.mark.parametrize("kind", MATRICES.values(), ids=MATRICES.keys())
SIZES = st.sampled_from([0, 1, 2, 5])  # few, since each shape is compiled


@functools.cache
def make(kind: Kind, m: int = 3, n: int = 4) -> Any:
    return kind.make(n if kind.is_square else m, n)


to_dense = jax.jit(lambda matrix: matrix.to_dense())  # compiled once for all tests of a kind


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, tree)


def products(matrix: Any, x: jax.Array, y: jax.Array) -> Any:
    """Those of a matrix, or of an array, and of its transpose."""
    transpose = matrix.T
    return matrix @ x, y @ matrix, transpose @ y.T, x.T @ transpose


@KINDS
@example(m=0, n=2)
@example(m=2, n=0)
@settings(deadline=None, max_examples=2, derandomize=True)
@given(m=SIZES, n=SIZES)
def test_products_are_those_of_the_dense_matrix(kind: Kind, m: int, n: int):
    matrix = make(kind, m, n)
    m, n = matrix.shape
    x, y = normal(10, n, 3), normal(11, 3, m)
    of_both = lambda matrix: (products(matrix, x, y), products(matrix.to_dense(), x, y), matrix.T.to_dense())
    got, want, transposed = jax.jit(of_both)(matrix)
    dense = jax.eval_shape(matrix.to_dense)
    assert matrix.shape == matrix.T.T.shape == dense.shape
    assert (matrix.dtype, matrix.ndim) == (dense.dtype, 2)
    assert_close(got, want, 2e-5)
    assert_close(jnp.matmul(transposed, y.T), want[2], 2e-5)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_vectors_and_batches_of_jax_and_of_numpy(batch: tuple[int, ...]):
    matrix = matrices.LowRank(normal(9, 2, 4), normal(8, 2, 1), normal(7, 1, 4))
    dense = matrix.to_dense()
    vector = not batch
    x = normal(10, 4) if vector else normal(10, *batch[:-1], 4, batch[-1])
    y = normal(11, *batch, 2)
    want = dense @ x, y @ dense
    for array in (jnp.asarray, np.asarray):
        got = matrix @ array(x), array(y) @ matrix
        assert all(isinstance(each, jax.Array) for each in got)
        assert_close(got, want)


def squares(matrix: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(matrix @ x)) + jnp.sum(jnp.cos(y @ matrix))


@KINDS
def test_first_and_second_derivatives_in_float64(kind: Kind):
    """Those of the dense matrix, and the first that of a finite difference."""
    single = make(kind)
    with enable_x64(True):
        params, rest = tp.partition(cast(single, jnp.float64))
        m, n = single.shape
        point = (params, *(normal(seed, *shape).astype(jnp.float64) for seed, shape in ((12, (n, 2)), (13, (2, m)))))
        direction = jax.tree.map(lambda leaf: jnp.asarray(np.cos(np.arange(leaf.size)).reshape(leaf.shape)), point)

        def derivatives(of: Any, point: Any) -> Any:
            loss = lambda params, x, y: squares(of(tp.combine(params, rest)), x, y)
            return jax.jvp(jax.grad(loss, (0, 1, 2)), point, direction)

        @jax.jit
        def checked(point: Any) -> Any:
            moved = lambda step: jax.tree.map(lambda a, b: a + step * b, point, direction)
            value = lambda params, x, y: squares(tp.combine(params, rest), x, y)
            of_both = [derivatives(of, point) for of in (lambda matrix: matrix, lambda matrix: matrix.to_dense())]
            return of_both, value(*moved(1e-6)) - value(*moved(-1e-6))

        (got, want), difference = checked(point)
        assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(jnp.float64)}
        assert_close(got, want, 1e-9)
        slope = sum(np.sum(a * b) for a, b in zip(*map(jax.tree.leaves, (got[0], direction)), strict=True))
        np.testing.assert_allclose(difference / 2e-6, slope, rtol=1e-5, atol=1e-6)


@KINDS
def test_in_bfloat16(kind: Kind):
    low = cast(make(kind), jnp.bfloat16)
    x = normal(12, low.shape[1], 2).astype(jnp.bfloat16)
    got = np.asarray(jax.jit(lambda low: low @ x)(low))
    want = np.asarray(to_dense(cast(low, jnp.float32))) @ np.asarray(x, np.float32)
    assert got.dtype == low.dtype == jax.eval_shape(low.to_dense).dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=0.02, atol=0.02 * np.max(np.abs(want)))
    with jax.numpy_dtype_promotion("standard"):
        assert jax.eval_shape(lambda low: low @ x.astype(jnp.float32), low).dtype == jnp.float32


@KINDS
def test_an_ensemble(kind: Kind):
    one = make(kind)
    other = jax.tree.map(lambda leaf: 0.5 * leaf if eqx.is_inexact_array(leaf) else leaf, one)
    ensemble = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, other)
    assert ensemble.shape == one.shape
    x = normal(18, 2, one.shape[1])
    got = jax.jit(jax.vmap(lambda matrix, x: (matrix @ x, x @ matrix.T)))(ensemble, x)
    want = np.stack([np.asarray(to_dense(matrix)) @ row for matrix, row in zip((one, other), x, strict=True)])
    assert_close(got, (want, want), 2e-5)
    with pytest.raises(ValueError, match=r"Of an ensemble, take each by jax\.vmap"):
        ensemble @ x[0]


@KINDS
def test_through_the_vector_and_back(kind: Kind):
    model = {"weight": make(kind), "bias": normal(19, 3)}
    vector, restructure = tp.ravel(model)
    assert restructure.layout.size == sum(leaf.size for leaf in tp.trainables(model).values())
    assert_same(restructure(vector), model)


@pytest.mark.parametrize(
    "name", ["svd", "svd of rotations", "low rank", "pre-imputing", "toeplitz", "kronecker", "sum"]
)
def test_freezing_one_factor_only(name: str):
    model = {"weight": make(MATRICES[name]), "bias": normal(19, 3)}
    m, n = model["weight"].shape
    x, y = normal(12, n, 2), normal(13, 2, m)
    loss = lambda model: squares(model["weight"], x, y) + jnp.sum(model["bias"])
    whole = tp.layout(model)
    path = next(path for path in whole.paths if path != "bias")
    full, partial = jax.jit(lambda model: [tp.grad(loss, each)(model) for each in (whole, whole.freeze(path))])(model)
    want = {each: leaf for each, leaf in tp.trainables(full).items() if each != path}
    assert len(want) == len(whole.paths) - 1
    assert_close(tp.trainables(partial), want)


# -- In layers


LAYERS = {
    "linear": (lambda key: eqx.nn.Linear(4, 4, key=key), lambda layer, x: layer(x)),
    "mlp": (lambda key: eqx.nn.MLP(4, 4, 4, 2, key=key), lambda layer, x: layer(x)),
    "gru": (lambda key: eqx.nn.GRUCell(4, 4, key=key), lambda layer, x: layer(x, x)),
    "attention": (
        lambda key: eqx.nn.MultiheadAttention(2, 4, key=key),
        lambda layer, x: layer(*[jnp.stack([x, -x])] * 3),
    ),
}


@pytest.mark.parametrize(("build", "call"), LAYERS.values(), ids=LAYERS.keys())
def test_a_layer_that_holds_matrices_works_unchanged(build: Any, call: Any):
    layer = build(jax.random.key(0))
    is_weight = lambda leaf: getattr(leaf, "ndim", 0) == 2
    kept = jax.tree.map(lambda leaf: svd(23, *leaf.shape) if is_weight(leaf) else leaf, layer)
    is_matrix = lambda node: isinstance(node, matrices.SVD)
    xs = normal(22, 3, 4)
    each = lambda layer, xs: jax.vmap(functools.partial(call, layer))(xs)
    layout = tp.layout(kept, matrices.SVD)
    loss = lambda layer, xs: jnp.sum(each(layer, xs) ** 2)

    @eqx.filter_jit
    def checked(kept: Any, xs: jax.Array) -> Any:
        dense = jax.tree.map(lambda node: node.to_dense() if is_matrix(node) else node, kept, is_leaf=is_matrix)
        return each(kept, xs), each(dense, xs), tp.grad(loss, layout)(kept, xs)

    got, want, gradient = checked(kept, xs)
    assert_close(got, want, 1e-4)
    assert all(path.rpartition("weight")[1] for path in layout.paths)
    assert all(bool(jnp.any(leaf != 0)) for leaf in tp.trainables(gradient).values())


# -- Sums, products, multiples


def test_matrices_of_matrices():
    a, b = low_rank(23, 2, 2), low_rank(33, 2, 2)
    x, two = normal(25, 2), jnp.array(2.0)
    cases = [
        (a @ b, a.to_dense() @ b.to_dense()),
        (a + b, a.to_dense() + b.to_dense()),
        (a - b, a.to_dense() - b.to_dense()),
        (3 * a, 3 * a.to_dense()),
        (a * two, 2 * a.to_dense()),
        (a / 2, a.to_dense() / 2),
        (-a, -a.to_dense()),
        ((a @ b).T, (a.to_dense() @ b.to_dense()).T),
    ]
    for matrix, dense in cases:
        assert isinstance(matrix, matrices.AbstractMatrix)
        assert_close((matrix.to_dense(), matrix @ x, x @ matrix), (dense, dense @ x, x @ dense))


def test_a_matrix_of_matrices_is_tied_to_its_parts():
    a = matrices.Orthogonal(normal(26, 2, 2))
    model = {"a": a, "twice": 2 * a, "squared": a @ a, "transposed": a.T}
    assert tp.layout(model).paths == ("a.vectors",)
    assert len(tp.layout(model).ties["a.vectors"]) == 4


def test_a_factor_is_a_parameter_if_it_is_an_array():
    a = matrices.Orthogonal(normal(27, 2, 2))
    assert tp.layout(2.0 * a).paths == ("matrix.vectors",)
    assert tp.layout(jnp.array(2.0) * a).paths == ("matrix.vectors", "factor")


def test_shapes_that_do_not_fit():
    a, b = matrices.SVD.random(2, 3, key=jax.random.key(0)), matrices.SVD.random(2, 2, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"M @ N: the shapes \(2, 3\) and \(2, 2\) do not fit"):
        a @ b
    with pytest.raises(ValueError, match=r"M \+ N: the shapes \(2, 3\) and \(2, 2\) differ"):
        a + b
    with pytest.raises(ValueError, match=r"M @ x: M is a SVD of shape \(2, 3\), so x must have shape \(3,\) or"):
        a @ jnp.ones(2)
    with pytest.raises(ValueError, match=r"x @ M: .* shape \(2,\) or \(\.\.\., 2\), got \(2, 3\)"):
        np.ones((2, 3)) @ a


# -- What is no array


NEEDS_ENTRIES = {
    "index": lambda m: m[0],
    "iterate": lambda m: list(m),
    "numpy.asarray": lambda m: np.asarray(m),
    "add": lambda m: m + jnp.ones((2, 2)),
    "add to": lambda m: jnp.ones((2, 2)) + m,
    "subtract": lambda m: m - 1,
    "subtract from": lambda m: np.ones((2, 2)) - m,
    "times": lambda m: m * np.ones(2),
    "times from the left": lambda m: jnp.ones(2) * m,
    "elementwise times": lambda m: m * m,
    "divide": lambda m: m / jnp.ones(2),
    "divide by": lambda m: 1 / m,
    "power": lambda m: m**2,
    "modulo": lambda m: m % 2,
    "floor": lambda m: m // 2,
    "compare": lambda m: m < 1,
    "abs": abs,
}


@pytest.mark.parametrize("use", NEEDS_ENTRIES.values(), ids=NEEDS_ENTRIES.keys())
def test_what_needs_all_entries_says_so(use: Any):
    with pytest.raises(TypeError, match=r"needs all entries of a SVD: take M\.to_dense\(\) first"):
        use(matrices.SVD.random(2, 2, key=jax.random.key(0)))


def test_other_operands():
    matrix = matrices.SVD.random(2, 2, key=jax.random.key(0))
    for use in (lambda: matrix @ [1.0, 2.0], lambda: [1.0, 2.0] @ matrix, lambda: matrix @ 2.0):
        with pytest.raises(TypeError, match="unsupported operand"):
            use()
    with pytest.raises(ValueError, match=r"got \(\)"):
        matrix @ jnp.array(2.0)
    with pytest.raises(TypeError, match="does not support ufuncs"):
        np.exp(matrix)
    with pytest.raises(TypeError, match=r"SVD"):
        jnp.asarray(matrix)
    with jax.numpy_dtype_promotion("standard"):
        assert (matrix @ jnp.array([1, 2])).dtype == jnp.float32


def test_it_prints_its_shape_and_its_parameters():
    svd = matrices.SVD.random(2, 3, key=jax.random.key(0), reflections=1)
    text = "Orthogonal(shape=(3, 3), vectors=f32[1,3])"
    assert repr(svd.v) == text
    assert text in repr(svd)
    assert "shape=(2, 3)" in repr({"layer": svd})
    mask = tp.layout(svd).mask  # a matrix with bools in place of its arrays
    assert "Orthogonal(shape=None, vectors=True)" in repr(mask)


# -- lineax


def test_to_lineax_and_back():
    matrix = matrices.LowRank(normal(28, 3, 3), normal(29, 3, 1), normal(30, 1, 3))
    b = normal(31, 3)
    operator = matrices.to_lineax(matrix)
    assert_close(operator.as_matrix(), matrix.to_dense())
    assert_close(operator.mv(b), matrix @ b)
    assert_close(operator.transpose().mv(b), b @ matrix)
    solve = lambda matrix: lineax.linear_solve(matrices.to_lineax(matrix), b).value
    dense = lambda matrix: jnp.linalg.solve(matrix.to_dense(), b)
    assert_close(jax.jit(solve)(matrix), dense(matrix), 1e-3)
    gradient = lambda solve: tp.grad(lambda matrix: jnp.sum(solve(matrix) ** 2))(matrix)
    assert_close(gradient(solve), gradient(dense), 1e-2)


def test_tags_choose_the_solver():
    a = normal(32, 3, 3)
    matrix = matrices.from_lineax(lineax.MatrixLinearOperator(a @ a.T + jnp.eye(3)))
    operator = matrices.to_lineax(matrix, lineax.positive_semidefinite_tag)
    solution = lineax.linear_solve(operator, jnp.ones(3), lineax.CG(1e-6, 1e-6)).value
    assert_close(matrix @ solution, jnp.ones(3), 1e-4)


def test_an_operator_as_a_weight():
    w = normal(33, 3, 4)
    operator = lineax.MatrixLinearOperator(w)
    layer = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    kept = eqx.tree_at(lambda layer: layer.weight, layer, matrices.from_lineax(operator))
    plain = eqx.tree_at(lambda layer: layer.weight, layer, w)
    x = normal(34, 2, 4)
    assert_close(jax.vmap(kept)(x), jax.vmap(plain)(x))
    assert tp.layout(kept).paths == ("weight.operator.matrix", "bias")
    assert_same(kept.weight.to_dense(), w)
    low_rank = matrices.LowRank.random(operator, 1, key=jax.random.key(1))
    assert isinstance(low_rank.base, matrices.AbstractMatrix)
    assert_close(low_rank @ x[0], w @ x[0])


def test_what_is_no_operator_between_vectors():
    with pytest.raises(TypeError, match="expected a lineax operator, got ArrayImpl"):
        matrices.from_lineax(jnp.ones((2, 2)))
    operator = lineax.IdentityLinearOperator(jax.ShapeDtypeStruct((2, 2), jnp.float32))
    with pytest.raises(
        TypeError, match=r"between vectors, but IdentityLinearOperator takes ShapeDtypeStruct\(shape=\(2, 2"
    ):
        matrices.from_lineax(operator)


@pytest.mark.usefixtures("without_type_checks")
def test_what_is_no_weight():
    with pytest.raises(TypeError, match="expected an array, got list"):
        matrices.LowRank([[1.0]], jnp.ones((1, 1)), jnp.ones((1, 1)))
    with pytest.raises(ValueError, match=r"expected a matrix, got an array of shape \(3,\)"):
        matrices.LowRank(jnp.ones(3), jnp.ones((3, 1)), jnp.ones((1, 1)))
    with pytest.raises(TypeError, match=r"a parameter is floating or complex, got int32"):
        matrices.LowRank(jnp.ones((1, 1)), jnp.ones((1, 1), jnp.int32), jnp.ones((1, 1)))


def test_a_number_stays_a_number_through_a_trace():
    matrix = matrices.Diagonal(normal(35, 3))
    for each in (matrix / 2, jax.jit(lambda m: m / 2)(matrix), jax.jit(lambda m: -m)(matrix)):
        assert tp.layout(each).paths == ("matrix.diagonal",)
    ensemble = jax.vmap(lambda d: 2 * matrices.Diagonal(d))(normal(36, 2, 3))
    got = jax.vmap(lambda matrix, x: matrix @ x)(ensemble, jnp.ones((2, 3)))
    assert_close(got, 2 * ensemble.matrix.diagonal)


@pytest.mark.usefixtures("standard_promotion")
def test_an_imaginary_factor():
    matrix = 1j * matrices.Diagonal(normal(37, 2))
    assert matrix.dtype == matrix.T.dtype == (matrix + matrix).dtype == jnp.complex64
    x = jnp.ones(2, jnp.complex64)
    assert_close(matrix.T @ x, matrix.to_dense() @ x)


INVERTIBLE = {
    "orthogonal": lambda: matrices.Orthogonal(normal(5, 3, 3)),
    "circulant": lambda: matrices.Circulant(normal(16, 3)),
    "kronecker": lambda: matrices.Kronecker(matrices.Diagonal(normal(14, 1)), matrices.Circulant(normal(16, 3))),
    "symmetric": lambda: matrices.SymmetricPositive(jnp.eye(3) + 0.1),
    "svd": lambda: svd(3, 3, 3),
}


@pytest.mark.parametrize("build", INVERTIBLE.values(), ids=INVERTIBLE.keys())
def test_transposes_and_inverses_have_inverses(build: Any):
    matrix, x = build(), normal(38, 3)
    both = jax.jit(
        lambda m: (m.T.inv() @ (m.T @ x), m.inv().T @ (m.T @ x), m.T.solve(m.T @ x), m.inv().inv() @ x, m @ x)
    )
    first, second, third, twice, once = both(matrix)
    for each in (first, second, third):
        np.testing.assert_allclose(each, x, atol=1e-4)
    np.testing.assert_allclose(twice, once, atol=1e-4)
    np.testing.assert_allclose(matrix.T.logdet(), -matrix.inv().logdet(), atol=1e-4)


def test_an_inverse_of_numpy_arrays_is_tied():
    loaded = jax.tree.map(np.asarray, svd(3, 3, 3))
    assert len(tp.layout([loaded, loaded.inv(), loaded.T]).ties) == 3
    diagonal = jax.tree.map(np.asarray, matrices.Diagonal(normal(14, 3)))
    assert tp.layout([diagonal, diagonal.inv()]).ties == {"0.diagonal": ("1.diagonal",)}


def test_an_operator_without_rows_or_columns():
    wide = matrices.from_lineax(lineax.MatrixLinearOperator(jnp.zeros((3, 0))))
    assert_close(wide @ jnp.ones((0, 2)), jnp.zeros((3, 2)))
    assert (jnp.ones((2, 3)) @ wide).shape == (2, 0)
