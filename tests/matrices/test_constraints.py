"""What holds of every constrained array: it stays on its set, trains as its raw parameters, and is no array itself."""

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import paramax
import pytest
import scipy.special

import treeparams as tp
from treeparams import matrices, optim

from ..zoo import assert_close, assert_same, enable_x64
from .zoo import equations, normal, put, svd


@dataclasses.dataclass
class Constraint:
    of: Callable[[Any], Any]  # a value
    value: jax.Array
    holds: Callable[[np.ndarray], Any]  # of entries in float64, also of several values at once


SPREAD = normal(0, 3, 3)
S = np.asarray(SPREAD)
is_one = lambda array: np.all(abs(array - 1) < 1e-6)
is_lower = lambda w: np.all(np.triu(w, 1) == 0)
CONSTRAINTS = {
    "positive": Constraint(matrices.Positive, put(*np.exp(S)), lambda w: np.all(w > 0)),
    "bounded": Constraint(
        lambda w: matrices.Bounded(w, -0.3, 0.7),
        put(*(0.2 + np.tanh(S) / 2.5)),
        lambda w: np.all((w >= -0.3) & (w <= 0.7)),
    ),
    "unit norm": Constraint(
        lambda w: matrices.UnitNorm(w, axis=0),
        put(*(S / np.linalg.norm(S, axis=0))),
        lambda w: is_one(np.linalg.norm(w, axis=-2)),
    ),
    "simplex": Constraint(
        matrices.Simplex,
        put(*(np.exp(S) / np.exp(S).sum(1, keepdims=True))),
        lambda w: np.all(w > 0) and is_one(w.sum(-1)),
    ),
    "lower triangular": Constraint(matrices.LowerTriangular, put(*np.tril(S)), is_lower),
    "cholesky factor": Constraint(
        lambda w: matrices.LowerTriangular(w, positive_diagonal=True),
        put(*(np.tril(S, -1) + np.diag([0.1, 1, 10]))),
        lambda w: is_lower(w) and np.all(np.diagonal(w, axis1=-2, axis2=-1) > 0),
    ),
    "symmetric": Constraint(matrices.Symmetric, put(*(S + S.T)), lambda w: np.array_equal(w, np.swapaxes(w, -1, -2))),
}
VALUES = {name: constraint.value for name, constraint in CONSTRAINTS.items()}


@jax.jit
def made(values: dict[str, Any]) -> dict[str, Any]:
    """One of each, as a model."""
    return {name: CONSTRAINTS[name].of(value) for name, value in values.items()}


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    return made(VALUES)


dense = jax.jit(matrices.materialise)


def all_hold(model: dict[str, Any]) -> bool:
    return all(CONSTRAINTS[name].holds(entries(value)) for name, value in dense(model).items())


def entries(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def with_raw(node: Any, raw: Any) -> Any:
    return eqx.tree_at(lambda node: node.raw, node, raw)


def test_the_value_given_is_the_value_had(model: dict[str, Any]):
    outside = {name: constraint.of(constraint.value) for name, constraint in CONSTRAINTS.items()}
    for each in (outside, model):
        assert_close(dense(each), VALUES)
        assert all_hold(each)
    abstract = jax.eval_shape(lambda values: dense(made(values)), VALUES)
    assert {name: leaf.shape for name, leaf in abstract.items()} == dict.fromkeys(VALUES, (3, 3))


def test_an_ensemble(model: dict[str, Any]):
    several = {name: np.stack([value, dense(model)[name]]) for name, value in VALUES.items()}
    ensemble = eqx.filter_jit(eqx.filter_vmap(made))(several)
    assert_close(dense(ensemble), several)
    assert_close(eqx.filter_jit(eqx.filter_vmap(matrices.materialise))(ensemble), several)


def any_raw(shape: tuple[int, ...], count: int) -> np.ndarray:
    """Numbers of all sizes, and where things overflow, vanish or are equal."""
    random = np.random.default_rng(0)
    extremes = np.array([0, 1e4, -1e4, 2.0**-13, -(2.0**-100), 2.0**100, -(2.0**127), 2.0**127, 2.0**-126])
    numbers = np.where(random.random((count, *shape)) < 0.5, random.choice(extremes, (count, *shape)),
                       random.uniform(-100, 100, (count, *shape)))  # fmt: skip
    return np.concatenate([numbers, *(np.full((1, *shape), each) for each in extremes)]).astype(np.float32)


def test_raw_parameters_of_numpy_within_jit(model: dict[str, Any]):
    loaded = jax.tree.map(np.asarray, model)
    found = jax.jit(lambda: matrices.materialise(loaded))()
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, 1e-6), found, dense(model))


