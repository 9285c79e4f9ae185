"""Diagonal, circulant, Toeplitz, Kronecker and permuted matrices: what is particular to each."""

import functools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
import scipy.linalg
import scipy.signal
from hypothesis import given, settings

import treeparams as tp
from treeparams.matrices import Circulant, Diagonal, Kronecker, Permuted, Toeplitz

from .zoo import assert_close, assert_same, enable_x64, flops

SIZES = st.sampled_from([0, 1, 2, 5])  # few, since each shape is compiled
DTYPES = st.sampled_from(["float32", "complex64"])
generated = settings(deadline=None, max_examples=12, derandomize=True)


def values(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    """Whole numbers, so that what is only moved or summed comes out exactly."""
    rng = np.random.default_rng(seed)
    parts = rng.integers(-9, 10, (2, *shape))
    return jax.device_put((parts[0] + 1j * parts[1] if dtype == "complex64" else parts[0]).astype(dtype))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype("float32"))  # compiles nothing


def indices(*each: int) -> jax.Array:
    return jax.device_put(np.asarray(each, "int32"))


@jax.jit
def of(matrix: Any, x: Any, y: Any) -> Any:
    """All that there is to compare with an array."""
    return matrix.to_dense(), matrix @ x, y @ matrix


def as_of_array(array: np.ndarray, x: Any, y: Any) -> Any:
    return array, array @ np.asarray(x), np.asarray(y) @ array


@functools.partial(jax.jit, static_argnums=1)
def descend(point: Any, loss: Any, rate: float, *data: Any) -> Any:
    """Two hundred steps of gradient descent."""
    step = lambda _, point: jax.tree.map(lambda x, g: x - rate * g, point, jax.grad(loss)(point, *data))
    return jax.lax.fori_loop(0, 200, step, point)


def fitted(matrix: Any, loss: Any, rate: float, *data: Any, **options: Any) -> Any:
    params, rest = tp.partition(matrix, tp.layout(matrix, **options))
    return tp.combine(descend(params, lambda params, *data: loss(tp.combine(params, rest), *data), rate, *data), rest)


def squared_error(matrix: Any, x: Any, y: Any) -> Any:
    return jnp.mean(jnp.sum((matrix @ x - y) ** 2, axis=0))


# -- As in NumPy and SciPy


@generated
@given(n=SIZES, dtype=DTYPES)
def test_a_circulant_matrix_is_that_of_scipy(n: int, dtype: str):
    column, x, y = (values(seed, *shape, dtype=dtype) for seed, shape in enumerate([(n,), (n, 2), (2, n)]))
    want = scipy.linalg.circulant(np.asarray(column)) if n else np.zeros((0, 0), dtype)
    dense, *products = of(Circulant(column), x, y)
    assert_same(dense, want)
    assert_close((dense, *products), as_of_array(want, x, y), 1e-4)


@jax.jit
def of_toeplitz(column: Any, row: Any, x: Any, y: Any) -> Any:
    return of(Toeplitz(column, row), x, y)


@generated
@given(m=SIZES, n=SIZES, dtype=DTYPES)
def test_a_toeplitz_matrix_is_that_of_scipy(m: int, n: int, dtype: str):
    shapes = [(m,), (n,), (n, 2), (2, m)]
    column, row, x, y = (values(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes))
    want = scipy.linalg.toeplitz(np.asarray(column), np.asarray(row)) if m and n else np.zeros((m, n), dtype)
    dense, *products = of_toeplitz(column, row, x, y)
    assert_same(dense, want)
    assert_close((dense, *products), as_of_array(want, x, y), 1e-4)


@generated
@given(left=st.tuples(SIZES, SIZES), right=st.tuples(SIZES, SIZES), dtype=DTYPES)
def test_a_kronecker_product_is_that_of_numpy(left: tuple[int, int], right: tuple[int, int], dtype: str):
    a, b = values(7, *left, dtype=dtype), values(8, *right, dtype=dtype)
    want = np.kron(np.asarray(a), np.asarray(b))
    x, y = values(9, want.shape[1], dtype=dtype), values(10, 2, want.shape[0], dtype=dtype)
    assert_same(of(Kronecker(a, b), x, y), as_of_array(want, x, y))


