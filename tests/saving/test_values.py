"""Numbers and texts of a tree: they come back as saved, or are refused by path; arrays that no pytree holds."""

import collections
import concurrent.futures
import dataclasses
import enum
import functools
import json
import logging
import sys
import threading
import types

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
from treeparams._files.values import from_words, in_words
from treeparams._tree.structure import scan_tree
from treeparams.saving import _opaque

from ..zoo import ramp
from .test_saving import JAX_DTYPES, WIDE, patterns


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Each test writes it anew."""
    return tmp_path_factory.mktemp("values") / "model.safetensors"


def exactly(value):
    """Equal for values of one type with the same bits; one NaN of Python stands for all."""
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    return type(value), hex(value) if type(value) is int else repr(value)


# -- They come back as saved -------------------------------------------------------------------------------------------

INTS = [0, -1, 10**18 - 1, 10**18, -(10**18), 2**64, -(3**20_000)]
FLOATS = [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, float("inf"), -float("inf"), float("nan")]
RUN = {
    **{f"int {i}": each for i, each in enumerate(INTS)},
    **{f"float {i}": each for i, each in enumerate(FLOATS)},
    **{f"complex {i}": complex(a, b) for i, (a, b) in enumerate((a, b) for a in FLOATS for b in FLOATS)},
    "flags": [True, False],
    "texts": ["", "gelu", 'é"\\\n\0\u2028😀', np.str_("of NumPy")],
    "numpy": [
        np.bool_(True),
        np.float32(0.1),
        np.int64(-(2**63)),
        np.uint64(2**64 - 1),
        np.complex128(complex(1, -0.0)),
    ],
    "__metadata__": 1,
}


def test_numbers_and_texts_come_back_as_saved(path):
    fresh = jax.tree.map(lambda _: 0, RUN)
    saving.save(path, {"run": RUN, "w": ramp(2)})
    got = saving.load(path, {"run": fresh, "w": ramp(2)})["run"]
    assert list(map(exactly, jax.tree.leaves(got))) == list(map(exactly, jax.tree.leaves(RUN)))
    assert list(saving.names(path)) == ["w"]  # which are arrays
    assert saving.plan(path, {"run": fresh, "w": ramp(2)})(path)["run"] == fresh
    # As few as one value, and no array.
    saving.save(path, 5)
    assert exactly(saving.load(path, 0.5)) == (int, "0x5")


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(value=st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text())
def test_any_number_and_any_text_in_words(value):
    said = in_words(value)
    assert exactly(from_words(json.loads(json.dumps(said)))) == exactly(value)


def test_numpy_scalars_of_each_dtype_with_every_bit():
    count = 0
    for name in [*JAX_DTYPES, *WIDE]:
        for scalar in patterns(name).reshape(-1):
            said = in_words(scalar)
            assert said[0] == f"numpy.{np.dtype(name).name}"
            assert exactly(from_words(said)) == exactly(scalar)
            count += 1
    assert count > 1000


def test_a_run_goes_on_where_it_was(path):
    saving.save(path, {"epoch": 5, "best": 0.3, "lr": np.float32(0.1), "act": "gelu", "w": ramp(2)})
    fresh = lambda: {"epoch": 0, "best": float("inf"), "lr": np.float32(1), "act": "relu", "w": jnp.zeros(2)}
    # `eqx.filter_eval_shape` makes an array without a value of a NumPy scalar; a number of Python stays one.
    for like in (fresh(), eqx.filter_eval_shape(fresh), {**fresh(), "epoch": np.int8(0), "best": 0, "lr": "text"}):
        run = saving.load(path, like)
        assert [exactly(run[name]) for name in ("epoch", "best")] == [(int, "0x5"), (float, "0.3")]
        assert (exactly(run["lr"]), run["act"]) == (exactly(np.float32(0.1)), "gelu")


class Colour(enum.IntEnum):
    RED = 1


def test_functions_objects_and_static_fields_are_those_of_like(path):
    class Model(eqx.Module):
        w: jax.Array
        f: object
        width: int = eqx.field(static=True)

    here, there = object(), object()
    saving.save(path, [Model(ramp(2), jnp.tanh, 3), here, None, Colour.RED, np.datetime64(0, "s"), b"bytes"])
    like = [Model(jnp.zeros(2), jnp.sin, 4), there, None, here, np.datetime64(1, "s"), b""]
    got = saving.load(path, like)
    assert (got[0].f, got[0].width, *got[1:]) == (jnp.sin, 4, *like[1:])
    np.testing.assert_array_equal(got[0].w, ramp(2))


@pytest.mark.parametrize(
    ("saved", "like", "message"),
    [
        (5, ramp(), r"'x' is an array float32\[\] in the tree, int in the file$"),
        (5, jax.ShapeDtypeStruct((), jnp.int32), r"'x' is an array int32\[\] in .*, int in the file; eqx.filter_eval"),
        (np.float32(5), jnp.int32(5), r"'x' is an array int32\[\] in the tree, numpy.float32 in the file$"),
        (
            ramp(),
            5,
            r"'x' is int in the tree, an array float32\[\] in the file; write jnp.asarray\(\.\.\.\) in the tree$",
        ),
        (np.zeros(()), np.float64(5), r"'x' is numpy.float64 in the tree, an array float32\[\] in the file; write"),
        (ramp(2), "text", r"'x' is str in the tree, an array float32\[2\] in the file; write"),
        (ramp(2), jnp.tanh, r"'x' is function in the tree, an array float32\[2\] in the file$"),
        (5, jnp.tanh, "'x' is function in the tree, int in the file$"),
        ("text", object(), "'x' is object in the tree, str in the file$"),
        (jnp.tanh, 5, "'x' is in the tree and not in the file"),
        (None, 5, "'x' is in the tree and not in the file"),
        (5, None, "the file also has 'x', which the tree lacks"),
        ([5, 6], [5], "'x.1' is in the file and not in the tree; nearest: 'x.0'; saving.plan"),
        ([5], [5, 6], "'x.1' is in the tree and not in the file; nearest: 'x.0'; saving.plan"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_does_not_fit_is_refused_by_path(path, saved, like, message):
    saving.save(path, {"w": ramp(2), "x": saved})
    with pytest.raises(ValueError, match=message):
        saving.load(path, {"w": ramp(2), "x": like})


# -- Arrays that no pytree holds ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Buffer:
    items: object
    size: int = 0


class Slotted:
    __slots__ = ("_array", "empty")

    def __init__(self, array):
        self._array = array


class Names(list):
    pass


HELD = {"array": ramp(2)}


def with_a_global(x, shift=HELD["array"]):
    return HELD["array"] + x + shift


class Scale(eqx.Module):
    by: jax.Array

    def __call__(self, x):
        return self.by * x


def with_attribute(function, array):
    function.cache = array
    return function


class Tensor:
    shape, dtype = (2,), "float32"


def objects(*items):
    array = np.empty(len(items), object)
    array[:] = items
    return array


MODULE = r"make Buffer an eqx.Module, or jax.tree_util.register_dataclass\(Buffer\), or leave it out of the tree$"
HIDDEN = {
    "a dataclass": (
        lambda w: Buffer(w),
        r"'x' is a Buffer and not a pytree, .* array \.items \(float32\[2\]\).*; " + MODULE,
    ),
    "a pytree in one": (
        lambda w: Buffer([{"a": (1, eqx.nn.Lambda(w))}]),
        r"its array \.items\[0\]\['a'\]\[1\]\.fn \(",
    ),
    "a namespace": (lambda w: types.SimpleNamespace(a=[w]), r"a SimpleNamespace .* array \.a\[0\] .*; write vars\("),
    "slots": (Slotted, r"a Slotted .* its array \._array "),
    "a deque": (lambda w: collections.deque([1, w]), r"a deque .* array \[1\] .*; write list\(\.\.\.\), or leave it"),
    "a list of another class": (lambda w: Names([w]), r"a Names .* array \[0\] .*; write list"),
    "a partial": (lambda w: functools.partial(jnp.add, w), r"a partial .* \.args\[0\] .*; write jax.tree_util.Partial"),
    "its keywords": (lambda w: functools.partial(jnp.add, y=w), r"a partial .* array \.keywords\['y'\] "),
    "an array of objects": (lambda w: objects(1, [w]), r"a ndarray .* array \[1\]\[0\] .*; write array.tolist\(\)"),
    "NumPy's": (lambda w: Buffer(np.asarray(w)), r"its array \.items \(float32\[2\]\)"),
    "keys": (lambda w: Buffer(jax.random.key(0)), r"its array \.items \(key<fry>\[\]\)"),
    "vmap": (
        lambda w: jax.vmap(Scale(w)),
        r"a function .* array \.__wrapped__\.by .*; keep the model itself in the tree",
    ),
    "checkpoint": (lambda w: jax.checkpoint(Scale(w)), r"a function .* array \.__wrapped__\.by "),
    "jit": (lambda w: jax.jit(Scale(w)), r"its array \.(__wrapped__\.)?by .*; keep the model itself in the tree"),
    "jit of vmap": (lambda w: jax.jit(jax.vmap(Scale(w))), r"its array \.(__wrapped__\.)?by "),
    "a function's own": (lambda w: with_attribute(lambda x: x, w), r"a function .* array \.cache .*"),
    "a partial of a Module": (lambda w: functools.partial(Scale(w), 1), r"a partial .* array \.func\.by "),
    "a mapping": (
        lambda w: types.MappingProxyType({"a": w}),
        r"'x' is a mapping and not a pytree.*; write dict\(\.\.\.\), or leave",
    ),
    "an array of texts": (
        lambda w: np.array(["a"]),
        r"'x' is a ndarray, which is not a JAX array.*array.tolist\(\), or",
    ),
    "an array of others": (lambda w: Tensor(), r"'x' is a Tensor, which is not a JAX array, .*; write np.asarray\("),
    "long double": (
        lambda w: np.longdouble(1),
        r"'x' is a longdouble, which other machines .*; write float\(\.\.\.\) or complex",
    ),
    "a mask": (lambda w: np.ma.masked_array([1.0], [True]), r"'x' is a masked array.*; write array.filled\("),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_an_array_that_would_not_be_saved_is_refused(tmp_path, case):
    make, message = HIDDEN[case]
    with pytest.raises(TypeError, match=message):
        saving.save(tmp_path / "m", {"w": ramp(1), "x": make(ramp(2))})
    assert not any(tmp_path.iterdir())


def test_all_are_named(path):
    with pytest.raises(TypeError, match=r"(?s)'0' is a Buffer .*'1\.a' is a deque "):
        saving.save(path, [Buffer(ramp(2)), {"a": collections.deque([ramp(2)])}])


def test_what_holds_no_array_is_left_alone(path):
    weight, cycle = ramp(2), Buffer(None)
    cycle.items = [cycle, {"a": cycle}, objects(cycle)]
    thread = threading.Thread(target=print)
    tree = {
        "w": weight,
        "functions": [lambda x: weight @ x, len, jnp.sin, jax.nn.relu, jax.nn.silu, jax.jit(jnp.sin), Buffer(1).__eq__],
        "optax": optax.chain(optax.clip(1.0), optax.adam(0.1)),
        "wrapped": [
            eqx.filter_jit(lambda x: weight @ x),
            eqx.nn.Lambda(jnp.tanh),
            jax.tree_util.Partial(jnp.add, weight),
        ],
        "partial": functools.partial(jnp.add, 1.0),
        "others": [cycle, objects("a", 1), np.random.default_rng(0), logging.getLogger(), thread, threading.Lock()],
        "jax": [
            jax.devices()[0],
            jax.sharding.SingleDeviceSharding(jax.devices()[0]),
            Buffer(jax.ShapeDtypeStruct((), int)),
        ],
        "classes": [
            Buffer,
            eqx,
            Colour.RED,
            np.float32,
            range(3),
            collections.deque([1, "a"]),
            with_a_global,
            Buffer(collections.deque([weight])),  # two looks away
            types.SimpleNamespace(a=Slotted(weight)),
            Slotted.__new__(Slotted),
        ],
    }
    saving.save(path, tree)
    assert saving.load(path, tree)["others"] == tree["others"]


def test_each_function_is_looked_at_once(path, monkeypatch):
    """A model has many, of few kinds, and saving costs hardly more for them."""
    looked_at, look = [], _opaque._held_by
    monkeypatch.setattr(_opaque, "_held_by", lambda leaf: looked_at.append(leaf) or look(leaf))
    saving.save(path, {"w": ramp(2), "f": [jnp.tanh, jax.nn.relu, len, 5, "text"] * 100})
    assert looked_at == [jnp.tanh, jax.nn.relu]


# -- Many levels -------------------------------------------------------------------------------------------------------


def nested(levels):
    tree = ramp(2)
    for _ in range(levels):
        tree = {"a": tree}
    return tree


def in_thread(call):
    """Levels that jaxlib loses belong to a thread."""
    limit = sys.getrecursionlimit()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()
    finally:
        sys.setrecursionlimit(limit)


def is_taken_by_jax(tree):
    try:
        jax.tree.flatten(tree)
    except Exception:  # one of several
        return False
    return True


def test_a_deep_tree_is_saved_as_deep_as_jax_takes_it(path):
    there_and_back = lambda tree: [saving.save(path, tree), saving.load(path, tree)][1]

    def too_deep(tree):
        for call in (lambda: saving.save(path, tree), lambda: saving.load(path, tree), lambda: tp.layout(tree)):
            with pytest.raises(ValueError, match=r"the tree is nested too deeply for jax\.tree\.flatten"):
                call()
        assert not tp.diff(there_and_back(nested(500)), nested(500))  # there are levels left

    for levels in (700, 3000):
        tree = nested(levels)
        takes = in_thread(functools.partial(is_taken_by_jax, tree))
        assert takes or levels == 3000
        in_thread(functools.partial(there_and_back if takes else too_deep, tree))
    # Python has fewer levels than JAX from 3.12 on. There is no recursion in what reads a tree.
    _, treedef = jax.tree.flatten(nested(700))
    in_thread(lambda: [sys.setrecursionlimit(120), scan_tree(nested(700), [ramp(2)], treedef)])


# -- In words ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_type_checks")
def test_the_path_comes_first(path):
    model = {"w": ramp(2)}
    saving.save(path, model)
    for wrong in (model, eqx.nn.Identity(), jnp.tanh, ramp(2), None, 5, [path]):
        for call in (saving.save, saving.load):
            with pytest.raises(
                TypeError, match=r"expected the path of a file, got .*it comes first: saving.save\(path, "
            ):
                call(wrong, path)
    for tree in ("a text", path, bytes(path)):
        with pytest.raises(
            TypeError, match=r"expected a tree of arrays, got the text .*comes first: saving.save\(path, m"
        ):
            saving.save("a text", tree)
        with pytest.raises(
            TypeError, match=r"expected a tree of arrays, got the text .*comes first: saving.load\(path, l"
        ):
            saving.load("a text", tree)


@pytest.mark.parametrize("at", ["optimiser", ""])
@pytest.mark.parametrize(("saved", "wanted"), [("tree", "vector"), ("tree", "stacks"), ("vector", "tree")])
def test_a_state_of_another_form_is_named_with_the_line_that_carries_it(path, saved, wanted, at):
    model = {"a": ramp(2), "b": ramp(3)}
    in_tree = lambda state: {"optimiser": state} if at else state
    tx, before = (optim.trainable(optax.sgd(0.1, momentum=0.5), form=form) for form in (wanted, saved))
    stepped = lambda tx: optim.step(tx, tp.copy(model), tx.init(model), model)[1]
    saving.save(path, in_tree(stepped(before)))
    with pytest.raises(ValueError, match=f"'{at}' has the form '{saved}' in the file, '{wanted}' in the tree") as error:
        saving.load(path, in_tree(tx.init(model)))
    line = str(error.value).splitlines()[-1]
    state = eval(line.removeprefix("state = "), {"saving": saving, "model": model, "tx": tx, "path": path})
    assert not tp.diff(state, stepped(tx))


@pytest.mark.parametrize("at", ["optimiser", ""])
def test_a_state_of_plain_optax_is_named(path, at):
    model, rule = {"a": ramp(2), "b": ramp(3)}, optax.adam(0.1)
    tx = optim.trainable(rule)
    in_tree = lambda state: {"optimiser": state} if at else state
    saving.save(path, in_tree(rule.init(model)))
    with pytest.raises(
        ValueError, match=f"'{at}' is one of plain Optax .* write state = optim.from_optax\\(tx, state, m"
    ):
        saving.load(path, in_tree(tx.init(model)))
    theirs = saving.load(path, in_tree(rule.init(model)))
    assert not tp.diff(optim.from_optax(tx, theirs["optimiser"] if at else theirs, model), tx.init(model))
