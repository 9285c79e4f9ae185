"""The walks, and how other trees are matched to the model."""

import collections
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import treeparams as tp

from .zoo import ZOO, Norm, Pair, assert_same, ramp

SGD = lambda x, g: x if g is None else x - 0.1 * g


def tied():
    shared = ramp(2, 3)
    return {"embed": shared, "head": shared, "bias": ramp(3)}


def transposed():
    return {"decoder": ramp(3, 2), "encoder": ramp(2, 3)}, {"ties": {"decoder": ("encoder", jnp.transpose)}}


# -- maptrainable ------------------------------------------------------------------------------------------------------


def test_what_is_not_trained_stays_the_same_object():
    model = {"norm": Norm(ramp(2), ramp(2)), "n": jnp.arange(2), "f": jnp.tanh, "p": 0.5, "none": None}
    got = tp.maptrainable(lambda x: 2 * x, model)
    np.testing.assert_array_equal(got["norm"].scale, 2 * model["norm"].scale)
    assert got["norm"].mean is model["norm"].mean
    assert [got[k] is model[k] for k in ("n", "f", "p", "none")] == [True] * 4


def test_a_tie_is_visited_once_and_its_result_stands_everywhere():
    calls = []
    got = tp.maptrainable(lambda x: calls.append(x.shape) or x + 1, tied())
    assert calls == [(3,), (2, 3)]
    assert got["embed"] is got["head"]


def test_a_transformed_alias_is_computed_from_the_result():
    model, options = transposed()
    got = tp.maptrainable(lambda x: 2 * x, model, trainable=tp.layout(model, **options))
    np.testing.assert_array_equal(got["decoder"], got["encoder"].T)
    np.testing.assert_array_equal(got["encoder"], 2 * model["encoder"])


def test_results_need_not_be_arrays():
    model, options = transposed()
    layout = tp.layout(model, **options)
    assert tp.maptrainable(lambda _: "adam", model, trainable=layout) == {"decoder": "adam", "encoder": "adam"}


@pytest.mark.parametrize(
    "nothing",
    [
        {"a": None, "b": jnp.ones(2)},
        {"b": jnp.ones(2)},
        {"a": optax.MaskedNode(), "b": jnp.ones(2)},
        {"a": np.zeros(2, jax.dtypes.float0), "b": jnp.ones(2)},
    ],
    ids=["None", "missing", "MaskedNode", "float0"],
)
def test_nothing_here_is_none(nothing):
    model = {"a": ramp(2), "b": ramp(2)}
    assert [other is None for _, _, other in tp.biwalk(model, nothing)] == [True, False]
    got = tp.maptrainable(SGD, model, nothing)
    assert got["a"] is model["a"]
    np.testing.assert_allclose(got["b"], model["b"] - 0.1, 1e-6)


def test_a_missing_branch_of_a_deep_tree_is_nothing():
    model = {"a": [ramp(2), {"c": ramp(1)}], "b": ramp(2)}
    assert [(path, other is None) for path, _, other in tp.biwalk(model, {"a": [None, {"c": jnp.ones(1)}]})] == [
        ("a.0", True), ("a.1.c", False), ("b", True)
    ]  # fmt: skip


# -- Matching ----------------------------------------------------------------------------------------------------------


