"""replace: other values of some parameters, with ties, shapes and dtypes as they are."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import paramax
import pytest

import treeparams as tp
from treeparams import matrices

from .zoo import ZOO, assert_same, filled, inexact_leaves, ramp


class Tied(eqx.Module):
    embed: Any
    head: Any = tp.field(tied_to="embed", transform=jnp.transpose)
    bias: Any = None
    scale: Any = tp.field(trainable=False, default=None)
    act: Any = jnp.tanh


def tied() -> Tied:
    return tp.tie(Tied(ramp(2, 3), ramp(3, 2), ramp(2), ramp(2)))


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_is_asked_once_and_all_else_stays(name: str):
    model = ZOO[name]
    parameters = tp.layout(model, freeze="**", thaw="**") if inexact_leaves(model) else None
    if parameters is None:
        with pytest.raises(ValueError, match="selects no"):
            tp.replace(model, {"**": jnp.negative})
        return
    seen: list[Any] = []
    after = tp.replace(model, {"**": lambda leaf: seen.append(leaf.shape) or -leaf})
    assert len(seen) == len(parameters.slots)
    assert tp.layout(after) == tp.layout(model)
    assert_same(after, tp.maptrainable(lambda leaf: -leaf, model, trainable=parameters))
    assert_same(tp.replace(model, tp.trainables(model, parameters)), model)


def test_arrays_functions_and_the_first_entry():
    mlp = filled(eqx.nn.MLP, 2, 1, 4, 1)
    given = ramp(4, 2)
    after = tp.replace(mlp, {"layers.0.weight": given, "**.bias": jnp.zeros_like, "layers": 0.5})
    assert after.layers[0].weight is given
    assert after.activation is mlp.activation
    assert after.layers[1].weight.tolist() == [[0.5] * 4]
    assert not after.layers[0].bias.any()
    inside = jax.jit(lambda params, rest: tp.partition(tp.replace(tp.combine(params, rest), {"**": jnp.zeros_like}))[0])
    assert not tp.ravel(inside(*tp.partition(mlp)))[0].any()


def test_ties_are_kept():
    shared = ramp(2)
    model = {"a": shared, "b": shared, "c": ramp(2), "d": ramp(2)}
    after = tp.replace(model, {("a", "b"): jnp.negative, ("c", "d"): shared})
    assert after["a"] is after["b"]
    assert after["c"] is not after["d"]
    assert shared is not after["d"]
    assert tp.layout(after).ties == {"a": ("b",)}
    for end in ("embed", ("head", "embed")):
        after = tp.replace(tied(), {end: 2 * ramp(2, 3), "scale": jnp.zeros(2), "bias": lambda bias: bias + 1})
        np.testing.assert_array_equal(after.embed, 2 * ramp(2, 3))
        np.testing.assert_array_equal(after.head, after.embed.T)
        assert not after.scale.any()
    plain = {"embed": ramp(2), "head": ramp(2)}
    known = tp.layout(plain, ties={"head": "embed"})
    assert_same(
        tp.replace(plain, {"head": jnp.ones(2)}, layout=known),
        {"embed": jnp.ones(2), "head": jnp.ones(2)},
        identity=False,
    )


def test_the_name_of_a_positive_array_sets_its_value_and_others_set_what_is_in_it():
    model = {"k": matrices.Positive(jnp.array([1.0, 3.0])), "b": ramp(2)}
    for where in ("k", "*k", matrices.Positive, lambda model: model["k"]):
        for value, expected in ((2.0, [2, 2]), (jnp.array([0.5, 4.0]), [0.5, 4]), (lambda k: jnp.clip(k, 2), [2, 3])):
            np.testing.assert_allclose(tp.replace(model, {where: value})["k"].to_dense(), expected, rtol=1e-6)
    for where in ("k.raw", "k.*", "**.raw", "**", tp.leaves(lambda path, leaf: "raw" in path)):
        assert tp.replace(model, {where: 2.0})["k"].raw.tolist() == [2, 2]
    inside = jax.jit(lambda model, k: tp.replace(model, {"k": k}))(model, jnp.array([0.5, 4.0]))
    np.testing.assert_allclose(inside["k"].to_dense(), [0.5, 4], rtol=1e-6)


class Simplex(matrices.AbstractConstrained):
    raw: jax.Array

    def to_dense(self) -> jax.Array:
        return jax.nn.softmax(self.raw)


NODES = {
    "k": matrices.Positive(np.ones(2)),
    "simplex": Simplex(np.zeros(2)),
    "rotation": matrices.Orthogonal(np.eye(2)),
    "shift": paramax.Parameterize(jnp.tanh, np.zeros(2)),
    "mean": paramax.NonTrainable(np.zeros(2)),
}


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("k", -1.0, ValueError, "Positive accepts finite numbers of at least .* got -1"),
        ("k", np.ones(3, np.float32), ValueError, r"expected float32\[2\] at 'k.raw', got float32\[3\]"),
        ("simplex", 0.5, TypeError, "'simplex' names a Simplex, whose value is .* such as 'simplex.raw', or put anoth"),
        ("rotation", 1.0, TypeError, "'rotation' names a Orthogonal, whose value is .* such as 'rotation.v"),
        ("shift", jnp.zeros_like, TypeError, "'shift' names a Parameterize, .* such as 'shift.args.0'"),
    ],
)
def test_what_cannot_be_set_by_the_name_of_a_node(name: str, value: Any, error: type[Exception], message: str):
    assert tp.replace(NODES, {"mean": 2.0})["mean"].tree.tolist() == [2, 2]
    with pytest.raises(error, match=message):
        tp.replace(NODES, {name: value})


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"embed": jnp.ones((3, 2))}, ValueError, r"expected float32\[2,3\] at 'embed', got float32\[3,2\]"),
        ({"head": jnp.ones((3, 2))}, ValueError, r"'head' names 'head', which is transpose of 'embed'; write 'embed'"),
        ({"bias": jnp.ones(2, jnp.int32)}, ValueError, r"got int32\[2\]; write value.astype\('float32'\)"),
        ({"bias": lambda b: b[:1]}, ValueError, r"the function given for 'bias' returned float32\[1\]"),
        ({"act": jnp.ones(2)}, ValueError, r"'act' selects no parameter"),
        ({"**": jnp.zeros_like, "bias": jnp.ones(2)}, ValueError, r"'bias' comes too late: '\*\*' before it"),
    ],
)
def test_what_does_not_fit(values: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        tp.replace(tied(), values)
