"""Gradients of the trained parameters, and what they cost."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .zoo import Norm, cost, ramp


def test_what_is_no_parameter_is_no_trouble():
    model = {
        "w": ramp(2),
        "n": jnp.arange(2),
        "key": jax.random.key(0),
        "f": jnp.tanh,
        "p": 0.5,
        "s": "x",
        "none": None,
    }
    value, grads = tp.value_and_grad(lambda m, x: jnp.sum(m["f"](m["w"]) * m["n"].astype(float)) * m["p"] * x)(
        model, 2.0
    )
    np.testing.assert_allclose(value, jnp.tanh(model["w"][1]), 1e-6)  # n is (0, 1)
    np.testing.assert_allclose(grads["w"], [0.0, 1 - jnp.tanh(model["w"][1]) ** 2], 1e-5)
    assert [grads[k] for k in ("n", "key", "f", "p", "s", "none")] == [None] * 6


@pytest.mark.parametrize("has_aux", [False, True])
def test_aux_and_keyword_arguments(has_aux):
    def f(model, x, *, scale):
        value = jnp.sum(model["w"] * x) * scale
        return (value, {"x": x}) if has_aux else value

    model = {"w": ramp(2)}
    value, grads = tp.value_and_grad(f, has_aux=has_aux)(model, 2.0, scale=3.0)
    got = tp.grad(f, has_aux=has_aux)(model, 2.0, scale=3.0)
    value, aux = value if has_aux else (value, None)
    np.testing.assert_allclose(value, 6 * jnp.sum(model["w"]), 1e-6)
    np.testing.assert_allclose(grads["w"], [6.0, 6.0])
    assert aux == ({"x": 2.0} if has_aux else None)
    if has_aux:
        got, again = got
        assert again == aux
    np.testing.assert_array_equal(got["w"], grads["w"])


def test_the_wrapped_function_keeps_its_name():
    def loss(model):
        """Of a model."""
        return jnp.sum(model)

    assert (tp.grad(loss).__name__, tp.value_and_grad(loss).__doc__) == ("loss", "Of a model.")
    assert tp.grad(functools.partial(lambda scale, model: scale * jnp.sum(model), 2.0))(ramp(1)).item() == 2.0


@pytest.mark.parametrize(
    "trainable",
    ["layers.0", {"mask": True}, "layout"],
    ids=["where", "mask", "layout"],
)
def test_trainable_at_the_call(trainable):
    mlp = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    if trainable == "layout":
        trainable = tp.layout(mlp).freeze("layers.1")
    elif isinstance(trainable, dict):
        trainable = tp.layout(mlp, "layers.0").mask
    grads = tp.grad(lambda m, x: m(x)[0], trainable)(mlp, jnp.ones(2))
    assert [path for path, leaf in tp.trainables(mlp).items() if _at(grads, path) is not None] == [
        "layers.0.weight", "layers.0.bias"
    ]  # fmt: skip


def _at(tree, path):
    first, index, last = path.split(".")
    return getattr(getattr(tree, first)[int(index)], last)


def test_there_is_a_gradient_at_every_slot():
    grads = tp.grad(lambda m: jnp.sum(m["a"]))({"a": ramp(2), "b": ramp(3)})
    np.testing.assert_array_equal(grads["b"], [0.0, 0.0, 0.0])


def test_complex_parameters_follow_jax():
    model = {"z": jnp.array([1 + 2j, 3 - 1j], jnp.complex64), "w": ramp(2)}
    loss = lambda m: jnp.sum(jnp.abs(m["z"]) ** 2) + jnp.sum(m["w"])
    got = tp.grad(loss)(model)
    np.testing.assert_allclose(got["z"], jax.grad(loss)(model)["z"])
    np.testing.assert_allclose(got["z"], 2 * model["z"].conj())
    assert got["w"].dtype == jnp.float32


def test_ties_are_summed():
    shared = ramp(2)
    loss = lambda m: 3 * jnp.sum(m[0]) + 13 * jnp.sum(m[1])
    assert tp.grad(loss)((shared, shared))[1] is None
    np.testing.assert_array_equal(tp.grad(loss)((shared, shared))[0], [16.0, 16.0])
    layout = tp.layout((shared, shared))
    np.testing.assert_array_equal(jax.jit(tp.grad(loss, layout))((shared, shared))[0], [16.0, 16.0])


def test_a_tie_through_a_transform():
    weight = jnp.array([[1.0, 2, 3], [4, 5, 6]])
    model = {"w": weight, "t": weight.T, "v": jnp.array([7.0, 8, 9])}
    layout = tp.layout(model, freeze="v", ties={"t": ("w", jnp.transpose)})
    loss = lambda m: jnp.sum((m["w"] @ jnp.log(m["t"] @ jnp.array([1, 0.1]) + m["v"])) ** 2)
    want = [[98.6486, 107.1512, 113.7883], [154.7071, 170.7440, 183.8160]]
    np.testing.assert_allclose(tp.grad(loss, layout)(model)["w"], want, 1e-5)
    np.testing.assert_allclose(tp.project(model, jax.grad(loss)(model), layout)["w"], want, 1e-5)
    vector, restructure = tp.ravel(model, layout)
    np.testing.assert_allclose(jax.grad(lambda v: loss(restructure(v)))(vector).reshape(2, 3), want, 1e-5)
    stepped = tp.maptrainable(lambda x, g: x - 0.1 * g, model, tp.grad(loss, layout)(model), trainable=layout)
    np.testing.assert_allclose(stepped["w"], [[-8.8649, -8.7151, -8.3788], [-11.4707, -12.0744, -12.3816]], 1e-4)
    np.testing.assert_array_equal(stepped["t"], stepped["w"].T)


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
    with pytest.warns(UserWarning, match="the model has no floating or complex arrays"):
        assert tp.grad(lambda m: 1.0)({"n": 3}) == {"n": None}


def test_higher_derivatives_and_transformations():
    mlp = eqx.nn.MLP(2, "scalar", 3, 1, activation=jnp.tanh, key=jax.random.key(0))
    xs = jnp.linspace(-1, 1, 8).reshape(4, 2)
    loss = lambda m, x: m(x) ** 2
    vector, restructure = tp.ravel(mlp)
    flat = lambda v, x: loss(restructure(v), x)
    per_example = jax.vmap(lambda x: restructure.ravel_gradient(tp.grad(loss)(mlp, x)))(xs)
    np.testing.assert_allclose(per_example, jax.vmap(jax.grad(flat), (None, 0))(vector, xs), 1e-5, 1e-6)

    def norm_of_gradient(model, x):
        return tp.global_norm(tp.grad(loss, restructure.layout)(model, x))

    second = tp.grad(norm_of_gradient, restructure.layout)(mlp, xs[0])
    want = jax.grad(lambda v: jnp.linalg.norm(jax.grad(flat)(v, xs[0])))(vector)
    np.testing.assert_allclose(restructure.ravel_gradient(second), want, 1e-4, 1e-6)
    assert jax.hessian(flat)(vector, xs[0]).shape == (13, 13)
    assert jax.jacfwd(flat)(vector, xs[0]).shape == (13,)


# -- What it costs -----------------------------------------------------------------------------------------------------


def _trunk_and_head():
    return eqx.nn.MLP(32, 4, 32, 12, activation=jnp.tanh, key=jax.random.key(0)), jnp.ones((16, 32))


def test_a_frozen_trunk_costs_what_partition_by_hand_costs():
    mlp, x = _trunk_and_head()
    loss = lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2)
    mask = jax.tree.map(lambda _: False, mlp)
    mask = eqx.tree_at(lambda m: (m.layers[-1].weight, m.layers[-1].bias), mask, (True, True))
    trained, frozen = eqx.partition(mlp, mask)
    arrays, static = eqx.partition(frozen, eqx.is_array)

    def by_hand(trained, arrays, x):
        return jax.grad(lambda t: loss(eqx.combine(t, arrays, static), x))(trained)

    params, rest = tp.partition(mlp, "layers.12")
    ours = cost(lambda p, r, x: tp.grad(loss, r.layout)(tp.combine(p, r), x), params, rest, x)
    hand = cost(by_hand, trained, arrays, x)
    everything = cost(lambda p, r, x: tp.grad(loss)(tp.combine(p, r), x), *tp.partition(mlp), x)
    assert ours["flops"] <= 1.02 * hand["flops"]
    assert everything["flops"] > 2 * ours["flops"]


def test_one_factor_of_a_product():
    names = ["A", "B", "C", "X"]
    model = {name: jnp.ones((100, 100)) for name in names}
    f = lambda m: jnp.sum(jnp.sin(m["A"] @ m["B"] @ m["C"] @ m["X"]))
    layout = tp.layout(model, "X")
    assert cost(tp.grad(f, layout), model)["flops"] / 1e6 == pytest.approx(8.0, rel=0.01)
    assert cost(tp.grad(f), model)["flops"] / 1e6 == pytest.approx(18.0, rel=0.01)


def test_a_frozen_array_is_not_touched_by_the_backward_pass():
    accessed = []
    for n in (1_000, 10_000, 100_000):
        model = {"p": jnp.ones(()), "c": jnp.ones(n)}
        layout = tp.layout(model, "p")
        accessed.append(cost(tp.grad(lambda m: m["c"][0] * m["p"], layout), model)["bytes accessed"])
    assert len(set(accessed)) == 1


def test_frozen_arrays_are_arguments_also_of_tp_jit():
    model = {"w": ramp(3), "table": ramp(1234), "f": jnp.tanh}
    loss = lambda m: jnp.sum(m["w"]) * jnp.sum(m["f"](m["table"]))
    text = tp.jit(tp.grad(loss, "w")).lower(model).as_text()
    assert not [line for line in text.splitlines() if "constant" in line and "1234" in line]
    traces = []
    step = tp.jit(lambda m: traces.append(1) or tp.grad(loss, "w")(m))
    first = step(model)["w"]
    second = step({**model, "table": 2 * model["table"]})["w"]
    assert len(traces) == 1
    assert not np.array_equal(first, second)