class Dense(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(ramp(2, 2))
        self.bias = nnx.Param(ramp(2))


class Eqx(eqx.Module):
    kernel: jax.Array
    bias: jax.Array


GRADIENT = {"kernel": jnp.ones((2, 2)), "bias": jnp.full(2, 3.0)}
CONTAINERS = {
    "dict": GRADIENT,
    "module": Eqx(**GRADIENT),
    "nnx.State": jax.tree.unflatten(jax.tree.structure(nnx.state(Dense())), [GRADIENT["bias"], GRADIENT["kernel"]]),
    "OrderedDict": collections.OrderedDict(kernel=GRADIENT["kernel"], bias=GRADIENT["bias"]),
}


@pytest.mark.parametrize("gradient", CONTAINERS.values(), ids=CONTAINERS.keys())
@pytest.mark.parametrize("model", [Eqx(ramp(2, 2), ramp(2)), nnx.state(Dense())], ids=["module", "nnx.State"])
def test_trees_of_other_types_match_by_path(model, gradient):
    found = {path: (leaf.shape, float(other.ravel()[0])) for path, leaf, other in tp.biwalk(model, gradient)}
    assert found == {"kernel": ((2, 2), 1.0), "bias": ((2,), 3.0)}
    projected = tp.project(model, gradient)
    assert jax.tree.structure(projected) == jax.tree.structure(model)


def test_sequences_match_by_position():
    model = Pair(ramp(2), [ramp(1), ramp(3)])
    other = {"second": {0: jnp.ones(1), 1: jnp.zeros(3)}}
    assert [other is None for _, _, other in tp.biwalk(model, other)] == [True, False, False]


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_what_is_taken_out_by_path_goes_back_by_path(specimen):
    model = specimen.make()
    layout = specimen.layout(model)
    doubled = {path: 2 * leaf for path, leaf in tp.trainables(model, layout).items()}
    want = tp.maptrainable(lambda leaf: 2 * leaf, model, trainable=layout)
    assert_same(tp.maptrainable(lambda _, new: new, model, doubled, trainable=layout), want)
    assert_same(tp.project(model, doubled, layout), tp.partition(want, layout)[0])


def test_a_dictionary_is_of_paths_only_if_its_keys_do_not_fit_as_they_are():
    model = {"a.b": ramp(1), "a": {"b": ramp(2)}}
    assert {path: other for path, _, other in tp.biwalk(model, {"a.b": "the key"})} == {'"a.b"': "the key", "a.b": None}
    structural = {"a": {"b": "node"}, "a.b": "key"}
    assert {path: other for path, _, other in tp.biwalk(model, structural)} == {"a.b": "node", '"a.b"': "key"}
    doubled = {path: 2 * leaf for path, leaf in tp.trainables(model).items()}
    assert_same(tp.maptrainable(lambda _, new: new, model, doubled), jax.tree.map(lambda leaf: 2 * leaf, model))


def test_paths_and_structure_do_not_mix():
    with pytest.raises(ValueError, match=r"""entry at '"a.b"', where the model has no leaf"""):
        tp.project({"a": {"b": ramp(2)}}, {"a": {"b": ramp(2)}, "a.b": ramp(2)})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"kernel.x": 1.0}, r"""entry at '"kernel.x"', where the model has no leaf; nearest: 'kernel'"""),
        ({"kernel": 1.0, "bais": 1.0}, "entry at 'bais', where the model has no leaf; nearest: 'bias'"),
        ({"kernel": {"deep": 1.0}}, "entry at 'kernel.deep', where the model has no leaf; nearest: 'kernel'"),
        (jnp.ones(3), "entry at '', where the model has a node"),
    ],
)
def test_an_entry_that_the_model_has_not(tree, message):
    model = Eqx(ramp(2, 2), ramp(2))
    for walk in (tp.biwalk, tp.project, lambda m, t: tp.maptrainable(SGD, m, t)):
        with pytest.raises(ValueError, match=message):
            walk(model, tree)


def test_entries_at_frozen_leaves_are_ignored():
    model = Norm(ramp(2), ramp(2))
    assert [path for path, _, _ in tp.biwalk(model, Norm(ramp(2), ramp(7)))] == ["scale"]
    assert tp.project(model, {"scale": jnp.ones(2), "mean": "not even an array"}).mean is None


# -- Ties in other trees -----------------------------------------------------------------------------------------------


def test_several_entries_at_a_tie_need_a_meaning(without_type_checks):
    model = tied()
    grads = jax.tree.map(jnp.ones_like, model)
    with pytest.raises(ValueError, match=r"entries at \['embed', 'head'\].*tied=\"sum\".*gradients.*tied=\"first\""):
        tp.maptrainable(SGD, model, grads)
    summed = tp.maptrainable(SGD, model, grads, tied="sum")
    np.testing.assert_allclose(summed["head"], model["head"] - 0.2, 1e-6)
    assert summed["head"] is summed["embed"]
    first = {path: other for path, _, other in tp.biwalk(model, grads, tied="first")}
    np.testing.assert_array_equal(first["embed"], grads["embed"])
    one = dict(grads, embed=None)
    np.testing.assert_allclose(tp.maptrainable(SGD, model, one)["embed"], model["embed"] - 0.1, 1e-6)
    with pytest.raises(ValueError, match='tied must be "sum"'):
        tp.biwalk(model, grads, tied="mean")


def test_one_object_at_two_places_is_still_two_cotangents():
    model = tied()
    grads = jax.grad(lambda m: jnp.sum(m["embed"] + m["head"]) + 0 * jnp.sum(m["bias"]))(model)
    np.testing.assert_array_equal(tp.project(model, grads)["embed"], jnp.full((2, 3), 2.0))


def test_entries_at_a_transformed_alias():
    model, options = transposed()
    layout = tp.layout(model, **options)
    grads = {"encoder": ramp(2, 3), "decoder": ramp(3, 2)}
    want = grads["encoder"] + grads["decoder"].T
    np.testing.assert_allclose(tp.project(model, grads, layout)["encoder"], want, 1e-6)
    np.testing.assert_allclose(
        tp.project(model, {"decoder": grads["decoder"]}, layout)["encoder"], grads["decoder"].T, 1e-6
    )
    with pytest.raises(ValueError, match=r"'decoder'.*tied=\"sum\""):
        tp.biwalk(model, {"decoder": grads["decoder"]}, trainable=layout)
    with pytest.raises(ValueError, match="value at 'decoder' only, which is computed from 'encoder'"):
        tp.biwalk(model, {"decoder": grads["decoder"]}, trainable=layout, tied="first")
    with pytest.raises(ValueError, match=r"expected float32\[3,2\] at 'decoder', got float32\[2,2\]"):
        tp.biwalk(model, {"decoder": jnp.ones((2, 2))}, trainable=layout, tied="sum")


