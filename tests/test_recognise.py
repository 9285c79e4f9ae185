"""Trees recognised again: by what they hold, never one taken for another; what is remembered, and for how long."""

import collections
import concurrent.futures
import dataclasses
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .zoo import ramp


class Holder(eqx.Module):
    weight: jax.Array
    static: Any = eqx.field(static=True)


# -- One model is not taken for another --------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [np.array(["x"]), np.array([None]), np.array(["2020"], "datetime64[D]")])
def test_an_array_of_text_is_not_the_array_of_numbers_that_comes_next(other):
    weight = ramp(2)
    assert tp.layout({"a": other, "w": weight}).paths == ("w",)
    assert tp.layout({"a": np.ones(3), "w": weight}).paths == ("a", "w")
    assert tp.layout({"a": other, "w": weight}).paths == ("w",)


def test_a_placeholder_that_is_filled_later_is_trained():
    model = {"a": np.array(None), "w": np.ones(2, np.float32)}
    step = tp.jit(lambda m: tp.maptrainable(lambda x: 2 * x, m))
    assert tp.layout(model).paths == ("w",)
    assert step(model)["a"] is model["a"]
    model["a"] = np.ones((), np.float32)
    assert tp.layout(model).paths == ("a", "w")
    assert float(step(model)["a"]) == 2


kinds = st.sampled_from([
    np.ones(2, np.float32),
    np.ones(2, np.int32),
    np.array(["x"]),
    np.array(None),
    ramp(2),
    ramp(3),
    1,
    1.0,
    True,
    "x",
])


@hypothesis.settings(deadline=None, max_examples=200, derandomize=True)
@hypothesis.given(st.lists(st.tuples(kinds, kinds), min_size=2, max_size=6))
def test_what_was_met_before_makes_no_difference(trees):
    parameter = lambda x: hasattr(x, "dtype") and x.dtype.kind == "f"
    for tree in trees:
        once = tree[0] is tree[1] and parameter(tree[0])
        want = tuple(str(i) for i, leaf in enumerate(tree) if parameter(leaf) and not (once and i))
        assert tp.layout(tree).paths == want


@dataclasses.dataclass
class Config:
    sizes: list[int]


class Plain:
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __call__(self, x: Any) -> Any:
        return x


class Slotted:
    __slots__ = ("sizes",)

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes


MUTABLE = {
    "list": (lambda: [2.0], lambda value: value.append(1)),
    "list in a tuple": (lambda: ("a", [2.0]), lambda value: value[1].append(1)),
    "dictionary of dictionaries": (lambda: {"a": {"b": 1}}, lambda value: value["a"].update(b=2)),
    "dataclass": (lambda: Config([1]), lambda value: value.sizes.append(2)),
    "deque": (lambda: collections.deque([1]), lambda value: value.append(2)),
    "plain object": (lambda: Plain([1]), lambda value: value.sizes.append(2)),
    "object with slots": (lambda: Slotted([1]), lambda value: value.sizes.append(2)),
    "bound method": (lambda: Plain([1]).__call__, lambda value: value.__self__.sizes.append(2)),
    "bytearray": (lambda: bytearray(b"a"), lambda value: value.append(1)),
    "numpy array": (lambda: np.ones(2), lambda value: value.__setitem__(0, 5.0)),
}
mutable = pytest.mark.parametrize("name", MUTABLE)


@mutable
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.filterwarnings("ignore:.*array is being set as static")
def test_a_static_value_that_changes_in_place_leaves_no_stale_trace(name):
    make, change = MUTABLE[name]
    value, traces = make(), []
    step = tp.jit(lambda model: traces.append(repr(model.static)) or model.weight + 1)
    model = Holder(ramp(2), value)
    layout = tp.layout(model)
    step(model)
    step(model)
    assert len(traces) == 1
    assert tp.layout(model) == layout
    change(value)
    step(model)
    step(model)
    assert len(traces) == 2
    assert tp.layout(model) != layout
    with pytest.raises(ValueError, match="does not fit the layout"):
        tp.partition(model, layout)


@pytest.mark.parametrize("name", ["dataclass", "deque", "plain object", "object with slots", "bytearray"])
def test_a_leaf_that_changes_in_place_leaves_no_stale_trace(name):
    make, change = MUTABLE[name]
    value, traces = make(), []
    step = tp.jit(lambda model: traces.append(1) or model["w"] + 1)
    combine = jax.jit(lambda params, rest: traces.append(1) or tp.combine(params, rest)["w"])
    model = {"value": value, "w": ramp(2)}
    for run in (step, lambda model: combine(*tp.partition(model))):
        traces.clear()
        run(model), run(model)
        assert len(traces) == 1
        change(value)
        run(model), run(model)
        assert len(traces) == 2


