"""The two halves of a model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp

from .zoo import Norm, Pair, assert_same, ramp


def model():
    shared, table = ramp(2), np.arange(3)
    return {"a": shared, "b": [shared, Norm(ramp(1), ramp(4))], "f": jnp.tanh, "n": (table, table), "p": 0.5}


def test_the_halves():
    whole = model()
    params, rest = tp.partition(whole)
    assert params["a"] is whole["a"]
    assert params["b"][1].scale is whole["b"][1].scale
    assert [params["b"][0], params["b"][1].mean, params["f"], *params["n"], params["p"]] == [None] * 6
    assert [id(leaf) for leaf in jax.tree.leaves(rest)] == [id(whole["b"][1].mean), id(whole["n"][0])]
    assert rest.layout == tp.layout(whole)
    assert repr(rest).startswith("Rest(2 frozen arrays, 2 values, Layout(2 slots")


def test_params_go_into_optax_unchanged():
    params, rest = tp.partition(model())
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    updates, _ = tx.update(jax.tree.map(np.ones_like, params), tx.init(params), params)
    got = tp.combine(optax.apply_updates(params, updates), rest)
    assert got["a"] is got["b"][0]
    np.testing.assert_allclose(got["a"], ramp(2) - 0.1 / 3**0.5, 1e-5)


def test_the_mask_goes_into_equinox_and_optax():
    whole = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    mask = tp.layout(whole, "layers.1").mask
    trained, frozen = eqx.partition(whole, mask)
    assert len(jax.tree.leaves(trained)) == 2
    assert_same(eqx.combine(trained, frozen), whole)
    arrays = eqx.filter(whole, eqx.is_array)
    tx = optax.masked(optax.trace(0.9), lambda _: eqx.filter(mask, jax.tree.map(eqx.is_array, whole)))
    momenta = jax.tree.leaves(tx.init(arrays))
    assert [momentum.shape for momentum in momenta] == [leaf.shape for leaf in jax.tree.leaves(trained)]


@pytest.mark.parametrize("donate", [(0,), (0, 1)])
def test_donation(donate):
    whole = tp.copy(jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, model()))
    whole["n"] = (whole["n"][0],) * 2
    params, rest = tp.partition(whole)
    more = lambda tree: jax.tree.map(lambda x: x + 1, tree)
    step = jax.jit(lambda p, r: (more(p), more(r)), donate_argnums=donate)
    params, rest = step(*step(params, rest))
    got = tp.combine(params, rest)
    np.testing.assert_allclose(got["a"], ramp(2) + 2, 1e-6)
    assert got["a"] is got["b"][0]
    assert got["n"][0] is got["n"][1]
    assert whole["a"].is_deleted()
    assert whole["n"][0].is_deleted() == (1 in donate)


def test_combine_inside_a_trace_puts_one_array_at_all_paths():
    identical = []

    def f(params, rest):
        whole = tp.combine(params, rest)
        identical.append(whole["a"] is whole["b"][0] and whole["n"][0] is whole["n"][1])
        return jnp.sum(3 * whole["a"] + 13 * whole["b"][0])

    grads = jax.jit(jax.grad(f))(*tp.partition(model()))
    assert identical == [True]
    np.testing.assert_array_equal(grads["a"], [16.0, 16.0])


def test_combine_takes_another_tree_with_the_parameters():
    _, rest = tp.partition(Pair(ramp(2), Norm(ramp(1), ramp(1))))
    labels = tp.combine({"first": "label", "second": {"scale": "label"}}, rest)
    assert isinstance(labels, Pair)
    assert (labels.first, labels.second.scale) == ("label", "label")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"first": ramp(2)}, r"each of the 2 trained parameters, found none for 'second\.scale'"),
        ({}, r"found none for 'first', 'second\.scale'"),
        ({"first": ramp(2), "third": 1.0, "second": {"scale": 1.0}}, "entry at 'third', where the model has no leaf"),
        ({"first": ramp(3), "second": {"scale": ramp(1)}}, r"expected float32\[2\] at 'first', got float32\[3\]"),
        ({"first": ramp(), "second": {"scale": ramp(1)}}, r"expected float32\[2\] at 'first', got float32\[\]"),
    ],
)
def test_combine_with_what_does_not_fit(params, message):
    _, rest = tp.partition(Pair(ramp(2), Norm(ramp(1), ramp(1))))
    with pytest.raises(ValueError, match=message):
        tp.combine(params, rest)


def test_an_ensemble_over_both_halves():
    params, rest = tp.partition({"w": np.ones(2, "f"), "norm": Norm(ramp(2), ramp(2))})
    stack = lambda tree: jax.tree.map(lambda x: np.stack([x, 2 * x]), tree)
    f = jax.jit(lambda p, r: jnp.sum(tp.combine(p, r)["norm"].mean * tp.combine(p, r)["w"]))
    want = float(f(params, rest))
    np.testing.assert_allclose(jax.vmap(f)(stack(params), stack(rest)), [want, 4 * want], 1e-6)
    np.testing.assert_allclose(jax.vmap(f, (None, 0))(params, stack(rest)), [want, 2 * want], 1e-6)
    assert tp.combine(stack(params), rest)["w"].shape == (2, 2)  # and it is put together as a whole


def test_rests_with_other_values_are_other_programs():
    traces = []
    f = jax.jit(lambda p, r: traces.append(1) or tp.combine(p, r)["x"] * tp.combine(p, r)["p"])
    for p in (2, 2.0, 2, 3):
        f(*tp.partition({"x": ramp(2), "p": p}))
    assert len(traces) == 3
    structure = lambda p: jax.tree.structure(tp.partition({"p": p})[1])
    assert structure([1, 2]) == structure([1, 2]) != structure([1, 2.0])


def test_abstract_models():
    abstract = {"w": jax.ShapeDtypeStruct((2, 3), "float32"), "n": jax.ShapeDtypeStruct((2,), "int32")}
    params, rest = tp.partition(abstract)
    assert params["n"] is None
    assert jax.eval_shape(tp.combine, params, rest) == abstract


@pytest.mark.usefixtures("without_type_checks")
def test_combine_with_its_arguments_swapped():
    params, rest = tp.partition({"w": ramp(2)})
    for swapped, got in (((rest, params), "dict; the parameters come first"), ((params, 3), "int")):
        with pytest.raises(TypeError, match=f"expected the Rest of tp.partition, got {got}"):
            tp.combine(*swapped)
