"""What holds of every matrix: it acts as the array that it stands for; and what is refused, with what to write."""

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
from .zoo import CODEC, IMPUTING, MATRICES, TIED, int8, low_rank, normal, put, svd

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


def test_a_layer_that_holds_matrices_works_unchanged():
    layer = filled(eqx.nn.GRUCell, 4, 4)
    is_weight = lambda leaf: getattr(leaf, "ndim", 0) == 2
    kept = jax.tree.map(lambda leaf: low_rank(23, *leaf.shape) if is_weight(leaf) else leaf, layer)
    each = lambda layer, xs: jax.vmap(layer)(xs, xs)

    @eqx.filter_jit
    def checked(kept: Any, xs: jax.Array) -> Any:
        gradient = tp.grad(lambda layer: jnp.sum(each(layer, xs) ** 2), tp.layout(kept, matrices.LowRank))(kept)
        return each(kept, xs), each(matrices.merge(kept), xs), tp.trainables(gradient)

    got, want, gradient = checked(kept, normal(22, 3, 4))
    assert_close(got, want, 1e-4)
    assert len(gradient) == 2 * len([leaf for leaf in jax.tree.leaves(layer) if is_weight(leaf)])
    assert all(np.any(np.asarray(leaf) != 0) for leaf in gradient.values())


def test_sums_multiples_and_products_are_those_of_the_entries():
    of_each = lambda a, b, c: [a + b, a - b, a @ c, -a, a / 2, put(3)[0] * a, a.T]
    given = low_rank(1, 2, 3), low_rank(2, 2, 3), low_rank(3, 3, 2)
    entries = jax.jit(lambda *each: [matrix.to_dense() for matrix in each])
    assert_close(entries(*of_each(*given)), of_each(*entries(*given)))


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


