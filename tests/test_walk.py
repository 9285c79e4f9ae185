"""The walks, and how other trees are matched to the model; values replaced by path."""

import collections
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import paramax
import pytest
from flax import nnx

import treeparams as tp
from treeparams import matrices

from .typing_assertions import make
from .zoo import ZOO, Norm, Pair, assert_same, filled, inexact_leaves, ramp

SGD = lambda x, g: x if g is None else x - np.float32(0.1) * g


def tied():
    shared = ramp(2, 3)
    return {"embed": shared, "head": shared, "bias": ramp(3)}


def test_a_tie_is_visited_once_and_what_is_not_trained_stays_the_same_object():
    others = {"n": np.arange(2), "f": jnp.tanh, "p": 0.5, "none": None}
    model, calls = {**tied(), "norm": Norm(ramp(2), ramp(2)), **others}, []
    got = tp.maptrainable(lambda x: calls.append(x.shape) or x + 1, model)
    assert calls == [(3,), (2, 3), (2,)]
    assert got["embed"] is got["head"]
    np.testing.assert_array_equal(got["head"], model["head"] + 1)
    assert got["norm"].mean is model["norm"].mean
    assert all(got[name] is other for name, other in others.items())


def test_an_array_without_axes_stays_an_array_whatever_f_returns():
    model = {"a": np.ones((), np.float32), "b": ramp()}
    for _ in range(3):
        model = tp.maptrainable(lambda x: x * np.float32(2) if isinstance(x, np.ndarray) else np.float32(x), model)
    assert isinstance(model["a"], np.ndarray)
    assert isinstance(model["b"], jax.Array)
    assert tp.layout(model).paths == ("a", "b")


DOTS = {"a.b": ramp(1), "a": {"b": ramp(2)}}
GRADIENT = {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)}
DENSE = nnx.State({name: nnx.Param(leaf) for name, leaf in GRADIENT.items()})
NOTHING = [{"a": None}, {}, {"a": optax.MaskedNode()}, {"a": np.zeros(2, jax.dtypes.float0)}]
MATCHES = [
    *[({"a": ramp(2), "b": ramp(2)}, nothing | {"b": "b"}, {"a": None, "b": "b"}) for nothing in NOTHING],
    # A dictionary is of paths only if its keys do not fit as they are.
    (DOTS, {"a.b": "the key"}, {'"a.b"': "the key", "a.b": None}),
    (DOTS, {"a": {"b": "node"}, "a.b": "key"}, {"a.b": "node", '"a.b"': "key"}),
    # Sequences match by position, and entries at frozen leaves are ignored.
    (
        Pair(ramp(2), [Norm(ramp(1), ramp(1)), {"c": ramp(3)}]),
        {"second": {0: {"scale": "s", "mean": "frozen"}, 1: {"c": "c"}}},
        {"first": None, "second.0.scale": "s", "second.1.c": "c"},
    ),
    (DENSE, collections.OrderedDict(GRADIENT), GRADIENT),
    (GRADIENT, DENSE, GRADIENT),
]


@pytest.mark.parametrize(("model", "other", "expected"), MATCHES)
def test_trees_of_other_types_match_by_path(model, other, expected):
    found = {path: there for path, _, there in tp.biwalk(model, other)}
    assert found.keys() == expected.keys()
    assert all(map(operator.is_, found.values(), map(expected.get, found)))
    if not any(isinstance(there, str) for there in found.values()):
        assert jax.tree.structure(tp.project(model, other)) == jax.tree.structure(model)


def test_nothing_here_is_none_and_zeros_in_forms_and_what_is_frozen_is_in_no_gradient():
    for form in (tp.ravel, tp.stack):
        flat, restructure = form([ramp(2), ramp(1)])
        assert_same(restructure.ravel_gradient(None), jax.tree.map(np.zeros_like, flat))
    for nothing in NOTHING:
        model = {"a": 3 * GRADIENT["bias"], "b": GRADIENT["bias"]}
        got = tp.maptrainable(SGD, model, nothing | {"b": GRADIENT["bias"]})
        assert got["a"] is model["a"]
        np.testing.assert_allclose((got["a"], got["b"]), [[3, 3], [0.9, 0.9]], 1e-6)
    assert tp.project(Norm(ramp(1), ramp(1)), {"scale": np.ones(1), "mean": "not even an array"}).mean is None


def test_a_tuple_matches_a_list_of_its_paths_and_all_results_of_a_call_do_not():
    model = [ramp(2)]
    restructure = tp.ravel(model)[1]
    np.testing.assert_array_equal(restructure.ravel_gradient(tuple(model)), restructure.ravel(model))
    for results in ((ramp(), model), (model, ramp()), (model,)):
        with pytest.raises(ValueError, match=rf"got a tuple of {len(results)}: if these are all results of one call"):
            tp.project(model, results)


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_what_is_taken_out_by_path_goes_back_by_path_and_every_walk_sees_each_slot_once(specimen):
    model = specimen.make()
    layout = specimen.layout(model)
    double = lambda leaf: np.asarray(leaf) * np.asarray(2, leaf.dtype)
    slots = tp.trainables(model, layout)
    doubled = {path: double(leaf) for path, leaf in slots.items()}
    seen, want = [], tp.maptrainable(double, model, trainable=layout)
    f = lambda path, leaf, new: seen.append((path, leaf, new)) or new
    assert_same(tp.maptrainable(f, model, doubled, trainable=layout, with_path=True), want, identity=False)
    assert_same(tp.project(model, doubled, layout), tp.partition(want, layout)[0])
    folded = tp.mapreduce(lambda *its: [its], operator.add, model, doubled, init=[], trainable=layout, with_path=True)
    for found in (seen, folded, list(tp.biwalk(model, doubled, trainable=layout))):
        assert [path for path, *_ in found] == list(slots) == list(layout.paths)
        assert all(leaf is slots[path] and new is doubled[path] for path, leaf, new in found)
    total = lambda leaf: float(np.sum(np.abs(np.asarray(leaf))))
    assert tp.mapreduce(total, operator.add, model, init=1.0, trainable=layout) == sum(map(total, slots.values()), 1.0)


