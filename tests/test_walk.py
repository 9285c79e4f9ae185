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


def ones(tree):
    return jax.tree.map(np.ones_like, tree)


TURNED = {"decoder": ramp(3, 2), "encoder": ramp(2, 3)}
TURNED_LAYOUT = tp.layout(TURNED, ties={"decoder": ("encoder", jnp.transpose)})


# -- maptrainable ------------------------------------------------------------------------------------------------------


def test_what_is_not_trained_stays_the_same_object():
    model = {"norm": Norm(ramp(2), ramp(2)), "n": np.arange(2), "f": jnp.tanh, "p": 0.5, "none": None}
    got = tp.maptrainable(lambda x: 2 * x, model)
    np.testing.assert_array_equal(got["norm"].scale, 2 * model["norm"].scale)
    assert got["norm"].mean is model["norm"].mean
    assert [got[k] is model[k] for k in ("n", "f", "p", "none")] == [True] * 4


def test_a_tie_is_visited_once_and_its_result_stands_everywhere():
    calls = []
    got = tp.maptrainable(lambda x: calls.append(x.shape) or x + 1, tied())
    assert calls == [(3,), (2, 3)]
    assert got["embed"] is got["head"]


@pytest.mark.parametrize(
    "nothing",
    [{"a": None}, {}, {"a": optax.MaskedNode()}, {"a": np.zeros(2, jax.dtypes.float0)}],
    ids=["None", "missing", "MaskedNode", "float0"],
)
def test_nothing_here_is_none(nothing):
    model, other = {"a": ramp(2), "b": ramp(2)}, nothing | {"b": np.ones(2, "f")}
    assert [there is None for _, _, there in tp.biwalk(model, other)] == [True, False]
    got = tp.maptrainable(SGD, model, other)
    assert got["a"] is model["a"]
    np.testing.assert_allclose(got["b"], model["b"] - 0.1, 1e-6)


def test_an_array_without_axes_stays_an_array_whatever_f_returns():
    model = {"a": np.ones((), np.float32), "b": ramp()}
    for _ in range(3):
        model = tp.maptrainable(lambda x: x * np.float32(2) if isinstance(x, np.ndarray) else np.float32(x), model)
    assert isinstance(model["a"], np.ndarray)
    assert isinstance(model["b"], jax.Array)
    assert tp.layout(model).paths == ("a", "b")


@pytest.mark.usefixtures("without_type_checks")
def test_the_function_comes_first():
    mlp = eqx.nn.MLP(2, 1, 2, 1, key=jax.random.key(0))  # which can be called
    for model in (mlp, {"w": ramp(2)}):
        with pytest.raises(TypeError, match=r"the function comes first: tp.maptrainable\(f, model\); got (MLP|dict)"):
            tp.maptrainable(model, lambda x: 2 * x)


# -- Matching ----------------------------------------------------------------------------------------------------------


class Dense(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(ramp(2, 2))
        self.bias = nnx.Param(ramp(2))


class Eqx(eqx.Module):
    kernel: jax.Array
    bias: jax.Array


GRADIENT = {"kernel": np.ones((2, 2), "f"), "bias": np.full(2, 3.0, "f")}
CONTAINERS = {
    "dict": GRADIENT,
    "module": Eqx(**GRADIENT),
    "nnx.State": jax.tree.unflatten(jax.tree.structure(nnx.state(Dense())), [GRADIENT["bias"], GRADIENT["kernel"]]),
    "OrderedDict": collections.OrderedDict(GRADIENT),
}


@pytest.mark.parametrize("gradient", CONTAINERS.values(), ids=CONTAINERS.keys())
@pytest.mark.parametrize("model", [Eqx(ramp(2, 2), ramp(2)), nnx.state(Dense())], ids=["module", "nnx.State"])
def test_trees_of_other_types_match_by_path(model, gradient):
    found = {path: (leaf.shape, float(other.ravel()[0])) for path, leaf, other in tp.biwalk(model, gradient)}
    assert found == {"kernel": ((2, 2), 1.0), "bias": ((2,), 3.0)}
    assert jax.tree.structure(tp.project(model, gradient)) == jax.tree.structure(model)


def test_sequences_match_by_position_and_entries_at_frozen_leaves_are_ignored():
    model = Pair(ramp(2), [Norm(ramp(1), ramp(1)), {"c": ramp(3)}])
    other = {"second": {0: {"scale": np.ones(1), "mean": "not even an array"}, 1: {"c": np.zeros(3)}}}
    found = {path: there is None for path, _, there in tp.biwalk(model, other)}
    assert found == {"first": True, "second.0.scale": False, "second.1.c": False}
    assert tp.project(model, other).second[0].mean is None


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_what_is_taken_out_by_path_goes_back_by_path(specimen):
    model = specimen.make()
    layout = specimen.layout(model)
    double = lambda leaf: np.asarray(leaf) * np.asarray(2, leaf.dtype)
    doubled = {path: double(leaf) for path, leaf in tp.trainables(model, layout).items()}
    want = tp.maptrainable(double, model, trainable=layout)
    assert_same(tp.maptrainable(lambda _, new: new, model, doubled, trainable=layout), want, identity=False)
    assert_same(tp.project(model, doubled, layout), tp.partition(want, layout)[0])


def test_a_dictionary_is_of_paths_only_if_its_keys_do_not_fit_as_they_are():
    model = {"a.b": ramp(1), "a": {"b": ramp(2)}}
    assert {path: other for path, _, other in tp.biwalk(model, {"a.b": "the key"})} == {'"a.b"': "the key", "a.b": None}
    structural = {"a": {"b": "node"}, "a.b": "key"}
    assert {path: other for path, _, other in tp.biwalk(model, structural)} == {"a.b": "node", '"a.b"': "key"}
    doubled = {path: 2 * leaf for path, leaf in tp.trainables(model).items()}
    assert_same(tp.maptrainable(lambda _, new: new, model, doubled), jax.tree.map(lambda leaf: 2 * leaf, model))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"kernel.x": 1.0}, r"""entry at '"kernel.x"', where the model has no leaf; nearest: 'kernel'"""),
        ({"kernel": 1.0, "bais": 1.0}, "entry at 'bais', where the model has no leaf; nearest: 'bias'"),
        ({"kernel": {"deep": 1.0}}, "entry at 'kernel.deep', where the model has no leaf; nearest: 'kernel'"),
        ({"norm.scale": 1.0, "norm": {"scale": 1.0}}, r"""entry at '"norm.scale"', where the model has no leaf"""),
        (np.ones(3), "entry at '', where the model has a node"),
    ],
)
def test_an_entry_that_the_model_has_not(tree, message):
    model = {"kernel": ramp(2, 2), "bias": ramp(2), "norm": Norm(ramp(1), ramp(1))}
    for walk in (tp.biwalk, tp.project, lambda m, t: tp.maptrainable(SGD, m, t)):
        with pytest.raises(ValueError, match=message):
            walk(model, tree)