@generated
@given(*[st.none() | st.lists(st.integers(-3, 2), max_size=4)] * 2)
def test_permuted_is_indexing_of_numpy(rows: list[int] | None, columns: list[int] | None):
    taken = [None if each is None else indices(*each) for each in (rows, columns)]
    matrix, want = Permuted(values(11, 3, 3), *taken), np.asarray(values(11, 3, 3))
    want = want if rows is None else want[rows]
    want = want if columns is None else want[:, columns]
    x, y = values(12, want.shape[1], 2), values(13, want.shape[0])
    assert matrix.shape == want.shape
    assert_same(of(matrix, x, y), as_of_array(want, x, y))


@generated
@given(n=SIZES, dtype=DTYPES, inverted=st.booleans())
def test_a_diagonal_matrix_is_that_of_numpy(n: int, dtype: str, inverted: bool):
    x, y, z = (values(seed, *shape, dtype=dtype) for seed, shape in enumerate([(n, 2), (2, n), (n,)]))
    diagonal = np.asarray(z) + np.asarray(9.5, dtype)
    matrix = Diagonal(jax.device_put(diagonal), inverted)
    assert matrix.T is matrix
    assert_close(of(matrix, x, y), as_of_array(np.diag(1 / diagonal if inverted else diagonal), x, y))


def test_a_complex_operand_of_a_real_matrix():
    x = values(16, 6, dtype="complex64")
    kinds = [Diagonal(normal(17, 6)), Circulant(normal(17, 6)), Toeplitz(normal(17, 6), normal(18, 6))]
    kinds += [Kronecker(normal(17, 2, 2), normal(18, 3, 3)), Permuted(normal(17, 6, 6), indices(5, 4, 3, 3, 1, 0))]
    with jax.numpy_dtype_promotion("standard"):
        for matrix in kinds:
            dense, *products = of(matrix, x, x)
            assert dense.dtype == jnp.float32
            assert_close((dense, *products), as_of_array(np.asarray(dense), x, x), 1e-4)


def test_matrices_within_matrices():
    of_c = np.asarray(normal(21, 3)), np.asarray(normal(22, 2))
    a, b, c = normal(19, 2, 3), Circulant(normal(20, 2)), Toeplitz(*of_c)
    nested = Kronecker(a, Kronecker(b, Permuted(c, columns=indices(1, 0, 1))))
    want = np.kron(np.asarray(a), np.kron(scipy.linalg.circulant(b.column), scipy.linalg.toeplitz(*of_c)[:, [1, 0, 1]]))
    x, y = normal(23, 18, 2), normal(24, 12)
    assert_close(of(nested, x, y), as_of_array(want, x, y))
    assert tp.layout(nested).paths == (
        "left", "right.left.column", "right.right.matrix.column", "right.right.matrix.above",
    )  # fmt: skip


# -- Inverse and determinant

INVERTIBLE = {
    "diagonal": lambda dtype: Diagonal(values(23, 4, dtype=dtype)),
    "circulant": lambda dtype: Circulant(values(24, 5, dtype=dtype)),
    "circulant of even size": lambda dtype: Circulant(values(25, 4, dtype=dtype)),
    "kronecker": lambda dtype: Kronecker(Circulant(values(26, 3, dtype=dtype)), Diagonal(values(27, 2, dtype=dtype))),
}
EACH = pytest.mark.parametrize("make", INVERTIBLE.values(), ids=INVERTIBLE.keys())