def test_any_raw_value_is_a_point_with_a_finite_gradient(model: dict[str, Any]):
    raws = {name: with_raw(node, any_raw(node.raw.shape, 300)) for name, node in model.items()}

    def pulled_back(node: Any, cotangent: jax.Array) -> Any:
        value, pull = jax.vjp(lambda node: node.to_dense(), node)
        return value, pull(cotangent)[0].raw

    each = jax.vmap(pulled_back, in_axes=(0, None))
    found = jax.jit(lambda raws: {name: each(raws[name], VALUES[name] / 1e6) for name in raws})(raws)
    for name, (value, gradient) in found.items():
        assert value.shape == (309, 3, 3), name
        assert np.all(np.isfinite(value)), name
        assert np.all(np.isfinite(gradient)), name
        assert CONSTRAINTS[name].holds(entries(value)), name


def test_zeros_are_points_and_can_be_left(model: dict[str, Any]):
    zeros = jax.tree.map(np.zeros_like, model)
    assert all_hold(zeros)
    loss = lambda model: sum(jnp.sum(value * SPREAD) for value in matrices.materialise(model).values())
    gradients = jax.jit(jax.grad(loss))(zeros)
    assert {name for name, node in gradients.items() if np.any(np.asarray(node.raw) == 0)} == {"unit norm"}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_that_of_float32_rounded(model: dict[str, Any], dtype: Any):
    half = jax.tree.map(lambda raw: np.asarray(raw).astype(dtype), model)
    wide = jax.tree.map(lambda raw: raw.astype(np.float32), half)
    values = dense(half)
    assert_same(values, {name: value.astype(dtype) for name, value in dense(wide).items()})
    again = dense(made(values))
    assert {value.dtype for value in again.values()} == {np.dtype(dtype)}
    for name, value in again.items():
        np.testing.assert_allclose(entries(value), entries(values[name]), rtol=0.03, atol=0.01, err_msg=name)


def test_in_float64(model: dict[str, Any]):
    with enable_x64(True):
        values = dense(jax.tree.map(lambda raw: np.asarray(raw, np.float64), model))
        assert {value.dtype for value in values.values()} == {np.dtype(np.float64)}
        assert_close(dense(made(values)), values, 1e-13)


def test_positive_keeps_its_relative_precision():
    w = np.exp(np.random.default_rng(0).uniform(-69, 69, 5000)).astype(np.float32)
    again = entries(jax.jit(lambda w: matrices.Positive(w).to_dense())(w))
    roundings = abs(again - w) / w / np.finfo(np.float32).eps
    assert np.all(roundings <= 3 * (1 + abs(np.log(np.minimum(w, 1)))))


def test_bounded_keeps_within_its_bounds_as_python_has_them():
    random = np.random.default_rng(0)
    raw = np.array([-100, -17, -10, -1, 0, 1, 10, 17, 100])
    nodes = [
        with_raw(matrices.Bounded(np.asarray(low + width / 2, dtype), low, low + width), raw.astype(dtype))
        for low, width in zip(random.uniform(-10, 10, 8), random.uniform(0.2, 10, 8), strict=True)
        for dtype in (np.float32, jnp.bfloat16)
    ]
    for node, value in zip(nodes, dense(nodes), strict=True):
        assert all(node.low <= each <= node.high for each in entries(value))


def test_bounds_far_from_zero():
    node = matrices.Bounded(put(1e6 + 0.5)[0], 1e6, 1e6 + 1)
    raws = put(-10, -1, 0, 1, 10)
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(lambda raw: with_raw(node, raw).to_dense())))(raws)
    assert value.tolist() == [1e6, 1e6 + 0.25, 1e6 + 0.5, 1e6 + 0.75, 1e6 + 1]
    np.testing.assert_allclose(slope, scipy.special.expit(raws) * scipy.special.expit(-raws), rtol=1e-5)


