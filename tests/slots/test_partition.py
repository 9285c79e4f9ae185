"""The two halves of a model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeparams as tp

from ..zoo import Norm, Pair, assert_same, ramp


def model():
    shared, table = ramp(2), jnp.arange(3)
    return {"a": shared, "b": [shared, Norm(ramp(1), ramp(4))], "f": jnp.tanh, "n": (table, table), "p": 5}


def test_the_halves():
    whole = model()
    params, rest = tp.partition(whole)
    assert params["a"] is whole["a"]
    assert params["b"][1].scale is whole["b"][1].scale
    assert [params["b"][0], params["b"][1].mean, params["f"], *params["n"], params["p"]] == [None] * 6
    assert [id(leaf) for leaf in jax.tree.leaves(rest)] == [id(whole["b"][1].mean), id(whole["n"][0])]
    assert rest.layout == tp.layout(whole)
    assert repr(rest).startswith("Rest(2 frozen arrays, 2 values, Layout(2 slots")


class Called(eqx.Module):
    w: jax.Array
    norm: Norm

    def __call__(self):
        raise AssertionError("a mask is not called")


def test_the_mask_goes_into_equinox_and_optax_of_a_callable_model_too():
    whole = Called(ramp(2), Norm(ramp(1), ramp(3)))
    mask = tp.layout(whole).mask
    trained, frozen = eqx.partition(whole, mask)
    assert list(map(id, jax.tree.leaves(trained))) == [id(whole.w), id(whole.norm.scale)]
    assert_same(eqx.combine(trained, frozen), whole)
    tx = optax.add_decayed_weights(0.5, mask=mask)
    updates, _ = tx.update(jax.tree.map(np.zeros_like, whole), tx.init(whole), whole)
    np.testing.assert_allclose(updates.w, 0.5 * whole.w, 1e-6)
    np.testing.assert_array_equal(updates.norm.mean, np.zeros(3))


def test_donation():
    whole = tp.copy(model())
    more = lambda tree: jax.tree.map(lambda x: x + 1, tree)
    step = jax.jit(lambda params, rest: (more(params), more(rest)), donate_argnums=(0, 1))
    got = tp.combine(*step(*step(*tp.partition(whole))))
    np.testing.assert_allclose(got["a"], ramp(2) + 2, 1e-6)
    assert got["a"] is got["b"][0]
    assert got["n"][0] is got["n"][1]
    assert whole["a"].is_deleted()
    assert whole["n"][0].is_deleted()  # the rest of a partition holds what the model held


PARAMS, REST = tp.partition(Pair(ramp(2), Norm(ramp(1), ramp(1))))


def test_combine_takes_another_tree_with_the_parameters():
    labels = tp.combine({"first": "label", "second": {"scale": "label"}}, REST)
    assert isinstance(labels, Pair)
    assert (labels.first, labels.second.scale) == ("label", "label")


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
