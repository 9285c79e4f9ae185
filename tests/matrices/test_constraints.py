"""What holds of every constrained array: it stays on its set, trains as its raw parameters, and is no array itself."""

import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import paramax
import pytest

import treeparams as tp
from treeparams import matrices

from ..zoo import assert_close, assert_same, enable_x64
from .zoo import equations, normal, page, put, svd

PAGE = page("matrices.md", "class Bounded")
S = np.asarray(normal(0, 3, 3))
is_one = lambda array: np.all(abs(array - 1) < 1e-6)
# One of the library's, and those that the documentation shows how to write, made as it says: how it is made of a value,
# a value, and what holds of entries in float64.
CONSTRAINTS: dict[str, tuple[Callable[[Any], Any], Any, Callable[[np.ndarray], Any]]] = {
    "positive": (matrices.Positive, np.exp(S), lambda w: np.all(w > 0)),
    "bounded": (lambda w: PAGE["Bounded"](jnp.arctanh(w)), np.tanh(S), lambda w: np.all((w >= -1) & (w <= 1))),
    "unit norm": (PAGE["UnitNorm"], S / np.linalg.norm(S, axis=1, keepdims=True),
                  lambda w: is_one(np.linalg.norm(w, axis=-1))),
    "simplex": (lambda w: PAGE["Simplex"](jnp.log(w)), np.exp(S) / np.exp(S).sum(1, keepdims=True),
                lambda w: np.all(w >= 0) and is_one(w.sum(-1))),
    "lower triangular": (PAGE["LowerTriangular"], np.tril(S), lambda w: np.array_equal(w, np.tril(w))),
    "symmetric": (PAGE["Symmetric"], S + S.T, lambda w: np.array_equal(w, w.T)),
}  # fmt: skip
VALUES = {name: put(*value) for name, (_, value, _) in CONSTRAINTS.items()}
made = jax.jit(lambda values: {name: CONSTRAINTS[name][0](value) for name, value in values.items()})


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    return made(VALUES)


dense = jax.jit(matrices.materialise)


def all_hold(model: dict[str, Any]) -> bool:
    return all(CONSTRAINTS[name][2](entries(value)) for name, value in dense(model).items())