def test_to_lineax_and_back():
    matrix, b = low_rank(28, 3, 3), normal(31, 3)

    @jax.jit
    def checked(matrix: Any) -> Any:
        operator, dense = matrices.to_lineax(matrix), matrix.to_dense()
        got = operator.as_matrix(), operator.mv(b), operator.transpose().mv(b), lineax.linear_solve(operator, b).value
        return got, (dense, dense @ b, b @ dense, jnp.linalg.solve(dense, b))

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
    with jax.set_mesh(mesh):
        of_mesh, of_x = jax.device_put(matrix, whole), jax.device_put(x, split)
        assert_close(jax.jit(results)(of_mesh, of_x), want)
        in_map = jax.shard_map(products, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
        assert_close(jax.jit(in_map)(of_mesh, of_x), (want[0], want[2]))


TWO, X = put([1, 2], [3, 4]), np.asarray(normal(2, 4, 5))

# -- What is no array --------------------------------------------------------------------------------------------------


OF_ENTRIES = {
    "index": lambda m: m[0],
    "iterate": lambda m: list(m),
    "plus": lambda m: m + TWO,
    "from an array": lambda m: np.ones((2, 2)) - m,
    "compare": lambda m: m < 1,
    "numpy.asarray": lambda m: np.asarray(m),
    "times": lambda m: m * np.ones(2),
    "divide": lambda m: m / put(1, 1),
    "power": lambda m: m**2,
}
OF_A_CONSTRAINT = OF_ENTRIES | {
    "to an array": lambda w: TWO + w,
    "product": lambda w: w @ TWO,
    "product from the left": lambda w: TWO @ w,
    "product from the left with NumPy's": lambda w: np.ones((2, 2)) @ w,
    "with a matrix": lambda w: svd(0, 2, 2) @ w,
    "jax.numpy": lambda w: jnp.exp(w),
    "where": lambda w: jnp.where(TWO > 1, w, TWO),
    "numpy.sum": lambda w: np.sum(w),
    "shape": lambda w: w.shape,
    "Linear": lambda w: eqx.tree_at(lambda layer: layer.weight, filled(eqx.nn.Linear, 2, 2), w)(put(1, 2)),
}
TO_DENSE = r"needs an array, which SVD is not: call M\.to_dense\(\) first"
MATERIALISE = r"Positive .*call matrices\.materialise\(model\) first"


@pytest.mark.parametrize("name", OF_ENTRIES)
def test_what_needs_all_entries_of_a_matrix_says_so(name: str):
    with pytest.raises(TypeError, match=TO_DENSE):
        OF_ENTRIES[name](svd(0, 2, 2))


@pytest.mark.parametrize("name", OF_A_CONSTRAINT)
def test_using_a_constrained_array_as_an_array_says_materialise(name: str):
    with pytest.raises((TypeError, AttributeError), match=MATERIALISE):
        OF_A_CONSTRAINT[name](matrices.Positive(TWO))


# From Python 3.13 on a question of jaxlib that this error answers is noted as an exception of its own.
@pytest.mark.filterwarnings("ignore:Exception ignored in PyObject_HasAttr")
@pytest.mark.parametrize("use", [lambda w: jax.lax.add(w, TWO), lambda w: jax.lax.add(TWO, w), jax.lax.exp])
def test_functions_of_lax_name_the_class_and_do_not_say_to_convert_it(use: Any):
    with pytest.raises(TypeError, match="Positive") as raised:
        use(matrices.Positive(TWO))
    assert "jax.numpy.array" not in str(raised.value)


# -- What cannot be made, or does not fit ------------------------------------------------------------------------------


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def make(kind: str) -> Any:
    return IMPUTING[kind](normal(0, 3, 4), normal(1, 4 if kind == "pre" else 3))


COMPLEX = ones(2, 2, dtype=np.complex64)
NO_PARAMETER, NO_REAL = "a parameter must be floating or complex, got int", "expected real numbers, got complex64"
NO_BASE = "a LowRank cannot have a PreImputing in its base"
SQUARE = r"only a square matrix has {}, and this SVD has shape \({}\)"
M, PRE, ONES = svd(0, 2, 3), matrices.PreImputing(normal(50, 3, 3), normal(51, 3)), ones(2, 3)
REFUSED = [
    # Any matrix.
    (lambda: M @ svd(1, 2, 2), r"M @ N: the shapes \(2, 3\) and \(2, 2\) do not fit"),
    (lambda: M + svd(1, 2, 2), r"M \+ N: the shapes \(2, 3\) and \(2, 2\) differ"),
    (lambda: M @ ones(2), r"M @ x: M is a SVD of shape \(2, 3\), so x must have shape \(3,\) or"),
    (lambda: ones(2, 3) @ M, r"x @ M: .* shape \(2,\) or \(\.\.\., 2\), got \(2, 3\)"),
    (lambda: np.exp(M), "does not support ufuncs"),
    (lambda: jnp.asarray(M), "SVD"),
    (lambda: matrices.from_lineax(M), "expected a lineax operator, got SVD"),
    # A decomposition, reflections and rotations.
    (lambda: M.inv(), SQUARE.format("an inverse", "2, 3")),
    (lambda: M.logdet(), SQUARE.format("a determinant", "2, 3")),
    (lambda: matrices.SVD(svd(0, 3, 3).u, ones(2), svd(0, 3, 3).v), r"d of shape \(3,\) for u of .* got \(2,\)"),
    (lambda: matrices.Orthogonal(COMPLEX), NO_REAL),
    (lambda: matrices.Orthogonal(ones(1, 3, dtype=np.int32)), NO_PARAMETER + "32"),
    (lambda: matrices.Givens(ones(1, 3), 5), r"expected angles of shape \(layers, 2\) for n=5, got \(1, 3\)"),
    (lambda: matrices.SVD.random(2, 2, key=KEY, kind="fft"), 'be "householder" or "givens", got \'fft\''),
    (lambda: matrices.SVD.random(-1, 2, key=KEY), "the sizes of a random matrix must be at least 0, got m=-1, n=2"),
    # Of missing data.
    (lambda: matrices.PostImputing(ONES, ones(3)), r"of a PostImputing .* per output: expected shape \(2,\) for"),
    (lambda: matrices.PreImputing(ONES, ones(3, 1)), r"per input: .* \(3,\) .* shape \(2, 3\), got \(3, 1\)"),
    (lambda: matrices.PreImputing(ONES, jnp.arange(3)), NO_PARAMETER + "32"),
    (lambda: make("pre").matmul(X, missing=X[0] > 0), r"shape \(4, 5\) for x of shape \(4, 5\), got \(5,\)"),
    (lambda: make("post").matmul(X, missing=X[:, 0] > 0), r"\(4, 5\) or \(5,\) for x of .* got \(4,\)"),
    (lambda: make("pre").matmul(X, missing=ones(4, 5, dtype="i")), "of bools, True where x is missing, got int32"),
    (lambda: jax.tree.map(lambda leaf: leaf[None], make("pre")).matmul(X, missing=X > 0), "is an ensemble of matrices"),
    # Of low rank.
    (lambda: matrices.LowRank(ONES, ONES[:, :1], ONES), r"\(2, rank\) and \(rank, 3\) .* got \(2, 1\) and \(2, 3\)"),
    (lambda: matrices.LowRank.random(ONES, 0, key=KEY), "the rank of a change must be at least 1, got 0"),
    (lambda: matrices.LowRank(ONES, 1j * ONES[:, :1], 1j * ONES[:1]), "factors are complex, but the base is float32"),
    (lambda: matrices.LowRank([[1.0]], ONES, ONES), "expected an array, got list"),
    (lambda: matrices.LowRank.random(2 * PRE.T, 1, key=KEY), NO_BASE + ": .* NaN "),
    # Constrained arrays.
    (lambda: matrices.Positive(put(1, -2)), r"Positive accepts finite numbers .* got -2 at index \[1\].*jnp.abs\(w\)"),
    (lambda: matrices.Positive(put(0)[0]), r"at least 1.18e-38, got 0. Write"),
    (lambda: matrices.Positive(put(np.inf)), "finite numbers.*got inf"),
    (lambda: matrices.Positive(ones(2, dtype=np.complex64)), NO_REAL),
]


@pytest.mark.parametrize(("use", "message"), REFUSED)
@pytest.mark.usefixtures("without_type_checks")
def test_what_does_not_fit(use: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        use()


# -- What cannot be changed by a low rank ------------------------------------------------------------------------------


SQUARES = int8(4, 2, 2)
UNCHANGED = [
    (filled(eqx.nn.Conv1d, 1, 2, 3), "weight", r"'weight' has shape \(2, 1, 3\)\. Leave out .* a convolution"),
    ({"w": low_rank(3, 2, 2)}, "w.a", r"'w.a' is a part of 'w', a LowRank, .* as a whole: select all of it, or"),
    ({"w": matrices.Positive(np.ones((2, 2)))}, "w.raw", r"'w.raw' is a part of 'w', a Positive, whose constraint"),
    ({"w": 2 * PRE}, "w", NO_BASE),
    (jax.tree.map(lambda leaf: np.stack([leaf, leaf]), {"w": int8(0, 2, 2)}), "w", r"'w' has shape \(2, 2, 2\)"),
    ({"w": SQUARES, "t": SQUARES.T}, "**", "'w.scale' and 't.matrix.scale' are one array in matrices that differ"),
    ({"w": SQUARES, "t": SQUARES}, "w", "'t.scale' and 'w.scale' are one array, but 'w' selects only the latter"),
    (TIED, "one", "'same' and 'one' are one array, but 'one' selects only the latter: select both"),
    (CODEC, "encoder", "'decoder' and 'encoder' are tied through a transform, which a low-rank"),
    (CODEC, "frozen", "'frozen' is declared frozen"),
]


@pytest.mark.parametrize(("model", "where", "message"), UNCHANGED)
def test_what_cannot_be_changed(model: Any, where: Any, message: str):
    with pytest.raises(ValueError, match=message):
        matrices.lora(model, where, 1, key=KEY)