def test_static_values_that_hold_themselves():
    static = Plain([1])
    static.sizes.append(static)
    layout = tp.layout(Holder(ramp(2), static))
    assert tp.layout(Holder(ramp(2), static)) == layout
    static.sizes.append(2)
    assert tp.layout(Holder(ramp(2), static)) != layout


# -- Threads -----------------------------------------------------------------------------------------------------------


def test_eight_threads_meet_more_structures_than_are_remembered():
    models = [{f"x{i}": ramp(2), **{str(j): j for j in range(i % 7)}} for i in range(300)]
    paths = lambda model: tp.layout(model).paths

    def work(start: int) -> list[Any]:
        return [paths(models[(start * 37 + i) % len(models)]) for i in range(600)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    for start, each in enumerate(found):
        assert each == [(f"x{(start * 37 + i) % len(models)}",) for i in range(600)]


# -- What is kept alive ------------------------------------------------------------------------------------------------


def _default(array):
    return lambda x, y=array: x


def _attribute(array):
    def f(x):
        return x

    f.held = array
    return f


def _wrapped(array):
    return jax.jit(lambda x: x + array)


def _partial(array):
    return jax.tree_util.Partial(jax.tree_util.Partial(jnp.add, array), 1.0)


class Keeps:
    def __init__(self, array: jax.Array) -> None:
        self.array = array

    def method(self, x: Any) -> Any:
        return x


KEEPERS = {
    "closure": lambda array: lambda x: x + array,
    "default": _default,
    "attribute": _attribute,
    "jitted closure": _wrapped,
    "plain object": Keeps,
    "bound method": lambda array: Keeps(array).method,
    "module": lambda array: eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(1, 1, key=jax.random.key(0)), array),
    "partial of a partial": _partial,
    "list": lambda array: [array],
}


@pytest.mark.parametrize("name", KEEPERS)
@pytest.mark.filterwarnings("ignore:.*array is being set as static")
def test_no_array_is_kept_alive(name):
    array = jnp.ones(1000)
    held = weakref.ref(array)
    model = Holder(ramp(2), KEEPERS[name](array))
    tp.layout(model)
    _, restructure = tp.ravel(model)
    assert tp.combine(*tp.partition(model)).static is model.static
    assert restructure.layout == tp.layout(model)
    del array, model, restructure
    gc.collect()
    assert held() is None


def test_no_tracer_is_kept_alive():
    def f(x):
        model = Holder(jnp.ones(2) * x, lambda y: y + x)  # a static function that has captured a tracer
        return jnp.sum(tp.ravel(model)[0]) + jnp.sum(tp.partition(model)[0].weight)

    with jax.checking_leaks():
        assert float(jax.jit(f)(2.0)) == 8


@dataclasses.dataclass(frozen=True)
class Settings:
    width: int
    act: Any


def _calls(f: Callable[[], Any]) -> list[str]:
    """The Python functions that a call runs."""
    found: list[str] = []
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        f()
    finally:
        sys.setprofile(None)
    return found


EVERYDAY = [3, "text", jnp.tanh, jax.nn.relu, jax.jit(jnp.sin), lambda x: 2 * x, Settings(2, jax.nn.gelu), Config([1])]


@pytest.mark.parametrize("static", EVERYDAY, ids=lambda static: type(static).__name__)
def test_a_model_with_what_programs_use_every_day_is_remembered(static):
    model = Holder(ramp(2), static)
    assert "scan" in _calls(lambda: tp.layout(eqx.tree_at(lambda m: m.weight, model, ramp(3))))
    tp.layout(model)
    assert "scan" not in _calls(lambda: tp.layout(model))


# -- Pickling ----------------------------------------------------------------------------------------------------------


def test_a_layout_with_bare_objects_among_its_static_values_survives_pickling():
    norm = eqx.nn.BatchNorm(3, "batch", mode="batch")  # before `make_with_state` its marker is an `object()`
    layout = tp.layout(norm)
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert hash(again) == hash(layout)
    assert_usable(again, norm)
    first, second = object(), object()
    assert tp.layout(Holder(ramp(2), (first, first))) != tp.layout(Holder(ramp(2), (first, second)))


def assert_usable(layout, model):
    params, rest = tp.partition(model, layout)
    assert jax.tree.structure(tp.combine(params, rest)) == jax.tree.structure(model)


def test_models_with_other_bare_objects_do_not_share_a_program():
    models = [Holder(ramp(2), object()) for _ in range(2)]
    step = tp.jit(lambda model: tp.maptrainable(lambda x: x + 1, model))
    combine = jax.jit(lambda params, rest: eqx.filter(tp.combine(params, rest), eqx.is_array))
    for model in models:
        assert step(model).static is model.static
        assert combine(*tp.partition(model)).static is model.static
