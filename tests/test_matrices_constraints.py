"""What holds of every constrained array: it acts as an array, stays on its set, and trains as its raw parameters."""

import dataclasses
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import paramax
import pytest
from hypothesis import given, settings

import treeparams as tp
from treeparams import matrices, optim

from .matrix_zoo import normal
from .zoo import assert_close, assert_same, enable_x64


@dataclasses.dataclass
class Constraint:
    of: Callable[[Any], Any]  # a value
    value: jax.Array
    holds: Callable[[np.ndarray], Any]  # of entries in float64

    def make(self) -> Any:
        return self.of(self.value)


FAR = (1e6, 1e6 + 1)
SPREAD = normal(0, 3, 3)
is_one = lambda array: np.all(abs(array - 1) < 1e-6)
is_lower = lambda w: np.all(np.triu(w, 1) == 0)
CONSTRAINTS = {
    "positive": Constraint(matrices.Positive, jnp.exp(SPREAD), lambda w: np.all(w > 0)),
    "bounded": Constraint(
        lambda w: matrices.Bounded(w, -0.3, 0.7),
        0.2 + jnp.tanh(SPREAD) / 2.5,
        lambda w: np.all((w >= -0.3) & (w <= 0.7)),
    ),
    "unit norm": Constraint(
        lambda w: matrices.UnitNorm(w, axis=0),
        SPREAD / jnp.linalg.norm(SPREAD, axis=0, keepdims=True),
        lambda w: is_one(np.linalg.norm(w, axis=-2)),
    ),
    "simplex": Constraint(matrices.Simplex, jax.nn.softmax(SPREAD), lambda w: np.all(w >= 0) and is_one(w.sum(-1))),
    "lower triangular": Constraint(matrices.LowerTriangular, jnp.tril(SPREAD), is_lower),
    "cholesky factor": Constraint(
        lambda w: matrices.LowerTriangular(w, positive_diagonal=True),
        jnp.tril(SPREAD, -1) + jnp.diag(jnp.array([0.1, 1.0, 10.0])),
        lambda w: is_lower(w) and np.all(np.diagonal(w, axis1=-2, axis2=-1) > 0),
    ),
    "symmetric": Constraint(matrices.Symmetric, SPREAD + SPREAD.T, lambda w: np.array_equal(w, np.swapaxes(w, -1, -2))),
}
ALL = pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=CONSTRAINTS.keys())


def every() -> dict[str, Any]:
    """One of each, as a model."""
    return {name: constraint.make() for name, constraint in CONSTRAINTS.items()}


def all_hold(model: dict[str, Any]) -> bool:
    return all(CONSTRAINTS[name].holds(entries(node)) for name, node in model.items())