def test_a_bound_that_rounding_passes_has_the_gradient_still():
    node = matrices.Bounded(np.asarray(0.5, jnp.bfloat16), 0.1, 0.9)  # the bounds are no numbers of bfloat16
    of_raw = jax.value_and_grad(lambda raw: with_raw(node, raw).to_dense())
    value, slope = jax.jit(of_raw)(np.asarray(8, jnp.bfloat16))
    assert float(value) < 0.9
    want = 0.8 * scipy.special.expit(8) * scipy.special.expit(-8)
    np.testing.assert_allclose(float(slope), want, rtol=0.01)


def test_directions_and_their_lengths():
    @jax.jit
    def normalised(w: jax.Array) -> Any:
        rows, columns = matrices.UnitNorm.normalise(w), matrices.UnitNorm.normalise(0 * w, axis=0)
        gradient = jax.grad(lambda node: node.to_dense()[3, 0])(with_raw(rows, w)).raw
        return rows.to_dense(), columns.to_dense(), gradient

    rows, columns, gradient = normalised(put([0, 0], [3e38, 3e38], [2e-38, -4e-38], [3, 4]))
    half, fifth = 0.5**0.5, 0.2**0.5
    np.testing.assert_allclose(rows, [[1, 0], [half, half], [fifth, -2 * fifth], [0.6, 0.8]], rtol=1e-5)
    assert columns.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    np.testing.assert_allclose(gradient[3], [0.128, -0.096], rtol=1e-5)  # across the vector


def test_a_simplex_never_underflows():
    simplex = with_raw(matrices.Simplex(put(0.5, 0.5)), put(0, -200))
    value, gradient = jax.jit(jax.value_and_grad(lambda node: jnp.sum(jnp.log(node.to_dense()))))(simplex)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient.raw))
    matrices.Simplex(simplex.to_dense())


def test_nodes_of_one_value_are_not_tied(model: dict[str, Any]):
    nodes = [constraint.of(constraint.value) for constraint in CONSTRAINTS.values() for _ in range(2)]
    assert tp.layout([nodes, VALUES]).ties == {}


