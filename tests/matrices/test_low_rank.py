"""Low-rank changes: put in, trained, folded back."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import matrices, optim

from ..zoo import assert_close, assert_same, filled
from .zoo import CODEC, TIED, Int8, int8, low_rank, normal, put, svd

KEY = jax.random.key(1)


def net() -> eqx.nn.MLP:
    return filled(eqx.nn.MLP, 4, 3, 8, 1)


def squares(model: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.vmap(model)(x) ** 2)


def test_of_an_untouched_one_the_base_comes_back_bit_for_bit():
    model = net()
    first = np.array(model.layers[0].weight)
    first[0] = -0.0
    model = eqx.tree_at(lambda model: model.layers[0].weight, model, first)
    low = lambda leaf: jax.device_put(np.asarray(leaf).astype(jnp.bfloat16)) if eqx.is_array_like(leaf) else leaf
    model = jax.tree.map(low, model)
    changed = matrices.lora(model, "layers.*.weight", 2, key=KEY, dtype=jnp.float32)
    of_numpy = jax.tree.map(lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf, changed)
    for merged in (*map(matrices.merge, (changed, of_numpy)), eqx.filter_jit(matrices.merge)(changed)):
        assert_same(merged, model)
        assert np.all(np.signbit(np.asarray(merged.layers[0].weight)[0].astype(np.float32)))


def test_a_trained_one_is_folded_in_and_gradients_pass_an_untouched_one():
    layer = filled(eqx.nn.Linear, 4, 3)
    untouched = matrices.lora(layer, "weight", 2, key=KEY, scale=0.5)
    changed = eqx.tree_at(lambda layer: layer.weight.b, untouched, normal(1, 2, 4))
    merged = matrices.merge(changed)
    base, a, b = map(np.asarray, (layer.weight, changed.weight.a, changed.weight.b))
    assert_close(merged.weight, base + np.float32(0.5) * a @ b)
    assert_close(*jax.jit(lambda *layers: [layer(jnp.ones(4)) for layer in layers])(merged, changed))
    gradient = tp.jit(tp.grad(lambda model: jnp.sum(jnp.sin(matrices.merge(model).weight))))(untouched).weight
    assert_close((gradient.a, gradient.b), (np.zeros((3, 2), np.float32), np.float32(0.5) * a.T @ np.cos(base)))


def test_the_base_is_the_same_after_steps_and_the_factors_are_not():
    model, x = net(), normal(2, 5, 4)
    changed = matrices.lora(model, eqx.nn.Linear, 2, key=KEY)  # biases, of one axis, stay
    layout = tp.layout(changed, matrices.LowRank)
    assert layout.paths == tuple(f"layers.{i}.weight.{factor}" for i in range(2) for factor in "ab")
    tx = optim.trainable(optax.adamw(1e-2), layout)
    state, tuned = tx.init(changed), changed
    update = tp.jit(lambda model, state: tx.update(tp.grad(squares, layout)(model, x), state, model))
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(3):
            updates, state = update(tuned, state)
            tuned = optim.apply_updates(tuned, updates)
    for layer, old in zip(tuned.layers, model.layers, strict=True):
        assert layer.weight.base is old.weight
        assert layer.bias is old.bias
    moved = [not np.array_equal(a, b) for _, a, b in tp.biwalk(tuned, changed, trainable=layout)]
    assert moved == [True] * 4


def test_random_factors_have_unit_columns_and_products_the_dtype_of_the_base():
    base = jax.device_put(np.asarray(normal(3, 3, 3)).astype(jnp.bfloat16))
    long = matrices.LowRank.random(np.zeros((400, 3), np.float32), 8, key=KEY)
    np.testing.assert_allclose(np.linalg.norm(long.a, axis=0), 1, atol=0.2)  # columns of about unit length
    weight = matrices.LowRank.random(base, 2, key=KEY, dtype=jnp.float32)
    assert (weight.a.dtype, weight.b.dtype) == (jnp.float32, jnp.float32)
    for each in (weight, weight.T, weight + weight, weight @ weight.T):
        product, dense = jax.eval_shape(lambda each: (each @ jnp.ones(3, jnp.bfloat16), each.to_dense()), each)
        assert each.dtype == product.dtype == dense.dtype == jnp.bfloat16


# -- A base that is a matrix of one's own


@pytest.mark.usefixtures("standard_promotion")
def test_over_a_matrix_of_int8_numbers():
    weight, x = int8(0, 3, 4), normal(0, 5, 4)
    layer = eqx.tree_at(lambda layer: layer.weight, filled(eqx.nn.Linear, 4, 3), weight)
    changed = matrices.lora(layer, Int8, 2, key=KEY)
    dense = jax.device_put(np.float32(weight.rows) * np.asarray(weight.scale)[:, None])
    of_dense = eqx.tree_at(lambda layer: layer.weight.base, changed, dense)
    assert tp.layout(changed, matrices.LowRank).paths == ("weight.a", "weight.b")
    with_grads = tp.value_and_grad(squares, matrices.LowRank)
    both = eqx.filter_jit(lambda *models: [with_grads(each, x) for each in models])(changed, of_dense)
    (value, grads), (want, wanted) = both
    assert_close((value, tp.trainables(grads)), (want, tp.trainables(wanted)), 1e-4)
    assert np.any(np.asarray(grads.weight.b) != 0)
    tuned = optim.apply_updates(changed, grads).weight
    assert (tuned.base.rows is weight.rows, tuned.base.scale is weight.scale) == (True, True)
    merged = matrices.merge(eqx.tree_at(lambda layer: layer.weight, layer, tuned)).weight
    assert_close(merged, dense + tuned.a @ tuned.b)  # a floating array


def test_any_where_that_selects_all_of_a_matrix_and_one_over_another():
    weight = int8(0, 3, 2)
    of_w = tp.leaves(lambda path, _: path.startswith("w"))
    for where in ("**", "w", "w.**", Int8, lambda model: model["w"], ["**", "!b"], of_w):
        changed = matrices.lora({"w": weight, "b": put(1, 2)}, where, 1, key=KEY)
        assert isinstance(changed["b"], jax.Array)
        assert changed["w"].base is weight
    twice = matrices.lora(changed, "w", 2, key=KEY)
    assert twice["w"].base is changed["w"]
    assert tp.layout(twice).paths == ("b", "w.a", "w.b")
    decomposed = svd(1, 3, 2)  # not its factors, which are matrices too
    assert matrices.lora({"w": decomposed}, "**", 1, key=KEY)["w"].base is decomposed


def test_within_an_imputing_matrix_its_matrix_is_changed():
    for inner in (normal(50, 3, 3), int8(1, 3, 3)):
        imputing = matrices.PreImputing(inner, normal(51, 3))
        changed = matrices.lora({"w": imputing}, "w", 1, key=KEY)["w"]
        assert (type(changed), type(changed.matrix)) == (matrices.PreImputing, matrices.LowRank)
        assert (changed.matrix.base is inner, changed.psi is imputing.psi) == (True, True)


def test_what_stands_at_two_places_gets_one_change_and_others_get_others():
    weight = int8(2, 3, 3)
    for tied in (TIED, {"one": weight, "other": int8(3, 3, 3), "same": weight}):
        changed = matrices.lora(tied, "*", 1, key=KEY)
        assert changed["one"] is changed["same"]
        assert np.all(changed["one"].a != changed["other"].a)
    merged = matrices.merge(matrices.lora(TIED, "*", 1, key=KEY))
    assert merged["one"] is merged["same"]
    declared = matrices.lora(CODEC, ("one", "same"), 1, key=KEY)
    assert declared.one is declared.same


def test_an_ensemble():
    model = jax.tree.map(lambda leaf: np.stack([leaf] * 3) if eqx.is_array(leaf) else leaf, net())
    change = lambda model, key: matrices.lora(model, "layers.0", 1, key=key)
    changed = eqx.filter_jit(eqx.filter_vmap(change))(model, jax.random.split(KEY, 3))
    assert changed.layers[0].weight.a.shape == (3, 8, 1)
    each = eqx.filter_vmap(lambda model, x: (model(x), matrices.merge(model)))
    assert_same(*eqx.filter_jit(lambda *models: [each(model, normal(11, 3, 4)) for model in models])(changed, model))


def test_within_other_matrices_and_over_them_it_is_folded_in_too():
    m, over = low_rank(42, 3, 3), matrices.LowRank(svd(4, 3, 4), normal(5, 3, 1), normal(6, 1, 4))
    imputing, changed = matrices.PreImputing(m.T, normal(41, 3)), matrices.LowRank.random(m.T, 1, key=KEY)
    twice = matrices.LowRank(over, normal(7, 3, 1), normal(8, 1, 4))
    assert tp.layout(twice).paths == ("a", "b")
    model = {"transposed": m.T, "product": m @ m.T, "sum": m + 2 * m, "imputing": imputing, "changed": changed}
    model |= {"twice": twice}
    merged = matrices.merge(model)
    assert "LowRank" not in repr(merged)
    both = lambda matrix: (matrix @ jnp.ones(matrix.shape[1]), jnp.ones(matrix.shape[0]) @ matrix)
    products = lambda model: [both(matrix) for matrix in model.values()]
    of_dense = lambda twice: twice.base.to_dense() + twice.a @ twice.b
    run = jax.jit(
        lambda *models: ([products(each) for each in models], (models[0]["twice"], of_dense(models[1]["twice"])))
    )
    for got, want in run(merged, model):
        assert_close(got, want)