def entries(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def with_raw(node: Any, raw: Any) -> Any:
    return eqx.tree_at(lambda node: node.raw, node, raw)


def dense(node: Any) -> jax.Array:
    return node.to_dense()


# -- On the set


@ALL
def test_the_value_given_is_the_value_had(constraint: Constraint):
    node, value = constraint.make(), constraint.value
    np.testing.assert_allclose(node.to_dense(), value, rtol=1e-5, atol=1e-6)
    assert (node.shape, node.dtype, node.ndim, node.size) == (value.shape, value.dtype, value.ndim, value.size)
    assert constraint.holds(entries(node))


def of_all(values: dict[str, Any]) -> dict[str, Any]:
    return {name: constraint.of(values[name]) for name, constraint in CONSTRAINTS.items()}


def dense_of_all(model: dict[str, Any]) -> dict[str, Any]:
    return {name: node.to_dense() for name, node in model.items()}


def test_in_a_trace_it_is_made_and_used_as_outside():
    values, model = {name: constraint.value for name, constraint in CONSTRAINTS.items()}, every()
    assert_close(*(jax.tree.leaves(each) for each in (jax.jit(of_all)(values), model)))
    assert_close(jax.jit(dense_of_all)(model), dense_of_all(model))
    abstract = eqx.filter_eval_shape(of_all, values)
    assert {name: node.shape for name, node in abstract.items()} == {name: node.shape for name, node in model.items()}
    # And in an ensemble.
    several = {name: jnp.stack([value, model[name].to_dense()]) for name, value in values.items()}
    ensemble = eqx.filter_jit(eqx.filter_vmap(of_all))(several)
    assert {name: node.shape for name, node in ensemble.items()} == dict.fromkeys(several, (2, 3, 3))
    products = lambda model, x: {name: node @ x for name, node in model.items()}
    both = lambda model, x: (products(model, x), products(matrices.materialise(model), x))
    want = {name: jnp.stack([value @ SPREAD[0]] * 2) for name, value in values.items()}
    got = eqx.filter_jit(eqx.filter_vmap(both, in_axes=(eqx.if_array(0), None)))(ensemble, SPREAD[0])
    assert_close((*got, dense_of_all(ensemble)), (want, want, several), 1e-4)


EXTREMES = st.sampled_from([0.0, 1e4, -1e4, 2.0**-13, -(2.0**-100), 2.0**100, -(2.0**127), 2.0**127, 2.0**-126])
NUMBERS = st.one_of(EXTREMES, st.floats(-100, 100, width=32, allow_subnormal=False))


def pulled_back(node: Any, cotangent: jax.Array) -> Any:
    value, pull = jax.vjp(dense, node)
    return value, pull(cotangent)[0].raw


@ALL
def test_any_raw_value_is_a_point_with_a_finite_gradient(constraint: Constraint):
    node = constraint.make()
    compiled = jax.jit(pulled_back)
    count = 0

    @settings(max_examples=50, deadline=None)
    @given(hnp.arrays(np.float32, node.raw.shape, elements=NUMBERS))
    def check(raw: np.ndarray) -> None:
        nonlocal count
        value, gradient = compiled(with_raw(node, jnp.asarray(raw)), constraint.value / 1e6)
        assert value.dtype == node.dtype
        assert np.all(np.isfinite(value))
        assert constraint.holds(entries(value))
        assert np.all(np.isfinite(gradient))
        count += 1

    check()
    assert count >= 50


def test_zeros_are_points_and_can_be_left():
    zeros = jax.tree.map(jnp.zeros_like, every())
    assert all_hold(zeros)
    gradients = jax.jit(jax.grad(lambda model: sum(jnp.sum(node * SPREAD) for node in model.values())))(zeros)
    assert {name for name, node in gradients.items() if np.any(np.asarray(node.raw) == 0)} == {"unit norm"}


@ALL
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_that_of_float32_rounded(constraint: Constraint, dtype: Any):
    node = constraint.make()
    half = with_raw(node, node.raw.astype(dtype))
    wide = with_raw(node, half.raw.astype(jnp.float32))
    assert_same(half.to_dense(), wide.to_dense().astype(dtype))
    again = constraint.of(half.to_dense())
    assert again.dtype == dtype
    np.testing.assert_allclose(entries(again), entries(half), rtol=0.03, atol=0.01)


def test_in_float64():
    with enable_x64(True):
        model = jax.tree.map(lambda raw: np.asarray(raw, np.float64), every())
        values, again = jax.jit(lambda model: (dense_of_all(model), dense_of_all(of_all(dense_of_all(model)))))(model)
        assert {value.dtype for value in values.values()} == {np.dtype(np.float64)}
        assert_close(again, values, 1e-13)


@settings(deadline=None)
@given(hnp.arrays(np.float32, (8,), elements=st.floats(-69, 69, width=32)))
def test_positive_keeps_its_relative_precision(logarithms: np.ndarray):
    w = np.exp(logarithms.astype(np.float64)).astype(np.float32)
    again = entries(ROUND_TRIP(w))
    roundings = abs(again - w) / w / np.finfo(np.float32).eps
    assert np.all(roundings <= 3 * (1 + abs(np.log(np.minimum(w, 1)))))


ROUND_TRIP = jax.jit(lambda w: matrices.Positive(w).to_dense())


@settings(deadline=None, max_examples=30)
@given(st.floats(-10, 10), st.floats(0.2, 10), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_bounded_keeps_within_its_bounds_as_python_has_them(low: float, width: float, dtype: Any):
    high = low + width
    node = matrices.Bounded(jnp.asarray(low + width / 2, dtype), low, high)
    ends = with_raw(node, jnp.array([-100, -17, -10, -1, 0, 1, 10, 17, 100], dtype))
    assert all(low <= each <= high for each in entries(ends.to_dense()))


def test_bounds_far_from_zero():
    node = matrices.Bounded(jnp.array(1e6 + 0.5), *FAR)
    raws = jnp.array([-10.0, -1.0, 0.0, 1.0, 10.0])
    value, slope = jax.vmap(jax.value_and_grad(lambda raw: dense(with_raw(node, raw))))(raws)
    assert value.tolist() == [1e6, 1e6 + 0.25, 1e6 + 0.5, 1e6 + 0.75, 1e6 + 1]
    np.testing.assert_allclose(slope, jax.nn.sigmoid(raws) * jax.nn.sigmoid(-raws), rtol=1e-5)


def test_a_bound_that_rounding_passes_has_the_gradient_still():
    node = matrices.Bounded(jnp.array(0.5, jnp.bfloat16), 0.1, 0.9)  # the bounds are no numbers of bfloat16
    value, slope = jax.value_and_grad(lambda raw: dense(with_raw(node, raw)))(jnp.array(8.0, jnp.bfloat16))
    assert float(value) < 0.9
    np.testing.assert_allclose(float(slope), 0.8 * jax.nn.sigmoid(8.0) * jax.nn.sigmoid(-8.0), rtol=0.01)


def test_directions_and_their_lengths():
    @jax.jit
    def normalised(w: jax.Array) -> Any:
        rows, columns = matrices.UnitNorm.normalise(w), matrices.UnitNorm.normalise(0 * w, axis=0)
        return rows.to_dense(), columns.to_dense(), jax.grad(lambda node: node[3, 0])(with_raw(rows, w)).raw

    w = jnp.array([[0.0, 0.0], [3e38, 3e38], [2e-38, -4e-38], [3.0, 4.0]])
    rows, columns, gradient = normalised(w)
    half, fifth = 0.5**0.5, 0.2**0.5
    np.testing.assert_allclose(rows, [[1, 0], [half, half], [fifth, -2 * fifth], [0.6, 0.8]], rtol=1e-5)
    assert_same(matrices.UnitNorm.normalise(w)[0], rows[0])
    assert columns.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    np.testing.assert_allclose(gradient[3], [0.128, -0.096], rtol=1e-5)  # across the vector


def test_nodes_of_one_value_are_not_tied():
    assert tp.layout([constraint.make() for constraint in CONSTRAINTS.values() for _ in range(2)]).ties == {}
    assert tp.layout([(constraint.make(), constraint.value) for constraint in CONSTRAINTS.values()]).ties == {}


def test_packed_is_row_by_row_and_each_parameter_has_an_effect():
    w = jnp.array([[1.0, 0, 0], [2, 3, 0], [4, 5, 6]])
    assert matrices.LowerTriangular(w).raw.tolist() == [1, 2, 3, 4, 5, 6]
    assert matrices.Symmetric(w + w.T).raw.tolist() == [2, 2, 6, 4, 5, 12]
    for n in (0, 1, 4):
        ones = jnp.asarray(np.tril(np.ones((2, n, n), np.float32)))
        lower, dense = jax.jit(lambda w: (matrices.LowerTriangular(w), matrices.LowerTriangular(w).to_dense()))(ones)
        assert (lower.shape, lower.raw.shape) == ((2, n, n), (2, n * (n + 1) // 2))
        assert_same(dense, ones)


# -- As an array


OPERATORS = [
    getattr(operator, name)
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "lt", "le", "gt", "ge", "eq", "ne"]
]


@pytest.mark.parametrize("name", ["positive", "lower triangular"])
def test_it_is_used_as_an_array(name: str):
    node = CONSTRAINTS[name].make()
    value, other = node.to_dense(), jnp.abs(normal(1, 3, 3)) + 1
    for each in OPERATORS:
        want = each(value, other), each(other, value)
        assert_same((each(node, other), each(other, node)), want)
        assert_same((each(node, np.asarray(other)), each(np.asarray(other), node)), want)
    assert_same(
        (node + node, node * 2, 2 - node, 1 / (2 + node)), (value + value, value * 2, 2 - value, 1 / (2 + value))
    )
    assert_same((node**2, 2.0**node), (value**2, 2.0**value))
    assert_same(
        (-node, +node, abs(node), node.T, node[0], node[1:, 0]),
        (-value, value, abs(value), value.T, value[0], value[1:, 0]),
    )
    assert_close((jnp.exp(-node), jnp.where(other > 1, node, other)), (jnp.exp(-value), value))
    assert_same((list(node), len(node), node.astype(jnp.bfloat16)), (list(value), 3, value.astype(jnp.bfloat16)))
    np.testing.assert_array_equal(np.asarray(node), value)
    assert np.asarray(node, np.float64).dtype == np.float64


def test_one_number():
    scale = matrices.Positive(jnp.array(2.0))
    assert (scale.shape, float(scale), bool(scale > 1), bool(scale)) == ((), 2.0, True, True)
    with pytest.raises(TypeError, match="unhashable"):
        hash(scale)


def test_with_a_matrix():
    matrix = matrices.LowRank(SPREAD, jnp.ones((3, 1)), jnp.ones((1, 3)))
    node = matrices.Positive(jnp.ones((3, 3)))
    assert_close((matrix @ node, node @ matrix), (matrix @ jnp.ones((3, 3)), jnp.ones((3, 3)) @ matrix))


LAYERS = {
    "linear": (lambda key: eqx.nn.Linear(3, 3, key=key), normal(2, 3)),
    "norm": (lambda key: eqx.nn.LayerNorm(3), normal(2, 3)),
    "embedding": (lambda key: eqx.nn.Embedding(3, 3, key=key), jnp.array(1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_in_a_layer(name: str):
    layer, x = LAYERS[name][0](jax.random.key(0)), LAYERS[name][1]
    where = lambda layer: [each for each in (layer.weight, getattr(layer, "bias", None)) if each is not None]
    layer = eqx.tree_at(where, layer, [matrices.Positive(jnp.abs(each) + 1) for each in where(layer)])
    plain = eqx.tree_at(where, layer, [each.to_dense() for each in where(layer)])
    assert_close([layer(x), eqx.filter_jit(lambda layer: matrices.materialise(layer)(x))(layer)], [plain(x)] * 2)


def test_convolutions_take_arrays_only():
    conv = eqx.nn.Conv1d(2, 3, 2, key=jax.random.key(0))
    conv = eqx.tree_at(lambda conv: conv.weight, conv, matrices.Positive(jnp.abs(conv.weight)))
    assert eqx.filter_jit(lambda conv, x: matrices.materialise(conv)(x))(conv, jnp.ones((2, 5))).shape == (3, 4)


def test_it_prints_with_its_shape_and_pickles():
    node = matrices.UnitNorm(jnp.eye(3), axis=0)
    assert repr(node) == "UnitNorm(shape=(3, 3), raw=f32[3,3], axis=-2)"
    assert repr(tp.layout(node).mask) == "UnitNorm(shape=None, raw=True, axis=-2)"
    assert_same(pickle.loads(pickle.dumps(node)), node)


# -- As parameters


def loss(model: Any) -> jax.Array:
    return sum(jnp.sum((node - 0.1 * SPREAD) ** 2) for node in matrices.materialise(model).values())


def test_the_raw_parameters_are_what_is_flattened_averaged_and_tied():
    model = every()
    assert tp.layout(model).paths == tuple(f"{name}.raw" for name in sorted(model))
    assert tp.layout(model, freeze="simplex").diff(tp.layout(model))
    vector, restructure = tp.ravel(model)
    assert_same(restructure(vector), model)
    np.testing.assert_array_equal(restructure.view(vector)["bounded.raw"], model["bounded"].raw)
    average = tp.ema(tp.copy(model), jax.tree.map(lambda leaf: leaf + 1, model), decay=0.5)
    np.testing.assert_allclose(average["simplex"].raw, model["simplex"].raw + 0.5, rtol=1e-6)
    assert all_hold(average)
    assert tp.layout([model["simplex"]] * 2).ties == {"0.raw": ("1.raw",)}


def test_frozen_they_stay_bit_for_bit(standard_promotion: None):
    start = {name: node for name, node in every().items() if name in ("positive", "simplex", "unit norm")}
    layout = tp.layout(start, freeze=["simplex", '**."unit norm"'])
    tx = optim.trainable(optax.adamw(0.1, weight_decay=0.1), layout)
    updates, _ = jax.jit(lambda model: tx.update(tp.grad(loss, layout)(model), tx.init(model), model))(start)
    model = optim.apply_updates(start, updates)
    assert [name for name in model if model[name].raw is start[name].raw] == ["simplex", "unit norm"]
    assert all_hold(model)


def test_training_goes_down(standard_promotion: None):
    tx = optim.trainable(optax.adam(0.05))

    def step(carry: Any, _: None) -> Any:
        model, state = carry
        value, grads = tp.value_and_grad(loss)(model)
        return optim.step(tx, grads, state, model), value

    model = every()
    (model, _), values = jax.jit(lambda carry: jax.lax.scan(step, carry, None, 50))((model, tx.init(model)))
    assert all_hold(model)
    assert values[-1] < 0.5 * values[0]


# -- Materialise


def primitives(f: Callable[..., Any], *args: Any) -> list[str]:
    """The names of all primitives of a program, as often as they stand there."""
    return [eqn.primitive.name for eqn in equations(jax.make_jaxpr(f)(*args))]


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_materialised_it_is_the_same_model():
    nodes = every()
    model = {"once": nodes, "tied": nodes, "equal": every(), "other": [normal(4, 2), None, jnp.tanh, "name"]}
    dense = {name: node.to_dense() for name, node in nodes.items()}
    assert_same(
        matrices.materialise(model),
        {"once": dense, "tied": dense, "equal": tp.copy(dense), "other": model["other"]},
    )


def shared_scale() -> dict[str, Any]:
    scale = matrices.Positive(jnp.arange(1.0, 4.0))
    return {"in": scale, "out": [scale, normal(5, 3)]}


def test_a_tie_is_computed_once():
    model = shared_scale()
    layout = tp.layout(model)
    loss = lambda model: jnp.sum(model["in"] * model["out"][1] + model["out"][0])
    once = lambda model: loss(matrices.materialise(model))
    assert primitives(tp.grad(loss, layout), model).count("log1p") == 2
    assert primitives(tp.grad(once, layout), model).count("log1p") == 1
    assert_close(tp.grad(once, layout)(model), tp.grad(loss, layout)(model))


def test_once_per_step_and_not_once_per_turn_of_a_loop():
    model = shared_scale()
    scanned = lambda model: jax.lax.scan(lambda x, _: (jnp.tanh(x * model["in"]), None), model["out"][1], None, 5)[0]
    once = lambda model: scanned(matrices.materialise(model))

    def in_the_loop(f: Any) -> int:
        (body,) = (eqn.params["jaxpr"] for eqn in jax.make_jaxpr(f)(model).eqns if eqn.primitive.name == "scan")
        return [eqn.primitive.name for eqn in equations(body)].count("log1p")

    assert (in_the_loop(scanned), in_the_loop(once)) == (1, 0)
    gradients = [jax.jit(jax.grad(lambda model, f=f: jnp.sum(f(model))))(model) for f in (scanned, once)]
    assert_close(*gradients)


def test_parts_of_matrices_are_materialised_and_matrices_stay():
    svd = eqx.tree_at(lambda svd: svd.d, matrices.SVD.random(3, 3, key=jax.random.key(0)), jnp.array([3.0, 2.0, 1.0]))
    positive = eqx.tree_at(lambda svd: svd.d, svd, matrices.Positive(svd.d))
    got = matrices.materialise({"weight": positive})["weight"]
    assert isinstance(got, matrices.SVD)
    assert isinstance(got.d, jax.Array)
    want = svd @ SPREAD
    assert_close([got @ SPREAD, positive @ SPREAD, got.inv() @ want], [want, want, SPREAD], 1e-4)


def test_within_one_another():
    unit = matrices.UnitNorm(jnp.array([0.6, 0.8]))
    nested = with_raw(matrices.Positive(jnp.ones(2)), unit)
    got = matrices.materialise([nested, paramax.NonTrainable({"unit": unit}), unit])
    assert_same(got, [jax.nn.softplus(unit.to_dense()), {"unit": unit.to_dense()}, unit.to_dense()], identity=False)
    params, rest = tp.partition([nested, unit])
    assert primitives(lambda params: matrices.materialise(tp.combine(params, rest)), params).count("reduce_max") == 1


# -- And paramax


def of_paramax() -> dict[str, Any]:
    raw = normal(6, 3)
    return {
        "plain": paramax.Parameterize(jnp.exp, raw),
        "nested": paramax.Parameterize(jnp.multiply, paramax.Parameterize(jnp.exp, normal(7, 2)), jnp.ones(2)),
        "normed": paramax.WeightNormalization(normal(8, 2, 3)),
        "frozen": paramax.NonTrainable([normal(9, 2), paramax.Parameterize(jnp.tanh, normal(10, 2))]),
        "mapped": eqx.filter_vmap(lambda key: paramax.Parameterize(jnp.exp, jax.random.normal(key, 2)))(
            jax.random.split(jax.random.key(0), 3)
        ),
    }


def test_nodes_of_paramax_are_unwrapped_as_there():
    model = of_paramax()
    assert_same(matrices.materialise(model), paramax.unwrap(model))
    total = lambda unwrap: lambda model: sum(map(jnp.sum, jax.tree.leaves(unwrap(model))))
    gradients = [tp.jit(tp.grad(total(f)))(model) for f in (matrices.materialise, paramax.unwrap)]
    assert_close(*gradients)
    mapped = eqx.filter_vmap(matrices.materialise)(model["mapped"])
    assert_same(mapped, paramax.unwrap(model["mapped"]))


def test_what_is_shared_is_unwrapped_once_here_and_twice_there():
    scale = paramax.Parameterize(jax.nn.softplus, jnp.zeros(3))
    params, rest = tp.partition({"in": scale, "out": scale})
    count = lambda f: primitives(lambda params: f(tp.combine(params, rest)), params).count("log1p")
    assert (count(paramax.unwrap), count(matrices.materialise)) == (2, 1)


def test_what_is_frozen_moves_there_and_not_here(standard_promotion: None):
    model = {"frozen": paramax.NonTrainable(jnp.ones(3)), "trained": jnp.ones(3)}
    rule = optax.adamw(0.1, weight_decay=0.1)

    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda params: jnp.sum(paramax.unwrap(eqx.combine(params, static))["frozen"] * params["trained"])
    updates, _ = rule.update(jax.grad(loss)(params), rule.init(params), params)
    assert np.all(eqx.apply_updates(params, updates)["frozen"].tree != 1)

    tx = optim.trainable(rule)
    ours = lambda model: jnp.sum(matrices.materialise(model)["frozen"] * model["trained"])
    moved, _ = optim.step(tx, tp.grad(ours)(model), tx.init(model), model)
    assert moved["frozen"].tree is model["frozen"].tree
    assert np.all(moved["trained"] != 1)


# -- Errors

ONES = jnp.ones((2, 3))
REFUSED = {
    "negative": (
        lambda: matrices.Positive(jnp.array([1.0, -2.0])),
        r"Positive takes finite numbers .* got -2 at index \[1\].*jnp.abs\(w\)",
    ),
    "zero": (lambda: matrices.Positive(jnp.zeros(())), r"at least 1.18e-38, got 0. To"),
    "infinite": (lambda: matrices.Positive(jnp.array([jnp.inf])), "finite numbers.*got inf"),
    "no number": (lambda: matrices.Positive(jnp.array([jnp.nan])), "got nan"),
    "on a bound": (lambda: matrices.Bounded(ONES, 0, 1), r"between 0 and 1, got 1 at index \[0, 0\].*jnp.clip"),
    "outside": (lambda: matrices.Bounded(2 * ONES, 0, 1), "got 2"),
    "bounds": (lambda: matrices.Bounded(ONES, 1, 0), "low=1, high=0"),
    "half open": (lambda: matrices.Bounded(ONES, 0, np.inf), r"low \+ Positive\(w - low\)"),
    "long": (
        lambda: matrices.UnitNorm(ONES),
        r"norm 1 along axis -1, got 1.7320508 at index \[0\].*UnitNorm.normalise\(w, axis=-1\)",
    ),
    "no axis": (lambda: matrices.UnitNorm(ONES, axis=2), r"shape \(2, 3\) has no axis 2"),
    "no axis to normalise": (lambda: matrices.UnitNorm.normalise(jnp.ones(()), axis=0), "has no axis 0"),
    "infinitely long": (lambda: matrices.UnitNorm.normalise(jnp.inf * ONES), "got nan"),
    "sum": (
        lambda: matrices.Simplex(ONES, axis=0),
        r"sums of 1 along axis 0, got 2 at index \[0\].*jnp.sum\(w, axis=0, keepdims=True\)",
    ),
    "no probability": (
        lambda: matrices.Simplex(jnp.array([0.0, 1.0])),
        r"positive numbers, got 0 at index \[0\].*jax.nn.softmax",
    ),
    "above the diagonal": (
        lambda: matrices.LowerTriangular(jnp.ones((2, 2))),
        r"zeros above the diagonal, got 1 at index \[0, 1\].*jnp.tril\(w\)",
    ),
    "on the diagonal": (
        lambda: matrices.LowerTriangular(-jnp.eye(2), positive_diagonal=True),
        r"positive numbers on the diagonal, got -1 at index \[0\].*cholesky",
    ),
    "not square": (lambda: matrices.Symmetric(ONES), r"square in its last two axes, got \(2, 3\)"),
    "not symmetric": (
        lambda: matrices.Symmetric(jnp.tril(jnp.ones((2, 2)))),
        r"w - w.T of zeros, got -1 at index \[0, 1\].*\(w \+ w.T\) / 2",
    ),
    "matrix not square": (lambda: matrices.SymmetricPositive(ONES), r"square matrix, got shape \(2, 3\)"),
    "matrix not symmetric": (
        lambda: matrices.SymmetricPositive(jnp.tril(jnp.ones((2, 2)))),
        r"of up to 1; .*\(w \+ w.T\) / 2",
    ),
    "matrix not positive": (lambda: matrices.SymmetricPositive(-jnp.eye(2)), r"an eigenvalue of -1; .*jnp.eye"),
    "matrix not definite": (lambda: matrices.SymmetricPositive(jnp.zeros((2, 2))), "an eigenvalue of 0"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_values_outside_are_refused(make: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        make()


@ALL
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.tolist(), "expected an array, got list"),
        (lambda w: w.astype(int), "a parameter is floating or complex, got int32"),
        (lambda w: w.astype(complex), "expected real numbers, got complex64"),
    ],
)
def test_other_things_are_refused(constraint: Constraint, change: Any, message: str, without_type_checks: Any):
    with pytest.raises(TypeError, match=message):
        constraint.of(change(constraint.value))


# -- Symmetric positive definite

COVARIANCE = SPREAD @ SPREAD.T + jnp.eye(3)


def test_it_is_the_matrix_given_with_its_factor_and_inverse():
    matrix = matrices.SymmetricPositive(COVARIANCE)
    inverse = matrix.inv()
    assert (matrix.T, inverse.T, inverse.inv()) == (matrix, inverse, matrix)
    got = [matrix, inverse, matrix.solve(SPREAD), inverse.solve(SPREAD), matrix.logdet(), inverse.slogdet()[1]]
    got = [each.to_dense() if isinstance(each, matrices.AbstractMatrix) else each for each in got]
    dense_inverse, logdet = jnp.linalg.inv(COVARIANCE), jnp.linalg.slogdet(COVARIANCE)[1]
    assert_close(got, [COVARIANCE, dense_inverse, dense_inverse @ SPREAD, COVARIANCE @ SPREAD, logdet, -logdet], 1e-4)
    assert_close(matrix.cholesky(), jnp.linalg.cholesky(COVARIANCE))
    assert tp.layout({"a": matrix, "b": inverse}).ties == {"a.factor.raw": ("b.matrix.factor.raw",)}
    materialised = matrices.materialise(matrix)
    assert materialised.factor.shape == (3, 3)
    assert_close([materialised @ SPREAD, materialised.inv() @ SPREAD], [matrix @ SPREAD, inverse @ SPREAD])


def test_of_a_matrix_and_of_an_ensemble():
    low_rank = matrices.LowRank(COVARIANCE, jnp.zeros((3, 1)), jnp.zeros((1, 3)))
    assert_close(matrices.SymmetricPositive(low_rank).to_dense(), COVARIANCE, 1e-4)
    ensemble = eqx.filter_vmap(matrices.SymmetricPositive)(jnp.stack([COVARIANCE, jnp.eye(3)]))
    got = eqx.filter_vmap(lambda matrix, x: matrix.solve(x))(ensemble, jnp.ones((2, 3)))
    assert_close(got, jnp.stack([jnp.linalg.solve(COVARIANCE, jnp.ones(3)), jnp.ones(3)]), 1e-4)
    for use in (
        lambda: ensemble @ jnp.ones(3),
        ensemble.to_dense,
        ensemble.logdet,
        lambda: ensemble.inv() @ jnp.ones(3),
    ):
        with pytest.raises(ValueError, match=r"SymmetricPositive.factor has shape \(2, 3, 3\).*filter_vmap"):
            use()


def test_no_product_or_solution_takes_a_factorisation():
    matrix = matrices.SymmetricPositive(COVARIANCE)
    found = primitives(lambda matrix, x: (matrix @ x, matrix.solve(x), matrix.logdet()), matrix, jnp.ones(3))
    assert "cholesky" not in found
    assert found.count("triangular_solve") == 2


def test_the_covariance_of_data_by_maximum_likelihood(standard_promotion: None):
    data = normal(11, 200, 3) @ jnp.linalg.cholesky(COVARIANCE).T
    model = {"mean": jnp.zeros(3), "covariance": matrices.SymmetricPositive(jnp.eye(3))}
    layout = tp.layout(model, freeze="mean")

    def loss(model: Any) -> jax.Array:
        model = matrices.materialise(model)
        residual = (data - model["mean"][None]).T
        return (model["covariance"].logdet() + jnp.sum(residual * model["covariance"].solve(residual)) / len(data)) / 2

    tx = optim.trainable(optax.adam(0.1), layout)

    def step(carry: Any, _: None) -> Any:
        model, state = carry
        return optim.step(tx, tp.grad(loss, layout)(model), state, model), None

    (model, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, None, 300))((model, tx.init(model)))
    assert_close(model["covariance"].to_dense(), data.T @ data / len(data), 2e-3)


def test_a_simplex_never_underflows():
    simplex = eqx.tree_at(lambda s: s.raw, matrices.Simplex(jnp.array([0.5, 0.5])), jnp.array([0.0, -200.0]))
    gradient = jax.grad(lambda s: jnp.sum(jnp.log(s.to_dense())))(simplex).raw
    assert bool(jnp.all(simplex.to_dense() > 0))
    assert bool(jnp.all(jnp.isfinite(gradient)))
    matrices.Simplex(simplex.to_dense())