# -- Ties in other trees -----------------------------------------------------------------------------------------------


def test_several_entries_at_a_tie_need_a_meaning(without_type_checks):
    model = tied()
    grads = ones(model)
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


def test_one_word_for_each_tree():
    shared = ramp(2)
    model = {"a": shared, "b": shared}
    grads, state = {"a": np.ones(2), "b": np.full(2, 2.0)}, {"a": np.full(2, 7.0), "b": np.full(2, 7.0)}
    first = lambda x, g, s: (float(g[0]), float(s[0]))
    collect = lambda found, new: [*found, new]
    assert tp.mapreduce(first, collect, model, grads, state, init=[], tied=["sum", "first"]) == [(3.0, 7.0)]
    assert tp.maptrainable(first, model, grads, state, tied=("first", "sum"))["a"] == (1.0, 14.0)
    for words, message in (
        (("sum",), r"tied has 1 words for 2 trees beside the model; give one for each"),
        (("sum", None), r'tied="sum" adds them.*tied="first" takes.*tied=\("sum", "first"\)'),
    ):
        with pytest.raises(ValueError, match=message):
            tp.maptrainable(first, model, grads, state, tied=words)


def test_entries_at_a_transformed_alias():
    grads = {"encoder": ramp(2, 3), "decoder": ramp(3, 2)}
    only = {"decoder": grads["decoder"]}
    want = grads["encoder"] + grads["decoder"].T
    np.testing.assert_allclose(tp.project(TURNED, grads, TURNED_LAYOUT)["encoder"], want, 1e-6)
    np.testing.assert_allclose(tp.project(TURNED, only, TURNED_LAYOUT)["encoder"], grads["decoder"].T, 1e-6)
    for tree, tied, message in (
        (only, None, r"'decoder'.*tied=\"sum\""),
        (only, "first", "value at 'decoder' only, which is computed from 'encoder'"),
        ({"decoder": np.ones((2, 2), "f")}, "sum", r"expected float32\[3,2\] at 'decoder', got float32\[2,2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            tp.biwalk(TURNED, tree, trainable=TURNED_LAYOUT, tied=tied)


# -- mapreduce, biwalk, trainables -------------------------------------------------------------------------------------


def test_mapreduce_folds_from_init_in_tree_order():
    model = {"b": ramp(2), "a": [ramp(1), ramp(3)]}
    assert tp.mapreduce(lambda x: [x.size], operator.add, model, init=["start"]) == ["start", 1, 3, 2]
    assert tp.mapreduce(lambda x, g: g is None, operator.add, model, {"a": [np.ones(1)]}, init=0) == 2
    assert tp.mapreduce(lambda x: 1, operator.add, {"n": 3}, init=7) == 7


def test_trainables_takes_every_form_of_trainable():
    model = tied()
    assert list(tp.trainables(model)) == ["bias", "embed"]
    assert list(tp.trainables(model, "bias")) == ["bias"]
    assert list(tp.trainables(model, tp.layout(model).freeze("bias"))) == ["embed"]
    assert list(tp.trainables(model, {"embed": True, "head": True, "bias": False})) == ["embed"]
    assert tp.trainables({"n": 3}) == {}


def test_walks_inside_a_trace():
    model, paths = tied(), []
    layout = tp.layout(model)

    def step(model, grads):
        paths.extend(path for path, *_ in tp.biwalk(model, model, trainable=layout, tied="first"))
        return tp.maptrainable(SGD, model, grads, trainable=layout, tied="sum")

    got = jax.jit(step)(model, ones(model))
    assert paths == ["bias", "embed"]
    np.testing.assert_allclose(got["embed"], model["embed"] - 0.2, 1e-6)
    np.testing.assert_array_equal(got["head"], got["embed"])