@EACH
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_inverse_and_determinant(make: Any, dtype: str):
    matrix = make(dtype)
    assert matrix.inv().inv() == matrix
    b = values(28, matrix.shape[0], 2, dtype=dtype)

    @jax.jit
    def of_both(matrix: Any, b: Any) -> Any:
        found = [(m.to_dense(), m @ b, b.T @ m, m.slogdet(), m.logdet()) for m in (matrix, matrix.inv())]
        return *found, matrix.solve(b)

    there, back, solution = of_both(matrix, b)
    dense = np.asarray(there[0], "complex128" if dtype == "complex64" else "float64")
    for got, want in ((there, dense), (back, np.linalg.inv(dense))):
        sign, logarithm = np.linalg.slogdet(want)
        of_array = [each.astype(dtype) for each in as_of_array(want, b, b.T)]
        logarithm = logarithm.astype("float32")
        assert_close(got, (*of_array, (sign.astype(dtype), logarithm), logarithm), 1e-4)
    assert_close(solution, back[1])


@EACH
def test_the_inverse_is_tied_to_the_original(make: Any):
    matrix = make("float32")
    both = {"there": matrix, "back": matrix.inv()}
    assert len(tp.layout(both).paths) == len(tp.layout(matrix).paths) == len(tp.layout(both).ties)


