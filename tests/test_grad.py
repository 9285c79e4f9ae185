"""Gradients of the trained parameters, and what they cost."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .zoo import Norm, cost, filled, flops, ramp


def test_aux_keyword_arguments_and_trainable_at_the_call():
    def f(model, x, *, scale):
        """Of a model."""
        return jnp.sum(model["w"] * x) * scale * model["c"][0], {"x": x}

    model = {"w": ramp(2), "b": ramp(3), "c": np.ones(1, np.float32)}
    known = tp.layout(model, ["w", "b"])
    for trainable in (["w", "b"], known.mask, known, tp.layout(model).freeze("c")):
        (value, aux), grads = tp.value_and_grad(f, trainable, has_aux=True)(model, 2.0, scale=3.0)
        again, same = tp.grad(f, trainable, has_aux=True)(model, 2.0, scale=3.0)
        assert aux == same == {"x": 2.0}
        np.testing.assert_allclose(value, 6 * np.sum(model["w"]), 1e-6)
        for each in (grads, again):
            assert each["c"] is None
            assert (each["w"].tolist(), each["b"].tolist()) == ([6, 6], [0, 0, 0])
    made = tp.grad(f), tp.value_and_grad(f), tp.grad(unreached="none")(f)
    assert {(each.__name__, each.__doc__) for each in made} == {("f", "Of a model.")}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"norm": Norm(ramp(2), ramp(2))}, r"all parameters are frozen \('norm.scale', 'norm.mean'\); thaw them"),
        ({"n": np.arange(2)}, "the model has no floating or complex arrays"),
    ],
)
def test_nothing_trained_is_warned_of_where_it_is_called(model, message):
    layout, mean = tp.layout(model, jax.tree.map(lambda _: False, model)), lambda _, x: jnp.mean(x)
    fs = [tp.value_and_grad(mean, layout), tp.accumulate(mean, layout, pieces=2), tp.grad(mean, layout)]
    with pytest.warns(UserWarning, match=f"nothing is trained: {message}") as caught:
        whole, in_pieces, gradient = [f(model, np.ones(4, "f")) for f in fs]
    assert [each.filename for each in caught] == [__file__] * 3
    assert gradient == jax.tree.map(lambda _: None, model)
    assert whole == in_pieces == (1.0, gradient)


def test_the_gradient_of_a_gradient():
    net, x = {"w": ramp(3, 2), "b": ramp(3), "act": jnp.tanh}, ramp(2)
    vector, restructure = tp.ravel(net)
    square = lambda m: jnp.sum(m["act"](m["w"] @ x + m["b"])) ** 2
    norm = lambda model: tp.global_norm(tp.grad(square, restructure.layout)(model))
    of_vector = jax.grad(lambda v: square(restructure(v)))

    @jax.jit
    def both(vector):
        ours = restructure.ravel_gradient(tp.grad(norm, restructure.layout)(restructure(vector)))
        return ours, jax.grad(lambda v: jnp.sqrt(jnp.sum(of_vector(v) ** 2)))(vector)

    np.testing.assert_allclose(*both(vector), 1e-4, 1e-6)


def test_a_frozen_trunk_costs_what_partition_by_hand_costs():
    mlp, x = filled(eqx.nn.MLP, 32, 4, 32, 3, activation=jnp.tanh), np.ones((16, 32), "f")
    loss = lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2)
    layout = tp.layout(mlp, "layers.3")
    trained, frozen = eqx.partition(mlp, layout.mask)
    arrays, static = eqx.partition(frozen, eqx.is_array)
    by_hand = lambda trained, arrays, x: jax.grad(lambda t: loss(eqx.combine(t, arrays, static), x))(trained)
    params, rest = tp.partition(mlp, layout)
    ours = flops(lambda p, r, x: tp.grad(loss, r.layout)(tp.combine(p, r), x), params, rest, x)
    everything = flops(lambda p, r, x: tp.grad(loss)(tp.combine(p, r), x), *tp.partition(mlp), x)
    assert ours <= 1.02 * flops(by_hand, trained, arrays, x)
    assert everything > 2 * ours


def test_a_frozen_array_is_not_touched_by_the_backward_pass():
    models = [{"p": ramp(), "c": np.ones(n, "f")} for n in (1_000, 100_000)]
    accessed = [cost(tp.grad(lambda m: m["c"][0] * m["p"], "p"), model)["bytes accessed"] for model in models]
    assert accessed[0] == accessed[1]


def test_options_alone_make_a_decorator():
    model, x = {"w": np.ones(2, "f"), "v": np.ones(2, "f")}, np.arange(4, dtype=np.float32).reshape(2, 2)
    mean = lambda model, x: jnp.mean(x @ model["w"])
    with_aux = tp.value_and_grad(has_aux=True, trainable="w")(lambda model, x: (mean(model, x), "aux"))
    (value, aux), grads = with_aux(model, x)
    assert (float(value), aux) == (3.0, "aux")
    for each in (
        grads,
        tp.grad(unreached="none")(mean)(model, x),
        tp.accumulate(pieces=2, trainable="w")(mean)(model, x)[1],
    ):
        assert (each["w"].tolist(), each["v"]) == ([1.0, 2.0], None)