# -- mapreduce, biwalk, trainables -------------------------------------------------------------------------------------


def test_mapreduce_folds_from_init_in_tree_order():
    model = {"b": ramp(2), "a": [ramp(1), ramp(3)]}
    assert tp.mapreduce(lambda x: [x.size], operator.add, model, init=["start"]) == ["start", 1, 3, 2]
    other = {"a": [jnp.ones(1)]}
    assert tp.mapreduce(lambda x, g: g is None, operator.add, model, other, init=0) == 2
    assert tp.mapreduce(lambda x: 1, operator.add, {"n": 3}, init=7) == 7


def test_an_l2_penalty_counts_the_weight_once():
    model = tied()
    penalty = sum(jnp.sum(jnp.square(leaf)) for leaf in tp.trainables(model).values())
    want = jnp.sum(jnp.square(model["embed"])) + jnp.sum(jnp.square(model["bias"]))
    np.testing.assert_allclose(penalty, want, 1e-6)


def test_trainables_takes_every_form_of_trainable():
    model = tied()
    assert list(tp.trainables(model)) == ["bias", "embed"]
    assert list(tp.trainables(model, "bias")) == ["bias"]
    assert list(tp.trainables(model, tp.layout(model).freeze("bias"))) == ["embed"]
    assert list(tp.trainables(model, {"embed": True, "head": True, "bias": False})) == ["embed"]
    assert tp.trainables({"n": 3}) == {}


def test_walks_inside_a_trace():
    model = tied()
    layout = tp.layout(model)

    def step(model, grads):
        return tp.maptrainable(SGD, model, grads, trainable=layout, tied="sum")

    grads = jax.tree.map(jnp.ones_like, model)
    assert_same(jax.jit(step)(model, grads), step(model, grads), identity=False)
    paths = []
    jax.eval_shape(
        lambda m: [paths.append(path) for path, *_ in tp.biwalk(m, m, trainable=layout, tied="first")], model
    )
    assert paths == ["bias", "embed"]


@pytest.mark.parametrize("make", [lambda: np.float32(2) * np.ones((), np.float32), lambda: np.ones((), np.float32)])
def test_an_array_without_axes_stays_an_array_whatever_f_returns(make):
    model = {"a": np.asarray(make()), "b": jnp.ones(())}
    for _ in range(3):
        model = tp.maptrainable(lambda x: x * np.float32(2) if isinstance(x, np.ndarray) else np.float32(x), model)
    assert isinstance(model["a"], np.ndarray)
    assert isinstance(model["b"], jax.Array)
    assert tp.layout(model).paths == ("a", "b")


def test_one_word_for_each_tree():
    shared = ramp(2)
    model = {"a": shared, "b": shared}
    grads, state = {"a": jnp.ones(2), "b": 2 * jnp.ones(2)}, {"a": 7 * jnp.ones(2), "b": 7 * jnp.ones(2)}
    seen = []
    tp.maptrainable(
        lambda x, g, s: seen.append((float(g[0]), float(s[0]))) or x, model, grads, state, tied=("sum", "first")
    )
    tp.mapreduce(
        lambda x, g, s: (float(g[0]), float(s[0])),
        lambda found, new: [*found, new],
        model,
        grads,
        state,
        init=seen,
        tied=["sum", "first"],
    )
    assert seen == [(3.0, 7.0)]
    assert [float(g[0]) for _, _, g in tp.biwalk(model, grads, tied="sum")] == [3.0]
    assert [float(g[0]) for _, _, g in tp.biwalk(model, grads, tied="first")] == [1.0]
    with pytest.raises(ValueError, match=r"tied has 1 words for 2 trees beside the model; give one for each"):
        tp.maptrainable(lambda x, g, s: x, model, grads, state, tied=("sum",))
    with pytest.raises(ValueError, match=r'tied="sum" adds them.*tied="first" takes.*tied=\("sum", "first"\)'):
        tp.maptrainable(lambda x, g, s: x, model, grads, state, tied=("sum", None))


@pytest.mark.usefixtures("without_type_checks")
def test_the_function_comes_first():
    mlp = eqx.nn.MLP(2, 1, 2, 1, key=jax.random.key(0))  # which can be called
    for model in (mlp, {"w": jnp.ones(2)}):
        with pytest.raises(TypeError, match=r"the function comes first: tp.maptrainable\(f, model\); got (MLP|dict)"):
            tp.maptrainable(model, lambda x: 2 * x)