def test_packed_is_row_by_row_and_each_parameter_has_an_effect():
    w = put([1, 0, 0], [2, 3, 0], [4, 5, 6])
    assert matrices.LowerTriangular(w).raw.tolist() == [1, 2, 3, 4, 5, 6]
    assert matrices.Symmetric(w + w.T).raw.tolist() == [2, 2, 6, 4, 5, 12]
    for n in (0, 1, 4):
        ones = np.tril(np.ones((2, n, n), np.float32))
        lower, value = jax.jit(lambda w: (matrices.LowerTriangular(w), matrices.LowerTriangular(w).to_dense()))(ones)
        assert lower.raw.shape == (2, n * (n + 1) // 2)
        assert_same(value, ones)


TWO = put([1, 2], [3, 4])
KEY = jax.random.key(0)


def within(layer: Any, x: Any) -> Any:
    return lambda w: eqx.tree_at(lambda layer: layer.weight, layer, w)(x)


USES = {
    "plus": lambda w: w + TWO,
    "by": lambda w: np.ones(2) / w,
    "negative": lambda w: -w,
    "compared": lambda w: w < 1,
    "product": lambda w: w @ TWO,
    "product from the left": lambda w: TWO @ w,
    "with a matrix": lambda w: svd(0, 2, 2) @ w,
    "indexed": lambda w: w[0],
    "iterated": lambda w: list(w),
    "float": float,
    "jax.numpy": lambda w: jnp.exp(w),
    "where": lambda w: jnp.where(TWO > 1, w, TWO),
    "numpy.array": lambda w: np.array(w),
    "numpy.sum": lambda w: np.sum(w),
    "shape": lambda w: w.shape,
    "Linear": within(eqx.nn.Linear(2, 2, key=KEY), TWO[0]),
    "GroupNorm": within(eqx.nn.GroupNorm(1, 2), TWO),
    "Conv1d": within(eqx.nn.Conv1d(2, 3, 2, key=KEY), TWO),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_using_it_as_an_array_says_materialise(use: Any):
    message = r"Positive .*take matrices\.materialise\(model\) first"
    if not hasattr(jax, "shard_map"):  # JAX 0.6, of jnp.exp and jnp.where
        message += "|Cannot determine dtype of Positive"
    with pytest.raises((TypeError, AttributeError), match=message):
        use(matrices.Positive(TWO))


def test_all_print_and_pickle(model: dict[str, Any]):
    assert repr(tp.layout(model["unit norm"]).mask) == "UnitNorm(raw=True, axis=-2)"
    assert_same(pickle.loads(pickle.dumps(model)), model)


def test_the_raw_parameters_are_what_is_averaged_and_tied(model: dict[str, Any]):
    assert tp.layout(model).paths == tuple(f"{name}.raw" for name in sorted(model))
    average = tp.ema(tp.copy(model), jax.tree.map(lambda leaf: leaf + 1, model), decay=0.5)
    np.testing.assert_allclose(average["simplex"].raw, model["simplex"].raw + 0.5, rtol=1e-6)
    assert all_hold(average)
    assert tp.layout([model["simplex"]] * 2).ties == {"0.raw": ("1.raw",)}


def test_training_goes_down_and_stays_on_the_set(model: dict[str, Any], standard_promotion: None):
    tx = optim.trainable(optax.adamw(0.05))
    distance = lambda model: sum(jnp.sum((value - 0.1 * SPREAD) ** 2) for value in matrices.materialise(model).values())

    def step(carry: Any, _: None) -> Any:
        model, state = carry
        value, grads = tp.value_and_grad(distance)(model)
        return optim.step(tx, grads, state, model), value

    run = jax.jit(lambda model: jax.lax.scan(step, (model, tx.init(model)), None, 50))
    (after, _), values = run(model)
    assert all_hold(after)
    assert values[-1] < 0.8 * values[0]


def count(f: Callable[..., Any], model: Any, primitive: str) -> int:
    """How often it stands in a program, with those of the programs in it."""
    return [equation.primitive.name for equation in equations(jax.make_jaxpr(f)(model))].count(primitive)


def test_materialised_it_is_the_same_model(model: dict[str, Any]):
    nodes = {name: model[name] for name in ("positive", "symmetric")}
    other = [normal(4, 2), None, jnp.tanh, "name"]
    values = {name: node.to_dense() for name, node in nodes.items()}
    assert_same(
        matrices.materialise({"once": nodes, "tied": nodes, "equal": tp.copy(nodes), "other": other}),
        {"once": values, "tied": values, "equal": tp.copy(values), "other": other},
    )


def test_a_tie_is_computed_once_and_not_once_per_turn_of_a_loop():
    scale = matrices.Positive(put(1, 2, 3))
    model = {"in": scale, "out": [scale, normal(5, 3)]}

    def loss(model: Any) -> jax.Array:
        model = matrices.materialise(model)
        turn = lambda x, _: (jnp.tanh(x * model["in"]), None)
        return jnp.sum(jax.lax.scan(turn, model["out"][1], None, 5)[0] + model["out"][0])

    assert count(tp.grad(loss, tp.layout(model)), model, "log1p") == 1


def test_parts_of_matrices_are_materialised_and_matrices_stay():
    weight = svd(0, 3, 3)
    held = eqx.tree_at(lambda svd: svd.d, weight, matrices.Positive(weight.d))
    got = matrices.materialise({"weight": held})["weight"]
    assert held.shape == got.shape == (3, 3)
    products = lambda weight, got: (weight @ SPREAD, got @ SPREAD, got.inv() @ (weight @ SPREAD))
    want, *found = jax.jit(products)(weight, got)
    assert_close(found, [want, SPREAD], 1e-4)
    with pytest.raises((TypeError, AttributeError), match=r"take matrices\.materialise\(model\) first"):
        held @ SPREAD


def test_within_one_another():
    unit = matrices.UnitNorm(put(0.6, 0.8))
    nested = with_raw(matrices.Positive(put(1, 1)), unit)
    model = [nested, paramax.NonTrainable({"unit": unit}), unit]
    of_both = jax.jit(lambda model, unit: (matrices.materialise(model), unit.to_dense()))
    got, dense_unit = of_both(model, unit)
    assert_same(got, [jax.jit(jax.nn.softplus)(dense_unit), {"unit": dense_unit}, dense_unit], identity=False)
    params, rest = tp.partition([nested, unit])
    assert count(lambda params: matrices.materialise(tp.combine(params, rest)), params, "reduce_max") == 1


def test_nodes_of_paramax_are_unwrapped_as_there():
    model = {
        "nested": paramax.Parameterize(jnp.multiply, paramax.Parameterize(jnp.exp, normal(7, 2)), put(1, 1)),
        "normed": paramax.WeightNormalization(normal(8, 2, 3)),
        "frozen": paramax.NonTrainable([normal(9, 2), paramax.Parameterize(jnp.tanh, normal(10, 2))]),
        "mapped": eqx.filter_vmap(lambda raw: paramax.Parameterize(jnp.exp, raw))(normal(6, 3, 2)),
    }
    assert_same(*tp.jit(lambda model: (matrices.materialise(model), paramax.unwrap(model)))(model))
    total = lambda unwrap: lambda model: sum(map(jnp.sum, jax.tree.leaves(unwrap(model))))
    of_each = [tp.grad(total(unwrap)) for unwrap in (matrices.materialise, paramax.unwrap)]
    assert_close(*tp.jit(lambda model: [of(model) for of in of_each])(model))


def test_what_paramax_holds_as_frozen_stays(standard_promotion: None):
    model = {"frozen": paramax.NonTrainable(put(1, 1)), "trained": put(1, 1)}
    tx = optim.trainable(optax.adamw(0.1, weight_decay=0.1))  # its weight decay moves what has no gradient, too
    loss = lambda model: jnp.sum(matrices.materialise(model)["frozen"] * model["trained"])
    update = tp.jit(lambda model: tx.update(tp.grad(loss)(model), tx.init(model), model)[0])
    moved = optim.apply_updates(model, update(model))
    assert moved["frozen"].tree is model["frozen"].tree
    assert np.all(np.asarray(moved["trained"]) != 1)


ONES = np.ones((2, 3), np.float32)
EYE = np.eye(2, dtype=np.float32)
REFUSED = [
    (lambda: matrices.Positive(put(1, -2)), r"Positive takes finite numbers .* got -2 at index \[1\].*jnp.abs\(w\)"),
    (lambda: matrices.Positive(put(0)[0]), r"at least 1.18e-38, got 0. To"),
    (lambda: matrices.Positive(put(np.inf)), "finite numbers.*got inf"),
    (lambda: matrices.Positive(put(np.nan)), "got nan"),
    (lambda: matrices.Bounded(ONES, 0, 1), r"between 0 and 1, got 1 at index \[0, 0\].*jnp.clip"),
    (lambda: matrices.Bounded(2 * ONES, 0, 1), "got 2"),
    (lambda: matrices.Bounded(ONES, 1, 0), "low=1, high=0"),
    (lambda: matrices.Bounded(ONES, 0, np.inf), r"low \+ Positive\(w - low\)"),
    (lambda: matrices.UnitNorm(ONES), r"norm 1 along axis -1, got 1.73\d+ at index \[0\].*normalise\(w, axis=-1\)"),
    (lambda: matrices.UnitNorm(ONES, axis=2), r"shape \(2, 3\) has no axis 2"),
    (lambda: matrices.UnitNorm.normalise(put(1)[0], axis=0), "has no axis 0"),
    (lambda: matrices.UnitNorm.normalise(np.inf * ONES), "got nan"),
    (lambda: matrices.Simplex(ONES, axis=0), r"sums of 1 along axis 0, got 2 at index \[0\].*jnp.sum\(w, axis=0, keep"),
    (lambda: matrices.Simplex(put(0, 1)), r"positive numbers, got 0 at index \[0\].*jax.nn.softmax"),
    (lambda: matrices.LowerTriangular(ONES[:, :2]), r"zeros above the diagonal, got 1 at .*\[0, 1\].*jnp.tril\(w\)"),
    (lambda: matrices.LowerTriangular(-EYE, positive_diagonal=True), r"on the diagonal, got -1 at .*\[0\].*cholesky"),
    (lambda: matrices.Symmetric(ONES), r"square in its last two axes, got \(2, 3\)"),
    (lambda: matrices.Symmetric(np.tril(ONES[:, :2])), r"w - w.T of zeros, got -1 at .*\[0, 1\].*\(w \+ w.T\) / 2"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_values_outside_are_refused(make: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=CONSTRAINTS.keys())
@pytest.mark.usefixtures("without_type_checks")
def test_other_things_are_refused(constraint: Constraint):
    value = np.asarray(constraint.value)
    for wrong, message in (
        (value.tolist(), "expected an array, got list"),
        (value.astype(int), "a parameter is floating or complex, got int"),
        (value.astype(np.complex64), "expected real numbers, got complex64"),
    ):
        with pytest.raises(TypeError, match=message):
            constraint.of(wrong)
