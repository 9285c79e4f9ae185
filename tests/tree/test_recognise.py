"""Trees recognised again: static values compared as a compiler must, no tree taken for another, nothing kept alive."""

import collections
import concurrent.futures
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving
from treeparams._tree import structure

from ..verbs import OTHERS, VERBS
from ..zoo import STACKS, VECTOR, ramp

pytestmark = pytest.mark.filterwarnings("ignore:.*array is being set as static")


class Holder(eqx.Module):
    weight: jax.Array
    static: Any = eqx.field(static=True)


def holding(static: Any) -> tp.Layout:
    return tp.layout(Holder(ramp(2), static))


@dataclasses.dataclass(frozen=True)
class Config:
    depth: Any
    other: Any = dataclasses.field(default=None, compare=False)


ARRAY = np.arange(3)


STATIC = [  # two values, and whether they are equal
    (2, 2.0, False),
    (1, True, False),
    (0.0, -0.0, False),
    (float("nan"), float("nan"), True),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),  # a program can tell the order
    ((Config(1),), (Config(True),), False),
    ((Config(1, 2),), (Config(1, 5),), False),  # though `==` says that they are
    ({1, 2}, {2, 1}, True),
    (functools.partial(max, 1), functools.partial(max, 1.0), False),
    (np.float32(1), np.float64(1), False),
    ([ARRAY], [ARRAY], True),  # arrays by identity
    (ARRAY, ARRAY.copy(), False),
    (object(), object(), False),
]


@pytest.mark.parametrize(("here", "there", "equal"), STATIC)
def test_static_fields_compare_by_type_and_value(here: Any, there: Any, equal: bool):
    these, those = holding(here), holding(there)
    assert these == holding(here)
    assert (these == those) is equal
    assert not equal or hash(these) == hash(those)
    assert [row.what for row in these.diff(those).rows] == [] if equal else ["static"]


class Plain:
    def __init__(self, sizes: list[Any]) -> None:
        self.sizes = sizes

    def __call__(self, x: Any) -> Any:
        return x


MUTABLE = {
    "plain object": (lambda: Plain([1]), lambda value: value.sizes.append(2)),
    "bound method": (lambda: Plain([1]).__call__, lambda value: value.__self__.sizes.append(2)),
}


@pytest.mark.parametrize(("make", "change"), MUTABLE.values(), ids=MUTABLE)
@pytest.mark.parametrize("is_leaf", [False, True])
def test_a_value_that_changes_in_place_leaves_no_stale_trace(make, change, is_leaf):
    value, traces = make(), []
    combine = jax.jit(lambda params, rest: traces.append(tp.combine(params, rest)))
    model = eqx.nn.Lambda(value) if is_leaf else Holder(ramp(2), value)
    layout = tp.layout(model)
    for run in (tp.jit(lambda model: traces.append(1)), lambda model: combine(*tp.partition(model))):
        traces.clear()
        for count in (1, 2):
            run(model), run(model)
            assert len(traces) == count
            change(value)
    assert (tp.layout(model) == layout) is is_leaf  # a leaf that is no array is a value


# -- One tree is not taken for another ---------------------------------------------------------------------------------

arrays = [ramp(2), ramp(3), np.ones(2, "f"), np.ones(2, "i"), np.array(["x"]), np.array(None), np.array([0], "M8[D]")]
kinds = st.sampled_from([*arrays, 1, 1.0, True, "x"])


@pytest.mark.filterwarnings("ignore:.*a Python number is not a parameter")
@hypothesis.settings(deadline=None, max_examples=80, derandomize=True)
@hypothesis.given(st.lists(st.tuples(kinds, kinds), min_size=2, max_size=6))
def test_what_was_met_before_makes_no_difference(trees):
    parameter = lambda x: hasattr(x, "dtype") and x.dtype.kind == "f"
    for tree in trees:
        once = tree[0] is tree[1] and parameter(tree[0])
        want = tuple(str(i) for i, leaf in enumerate(tree) if parameter(leaf) and not (once and i))
        assert tp.layout(tree).paths == want