def test_several_entries_at_a_tie_need_a_meaning():
    model = tied()
    grads = jax.tree.map(np.ones_like, model)
    summed = tp.maptrainable(SGD, model, grads, tied="sum")
    np.testing.assert_allclose(summed["head"], model["head"] - 0.2, 1e-6)
    assert summed["head"] is summed["embed"]
    first = {path: other for path, _, other in tp.biwalk(model, grads, tied="first")}
    np.testing.assert_array_equal(first["embed"], grads["embed"])
    one = dict(grads, embed=None)  # needs none
    np.testing.assert_allclose(tp.maptrainable(SGD, model, one)["embed"], model["embed"] - 0.1, 1e-6)
    turned, only = ZOO["transposed tie"], {"decoder": ramp(3, 2)}
    encoder = tp.project(turned.make(), only, turned.layout(turned.make()))["encoder"]
    np.testing.assert_array_equal(encoder, only["decoder"].T)


# -- replace: other values of some parameters, with ties, shapes and dtypes as they are --------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_is_asked_once_and_all_else_stays(name):
    model = ZOO[name].make()
    if not inexact_leaves(model):
        with pytest.raises(ValueError, match="selects no"):
            tp.replace(model, {"**": np.negative})
        return
    seen, parameters = [], tp.layout(model, freeze="**", thaw="**")
    negative = lambda leaf: np.array(-np.asarray(leaf))
    after = tp.replace(model, {"**": lambda leaf: seen.append(leaf.shape) or negative(leaf)})
    assert len(seen) == len(parameters.slots)
    assert tp.layout(after) == tp.layout(model)
    assert_same(after, tp.maptrainable(negative, model, trainable=parameters))
    assert_same(tp.replace(model, tp.trainables(model, parameters)), model)


def test_arrays_functions_and_the_first_entry():
    mlp = filled(eqx.nn.MLP, 2, 1, 4, 1)
    given = ramp(4, 2)
    after = tp.replace(mlp, {"layers.0.weight": given, "**.bias": jnp.zeros_like, "layers": 0.5})
    assert after.layers[0].weight is given
    assert after.activation is mlp.activation
    assert after.layers[1].weight.tolist() == [[0.5] * 4]
    assert not after.layers[0].bias.any()


def test_ties_are_kept():
    shared = ramp(2)
    model = {"a": shared, "b": shared, "c": ramp(2), "d": ramp(2)}
    after = tp.replace(model, {("a", "b"): jnp.negative, ("c", "d"): shared})
    assert shared is not after["d"]
    assert tp.layout(after).ties == {"a": ("b",)}
    codec = tp.tie(make())  # its class declares a tie and a frozen field
    for end in ("encoder", ("decoder", "encoder")):
        after = tp.replace(codec, {end: 2 * ramp(3, 2), "mean": np.ones(3, "f"), "scale": lambda scale: scale + 1})
        np.testing.assert_array_equal(after.encoder, 2 * ramp(3, 2))
        np.testing.assert_array_equal(after.decoder, after.encoder.T)
        assert (after.mean.tolist(), float(after.scale)) == ([1, 1, 1], float(codec.scale) + 1)
    plain = {"embed": ramp(2), "head": ramp(2)}
    after = tp.replace(plain, {"head": np.ones(2, "f")}, layout=tp.layout(plain, ties={"head": "embed"}))
    assert [leaf.tolist() for leaf in after.values()] == [[1, 1], [1, 1]]


def test_the_name_of_a_positive_array_sets_its_value_and_others_set_what_is_in_it():
    model = {"k": matrices.Positive(jnp.array([1.0, 3.0])), "b": ramp(2)}
    for where in ("k", "*k", matrices.Positive, lambda model: model["k"]):
        for value, expected in ((2.0, [2, 2]), (jnp.array([0.5, 4.0]), [0.5, 4]), (lambda k: jnp.clip(k, 2), [2, 3])):
            np.testing.assert_allclose(tp.replace(model, {where: value})["k"].to_dense(), expected, rtol=1e-6)
    for where in ("k.raw", "k.*", "**.raw", "**", tp.leaves(lambda path, leaf: "raw" in path)):
        assert tp.replace(model, {where: 2.0})["k"].raw.tolist() == [2, 2]
    inside = jax.jit(lambda model, k: tp.replace(model, {"k": k})["k"].to_dense())(model, jnp.array([0.5, 4.0]))
    np.testing.assert_allclose(inside, [0.5, 4], rtol=1e-6)


NODES = {
    "k": matrices.Positive(np.ones(2)),
    "rotation": matrices.Orthogonal(np.eye(2)),
    "shift": paramax.Parameterize(jnp.tanh, np.zeros(2)),
    "mean": paramax.NonTrainable(np.zeros(2)),
}


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("k", -1.0, ValueError, "Positive accepts finite numbers of at least .* got -1"),
        ("rotation", 1.0, TypeError, "'rotation' names a Orthogonal, whose value is .* such as 'rotation.v"),
        ("shift", jnp.zeros_like, TypeError, "'shift' names a Parameterize, .* such as 'shift.args.0'"),
    ],
)
def test_what_cannot_be_set_by_the_name_of_a_node(name, value, error, message):
    assert tp.replace(NODES, {"mean": 2.0})["mean"].tree.tolist() == [2, 2]
    with pytest.raises(error, match=message):
        tp.replace(NODES, {name: value})
