"""Missing data: what stands for it is learned, and no NaN reaches a gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest

import treeparams as tp
from treeparams import matrices

from ..zoo import assert_close, assert_same, enable_x64
from .zoo import low_rank, normal, put

NAN = jnp.nan
KINDS = {"pre": matrices.PreImputing, "post": matrices.PostImputing}
by_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, m: int = 3, n: int = 4, dtype: Any = jnp.float32) -> Any:
    parts = normal(0, m, n), normal(1, n if kind == "pre" else m)
    return KINDS[kind](*jax.device_put([np.asarray(part).astype(dtype) for part in parts]))


X = np.asarray(normal(2, 4, 5))  # five samples of four inputs


def data(kind: str, dtype: Any = jnp.float32) -> jax.Array:
    """X, of which some is missing."""
    return jax.device_put(np.where(mask(kind), NAN, X).astype(dtype))


def mask(kind: str) -> np.ndarray:
    entries = np.arange(20).reshape(4, 5) % 3 == 0
    return entries if kind == "pre" else np.broadcast_to(np.arange(5) % 2 == 1, (4, 5))


# -- What it computes


def without_nan(weight: Any, x: jax.Array, gone: jax.Array) -> jax.Array:
    """The product by its definition, of an x that is finite where it is missing."""
    psi = weight.psi[:, None]
    if isinstance(weight, matrices.PreImputing):
        return weight.matrix @ jnp.where(gone, psi, x)
    return jnp.where(gone[:1], psi, weight.matrix @ x)


@jax.jit
def _products_and_gradients(weight: Any, x: jax.Array, gone: jax.Array) -> Any:
    nan = jnp.where(gone, NAN, x)
    ways = [
        (lambda weight, x: weight @ x, nan),
        (lambda weight, x: (x.T @ weight.T).T, nan),
        (lambda weight, x: weight.matmul(x, missing=gone), x),
        (lambda weight, x: without_nan(weight, x, gone), x),
    ]
    found = [jax.vjp(product, weight, x) for product, x in ways]
    return [(y, pull(jnp.cos(y))) for y, pull in found]


@by_kind
@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 2, 0)], ids=str)
def test_products_and_gradients_are_those_of_the_definition(kind: str, shape: tuple[int, int, int]):
    m, n, batch = shape
    for seed, likelihood in enumerate([0, 0.3, 0.7, 1]):
        random = np.random.default_rng(seed)
        gone = random.random((n, batch) if kind == "pre" else (1, batch)) < likelihood
        *others, want = _products_and_gradients(make(kind, m, n), normal(seed, n, batch), np.repeat(gone, n, 0)[:n])
        assert_close(others, [want] * 3, 1e-4)


@by_kind
def test_where_nothing_is_missing_it_is_the_plain_product_bit_for_bit(kind: str):
    none = np.zeros((4, 5), bool)
    ways = lambda weight, x: (weight @ x, weight.matmul(x, missing=none), weight.to_dense() @ x)
    by_nan, by_mask, plain = jax.jit(ways)(make(kind), X)
    assert_same((by_nan, by_mask), (plain, plain), identity=False)


def test_of_no_inputs_nothing_is_missing_unless_a_mask_says_so():
    weight, x = matrices.PostImputing(normal(0, 2, 0), put(5, 6)), normal(0, 0, 3)
    pre, missing = matrices.PreImputing(normal(0, 2, 0), normal(0, 0)), np.array([False, True, False])
    products = jax.jit(lambda weight, x, pre, empty: (weight @ x, weight.matmul(x, missing=missing), pre @ empty))
    want = np.zeros((2, 3), np.float32), np.array([[0, 5, 0], [0, 6, 0]], np.float32), np.zeros(2, np.float32)
    assert_same(products(weight, x, pre, normal(0, 0)), want, identity=False)


@by_kind
def test_samples_as_columns_as_rows_and_one_by_one(kind: str):
    weight, x = make(kind), data(kind)
    masked = lambda weight: lambda x, missing: weight.matmul(x, missing=missing)
    ways = lambda weight, x: [
        weight @ x,
        (x.T @ weight.T).T,
        jax.vmap(lambda x: weight @ x, 1, 1)(x),
        jax.vmap(lambda x: x @ weight.T, 1, 1)(x),
        (weight @ jnp.stack([x, x]))[1],
        jax.vmap(masked(weight), 1, 1)(x, mask(kind)),
    ]
    want, *others = jax.jit(ways)(weight, x)
    assert no_nan(want)
    assert_close([*others, weight @ x, weight @ np.asarray(x)], [want] * 7)


@by_kind
def test_numbers_of_other_types(kind: str, standard_promotion):
    weight, gone, x = make(kind), mask(kind), data(kind)
    product = jax.jit(lambda weight, x: (weight @ x, weight.matmul(x, missing=gone)))
    integers = np.arange(20).reshape(4, 5)
    floats = integers.astype(np.float32)
    imputed = product(weight, np.where(gone, NAN, floats).astype(np.float32))[0]
    assert_close(product(weight, integers), (np.asarray(weight.matrix) @ floats, imputed))
    for parts, real in (((x, 0 * X), x), ((0 * X, x), np.where(gone, NAN, 0 * X))):  # NaN in either part
        of_complex = product(weight, np.stack(parts, -1).view(np.complex64)[..., 0])[0]
        assert of_complex.dtype == jnp.complex64
        assert_close(np.real(of_complex), product(weight, real)[0])
    with enable_x64(True):
        weight, x = make(kind, dtype=jnp.float64), data(kind, jnp.float64)
        both = jax.jit(lambda weight, x: (weight @ x, without_nan(weight, np.float64(X), gone)))
        assert_close(*both(weight, x), 1e-14)


# -- No NaN in a gradient


def loss(weight: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(weight @ x) ** 2)


def filled(weight: Any, x: jax.Array) -> jax.Array:
    gone = jnp.isnan(x)
    return jnp.sum(jnp.sin(without_nan(weight, jnp.where(gone, 0, x), gone)) ** 2)


def derivatives(loss: Any, weight: Any, x: jax.Array) -> Any:
    f, both = lambda both: loss(*both), (weight, x)
    tangent = jax.tree.map(lambda leaf: np.cos(np.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), both)
    return {
        "forward": jax.jvp(f, (both,), (tangent,)),
        "reverse over reverse": jax.vjp(jax.grad(f), both)[1](tangent),
        "forward over reverse": jax.jvp(jax.grad(f), (both,), (tangent,)),
        "per sample": jax.vmap(lambda x: jax.grad(f)((weight, x[:, None])), 1)(x),
    }


@by_kind
def test_derivatives_of_both_orders_and_modes(kind: str):
    got, want = jax.jit(lambda *at: [derivatives(of, *at) for of in (loss, filled)])(make(kind), data(kind))
    assert_close(got, want, 1e-4)
    assert no_nan(got)
    np.testing.assert_array_equal(np.asarray(got["forward over reverse"][0][1])[mask(kind)], 0)


def no_nan(tree: Any) -> bool:
    return not any(np.any(np.isnan(np.asarray(leaf))) for leaf in jax.tree.leaves(tree))


@by_kind
def test_derivatives_in_low_precision(kind: str):
    wide = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
    gradients = lambda points: [jax.value_and_grad(loss, (0, 1))(*point) for point in points]
    points = [(make(kind, dtype=dtype), data(kind, dtype)) for dtype in (jnp.bfloat16, jnp.float16)]
    got, want = jax.jit(lambda points: (gradients(points), gradients(wide(points))))(points)
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [jnp.bfloat16] * 4 + [jnp.float16] * 4
    assert_close(wide(jax.device_get(got)), want, 0.1)


@by_kind
def test_other_matrices_within(kind: str, without_type_checks: None):
    within = low_rank(6, 3, 4), lineax.MatrixLinearOperator(normal(7, 3, 4))
    weights, x = [KINDS[kind](inner, make(kind).psi) for inner in within], data(kind)

    @jax.jit
    def both(weights: Any) -> Any:
        dense = [KINDS[kind](weight.matrix.to_dense(), weight.psi) for weight in weights]
        of_each = [[jax.value_and_grad(loss, (0, 1))(each, x) for each in every] for every in (weights, dense)]
        return of_each, ([weight.to_dense() for weight in weights], [each.matrix for each in dense])

    of_each, entries = both(weights)
    assert_close(*entries)
    for (got, back), (want, back_of_dense) in zip(*of_each, strict=True):
        assert_close((got, back[0].psi, back[1]), (want, back_of_dense[0].psi, back_of_dense[1]), 1e-4)
        assert no_nan(back)
        assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(back))


# -- Samples missing in part, and products that impute nothing


def test_a_sample_missing_in_part_is_an_error_where_values_are_known():
    weight, x = make("post"), jnp.asarray(IN_PART)
    for f, at in (
        (lambda x: weight @ x, x),
        (lambda x: x.T @ weight.T, x),
        (jax.grad(lambda weight: jnp.sum(weight @ x)), weight),
        (jax.grad(lambda x: jnp.sum(x.T @ weight.T)), x),
        (lambda x: weight.matmul(X, missing=np.isnan(x)), x),
    ):
        with pytest.raises(
            ValueError, match=r"^1 of 5 samples are missing in part, but .*: use PreImputing for single"
        ):
            f(at)


def nan_at_one(f: Any, weight: Any, x: np.ndarray, sample: int) -> None:
    """Within a trace a product is NaN at this sample, and derivatives are those without the sample."""

    def of(weight: Any, x: Any) -> Any:
        slope = jax.grad(lambda weight, x: jnp.sum(f(weight, x) ** 2), (0, 1))
        return f(weight, x), *jax.jvp(slope, (weight, x), jax.tree.map(jnp.ones_like, (weight, x)))

    without = lambda array: np.delete(array, sample, axis=1)
    run = jax.jit(lambda weight, *xs: [of(weight, x) for x in xs])
    (y, *derivatives), (want, *wanted) = jax.device_get(run(weight, x, without(x)))
    assert np.all(np.isnan(y[:, sample]))
    assert_close(without(y), want, 1e-4)
    for (got, of_x), (of_weight, of_others) in zip(derivatives, wanted, strict=True):
        assert_close((got, without(of_x)), (of_weight, of_others), 1e-4)
        np.testing.assert_array_equal(of_x[:, sample], 0)


def spoilt(x: np.ndarray, entry: tuple[Any, int]) -> np.ndarray:
    x = x.copy()
    x[entry] = NAN
    return x


IN_PART = spoilt(spoilt(X, (0, 1)), (slice(None), 3))  # sample 1 in part, sample 3 as a whole


def test_a_sample_missing_in_part_is_nan_within_a_trace():
    nan_at_one(lambda weight, x: weight @ x, make("post"), IN_PART, 1)
    of_samples = jax.vmap(lambda x: make("post") @ x, 1)(IN_PART)
    np.testing.assert_array_equal(np.isnan(of_samples[:, 0]), np.arange(5) == 1)


@by_kind
def test_a_product_with_the_transpose_imputes_nothing(kind: str):
    weight, x = make(kind), np.asarray(normal(9, 3, 5))
    product = lambda weight, x: weight.T @ x
    nan_at_one(product, weight, spoilt(x, (0, 2)), 2)
    refusal = r"^1 of 5 samples have NaN, but x @ M of a P.*Imputing imputes nothing: use"
    for each in (product, lambda weight, x: (x.T @ weight).T):
        assert_close(each(weight, x), weight.matrix.T @ x)
        with pytest.raises(ValueError, match=refusal):
            each(weight, spoilt(x, (0, 2)))
    gradient = tp.grad(lambda weight: jnp.sum(x.T @ weight))(weight)
    assert_same(gradient.psi, jnp.zeros_like(weight.psi))


# -- Masks


@by_kind
def test_what_is_masked_has_no_influence(kind: str):
    weight, gone = make(kind), mask(kind)
    total = lambda weight, x: jnp.sum(jnp.sin(weight.matmul(x, missing=gone)))
    by_mask = jax.jit(jax.value_and_grad(total, (0, 1)))
    want = jax.value_and_grad(lambda weight, x: jnp.sum(jnp.sin(weight @ x)), (0, 1))(weight, data(kind))
    for value in (0.0, 1e38, NAN, np.inf, -np.inf):
        x = np.where(gone, np.float32(value), X)
        assert_close(by_mask(weight, x), want)
        assert_close(weight.matmul(x, missing=jnp.asarray(gone)), weight @ data(kind))
    assert_close(weight.matmul(data(kind)), weight @ data(kind))


def test_masks_of_whole_samples():
    weight, gone = make("post"), mask("post")[0]

    @jax.jit
    def products(weight: Any, gone: jax.Array) -> Any:
        one_by_one = jax.vmap(lambda x, missing: weight.matmul(x, missing=missing), (1, 0), 1)(X, gone)
        stacked = weight.matmul(np.stack([X, X]), missing=jnp.stack([~gone, gone]))[1]
        alone = [weight.matmul(X[:, i], missing=i == 1) for i in range(2)]
        return (weight.matmul(X, missing=gone), one_by_one, stacked), alone

    of_all, alone = products(weight, gone)
    assert_close(of_all, (weight @ data("post"),) * 3)
    assert_close(alone, [np.asarray(weight.matrix) @ X[:, 0], weight.psi])


@by_kind
def test_nan_that_no_mask_covers_is_not_missing(kind: str):
    weight, gone, x = make(kind), mask(kind), spoilt(X, (0, 2))
    masks = {5: gone, 4: np.delete(gone, 2, axis=1)}
    product = lambda weight, x: weight.matmul(x, missing=masks[x.shape[1]])
    with pytest.raises(ValueError, match=r"^P.*Imputing\.matmul: 1 of 5 samples have NaN where the mask says"):
        product(weight, x)
    nan_at_one(product, weight, x, 2)


@by_kind
def test_with_a_mask_no_nan_is_ever_computed(kind: str):
    weight, x, gone = make(kind), jnp.asarray(X), mask(kind)
    gradient = jax.grad(lambda weight, x: jnp.sum(weight.matmul(x, missing=gone)), (0, 1))
    with jax.debug_nans(True):
        eager, compiled = gradient(weight, x), jax.jit(gradient)(weight, x)
    assert_close(eager, compiled)


# -- Errors

OF_TWO = jnp.ones((2, 3))
REFUSED = [
    (lambda: matrices.PostImputing(OF_TWO, jnp.ones(3)), r"of a PostImputing .* per output: expected shape \(2,\) for"),
    (lambda: matrices.PreImputing(OF_TWO, jnp.ones((3, 1))), r"per input: .* \(3,\) .* shape \(2, 3\), got \(3, 1\)"),
    (lambda: matrices.PreImputing(OF_TWO, jnp.arange(3)), "a parameter must be floating or complex, got int32"),
    (lambda: matrices.PreImputing(OF_TWO, 0.0), "expected an array, got float"),
    (lambda: make("pre").matmul(X, missing=X[0] > 0), r"shape \(4, 5\) for x of shape \(4, 5\), got \(5,\)"),
    (lambda: make("post").matmul(X, missing=X[:, 0] > 0), r"\(4, 5\) or \(5,\) for x of .* got \(4,\)"),
    (lambda: make("post").matmul(X[:, 0], missing=X[0, :1] > 0), r"\(4,\) or \(\) for x of .* got \(1,\)"),
    (lambda: make("pre").matmul(X, missing=jnp.ones((4, 5), int)), "of bools, True where x is missing, got int32"),
    (lambda: make("pre").matmul([1.0, 2.0, 3.0, 4.0]), "expected an array, got list"),
    (lambda: make("pre").matmul(X.T, missing=X.T > 0), r"M @ x: M is a PreImputing of shape \(3, 4\), .* got \(5, 4\)"),
    (lambda: jax.tree.map(lambda leaf: leaf[None], make("pre")).matmul(X, missing=X > 0), "is an ensemble of matrices"),
]


@pytest.mark.parametrize(("use", "message"), REFUSED)
@pytest.mark.usefixtures("without_type_checks")
def test_what_does_not_fit(use: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        use()
