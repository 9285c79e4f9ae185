"""Gradients of the trained parameters, and what they cost."""


import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .zoo import Norm, cost, ramp


@pytest.mark.parametrize("has_aux", [False, True])
def test_aux_and_keyword_arguments(has_aux):
    def f(model, x, *, scale):
        """Of a model."""
        value = jnp.sum(model["w"] * x) * scale
        return (value, {"x": x}) if has_aux else value

    model = {"w": ramp(2)}
    value, grads = tp.value_and_grad(f, has_aux=has_aux)(model, 2.0, scale=3.0)
    got = tp.grad(f, has_aux=has_aux)(model, 2.0, scale=3.0)
    if has_aux:
        value, aux = value
        got, again = got
        assert aux == again == {"x": 2.0}
    np.testing.assert_allclose(value, 6 * np.sum(model["w"]), 1e-6)
    for each in (grads, got):
        np.testing.assert_allclose(each["w"], [6.0, 6.0])
    assert (tp.grad(f).__name__, tp.value_and_grad(f).__doc__) == ("f", "Of a model.")


def test_trainable_at_the_call():
    mlp = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    first = tp.layout(mlp, "layers.0")
    for trainable in ("layers.0", first.mask, first, tp.layout(mlp).freeze("layers.1")):
        grads = jax.eval_shape(lambda x, of=trainable: tp.grad(lambda m, x: m(x)[0], of)(mlp, x), np.ones(2, "f"))
        assert [each.shape for each in jax.tree.leaves(grads)] == [(3, 2), (3,)]
        assert grads.layers[1].weight is None


def test_there_is_a_gradient_at_every_slot():
    grads = tp.grad(lambda m: jnp.sum(m["a"]))({"a": ramp(2), "b": ramp(3)})
    np.testing.assert_array_equal(grads["b"], [0.0, 0.0, 0.0])


def test_ties_are_summed():
    shared = ramp(2)
    loss = lambda m: 3 * jnp.sum(m[0]) + 13 * jnp.sum(m[1])
    grads = tp.grad(loss)((shared, shared))
    assert grads[1] is None
    np.testing.assert_array_equal(grads[0], [16.0, 16.0])
    np.testing.assert_array_equal(
        jax.jit(tp.grad(loss, tp.layout((shared, shared))))((shared, shared))[0], [16.0, 16.0]
    )


@pytest.mark.parametrize("has_aux", [False, True])
def test_nothing_trained_warns_and_names_what_is_frozen(has_aux):
    model = {"norm": Norm(ramp(2), ramp(2)), "n": 3}
    f = lambda m: (jnp.sum(m["norm"].scale), "aux") if has_aux else jnp.sum(m["norm"].scale)
    layout = tp.layout(model, freeze="norm.scale")
    with pytest.warns(UserWarning, match=r"nothing is trained: frozen are 'norm\.scale', 'norm\.mean'; thaw them"):
        value, grads = tp.value_and_grad(f, layout, has_aux)(model)
    assert jax.tree.leaves(grads) == []
    assert jax.tree.structure(grads) == jax.tree.structure(jax.tree.map(lambda _: None, model))
    assert value[1] == "aux" if has_aux else value > 0


@pytest.mark.parametrize("of", [tp.grad, tp.value_and_grad, lambda f: tp.accumulate(f, pieces=2)])
def test_nothing_trained_is_warned_of_where_it_is_called(of):
    with pytest.warns(UserWarning, match="the model has no floating or complex arrays") as caught:
        of(lambda model, x: jnp.mean(x))({"n": np.arange(2)}, ramp(4))
    assert [each.filename for each in caught] == [__file__]


def test_by_sample_and_of_a_gradient():
    mlp = eqx.nn.MLP(2, "scalar", 3, 1, activation=jnp.tanh, key=jax.random.key(0))
    xs = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)
    vector, restructure = tp.ravel(mlp)
    layout = restructure.layout
    loss = lambda m, x: m(x) ** 2
    of_vector = jax.grad(lambda v, x: loss(restructure(v), x))
    norm = lambda model, x: tp.global_norm(tp.grad(loss, layout)(model, x))

    @jax.jit
    def both(vector, xs):
        model = restructure(vector)
        by_sample = jax.vmap(lambda x: restructure.ravel_gradient(tp.grad(loss, layout)(model, x)))(xs)
        second = restructure.ravel_gradient(tp.grad(norm, layout)(model, xs[0]))
        want = jax.vmap(of_vector, (None, 0))(vector, xs)
        return (by_sample, second), (want, jax.grad(lambda v: jnp.linalg.norm(of_vector(v, xs[0])))(vector))

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), *both(vector, xs))


# -- What it costs -----------------------------------------------------------------------------------------------------


def test_a_frozen_trunk_costs_what_partition_by_hand_costs():
    mlp, x = eqx.nn.MLP(32, 4, 32, 12, activation=jnp.tanh, key=jax.random.key(0)), np.ones((16, 32), "f")
    loss = lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2)
    layout = tp.layout(mlp, "layers.12")
    trained, frozen = eqx.partition(mlp, layout.mask)
    arrays, static = eqx.partition(frozen, eqx.is_array)
    by_hand = lambda trained, arrays, x: jax.grad(lambda t: loss(eqx.combine(t, arrays, static), x))(trained)
    params, rest = tp.partition(mlp, layout)
    ours = cost(lambda p, r, x: tp.grad(loss, r.layout)(tp.combine(p, r), x), params, rest, x)
    everything = cost(lambda p, r, x: tp.grad(loss)(tp.combine(p, r), x), *tp.partition(mlp), x)
    assert ours["flops"] <= 1.02 * cost(by_hand, trained, arrays, x)["flops"]
    assert everything["flops"] > 2 * ours["flops"]


def test_one_factor_of_a_product():
    model = {name: np.ones((100, 100), "f") for name in "ABCX"}
    f = lambda m: jnp.sum(jnp.sin(m["A"] @ m["B"] @ m["C"] @ m["X"]))
    assert cost(tp.grad(f, "X"), model)["flops"] / 1e6 == pytest.approx(8.0, rel=0.01)
    assert cost(tp.grad(f), model)["flops"] / 1e6 == pytest.approx(18.0, rel=0.01)


def test_a_frozen_array_is_not_touched_by_the_backward_pass():
    accessed = []
    for n in (1_000, 100_000):
        model = {"p": ramp(), "c": np.ones(n, "f")}
        accessed.append(cost(tp.grad(lambda m: m["c"][0] * m["p"], "p"), model)["bytes accessed"])
    assert len(set(accessed)) == 1


def test_frozen_arrays_are_arguments_also_of_tp_jit():
    model = {"w": ramp(3), "table": ramp(1234), "f": jnp.tanh}
    loss = lambda m: jnp.sum(m["w"]) * jnp.sum(m["f"](m["table"]))
    traces = []
    step = tp.jit(lambda m: traces.append(1) or tp.grad(loss, "w")(m))
    text = step.lower(model).as_text()
    assert not [line for line in text.splitlines() if "constant" in line and "1234" in line]
    results = [step({**model, "table": scale * model["table"]})["w"] for scale in (1, 2)]
    assert len(traces) == 1
    assert not np.array_equal(*results)
