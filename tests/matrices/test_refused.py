"""What is refused of matrices, and the words that say what to write."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest

import treeparams as tp
from treeparams import matrices

from ..zoo import filled
from .zoo import CODEC, IMPUTING, TIED, int8, low_rank, normal, put, svd

KEY = jax.random.key(0)
TWO, X = put([1, 2], [3, 4]), np.asarray(normal(2, 4, 5))

# -- What is no array --------------------------------------------------------------------------------------------------


def within(layer: Any, *shape: int) -> Any:
    of = lambda w: lambda x: eqx.tree_at(lambda layer: layer.weight, layer, w)(x)
    return lambda w: jax.eval_shape(of(w), jax.ShapeDtypeStruct(shape, jnp.float32))


OF_ENTRIES = {
    "index": lambda m: m[0],
    "iterate": lambda m: list(m),
    "numpy.array": lambda m: np.array(m),
    "plus": lambda m: m + TWO,
    "from an array": lambda m: np.ones((2, 2)) - m,
    "compare": lambda m: m < 1,
}
OF_A_MATRIX = OF_ENTRIES | {
    "numpy.asarray": lambda m: np.asarray(m),
    "numpy.dot": lambda m: np.dot(m, np.ones(2)),
    "times": lambda m: m * np.ones(2),
    "elementwise times": lambda m: m * m,
    "divide": lambda m: m / put(1, 1),
    "power": lambda m: m**2,
    "abs": abs,
}
OF_A_CONSTRAINT = OF_ENTRIES | {
    "by": lambda w: np.ones(2) / w,
    "negative": lambda w: -w,
    "product": lambda w: w @ TWO,
    "product from the left": lambda w: TWO @ w,
    "product from the left with NumPy's": lambda w: np.ones((2, 2)) @ w,
    "with a matrix": lambda w: svd(0, 2, 2) @ w,
    "float": float,
    "jax.numpy": lambda w: jnp.exp(w),
    "where": lambda w: jnp.where(TWO > 1, w, TWO),
    "numpy.sum": lambda w: np.sum(w),
    "shape": lambda w: w.shape,
    "Linear": within(filled(eqx.nn.Linear, 2, 2), 2),
    "GroupNorm": within(eqx.nn.GroupNorm(1, 2), 2, 2),
    "Conv1d": within(filled(eqx.nn.Conv1d, 2, 3, 2), 2, 2),
}
TO_DENSE = r"needs an array, which SVD is not: call M\.to_dense\(\) first"
MATERIALISE = r"Positive .*call matrices\.materialise\(model\) first"


@pytest.mark.parametrize("name", OF_A_MATRIX)
def test_what_needs_all_entries_of_a_matrix_says_so(name: str):
    with pytest.raises(TypeError, match=TO_DENSE):
        OF_A_MATRIX[name](svd(0, 2, 2))


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
NO_ARRAY, NO_BASE = "expected an array, got ", "a LowRank cannot have a PreImputing in its base"
SQUARE = r"only a square matrix has {}, and this SVD has shape \({}\)"
OF_PAIRS = lineax.IdentityLinearOperator(jax.ShapeDtypeStruct((2, 2), jnp.float32))
M, PRE, ONES = svd(0, 2, 3), matrices.PreImputing(normal(50, 3, 3), normal(51, 3)), ones(2, 3)
REFUSED = [
    # Any matrix.
    (lambda: M @ svd(1, 2, 2), r"M @ N: the shapes \(2, 3\) and \(2, 2\) do not fit"),
    (lambda: M + svd(1, 2, 2), r"M \+ N: the shapes \(2, 3\) and \(2, 2\) differ"),
    (lambda: M @ ones(2), r"M @ x: M is a SVD of shape \(2, 3\), so x must have shape \(3,\) or"),
    (lambda: ones(2, 3) @ M, r"x @ M: .* shape \(2,\) or \(\.\.\., 2\), got \(2, 3\)"),
    (lambda: M @ put(2)[0], r"got \(\)"),
    (lambda: M @ [1.0, 2.0, 3.0], "unsupported operand"),
    (lambda: [1.0, 2.0] @ M, "unsupported operand"),
    (lambda: np.exp(M), "does not support ufuncs"),
    (lambda: jnp.asarray(M), "SVD"),
    (lambda: matrices.from_lineax(M), "expected a lineax operator, got SVD"),
    (lambda: matrices.from_lineax(OF_PAIRS), r"between vectors, but Identity.* takes ShapeDtypeStruct\(shape=\(2, 2"),
    # A decomposition, reflections and rotations.
    (lambda: M.inv(), SQUARE.format("an inverse", "2, 3")),
    (lambda: svd(0, 3, 2).solve(ones(3)), SQUARE.format("an inverse", "3, 2")),
    (lambda: M.logdet(), SQUARE.format("a determinant", "2, 3")),
    (lambda: svd(0, 3, 2).slogdet(), SQUARE.format("a determinant", "3, 2")),
    (lambda: matrices.SVD(svd(0, 3, 3).u, ones(2), svd(0, 3, 3).v), r"d of shape \(3,\) for u of .* got \(2,\)"),
    (lambda: matrices.Orthogonal(COMPLEX), NO_REAL),
    (lambda: matrices.SVD.from_dense(COMPLEX), NO_REAL),
    (lambda: matrices.Orthogonal(ones(1, 3, dtype=np.int32)), NO_PARAMETER + "32"),
    (lambda: matrices.Orthogonal(ones(3)), r"expected vectors of shape \(reflections, n\), got \(3,\)"),
    (lambda: matrices.Givens(ones(1, 3), 5), r"expected angles of shape \(layers, 2\) for n=5, got \(1, 3\)"),
    (lambda: matrices.Givens(ones(2), 5), r"expected angles of shape \(layers, 2\) for n=5, got \(2,\)"),
    (lambda: matrices.SVD.random(2, 2, key=KEY, kind="fft"), 'be "householder" or "givens", got \'fft\''),
    (lambda: matrices.SVD.random(-1, 2, key=KEY), "the sizes of a random matrix must be at least 0, got m=-1, n=2"),
    (lambda: matrices.SVD.random(3, 3, key=KEY, reflections=-1), "at least 0, got n=3, reflections=-1"),
    (lambda: matrices.Givens.random(3, key=KEY, layers=-2), "at least 0, got n=3, layers=-2"),
    # Of missing data.
    (lambda: matrices.PostImputing(ONES, ones(3)), r"of a PostImputing .* per output: expected shape \(2,\) for"),
    (lambda: matrices.PreImputing(ONES, ones(3, 1)), r"per input: .* \(3,\) .* shape \(2, 3\), got \(3, 1\)"),
    (lambda: matrices.PreImputing(ONES, jnp.arange(3)), NO_PARAMETER + "32"),
    (lambda: matrices.PreImputing(ONES, 0.0), NO_ARRAY + "float"),
    (lambda: make("pre").matmul(X, missing=X[0] > 0), r"shape \(4, 5\) for x of shape \(4, 5\), got \(5,\)"),
    (lambda: make("post").matmul(X, missing=X[:, 0] > 0), r"\(4, 5\) or \(5,\) for x of .* got \(4,\)"),
    (lambda: make("post").matmul(X[:, 0], missing=X[0, :1] > 0), r"\(4,\) or \(\) for x of .* got \(1,\)"),
    (lambda: make("pre").matmul(X, missing=ones(4, 5, dtype="i")), "of bools, True where x is missing, got int32"),
    (lambda: make("pre").matmul([1.0, 2.0, 3.0, 4.0]), NO_ARRAY + "list"),
    (lambda: make("pre").matmul(X.T, missing=X.T > 0), r"M @ x: M is a PreImputing of shape \(3, 4\), .* got \(5, 4\)"),
    (lambda: jax.tree.map(lambda leaf: leaf[None], make("pre")).matmul(X, missing=X > 0), "is an ensemble of matrices"),
    # Of low rank.
    (lambda: matrices.LowRank(ONES, ONES[:, :1], ONES), r"\(2, rank\) and \(rank, 3\) .* got \(2, 1\) and \(2, 3\)"),
    (lambda: matrices.LowRank.random(ONES, 0, key=KEY), "the rank of a change must be at least 1, got 0"),
    (lambda: matrices.LowRank(ONES, 1j * ONES[:, :1], 1j * ONES[:1]), "factors are complex, but the base is float32"),
    (lambda: matrices.LowRank([[1.0]], ONES, ONES), NO_ARRAY + "list"),
    (lambda: matrices.LowRank(ONES[0], ONES, ONES), r"expected a matrix, got an array of shape \(3,\)"),
    (lambda: matrices.LowRank(ONES, ONES.astype(np.int32), ONES), NO_PARAMETER + "32"),
    (lambda: matrices.LowRank.random(2 * PRE.T, 1, key=KEY), NO_BASE + ": .* NaN "),
    # Constrained arrays.
    (lambda: matrices.Positive(put(1, -2)), r"Positive accepts finite numbers .* got -2 at index \[1\].*jnp.abs\(w\)"),
    (lambda: matrices.Positive(put(0)[0]), r"at least 1.18e-38, got 0. Write"),
    (lambda: matrices.Positive(put(np.inf)), "finite numbers.*got inf"),
    (lambda: matrices.Positive(put(np.nan)), "got nan"),
    (lambda: matrices.Positive([1.0]), NO_ARRAY + "list"),
    (lambda: matrices.Positive(ones(2, dtype=int)), NO_PARAMETER),
    (lambda: matrices.Positive(ones(2, dtype=np.complex64)), NO_REAL),
]


@pytest.mark.parametrize(("use", "message"), REFUSED)
@pytest.mark.usefixtures("without_type_checks")
def test_what_does_not_fit(use: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        use()


# -- What cannot be changed by a low rank ------------------------------------------------------------------------------


class Holds(eqx.Module):
    weight: Any = tp.field(trainable=False)


SQUARES = int8(4, 2, 2)
UNCHANGED = [
    (filled(eqx.nn.Conv1d, 1, 2, 3), "weight", r"'weight' has shape \(2, 1, 3\)\. Leave out .* a convolution"),
    ({"w": low_rank(3, 2, 2)}, "w.a", r"'w.a' is a part of 'w', a LowRank, .* as a whole: select all of it, or"),
    ({"w": svd(3, 2, 2)}, "w.u", r"'w.u.vectors' is a part of 'w', a SVD, which is changed as a whole"),
    (low_rank(3, 2, 2), "a", "'a' is a part of a LowRank, which is changed as a whole"),
    ({"w": matrices.Positive(np.ones((2, 2)))}, "w.raw", r"'w.raw' is a part of 'w', a Positive, whose constraint"),
    ({"w": 2 * PRE}, "w", NO_BASE),
    (jax.tree.map(lambda leaf: np.stack([leaf, leaf]), {"w": int8(0, 2, 2)}), "w", r"'w' has shape \(2, 2, 2\)"),
    (Holds(int8(0, 2, 2)), "weight", "'weight' is declared frozen"),
    ({"w": SQUARES, "t": SQUARES.T}, "**", "'w.scale' and 't.matrix.scale' are one array in matrices that differ"),
    ({"w": SQUARES, "t": SQUARES}, "w", "'t.scale' and 'w.scale' are one array, but 'w' selects only the latter"),
    (TIED, "one", "'same' and 'one' are one array, but 'one' selects only the latter: select both"),
    (CODEC, "same", "'one' and 'same' are one array, but 'same' selects only the latter"),
    (CODEC, "encoder", "'decoder' and 'encoder' are tied through a transform, which a low-rank"),
    (CODEC, ("encoder", "decoder"), "'decoder' and 'encoder' are tied through a transform"),
    (CODEC, "frozen", "'frozen' is declared frozen"),
]


@pytest.mark.parametrize(("model", "where", "message"), UNCHANGED)
def test_what_cannot_be_changed(model: Any, where: Any, message: str):
    with pytest.raises(ValueError, match=message):
        matrices.lora(model, where, 1, key=KEY)
