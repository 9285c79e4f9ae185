"""Ties through a transform: what one can be, and what holds at the alias."""

import functools
import operator
import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from . import zoo
from .zoo import ZOO, assert_close, ramp as leaf


def add_one(x: Any) -> Any:
    return x + 1


def all_of(x: Any) -> Any:
    return x[:]


def scaled(x: Any, by: Any = 1) -> Any:
    return x * by


def test_gradients_are_pulled_back_and_results_stand_at_the_alias_transposed():
    model = ZOO["transposed tie"].make()
    layout = ZOO["transposed tie"].layout(model)
    raw = jax.device_get(jax.grad(zoo.loss)(model))
    total = {"decoder": None, "encoder": raw["encoder"] + raw["decoder"].T, "bias": raw["bias"]}
    assert_close([tp.grad(zoo.loss, layout)(model), tp.project(model, raw, layout)], [total, total])
    restructure = tp.ravel(model, layout)[1]
    assert_close(restructure.view(restructure.ravel_gradient(raw))["encoder"], total["encoder"])
    start = jax.device_get(model)
    walked = tp.maptrainable(lambda x, g: x - np.float32(0.1) * g, start, total, trainable=layout)
    average = tp.ema(start, walked, decay=0.75, trainable=layout)
    assert_close(average["encoder"], 0.75 * start["encoder"] + 0.25 * walked["encoder"])
    for each in (walked, average):
        np.testing.assert_array_equal(each["decoder"], each["encoder"].T)


def test_an_alias_is_a_linear_function_of_its_source():
    reshape, source = functools.partial(functools.partial(jnp.reshape), shape=(6, 1)), leaf(2, 3)
    for transform in (jnp.transpose, np.transpose, jnp.negative, jnp.ravel, reshape):
        alias = np.asarray(transform(np.asarray(source)))
        model = {"a": source, "b": np.zeros_like(alias)}
        layout = tp.layout(model, ties={"b": ("a", transform)})
        assert layout.slots == (tp.Slot("a", ("b",), (2, 3), jnp.dtype("float32"), 0, 6, "float32[2,3]", 0),)
        np.testing.assert_array_equal(tp.combine(*tp.partition(model, layout))["b"], alias)
        assert layout == pickle.loads(pickle.dumps(layout))


def test_transforms_chain():
    model = {"a": leaf(2, 3), "b": leaf(3, 2), "c": leaf(3, 2)}
    ties = {"c": ("b", jnp.negative), "b": ("a", jnp.transpose)}
    layout = tp.layout(model, ties=ties)
    np.testing.assert_array_equal(tp.combine(*tp.partition(model, layout))["c"], -model["a"].T)
    assert layout.freeze("c") == layout.freeze("b") == layout.freeze("a")
    with pytest.raises(ValueError, match=r"'c' is negative of transpose of 'a', its source.*select the source 'a'"):
        tp.layout(model, {"a": True, "b": True, "c": False}, ties=ties)


def test_partials_are_equal_by_what_they_bind_and_its_type():
    model = {"a": leaf(2, dtype=jnp.bfloat16), "b": leaf(2, dtype=jnp.bfloat16)}
    of = lambda by: tp.layout(model, ties={"b": ("a", functools.partial(scaled, by=by))})
    with jax.numpy_dtype_promotion("standard"):
        assert of(2) == of(2) != of(2.0)
        assert of(3) != of(2)
        with pytest.raises(ValueError, match=r"'b' is bfloat16\[2\] and cannot be tied to 'a', which is float32\[2\]"):
            of(np.float32(2))


def test_a_transform_that_is_the_identity_at_its_shape_is_a_tie_without_one():
    reshape = functools.partial(jnp.reshape, shape=(2, 2))
    for transform, shape in ((jnp.transpose, (4,)), (all_of, (4,)), (reshape, (2, 2))):
        model, ties = {"a": leaf(*shape), "b": leaf(*shape)}, {"b": ("a", transform)}
        layout = tp.layout(model, ties=ties)
        assert layout.ties == {"a": ("b",)}
        again = tp.combine(*tp.partition(model, layout))
        assert again["a"] is again["b"]
        assert tp.layout(again, ties=ties) == layout  # its own result is no contradiction


MADE_ANEW = "is made anew each time; use a function at module level"


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda x: x, MADE_ANEW),
        (functools.partial(lambda x: x), MADE_ANEW),
        (operator.itemgetter(0), MADE_ANEW),  # an instance has no name
        (functools.partial(jnp.matmul, np.ones((2, 2), "float32")), r"hash"),
        (jnp.square, r"must be linear, but JAX cannot transpose square"),
        (add_one, r"must be linear, but add_one of zeros is not an array of zeros"),
    ],
)
def test_what_is_no_transform(transform: Any, message: str):
    square = {"a": leaf(2, 2), "b": leaf(2, 2)}
    for use in (
        lambda: tp.layout(square, ties={"b": ("a", transform)}),
        lambda: tp.tie(square, "b", to="a", transform=transform),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_a_transform_redefined_under_its_name_is_another(monkeypatch):
    model = {"a": np.ones((2, 2), "f"), "b": np.ones((2, 2), "f")}

    def define(scale):
        namespace = {"__name__": __name__}
        exec(f"def redefined(x): return {scale} * x", namespace)
        monkeypatch.setattr(sys.modules[__name__], "redefined", namespace["redefined"], raising=False)
        return tp.layout(model, ties={"b": ("a", namespace["redefined"])})

    first, second = define(2.0), define(3.0)
    assert first != second
    assert float(tp.combine(*tp.partition(model, second))["b"][0, 0]) == 3.0


def test_ensembles_abstract_models_and_labels_at_a_transformed_alias():
    flat = {"b": ("a", functools.partial(jnp.reshape, shape=(6,)))}
    model = {"a": np.ones((2, 3), "f"), "b": np.ones(6, "f")}
    layout = tp.layout(model, ties=flat)
    assert tp.maptrainable(lambda x: "adam", model, trainable=layout) == {"a": "adam", "b": "adam"}
    params, rest = tp.partition(model, layout)
    stacked = tp.combine({"a": np.stack([params["a"], 2 * params["a"]]), "b": None}, rest)
    np.testing.assert_array_equal(stacked["b"], [[1] * 6, [2] * 6])
    abstract = jax.eval_shape(lambda: model)
    assert tp.combine(*tp.partition(abstract, tp.layout(abstract, ties=flat)))["b"].shape == (6,)
