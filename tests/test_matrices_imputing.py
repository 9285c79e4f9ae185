"""Missing data: what stands for it is learned, and no NaN reaches a gradient."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest

import treeparams as tp
from treeparams import matrices

from .zoo import assert_close, assert_same, enable_x64

NAN = jnp.nan
KINDS = {"pre": matrices.PreImputing, "post": matrices.PostImputing}
by_kind = pytest.mark.parametrize("kind", KINDS)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make(kind: str, m: int = 3, n: int = 4, dtype: Any = jnp.float32) -> Any:
    return KINDS[kind](jnp.asarray(normal(0, m, n), dtype), jnp.asarray(normal(1, n if kind == "pre" else m), dtype))


X = normal(2, 4, 5)  # five samples of four inputs


def data(kind: str, dtype: Any = jnp.float32) -> jax.Array:
    """X, of which some is missing."""
    return jnp.asarray(np.where(mask(kind), NAN, X), dtype)


def mask(kind: str) -> np.ndarray:
    entries = np.arange(20).reshape(4, 5) % 3 == 0
    return entries if kind == "pre" else np.broadcast_to(np.arange(5) % 2 == 1, (4, 5))


# -- What it computes


@jax.jit
def _both(weight: Any, x: jax.Array, entries: jax.Array, cotangent: jax.Array) -> Any:
    """Products in all ways of writing them, and the gradients of those with NaN and of those with a mask."""
    nan = jnp.where(entries, NAN, x)
    by_nan, back = jax.vjp(lambda weight, x: weight @ x, weight, nan)
    by_mask, back_of_mask = jax.vjp(lambda weight, x: weight.matmul(x, missing=entries), weight, x)
    return [by_nan, by_mask, (nan.T @ weight.T).T], [back(cotangent), back_of_mask(cotangent)]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 4), (3, 2, 0)], ids=str)
def test_it_is_what_numpy_says(shape: tuple[int, int, int]):
    m, n, batch = shape
    for seed, likelihood in enumerate([0, 0.3, 0.7, 0.3, 0.7, 1]):
        random = np.random.default_rng(seed)
        entries, samples = random.random((n, batch)) < likelihood, random.random(batch) < likelihood
        w, pre, post, x, cotangent = (
            random.normal(size=size).astype(np.float32) for size in ((m, n), n, m, (n, batch), (m, batch))
        )
        filled, back = np.where(entries, pre[:, None], x), w.T @ cotangent
        gradients = cotangent @ filled.T, (back * entries).sum(1), np.where(entries, 0, back)
        check(_both(matrices.PreImputing(*jax.device_put((w, pre))), x, entries, cotangent), w @ filled, gradients)
        product, there = np.where(samples, post[:, None], w @ x), ~samples
        gradients = cotangent[:, there] @ x[:, there].T, cotangent[:, samples].sum(1), np.where(samples, 0, back)
        whole = np.broadcast_to(samples, (n, batch))
        check(_both(matrices.PostImputing(*jax.device_put((w, post))), x, whole, cotangent), product, gradients)


def check(got: Any, product: np.ndarray, gradients: Any) -> None:
    products, found = got
    assert (len(products), len(found)) == (3, 2)
    for each in products:
        np.testing.assert_allclose(each, product, rtol=1e-4, atol=1e-5)
    for weight, x in found:
        for one, want in zip((weight.matrix, weight.psi, x), gradients, strict=True):
            np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-5)


@by_kind
def test_where_nothing_is_missing_it_is_the_plain_product_bit_for_bit(kind: str):
    weight, none = make(kind), np.zeros((4, 5), bool)
    ways = lambda weight, x: (weight @ x, weight.matmul(x, missing=none), weight.to_dense() @ x)
    by_nan, by_mask, plain = jax.jit(ways)(weight, X)
    assert_same((by_nan, by_mask), (plain, plain), identity=False)


def test_of_no_inputs_nothing_is_missing_unless_a_mask_says_so():
    weight = matrices.PostImputing(jnp.zeros((2, 0)), jnp.array([5.0, 6.0]))
    assert_same(weight @ jnp.zeros((0, 3)), jnp.zeros((2, 3)))
    masked = weight.matmul(jnp.zeros((0, 3)), missing=jnp.array([False, True, False]))
    assert_same(masked, jnp.array([[0.0, 5.0, 0.0], [0.0, 6.0, 0.0]]))
    assert_same(matrices.PreImputing(jnp.zeros((2, 0)), jnp.zeros(0)) @ jnp.zeros(0), jnp.zeros(2))


@by_kind
def test_samples_as_columns_as_rows_and_one_by_one(kind: str):
    weight, x = make(kind), data(kind)
    layer = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    layer = eqx.tree_at(lambda layer: layer.weight, layer, weight)

    @jax.jit
    def ways(layer: Any, x: jax.Array) -> Any:
        weight = layer.weight
        return weight @ x, [
            (x.T @ weight.T).T,
            jax.vmap(lambda x: weight @ x, 1, 1)(x),
            jax.vmap(lambda x: x @ weight.T, 1, 1)(x),
            (weight @ jnp.stack([x, x]))[1],
            jax.vmap(lambda x, missing: weight.matmul(x, missing=missing), 1, 1)(x, mask(kind)),
            jax.vmap(layer)(x.T).T - jnp.broadcast_to(layer.bias[:, None], (3, 5)),
        ]

    want, others = ways(layer, x)
    assert no_nan(want)
    for each in [*others, weight @ x, weight @ np.asarray(x)]:
        assert_close(each, want)


@by_kind
def test_numbers_of_other_types(kind: str, standard_promotion):
    weight, gone = make(kind), mask(kind)
    integers, x, zeros = np.arange(20).reshape(4, 5), data(kind), jnp.zeros((4, 5))
    whole = jax.jit(lambda weight: (weight @ integers, weight.matmul(integers, missing=gone)))(weight)
    floats = integers.astype(np.float32)
    assert_close(whole, (weight.matrix @ floats, weight @ np.where(gone, NAN, floats)))
    product = jax.jit(lambda weight, x: weight @ x)
    for parts, real in (((x, zeros), x), ((zeros, x), jnp.where(gone, NAN, 0))):  # NaN in either part
        of_complex = product(weight, jax.lax.complex(*parts))
        assert of_complex.dtype == jnp.complex64
        assert_close(of_complex.real, product(weight, real))
    with enable_x64(True):
        weight = make(kind, dtype=jnp.float64)
        wide = product(weight, data(kind, jnp.float64))
        assert wide.dtype == jnp.float64
        assert_close(wide, weight @ np.asarray(data(kind, jnp.float64)), 1e-14)


# -- No NaN in a gradient


def loss(weight: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(weight @ x) ** 2)


def filled(weight: Any, x: jax.Array) -> jax.Array:
    """The same loss where products are written without NaN from the outset."""
    gone = jnp.isnan(x)
    clean = jnp.where(gone, 0, x)
    if isinstance(weight, matrices.PreImputing):
        y = weight.matrix @ (clean + gone.astype(x.dtype) * jnp.broadcast_to(weight.psi[:, None], x.shape))
    else:
        there = (1 - gone[:1].astype(x.dtype)) * jnp.ones((3, 1), x.dtype)
        y = there * (weight.matrix @ clean) + (1 - there) * jnp.broadcast_to(weight.psi[:, None], there.shape)
    return jnp.sum(jnp.sin(y) ** 2)


def derivatives(loss: Any, weight: Any, x: jax.Array) -> Any:
    f, both = lambda both: loss(*both), (weight, x)
    tangent = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), both)
    vector, restructure = tp.ravel(weight)
    return {
        "value": f(both),
        "reverse": jax.grad(f)(both),
        "forward": jax.jvp(f, (both,), (tangent,)),
        "reverse over reverse": jax.vjp(jax.grad(f), both)[1](tangent),
        "hessian": jax.hessian(lambda vector: f((restructure(vector), x)))(vector),
        "per sample": jax.vmap(lambda x: jax.grad(f)((weight, x[:, None])), 1)(x),
    }


@by_kind
def test_derivatives_of_both_orders_and_modes(kind: str):
    weight, x = make(kind), data(kind)
    got, want = (jax.jit(lambda weight, x, of=of: derivatives(of, weight, x))(weight, x) for of in (loss, filled))
    assert_close(got, want, 1e-4)
    assert no_nan(got)
    np.testing.assert_array_equal(np.asarray(got["reverse"][1])[mask(kind)], 0)
    assert_close(jax.grad(loss, (0, 1))(weight, x), got["reverse"])  # outside of a trace


def no_nan(tree: Any) -> bool:
    return not any(bool(jnp.any(jnp.isnan(leaf))) for leaf in jax.tree.leaves(tree))


@by_kind
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_derivatives_in_low_precision(kind: str, dtype: Any):
    weight, x = make(kind, dtype=dtype), data(kind, dtype)
    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(weight, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    wide = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
    want = jax.jit(jax.value_and_grad(loss, (0, 1)))(wide(weight), wide(x))
    assert_close(wide(got), want, 0.1)


PARTS = [jnp.asarray(normal(5, *shape)) for shape in ((3, 4), (3, 1), (1, 4))]
INNER = {
    "svd": lambda: matrices.SVD(matrices.Orthogonal(PARTS[1].T), jnp.ones(3), matrices.Orthogonal(PARTS[2])),
    "low rank": lambda: matrices.LowRank(*PARTS),
    "lineax": lambda: lineax.MatrixLinearOperator(PARTS[0]),
}


@by_kind
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.usefixtures("without_type_checks")
def test_other_matrices_within(kind: str, inner: str):
    weight, x = KINDS[kind](INNER[inner](), jnp.ones(4 if kind == "pre" else 3)), data(kind)

    @jax.jit
    def both(weight: Any, x: jax.Array) -> Any:
        dense = KINDS[kind](weight.matrix.to_dense(), weight.psi)
        of_each = [jax.value_and_grad(loss, (0, 1))(each, x) for each in (weight, dense)]
        return of_each, (weight.to_dense(), dense.matrix)

    ((got, back), (want, back_of_dense)), entries = both(weight, x)
    assert_close((got, back[0].psi, back[1]), (want, back_of_dense[0].psi, back_of_dense[1]), 1e-4)
    assert no_nan(back)
    assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(back))
    assert_close(*entries)


# -- Samples missing in part, and products that impute nothing


def test_a_sample_missing_in_part_is_an_error_where_values_are_known():
    weight, x, bad = make("post"), jnp.asarray(IN_PART), np.isnan(IN_PART)
    of_weight = jax.grad(lambda weight: jnp.sum(weight @ x))
    of_x = jax.grad(lambda x: jnp.sum(x.T @ weight.T))
    of_mask = lambda x: weight.matmul(X, missing=bad)
    for f, at in (
        (lambda x: weight @ x, x),
        (lambda x: x.T @ weight.T, x),
        (of_weight, weight),
        (of_x, x),
        (of_mask, x),
    ):
        with pytest.raises(ValueError, match=r"^1 of 5 samples are missing in part, but .*: PreImputing takes single"):
            f(at)


def nan_at_one(f: Any, weight: Any, x: np.ndarray, sample: int) -> None:
    """Within a trace a product is NaN at this sample, and derivatives are those without the sample."""

    def of(weight: Any, x: Any) -> Any:
        slope = jax.grad(lambda weight, x: jnp.sum(f(weight, x) ** 2), (0, 1))
        ones = jax.tree.map(jnp.ones_like, (weight, x))
        return f(weight, x), slope(weight, x), jax.jvp(slope, (weight, x), ones)[1]

    without = lambda array: np.delete(array, sample, axis=1)
    (y, *derivatives), (want, *wanted) = jax.jit(of)(weight, x), jax.jit(of)(weight, without(x))
    assert np.all(np.isnan(y[:, sample]))
    assert_close(without(y), want, 1e-4)
    for (got, of_x), (of_weight, of_others) in zip(derivatives, wanted, strict=True):
        assert_close(got, of_weight, 1e-4)
        assert_close(without(of_x), of_others, 1e-4)
        np.testing.assert_array_equal(of_x[:, sample], 0)


def spoilt(x: np.ndarray, *entries: tuple[Any, int]) -> np.ndarray:
    """A copy with NaN at these entries."""
    x = x.copy()
    for entry in entries:
        x[entry] = NAN
    return x


IN_PART = spoilt(X, (0, 1), (slice(None), 3))  # sample 1 in part, sample 3 as a whole


def test_a_sample_missing_in_part_is_nan_within_a_trace():
    weight = make("post")
    nan_at_one(lambda weight, x: weight @ x, weight, IN_PART, 1)
    np.testing.assert_array_equal(np.isnan(jax.vmap(lambda x: weight @ x, 1)(IN_PART)[:, 0]), np.arange(5) == 1)


@by_kind
def test_a_product_with_the_transpose_imputes_nothing(kind: str):
    weight, x = make(kind), normal(9, 3, 5)
    product = lambda weight, x: weight.T @ x
    nan_at_one(product, weight, spoilt(x, (0, 2)), 2)
    for each in (product, lambda weight, x: (x.T @ weight).T):
        assert_close(each(weight, x), weight.matrix.T @ x)
        with pytest.raises(
            ValueError, match=r"^1 of 5 samples have NaN, but x @ M of a P.*Imputing imputes nothing: use"
        ):
            each(weight, spoilt(x, (0, 2)))
    gradient = tp.grad(lambda weight: jnp.sum(x.T @ weight))(weight)
    assert_same(gradient.psi, jnp.zeros_like(weight.psi))


# -- Masks


@by_kind
def test_what_is_masked_has_no_influence(kind: str):
    weight, gone = make(kind), mask(kind)
    total = lambda weight, x: jnp.sum(jnp.sin(weight.matmul(x, missing=gone)))
    by_mask = jax.jit(jax.value_and_grad(total, (0, 1)))
    want, (of_weight, of_x) = jax.value_and_grad(lambda weight, x: jnp.sum(jnp.sin(weight @ x)), (0, 1))(
        weight, data(kind)
    )
    for value in (0.0, 1e38, NAN, np.inf, -np.inf):
        x = np.where(gone, np.float32(value), X)
        assert_close(by_mask(weight, x), (want, (of_weight, of_x)))
        assert_close(weight.matmul(x, missing=jnp.asarray(gone)), weight @ data(kind))
    assert_close(weight.matmul(data(kind)), weight @ data(kind))


def test_masks_of_whole_samples():
    weight, gone, x = make("post"), mask("post")[0], X

    @jax.jit
    def products(weight: Any, gone: jax.Array) -> Any:
        one_by_one = jax.vmap(lambda x, missing: weight.matmul(x, missing=missing), (1, 0), 1)
        stacked = weight.matmul(np.stack([x, x]), missing=jnp.stack([gone, ~gone]))
        return weight.matmul(x, missing=gone), one_by_one(x, gone), stacked[0], stacked[1][:, ::2]

    want = weight @ data("post")
    assert_close(products(weight, gone), (want, want, want, jnp.stack([weight.psi] * 3, axis=1)))
    assert_close(weight.matmul(x[:, 1], missing=gone[1]), weight.psi)
    assert_close(weight.matmul(x[:, 0], missing=False), weight.matrix @ x[:, 0])


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


# -- In a model


@by_kind
def test_as_a_part_of_a_model(kind: str):
    weight = make(kind)
    layer = eqx.tree_at(lambda layer: layer.weight, eqx.nn.Linear(4, 3, key=jax.random.key(0)), weight)
    layout = tp.layout(layer, freeze="weight.psi")
    assert tp.layout(layer).paths == ("weight.matrix", "weight.psi", "bias")
    assert layout.paths == ("weight.matrix", "bias")
    vector, restructure = tp.ravel(layer)
    assert vector.shape == (12 + len(weight.psi) + 3,)
    assert_same(restructure(vector), layer)
    of = lambda layer: jnp.sum(jax.vmap(layer)(data(kind).T) ** 2)
    gradient, partial = eqx.filter_jit(lambda layer: (tp.grad(of)(layer), tp.grad(of, layout)(layer)))(layer)
    assert no_nan(gradient)
    assert bool(jnp.all(gradient.weight.psi != 0))
    assert partial.weight.psi is None
    assert_close(partial.weight.matrix, gradient.weight.matrix)
    changed = KINDS[kind](matrices.LowRank.random(weight.matrix, 1, key=jax.random.key(1)), weight.psi)
    assert_same(matrices.merge(changed), weight)


# -- Errors


def test_what_does_not_fit(without_type_checks):
    with pytest.raises(
        ValueError, match=r"psi of a PostImputing has one entry per output: expected shape \(2,\) for a"
    ):
        matrices.PostImputing(jnp.ones((2, 3)), jnp.ones(3))
    with pytest.raises(ValueError, match=r"has one entry per input: .* \(3,\) for .* shape \(2, 3\), got \(2,\)"):
        matrices.PreImputing(jnp.ones((2, 3)), jnp.ones(2))
    with pytest.raises(ValueError, match=r"has one entry per input: .* \(3,\) for .* got \(3, 1\)"):
        matrices.PreImputing(jnp.ones((2, 3)), jnp.ones((3, 1)))
    with pytest.raises(TypeError, match="a parameter is floating or complex, got int32"):
        matrices.PreImputing(jnp.ones((2, 3)), jnp.arange(3))
    with pytest.raises(TypeError, match="expected an array, got float"):
        matrices.PreImputing(jnp.ones((2, 3)), 0.0)


def test_masks_and_operands_that_do_not_fit(without_type_checks):
    pre, post, x = make("pre"), make("post"), X
    with pytest.raises(ValueError, match=r"a mask of shape \(4, 5\) for x of shape \(4, 5\), got \(5,\)"):
        pre.matmul(x, missing=jnp.ones(5, bool))
    with pytest.raises(ValueError, match=r"a mask of shape \(4, 5\) or \(5,\) for x of shape \(4, 5\), got \(4,\)"):
        post.matmul(x, missing=jnp.ones(4, bool))
    with pytest.raises(ValueError, match=r"a mask of shape \(4,\) or \(\) for x of shape \(4,\), got \(1,\)"):
        post.matmul(x[:, 0], missing=jnp.ones(1, bool))
    with pytest.raises(TypeError, match="expected a mask of bools, True where x is missing, got int32"):
        pre.matmul(x, missing=jnp.ones((4, 5), int))
    with pytest.raises(TypeError, match="expected an array, got list"):
        pre.matmul([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(
        ValueError, match=r"M @ x: M is a PreImputing of shape \(3, 4\), so x must have .* got \(5, 4\)"
    ):
        pre.matmul(x.T, missing=mask("pre").T)
    with pytest.raises(ValueError, match=r"is an ensemble of matrices: take each by jax\.vmap"):
        jax.tree.map(lambda leaf: leaf[None], pre).matmul(x, missing=mask("pre"))