def entries(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def with_raw(node: Any, raw: Any) -> Any:
    return eqx.tree_at(lambda node: node.raw, node, raw)


def test_the_value_given_is_the_value_had_also_in_an_ensemble(model: dict[str, Any]):
    of_one = dense(model)
    assert_close(of_one, VALUES)
    assert all_hold(model)
    assert all_hold(jax.tree.map(lambda raw: 5 * np.asarray(raw) + np.float32(1), model))
    several = jax.tree.map(lambda *leaves: np.stack(leaves), model, model)
    got = eqx.filter_jit(eqx.filter_vmap(matrices.materialise))(several)
    assert_close(got, {name: np.stack([value, value]) for name, value in of_one.items()})


def test_any_raw_value_is_positive_with_a_finite_gradient():
    extremes = np.array([0, 1e4, -1e4, 2.0**-13, -(2.0**-100), 2.0**100, -(2.0**127), 2.0**127, 2.0**-126])
    raw = np.concatenate([extremes, np.linspace(-100, 100, 300)]).astype(np.float32)
    both = jax.jit(lambda node: (node.to_dense(), jax.grad(lambda node: jnp.sum(node.to_dense()))(node).raw))
    value, slope = map(np.asarray, both(with_raw(matrices.Positive(put(1)), raw)))
    assert np.all(np.isfinite(value) & (value > 0))
    assert np.all(np.isfinite(slope))


def test_half_precision_is_that_of_float32_rounded_and_float64_is_wide():
    halves = [matrices.Positive(jax.device_put(np.exp(S).astype(dtype))) for dtype in (jnp.bfloat16, jnp.float16)]
    wide = [with_raw(half, half.raw.astype(jnp.float32)) for half in halves]
    of_half, of_wide = jax.jit(lambda *each: [[node.to_dense() for node in nodes] for nodes in each])(halves, wide)
    for half, want in zip(of_half, of_wide, strict=True):
        assert_same(half, np.asarray(want).astype(half.dtype), identity=False)
        np.testing.assert_allclose(entries(half), VALUES["positive"], rtol=0.03)
    with enable_x64(True):
        value = np.exp(S.astype(np.float64))
        assert_close(jax.jit(lambda w: matrices.Positive(w).to_dense())(value), value, 1e-13)


def test_positive_keeps_its_relative_precision():
    w = np.exp(np.random.default_rng(0).uniform(-69, 69, 5000)).astype(np.float32)
    again = entries(jax.jit(lambda w: matrices.Positive(w).to_dense())(w))
    roundings = abs(again - w) / w / np.finfo(np.float32).eps
    assert np.all(roundings <= 3 * (1 + abs(np.log(np.minimum(w, 1)))))


def test_the_raw_parameters_are_what_is_pickled_averaged_and_tied(model: dict[str, Any]):
    assert_same(pickle.loads(pickle.dumps(model["positive"])), model["positive"])
    assert tp.layout(model).paths == tuple(f"{name}.raw" for name in sorted(model))
    average = tp.ema(tp.copy(model), jax.tree.map(lambda leaf: leaf + 1, model), decay=0.5)
    np.testing.assert_allclose(average["simplex"].raw, model["simplex"].raw + 0.5, rtol=1e-6)
    assert all_hold(average)
    assert tp.layout([model["simplex"], model["simplex"], S]).ties == {"0.raw": ("1.raw",)}


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

    program = jax.make_jaxpr(tp.grad(loss, tp.layout(model)))(model)
    assert [equation.primitive.name for equation in equations(program)].count("log1p") == 1


def test_parts_of_matrices_are_materialised_and_matrices_stay():
    weight = svd(0, 3, 3)
    held = eqx.tree_at(lambda svd: svd.d, weight, matrices.Positive(weight.d))
    got = matrices.materialise({"weight": held})["weight"]
    assert held.shape == got.shape == (3, 3)
    assert_close(*jax.jit(lambda *both: [each @ S for each in both])(got, weight), 1e-4)
    with pytest.raises((TypeError, AttributeError), match=r"call matrices\.materialise\(model\) first"):
        held @ S


def test_ours_and_those_of_paramax_hold_one_another():
    positive, exponential = matrices.Positive(put(1, 2)), paramax.Parameterize(jnp.exp, put(0, 1))
    model = {
        "ours in ours": with_raw(positive, positive),
        "ours in theirs": paramax.NonTrainable([positive, paramax.Parameterize(jnp.tanh, positive)]),
        "theirs in ours": with_raw(positive, exponential),
        "ours": positive,
    }
    got, one = matrices.materialise(model), positive.to_dense()
    assert got["ours in theirs"][0] is got["ours"]
    want = {
        "ours in ours": jax.nn.softplus(one),
        "ours in theirs": [one, jnp.tanh(one)],
        "theirs in ours": jax.nn.softplus(jnp.exp(put(0, 1))),
        "ours": one,
    }
    assert_close(got, want)


def test_nodes_of_paramax_are_unwrapped_as_there():
    model = {
        "nested": paramax.Parameterize(jnp.multiply, paramax.Parameterize(jnp.exp, normal(7, 2)), put(1, 1)),
        "normed": paramax.WeightNormalization(normal(8, 2, 3)),
        "frozen": paramax.NonTrainable([normal(9, 2), paramax.Parameterize(jnp.tanh, normal(10, 2))]),
        "mapped": eqx.filter_vmap(lambda raw: paramax.Parameterize(jnp.exp, raw))(normal(6, 3, 2)),
    }
    assert_same(*tp.jit(lambda model: (matrices.materialise(model), paramax.unwrap(model)))(model))