def test_eight_threads_meet_more_structures_than_are_remembered(monkeypatch):
    monkeypatch.setattr(structure, "_BUCKETS", 5)
    models = [{f"x{i}": ramp(2), **{str(j): j for j in range(i % 7)}} for i in range(50)]
    met = lambda start: [tp.layout(models[(start * 37 + i) % 50]).paths for i in range(60)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for start, each in enumerate(pool.map(met, range(8))):
            assert each == [(f"x{(start * 37 + i) % 50}",) for i in range(60)]


# -- What is kept alive ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _only_new_garbage():
    """Collections look at what the test makes alone; to look at all that earlier tests have made takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_no_tracer_is_kept_alive():
    def f(x):
        model = Holder(jnp.ones(2) * x, lambda y: y + x)  # a static function that has captured a tracer
        return jnp.sum(tp.ravel(model)[0]) + jnp.sum(tp.partition(model)[0].weight)

    with jax.checking_leaks():
        assert float(jax.jit(f)(2.0)) == 8


def thawed(form: Any) -> Any:
    tx = form(optax.sgd(0.1, momentum=0.9))
    texts = lambda model, state: str(optim.report(tx, model)) + str(tp.summary(state))
    return lambda model: texts(model, optim.set_trainable(tx, tx.init(model), model, None))


USES = {
    **VERBS,
    **OTHERS,
    "str": lambda model: str(tp.layout(model)) + str(tp.summary(model)) + tp.layout(model).digest,
    "where": lambda model: tp.layout(model, lambda model: model.weight),
    "restructure": lambda model: (lambda vector, restructure: restructure(vector))(*tp.ravel(model)),
    "diff": lambda model: str(tp.diff(model, tp.copy(model))),
    "tie": lambda model: tp.tie((model, tp.copy(model)), "1.weight", to="0.weight"),
    "dumps": lambda model: saving.dumps(model),
    **{f"thawed {i}": thawed(form) for i, form in enumerate((optim.trainable, VECTOR, STACKS))},
}
CAPTURE = {
    "closure": lambda marker: lambda: marker,
    "jitted closure": lambda marker: jax.jit(lambda x: (x, marker)[0]),
    "list": lambda marker: [marker],
    "instance of a local class": lambda marker: type("Local", (), {"get": lambda self: marker})(),
}


def bind(held: Any, x: jax.Array) -> jax.Array:
    return x.T


def use_in_transform_rule_and_leaf(marker: Plain) -> None:
    ties = {"b": ("a", functools.partial(bind, marker))}
    assert tp.layout({"a": ramp(2, 3), "b": ramp(3, 2)}, ties=ties).ties == {"a": ("b",)}
    rule = optax.sgd(0.1, momentum=0.9)
    holds = optax.GradientTransformation(rule.init, lambda *args: (marker, rule.update(*args))[1])
    VECTOR(holds).init({"a": ramp(2), "b": ramp(3)})
    model = {"a": ramp(2), "leaf": type("Leaf", (), {"get": lambda self: marker})()}
    tp.combine(*tp.partition(model)), str(tp.summary(model)), str(tp.diff(model, model))


@pytest.mark.filterwarnings("ignore:.*(layout of such a model|one array)")
def test_nothing_that_a_static_field_a_transform_a_rule_or_a_leaf_captures_lives_on():
    def used(use: Callable[[Plain], object]) -> weakref.ref[Plain]:
        use(marker := Plain([]))
        return weakref.ref(marker)

    # A program is compiled for each static value, so not every form is tried with every value.
    of = lambda size, verb, capture: lambda marker: USES[verb](Holder(ramp(size), CAPTURE[capture](marker)))
    held = {(verb, "closure"): used(of(2, verb, "closure")) for verb in USES}
    held |= {(verb, capture): used(of(3, verb, capture)) for verb in ("partition", "jit") for capture in CAPTURE}
    held["transform, rule, leaf", ""] = used(use_in_transform_rule_and_leaf)
    jax.clear_caches()
    gc.collect()
    assert [key for key, ref in held.items() if ref() is not None] == []


def test_memories_of_many_models_are_bounded(monkeypatch):
    monkeypatch.setattr(structure, "_known", collections.OrderedDict())
    monkeypatch.setattr(structure, "_BUCKETS", 20)
    array = ramp(2)
    for i in range(80):  # dictionaries of as many leaves are one to JAX's hash
        tp.layout({f"x{i}": array})
    assert [*map(len, structure._known.values())] == [structure._PER_BUCKET]
    for i in range(30):
        tp.layout([array, *["name"] * i])
    assert len(structure._known) == 20
