"""Missing data: what stands for it is learned, and no NaN reaches a gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import matrices

from ..zoo import assert_close, assert_same, enable_x64
from .zoo import IMPUTING, low_rank, normal, put

NAN = jnp.nan
by_kind = pytest.mark.parametrize("kind", IMPUTING)


def make(kind: str, m: int = 3, n: int = 4, dtype: Any = jnp.float32) -> Any:
    parts = normal(0, m, n), normal(1, n if kind == "pre" else m)
    return IMPUTING[kind](*jax.device_put([np.asarray(part).astype(dtype) for part in parts]))


X = np.asarray(normal(2, 4, 5))  # five samples of four inputs


def data(kind: str, dtype: Any = jnp.float32) -> jax.Array:
    """X, of which some is missing."""
    return jax.device_put(np.where(mask(kind), NAN, X).astype(dtype))


def mask(kind: str) -> np.ndarray:
    entries = np.arange(20).reshape(4, 5) % 3 == 0
    return entries if kind == "pre" else np.broadcast_to(np.arange(5) % 2 == 1, (4, 5))


def without_nan(weight: Any, x: jax.Array, gone: jax.Array) -> jax.Array:
    """The product by its definition, of an x that is finite where it is missing."""
    psi = weight.psi[:, None]
    if isinstance(weight, matrices.PreImputing):
        return weight.matrix @ jnp.where(gone, psi, x)
    return jnp.where(gone[:1], psi, weight.matrix @ x)


@jax.jit
def _products_and_gradients(weight: Any, x: jax.Array, gone: jax.Array) -> Any:
    """By the definition, and in all ways: samples as columns, as rows, one by one, in stacks; of NaN, or with masks."""
    nan, of_sample = jnp.where(gone, NAN, x), gone[0]
    masked = lambda weight: lambda x, missing: weight.matmul(x, missing=missing)
    ways = [
        (lambda weight, x: without_nan(weight, x, gone), x),
        (lambda weight, x: weight @ x, nan),
        (lambda weight, x: (x.T @ weight.T).T, nan),
        (lambda weight, x: jax.vmap(lambda x: weight @ x, 1, 1)(x), nan),
        (lambda weight, x: jax.vmap(lambda x: x @ weight.T, 1, 1)(x), nan),
        (lambda weight, x: (weight @ jnp.stack([x, x]))[1], nan),
        (lambda weight, x: masked(weight)(x, gone), x),
        (lambda weight, x: jax.vmap(masked(weight), 1, 1)(x, gone), x),
    ]
    if isinstance(weight, matrices.PostImputing):  # a mask has a bool for each sample
        ways += [
            (lambda weight, x: masked(weight)(x, of_sample), x),
            (lambda weight, x: jax.vmap(masked(weight), (1, 0), 1)(x, of_sample), x),
            (lambda weight, x: masked(weight)(jnp.stack([x, x]), jnp.stack([~of_sample, of_sample]))[1], x),
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
        want, *others = _products_and_gradients(make(kind, m, n), normal(seed, n, batch), np.repeat(gone, n, 0)[:n])
        assert_close([y for y, _ in others], [want[0]] * len(others))
        assert_close(others, [want] * len(others), 1e-4)


@by_kind
def test_where_nothing_is_missing_it_is_the_plain_product_bit_for_bit_and_numpy_is_as_jax(kind: str):
    weight, x, none = make(kind), data(kind), np.zeros((4, 5), bool)
    ways = lambda weight, x: (weight @ X, weight.matmul(X, missing=none), weight.to_dense() @ X, weight @ x)
    by_nan, by_mask, plain, want = jax.jit(ways)(weight, x)
    assert_same((by_nan, by_mask), (plain, plain), identity=False)
    assert no_nan(want)
    assert_close((weight @ x, weight @ np.asarray(x)), (want, want))


def test_of_no_inputs_nothing_is_missing_unless_a_mask_says_so_as_one_of_a_vector_does():
    weight, x, whole = matrices.PostImputing(normal(0, 2, 0), put(5, 6)), normal(0, 0, 3), make("post")
    missing = np.array([False, True, False])
    alone = lambda: [whole.matmul(X[:, i], missing=i == 1) for i in range(2)]
    found, alone = jax.jit(lambda: ((weight @ x, weight.matmul(x, missing=missing)), alone()))()
    want = np.zeros((2, 3), np.float32), np.array([[0, 5, 0], [0, 6, 0]], np.float32)
    assert_same(found, want, identity=False)
    assert_close(alone, [np.asarray(whole.matrix) @ X[:, 0], whole.psi])


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
    gradients, point = jax.value_and_grad(loss, (0, 1)), (make(kind, dtype=jnp.bfloat16), data(kind, jnp.bfloat16))
    got, want = jax.jit(lambda point: (gradients(*point), gradients(*wide(point))))(point)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("bfloat16")}
    assert_close(wide(jax.device_get(got)), want, 0.1)


@by_kind
def test_another_matrix_within(kind: str):
    x, gradients = data(kind), jax.value_and_grad(loss, (0, 1))

    @jax.jit
    def both(weight: Any) -> Any:
        dense = IMPUTING[kind](weight.matrix.to_dense(), weight.psi)
        return gradients(weight, x), gradients(dense, x), (weight.to_dense(), dense.matrix)

    (got, back), (want, back_of_dense), entries = both(IMPUTING[kind](low_rank(6, 3, 4), make(kind).psi))
    assert_close(*entries)
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


@by_kind
def test_what_is_masked_has_no_influence_and_no_nan_is_ever_computed(kind: str):
    weight, gone, given = make(kind), mask(kind), data(kind)
    gradients = lambda of: jax.value_and_grad(lambda weight, x: jnp.sum(jnp.sin(of(weight, x))), (0, 1))
    by_mask = gradients(lambda weight, x: weight.matmul(x, missing=gone))

    @jax.jit
    def run(weight: Any, x: jax.Array, gone: jax.Array) -> Any:
        of_nan = gradients(lambda weight, x: weight @ x)(weight, given)
        masked = by_mask(weight, x), weight.matmul(x, missing=gone), weight.matmul(given)
        return masked, (of_nan, *(weight @ given,) * 2)

    with jax.debug_nans(True):
        assert_close(by_mask(weight, jnp.asarray(X)), run(weight, X, gone)[0][0])  # eager, too
    for value in (0.0, 1e38, NAN, np.inf, -np.inf):
        found, want = run(weight, np.where(gone, np.float32(value), X), gone)
        assert_close(found, want)
    assert_close((weight.matmul(given, missing=jnp.asarray(gone)), weight.matmul(given)), want[1:])


@by_kind
def test_nan_that_no_mask_covers_is_not_missing(kind: str):
    weight, gone, x = make(kind), mask(kind), spoilt(X, (0, 2))
    masks = {5: gone, 4: np.delete(gone, 2, axis=1)}
    product = lambda weight, x: weight.matmul(x, missing=masks[x.shape[1]])
    with pytest.raises(ValueError, match=r"^P.*Imputing\.matmul: 1 of 5 samples have NaN where the mask says"):
        product(weight, x)
    nan_at_one(product, weight, x, 2)