@EACH
def test_determinants_have_the_dtype_of_the_matrix(make: Any):
    matrix = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), make("float32"))
    outputs = jax.eval_shape(lambda matrix: (matrix.slogdet(), matrix.logdet(), matrix.inv().to_dense()), matrix)
    assert {output.dtype for output in jax.tree.leaves(outputs)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("make", [INVERTIBLE[kind] for kind in ("diagonal", "circulant", "kronecker")])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_the_determinant_has_the_gradient_of_the_dense_one(make: Any, dtype: str):
    def loss(matrix: Any, slogdet: Any) -> Any:
        sign, logarithm = slogdet(matrix)
        return logarithm + sign.real + 2 * sign.imag

    of_dense = lambda matrix: jnp.linalg.slogdet(matrix.to_dense())
    both = jax.jit(lambda matrix: [jax.grad(loss)(matrix, each) for each in (type(matrix).slogdet, of_dense)])
    assert_close(*both(make(dtype)), 1e-4)


slogdet = jax.jit(lambda matrix: matrix.slogdet())


def test_without_rows_the_determinant_is_one():
    for matrix in (Diagonal(jnp.zeros(0)), Circulant(jnp.zeros(0)), Circulant(jnp.zeros(0)).inv()):
        assert_close(slogdet(matrix), (np.float32(1), np.float32(0)))


def test_a_singular_matrix_has_sign_zero():
    for matrix in (Diagonal(jnp.array([1.0, 0.0])), Circulant(jnp.array([1.0, 1.0]))):
        assert_close(slogdet(matrix), (np.float32(0), np.float32(-np.inf)))


# -- Uses


def test_diagonal_a_normalizing_layer_learns_the_scale_of_the_data():
    x = normal(29, 3, 400) * jnp.array([[0.5], [1.0], [2.0]])

    def negative_log_likelihood(scale: Any, x: Any) -> Any:
        return jnp.mean(jnp.sum((scale @ x) ** 2, axis=0) / 2) - scale.logdet()

    trained = fitted(Diagonal(jnp.ones(3)), negative_log_likelihood, 0.1, x)
    assert_close(trained.inv().to_dense(), jnp.diag(jnp.sqrt(jnp.mean(x**2, axis=1))), 1e-3)


def test_circulant_a_periodic_filter_is_learned_and_undone():
    blur = np.zeros(16, "float32")
    blur[[0, 1, -1]] = 0.6, 0.2, 0.2
    sharp = normal(30, 16, 40)
    blurred = scipy.linalg.circulant(blur) @ np.asarray(sharp)
    trained = fitted(Circulant(jnp.zeros(16)), squared_error, 0.02, sharp, blurred)
    assert_close(trained.column, blur, 1e-4)
    assert_close(trained.solve(blurred), sharp, 1e-2)


def test_toeplitz_a_causal_filter_is_learned():
    taps = np.array([1, -0.5, 0.25, 0, 0, 0, 0, 0], "float32")
    signals = normal(31, 8, 60)
    heard = scipy.signal.lfilter(taps, 1, signals, axis=0).astype("float32")
    causal = Toeplitz(jnp.zeros(8), jnp.zeros(8))
    trained = fitted(causal, squared_error, 0.05, signals, heard, freeze="above")
    assert_close(trained.column, taps, 1e-3)
    assert not np.triu(trained.to_dense(), 1).any()
    assert tp.layout(trained).freeze("above").size == 8


def test_kronecker_transforms_images_from_both_sides():
    images = normal(32, 5, 4, 6)
    along = lambda n: jax.device_put(scipy.fft.dct(np.eye(n, dtype="float32"), axis=0, norm="ortho"))
    cosines = Kronecker(along(4), along(6))
    want = scipy.fft.dctn(np.asarray(images), axes=(1, 2), norm="ortho")
    transformed = jax.jit(lambda matrix, images: (matrix @ images.reshape(5, 24).T).T.reshape(images.shape))
    assert_close(transformed(cosines, images), want)
    # One side is known, the other is learned.
    start = Kronecker(jnp.zeros((4, 4)), cosines.right)
    images = np.asarray(normal(33, 24, 60))
    known = np.kron(*map(np.asarray, (cosines.left, cosines.right))) @ images
    trained = fitted(start, squared_error, 0.05, images, known, freeze="right")
    assert trained.right is start.right
    assert_close(trained.left, cosines.left, 1e-3)


def test_permuted_hidden_units_change_nothing_and_train_the_same_parameters():
    first, second = normal(34, 5, 3), normal(35, 2, 5)
    order = jnp.array([3, 0, 4, 1, 2])
    plain = {"first": first, "second": second}
    shuffled = {"first": Permuted(first, rows=order), "second": Permuted(second, columns=order)}
    x = normal(36, 3, 4)
    loss = lambda model: jnp.sum((model["second"] @ jnp.tanh(model["first"] @ x)) ** 2)
    got, want = (jax.jit(tp.value_and_grad(loss))(model) for model in (shuffled, plain))
    assert_close(got[0], want[0])
    assert_close([got[1][name].matrix for name in plain], [want[1][name] for name in plain])
    assert tp.layout([plain, shuffled]).ties == {"0.first": ("1.first.matrix",), "0.second": ("1.second.matrix",)}


def test_permuted_a_selection_prunes_and_repeats():
    w, x = values(37, 3, 2), values(38, 4)
    gradient = jax.jit(tp.grad(lambda matrix, x: jnp.sum(matrix @ x)))
    pruned = Permuted(w, rows=indices(2, 0))
    assert_same(gradient(pruned, jnp.ones(2)).matrix, np.asarray([[1.0, 1], [0, 0], [1, 1]], "float32"))
    even = Permuted(w, columns=indices(1, 0, 0, 1))  # a function that is even on a grid has each weight twice
    assert_same(even @ x, even @ x[::-1])
    assert_same(gradient(even, x).matrix, np.tile([[x[1] + x[2], x[0] + x[3]]], (3, 1)))


def test_lists_and_arrays_of_numpy_are_taken_too(without_type_checks: Any):
    w = np.arange(6.0, dtype="float32").reshape(2, 3)
    matrix = Permuted(w, [], np.array([-1, 0]))
    assert (matrix.shape, matrix.rows.dtype, matrix.columns.tolist()) == ((0, 2), jnp.int32, [-1, 0])
    assert tp.layout([Kronecker(w, w), Circulant(w[0]), Diagonal(w[0]), Toeplitz(w[0], w[0])]).size == 12 + 3 + 3 + 5


def test_permuted_other_indices_compile_nothing_anew():
    traces = []

    @eqx.filter_jit
    def product(matrix: Any, x: Any) -> Any:
        traces.append(None)
        return matrix @ x

    w, x = normal(39, 3, 3), normal(40, 3)
    for order in ([0, 1, 2], [2, 0, 1]):
        order = jnp.array(order)
        assert_close(product(Permuted(w, order), x), (w @ x)[order])
        assert_close(jax.jit(lambda w, order: Permuted(w, order) @ x)(w, order), (w @ x)[order])
    assert len(traces) == 1


@pytest.mark.parametrize("make", [
    lambda w: Diagonal(w[0]),
    lambda w: Circulant(w[0]).inv(),
    lambda w: Toeplitz(w[0], w[1]),
    lambda w: Kronecker(w[:2, :2], w[2:, 2:]),
    lambda w: Permuted(w, jnp.argsort(w[0]), jnp.array([3, 0, 0, 1])),
])  # fmt: skip
def test_an_ensemble_is_made_by_vmap(make: Any):
    ws, xs = normal(41, 3, 4, 4), normal(42, 3, 4)

    @jax.jit
    def members(ws: Any, xs: Any) -> Any:
        ensemble = eqx.filter_vmap(make)(ws)
        assert ensemble.shape == (4, 4)
        for use in (lambda: ensemble @ xs[0], ensemble.to_dense):
            with pytest.raises(ValueError, match=r"Of an ensemble, take each by jax\.vmap"):
                use()
        return eqx.filter_vmap(lambda matrix, x: (matrix @ x, matrix.to_dense()))(ensemble, xs)

    products, dense = members(ws, xs)
    assert_close(products, np.einsum("aij,aj->ai", dense, xs), 1e-4)
    assert_close(dense[1], jax.jit(lambda w: make(w).to_dense())(ws[1]))


# -- What a product costs

LARGE = {
    "diagonal": (Diagonal(normal(43, 1024)), 1000),
    "circulant": (Circulant(normal(44, 1024)), 10),
    "inverse of a circulant": (Circulant(normal(44, 1024)).inv(), 10),
    "toeplitz": (Toeplitz(normal(45, 1024), normal(46, 1024)), 5),
    "kronecker": (Kronecker(normal(47, 32, 32), normal(48, 32, 32)), 10),
}


def largest(jaxpr: Any) -> int:
    """The size of the largest array that a program makes, also within its inner programs."""

    def sizes(jaxpr: Any) -> Iterator[int]:
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
                if hasattr(inner, "eqns"):
                    yield from sizes(getattr(inner, "jaxpr", inner))

    return max(sizes(jaxpr))


@pytest.mark.parametrize(("matrix", "times"), LARGE.values(), ids=LARGE.keys())
def test_nothing_of_the_size_of_the_matrix_is_made(matrix: Any, times: int):
    x = jnp.ones((1024, 8))
    program = jax.make_jaxpr(jax.grad(lambda matrix, x: jnp.sum(jnp.sin(matrix @ x)), (0, 1)))(matrix, x)
    assert 1024 * 8 <= largest(program.jaxpr) <= 4 * 1024 * 8
    assert largest(jax.make_jaxpr(lambda matrix: matrix.to_dense())(matrix).jaxpr) >= 1024**2
    assert 0 < times * flops(lambda matrix, x: matrix @ x, matrix, x) <= 2 * 1024 * 1024 * 8  # as of an array


def test_the_cheaper_side_of_a_kronecker_product_comes_first():
    wide, tall, x = normal(49, 1, 64), normal(50, 64, 1), jnp.ones(64)
    for product in (lambda matrix, x: matrix @ x, lambda matrix, x: x @ matrix):
        for left, right in ((wide, tall), (tall, wide)):
            largest_made = largest(jax.make_jaxpr(product)(Kronecker(left, right), x).jaxpr)
            assert largest_made == 64  # the other way it is 64 ** 2


def test_permuted_moves_the_vectors_and_not_the_matrix():
    matrix = Permuted(Circulant(normal(51, 1024)), jnp.arange(1024)[::-1], jnp.arange(1024) % 512)
    program = jax.make_jaxpr(jax.grad(lambda column, x: jnp.sum(jnp.sin(tp.combine(column, rest) @ x)), (0, 1)))
    params, rest = tp.partition(matrix)
    assert largest(program(params, jnp.ones((1024, 8))).jaxpr) <= 4 * 1024 * 8


# -- In low precision


@pytest.mark.parametrize("make", [
    lambda column: Circulant(column),
    lambda column: Toeplitz(column, column[::-1]),
])  # fmt: skip
def test_transforms_of_bfloat16_are_rounded_once(make: Any):
    column, x = (np.asarray(normal(seed, 300)).astype(jnp.bfloat16) for seed in (52, 53))
    dense, *products = of(make(jax.device_put(column)), x, x)
    for got, want in zip(products, as_of_array(np.asarray(dense, "float64"), x.astype("float64"), x)[1:], strict=True):
        assert got.dtype == jnp.bfloat16
        error = np.abs(np.asarray(got, "float64") - want)
        assert (error <= 2**-8 * np.abs(want) + 1e-5 * np.abs(want).max()).all()


def test_transforms_of_float64_are_not_rounded_to_float32():
    with enable_x64(True):
        column = jax.device_put(np.asarray(values(54, 7), "float64") / 3)
        for matrix in (Circulant(column), Toeplitz(column, column)):
            dense, *products = of(matrix, column, column)
            assert_close((dense, *products), as_of_array(np.asarray(dense), column, column), 1e-13)
        circulant = Circulant(column)
        want = np.linalg.slogdet(scipy.linalg.circulant(column))[1]
        np.testing.assert_allclose(jax.jit(Circulant.logdet)(circulant), want, 1e-12)


# -- Refused


def test_what_is_no_vector(without_type_checks: Any):
    for make, name in ((Diagonal, "diagonal"), (Circulant, "column")):
        with pytest.raises(ValueError, match=rf"{make.__name__} takes a {name} of shape \(n,\), got shape \(2, 2\)"):
            make(jnp.ones((2, 2)))
        with pytest.raises(TypeError, match=r"a parameter is floating or complex, got int32: convert it with"):
            make(jnp.arange(2))
        with pytest.raises(TypeError, match=r"expected an array, got list"):
            make([1.0, 2.0])
    with pytest.raises(ValueError, match=r"Toeplitz takes a column of shape \(n,\), got shape \(2, 1\)"):
        Toeplitz(jnp.ones((2, 1)), jnp.ones(2))
    with pytest.raises(ValueError, match=r"Toeplitz takes a row of shape \(n,\), got shape \(\)"):
        Toeplitz(jnp.ones(2), jnp.ones(()))
    with pytest.raises(TypeError, match=r"a parameter is floating or complex, got bool"):
        Toeplitz(jnp.ones(2), jnp.ones(2, bool))


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ({"rows": [0, 2]}, ValueError, r"rows\[1\] is 2, out of range for a matrix with 2 rows"),
        ({"columns": jnp.array([-4])}, ValueError, r"columns\[0\] is -4, out of range for a matrix with 3 columns"),
        ({"rows": np.array([[0]])}, ValueError, r"rows takes indices of shape \(k,\), got shape \(1, 1\)"),
        ({"rows": jnp.array([0.0])}, TypeError, r"rows takes an array of integers, got float32"),
        ({"rows": [0.5]}, TypeError, r"rows takes an array of integers, got float64"),
        ({"columns": 1}, TypeError, r"columns takes an array of integers, got int"),
        (
            {"columns": jnp.array([True, False, True])},
            TypeError,
            r"columns takes an array of integers, got bool; of a mask, write columns=jnp\.flatnonzero\(mask\)",
        ),
    ],
)
def test_what_are_no_indices(without_type_checks: Any, indices: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        Permuted(jnp.ones((2, 3)), **indices)


def test_kronecker_products_without_an_inverse():
    diagonal = Diagonal(jnp.ones(2))
    with pytest.raises(TypeError, match=r"has an inverse if both .* right one is a plain array: .*SVD\.from_dense\(r"):
        Kronecker(diagonal, jnp.ones((2, 2))).inv()
    with pytest.raises(TypeError, match=r"has a determinant if both .* its left one is a plain Toeplitz"):
        Kronecker(Toeplitz(jnp.ones(2), jnp.ones(2)), diagonal).logdet()
    with pytest.raises(ValueError, match=r"only square factors have an inverse, and the right one has shape \(2, 3\)"):
        Kronecker(diagonal, Kronecker(jnp.ones((2, 3)), jnp.ones((1, 1)))).solve(jnp.ones(4))
