"""Static values are compared as a compiler must, and what is remembered keeps nothing alive."""

import dataclasses
import functools
import gc
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp


class Holder(eqx.Module):
    w: jax.Array
    static: Any = eqx.field(static=True)


def holding(static: Any) -> tp.Layout:
    return tp.layout(Holder(jnp.ones(2), static))


@dataclasses.dataclass(frozen=True)
class Config:
    depth: Any


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize(
    ("here", "there", "equal"),
    [
        (2, 2, True),
        (2, 2.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ([1, (2,)], [1, (2,)], True),
        ({"a": 1}, {"a": 1.0}, False),
        ({1: "a"}, {True: "a"}, False),
        (Config(2), Config(2), True),
        (Config(2), Config(2.0), False),
        ((Config(1),), (Config(True),), False),
        (slice(0, 2), slice(0, 2), True),
        (np.float32(1), np.float32(1), True),
        (np.float32(1), np.float64(1), False),
    ],
)
def test_static_fields_compare_by_type_and_value(here: Any, there: Any, equal: bool):
    these, those = holding(here), holding(there)
    assert (these == those) is equal
    assert (these.diff(those) == "") is equal
    assert not equal or hash(these) == hash(those)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_static_arrays_compare_by_identity():
    array = np.arange(3)
    assert holding(array) == holding(array)
    assert holding(array) != holding(array.copy())
    assert holding([array]) == holding([array])


def test_a_static_list_that_changes_changes_no_layout():
    model = Holder(jnp.ones(2), (config := ["of this test"]))
    before = tp.layout(model)
    config.append(2)
    assert tp.layout(model) == holding(["of this test", 2])
    assert before == holding(["of this test"])


@dataclasses.dataclass(frozen=True)
class Base:
    n: int


class Extended(Base):
    def __init__(self, n, k):
        super().__init__(n)
        object.__setattr__(self, "k", k)

    def __eq__(self, other):
        return (self.n, self.k) == (other.n, other.k)

    def __hash__(self):
        return hash((self.n, self.k))


@pytest.mark.parametrize(
    ("one", "other"),
    [(Extended(1, 2), Extended(1, 5)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (object(), object())],
)
def test_static_values_that_a_program_can_tell_apart_differ(one, other):
    first, second = (holding(each) for each in (one, other))
    assert first != second
    assert first == holding(one)
    assert "static values" in first.diff(second)


def test_a_closure_is_not_kept_alive():
    array = jnp.ones(1000)
    seen = weakref.ref(array)
    holding(functools.partial(jnp.add, array))
    holding((lambda held: lambda x: x + held)(array))
    del array
    gc.collect()
    assert seen() is None


def test_what_is_remembered_is_bounded():
    model = {"w": jnp.ones(2), "b": jnp.ones(2)}
    layouts = [weakref.ref(tp.layout(model, f"[w{chr(0x4E00 + i)}]")) for i in range(600)]
    gc.collect()
    assert sum(layout() is not None for layout in layouts) <= 256


def test_a_closure_over_numbers_is_recognised_again():
    model = Holder(jnp.ones(2), (lambda scale: lambda x: scale * x)(2.0))
    assert tp.layout(model) is tp.layout(model)
    held = Holder(jnp.ones(2), (lambda scale: lambda x: scale * x)(jnp.ones(2)))
    assert tp.layout(held) is not tp.layout(held)
    assert tp.layout(held) == tp.layout(held)


def test_many_models_that_differ_in_static_values_alone():
    models = [Holder(jnp.ones(2), ("version", i)) for i in range(100)]
    layouts = [tp.layout(model) for model in models]
    assert len(set(layouts)) == 100
    assert [tp.layout(model) for model in models] == layouts
